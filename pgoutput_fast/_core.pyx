# cython: annotation_typing=False
"""The messages that come by the thousand, compiled: the twin of ``_pure.py``.

Both have the same classes and functions in the same order, and give the same values and the same
errors. A frame is walked once when it is decoded; a message is the frame, the relation's plan and a
position. Values are made when they are asked for; the slices of a tuple's columns are filled in
when a single column is, as going through all of them is quicker without (measured). Where the walk
stumbles, :func:`pgoutput_fast.diagnose.diagnose` reads the frame again and names the first fault.
"""

from __future__ import annotations

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_Decode
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from pgoutput_fast._values cimport from_binary, from_text, utf8_text
from pgoutput_fast._wire cimport (
    BEGIN_COMMIT_TIME, BEGIN_FINAL_LSN, BEGIN_LENGTH, BEGIN_XID, COMMIT_END_LSN, COMMIT_FLAGS,
    COMMIT_LENGTH, COMMIT_LSN, COMMIT_TIME, KIND_BINARY, KIND_NULL, KIND_TEXT, KIND_UNCHANGED,
    MAX_COLUMNS, MAX_FRAME, ROW_MARKER, ROW_RELATION_ID, ROW_TUPLE, XID, XID_SIZE, ColumnSlice,
    load_uint16, load_uint32, load_uint64, take_column, walk_tuple,
)

import inspect
import operator
from collections.abc import Sequence
from types import MappingProxyType

from .diagnose import STATELESS_HINT, diagnose
from .errors import DecodeError, fail, frame_bytes
from .objects import UNCHANGED
from .messages import decode_rare, describe, to_datetime
from .views import describe_tuple, restore_tuple
from .views import restore as restore_message
from .plan import refuse_value
from .state import StreamState
from .views import describe_decoder, restore_decoder
from .settings import make_settings

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
    CACHED = 64  # plans at hand without a look into a dict; a power of two

cdef object _UNCHANGED = UNCHANGED
cdef str _UTF8 = "utf-8"


@cython.final
cdef class _Plan:
    """A relation's plan as the code below reads it; kept in `RelationPlan.compiled`."""

    cdef object plan
    cdef bytes codes
    cdef tuple text
    cdef tuple binary
    cdef int32_t width
    cdef bint utf8


cdef _Plan compiled(object plan):
    """The plan of a RelationPlan."""
    cdef _Plan made = plan.compiled
    if made is None:
        made = _Plan.__new__(_Plan)
        made.plan = plan
        made.width = plan.width
        made.utf8 = plan.settings.encoding == "utf-8"
        plan.compiled = made
    return made


cdef object plan_of(_Plan plan):
    return None if plan is None else plan.plan


cdef int resolve(_Plan plan) except -1:
    plan.text = plan.plan.text
    plan.binary = plan.plan.binary
    plan.codes = plan.plan.codes
    return 0


@cython.no_gc
@cython.freelist(64)
cdef class _Row:
    """What Insert, Update and Delete share: the frame, and where its tuples begin."""

    cdef bytes _frame
    cdef _Plan _plan  # None: decoded alone
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
        """The subtransaction's xid in a stream chunk, None outside."""
        if not self._in_stream:
            return None
        return load_uint32(data_of(self._frame) + XID)

    @property
    def relation_id(self):
        """OID of the relation."""
        return load_uint32(data_of(self._frame) + ROW_RELATION_ID + xid_size(self._in_stream))

    @property
    def relation(self):
        """The relation as it was announced.

        Raises
        ------
        DecodeError
            ``unknown_relation``: the frame was decoded alone.
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
    """A row inserted. Fields: xid, relation_id, new; `relation`."""

    __match_args__ = ("xid", "relation_id", "new")
    tag = "I"

    @property
    def new(self):
        """The row."""
        return make_tuple(self, self._new_start, False)


@cython.final
@cython.no_gc
cdef class Update(_Row):
    """A row updated. Fields: xid, relation_id, old_kind, old, new; `relation`."""

    __match_args__ = ("xid", "relation_id", "old_kind", "old", "new")
    tag = "U"

    @property
    def old_kind(self):
        """What `old` is: "K" the key, "O" the whole row; None where it was not sent."""
        cdef uint8_t marker = marker_of(self)
        return None if marker == c'N' else chr(marker)

    @property
    def old(self):
        """The row as it was, or its key: see `old_kind`."""
        return None if marker_of(self) == c'N' else old_tuple(self)

    @property
    def new(self):
        """The row as it is."""
        return make_tuple(self, self._new_start, False)


@cython.final
@cython.no_gc
cdef class Delete(_Row):
    """A row deleted. Fields: xid, relation_id, old_kind, old; `relation`."""

    __match_args__ = ("xid", "relation_id", "old_kind", "old")
    tag = "D"

    @property
    def old_kind(self):
        """What `old` is: "K" the key, "O" the whole row."""
        return chr(marker_of(self))

    @property
    def old(self):
        """The row as it was, or its key: see `old_kind`."""
        return old_tuple(self)


# Bytes by which the fields of a row lie further back inside a stream chunk.
cdef inline Py_ssize_t xid_size(bint in_stream) noexcept nogil:
    return XID_SIZE if in_stream else 0


cdef const uint8_t *data_of(bytes frame) except NULL:
    # A message that nobody decoded (Insert.__new__(Insert)) has no frame, and must not crash.
    if frame is None:
        raise TypeError("the message was not made by decoding a frame")
    return <const uint8_t *> PyBytes_AS_STRING(frame)


cdef uint8_t marker_of(_Row row) except? 0:
    return data_of(row._frame)[ROW_MARKER + xid_size(row._in_stream)]


cdef TupleData old_tuple(_Row row):
    return make_tuple(row, ROW_TUPLE + xid_size(row._in_stream), True)


cdef TupleData make_tuple(_Row row, uint32_t start, bint is_old):
    cdef TupleData data = TupleData.__new__(TupleData)
    data._width = load_uint16(data_of(row._frame) + start)
    data._start = start + 2
    data._frame = row._frame
    data._in_stream = row._in_stream
    data._plan = row._plan
    data._is_old = is_old
    return data


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.collection_type("sequence")
cdef class TupleData:
    """The columns of a row, as a sequence of typed values made when they are asked for.

    It keeps the frame alive. In the tuple of an old key (kind "K") only the columns of the replica
    identity mean anything: nothing is known of the others, and :meth:`as_dict` leaves them out.
    """

    cdef bytes _frame
    cdef _Plan _plan  # None: decoded alone
    cdef bytes _slices  # room for ColumnSlices, one behind the last column too; None so far
    cdef uint32_t _start
    cdef uint32_t _width
    cdef bint _in_stream
    cdef bint _is_old

    def __init__(self):
        raise TypeError("TupleData is made by decoding a frame")

    def __len__(self):
        return self._width

    def kind(self, i: int) -> str:
        """The kind of column `i`: "n" NULL, "u" unchanged, "t" text or "b" binary."""
        return "nutb"[self._column(self._index(i)).length_and_kind & 3]

    def raw(self, i: int) -> bytes | Unchanged | None:
        """The bytes of column `i`, None for NULL, or UNCHANGED."""
        return self._raw(self._column(self._index(i)))

    def text(self, i: int) -> str | Unchanged | None:
        """Column `i` as the text that the server prints, None for NULL, or UNCHANGED.

        Raises
        ------
        DecodeError
            ``bad_encoding``; of binary values ``bad_value``, ``no_text_form`` where the type's text
            is not known, and ``unknown_relation`` where the frame was decoded alone.
        """
        cdef Py_ssize_t at = self._index(i)
        cdef ColumnSlice column = self._column(at)
        try:
            return self._text(at, column)
        except ValueError as error:
            refuse_value(self._frame, column.offset, at, error, plan_of(self._plan))

    def raws(self) -> tuple[bytes | Unchanged | None, ...]:
        """Every column as of :meth:`raw`."""
        cdef const uint8_t *frame = data_of(self._frame)
        cdef Py_ssize_t position = self._start
        cdef ColumnSlice column
        cdef Py_ssize_t i
        cdef object value
        cdef tuple values = PyTuple_New(self._width)
        for i in range(self._width):
            position = take_column(frame, position, &column)
            value = self._raw(column)
            Py_INCREF(value)
            PyTuple_SET_ITEM(values, i, value)
        return values

    # Both without what a function of Python has beside: the interpreter calls them 13 ns faster.
    @cython.binding(False)
    @cython.embedsignature(True)
    @cython.embedsignature.format("clinic")
    def texts(self) -> tuple[str | Unchanged | None, ...]:
        """Every column as of :meth:`text`."""
        cdef const uint8_t *frame = data_of(self._frame)
        cdef Py_ssize_t position = self._start
        cdef ColumnSlice column
        cdef Py_ssize_t i = 0
        cdef object value
        cdef tuple values = PyTuple_New(self._width)
        cdef bint utf8 = self._plan is None or self._plan.utf8
        column.offset = 0
        try:
            for i in range(self._width):
                position = take_column(frame, position, &column)
                if column.length_and_kind & 3 == KIND_TEXT and utf8:
                    value = utf8_text(
                        <const char *> frame + column.offset, column.length_and_kind >> 2
                    )
                else:
                    value = self._text(i, column)
                Py_INCREF(value)
                PyTuple_SET_ITEM(values, i, value)
        except ValueError as error:
            refuse_value(self._frame, column.offset, i, error, plan_of(self._plan))
        return values

    @cython.binding(False)
    @cython.embedsignature(True)
    @cython.embedsignature.format("clinic")
    def values(self) -> tuple[Any, ...]:
        """Every column as a Python object; None for NULL, or UNCHANGED.

        Raises
        ------
        DecodeError
            A value is refused, or ``unknown_relation``: the frame was decoded alone.
        """
        cdef const uint8_t *frame = data_of(self._frame)
        cdef Py_ssize_t position = self._start
        cdef ColumnSlice column
        cdef Py_ssize_t i = 0
        cdef object value
        cdef _Plan plan = self._plan
        if plan is None:
            fail_stateless(self._frame, self._in_stream)
        if plan.codes is None:
            resolve(plan)
        cdef const uint8_t *codes = <const uint8_t *> PyBytes_AS_STRING(plan.codes)
        cdef tuple text = plan.text
        cdef tuple binary = plan.binary
        cdef tuple values = PyTuple_New(self._width)
        column.offset = 0
        try:
            for i in range(self._width):
                position = take_column(frame, position, &column)
                value = value_of(
                    frame, column, codes[i], PyTuple_GET_ITEM(text, i), PyTuple_GET_ITEM(binary, i)
                )
                Py_INCREF(value)
                PyTuple_SET_ITEM(values, i, value)
        except Exception as error:
            refuse_value(self._frame, column.offset, i, error, plan.plan)
        return values

    def as_dict(self, columns: Iterable[str] | None = None) -> dict[str, Any]:
        """Column name → value, for all columns or those named; see the class for old keys.

        Raises
        ------
        DecodeError
            As of :meth:`values`.
        KeyError
            The relation has no column of that name.
        """
        if self._plan is None:
            fail_stateless(self._frame, self._in_stream)
        plan = self._plan.plan
        if columns is None:
            if not self._is_key():
                return dict(zip(plan.names, self.values(), strict=True))
            selected = range(plan.width)
        else:
            selected = [plan.positions[name] for name in columns]
        if self._is_key():
            selected = [i for i in selected if plan.is_key[i] or self.kind(i) != "n"]
        return {plan.names[i]: self[i] for i in selected}

    def index(self, value: object, start: int = 0, stop: int | None = None) -> int:
        """Position of the first column that equals `value`."""
        return self.values().index(value, start, len(self) if stop is None else stop)

    def count(self, value: object) -> int:
        """Number of columns that equal `value`."""
        return self.values().count(value)

    def __getitem__(self, key):
        cdef ColumnSlice column
        cdef Py_ssize_t i
        cdef _Plan plan = self._plan
        if isinstance(key, slice):
            return tuple([self[j] for j in range(*key.indices(len(self)))])
        if isinstance(key, str):
            if plan is None:
                fail_stateless(self._frame, self._in_stream)
            i = plan.plan.positions[key]
        else:
            i = self._index(key)
            if plan is None:
                fail_stateless(self._frame, self._in_stream)
        if plan.codes is None:
            resolve(plan)
        column = self._column(i)
        try:
            return value_of(
                data_of(self._frame), column, <uint8_t> PyBytes_AS_STRING(plan.codes)[i],
                PyTuple_GET_ITEM(plan.text, i), PyTuple_GET_ITEM(plan.binary, i),
            )
        except Exception as error:
            refuse_value(self._frame, column.offset, i, error, plan.plan)

    def __iter__(self):
        return iter(self.values())

    def __reversed__(self):
        return iter(self.values()[::-1])

    def __contains__(self, value):
        return value in self.values()

    def __eq__(self, other):
        if type(other) is not TupleData:
            return NotImplemented
        cdef TupleData data = <TupleData> other
        return self._is_key() == data._is_key() and self._wire() == data._wire()

    def __hash__(self):
        return hash((self._is_key(), self._wire()))

    def __reduce__(self):
        plan = plan_of(self._plan)
        which = "old" if self._is_old else "new"
        return restore_tuple, (self._frame, bool(self._in_stream), plan, which)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return describe_tuple(self, plan_of(self._plan))

    cdef object _is_key(self):
        return bool(
            self._is_old
            and data_of(self._frame)[ROW_MARKER + xid_size(self._in_stream)] == c'K'
        )

    # The columns as they stand in the frame.
    cdef bytes _wire(self):
        return self._frame[self._start:self._column(self._width).offset - 1]

    cdef Py_ssize_t _index(self, key) except -1:
        try:
            i = operator.index(key)
        except TypeError:
            raise TypeError(
                f"a column's position must be an int, not {type(key).__name__}; names and "
                "slices are for row[…] alone"
            ) from None
        width = self._width
        if not -width <= i < width:
            raise IndexError(f"column {i} of a tuple of {width} columns")
        return i + width if i < 0 else i

    cdef ColumnSlice _column(self, Py_ssize_t i) except *:
        cdef const uint8_t *frame
        cdef ColumnSlice *slices
        cdef Py_ssize_t position = self._start
        cdef uint32_t at
        if self._slices is None:
            frame = data_of(self._frame)
            self._slices = PyBytes_FromStringAndSize(NULL, (self._width + 1) * sizeof(ColumnSlice))
            slices = <ColumnSlice *> PyBytes_AS_STRING(self._slices)
            for at in range(self._width):
                position = take_column(frame, position, &slices[at])
            slices[self._width].offset = <uint32_t> position + 1
            slices[self._width].length_and_kind = KIND_NULL
        return (<ColumnSlice *> PyBytes_AS_STRING(self._slices))[i]

    cdef object _raw(self, ColumnSlice column):
        cdef uint32_t kind = column.length_and_kind & 3
        if kind == KIND_NULL:
            return None
        if kind == KIND_UNCHANGED:
            return _UNCHANGED
        return PyBytes_FromStringAndSize(
            PyBytes_AS_STRING(self._frame) + column.offset, column.length_and_kind >> 2
        )

    cdef object _text(self, Py_ssize_t i, ColumnSlice column):
        cdef uint32_t kind = column.length_and_kind & 3
        cdef const char *text
        if kind == KIND_TEXT:
            text = PyBytes_AS_STRING(self._frame) + column.offset
            if self._plan is None or self._plan.utf8:
                return utf8_text(text, column.length_and_kind >> 2)
            encoding = (<str> self._plan.plan.settings.encoding).encode("ascii")
            return PyUnicode_Decode(text, column.length_and_kind >> 2, encoding, NULL)
        if kind == KIND_NULL:
            return None
        if kind == KIND_UNCHANGED:
            return _UNCHANGED
        if self._plan is None:
            fail_stateless(self._frame, self._in_stream)
        return self._plan.plan.text_form[i](self._raw(column))


cdef inline object value_of(
    const uint8_t *frame, ColumnSlice column, uint8_t code, PyObject *text, PyObject *binary
):
    cdef uint32_t kind = column.length_and_kind & 3
    cdef const char *at = <const char *> frame + column.offset
    cdef Py_ssize_t length = column.length_and_kind >> 2
    if kind == KIND_TEXT:
        return from_text(code, at, length, <object> text)
    if kind == KIND_BINARY:
        return from_binary(code, at, length, <object> binary)
    return None if kind == KIND_NULL else _UNCHANGED


Sequence.register(TupleData)


@cython.no_gc
@cython.freelist(16)
cdef class _Fixed:
    """What Begin and Commit share: a frame of fixed length, its fields read when asked for."""

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
        """Whether the frame was decoded as one from inside a stream chunk."""
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
    """A transaction begins. Fields: final_lsn, commit_time, xid."""

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
        """`commit_time` as an aware datetime in UTC, where Python's can hold it."""
        return to_datetime(self, "commit_time")

    @property
    def xid(self):
        """The transaction's xid."""
        return load_uint32(data_of(self._frame) + BEGIN_XID)


@cython.final
@cython.no_gc
cdef class Commit(_Fixed):
    """A transaction is committed. Fields: flags, commit_lsn, end_lsn, commit_time."""

    __match_args__ = ("flags", "commit_lsn", "end_lsn", "commit_time")
    tag = "C"

    @property
    def flags(self):
        """Unused by servers so far."""
        return data_of(self._frame)[COMMIT_FLAGS]

    @property
    def commit_lsn(self):
        """LSN of the commit record."""
        return load_uint64(data_of(self._frame) + COMMIT_LSN)

    @property
    def end_lsn(self):
        """LSN after the transaction: what to acknowledge."""
        return load_uint64(data_of(self._frame) + COMMIT_END_LSN)

    @property
    def commit_time(self):
        """Time of the commit, in microseconds since 2000-01-01 UTC."""
        return <int64_t> load_uint64(data_of(self._frame) + COMMIT_TIME)

    @property
    def commit_datetime(self):
        """`commit_time` as an aware datetime in UTC, where Python's can hold it."""
        return to_datetime(self, "commit_time")


cdef object fail_stateless(bytes frame, bint in_stream):
    cdef Py_ssize_t start = ROW_RELATION_ID + xid_size(in_stream)
    relation_id = load_uint32(data_of(frame) + start)
    fail("unknown_relation", frame, start, relation_id=relation_id, hint=STATELESS_HINT)


# The Begin or Commit in a frame.
cdef _Fixed make_fixed(bytes frame, bint in_stream):
    cdef _Fixed message
    cdef bint is_begin = PyBytes_AS_STRING(frame)[0] == c'B'
    if PyBytes_GET_SIZE(frame) != (BEGIN_LENGTH if is_begin else COMMIT_LENGTH):
        diagnose(frame, in_stream, None)
    message = <_Fixed> (Begin.__new__(Begin) if is_begin else Commit.__new__(Commit))
    message._frame = frame
    message._in_stream = in_stream
    return message


# The Insert, Update or Delete in a frame; None if it is malformed.
cdef inline _Row make_row(
    bytes frame, const uint8_t *data, Py_ssize_t end, bint in_stream, _Plan plan
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
    """Decode one frame on its own, without what earlier frames said.

    Parameters
    ----------
    frame : bytes-like
        One pgoutput message, without CopyData and XLogData headers. Exact `bytes` is kept; any
        other contiguous buffer is copied.
    in_stream : bool
        Whether it comes from between Stream Start and Stream Stop, which no frame tells by itself.

    Returns
    -------
    message
        An instance of the class of its tag.

    Raises
    ------
    DecodeError
        The frame is malformed.
    TypeError
        `frame` is no contiguous buffer.
    """
    cdef bytes data = frame if PyBytes_CheckExact(frame) else frame_bytes(frame)
    in_stream = bool(in_stream)
    cdef char tag = PyBytes_AS_STRING(data)[0]  # the NUL behind its end, if it is empty
    if tag == c'I' or tag == c'U' or tag == c'D':
        return restore(data, in_stream, None)
    if tag == c'B' or tag == c'C':
        return make_fixed(data, in_stream)
    return decode_rare(data, in_stream, _UTF8)


def restore(frame: bytes, in_stream: bool, plan: RelationPlan | None) -> AnyMessage:
    """The Begin, Commit, Insert, Update or Delete in a frame, whose relation's plan is known."""
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
    NOTHING  # what the state says holds
    BEGUN  # a transaction has begun since
    ENDED  # the transaction has ended since


cdef class Decoder:
    """Decodes the frames of one stream, in order, and knows what the earlier ones said.

    Parameters
    ----------
    policies : Policies
        What to do with values that Python cannot hold.
    encoding : str
        The session's client_encoding, by Python's or PostgreSQL's name.
    registry : TypeRegistry, optional
        Decoders of users' own types.

    Raises
    ------
    PgOutputError
        The encoding is unknown.
    """

    # The state is a Python object. What rows change in it is kept here, in C, until somebody asks:
    # the transaction's Begin, and how many rows have come since.
    cdef object _state
    cdef _Fixed _begin
    cdef Pending _pending
    cdef int64_t _rows
    cdef bint _in_stream
    # The relations in traffic: their plans, by the low bits of their OIDs.
    cdef uint32_t[CACHED] _cached_ids
    cdef list _cached_plans

    # A compiled class has none by itself; these are the same arguments.
    __signature__ = inspect.signature(make_settings).replace(
        return_annotation=inspect.Signature.empty
    )

    def __init__(self, policies: Policies | None = None, encoding: str = "utf-8",
                 registry: TypeRegistry | None = None):
        self._adopt(StreamState(make_settings(policies, encoding, registry)))

    @property
    def state(self):
        """What the decoder knows: relations, types, the open transaction."""
        self._sync()
        return self._state

    @property
    def relations(self):
        """The relations announced so far, by OID; not those of streams still in progress."""
        return MappingProxyType(self._state.relations)

    def reset(self) -> None:
        """Begin a new connection: open streams and what they announced are dropped."""
        self._state.reset()
        self._adopt(self._state)

    def decode(self, frame: Any) -> AnyMessage:
        """Decode the stream's next frame.

        Parameters
        ----------
        frame : bytes-like
            As of :func:`decode`.

        Raises
        ------
        DecodeError
            The frame is malformed, or cannot come here; the decoder is as it was before.
        TypeError
            `frame` is no contiguous buffer.
        """
        return self._decode(frame)

    def decode_many(self, frames: Iterable[Any]) -> Iterator[AnyMessage]:
        """Decode frames one after the other, as the result is iterated.

        Raises
        ------
        DecodeError
            As of :meth:`decode`, with `.frame`, the index in `frames`; the decoder is as it was
            before that frame.
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
        cdef const uint8_t *start = <const uint8_t *> PyBytes_AS_STRING(data)
        cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
        cdef uint8_t tag = start[0]  # the NUL behind its end, if it is empty
        cdef Py_ssize_t at
        cdef uint32_t relation_id, slot
        cdef _Plan plan
        cdef object found
        cdef _Row row = None
        message = decode_usual(self, data)
        if message is not None:
            return message
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
            # It can't come here, or has another length than these have.
            self._state.check_order(data)
            diagnose(data, False, None)
        self._sync()
        result = self._state.receive(data)
        # A relation may have changed, or a chunk begun or ended.
        if tag != c'T' and tag != c'M' and tag != c'O':
            self._adopt(self._state)
        return result

    # Take over a state, all of what it says.
    cdef int _adopt(self, object state) except -1:
        self._state = state
        self._begin = None
        self._pending = NOTHING
        self._rows = 0
        self._in_stream = state.open_xid is not None
        self._cached_plans = [None] * CACHED
        return 0

    # Bring the state up to date.
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


# The message in a usual frame: a row of a relation in traffic, Begin or Commit; None if it is
# something else.
cdef inline object decode_usual(Decoder decoder, bytes data):
    cdef const uint8_t *start = <const uint8_t *> PyBytes_AS_STRING(data)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
    cdef uint8_t tag = start[0]
    cdef Py_ssize_t at = ROW_RELATION_ID + xid_size(decoder._in_stream)
    cdef uint32_t relation_id, slot
    cdef _Plan plan
    cdef _Row row
    cdef _Fixed message
    if tag == c'I' or tag == c'U' or tag == c'D':
        if length < at + 4:
            return None
        relation_id = load_uint32(start + at)
        slot = relation_id & (CACHED - 1)
        plan = <_Plan> decoder._cached_plans[slot]
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
    cdef bint _is_exact  # no subclass, which may have a decode() of its own

    def __iter__(self):
        return self

    def __next__(self):
        if self._frames is None:
            raise StopIteration
        # As a generator, it ends with the first error: of the frames' iterator, or of a frame.
        frames, self._frames = self._frames, None
        frame = next(frames)
        message = None
        if self._is_exact and PyBytes_CheckExact(frame):
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
    """A decoder that goes on from `state`."""
    cdef Decoder decoder = Decoder.__new__(Decoder)
    decoder._adopt(state)
    return decoder


def wire_offsets() -> dict[tuple[str, str], int]:
    """Tag and field → its offset outside stream chunks, as the C code has it; ``end``: the length.

    For the tests, which compare it with the one table of messages.
    """
    cdef const WireField *field = wire_fields
    found = {}
    while field.name != NULL:
        found[chr(field.tag), field.name.decode()] = field.offset
        field += 1
    return found


def wire_limits() -> tuple[int, int]:
    """The longest frame and the most columns, as the C code has them."""
    return MAX_FRAME, MAX_COLUMNS
