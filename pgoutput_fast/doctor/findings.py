"""The findings of an examination, as objects and as JSON."""

from __future__ import annotations

import dataclasses
import json

from .kinds import KINDS, Level

FORMAT_VERSION = 1
"""The version of the JSON format. It changes if a field changes its meaning or is removed."""

LEVELS: tuple[Level, ...] = ("error", "warning", "info")
"""The levels of findings, the worst first."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes
    ----------
    id : str
        A key of `KINDS`, which has the level and the meaning.
    found : str
        What was found, with numbers and the first names.
    sql : tuple of str
        Statements that fix it, to run one by one, in this order, in the examined database. Empty if
        SQL can't fix it.
    advice : str or None
        What else you have to do or decide; None if there is nothing.
    objects : tuple of str
        Names of all objects concerned: tables as SQL writes them, slots, publications, settings.
    """

    id: str
    found: str
    sql: tuple[str, ...] = ()
    advice: str | None = None
    objects: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        """How bad the finding is: "error", "warning" or "info"."""
        return KINDS[self.id].level

    @property
    def meaning(self) -> str:
        """What the finding means."""
        return KINDS[self.id].meaning


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """The result of an examination.

    Attributes
    ----------
    server_version : int
        As libpq gives it: 180004 is 18.4.
    database, role : str
    publications : tuple of str
        The examined publications.
    slot : str or None
        The examined slot.
    findings : tuple of Finding
        Errors first, then warnings, then findings of level "info".
    """

    server_version: int
    database: str
    role: str
    publications: tuple[str, ...]
    slot: str | None
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        """Whether no finding is an error."""
        return not self.of_level("error")

    def of_level(self, level: Level) -> tuple[Finding, ...]:
        """Return the findings of a level, in their order."""
        return tuple(finding for finding in self.findings if finding.level == level)

    def to_json(self) -> str:
        """Return one JSON object in the format of docs/reference/doctor.md."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "server_version": self.server_version,
                "database": self.database,
                "role": self.role,
                "publications": self.publications,
                "slot": self.slot,
                "ready": self.ready,
                "findings": [
                    {
                        "id": finding.id,
                        "level": finding.level,
                        "found": finding.found,
                        "meaning": finding.meaning,
                        "objects": finding.objects,
                        "sql": finding.sql,
                        "advice": finding.advice,
                    }
                    for finding in self.findings
                ],
            },
            ensure_ascii=True,
            indent=1,
        )
