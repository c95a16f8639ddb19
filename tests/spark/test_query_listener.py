"""What a listener shows of streaming queries over the source `pgoutput`."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.errors import Argument
from pgoutput_fast.spark import PgOutputDataSource, PgOutputQueryListener

pytest.importorskip("prometheus_client")

pytestmark = [
    pytest.mark.spark, pytest.mark.filterwarnings("ignore::FutureWarning"),
]  # fmt: skip

T = testing.Table("t", {"id": "int4", "v": "text"}, 16390, key=["id"])
OTHER = testing.Table("other", {"id": "int4"}, 16391, key=["id"])
COMMITTED = datetime.datetime(2000, 1, 1, 0, 0, 5, tzinfo=datetime.timezone.utc)
LOGGER = "pgoutput_fast.spark.query_listener"


def sample(listener: PgOutputQueryListener) -> dict[str, float]:
    """What Prometheus would read, by the names of metrics with their labels."""
    assert listener.url is not None
    with urllib.request.urlopen(listener.url) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


@pytest.fixture
def listener() -> Iterator[PgOutputQueryListener]:
    with contextlib.closing(PgOutputQueryListener(metrics_port=0, log_interval=0)) as found:
        yield found


def offset(lsn: int, **more: Any) -> dict[str, Any]:
    return {
        "position": pf.format_lsn(lsn), "tables": {}, "system_identifier": "7", "database": "shop",
        "slot": "s", **more,
    }  # fmt: skip


def progress(
    batch: int, start: int | None, end: int, newest: int, rows: int = 0, name: str | None = "q",
    mode: str = "table", table: str | None = "public.t", **more: Any,
) -> Any:  # fmt: skip
    """An event as Spark 4.2 makes it, of what matters."""
    told = {"mode": mode, "table": table, "committed": COMMITTED.isoformat(), **more}
    source = {
        "description": "PythonMicroBatchStreamWithTriggerAvailableNow@1", "numInputRows": rows,
        "startOffset": None if start is None else offset(start), "endOffset": offset(end),
        "latestOffset": offset(newest, **told),
    }  # fmt: skip
    text = {"id": "1-2", "name": name, "batchId": batch, "durationMs": {"triggerExecution": 250},
            "sources": [source]}  # fmt: skip
    return SimpleNamespace(progress=SimpleNamespace(json=json.dumps(text)))


def ended(error: str | None = None, id: str = "1-2") -> Any:
    return SimpleNamespace(id=id, runId="3", exception=error, errorClassOnException=None)


def test_numbers_of_batches(listener: PgOutputQueryListener) -> None:
    listener.onQueryProgress(progress(0, None, 1210, 1230, 7))
    found = listener.numbers()["q"]
    ago = (datetime.datetime.now(datetime.timezone.utc) - COMMITTED).total_seconds()
    assert found.pop("lag_seconds") == pytest.approx(ago, abs=5)
    assert found == {
        "query": "q", "batch": 0, "lag_bytes": 20, "changes": 7, "windows": 1,
        "write_seconds": 0.25, "lsn": "0/4BA", "tables": {"public.t": 7},
    }  # fmt: skip
    listener.onQueryProgress(progress(1, 1210, 1230, 1230, 5))
    # An event without a batch counts nothing.
    listener.onQueryProgress(progress(1, 1230, 1230, 1230, 5))
    found = listener.numbers()["q"]
    assert (found["changes"], found["windows"], found["tables"]) == (12, 2, {"public.t": 12})
    assert (found["lag_bytes"], found["lag_seconds"]) == (0, 0.0)


def test_metrics_have_the_names_of_a_syncs(listener: PgOutputQueryListener) -> None:
    listener.onQueryProgress(progress(0, None, 1210, 1230, 7))
    listener.onQueryProgress(progress(4, None, 900, 900, 1, name="r", table="public.u"))
    found = sample(listener)
    assert {name: value for name, value in found.items() if "created" not in name
            and "seconds{" not in name}.items() >= {
        'pgoutput_fast_sync_up{query="q"}': 1.0,
        'pgoutput_fast_sync_lag_bytes{query="q"}': 20.0,
        'pgoutput_fast_sync_lag_bytes{query="r"}': 0.0,
        'pgoutput_fast_sync_lsn{query="q"}': 1210.0,
        'pgoutput_fast_sync_windows_total{query="q"}': 1.0,
        'pgoutput_fast_sync_changes_total{query="r"}': 1.0,
        'pgoutput_fast_sync_table_changes_total{query="q",table="public.t"}': 7.0,
        'pgoutput_fast_sync_table_changes_total{query="r",table="public.u"}': 1.0,
    }.items()  # fmt: skip
    assert found['pgoutput_fast_sync_window_seconds{query="q"}'] == 0.25
    assert found['pgoutput_fast_sync_lag_seconds{query="q"}'] > 8e8
    newest = found['pgoutput_fast_sync_last_commit_timestamp_seconds{query="q"}']
    assert newest == COMMITTED.timestamp()
    (info,) = (
        name for name in found if name.startswith("pgoutput_fast_sync_info") and '"q"' in name
    )
    labels = f'database="shop",mode="table",query="q",slot="s",version="{pf.__version__}"'
    assert ",".join(sorted(info.partition("{")[2].rstrip("}").split(","))) == labels
    listener.onQueryTerminated(ended())
    assert sample(listener)['pgoutput_fast_sync_up{query="q"}'] == 0.0


def test_an_idle_query_has_all(listener: PgOutputQueryListener) -> None:
    listener.onQueryProgress(progress(0, None, 1210, 1230, 7))
    listener.onQueryIdle(SimpleNamespace(id="1-2", runId="3", timestamp=""))
    assert listener.numbers()["q"]["lag_bytes"] == 0


def test_files_are_counted_by_their_rows(listener: PgOutputQueryListener) -> None:
    """`foreachBatch` comes before Spark tells of the first batch."""
    files = [{"table": "public.t", "rows": 3}, {"table": "public.t", "rows": 2},
             {"table": "public.u", "rows": 1}]  # fmt: skip
    listener.wrote("q", files)
    listener.onQueryProgress(progress(0, None, 1210, 1210, 3, mode="manifest", table=None))
    listener.wrote("q", files[:1])
    found = listener.numbers()["q"]
    assert (found["tables"], found["changes"]) == ({"public.t": 8, "public.u": 1}, 9)


def test_other_queries_are_passed_over(listener: PgOutputQueryListener) -> None:
    source = {"startOffset": {"0": 1}, "endOffset": {"0": 2}, "latestOffset": None}
    files = {"startOffset": None, "endOffset": None}
    text = {"id": "1", "name": "k", "batchId": 1, "durationMs": {}, "sources": [source, files]}
    listener.onQueryProgress(SimpleNamespace(progress=SimpleNamespace(json=json.dumps(text))))
    assert listener.numbers() == {}
    # Of two sources each has its numbers.
    both = json.loads(progress(0, None, 10, 30, 7).progress.json)
    both["sources"] += [source, *json.loads(progress(0, None, 20, 30, 1).progress.json)["sources"]]
    listener.onQueryProgress(SimpleNamespace(progress=SimpleNamespace(json=json.dumps(both))))
    found = {name: one["lag_bytes"] for name, one in listener.numbers().items()}
    assert found == {"q": 20, "q (2)": 10}


def test_old_queries_are_forgotten(listener: PgOutputQueryListener) -> None:
    for number in range(30):
        event = progress(0, None, 10, 30, 7, name=f"q{number}")
        event.progress.json = event.progress.json.replace("1-2", f"id{number}")
        listener.onQueryProgress(event)
        listener.onQueryTerminated(SimpleNamespace(id=f"id{number}", exception=None))
    assert list(listener.numbers()) == [f"q{number}" for number in range(10, 30)]


def test_lines_of_a_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    level = logging.getLogger(LOGGER).level
    with contextlib.closing(PgOutputQueryListener(log_format="json", log_interval=0)) as listener:
        listener.onQueryStarted(SimpleNamespace(id="1-2", name="q"))
        listener.onQueryProgress(progress(0, None, 1210, 1230, 7))
        listener.onQueryTerminated(ended(
            "org.apache.spark.SparkException: Job aborted\nTraceback (most recent call last):\n"
            "pgoutput_fast.errors.PgOutputError: can't reach postgresql://me:secret@host/shop\n"
            "at org.apache.spark.Task"
        ))  # fmt: skip
        listener.onQueryStarted(SimpleNamespace(id="3", name="fails"))
        listener.onQueryTerminated(ended("[PYTHON] in pgoutput_fast/spark: no such slot", "3"))
        listener.onQueryStarted(SimpleNamespace(id="4", name="other"))
        listener.onQueryTerminated(ended("[PYTHON] something else's", "4"))
    assert logging.getLogger(LOGGER).level == level
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(one["event"], one["level"], one["query"]) for one in lines] == [
        ("start", "info", "q"), ("progress", "info", "q"), ("error", "error", "q"),
        ("error", "error", "fails"),
    ]  # fmt: skip
    assert {one["logger"] for one in lines} == {LOGGER}
    begun, told, failed, _ = lines
    assert (begun["slot"], begun["database"]) == ("s", "shop")
    assert (told["lag_bytes"], told["tables"], told["lsn"]) == (20, {"public.t": 7}, "0/4BA")
    assert told["changes_per_second"] > 0
    assert failed["message"] == (
        "query q has failed: pgoutput_fast.errors.PgOutputError: can't reach "
        "postgresql://me:***@host/shop"
    )
    # Records that other handlers take have no secret either.
    assert "secret" not in caplog.text


def test_lines_come_no_more_often_than_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with (
        contextlib.closing(PgOutputQueryListener(log_interval=1000)) as listener,
        caplog.at_level(logging.INFO, LOGGER),
    ):
        for batch in range(3):
            listener.onQueryProgress(progress(batch, batch or None, batch + 1, 9, 7))
    events: list[Any] = [one.__dict__["event"] for one in caplog.records]
    assert events == ["start"]


def test_wrong_arguments_of_a_listener() -> None:
    wrong: Any = "xml"
    with expect_error(parameter="log_format"):
        PgOutputQueryListener(log_format=wrong)
    with expect_error(parameter="log_interval"):
        PgOutputQueryListener(log_interval=-1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = [Argument("metrics_host")]
        with expect_error(code="io_failed", parameter="metrics_port", options=options):
            PgOutputQueryListener(metrics_port=port)


# --- with Spark ----------------------------------------------------------------------------------


@pytest.fixture
def watched(spark: Any, listener: PgOutputQueryListener) -> Iterator[PgOutputQueryListener]:
    spark.dataSource.register(PgOutputDataSource)
    spark.streams.addListener(listener)
    yield listener
    spark.streams.removeListener(listener)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def run(
    spark: Any, made: MadeDirectory, name: str, each: Callable[[Any], Any], **options: str
) -> None:
    """Read what is there, a segment in each batch."""
    frame = spark.readStream.format("pgoutput").options(
        segments=str(made.directory), maxBytesPerTrigger="1", **options
    )
    query = (
        frame.load().writeStream.queryName(name).trigger(availableNow=True)
        .foreachBatch(lambda batch, _: each(batch))
        .option("checkpointLocation", str(made.directory.with_name(name))).start()
    )  # fmt: skip
    query.awaitTermination()


@pytest.mark.slow
def test_what_spark_tells_of_queries(
    spark: Any, watched: PgOutputQueryListener, made: MadeDirectory, tmp_path: Path,
) -> None:  # fmt: skip
    for number in range(3):
        made.commit(1200 + 20 * number, T.relation(), OTHER.relation(),
                    testing.insert(T, [number, "x"]), testing.insert(OTHER, [number]),
                    testing.insert(OTHER, [number + 10]))  # fmt: skip
    run(spark, made, "changes", lambda batch: batch.collect(), table="public.t")
    run(spark, made, "files", lambda batch: watched.wrote("files", batch.collect()),
        mode="manifest", output=str(tmp_path / "out"))  # fmt: skip
    up = 'pgoutput_fast_sync_up{query="files"}'
    wait_until(lambda: sample(watched).get(up) == 0.0)
    found = watched.numbers()
    assert {name: (one["windows"], one["lsn"], one["lag_bytes"], one["tables"])
            for name, one in found.items()} == {
        "changes": (3, "0/4E2", 0, {"public.t": 3}),
        "files": (3, "0/4E2", 0, {"public.t": 3, "public.other": 6}),
    }  # fmt: skip
    assert all(0.01 < one["write_seconds"] < 60 for one in found.values())
    newest = 'pgoutput_fast_sync_last_commit_timestamp_seconds{query="changes"}'
    assert sample(watched)[newest] == COMMITTED.timestamp()


@pytest.mark.slow
def test_how_far_a_query_is_behind(
    spark: Any, watched: PgOutputQueryListener, made: MadeDirectory,
) -> None:  # fmt: skip
    """In the middle of what is there: the directory's end is known to the listener."""
    for number in range(3):
        made.commit(1200 + 20 * number, T.relation(), testing.insert(T, [number, "x"]))
    seen = []

    def look(batch: Any) -> None:
        batch.collect()
        # Of the batches before this one it was told; they come in another thread.
        wait_until(lambda: watched.numbers().get("slow", {}).get("windows", 0) >= len(seen))
        seen.append(watched.numbers().get("slow", {}).get("lag_bytes"))

    run(spark, made, "slow", look, table="public.t")
    assert seen == [None, 40, 20]
    wait_until(lambda: watched.numbers()["slow"]["lag_bytes"] == 0)
