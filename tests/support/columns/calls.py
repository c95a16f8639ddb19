"""What tests of columnar decoders share: tables, frames and what came of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from support.frames.made_vectors import TWO, insert, relation, text

import pgoutput_fast as pf

OID, OTHER = 16385, 16386
R = relation(TWO)


def batches_of(frames: list[bytes], lsns: Any = None, **options: Any) -> list[Any]:
    return list(pf.ColumnarDecoder(**options).decode(frames, lsns=lsns))


def rows(batch: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pa.record_batch(batch).to_pylist()
    return found


def column(batches: list[Any], name: str) -> list[Any]:
    return [one[name] for batch in batches for one in rows(batch)]


def i(number: int, name: str = "a", **where: Any) -> bytes:
    return insert(text(str(number)), text(name), **where)
