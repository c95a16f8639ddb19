"""How far consumers have read, as `consumers` and `inspect` show it."""

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
    """Return positions for JSON, with the tables that are elsewhere.

    Raises
    ------
    PgOutputError
        The names of the tables can't be read.
    """
    # Names are in the newest segment, which is only read if they are needed.
    names = known_tables(directory) if any(one.tables for one in positions) else {}
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


def tables_elsewhere(described: dict[str, Any]) -> str:
    """Return the tables of a described position as text: ``public.a at 0/1, public.b at 0/2``."""
    return ", ".join(
        f"{printable(one['table'] or str(one['relation_id']))} at {one['position']}"
        for one in described["tables"]
    )
