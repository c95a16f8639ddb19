"""A recorded stream as the directory of a capture, with the catalogue that was recorded beside it.

Segments end where it is said, so that a reader's windows do.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.recordings.corpus_files import Capture, Truth
from support.values.catalog_types import registry_of

from pgoutput_fast.catalog import Catalog, CatalogColumn, CatalogTable
from pgoutput_fast.changelog.schema_history import CatalogRead, HistoryWriter
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.changelog.snapshots import SnapshotFiles
from pgoutput_fast.lsn import parse_lsn
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter
from pgoutput_fast.testing import insert
from pgoutput_fast.transactions import Assembler
from pgoutput_fast.transactions.runs import runs_of

__all__ = ["Recorded"]

ADDED = {("st3", "extra"): "5", ("tp2", "extra"): None}
"""What rows have in columns that were added, as the script says; the catalogue has not kept it."""
_COMMITS = (b"C", b"c", b"K")
_CHANGES = (b"I", b"U", b"D", b"T")
_MOST_COLUMNS = 1000
"""Wider tables are not in the catalogue, which would take most of the time to be read."""


class Recorded:
    """The directory.

    Parameters
    ----------
    directory : pathlib.Path
    capture : Capture
    truth : Truth
        Its `catalog.json` becomes the history of types and tables.
    """

    def __init__(self, directory: Path, capture: Capture, truth: Truth) -> None:
        self.directory = directory
        self._rows = list(capture.rows())
        self._assembler = Assembler(encoding=capture.encoding)
        self._metadata = SegmentMetadata(
            "7", "db", "s", ("p",), 10_000 * capture.major, capture.entry["client_encoding"],
            {}, capture.options,
        )  # fmt: skip
        self._writer = SegmentWriter(
            directory, self._metadata, confirmed_flush_lsn=0, segment_bytes=1 << 40
        )
        history = HistoryWriter(directory, None)
        for snapshot in truth.catalog():
            history.note(_read(truth, snapshot))

    def close(self) -> None:
        self._writer.close()

    def write(self, ends: Callable[[], bool], skipped: int = 0) -> Iterator[None]:
        """Write segment after segment, and give control back after each.

        Parameters
        ----------
        ends : callable
            Whether a segment ends with a transaction.
        skipped : int
            Transactions at the beginning, of protocol 1, whose changes the directory has not.
        """
        begin = 0
        for number, end in enumerate(self._ends()):
            part = self._rows[begin:end]
            begin = end
            if number < skipped:
                part = [row for row in part if row[1][:1] not in _CHANGES]
            runs = runs_of([frame for _, frame in part], None, [lsn for lsn, _ in part])
            for group in self._assembler.feed_groups(runs):
                for run in group.runs():
                    self._writer.write_run(run)
            if ends():
                self._writer.flush()
                yield
        self._writer.flush()
        yield

    def _ends(self) -> Iterator[int]:
        """Behind the frames with which transactions end."""
        for number, (_, frame) in enumerate(self._rows, 1):
            if frame[:1] in _COMMITS:
                yield number
        yield len(self._rows)

    def copy(self, relation: bytes, name: tuple[str, str], rows: list[list[str | None]]) -> int:
        """Have the directory hold a snapshot as of its end; the LSN of it."""
        lsn = self._writer.position + 8
        self._writer.advance(lsn)
        tables = SnapshotStates(self.directory)
        oid = int.from_bytes(relation[1:5], "big")
        fields: dict[str, object] = {"table": list(name)}
        order = tables.wait(oid, lsn - 1, fields, first=False)
        files = SnapshotFiles(self.directory, order, self._metadata, lsn, 5, [relation])
        files.begin()
        frames = [
            insert(oid, [None if word is None else ("t", word.encode()) for word in row])
            for row in rows
        ]
        files.write(1, [(b"".join(frames), [0, *itertools.accumulate(map(len, frames))])])
        tables.finish(order, lsn, {**fields, "files": files.finish()})
        self._writer.advance(lsn + 8)
        return lsn


def _read(truth: Truth, snapshot: dict[str, Any]) -> CatalogRead:
    lsn = parse_lsn(snapshot["lsn"])
    tables = [one for one in snapshot["tables"] if len(one["columns"]) <= _MOST_COLUMNS]
    catalog = Catalog("7", "db", ("p",), tuple(map(_table, tables)))
    return CatalogRead(
        lsn, lsn, frozenset(), frozenset(), False, registry_of(truth, [snapshot]),
        json.dumps({"format_version": 1, **dataclasses.asdict(catalog)}),
    )  # fmt: skip


def _table(row: dict[str, Any]) -> CatalogTable:
    columns = []
    for one in row["columns"]:
        if one["dropped"]:
            continue
        place = row["name"], one["name"]
        # Of other columns nobody has noted whether they have a default.
        columns.append(
            CatalogColumn(
                one["name"],
                int(one["type_oid"]),
                one["type_full"],
                one["typmod"],
                one["notnull"],
                place not in ADDED,
                one["generated"],
                ADDED.get(place) is not None,
                ADDED.get(place),
                one["attnum"],
            )
        )
    return CatalogTable(
        row["oid"], row["schema"], row["name"], row["relkind"], row["relreplident"], None, (),
        tuple(row["pk"]), tuple(row["replident_index"]), tuple(columns), (row["oid"],),
    )  # fmt: skip
