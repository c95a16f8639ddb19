"""The Prometheus metrics of a running capture, sync or query, and the HTTP server for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .. import __version__
from ..errors import Argument, PgOutputError, printable

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        InfoMetricFamily,
        Metric,
    )
except ImportError as error:
    raise PgOutputError(
        f"metrics need prometheus-client ({error})",
        code="missing_package",
        hint="Install the extra pgoutput-fast[metrics]",
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ..replication.server_position import ServerPosition
    from .figures import Figures
    from .sync_figures import SyncFigures


class MetricKind(NamedTuple):
    """A metric: name without the prefix, type, help text, and a function that returns its value.

    If the value is None, it is not known, and the metric is left out. A dict has one value for each
    table, by the table's name.
    """

    name: str
    type: Literal["gauge", "counter"]
    help: str
    value: Callable[[Any], float | dict[str, float] | None]


PREFIX = "pgoutput_fast_capture_"

METRICS = (
    MetricKind("up", "gauge", "1 while the stream has a connection, else 0",
               lambda figures: figures.progress.connected),
    MetricKind("lag_bytes", "gauge", "Bytes of the server's log that are not captured yet",
               lambda figures: figures.lag_bytes),
    MetricKind("lag_seconds", "gauge",
               "Lag in seconds: all older commits are captured; 0 if all commits are",
               lambda figures: figures.lag_seconds),
    MetricKind("durable_lsn", "gauge", "LSN up to which everything is durable and acknowledged",
               lambda figures: figures.progress.durable_lsn),
    MetricKind("received_lsn", "gauge", "LSN up to which everything was received",
               lambda figures: figures.progress.received_lsn),
    MetricKind("last_commit_timestamp_seconds", "gauge",
               "Commit time of the newest durable transaction, in seconds since 1970",
               lambda figures: figures.commit_timestamp),
    MetricKind("changes_total", "counter", "Insert, Update, Delete and Truncate messages received",
               lambda figures: figures.progress.changes),
    MetricKind("transactions_total", "counter", "Whole transactions received",
               lambda figures: figures.progress.transactions),
    MetricKind("bytes_total", "counter", "Bytes of the frames received",
               lambda figures: figures.progress.bytes),
    MetricKind("segments_total", "counter", "Segments completed",
               lambda figures: figures.progress.segments),
    MetricKind("reconnects_total", "counter", "Connections made after one was lost",
               lambda figures: figures.progress.reconnects),
    MetricKind("open_transactions", "gauge", "Transactions that have not ended, also prepared ones",
               lambda figures: figures.progress.open_transactions),
    MetricKind("spilled_bytes", "gauge", "Bytes in files, of transactions that have not ended",
               lambda figures: figures.progress.spilled_bytes),
    MetricKind("waiting_tables", "gauge", "Tables that wait for their snapshot",
               lambda figures: figures.progress.waiting_tables),
    MetricKind("upload_lag_bytes", "gauge", "Bytes of the server's log not yet in object storage",
               lambda figures: figures.upload_lag_bytes),
)  # fmt: skip


SYNC_PREFIX = "pgoutput_fast_sync_"

SYNC_METRICS = (
    MetricKind("up", "gauge", "1 while tables are kept up to date, else 0", lambda _: 1),
    MetricKind("lag_bytes", "gauge", "Bytes of the server's log that the tables lack",
               lambda figures: figures.lag_bytes),
    MetricKind("lag_seconds", "gauge",
               "Lag in seconds: the tables have all older commits; 0 if they have all",
               lambda figures: figures.lag_seconds),
    MetricKind("lsn", "gauge", "LSN up to which the tables have everything",
               lambda figures: figures.progress.lsn),
    MetricKind("last_commit_timestamp_seconds", "gauge",
               "Commit time of the newest change in the tables, in seconds since 1970",
               lambda figures: figures.commit_timestamp),
    MetricKind("windows_total", "counter", "Windows committed",
               lambda figures: figures.progress.windows),
    MetricKind("window_seconds", "gauge", "Seconds that the last window took",
               lambda figures: figures.progress.write_seconds),
    MetricKind("changes_total", "counter", "Changes written to all tables",
               lambda figures: figures.progress.changes),
    MetricKind("table_changes_total", "counter", "Changes written to a table",
               lambda figures: figures.progress.tables),
    MetricKind("table_write_seconds_total", "counter",
               "Seconds spent on writing rows of a table",
               lambda figures: figures.progress.seconds),
    MetricKind("waiting_tables", "gauge", "Tables that wait for their snapshot",
               lambda figures: len(figures.progress.waiting)),
    MetricKind("stale_tables", "gauge", "Tables whose rows are not known any more",
               lambda figures: len(figures.progress.stale)),
    MetricKind("paused_tables", "gauge", "Tables whose changes wait until somebody acts",
               lambda figures: len(figures.progress.paused)),
    MetricKind("table_paused", "gauge", "1 for each table that is paused",
               lambda figures: dict.fromkeys(figures.progress.paused, 1.0)),
)  # fmt: skip


QUERY_METRICS = tuple(kind for kind in SYNC_METRICS if kind.name in {
    "up", "lag_bytes", "lag_seconds", "lsn", "last_commit_timestamp_seconds", "windows_total",
    "window_seconds", "changes_total", "table_changes_total",
})  # fmt: skip
"""The metrics of a Spark query: those metrics of a sync that a query knows."""


class Collector:
    """Makes the metrics of a capture or sync whenever Prometheus asks.

    Parameters
    ----------
    prefix : str
        The prefix of the metrics' names.
    kinds : sequence of MetricKind
    figures : callable
        Returns the present numbers; None before there are any.
    info : callable
        Returns the help text and the labels of the metric ``info``; None while they are not known.
    """

    def __init__(
        self,
        prefix: str,
        kinds: Sequence[MetricKind],
        figures: Callable[[], Any],
        info: Callable[[], tuple[str, dict[str, str]] | None],
    ) -> None:
        self._prefix, self._kinds, self._figures, self._info = prefix, kinds, figures, info
        self._created = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics whose values are known."""
        figures, info = self._figures(), self._info()
        if info is not None:
            text, labels = info
            labels = {**labels, "version": __version__}
            yield InfoMetricFamily(self._prefix.rstrip("_"), text, labels)
        for kind in self._kinds:
            value = kind.value(figures) if figures is not None else 0 if kind.name == "up" else None
            if value is not None:
                yield self._metric(kind, value)

    def _metric(self, kind: MetricKind, value: float | dict[str, float]) -> Metric:
        name = self._prefix + kind.name
        if isinstance(value, dict):
            samples = [([table], number) for table, number in value.items()]
            return _family(name, kind, ["table"], samples, self._created)
        return _family(name, kind, [], [([], value)], self._created)


def _family(
    name: str,
    kind: MetricKind,
    labels: Sequence[str],
    samples: Iterable[tuple[list[str], float]],
    created: float,
) -> Metric:
    """Make a metric from its samples: pairs of label values and a number."""
    if kind.type == "gauge":
        gauge = GaugeMetricFamily(name, kind.help, labels=labels)
        for of, value in samples:
            gauge.add_metric(list(map(printable, of)), float(value))
        return gauge
    counter = CounterMetricFamily(name, kind.help, labels=labels)
    for of, value in samples:
        counter.add_metric(list(map(printable, of)), float(value), created=created)
    return counter


class WatchedQuery(NamedTuple):
    """A Spark query. Fields: figures, is_running, labels (of its metric `info`)."""

    figures: SyncFigures
    is_running: bool
    labels: dict[str, str]


class QueryCollector:
    """Makes the metrics of Spark queries whenever Prometheus asks.

    The metrics are those of a sync, with the name of the query as a label.

    Parameters
    ----------
    queries : callable
        Returns the queries by name.
    """

    def __init__(self, queries: Callable[[], Mapping[str, WatchedQuery]]) -> None:
        self._queries = queries
        self._created = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics whose values are known."""
        queries = self._queries()
        info = InfoMetricFamily(
            SYNC_PREFIX.rstrip("_"), "What is kept up to date", labels=["query"]
        )
        for name, query in queries.items():
            info.add_metric([printable(name)], {**query.labels, "version": __version__})
        yield info
        for kind in QUERY_METRICS:
            names, samples = ["query"], []
            for name, query in queries.items():
                value = float(query.is_running) if kind.name == "up" else kind.value(query.figures)
                if isinstance(value, dict):
                    names = ["query", "table"]
                    samples += [([name, table], number) for table, number in value.items()]
                elif value is not None:
                    samples.append(([name], value))
            if samples:
                yield _family(SYNC_PREFIX + kind.name, kind, names, samples, self._created)


def capture_collector(
    figures: Callable[[], Figures | None], position: Callable[[], ServerPosition | None], slot: str
) -> Collector:
    """Make the collector of a capture.

    Parameters
    ----------
    figures : callable
        Returns the present numbers; None before the stream has begun.
    position : callable
        Returns the server's last answer; None before the first one.
    slot : str
    """

    def info() -> tuple[str, dict[str, str]] | None:
        server_position = position()
        if server_position is None:
            return None
        return "What is captured", {"slot": slot, "database": server_position.database}

    return Collector(PREFIX, METRICS, figures, info)


def sync_collector(figures: Callable[[], SyncFigures | None], target: str) -> Collector:
    """Make the collector of a sync.

    Parameters
    ----------
    figures : callable
        Returns the present numbers; None before there are any.
    target : str
    """
    return Collector(
        SYNC_PREFIX, SYNC_METRICS, figures, lambda: ("What is kept up to date", {"target": target})
    )


class MetricsServer:
    """An HTTP server for Prometheus, with threads of its own.

    Parameters
    ----------
    host : str
    port : int
        0 chooses a free port.
    collectors : sequence of Collector or QueryCollector

    Attributes
    ----------
    url : str

    Raises
    ------
    PgOutputError
        The server can't listen on this host and port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        collectors: Sequence[Collector | QueryCollector],
    ) -> None:
        registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:
            raise PgOutputError(
                f"metrics can't be served at {host} port {port}: "
                f"{getattr(error, 'strerror', None) or error}",
                code="io_failed",
                parameter="metrics_port",
                hint=("Give another port, or another ", Argument("metrics_host")),
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
