"""What a relation's tuples need to become values, resolved once per relation.

A plan is the one thing that a message needs beside its frame: it names the columns, finds them by
name, and holds a decoder per column. Both implementations read the same plans.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from .errors import DecodeError, PgOutputError, fail, printable
from .policies import Policies
from .types import Converter, PgType, RegisteredType, TypeRegistry, builtin_type
from .values import CODECS, Codec, NoTextForm, OutOfRange

if TYPE_CHECKING:
    from .messages import Relation, Type

_POSTGRESQL_ENCODINGS = {
    "unicode": "utf-8",
    "sqlascii": "ascii",
    "win866": "cp866",
    "win874": "cp874",
    "koi8r": "koi8-r",
    "koi8u": "koi8-u",
    "euccn": "gb2312",
    "eucjp": "euc_jp",
    "euckr": "euc_kr",
    "shiftjis2004": "shift_jis_2004",
    "eucjis2004": "euc_jis_2004",
    "latin5": "iso8859-9",
    "latin6": "iso8859-10",
    "latin7": "iso8859-13",
    "latin8": "iso8859-14",
    "latin9": "iso8859-15",
    "latin10": "iso8859-16",
    **{
        f"win{page}": f"cp{page}" for page in (1250, 1251, 1252, 1253, 1254, 1255, 1256, 1257, 1258)
    },
}
"""PostgreSQL's names of encodings, without punctuation, that Python knows by another name, or knows
for something else."""


CODES = {
    "bool": 1,
    "int2": 2,
    "int4": 3,
    "int8": 4,
    "uint4": 5,
    "float8": 6,
    "numeric": 7,
    "text": 8,
    "json": 8,
    "bytea": 9,
    "uuid": 10,
    "date": 11,
    "time": 12,
    "timestamp": 13,
    "timestamptz": 14,
    "jsonb": 15,
    "other": 16,
}
"""Codec → the number by which the compiled implementation knows it; 0 is none of these."""


TEXTUAL = frozenset({"text", "json", "jsonb", "other"})  # codecs whose bytes are the encoding's


def python_encoding(name: str) -> str:
    """Python's name of the encoding `name`, which may be PostgreSQL's (``LATIN1``, ``WIN1252``).

    Raises
    ------
    PgOutputError
        Python has no such text encoding, or ASCII means something else in it.
    TypeError
        `name` is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"an encoding must be a str, not {type(name).__name__}")
    plain = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    try:
        found = codecs.lookup(_POSTGRESQL_ENCODINGS.get(plain, name)).name
        usable = "pgoutput".encode(found) == b"pgoutput"
    except (LookupError, ValueError):
        usable = False
    if not usable:
        raise PgOutputError(
            f"encoding {name[:40]!r} is unknown; expected the client_encoding of the session, "
            "such as 'UTF8' or 'LATIN1'"
        )
    return found


@dataclass(frozen=True, slots=True)
class Settings:
    """What a decoder was told: the choices that decide how a value comes out."""

    policies: Policies = field(default_factory=Policies)
    encoding: str = "utf-8"  # Python's name
    registry: TypeRegistry | None = None


class RelationPlan:
    """The columns of one relation under one decoder's settings.

    Attributes
    ----------
    relation : Relation
    types : dict of int to Type
        The Type messages that announced this relation's columns, by OID.
    settings : Settings
    width : int
        Number of columns.
    names : tuple of str
    positions : dict of str to int
    is_key : tuple of bool
    text, binary, text_form : tuple of callable
        A function per column: from a text value or a binary one to a Python object, and from a
        binary one to the server's text. Resolved when first asked for.
    compiled : object
        What the compiled implementation makes of the plan and keeps here.
    """

    __slots__ = (
        "_converters",
        "compiled",
        "is_key",
        "names",
        "positions",
        "relation",
        "settings",
        "types",
        "width",
    )

    def __init__(self, relation: Relation, types: dict[int, Type], settings: Settings) -> None:
        columns = relation.columns
        self.relation = relation
        self.types = types
        self.settings = settings
        self.width = len(columns)
        self.names = tuple(column.name for column in columns)
        # Names are unique on a server; should they not be, the first one is found.
        self.positions = {name: i for i, name in reversed(list(enumerate(self.names)))}
        self.is_key = tuple(column.is_key for column in columns)
        self._converters: tuple[tuple[Converter, ...], ...] | None = None
        self.compiled: object = None

    def __reduce__(self) -> tuple[object, ...]:
        return RelationPlan, (self.relation, self.types, self.settings)

    def type_of(self, position: int) -> PgType | None:
        """The row of the type table for the column at `position`; None for other types."""
        type_id = self.relation.columns[position].type_id
        announced = self.types.get(type_id)
        if announced is None:
            return builtin_type(type_id)
        return builtin_type(type_id, announced.namespace, announced.name)

    @property
    def codes(self) -> bytes:
        """For each column the code of :data:`CODES`, 0 where its functions above must be called."""
        return bytes([self._code(position) for position in range(self.width)])

    @property
    def text(self) -> tuple[Converter, ...]:
        """From text values."""
        return (self._converters or self._resolve())[0]

    @property
    def binary(self) -> tuple[Converter, ...]:
        """From binary values."""
        return (self._converters or self._resolve())[1]

    @property
    def text_form(self) -> tuple[Converter, ...]:
        """From binary values to text."""
        return (self._converters or self._resolve())[2]

    def _resolve(self) -> tuple[tuple[Converter, ...], ...]:
        codecs = [self._codec(position) for position in range(self.width)]
        self._converters = tuple(zip(*codecs, strict=True)) if codecs else ((), (), ())
        return self._converters

    def _registered(self, position: int) -> RegisteredType | None:
        """What the user registered for the type of the column at `position`."""
        if self.settings.registry is None:
            return None
        type_id = self.relation.columns[position].type_id
        announced = self.types.get(type_id)
        if announced is not None:
            return self.settings.registry.find(type_id, announced.namespace, announced.name)
        entry = builtin_type(type_id)
        name = entry.name if entry is not None else None
        return self.settings.registry.find(type_id, "pg_catalog", name)

    def _codec(self, position: int) -> Codec:
        entry = self.type_of(position)
        codec_of = CODECS.get(entry.codec if entry else "other", CODECS["other"])
        codec = codec_of(self.settings.policies, self.settings.encoding)
        registered = self._registered(position)
        if registered is not None:
            text, binary = registered.text or codec.text, registered.binary or codec.binary
            codec = codec._replace(text=text, binary=binary)
        return codec

    def _code(self, position: int) -> int:
        entry = self.type_of(position)
        codec = entry.codec if entry and entry.codec in CODECS else "other"
        if (
            self._registered(position) is not None
            or (codec in TEXTUAL and self.settings.encoding != "utf-8")
            or (codec in ("json", "jsonb") and self.settings.policies.json != "text")
        ):
            return 0
        return CODES.get(codec, 0)


def refuse_value(
    frame: bytes, offset: int, position: int, error: Exception, plan: RelationPlan | None
) -> NoReturn:
    """Raise the DecodeError for the value at byte `offset`, refused with `error`."""
    if isinstance(error, (MemoryError, DecodeError)):
        raise error
    if plan is None:
        column = str(position)
        encoding = "utf-8"
    else:
        relation = plan.relation
        column = printable(f"{relation.namespace}.{relation.name}")
        column = f"{plan.names[position]!r} of {column}"
        entry = plan.type_of(position)
        column += f" ({entry.name})" if entry else f" (type {relation.columns[position].type_id})"
        encoding = plan.settings.encoding
    if isinstance(error, UnicodeDecodeError):
        code = "bad_encoding"
    elif isinstance(error, OutOfRange):
        code = "out_of_range"
        column = "column " + column
    elif isinstance(error, NoTextForm):
        code = "no_text_form"
    else:
        code = "bad_value"
    found = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    try:
        fail(code, frame, offset, column=column, found=found, encoding=encoding)
    except DecodeError as refused:
        raise refused from error
