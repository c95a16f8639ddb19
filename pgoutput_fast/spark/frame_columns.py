"""Decode a column of frames that stand alone, as frames from Kafka or files do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

import pgoutput_fast as pf
from pgoutput_fast.errors import DecodeError, PgOutputError
from pgoutput_fast.protocol.messages import Relation, Truncate

from ._executor import FixedVersion, FrameReader
from ._worker_errors import worker_errors
from .dataframes import check_session, frames_target, partition, settings_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import Column

    from pgoutput_fast.policies import Policies
    from pgoutput_fast.types import TypeRegistry

    from ._executor import ExecutorTarget
    from .dataframes import Relations

_ROW_TAGS = [ord(tag) for tag in "IUD"]
"""The tags of messages with one row; the relation id follows the tag."""

_XID_BYTES = 4

_COLUMNS = ("op", "old_kind", "before", "after", "unchanged")


def decode_udf(
    data: Column | str,
    table: str,
    relations: Relations,
    schema: T.StructType | str | None = None,
    *,
    encoding: str = "utf-8",
    registry: TypeRegistry | None = None,
    policies: Policies | None = None,
) -> Column:
    """Decode a column of frames into a column of one table's changes.

    Each frame stands alone, in any order and any partition. Every row of the table is decoded by
    the Relation in `relations`. The query fails on a row with another number of columns, and on a
    Relation of the table with other columns. So if the table was altered, decode the frames before
    and after the alteration in two columns. A row of another version with the same number of
    columns is not noticed. From Spark 4.1 on, the function gets Arrow arrays. Spark 4.0 calls it
    for each row, which takes longer.

    Parameters
    ----------
    data : Column or str
        The frames, or the name of their column (binary), as in :func:`decode_frames`. Frames from
        inside stream chunks can't stand alone: the query fails on those of the table. Convert them
        to protocol 1's form before.
    table : str
        ``namespace.name``, as in :func:`decode_frames`.
    relations : mapping or iterable of Relation
        As in :func:`decode_frames`.
    schema : StructType or str, optional
        The table's columns and their types; by default those of the table's Relation.
    encoding : str
        The client_encoding of the session that sent the frames.
    registry, policies : optional
        As in :func:`decode_frames`.

    Returns
    -------
    Column
        A struct of `op`, `old_kind`, `before`, `after` and `unchanged`, like the columns of
        :func:`decode_frames`. It is null for a null frame, and for a frame that is neither a row
        nor a TRUNCATE of the table. ``to_variant_object`` makes it a VARIANT; one such column can
        have changes of several tables.

    Raises
    ------
    PgOutputError
        The table is not in `relations`, or there in two versions. The query itself fails if a
        frame can't be decoded or does not fit the Relation.
    """
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    if spark is not None:
        check_session(spark)
    settings = settings_of(registry, policies, encoding)
    changes, target = frames_target(table, relations, schema, settings, lambda: ())
    if target.version is None:
        raise PgOutputError(
            f"none of them is a Relation of {table}",
            code="bad_option",
            parameter="relations",
            hint="Check the table's name",
            table=table,
        )
    returned = T.StructType([changes[name] for name in _COLUMNS])
    decoding = _Decoding(target, returned)
    if hasattr(F, "arrow_udf"):
        decoded: Column = F.arrow_udf(decoding.arrays, returned)(data)
        return decoded
    return F.udf(decoding.row, returned, useArrow=False)(data)


class _Decoding:
    """Decodes the frames of a task.

    Parameters
    ----------
    target : ExecutorTarget
        Its `version` identifies the table.
    returned : StructType
        The type of the column.
    """

    def __init__(self, target: ExecutorTarget, returned: T.StructType) -> None:
        self._target = target
        self._returned = returned
        self._reader: FrameReader | None = None

    def arrays(self, data: pa.Array) -> pa.Array:
        """Return the change of each frame, or null.

        Spark reads the annotations to learn that the function takes and returns arrays.
        """
        with worker_errors():
            return self._decoded(data if data.type == pa.binary() else data.cast(pa.binary()))

    def row(self, data: bytes | None) -> Any:
        """Return the change of a frame, or None, as Spark takes it from a Python function."""
        changes = self.arrays(pa.array([data], pa.binary()))
        return _value(changes[0].as_py(), self._returned)

    def _decoded(self, frames: pa.Array) -> pa.Array:
        if self._reader is None:
            self._reader = FrameReader(self._target)
        version = self._target.version
        assert version is not None  # noqa: S101 - decode_udf has seen to it
        tags, numbers = _heads(frames)
        announced = (tags == ord("R")) & (numbers == version.relation_id)
        for frame in np.flatnonzero(announced).tolist():
            self._check(frames[frame].as_py(), version, frame)
        wanted = _wanted(frames, tags, numbers, version.relation_id)
        # Put the frame's index into commit_lsn: it says which frame each change came from.
        beside = {"data": frames, "commit_lsn": pa.array(np.arange(len(frames)))}
        input_batch = pa.RecordBatch.from_pydict(beside)
        schema = self._target.schema
        fields = [schema.field(name) for name in _COLUMNS]
        places = [np.empty(0, np.int64)]
        changes = [pa.array([], pa.struct(fields))]
        for batch in self._reader.read(partition(), input_batch, np.flatnonzero(wanted)):
            places.append(batch["commit_lsn"].to_numpy())
            columns = [batch[name] for name in _COLUMNS]
            changes.append(pa.StructArray.from_arrays(columns, fields=fields))
        positions = np.concatenate(places)
        indices = np.full(len(frames), -1)
        indices[positions] = np.arange(len(positions))
        return pa.concat_arrays(changes).take(pa.array(indices, mask=indices < 0))

    def _check(self, data: bytes, version: FixedVersion, frame: int) -> None:
        """Refuse a Relation of the table with other columns than the Relation in `relations`."""
        try:
            relation = pf.decode(data)
        except DecodeError:
            return  # a Relation from inside a stream chunk can't be decoded alone
        if not isinstance(relation, Relation):
            return
        if FixedVersion.of(relation, newest=True).columns != version.columns:
            error = PgOutputError(
                f"{self._target.table}: {partition()}, frame {frame} is a Relation with other "
                "columns than the given Relation: the table was altered",
                code="unfit_schema",
                parameter="relations",
                hint="Decode the frames before and after the alteration in two columns, each with "
                "its own relations",
                table=self._target.table,
            )
            error.code, error.frame, error.tag = "column_count", frame, "R"
            raise error


def _heads(frames: pa.Array, skipped: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Return the tag of each frame, and four bytes after it: in some messages a relation id.

    Parameters
    ----------
    frames : pyarrow.BinaryArray
        With n frames.
    skipped : int
        The number of bytes between the tag and the four bytes.

    Returns
    -------
    uint8[n]
        The tags; 0 for a frame that is null or empty.
    uint32[n]
        The relation ids; 0 for a frame that is too short for one.
    """
    count = len(frames)
    tags, numbers = np.zeros(count, np.uint8), np.zeros(count, np.uint32)
    if not count:
        return tags, numbers
    _, offset_buffer, data_buffer = frames.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[frames.offset : frames.offset + count + 1]
    if data_buffer is None or not data_buffer.size:
        return tags, numbers
    data = np.frombuffer(data_buffer, np.uint8)
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets)
    if frames.null_count:
        lengths = np.where(frames.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    has_tag = lengths > 0
    tags[has_tag] = data[starts[has_tag]]
    long = lengths >= 5 + skipped
    places = (starts + 1 + skipped)[long]
    heads = np.zeros(len(places), np.uint32)
    for i in range(4):
        heads = (heads << np.uint32(8)) | data[places + i]
    numbers[long] = heads
    return tags, numbers


def _wanted(
    frames: pa.Array, tags: NDArray[np.uint8], numbers: NDArray[np.uint32], relation_id: int
) -> NDArray[np.bool_]:
    """Return a mask of the frames to decode: a table's rows and TRUNCATEs, and bad frames.

    The decoder then refuses the bad frames: a row's frame too short for a relation id, a row's
    frame from inside a stream chunk (the table's relation id follows an xid), a damaged TRUNCATE.
    """
    own = (numbers == relation_id) | (numbers == 0)
    # In a frame without an xid, these four bytes begin with the letter of a row's kind. So a table
    # whose OID begins with such a letter is not searched for there.
    if relation_id >> 24 not in b"NKO":
        own |= _heads(frames, _XID_BYTES)[1] == relation_id
    wanted: NDArray[np.bool_] = np.isin(tags, _ROW_TAGS) & own
    for index in np.flatnonzero(tags == ord("T")).tolist():
        try:
            message = pf.decode(frames[index].as_py())
        except DecodeError:
            wanted[index] = True
            continue
        wanted[index] = isinstance(message, Truncate) and relation_id in message.relation_ids
    return wanted


def _value(value: Any, type_: T.DataType) -> Any:
    """Convert a value of Arrow to the form that PySpark takes from a function."""
    if value is None:
        return None
    if isinstance(type_, T.StructType):
        return {field.name: _value(value[field.name], field.dataType) for field in type_}
    if isinstance(type_, T.ArrayType):
        return [_value(item, type_.elementType) for item in value]
    if isinstance(type_, T.MapType):
        return {key: _value(item, type_.valueType) for key, item in value}
    if isinstance(type_, T.VariantType):
        return T.VariantVal(value["value"], value["metadata"])
    return value
