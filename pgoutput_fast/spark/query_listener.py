"""Report how far streaming queries over the source ``format("pgoutput")`` are: metrics and a log.

Spark tells listeners about each micro-batch. The process that plans the query adds the end of the
change log, and the commit time of the batch's newest transaction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, get_args

from pyspark.sql.streaming.listener import StreamingQueryListener

from pgoutput_fast.apply.syncing import SyncProgress
from pgoutput_fast.errors import counted, printable, without_passwords
from pgoutput_fast.lsn import parse_lsn
from pgoutput_fast.options import choice, seconds
from pgoutput_fast.watching.logs import LineHandler, LogFormat, RecordFormatter, write_line
from pgoutput_fast.watching.sync_figures import SyncFigures, SyncLag, SyncMeter

from ._jvm import raised_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pgoutput_fast.watching.metrics import MetricsServer, QueryCollector, WatchedQuery

_IDENTITY = ("system_identifier", "database", "slot")
_ENDED = 20
"""The number of ended queries that are still reported."""
_SHOWN = (
    "lag_bytes", "lag_seconds", "changes", "windows", "write_seconds", "lsn", "tables",
)  # fmt: skip
_BEGINNING = SyncProgress(0, None, 0, 0, 0.0, {}, {})

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Query:
    """A query over one source `pgoutput`, as Spark has reported it so far."""

    id: str
    labels: dict[str, str]
    progress: SyncProgress = _BEGINNING
    is_running: bool = True
    batch: int = -1
    next_line: float = 0.0
    meter: SyncMeter = dataclasses.field(default_factory=SyncMeter)

    def figures(self) -> SyncFigures:
        """Return the present numbers; the change log's end stands for the server's end."""
        return SyncLag(asks_server=False).figures(self.progress, None)

    def take(self, source: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        """Apply Spark's report of a micro-batch."""
        before, after = source["startOffset"], source["endOffset"]
        latest_offset = source.get("latestOffset") or {}
        self.labels["mode"] = latest_offset.get("mode") or self.labels.get("mode", "")
        old = self.progress
        lsn = parse_lsn(after["position"])
        end = max(lsn, parse_lsn(latest_offset["position"]) if "position" in latest_offset else 0)
        committed = latest_offset.get("committed")
        progress = old._replace(
            lsn=lsn, end_lsn=end,
            commit_time=old.commit_time if committed is None else _micros(committed),
        )  # fmt: skip
        if before != after:
            rows = 0 if self.labels["mode"] == "manifest" else int(source.get("numInputRows") or 0)
            tables = dict(old.tables)
            if latest_offset.get("table") and rows:
                tables[latest_offset["table"]] = tables.get(latest_offset["table"], 0) + rows
            progress = progress._replace(
                windows=old.windows + 1, changes=old.changes + rows, tables=tables,
                write_seconds=float(batch["durationMs"].get("triggerExecution", 0)) / 1000,
            )  # fmt: skip
        self.progress, self.batch = progress, int(batch["batchId"])

    def count(self, tables: Mapping[str, int]) -> None:
        """Add numbers of changes by table."""
        old = self.progress
        both = {**old.tables}
        for name, number in tables.items():
            both[name] = both.get(name, 0) + number
        changes = old.changes + sum(tables.values())
        self.progress = old._replace(tables=both, changes=changes)


class PgOutputQueryListener(StreamingQueryListener):
    """Shows how far streaming queries over the source ``format("pgoutput")`` are.

    ``spark.streams.addListener(PgOutputQueryListener(metrics_port=9188))`` watches all queries of a
    session, except queries over other sources. A query's name is that of ``queryName()``, or else
    its id. docs/how-to/spark-streams.md lists what is reported.

    Parameters
    ----------
    metrics_port : int, optional
        The port that serves metrics for Prometheus: those of `sync`, with the label ``query``. 0
        takes a free port; `url` then has it. Needs the extra ``metrics``.
    metrics_host : str
        The address of the metrics. Anybody who can reach it can read them.
    log_format : {"text", "json"}, optional
        Write lines to standard error. By default, records go to Python's logging alone: to this
        module's logger, with level INFO and above and the attributes `event` and `numbers`.
    log_interval : float
        Seconds between two lines with the numbers of a query.

    Raises
    ------
    PgOutputError
        Nothing can listen at the port, the extra is missing, or an argument is wrong.
    """

    def __init__(
        self,
        *,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        log_format: LogFormat | None = None,
        log_interval: float = 10.0,
    ) -> None:
        if log_format is not None:
            choice(*get_args(LogFormat)).check("log_format", log_format)
        seconds(zero=True).check("log_interval", log_interval)
        self._interval = log_interval
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}
        self._names: dict[str, str] = {}  # of running queries, by id
        self._written: dict[str, dict[str, int]] = {}  # counts of queries not reported yet
        self._resources = contextlib.ExitStack()
        self._server: MetricsServer | None = None
        if metrics_port is not None:
            from pgoutput_fast.watching.metrics import MetricsServer

            self._server = MetricsServer(metrics_host, metrics_port, [self.collector()])
            self._resources.callback(self._server.close)
        if log_format is not None:
            handler = LineHandler(write_line)
            handler.setFormatter(RecordFormatter(log_format))
            level = _log.level
            _log.addHandler(handler)
            _log.setLevel(logging.INFO)
            self._resources.callback(_log.setLevel, level)
            self._resources.callback(_log.removeHandler, handler)

    @property
    def url(self) -> str | None:
        """The URL of the metrics; None if none are served."""
        return None if self._server is None else self._server.url

    def collector(self) -> QueryCollector:
        """Return the collector of the metrics, for a prometheus_client registry of your own.

        Raises
        ------
        PgOutputError
            The extra ``metrics`` is missing.
        """
        from pgoutput_fast.watching.metrics import QueryCollector

        return QueryCollector(self._watched)

    def close(self) -> None:
        """Stop serving metrics and writing lines."""
        self._resources.close()

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return the present numbers of each query; docs/reference/log-records.md names them."""
        with self._lock:
            return {name: _numbers(name, query) for name, query in self._queries.items()}

    def wrote(self, query: str, files: Iterable[Any]) -> None:
        """Count the changes in files that a query with ``mode=manifest`` has written.

        Spark does not tell a listener the rows' contents. So call this in ``foreachBatch``.

        Parameters
        ----------
        query : str
            The query's name.
        files : iterable of pyspark.sql.Row
            Rows of its DataFrame, with the columns ``table`` and ``rows``.
        """
        tables: dict[str, int] = {}
        for file in files:
            tables[file["table"]] = tables.get(file["table"], 0) + file["rows"]
        with self._lock:
            entry = self._queries.get(query)
            if entry is not None:
                entry.count(tables)
                return
            waiting = self._written.setdefault(query, {})
            for name, number in tables.items():
                waiting[name] = waiting.get(name, 0) + number

    # --- what Spark tells ------------------------------------------------------------------------

    def onQueryStarted(self, event: Any) -> None:
        """See `StreamingQueryListener`."""
        with self._lock:
            self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: Any) -> None:
        """See `StreamingQueryListener`."""
        report = json.loads(event.progress.json)
        sources = [source for source in report["sources"] if _is_ours(source)]
        for number, source in enumerate(sources, 1):
            name = report.get("name") or report["id"]
            self._take(name if number == 1 else f"{name} ({number})", source, report)

    def onQueryIdle(self, event: Any) -> None:
        """See `StreamingQueryListener`: the query has read all of the change log."""
        with self._lock:
            for query in self._queries.values():
                if query.id == str(event.id):
                    query.progress = query.progress._replace(end_lsn=query.progress.lsn)

    def onQueryTerminated(self, event: Any) -> None:
        """See `StreamingQueryListener`."""
        text = event.exception
        with self._lock:
            query_name = self._names.pop(str(event.id), str(event.id))
            ended = {
                name: query for name, query in self._queries.items() if query.id == str(event.id)
            }
            numbers = {}
            for name, query in ended.items():
                query.is_running = False
                numbers[name] = _numbers(name, query)
            self._forget()
        if not ended and text is not None and "pgoutput" in text:
            numbers = {query_name: {"query": query_name}}  # it failed before its first batch
        for name, fields in numbers.items():
            if text is None:
                _log.info("query %s ends", _shown(name), extra={"event": "stop", "numbers": fields})
            else:
                _log.error("query %s has failed: %s", _shown(name), _shown(raised_in(text)),
                           extra={"event": "error", "numbers": fields})  # fmt: skip

    # --- queries ---------------------------------------------------------------------------------

    def _take(self, name: str, source: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        with self._lock:
            query = self._queries.get(name)
            is_new = query is None or not query.is_running
            if query is None:
                labels = {key: source["endOffset"][key] for key in ("database", "slot")}
                query = self._queries[name] = _Query(report["id"], labels)
                query.next_line = time.monotonic() + self._interval
            query.id, query.is_running = report["id"], True
            query.take(source, report)
            query.count(self._written.pop(name, {}))
            numbers = _numbers(name, query)
            is_time = time.monotonic() >= query.next_line
            if is_time:
                query.next_line = time.monotonic() + self._interval
                rate = query.meter.rates(query.progress).all
        if is_new:
            labels = query.labels
            begins = (source["startOffset"] or {}).get("position", "its beginning")
            _log.info(
                "query %s reads slot %s of database %s, from %s on", _shown(name),
                _shown(labels["slot"]), _shown(labels["database"]), begins,
                extra={"event": "start", "numbers": {"query": name, **labels}},
            )  # fmt: skip
        if is_time:
            _log.info(
                "query %s: %s, up to %s; %s changes/s; last batch %.2f s", _shown(name),
                _lag(numbers), numbers["lsn"], f"{rate:,.0f}", numbers["write_seconds"],
                extra={"event": "progress",
                       "numbers": {**numbers, "changes_per_second": round(rate, 1)}},
            )  # fmt: skip

    def _forget(self) -> None:
        """Forget the oldest queries that have ended."""
        ended = [name for name, query in self._queries.items() if not query.is_running]
        for name in ended[:-_ENDED]:
            del self._queries[name]

    def _watched(self) -> dict[str, WatchedQuery]:
        from pgoutput_fast.watching.metrics import WatchedQuery

        with self._lock:
            return {
                name: WatchedQuery(query.figures(), query.is_running, dict(query.labels))
                for name, query in self._queries.items()
            }


def _is_ours(source: Mapping[str, Any]) -> bool:
    """Return whether a source's offsets are positions in a change log."""
    offset = source.get("endOffset")
    return isinstance(offset, dict) and {"position", "tables", *_IDENTITY} <= offset.keys()


def _numbers(name: str, query: _Query) -> dict[str, Any]:
    figures = query.figures().as_dict()
    return {"query": name, "batch": query.batch, **{key: figures[key] for key in _SHOWN}}


def _micros(text: str) -> int:
    """Return a point in time in microseconds since 1970."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return (datetime.datetime.fromisoformat(text) - epoch) // datetime.timedelta(microseconds=1)


def _lag(numbers: Mapping[str, Any]) -> str:
    seconds = numbers["lag_seconds"]
    behind = "" if seconds is None else f", {seconds:.1f} s"
    return f"lag {counted(numbers['lag_bytes'], 'byte')}{behind}"


def _shown(text: str) -> str:
    return printable(without_passwords(text))


__all__ = ["PgOutputQueryListener"]
