"""Check the arguments of a :class:`pgoutput_fast.ColumnarDecoder`, which its engine reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ..decoding.plan import RelationPlan
from ..errors import PgOutputError
from .fields import TARGETS, Target
from .schema import Layout, layout_of
from .selection import Selection

OnError = Literal["raise", "collect"]
"""What a ColumnarDecoder does at a malformed frame."""

Layouts = Callable[[RelationPlan], "Layout | None"]
"""Returns the layout of a relation's record batches; None if its rows are not to be decoded."""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of a :class:`ColumnarDecoder`, checked."""

    target: Target
    selection: Selection
    fill_unchanged: bool
    max_rows: int
    max_bytes: int
    on_error: OnError
    layouts: Layouts | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            expected = ", ".join(map(repr, TARGETS))
            raise PgOutputError(f"target={self.target!r}: expected one of {expected}")
        if self.on_error not in get_args(OnError):
            expected = " or ".join(map(repr, get_args(OnError)))
            raise PgOutputError(f"on_error={self.on_error!r}: expected {expected}")
        for name in ("max_rows", "max_bytes"):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
            if not 0 < value <= 1 << 62:
                raise PgOutputError(f"{name}={value}: expected a positive number")

    def layout(self, plan: RelationPlan) -> Layout | None:
        """The layout of a relation's record batches; None if its rows are not to be decoded."""
        if self.layouts is not None:
            return self.layouts(plan)
        if not self.selection.wants(plan.relation):
            return None
        return layout_of(plan, self.target, self.selection)
