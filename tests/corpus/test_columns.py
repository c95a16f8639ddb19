"""Columns of recorded streams: what the tables hold in the end is what the server copied.

Rows and events of a capture are applied, as a sink would, to the bytes that the columns store; the
server's COPY is put into the same columns by the functions of their fields. Of the compiled engine
that is the twin's way, which the compiled engine does not go for usual values.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="it reads the batches")

import pyarrow as pa
from catalog_types import registry_of
from column_values import stored
from columnar import IMPLEMENTATIONS, chosen
from corpus_files import Capture, captures
from final_rows import Tables, committed, copies

import pgoutput_fast as pf
from pgoutput_fast.values import OutOfRange

PARTS_OF_TABLES = {"v1_text_upd_only", "v1_text_del_only", "v1_text_pub2", "v1_bin_error"}
"""Captures of a publication that leaves out changes."""
NO_WHOLE_TABLE = ("_emptypub", "_origin_none", "_both", "_cl", "_gen_none")
"""Captures of publications that leave out tables, columns, or what came from elsewhere."""
DATA = Path(__file__).parents[1] / "data" / "final"
# The greatest dates are nothing that columns hold.
POLICIES = pf.Policies(infinity="text", out_of_range="text", special_values="text")


class Stored:
    """A tuple of a column batch: the bytes that its columns store."""

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
            layout=batch.layout,
        )
        sides: dict[str, list[Any]] = {}
        for side in ("before", "after"):
            column = read.column(side)
            parts = [stored(column.field(i)) for i in range(column.type.num_fields)]
            rows = zip(*parts, strict=True) if parts else [()] * len(column)
            there = column.is_valid().to_pylist()
            sides[side] = [
                Stored(list(row)) if present else None
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "capture" in metafunc.fixturenames:
        corpus = metafunc.config.getoption("--corpus")
        found = scenarios(Path(corpus) if corpus else DATA)
        metafunc.parametrize("capture", [pytest.param(one, id=one.name) for one in found])


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
    assert all("update_from" in error or "Policies(arrays" in error for error in refused), refused
    counts: collections.Counter[str] = collections.Counter()
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
        lines = copy.text
        if about and names == copy.columns:
            # Rows with an array of another shape never were.
            lines = [line for line in lines if fits(line, relation.layout.columns)]
        if names != copy.columns or len(rows) != len(lines) or state.unknown.get(copy.oid):
            # test_truth compares these value by value.
            counts["tables that were altered, or published in part"] += 1
            continue
        if any(cell.relation is not relation for row in rows for cell in row.values()):
            same_shape = all(
                cell.relation.layout.columns[n].format == field.format
                for row in rows
                for n, (cell, field) in enumerate(
                    zip(row.values(), relation.layout.columns, strict=False)
                )
            )
            if not same_shape or any(len(row) != len(names) for row in rows):
                counts["tables that were altered, or published in part"] += 1
                continue
        fields = relation.layout.columns
        found = sorted(repr([row[name].raw for name in names]) for row in rows)
        expected = sorted(
            repr(
                [
                    None if word is None else field.text(encoded(word))
                    for word, field in zip(line, fields, strict=True)
                ]
            )
            for line in lines
        )
        if found != expected and is_by_format(relation):
            counts["tables with columns of unknown types, as bytes"] += 1
            continue
        if found != expected and "_bin" in capture.name and differs_by_format(relation):
            counts["tables with money or reg*, in binary format"] += 1
            continue
        assert found == expected, (copy.schema, copy.table)
        counts["tables"] += 1
        counts["values"] += len(rows) * len(names)
    say(f"columns of {capture.name}, {implementation}: {dict(counts)}")
    assert counts["tables"] > 0 or capture.name.endswith(NO_WHOLE_TABLE)


def is_by_format(relation: Any) -> bool:
    """Whether a column holds bytes, as nothing says what they are."""
    return any(field.by_format for field in relation.layout.columns)


def differs_by_format(relation: Any) -> bool:
    """Whether a column is of a type whose binary values are not its text."""
    types = [type_.element or type_ for type_ in relation.layout.plan.column_types]
    return any(t.entry is not None and t.entry.codec in ("money", "reg") for t in types)


def encoded(word: str) -> bytes:
    return word.encode("utf-8", "surrogateescape")


def fits(line: list[str | None], fields: Any) -> bool:
    """Whether the arrays of a row have the shape of their columns."""
    for word, field in zip(line, fields, strict=True):
        try:
            if word is not None:
                field.text(encoded(word))
        except OutOfRange as error:
            assert "Policies(arrays" in str(error)  # noqa: PT017
            return False
    return True
