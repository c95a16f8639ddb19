"""A capture's directory under faults: copies, merging, retention and upload, kill -9 all the while.

    python tests/chaos/directory.py [--seed N] [--kills N]

A writer changes tables and their place in the publication: rows, truncates, rewrites, tables that
join, leave, are dropped and made again, renamed. A capture (`capturer.py`) copies and captures them
into a directory, where it merges and deletes files, and uploads it to object storage, from which by
chance it deletes them too; it is killed at moments by chance. Two consumers read beside it, one of
them seldom, and copies are asked for again. At the end the tables of both, of a new consumer, and
of one of the upload are compared with the server's, and the upload's files with the directory's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import psycopg
from chaos import Consumer, execute, wait_for
from support import paths
from support.changelogs.folded import Folded
from support.targets.object_storage import ENVIRONMENT, Storage

from pgoutput_fast.changelog.consumers import consumers
from pgoutput_fast.changelog.requests import request_copy
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.changelog.snapshots import snapshot_files
from pgoutput_fast.changelog.uploading import download
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments.listing import contents

SETTINGS = {"log_min_messages": "panic", "wal_sender_timeout": "3s", "fsync": False}
TABLES = 6


class Writer:
    """Changes tables without a pause, and what is published of them.

    A table that has returned to the publication stays until it has a snapshot. If it left before
    that, no read of the catalogue might show that it was away.
    """

    def __init__(self, server: EmbeddedServer, directory: Path, chance: random.Random) -> None:
        self._server = server
        self._directory = directory
        self._returned: dict[str, tuple[int, int]] = {}  # relation id and LSN
        self._chance = random.Random(chance.random())
        self._stop = threading.Event()
        self._number = 0
        self.failed: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
                while not self._stop.wait(0.003):
                    self._write(connection)
        except psycopg.Error as error:
            self.failed = error

    def _write(self, connection: psycopg.Connection[Any]) -> None:
        chance = self._chance
        self._number += 1
        number, table = self._number, f"t{chance.randrange(TABLES)}"
        if chance.random() < 0.01:
            self._define(connection, table)
            return
        key = chance.randrange(3000)
        keys = f"generate_series({key}, {key + 20}) AS g"
        statement = chance.choice(
            (
                f"INSERT INTO {table} SELECT g, '{number}' FROM {keys} ON CONFLICT DO NOTHING",
                f"UPDATE {table} SET v = '{number}' WHERE id BETWEEN {key} AND {key + 10}",
                f"DELETE FROM {table} WHERE id BETWEEN {key} AND {key + 5}",
                f"UPDATE {table} SET id = -{number} WHERE id = {key}",
            )
        )
        connection.execute(statement.encode())

    def _define(self, connection: psycopg.Connection[Any], table: str) -> None:
        kind = self._chance.choice(
            ("leave", "join", "join", "join", "truncate", "rewrite", "rename", "again")
        )
        if kind in ("leave", "again") and not self._may_leave(table):
            return
        is_published = connection.execute(
            "SELECT count(*) FROM pg_publication_tables WHERE tablename = %s", [table]
        ).fetchone() == (1,)
        statements = {
            "leave": [f"ALTER PUBLICATION p DROP TABLE {table}"] if is_published else [],
            "join": [] if is_published else [f"ALTER PUBLICATION p ADD TABLE {table}"],
            "truncate": [f"TRUNCATE {table}"],
            "rewrite": [f"VACUUM FULL {table}"],
            "rename": [f"ALTER TABLE {table} RENAME TO r", f"ALTER TABLE r RENAME TO {table}"],
            "again": [f"DROP TABLE {table}", *make_table(table)],
        }[kind]
        for statement in statements:
            connection.execute(statement.encode())
        if kind == "join" and statements:
            query = "SELECT %s::regclass::oid::bigint, pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
            ((relation_id, lsn),) = connection.execute(query, [table]).fetchall()
            self._returned[table] = relation_id, int(lsn)

    def _may_leave(self, table: str) -> bool:
        """Whether the table never returned, or has a snapshot since."""
        if table in self._returned:
            relation_id, lsn = self._returned[table]
            state = SnapshotStates(self._directory).read().get(relation_id)
            if state is None or all(one.lsn < lsn for one in state.snapshots):
                return False
            del self._returned[table]
        return True

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.failed is not None:
            raise self.failed


def make_table(table: str) -> list[str]:
    rows = "SELECT g, 'old ' || repeat('x', g % 400) FROM generate_series(1, 3000) AS g"
    return [
        f"CREATE TABLE {table} (id int PRIMARY KEY, v text)",
        f"INSERT INTO {table} {rows}",
        f"ALTER PUBLICATION p ADD TABLE {table}",
    ]


class Capturer(Consumer):
    """The capture's process."""

    script = "capturer.py"


class Uploaded:
    """The object storage, in a process of its own, and what the directory has had for it."""

    def __init__(self, directory: Path, keep: str) -> None:
        script = paths.SUPPORT / "targets" / "object_storage.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._directory = directory
        self.keep = keep
        self._storage = Storage(self._process.stdout.readline().strip(), "bucket")
        self._digests: dict[str, bytes] = {}
        self._downloads = 0
        self.begin: int | None = None
        self.behind = 0
        self.options = {
            "upload": self._storage.url, "upload_endpoint": self._storage.endpoint,
            "upload_keep": keep,
        }  # fmt: skip

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def note(self) -> None:
        """Remember the files that are whole, and whether all are copied; no capture runs."""
        self.behind += self.position() < contents(self._directory).end
        paths = [*self._directory.glob("*.arrow"), *self._directory.glob("tables/*.json")]
        files = snapshot_files(self._directory)
        for relation_id, state in SnapshotStates(self._directory).read().items():
            for copy in state.snapshots:  # of a copy that is not whole, files are written again
                paths += files.get((relation_id, copy.number), ())
        for path in paths:
            name = str(path.relative_to(self._directory))
            if name not in self._digests:
                self._digests[name] = hashlib.sha256(path.read_bytes()).digest()

    def position(self) -> int:
        """Everything before this LSN is uploaded."""
        found = {one.name: one.position.lsn for one in consumers(self._directory)}
        return found.get("_upload", 0)

    def downloaded(self) -> Path:
        """What a reader elsewhere has."""
        self._downloads += 1
        there = self._directory.with_name(f"there-{self._downloads}")
        download(self._storage.url, there, endpoint=self._storage.endpoint)
        return there

    def look(self) -> None:
        """Read the upload as it is; nothing is missing in it, and nothing comes twice."""
        if self.keep == "all":  # else a new consumer may lack what is deleted
            Folded(self.downloaded()).take()

    def check(self) -> tuple[Path, int]:
        """Compare the objects with the files, at the end: the download, and how many objects."""
        self.note()
        objects = self._storage.objects()
        for name, content in objects.items():
            if name in self._digests:
                assert hashlib.sha256(content).digest() == self._digests[name], name
        there = self.downloaded()
        here, found = contents(self._directory), contents(there)
        stretches = list(dict.fromkeys((one.start_lsn, one.end_lsn) for one in found.segments))
        for before, after in itertools.pairwise(stretches):
            assert before[1] == after[0], (before, after)
        assert found.end == here.end
        if self.keep == "all":  # what was deleted from the directory is there
            assert found.begin <= self.begin
        edges = {lsn for stretch in stretches for lsn in stretch}
        for segment in here.segments:
            # As a file, or as those from which it was merged.
            assert segment.name in objects or {segment.start_lsn, segment.end_lsn} <= edges
        files = snapshot_files(self._directory)
        for state in SnapshotStates(self._directory).read().values():
            for copy in state.all_snapshots:
                assert f"tables/{copy.name}" in objects
                if copy.state == "snapshot":
                    names = {
                        f"snapshots/{path.name}"
                        for path in files.get((copy.relation_id, copy.number), ())
                    }
                    assert names <= objects.keys()
        return there, len(objects)


def compare(server: EmbeddedServer, folded: Folded) -> int:
    """The number of tables that are published, all of which have the server's rows."""
    tables = execute(
        server,
        "SELECT tablename::regclass::oid::bigint, tablename FROM pg_publication_tables"
        " WHERE pubname = 'p'",
    )
    for relation_id, table in tables:
        truth = {row[0]: row for row in execute(server, f"SELECT id::text, v FROM {table}")}
        found = folded.rows.get(relation_id)
        assert found == truth, (
            f"{table} ({relation_id}): {len(found or {})} rows, the server has {len(truth)}"
        )
    return len(tables)


def run(seed: int, kills: int) -> None:
    chance = random.Random(seed)
    os.environ.update(ENVIRONMENT)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "lake"
        server = stack.enter_context(EmbeddedServer(chance.choice((16, 18)), SETTINGS))
        execute(server, "CREATE PUBLICATION p")
        for number in range(TABLES):
            execute(server, *make_table(f"t{number}"))
        writer = Writer(server, directory, chance)
        stack.callback(writer.end)
        uploaded = Uploaded(directory, chance.choice(("all", "local")))
        stack.callback(uploaded.end)
        options = {
            **uploaded.options,
            "slot": "s", "publications": ["p"], "snapshot": "initial", "create_slot": True,
            "retry_for": 60, "max_delay": 0.05, "segment_bytes": 100_000, "grace": 2.0,
            "keep_bytes": 300_000, "quick": True, "compression": chance.choice((None, "lz4")),
        }  # fmt: skip
        capturer = Capturer(directory, server.dsn(), **options)
        capturer.start()
        stack.callback(capturer.log.close)
        stack.callback(capturer.kill)
        try:
            often, seldom = take_part(capturer, directory, uploaded, kills, chance)
            writer.end()
            finish(server, capturer, directory)
            # What a new consumer needs is deleted, but for copies that are made for it.
            for relation_id, state in SnapshotStates(directory).read().items():
                if state.all_snapshots[-1].state == "snapshot":
                    request_copy(directory, relation_id, ["", ""], "a test asks")
            finish(server, capturer, directory)
            new = Folded(directory, "new")
            there, objects = uploaded.check()
            for folded in (often, seldom, new, Folded(there, "there")):
                count = compare(server, folded.settle())
            copies = [len(state.snapshots) for state in SnapshotStates(directory).read().values()]
        except AssertionError:
            print(f"The capture's log ends with:\n{capturer.said()[-3000:]}")
            raise
    print(
        f"a directory, kill -9 of its capture: {kills} faults, {sum(copies)} copies of "
        f"{len(copies)} tables, {count} compared, {objects} objects uploaded, and "
        f"{uploaded.behind} faults before all was (keep {uploaded.keep}), "
        f"{time.monotonic() - begin:.0f} s",
        flush=True,
    )


def take_part(
    capturer: Capturer, directory: Path, uploaded: Uploaded, kills: int, chance: random.Random
) -> tuple[Folded, Folded]:
    """Kill the capture again and again, read beside it, ask for copies; the two consumers."""
    wait_for("the directory", lambda: (directory / "position.json").exists())
    uploaded.begin = contents(directory).begin
    often, seldom = Folded(directory, "often"), Folded(directory, "seldom")
    for number in range(kills):
        # A process needs some tenths of a second until it works.
        time.sleep(chance.choice((0.0, 0.4)) + chance.uniform(0.2, chance.choice((0.6, 1.5))))
        if chance.random() < 0.3:
            states = sorted(SnapshotStates(directory).read())
            if states:
                request_copy(directory, chance.choice(states), ["", ""], "a test asks")
        capturer.kill()
        uploaded.note()
        if number > 20 and number % 20 == 10:
            uploaded.look()
        capturer.start()
        often.take()
        if number % 20 == 19:
            seldom.take()
            end = contents(directory).end
            wait_for(
                "progress", lambda end=end: not capturer.keep() and contents(directory).end > end
            )
            wait_for("uploads", lambda end=end: not capturer.keep() and uploaded.position() > end)
    return often, seldom


def finish(server: EmbeddedServer, capturer: Capturer, directory: Path) -> None:
    """Capture what is left, with all copies."""
    if capturer.process is not None and capturer.process.poll() is None:
        capturer.end()
    ((lsn,),) = execute(server, "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
    capturer.options["until_lsn"] = int(lsn)
    capturer.start()
    assert capturer.process is not None
    with contextlib.suppress(PgOutputError):
        wait_for("the end", lambda: capturer.process.poll() is not None)
    assert capturer.process.returncode == 0, capturer.said()[-3000:]
    waiting = [
        state for state in SnapshotStates(directory).read().values() if state.waits_from is not None
    ]
    assert not waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kills", type=int, default=200)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"CHAOS_SEED={seed}", flush=True)
    run(seed, given.kills)


if __name__ == "__main__":
    main()
