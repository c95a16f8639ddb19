"""A capture that copies tables: what was there, what joins later, what is copied again."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.folded import Folded
from support.expected_errors import expect_error
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.changelog.consumers import Consumer, consumers
from pgoutput_fast.changelog.known import how_to_copy
from pgoutput_fast.changelog.requests import request_copy, requested
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.changelog.snapshots import snapshot_files
from pgoutput_fast.cli import main
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.replication import RetryableError, capture, copier, upkeep
from pgoutput_fast.replication.membership import read_members

pytestmark = [pytest.mark.server]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TICK", "_MERGE_INTERVAL", "_TIDY_INTERVAL", "_WATCH_INTERVAL"):
        monkeypatch.setattr(upkeep, name, 0.05)


@pytest.fixture
def shop(make_database: Any, server: Any) -> Any:
    database = make_database(server)
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, v text)",
        "CREATE TABLE small (id int PRIMARY KEY, v text)",
        "CREATE TABLE late (id int PRIMARY KEY, v text)",
        "CREATE TABLE empty (id int PRIMARY KEY, v text)",
        "INSERT INTO big SELECT g, 'big ' || g FROM generate_series(1, 30000) g",
        "INSERT INTO small SELECT g, 'small ' || g FROM generate_series(1, 100) g",
        "INSERT INTO late SELECT g, 'late ' || g FROM generate_series(1, 100) g",
        "CREATE PUBLICATION p FOR TABLE big, small, empty",
    )
    return database


class Running:
    """A capture in a thread."""

    def __init__(self, database: Any, directory: Path, **options: Any) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        options = {"snapshot": "initial", "create_slot": True, "max_delay": 0.05, **options}

        def run() -> None:
            try:
                capture(
                    database.dsn, slot=f"slot_{database.name}", publications=["p"],
                    directory=directory, stop=self.stop, **options,
                )  # fmt: skip
            except BaseException as error:  # noqa: BLE001 - `end` raises it
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def end(self) -> None:
        self.stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def running(database: Any, directory: Path, **options: Any) -> Iterator[Running]:
    run = Running(database, directory, **options)
    try:
        yield run
    finally:
        run.end()


@contextlib.contextmanager
def load(database: Any, *tables: str) -> Iterator[None]:
    """Changes all the while: updates, deletes, inserts, a key that changes."""
    stop = threading.Event()

    def run() -> None:
        number = 0
        with database.connect() as connection:
            while not stop.is_set():
                number += 1
                for table in tables:
                    key = number * 7 % 90 + 1
                    connection.execute(f"UPDATE {table} SET v = 'u{number}' WHERE id = {key}")
                    connection.execute(f"DELETE FROM {table} WHERE id = {100 + number - 1}")
                    connection.execute(f"INSERT INTO {table} VALUES ({number + 100000}, 'new')")
                    connection.execute(
                        f"UPDATE {table} SET id = -{number} WHERE id = {number + 100000 - 3}"
                    )
                time.sleep(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def finish(database: Any, directory: Path, **options: Any) -> None:
    """Capture what is there by now, with all copies."""
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()")
    capture(
        database.dsn, slot=f"slot_{database.name}", publications=["p"], directory=directory,
        until_lsn=pf.parse_lsn(lsn), **{"snapshot": "initial", "create_slot": True, **options},
    )  # fmt: skip


def oid(database: Any, table: str) -> int:
    ((found,),) = database.execute(f"SELECT '{table}'::regclass::oid::bigint")
    return int(found)


def truth(database: Any, table: str) -> dict[str, tuple[str, ...]]:
    return {row[0]: row for row in database.execute(f"SELECT id::text, v FROM {table}")}


def check(database: Any, folded: Folded, *tables: str) -> None:
    for table in tables:
        assert folded.rows[oid(database, table)] == truth(database, table), table


def copied(directory: Path, relation_id: int) -> int:
    """How many whole copies a directory has of a table, unless it waits for another one."""
    state = SnapshotStates(directory).read().get(relation_id)
    return 0 if state is None or state.waits_from is not None else len(state.snapshots)


def test_tables_that_were_there_and_tables_that_join(shop: Any, tmp_path: Path) -> None:
    with load(shop, "big", "small", "late"):
        time.sleep(0.1)
        with running(shop, tmp_path):
            wait_until(lambda: copied(tmp_path, oid(shop, "big")))
            early = Folded(tmp_path, "early").take()
            assert early.reads[oid(shop, "big")] >= 29000
            shop.execute("ALTER PUBLICATION p ADD TABLE late")
            wait_until(lambda: copied(tmp_path, oid(shop, "late")))
            early.take()
            # What changes while a table is out comes by a further copy.
            shop.execute("ALTER PUBLICATION p DROP TABLE small")
            time.sleep(0.1)
            shop.execute("ALTER PUBLICATION p ADD TABLE small")
            wait_until(lambda: copied(tmp_path, oid(shop, "small")) == 2)
            early.take()
    finish(shop, tmp_path)
    names = ["big", "small", "late", "empty"]
    check(shop, early.take(), *names)
    late = Folded(tmp_path, "late").take()
    check(shop, late, *names)
    assert truth(shop, "empty") == {}
    assert late.reads[oid(shop, "late")] in range(90, 4000)


@pytest.mark.slow
def test_a_table_that_is_copied_again_on_request(shop: Any, tmp_path: Path) -> None:
    finish(shop, tmp_path)
    folded = Folded(tmp_path).take()
    check(shop, folded, "big", "small", "empty")
    # Something went wrong at the consumer.
    folded.rows[oid(shop, "small")]["5"] = ("5", "wrong")
    request_copy(tmp_path, oid(shop, "small"), ["public", "small"], "a test asks")
    with load(shop, "small"), running(shop, tmp_path, snapshot="never", create_slot=False):
        wait_until(lambda: copied(tmp_path, oid(shop, "small")) == 2)
        assert requested(tmp_path) == {}
    finish(shop, tmp_path)
    check(shop, folded.take(), "big", "small", "empty")


@pytest.mark.slow
def test_the_command_that_asks_for_a_copy(
    shop: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(shop, tmp_path, snapshot="never")
    shop.execute("UPDATE small SET v = 'changed' WHERE id = 1")
    finish(shop, tmp_path, snapshot="never")
    given = ["snapshot", "--dir", str(tmp_path), "--table", "public.small"]
    assert main([*given, "--wait", "0.1"]) == 1
    errors = capsys.readouterr().err
    for part in ("public.small", "[timed_out]"):
        assert part in errors
    assert requested(tmp_path)[oid(shop, "small")].table == ["public", "small"]
    with running(shop, tmp_path, snapshot="never", create_slot=False):
        assert main([*given, "--wait", "20"]) == 0
    (copy,) = SnapshotStates(tmp_path).read()[oid(shop, "small")].snapshots
    told = capsys.readouterr().out
    assert told == f"public.small has a snapshot as of {pf.format_lsn(copy.lsn)}\n"
    finish(shop, tmp_path, snapshot="never")
    folded = Folded(tmp_path).take()
    check(shop, folded, "small")
    assert main(["snapshot", "--dir", str(tmp_path), "--table", "public.none"]) == 1
    errors = capsys.readouterr().err
    for part in ("'public.none'", " public.small", "[no_table]"):
        assert part in errors
    assert main(["snapshot", "--dir", str(tmp_path), "--table", "small"]) == 1
    errors = capsys.readouterr().err
    for part in ("'small'", "[unfit_input]"):
        assert part in errors
    assert main(["snapshot", "--dir", str(tmp_path / "x"), "--table", "public.none"]) == 1
    assert "[missing_path]" in capsys.readouterr().err


def test_tables_are_asked_for_by_their_names_in_sql(
    make_database: Any, pg18: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = make_database(pg18)
    shop.execute(
        'CREATE SCHEMA "a.b"',
        'CREATE TABLE "a.b".c (id int PRIMARY KEY)',
        "CREATE SCHEMA a",
        'CREATE TABLE a."b.c" (id int PRIMARY KEY)',
        'CREATE TABLE "My ""Table" (id int PRIMARY KEY)',
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    finish(shop, tmp_path)
    names = {
        '"a.b".C': '"a.b".c',
        'a."b.c"': 'a."b.c"',
        'Public."My ""Table"': '"My ""Table"',
    }
    given = [part for name in names for part in ("--table", name)]
    assert main(["snapshot", "--dir", str(tmp_path), *given]) == 0
    assert set(requested(tmp_path)) == {oid(shop, name) for name in names.values()}
    capsys.readouterr()
    assert main(["snapshot", "--dir", str(tmp_path), "--table", 'public.My "Table']) == 1
    assert "[unfit_input]" in capsys.readouterr().err
    assert main(["snapshot", "--dir", str(tmp_path), "--table", "a.b"]) == 1
    told = """ "a.b".c, a."b.c", public."My ""Table\""""
    assert told in capsys.readouterr().err
    # What an error says can be given to a shell.
    said = how_to_copy(tmp_path, requested(tmp_path)).partition("--table ")[2]
    assert main(["snapshot", "--dir", str(tmp_path), *shlex.split(f"--table {said}")]) == 0


def test_a_renamed_table_is_asked_for_by_the_name_that_it_has(shop: Any, tmp_path: Path) -> None:
    finish(shop, tmp_path)
    renamed = oid(shop, "small")
    shop.execute(
        "ALTER TABLE small RENAME TO former",
        "ALTER TABLE empty RENAME TO small",
        "UPDATE former SET v = 'former' WHERE id = 1",
    )
    finish(shop, tmp_path)
    for name, relation_id in (("small", oid(shop, "small")), ("former", renamed)):
        assert main(["snapshot", "--dir", str(tmp_path), "--table", f"public.{name}"]) == 0
        assert relation_id in requested(tmp_path)


def confirmed(database: Any) -> str:
    ((lsn,),) = database.execute(
        f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = "
        f"'slot_{database.name}'"
    )
    return str(lsn)


@pytest.mark.slow
def test_a_directory_that_has_lost_rows_of_a_copy(shop: Any, tmp_path: Path) -> None:
    finish(shop, tmp_path)
    lost = snapshot_files(tmp_path)[oid(shop, "big"), 1][1]
    lost.unlink()
    with expect_error(code="missing_path", path=str(lost)):
        Folded(tmp_path).take()
    assert main(["snapshot", "--dir", str(tmp_path), "--table", "public.big"]) == 0
    finish(shop, tmp_path)
    check(shop, Folded(tmp_path, "new").take(), "big", "small", "empty")


@pytest.mark.slow
def test_only_the_tables_and_later_the_rest(shop: Any, tmp_path: Path) -> None:
    found = capture(
        shop.dsn, slot=f"slot_{shop.name}", publications=["p"], directory=tmp_path,
        create_slot=True, snapshot="only",
    )  # fmt: skip
    assert found.transactions == 0
    before = truth(shop, "big")
    shop.execute("DELETE FROM big WHERE id > 10", "INSERT INTO small VALUES (1000, NULL)")
    folded = Folded(tmp_path).take()
    assert folded.rows[oid(shop, "big")] == before
    finish(shop, tmp_path)
    check(shop, folded.take(), "big", "small", "empty")


@pytest.mark.slow
def test_each_call_says_whether_tables_are_copied(
    shop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A call without it does not copy a table that joins, and warns where others have copies."""

    def call(directory: Path, **options: Any) -> list[str]:
        caplog.clear()
        finish(shop, directory, **options)
        return [one for one in caplog.messages if "this one takes none" in one]

    assert call(tmp_path) == []
    shop.execute("ALTER PUBLICATION p ADD TABLE late", "UPDATE late SET v = 'new' WHERE id = 1")
    (warning,) = call(tmp_path, snapshot="never")
    assert warning == (
        "earlier captures took snapshots of 3 tables, but this one takes none: a table that joins "
        "the publications from now on lacks its existing rows. Give snapshot='initial' to each "
        "capture of this directory"
    )
    assert len(SnapshotStates(tmp_path).read()) == 3
    # A later call makes up for it.
    assert call(tmp_path) == []
    check(shop, Folded(tmp_path).take(), "big", "small", "empty", "late")
    # Where no table has a copy, none is missed.
    shutil.rmtree(tmp_path)
    shop.execute(f"SELECT pg_drop_replication_slot('slot_{shop.name}')")
    assert call(tmp_path, snapshot="never") == []
    assert call(tmp_path, snapshot="never") == []


@pytest.mark.slow
def statements(database: Any, directory: Path) -> int:
    """The number of statements that the server gets for the first snapshots of all tables."""
    log = database.server._log.fileno()
    begin = os.fstat(log).st_size
    finish(database, directory, snapshot="only", schema_history=False)
    database.execute(f"SELECT pg_drop_replication_slot('slot_{database.name}')")
    lines = os.pread(log, os.fstat(log).st_size - begin, begin).splitlines()
    return sum(b" statement: " in line or b" execute " in line for line in lines)


def test_a_snapshot_takes_five_statements_a_table(
    database18: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is asked from time to time has nothing to do with the number of tables.
    monkeypatch.setattr(upkeep, "_WATCH_INTERVAL", 3600.0)
    monkeypatch.setattr(copier, "_CONFIRM_INTERVAL", 3600.0)
    name = database18.name
    database18.execute(
        f"ALTER DATABASE {name} SET log_statement = 'all'",
        f"ALTER DATABASE {name} SET log_min_messages = 'log'",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    counts: list[int] = []
    for tables in (range(10), range(10, 50)):
        database18.execute(*(f"CREATE TABLE t{i} AS SELECT 1 AS id" for i in tables))
        counts.append(statements(database18, tmp_path / str(len(counts))))
    states = SnapshotStates(tmp_path / "1").read().values()
    assert [len(state.snapshots) for state in states] == [1] * 50
    assert counts[0] > 10 * 4  # they are counted at all
    assert counts[1] - counts[0] <= 40 * 5


def test_a_snapshot_is_there_while_other_tables_are_copied(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_CONFIRM_INTERVAL", 0.0)
    monkeypatch.setattr(copier, "_CONFIRM_SHARE", 1e9)
    whole, take = [], copier._Round._take

    def counting(self: Any, part: Any, frames: Any) -> None:
        whole.append(
            sum(len(state.snapshots) for state in SnapshotStates(tmp_path).read().values())
        )
        take(self, part, frames)

    monkeypatch.setattr(copier._Round, "_take", counting)
    finish(shop, tmp_path, connections=1)
    assert whole == [1, 2]  # the empty one, then one of the others


def test_a_capture_that_ends_while_it_copies(shop: Any, tmp_path: Path) -> None:
    shop.execute("INSERT INTO big SELECT g, repeat('x', 500) FROM generate_series(30001, 90000) g")
    with load(shop, "big", "small"):
        # It may not have come to its stream yet.
        with contextlib.suppress(RetryableError), running(shop, tmp_path, connections=1):
            wait_until(lambda: list((tmp_path / "snapshots").glob("*.arrow")))
        states = SnapshotStates(tmp_path).read()
        assert any(state.waits_from is not None for state in states.values())
        folded = Folded(tmp_path).take()
        time.sleep(0.1)
    finish(shop, tmp_path)
    check(shop, folded.take(), "big", "small", "empty")
    check(shop, Folded(tmp_path, "new").take(), "big", "small", "empty")
    assert not list((tmp_path / "snapshots").glob("*.tmp"))


def test_a_table_that_may_not_be_read(shop: Any, tmp_path: Path) -> None:
    role = f"role_{shop.name}"
    shop.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON big TO {role}",
    )
    try:
        with expect_error(code="no_rights"):
            finish(shop, tmp_path, user=role)
    finally:
        shop.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
    # Nothing is lost of what the slot has; it is its own capture that goes on.
    finish(shop, tmp_path)
    check(shop, Folded(tmp_path).take(), "big", "small", "empty")


def test_the_states_of_a_dropped_table_are_forgotten(database18: Any, tmp_path: Path) -> None:
    database18.execute("CREATE PUBLICATION p FOR ALL TABLES", "CREATE TABLE kept (id int, v text)")
    with running(database18, tmp_path, keep_bytes=0) as run:
        # One comes by the stream, the other one when the catalogue is read.
        database18.execute("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
        database18.execute("CREATE TABLE empty (id int)")
        oids = {oid(database18, name) for name in ("t", "empty")}
        wait_until(lambda: run.error or all(copied(tmp_path, one) for one in oids))
        folded = Folded(tmp_path).take()
        database18.execute("DROP TABLE t, empty")
        numbers = itertools.count(1)

        def is_forgotten() -> bool:
            database18.execute(f"INSERT INTO kept VALUES ({next(numbers)}, 'x')")
            folded.take()
            return not oids & SnapshotStates(tmp_path).read().keys()

        wait_until(lambda: run.error or is_forgotten())
    finish(database18, tmp_path)
    check(database18, folded.take(), "kept")


@pytest.mark.slow
def test_a_refused_table_does_not_hold_up_others(shop: Any, tmp_path: Path) -> None:
    role = f"role_{shop.name}"
    shop.execute(
        "INSERT INTO big SELECT g, repeat('x', 500) FROM generate_series(30001, 90000) g",
        "CREATE TABLE hidden (id int PRIMARY KEY, v text)",
        "INSERT INTO hidden VALUES (1, 'one')",
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON big, small, late, empty TO {role}",
    )
    try:
        with running(shop, tmp_path, connections=1, user=role) as run:
            wait_until(lambda: list((tmp_path / "snapshots").glob("*.arrow")))
            # While the first tables are copied: the capture ends only if one of these is refused.
            shop.execute("ALTER PUBLICATION p ADD TABLE hidden, late")
            wait_until(lambda: copied(tmp_path, oid(shop, "late")))
            assert copied(tmp_path, oid(shop, "big")) == 1
            shop.execute("INSERT INTO small VALUES (1000, 'later')")
            small = oid(shop, "small")
            wait_until(lambda: run.error or "1000" in Folded(tmp_path).take().rows[small])
            assert run.error is None
            state = SnapshotStates(tmp_path).read()[oid(shop, "hidden")]
            assert (state.waits_from is not None, state.snapshots) == (True, ())
        with expect_error(code="no_rights", table="public.hidden"):
            finish(shop, tmp_path, user=role)
        shop.execute(f"GRANT SELECT ON hidden TO {role}")
        finish(shop, tmp_path, user=role)
        check(shop, Folded(tmp_path, "all").take(), "big", "small", "late", "hidden")
    finally:
        shop.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.slow
def test_a_copy_that_the_server_breaks_off_does_not_hold_up_others(
    shop: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop.execute(
        "CREATE TABLE bad (id int PRIMARY KEY, v text)",
        "INSERT INTO bad SELECT g, 'bad ' || g FROM generate_series(0, 9) g",
        "ALTER PUBLICATION p ADD TABLE bad WHERE (1 / id >= 0)",
    )
    with expect_error(code="server_refused", sqlstate="22012", table="public.bad"):
        capture(
            shop.dsn, slot=f"slot_{shop.name}", publications=["p"], directory=tmp_path / "only",
            create_slot=True, snapshot="only",
        )  # fmt: skip
    check(shop, Folded(tmp_path / "only").take(), "big", "small", "empty")
    shop.execute(f"SELECT pg_drop_replication_slot('slot_{shop.name}')")

    monkeypatch.setattr(copier, "_LONGEST_WAIT", 1.0)
    lake, bad = tmp_path / "lake", oid(shop, "bad")
    with caplog.at_level("WARNING", "pgoutput_fast"), running(shop, lake) as run:
        wait_until(lambda: run.error or copied(lake, oid(shop, "big")))
        shop.execute("INSERT INTO small VALUES (1000, 'later')")
        small = oid(shop, "small")
        # The copy of `small` may stand later than that of `big`; until then it has no rows.
        wait_until(lambda: run.error or "1000" in Folded(lake).take().rows.get(small, {}))
        # It was one of the first tables, and its copy is tried again, as that of one that joins.
        wait_until(lambda: run.error or caplog.text.count("trying again in 1 s") > 1)
        assert not list((lake / "snapshots").glob(f"{bad:08X}-*"))
        shop.execute("TRUNCATE bad", "INSERT INTO bad VALUES (1, 'good')")
        wait_until(lambda: run.error or copied(lake, bad))
    assert "a table waits for its snapshot: can't copy table public.bad: division" in caplog.text
    finish(shop, lake)
    check(shop, Folded(lake, "all").take(), "big", "small", "empty", "bad")


def test_partitions_that_come_as_their_root(shop: Any, tmp_path: Path) -> None:
    shop.execute(
        "CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "INSERT INTO parts VALUES (1, 'one')",
        "ALTER PUBLICATION p ADD TABLE parts",
        "ALTER PUBLICATION p SET (publish_via_partition_root)",
    )
    finish(shop, tmp_path)
    shop.execute(
        "INSERT INTO parts VALUES (2, 'two')",
        "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20)",
        "INSERT INTO parts VALUES (11, 'eleven')",
    )
    finish(shop, tmp_path)
    folded = Folded(tmp_path).take()
    check(shop, folded, "parts")
    # The stream announces them; there is nothing of them to copy.
    tables = {oid(shop, name) for name in ("big", "small", "empty", "parts")}
    assert SnapshotStates(tmp_path).read().keys() == tables


def test_what_is_published_is_seen_while_tables_are_locked(shop: Any) -> None:
    shop.execute(
        "CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "CREATE SCHEMA more",
        "CREATE TABLE more.one (id int PRIMARY KEY)",
        "ALTER PUBLICATION p ADD TABLE parts, late (id) WHERE (id > 3)",
        "ALTER PUBLICATION p SET (publish_via_partition_root)",
        "CREATE PUBLICATION q FOR TABLES IN SCHEMA more",
    )
    rows = dict(shop.execute("SELECT prrelid::bigint, oid::bigint FROM pg_publication_rel"))
    ((schema,),) = shop.execute("SELECT oid::bigint FROM pg_publication_namespace")
    expected = {
        oid(shop, name): ("public", name, (rows[oid(shop, name)],))
        for name in ("big", "small", "empty", "late", "parts")
    }
    # When it came into its schema, which is what is published, counts too.
    ((placed,),) = shop.execute(
        "SELECT xmin::text::bigint FROM pg_depend WHERE objid = 'more.one'::regclass "
        "AND refclassid = 'pg_namespace'::regclass"
    )
    expected[oid(shop, "more.one")] = ("more", "one", (placed, schema))
    leaf = oid(shop, "parts_1")
    shown = shop.execute(
        "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname IN ('p', 'q')"
    )
    assert {one[:2] for one in expected.values()} == set(shown)
    with shop.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE big, late, parts, more.one IN ACCESS EXCLUSIVE MODE")
        members = read_members(ConnectionParameters(shop.dsn, {}), ["p", "q"])
    found = members.tables.items()
    assert {key: (one.namespace, one.name, one.rows) for key, one in found} == expected
    assert members.partitions == {leaf}


@pytest.mark.slow
def test_what_no_consumer_needs_is_deleted(shop: Any, tmp_path: Path) -> None:
    with running(shop, tmp_path, keep_bytes=0, grace=0.01, segment_bytes=1 << 14) as run:
        wait_until(lambda: copied(tmp_path, oid(shop, "empty")))
        folded = Folded(tmp_path)
        for number in range(20):
            shop.execute(f"INSERT INTO small VALUES ({1000 + number}, repeat('x', 1000))")
        wait_until(lambda: len(list(tmp_path.glob("*.arrow"))) >= 2)
        time.sleep(0.3)
        assert "1019" in folded.take().rows[oid(shop, "small")]
        wait_until(lambda: not list(tmp_path.glob("*.arrow")))
        shop.execute("INSERT INTO small VALUES (2000, 'after')")
        wait_until(lambda: list(tmp_path.glob("*.arrow")))
        folded.take()
        run.end()
    # It goes on although no segment says where it ended.
    shop.execute("INSERT INTO small VALUES (3000, 'later')")
    finish(shop, tmp_path)
    check(shop, folded.take(), "big", "small", "empty")
    with expect_error(code="changes_missing"):
        Consumer(tmp_path, "too_late")


def test_what_is_stored_of_a_copy_is_read_once(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each time that it is looked what is published."""
    finish(shop, tmp_path)
    read: list[int] = []
    looked: list[None] = []
    fields, take = SnapshotStates.fields, upkeep.Upkeep._take_members

    def reading(self: SnapshotStates, copy: Any) -> Any:
        read.append(copy.relation_id)
        return fields(self, copy)

    def taking(self: upkeep.Upkeep, members: Any) -> None:
        looked.append(None)
        take(self, members)

    monkeypatch.setattr(SnapshotStates, "fields", reading)
    monkeypatch.setattr(upkeep.Upkeep, "_take_members", taking)
    with running(shop, tmp_path) as run:
        wait_until(lambda: run.error or len(looked) > 3)
        shop.execute("ALTER PUBLICATION p DROP TABLE small", "ALTER PUBLICATION p ADD TABLE small")
        wait_until(lambda: run.error or copied(tmp_path, oid(shop, "small")) == 2)
        shop.execute("INSERT INTO small VALUES (1000, 'later')")  # behind the copy
        seen = len(looked)
        wait_until(lambda: run.error or len(looked) > seen + 3)
    assert {table: read.count(oid(shop, table)) for table in ("big", "empty")} == {
        "big": 1, "empty": 1
    }  # fmt: skip
    assert read.count(oid(shop, "small")) in (2, 3)  # of each copy, and perhaps as it left


def test_consumers_that_do_not_move(
    shop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finish(shop, tmp_path)
    Consumer(tmp_path, "silent")
    Folded(tmp_path, "done").take()
    with running(shop, tmp_path, silent_after=0.01):
        wait_until(lambda: "consumer silent has not moved" in caplog.text)
    assert [one.name for one in consumers(tmp_path)] == ["done", "silent"]
    with running(shop, tmp_path, silent_after=0.01, give_up=True):
        wait_until(lambda: [one.name for one in consumers(tmp_path)] == ["done"])
        shop.execute("INSERT INTO small VALUES (2000, 'to read')")
        wait_until(lambda: consumers(tmp_path) == [])
    assert "consumer done has not moved" not in caplog.text


@pytest.mark.slow
def test_a_disk_that_is_almost_full(shop: Any, tmp_path: Path) -> None:
    with expect_error(code="disk_full", path=str(tmp_path)):
        finish(shop, tmp_path, min_free=1 << 60)
    finish(shop, tmp_path)
    check(shop, Folded(tmp_path).take(), "big", "small", "empty")


def test_a_disk_that_fails(shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a capture begins, and while it runs."""
    finish(shop, tmp_path)
    usage = shutil.disk_usage
    for good in (0, 2):
        looks = [usage] * good

        def fail(path: Any, looks: list[Any] = looks) -> Any:
            if looks:
                return looks.pop()(path)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(shutil, "disk_usage", fail)
        with expect_error(code="io_failed", path=str(tmp_path)):
            capture(
                shop.dsn, slot=f"slot_{shop.name}", publications=["p"], directory=tmp_path,
                snapshot="initial",
            )  # fmt: skip
        assert looks == []


def test_a_table_that_returns_is_seen_in_the_stream(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_WATCH_INTERVAL", 3600.0)  # nobody asks
    small = oid(shop, "small")
    with running(shop, tmp_path):
        wait_until(lambda: copied(tmp_path, small))
        shop.execute("UPDATE small SET v = 'seen' WHERE id = 1")
        time.sleep(0.3)
        shop.execute(
            "ALTER PUBLICATION p DROP TABLE small",
            "DELETE FROM small WHERE id = 2",
            "ALTER PUBLICATION p ADD TABLE small",
            "UPDATE small SET v = 'seen again' WHERE id = 3",
        )
        wait_until(lambda: copied(tmp_path, small) == 2)
    finish(shop, tmp_path)
    check(shop, Folded(tmp_path).take(), "big", "small", "empty")


@pytest.mark.slow
@pytest.mark.parametrize("noticed", ["asked", "in the stream"])
@pytest.mark.parametrize("how", ["DROP TABLE small", "ALTER PUBLICATION p DROP TABLE small"])
def test_changes_before_a_table_left_count(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, noticed: str
) -> None:
    """The capture is behind: the table has left before its last changes are captured."""
    finish(shop, tmp_path)
    small = oid(shop, "small")
    old = Folded(tmp_path, "old").take()
    shop.execute("UPDATE small SET v = 'seen' WHERE id < 50", "DELETE FROM small WHERE id = 60")
    rows = truth(shop, "small")
    shop.execute(how)
    if noticed == "in the stream":
        with monkeypatch.context() as patch:
            patch.setattr(upkeep.Upkeep, "_take_members", lambda *_: None)
            finish(shop, tmp_path)
    shop.execute("UPDATE big SET v = 'more' WHERE id = 1")
    finish(shop, tmp_path)
    assert [one.state for one in SnapshotStates(tmp_path).read()[small].all_snapshots] == [
        "snapshot",
        "gone",
    ]
    # A consumer that was there before goes on, and one that is new has the same.
    for folded in (old, Folded(tmp_path, "new")):
        assert folded.take().rows[small] == rows
        check(shop, folded, "big", "empty")


@pytest.mark.slow
def test_a_table_that_left_and_returns_keeps_what_was_before(shop: Any, tmp_path: Path) -> None:
    finish(shop, tmp_path)
    small = oid(shop, "small")
    shop.execute("UPDATE small SET v = 'seen' WHERE id < 50")
    shop.execute("ALTER PUBLICATION p DROP TABLE small")
    finish(shop, tmp_path)
    shop.execute("DELETE FROM small WHERE id = 60", "ALTER PUBLICATION p ADD TABLE small")
    shop.execute("UPDATE small SET v = 'again' WHERE id = 70")
    finish(shop, tmp_path)
    states = [one.state for one in SnapshotStates(tmp_path).read()[small].all_snapshots]
    assert states == ["snapshot", "gone", "snapshot"]
    folded = Folded(tmp_path).take()
    check(shop, folded, "big", "small", "empty")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "back"),
    [
        ("DROP TABLE small", "ADD TABLE small"),
        ("SET (publish = 'insert')", "SET (publish = 'insert, update, delete, truncate')"),
    ],
    ids=["table", "actions"],
)
def test_a_table_that_leaves_while_it_is_copied(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: str, back: str
) -> None:
    monkeypatch.setattr(upkeep, "_WATCH_INTERVAL", 3600.0)
    take = copier._Round._take
    left = []

    def leaves(self: Any, part: Any, frames: Any) -> None:
        if part.table.name == "small" and not left:
            left.append(part)
            shop.execute(
                f"ALTER PUBLICATION p {leave}",
                "DELETE FROM small WHERE id = 1",
                f"ALTER PUBLICATION p {back}",
            )
        take(self, part, frames)

    monkeypatch.setattr(copier._Round, "_take", leaves)
    finish(shop, tmp_path)
    assert left
    check(shop, Folded(tmp_path).take(), "big", "small", "empty")


def shelf(database: Any, publication: str = "FOR TABLE t") -> Any:
    """A table of three rows, and a publication."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, 'row ' || g FROM generate_series(1, 3) g",
        f"CREATE PUBLICATION p {publication}",
    )
    return database


@pytest.mark.slow
def test_actions_that_were_not_published_while_no_capture_ran(
    database18: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shelf(database18)
    finish(database18, tmp_path)
    folded = Folded(tmp_path).take()
    database18.execute(
        "ALTER PUBLICATION p SET (publish = 'insert')",
        "DELETE FROM t WHERE id = 1",
        "ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')",
    )
    finish(database18, tmp_path)
    assert folded.take().rows[oid(database18, "t")].keys() == {"2", "3"}
    why = "its publications were altered, so some of its changes may be missing"
    assert f"table public.t needs a snapshot: {why}" in caplog.messages
    finish(database18, tmp_path)
    assert copied(tmp_path, oid(database18, "t")) == 2


@pytest.mark.parametrize(
    "action",
    [
        "delete",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("insert", "update", "truncate")),
    ],
)
def test_an_action_that_is_not_published_for_a_time(
    database18: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    action: str,
) -> None:
    caplog.set_level("INFO")
    shelf(database18)
    table = oid(database18, "t")
    actions = {
        "insert": "INSERT INTO t VALUES (4, 'four')",
        "update": "UPDATE t SET v = 'other'",
        "delete": "DELETE FROM t WHERE id = 1",
        "truncate": "TRUNCATE t",
    }
    others = ", ".join(actions.keys() - {action})
    with running(database18, tmp_path):
        wait_until(lambda: copied(tmp_path, table) == 1)
        folded = Folded(tmp_path).take()
        database18.execute(f"ALTER PUBLICATION p SET (publish = '{others}')")
        wait_until(lambda: copied(tmp_path, table) == 2)
        database18.execute(actions[action])
        database18.execute("ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')")
        wait_until(lambda: copied(tmp_path, table) == 3)
        database18.execute("INSERT INTO t VALUES (5, 'five')")
    finish(database18, tmp_path)
    check(database18, folded.take(), "t")
    why = f"its publications no longer publish its {action}s"
    assert f"table public.t needs a snapshot: {why}" in caplog.messages


def members_of(database: Any, publications: list[str]) -> dict[int, Any]:
    """What is published now, by relation id."""
    return read_members(ConnectionParameters(database.dsn, {}), publications).tables


def changed_by(database: Any, publications: list[str], *statements: str) -> set[str]:
    """The tables of which changes may be missing after statements."""
    before = members_of(database, publications)
    database.execute(*statements)
    now = members_of(database, publications)
    assert {one.change(one.state_fields) for one in now.values()} == {None}
    return {
        one.name for key, one in {**before, **now}.items()
        if key not in before or key not in now or now[key].change(before[key].state_fields)
    }  # fmt: skip


def test_what_a_change_of_publications_means_for_a_table(database18: Any) -> None:
    shelf(database18)
    database18.execute(
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE chosen (id int PRIMARY KEY)",
        "ALTER PUBLICATION p ADD TABLE parts, chosen WHERE (id > 1)",
        "CREATE PUBLICATION q FOR TABLE t, part, chosen",
        "CREATE PUBLICATION own",
    )
    changed = partial(changed_by, database18, ["p", "q", "own"])
    everything = "SET (publish = 'insert, update, delete, truncate')"
    assert changed() == set()
    assert changed(f"ALTER PUBLICATION own {everything}") == set()
    # The other publication has all of the table all the while; of the others this is not known.
    back = ["ALTER PUBLICATION q SET (publish = 'insert')", f"ALTER PUBLICATION q {everything}"]
    assert changed(*back) == {"part", "chosen"}
    assert changed(*(one.replace(" q ", " p ") for one in back)) == {"part", "chosen"}
    # Each of the two leaves out something at some time.
    assert changed(*back, *(one.replace(" q ", " p ") for one in back)) == {"t", "part", "chosen"}
    assert changed(back[0]) == {"part", "chosen"}
    assert changed(back[0].replace(" q ", " p ")) == {"t", "part", "chosen"}
    assert changed(back[1]) == {"t", "part", "chosen"}
    root = "ALTER PUBLICATION p SET (publish_via_partition_root"
    assert changed(f"{root} = true)") == {"part", "parts", "chosen"}
    assert changed(f"{root} = false)", f"{root} = true)") == {"parts", "chosen"}


def test_what_a_change_of_generated_columns_means_for_a_table(database18: Any) -> None:
    """Only another expression of a column that is published makes other values of rows."""
    stored = "int GENERATED ALWAYS AS (id * 2) STORED"
    columns = f"(id int PRIMARY KEY, d int DEFAULT 1, s {stored}, w {stored})"
    database18.execute(
        f"CREATE TABLE t {columns}",
        f"CREATE TABLE listed {columns}",
        f"CREATE TABLE silent {columns}",
        f"CREATE TABLE parts {columns} PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "CREATE PUBLICATION p FOR TABLE t, parts"
        " WITH (publish_generated_columns = stored, publish_via_partition_root)",
        "CREATE PUBLICATION q FOR TABLE listed (id, s), silent",
    )
    changed = partial(changed_by, database18, ["p", "q"])

    def altered(action: str, *tables: str) -> set[str]:
        every = tables or ("t", "listed", "silent", "parts")
        return changed(*(f"ALTER TABLE {table} {action}" for table in every))

    assert altered("ALTER d SET DEFAULT 7") == set()
    assert altered("ALTER s SET EXPRESSION AS (id * 7)") == {"t", "listed", "parts"}
    assert altered("ALTER w SET EXPRESSION AS (id * 7)") == {"t", "parts"}
    # Rows that came in between have values of an expression that is there no more.
    back = [f"ALTER TABLE t ALTER s SET EXPRESSION AS (id * {number})" for number in (2, 7)]
    assert changed(*back) == {"t"}
    assert altered("ALTER s SET EXPRESSION AS (id * 9)", "part") == {"parts"}
    more = "CREATE TABLE more PARTITION OF parts FOR VALUES FROM (10) TO (20)"
    assert changed(more, "VACUUM FULL t") == set()
    assert altered(f"ADD x {stored}") == set()
    assert altered("RENAME id TO key") == set()
    assert altered("DROP COLUMN w") == set()
    assert altered("ALTER s DROP EXPRESSION") == set()


@pytest.mark.slow
def test_partitions_that_came_by_themselves_for_a_time(database18: Any, tmp_path: Path) -> None:
    database18.execute(
        "CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "INSERT INTO parts VALUES (1, 'one')",
        "CREATE PUBLICATION p FOR TABLE parts WITH (publish_via_partition_root)",
    )
    finish(database18, tmp_path)
    database18.execute(
        "ALTER PUBLICATION p SET (publish_via_partition_root = false)",
        "INSERT INTO parts VALUES (2, 'two')",
        "ALTER PUBLICATION p SET (publish_via_partition_root)",
    )
    finish(database18, tmp_path)
    check(database18, Folded(tmp_path).take(), "parts")


@pytest.mark.slow
@pytest.mark.parametrize("detached", ["part", "parts"])
def test_partitions_that_were_detached_for_a_time(
    database18: Any, tmp_path: Path, detached: str
) -> None:
    """Where none is published by its root, and between two captures."""
    above = "root" if detached == "parts" else "parts"
    bounds = "FOR VALUES FROM (0) TO (10)"
    database18.execute(
        "CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        f"CREATE TABLE parts PARTITION OF root {bounds} PARTITION BY RANGE (id)",
        f"CREATE TABLE part PARTITION OF parts {bounds}",
        "CREATE TABLE other PARTITION OF root FOR VALUES FROM (10) TO (20)",
        "INSERT INTO root VALUES (1, 'one'), (2, 'two'), (11, 'eleven')",
        "CREATE PUBLICATION p FOR TABLE root",
        "CREATE PUBLICATION q FOR TABLE part WITH (publish = 'insert')",
    )
    finish(database18, tmp_path)
    folded = Folded(tmp_path).take()
    database18.execute(
        f"ALTER TABLE {above} DETACH PARTITION {detached}",
        "DELETE FROM part WHERE id = 1",
        f"ALTER TABLE {above} ATTACH PARTITION {detached} {bounds}",
    )
    finish(database18, tmp_path)
    check(database18, folded.take(), "part", "other")
    assert [copied(tmp_path, oid(database18, one)) for one in ("part", "other")] == [2, 1]
    # A publication that names the partition itself has it also while it is detached.
    named = ConnectionParameters(database18.dsn, {})
    before = read_members(named, ["q"]).tables[oid(database18, "part")]
    database18.execute(
        f"ALTER TABLE {above} DETACH PARTITION {detached}",
        f"ALTER TABLE {above} ATTACH PARTITION {detached} {bounds}",
    )
    assert read_members(named, ["q"]).tables[oid(database18, "part")] == before


def test_a_table_that_is_in_another_schema_for_a_time(database18: Any, tmp_path: Path) -> None:
    """Between two captures, where its schema is published; as one that is named it stays."""
    database18.execute(
        "CREATE SCHEMA away",
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE other (id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
        "CREATE PUBLICATION p FOR TABLES IN SCHEMA public",
        "CREATE PUBLICATION q FOR TABLE t",
    )
    finish(database18, tmp_path)
    named = ConnectionParameters(database18.dsn, {})
    before = read_members(named, ["q"]).tables[oid(database18, "t")]
    folded = Folded(tmp_path).take()
    database18.execute(
        "ALTER TABLE t SET SCHEMA away",
        "DELETE FROM away.t WHERE id = 1",
        "ALTER TABLE away.t SET SCHEMA public",
    )
    finish(database18, tmp_path)
    check(database18, folded.take(), "t", "other")
    assert [copied(tmp_path, oid(database18, one)) for one in ("t", "other")] == [2, 1]
    assert read_members(named, ["q"]).tables[oid(database18, "t")] == before


def test_a_table_that_is_unlogged_for_a_time(
    database18: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shelf(database18, "FOR ALL TABLES")
    table = oid(database18, "t")
    with running(database18, tmp_path):
        wait_until(lambda: copied(tmp_path, table) == 1)
        database18.execute("ALTER TABLE t SET UNLOGGED", "DELETE FROM t WHERE id = 1")
        wait_until(lambda: "table public.t has left the publications" in caplog.messages)
        database18.execute("ALTER TABLE t SET LOGGED", "INSERT INTO t VALUES (4, 'four')")
        wait_until(lambda: copied(tmp_path, table) == 2)
    finish(database18, tmp_path)
    check(database18, Folded(tmp_path).take(), "t")


def test_a_directory_that_holds_something_else(shop: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("public.t.parquet").write_bytes(b"x")
    with expect_error(code="not_ours", path=str(tmp_path)):
        finish(shop, tmp_path, adopt_slot=True)
    assert [path.name for path in tmp_path.iterdir()] == ["public.t.parquet"]
    assert shop.slots() == {}
