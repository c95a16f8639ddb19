"""What publications publish, by everybody who asks, while others have the tables locked.

The truth is pg_publication_tables, which is asked when the locks are gone, as it would wait for
them.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutput_fast.catalog import Catalog
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.doctor import examine
from pgoutput_fast.doctor._examined import Examined
from pgoutput_fast.doctor._published_tables import ExaminedPublications
from pgoutput_fast.publications import Publications, read_unidentified
from pgoutput_fast.replication import ReplicationConnection, membership
from pgoutput_fast.replication.history import read_state
from pgoutput_fast.replication.membership import read_members, warn_of_publications
from pgoutput_fast.verify import moment
from pgoutput_fast.verify.moment import Moment, ServerTable

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.server]

SCHEMA = (
    "CREATE SCHEMA more",
    "CREATE TABLE plain (id int PRIMARY KEY, v text, hidden text)",
    "CREATE TABLE computed (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
    "CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE middle PARTITION OF root FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id)",
    "CREATE TABLE leaf_a PARTITION OF middle FOR VALUES FROM (0) TO (5)",
    "CREATE TABLE more.leaf_b (v text, gone int, id int NOT NULL)",
    "ALTER TABLE more.leaf_b DROP gone",
    "ALTER TABLE root ATTACH PARTITION more.leaf_b FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE empty (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "CREATE TABLE more.one (id int PRIMARY KEY, v text)",
    "CREATE UNLOGGED TABLE more.unlogged (id int PRIMARY KEY)",
    "CREATE TABLE left_out (id int PRIMARY KEY)",
)
LOCKED = "plain, computed, root, empty, more.one, more.unlogged, left_out"

PUBLICATIONS = {
    "lists": """FOR TABLE plain (v, id) WHERE (id % 2 = 0 AND v > 'a'), root (id), computed
        WITH (publish_via_partition_root)""",
    "leaves": "FOR TABLE root, leaf_a WHERE (id > 3), empty",
    "every": "FOR ALL TABLES",
    "every_root": "FOR ALL TABLES WITH (publish_via_partition_root)",
    "schema": """FOR TABLES IN SCHEMA more, TABLE middle, more.one WHERE (id > 1)
        WITH (publish_via_partition_root)""",
    "schema_leaves": "FOR TABLES IN SCHEMA more, TABLE middle",
    "inserts": "FOR TABLE plain, root WHERE (id > 1) WITH (publish = 'insert', "
    "publish_via_partition_root)",
    "one": "FOR TABLE plain (id, v) WHERE (id = 1)",
    "two": "FOR TABLE plain (id, v) WHERE (id = 2)",
    "nothing": "",
}
FROM_18 = {
    "generated": "FOR ALL TABLES WITH (publish_generated_columns = stored)",
    "generated_list": "FOR TABLE computed (id, twice)",
}
CASES = [*([name] for name in (*PUBLICATIONS, *FROM_18)), ["one", "two"], ["one", "lists"]]

TRUTH = """
SELECT schemaname, tablename, attnames::text[], rowfilter
FROM pg_publication_tables WHERE pubname = ANY(%s) ORDER BY 1, 2, pubname
"""


Columns = dict[tuple[str, str], set[str]]


def by_doctor(parameters: ConnectionParameters, names: list[str]) -> tuple[Columns, set[str]]:
    """The columns of the published tables, and the names of the tables with row filters."""
    found: Columns = {}
    filtered = set()
    with parameters.open(replication=False) as connection:
        published = ExaminedPublications(Examined(connection, names, None))
        for one in published.publications:
            for leaf in published.sent(one):
                table = published.root(one, leaf) if one.via_root else leaf
                entry = published.entry(one, leaf)
                found[table.namespace, table.name] = {
                    column.name
                    for column in table.columns
                    if (
                        column.name in entry.columns
                        if entry.columns is not None
                        else column.generated == "" or one.generated == "s"
                    )
                }
                filtered |= {table.name} if entry.has_filter else set()
    return found, filtered


def by_verify(parameters: ConnectionParameters, names: list[str]) -> list[ServerTable]:
    with contextlib.closing(Moment(parameters, names, 30.0)) as found:
        return found.tables


def by_server(dsn: str, names: list[str]) -> tuple[Columns, dict[str, str]]:
    """The columns of the published tables, and the row filters of those that have one."""
    with psycopg.connect(dsn) as connection:
        rows: list[Any] = connection.execute(TRUTH, [names]).fetchall()
    filters: dict[str, list[str | None]] = {}
    for _, name, _, condition in rows:
        filters.setdefault(name, []).append(condition)
    return (
        {(row[0], row[1]): set(row[2]) for row in rows},
        {
            name: " OR ".join(f"({one})" for one in found)
            for name, found in filters.items()
            if None not in found
        },
    )


@contextlib.contextmanager
def locked(dsn: str, tables: str = LOCKED) -> Iterator[None]:
    """Hold the tables; give them up after a time, so that who waits for them fails and ends."""
    with psycopg.connect(dsn) as holder:
        holder.execute(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE".encode())
        waited = threading.Timer(20, holder.close)
        waited.start()
        try:
            yield
        finally:
            waited.cancel()
        assert not holder.closed, "somebody waited for the tables"


@pytest.fixture(scope="module", params=[16, 18], ids="pg{}".format)
def shop(request: pytest.FixtureRequest) -> Iterator[str]:
    server: Any = request.getfixturevalue(f"pg{request.param}")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE publishing")
    made = PUBLICATIONS | (FROM_18 if request.param >= 18 else {})
    with psycopg.connect(server.dsn("publishing"), autocommit=True) as connection:
        for statement in SCHEMA:
            connection.execute(statement.encode())
        for name, what in made.items():
            connection.execute(f"CREATE PUBLICATION {name} {what}".encode())
    yield server.dsn("publishing")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("DROP DATABASE publishing WITH (FORCE)")


@pytest.mark.slow
@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_nobody_waits_for_tables_that_are_locked(
    shop: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = ConnectionParameters(shop)
    columns, filters = by_server(shop, names)
    if not columns and names != ["nothing"]:
        pytest.skip("PostgreSQL 18 and later")
    with locked(shop):
        history = Catalog.from_json(read_state(parameters, names).tables)
        members = read_members(parameters, names)
        doctor, filtered = by_doctor(parameters, names)
    assert {(one.namespace, one.name) for one in history.tables} == set(columns)
    assert {(one.namespace, one.name) for one in members.tables.values()} == set(columns)
    doctor.pop(("public", "empty"), None)
    assert doctor == {name: those for name, those in columns.items() if name[1] != "empty"}
    if "schema" not in names:  # whose tables have filters that do not count
        assert filtered == set(filters)

    with contextlib.ExitStack() as held:
        make_slot = ReplicationConnection.make_slot

        def make_and_lock(*arguments: Any, **options: Any) -> Any:
            # A slot would wait for the transaction that has the locks.
            made = make_slot(*arguments, **options)
            held.enter_context(locked(shop))
            return made

        monkeypatch.setattr(moment, "_LOCK_TIMEOUT", 0.01)
        monkeypatch.setattr(ReplicationConnection, "make_slot", make_and_lock)
        found = by_verify(parameters, names)
    assert {(one.table.namespace, one.table.name): set(one.columns) for one in found} == columns
    assert all(one.is_moving for one in found)


@pytest.mark.parametrize("names", [["lists"], ["leaves"], ["one", "two"], ["schema"]], ids="+".join)
def test_row_filters_that_verify_reads(shop: str, names: list[str]) -> None:
    found = by_verify(ConnectionParameters(shop), names)
    filters = by_server(shop, names)[1]
    assert {one.table.name: one.row_filter for one in found if one.row_filter} == filters
    assert (filters == {}) == (names == ["schema"])


def test_the_doctor_shows_no_sql_with_a_row_filter_that_is_locked(shop: str) -> None:
    with psycopg.connect(shop, autocommit=True) as connection:
        connection.execute("CREATE TABLE keyed (id int PRIMARY KEY, v text)")
        connection.execute("CREATE PUBLICATION short FOR TABLE keyed (v) WHERE (id > 3)")
    try:
        found = []
        for held in (locked(shop, "keyed"), contextlib.nullcontext()):
            with held:
                report = examine(shop, ["short"])
            (one,) = (one for one in report.findings if one.id == "column-list-identity")
            found.append(one.sql)
        assert found[0] == ()
        assert 'ADD TABLE ONLY "public"."keyed" ("id", "v") WHERE ((id > 3));' in found[1][2]
    finally:
        with psycopg.connect(shop, autocommit=True) as connection:
            connection.execute("DROP TABLE keyed")
            connection.execute("DROP PUBLICATION short")


def test_what_is_published_in_part(shop: str) -> None:
    found = {
        one.table.name: one.refused for one in by_verify(ConnectionParameters(shop), ["inserts"])
    }
    why = "its updates and deletes and truncates are not published, so no target can have its rows"
    assert found == {"plain": why, "root": why}


KEYS = {
    "none": "id int, v int",
    "primary": "id int PRIMARY KEY, v int",
    "deferrable": "id int PRIMARY KEY DEFERRABLE, v int",
    "unique": 'id int NOT NULL, v int, CONSTRAINT "{}""u" UNIQUE (id)',
    "nullable": "id int UNIQUE, v int",
}
PUBLISHED = {"every": "", "deletes": "delete", "updates": "insert, update", "inserts": "insert"}


def refused(connection: psycopg.Connection[Any], table: str) -> bool:
    """Whether the server refuses to change rows of a table, of which it has none."""
    for statement in (f"UPDATE {table} SET v = 1", f"DELETE FROM {table}"):
        try:
            connection.execute(statement.encode())
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return True
    return False


@pytest.mark.parametrize("publish", PUBLISHED)
def test_it_is_warned_of_tables_whose_changes_are_refused(
    database18: Any, publish: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = []
    with database18.connect() as connection:
        for key, columns in KEYS.items():
            for identity in ("DEFAULT", "NOTHING", "FULL", "INDEX"):
                name = f"{key} {identity}"
                if identity == "INDEX" and key != "unique":
                    continue
                identity = f'USING INDEX "{name}""u"' if identity == "INDEX" else identity
                connection.execute(f'CREATE TABLE "{name}" ({columns.format(name)})'.encode())
                connection.execute(f'ALTER TABLE "{name}" REPLICA IDENTITY {identity}'.encode())
                names.append(f'"{name}"')
        connection.execute(b"CREATE TABLE root (id int PRIMARY KEY, v int) PARTITION BY LIST (id)")
        connection.execute(b"CREATE TABLE part PARTITION OF root DEFAULT")
        connection.execute(b"ALTER TABLE part REPLICA IDENTITY NOTHING")
        names.append('"part"')
        options = f" WITH (publish = '{PUBLISHED[publish]}')" if PUBLISHED[publish] else ""
        connection.execute(f"CREATE PUBLICATION p FOR ALL TABLES{options}".encode())
        expected = {name for name in names if refused(connection, name)}
        assert (len(expected) > 3) == (publish != "inserts")

        found = read_unidentified(connection, Publications(connection, ["p"]))
        assert {f'"{table.name}"' for table, _ in found} == expected
        given = ConnectionParameters(database18.dsn), ["p"]
        with caplog.at_level("WARNING", "pgoutput_fast"):
            warn_of_publications(*given)
        statements = re.findall("ALTER TABLE .*?;", caplog.text)
        assert len(statements) == min(len(expected), membership._SHOWN)
        while read_unidentified(connection, Publications(connection, ["p"])):
            caplog.clear()
            with caplog.at_level("WARNING", "pgoutput_fast"):
                warn_of_publications(*given)
            for statement in re.findall("ALTER TABLE .*?;", caplog.text):
                connection.execute(statement.encode())
        assert not any(refused(connection, name) for name in names)
        rows = connection.execute("SELECT relname, relreplident FROM pg_class").fetchall()
        identities = dict(rows)
        assert publish == "inserts" or identities["primary NOTHING"] == "d"
        assert publish == "inserts" or identities["unique NOTHING"] == "i"


def test_it_is_warned_of_publications_without_tables(
    database18: Any, caplog: pytest.LogCaptureFixture
) -> None:
    database18.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY LIST (id)",
        "CREATE UNLOGGED TABLE u (id int PRIMARY KEY)",
        "CREATE SCHEMA other",
        "CREATE PUBLICATION full1 FOR TABLE t",
        "CREATE PUBLICATION root1 FOR TABLE root WITH (publish_via_partition_root)",
        "CREATE PUBLICATION empty1",
        "CREATE PUBLICATION empty2 FOR TABLES IN SCHEMA other",
    )
    parameters = ConnectionParameters(database18.dsn)
    for names, empty in (
        (["full1", "root1"], []),
        (["full1", "empty1", "empty2"], ["empty1", "empty2"]),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", "pgoutput_fast"):
            assert warn_of_publications(parameters, names) == len(empty)
        assert [one.event for one in caplog.records] == ["no_tables"][: len(empty)]
        for name in empty:
            assert f"--publication {name}" in caplog.text
