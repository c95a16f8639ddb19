"""The columns of a table in a change batch, and the versions that can be folded together.

ALTER TABLE either leaves the stored rows as they are or rewrites them, and the stream does not say
which. Changes from before and after a rewrite can't be folded together: the rewrite may have
replaced the values that came before it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from ..errors import PgOutputError
from ..types.resolve import numeric_modifier
from ..types.table import BY_ARRAY_OID, BY_OID

if TYPE_CHECKING:
    import pyarrow as pa

_VARCHAR, _TEXT, _NUMERIC, _VARBIT = 1043, 25, 1700, 1562
_TIMES = {1083, 1114, 1184, 1266}  # time, timestamp, and both with time zone
_MOST_DIGITS_OF_SECONDS = 6


DIGITS = " of digits, from binary format"
"""Suffix of `ColumnVersion.form` for a column of digits."""
DIGITS_KEY = b"pgoutput.digits"
"""Key in a change batch's metadata, whose value lists the columns of digits."""


class ColumnVersion(NamedTuple):
    """A column in one version of a relation.

    Attributes
    ----------
    name : str
    type : pyarrow.DataType
    type_id, type_modifier : int or None
        None if the batch lacks them.
    is_digits : bool
        Whether the column has digits, from values in binary format. In text format, the same type
        gives a text.
    """

    name: str
    type: pa.DataType
    type_id: int | None
    type_modifier: int | None
    is_digits: bool = False

    @property
    def form(self) -> str:
        """The Arrow type as text, and `DIGITS` for digits: a target's column has one form."""
        return f"{self.type}{DIGITS}" if self.is_digits else str(self.type)


class Version(NamedTuple):
    """The version of a table that a change batch describes.

    Attributes
    ----------
    table : str
        The table's name in errors.
    relation_id : int or None
        None if the batch lacks it, because other software wrote its file.
    replica_identity : str or None
    key : tuple of str
        The columns that the Relation message flags as the key.
    columns : tuple of ColumnVersion
    """

    table: str
    relation_id: int | None
    replica_identity: str | None
    key: tuple[str, ...]
    columns: tuple[ColumnVersion, ...]


def version_of(schema: pa.Schema) -> Version:
    """Read the table and its columns from the schema of a change batch.

    Raises
    ------
    PgOutputError
        The schema is not that of a change batch.
    """
    import pyarrow as pa

    index = schema.get_field_index("after")
    if index < 0 or not pa.types.is_struct(schema.field(index).type):
        raise PgOutputError(
            "the changes have no struct column 'after'",
            code="unfit_input",
            hint="Give ChangeBatches, or record batches "
            f"with their columns, not one with {', '.join(schema.names) or 'no columns'}",
        )
    row = schema.field(index).type
    metadata = schema.metadata or {}
    described = {
        column["name"]: column for column in json.loads(metadata.get(b"pgoutput.columns", b"[]"))
    }
    digits = json.loads(metadata.get(DIGITS_KEY, b"[]"))
    columns = tuple(
        ColumnVersion(
            field.name,
            field.type,
            described.get(field.name, {}).get("type_id"),
            described.get(field.name, {}).get("type_modifier"),
            field.name in digits,
        )
        for field in (row.field(i) for i in range(row.num_fields))
    )
    if b"pgoutput.relation_id" not in metadata:
        return Version("the table", None, None, (), columns)
    namespace, name = (
        metadata[b"pgoutput." + part].decode() for part in (b"namespace", b"relation")
    )
    return Version(
        f"{namespace}.{name}",
        int(metadata[b"pgoutput.relation_id"]),
        metadata[b"pgoutput.replica_identity"].decode(),
        tuple(json.loads(metadata[b"pgoutput.key_columns"])),
        columns,
    )


def keeps_values(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether ALTER TYPE from one type and modifier to another leaves the stored rows as they are.

    Otherwise PostgreSQL rewrites the table, by an expression that may change each value. In
    PostgreSQL, ``ATColumnChangeRequiresRewrite`` and the support functions of casts decide this.
    """
    (old_type, before), (new_type, after) = old, new
    if old == new:
        return True
    if new_type == _TEXT or (new_type == _VARCHAR and after == -1):
        return old_type in (_TEXT, _VARCHAR)
    if old_type != new_type:
        return False
    if after == -1:
        return old_type in (_NUMERIC, _VARBIT) or old_type in _TIMES
    if old_type in (_VARCHAR, _VARBIT):
        return -1 < before <= after
    if old_type in _TIMES:
        return after >= _MOST_DIGITS_OF_SECONDS or -1 < before <= after
    if old_type == _NUMERIC and before != -1:
        # A numeric modifier is (precision << 16 | scale) + 4, the size of a header.
        digits, scale = divmod(before - 4, 1 << 16)
        new_digits, new_scale = divmod(after - 4, 1 << 16)
        return scale == new_scale and digits <= new_digits
    return False


def shown_type(oid: int, modifier: int | None) -> str:
    """Return PostgreSQL's name of a type with its modifier, or its OID for a user-defined type."""
    array_of = BY_ARRAY_OID.get(oid)
    entry = array_of or BY_OID.get(oid)
    name = f"type {oid}" if entry is None else entry.name
    shape = numeric_modifier(modifier) if modifier is not None and name == "numeric" else None
    if shape is not None:
        name += f"({shape[0]},{shape[1]})"
    elif modifier is not None and modifier >= 0:
        is_length = name in ("varchar", "bpchar")
        name += f"({modifier - 4 if is_length else modifier})"
    return f"{name}[]" if array_of is not None else name


def check_follows(old: Version, new: Version) -> None:
    """Refuse changes that can't be folded together with the changes before.

    Raises
    ------
    PgOutputError
        The changes are of another table, or a column was altered in a way that rewrites its values.
    """
    if old.relation_id != new.relation_id:
        raise PgOutputError(
            f"changes of two tables, {old.table} (relation id {old.relation_id}) and {new.table} "
            f"({new.relation_id}), can't be folded together",
            code="unfit_input",
            table=new.table,
            hint="Give the changes of one table. A table that was dropped and created again is "
            "another table",
        )
    before = {column.name: column for column in old.columns}
    for column in new.columns:
        then = before.get(column.name)
        if then is None:
            continue
        if not _keeps(then, column):
            raise PgOutputError(
                f"{new.table}: the type of column {column.name} was altered between the changes, "
                f"from {_described(then)} to {_described(column)}. The server may have converted "
                "existing values, and the stream does not say to what. Fold the changes before and "
                "after the alteration separately, and take a new snapshot of the table in between",
                code="unfit_schema",
                table=new.table,
            )


def _keeps(old: ColumnVersion, new: ColumnVersion) -> bool:
    if None in (old.type_id, old.type_modifier, new.type_id, new.type_modifier):
        return bool(old.type == new.type)
    then, now = (old.type_id, old.type_modifier), (new.type_id, new.type_modifier)
    return keeps_values(then, now)  # type: ignore[arg-type]  # none of them is None


def _described(column: ColumnVersion) -> str:
    if column.type_id is None:
        return str(column.type)
    return shown_type(column.type_id, column.type_modifier)
