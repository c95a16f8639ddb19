"""What a reader sees of a directory: segments, states of tables and files of snapshots together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PgOutputError
from ..segments.format import SegmentMetadata
from ..segments.listing import Contents, contents
from ..segments.reader import SegmentReader
from .copies import Copy, Tables, TableState
from .known import how_to_copy
from .snapshots import snapshot_files, snapshot_path

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def before(self, lsn: int) -> Look:
        """The same for who reads what was committed before an LSN: without the copies since."""
        states = {}
        for relation_id, state in self.states.items():
            copies = tuple(copy for copy in state.copies if copy.lsn <= lsn)
            first = state.copies[0]
            if first.first and not any(copy.state == "snapshot" for copy in copies):
                # Nothing of a table counts before its first copy.
                copies = (first._replace(state="waiting", lsn=min(first.lsn, lsn)),)
            if copies:
                states[relation_id] = TableState(copies)
        return self._replace(states=states)

    def of_table(self, relation_id: int) -> Look:
        """The same for who reads this table alone: what others lack does not matter."""
        states = {key: state for key, state in self.states.items() if key == relation_id}
        files = {key: paths for key, paths in self.files.items() if key[0] == relation_id}
        return self._replace(states=states, files=files)

    def of(self, copy: Copy) -> list[Path]:
        """Return the files of a copy that is to be read, in the order of its rows.

        Raises
        ------
        PgOutputError
            A file is not there, or the copy's mark can't be read.
        """
        paths = self.files[_key(copy)]
        directory = paths[0].parent.parent
        fields: Any = Tables(directory).fields(copy)
        expected = [snapshot_path(directory, copy, i) for i in range(1 + len(fields["files"]))]
        lost = next((path for path in expected if path not in paths), None)
        if lost is None:
            return expected
        # A copy's first file is deleted before the others.
        if not os.path.lexists(expected[0]):
            raise _deleted(copy.relation_id, str(directory))
        raise PgOutputError(
            f"{lost} is not there, a file of a snapshot",
            code="missing_path",
            path=str(lost),
            hint=f"Restore it, or {how_to_copy(directory, [copy.relation_id])}",
        )


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
        raise PgOutputError(
            f"can't read snapshots of {directory}: {error.strerror}",
            code="io_failed",
            path=str(directory),
        ) from error
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
            raise _deleted(relation_id, where)
    return reading._replace(tables=tables)


def _deleted(relation_id: int, where: str) -> PgOutputError:
    return PgOutputError(
        f"the files of the snapshot of relation {relation_id} are deleted from {where}: "
        f"{how_to_copy(Path(where), [relation_id])}",
        code="changes_missing",
        path=where,
    )


def _key(copy: Copy) -> tuple[int, int]:
    return copy.relation_id, copy.generation


def check_file(reader: SegmentReader, metadata: SegmentMetadata) -> None:
    """Refuse a file of another slot or history.

    Parameters
    ----------
    reader : SegmentReader
    metadata : SegmentMetadata
        Of another file of the same directory.

    Raises
    ------
    PgOutputError
        The two are not of one slot.
    """
    differences = metadata.differences(reader.metadata)
    if differences:
        raise PgOutputError(
            f"{reader.path} does not go together with the other files: {'; '.join(differences)}",
            code="another_history",
            path=str(reader.path),
        )
