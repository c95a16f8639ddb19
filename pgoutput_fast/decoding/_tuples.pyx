# cython: annotation_typing=False
"""Decode the tuples of rows, compiled: the twin of ``_pure_tuples.py``.

A value is decoded when it is accessed. Access to a single column first stores the offsets of all
columns (slices). Methods that return all columns do not: they are faster without slices (measured).
"""

from __future__ import annotations

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_Decode
from libc.stdint cimport uint8_t, uint32_t

from pgoutput_fast._public cimport name_type
from pgoutput_fast.values._values cimport BEFORE, from_binary, from_text, utf8_text
from pgoutput_fast._loads cimport load_uint16, load_uint32
from pgoutput_fast.protocol._wire cimport (
    KIND_BINARY, KIND_NULL, KIND_TEXT, KIND_UNCHANGED, ROW_COLUMNS, ROW_MARKER, ROW_RELATION_ID,
    VALUE_HEAD, ColumnSlice, take_column,
)

import operator
from collections.abc import Sequence

from ..errors import STATELESS_HINT, fail
from ..objects import UNCHANGED
from .plan import refuse_value
from .views import describe_tuple, restore_tuple

if BEFORE != ROW_COLUMNS + VALUE_HEAD:
    raise ImportError("values do not lie in frames where this extension expects them; rebuild it")

cdef object _UNCHANGED = UNCHANGED


@cython.final
cdef class Plan:
    """The compiled form of a RelationPlan, cached in `RelationPlan.compiled`."""


cdef Plan compiled(object plan):
    """Return the compiled form of a RelationPlan. Make it at the first call."""
    cdef Plan made = plan.compiled
    if made is None:
        made = Plan.__new__(Plan)
        made.plan = plan
        made.width = plan.width
        made.utf8 = plan.settings.encoding == "utf-8"
        plan.compiled = made
    return made


cdef object plan_of(Plan plan):
    return None if plan is None else plan.plan


# Find the functions of a relation's columns at the first call.
@cython.critical_section
cdef inline int resolve(Plan plan) except -1:
    if plan.codes is None:
        find_functions(plan)
    return 0


cdef int find_functions(Plan plan) except -1:
    text, binary, codes = plan.plan.text, plan.plan.binary, plan.plan.codes
    # Keep what another thread has found meanwhile: it may decode a row with it.
    if plan.codes is None:
        plan.text, plan.binary, plan.codes = text, binary, codes
    return 0


cdef object fail_stateless(bytes frame, bint in_stream):
    cdef Py_ssize_t start = ROW_RELATION_ID + xid_size(in_stream)
    relation_id = load_uint32(data_of(frame) + start)
    fail("unknown_relation", frame, start, relation_id=relation_id, hint=STATELESS_HINT)


# Make the TupleData of the tuple whose number of columns stands at byte `start` of the frame.
cdef TupleData make_tuple(bytes frame, bint in_stream, Plan plan, uint32_t start, bint is_old):
    cdef TupleData data = TupleData.__new__(TupleData)
    data._width = load_uint16(data_of(frame) + start)
    data._start = start + 2
    data._frame = frame
    data._in_stream = in_stream
    data._plan = plan
    data._is_old = is_old
    return data


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.collection_type("sequence")
cdef class TupleData:
    """The columns of a row, as a sequence whose values are decoded when they are accessed.

    ``row[0]`` and ``row["name"]`` return the value of a column as a Python object, None for NULL,
    or UNCHANGED. They raise a DecodeError as :meth:`values` does, an IndexError for a position and
    a KeyError for a name that the row does not have. A tuple keeps its frame alive. As in any
    sequence, ``x in row`` searches the values; ``name in row.as_dict()`` searches the names.

    An old row of the kind "K" has values only in the columns of the replica identity. The server
    sends the other columns as NULL, whatever their value is: :meth:`as_dict` leaves them out.
    """

    def __init__(self):
        raise TypeError("TupleData is made by decoding a frame")

    def __len__(self):
        return self._width

    def kind(self, i: int) -> str:
        """Return the kind of column `i`: "n" NULL, "u" unchanged, "t" text or "b" binary.

        Raises
        ------
        IndexError
            The tuple has no column `i`.
        """
        return "nutb"[self._column(self._index(i)).length_and_kind & 3]

    def raw(self, i: int) -> bytes | Unchanged | None:
        """Return the bytes of column `i`, None for NULL, or UNCHANGED.

        Raises
        ------
        IndexError
            The tuple has no column `i`.
        """
        return self._raw(self._column(self._index(i)))

    def text(self, i: int) -> str | Unchanged | None:
        """Return column `i` as the text that the server prints, None for NULL, or UNCHANGED.

        Raises
        ------
        DecodeError
            ``bad_encoding``: the value is not text in the decoder's encoding. A value in binary
            format can also raise ``bad_value`` (the value is malformed), ``no_text_form`` (no
            text form of its type is known) and ``unknown_relation`` (the frame was decoded
            without a Decoder).
        IndexError
            The tuple has no column `i`.
        """
        cdef Py_ssize_t at = self._index(i)
        cdef ColumnSlice column = self._column(at)
        try:
            return self._text(at, column)
        except ValueError as error:
            refuse_value(self._frame, column.offset, at, error, plan_of(self._plan))

    def raws(self) -> tuple[bytes | Unchanged | None, ...]:
        """Return all columns, each as :meth:`raw` returns it."""
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

    # texts() and values() are plain C methods, without Cython's binding: a call is 13 ns faster
    # (measured).
    @cython.binding(False)
    @cython.embedsignature(True)
    @cython.embedsignature.format("clinic")
    def texts(self) -> tuple[str | Unchanged | None, ...]:
        """Return all columns, each as :meth:`text` returns it.

        Raises
        ------
        DecodeError
            As :meth:`text` does.
        """
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
        """Return all columns as Python objects; None for NULL, or UNCHANGED.

        Raises
        ------
        DecodeError
            A value is malformed or refused by a policy, or ``unknown_relation``: the frame was
            decoded without a Decoder.
        """
        return values_of(self)

    def as_dict(self, columns: Iterable[str] | None = None) -> dict[str, Any]:
        """Return a dict from column name to value, of all columns or of those in `columns`.

        In an old row of the kind "K", columns whose value the server did not send are left out.

        Raises
        ------
        DecodeError
            As :meth:`values` does.
        KeyError
            The relation has no column of that name.
        """
        if self._plan is None:
            fail_stateless(self._frame, self._in_stream)
        plan = self._plan.plan
        if columns is None:
            if not self._is_key():
                return dict(zip(plan.names, values_of(self), strict=True))
            selected = range(plan.width)
        else:
            selected = [plan.positions[name] for name in columns]
        if self._is_key():
            selected = [i for i in selected if plan.is_key[i] or self.kind(i) != "n"]
        return {plan.names[i]: self[i] for i in selected}

    def index(self, value: object, start: int = 0, stop: int | None = None) -> int:
        """Return the position of the first column whose value equals `value`.

        Raises
        ------
        DecodeError
            As :meth:`values` does.
        ValueError
            No column equals `value`.
        """
        return values_of(self).index(value, start, len(self) if stop is None else stop)

    def count(self, value: object) -> int:
        """Return the number of columns whose value equals `value`.

        Raises
        ------
        DecodeError
            As :meth:`values` does.
        """
        return values_of(self).count(value)

    def __getitem__(self, key):
        cdef ColumnSlice column
        cdef Py_ssize_t i
        cdef Plan plan = self._plan
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
        return iter(values_of(self))

    def __reversed__(self):
        return iter(values_of(self)[::-1])

    def __contains__(self, value):
        return value in values_of(self)

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
        return describe_tuple(self, plan_of(self._plan), self._is_key())

    cdef object _is_key(self):
        return bool(
            self._is_old
            and data_of(self._frame)[ROW_MARKER + xid_size(self._in_stream)] == c'K'
        )

    # The bytes of all columns in the frame.
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

    @cython.critical_section
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


# Return all values of a tuple: TupleData.values().
cdef tuple values_of(TupleData data):
    cdef const uint8_t *frame = data_of(data._frame)
    cdef Py_ssize_t position = data._start
    cdef ColumnSlice column
    cdef Py_ssize_t i = 0
    cdef object value
    cdef Plan plan = data._plan
    if plan is None:
        fail_stateless(data._frame, data._in_stream)
    resolve(plan)
    cdef const uint8_t *codes = <const uint8_t *> PyBytes_AS_STRING(plan.codes)
    cdef tuple text = plan.text
    cdef tuple binary = plan.binary
    cdef tuple values = PyTuple_New(data._width)
    column.offset = 0
    try:
        for i in range(data._width):
            position = take_column(frame, position, &column)
            value = value_of(
                frame, column, codes[i], PyTuple_GET_ITEM(text, i), PyTuple_GET_ITEM(binary, i)
            )
            Py_INCREF(value)
            PyTuple_SET_ITEM(values, i, value)
    except Exception as error:
        refuse_value(data._frame, column.offset, i, error, plan.plan)
    return values


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


# help() shows the package from which users import the class.
name_type(TupleData, b"pgoutput_fast.TupleData")
