"""A value of a column beside what the messages give for it, whatever the two are made of."""

from __future__ import annotations

import decimal
import math
from typing import Any

import pyarrow as pa
from support.values.render import printed

import pgoutput_fast as pf
from pgoutput_fast.settings import Settings
from pgoutput_fast.types import ColumnType

__all__ = ["has_other_shape", "is_special", "same_value"]


def same_value(
    got: Any, kind: pa.DataType, want: Any, type_: ColumnType, settings: Settings
) -> bool:
    """Whether a column's value is a message's.

    Parameters
    ----------
    got
        As pyarrow's ``to_pylist`` gives it.
    kind : pyarrow.DataType
    want
        The message's Python object.
    type_ : ColumnType
    settings : Settings
        Of the messages.
    """
    if want is None and type_.name == "timetz" and got is not None:
        return bool(got.startswith("24:00:00"))  # which Python's time has not
    if got is None or want is None:
        return got is None and (want is None or is_special(want, settings))
    kind = getattr(kind, "storage_type", kind)
    element = type_.element
    if pa.types.is_map(kind):
        return bool(dict(got) == want and len(got) == len(want))
    if isinstance(want, pf.SparseVector):
        return list(got.values()) == [want.dim, list(want.indices), list(want.values)]
    if isinstance(want, pf.Range) and pa.types.is_struct(kind):
        assert element is not None
        return (
            list(got) == ["lower", "upper", "lower_inc", "upper_inc", "empty"]
            and same_value(got["lower"], kind.field(0).type, want.lower, element, settings)
            and same_value(got["upper"], kind.field(1).type, want.upper, element, settings)
            and (got["lower_inc"], got["upper_inc"], got["empty"])
            == (want.lower_inc, want.upper_inc, want.empty)
        )
    if pa.types.is_struct(kind):
        return len(got) == len(want) and all(
            same_value(value, kind.field(i).type, part, field, settings)
            for i, (value, part, (_, field)) in enumerate(
                zip(got.values(), want, type_.fields, strict=True)
            )
        )
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = element or type_  # a vector of pgvector has no type within
        return len(got) == len(want) and all(
            same_value(value, kind.value_type, part, inner, settings)
            for value, part in zip(got, want, strict=True)
        )
    if isinstance(want, pf.Interval) and not isinstance(got, str):
        nanoseconds = want.microseconds * 1000
        if settings.policies.out_of_range == "clamp":
            nanoseconds = min(max(nanoseconds, -(1 << 63)), (1 << 63) - 1)
        return tuple(got) == (want.months, want.days, nanoseconds)
    if type(got) is type(want):
        return bool(got == want) or (isinstance(got, float) and math.isnan(got + want))
    if isinstance(want, int):
        return bool(got == str(want))  # of money and reg* in binary format
    # The server's text is another form of the value.
    if isinstance(got, str):
        return got == printed(want, type_)
    return False


def is_special(want: Any, settings: Settings) -> bool:
    """Whether it is what columns alone cannot hold, and the policy makes null of it."""
    if isinstance(want, pf.Interval):
        return settings.policies.out_of_range == "null" and not (
            -(1 << 63) <= want.microseconds * 1000 < 1 << 63
        )
    null = settings.policies.special_values == "null"
    return null and isinstance(want, decimal.Decimal) and not want.is_finite()


def has_other_shape(value: Any) -> bool:
    """Whether a value is an array that is not of one dimension counted from 1, or has one in it."""
    if isinstance(value, pf.Array):
        return True
    if isinstance(value, list) and any(isinstance(part, list) for part in value):
        return True
    parts = value if isinstance(value, (list, tuple)) else ()
    return any(map(has_other_shape, parts))
