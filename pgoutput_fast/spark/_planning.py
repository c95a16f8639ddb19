"""Decide on the driver which files have the changes of one table, and find its newest version."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.changelog.history import HistoryFollower
from pgoutput_fast.changelog.known import announced_tables, known_tables
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.changelog.view import check_file, view_of
from pgoutput_fast.names import shown_name, shown_table
from pgoutput_fast.protocol.messages import decode_rare
from pgoutput_fast.segments import Segment, SegmentMetadata, SegmentReader
from pgoutput_fast.segments.structure import ANNOUNCEMENTS, tags_of

from ._executor import ExecutorTarget, change_batches, decoder_of

if TYPE_CHECKING:
    from pgoutput_fast.changelog.history import History
    from pgoutput_fast.changelog.read_plan import Read
    from pgoutput_fast.decoding.plan import RelationPlan
    from pgoutput_fast.protocol.messages import Relation
    from pgoutput_fast.segments.layout_index import Span
    from pgoutput_fast.settings import Settings

_Path = str | os.PathLike[str]


class Planned:
    """The files to read.

    Parameters
    ----------
    path : path or iterable of paths
        A change log, or files of segments.

    Attributes
    ----------
    metadata : SegmentMetadata
        The metadata of the newest file.
    end : int
        The files have all commits before this LSN.

    Raises
    ------
    PgOutputError
        There are no segments, or they can't be read.
    """

    metadata: SegmentMetadata
    end: int

    def __init__(self, path: _Path | Iterable[_Path]) -> None:
        self._view = view_of(path)
        self.metadata = self._view.metadata
        self.end = self._view.end
        directory = Path(path) if isinstance(path, (str, os.PathLike)) else None
        self._directory = directory if directory is not None and directory.is_dir() else None

    def newest(
        self, table: str, settings: Settings, history: History | None = None
    ) -> RelationPlan | None:
        """Return the newest version of the table that has, or last had, a name; None if none had.

        Parameters
        ----------
        table : str
        settings : Settings
        history : History, optional
            The schema history: decides which of two tables has the name if segments do not tell.
        """
        relation_id = self._relation_id(table, settings, history)
        if relation_id is None:
            return None
        newest = next(self._plans(relation_id, settings), None)
        state = self._view.states.get(relation_id)
        snapshot = state.snapshots[-1] if state is not None and state.snapshots else None
        paths = (
            self._view.files.get((relation_id, snapshot.number)) if snapshot is not None else None
        )
        if snapshot is None or not paths:
            return newest
        snapshot_plan = _plan_of(_spans(paths[0])[-1], settings)
        if newest is None or newest.relation.frame == snapshot_plan.relation.frame:
            return snapshot_plan
        # Changes after the snapshot have the snapshot's layout or a newer one.
        return next(self._plans(relation_id, settings, since=snapshot.lsn), snapshot_plan)

    def as_of(self, relation_id: int) -> int:
        """Return the LSN up to which the newest version of a table is known.

        While a snapshot is not complete, the table's changes after it are not readable yet. The
        version may then be older than the end of the change log.
        """
        state = self._view.states.get(relation_id)
        waits_from = None if state is None else state.waits_from
        return self.end if waits_from is None else min(self.end, waits_from)

    def _relation_id(self, table: str, settings: Settings, history: History | None) -> int | None:
        """Return the relation id of the table that has, or last had, a name."""
        announced = self._announced(table, settings)
        snapshot_lsns = {}
        if self._directory is not None and self._view.states:
            tables = SnapshotStates(self._directory)
            for relation_id, state in self._view.states.items():
                name = tables.fields(state.all_snapshots[-1]).get("table")
                if isinstance(name, list) and shown_name(".".join(map(str, name))) == table:
                    lsns = [
                        snapshot.lsn for snapshot in state.all_snapshots if snapshot.state != "gone"
                    ]
                    snapshot_lsns[relation_id] = max(lsns, default=-1)
        last = max(snapshot_lsns, key=snapshot_lsns.__getitem__, default=None)
        if last is None or announced is None or last == announced:
            return announced if last is None else last
        is_later = self._got_name(table, announced, (last, snapshot_lsns[last]), settings, history)
        return announced if is_later else last

    def _announced(self, table: str, settings: Settings) -> int | None:
        """Return the relation id of the table that last had a name, as segments tell."""
        # Each segment announces again what earlier segments have announced: the newest is enough.
        for segment in self._view.segments[-1:]:
            for relation_id, name in reversed(announced_tables(segment.path).items()):
                if shown_name(".".join(name)) == table:
                    return relation_id
        named = (span for span in self._spans() if _name_of(span, settings) == table)
        return next((span.relation_id for span in named), None)

    def _got_name(
        self,
        table: str,
        announced: int,
        other_snapshot: tuple[int, int],
        settings: Settings,
        history: History | None,
    ) -> bool:
        """Return whether a table got a name after another table's snapshot had it, at an LSN."""
        other, lsn = other_snapshot
        for span in self._spans(since=lsn):
            if span.relation_id == announced and _name_of(span, settings) == table:
                return True
            if span.relation_id == other:
                return _name_of(span, settings) != table
        if history is None or history.is_empty or history.newest_start <= lsn:
            return False
        return any(
            entry.relation_id == announced and shown_table(entry) == table
            for entry in history.newest_tables.tables
        )

    def tables(self) -> set[str]:
        """Return the tables that the newest segment announces, and the tables with snapshots."""
        if self._directory is not None:
            table_names = known_tables(self._directory)
        else:
            table_names = announced_tables(self._view.segments[-1].path)
        return {shown_name(".".join(name)) for name in table_names.values()}

    def relations(self, relation_id: int, settings: Settings) -> Iterator[Relation]:
        """Yield all versions of a table in the files, newest first; most come several times."""
        yield from (plan.relation for plan in self._plans(relation_id, settings))
        for key, files in self._view.files.items():
            if key[0] == relation_id:
                yield _plan_of(_spans(files[0])[-1], settings).relation

    def _spans(self, relation_id: int | None = None, *, since: int = 0) -> Iterator[Span]:
        """Yield the spans of segments, of one table or all, newest first.

        With `since`, only spans with a transaction that was committed at this LSN or later.
        """
        for segment in reversed(self._view.segments):
            if segment.end_lsn <= since:
                return
            if relation_id is not None and (
                relation_id not in self._view.layouts_reader.relation_ids(segment.path)
            ):
                continue
            for span in reversed(_spans(segment.path)):
                if relation_id in (None, span.relation_id) and span.last_commit_lsn >= since:
                    yield span

    def _plans(
        self, relation_id: int, settings: Settings, *, since: int = 0
    ) -> Iterator[RelationPlan]:
        """Yield the plans of a table's layouts, newest first."""
        for span in self._spans(relation_id, since=since):
            yield _plan_of(span, settings)

    def reads(
        self, relation_id: int | None, start: int | None = None, end: int | None = None
    ) -> list[Read]:
        """Return the reads of one table, each of one file.

        Parameters
        ----------
        relation_id : int or None
        start : int, optional
            Leave out what was committed before this LSN; by default begin with the newest snapshot.
        end : int, optional
            Leave out what was committed from this LSN on, and later snapshots.

        Raises
        ------
        PgOutputError
            The capture has deleted some of the changes.
        """
        if relation_id is None:
            return []
        view = self._view if end is None else self._view.before(end)
        view = view.of_table(relation_id)
        plan = view.plan(view.first_position() if start is None else view.position_at(start))
        return [] if plan is None else plan.of_table(relation_id)


def read_batches(
    read: Read, metadata: SegmentMetadata, target: ExecutorTarget
) -> Iterator[pa.RecordBatch]:
    """Yield the changes of a read of one table and one file; runs on an executor."""
    follower = None
    if target.history is not None:
        follower = HistoryFollower(target.history, target.history_policy)
        settings = dataclasses.replace(target.settings, registry=follower.registry)
        target = dataclasses.replace(target, settings=settings)
    (path,), is_snapshot = read.files, read.snapshot is not None
    wanted = None if is_snapshot else _wanted(read)
    with SegmentReader(path) as reader:
        check_file(reader, metadata)
        # The Begins in a segment give the other columns.
        names = ["data", "lsn", "seq"]
        if is_snapshot:
            names += ["commit_lsn", "commit_time"]

        def parts(batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
            if follower is None:
                return [batch]
            return follower.split(batch, path, target.settings.client_encoding)

        frames = (
            (f"segment {path}", part.select(names))
            for batch in reader
            for part in parts(_within(batch, wanted))
        )
        yield from change_batches(
            frames, target, read=is_snapshot, follower=follower, path=str(path)
        )


def _wanted(read: Read) -> tuple[int, int] | None:
    """Return the range of commit LSNs that is wanted of a segment; None: all."""
    ((start, end),) = read.ranges.values()
    segment = Segment.from_path(read.files[0])
    return None if start <= segment.start_lsn and segment.end_lsn <= end else (start, end)


def _within(batch: pa.RecordBatch, window: tuple[int, int] | None) -> pa.RecordBatch:
    """Return the frames of the wanted transactions, and all Relations and Types."""
    if window is None:
        return batch
    lsns = batch.column("commit_lsn")
    inside = pc.and_(pc.greater_equal(lsns, window[0]), pc.less(lsns, window[1]))
    return batch.filter(pc.or_(pc.fill_null(inside, False), _announces(batch)))


def _announces(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return whether each frame is a Type or Relation."""
    return pa.array(np.isin(tags_of(batch.column("data")), ANNOUNCEMENTS))


def _spans(path: Path) -> list[Span]:
    """Return the layout index of a file."""
    with SegmentReader(path) as reader:
        return reader.index


def _plan_of(span: Span, settings: Settings) -> RelationPlan:
    """Return the plan of a span's layout."""
    decoder = decoder_of(settings)
    for frame in (*span.types, span.relation):
        decoder.decode(frame)
    plan = decoder.state.plan(span.relation_id)
    assert plan is not None  # noqa: S101 - its Relation was decoded
    return plan


def _name_of(span: Span, settings: Settings) -> str:
    """Return the name of a span's table, as users write it."""
    relation: Any = decode_rare(span.relation, in_stream=False, encoding=settings.encoding)
    return shown_table(relation)
