"""What to do with values that a target cannot hold."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from .errors import PgOutputError

Unheld = Literal["error", "null", "clamp", "text"]
"""What becomes of a value that its target cannot hold."""

Json = Literal["text", "parse"]
"""What becomes of json and jsonb."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "infinity": typing.get_args(Unheld),
    "out_of_range": typing.get_args(Unheld),
    "special_values": typing.get_args(Unheld),
    "json": typing.get_args(Json),
}

MOST_DIMENSIONS = 6
"""Of an array (PostgreSQL's ``MAXDIM``)."""


@dataclass(frozen=True, slots=True)
class Policies:
    """The choices of a user for values that Python or a column format cannot hold.

    Attributes
    ----------
    infinity : {"error", "null", "clamp", "text"}
        ``infinity`` and ``-infinity`` of dates and timestamps: raise, None, the type's greatest or
        least value, or the server's text as str.
    out_of_range : {"error", "null", "clamp", "text"}
        Dates and timestamps before year 1 or after year 9999, and the time 24:00:00.
    special_values : {"error", "null", "clamp", "text"}
        NaN and ±Infinity of numerics in columns; a Python Decimal holds them and asks no policy.
        "clamp" makes ±Infinity the column's greatest or least value, and refuses NaN, which is
        near to none.
    json : {"text", "parse"}
        json and jsonb as str, or parsed as by :func:`json.loads`: numbers with a point or an
        exponent are floats. One too great for a float is refused, and so is NaN, which is no JSON.
    numeric : (int, int), optional
        Precision, from 1 to 38, and scale, from 0 to the precision, of columns of numerics that
        have none; without, they are text. What does not fit is refused, never rounded.
    arrays : {"error", "text"} or int
        What becomes of an array in a column that has another number of dimensions than the others,
        or is not counted from 1, as a column's type cannot change from value to value: it is
        refused, or all the column's arrays are text. A number, from 1 to 6, is the number of
        dimensions of all columns of arrays, where "error" takes 1. A Python list asks no policy.

    Raises
    ------
    PgOutputError
        A value that is none of these.
    """

    infinity: Unheld = "error"
    out_of_range: Unheld = "error"
    special_values: Unheld = "error"
    json: Json = "text"
    numeric: tuple[int, int] | None = None
    arrays: Literal["error", "text"] | int = "error"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            choice = getattr(self, name)
            if choice not in choices:
                expected = ", ".join(map(repr, choices))
                raise PgOutputError(f"Policies({name}={choice!r}): expected {expected}")
        if self.numeric is not None and not _is_shape(self.numeric):
            raise PgOutputError(
                f"Policies(numeric={self.numeric!r}): expected None, or (precision, scale) with a "
                "precision from 1 to 38 and a scale from 0 to the precision"
            )
        dimensions = type(self.arrays) is int and 1 <= self.arrays <= MOST_DIMENSIONS
        if not dimensions and self.arrays not in ("error", "text"):
            raise PgOutputError(
                f"Policies(arrays={self.arrays!r}): expected 'error', 'text', or a number of "
                f"dimensions from 1 to {MOST_DIMENSIONS}"
            )


# The package says of its public classes that they are its own, so that who evaluates annotations
# looks for their names there, in vain.
Policies.__annotations__ = typing.get_type_hints(Policies)


def _is_shape(numeric: object) -> bool:
    if not isinstance(numeric, tuple) or [type(part) for part in numeric] != [int, int]:
        return False
    precision, scale = numeric
    return bool(1 <= precision <= 38 and 0 <= scale <= precision)
