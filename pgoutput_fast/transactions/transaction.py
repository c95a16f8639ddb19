"""One committed transaction, and its content in three ways: columns, messages, frames."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ..lsn import format_lsn
from ..protocol.encode import encode_fields
from ..transcode import without_xids
from ..values import EPOCH_UTC
from .context import Context, Follower
from .runs import Run
from .staging import Stage

if TYPE_CHECKING:
    from .. import ChangeBatch

Kind = Literal["commit", "prepare", "commit prepared", "rollback prepared", "message"]


class Transaction:
    """A whole transaction, as assemblers and streams give it.

    Its content has the form that protocol version 1 gives it, whichever way it came: no stream
    chunks, no xids in the frames of changes, none of what was rolled back. It can be read several
    times.

    Attributes
    ----------
    kind : str
        "commit" for most transactions. "message" for a logical message outside of transactions,
        which has no xid and no commit time; both LSNs are the message's. With
        ``prepared="prepare"`` also "prepare", which has the content of a prepared transaction, and
        later "commit prepared" or "rollback prepared" without content.
    xid : int or None
    commit_lsn : int
        LSN where the commit record begins (the prepare record, if the kind is "prepare").
    end_lsn : int
        LSN behind that record, which is to be acknowledged.
    commit_time : int or None
        In microseconds since 2000-01-01 UTC; `commit_datetime` is the same as a datetime.
    origin : str or None
        The name of the replication origin that it came from.
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
    _parts: Run | Stage | None
    _dropped: frozenset[int]
    _inserted: tuple[tuple[int, list[bytes]], ...]
    _before: Context
    _after: Context
    _followers: tuple[Follower, Follower]

    def __init__(self) -> None:
        raise TypeError("a Transaction is made by an Assembler or a stream")

    def __repr__(self) -> str:
        what = "" if self.kind == "commit" else f"{self.kind} of "
        number = "a message" if self.xid is None else f"xid {self.xid}"
        return f"<Transaction: {what}{number}, commit at {format_lsn(self.commit_lsn)}>"

    @property
    def commit_datetime(self) -> datetime.datetime | None:
        """`commit_time` as an aware datetime in UTC; None where there is none.

        Raises
        ------
        OverflowError
            The time is before year 1 or after year 9999.
        """
        if self.commit_time is None:
            return None
        return EPOCH_UTC + datetime.timedelta(microseconds=self.commit_time)

    def batches(self) -> Iterator[ChangeBatch]:
        """The rows as Arrow record batches, with commit LSN and commit time filled in.

        Large transactions come in several batches of each relation, decoded as they are taken.

        Raises
        ------
        DecodeError
            A frame is malformed, or a value is refused.
        """
        follower = self._followers[0]
        decoder = follower.at(self._before)
        for run in self._runs():
            yield from decoder.decode(run.data, run.offsets, run.lsns)
        follower.moved(decoder, self._after)

    def __iter__(self) -> Iterator[Any]:
        """The messages, without Begin and Commit.

        Raises
        ------
        DecodeError
            A frame is malformed.
        """
        follower = self._followers[1]
        decoder = follower.at(self._before)
        for run in self._runs():
            for frame in run.frames():
                message = decoder.decode(frame)
                if message.tag not in ("B", "C"):
                    yield message
        follower.moved(decoder, self._after)

    def frames(self) -> Iterator[bytes]:
        """The frames as protocol version 1 sends them, from Begin to Commit."""
        for run in self._runs():
            yield from run.frames()

    def _runs(self) -> Iterator[Run]:
        """The frames of :meth:`frames`, in runs of some megabytes."""
        parts = self._parts
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
        first = 0
        for run in parts.runs() if parts is not None else ():
            if first == 0:
                # Servers send Begin with the LSN of the first change. Relations and Types have the
                # LSN 0.
                yield _single(begin, int(run.lsns[run.lsns != 0][:1].sum()))
            if cast("Stage", parts).in_stream:
                run = Run(*without_xids(run.data, run.offsets), run.lsns)
            yield from self._edited(run, first)
            first += len(run)
        if first == 0:
            yield _single(begin, 0)
        yield _single(commit, self.end_lsn)

    def _edited(self, run: Run, first: int) -> Iterator[Run]:
        """The frames of a run without those to be dropped, and with those to be inserted.

        `first` is the index of the run's first frame in the transaction.
        """
        start, count = 0, len(run)
        inserted = {index - first: frames for index, frames in self._inserted}
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


_SAID = ("kind", "xid", "commit_lsn", "end_lsn", "commit_time", "origin", "gid")
_KEPT = ("_parts", "_dropped", "_inserted", "_before", "_after", "_followers")


def made(said: tuple[Any, ...], kept: tuple[Any, ...]) -> Transaction:
    """Make a transaction from its public attributes (`said`) and its private ones (`kept`)."""
    transaction = Transaction.__new__(Transaction)
    for name, value in zip(_SAID + _KEPT, said + kept, strict=True):
        setattr(transaction, name, value)
    return transaction


def _single(frame: bytes, lsn: int) -> Run:
    """One frame as a run."""
    return Run(frame, np.array([0, len(frame)], np.int64), np.array([lsn], np.uint64))
