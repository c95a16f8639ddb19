"""Applies a stream's changes, for what its tables hold in the end, and reads the server's COPY.

Rows keep where each value was sent, so that it is decoded by the relation it came with. Streamed
transactions are applied when they commit, without what was rolled back, prepared ones when their
second phase commits.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pgoutput_fast as pf

__all__ = ["Cell", "Copy", "Tables", "committed", "copies"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A value: the tuple that brought it, where it is in there, and the relation of then."""

    data: Any
    number: int
    column: Any
    raw: Any
    relation: Any


Row = dict[str, Cell]


def committed(messages: Iterable[Any]) -> Iterator[Any]:
    """Row changes of what commits, in the order of the commits."""
    inside: list[Any] = []
    streamed: dict[int, list[Any]] = {}
    prepared: dict[str, list[Any]] = {}
    top = 0
    for message in messages:
        tag = message.tag
        if tag in "IUDT":
            (streamed[top] if message.in_stream else inside).append(message)
        elif tag in "Bb":
            inside = []
        elif tag == "C":
            yield from inside
        elif tag == "P":
            prepared[message.gid] = inside
        elif tag == "S":
            top = message.xid
            streamed.setdefault(top, [])
        elif tag == "c":
            yield from streamed.pop(message.xid)
        elif tag == "p":
            prepared[message.gid] = streamed.pop(message.xid)
        elif tag == "A" and message.xid == message.subxid:
            streamed.pop(message.xid, None)
        elif tag == "A":
            kept = [change for change in streamed[message.xid] if change.xid != message.subxid]
            streamed[message.xid] = kept
        elif tag == "K":
            yield from prepared.pop(message.gid, ())
        elif tag == "r":
            prepared.pop(message.gid, None)


class Tables:
    """What the tables hold, by OID.

    Attributes
    ----------
    rows : dict of int to list of Row
    relations : dict of int to Relation
        As of each table's last change.
    unknown : dict of int to int
        How many rows of a table were updated or deleted that no change had brought.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[Row]] = {}
        self.relations: dict[int, Any] = {}
        self.unknown: dict[int, int] = {}

    def apply(self, change: Any) -> None:
        if change.tag == "T":
            for relation_id in change.relation_ids:
                self.rows[relation_id] = []
            return
        relation = change.relation
        oid = relation.relation_id
        self.relations[oid] = relation
        rows = self.rows.setdefault(oid, [])
        previous: Row | None = None
        if change.tag in "UD":
            old = change.old if change.old is not None else change.new
            everything = change.old is not None and change.old_kind == "O"
            wanted = cells(old, relation)
            if not everything:
                wanted = {n: c for n, c in wanted.items() if c.column.is_key}
            at = next((i for i, row in enumerate(rows) if same(row, wanted)), None)
            if at is None or not (wanted or everything):
                self.unknown[oid] = self.unknown.get(oid, 0) + 1
            else:
                previous = rows.pop(at)
        if change.tag == "D":
            return
        row = cells(change.new, relation)
        for name, cell in row.items():
            if cell.raw is pf.UNCHANGED:
                assert previous is not None, f"{relation.name}.{name} is unchanged since when?"
                row[name] = previous[name]
        rows.append(row)


def cells(data: Any, relation: Any) -> Row:
    return {
        column.name: Cell(data, number, column, raw, relation)
        for number, (column, raw) in enumerate(zip(relation.columns, data.raws(), strict=True))
    }


def same(row: Row, wanted: Row) -> bool:
    """Whether the row has these values, as far as it has their columns."""
    for name, cell in wanted.items():
        mine = row.get(name)
        if mine is not None and cell.raw is not pf.UNCHANGED and mine.raw != cell.raw:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class Copy:
    """A table as the server copied it: as text, and as binary where its types have that."""

    oid: int
    schema: str
    table: str
    columns: list[str]
    text: list[list[str | None]]
    binary: list[list[bytes | None]] | None


def copies(path: Path, guc_set: str, encoding: str, publication: str | None = None) -> list[Copy]:
    """The tables in `copy/` of a truth.zip, copied under the session settings `guc_set`.

    Of a publication, those of which it publishes only some rows or columns, and only these.
    """
    found = []
    with zipfile.ZipFile(path) as archive:
        for entry in json.loads(archive.read("copy/index.json"))["files"]:
            if entry.get("publication") != publication or entry["guc_set"] != guc_set:
                continue
            binary = entry.get("binary")
            width = len(entry["columns"])
            found.append(
                Copy(
                    entry["oid"],
                    entry["schema"],
                    entry["table"],
                    entry["columns"],
                    list(copied_text(archive.read(entry["text"]), width, encoding)),
                    list(copied_binary(archive.read(binary))) if binary else None,
                )
            )
    return found


_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def copied_text(data: bytes, width: int, encoding: str) -> Iterator[list[str | None]]:
    """Rows of COPY's text format."""
    for line in data.decode(encoding, "surrogateescape").split("\n")[:-1]:
        if not width:
            yield []
            continue
        row: list[str | None] = []
        for word in line.split("\t"):
            if word == "\\N":
                row.append(None)
                continue
            first, *rest = word.split("\\")
            parts = [first]
            escaped = iter(rest)
            for part in escaped:
                if part:
                    parts.append(_ESCAPES.get(part[0], part[0]) + part[1:])
                else:  # a backslash, and what stands after it
                    parts.append("\\" + next(escaped))
            row.append("".join(parts))
        assert len(row) == width
        yield row


def copied_binary(data: bytes) -> Iterator[list[bytes | None]]:
    """Rows of COPY's binary format."""
    assert data[:11] == b"PGCOPY\n\xff\r\n\0"
    at = 19 + struct.unpack_from(">i", data, 15)[0]
    while (count := struct.unpack_from(">h", data, at)[0]) != -1:
        at += 2
        row: list[bytes | None] = []
        for _ in range(count):
            (size,) = struct.unpack_from(">i", data, at)
            at += 4
            row.append(None if size < 0 else data[at : at + size])
            at += max(size, 0)
        yield row
