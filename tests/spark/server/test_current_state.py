"""Current-state tables of tables that were altered, against what SELECT says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.errors import PySparkException

import pgoutput_fast as pf
from pgoutput_fast.catalog import Catalog, read_catalog
from pgoutput_fast.replication import capture

pytestmark = [
    pytest.mark.server, pytest.mark.spark, pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]  # fmt: skip

LOST = "the table also lost columns"
VALUE = "column c is new, and the catalogue does not say"
REWRITTEN = "the server may have converted existing values"


class Case(NamedTuple):
    """What is done to a table of its own, `t`, that has 20 rows.

    `said` is what the error says, None: the rows are the server's. With `change` a row comes
    behind the statements.
    """

    name: str
    statements: tuple[str, ...]
    said: str | None = None
    change: bool = True
    named: str | None = None
    """The table afterwards."""


def altered(name: str, statement: str, said: str | None) -> list[Case]:
    """With a change behind the statement, and without."""
    return [
        Case(name, (statement,), said), Case(f"{name}_last", (statement,), said, change=False)
    ]  # fmt: skip


CASES = [
    Case("renamed", ("ALTER TABLE t RENAME TO t_now",), named="renamed_now"),
    Case("anew", ("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, v text, n int, s text)")),
    Case(
        "swapped",
        ("ALTER TABLE t RENAME TO t_old", "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
         "UPDATE t_old SET n = 7"),
    ),
    *altered("int_text", "ALTER TABLE t ALTER n TYPE text USING n || '!'", REWRITTEN),
    Case("int_bigint", ("ALTER TABLE t ALTER n TYPE bigint USING n * 10",), REWRITTEN),
    Case("shorter", ("ALTER TABLE t ALTER v TYPE varchar(3) USING left(v, 3)",), REWRITTEN),
    Case("key", ("ALTER TABLE t ALTER id TYPE bigint USING id * 10",), REWRITTEN),
    Case("longer", ("ALTER TABLE t ALTER s TYPE varchar(9)",)),
    *altered("alike", "ALTER TABLE t ALTER s TYPE varchar(9) USING upper(s)", "server rewrote"),
    Case("to_text", ("ALTER TABLE t ALTER s TYPE text",), change=False),
    *altered("added", "ALTER TABLE t ADD c int DEFAULT 5", None),
    *altered("added_null", "ALTER TABLE t ADD c int", None),
    *altered("dropped", "ALTER TABLE t DROP v", None),
    Case("random", ("ALTER TABLE t ADD c float8 DEFAULT random()",), VALUE),
    Case("column_renamed", ("ALTER TABLE t RENAME n TO m",), "to be renamed"),
    Case("column_renamed_last", ("ALTER TABLE t RENAME n TO m",), change=False),
    Case(
        "names_swapped",
        ("ALTER TABLE t RENAME v TO x", "ALTER TABLE t RENAME s TO v",
         "ALTER TABLE t RENAME x TO s"), LOST, change=False,
    ),
    Case(
        "name_taken_over", ("ALTER TABLE t ADD w int DEFAULT 3", "ALTER TABLE t DROP n",
                            "ALTER TABLE t RENAME w TO n"), LOST, change=False,
    ),
    Case(
        "key_under_full",
        ("UPDATE t SET n = id", "ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET v = 'x'",
         "ALTER TABLE t DROP CONSTRAINT key_under_full_pkey, ADD PRIMARY KEY (n)"),
        r"the key changed from \(id\) to \(n\)", change=False,
    ),
    Case(
        "written_anew",
        ("ALTER TABLE t ADD c int DEFAULT 5", "VACUUM FULL t",
         "ALTER TABLE t ALTER c DROP DEFAULT"),
        VALUE,
    ),
    Case(
        "written_anew_last",
        ("ALTER TABLE t ADD c int DEFAULT 5", "VACUUM FULL t",
         "ALTER TABLE t ALTER c DROP DEFAULT"),
        VALUE, change=False,
    ),
    Case(
        "again",
        ("ALTER TABLE t ADD c int DEFAULT 5", "UPDATE t SET c = 6, n = 0 WHERE id < 5",
         "ALTER TABLE t DROP c", "DELETE FROM t WHERE id = 4",
         "ALTER TABLE t ADD c int DEFAULT 8", "UPDATE t SET n = 9 WHERE id < 4"),
        "another column may have had its name",
    ),
    Case("letters", ('ALTER TABLE t ADD "V" text DEFAULT \'x\', ADD "ID" int',
                  'UPDATE t SET "ID" = -id, id = id + 100 WHERE id > 10')),
    Case(
        "other_key",
        ("UPDATE t SET n = id", "ALTER TABLE t DROP CONSTRAINT other_key_pkey, ADD PRIMARY KEY (n)",
         "INSERT INTO t VALUES (56, NULL, 1000)"),
        r"the key changed from \(id\) to \(n\)", change=False,
    ),
    Case(
        "emptied",
        ("TRUNCATE t", "ALTER TABLE t ALTER n TYPE bigint USING 1, ADD c int DEFAULT 7"),
    ),
    Case("nobody", ("DELETE FROM t", "ALTER TABLE t ALTER n TYPE text USING n || '!'")),
]  # fmt: skip


class Server:
    """A database with a table for each case, altered under a slot, and the stream of it."""

    def __init__(self, database: Any, directory: Path) -> None:
        self.database, self.directory = database, directory
        self.slot = f"slot_{database.name}"
        database.execute(
            "CREATE TABLE filled (id int PRIMARY KEY, v text)",
            "INSERT INTO filled SELECT g, 'before' FROM generate_series(1, 1000) g",
            "CREATE PUBLICATION p FOR ALL TABLES",
        )
        self.capture()
        self.frames_slot = f"frames_{database.name}"
        database.execute(
            f"SELECT pg_create_logical_replication_slot('{self.frames_slot}', 'pgoutput')",
            "UPDATE filled SET v = 'now' WHERE id % 10 = 0",
        )
        for case in CASES:
            self.make(case)
        self.capture()
        self.catalog: Catalog = read_catalog(database.dsn, ["p"])

    def make(self, case: Case) -> None:
        def written(statement: str) -> str:
            return " ".join(
                case.name + word[1:] if word == "t" or word.startswith("t_") else word
                for word in statement.split(" ")
            )

        named = case.named or case.name
        self.database.execute(
            *map(
                written,
                ("CREATE TABLE t (id int PRIMARY KEY, v text, n int, s varchar(5))",
                 "INSERT INTO t SELECT g, 'abcd' || g, g, 's' FROM generate_series(1, 20) g",
                 "UPDATE t SET n = n + 1 WHERE id < 10", *case.statements),
            ),
            *([f"INSERT INTO {named} VALUES (55)"] if case.change else []),
        )  # fmt: skip

    def capture(self) -> None:
        ((lsn,),) = self.database.execute("SELECT pg_current_wal_lsn()")
        capture(
            self.database.dsn, slot=self.slot, publications=["p"], directory=self.directory,
            create_slot=True, until_lsn=pf.parse_lsn(lsn),
        )  # fmt: skip

    def frames(self) -> list[tuple[bytes]]:
        """All frames, as a slot gives them."""
        found = self.database.execute(
            f"SELECT data FROM pg_logical_slot_peek_binary_changes('{self.frames_slot}', NULL, "
            "NULL, 'proto_version', '1', 'publication_names', 'p')"
        )
        return [(bytes(data),) for (data,) in found]

    def truth(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(map(tuple, self.database.execute(f"SELECT * FROM {table}")), key=repr)


@pytest.fixture
def server(database18: Any, tmp_path: Path) -> Server:
    return Server(database18, tmp_path / "segments")


def outcome(changes: Any, catalog: Catalog, table: str, **options: Any) -> Any:
    """The rows that are found, or the error's text."""
    from pgoutput_fast.spark import current_state

    try:
        state = current_state(changes, catalog.table(f"public.{table}"), **options)
        return sorted(map(tuple, state.collect()), key=repr)
    except (PySparkException, pf.PgOutputError) as error:
        return str(error)


def test_tables_that_are_altered_have_the_servers_rows_or_are_refused(
    spark: Any, server: Server
) -> None:
    from pgoutput_fast.spark import current_state, decode_frames, read_segments

    def changes(table: str) -> Any:
        return read_segments(spark, server.directory, f"public.{table}")

    wrong: dict[str, Any] = {}
    for case in CASES:
        table = case.named or case.name
        found = outcome(changes(table), server.catalog, table)
        if case.said is None:
            if found != server.truth(table):
                wrong[case.name] = found
        elif not isinstance(found, str) or not re.search(case.said, found):
            wrong[case.name] = found
    assert wrong == {}
    assert outcome(changes("swapped_old"), server.catalog, "swapped_old") == server.truth(
        "swapped_old"
    )
    state = current_state(changes("letters"), server.catalog.table("public.letters"))
    assert state.columns == ["id", "v", "n", "s", "V_", "ID_"]
    # A slot that was made after the table was filled.
    said = outcome(changes("filled"), server.catalog, "filled")
    assert re.search(r"public\.filled, row \(id\) = \(\d+0\): change .*no row with this key", said)

    frames = spark.createDataFrame(server.frames(), "data binary").coalesce(1).cache()
    for table in ("renamed_now", "anew", "swapped", "swapped_old"):
        found = outcome(decode_frames(frames, f"public.{table}"), server.catalog, table)
        assert found == server.truth(table), table
    # Of frames without a Relation to tell which table it is.
    by_name = decode_frames(frames, "public.anew", schema="id int, v string, n int, s string")
    assert outcome(by_name, server.catalog, "anew") == server.truth("anew")
    frames.unpersist()
