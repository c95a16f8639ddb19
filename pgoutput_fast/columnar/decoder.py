"""ColumnarDecoder: frames in, Arrow record batches out, one for each relation.

An engine, which exists twice (``_engine.pyx``, ``_pure_engine.py``), turns frames into rows. This
module exists once and leads it: it checks arguments, gives out batches in their order, handles
errors, and lists the frames that are no rows.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from .._impl import twin
from ..errors import DecodeError, PgOutputError
from ..messages import decode_rare
from ..policies import Policies
from ..settings import Settings, make_settings
from ..state import StreamState
from ..types import TypeRegistry
from ..values import EPOCH_UTC
from .arrays import Column, FrameBatch, fixed_column, variable_column
from .fields import Field, Target
from .options import Layouts, OnError, Options
from .selection import Selection

if TYPE_CHECKING:
    from .._pure import Decoder
    from ..messages import Message, Truncate
    from ._pure_batch import ChangeBatch


class Event(NamedTuple):
    """A frame that is neither a row nor a Begin, as a :class:`ColumnarDecoder` tells of it.

    Attributes
    ----------
    frame : int
        The frame's index in the call of `decode`.
    tag : str
        Its first byte: "C" of a Commit, "c" of a Stream Commit, "A" of a Stream Abort, "M" of a
        logical message, and so on.
    xid : int or None
        The top-level transaction that the frame is of; None outside of any.
    subxid : int or None
        The xid in the frame itself, where it comes inside of a stream; None elsewhere. Of a Stream
        Abort, the subtransaction whose rows are taken back.
    message : message or None
        The frame, decoded. None of a Commit, which comes with every transaction: the fields below
        have what it says.
    commit_lsn, end_lsn : int
        The message's fields of these names, 0 where it has none. The `end_lsn` of what commits a
        transaction is what is acknowledged to the server.
    commit_time : int
        The message's field of this name, in microseconds since 2000-01-01 UTC, 0 where it has none;
        `commit_datetime` is the same as a datetime.
    """

    frame: int
    tag: str
    xid: int | None
    subxid: int | None
    message: Message | None
    commit_lsn: int
    end_lsn: int
    commit_time: int

    @property
    def commit_datetime(self) -> datetime.datetime | None:
        """`commit_time` as an aware datetime in UTC; None of a frame that commits nothing.

        Raises
        ------
        PgOutputError
            It is before year 1 or after year 9999.
        """
        if self.tag not in _COMMITS:
            return None
        try:
            return EPOCH_UTC + datetime.timedelta(microseconds=self.commit_time)
        except OverflowError:
            raise PgOutputError(
                f"the commit time {self.commit_time} (microseconds since 2000-01-01) does not fit "
                "into Python's datetime"
            ) from None


_COMMITS = frozenset("CcK")
"""Tags of what commits a transaction: Commit, Stream Commit, Commit Prepared."""


class Events:
    """What came that is neither a row nor a Begin, in the order of the stream.

    It has a length, and is indexed and iterated over: its items are :class:`Event`.

    Attributes
    ----------
    array : structured array
        The fields of :class:`Event` but `message`, with `tag` as uint8 and 0 for None. It is faster
        than one Event after the other.
    messages : mapping of int to message
        By the index of its frame, each event's `message` that is not None.
    """

    def __init__(self, array: Any, messages: Mapping[int, Message]) -> None:
        self.array = array
        self.messages = messages

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, i: int) -> Event:
        item = self.array[i]
        frame = int(item["frame"])
        return Event(
            frame,
            chr(item["tag"]),
            int(item["xid"]) or None,
            int(item["subxid"]) or None,
            self.messages.get(frame),
            int(item["commit_lsn"]),
            int(item["end_lsn"]),
            int(item["commit_time"]),
        )

    def __iter__(self) -> Iterator[Event]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"<Events: {len(self)}>"


class BadFrame(NamedTuple):
    """A frame that was refused, as ``on_error="collect"`` keeps it.

    Attributes
    ----------
    frame : int
        Its index in the call of `decode`.
    lsn : int or None
        Its LSN; None where `decode` was given none.
    error : DecodeError
        Why it was refused.
    data : bytes
        The frame.
    """

    frame: int
    lsn: int | None
    error: DecodeError
    data: bytes

    def __repr__(self) -> str:
        return f"BadFrame(frame={self.frame}, lsn={self.lsn}, error={self.error!r})"


class ErrorBatch(Sequence[BadFrame]):
    """Frames that were refused: a sequence of :class:`BadFrame`, and an Arrow record batch.

    Its columns are frame (int64, the index), lsn (uint64), tag, code (utf8), offset (int64),
    message (utf8) and data (binary, the whole frame).
    """

    def __init__(self) -> None:
        self._frames: list[BadFrame] = []

    def append(self, frame: BadFrame) -> None:
        """Take one more."""
        self._frames.append(frame)

    @overload
    def __getitem__(self, i: int) -> BadFrame: ...
    @overload
    def __getitem__(self, i: slice) -> list[BadFrame]: ...
    def __getitem__(self, i: int | slice) -> BadFrame | list[BadFrame]:
        return self._frames[i]

    def __len__(self) -> int:
        return len(self._frames)

    def __repr__(self) -> str:
        return f"<ErrorBatch: {len(self)} frames>"

    def __arrow_c_schema__(self) -> object:
        """The schema, as a capsule of the Arrow C data interface."""
        return self.__arrow_c_array__()[0]

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Schema and batch as capsules; `requested_schema` is not looked at, as it may be."""
        bad = self._frames
        columns = (
            fixed_column("q", [one.frame for one in bad]),
            fixed_column("Q", [one.lsn for one in bad]),
            variable_column([one.error.tag.encode() if one.error.tag else None for one in bad]),
            variable_column([one.error.code.encode() for one in bad]),
            fixed_column("q", [one.error.offset for one in bad]),
            variable_column([str(one.error).encode("utf-8", "backslashreplace") for one in bad]),
            variable_column([one.data for one in bad]),
        )
        capsules: tuple[object, object] = twin("columnar._export").export(
            _ERRORS, Column(len(bad), 0, (None,), columns)
        )
        return capsules


_ERRORS = Field(
    "",
    "+s",
    children=tuple(
        Field(name, of)
        for name, of in (
            ("frame", "l"), ("lsn", "L"), ("tag", "u"), ("code", "u"), ("offset", "l"),
            ("message", "u"), ("data", "z"),
        )
    ),
)  # fmt: skip


class ChangeStream:
    """Batches of one relation and one schema, as an Arrow stream.

    Raises
    ------
    PgOutputError
        There is no batch, or they have different schemas.
    """

    def __init__(self, batches: Iterable[ChangeBatch]) -> None:
        self._batches = list(batches)
        if not self._batches:
            raise PgOutputError("a stream needs a batch, which has the schema")
        first = self._batches[0]
        for batch in self._batches:
            if not hasattr(batch, "layout"):
                raise TypeError(f"a stream is of ChangeBatches, not of {type(batch).__name__}")
            if batch.layout is not first.layout or batch.binary != first.binary:
                raise PgOutputError(
                    "the batches have different schemas: they are of several tables, or the table "
                    "was altered; make a stream of each"
                )

    def __iter__(self) -> Iterator[ChangeBatch]:
        return iter(self._batches)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The stream, as a capsule; `requested_schema` is not looked at, as it may be."""
        return twin("columnar._batch").export_stream(self._batches)


class ColumnarDecoder:
    """Decodes the frames of one stream, in order, into Arrow record batches.

    Parameters
    ----------
    policies : Policies, optional
        What to do with values that a column cannot hold.
    decoder : Decoder, optional
        The decoder whose state is copied, to go on from where it stands. Its policies, encoding and
        registry are taken too, unless they are given here.
    target : {"arrow", "spark", "portable"}
        Which types the columns have: the richest of Arrow's, those of Spark, or those that polars
        and duckdb can read too.
    tables : str or iterable of str, optional
        Patterns of ``namespace.name`` of the tables that are wanted, with ``*``, ``?`` and
        ``[...]``.
    columns : iterable of str, or mapping of str to iterable of str, optional
        Names of the columns that are wanted, of all tables or by pattern.
    encoding : str, optional
        The session's client_encoding.
    registry : TypeRegistry, optional
        Users' types.
    fill_unchanged : bool
        Whether values that were not sent are taken from the old row, which the server sends under
        REPLICA IDENTITY FULL.
    max_rows, max_bytes : int
        A batch is given out before it gets larger than this. The bytes are those of all rows of all
        relations that are held. A row that is larger by itself makes a batch of its own.
    on_error : {"raise", "collect"}
        What happens at a frame that is refused: with "raise" its error is raised after all rows
        before it were given out; with "collect" the frame goes to `errors`, and decoding goes on.
    layouts : callable, optional
        It is called with each version of a relation (its
        :class:`~pgoutput_fast.plan.RelationPlan`), and returns the
        :class:`~pgoutput_fast.columnar.schema.Layout` of its batches, or None where its rows are
        not wanted. `target` then says only which types the columns beside the rows have, and
        `tables` and `columns` are not given. The Spark readers choose their columns this way.

    Raises
    ------
    PgOutputError, TypeError
        An argument is none of these.
    """

    def __init__(
        self,
        policies: Policies | None = None,
        decoder: Decoder | None = None,
        target: Target = "arrow",
        tables: str | Iterable[str] | None = None,
        columns: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
        *,
        encoding: str | None = None,
        registry: TypeRegistry | None = None,
        fill_unchanged: bool = False,
        max_rows: int = 65_536,
        max_bytes: int = 64 << 20,
        on_error: OnError = "raise",
        layouts: Layouts | None = None,
    ) -> None:
        if layouts is not None and (tables is not None or columns is not None):
            raise PgOutputError("layouts= chooses tables and columns: give no tables= or columns=")
        options = Options(
            target,
            Selection(tables, columns),
            bool(fill_unchanged),
            max_rows,
            max_bytes,
            on_error,
            layouts,
        )
        if decoder is None:
            settings = make_settings(policies, encoding or "utf-8", registry)
            state = StreamState(settings)
        else:
            state = decoder.state.copy()
            known: Settings = state.settings
            settings = make_settings(
                policies if policies is not None else known.policies,
                encoding if encoding is not None else known.encoding,
                registry if registry is not None else known.registry,
            )
            if settings != known:
                state = state.copy(settings)
        self._start(state, options)

    def _start(self, state: StreamState, options: Options) -> None:
        self._options = options
        self._engine = twin("columnar._engine").Engine(state, options)
        self._call: object = None  # the one whose batches were not all taken
        self._runs = False
        self._bad = ErrorBatch()
        self._events: Events | None = None
        self._next = 0

    @property
    def state(self) -> StreamState:
        """What the decoder knows between calls: relations, types, the open transaction."""
        self._engine.sync()
        state: StreamState = self._engine.state
        return state

    @property
    def events(self) -> Events:
        """The frames of the last call that are no rows, as far as its batches were taken."""
        if self._events is None:
            self._events = Events(self._engine.take_events(), self._engine.messages)
        return self._events

    @property
    def errors(self) -> ErrorBatch:
        """The frames of the last call that were refused, with ``on_error="collect"``."""
        return self._bad

    @property
    def next_frame(self) -> int:
        """The index of the first frame of the last call that was not decoded."""
        return self._next

    def reset(self) -> None:
        """Begin a new connection: open streams and what they announced are dropped.

        Raises
        ------
        PgOutputError
            Another thread decodes with this decoder.
        """
        if self._runs:
            raise PgOutputError("another thread decodes with this decoder; give each its own")
        self._engine.drop()
        self._engine.unload()
        state = self._engine.state
        state.reset()
        self._engine.adopt(state)
        self._call = None

    def __getstate__(self) -> tuple[StreamState, Options]:
        return self.state, self._options

    def __setstate__(self, state: tuple[StreamState, Options]) -> None:
        self._start(*state)

    def __repr__(self) -> str:
        known = len(self.state.relations)
        return f"<ColumnarDecoder: target {self._options.target}, {known} relations>"

    def decode(self, data: Any, offsets: Any = None, lsns: Any = None) -> Iterator[ChangeBatch]:
        """Decode the stream's next frames.

        Parameters
        ----------
        data, offsets
            As of :func:`decode_batch`, or what it returned.
        lsns : array of int, optional
            The LSN of each frame.

        Yields
        ------
        ChangeBatch
            One per relation and schema version, in stream order within each. Frames are decoded as
            the batches are taken, all of them before the next call.

        Raises
        ------
        DecodeError
            A frame is refused; `.frame` is its index. The batches before have all rows before that
            frame, the decoder is as it was before it, and `next_frame` is its index.
        PgOutputError
            The batches of the call before were not all taken.
        TypeError, ValueError
            `data`, `offsets` or `lsns` are something else.
        """
        if self._call is not None:
            raise PgOutputError(
                "the batches of the last call were not all taken, so that rows are missing; take "
                "them to the end, or begin again with reset() and the stream's frames from the "
                "start of the connection"
            )
        self._engine.load(data, offsets, lsns)
        self._call = call = object()
        self._events = None
        self._bad = ErrorBatch()
        self._next = 0
        return self._batches(call)

    def _batches(self, call: object) -> Iterator[ChangeBatch]:
        engine = self._engine
        complete = False
        refused: BaseException | None = None
        try:
            while self._call is call:  # and was not ended by reset()
                self._runs = True
                try:
                    ready = engine.run()
                except PgOutputError as error:
                    if self._collects(error):
                        continue
                    refused = error
                    ready = None
                finally:
                    self._runs = False
                self._next = engine.position
                self._events = None
                if ready is None:
                    break
                yield from ready
            if self._call is not call:
                return
            ready = engine.flush()
            while ready:
                complete = len(ready) == 1
                yield ready.pop(0)
            complete = True
            if refused is not None:
                raise refused
        finally:
            if self._call is call:
                if complete:
                    self._call = None
                else:
                    engine.drop()
                engine.unload()

    def _collects(self, error: PgOutputError) -> bool:
        """Put the frame that was refused into `errors`, unless later frames depend on it."""
        if not isinstance(error, DecodeError):
            return False
        if self._options.on_error != "collect" or error.tag in ("S", "E", "B", "b"):
            return False
        engine = self._engine
        frame = engine.frame()
        self._bad.append(BadFrame(engine.position, engine.lsn(), error, frame))
        state = self.state
        if error.tag in ("R", "Y"):
            self._forget_announced(state, frame)
        elif error.tag in ("C", "P") and state.open_xid is None:
            state.end()
        elif error.tag == "c":
            state.lose_stream(int.from_bytes(frame[1:5], "big") if len(frame) >= 5 else None)
        engine.adopt(state)
        engine.skip(self._rows_of(frame))
        return True

    def _rows_of(self, frame: bytes) -> int:
        """How many rows a frame that was refused would have had."""
        if frame[:1] == b"T":
            try:
                message = decode_rare(frame, self._engine.state.open_xid is not None, "latin-1")
            except DecodeError:
                return 0  # nobody knows
            return len(cast("Truncate", message).relation_ids)
        return int(frame[:1] in (b"I", b"U", b"D"))

    def _forget_announced(self, state: StreamState, frame: bytes) -> None:
        """Forget the relation or type that a refused Relation or Type message was about."""
        start = 5 if state.open_xid is not None else 1
        number = (
            int.from_bytes(frame[start : start + 4], "big") if len(frame) >= start + 4 else None
        )
        if frame[:1] == b"R":
            state.forget_relation(number)
        else:
            state.forget_type(number)


def decode_batch(data: Any, offsets: Any = None, in_stream: int | bool = False) -> FrameBatch:
    """The headers of many frames, and where their columns are, as NumPy arrays.

    Every frame is checked as by :func:`decode`, without its relation: whether a tuple has as many
    columns as its relation is not checked here.

    Parameters
    ----------
    data : sequence of bytes-like, Arrow array of binary, or buffer
        The frames. An Arrow array is anything that has ``__arrow_c_array__`` or
        ``__arrow_c_stream__``, of the type binary, large_binary or binary_view; it may be sliced or
        chunked. A buffer has all frames one behind the other; it must not change for as long as the
        result is used.
    offsets : array of int, optional
        With a buffer: where its n frames begin and end, n + 1 offsets.
    in_stream : int or bool
        The xid of the stream chunk that is open before the first frame, or False if none is. The
        result of the call before has it in its `in_stream`.

    Raises
    ------
    DecodeError
        A frame is malformed, the first one in order; `.frame` is its index.
    PgOutputError
        A frame is null.
    TypeError, ValueError
        `data` or `offsets` are something else.
    """
    batch: FrameBatch = twin("columnar._headers").decode_batch(data, offsets, in_stream)
    return batch
