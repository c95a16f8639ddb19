"""Export arrays through the Arrow C data interface, by pyarrow: the twin of ``_export.pyx``."""

from __future__ import annotations

from typing import Any

from .arrays import ArrayBuffers, pyarrow
from .fields import Field
from .pyarrow_bridge import arrow_array, schema_of


def export(field: Field, column: ArrayBuffers) -> tuple[object, object]:
    """Export a column whose buffers are bytes as capsules of its Arrow schema and array.

    Parameters
    ----------
    field : Field
    column : pgoutput_fast.columnar.arrays.ArrayBuffers
    """
    capsules: tuple[object, object] = record_batch(field, column).__arrow_c_array__()
    return capsules


def record_batch(field: Field, column: ArrayBuffers) -> Any:
    """Return a pyarrow record batch with the columns of a struct."""
    arrays = [arrow_array(*pair) for pair in zip(field.children, column.children, strict=True)]
    return pyarrow().RecordBatch.from_arrays(arrays, schema=schema_of(field))
