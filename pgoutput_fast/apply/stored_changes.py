"""Convert change batches to the column names and types of a target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..changelog.stored_types import renamed, stored_type, to_stored_type
from ..columnar.mapping import is_digits
from ..errors import PgOutputError
from .folding import NetChanges
from .targets import AddedColumn, StateColumn
from .versions import DIGITS_KEY, Version, version_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..columnar._pure_batch import ChangeBatch
    from .targets import Alteration


class BatchConversion(NamedTuple):
    """The conversion of batches with one schema to a target's batches.

    Attributes
    ----------
    schema : pyarrow.Schema
        The schema of the target's batches.
    names : dict of str to str
        The stored names of columns, where they differ from the server's names.
    """

    schema: pa.Schema
    names: dict[str, str]

    @classmethod
    def of(cls, changes: pa.Schema, columns: Sequence[StateColumn]) -> BatchConversion:
        """Return the conversion for a schema, by the columns of the table state."""
        stored_names = {column.name: column.stored_name for column in columns}
        names = {name: stored_names[name] for name in stored_names if stored_names[name] != name}
        metadata = dict(changes.metadata)
        if names:
            described = json.loads(metadata[b"pgoutput.columns"])
            for column in described:
                column["name"] = names.get(column["name"], column["name"])
            metadata[b"pgoutput.columns"] = json.dumps(described).encode()
            key = json.loads(metadata[b"pgoutput.key_columns"])
            metadata[b"pgoutput.key_columns"] = json.dumps(
                [names.get(name, name) for name in key]
            ).encode()
        row = pa.struct(stored_fields(changes.field("after").type, names))
        fields = [
            field.with_type(row) if field.name in ("before", "after") else field
            for field in changes
        ]
        return cls(pa.schema(fields, metadata=metadata), names)

    def batch(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """Convert a batch of changes."""
        if changes.schema.equals(self.schema):
            return changes
        columns = []
        for field, column in zip(self.schema, changes.columns, strict=True):
            array = column
            if field.name in ("before", "after"):
                array = _row(column, field.type)
            elif field.name == "unchanged" and self.names:
                array = renamed(column, self.names)
            columns.append(array)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


NO_COLUMN = "no columns"
_SOME_COLUMN = pa.struct([pa.field(NO_COLUMN, pa.bool_())])
"""The only column, always null, of a table without columns: DuckDB and Parquet need a column."""


def with_a_column(changes: pa.RecordBatch) -> pa.RecordBatch:
    """Return changes whose rows have a column, even if their table has none."""
    if changes.schema.field("after").type.num_fields:
        return changes
    for side in ("before", "after"):
        at = changes.schema.get_field_index(side)
        rows = changes.column(at)
        column = pa.StructArray.from_arrays(
            [pa.nulls(len(rows), pa.bool_())], fields=list(_SOME_COLUMN), mask=rows.is_null()
        )
        changes = changes.set_column(at, changes.schema.field(at).with_type(_SOME_COLUMN), column)
    return changes


_CELLS = 1 << 20
"""Maximum rows times fields of a table that joins batches of several layouts: most are null."""


def joined(batches: Sequence[pa.RecordBatch]) -> list[pa.Table]:
    """Join change batches, in their order, to few tables, for targets with a cost per table.

    The rows of a table have the fields of all its batches. Fields that a batch lacks are null.
    """
    groups: list[list[pa.RecordBatch]] = []
    fields: dict[str, pa.Field] = {}
    others: list[pa.Field] = []
    rows = 0
    for batch in batches:
        own = {field.name: field for field in batch.schema.field("after").type}
        rest = [field for field in batch.schema if field.name not in ("before", "after")]
        rows += batch.num_rows
        fits = groups and rest == others and (own == fields or (
            rows * len(fields | own) <= _CELLS
            and all(fields.get(name, field) == field for name, field in own.items())
        ))  # fmt: skip
        if not fits:
            groups.append([])
            fields, others, rows = {}, rest, batch.num_rows
        groups[-1].append(batch)
        fields = fields | own
    return [_joined(group) for group in groups]


def _joined(batches: list[pa.RecordBatch]) -> pa.Table:
    if all(batch.schema == batches[0].schema for batch in batches):
        return pa.Table.from_batches(batches)
    columns = {
        field.name: _joined_rows([batch.column(field.name) for batch in batches])
        if field.name in ("before", "after")
        else pa.chunked_array([batch.column(field.name) for batch in batches])
        for field in batches[0].schema
    }
    return pa.table(columns)


def _joined_rows(columns: Sequence[pa.StructArray]) -> pa.StructArray:
    """Join rows with different fields. Nulls are made once per gap, not once per batch."""
    fields: dict[str, pa.Field] = {}
    parts: dict[str, list[pa.Array]] = {}
    ends: dict[str, int] = {}
    done = 0
    for column in columns:
        for field, part in zip(column.type, column.flatten(), strict=True):
            fields.setdefault(field.name, field)
            arrays = parts.setdefault(field.name, [])
            if lacking := done - ends.get(field.name, 0):
                arrays.append(pa.nulls(lacking, field.type))
            arrays.append(part)
            ends[field.name] = done + len(column)
        done += len(column)
    for name, arrays in parts.items():
        if lacking := done - ends[name]:
            arrays.append(pa.nulls(lacking, fields[name].type))
    return pa.StructArray.from_arrays(
        [pa.concat_arrays(arrays) for arrays in parts.values()],
        fields=list(fields.values()),
        mask=pa.concat_arrays([column.is_null() for column in columns]),
    )


def target_batch(
    changes: ChangeBatch, decoded: pa.RecordBatch, *, is_binary: bool
) -> pa.RecordBatch:
    """Return changes as a target gets them.

    They have at least one column, and the metadata names the columns of digits.

    Parameters
    ----------
    changes : ChangeBatch
    decoded : pyarrow.RecordBatch
        The changes of `changes` that count.
    is_binary : bool
        Whether the session sends values in binary format.
    """
    batch = with_a_column(decoded)
    types = changes.layout.plan.column_types
    names = [column.name for column in changes.layout.columns if is_digits(types[column.position])]
    if not (is_binary and names):
        return batch
    metadata = {**batch.schema.metadata, DIGITS_KEY: json.dumps(names).encode()}
    return batch.replace_schema_metadata(metadata)


def stored_fields(row: pa.StructType, names: Mapping[str, str]) -> list[pa.Field]:
    """Return the fields of a row with a target's names and types."""
    return [pa.field(names.get(field.name, field.name), stored_type(field.type)) for field in row]


def _row(column: pa.StructArray, type_: pa.StructType) -> pa.StructArray:
    parts = [
        part if part.type == field.type else to_stored_type(part)
        for part, field in zip(column.flatten(), type_, strict=True)
    ]
    mask = None if not column.null_count else column.is_null()
    return pa.StructArray.from_arrays(parts, fields=list(type_), mask=mask)


def stored_version(schema: pa.Schema) -> Version:
    """Return the version of a change batch, with a target's types."""
    version = version_of(schema)
    return version._replace(
        columns=tuple(column._replace(type=stored_type(column.type)) for column in version.columns)
    )


def check_copied_keys(rows: pa.RecordBatch) -> None:
    """Refuse a snapshot's rows with NULL in the key, which a policy may have made.

    Later changes could not tell several such rows apart.

    Raises
    ------
    PgOutputError
        A key column has a null.
    """
    metadata = rows.schema.metadata
    if metadata[b"pgoutput.replica_identity"] not in (b"d", b"i"):
        return  # with FULL or NOTHING, the Relation's flags say nothing of a key
    after = rows.column("after").filter(pc.equal(rows.column("op"), "read"))
    for name in json.loads(metadata[b"pgoutput.key_columns"]):
        if pc.struct_field(after, [name]).null_count:
            table = ".".join(
                metadata[b"pgoutput." + part].decode() for part in (b"namespace", b"relation")
            )
            raise PgOutputError(
                f"the snapshot of {table} has a row with NULL in the key column {name!r}, because "
                "a policy replaced the value by NULL. Choose another policy, such as text",
                code="null_key",
                table=table,
            )


def with_added(net: NetChanges, alterations: Sequence[Alteration]) -> NetChanges:
    """Fill in the values of added columns in rows that were inserted before, in the same window.

    The catalogue has these values. Rows that the target has already get them with the column.
    """
    added = {
        alteration.column: alteration.value
        for alteration in alterations
        if isinstance(alteration, AddedColumn)
    }
    if not added:
        return net
    return net._replace(batches=lambda: (_filled(rows, added) for rows in net.batches()))


def _filled(rows: pa.RecordBatch, added: dict[str, pa.Array]) -> pa.RecordBatch:
    unchanged = rows.column("unchanged")
    born = pc.and_(pc.not_equal(rows.column("expects"), "present"), rows.column("from_").is_null())
    if not pc.any(pc.and_(born, unchanged.is_valid())).as_py():
        return rows
    row = rows.column("row")
    values = {field.name: row.field(i) for i, field in enumerate(row.type)}
    lists, is_born = unchanged.to_pylist(), born.to_pylist()
    for name, value in added.items():
        if name not in values:
            continue
        lacks = [
            born_here and names is not None and name in names
            for names, born_here in zip(lists, is_born, strict=True)
        ]
        if any(lacks):
            column = values[name]
            if value.type != column.type:
                value = value.cast(column.type)
            # pyarrow's if_else does not take extension types.
            at = [len(column) if lack else i for i, lack in enumerate(lacks)]
            values[name] = pa.concat_arrays([column, value]).take(pa.array(at))
    left = [
        names
        if names is None or not is_new
        else [name for name in names if name not in added] or None
        for names, is_new in zip(lists, is_born, strict=True)
    ]
    for name, column in (
        ("unchanged", pa.array(left, unchanged.type)),
        ("row", pa.StructArray.from_arrays(list(values.values()), fields=list(row.type))),
    ):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), column)
    return rows
