"""What `pgoutput-fast inspect` tells of a directory beside its segments: copies and consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..directory.consumers import consumers
from ..directory.copies import Tables, TableState
from ..directory.looking import Look, look
from ..errors import PgOutputError, printable
from ..lsn import format_lsn
from ._consumer_positions import described_positions, tables_elsewhere
from ._style import Paint, plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def files_of(found: Look) -> list[Path]:
    """All files that hold frames, each snapshot before the segment within which it was taken."""
    waiting = sorted(
        (copy for state in found.states.values() for copy in state.snapshots),
        key=lambda copy: copy.lsn,
    )
    copies = [
        (copy.lsn, found.of(copy))
        for copy in waiting
        if (copy.relation_id, copy.generation) in found.files
    ]
    files: list[Path] = []
    for segment in found.contents.segments:
        while copies and copies[0][0] < segment.end_lsn:
            files += copies.pop(0)[1]
        files.append(segment.path)
    for _, paths in copies:
        files += paths
    return files


def described(directory: Path) -> dict[str, Any]:
    """What a directory has, and who reads it, for JSON."""
    found = look(directory)
    tables = Tables(directory)
    readers = consumers(directory)
    positions = described_positions(directory, [one.position for one in readers])
    return {
        "path": str(directory),
        "begin": format_lsn(found.contents.begin),
        "end": format_lsn(found.contents.end),
        "tables": [
            _table(relation_id, state, tables)
            for relation_id, state in sorted(found.states.items())
        ],
        "consumers": [
            {"name": one.name, **position} for one, position in zip(readers, positions, strict=True)
        ],
    }


def _table(relation_id: int, state: TableState, tables: Tables) -> dict[str, Any]:
    last = state.copies[-1]
    copied = state.snapshots[-1] if state.snapshots else None
    try:
        name = tables.fields(last).get("table")
        rows = None if copied is None else tables.fields(copied).get("rows")
    except PgOutputError:
        now = tables.read().get(relation_id, state)
        if now == state:
            raise
        return _table(relation_id, now, tables)  # it has just been copied
    is_named = isinstance(name, list) and len(name) == 2
    return {
        "relation_id": relation_id,
        "table": ".".join(map(str, name)) if is_named and isinstance(name, list) else None,
        "state": {"waiting": "waiting", "snapshot": "copied", "gone": "gone"}[last.state],
        "held_from": format_lsn(last.lsn) if last.state == "waiting" else None,
        "copied_as_of": None if copied is None else format_lsn(copied.lsn),
        "rows": rows,
    }


def lines_of(told: dict[str, Any], paint: Paint = plain) -> Iterator[str]:
    """The same as lines."""
    yield ""
    yield f"{printable(told['path'])} has everything from {told['begin']} to {told['end']}"
    names = [printable(one["table"] or str(one["relation_id"])) for one in told["tables"]]
    width = max(map(len, [*names, "table"])) + 2
    if told["tables"]:
        yield ""
        head = f"{'table':<{width}}{'state':<10}{'copied as of':>18}{'rows':>14}{'held from':>18}"
        yield paint(head, "heading")
    for name, one in zip(names, told["tables"], strict=True):
        rows = "" if one["rows"] is None else f"{one['rows']:,}"
        yield (
            f"{name:<{width}}{one['state']:<10}{one['copied_as_of'] or '':>18}{rows:>14}"
            f"{one['held_from'] or '':>18}"
        ).rstrip()
    width = max([len(one["name"]) for one in told["consumers"]] + [len("consumer")]) + 2
    if told["consumers"]:
        yield ""
        yield paint(f"{'consumer':<{width}}{'position':>18}  tables elsewhere", "heading")
    for one in told["consumers"]:
        yield f"{one['name']:<{width}}{one['position']:>18}  {tables_elsewhere(one)}".rstrip()
