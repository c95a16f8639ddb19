"""Check the arguments of a :class:`pgoutput_fast.ColumnarDecoder`, which its engine reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ..decoding.plan import RelationPlan
from ..options import choice, count
from .fields import TARGETS, Target
from .schema import Layout, layout_of
from .selection import Selection

OnError = Literal["raise", "collect"]
"""What a ColumnarDecoder does at a malformed frame."""

Layouts = Callable[[RelationPlan], "Layout | None"]
"""Returns the layout of a relation's record batches; None if its rows are not to be decoded."""

_KINDS = {
    "target": choice(*TARGETS),
    "on_error": choice(*get_args(OnError)),
    "max_rows": count(1, 1 << 62),
    "max_bytes": count(1, 1 << 62),
}


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The arguments of a :class:`ColumnarDecoder`, checked."""

    target: Target
    selection: Selection
    fill_unchanged: bool
    max_rows: int
    max_bytes: int
    on_error: OnError
    layouts: Layouts | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            kind.check(name, getattr(self, name))

    def layout(self, plan: RelationPlan) -> Layout | None:
        """Return the layout of a relation's record batches; None if its rows are not decoded."""
        if self.layouts is not None:
            return self.layouts(plan)
        if not self.selection.wants(plan.relation):
            return None
        return layout_of(plan, self.target, self.selection)
