"""Where Spark finds the source `pgoutput` by itself, as it imports each package `pyspark_…`."""

from __future__ import annotations

from pgoutput_fast.spark.data_source import PgOutputDataSource as DefaultSource

__all__ = ["DefaultSource"]
