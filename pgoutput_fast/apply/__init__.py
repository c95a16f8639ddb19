"""Turn changes into tables of a target: DuckDB, Delta, Iceberg, Parquet, or a target of your own.

:func:`sync` keeps tables up to date with a server, and applies each change exactly once.
:func:`fold` computes the net changes of a table: one row for each key that the changes touch.
"""

from __future__ import annotations

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    from ..errors import PgOutputError

    raise PgOutputError(
        f"tables need pyarrow ({error})",
        code="missing_package",
        hint="Install pgoutput-fast[arrow]; pgoutput-fast[delta] and pgoutput-fast[duckdb] include "
        "it",
    ) from error

from .folding import NetChanges, fold
from .synchronize import sync
from .syncing import SyncProgress

__all__ = ["NetChanges", "SyncProgress", "fold", "sync"]


def __dir__() -> list[str]:
    """The public names, without those that this module imports."""
    return sorted(__all__)
