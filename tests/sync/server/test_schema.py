"""Names and columns of tables in a target follow the server's, wherever windows end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.targets.synced_database import Synced
from support.targets.synced_tables import TABLES, DeltaTables, StoredTables

from pgoutput_fast.replication import history as read_history
from pgoutput_fast.verify import verify

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quick_upkeep")]

PLACES = ["duckdb", pytest.param("delta", marks=pytest.mark.slow)]
EVERY_PLACE = ["duckdb", "delta", "distributed", "iceberg"]
STORED = pytest.param("stored", marks=pytest.mark.slow)


@pytest.fixture
def synced(kind: str, make_database: Any, pg18: Any, tmp_path: Path) -> Iterator[Synced]:
    database = make_database(pg18)
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    if kind == "stored":
        pytest.importorskip("moto")
    tables = StoredTables(tmp_path) if kind == "stored" else TABLES[kind](tmp_path)
    yield Synced(database, tables)
    tables.close()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_history, "_ASKED_INTERVAL", 0.05)


def same(synced: Synced) -> None:
    """Each of the server's tables is what a reader of its name sees: columns and rows.

    A call ends by a read of the catalogue. What it tells of names shows in the next one, at the
    latest.
    """
    synced.settle()
    synced.settle()
    tables = synced.database.execute(
        "SELECT relname, array_agg(attname::text ORDER BY attnum) FROM pg_class JOIN pg_attribute "
        "ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped WHERE relkind = 'r' AND "
        "relnamespace = 'public'::regnamespace GROUP BY 1"
    )
    for name, columns in tables:
        found = synced.tables.state(f"public.{name}")
        assert set(found.column_names) == set(columns), name
        listed = ", ".join(f'"{column}"' for column in columns)
        truth = synced.database.execute(f'SELECT {listed} FROM "{name}"')
        assert synced.rows(f"public.{name}", *columns) == sorted(truth, key=repr), name
    report = verify(synced.database.dsn, publications=["p"], **synced.tables.verified)
    assert {one.name: (one.state, one.why) for one in report.tables} == {
        name: ("equal", "") for name, _ in tables
    }


# --- names ---------------------------------------------------------------------------------------

SWAP = "ALTER TABLE t RENAME TO t_old; ALTER TABLE u RENAME TO t"
CYCLE = (
    "ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; ALTER TABLE w RENAME TO u; "
    "ALTER TABLE x RENAME TO w"
)
EXCHANGE = "ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; ALTER TABLE x RENAME TO u"


def three_tables(synced: Synced) -> None:
    for number, name in enumerate(("t", "u", "w")):
        synced.database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text)",
            f"INSERT INTO {name} SELECT g, '{name}' FROM generate_series(1, {3 + number}) g",
        )
    synced.sync()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLACES, STORED])
@pytest.mark.parametrize(
    "statements",
    [
        EXCHANGE,
        pytest.param(SWAP, marks=pytest.mark.slow),
        pytest.param(CYCLE, marks=pytest.mark.slow),
    ],
    ids=["exchange", "swap", "cycle"],
)
def test_tables_that_change_names_without_a_change(synced: Synced, statements: str) -> None:
    three_tables(synced)
    synced.database.execute(f"BEGIN; {statements}; COMMIT")
    same(synced)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duckdb"])
def test_verify_tells_where_a_name_means_another_table(synced: Synced) -> None:
    """It compares what a reader of the name sees."""
    three_tables(synced)
    synced.database.execute(
        f"BEGIN; {EXCHANGE}; COMMIT", "DELETE FROM t", "DELETE FROM u", "DELETE FROM w"
    )
    synced.options["history"] = "newer"
    held = {one.name: one for one in synced.sync().table_states}
    assert held["t"].stored_name == "public.t"
    import duckdb

    with duckdb.connect(str(synced.tables.path)) as connection:
        for table in ("_progress",):
            connection.execute(
                f"UPDATE {table} SET stored = CASE stored WHEN 'public.t' THEN 'public.u' "
                "WHEN 'public.u' THEN 'public.t' ELSE stored END"
            )
    report = verify(synced.database.dsn, publications=["p"], target=synced.tables.target)
    assert {one.name: one.state for one in report.tables} == {
        "t": "different", "u": "different", "w": "equal",
    }  # fmt: skip
    assert report.exit_code == 1


class Renaming:
    """A random sequence of what happens to tables: renames, rotations, drops, changes, windows."""

    def __init__(self, synced: Synced, chance: random.Random) -> None:
        self.synced, self.chance = synced, chance
        self.names = ["t", "u", "w"]
        self.next = 100

    def step(self) -> None:
        do = self.chance.choice(
            [self.rename, self.exchange, self.rotate, self.replace, self.change, self.change,
             self.synced.sync]
        )  # fmt: skip
        do()

    def run(self, *statements: str) -> None:
        self.synced.database.execute("; ".join(["BEGIN", *statements, "COMMIT"]))

    def rename(self) -> None:
        old, new = self.chance.choice(self.names), f"n{self.next}"
        self.next += 1
        self.names[self.names.index(old)] = new
        self.run(f"ALTER TABLE {old} RENAME TO {new}")

    def exchange(self) -> None:
        one, other = self.chance.sample(self.names, 2)
        self.run(f"ALTER TABLE {one} RENAME TO x", f"ALTER TABLE {other} RENAME TO {one}",
                 f"ALTER TABLE x RENAME TO {other}")  # fmt: skip

    def rotate(self) -> None:
        a, b, c = self.chance.sample(self.names, 3)
        self.run(f"ALTER TABLE {a} RENAME TO x", f"ALTER TABLE {b} RENAME TO {a}",
                 f"ALTER TABLE {c} RENAME TO {b}", f"ALTER TABLE x RENAME TO {c}")  # fmt: skip

    def replace(self) -> None:
        """A new table comes in the place of one, which is dropped at once or under another name."""
        name = self.chance.choice(self.names)
        gone = self.chance.choice([f"DROP TABLE {name}", f"ALTER TABLE {name} RENAME TO gone"])
        self.run(gone, f"CREATE TABLE {name} (id int PRIMARY KEY, v text)",
                 f"INSERT INTO {name} VALUES ({self.next}, 'anew')",
                 "DROP TABLE IF EXISTS gone")  # fmt: skip
        self.next += 1

    def change(self) -> None:
        name = self.chance.choice(self.names)
        self.run(f"INSERT INTO {name} VALUES ({self.next}, 'more')")
        self.next += 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duckdb", *(pytest.param(k, marks=pytest.mark.slow)
                                              for k in EVERY_PLACE[1:]), STORED])  # fmt: skip
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))]
)
def test_names_by_chance(synced: Synced, seed: int) -> None:
    chance = random.Random(f"{seed}")
    synced.options["window_bytes"] = chance.choice([1, 1 << 20])
    three_tables(synced)
    renaming = Renaming(synced, chance)
    for _ in range(12):
        renaming.step()
    same(synced)


# --- rewritten rows ------------------------------------------------------------------------------

REWRITTEN = [
    ("numeric(10,2)", "numeric(12,2)", "a / 100", "150.00"),
    ("numeric(10,2)", "numeric", "a * 2", "150.00"),
    ("varchar(10)", "varchar(20)", "upper(a)", "abc"),
    ("varchar(10)", "text", "a || '!'", "abc"),
    ("text", "varchar", "a || '!'", "abc"),
    ("int", "bigint", "a * 10", "5"),
    ("int", "bigint", "a", "5"),
    ("timestamp(3)", "timestamp(6)", "a + interval '1 day'", "2026-01-01 10:00:00"),
    ("mood", "text", "a || '!'", "sad"),
    ("varchar(5)[]", "text[]", "a || 'x'::text", "{a,b}"),
    ("bit varying(4)", "bit varying(8)", "a || B'1'", "101"),
]
KEPT = [
    ("numeric(10,2)", "numeric(12,2)", "150.00"), ("varchar(10)", "varchar(20)", "abc"),
    ("varchar(10)", "text", "abc"), ("text", "varchar", "abc"),
    ("timestamp(3)", "timestamp(6)", "2026-01-01 10:00:00"),
]  # fmt: skip
FEW = 1
"""Of the cases that are not slow."""


def quick(cases: list[Any]) -> list[Any]:
    return [
        pytest.param(*one, id="-".join(one[:3]), marks=() if i < FEW else pytest.mark.slow)
        for i, one in enumerate(cases)
    ]


def altered(synced: Synced, old: str, value: str, *, is_partitioned: bool = False) -> None:
    synced.database.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    by = " PARTITION BY RANGE (id)" if is_partitioned else ""
    synced.database.execute(f"CREATE TABLE t (id int PRIMARY KEY, a {old}){by}")
    if is_partitioned:
        synced.database.execute(
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE PUBLICATION root FOR TABLE t WITH (publish_via_partition_root)",
        )
        synced.options["publications"] = ["root"]
    synced.database.execute(f"INSERT INTO t VALUES (1, '{value}'), (2, '{value}')")
    synced.sync()


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(("old", "new", "using", "value"), quick(REWRITTEN))
def test_a_type_that_is_altered_with_other_values(
    synced: Synced, old: str, new: str, using: str, value: str, follows: bool
) -> None:
    """Whether a change of the table follows or not."""
    altered(synced, old, value)
    synced.database.execute(f"ALTER TABLE t ALTER a TYPE {new} USING {using}")
    if follows:
        synced.database.execute("INSERT INTO t SELECT 3, a FROM t WHERE id = 1")
    assert len(synced.settle()) == 1
    same_values(synced)


def same_values(synced: Synced) -> None:
    publications = synced.options["publications"]
    report = verify(synced.database.dsn, publications=publications, target=synced.tables.target)
    assert [(one.name, one.state, one.why) for one in report.tables] == [("t", "equal", "")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("is_partitioned", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("old", "new", "value"), quick(KEPT))
def test_a_type_that_is_altered_with_the_same_values(
    synced: Synced, old: str, new: str, value: str, is_partitioned: bool
) -> None:
    """No copy is made, also where a partition came with it."""
    altered(synced, old, value, is_partitioned=is_partitioned)
    synced.database.execute(f"ALTER TABLE t ALTER a TYPE {new}")
    if is_partitioned:
        synced.database.execute("CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)")
    synced.database.execute("INSERT INTO t SELECT 3, a FROM t WHERE id = 1")
    assert synced.settle() == []
    same_values(synced)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duckdb"])
def test_a_partition_that_is_rewritten(synced: Synced) -> None:
    altered(synced, "varchar(10)", "abc", is_partitioned=True)
    synced.database.execute("ALTER TABLE t ALTER a TYPE varchar(20) USING upper(a)")
    assert len(synced.settle()) == 1
    same_values(synced)


# --- columns -------------------------------------------------------------------------------------


class Altering:
    """Random sequences of columns that are added, dropped, renamed; of changes; and of windows."""

    def __init__(self, synced: Synced, chance: random.Random) -> None:
        self.synced, self.chance = synced, chance
        self.columns = ["a", "b"]
        self.gone: list[str] = []
        self.next = 10

    def step(self) -> None:
        self.chance.choice(
            [self.add, self.drop, self.rename, self.insert, self.insert, self.update,
             self.synced.sync]
        )()  # fmt: skip

    def run(self, statement: str) -> None:
        self.synced.database.execute(statement)

    def add(self) -> None:
        """Under a name that there was, or a new one."""
        name = self.chance.choice([*self.gone, f"c{self.next}"])
        self.gone = [one for one in self.gone if one != name]
        self.columns.append(name)
        self.next += 1
        self.run(f"ALTER TABLE t ADD {name} int{self.chance.choice(['', f' DEFAULT {self.next}'])}")

    def drop(self) -> None:
        if self.columns:
            name = self.chance.choice(self.columns)
            self.columns.remove(name)
            self.gone.append(name)
            self.run(f"ALTER TABLE t DROP {name}")

    def rename(self) -> None:
        if self.columns:
            name = self.chance.choice(self.columns)
            self.columns[self.columns.index(name)] = f"r{self.next}"
            self.run(f"ALTER TABLE t RENAME {name} TO r{self.next}")
            self.next += 1

    def insert(self) -> None:
        values = ", ".join(str(self.next) for _ in [*self.columns, 0])
        self.run(f"INSERT INTO t ({', '.join(['id', *self.columns])}) VALUES ({values})")
        self.next += 1

    def update(self) -> None:
        if self.columns:
            name = self.chance.choice(self.columns)
            self.run(f"UPDATE t SET {name} = {self.next} WHERE id < {self.next // 2}")


@pytest.mark.parametrize("kind", ["duckdb", *(pytest.param(k, marks=pytest.mark.slow)
                                              for k in EVERY_PLACE[1:])])  # fmt: skip
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))]
)
def test_columns_by_chance(synced: Synced, seed: int) -> None:
    chance = random.Random(f"{seed}")
    synced.options["window_bytes"] = chance.choice([1, 1 << 20])
    synced.database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int)",
        "INSERT INTO t VALUES (1, 1, 1), (2, 2, 2), (3, 3, 3)",
    )
    synced.sync()
    altering = Altering(synced, chance)
    for _ in range(14):
        altering.step()
    same(synced)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("cuts", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
@pytest.mark.parametrize("follows", [True, False])
def test_a_column_that_is_dropped(synced: Synced, cuts: int, follows: bool) -> None:
    """Wherever windows end, and whether a change follows or not."""
    synced.database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int)",
        "INSERT INTO t VALUES (1, 1, 1), (2, 2, 2), (3, 3, 3)",
    )
    synced.sync()
    synced.database.execute("UPDATE t SET a = 10 WHERE id = 1")
    if cuts & 1:
        synced.sync()
    synced.database.execute("ALTER TABLE t DROP b")
    if cuts & 2:
        synced.sync()
    if follows:
        synced.database.execute("UPDATE t SET a = 20 WHERE id = 2")
    assert synced.settle() == []
    same(synced)
    after = synced.tables.changes("public.t").column("after").to_pylist()
    assert [row["b"] for row in after if row and row["id"] == 3] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duckdb"])
def test_a_column_of_the_key_that_is_dropped(synced: Synced) -> None:
    synced.database.execute(
        "CREATE TABLE t (id int, a int, b int, PRIMARY KEY (id, a))",
        "INSERT INTO t VALUES (1, 1, 1), (1, 2, 2)",
    )
    synced.sync()
    synced.database.execute(
        "DELETE FROM t WHERE a = 2",
        "ALTER TABLE t DROP a; ALTER TABLE t ADD PRIMARY KEY (id)",
        "INSERT INTO t VALUES (2, 2)",
    )
    assert len(synced.settle()) == 1
    same(synced)


@pytest.mark.parametrize("kind", [pytest.param("delta", marks=pytest.mark.slow)])
def test_a_snapshot_without_a_column_of_partitions(synced: Synced) -> None:
    """The new snapshot is partitioned by the other one, in this call and the next ones."""
    from deltalake import DeltaTable

    synced.options["partition_by"] = {"public.t": ["a", "b"]}
    synced.database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int)",
        "INSERT INTO t VALUES (1, 1, 1), (2, 2, 2)",
    )
    synced.sync()
    synced.database.execute("ALTER TABLE t DROP a", "INSERT INTO t VALUES (3, 3)")
    assert len(synced.settle()) == 1
    synced.database.execute("INSERT INTO t VALUES (4, 4)")
    same(synced)
    assert isinstance(synced.tables, DeltaTables)
    table = DeltaTable(str(synced.tables.path / "state" / "public.t"))
    assert table.metadata().partition_columns == ["b"]
