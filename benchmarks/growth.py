"""Measure how the cost of a sync grows with its tables, its segments and the columns of a table."""

from __future__ import annotations

import argparse
import contextlib
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgoutput_fast import apply, testing
from pgoutput_fast.changelog.merging import merges
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

from . import harness
from .harness import Results, optional_module
from .peers import site

if TYPE_CHECKING:
    from typing_extensions import Self

TABLES = (10, 100, 1000)
SEGMENTS = (100, 1000, 10_000)
COLUMNS = (10, 500, 1500)
_IDLE = 10.0  # seconds
_WINDOWS = 5  # of one row each
_TIMEOUT = 600.0  # seconds
_METADATA = SegmentMetadata(
    "7000000000000000001", "shop", "s", ("p",), 180004, "UTF8", {}, {"proto_version": "1"}
)


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure all three; `scale` makes the largest ones smaller."""
    optional_module("duckdb")
    psycopg = optional_module("psycopg")
    scale = options.scale or (0.1 if options.quick else 1)
    for count in _up_to(TABLES, scale):
        harness.progress(f"growth: {count} tables")
        _measure_tables(psycopg, count, results)
    for count in _up_to(SEGMENTS, scale):
        harness.progress(f"growth: {count} segments")
        _measure_segments(count, results)
    for count in _up_to(COLUMNS, scale):
        harness.progress(f"growth: {count} columns")
        _measure_columns(count, results)
    results.described["growth"] = (
        "CPU seconds of the process that captures and syncs into DuckDB; of merges, of that alone"
    )


def _up_to(counts: tuple[int, ...], scale: float) -> list[int]:
    return [count for count in counts if count <= counts[-1] * scale]


@contextlib.contextmanager
def _cpu(results: Results, name: str, *, of: int = 1) -> Iterator[None]:
    """Add the CPU seconds that this process takes meanwhile, divided by a number."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    results.add(f"growth: {name}", {"cpu": cpu / of})


class _Running:
    """A sync in a thread of its own, until the block ends."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self._stop = threading.Event()
        self._told: apply.SyncProgress | None = None
        self._error: BaseException | None = None

        def work() -> None:
            try:
                apply.sync(*given, **options, stop=self._stop, interval=0.1, progress=self._note)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                self._error = error

        self._thread = threading.Thread(target=work)

    def _note(self, told: apply.SyncProgress) -> None:
        self._told = told

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait(lambda told: True)
        time.sleep(3)  # what it does at its start is no part of an idle sync
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, is_so: Callable[[apply.SyncProgress], bool]) -> None:
        """Wait until it has told something."""
        end = time.monotonic() + _TIMEOUT
        while self._told is None or not is_so(self._told):
            if self._error is not None:
                raise self._error
            if time.monotonic() > end:
                raise TimeoutError(f"the sync has told {self._told}")
            time.sleep(0.01)

    @property
    def changes(self) -> int:
        """That it has written."""
        return 0 if self._told is None else self._told.changes


def _measure_tables(psycopg: Any, count: int, results: Results) -> None:
    """The first copies, an idle sync, windows of one row, and a row in each table."""
    shown = f"{count} tables"
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(
            bindir=site.find_server(),
            settings={**site.SETTINGS, "max_locks_per_transaction": 256},
        ) as server,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
    ):
        for first in range(0, count, 100):
            made = range(first, min(first + 100, count))
            connection.execute(
                ";".join(f"CREATE TABLE t{i} (id int PRIMARY KEY, v text)" for i in made)
            )
            connection.execute(";".join(f"INSERT INTO t{i} VALUES (1, 'a')" for i in made))
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        given: dict[str, Any] = {
            "slot": "s", "publications": ["p"], "target": f"duckdb:{directory}/tables.duckdb",
        }  # fmt: skip
        with _cpu(results, f"first copy/{shown}"):
            done = apply.sync(server.dsn(), until="now", **given)
        assert len(done.tables) == count, done
        with _Running(server.dsn(), max_delay=0.1, **given) as running:
            with _cpu(results, f"idle, each second/{shown}", of=int(_IDLE)):
                time.sleep(_IDLE)
            with _cpu(results, f"a window of one row/{shown}", of=_WINDOWS):
                for number in range(_WINDOWS):
                    wanted = running.changes + 1
                    connection.execute(f"INSERT INTO t{number} VALUES (2, 'b')")
                    running.wait(lambda told, wanted=wanted: told.changes >= wanted)  # type: ignore[misc]
            with _cpu(results, f"a row in each table/{shown}"):
                wanted = running.changes + count
                rows = ";".join(f"INSERT INTO t{i} VALUES (3, 'c')" for i in range(count))
                connection.execute(f"BEGIN; {rows}; COMMIT")
                running.wait(lambda told: told.changes >= wanted)


def _given(segments: Path) -> dict[str, Any]:
    return {"segments": segments, "target": f"duckdb:{segments}.duckdb"}


def _measure_segments(count: int, results: Results) -> None:
    """An idle sync beside so many segments, and their merges."""
    table = testing.Table("t", {"id": "int4"}, 16384, key=["id"])
    with tempfile.TemporaryDirectory() as directory:
        segments = Path(directory, "segments")
        with contextlib.closing(
            SegmentWriter(segments, _METADATA, confirmed_flush_lsn=900)
        ) as writer:
            for lsn in range(1000, 1000 * (count + 1), 1000):
                writer.write(lsn, testing.begin(7, lsn, lsn))
                writer.write(0, table.relation())
                writer.write(lsn - 5, testing.insert(table, [lsn]))
                writer.write(lsn + 10, testing.commit(lsn, lsn + 10, lsn))
                writer.flush()
        given: dict[str, Any] = {
            "segments": segments,
            "target": f"duckdb:{directory}/tables.duckdb",
        }
        apply.sync(until="now", uncopied="empty", **given)
        with (
            _Running(**given),
            _cpu(results, f"idle, each second/{count} segments", of=int(_IDLE)),
        ):
            time.sleep(_IDLE)
        with _cpu(results, f"merges/{count} segments"):
            for _ in merges(segments, 1 << 30):
                pass


def _measure_columns(count: int, results: Results) -> None:
    """Windows of one row of a table with so many columns."""
    columns = {"id": "int4", **{f"c{i}": "int4" for i in range(1, count)}}
    table = testing.Table("t", columns, 16384, key=["id"])
    with tempfile.TemporaryDirectory() as directory:
        segments = Path(directory, "segments")
        given: dict[str, Any] = {
            "segments": segments,
            "target": f"duckdb:{directory}/tables.duckdb",
        }
        with contextlib.closing(
            SegmentWriter(segments, _METADATA, confirmed_flush_lsn=900)
        ) as writer:

            def window(lsn: int) -> None:
                writer.write(lsn, testing.begin(7, lsn, lsn))
                writer.write(0, table.relation())
                writer.write(lsn - 5, testing.insert(table, [lsn] * count))
                writer.write(lsn + 10, testing.commit(lsn, lsn + 10, lsn))
                writer.flush()
                apply.sync(until="now", uncopied="empty", **given)

            window(1000)
            with _cpu(results, f"a window of one row/{count} columns", of=_WINDOWS):
                for number in range(_WINDOWS):
                    window(2000 + 1000 * number)
