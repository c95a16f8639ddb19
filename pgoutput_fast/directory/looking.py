"""What a reader sees of a directory: segments, states of tables and files of snapshots together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import PgOutputError
from ..segments.format import SegmentMetadata
from ..segments.listing import Contents, contents
from ..segments.reader import SegmentReader
from .copies import Copy, Tables, TableState
from .snapshots import snapshot_files, snapshot_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .reading import Reading


class Look(NamedTuple):
    """What there is to read, seen at one time.

    Attributes
    ----------
    contents : Contents
    states : mapping of int to TableState
    files : mapping of (int, int) to list of pathlib.Path
        The files of copies that are not being deleted, by relation id and generation.
    """

    contents: Contents
    states: Mapping[int, TableState]
    files: Mapping[tuple[int, int], list[Path]]


def look(directory: Path) -> Look:
    """What a directory has now.

    Raises
    ------
    PgOutputError
        The directory can't be read.
    """
    found = contents(directory)
    states = Tables(directory).read()  # behind the end, as `next_reading` says
    try:
        copies = snapshot_files(directory)
    except OSError as error:
        raise PgOutputError(f"can't read snapshots of {directory}: {error.strerror}") from error
    # Of a copy that is deleted the Truncate goes first.
    begins = {
        (copy.relation_id, copy.generation): snapshot_path(directory, copy, 0)
        for state in states.values()
        for copy in state.snapshots
    }
    whole = {key: paths for key, paths in copies.items() if paths[0] == begins.get(key)}
    return Look(found, states, whole)


def readable(reading: Reading, found: Look, where: str) -> Reading:
    """A reading without the snapshots that are deleted, as a newer one of their table voids them.

    A table is then read from the oldest snapshot on behind which none is deleted.

    Parameters
    ----------
    reading : Reading
        What `next_reading` gave for what was seen.
    found : Look
    where : str
        What errors call the directory.

    Raises
    ------
    PgOutputError
        A snapshot is deleted, and none has come since.
    """
    tables = dict(reading.tables)
    for relation_id, stretch in reading.tables.items():
        lsns = [copy.lsn for copy in stretch.snapshots if _key(copy) not in found.files]
        if not lsns:
            continue
        later = tuple(copy for copy in stretch.snapshots if copy.lsn > lsns[-1])
        if later:
            start = later[0].lsn - 1
            tables[relation_id] = stretch._replace(start=start, snapshots=later)
        else:
            raise PgOutputError(
                f"the files of the snapshot of relation {relation_id} are deleted from {where}: "
                f"have this table copied again"
            )
    return reading._replace(tables=tables)


def _key(copy: Copy) -> tuple[int, int]:
    return copy.relation_id, copy.generation


def check_file(reader: SegmentReader, metadata: SegmentMetadata, copy: Copy | None) -> None:
    """Refuse a file that is not what its name says.

    Parameters
    ----------
    reader : SegmentReader
    metadata : SegmentMetadata
        Of another file of the same directory.
    copy : Copy or None
        The copy that it should be a part of; None for a segment.

    Raises
    ------
    PgOutputError
        It is of another slot or copy, or a segment has the name of a snapshot's file, or the other
        way round.
    """
    differences = metadata.differences(reader.metadata)
    if differences:
        raise PgOutputError(
            f"{reader.path} does not go together with the other files: {'; '.join(differences)}"
        )
    is_of = reader.metadata.start_lsn if reader.metadata.snapshot else None
    if is_of != (None if copy is None else copy.lsn - 1):
        kind = "a snapshot" if is_of is not None else "a segment"
        raise PgOutputError(
            f"{reader.path} holds a part of {kind} that has another name: restore what was there"
        )
