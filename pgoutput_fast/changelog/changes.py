"""Decode the frames of units: the changes that count, by the types of their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..columnar.decoder import ColumnarDecoder
from ..errors import VALUE_CODES, DecodeError, PgOutputError
from ..lsn import format_lsn
from ..protocol.wire import relation_id_of
from .history import HistoryFollower
from .ranges import counted, frame_counts, given_lsns

if TYPE_CHECKING:
    from ..columnar._pure_batch import ChangeBatch
    from ..columnar.decoder import BadFrame
    from .history import History, HistoryPolicy
    from .read_frames import Chunk


class Refusal(NamedTuple):
    """A table of which something is refused that counts.

    Attributes
    ----------
    relation : Relation
    error : PgOutputError
    bad : BadFrame or None
        The frame; None: not one frame alone.
    """

    relation: Any
    error: PgOutputError
    bad: BadFrame | None


class ChangeReader:
    """Decodes chunks in their order.

    Parameters
    ----------
    decoding : dict
        Arguments of :class:`ColumnarDecoder`.
    history : History, optional
        It has the types of each part's time, unless `decoding` has a registry.
    policy : {"newer", "older", "error"}
        Which of two forms an altered type has, where nothing tells.
    refused : callable, optional
        Called where values are refused that count, in place of raising an error: with the chunk,
        or the part of it, and the refusals. The decoder goes on behind the frames. It is called
        before the batch is given out that has the rows of these tables behind them.

    Attributes
    ----------
    decoding : dict
        With the registry that follows the history.
    follower : HistoryFollower or None
    """

    def __init__(
        self,
        decoding: dict[str, Any],
        history: History | None = None,
        policy: HistoryPolicy = "newer",
        refused: Callable[[Chunk, list[Refusal]], None] | None = None,
    ) -> None:
        self.follower: HistoryFollower | None = None
        if history is not None and decoding.get("registry") is None:
            self.follower = HistoryFollower(history, policy)
            decoding = {**decoding, "registry": self.follower.registry}
        self.decoding = decoding
        self._refused = refused
        self._decoder: ColumnarDecoder | None = None
        self._encoding = ""

    def changes(self, chunk: Chunk) -> Iterator[tuple[ChangeBatch, Any]]:
        """Each batch of changes of a chunk, and the record batch of those that count.

        Raises
        ------
        PgOutputError
            A frame is refused; or a value's type was altered at about the same time, and nothing
            says before or after.
        """
        try:
            if self.follower is None:
                yield from self._part(chunk)
                return
            commit_lsns = chunk.beside.column("commit_lsn")
            parts = self.follower.parts(
                chunk.frames, chunk.lsns, commit_lsns, chunk.path, chunk.encoding
            )
            for begin, end in parts:
                part = chunk._replace(
                    frames=chunk.frames.slice(begin, end - begin),
                    lsns=chunk.lsns[begin:end],
                    beside=chunk.beside.slice(begin, end - begin),
                )
                try:
                    yield from self._part(part)
                except DecodeError as error:
                    if error.frame is not None:
                        error.frame += begin
                    raise
        except DecodeError as error:
            raise _located(error, chunk) from error

    def _part(self, chunk: Chunk) -> Iterator[tuple[ChangeBatch, Any]]:
        """Do this for frames whose types do not change."""
        decoder = self._decoder_for(chunk)
        reported = 0
        for changes in decoder.decode(chunk.frames, lsns=given_lsns(chunk)):
            if self._refused is not None:
                reported = self._report(decoder, chunk, reported)
            batch = counted(changes, chunk)
            if not len(batch):
                continue
            if self.follower is not None:
                try:
                    self.follower.check_batch(changes.layout, batch, chunk.path)
                except PgOutputError as error:
                    if self._refused is None:
                        raise
                    self._refused(chunk, [Refusal(changes.relation, error, None)])
                    continue
            yield changes, batch
        self._report(decoder, chunk, reported)

    def _report(self, decoder: ColumnarDecoder, chunk: Chunk, first: int) -> int:
        """Raise the errors that count from the one of an index on, or tell of them as refusals.

        Returns how many errors there are.
        """
        errors = decoder.errors[first:]
        refusals = [self._refusal(bad, chunk) for bad in errors if frame_counts(chunk, bad)]
        if self._refused is not None and refusals:
            self._refused(chunk, refusals)
        return first + len(errors)

    def _refusal(self, bad: BadFrame, chunk: Chunk) -> Refusal:
        """The refusal of a frame with a refused value; other errors are raised."""
        bad.error.frame = bad.frame
        relation = None if bad.plan is None else bad.plan.relation
        try:
            if self.follower is not None and bad.data[:1] in (b"I", b"U", b"D"):
                relation_id = relation_id_of(bad.data, in_stream=False)
                if relation_id is not None:
                    self.follower.check(relation_id, chunk.path)
        except PgOutputError as error:
            if self._refused is None or relation is None:
                raise
            return Refusal(relation, error, bad)
        if self._refused is None or relation is None or bad.error.code not in VALUE_CODES:
            raise bad.error
        return Refusal(relation, _located(bad.error, chunk), bad)

    def _decoder_for(self, chunk: Chunk) -> ColumnarDecoder:
        """The decoder for the next frames. What it is made with may differ from unit to unit."""
        if self._decoder is None or self._encoding != chunk.encoding:
            # Errors are collected, as a frame that does not count may be refused.
            arguments = {**self.decoding, "on_error": "collect", "encoding": chunk.encoding}
            self._decoder, self._encoding = ColumnarDecoder(**arguments), chunk.encoding
        return self._decoder


def _located(error: DecodeError, chunk: Chunk) -> PgOutputError:
    """An error that also names the place in the source."""
    lsn = ""
    if chunk.lsns is not None and error.frame is not None:
        lsn = f", LSN {format_lsn(int(chunk.lsns[error.frame]))}"
    text = f"{chunk.path}{lsn}: {error.message}"
    return PgOutputError(text, hint=error.hint).locate(error, error.frame, str(chunk.path))
