"""Segments that tests write, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgoutput_fast import testing
from pgoutput_fast.segments import (
    Segment,
    SegmentMetadata,
    SegmentReader,
    SegmentWriter,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

METADATA = SegmentMetadata(
    system_identifier="7000000000000000001",
    database="shop",
    slot="s",
    publications=("p",),
    server_version=180004,
    encoding="UTF8",
    settings={"DateStyle": "ISO, MDY"},
    options={"proto_version": "1"},
)
Frames = list[tuple[int, bytes]]


def begin(commit_lsn: int, xid: int = 7, time: int = -5) -> bytes:
    return testing.begin(xid, commit_lsn, time)


def commit(commit_lsn: int, end_lsn: int) -> bytes:
    return testing.commit(commit_lsn, end_lsn, -5)


def relation(oid: int, name: str = "t") -> bytes:
    return testing.Table(name, {}, oid).relation()


def insert(oid: int = 1, value: bytes = b"x") -> bytes:
    return testing.insert(oid, [("t", value)])


def message(lsn: int, content: bytes = b"c", *, transactional: bool = False) -> bytes:
    return testing.message("p", content, lsn, transactional)


def transaction(lsn: int, *body: bytes, xid: int = 7, announces: bool = True) -> Frames:
    """A transaction that commits at `lsn` and ends at `lsn + 10`.

    It announces relation 1, unless `body` announces something, or has no rows.
    """
    tags = {frame[:1] for frame in body}
    if announces and not tags & {b"R", b"Y"} and tags & {b"I", b"T"}:
        body = (relation(1), *body)
    return [
        (lsn - 5, begin(lsn, xid)),
        *((lsn - 5, frame) for frame in body),
        (lsn + 10, commit(lsn, lsn + 10)),
    ]


def writer(directory: Path, confirmed: int = 50, **options: Any) -> SegmentWriter:
    return SegmentWriter(directory, METADATA, confirmed_flush_lsn=confirmed, **options)


def write(out: SegmentWriter, *frames: Iterable[tuple[int, bytes]]) -> list[int]:
    """All frames; the positions that may be acknowledged."""
    positions = [out.write(lsn, frame) for group in frames for lsn, frame in group]
    return [position for position in positions if position is not None]


def rows(path: Path | Segment) -> list[dict[str, Any]]:
    with SegmentReader(path.path if isinstance(path, Segment) else path) as reader:
        return [row for batch in reader for row in batch.to_pylist()]


def data(segment: Segment) -> list[bytes]:
    return [row["data"] for row in rows(segment)]


def names(directory: Path) -> list[str]:
    """Of all but the position, which is always there."""
    found = sorted(path.name for path in directory.iterdir())
    found.remove("position.json")
    return found
