"""The source `pgoutput` with the slot of a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from support.expected_errors import expect_error
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.spark import PgOutputDataSource

pytestmark = [
    pytest.mark.server, pytest.mark.spark, pytest.mark.filterwarnings("ignore::FutureWarning")
]  # fmt: skip


class Streams:
    """Queries of one slot that add what they read to `changes`."""

    def __init__(self, spark: Any, database: Any, root: Path) -> None:
        self._spark, self._root = spark, root
        self._options = {
            "dsn": database.dsn, "slot": f"slot_{database.name}", "publications": "p",
            "table": "public.t", "checkpointLocation": str(root / "checkpoint"), "maxDelay": "0.1",
        }  # fmt: skip
        self.changes: list[Any] = []

    def start(self, checkpoint: str = "checkpoint", *, ends: bool = True, **options: str) -> Any:
        frame = self._spark.readStream.format("pgoutput").options(**{**self._options, **options})

        def take(batch: Any, number: int) -> None:
            self.changes += batch.select("op", "commit_lsn", "seq", "after.*").collect()

        trigger = {"availableNow": True} if ends else {"processingTime": "100 milliseconds"}
        return (
            frame.load().writeStream.foreachBatch(take).trigger(**trigger)
            .option("checkpointLocation", str(self._root / checkpoint)).start()
        )  # fmt: skip


@pytest.fixture
def streams(
    spark: Any, pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> Any:
    database = make_database(pg16)
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'glad')",
        "CREATE TABLE t (id int PRIMARY KEY, v text, m mood, n numeric(10, 2))",
        "INSERT INTO t SELECT i, 'v' || i, 'glad', i / 4.0 FROM generate_series(1, 100) AS i",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    spark.dataSource.register(PgOutputDataSource)
    return database, Streams(spark, database, tmp_path)


@pytest.mark.slow
def test_a_slot_in_one_query_after_another(streams: Any) -> None:
    database, made = streams
    made.start().awaitTermination()
    assert [row.op for row in made.changes].count("read") == 100
    database.execute(
        "INSERT INTO t SELECT i, NULL, 'sad', i FROM generate_series(101, 110) AS i",
        "UPDATE t SET v = 'new' WHERE id <= 5", "DELETE FROM t WHERE id = 6",
    )  # fmt: skip
    made.start().awaitTermination()
    running = made.start(ends=False)
    database.execute("UPDATE t SET m = 'sad' WHERE id = 1")
    wait_until(lambda: len(made.changes) == 118 or running.exception())
    database.execute("TRUNCATE t")
    wait_until(lambda: len(made.changes) == 119 or running.exception())
    # No second query reads as the same consumer, nor captures the same slot.
    for options, code in (
        ({}, "in_use"),
        ({"consumer": "c"}, "in_use"),
        ({"segments": f"{made._root}/other", "consumer": "c"}, "not_ours"),
    ):
        with expect_error(StreamingQueryException, code=code):
            made.start("second", **options).awaitTermination()
    running.stop()
    assert len({(row.commit_lsn, row.seq) for row in made.changes}) == 119
    found = {row.id: row for row in made.changes if row.op == "read"}
    assert {key: (row.v, row.m, float(row.n)) for key, row in found.items()} == {
        i: (f"v{i}", "glad", i / 4) for i in range(1, 101)
    }
    assert [(row.op, row.id, row.v, row.m) for row in made.changes[-2:]] == [
        ("update", 1, "new", "sad"), ("truncate", None, None, None)
    ]  # fmt: skip
    # What is in the checkpoint is acknowledged to the server, and the capture has ended.
    wait_until(lambda: not database.execute("SELECT active FROM pg_replication_slots "
               f"WHERE slot_name = 'slot_{database.name}'")[0][0])  # fmt: skip
    made.start().awaitTermination()
    assert len(made.changes) == 119


@pytest.mark.slow
def test_a_slot_that_is_beyond_the_directory(streams: Any) -> None:
    database, made = streams
    made.start().awaitTermination()
    database.execute("INSERT INTO t VALUES (200)")
    database.execute(
        f"SELECT pg_replication_slot_advance('slot_{database.name}', pg_current_wal_lsn())"
    )
    with expect_error(StreamingQueryException, code="changes_missing"):
        made.start().awaitTermination()
