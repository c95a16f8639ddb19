"""What the functions of all codecs share: their form, their errors, policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..policies import Policies
from ..types import Converter


class OutOfRange(ValueError):
    """A legal value of PostgreSQL's that Python's type cannot hold."""


class NoTextForm(ValueError):
    """The text that the server would print for a binary value is not known."""


class Codec(NamedTuple):
    """The functions of one codec, made for a session's policies and encoding."""

    text: Converter
    binary: Converter
    text_form: Converter  # binary value → the server's text


CodecOf = Callable[[Policies, str], Codec]
"""Makes the functions of a codec for given policies and a Python encoding."""


def limited(choice: str, policy: str, shown: str, clamp: Any, name: str, note: str = "") -> Any:
    """What the policy makes of a value that Python's type cannot hold."""
    if choice == "null":
        return None
    if choice == "clamp":
        return clamp
    if choice == "text":
        return shown
    raise OutOfRange(
        f"{shown} does not fit into Python's {name}; Policies({policy}=...) can make it None, "
        f"the nearest value or text{note}"
    )


def in_field(error: Exception, name: str) -> None:
    """Note on `error` that it came out of the field `name` of a composite."""
    error.__dict__["pgoutput_fields"] = (name, *fields_of(error))


def fields_of(error: Exception) -> tuple[str, ...]:
    """The fields that :func:`in_field` noted, the outermost first."""
    found: tuple[str, ...] = error.__dict__.get("pgoutput_fields", ())
    return found


def wrong_size(raw: bytes, size: int, name: str) -> ValueError:
    """Make the error of a binary value that has another size than its type."""
    return ValueError(f"a binary {name} has {size} bytes, found {len(raw)}")


def expect_size(raw: bytes, size: int, name: str) -> None:
    """Refuse a binary value that has another size than its type."""
    if len(raw) != size:
        raise ValueError(f"a binary {name} has {size} bytes, found {len(raw)}")


def show_bytes(raw: bytes) -> str:
    """Bytes as an error shows them, cut where they are many."""
    return repr(raw if len(raw) <= 40 else raw[:40] + b"...")[1:]
