"""The history of types and tables, while types are altered under a capture of a real server."""

from __future__ import annotations

import collections
import json
import threading
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from support.changelogs.read_changes import batches_of, changes_of
from support.expected_errors import expect_error
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.changelog import schema_history as kept
from pgoutput_fast.changelog.history import History
from pgoutput_fast.cli import main
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.replication import capture, ddl_trigger_sql
from pgoutput_fast.replication import history as reading
from pgoutput_fast.replication import upkeep as keeping
from pgoutput_fast.replication.snapshot import ServerSnapshot

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_TICK", 0.05)
    monkeypatch.setattr(reading, "_ASKED_INTERVAL", 0.05)
    monkeypatch.setattr(reading, "_CONFIRM_INTERVAL", 0.05)


class Shop:
    """A database whose types are altered, and a capture of it; `rows` is what the server has said.

    Rows are inserted one by one, and asked for as JSON at once, in the form of their time.
    """

    def __init__(self, database: Any, directory: Path) -> None:
        self.database, self.directory = database, directory
        self.rows: dict[int, Any] = {}
        self.table = "t"
        self.threads: list[tuple[threading.Thread, threading.Event, list[BaseException]]] = []
        database.execute(
            "CREATE TYPE pair AS (x int, y text)",
            "CREATE TYPE mood AS ENUM ('sad', 'ok')",
            "CREATE TABLE t (id int PRIMARY KEY, p pair, ps pair[], m mood)",
            "CREATE PUBLICATION p FOR TABLE t",
        )

    def capture(self, **options: Any) -> None:
        options = {"create_slot": True, "max_delay": 0.02, "merge": False, **options}
        capture(
            self.database.dsn, slot=f"slot_{self.database.name}", publications=["p"],
            directory=self.directory, **options,
        )  # fmt: skip

    def start(self, **options: Any) -> None:
        stop, errors = threading.Event(), []

        def run() -> None:
            try:
                self.capture(stop=stop, **options)
            except BaseException as error:  # noqa: BLE001 - `stop` raises it
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append((thread, stop, errors))
        wait_until(lambda: errors or any(self.database.slots().values()))

    def stop(self) -> None:
        thread, stop, errors = self.threads.pop()
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        for error in errors:
            raise error

    def now(self) -> int:
        ((lsn,),) = self.database.execute("SELECT pg_current_wal_insert_lsn()::text")
        return pf.parse_lsn(lsn)

    def insert(self, *columns: str) -> None:
        """Insert a row of SQL expressions, and note it as the server shows it."""
        number = len(self.rows) + 1
        (row,) = self.database.execute(
            f"INSERT INTO t VALUES ({', '.join([str(number), *columns])})",
            f"SELECT row_to_json(t)::text FROM t WHERE id = {number}",
        )
        self.rows[number] = json.loads(row[0])

    def confirmed(self) -> None:
        """Wait until the history has been seen to hold behind all that there is now."""
        lsn = self.now()
        self.insert_nothing()
        wait_until(lambda: until(self.directory) >= lsn)

    def altered(self, *statements: str) -> None:
        """Alter types, and wait for the entry."""
        count = len(kept.entries(self.directory))
        self.database.execute(*statements)
        self.insert_nothing()
        wait_until(lambda: len(kept.entries(self.directory)) > count)

    def insert_nothing(self) -> None:
        """A change that makes the capture look at the catalogue."""
        self.database.execute(
            f"INSERT INTO {self.table} VALUES (-1)", f"DELETE FROM {self.table} WHERE id = -1"
        )

    def copied(self) -> None:
        """Wait until the tables are copied."""
        tables = self.directory / "tables"
        wait_until(lambda: list(tables.glob("*-snapshot-*.json")))

    def decoded(self, *ops: str, **options: Any) -> dict[int, Any]:
        """The rows of changes of these kinds, by default of inserts."""
        found = changes_of(self.directory, **options)
        rows = (one["after"] for one in found if one["op"] in (ops or ("insert",)))
        return {
            row["id"]: {name: row[name] for name in ("id", "p", "ps", "m") if name in row}
            for row in rows
            if row["id"] > 0
        }


def until(directory: Path) -> int:
    return kept.confirmed(kept.read_seen(directory).marks)


@pytest.fixture
def shop(database18: Any, tmp_path: Path) -> Any:
    made = Shop(database18, tmp_path / "segments")
    yield made
    for thread, stop, _ in made.threads:
        stop.set()
        thread.join(30)


def test_a_type_is_altered_between_two_captures(shop: Shop, tmp_path: Path) -> None:
    shop.insert("(1, 'a')", "ARRAY[(2, 'b')::pair]", "'sad'")
    shop.capture(snapshot="initial", until_lsn=shop.now())
    ops = ("read", "insert")
    assert shop.decoded(*ops) == shop.rows
    shop.database.execute("ALTER TYPE pair ADD ATTRIBUTE z int")
    shop.capture(until_lsn=shop.now())
    shop.insert("(2, 'b', 3)", "ARRAY[(2, 'd', 4)::pair]", "'ok'")
    shop.capture(until_lsn=shop.now())
    for policy in ("error", "older", "newer"):
        assert shop.decoded(*ops, history=policy) == shop.rows


def test_the_event_trigger_makes_what_follows_a_snapshot_exact(shop: Shop, tmp_path: Path) -> None:
    shop.database.execute(ddl_trigger_sql())
    shop.insert("(1, 'a')", "NULL", "'sad'")
    shop.capture(snapshot="initial", until_lsn=shop.now(), messages=True)
    shop.insert("(2, 'b')", "NULL", "'ok'")
    shop.database.execute("ALTER TYPE pair RENAME ATTRIBUTE y TO w")
    shop.insert("(3, 'c')", "NULL", "'ok'")
    for _ in range(2):  # the second one goes up to where the catalogue was read
        shop.capture(until_lsn=shop.now(), messages=True)
    assert shop.decoded("read", "insert") == shop.rows


def test_a_snapshot_is_certain_though_nothing_is_read_behind_it(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The types of its rows are kept with it."""
    shop.insert("(1, 'a')", "ARRAY[(2, 'b')::pair]", "'sad'")
    with monkeypatch.context() as patched:
        patched.setattr(reading.HistoryWatch, "_look", lambda _: None)
        shop.capture(snapshot="initial", until_lsn=shop.now())
    shop.insert("(2, 'b')", "NULL", "'ok'")
    shop.database.execute("ALTER TYPE pair RENAME ATTRIBUTE y TO w")
    shop.insert("(3, 'c')", "NULL", "'ok'")
    assert shop.decoded("read") == {1: shop.rows[1]}
    shop.capture(until_lsn=shop.now())
    # What came behind it may be of either form.
    with expect_error(code="schema_unknown"):
        shop.decoded()
    newer = shop.decoded("read", "insert", history="newer")
    assert newer == shop.rows | {2: shop.rows[2] | {"p": {"x": 2, "w": "b"}}}


def test_a_value_tells_that_a_type_was_altered_before(shop: Shop, tmp_path: Path) -> None:
    shop.insert("(1, 'a')", "NULL", "'sad'")
    shop.capture(snapshot="initial", until_lsn=shop.now(), binary=True)
    shop.insert("(2, 'b')", "ARRAY[(2, 'b')::pair]", "'ok'")
    shop.database.execute("ALTER TYPE pair ADD ATTRIBUTE z int")
    shop.insert("(3, 'c', 3)", "NULL", "'ok'")
    shop.insert("NULL", "ARRAY[(4, 'd', 4)::pair]", "'ok'")
    shop.capture(until_lsn=shop.now(), binary=True)
    for policy in ("error", "older", "newer"):
        found = shop.decoded("read", "insert", history=policy)
        assert found == shop.rows


def test_a_capture_that_is_killed_has_confirmed_the_snapshot(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.insert("(1, 'a')", "NULL", "'sad'")
    shop.start(snapshot="initial")
    shop.copied()
    (table,) = (shop.directory / "tables").glob("*-snapshot-*.json")
    point = int(table.stem.rpartition("-")[2], 16)
    wait_until(lambda: until(shop.directory) >= point)
    monkeypatch.setattr(reading.HistoryWatch, "finish", lambda _: None)
    shop.stop()
    assert shop.decoded("read") == shop.rows


def test_a_table_has_the_same_types_whatever_comes_first(shop: Shop, tmp_path: Path) -> None:
    """A Truncate, with which a snapshot begins, has no values; an empty table has nothing else."""
    shop.database.execute(
        "CREATE TYPE span AS RANGE (SUBTYPE = int)",
        "CREATE TABLE spans (id int PRIMARY KEY, p pair, ps pair[], r span)",
        "CREATE TABLE nothing (id int PRIMARY KEY, p pair, ps pair[], r span)",
        "ALTER PUBLICATION p ADD TABLE spans, nothing",
        "INSERT INTO spans VALUES (1, (1, 'a'), NULL, '[1,2]')",
    )
    shop.insert("(1, 'a')", "NULL", "'sad'")
    pair = pa.struct({"x": pa.int32(), "y": pa.string()})

    def check(counts: dict[str, int]) -> None:
        found: collections.Counter[str] = collections.Counter()
        types = set()
        for relation, batch in batches_of(shop.directory):
            found[relation.name] += batch.num_rows
            row = batch.schema.field("after").type
            types.add((relation.name, row))
            assert row.field("p").type == pair
            assert row.field("ps").type.value_type == pair
            assert relation.name == "t" or pa.types.is_struct(row.field("r").type)
        assert (found, len(types)) == (counts, len(counts))

    shop.capture(snapshot="initial", until_lsn=shop.now())
    check({"t": 2, "spans": 2, "nothing": 1})
    shop.database.execute("TRUNCATE spans, nothing")
    shop.capture(until_lsn=shop.now())
    check({"t": 2, "spans": 3, "nothing": 2})
    shop.database.execute("INSERT INTO nothing VALUES (1, (1, 'a'), NULL, '[1,2]')")
    shop.capture(until_lsn=shop.now())
    check({"t": 2, "spans": 3, "nothing": 3})


def test_types_are_altered_under_a_capture(shop: Shop, tmp_path: Path) -> None:
    shop.start()
    shop.insert("(1, 'a')", "ARRAY[(2, 'b')::pair]", "'sad'")
    shop.confirmed()
    shop.altered("ALTER TYPE mood ADD VALUE 'happy' AFTER 'ok'")
    shop.insert("(1, 'a')", "ARRAY[(2, 'b')::pair]", "'happy'")
    shop.confirmed()
    shop.altered("ALTER TYPE pair ADD ATTRIBUTE z int")
    shop.insert("(1, 'c', 3)", "ARRAY[(2, 'd', 4)::pair]", "'ok'")
    shop.confirmed()
    shop.altered("ALTER TYPE pair RENAME ATTRIBUTE y TO w")
    shop.insert("(1, 'c', 3)", "ARRAY[(2, 'd', 4)::pair]", "'ok'")
    shop.confirmed()
    shop.altered(
        "ALTER TABLE t DROP COLUMN p, DROP COLUMN ps",
        "DROP TYPE pair",
        "CREATE TYPE pair AS (q bool)",
        "ALTER TABLE t ADD COLUMN p pair, ADD COLUMN ps pair[]",
    )
    shop.insert("'sad'", "ROW(true)", "ARRAY[ROW(false)::pair]")
    shop.confirmed()
    before, shop.table = shop.now(), "u"
    shop.altered("ALTER TABLE t RENAME TO u")
    shop.confirmed()
    shop.stop()
    assert shop.decoded() == shop.rows
    history = History(shop.directory)
    ((relation_id,),) = shop.database.execute("SELECT 'u'::regclass::oid::bigint")
    names = [
        history.tables_at(lsn).catalog.by_id()[relation_id].name for lsn in (before - 1, shop.now())
    ]
    assert names == ["t", "u"]


def test_values_while_the_stream_is_behind(shop: Shop, tmp_path: Path) -> None:
    """All reads come before an alteration, or all after it: only the policy says which form."""
    shop.start()
    shop.insert("(1, 'a')", "NULL", "'sad'")
    shop.confirmed()
    shop.stop()
    shop.insert("(2, 'b')", "NULL", "'ok'")
    shop.database.execute("ALTER TYPE pair RENAME ATTRIBUTE y TO w")
    shop.insert("(3, 'c')", "NULL", "'ok'")
    shop.database.execute("CREATE TABLE other (id int)")  # is no matter of t's values
    shop.capture(until_lsn=shop.now())
    choices = [Argument("history", "newer"), Argument("history", "older")]
    with expect_error(parameter="history", options=choices):
        shop.decoded()
    newer = shop.decoded(history="newer")
    older = shop.decoded(history="older")
    assert newer == shop.rows | {2: shop.rows[2] | {"p": {"x": 2, "w": "b"}}}
    assert older == shop.rows | {3: shop.rows[3] | {"p": {"x": 3, "y": "c"}}}
    # Columns whose types were not altered are read.
    found = shop.decoded(columns=["id", "m"])
    assert found == {number: {"id": number, "m": row["m"]} for number, row in shop.rows.items()}
    assert shop.decoded(registry=pf.TypeRegistry())[3]["p"] == "(3,c)"


def test_values_behind_the_last_read(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop.capture(until_lsn=shop.now())

    def refuse(*_: object) -> None:
        raise PgOutputError("no")

    shop.insert("NULL", "NULL", "'ok'")
    shop.insert("(1, 'a')", "NULL", "'sad'")
    with monkeypatch.context() as patched:
        patched.setattr(reading, "_read", refuse)
        shop.capture(until_lsn=shop.now())
    assert caplog.messages.count("the schema history is not up to date: no") == 1
    with expect_error(parameter="history", options=[Argument("history", "newer")]):
        shop.decoded()
    assert shop.decoded(history="newer") == shop.rows
    target = ["--target", str(shop.directory), "--publication", "p"]
    assert main(["verify", "--dsn", shop.database.dsn, *target]) == 0
    shop.capture(until_lsn=shop.now())
    assert shop.decoded() == shop.rows


@pytest.mark.slow
def test_the_event_trigger_makes_it_exact(shop: Shop, tmp_path: Path) -> None:
    shop.database.execute(ddl_trigger_sql())
    shop.database.execute(ddl_trigger_sql())  # it may be run again
    shop.start(messages=True)
    shop.insert("(1, 'a')", "NULL", "'sad'")
    shop.confirmed()
    shop.stop()
    with shop.database.connect() as long:
        long.execute("BEGIN")
        long.execute("INSERT INTO t VALUES (100, (100, 'long'))")
        shop.insert("(2, 'b')", "NULL", "'ok'")
        shop.database.execute("CREATE TABLE other (id int)")
        shop.database.execute("ALTER TYPE pair RENAME ATTRIBUTE y TO w")
        long.execute("INSERT INTO t VALUES (101, (101, 'long'))")
        long.execute("COMMIT")
    shop.insert("(3, 'c')", "NULL", "'ok'")
    shop.database.execute("DROP TABLE other")
    # A transaction that alters the type itself, between two rows.
    with shop.database.connect() as own:
        own.execute("BEGIN")
        own.execute("INSERT INTO t VALUES (200, (200, 'own'))")
        own.execute("CREATE TYPE pear AS (a int)")
        own.execute("ALTER TABLE t ADD q pear")
        own.execute("INSERT INTO t VALUES (201, (201, 'own'), NULL, NULL, ROW(5))")
        own.execute("COMMIT")
    shop.capture(until_lsn=shop.now(), messages=True)
    end = shop.now()  # the server may write more of its own meanwhile
    shop.capture(until_lsn=end, messages=True)  # up to where the catalogue was read
    found = shop.decoded()
    assert {number: found[number] for number in shop.rows} == shop.rows
    assert {number: found[number]["p"] for number in (100, 101, 200, 201)} == {
        100: {"x": 100, "y": "long"},
        101: {"x": 101, "w": "long"},
        200: {"x": 200, "w": "own"},
        201: {"x": 201, "w": "own"},
    }
    assert History(shop.directory).registry_at(end - 1).uncertain == {}
    # Without the messages nothing is exact.
    shop.capture(until_lsn=shop.now())
    with expect_error(code="schema_unknown"):
        shop.decoded()


def test_inspect_takes_the_types_by_itself(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.start(snapshot="initial")
    shop.copied()
    shop.insert("(1, 'a')", "NULL", "'sad'")
    shop.confirmed()
    shop.altered("ALTER TYPE pair ADD ATTRIBUTE z int")
    shop.insert("(1, 'c', 3)", "ARRAY[(2, 'd', 4)::pair]", "'ok'")
    shop.confirmed()
    shop.stop()
    printed = ["inspect", str(shop.directory), "--json", "--values", "typed", "--tag", "I"]
    assert main(printed) == 0
    rows = [json.loads(line)["new"] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row["id"] > 0] == list(shop.rows.values())
    assert shop.decoded() == shop.rows


def test_a_type_is_altered_while_its_table_is_copied(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop.insert("(1, 'a')", "ARRAY[(2, 'b')::pair]", "'sad'")
    alter = ["ALTER TYPE pair ADD ATTRIBUTE z int", "ALTER TYPE mood ADD VALUE 'happy'"]
    copy = ServerSnapshot.copy

    def altered(snapshot: ServerSnapshot, *arguments: Any) -> None:
        if alter:
            shop.database.execute(alter.pop(0))
        copy(snapshot, *arguments)

    monkeypatch.setattr(ServerSnapshot, "copy", altered)
    shop.start(snapshot="initial")
    shop.copied()
    shop.confirmed()
    shop.stop()
    assert [one for one in caplog.messages if "needs a new snapshot" in one] == [
        "table public.t needs a new snapshot: one of its types was altered while it was copied"
    ]
    rows = shop.database.execute("SELECT row_to_json(t)::text FROM t")
    expected = {1: json.loads(rows[0][0])}
    assert expected[1]["p"] == {"x": 1, "y": "a", "z": None}
    assert shop.decoded("read") == expected


@pytest.mark.parametrize(
    ("made", "value"),
    [("AS (x int)", "ROW(1)"), ("AS ENUM ('sad')", "'sad'")],
    ids=["composite", "enum"],
)
def test_a_table_and_its_type_are_dropped_while_the_catalogue_is_read(
    database18: Any, monkeypatch: pytest.MonkeyPatch, made: str, value: str
) -> None:
    database18.execute(
        f"CREATE TYPE kind {made}",
        "CREATE TABLE kept (id int PRIMARY KEY)",
        "CREATE TABLE gone (id int PRIMARY KEY)",
        f"ALTER TABLE gone ADD k kind DEFAULT {value}",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    read = reading.catalog_of
    seen: list[Any] = []

    def dropped(connection: Any, publications: Any) -> Any:
        if not seen:  # the snapshot has been taken
            database18.execute("DROP TABLE gone", "DROP TYPE kind")
        seen.append(None)
        seen[-1] = read(connection, publications)
        return seen[-1]

    monkeypatch.setattr(reading, "catalog_of", dropped)
    found = reading.read_state(ConnectionParameters(database18.dsn, {}), ["p"])
    assert [one is None for one in seen] == [True, False]
    assert [table["name"] for table in json.loads(found.tables)["tables"]] == ["kept"]


def test_a_catalogue_that_is_broken_is_told(
    database18: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database18.execute("CREATE PUBLICATION p FOR ALL TABLES")
    refused = psycopg.errors.InternalError_("cache lookup failed for type 5")
    tries = []

    def fail(_connection: Any, _publications: Any) -> Any:
        tries.append(1)
        raise refused

    monkeypatch.setattr(reading, "catalog_of", fail)
    with expect_error(code="server_refused", sqlstate="XX000"):
        reading.read_state(ConnectionParameters(database18.dsn, {}), ["p"])
    assert len(tries) == 3
