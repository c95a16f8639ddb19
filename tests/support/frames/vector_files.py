"""Reads tests/vectors; extract_vectors.py says what is in its files."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from collections.abc import Callable
from typing import Any

from support import paths

VECTORS = paths.TESTS / "vectors"


def read_vectors() -> list[dict[str, Any]]:
    """Every vector, its frame and those of `before` as bytes, `columns` as (kind, bytes)."""
    vectors = []
    for path in sorted(VECTORS.glob("*.json")):
        content = json.loads(path.read_text(encoding="ascii"))
        context = [bytes.fromhex(frame) for frame in content.get("context", ())]
        for vector in content.get("vectors", ()):
            frame = vector["frame"] = bytes.fromhex(vector["frame"])
            vector["before"] = [context[number] for number in vector["before"]]
            for data in vector.get("tuples", {}).values():
                data["offsets"] = [column[1] if column[1:] else None for column in data["columns"]]
                data["columns"] = [
                    (kind, frame[place[0] : place[0] + place[1]] if place else None)
                    for kind, *place in data["columns"]
                ]
            vectors.append(vector)
    return vectors


def read_sequences() -> list[dict[str, Any]]:
    """Every sequence of frames for one decoder, the steps' frames as bytes."""
    sequences: list[dict[str, Any]] = json.loads(
        (VECTORS / "sequences.json").read_text(encoding="ascii")
    )["sequences"]
    for sequence in sequences:
        for step in sequence["steps"]:
            if "frame" in step:
                step["frame"] = bytes.fromhex(step["frame"])
    return sequences


_MAKERS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": lambda text: float("nan") if text == "nan" else float.fromhex(text),
    "Decimal": decimal.Decimal,
    "str": str,
    "bytes": bytes.fromhex,
    "UUID": uuid.UUID,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
}


def python_value(told: list[str]) -> Any:
    """The Python object that a vector tells as [type, text]."""
    return _MAKERS[told[0]](told[1])


def field_value(told: Any) -> Any:
    """A field's value: bytes are told as {"bytes": …}, sequences as lists."""
    if isinstance(told, dict):
        return bytes.fromhex(told["bytes"])
    if isinstance(told, list):
        return tuple(field_value(item) for item in told)
    return told
