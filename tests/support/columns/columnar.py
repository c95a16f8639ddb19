"""Columnar decoding by an implementation of choice, and what it gave as plain data."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from support.frames.comparison import Escaped, refused

import pgoutput_fast as pf
from pgoutput_fast import _impl

IMPLEMENTATIONS = ("cython", "python")


@contextlib.contextmanager
def chosen(implementation: str) -> Iterator[None]:
    """Decoders that are made inside, and what is exported there, are of this implementation."""
    before = _impl.IMPLEMENTATION
    _impl.IMPLEMENTATION = implementation
    try:
        yield
    finally:
        _impl.IMPLEMENTATION = before


def exact(array: Any) -> tuple[Any, ...]:
    """An array to the last byte, what stands in the slots of nulls too."""
    assert array.offset == 0
    length = len(array)
    if isinstance(array, pa.ExtensionArray):
        return exact(array.storage)
    valid = array.is_valid().to_pylist() if array.null_count else None
    head = (str(array.type), length, array.null_count, valid)
    kind = array.type
    if pa.types.is_struct(kind):
        children = [array.field(i) for i in range(kind.num_fields)]
        return (*head, *(exact(child) for child in children))
    if pa.types.is_dictionary(kind):
        return (*head, exact(array.indices), exact(array.dictionary))
    if pa.types.is_fixed_size_list(kind):
        return (*head, exact(array.values))
    buffers = array.buffers()
    if pa.types.is_map(kind):
        ends = np.frombuffer(buffers[1], np.int32)[: length + 1].tolist()
        return (*head, ends, exact(array.keys), exact(array.items))
    if pa.types.is_list(kind):
        return (
            *head,
            np.frombuffer(buffers[1], np.int32)[: length + 1].tolist(),
            exact(array.values),
        )
    if kind in (pa.utf8(), pa.binary()):
        ends = np.frombuffer(buffers[1], np.int32)[: length + 1].tolist()
        return (*head, ends, buffers[2].to_pybytes()[: ends[-1]] if buffers[2] else b"")
    data = buffers[1].to_pybytes()
    if kind == pa.bool_():
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return (*head, bits[:length].tolist())
    return (*head, data[: length * kind.bit_width // 8])


def told(batch: Any) -> tuple[Any, ...]:
    """A batch: its schema with all metadata, its columns, what it says of itself."""
    read = pa.record_batch(batch)
    read.validate(full=True)
    schema = read.schema.to_string(truncate_metadata=False, show_field_metadata=True)
    assert pa.schema(batch).equals(read.schema, check_metadata=True)
    columns = [exact(column) for column in read.columns]
    return (
        repr(batch),
        len(batch),
        batch.num_rows,
        batch.binary,
        repr(batch.relation),
        schema,
        columns,
    )


def pickled(value: Any) -> bytes:
    """What equal values have in common, whether or not their parts are the same objects."""
    to = io.BytesIO()
    pickler = pickle.Pickler(to)
    pickler.fast = True
    pickler.dump(value)
    return to.getvalue()


def observe_call(decoder: Any, data: Any, lsns: Any = None) -> dict[str, Any]:
    """What comes of a call to the end, or to its error."""
    seen: dict[str, Any] = {"batches": [], "error": None}
    try:
        for batch in decoder.decode(data, lsns=lsns):
            seen["batches"].append(told(batch))
    except pf.DecodeError as error:
        seen["error"] = refused(error)
    except pf.PgOutputError as error:
        seen["error"] = str(error)
    except Exception as error:
        raise Escaped(f"{type(error).__name__}: {error}") from error
    seen["next"] = decoder.next_frame
    seen["events"] = decoder.events.array.tolist()
    seen["messages"] = [repr(event) for event in decoder.events]
    seen["bad"] = [(bad.frame, bad.lsn, refused(bad.error), bad.data) for bad in decoder.errors]
    seen["error batch"] = exact(pa.array(pa.record_batch(decoder.errors).to_struct_array()))
    state = decoder.state
    seen["state"] = [(name, pickled(getattr(state, name))) for name in state.__slots__]
    return seen


def observe(
    implementation: str, calls: Iterable[Any], lsns: Sequence[Any] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """What comes of several calls of one decoder, which goes on where one is refused."""
    seen = []
    with chosen(implementation):
        decoder = pf.ColumnarDecoder(**options)
        for i, data in enumerate(calls):
            seen.append(observe_call(decoder, data, None if lsns is None else lsns[i]))
            if isinstance(seen[-1]["error"], str):
                decoder.reset()
    return seen


def differences(calls: Any, **options: Any) -> list[str]:
    """Where the two implementations differ, one sentence each; empty if nowhere."""
    first, second = (observe(name, calls, **options) for name in IMPLEMENTATIONS)
    found = []
    for i, (one, other) in enumerate(zip(first, second, strict=True)):
        for name in one:
            if one[name] != other[name]:
                pairs = [(one[name], other[name])]
                if isinstance(one[name], list) and len(one[name]) == len(other[name]):
                    pairs = list(zip(one[name], other[name], strict=True))
                found += [
                    f"call {i}, {name}: {a!r:.900} against {b!r:.900}" for a, b in pairs if a != b
                ]
    return found
