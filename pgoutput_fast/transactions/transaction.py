"""One committed transaction, and its content in three ways: columns, messages, frames."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from .._impl import twin
from ..lsn import format_lsn
from ..protocol.encode import encode_fields
from ..protocol.wire import offset_of
from ..transcode import without_xids
from ..values import EPOCH_UTC
from .context import Context, Follower
from .runs import Run
from .staging import Stage

if TYPE_CHECKING:
    from .. import (
        ChangeBatch,
        Delete,
        Insert,
        LogicalMessage,
        Origin,
        Relation,
        Truncate,
        Type,
        Update,
    )

    Content = Insert | Update | Delete | Truncate | Relation | Type | Origin | LogicalMessage

Kind = Literal["commit", "prepare", "commit prepared", "rollback prepared", "message"]


class Transaction:
    """A whole transaction, as assemblers and streams give it.

    The content always has the form of protocol version 1: no stream chunks, no xids in the frames
    of changes, and no rows that were rolled back. You can read it several times.

    Attributes
    ----------
    kind : str
        "commit" for most transactions. "message" for a logical message outside of transactions,
        which has no xid and no commit time; both LSNs are the message's. With
        ``prepared="prepare"`` there is also "prepare", with the content of a prepared transaction,
        and later "commit prepared" or "rollback prepared", without content.
    xid : int or None
    commit_lsn : int
        LSN where the commit record begins (the prepare record, if the kind is "prepare").
    end_lsn : int
        LSN behind that record. Acknowledge this one.
    commit_time : int or None
        In microseconds since 2000-01-01 UTC; `commit_datetime` is the same as a datetime.
    origin : str or None
        The name of the replication origin. Also None for a streamed transaction that begins with
        DDL, because the server does not send the name then.
    gid : str or None
        The identifier of a prepared transaction.
    """

    __slots__ = (
        "_after", "_before", "_dropped", "_followers", "_inserted", "_parts", "commit_lsn",
        "commit_time", "end_lsn", "gid", "kind", "origin", "xid",
    )  # fmt: skip
    kind: Kind
    xid: int | None
    commit_lsn: int
    end_lsn: int
    commit_time: int | None
    origin: str | None
    gid: str | None
    _parts: Run | Stage | tuple[TransactionGroup, int] | None
    _dropped: frozenset[int]
    _inserted: tuple[tuple[int, list[bytes]], ...]
    _before: Context
    _after: Context
    _followers: tuple[Follower, Follower]

    def __init__(self) -> None:
        raise TypeError("a Transaction is made by an Assembler or a stream")

    def __repr__(self) -> str:
        prefix = "" if self.kind == "commit" else f"{self.kind} of "
        number = "a message" if self.xid is None else f"xid {self.xid}"
        return f"<Transaction: {prefix}{number}, commit at {format_lsn(self.commit_lsn)}>"

    @property
    def commits(self) -> int:
        """1 if the transaction was committed; 0 for a message, or if it is only prepared."""
        return int(self.kind in ("commit", "commit prepared"))

    def transactions(self) -> Iterator[Transaction]:
        """Yield this transaction alone; a group gives all of its transactions."""
        yield self

    @property
    def commit_datetime(self) -> datetime.datetime | None:
        """`commit_time` as an aware datetime in UTC; None if there is none.

        Raises
        ------
        OverflowError
            The time is before year 1 or after year 9999.
        """
        if self.commit_time is None:
            return None
        return EPOCH_UTC + datetime.timedelta(microseconds=self.commit_time)

    def batches(self) -> Iterator[ChangeBatch]:
        """Yield the rows as Arrow record batches, with commit LSN and commit time filled in.

        Large transactions come in several batches of each relation, decoded as they are taken.
        Small ones that came together are decoded together, and share the memory of their rows.

        Raises
        ------
        DecodeError
            A frame is malformed, or a value is refused.
        PgOutputError
            The file to which the transaction was moved can't be read.
        """
        if isinstance(self._parts, tuple):
            group, index = self._parts
            parts = group.parts_of(index)
            if parts is not None:
                for _, batch, start, end in parts:
                    yield batch.part(start, end)
                return
        follower = self._followers[0]
        decoder = follower.at(self._before)
        for run in self.runs():
            yield from decoder.decode(run.data, run.offsets, run.lsns)
        follower.moved(decoder, self._after)

    def __iter__(self) -> Iterator[Content]:
        """Yield the messages, without Begin and Commit.

        Raises
        ------
        DecodeError
            A frame is malformed.
        PgOutputError
            The file to which the transaction was moved can't be read.
        """
        follower = self._followers[1]
        decoder = follower.at(self._before)
        for run in self.runs():
            for frame in run.frames():
                message = decoder.decode(frame)
                if message.tag not in ("B", "C"):
                    yield cast("Content", message)
        follower.moved(decoder, self._after)

    def frames(self) -> Iterator[bytes]:
        """Yield the frames as protocol version 1 sends them, from Begin to Commit.

        Raises
        ------
        PgOutputError
            The file to which the transaction was moved can't be read.
        """
        for run in self.runs():
            yield from run.frames()

    def runs(self) -> Iterator[Run]:
        """Yield the frames of :meth:`frames`, in runs of some megabytes."""
        parts = self._parts
        if isinstance(parts, tuple):
            group, index = parts
            parts = group.frames_of(index, index + 1)
        if isinstance(parts, Run):
            yield from self._edited(parts, 0)
            return
        if self.kind not in ("commit", "prepare"):
            return
        begin = encode_fields(
            "B", final_lsn=self.commit_lsn, commit_time=self.commit_time, xid=self.xid
        )
        commit = encode_fields(
            "C", flags=0, commit_lsn=self.commit_lsn, end_lsn=self.end_lsn,
            commit_time=self.commit_time,
        )  # fmt: skip
        staged = iter(()) if parts is None else parts.runs()
        # Those up to the first change: nothing but Relations and Types is before it.
        head: list[Run] = []
        lsn: int | None = None
        for run in staged:
            head.append(run)
            lsn = run.first_change_lsn()
            if lsn is not None:
                break
        yield _single(begin, self.commit_lsn if lsn is None else lsn)
        first = 0
        for run in itertools.chain(head, staged):
            if cast("Stage", parts).in_stream:
                run = Run(*without_xids(run.data, run.offsets), run.lsns)
            yield from self._edited(run, first)
            first += len(run)
        yield _single(commit, self.end_lsn)

    def _edited(self, run: Run, first: int) -> Iterator[Run]:
        """Yield the frames of a run without the dropped ones, and with the inserted ones.

        `first` is the index of the run's first frame in the transaction.
        """
        start, count = 0, len(run)
        inserted: dict[int, list[bytes]] = {}
        for index, frames in self._inserted:  # a Truncate can have several tables
            inserted.setdefault(index - first, []).extend(frames)
        for index in sorted(inserted.keys() | {index - first for index in self._dropped}):
            if not 0 <= index < count:
                continue
            if index > start:
                yield run.part(start, index)
            start = index
            for frame in inserted.get(index, ()):
                yield _single(frame, 0)
            if index + first in self._dropped:
                start = index + 1
        if start < count:
            yield run.part(start, count)


class TransactionGroup:
    """Consecutive whole transactions that announce no relation or type. Streams make groups.

    Most transactions of a stream come in groups. Many small transactions cost much less together:
    their rows come in the same record batches, whose columns xid, commit_lsn and commit_time tell
    the transactions apart.

    Attributes
    ----------
    end_lsn : int
        LSN behind the last commit record: where the stream goes on after an acknowledgement.
    commits : int
        How many transactions the group has.
    commit_time : int
        Commit time of the last transaction, in microseconds since 2000-01-01 UTC.

    Parameters
    ----------
    run : Run
        All frames of the transactions.
    table : uint64[k, 5]
        For each: the index of its Begin in the run, its xid, commit LSN, end LSN and commit time.
    context : Context
        What was announced before the group.
    followers : (Follower, Follower)
        Decoders of columns and of messages.
    """

    __slots__ = ("_batch_parts", "_context", "_followers", "_table", "run")

    def __init__(
        self, run: Run, table: Any, context: Context, followers: tuple[Follower, Follower]
    ) -> None:
        self.run, self._table = run, table
        self._context, self._followers = context, followers
        # Of each transaction what `parts_of` returns. None before the first call.
        self._batch_parts: list[list[_Part] | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TransactionGroup, (self.run, self._table, self._context, self._followers)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        return f"<TransactionGroup: {len(self)} transactions in {self.run!r}>"

    @property
    def commits(self) -> int:
        """How many transactions the group has: each was committed."""
        return len(self)

    def runs(self) -> Iterator[Run]:
        """Yield the frames of all transactions, in one run."""
        yield self.run

    @property
    def end_lsn(self) -> int:
        """The end LSN of the last transaction."""
        return int(self._table[-1, _END])

    @property
    def commit_time(self) -> int:
        """Commit time of the last transaction, in microseconds since 2000-01-01 UTC."""
        return int(self._table[-1:, _TIME].view(np.int64)[0])

    def batches(self) -> Iterator[ChangeBatch]:
        """Yield the rows of all transactions as record batches, with commit LSN and commit time.

        Raises
        ------
        DecodeError
            A frame is malformed, or a value is refused.
        """
        follower = self._followers[0]
        decoder = follower.at(self._context)
        yield from decoder.decode(self.run.data, self.run.offsets, self.run.lsns)
        follower.moved(decoder, self._context)

    def frames(self) -> Iterator[bytes]:
        """Yield the frames as protocol version 1 sends them, from first Begin to last Commit."""
        return self.run.frames()

    def transactions(self) -> Iterator[Transaction]:
        """Yield the transactions, one by one."""
        begins = self.run.offsets[self._table[:, 0].astype(np.int64)]
        ends = np.append(begins[1:], self.run.offsets[-1])
        start = 0
        while start < len(self):
            end = int(np.searchsorted(ends, begins[start] + _DECODED_TOGETHER, "right"))
            end = max(start + 1, end)
            yield from cast("TransactionGroup", self._part(start, end))._singles()
            start = end

    def _singles(self) -> Iterator[Transaction]:
        """Yield the transactions, whose rows are decoded together."""
        xids, commits, ends = (self._table[:, field].tolist() for field in range(1, _TIME))
        times = self._table[:, _TIME].view(np.int64).tolist()
        no_frames: frozenset[int] = frozenset()
        new = Transaction.__new__
        for i in range(len(xids)):
            transaction = new(Transaction)
            transaction.kind = "commit"
            transaction.xid = xids[i]
            transaction.commit_lsn = commits[i]
            transaction.end_lsn = ends[i]
            transaction.commit_time = times[i]
            transaction.origin = transaction.gid = None
            transaction._parts = (self, i)
            transaction._dropped = no_frames
            transaction._inserted = ()
            transaction._before = transaction._after = self._context
            transaction._followers = self._followers
            yield transaction

    def frames_of(self, start: int, end: int) -> Run:
        """Return the frames of the transactions from `start` to before `end`."""
        last = int(self._table[end, 0]) if end < len(self) else len(self.run)
        return self.run.part(int(self._table[start, 0]), last)

    def parts_of(self, index: int) -> list[_Part] | None:
        """Return the batches of a transaction; None if it has to be decoded by itself.

        The first call decodes the rows of all transactions.
        """
        if self._batch_parts is None:
            self._batch_parts = self._decode_together()
        parts = self._batch_parts[index]
        # A decoder of this transaction alone orders its batches by their first rows.
        return None if parts is None else sorted(parts)

    def _decode_together(self) -> list[list[_Part] | None]:
        """Decode the rows of all transactions, and return what each has of the batches.

        A transaction has to be decoded by itself if its batches would be others: if a batch was
        full within it, or if a frame of the group is refused.
        """
        alone: list[list[_Part] | None] = [None] * len(self)
        firsts = self._table[:, 0].astype(np.int64)
        places = self.run.offsets[firsts][:, None] + np.arange(_COMMIT_LSN, _COMMIT_LSN + 8)
        commit_lsns = np.frombuffer(self.run.data, np.uint8)[places].view(">u8")[:, 0]
        commit_lsns = commit_lsns.astype(np.uint64)
        if len(self) == 1 or (commit_lsns[1:] <= commit_lsns[:-1]).any():
            return alone
        parts: list[list[_Part] | None] = [[] for _ in range(len(self))]
        rows_by_commit = twin("columnar._batch").rows_by_commit
        decoder = self._followers[0].at(self._context)
        try:
            for batch in decoder.decode(self.run.data, self.run.offsets, self.run.lsns):
                if batch.binary:
                    return alone
                if decoder.next_frame < len(self.run):
                    parts[int(np.searchsorted(firsts, decoder.next_frame, "right")) - 1] = None
                for index, seq, start, end in rows_by_commit(batch, commit_lsns):
                    own = parts[index]
                    if own is not None:
                        own.append((seq, batch, start, end))
        except Exception:  # noqa: BLE001 - its own transaction raises it
            return alone
        if decoder.errors:
            return alone
        self._followers[0].moved(decoder, self._context)
        return parts

    def beyond(self, lsn: int) -> TransactionGroup | None:
        """Return the transactions from the first one that ends beyond an LSN; None if none does."""
        return self._part(_first(self._table[:, _END] > lsn), len(self))

    def before(self, lsn: int) -> TransactionGroup | None:
        """Return the transactions before the first one committed at an LSN or later, or None."""
        return self._part(0, _first(self._table[:, _COMMIT] >= lsn))

    def _part(self, start: int, end: int) -> TransactionGroup | None:
        if end - start == len(self):
            return self
        if start >= end:
            return None
        table = self._table[start:end].copy()
        table[:, 0] -= table[0, 0]
        return TransactionGroup(self.frames_of(start, end), table, self._context, self._followers)


_COMMIT, _END, _TIME = 2, 3, 4  # columns of a group's table
_COMMIT_LSN = offset_of("B", "final_lsn")
_DECODED_TOGETHER = 1 << 20
"""Bytes of the frames of transactions whose rows are decoded together, at most. A batch of one of
them keeps the memory of all."""

_Part = tuple[int, "ChangeBatch", int, int]
"""What a transaction has of a batch: the `seq` of its first row, the batch, and the indices of its
first row and of the row behind its last."""


def _first(mask: Any) -> int:
    """Return the index of the first true element; the number of elements if none is true."""
    return int(mask.argmax()) if mask.any() else len(mask)


_PUBLIC_ATTRIBUTES = ("kind", "xid", "commit_lsn", "end_lsn", "commit_time", "origin", "gid")
_PRIVATE_ATTRIBUTES = ("_parts", "_dropped", "_inserted", "_before", "_after", "_followers")


def make_transaction(
    public_values: tuple[Any, ...], private_values: tuple[Any, ...]
) -> Transaction:
    """Make a transaction from the values of its public and of its private attributes."""
    transaction = Transaction.__new__(Transaction)
    for name, value in zip(
        _PUBLIC_ATTRIBUTES + _PRIVATE_ATTRIBUTES, public_values + private_values, strict=True
    ):
        setattr(transaction, name, value)
    return transaction


def _single(frame: bytes, lsn: int) -> Run:
    """Return one frame as a run."""
    return Run(frame, np.array([0, len(frame)], np.int64), np.array([lsn], np.uint64))
