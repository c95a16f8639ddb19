# cython: annotation_typing=False
"""The frequent messages and the decoder, compiled: the twin of ``_pure.py``.

The frequent messages are Begin, Commit, Insert, Update and Delete. Both modules have the same
classes and functions in the same order, and give the same values and the same errors. When a row is
decoded, its frame is walked once. The message keeps the frame, the relation's plan and the position
of the new tuple. If the walk finds the frame malformed, :func:`.diagnose.diagnose` reads the frame
again and raises the error of its first fault.
"""

from __future__ import annotations

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from pgoutput_fast._public cimport name_type
from pgoutput_fast.decoding._tuples cimport (
    Plan, TupleData as TupleOfC, compiled, data_of, fail_stateless, make_tuple, plan_of, xid_size,
)
from pgoutput_fast._loads cimport load_uint32, load_uint64
from pgoutput_fast.protocol._wire cimport (
    BEGIN_COMMIT_TIME, BEGIN_FINAL_LSN, BEGIN_LENGTH, BEGIN_XID, COMMIT_END_LSN, COMMIT_FLAGS,
    COMMIT_LENGTH, COMMIT_LSN, COMMIT_TIME, MAX_COLUMNS, MAX_FRAME, ROW_MARKER, ROW_RELATION_ID,
    ROW_TUPLE, TUPLE_HEAD, VALUE_HEAD, XID, XID_SIZE, walk_tuple,
)

import inspect
from types import MappingProxyType

from ._tuples import TupleData  # no-cython-lint: a name of this module
from .diagnose import diagnose
from ..errors import DecodeError, frame_bytes, refuse_another_thread
from ..protocol.messages import decode_rare, describe, to_datetime
from ..settings import make_settings
from .state import StreamState
from .views import describe_decoder, restore_decoder
from .views import restore as restore_message

cdef extern from "Python.h":
    bint PyBytes_CheckExact(object value)

cdef extern from *:
    """
    static const pgf_wire_field pgf_wire_fields[] = {
    #define PGF_FIELD(message, tag, field, offset) {tag, #field, offset},
        PGF_WIRE_FIELDS(PGF_FIELD)
    #undef PGF_FIELD
        {0, NULL, 0},
    };
    """
    ctypedef struct WireField "pgf_wire_field":
        char tag
        const char *name
        int offset
    const WireField *wire_fields "pgf_wire_fields"

IMPLEMENTATION = "cython"

cdef enum:
    CACHED = 64  # slots of the cache of plans; a power of two

cdef str _UTF8 = "utf-8"


@cython.no_gc
@cython.freelist(64)
cdef class _Row:
    """Base class of Insert, Update and Delete: the frame, and where the new tuple begins."""

    cdef bytes _frame
    cdef Plan _plan  # None if the frame was decoded without a Decoder
    cdef uint32_t _new_start
    cdef bint _in_stream

    def __init__(self):
        raise TypeError(f"{type(self).__name__} messages are made by decoding a frame")

    @property
    def frame(self):
        """The frame's bytes."""
        return self._frame

    @property
    def in_stream(self):
        """Whether the frame came inside a stream chunk."""
        return self._in_stream

    @property
    def xid(self):
        """The xid of the (sub)transaction in a stream chunk, None outside."""
        if not self._in_stream:
            return None
        return load_uint32(data_of(self._frame) + XID)

    @property
    def relation_id(self):
        """OID of the relation."""
        return load_uint32(data_of(self._frame) + ROW_RELATION_ID + xid_size(self._in_stream))

    @property
    def relation(self):
        """The Relation message that announced the row's table.

        Raises
        ------
        DecodeError
            ``unknown_relation``: the frame was decoded without a Decoder.
        """
        if self._plan is None:
            fail_stateless(self._frame, self._in_stream)
        return self._plan.plan.relation

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        cdef _Row row = <_Row> other
        return self._frame == row._frame and self._in_stream == row._in_stream

    def __hash__(self):
        return hash((self._frame, bool(self._in_stream)))

    def __reduce__(self):
        return restore_message, (self._frame, bool(self._in_stream), plan_of(self._plan))

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return describe(self, self.tag)


@cython.final
@cython.no_gc
cdef class Insert(_Row):
    """An inserted row.

    Fields in wire order: xid (only inside stream chunks, else None), relation_id (the OID of the
    table), the marker "N", new (the row). `relation` is the table's Relation message.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-INSERT
    """

    __match_args__ = ("xid", "relation_id", "new")
    tag = "I"

    @property
    def new(self):
        """The row."""
        return make_tuple(self._frame, self._in_stream, self._plan, self._new_start, False)


@cython.final
@cython.no_gc
cdef class Update(_Row):
    """An updated row.

    Fields in wire order: xid (only inside stream chunks, else None), relation_id (the OID of the
    table), old_kind ("K" or "O", if an old row is sent), old, the marker "N", new (the row).
    `relation` is the table's Relation message.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-UPDATE
    """

    __match_args__ = ("xid", "relation_id", "old_kind", "old", "new")
    tag = "U"

    @property
    def old_kind(self):
        """The kind of `old`: "K" the key, "O" the whole row, None without an old row."""
        cdef uint8_t marker = marker_of(self)
        return None if marker == c'N' else chr(marker)

    @property
    def old(self):
        """The row before the update, or its key: see `old_kind`."""
        return None if marker_of(self) == c'N' else first_tuple(self, True)

    @property
    def new(self):
        """The row after the update."""
        return make_tuple(self._frame, self._in_stream, self._plan, self._new_start, False)


@cython.final
@cython.no_gc
cdef class Delete(_Row):
    """A deleted row.

    Fields in wire order: xid (only inside stream chunks, else None), relation_id (the OID of the
    table), old_kind ("K" or "O"), old. `relation` is the table's Relation message.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-DELETE
    """

    __match_args__ = ("xid", "relation_id", "old_kind", "old")
    tag = "D"

    @property
    def old_kind(self):
        """The kind of `old`: "K" the key, "O" the whole row."""
        return chr(marker_of(self))

    @property
    def old(self):
        """The deleted row, or its key: see `old_kind`."""
        return first_tuple(self, True)


# Make the TupleData of a row's first tuple.
cdef TupleOfC first_tuple(_Row row, bint is_old):
    cdef Py_ssize_t start = ROW_TUPLE + xid_size(row._in_stream)
    return make_tuple(row._frame, row._in_stream, row._plan, start, is_old)


cdef uint8_t marker_of(_Row row) except? 0:
    return data_of(row._frame)[ROW_MARKER + xid_size(row._in_stream)]


@cython.no_gc
@cython.freelist(16)
cdef class _Fixed:
    """Base class of Begin and Commit, whose frames have a fixed length.

    Their fields are read from the frame when they are accessed.
    """

    cdef bytes _frame
    cdef bint _in_stream

    def __init__(self):
        raise TypeError(f"{type(self).__name__} messages are made by decoding a frame")

    @property
    def frame(self):
        """The frame's bytes."""
        return self._frame

    @property
    def in_stream(self):
        """Whether the frame was decoded with `in_stream`."""
        return self._in_stream

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        cdef _Fixed message = <_Fixed> other
        return self._frame == message._frame and self._in_stream == message._in_stream

    def __hash__(self):
        return hash((self._frame, bool(self._in_stream)))

    def __reduce__(self):
        return restore_message, (self._frame, bool(self._in_stream), None)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return describe(self, self.tag)


@cython.final
@cython.no_gc
cdef class Begin(_Fixed):
    """The begin of a transaction. The server sends it after the commit.

    Fields in wire order: final_lsn, commit_time (µs since 2000-01-01 UTC; as a datetime:
    `commit_datetime`), xid.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-BEGIN
    """

    __match_args__ = ("final_lsn", "commit_time", "xid")
    tag = "B"

    @property
    def final_lsn(self):
        """LSN of the transaction's commit record."""
        return load_uint64(data_of(self._frame) + BEGIN_FINAL_LSN)

    @property
    def commit_time(self):
        """Time of the commit, in microseconds since 2000-01-01 UTC."""
        return <int64_t> load_uint64(data_of(self._frame) + BEGIN_COMMIT_TIME)

    @property
    def commit_datetime(self):
        """`commit_time` as an aware datetime in UTC.

        Raises
        ------
        DecodeError
            ``out_of_range``: the time is before year 1 or after year 9999.
        """
        return to_datetime(self, "commit_time")

    @property
    def xid(self):
        """The transaction's xid."""
        return load_uint32(data_of(self._frame) + BEGIN_XID)


@cython.final
@cython.no_gc
cdef class Commit(_Fixed):
    """The end of a committed transaction.

    Fields in wire order: flags, commit_lsn, end_lsn, commit_time (µs since 2000-01-01 UTC; as a
    datetime: `commit_datetime`).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-COMMIT
    """

    __match_args__ = ("flags", "commit_lsn", "end_lsn", "commit_time")
    tag = "C"

    @property
    def flags(self):
        """Flags; no server version uses them so far."""
        return data_of(self._frame)[COMMIT_FLAGS]

    @property
    def commit_lsn(self):
        """LSN of the commit record."""
        return load_uint64(data_of(self._frame) + COMMIT_LSN)

    @property
    def end_lsn(self):
        """LSN behind the transaction: acknowledge this LSN to the server."""
        return load_uint64(data_of(self._frame) + COMMIT_END_LSN)

    @property
    def commit_time(self):
        """Time of the commit, in microseconds since 2000-01-01 UTC."""
        return <int64_t> load_uint64(data_of(self._frame) + COMMIT_TIME)

    @property
    def commit_datetime(self):
        """`commit_time` as an aware datetime in UTC.

        Raises
        ------
        DecodeError
            ``out_of_range``: the time is before year 1 or after year 9999.
        """
        return to_datetime(self, "commit_time")


# Make the Begin or Commit of a frame. Raise a DecodeError if the frame's length is wrong.
cdef _Fixed make_fixed(bytes frame, bint in_stream):
    cdef _Fixed message
    cdef bint is_begin = PyBytes_AS_STRING(frame)[0] == c'B'
    if PyBytes_GET_SIZE(frame) != (BEGIN_LENGTH if is_begin else COMMIT_LENGTH):
        diagnose(frame, in_stream, None)
    message = <_Fixed> (Begin.__new__(Begin) if is_begin else Commit.__new__(Commit))
    message._frame = frame
    message._in_stream = in_stream
    return message


# Make the Insert, Update or Delete of a frame. Return None if the frame is malformed.
cdef inline _Row make_row(
    bytes frame, const uint8_t *data, Py_ssize_t end, bint in_stream, Plan plan
):
    cdef int32_t width = -1 if plan is None else plan.width
    cdef _Row row
    cdef Py_ssize_t position = ROW_MARKER + xid_size(in_stream)
    cdef Py_ssize_t new_start
    cdef uint8_t tag = data[0]
    cdef uint8_t marker
    if position >= end or end > MAX_FRAME:
        return None
    marker = data[position]
    new_start = position + 1
    position = walk_tuple(data, position + 1, end, width)
    if position < 0:
        return None
    if tag == c'I':
        if marker != c'N' or position != end:
            return None
        row = <_Row> Insert.__new__(Insert)
    elif tag == c'U':
        if marker == c'K' or marker == c'O':
            if position >= end or data[position] != c'N':
                return None
            new_start = position + 1
            position = walk_tuple(data, position + 1, end, width)
        elif marker != c'N':
            return None
        if position != end:
            return None
        row = <_Row> Update.__new__(Update)
    else:
        if (marker != c'K' and marker != c'O') or position != end:
            return None
        row = <_Row> Delete.__new__(Delete)
    row._frame = frame
    row._plan = plan
    row._new_start = <uint32_t> new_start
    row._in_stream = in_stream
    return row


def decode(frame: Any, in_stream: bool = False) -> AnyMessage:
    """Decode one frame by itself, without the state of a :class:`Decoder`.

    Without its relation, a row has bytes and texts, but no values.

    Parameters
    ----------
    frame : bytes-like
        One pgoutput message, without CopyData and XLogData headers. The message keeps an object of
        the class `bytes`. It copies any other contiguous buffer.
    in_stream : bool
        Whether the frame stands inside a stream chunk, between Stream Start and Stream Stop. Such a
        frame has an xid as its second field, and nothing in the frame says so.

    Returns
    -------
    message
        An object of the class for the frame's tag.

    Raises
    ------
    DecodeError
        The frame is malformed.
    TypeError
        `frame` is not a contiguous buffer.
    """
    cdef bytes data = frame if PyBytes_CheckExact(frame) else frame_bytes(frame)
    in_stream = bool(in_stream)
    cdef char tag = PyBytes_AS_STRING(data)[0]  # 0 if it is empty: a NUL follows the bytes
    if tag == c'I' or tag == c'U' or tag == c'D':
        return restore(data, in_stream, None)
    if tag == c'B' or tag == c'C':
        return make_fixed(data, in_stream)
    return decode_rare(data, in_stream, _UTF8)


def restore(frame: bytes, in_stream: bool, plan: RelationPlan | None) -> AnyMessage:
    """Make the Begin, Commit, Insert, Update or Delete of a frame; `plan` is its relation's."""
    cdef bytes data = frame_bytes(frame)
    cdef char tag = PyBytes_AS_STRING(data)[0]
    cdef _Row row
    if tag == c'B' or tag == c'C':
        return make_fixed(data, in_stream)
    row = make_row(
        data, <const uint8_t *> PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), in_stream,
        None if plan is None else compiled(plan),
    )
    if row is None:
        diagnose(data, in_stream, None if plan is None else lambda relation_id: plan)
    return row


cdef enum Pending:
    NOTHING  # the state is up to date
    BEGUN  # the state lacks the Begin in `_begin`
    ENDED  # the state lacks the transaction's end


cdef class Decoder:
    """Decodes the frames of one replication stream in their order.

    A decoder remembers the relations and types that earlier frames announced, and the open
    transaction. Only one thread at a time may use a decoder; a call during another is refused.

    Parameters
    ----------
    policies : Policies, optional
        What to do with values that Python cannot hold.
    encoding : str
        The session's client_encoding, by Python's or PostgreSQL's name.
    registry : TypeRegistry, optional
        Decoders of users' own types.

    Raises
    ------
    PgOutputError
        The encoding is unknown or unusable.
    TypeError
        An argument has a wrong type.
    """

    # The state is a Python object, and slow to change for each frame. The changes by frequent
    # messages wait here until the state is needed: the transaction's Begin or end, and the rows
    # since.
    cdef object _state
    cdef _Fixed _begin
    cdef Pending _pending
    cdef int64_t _rows
    cdef bint _in_stream
    # Whether a call runs that executes Python code, in which another thread may come: a critical
    # section lets other threads in where its thread waits, as the GIL does.
    cdef bint _runs
    # A cache of plans. The low bits of a relation's OID are the number of its slot.
    cdef uint32_t[CACHED] _cached_ids
    cdef list _cached_plans

    # Cython gives a class no signature. make_settings has the same parameters.
    __signature__ = inspect.signature(make_settings).replace(
        return_annotation=inspect.Signature.empty
    )

    @cython.critical_section
    def __init__(self, policies: Policies | None = None, encoding: str = "utf-8",
                 registry: TypeRegistry | None = None):
        self._adopt(StreamState(make_settings(policies, encoding, registry)))

    @property
    @cython.critical_section
    def state(self):
        """The state from earlier frames: relations, types, the open transaction.

        Raises
        ------
        PgOutputError
            Another thread is decoding with this decoder.
        """
        self._take()
        try:
            self._sync()
            return self._state
        finally:
            self._runs = False

    @property
    def relations(self):
        """The relations announced so far, by OID, except in streamed transactions in progress."""
        with cython.critical_section(self):
            state = self._state
        return MappingProxyType(state.relations)

    @cython.critical_section
    def reset(self) -> None:
        """Begin a new connection: forget open transactions and their streamed relations.

        Raises
        ------
        PgOutputError
            Another thread is decoding with this decoder.
        """
        self._take()
        try:
            self._begin_connection()
        finally:
            self._runs = False

    def decode(self, frame: Any) -> AnyMessage:
        """Decode the stream's next frame.

        Parameters
        ----------
        frame : bytes-like
            One pgoutput message, as :func:`decode` takes it.

        Raises
        ------
        DecodeError
            The frame is malformed, or its message can't come now. The decoder has not changed.
        PgOutputError
            Another thread is decoding with this decoder.
        TypeError
            `frame` is not a contiguous buffer.
        """
        return self._decode(frame)

    def decode_many(self, frames: Iterable[Any]) -> Iterator[AnyMessage]:
        """Return an iterator that decodes frames one after the other.

        Raises
        ------
        DecodeError
            As :meth:`decode` does. The error's attribute `frame` is the index in `frames`. The
            decoder has not changed since the frame before.
        TypeError
            `frames` is not iterable, or a frame is not a contiguous buffer.
        """
        cdef _Messages messages = _Messages.__new__(_Messages)
        messages._decoder = self
        messages._is_exact = type(self) is Decoder
        messages._frames = iter(frames)
        return messages

    def __reduce__(self):
        return restore_decoder, (self.state,)

    def __copy__(self):
        return decoder_of(self.state.copy())

    def __deepcopy__(self, memo):
        return decoder_of(self.state.copy())

    def __repr__(self):
        return describe_decoder(self)

    cdef object _decode(self, object frame):
        cdef bytes data = frame if PyBytes_CheckExact(frame) else frame_bytes(frame)
        with cython.critical_section(self):
            message = decode_usual(self, data)
        return message if message is not None else self._decode_alone(data)

    @cython.critical_section
    cdef object _decode_alone(self, bytes data):
        self._take()
        try:
            return self._decode_unusual(data)
        finally:
            self._runs = False

    # Refuse this call if another one runs. Otherwise this one runs, until the caller says that it
    # has ended.
    cdef int _take(self) except -1:
        if self._runs:
            refuse_another_thread()
        self._runs = True
        return 0

    cdef object _decode_unusual(self, bytes data):
        cdef const uint8_t *start = <const uint8_t *> PyBytes_AS_STRING(data)
        cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
        cdef uint8_t tag = start[0]  # 0 if it is empty: a NUL follows the bytes
        cdef Py_ssize_t at
        cdef uint32_t relation_id, slot
        cdef Plan plan
        cdef object found
        cdef _Row row = None
        if tag == c'I' or tag == c'U' or tag == c'D':
            at = ROW_RELATION_ID + xid_size(self._in_stream)
            if length >= at + 4:
                relation_id = load_uint32(start + at)
                found = self._state.plan(relation_id)
                if found is not None:
                    plan = compiled(found)
                    slot = relation_id & (CACHED - 1)
                    self._cached_plans[slot] = plan
                    self._cached_ids[slot] = relation_id
                    row = make_row(data, start, length, self._in_stream, plan)
            if row is None:
                diagnose(data, self._in_stream, self._state.plan)
            self._rows += 1
            return row
        if tag == c'B' or tag == c'C':
            # decode_usual refused the frame: a Begin or Commit can't come now, or its length is
            # wrong.
            self._state.check_order(data)
            diagnose(data, False, None)
        self._sync()
        result = self._state.receive(data)
        # A relation may have changed, or a stream chunk may have begun or ended.
        if tag != c'T' and tag != c'M' and tag != c'O':
            self._adopt(self._state)
        return result

    cdef int _begin_connection(self) except -1:
        self._state.reset()
        return self._adopt(self._state)

    # Decode the next frames from `state` on. This empties the cache of plans.
    cdef int _adopt(self, object state) except -1:
        self._state = state
        self._begin = None
        self._pending = NOTHING
        self._rows = 0
        self._in_stream = state.open_xid is not None
        self._cached_plans = [None] * CACHED
        return 0

    # Tell the state about the frequent messages since the last call.
    cdef int _sync(self) except -1:
        cdef Begin begin
        state = self._state
        if self._pending == BEGUN:
            begin = <Begin> self._begin
            state.begin(begin.xid, begin.final_lsn, begin.commit_time)
        elif self._pending == ENDED:
            state.end()
        if self._rows:
            state.row += self._rows
        self._pending = NOTHING
        self._rows = 0
        return 0


# Decode a usual frame: a row whose plan is cached, a Begin or a Commit. Return None if the frame is
# another message, or malformed, or if another call runs. No Python code runs here. The caller's
# critical section holds the decoder: one in this function would take 25 instructions more.
cdef inline object decode_usual(Decoder decoder, bytes data):
    cdef const uint8_t *start = <const uint8_t *> PyBytes_AS_STRING(data)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
    cdef uint8_t tag = start[0]
    cdef Py_ssize_t at = ROW_RELATION_ID + xid_size(decoder._in_stream)
    cdef uint32_t relation_id, slot
    cdef Plan plan
    cdef _Row row
    cdef _Fixed message
    if decoder._runs:
        return None
    if tag == c'I' or tag == c'U' or tag == c'D':
        if length < at + 4:
            return None
        relation_id = load_uint32(start + at)
        slot = relation_id & (CACHED - 1)
        plan = <Plan> decoder._cached_plans[slot]
        if plan is None or decoder._cached_ids[slot] != relation_id:
            return None
        row = make_row(data, start, length, decoder._in_stream, plan)
        if row is not None:
            decoder._rows += 1
        return row
    if (tag == c'B' or tag == c'C') and not decoder._in_stream:
        if length != (BEGIN_LENGTH if tag == c'B' else COMMIT_LENGTH):
            return None
        message = make_fixed(data, False)
        decoder._begin = message if tag == c'B' else None
        decoder._pending = BEGUN if tag == c'B' else ENDED
        decoder._rows = 0
        return message
    return None


@cython.final
cdef class _Messages:
    """The iterator of :meth:`Decoder.decode_many`."""

    cdef Decoder _decoder
    cdef object _frames
    cdef Py_ssize_t _index
    cdef bint _is_exact  # False: the decoder's class is a subclass, which may override decode()

    def __iter__(self):
        return self

    @cython.critical_section
    def __next__(self):
        if self._frames is None:
            raise StopIteration
        # Without frames, the next call raises StopIteration: like a generator, the iterator ends
        # with the first error.
        frames, self._frames = self._frames, None
        frame = next(frames)
        message = None
        if self._is_exact and PyBytes_CheckExact(frame):
            with cython.critical_section(self._decoder):
                message = decode_usual(self._decoder, <bytes> frame)
        if message is None:
            message = self._decode(frame)
        self._frames = frames
        self._index += 1
        return message

    cdef object _decode(self, object frame):
        try:
            return self._decoder._decode(frame) if self._is_exact else self._decoder.decode(frame)
        except DecodeError as error:
            error.frame = self._index
            raise


def decoder_of(state: StreamState) -> Decoder:
    """Return a decoder that decodes the next frames from `state` on."""
    cdef Decoder decoder = Decoder.__new__(Decoder)
    decoder._adopt(state)
    return decoder


def wire_offsets() -> dict[tuple[str, str], int]:
    """Return the offsets in C, in bytes and outside stream chunks, by tag and field.

    The field ``end`` is the length of the message. Tests compare these offsets with
    ``protocol/wire.py``.
    """
    cdef const WireField *field = wire_fields
    found = {}
    while field.name != NULL:
        found[chr(field.tag), field.name.decode()] = field.offset
        field += 1
    return found


def wire_limits() -> dict[str, int]:
    """Return the constants in C that repeat constants of `errors` and `wire`, for the tests."""
    return {
        "MAX_FRAME_LENGTH": MAX_FRAME,
        "MAX_COLUMNS": MAX_COLUMNS,
        "XID_SIZE": XID_SIZE,
        "TUPLE_HEAD": TUPLE_HEAD,
        "VALUE_HEAD": VALUE_HEAD,
    }


# help() shows the package from which users import the classes. Pickles name it too, so that they
# load with either implementation.
name_type(Begin, b"pgoutput_fast.Begin")
name_type(Commit, b"pgoutput_fast.Commit")
name_type(Insert, b"pgoutput_fast.Insert")
name_type(Update, b"pgoutput_fast.Update")
name_type(Delete, b"pgoutput_fast.Delete")
name_type(Decoder, b"pgoutput_fast.Decoder")
