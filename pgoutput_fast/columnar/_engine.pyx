# cython: annotation_typing=False, cdivision=True
"""Decode many frames into Arrow columns, compiled: the twin of ``_pure_engine.py``.

``_reader.pyx`` reads frames without the interpreter. It stops if this module has to act: at a
relation that is not cached, a rare message, or a full batch. For a malformed frame,
:mod:`pgoutput_fast.decoding.diagnose` raises the error.
"""

from __future__ import annotations

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from pgoutput_fast.columnar._batch cimport ChangeBatch, finish
from pgoutput_fast.columnar._columns cimport CACHED, TRUNCATE, Column, Rows, header_of, settle
from pgoutput_fast.columnar._export cimport schema_of
from pgoutput_fast.columnar._input cimport Frame, Piece, pieces_of, take_frame
from pgoutput_fast.columnar._memory cimport Memory
from pgoutput_fast.columnar._reader cimport (
    DONE, FULL, FULL_ROWS, NEW_LABEL, NO_MEMORY, OTHER_FORM, RARE, UNKNOWN, Event, Reader, Status,
    event, put_row, read_rows,
)
from pgoutput_fast.protocol._wire cimport BEGIN_COMMIT_TIME, BEGIN_FINAL_LSN
from pgoutput_fast.columnar._relation cimport (
    AS_BINARY, EnumTable, RelationRows, grow_rows, make_relation,
)

from ..decoding._core import decode, restore
from ..decoding.diagnose import diagnose, refuse_changed
from ..decoding.plan import refuse_value
from ..errors import DecodeError
from ..protocol.wire import relation_id_of
from .arrays import MOST_ROWS, array_of, lsns_of, refuse_time
from .rare import NEW_VERSIONS, event_of, outdated, plans_of
from .schema import version_of

cdef enum:
    CHECKED = 65_536  # frames between two checks for signals such as Ctrl-C


@cython.final
cdef class ColumnEngine(Reader):
    """Decodes frames into rows of Arrow columns, for :class:`pgoutput_fast.ColumnarDecoder`.

    Parameters
    ----------
    state : StreamState
    options : pgoutput_fast.columnar.options.DecoderOptions
    """

    cdef readonly object state
    cdef object options
    # The frames of this call, and the current piece.
    cdef list pieces
    cdef Py_ssize_t piece_index
    cdef Piece piece
    cdef object lsns_owner
    cdef dict known  # version of a relation → its RelationRows
    cdef dict open  # OID → RelationRows that may have rows
    cdef Py_ssize_t new_versions  # since outdated versions were last forgotten
    cdef int64_t reserved  # bytes of memory, the expected size of the open batches
    cdef list ready  # complete batches that are not yet returned
    cdef readonly dict messages  # index of a frame → its message, of rare messages

    def __init__(self, state, options):
        self.options = options
        self.stream.wide = options.target == "spark"
        self.fill_unchanged = options.fill_unchanged
        self.max_rows = min(options.max_rows, MOST_ROWS)
        self.stream.max_bytes = options.max_bytes
        self.known = {}
        self.open = {}
        self.pieces = []
        self.ready = []
        self.messages = {}
        self.adopt(state)

    # --- interface for ColumnarDecoder

    def load(self, data, offsets, lsns):
        """Set the frames to decode. This decodes none."""
        cdef Py_ssize_t count = 0
        cdef Piece piece
        cdef list pieces = pieces_of(data, offsets)
        for piece in pieces:
            count += piece.source.count
        cdef const uint64_t[::1] view
        self.lsns = NULL
        self.lsns_owner = None
        if lsns is not None:
            view = self.lsns_owner = lsns_of(lsns, count)
            if count > 0:
                self.lsns = &view[0]
        self.pieces = pieces
        self.piece_index = self.at = self.before = 0
        self.piece = pieces[0] if pieces else None
        self.events.count = 0
        self.messages = {}

    def unload(self):
        """Release the frames."""
        self.pieces = []
        self.piece = None
        self.lsns = NULL
        self.lsns_owner = None

    @property
    def position(self):
        """Index of the next frame."""
        return self.before + self.at

    def frame(self):
        """Return the next frame."""
        return self.piece.frame(self.at)

    def lsn(self):
        """Return the LSN of the next frame; None without LSNs."""
        return self.lsns[self.before + self.at] if self.lsns != NULL else None

    def skip(self, rows):
        """Skip the next frame, which was refused. Without the error, it would make `rows` rows."""
        self.stream.seq += rows
        self.at += 1

    def run(self):
        """Decode until batches are complete, and return them. Return None after the last frame.

        Raises
        ------
        DecodeError
            The next frame is malformed, or its values can't be stored. The engine has not changed
            since the frame before.
        """
        cdef Status status
        cdef Py_ssize_t stop
        while self.piece is not None:
            if self.at == self.piece.source.count:
                self.next_piece()
                continue
            stop = min(self.at + CHECKED, self.piece.source.count)
            with nogil:
                status = read_rows(self, &self.piece.source, stop)
            if status == DONE:
                PyErr_CheckSignals()
            elif status == RARE:
                self.rare()
            elif status == UNKNOWN:
                self.find()
            elif status == FULL:
                return self.flush()
            elif status == FULL_ROWS or status == OTHER_FORM:
                if status == OTHER_FORM:
                    self.check()
                return [self.close(<RelationRows> self.stopped.owner)]
            elif status == NEW_LABEL:
                self.learn(<RelationRows> self.stopped.owner)
            elif status == NO_MEMORY:
                raise MemoryError
            else:
                self.refuse()
            if self.ready:
                ready, self.ready = self.ready, []
                return ready
        return None

    def flush(self):
        """Make record batches of all collected rows, in the order of their first rows."""
        batches = [self.close(<RelationRows> relation) for relation in list(self.open.values())]
        # A table that is not decoded, or whose only row was refused, has no batch.
        return [batch for batch in batches if batch is not None]

    def drop(self):
        """Forget all rows that are not yet returned in a batch."""
        for relation in self.open.values():
            (<RelationRows> relation).clear()
        self.open = {}
        self.ready = []
        self.stream.held = self.reserved = 0
        memset(self.stream.cached, 0, sizeof(self.stream.cached))

    def take_events(self):
        """Return the events as an array: frames other than Begin, Insert, Update and Delete."""
        cdef Memory memory = Memory.__new__(Memory)
        memory.size = self.events.count * sizeof(Event)
        memory.at = malloc(memory.size + 1)
        if memory.at == NULL:
            raise MemoryError
        if memory.size > 0:
            memcpy(memory.at, self.events.at, memory.size)
        return array_of("events", memory)

    def adopt(self, state):
        """Decode the next frames from `state` on."""
        self.state = state
        self.stream.in_stream = state.open_xid is not None
        self.stream.open_xid = state.open_xid or 0
        self.stream.in_transaction = state.xid is not None
        self.stream.xid = state.xid or 0
        self.stream.has_commit = state.commit_lsn is not None
        self.stream.commit_lsn = state.commit_lsn or 0
        self.stream.commit_time = state.commit_time or 0
        self.stream.seq = state.row
        settle(&self.stream)
        memset(self.stream.cached, 0, sizeof(self.stream.cached))

    def sync(self):
        """Write the open transaction back to the stream state."""
        state = self.state
        state.xid = self.stream.xid if self.stream.in_transaction else None
        state.commit_lsn = self.stream.commit_lsn if self.stream.has_commit else None
        state.commit_time = self.stream.commit_time if self.stream.has_commit else None
        state.row = self.stream.seq

    # --- frames

    cdef int next_piece(self) except -1:
        self.before += self.at
        self.at = 0
        self.piece_index += 1
        if self.piece_index < len(self.pieces):
            self.piece = self.pieces[self.piece_index]
        else:
            self.piece = None
        return 0

    # --- frames that need Python

    # Decode the next frame, a rare message, in Python.
    cdef int rare(self) except -1:
        cdef bytes frame = self.piece.frame(self.at)
        cdef Py_ssize_t index = self.before + self.at
        cdef uint8_t tag = PyBytes_AS_STRING(frame)[0]
        cdef int64_t row = self.stream.seq
        self.sync()
        state = self.state
        open_xid = state.open_xid
        in_transaction = state.xid
        try:
            if tag == c'T':
                state.check_order(frame)
                message = decode(frame, open_xid is not None)
                self.truncate(message)
            else:
                message = state.receive(frame)
        except DecodeError as error:
            self.stream.seq = row
            error.frame = index
            raise
        if tag == c'R' or tag == c'Y':
            memset(self.stream.cached, 0, sizeof(self.stream.cached))
        elif tag != c'M' and tag != c'O' and tag != c'T':
            self.adopt(state)
        xid, subxid, commit_lsn, end_lsn, commit_time = event_of(message, open_xid, in_transaction)
        if not event(self, tag, xid, subxid, commit_lsn, end_lsn, commit_time):
            raise MemoryError
        self.messages[index] = message
        self.at += 1
        return 0

    # Append a row for each relation of a Truncate. All of them must have been announced.
    cdef int truncate(self, message) except -1:
        cdef Rows *rows
        cdef Frame given
        plans = plans_of(message, self.state)
        if self.stream.wide and self.lsns != NULL and self.lsns[self.before + self.at] >> 63:
            refuse_time(message.frame, 0, "lsn", self.lsns[self.before + self.at])
        take_frame(&self.piece.source, self.at, &given)
        for plan in plans:
            rows = &(self.relation_of(plan)).rows
            if not rows.wanted:
                self.stream.seq += 1
                continue
            if rows.count == self.max_rows:
                self.ready.append(self.close(<RelationRows> rows.owner))
                self.relation_of(plan)
            elif self.stream.held > 0 and self.stream.held + rows.fixed > self.stream.max_bytes:
                self.ready += self.flush()
                self.relation_of(plan)
            if rows.count == rows.capacity and not grow_rows(rows):
                raise MemoryError
            self.stream.held += rows.fixed
            rows.truncated = True
            rows.limit = 0  # `after` lacks this row, so that the loop over rows cannot append
            put_row(self, rows, TRUNCATE, &given)
        return 0

    # Put the relation of the next row into the cache.
    cdef int find(self) except -1:
        cdef RelationRows relation
        plan = self.state.plan(self.wanted_id)
        if plan is None:
            self.refuse()
        relation = self.relation_of(plan)
        self.stream.cached[self.wanted_id & (CACHED - 1)].rows = &relation.rows
        self.stream.cached[self.wanted_id & (CACHED - 1)].header = header_of(
            self.wanted_id, relation.rows.width
        )
        return 0

    # Return the rows of the version of a relation to which a plan belongs, and open them. Rows of
    # the version before it become a batch.
    cdef RelationRows relation_of(self, plan):
        cdef RelationRows relation, other
        relation_id = plan.relation.relation_id
        key = version_of(plan)
        relation = self.known.get(key)
        if relation is None:
            relation = make_relation(plan, self.options.layout(plan))
            self.known[key] = relation
            self.forget_outdated(plan)
        other = self.open.get(relation_id)
        if other is not relation:
            if other is not None:
                batch = self.close(other)
                if batch is not None:
                    self.ready.append(batch)
            self.open[relation_id] = relation
            self.reserve(&relation.rows)
        return relation

    # Forget outdated versions of relations once there are many new versions. The version of `plan`
    # is kept.
    cdef int forget_outdated(self, plan) except -1:
        self.new_versions += 1
        if self.new_versions < NEW_VERSIONS:
            return 0
        self.new_versions = 0
        with_rows = [(<RelationRows> relation).plan for relation in self.open.values()]
        for version in outdated(self.known, [plan, *with_rows], self.state):
            del self.known[version]
        memset(self.stream.cached, 0, sizeof(self.stream.cached))
        return 0

    # Expect that a relation's next batch is as large as its last batch, so that each column gets
    # its memory at once. Expect nothing if all open batches together would exceed max_bytes.
    cdef void reserve(self, Rows *rows) noexcept:
        cdef int64_t usual = rows.usual * rows.fixed
        cdef int32_t c
        for c in range(rows.width):
            usual += rows.usual_bytes[c]
        if self.reserved + usual > self.stream.max_bytes:
            usual = rows.usual = 0
            memset(rows.usual_bytes, 0, rows.width * sizeof(int64_t))
        rows.reserved = usual
        self.reserved += usual

    # Make a record batch of a relation's rows. Return None if it has none.
    cdef object close(self, RelationRows relation):
        cdef ChangeBatch batch
        cdef Rows *rows = &relation.rows
        cdef Column *column
        cdef int32_t c
        cdef bint made
        self.open.pop(relation.plan.relation.relation_id, None)
        memset(self.stream.cached, 0, sizeof(self.stream.cached))
        self.stream.held -= rows.bytes + rows.count * rows.fixed
        self.reserved -= rows.reserved
        if rows.count == 0:
            relation.clear()
            return None
        batch = ChangeBatch.__new__(ChangeBatch)
        batch.layout = relation.layout
        batch.wide = self.stream.wide
        batch.num_rows = rows.count
        binary = []
        for i, position in enumerate(relation.positions):
            c = position
            if rows.after.columns[c].form == AS_BINARY:
                binary.append(i)
        batch.binary = tuple(binary)
        batch.schema = relation.schemas.get(batch.binary)
        if batch.schema is None:
            batch.schema = schema_of(batch.layout.schema(batch.binary))
            relation.schemas[batch.binary] = batch.schema
        rows.usual = rows.count
        for c in range(rows.width):
            column = &rows.after.columns[c]
            if column.width < 0 and column.offsets != NULL:
                rows.usual_bytes[c] = column.offsets[rows.after.filled]
        for labels, table in relation.labels.items():
            # Another decoder that uses this layout may have added labels.
            if len(labels.numbers) != (<EnumTable> table).table.count:
                (<EnumTable> table).fill(labels)
        with nogil:
            made = finish(rows, batch, self.lsns != NULL)
        if not made:
            raise MemoryError
        return batch

    # Close the batch of a relation, and add a new label to the dictionary of the next batch.
    cdef int learn(self, RelationRows relation) except -1:
        new, self.error = self.error, None
        self.check()
        batch = self.close(relation)
        if batch is not None:
            self.ready.append(batch)
        new.labels.add(new.label)
        (<EnumTable> relation.labels[new.labels]).fill(new.labels)
        return 0

    # Raise the error of the next frame.
    cdef int refuse(self) except -1:
        error, self.error = self.error, None
        if error is not None and not isinstance(error, Exception):
            raise error
        plan = self.check()
        frame = self.frame()
        try:
            if error is not None:
                refuse_value(frame, self.error_offset, self.error_column, error, plan)
            lsn = self.lsn()
            if lsn is None or not lsn >> 63:
                refuse_changed()
            refuse_time(frame, 0, "lsn", lsn)
        except DecodeError as refused:
            refused.frame = self.position
            raise

    # Raise the error of the next frame if it is malformed or can't come now. Otherwise the frame is
    # a row: return the plan of its relation.
    cdef object check(self):
        cdef bytes frame = self.piece.frame(self.at)
        self.sync()
        state = self.state
        in_stream = state.open_xid is not None
        try:
            state.check_order(frame)
            if frame[:1] not in (b"I", b"U", b"D"):
                message = decode(frame, in_stream)
                if self.stream.wide and message.final_lsn >> 63:
                    refuse_time(frame, BEGIN_FINAL_LSN, "commit_lsn", message.final_lsn)
                refuse_time(frame, BEGIN_COMMIT_TIME, "commit_time", message.commit_time)
            relation_id = relation_id_of(frame, in_stream)
            plan = None if relation_id is None else state.plan(relation_id)
            if plan is None:
                diagnose(frame, in_stream, state.plan)
            restore(frame, in_stream, plan)
        except DecodeError as refused:
            refused.frame = self.position
            raise
        return plan
