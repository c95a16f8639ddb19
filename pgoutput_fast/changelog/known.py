"""The names of the tables in a change log."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ..encodings import python_encoding
from ..names import sql_name
from ..protocol.messages import decode_rare
from ..segments.listing import contents
from ..segments.reader import SegmentReader
from ..segments.structure import tags_of
from .snapshot_states import SnapshotStates

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def known_tables(directory: Path) -> dict[int, tuple[str, str]]:
    """Return namespace and name of each table in a change log, by relation id.

    These are the tables that have a snapshot or wait for one, and those with a Relation in the
    newest segment.

    Raises
    ------
    PgOutputError
        The directory, or the newest segment, can't be read.
    """
    names: dict[int, tuple[str, str]] = {}
    tables = SnapshotStates(directory)
    for relation_id, state in tables.read().items():
        last = state.all_snapshots[-1]
        name: Any = tables.fields(last).get("table")
        if last.state != "gone" and name:
            names[relation_id] = (name[0], name[1])
    for segment in contents(directory).segments[-1:]:
        names.update(announced_tables(segment.path))
    return names


def announced_tables(path: Path) -> dict[int, tuple[str, str]]:
    """Return the tables with a Relation in a segment, in the order of their last Relations."""
    tables: dict[int, tuple[str, str]] = {}
    with SegmentReader(path) as reader:
        encoding = python_encoding(reader.metadata.encoding)
        for batch in reader:
            data = batch.column("data")
            for index in (tags_of(data) == ord("R")).nonzero()[0].tolist():
                frame = data[index].as_py()
                relation: Any = decode_rare(frame, in_stream=False, encoding=encoding)
                name = (relation.namespace or "pg_catalog", relation.name)
                tables.pop(relation.relation_id, None)
                tables[relation.relation_id] = name
    return tables


def how_to_copy(directory: Path, relation_ids: Iterable[int]) -> str:
    """Return the advice for errors how to get new snapshots of tables.

    It has the command with the tables' names. If the reader was given files instead of a directory,
    the advice is general, because nothing else is known.
    """
    if not directory.is_dir():
        return "request new snapshots of the tables"
    table_names = known_tables(directory)
    names = [
        sql_name(*table_names[relation_id]) if relation_id in table_names else str(relation_id)
        for relation_id in relation_ids
    ]
    table_options = " ".join(f"--table {shlex.quote(name)}" for name in names)
    return f"request a new snapshot with pgoutput-fast snapshot --dir {directory} {table_options}"
