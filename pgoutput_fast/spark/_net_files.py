"""Net changes of a table in a file, for Spark's MERGE: which tables have one, and what is in it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pgoutput_fast.apply.delta_merge import MergeKeys, may_hold, misfit, net_row, net_values
from pgoutput_fast.apply.delta_place import directory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutput_fast.apply.delta_place import DeltaPlace
    from pgoutput_fast.apply.folding import NetChanges
    from pgoutput_fast.apply.targets import Alteration, Held, IncompleteError


class Staging(NamedTuple):
    """Where net changes are written for Spark, and for which tables.

    Fields: prefix (the directory in the target); least_bytes (of files that may be written anew).
    """

    prefix: str
    least_bytes: int


class NetFile(NamedTuple):
    """Net changes in a file of the target, which a MERGE reads.

    The file has a row for each key: ``n``, its number; ``op``, ``expects``; ``unchanged``, the
    numbers of columns; ``moves``, whether some of their values are in a row under another key;
    ``v0`` and so on, the table's columns; ``f0`` and so on, the columns of that other key.

    Attributes
    ----------
    relation_id : int
    path : str
        Of the file, in the target.
    directory : str
        Of the table, in the target.
    app, lsn : str, int
        Whose position the statement moves, and to where.
    version : int
        Of the table's log for which the changes are.
    table, name : str
        What errors call the server's table and the target's.
    columns, key : tuple of str
        Of the table.
    unsent : tuple of int
        The columns that `unchanged` has somewhere.
    moves : bool
        Whether any row moves with values that were not sent.
    truncated : bool
    """

    relation_id: int
    path: str
    directory: str
    app: str
    lsn: int
    version: int
    table: str
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    unsent: tuple[int, ...]
    moves: bool
    truncated: bool


def is_for_spark(
    state: Any,
    alterations: Sequence[Alteration],
    net: NetChanges,
    held: Held,
    least_bytes: int,
) -> bool:
    """Whether Spark is to merge net changes into a state table, and can do so.

    Parameters
    ----------
    state
        What `DeltaTarget.state` gives.
    alterations, net, held
        What its `apply` takes.
    least_bytes : int
        See `Merger`.
    """
    table = state.table
    if not net.key or alterations or not table.exists or state.marker is not None:
        return False
    if table.changed is not None:  # which `apply` refuses
        return False
    # A call that was cut short may have altered the table; a number for that goes with its commits.
    if state.is_ahead or table.transaction("altered") or held.lsn <= state.lsn:
        return False
    if held.copy_lsn > state.copy_lsn:
        return False
    schema = table.schema
    names = {field.name for field in net.schema.field("row").type}
    if not names <= set(schema.names):
        return False
    if not all(_is_plain(schema.field(name).type) for name in net.key):
        return False
    if not all(_is_same_in_paths(schema.field(name).type) for name in state.partition_by):
        return False
    if net.truncated:
        moves = any(rows.column("from_").null_count < rows.num_rows for rows in net.batches())
        return not moves and not least_bytes  # no file would be written anew
    if not net.num_rows:
        return False
    if not least_bytes:
        return True
    type_ = schema.field(net.key[0]).type
    keys = MergeKeys()
    for rows in net.batches():
        keys.add([net_values(rows, net.key[0], type_)])
    found: int = sum(one.size for one in table.files() if may_hold(one, keys, net.key[0]))
    return found >= least_bytes


def _is_plain(type_: pa.DataType) -> bool:
    """Whether Spark holds two keys of a type to be equal where the fold does.

    Of floats it does not: 0.0 and -0.0 are one key to it.
    """
    return not (pa.types.is_nested(type_) or pa.types.is_floating(type_))


def _is_same_in_paths(type_: pa.DataType) -> bool:
    """Whether Spark writes values of a type as values of partitions like delta-rs's commits do.

    It makes an empty text null, and fails on long ones.
    """
    types = pa.types
    return bool(types.is_integer(type_) or types.is_boolean(type_) or types.is_date(type_))


def write_net(state: Any, net: NetChanges, held: Held, prefix: str) -> NetFile:
    """Write net changes into a file for `SparkMerger`.

    Parameters
    ----------
    state
        What `DeltaTarget.state` gives.
    net, held
        What its `apply` takes.
    prefix : str
        A directory in the target.

    Raises
    ------
    PgOutputError
        The storage refuses, or a value does not fit its column.
    """
    table = state.table
    place, schema = table.place, table.schema
    # A task may run twice at the same time.
    path = f"{prefix}/{held.relation_id}-{uuid.uuid4().hex}.parquet"
    unsent: set[int] = set()
    has_moves = False
    form = _form(schema, net.key)
    with place.refusals(path):
        files = place.filesystem()
        if place.path is not None:
            files.create_dir(prefix, recursive=True)
        with files.open_output_stream(path) as sink, pq.ParquetWriter(sink, form) as writer:
            first = 0
            for batch in net.batches():
                made = _staged_rows(batch, schema, net.key, form, first)
                first += batch.num_rows
                unsent.update(made.column("unchanged").flatten().unique().to_pylist())
                has_moves |= bool(pc.any(made.column("moves")).as_py())
                writer.write_batch(made)
    return NetFile(
        held.relation_id, path, table.directory, table.app, held.lsn, table.delta.version(),
        net.table, directory_of(held.stored), tuple(schema.names), net.key, tuple(sorted(unsent)),
        has_moves, net.truncated,
    )  # fmt: skip


def _form(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    return pa.schema(
        [
            pa.field("n", pa.int64()),
            pa.field("op", pa.string()),
            pa.field("expects", pa.string()),
            pa.field("unchanged", pa.list_(pa.int32())),
            pa.field("moves", pa.bool_()),
            *(pa.field(f"v{i}", field.type) for i, field in enumerate(schema)),
            *(pa.field(f"f{i}", schema.field(name).type) for i, name in enumerate(key)),
        ]
    )


def _staged_rows(
    batch: pa.RecordBatch, schema: pa.Schema, key: Sequence[str], form: pa.Schema, first: int
) -> pa.RecordBatch:
    """Net rows with the columns of a file, numbered from a number on."""
    unchanged = batch.column("unchanged")
    numbers = pc.index_in(unchanged.values, value_set=pa.array(schema.names)).cast(pa.int32())
    lists = pa.ListArray.from_arrays(unchanged.offsets, numbers)
    columns = [
        pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64)),
        batch.column("op").cast(pa.string()),
        batch.column("expects").cast(pa.string()),
        pc.if_else(unchanged.is_valid(), lists, pa.scalar(None, lists.type)),
        pc.and_(unchanged.is_valid(), batch.column("from_").is_valid()),
        *net_row(batch, schema).columns,
        *(net_values(batch, name, schema.field(name).type, "from_") for name in key),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=form)


def misfit_of(
    place: DeltaPlace, net: NetFile, numbers: Sequence[int], what: str, of: str
) -> IncompleteError:
    """The error for rows that do not fit what is there.

    Parameters
    ----------
    place : DeltaPlace
    net : NetFile
    numbers : sequence of int
        Of the rows.
    what : str
        As `misfit` takes it.
    of : str
        "v" if the rows are named by their keys, "f" if by those that they had.
    """
    at = [net.columns.index(name) for name in net.key] if of == "v" else range(len(net.key))
    with place.refusals(net.path):
        found = pq.read_table(
            net.path,
            columns=[f"{of}{i}" for i in at],
            filters=pc.field("n").isin(list(numbers)),
            filesystem=place.filesystem(),
        )
    columns = [column.combine_chunks() for column in found.columns]
    return misfit(net.table, net.name, place.uri, what, net.key, columns)
