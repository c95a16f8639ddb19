"""Decode a column of frames that stand alone, as those do that came through Kafka or files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

from pgoutput_fast.errors import PgOutputError

from ._executor import FrameReader
from ._frame_heads import ROW_TAGS, as_binary, heads
from ._ranged import wanted_rows
from ._told_errors import telling
from .dataframes import check_session, frames_target, partition, registry_of, settings_of
from .relation_ranges import RelationRanges

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import Column

    from pgoutput_fast.policies import Policies
    from pgoutput_fast.types import TypeRegistry

    from ._executor import Target
    from .dataframes import Relations

_COLUMNS = ("op", "old_kind", "before", "after", "unchanged")


def decode_udf(
    data: Column | str,
    table: str,
    relations: Relations | RelationRanges,
    schema: T.StructType | str | None = None,
    *,
    lsn: Column | str | None = None,
    encoding: str = "utf-8",
    registry: TypeRegistry | None = None,
    policies: Policies | None = None,
) -> Column:
    """One table's changes as a column, made of a column of frames.

    Each frame stands alone, in any order and any partition: nothing is taken from other frames,
    Relations neither. From Spark 4.1 on the function is given Arrow arrays; Spark 4.0 calls it for
    each row, which takes longer.

    Parameters
    ----------
    data : Column or str
        The frames, or the name of their column (binary), as of :func:`decode_frames`. Frames from
        inside stream chunks can't stand alone, and those of the table are refused; bring them into
        protocol 1's form before.
    table : str
        ``namespace.name``, as of :func:`decode_frames`.
    relations : RelationRanges, or mapping or iterable of Relation
        As of :func:`decode_frames`. Relations without LSNs must hold for all frames.
    schema : StructType or str, optional
        The table's columns and their types; by default those of its last Relation.
    lsn : Column or str, optional
        The LSN of each frame, which XLogData has. It is needed with :class:`RelationRanges`.
    encoding : str
        The client_encoding of the session that sent the frames.
    registry, policies : optional
        As of :func:`decode_frames`.

    Returns
    -------
    Column
        A struct of `op`, `old_kind`, `before`, `after` and `unchanged`, as columns of
        :func:`decode_frames` have them; null for a frame that is null, or is no row of the table
        and no TRUNCATE of it. ``to_variant_object`` makes a VARIANT of it, in which changes of
        several tables fit into one column.

    Raises
    ------
    PgOutputError
        The table is not in `relations`, or has LSNs there and `lsn` is not given, or the other way
        round. A frame that can't be decoded makes the query fail.
    """
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    if spark is not None:
        check_session(spark)
    if isinstance(relations, RelationRanges) != (lsn is not None):
        raise PgOutputError(
            "relations= has LSNs, so that each frame needs one: give lsn= too"
            if lsn is None
            else "lsn= is given, and relations= has no LSNs: give RelationRanges, which "
            "relations_of() has, or leave lsn= out if these Relations hold for all frames"
        )
    settings = settings_of(registry or registry_of(relations), policies, encoding)
    changes, target = frames_target(table, relations, schema, settings, lambda: ())
    if target.version is None:
        raise PgOutputError(f"no Relation of {table} is in relations=; check the table's name")
    returned = T.StructType([changes[name] for name in _COLUMNS])
    decoding = _Decoding(target, returned)
    columns = [data] if lsn is None else [data, lsn]
    if hasattr(F, "arrow_udf"):
        decoded: Column = F.arrow_udf(decoding.arrays, returned)(*columns)
        return decoded
    return F.udf(decoding.row, returned, useArrow=False)(*columns)


class _Decoding:
    """What a task decodes frames with.

    Parameters
    ----------
    target : Target
        Its `version` tells the table.
    returned : StructType
        The type of the column.
    """

    def __init__(self, target: Target, returned: T.StructType) -> None:
        self._target = target
        self._returned = returned
        self._reader: FrameReader | None = None

    def arrays(self, data: pa.Array, *lsns: pa.Array) -> pa.Array:
        """The change of each frame, or null.

        Spark reads the annotations: arrays are given, and an array comes back.
        """
        with telling():
            return self._decoded(as_binary(data), *lsns)

    def row(self, data: bytes | None, *lsns: int | None) -> Any:
        """The change of a frame, or None, in the form that a function in Python gives to Spark."""
        arrays = (pa.array([lsn], pa.int64()) for lsn in lsns)
        found = self.arrays(pa.array([data], pa.binary()), *arrays)
        return _value(found[0].as_py(), self._returned)

    def _decoded(self, frames: pa.Array, *lsns: pa.Array) -> pa.Array:
        if self._reader is None:
            self._reader = FrameReader(self._target)
        assert self._target.version is not None  # noqa: S101 - decode_udf has seen to it
        tags, numbers = heads(frames)
        relation_id = self._target.version.relation_id
        wanted = wanted_rows(frames, tags, numbers, relation_id, damaged=True)
        # These are refused when they are decoded: a frame that is too short to have a relation id,
        # and one that has the table's behind an xid, as it has inside of a stream chunk.
        wanted |= np.isin(tags, ROW_TAGS) & ((numbers == 0) | _behind_xid(frames, relation_id))
        # The frame's index is beside it as commit_lsn, so that each change is found to be its own.
        beside = {"data": frames, "commit_lsn": pa.array(np.arange(len(frames)))}
        if lsns:
            beside["lsn"] = lsns[0]
        given = pa.RecordBatch.from_pydict(beside)
        schema = self._target.schema
        fields = [schema.field(name) for name in _COLUMNS]
        places = [np.empty(0, np.int64)]
        changes = [pa.array([], pa.struct(fields))]
        for batch in self._reader.read(partition(), given, np.flatnonzero(wanted)):
            places.append(batch["commit_lsn"].to_numpy())
            columns = [batch[name] for name in _COLUMNS]
            changes.append(pa.StructArray.from_arrays(columns, fields=fields))
        found = np.concatenate(places)
        indices = np.full(len(frames), -1)
        indices[found] = np.arange(len(found))
        return pa.concat_arrays(changes).take(pa.array(indices, mask=indices < 0))


def _behind_xid(frames: pa.Array, relation_id: int) -> NDArray[np.bool_]:
    """Which frames of rows are of a table, if they come from inside a stream chunk.

    What stands there in other frames is the letter of a row's kind and the number of its columns.
    A table whose OID begins with such a letter is not told from those.
    """
    if relation_id >> 24 in b"NKO":
        return np.zeros(len(frames), np.bool_)
    _, numbers = heads(frames, np.ones(len(frames), np.bool_))
    found: NDArray[np.bool_] = numbers == relation_id
    return found


def _value(value: Any, type_: T.DataType) -> Any:
    """A value of Arrow in the form in which PySpark takes it from a function."""
    if value is None:
        return None
    if isinstance(type_, T.StructType):
        return {field.name: _value(value[field.name], field.dataType) for field in type_}
    if isinstance(type_, T.ArrayType):
        return [_value(one, type_.elementType) for one in value]
    if isinstance(type_, T.MapType):
        return {key: _value(one, type_.valueType) for key, one in value}
    if isinstance(type_, T.VariantType):
        return T.VariantVal(value["value"], value["metadata"])
    return value
