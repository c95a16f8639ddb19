"""What a reader sees of a directory: segments, states of tables and files of snapshots together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PgOutputError, counted
from ..segments.folders import TABLES
from ..segments.format import SegmentMetadata
from ..segments.listing import Contents, contents
from ..segments.reader import SegmentReader
from .copies import Copy, Tables, TableState
from .known import how_to_copy
from .snapshots import number_of, snapshot_files, snapshot_path, unmarked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .reading import Reading

_NAMED = 3  # the most files that an error lists


class CopyFile(NamedTuple):
    """A file of a copy that is whole.

    Fields: path, rows (how many it has, where the Truncate of the first file counts as one).
    """

    path: Path
    rows: int


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

    def of(self, copy: Copy) -> list[CopyFile]:
        """The files of a copy that is to be read, in the order of its rows.

        Raises
        ------
        PgOutputError
            They are deleted; or as of `files_of_copy`.
        """
        paths = self.files[_key(copy)]
        directory = paths[0].parent.parent
        found = files_of_copy(directory, copy, paths)
        if not found:
            raise _deleted(copy.relation_id, str(directory))
        return found


def files_of_copy(directory: Path, copy: Copy, paths: Sequence[Path]) -> list[CopyFile]:
    """The files of a copy, if they are all those that it had when it was finished.

    Parameters
    ----------
    directory : pathlib.Path
    copy : Copy
    paths : sequence of pathlib.Path
        What there is, from the first file on.

    Returns
    -------
    list of CopyFile
        Empty if the copy has just been deleted.

    Raises
    ------
    PgOutputError
        A file is missing, or is too much; or the copy's mark can't be read.
    """
    fields: Any = Tables(directory).fields(copy)
    counts = [1, *fields["files"]]
    expected = [snapshot_path(directory, copy, number) for number in range(len(counts))]
    if expected == list(paths):
        return [*map(CopyFile, paths, counts)]
    if not os.path.lexists(expected[0]):
        return []  # the first one is deleted before the others
    missing = sorted(path.name for path in {*expected} - {*paths})
    others = sorted(path.name for path in {*paths} - {*expected})
    what = [f"{_listed(names)} {why}" for names, why in (
        (missing, "missing"), (others, "too much")
    ) if names]  # fmt: skip
    raise PgOutputError(
        f"the snapshot of relation {copy.relation_id} in {directory} is not what it was when it "
        f"was finished: of {paths[0].parent} {' and '.join(what)}; restore what was there, or "
        f"{how_to_copy(directory, [copy.relation_id])}"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def check_marks(
    directory: Path,
    files: Iterable[tuple[int, int]],
    states: Mapping[int, TableState],
    accepted: Iterable[int] = (),
) -> None:
    """Refuse a directory that has lost marks of copies.

    Parameters
    ----------
    directory : pathlib.Path
    files : iterable of (int, int)
        What `snapshot_files` gave.
    states : mapping of int to TableState
    accepted : iterable of int
        Relation ids of tables that are to be copied again, so that what was lost is replaced.

    Raises
    ------
    PgOutputError
        There are files of a copy, and no mark.
    """
    lost = [key for key in unmarked(files, states) if key[0] not in {*accepted}]
    if not lost:
        return
    names = [snapshot_path(directory, Copy(*key, False, "snapshot", 0), 0).stem for key in lost]
    begun = [name.rpartition("-")[0] + "-….json" for name in names]
    raise PgOutputError(
        f"{directory} has files of snapshots that nothing marks as such: of "
        f"{TABLES.path(directory)} {_listed(begun)} missing; restore what was there, or "
        f"{how_to_copy(directory, sorted({key[0] for key in lost}))}"
    )


def look(directory: Path) -> Look:
    """What a directory has now.

    Raises
    ------
    PgOutputError
        The directory can't be read, or files of a snapshot are there without its mark.
    """
    found = contents(directory)
    tables = Tables(directory)
    states = tables.read()  # behind the end, as `next_reading` says
    try:
        while unmarked(copies := snapshot_files(directory), states):
            # A copy may have begun, or been finished, since the marks were listed.
            states = tables.read()
            check_marks(directory, copies, states)
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
            raise _deleted(relation_id, where)
    return reading._replace(tables=tables)


def _deleted(relation_id: int, where: str) -> PgOutputError:
    return PgOutputError(
        f"the files of the snapshot of relation {relation_id} are deleted from {where}: "
        f"{how_to_copy(Path(where), [relation_id])}"
    )


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


def batches_of(reader: SegmentReader, rows: int | None) -> Iterator[Any]:
    """The record batches of a file; in one of a snapshot, its rows have to be all there.

    Parameters
    ----------
    reader : SegmentReader
    rows : int or None
        So many rows the file has, as of `CopyFile`.

    Raises
    ------
    PgOutputError
        The rows are those of another file of the copy, or more or fewer; or as of `SegmentReader`.
    """
    named = number_of(reader.path) if reader.metadata.snapshot else None
    if named is None:
        yield from reader
        return
    number, count = named[2], 0
    for batch in reader:
        seqs = batch.column("seq").drop_null()
        # The file's structure says that they follow each other.
        if not count and len(seqs) and seqs[0].as_py() != number << 32:
            raise _other_rows(reader, "its rows have other numbers")
        count += len(seqs)
        yield batch
    if rows is not None and count != rows:
        raise _other_rows(reader, f"it has {counted(count, 'row')}, and had {rows}")


def _other_rows(reader: SegmentReader, why: str) -> PgOutputError:
    return PgOutputError(
        f"{reader.path} is not the file that the copy of its table wrote ({why}): restore what "
        f"was there, or have the table copied again"
    )
