"""Convert decoded values to JSON that :mod:`json` can't convert by itself."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from decimal import Decimal
from typing import Any

from .objects import UNCHANGED, Interval, Range, SparseVector


@functools.cache
def _as_str() -> tuple[type, ...]:
    """Return the classes whose values become their str."""
    import ipaddress  # both import slowly
    import uuid

    return (
        Decimal,
        uuid.UUID,
        ipaddress.IPv4Address,
        ipaddress.IPv6Address,
        ipaddress.IPv4Interface,
        ipaddress.IPv6Interface,
        ipaddress.IPv4Network,
        ipaddress.IPv6Network,
    )


def json_default(value: object) -> Any:
    """Convert a value that :mod:`json` can't convert: to be passed to `json.dumps` as `default`.

    ``json.dumps(row.as_dict(), default=pf.json_default)`` works for every value that this package
    decodes. No value is rounded, and none becomes null:

    - a value that was not sent (``pf.UNCHANGED``): ``{"unchanged": true}``
    - bytes: ``{"hex": "00ff"}``
    - Decimal, UUID, and the classes of :mod:`ipaddress`: their str, such as ``"99.50"``
    - date, time, datetime: ISO 8601, such as ``"2026-01-31T12:00:00+00:00"``
    - Interval: ``{"months": 0, "days": 1, "microseconds": 0}``
    - Range: ``{"lower": 1, "upper": 5, "bounds": "[)"}``, where null is a missing bound; the empty
      range is ``{"empty": true}``
    - SparseVector: ``{"dim": 5, "indices": [1], "values": [0.5]}``

    `json` converts all other values without asking this function: an Array becomes a list without
    its lower bounds, a composite becomes a list without its fields' names, and a float that is not
    finite becomes ``NaN`` or ``Infinity``, which some JSON parsers refuse.

    Raises
    ------
    TypeError
        `value` is of no class that this package decodes to.
    """
    if value is UNCHANGED:
        return {"unchanged": True}
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, _as_str()):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date too
        return value.isoformat()
    if isinstance(value, (Interval, SparseVector)):
        return dataclasses.asdict(value)
    if isinstance(value, Range):
        if value.empty:
            return {"empty": True}
        return {"lower": value.lower, "upper": value.upper, "bounds": value.bounds}
    raise TypeError(f"json_default() converts no values of type {type(value).__name__}")
