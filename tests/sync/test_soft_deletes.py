"""Rows that are deleted stay in state tables, with a mark: by a plain model, and by example."""

from __future__ import annotations

import contextlib
import datetime
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.changelogs.made_directory import TIME, MadeDirectory
from support.commands.option_files import config
from support.expected_errors import expect_error
from support.targets.histories import History
from support.targets.synced_tables import KINDS, TABLES, DuckdbTables, Tables

import pgoutput_fast as pf
from pgoutput_fast import apply, testing
from pgoutput_fast.apply import delta_table
from pgoutput_fast.apply.folding import Folding
from pgoutput_fast.apply.options import TargetOptions
from pgoutput_fast.apply.stored_changes import BatchConversion
from pgoutput_fast.apply.synchronize import open_target
from pgoutput_fast.apply.targets import TableState, TargetOrigin, TargetState, window
from pgoutput_fast.cli import main
from pgoutput_fast.errors import Argument

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

MARK = "gone at"
ORIGIN = TargetOrigin("7000000000000000001", "shop")
HELD = TableState(16390, "public", "things", "public.things")
_TYPED: dict[str, Any] = {"int4": int, "text": str, "numeric(12,2)": Decimal, "uuid": str}
_2000 = 946_684_800_000_000  # in microseconds since 1970


@pytest.fixture(params=KINDS)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return TABLES[request.param](tmp_path)


def at(microseconds: int) -> datetime.datetime:
    """A time since 1970."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return epoch + datetime.timedelta(microseconds=microseconds)


# --- at random -----------------------------------------------------------------------------------


class Model:
    """What a state table with soft deletes has."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.marked: list[tuple[dict[str, Any], int, int]] = []
        """Rows, and the first and the last moment when they may have been deleted."""
        self.rows: list[dict[str, Any]] = []

    def take(self, made: Any, begin: int) -> None:
        """What a window does."""
        span = begin * 1000 + _2000, self.history.lsn * 1000 + _2000
        if self.history.full:
            before = Counter(map(frozen, made.before.values()))
            after = Counter(map(frozen, made.after.values()))
            if any(frame[:1] == b"T" for frame in made.frames):
                after = Counter()
            gone = [dict(row) for row in (before - after).elements()]
        else:
            gone = [row for key, row in made.before.items() if key not in made.after]
            self.marked = [one for one in self.marked if self.key_of(one[0]) not in made.after]
        self.marked += [(row, *span) for row in gone]
        self.rows = list(made.after.values())

    def key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.history.key)


def frozen(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(row.items()))


def check_history(tables: Tables, seed: int) -> int:
    """How many rows were marked at the end."""
    history = History(random.Random(seed))
    history._alter = lambda: None  # type: ignore[method-assign]
    model = Model(history)
    opened = open_target(tables.target, TargetOptions(soft_deletes=MARK))
    opened.target.open(ORIGIN)
    decoder = pf.ColumnarDecoder(target=opened.decode_for)
    types = {name: _TYPED[kind] for name, kind in history.columns.items()}
    begin, is_new = history.lsn, True
    for made in history.windows(6):
        changes = [pa.record_batch(batch) for batch in decoder.decode(made.frames)]
        if not changes:
            continue
        model.take(made, begin)
        begin = history.lsn + 1
        folding = Folding(() if history.full else history.key)
        for batch in changes:
            folding.add(BatchConversion.of(batch.schema, ()).batch(batch))
        with window(opened.target):
            state = opened.target.state(HELD)
            if is_new:
                state.create(pa.schema(list(changes[0].schema.field("after").type)))
            is_new = False
            state.apply([], folding.finish(), HELD._replace(lsn=begin))
            opened.target.commit(TargetState(begin, {HELD.relation_id: HELD._replace(lsn=begin)}))
        check(tables, model, types)
    opened.target.close()
    return len(model.marked)


def check(tables: Tables, model: Model, types: dict[str, Any]) -> None:
    found = tables.state("public.things").to_pylist()

    def typed(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        return frozen({name: None if value is None else types[name](value)
                       for name, value in row.items()})  # fmt: skip

    there = Counter(frozen({name: row[name] for name in types})
                    for row in found if row[MARK] is None)  # fmt: skip
    assert there == Counter(map(typed, model.rows))
    marked = [(frozen({name: row[name] for name in types}), row[MARK])
              for row in found if row[MARK] is not None]  # fmt: skip
    wanted = [(typed(row), at(first), at(last)) for row, first, last in model.marked]
    assert len(marked) == len(wanted)
    for (row, time), (want, first, last) in zip(
        sorted(marked, key=repr_of), sorted(wanted, key=repr_of), strict=True
    ):
        assert row == want
        assert first <= time <= last


def repr_of(one: Any) -> tuple[str, Any]:
    return repr(one[0]), one[1]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]


@pytest.mark.everyday("duckdb")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories_with_soft_deletes(tables: Tables, seed: int) -> None:
    assert check_history(tables, seed) or seed


# --- known values --------------------------------------------------------------------------------

THINGS = testing.Table("things", {"id": "int4", "note": "text"}, 16390, key=["id"])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def sync(made: MadeDirectory, tables: Tables, **options: Any) -> apply.SyncProgress:
    given = {"soft_deletes": "_deleted_at", **options}
    return apply.sync(segments=made.directory, **tables.given, until="now", **given)


def rows(tables: Tables) -> list[tuple[Any, ...]]:
    found = tables.state("public.things").to_pylist()
    return sorted((row["id"], row["note"], row["_deleted_at"]) for row in found)


@pytest.mark.slow
def test_deleted_rows_stay_until_their_key_comes_again(made: MadeDirectory, tables: Tables) -> None:
    time = at(TIME + _2000)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"], [3, "c"]])
    made.commit(1200, THINGS.relation(), testing.delete(THINGS, [1, None], "K"))
    sync(made, tables)
    assert rows(tables) == [(1, "a", time), (2, "b", None), (3, "c", None)]
    made.commit(
        1300,
        testing.update(THINGS, [4, pf.UNCHANGED], [2, None], "K"),
        testing.insert(THINGS, [1, "again"]),
    )
    sync(made, tables)
    assert rows(tables) == [(1, "again", None), (2, "b", time), (3, "c", None), (4, "b", None)]
    made.commit(1400, testing.truncate([THINGS]), testing.insert(THINGS, [3, "new"]))
    sync(made, tables)
    assert rows(tables) == [(1, "again", time), (2, "b", time), (3, "new", None), (4, "b", time)]
    # A deleted row is none that an update could meet.
    made.commit(1500, testing.update(THINGS, [4, "x"]))
    with expect_error(code="unfit_row", table="public.things"):
        sync(made, tables, on_error="stop")
    # The rows of a snapshot are all that the table has.
    made.wait(THINGS, 1600, first=False)
    made.copy(THINGS, 1700, [[4, "x"]])
    made.commit(1800, testing.insert(THINGS, [5, "y"]))
    sync(made, tables)
    assert rows(tables) == [(4, "x", None), (5, "y", None)]


def test_a_target_keeps_to_its_kind_of_deletes(made: MadeDirectory, tables: Tables) -> None:
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"]])
    made.commit(1200, THINGS.relation(), testing.insert(THINGS, [2, "b"]))
    sync(made, tables)
    with expect_error(
        code="bad_option",
        parameter="soft_deletes",
        options=[Argument("soft_deletes", "_deleted_at")],
    ):
        sync(made, tables, soft_deletes=None)
    with expect_error(
        code="bad_option",
        parameter="soft_deletes",
        options=[Argument("soft_deletes", "_deleted_at")],
    ):
        sync(made, tables, soft_deletes="other")
    assert rows(tables) == [(1, "a", None), (2, "b", None)]


def test_a_column_of_the_servers_where_rows_are_marked(made: MadeDirectory, tables: Tables) -> None:
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"]])
    made.commit(1200, THINGS.relation(), testing.insert(THINGS, [2, "b"]))
    with expect_error(code="unfit_schema", parameter="soft_deletes", table="public.things"):
        sync(made, tables, soft_deletes="NOTE", on_error="stop")
    assert not tables.has("state", "public.things")
    if isinstance(tables, DuckdbTables):
        # By this name DuckDB finds rows, which such a column would hide.
        with expect_error(code="bad_option", parameter="soft_deletes"):
            sync(made, tables, soft_deletes="RowId")


@pytest.mark.everyday("duckdb")
def test_a_column_of_the_servers_that_is_renamed(made: MadeDirectory, tables: Tables) -> None:
    """A new snapshot ends the pause, as the error says."""
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"]])
    made.commit(1200, THINGS.relation(), testing.insert(THINGS, [2, "b"]))
    assert [*sync(made, tables, soft_deletes="NOTE").paused] == ["public.things"]
    renamed = testing.Table("things", {"id": "int4", "other": "text"}, 16390, key=["id"])
    made.wait(renamed, 1250, first=False)
    made.copy(renamed, 1300, [[1, "a"], [2, "b"]])
    made.commit(1400, renamed.relation(), testing.insert(renamed, [3, "c"]))
    sync(made, tables, soft_deletes="NOTE")
    ended = sync(made, tables, soft_deletes="NOTE")
    assert (ended.paused, ended.stale) == ({}, {})
    found = tables.state("public.things").to_pylist()
    assert sorted((row["id"], row["other"], row["NOTE"]) for row in found) == [
        (1, "a", None), (2, "b", None), (3, "c", None),
    ]  # fmt: skip


def test_options_of_delta_tables_are_the_commands(made: MadeDirectory, tmp_path: Path) -> None:
    import deltalake

    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"]])
    made.commit(1200, THINGS.relation(), testing.delete(THINGS, [1, None], "K"))
    command = [
        "sync", "--segments", str(made.directory), "--to", str(tmp_path / "lake"), "--until", "now",
        "--soft-deletes", "gone", "--partition-by", "public.things=note,id",
        *config(maintenance=False, retention_hours=3),
    ]  # fmt: skip
    assert main(command) == 0
    table = deltalake.DeltaTable(str(tmp_path / "lake" / "state" / "public.things"))
    assert table.metadata().partition_columns == ["note", "id"]
    assert table.metadata().configuration["delta.deletedFileRetentionDuration"] == (
        "interval 3 hours"
    )
    found = table.to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["note"], row["gone"]) for row in found) == [
        (1, "a", at(TIME + _2000)), (2, "b", None)
    ]  # fmt: skip


@pytest.mark.slow
def test_no_files_are_joined_where_another_job_does_it(
    made: MadeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_table, "_MAINTAINED", 2)
    monkeypatch.setattr(delta_table, "_PER_TIER", 2)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [])
    made.commit(1200, THINGS.relation(), testing.insert(THINGS, [0, "a"]))
    files = {}
    for name in ("joined", "left"):
        (tmp_path / name).mkdir()
    for number in range(1, 7):
        made.commit(1200 + 100 * number, testing.insert(THINGS, [number, "a"]))
        for name, maintains in (("joined", True), ("left", False)):
            tables = TABLES["delta"](tmp_path / name)
            sync(made, tables, maintenance=maintains)
            files[name] = len(list((tables.path / "changes" / "public.things").glob("*.parquet")))
            assert len(rows(tables)) == number + 1
    # Files that were joined stay for a while.
    assert files["left"] == 6
    assert files["joined"] > 6


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_the_column_has_a_name(made: MadeDirectory, tmp_path: Path, name: str) -> None:
    with expect_error(code="bad_option", parameter="soft_deletes"):
        sync(made, DuckdbTables(tmp_path), soft_deletes=name)
