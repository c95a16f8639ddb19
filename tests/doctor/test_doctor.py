"""`pgoutput-fast doctor` and `pgoutput_fast.doctor`: each finding, and that its SQL mends it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import conninfo
from support.expected_errors import expect_error
from support.postgres.servers import find_server, standby
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.cli import main
from pgoutput_fast.doctor import KINDS, _check_server, _check_slots, examine
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import ReplicationConnection, connect, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgoutput_fast.doctor import DoctorReport, Finding

pytestmark = pytest.mark.server

REFUSED = (psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.InvalidColumnReference)
"""Updates that the server refuses, without a replica identity or by columns outside of it."""
SETTINGS = {"log_min_messages": "fatal"}
VERSIONS = range(10, 19)

# A schema, a role and tables whose names need quotes.
S = '"S.""x"'
T = f'{S}."T ""1"'
U = f'{S}."u.2"'
R = '"R ""x"'


def programs(newest: bool) -> Path:
    """The programs of the newest or the oldest version that is found."""
    for version in sorted(VERSIONS, reverse=newest):
        with contextlib.suppress(pf.PgOutputError):
            return find_server(version)
    pytest.fail("no server is found")


# The oldest takes part in test_settings in any case.
@pytest.fixture(scope="module", params=[pytest.param("oldest", marks=pytest.mark.slow), "newest"])
def running(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(settings=SETTINGS, bindir=programs(request.param == "newest")) as server:
        yield server


@pytest.fixture(scope="module")
def newest() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(settings=SETTINGS, bindir=programs(True), tcp=True) as server:
        yield server


def run(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements one by one on a connection; the rows of the last one."""
    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


CLEAN = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT pubname FROM pg_publication LOOP
        EXECUTE format('DROP PUBLICATION %I', name);
    END LOOP;
END $$
"""


def cleaned(server: EmbeddedServer) -> str:
    """The DSN of the server's database, with an empty schema S."""
    run(
        server.dsn(),
        CLEAN,
        f"DROP SCHEMA IF EXISTS {S} CASCADE",
        f"CREATE SCHEMA {S}",
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots",
    )
    return server.dsn()


@pytest.fixture
def dsn(running: EmbeddedServer) -> str:
    return cleaned(running)


@pytest.fixture
def dsn18(newest: EmbeddedServer) -> str:
    return cleaned(newest)


def found(report: DoctorReport, kind: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.id == kind]


def the(report: DoctorReport, kind: str) -> Finding:
    (finding,) = found(report, kind)
    return finding


def mended(dsn: str, kind: str, as_role: str | None = None, **given: Any) -> Finding:
    """The one finding of a kind; its SQL was run, and it is gone."""
    asked = as_role or dsn
    finding = the(examine(asked, **given), kind)
    assert finding.sql
    run(dsn, *finding.sql)
    # A server takes some time to read its configuration again.
    wait_until(lambda: not found(examine(asked, **given), kind))
    return finding


def configured(dsn: str, **settings: str) -> None:
    """Change settings of the server, and wait until sessions have them."""
    changes = [f"ALTER SYSTEM SET {name} = '{value}'" for name, value in settings.items()]
    run(dsn, *changes, "SELECT pg_reload_conf()")
    for name, value in settings.items():
        wait_until(lambda name=name, value=value: run(dsn, f"SHOW {name}") == [(value,)])


@dataclasses.dataclass(frozen=True)
class Case:
    """What is wrong with tables, and what the server refuses while it is so."""

    id: str
    setup: tuple[str, ...]
    objects: tuple[str, ...]
    publications: tuple[str, ...] | None = None
    refused: str | None = None  # a statement that the server refuses until it is mended
    since: int = 10
    until: int = 99
    sql: str | None = None  # the first statement


KEYED = f'CREATE TABLE {T} (id int PRIMARY KEY, a int, "B c" text)'
UNKEYED = f"CREATE TABLE {T} (id int, a int)"
PUBLISHED = f'CREATE PUBLICATION "P ""q" FOR TABLE {T}'
UPDATE = f"UPDATE {T} SET a = 1"
TREE = (
    f"CREATE TABLE {T} (id int PRIMARY KEY, a int) PARTITION BY RANGE (id)",
    f"CREATE TABLE {U} PARTITION OF {T} FOR VALUES FROM (0) TO (9)",
    f"INSERT INTO {T} VALUES (1, 0)",
)
FULL = f"ALTER TABLE {T} REPLICA IDENTITY FULL"
VIA_ROOT = "WITH (publish_via_partition_root = true)"
GENERATED_KEY = (
    f"CREATE TABLE {T} (id int, a int GENERATED ALWAYS AS (id) STORED PRIMARY KEY, b int)"
)

CASES = [
    Case("no-publication", (KEYED,), ("changes",)),
    Case("no-publication", (), ("changes",), sql='CREATE PUBLICATION "changes" FOR ALL TABLES;'),
    Case("publication-missing", (KEYED,), ('P "q',), publications=('P "q',)),
    Case("publication-empty", (KEYED, 'CREATE PUBLICATION "P.q"'), ('"P.q"',)),
    Case(
        "publication-actions",
        (KEYED, PUBLISHED, 'ALTER PUBLICATION "P ""q" SET (publish = \'insert\')'),
        ('"P ""q"',),
    ),
    Case(
        "partitions-as-leaves",
        (*TREE, PUBLISHED),
        ('"P ""q"',),
        since=13,
    ),
    Case(
        "via-root-mixed",
        (*TREE, PUBLISHED, f"CREATE PUBLICATION r FOR TABLE {T} {VIA_ROOT}"),
        (U,),
        publications=('P "q', "r"),
        since=13,
        sql='ALTER PUBLICATION "P ""q" SET (publish_via_partition_root = true);',
    ),
    Case(
        "column-lists-differ",
        (
            KEYED,
            f'CREATE PUBLICATION "P ""q" FOR TABLE {T} (id, a) WHERE (a > 5)',
            f"CREATE PUBLICATION r FOR TABLE {T}",
        ),
        (T,),
        publications=('P "q', "r"),
        since=15,
        sql="BEGIN;",
    ),
    Case(
        "identity-nothing",
        (KEYED, PUBLISHED, f"ALTER TABLE {T} REPLICA IDENTITY NOTHING"),
        (T,),
        refused=UPDATE,
        sql=f"ALTER TABLE ONLY {T} REPLICA IDENTITY DEFAULT;",
    ),
    Case("identity-missing", (UNKEYED, PUBLISHED), (T,), refused=UPDATE),
    Case(
        "identity-missing",
        (
            f"CREATE TABLE {T} (id int NOT NULL, a int)",
            # Neither a partial index nor one of a column that may be null will do.
            f"CREATE UNIQUE INDEX a1 ON {T} (id) WHERE id > 0",
            f"CREATE UNIQUE INDEX a2 ON {T} (a)",
            f'CREATE UNIQUE INDEX "by ""id" ON {T} (id)',
            PUBLISHED,
        ),
        (T,),
        refused=UPDATE,
        sql=f'ALTER TABLE ONLY {T} REPLICA IDENTITY USING INDEX "by ""id";',
    ),
    Case(
        "identity-missing",  # as a deferrable key is none
        (f"CREATE TABLE {T} (id int PRIMARY KEY DEFERRABLE, a int)", PUBLISHED),
        (T,),
        refused=UPDATE,
    ),
    Case(
        "identity-missing",  # as the index is gone
        (
            f"CREATE TABLE {T} (id int NOT NULL, a int)",
            f"CREATE UNIQUE INDEX gone ON {T} (id)",
            f"ALTER TABLE {T} REPLICA IDENTITY USING INDEX gone",
            f"DROP INDEX {S}.gone",
            PUBLISHED,
        ),
        (T,),
        refused=UPDATE,
    ),
    Case(
        "identity-missing",  # of a partition, by the publication of its root
        (
            f"CREATE TABLE {T} (id int, a int) PARTITION BY RANGE (id)",
            f"CREATE TABLE {U} PARTITION OF {T} FOR VALUES FROM (0) TO (9)",
            f"CREATE PUBLICATION r FOR TABLE {T} {VIA_ROOT}",
        ),
        (U,),
        refused=f"UPDATE {T} SET a = 1",
        since=13,
    ),
    Case("identity-full", (KEYED, FULL, PUBLISHED), (T,)),
    Case(
        "identity-generated",
        (
            GENERATED_KEY,
            PUBLISHED,
        ),
        (T,),
        since=12,
        until=17,
    ),
    Case(
        "identity-generated",
        (
            GENERATED_KEY,
            PUBLISHED,
        ),
        (T,),
        refused=f"UPDATE {T} SET b = 1",
        since=18,
    ),
    Case(
        "identity-generated",
        (
            f"CREATE TABLE {T} (id int PRIMARY KEY, a int GENERATED ALWAYS AS (id) VIRTUAL, b int)",
            FULL,
            PUBLISHED,
        ),
        (T,),
        refused=f"UPDATE {T} SET b = 1",
        since=18,
        sql=f"ALTER TABLE ONLY {T} REPLICA IDENTITY DEFAULT;",
    ),
    Case(
        "generated-columns",
        (
            f"CREATE TABLE {T} (id int PRIMARY KEY, a int GENERATED ALWAYS AS (id * 2) STORED)",
            PUBLISHED,
        ),
        (T,),
        since=18,
    ),
    Case(
        "partition-identity",
        (*TREE, f"CREATE PUBLICATION r FOR TABLE {T} {VIA_ROOT}", FULL),
        (U,),
        since=13,
        sql=f"ALTER TABLE ONLY {T} REPLICA IDENTITY DEFAULT;",
    ),
    Case(
        "partition-identity",
        (
            f"CREATE TABLE {T} (id int, a int) PARTITION BY RANGE (id)",
            f"CREATE TABLE {U} PARTITION OF {T} FOR VALUES FROM (0) TO (9)",
            f"CREATE PUBLICATION r FOR TABLE {T} {VIA_ROOT}",
            FULL,
        ),
        (U,),
        since=13,
        sql=f"ALTER TABLE ONLY {U} REPLICA IDENTITY FULL;",
    ),
    Case(
        "table-unlogged",
        (f"CREATE UNLOGGED TABLE {T} (id int PRIMARY KEY)", "CREATE PUBLICATION r FOR ALL TABLES"),
        (T,),
    ),
    Case(
        "table-unlogged",
        (
            f"CREATE UNLOGGED TABLE {T} (id int PRIMARY KEY)",
            f"CREATE PUBLICATION r FOR TABLES IN SCHEMA {S}",
        ),
        (T,),
        since=15,
    ),
    Case(
        "column-list-identity",
        (KEYED, f'CREATE PUBLICATION "P ""q" FOR TABLE {T} ("B c", a) WHERE (id > 5)'),
        (T,),
        refused=UPDATE,
        since=15,
    ),
    Case(
        "column-list-identity",
        (KEYED, FULL, f'CREATE PUBLICATION "P ""q" FOR TABLE {T} (id, a, "B c")'),
        (T,),
        refused=UPDATE,
        since=15,
    ),
    Case(
        "column-list-identity",
        (*TREE, f"CREATE PUBLICATION r FOR TABLE {T} (a) {VIA_ROOT}"),
        (U,),
        refused=UPDATE,
        since=15,
    ),
    Case(
        "row-filter-identity",
        (KEYED, f'CREATE PUBLICATION "P ""q" FOR TABLE {T} WHERE ("B c" > \'x\' AND id > 5)'),
        (T,),
        refused=UPDATE,
        since=15,
    ),
    Case(
        "row-filter-identity",  # of which the server takes no account, but for this
        (KEYED, f"CREATE PUBLICATION r FOR TABLE {T} WHERE (a > 5), TABLES IN SCHEMA {S}"),
        (T,),
        refused=UPDATE,
        since=15,
    ),
]


def test_a_typo_in_the_name_of_a_publication(running: EmbeddedServer) -> None:
    """The finding first names the publications that exist."""
    dsn = cleaned(running)
    run(dsn, KEYED, f"CREATE PUBLICATION shop FOR TABLE {T}")
    finding = the(examine(dsn, publications=["shpo"]), "publication-missing")
    assert finding.found.startswith("there is no publication shpo in database ")
    assert finding.found.endswith(", which has shop")
    assert (finding.advice or "").startswith(
        "give an existing name. Did you mean shop? To make a new publication, list the tables"
    )


@pytest.mark.everyday("publication-missing", "identity-missing0", "identity-generated0")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sql_mends(running: EmbeddedServer, case: Case) -> None:
    if not case.since <= running.version <= case.until:
        pytest.skip(f"PostgreSQL {case.since} to {case.until}")
    dsn = cleaned(running)
    run(dsn, *case.setup)
    if case.refused is not None:
        run(dsn, f"INSERT INTO {T} (id) VALUES (7)")
        with pytest.raises(REFUSED):
            run(dsn, case.refused)
    finding = mended(dsn, case.id, publications=case.publications)
    assert finding.objects == case.objects
    if case.sql is not None:
        assert finding.sql[0] == case.sql
    if case.refused is not None:
        run(dsn, case.refused)


@pytest.mark.slow
def test_other_entries_of_a_publication_stay(dsn18: str) -> None:
    run(
        dsn18,
        KEYED,
        f"CREATE TABLE {U} (id int PRIMARY KEY)",
        f'CREATE PUBLICATION "P ""q" FOR TABLE {U}, {T} (a, "B c") WHERE (id > 5)',
    )
    mended(dsn18, "column-list-identity")
    assert run(
        dsn18, "SELECT tablename, attnames, rowfilter FROM pg_publication_tables ORDER BY 1"
    ) == [('T "1', ["id", "a", "B c"], "(id > 5)"), ("u.2", ["id"], None)]


@pytest.mark.parametrize(
    ("kind", "since", "setup", "said"),
    [
        ("protocol", 10, (), "has pgoutput's protocol version"),
        (
            "publication-all-tables", 10, ("CREATE PUBLICATION r FOR ALL TABLES",),
            "publication r is FOR ALL TABLES",
        ),
        (
            "identity-full-without-key", 10, (UNKEYED, FULL, PUBLISHED),
            '1 table with REPLICA IDENTITY FULL and no primary key: S."x.T "1',
        ),
        (
            "numeric-without-precision", 10,
            (f"CREATE TABLE {T} (id int PRIMARY KEY, n numeric, m numeric(9,2))",
             f"INSERT INTO {T} VALUES (1, 123456.789, 1), (2, 'NaN', 1), (3, NULL, 1)", PUBLISHED),
            "1 table with numeric columns without precision",
        ),
        (
            "identity-index", 10,
            (
                f"CREATE TABLE {T} (id int NOT NULL)", f"CREATE UNIQUE INDEX own ON {T} (id)",
                f"ALTER TABLE {T} REPLICA IDENTITY USING INDEX own", PUBLISHED,
            ),
            '1 table with REPLICA IDENTITY USING INDEX: S."x.T "1',
        ),
        (
            "toast-unchanged", 10,
            (KEYED, f"CREATE TABLE {U} (id int PRIMARY KEY)", f"{PUBLISHED}, {U}"),
            '1 table may have values that are stored out of line: S."x.T "1',
        ),
        (
            "partition-foreign", 13,
            (
                *TREE, "DROP FOREIGN DATA WRAPPER IF EXISTS w CASCADE",
                "CREATE FOREIGN DATA WRAPPER w", "CREATE SERVER elsewhere FOREIGN DATA WRAPPER w",
                f"ALTER TABLE {T} DROP CONSTRAINT \"T \"\"1_pkey\"",
                f"CREATE FOREIGN TABLE {S}.f PARTITION OF {T} DEFAULT SERVER elsewhere", PUBLISHED,
            ),
            '1 foreign table in publications: S."x.f',
        ),
        (
            "generated-columns", 12,
            (
                f"CREATE TABLE {T} (id int PRIMARY KEY, a int GENERATED ALWAYS AS (id) STORED)",
                PUBLISHED,
            ),
            '1 table with stored generated columns: S."x.T "1',
        ),
        (
            "virtual-columns", 18,
            (
                f"CREATE TABLE {T} (id int PRIMARY KEY, a int GENERATED ALWAYS AS (id) VIRTUAL)",
                PUBLISHED,
            ),
            '1 table with virtual generated columns: S."x.T "1',
        ),
        (
            "column-list", 15, (KEYED, f"CREATE PUBLICATION r FOR TABLE {T} (id, a)"),
            '1 table with column lists: S."x.T "1 in publication r (2 of 3 columns)',
        ),
        (
            "row-filter", 15,
            (KEYED, f"CREATE PUBLICATION r FOR TABLE {T} WHERE (id > 5 AND id < 9)"),
            '1 table with row filters on columns: S."x.T "1 in publication r (id)',
        ),
    ],
)  # fmt: skip
def test_what_sql_does_not_mend(
    running: EmbeddedServer, kind: str, since: int, setup: tuple[str, ...], said: str
) -> None:
    if running.version < since:
        pytest.skip(f"needs PostgreSQL {since}")
    dsn = cleaned(running)
    run(dsn, *setup)
    assert said in the(examine(dsn), kind).found


def test_a_good_server_has_no_error_and_no_warning(dsn: str) -> None:
    run(dsn, f"CREATE TABLE {T} (id int PRIMARY KEY)", PUBLISHED)
    report = examine(dsn, ['P "q'])
    assert report.ready
    assert {one.id for one in report.findings} == {"protocol", "wal-keep-unlimited"}
    assert (report.database, report.role, report.publications) == (
        "postgres",
        "postgres",
        ('P "q',),
    )


def test_temporary_table(dsn: str) -> None:
    run(dsn, "CREATE PUBLICATION r FOR ALL TABLES")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TEMPORARY TABLE passing (id int)")
        assert "1 temporary table" in the(examine(dsn), "table-temporary").found


def test_publications_of_different_streams_are_not_compared(dsn18: str) -> None:
    run(
        dsn18, KEYED, f"CREATE PUBLICATION a FOR TABLE {T} (id)",
        f"CREATE PUBLICATION b FOR TABLE {T}",
    )  # fmt: skip
    assert found(examine(dsn18), "column-lists-differ") == []
    # Nor is the list of one that does not send the table, as another sends its root.
    run(
        dsn18,
        f"CREATE TABLE {S}.root (id int PRIMARY KEY, a int) PARTITION BY RANGE (id)",
        f"CREATE TABLE {S}.leaf PARTITION OF {S}.root FOR VALUES FROM (0) TO (9)",
        f"CREATE PUBLICATION c FOR TABLE {S}.root {VIA_ROOT}",
        f"CREATE PUBLICATION d FOR TABLE {S}.leaf (id)",
    )
    report = examine(dsn18, ["c", "d"])
    assert found(report, "column-lists-differ") == []
    finding = mended(dsn18, "via-root-mixed", publications=["c", "d"])
    assert finding.objects == (f'{S}."leaf"',)
    assert finding.sql == (f'ALTER PUBLICATION "d" DROP TABLE ONLY {S}."leaf";',)
    # One with all columns is as good as none.
    run(dsn18, f'ALTER PUBLICATION a SET TABLE {T} (id, a, "B c")')
    assert found(examine(dsn18, ["a", "b"]), "column-lists-differ") == []


def test_partitions_that_come_by_themselves(dsn18: str) -> None:
    """The identity of a root that is not sent is nobody's concern."""
    run(dsn18, *TREE, PUBLISHED, FULL)
    report = examine(dsn18)
    assert found(report, "partition-identity") == []
    assert the(report, "partitions-as-leaves").objects == ('"P ""q"',)


def test_publication_of_inserts(dsn18: str) -> None:
    """It needs no replica identity, and its row filters and column lists are free."""
    run(
        dsn18,
        KEYED,
        f"CREATE TABLE {U} (id int)",
        f"CREATE PUBLICATION r FOR TABLE {U}, {T} (a) WHERE (a > 5) WITH (publish = 'insert')",
    )
    run(dsn18, UPDATE, f"UPDATE {U} SET id = 1")
    assert examine(dsn18).of_level("error") == ()


def test_publication_of_tables_that_suit(dsn18: str) -> None:
    """Proposed are tables with a key that is a replica identity, and roots, not partitions."""
    run(
        dsn18,
        *TREE,
        f"CREATE TABLE {S}.keyed (id int PRIMARY KEY)",
        f"CREATE TABLE {S}.deferred (id int PRIMARY KEY DEFERRABLE)",
        f"CREATE TABLE {S}.unkeyed (id int)",
        f"CREATE UNLOGGED TABLE {S}.unlogged (id int PRIMARY KEY)",
    )
    assert mended(dsn18, "no-publication").sql == (
        f'CREATE PUBLICATION "changes" FOR TABLE {T}, {S}."keyed";',
    )
    assert examine(dsn18).ready


def test_no_table_with_a_key(dsn: str) -> None:
    """A publication of it would break its updates."""
    run(dsn, f"CREATE TABLE {S}.unkeyed (id int)")
    assert the(examine(dsn), "no-publication").sql == ()


def test_row_filter_that_a_terminal_would_obey(dsn18: str) -> None:
    run(dsn18, KEYED, f"CREATE PUBLICATION r FOR TABLE {T} (a) WHERE (\"B c\" > '\x1b[31m')")
    assert the(examine(dsn18), "column-list-identity").sql == ()


def test_many_tables(dsn: str) -> None:
    """All have their statement, the text has the first names."""
    run(
        dsn,
        f"DO $$ BEGIN FOR i IN 1..60 LOOP EXECUTE"
        f" format('CREATE TABLE {S}.%I (id int)', 'T ' || i); END LOOP; END $$",
        "CREATE PUBLICATION r FOR ALL TABLES",
    )
    finding = mended(dsn, "identity-missing")
    assert len(finding.sql) == len(finding.objects) == 60
    assert finding.found.endswith("and 52 more")
    run(dsn, CLEAN, f'ALTER TABLE {S}."T 1" ADD PRIMARY KEY (id)')
    assert the(examine(dsn), "no-publication").sql == (
        f'CREATE PUBLICATION "changes" FOR TABLE {S}."T 1";',
    )


# The server's settings.


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_settings(which: str) -> None:
    with EmbeddedServer(
        settings={**SETTINGS, "wal_level": "minimal", "max_wal_senders": 0},
        bindir=programs(which == "newest"),
    ) as server:
        dsn = server.dsn()
        since13 = ("max_slot_wal_keep_size = '64MB'", "logical_decoding_work_mem = '64kB'")
        run(
            dsn,
            "ALTER SYSTEM SET max_replication_slots = 0",
            "ALTER SYSTEM SET wal_sender_timeout = '5s'",
            *(f"ALTER SYSTEM SET {one}" for one in since13 if server.version >= 13),
            "ALTER SYSTEM SET idle_replication_slot_timeout = '1min'"
            if server.version >= 18
            else "SELECT",
        )
        server.restart()
        expected = {
            "wal-level": "wal_level is minimal",
            "wal-senders-exhausted": "max_wal_senders is 0, and 0 walsenders are in use",
            "slots-exhausted": "max_replication_slots is 0, and 0 slots are in use",
            "wal-sender-timeout-short": "wal_sender_timeout is 5000 ms",
        }
        if server.version >= 13:
            expected["wal-keep-small"] = "max_slot_wal_keep_size is 64.0 MiB"
            expected["decoding-memory-small"] = "logical_decoding_work_mem is 64.0 KiB"
        if server.version >= 18:
            expected["idle-slot-timeout"] = "idle_replication_slot_timeout is 60 s"
        report = examine(dsn)
        assert {kind: the(report, kind).found for kind in expected} == expected
        assert found(report, "replication-connection") == []
        run(dsn, *(statement for kind in expected for statement in the(report, kind).sql))
        server.restart()
        left = {one.id for one in examine(dsn).findings}
        assert left == {"protocol", "no-publication"} | (
            {"wal-keep-unlimited"} if server.version < 13 else set()
        )
        run(
            dsn,
            "ALTER SYSTEM SET max_wal_senders = 1",
            "ALTER SYSTEM SET max_replication_slots = 1",
            "ALTER SYSTEM SET wal_sender_timeout = 0",
        )
        server.restart()
        few = {"wal-senders-few", "slots-few", "wal-sender-timeout-off"}
        run(dsn, "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')")
        assert the(examine(dsn), "slots-exhausted").found == (
            "max_replication_slots is 1, and 1 slot is in use"
        )
        report = examine(dsn, slot="mine")
        assert not {"slots-exhausted", "slots-few"} & {one.id for one in report.findings}
        run(dsn, "SELECT pg_drop_replication_slot('mine')")
        report = examine(dsn)
        assert few <= {one.id for one in report.findings}
        run(dsn, *(statement for kind in few for statement in the(report, kind).sql))
        server.restart()
        assert not few & {one.id for one in examine(dsn).findings}


@pytest.mark.parametrize(
    "setting",
    [
        "ALTER ROLE postgres SET wal_sender_timeout = '2s'",
        "ALTER DATABASE postgres SET wal_sender_timeout = '2s'",
        "ALTER ROLE postgres IN DATABASE postgres SET wal_sender_timeout = '2s'",
        "ALTER ROLE ALL SET wal_sender_timeout = '2s'",
        "ALTER SYSTEM SET wal_sender_timeout = '2s'",
    ],
)
def test_a_setting_is_changed_where_it_was_set(dsn18: str, setting: str) -> None:
    try:
        run(dsn18, setting, "SELECT pg_reload_conf()")
        wait_until(lambda: run(dsn18, "SHOW wal_sender_timeout") == [("2s",)])
        finding = mended(dsn18, "wal-sender-timeout-short")
        assert finding.sql[0].replace('"', "").startswith(setting.partition("= ")[0])
    finally:
        run(
            dsn18,
            *(
                f"{place} RESET wal_sender_timeout"
                for place in (
                    "ALTER ROLE postgres", "ALTER DATABASE postgres", "ALTER ROLE ALL",
                    "ALTER ROLE postgres IN DATABASE postgres", "ALTER SYSTEM",
                )
            ),
            "SELECT pg_reload_conf()",
        )  # fmt: skip


def test_a_setting_of_the_connection_string(dsn18: str) -> None:
    given = conninfo.make_conninfo(
        dsn18, options="-c wal_sender_timeout=2s -c statement_timeout=9s"
    )
    report = examine(given)
    assert the(report, "wal-sender-timeout-short").sql == ()
    finding = the(report, "session-timeout")
    assert (finding.sql, finding.found) == ((), "statement_timeout of role postgres is 9 s")
    assert "connection string" in (finding.advice or "")


# The role.


@pytest.fixture
def as_role(dsn: str) -> Iterator[str]:
    """The DSN for a role without any right."""
    gone = (
        f"DO $$ BEGIN IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'R \"x') THEN "
        f"EXECUTE 'DROP OWNED BY {R}'; EXECUTE 'DROP ROLE {R}'; END IF; END $$"
    )
    run(dsn, gone, f"CREATE ROLE {R} LOGIN")
    yield conninfo.make_conninfo(dsn, user='R "x')
    run(dsn, gone)


def test_privileges(dsn: str, as_role: str) -> None:
    run(dsn, KEYED, PUBLISHED)
    assert mended(dsn, "role-replication", as_role).sql == (f"ALTER ROLE {R} REPLICATION;",)
    assert mended(dsn, "schema-usage", as_role).objects == (S,)
    assert mended(dsn, "select-privilege", as_role).objects == (T,)
    run(as_role, f"SELECT * FROM {T}")
    assert 'role R "x is no superuser' in the(examine(as_role), "ddl-history").found
    assert examine(as_role).ready


def test_privileges_on_partitions_and_their_root(
    running: EmbeddedServer, dsn: str, as_role: str
) -> None:
    if running.version < 13:
        pytest.skip("PostgreSQL 13 and later")
    usage = f"GRANT USAGE ON SCHEMA {S} TO {R}"
    run(dsn, *TREE, f"CREATE PUBLICATION r FOR TABLE {T} {VIA_ROOT}", usage)
    run(dsn, f"ALTER ROLE {R} REPLICATION")
    assert the(examine(as_role), "select-privilege").objects == (T, U)
    run(dsn, f"GRANT SELECT ON {U} TO {R}")
    # A snapshot locks the root, for which the server asks for the same right.
    with expect_error(code="no_rights"):
        snapshot(as_role, ["r"])
    assert mended(dsn, "select-privilege", as_role).objects == (T,)
    with snapshot(as_role, ["r"]) as batches:
        assert sum(len(batch) for batch in batches) == 2  # a truncate, and the row
    run(dsn, f"REVOKE SELECT ON {U} FROM {R}")
    assert mended(dsn, "select-privilege", as_role).objects == (U,)
    # A root without partitions is published too.
    run(dsn, f"DROP TABLE {U}", f"REVOKE SELECT ON {T} FROM {R}")
    assert mended(dsn, "select-privilege", as_role).objects == (T,)


def test_row_security(dsn: str, as_role: str) -> None:
    run(
        dsn, KEYED, PUBLISHED, f"GRANT USAGE ON SCHEMA {S} TO {R}", f"GRANT SELECT ON {T} TO {R}",
        f"INSERT INTO {T} VALUES (1)", f"ALTER TABLE {T} ENABLE ROW LEVEL SECURITY",
    )  # fmt: skip
    assert run(as_role, f"SELECT id FROM {T}") == []
    assert mended(dsn, "row-security", as_role).objects == (T,)
    assert run(as_role, f"SELECT id FROM {T}") == [(1,)]


def test_role_of_a_managed_server(dsn: str, as_role: str) -> None:
    """Where such a role is, its members stream without the attribute: the connection shows it."""
    run(dsn, "DROP ROLE IF EXISTS rds_replication", "CREATE ROLE rds_replication")
    try:
        assert the(examine(as_role), "role-replication").sql == (
            f'GRANT "rds_replication" TO {R};',
        )
    finally:
        run(dsn, "DROP ROLE rds_replication")


def test_role_that_cannot_publish(dsn: str, as_role: str) -> None:
    mended(dsn, "no-create-privilege", as_role)
    run(as_role, 'CREATE PUBLICATION "own"')


@pytest.mark.parametrize(
    ("name", "since"),
    [
        ("statement_timeout", 10),
        ("idle_in_transaction_session_timeout", 10),
        ("idle_session_timeout", 14),
        ("transaction_timeout", 17),
    ],
)
def test_timeouts_of_the_role(
    running: EmbeddedServer, dsn: str, as_role: str, name: str, since: int
) -> None:
    if running.version < since:
        pytest.skip(f"needs PostgreSQL {since}")
    run(dsn, f"ALTER ROLE {R} SET {name} = '90min'")
    finding = mended(dsn, "session-timeout", as_role)
    assert finding.found == f'{name} of role R "x is 1 h 30 min'
    assert run(as_role, f"SHOW {name}") == [("0",)]


def test_connection_that_the_server_refuses(dsn18: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pg_hba.conf may do; the finding has the server's words."""
    run(dsn18, KEYED, PUBLISHED)

    def refuse(parameters: object) -> None:
        raise pf.PgOutputError("can't connect: no pg_hba.conf entry")

    monkeypatch.setattr("pgoutput_fast.doctor._check_access.ReplicationConnection", refuse)
    finding = the(examine(dsn18), "replication-connection")
    assert finding.found == "can't connect: no pg_hba.conf entry"


def test_catalogues_that_the_role_may_not_read(dsn: str, as_role: str) -> None:
    run(dsn, KEYED, PUBLISHED, "REVOKE SELECT ON pg_publication_rel FROM PUBLIC")
    try:
        finding = the(examine(as_role), "could-not-check")
        assert "could not check publications: permission denied" in finding.found
        run(dsn, "REVOKE SELECT ON pg_replication_slots FROM PUBLIC")
        assert len(found(examine(as_role), "could-not-check")) == 3
    finally:
        run(
            dsn,
            "GRANT SELECT ON pg_publication_rel TO PUBLIC",
            "GRANT SELECT ON pg_replication_slots TO PUBLIC",
        )


# Transactions.


def test_transactions_that_hold_up_a_slot(
    dsn: str, as_role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(dsn, f"CREATE TABLE {T} (id int PRIMARY KEY)", PUBLISHED)
    with psycopg.connect(dsn) as writer:
        writer.execute(f"INSERT INTO {T} VALUES (1)".encode())
        assert found(examine(dsn), "long-transaction") == []
        monkeypatch.setattr(_check_server, "LONG_TRANSACTION", 0)
        # The role does not see how long it is.
        finding = mended(dsn, "could-not-check", as_role)
        assert finding.sql == (f"GRANT pg_read_all_stats TO {R};",)
        finding = mended(dsn, "long-transaction")
        assert finding.objects == (str(writer.info.backend_pid),)
        writer.close()
    with psycopg.connect(dsn) as preparing:
        preparing.execute(f"INSERT INTO {T} VALUES (2)".encode())
        preparing.execute("PREPARE TRANSACTION 'it''s \\ \"1'")
        preparing.commit()
    finding = mended(dsn, "prepared-transaction")
    assert finding.objects == ("it's \\ \"1",)
    assert run(dsn, f"SELECT count(*) FROM {T}") == [(0,)]


def test_prepared_transaction_of_another_database(
    dsn18: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_check_server, "LONG_TRANSACTION", 0)
    run(dsn18, "DROP DATABASE IF EXISTS other", "CREATE DATABASE other")
    other = conninfo.make_conninfo(dsn18, dbname="other")
    run(other, "CREATE TABLE t (id int)")
    with psycopg.connect(other) as preparing:
        preparing.execute("INSERT INTO t VALUES (1)")
        preparing.execute("PREPARE TRANSACTION 'there'")
        preparing.commit()
    finding = the(examine(dsn18), "prepared-transaction")
    assert finding.sql == ()
    assert "in database other" in finding.found
    run(other, "ROLLBACK PREPARED 'there'")


# Slots.


def test_slots(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(
        dsn,
        KEYED,
        PUBLISHED,
        "SELECT pg_create_physical_replication_slot('physical', true)",
        "SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')",
    )
    finding = the(examine(dsn, slot="mine"), "slot-missing")
    # A slot that is there already is refused by those that would make it.
    assert (finding.objects, finding.sql) == (("mine",), ())
    assert "--adopt-slot" in finding.advice
    run(dsn, "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')")
    assert found(examine(dsn, slot="mine"), "slot-missing") == []
    report = examine(dsn, slot="mine")
    assert the(report, "slot-inactive").objects == ("forgotten",)
    told = dict(run(
        dsn,
        "SELECT slot_name::text, to_jsonb(s) ->> 'inactive_since' FROM pg_replication_slots AS s",
    ))  # fmt: skip
    for kind, name, of in (
        ("slot-inactive", "forgotten", " of database postgres"),
        ("physical-slot-inactive", "physical", ""),
    ):
        # Servers before 17 do not tell since when; it may have been read a moment ago.
        since = told[name]
        reader = "has no reader now" if since is None else f"has had no reader since {since}"
        shown = re.escape(f"slot {name}{of} {reader}, and keeps ")
        assert re.fullmatch(f"{shown}.* of the server's log", the(report, kind).found)
    assert the(report, "physical-slot-inactive").objects == ("physical",)
    assert "a physical slot" in the(examine(dsn, slot="physical"), "slot-not-pgoutput").found
    monkeypatch.setattr(_check_slots, "MUCH_LOG", 0)
    assert {one.objects for one in found(examine(dsn, slot="mine"), "slot-behind")} == {
        ("forgotten",), ("mine",), ("physical",),
    }  # fmt: skip
    mended(dsn, "slot-inactive", slot="mine")
    mended(dsn, "physical-slot-inactive", slot="mine")
    with connect(dsn, slot="mine", publications=['P "q'], protocol=1) as stream:
        ((pid,),) = run(dsn, "SELECT active_pid FROM pg_replication_slots")
        finding = the(examine(dsn, slot="mine"), "slot-in-use")
        assert finding.found == f"process {pid} reads slot mine"
        assert stream.connection.database == "postgres"


def test_slots_of_other_kinds(dsn18: str) -> None:
    with ReplicationConnection(dsn18) as server:
        server.make_slot("marked", two_phase=True)
    report = examine(dsn18, slot="marked")
    assert the(report, "slot-two-phase").objects == ("marked",)
    run(dsn18, "DROP DATABASE IF EXISTS other", "CREATE DATABASE other")
    other = conninfo.make_conninfo(dsn18, dbname="other")
    finding = the(examine(other, slot="marked"), "slot-of-other-database")
    assert finding.found == "slot marked belongs to database postgres, not to other"


def test_log_that_slots_keep(dsn18: str) -> None:
    write = [statement for _ in range(4) for statement in (
        "SELECT pg_logical_emit_message(false, '', '')", "SELECT pg_switch_wal()",
    )]  # fmt: skip
    run(
        dsn18,
        "CREATE PUBLICATION r",
        "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')",
        "SELECT pg_create_logical_replication_slot('other', 'pgoutput')",
    )
    try:
        configured(dsn18, max_slot_wal_keep_size="80MB")
        run(dsn18, *write)
        report = examine(dsn18, slot="mine")
        assert {one.objects for one in found(report, "slot-near-limit")} == {("mine",), ("other",)}
        run(dsn18, *write, *write)
        report = examine(dsn18, slot="mine")
        kept = found(report, "slot-nearly-lost")
        assert {one.objects for one in kept} == {("mine",), ("other",)}
        run(dsn18, *kept[0].sql)
        wait_until(lambda: not found(examine(dsn18, slot="mine"), "slot-nearly-lost"))
        assert found(examine(dsn18, slot="mine"), "slot-near-limit") == []
        configured(dsn18, max_slot_wal_keep_size="32MB")
        lost = "SELECT 1 FROM pg_replication_slots WHERE wal_status = 'lost'"
        wait_until(lambda: len(run(dsn18, "CHECKPOINT", lost)) == 2)
        finding = mended(dsn18, "other-slot-invalidated", slot="mine")
        assert finding.objects == ("other",)
        finding = the(examine(dsn18, slot="mine"), "slot-invalidated")
        assert re.fullmatch(
            "slot mine is invalidated: (wal_removed|its log is gone)", finding.found
        )
        mended(dsn18, "slot-invalidated")
    finally:
        run(dsn18, "ALTER SYSTEM RESET ALL", "SELECT pg_reload_conf()")


def test_spilled_transactions(dsn18: str) -> None:
    run(
        dsn18,
        KEYED,
        PUBLISHED,
        "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')",
        f"INSERT INTO {T} SELECT n, n FROM generate_series(1, 2000) AS n",
    )
    try:
        configured(dsn18, logical_decoding_work_mem="64kB")
        run(
            dsn18,
            "SELECT count(*) FROM pg_logical_slot_get_binary_changes('mine', NULL, NULL,"
            " 'proto_version', '1', 'publication_names', '\"P \"\"q\"')",
        )
        spilled = "SELECT 1 FROM pg_stat_replication_slots WHERE spill_bytes > 65536"
        wait_until(lambda: run(dsn18, spilled))
        assert "of 1 transaction" in mended(dsn18, "slot-spills").found
        assert found(examine(dsn18), "decoding-memory-small") == []
    finally:
        run(dsn18, "ALTER SYSTEM RESET ALL", "SELECT pg_reload_conf()")


# Standbys, encodings, versions.


@pytest.mark.slow
def test_standby() -> None:
    bindir = find_server(18)
    with EmbeddedServer(settings=SETTINGS, bindir=bindir) as primary:
        make = "SELECT pg_create_logical_replication_slot('copy', 'pgoutput', false, false, true)"
        run(primary.dsn(), make)
        changed = {"hot_standby_feedback": "off", "sync_replication_slots": "on"}
        to = f"{primary.dsn()} application_name=standby"
        with standby(primary, bindir, primary_conninfo=to, **changed) as other:
            report = examine(other.dsn())
            assert the(report, "standby").found == "the server is a standby"
            assert found(report, "standby-without-slot") == []
            mended(other.dsn(), "standby-feedback-off")
            copied = "SELECT 1 FROM pg_replication_slots WHERE synced AND NOT temporary"

            def is_copied() -> bool:
                # The primary's slot must not be behind what the standby still has.
                advance = "SELECT pg_replication_slot_advance('copy', pg_current_wal_lsn())"
                run(primary.dsn(), "SELECT pg_log_standby_snapshot()", advance)
                return bool(run(other.dsn(), copied))

            wait_until(is_copied)
            assert the(examine(other.dsn(), slot="copy"), "slot-synced").objects == ("copy",)


@pytest.mark.slow
def test_standby_without_slot() -> None:
    bindir = find_server(18)
    with (
        EmbeddedServer(settings=SETTINGS, bindir=bindir) as primary,
        standby(primary, bindir, primary_slot_name="") as other,
    ):
        receiving = "SELECT 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'"
        wait_until(lambda: run(other.dsn(), receiving))
        assert the(examine(other.dsn()), "standby-without-slot").sql == ()


@pytest.mark.slow
def test_standby_that_is_too_old() -> None:
    bindir = None
    for version in (13, 14, 15):
        with contextlib.suppress(pf.PgOutputError):
            bindir = find_server(version)
    if bindir is None:
        pytest.skip("needs PostgreSQL 13, 14 or 15")
    with (
        EmbeddedServer(settings=SETTINGS, bindir=bindir) as primary,
        standby(primary, bindir) as other,
    ):
        finding = the(examine(other.dsn()), "standby-too-old")
        assert finding.found == f"the server is a standby of PostgreSQL {primary.version}"


def test_database_of_names_that_are_no_text(dsn18: str) -> None:
    run(
        dsn18,
        "DROP DATABASE IF EXISTS bytes",
        "CREATE DATABASE bytes ENCODING 'SQL_ASCII' TEMPLATE template0",
    )
    odd = conninfo.make_conninfo(dsn18, dbname="bytes")
    with psycopg.connect(odd, autocommit=True) as connection:
        connection.execute(b'CREATE TABLE "\xff" (id int)')
        connection.execute(b"CREATE PUBLICATION r FOR ALL TABLES")
    report = examine(odd)
    assert "SQL_ASCII" in the(report, "encoding-sql-ascii").found
    assert "invalid byte sequence" in the(report, "could-not-check").found


def test_names_that_a_terminal_would_obey(dsn18: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(dsn18, 'CREATE TABLE "a\x1b[31m\n\\""b" (id int)', "CREATE PUBLICATION r FOR ALL TABLES")
    try:
        assert main(["doctor", "--dsn", dsn18]) == 1
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert "public.a\\x1b[31m\\n" in printed
        assert 'U&"a\\001B[31m\\000A\\\\""b"' in printed
        mended(dsn18, "identity-missing")
    finally:
        run(dsn18, 'DROP TABLE "a\x1b[31m\n\\""b"')


def test_versions_with_faults(dsn18: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(dsn18, KEYED, f"CREATE PUBLICATION r FOR TABLE {T} (id, a)")
    monkeypatch.setattr(psycopg.ConnectionInfo, "server_version", 150001)
    assert "PostgreSQL 15.1" in the(examine(dsn18), "column-lists-broken").found
    monkeypatch.setattr(psycopg.ConnectionInfo, "server_version", 90624)
    report = examine(dsn18)
    assert [one.found for one in report.findings] == ["the server is PostgreSQL 9.6"]
    assert report.findings[0].id == "server-too-old"
    assert not report.ready


# The command.


def test_command(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(dsn, UNKEYED, PUBLISHED)
    assert main(["doctor", "--dsn", dsn, "--publication", 'P "q']) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"PostgreSQL [\d.]+, database postgres, role postgres: 1 error, 0 warnings, \d notes",
        lines[0],
    )
    at = lines.index("Errors")
    assert lines[at + 2].startswith("  identity-missing: 1 table without replica identity")
    assert lines[at + 3].strip() == KINDS["identity-missing"].meaning
    assert f"        ALTER TABLE ONLY {T} REPLICA IDENTITY FULL;" in lines
    run(dsn, f"ALTER TABLE {T} REPLICA IDENTITY FULL")
    assert main(["doctor", "--dsn", dsn]) == 0
    assert main(["doctor", "--dsn", dsn, "--strict"]) == 1
    assert "identity-full-without-key" in capsys.readouterr().out


def test_command_json(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(dsn, UNKEYED, PUBLISHED, "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')")
    assert main(["doctor", "--dsn", dsn, "--json", "--slot", "mine"]) == 1
    told = json.loads(capsys.readouterr().out)
    findings = told.pop("findings")
    assert told == {
        "format_version": 1,
        "server_version": int(run(dsn, "SHOW server_version_num")[0][0]),
        "database": "postgres",
        "role": "postgres",
        "publications": ['P "q'],
        "slot": "mine",
        "ready": False,
    }
    assert findings[0] == {
        "id": "identity-missing",
        "level": "error",
        "found": "1 table without replica identity, as they lack a primary key, published with "
        'UPDATE or DELETE: S."x.T "1',
        "meaning": KINDS["identity-missing"].meaning,
        "objects": [T],
        "sql": [f"ALTER TABLE ONLY {T} REPLICA IDENTITY FULL;"],
        "advice": "better add a primary key: with FULL, each change writes the whole old row",
    }


def test_wrong_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 2
    assert "--dsn-file" in capsys.readouterr().err
    assert main(["doctor", "--dsn", "host=x", "password=geheim"]) == 2
    assert main(["doctor", "--dsn", "host=x", "--slot", "No slot"]) == 2
    assert main(["doctor", "--dsn", "host=x", "--publication", "p", "--publication", ""]) == 2
    errors = capsys.readouterr().err
    assert errors.count("[bad_option]") == 2
    assert "'--publication'" in errors
    assert main(["doctor", "--dsn", "host=x password=geheim dbname"]) == 1
    assert "geheim" not in "".join(capsys.readouterr())


def test_password_never_shows(
    newest: EmbeddedServer, dsn18: str, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    dsn = newest.dsn(tcp=True)
    password = str(conninfo.conninfo_to_dict(dsn)["password"])
    run(dsn, "CREATE PUBLICATION r")
    assert main(["doctor", "--dsn", dsn]) == 0
    assert main(["doctor", "--dsn", dsn, "--json"]) == 0
    wrong = conninfo.make_conninfo(dsn, password=f"{password}!")
    assert main(["doctor", "--dsn", wrong]) == 1
    assert main(["doctor", "--dsn", conninfo.make_conninfo(dsn, port="1")]) == 1
    printed = "".join(capsys.readouterr())
    assert "password authentication failed" in printed
    assert password not in printed + caplog.text + repr(examine(dsn))


@pytest.mark.slow
def test_each_finding_is_tested() -> None:
    text = Path(__file__).read_text()
    assert [name for name in KINDS if f'"{name}"' not in text] == []
