"""Mode "envelope" of the source: one record for each change, as Debezium would send it.

A record has a topic, a key and a value. Key and value are JSON, so a query can write the records
with Spark's sink for Kafka as they are. Whole columns are converted at once, for all tables in the
frames.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast._version import __version__
from pgoutput_fast.changelog.changes import ChangeReader
from pgoutput_fast.changelog.history import HistoryPolicy, history_of
from pgoutput_fast.errors import PgOutputError

from ._json_columns import base64_text, joined, json_column, json_name
from ._refused_rows import ERRORS_TYPE, refused_rows

if TYPE_CHECKING:
    from pgoutput_fast.changelog.changes import Refusal
    from pgoutput_fast.changelog.history import History
    from pgoutput_fast.changelog.read_frames import FrameRun
    from pgoutput_fast.changelog.read_plan import Read
    from pgoutput_fast.policies import Policies
    from pgoutput_fast.segments import SegmentMetadata

RECORD_SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "key": pa.string(),
        "value": pa.string(),
        "lsn": pa.int64(),
        "commit_lsn": pa.int64(),
        "commit_time": pa.timestamp("us", tz="UTC"),
        "xid": pa.int64(),
        "seq": pa.int64(),
        "part": pa.int32(),
        "errors": ERRORS_TYPE,
    }
)
"""The columns of the DataFrame; `(commit_lsn, seq, part)` orders the records of all topics."""

RECORD_DDL = "topic string, key string, value string, lsn bigint, commit_lsn bigint, commit_time timestamp_ltz, xid bigint, seq bigint, part int, errors array<struct<code: string, column: string, message: string, raw: binary>>"  # noqa: E501

PLACEHOLDER = "__debezium_unavailable_value"
"""The default text in place of a value that the server did not send."""

_REFUSED_ROWS = 4096
"""Refused rows decoded again in one batch: the errors of a row take some kB as Python objects."""

_OPS = {"insert": "c", "update": "u", "delete": "d", "truncate": "t", "read": "r"}
_NONE = pa.scalar(None, pa.string())


@dataclass(frozen=True)
class Style:
    """The user's choices about the records.

    Attributes
    ----------
    prefix : str or None
        The first part of each topic; None: the name of the database.
    tombstones : bool
        Whether a record without a value follows each record that ends a row under its key.
    placeholder : str or None
        The text in place of a value that the server did not send; None: leave out the field.
    """

    prefix: str | None = None
    tombstones: bool = False
    placeholder: str | None = PLACEHOLDER


def envelopes(
    reads: Sequence[Read],
    metadata: SegmentMetadata,
    directory: str,
    style: Style,
    explain: Callable[[str], str],
    *,
    tables: tuple[str, ...] | None,
    policies: Policies,
    history: HistoryPolicy,
) -> Iterator[pa.RecordBatch]:
    """Return the changes as records.

    Parameters
    ----------
    reads : sequence of Read
        In the order of the stream.
    metadata : SegmentMetadata
    directory : str
        The change log, whose schema history has the types.
    style : Style
    explain : callable
        Rewrites the text of an error for the source, for example to name its options.
    tables, policies, history
        As in the options of the source.

    Raises
    ------
    PgOutputError
        A frame is refused, or a record is too large.
    """
    schema_history = history_of([directory])
    decoding: dict[str, Any] = {
        "policies": policies, "target": "spark", "tables": tables, "on_error": "raise",
        "max_bytes": 16 << 20, "fill_unchanged": True,
    }  # fmt: skip
    refused: dict[int, list[pa.RecordBatch]] = {}

    def records_of(
        relation: Any, batch: pa.RecordBatch, errors: list[Any] | None = None
    ) -> pa.RecordBatch:
        key = _primary_key(schema_history, relation, batch)
        return records(batch, metadata.database, style, key, errors)

    def refuse(frame_run: FrameRun, refusals: list[Refusal]) -> None:
        for first in range(0, len(refusals), _REFUSED_ROWS):
            some = refusals[first : first + _REFUSED_ROWS]
            for relation, batch, errors in refused_rows(frame_run, some, reader.decoding, explain):
                waiting = refused.setdefault(relation.relation_id, [])
                waiting.append(records_of(relation, batch, errors))

    reader = ChangeReader(decoding, schema_history, history, refused=refuse)
    for read in reads:
        for frame_run in reader.frame_runs(read, metadata):
            for changes, batch in reader.changes(frame_run):
                waiting = refused.pop(changes.relation.relation_id, [])
                yield from _in_order([records_of(changes.relation, batch), *waiting])
            for waiting in refused.values():
                yield from _in_order(waiting)
            refused.clear()


def _in_order(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Merge batches of one table's records, each in stream order, into one such order."""
    if len(batches) == 1:
        return batches
    order = [(name, "ascending") for name in ("commit_lsn", "seq", "part")]
    sorted_batches: list[pa.RecordBatch] = (
        pa.Table.from_batches(batches).sort_by(order).to_batches()
    )
    return sorted_batches


def _primary_key(
    schema_history: History | None, relation: Any, batch: pa.RecordBatch
) -> tuple[str, ...]:
    """Return the columns of a table's primary key, or nothing if the history does not have it."""
    if schema_history is None or schema_history.is_empty:
        return ()
    commit = batch.column("commit_lsn")[0].as_py() or 0
    table = schema_history.tables_at(commit).catalog.by_id().get(relation.relation_id)
    names = {column.name for column in relation.columns}
    is_there = table is not None and names.issuperset(table.primary_key)
    return table.primary_key if table is not None and is_there else ()


def records(
    changes: pa.RecordBatch,
    database: str,
    style: Style,
    primary_key: Sequence[str] = (),
    errors: list[Any] | None = None,
) -> pa.RecordBatch:
    """Convert a batch of changes to records.

    Parameters
    ----------
    changes : pyarrow.RecordBatch
        A ChangeBatch, converted.
    database : str
    style : Style
    primary_key : sequence of str
        The key of a table with REPLICA IDENTITY FULL or NOTHING, whose stream does not name a key.
    errors : list, optional
        For each change its refused values, in the form of `ERRORS_TYPE`.

    Raises
    ------
    PgOutputError
        The records of a batch are too large for one Arrow array of texts.
    """
    try:
        return _TopicTable(changes.schema, database, style, primary_key).records(changes, errors)
    except pa.ArrowException as error:
        name = changes.schema.metadata[b"pgoutput.relation"].decode()
        raise PgOutputError(
            f"{name}: can't make JSON from a batch of changes: {error}", code="out_of_memory"
        ) from error


class _TopicTable:
    """Converts the changes of one version of a table to records."""

    def __init__(
        self, schema: pa.Schema, database: str, style: Style, primary_key: Sequence[str]
    ) -> None:
        metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
        self._style = style
        self._prefix = style.prefix or database
        self._database = database
        self._namespace = metadata["pgoutput.namespace"]
        self._name = metadata["pgoutput.relation"]
        self._topic = topic_of(self._prefix, self._namespace, self._name)
        # FULL lists all columns as the key, NOTHING lists none: neither is the primary key.
        tells_key = metadata["pgoutput.replica_identity"] not in ("f", "n")
        key_columns = json.loads(metadata["pgoutput.key_columns"])
        self._key_names = key_columns if tells_key else list(primary_key)

    def records(self, changes: pa.RecordBatch, errors: list[Any] | None) -> pa.RecordBatch:
        """Convert changes to records."""
        columns = dict(zip(changes.schema.names, changes.columns, strict=True))
        op = columns["op"]
        lacking = _lacking(columns["unchanged"])
        rows_after = self._with_key(columns["after"], columns["before"], lacking)
        after, before = self._row(rows_after, lacking), self._row(columns["before"], {})
        new_key, old_key = self._key(rows_after), self._key(columns["before"])
        is_delete = _bools(pc.equal(op, "delete"))
        # Compare the keys: the server also sends an old row when the key is unchanged but one of
        # its values is stored out of line.
        moved = _bools(pc.and_(pc.equal(op, "update"), pc.not_equal(old_key, new_key)))
        if not self._key_names:
            moved[:] = False
        tombs = (is_delete | moved) & self._style.tombstones & bool(self._key_names)
        counts = 1 + tombs + moved
        rows = np.repeat(np.arange(len(op)), counts)
        part = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        # A change of the key makes a delete, a tombstone, and a create.
        is_end = (part == 0) & (is_delete | moved)[rows]
        is_tomb = (part == 1) & tombs[rows]
        is_new = moved[rows] & ~is_end & ~is_tomb
        at, end, tomb, new = (pa.array(array) for array in (rows, is_end, is_tomb, is_new))
        short = op.dictionary_decode() if pa.types.is_dictionary(op.type) else op
        for name, letter in _OPS.items():
            short = pc.if_else(pc.equal(short, name), letter, short)
        letters = pc.if_else(end, "d", pc.if_else(new, "c", short.take(at)))
        value = joined(
            '{"before":', pc.if_else(new, "null", before.take(at)),
            ',"after":', pc.if_else(end, "null", after.take(at)),
            ',"source":', self._source(columns).take(at),
            ',"transaction":null,"op":"', letters,
            '",', _times(columns["commit_time"]).take(at),
            "" if errors is None else _errors_json(errors).take(at), "}",
        )  # fmt: skip
        key = pc.if_else(pc.or_(end, tomb), old_key.take(at), new_key.take(at))
        values = {
            "topic": pa.array([self._topic], pa.string()).take(pa.array(np.zeros(len(rows), int))),
            "key": key,
            "value": pc.if_else(tomb, _NONE, value),
            **{
                name: columns[name].take(at)
                for name in ("lsn", "commit_lsn", "commit_time", "xid", "seq")
            },
            "part": pa.array(part, pa.int32()),
            "errors": pa.array(errors or [None] * len(op), ERRORS_TYPE).take(at),
        }
        arrays = [values[field.name].cast(field.type) for field in RECORD_SCHEMA]
        return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)

    def _with_key(self, after: Any, before: Any, lacking: dict[str, Any]) -> Any:
        """Return the new rows with complete keys: unsent values of a key come from the old rows.

        The method removes these rows from `lacking`.
        """
        names = [field.name for field in after.type]
        has_before = before.is_valid().to_numpy(zero_copy_only=False)
        masks = {name: lacking[name] & has_before for name in self._key_names if name in lacking}
        if not any(mask.any() for mask in masks.values()):
            return after
        values = dict(zip(names, after.flatten(), strict=True))
        for name, mask in masks.items():
            old = before.flatten()[names.index(name)]
            values[name] = pc.if_else(pa.array(mask), old, values[name])
            lacking[name] &= ~mask
        fields, is_null = list(after.type), after.is_null()
        return pa.StructArray.from_arrays(list(values.values()), fields=fields, mask=is_null)

    def _row(self, rows: Any, lacking: dict[str, Any]) -> Any:
        """Return the rows as JSON, with the placeholder for values that the server did not send."""
        names = [field.name for field in rows.type]
        if not lacking or not names:
            return json_column(rows)
        pieces: list[Any] = ["{"]
        for name, column in zip(names, rows.flatten(), strict=True):
            text = joined(f",{json_name(name)}:", json_column(column))
            if name in lacking:
                instead = ""
                if self._style.placeholder is not None:
                    instead = f",{json_name(name)}:{_placeholder(self._style, column.type)}"
                text = pc.if_else(pa.array(lacking[name]), instead, text)
            pieces.append(text)
        texts = pc.replace_substring(joined(*pieces, "}"), "{,", "{", max_replacements=1)
        return pc.if_else(rows.is_valid(), texts, "null")

    def _key(self, rows: Any) -> Any:
        """Return the key columns of each row as JSON; null if the table has no key."""
        names = [field.name for field in rows.type]
        if not self._key_names or not set(self._key_names) <= set(names):
            return pa.nulls(len(rows), pa.string())
        values = rows.flatten()
        pieces: list[Any] = ["{"]
        for name in self._key_names:
            comma = "," if len(pieces) > 1 else ""
            pieces += [f"{comma}{json_name(name)}:", json_column(values[names.index(name)])]
        return pc.if_else(rows.is_valid(), joined(*pieces, "}"), _NONE)

    def _source(self, columns: dict[str, Any]) -> Any:
        """Return the field `source` as JSON: the database, table and position of each change."""
        connector = {
            "version": __version__, "connector": "postgresql", "name": self._prefix,
        }  # fmt: skip
        commit, lsn = _digits(columns["commit_lsn"]), _digits(columns["lsn"])
        read = pc.equal(columns["op"], "read")
        snapshot = pc.if_else(read, '"true"', '"false"')
        millis, micros, nanos = _units(columns["commit_time"])
        table = {"schema": self._namespace, "table": self._name}
        return joined(
            _object_of(connector)[:-1], ',"ts_ms":', millis, ',"snapshot":', snapshot,
            f',"db":{json_name(self._database)},"sequence":"[\\"', commit, '\\",\\"', lsn, '\\"]"',
            ',"ts_us":', micros, ',"ts_ns":', nanos, ",", _object_of(table)[1:-1],
            ',"txId":', _digits(columns["xid"]), ',"lsn":', lsn, ',"xmin":null}',
        )  # fmt: skip


def topic_of(prefix: str, namespace: str, table: str) -> str:
    """Return a table's topic: Kafka allows ASCII letters, digits, and `.`, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{prefix}.{namespace}.{table}")


def _errors_json(errors: list[list[dict[str, str]]]) -> Any:
    """Return the field `errors` of records; the column `errors` has the raw bytes."""
    names = ("code", "column", "message")
    row_errors = ([{name: error[name] for name in names} for error in row] for row in errors)
    pieces = (
        json.dumps(fields, ensure_ascii=False, separators=(",", ":")) for fields in row_errors
    )
    return pa.array([f',"errors":{piece}' for piece in pieces], pa.string())


def _object_of(entries: dict[str, str]) -> str:
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


def _bools(array: Any) -> Any:
    """Return a NumPy array of booleans, with false for null."""
    return pc.fill_null(array, False).to_numpy(zero_copy_only=False).astype(bool)


def _digits(array: Any) -> Any:
    return pc.fill_null(array.cast(pa.string()), "null")


def _times(times: Any) -> Any:
    """Return the fields `ts_ms`, `ts_us` and `ts_ns` of timestamps."""
    millis, micros, nanos = _units(times)
    return joined('"ts_ms":', millis, ',"ts_us":', micros, ',"ts_ns":', nanos)


def _units(times: Any) -> tuple[Any, Any, Any]:
    """Return the digits of timestamps in milli-, micro- and nanoseconds since 1970."""
    micros = times.cast(pa.int64())
    digits = _digits(micros)
    nanos = pc.if_else(micros.is_valid(), joined(digits, "000"), "null")
    return _milliseconds(times), digits, nanos


def _milliseconds(times: Any) -> Any:
    """Return the digits of timestamps in milliseconds since 1970."""
    micros = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if times.null_count:
        return _digits(times.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()))
    return pa.array(micros // 1000).cast(pa.string())


def _lacking(unchanged: Any) -> dict[str, Any]:
    """Return, for each column, a mask of the rows whose value the server did not send."""
    if unchanged.null_count == len(unchanged):
        return {}
    parents = pc.list_parent_indices(unchanged).to_numpy()
    names = pc.dictionary_encode(pc.list_flatten(unchanged))
    numbers = names.indices.to_numpy()
    masks = {}
    for number, name in enumerate(names.dictionary.to_pylist()):
        mask = np.zeros(len(unchanged), bool)
        mask[parents[numbers == number]] = True
        masks[name] = mask
    return masks


def _placeholder(style: Style, type_: Any) -> str:
    """Return the placeholder as JSON: base64 for bytes, a list for an array of texts."""
    text = pa.array([style.placeholder], pa.string())
    if pa.types.is_binary(type_):
        return json_name(base64_text(text.cast(pa.binary()))[0].as_py())
    shown = json_name(str(style.placeholder))
    is_texts = pa.types.is_list(type_) and pa.types.is_string(type_.value_type)
    return f"[{shown}]" if is_texts else shown
