"""A Spark query of the source `pgoutput`, which may be killed at any moment.

    python source_driver.py DSN SLOT DIRECTORY [end]

Each batch is written as one file, which a batch that is run again replaces. With `end` it ends with
what is committed by now; else it goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pgoutput_fast.spark import PgOutputDataSource, session


def main(dsn: str, slot: str, directory: str, *end: str) -> None:
    root = Path(directory)
    (root / "out").mkdir(parents=True, exist_ok=True)
    spark = session("local[2]", configuration={"spark.log.level": "OFF"})
    spark.dataSource.register(PgOutputDataSource)
    changes = (
        spark.readStream.format("pgoutput")
        .options(dsn=dsn, slot=slot, publications="p", table="public.t", maxDelay="0.1",
                 segments=str(root / "segments"), maxBytesPerTrigger="100kB")
        .load()
    )  # fmt: skip

    def write(batch: Any, number: int) -> None:
        table = batch.select("op", "commit_lsn", "seq", "after.id").toArrow()
        path = root / "out" / f"{number}.parquet"
        pq.write_table(table, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    trigger: dict[str, Any] = {"processingTime": "100 milliseconds"}
    if end:
        trigger = {"availableNow": True}
    query = (
        changes.writeStream.foreachBatch(write).trigger(**trigger)
        .option("checkpointLocation", str(root / "checkpoint")).start()
    )  # fmt: skip
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
