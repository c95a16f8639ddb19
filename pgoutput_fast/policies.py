"""The user's choices for values that Python or an Arrow column cannot hold."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .errors import PgOutputError
from .options import choice

ValuePolicy = Literal["error", "null", "clamp", "text"]
"""What to do with a value that does not fit into its Python type or Arrow column."""

Json = Literal["text", "parse"]
"""What values of json and jsonb become."""

InvalidText = Literal["error", "replace", "binary"]
"""What to do with bytes that are not text."""

CHOICES: dict[str, tuple[str, ...]] = {
    "infinity": typing.get_args(ValuePolicy),
    "out_of_range": typing.get_args(ValuePolicy),
    "special_values": typing.get_args(ValuePolicy),
    "json": typing.get_args(Json),
    "invalid_text": typing.get_args(InvalidText),
}
"""Name of a policy that takes one of several words → these words."""

MOST_DIMENSIONS = 6
"""The most dimensions that an array can have (PostgreSQL's ``MAXDIM``)."""


@dataclass(frozen=True, slots=True)
class Policies:
    """What to do with values that Python or an Arrow column cannot hold.

    Attributes
    ----------
    infinity : {"error", "null", "clamp", "text"}
        For ``infinity`` and ``-infinity`` of dates, timestamps and intervals: raise an error, give
        None (NULL in columns), give the type's greatest or least value, or give the server's text.
    out_of_range : {"error", "null", "clamp", "text"}
        The same choice for dates and timestamps before year 1 or after year 9999, for the time
        24:00:00, and in columns for intervals whose microseconds do not fit as nanoseconds.
    special_values : {"error", "null", "clamp", "text"}
        The same choice for NaN and ±Infinity of numerics in columns. A Python Decimal can be NaN or
        infinite, so messages don't use this policy. "clamp" gives the column's greatest or least
        value for ±Infinity and an error for NaN, which has no nearest value.
    json : {"text", "parse"}
        json and jsonb as str, or parsed as by :func:`json.loads`: numbers with a point or an
        exponent become floats. A number too great for a float is an error, and so is NaN, which
        JSON does not have.
    numeric : (int, int), optional
        Precision (from 1 to 38) and scale (from 0 to the precision) of the Arrow columns of
        numerics that were declared without a precision. By default such columns are text. A value
        that does not fit is an error and is never rounded.
    arrays : {"error", "text"} or int
        All arrays of an Arrow column have the same number of dimensions, with indexes from 1. A
        number from 1 to 6 sets the dimensions of all columns of arrays; with "error" they have 1.
        An array of another shape is an error. With "text" all columns of arrays are text. Messages
        give arrays as Python lists, which can have any shape, so they don't use this policy.
    invalid_text : {"error", "replace", "binary"}
        For a database whose encoding is SQL_ASCII, which does not check text: what to do with bytes
        that are not UTF-8. Raise an error, or give U+FFFD in their place, as :meth:`bytes.decode`
        does with ``errors="replace"``. With "binary" all values of text, varchar, char(n), name and
        citext are bytes, also inside of arrays, composites and ranges, and other values are as with
        "error".

    Raises
    ------
    PgOutputError
        An argument is none of the values above.
    TypeError
        An argument that takes a word is none.
    """

    infinity: ValuePolicy = "error"
    out_of_range: ValuePolicy = "error"
    special_values: ValuePolicy = "error"
    json: Json = "text"
    numeric: tuple[int, int] | None = None
    arrays: Literal["error", "text"] | int = "error"
    invalid_text: InvalidText = "error"

    def __repr__(self) -> str:
        """Show the policies that are not the default, as errors name them."""
        chosen = [
            f"{name}={getattr(self, name)!r}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != self.__dataclass_fields__[name].default
        ]
        return f"Policies({', '.join(chosen)})"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            choice(*choices).check(name, getattr(self, name))
        if self.numeric is not None and not _is_shape(self.numeric):
            raise PgOutputError(
                f"{self.numeric!r} is not None, or (precision, scale) with a precision from 1 to "
                "38 and a scale from 0 to the precision",
                code="bad_option",
                parameter="numeric",
            )
        dimensions = type(self.arrays) is int and 1 <= self.arrays <= MOST_DIMENSIONS
        if not dimensions and self.arrays not in ("error", "text"):
            raise PgOutputError(
                f"{self.arrays!r} is not 'error', 'text', or a number of dimensions from 1 to "
                f"{MOST_DIMENSIONS}",
                code="bad_option",
                parameter="arrays",
            )


# The package sets the __module__ of its public classes to its own name. typing.get_type_hints()
# would look there for the names in the annotations and not find them, so they are evaluated here.
Policies.__annotations__ = typing.get_type_hints(Policies)


_DEFAULT = Policies()


def _is_shape(numeric: object) -> bool:
    if not isinstance(numeric, tuple) or [type(part) for part in numeric] != [int, int]:
        return False
    precision, scale = numeric
    return bool(1 <= precision <= 38 and 0 <= scale <= precision)


def policies_of(texts: Iterable[str]) -> Policies:
    """Return the policies that are written as ``infinity=null``, ``numeric=10,2`` or ``arrays=2``.

    Raises
    ------
    PgOutputError
        One is not written so, or is none.
    """
    chosen: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in Policies.__dataclass_fields__:
            names = ", ".join(Policies.__dataclass_fields__)
            raise PgOutputError(
                f"{text!r} is not NAME=VALUE with a NAME of {names}",
                code="bad_option",
                parameter="policies",
            )
        chosen[name] = _value(name, value)
    return Policies(**chosen)


def policy_texts(policies: Policies) -> list[str]:
    """Return the policies that are not the default, as :func:`policies_of` reads them."""
    texts = []
    for name in Policies.__dataclass_fields__:
        value = getattr(policies, name)
        if value != getattr(_DEFAULT, name):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            texts.append(f"{name}={shown}")
    return texts


def _value(name: str, value: str) -> Any:
    try:
        if name == "numeric":
            precision, scale = value.split(",")
            return int(precision), int(scale)
        return int(value) if name == "arrays" and value not in ("error", "text") else value
    except ValueError:
        return value  # Policies raises an error that says what is expected
