"""The ways that Spark has to call Python, each with ours, the twin and pypgoutput.

Each takes a DataFrame whose column ``data`` has frames of Insert and Update of one relation, and
gives one with the new row's columns: typed, or as str from pypgoutput, which has no other. What a
worker needs of the stream before them, the Relations, is handed to it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pgoutput_fast import ColumnarDecoder

from .columns import twin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

DECODERS = ("pgoutput_fast", "twin", "pypgoutput")

_MODULES = {"pgoutput_fast": "pgoutput_fast._core", "twin": "pgoutput_fast._pure"}


@functools.cache
def row_decoder(who: str, relations: tuple[bytes, ...]) -> Callable[[bytes], tuple[Any, ...]]:
    """A function from a frame to its new row's columns."""
    if who == "pypgoutput":
        decoders = importlib.import_module("pypgoutput.decoders")
        classes = {ord("I"): decoders.Insert, ord("U"): decoders.Update}
        return lambda frame: tuple(
            [column.col_data for column in classes[frame[0]](frame).new_tuple.column_data]
        )
    decoder = importlib.import_module(_MODULES[who]).Decoder()
    for frame in relations:
        decoder.decode(frame)
    return lambda frame: decoder.decode(frame).new.values()


@functools.cache
def _columnar(who: str, relations: tuple[bytes, ...]) -> ColumnarDecoder:
    with twin() if who == "twin" else contextlib.nullcontext():
        decoder = ColumnarDecoder(target="spark")
        for _ in decoder.decode(list(relations)):
            pass
    return decoder


def columns_of(
    who: str, relations: tuple[bytes, ...], names: Sequence[str], frames: pa.Array
) -> list[pa.Array]:
    """The new rows' columns of many frames."""
    if who == "pypgoutput":
        rows = list(map(row_decoder(who, relations), frames.to_pylist()))
        return [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    with twin() if who == "twin" else contextlib.nullcontext():
        found = [
            pa.record_batch(batch).column("after")
            for batch in _columnar(who, relations).decode(frames)
        ]
    after = found[0] if len(found) == 1 else pa.concat_arrays(found)
    return [after.field(i) for i in range(len(names))]


def pickled(frames: DataFrame, schema: StructType, who: str, relations: Any) -> DataFrame:
    """A UDF of single rows, pickled."""
    from pyspark.sql.functions import udf

    call = udf(lambda frame: row_decoder(who, relations)(bytes(frame)), schema, useArrow=False)
    return frames.select(call("data").alias("after")).select("after.*")


def pandas(frames: DataFrame, schema: StructType, who: str, relations: Any) -> DataFrame:
    """A pandas UDF: a Series of frames into a DataFrame."""
    # Its stubs want hints that only the annotations below have.
    pandas_udf: Any = importlib.import_module("pyspark.sql.functions").pandas_udf
    names = schema.names

    def call(data):  # type: ignore[no-untyped-def] # Spark would take hints for the kind of UDF
        columns = columns_of(who, relations, names, pa.array(data.to_list(), pa.binary()))
        return pa.RecordBatch.from_arrays(columns, names).to_pandas()

    module = importlib.import_module("pandas")
    call.__annotations__ = {"data": module.Series, "return": module.DataFrame}
    return frames.select(pandas_udf(call, schema)("data").alias("after")).select("after.*")


def arrow(frames: DataFrame, schema: StructType, who: str, relations: Any) -> DataFrame:
    """An Arrow UDF: an array of frames into one of structs."""
    arrow_udf: Any = importlib.import_module("pyspark.sql.functions").arrow_udf
    names = schema.names

    def call(data):  # type: ignore[no-untyped-def]
        return pa.StructArray.from_arrays(columns_of(who, relations, names, data), names)

    call.__annotations__ = {"data": pa.Array, "return": pa.Array}
    return frames.select(arrow_udf(call, schema)("data").alias("after")).select("after.*")


def map_in_arrow(frames: DataFrame, schema: StructType, who: str, relations: Any) -> DataFrame:
    """mapInArrow: batches of frames into batches of columns."""
    names = schema.names

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = columns_of(who, relations, names, batch.column("data"))
            yield pa.RecordBatch.from_arrays(columns, names)

    return frames.mapInArrow(call, schema)


WAYS: dict[str, Callable[[DataFrame, StructType, str, Any], DataFrame]] = {
    "pickled UDF": pickled,
    "pandas UDF": pandas,
    "Arrow UDF": arrow,
    "mapInArrow": map_in_arrow,
}
