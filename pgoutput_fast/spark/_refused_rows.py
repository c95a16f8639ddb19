"""Decode rows with refused values again, with the bytes of each such value in its place.

Mode "envelope" of the source makes records of these rows. So no row is lost, and no value is null
without an error beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.columnar.decoder import ColumnarDecoder
from pgoutput_fast.columnar.fields import EPOCH_SHIFT, Field
from pgoutput_fast.columnar.mapping import text_field
from pgoutput_fast.columnar.schema import Layout, layout_of
from pgoutput_fast.columnar.selection import Selection

if TYPE_CHECKING:
    from pgoutput_fast.changelog.changes import Refusal
    from pgoutput_fast.changelog.read_frames import FrameRun
    from pgoutput_fast.decoding.plan import RelationPlan
    from pgoutput_fast.errors import DecodeError

ERRORS_TYPE = pa.list_(
    pa.struct(
        {"code": pa.string(), "column": pa.string(), "message": pa.string(), "raw": pa.binary()}
    )
)
"""The refused values of a row, with their errors."""

_TEXT, _BYTES = "text", "bytes"


class RefusedRows(NamedTuple):
    """Rows of one version of a table.

    Attributes
    ----------
    relation : Relation
    changes : pyarrow.RecordBatch
        With the columns of a ChangeBatch.
    errors : list of list of dict
        For each row, a value of `ERRORS_TYPE`.
    """

    relation: Any
    changes: pa.RecordBatch
    errors: list[list[dict[str, Any]]]


class _RefusedRow(NamedTuple):
    """A row with its refused values."""

    data: bytes
    frame: int
    """The index of the row's frame in the run."""
    plan: RelationPlan
    forms: Mapping[str, str]
    """The columns to decode as text or as bytes instead of by their type."""
    errors: list[dict[str, Any]]

    def without(self, error: DecodeError) -> _RefusedRow:
        """Return this row with one more refused column, which becomes text or else bytes."""
        column, errors = error.column or "", self.errors
        if column not in self.forms:
            row_error = {
                "code": error.code, "column": column, "message": str(error.args[0]),
                "raw": _raw(self.data, error.offset),
            }  # fmt: skip
            errors = [*errors, row_error]
        form = _BYTES if column in self.forms or error.code == "bad_encoding" else _TEXT
        return self._replace(forms={**self.forms, column: form}, errors=errors)


def _raw(frame: bytes, offset: int) -> bytes:
    """Return the value at an offset; its length stands before it."""
    return frame[offset : offset + int.from_bytes(frame[offset - 4 : offset], "big")]


def refused_rows(
    frame_run: FrameRun,
    refusals: Sequence[Refusal],
    decoding: Mapping[str, Any],
    explain: Callable[[str], str],
) -> Iterator[RefusedRows]:
    """Decode refused rows again, each refused value as text, or else as bytes.

    Parameters
    ----------
    frame_run : FrameRun
    refusals : sequence of Refusal
        The refused frames of the run.
    decoding : dict
        Arguments of the ColumnarDecoder that refused the frames.
    explain : callable
        Rewrites the text of an error for the source, for example to name its options.

    Raises
    ------
    PgOutputError
        A frame was refused for another reason than a column's value.
    """
    rows = []
    for relation, error, bad in refusals:
        del relation
        if bad is None or bad.plan is None or bad.error.column is None:
            raise error
        rows.append(_RefusedRow(bad.data, bad.frame, bad.plan, {}, []).without(bad.error))
    # Rows with the same refused columns are decoded together. Each round makes one more column of
    # each remaining row text or bytes, so the loop ends.
    while rows:
        groups: dict[tuple[int, frozenset[tuple[str, str]]], list[_RefusedRow]] = {}
        for row in rows:
            key = id(row.plan), frozenset(row.forms.items())
            groups.setdefault(key, []).append(row)
        rows = []
        for group in groups.values():
            decoder = _decoder(group[0], frame_run, decoding)
            frames = [group[0].plan.relation.frame, *(row.data for row in group)]
            # The column lsn gets the index of each row in the group.
            for changes in decoder.decode(frames, lsns=np.array([0, *range(len(group))])):
                batch = pa.record_batch(changes)
                batch_rows = [group[i] for i in batch.column("lsn").to_pylist()]
                for row_error in itertools.chain.from_iterable(row.errors for row in batch_rows):
                    row_error["message"] = explain(row_error["message"])
                errors = [row.errors for row in batch_rows]
                yield RefusedRows(changes.relation, _placed(batch, frame_run, batch_rows), errors)
            for bad in decoder.errors:
                if bad.error.column is None:
                    raise bad.error
                rows.append(group[bad.frame - 1].without(bad.error))


def _decoder(row: _RefusedRow, frame_run: FrameRun, decoding: Mapping[str, Any]) -> ColumnarDecoder:
    """Return a decoder for rows with the same refused columns as this row."""
    plan = row.plan
    natural = layout_of(plan, "spark", Selection())
    columns = []
    for field in natural.columns:
        form = row.forms.get(field.name)
        if form is not None:
            new_field = Field("", "z", text=bytes, binary=bytes)
            if form == _TEXT:
                new_field = text_field(plan.column_types[field.position], plan.settings)
            field = replace(new_field, name=field.name, position=field.position)
        columns.append(field)
    layout = Layout(plan, tuple(columns), natural.head, natural.metadata)
    arguments = {name: value for name, value in decoding.items() if name != "tables"}
    arguments |= {
        "on_error": "collect",
        "encoding": frame_run.encoding,
        "layouts": lambda _: layout,
    }
    return ColumnarDecoder(**arguments)


def _placed(
    batch: pa.RecordBatch, frame_run: FrameRun, rows: Sequence[_RefusedRow]
) -> pa.RecordBatch:
    """Return changes with the values of the columns beside their frames filled in."""
    at = pa.array([row.frame for row in rows])
    beside = {
        name: frame_run.beside.column(name).take(at).combine_chunks()
        for name in ("commit_lsn", "commit_time", "xid", "seq")
    }
    beside["commit_time"] = pc.add(beside["commit_time"], EPOCH_SHIFT)
    beside["lsn"] = pa.array(frame_run.lsns).take(at)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if frame_run.read.snapshot is not None:
        beside["lsn"] = beside["commit_lsn"]
        columns["op"] = pa.array(["read"] * len(batch), pa.string())
    for name, values in beside.items():
        columns[name] = values.cast(columns[name].type)
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)
