"""The values of the other columns for each frame of a segment. The twin of ``_annotate.pyx``.

`annotate` computes them for a stream. `check` compares them with the columns of a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..protocol.wire import RELATION_ID, fields_reader, offset_of

if TYPE_CHECKING:
    from .layout_index import LayoutCounter

_ROWS = frozenset(b"IUD")
_LENGTHS = {
    ord(tag): offset_of(tag, field)
    for tag, field in (("B", "end"), ("C", "commit_time"), ("T", "relation_ids"), ("M", "prefix"))
}
"""The least length of a frame with this tag: it has all fields that this module reads."""

_RELATION_IDS = offset_of("T", "relation_ids")

_read_begin = fields_reader("B", "final_lsn", "commit_time", "xid")
_read_commit = fields_reader("C", "commit_lsn", "end_lsn")
_read_message = fields_reader("M", "lsn")
_read_truncate = fields_reader("T", "relation_count")


def annotate(
    data: Any, offsets: Any, open_: tuple[int, int, int, int] | None, end_lsn: int
) -> tuple[tuple[Any, ...], list[tuple[int, int]], Any, Any, int, tuple[int, str] | None]:
    """Check frames of protocol version 1, and return the other columns' values for each frame.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    open_ : (int, int, int, int) or None
        Commit LSN, commit time, xid and the next seq of the transaction that is open before the
        first frame.
    end_lsn : int
        The end LSN of the last transaction before the first frame.

    Returns
    -------
    tuple of arrays
        commit_lsn uint64[n], commit_time int64[n], xid uint32[n], seq int64[n] and within uint8[n].
        A seq of -1 stands for null. `within` says whether the frame belongs to a transaction.
    list of (int, int)
        Index and tag of each Relation and Type, and of each message outside of transactions.
    int64[k]
        Indices of the Commits.
    (int, int, int, int) or None
        The transaction that is open after the last frame.
    int
        The end LSN of the last transaction, or the LSN of a later message.
    (int, str) or None
        Index of the first frame that is out of place or too short, and what is wrong with it. The
        frames after it are not checked.
    """
    import numpy as np  # here, as `check` does not need it

    rare: list[tuple[int, int]] = []
    commits: list[int] = []
    rows: list[tuple[int, int, int, int, bool]] = []
    wrong: tuple[int, str] | None = None
    place = _StreamPlace(open_, end_lsn)
    ends = offsets.tolist()
    for i in range(len(ends) - 1):
        frame = bytes(data[ends[i] : ends[i + 1]])
        tag, was_open = _tag(frame), place.open is not None
        why, seq, within = place.step(tag, frame)
        if why is not None:
            wrong = (i, why)
            break
        if tag == ord("C"):
            commits.append(i)
        elif tag in b"RY" or (tag == ord("M") and not was_open):
            rare.append((i, tag))
        rows.append((*(within or (0, 0, 0))[:3], seq, within is not None))
    types = (np.uint64, np.int64, np.uint32, np.int64, np.uint8)  # those of the twin
    columns = [np.zeros(len(ends) - 1, type_) for type_ in types]
    for column, values in zip(columns, zip(*rows, strict=True), strict=False):
        column[: len(rows)] = np.array(values, column.dtype)
    commit_index = np.array(commits, np.int64)
    return tuple(columns), rare, commit_index, place.open, place.end_lsn, wrong


class _StreamPlace:
    """The state of a stream between two frames: its open transaction, and the end LSN before it."""

    def __init__(self, open_: tuple[int, int, int, int] | None, end_lsn: int) -> None:
        self.open = open_
        self.end_lsn = end_lsn

    def step(
        self, tag: int, frame: bytes
    ) -> tuple[str | None, int, tuple[int, int, int, int] | None]:
        """Advance by one frame.

        Returns
        -------
        str or None
            What is wrong with the frame.
        int
            The frame's seq; -1 for a frame without rows.
        (int, int, int, int) or None
            The transaction of the frame, in the form of `open`.
        """
        why, seq, within = _out_of_place(tag, frame, self.open is not None), -1, self.open
        if why is not None:
            return why, seq, within
        if tag == ord("B"):
            lsn, time, xid = _read_begin(frame)
            if lsn < self.end_lsn:
                return "of a transaction that was committed before what came already", seq, within
            self.open = within = (lsn, time, xid, 0)
        elif self.open is not None:
            lsn, time, xid, next_seq = self.open
            if tag == ord("C"):
                commit_lsn, end = _read_commit(frame)
                if commit_lsn != lsn:
                    why = "of another transaction than the Begin before it"
                else:
                    self.open, self.end_lsn = None, end
            elif tag in _ROWS or tag == ord("T"):
                seq = next_seq
                next_seq += 1 if tag in _ROWS else _read_truncate(frame)[0]
                self.open = (lsn, time, xid, next_seq)
        elif tag == ord("M"):
            self.end_lsn = max(self.end_lsn, *_read_message(frame))
        return why, seq, within


def _tag(frame: bytes) -> int:
    return frame[0] if frame else 0


def _out_of_place(tag: int, frame: bytes, is_open: bool) -> str | None:
    """Return what is wrong with a frame of this tag inside or outside of a transaction."""
    if tag == ord("B"):
        why = "within a transaction" if is_open else None
    elif tag == ord("C"):
        why = None if is_open else "without a Begin"
    elif tag in b"RY" or (tag == ord("M") and not is_open):
        why = None
    elif not is_open:
        why = "outside of a transaction"
    else:
        why = None if tag in b"IUDTMO" else "not of protocol version 1"
    if why is None and len(frame) < _LENGTHS.get(tag, 0) and not (tag == ord("M") and is_open):
        return "too short"
    if why is None and tag == ord("T"):
        (count,) = _read_truncate(frame)
        if not 0 <= count <= (len(frame) - _RELATION_IDS) // 4:
            return "too short"
    return why


def check(
    count: int,
    columns: tuple[Any, ...],
    valid: tuple[Any, ...],
    data: Any,
    offsets: Any,
    place_: tuple[Any, ...],
    counter: LayoutCounter,
    is_snapshot: bool,
) -> tuple[tuple[Any, ...], tuple[int, str] | None]:
    """Check a record batch of a file.

    Parameters
    ----------
    count : int
        The number of rows.
    columns : tuple of buffer
        The columns commit_lsn, commit_time, xid and seq. All buffers have to be long enough.
    valid : tuple of buffer or None
        The validity bitmap of each column; None if all values are valid.
    data, offsets : buffer
        The column data.
    place_ : tuple
        The state of the file before the batch, three values. The first two are the open transaction
        (or None) and the end LSN of the last transaction, as in `annotate`; a next seq of -1 allows
        any seq. The third says what the first frame that is no Relation or Type has to be: "begin"
        in a further part of a segment, "begin or any" in a file whose part is unknown, else "any".
        It is None once that frame has come.
    counter : LayoutCounter
        Counts the changes of the file. The changes of the batch are added.
    is_snapshot : bool
        Whether the file belongs to a snapshot. Its rows belong to one transaction without an xid.

    Returns
    -------
    tuple
        `place_` after the batch.
    (int, str) or None
        As `annotate`.
    """
    open_, end_lsn, first = place_
    place = _StreamPlace(open_, end_lsn)
    ends = _numbers(offsets, "i", count + 1)
    numbers = [_numbers(column, form, count) for column, form in zip(columns, "QqIq", strict=True)]
    beside = [_values(values, bits) for values, bits in zip(numbers, valid, strict=True)]
    why: str | None = None
    index = 0
    for index, row_values in enumerate(zip(*beside, strict=True)):
        if not 0 <= ends[index] <= ends[index + 1] <= len(data):
            why = "outside of the data"
            break
        frame = bytes(data[ends[index] : ends[index + 1]])
        tag = _tag(frame)
        announces, is_row = tag in b"RY", tag in b"IUDT"
        if is_snapshot and tag not in b"RYIT":
            why = "not one of a snapshot"
            break
        if first == "begin" and not announces and tag != ord("B"):
            why = "not the Begin with which a further part begins"
            break
        if is_row and place.open is not None and place.open[3] < 0:
            lsn, time, xid, _ = place.open
            time = numbers[1][index] if is_snapshot else time
            place.open = (lsn, time, xid, max(numbers[3][index], 0))
        why, seq, within = place.step(tag, frame)
        commit_lsn = 0 if within is None else within[0]
        why = why or _wrong_relation(tag, frame, commit_lsn, counter)
        if why is not None:
            break
        if first is not None and not announces:
            if tag == ord("B") and first != "any" and place.open is not None:
                place.open = (*place.open[:3], -1)
            first = None
        expected: list[int | None] = [None] * 4
        if within is not None and not (is_snapshot and announces):
            expected[:3] = within[:3]
        expected[2] = None if is_snapshot else expected[2]
        expected[3] = seq if seq >= 0 else None
        if list(row_values) != expected:
            why = "beside columns of another transaction or row"
            break
    return (place.open, place.end_lsn, first), None if why is None else (index, why)


def _numbers(buffer: Any, form: str, count: int) -> list[int]:
    return list(struct.unpack_from(f"<{count}{form}", buffer))


def _values(values: list[int], bits: Any) -> Iterator[int | None]:
    """Yield the values of a column, None for null."""
    for i, value in enumerate(values):
        yield value if bits is None or bits[i >> 3] >> (i & 7) & 1 else None


def _wrong_relation(tag: int, frame: bytes, commit_lsn: int, counter: LayoutCounter) -> str | None:
    """Return what is wrong with a frame's relation ids; count the frame's changes if nothing is."""
    if tag == ord("T"):
        (count,) = _read_truncate(frame)
        start, end = _RELATION_IDS, _RELATION_IDS + 4 * count
    elif tag in _ROWS or tag in b"RY":
        start, end = RELATION_ID, RELATION_ID + 4
    else:
        return None
    if len(frame) < end:
        return "too short"
    for at in range(start, end, 4):
        if tag in b"RY":
            counter.announce(frame)
            continue
        counts = counter.counts.get(int.from_bytes(frame[at : at + 4], "big"))
        if counts is None:
            return "of a relation that the file has not announced before it"
        if not counts[0] and not counts[2]:
            counts[3] = commit_lsn
        counts[4] = commit_lsn
        if tag == ord("T"):
            counts[2] += 1
        else:
            counts[0] += 1
            counts[1] += len(frame)
    return None
