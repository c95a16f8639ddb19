"""What follows from an altered table."""

from __future__ import annotations

import pytest

from pgoutput_fast.apply.evolution import is_rewritten
from pgoutput_fast.catalog import CatalogTable


def read(file_nodes: tuple[int, ...], *partition_ids: int) -> CatalogTable:
    """A table as of one read of the catalogue."""
    return CatalogTable(
        16390, "public", "t", "p" if partition_ids else "r", "d", None, partition_ids, ("id",), (),
        (), file_nodes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (read((5,)), read((5,)), False),
        (read((6,)), read((5,)), True),
        (read((0, 5), 16391), read((0, 5), 16391), False),
        (read((0, 6), 16391), read((0, 5), 16391), True),
        (read((0, 5, 9), 16391, 16392), read((0, 5), 16391), False),  # one was attached
        (read((0, 5), 16391), read((0, 9, 5), 16392, 16391), False),  # one was dropped
        (read(()), read((5,)), True),  # it is not known
        (None, read((5,)), True),
        (read((5,)), None, True),
    ],
)
def test_a_table_is_rewritten_that_has_another_file(
    now: CatalogTable | None, before: CatalogTable | None, expected: bool
) -> None:
    assert is_rewritten(now, before) is expected
