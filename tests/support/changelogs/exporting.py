"""Segments to export, and the rows of what was exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import pgoutput_fast as pf
from pgoutput_fast import files, testing
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

TEXT = pf.Policies(infinity="text", out_of_range="text", special_values="text")


# --- frames and segments -------------------------------------------------------------------------


def relation(
    oid: int, name: str, *columns: tuple[int, str, int], namespace: str = "public"
) -> bytes:
    types = {column: type_id for _, column, type_id in columns}
    key = [column for flags, column, _ in columns if flags]
    return testing.Table(name, types, oid, namespace=namespace, key=key).relation()


def row(values: Sequence[Any]) -> list[Any]:
    return [pf.UNCHANGED if value == "<unchanged>" else value for value in values]


def insert(oid: int, *values: Any) -> bytes:
    return testing.insert(oid, row(values))


class Landing:
    """Segments of synthetic transactions, one after the other."""

    def __init__(self, directory: Path, **metadata: Any) -> None:
        self.directory = directory
        self.lsn = 0x1000
        self.metadata = SegmentMetadata(
            **{
                "system_identifier": "1", "database": "d", "slot": "s", "publications": ("p",),
                "server_version": 180004, "encoding": "UTF8", "settings": {}, "options": {},
            } | metadata
        )  # fmt: skip

    def __call__(self, *transactions: Sequence[bytes], part_frames: int = 16_384) -> Path:
        """A segment of the transactions; several parts of it, if one is of so many frames."""
        with pytest.MonkeyPatch.context() as patched, SegmentWriter(
            self.directory, self.metadata, confirmed_flush_lsn=0,
            segment_bytes=50 * part_frames if part_frames < 16_384 else 16 << 20,
        ) as writer:  # fmt: skip
            patched.setattr("pgoutput_fast.segments.writer.BATCH_FRAMES", part_frames)
            for frames in transactions:
                self.lsn += 0x1000
                commit = self.lsn + 0x800
                writer.write(self.lsn, testing.begin(self.lsn, commit, 5_000_000))
                for number, frame in enumerate(frames):
                    writer.write(self.lsn + number, frame)
                writer.write(commit, testing.commit(commit, commit + 8, 5_000_000))
            writer.flush()
        return self.directory


ACCOUNTS = relation(7, "accounts", (1, "id", 23), (0, "note", 25), (0, "span", 1186))


# --- reading it again ----------------------------------------------------------------------------


def read(path: Path) -> pa.Table:
    return pa.parquet.ParquetFile(path).read()


def rows_of(table: files.ExportedTable) -> list[tuple[Any, ...]]:
    """The rows of a version of a table as Python's values."""
    return [tuple(one.values()) for path in table.files for one in read(path).to_pylist()]


def many(land: Landing, count: int, first: int = 0) -> Path:
    """Segments, each with rows of three tables, the last in a new version from the third on."""
    for number in range(first, first + count):
        frames: list[bytes] = [ACCOUNTS]
        other = [(1, "id", 23), *([(0, "more", 25)] if number > 2 else [])]
        frames += [relation(8, "b", *other), relation(9, "c", (1, "id", 23))]
        more = ["m"] if number > 2 else []
        for i in range(300):
            frames.append(insert(7, str(number * 1000 + i), f"note {i}", "1 day"))
            frames.append(insert(8, str(i), *more))
        if number % 2:
            frames.append(insert(9, "1"))
        # Parts: a transaction that is larger than a segment.
        land(frames, part_frames=250 if number == 1 else 16_384)
    return land.directory


def update(oid: int, *values: Any) -> bytes:
    return testing.update(oid, row(values))


def delete(oid: int, *key: Any, kind: str = "K") -> bytes:
    return testing.delete(oid, row(key), kind)


def beside(directory: Path, what: str) -> list[dict[str, Any]]:
    """The events, or the errors."""
    (path,) = directory.glob(f"_{what}.*")
    return list(read(path).to_pylist())
