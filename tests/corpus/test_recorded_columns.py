"""Columns of recorded streams, with what the catalogue says of users' types.

Each value of each row is what the message of the same frame has, which does not go by the columns'
ways. And what the tables hold in the end is what the server copied: rows and events of a capture
are applied, as a sink would, and what pyarrow then gives of the columns is what psycopg and Python
read in the server's COPY.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import paths
from support.nightly import nightly, recorded

pytest.importorskip("pyarrow", reason="it reads the batches")

import pyarrow as pa
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.columns.final_rows import Tables, committed, copies
from support.columns.rows import compare_with_messages
from support.postgres.server_text import OtherShape, ServerText, comparable
from support.recordings.corpus_files import Capture, captures
from support.values.catalog_types import registry_of

import pgoutput_fast as pf
from pgoutput_fast.settings import make_settings
from pgoutput_fast.types import ColumnType

PARTS_OF_TABLES = {"v1_text_upd_only", "v1_text_del_only", "v1_text_pub2", "v1_bin_error"}
"""Captures of a publication that leaves out changes."""
NO_WHOLE_TABLE = ("_emptypub", "_origin_none", "_both", "_cl", "_gen_none")
"""Captures of publications that leave out tables, columns, or what came from elsewhere."""
DATA = paths.DATA / "final"
# The greatest dates are nothing that columns hold.
POLICIES = pf.Policies(infinity="text", out_of_range="text", special_values="text")


class TargetState:
    """A tuple of a column batch: what pyarrow gives of its columns."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def raws(self) -> list[Any]:
        return self.values


def changes(decoder: pf.ColumnarDecoder, frames: list[bytes]) -> Iterator[Any]:
    """Rows and events in the order of the frames, as objects that final_rows applies."""
    found: list[tuple[int, int, Any]] = []
    for batch in decoder.decode(frames, lsns=np.arange(len(frames), dtype=np.uint64)):
        read = pa.record_batch(batch)
        head = {name: read.column(name).to_pylist() for name in read.schema.names[:8]}
        unchanged = read.column("unchanged").to_pylist()
        # The tables' own columns, with the relation's names.
        columns = [batch.relation.columns[field.position] for field in batch.layout.columns]
        relation = SimpleNamespace(
            relation_id=batch.relation.relation_id,
            name=batch.relation.name,
            columns=columns,
            kinds=[field.type for field in read.schema.field("after").type],
            types=batch.layout.plan.column_types,
        )
        sides: dict[str, list[Any]] = {}
        for side in ("before", "after"):
            column = read.column(side)
            parts = [
                list(map(comparable, column.field(i).to_pylist()))
                for i in range(column.type.num_fields)
            ]
            rows = zip(*parts, strict=True) if parts else [()] * len(column)
            there = column.is_valid().to_pylist()
            sides[side] = [
                TargetState(list(row)) if present else None
                for row, present in zip(rows, there, strict=True)
            ]
        for i in range(read.num_rows):
            new = sides["after"][i]
            if new is not None:
                for name in unchanged[i] or ():
                    new.values[[field.name for field in batch.layout.columns].index(name)] = (
                        pf.UNCHANGED
                    )
            op = head["op"][i]
            row = SimpleNamespace(
                tag={"insert": "I", "update": "U", "delete": "D", "truncate": "T"}[op],
                in_stream=head["subxid"][i] is not None,
                xid=head["subxid"][i],
                relation=relation,
                relation_ids=[relation.relation_id],
                old_kind=head["old_kind"][i],
                old=sides["before"][i],
                new=new,
            )
            found.append((head["lsn"][i], head["seq"][i], row))
    for event in decoder.events:
        message = event.message or SimpleNamespace(tag=event.tag)
        # A TRUNCATE is told as rows.
        if event.tag != "T":
            found.append((event.frame, 0, message))
    found.sort(key=lambda one: one[:2])
    begun = False
    for _, _, change in found:
        # Begin is no event: a row or an end tells that there was one.
        if change.tag in "IUDT" and not change.in_stream and not begun:
            begun = True
            yield SimpleNamespace(tag="B")
        if change.tag in "CP":
            if not begun:
                yield SimpleNamespace(tag="B")
            begun = False
        yield change


def scenarios(root: Path) -> list[Capture]:
    return [
        capture
        for capture in captures(root)
        if capture.truth is not None
        and capture.entry["guc_set"] == "default"
        and capture.entry["client_encoding"] == "UTF8"
        and capture.entry["optionset"] not in PARTS_OF_TABLES
        and not capture.entry["performance"]
    ]


def with_catalogue(root: Path) -> list[Capture]:
    return [capture for capture in captures(root) if capture.truth is not None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    corpus = metafunc.config.getoption("--corpus")
    root = Path(corpus) if corpus else DATA
    for name, choose in (("capture", scenarios), ("catalogued", with_catalogue)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, recorded(choose(root)))


CHOICES = {
    "text": POLICIES,
    "null": pf.Policies("null", "null", "null"),
    "clamp": pf.Policies("clamp", "clamp", "text", arrays="text"),
}
MOST_FRAMES = 20_000
"""Of a capture that was made to measure by: rows of four integers and a text."""


@pytest.mark.everyday("cython")
@pytest.mark.parametrize("choice", ["text", *nightly("null", "clamp")])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_columns_are_the_messages(
    implementation: str, choice: str, catalogued: Capture, say: Callable[[str], None]
) -> None:
    assert catalogued.truth is not None
    registry = registry_of(catalogued.truth)
    settings = make_settings(CHOICES[choice], catalogued.encoding, registry)
    most = MOST_FRAMES if catalogued.entry["performance"] else None
    lsns, frames = zip(*itertools.islice(catalogued.rows(), most), strict=True)
    told = compare_with_messages(implementation, frames, lsns, settings)
    kinds: collections.Counter[str] = collections.Counter()
    for (kind, _), number in told.values.items():
        kinds[kind] += number
    columns = collections.Counter(kind for _, _, kind, _ in told.columns)
    shown = ", ".join(f"{kind} {kinds[kind]} in {columns[kind]}" for kind in sorted(kinds))
    say(
        f"columns are messages, {catalogued.name}, {implementation}, {choice}: {told.rows} rows, "
        f"{told.refused} refused; values in columns: {shown}"
    )


@pytest.mark.everyday("cython")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_final_rows_are_what_the_server_copied(
    implementation: str, capture: Capture, say: Callable[[str], None]
) -> None:
    truth = capture.truth
    assert truth is not None
    registry = registry_of(truth)
    frames = [frame for _, frame in capture.rows()]
    state = Tables()
    with chosen(implementation):
        decoder = pf.ColumnarDecoder(POLICIES, registry=registry, max_rows=1000, on_error="collect")
        for change in committed(changes(decoder, frames)):
            state.apply(change)
        refused = [str(bad.error) for bad in decoder.errors]
    # A composite of schema_evolution is not what it was; its rows say so. A column has arrays of
    # one dimension.
    assert all("update_from" in error or "policy arrays" in error for error in refused), refused
    text = ServerText(truth.catalog())
    counts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for copy in copies(truth.path, "default", "utf-8"):
        relation = state.relations.get(copy.oid)
        rows = state.rows.get(copy.oid, [])
        if relation is None:
            counts["tables without a row in the stream"] += 1
            continue
        about = [error for error in refused if f" of {copy.schema}.{copy.table} (" in error]
        if any("update_from" in error for error in about):
            counts["tables with a composite that was altered"] += 1
            continue
        names = [column.name for column in relation.columns]
        lines = list(range(len(copy.text)))
        if about and names == copy.columns:
            # Rows with an array of another shape never were.
            lines = [n for n in lines if has_its_shape(text, copy.text[n], relation)]
        if names != copy.columns or len(rows) != len(lines) or state.unknown.get(copy.oid):
            # test_truth compares these value by value.
            counts["tables that were altered, or published in part"] += 1
            continue
        if any(cell.relation is not relation for row in rows for cell in row.values()):
            same_kinds = all(
                cell.relation.kinds[n] == kind
                for row in rows
                for n, (cell, kind) in enumerate(zip(row.values(), relation.kinds, strict=False))
            )
            if not same_kinds or any(len(row) != len(names) for row in rows):
                counts["tables that were altered, or published in part"] += 1
                continue
        from_copy = []
        for i, (column, kind) in enumerate(zip(relation.columns, relation.kinds, strict=True)):
            type_ = relation.types[i]
            if "_bin" in capture.name and (kind == pa.binary() or differs_by_format(type_)):
                if copy.binary is None:
                    counts["columns of bytes, in tables without a binary COPY"] += 1
                    continue
                values = [text.read_binary(copy.binary[n][i], column.type_id, kind) for n in lines]
            else:
                values = [text.read(copy.text[n][i], column.type_id, kind) for n in lines]
            from_copy.append((names[i], list(map(comparable, values))))
            kinds[type_.kind] += sum(value is not None for value in values)
        found = sorted(repr([row[name].raw for name, _ in from_copy]) for row in rows)
        expected = sorted(repr([column[n] for _, column in from_copy]) for n in range(len(lines)))
        assert found == expected, (copy.schema, copy.table)
        counts["tables"] += 1
        counts["values"] += len(rows) * len(from_copy)
    say(f"columns of {capture.name}, {implementation}: {dict(counts)}; {dict(kinds)}")
    assert counts["tables"] > 0 or capture.name.endswith(NO_WHOLE_TABLE)


def differs_by_format(type_: ColumnType) -> bool:
    """Whether binary values of a type are not its text."""
    parts = [part for _, part in type_.fields] + ([type_.element] if type_.element else [])
    if type_.entry is not None and type_.entry.codec in ("money", "reg"):
        return True
    return any(map(differs_by_format, parts))


def has_its_shape(text: ServerText, line: list[str | None], relation: Any) -> bool:
    """Whether the arrays of a row have the shape of their columns."""
    try:
        for word, column, kind in zip(line, relation.columns, relation.kinds, strict=True):
            text.read(word, column.type_id, kind)
    except OtherShape:
        return False
    return True
