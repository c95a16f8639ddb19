"""Expects errors of the package by their fields."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import pgoutput_fast as pf
from pgoutput_fast.errors import Argument


@contextlib.contextmanager
def expect_error(
    kind: type[Exception] = pf.PgOutputError, **fields: Any
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error with these fields.

    Parameters
    ----------
    kind : type
        An error of the package, or one of Spark that one made.
    fields
        ``options`` are the options that the hint names, in a list. The others are attributes.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error: BaseException | None = caught.value
    if not isinstance(error, pf.PgOutputError) or "[pgoutput_fast error]" in str(error):
        from pgoutput_fast.spark import error_of

        error = error_of(caught.value)
    check_fields(error, **fields)


def check_fields(error: BaseException | None, **fields: Any) -> None:
    """Assert that an error has these fields, as :func:`expect_error` takes them."""
    assert isinstance(error, pf.PgOutputError), error
    found: dict[str, Any] = {"options": [one for one in error.hint if isinstance(one, Argument)]}
    found |= {name: getattr(error, name) for name in fields if name != "options"}
    assert {name: found[name] for name in fields} == fields, str(error)
