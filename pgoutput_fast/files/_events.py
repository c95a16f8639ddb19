"""Make the tables of events (frames that are no rows) and of errors (frames that were refused)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pgoutput_fast.captured.windows import events_that_count
from pgoutput_fast.columnar.decoder import ColumnarDecoder
from pgoutput_fast.columnar.fields import EPOCH_SHIFT
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.values import timestamp_form

if TYPE_CHECKING:
    from pgoutput_fast.captured.units import Chunk

_NAMES = {
    "C": "commit",
    "M": "message",
    "O": "origin",
    "T": "truncate",
    "A": "stream_abort",
    "c": "stream_commit",
    "p": "stream_prepare",
    "b": "begin_prepare",
    "P": "prepare",
    "K": "commit_prepared",
    "r": "rollback_prepared",
}
"""Tag → the event's name. Relation and Type are left out, as the files' schemas say the same, and
Stream Start and Stop, as they do not matter once rows are in order."""

EVENTS = pa.schema(
    [
        ("event", pa.utf8()),
        ("xid", pa.uint32()),
        ("subxid", pa.uint32()),
        ("lsn", pa.uint64()),
        ("commit_lsn", pa.uint64()),
        ("end_lsn", pa.uint64()),
        ("commit_time", pa.timestamp("us", "UTC")),
        ("prefix", pa.utf8()),
        ("content", pa.binary()),
        ("details", pa.utf8()),
    ]
)

ERRORS = pa.schema(
    [
        ("file", pa.utf8()),
        ("lsn", pa.uint64()),
        ("tag", pa.utf8()),
        ("code", pa.utf8()),
        ("offset", pa.int64()),
        ("message", pa.utf8()),
        ("data", pa.binary()),
    ]
)

_IN_COLUMNS = {"xid", "subxid", "commit_lsn", "end_lsn", "commit_time", "prefix", "content"}


def events_of(decoder: ColumnarDecoder, chunk: Chunk) -> Any:
    """The events of the decoder's last call that count, as a record batch."""
    events, lsns = decoder.events, chunk.lsns
    places = np.flatnonzero(np.isin(events.array["tag"], [ord(tag) for tag in _NAMES]))
    places = places[events_that_count(chunk, events.array["frame"][places])]
    found = events.array[places]
    tags = pa.array(found["tag"]).dictionary_encode()
    names = [_NAMES[chr(tag)] for tag in tags.dictionary.to_pylist()]
    ends = found["commit_lsn"] > 0
    times = found["commit_time"] + EPOCH_SHIFT
    # Commits have no message, as the array has all of their fields.
    messages: list[Any] = [None] * len(found)
    for i in np.flatnonzero(found["tag"] != ord("C")):
        messages[i] = events[places[i]].message
    columns = [
        pa.DictionaryArray.from_arrays(tags.indices, names).dictionary_decode(),
        _unless(found["xid"] == 0, found["xid"]),
        _unless(found["subxid"] == 0, found["subxid"]),
        pa.nulls(len(found), pa.uint64()) if lsns is None else pa.array(lsns[found["frame"]]),
        _unless(~ends, found["commit_lsn"]),
        _unless(~ends, found["end_lsn"]),
        _unless(~ends, times).cast(pa.timestamp("us", "UTC")),
        pa.array([getattr(message, "prefix", None) for message in messages], pa.utf8()),
        pa.array([getattr(message, "content", None) for message in messages], pa.binary()),
        pa.array([_details(message) for message in messages], pa.utf8()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=EVENTS)


def _unless(missing: Any, values: Any) -> Any:
    return pa.array(np.ascontiguousarray(values), mask=missing)


def _details(message: Any) -> str | None:
    """The fields of a message that have no column of their own, as JSON."""
    if message is None:
        return None
    told: dict[str, Any] = {}
    for name in message.__match_args__:
        value = getattr(message, name)
        if name in _IN_COLUMNS:
            continue
        if name == "lsn" or name.endswith("_lsn"):
            value = None if value is None else format_lsn(value)
        elif name.endswith("_time"):
            value = None if value is None else timestamp_form(value, "+00")
        told["message_lsn" if name == "lsn" else name] = value
    for name in ("cascade", "restart_identity", "transactional"):
        if hasattr(message, name):
            told[name] = getattr(message, name)
    return json.dumps(told)


def errors_of(decoder: ColumnarDecoder, path: Path) -> Any:
    """The frames that the decoder's last call refused, as a record batch."""
    bad = pa.record_batch(decoder.errors)
    columns = [bad.column(field.name) for field in ERRORS if field.name != "file"]
    files = pa.array([path.name] * len(bad), pa.utf8())
    return pa.RecordBatch.from_arrays([files, *columns], schema=ERRORS)
