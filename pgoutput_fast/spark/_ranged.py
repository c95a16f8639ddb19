"""Run on executors: put the Relation that holds at a row's LSN before the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

import pgoutput_fast as pf
from pgoutput_fast.errors import DecodeError, PgOutputError
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.protocol.messages import Truncate

from ._frame_heads import ROW_TAGS, as_binary, chunks, heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .relation_ranges import RelationRange

_XID = slice(1, 5)


class Held:
    """The Relations of a table and the LSNs for which each holds.

    Parameters
    ----------
    table : str
        What errors call it.
    relation_id : int
    ranges : sequence of RelationRange
        Those of the table, in the order of their LSNs. They do not overlap.
    """

    def __init__(self, table: str, relation_id: int, ranges: Sequence[RelationRange]) -> None:
        self._table = table
        self.relation_id = relation_id
        self.ranges = ranges
        self._firsts = np.array([one.first_lsn for one in ranges], np.int64)
        self._ends = np.array([one.end_lsn for one in ranges], np.int64)

    def versions(self, lsns: pa.Array, where: str, frames: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which Relation holds for each row.

        Parameters
        ----------
        lsns : pyarrow.Array of n integers
            Those of rows of the table.
        where : str
            What errors call the place from which the frames come.
        frames : int64[n]
            The frame of each row, by its index, for errors.

        Returns
        -------
        int64[n]
            Indices in `ranges`.

        Raises
        ------
        PgOutputError
            No Relation is known that holds for a row, or a row has no LSN.
        """
        numbers = lsns.cast(pa.int64()).fill_null(-1).to_numpy()
        found: NDArray[np.int64] = np.searchsorted(self._firsts, numbers, "right") - 1
        holds = (found >= 0) & (numbers < self._ends[found])
        if not holds.all():
            bad = int(np.argmin(holds))
            lsn = int(numbers[bad]) if lsns[bad].is_valid else None
            raise self._refused(lsn, where, int(frames[bad]))
        return found

    def _refused(self, lsn: int | None, where: str, frame: int) -> PgOutputError:
        listed = [str(one) for one in self.ranges[:_MOST_LISTED]]
        if len(self.ranges) > _MOST_LISTED:
            listed.append(f"{len(self.ranges) - _MOST_LISTED} more")
        if lsn is None:
            found = "its lsn is null, so that its Relation can't be found; give frames with LSNs"
        else:
            found = (
                f"no Relation is known that holds at LSN {format_lsn(lsn)}; relations= has those "
                f"for LSNs {', '.join(listed)}. Give relations_of() of files that have this frame"
            )
        error = PgOutputError(f"{self._table}: {where}, frame {frame}: {found}")
        error.code, error.frame = "unknown_relation", frame
        return error


_MOST_LISTED = 8


def wanted_rows(
    frames: pa.Array,
    tags: NDArray[np.uint8],
    numbers: NDArray[np.uint32],
    relation_id: int,
    inside: NDArray[np.bool_] | None = None,
    *,
    damaged: bool = False,
) -> NDArray[np.bool_]:
    """The frames that have rows of a table, or its TRUNCATE.

    Parameters
    ----------
    frames : pyarrow.BinaryArray
        With n frames.
    tags, numbers : uint8[n], uint32[n]
        As :func:`~pgoutput_fast.spark._frame_heads.heads` has given them.
    relation_id : int
        That of the table.
    inside : bool[n], optional
        Which frames come from inside a stream chunk.
    damaged : bool
        Whether a TRUNCATE that can't be decoded is one of them. What decodes the frames refuses it,
        and knows where it is.

    Returns
    -------
    bool[n]
    """
    wanted: NDArray[np.bool_] = np.isin(tags, ROW_TAGS) & (numbers == relation_id)
    for index in np.flatnonzero(tags == ord("T")).tolist():
        in_stream = inside is not None and bool(inside[index])
        try:
            message = pf.decode(frames[index].as_py(), in_stream=in_stream)
        except DecodeError:
            wanted[index] = damaged
            continue
        wanted[index] = isinstance(message, Truncate) and relation_id in message.relation_ids
    return wanted


def with_relations(
    frames: pa.Array,
    lsns: pa.Array,
    places: NDArray[np.int64],
    held: Held,
    where: str,
    *,
    is_open: bool,
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Frames in the order of the stream, with the Relations of the wanted table put among them.

    Its own Relations among the frames are left out: they may be missing before some rows, and
    then the one before them would count.

    Parameters
    ----------
    frames : pyarrow.BinaryArray
    lsns : pyarrow.Array of integers
    places : int64[n]
        The index of each frame in its batch.
    held : Held
    where : str
        As of :meth:`Held.versions`.
    is_open : bool
        Whether a stream chunk is open before the first frame.

    Returns
    -------
    pyarrow.BinaryArray
        With n frames.
    int64[n]
        For each its index in its batch; for a Relation that was put in, that of the frame behind
        it.
    """
    frames = as_binary(frames)
    tags, _ = heads(frames)
    chunk = chunks(tags, is_open=is_open)
    inside = chunk > 0
    _, numbers = heads(frames, inside)
    rows = np.flatnonzero(wanted_rows(frames, tags, numbers, held.relation_id, inside))
    versions = held.versions(lsns.take(pa.array(rows)), where, places[rows])
    announced = (tags == ord("R")) & (numbers == held.relation_id)
    kept = np.flatnonzero(~announced)
    # A Relation is put before the first row, and where another one holds. Those from inside a chunk
    # hold until its transaction ends, so each chunk gets its own, and what follows a chunk too.
    keys = np.stack([versions, chunk[rows]])
    changed = np.ones(len(rows), bool)
    changed[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    inserted: list[tuple[int, bytes]] = []
    for row, version in zip(rows[changed].tolist(), versions[changed].tolist(), strict=True):
        relation = held.ranges[version].frame
        if inside[row]:
            relation = relation[:1] + frames[row].as_py()[_XID] + relation[1:]
        inserted.append((int(np.searchsorted(kept, row)), relation))
    chosen, indices = _placed(frames, kept, inserted)
    return chosen, places[indices]


def _placed(
    frames: pa.Array, kept: NDArray[np.int64], inserted: Sequence[tuple[int, bytes]]
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Some of the frames, with others put before them.

    Parameters
    ----------
    frames : pyarrow.BinaryArray
    kept : int64[m]
        The indices of those that are kept, in their order.
    inserted : sequence of (int, bytes)
        Frames, and the position in `kept` of the one before which each is put, rising.

    Returns
    -------
    pyarrow.BinaryArray, int64[n]
        The frames, and for each its index, or that of the frame behind it.
    """
    chosen = frames if len(kept) == len(frames) else frames.take(pa.array(kept))
    pieces, places = [], []
    begin = 0
    for end, frame in inserted:
        pieces += [chosen.slice(begin, end - begin), pa.array([frame], pa.binary())]
        places += [kept[begin:end], kept[end : end + 1]]
        begin = end
    pieces.append(chosen.slice(begin))
    places.append(kept[begin:])
    return pa.concat_arrays(pieces), np.concatenate(places)
