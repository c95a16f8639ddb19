"""Which choices a user has, and that each is checked when it is made."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import pgoutput_fast as pf


@pytest.mark.parametrize("numeric", [None, (1, 0), (38, 38), (10, 2)])
def test_shapes_of_numerics(numeric: tuple[int, int] | None) -> None:
    policies = pf.Policies(numeric=numeric)
    assert policies.numeric == numeric
    assert pickle.loads(pickle.dumps(policies)) == policies


@pytest.mark.parametrize(
    "numeric",
    [
        (0, 0),
        (39, 0),
        (10, 11),
        (10, -1),
        (10,),
        (10, 2, 1),
        [10, 2],
        10,
        "10,2",
        (10.0, 2),
        (True, 0),
        ("10", "2"),
    ],
)
def test_shapes_that_no_column_has(numeric: Any) -> None:
    with pytest.raises(pf.PgOutputError, match=r"Policies\(numeric=.*\(precision, scale\)"):
        pf.Policies(numeric=numeric)


@pytest.mark.parametrize("arrays", ["error", "text", 1, 6])
def test_arrays_in_columns(arrays: str | int) -> None:
    assert pf.Policies(arrays=arrays).arrays == arrays


@pytest.mark.parametrize("arrays", ["null", 0, 7, -1, True, 1.0, None, "1", [1]])
def test_arrays_that_no_column_takes(arrays: Any) -> None:
    with pytest.raises(pf.PgOutputError, match=r"Policies\(arrays=.*expected 'error', 'text'"):
        pf.Policies(arrays=arrays)


@pytest.mark.parametrize("name", ["infinity", "out_of_range", "special_values"])
def test_choices(name: str) -> None:
    for choice in ("error", "null", "clamp", "text"):
        assert getattr(pf.Policies(**{name: choice}), name) == choice
    for choice in ("", "ERROR", None, 1, []):
        with pytest.raises(pf.PgOutputError, match=rf"Policies\({name}=.*expected 'error', "):
            pf.Policies(**{name: choice})  # type: ignore[arg-type]
