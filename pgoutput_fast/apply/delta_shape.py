"""The columns of a Delta table before and after the alterations of a merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from .delta_types import conformed, stored_array, stored_type
from .targets import AddedColumn, Removed, Renamed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .targets import Alteration


class Shape(NamedTuple):
    """The columns of a table after alterations, and the source of each in existing rows.

    Attributes
    ----------
    there, schema : pyarrow.Schema
        The columns before and after the alterations.
    sources : dict of str to str, or to pyarrow.Array
        By name after the alterations: the column of the files, or one constant value.
    defaults : dict of str to pyarrow.Array
        The values of added columns in rows that are older than the column, as arrays of length 1.
    rewrites : bool
        Whether the alterations require that all files are rewritten.
    """

    there: pa.Schema
    schema: pa.Schema
    sources: dict[str, str | pa.Array]
    defaults: dict[str, pa.Array]
    rewrites: bool

    def adapted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the files with the columns of `schema`."""
        if not self.rewrites:
            return conformed(rows, self.schema)
        columns = []
        for field in self.schema:
            source = self.sources[field.name]
            if isinstance(source, str):
                columns.append(stored_array(rows.column(source), field.type))
            else:
                columns.append(pa.repeat(source[0], rows.num_rows))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def shape_of(schema: pa.Schema, alterations: Sequence[Alteration]) -> Shape:
    """Apply alterations to a schema. An alteration that the schema already has does nothing."""
    types = {field.name: field.type for field in schema}
    sources: dict[str, str | pa.Array] = {name: name for name in types}
    defaults = {}
    rewrites = False
    for alteration in alterations:
        if isinstance(alteration, AddedColumn):
            type_ = stored_type(alteration.value.type)
            value = defaults[alteration.column] = stored_array(alteration.value, type_)
            if types.get(alteration.column) == type_:
                continue
            types[alteration.column], sources[alteration.column] = type_, value
            rewrites |= not value.null_count
        elif isinstance(alteration, Removed):
            rewrites |= types.pop(alteration.column, None) is not None
            sources.pop(alteration.column, None)
        elif isinstance(alteration, Renamed):
            if alteration.column in types:
                rewrites = True
                types = {
                    alteration.name if name == alteration.column else name: of
                    for name, of in types.items()
                }
                sources[alteration.name] = sources.pop(alteration.column)
                if alteration.column in defaults:
                    defaults[alteration.name] = defaults.pop(alteration.column)
        elif alteration.column in types:
            type_ = stored_type(alteration.type)
            rewrites |= types[alteration.column] != type_
            types[alteration.column] = type_
    fields = [pa.field(name, type_) for name, type_ in types.items()]
    return Shape(schema, pa.schema(fields), sources, defaults, rewrites)
