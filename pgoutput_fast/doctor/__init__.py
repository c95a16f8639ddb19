"""Examine whether a server is ready for capture, and give the SQL that repairs it.

:func:`examine` checks settings, roles, slots, publications and tables, and returns findings.

>>> from pgoutput_fast.doctor import examine
>>> report = examine("postgresql:///shop", publications=["shop"], slot="lake")
>>> for finding in report.findings:
...     print(finding.level, finding.id, finding.found, *finding.sql)

docs/reference/doctor.md has the table of all findings.
"""

from __future__ import annotations

from .. import connections as _connections  # noqa: F401 - it says which extra is missing
from .examination import examine
from .findings import LEVELS, DoctorReport, Finding
from .kinds import KINDS, Kind, Level

__all__ = ["KINDS", "LEVELS", "DoctorReport", "Finding", "Kind", "Level", "examine"]
