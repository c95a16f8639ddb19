"""Which files have the changes of one table, and its newest version; decided on the driver."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.directory.copies import Tables
from pgoutput_fast.directory.known import how_to_copy, known_tables
from pgoutput_fast.directory.looking import Look, check_file, look, readable
from pgoutput_fast.directory.reading import Position, first_position, lacking, next_reading
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.history import HistoryFollower
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.names import shown_name, shown_table
from pgoutput_fast.protocol.messages import Relation
from pgoutput_fast.segments import SegmentMetadata, SegmentReader, list_segments
from pgoutput_fast.segments.listing import Contents, metadata_of
from pgoutput_fast.segments.structure import ANNOUNCEMENTS, tags_of

from ._executor import Target, change_batches, decoder_of

if TYPE_CHECKING:
    from pgoutput_fast.decoding.plan import RelationPlan
    from pgoutput_fast.directory.copies import Copy
    from pgoutput_fast.history import History
    from pgoutput_fast.settings import Settings

_Path = str | os.PathLike[str]


class Item(NamedTuple):
    """A file that an executor reads whole.

    Attributes
    ----------
    path : str
    window : (int, int) or None
        The transactions that count: those that commit from the first LSN on and before the second
        one; None: all.
    copy : Copy or None
        The copy of which it has rows.
    """

    path: str
    window: tuple[int, int] | None
    copy: Copy | None


class Planned:
    """What there is to read.

    Parameters
    ----------
    path : path or iterable of paths
        A directory, or files of segments.

    Attributes
    ----------
    metadata : SegmentMetadata
        Of the newest file.
    end : int
        What is committed before this LSN is there.

    Raises
    ------
    PgOutputError
        There is nothing, or it can't be read.
    """

    metadata: SegmentMetadata
    end: int

    def __init__(self, path: _Path | Iterable[_Path]) -> None:
        self._directory: Path | None = None
        self._where = "the segments"
        if isinstance(path, (str, os.PathLike)) and Path(path).is_dir():
            self._directory = Path(path)
            self._where = str(path)
            found = look(self._directory)
        else:
            segments = list_segments(path)
            begin = segments[0].start_lsn if segments else 0
            found = Look(Contents(segments, begin, segments[-1].end_lsn if segments else 0), {}, {})
        self._found = found
        self.end = found.contents.end
        files = [one.path for one in found.contents.segments]
        files = files or [paths[0] for paths in found.files.values()]
        if not files:
            known = None if self._directory is None else metadata_of(self._directory)
            if known is None:
                raise PgOutputError(
                    f"there are no segments in {path}", code="not_begun", path=str(path)
                )
            self.metadata = known
            return
        with SegmentReader(files[-1]) as reader:
            self.metadata = reader.metadata

    def newest(
        self, table: str, settings: Settings, kept: History | None = None
    ) -> RelationPlan | None:
        """The newest version of the table that has, or had last, a name; None if there is none.

        Parameters
        ----------
        table : str
        settings : Settings
        kept : History, optional
            Tells which of two tables has the name, where nothing else does.
        """
        relation_id = self._relation_id(table, settings, kept)
        if relation_id is None:
            return None
        plan = None
        for segment in reversed(self._found.contents.segments):
            plan = _announced(segment.path, relation_id, settings)
            if plan is not None:
                break
        state = self._found.states.get(relation_id)
        copy = state.snapshots[-1] if state is not None and state.snapshots else None
        paths = self._found.files.get((relation_id, copy.generation)) if copy is not None else None
        if copy is None or not paths:
            return plan
        copied = _announced(paths[0], relation_id, settings)
        if plan is None or copied is None or plan.relation.frame == copied.relation.frame:
            return plan or copied
        # The server announces a table before its first change, so that its newest version is the
        # snapshot's unless another one was announced since.
        for segment in reversed(self._found.contents.segments):
            if segment.end_lsn <= copy.lsn:
                break
            plan = _announced(segment.path, relation_id, settings, since=copy.lsn)
            if plan is not None:
                return plan
        return copied

    def as_of(self, relation_id: int) -> int:
        """The LSN of which the newest version of a table is known.

        Of a copy that is not finished nothing tells the columns yet, and its point may be before
        the end of the directory.
        """
        state = self._found.states.get(relation_id)
        held_from = None if state is None else state.held_from
        return self.end if held_from is None else min(self.end, held_from)

    def _relation_id(self, table: str, settings: Settings, kept: History | None) -> int | None:
        """The relation id of the table that has a name, or had it last."""
        announced: int | None = None
        for segment in reversed(self._found.contents.segments):
            for _, message in _relations(segment.path, settings):
                if shown_table(message) == table:
                    announced = message.relation_id
            if announced is not None:
                break
        copied = {}
        if self._directory is not None and self._found.states:
            tables = Tables(self._directory)
            for relation_id, state in self._found.states.items():
                name = tables.fields(state.copies[-1]).get("table")
                if isinstance(name, list) and shown_name(".".join(map(str, name))) == table:
                    there = [copy.lsn for copy in state.copies if copy.state != "gone"]
                    copied[relation_id] = max(there, default=-1)
        last = max(copied, key=copied.__getitem__, default=None)
        if last is None or announced is None or last == announced:
            return announced if last is None else last
        is_later = self._got_name(table, announced, (last, copied[last]), settings, kept)
        return announced if is_later else last

    def _got_name(
        self,
        table: str,
        announced: int,
        copied: tuple[int, int],
        settings: Settings,
        kept: History | None,
    ) -> bool:
        """Whether one table got a name that another one had when it was copied, at an LSN.

        A file begins with what was announced at any time before it, which tells nothing of when.
        """
        other, lsn = copied
        for segment in reversed(self._found.contents.segments):
            if segment.end_lsn <= lsn:
                break
            for commit, message in reversed([*_relations(segment.path, settings)]):
                has_name = shown_table(message) == table
                if commit is None or commit < lsn:
                    continue
                if message.relation_id == announced and has_name:
                    return True
                if message.relation_id == other:
                    return not has_name
        if kept is None or kept.is_empty or kept.newest_start <= lsn:
            return False
        return any(
            one.relation_id == announced and shown_table(one) == table
            for one in kept.newest_tables.tables
        )

    def tables(self, settings: Settings) -> set[str]:
        """The names of the tables that the newest segment announces, and of those with copies."""
        segments = self._found.contents.segments
        found = {shown_table(one) for _, one in _relations(segments[-1].path, settings)} if (
            segments
        ) else set()  # fmt: skip
        if self._directory is not None:
            known = known_tables(self._directory)
            found |= {shown_name(".".join(name)) for name in known.values()}
        return found

    def relations(self, relation_id: int, settings: Settings) -> Iterator[Relation]:
        """All versions of a table that files have, newest first, most of them several times."""
        paths = [one.path for one in reversed(self._found.contents.segments)]
        paths += [files[0] for key, files in self._found.files.items() if key[0] == relation_id]
        for path in paths:
            for _, message in _relations(path, settings):
                if message.relation_id == relation_id:
                    yield message

    def items(
        self, relation_id: int | None, start: int | None = None, end: int | None = None
    ) -> list[Item]:
        """The files that have changes of a table which count.

        Parameters
        ----------
        relation_id : int or None
        start : int, optional
            What was committed before this LSN is not wanted; by default it begins with the newest
            snapshot.
        end : int, optional
            What was committed from this LSN on is not wanted, nor the snapshots since.

        Raises
        ------
        PgOutputError
            Some of them are deleted.
        """
        found = self._found if end is None else self._found.before(end)
        begin, last = found.contents.begin, found.contents.end
        position = first_position(found.states, begin)
        if start is not None:
            position = Position(start, {})
        if relation_id is not None and relation_id in lacking(position, found.states, begin):
            if start is not None and start < begin:
                raise PgOutputError(
                    f"what was committed from {format_lsn(start)} on, and before "
                    f"{format_lsn(begin)}, is deleted from {self._where}",
                    code="changes_missing",
                    path=self._where,
                )
            raise PgOutputError(
                f"the changes since the snapshot of relation {relation_id} are deleted from "
                f"{self._where}: {how_to_copy(Path(self._where), [relation_id])}",
                code="changes_missing",
                path=self._where,
            )
        reading = next_reading(position, found.states, last if end is None else min(last, end))
        if relation_id is None:
            stretch = reading.rest
        else:
            reading = reading._replace(tables={relation_id: reading.of(relation_id)})
            stretch = readable(reading, found, self._where).of(relation_id)
        items = [
            Item(str(path), None, copy) for copy in stretch.snapshots for path in found.of(copy)
        ]
        start, end = stretch.window
        for segment in found.contents.segments:
            if segment.start_lsn < end and start < segment.end_lsn:
                is_whole = start <= segment.start_lsn and segment.end_lsn <= end
                items.append(Item(str(segment.path), None if is_whole else (start, end), None))
        return items


def item_batches(item: Item, metadata: SegmentMetadata, target: Target) -> Iterator[pa.RecordBatch]:
    """The changes of a file, on an executor."""
    follower = None
    if target.history is not None:
        follower = HistoryFollower(target.history, target.history_policy)
        settings = dataclasses.replace(target.settings, registry=follower.registry)
        target = dataclasses.replace(target, settings=settings)
    with SegmentReader(item.path) as reader:
        check_file(reader, metadata)
        # The other columns are filled in from the Begins in a segment.
        names = ["data", "lsn", "seq"]
        if item.copy is not None:
            names += ["commit_lsn", "commit_time"]

        def parts(batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
            if follower is None:
                return [batch]
            return follower.split(batch, Path(item.path), target.settings.client_encoding)

        frames = (
            (f"segment {item.path}", part.select(names))
            for batch in reader
            for part in parts(_within(batch, item.window))
        )
        yield from change_batches(
            frames, target, read=item.copy is not None, follower=follower, path=item.path
        )


def _within(batch: pa.RecordBatch, window: tuple[int, int] | None) -> pa.RecordBatch:
    """The frames of the transactions that count, and what announces tables and types."""
    if window is None:
        return batch
    lsns = batch.column("commit_lsn")
    inside = pc.and_(pc.greater_equal(lsns, window[0]), pc.less(lsns, window[1]))
    return batch.filter(pc.or_(pc.fill_null(inside, False), _announces(batch)))


def _announces(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Whether each frame is a Type or Relation."""
    return pa.array(np.isin(tags_of(batch.column("data")), ANNOUNCEMENTS))


def _relation_batches(path: Path) -> Iterator[Any]:
    """The Types and Relations of a file, with the LSN of the commit beside each."""
    with SegmentReader(path) as reader:
        for batch in reader:
            yield batch.filter(_announces(batch))


def _relations(path: Path, settings: Settings) -> Iterator[tuple[int | None, Relation]]:
    """The Relations of a file in their order, and the commit LSN of each that was sent there."""
    decoder = decoder_of(settings)
    for batch in _relation_batches(path):
        commits = batch.column("commit_lsn").to_pylist()
        for commit, frame in zip(commits, batch.column("data").to_pylist(), strict=True):
            message = decoder.decode(frame)
            if isinstance(message, Relation):
                yield commit, message


def _announced(
    path: Path, relation_id: int, settings: Settings, *, since: int = 0
) -> RelationPlan | None:
    """The plan of a table's last Relation in a file.

    With `since`, only of one that a transaction has sent which committed there or later.
    """
    decoder = decoder_of(settings)
    plan = None
    for batch in _relation_batches(path):
        commits = batch.column("commit_lsn").to_pylist()
        for commit, frame in zip(commits, batch.column("data").to_pylist(), strict=True):
            message = decoder.decode(frame)
            if not isinstance(message, Relation) or message.relation_id != relation_id:
                continue
            if not since or (commit is not None and commit >= since):
                plan = decoder.state.plan(relation_id)
    return plan
