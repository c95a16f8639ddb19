"""Tables, slots and directories that are others than a query took them for.

What comes is right, or an error says what is wrong; nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from replayed import replay
from source_queries import MODES, Queries

from pgoutput_fast.embedded import EmbeddedServer

pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.integration, pytest.mark.spark, pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]  # fmt: skip

WaitUntil = Callable[..., None]


@pytest.fixture
def shop(pg18: EmbeddedServer, make_database: Callable[..., Any]) -> Any:
    database = make_database(pg18)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 30) AS g",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    return database


def rows(database: Any, table: str = "t") -> list[Any]:
    return sorted(database.execute(f"SELECT * FROM {table}"), key=repr)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_of_a_published_table_without_changes(
    spark: Any, shop: Any, tmp_path: Path, mode: str
) -> None:
    """It has its columns, and no rows, whether its directory is there already or not."""
    shop.execute("CREATE TABLE quiet (id int PRIMARY KEY, n numeric(10, 2))")
    tables = None if mode == "table" else "public.quiet"
    queries = Queries(
        spark, shop, tmp_path, table="quiet", mode=mode, snapshot="never", tables=tables
    )
    for _ in range(2):
        frame = queries.load()
        assert queries.run() == []
        if mode == "table":
            assert frame.schema["after"].dataType.simpleString() == "struct<id:int,n:decimal(10,2)>"
        shop.execute("INSERT INTO t SELECT max(id) + 1 FROM t")
    shop.execute("INSERT INTO quiet VALUES (1, 2.5)")
    ((id_, n),) = replay(queries.run())
    assert (id_, float(n)) == (1, 2.5)


@pytest.mark.parametrize("mode", ["table"])
def test_an_old_checkpoint_and_a_slot_of_another_name(
    spark: Any, shop: Any, tmp_path: Path, mode: str
) -> None:
    queries = Queries(spark, shop, tmp_path, mode=mode)
    queries.run()
    before = queries.changes()
    shop.execute("INSERT INTO t VALUES (100, 'x')")
    name = f"slot_{shop.name}_2"
    with pytest.raises(StreamingQueryException, match=f"slot_{shop.name}"):
        queries.run(slot=name)  # the directory is of the other one
    with pytest.raises(StreamingQueryException, match="begin with a new checkpoint, and a new tar"):
        queries.run(slot=name, segments=str(tmp_path / "other"))
    assert queries.changes() == before
    assert replay(queries.run()) == rows(shop)
    found = queries.run("new", slot=name, segments=str(tmp_path / "other"))
    assert replay(found) == rows(shop)
