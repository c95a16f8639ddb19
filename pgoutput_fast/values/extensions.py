"""Decode types of extensions: hstore, cube, the three of pgvector, and PostGIS."""

from __future__ import annotations

import re
import struct
from math import isfinite

from ..objects import SparseVector
from .base import Codec, CodecOf, show_bytes
from .numbers import float4_text, float8_text

_ESCAPED = r'"([^"\\]*(?:\\["\\][^"\\]*)*)"'
_HSTORE_PAIR = re.compile(rf'{_ESCAPED}=>(?:{_ESCAPED}|NULL)(?:, (?=")|\Z)').match
_ESCAPE = re.compile(r"\\(.)")

_int32 = struct.Struct(">i").unpack_from


# hstore_send counts the bytes of its texts before pq_sendtext converts them to client_encoding.
_HSTORE_LENGTHS = (
    "its lengths are those of text in the database's encoding, so that the session's "
    "client_encoding must be the same, or the format text"
)


def _hstore(encoding: str) -> Codec:
    def text(raw: bytes) -> dict[str, str | None]:
        shown = raw.decode(encoding)
        value: dict[str, str | None] = {}
        escapes = "\\" in shown
        end = pairs = 0
        while (match := _HSTORE_PAIR(shown, end)) is not None:
            key, item = match.groups()
            if escapes:
                key = _ESCAPE.sub(r"\1", key)
                item = item and _ESCAPE.sub(r"\1", item)
            value[key] = item
            pairs += 1
            end = match.end()
            if end == len(shown):
                break
        if end != len(shown):
            raise ValueError(f"{show_bytes(raw)} is no hstore")
        if pairs != len(value):
            raise ValueError(f"{show_bytes(raw)} is no hstore: a key is there twice")
        return value

    def binary(raw: bytes) -> dict[str, str | None]:
        try:
            return pairs_of(raw)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise ValueError(f"{error}; {_HSTORE_LENGTHS}") from None

    def pairs_of(raw: bytes) -> dict[str, str | None]:
        """The pairs of a binary hstore.

        Binary format: int32 number of pairs; for each, int32 length and bytes of the key, and int32
        length and bytes of the value, where the length -1 means NULL.
        """
        value: dict[str, str | None] = {}
        try:
            count: int = _int32(raw, 0)[0]
            # Each pair takes at least eight bytes.
            if not 0 <= count <= len(raw) // 8:
                raise ValueError(f"a binary hstore of {count} pairs in {len(raw)} bytes")
            offset = 4
            for _ in range(count):
                size = _int32(raw, offset)[0]
                item_at = offset + 4 + size
                item_size = _int32(raw, item_at)[0] if size >= 0 else -2
                if item_size < -1:
                    raise ValueError(f"a binary hstore with a length of {min(size, item_size)}")
                end = item_at + 4 + max(item_size, 0)
                if end > len(raw):
                    raise struct.error
                key = raw[offset + 4 : item_at].decode(encoding)
                value[key] = None if item_size < 0 else raw[item_at + 4 : end].decode(encoding)
                offset = end
        except struct.error:
            raise ValueError(f"a binary hstore that ends too early: {show_bytes(raw)}") from None
        if offset != len(raw):
            raise ValueError(f"a binary hstore with {len(raw) - offset} bytes after its end")
        if len(value) != count:
            raise ValueError(f"{show_bytes(raw)} is no hstore: a key is there twice")
        return value

    def form(raw: bytes) -> str:
        return ", ".join(
            [
                f"{_hstore_text(key)}=>{'NULL' if item is None else _hstore_text(item)}"
                for key, item in binary(raw).items()
            ]
        )

    return Codec(text, binary, form)


def _hstore_text(part: str) -> str:
    if "\\" in part or '"' in part:
        part = part.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{part}"'


_FLOAT = r"(?:-?(?:\d+(?:\.\d+)?(?:e[+-]\d+)?|Infinity)|NaN)"
_CORNER = rf"\((?:{_FLOAT}(?:, {_FLOAT})*)?\)"
_CUBE = rf"{_CORNER}(?:,{_CORNER})?".encode()
_CUBE_DIMENSIONS = 100  # CUBE_MAX_DIM
_POINT_FLAG = 0x80000000


def _cube_text(raw: bytes) -> str:
    if re.fullmatch(_CUBE, raw) is None:
        raise ValueError(f"{show_bytes(raw)} is no cube")
    return raw.decode()


def _cube_form(raw: bytes) -> str:
    """The server's text of a binary cube.

    Binary format: uint32 number of dimensions, whose highest bit is set for a point; then a float8
    for each dimension of the first corner and, unless it is a point, of the second corner.
    """
    header = int.from_bytes(raw[:4], "big")
    dimensions = header & ~_POINT_FLAG
    count = dimensions if header & _POINT_FLAG else 2 * dimensions
    if dimensions > _CUBE_DIMENSIONS or len(raw) != 4 + 8 * count:
        raise ValueError(f"a binary cube of {dimensions} dimensions in {len(raw)} bytes")
    numbers = struct.unpack_from(f">{count}d", raw, 4)
    lower, upper = numbers[:dimensions], numbers[dimensions:]
    shown = f"({', '.join(map(float8_text, lower))})"
    # Two equal corners are printed as one. NaN equals nothing, so corners with NaN are not equal.
    if not upper or all(low == high for low, high in zip(lower, upper, strict=True)):
        return shown
    return f"{shown},({', '.join(map(float8_text, upper))})"


# The most dimensions of pgvector's vector and halfvec, and the most elements of a sparsevec.
_VECTOR_DIMENSIONS = 16_000
_SPARSE_DIMENSIONS = 1_000_000_000
_NUMBERS = re.compile(rb"[0-9.e+,-]+").fullmatch


def _floats(numbers: list[bytes], letter: str, raw: bytes, name: str) -> tuple[float, ...]:
    """Numbers rounded to the float type of `letter` (in struct), as they are in binary format."""
    form = f">{len(numbers)}{letter}"
    try:
        values: tuple[float, ...] = struct.unpack(form, struct.pack(form, *map(float, numbers)))
    except (ValueError, OverflowError, struct.error):
        raise ValueError(f"{show_bytes(raw)} is no {name}") from None
    return values


def _dense(name: str, letter: str) -> Codec:
    """The type vector or halfvec: a list of float.

    Binary format: int16 number of dimensions, int16 unused, then the floats.
    """
    size = struct.calcsize(letter)

    def text(raw: bytes) -> list[float]:
        if raw[:1] != b"[" or raw[-1:] != b"]" or _NUMBERS(raw, 1, len(raw) - 1) is None:
            raise ValueError(f"{show_bytes(raw)} is no {name}")
        numbers = raw[1:-1].split(b",")
        if len(numbers) > _VECTOR_DIMENSIONS:
            raise ValueError(f"a {name} of {len(numbers)} dimensions")
        return list(_floats(numbers, letter, raw, name))

    def binary(raw: bytes) -> list[float]:
        count = int.from_bytes(raw[:2], "big")
        if (
            not 0 < count <= _VECTOR_DIMENSIONS
            or len(raw) != 4 + size * count
            or raw[2:4] != b"\0\0"
        ):
            raise ValueError(f"a binary {name} of {count} dimensions in {len(raw)} bytes")
        values = list(struct.unpack_from(f">{count}{letter}", raw, 4))
        if not all(map(isfinite, values)):
            raise ValueError(f"a binary {name} with NaN or an infinite element")
        return values

    def form(raw: bytes) -> str:
        return f"[{','.join(map(float4_text, binary(raw)))}]"

    return Codec(text, binary, form)


_SPARSE = rb"\{((?:\d+:[0-9.e+-]+(?:,\d+:[0-9.e+-]+)*)?)\}/(\d{1,10})"


def _sparse(dim: int, indices: tuple[int, ...], values: tuple[float, ...]) -> SparseVector:
    """Make a SparseVector from indices counted from 0, with the checks that pgvector makes."""
    previous = -1
    for index in indices:
        if index <= previous:
            raise ValueError(f"a sparsevec with index {index} after {previous}")
        previous = index
    if not 0 < dim <= _SPARSE_DIMENSIONS or previous >= dim or len(indices) > _VECTOR_DIMENSIONS:
        raise ValueError(f"a sparsevec of {dim} dimensions whose last index is {previous}")
    if not all(values) or not all(map(isfinite, values)):
        raise ValueError("a sparsevec with an element that is 0, NaN or infinite")
    return SparseVector(dim, indices, values)


def _sparse_text(raw: bytes) -> SparseVector:
    """A sparsevec in text format, which counts indices from 1; binary format counts from 0."""
    match = re.fullmatch(_SPARSE, raw)
    if match is None:
        raise ValueError(f"{show_bytes(raw)} is no sparsevec")
    pairs = [pair.split(b":") for pair in match[1].split(b",")] if match[1] else []
    if any(len(index) > 10 for index, _ in pairs):
        raise ValueError(f"{show_bytes(raw)} is no sparsevec")
    values = _floats([number for _, number in pairs], "f", raw, "sparsevec")
    return _sparse(int(match[2]), tuple([int(index) - 1 for index, _ in pairs]), values)


_sparse_head = struct.Struct(">iii").unpack_from


def _sparse_binary(raw: bytes) -> SparseVector:
    """A sparsevec in binary format.

    int32 number of dimensions, int32 number of elements, int32 unused, int32 indices, float4
    values.
    """
    if len(raw) < 12:
        raise ValueError(f"a binary sparsevec has at least 12 bytes, found {len(raw)}")
    dim, count, unused = _sparse_head(raw)
    if len(raw) != 12 + 8 * count or unused:
        raise ValueError(f"a binary sparsevec of {count} elements in {len(raw)} bytes")
    numbers = struct.unpack_from(f">{count}i{count}f", raw, 12)
    return _sparse(dim, numbers[:count], numbers[count:])


def _sparse_form(raw: bytes) -> str:
    value = _sparse_binary(raw)
    pairs = [
        f"{index + 1}:{float4_text(number)}"
        for index, number in zip(value.indices, value.values, strict=True)
    ]
    return f"{{{','.join(pairs)}}}/{value.dim}"


def _ewkb(raw: bytes) -> bytes:
    """A geometry in EWKB, the binary format of PostGIS: byte order (0 or 1), uint32 type, data."""
    if len(raw) < 5 or raw[0] > 1:
        raise ValueError(f"{show_bytes(raw)} is no EWKB")
    return raw


_HEX = re.compile(rb"[0-9A-F]+").fullmatch


def _ewkb_text(raw: bytes) -> bytes:
    if len(raw) % 2 or _HEX(raw) is None:
        raise ValueError(f"{show_bytes(raw)} is no EWKB in hexadecimal digits")
    return _ewkb(bytes.fromhex(raw.decode()))


_VECTOR, _HALFVEC = _dense("vector", "f"), _dense("halfvec", "e")

CODECS: dict[str, CodecOf] = {
    "hstore": lambda policies, encoding: _hstore(encoding),
    "cube": lambda policies, encoding: Codec(_cube_text, _cube_form, _cube_form),
    "pgvector": lambda policies, encoding: _VECTOR,
    "halfvec": lambda policies, encoding: _HALFVEC,
    "sparsevec": lambda policies, encoding: Codec(_sparse_text, _sparse_binary, _sparse_form),
    "ewkb": lambda policies, encoding: Codec(
        _ewkb_text, _ewkb, lambda raw: _ewkb(raw).hex().upper()
    ),
}
