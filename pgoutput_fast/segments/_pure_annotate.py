"""What stands beside each frame in a segment, in plain Python. The twin of ``_annotate.pyx``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..protocol.wire import fields_reader, offset_of

_ROWS = frozenset(b"IUD")
_LENGTHS = {
    ord(tag): offset_of(tag, field)
    for tag, field in (("B", "end"), ("C", "commit_time"), ("T", "relation_ids"), ("M", "prefix"))
}
"""How long frames of these tags are at least, up to behind the last field that is read."""

_RELATION_IDS = offset_of("T", "relation_ids")

# The columns as a structure of arrays: the same names in the same order as in the twin.
_TYPES = (np.uint64, np.int64, np.uint32, np.int64, np.uint8)

_read_begin = fields_reader("B", "final_lsn", "commit_time", "xid")
_read_commit = fields_reader("C", "commit_lsn", "end_lsn")
_read_message = fields_reader("M", "lsn")
_read_truncate = fields_reader("T", "relation_count")


def annotate(
    data: Any, offsets: Any, open_: tuple[int, int, int, int] | None, end_lsn: int
) -> tuple[tuple[Any, ...], list[tuple[int, int]], Any, Any, int, tuple[int, str] | None]:
    """Go through frames of protocol version 1.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    open_ : (int, int, int, int) or None
        Commit LSN, commit time, xid and the next seq of the transaction that is open before the
        first frame.
    end_lsn : int
        The end of the last transaction before it.

    Returns
    -------
    tuple of arrays
        commit_lsn uint64[n], commit_time int64[n], xid uint32[n], seq int64[n], in which -1 stands
        for none, and within uint8[n]: whether the frame is one of a transaction.
    list of (int, int)
        Index and tag of each Relation and Type, and of each message outside of transactions.
    int64[k]
        Indices of the Commits.
    (int, int, int, int) or None
        The transaction that is open behind the last frame.
    int
        The end of the last transaction, or the LSN of a message behind it.
    (int, str) or None
        The first frame that is out of place or too short, and what is wrong with it; nothing behind
        it was looked at.
    """
    marks: list[tuple[int, int]] = []
    commits: list[int] = []
    rows: list[tuple[int, int, int, int, bool]] = []
    wrong: tuple[int, str] | None = None
    ends = offsets.tolist()
    for i in range(len(ends) - 1):
        frame = bytes(data[ends[i] : ends[i + 1]])
        tag = frame[0] if frame else 0
        why, seq, within, begun = _out_of_place(tag, frame, open_ is not None), -1, open_, open_
        if why is None and tag == ord("B"):
            lsn, time, xid = _read_begin(frame)
            begun = within = (lsn, time, xid, 0)
            if lsn < end_lsn:
                why = "of a transaction that was committed before what came already"
        elif why is None and open_ is not None:
            lsn, time, xid, next_seq = open_
            if tag == ord("C"):
                commit_lsn, end = _read_commit(frame)
                if commit_lsn != lsn:
                    why = "of another transaction than the Begin before it"
                else:
                    begun, end_lsn = None, end
                    commits.append(i)
            elif tag in _ROWS or tag == ord("T"):
                seq = next_seq
                next_seq += 1 if tag in _ROWS else _read_truncate(frame)[0]
                begun = (lsn, time, xid, next_seq)
        if why is not None:
            wrong = (i, why)
            break
        if tag in b"RY" or (tag == ord("M") and open_ is None):
            marks.append((i, tag))
            if tag == ord("M"):
                end_lsn = max(end_lsn, *_read_message(frame))
        rows.append((*(within or (0, 0, 0))[:3], seq, within is not None))
        open_ = begun
    columns = [np.zeros(len(ends) - 1, type_) for type_ in _TYPES]
    for column, values in zip(columns, zip(*rows, strict=True), strict=False):
        column[: len(rows)] = np.array(values, column.dtype)
    return tuple(columns), marks, np.array(commits, np.int64), open_, end_lsn, wrong


def _out_of_place(tag: int, frame: bytes, is_open: bool) -> str | None:
    """What is wrong with a frame with this tag inside or outside of a transaction."""
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
