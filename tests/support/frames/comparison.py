"""Holds the two implementations against each other: values, types, reprs, errors, decoder states.

`observe` turns a call into plain data: what it gave, or the DecodeError that it raised. Any other
exception is an `Escaped`, which no two implementations may have in common either.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from support.frames.class_table import FIELDS, PROPERTIES

from pgoutput_fast import DecodeError

SINGLE = 40
"""Columns of a tuple that are asked for one by one; all of them are asked for at once."""


class Escaped(AssertionError):
    """Something else than a DecodeError came out of bad input."""


def refused(error: DecodeError) -> tuple[Any, ...]:
    return ("error", error.code, error.offset, error.tag, error.frame, str(error))


def observe(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What a call gives, as plain data that compares equal only if types and reprs do."""
    try:
        value = call(*arguments)
    except DecodeError as error:
        return refused(error)
    except Exception as error:
        raise Escaped(
            f"{type(error).__name__}: {error} from {call} of {arguments!r:.200}"
        ) from error
    return ("value", types_of(value), repr(value))


def types_of(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value).__name__, *(types_of(item) for item in value)
    if type(value) is dict:
        return "dict", *(types_of(item) for item in value.values())
    return type(value).__name__


def observe_tuple(data: Any, names: list[str] | None) -> list[tuple[str, Any]]:
    width = len(data)
    seen: list[tuple[str, Any]] = [
        ("len", width),
        ("repr", observe(repr, data)),
        ("hash", observe(hash, data)),
        ("kinds", [data.kind(i) for i in range(width)]),
        ("raws", observe(data.raws)),
        ("texts", observe(data.texts)),
        ("values", observe(data.values)),
        ("as_dict", observe(data.as_dict)),
        ("iter", observe(list, data)),
    ]
    for i in range(min(width, SINGLE)):
        seen.append((f"raw({i})", observe(data.raw, i)))
        seen.append((f"text({i})", observe(data.text, i)))
        seen.append((f"[{i}]", observe(data.__getitem__, i)))
        if names is not None:
            seen.append((f"[{names[i]!r}]", observe(data.__getitem__, names[i])))
    return seen


def observe_message(message: Any) -> list[tuple[str, Any]]:
    """Every field and accessor of a message, by name."""
    name = type(message).__name__
    seen: list[tuple[str, Any]] = [
        ("class", name),
        ("repr", observe(repr, message)),
        ("hash", observe(hash, message)),
        ("frame", message.frame),
        ("in_stream", message.in_stream),
        ("tag", message.tag),
    ]
    names = None
    for field in (*PROPERTIES.get(name, ()), *FIELDS[name]):
        if field in ("old", "new"):
            data = getattr(message, field)
            if data is None:
                seen.append((field, None))
            else:
                seen += [(f"{field}.{what}", result) for what, result in observe_tuple(data, names)]
            continue
        result = observe(getattr, message, field)
        seen.append((field, result))
        if field == "relation" and result[0] == "value":
            names = [column.name for column in message.relation.columns]
    return seen


def observe_decode(decode: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
    """What decoding a frame gives: the message's every part, or the error."""
    try:
        message = decode(*arguments)
    except DecodeError as error:
        return [("refused", refused(error))]
    except Exception as error:
        raise Escaped(f"{type(error).__name__}: {error} from a frame {arguments!r:.400}") from error
    return observe_message(message)


def differences(first: list[tuple[str, Any]], second: list[tuple[str, Any]]) -> list[str]:
    """Where two observations differ, one sentence each; empty if nowhere."""
    if first == second:
        return []
    found = [
        f"{name}: {one!r:.300} against {other!r:.300}"
        for (name, one), (also, other) in zip(first, second)  # noqa: B905
        if (name, one) != (also, other)
    ]
    return found or [f"{len(first)} parts against {len(second)}"]


def fingerprint(decoder: Any) -> bytes:
    """All that a decoder knows. Both implementations keep the same state, which pickles."""
    return pickle.dumps(decoder.state)
