"""Tables and types as test streams announce them, and rows of Python values as tuples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..encode import encode_fields
from ..errors import PgOutputError
from ..types import BUILTIN_TYPES
from ..wire import Column

_OIDS = {entry.name: entry.oid for entry in BUILTIN_TYPES}
_WITH_MODIFIER = re.compile(r"(\w+)\((\d+)(?:, *(-?\d+))?\)")
_HEADER = 4
"""What is added to the modifiers of numeric and of the character types, the size of a header."""

Row = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class UserType:
    """A type that is not built in, as a Type message announces it.

    Attributes
    ----------
    oid : int
    name, namespace : str
        Of the type; of a domain those of the type that it is made of, as the server sends them.
    """

    oid: int
    name: str
    namespace: str = "public"

    def frame(self, xid: int | None = None) -> bytes:
        """The Type frame; with an xid as from inside of a stream."""
        return encode_fields(
            "Y", xid=xid, type_id=self.oid, namespace=self.namespace, name=self.name
        )


TypeSpec = str | int | tuple[str | int, int] | UserType


class Table:
    """A published table, in one version of its columns.

    >>> Table("accounts", {"id": "int4", "balance": "numeric(12,2)", "note": "text"})
    Table(public.accounts: id int4 key, balance numeric, note text)

    Parameters
    ----------
    name : str
    columns : mapping of str to str, int, (str or int, int) or UserType
        Names of columns, and their types: the name of a built-in type, with a modifier where it has
        one (``"varchar(20)"``), or an OID; the modifier (``atttypmod``) can be given beside either.
    relation_id : int
        The table's OID.
    namespace : str
    key : iterable of str, optional
        The columns of the replica identity. By default the first one; all for the identity "f",
        none for "n".
    replica_identity : str
        "d" the primary key, "i" an index, "f" whole rows or "n" nothing.

    Raises
    ------
    PgOutputError
        There is no such type, or no such column for the key.
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, TypeSpec],
        relation_id: int = 16385,
        *,
        namespace: str = "public",
        key: Iterable[str] | None = None,
        replica_identity: str = "d",
    ) -> None:
        if key is None:
            key = {"f": list(columns), "n": []}.get(replica_identity, list(columns)[:1])
        keys = list(key)
        unknown = [column for column in keys if column not in columns]
        if unknown:
            raise PgOutputError(f"the table {name!r} has no column {unknown[0]!r} for its key")
        self.name = name
        self.namespace = namespace
        self.relation_id = relation_id
        self.replica_identity = replica_identity
        self.types = tuple(type_ for type_ in columns.values() if isinstance(type_, UserType))
        self.columns = tuple(
            Column(int(column in keys), column, *_type_of(type_))
            for column, type_ in columns.items()
        )

    def __repr__(self) -> str:
        names = {oid: name for name, oid in _OIDS.items()} | {t.oid: t.name for t in self.types}
        shown = ", ".join(
            f"{column.name} {names.get(column.type_id, column.type_id)}{' key' * column.is_key}"
            for column in self.columns
        )
        return f"Table({self.namespace}.{self.name}: {shown})"

    def relation(self, xid: int | None = None) -> bytes:
        """The Relation frame; with an xid as from inside of a stream."""
        return encode_fields(
            "R",
            xid=xid,
            relation_id=self.relation_id,
            namespace=self.namespace,
            name=self.name,
            replica_identity=self.replica_identity,
            columns=self.columns,
        )

    def announcement(self, xid: int | None = None) -> list[bytes]:
        """What a server sends before the first row: the types that are not built in, the table.

        With an xid as from inside of a stream.
        """
        return [*(type_.frame(xid) for type_ in self.types), self.relation(xid)]

    def row(self, values: Row) -> list[Any]:
        """A row of Python values as :func:`pgoutput_fast.testing.encode_tuple` takes it.

        A mapping gives values by the names of columns, and those that it leaves out are NULL. Of
        int, float and bool comes the text that the server prints; str is text, bytes are a value in
        binary format, a pair of "t" or "b" and a value says which; None is NULL, and UNCHANGED an
        unchanged TOAST value.

        Raises
        ------
        PgOutputError
            The number of values is not that of the columns, or there is no such column.
        """
        if isinstance(values, Mapping):
            names = [column.name for column in self.columns]
            unknown = [name for name in values if name not in names]
            if unknown:
                raise PgOutputError(f"{self!r} has no column {unknown[0]!r}")
            values = [values.get(name) for name in names]
        if len(values) != len(self.columns):
            raise PgOutputError(
                f"{self!r} has {len(self.columns)} columns, and {len(values)} values were given"
            )
        return [text_of(value) for value in values]


def text_of(value: Any) -> Any:
    """A bool, int or float as the server prints it; everything else as it is."""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        special = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        shown = repr(value)
        return special.get(shown, shown.removesuffix(".0"))
    return value


def _type_of(given: TypeSpec) -> tuple[int, int]:
    """The OID and the modifier of a type."""
    if isinstance(given, UserType):
        return given.oid, -1
    if isinstance(given, tuple):
        return _type_of(given[0])[0], given[1]
    if isinstance(given, int):
        return given, -1
    matched = _WITH_MODIFIER.fullmatch(given)
    name = matched[1] if matched else given
    if name not in _OIDS:
        raise PgOutputError(f"no built-in type has the name {given!r}; give its OID, or a UserType")
    if matched is None:
        return _OIDS[name], -1
    first, second = int(matched[2]), int(matched[3] or 0)
    if name == "numeric":
        return _OIDS[name], (first << 16 | second & 0x7FF) + _HEADER
    return _OIDS[name], first + _HEADER * (name in ("varchar", "bpchar"))
