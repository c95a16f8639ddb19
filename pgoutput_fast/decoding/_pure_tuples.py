"""Decode the tuples of rows, in plain Python: the twin of ``_tuples.pyx``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from ..errors import STATELESS_HINT, fail
from ..objects import UNCHANGED, Unchanged
from ..protocol.wire import RELATION_ID, RELATION_ID_IN_STREAM, VALUE_HEAD, offset_of
from .plan import RelationPlan, refuse_value
from .views import describe_tuple, restore_tuple

_new: Any = object.__new__

_K = 0x4B
_BINARY, _NULL, _TEXT, _UNCHANGED = b"bntu"
_MARKER = offset_of("I", "new")
_MARKER_IN_STREAM = offset_of("I", "new", in_stream=True)


class Row(Protocol):
    """The attributes of an Insert, Update or Delete that its tuples use."""

    tag: str
    _frame: bytes
    _in_stream: bool
    _plan: RelationPlan | None
    _old: list[int] | None

    @property
    def relation_id(self) -> int:
        """OID of the relation."""


def fail_stateless(row: Row) -> NoReturn:
    """Raise ``unknown_relation`` for a row that was decoded without a Decoder."""
    start = RELATION_ID_IN_STREAM if row._in_stream else RELATION_ID
    fail("unknown_relation", row._frame, start, relation_id=row.relation_id, hint=STATELESS_HINT)


def marker_of(row: Row) -> int:
    """Return the marker of a row's first tuple."""
    return row._frame[_MARKER_IN_STREAM if row._in_stream else _MARKER]


def make_tuple(row: Row, positions: Any) -> TupleData:
    """Return the tuple of a row whose columns begin at these positions."""
    data: TupleData = _new(TupleData)
    data._row = row
    data._positions = positions
    return data


class TupleData:
    """The columns of a row, as a sequence whose values are decoded when they are accessed.

    ``row[0]`` and ``row["name"]`` return the value of a column as a Python object, None for NULL,
    or UNCHANGED. They raise a DecodeError as :meth:`values` does, an IndexError for a position and
    a KeyError for a name that the row does not have. A tuple keeps its frame alive. As in any
    sequence, ``x in row`` searches the values; ``name in row.as_dict()`` searches the names.

    An old row of the kind "K" has values only in the columns of the replica identity. The server
    sends the other columns as NULL, whatever their value is: :meth:`as_dict` leaves them out.
    """

    __slots__ = ("_positions", "_row")
    _row: Row
    _positions: list[int]

    def __init__(self) -> None:
        raise TypeError("TupleData is made by decoding a frame")

    def __len__(self) -> int:
        return len(self._positions) - 1

    def kind(self, i: int) -> str:
        """Return the kind of column `i`: "n" NULL, "u" unchanged, "t" text or "b" binary.

        Raises
        ------
        IndexError
            The tuple has no column `i`.
        """
        return chr(self._row._frame[self._positions[self._index(i)]])

    def raw(self, i: int) -> bytes | Unchanged | None:
        """Return the bytes of column `i`, None for NULL, or UNCHANGED.

        Raises
        ------
        IndexError
            The tuple has no column `i`.
        """
        i = self._index(i)
        frame = self._row._frame
        start = self._positions[i]
        kind = frame[start]
        if kind == _NULL:
            return None
        if kind == _UNCHANGED:
            return UNCHANGED
        return frame[start + VALUE_HEAD : self._positions[i + 1]]

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
        return self._text(self._index(i))

    def raws(self) -> tuple[bytes | Unchanged | None, ...]:
        """Return all columns, each as :meth:`raw` returns it."""
        return tuple([self.raw(i) for i in range(len(self))])

    def texts(self) -> tuple[str | Unchanged | None, ...]:
        """Return all columns, each as :meth:`text` returns it.

        Raises
        ------
        DecodeError
            As :meth:`text` does.
        """
        frame, plan = self._row._frame, self._row._plan
        if plan is not None and plan.settings.encoding != "utf-8":
            return tuple([self._text(i) for i in range(len(self))])
        texts: list[str | Unchanged | None] = []
        append = texts.append
        start = self._positions[0]
        try:
            for end in self._positions[1:]:
                kind = frame[start]
                if kind == _TEXT:
                    append(frame[start + VALUE_HEAD : end].decode())
                elif kind == _NULL:
                    append(None)
                else:
                    append(self._text(len(texts)))
                start = end
        except UnicodeDecodeError as error:
            refuse_value(frame, start + VALUE_HEAD, len(texts), error, plan)
        return tuple(texts)

    def values(self) -> tuple[Any, ...]:
        """Return all columns as Python objects; None for NULL, or UNCHANGED.

        Raises
        ------
        DecodeError
            A value is malformed or refused by a policy, or ``unknown_relation``: the frame was
            decoded without a Decoder.
        """
        row = self._row
        plan = row._plan
        if plan is None:
            fail_stateless(row)
        frame, binary = row._frame, plan.binary
        values: list[Any] = []
        append = values.append
        start = self._positions[0]
        try:
            for end, from_text in zip(self._positions[1:], plan.text):
                kind = frame[start]
                if kind == _TEXT:
                    append(from_text(frame[start + VALUE_HEAD : end]))
                elif kind == _BINARY:
                    append(binary[len(values)](frame[start + VALUE_HEAD : end]))
                elif kind == _NULL:
                    append(None)
                else:
                    append(UNCHANGED)
                start = end
        except Exception as error:
            refuse_value(frame, start + VALUE_HEAD, len(values), error, plan)
        return tuple(values)

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
        plan = self._row._plan
        if plan is None:
            fail_stateless(self._row)
        is_key = self._is_key()
        if columns is None:
            if not is_key:
                return dict(zip(plan.names, self.values()))
            selected: Iterable[int] = range(plan.width)
        else:
            selected = [plan.positions[name] for name in columns]
        if is_key:
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
        return self.values().index(value, start, len(self) if stop is None else stop)

    def count(self, value: object) -> int:
        """Return the number of columns whose value equals `value`.

        Raises
        ------
        DecodeError
            As :meth:`values` does.
        """
        return self.values().count(value)

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return tuple([self[i] for i in range(*key.indices(len(self)))])
        plan = self._row._plan
        if isinstance(key, str):
            if plan is None:
                fail_stateless(self._row)
            i = plan.positions[key]
        else:
            i = self._index(key)
            if plan is None:
                fail_stateless(self._row)
        frame = self._row._frame
        start = self._positions[i]
        kind = frame[start]
        if kind == _NULL:
            return None
        if kind == _UNCHANGED:
            return UNCHANGED
        converters = plan.text if kind == _TEXT else plan.binary
        try:
            return converters[i](frame[start + VALUE_HEAD : self._positions[i + 1]])
        except Exception as error:
            refuse_value(frame, start + VALUE_HEAD, i, error, plan)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __reversed__(self) -> Iterator[Any]:
        return iter(self.values()[::-1])

    def __contains__(self, value: object) -> bool:
        return value in self.values()

    def __eq__(self, other: object) -> bool:
        if type(other) is not TupleData:
            return NotImplemented
        return self._is_key() == other._is_key() and self._wire() == other._wire()

    def __hash__(self) -> int:
        return hash((self._is_key(), self._wire()))

    def __reduce__(self) -> tuple[object, ...]:
        row = self._row
        which = "old" if self._is_old() else "new"
        return restore_tuple, (row._frame, row._in_stream, row._plan, which)

    def __copy__(self) -> TupleData:
        return self

    def __deepcopy__(self, memo: object) -> TupleData:
        return self

    def __repr__(self) -> str:
        return describe_tuple(self, self._row._plan, self._is_key())

    def _is_old(self) -> bool:
        return self._row.tag != "I" and self._positions is self._row._old

    def _is_key(self) -> bool:
        return self._is_old() and marker_of(self._row) == _K

    def _wire(self) -> bytes:
        """The bytes of all columns in the frame."""
        return self._row._frame[self._positions[0] : self._positions[-1]]

    def _index(self, key: object) -> int:
        try:
            i = operator.index(key)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(
                f"a column's position must be an int, not {type(key).__name__}; names and "
                "slices are for row[…] alone"
            ) from None
        width = len(self)
        if not -width <= i < width:
            raise IndexError(f"column {i} of a tuple of {width} columns")
        return i + width if i < 0 else i

    def _text(self, i: int) -> str | Unchanged | None:
        raw = self.raw(i)
        if not isinstance(raw, bytes):
            return raw
        frame, plan = self._row._frame, self._row._plan
        start = self._positions[i]
        try:
            if frame[start] == _TEXT:
                return raw.decode("utf-8" if plan is None else plan.settings.encoding)
            if plan is None:
                fail_stateless(self._row)
            text: str = plan.text_form[i](raw)
            return text
        except ValueError as error:
            refuse_value(frame, start + VALUE_HEAD, i, error, plan)


Sequence.register(TupleData)
