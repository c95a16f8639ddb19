"""The rows of a stream by columns beside the rows by messages: every value of every frame."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from support.columns.columnar import chosen
from support.columns.values import has_other_shape, is_special, same_value
from support.values.render import printed

import pgoutput_fast as pf
from pgoutput_fast.decoding import _core, _pure
from pgoutput_fast.settings import Settings
from pgoutput_fast.types import ColumnType

__all__ = ["Compared", "compare_with_messages"]

EPOCH_SHIFT = 946_684_800_000_000
"""Microseconds from 1970, from which Arrow counts, to 2000, from which PostgreSQL does."""


@dataclass
class Compared:
    """What was compared.

    Attributes
    ----------
    rows, refused : int
        Refused by both, or of an array of another shape than its column.
    values : Counter of (str, str)
        By kind and name of the type, those that are not null.
    columns : set of (int, str, str, str)
        OID of the table, name of the column, kind and name of the type.
    """

    rows: int = 0
    refused: int = 0
    values: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    columns: set[tuple[int, str, str, str]] = field(default_factory=set)


def compare_with_messages(
    implementation: str,
    frames: Sequence[bytes],
    lsns: Sequence[int],
    settings: Settings,
) -> Compared:
    """Compare the columns of all rows with what the messages of the same frames give."""
    told = Compared()
    rows = list(expected_rows(implementation, frames, lsns, settings))
    seen: dict[int, collections.deque[Any]] = collections.defaultdict(collections.deque)
    with chosen(implementation):
        decoder = pf.ColumnarDecoder(
            settings.policies,
            encoding=settings.encoding,
            registry=settings.registry,
            max_rows=500,
            on_error="collect",
        )
        for batch in decoder.decode(frames, lsns=lsns):
            read = pa.record_batch(batch)
            names = ("before", "after")
            columns = [
                column.to_pylist() if name not in names else list(values_of(column))
                for name, column in zip(read.schema.names, read.columns, strict=True)
            ]
            # Times beyond Python's are compared as numbers.
            columns[5] = read.column("commit_time").cast(pa.int64()).to_pylist()
            columns.append([batch.relation] * len(batch))
            columns.append([batch.layout.plan.column_types] * len(batch))
            seen[batch.relation.relation_id].extend(zip(*columns, strict=True))
        bad = {error.frame: error.error.code for error in decoder.errors}
    assert sum(map(len, seen.values())) == len(rows) - len(bad)
    told.rows, told.refused = len(rows) - len(bad), len(bad)
    for frame, relation_id, expected in rows:
        if frame in bad:
            refused_by_messages(expected, bad[frame])
            continue
        found = seen[relation_id].popleft()
        assert found[:8] == expected[:8]
        *_, relation, types = found
        for side in (8, 9):
            compare_values(found[side], expected[side], types, settings)
            for i, (_, value) in enumerate(found[side] or ()):
                kind, name = types[i].kind, types[i].name
                if value is not None:
                    told.values[kind, name] += 1
                    told.columns.add((relation_id, relation.columns[i].name, kind, name))
        assert found[10] == expected[10]
    return told


def refused_by_messages(row: tuple[Any, ...], code: str) -> None:
    """Styles of output that leave a value in doubt, and what has no text for a column of text.

    Or an array that is of another shape than its column.
    """
    sent = [data for data in row[8:10] if data is not None]
    if code == "out_of_range":
        found = []
        for data in sent:
            for i in range(len(data)):
                with contextlib.suppress(pf.DecodeError):
                    found.append(has_other_shape(data[i]))
        assert any(found)
        return
    with pytest.raises(pf.DecodeError) as caught:
        raise AssertionError(str([(data.values(), data.texts()) for data in sent]))
    assert caught.value.code == code


def values_of(column: Any) -> Iterator[list[tuple[Any, Any]] | None]:
    """Of each row the type and the value of each column."""
    kind = column.type
    kinds = [kind.field(c).type for c in range(kind.num_fields)]
    fields = [column.field(i).to_pylist() for i in range(kind.num_fields)]
    for i, there in enumerate(column.is_valid().to_pylist()):
        row = [(kinds[c], field[i]) for c, field in enumerate(fields)]
        yield row if there else None


def expected_rows(
    implementation: str, frames: Iterable[bytes], lsns: Iterable[int], settings: Settings
) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    """Frame, OID of the relation, and the columns; `before` and `after` are messages' tuples."""
    module = _core if implementation == "cython" else _pure
    decoder = module.Decoder(settings.policies, settings.encoding, settings.registry)
    top: int | None = None
    commit_lsn = commit_time = None
    seqs: dict[int | None, int] = {}
    for index, (lsn, frame) in enumerate(zip(lsns, frames, strict=True)):
        message = decoder.decode(frame)
        if message.tag in "BbS":
            top = message.xid
            commit_lsn = message.final_lsn if message.tag == "B" else None
            commit_time = message.commit_time + EPOCH_SHIFT if message.tag == "B" else None
            if message.tag in "Bb" or message.first_segment:
                seqs[top] = 0
        elif message.tag in "CPE":
            top = None
        elif message.tag in "IUDT":
            op = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}[message.tag]
            ids = message.relation_ids if message.tag == "T" else [message.relation_id]
            old, new = getattr(message, "old", None), getattr(message, "new", None)
            unsent = new is not None and [
                name.name for i, name in enumerate(message.relation.columns) if new.kind(i) == "u"
            ]
            for relation_id in ids:
                seq = seqs[top]
                seqs[top] += 1
                old_kind = getattr(message, "old_kind", None)
                head = (op, top, message.xid, lsn, commit_lsn, commit_time, seq, old_kind)
                yield index, relation_id, (*head, old, new, unsent or None)


def compare_values(found: Any, data: Any, types: Sequence[ColumnType], settings: Settings) -> None:
    assert (found is None) == (data is None)
    for i, (kind, value) in enumerate(found or ()):
        if types[i].name == "timetz" and data.kind(i) in "tb":
            # Text, which has 24:00 too; Python's time has not.
            assert value == data.text(i)
        elif value is None or data.kind(i) in "nu" or data[i] is None:
            assert value is None
            assert data.kind(i) in "nu" or data[i] is None or is_special(data[i], settings)
        elif pa.types.is_nested(kind):
            assert same_value(value, kind, data[i], types[i], settings), (value, data[i])
        elif kind == pa.binary() and data.kind(i) == "b":
            assert value == data.raw(i)
        elif kind == pa.utf8() or isinstance(kind, pa.JsonType):
            if not isinstance(data[i], str) and data.kind(i) == "t" and value != data.text(i):
                # Of the style that the session had nothing is left.
                assert value == printed(data[i], types[i])
                continue
            try:
                assert value == data.text(i)
            except pf.DecodeError as error:
                assert error.code == "no_text_form"  # noqa: PT017
                assert value == str(data[i])
        elif isinstance(data[i], pf.Interval):
            assert same_value(value, kind, data[i], types[i], settings), (value, data[i])
        else:
            assert type(value) is type(data[i])
            assert value == data[i] or repr(value) == repr(data[i])
