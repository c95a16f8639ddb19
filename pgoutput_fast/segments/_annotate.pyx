# cython: annotation_typing=False, cdivision=True
"""Compute the values of the other columns for each frame of a segment.

The twin of ``_pure_annotate.py``. `annotate` computes the values for a stream. `check` compares
them with the columns of a file.
"""

from __future__ import annotations

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from pgoutput_fast._loads cimport load_uint32, load_uint64
from pgoutput_fast.protocol._wire cimport (
    BEGIN_COMMIT_TIME, BEGIN_FINAL_LSN, BEGIN_LENGTH, BEGIN_XID, COMMIT_END_LSN, COMMIT_LSN,
    COMMIT_TIME, MESSAGE_LSN, MESSAGE_PREFIX, ROW_RELATION_ID, TRUNCATE_RELATION_COUNT,
    TRUNCATE_RELATION_IDS,
)


cdef class _Buffers:
    """The buffers of arrays, locked while this object lives."""

    cdef Py_buffer views[10]
    cdef int count

    cdef void *add(self, object owner, int flags) except? NULL:
        PyObject_GetBuffer(owner, &self.views[self.count], flags)
        self.count += 1
        return self.views[self.count - 1].buf

    def __dealloc__(self):
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])


# The state of a stream between two frames: its open transaction, and the end LSN before it.
cdef struct Place:
    uint64_t lsn, end_lsn
    int64_t time, next_seq
    uint32_t xid
    bint is_open


# Advance by one frame, and store its seq: -1 for a frame without rows. Return what is wrong with
# the frame, or NULL.
cdef const char *step(
    Place *place, uint8_t tag, const uint8_t *frame, int64_t length, int64_t *seq
) noexcept nogil:
    seq[0] = -1
    if tag == c'B':
        if place.is_open:
            return b"within a transaction"
        if length < BEGIN_LENGTH:
            return b"too short"
        place.lsn = load_uint64(frame + BEGIN_FINAL_LSN)
        place.time = <int64_t> load_uint64(frame + BEGIN_COMMIT_TIME)
        place.xid = load_uint32(frame + BEGIN_XID)
        if place.lsn < place.end_lsn:
            return b"of a transaction that was committed before what came already"
        place.next_seq = 0
        place.is_open = True
    elif tag == c'C':
        if not place.is_open:
            return b"without a Begin"
        if length < COMMIT_TIME:
            return b"too short"
        if load_uint64(frame + COMMIT_LSN) != place.lsn:
            return b"of another transaction than the Begin before it"
        place.end_lsn = load_uint64(frame + COMMIT_END_LSN)
        place.is_open = False
    elif tag == c'M' and not place.is_open:
        if length < MESSAGE_PREFIX:
            return b"too short"
        place.end_lsn = max(place.end_lsn, load_uint64(frame + MESSAGE_LSN))
    elif tag == c'R' or tag == c'Y':
        pass
    elif not place.is_open:
        return b"outside of a transaction"
    elif tag == c'I' or tag == c'U' or tag == c'D':
        seq[0] = place.next_seq
        place.next_seq += 1
    elif tag == c'T':
        if length < TRUNCATE_RELATION_IDS:
            return b"too short"
        # Unsigned: a negative count is larger than any frame.
        if load_uint32(frame + TRUNCATE_RELATION_COUNT) > (length - TRUNCATE_RELATION_IDS) // 4:
            return b"too short"
        seq[0] = place.next_seq
        place.next_seq += load_uint32(frame + TRUNCATE_RELATION_COUNT)
    elif tag != c'M' and tag != c'O':
        return b"not of protocol version 1"
    return NULL


def annotate(
    data: Any, offsets: Any, open_: tuple[int, int, int, int] | None, uint64_t end_lsn
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

    cdef _Buffers buffers = _Buffers()
    cdef Py_ssize_t i = 0, count = len(offsets) - 1, commits = 0
    types = (np.uint64, np.int64, np.uint32, np.int64, np.uint8)  # as in the twin
    columns = tuple([np.empty(count, type_) for type_ in types])
    ends = np.empty(count, np.int64)
    cdef const uint8_t *at = <const uint8_t *> buffers.add(data, PyBUF_SIMPLE)
    cdef const int64_t *starts = <const int64_t *> buffers.add(offsets, PyBUF_SIMPLE)
    cdef uint64_t *commit_lsn = <uint64_t *> buffers.add(columns[0], PyBUF_WRITABLE)
    cdef int64_t *commit_time = <int64_t *> buffers.add(columns[1], PyBUF_WRITABLE)
    cdef uint32_t *xid = <uint32_t *> buffers.add(columns[2], PyBUF_WRITABLE)
    cdef int64_t *seq = <int64_t *> buffers.add(columns[3], PyBUF_WRITABLE)
    cdef uint8_t *within = <uint8_t *> buffers.add(columns[4], PyBUF_WRITABLE)
    cdef int64_t[::1] commit_index = ends
    cdef list rare = []
    cdef Place place
    cdef uint8_t tag
    cdef bint was_open
    cdef const char *wrong = NULL
    memset(&place, 0, sizeof(place))
    place.end_lsn = end_lsn
    if open_ is not None:
        place.is_open = True
        place.lsn, place.time, place.xid, place.next_seq = open_
    for i in range(count):
        tag = at[starts[i]] if starts[i] < starts[i + 1] else 0
        was_open = place.is_open
        wrong = step(&place, tag, at + starts[i], starts[i + 1] - starts[i], seq + i)
        if wrong != NULL:
            break
        within[i] = was_open or place.is_open
        if within[i]:
            commit_lsn[i], commit_time[i], xid[i] = place.lsn, place.time, place.xid
        else:
            commit_lsn[i] = commit_time[i] = xid[i] = 0
        if tag == c'C':
            commit_index[commits] = i
            commits += 1
        elif tag == c'R' or tag == c'Y' or (tag == c'M' and not was_open):
            rare.append((i, tag))
    now = (place.lsn, place.time, place.xid, place.next_seq) if place.is_open else None
    return (
        columns, rare, ends[:commits], now, place.end_lsn,
        None if wrong == NULL else (i, wrong.decode("ascii")),
    )


cdef enum:
    # Slots that count without Python. The last bits of a relation's OID are the number of its slot.
    SLOTS = 256


# The changes of a relation since its slot was last added to the counts.
cdef struct Counts:
    uint32_t relation_id
    bint is_used
    int64_t changes, size, truncates
    uint64_t first_commit_lsn, last_commit_lsn


# Counts the changes of each relation in one record batch of a file.
cdef class _Relations:
    cdef Counts slots[SLOTS]
    cdef object counter
    cdef dict counts

    def __cinit__(self, counter):
        self.counter = counter
        self.counts = counter.counts

    # Count a frame that `step` has accepted. Return what is wrong with its relations, or NULL.
    cdef const char *take(
        self, uint8_t tag, const uint8_t *frame, int64_t length, uint64_t commit_lsn
    ) except? NULL:
        cdef int64_t at = ROW_RELATION_ID, end = ROW_RELATION_ID + 4
        cdef uint32_t relation_id
        cdef Counts *slot
        if tag == c'T':
            at = TRUNCATE_RELATION_IDS
            end = at + 4 * <int64_t> load_uint32(frame + TRUNCATE_RELATION_COUNT)
        elif tag != c'R' and tag != c'Y' and tag != c'I' and tag != c'U' and tag != c'D':
            return NULL
        if length < end:
            return b"too short"
        while at < end:
            relation_id = load_uint32(frame + at)
            at += 4
            slot = self.slots + relation_id % SLOTS
            if tag == c'R' or tag == c'Y':
                self.add(slot)
                self.counter.announce(frame[:length])
                continue
            if not slot.is_used or slot.relation_id != relation_id:
                if relation_id not in self.counts:
                    return b"of a relation that the file has not announced before it"
                self.add(slot)
                slot.relation_id, slot.is_used = relation_id, True
                slot.first_commit_lsn = commit_lsn
            slot.last_commit_lsn = commit_lsn
            if tag == c'T':
                slot.truncates += 1
            else:
                slot.changes += 1
                slot.size += length
        return NULL

    # Add a slot to the counts of its relation, and clear the slot.
    cdef int add(self, Counts *slot) except -1:
        cdef list found
        if slot.is_used and slot.changes + slot.truncates:
            found = self.counts[slot.relation_id]
            if not found[0] and not found[2]:
                found[3] = slot.first_commit_lsn
            found[0] += slot.changes
            found[1] += slot.size
            found[2] += slot.truncates
            found[4] = slot.last_commit_lsn
        memset(slot, 0, sizeof(Counts))
        return 0

    cdef int add_all(self) except -1:
        cdef int i
        for i in range(SLOTS):
            self.add(self.slots + i)
        return 0


cdef inline bint is_valid(const uint8_t *bits, Py_ssize_t i) noexcept nogil:
    return bits == NULL or (bits[i >> 3] >> (i & 7)) & 1


# Return whether a column has the expected value, or the expected null.
cdef inline bint is_same(const uint8_t *bits, Py_ssize_t i, bint has_value, bint is_equal) noexcept:
    return is_equal if is_valid(bits, i) and has_value else is_valid(bits, i) == has_value


def check(
    Py_ssize_t count,
    columns: tuple[Any, ...],
    valid: tuple[Any, ...],
    data: Any,
    offsets: Any,
    place_: tuple[Any, ...],
    counter: LayoutCounter,
    bint is_snapshot,
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
    cdef _Buffers buffers = _Buffers()
    cdef Py_ssize_t i = 0
    cdef int64_t size = len(data), begin, end, number
    cdef const uint8_t *at = <const uint8_t *> buffers.add(data, PyBUF_SIMPLE)
    cdef const int32_t *ends = <const int32_t *> buffers.add(offsets, PyBUF_SIMPLE)
    cdef const uint64_t *commit_lsn = <const uint64_t *> buffers.add(columns[0], PyBUF_SIMPLE)
    cdef const int64_t *commit_time = <const int64_t *> buffers.add(columns[1], PyBUF_SIMPLE)
    cdef const uint32_t *xid = <const uint32_t *> buffers.add(columns[2], PyBUF_SIMPLE)
    cdef const int64_t *seq = <const int64_t *> buffers.add(columns[3], PyBUF_SIMPLE)
    cdef const uint8_t *bits[4]
    cdef _Relations relations = _Relations(counter)
    cdef Place place
    cdef uint8_t tag
    cdef bint announces, is_row, within, is_first
    cdef const char *wrong = NULL
    memset(&place, 0, sizeof(place))
    for i in range(4):
        bits[i] = NULL
        if valid[i] is not None:
            bits[i] = <const uint8_t *> buffers.add(valid[i], PyBUF_SIMPLE)
    open_, place.end_lsn, first = place_
    if open_ is not None:
        place.is_open = True
        place.lsn, place.time, place.xid, place.next_seq = open_
    is_first = first is not None
    for i in range(count):
        begin, end = ends[i], ends[i + 1]
        if begin < 0 or end < begin or size < end:
            wrong = b"outside of the data"
            break
        tag = at[begin] if begin < end else 0
        announces = tag == c'R' or tag == c'Y'
        is_row = tag == c'I' or tag == c'U' or tag == c'D' or tag == c'T'
        if is_snapshot and not announces and tag != c'I' and tag != c'T':
            wrong = b"not one of a snapshot"
            break
        if is_first and not announces and first == "begin" and tag != c'B':
            wrong = b"not the Begin with which a further part begins"
            break
        if is_row and place.next_seq < 0:
            place.next_seq = max(seq[i], 0)
            if is_snapshot:
                place.time = commit_time[i]
        within = place.is_open
        wrong = step(&place, tag, at + begin, end - begin, &number)
        if wrong == NULL:
            wrong = relations.take(tag, at + begin, end - begin, place.lsn)
        if wrong != NULL:
            break
        if is_first and not announces:
            is_first = False
            if tag == c'B' and first != "any":
                place.next_seq = -1
        within = (within or place.is_open) and not (is_snapshot and announces)
        if not (
            is_same(bits[0], i, within, commit_lsn[i] == place.lsn)
            and is_same(bits[1], i, within, commit_time[i] == place.time)
            and is_same(bits[2], i, within and not is_snapshot, xid[i] == place.xid)
            and is_same(bits[3], i, number >= 0, seq[i] == number)
        ):
            wrong = b"beside columns of another transaction or row"
            break
    relations.add_all()
    now = (place.lsn, place.time, place.xid, place.next_seq) if place.is_open else None
    return (
        (now, place.end_lsn, first if is_first else None),
        None if wrong == NULL else (i, wrong.decode("ascii")),
    )
