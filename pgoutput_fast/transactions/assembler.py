"""Make whole transactions of frames: streamed ones are staged until they are committed."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from .._impl import implementation, twin
from ..decoding.state import StreamState
from ..errors import Argument, DecodeError, PgOutputError, fail
from ..options import byte_count, choice
from ..policies import Policies
from ..protocol.messages import (
    BeginPrepare,
    CommitPrepared,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Type,
    decode_rare,
    published,
)
from ..protocol.wire import XID_SIZE, offset_of
from ..settings import make_settings
from ..types import TypeRegistry
from .context import (
    Context,
    Follower,
    by_relation,
    columnar_decoder,
    first_announcements,
    message_decoder,
)
from .runs import Run, runs_of
from .staging import Stage
from .transaction import Kind, Transaction, TransactionGroup, make_transaction

_ROWS = frozenset(b"IUDT")
_XID = slice(
    offset_of("I", "xid", in_stream=True), offset_of("I", "xid", in_stream=True) + XID_SIZE
)
_Arrival = Transaction | TransactionGroup


class Assembler:
    """Makes whole transactions of a stream's frames, of any protocol version.

    Transactions come in commit order: streamed and prepared ones at their commit, and those that
    are rolled back never.

    Parameters
    ----------
    max_memory : int
        Bytes of memory for all transactions that have not ended. Beyond this, the frames of the
        largest are moved to an unnamed temporary file. Subtransactions and Relations count too, and
        stay in memory.
    prepared : {"commit", "prepare"}
        When to deliver a prepared transaction: at its commit, or at its prepare. After "prepare", a
        transaction without content follows at its commit or rollback.
    unknown_prepared : {"empty", "error"}
        What to do at the commit of a prepared transaction whose changes never came: deliver it
        without content, or raise an error. Servers send such commits for transactions without a
        change. But if the stream began after the PREPARE, the changes are lost. With
        ``prepared="prepare"``, such a commit is never an error.
    keeper : PreparedKeeper, optional
        Keeps prepared transactions beyond the life of this object. The assembler hands each one to
        the keeper before it delivers anything that follows. :meth:`restore` takes one back.
    spill_directory : path, optional
        The directory for temporary files. The default is the one that :mod:`tempfile` uses.
    policies, encoding, registry
        As of :class:`pgoutput_fast.Decoder`.
    **columns
        More arguments of :class:`pgoutput_fast.ColumnarDecoder`, such as `target` and `tables`.

    Attributes
    ----------
    known_lsn : int
        Set by the caller, 0 by default: the caller has all transactions that end at this LSN or
        before. The assembler drops such transactions. It accepts the commit of a prepared
        transaction that ends there, even if the transaction itself did not come.
    on_relation : callable or None
        Set by the caller: called with each Relation and Type of a transaction before the
        transaction is delivered. The messages have the form that they have outside of stream
        chunks. The content of the transaction leaves out repeated messages, but this call gets
        them too.

    Raises
    ------
    PgOutputError, TypeError
        An argument is not allowed, or has a wrong type.
    """

    def __init__(
        self,
        max_memory: int = 64 << 20,
        *,
        prepared: Literal["commit", "prepare"] = "commit",
        unknown_prepared: Literal["empty", "error"] = "empty",
        keeper: PreparedKeeper | None = None,
        spill_directory: str | os.PathLike[str] | None = None,
        policies: Policies | None = None,
        encoding: str = "utf-8",
        registry: TypeRegistry | None = None,
        **columns: Any,
    ) -> None:
        byte_count().check("max_memory", max_memory)
        choice("commit", "prepare").check("prepared", prepared)
        choice("empty", "error").check("unknown_prepared", unknown_prepared)
        if spill_directory is not None and not Path(spill_directory).is_dir():
            raise PgOutputError(
                f"there is no directory {os.fspath(spill_directory)!r}",
                code="missing_path",
                path=os.fspath(spill_directory),
                parameter="spill_directory",
            )
        settings = make_settings(policies, encoding, registry)
        self._encoding = settings.encoding
        self._max_memory = max_memory
        self._at_prepare = prepared == "prepare"
        self._refuses_unknown = unknown_prepared == "error"
        self._keeper = keeper
        self._directory = spill_directory
        self.known_lsn = 0
        self.on_relation: Callable[[bytes], None] | None = None
        self._state = StreamState(settings)
        self._context = Context(None, [], self._state)
        make_columnar = functools.partial(columnar_decoder, options=columns)
        make_columnar(self._state)  # so that wrong arguments are refused here
        self._followers = (Follower(make_columnar), Follower(message_decoder))
        self._prepared: dict[tuple[int, str], Prepared] = {}
        # The ranges of the log in which some transaction is prepared, from the first PREPARE to
        # the end of the last transaction. It is replaced as a whole, as another thread reads it.
        self._prepared_ranges: dict[int, float] = {}
        self._safe_lsn = 0
        # What was announced in transactions that were not delivered, by relation: in prepared ones,
        # and in those that come again. The server does not announce it again, even if the
        # transaction is rolled back. It is kept when the connection ends, as other prepared
        # transactions may need it.
        self._pending: dict[int, list[bytes]] = {}
        self._streams: dict[int, Stage] = {}
        self._start()

    def _start(self) -> None:
        self._streams.clear()
        self._chunk: int | None = None  # top-level xid of the stream chunk that is open
        self._begin: OpenTransaction | None = None  # of the transaction that is open
        self._frames = 0  # of this call, in the runs before the current one

    def __repr__(self) -> str:
        return (
            f"<Assembler: {len(self._streams)} streamed and {len(self._prepared)} prepared "
            f"transactions, {self.memory} bytes in memory>"
        )

    @property
    def memory(self) -> int:
        """Bytes of memory for transactions that have not ended."""
        return sum(stage.memory for stage in self._stages())

    @property
    def open_transactions(self) -> int:
        """Number of transactions that came in part and have not ended, with prepared ones."""
        return len(self._streams) + len(self._prepared) + (self._begin is not None)

    @property
    def spilled_bytes(self) -> int:
        """Bytes in files, for transactions that have not ended."""
        return sum(stage.file_bytes for stage in self._stages())

    @property
    def in_flight(self) -> bool:
        """Whether there are transactions that have not ended.

        Prepared ones are among them, unless they were delivered when they were prepared.
        """
        return (
            bool(self._streams)
            or self._begin is not None
            or (self._keeps_in_memory and bool(self._prepared))
        )

    @property
    def _keeps_in_memory(self) -> bool:
        """Whether the content of prepared transactions is lost with this object."""
        return not self._at_prepare and self._keeper is None

    def safe_lsn(self, done: int) -> int:
        """Return the LSN that may be acknowledged once everything up to `done` is durable.

        A stream that begins between a PREPARE and the end of its transaction brings the end alone,
        without the changes. So the LSN is `done` only if no transaction is prepared at that place
        of the log. Otherwise it is the last place before `done` where none was prepared. The LSN
        never decreases. Any thread may call this method.
        """
        ranges = self._prepared_ranges
        while inside := [begin for begin, end in ranges.items() if begin < done < end]:
            done = min(inside)
        self._safe_lsn = max(self._safe_lsn, done)
        return self._safe_lsn

    def _extend_prepared_range(self, begin: int) -> None:
        """Note that a transaction was prepared."""
        if self._keeps_in_memory:
            ranges = {
                start: end for start, end in self._prepared_ranges.items() if end > self._safe_lsn
            }
            since = next((start for start, end in ranges.items() if end == math.inf), begin)
            ranges.pop(since, None)
            self._prepared_ranges = {**ranges, min(since, begin): math.inf}

    def _end_prepared_range(self, end: int) -> None:
        """Note that a prepared transaction was committed or rolled back."""
        if self._keeps_in_memory and not self._prepared:
            self._prepared_ranges = {
                begin: end if until == math.inf else until
                for begin, until in self._prepared_ranges.items()
            }

    def _stages(self) -> Iterator[Stage]:
        yield from self._streams.values()
        yield from (prepared.stage for prepared in self._prepared.values())
        if self._begin is not None and self._begin.stage is not None:
            yield self._begin.stage

    def reset(self) -> None:
        """Begin a new connection: forget what came of transactions that have not ended.

        The server sends these transactions again. It does not send prepared transactions again, so
        they are kept.
        """
        self._start()

    def feed(self, frames: Any, lsns: Any = None, offsets: Any = None) -> Iterator[Transaction]:
        """Take the stream's next frames.

        Parameters
        ----------
        frames, offsets
            Frames as :func:`pgoutput_fast.decode_batch` takes them in `data` and `offsets`.
        lsns : array of int, optional
            The LSN in each frame's XLogData header.

        Returns
        -------
        iterator of Transaction
            The transactions that end in these frames. All frames are taken at once. If a frame is
            refused, the transactions that ended before it come first, and then its error.

        Raises
        ------
        DecodeError
            A frame is malformed or out of order; `.frame` is its index. The frames before it were
            taken. Call :meth:`reset` and begin again with a new connection.
        PgOutputError
            A file can't be written.
        TypeError, ValueError
            `frames`, `offsets` or `lsns` are of no supported form.
        """
        # Not in the generator: all frames are taken now.
        return _single_transactions(self.feed_groups(runs_of(frames, offsets, lsns)))

    def feed_groups(self, runs: list[Run]) -> Iterator[_Arrival]:
        """Take the next frames, as :meth:`feed` does, given as runs.

        Consecutive transactions that announce no relation or type are given as groups.
        """
        arrivals: list[_Arrival] = []
        error: PgOutputError | None = None
        self._frames = 0
        try:
            for run in runs:
                self._take(run, arrivals)
                self._frames += len(run)
        except PgOutputError as refused:
            error = refused
        return _delivered(arrivals, error)

    # --- runs

    def _take(self, run: Run, arrivals: list[_Arrival]) -> None:
        """Take the frames of a run; transactions that end in it go to `arrivals`."""
        scans = twin("transactions._scan")
        if self._begin is not None:
            self._begin.start = 0
        start, count = 0, len(run)
        while start < count:
            if self._chunk is None and self._begin is None and not self._pending:
                table, end = scans.whole(run.data, run.offsets, start)
                if len(table):
                    table[:, 0] -= np.uint64(start)
                    group = TransactionGroup(
                        run.part(start, end), table, self._context, self._followers
                    ).beyond(self.known_lsn)
                    if group is not None:
                        arrivals.append(group)
                start = end
                if start == count:
                    break
            in_chunk = self._chunk is not None
            marks, end = scans.scan(run.data, run.offsets, start, in_chunk)
            if in_chunk:
                self._take_chunk(run, start, end, marks)
            else:
                self._take_plain(run, start, end, marks, arrivals)
            start = end
        if self._begin is not None:
            self._hold(run, count)
        self._keep_to_budget()

    def _at(self, error: DecodeError, index: int) -> DecodeError:
        """Return the error of a frame of the current run, with the frame's index in this call."""
        error.frame = self._frames + index
        return error

    def _rare(self, run: Run, index: int) -> Any:
        """Decode a frame of a run."""
        try:
            return decode_rare(run.frame(index), self._chunk is not None, self._encoding)
        except DecodeError as error:
            raise self._at(error, index) from None

    def _refuse(self, run: Run, index: int, text: str) -> NoReturn:
        try:
            fail("stream_order", run.frame(index), 0, found=text)
        except DecodeError as error:
            raise self._at(error, index) from None

    def _take_chunk(self, run: Run, start: int, end: int, marks: list[tuple[int, int]]) -> None:
        """Stage frames of the stream chunk that is open, up to its Stream Stop if it comes."""
        stage = self._streams[cast("int", self._chunk)]
        first = len(stage) - start  # from a frame's index in the run to its index in the stage
        ended = False
        for index, tag in marks:
            if tag in _ROWS:
                frame = run.frame(index)
                if len(frame) < _XID.stop:
                    self._decode_row(run, index)
                stage.note(int.from_bytes(frame[_XID], "big"), first + index)
                continue
            if tag not in b"RYMOE":
                text = f"a stream chunk of xid {self._chunk} contains a frame not allowed there"
                self._refuse(run, index, text)
            message = self._rare(run, index)
            if isinstance(message, (Relation, Type)):
                stage.note(cast("int", message.xid), first + index)
                stage.announced.append((first + index, published(message).frame))
            elif isinstance(message, Origin):
                stage.origin = message.name
            elif isinstance(message, StreamStop):
                ended = True
        content = run.part(start, end - 1 if ended else end)
        if len(content):
            stage.add(content)
        if ended:
            self._chunk = None

    def _decode_row(self, run: Run, index: int) -> None:
        """Raise the decoder's error for a row that is cut short."""
        try:
            implementation.decode(run.frame(index), self._chunk is not None)
        except DecodeError as error:
            raise self._at(error, index) from None

    def _take_plain(
        self,
        run: Run,
        start: int,
        end: int,
        marks: list[tuple[int, int]],
        arrivals: list[_Arrival],
    ) -> None:
        """Take frames outside of stream chunks, as far as a scan has gone."""
        position = start
        for index, tag in marks:
            if index > position and self._begin is None:
                self._refuse(run, position, "a change came outside of any transaction")
            position = index + 1
            if self._begin is not None:
                self._in_transaction(run, index, tag, arrivals)
            else:
                self._outside(run, index, tag, arrivals)
        if end > position and self._begin is None:
            self._refuse(run, position, "a change came outside of any transaction")

    def _in_transaction(self, run: Run, index: int, tag: int, arrivals: list[_Arrival]) -> None:
        """Take a frame between Begin and Commit, or Begin Prepare and Prepare, that is no row."""
        begin = cast("OpenTransaction", self._begin)
        if tag == ord("C") and not begin.prepares:
            commit = self._hot(run, index)
            stage = begin.stage
            parts: Run | Stage
            if stage is None:
                parts = run.part(begin.start, index + 1)
                if begin.origin is not None:  # an Origin follows, and the Begin came without an LSN
                    lsns = parts.lsns.copy()
                    lsns[0] = parts.first_change_lsn()
                    parts = Run(parts.data, parts.offsets, lsns)
            else:
                stage.add(run.part(0, index))
                parts = stage
            self._begin = None
            self._deliver(
                arrivals, "commit", begin.xid, commit.commit_lsn, commit.end_lsn,
                commit.commit_time, begin.origin, None, parts, begin.announced,
            )  # fmt: skip
            return
        if tag not in (b"RYMOP" if begin.prepares else b"RYMO"):
            self._refuse(run, index, f"transaction {begin.xid} contains a frame not allowed there")
        message = self._rare(run, index)
        if isinstance(message, (Relation, Type)):
            begin.announced.append((begin.index_of(index), message.frame))
        elif isinstance(message, Origin):
            begin.origin = message.name
        elif isinstance(message, Prepare):
            self._hold(run, index)
            stage = begin.stage
            if stage is not None:
                stage.origin = begin.origin
                stage.announced = begin.announced
            self._begin = None
            self._prepare(message, stage, arrivals)

    def _hot(self, run: Run, index: int) -> Any:
        """Decode a Begin or Commit of a run."""
        try:
            return implementation.decode(run.frame(index), False)
        except DecodeError as error:
            raise self._at(error, index) from None

    def _hold(self, run: Run, end: int) -> None:
        """Stage the frames of this run that belong to the open transaction, without its Begin."""
        begin = cast("OpenTransaction", self._begin)
        if begin.stage is None:
            begin.stage = Stage(self._directory, in_stream=False)
            begin.start += 1
            begin.announced = [(i - 1, frame) for i, frame in begin.announced]
        if begin.start < end:
            begin.stage.add(run.part(begin.start, end))

    def _outside(self, run: Run, index: int, tag: int, arrivals: list[_Arrival]) -> None:
        """Take a frame outside of transactions."""
        if tag == ord("B"):
            message = self._hot(run, index)
            self._begin = OpenTransaction(message.xid, index, prepares=False)
            return
        if tag == ord("C"):
            self._refuse(run, index, "a Commit came while no transaction is open")
        message = self._rare(run, index)
        if isinstance(message, StreamStart):
            if message.first_segment:
                # An earlier connection may have sent a part of it. The server sends all of it
                # again.
                self._streams.pop(message.xid, None)
            elif message.xid not in self._streams:
                self._refuse(
                    run, index, f"a later stream chunk of xid {message.xid} came, but not the first"
                )
            self._streams.setdefault(message.xid, Stage(self._directory, in_stream=True))
            self._chunk = message.xid
        elif isinstance(message, StreamCommit):
            stage = self._stream_of(run, index, message.xid)
            self._deliver(
                arrivals, "commit", message.xid, message.commit_lsn, message.end_lsn,
                message.commit_time, stage.origin, None, stage, stage.announced,
            )  # fmt: skip
        elif isinstance(message, StreamAbort):
            # Servers also send Stream Aborts of transactions that were never streamed. They mean
            # nothing.
            if message.subxid == message.xid:
                self._streams.pop(message.xid, None)
            elif message.xid in self._streams:
                self._streams[message.xid].take_back(message.subxid)
        elif isinstance(message, StreamPrepare):
            self._prepare(message, self._stream_of(run, index, message.xid), arrivals)
        elif isinstance(message, BeginPrepare):
            self._begin = OpenTransaction(message.xid, index, prepares=True)
        elif isinstance(message, Prepare):
            # Some servers send no Begin Prepare if the transaction has no change.
            self._prepare(message, None, arrivals)
        elif isinstance(message, (CommitPrepared, RollbackPrepared)):
            self._end_prepared(message, arrivals)
        elif isinstance(message, LogicalMessage) and not message.transactional:
            self._deliver(
                arrivals, "message", None, message.lsn, message.lsn, None, None, None,
                run.part(index, index + 1), [],
            )  # fmt: skip
        else:
            text = "a frame that must be in a transaction came outside of any transaction"
            self._refuse(run, index, text)

    def _stream_of(self, run: Run, index: int, xid: int) -> Stage:
        stage = self._streams.pop(xid, None)
        if stage is None:
            self._refuse(run, index, f"the end of xid {xid} came, but no stream chunk of it")
        stage.end()
        return stage

    # --- prepared transactions

    def _prepare(
        self,
        message: Prepare | StreamPrepare,
        stage: Stage | None,
        arrivals: list[_Arrival],
    ) -> None:
        key = (message.xid, message.gid)
        if not self._at_prepare:
            content = Stage(None, in_stream=False) if stage is None else stage
            prior_frames = self._prior_frames(content)
            if not content.in_stream:
                self._await(content.announced)
            prepared = Prepared(
                message.xid, message.gid, message.prepare_lsn, content, prior_frames
            )
            if self._keeper is not None:
                self._keeper.keep(prepared)
            self._prepared[key] = prepared
            self._extend_prepared_range(prepared.lsn)
            return
        delivered = Stage(None, in_stream=False)
        self._prepared[key] = Prepared(*key, message.prepare_lsn, delivered, [])
        self._deliver(
            arrivals, "prepare", message.xid, message.prepare_lsn, message.end_lsn,
            message.prepare_time, None if stage is None else stage.origin, message.gid, stage,
            [] if stage is None else stage.announced,
        )  # fmt: skip

    def _end_prepared(
        self,
        message: CommitPrepared | RollbackPrepared,
        arrivals: list[_Arrival],
    ) -> None:
        key = (message.xid, message.gid)
        commits = isinstance(message, CommitPrepared)
        if (
            isinstance(message, CommitPrepared)
            and key not in self._prepared
            and self._refuses_unknown
            and not self._at_prepare
            and message.end_lsn > self.known_lsn
        ):
            raise PgOutputError(
                f"the prepared transaction {message.gid!r} (xid {message.xid}) was committed, but "
                "its changes are missing: it was prepared before this stream began",
                code="changes_missing",
                hint=("Take new snapshots of the tables. If the transaction had no changes, give ",
                      Argument("unknown_prepared", "empty")),
            )  # fmt: skip
        prepared = self._prepared.pop(key, None)
        stage = None if prepared is None else prepared.stage
        if isinstance(message, CommitPrepared):
            lsn, end, time = message.commit_lsn, message.end_lsn, message.commit_time
        else:
            lsn, end, time = message.rollback_end_lsn, message.rollback_end_lsn, None
        if self._keeper is not None:
            self._keeper.end(*key, end)
        self._end_prepared_range(end)
        kind: Kind = "commit"
        if self._at_prepare:
            kind, stage = "commit prepared" if commits else "rollback prepared", None
        elif not commits:
            return
        self._deliver(
            arrivals, kind, message.xid, lsn, end, time, None if stage is None else stage.origin,
            message.gid, stage, [] if stage is None else stage.announced,
            None if prepared is None else prepared.prior_frames,
        )  # fmt: skip

    def _prior_frames(self, stage: Stage) -> list[bytes]:
        """Return the Types and Relations that a prepared transaction uses, as they were before it.

        For a keeper all of them, as a later process has none; else those that were announced in
        transactions not given out, and that it announces in another form itself.
        """
        if stage.in_stream:  # it announces all of them
            return []
        relations: AbstractSet[int] = self._pending.keys()
        if self._keeper is None:
            relations &= first_announcements(stage.announced).keys()
        else:
            relations |= self._state.relations.keys()
        if not relations:
            return []
        uses = twin("transactions._scan").first_uses
        used: dict[int, None] = {}
        for run in stage.runs():
            used |= dict.fromkeys(
                relation_id for relation_id, _ in uses(run.data, run.offsets, relations)
            )
        prior_frames: list[bytes] = []
        for relation_id in used:
            prior_frames += self._pending.get(relation_id) or self._frames_of(relation_id)
        return prior_frames

    def _frames_of(self, relation_id: int) -> list[bytes]:
        """Return the Types and the Relation of a relation that is known."""
        types = self._state.plans[relation_id].types
        type_frames = [type_.frame for oid, type_ in self._state.types.items() if oid in types]
        return [*type_frames, self._state.relations[relation_id].frame]

    def restore(self, prepared: Prepared) -> None:
        """Take back a prepared transaction that was kept by an earlier process."""
        self._prepared[prepared.xid, prepared.gid] = prepared
        self._await([(0, frame) for frame in prepared.prior_frames])
        self._await(prepared.stage.announced)

    # --- delivery

    def _deliver(
        self,
        arrivals: list[_Arrival],
        kind: Kind,
        xid: int | None,
        commit_lsn: int,
        end_lsn: int,
        commit_time: int | None,
        origin: str | None,
        gid: str | None,
        parts: Run | Stage | None,
        announced: list[tuple[int, bytes]],
        prior_frames: list[bytes] | None = None,
    ) -> None:
        """Append a transaction, which is whole now, to `arrivals`.

        `prior_frames` are those of a prepared transaction; see `Prepared`.

        Relations and Types that were announced before are left out of its content, as it depends on
        the protocol version and the server's caches how often they are repeated.
        """
        if self.on_relation is not None:
            for _, frame in announced:
                self.on_relation(frame)
        if 0 < end_lsn <= self.known_lsn:
            self._await(announced)  # the server does not announce it to this connection again
            return
        dropped = []
        inserted: list[tuple[int, list[bytes]]] = []
        stands = [(index, [frame]) for index, frame in announced]
        missing: list[tuple[int, list[bytes]]] = []
        if (self._pending or prior_frames) and isinstance(parts, (Run, Stage)):
            missing = self._missing(parts, announced, prior_frames)
        before_rows = {index for index, _ in missing}
        announcements: list[bytes] = []
        # In their order: what stands in it may need a Type before what is missing does.
        for index, frames in sorted(stands + missing) if missing else stands:
            new = [frame for frame in frames if not self._state.announces(frame)]
            for frame in new:
                self._state.receive(frame)
            announcements += new
            if index in before_rows:
                inserted.append((index, new))
            elif not new:
                dropped.append(index)
        before = self._context
        if announcements:
            self._context = Context(before, announcements, self._state)
        arrivals.append(
            make_transaction(
                (kind, xid, commit_lsn, end_lsn, commit_time, origin, gid),
                (
                    parts,
                    frozenset(dropped),
                    tuple(inserted),
                    before,
                    self._context,
                    self._followers,
                ),
            )
        )

    def _await(self, announced: list[tuple[int, bytes]]) -> None:
        """Remember what a transaction announced that is not given out: others may need it."""
        for relation_id, frames in by_relation(frame for _, frame in announced):
            # What another one announced before is out of date, also if this is known.
            self._pending.pop(relation_id, None)
            if not all(map(self._state.announces, frames)):
                self._pending[relation_id] = frames

    def _missing(
        self,
        parts: Run | Stage,
        announced: list[tuple[int, bytes]],
        prior_frames: list[bytes] | None,
    ) -> list[tuple[int, list[bytes]]]:
        """Return the Relations and Types that a transaction uses and no delivered one announced.

        Returns
        -------
        list of (int, list of bytes)
            The index of the frame before which they belong, and the frames of the Types and the
            Relation.
        """
        own = first_announcements(announced)
        missing: list[tuple[int, list[bytes]]] = []
        if not (isinstance(parts, Stage) and parts.in_stream):
            pending = dict(self._pending)
            if prior_frames is not None:
                # What it announced itself has been awaited since its PREPARE.
                before = dict(by_relation(prior_frames))
                pending = {
                    relation_id: frames
                    for relation_id, frames in pending.items()
                    if relation_id not in own
                }
                pending |= {
                    relation_id: before[relation_id] for relation_id in before.keys() & own.keys()
                }
            uses = twin("transactions._scan").first_uses
            first = 0
            for run in [parts] if isinstance(parts, Run) else parts.runs():
                if not pending:
                    break
                for relation_id, index in uses(run.data, run.offsets, pending.keys()):
                    frames = pending.pop(relation_id)
                    self._pending.pop(relation_id, None)
                    # A transaction that alters a table may have rows of it before and after that.
                    if relation_id not in own or first + index < own[relation_id]:
                        missing.append((first + index, frames))
                first += len(run)
        for relation_id in own:
            self._pending.pop(relation_id, None)
        return missing

    def _keep_to_budget(self) -> None:
        """Move the largest transactions to files until all together take no more than allowed."""
        memory = self.memory
        if memory <= self._max_memory:
            return
        for stage in sorted(self._stages(), key=lambda stage: stage.movable, reverse=True):
            if memory <= self._max_memory:
                break
            memory -= stage.movable
            stage.spill()


class Prepared(NamedTuple):
    """A prepared transaction that is neither committed nor rolled back."""

    xid: int
    gid: str
    lsn: int
    """Of its PREPARE."""
    stage: Stage
    """Its content; empty if that was delivered."""
    prior_frames: list[bytes]
    """Types and Relations that were announced before it and that its rows need: all of them if it
    is to be kept beyond this process, else those that nothing but its delivery would give out."""


class PreparedKeeper(Protocol):
    """Where prepared transactions are kept, so that they are still there for a later process."""

    def keep(self, prepared: Prepared) -> None:
        """Keep one: whatever follows it may be acknowledged when this returns."""

    def end(self, xid: int, gid: str, end_lsn: int) -> None:
        """Note that one was committed or rolled back, by a record that ends at an LSN."""


class OpenTransaction:
    """The transaction that is open, between Begin or Begin Prepare and its end.

    Attributes
    ----------
    xid : int
    start : int
        Index in the current run of its first frame there: of its Begin, or 0 if that came in an
        earlier run.
    prepares : bool
        Whether it began with Begin Prepare.
    origin : str or None
    stage : Stage or None
        Its frames in earlier runs, without the Begin.
    announced : list of (int, bytes)
        Its Relations and Types, each with the index of its frame: in the stage if there is one,
        else counted from the Begin, which has the index 0.
    """

    __slots__ = ("announced", "origin", "prepares", "stage", "start", "xid")

    def __init__(self, xid: int, start: int, *, prepares: bool) -> None:
        self.xid = xid
        self.start = start
        self.prepares = prepares
        self.origin: str | None = None
        self.stage: Stage | None = None
        self.announced: list[tuple[int, bytes]] = []

    def index_of(self, index: int) -> int:
        """Return the index for `announced` of a frame of the current run."""
        return index - self.start + (0 if self.stage is None else len(self.stage))


def _single_transactions(arrivals: Iterator[_Arrival]) -> Iterator[Transaction]:
    for arrival in arrivals:
        yield from arrival.transactions()


def _delivered(arrivals: list[_Arrival], error: PgOutputError | None) -> Iterator[_Arrival]:
    yield from arrivals
    if error is not None:
        raise error
