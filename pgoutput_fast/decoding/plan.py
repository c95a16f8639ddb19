"""Prepare the decoding of a relation's tuples, once for each Relation message.

A message of a row consists of its frame and the plan of its relation. The plan has the columns'
names, their positions by name, and a function for each column that decodes its values. Both
implementations read the same plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..errors import ENCODING_HINT, SQL_ASCII_HINT, DecodeError, fail, printable
from ..names import qualified, shown_name
from ..settings import Settings
from ..types import ColumnType, Converter, column_type, extension_by_name
from ..values import CODES, Codec, NoTextForm, OutOfRange, codec_of, fields_of

if TYPE_CHECKING:
    from ..protocol.messages import Relation, Type

TEXTUAL = frozenset({"text", "json", "jsonb", "other"})  # codecs of text in the session's encoding


class _ColumnNumbers(dict[str, int]):
    """Position by name; a KeyError says which names there are."""

    __slots__ = ("_relation",)

    def __init__(self, relation: Relation) -> None:
        # A server sends no name twice. If a frame does, the name stands for the first column.
        super().__init__(
            (column.name, i) for i, column in reversed(list(enumerate(relation.columns)))
        )
        self._relation = relation

    def __missing__(self, name: object) -> NoReturn:
        names = ", ".join(printable(column.name) for column in self._relation.columns)
        raise KeyError(
            f"{printable(qualified(self._relation))} has no column {name!r}; it has "
            f"{names or 'none'}"
        )


class RelationPlan:
    """How to decode the columns of one relation, under the settings of one decoder.

    Attributes
    ----------
    relation : Relation
    types : dict of int to Type
        The Type messages of the types of the relation's columns, by OID.
    settings : Settings
    width : int
        Number of columns.
    names : tuple of str
    positions : dict of str to int
    is_key : tuple of bool
    text, binary, text_form : tuple of callable
        Functions for each column, found at first access: from a value in text format to a Python
        object, from a value in binary format to a Python object, and from a value in binary format
        to the text that the server would print.
    compiled : object
        The compiled implementation's own form of the plan, which it keeps here.
    """

    __slots__ = (
        "_known_types",
        "binary",
        "compiled",
        "is_key",
        "names",
        "positions",
        "relation",
        "settings",
        "text",
        "text_form",
        "types",
        "width",
    )
    text: tuple[Converter, ...]
    binary: tuple[Converter, ...]
    text_form: tuple[Converter, ...]

    def __init__(self, relation: Relation, types: dict[int, Type], settings: Settings) -> None:
        columns = relation.columns
        self.relation = relation
        self.types = types
        self.settings = settings
        self.width = len(columns)
        self.names = tuple(column.name for column in columns)
        self.positions = _ColumnNumbers(relation)
        self.is_key = tuple(column.is_key for column in columns)
        # The version of the registry, and the column types that were found in it. They are replaced
        # together, as several threads may read one row.
        self._known_types: tuple[int, tuple[ColumnType, ...]] | None = None
        self.compiled: object = None

    def __reduce__(self) -> tuple[object, ...]:
        return RelationPlan, (self.relation, self.types, self.settings)

    @property
    def column_types(self) -> tuple[ColumnType, ...]:
        """The type of each column, from the table of types, its Type message and the registry."""
        return self._current_types()[1]

    def _current_types(self) -> tuple[int, tuple[ColumnType, ...]]:
        registry = self.settings.registry
        version = 0 if registry is None else registry.version
        known = self._known_types
        if known is None or known[0] != version:
            found = []
            for column in self.relation.columns:
                message = self.types.get(column.type_id)
                announced = None if message is None else (message.namespace, message.name)
                found.append(
                    column_type(
                        column.type_id,
                        column.type_modifier,
                        announced=announced,
                        registry=registry,
                    )
                )
            known = self._known_types = version, tuple(found)
        return known

    @property
    def codes(self) -> bytes:
        """The code of each column in `CODES`; 0 if a function of the plan must be called."""
        return bytes([self._code(position) for position in range(self.width)])

    def __getattr__(self, name: str) -> tuple[Converter, ...]:
        # Called for the slots of functions while they are empty. Once filled, they are found
        # without this method.
        if name not in Codec._fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        codecs = [self._codec(position) for position in range(self.width)]
        for field_name, functions in zip(
            Codec._fields, zip(*codecs, strict=True) if codecs else ((), (), ()), strict=True
        ):
            setattr(self, field_name, functions)
        found: tuple[Converter, ...] = object.__getattribute__(self, name)
        return found

    def _codec(self, position: int) -> Codec:
        found = self.column_types[position]
        if self._settled(found):
            return codec_of(found, self.settings)
        return self._looked_up(position)

    def _settled(self, type: ColumnType) -> bool:
        """Whether no later lookup in the server's catalogue can change how values are decoded."""
        return self.settings.registry is None or (
            type.kind == "base" and type.entry is not None and type.entry.oid != 0
        )

    def _looked_up(self, position: int) -> Codec:
        """Functions that find the type anew whenever the registry has looked up its types again."""
        known: tuple[int, Codec] | None = None

        def current() -> Codec:
            nonlocal known
            version, types = self._current_types()
            codec = known
            if codec is None or codec[0] != version:
                codec = known = version, codec_of(types[position], self.settings)
            return codec[1]

        return Codec(
            lambda raw: current().text(raw),
            lambda raw: current().binary(raw),
            lambda raw: current().text_form(raw),
        )

    def _code(self, position: int) -> int:
        found = self.column_types[position]
        codec = found.entry.codec if found.entry is not None else "other"
        if (
            not self._settled(found)
            or found.kind not in ("base", "unknown")
            or found.registered is not None
            or (codec in TEXTUAL and self.settings.encoding != "utf-8")
            or (codec == "text" and self.settings.text_is_bytes)
            or (codec in ("json", "jsonb") and self.settings.policies.json != "text")
        ):
            return 0
        return CODES.get(codec, 0)


def refuse_value(
    frame: bytes, offset: int, position: int, error: Exception, plan: RelationPlan | None
) -> NoReturn:
    """Raise the DecodeError for the value at byte `offset`, whose conversion raised `error`.

    A MemoryError or DecodeError is raised as it is.
    """
    if isinstance(error, (MemoryError, DecodeError)):
        raise error
    if plan is None:
        column = str(position)
        settings = Settings()
    else:
        relation = plan.relation
        column = printable(qualified(relation))
        column = f"{plan.names[position]!r} of {column}"
        found_type = plan.column_types[position]
        column += f" ({printable(found_type.name) or f'type {found_type.oid}'})"
        for name in fields_of(error):
            column += f", field {printable(name)!r}"
        settings = plan.settings
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
    if code == "bad_value" and plan is not None:
        extension = extension_by_name(found_type, plan.settings.registry)
        if extension:
            found += (
                f"; the type was taken for the one of the extension {extension} by its name alone: "
                "TypeRegistry.from_connection tells whether it is"
            )
    hint = SQL_ASCII_HINT if settings.is_sql_ascii else ENCODING_HINT
    try:
        fail(
            code, frame, offset, column=column, found=found, encoding=settings.encoding,
            hint=hint if code == "bad_encoding" else (),
        )  # fmt: skip
    except DecodeError as refused:
        refused.column = None if plan is None else shown_name(plan.names[position])
        if isinstance(error, OutOfRange):
            refused.policy = error.policy
        elif code == "bad_encoding" and settings.is_sql_ascii:
            refused.policy = ("invalid_text", "replace")
        raise refused from error
