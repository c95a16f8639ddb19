"""Windows that need more memory than they may have: their rows go to a file, and come back."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.changelogs.made_directory import MadeDirectory
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.targets.synced_tables import TABLES, Tables

import pgoutput_fast as pf
from pgoutput_fast import apply, testing
from pgoutput_fast.apply import folding, row_stores
from pgoutput_fast.apply.row_stores import RowStore, SpillFile

KEYED = testing.Table("keyed", {"id": "int4", "name": "text", "long": "text"}, 16390, key=["id"])
NAMED = testing.Table("named", {"id": "int4", "name": "text", "long": "text"}, 16391, key=["name"])
WHOLE = testing.Table("whole", {"id": "int4", "name": "text"}, 16392, replica_identity="f")


def test_rows_are_the_same_from_memory_and_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_stores, "_MOST_BYTES", 2_000)
    monkeypatch.setattr(row_stores, "_LEAST_ROWS", 7)
    chance = random.Random(1)
    fields = [
        pa.field("number", pa.int64()),
        pa.field("kind", pa.dictionary(pa.int32(), pa.string())),
        pa.field("many", pa.list_(pa.string())),
    ]
    store = RowStore(SpillFile(), pa.schema(fields[:2]))
    expected: list[tuple[Any, ...]] = []
    for _ in range(60):
        if len(expected) > 100:
            store.schema = pa.schema(fields)
        rows = [
            (chance.choice([None, chance.randrange(99)]), chance.choice("abc"),
             [chance.choice("xyz")] * chance.randrange(3) if len(store.schema) == 3 else None)
            for _ in range(chance.randrange(1, 9))
        ]  # fmt: skip
        store.append([pa.array(column, field.type) for column, field in zip(
            zip(*rows, strict=True), store.schema, strict=False
        )])  # fmt: skip
        expected += rows
    assert any(not isinstance(batch, pa.RecordBatch) for batch in store._batches)
    count = len(expected)
    for numbers in (
        np.arange(count), np.arange(20, 90), np.zeros(0, np.int32),
        np.array(chance.choices(range(count), k=200), np.int32),
        np.sort(np.array(chance.sample(range(count), k=50))),
    ):  # fmt: skip
        nulls = np.array([chance.random() < 0.2 for _ in numbers], bool)
        for given in (None, nulls, ~np.zeros_like(nulls)):
            reader = store.reader()
            found = reader.find(numbers, given)
            for i, field in enumerate(fields):
                assert reader.take(field, found).to_pylist() == [
                    None if given is not None and given[at] else expected[number][i]
                    for at, number in enumerate(numbers.tolist())
                ]


def changes_of(table: testing.Table, there: list[int], chance: random.Random) -> list[bytes]:
    """Inserts, updates without some values, moves of keys, and deletes."""
    frames = []
    for number in range(150):
        row = [number, f"n{number}", f"long {number}"]
        what = chance.random()
        if what < 0.5 or not there:
            if number not in there:
                there.append(number)
                frames.append(testing.insert(table, row))
            continue
        number = chance.choice(there)
        key = {"name": f"n{number}"} if table is NAMED else {"id": number}
        if what < 0.6:
            there.remove(number)
            frames.append(testing.delete(table, key))
        elif what < 0.7 and (moved := 1000 + number) not in there:
            there[there.index(number)] = moved
            frames.append(testing.update(table, [moved, f"n{moved}", pf.UNCHANGED], old=key))
        else:
            long = chance.choice([pf.UNCHANGED, f"new {chance.random()}"])
            frames.append(testing.update(table, [number, f"n{number}", long]))
    return frames


def changes_of_rows(there: list[list[Any]], chance: random.Random) -> list[bytes]:
    frames = []
    for _ in range(100):
        row = [chance.randrange(9), chance.choice(["a", "b", None])]
        if chance.random() < 0.6 or not there:
            there.append(row)
            frames.append(testing.insert(WHOLE, row))
        else:
            gone = there.pop(chance.randrange(len(there)))
            frames.append(testing.delete(WHOLE, gone))
    return frames


def synced(made: MadeDirectory, tables: Tables) -> dict[str, Counter[tuple[Any, ...]]]:
    done = apply.sync(
        segments=made.directory, until="now", uncopied="empty", window_bytes=1, **tables.given
    )
    assert done.stale == {}
    return {
        table.name: Counter(
            tuple(row.values()) for row in tables.state(f"public.{table.name}").to_pylist()
        )
        for table in (KEYED, NAMED, WHOLE)
    }


@pytest.mark.parametrize("kind", ["duckdb", "delta"])
def test_a_window_that_spills_gives_the_same_tables(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(2)
    there: dict[str, list[Any]] = {"keyed": [], "named": [], "whole": []}
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        for lsn in (2000, 3000):
            made.commit(
                lsn, *(table.relation() for table in (KEYED, NAMED, WHOLE)),
                *changes_of(KEYED, there["keyed"], chance),
                *changes_of(NAMED, there["named"], chance),
                *changes_of_rows(there["whole"], chance),
            )  # fmt: skip
        (tmp_path / "all").mkdir()
        expected = synced(made, TABLES[kind](tmp_path / "all"))
        assert {row[0] for row in expected["keyed"]} == {*there["keyed"]}
        assert expected["whole"] == Counter(map(tuple, there["whole"]))
        monkeypatch.setattr(row_stores, "_MOST_BYTES", 1_000)
        monkeypatch.setattr(row_stores, "_LEAST_ROWS", 10)
        monkeypatch.setattr(folding, "_ROWS_AT_ONCE", 30)
        for name in IMPLEMENTATIONS:
            (tmp_path / name).mkdir()
            with chosen(name):
                assert synced(made, TABLES[kind](tmp_path / name)) == expected


_GROWTH = """
import resource, sys
from pathlib import Path
from pgoutput_fast import apply, testing
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

directory, target = sys.argv[1:3]
table = testing.Table("t", {"id": "int8", "body": "text"}, key=["id"])
metadata = SegmentMetadata("7", "d", "s", ("p",), 180004, "UTF8", {}, {"proto_version": "1"})
peaks = []
for number, thousands in enumerate((100, 400), 1):
    place = Path(directory, str(number))
    writer = SegmentWriter(place, metadata, confirmed_flush_lsn=900)
    writer.write(0, table.relation())
    writer.write(2000, testing.begin(7, 2000, 1))
    for thousand in range(thousands):
        body = [testing.insert(table, [thousand * 1000 + i, "x" * 200]) for i in range(1000)]
        writer.write_frames(body, [1900] * 1000)
    writer.write(2010, testing.commit(2000, 2010, 1))
    writer.flush()
    writer.close()
    given = {"duckdb_memory": 128 << 20} if target.startswith("duckdb:") else {}
    place = target + str(number)
    done = apply.sync(segments=Path(directory, str(number)), target=place, until="now",
                      uncopied="empty", **given)
    assert done.changes == thousands * 1000
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is another one")
@pytest.mark.parametrize("target", ["duckdb:{}/t.duckdb", "{}/lake"])
def test_a_transaction_four_times_as_large_takes_little_more_memory(
    tmp_path: Path, target: str
) -> None:
    script = tmp_path / "growth.py"  # with -c duckdb takes the process for an interactive one
    script.write_text(_GROWTH, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "log"), target.format(tmp_path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    small, large = map(int, ended.stdout.split())
    # In KiB. With all rows in memory it was 300 MB in Delta tables, and 430 MB in DuckDB.
    assert large - small < 200 << 10
