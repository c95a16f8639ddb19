"""Delta tables as a target: against a plain model, through crashes, and what is refused."""

from __future__ import annotations

import datetime
import errno
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support import paths
from support.expected_errors import expect_error
from support.nightly import cases, nightly
from support.targets.histories import History
from support.targets.in_process import InProcessJobs

import pgoutput_fast as pf
from pgoutput_fast import testing as t
from pgoutput_fast.apply import NetChanges, fold
from pgoutput_fast.apply.naming import stored_table
from pgoutput_fast.apply.targets import (
    CHANGED,
    RENAMED,
    AddedColumn,
    Alteration,
    IncompleteError,
    Removed,
    Renamed,
    Retyped,
    StateColumn,
    TableState,
    TargetOrigin,
    TargetState,
    window,
)

deltalake = pytest.importorskip("deltalake")


from pgoutput_fast.apply import (  # noqa: E402
    delta_files,
    delta_merge,
    delta_place,
    delta_rewrite,
    delta_statistics,
    delta_table,
    delta_target,
)
from pgoutput_fast.apply.delta_target import DECODED_FOR, DeltaTarget  # noqa: E402
from pgoutput_fast.spark._merge_steps import spark_steps  # noqa: E402
from pgoutput_fast.verify.opening import open_target  # noqa: E402

ORIGIN = TargetOrigin("7000000000000000001", "shop")
THINGS = t.Table("things", {"id": "int4", "name": "text", "note": "text"})
UNSENT = pf.UNCHANGED


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is lost in tests."""
    for module in (delta_files, delta_table):
        monkeypatch.setattr(module, "fsync_path", lambda path: None)


@pytest.fixture
def merged_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does the steps of merges: this process, or tasks that share them."""
    if request.param == "tasks":
        steps = functools.partial(spark_steps, InProcessJobs(twice=True), 0)
        monkeypatch.setattr(delta_target, "local_steps", steps)


either = pytest.mark.parametrize("merged_by", ["process", "tasks"], indirect=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and files of few rows, and maintenance after few commits."""
    monkeypatch.setattr(delta_files, "_GROUP_ROWS", 4)
    monkeypatch.setattr(delta_files, "_FILE_BYTES", 3000)
    monkeypatch.setattr(delta_table, "_MAINTAINED", 4)
    monkeypatch.setattr(delta_table, "VACUUMED", 8)
    monkeypatch.setattr(delta_table, "_PER_TIER", 2)
    monkeypatch.setattr(delta_rewrite, "_FEW", 2)


def batches(lsn: int, *frames: bytes, table: t.Table = THINGS) -> list[pa.RecordBatch]:
    """Change batches of one transaction."""
    decoder = pf.ColumnarDecoder(target=DECODED_FOR)
    sent = [t.begin(7, lsn, lsn * 1000), *table.announcement(), *frames, t.commit(lsn)]
    return [pa.record_batch(batch) for batch in decoder.decode(sent)]


def row_schema(changes: Sequence[pa.RecordBatch]) -> pa.Schema:
    return pa.schema(list(changes[-1].schema.field("after").type))


def since(changes: Sequence[pa.RecordBatch], lsn: int) -> list[pa.RecordBatch]:
    """Those that were committed from an LSN on."""
    return [batch.filter(pc.greater_equal(batch.column("commit_lsn"), lsn)) for batch in changes]


class Crash(Exception):
    """The process ends here."""


class Synced:
    """A table that is kept in a target, as a sync does it.

    Parameters
    ----------
    path : pathlib.Path
    table : pgoutput_fast.testing.Table
    options
        Of `DeltaTarget`.
    """

    def __init__(self, path: Path, table: t.Table = THINGS, **options: Any) -> None:
        self.path = path
        self.table = table
        self.options = options
        self.target = DeltaTarget(path, **options)
        self.stored = self.target.open(ORIGIN)

    def reopen(self) -> Synced:
        """As after the end of a process: nothing was given up, nothing cleaned."""
        if self.target._lock is not None:
            os.close(self.target._lock)
        self.target = DeltaTarget(self.path, **self.options)
        self.stored = self.target.open(ORIGIN)
        return self

    @property
    def table_state(self) -> TableState:
        table = self.table
        name = f"{table.namespace}.{table.name}"
        new = TableState(table.relation_id, table.namespace, table.name, name)
        return self.stored.tables.get(table.relation_id, new)

    def write(
        self,
        changes: Sequence[pa.RecordBatch],
        end: int,
        *,
        alterations: Sequence[Alteration] = (),
        key: Sequence[str] | None = None,
        crash: str | None = None,
    ) -> None:
        """Write a window that has what was committed before `end`."""
        table_state = self.table_state
        is_new = table_state.relation_id not in self.stored.tables
        with window(self.target):
            writer, state = self.target.changes(table_state), self.target.state(table_state)
            table_state = table_state._replace(lsn=end)
            for batch in since(changes, writer.lsn):
                if batch.num_rows:
                    assert writer.fits(batch.schema)
                    writer.append(batch)
            writer.commit(table_state)
            if crash == "changes":
                raise Crash
            if is_new:
                state.create(row_schema(changes))
            rest = since(changes, state.lsn)
            if rest and any(batch.num_rows for batch in rest):
                state.apply(alterations, fold(rest, key), table_state)
            if crash == "state":
                raise Crash
            self.stored = TargetState(
                end, {**self.stored.tables, table_state.relation_id: table_state}
            )
            self.target.commit(self.stored)

    def apply(self, net: NetChanges, end: int, alterations: Sequence[Alteration] = ()) -> None:
        """Write net changes into the state table alone."""
        table_state = self.table_state._replace(lsn=end)
        with window(self.target):
            self.target.state(self.table_state).apply(alterations, net, table_state)
            self.stored = TargetState(end, {table_state.relation_id: table_state})
            self.target.commit(self.stored)

    def read(self, kind: str = "state", name: str | None = None) -> pa.Table:
        """What other programs see."""
        directory = self.path / kind / (name or self.table_state.stored_name)
        return deltalake.DeltaTable(str(directory)).to_pyarrow_table()

    def rows(self) -> list[dict[str, Any]]:
        return sorted(self.read().to_pylist(), key=lambda row: json.dumps(row, default=str))


@pytest.fixture
def synced(tmp_path: Path) -> Iterator[Synced]:
    made = Synced(tmp_path / "lake")
    yield made
    made.target.close()


def begun(synced: Synced, *rows: Sequence[Any]) -> None:
    """A first window, with rows of THINGS."""
    synced.write(batches(0x100, *(t.insert(THINGS, list(row)) for row in rows)), 0x101)


def things(*rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(("id", "name", "note"), row, strict=True)) for row in rows]


# --- rows with a key -----------------------------------------------------------------------------


@either
@pytest.mark.usefixtures("merged_by")
def test_rows_come_change_and_go(synced: Synced) -> None:
    begun(synced, [1, "a", "x"], [2, "b", "y"], [3, "c", "z"])
    assert synced.rows() == things([1, "a", "x"], [2, "b", "y"], [3, "c", "z"])
    changes = batches(
        0x200,
        t.update(THINGS, [1, "A", "X"]),
        t.delete(THINGS, {"id": 2}),
        t.insert(THINGS, [4, "d", None]),
    )
    synced.write(changes, 0x201)
    assert synced.rows() == things([1, "A", "X"], [3, "c", "z"], [4, "d", None])
    found = synced.read("changes").sort_by([("commit_lsn", "ascending"), ("seq", "ascending")])
    assert found.column("op").to_pylist() == ["insert"] * 3 + ["update", "delete", "insert"]
    assert found.column("commit_lsn").to_pylist() == [0x100] * 3 + [0x200] * 3
    assert found.column("seq").to_pylist() == [0, 1, 2] * 2
    assert found.column("before").to_pylist()[4] == {"id": 2, "name": None, "note": None}
    assert found.column("after").to_pylist()[3] == {"id": 1, "name": "A", "note": "X"}


@either
@pytest.mark.usefixtures("merged_by")
def test_values_that_were_not_sent_stay_also_where_the_key_changes(synced: Synced) -> None:
    begun(synced, [1, "a", "x"], [2, "b", "y"], [3, "c", None])
    changes = batches(
        0x200,
        t.update(THINGS, [1, "A", UNSENT]),
        # Two take each other's key.
        t.update(THINGS, [9, "b", UNSENT], old={"id": 2}),
        t.update(THINGS, [2, "c", UNSENT], old={"id": 3}),
        t.update(THINGS, [3, "b", UNSENT], old={"id": 9}),
    )
    synced.write(changes, 0x201)
    assert synced.rows() == things([1, "A", "x"], [2, "c", None], [3, "b", "y"])


@either
@pytest.mark.usefixtures("merged_by")
def test_values_that_were_not_sent_are_in_several_files(synced: Synced) -> None:
    begun(synced, [0, "a", "x0"])
    for i in range(1, 6):
        synced.write(batches(0x100 + 16 * i, t.insert(THINGS, [i, "a", f"x{i}"])), 0x101 + 16 * i)
    assert len([*(synced.path / "state" / "public.things").glob("*.parquet")]) == 6
    changes = batches(
        0x200,
        t.update(THINGS, [7, "b", UNSENT], old={"id": 5}),
        t.insert(THINGS, [8, "b", "new"]),
        *(t.update(THINGS, [i, "b", UNSENT]) for i in (3, 2, 0)),
    )
    synced.write(changes, 0x201)
    assert synced.rows() == things(
        [0, "b", "x0"], [1, "a", "x1"], [2, "b", "x2"], [3, "b", "x3"], [4, "a", "x4"],
        [7, "b", "x5"], [8, "b", "new"],
    )  # fmt: skip


@either
@pytest.mark.usefixtures("merged_by")
def test_a_truncate_empties_the_table_first(synced: Synced) -> None:
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    synced.write(batches(0x200, t.truncate([THINGS]), t.insert(THINGS, [2, "new", None])), 0x201)
    assert synced.rows() == things([2, "new", None])
    synced.write(batches(0x300, t.truncate([THINGS])), 0x301)
    assert synced.rows() == []


@pytest.mark.parametrize(
    "frames",
    [
        [t.update(THINGS, [i, "n", "n"]) for i in range(5, 9)],
        [t.insert(THINGS, [2, "n", "n"])],
        [t.delete(THINGS, {"id": 5})],
        [t.update(THINGS, [9, "n", UNSENT], old={"id": 5})],
    ],
)
@either
@pytest.mark.usefixtures("merged_by")
def test_changes_that_do_not_fit_are_refused_before_anything_is_written(
    synced: Synced, frames: list[bytes]
) -> None:
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    directory = synced.path / "state" / "public.things"
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    net = fold(batches(0x200, t.update(THINGS, [1, "A", "X"]), *frames))
    with expect_error(IncompleteError, code="unfit_row", table="public.things"):
        synced.apply(net, 0x201)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


_TYPED: dict[str, Any] = {"int4": int, "text": str, "numeric(12,2)": Decimal, "uuid": str}


def typed(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    return {
        name: None if value is None else _TYPED[columns[name]](value) for name, value in row.items()
    }


def check_history(path: Path, chance: random.Random, windows: int = 5) -> None:
    """Random changes in windows, of which some are cut short and come again, otherwise cut."""
    history = History(chance)
    types = dict(history.columns)
    if chance.random() < 0.5:
        options = {"partition_by": {"public.things": [chance.choice(["id", "code"])]}}
    else:
        options = {}
    synced = Synced(path, history._table(), **options)
    pending: list[pa.RecordBatch] = []
    expected: list[tuple[int, int]] = []
    known: set[str] = set()
    key = history.key if history.full else None
    decoder = pf.ColumnarDecoder(target=DECODED_FOR)
    for made in history.windows(windows):
        types |= history.columns
        changes = [pa.record_batch(batch) for batch in decoder.decode(made.frames)]
        pending += changes
        for batch in changes:
            expected += zip(
                batch.column("commit_lsn").to_pylist(), batch.column("seq").to_pylist(), strict=True
            )
        if not pending:
            continue
        columns = row_schema(pending)
        before = known or set(row_schema(pending[:1]).names)
        added = [AddedColumn(field.name, pa.nulls(1, field.type))
                 for field in columns if field.name not in before]  # fmt: skip
        crash = chance.choice([None, None, "changes", "state"])
        arguments: dict[str, Any] = {"alterations": added, "key": key}
        end = history.lsn + 1
        if crash is not None:
            with pytest.raises(Crash):
                synced.write(pending, end, crash=crash, **arguments)
            synced.reopen()
            if chance.random() < 0.5:
                continue  # with what comes next
            synced.write(pending, end, **arguments)
        else:
            synced.write(pending, end, **arguments)
        known.update(columns.names)
        pending = []
        want = [typed(row, types) for row in made.after.values()]
        got = [{name: row[name] for name in made.columns if name in known}
               for row in synced.read().to_pylist()]  # fmt: skip
        shown = [{name: row.get(name) for name in made.columns if name in known} for row in want]
        order = {"key": lambda row: repr(sorted(row.items()))}
        assert sorted(got, **order) == sorted(shown, **order)
    if not pending and expected:
        found = synced.read("changes").select(["commit_lsn", "seq"]).to_pylist()
        assert sorted((row["commit_lsn"], row["seq"]) for row in found) == sorted(expected)
    synced.target.close()


@either
@pytest.mark.usefixtures("small", "merged_by")
@pytest.mark.parametrize("seed", range(6))
def test_random_histories(tmp_path: Path, seed: int) -> None:
    check_history(tmp_path / "lake", random.Random(seed))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("first", range(100, 220, 30))
def test_many_random_histories(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 30):
        check_history(tmp_path / f"{seed}", random.Random(seed))


# --- other keys, names and types -----------------------------------------------------------------


@either
@pytest.mark.usefixtures("small", "merged_by")
def test_names_of_any_characters(tmp_path: Path) -> None:
    name = 'Order [%]"^`{ä} #@'
    columns = {
        "a.b": "int4", 'quo"te': "text", "a": "text", "SELECT": "text", "B": "text", "ü x": "text",
        "[0]": "text", "%41": "bytea",
    }  # fmt: skip
    table = t.Table(name, columns, key=["a.b", "SELECT"])
    synced = Synced(tmp_path / "lake", table)
    # As `naming` makes it of the name.
    stored = "public.Order [%25]%22^`{ä} #@"
    table_state = synced.table_state._replace(stored_name=stored)
    synced.stored = TargetState(0, {})
    rows = [[i, f"q{i}", "a", f"s{i % 2}", "A", None, "0", "\\x00ff"] for i in range(9)]
    first = batches(0x100, *(t.insert(table, row) for row in rows), table=table)
    second = batches(
        0x200,
        t.update(table, [3, UNSENT, "b", "s1", "B", "u", UNSENT, UNSENT]),
        t.update(table, [77, UNSENT, UNSENT, "S", "B", "u", UNSENT, UNSENT],
                 old={"a.b": 4, "SELECT": "s0"}),
        t.delete(table, {"a.b": 5, "SELECT": "s1"}),
        table=table,
    )  # fmt: skip
    for lsn, changes in ((0x101, first), (0x201, second)):
        table_state = table_state._replace(lsn=lsn)
        with window(synced.target):
            writer, state = (
                synced.target.changes(table_state),
                synced.target.state(table_state._replace(lsn=0)),
            )
            for batch in changes:
                writer.append(batch)
            writer.commit(table_state)
            if changes is first:
                state.create(row_schema(changes))
            state.apply([], fold(changes), table_state)
            synced.target.commit(TargetState(lsn, {table_state.relation_id: table_state}))
    directory = "public.Order@20@5B@25@5D@22@5E@60@7B@C3@A4@7D@20@23@40"
    got = sorted(synced.read(name=directory).to_pylist(), key=lambda row: row["a.b"])
    want = [dict(zip(columns, row, strict=True)) | {"%41": b"\x00\xff"} for row in rows]
    want[3] |= {"a": "b", "B": "B", "ü x": "u"}
    want[4] |= {"a.b": 77, "SELECT": "S", "B": "B", "ü x": "u"}
    want.append(want.pop(4))
    del want[4]
    assert got == want
    assert synced.read("changes", directory).num_rows == 12
    assert synced.reopen().table_state.stored_name == stored
    synced.target.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("bool", ["t", "f", None]),
        ("int8", ["-9223372036854775808", "9223372036854775807", "0"]),
        ("xid8", ["18446744073709551615", "0", "7"]),
        ("float8", ["0", "-0", "NaN"]),
        ("numeric(12,2)", ["-1.50", "0", "99.99"]),
        ("numeric", ["1.0", "1.00", "-3"]),
        ("bytea", ["\\x", "\\x00", "\\xff"]),
        ("date", ["0001-01-01", "9999-12-31", "2024-02-29"]),
        ("timestamp", ["0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "2024-02-29 12:00:00"]),
        ("timestamptz", ["1900-01-01 00:00:00+00", "2024-02-29 12:00:00.000001+00",
                         "2024-02-29 12:00:00.000002+00"]),
        ("time", ["00:00:00", "12:34:56.000001", "23:59:59.5"]),
        ("interval", ["1 mon", "30 days", "720:00:00"]),
        ("text", ["", "a" * 40, "a" * 40 + "\U0010ffff"]),
        ("uuid", [f"00000000-0000-0000-0000-00000000000{i}" for i in range(3)]),
        (1007, ["{}", "{1,NULL}", "{1}"]),
        ("int4range", ["empty", "[1,5)", "(,5)"]),
    ],
)  # fmt: skip
@either
@pytest.mark.usefixtures("small", "merged_by")
def test_keys_of_any_type(tmp_path: Path, kind: str | int, values: list[str]) -> None:
    table = t.Table("things", {"id": kind, "note": "text"})
    synced = Synced(tmp_path / "lake", table)
    one, other, new = values
    first = batches(0x100, t.insert(table, [one, "1"]), t.insert(table, [other, "2"]), table=table)
    if new is None:  # there are only two
        new = one
        last = [t.delete(table, {"id": one}), t.update(table, [new, UNSENT], old={"id": other})]
    else:
        last = [t.update(table, [new, UNSENT], old={"id": other}), t.update(table, [one, "3"])]
    ids = [row["after"]["id"] for batch in first for row in batch.to_pylist()]
    second = batches(0x200, *last, table=table)
    synced.write(first, 0x101)
    before = synced.read().to_pylist()
    assert sorted(row["note"] for row in before) == ["1", "2"]
    assert len({repr(row["id"]) for row in before}) == len(set(map(repr, ids))) == 2
    synced.write(second, 0x201)
    got = sorted((row["note"], repr(row["id"])) for row in synced.read().to_pylist())
    shown = {row["note"]: repr(row["id"]) for row in before}
    if values[2] is None:
        assert got == [("2", shown["1"])]
    else:
        assert [note for note, _ in got] == ["2", "3"]
        assert got[1][1] == shown["1"]
        assert got[0][1] not in shown.values()
    # The row that is gone is not there.
    with expect_error(IncompleteError, code="unfit_row"):
        synced.apply(fold(batches(0x300, t.delete(table, {"id": other}), table=table)), 0x301)
    synced.target.close()


@pytest.mark.parametrize(
    "key",
    ["\U00020bb7\u91ce\u5bb6", "a" * 40, "a" * 32 + "\U0010ffff" * 2 + "a", "\U0010ffff" * 33],
    ids=["escaped", "cut", "cut at the last character", "nothing is greater"],
)
def test_keys_that_statistics_of_files_hold_otherwise(tmp_path: Path, key: str) -> None:
    """Escaped characters, and those with which a long text is cut, are no reason to lose a row."""
    table = t.Table("things", {"id": "text", "note": "text"})
    synced = Synced(tmp_path / "lake", table)
    synced.write(batches(0x100, t.insert(table, [key, "1"]), table=table), 0x101)
    synced.write(batches(0x200, t.update(table, [key, "2"]), table=table), 0x201)
    assert synced.read().to_pylist() == [{"id": key, "note": "2"}]
    synced.target.close()


@either
@pytest.mark.usefixtures("small", "merged_by")
def test_rows_without_a_key_are_counted(tmp_path: Path) -> None:
    table = t.Table("things", {"a": "int4", "b": "text", "c": 1007}, replica_identity="f")
    synced = Synced(tmp_path / "lake", table)
    one, other, third = [1, "x", "{1}"], [1, None, None], [2, "x", None]
    rows = [one] * 5 + [other] * 6 + [third]
    synced.write(batches(0x100, *(t.insert(table, row) for row in rows), table=table), 0x101)
    changes = batches(
        0x200,
        t.delete(table, one), t.delete(table, other),
        t.update(table, third, old=other), t.insert(table, one),
        table=table,
    )  # fmt: skip
    synced.write(changes, 0x201)
    got = [tuple(map(repr, row.values())) for row in synced.read().to_pylist()]
    assert sorted(got) == sorted(
        [("1", "'x'", "[1]")] * 5 + [("1", "None", "None")] * 4 + [("2", "'x'", "None")] * 2
    )
    few = batches(0x300, *[t.delete(table, third)] * 3, table=table)
    with expect_error(IncompleteError, code="unfit_row"):
        synced.apply(fold(few), 0x301)
    cut = batches(0x300, t.truncate([table]), *[t.insert(table, third)] * 2, table=table)
    synced.apply(fold(cut), 0x301)
    assert [row["a"] for row in synced.read().to_pylist()] == [2, 2]
    synced.target.close()


# --- columns that come, go and change ------------------------------------------------------------


def wide(lsn: int, *frames: bytes, table: t.Table) -> NetChanges:
    return fold(batches(lsn, *frames, table=table))


@either
@pytest.mark.usefixtures("merged_by")
def test_columns_are_added_with_values_and_without(synced: Synced) -> None:
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    more = t.Table("things", {"id": "int4", "name": "text", "note": "text", "n": "int4",
                              "at": "timestamp", "u": "uuid"})  # fmt: skip
    alterations = [
        AddedColumn("n", pa.array([7], pa.int32())),
        AddedColumn("at", pa.nulls(1, pa.timestamp("us"))),
        AddedColumn("u", pa.nulls(1, pa.string())),
    ]
    net = wide(
        0x200,
        t.update(more, [2, "b", UNSENT, UNSENT, UNSENT, UNSENT]),
        t.insert(more, [3, "c", None, 8, "2024-01-01 00:00:00", None]),
        table=more,
    )
    synced.apply(net, 0x201, alterations)
    assert [tuple(row.values()) for row in synced.rows()] == [
        (1, "a", "x", 7, None, None),
        (2, "b", "y", 7, None, None),
        (3, "c", None, 8, datetime.datetime(2024, 1, 1), None),
    ]
    # Nothing but null: no file is written anew.
    files = {path.name for path in (synced.path / "state" / "public.things").glob("*.parquet")}
    last = t.Table("things", {"id": "int4", "z": "text"})
    net = wide(0x300, t.insert(last, [4, "z"]), table=last)
    synced.apply(net, 0x301, [AddedColumn("z", pa.nulls(1, pa.string()))])
    assert len({*(synced.path / "state" / "public.things").glob("*.parquet")}) == len(files) + 1
    assert synced.rows()[-1] == {"id": 4, "name": None, "note": None, "n": None, "at": None,
                                 "u": None, "z": "z"}  # fmt: skip


@either
@pytest.mark.usefixtures("merged_by")
def test_a_row_that_is_new_has_the_default_of_a_column_that_came_after_it(synced: Synced) -> None:
    begun(synced, [1, "a", "x"])
    more = t.Table("things", {"id": "int4", "name": "text", "note": "text", "n": "int4"})
    net = wide(0x200, t.update(more, [5, "b", "c", UNSENT], old={"id": 1}), table=more)
    born = net.rows.set_column(2, "expects", pa.array(["present", "absent"]))
    place = born.schema.get_field_index("from_")
    born = born.set_column(
        place, born.schema.field(place), pa.nulls(2, born.schema.field(place).type)
    )
    synced.apply(
        net._replace(batches=born.to_batches), 0x201, [AddedColumn("n", pa.array([7], pa.int32()))]
    )
    assert [tuple(row.values()) for row in synced.rows()] == [(5, "b", "c", 7)]


def test_columns_are_retyped_and_removed_in_the_same_commit_as_the_rows(synced: Synced) -> None:
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    before = deltalake.DeltaTable(str(synced.path / "state" / "public.things")).version()
    other = t.Table("things", {"id": "int8", "name": "int4", "note": "text"})
    alterations = [
        Retyped("id", pa.int64()),
        Removed("name"),
        AddedColumn("name", pa.array([5], pa.int32())),
    ]
    net = wide(0x200, t.update(other, [2, "6", UNSENT]), t.insert(other, [1 << 40, "7", None]),
               table=other)  # fmt: skip
    synced.apply(net, 0x201, alterations)
    found = synced.read()
    assert found.schema == pa.schema({"id": pa.int64(), "note": pa.string(), "name": pa.int32()})
    assert synced.rows() == [
        {"id": 1, "note": "x", "name": 5},
        {"id": 1 << 40, "note": None, "name": 7},
        {"id": 2, "note": "y", "name": 6},
    ]
    log = synced.path / "state" / "public.things" / "_delta_log"
    # Beside it the table may get another list of columns with bounds, which changes no row.
    (commit,) = [
        actions
        for version in range(before + 1, 1 + int(max(log.glob("*.json")).stem))
        if "add" in (actions := (log / f"{version:020}.json").read_text())
    ]
    assert '"remove"' in commit
    assert '"schemaString"' in commit


@either
@pytest.mark.usefixtures("merged_by")
def test_columns_are_renamed_also_in_a_circle(synced: Synced) -> None:
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    other = t.Table("things", {"id": "int4", "note": "text", "name": "text"})
    alterations = [Renamed("name", "name_"), Renamed("note", "name"), Renamed("name_", "note")]
    net = wide(0x200, t.update(other, [2, UNSENT, "new"]), table=other)
    synced.apply(net, 0x201, alterations)
    assert synced.rows() == [
        {"id": 1, "note": "a", "name": "x"},
        {"id": 2, "note": "b", "name": "new"},
    ]


@either
@pytest.mark.usefixtures("merged_by")
def test_alterations_that_a_crash_left_done_are_not_done_again(synced: Synced) -> None:
    begun(synced, [1, "a", "x"])
    other = t.Table("things", {"id": "int4", "note": "text", "name": "text"})
    alterations = [Removed("name"), AddedColumn("name", pa.array(["5"]))]
    changes = batches(0x200, t.insert(other, [2, "y", "6"]), table=other)
    with pytest.raises(Crash):
        synced.write(changes, 0x201, alterations=alterations, crash="state")
    synced.reopen()
    more = batches(0x300, t.insert(other, [3, "z", "7"]), table=other)
    synced.write([*changes, *more], 0x301, alterations=alterations)
    assert synced.rows() == [
        {"id": 1, "name": "5", "note": "x"},
        {"id": 2, "name": "6", "note": "y"},
        {"id": 3, "name": "7", "note": "z"},
    ]
    synced.target.close()
    synced.stored = synced.reopen().stored
    assert synced.stored.lsn == 0x301


def test_change_tables_get_columns_and_new_versions(synced: Synced) -> None:
    begun(synced, [1, "a", "x"])
    more = t.Table("things", {"id": "int4", "name": "text", "note": "text", "n": "timestamp"})
    added = AddedColumn("n", pa.nulls(1, pa.timestamp("us")))
    synced.write(batches(0x200, t.insert(more, [2, "b", "y", "2024-01-01 00:00:00"]), table=more),
                 0x201, alterations=[added])  # fmt: skip
    found = synced.read("changes").sort_by("commit_lsn").column("after").to_pylist()
    assert found == [
        {"id": 1, "name": "a", "note": "x", "n": None},
        {"id": 2, "name": "b", "note": "y", "n": datetime.datetime(2024, 1, 1)},
    ]
    other = t.Table("things", {"id": "int8", "name": "text"})
    (changes,) = batches(0x300, t.insert(other, [3, "c"]), table=other)
    with window(synced.target):
        writer = synced.target.changes(synced.table_state)
        assert not writer.fits(changes.schema)
        table_state = synced.table_state._replace(version=2, lsn=0x301)
        second = synced.target.changes(table_state)
        assert (second.lsn, second.fits(changes.schema)) == (0, True)
        second.append(changes)
        second.commit(table_state)
        synced.stored = TargetState(0x301, {table_state.relation_id: table_state})
        synced.target.commit(synced.stored)
    assert synced.read("changes").num_rows == 2
    assert synced.read("changes", "public.things.v2").column("after").to_pylist() == [
        {"id": 3, "name": "c"}
    ]


# --- snapshots -----------------------------------------------------------------------------------


def copied(synced: Synced, rows: Sequence[pa.RecordBatch], lsn: int) -> None:
    table_state = synced.table_state._replace(lsn=lsn, copy_lsn=lsn)
    with window(synced.target):
        state = synced.target.state(synced.table_state)
        state.load(rows[0].schema)
        for batch in rows:
            state.append(batch)
        state.loaded(table_state)
        synced.stored = TargetState(lsn, {table_state.relation_id: table_state})
        synced.target.commit(synced.stored)


@pytest.mark.usefixtures("small")
def test_a_snapshot_replaces_everything(synced: Synced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_files, "_FILE_BYTES", 600)
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    schema = pa.schema({"id": pa.int64(), "at": pa.timestamp("us")})
    rows = [pa.RecordBatch.from_pylist([{"id": i, "at": i}], schema) for i in range(30)]
    copied(synced, rows, 0x500)
    assert [row["id"] for row in sorted(synced.read().to_pylist(), key=lambda row: row["id"])] == [
        *range(30)
    ]
    assert synced.read().schema == rows[0].schema
    assert len(deltalake.DeltaTable(str(synced.path / "state" / "public.things")).file_uris()) > 1
    state = synced.target.state(synced.table_state)
    assert (state.lsn, state.copy_lsn) == (0x500, 0x500)


# --- types ---------------------------------------------------------------------------------------


def expected(value: Any) -> Any:
    """A decoder's value, as a Delta table has it: times are the server's text."""
    if isinstance(value, datetime.time):
        text = value.isoformat()
        return text.rstrip("0") if value.microsecond else text
    if isinstance(value, dict):
        return {name: expected(one) for name, one in value.items()}
    if isinstance(value, list):
        return [expected(one) for one in value]
    return value


def test_values_of_all_types_are_kept(tmp_path: Path) -> None:
    from support.frames.vector_files import read_vectors

    target = DeltaTarget(tmp_path / "lake")
    target.open(ORIGIN)
    seen: set[str] = set()
    policies = pf.Policies(
        infinity="null", out_of_range="null", special_values="null", arrays="text"
    )
    with window(target):
        for vector in read_vectors():
            is_wanted = vector.get("class") == "Insert" and "all_types" in vector["id"]
            if not is_wanted or vector["in_stream"] or vector["relation"][1] in seen:
                continue
            decoder = pf.ColumnarDecoder(policies, target=DECODED_FOR)
            found = list(
                decoder.decode([t.begin(1), *vector["before"], vector["frame"], t.commit()])
            )
            (made,) = found
            number = len(seen)
            seen.add(vector["relation"][1])
            batch = pa.record_batch(made)
            table_state = TableState(number, "public", f"t{number}", f"public.t{number}", lsn=0x101)
            state, changes = target.state(table_state), target.changes(table_state)
            rows = pa.RecordBatch.from_arrays(
                batch.column("after").flatten(), schema=row_schema([batch])
            )
            state.load(rows.schema)
            state.append(rows)
            state.loaded(table_state)
            changes.append(batch)
            changes.commit(table_state)
            want = [expected(one) for one in rows.to_pylist()]
            for kind in ("state", "changes"):
                table = deltalake.DeltaTable(
                    str(tmp_path / "lake" / kind / table_state.stored_name)
                )
                got = table.to_pyarrow_table()
                if kind == "changes":
                    assert repr(got.column("after").to_pylist()) == repr(want)
                else:
                    assert repr(got.to_pylist()) == repr(want)
    assert len(seen) >= 25
    target.close()


@either
@pytest.mark.usefixtures("merged_by")
def test_every_type_has_a_column(tmp_path: Path) -> None:
    from pgoutput_fast.types import BUILTIN_TYPES

    names = [entry.name for entry in BUILTIN_TYPES]
    columns: dict[str, Any] = {name: name for name in [*names, "numeric(50,2)", "numeric(10,2)"]}
    columns |= {f"{one.name}[]": one.array_oid for one in BUILTIN_TYPES if one.array_oid}
    table = t.Table("things", {"id": "int4", **columns})
    synced = Synced(tmp_path / "lake", table)
    first = t.insert(table, ["1", *[None] * len(columns)])
    synced.write(batches(0x100, first, table=table), 0x101)
    synced.write(
        batches(0x200, t.update(table, ["1", *[UNSENT] * len(columns)]), table=table), 0x201
    )
    (row,) = synced.read().to_pylist()
    assert row == {"id": 1, **dict.fromkeys(columns)}
    synced.target.close()


# --- whose target it is --------------------------------------------------------------------------


def test_a_second_sync_is_refused(synced: Synced) -> None:
    with expect_error(code="in_use"):
        DeltaTarget(synced.path).open(ORIGIN)


def test_another_database_and_other_things_are_refused(tmp_path: Path) -> None:
    synced = Synced(tmp_path / "lake")
    synced.target.close()
    with expect_error(code="another_history", path=str(tmp_path / "lake")):
        DeltaTarget(tmp_path / "lake").open(ORIGIN._replace(database="other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with expect_error(code="not_ours", path=str(tmp_path / "other")):
        DeltaTarget(tmp_path / "other").open(ORIGIN)
    for name in ("50%", "a[b", "x`"):
        with expect_error(code="bad_option"):
            DeltaTarget(tmp_path / name)


def test_tables_without_their_progress_are_refused(synced: Synced) -> None:
    """By verify too, which says what is missing."""
    begun(synced, [1, "a", "x"])
    shutil.rmtree(synced.path / "_progress")
    with expect_error(code="damaged", path=str(synced.path)):
        DeltaTarget(synced.path).peek(ORIGIN)
    with expect_error(code="damaged", path=str(synced.path)):
        open_target(str(synced.path), None, pf.TypeRegistry)


# --- other programs ------------------------------------------------------------------------------


def newest(path: str) -> int:
    return int(deltalake.DeltaTable(path).version())


HARMLESS: dict[str, Any] = {
    "compact": lambda path: deltalake.DeltaTable(path).optimize.compact(),
    "z_order": lambda path: deltalake.DeltaTable(path).optimize.z_order(["id"]),
    "vacuum": lambda path: deltalake.DeltaTable(path).vacuum(
        0, dry_run=False, enforce_retention_duration=False
    ),
    "feature": lambda path: deltalake.DeltaTable(path).alter.add_feature(
        deltalake.TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
    ),
    "comment": lambda path: deltalake.DeltaTable(path).alter.set_table_description("theirs"),
}
HARMFUL: dict[str, Any] = {
    "update": lambda path: deltalake.DeltaTable(path).update({"note": "'theirs'"}),
    "delete": lambda path: deltalake.DeltaTable(path).delete("id = 1"),
    "append": lambda path: deltalake.write_deltalake(
        path, deltalake.DeltaTable(path).to_pyarrow_table().slice(0, 1), mode="append"
    ),
    "overwrite": lambda path: deltalake.write_deltalake(
        path, deltalake.DeltaTable(path).to_pyarrow_table(), mode="overwrite"
    ),
    "restore": lambda path: deltalake.DeltaTable(path).restore(newest(path) - 1),
}
FOREIGN = {**HARMLESS, **HARMFUL}
WINDOWS: dict[str, Any] = {
    "rewrites a file": ((), lambda: [t.update(THINGS, [1, "A", UNSENT])]),
    "adds a file": ((), lambda: [t.insert(THINGS, [5, "e", "v"])]),
    "replaces all": ((), lambda: [t.truncate([THINGS]), t.insert(THINGS, [9, "i", "s"])]),
    "alters": (
        (AddedColumn("n", pa.array([7], pa.int32())),),
        lambda: [t.delete(THINGS, {"id": 2}), t.insert(THINGS, [6, "f", "u"])],
    ),
}
AFTER = {
    "rewrites a file": things([1, "A", "x"], [2, "b", "y"]),
    "adds a file": things([1, "a", "x"], [2, "b", "y"], [5, "e", "v"]),
    "replaces all": things([9, "i", "s"]),
    "alters": [{**things([1, "a", "x"])[0], "n": 7}, {**things([6, "f", "u"])[0], "n": None}],
}


def beside(monkeypatch: pytest.MonkeyPatch, do: Any) -> None:
    """Have something be done once, when a merge has read and written all, and commits next."""
    write, left = delta_merge.Merge.write, [do]

    def written(self: Any, *given: Any) -> Any:
        found = write(self, *given)
        if left:
            left.pop()()
        return found

    monkeypatch.setattr(delta_merge.Merge, "write", written)


@pytest.mark.parametrize("what", cases(WINDOWS, ["rewrites a file"]))
@pytest.mark.parametrize("foreign", cases(FOREIGN, ["compact", "update"]))
@pytest.mark.parametrize("moment", ["between", *nightly("before")])
def test_commits_of_others_beside_a_merge(
    synced: Synced, monkeypatch: pytest.MonkeyPatch, what: str, foreign: str, moment: str
) -> None:
    """A merge stands on the version that it has read, or the table is stale by name."""
    begun(synced, [1, "a", "x"])
    synced.write(batches(0x180, t.insert(THINGS, [2, "b", "y"])), 0x181)
    path = str(synced.path / "state" / "public.things")
    alterations, frames = WINDOWS[what]
    changes = batches(0x200, *frames())
    if moment == "between":
        beside(monkeypatch, lambda: FOREIGN[foreign](path))
    else:
        FOREIGN[foreign](path)
    if foreign in HARMLESS:
        synced.write(changes, 0x201, alterations=alterations)
        assert synced.rows() == AFTER[what]
        synced.target.close()
        (table_state,) = synced.reopen().stored.tables.values()
        assert table_state.stale is None
        return
    with expect_error(IncompleteError, code="stale", table="public.things"):
        synced.write(changes, 0x201, alterations=alterations)
    version = newest(path)
    synced.target.close()
    (table_state,) = synced.reopen().stored.tables.values()
    assert (table_state.stale or "").startswith(CHANGED)
    # Its rows come again, whatever it has; then it is ours.
    state = synced.target.state(table_state)
    types = {"id": pa.int32(), "name": pa.string(), "note": pa.string(), "n": pa.int32()}
    fields = [(name, types[name]) for name in AFTER[what][0]]
    rows = pa.RecordBatch.from_pylist(AFTER[what], pa.schema(fields))
    state.load(rows.schema)
    state.append(rows)
    state.loaded(table_state._replace(lsn=0x301, copy_lsn=0x300))
    assert newest(path) > version
    assert synced.rows() == AFTER[what]
    synced.target.close()
    (table_state,) = synced.reopen().stored.tables.values()
    assert table_state.stale is None


@pytest.mark.parametrize("foreign", cases(FOREIGN, ["compact", "update"]))
def test_commits_of_others_in_a_change_table(synced: Synced, foreign: str) -> None:
    """Changes go on behind them; those that may be others now are a gap, which stays recorded."""
    begun(synced, [1, "a", "x"])
    path = str(synced.path / "changes" / "public.things")
    writer = synced.target.changes(synced.table_state)
    (changes,) = batches(0x200, t.insert(THINGS, [2, "b", "y"]))
    writer.append(changes)
    operations = {
        "z_order": lambda: deltalake.DeltaTable(path).optimize.z_order(["seq"]),
        "update": lambda: deltalake.DeltaTable(path).update({"op": "'theirs'"}),
        "delete": lambda: deltalake.DeltaTable(path).delete("commit_lsn = 256"),
    }
    if foreign == "restore":
        synced.write(batches(0x180, t.insert(THINGS, [3, "c", "z"])), 0x181)
    operations.get(foreign, lambda: FOREIGN[foreign](path))()
    position = synced.target.changes(synced.table_state).lsn
    gap = position if foreign in HARMFUL else None
    if foreign == "restore":
        writer = synced.target.changes(synced.table_state)
        writer.append(changes)
    writer.commit(synced.table_state._replace(lsn=0x201))
    assert writer.gap == gap
    assert 0x200 in synced.read("changes").column("commit_lsn").to_pylist()
    synced.target.close()
    (table_state,) = synced.reopen().stored.tables.values()
    assert (table_state.gap, table_state.stale) == (gap, None)


def test_a_log_that_has_lost_commits(synced: Synced) -> None:
    """Nobody knows what other programs did there."""
    begun(synced, [1, "a", "x"])
    for kind in ("state", "changes"):
        path = str(synced.path / kind / "public.things")
        for name in ("first", "second"):
            deltalake.DeltaTable(path).alter.set_table_description(name)
        deltalake.DeltaTable(path).create_checkpoint()
        (Path(path) / "_delta_log" / f"{newest(path) - 1:020}.json").unlink()
    synced.target.close()
    (table_state,) = synced.reopen().stored.tables.values()
    assert (table_state.stale or "").startswith(CHANGED)
    assert table_state.gap == 0x101


def test_a_feature_that_nobody_here_knows(synced: Synced) -> None:
    """It is refused by name, also while a sync goes on."""
    begun(synced, [1, "a", "x"])
    deltalake.DeltaTable(str(synced.path / "state" / "public.things")).alter.add_feature(
        deltalake.TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    for _ in range(2):
        with expect_error(code="not_supported"):
            synced.write(batches(0x200, t.update(THINGS, [1, "A", "X"])), 0x201)


def test_files_are_joined_beside_other_programs(
    synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they add stays, and what they have joined is not joined twice."""
    monkeypatch.setattr(delta_table, "_PER_TIER", 2)
    for number in range(4):
        synced.write(batches(0x100 * number + 0x100, t.insert(THINGS, [number, "a", "x"])),
                     0x100 * number + 0x101)  # fmt: skip
    table = synced.target.changes(synced.table_state).table
    path = str(synced.path / "changes" / "public.things")
    replace, left = delta_table.LakeTable._replace, []

    def replaced(self: Any, *given: Any) -> None:
        if left:
            FOREIGN[left.pop()](path)
        replace(self, *given)

    monkeypatch.setattr(delta_table.LakeTable, "_replace", replaced)
    for foreign, files in (("append", 2), ("compact", 1)):
        before = synced.read("changes").num_rows
        left.append(foreign)
        table.load()
        table._compact_unless_changed()
        assert synced.read("changes").num_rows == before + (foreign == "append")
        assert len(deltalake.DeltaTable(path).file_uris()) == files
    assert table.changed is not None


def test_a_full_disk_says_that_nothing_is_lost(tmp_path: Path) -> None:
    place = delta_place.DeltaPlace(str(tmp_path))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        expect_error(code="disk_full"),
        place.refusals("table x"),
    ):
        raise full
    with expect_error(code="io_failed"), place.refusals("table x"):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def test_what_is_there_is_found_out_without_writing(synced: Synced, tmp_path: Path) -> None:
    """Also while another one has the target."""
    new = tmp_path / "new"
    assert DeltaTarget(new).peek(ORIGIN) == TargetState(0, {})
    assert not new.exists()
    begun(synced, [1, "a", "x"])
    before = {path: path.stat().st_mtime_ns for path in synced.path.rglob("*")}
    assert DeltaTarget(synced.path).peek(ORIGIN)._replace(policies=None) == synced.stored
    assert {path: path.stat().st_mtime_ns for path in synced.path.rglob("*")} == before
    with expect_error(code="another_history"):
        DeltaTarget(synced.path).peek(ORIGIN._replace(database="other"))


def test_a_table_of_something_else_is_not_touched(synced: Synced) -> None:
    for kind in ("state", "changes"):
        path = synced.path / kind / "public.things"
        deltalake.write_deltalake(str(path), pa.table({"id": [1]}))
    for writer in (synced.target.state, synced.target.changes):
        with expect_error(code="not_ours"):
            writer(synced.table_state)
    path = synced.path / "state" / "public.letters"
    path.mkdir()
    (path / "letter.txt").write_text("dear")
    with expect_error(code="not_ours", path=str(path)):
        synced.target.state(synced.table_state._replace(stored_name="public.letters"))


def test_two_that_write_at_the_same_time_do_not_both(synced: Synced) -> None:
    """As on object storage, where nothing is locked."""
    begun(synced, [1, "a", "x"])
    assert synced.target._lock is not None
    os.close(synced.target._lock)
    other = DeltaTarget(synced.path)
    other.open(ORIGIN)
    changes = batches(0x200, t.insert(THINGS, [2, "b", "y"]))
    table_state = synced.table_state._replace(lsn=0x201)
    targets = (synced.target, other)
    writers = [
        (target.changes(synced.table_state), target.state(synced.table_state)) for target in targets
    ]
    for writer, _ in writers:
        writer.append(changes[0])
    writers[0][0].commit(table_state)
    writers[0][1].apply([], fold(changes), table_state)
    with expect_error(code="conflict"):
        writers[1][0].commit(table_state)
    with expect_error(code="conflict"):
        writers[1][1].apply([], fold(changes), table_state)
    synced.target.commit(TargetState(0x201, {table_state.relation_id: table_state}))
    with expect_error(code="conflict"):
        other.commit(TargetState(0x201, {table_state.relation_id: table_state}))
    assert synced.rows() == things([1, "a", "x"], [2, "b", "y"])
    assert synced.read("changes").num_rows == 2
    synced.target._lock = None


def test_changes_that_it_has_are_refused(synced: Synced) -> None:
    begun(synced, [1, "a", "x"])
    (changes,) = batches(0x80, t.insert(THINGS, [2, "b", "y"]))
    table_state = synced.table_state._replace(lsn=0x81)
    with expect_error(code="unfit_input", table="public.things"):
        synced.target.state(synced.table_state).apply([], fold([changes]), table_state)
    writer = synced.target.changes(synced.table_state)
    writer.append(changes)
    with expect_error(code="unfit_input", table="public.things"):
        writer.commit(table_state)


# --- names, partitions, maintenance, readers -----------------------------------------------------


@pytest.mark.slow
def test_tables_change_places_also_if_that_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for crash_after in (None, 0, 1, 2, 4):
        path = tmp_path / str(crash_after)
        target = DeltaTarget(path)
        target.open(ORIGIN)
        tables = {}
        for number, name in ((1, "a"), (2, "b")):
            table = t.Table(name, {"id": "int4"}, relation_id=number)
            changes = batches(0x100, t.insert(table, [number]), table=table)
            table_state = TableState(number, "public", name, f"public.{name}", lsn=0x101)
            target.changes(table_state).append(changes[0])
            target._writers[-1].commit(table_state)
            state = target.state(table_state._replace(lsn=0))
            state.create(row_schema(changes))
            state.apply([], fold(changes), table_state)
            tables[number] = table_state
        target.commit(TargetState(0x101, tables))
        target.rename(tables[1], "public.a~1")
        target.rename(tables[2], "public.a")
        target.rename(tables[1]._replace(stored_name="public.a~1"), "public.b")
        tables[1] = tables[1]._replace(stored_name="public.b")
        tables[2] = tables[2]._replace(stored_name="public.a")
        calls = []
        move = target.place.move

        def cut(before: str, after: str, calls: Any = calls, move: Any = move,
                most: Any = crash_after) -> None:  # fmt: skip
            if len(calls) == most:
                raise Crash
            calls.append(before)
            move(before, after)

        monkeypatch.setattr(target.place, "move", cut)
        if crash_after is None:
            target.commit(TargetState(0x101, tables))
        else:
            with pytest.raises(Crash):
                target.commit(TargetState(0x101, tables))
        target.close()
        target = DeltaTarget(path)
        assert target.open(ORIGIN)._replace(policies=None) == TargetState(0x101, tables)
        for number, table_state in tables.items():
            for kind, column in (("state", "id"), ("changes", "after")):
                found = deltalake.DeltaTable(
                    str(path / kind / table_state.stored_name)
                ).to_pyarrow_table()
                want = [number] if kind == "state" else [{"id": number}]
                assert found.column(column).to_pylist() == want
            assert target.state(table_state).lsn == 0x101
        target.close()


def test_state_tables_are_partitioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"partition_by": {"public.things": ["name"]}, "retention_hours": 0}
    synced = Synced(tmp_path / "lake", **options)
    begun(synced, [1, "ä /=%", "x"], [2, "b", "y"], [3, None, "z"], [4, "b", "4"])
    changes = batches(
        0x200, t.update(THINGS, [2, "ä /=%", UNSENT]), t.update(THINGS, [3, "b", UNSENT])
    )
    synced.write(changes, 0x201)
    assert synced.rows() == things(
        [1, "ä /=%", "x"], [2, "ä /=%", "y"], [3, "b", "z"], [4, "b", "4"]
    )
    table = deltalake.DeltaTable(str(synced.path / "state" / "public.things"))
    assert table.metadata().partition_columns == ["name"]
    assert sorted(one["name"] for one in table.partitions()) == ["b", "ä /=%"]
    more = t.update(THINGS, [1, UNSENT, "1"]), t.insert(THINGS, [5, None, "5"])
    synced.write(batches(0x210, *more), 0x211)
    for _ in range(2):  # its files are found again, joined and deleted by their paths
        rows = [[1, "ä /=%", "1"], [2, "ä /=%", "y"], [3, "b", "z"], [4, "b", "4"]]
        rows.append([5, None, "5"])
        assert synced.rows() == things(*rows)
        of_it = synced.target.state(synced.table_state).table
        monkeypatch.setattr(delta_table, "_PER_TIER", 2)
        of_it.compact()
        of_it.vacuum()
    directory = synced.path / "state" / "public.things"
    assert sorted(one.parent.name for one in directory.rglob("*.parquet")) == [
        "name=__HIVE_DEFAULT_PARTITION__", "name=b", "name=ä %2F%3D%25"
    ]  # fmt: skip
    # Readers that take partitions from the files' paths.
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    path = str(synced.path / "state" / "public.things")
    of_polars = polars.scan_delta(path).select("id", "name", "note").sort("id").collect()
    assert [[*row] for row in of_polars.rows()] == rows
    of_duckdb = duckdb.sql(
        f"SELECT id, name, note FROM read_parquet('{path}/*/*.parquet', hive_partitioning = true) "
        "ORDER BY id"
    )
    assert [[*row] for row in of_duckdb.fetchall()] == rows
    with expect_error(code="unfit_value"):
        synced.write(batches(0x300, t.insert(THINGS, [9, "", ""])), 0x301)
    synced.target.close()
    wrong = Synced(tmp_path / "other", partition_by={"public.things": ["nobody"]})
    with expect_error(code="bad_option", parameter="partition_by", table="public.things"):
        begun(wrong, [1, "a", "x"])
    wrong.target.close()


@pytest.mark.parametrize(("given", "then"), [(["name"], []), (["note", "name"], ["note"])])
def test_a_column_of_partitions_that_is_dropped(
    tmp_path: Path, given: list[str], then: list[str]
) -> None:
    """The new snapshot is partitioned by those that are left."""
    options = {"partition_by": {"public.things": given}}
    synced = Synced(tmp_path / "lake", **options)
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    narrow = t.Table("things", {"id": "int4", "note": "text"})
    changes = batches(0x200, t.insert(narrow, [3, "z"]), table=narrow)
    with pytest.raises(IncompleteError):
        synced.write(changes, 0x201, alterations=[Removed("name")])
    left = tuple(StateColumn(name, name, 25, -1, "text") for name in ("id", "note"))
    table_state = synced.table_state._replace(stale="a column was dropped", columns=left)
    for lsn in (0x300, 0x400):
        with window(synced.target):
            state = synced.target.state(table_state)
            state.load(row_schema(changes))
            rows = [{"id": 1, "note": "x"}, {"id": lsn, "note": "y"}]
            state.append(pa.RecordBatch.from_pylist(rows, row_schema(changes)))
            table_state = table_state._replace(lsn=lsn, copy_lsn=lsn, stale=None)
            state.loaded(table_state)
            synced.target.commit(TargetState(lsn, {table_state.relation_id: table_state}))
        assert synced.reopen().rows() == rows
        table = deltalake.DeltaTable(str(tmp_path / "lake" / "state" / "public.things"))
        assert table.metadata().partition_columns == then
    synced.target.close()


def test_a_column_of_partitions_that_is_renamed(tmp_path: Path) -> None:
    synced = Synced(tmp_path / "lake", partition_by={"public.things": ["name"]})
    begun(synced, [1, "a", "x"])
    renamed = t.Table("things", {"id": "int4", "title": "text", "note": "text"})
    changes = batches(0x200, t.update(renamed, [1, "b", "y"]), table=renamed)
    with pytest.raises(IncompleteError):
        synced.write(changes, 0x201, alterations=[Renamed("name", "title")])
    assert synced.reopen().rows() == things([1, "a", "x"])
    synced.target.close()
    with expect_error(code="bad_option", parameter="partition_by", table="public.things"):
        Synced(tmp_path / "lake", partition_by={"public.things": ["note"]})


@pytest.mark.slow
@either
@pytest.mark.usefixtures("merged_by")
def test_many_commits_leave_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(tmp_path / "lake", retention_hours=0)
    monkeypatch.setattr(delta_table, "_MAINTAINED", 8)
    monkeypatch.setattr(delta_table, "VACUUMED", 16)
    for i in range(1, 41):
        synced.write(batches(i << 8, t.insert(THINGS, [i, "a", "b"])), (i << 8) + 1)
    synced.target.close()  # which waits for what is being joined
    for kind in ("state", "changes"):
        assert synced.read(kind).num_rows == 40
        directory = synced.path / kind / "public.things"
        assert len(deltalake.DeltaTable(str(directory)).file_uris()) <= 16
        assert len([*directory.glob("*.parquet")]) <= 30
    assert len([*(synced.path / "_progress").glob("*.parquet")]) <= 20
    # What was joined is no change of the rows.
    assert synced.reopen().stored.lsn == (40 << 8) + 1
    synced.target.close()


class Waiting:
    """Joins of files that take their time: they go on when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.found: list[int] = []
        commit = delta_table.LakeTable.commit

        def slow(
            table: delta_table.LakeTable, files: Any, removed: Any, position: Any, **more: Any
        ) -> None:
            if position is None and table.directory.startswith("changes/"):
                self.begun.set()
                assert self.goes_on.wait(60)
                self.found.append(len(removed))
            commit(table, files, removed, position, **more)

        monkeypatch.setattr(delta_table.LakeTable, "commit", slow)
        monkeypatch.setattr(delta_table, "_MAINTAINED", 8)


@pytest.mark.slow
def test_windows_go_on_while_files_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch)
    synced = Synced(tmp_path / "lake")
    for i in range(1, 31):  # at the version 8 it is time; at 16 and 24 the first one is not done
        synced.write(batches(i << 8, t.insert(THINGS, [100 + i, "a", "b"])), (i << 8) + 1)
        if i == 9:  # which files it joins is known before others come
            assert waiting.begun.wait(60)
    table = deltalake.DeltaTable(str(synced.path / "changes" / "public.things"))
    assert len(table.file_uris()) == 30
    waiting.goes_on.set()
    synced.target._joins.wait()
    assert waiting.found == [9, 9]  # it was not the first one to commit, and then it was
    table.update_incremental()
    assert len(table.file_uris()) == 30 - 9 + 1
    # It is still time for what came meanwhile.
    synced.write(batches(31 << 8, t.insert(THINGS, [131, "a", "b"])), (31 << 8) + 1)
    synced.target.close()
    assert waiting.found == [9, 9, 23]
    changes = synced.read("changes")
    assert sorted(changes.column("commit_lsn").to_pylist()) == [i << 8 for i in range(1, 32)]
    assert synced.rows() == things(*([100 + i, "a", "b"] for i in range(1, 32)))
    assert synced.reopen().stored.lsn == (31 << 8) + 1
    writer = synced.target.changes(synced.table_state)
    assert writer.lsn == (31 << 8) + 1
    synced.target.close()


def test_columns_are_added_while_files_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch)
    synced = Synced(tmp_path / "lake")
    for i in range(1, 10):
        synced.write(batches(i << 8, t.insert(THINGS, [i, "a", "b"])), (i << 8) + 1)
    assert waiting.begun.wait(60)
    wider = t.Table("things", {"id": "int4", "name": "text", "note": "text", "more": "int4"})
    changes = batches(0xA00, t.insert(wider, [10, "a", "b", 7]), table=wider)
    added = [AddedColumn("more", pa.array([None], pa.int32()))]
    synced.write(changes, 0xA01, alterations=added)
    waiting.goes_on.set()
    synced.target._joins.wait()  # which has no error
    synced.target.close()
    # Its file lacks the column, as those that it replaces do.
    assert waiting.found == [9, 9]
    found = synced.read("changes").sort_by("commit_lsn")
    assert found.column("commit_lsn").to_pylist() == [i << 8 for i in range(1, 11)]
    assert [one["more"] for one in found.column("after").to_pylist()] == [None] * 9 + [7]
    table = deltalake.DeltaTable(str(synced.path / "changes" / "public.things"))
    assert len(table.file_uris()) == 2


@pytest.mark.slow
def test_old_files_are_deleted_when_what_is_joined_is_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that no commit has yet is not taken for one that was left over."""
    waiting = Waiting(monkeypatch)
    monkeypatch.setattr(delta_table, "VACUUMED", 16)
    synced = Synced(tmp_path / "lake", retention_hours=0)
    for i in range(1, 16):
        synced.write(batches(i << 8, t.insert(THINGS, [i, "a", "b"])), (i << 8) + 1)
        if i == 9:
            assert waiting.begun.wait(60)
    threading.Timer(0.3, waiting.goes_on.set).start()
    for i in range(16, 20):
        synced.write(batches(i << 8, t.insert(THINGS, [i, "a", "b"])), (i << 8) + 1)
    synced.target.close()
    assert waiting.found[0] == 9
    changes = synced.read("changes")
    assert sorted(changes.column("commit_lsn").to_pylist()) == [i << 8 for i in range(1, 20)]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "behind"])
def test_commits_are_on_disk_with_the_joins_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    synced = Synced(tmp_path / "lake")
    for i in range(1, 10):
        synced.write(batches(i << 8, t.insert(THINGS, [i, "a", "b"])), (i << 8) + 1)
    on_disk: set[Path] = set()
    monkeypatch.setattr(delta_table, "fsync_path", on_disk.add)
    log = synced.path / "changes" / "public.things" / "_delta_log"
    before = {one for one in log.iterdir() if one.suffix == ".json"}
    write, joined = deltalake.DeltaTable.create_write_transaction, []

    def join() -> None:
        joined.append(when)
        own = synced.target._tables["changes/public.things"]
        beside = delta_table.LakeTable(own.place, own.directory, own.app, 6)
        beside.load()
        beside.compact()
        on_disk.clear()  # what only the other one has waited for

    def joined_behind(table: Any, *args: Any, **more: Any) -> None:
        write(table, *args, **more)
        if "/changes/" in table.table_uri and not joined:
            join()

    if when == "before":
        join()
    else:
        monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", joined_behind)
    synced.write(batches(0xA00, t.insert(THINGS, [10, "a", "b"])), 0xA01)
    new = {one for one in log.iterdir() if one.suffix == ".json"} - before
    assert joined == [when]
    assert len(new) == 2
    assert new <= on_disk
    assert log in on_disk
    synced.target.close()


@pytest.mark.slow
def test_a_table_is_renamed_when_its_files_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch)
    synced = Synced(tmp_path / "lake")
    for i in range(1, 10):
        synced.write(batches(i << 8, t.insert(THINGS, [i, "a", "b"])), (i << 8) + 1)
    assert waiting.begun.wait(60)
    threading.Timer(0.3, waiting.goes_on.set).start()
    table_state = synced.table_state
    synced.target.rename(table_state, "public.others")
    synced.stored = TargetState(
        0x901, {table_state.relation_id: table_state._replace(stored_name="public.others")}
    )
    synced.target.commit(synced.stored)
    assert not (synced.path / "changes" / "public.things").exists()
    moved = synced.path / "changes" / "public.others"
    assert len(deltalake.DeltaTable(str(moved)).file_uris()) == 1
    synced.target.close()


def test_files_hold_values_once_that_repeat(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "op": ["insert"] * 100,
            "after": [{"id": i, "kind": "a", "in": {"n": i % 2, "t": str(i)}} for i in range(100)],
            "tags": [[str(i)] for i in range(100)],
        }
    )
    found = ["op", "after.kind", "after.in.n", "tags.list.element"]
    assert delta_statistics.repeating(rows) == found
    assert delta_statistics.repeating(rows.slice(50)) == found


def test_directories_have_names_that_all_readers_take(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    name = 'Odd.Schema.My "Table" ü%41'
    path = tmp_path / delta_place.directory_of(stored_table("Odd.Schema", name[11:]))
    assert path.name == "Odd@2ESchema.My@20@22Table@22@20@C3@BC@2541"
    deltalake.write_deltalake(str(path), pa.table({"id": [1]}))
    assert polars.read_delta(str(path)).rows() == [(1,)]


@either
@pytest.mark.usefixtures("merged_by")
def test_polars_and_duckdb_read_it(synced: Synced) -> None:
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    begun(synced, [1, "a", "x"], [2, "b", "y"])
    more = t.Table("things", {"id": "int4", "name": "text", "note": "text", "n": "int4"})
    changes = batches(0x200, t.update(more, [2, "c", UNSENT, "5"]), table=more)
    synced.write(changes, 0x201, alterations=[AddedColumn("n", pa.nulls(1, pa.int32()))])
    path = str(synced.path / "state" / "public.things")
    found = polars.read_delta(path).sort("id").rows()
    assert found == [(1, "a", "x", None), (2, "c", "y", 5)]
    arrow = deltalake.DeltaTable(path).to_pyarrow_table()
    assert duckdb.from_arrow(arrow).order("id").fetchall() == found
    path = str(synced.path / "changes" / "public.things")
    assert deltalake.DeltaTable(path).to_pyarrow_table().num_rows == 3


def test_progress_tells_how_far_each_table_is(synced: Synced) -> None:
    begun(synced, [1, "a", "x"])
    table_state = synced.table_state._replace(
        commit_time=5,
        stale="why",
        copy_lsn=0x50,
        columns=(StateColumn("id", "id_", 23, -1, "int32", 1),),
    )
    other = table_state._replace(relation_id=1 << 31, stored_name="public.other")
    stored = TargetState(0x900, {table_state.relation_id: table_state, 1 << 31: other})
    with window(synced.target):
        synced.target.commit(stored)
    path = str(synced.path / "_progress")
    rows = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("relation_id").to_pylist()
    assert rows[0] == {
        "schema": "public", "table": "things", "relation_id": table_state.relation_id,
        "stored": "public.things", "version": 1, "lsn": 0x101, "copy_lsn": 0x50,
        "commit_time": datetime.datetime(1970, 1, 1, microsecond=5, tzinfo=datetime.timezone.utc),
        "stale": "why", "columns": '[["id", "id_", 23, -1, "int32", 1]]', "moves": "[]",
        "own": "[[257, 0], [257, 0]]",
        "gap": None, "schema_lsn": 0, "paused": None, "paused_since": None, "gaps": "[]",
    }  # fmt: skip
    assert synced.reopen().stored._replace(policies=None) == stored


# --- object storage ------------------------------------------------------------------------------


@pytest.mark.slow
def test_object_storage() -> None:
    """The server is another process, as delta-rs waits for it without letting others run."""
    pytest.importorskip("moto")
    from pyarrow.fs import FileSelector, S3FileSystem

    script = paths.SUPPORT / "targets" / "object_storage.py"
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        check_object_storage(endpoint, S3FileSystem, FileSelector)
        assert server.stdin is not None
        server.stdin.close()


def check_object_storage(endpoint: str, s3: Any, selector: Any) -> None:
    """Two windows, a table of another name, and errors that tell no secret."""
    secret = "a-secret-that-nobody-may-see"
    files = s3(
        endpoint_override=endpoint, access_key="k", secret_key=secret, allow_bucket_creation=True
    )
    files.create_dir("bucket")
    url = "s3://bucket/some/lake"
    options = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_secret_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    target = DeltaTarget(url, options)
    assert secret not in repr(target) + repr(target.place)
    stored = target.open(ORIGIN)
    table_state = TableState(THINGS.relation_id, "public", "th.ings", "public.th%2Eings")
    frames = [
        [t.insert(THINGS, [1, "a", "x"]), t.insert(THINGS, [2, "b", "y"])],
        [t.update(THINGS, [7, "c", UNSENT], old={"id": 1}), t.delete(THINGS, {"id": 2})],
    ]
    for number, sent in enumerate(frames, 1):
        changes = batches(number << 8, *sent)
        with window(target):
            writer, state = target.changes(table_state), target.state(table_state)
            table_state = table_state._replace(lsn=(number << 8) + 1)
            writer.append(changes[0])
            writer.commit(table_state)
            if number == 1:
                state.create(row_schema(changes))
            state.apply([], fold(changes), table_state)
            stored = TargetState(table_state.lsn, {table_state.relation_id: table_state})
            target.commit(stored)
    # Another table comes by the name: the former one needs a snapshot by its new name.
    with window(target):
        renamed = target.rename(table_state, "public.other")
        assert (renamed.stored_name, renamed.version, renamed.stale) == ("public.other", 1, RENAMED)
        other = target.new_table_state(
            table_state._replace(relation_id=99, lsn=0x400, copy_lsn=0x400)
        )
        assert other.version == 2
        tables = {table_state.relation_id: renamed, 99: other}
        target.commit(TargetState(0x400, tables))
    with window(target):
        state = target.state(other)
        state.load(row_schema(changes))
        state.append(pa.RecordBatch.from_pylist(things([5, "e", "z"]), row_schema(changes)))
        found = deltalake.DeltaTable(f"{url}/state/public.th@2Eings", storage_options=options)
        assert found.to_pyarrow_table().to_pylist() == things([7, "c", "x"])
        state.loaded(other)
        stored = TargetState(0x400, tables)
        target.commit(stored)
    target.close()
    target = DeltaTarget(url, options)
    assert target.open(ORIGIN)._replace(policies=None) == stored
    found = deltalake.DeltaTable(f"{url}/state/public.th@2Eings", storage_options=options)
    assert found.to_pyarrow_table().to_pylist() == things([5, "e", "z"])
    found = deltalake.DeltaTable(f"{url}/changes/public.th@2Eings", storage_options=options)
    assert found.to_pyarrow_table().num_rows == 4
    found = files.get_file_info(selector("bucket/some/lake", recursive=True))
    assert not [one.path for one in found if one.is_file and "public.other" in one.path]
    options["AWS_ENDPOINT_URL"] = f"{endpoint}/{secret}"
    with expect_error(code="io_failed") as error:
        DeltaTarget(f"{url}-", options).open(ORIGIN)
    assert secret not in str(error.value)
