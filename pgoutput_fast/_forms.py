"""Check values that were read as JSON against type annotations."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from .errors import PgOutputError, printable

# The errors of reading a JSON file whose content has an unexpected form.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, PgOutputError)


def unreadable(
    path: object, error: Exception, purpose: str = "", hint: str = "Restore it"
) -> PgOutputError:
    """Return the error for a JSON file that can't be read or has an unexpected form.

    Parameters
    ----------
    path : path-like
        The file.
    error : OSError or one of `MALFORMED`
        The reason.
    purpose : str, optional
        The purpose of the file, as a clause: "which says …".
    hint : str, optional
        What to do.
    """
    if isinstance(error, OSError):
        code, why = "io_failed", error.strerror or str(error)
    else:
        code, why = "damaged", error.message if isinstance(error, PgOutputError) else str(error)
    return PgOutputError(
        f"can't read {path} ({printable(why)})" + (f", {purpose}" if purpose else ""),
        code=code,
        path=str(path),
        hint=hint,
    )


_hints = functools.cache(typing.get_type_hints)
"""Returns the annotations of a class, cached: a sync reads such files twice a second."""


def of_form(value: object, form: Any, place: str = "") -> Any:
    """Convert a value from JSON to the type of an annotation.

    Parameters
    ----------
    value : object
        The value as `json.loads` returns it.
    form : type
        str, int, bool, None or a union of them; ``list[X]``, ``tuple[X, ...]``, ``dict[str, X]``;
        a dataclass or a TypedDict of such types; or Any.
    place : str
        The position of the value within a larger value, for errors.

    Returns
    -------
    object
        Arrays become lists or tuples, and objects become dictionaries or dataclasses.

    Raises
    ------
    ValueError
        The value has another type; the message says where.
    """
    if form is Any:
        return value
    origin, arguments = typing.get_origin(form), typing.get_args(form)
    if origin in (types.UnionType, typing.Union):
        fitting = next((argument for argument in arguments if _is_one(value, argument)), None)
        if fitting is None:
            raise _unlike(value, form, place)
        return of_form(value, fitting, place)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _unlike(value, form, place)
        items = (of_form(item, arguments[0], f"{place}[{i}]") for i, item in enumerate(value))
        return origin(items)
    if origin is dict:
        if not isinstance(value, dict):
            raise _unlike(value, form, place)
        return {
            key: of_form(item, arguments[1], f"{place}.{key}".lstrip("."))
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(form) or typing.is_typeddict(form):
        return form(**_fields(value, form, place))
    if not _is_one(value, form):
        raise _unlike(value, form, place)
    return value


def _is_one(value: object, form: Any) -> bool:
    """Return whether a value has a plain type; unlike in Python, a bool is no int in JSON."""
    plain = typing.get_origin(form) or (types.NoneType if form is None else form)
    plain = list if plain is tuple else plain
    if dataclasses.is_dataclass(plain) or typing.is_typeddict(plain):
        plain = dict
    return isinstance(value, plain) and (type(value) is bool) == (plain is bool)


def _fields(value: object, form: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unlike(value, form, place)
    forms = _hints(form)
    if dataclasses.is_dataclass(form):
        optional = {
            field.name
            for field in dataclasses.fields(form)
            if field.default is not dataclasses.MISSING
        }
    else:
        optional = form.__optional_keys__
    missing = sorted(forms.keys() - value.keys() - optional)
    unknown = sorted(value.keys() - forms.keys())
    if missing or unknown:
        problem = f"lacks {missing[0]!r}" if missing else f"has an unknown {unknown[0][:40]!r}"
        raise ValueError(f"{place or 'it'} {problem}")
    return {
        key: of_form(item, forms[key], f"{place}.{key}".lstrip(".")) for key, item in value.items()
    }


def _unlike(value: object, form: Any, place: str) -> ValueError:
    expected = form.__name__ if isinstance(form, type) and not typing.get_args(form) else str(form)
    return ValueError(f"{place or 'it'} is {value!r:.60}, expected {expected}")
