"""The source ``format("pgoutput")``: changes as batch and streaming DataFrames.

Spark makes a :class:`PgOutputDataSource` wherever it needs one. For a stream, one process on the
driver plans all micro-batches, and captures the slot if the query asks for it. Executors only read
files.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        InputPartition,
        LessThan,
        LessThanOrEqual,
    )
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        SupportsTriggerAvailableNow,
    )
except ImportError as error:
    from pyspark import __version__

    from pgoutput_fast.errors import PgOutputError

    raise PgOutputError(
        f"the source pgoutput needs PySpark 4.2 or newer, and this is {__version__}; "
        "decode_frames, decode_udf and read_segments work with it",
        code="missing_package",
    ) from error

from pgoutput_fast.apply.embedded_capture import DEFAULT_CAPTURE, EmbeddedCapture
from pgoutput_fast.apply.unpublished import mistaken
from pgoutput_fast.changelog.commits import has_commit, newest_commit
from pgoutput_fast.changelog.consumers import Consumer, claim_consumer
from pgoutput_fast.changelog.history import history_of
from pgoutput_fast.changelog.log import ChangeLog
from pgoutput_fast.changelog.read_plan import Position
from pgoutput_fast.encodings import python_encoding
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.lsn import format_lsn, parse_lsn
from pgoutput_fast.names import shown_table
from pgoutput_fast.protocol.messages import decode_rare
from pgoutput_fast.segments import Segment, SegmentReader
from pgoutput_fast.segments.listing import has_begun, not_begun
from pgoutput_fast.values import EPOCH_UTC

from ._change_files import DDL, write_changes
from ._envelopes import RECORD_DDL, envelopes
from ._offsets import is_no_offset, newest_of, offset_at, position_of
from ._planning import read_batches
from ._source_options import SourceOptions, shown, source_options
from ._worker import end_quietly
from ._worker_errors import worker_errors
from .dataframes import (
    ChosenTable,
    FoundTable,
    changes_ddl,
    find_table,
    published_table,
    read_groups,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pgoutput_fast.changelog.read_plan import Read
    from pgoutput_fast.changelog.snapshot_states import Snapshot
    from pgoutput_fast.changelog.view import View
    from pgoutput_fast.segments import SegmentMetadata

    from ._executor import ExecutorTarget

_log = logging.getLogger(__name__)

_WAIT = 0.05  # seconds between two checks of what a capture has written
_ENDING = 5.0
"""Seconds to wait for the process of a stopped query to end, before another query is refused."""
_AS_OF = "columns as of {}"
"""The comment on the column `after`: tells a reader the LSN of the schema.

Spark may ask for a reader long after it has asked for the schema, and may ask another object.
"""
_AS_OF_TEXT = re.compile(_AS_OF.format("([0-9A-F]+/[0-9A-F]+)"))
_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"

_in_worker = worker_errors(shown)
"""A decorator for the methods that Spark calls in a process of its own."""


class PgOutputDataSource(DataSource):
    """Reads the changes of a slot, or of a change log that a capture has written.

    ``spark.readStream.format("pgoutput").options(…).load()`` reads a stream, ``spark.read`` the
    changes that are already there. See docs/how-to/spark-streams.md.
    """

    @_in_worker
    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = source_options(options)

    @classmethod
    def name(cls) -> str:
        """Return the source's name for `format()`."""
        return "pgoutput"

    @_in_worker
    def schema(self) -> str:
        """Return the columns of the DataFrame."""
        if self._options.mode == "manifest":
            return DDL
        if self._options.mode == "envelope":
            return RECORD_DDL
        table = _find(self._options)
        return changes_ddl(table.columns, _AS_OF.format(format_lsn(table.as_of)))

    @_in_worker
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        # Spark refuses a reader that takes filters if filters are not to be pushed down.
        kind = _FilteringReader if _PUSHING in sys.modules else _BatchReader
        if not has_begun(self._options.directory):
            error = not_begun(self._options.directory)
            error.hint = ("Start a streaming query or a capture before the batch query",)
            raise error
        return kind(self._options, schema)

    @_in_worker
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query."""
        if self._options.ending_lsn is not None:
            raise PgOutputError(
                "it is only for batch queries", code="bad_option", parameter="ending_lsn"
            )
        return _StreamReader(self._options, schema)


class _Partition(InputPartition):
    """Files for one task to read, for the changes of one table.

    Parameters
    ----------
    reads : list of Read
    metadata : SegmentMetadata
    target : ExecutorTarget
        The form of the changes, without the schema history.
    directory : str
        The change log whose schema history has the types; "": no history.
    """

    def __init__(
        self, reads: list[Read], metadata: SegmentMetadata, target: ExecutorTarget, directory: str
    ) -> None:
        super().__init__(None)
        self.reads, self.metadata = reads, metadata
        self.target, self.directory = target, directory


class _Reads(InputPartition):
    """Reads for one task, for the changes of all tables.

    Parameters
    ----------
    reads : list of Read
    metadata : SegmentMetadata
    options : SourceOptions
    """

    def __init__(
        self, reads: list[Read], metadata: SegmentMetadata, options: SourceOptions
    ) -> None:
        super().__init__(None)
        self.reads, self.metadata = reads, metadata
        # A task connects to no server.
        self.options = dataclasses.replace(options, dsn=None, capture_options=None)


def _read_partitions(
    reads: list[Read], metadata: SegmentMetadata, options: SourceOptions
) -> list[InputPartition]:
    """Divide reads into consecutive partitions of similar size, as many as the options allow."""
    total, size_so_far, number = sum(read.size for read in reads), 0, 0
    groups: list[list[Read]] = [[] for _ in range(options.tasks)]
    for read in reads:
        groups[min(number, options.tasks - 1)].append(read)
        size_so_far += read.size
        number = size_so_far * options.tasks // max(total, 1)
    return [_Reads(group, metadata, options) for group in groups if group]


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield a partition's changes, records, or names of files that it writes, on an executor."""
    with worker_errors(shown):
        yield from _partition_batches(partition)


def _partition_batches(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if isinstance(partition, _Reads) and partition.options.mode == "envelope":
        options = partition.options
        yield from envelopes(
            partition.reads, partition.metadata, str(options.directory), options.style, str,
            tables=options.tables, policies=options.policies, history=options.history,
        )  # fmt: skip
    elif isinstance(partition, _Reads):
        options = partition.options
        yield from write_changes(
            partition.reads, partition.metadata, str(options.directory), options.output or "",
            tables=options.tables, policies=options.policies, history=options.history,
        )  # fmt: skip
    if not isinstance(partition, _Partition):
        return  # Spark makes a partition of its own if there is nothing to read
    target = partition.target
    if partition.directory:
        target = dataclasses.replace(target, history=history_of([partition.directory]))
    for read in partition.reads:
        yield from read_batches(read, partition.metadata, target)


def _partitions(
    reads: list[Read], chosen: ChosenTable, options: SourceOptions, schema: StructType
) -> list[InputPartition]:
    """Return the partitions of files; a column that is newer than the schema makes them fail."""
    if not reads:
        return []
    target = chosen.target
    if options.new_columns == "error":
        comment = _AS_OF_TEXT.fullmatch(schema["after"].metadata.get("comment", ""))
        if comment is not None:
            since, names = parse_lsn(comment[1]), {name for name, _ in target.columns}
        else:  # a user's schema, which may omit columns that the user does not want
            since, names = chosen.as_of, set(target.version.columns if target.version else ())
        target = dataclasses.replace(target, since=since, columns_at_since=frozenset(names))
    directory = "" if target.history is None else str(options.directory)
    target = dataclasses.replace(target, history=None)
    metadata = chosen.metadata
    return [
        _Partition(group, metadata, target, directory)
        for group in read_groups(reads, options.tasks)
    ]


def _find(options: SourceOptions) -> FoundTable:
    """Find a query's table in the change log, or on the server if the log has not begun."""
    table = options.table or ""
    if has_begun(options.directory):
        return find_table(
            options.directory, table, registry=options.registry, policies=options.policies
        )
    if not options.is_embedded:
        raise not_begun(options.directory)
    return published_table(
        options.dsn, options.publications or (), table, options.policies,
        binary=options.capture_options is not None and options.capture_options.binary,
        registry=options.registry,
    )  # fmt: skip


def _choose(options: SourceOptions, schema: StructType, table: FoundTable) -> ChosenTable:
    """Return a table with the schema that Spark has from :func:`_find` or from a user."""
    after: Any = schema["after"].dataType if "after" in schema.fieldNames() else None
    if hasattr(after, "fields"):
        chosen = table.chosen(after, options.history, may_lack=True)
        if chosen.changes.simpleString() == schema.simpleString():
            return chosen
    raise PgOutputError(
        "it must have all columns of a change, and the table's columns in before and after",
        code="bad_option",
        parameter="schema",
        hint="Leave out .schema() to get this schema",
    )


def _tell_mistaken(options: SourceOptions, log: ChangeLog) -> bool:
    """Warn of patterns that match no published table; False if the catalogue is not known yet."""
    history = log.history() if options.tables else None
    if history is None:
        return not options.tables
    published = [*map(shown_table, history.newest_tables.tables)]
    for warning in mistaken(options.tables or (), published):
        _log.warning("%s", warning)
    return True


# --- batches -------------------------------------------------------------------------------------


class _BatchReader(DataSourceReader):
    """Reads the changes of a change log between two LSNs."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._start = options.starting_lsn
        self._end = options.ending_lsn
        # The range of commit LSNs that the filters pass.
        self._wanted: tuple[int, int | None] = (0, None)

    @_in_worker
    def partitions(self) -> Sequence[InputPartition]:
        if self._options.mode != "table":
            return self._read_partitions()
        chosen = _choose(self._options, self._schema, _find(self._options))
        reads = []
        start, end = _both((self._start or 0, self._end), self._wanted)
        for read in chosen.reads(self._start, self._end):
            ((relation_id, (first, last)),) = read.ranges.items()
            if read.snapshot is not None:
                first, last = _of_snapshot(read.snapshot)
            first = max(first, start)
            last = last if end is None else min(last, end)
            if first < last:
                reads.append(read._replace(ranges={relation_id: (first, last)}))
        return _partitions(reads, chosen, self._options, self._schema)

    def _read_partitions(self) -> list[InputPartition]:
        log = ChangeLog(self._options.directory)
        view = log.view()
        _tell_mistaken(self._options, log)
        if self._end is not None:
            view = view.before(self._end)
        start = self._start
        plan = view.plan(view.first_position() if start is None else view.position_at(start))
        reads = [] if plan is None else [read for read in plan.reads if self._wants(read)]
        return _read_partitions(reads, view.metadata, self._options)

    def _wants(self, read: Read) -> bool:
        """Return whether the filters may pass some of a read's changes."""
        if read.snapshot is not None:
            first, last = _of_snapshot(read.snapshot)
        else:
            segment = Segment.from_path(read.files[0])
            first, last = segment.start_lsn, segment.end_lsn
        start, end = self._wanted
        return start < last and (end is None or first < end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)


class _FilteringReader(_BatchReader):
    """A reader for sessions that push filters down: filters of `commit_lsn` limit what it reads."""

    @_in_worker
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for filter_ in filters:
            bounds = _bounds(filter_)
            if bounds is not None:
                self._wanted = _both(self._wanted, bounds)
            # In the other modes the filters only leave out whole files; Spark filters the rest.
            if bounds is None or self._options.mode != "table":
                yield filter_


def _both(bounds: tuple[int, int | None], other: tuple[int, int | None]) -> tuple[int, int | None]:
    """Return the intersection of two ranges of LSNs."""
    ends = [end for _, end in (bounds, other) if end is not None]
    return max(bounds[0], other[0]), min(ends, default=None)


def _bounds(filter_: Filter) -> tuple[int, int | None] | None:
    """Return the range of commit LSNs that a filter passes: (first, end); None: no such filter."""
    value = getattr(filter_, "value", None)
    if getattr(filter_, "attribute", None) != ("commit_lsn",) or type(value) is not int:
        return None
    if isinstance(filter_, EqualTo):
        return value, value + 1
    if isinstance(filter_, GreaterThan):
        return value + 1, None
    if isinstance(filter_, GreaterThanOrEqual):
        return value, None
    if isinstance(filter_, LessThan):
        return 0, value
    if isinstance(filter_, LessThanOrEqual):
        return 0, value + 1
    return None


def _of_snapshot(snapshot: Snapshot) -> tuple[int, int]:
    """Return the range of a snapshot: all of its rows have one commit LSN, just below its LSN."""
    return snapshot.lsn - 1, snapshot.lsn


# --- streams -------------------------------------------------------------------------------------


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches in one process on the driver; pickled copies read on the executors."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        # Spark pickles the reader, so the planner is made later, in the planning process.
        self._options = options
        self._schema = schema
        self._planner: _Planner | None = None
        self._ends = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    def _planning(self) -> _Planner:
        if self._planner is None:
            self._planner = _Planner(self._options, self._schema, ends=self._ends)
        return self._planner

    @_in_worker
    def prepareForTriggerAvailableNow(self) -> None:
        """Let the stream end with what is committed by now."""
        self._ends = True

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that `maxBytesPerTrigger` sets."""
        most = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    @_in_worker
    def initialOffset(self) -> dict[str, Any]:
        """Return the offset where a new query begins."""
        return self._planning().begin()

    @_in_worker
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch; `start` is in the checkpoint already."""
        most = limit.max_bytes if isinstance(limit, ReadMaxBytes) else sys.maxsize
        self._check_slot(start)
        return self._planning().next(start, most)

    def _check_slot(self, start: Mapping[str, Any]) -> None:
        """Refuse another slot's checkpoint before the capture makes a slot that nobody reads."""
        slot, before = self._options.slot, start.get("slot")
        if self._planner is None and slot is not None and before not in (None, slot):
            raise PgOutputError(
                f"the checkpoint belongs to slot {before!r}, not to {slot!r}",
                code="another_history",
                parameter="slot",
                hint=(
                    "Give ",
                    Argument("slot", before),
                    ", or begin with a new checkpoint, and a new target",
                ),
            )

    @_in_worker
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the offset of the change log's end."""
        return None if self._planner is None else self._planner.newest()

    @_in_worker
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return what a micro-batch reads; Spark calls this first for a batch that it repeats."""
        self._check_slot(start)
        return self._planning().partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the changes of a partition, on an executor."""
        return _read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark omits this call for the last batch, so `latestOffset` acknowledges."""

    def stop(self) -> None:
        """End the capture."""
        end_quietly()
        if self._planner is not None:
            self._planner.close()


class _Planner:
    """Plans a stream's micro-batches, and captures the slot if the options say so.

    Parameters
    ----------
    options : SourceOptions
    schema : StructType
    ends : bool
        Whether the stream ends with what is committed by now.
    """

    def __init__(self, options: SourceOptions, schema: StructType, *, ends: bool) -> None:
        self._options = options
        self._ends = ends
        self._name = options.consumer or _consumer_name(options.table or options.mode)
        self._until: int | None = None
        self._stop = threading.Event()
        self._capture: EmbeddedCapture | None = None
        self._consumer: Consumer | None = None
        self._lock: int | None = None
        self._schema = schema
        self._chosen: ChosenTable | None = None
        self._committed: datetime.datetime | None = None
        self._has_checked_patterns = False
        self._is_compared = False
        self._log = ChangeLog(options.directory)
        is_new = not self._log.has_begun
        if is_new and not options.is_embedded:
            raise not_begun(options.directory)
        if not is_new:
            self._claim()
        if options.is_embedded:
            self._begin_capture()
        if is_new:
            self._claim()
        if ends:
            self._until = self._end_of_now()

    # --- the capture -----------------------------------------------------------------------------

    def _begin_capture(self) -> None:
        from pgoutput_fast.connections import ConnectionParameters

        options = self._options
        self._capture = EmbeddedCapture(
            ConnectionParameters(options.dsn), options.directory, self._stop,
            "now" if self._ends else None, options.slot or "", options.publications or (),
            options.capture_options or DEFAULT_CAPTURE,
        )  # fmt: skip
        self._capture.start()

    def _end_of_now(self) -> int:
        """Return the end of what is committed by now, once the capture has written it."""
        if self._capture is not None:
            while not self._capture.is_over():
                time.sleep(_WAIT)
            self._capture.result()
        return self._log.view().end

    def close(self) -> None:
        """End the capture, and let another query take this query's consumer name."""
        self._stop.set()
        if self._capture is not None:
            self._capture.end()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- offsets ---------------------------------------------------------------------------------

    def _claim(self) -> None:
        end = time.monotonic() + _ENDING
        while self._lock is None:
            try:
                self._lock = claim_consumer(
                    self._options.directory, self._name, "Spark query",
                    " (give each query its own consumer by the option consumer)",
                )  # fmt: skip
            except PgOutputError:
                if time.monotonic() > end:
                    raise
                time.sleep(_WAIT)

    def _view(self, relation_id: int | None = None) -> View:
        """Return a view of the change log; of one table alone, if the table is known."""
        view = self._log.view()
        return view if relation_id is None else view.of_table(relation_id)

    def begin(self) -> dict[str, Any]:
        """Return the offset of a new query; Spark may ask for it in spite of a checkpoint."""
        plan = _find(self._options).plan if self._options.mode == "table" else None
        relation_id = None if plan is None else plan.relation.relation_id
        view = self._view(relation_id)
        if self._options.starting_lsn is not None:
            position = view.position_at(self._options.starting_lsn)
            if position.lsn > view.end:
                raise PgOutputError(
                    f"the change log {self._options.directory} ends at {format_lsn(view.end)}, "
                    f"before {format_lsn(position.lsn)}",
                    code="bad_option",
                    parameter="starting_lsn",
                    path=str(self._options.directory),
                )
        else:
            position = view.first_position()
        return self._query_offset(offset_at(view, position), relation_id)

    def next(self, start: dict[str, Any], most: int) -> dict[str, Any]:
        """Return the end of a batch of at most `most` bytes of files, or little more."""
        if self._capture is not None and self._capture.is_over():
            self._capture.result()
        relation_id = self._relation_id(start)
        view = self._view(relation_id)
        position = position_of(start, view)
        self._check_history(start)
        self._acknowledge(view, position)
        self._check_left(view, position, relation_id)
        if relation_id is not None:
            self._table(start)  # refuses another table's checkpoint even if there is no change
        if self._until is not None:
            view = view.before(self._until)
        plan = view.plan(position, most)
        self._has_checked_patterns = self._has_checked_patterns or _tell_mistaken(
            self._options, self._log
        )
        if plan is None:
            return start
        newest = newest_commit(plan.reads)
        if newest is not None:
            self._committed = EPOCH_UTC + datetime.timedelta(microseconds=newest.time)
        end = offset_at(view, plan.after, newest or newest_of(start))
        return self._query_offset(
            end, self._table(start).relation_id if self._options.mode == "table" else None
        )

    def _query_offset(self, offset: dict[str, Any], relation_id: int | None) -> dict[str, Any]:
        """Add the query's mode, and the table's relation id if known, to an offset."""
        table = {} if relation_id is None else {"relation_id": relation_id}
        return {**offset, "mode": self._options.mode, **table}

    def _relation_id(self, offset: Mapping[str, Any]) -> int | None:
        """Return the relation id in an offset; None: all tables, or the table is not known yet.

        Raises
        ------
        PgOutputError
            The offset has another mode, whose query read other changes, or none.
        """
        relation_id: int | None = offset.get("relation_id")
        if (before := offset.get("mode")) is None:
            raise is_no_offset(offset)
        if before != self._options.mode:
            raise PgOutputError(
                f"the checkpoint belongs to a query with the mode {before!r}, not "
                f"{self._options.mode!r}",
                code="bad_option",
                parameter="mode",
                hint=(
                    "Give ",
                    Argument("mode", before),
                    ", or begin with a new checkpoint, and a new target",
                ),
            )
        return relation_id

    def _check_history(self, offset: Mapping[str, Any]) -> None:
        """Refuse a change log that was restored to an earlier state and then continued.

        Only the first offset that Spark has from its checkpoint is checked.
        """
        if self._is_compared:
            return
        self._is_compared = True
        directory, newest = self._options.directory, newest_of(offset)
        if newest is None or has_commit(directory, newest) is not False:
            return
        raise PgOutputError(
            f"the change log {directory} lacks the transaction committed at "
            f"{format_lsn(newest.lsn)}, which this query has read: the change log and the server "
            "were restored to an earlier state",
            code="another_history",
            hint="Begin with a new checkpoint, and a new target",
        )

    def _check_left(self, view: View, position: Position, relation_id: int | None) -> None:
        """Refuse to wait for a dropped or unpublished table once all of its changes were read."""
        state = None if relation_id is None else view.states.get(relation_id)
        if state is None or state.all_snapshots[-1].state != "gone":
            return
        lsn = state.all_snapshots[-1].lsn
        if position.tables.get(relation_id or 0, position.lsn) >= lsn:
            raise PgOutputError(
                f"{self._options.table} was dropped, or left the publications, before "
                f"{format_lsn(lsn)}. The query has read all of its changes, and no more will come",
                code="no_table",
                hint="Publish the table again: it then gets a new snapshot, and the query "
                "continues. If publish_via_partition_root was changed, read the partitioned table "
                "or its partitions instead",
                table=self._options.table,
            )

    def _acknowledge(self, view: View, position: Position) -> None:
        """Let the capture delete what is before an offset that Spark's checkpoint has."""
        if view.end < position.lsn:
            raise PgOutputError(
                f"the checkpoint is at {format_lsn(position.lsn)}, but the change log "
                f"{self._options.directory} ends at {format_lsn(view.end)}: it is not the change "
                "log that the query has read before, or it was restored to an earlier state",
                code="another_history",
                path=str(self._options.directory),
                hint="Give the former change log, or begin with a new checkpoint, and a new target",
            )
        if view.begin > position.lsn:
            raise PgOutputError(
                f"the checkpoint is at {format_lsn(position.lsn)}, but the change log "
                f"{self._options.directory} begins at {format_lsn(view.begin)}: the changes in "
                "between are missing",
                code="changes_missing",
                path=str(self._options.directory),
                hint="Begin with a new checkpoint, and a new target",
            )
        if self._consumer is None:
            # The checkpoint may be older than the query's consumer name, which is then new.
            self._consumer = Consumer(self._options.directory, self._name, position)
        if self._consumer.position != position:
            self._consumer.advance(position)

    def newest(self) -> dict[str, Any]:
        """Return the offset at the change log's end, with facts about the query for listeners.

        These facts are the mode, the table, and the commit time of the newest transaction that
        `next` has returned.
        """
        view = self._view()
        facts = {"mode": self._options.mode, "table": self._options.table}
        if self._committed is not None:
            facts["committed"] = self._committed.isoformat()
        return {**offset_at(view, Position(view.end, {})), **facts}

    # --- partitions ------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the partitions that read the changes between two offsets."""
        view = self._view(self._relation_id(end))
        before, after = position_of(start, view), position_of(end, view)
        self._check_history(end)
        plan = view.plan(before, until=after)
        if plan is None:
            return []
        if self._options.mode != "table":
            return _read_partitions(plan.reads, view.metadata, self._options)
        # Before the first batch is finished, only `end` is an offset from the checkpoint.
        chosen = self._table({**start, **end})
        if chosen.planned is not None and after.lsn <= chosen.planned.end:
            target = dataclasses.replace(chosen.target, is_settled=True)
            chosen = chosen._replace(target=target)
        elif chosen.relation_id is not None:
            # Executors skip files without changes of the table, so they cannot check the name.
            self._check_name(view, chosen.relation_id, before.lsn, after.lsn)
        reads = [] if chosen.relation_id is None else plan.of_table(chosen.relation_id)
        return _partitions(reads, chosen, self._options, self._schema)

    def _check_name(self, view: View, relation_id: int, start: int, end: int) -> None:
        """Refuse to go on if another table has got the name between two LSNs."""
        encoding = python_encoding(view.metadata.encoding)
        for segment in view.segments:
            if segment.end_lsn <= start or segment.start_lsn >= end:
                continue
            with SegmentReader(segment.path) as reader:
                spans = reader.index
            for span in spans:
                relation: Any = decode_rare(span.relation, in_stream=False, encoding=encoding)
                if span.relation_id != relation_id and shown_table(relation) == self._options.table:
                    raise PgOutputError(
                        f"{segment.path}: {self._options.table} now has relation id "
                        f"{span.relation_id}, but the query reads relation id {relation_id}: that "
                        "table was dropped or renamed",
                        code="another_history",
                        table=self._options.table,
                        hint="Start the query again: it then reads the table that has the name now",
                    )

    def _table(self, start: Mapping[str, Any]) -> ChosenTable:
        """Return the table, with its columns from the time when the query began.

        Raises
        ------
        PgOutputError
            The offset `start` belongs to another table.
        """
        if self._chosen is None:
            table = _find(self._options)
            before = start.get("relation_id")
            now = before if table.plan is None else table.plan.relation.relation_id
            if before not in (None, now):
                raise PgOutputError(
                    f"the checkpoint belongs to the table with relation id {before}, but "
                    f"{self._options.table} now has relation id {now}: the former table was "
                    "renamed or dropped, or the checkpoint belongs to another query",
                    code="another_history",
                    table=self._options.table,
                    hint=(
                        "If the former table was renamed, give its new name as ",
                        Argument("table"),
                        ". Otherwise begin with a new checkpoint, and a new target",
                    ),
                )
            chosen = _choose(self._options, self._schema, table)
            version = chosen.target.version
            if version is None:
                return chosen  # the change log has nothing of the table yet
            target = dataclasses.replace(
                chosen.target, version=dataclasses.replace(version, newest=False)
            )
            self._chosen = chosen._replace(target=target)
        return self._chosen


_LONGEST = 63
"""The largest number of bytes in the name of a consumer."""


def _consumer_name(read: str) -> str:
    """Return the default consumer name of a query; characters not allowed become their codes."""
    coded = re.sub("[^A-Za-z0-9_.]", lambda match: f"-{match[0].encode().hex().upper()}", read)
    name = f"spark_{coded}"
    if len(name) > _LONGEST:
        digest = hashlib.sha256(read.encode()).hexdigest()[:16]
        name = f"{name[: _LONGEST - 17]}-{digest}"
    return name
