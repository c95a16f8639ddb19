"""Decode the frames of reads, with the types in force when the values were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..columnar.decoder import ColumnarDecoder
from ..errors import VALUE_CODES, DecodeError, PgOutputError
from ..lsn import format_lsn
from ..protocol.wire import relation_id_of
from .history import HistoryFollower
from .ranges import counted, frame_counts, frame_lsns
from .read_frames import WantedFiles, frame_runs

if TYPE_CHECKING:
    from ..columnar._pure_batch import ChangeBatch
    from ..columnar.decoder import BadFrame
    from ..segments import SegmentMetadata
    from .history import History, HistoryPolicy
    from .read_frames import FrameRun
    from .read_plan import Read


class Refusal(NamedTuple):
    """A refused value, or a refused batch, of one table.

    Attributes
    ----------
    relation : Relation
    error : PgOutputError
    bad : BadFrame or None
        The frame with the value; None if a whole batch is refused.
    """

    relation: Any
    error: PgOutputError
    bad: BadFrame | None


class ChangeReader:
    """Decodes runs of frames in order.

    Parameters
    ----------
    decoding : dict
        Arguments of :class:`ColumnarDecoder`.
    history : History, optional
        The schema history. It provides the types, unless `decoding` has a registry.
    policy : {"newer", "older", "error"}
        Which definition of an altered type to use where the history leaves it open.
    refused : callable, optional
        Called with the run of frames (or a part of it) and the refusals, instead of raising an
        error for a refused value. The decoder continues after the refused frames. The call comes
        before the batch with the later rows of the same tables is yielded.

    Attributes
    ----------
    decoding : dict
        The arguments of the decoder, with the registry that follows the history.
    history : History or None
    follower : HistoryFollower or None
    """

    def __init__(
        self,
        decoding: dict[str, Any],
        history: History | None = None,
        policy: HistoryPolicy = "newer",
        refused: Callable[[FrameRun, list[Refusal]], None] | None = None,
    ) -> None:
        self.history = history
        self.follower: HistoryFollower | None = None
        if history is not None and decoding.get("registry") is None:
            self.follower = HistoryFollower(history, policy)
            decoding = {**decoding, "registry": self.follower.registry}
        self.decoding = decoding
        self._wanted = WantedFiles(decoding.get("tables"))
        self._refused = refused
        self._decoder: ColumnarDecoder | None = None
        self._encoding = ""

    def frame_runs(self, read: Read, metadata: SegmentMetadata) -> Iterator[FrameRun]:
        """Yield the runs of a read; none if its files have no changes of the wanted tables.

        Parameters
        ----------
        read : Read
        metadata : SegmentMetadata
            The metadata of another file of the same change log.
        """
        if self._wanted.has_any(read):
            yield from frame_runs(read, metadata)

    def changes(self, frame_run: FrameRun) -> Iterator[tuple[ChangeBatch, Any]]:
        """Yield each batch of changes of a run, and its record batch in the range of the read.

        Raises
        ------
        PgOutputError
            A frame is refused. Or the policy is "error", and a value's type was altered at about
            the time when the value was written.
        """
        try:
            if self.follower is None:
                yield from self._part(frame_run)
                return
            commit_lsns = frame_run.beside.column("commit_lsn")
            parts = self.follower.parts(
                frame_run.frames, frame_run.lsns, commit_lsns, frame_run.path, frame_run.encoding
            )
            for begin, end in parts:
                part = frame_run._replace(
                    frames=frame_run.frames.slice(begin, end - begin),
                    lsns=frame_run.lsns[begin:end],
                    beside=frame_run.beside.slice(begin, end - begin),
                )
                try:
                    yield from self._part(part)
                except DecodeError as error:
                    if error.frame is not None:
                        error.frame += begin
                    raise
        except DecodeError as error:
            raise _located(error, frame_run) from error

    def _part(self, frame_run: FrameRun) -> Iterator[tuple[ChangeBatch, Any]]:
        """Yield the batches of frames that have one state of the types."""
        decoder = self._decoder_for(frame_run)
        reported = 0
        for changes in decoder.decode(frame_run.frames, lsns=frame_lsns(frame_run)):
            if self._refused is not None:
                reported = self._report(decoder, frame_run, reported)
            batch = counted(changes, frame_run)
            if not len(batch):
                continue
            if self.follower is not None:
                try:
                    self.follower.check_batch(changes.layout, batch, frame_run.path)
                except PgOutputError as error:
                    if self._refused is None:
                        raise
                    self._refused(frame_run, [Refusal(changes.relation, error, None)])
                    continue
            yield changes, batch
        self._report(decoder, frame_run, reported)

    def _report(self, decoder: ColumnarDecoder, frame_run: FrameRun, first: int) -> int:
        """Raise the decoder's new errors, or report them as refusals; return the number of errors.

        Errors outside the range of the read are left out. `first` is the index of the first new
        error.
        """
        errors = decoder.errors[first:]
        refusals = [self._refusal(bad, frame_run) for bad in errors if frame_counts(frame_run, bad)]
        if self._refused is not None and refusals:
            self._refused(frame_run, refusals)
        return first + len(errors)

    def _refusal(self, bad: BadFrame, frame_run: FrameRun) -> Refusal:
        """Return the refusal for a frame with a refused value; raise any other error."""
        bad.error.frame = bad.frame
        relation = None if bad.plan is None else bad.plan.relation
        try:
            if self.follower is not None and bad.data[:1] in (b"I", b"U", b"D"):
                relation_id = relation_id_of(bad.data, in_stream=False)
                if relation_id is not None:
                    self.follower.check(relation_id, frame_run.path)
        except PgOutputError as error:
            if self._refused is None or relation is None:
                raise
            return Refusal(relation, error, bad)
        if self._refused is None or relation is None or bad.error.code not in VALUE_CODES:
            raise bad.error
        return Refusal(relation, _located(bad.error, frame_run), bad)

    def _decoder_for(self, frame_run: FrameRun) -> ColumnarDecoder:
        """Return the decoder for a run; make a new one if the encoding has changed."""
        if self._decoder is None or self._encoding != frame_run.encoding:
            # Collect errors: those of frames outside the range of the read must not be raised.
            arguments = {**self.decoding, "on_error": "collect", "encoding": frame_run.encoding}
            self._decoder, self._encoding = ColumnarDecoder(**arguments), frame_run.encoding
        return self._decoder


def _located(error: DecodeError, frame_run: FrameRun) -> PgOutputError:
    """Return the error with the path and the LSN of its frame in the text."""
    lsn = ""
    if frame_run.lsns is not None and error.frame is not None:
        lsn = f", LSN {format_lsn(int(frame_run.lsns[error.frame]))}"
    text = f"{frame_run.path}{lsn}: {error.message}"
    return PgOutputError(text, hint=error.hint).locate(error, error.frame, str(frame_run.path))
