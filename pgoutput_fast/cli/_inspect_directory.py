"""Describe a change log for `pgoutput-fast inspect`: its snapshots, tables and consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..changelog.consumers import consumers
from ..changelog.log import ChangeLog
from ..changelog.snapshot_states import SnapshotStates, TableSnapshots
from ..encodings import python_encoding
from ..errors import PgOutputError, printable
from ..lsn import format_lsn
from ..names import shown_table
from ..protocol.messages import decode_rare
from ..segments import SegmentReader
from ._consumer_positions import described_positions, table_positions
from ._style import Paint, plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..changelog.view import View
    from ..segments.layout_index import Span


def files_of(view: View) -> list[Path]:
    """Return all files with frames; a snapshot comes before the segment with the snapshot's LSN."""
    waiting = sorted(
        (snapshot for state in view.states.values() for snapshot in state.snapshots),
        key=lambda snapshot: snapshot.lsn,
    )
    copies = [
        (snapshot.lsn, view.snapshot_paths(snapshot))
        for snapshot in waiting
        if (snapshot.relation_id, snapshot.number) in view.files
    ]
    files: list[Path] = []
    for segment in view.segments:
        while copies and copies[0][0] < segment.end_lsn:
            files += copies.pop(0)[1]
        files.append(segment.path)
    for _, paths in copies:
        files += paths
    return files


def described(directory: Path) -> dict[str, Any]:
    """Return the content and the consumers of a change log, for JSON."""
    view = ChangeLog(directory).view()
    tables = SnapshotStates(directory)
    readers = consumers(directory)
    positions = described_positions(directory, [reader.position for reader in readers])
    return {
        "path": str(directory),
        "begin": format_lsn(view.begin),
        "end": format_lsn(view.end),
        "tables": [
            _table(relation_id, state, tables) for relation_id, state in sorted(view.states.items())
        ],
        "layouts": _layouts(view),
        "consumers": [
            {"name": reader.name, **position}
            for reader, position in zip(readers, positions, strict=True)
        ],
    }


def _layouts(view: View) -> list[dict[str, Any]]:
    """Return what the segments' layout indexes say about each table."""
    encoding = python_encoding(view.metadata.encoding)
    spans: dict[int, list[Span]] = {}
    for segment in view.segments:
        with SegmentReader(segment.path) as reader:
            for span in reader.index:
                spans.setdefault(span.relation_id, []).append(span)
    layouts = []
    for relation_id, of_table in sorted(spans.items()):
        relation: Any = decode_rare(of_table[-1].relation, in_stream=False, encoding=encoding)
        layouts.append(
            {
                "relation_id": relation_id,
                "table": shown_table(relation),
                "layouts": len({(span.relation, span.types) for span in of_table}),
                "changes": sum(span.changes for span in of_table),
                "bytes": sum(span.size for span in of_table),
                "truncates": sum(span.truncates for span in of_table),
                "first_commit_lsn": format_lsn(of_table[0].first_commit_lsn),
                "last_commit_lsn": format_lsn(of_table[-1].last_commit_lsn),
            }
        )
    return layouts


def _table(relation_id: int, state: TableSnapshots, tables: SnapshotStates) -> dict[str, Any]:
    last = state.all_snapshots[-1]
    copied = state.snapshots[-1] if state.snapshots else None
    try:
        name = tables.fields(last).get("table")
        rows = None if copied is None else tables.fields(copied).get("rows")
    except PgOutputError:
        now = tables.read().get(relation_id, state)
        if now == state:
            raise
        return _table(relation_id, now, tables)  # the table has just got a new snapshot
    is_named = isinstance(name, list) and len(name) == 2
    return {
        "relation_id": relation_id,
        "table": ".".join(map(str, name)) if is_named and isinstance(name, list) else None,
        "state": {"waiting": "waiting", "snapshot": "copied", "gone": "gone"}[last.state],
        "waits_from": format_lsn(last.lsn) if last.state == "waiting" else None,
        "copied_as_of": None if copied is None else format_lsn(copied.lsn),
        "rows": rows,
    }


def lines_of(description: dict[str, Any], paint: Paint = plain) -> Iterator[str]:
    """Return the same description as lines."""
    yield ""
    yield (
        f"{printable(description['path'])} has all changes from {description['begin']} to "
        f"{description['end']}"
    )
    names = [
        printable(table["table"] or str(table["relation_id"])) for table in description["tables"]
    ]
    width = max(map(len, [*names, "table"])) + 2
    if description["tables"]:
        yield ""
        head = f"{'table':<{width}}{'state':<10}{'copied as of':>18}{'rows':>14}{'waits from':>18}"
        yield paint(head, "heading")
    for name, table in zip(names, description["tables"], strict=True):
        rows = "" if table["rows"] is None else f"{table['rows']:,}"
        yield (
            f"{name:<{width}}{table['state']:<10}{table['copied_as_of'] or '':>18}{rows:>14}"
            f"{table['waits_from'] or '':>18}"
        ).rstrip()
    if description["layouts"]:
        yield ""
        names = [printable(layout["table"]) for layout in description["layouts"]]
        width = max(map(len, [*names, "in segments"])) + 2
        head = (
            f"{'in segments':<{width}}{'layouts':>8}{'changes':>12}{'bytes':>16}{'truncates':>11}"
            f"{'first commit':>18}{'last commit':>18}"
        )
        yield paint(head, "heading")
        for name, layout in zip(names, description["layouts"], strict=True):
            yield (
                f"{name:<{width}}{layout['layouts']:>8,}{layout['changes']:>12,}{layout['bytes']:>16,}"
                f"{layout['truncates']:>11,}{layout['first_commit_lsn']:>18}{layout['last_commit_lsn']:>18}"
            )
    width = (
        max([len(consumer["name"]) for consumer in description["consumers"]] + [len("consumer")])
        + 2
    )
    if description["consumers"]:
        yield ""
        yield paint(f"{'consumer':<{width}}{'position':>18}  tables at other positions", "heading")
    for consumer in description["consumers"]:
        position = f"{consumer['name']:<{width}}{consumer['position']:>18}"
        yield f"{position}  {table_positions(consumer)}".rstrip()
