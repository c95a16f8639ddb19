"""Where Spark finds the source `pgoutput` by itself, as it imports each package `pyspark_…`."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

from pgoutput_fast.errors import PgOutputError

__all__ = ["DefaultSource"]

DefaultSource: type[DataSource]

try:
    from pgoutput_fast.spark.data_source import PgOutputDataSource as DefaultSource
except PgOutputError as error:
    # Spark does without every such package if one of them can't be imported, so this is told to
    # those who ask for the source.
    _LACKING = error

    class _Lacking(DataSource):
        """A source that this Spark can't have."""

        def __init__(self, options: dict[str, str]) -> None:  # noqa: ARG002 - Spark gives them
            raise PgOutputError(_LACKING.message, code=_LACKING.code, hint=_LACKING.hint)

        @classmethod
        def name(cls) -> str:
            return "pgoutput"

    DefaultSource = _Lacking
