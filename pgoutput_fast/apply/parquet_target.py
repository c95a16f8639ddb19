"""The target of plain Parquet files: change tables only, in a directory or in object storage.

The change tables are of class `ParquetTable`. As in a Delta target, each table has its position in
its own log, and the Delta table `_progress` is committed last in a window. There are no state
tables, so a table needs no snapshot and no key.
"""

from __future__ import annotations

from typing import Any

from .delta_target import DeltaTarget
from .parquet_table import ParquetTable
from .targets import RememberedOptions

_NO_OPTIONS = RememberedOptions()


class ParquetTarget(DeltaTarget):
    """A `Target` of plain Parquet files; see `DeltaTarget` for the parameters."""

    change_tables = ParquetTable
    _kind = "parquet"

    def __init__(
        self, *arguments: Any, remembered: RememberedOptions = _NO_OPTIONS, **options: Any
    ) -> None:
        super().__init__(*arguments, remembered=remembered._replace(keep="changes"), **options)
