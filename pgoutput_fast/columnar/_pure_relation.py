"""Collect the rows of one version of a relation: the twin of ``_relation.pyx``.

The columns are byte buffers until pyarrow makes arrays of them.
"""

from __future__ import annotations

from array import array
from typing import Any

from ..decoding.plan import RelationPlan
from .arrays import ArrayBuffers, bits_of, column_of, dictionary_of, validity, variable_column
from .fields import Field
from .schema import Layout

MOST_OFFSET = 0x7FFFFFFF
"""The greatest of Arrow's offsets of 32 bits."""

TargetState = list["bytes | None"]


class _Values:
    """One column of a relation, with a value for each row."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self.width = field.width
        self.present = bytearray()
        self.data = bytearray()
        self.ends = array("i", [0])

    def put(self, stored: bytes | None) -> None:
        self.present.append(stored is not None)
        self.data += bytes(self.width or 1) if stored is None and self.width >= 0 else stored or b""
        if self.width < 0:
            self.ends.append(len(self.data))

    def pad(self, count: int) -> None:
        """Append `count` nulls."""
        self.present += bytes(count)
        if self.width < 0:
            self.ends.extend([len(self.data)] * count)
        else:
            self.data += bytes(count * (self.width or 1))

    def column(self) -> ArrayBuffers:
        if self.field.is_nested:
            spans = zip(self.present, self.ends, self.ends[1:], strict=False)
            data = bytes(self.data)
            return column_of(self.field, [data[a:b] if there else None for there, a, b in spans])
        bits = validity(self.present)
        data = bits_of(self.data) if self.width == 0 else bytes(self.data)
        buffers = (bits, self.ends.tobytes(), data) if self.width < 0 else (bits, data)
        null_count = self.present.count(0)
        dictionary = dictionary_of(self.field)
        return ArrayBuffers(len(self.present), null_count, buffers, dictionary=dictionary)


class _Side:
    """The columns of the old rows (`before`) or of the new rows (`after`)."""

    def __init__(self, layout: Layout) -> None:
        self.columns = [_Values(field) for field in layout.columns]
        self.present = bytearray()
        self._missing = 0  # rows without a tuple whose nulls are not yet in the columns

    def put(self, values: TargetState | None) -> None:
        self.present.append(values is not None)
        if values is None:
            self._missing += 1
            return
        self._catch_up()
        for column, value in zip(self.columns, values, strict=True):
            column.put(value)

    def is_full(self, values: TargetState | None) -> bool:
        """Whether a column of these values would outgrow Arrow's offsets of 32 bits."""
        return any(
            len(column.data) + len(value or b"") > MOST_OFFSET
            for column, value in zip(self.columns, values or (), strict=False)
            if column.width < 0
        )

    def column(self) -> ArrayBuffers:
        self._catch_up()
        children = tuple([column.column() for column in self.columns])
        present = self.present
        return ArrayBuffers(len(present), present.count(0), (validity(present),), children)

    def _catch_up(self) -> None:
        if self._missing:
            for column in self.columns:
                column.pad(self._missing)
            self._missing = 0


class RelationRows:
    """The rows of one version of a relation that arrived since its last record batch."""

    def __init__(self, plan: RelationPlan, layout: Layout | None) -> None:
        self.plan = plan
        self.wanted = layout is not None
        self.layout = layout or Layout(plan, (), (), {})
        self.names = [field.name.encode() for field in self.layout.columns]
        self.clear()

    def clear(self) -> None:
        self.heads: list[tuple[Any, ...]] = []
        self.before, self.after = _Side(self.layout), _Side(self.layout)
        self.unchanged: dict[int, list[bytes]] = {}  # row → names
        self.unchanged_bytes = 0  # the length of the names, and one byte for each
        self.forms: dict[int, bool] = {}  # columns with by_format: whether they are in binary
        self.bytes = 0
        self.row_bytes = self.layout.row_bytes

    def unchanged_column(self) -> ArrayBuffers:
        count = len(self.heads)
        ends, names = array("i", [0]), list[bytes]()
        for row in range(count):
            names += self.unchanged.get(row, ())
            ends.append(len(names))
        present = [row in self.unchanged for row in range(count)]
        buffers = (validity(present), ends.tobytes())
        return ArrayBuffers(count, count - sum(present), buffers, (variable_column(names),))
