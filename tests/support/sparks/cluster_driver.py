"""A Spark whose executors are processes of their own: a slot's tables, and its changes as files.

    python cluster_driver.py DSN SLOT DIRECTORY STATEMENT …

It syncs the slot into `DIRECTORY/lake`, runs the statements, and syncs again; then it writes what
`read_segments` and a stream of each mode of the source have of the table public.t.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from pgoutput_fast.spark import PgOutputDataSource, read_segments, session, sync

COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "tcc", "c99", "c89")


def where(_: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """What a task finds around it."""
    from pgoutput_fast import _impl

    parents, process = [], os.getpid()
    while process > 1:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        process = int(status[1])
        parents.append(Path(f"/proc/{process}/cmdline").read_text().split("\0"))
    names = [*COMPILERS, *(sysconfig.get_config_var("CC") or "cc").split()[:1]]
    yield {
        "implementation": _impl.IMPLEMENTATION,
        "engine": Path(_impl.twin("columnar._engine").__file__ or "").suffix,
        "compilers": [name for name in names if shutil.which(name)],
        "CC": os.environ.get("CC"),
        "executor": [
            one[one.index("--executor-id") + 1]
            for one in parents
            if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in one
        ],
    }


def main(dsn: str, slot: str, directory: str, *statements: str) -> None:
    root = Path(directory)
    spark = session(
        "local-cluster[2,1,1024]",
        configuration={
            "spark.executor.memory": "512m", "spark.driver.memory": "512m",
            "spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2",
            # Both executors are waited for, so that both have tasks.
            "spark.scheduler.minRegisteredResourcesRatio": "1",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        },
    )  # fmt: skip
    spark.dataSource.register(PgOutputDataSource)
    told: dict[str, Any] = {
        "tasks": spark.sparkContext.parallelize(range(8), 8).mapPartitions(where).collect()
    }
    given: dict[str, Any] = {
        "slot": slot, "publications": ["p"], "target": root / "lake",
        "directory": root / "segments", "driver_bytes": 0, "until": "now", "max_delay": 0.05,
    }  # fmt: skip
    told["synced"] = [sync(spark, dsn, **given).tables]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
    told["synced"].append(sync(spark, dsn, **given).tables)

    pq.write_table(
        read_segments(spark, root / "segments", "public.t").toArrow(), root / "segments.parquet"
    )
    for mode in ("table", "envelope", "manifest"):
        options = {"mode": mode, "segments": str(root / "segments"), "maxBytesPerTrigger": "200kB"}
        if mode == "table":
            options["table"] = "public.t"
        if mode == "manifest":
            options["output"] = str(root / "files")
        made = root / mode
        made.mkdir()

        def write(batch: Any, number: int, made: Path = made) -> None:
            pq.write_table(batch.toArrow(), made / f"{number}.parquet")

        query = (
            spark.readStream.format("pgoutput").options(**options).load()
            .writeStream.foreachBatch(write).trigger(availableNow=True)
            .option("checkpointLocation", str(root / f"{mode}.checkpoint")).start()
        )  # fmt: skip
        query.awaitTermination()
    spark.stop()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
