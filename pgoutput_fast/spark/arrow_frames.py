"""Make a DataFrame in stream order from frames in Arrow, such as the frames of segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pgoutput_fast.errors import PgOutputError

from .dataframes import check_session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame, SparkSession


def frames_dataframe(
    spark: SparkSession, frames: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch]
) -> DataFrame:
    """Make a DataFrame of frames for :func:`decode_frames`, in one partition and in their order.

    Spark's own functions refuse Arrow's unsigned integers of 32 and 64 bits, the types of xids and
    LSNs. They also divide the frames into partitions, so that rows lose the Relations before them.

    Parameters
    ----------
    spark : SparkSession
    frames : pyarrow.Table, RecordBatch, or iterable of RecordBatch
        The column `data` has the frames, in the order of the stream. Other columns stay.

    Returns
    -------
    DataFrame
        The same columns: `data` becomes binary, unsigned integers become bigint.

    Raises
    ------
    PgOutputError
        There is no column `data`, or a number is greater than any bigint.
    """
    check_session(spark)
    if isinstance(frames, pa.RecordBatch):
        frames = [frames]
    table = frames if isinstance(frames, pa.Table) else pa.Table.from_batches(frames)
    if "data" not in table.schema.names:
        raise PgOutputError(
            "the frames must be in a column named data; there are " + ", ".join(table.schema.names),
            code="unfit_input",
        )
    try:
        spark_table = table.cast(pa.schema([(field.name, _type(field)) for field in table.schema]))
    except pa.ArrowException as error:
        raise PgOutputError(
            f"Spark has no type for a column beside data: {error}", code="unfit_input"
        ) from error
    return spark.createDataFrame(spark_table).coalesce(1)


def _type(field: Any) -> pa.DataType:
    if field.name == "data":
        return pa.binary()
    return pa.int64() if field.type in (pa.uint32(), pa.uint64()) else field.type
