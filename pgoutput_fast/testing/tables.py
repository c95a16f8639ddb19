"""Describe the tables and types of test streams, and make rows from Python values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PgOutputError
from ..names import qualified
from ..protocol.encode import encode_fields
from ..protocol.wire import Column
from ..types import BUILTIN_TYPES

_OIDS = {entry.name: entry.oid for entry in BUILTIN_TYPES}
_WITH_MODIFIER = re.compile(r"(\w+)\((\d+)(?:, *(-?\d+))?\)")
_HEADER = 4
"""PostgreSQL adds a header's size to the type modifiers of numeric and character types."""

Row = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class UserType:
    """A type that is not built in, as a Type message announces it.

    Attributes
    ----------
    oid : int
    name, namespace : str
        The type's name and schema; for a domain those of its base type, as a server sends them.
    """

    oid: int
    name: str
    namespace: str = "public"

    def frame(self, xid: int | None = None) -> bytes:
        """Return the Type frame.

        Parameters
        ----------
        xid : int, optional
            With an xid, the form inside a stream chunk.
        """
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
        The type of each column, by name. A type is the name of a built-in type, with or without a
        modifier (``"varchar(20)"``), an OID, a pair of name or OID and modifier (``atttypmod``), or
        a UserType.
    relation_id : int
        The table's OID.
    namespace : str
    key : iterable of str, optional
        The columns of the replica identity. The default is the first column; for the replica
        identity "f" it is all columns, for "n" none.
    replica_identity : str
        "d" (the primary key), "i" (an index), "f" (whole rows) or "n" (nothing).

    Raises
    ------
    PgOutputError
        There is no built-in type of that name, or `key` has a name that no column has.
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
            raise PgOutputError(
                f"the table {name!r} has no column {unknown[0]!r} for its key", code="unfit_input"
            )
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
        return f"Table({qualified(self)}: {shown})"

    def relation(self, xid: int | None = None) -> bytes:
        """Return the Relation frame.

        Parameters
        ----------
        xid : int, optional
            With an xid, the form inside a stream chunk.
        """
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
        """Return the frames that a server sends before the table's first row.

        These are the Types, then the Relation.

        Parameters
        ----------
        xid : int, optional
            With an xid, the form inside a stream chunk.
        """
        return [*(type_.frame(xid) for type_ in self.types), self.relation(xid)]

    def row(self, values: Row) -> list[Any]:
        """Make a row for :func:`pgoutput_fast.testing.encode_tuple` from Python values.

        Parameters
        ----------
        values : sequence or mapping
            A value for each column in order, or a value for each column by name; a column that the
            mapping lacks is NULL. An int, float or bool becomes the text that the server prints. A
            str is a value in text format, bytes are a value in binary format. A pair of "t" or "b"
            and a value sets the format. None is NULL, UNCHANGED is an unchanged TOAST value.

        Raises
        ------
        PgOutputError
            There are more or fewer values than columns, or a name belongs to no column.
        """
        if isinstance(values, Mapping):
            names = [column.name for column in self.columns]
            unknown = [name for name in values if name not in names]
            if unknown:
                raise PgOutputError(f"{self!r} has no column {unknown[0]!r}", code="unfit_input")
            values = [values.get(name) for name in names]
        if len(values) != len(self.columns):
            raise PgOutputError(
                f"{self!r} has {len(self.columns)} columns, and {len(values)} values were given",
                code="unfit_input",
            )
        return [text_of(value) for value in values]


def text_of(value: Any) -> Any:
    """Return a bool, int or float as the server prints it, and any other value unchanged.

    Parameters
    ----------
    value : object
    """
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        special = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        shown = repr(value)
        return special.get(shown, shown.removesuffix(".0"))
    return value


def _type_of(type_: TypeSpec) -> tuple[int, int]:
    """Return the OID and the modifier of a type."""
    if isinstance(type_, UserType):
        return type_.oid, -1
    if isinstance(type_, tuple):
        return _type_of(type_[0])[0], type_[1]
    if isinstance(type_, int):
        return type_, -1
    matched = _WITH_MODIFIER.fullmatch(type_)
    name = matched[1] if matched else type_
    if name not in _OIDS:
        raise PgOutputError(
            f"no built-in type has the name {type_!r}",
            code="unfit_input",
            hint="Give its OID, or a UserType",
        )
    if matched is None:
        return _OIDS[name], -1
    first, second = int(matched[2]), int(matched[3] or 0)
    if name == "numeric":
        return _OIDS[name], (first << 16 | second & 0x7FF) + _HEADER
    return _OIDS[name], first + _HEADER * (name in ("varchar", "bpchar"))
