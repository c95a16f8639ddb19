"""The server's text of a value as the object that pyarrow gives of a column's value.

Nothing of the package reads anything here: psycopg's loaders take arrays, composites, ranges and
hstores apart, by the catalogue that was recorded beside a capture, and what they are made of in
the end is read by Python.
"""

from __future__ import annotations

import datetime
import json
import re
import struct
import uuid
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pyarrow as pa
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.pq import Format
from psycopg.types import TypeInfo
from psycopg.types.array import register_array
from psycopg.types.composite import CompositeInfo, register_composite
from psycopg.types.hstore import register_hstore
from psycopg.types.multirange import Multirange, MultirangeInfo, register_multirange
from psycopg.types.range import Range, RangeInfo, register_range

__all__ = ["OtherShape", "ServerText", "comparable"]


class OtherShape(Exception):
    """An array that is not of one dimension counted from 1: no column has it."""


class _Word(Loader):
    """A value that has no parts, as it is printed."""

    def load(self, data: Any) -> str:
        return bytes(data).decode("utf-8", "surrogateescape")


class _Spaced(_Word):
    """The elements of an int2vector or oidvector."""

    def load(self, data: Any) -> Any:
        return super().load(data).split()


class _Vector(_Word):
    """The elements of a vector of pgvector."""

    def load(self, data: Any) -> Any:
        return json.loads(super().load(data), parse_int=str, parse_float=str)


class _Sparse(_Word):
    """The fields of pgvector's sparsevec: ``{1:0.5,3:2}/5``."""

    def load(self, data: Any) -> Any:
        entries, dimensions = super().load(data)[1:].split("}/")
        pairs = [pair.split(":") for pair in entries.split(",") if pair]
        # Counted from 1 in the text, from 0 in columns.
        return (dimensions, [str(int(at) - 1) for at, _ in pairs], [value for _, value in pairs])


class _Money(Loader):
    """The amount in the smallest unit, as a column has it."""

    format = Format.BINARY

    def load(self, data: Any) -> str:
        return str(int.from_bytes(data, "big", signed=True))


class _Reg(_Money):
    """The digits of an OID."""

    def load(self, data: Any) -> str:
        return str(int.from_bytes(data, "big"))


class _Raw(_Money):
    """Any other."""

    def load(self, data: Any) -> Any:
        return bytes(data)


_LOADERS = {
    "int2vector": _Spaced, "oidvector": _Spaced, "vector": _Vector, "halfvec": _Vector,
    "sparsevec": _Sparse,
}  # fmt: skip
_BOUNDS = re.compile(r'(?:\A|[{(,>"])\\*"*(?:\[-?\d+:-?\d+\])+=')


class ServerText:
    """Reads what a server printed in the session settings of `render.py`.

    Parameters
    ----------
    snapshots : iterable of dict
        The catalogue's, as `corpus_files.Truth.catalog` gives them; the last one counts.
    arrays : bool
        Whether columns have arrays as lists; else as text, by a policy.
    """

    connection = None

    def __init__(self, snapshots: Iterable[dict[str, Any]], *, arrays: bool = True) -> None:
        types = {int(row["oid"]): row for one in snapshots for row in one["types"]}
        self.types = types
        self._arrays = arrays
        self.adapters = AdaptersMap()
        self.adapters.register_loader(0, _Word)  # any other
        self.adapters.register_loader(0, _Raw)
        for oid, row in types.items():
            self._register(oid, row)
        for oid, row in types.items():
            if row["typtype"] == "d":
                loader = self.adapters.get_loader(self._base(oid), Format.TEXT)
                if loader is not None:
                    self.adapters.register_loader(oid, loader)
        self.transformer = Transformer(self)

    def _base(self, oid: int) -> int:
        while self.types[oid]["typtype"] == "d":
            oid = int(self.types[oid]["typbasetype"])
        return oid

    def _register(self, oid: int, row: dict[str, Any]) -> None:
        name, kind = row["name"], row["typtype"]
        array = int(row["typarray"] or 0) if self._arrays else 0
        if name == "money" or (name.startswith("reg") and kind == "b"):
            self.adapters.register_loader(oid, _Money if name == "money" else _Reg)
            self.adapters.register_loader(oid, _Word)
        elif name in _LOADERS:
            self.adapters.register_loader(oid, _LOADERS[name])
        elif name == "hstore":
            register_hstore(TypeInfo(name, oid, array), self)
        elif kind == "c":
            fields = row["attributes"] or []
            register_composite(
                CompositeInfo(
                    name, oid, array,
                    field_names=[field[1] for field in fields],
                    field_types=[int(field[2]) for field in fields],
                ),
                self,
                lambda *parts: parts,
            )  # fmt: skip
        elif kind == "r":
            register_range(RangeInfo(name, oid, array, subtype_oid=int(row["range_subtype"])), self)
        elif kind == "m":
            (span,) = (
                other
                for other in self.types.values()
                if other["typtype"] == "r"
                and (
                    name == other["name"].replace("range", "multirange", 1)
                    or name == f"{other['name']}_multirange"
                )
            )
            info = MultirangeInfo(
                name, oid, array, range_oid=span["oid"], subtype_oid=int(span["range_subtype"])
            )
            register_multirange(info, self)
        if array:
            register_array(TypeInfo(name, oid, array, delimiter=row["typdelim"]), self)

    def read(self, word: str | None, oid: int, kind: pa.DataType) -> Any:
        """The value of a column of the Arrow type `kind`, of a word that the server copied.

        Raises
        ------
        OtherShape
            It is an array that is not of one dimension counted from 1, or has one in it.
        """
        if word is None:
            return None
        if pa.types.is_nested(kind) and _BOUNDS.search(word):
            raise OtherShape
        loader = self.transformer.get_loader(oid, Format.TEXT)
        return as_arrow(loader.load(word.encode("utf-8", "surrogateescape")), kind, word)

    def read_binary(self, raw: bytes | None, oid: int, kind: pa.DataType) -> Any:
        """The same of a value of ``COPY BINARY`` whose column is not that of its text.

        Of money and of the aliases of OIDs, of arrays of them, and of what is binary in its column.
        """
        if raw is None:
            return None
        return as_arrow(self.transformer.get_loader(oid, Format.BINARY).load(raw), kind)


def as_arrow(found: Any, kind: pa.DataType, word: str = "") -> Any:
    """What ``to_pylist`` gives of what psycopg has taken apart; `word` is the text of it all."""
    if found is None:
        return None
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_map(kind):
        return [(key, value) for key, value in found.items()]
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        assert isinstance(found, (list, Multirange)), found
        if any(isinstance(one, list) for one in found) and not pa.types.is_list(kind.value_type):
            raise OtherShape
        return [as_arrow(one, kind.value_type) for one in found]
    if pa.types.is_struct(kind) and isinstance(found, Range):
        assert [field.name for field in kind][2:] == ["lower_inc", "upper_inc", "empty"]
        ends = [as_arrow(end, kind.field(0).type) for end in (found.lower, found.upper)]
        return dict(
            zip(
                ("lower", "upper", "lower_inc", "upper_inc", "empty"),
                (*ends, found.lower_inc, found.upper_inc, found.isempty),
                strict=True,
            )
        )
    if pa.types.is_struct(kind):
        if isinstance(found, (list, Multirange)):
            raise OtherShape  # an array of two dimensions, of what is a list itself
        if found == () and kind.num_fields == 1:
            found = (None,)  # psycopg takes "()" for a composite without fields
        return {
            field.name: as_arrow(one, field.type) for field, one in zip(kind, found, strict=True)
        }
    if kind == pa.binary() and isinstance(found, bytes):
        return found
    if not isinstance(found, str):
        # A column of text has the text of what psycopg can take apart too.
        assert kind == pa.utf8(), (found, kind)
        assert word, found
        return word
    return _leaf(found, kind)


def _leaf(word: str, kind: pa.DataType) -> Any:
    if kind == pa.utf8() or isinstance(kind, pa.JsonType):
        return word
    if isinstance(kind, pa.UuidType):
        return uuid.UUID(word)
    if kind == pa.bool_():
        return {"t": True, "f": False}[word]
    if kind == pa.float32():
        return struct.unpack("f", struct.pack("f", float(word)))[0]
    if kind == pa.float64():
        return float(word)
    if pa.types.is_integer(kind):
        return int(word)
    if pa.types.is_decimal(kind):
        return Decimal(word)
    if kind == pa.date32():
        return datetime.date.fromisoformat(word)
    if pa.types.is_time(kind):
        return datetime.time.fromisoformat(word)
    if kind == pa.timestamp("us"):
        return datetime.datetime.fromisoformat(word)
    if pa.types.is_timestamp(kind):
        return datetime.datetime.fromisoformat(word.removesuffix("+00") + "+00:00")
    storage = getattr(kind, "storage_type", kind)
    assert storage == pa.binary(), (word, kind)
    # Of PostGIS the digits stand alone.
    return bytes.fromhex(word.removeprefix("\\x"))


def comparable(value: Any) -> Any:
    """A value that equals another one if that is the same to the last digit; NaN equals NaN."""
    if isinstance(value, dict):
        return tuple((name, comparable(one)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(map(comparable, value))
    if isinstance(value, tuple):  # an entry of a map
        return ("entry", *map(comparable, value))
    if isinstance(value, (str, bytes, type(None))):
        return value
    return type(value).__name__, repr(value)
