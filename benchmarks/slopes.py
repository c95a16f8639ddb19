"""Measure from a slot to tables, by the slope between two backlogs, beside a floor.

The slope leaves out what a start costs: it is the difference in CPU of two backlogs, divided by the
difference in changes. The floor is what nobody can do without: a loop that only receives the
frames, and a target that only writes the rows which its tables have in the end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pgoutput_fast import parse_lsn
from pgoutput_fast.embedded import EmbeddedServer

from .harness import Case, optional_module, peak_of
from .peers import drain, site

_SMALLER = 0.25
"""The smaller backlog has this part of the changes of the other one."""
_TARGETS = {"DuckDB": "duckdb:{}/tables.duckdb", "Delta": "{}/lake"}
_RECEIVER, _DEBEZIUM = "psycopg 3, SO_RCVLOWAT", "Debezium, JSON"


_SNAPSHOT_ROWS = 2_000_000


class _Used(NamedTuple):
    """CPU seconds of all processes but the server's, for a number of changes or rows."""

    cpu: float
    changes: int
    memory: float = 0.0
    """The greatest resident size of the sync, in bytes."""


@contextlib.contextmanager
def slot_cases(scale: float) -> Iterator[list[Case]]:
    """Yield the cases for narrow and mixed rows: both targets, and the floor of each."""
    psycopg = optional_module("psycopg")
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(bindir=site.find_server(), settings=site.SETTINGS, tcp=True) as server,
    ):

        def used(measure: _Measure, name: str, part: float) -> _Used:
            place = Path(directory, f"{next(numbers)}")
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE d{place.name}")
            try:
                with psycopg.connect(server.dsn(f"d{place.name}"), autocommit=True) as connection:
                    try:
                        return measure(_Backlog(server, place, connection, name, scale * part))
                    finally:
                        connection.execute(
                            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                            "WHERE database = current_database() AND NOT active"
                        )
                        shutil.rmtree(place)
            finally:
                with (
                    psycopg.connect(server.dsn(), autocommit=True) as connection,
                    contextlib.suppress(psycopg.Error),  # a peer is still ending
                ):
                    connection.execute(f"DROP DATABASE d{place.name} WITH (FORCE)")

        def slope(measure: _Measure, name: str) -> dict[str, float]:
            small, large = (used(measure, name, part) for part in (_SMALLER, 1))
            cpu = (large.cpu - small.cpu) / (large.changes - small.changes)
            return {"cpu": cpu, "memory": large.memory}

        yield [
            Case(f"slot: {name}/{who}", functools.partial(slope, measure, name))
            for name in ("narrow", "mixed")
            for who, measure in _measures().items()
        ] + [
            Case(f"snapshot/{who}", functools.partial(slope, measure, ""))
            for who, measure in _snapshots().items()
        ]


class _Backlog:
    """A database whose tables are copied into a target, and then get changes.

    The changes wait in two slots: in that of the sync, and in another one for the floor.
    """

    def __init__(
        self, server: EmbeddedServer, place: Path, connection: Any, name: str, scale: float
    ) -> None:
        self._server, self._place, self._connection = server, place, connection
        self._database, self._name, self._scale = f"d{place.name}", name, scale
        place.mkdir()
        connection.execute(f"{site.TABLES}; CREATE TABLE finish_all (id int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self._slot("bare")]
        )

    def _slot(self, name: str) -> str:
        return f"{name}_{self._database}"

    def sync(self, target: str, *options: str) -> _Used:
        """Run a sync up to now; return what it used for the changes that it reports."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pgoutput_fast", "sync", "--until", "now"),
                *("--dsn", self._server.dsn(self._database), "--slot", self._slot("sync")),
                *("--publication", "p", "--log-format", "json", *options),
                *("--to", target.format(self._place)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=(self._place / "report").open("w"),
        )
        ended, memory = 0, 0
        while not ended:
            # Not ru_maxrss: the size of this process would count, too.
            memory = max(memory, peak_of(process.pid))
            time.sleep(0.02)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
        told = (self._place / "report").read_text()
        if process.returncode:
            raise RuntimeError(f"the sync failed: {told[-2000:]}")
        report: dict[str, Any] = json.loads(told.splitlines()[-1])
        assert not report["stale"], report
        return _Used(used.ru_utime + used.ru_stime, report["changes"], memory)

    def make_rows(self) -> int:
        """Make a table that has rows before it is copied; return how many."""
        rows = round(_SNAPSHOT_ROWS * self._scale)
        self._connection.execute(site.COPIED.format(rows=rows))
        return rows

    def make_changes(self) -> None:
        """Make the changes, and a last one."""
        for statement in site.parts(site.statements(self._name, self._scale)):
            self._connection.execute(statement)
        with self._connection.transaction():
            self._connection.execute("INSERT INTO finish_all VALUES (1)")
            (self._end,) = self._connection.execute(
                "SELECT pg_current_wal_insert_lsn()::text"
            ).fetchone()

    def copy(self) -> float:
        """Receive the rows of that table, and do nothing with them; return the CPU seconds."""
        before = time.process_time()
        with self._connection.cursor().copy("COPY copied TO STDOUT (FORMAT binary)") as rows:
            for _ in rows:
                pass
        return time.process_time() - before

    def drain(self, who: str) -> _Used:
        """Let a peer of the live benchmark drain the other slot."""
        peer = drain.peers()[who]
        answer, cpu = drain.answer_of(
            peer,
            {
                **drain.environment_of(self._server, self._database),
                "DRAIN_MODE": peer.mode,
                "DRAIN_SLOT": self._slot("bare"),
                "DRAIN_PUBLICATION": "p",
                "DRAIN_END_LSN": str(parse_lsn(self._end)),
            },
        )
        return _Used(cpu, answer["changes"])

    def tables(self, target: str) -> list[Any]:
        """Return what the target's tables have, each as a pyarrow.Table."""
        path = target.format(self._place).removeprefix("duckdb:")
        if not target.startswith("duckdb:"):
            deltalake = optional_module("deltalake")
            logs = sorted(Path(path).rglob("_delta_log"))
            return [deltalake.DeltaTable(log.parent).to_pyarrow_table() for log in logs]
        with optional_module("duckdb").connect(path, read_only=True) as database:
            names = database.execute(
                "SELECT schema_name, table_name FROM duckdb_tables() WHERE NOT internal"
            ).fetchall()
            return [
                database.sql(f'SELECT * FROM "{schema}"."{name}"').to_arrow_table()
                for schema, name in names
            ]

    def write(self, tables: list[Any], target: str) -> None:
        """Write tables to a new target of the same kind, and do nothing else."""
        path = f"{target.format(self._place)}.floor".removeprefix("duckdb:")
        if not target.startswith("duckdb:"):
            deltalake = optional_module("deltalake")
            for number, table in enumerate(tables):
                deltalake.write_deltalake(f"{path}/{number}", table)
            return
        with optional_module("duckdb").connect(path) as database:
            for number, table in enumerate(tables):
                database.register("written", table)
                database.execute(f"CREATE TABLE t{number} AS SELECT * FROM written")


_Measure = Callable[[_Backlog], _Used]


def _measures() -> dict[str, _Measure]:
    """Return the measurements by name."""
    measures: dict[str, _Measure] = {}
    for name, target in _TARGETS.items():
        measures[name] = functools.partial(_sync, target, ())
        measures[f"{name}, state alone"] = functools.partial(_sync, target, ("--keep", "state"))
        measures[f"{name}, floor"] = functools.partial(_floor, target)
    return {**measures, _DEBEZIUM: _debezium}


def _snapshots() -> dict[str, _Measure]:
    """Return the measurements of a snapshot by name."""
    measures: dict[str, _Measure] = {}
    for name, target in _TARGETS.items():
        measures[name] = functools.partial(_snapshot, target)
        measures[f"{name}, floor"] = functools.partial(_snapshot_floor, target)
    return measures


def _sync(target: str, options: tuple[str, ...], backlog: _Backlog) -> _Used:
    """A sync: it captures the slot, and writes the tables."""
    backlog.sync(target, *options)
    backlog.make_changes()
    return backlog.sync(target, *options)


def _snapshot(target: str, backlog: _Backlog) -> _Used:
    """A sync that copies a table of 19 columns."""
    rows = backlog.make_rows()
    return backlog.sync(target)._replace(changes=rows)


def _snapshot_floor(target: str, backlog: _Backlog) -> _Used:
    """A loop that receives the rows, and a target that writes what its tables then have."""
    rows = backlog.make_rows()
    backlog.sync(target)
    tables = backlog.tables(target)
    received, before = backlog.copy(), time.process_time()
    backlog.write(tables, target)
    return _Used(received + time.process_time() - before, rows)


def _debezium(backlog: _Backlog) -> _Used:
    """Debezium Engine, which makes a JSON text of each change, and writes it nowhere."""
    backlog.make_changes()
    return backlog.drain(_DEBEZIUM)


def _floor(target: str, backlog: _Backlog) -> _Used:
    """A loop that receives the frames, and a target that writes what its tables then have."""
    backlog.sync(target)
    backlog.make_changes()
    backlog.sync(target)
    tables = backlog.tables(target)
    received = backlog.drain(_RECEIVER)
    before = time.process_time()
    backlog.write(tables, target)
    return received._replace(cpu=received.cpu + time.process_time() - before)
