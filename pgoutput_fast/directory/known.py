"""Which tables a directory knows, by name."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ..protocol.messages import decode_rare
from ..segments.format import ANNOUNCED_LSN
from ..segments.listing import contents
from ..segments.reader import SegmentReader
from .copies import Tables

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def known_tables(directory: Path) -> dict[int, tuple[str, str]]:
    """Namespace and name of each table that is there, by relation id.

    Those that were copied, or wait for a copy, and those that the newest segment announces.

    Raises
    ------
    PgOutputError
        The directory, or the segment, can't be read.
    """
    found: dict[int, tuple[str, str]] = {}
    tables = Tables(directory)
    for relation_id, state in tables.read().items():
        last = state.copies[-1]
        name: Any = tables.fields(last).get("table")
        if last.state != "gone" and name:
            found[relation_id] = (name[0], name[1])
    segments = contents(directory).segments
    if segments:
        with SegmentReader(segments[-1].path) as reader:
            encoding = reader.metadata.encoding
            for batch in reader:
                announced = [
                    frame
                    for lsn, frame in zip(
                        batch.column("lsn").to_pylist(), batch.column("data"), strict=True
                    )
                    if lsn == ANNOUNCED_LSN
                ]
                for frame in announced:
                    data = frame.as_py()
                    if data[:1] == b"R":
                        relation: Any = decode_rare(data, in_stream=False, encoding=encoding)
                        name = (relation.namespace or "pg_catalog", relation.name)
                        found[relation.relation_id] = name
    return found


def how_to_copy(directory: Path, relation_ids: Iterable[int]) -> str:
    """What to do where tables have to be copied again, for errors: it names them."""
    known = known_tables(directory)
    names = [".".join(known[one]) if one in known else str(one) for one in relation_ids]
    given = " ".join(f"--table {shlex.quote(name)}" for name in names)
    return f"have them copied again: pgoutput-fast snapshot --dir {directory} {given}"
