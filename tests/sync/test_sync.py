"""Tables that `apply.sync` keeps up to date, beside a simulated server and capture."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.changelogs.made_directory import OIDS, MadeDirectory, catalog_read
from support.changelogs.simulated_directory import Simulation
from support.expected_errors import expect_error
from support.targets.synced_tables import (
    ALL_KINDS,
    KEPT,
    TABLES,
    DeltaTables,
    DuckdbTables,
    Tables,
)

import pgoutput_fast as pf
from pgoutput_fast import apply, cli, testing
from pgoutput_fast.apply import stored_changes, syncing, window_writer
from pgoutput_fast.apply.duckdb_target import DuckdbTarget
from pgoutput_fast.apply.naming import free_name, renames, stored_table
from pgoutput_fast.apply.table_plan import SELECTED_AGAIN, SKIPPED, UNSELECTED
from pgoutput_fast.apply.targets import RememberedOptions, StateColumn, TableState
from pgoutput_fast.apply.unpublished import mistaken
from pgoutput_fast.changelog import merging
from pgoutput_fast.changelog.requests import requested
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.changelog.schema_history import HistoryWriter
from pgoutput_fast.errors import Argument

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("deltalake")


class KilledError(BaseException):
    """The process was killed."""


def rows(tables: Tables, stored: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tables.state(stored).to_pylist()
    return sorted(found, key=str)


def test_a_column_that_goes_is_told_once_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its table becomes stale no values go, and nothing says so."""
    caplog.set_level("INFO", "pgoutput_fast.apply")
    tables = DuckdbTables(tmp_path)
    wide, narrow, renamed = (
        testing.Table("t", {"id": "int4", **dict.fromkeys(names, "text")}, 16390, key=["id"])
        for names in (["a", "b"], ["a"], ["c"])
    )
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        made.wait(wide, 1000)
        made.copy(wide, 1100, [[1, "a", "b"]])
        for lsn, table, columns in (
            (2000, narrow, {"id", "a"}), (3000, renamed, {"id", "a"}),
        ):  # fmt: skip
            caplog.clear()
            made.commit(lsn, table.relation(), testing.insert(table, [lsn, "x"]))
            found = apply.sync(segments=made.directory, until="now", **tables.given)
            assert [*found.stale] == ["public.t"] * (table is renamed)
            assert {*rows(tables, "public.t")[0]} == columns
            told = [one.args for one in caplog.records if one.msg.startswith("column %s of ")]
            assert told == [("b", "public.t")] * (table is narrow)


@pytest.mark.parametrize("cells", [1 << 20, 0])
def test_changes_of_several_layouts(
    cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB gets those of a window in one statement, unless too much of it would be null."""
    monkeypatch.setattr(stored_changes, "_CELLS", cells)
    run: Any = DuckdbTarget.run
    statements: list[str] = []

    def noting(self: Any, statement: str, **given: Any) -> Any:
        statements.append(statement)
        return run(self, statement, **given)

    monkeypatch.setattr(DuckdbTarget, "run", noting)
    tables = DuckdbTables(tmp_path)
    first, wide, other = (
        testing.Table("t", {"id": "int4", **columns}, 16390, key=["id"])
        for columns in ({"a": "text"}, {"a": "text", "b": 1007}, {"b": 1007})
    )
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        made.wait(first, 1000)
        made.copy(first, 1100, [[1, "a"]])
        apply.sync(segments=made.directory, until="now", **tables.given)
        statements.clear()
        made.commit(2000, first.relation(), testing.insert(first, [2, None]),
                    testing.delete(first, [1, None]))  # fmt: skip
        made.commit(3000, wide.relation(), testing.insert(wide, [3, "c", "{3}"]))
        made.commit(4000, other.relation(), testing.insert(other, [4, None]))
        apply.sync(segments=made.directory, until="now", **tables.given)
    written = [one for one in statements if '"changes"' in one and one.endswith("FROM rows")]
    assert len(written) == (1 if cells else 3)
    found = tables.changes("public.t").to_pylist()
    assert [(row["commit_lsn"], row["before"], row["after"]) for row in found][2:] == [
        (2000, None, {"id": 2, "a": None, "b": None}),
        (2000, {"id": 1, "a": None, "b": None}, None),
        (3000, None, {"id": 3, "a": "c", "b": [3]}),
        (4000, None, {"id": 4, "a": None, "b": None}),
    ]


# --- at random -----------------------------------------------------------------------------------


class Syncing(Simulation):
    """Syncs of a directory into tables, some of which are killed."""

    def __init__(self, root: Path, seed: int, tables: Tables) -> None:
        super().__init__(root, seed)
        self.tables = tables
        self.killed = 0

    def read(self) -> None:
        if self.chance.random() < 0.6:
            return  # so that the next time there are several segments
        with contextlib.ExitStack() as stack:
            if self.chance.random() < 0.5:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                stack.enter_context(contextlib.suppress(KilledError))
                self.kill(patch)
            apply.sync(
                segments=self.directory, **self.tables.given, until="now",
                on_error="stop", window_bytes=self.chance.choice((1, 3000, 1 << 20)),
            )  # fmt: skip
            self.compare()

    def kill(self, patch: pytest.MonkeyPatch) -> None:
        """Have a call end at some moment, as if the process were killed."""
        advance = syncing.Consumer, "advance"
        steps = self.tables.steps
        owner, name = self.chance.choice([*[advance] * len(steps), *steps])
        original, left = getattr(owner, name), [self.chance.randrange(2)]

        def called(*args: Any, **keywords: Any) -> Any:
            if not left[0]:
                self.killed += 1
                raise KilledError
            left[0] -= 1
            return original(*args, **keywords)

        patch.setattr(owner, name, called)

    def compare(self) -> None:
        self.counts["reads"] += 1
        for relation_id, held in self.tables.progress().items():
            if self.tables.has_state:
                found = rows(self.tables, held["stored"])
                truth = self.world.rows(relation_id, held["lsn"])
                assert len(found) == len(truth)
                assert {row["id"]: row["v"] for row in found} == truth
            assert held["stale"] is None
            if self.tables.has_changes:
                self.compare_changes(held)

    def compare_changes(self, held: dict[str, Any]) -> None:
        """Each change is there once, and all from the newest snapshot on."""
        changes = sorted(
            self.tables.changes(held["stored"]).to_pylist(),
            key=lambda row: (row["commit_lsn"], row["seq"]),
        )
        assert len({(row["commit_lsn"], row["seq"]) for row in changes}) == len(changes)
        made: dict[int, str] = {}
        for row in changes:
            assert row["commit_lsn"] < held["lsn"]
            if row["op"] == "truncate":
                made.clear()
            elif row["op"] == "delete":
                made.pop(row["before"]["id"])
            else:
                assert (row["after"]["id"] in made) == (row["op"] == "update")
                made[row["after"]["id"]] = row["after"]["v"]
        assert made == self.world.rows(held["relation_id"], held["lsn"])


# Other kinds of change tables differ in these alone.
SEEDS = [
    pytest.param(seed, kind, marks=[pytest.mark.slow] * (seed > 0))
    for seed in range(10)
    for kind in (*TABLES, *KEPT)
    if seed < 3 or kind in ("duckdb", "delta", "distributed")
]


@pytest.mark.everyday("0-duckdb", "0-delta")
@pytest.mark.parametrize(("seed", "kind"), SEEDS)
def test_whatever_comes_the_tables_are_the_servers(
    seed: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # else segments stay small, and are read in windows of several
        monkeypatch.setattr(merging, "FAN", 2)
        monkeypatch.setattr(merging, "_SMALLEST", 1 << 30)
    tables = {**TABLES, **KEPT}[kind](tmp_path)
    syncs = Syncing(tmp_path, seed, tables)
    syncs.run(150)
    syncs.settle()
    syncs.capture.close()
    apply.sync(segments=syncs.directory, **tables.given, until="now")
    syncs.compare()
    assert set(tables.progress()) <= set(OIDS)
    assert syncs.killed or seed


# --- known values --------------------------------------------------------------------------------

ACCOUNTS = testing.Table("accounts", {"id": "int4", "note": "text"}, 16390, key=["id"])


@pytest.fixture(params=ALL_KINDS)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return TABLES[request.param](tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def sync(made: MadeDirectory, kept: Tables, **options: Any) -> apply.SyncProgress:
    options = {"until": "now", **kept.given, **options}
    return apply.sync(segments=made.directory, **options)


def test_a_table_without_a_snapshot(made: MadeDirectory, tables: Tables) -> None:
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    with expect_error(code="no_snapshot", table="public.accounts"):
        sync(made, tables)
    assert tables.progress() == {}
    found = sync(made, tables, uncopied="empty")
    assert (found.changes, found.stale) == (1, {})
    assert rows(tables, "public.accounts") == [{"id": 1, "note": "a"}]


def test_changes_alone(made: MadeDirectory, tables: Tables) -> None:
    made.commit(2000, ACCOUNTS.relation(), testing.update(ACCOUNTS, [1, "b"]))
    found = sync(made, tables, uncopied="changes")
    assert found.stale == {"public.accounts": "its rows before the capture are not known"}
    ((row),) = tables.changes("public.accounts").to_pylist()
    assert (row["op"], row["after"]) == ("update", {"id": 1, "note": "b"})
    assert not tables.has("state", "public.accounts")
    # Nobody asked for its rows, until a call wants them.
    assert not (made.directory / "requests").exists()
    sync(made, tables)
    assert (made.directory / "requests").exists()


@pytest.mark.everyday("duckdb")
def test_changes_that_do_not_fit(made: MadeDirectory, tables: Tables) -> None:
    made.wait(ACCOUNTS, 1500)
    made.copy(ACCOUNTS, 1600, [[1, "a"], [2, "b"]])
    made.commit(2000, ACCOUNTS.relation(), testing.update(ACCOUNTS, [2, "c"]))
    sync(made, tables)
    made.commit(3000, ACCOUNTS.relation(), testing.update(ACCOUNTS, [3, "lost"]))
    with expect_error(code="unfit_row", table="public.accounts"):
        sync(made, tables, on_error="stop")
    assert tables.progress()[16390]["lsn"] < 3000  # nothing of the window was written
    found = sync(made, tables)
    assert list(found.stale) == ["public.accounts"]
    assert rows(tables, "public.accounts") == [{"id": 1, "note": "a"}, {"id": 2, "note": "c"}]
    (request,) = (made.directory / "requests").iterdir()
    asked = json.loads(request.read_text())
    assert asked["table"] == ["public", "accounts"]
    assert re.fullmatch(r"the sync to .* requested it: .* no row with .*", asked["why"])
    # The capture answers with a copy, which has what came before it.
    made.wait(ACCOUNTS, 3100, first=False)
    made.copy(ACCOUNTS, 3200, [[1, "x"], [3, "y"]])
    made.commit(4000, ACCOUNTS.relation(), testing.delete(ACCOUNTS, [1, None], "K"))
    found = sync(made, tables)
    assert found.stale == {}
    assert rows(tables, "public.accounts") == [{"id": 3, "note": "y"}]
    assert tables.progress()[16390]["copy_lsn"] == 3200


@pytest.mark.everyday("duckdb")
def test_a_target_that_lacks_changes(made: MadeDirectory, tables: Tables) -> None:
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    sync(made, tables, uncopied="empty")
    tables.back_up()
    made.commit(3000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    sync(made, tables)
    tables.restore()
    made.commit(4000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [3, "c"]))
    with expect_error(code="changes_missing", table="public.accounts"):
        sync(made, tables)
    tables.remove()  # a new one begins where the directory does
    sync(made, tables, uncopied="empty")
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 2, 3]


@pytest.mark.slow
def test_a_target_that_lacks_changes_of_a_table_that_left(
    made: MadeDirectory, tables: Tables, tmp_path: Path
) -> None:
    """Nobody can copy it again; the others go on."""
    other = testing.Table("other", {"id": "int4"}, 16391)
    for one in (ACCOUNTS, other):
        made.wait(one, 1000)
        made.copy(one, 1100, [])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    sync(made, tables)
    anew = MadeDirectory(tmp_path / "anew", 2000)
    with contextlib.closing(anew):
        HistoryWriter(anew.directory, None).note(catalog_read(2000, ACCOUNTS))
        anew.wait(ACCOUNTS, 2000)
        anew.copy(ACCOUNTS, 2100, [[1, "a"], [2, "b"]])
        anew.commit(2200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [3, "c"]))
        found = sync(anew, tables)
    assert "was dropped or left the publications" in found.stale["public.other"]
    assert [*found.stale] == ["public.other"]
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 2, 3]
    assert requested(anew.directory) == {}


def test_a_directory_whose_beginning_is_deleted(made: MadeDirectory, tables: Tables) -> None:
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    made.commit(3000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    retain(made.directory, Keep(bytes=0), made.writer.store_position)
    with expect_error(code="changes_missing", parameter="uncopied"):
        sync(made, tables, uncopied="empty")


@pytest.mark.slow
def test_how_far_it_is_while_changes_come_for_a_table_that_waits(
    made: MadeDirectory, tables: Tables
) -> None:
    other = testing.Table("other", {"id": "int4"}, 16391)
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    sync(made, tables)
    made.wait(other, 1300)
    for lsn in (1400, 1500):
        made.commit(lsn, other.relation(), testing.insert(other, [lsn]))
        ended = sync(made, tables)
        assert (ended.waiting, ended.lsn) == (("public.other",), lsn + 10)
        assert {row["table"]: row["lsn"] for row in tables.progress().values()} == {
            "accounts": lsn + 10
        }
    # A copy of a later point voids what came before, and is read once that has come.
    made.copy(other, 1620, [[1400], [1500]])
    sync(made, tables)
    assert {row["table"] for row in tables.progress().values()} == {"accounts"}
    made.commit(1600, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [3, "c"]))
    made.commit(1700, other.relation(), testing.insert(other, [1700]))
    sync(made, tables)
    assert [row["id"] for row in rows(tables, "public.other")] == [1400, 1500, 1700]
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 2, 3]
    assert sorted(tables.changes("public.other").column("op").to_pylist()) == [
        "insert", "read", "read", "truncate"
    ]  # fmt: skip
    # While one waits, the copy of another one is of a point that has not come yet.
    made.wait(ACCOUNTS, 1710, first=False)
    made.commit(1800, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [4, "d"]))
    made.copy(ACCOUNTS, 1950, [[4, "d"]])
    made.wait(other, 1810, first=False)
    for lsn in (1900, 1920):
        made.commit(lsn, other.relation(), testing.insert(other, [lsn]))
        sync(made, tables)
        assert {row["table"]: row["lsn"] for row in tables.progress().values()} == {
            "accounts": 1710, "other": 1810
        }  # fmt: skip
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 2, 3]


@pytest.mark.slow
def test_small_windows_come_past_a_copy_within_a_segment(
    made: MadeDirectory, tables: Tables
) -> None:
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    sync(made, tables)
    made.wait(ACCOUNTS, 1210, first=False)
    made.copy(ACCOUNTS, 1250, [[1, "a"], [2, "b"], [3, "c"]])
    made.commit(1300, ACCOUNTS.relation(), testing.delete(ACCOUNTS, [1, None], "K"))
    ended = sync(made, tables, window_bytes=1)
    assert ended.lsn == 1310
    assert [row["id"] for row in rows(tables, "public.accounts")] == [2, 3]
    assert [row["lsn"] for row in tables.progress().values()] == [1310]
    ops = tables.changes("public.accounts").column("op").to_pylist()
    assert sorted(ops) == ["delete", "insert", *["read"] * 4, *["truncate"] * 2]


@pytest.mark.slow
@pytest.mark.parametrize("much", [True, False])
def test_while_much_comes_a_window_waits_for_more(
    made: MadeDirectory, tables: Tables, monkeypatch: pytest.MonkeyPatch, much: bool
) -> None:
    monkeypatch.setattr(syncing, "_MUCH_BYTES", 1 if much else 1 << 30)
    monkeypatch.setattr(syncing, "_GATHER", 3600.0)
    monkeypatch.setattr(syncing, "_TOLD", 0.0)
    stop, told = threading.Event(), list[int]()

    def note(progress: apply.SyncProgress) -> None:
        told.append(progress.windows)
        if told.count(1) == 1 and told[-1] == 1:
            made.commit(1300, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
        if told.count(1) == 6 or told[-1] == 2:
            stop.set()

    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [9, "b"]))
    ended = sync(made, tables, until=None, stop=stop, interval=0.0, progress=note)
    assert ended.windows == (1 if much else 2)
    assert ended.lsn == (1210 if much else 1310)
    # What waits is read as soon as nothing more is to come.
    assert sync(made, tables, until="now").lsn == 1310


def kill_behind_a_commit(
    made: MadeDirectory, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write a window, and be killed before it is stored that it was read."""

    def killed(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(syncing.Consumer, "advance", killed)
        with pytest.raises(KilledError):
            sync(made, tables)


@pytest.mark.slow
def test_a_copy_that_comes_again_does_not_mend_a_table(
    made: MadeDirectory, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before it is stored that a window was read; changes behind the copy were wrong."""
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    made.commit(1300, testing.update(ACCOUNTS, [9, "nobody"]))
    kill_behind_a_commit(made, tables, monkeypatch)
    for lsn in (1400, 1500):
        made.commit(lsn, testing.insert(ACCOUNTS, [lsn, "c"]))
        assert "(id) = (9)" in sync(made, tables).stale["public.accounts"]
    made.wait(ACCOUNTS, 1510, first=False)
    made.copy(ACCOUNTS, 1550, [[1, "a"], [2, "b"]])
    made.commit(1600, testing.insert(ACCOUNTS, [3, "d"]))
    assert sync(made, tables).stale == {}
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 2, 3]


@pytest.mark.slow
def test_a_copy_with_other_columns_and_a_kill(
    made: MadeDirectory, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before the target says that the state table has the rows of the copy."""
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    sync(made, tables)
    other = testing.Table(
        ACCOUNTS.name, {"id": "int4", "n": "int4"}, ACCOUNTS.relation_id, key=["id"]
    )
    made.wait(ACCOUNTS, 1110, first=False)
    made.copy(other, 1150, [[1, 7]])
    made.commit(1200, other.relation(), testing.insert(other, [2, 8]))

    def killed(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(tables.steps[0][0], "commit", killed)
        with pytest.raises(KilledError):
            sync(made, tables)
    assert sync(made, tables).stale == {}
    made.commit(1300, testing.insert(other, [3, 9]))
    assert sync(made, tables).stale == {}
    assert rows(tables, "public.accounts") == [
        {"id": 1, "n": 7}, {"id": 2, "n": 8}, {"id": 3, "n": 9}
    ]  # fmt: skip


def test_smaller_windows_after_a_kill(
    made: MadeDirectory, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target has already is read again, in more than one window, and counts once."""
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    sync(made, tables)
    for lsn in (1200, 1300, 1400):
        made.commit(lsn, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [lsn, "b"]))
    kill_behind_a_commit(made, tables, monkeypatch)
    assert sync(made, tables, window_bytes=1).stale == {}
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 1200, 1300, 1400]
    changes = tables.changes("public.accounts").column("commit_lsn").to_pylist()
    assert sorted(changes) == [1099, 1099, 1200, 1300, 1400]
    assert [row["lsn"] for row in tables.progress().values()] == [1410]


@pytest.mark.slow
@pytest.mark.slow
def test_a_target_keeps_to_its_tables(made: MadeDirectory, tables: Tables) -> None:
    """The changes of others are passed over, and so are not there for a later call."""
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    chosen = {"uncopied": "empty", "tables": ["public.accounts", "public.b*"]}
    sync(made, tables, **chosen)
    for other in (None, "public.accounts", ["public.accounts", "public.c"]):
        with expect_error(
            code="bad_option",
            parameter="tables",
            options=[Argument("tables", ["public.accounts", "public.b*"])],
        ):
            sync(made, tables, **{**chosen, "tables": other})
    made.commit(3000, testing.insert(ACCOUNTS, [2, "b"]))
    sync(made, tables, **{**chosen, "tables": chosen["tables"][::-1]})
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 2]


def test_columns_with_names_of_duckdbs_own(made: MadeDirectory, tables: Tables) -> None:
    columns = {"ROWID": "int4", "#count": "int4", "#row": "text"}
    bag = testing.Table("bag", columns, 16392, replica_identity="f")
    sent = [[1, 3, "a"], [1, 3, "a"], [1, 3, "b"], [2, 0, "b"]]
    made.commit(2000, bag.relation(), *(testing.insert(bag, row) for row in sent))
    sync(made, tables, uncopied="empty")
    made.commit(3000, testing.delete(bag, sent[0], "O"), testing.delete(bag, sent[3], "O"))
    sync(made, tables)
    found = tables.state("public.bag").to_pylist()
    assert sorted(tuple(row.values()) for row in found) == [(1, 3, "a"), (1, 3, "b")]
    assert list(found[0]) == ["ROWID_", "#count", "#row"]


@pytest.mark.slow
def test_a_table_whose_rows_are_not_known_any_more(made: MadeDirectory, tables: Tables) -> None:
    altered = testing.Table("accounts", {"id": "int4", "note": "int8"}, 16390, key=["id"])
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "7"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "8"]))
    sync(made, tables)
    made.commit(
        1300, testing.delete(ACCOUNTS, [2, None], "K"),
        altered.relation(), testing.insert(altered, [3, 9]),
    )  # fmt: skip
    before = rows(tables, "public.accounts")
    with expect_error(code="stale", table="public.accounts"):
        sync(made, tables, on_error="stop")
    assert rows(tables, "public.accounts") == before
    assert sync(made, tables).stale.keys() == {"public.accounts"}
    assert rows(tables, "public.accounts") == before
    ops = [tables.changes(f"public.accounts{of}").column("op").to_pylist() for of in ("", ".v2")]
    assert [sorted(one) for one in ops] == [["delete", "insert", "read", "truncate"], ["insert"]]


@pytest.mark.slow
def test_a_table_that_is_not_to_follow(made: MadeDirectory, tables: Tables) -> None:
    wider = testing.Table(
        "accounts", {"id": "int4", "note": "text", "n": "int4"}, 16390, key=["id"]
    )
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    sync(made, tables, uncopied="empty", schema_changes="fail")
    made.commit(3000, wider.relation(), testing.insert(wider, [2, "b", 3]))
    with expect_error(code="unfit_schema", parameter="schema_changes", table="public.accounts"):
        sync(made, tables, uncopied="empty", schema_changes="fail", on_error="stop")
    assert rows(tables, "public.accounts") == [{"id": 1, "note": "a"}]
    # Without a catalogue nobody knows what the first row has in the new column.
    found = sync(made, tables)
    assert list(found.stale.values()) == [
        (
            "column n is new, and no read of the catalogue says which value older rows have in "
            "it. The stream does not show the effect on existing rows, so the table needs a new "
            "snapshot"
        )
    ]


def test_a_table_that_is_altered_in_its_first_window(
    made: MadeDirectory, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column is added, of which the catalogue tells; a type is altered, of which it does not."""
    monkeypatch.setattr(window_writer, "_CATALOG_TIMEOUT", 0.2)  # it never comes here
    wider = testing.Table(
        "accounts", {"id": "int4", "note": "text", "n": "int4"}, 16390, key=["id"]
    )
    longer = testing.Table("longer", {"id": "int8"}, 16391)
    shorter = testing.Table("longer", {"id": "int4"}, 16391)
    history = HistoryWriter(made.directory, None)
    history.note(catalog_read(1500, ACCOUNTS))
    history.note(catalog_read(2500, wider, n="7"))
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    made.commit(2100, shorter.relation(), testing.insert(shorter, [1]))
    made.commit(3000, wider.relation(), testing.insert(wider, [2, "b", 3]))
    made.commit(3100, longer.relation(), testing.insert(longer, [1 << 40]))
    found = sync(made, tables, uncopied="empty")
    assert found.windows == (2 if "engine" in tables.given else 1)
    assert rows(tables, "public.accounts") == [
        {"id": 1, "note": "a", "n": 7}, {"id": 2, "note": "b", "n": 3}
    ]  # fmt: skip
    assert list(found.stale) == ["public.longer"]
    versions = [tables.changes("public.longer", version).to_pylist() for version in (1, 2)]
    assert [[row["after"] for row in part] for part in versions] == [[{"id": 1}], [{"id": 1 << 40}]]


@pytest.mark.everyday("duckdb")
def test_a_table_that_gets_a_selected_name(made: MadeDirectory, tables: Tables) -> None:
    """Its snapshot has the name before, so sync has not read it."""
    before = testing.Table("accounts_new", {"id": "int4", "note": "text"}, 16390, key=["id"])
    made.wait(before, 1000)
    made.copy(before, 1100, [[1, "a"]])
    made.commit(1200, before.relation(), testing.insert(before, [2, "b"]))
    made.commit(1300, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [3, "c"]))
    given: dict[str, Any] = {"tables": ["public.accounts"], "uncopied": "empty"}
    assert sync(made, tables, **given).stale == {"public.accounts": SKIPPED}
    assert [path.name for path in (made.directory / "requests").iterdir()]
    made.wait(ACCOUNTS, 1310, first=False)
    made.copy(ACCOUNTS, 1400, [[1, "a"], [2, "b"], [3, "c"]])
    made.commit(1500, testing.insert(ACCOUNTS, [4, "d"]))
    assert sync(made, tables, **given).stale == {}
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 2, 3, 4]


@pytest.mark.everyday("duckdb")
def test_a_table_that_loses_its_selected_name(made: MadeDirectory, tables: Tables) -> None:
    later = testing.Table("accounts_old", {"id": "int4", "note": "text"}, 16390, key=["id"])
    history = HistoryWriter(made.directory, 0)
    history.note(catalog_read(1000, ACCOUNTS))
    made.commit(1100, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    given: dict[str, Any] = {"tables": ["public.accounts"], "uncopied": "empty"}
    sync(made, tables, **given)
    history.note(catalog_read(1200, later))
    made.commit(1300, later.relation(), testing.insert(later, [2, "b"]))
    assert [*sync(made, tables, **given).stale.values()] == [UNSELECTED]
    assert not (made.directory / "requests").exists()
    history.note(catalog_read(1400, ACCOUNTS))
    made.commit(1500, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [3, "c"]))
    assert [*sync(made, tables, **given).stale.values()] == [SELECTED_AGAIN]
    assert (made.directory / "requests").exists()


@pytest.mark.everyday("duckdb")
def test_digits_in_a_column_that_had_texts(
    made: MadeDirectory, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue says so before a change does; nothing in a change table tells them apart."""
    monkeypatch.setattr(window_writer, "_CATALOG_TIMEOUT", 0.2)  # it never comes here
    texts, money = (
        testing.Table("prices", {"id": "int4", "v": type_}, 16393, key=["id"])
        for type_ in ("text", "money")
    )
    history = HistoryWriter(made.directory, 0)
    history.note(catalog_read(1000, texts))
    made.go_on(binary=True)
    made.commit(1080, texts.relation(), testing.insert(texts, [b"\0\0\0\1", b"abc"]))
    sync(made, tables, uncopied="empty")
    history.note(catalog_read(1150, money))
    made.commit(1170, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [b"\0\0\0\1", b"a"]))
    assert [*sync(made, tables, uncopied="empty").stale] == ["public.prices"]
    row = [b"\0\0\0\2", (1234).to_bytes(8, "big")]
    made.commit(1300, money.relation(), testing.insert(money, row))
    sync(made, tables, uncopied="empty")
    found = [tables.changes("public.prices", version).to_pylist() for version in (1, 2)]
    assert [[row["after"]["v"] for row in part] for part in found] == [["abc"], ["1234"]]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("accountz", "; did you mean public.accounts?"),
        ("pubic.accounts", "; did you mean public.accounts?"),
        ("public.accountz", "; did you mean public.accounts?"),
        ("accountz*", ""), ("unlike", ""), ("other.unlike", ""),
    ],
)  # fmt: skip
def test_a_misspelled_table_is_told_with_one_like_it(pattern: str, hint: str) -> None:
    patterns = [pattern, f"*.{pattern}"]
    assert [*mistaken(patterns, ["public.accounts", "public.x"])] == [
        f"the pattern {pattern!r} matches no published table{hint}"
    ]


def test_that_there_is_no_published_table_is_told_once(
    made: MadeDirectory, tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    HistoryWriter(made.directory, None).note(catalog_read(1100))
    made.commit(1200)
    for known in ({}, {"tables": ["public.others"]}):
        caplog.clear()
        assert sync(made, tables, **known).tables == {}
        assert [record.getMessage() for record in caplog.records] == [
            "the publications have no table: no changes arrive until you add one"
        ]


@pytest.mark.slow
def test_tables_that_left_or_never_came_are_told(
    made: MadeDirectory,
    tables: Tables,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = testing.Table("other", {"id": "int4"}, 16391)
    for one in (ACCOUNTS, other):
        made.wait(one, 1000)
        made.copy(one, 1100, [])
    history = HistoryWriter(made.directory, None)
    history.note(catalog_read(1100, ACCOUNTS, other))
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    # As the command gives a pattern with a dot, which may lack its schema.
    known = {"tables": ["public.acc*", "*.public.other", "public.other", "public.others"]}
    assert sync(made, tables, **known).left == ()
    told = [record.getMessage() for record in caplog.records]
    expected = [
        "the pattern 'public.others' matches no published table; did you mean public.other?"
    ]
    assert told == expected
    caplog.clear()
    history.note(catalog_read(1500, ACCOUNTS))
    made.commit(1600, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    found = sync(made, tables, **known)
    assert (found.left, found.stale) == (("public.other",), {})
    assert caplog.records[0].getMessage() == (
        "public.other is no longer published, or was dropped; the target keeps its rows and "
        "changes in public.other"
    )


def test_partitions_by_what_is_not_there(made: MadeDirectory, tmp_path: Path) -> None:
    """A table keeps the partitions with which it is made, so nothing is made with wrong ones."""
    lake = DeltaTables(tmp_path)
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    HistoryWriter(made.directory, None).note(catalog_read(1100, ACCOUNTS))
    wrongs = {"public.acco": ["id"]}, {"accounts": ["id"]}, {"public.accounts": ["day"]}
    for wrong in wrongs:
        (table,) = wrong
        with expect_error(code="no_table", parameter="partition_by", table=table):
            sync(made, lake, partition_by=wrong)
    assert not lake.path.exists() or not lake.has("state", "public.accounts")
    sync(made, lake, partition_by={"public.accounts": ["note"]})
    # Nothing has come for it that would be written otherwise.
    with expect_error(code="bad_option", parameter="partition_by", table="public.accounts"):
        sync(made, lake, partition_by={"public.accounts": ["id"]})
    assert sync(made, lake).stale == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_by": {"t": "id"}},
        {"partition_by": {"t": ["a", "a"]}},
        {"partition_by": {"t": []}},
        {"storage_options": {"timeout": 5}},
    ],
)
def test_options_of_delta_are_checked(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (parameter,) = wrong
    with expect_error(code="bad_option", parameter=parameter):
        apply.sync(segments=tmp_path, target=tmp_path / "lake", **wrong)


@pytest.mark.slow
def test_a_table_that_was_made_again_has_not_left(
    made: MadeDirectory, tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    again = testing.Table("accounts", {"id": "int4", "note": "text"}, 16391, key=["id"])
    history = HistoryWriter(made.directory, None)
    for lsn, one in ((1000, ACCOUNTS), (1300, again)):
        made.wait(one, lsn)
        made.copy(one, lsn + 100, [[lsn, "a"]])
        history.note(catalog_read(lsn + 150, one))
        made.commit(lsn + 200, one.relation(), testing.insert(one, [2, "b"]))
        found = sync(made, tables)
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1300, 2]
    assert found.left == ("public.accounts~16390",)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        "public.accounts was dropped, and a new table has its name; the target keeps its rows and "
        "changes in public.accounts~16390"
    )


@pytest.mark.slow
def test_a_stale_table_that_was_made_again_is_not_stale(
    made: MadeDirectory, tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    again = testing.Table("accounts", {"id": "int4", "note": "text"}, 16391, key=["id"])
    history = HistoryWriter(made.directory, None)
    found = []
    for lsn, one in ((1000, ACCOUNTS), (1300, again)):
        made.wait(one, lsn)
        made.copy(one, lsn + 100, [[1, "a"]])
        history.note(catalog_read(lsn + 150, one))
        gone = [] if one is again else [testing.delete(one, {"id": 77})]
        made.commit(lsn + 200, one.relation(), testing.insert(one, [2, "b"]), *gone)
        found.append(sync(made, tables))
    assert [[*one.stale] for one in found] == [["public.accounts"], []]
    assert found[1].left == ("public.accounts~16390",)
    caplog.clear()
    sync(made, tables)
    named = {record.args[0] for record in caplog.records if isinstance(record.args, tuple)
             and "not kept up to date" in record.msg}  # fmt: skip
    assert named == {"public.accounts~16390"}


@pytest.mark.slow
def test_a_table_that_left_before_it_was_copied(
    made: MadeDirectory, tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    other = testing.Table("other", {"id": "int4"}, 16391)
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [])
    history = HistoryWriter(made.directory, None)
    made.commit(
        1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]),
        other.relation(), testing.insert(other, [7]),
    )  # fmt: skip
    history.note(catalog_read(1500, ACCOUNTS))
    found = sync(made, tables)
    assert (
        "was dropped or left the publications before one could be made"
        in (found.stale["public.other"])
    )
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1]
    assert [row["after"] for row in tables.changes("public.other").to_pylist()] == [{"id": 7}]
    assert requested(made.directory) == {}
    # Of one that came later than the catalogue was read, nobody knows that it has left.
    third = testing.Table("third", {"id": "int4"}, 16392)
    made.commit(1600, third.relation(), testing.insert(third, [1]))
    with expect_error(code="no_snapshot", table="public.third"):
        sync(made, tables)


@pytest.mark.slow
def test_a_target_keeps_to_its_policies(made: MadeDirectory, tables: Tables) -> None:
    """Others hold once that is asked for; what they concern is copied again, by either engine."""
    moments = testing.Table("moments", {"id": "int4", "at": "timestamp"}, 16393)
    for table, lsn in ((moments, 1100), (ACCOUNTS, 1110)):
        made.wait(table, 1000)
        made.copy(table, lsn, [])
    made.commit(1150, moments.relation(), testing.insert(moments, [1, "2024-01-01 10:00:00"]))
    made.commit(1160, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    sync(made, tables, policies=pf.Policies(special_values="null"))
    for other in (pf.Policies(), pf.Policies(infinity="text")):
        with expect_error(code="bad_option", parameter="policies"):
            sync(made, tables, policies=other)
    made.commit(1200, moments.relation(), testing.insert(moments, [2, "infinity"]))
    changed = {"policies": pf.Policies(infinity="text"), "change_policies": True}
    found = sync(made, tables, **changed)
    assert [*found.stale] == ["public.moments"]
    assert requested(made.directory).keys() == {moments.relation_id}
    assert [row["id"] for row in rows(tables, "public.moments")] == [1]
    made.wait(moments, 1210, first=False)
    made.copy(moments, 1250, [[1, "2024-01-01 10:00:00"], [2, "infinity"]])
    made.commit(1300, moments.relation(), testing.insert(moments, [3, "-infinity"]))
    assert sync(made, tables).stale == {}  # by what the target remembers
    assert [row["at"] for row in rows(tables, "public.moments")] == [
        "2024-01-01 10:00:00", "infinity", "-infinity"
    ]  # fmt: skip
    ops = tables.changes("public.moments", 2).column("op").to_pylist()
    assert sorted(ops) == ["insert", "insert", "read", "read", "truncate"]


@pytest.mark.parametrize(
    ("type_id", "modifier", "made", "now", "concerned"),
    [
        (1114, -1, {}, {"infinity": "text"}, True),
        (1114, -1, {}, {"infinity": "null"}, False),  # there was no such value yet
        (1114, -1, {"infinity": "clamp"}, {"infinity": "null"}, True),
        (1115, -1, {}, {"infinity": "text"}, True),  # timestamp[]
        (3908, -1, {}, {"infinity": "text"}, True),  # tsrange
        (4533, -1, {}, {"infinity": "text"}, True),  # tsmultirange
        (1083, -1, {}, {"infinity": "text"}, False),
        (1083, -1, {}, {"out_of_range": "text"}, True),
        (1700, -1, {}, {"numeric": (20, 4)}, True),
        (1700, (5 << 16 | 2) + 4, {}, {"numeric": (20, 4)}, False),
        (1700, -1, {"numeric": (20, 4)}, {}, True),
        (25, -1, {}, {"numeric": (20, 4), "infinity": "text", "json": "parse"}, False),
        (1009, -1, {}, {"arrays": 2}, True),
        (99999, -1, {}, {"infinity": "text"}, True),  # a type of a user may have one
    ],
)
def test_what_other_policies_concern(
    type_id: int, modifier: int, made: Any, now: Any, concerned: bool
) -> None:
    one = TableState(1, "s", "t", "s.t", columns=(StateColumn("c", "c", type_id, modifier, ""),))
    kept = RememberedOptions(policies=pf.Policies(**now))
    assert (kept.concerned(pf.Policies(**made), one) is not None) == concerned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("duckdb", "we%2Eird.T a"), ("delta", "we@2Eird.T@20a")],
)
def test_people_read_the_names_that_they_find(
    made: MadeDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    """The log, the report and `--dry-run` have the names of directories, `_progress` has not."""
    odd = testing.Table("T a", {"id": "int4"}, 16393, namespace="we.ird")
    kept, page = TABLES[kind](tmp_path), tmp_path / "report.html"
    made.wait(odd, 1000)
    made.copy(odd, 1100, [[1]])
    history = HistoryWriter(made.directory, None)
    history.note(catalog_read(1100, odd))
    made.commit(1150, odd.relation(), testing.insert(odd, [3]))
    given = ["sync", "--segments", str(made.directory), "--to", kept.target]
    command = [*given, "--until", "now", "--report", str(page)]
    assert cli.main(command) == 0
    assert f"we.ird.T a is new; its name in the target is {name}" in capsys.readouterr().err
    assert f'<b>we.ird.T a</b></td><td class="left name">{name}</td>' in page.read_text()
    assert cli.main([*given, "--dry-run"]) == 0
    assert f"  we.ird.T a  as {name}, up to " in capsys.readouterr().out
    made.commit(1200, odd.relation(), testing.insert(odd, [2]))
    history.note(catalog_read(1500))
    assert cli.main(command) == 0
    told = capsys.readouterr().err
    assert (
        "we.ird.T a is no longer published, or was dropped; the target keeps its rows and changes "
        f"in {name}" in told
    )
    assert "not published any more, or dropped: it stays as it is" in page.read_text()
    assert [row["stored"] for row in kept.progress().values()] == ["we%2Eird.T a"]
    made.commit(1600, odd.relation(), testing.insert(odd, [2]))
    history.note(catalog_read(1700))
    stale = sync(made, kept).stale["we.ird.T a"]
    assert f"'{name}'" in stale
    if kind == "delta":
        assert [one.name for one in (tmp_path / "lake" / "state").iterdir()] == [name]
        assert quote("we%2Eird.T a", safe="%").replace("%", "@") == name  # as delta-tables.md says


@pytest.mark.slow
@pytest.mark.parametrize("is_after", [True, False], ids=["after", "in_one_window"])
def test_another_binary_has_tables_copied(
    made: MadeDirectory, tables: Tables, is_after: bool
) -> None:
    """Of money and names of objects binary values are digits; of an int4 they are the same."""
    prices = testing.Table("prices", {"id": "int4", "v": "money", "many": 2210}, 16393)
    numbers = testing.Table("numbers", {"id": "int4"}, 16394)
    array = struct.pack("!iiiiiii", 1, 0, 2205, 1, 1, 4, 1259)
    made.go_on(binary=True)
    for table in (prices, numbers):
        made.wait(table, 1000)
    made.copy(prices, 1100, [[b"\0\0\0\1", struct.pack("!q", 1234), array]])
    made.copy(numbers, 1110, [[b"\0\0\0\1"]])
    made.commit(1200, prices.relation(),
                testing.insert(prices, [b"\0\0\0\2", struct.pack("!q", 99), None]))  # fmt: skip
    was = [{"id": 1, "v": "1234", "many": ["1259"]}, {"id": 2, "v": "99", "many": None}]
    if is_after:
        assert sync(made, tables).stale == {}
        assert rows(tables, "public.prices") == was
    made.go_on(binary=False)
    made.commit(1300, prices.relation(), testing.insert(prices, [3, "$12.34", "{pg_class}"]),
                numbers.relation(), testing.insert(numbers, [2]))  # fmt: skip
    found = sync(made, tables)
    assert [*found.stale] == ["public.prices"]
    assert (
        "new rows have column v as string, and older rows have it as string of digits, from "
        "binary format" in found.stale["public.prices"]
    )
    assert "the policies or the format changed" in found.stale["public.prices"]
    assert rows(tables, "public.prices") == (was if is_after else was[:1])
    assert rows(tables, "public.numbers") == [{"id": 1}, {"id": 2}]
    assert requested(made.directory).keys() == {prices.relation_id}
    made.wait(prices, 1310, first=False)
    (made.directory / "requests" / f"{prices.relation_id}.json").unlink()
    made.commit(1320, numbers.relation(), testing.insert(numbers, [3]))
    # The next sync does not ask again for what is on its way.
    assert [*sync(made, tables).stale] == ["public.prices"]
    assert requested(made.directory) == {}
    made.copy(prices, 1350, [[1, "$12.34", "{pg_class}"], [2, "$0.99", None]])
    made.commit(1400, prices.relation(), testing.insert(prices, [4, "$4.00", None]))
    assert sync(made, tables).stale == {}
    assert [row["v"] for row in rows(tables, "public.prices")] == ["$12.34", "$0.99", "$4.00"]
    # No version of the change table has both.
    digits, texts = ({row["after"]["v"] for row in tables.changes("public.prices", version)
                      .to_pylist() if row["after"]} for version in (1, 2))  # fmt: skip
    assert (digits, texts) == ({"1234", "99"}, {"$12.34", "$0.99", "$4.00"})
    assert {row["version"] for row in tables.progress().values()} == {1, 2}


def test_a_target_without_tables_takes_other_options(made: MadeDirectory, tables: Tables) -> None:
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    assert sync(made, tables, tables=["public.account"]).changes == 0
    sync(made, tables, tables=["public.accounts"], soft_deletes="gone")
    assert rows(tables, "public.accounts") == [
        {"id": 1, "note": "a", "gone": None}, {"id": 2, "note": "b", "gone": None}
    ]  # fmt: skip
    with expect_error(code="bad_option", parameter="soft_deletes"):
        sync(made, tables, tables=["public.accounts"])


def test_a_value_that_no_column_holds(made: MadeDirectory, tables: Tables) -> None:
    days = testing.Table("days", {"id": "int4", "day": "date"}, 16392)
    made.commit(1200, days.relation(), testing.insert(days, [1, "infinity"]))
    with expect_error(code="out_of_range", column="day") as told:
        sync(made, tables, uncopied="empty", on_error="stop")
    assert "on_error" not in str(told.value)
    assert tables.progress() == {}
    sync(made, tables, uncopied="empty", policies=pf.Policies(infinity="null"))
    assert rows(tables, "public.days") == [{"id": 1, "day": None}]


def test_what_is_not_a_targets(made: MadeDirectory, tmp_path: Path) -> None:
    tables = DuckdbTables(tmp_path)
    path = tables.path
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("CREATE TABLE mine AS SELECT 1 AS x")
    with expect_error(code="not_ours", path=str(path)):
        sync(made, tables)
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("DROP TABLE mine")
    sync(made, tables)
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("UPDATE _source SET database = 'other'")
    with expect_error(code="another_history", path=str(path)):
        sync(made, tables)
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("UPDATE _source SET format = 9")
    with expect_error(code="not_supported", path=str(path)):
        sync(made, tables)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"target": "duckdb:"}, "bad_option"),
        ({"target": "duckdb:/nowhere/at/all/t.duckdb"}, "missing_path"),
        ({"target": ""}, "bad_option"),
        ({"slot": "s"}, "bad_option"),
        ({"on_error": "guess"}, "bad_option"),
        ({"interval": -1}, "bad_option"),
        ({"window_bytes": 0}, "bad_option"),
    ],
)
def test_options_of_sync_are_checked(
    made: MadeDirectory, tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    (parameter,) = options
    with expect_error(code=code, parameter=parameter):
        sync(made, DuckdbTables(tmp_path), **options)
    assert not (made.directory / "consumers").exists()


# --- names ---------------------------------------------------------------------------------------


def held(relation_id: int, name: str, stored: str) -> TableState:
    return TableState(relation_id, "s", name, stored)


def test_stored_names() -> None:
    assert stored_table("public", "accounts") == "public.accounts"
    assert stored_table("a.b", "c/d%") == "a%2Eb.c%2Fd%25"
    assert stored_table("Ä", 'q"u') == "Ä.q%22u"
    assert free_name("s.a", 7, {"s.a"}) == "s.a~7"
    assert free_name("s.A", 7, {"s.a"}) == "s.A~7"
    assert len(free_name("s." + "ä" * 200, 7, ()).encode()) < 255


@pytest.mark.parametrize(
    ("before", "last", "after"),
    [
        # Renamed.
        ({1: ("b", "s.a")}, [1], {1: "s.b"}),
        # Dropped and made again: the old one stays aside.
        ({1: ("a", "s.a"), 2: ("a", "s.a~2")}, [2], {1: "s.a~1", 2: "s.a"}),
        # Two tables have changed places.
        ({1: ("b", "s.a"), 2: ("a", "s.b")}, [1, 2], {1: "s.b", 2: "s.a"}),
        # Three have.
        ({1: ("b", "s.a"), 2: ("c", "s.b"), 3: ("a", "s.c")}, [3, 1, 2],
         {1: "s.b", 2: "s.c", 3: "s.a"}),
        # Names that differ in case alone: who has it keeps it.
        ({1: ("a", "s.a"), 2: ("A", "s.A~2")}, [2, 1], {1: "s.a", 2: "s.A~2"}),
        # One had no changes since, and another table has its name now.
        ({1: ("a", "s.a"), 2: ("a", "s.b")}, [2], {1: "s.a~1", 2: "s.a"}),
        ({1: ("a", "s.a")}, [], {1: "s.a"}),
    ],
)  # fmt: skip
def test_tables_come_to_their_names(
    before: dict[int, tuple[str, str]], last: list[int], after: dict[int, str]
) -> None:
    """`last` has the tables whose names are of a later LSN."""
    tables = {
        number: held(number, *names)._replace(schema_lsn=1 + (number in last))
        for number, names in before.items()
    }
    now = {number: one.stored_name for number, one in tables.items()}
    for number, name in renames(tables):
        assert name.casefold() not in {one.casefold() for one in now.values()} - {now[number]}
        now[number] = name
    assert now == after
    renamed = {number: one._replace(stored_name=now[number]) for number, one in tables.items()}
    assert renames(renamed) == []


@given(st.permutations([1, 2, 3, 4]), st.sets(st.integers(1, 4)), st.permutations("abcd"))
def test_tables_come_to_names_by_way_of_free_ones(
    order: list[int], renamed: set[int], names: list[str]
) -> None:
    """Whatever tables were renamed to, rotated, or dropped under a name that another one has."""
    before = dict(zip(order, "abcd", strict=True))
    tables = {
        number: held(number, names[number - 1] if number in renamed else name, f"s.{name}")
        ._replace(schema_lsn=1 + (number in renamed))
        for number, name in before.items()
    }  # fmt: skip
    now = {number: one.stored_name for number, one in tables.items()}
    for number, name in renames(tables):
        assert name not in now.values()
        now[number] = name
    taken = {tables[number].name for number in renamed}
    for number, one in tables.items():
        own = number in renamed or one.name not in taken
        assert now[number] == (f"s.{one.name}" if own else f"s.{one.name}~{number}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": None},
        {"target": b"x"},
        {"interval": "1s"},
        {"interval": True},
        {"partition_by": "id"},
        {"storage_options": [("a", "b")]},
    ],
)
def test_arguments_of_wrong_types(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(TypeError, match=name):
        pf.apply.sync(**{"segments": tmp_path, "target": tmp_path / "x", **wrong})


def test_tables_that_are_written_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told how far all is while one takes long; an error keeps others from beginning."""
    monkeypatch.setattr(window_writer, "_TOLD", 0.01)
    told, done = [0], []
    gate = threading.Event()

    def tell() -> None:
        told[0] += 1
        if told[0] == 3:
            gate.set()

    def write(name: str, error: type[BaseException] | None) -> None:
        if error is not None:
            raise error(name)
        assert gate.wait(30)
        time.sleep(0.01)
        done.append(name)

    window_writer.run_all(2, write, [("a", None), ("b", None), ("c", None)], tell)
    assert sorted(done) == ["a", "b", "c"]
    assert told[0] >= 4
    for error in (ValueError, KeyboardInterrupt):
        done.clear()
        behind = [("c", None)] * 100
        with pytest.raises(error, match="b"):
            window_writer.run_all(1, write, [("a", None), ("b", error), *behind], tell)
        assert done[0] == "a"
        assert len(done) < 100


def test_a_change_log_that_begins_behind_the_target_leaves_a_gap(
    made: MadeDirectory, tables: Tables, tmp_path: Path
) -> None:
    """A snapshot there has the rows, but the change table lacks changes for good."""
    made.wait(ACCOUNTS, 1000)
    made.copy(ACCOUNTS, 1100, [[1, "a"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    sync(made, tables)
    assert json.loads(tables.progress()[ACCOUNTS.relation_id]["gaps"]) == []
    with contextlib.closing(MadeDirectory(tmp_path / "another", 1500)) as other:
        other.wait(ACCOUNTS, 1500)
        other.copy(ACCOUNTS, 1600, [[1, "a"], [3, "c"]])
        other.commit(1700, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [4, "d"]))
        for _ in range(2):
            sync(other, tables)
            assert json.loads(tables.progress()[ACCOUNTS.relation_id]["gaps"]) == [[1210, 1599]]
    assert [row["id"] for row in rows(tables, "public.accounts")] == [1, 3, 4]
