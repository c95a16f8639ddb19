"""The layouts of the tables in a window, from the layout indexes of its files.

Executors write the files of tables whose columns are planned before a row is read. So a window for
executors has one layout of each table in each of its sections: the changes before a snapshot, the
snapshot, and the changes after it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from pgoutput_fast.segments.reader import SegmentReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pgoutput_fast.changelog.read_plan import Position, Read, ReadPlan
    from pgoutput_fast.changelog.snapshot_states import Snapshot
    from pgoutput_fast.changelog.view import View
    from pgoutput_fast.segments import SegmentMetadata
    from pgoutput_fast.segments.layout_index import Span


class TableLayout(NamedTuple):
    """The layout of a table's changes in a section of a window.

    Attributes
    ----------
    relation : bytes
        The Relation frame.
    types : tuple of bytes
        The Type frames of the relation's columns.
    encoding : str
        The session's client_encoding.
    is_binary : bool
        Whether the session sends values in binary format.
    first_lsn, last_lsn : int
        Commit LSNs between which all changes lie.
    """

    relation: bytes
    types: tuple[bytes, ...]
    encoding: str
    is_binary: bool
    first_lsn: int
    last_lsn: int

    @property
    def layout(self) -> tuple[Any, ...]:
        """The fields that fix the columns and their types."""
        return self[:4]


def sections(plan: ReadPlan) -> Iterator[tuple[Snapshot | None, list[Read]]]:
    """Yield the reads of a plan by sections: those of one snapshot, or of changes between two."""
    for snapshot, reads in itertools.groupby(plan.reads, lambda read: read.snapshot):
        yield snapshot, [*reads]


def table_layouts(reads: Iterable[Read]) -> dict[int, TableLayout]:
    """Return the layout of each table in a section without layout changes, by relation id."""
    layouts: dict[int, TableLayout] = {}
    for relation_id, layout in _layouts(reads):
        first = layouts.setdefault(relation_id, layout)
        layouts[relation_id] = first._replace(last_lsn=layout.last_lsn)
    return layouts


def layout_change(plan: ReadPlan) -> int | None:
    """Return the commit LSN of the first layout change within a section; None if there is none."""
    changes = []
    for _, reads in sections(plan):
        newest: dict[int, TableLayout] = {}
        for relation_id, layout in _layouts(reads):
            if newest.setdefault(relation_id, layout).layout != layout.layout:
                changes.append(layout.first_lsn)
            newest[relation_id] = layout
    return min(changes, default=None)


def window_plan(
    view: View, position: Position, max_bytes: int, driver_bytes: int, **options: Any
) -> ReadPlan | None:
    """Plan the next window. It ends before a layout change if executors write it.

    Parameters
    ----------
    view : View
    position : Position
    max_bytes : int
    driver_bytes : int
        The driver writes windows of up to this size, also with layout changes.
    **options
        Other arguments of `View.plan`.
    """
    plan = view.plan(position, max_bytes, **options)
    if plan is None or plan.size <= driver_bytes:
        return plan
    change = layout_change(plan)
    if change is None:
        return plan
    before = view.plan(position, max_bytes, until=view.position_before(position, change), **options)
    if before is not None and before.size > driver_bytes and layout_change(before) is None:
        return before
    return view.plan(position, max(1, driver_bytes), **options)


def is_for_driver(plan: ReadPlan, driver_bytes: int) -> bool:
    """Whether the driver writes a window: it is small, or a transaction has a layout change."""
    return plan.size <= driver_bytes or layout_change(plan) is not None


def _layouts(reads: Iterable[Read]) -> Iterator[tuple[int, TableLayout]]:
    """Yield the layouts of the changes that reads take, with the relation ids, in order."""
    for read in reads:
        for path in read.files:
            metadata, spans = _index(path)
            for span in spans:
                first, last = read.range_of(span.relation_id)
                if read.snapshot is None:
                    first, last = (
                        max(first, span.first_commit_lsn),
                        min(last - 1, span.last_commit_lsn),
                    )
                else:
                    first, last = span.first_commit_lsn, span.last_commit_lsn
                if first <= last:
                    yield (
                        span.relation_id,
                        TableLayout(
                            span.relation,
                            span.types,
                            metadata.encoding,
                            metadata.is_binary,
                            first,
                            last,
                        ),
                    )


def _index(path: Path) -> tuple[SegmentMetadata, list[Span]]:
    with SegmentReader(path) as reader:
        return reader.metadata, reader.index
