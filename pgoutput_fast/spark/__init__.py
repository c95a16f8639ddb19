"""PostgreSQL's changes as Spark DataFrames.

:func:`read_segments` and :func:`decode_frames` give the changes of a table,
:func:`current_state` the rows that the table holds after them.
"""

from __future__ import annotations

try:
    import pandas as _pandas  # type: ignore[import-untyped]  # noqa: F401 - PySpark asks for it
    import pyarrow as _pyarrow  # noqa: F401
    import pyspark as _pyspark  # noqa: F401
except ImportError as error:
    from pgoutput_fast.errors import PgOutputError

    raise PgOutputError(
        f"this needs PySpark, pyarrow and pandas ({error}); install the extra pgoutput-fast[spark]"
    ) from error

from ._session import session
from .dataframes import decode_frames, read_segments
from .state import current_state

__all__ = ["current_state", "decode_frames", "read_segments", "session"]
