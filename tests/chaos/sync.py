"""State tables under faults: a sync with its capture, kill -9 all the while, DDL included.

    python tests/chaos/sync.py [--target duckdb|delta|parquet|iceberg] [--engine local|spark]
        [--seed N] [--kills N]

A writer changes rows and keys, adds, alters, renames and drops columns, truncates, rewrites, drops
and makes tables, alters primary keys and replica identities, and has tables join and leave the
publication. A sync (`syncer.py`) captures a slot and keeps tables up to date from it; it is killed
at moments by chance. With Spark other processes are killed too (`spark_lives.py`): the driver,
executors, Python workers, a capture that the sync follows, and the server; some of them between the
commits of two tables. Now and then, while all that goes on, `verify` must find nothing that
differs. At the end `verify` and a comparison with SELECT find each state table equal to the
server's, and each change table has each change once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import duckdb
import psycopg
import pyarrow.parquet as pq
import spark_lives
from chaos import execute, wait_for
from deltalake import DeltaTable
from sync_processes import LOOK, SparkSyncer, Syncer

from pgoutput_fast.apply import sync
from pgoutput_fast.apply.delta_place import directory_of
from pgoutput_fast.apply.duckdb_sql import versioned
from pgoutput_fast.changelog.consumers import consumers
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.segments.listing import contents
from pgoutput_fast.verify import Report, verify

SETTINGS = {"log_min_messages": "panic", "wal_sender_timeout": "3s", "fsync": False}
TABLES = 5
KEYS = 1000
COLUMNS = 4
"""The most columns of a table that are added."""
PAUSES = {"local": 0.003, "spark": 0.02}
"""Seconds between two transactions, by the engine. A run with Spark takes longer: it has as many,
and on few cores a faster writer would leave Spark no time."""
GRACES = {"local": 2.0, "spark": 60.0}
"""Seconds for which files stay that a merged one covers. On a busy machine a task that Spark runs
again opens files many seconds after the driver has listed them."""
LAST = 2_000_000_000
"""A key that no other row has."""
ATTEMPTS = 10
"""How often copies are waited for, at the end."""
TYPES = ("int", "int DEFAULT 7", "text", "text DEFAULT 'd'", "int DEFAULT (random() * 9)::int")


def make_table(table: str) -> list[str]:
    rows = f"generate_series(1, {KEYS}) AS g"
    return [
        f"CREATE TABLE {table} (id int PRIMARY KEY, v text, k int NOT NULL DEFAULT 0, big text)",
        f"ALTER TABLE {table} ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO {table} SELECT g, 'old', 0, repeat('x', g % 40 * 100) FROM {rows}",
        f"ALTER PUBLICATION p ADD TABLE {table}",
    ]


def make_multiset(table: str) -> list[str]:
    return [
        f"CREATE TABLE {table} (id int, v text)",
        f"ALTER TABLE {table} REPLICA IDENTITY FULL",
        f"INSERT INTO {table} SELECT g % 30, 'old' FROM generate_series(1, 200) AS g",
        f"ALTER PUBLICATION p ADD TABLE {table}",
    ]


class Writer:
    """Changes tables all the time, with a pause of so many seconds."""

    def __init__(self, server: EmbeddedServer, chance: random.Random, pause: float) -> None:
        self._server = server
        self._seconds = pause
        self._chance = random.Random(chance.random())
        self._stop = threading.Event()
        self._pause = threading.Lock()
        self._broken = False
        self._number = 0
        self._added: dict[str, dict[str, str]] = {f"t{n}": {} for n in range(TABLES)}
        self.defined: Counter[str] = Counter()
        self.failed: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._broken:  # the server is restarted
                    time.sleep(0.01)
                    continue
                dsn = self._server.dsn()
                with self._pause, psycopg.connect(dsn, autocommit=True) as connection:
                    while not (self._broken or self._stop.wait(self._seconds)):
                        # A key that is there already: the transaction is rolled back.
                        with contextlib.suppress(psycopg.errors.UniqueViolation):
                            self._write(connection)
        except psycopg.Error as error:
            self.failed = error

    def _write(self, connection: psycopg.Connection[Any]) -> None:
        chance = self._chance
        self._number += 1
        table = f"t{chance.randrange(TABLES)}"
        if chance.random() < 0.01:
            self._define(connection, table)
        elif chance.random() < 0.1:
            connection.execute(chance.choice(self._of_multiset()).encode())
        elif chance.random() < 0.1:
            with connection.transaction():
                for _ in range(chance.randrange(2, 6)):
                    connection.execute(chance.choice(self._of(table)).encode())
        else:
            connection.execute(chance.choice(self._of(table)).encode())

    def _of_multiset(self) -> tuple[str, ...]:
        some = f"ctid IN (SELECT ctid FROM m ORDER BY ctid LIMIT {self._chance.randrange(1, 9)})"
        return (
            f"INSERT INTO m SELECT g % 7, '{self._number % 5}' FROM generate_series(1, 9) AS g",
            f"UPDATE m SET v = '{self._number % 5}' WHERE {some}",
            f"DELETE FROM m WHERE {some}",
        )

    def _of(self, table: str) -> list[str]:
        number, key = self._number, self._chance.randrange(KEYS)
        big = "repeat('y', g % 40 * 100)"
        some = f"FROM generate_series({key}, {key + 20}) AS g ON CONFLICT DO NOTHING"
        statements = [
            f"INSERT INTO {table} (id, v, big) SELECT g, '{number}', {big} {some}",
            f"UPDATE {table} SET v = '{number}' WHERE id BETWEEN {key} AND {key + 10}",
            f"DELETE FROM {table} WHERE id BETWEEN {key} AND {key + 5}",
            f"UPDATE {table} SET id = -{number} WHERE id = {key}",
            f"UPDATE {table} SET k = {number} WHERE id BETWEEN {key} AND {key + 3}",
            f"UPDATE {table} SET big = NULL WHERE id = {key}",
        ]
        return statements + [
            f"UPDATE {table} SET {column} = '{number}' WHERE id BETWEEN {key} AND {key + 10}"
            for column in self._added[table]
        ]

    def _define(self, connection: psycopg.Connection[Any], table: str) -> None:
        chance, number, added = self._chance, self._number, self._added[table]
        column = chance.choice(sorted(added)) if added else ""
        is_published = connection.execute(
            "SELECT count(*) FROM pg_publication_tables WHERE tablename = %s", [table]
        ).fetchone() == (1,)
        type_, key = chance.choice(TYPES), chance.choice(("(id)", "(id, k)", "(k, id)"))
        alter = f"ALTER TABLE {table}"
        kinds: dict[str, list[str]] = {
            "leave": [f"ALTER PUBLICATION p DROP TABLE {table}"] if is_published else [],
            "join": [] if is_published else [f"ALTER PUBLICATION p ADD TABLE {table}"],
            "truncate": [f"TRUNCATE {table}"],
            "rewrite": [f"VACUUM FULL {table}"],
            "rename": [f"{alter} RENAME TO r", f"ALTER TABLE r RENAME TO {table}"],
            "again": [f"DROP TABLE {table}", *make_table(table)],
            "key": [f"{alter} DROP CONSTRAINT {table}_pkey, ADD PRIMARY KEY {key}"],
            "full": [f"{alter} REPLICA IDENTITY FULL"],
            "default": [f"{alter} REPLICA IDENTITY DEFAULT"],
            "add": [f"{alter} ADD c{number} {type_}"] if len(added) < COLUMNS else [],
            "drop column": [f"{alter} DROP {column}"] if column else [],
            "rename column": [f"{alter} RENAME {column} TO c{number}"] if column else [],
            "alter column": [f"{alter} ALTER {column} DROP DEFAULT, ALTER {column} TYPE text"]
            if column else [],
        }  # fmt: skip
        weights = {"join": 3, "add": 3}
        kind = chance.choices(list(kinds), [weights.get(one, 1) for one in kinds])[0]
        if not kinds[kind]:
            return
        if kind == "key":
            # Rows that only the other key tells apart.
            connection.execute(
                f"DELETE FROM {table} WHERE ctid NOT IN (SELECT min(ctid) FROM {table} "
                "GROUP BY id)".encode()
            )
        if kind != "rewrite" and chance.random() < 0.5:
            with connection.transaction():
                for statement in kinds[kind]:
                    connection.execute(statement.encode())
        else:
            for statement in kinds[kind]:
                connection.execute(statement.encode())
        self.defined[kind] += 1
        if kind == "again":
            added.clear()
        elif kind == "add":
            added[f"c{number}"] = type_
        elif kind in ("drop column", "rename column"):
            was = added.pop(column)
            if kind == "rename column":
                added[f"c{number}"] = was

    def restart_server(self) -> None:
        """Kill the server between two transactions, and start it."""
        self._broken = True
        with self._pause:
            self._server.restart("kill")
        self._broken = False

    def end(self) -> None:
        self._stop.set()
        self._thread.join(LOOK)
        assert not self._thread.is_alive(), "a statement of the writer does not end"
        if self.failed is not None:
            raise self.failed


class TableState(NamedTuple):
    """What a target has of a table."""

    relation_id: int
    stored_name: str
    version: int
    stale: str | None
    columns: dict[str, str]
    """The server's names of columns that are not dropped, and the target's."""


class DuckdbTables:
    """The tables in a file of duckdb."""

    def __init__(self, directory: Path) -> None:
        self.options: dict[str, Any] = {}  # of the sync
        self.path = directory / "tables.duckdb"
        self.given = self.verified = f"duckdb:{self.path}"
        self.segments = directory / "tables.duckdb.segments"

    @contextlib.contextmanager
    def _open(self) -> Any:
        with duckdb.connect(str(self.path), read_only=True) as connection:
            yield connection

    def held(self) -> dict[int, TableState]:
        with self._open() as connection:
            rows = connection.execute(
                "SELECT relation_id, stored, version, stale, columns FROM _progress"
            ).fetchall()
        return {row[0]: table_state_of(row) for row in rows}

    def rows(self, held: TableState, columns: list[str]) -> list[tuple[Any, ...]]:
        with self._open() as connection:
            named = ", ".join(f'"{held.columns[name]}"' for name in columns)
            return connection.execute(f'SELECT {named} FROM state."{held.stored_name}"').fetchall()

    def changes(self, held: TableState) -> list[tuple[int, int]]:
        found = []
        with self._open() as connection:
            for version in range(1, held.version + 1):
                name = held.stored_name + ("" if version == 1 else f".v{version}")
                found += connection.execute(
                    f'SELECT commit_lsn, seq FROM changes."{name}"'
                ).fetchall()
        return found


class DeltaTables:
    """Delta tables in a directory."""

    def __init__(self, directory: Path) -> None:
        self.options: dict[str, Any] = {}  # of the sync
        self.path = directory / "lake"
        self.given = self.verified = str(self.path)
        self.segments = directory / "lake.segments"

    def _table(self, *names: str) -> Any:
        return DeltaTable(str(self.path.joinpath(*names))).to_pyarrow_dataset()

    def held(self) -> dict[int, TableState]:
        wanted = ["relation_id", "stored", "version", "stale", "columns"]
        rows = self._table("_progress").to_table(wanted).to_pylist()
        return {row["relation_id"]: table_state_of(tuple(row.values())) for row in rows}

    def rows(self, held: TableState, columns: list[str]) -> list[tuple[Any, ...]] | None:
        stored = [held.columns[name] for name in columns]
        found = self._table("state", directory_of(held.stored_name)).to_table(stored)
        return list(zip(*(found.column(name).to_pylist() for name in stored), strict=True))

    def changes(self, held: TableState) -> list[tuple[int, int]]:
        found = []
        for version in range(1, held.version + 1):
            name = held.stored_name + ("" if version == 1 else f".v{version}")
            rows = self._table("changes", directory_of(name)).to_table(["commit_lsn", "seq"])
            found += [tuple(row.values()) for row in rows.to_pylist()]
        return found


class ParquetTables(DeltaTables):
    """Change tables alone, as readers see them that know nothing of a sync.

    All segments stay. At the end another sync writes a DuckDB file of them, from the newest
    snapshots on. The file has the rows, and tells which changes have to be there.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.given, self.verified = f"parquet:{self.path}", str(self.segments)
        self.options |= {"keep_seconds": None, "keep_bytes": None}
        self._beside = DuckdbTables(directory)

    def _held_beside(self) -> dict[int, TableState]:
        if not self._beside.path.exists():
            sync(segments=self.segments, target=self._beside.given, until="now", consumer="beside")
        return self._beside.held()

    def rows(self, held: TableState, columns: list[str]) -> list[tuple[Any, ...]] | None:
        """None if no capture runs that makes the new snapshot which the file's table needs."""
        beside = self._held_beside()[held.relation_id]
        return None if beside.stale is not None else self._beside.rows(beside, columns)

    def changes(self, held: TableState) -> list[tuple[int, int]]:
        found = self._found(held)
        if held.relation_id in self._held_beside():
            wanted = sorted(self._beside.changes(self._held_beside()[held.relation_id]))
            assert sorted(one for one in found if one >= min(wanted, default=one)) == wanted
        return found

    def _found(self, held: TableState) -> list[tuple[int, int]]:
        found = []
        for version in range(1, held.version + 1):
            name = held.stored_name + ("" if version == 1 else f".v{version}")
            for file in (self.path / "changes" / directory_of(name)).glob("*.parquet"):
                rows = pq.read_table(file, columns=["commit_lsn", "seq"])
                found += [tuple(row.values()) for row in rows.to_pylist()]
        return found


class IcebergTables(DeltaTables):
    """Change tables in a catalogue of Iceberg."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.options["iceberg"] = {"type": "sql", "uri": f"sqlite:///{directory / 'catalog.db'}"}

    def changes(self, held: TableState) -> list[tuple[int, int]]:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("pgoutput_fast", **self.options["iceberg"])
        found = []
        for version in range(1, held.version + 1):
            table = catalog.load_table(("changes", versioned(held.stored_name, version)))
            rows = table.scan(selected_fields=("commit_lsn", "seq")).to_arrow()
            found += list(
                zip(*(rows.column(n).to_pylist() for n in ("commit_lsn", "seq")), strict=True)
            )
        return found


def table_state_of(row: Any) -> TableState:
    columns = {one[0]: one[1] for one in json.loads(row[4])}  # as of `Column`
    return TableState(*row[:4], columns)


AnyTables = DuckdbTables | DeltaTables
TARGETS: dict[str, type[AnyTables]] = {
    "duckdb": DuckdbTables, "delta": DeltaTables, "parquet": ParquetTables,
    "iceberg": IcebergTables,
}  # fmt: skip


def compare(server: EmbeddedServer, tables: AnyTables) -> int:
    """The number of tables that are published, all of which have the server's rows."""
    published = execute(
        server,
        "SELECT tablename::regclass::oid::bigint, tablename, attnames::text[] "
        "FROM pg_publication_tables WHERE pubname = 'p'",
    )
    all_held = tables.held()
    for relation_id, table, columns in published:
        held = all_held[relation_id]
        assert held.stale is None, (table, held.stale)
        # A column that came since the last change has no column there.
        there = [name for name in columns if name in held.columns]
        truth = Counter(execute(server, f"SELECT {', '.join(there)} FROM {table}"))
        rows = tables.rows(held, there)
        found = truth if rows is None else Counter(rows)
        assert found == truth, (
            f"{table} ({relation_id}) has {found.total()} rows, the server {truth.total()}; too "
            f"many: {list(found - truth)[:3]}, too few: {list(truth - found)[:3]}"
        )
    return len(published)


def count_changes(tables: AnyTables) -> int:
    """How many changes there are, each of which is there once."""
    total = 0
    for held in tables.held().values():
        found = Counter(tables.changes(held))
        twice = {place: times for place, times in found.items() if times > 1}
        shown = f"{held.stored_name}: {len(twice)} changes twice, such as {list(twice)[:3]}"
        assert not twice, shown
        total += found.total()
    return total


def tell_positions(server: EmbeddedServer, tables: AnyTables) -> None:
    """Print how far all is, for who looks for the cause of a failure."""
    found = contents(tables.segments)
    ends = [(format_lsn(one.end_lsn), one.path.name) for one in found.segments[-3:]]
    print(f"the directory ends at {format_lsn(found.end)}, its last segments at {ends}")
    for relation_id, state in SnapshotStates(tables.segments).read().items():
        print(f"table {relation_id}: {state}")
    for one in consumers(tables.segments):
        print(f"consumer {one.name}: {one.position}")
    with contextlib.suppress(Exception):  # another process may write it
        for held in tables.held().values():
            print(f"in the target: {held}")
    for query in (
        "SELECT slot_name, restart_lsn::text, confirmed_flush_lsn::text FROM pg_replication_slots",
        "SELECT application_name, state, sent_lsn::text, flush_lsn::text FROM pg_stat_replication",
        "SELECT pid, wait_event, pg_blocking_pids(pid), query FROM pg_stat_activity",
    ):
        print(*execute(server, query), sep="\n")


def verified(server: EmbeddedServer, tables: AnyTables, **options: Any) -> Report:
    """What verify says; that nothing differs."""
    report = verify(server.dsn(), publications=["p"], target=tables.verified, **options)
    differing = [one for one in report.tables if one.state == "different"]
    assert not differing, differing
    return report


class Looks:
    """Looks of `verify` at the tables, beside the faults."""

    def __init__(self, server: EmbeddedServer, tables: AnyTables, syncer: Syncer) -> None:
        self._server = server
        self._tables = tables
        self._syncer = syncer
        self._next = 5
        self.equal = 0
        """How many tables were found equal."""

    def is_due(self, faults: int) -> bool:
        """Whether it is time for a look."""
        return faults >= self._next

    def take(self, faults: int) -> None:
        """Look, behind every twentieth fault."""
        if not self.is_due(faults):
            return
        try:
            report = verified(self._server, self._tables, rounds=3, timeout=LOOK)
        except PgOutputError as error:
            if error.parameter != "target":
                raise
            return  # the sync was killed each time before it had made a table
        self._next += 20
        self.equal += sum(one.state == "equal" for one in report.tables)
        self._syncer.check()
        print(f"{faults} faults, {self.equal} tables found equal", flush=True)


def run(target: str, engine: str, seed: int, kills: int, directory: Path | None) -> None:
    chance = random.Random(f"{target} {seed}")
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tables = TARGETS[target](directory)
        server = stack.enter_context(EmbeddedServer(chance.choice((16, 18)), SETTINGS))
        execute(server, "CREATE PUBLICATION p", *make_multiset("m"))
        for number in range(TABLES):
            execute(server, *make_table(f"t{number}"))
        writer = Writer(server, chance, PAUSES[engine])
        stack.callback(writer.end)
        options = {
            "slot": "s", "publications": ["p"], "retry_for": 60, "max_delay": 0.05,
            "segment_bytes": 100_000, "grace": GRACES[engine], "keep_bytes": 300_000,
            "keep_seconds": 5.0, "quick": True, "interval": 0.1, **tables.options,
        }  # fmt: skip
        given: Any = (tables.given, server.dsn())
        syncer: Any
        if engine == "spark":
            syncer = SparkSyncer(*given, tables.segments, **options)
        else:
            syncer = Syncer(*given, **options)
        syncer.chance = random.Random(chance.random())
        stack.callback(syncer.close)
        looks = Looks(server, tables, syncer)
        try:
            if engine == "spark":
                said = take_part_with_spark(writer, syncer, looks, kills, chance)
            else:
                said = take_part(syncer, tables, looks, kills)
            writer.end()
            report = finish(server, syncer, tables)
            count = compare(server, tables)
            changes = count_changes(tables)
        except Exception:
            syncer.tell_threads()
            print(f"The sync's log ends with:\n{syncer.said()[-6000:]}")
            tell_positions(server, tables)
            sys.stdout.flush()
            raise
        troubles = f", {syncer.troubles()} errors that pass" if engine == "spark" else ""
    assert len(report.tables) == count
    print(
        f"tables in {target}, kill -9 of their sync ({engine}): {said}{troubles}, {count} tables "
        f"compared, {looks.equal} meanwhile, {changes:,} changes, {writer.defined.total()} DDL "
        f"({', '.join(f'{name} {n}' for name, n in sorted(writer.defined.items()))}), "
        f"{time.monotonic() - begin:.0f} s",
        flush=True,
    )


def take_part(syncer: Syncer, tables: AnyTables, looks: Looks, kills: int) -> str:
    """Kill the sync again and again, and verify beside it: what was done."""
    syncer.start()
    wait_for("the first window", lambda: tables.path.exists())
    for number in range(kills):
        syncer.live()
        syncer.kill()
        syncer.start(is_waited_for=looks.is_due(number + 1))
        looks.take(number + 1)
    return f"{kills} faults"


def take_part_with_spark(
    writer: Writer, syncer: SparkSyncer, looks: Looks, kills: int, chance: random.Random
) -> str:
    """Kill all of it, each kind of process in its turn: what was done."""
    lives = spark_lives.planned(chance, kills)
    came = spark_lives.take_part(lives, syncer, writer, looks.take)
    syncer.life = spark_lives.last_life(chance)
    syncer.start()
    missing = [kind for kind in spark_lives.KINDS if not came[kind]]
    assert not missing, f"faults that did not come: {missing}"
    kinds = ", ".join(f"{kind} {came[kind]}" for kind in spark_lives.KINDS)
    return f"{came.total()} faults ({kinds}) in {len(lives) + 1} lives"


def finish(server: EmbeddedServer, syncer: Syncer, tables: AnyTables) -> Report:
    """Sync what is left, with all copies that are asked for."""
    syncer.check()
    syncer.end()
    # The server tells of a new column with the table's next change. Without one, verify can't
    # compare the column, and says so by its exit code.
    execute(server, *(f"INSERT INTO t{number} (id) VALUES ({LAST})" for number in range(TABLES)))
    syncer.options["until"] = "now"
    for _ in range(ATTEMPTS):
        syncer.start()
        ended = syncer.process.poll
        wait_for("the end", lambda ended=ended: ended() is not None, 300.0)
        syncer.ended_well()
        report = verified(server, tables)
        left = [one for one in report.tables if one.state != "equal"]
        if isinstance(tables, ParquetTables):
            # Of a column that was added no change may have had a row's value. The file has it.
            left = [one for one in left if not one.why.startswith("the change log lacks values")]
        if not left:
            break
    assert not left, [(one.name, one.state, one.why) for one in left]
    waiting = [
        one for one in SnapshotStates(tables.segments).read().values() if one.waits_from is not None
    ]
    assert not waiting
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, default="duckdb")
    parser.add_argument("--engine", choices=["local", "spark"], default="local")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--directory", type=Path, default=None, help="a new one, which is kept")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    again = (
        f"python tests/chaos/sync.py --target {given.target} --engine {given.engine} "
        f"--seed {seed} --kills {given.kills}"
    )
    print(f"CHAOS_SEED={seed}\n{again}", flush=True)
    try:
        run(given.target, given.engine, seed, given.kills, given.directory)
    except BaseException:
        print(f"It failed with CHAOS_SEED={seed}. The same faults again:\n{again}", flush=True)
        raise


if __name__ == "__main__":
    main()
