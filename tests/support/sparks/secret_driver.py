"""A Spark that shows and logs all it can of queries over a slot, whose server asks for a password.

    python secret_driver.py DSN WRONG_DSN SLOT DIRECTORY

What it shows comes into `DIRECTORY/shown`, its event log into `DIRECTORY/events`, its log to
standard error. The server refuses WRONG_DSN.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pgoutput_fast.spark import PgOutputDataSource, session, sync

PAGES = ("jobs", "stages", "environment", "executors", "SQL", "SQL/execution/?id=0",
         "StreamingQuery", "executors/threadDump/?executorId=driver")  # fmt: skip
ANSWERS = ("environment", "sql?details=true&planDescription=true", "jobs", "stages", "executors",
           "allexecutors")  # fmt: skip


def pages(spark: Any) -> Iterator[tuple[str, str]]:
    """What the UI has, by names of files."""
    url, application = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId
    addresses = [f"{url}/{page}" for page in PAGES]
    addresses += [f"{url}/api/v1/applications/{application}/{one}" for one in ANSWERS]
    for number, address in enumerate(addresses):
        with urllib.request.urlopen(address) as answer:
            yield f"page {number}", f"{address}\n{answer.read().decode()}"


def printed(function: Callable[[], object]) -> str:
    """What a function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function()
    return out.getvalue()


def main(dsn: str, wrong: str, slot: str, directory: str) -> None:
    # Not for all, as py4j's own log of that level has each call of the program's.
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("pgoutput_fast").setLevel(logging.DEBUG)
    root = Path(directory)
    for name in ("events", "shown"):
        (root / name).mkdir()
    spark = session(
        "local[2]",
        configuration={
            "spark.ui.enabled": "true", "spark.ui.port": "0", "spark.log.level": "INFO",
            "spark.eventLog.enabled": "true", "spark.eventLog.dir": (root / "events").as_uri(),
            "spark.eventLog.compress": "false", "spark.driver.host": "127.0.0.1",
            "spark.ui.showConsoleProgress": "false", "spark.sql.shuffle.partitions": "2",
        },
    )  # fmt: skip
    spark.dataSource.register(PgOutputDataSource)
    counts: list[int] = []

    def start(dsn: str, name: str) -> Any:
        options = {
            "dsn": dsn, "slot": f"{slot}_{name}", "publications": "p", "table": "public.t",
            "segments": str(root / name), "maxDelay": "0.1",
        }  # fmt: skip
        frame = spark.readStream.format("pgoutput").options(**options).load()
        shown[f"frame {name}"] = printed(lambda: frame.explain(True))
        return (
            frame.writeStream.foreachBatch(lambda batch, number: counts.append(batch.count()))
            .queryName(name).trigger(availableNow=True)
            .option("checkpointLocation", str(root / f"{name}.checkpoint")).start()
        )  # fmt: skip

    shown: dict[str, str] = {}
    query = start(dsn, "right")
    query.awaitTermination()
    shown["query"] = printed(lambda: query.explain(True))
    shown["progress"] = json.dumps([query.lastProgress, query.recentProgress, query.status],
                                   default=str)  # fmt: skip
    given: dict[str, Any] = {"publications": ["p"], "driver_bytes": 0, "until": "now"}
    made_up = "in" + "-options"  # not as a whole, as tracebacks have lines of this file
    synced = sync(spark, dsn, slot=f"{slot}_sync", target=root / "lake", **given)
    attempts: dict[str, Callable[[], object]] = {
        "wrong": lambda: start(wrong, "wrong").awaitTermination(),
        "sync": lambda: sync(spark, wrong, slot="other", target=root / "other", **given),
        # A table that is not in a directory yet is looked up on the server.
        "in options": lambda: start(f"{dsn} password={made_up}", "refused"),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - its text is what counts
            shown[f"refused {name}"] = f"{error}\n{error!r}\n{traceback.format_exc()}"
    shown |= dict(pages(spark))
    for name, text in shown.items():
        (root / "shown" / name).write_text(text)
    spark.stop()
    print(json.dumps([sum(counts), synced.tables]))


if __name__ == "__main__":
    main(*sys.argv[1:])
