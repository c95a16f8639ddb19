"""One table that can't go on: it is paused, and the others are the server's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory, catalog_read
from support.expected_errors import expect_error
from support.targets.synced_tables import ALL_KINDS, TABLES, DeltaTables, DuckdbTables, Tables

import pgoutput_fast as pf
from pgoutput_fast import apply, cli, testing
from pgoutput_fast.apply import snapshot_requests, syncing
from pgoutput_fast.apply.delta_table import LakeTable
from pgoutput_fast.apply.delta_target import DeltaState
from pgoutput_fast.apply.duckdb_target import _DuckdbState as DuckdbState
from pgoutput_fast.changelog.requests import forget_request, requested
from pgoutput_fast.changelog.schema_history import HistoryWriter

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

DAYS = testing.Table("days", {"id": "int4", "day": "date"}, 16390, key=["id"])
KEYS = testing.Table("keys", {"day": "date", "note": "text"}, 16391, key=["day"])
OTHER = testing.Table("other", {"id": "int4", "note": "text"}, 16392, key=["id"])
NULL: dict[str, Any] = {"policies": pf.Policies(infinity="null"), "change_policies": True}
CLAMP: dict[str, Any] = {"policies": pf.Policies(infinity="clamp"), "change_policies": True}


class KilledError(BaseException):
    """The process was killed."""


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


def rows(tables: Tables, stored: str) -> list[tuple[Any, ...]]:
    found = tables.state(stored).to_pylist()
    return sorted(tuple(map(str, row.values())) for row in found)


def changes(tables: Tables, stored: str) -> list[tuple[int, int]]:
    found = tables.changes(stored).to_pylist()
    return sorted((row["commit_lsn"], row["seq"]) for row in found)


def begin(made: MadeDirectory, table: testing.Table, *first: list[Any]) -> None:
    for one in (table, OTHER):
        made.wait(one, 1000)
        made.copy(one, 1100, list(first) if one is table else [])


def both(made: MadeDirectory, lsn: int, table: testing.Table, row: list[Any]) -> None:
    """A transaction of the table and of the other one."""
    made.commit(
        lsn, table.relation(), OTHER.relation(),
        testing.insert(OTHER, [lsn, "before"]),
        testing.insert(table, row),
        testing.insert(OTHER, [lsn + 1, "after"]),
    )  # fmt: skip


def others(*lsns: int) -> list[tuple[str, str]]:
    found = [((str(lsn), "before"), (str(lsn + 1), "after")) for lsn in lsns]
    return sorted(pair for pairs in found for pair in pairs)


@pytest.mark.everyday("duckdb")
def test_a_refused_value(made: MadeDirectory, tables: Tables) -> None:
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "2020-01-01"])
    assert sync(made, tables).paused == {}
    both(made, 3000, DAYS, [2, "infinity"])
    both(made, 4000, DAYS, [3, "2020-01-03"])
    found = sync(made, tables)
    ((name, reason),) = found.paused.items()
    assert (name, found.stale) == ("public.days", {})
    needed = "change_policies=True"
    for part in ("'day' of public.days", "infinity", "0/BB3", "the policy infinity", needed):
        assert part in reason
    assert rows(tables, "public.other") == others(2000, 3000, 4000)
    assert rows(tables, "public.days") == [("1", "2020-01-01")]
    held = tables.progress()
    assert (held[16390]["paused"], held[16392]["paused"]) == (reason, None)
    assert held[16390]["lsn"] <= 3000 < 4000 < held[16392]["lsn"]
    # It waits through other calls, and catches up exactly once when it can.
    both(made, 5000, DAYS, [4, "2020-01-04"])
    assert [*sync(made, tables).paused] == ["public.days"]
    found = sync(made, tables, **NULL)
    assert (found.paused, found.stale) == ({}, {})
    assert rows(tables, "public.days") == [
        ("1", "2020-01-01"), ("2", "None"), ("3", "2020-01-03"), ("4", "2020-01-04"),
    ]  # fmt: skip
    assert [lsn for lsn, _ in changes(tables, "public.days")] == [1099, 2000, 3000, 4000, 5000]
    assert rows(tables, "public.other") == others(2000, 3000, 4000, 5000)
    assert tables.progress()[16390]["paused"] is None
    both(made, 6000, DAYS, [5, "2020-01-05"])
    assert sync(made, tables, **NULL).changes == 3


def test_a_reason_names_options_as_the_command_does(
    made: MadeDirectory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tables = DuckdbTables(tmp_path)
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "infinity"])
    given = ["--segments", str(made.directory), "--to", str(tables.given["target"])]
    assert cli.main(["sync", *given, "--until", "now"]) == 3
    assert "--change-policies" in capfd.readouterr().err
    assert "--change-policies" in tables.progress()[16390]["paused"]
    policy = ["--policy", "infinity=null", "--change-policies"]
    assert cli.main(["sync", *given, "--until", "now", *policy]) == 0
    assert rows(tables, "public.days") == [("1", "None")]


def test_a_reason_names_the_policy_of_its_value(
    made: MadeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hint keeps the target's other policies. A call with new policies forgets the reason."""
    tables = DuckdbTables(tmp_path)
    prices = testing.Table("prices", {"id": "int4", "price": "numeric(12,2)"}, 16390, key=["id"])
    begin(made, prices)
    both(made, 2000, prices, [1, "NaN"])
    (reason,) = sync(made, tables, policies=pf.Policies(infinity="clamp")).paused.values()
    policies = "policies=Policies(infinity='clamp', special_values='null')"
    assert f"To let such values pass, give {policies} and change_policies=True" in reason
    caplog.clear()
    changed = pf.Policies(infinity="clamp", special_values="null")
    assert sync(made, tables, policies=changed, change_policies=True).paused == {}
    assert "is paused" not in caplog.text
    assert rows(tables, "public.prices") == [("1", "None")]


@pytest.mark.slow
def test_a_refused_value_in_a_snapshot(made: MadeDirectory, tables: Tables) -> None:
    """The target has nothing of the table then."""
    begin(made, DAYS, [1, "infinity"])
    both(made, 2000, DAYS, [2, "2020-01-02"])
    found = sync(made, tables)
    assert [*found.paused] == ["public.days"]
    assert rows(tables, "public.other") == others(2000)
    assert not tables.has("state", "public.days") or rows(tables, "public.days") == []
    assert [*sync(made, tables).paused] == ["public.days"]
    found = sync(made, tables, **NULL)
    assert found.paused == {}
    assert rows(tables, "public.days") == [("1", "None"), ("2", "2020-01-02")]


def test_a_dry_run_goes_on_behind_a_refused_value(
    made: MadeDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy lets one value pass, and the next one is refused."""
    kept = DuckdbTables(tmp_path)
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "infinity"])
    assert [*sync(made, kept).paused] == ["public.days"]
    both(made, 3000, DAYS, [2, "0044-03-15 BC"])
    given = ["sync", "--segments", str(made.directory), "--to", str(kept.given["target"])]
    for policies, policy in (
        ([], "infinity"),
        (["--policy", "infinity=null", "--change-policies"], "out_of_range"),
    ):
        assert cli.main([*given, *policies, "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        (days,) = (line for line in lines if "public.days" in line.split("  "))
        (other,) = (line for line in lines if "public.other" in line.split("  "))
        assert f"the policy {policy} " in days.partition("would be paused: ")[2]
        assert "2 changes from" in other


@pytest.mark.slow
@pytest.mark.parametrize("comes", ["changes", "snapshot"])
def test_a_key_of_which_a_policy_makes_null(
    comes: str, made: MadeDirectory, tables: Tables
) -> None:
    begin(made, KEYS, *([["infinity", "a"]] * (comes == "snapshot")))
    both(made, 2000, KEYS, ["infinity" if comes == "changes" else "2020-01-02", "b"])
    found = sync(made, tables, **NULL)
    assert ([*found.paused], found.stale) == (["public.keys"], {})
    assert "'day'" in found.paused["public.keys"]
    assert rows(tables, "public.other") == others(2000)
    assert requested(made.directory) == {}
    assert sync(made, tables, **CLAMP).paused == {}
    first = [("9999-12-31", "a")] * (comes == "snapshot")
    second = [("9999-12-31" if comes == "changes" else "2020-01-02", "b")]
    assert rows(tables, "public.keys") == sorted(first + second)


def test_it_ends_if_that_is_asked_for(made: MadeDirectory, tables: Tables) -> None:
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "infinity"])
    with expect_error(code="out_of_range", column="day"):
        sync(made, tables, on_error="stop")
    assert tables.progress() == {}


# --- what a target refuses -----------------------------------------------------------------------


def a_file_in_the_way(kind: str, tables: Tables, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The directory of one table can't be written."""
    del patch
    assert isinstance(tables, DeltaTables)
    directory = tables.path / kind / "public.days"
    aside = directory.with_name("aside")
    if directory.exists():
        directory.rename(aside)
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.touch()

    def remove() -> None:
        directory.unlink()
        if aside.exists():
            aside.rename(directory)

    return remove


def a_failing_commit(kind: str, tables: Tables, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The commit of one table fails."""
    del tables
    original: Any = LakeTable.commit

    def failing(self: Any, *args: Any, **keywords: Any) -> Any:
        if self.directory == f"{kind}/public.days":
            raise pf.PgOutputError(f"{self.directory}: permission denied")
        return original(self, *args, **keywords)

    patch.setattr(LakeTable, "commit", failing)
    return lambda: patch.setattr(LakeTable, "commit", original)


def a_constraint(kind: str, tables: Tables, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Somebody has added an index to a table in DuckDB, which refuses the second row."""
    del patch
    column = {"changes": "xid", "state": "day"}[kind]

    def run(statement: str) -> None:
        import duckdb

        with contextlib.closing(duckdb.connect(str(tables.path))) as connection:
            connection.execute(statement)

    run(f'CREATE UNIQUE INDEX once ON {kind}."public.days" ({column})')
    return lambda: run(f'DROP INDEX {kind}."once"')


FAST = ("duckdb changes", "duckdb state", "delta state")
REFUSALS = [
    pytest.param(name, kind, cause, id=f"{name}-{kind}-{cause.__name__}",
                 marks=[pytest.mark.slow] * (f"{name} {kind}" not in FAST))
    for name in ("duckdb", "delta")
    for kind in ("changes", "state")
    for cause in ([a_constraint] if name == "duckdb" else [a_failing_commit])
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "kind", "cause"), REFUSALS)
def test_a_target_that_refuses_one_table(
    name: str, kind: str, cause: Any, killed: bool, made: MadeDirectory, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tables = TABLES[name](tmp_path)
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "2020-01-01"])
    sync(made, tables)
    remove = cause(kind, tables, monkeypatch)
    both(made, 3000, DAYS, [2, "2020-01-01"])
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(syncing.Consumer, "advance", raise_killed)
            with pytest.raises(KilledError):
                sync(made, tables)
    both(made, 4000, DAYS, [3, "2020-01-01"])
    found = sync(made, tables)
    assert ([*found.paused], found.stale) == (["public.days"], {})
    assert rows(tables, "public.other") == others(2000, 3000, 4000)
    assert rows(tables, "public.days") == [("1", "2020-01-01")]
    with pytest.raises(pf.PgOutputError):
        sync(made, tables, on_error="stop")
    remove()
    found = sync(made, tables)
    assert (found.paused, found.stale) == ({}, {})
    assert rows(tables, "public.days") == [(str(n), "2020-01-01") for n in (1, 2, 3)]
    assert [lsn for lsn, _ in changes(tables, "public.days")] == [1099, 2000, 3000, 4000]
    assert len(changes(tables, "public.other")) == 7
    assert rows(tables, "public.other") == others(2000, 3000, 4000)


def raise_killed(*_: Any) -> None:
    raise KilledError


@pytest.mark.parametrize("kind", ["changes", "state"])
def test_a_table_whose_directory_cant_be_made(
    kind: str, made: MadeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = TABLES["delta"](tmp_path)
    begin(made, DAYS)
    sync(made, tables, until=1000)
    remove = a_file_in_the_way(kind, tables, monkeypatch)
    both(made, 2000, DAYS, [1, "2020-01-01"])
    assert [*sync(made, tables).paused] == ["public.days"]
    assert rows(tables, "public.other") == others(2000)
    remove()
    assert sync(made, tables).paused == {}
    assert rows(tables, "public.days") == [("1", "2020-01-01")]


@pytest.mark.slow
@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("name", ["duckdb", pytest.param("delta", marks=pytest.mark.slow)])
def test_a_table_that_cant_follow_the_catalogue(
    name: str,
    in_window: bool,
    made: MadeDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No change of it comes: what is written is what the catalogue alone says."""
    tables = TABLES[name](tmp_path)
    history = HistoryWriter(made.directory, None)
    history.note(catalog_read(1050, DAYS, OTHER))
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "2020-01-01"])
    sync(made, tables)
    writer: Any = DuckdbState if name == "duckdb" else DeltaState
    original = writer.apply

    def failing(self: Any, alterations: Any, net: Any, held: Any) -> None:
        if held.name == "days":
            raise pf.PgOutputError("permission denied", code="io_failed")
        original(self, alterations, net, held)

    wider = [
        testing.Table(one.name, {**columns, "n": "int4"}, one.relation_id, key=["id"])
        for one, columns in (
            (DAYS, {"id": "int4", "day": "date"}), (OTHER, {"id": "int4", "note": "text"}),
        )
    ]  # fmt: skip
    history.note(catalog_read(2005, *wider, n="7"))
    if in_window:
        made.commit(3000)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "apply", failing)
        for _ in range(2):
            found = sync(made, tables)
            assert ([*found.paused], found.stale) == (["public.days"], {})
            assert tables.progress()[16390]["paused"] == found.paused["public.days"]
            assert rows(tables, "public.days") == [("1", "2020-01-01")]
        with expect_error(code="io_failed"):
            sync(made, tables, on_error="stop")
    found = sync(made, tables)
    assert (found.paused, found.stale) == ({}, {})
    assert rows(tables, "public.days") == [("1", "2020-01-01", "7")]
    assert rows(tables, "public.other") == [(*one, "7") for one in others(2000)]
    assert tables.progress()[16390]["paused"] is None


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"pause_time": 0.0}, {"pause_bytes": 0}])
def test_a_table_that_waits_for_too_long(
    limit: dict[str, Any], made: MadeDirectory, tables: Tables
) -> None:
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "2020-01-01"])
    both(made, 3000, DAYS, [2, "infinity"])
    both(made, 4000, DAYS, [3, "2020-01-03"])
    assert [*sync(made, tables, window_bytes=1).paused] == ["public.days"]
    assert requested(made.directory) == {}
    found = sync(made, tables, **limit)
    assert ([*found.stale], found.paused) == (["public.days"], {})
    assert [*requested(made.directory)] == [16390]
    ((start, end),) = json.loads(tables.progress()[16390]["gaps"])
    assert 2000 < start <= 3000
    assert end >= 4010
    # Nothing of the gap is read again, and the table comes back with a snapshot.
    both(made, 5000, DAYS, [4, "2020-01-04"])
    assert [*sync(made, tables).stale] == ["public.days"]
    assert [lsn for lsn, _ in changes(tables, "public.days")] == [1099, 2000, 5000]
    made.wait(DAYS, 5100, first=False)
    made.copy(DAYS, 5200, [[1, "2020-01-01"], [3, "2020-01-03"], [4, "2020-01-04"]])
    both(made, 6000, DAYS, [5, "2020-01-05"])
    found = sync(made, tables)
    assert (found.stale, found.paused) == ({}, {})
    assert rows(tables, "public.days") == [(str(n), f"2020-01-0{n}") for n in (1, 3, 4, 5)]
    assert rows(tables, "public.other") == others(2000, 3000, 4000, 5000, 6000)


@pytest.mark.everyday("delta")
def test_a_newer_snapshot_ends_a_pause(made: MadeDirectory, tables: Tables) -> None:
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "infinity"])
    assert [*sync(made, tables).paused] == ["public.days"]
    made.wait(DAYS, 2100, first=False)
    made.copy(DAYS, 2200, [[2, "2020-01-02"]])
    both(made, 3000, DAYS, [3, "2020-01-03"])
    found = sync(made, tables)
    assert (found.stale, found.paused) == ({}, {})
    assert rows(tables, "public.days") == [("2", "2020-01-02"), ("3", "2020-01-03")]
    assert len(json.loads(tables.progress()[16390]["gaps"])) == 1


def test_no_storm_of_snapshots(
    made: MadeDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing says that a table is copied for which no snapshot is asked."""
    monkeypatch.setattr(snapshot_requests, "_SNAPSHOTS", 2)
    tables = TABLES["duckdb"](tmp_path)
    begin(made, DAYS)
    for number in range(3):
        lsn = 2000 + 1000 * number
        made.commit(lsn, OTHER.relation(), testing.update(OTHER, [number, "lost"]))
        found = sync(made, tables)
        assert [*found.stale] == ["public.other"]
        assert ([*requested(made.directory)] == [16392]) == (number == 0)
        lists = (found.asked, found.over_limit)
        assert lists == ((("public.other",), ()) if number == 0 else ((), ("public.other",)))
        given = ["--segments", str(made.directory), "--to", str(tables.given["target"])]
        assert cli.main(["sync", *given, "--until", "now"]) == 3
        assert ("takes a snapshot of it" in capfd.readouterr().err) == (number == 0)
        forget_request(made.directory, 16392)
        made.wait(OTHER, lsn + 100, first=False)
        made.copy(OTHER, lsn + 200, [[number, "found"]])
    made.commit(6000, OTHER.relation(), testing.update(OTHER, [2, "found"]))
    assert sync(made, tables).stale == {}


# --- Delta tables that can't be read or moved -----------------------------------------------------


@pytest.fixture
def lake(tmp_path: Path) -> DeltaTables:
    return DeltaTables(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "changes"])
def test_a_table_that_cannot_be_read(made: MadeDirectory, lake: DeltaTables, kind: str) -> None:
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "2020-01-01"])
    sync(made, lake)
    lake.back_up()
    for log in (lake.path / kind / "public.days" / "_delta_log").glob("*.json"):
        log.write_text("{")
    both(made, 3000, DAYS, [2, "2020-01-02"])
    with expect_error(code="io_failed"):
        sync(made, lake, on_error="stop")
    for _ in range(2):  # the second call has nothing to write
        found = sync(made, lake)
        ((name, reason),) = found.paused.items()
        assert (name, found.stale) == ("public.days", {})
        assert f"{kind}/public.days" in reason
    assert rows(lake, "public.other") == others(2000, 3000)
    place = f"{kind}/public.days/_delta_log"
    for log in (lake.path.with_name("backup of lake") / place).glob("*.json"):
        (lake.path / place / log.name).write_bytes(log.read_bytes())
    found = sync(made, lake)
    assert (found.paused, found.stale) == ({}, {})
    assert rows(lake, "public.days") == [("1", "2020-01-01"), ("2", "2020-01-02")]
    assert [lsn for lsn, _ in changes(lake, "public.days")] == [1099, 2000, 3000]


def test_a_rename_that_fails(made: MadeDirectory, lake: DeltaTables) -> None:
    renamed = testing.Table("weeks", {"id": "int4", "day": "date"}, 16390, key=["id"])
    begin(made, DAYS)
    both(made, 2000, DAYS, [1, "2020-01-01"])
    sync(made, lake)
    (lake.path / "state" / "public.weeks").mkdir()
    (lake.path / "state" / "public.weeks" / "mine").touch()
    both(made, 3000, renamed, [2, "2020-01-02"])
    assert [*sync(made, lake).paused] == ["public.weeks"]
    both(made, 4000, renamed, [3, "2020-01-03"])
    found = sync(made, lake)
    ((name, reason),) = found.paused.items()
    assert (name, found.stale) == ("public.weeks", {})
    assert "state/public.weeks" in reason
    assert rows(lake, "public.other") == others(2000, 3000, 4000)
    (lake.path / "state" / "public.weeks" / "mine").unlink()
    found = sync(made, lake)
    assert (found.paused, found.stale) == ({}, {})
    assert rows(lake, "public.weeks") == [
        ("1", "2020-01-01"), ("2", "2020-01-02"), ("3", "2020-01-03")
    ]  # fmt: skip
    assert [lsn for lsn, _ in changes(lake, "public.weeks")] == [1099, 2000, 3000, 4000]
    assert not lake.has("state", "public.days")
