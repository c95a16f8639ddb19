"""Decode values that contain values: arrays, vectors, ranges, multiranges, composites.

Their texts are those that ``array_out``, ``record_out``, ``range_out`` and ``multirange_out``
write, and their binary forms those that the ``*_send`` functions beside them write. Other forms are
errors. A binary array has the OID of its elements' type, and a binary composite those of its
fields' types. They are compared with the catalogue, as the type may have been altered since it was
read.
"""

from __future__ import annotations

import functools
import re
import struct
import unicodedata
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NoReturn

from ..names import qualified
from ..objects import Array, Range
from ..policies import MOST_DIMENSIONS
from ..types import ColumnType, Converter
from .base import Codec, in_field, show_bytes

LOOK_UP = (
    "the type was altered between this value and the catalogue. If the catalogue is older, look "
    "the types up again with TypeRegistry.update_from(connection); if the value is older, give a "
    "registry that was read before the change"
)

_int32 = struct.Struct(">i").unpack_from
_uint32 = struct.Struct(">I").unpack_from
_array_header = struct.Struct(">iiI").unpack_from
_dimension = struct.Struct(">ii").unpack_from


def _refuse(raw: bytes, name: str) -> NoReturn:
    raise ValueError(f"{show_bytes(raw)} is no {name}")


def _part(raw: bytes, at: int, what: str) -> tuple[bytes | None, int]:
    """The value after its int32 length at byte `at` (None for length -1), and where it ends."""
    if len(raw) - at < 4:
        raise ValueError(f"binary value of {len(raw)} bytes: the length of {what} is cut off")
    length = _int32(raw, at)[0]
    at += 4
    if length == -1:
        return None, at
    if not 0 <= length <= len(raw) - at:
        raise ValueError(
            f"binary value of {len(raw)} bytes: {what} has the length {length}, "
            f"{len(raw) - at} bytes are left"
        )
    return raw[at : at + length], at + length


def _expect_end(raw: bytes, at: int, name: str) -> None:
    if at != len(raw):
        raise ValueError(f"a binary {name} with {len(raw) - at} bytes left over")


# --- arrays ---------------------------------------------------------------------------------------

_BOUNDS = re.compile(rb"((?:\[-?\d{1,10}:-?\d{1,10}\])+)=")
_PLAIN = re.compile(rb'[^\s"\\{}]*')
_BOUND = re.compile(rb"\[(-?\d+):(-?\d+)\]")
_ARRAY_QUOTED = re.compile(r"[\s\"\\{}]|\A(?:null)?\Z", re.ASCII | re.IGNORECASE)


def array(type: ColumnType, element: Codec) -> Codec:
    """Return the functions for arrays of any number of dimensions, with any lower bounds."""
    binary = _BinaryArrays(type, element)
    return Codec(_ArrayTexts(type, element).read, binary.read, binary.form)


class _ArrayTexts:
    """Reads the texts of arrays of one type."""

    def __init__(self, type: ColumnType, element: Codec) -> None:
        self._delimiter = type.delimiter.encode()
        delimiter = re.escape(self._delimiter)
        # A brace, a delimiter, a quoted element or an element without quotes.
        self._token = re.compile(
            rb'\{|\}|%s|"([^"\\]*(?:\\["\\][^"\\]*)*)"|([^\s"\\{}%s]+)' % (delimiter, delimiter)
        ).match
        self._element = element.text

    def read(self, raw: bytes) -> Any:
        """The list that a text stands for."""
        inner = raw[1:-1]
        if raw[:1] == b"{" and raw[-1:] == b"}":
            if not inner and len(raw) == 2:
                return []
            # Most arrays have one dimension, no quotes and no NULL.
            if _PLAIN.fullmatch(inner) is not None and b"NULL" not in inner.upper():
                parts = inner.split(self._delimiter)
                if b"" in parts:
                    _refuse(raw, "array")
                return [self._element(part) for part in parts]
            return self._nested(raw, 0)[0]
        match = _BOUNDS.match(raw)
        if match is None:
            _refuse(raw, "array")
        bounds = [(int(lower), int(upper)) for lower, upper in _BOUND.findall(match[1])]
        values, lengths = self._nested(raw, match.end())
        if [upper - lower + 1 for lower, upper in bounds] != lengths:
            raise ValueError(f"{show_bytes(raw)} is no array: its bounds are not its lengths")
        return bounded(values, tuple([lower for lower, _ in bounds]))

    def _nested(self, raw: bytes, at: int) -> tuple[list[Any], list[int]]:
        """The array that begins at a brace, and its length in each dimension."""
        open_lists: list[list[Any]] = []
        lengths: list[int] = []  # by dimension; -1 until the first list of the dimension is closed
        leaves = 0  # how many braces are open around elements; 0 until the first element
        expected = True  # whether an element or brace must follow, and no delimiter
        while True:
            match = self._token(raw, at)
            if match is None:
                _refuse(raw, "array")
            at = match.end()
            kind = match.lastindex
            if kind is not None:
                leaves = leaves or len(open_lists)
                if not expected or not open_lists or leaves != len(open_lists):
                    _refuse(raw, "array")
                word: bytes = match[kind]
                if kind == 1:
                    if b"\\" in word:
                        # Each quote in the word has a backslash right before it that escapes it.
                        word = word.replace(b'\\"', b'"').replace(b"\\\\", b"\\")
                    value = self._element(word)
                elif word == b"NULL":
                    value = None
                elif word.upper() == b"NULL":
                    _refuse(raw, "array")
                else:
                    value = self._element(word)
                open_lists[-1].append(value)
                expected = False
                continue
            symbol = match[0]
            if symbol == b"{":
                depth = len(open_lists)
                if not expected or depth == MOST_DIMENSIONS or (leaves and depth >= leaves):
                    _refuse(raw, "array")
                open_lists.append([])
                if depth == len(lengths):
                    lengths.append(-1)
            elif symbol == b"}":
                if expected or not open_lists:
                    _refuse(raw, "array")
                closed = open_lists.pop()
                depth = len(open_lists)
                if lengths[depth] not in (-1, len(closed)):
                    _refuse(raw, "array")
                lengths[depth] = len(closed)
                if not depth:
                    if at != len(raw):
                        _refuse(raw, "array")
                    return closed, lengths
                open_lists[-1].append(closed)
            else:
                if expected:
                    _refuse(raw, "array")
                expected = True


class _BinaryArrays:
    """Reads the binary values of arrays of one type."""

    def __init__(self, type: ColumnType, element: Codec) -> None:
        self._delimiter = type.delimiter
        self._must_quote = re.compile(
            rf"{_ARRAY_QUOTED.pattern}|{re.escape(type.delimiter)}", re.ASCII | re.IGNORECASE
        ).search
        self._element_oid = type.element.oid if type.element is not None else 0
        self._from_binary = element.binary
        self._form_of = element.text_form

    def _read(self, raw: bytes, convert: Converter) -> tuple[list[Any], list[int], list[int]]:
        """The elements of a binary array in their order, its lengths and its lower bounds.

        Binary format: int32 number of dimensions, int32 flags, uint32 OID of the elements' type;
        for each dimension int32 length and int32 lower bound; for each element int32 length (-1 for
        NULL) and bytes.
        """
        if len(raw) < 12:
            raise ValueError(f"a binary array has at least 12 bytes, found {len(raw)}")
        dimensions, flags, oid = _array_header(raw)
        if not 0 <= dimensions <= MOST_DIMENSIONS or flags not in (0, 1):
            raise ValueError(f"a binary array with {dimensions} dimensions and flags {flags}")
        at = 12 + 8 * dimensions
        if len(raw) < at:
            raise ValueError(f"a binary array of {dimensions} dimensions in {len(raw)} bytes")
        if oid != self._element_oid != 0:
            raise ValueError(
                f"the elements of the binary array are of the type with OID {oid}, expected "
                f"{self._element_oid}; {LOOK_UP}"
            )
        lengths, lowers = [], []
        count = 1 if dimensions else 0
        for dimension in range(dimensions):
            length, lower = _dimension(raw, 12 + 8 * dimension)
            count *= length
            if length < 0 or count > (len(raw) - at) // 4:
                raise ValueError(
                    f"a binary array that has {count} elements, at most {(len(raw) - at) // 4} fit "
                    f"into its {len(raw)} bytes"
                )
            lengths.append(length)
            lowers.append(lower)
        values: list[Any] = []
        for _ in range(count):
            part, at = _part(raw, at, "an element")
            values.append(None if part is None else convert(part))
        _expect_end(raw, at, "array")
        return values, lengths, lowers

    def read(self, raw: bytes) -> Any:
        """The list that a binary value stands for."""
        values, lengths, lowers = self._read(raw, self._from_binary)
        if not values:
            return []
        for length in lengths[:0:-1]:
            values = [values[i : i + length] for i in range(0, len(values), length)]
        return bounded(values, tuple(lowers))

    def _quoted(self, raw: bytes) -> str:
        shown: str = self._form_of(raw)
        if self._must_quote(shown) is None:
            return shown
        escaped = shown.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    def form(self, raw: bytes) -> str:
        """The text that the server would print for a binary value."""
        values, lengths, lowers = self._read(raw, self._quoted)
        if not values:
            return "{}"
        words = ["NULL" if value is None else value for value in values]
        for length in lengths[::-1]:
            words = [
                "{" + self._delimiter.join(words[i : i + length]) + "}"
                for i in range(0, len(words), length)
            ]
        prefix = ""
        if any(lower != 1 for lower in lowers):
            spans = zip(lowers, lengths, strict=True)
            prefix = "".join([f"[{low}:{low + length - 1}]" for low, length in spans]) + "="
        return prefix + words[0]


def bounded(values: list[Any], lowers: tuple[int, ...]) -> list[Any]:
    """Return `values`, as an :class:`Array` if a dimension is not counted from 1."""
    return values if all(lower == 1 for lower in lowers) else Array(values, lowers)


def vector(type: ColumnType, element: Codec) -> Codec:
    """Return the functions for int2vector and oidvector: arrays whose first index is 0."""
    arrays = array(type, element)
    from_text = element.text

    def text(raw: bytes) -> list[Any]:
        return [from_text(part) for part in raw.split(b" ")] if raw else []

    def binary(raw: bytes) -> list[Any]:
        values = arrays.binary(raw)
        if values and (not isinstance(values, Array) or values.lower_bounds != (0,)):
            raise ValueError(f"a binary {type.name} is an array of one dimension that begins at 0")
        return list(values)

    return Codec(text, binary, lambda raw: " ".join(map(str, binary(raw))))


# --- ranges ---------------------------------------------------------------------------------------

_EMPTY, _LOWER_INC, _UPPER_INC, _LOWER_INF, _UPPER_INF = 1, 2, 4, 8, 16
_END = rb'(?:"([^"\\]*(?:(?:\\\\|"")[^"\\]*)*)"|([^\s"\\()\[\],]+)|)'
_RANGE = re.compile(rb"([\[(])" + _END + rb"," + _END + rb"([\])])")
_RANGE_QUOTED = re.compile(r"[\s\"\\()\[\],]|\A\Z", re.ASCII).search
_FIELD = re.compile(rb'(?:"([^"\\]*(?:(?:\\\\|"")[^"\\]*)*)"|([^\s"\\(),]+)|)([,)])')
_RECORD_QUOTED = re.compile(r"[\s\"\\(),]|\A\Z", re.ASCII).search


def _word(quoted: bytes | None, plain: bytes | None) -> bytes | None:
    """A bound of a range or a field of a composite, without quotes; None if it is missing."""
    if quoted is None:
        return plain
    return quoted.replace(b'""', b'"').replace(b"\\\\", b"\\")


def _quote(shown: str, must_quote: Callable[[str], object]) -> str:
    if must_quote(shown) is None:
        return shown
    escaped = shown.replace("\\", "\\\\").replace('"', '""')
    return f'"{escaped}"'


def _range_value(
    lower: Any, upper: Any, bounds: str, has_lower: bool, has_upper: bool
) -> Range[Any] | None:
    """The range; None if a policy made None of a bound, as None would mean a missing bound."""
    if (has_lower and lower is None) or (has_upper and upper is None):
        return None
    return Range(lower, upper, bounds)


def _range_of_match(match: re.Match[bytes], convert: Converter) -> Range[Any] | None:
    opening, *words, closing = match.groups()
    lower, upper = _word(*words[:2]), _word(*words[2:])
    if (lower is None and opening == b"[") or (upper is None and closing == b"]"):
        _refuse(match[0], "range: a missing bound cannot be inclusive")
    return _range_value(
        None if lower is None else convert(lower),
        None if upper is None else convert(upper),
        (opening + closing).decode(),
        lower is not None,
        upper is not None,
    )


def _read_range(raw: bytes) -> tuple[int, bytes | None, bytes | None]:
    """Flags and bounds of a binary range.

    Binary format: uint8 flags, then for each bound that is not missing int32 length and bytes.
    """
    if not raw:
        raise ValueError("a binary range has at least 1 byte, found 0")
    flags = raw[0]
    if (
        flags > 31
        or (flags & _EMPTY and flags != _EMPTY)
        or flags & (_LOWER_INC | _LOWER_INF) == _LOWER_INC | _LOWER_INF
        or flags & (_UPPER_INC | _UPPER_INF) == _UPPER_INC | _UPPER_INF
    ):
        raise ValueError(f"a binary range with the flags 0x{flags:02X}")
    at = 1
    lower = upper = None
    if not flags & (_EMPTY | _LOWER_INF):
        lower, at = _part(raw, at, "the lower end")
    if not flags & (_EMPTY | _UPPER_INF):
        upper, at = _part(raw, at, "the upper end")
    _expect_end(raw, at, "range")
    if not flags & _EMPTY and (
        (lower is None) != bool(flags & _LOWER_INF) or (upper is None) != bool(flags & _UPPER_INF)
    ):
        raise ValueError("a binary range with an end that is NULL")
    return flags, lower, upper


def range_(element: Codec) -> Codec:
    """Return the functions for ranges of any subtype."""

    def text(raw: bytes) -> Any:
        if raw == b"empty":
            return Range(empty=True)
        match = _RANGE.fullmatch(raw)
        if match is None:
            _refuse(raw, "range")
        return _range_of_match(match, element.text)

    def binary(raw: bytes) -> Any:
        flags, lower, upper = _read_range(raw)
        if flags & _EMPTY:
            return Range(empty=True)
        return _range_value(
            None if lower is None else element.binary(lower),
            None if upper is None else element.binary(upper),
            ("[" if flags & _LOWER_INC else "(") + ("]" if flags & _UPPER_INC else ")"),
            lower is not None,
            upper is not None,
        )

    def form(raw: bytes) -> str:
        flags, lower, upper = _read_range(raw)
        if flags & _EMPTY:
            return "empty"
        ends = ",".join(
            [
                "" if end is None else _quote(element.text_form(end), _RANGE_QUOTED)
                for end in (lower, upper)
            ]
        )
        return ("[" if flags & _LOWER_INC else "(") + ends + ("]" if flags & _UPPER_INC else ")")

    return Codec(text, binary, form)


def multirange(element: Codec) -> Codec:
    """Return the functions for multiranges: lists of ranges, which `element` decodes.

    Binary format: uint32 number of ranges, then for each int32 length and bytes.
    """
    subtype_text = element.text

    def text(raw: bytes) -> list[Any]:
        if raw == b"{}":
            return []
        values = []
        at = 1
        if raw[:1] == b"{":
            while match := _RANGE.match(raw, at):
                values.append(subtype_text(match[0]))
                at = match.end() + 1
                if raw[at - 1 : at] != b",":
                    break
            else:
                at = 0
            if at == len(raw) and raw[-1:] == b"}":
                return values
        _refuse(raw, "multirange")

    def read(raw: bytes, convert: Converter) -> list[Any]:
        if len(raw) < 4:
            raise ValueError(f"a binary multirange has at least 4 bytes, found {len(raw)}")
        count = _uint32(raw)[0]
        if count > (len(raw) - 4) // 5:
            raise ValueError(
                f"a binary multirange of {count} ranges, at most {(len(raw) - 4) // 5} fit into "
                f"its {len(raw)} bytes"
            )
        at = 4
        values = []
        for _ in range(count):
            part, at = _part(raw, at, "a range")
            if part is None or part[:1] == b"\1":
                raise ValueError("a binary multirange with a range that is NULL or empty")
            values.append(convert(part))
        _expect_end(raw, at, "multirange")
        return values

    return Codec(
        text,
        lambda raw: read(raw, element.binary),
        lambda raw: "{" + ",".join(read(raw, element.text_form)) + "}",
    )


# --- composites -----------------------------------------------------------------------------------


def identifier(name: str) -> str:
    """Make a Python identifier of a name, as psycopg does: invalid characters become ``_``."""
    name = unicodedata.normalize("NFKC", name)  # which Python does itself, to all identifiers
    if not name.isidentifier():
        if name[:1].isdigit():
            name = f"f{name}"
        if not name.isidentifier():
            name = re.sub(r"[^a-zA-Z0-9_]", "_", name) or "_"
    return f"f{name}" if name[0] == "_" else name


@functools.lru_cache(maxsize=4096)
def composite_class(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """Return the class of a composite's values: a named tuple, which every process makes itself.

    A field whose name is a Python keyword or comes twice is named by its position: ``_1``.
    """
    base = namedtuple(identifier(name), map(identifier, fields), rename=True)  # type: ignore[misc]  # noqa: PYI024

    def reduce(self: tuple[Any, ...]) -> tuple[object, ...]:
        return restore_composite, (name, fields, tuple(self))

    base.__reduce__ = reduce  # type: ignore[method-assign,assignment]
    base.__module__ = __name__
    return base


def restore_composite(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Return the value of a composite that was pickled."""
    return tuple.__new__(composite_class(name, fields), values)


def composite(type: ColumnType, fields: list[Codec]) -> Codec:
    """Return the functions for composites, whose fields are decoded by `fields`.

    Binary format: int32 number of fields; for each uint32 OID of its type, int32 length (-1 for
    NULL) and bytes.
    """
    shown = qualified(type)
    oids = [field.oid for _, field in type.fields]
    names = [name for name, _ in type.fields]
    width = len(fields)
    texts = [field.text for field in fields]
    binaries = [field.binary for field in fields]
    forms = [field.text_form for field in fields]
    # tuple.__new__ takes a list; the constructor of the class takes each field as an argument.
    make = functools.partial(tuple.__new__, composite_class(type.name, tuple(names)))

    def wrong_width(found: int) -> ValueError:
        return ValueError(
            f"the composite has {found} fields, {shown} had {width} when it was looked up; "
            f"{LOOK_UP}"
        )

    def text(raw: bytes) -> Any:
        words: list[bytes | None] = []
        at = 1
        if raw == b"()" and not width:
            return make(())
        if raw[:1] == b"(":
            while match := _FIELD.match(raw, at):
                quoted, plain, after = match.groups()
                words.append(_word(quoted, plain))
                at = match.end()
                if after == b")":
                    break
        if at != len(raw) or raw[-1:] != b")":
            _refuse(raw, f"composite {shown}")
        if len(words) != width:
            raise wrong_width(len(words))
        values: list[Any] = []
        for name, word, convert in zip(names, words, texts, strict=True):
            try:
                values.append(None if word is None else convert(word))
            except Exception as error:
                in_field(error, name)
                raise
        return make(values)

    def read(raw: bytes, converters: list[Converter]) -> list[Any]:
        if len(raw) < 4:
            raise ValueError(f"a binary composite has at least 4 bytes, found {len(raw)}")
        count = _int32(raw)[0]
        if count != width:
            raise wrong_width(count)
        at = 4
        values = []
        for position in range(width):
            if len(raw) - at < 4:
                raise ValueError(f"a binary composite of {len(raw)} bytes is cut off")
            oid = _uint32(raw, at)[0]
            if oid != oids[position] and oids[position]:
                raise ValueError(
                    f"field {names[position]!r} of {shown} is of the type with OID {oid}, it was "
                    f"{oids[position]} when it was looked up; {LOOK_UP}"
                )
            part, at = _part(raw, at + 4, "a field")
            try:
                values.append(None if part is None else converters[position](part))
            except Exception as error:
                in_field(error, names[position])
                raise
        _expect_end(raw, at, "composite")
        return values

    def form(raw: bytes) -> str:
        words = read(raw, forms)
        return f"({','.join(['' if w is None else _quote(w, _RECORD_QUOTED) for w in words])})"

    return Codec(text, lambda raw: make(read(raw, binaries)), form)
