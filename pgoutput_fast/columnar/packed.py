"""Pack nested values into bytes while a batch grows; its columns are made from them at its end.

The packed form of a list, struct or map is that of its parts, one after the other: for each part an
int32 in the machine's byte order with its size (-1 for null), then the bytes that a column of the
part's type stores. The bytes of a nested part are packed in the same way. The parts of a map are
structs of key and value. So the columns of parts need not be undone when a row is refused, and the
size of a value is known at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..objects import Array, Range, SparseVector
from ..policies import Policies
from ..types import ColumnType
from ..values import Codec, OutOfRange
from ..values import nested as codecs

TargetState = bytes | None
Pack = Callable[[Any], TargetState]

_size = struct.Struct("=i")
_NULL = _size.pack(-1)
_FALSE, _TRUE = b"\0", b"\1"


def packed(parts: Iterable[TargetState]) -> bytes:
    """Return the packed form of parts, each given as the bytes that its column stores, or None."""
    return b"".join([_NULL if part is None else _size.pack(len(part)) + part for part in parts])


def unpacked(value: bytes) -> Iterator[TargetState]:
    """Yield the parts of a packed value."""
    at = 0
    while at < len(value):
        size: int = _size.unpack_from(value, at)[0]
        at += 4
        yield None if size < 0 else value[at : at + size]
        at += max(size, 0)


# --- enums ----------------------------------------------------------------------------------------


class NewLabel(Exception):
    """Raised for a label that is not in the dictionary of this batch; the next batch will have it.

    Attributes
    ----------
    labels : Labels
    label : bytes
    """

    def __init__(self, labels: Labels, label: bytes) -> None:
        super().__init__(labels, label)
        self.labels, self.label = labels, label


class Labels:
    """The labels of an enum with their numbers in columns.

    Those of the catalogue come first, then others in the order in which they were seen.

    Attributes
    ----------
    numbers : dict of bytes to bytes
        Label in UTF-8 → the bytes that a column stores: its number.
    """

    def __init__(self, labels: Iterable[bytes]) -> None:
        self.numbers: dict[bytes, bytes] = {}
        for label in labels:
            self.add(label)

    def add(self, label: bytes) -> None:
        """Give a label the next number, unless it has one."""
        self.numbers.setdefault(label, _size.pack(len(self.numbers)))

    def store(self, label: bytes) -> bytes:
        """Return the bytes that a column stores of a label.

        Raises
        ------
        NewLabel
            The label has no number.
        """
        try:
            return self.numbers[label]
        except KeyError:
            raise NewLabel(self, label) from None


# --- functions of nested types --------------------------------------------------------------------


def packing(
    type: ColumnType, parts: list[Codec], policies: Policies
) -> tuple[Callable[[bytes], TargetState], Callable[[bytes], TargetState]]:
    """Return the functions that convert a value in text or binary format to its packed form.

    Parameters
    ----------
    type : ColumnType
        An array, a vector, a range, a multirange or a composite.
    parts : list of Codec
        Functions for the element, or for each field, that return the bytes that the part's column
        stores.
    policies : Policies
    """
    pack: Pack
    if type.kind == "composite":
        codec, pack = codecs.composite(type, parts), packed
    elif type.kind == "range":
        codec, pack = codecs.range_(parts[0]), _range
    elif type.kind == "multirange":
        codec, pack = codecs.multirange(parts[0]), packed
    elif type.kind == "vector":
        codec, pack = codecs.vector(type, parts[0]), packed
    else:
        codec, pack = codecs.array(type, parts[0]), _array(dimensions_of(policies))
    return then(codec.text, pack), then(codec.binary, pack)


def then(first: Callable[[bytes], Any], after: Pack) -> Callable[[bytes], TargetState]:
    """Return a function that calls `first`, then `after` unless a policy made None of the value."""

    def both(raw: bytes) -> TargetState:
        value = first(raw)
        return None if value is None else after(value)

    return both


def dimensions_of(policies: Policies) -> int:
    """Return the number of dimensions that all arrays of a column have."""
    return policies.arrays if isinstance(policies.arrays, int) else 1


def _range(value: Range[bytes]) -> bytes:
    flags = (value.lower_inc, value.upper_inc, value.empty)
    return packed((value.lower, value.upper, *(_TRUE if flag else _FALSE for flag in flags)))


def _array(dimensions: int) -> Pack:
    def pack(value: list[Any]) -> bytes:
        if not value:
            return b""  # an empty array has no dimensions, so it fits into every column of arrays
        found = 0
        inner: Any = value
        while isinstance(inner, list):
            found += 1
            inner = inner[0]
        if found != dimensions or isinstance(value, Array):
            lowers = f" counted from {value.lower_bounds}" if isinstance(value, Array) else ""
            plural = "s" * (found > 1)
            raise OutOfRange(
                f"an array of {found} dimension{plural}{lowers} does not fit where all have "
                f"{dimensions}, counted from 1; the policy arrays can make it text, or have "
                "another number of dimensions",
                ("arrays", "text"),
            )
        return level(value, dimensions)

    def level(value: list[Any], depth: int) -> bytes:
        return packed(value if depth == 1 else [level(inner, depth - 1) for inner in value])

    return pack


def pack_map(value: dict[str, str | None]) -> bytes:
    """Return the packed form of an hstore: a map."""
    return packed(
        packed((key.encode(), None if item is None else item.encode()))
        for key, item in value.items()
    )


def pack_floats(dimensions: int) -> Pack:
    """Return a function that packs a vector as a list of float32.

    If `dimensions` is not 0, vectors of another length are refused with OutOfRange.
    """

    def pack(value: list[float]) -> bytes:
        if dimensions and len(value) != dimensions:
            raise OutOfRange(
                f"a vector of {len(value)} dimensions does not fit into a column of {dimensions}"
            )
        return packed(map(_float32, value))

    return pack


def pack_sparse(value: SparseVector) -> bytes:
    """Return the packed form of a sparsevec: a struct of dim, indices and values."""
    return packed(
        (_size.pack(value.dim), packed(map(_size.pack, value.indices)),
         packed(map(_float32, value.values)))
    )  # fmt: skip


_float32 = struct.Struct("=f").pack
