"""Decode frames into Arrow record batches: the classes that both implementations share.

An engine (``_engine.pyx``, ``_pure_engine.py``) decodes frames into rows of columns. The class
ColumnarDecoder here calls it: it checks arguments, gives out batches in their order, and keeps
errors and events.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from .._impl import twin
from ..decoding.state import StreamState
from ..errors import Argument, DecodeError, PgOutputError, refuse_another_thread
from ..policies import Policies
from ..protocol.messages import decode_rare
from ..protocol.wire import XID_SIZE, offset_of, relation_id_of
from ..settings import Settings, make_settings
from ..types import TypeRegistry
from ..values import EPOCH_UTC
from .arrays import ArrayBuffers, FrameBatch, fixed_column, variable_column
from .fields import Field, Target
from .options import DecoderOptions, Layouts, OnError
from .selection import Selection

if TYPE_CHECKING:
    from ..decoding._pure import Decoder
    from ..decoding.plan import RelationPlan
    from ..protocol.messages import Message, Truncate
    from ._pure_batch import ChangeBatch


class Event(NamedTuple):
    """A frame other than Begin, Insert, Update and Delete, as a ColumnarDecoder reports it.

    Attributes
    ----------
    frame : int
        The frame's index in the call of `decode`.
    tag : str
        Its first byte: "C" for a Commit, "c" for a Stream Commit, "A" for a Stream Abort, "M" for a
        logical message, and so on.
    xid : int or None
        The top-level transaction of the frame; None outside of any.
    subxid : int or None
        The xid in the frame, if it came inside a stream chunk, else None. For a Stream Abort, the
        subtransaction that is rolled back.
    message : object or None
        The decoded message. None for a Commit: every transaction has one, and the fields below have
        its content.
    commit_lsn, end_lsn : int
        The message's fields of these names; 0 if it has none. The `end_lsn` of a message that
        commits a transaction is the LSN to acknowledge to the server.
    commit_time : int
        The message's field of this name, in microseconds since 2000-01-01 UTC; 0 if it has none.
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
        """`commit_time` as an aware datetime in UTC; None if the frame commits no transaction.

        Raises
        ------
        PgOutputError
            The time is before year 1 or after year 9999.
        """
        if self.tag not in _COMMITS:
            return None
        try:
            return EPOCH_UTC + datetime.timedelta(microseconds=self.commit_time)
        except OverflowError:
            raise PgOutputError(
                f"the commit time {self.commit_time} (microseconds since 2000-01-01) does not fit "
                "into Python's datetime",
                code="unfit_value",
            ) from None


_COMMITS = frozenset("CcK")
_STREAM_XID = offset_of("c", "xid")
"""Tags of the messages that commit a transaction: Commit, Stream Commit, Commit Prepared."""


class Events:
    """The events of a call, in the order of the stream.

    It has a length, and can be indexed and iterated; its items are :class:`Event`.

    Attributes
    ----------
    array : structured array
        The fields of all events except `message`, with `tag` as uint8, and 0 for None. It is faster
        than the sequence for many events.
    messages : mapping of int to message
        The messages of the events that have one, by the index of the frame.
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
    """A malformed frame that ``on_error="collect"`` has kept.

    Attributes
    ----------
    frame : int
        Its index in the call of `decode`.
    lsn : int or None
        Its LSN; None if no LSNs were given to `decode`.
    error : DecodeError
        What is wrong with it.
    data : bytes
        The bytes of the frame.
    plan : RelationPlan or None
        If one value is refused: the version of the relation to which the frame belongs.
    """

    frame: int
    lsn: int | None
    error: DecodeError
    data: bytes
    plan: RelationPlan | None = None

    def __repr__(self) -> str:
        return f"BadFrame(frame={self.frame}, lsn={self.lsn}, error={self.error!r})"


class ErrorBatch(Sequence[BadFrame]):
    """The malformed frames of a call: a sequence of :class:`BadFrame`, and an Arrow record batch.

    The columns of the record batch are frame (int64, the index), lsn (uint64), tag and code (utf8),
    offset (int64), message (utf8) and data (binary, the whole frame).
    """

    def __init__(self) -> None:
        self._frames: list[BadFrame] = []

    def append(self, frame: BadFrame) -> None:
        """Add a frame."""
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
        """Schema and batch as capsules. `requested_schema` is ignored, as the interface allows."""
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
            _ERRORS, ArrayBuffers(len(bad), 0, (None,), columns)
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
    """Batches with the same schema, as an Arrow stream.

    Raises
    ------
    PgOutputError
        There is no batch, or the batches have different schemas.
    TypeError
        One of them is no ChangeBatch.
    """

    def __init__(self, batches: Iterable[ChangeBatch]) -> None:
        self._batches = list(batches)
        if not self._batches:
            raise PgOutputError("a stream needs a batch, which has the schema", code="unfit_input")
        first = self._batches[0]
        for batch in self._batches:
            if not hasattr(batch, "layout"):
                raise TypeError(f"a stream is of ChangeBatches, not of {type(batch).__name__}")
            if batch.layout is not first.layout or batch.binary != first.binary:
                raise PgOutputError(
                    "the batches have different schemas: they are of several tables, or the table "
                    "was altered",
                    code="unfit_input",
                    hint="Make a stream of each",
                )

    def __iter__(self) -> Iterator[ChangeBatch]:
        return iter(self._batches)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The stream as a capsule. `requested_schema` is ignored, as the interface allows."""
        return twin("columnar._batch").export_stream(self._batches)


class ColumnarDecoder:
    """Decodes the frames of one replication stream, in their order, into Arrow record batches.

    Parameters
    ----------
    policies : Policies, optional
        What to do with values that a column cannot hold.
    decoder : Decoder, optional
        A decoder from which to go on: its state is copied. Its policies, encoding and registry are
        used unless others are given here.
    target : {"arrow", "spark", "portable"}
        The types of the columns: the richest ones of Arrow, those of Spark, or those that polars
        and duckdb support too.
    tables : str or iterable of str, optional
        Patterns of the tables to decode, matched with ``namespace.name``, with ``*``, ``?`` and
        ``[...]``. By default all.
    columns : iterable of str, or mapping of str to iterable of str, optional
        Names of the columns to decode, of all tables or by pattern of tables. By default all.
    encoding : str, optional
        The session's client_encoding.
    registry : TypeRegistry, optional
        Users' types.
    fill_unchanged : bool
        Whether to fill in values that were not sent, from the old row. The server sends the whole
        old row with REPLICA IDENTITY FULL.
    max_rows, max_bytes : int
        `max_rows` limits a batch, and `max_bytes` limits the rows of all relations together that
        the decoder holds. The decoder gives out batches before a row that would exceed a limit. A
        row larger than `max_bytes` makes a batch of its own.
    on_error : {"raise", "collect"}
        What to do at a malformed frame: give out the rows before it and raise its error, or put it
        into `errors` and go on.
    layouts : callable, optional
        A function that is called with the ``RelationPlan`` of each version of a relation. It
        returns the ``Layout`` of the version's batches, or None to leave out the rows. `target`
        then decides only the types of the columns beside the rows, and `tables` and `columns` must
        not be given. The Spark readers use this argument.

    Raises
    ------
    PgOutputError
        An argument has a value that is not allowed.
    TypeError
        An argument has a wrong type.
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
            raise PgOutputError(
                "it chooses tables and columns",
                code="bad_option",
                parameter="layouts",
                hint=("Leave out ", Argument("tables"), " and ", Argument("columns")),
            )
        options = DecoderOptions(
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
                encoding if encoding is not None else known.client_encoding,
                registry if registry is not None else known.registry,
            )
            if settings != known:
                state = state.copy(settings)
        self._start(state, options)

    def _start(self, state: StreamState, options: DecoderOptions) -> None:
        self._options = options
        self._engine = twin("columnar._engine").ColumnEngine(state, options)
        self._call: object = None  # stands for the call of decode() that is not yet complete
        # Only the thread that holds the lock uses the engine. The frames may come from a generator
        # that asks for the decoder's state, so the lock is re-entrant. But while the engine runs,
        # `_runs` is set and nobody may read its memory, which it moves.
        self._lock = threading.RLock()
        self._runs = False
        self._bad = ErrorBatch()
        self._events: Events | None = None
        self._next = 0

    @property
    def state(self) -> StreamState:
        """What the decoder knows of earlier frames: relations, types, the open transaction.

        Raises
        ------
        PgOutputError
            Another thread is decoding with this decoder.
        """
        self._take()
        try:
            self._engine.sync()
            state: StreamState = self._engine.state
            return state
        finally:
            self._lock.release()

    @property
    def events(self) -> Events:
        """The events of the last call of :meth:`decode`, as far as its batches were taken.

        Raises
        ------
        PgOutputError
            Another thread is decoding with this decoder.
        """
        self._take()
        try:
            if self._events is None:
                self._events = Events(self._engine.take_events(), self._engine.messages)
            return self._events
        finally:
            self._lock.release()

    @property
    def errors(self) -> ErrorBatch:
        """The malformed frames of the last call of :meth:`decode`, with ``on_error="collect"``."""
        return self._bad

    @property
    def next_frame(self) -> int:
        """Index of the frame after the last that was decoded in the last call of :meth:`decode`."""
        return self._next

    def reset(self) -> None:
        """Begin a new connection: forget open transactions and what streamed ones announced.

        Raises
        ------
        PgOutputError
            Another thread is decoding with this decoder.
        """
        self._take()
        try:
            self._call = None
            self._forget_frames(rows_too=True)
            state = self._engine.state
            state.reset()
            self._engine.adopt(state)
        finally:
            self._lock.release()

    def _take(self) -> None:
        """Take the lock of the engine, which the caller releases, while the engine does not run.

        The lock is not waited for, since the thread that holds it may wait for this one.

        Raises
        ------
        PgOutputError
            The engine is running, or another thread uses it.
        """
        if self._runs or not self._lock.acquire(blocking=False):
            refuse_another_thread()

    def __getstate__(self) -> tuple[StreamState, DecoderOptions]:
        self._take()
        try:
            self._engine.sync()
            return self._engine.state.copy(), self._options
        finally:
            self._lock.release()

    def __setstate__(self, state: tuple[StreamState, DecoderOptions]) -> None:
        self._start(*state)

    def __repr__(self) -> str:
        # The engine's own state is read, as `state` refuses while another thread decodes.
        known = len(self._engine.state.relations)
        return f"<ColumnarDecoder: target {self._options.target}, {known} relations>"

    def decode(self, data: Any, offsets: Any = None, lsns: Any = None) -> Iterator[ChangeBatch]:
        """Decode the stream's next frames.

        Parameters
        ----------
        data, offsets
            Frames as :func:`decode_batch` takes them, or its result.
        lsns : array of int, optional
            The LSN of each frame.

        Yields
        ------
        ChangeBatch
            Batches of rows of one version of a relation, in stream order for each relation. Frames
            are decoded while the batches are taken. All must be taken before the next call.

        Raises
        ------
        DecodeError
            A frame is malformed. `frame` of the error, and `next_frame`, are its index. All rows
            before it were given out, and the decoder is as it was before that frame.
        PgOutputError
            The batches of the call before were not all taken, or a frame is null.
        TypeError, ValueError
            `data`, `offsets` or `lsns` are of no supported form.
        """
        self._take()
        try:
            if self._call is not None:
                raise PgOutputError(
                    "the batches of the last call were not all taken, so that rows are missing",
                    code="unfit_input",
                    hint="Take all batches, or call reset() and decode the stream again from the "
                    "start of the connection",
                )
            self._engine.load(data, offsets, lsns)
            self._call = call = object()
            self._events = None
            self._bad = ErrorBatch()
            self._next = 0
        finally:
            self._lock.release()
        return self._batches(call)

    def _batches(self, call: object) -> Iterator[ChangeBatch]:
        complete = ended = False
        refused: BaseException | None = None
        try:
            while not ended:
                if self._call is not call:  # reset() has ended it
                    return
                # The call is checked before the lock is taken too: a thread that holds the lock for
                # a newer call may be waiting for this one.
                with self._lock:
                    if self._call is not call:
                        return
                    self._runs = True
                    try:
                        ready = self._engine.run()
                        ended = ready is None
                    except PgOutputError as error:
                        if self._collects(error):
                            continue
                        refused, ended = error, True
                    finally:
                        self._runs = False
                    self._next = self._engine.position
                    self._events = None
                    if ended:
                        self._runs = True
                        try:
                            ready = self._engine.flush()
                        finally:
                            self._runs = False
                while ready:
                    complete = ended and len(ready) == 1
                    yield ready.pop(0)
            complete = True
            if refused is not None:
                raise refused
        finally:
            # The lock is waited for, so that the frames are always forgotten. Without it another
            # thread could call reset() and decode() now, and the frames would be those of its call.
            if self._call is call:
                with self._lock:
                    if self._call is call:
                        self._forget_frames(rows_too=not complete)
                        if complete:
                            self._call = None

    def _forget_frames(self, rows_too: bool) -> None:
        """Forget the frames of a call, and with `rows_too` its rows that were not given out.

        The caller holds the lock.
        """
        # The finalizer of the frames' memory may call this decoder, and is refused then.
        self._runs = True
        try:
            if rows_too:
                self._engine.drop()
            self._engine.unload()
        finally:
            self._runs = False

    def _collects(self, error: PgOutputError) -> bool:
        """Put the malformed frame into `errors`, unless later frames can't be decoded without it.

        Returns whether it did so.
        """
        if not isinstance(error, DecodeError):
            return False
        if self._options.on_error != "collect" or error.tag in ("S", "E", "B", "b"):
            return False
        engine = self._engine
        frame = engine.frame()
        # Tracebacks are not looked at here, and take 10 kB for each frame.
        one: BaseException | None = error
        while one is not None:
            one.__traceback__, one = None, one.__context__
        engine.sync()
        state = engine.state
        plan = None
        if error.column is not None:
            plan = state.plan(relation_id_of(frame, state.open_xid is not None))
        self._bad.append(BadFrame(engine.position, engine.lsn(), error, frame, plan))
        if error.tag in ("R", "Y"):
            self._forget_announced(state, frame)
        elif error.tag in ("C", "P") and state.open_xid is None:
            state.end()
        elif error.tag == "c":
            xid = frame[_STREAM_XID : _STREAM_XID + XID_SIZE]
            state.lose_stream(int.from_bytes(xid, "big") if len(xid) == XID_SIZE else None)
        engine.adopt(state)
        engine.skip(self._rows_of(frame))
        return True

    def _rows_of(self, frame: bytes) -> int:
        """How many rows a malformed frame would have made, which `seq` counts."""
        if frame[:1] == b"T":
            try:
                message = decode_rare(frame, self._engine.state.open_xid is not None, "latin-1")
            except DecodeError:
                return 0  # the number of tables is unknown
            return len(cast("Truncate", message).relation_ids)
        return int(frame[:1] in (b"I", b"U", b"D"))

    def _forget_announced(self, state: StreamState, frame: bytes) -> None:
        """Forget the relation or type of a malformed Relation or Type message."""
        number = relation_id_of(frame, state.open_xid is not None)
        if frame[:1] == b"R":
            state.forget_relation(number)
        else:
            state.forget_type(number)


def decode_batch(data: Any, offsets: Any = None, in_stream: int | bool = False) -> FrameBatch:
    """Decode the headers of many frames, and where their columns lie, into NumPy arrays.

    Every frame is checked as :func:`decode` does. As relations are not looked up, the number of
    columns of a tuple is not checked.

    Parameters
    ----------
    data : sequence of bytes-like, Arrow array of binary, or buffer
        The frames. An Arrow array is an object with ``__arrow_c_array__`` or
        ``__arrow_c_stream__``, of the type binary, large_binary or binary_view; it may be sliced
        and chunked. A buffer needs `offsets`, and must not be changed while the result is used.
    offsets : array of int, optional
        n + 1 offsets of the n frames in a buffer.
    in_stream : int or bool
        The xid of the stream chunk that is open before the first frame, or False if none is. It is
        `in_stream` of the previous result.

    Raises
    ------
    DecodeError
        A frame is malformed. `frame` of the error is the index of the first such frame.
    PgOutputError
        A frame is null.
    OverflowError
        `in_stream` is no xid.
    TypeError, ValueError
        `data` or `offsets` are of no supported form.
    """
    batch: FrameBatch = twin("columnar._headers").decode_batch(data, offsets, in_stream)
    return batch
