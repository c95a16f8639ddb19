"""Tables in Spark of a directory with snapshots, against what the server has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pgoutput_fast as pf
from pgoutput_fast.catalog import read_catalog
from pgoutput_fast.replication import capture

pytestmark = [pytest.mark.server]

Rows = list[tuple[Any, ...]]


class Shop:
    """Tables that are renamed, dropped, made anew and copied again, and a capture of them."""

    def __init__(self, database: Any, directory: Path) -> None:
        self.database = database
        self.directory = directory
        self.make()

    def make(self) -> None:
        self.database.execute(
            "CREATE TABLE accounts (id int PRIMARY KEY, note text, large text)",
            "ALTER TABLE accounts ALTER large SET STORAGE EXTERNAL",
            "CREATE TABLE dropped (id int PRIMARY KEY, note text)",
            "CREATE TABLE pairs (id int, note text)",
            "ALTER TABLE pairs REPLICA IDENTITY FULL",
            "CREATE TABLE empty (id int PRIMARY KEY, note text)",
            "INSERT INTO accounts SELECT g, NULLIF('n' || g, 'n7'), repeat(md5(g::text), 100) "
            "FROM generate_series(1, 500) g",
            "INSERT INTO dropped SELECT g, 'd' FROM generate_series(1, 20) g",
            "INSERT INTO pairs SELECT g % 5, 'p' FROM generate_series(1, 20) g",
            "CREATE PUBLICATION p FOR ALL TABLES",
        )

    def take(self) -> None:
        """Capture all that is there by now, with the copies of new tables."""
        ((lsn,),) = self.database.execute("SELECT pg_current_wal_lsn()")
        capture(
            self.database.dsn, slot=f"slot_{self.database.name}", publications=["p"],
            directory=self.directory, snapshot="initial", create_slot=True,
            until_lsn=pf.parse_lsn(lsn),
        )  # fmt: skip

    def change(self) -> None:
        """Unchanged TOAST, keys that change, truncates; names that go to other tables."""
        self.database.execute(
            "UPDATE accounts SET note = 'changed' WHERE id % 3 = 0",
            "UPDATE accounts SET id = -id WHERE id BETWEEN 10 AND 20",
            "DELETE FROM accounts WHERE id > 490",
            "DELETE FROM pairs WHERE ctid IN (SELECT ctid FROM pairs WHERE id = 2 LIMIT 2)",
            "UPDATE pairs SET note = NULL WHERE id = 3",
            "ALTER TABLE accounts RENAME TO customers",
            "INSERT INTO customers VALUES (1000, 'renamed', '')",
            "CREATE TABLE accounts (id int PRIMARY KEY, note text)",
            "INSERT INTO accounts SELECT g, 'anew' FROM generate_series(1, 5) g",
            "DROP TABLE dropped",
            "CREATE TABLE dropped (id int PRIMARY KEY, note text)",
            "INSERT INTO dropped VALUES (7, 'anew')",
            "TRUNCATE empty",
        )

    def oid(self, table: str) -> int:
        ((found,),) = self.database.execute(f"SELECT '{table}'::regclass::oid::bigint")
        return int(found)

    def truth(self, table: str) -> Rows:
        found = [tuple(row) for row in self.database.execute(f"SELECT * FROM {table}")]
        return sorted(found, key=repr)


@pytest.fixture
def shop(database18: Any, tmp_path: Path) -> Shop:
    return Shop(database18, tmp_path / "segments")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_current_state_has_the_servers_rows(spark: Any, shop: Shop) -> None:
    from pgoutput_fast.spark import current_state, read_segments

    def check(*tables: str) -> None:
        catalog = read_catalog(shop.database.dsn, ["p"])
        for table in tables:
            changes = read_segments(spark, shop.directory, f"public.{table}").cache()
            state = current_state(changes, catalog.table(f"public.{table}"))
            found = [tuple(row) for row in state.collect()]
            assert sorted(found, key=repr) == shop.truth(table), table
            changes.unpersist()

    shop.take()
    changes = read_segments(spark, shop.directory, "public.accounts")
    told = changes.groupBy("op").count().collect()
    assert sorted(map(tuple, told)) == [("read", 500), ("truncate", 1)]
    check("accounts", "empty")
    shop.change()
    shop.take()
    # Renamed, made anew under a name that another table had, without a key.
    check("customers", "accounts", "dropped", "pairs", "empty")
