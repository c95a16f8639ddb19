"""The catalogue: keys, values of old rows, partitions; as a server has them, and through JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error

from pgoutput_fast.catalog import Catalog, read_catalog

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.server


@pytest.fixture
def catalog(database: Any) -> Catalog:
    database.execute(
        'CREATE TABLE "Odd ""name" ("b B" int, a int, c text, PRIMARY KEY (a, "b B") INCLUDE (c))',
        "CREATE TABLE by_index (id int PRIMARY KEY, k int NOT NULL, u int)",
        "CREATE UNIQUE INDEX by_index_k ON by_index (k)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_k",
        "CREATE TABLE whole (id int PRIMARY KEY, v text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE TABLE keyless (v text)",
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        "CREATE TABLE root (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE middle PARTITION OF root FOR VALUES FROM (0) TO (100)"
        " PARTITION BY RANGE (id)",
        "CREATE TABLE leaf_a PARTITION OF middle FOR VALUES FROM (0) TO (50)",
        "CREATE TABLE leaf_b PARTITION OF root FOR VALUES FROM (100) TO (200)",
        "CREATE TABLE unpublished (id int)",
        'CREATE PUBLICATION p FOR TABLE "Odd ""name", by_index, whole, keyless, root'
        " WITH (publish_via_partition_root = true)",
        "CREATE PUBLICATION leaves FOR TABLE root",
    )
    return read_catalog(database.dsn, ["p"])


def test_tables_and_keys(database: Any, catalog: Catalog) -> None:
    assert [(t.name, t.kind, t.replica_identity, t.key) for t in catalog.tables] == [
        ('Odd "name', "r", "d", ("a", "b B")),
        ("by_index", "r", "i", ("k",)),
        ("keyless", "r", "f", ()),
        ("root", "p", "d", ("id",)),
        ("whole", "r", "f", ("id",)),
    ]
    by_index = catalog.table("public.by_index")
    assert (by_index.primary_key, by_index.identity_index) == (("id",), ("k",))
    ((oid,),) = database.execute("SELECT 'by_index'::regclass::oid::bigint")
    assert catalog.by_id()[oid] is by_index
    column = by_index.columns[1]
    assert (column.name, column.type_id, column.type_name, column.not_null) == (
        *("k", 23, "integer"),
        True,
    )
    with expect_error(code="no_table", table="public.unpublished"):
        catalog.table("public.unpublished")


def test_a_deferrable_key_is_none(database: Any) -> None:
    """In mid-transaction two rows may have the same values, so rows cannot be told apart by it."""
    database.execute(
        "CREATE TABLE later (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)",
        "ALTER TABLE later REPLICA IDENTITY FULL",
        "CREATE PUBLICATION later FOR TABLE later",
    )
    assert read_catalog(database.dsn, ["later"]).table("public.later").key == ()


def test_columns_that_are_not_published(database18: Any) -> None:
    database18.execute(
        "CREATE TABLE listed (id int PRIMARY KEY, a int, b int)",
        "CREATE PUBLICATION partly FOR TABLE listed (id, b)",
        "CREATE PUBLICATION wholly FOR TABLE listed",
    )
    for publications, published in (
        (["partly"], ["id", "b"]),
        (["partly", "wholly"], ["id", "a", "b"]),
    ):
        (table,) = read_catalog(database18.dsn, publications).tables
        assert [one.name for one in table.columns if one.is_published] == published


def test_generated_columns_that_are_not_published(database18: Any) -> None:
    database18.execute(
        "CREATE TABLE made (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, "
        "thrice int GENERATED ALWAYS AS (id * 3) VIRTUAL)",
        "CREATE PUBLICATION without FOR TABLE made",
        "CREATE PUBLICATION stored FOR TABLE made WITH (publish_generated_columns = stored)",
        "CREATE PUBLICATION listed FOR TABLE made (id, twice)",
    )
    for publication, published in (
        ("without", ["id"]),
        ("stored", ["id", "twice"]),
        ("listed", ["id", "twice"]),
    ):
        (table,) = read_catalog(database18.dsn, [publication]).tables
        assert [one.name for one in table.columns if one.is_published] == published


def test_partitions(database: Any, catalog: Catalog) -> None:
    names = dict(database.execute("SELECT oid::bigint, relname::text FROM pg_class"))
    root = catalog.table("public.root")
    assert root.root_id is None
    assert {names[oid] for oid in root.partition_ids} == {"leaf_a", "leaf_b"}
    leaves = read_catalog(database.dsn, ["leaves"])
    assert [t.name for t in leaves.tables] == ["leaf_a", "leaf_b"]
    assert {names[t.root_id or 0] for t in leaves.tables} == {"root"}
    assert {t.key for t in leaves.tables} == {("id",)}


def test_values_of_rows_that_are_older_than_their_columns(database: Any) -> None:
    """What the catalogue says is what the server reads from such a row."""
    values = {
        "plain": "text DEFAULT 'it''s {odd}, \"quoted\" \\ NULL'",
        "empty": "text DEFAULT ''",
        "word_null": "text DEFAULT 'NULL'",
        "list": "int[] DEFAULT '{1,NULL,3}'",
        "texts": 'text[] DEFAULT \'{"a,b","NULL"}\'',
        "moment": "timestamptz DEFAULT '2024-02-03 04:05:06+09'",
        "span": "interval DEFAULT '1 year 2 days 03:04:05'",
        "bytes": "bytea DEFAULT '\\x00ff'",
        "precise": "float8 DEFAULT 0.1::float8 + 0.2::float8",
        "amount": "numeric(10,2) DEFAULT 1.5",
        "document": "jsonb DEFAULT '{\"a\": [1, null]}'",
        "without": "int",
    }
    database.execute(
        f"ALTER DATABASE {database.name} SET timezone = 'Asia/Tokyo'",
        f"ALTER DATABASE {database.name} SET intervalstyle = 'iso_8601'",
        f"ALTER DATABASE {database.name} SET bytea_output = 'escape'",
        f"ALTER DATABASE {database.name} SET extra_float_digits = 0",
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE t",
        "INSERT INTO t VALUES (1)",
        *(f"ALTER TABLE t ADD COLUMN {name} {rest}" for name, rest in values.items()),
        "ALTER TABLE t ADD COLUMN computed float DEFAULT random()",
        "ALTER TABLE t ADD COLUMN later int",
        "ALTER TABLE t ALTER COLUMN later SET DEFAULT 7",
        "ALTER TABLE t ADD COLUMN own int GENERATED ALWAYS AS (id * 2) STORED",
        "ALTER TABLE t ADD COLUMN counted int GENERATED BY DEFAULT AS IDENTITY",
        "ALTER TABLE t ADD COLUMN gone int DEFAULT 1",
        "ALTER TABLE t DROP COLUMN gone",
        "ALTER TABLE t ALTER COLUMN amount SET DEFAULT 99",
    )
    # The additions that rewrite the table keep nothing: only those after the last one count.
    table = read_catalog(database.dsn, ["p"]).table("public.t")
    assert table.added_values == {"without": None}
    database.execute(
        "DROP TABLE t",
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
        *(f"ALTER TABLE t ADD COLUMN {name} {rest}" for name, rest in values.items()),
        "ALTER TABLE t ALTER COLUMN amount SET DEFAULT 99",
        "ALTER TABLE t ALTER COLUMN empty DROP DEFAULT",
        "ALTER PUBLICATION p ADD TABLE t",
    )
    table = read_catalog(database.dsn, ["p"]).table("public.t")
    with database.connect() as connection:
        connection.execute(
            "SET timezone = 'UTC'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex';"
            "SET extra_float_digits = 3; SET datestyle = 'ISO, MDY'"
        )
        row = connection.execute(
            f"SELECT {', '.join(f'{name}::text' for name in values)} FROM t"
        ).fetchone()
    assert row is not None
    assert table.added_values == dict(zip(values, row, strict=True))
    assert table.added_values["amount"] == "1.50"
    assert {column.name: column.generated for column in table.columns}["plain"] == ""


def test_partitioned_table_has_its_partitions_values(database: Any, catalog: Catalog) -> None:
    database.execute(
        "INSERT INTO root VALUES (1), (101)",
        "ALTER TABLE root ADD COLUMN same int DEFAULT 5",
        # A partition that comes later, whose rows are older than a column of another default.
        "CREATE TABLE leaf_c (v text, id int PRIMARY KEY, same int)",
        "INSERT INTO leaf_c VALUES ('x', 201, 6)",
        "ALTER TABLE leaf_c ADD COLUMN differs int DEFAULT 2",
        "ALTER TABLE root ADD COLUMN differs int DEFAULT 1",
        "ALTER TABLE root ATTACH PARTITION leaf_c FOR VALUES FROM (200) TO (300)",
    )
    root = read_catalog(database.dsn, ["p"]).table("public.root")
    assert root.added_values == {"v": None, "same": "5"}
    leaves = read_catalog(database.dsn, ["leaves"])
    assert leaves.table("public.leaf_c").added_values["differs"] == "2"


def test_json_and_file(catalog: Catalog, tmp_path: Path) -> None:
    assert Catalog.from_json(catalog.to_json()) == catalog
    path = tmp_path / "catalog.json"
    catalog.save(path)
    catalog.save(path)
    assert Catalog.load(path) == catalog
    assert [p.name for p in tmp_path.iterdir()] == ["catalog.json"]
    with expect_error(code="io_failed", path=str(tmp_path / "none" / "catalog.json")):
        catalog.save(tmp_path / "none" / "catalog.json")
    with expect_error(code="missing_path", path=str(tmp_path / "other.json")):
        Catalog.load(tmp_path / "other.json")
    newer = {**json.loads(catalog.to_json()), "format_version": 2}
    for text, code in [
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"format_version": 1}', "damaged"),
        ('{"format_version": 1, "publications": [], "tables": [{}]}', "damaged"),
        (json.dumps(newer), "not_supported"),
    ]:
        path.write_text(text)
        with expect_error(code=code, path=str(path)):
            Catalog.load(path)


def test_publications_and_servers_that_are_not_there(database18: Any) -> None:
    database18.execute("CREATE PUBLICATION p")
    assert read_catalog(database18.dsn, ["p"]).tables == ()
    with expect_error(code="no_publication", parameter="publications"):
        read_catalog(database18.dsn, ["p", "q"])
    with expect_error(code="connection_lost"):
        read_catalog("host=/nonexistent", ["p"])
