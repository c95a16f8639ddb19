"""Format the positions of consumers for `consumers` and `inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..changelog.known import known_tables
from ..errors import printable
from ..lsn import format_lsn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..changelog.read_plan import Position


def described_positions(directory: Path, positions: Sequence[Position]) -> list[dict[str, Any]]:
    """Return positions for JSON, with the tables that have positions of their own.

    Raises
    ------
    PgOutputError
        The tables' names can't be read.
    """
    # The newest segment has the names. Read it only if a table's name is needed.
    names = known_tables(directory) if any(position.tables for position in positions) else {}
    return [
        {
            "position": format_lsn(position.lsn),
            "tables": [
                {
                    "relation_id": relation_id,
                    "table": ".".join(names[relation_id]) if relation_id in names else None,
                    "position": format_lsn(lsn),
                }
                for relation_id, lsn in sorted(position.tables.items())
            ],
        }
        for position in positions
    ]


def table_positions(described: dict[str, Any]) -> str:
    """Return the tables with positions of their own as text: ``public.a at 0/1``."""
    return ", ".join(
        f"{printable(table['table'] or str(table['relation_id']))} at {table['position']}"
        for table in described["tables"]
    )
