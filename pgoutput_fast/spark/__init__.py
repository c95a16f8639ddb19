"""Read PostgreSQL's changes as Spark DataFrames, and keep Delta tables up to date with Spark.

:func:`read_segments` and :func:`decode_frames` return the changes of a table.
:func:`current_state` returns the rows that the table holds after these changes. The source
``format("pgoutput")``, :class:`PgOutputDataSource`, reads changes as batch and streaming
DataFrames; :class:`PgOutputQueryListener` reports how far such streams are. :func:`sync` keeps
Delta tables up to date.
"""

from __future__ import annotations

try:
    import pandas as _pandas  # type: ignore[import-untyped]  # noqa: F401 - PySpark asks for it
    import pyarrow as _pyarrow  # noqa: F401
    import pyspark as _pyspark  # noqa: F401
except ImportError as error:
    from pgoutput_fast.errors import PgOutputError

    raise PgOutputError(
        f"this needs PySpark, pyarrow and pandas ({error})",
        code="missing_package",
        hint="Install the extra pgoutput-fast[spark]",
    ) from error

from typing import TYPE_CHECKING, Any

from ._session import session
from ._worker_errors import error_of
from .arrow_frames import frames_dataframe
from .dataframes import decode_frames, read_segments
from .frame_columns import decode_udf
from .state import current_state

if TYPE_CHECKING:
    from .data_source import PgOutputDataSource
    from .query_listener import PgOutputQueryListener
    from .sync_engine import SparkEngine, sync

__all__ = [
    "PgOutputDataSource",
    "PgOutputQueryListener",
    "SparkEngine",
    "current_state",
    "decode_frames",
    "decode_udf",
    "error_of",
    "frames_dataframe",
    "read_segments",
    "session",
    "sync",
]


def __getattr__(name: str) -> Any:
    # Imported on use: these modules need more than the others. The source and the listener need
    # a newer PySpark, the engine and sync need deltalake.
    if name == "PgOutputDataSource":
        from .data_source import PgOutputDataSource

        return PgOutputDataSource
    if name == "PgOutputQueryListener":
        from .query_listener import PgOutputQueryListener

        return PgOutputQueryListener
    if name in ("SparkEngine", "sync"):
        from . import sync_engine

        return getattr(sync_engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
