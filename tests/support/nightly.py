"""Cases of a parameter that run each night alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def nightly(*cases: Any) -> list[Any]:
    """These cases, marked as slow: ``parametrize("seed", [0, *nightly(1, 2, 3)])``."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def cases(every: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Every case; those that `always` has run always, the others each night alone."""
    return [one if one in always else nightly(one)[0] for one in every]


EVERYDAY = frozenset({
    "14/dml/v1_bin", "14/streaming/v2_stream", "16/all_types/v1_bin", "16/dml/v1_text",
    "16/encoding_latin1/v1_text_latin1", "16/fuzz_a/v4_par_2pc_imm_bin",
    "16/messages/v3_2pc_stream_msgs", "16/origin/v2_imm", "16/partitions/v4_par",
    "16/schema_evolution/v1_text", "16/streaming/v4_on", "16/two_phase/v3_2pc",
    "18/all_types/v1_text", "18/partitions/v1_text", "18/schema_evolution/v1_bin",
})  # fmt: skip
"""Recorded streams that are read always: each scenario, and each version of the protocol."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    """The mark of what reads a recorded stream: a name of `EVERYDAY` has none."""
    return [] if name in EVERYDAY else [pytest.mark.slow]


def recorded(captures: Iterable[Any]) -> list[Any]:
    """Recorded streams as cases."""
    return [pytest.param(one, id=one.name, marks=marks(one.name)) for one in captures]
