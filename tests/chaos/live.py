"""A capture with an initial snapshot under load, proved against the server.

    python tests/chaos/live.py [--versions N …] [--scale N] [--seconds N] [--minutes N] [--seed N]

pgbench writes while `pgoutput-fast capture --snapshot initial` copies the tables, and meanwhile
tables join and leave the publication, are truncated, rewritten, renamed, dropped and made again;
partitions, row filters and lists of columns change. When the load has ended and all is captured,
`pgoutput-fast verify` must find every table equal. The exceptions are those of which no stream
tells: rows that come with a partition that is attached, and the like. For these verify must say so,
and they must be equal once they are copied again. Beside that, the frames of some tables are
applied by a parser that shares nothing with the package, and compared with the text of the server's
COPY.

Two syncs follow the directory all the while, into a DuckDB file and Delta tables, and the server is
restarted in the middle. In the end `verify` must find all their tables equal. With `--minutes`
pgbench then goes on for so long, and the memory of the syncs is told each minute.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import psycopg
from chaos import wait_for
from support.commands.option_files import config
from support.frames.reference_parser import parse
from support.postgres.servers import execute, find_server
from support.values.type_values import NEWER, TYPES, VALUES

from pgoutput_fast.changelog.consumers import Consumer
from pgoutput_fast.changelog.read_plan import Read
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments import SegmentReader
from pgoutput_fast.segments.listing import has_begun

VERSIONS = (15, 18)
SETTINGS = {"log_min_messages": "panic", "max_wal_size": "1GB"}
ROWS = 3000  # of each table that the scenes are about
CLIENTS = 4
ATTEMPTS = 5
"""How often copies are waited for that syncs ask for, at the end."""
ROLE = "live"
COMMAND = [sys.executable, "-m", "pgoutput_fast"]
PGBENCH = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")


class Scene(NamedTuple):
    """What happens to a table while it is written to.

    Attributes
    ----------
    during : tuple of str
        Statements, each a transaction.
    published : str or None
        How the table is in the publication from the beginning; None if it is not.
    make : tuple of str
        Statements that make it; by default as `made` does.
    rows : int
    """

    during: tuple[str, ...] = ()
    published: str | None = ""
    make: tuple[str, ...] = ()
    rows: int = ROWS


def made(table: str) -> str:
    return f"CREATE TABLE {table} (id int PRIMARY KEY, v text, n int, big text)"


def filled(table: str, begin: int, count: int) -> str:
    """Rows, every tenth with a value that is stored out of line."""
    big = "CASE WHEN g % 10 = 0 THEN (SELECT string_agg(md5(g::text || i), '') FROM"
    return (
        f"INSERT INTO {table} SELECT g, 'old ' || g, g, {big} generate_series(1, 100) AS i) END"
        f" FROM generate_series({begin}, {begin + count - 1}) AS g ON CONFLICT DO NOTHING"
    )


def partitioned(table: str) -> tuple[str, ...]:
    """A root whose partitions have 10,000 keys each."""
    return (
        f"{made(table)} PARTITION BY RANGE (id)",
        *(
            f"CREATE TABLE {table}_{i} PARTITION OF {table}"
            f" FOR VALUES FROM ({i * 10_000}) TO ({i * 10_000 + 10_000})"
            for i in range(2)
        ),
    )


SCENES = {
    "joins": Scene(
        (
            "ALTER PUBLICATION p ADD TABLE joins",
            "ALTER PUBLICATION p DROP TABLE joins",
            "ALTER PUBLICATION p ADD TABLE joins",
        ),
        published=None,
    ),
    "joins_empty": Scene(("ALTER PUBLICATION p ADD TABLE joins_empty",), published=None, rows=0),
    "truncated": Scene(("TRUNCATE truncated", filled("truncated", 1, 500), "TRUNCATE truncated")),
    "vacuumed": Scene(
        ("VACUUM FULL vacuumed", "CLUSTER vacuumed USING vacuumed_pkey", "VACUUM FULL vacuumed")
    ),
    "widened": Scene(("ALTER TABLE widened ALTER n TYPE bigint",)),
    "added_to": Scene(
        (
            "ALTER TABLE added_to ADD later int DEFAULT 7",
            "UPDATE added_to SET later = id WHERE id % 3 = 0",
        )
    ),
    "column_dropped": Scene(("ALTER TABLE column_dropped DROP n",)),
    "again": Scene(
        (
            "DROP TABLE again",
            made("again"),
            filled("again", 1, 700),
            "ALTER PUBLICATION p ADD TABLE again",
            f"DROP TABLE again; {made('again')}; ALTER PUBLICATION p ADD TABLE again",
            filled("again", 1, 100),
        )
    ),
    "renamed": Scene(
        (
            "ALTER TABLE renamed RENAME TO other_name",
            "ALTER TABLE other_name SET SCHEMA elsewhere",
            "UPDATE elsewhere.other_name SET v = 'renamed' WHERE id % 7 = 0",
            "ALTER TABLE elsewhere.other_name RENAME TO renamed",
        )
    ),
    "filtered": Scene(
        (
            "ALTER PUBLICATION p DROP TABLE filtered",
            "ALTER PUBLICATION p ADD TABLE filtered WHERE (id % 3 = 0)",
            """BEGIN; ALTER PUBLICATION p DROP TABLE filtered;
            ALTER PUBLICATION p ADD TABLE filtered WHERE (id % 5 <> 0); END""",
        ),
        published="WHERE (id % 2 = 0)",
        # Otherwise an update by which a row comes to be published lacks the values that are stored
        # out of line and did not change.
        make=(made("filtered"), "ALTER TABLE filtered REPLICA IDENTITY FULL"),
    ),
    "listed": Scene(
        (
            """BEGIN; ALTER PUBLICATION p DROP TABLE listed;
            ALTER PUBLICATION p ADD TABLE listed (id, v, big); END""",
        ),
        published="(id, n)",
    ),
    "multiset": Scene(
        ("ALTER TABLE multiset REPLICA IDENTITY FULL", "TRUNCATE multiset"),
        make=(
            "CREATE TABLE multiset (id int, v text, n int, big text)",
            "ALTER TABLE multiset REPLICA IDENTITY FULL",
        ),
    ),
    "whole": Scene(
        ("ALTER TABLE whole REPLICA IDENTITY FULL", "ALTER TABLE whole REPLICA IDENTITY DEFAULT")
    ),
    "parts": Scene(
        (
            "CREATE TABLE parts_2 (v text, big text, id int NOT NULL, n int)",
            "ALTER TABLE parts ATTACH PARTITION parts_2 FOR VALUES FROM (20000) TO (30000)",
            filled("parts", 20_000, 300),
            "DELETE FROM parts WHERE id BETWEEN 20000 AND 29999",
            "TRUNCATE parts",
            filled("parts", 1, 900),
            "UPDATE parts SET id = id + 10000 WHERE id % 5 = 0",
        ),
        make=partitioned("parts"),
    ),
    # A role that row security applies to may not copy it.
    "secured": Scene(
        ("ALTER PUBLICATION p ADD TABLE secured",),
        published=None,
        make=(
            made("secured"),
            "ALTER TABLE secured ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
            "CREATE POLICY even ON secured USING (id % 2 = 0)",
        ),
    ),
}
LATER = {
    "joins": Scene(
        (
            "ALTER PUBLICATION p DROP TABLE joins",
            "UPDATE joins SET v = 'unseen' WHERE id % 2 = 0",
            "ALTER PUBLICATION p ADD TABLE joins",
        )
    ),
    "filtered": Scene(
        tuple(
            f"""BEGIN; ALTER PUBLICATION p DROP TABLE filtered;
            ALTER PUBLICATION p ADD TABLE filtered WHERE (id % 5 <> {i}); END"""
            for i in (1, 0)
        )
    ),
    "listed": Scene(
        tuple(
            f"""BEGIN; ALTER PUBLICATION p DROP TABLE listed;
            ALTER PUBLICATION p ADD TABLE listed ({columns}); END"""
            for columns in ("id, n", "id, v, big")
        )
    ),
    "truncated": Scene(("TRUNCATE truncated", filled("truncated", 1, 500))),
    "again": Scene(
        (
            f"DROP TABLE again; {made('again')}; ALTER PUBLICATION p ADD TABLE again",
            filled("again", 1, 100),
        )
    ),
}
"""What happens again once the first copies are made."""

REPAIRED = {
    "attached": Scene(
        (
            made("attached_2"),
            filled("attached_2", 20_000, 300),
            "ALTER TABLE attached ATTACH PARTITION attached_2 FOR VALUES FROM (20000) TO (30000)",
        ),
        make=partitioned("attached"),
    ),
    "detached": Scene(
        ("ALTER TABLE detached DETACH PARTITION detached_0",), make=partitioned("detached")
    ),
    "leaf_truncated": Scene(("TRUNCATE leaf_truncated_0",), make=partitioned("leaf_truncated")),
    "retyped": Scene(("ALTER TABLE retyped ALTER n TYPE bigint USING n + 1",)),
    "stamped": Scene(("ALTER TABLE stamped ADD made float8 DEFAULT random()",)),
    "column_renamed": Scene(("ALTER TABLE column_renamed RENAME v TO w",)),
}
"""What no stream tells of: verify says that they differ, or that it can't compare them."""

UNSEEN = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UniqueViolation,
    psycopg.errors.CheckViolation,  # there is no partition for the row
    psycopg.errors.ObjectNotInPrerequisiteState,  # without a replica identity
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,  # the row is in another partition by now
)
"""Errors of writers, as a table is another one, or not there, just now."""


class Threads:
    """Threads whose errors are raised when they are joined."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._running: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, target: Callable[..., None], *given: Any) -> None:
        def run() -> None:
            try:
                target(*given)
            except BaseException as error:  # noqa: BLE001 - `join` raises it
                self._errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._running.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._running:
            thread.join(180)
            assert not thread.is_alive(), "a statement waits for ever"
        self._running.clear()
        if self._errors:
            raise self._errors[0]


def write(dsn: str, tables: list[str], seed: float, stop: threading.Event, done: Counter[str]):
    """Small transactions on the tables of scenes, over restarts of the server."""
    chance = random.Random(seed)
    numbers = itertools.count(1)
    while not stop.is_set():
        try:
            write_on(dsn, tables, chance, numbers, stop, done)
        except psycopg.OperationalError:
            done["connections lost"] += 1
            time.sleep(0.5)


def write_on(
    dsn: str, tables: list[str], chance: random.Random, numbers: Iterator[int],
    stop: threading.Event, done: Counter[str],
) -> None:  # fmt: skip
    """The same on one connection."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET lock_timeout = '1s'")
        for number in numbers:
            if stop.wait(0.002):
                return
            table, key = chance.choice(tables), chance.randrange(1, ROWS)
            new = key + chance.choice((0, 10_000)) + number % 5000
            statement = chance.choice(
                (
                    f"UPDATE {table} SET v = 'new {number}' WHERE id = {key}",
                    f"UPDATE {table} SET id = {new} WHERE id = {key}",
                    f"UPDATE {table} SET n = n + 1 WHERE id BETWEEN {key} AND {key + 5}",
                    f"DELETE FROM {table} WHERE id = {key}",
                    f"INSERT INTO {table} (id, v) VALUES ({key}, NULL)",
                    f"""BEGIN; DELETE FROM {table} WHERE id = {key};
                    INSERT INTO {table} (id, v) VALUES ({key}, 'again {number}'); END""",
                )
            )
            try:
                connection.execute(statement.encode())
                done["statements"] += 1
            except (*UNSEEN, psycopg.errors.LockNotAvailable):
                done["refused"] += 1
                connection.execute("ROLLBACK")


def play(dsn: str, scene: Scene, seed: float, seconds: float) -> None:
    """The statements of a scene, at moments by chance."""
    chance = random.Random(seed)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in scene.during:
            time.sleep(chance.uniform(0, seconds))
            while True:
                try:
                    connection.execute(statement.encode())
                    break
                except psycopg.errors.DeadlockDetected:
                    connection.execute("ROLLBACK")


def types_table(version: int) -> list[str]:
    """A table with a column for each type, in whose rows are the values of each."""
    values = {
        name: [*given, *(NEWER.get(name, ()) if version >= 17 else ())]
        for name, given in VALUES.items()
    }
    columns = ", ".join(f"c{i} {name}" for i, name in enumerate(values))
    found = [*TYPES, f"CREATE TABLE types (id int PRIMARY KEY, {columns})"]
    for number in range(max(map(len, values.values())) + 1):
        row = ", ".join(
            quoted(given[number]) + f"::{name}" if number < len(given) else "NULL"
            for name, given in values.items()
        )
        found.append(f"INSERT INTO types VALUES ({number}, {row})")
    return found


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def prepare(server: EmbeddedServer, pgbench: Path, scale: int) -> None:
    filling = [pgbench, "-i", "-q", "-s", str(scale), server.dsn()]
    subprocess.run(filling, check=True, capture_output=True)
    execute(
        server,
        f"CREATE ROLE {ROLE} LOGIN REPLICATION",
        f"GRANT pg_read_all_data TO {ROLE}",
        "CREATE SCHEMA elsewhere",
        *types_table(server.version),
    )
    published = [*PGBENCH, "types"]
    for name, scene in (SCENES | REPAIRED).items():
        execute(server, *(scene.make or (made(name),)), filled(name, 1, scene.rows))
        if scene.published is not None:
            published.append(f"{name} {scene.published}")
    execute(
        server,
        f"CREATE PUBLICATION p FOR TABLE {', '.join(published)} WITH (publish_via_partition_root)",
    )


# --- the commands --------------------------------------------------------------------------------


class Running:
    """A subcommand of `pgoutput-fast` as a process, with a log."""

    def __init__(self, log: Path, *given: str, dsn: str = "", **options: object) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*COMMAND, *given, "--log-format", "json", *config(log_interval=1, **options)],
                env={**os.environ, "PGOUTPUT_FAST_DSN": dsn},
                stderr=file,
            )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines() if line[-1:] == "}"]

    def cpu(self) -> float:
        """Seconds of processor time until now."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> tuple[float, float, dict[str, Any]]:
        """Wait for its end: seconds of processor time, most memory in MB, its last line."""
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        assert self.process.returncode in (0, 3), "\n".join(map(str, self.lines()[-20:]))
        return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, self.lines()[-1]

    def tell(self, kind: type[BaseException] | None, *_: object) -> None:
        """After a failure, the end of its log but for the lines with numbers."""
        if kind is not None:
            lines = [one["message"] for one in self.lines() if one["event"] != "progress"]
            print(f"{self._log.name} ends with:", *lines[-60:], sep="\n  ", flush=True)

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()


class Capture(Running):
    """`pgoutput-fast capture`."""

    def __init__(
        self, server: EmbeddedServer, directory: Path, log: Path, *more: str, **options: object
    ) -> None:
        super().__init__(
            log, "capture", "--slot", "live", "--publication", "p", "--out", str(directory),
            "--snapshot", "initial", *more, dsn=f"{server.dsn()} user={ROLE}", **options,
        )  # fmt: skip


class Sync(Running):
    """`pgoutput-fast sync` that follows the directory of a capture."""

    def __init__(self, directory: Path, target: str, *more: str) -> None:
        self.target = target
        self.name = "duckdb" if target.startswith("duckdb:") else "delta"
        policies = [
            f"--policy={name}=text"
            for name in ("infinity", "out_of_range", "special_values", "arrays")
        ]
        super().__init__(
            directory.with_name(f"sync_{self.name}.log"), "sync", "--segments", str(directory),
            "--to", target, *policies, *more,
        )  # fmt: skip

    def memory(self) -> float:
        """The resident memory in MB."""
        return resident(self.process.pid) / 2**20

    def stopped(self) -> None:
        """End it if it still runs, and tell what it took."""
        self.process.send_signal(signal.SIGTERM)
        self.tell_end()

    def tell_end(self) -> dict[str, Any]:
        """Wait for its end, and tell what it took; its last line."""
        cpu, most, last = self.end()
        print(
            f"  sync to {self.name}: {last['changes']:,} changes in {last['windows']} windows,"
            f" processor {cpu:.1f} s, most memory {most:.0f} MB; stale {last['stale']}",
            flush=True,
        )
        return last


def verified(server: EmbeddedServer, target: str, *more: str) -> dict[str, dict[str, Any]]:
    """What verify says of each table."""
    begin = time.monotonic()
    ended = subprocess.run(
        [*COMMAND, "verify", "--publication", "p", "--target", target, "--json", *more],
        env={**os.environ, "PGOUTPUT_FAST_DSN": server.dsn()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout.startswith("{"), ended.stderr[-3000:]
    report = json.loads(ended.stdout)
    tables = {one["name"]: one for one in report["tables"]}
    states = Counter(one["state"] for one in tables.values())
    codes = {"different": 1, "not compared": 2, "unsettled": 2}
    code = min((codes[state] for state in states if state in codes), default=0)
    assert ended.returncode == code, (ended.returncode, states)
    print(f"  verify {Path(target).name}: {dict(states)}, {time.monotonic() - begin:.0f} s")
    return tables


# --- a second reading, and the server's COPY -----------------------------------------------------


Cell = tuple[str, bytes]
"""A value as it came: "t" and its text, "b" and its binary form, or "n"."""


class Applied:
    """The rows of tables, by a parser that shares nothing with the package.

    Rows of copies have binary values, changes of the stream text.
    """

    def __init__(self, directory: Path, wanted: set[int]) -> None:
        self.rows: dict[int, dict[int, tuple[Cell, ...]]] = {oid: {} for oid in wanted}
        consumer = Consumer(directory, "applied")
        plan = consumer.plan()
        assert plan is not None
        for read in plan.reads:
            for path in read.files:
                with SegmentReader(path) as reader:
                    for batch in reader:
                        commits = batch.column("commit_lsn").to_pylist()
                        frames = batch.column("data").to_pylist()
                        for lsn, frame in zip(commits, frames, strict=True):
                            if frame[:1] in (b"I", b"U", b"D", b"T"):
                                self._apply(frame, lsn, read)
        consumer.advance(plan.after)

    def _apply(self, frame: bytes, lsn: int, read: Read) -> None:
        parsed = parse(frame)
        fields = parsed["fields"]
        for oid in fields.get("relation_ids") or [fields["relation_id"]]:
            start, end = read.range_of(oid)
            if oid not in self.rows or not (read.snapshot is not None or start <= lsn < end):
                continue
            if parsed["class"] == "Truncate":
                self.rows[oid] = {}
            else:
                self._change(self.rows[oid], frame, parsed)

    def _change(self, rows: dict[int, tuple[Cell, ...]], frame: bytes, parsed: Any) -> None:
        sent = {
            which: [(one[0], frame[one[1] : sum(one[1:])] if one[1:] else b"") for one in columns]
            for which, columns in (
                (which, found["columns"]) for which, found in parsed["tuples"].items()
            )
        }
        before: tuple[Cell, ...] = ()
        if parsed["class"] != "Insert":
            before = rows.pop(_key(sent.get("old") or sent["new"]))
        if "new" in sent:
            key = _key(sent["new"])
            assert key not in rows, key
            rows[key] = tuple(
                before[i] if one[0] == "u" else one for i, one in enumerate(sent["new"])
            )


def _key(cells: Sequence[Cell]) -> int:
    kind, data = cells[0]
    return int(data) if kind == "t" else int.from_bytes(data, "big", signed=True)


def copied(
    connection: psycopg.Connection[Any], query: str, kind: str
) -> Iterator[tuple[Cell, ...]]:
    """The rows of a COPY as text, "t", or binary, "b"."""
    form = {"t": "text", "b": "binary"}[kind]
    with connection.cursor().copy(f"COPY ({query}) TO STDOUT (FORMAT {form})".encode()) as copy:
        for row in copy.rows():
            yield tuple(
                ("n", b"") if one is None else (kind, one if kind == "b" else one.encode())
                for one in row
            )


def compare_with_copy(server: EmbeddedServer, directory: Path) -> int:
    """The number of rows that are the same in the directory and in the server's COPY."""
    # But for those of which rows came before a column was added, dropped or altered.
    queries = {
        name: f"SELECT * FROM {name}"
        for name in (
            *PGBENCH[:3], "types", "joins", "joins_empty", "truncated", "vacuumed", "again",
            "elsewhere.renamed", "whole", "parts", "secured", *REPAIRED,
        )
    }  # fmt: skip
    queries["filtered"] = "SELECT * FROM filtered WHERE id % 5 <> 0"
    queries["listed"] = "SELECT id, v, big FROM listed"
    oids = {name: relation_id(server, name) for name in queries}
    applied = Applied(directory, set(oids.values()))
    with psycopg.connect(server.dsn()) as connection:
        # As the sessions of a capture have it.
        connection.execute("SET extra_float_digits = 3")
        for name, query in queries.items():
            rows = applied.rows[oids[name]]
            for kind in "tb":
                count = 0
                if name == "types" and kind == "b":  # this type has no binary form
                    columns = ", ".join(
                        "NULL" if type_ == "aclitem" else f"c{i}" for i, type_ in enumerate(VALUES)
                    )
                    query = f"SELECT id, {columns} FROM types"
                for row in copied(connection, query, kind):
                    count += 1
                    here = rows[_key(row)]
                    for one, other in zip(row, here, strict=True):
                        is_other_form = other[0] not in ("n", kind)
                        assert one == other or is_other_form, (name, _key(row), one, other)
                assert count == len(rows), (name, count, len(rows))
    return sum(map(len, applied.rows.values()))


# --- the whole -----------------------------------------------------------------------------------


def relation_id(server: EmbeddedServer, name: str) -> int:
    """The OID of a table."""
    return int(execute(server, f"SELECT '{name}'::regclass::oid::bigint")[0][0])


def waiting(directory: Path) -> set[int]:
    """Relation ids of the tables that wait for a copy."""
    states = SnapshotStates(directory).read()
    return {oid for oid, state in states.items() if state.waits_from is not None}


def nearest(version: int) -> Path:
    """The programs of a version, or of the next one that is found."""
    try:
        return find_server(version)
    except PgOutputError:
        if version > max(VERSIONS):
            raise
        print(f"no server {version} is found; the next one is taken", flush=True)
        return nearest(version + 1)


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Bench:
    """pgbench as a process, for so many seconds."""

    def __init__(self, program: Path, server: EmbeddedServer, seconds: int) -> None:
        self._seconds = seconds
        self.process = subprocess.Popen(
            [program, "-n", "-c", str(CLIENTS), "-T", str(seconds), server.dsn()],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self) -> None:
        """Wait for its end, and tell what it did."""
        said, _ = self.process.communicate(timeout=self._seconds + 120)
        assert self.process.returncode == 0, said
        lines = [one for one in said.splitlines() if "processed" in one or one[:3] == "tps"]
        print(*lines, sep="\n  ", flush=True)


def tell_memory(bench: Bench, capture: Capture, syncs: list[Sync]) -> None:
    """Tell each minute how much memory there is in use, until the load ends."""
    begin = time.monotonic()
    minute = 0
    while bench.process.poll() is None:
        time.sleep(0.5)
        if time.monotonic() >= begin + 60 * minute:
            shown = ", ".join(f"sync to {one.name} {one.memory():.0f}" for one in syncs)
            held = resident(capture.process.pid) / 2**20
            print(f"  minute {minute}, MB: {shown}, capture {held:.0f}", flush=True)
            minute += 1


def run(version: int, scale: int, seconds: int, minutes: int, seed: int) -> None:
    chance = random.Random(seed)
    bindir = nearest(version)
    with contextlib.ExitStack() as held:
        path = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(EmbeddedServer(settings=SETTINGS, bindir=bindir))
        directory = path / "lake"
        print(f"server {server.version}", flush=True)
        prepare(server, bindir / "pgbench", scale)
        written: Counter[str] = Counter()
        players, writers = Threads(), Threads()
        held.callback(writers.stop.set)
        pgbench = bindir / "pgbench"
        bench = Bench(pgbench, server, seconds // 2)
        held.callback(lambda: bench.process.kill())
        for _ in range(2):
            names = [*SCENES, *REPAIRED]
            given = (server.dsn(), names, chance.random(), writers.stop, written)
            writers.start(write, *given)
        begin = time.monotonic()
        capture = Capture(server, directory, path / "log", min_free=1)
        held.callback(capture.kill)
        held.push(capture.tell)
        wait_for("the slot", lambda: execute(server, "SELECT 1 FROM pg_replication_slots"))
        wait_for("the directory", lambda: has_begun(directory))
        targets = [f"duckdb:{path / 'tables.duckdb'}", str(path / "tables")]
        syncs = [Sync(directory, target) for target in targets]
        for sync in syncs:
            held.callback(sync.kill)
            held.push(sync.tell)
        for scene in SCENES.values():
            players.start(play, server.dsn(), scene, chance.random(), seconds / 12)
        players.join()
        bench.end()
        server.restart()
        bench = Bench(pgbench, server, seconds // 2)
        secured = relation_id(server, "secured")
        wait_for("all copies but one", lambda: waiting(directory) == {secured}, 40.0)
        took, cpu = time.monotonic() - begin, capture.cpu()
        last = [one for one in capture.lines() if one["event"] == "progress"][-1]
        for scene in LATER.values():
            players.start(play, server.dsn(), scene, chance.random(), seconds / 12)
        players.join()
        for name, scene in REPAIRED.items():
            assert len(SnapshotStates(directory).read()[relation_id(server, name)].snapshots) == 1
            players.start(play, server.dsn(), scene, chance.random(), seconds / 12)
        players.join()
        bench.end()
        if minutes:
            bench = Bench(pgbench, server, 60 * minutes + 1)
            tell_memory(bench, capture, syncs)
            bench.end()
        writers.stop.set()
        writers.join()
        capture.process.send_signal(signal.SIGTERM)
        total, most, stop = capture.end()
        print(
            f"  {scale * 100_000:,} accounts, seconds until all was copied: {took:.0f};"
            f" changes {stop['changes']:,}, transactions {stop['transactions']:,};"
            f" processor {total:.1f} s, of it {cpu:.1f} s until all was copied;"
            f" {(total - cpu) / max(stop['changes'] - last['changes'], 1) * 1e6:.2f} µs for each"
            f" change since; most memory {most:.0f} MB; writers {dict(written)}",
            flush=True,
        )  # fmt: skip
        execute(server, f"ALTER ROLE {ROLE} BYPASSRLS")
        finish(server, directory, path / "log")
        for sync in syncs:
            sync.stopped()
        prove(server, directory, path)
        prove_syncs(server, directory, targets)


def finish(server: EmbeddedServer, directory: Path, log: Path) -> None:
    """Capture what is committed by now, and all copies that are ordered."""
    begin = time.monotonic()
    capture = Capture(server, directory, log, "--until", "now", min_free=1)
    cpu, most, stop = capture.end()
    assert waiting(directory) == set()
    print(
        f"  capture --until now: {stop['changes']:,} changes, {time.monotonic() - begin:.0f} s,"
        f" processor {cpu:.1f} s, most memory {most:.0f} MB", flush=True,
    )  # fmt: skip


def prove(server: EmbeddedServer, directory: Path, path: Path) -> None:
    """Compare all tables, repair those of which the stream does not tell, compare again."""
    found = verified(server, str(directory))
    unequal = {name: one for name, one in found.items() if one["state"] != "equal"}
    states = SnapshotStates(directory).read()
    # But for those of which a sync has found out, and which were copied again for it.
    wrong = {name for name in REPAIRED if len(states[relation_id(server, name)].snapshots) == 1}
    assert unequal.keys() == wrong, {
        name: unequal.get(name, "equal") for name in unequal.keys() ^ wrong
    }
    tables = [f"--table=public.{name}" for name in REPAIRED]
    ordering = [*COMMAND, "snapshot", "--dir", str(directory), *tables]
    subprocess.run(ordering, check=True, capture_output=True)
    finish(server, directory, path / "log")
    found = verified(server, str(directory))
    unequal = {name: one for name, one in found.items() if one["state"] != "equal"}
    assert not unequal, unequal
    begin = time.monotonic()
    count = compare_with_copy(server, directory)
    print(f"  {count:,} rows as COPY has them, {time.monotonic() - begin:.0f} s", flush=True)


def prove_syncs(server: EmbeddedServer, directory: Path, targets: list[str]) -> None:
    """Sync what is left, with the copies that are asked for, and compare all tables."""
    for _ in range(ATTEMPTS):
        stale = 0
        for target in targets:
            stale += len(Sync(directory, target, "--until", "now").tell_end()["stale"])
        if not stale:
            break
        finish(server, directory, directory.with_name("log"))
    for target in targets:
        found = verified(server, target, "--segments", str(directory))
        unequal = {name: one for name, one in found.items() if one["state"] != "equal"}
        assert not unequal, unequal
        print(f"    {sum(one['rows'] for one in found.values()):,} rows are equal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, nargs="+", default=VERSIONS)
    parser.add_argument("--scale", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--minutes", type=int, default=0, help="of load behind all else")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    for version in given.versions:
        run(version, given.scale, given.seconds, given.minutes, seed)


if __name__ == "__main__":
    main()
