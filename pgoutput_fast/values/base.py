"""What all codecs share: the class Codec, errors, and the use of policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..policies import Policies
from ..types import Converter


class OutOfRange(ValueError):
    """A valid value of PostgreSQL that does not fit into its Python type or Arrow column.

    Parameters
    ----------
    message : str
    policy : tuple of (str, str or None), optional
        Name and value of a policy that lets the value pass; the value is None if it depends on
        the caller's data.
    """

    def __init__(self, message: str, policy: tuple[str, str | None] | None = None) -> None:
        super().__init__(message)
        self.policy = policy


class NoTextForm(ValueError):
    """The text that the server would print for a binary value is not known."""


class Codec(NamedTuple):
    """The functions of one codec, for one decoder's policies and encoding.

    Each takes the bytes of a value: `text` converts from text format to a Python object, `binary`
    from binary format to a Python object, and `text_form` from binary format to the server's text.
    """

    text: Converter
    binary: Converter
    text_form: Converter


CodecOf = Callable[[Policies, str], Codec]
"""A function that makes a Codec for given policies and a Python encoding."""

CODES = {
    "bool": 1,
    "int2": 2,
    "int4": 3,
    "int8": 4,
    "uint4": 5,
    "float8": 6,
    "numeric": 7,
    "text": 8,
    "json": 8,
    "bytea": 9,
    "uuid": 10,
    "date": 11,
    "time": 12,
    "timestamp": 13,
    "timestamptz": 14,
    "jsonb": 15,
    "other": 16,
}
"""Codec → its number in the compiled implementation, where 0 stands for any other codec."""


def limited(choice: str, policy: str, shown: str, clamp: Any, name: str, note: str = "") -> Any:
    """Apply a policy to a value that does not fit into its Python type or Arrow column.

    `choice` is the user's choice for `policy`, `shown` the value's text, `clamp` the nearest value
    that fits, `name` says what fits, and `note` is more text for the error. The error says nothing
    of Python or Arrow, as the codecs call this for objects and for columns.

    Raises
    ------
    OutOfRange
        The choice is "error".
    """
    if choice == "null":
        return None
    if choice == "clamp":
        return clamp
    if choice == "text":
        return shown
    raise OutOfRange(
        f"{shown} does not fit into {name}; the policy {policy} can be 'null', 'clamp' (the "
        f"nearest value) or 'text'{note}",
        (policy, "null"),
    )


def in_field(error: Exception, name: str) -> None:
    """Note on `error` that it was raised for the field `name` of a composite."""
    error.__dict__["pgoutput_fields"] = (name, *fields_of(error))


def fields_of(error: Exception) -> tuple[str, ...]:
    """Return the fields that :func:`in_field` noted, the outermost first."""
    found: tuple[str, ...] = error.__dict__.get("pgoutput_fields", ())
    return found


def wrong_size(raw: bytes, size: int, name: str) -> ValueError:
    """Make the error for a binary value whose size is not that of its type."""
    return ValueError(f"a binary {name} has {size} bytes, found {len(raw)}")


def expect_size(raw: bytes, size: int, name: str) -> None:
    """Raise a ValueError if the size of a binary value is not that of its type."""
    if len(raw) != size:
        raise ValueError(f"a binary {name} has {size} bytes, found {len(raw)}")


def show_bytes(raw: bytes) -> str:
    """Return bytes as error messages show them: at most 40."""
    return repr(raw if len(raw) <= 40 else raw[:40] + b"...")[1:]
