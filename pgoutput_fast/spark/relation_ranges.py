"""Which Relation holds for the rows of a table at which LSN."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import pgoutput_fast as pf
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.history import history_of
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.protocol.messages import Truncate, Type
from pgoutput_fast.protocol.wire import relation_id_of
from pgoutput_fast.segments import SegmentReader, list_segments

from ._frame_heads import ROW_TAGS, heads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from pgoutput_fast.types import TypeRegistry


class RelationRange(NamedTuple):
    """A Relation, and the LSNs of the rows for which it holds.

    Attributes
    ----------
    first_lsn, end_lsn : int
        It holds for rows of its table with ``first_lsn <= lsn < end_lsn``, where `lsn` is the row's
        own LSN, which XLogData has, not that of its commit.
    frame : bytes
        The Relation's frame, as it is outside of stream chunks.
    """

    first_lsn: int
    end_lsn: int
    frame: bytes

    @property
    def relation_id(self) -> int:
        """The table's OID."""
        found = relation_id_of(self.frame, in_stream=False)
        if self.frame[:1] != b"R" or found is None:
            raise PgOutputError(f"a range of LSNs needs a Relation's frame, not {self.frame[:9]!r}")
        return found

    def __str__(self) -> str:
        return f"{format_lsn(self.first_lsn)} to {format_lsn(self.end_lsn - 1)}"


@dataclass(frozen=True)
class RelationRanges:
    """The Relations of a stream's tables with the LSNs for which they hold; it can be pickled.

    :func:`relations_of` makes them from a capture's files. Who lands frames by other means can make
    them too, by the LSNs of the rows between the Relations of a table.

    Attributes
    ----------
    ranges : tuple of RelationRange
        In any order. Those of a table must not overlap.
    types : tuple of bytes
        Frames of the Type messages, which tell of domains. They hold at all LSNs.
    registry : TypeRegistry, optional
        Users' types, by which frames are decoded if no others are given.

    Raises
    ------
    PgOutputError
        A range is empty, a frame is no Relation, or ranges of a table overlap.
    """

    ranges: tuple[RelationRange, ...]
    types: tuple[bytes, ...] = ()
    registry: TypeRegistry | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple(RelationRange(*one) for one in self.ranges))
        object.__setattr__(self, "types", tuple(self.types))
        for frame in self.types:
            if not isinstance(pf.decode(frame), Type):
                raise PgOutputError(f"types= takes frames of Type messages, not {frame[:9]!r}")
        for relation_id, ranges in self.by_relation().items():
            for one in ranges:
                if one.first_lsn >= one.end_lsn:
                    raise PgOutputError(f"relation {relation_id}: the range of LSNs {one} is empty")
            for one, other in itertools.pairwise(ranges):
                if other.first_lsn < one.end_lsn:
                    raise PgOutputError(
                        f"relation {relation_id}: the ranges of LSNs {one} and {other} overlap"
                    )

    def by_relation(self) -> dict[int, list[RelationRange]]:
        """The ranges of each relation, by OID, in the order of their LSNs."""
        found: dict[int, list[RelationRange]] = {}
        for one in sorted(self.ranges):
            found.setdefault(one.relation_id, []).append(one)
        return found


def relations_of(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> RelationRanges:
    """The Relations of all tables in segments, with the LSNs of the rows for which they hold.

    Each file is read once, without its values being decoded, in this process.

    Parameters
    ----------
    path : path or iterable of paths
        A directory of segments, or files that follow each other: see
        :func:`~pgoutput_fast.segments.list_segments`.

    Returns
    -------
    RelationRanges
        A Relation holds from its first row to its last one in the files, and not outside of them:
        the table may be altered before its next row. If rows of two versions of a table lie within
        each other, as they may where a publication's column list is altered while transactions
        are open, the LSNs that both have are left out.
        The users' types are the newest ones of the directory's history, if it has one.

    Raises
    ------
    PgOutputError
        Segments are missing or damaged, or there are none.
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    segments = list_segments(path if isinstance(path, (str, os.PathLike)) else paths)
    if not segments:
        raise PgOutputError(
            f"there are no segments in {path}: no change of the stream has been captured yet; the "
            "rows of snapshots are elsewhere, and have no frames"
        )
    runs = _Runs()
    for segment in segments:
        with SegmentReader(segment.path) as reader:
            for batch in reader:
                runs.add(batch)
    history = history_of(paths)
    return RelationRanges(
        tuple(one for relation_id in sorted(runs.found) for one in _apart(runs.found[relation_id])),
        tuple(runs.types.values()),
        None if history is None else history.newest,
    )


class _Runs:
    """Runs of rows with one Relation, from the frames of segments in their order.

    Attributes
    ----------
    found : dict of int to list of RelationRange
        The runs of each relation, in the order of the stream.
    types : dict of bytes to bytes
        The newest Type of each OID.
    """

    def __init__(self) -> None:
        self.found: dict[int, list[RelationRange]] = {}
        self.types: dict[bytes, bytes] = {}
        self._relations: dict[int, bytes] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Go on with a record batch of a segment."""
        data, lsns = batch.column("data"), batch.column("lsn").to_numpy()
        tags, relation_ids = heads(data)
        announced = np.flatnonzero(np.isin(tags, [ord("R"), ord("Y")]))
        begin = 0
        for index in [*announced.tolist(), len(tags)]:
            self._rows(data, tags[begin:index], relation_ids[begin:index], lsns, begin)
            begin = index
            if index == len(tags):
                return
            frame = data[index].as_py()
            if frame[:1] == b"Y":
                self.types[frame[1:5]] = frame
            else:
                self._relations[int(relation_ids[index])] = frame

    def _rows(
        self, data: pa.Array, tags: np.ndarray, ids: np.ndarray, lsns: np.ndarray, begin: int
    ) -> None:
        """Note rows between which nothing is announced."""
        lsns = lsns[begin : begin + len(tags)]
        is_row = np.isin(tags, ROW_TAGS)
        for relation_id in np.unique(ids[is_row]).tolist():
            own = lsns[is_row & (ids == relation_id)]
            self._note(relation_id, int(own.min()), int(own.max()))
        for index in np.flatnonzero(tags == ord("T")).tolist():
            message = pf.decode(data[begin + index].as_py())
            for relation_id in message.relation_ids if isinstance(message, Truncate) else ():
                self._note(relation_id, int(lsns[index]), int(lsns[index]))

    def _note(self, relation_id: int, first: int, last: int) -> None:
        frame = self._relations.get(relation_id)
        if frame is None:
            raise PgOutputError(
                f"rows of relation {relation_id} are in the segments without its Relation before "
                "them; a capture does not write such files"
            )
        runs = self.found.setdefault(relation_id, [])
        if runs and runs[-1].frame == frame:
            before = runs.pop()
            first, last = min(first, before.first_lsn), max(last, before.end_lsn - 1)
        runs.append(RelationRange(first, last + 1, frame))


def _apart(runs: list[RelationRange]) -> Iterator[RelationRange]:
    """Ranges of a table that do not overlap: what several versions have in common is left out."""
    ends = sorted({lsn for one in runs for lsn in (one.first_lsn, one.end_lsn)})
    pending: RelationRange | None = None
    for first, end in itertools.pairwise(ends):
        frames = {one.frame for one in runs if one.first_lsn <= first < one.end_lsn}
        if not frames:
            continue  # between two runs; of one version, if the same one follows
        frame = frames.pop()
        if not frames and pending is not None and pending.frame == frame:
            pending = pending._replace(end_lsn=end)
            continue
        if pending is not None:
            yield pending
        pending = None if frames else RelationRange(first, end, frame)
    if pending is not None:
        yield pending
