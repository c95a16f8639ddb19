"""A capture that copies tables: what was there, what joins later, what is copied again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folded import Folded

import pgoutput_fast as pf
from pgoutput_fast.cli import main
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.directory.consumers import Consumer, consumers
from pgoutput_fast.directory.copies import Tables
from pgoutput_fast.directory.requests import request_copy, requested
from pgoutput_fast.replication import RetryableError, capture, copier, upkeep
from pgoutput_fast.replication.membership import read_members

pytestmark = [pytest.mark.integration, pytest.mark.sample(2)]

WaitUntil = Callable[..., None]


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
    state = Tables(directory).read().get(relation_id)
    return 0 if state is None or state.held_from is not None else len(state.snapshots)


def test_tables_that_were_there_and_tables_that_join(
    shop: Any, tmp_path: Path, wait_until: WaitUntil
) -> None:
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


def test_a_table_that_is_copied_again_on_request(
    shop: Any, tmp_path: Path, wait_until: WaitUntil
) -> None:
    finish(shop, tmp_path)
    folded = Folded(tmp_path).take()
    check(shop, folded, "big", "small", "empty")
    # Something went wrong at the consumer.
    folded.rows[oid(shop, "small")]["5"] = ("5", "wrong")
    request_copy(tmp_path, oid(shop, "small"), ["public", "small"])
    with load(shop, "small"), running(shop, tmp_path, snapshot="never", create_slot=False):
        wait_until(lambda: copied(tmp_path, oid(shop, "small")) == 2)
        assert requested(tmp_path) == {}
    finish(shop, tmp_path)
    check(shop, folded.take(), "big", "small", "empty")


def test_the_command_that_asks_for_a_copy(
    shop: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(shop, tmp_path, snapshot="never")
    shop.execute("UPDATE small SET v = 'changed' WHERE id = 1")
    finish(shop, tmp_path, snapshot="never")
    given = ["snapshot", "--dir", str(tmp_path), "--table", "public.small"]
    assert main([*given, "--wait", "0.1"]) == 1
    assert "no capture has seen the request for public.small" in capsys.readouterr().err
    assert requested(tmp_path) == {oid(shop, "small"): ["public", "small"]}
    with running(shop, tmp_path, snapshot="never", create_slot=False):
        assert main([*given, "--wait", "20"]) == 0
    (copy,) = Tables(tmp_path).read()[oid(shop, "small")].snapshots
    told = capsys.readouterr().out
    assert told == f"public.small is copied as of {pf.format_lsn(copy.lsn)}\n"
    finish(shop, tmp_path, snapshot="never")
    folded = Folded(tmp_path).take()
    check(shop, folded, "small")
    assert main(["snapshot", "--dir", str(tmp_path), "--table", "public.none"]) == 1
    assert "has no table 'public.none'; it has public.small" in capsys.readouterr().err
    assert main(["snapshot", "--dir", str(tmp_path / "x"), "--table", "public.none"]) == 1
    assert "no capture has begun" in capsys.readouterr().err


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


def test_a_capture_that_ends_while_it_copies(
    shop: Any, tmp_path: Path, wait_until: WaitUntil
) -> None:
    shop.execute("INSERT INTO big SELECT g, repeat('x', 500) FROM generate_series(30001, 90000) g")
    with load(shop, "big", "small"):
        # It may not have come to its stream yet.
        with contextlib.suppress(RetryableError), running(shop, tmp_path, connections=1):
            wait_until(lambda: list((tmp_path / "snapshots").glob("*.arrow")))
        states = Tables(tmp_path).read()
        assert any(state.held_from is not None for state in states.values())
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
        with pytest.raises(pf.PgOutputError, match=r"small|empty"):
            finish(shop, tmp_path, user=role)
    finally:
        shop.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
    # Nothing is lost of what the slot has; it is its own capture that goes on.
    finish(shop, tmp_path)
    check(shop, Folded(tmp_path).take(), "big", "small", "empty")


def test_a_refused_table_does_not_hold_up_others(
    shop: Any, tmp_path: Path, wait_until: WaitUntil
) -> None:
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
            state = Tables(tmp_path).read()[oid(shop, "hidden")]
            assert (state.held_from is not None, state.snapshots) == (True, ())
        with pytest.raises(pf.PgOutputError, match=r"can't copy table public.hidden: permission"):
            finish(shop, tmp_path, user=role)
        shop.execute(f"GRANT SELECT ON hidden TO {role}")
        finish(shop, tmp_path, user=role)
        check(shop, Folded(tmp_path, "all").take(), "big", "small", "late", "hidden")
    finally:
        shop.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


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
    assert Tables(tmp_path).read().keys() == tables


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
    expected[oid(shop, "more.one")] = ("more", "one", (schema,))
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


def test_what_no_consumer_needs_is_deleted(
    shop: Any, tmp_path: Path, wait_until: WaitUntil
) -> None:
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
    with pytest.raises(pf.PgOutputError, match="copied again"):
        Consumer(tmp_path, "too_late")


def test_consumers_that_do_not_move(
    shop: Any, tmp_path: Path, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    finish(shop, tmp_path)
    Consumer(tmp_path, "silent")
    with running(shop, tmp_path, silent_after=0.01):
        wait_until(lambda: "consumer silent has not moved" in caplog.text)
    assert [one.name for one in consumers(tmp_path)] == ["silent"]
    with running(shop, tmp_path, silent_after=0.01, give_up=True):
        wait_until(lambda: consumers(tmp_path) == [])
    assert caplog.text.count("has not moved") == 2


def test_a_disk_that_is_almost_full(shop: Any, tmp_path: Path) -> None:
    with pytest.raises(pf.PgOutputError, match=r"bytes free, less than .* nothing is lost"):
        finish(shop, tmp_path, min_free=1 << 60)
    finish(shop, tmp_path)
    check(shop, Folded(tmp_path).take(), "big", "small", "empty")


def test_a_table_that_returns_is_seen_in_the_stream(
    shop: Any, tmp_path: Path, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
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


def test_a_table_that_leaves_while_it_is_copied(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_WATCH_INTERVAL", 3600.0)
    take = copier._Round._take
    left = []

    def leaves(self: Any, part: Any, frames: Any) -> None:
        if part.table.name == "small" and not left:
            left.append(part)
            shop.execute(
                "ALTER PUBLICATION p DROP TABLE small",
                "DELETE FROM small WHERE id = 1",
                "ALTER PUBLICATION p ADD TABLE small",
            )
        take(self, part, frames)

    monkeypatch.setattr(copier._Round, "_take", leaves)
    finish(shop, tmp_path)
    assert left
    check(shop, Folded(tmp_path).take(), "big", "small", "empty")


def test_a_directory_that_holds_something_else(shop: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("public.t.parquet").write_bytes(b"x")
    with pytest.raises(pf.PgOutputError, match=r"has other things in it \(public\.t\.parquet\)"):
        finish(shop, tmp_path, adopt_slot=True)
    assert [path.name for path in tmp_path.iterdir()] == ["public.t.parquet"]
    assert shop.slots() == {}
