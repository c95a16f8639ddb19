"""Snapshots of published tables: what is read, what is lost, and how they end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.expected_errors import check_fields, expect_error
from support.postgres.snapshots import frames_by_table, rows
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast import _impl
from pgoutput_fast.errors import Argument
from pgoutput_fast.replication import (
    ReplicationConnection,
    RetryableError,
    imported,
    slots,
    walsender,
)
from pgoutput_fast.replication.snapshot import open_snapshot
from pgoutput_fast.transcode import inserts_of_copy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from pgoutput_fast.replication.snapshot import ServerSnapshot

pytestmark = [pytest.mark.server]

PAGE = 8192


@contextlib.contextmanager
def made_slot(database: Any) -> Iterator[slots.CreatedSlot]:
    """A slot with a snapshot, which lasts while the context does."""
    with ReplicationConnection(database.dsn) as connection:
        yield slots.create(connection, f"{database.name}_s", temporary=True, snapshot=True)


def values(snapshot: ServerSnapshot) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each table."""
    announced = {table.name: table.announced for table in snapshot.tables}
    return {
        name: rows(announced[name], frames) for name, frames in frames_by_table(snapshot).items()
    }


def many(database: Any, name: str = "many", count: int = 3000) -> None:
    """A table with some pages, and the publication p."""
    database.execute(
        f"CREATE TABLE {name} (id int PRIMARY KEY, v text)",
        f"INSERT INTO {name} SELECT g, repeat('v', g % 100) FROM generate_series(1, {count}) g",
    )


def test_ranges_have_all_rows_once(
    database: Any, impl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_impl, "IMPLEMENTATION", impl.IMPLEMENTATION)
    many(database)
    database.execute("CREATE PUBLICATION p FOR TABLE many", "DELETE FROM many WHERE id % 7 = 0")
    with open_snapshot(database.dsn, ["p"], range_bytes=3 * PAGE, connections=3) as snapshot:
        (table,) = snapshot.tables
        size = database.execute("SELECT pg_relation_size('many')")[0][0]
        assert (table.bytes, table.ranges) == (size, -(-size // (3 * PAGE)))
        numbers = []
        frames = []

        def take(part: Any, made: Any) -> None:
            numbers.append(part.number)
            frames.extend(made)

        snapshot.copy(take)
    assert sorted(numbers) == list(range(1, table.ranges + 1))
    assert min(len(one.offsets) for one in frames) > 1
    ids = []
    decoder = pf.Decoder()
    for frame in table.announced:
        decoder.decode(frame)
    for one in frames:
        ends = one.offsets.tolist()
        ids += [decoder.decode(one.data[a:b]).new[0] for a, b in itertools.pairwise(ends)]
    assert sorted(ids) == [n for n in range(1, 3001) if n % 7]


def test_a_row_larger_than_the_buffer(
    database18: Any, impl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_impl, "IMPLEMENTATION", impl.IMPLEMENTATION)
    database18.execute(
        "CREATE TABLE large (id int, v text)",
        "INSERT INTO large SELECT g, repeat(chr(64 + g), g * 1000000) FROM generate_series(1, 5) g",
        "CREATE PUBLICATION p FOR TABLE large",
    )
    with open_snapshot(database18.dsn, ["p"]) as snapshot:
        assert values(snapshot)["large"] == [(n, chr(64 + n) * n * 1000000) for n in range(1, 6)]


def test_what_is_no_longer_as_it_was_is_lost(database: Any) -> None:
    """To read it would give no rows, or other ones, and nothing would say so."""
    for name in ("truncated", "rewritten", "dropped", "narrowed", "renamed", "widened", "same"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text, w int)",
            f"INSERT INTO {name} VALUES (1, 'one', 1)",
        )
    database.execute(
        "CREATE TABLE root (id int) PARTITION BY LIST (id)",
        "CREATE TABLE leaf_1 PARTITION OF root FOR VALUES IN (1)",
        "CREATE TABLE leaf_2 PARTITION OF root FOR VALUES IN (2)",
        "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)",
    )
    oids = dict(database.execute("SELECT relname::text, oid::bigint FROM pg_class"))
    with made_slot(database) as slot:
        database.execute(
            "TRUNCATE truncated",
            "ALTER TABLE rewritten ALTER w TYPE bigint",
            "DROP TABLE dropped",
            "ALTER TABLE narrowed DROP w",
            "ALTER TABLE renamed RENAME TO other",
            "ALTER TABLE other RENAME v TO x",
            "ALTER TABLE widened ADD y int DEFAULT 5",
            "ALTER TABLE widened ADD z text",
            "INSERT INTO same VALUES (2, 'after', 2)",
            "DROP PUBLICATION p",
            "INSERT INTO root VALUES (1)",
            "TRUNCATE leaf_2",
        )
        with open_snapshot(database.dsn, ["p"], exported=slot) as snapshot:
            assert snapshot.lsn == slot.lsn
            lost = {name: snapshot.lost.pop(oids[name]) for name in oids
                    if oids[name] in snapshot.lost}  # fmt: skip
            found = values(snapshot)
    assert snapshot.lost == {}
    assert found == {key: [(1, "one", 1)] for key in ["renamed", "widened", "same"]}
    assert set(lost) == {"truncated", "rewritten", "dropped", "narrowed", "root"}
    assert lost["dropped"] == "it was dropped"
    assert "public.truncated was truncated or rewritten" in lost["truncated"]
    assert "public.rewritten was truncated or rewritten" in lost["rewritten"]
    assert "column 'w' of public.narrowed was dropped or altered" in lost["narrowed"]
    assert "public.leaf_2 was truncated" in lost["root"]


def test_only_the_tables_that_are_asked_for(database18: Any) -> None:
    many(database18, "one", 10)
    many(database18, "two", 10)
    database18.execute("CREATE PUBLICATION p FOR TABLE one")
    oids = dict(database18.execute("SELECT relname::text, oid::bigint FROM pg_class"))
    wanted = [oids["one"], oids["two"]]
    with open_snapshot(database18.dsn, ["p"], relation_ids=wanted) as snapshot:
        assert [table.name for table in snapshot.tables] == ["one"]
        assert snapshot.lost == {oids["two"]: "it is not published, or not selected"}
    with open_snapshot(database18.dsn, ["p"], relation_ids=[]) as snapshot:
        assert (snapshot.tables, snapshot.lost) == ((), {})
        assert frames_by_table(snapshot) == {}


@contextlib.contextmanager
def waiting(database: Any, statement: str) -> Iterator[threading.Thread]:
    """A session that waits for the lock that a statement needs."""
    thread = threading.Thread(target=database.execute, args=[statement])
    thread.start()
    wait_until(
        lambda: (
            database.execute(
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            == [(1,)]
        )
    )
    yield thread
    thread.join(30)
    assert not thread.is_alive()


def test_an_alter_that_waits_stops_nobody(database: Any) -> None:
    """It waits for the first connection, and other connections would wait behind it."""
    many(database)
    many(database, "other")
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    snapshot = open_snapshot(database.dsn, ["p"], range_bytes=PAGE, connections=3)
    with waiting(database, "ALTER TABLE many ADD x int"), snapshot:
        threads: dict[str, set[str]] = {"many": set(), "other": set()}
        shared = threading.Event()
        counts = []

        def take(part: Any, frames: Any) -> None:
            name = threading.current_thread().name
            threads[part.table.name].add(name)
            if part.table.name == "other":
                if name != "pgoutput_fast-snapshot-0":
                    shared.set()
                assert shared.wait(30)
            counts.append(sum(len(one.offsets) - 1 for one in frames))

        snapshot.copy(take)
    assert sum(counts) == 6000
    assert threads["many"] == {"pgoutput_fast-snapshot-0"}
    assert database.execute("SELECT count(x) FROM many") == [(0,)]


def test_a_table_that_others_have_locked_is_lost(database18: Any) -> None:
    many(database18)
    many(database18, "other", 5)
    database18.execute("CREATE PUBLICATION p FOR ALL TABLES")
    with made_slot(database18) as slot, database18.connect() as holder:
        holder.execute("BEGIN; LOCK TABLE many")
        with open_snapshot(database18.dsn, ["p"], exported=slot, lock_timeout=0.2) as snapshot:
            (reason,) = snapshot.lost.values()
            assert reason == "other sessions kept it locked for 0.2 s"
            assert len(values(snapshot)["other"]) == 5


def test_what_the_role_may_not_read(database: Any) -> None:
    many(database, "secret", 5)
    role = f"{database.name}_role"
    database.execute(f"CREATE ROLE {role} LOGIN", "CREATE PUBLICATION p FOR TABLE secret")
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user=role)
    try:
        with made_slot(database) as slot:
            fields: dict[str, Any] = {"code": "no_rights", "sqlstate": "42501"}
            with expect_error(table="public.secret", **fields) as caught:
                open_snapshot(dsn, ["p"], exported=slot)
            assert "COPY" not in str(caught.value)  # the statement, which libpq quotes
            assert "SELECT" in str(caught.value)
            database.execute('CREATE SCHEMA "Hr"', 'ALTER TABLE secret SET SCHEMA "Hr"')
            with expect_error(table="Hr.secret", **fields) as caught:
                open_snapshot(dsn, ["p"], exported=slot)
            assert 'GRANT USAGE ON SCHEMA "Hr" TO' in str(caught.value)
            database.execute('ALTER TABLE "Hr".secret SET SCHEMA public')
            database.execute(
                f"GRANT SELECT ON secret TO {role}", "ALTER TABLE secret ENABLE ROW LEVEL SECURITY"
            )
            with expect_error(code="no_rights", table="public.secret"):
                open_snapshot(dsn, ["p"], exported=slot)
            database.execute(f"ALTER ROLE {role} BYPASSRLS")
            with open_snapshot(dsn, ["p"], exported=slot) as snapshot:
                assert len(values(snapshot)["secret"]) == 5
    finally:
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_what_a_slot_waits_for_is_said(
    database18: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(walsender, "_TELL_AFTER", 0.1)
    many(database18)
    database18.execute("CREATE PUBLICATION p FOR TABLE many")
    with database18.connect() as writer:
        pid = writer.info.backend_pid
        writer.execute("BEGIN")
        ((xid,),) = writer.execute("SELECT txid_current()::text").fetchall()
        named = f"transaction {xid} of process {pid}, user '{writer.info.user}'"
        with (
            caplog.at_level(logging.WARNING, "pgoutput_fast"),
            expect_error(RetryableError, code="timed_out"),
        ):
            open_snapshot(database18.dsn, ["p"], slot_timeout=0.5)
        assert named in caplog.text
        writer.execute("PREPARE TRANSACTION 'it''s open'")
        with (
            caplog.at_level(logging.WARNING, "pgoutput_fast"),
            expect_error(RetryableError, code="timed_out"),
        ):
            open_snapshot(database18.dsn, ["p"], slot_timeout=0.5)
        assert f'prepared transaction "it\'s open" (xid {xid})' in caplog.text
        writer.execute("ROLLBACK PREPARED 'it''s open'")
    assert database18.slots() == {}


def test_a_lost_connection_ends_it(database: Any) -> None:
    many(database)
    database.execute("CREATE PUBLICATION p FOR TABLE many")
    pid_of_others = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        " AND datname = current_database() AND backend_type = 'client backend'"
    )
    with open_snapshot(database.dsn, ["p"], range_bytes=PAGE) as snapshot:

        def take(part: Any, frames: Any) -> None:
            if part.number == 3:
                database.execute(pid_of_others)
            list(frames)

        with expect_error(RetryableError, code="connection_lost", table="public.many"):
            snapshot.copy(take)
        with expect_error(code="unfit_input"):
            snapshot.copy(take)


def test_a_cancelled_copy(database18: Any) -> None:
    many(database18, count=100000)
    database18.execute("CREATE PUBLICATION p FOR TABLE many")
    cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE 'COPY%many%'"
    with open_snapshot(database18.dsn, ["p"], connections=1) as snapshot:

        def take(part: Any, frames: Any) -> None:
            next(frames)
            database18.execute(cancel)
            list(frames)

        with expect_error(code="server_refused", sqlstate="57014", table="public.many"):
            snapshot.copy(take)


@pytest.mark.parametrize("what", ["row", "trailer"])
def test_what_is_cut_on_its_way_is_noticed(
    database18: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(database18, count=10)
    database18.execute("CREATE PUBLICATION p FOR TABLE many")

    def cut(*given: Any, **options: Any) -> Any:
        made = inserts_of_copy(*given, **options)
        if what == "trailer":
            return made._replace(ended=False)
        return made._replace(offsets=made.offsets[:-1])

    monkeypatch.setattr(imported, "inserts_of_copy", cut)
    with (
        open_snapshot(database18.dsn, ["p"]) as snapshot,
        expect_error(code="incomplete", table="public.many"),
    ):
        frames_by_table(snapshot)


def test_too_many_rows_for_one_range(database18: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    many(database18, count=10)
    database18.execute("CREATE PUBLICATION p FOR TABLE many")
    monkeypatch.setattr(imported, "_MOST_ROWS", 9)
    with (
        open_snapshot(database18.dsn, ["p"]) as snapshot,
        expect_error(code="out_of_memory", table="public.many"),
    ):
        frames_by_table(snapshot)


def test_a_name_that_is_no_text(database18: Any) -> None:
    """A database with the encoding SQL_ASCII has bytes of any encoding."""
    name = f"{database18.name}_ascii"
    database18.execute(
        f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0"
        " LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    dsn = psycopg.conninfo.make_conninfo(database18.dsn, dbname=name)
    try:
        with psycopg.connect(dsn, autocommit=True, client_encoding="latin1") as connection:
            connection.execute("SET client_encoding = 'SQL_ASCII'")
            connection.pgconn.exec_(b'CREATE TABLE "caf\xe9" (id int)')
            connection.pgconn.exec_(b"CREATE PUBLICATION p FOR ALL TABLES")
        with expect_error(code="server_refused", sqlstate="22021"):
            open_snapshot(dsn, ["p"])
    finally:
        database18.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "error", "part", "none"])
def test_the_callers_own_end(database18: Any, how: str) -> None:
    many(database18, count=100000)
    database18.execute("CREATE PUBLICATION p FOR TABLE many")
    stop = threading.Event()

    def take(part: Any, frames: Any) -> None:
        if how == "none":
            return
        next(frames)
        if how == "error":
            raise KeyError("mine")
        if how == "stop":
            stop.set()
            list(frames)

    expected: Any = {
        "stop": expect_error(RetryableError, code="stopped"),
        "error": pytest.raises(KeyError, match="mine"),
    }.get(how, expect_error(code="unfit_input", table="public.many"))
    with (
        open_snapshot(database18.dsn, ["p"], range_bytes=1 << 30) as snapshot,
        expected,
    ):
        snapshot.copy(take, stop=stop)
    assert not [t for t in threading.enumerate() if t.name.startswith("pgoutput_fast-snapshot")]


def test_publications_that_can_not_be_streamed_together(database18: Any) -> None:
    many(database18)
    database18.execute(
        "CREATE PUBLICATION p FOR TABLE many (id)", "CREATE PUBLICATION q FOR TABLE many"
    )
    with expect_error(code="bad_option", parameter="publications", table="public.many"):
        open_snapshot(database18.dsn, ["p", "q"])
    with expect_error(code="no_publication"):
        open_snapshot(database18.dsn, ["p", "r"])
    assert database18.slots() == {}


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"connections": 0}, "connections"),
        ({"range_bytes": -1}, "range_bytes"),
        ({"lock_timeout": 0}, "lock_timeout"),
        ({"slot_timeout": 0}, "slot_timeout"),
        ({"publications": []}, "publications"),
    ],
    ids=str,
)
def test_wrong_arguments(given: dict[str, Any], parameter: str) -> None:
    with expect_error(parameter=parameter):
        open_snapshot("", **{"publications": ["p"], **given})


def test_a_snapshot_that_is_gone(database18: Any) -> None:
    many(database18)
    database18.execute("CREATE PUBLICATION p FOR TABLE many")
    with made_slot(database18) as slot:
        pass
    with expect_error(code="unfit_input"):
        open_snapshot(database18.dsn, ["p"], exported=slot)
    with expect_error(
        code="unfit_input", parameter="exported", options=[Argument("snapshot", True)]
    ):
        open_snapshot(database18.dsn, ["p"], exported=slot._replace(snapshot=None))


def test_snapshot_and_stream_are_the_table(database: Any) -> None:
    """While others write: nothing is lost between the two, and nothing is in both."""
    many(database)
    database.execute("CREATE PUBLICATION p FOR TABLE many")
    stop = threading.Event()
    slot = f"{database.name}_s"

    def write(first: int) -> None:
        with database.connect() as connection:
            n = first
            while not stop.is_set():
                n += 2
                connection.execute("INSERT INTO many VALUES (%s, 'new')", [n])
                connection.execute("UPDATE many SET v = v || '!' WHERE id = %s", [n % 3000])
                connection.execute("DELETE FROM many WHERE id = %s", [(n + 77) % 3000])

    writers = [threading.Thread(target=write, args=[10000 + i]) for i in range(2)]
    for writer in writers:
        writer.start()
    try:
        with ReplicationConnection(database.dsn) as connection:
            made = slots.create(connection, slot, snapshot=True)
            snapshot = open_snapshot(database.dsn, ["p"], range_bytes=PAGE, exported=made)
        with snapshot:
            found = {one[0]: one for one in values(snapshot)["many"]}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    decoder = pf.Decoder()
    changes = 0
    for (frame,) in database.execute(
        f"SELECT data FROM pg_logical_slot_get_binary_changes('{slot}', NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'p')"
    ):
        message = decoder.decode(frame)
        changes += frame[:1] in b"IUD"
        if frame[:1] == b"I":
            assert message.new[0] not in found
            found[message.new[0]] = message.new.values()
        elif frame[:1] == b"U":
            assert message.new[0] in found
            found[message.new[0]] = message.new.values()
        elif frame[:1] == b"D":
            del found[message.old[0]]
    assert changes > 0
    assert sorted(found.values()) == database.execute("SELECT id, v FROM many ORDER BY id")


@pytest.mark.parametrize("connections", [1, 3])
def test_a_table_that_the_server_refuses_in_the_middle(database: Any, connections: int) -> None:
    """Its other ranges are left out, and the connection goes on with other tables."""
    many(database)
    many(database, "other")
    many(database, "secret")
    role = f"{database.name}_role"
    database.execute(
        "UPDATE many SET id = 0 WHERE id = 1500",
        "CREATE PUBLICATION p FOR TABLE many WHERE (1 / id >= 0), other, secret",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT SELECT ON many, other, secret TO {role}",
    )
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user=role)
    refused: dict[str, pf.PgOutputError] = {}
    finished: list[str] = []
    found: dict[str, int] = {}

    def take(part: Any, frames: Any) -> None:
        for one in frames:
            found[part.table.name] = found.get(part.table.name, 0) + len(one.offsets) - 1

    def refuse(table: Any, error: pf.PgOutputError) -> None:
        assert table.name not in refused
        refused[table.name] = error

    try:
        with (
            made_slot(database) as slot,
            open_snapshot(
                dsn, ["p"], exported=slot, range_bytes=PAGE, connections=connections
            ) as snapshot,
        ):
            # A connection that has not locked it yet sees it when it locks, another one when it
            # copies.
            database.execute(f"REVOKE SELECT ON secret FROM {role}")
            snapshot.copy(take, lambda table: finished.append(table.name), None, refuse)
        assert finished == ["other"]
        assert found["other"] == 3000
        assert found.get("many", 0) < 2999
        assert "secret" not in found
        assert refused.keys() == {"many", "secret"}
        check_fields(refused["many"], sqlstate="22012", table="public.many")
        check_fields(refused["secret"], code="no_rights", sqlstate="42501", table="public.secret")
    finally:
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
