"""verify: what it finds in targets that hold something else than the server, and what it says."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import psycopg
import pyarrow as pa
import pytest
from support.expected_errors import expect_error
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast import cli
from pgoutput_fast.catalog import catalog_of
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.cli import verify as command_module
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.replication import ReplicationConnection, capture, slots
from pgoutput_fast.verify import Report, TableResult, VerifyProgress, moment, targets, verify
from pgoutput_fast.verify.moment import Moment, ServerRows, ServerTable
from pgoutput_fast.verify.parquet_changes import ChangeFiles, ChangeVersion
from pgoutput_fast.verify.targets import DirectoryTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgoutput_fast.embedded import EmbeddedServer

pytestmark = [pytest.mark.server]

SCHEMA = (
    "CREATE TABLE a (id int PRIMARY KEY, t text, f float8, big text)",
    "ALTER TABLE a ALTER big SET STORAGE EXTERNAL",
    "CREATE TABLE m (x int, y text)",
    "ALTER TABLE m REPLICA IDENTITY FULL",
    "CREATE TABLE whole (id int PRIMARY KEY, t text, big text)",
    "ALTER TABLE whole ALTER big SET STORAGE EXTERNAL",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    "CREATE TABLE unlike (id int PRIMARY KEY, code text COLLATE \"C\" NOT NULL)",
    "CREATE UNIQUE INDEX by_code ON unlike (code)",
    "ALTER TABLE unlike REPLICA IDENTITY USING INDEX by_code",
    "CREATE TABLE parts (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE parts_2 (v int, id int NOT NULL)",
    "ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE chosen (id int PRIMARY KEY, v int, hidden text)",
    """CREATE PUBLICATION p FOR TABLE a, m, whole, unlike, parts, chosen (id, v)
        WHERE (id % 2 = 0) WITH (publish_via_partition_root)""",
)  # fmt: skip
CHANGES = (
    """INSERT INTO a SELECT i, 't' || i, i / 3.0, repeat('x', 3000) || i
        FROM generate_series(1, 300) AS i""",
    "UPDATE a SET t = NULL WHERE id = 3",
    "UPDATE a SET f = '-0' WHERE id = 4",
    "UPDATE a SET t = '' WHERE id = 5",
    "UPDATE a SET id = id + 1000 WHERE id BETWEEN 10 AND 19",
    "UPDATE a SET id = id - 500 WHERE id BETWEEN 1010 AND 1019",
    "DELETE FROM a WHERE id = 20",
    "BEGIN; DELETE FROM a WHERE id = 21; INSERT INTO a VALUES (21, 'new'); END",
    """INSERT INTO m SELECT i % 5, CASE WHEN i % 5 > 0 THEN 'a,\\b' END
        FROM generate_series(1, 50) AS i""",
    "DELETE FROM m WHERE ctid = '(0,7)'",
    "UPDATE m SET y = 'u' WHERE ctid = '(0,8)'",
    "INSERT INTO whole SELECT i, 't', repeat('y', 3000) || i FROM generate_series(1, 9) AS i",
    "UPDATE whole SET t = 'u' WHERE id = 2",
    "UPDATE whole SET id = 20 WHERE id = 3",
    "ALTER TABLE whole ADD later int DEFAULT 7",
    "UPDATE whole SET t = 'v' WHERE id = 4",
    "INSERT INTO unlike VALUES (1, 'b'), (2, 'a')",
    "UPDATE unlike SET id = 3 WHERE code = 'b'",
    "INSERT INTO parts SELECT i, i FROM generate_series(1, 19) AS i",
    "UPDATE parts SET id = 0 WHERE id = 19",
    "INSERT INTO chosen SELECT i, i, 'h' FROM generate_series(1, 20) AS i",
    "UPDATE chosen SET id = 101 WHERE id = 2",
    "UPDATE chosen SET id = 102 WHERE id = 3",
)


class Made(NamedTuple):
    """A database, and its segments."""

    dsn: str
    segments: Path

    def verify(self, **options: Any) -> Report:
        return verify(
            self.dsn, publications=["p"], target=str(self.segments), timeout=10, **options
        )


def run(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for one in statements:
            connection.execute(one.encode())


def land(dsn: str, directory: Path, slot: str = "verified", **options: Any) -> None:
    with psycopg.connect(dsn) as connection:
        (end,) = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("",)
    capture(
        dsn, slot=slot, publications=["p"], directory=directory, create_slot=True,
        until_lsn=pf.parse_lsn(end), **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(pg16: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    path = tmp_path_factory.mktemp("verify")
    run(pg16.dsn(), "CREATE DATABASE verified", "CREATE DATABASE other")
    dsn = pg16.dsn("verified")
    run(dsn, *SCHEMA)
    land(dsn, path / "segments")
    run(dsn, *CHANGES)
    land(dsn, path / "segments")
    yield Made(dsn, path / "segments")
    slots.drop(dsn, "verified")


def spoil(files: ChangeFiles, table: str, statement: str) -> None:
    """Change the rows of a file that a verification folds, in which columns have their names."""
    (relation_id,) = (key for key, name in files.names.items() if name == ("public", table))
    (version,) = files.versions[relation_id]
    (path,) = version.files
    names = {f"a{i}": name for i, name in enumerate(version.columns)}
    names |= {f"b{i}": f"old_{name}" for i, name in enumerate(version.columns)}
    shown = ", ".join(f"{one} AS {name}" for one, name in names.items())
    stored = ", ".join(f"{name} AS {one}" for one, name in names.items())
    with duckdb.connect() as connection:
        connection.execute("CREATE SCHEMA public")
        rows = f"(SELECT {shown}, * EXCLUDE ({', '.join(names)}) FROM '{path}')"
        connection.execute(f"CREATE TABLE public.{table} AS FROM {rows}")
        connection.execute(statement)
        rows = f"(SELECT {stored}, * EXCLUDE ({', '.join(names.values())}) FROM public.{table})"
        connection.execute(f"COPY {rows} TO '{path}'")
        ((version.rows,),) = connection.execute(f"SELECT count(*) FROM '{path}'").fetchall()


Spoiling = Callable[..., None]
"""Has the files of the next verification changed by a statement; the table is public.a if none is
named."""


@pytest.fixture
def spoiling(monkeypatch: pytest.MonkeyPatch) -> Spoiling:
    def spoiling(statement: str, table: str = "a") -> None:
        pending = [statement]

        def read(files: ChangeFiles, tell: Any) -> None:
            original(files, tell)
            if pending:
                spoil(files, table, pending.pop())

        original = ChangeFiles.read
        monkeypatch.setattr(ChangeFiles, "read", read)

    return spoiling


@pytest.fixture
def broken(made: Made, spoiling: Spoiling) -> Callable[..., TableResult]:
    """Change what the target has, and verify it: the result of the table that differs."""

    def result(statement: str, name: str = "a") -> TableResult:
        spoiling(statement, name)
        report = made.verify()
        assert report.exit_code == 1
        assert [one.name for one in report.tables if one.state != "equal"] == [name]
        (found,) = (one for one in report.tables if one.name == name)
        assert (found.state, found.differing_is_least) == ("different", False)
        return found

    return result


def test_a_lock_that_others_wait_for(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the tables that are compared does not make the comparison wait for ever."""
    writer = threading.Thread(
        target=run, args=[made.dsn, "BEGIN; LOCK TABLE a, parts IN ACCESS EXCLUSIVE MODE; END"]
    )

    def beside(*given: Any) -> Any:
        writer.start()
        with psycopg.connect(made.dsn, autocommit=True) as connection:
            query = "SELECT FROM pg_locks WHERE NOT granted"
            wait_until(lambda: connection.execute(query).fetchall())
        return catalog_of(*given)

    monkeypatch.setattr(moment, "catalog_of", beside)
    report = made.verify()
    assert (report.exit_code, len(report.tables)) == (0, 6)
    writer.join(30)
    assert not writer.is_alive()


def test_all_tables_are_locked_while_the_target_is_waited_for(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/how-to/verify.md says, also those that are not compared; no longer than that."""
    lock, refused = "BEGIN; LOCK TABLE a IN ACCESS EXCLUSIVE MODE NOWAIT; END", []

    def look(progress: VerifyProgress) -> None:
        if progress.doing.startswith("waiting for the target to reach") and not refused:
            with pytest.raises(psycopg.errors.LockNotAvailable) as raised:
                run(made.dsn, lock)
            refused.append(raised.value)

    monkeypatch.setattr(targets.DirectoryTarget, "refresh", lambda *_: 1)
    with expect_error(code="timed_out"):
        verify(
            made.dsn,
            publications=["p"],
            target=str(made.segments),
            tables=["public.parts"],
            timeout=0.1,
            progress=look,
        )
    assert refused
    run(made.dsn, lock)


def test_what_is_equal(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the sums are equal no row is looked at.
    monkeypatch.setattr(ServerRows, "digests", lambda *_: pytest.fail("a range differs"))
    report = made.verify()
    assert report.exit_code == 0
    found = {one.name: (one.state, one.rows, one.target_rows) for one in report.tables}
    assert found == {
        "a": ("equal", 299, 299),
        "m": ("equal", 49, 49),
        "parts": ("equal", 19, 19),
        "chosen": ("equal", 10, 10),
        "unlike": ("equal", 2, 2),
        "whole": ("equal", 9, 9),
    }
    assert report.only_in_target == ()
    assert report.position >= report.lsn


def test_one_value(broken: Callable[..., TableResult]) -> None:
    found = broken("UPDATE public.a SET t = 'T7' WHERE id = 7")
    (one,) = found.differences
    assert (found.differing, one.kind, one.key) == (1, "different", {"id": "7"})
    assert one.columns == {"t": ("t7", "T7")}


def test_null_is_not_an_empty_text(broken: Callable[..., TableResult]) -> None:
    found = broken("UPDATE public.a SET t = '' WHERE id = 3 AND op = 'update'")
    assert found.differences[0].columns == {"t": (None, "")}
    (one,) = found.differences
    assert one.key == {"id": "3"}


@pytest.mark.slow
def test_an_empty_text_is_not_null(broken: Callable[..., TableResult]) -> None:
    found = broken("UPDATE public.a SET t = NULL WHERE id = 5 AND op = 'update'")
    assert found.differences[0].columns == {"t": ("", None)}


def test_the_sign_of_zero(broken: Callable[..., TableResult]) -> None:
    # DuckDB does not store a value that is equal to the one that is there.
    (one,) = broken(
        "UPDATE public.a SET f = 1 WHERE id = 4 AND op = 'update';"
        "UPDATE public.a SET f = 0 WHERE id = 4 AND op = 'update'"
    ).differences
    assert one.key == {"id": "4"}
    assert one.columns == {"f": ("-0.0", "0.0")}


def test_a_row_that_is_missing(broken: Callable[..., TableResult]) -> None:
    found = broken("DELETE FROM public.a WHERE id = 7")
    (one,) = found.differences
    assert (one.kind, one.key, one.times) == ("missing", {"id": "7"}, (1, 0))
    assert (found.rows, found.target_rows) == (299, 298)


@pytest.mark.slow
def test_a_row_too_many(broken: Callable[..., TableResult]) -> None:
    found = broken("DELETE FROM public.a WHERE old_id = 20 AND op = 'delete'")
    (one,) = found.differences
    assert (one.kind, one.times) == ("extra", (0, 1))


def test_a_row_twice(broken: Callable[..., TableResult]) -> None:
    (one,) = broken("INSERT INTO public.a FROM public.a WHERE id = 7").differences
    assert (one.kind, one.key, one.times) == ("doubled", {"id": "7"}, (1, 2))


def test_rows_of_a_multiset(broken: Callable[..., TableResult]) -> None:
    (one,) = broken("DELETE FROM public.m WHERE op = 'insert' AND seq = 1", "m").differences
    assert (one.kind, one.key) == ("too few", {"x": "2", "y": "a,\\b"})
    assert one.times == (9, 8)


@pytest.mark.slow
def test_many_rows(broken: Callable[..., TableResult]) -> None:
    found = broken("UPDATE public.a SET t = t || '!' WHERE id BETWEEN 251 AND 300")
    assert (found.differing, len(found.differences)) == (50, 10)


def test_rows_of_a_file_in_another_order(made: Made, spoiling: Spoiling) -> None:
    spoiling(
        "CREATE TEMP TABLE held AS FROM public.a; DELETE FROM public.a;"
        "INSERT INTO public.a FROM held ORDER BY commit_lsn DESC, seq DESC"
    )
    (found,) = made.verify(tables=["public.a"]).tables
    assert (found.state, found.rows, found.target_rows) == ("equal", 299, 299)


@pytest.mark.slow
def test_chosen_tables_and_columns(made: Made) -> None:
    report = made.verify(tables=["public.a"], exclude=["public.a.f"])
    assert [(one.name, one.state, one.excluded) for one in report.tables] == [
        ("a", "equal", ("f",))
    ]
    for options, code, parameter, table in (
        ({"exclude": ["public.a.g"]}, "no_table", "exclude", "public.a"),
        ({"exclude": ["public.b.id"]}, "no_table", "exclude", "public.b"),
        ({"exclude": ["public.a"]}, "unfit_input", None, None),
        ({"tables": ["public.B"]}, "no_table", "tables", "public.b"),
        ({"tables": ['public."A"']}, "no_table", "tables", "public.A"),
        ({"tables": ["a"]}, "unfit_input", None, None),
    ):
        with expect_error(code=code, parameter=parameter, table=table):
            made.verify(**options)
    report = made.verify(tables=['Public."a"'], exclude=['"public".a."f"'])
    assert [(one.name, one.excluded) for one in report.tables] == [("a", ("f",))]
    report = made.verify(exclude=["public.a.id"])
    assert report.tables[0].why == "its key has id, which can't be compared"


def test_another_database(
    made: Made, pg16: EmbeddedServer, pg18: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before a slot is made, and before the target is read."""
    monkeypatch.setattr(ReplicationConnection, "make_slot", lambda *_, **__: pytest.fail("made"))
    monkeypatch.setattr(ChangeFiles, "read", lambda *_: pytest.fail("read"))
    for dsn, hint in (
        (pg16.dsn("other"), "Give dsn= of database "),  # another database, and another system
        (pg18.dsn(), "Give dsn= of the target's server"),
    ):
        run(dsn, "CREATE PUBLICATION p")
        try:
            with expect_error(code="another_history") as caught:
                verify(dsn, publications=["p"], target=str(made.segments), timeout=1)
            assert hint in str(caught.value)
        finally:
            run(dsn, "DROP PUBLICATION p")


def test_a_table_that_waits_for_its_snapshot(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.segments, tmp_path / "segments")
    with psycopg.connect(made.dsn) as connection:
        (oid,) = connection.execute("SELECT 'a'::regclass::oid::int8").fetchone() or (0,)
    SnapshotStates(tmp_path / "segments").wait(oid, 0x10, {"table": "public.a"}, first=False)
    report = verify(made.dsn, publications=["p"], target=str(tmp_path / "segments"))
    found = {one.name: one for one in report.tables}
    assert (found["a"].state, found["m"].state) == ("not compared", "equal")
    assert found["a"].why == "it has been waiting for its snapshot since 0/10"
    assert report.exit_code == 2


def test_a_table_that_the_capture_has_not_seen(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    """The slot has moved behind where the table was published, as nothing was sent meanwhile."""
    database = make_database(pg16)
    database.execute(
        *(f"CREATE TABLE {one} (id int PRIMARY KEY)" for one in "ab"),
        *(f"INSERT INTO {one} VALUES (1)" for one in "ab"),
        "CREATE PUBLICATION p FOR TABLE a",
    )
    land(database.dsn, tmp_path / "segments", "seen", snapshot="initial")
    database.execute(
        "ALTER PUBLICATION p ADD TABLE b",
        "SELECT pg_replication_slot_advance('seen', pg_current_wal_lsn())",
    )
    report = verify(database.dsn, publications=["p"], target=str(tmp_path / "segments"))
    assert {one.name: (one.state, one.why) for one in report.tables} == {
        "a": ("equal", ""),
        "b": ("not compared", "the change log has no snapshot of it yet"),
    }


def test_a_snapshot_and_nothing_else(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    database = make_database(pg16)
    database.execute(*SCHEMA, *CHANGES)
    capture(
        database.dsn, slot="quiet", publications=["p"], directory=tmp_path / "segments",
        create_slot=True, snapshot="only",
    )  # fmt: skip
    report = verify(database.dsn, publications=["p"], target=str(tmp_path / "segments"))
    assert report.exit_code == 0
    assert {one.name: one.target_rows for one in report.tables} == {
        "a": 299, "m": 49, "parts": 19, "chosen": 10, "unlike": 2, "whole": 9,
    }  # fmt: skip


@pytest.mark.slow
def test_deletes_that_are_not_published(made: Made) -> None:
    run(made.dsn, "CREATE PUBLICATION inserts FOR TABLE a WITH (publish = 'insert')")
    try:
        report = verify(made.dsn, publications=["inserts"], target=str(made.segments))
    finally:
        run(made.dsn, "DROP PUBLICATION inserts")
    (one,) = report.tables
    assert one.why.startswith("its updates and deletes and truncates are not published")
    assert "public.m" in report.only_in_target


def test_values_that_no_change_brings(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    database = make_database(pg16)
    database.execute(*SCHEMA, "INSERT INTO a VALUES (1, 't', 1, repeat('x', 3000))")
    land(database.dsn, tmp_path / "segments", "late")
    database.execute("UPDATE a SET t = 'u'", "INSERT INTO a VALUES (2)")
    land(database.dsn, tmp_path / "segments", "late")
    report = verify(database.dsn, publications=["p"], target=str(tmp_path / "segments"))
    found = {one.name: one for one in report.tables}["a"]
    assert found.state == "not compared"
    assert found.why.startswith(
        "the change log lacks values of big in 1 row: they were written before"
    )


@contextlib.contextmanager
def opened(made: Made) -> Iterator[tuple[Moment, DirectoryTarget, dict[str, ServerTable]]]:
    with (
        contextlib.closing(Moment(ConnectionParameters(made.dsn), ["p"], 10.0)) as moment,
        contextlib.closing(DirectoryTarget(made.segments, pf.TypeRegistry)) as found,
    ):
        found.refresh(0)
        yield moment, found, {one.table.name: one for one in moment.tables}


@pytest.mark.slow
def test_changes_that_come_late_with_an_earlier_place(made: Made) -> None:
    """As those of a snapshot do, which was taken after other changes were there."""
    with opened(made) as (moment, target, tables):
        table = tables["a"]

        def rows() -> int:
            target.refresh(0)
            compared = target.table(table)
            server = ServerRows(moment.connection, table, compared.texts)
            found = target.rows(table, compared, server.part_of).sums(1, None)
            return sum(one.rows for one in found.values())

        assert [rows(), rows()] == [299, 299]
        assert target._files is not None
        spoil(target._files, "a", "INSERT INTO public.a FROM public.a WHERE id = 7")
        assert rows() == 300


@pytest.mark.slow
def test_tables_that_change_although_they_are_locked(
    pg16: EmbeddedServer, make_database: Callable[..., Any], made: Made
) -> None:
    """The stream tells it, too: of tables whose lock was lost with its connection."""
    database = make_database(pg16)
    database.execute(*SCHEMA, "INSERT INTO unlike VALUES (1, 'a')")
    with opened(made._replace(dsn=database.dsn)) as (moment, target, tables):
        sides = {}
        for name in ("m", "unlike", "a"):
            texts = target.table(tables[name]).texts
            sides[tables[name].table.relation_id] = (
                tables[name], ServerRows(moment.connection, tables[name], texts),
            )  # fmt: skip
        database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE relation = 'm'::regclass",
            "TRUNCATE m",
            "ALTER TABLE unlike ADD added int",
            "INSERT INTO unlike VALUES (2, 'b', 3)",
            "INSERT INTO a VALUES (1)",
        )
        ((end,),) = database.execute("SELECT pg_current_wal_insert_lsn()::text")
        changes = moment.changes(sides, pf.parse_lsn(end), 10.0)
        found = {sides[key][0].table.name: one for key, one in changes.items()}
    assert found["m"].why == "it was truncated meanwhile"
    assert found["unlike"].why == "its columns were changed meanwhile"
    # With the lock the connection is gone, which reads what has changed.
    assert found["a"].why.startswith("the server can't parse a value that it sent")


# --- the command ---------------------------------------------------------------------------------


def command(
    made: Made, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    code = cli.main(
        ["verify", "--dsn", made.dsn, "--publication", "p", "--timeout", "5", *arguments]
    )
    return code, *capsys.readouterr()


def test_verify_as_a_command(
    made: Made, capsys: pytest.CaptureFixture[str], spoiling: Spoiling
) -> None:
    target = ["--target", str(made.segments)]
    code, out, err = command(made, capsys, *target)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "public.a       equal, 299 rows"
    spoiling("UPDATE public.a SET t = 'T7' WHERE id = 7")
    code, out, _ = command(made, capsys, *target)
    assert code == 1
    assert "    id='7': t: server 't7', target 'T7'" in out.splitlines()
    spoiling("UPDATE public.a SET t = 'T7' WHERE id = 7")
    code, out, _ = command(made, capsys, *target, "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["tables"][0]["differing"]) == (1, 1, 1)
    assert found["tables"][0]["differences"][0]["columns"] == {"t": ["t7", "T7"]}


def test_what_is_done_is_said_meanwhile(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "_INTERVAL", 0.0)
    code, out, err = command(made, capsys, "--target", str(made.segments), "--json")
    assert (code, json.loads(out)["exit_code"]) == (0, 0)
    said = err.splitlines()
    assert said[0] == "making a snapshot"
    assert "waiting for the target, 0 of 6 tables" in said
    assert "reading the target public.m, 2 of 6 tables" in said
    assert "comparing public.whole, 5 of 6 tables" in said
    assert any(re.fullmatch(r"reading the segments, .*, [0-9]+ changes", one) for one in said)


def test_errors_of_verify_as_a_command(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(made, capsys, "--target", "/nowhere")
    assert (code, out) == (2, "")
    assert "/nowhere [missing_path]" in err
    file = made.segments.with_name("plain")
    file.touch()
    for given in (str(file), f"file://{file}"):
        code, out, err = command(made, capsys, "--target", given)
        assert (code, out) == (2, "")
        assert f"--target duckdb:{file}" in err
    code = cli.main(
        ["verify", "--dsn", "host=127.0.0.1 port=1 password=tops3cret", "--publication", "p",
         "--target", str(made.segments)]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 2
    assert "tops3cret" not in out + err


# --- while both move -----------------------------------------------------------------------------


class Moving(NamedTuple):
    dsn: str
    segments: Path

    def verify(self, **options: Any) -> Report:
        return verify(self.dsn, publications=["p"], target=str(self.segments), **options)


@pytest.fixture
def moving(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path,
) -> Iterator[Moving]:  # fmt: skip
    """A database with a capture that runs."""
    database = make_database(pg16)
    database.execute(*SCHEMA)
    stop = threading.Event()
    found = Moving(database.dsn, tmp_path / "segments")
    thread = threading.Thread(
        target=capture,
        args=(found.dsn,),
        kwargs={
            "slot": "moving", "publications": ["p"], "directory": found.segments,
            "create_slot": True, "stop": stop, "max_delay": 0.1,
        },
    )  # fmt: skip
    thread.start()
    wait_until(lambda: database.slots().get("moving"))
    yield found
    stop.set()
    thread.join()


@contextlib.contextmanager
def writing(dsn: str, step: Callable[[Any, int], None]) -> Iterator[None]:
    """Run a step over and over, in another thread."""
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            number = 0
            while not stop.is_set():
                step(connection, number)
                number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def many(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        (rows,) = connection.execute("SELECT count(*) FROM a").fetchone() or (0,)
    return int(rows)


@pytest.mark.slow
def test_equal_while_both_move(moving: Moving) -> None:
    run(moving.dsn, *CHANGES)

    def step(connection: Any, number: int) -> None:
        key = number * 7919 % 3000
        with connection.transaction():
            connection.execute("DELETE FROM a WHERE id = %s", [key + 1])
            connection.execute(
                "INSERT INTO a VALUES (%s, %s, 1, repeat('z', 3000)) ON CONFLICT (id) DO UPDATE "
                "SET t = excluded.t", [key, str(number)],
            )  # fmt: skip
            connection.execute("INSERT INTO m VALUES (%s, 'n')", [number % 50])
        if number % 10 == 0:
            connection.execute("UPDATE a SET id = -id WHERE id = %s", [key])
        time.sleep(0.01)

    with writing(moving.dsn, step):
        wait_until(lambda: many(moving.dsn) > 320)
        report = moving.verify(rounds=30)
    found = {one.name: one for one in report.tables}
    assert {one.state for one in report.tables} <= {"equal", "unsettled"}
    assert found["a"].state == "equal"
    assert found["a"].looked_again > 0
    assert found["a"].rows > 320


@pytest.mark.slow
def test_a_key_that_never_stands_still(moving: Moving) -> None:
    run(moving.dsn, *CHANGES)

    def step(connection: Any, number: int) -> None:
        connection.execute("UPDATE a SET t = %s WHERE id = 30", [str(number)])
        time.sleep(0.01)

    with writing(moving.dsn, step):
        report = moving.verify(rounds=2)
    found = {one.name: one for one in report.tables}
    assert (found["a"].state, found["a"].unsettled) == ("unsettled", 1)
    assert found["m"].state == "equal"
    assert report.exit_code == 2


@pytest.mark.slow
def test_a_change_that_the_target_lost_meanwhile(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides have the same rows at P; what the server did after it is missing in the target."""
    run(moving.dsn, *CHANGES)
    original = ChangeVersion.add

    def add(self: ChangeVersion, changes: pa.RecordBatch) -> None:
        if "t" in self.columns:
            lost = [(row or {}).get("t") == "lost" for row in changes.column("after").to_pylist()]
            changes = changes.filter(pa.array([not one for one in lost]))
        original(self, changes)

    monkeypatch.setattr(ChangeVersion, "add", add)
    done = []

    def progress(told: VerifyProgress) -> None:
        if told.doing == "waiting for the target" and not done:
            done.append(told)
            run(moving.dsn, "UPDATE a SET t = 'lost' WHERE id = 30")
            time.sleep(1.0)

    report = moving.verify(progress=progress)
    found = {one.name: one for one in report.tables}["a"]
    assert (found.state, found.looked_again) == ("different", 1)
    assert found.differences[0].columns == {"t": ("lost", "t30")}


@pytest.mark.slow
def test_a_stream_that_does_not_get_on(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers that it is where it was, as often as it is asked; that is no progress."""
    run(moving.dsn, *CHANGES)
    changes = Moment.changes

    def of_later(self: Moment, tables: Any, until: int, timeout: float) -> Any:
        return changes(self, tables, max(until, self.lsn) + (1 << 30), 1)

    monkeypatch.setattr(Moment, "changes", of_later)
    monkeypatch.setattr(Moment, "check", lambda self, position: None)
    with expect_error(code="timed_out"):
        moving.verify()


def test_a_truncate_at_this_moment(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    run(moving.dsn, *CHANGES)
    make_slot = ReplicationConnection.make_slot

    def make_and_truncate(*arguments: Any, **options: Any) -> Any:
        made = make_slot(*arguments, **options)
        run(moving.dsn, "TRUNCATE m")
        return made

    monkeypatch.setattr(ReplicationConnection, "make_slot", make_and_truncate)
    report = moving.verify()
    found = {one.name: one for one in report.tables}
    assert (found["m"].state, found["a"].state) == ("unsettled", "equal")
    assert "public.m was truncated or rewritten" in found["m"].why
    assert report.exit_code == 2
