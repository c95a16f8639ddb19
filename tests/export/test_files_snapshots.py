"""Exports of directories with snapshots, tables that wait, merged and deleted segments."""

from __future__ import annotations

import collections
import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.exported import manifest_of
from support.changelogs.exporting import read, rows_of
from support.changelogs.made_directory import MadeDirectory, Rows, apply
from support.changelogs.simulated_directory import Simulation
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import files, testing
from pgoutput_fast.directory import merging
from pgoutput_fast.directory.consumers import Consumer, consumers, remove_consumer
from pgoutput_fast.directory.copies import Tables
from pgoutput_fast.directory.merging import delete_covered, merge
from pgoutput_fast.directory.retention import Keep, retain
from pgoutput_fast.directory.snapshots import snapshot_files
from pgoutput_fast.errors import Argument
from pgoutput_fast.files import _consuming
from pgoutput_fast.files._write import Spill

ACCOUNTS = testing.Table("accounts", {"id": "int4", "note": "text"}, 16390, key=["id"])


def change_rows(out: Path, result: files.ExportResult) -> dict[int, list[dict[str, Any]]]:
    """All rows by relation id, in commit order; none of them comes twice."""
    found: dict[int, list[dict[str, Any]]] = {}
    for one in result.tables:
        for path in one.files:
            found.setdefault(one.relation_id, []).extend(read(path).to_pylist())
    for rows in found.values():
        rows.sort(key=lambda row: (row["commit_lsn"], row["seq"]))
        places = [(row["commit_lsn"], row["seq"]) for row in rows]
        assert len(set(places)) == len(places)
    del out
    return found


# --- what is read, at random ---------------------------------------------------------------------


class Exporting(Simulation):
    """Exports of a directory that a simulated capture writes, each time some more."""

    number = 0

    def read(self) -> None:
        self.export("kept", consumer="kept")
        self.export("other", consumer=None)

    def export(self, name: str, consumer: str | None) -> None:
        """Add what is new, and compare it with the server's tables."""
        self.counts["reads"] += 1
        out = self.root / (name if consumer else f"{name}{self.number}")
        part_bytes = self.chance.choice([1, 5000, 1 << 30])
        with contextlib.ExitStack() as stack:
            if self.chance.random() < 0.2:
                # Killed before it is stored which files are not needed any more.
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                stack.enter_context(contextlib.suppress(KeyboardInterrupt))
                patch.setattr("pgoutput_fast.files._consuming.Registered.advance", interrupt)
            try:
                result = files.export(self.directory, out, part_bytes=part_bytes, consumer=consumer)
            except pf.PgOutputError as error:
                if consumer is not None or error.code != "changes_missing":
                    raise
                # Nothing is kept for it, so that it begins anew.
                self.counts["refused"] += 1
                self.number += 1
                return
            if result.position is not None:
                self.compare(out, result)

    def compare(self, out: Path, result: files.ExportResult) -> None:
        self.counts["elsewhere"] += bool(result.elsewhere)
        assert result.position is not None
        for oid, changes in change_rows(out, result).items():
            position = result.elsewhere.get(oid, result.position)
            rows: Rows = {}
            assert changes[0]["op"] == "truncate"  # each table begins with its snapshot
            for row in changes:
                if row["op"] in ("update", "delete"):
                    assert row["id"] in rows
                if row["op"] in ("insert", "read"):
                    assert row["id"] not in rows
                assert row["commit_lsn"] < position
                apply(rows, row["op"], row["id"], row["v"])
            assert rows == self.world.rows(oid, position)
        commits = [
            row["commit_lsn"]
            for path in out.glob("_events*.parquet")
            for row in read(path).to_pylist()
            if row["event"] == "commit"
        ]
        assert len(commits) == len(set(commits))

    def settle(self) -> None:
        """In the end each table is there, as it is on the server."""
        super().settle()
        result = files.export(self.directory, self.root / "kept", consumer="kept")
        self.compare(self.root / "kept", result)
        states = Tables(self.directory).read()
        copied = {oid for oid, state in states.items() if state.snapshots}
        waiting = {oid for oid, state in states.items() if state.held_from is not None}
        assert {one.relation_id for one in result.tables} == copied
        assert set(result.elsewhere) <= waiting
        self.capture.close()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 80))]


@pytest.mark.everyday("[0]")
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_an_export_has_the_servers_tables(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FAN", 2)
    monkeypatch.setattr(merging, "_SMALLEST", 1 << 30)
    exporting = Exporting(tmp_path, seed)
    exporting.run(60)
    exporting.settle()


# --- known values --------------------------------------------------------------------------------

WHEN = datetime.datetime(2000, 1, 1, 0, 0, 5, tzinfo=datetime.timezone.utc)
EMPTY = testing.Table("empty", {"id": "int4"}, 16391, key=["id"])


class Made(MadeDirectory):
    """A directory, and where its export goes to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "segments")
        self.out = root / "out"

    def export(self, **options: Any) -> files.ExportResult:
        return files.export(self.directory, self.out, **options)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with contextlib.closing(Made(tmp_path)) as found:
        yield found


def told(result: files.ExportResult) -> dict[str, list[tuple[Any, ...]]]:
    """op, LSN of the commit, seq and the table's columns of all rows, by table, in their order."""
    return {
        f"{one.name} {one.relation_id}": [
            (row[0], row[4], row[6], *row[8:-1]) for row in rows_of(one)
        ]
        for one in result.tables
    }


FIRST = 1 << 32  # seq of the first row of the first range


def test_a_snapshot_lands_before_the_changes(made: Made) -> None:
    made.wait(ACCOUNTS, 999)
    made.wait(EMPTY, 999)
    made.copy(ACCOUNTS, 1001, [[1, "one"], [2, None]], [], [[3, "three"]])
    made.copy(EMPTY, 1001)
    made.commit(1100, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [4, "four"]))
    result = made.export()
    accounts, empty = result.tables
    assert rows_of(accounts) == [
        ("truncate", None, None, 1000, 1000, WHEN, 0, None, None, None, None),
        ("read", None, None, 1000, 1000, WHEN, FIRST, None, 1, "one", None),
        ("read", None, None, 1000, 1000, WHEN, FIRST + 1, None, 2, None, None),
        ("read", None, None, 1000, 1000, WHEN, 3 * FIRST, None, 3, "three", None),
        ("insert", 7, None, 1095, 1100, WHEN, 0, None, 4, "four", None),
    ]
    # An empty table is there, with its columns.
    assert rows_of(empty) == [("truncate", None, None, 1000, 1000, WHEN, 0, None, None, None)]
    assert (result.position, result.elsewhere, result.rows) == (1110, {}, 6)
    assert made.export().rows == 0


def test_nothing_but_a_snapshot(made: Made) -> None:
    made.wait(ACCOUNTS, 999)
    made.writer.store_position()
    assert made.export().position is None
    made.copy(ACCOUNTS, 1000, [[1, "one"]])
    result = made.export()
    assert told(result)["accounts 16390"][1:] == [("read", 999, FIRST, 1, "one")]
    made.commit(1100, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [4, "four"]))
    assert made.export().rows == 1


def test_a_table_that_waits_comes_later(made: Made) -> None:
    other = testing.Table("other", {"id": "int4"}, 16392, key=["id"])
    announced = [table.relation() for table in (ACCOUNTS, other, EMPTY)]
    made.wait(ACCOUNTS, 999)
    made.copy(ACCOUNTS, 1000, [[1, "one"]])
    made.wait(ACCOUNTS, 1000, first=False)
    made.wait(other, 1000)
    made.commit(
        1100, *announced, testing.update(ACCOUNTS, [1, "held"]), testing.insert(other, [1]),
        testing.truncate([ACCOUNTS.relation_id, EMPTY.relation_id]),
    )  # fmt: skip
    made.commit(1200, testing.insert(ACCOUNTS, [2, "two"]), testing.insert(other, [2]))
    first = made.export()
    assert told(first) == {
        "accounts 16390": [("truncate", 999, 0, None, None), ("read", 999, FIRST, 1, "one")],
        "empty 16391": [("truncate", 1100, 3, None)],
    }
    assert first.position == 1210
    assert first.elsewhere == {16390: 1000, 16392: 1000}
    # One is copied between the two transactions, the other one behind them.
    made.copy(ACCOUNTS, 1151, [[5, "five"]])
    made.copy(other, 1251, [[1], [2]])
    second = made.export()
    rows = told(second)["accounts 16390"]
    assert rows[2:] == [
        ("update", 1100, 0, 1, "held"), ("truncate", 1100, 2, None, None),
        ("truncate", 1150, 0, None, None), ("read", 1150, FIRST, 5, "five"),
        ("insert", 1200, 0, 2, "two"),
    ]  # fmt: skip
    # The stream has not come so far.
    assert second.elsewhere == {16392: 1000}
    assert "other 16392" not in told(second)
    made.commit(1300, testing.insert(other, [3]))
    third = made.export()
    assert told(third)["other 16392"] == [
        ("truncate", 1250, 0, None), ("read", 1250, FIRST, 1), ("read", 1250, FIRST + 1, 2),
        ("insert", 1300, 0, 3),
    ]  # fmt: skip
    assert third.elsewhere == {}
    events = [row for path in sorted(made.out.glob("_events*")) for row in read(path).to_pylist()]
    assert sorted((row["event"], row["lsn"]) for row in events) == [
        ("commit", 1110), ("commit", 1210), ("commit", 1310), ("truncate", 1095),
    ]  # fmt: skip


def test_a_segment_that_was_merged_meanwhile(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FAN", 4)
    insert = [testing.insert(ACCOUNTS, [number, "x"]) for number in range(5)]
    made.commit(1100, ACCOUNTS.relation(), insert[0])
    made.write((1150, testing.message("p", b"before", 1150, False)))
    made.writer.flush()
    first = made.export()
    assert (first.position, first.rows) == (1150, 1)
    made.write((1160, testing.message("p", b"behind", 1160, False)))
    made.commit(1200, insert[1], testing.message("p", b"within", 1190, True))
    made.commit(1300, insert[2])
    merged = merge(made.directory, 1 << 20)
    assert merged is not None
    delete_covered(made.directory, 0)
    made.commit(1400, insert[3])
    second = made.export()
    assert (second.position, second.rows) == (1410, 3)
    assert [row[3] for row in told(second)["accounts 16390"]] == [0, 1, 2, 3]
    events = [row for path in sorted(made.out.glob("_events*")) for row in read(path).to_pylist()]
    assert [row["content"] for row in events if row["event"] == "message"] == [
        b"before", b"behind", b"within",
    ]  # fmt: skip
    assert [row["commit_lsn"] for row in events if row["event"] == "commit"] == [
        1100, 1200, 1300, 1400,
    ]  # fmt: skip


def test_a_snapshot_is_read_in_parts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.wait(ACCOUNTS, 999)
    made.copy(ACCOUNTS, 1151, [[1, "a"]], [[2, "b"]], [[3, "c"]])
    made.commit(1100, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [9, "before"]))
    made.commit(1200, testing.insert(ACCOUNTS, [4, "d"]))
    seen: list[Any] = []
    advance = _consuming.Registered.advance

    def killed(self: Any, position: Any) -> None:
        seen.append(manifest_of(made.out))
        if seen[-1]["copying"] == {"relation_id": 16390, "generation": 1, "files": 2}:
            raise KeyboardInterrupt
        advance(self, position)

    with monkeypatch.context() as patch:
        patch.setattr(_consuming.Registered, "advance", killed)
        with pytest.raises(KeyboardInterrupt):
            made.export(part_bytes=1, consumer="files")
    assert [one["elsewhere"] for one in seen] == [{"16390": "0/47E"}] * 4
    # It is not told that it may be deleted.
    retain(made.directory, Keep(bytes=0), made.writer.store_position)
    assert [len(paths) for paths in snapshot_files(made.directory).values()] == [4]
    result = made.export(part_bytes=1, consumer="files")
    assert [row[3] for row in told(result)["accounts 16390"]] == [None, 1, 2, 3, 4]
    (state,) = consumers(made.directory)
    assert (state.name, state.position.lsn, state.position.tables) == ("files", 1210, {})
    retain(made.directory, Keep(bytes=0), made.writer.store_position)
    assert list(made.directory.glob("*.arrow")) == []
    assert snapshot_files(made.directory) == {}
    assert made.export(consumer="files").rows == 0


# --- tables and their names ----------------------------------------------------------------------


def test_a_table_is_known_by_its_relation_id(made: Made) -> None:
    columns = {"id": "int4"}
    old = testing.Table("t", columns, 20001, key=["id"])
    renamed = testing.Table("u", columns, 20001, namespace="moved", key=["id"])
    wide = testing.Table("u", {**columns, "v": "text"}, 20001, namespace="moved", key=["id"])
    anew = testing.Table("t", columns, 20002, key=["id"])
    again = testing.Table("T", columns, 20003, key=["id"])
    made.commit(1100, old.relation(), testing.insert(old, [1]))
    made.commit(1200, renamed.relation(), testing.insert(renamed, [2]))
    made.commit(1300, anew.relation(), testing.insert(anew, [3]))
    first = made.export()
    made.commit(1400, wide.relation(), testing.insert(wide, [4, "x"]))
    made.commit(1500, again.relation(), testing.insert(again, [5]))
    made.commit(1600, anew.relation(), testing.insert(anew, [6]))
    result = made.export()
    assert [(one.namespace, one.name, one.relation_id) for one in first.tables] == [
        ("moved", "u", 20001), ("public", "t", 20002),
    ]  # fmt: skip
    found = [
        (one.relation_id, one.version, [row[8] for row in rows_of(one)]) for one in result.tables
    ]
    assert found == [
        (20001, 1, [1, 2]), (20001, 2, [4]), (20002, 1, [3, 6]), (20003, 1, [5]),
    ]  # fmt: skip
    assert [[path.name for path in one.files] for one in result.tables] == [
        ["public.t.parquet"], ["public.t.v2.parquet"],
        ["public.t~20002.parquet", "public.t~20002.part2.parquet"], ["public.T~2.parquet"],
    ]  # fmt: skip


# --- what is refused -----------------------------------------------------------------------------


def test_what_is_needed_and_deleted(made: Made) -> None:
    made.wait(ACCOUNTS, 999)
    made.copy(ACCOUNTS, 1001, [[1, "a"]])
    made.commit(1100, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    made.export()
    made.commit(1200, testing.insert(ACCOUNTS, [3, "c"]))
    made.commit(1300, testing.insert(ACCOUNTS, [4, "d"]))
    sizes = [path.stat().st_size for path in sorted(made.directory.glob("*.arrow"))]
    retain(made.directory, Keep(bytes=sizes[-1]), made.writer.store_position)
    with expect_error(code="changes_missing", options=[Argument("consumer")]):
        made.export()
    with expect_error(code="changes_missing", path=str(made.directory)):
        files.export(made.directory, made.out.with_name("new"))
    assert not made.out.with_name("new").exists()


def test_an_older_snapshot_that_is_deleted_is_voided_by_the_next(made: Made) -> None:
    made.commit(1100, EMPTY.relation(), testing.insert(EMPTY, [1]))
    made.wait(ACCOUNTS, 1110)
    assert made.export().elsewhere == {}
    made.copy(ACCOUNTS, 1201, [[1, "a"]])
    made.commit(1300, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    made.wait(ACCOUNTS, 1310, first=False)
    made.copy(ACCOUNTS, 1401, [[3, "c"]])
    retain(made.directory, Keep(bytes=1 << 20), made.writer.store_position)
    assert [key[1] for key in snapshot_files(made.directory)] == [2]
    # The stream is not where the newer one is.
    result = made.export()
    assert (result.rows, result.elsewhere) == (0, {16390: 1110})
    made.commit(1500, testing.insert(ACCOUNTS, [4, "d"]))
    assert told(made.export())["accounts 16390"] == [
        ("truncate", 1400, 0, None, None), ("read", 1400, FIRST, 3, "c"),
        ("insert", 1500, 0, 4, "d"),
    ]  # fmt: skip


def test_names_of_consumers(made: Made) -> None:
    made.commit(1100, EMPTY.relation(), testing.insert(EMPTY, [1]))
    made.commit(1200, testing.insert(EMPTY, [2]))
    first = min(made.directory.glob("*.arrow"))
    with expect_error(code="bad_option", parameter="consumer"):
        files.export(first, made.out, consumer="a")
    taken = Consumer(made.directory, "taken")
    taken.advance(taken.position._replace(lsn=1110))
    with expect_error(code="bad_option", path=str(made.directory)):
        made.export(consumer="taken")
    # Nothing was read under this name, and nothing is kept for it.
    assert made.export(consumer="mistyped", tables="public.no").position is None
    with expect_error(parameter="format"):
        made.export(consumer="a", format="x")
    assert [one.name for one in consumers(made.directory)] == ["taken"]
    assert made.export(consumer="mine").rows == 2
    assert [one.name for one in consumers(made.directory)] == ["mine", "taken"]
    # Removed meanwhile: it is added again where the export is.
    remove_consumer(made.directory, "mine")
    assert made.export(consumer="mine").rows == 0
    assert [one.position.lsn for one in consumers(made.directory)] == [1210, 1110]


def test_refused_frames_count_where_their_table_does(made: Made) -> None:
    made.wait(ACCOUNTS, 999)
    bad = testing.insert(ACCOUNTS, ["x", None])
    made.commit(1100, ACCOUNTS.relation(), EMPTY.relation(), bad, testing.insert(EMPTY, [1]))
    made.commit(1200, testing.insert(ACCOUNTS, [2, "b"]), bad)
    # What comes before its snapshot is in that.
    assert made.export().rows == 1
    made.copy(ACCOUNTS, 1151, [[1, "a"], ["y", None], [3, "c"]])
    with expect_error(code="bad_value"):
        made.export()
    made.out = made.out.with_name("collected")
    result = made.export(on_error="collect")
    assert result.errors == 2
    assert told(result)["accounts 16390"] == [
        ("truncate", 1150, 0, None, None), ("read", 1150, FIRST, 1, "a"),
        ("read", 1150, FIRST + 2, 3, "c"), ("insert", 1200, 0, 2, "b"),
    ]  # fmt: skip


# --- rows that go from a copy's files to the table's ---------------------------------------------


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of the rows that were put into the temporary file, as they come."""
    found: list[str] = []
    add = Spill.add

    def noted(self: Spill, key: int, batch: Any) -> None:
        if "op" in batch.schema.names:
            found.extend(batch.column("op").to_pylist())
        add(self, key, batch)

    monkeypatch.setattr(Spill, "add", noted)
    return found


@pytest.mark.parametrize("format", files.FORMATS)
def test_only_changes_are_kept_in_a_temporary_file(
    format: str, made: Made, kept: list[str]
) -> None:
    """The rows come in the same order, though those of a copy are decoded last."""
    wider = testing.Table("renamed", {"id": "int4", "note": "text", "n": "int4"}, 16390, key=["id"])
    made.wait(EMPTY, 999)
    made.wait(ACCOUNTS, 999)
    made.copy(EMPTY, 1000, [[1]], [[2]])
    made.copy(ACCOUNTS, 1000, [[1, "a"], [2, "b"]], [], [[3, "c"]])
    made.writer.store_position()
    assert made.export(format=format).rows == 7
    made.wait(ACCOUNTS, 1000, first=False)
    made.commit(1100, ACCOUNTS.relation(), EMPTY.relation(), testing.insert(ACCOUNTS, [4, "d"]),
                testing.insert(EMPTY, [3]))  # fmt: skip
    made.copy(ACCOUNTS, 1151, [[5, "e"]], [[6, "f"]])
    made.commit(1200, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [7, "g"]))
    made.commit(1300, wider.relation(), testing.insert(wider, [8, "h", 9]))
    told_progress: list[files.ExportProgress] = []
    result = made.export(format=format, progress=told_progress.append)
    first, second, empty = sorted(result.tables, key=lambda one: (one.relation_id, one.version))
    assert [(one.name, one.version, one.relation_id) for one in (first, second, empty)] == [
        ("renamed", 1, 16390), ("renamed", 2, 16390), ("empty", 1, 16391),
    ]  # fmt: skip
    assert [len(one.files) for one in (first, second, empty)] == [2, 1, 2]
    assert [(row[0], row[-2] or None) for row in rows_of(first)] == [
        ("truncate", None), ("read", "a"), ("read", "b"), ("read", "c"),
        ("insert", "d"), ("truncate", None), ("read", "e"), ("read", "f"), ("insert", "g"),
    ]  # fmt: skip
    assert [row[0] for row in rows_of(second)] == ["insert"]
    assert [row[0] for row in rows_of(empty)] == ["truncate", "read", "read", "insert"]
    assert collections.Counter(kept) == {"truncate": 3, "insert": 4}
    assert told_progress == sorted(told_progress)
    last = told_progress[-1]
    assert (last.bytes, last.rows, last.rows_written) == (last.total_bytes, 7, 7)


def test_files_of_a_copy_whose_columns_differ(made: Made, kept: list[str]) -> None:
    """The form of a column of an unknown type is that of its values, if a file has any."""
    odd = testing.Table("odd", {"id": "int4", "x": 99_999}, 16393, key=["id"])
    made.wait(odd, 999)
    made.copy(odd, 1000, [[1, None]], [[2, ("b", b"\xff")]], [[3, None]])
    made.writer.store_position()
    result = made.export(format="parquet")
    assert kept == ["truncate", "read", "read", "read"]
    assert [[row[-3:-1] for row in rows_of(one)] for one in result.tables] == [
        [(None, None), (1, None), (3, None)], [(2, b"\xff")],
    ]  # fmt: skip


def test_a_file_of_a_copy_with_other_columns_is_refused(made: Made, tmp_path: Path) -> None:
    """It lies where it belongs, and has the form of a copy's file; no copy has such ones."""
    other = testing.Table("accounts", {"id": "int8", "note": "text"}, 16390, key=["id"])
    with contextlib.closing(MadeDirectory(tmp_path / "other")) as elsewhere:
        elsewhere.wait(other, 999)
        elsewhere.copy(other, 1000, [], [[1, "one"]])
        wrong = snapshot_files(elsewhere.directory)[16390, 1][2].read_bytes()
    made.wait(ACCOUNTS, 999)
    made.copy(ACCOUNTS, 1000, [[1, "one"]], [[2, "two"]])
    made.writer.store_position()
    path = snapshot_files(made.directory)[16390, 1][2]
    right = path.read_bytes()
    path.write_bytes(wrong)
    with expect_error(code="damaged", path=str(path)):
        made.export(format="parquet")
    path.write_bytes(right)
    assert made.export(format="parquet").rows == 3
