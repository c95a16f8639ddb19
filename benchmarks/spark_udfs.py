"""Decode frames in each way in which Spark calls Python, with both implementations and pypgoutput.

Each function takes a DataFrame whose column ``data`` has Insert and Update frames of one relation,
and returns a DataFrame with the columns of the new rows. They are typed, but str with pypgoutput,
which has no typed values. The Relation frames that a worker needs are passed to it.
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

_MODULES = {"pgoutput_fast": "pgoutput_fast.decoding._core", "twin": "pgoutput_fast.decoding._pure"}


@functools.cache
def row_decoder(who: str, relations: tuple[bytes, ...]) -> Callable[[bytes], tuple[Any, ...]]:
    """A function that takes a frame and returns the columns of its new row."""
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
    """The columns of the new rows of many frames."""
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
    """Decode by a UDF that is called for each row, with pickled values."""
    from pyspark.sql.functions import udf

    call = udf(lambda frame: row_decoder(who, relations)(bytes(frame)), schema, useArrow=False)
    return frames.select(call("data").alias("after")).select("after.*")


def pandas(frames: DataFrame, schema: StructType, who: str, relations: Any) -> DataFrame:
    """Decode by a pandas UDF: a Series of frames becomes a DataFrame."""
    # Imported in this way because pyspark's stubs ask for type hints, which `call` must not have.
    pandas_udf: Any = importlib.import_module("pyspark.sql.functions").pandas_udf
    names = schema.names

    def call(data):  # type: ignore[no-untyped-def] # Spark would infer the kind of UDF from hints
        columns = columns_of(who, relations, names, pa.array(data.to_list(), pa.binary()))
        return pa.RecordBatch.from_arrays(columns, names).to_pandas()

    module = importlib.import_module("pandas")
    call.__annotations__ = {"data": module.Series, "return": module.DataFrame}
    return frames.select(pandas_udf(call, schema)("data").alias("after")).select("after.*")


def arrow(frames: DataFrame, schema: StructType, who: str, relations: Any) -> DataFrame:
    """Decode by an Arrow UDF: an array of frames becomes an array of structs."""
    arrow_udf: Any = importlib.import_module("pyspark.sql.functions").arrow_udf
    names = schema.names

    def call(data):  # type: ignore[no-untyped-def]
        return pa.StructArray.from_arrays(columns_of(who, relations, names, data), names)

    call.__annotations__ = {"data": pa.Array, "return": pa.Array}
    return frames.select(arrow_udf(call, schema)("data").alias("after")).select("after.*")


def map_in_arrow(frames: DataFrame, schema: StructType, who: str, relations: Any) -> DataFrame:
    """Decode in mapInArrow: record batches of frames become record batches of columns."""
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
