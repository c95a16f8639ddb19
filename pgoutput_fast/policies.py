"""What to do with values that a target cannot hold."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .errors import PgOutputError

_CHOICES: dict[str, tuple[str, ...]] = {
    "infinity": ("error", "null", "clamp", "text"),
    "out_of_range": ("error", "null", "clamp", "text"),
    "special_values": ("error", "null", "text"),
    "json": ("text", "parse"),
}


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
    special_values : {"error", "null", "text"}
        NaN and ±Infinity of numerics in columns; a Python Decimal holds them and asks no policy.
    json : {"text", "parse"}
        json and jsonb as str, or parsed by :func:`json.loads`.

    Raises
    ------
    PgOutputError
        A value that is none of these.
    """

    infinity: str = "error"
    out_of_range: str = "error"
    special_values: str = "error"
    json: str = "text"

    def __post_init__(self) -> None:
        for field in fields(self):
            choice = getattr(self, field.name)
            choices = _CHOICES[field.name]
            if choice not in choices:
                expected = ", ".join(map(repr, choices))
                raise PgOutputError(f"Policies({field.name}={choice!r}): expected {expected}")
