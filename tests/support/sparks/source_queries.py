"""Queries over the source `pgoutput`, and what their batches have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from support.postgres.replayed import change_of

__all__ = ["MODES", "Queries", "changes_in"]

MODES = ("table", "envelope", "manifest")


class Queries:
    """Queries of one slot, each of which goes on where the last one with its checkpoint ended.

    Parameters
    ----------
    spark : SparkSession
    database
        With the publication p.
    root : pathlib.Path
    table : str
        In the schema public.
    mode : {"table", "envelope", "manifest"}
    **options
        Of the source; None leaves one out.
    """

    def __init__(
        self, spark: Any, database: Any, root: Path, *, table: str = "t", mode: str = "table",
        **options: str | None,
    ) -> None:  # fmt: skip
        from pgoutput_fast.spark import PgOutputDataSource

        spark.dataSource.register(PgOutputDataSource)
        self._spark, self._root, self._table, self._mode = spark, root, table, mode
        self.options: dict[str, str | None] = {
            "mode": mode, "dsn": database.dsn, "slot": f"slot_{database.name}",
            "publications": "p", "segments": str(root / "segments"), "maxDelay": "0.1",
            "table": f"public.{table}" if mode == "table" else None,
            "output": str(root / "files") if mode == "manifest" else None,
            **options,
        }  # fmt: skip
        self.batches: dict[tuple[str, int], list[dict[str, Any]]] = {}
        """The rows of each batch, by the checkpoint's name and the batch's number."""

    def load(self, **options: str | None) -> Any:
        """The streaming DataFrame."""
        given = {**self.options, **options}
        chosen = {name: value for name, value in given.items() if value is not None}
        return self._spark.readStream.format("pgoutput").options(**chosen).load()

    def start(self, checkpoint: str = "checkpoint", *, ends: bool = False, **options: Any) -> Any:
        """A query that runs; with `ends` it ends with what is committed by now."""

        def take(batch: Any, number: int) -> None:
            # A batch that is run again takes the place of the first one, as in a sink.
            self.batches[checkpoint, number] = batch.toArrow().to_pylist()

        trigger: dict[str, Any] = {"processingTime": "100 milliseconds"}
        return (
            self.load(**options).writeStream.foreachBatch(take)
            .trigger(**({"availableNow": True} if ends else trigger))
            .option("checkpointLocation", str(self._root / checkpoint)).start()
        )  # fmt: skip

    def run(self, checkpoint: str = "checkpoint", **options: Any) -> list[dict[str, Any]]:
        """Have a query end with what is committed by now; all changes of this checkpoint."""
        self.start(checkpoint, ends=True, **options).awaitTermination()
        return self.changes(checkpoint)

    def changes(self, checkpoint: str = "checkpoint") -> list[dict[str, Any]]:
        """All that came with a checkpoint."""
        rows = [row for key, rows in [*self.batches.items()] if key[0] == checkpoint
                for row in rows]  # fmt: skip
        return changes_in(rows, self._mode, self._table)


def changes_in(rows: Iterable[dict[str, Any]], mode: str, table: str) -> list[dict[str, Any]]:
    """The changes of a table in rows of the source, such as `replay` takes them."""
    if mode == "table":
        return list(rows)
    if mode == "envelope":
        return [change_of(row) for row in rows if row["topic"].endswith(f".public.{table}")]
    return [change for row in rows if row["table"] == f"public.{table}"
            for change in pq.read_table(row["path"]).to_pylist()]  # fmt: skip
