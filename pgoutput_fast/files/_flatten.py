"""The rows of a file: a ChangeBatch whose structs `before` and `after` are made columns."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.captured.stored import renamed, stored, stored_type

CHANGE_COLUMNS = (
    *("op", "xid", "subxid", "lsn", "commit_lsn", "commit_time", "seq", "old_kind"),
    "unchanged",
)
"""The columns of a ChangeBatch that a file has beside those of the table, by the same names."""

_NAME_KEYS = (b"pgoutput.namespace", b"pgoutput.relation")


class FileColumn(NamedTuple):
    """A column of a file, and where it comes from.

    Fields: name; part ("change", "after" or "before"); column (the table's name for it, None for a
    part that is "change"); type (Arrow's).
    """

    name: str
    part: str
    column: str | None
    type: Any


class Shape:
    """How the batches of one schema become rows of a file.

    Parameters
    ----------
    changes : pyarrow.Schema
        The schema of a ChangeBatch.
    before : bool
        Whether the old row is wanted too.

    Attributes
    ----------
    schema : pyarrow.Schema
    relation_id : int
    digest : str
        Of the schema without the table's name, which may change.
    columns : list of FileColumn
    """

    def __init__(self, changes: Any, *, before: bool) -> None:
        fields = {field.name: field for field in changes}
        after = list(fields["after"].type)
        names = column_names([field.name for field in after])
        self._before = before
        self._names = {
            field.name: name for field, name in zip(after, names, strict=True) if field.name != name
        }
        metadata = changes.metadata
        described = {one["name"]: one for one in json.loads(metadata[b"pgoutput.columns"])}
        self._not_keys = [
            name
            for field, name in zip(after, names, strict=True)
            if not described[field.name]["key"]
        ]
        self.columns: list[FileColumn] = []
        made = []

        def add(field: Any, name: str, part: str, column: str | None) -> None:
            made.append(pa.field(name, stored_type(field.type), metadata=field.metadata))
            self.columns.append(FileColumn(name, part, column, made[-1].type))

        for name in CHANGE_COLUMNS[:-1]:
            add(fields[name], name, "change", None)
        for field, name in zip(after, names, strict=True):
            add(field, name, "after", field.name)
        if before:
            taken = {*CHANGE_COLUMNS, *names}
            for field in after:
                add(field, _free(f"before_{field.name}", taken), "before", field.name)
        add(fields["unchanged"], "unchanged", "change", None)
        told = [
            {"name": one.name, "part": one.part, "column": one.column}
            for one in self.columns
            if one.column is not None
        ]
        self.schema = pa.schema(
            made, metadata={**metadata, b"pgoutput.file_columns": json.dumps(told).encode()}
        )
        self.relation_id = int(metadata[b"pgoutput.relation_id"])
        unnamed = {
            key: value for key, value in self.schema.metadata.items() if key not in _NAME_KEYS
        }
        self.digest = schema_digest(self.schema.with_metadata(unnamed))

    def rows(self, batch: Any) -> Any:
        """The rows of a batch.

        A delete has no new row. There the table's columns have the old row, as far as the server
        sent it, so that they say which row was deleted. The columns that it did not send are named
        in `unchanged`.
        """
        new, old = (batch.column(name).flatten() for name in ("after", "before"))
        unchanged = batch.column("unchanged")
        if self._names and unchanged.null_count < len(unchanged):
            unchanged = renamed(unchanged, self._names)
        deletes = pc.equal(batch.column("op"), "delete").to_numpy(zero_copy_only=False)
        if deletes.any():
            new = [chosen(one, other, deletes) for one, other in zip(new, old, strict=True)]
            keys = deletes & pc.equal(batch.column("old_kind"), "K").fill_null(False).to_numpy(
                zero_copy_only=False
            )
            if self._not_keys and keys.any():
                names = pa.array([self._not_keys], unchanged.type)
                unchanged = pa.concat_arrays([unchanged, names]).take(
                    pa.array(np.where(keys, len(unchanged), np.arange(len(unchanged))))
                )
        head = [batch.column(name) for name in CHANGE_COLUMNS[:-1]]
        columns = [*head, *new, *(old if self._before else ()), unchanged]
        made = [
            column if column.type == wanted.type else stored(column)
            for column, wanted in zip(columns, self.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(made, schema=self.schema)


def schema_digest(schema: Any) -> str:
    """A digest of all in which schemas may differ: names, types and metadata."""
    told = [
        [[field.name, str(field.type), sorted((field.metadata or {}).items())] for field in schema],
        sorted(schema.metadata.items()),
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def chosen(one: Any, other: Any, from_other: Any) -> Any:
    """The values of `one`, or those of `other` where `from_other` is true; of any type."""
    rows = np.arange(len(one))
    return pa.concat_arrays([one, other]).take(
        pa.array(np.where(from_other, rows + len(one), rows))
    )


def column_names(columns: list[str]) -> list[str]:
    """The names that a table's columns have in a file.

    They are the table's own. A column that is named like one of :data:`CHANGE_COLUMNS` gets
    ``after_`` before its name, and a name that is still taken gets ``_`` behind it.
    """
    taken = set(CHANGE_COLUMNS)
    found: dict[int, str] = {}
    for i, name in enumerate(columns):
        if name not in taken:
            found[i] = _free(name, taken)
    for i, name in enumerate(columns):
        if i not in found:
            found[i] = _free(f"after_{name}", taken)
    return [found[i] for i in range(len(columns))]


def _free(name: str, taken: set[str]) -> str:
    """The name with as many ``_`` behind it as make it new; it is added to `taken`."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
