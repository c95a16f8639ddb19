"""Offsets of the source ``format("pgoutput")``, as Spark stores them in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgoutput_fast.changelog.read_plan import Position
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.lsn import format_lsn, parse_lsn
from pgoutput_fast.segments.reader import CommitRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pgoutput_fast.changelog.view import View

_IDENTITY = ("system_identifier", "database", "slot")


def offset_at(
    view: View,
    position: Position,
    newest: CommitRecord | None = None,
) -> dict[str, Any]:
    """Return a position as Spark stores it, with the newest commit that was read before it."""
    offset = {
        "position": format_lsn(position.lsn),
        "tables": {str(key): format_lsn(lsn) for key, lsn in sorted(position.tables.items())},
        **{name: getattr(view.metadata, name) for name in _IDENTITY},
    }
    if newest is not None:
        offset["newest"] = [format_lsn(newest.lsn), newest.time]
    return offset


def newest_of(offset: Mapping[str, Any]) -> CommitRecord | None:
    """Return the newest commit that was read before an offset; None if the offset lacks it.

    Raises
    ------
    PgOutputError
        This source does not write such offsets.
    """
    if (newest := offset.get("newest")) is None:
        return None
    try:
        lsn, time = newest
        return CommitRecord(parse_lsn(lsn), int(time))
    except (ValueError, TypeError, AttributeError, PgOutputError):
        raise is_no_offset(offset) from None


def is_no_offset(offset: Mapping[str, Any]) -> PgOutputError:
    """Return the error for an offset that this source does not write."""
    return PgOutputError(
        f"the checkpoint has an offset that this source does not write: {dict(offset)}",
        code="not_ours",
    )


def position_of(offset: Mapping[str, Any], view: View) -> Position:
    """Return the position of an offset.

    Raises
    ------
    PgOutputError
        The offset belongs to another server, database or slot, or is no offset of this source.
    """
    try:
        of = {name: offset[name] for name in _IDENTITY}
        position = Position.of_fields(offset)
        if view.relation_id is not None:
            tables = {key: lsn for key, lsn in position.tables.items() if key == view.relation_id}
            position = position._replace(tables=tables)
    except (KeyError, ValueError, TypeError, AttributeError, PgOutputError):
        raise is_no_offset(offset) from None
    for name, value in of.items():
        own = getattr(view.metadata, name)
        if own != value:
            raise PgOutputError(
                f"the checkpoint belongs to {name} {value!r}, and the change log to {own!r}",
                code="another_history",
                hint="Begin with a new checkpoint, and a new target",
            )
    return position
