"""Faults, by chance but repeatably: whatever fails, nothing is lost, doubled, or out of order.

    python tests/chaos/chaos.py [--seed N] [--client-kills N] [--server-kills N] [--cuts N] …

A writer commits transactions of all sizes to a server of its own, which tells each one's number. A
consumer (`consumer.py`) stores the rows with its position in a file of SQLite. After each kind of
fault the writer ends, the consumer takes what is left, and what it has is compared with the
server's table, and with the order in which `test_decoding` tells of the transactions, where a
server with that plugin is found. A capture (`capturer.py`) goes through the same. By chance slots
bring prepared transactions when they are prepared, while these stay open over some faults.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import psycopg
from support.postgres.proxy import Proxy
from support.postgres.servers import found_servers
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments import SegmentReader, list_segments

SETTINGS = {
    "log_min_messages": "panic",
    "logical_decoding_work_mem": "64kB",
    "wal_sender_timeout": "3s",
    # A crash of the server must not lose what it has said to be committed.
    "fsync": True,
}


class Writer:
    """Writes transactions without a pause, small and large, some of them rolled back in part.

    A transaction of which the server did not say whether it is committed is looked up later: the
    truth is the server's table. Some are prepared; some of these are ended at once, and others
    after a while, in another order, and by another connection if a fault comes between.
    """

    def __init__(self, server: EmbeddedServer, chance: random.Random) -> None:
        self._server = server
        self._chance = random.Random(chance.random())
        self._stop = threading.Event()
        self._number = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with (
                contextlib.suppress(psycopg.Error, PgOutputError),
                psycopg.connect(self._server.dsn(), autocommit=True) as connection,
            ):
                query = "SELECT gid FROM pg_prepared_xacts ORDER BY gid"
                is_open = [gid for (gid,) in connection.execute(query)]
                while not self._stop.wait(0.002):
                    self._write(connection, is_open)
            time.sleep(0.01)

    def _write(self, connection: psycopg.Connection[Any], is_open: list[str]) -> None:
        self._number += 1
        size = self._chance.choice((1, 2, 3, 3, 3, 10, 50, 1500 if self._number % 9 == 0 else 4))
        insert = "INSERT INTO t SELECT %s::int, g FROM generate_series(1, %s::int) g"
        connection.execute("BEGIN")
        connection.execute(insert.encode(), [self._number, size])
        if self._chance.random() < 0.2:
            connection.execute("SAVEPOINT s")
            connection.execute(insert.encode(), [-self._number, size])
            connection.execute("ROLLBACK TO s")
        if self._chance.random() < 0.1:
            is_open.append(f"g{self._number}")
            connection.execute(f"PREPARE TRANSACTION '{is_open[-1]}'".encode())
            if self._chance.random() < 0.5:
                self._end_prepared(connection, is_open.pop())
        else:
            connection.execute(b"COMMIT" if self._chance.random() < 0.9 else b"ROLLBACK")
        if is_open and self._chance.random() < 0.02 * len(is_open) ** 2:
            gid = is_open.pop(self._chance.randrange(len(is_open)))
            self._end_prepared(connection, gid)

    def _end_prepared(self, connection: psycopg.Connection[Any], gid: str) -> None:
        end = self._chance.choice(("COMMIT", "COMMIT", "ROLLBACK"))
        connection.execute(f"{end} PREPARED '{gid}'".encode())

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


class Consumer:
    """The consumer's process, and what it has stored."""

    script = "consumer.py"

    def __init__(self, store: Path, dsn: str, **options: Any) -> None:
        self.store = store
        self.dsn = dsn
        self.options = {"slot": "s", "publications": ["p"], "retry_for": 60, **options}
        self.process: subprocess.Popen[bytes] | None = None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process

    def start(self) -> None:
        script = str(Path(__file__).with_name(self.script))
        command = [sys.executable, script, str(self.store), self.dsn]
        self.process = subprocess.Popen(
            [*command, json.dumps(self.options)], stdout=self.log, stderr=self.log,
            start_new_session="spark" in self.options,
        )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """In good order."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def keep(self) -> bool:
        """Start it again if it has ended, which is said."""
        assert self.process is not None
        if self.process.poll() is None:
            return False
        self.start()
        return True

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    def count(self) -> int:
        with contextlib.closing(sqlite3.connect(self.store, timeout=60)) as store:
            try:
                found: int = store.execute(
                    "SELECT coalesce(max(number), 0) FROM changes"
                ).fetchone()[0]
            except sqlite3.OperationalError:  # it has not made its tables yet
                return 0
            return found

    def rows(self) -> list[tuple[int, int]]:
        with contextlib.closing(sqlite3.connect(self.store, timeout=60)) as store:
            return store.execute("SELECT id, part FROM changes ORDER BY number").fetchall()


class Capturer(Consumer):
    """The capture's process, and what its segments hold."""

    script = "capturer.py"

    def __init__(self, store: Path, dsn: str, **options: Any) -> None:
        # Segments so small that the larger transactions take several parts.
        small = {"adopt_slot": True, "segment_bytes": 20_000, "max_delay": 0.1}
        super().__init__(store, dsn, **{**small, **options})

    def count(self) -> int:
        """The LSN behind the last segment."""
        ends = (path.name.split("-")[1] for path in self.store.glob("[0-9A-F]*.arrow"))
        return max((int(end, 16) for end in ends), default=0)

    def rows(self) -> list[tuple[int, int]]:
        return [
            (message.new["id"], message.new["part"])
            for message in self.messages()
            if isinstance(message, pf.Insert)
        ]

    def messages(self) -> Iterator[Any]:
        """What the segments hold, each transaction with its Begin."""
        decoder = pf.Decoder()
        for segment in list_segments(self.store):
            with SegmentReader(segment.path) as reader:
                # A part repeats the Begin of its transaction.
                goes_on = segment.part > 0
                for batch in reader:
                    for message in decoder.decode_many(batch["data"].to_pylist()):
                        if not (goes_on and isinstance(message, pf.Begin)):
                            yield message
                        else:
                            goes_on = False


def execute(server: EmbeddedServer, *statements: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


@functools.cache
def server_with_test_decoding() -> Path | None:
    """The programs of a server that comes with the plugin; None if no such server is found."""
    for bindir in found_servers():
        if any(bindir.parent.rglob("test_decoding.so")):
            return bindir
    print("no server with test_decoding is found: it is not asked for the order of transactions")
    return None


def wait_for(what: str, condition: Callable[[], object], timeout: float = 90.0) -> None:
    wait_until(condition, timeout, log=lambda: what)


class Run:
    """One server, writer and consumer, for faults of one kind."""

    def __init__(
        self, name: str, seed: int, reads: type[Consumer] = Consumer, **options: Any
    ) -> None:
        self.name = f"{name}, {reads.__name__.lower()}"
        self.reads = reads
        self.chance = random.Random(f"{self.name} {seed}")
        self.options = options
        # Whether the slot brings prepared transactions, and whether the first stream makes it so.
        self.two_phase, self.marked = self.chance.choice(
            ((True, True), (True, True), (True, False), (False, False))
        )
        if reads is Capturer:
            self.options["compression"] = self.chance.choice((None, "lz4", "zstd"))
        else:
            # A slow one has transactions waiting that came already.
            self.options["pace"] = self.chance.choice((0.0, 0.02))
        self.faults = 0

    @contextlib.contextmanager
    def running(self, *, proxy: bool = False) -> Iterator[Run]:
        """With everything running; at the end what arrived is compared with the server's."""
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            bindir = server_with_test_decoding()
            self.server = stack.enter_context(EmbeddedServer(18, SETTINGS, bindir=bindir))
            self.two_phase = self.two_phase and self.server.version >= 15
            self.options["two_phase"] = self.two_phase
            marks = ", false, true" if self.two_phase and self.marked else ""
            execute(
                self.server,
                "CREATE TABLE t (id int, part int)",
                "CREATE PUBLICATION p FOR TABLE t",
                f"SELECT pg_create_logical_replication_slot('s', 'pgoutput'{marks})",
            )
            self.has_truth = bindir is not None
            if self.has_truth:
                truth = "SELECT pg_create_logical_replication_slot('truth', 'test_decoding')"
                execute(self.server, truth)
            dsn = self.server.dsn()
            if proxy:
                path = self.server.directory / f".s.PGSQL.{self.server.port}"
                self.proxy = stack.enter_context(Proxy(str(path), self.chance.randrange(1 << 30)))
                dsn = (
                    f"host=127.0.0.1 port={self.proxy.port} user=postgres dbname=postgres"
                    " sslmode=disable"
                )
            self.consumer = self.reads(self.directory / "store", dsn, **self.options)
            self.consumer.start()
            stack.callback(self.consumer.log.close)
            stack.callback(self.consumer.kill)
            writer = Writer(self.server, self.chance)
            stack.callback(writer.end)
            try:
                yield self
                if proxy:
                    self.proxy.delay = 0.0
                writer.end()
                self.check()
            except AssertionError:
                print(f"The consumer's log ends with:\n{self.consumer.said()[-3000:]}")
                raise
        print(
            f"{self.name}: {self.faults} faults, {self.transactions} transactions, "
            f"{self.rows} rows{', two_phase' if self.two_phase else ''}, "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )

    def check(self) -> None:
        """Compare, once the consumer has all."""
        # Prepared transactions that a crash left: the client holds their rows.
        for (gid,) in execute(self.server, "SELECT gid FROM pg_prepared_xacts"):
            execute(self.server, f"COMMIT PREPARED '{gid}'")
        execute(self.server, "INSERT INTO t VALUES (0, 0)")
        if self.options.pop("pace", None):
            self.consumer.kill()
            self.consumer.options.pop("pace")
            self.consumer.start()
        (count,) = execute(self.server, "SELECT count(*) FROM t")

        def complete() -> bool:
            self.consumer.keep()
            found = self.consumer.count() and self.consumer.rows()
            return bool(found) and found[-1] == (0, 0)

        wait_for(f"{self.name}: the last transaction ({count[0]} rows)", complete)
        self.consumer.end()
        found = self.consumer.rows()
        order = list(dict.fromkeys(number for number, _ in found))
        truth = execute(self.server, "SELECT id, part FROM t")
        parts: dict[int, list[int]] = {}
        for number, part in truth:
            parts.setdefault(number, []).append(part)
        assert set(order) == set(parts), f"{self.name}: lost {set(parts) - set(order)}"
        expected = [(number, part) for number in order for part in sorted(parts[number])]
        assert found == expected, f"{self.name}: rows are lost, doubled or out of order"
        if self.has_truth:
            told = execute(
                self.server,
                r"SELECT (regexp_match(data, 'INSERT: id\[integer\]:(-?\d+) part'))[1]::int"
                r" FROM pg_logical_slot_peek_changes('truth', NULL, NULL)"
                r" WHERE data LIKE 'table public.t: INSERT:%'",
            )
            assert order == list(dict.fromkeys(number for (number,) in told)), (
                f"{self.name}: not test_decoding's order"
            )
        self.transactions, self.rows = len(order), len(found)

    def progress(self) -> None:
        """Wait until the consumer has stored more than it has now.

        It is started again if it has ended, as a supervisor does.
        """
        before = self.consumer.count()

        def stored() -> bool:
            self.consumer.keep()
            return self.consumer.count() > before

        wait_for(f"{self.name}: progress", stored)


def client_kills(seed: int, count: int, reads: type[Consumer] = Consumer) -> None:
    with Run("kill -9 of the client", seed, reads).running() as run:
        for number in range(count):
            if number % 10 == 0:  # often also before it has begun to store
                run.progress()
            # Short lives and long ones, in which the server is told of what is acknowledged.
            time.sleep(run.chance.uniform(0.0, run.chance.choice((0.4, 0.8, 2.0))))
            run.consumer.kill()
            run.consumer.start()
            run.faults += 1


def server_kills(seed: int, count: int, reads: type[Consumer] = Consumer) -> None:
    with Run("kill -9 and restart of the server", seed, reads).running() as run:
        for number in range(count):
            time.sleep(run.chance.uniform(0.0, 0.6))
            # An orderly shutdown would wait for open prepared transactions, as the consumer, unlike
            # a capture, can't acknowledge anything behind them.
            waits = run.two_phase and reads is Consumer
            run.server.restart("kill" if number % 4 < 3 else "immediate" if waits else "fast")
            run.faults += 1
            run.progress()


def cuts(seed: int, count: int, reads: type[Consumer] = Consumer) -> None:
    name = "a network that cuts, delays and halves"
    with Run(name, seed, reads).running(proxy=True) as run:
        for number in range(count):
            run.proxy.delay = 0.001 if number % 3 == 0 else 0.0
            time.sleep(run.chance.uniform(0.0, 0.8))
            run.proxy.cut()
            run.faults += 1
            if number % 10 == 0:
                run.proxy.delay = 0.0
                run.progress()


def disk_full(seed: int, count: int, reads: type[Consumer] = Consumer) -> None:
    """The files of spilled transactions and of segments can't grow; then they can."""
    run = Run("disk full", seed, reads, max_memory=0, limit=20_000)
    with run.running() as run:
        for _ in range(count):
            process = run.consumer.process
            assert process is not None
            wait_for("the disk to be full", lambda process=process: process.poll() is not None)
            assert process.returncode == 1
            run.faults += 1
            run.consumer.options |= {"limit": 1 << 40}
            run.consumer.start()
            run.progress()
            run.consumer.kill()
            run.consumer.options |= {"limit": 20_000}
            run.consumer.start()
        run.consumer.kill()
        assert "Error" in run.consumer.said()
        del run.consumer.options["limit"]
        run.consumer.start()


def slow_consumer(seed: int, count: int) -> None:
    """It dwells on a transaction for longer than wal_sender_timeout, on one connection."""
    for _ in range(count):
        with Run("a slow consumer", seed, sleep=7.0).running() as run:
            run.progress()
            query = "SELECT active_pid FROM pg_replication_slots"
            before = execute(run.server, query)
            time.sleep(8)
            run.progress()
            run.faults += 1
            assert execute(run.server, query) == before, "the server gave the consumer up"


def two_clients(seed: int, count: int, reads: type[Consumer] = Consumer) -> None:
    """A second one on the same slot and store, while the first is killed now and then."""
    with Run("two clients on one slot", seed, reads).running() as run:
        other = reads(run.consumer.store, run.consumer.dsn, **run.options)
        other.start()
        try:
            for _ in range(count):
                time.sleep(run.chance.uniform(0.0, 1.0))
                first = run.chance.choice((run.consumer, other))
                first.kill()
                run.faults += 1
                first.start()
                for consumer in (run.consumer, other):
                    consumer.keep()
                run.progress()
            if reads is Capturer:
                refuses_another_directory(run)
        finally:
            other.kill()
            other.log.close()


def refuses_another_directory(run: Run) -> None:
    """What a slot brings goes into one directory."""
    options = {**run.options, "adopt_slot": False}
    stranger = Capturer(run.directory / "another", run.consumer.dsn, **options)
    stranger.start()
    assert stranger.process is not None
    assert stranger.process.wait(60) == 1
    assert "[not_ours]" in stranger.said()
    assert stranger.count() == 0
    stranger.log.close()


KINDS: dict[str, tuple[Callable[[int, int], None], int]] = {
    "client-kills": (client_kills, 200),
    "server-kills": (server_kills, 50),
    "cuts": (cuts, 200),
    "disk-full": (disk_full, 5),
    "slow": (slow_consumer, 2),
    "two-clients": (two_clients, 30),
    "capture-kills": (functools.partial(client_kills, reads=Capturer), 200),
    "capture-server-kills": (functools.partial(server_kills, reads=Capturer), 50),
    "capture-cuts": (functools.partial(cuts, reads=Capturer), 200),
    "capture-disk-full": (functools.partial(disk_full, reads=Capturer), 5),
    "two-captures": (functools.partial(two_clients, reads=Capturer), 30),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None)
    for name, (_, count) in KINDS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N")
    given = vars(parser.parse_args(arguments))
    seed = given["seed"] if given["seed"] is not None else random.SystemRandom().randrange(10**6)
    print(f"CHAOS_SEED={seed}", flush=True)
    for name, (run, _) in KINDS.items():
        count = given[name.replace("-", "_")]
        if count:
            run(seed, count)


if __name__ == "__main__":
    main()
