"""Measure what changes come to: the fold, beside the last row per key, and tables kept by it.

polars and duckdb do less: they take the last row of each key, and know nothing of values that were
not sent, of keys that change, or of changes that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pgoutput_fast as pf
from pgoutput_fast import apply, testing
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter
from pgoutput_fast.segments.listing import contents

from . import harness
from .harness import Case, NotMeasured, Results, optional_module
from .slopes import slot_cases

KEYS = {
    "int key": {"id": "int4"},
    "text key": {"id": "text"},
    "two columns": {"id": "int4", "part": "text"},
}
"""Name of a case → the columns of its table's key."""
REST = {"a": "text", "b": "int8", "c": "timestamptz", "d": "float8", "e": "text"}
_FOLDED = 200_000  # changes
_TRANSACTION = 100  # changes of a transaction
_METADATA = SegmentMetadata(
    "7000000000000000001", "shop", "s", ("p",), 180004, "UTF8", {}, {"proto_version": "1"}
)


def changes(
    table: testing.Table, columns: dict[str, str], count: int, seed: int
) -> Iterator[list[bytes]]:
    """Transactions that insert, update and delete; one update in a hundred moves a key."""
    key, is_text = [*columns], columns["id"] == "text"
    chance = random.Random(seed)
    there: list[Any] = []
    made = 0

    def named(number: int) -> list[Any]:
        if is_text:
            return [f"{number:x}-{number % 97}"]
        return [number, f"part {number % 7}"][: len(key)]

    def row(values: list[Any]) -> list[Any]:
        text = "x" * chance.randrange(40)
        return [*values, f"value {made} {text}", made * 7, "2026-01-02 03:04:05.678+00", 0.5, text]

    for start in range(0, count, _TRANSACTION):
        frames = []
        for _ in range(min(_TRANSACTION, count - start)):
            made += 1
            what = chance.random()
            if what < 0.25 or not there:
                there.append(named(made))
                frames.append(testing.insert(table, row(there[-1])))
                continue
            at = chance.randrange(len(there))
            if what < 0.32:
                there[at], there[-1] = there[-1], there[at]
                frames.append(testing.delete(table, dict(zip(key, there.pop(), strict=True))))
            elif what < 0.33:
                old, there[at] = there[at], named(-made)
                frames.append(
                    testing.update(table, row(there[at]), old=dict(zip(key, old, strict=True)))
                )
            else:
                frames.append(testing.update(table, row(there[at])))
        yield frames


def _table(name: str, columns: dict[str, str], relation_id: int) -> testing.Table:
    return testing.Table(name, columns | REST, relation_id, key=[*columns])


def fold_cases(count: int, seconds: float, missing: dict[str, str]) -> Iterator[Case]:
    """For each kind of key: decoding, the fold of what was decoded, and what others do with it."""
    import pyarrow as pa

    for name, columns in KEYS.items():
        table = _table("t", columns, 16384)
        frames = [table.relation()]
        for number, body in enumerate(changes(table, columns, count, 1), 1):
            lsn = number * 1000
            frames += [testing.begin(number, lsn), *body, testing.commit(lsn)]
        given = pa.array(frames, pa.binary())
        decoded = [pa.record_batch(batch) for batch in pf.ColumnarDecoder().decode(given)]
        whole = pa.Table.from_batches(decoded)

        def decode(given: Any = given) -> None:
            for batch in pf.ColumnarDecoder().decode(given):
                pa.record_batch(batch)

        def fold(decoded: list[Any] = decoded) -> None:
            apply.fold(decoded)

        loops: dict[str, Callable[[], object]] = {"decoding": decode, "fold": fold}
        loops |= _last_rows(whole, [*columns], missing)
        for who, run in loops.items():
            yield harness.timed(f"fold: {name}/{who}", run, count, seconds)


def _last_rows(
    whole: Any, key: list[str], missing: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """The last row of each key, by others, over the same Arrow data."""
    import pyarrow as pa
    import pyarrow.compute as pc

    after = whole.column("after").combine_chunks()
    before = whole.column("before").combine_chunks()
    gone = pc.equal(whole.column("op"), "delete").combine_chunks()
    flat = {
        name: pc.if_else(gone, before.field(name), after.field(name)) if name in key
        else after.field(name)
        for name in [*key, *REST]
    }  # fmt: skip
    rows = pa.table({**flat, "op": whole.column("op"), "n": pa.array(range(len(whole)))})
    found: dict[str, Callable[[], object]] = {}
    try:
        polars = optional_module("polars")
        frame = polars.from_arrow(rows)
        found["polars, last row"] = lambda: frame.unique(key, keep="last")
    except NotMeasured as reason:
        missing["polars, last row"] = str(reason)
    try:
        duckdb = optional_module("duckdb")
        connection = duckdb.connect(config={"threads": 1})
        connection.register("rows", rows)
        last = ", ".join(f"max_by({name}, n)" for name in [*REST, "op"])
        query = f"SELECT {', '.join(key)}, {last} FROM rows GROUP BY ALL"
        found["duckdb, last row"] = lambda: connection.sql(query).fetch_arrow_table()
    except NotMeasured as reason:
        missing["duckdb, last row"] = str(reason)
    return found


@contextlib.contextmanager
def sync_cases(count: int) -> Iterator[list[Case]]:
    """From segments to change tables and state tables, by the clock and by CPU."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for tables in (1, 4, 200):
            write_segments(root / f"{tables}", tables, count)
        yield [
            _sync_case(root, tables, count, is_second=is_second)
            for is_second in (False, True)
            for tables in (1, 4, 200)
        ]


def write_segments(directory: Path, tables: int, count: int) -> None:
    """Two segments of so many tables that share the changes."""
    made = [_table(f"t{i}", KEYS["int key"], 16384 + i) for i in range(tables)]
    streams = [changes(table, KEYS["int key"], count // tables, i) for i, table in enumerate(made)]
    writer = SegmentWriter(directory, _METADATA, confirmed_flush_lsn=900)
    with contextlib.closing(writer):
        for table in made:
            writer.write(0, table.relation())
        lsn, left, written, is_flushed = 0, list(streams), 0, False
        while left:
            for stream in list(left):
                if written >= count // 2 and not is_flushed:
                    writer.flush()
                    is_flushed = True
                body = next(stream, None)
                if body is None:
                    left.remove(stream)
                    continue
                lsn += 1000
                writer.write(lsn, testing.begin(7, lsn, lsn))
                written += len(body)
                for frame in body:
                    writer.write(lsn - 5, frame)
                writer.write(lsn + 10, testing.commit(lsn, lsn + 10, lsn))
        writer.flush()


def _sync_case(root: Path, tables: int, count: int, *, is_second: bool) -> Case:
    """All of it, by which tables are made; or one more window, when they are there."""
    place, segments = root / "target", root / f"{tables}"

    def sync(**options: Any) -> apply.SyncProgress:
        return apply.sync(
            segments=segments, target=f"duckdb:{place / 'tables.duckdb'}", uncopied="empty",
            **options,
        )  # fmt: skip

    def run() -> dict[str, float]:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        before_it = 0
        if is_second:
            first = contents(segments).segments[0]
            before_it = sync(until=first.end_lsn, window_bytes=1).changes
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        done = sync(until="now")
        after = resource.getrusage(resource.RUSAGE_SELF)
        wall = time.perf_counter() - begin
        assert before_it + done.changes == count // tables * tables, done
        assert done.windows == 1, done
        assert bool(before_it) is is_second, done
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return {"cpu": cpu / done.changes, "wall": wall / done.changes}

    which = "sync, second window" if is_second else "sync"
    return Case(f"{which}: {tables} table{'s' * (tables > 1)}/DuckDB", run, lambda: None)


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure both."""
    optional_module("pyarrow")
    rounds = options.rounds or (3 if options.quick else 7)
    folded = round(_FOLDED * (options.scale or 1))
    harness.measure(fold_cases(folded, 0.05, results.missing), rounds, results)
    optional_module("duckdb")
    count = int(400_000 * (options.scale or 1))
    with sync_cases(count) as cases:
        harness.measure(cases, rounds, results)
    try:
        with slot_cases((options.scale or 1) * (0.05 if options.quick else 1)) as cases:
            harness.measure(cases, 1 if options.quick else min(rounds, 3), results)
    except NotMeasured as reason:
        results.missing["slot to tables"] = str(reason)
    results.described["apply"] = (
        f"{folded:,} changes of 8 columns for each fold: a quarter inserts, 7 % deletes, 1 % "
        f"updates of the key; {count:,} for each sync, half of them for a second window"
    )
