"""A DuckDB file that another process has open, and the memory that DuckDB takes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error
from support.targets.synced_tables import DuckdbTables

import pgoutput_fast as pf
from pgoutput_fast import apply, testing
from pgoutput_fast.apply import duckdb_file, syncing
from pgoutput_fast.apply.duckdb_target import DuckdbTarget
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.verify import verify
from pgoutput_fast.verify.databases import Database
from pgoutput_fast.verify.opening import open_target
from pgoutput_fast.verify.states import States

duckdb = pytest.importorskip("duckdb")

DOCS = testing.Table("docs", {"id": "int4", "body": "text"}, 16391)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        found.commit(1200, DOCS.relation(), testing.insert(DOCS, [1, "a"]))
        yield found


@pytest.fixture
def tables(made: MadeDirectory, tmp_path: Path) -> DuckdbTables:
    found = DuckdbTables(tmp_path)
    sync(made, found)
    made.commit(1300, DOCS.relation(), testing.insert(DOCS, [2, "b"]))
    return found


def sync(made: MadeDirectory, tables: DuckdbTables, **options: Any) -> apply.SyncProgress:
    given = {"until": "now", "uncopied": "empty", "interval": 0.05, **options}
    return apply.sync(target=tables.target, segments=made.directory, **given)


def test_windows_wait_until_a_file_is_closed(
    made: MadeDirectory,
    tables: DuckdbTables,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(duckdb_file, "_SAID_AFTER", 0.0)
    waits = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if record.name == duckdb_file.__name__:
            waits.set()
        return True

    caplog.handler.addFilter(note)
    reader = duckdb.connect(str(tables.path))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sync, made, tables)
        assert waits.wait(60)
        assert not running.done()
        reader.close()
        assert running.result(60).stale == {}
    assert tables.state("public.docs").column("id").to_pylist() == [1, 2]
    assert len([one for one in caplog.records if one.name == duckdb_file.__name__]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["timeout", "stop", "limit"])
def test_what_ends_the_waiting(
    made: MadeDirectory, tables: DuckdbTables, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing is written then, no table is stale, and the next call goes on."""
    stop = threading.Event()
    options: dict[str, Any] = {"stop": stop, "lock_timeout": 0.1 if how == "timeout" else None}
    options["pause_bytes"] = 0 if how == "limit" else 1 << 40
    reader: list[Any] = []

    def block(progress: apply.SyncProgress) -> None:
        """Open the file behind the target's own look at it, before the first window."""
        del progress
        if not reader:
            reader.append(duckdb.connect(str(tables.path)))
        elif how == "stop":
            stop.set()

    monkeypatch.setattr(syncing, "_TOLD", 0.01)
    try:
        if how == "stop":
            assert sync(made, tables, progress=block, **options).windows == 0
        else:
            kind = RetryableError if how == "timeout" else pf.PgOutputError
            with expect_error(
                kind, code="in_use", parameter="lock_timeout" if how == "timeout" else "pause_bytes"
            ):
                sync(made, tables, progress=block, **options)
    finally:
        reader[0].close()
    assert tables.state("public.docs").column("id").to_pylist() == [1]
    monkeypatch.undo()
    assert sync(made, tables).stale == {}
    assert tables.state("public.docs").column("id").to_pylist() == [1, 2]


def test_a_sync_that_is_stopped_before_it_has_its_file(
    made: MadeDirectory, tables: DuckdbTables
) -> None:
    stop = threading.Event()
    stop.set()
    with duckdb.connect(str(tables.path)), expect_error(RetryableError, code="stopped"):
        sync(made, tables, stop=stop)


MB, GB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("machine", "group", "expected"),
    [
        (8 * GB, None, 2 * GB),
        (8 * GB, "max\n", 2 * GB),
        (8 * GB, f"{4 * GB}\n", GB),
        (GB, None, 384 * MB),
        (256 * GB, None, 4 * GB),
        (8 * GB, f"{1 << 63}\n", 2 * GB),  # as cgroups of version 1 say that there is no limit
    ],
)
def test_the_default_is_a_part_of_the_memory(
    machine: int,
    group: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "memory.max"
    if group is not None:
        path.write_text(group)
    monkeypatch.setattr(duckdb_file, "_CGROUPS", (str(path),))
    sizes = {"SC_PHYS_PAGES": machine // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert duckdb_file.default_memory() == expected


@pytest.mark.slow
def test_more_than_duckdb_takes_is_named_with_its_option(
    made: MadeDirectory, tables: DuckdbTables
) -> None:
    """A transaction of long values has to fit in DuckDB's memory."""
    values = [testing.insert(DOCS, [id_, "x" * 1_000_000]) for id_ in range(10, 90)]
    made.commit(1400, DOCS.relation(), *values)
    with expect_error(code="out_of_memory", path=str(tables.path)):
        sync(made, tables, duckdb_memory=64 * MB)
    assert tables.state("public.docs").column("id").to_pylist() == [1]
    assert sync(made, tables, duckdb_memory=GB).stale == {}
    assert len(tables.state("public.docs")) == 82


def test_uuids_and_jsonb_have_duckdbs_types(made: MadeDirectory, tmp_path: Path) -> None:
    """A row that moves to another key keeps what was not sent; a new column has its default."""
    types = {"id": "uuid", "b": "jsonb", "j": "json", "many": 2951}
    table = testing.Table("own", types, 16392, key=["id"])
    one, other = (f"{'0' * 8}-0000-0000-0000-{'0' * 11}{i}" for i in (1, 2))
    invalid = '{"a": 1}' + " " * 3
    made.commit(1400, table.relation(),
                testing.insert(table, [one, '{"a": 1}', invalid, f"{{{one}}}"]))  # fmt: skip
    tables = DuckdbTables(tmp_path)
    sync(made, tables)
    unsent = [other, pf.UNCHANGED, pf.UNCHANGED, pf.UNCHANGED]
    made.commit(1500, table.relation(), testing.update(table, unsent, [one, None, None, None]))
    assert sync(made, tables, on_error="stop").stale == {}
    with tables.open() as connection:
        found = connection.execute('DESCRIBE FROM state."public.own"').fetchall()
        assert [row[1] for row in found] == ["UUID", "JSON", "VARCHAR", "UUID[]"]
        (row,) = connection.execute(
            "SELECT id::text, b ->> 'a', j, many::text FROM state.\"public.own\""
        ).fetchall()
        assert row == (other, "1", invalid, f"[{one}]")
        connection.execute("SELECT after.b ->> 'a' FROM changes.\"public.own\"").fetchall()


def test_verify_keeps_within_a_limit(made: MadeDirectory, tables: DuckdbTables) -> None:
    """By default the limit is that of sync. An error names the limit."""
    with contextlib.closing(open_target(tables.target, None, pf.TypeRegistry)) as opened:
        assert isinstance(opened, States)
        database = opened._database
        assert _limit(database) == duckdb_file.default_memory()
        opened.limit_memory(64 * MB)
        assert _limit(database) == 64 * MB
        with (
            expect_error(code="out_of_memory", parameter="duckdb_memory"),
            database.refusals(),
        ):
            database.connection.execute(
                "SELECT string_agg(repeat('x', 1000000) || i, '') FROM range(200) t(i)"
            )
    with pytest.raises(TypeError, match="duckdb_memory"):
        verify(publications=["p"], target=tables.target, duckdb_memory="1GB")  # type: ignore[arg-type]
    with expect_error(code="bad_option", parameter="duckdb_memory"):
        verify(publications=["p"], target=tables.target, duckdb_memory=MB)


def _limit(database: Database) -> int:
    """The limit of a database, which DuckDB shows in tenths of a MiB, or GiB."""
    ((text,),) = database.connection.execute("SELECT current_setting('memory_limit')").fetchall()
    number, unit = text.split()
    return round(float(number) * {"MiB": MB, "GiB": GB}[unit])


@pytest.mark.slow
def test_a_change_table_is_altered_once_in_a_window(
    made: MadeDirectory, tables: DuckdbTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB keeps the rows of before each alteration until the commit."""
    sync(made, tables)
    for number in range(30):
        columns = {"id": "int4", "body": "text", f"c{number}": "int4", f"d{number % 2}": "text"}
        docs = testing.Table("docs", columns, 16391)
        row = testing.insert(docs, [10 + number, "a", number, "x"])
        made.commit(1400 + 10 * number, docs.relation(), row)
    statements = []
    original = DuckdbTarget.run

    def run(self: DuckdbTarget, statement: str, **given: Any) -> Any:
        statements.append(statement)
        return original(self, statement, **given)

    monkeypatch.setattr(DuckdbTarget, "run", run)
    sync(made, tables)
    assert sum('"changes"' in one and one.startswith("ALTER") for one in statements) == 2
    rows = [row["after"] for row in tables.changes("public.docs").to_pylist()[2:]]
    assert [(row["id"], row[f"c{row['id'] - 10}"]) for row in rows] == [
        (10 + number, number) for number in range(30)
    ]
    for row in rows:
        assert {name for name, value in row.items() if value is not None} == {
            "id", "body", f"c{row['id'] - 10}", f"d{row['id'] % 2}"
        }  # fmt: skip
