"""Write a slot's changes to a directory of segments, and acknowledge them once they are durable."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..connections import ConnectionParameters
from ..directory.retention import Keep
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..segments import SegmentWriter
from ..segments.folders import report_others
from ..segments.format import check_options
from .attempt import unless_stopped
from .beginning import Begun, begin_directory
from .client import check_assembling
from .copier import CopyTarget
from .history import HistoryWatch, first_state
from .landing import CaptureProgress, Landing
from .link import Link, first_connection
from .membership import Members, read_members, warn_of_identities
from .receiver import Receiver
from .resent import check_resent
from .source import Source, Started
from .stream_options import Protocol, Streaming, StreamOptions, check_seconds
from .upkeep import Upkeep, UpkeepOptions, order_first
from .uploader import Uploader, UploadOptions, upload_options

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from ..directory.history import CatalogRead
    from ..segments import SegmentMetadata
    from .snapshot import ServerSnapshot
    from .walsender import CreatedSlot

# Also of a path that was made of a URL, and lacks a slash.
_URL = re.compile(r"(?:s3[an]?|gs|gcs|abfss?|wasbs?|hdfs|https?|file):/", re.ASCII | re.IGNORECASE)


# Long because half of it is its parameters and their checks.
def capture(
    dsn: str | None = None,
    *,
    slot: str,
    publications: Sequence[str],
    directory: str | os.PathLike[str],
    create_slot: bool = False,
    adopt_slot: bool = False,
    until_lsn: int | None = None,
    protocol: Protocol = "auto",
    streaming: Streaming = True,
    two_phase: bool | None = False,
    unknown_prepared: Literal["empty", "error"] | None = None,
    binary: bool = False,
    messages: bool = False,
    origin: str | None = None,
    segment_bytes: int = 16 << 20,
    max_delay: float = 1.0,
    compression: Literal["lz4", "zstd"] | None = None,
    max_memory: int = 64 << 20,
    silence_timeout: float | None = None,
    retry_for: float | None = None,
    snapshot: Literal["never", "initial", "only"] = "never",
    connections: int = 2,
    merge: bool = True,
    grace: float = 3600.0,
    keep_seconds: float | None = None,
    keep_bytes: int | None = None,
    silent_after: float | None = None,
    give_up: bool = False,
    min_free: int = 256 << 20,
    history: bool = True,
    upload: str | None = None,
    upload_endpoint: str | None = None,
    upload_keep: Literal["all", "local"] = "all",
    progress: Callable[[CaptureProgress], None] | None = None,
    stop: threading.Event | None = None,
    **keywords: object,
) -> CaptureProgress:
    """Write a slot's changes to segments, from where the directory ends.

    It goes on until `until_lsn` or `stop`, or until Ctrl-C or an error. A connection that is lost,
    as when the server restarts, is made again. A segment ends with the first commit after
    `segment_bytes`, or when its oldest commit is `max_delay` old. Every version of the protocol
    lands in the form of version 1. However a call ends, even by a kill, the next one goes on, and
    no change is lost or written twice.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL; by default as libpq's variables say.
    slot : str
    publications : list or tuple of str
        Names of publications, without quotes.
    directory : path
        The directory of segments (`pgoutput_fast.segments`), which is made if it does not exist.
    create_slot : bool
        Whether to make the slot if it does not exist. It is made only for a directory in which no
        capture has begun.
    adopt_slot : bool
        Whether a slot that exists already, for example one that was made with SQL, may begin a new
        directory, or go on in one that `download` has made, as the original is lost. Otherwise it
        is refused: if another directory has what the slot brought so far, it would lack what comes
        into this one.
    until_lsn : int
        Capture exactly what was committed before this LSN, then end. `pg_current_wal_lsn()` gives
        the LSN for all that is committed, and on the server's disk, by now. A transaction is before
        it if its commit record begins before it, a non-transactional message if its record ends
        there or before. What comes after stays in the slot. Tables that wait are copied before the
        capture ends, and where a copy is of a later point, it goes on up to there.
    protocol, streaming, two_phase, unknown_prepared, origin
        As of :func:`connect`. Prepared transactions land when they are committed; until then they
        are kept in the subdirectory ``prepared``.
    binary : bool
        Whether values come in binary format, if their types have one.
    messages : bool
        Whether logical messages (`pg_logical_emit_message`) come too.
    segment_bytes : int
        A segment ends with the first commit after so many bytes. A transaction that is larger is
        cut into parts of half as many again.
    max_delay : float
        Seconds after which a commit is durable in a segment, and acknowledged, busy or not.
    compression : {None, "lz4", "zstd"}
        How segments are compressed.
    max_memory : int
        Bytes of all transactions that have not ended. Beyond them, the largest goes to a file in
        `directory` that has no name.
    silence_timeout, retry_for : float
        As of :func:`connect`.
    snapshot : {"never", "initial", "only"}
        "initial": the rows that were there when the slot was made come too, and those of tables
        that join the publications later: see docs/segments.md. "only": the capture ends when the
        tables are copied, and a later one takes what came since. "never": no table is copied but
        on request. It holds for this call, not for the directory.
    connections : int
        So many read tables that are copied, beside the one of the stream.
    merge : bool
        Whether small segments are merged, up to `segment_bytes`.
    grace : float
        Seconds for which a file stays after it was merged into another one, for readers that have
        listed the directory before.
    keep_seconds, keep_bytes : float, int
        Segments are deleted that every consumer of the directory has read, once they are so old, or
        the directory has more bytes. By default nothing is deleted.
    silent_after : float
        Consumers are reported that have something left to read and do not move for so many seconds;
        by default two days. A consumer is also reported that is 1 GiB of the log behind.
    give_up : bool
        Whether such a consumer is removed, so that nothing is kept for it. It needs `silent_after`.
    min_free : int
        The capture ends with an error when the disk has fewer bytes free.
    history : bool
        Whether the history of types and tables is kept, which a connection beside the stream reads,
        so that all values can be decoded though types are altered: see docs/types.md.
    upload : str
        ``s3://bucket/prefix``: a place in S3-compatible object storage, to which the directory is
        copied, for readers elsewhere: see docs/capture.md. Credentials come from where the AWS SDK
        looks for them. What is not copied is not deleted. If the capture ends at `until_lsn`, it
        ends once all is copied.
    upload_endpoint : str
        ``http://host:port`` or ``https://host`` of storage that is not that of AWS; by default as
        the environment variables AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL say.
    upload_keep : {"all", "local"}
        "local": what is deleted from the directory is then deleted from its copy.
    progress : callable
        Called with a `CaptureProgress` after each batch of frames that came, and each second
        while none come, or while a large transaction is written.
    stop : threading.Event
        Ends the capture within some tenths of a second after it is set by another thread. Whole
        transactions that were received are made durable before.
    **keywords
        Parameters of libpq by name, over those of `dsn`.

    Returns
    -------
    CaptureProgress
        The numbers at the end.

    Raises
    ------
    RetryableError
        The slot is in use, or the server can't be reached now; or a connection was lost; and it was
        not made within `retry_for`, or before `stop` was set: call again to go on.
    PgOutputError
        The server refuses; there is no such publication, or no such slot; the slot is beyond the
        end of the directory; no capture has begun in the directory, and the slot is there already;
        the directory is another slot's or another capture's, or damaged; the server's log goes
        another way than when the directory was written; the disk or the object storage refuses; or
        pyarrow or NumPy is not installed. No message has the password.
    TypeError
        An argument has a wrong type. Nothing was made.
    KeyboardInterrupt
        Ctrl-C was pressed. What was acknowledged is durable, and the slot has the rest: call again
        to go on.
    """
    _check_arguments(
        until_lsn,
        progress,
        stop,
        directory=(directory, (str, os.PathLike), "a path"),
        create_slot=(create_slot, bool, "a bool"),
        adopt_slot=(adopt_slot, bool, "a bool"),
        segment_bytes=(segment_bytes, int, "an int, of bytes"),
        max_delay=(max_delay, (int, float), "a number of seconds"),
        connections=(connections, int, "an int"),
        merge=(merge, bool, "a bool"),
        give_up=(give_up, bool, "a bool"),
        min_free=(min_free, int, "an int, of bytes"),
        history=(history, bool, "a bool"),
    )
    uploads = check_combined(
        directory=directory, upload=upload, upload_endpoint=upload_endpoint,
        upload_keep=upload_keep, silent_after=silent_after, give_up=give_up,
    )  # fmt: skip
    check_options(segment_bytes, compression)
    check_assembling({"max_memory": max_memory}, unknown_prepared)
    if not max_delay >= 0:
        raise PgOutputError(f"max_delay={max_delay}: expected a number of seconds")
    check_seconds(
        silence_timeout=silence_timeout, retry_for=retry_for, grace=grace,
        keep_seconds=keep_seconds, silent_after=silent_after,
    )  # fmt: skip
    if snapshot not in ("never", "initial", "only"):
        raise PgOutputError(f"snapshot={snapshot!r}: expected 'never', 'initial' or 'only'")
    if connections < 1:
        raise PgOutputError(f"connections={connections}: at least one has to read")
    copies = snapshot != "never"
    keeping = UpkeepOptions(
        copies, Keep(keep_seconds, keep_bytes), segment_bytes if merge else 0, grace, silent_after,
        give_up, min_free,
    )  # fmt: skip
    options = StreamOptions(
        publications, protocol=protocol, streaming=streaming, two_phase=two_phase, binary=binary,
        messages=messages, origin=origin,
    )  # fmt: skip
    parameters = ConnectionParameters(dsn, keywords)
    uploader = None if uploads is None else Uploader(Path(directory), uploads)
    writing = {"segment_bytes": segment_bytes, "compression": compression}

    def target(metadata: SegmentMetadata) -> CopyTarget:
        return CopyTarget(parameters, metadata, Path(directory), connections, compression)

    def open_first(made: CreatedSlot, metadata: SegmentMetadata) -> ServerSnapshot:
        opened = target(metadata).open(None, stop, made)
        order_first(Path(directory), opened)
        return opened

    def begin() -> tuple[Members, CatalogRead | None, Begun]:
        unless_stopped(lambda: warn_of_identities(parameters, publications), lambda _: None, stop)
        # Asked before the slot is made: what changes later is seen as a change.
        members = read_members(parameters, publications) if copies else Members({}, 0)
        types = None
        if history:
            (types,) = unless_stopped(
                lambda: (first_state(parameters, publications, messages=messages),),
                lambda _: None,
                stop,
            )
        return members, types, begin_directory(
            parameters, slot, options, Path(directory), writing, create_slot=create_slot,
            adopt_slot=adopt_slot, open_first=open_first if copies else None, stop=stop,
        )  # fmt: skip

    report_others(Path(directory))
    members, types, begun = first_connection(begin, retry_for, stop)
    with contextlib.ExitStack() as held:
        writer = held.enter_context(begun.writer)
        if begun.opened is not None:
            held.callback(begun.opened.close)
        watch = None
        if history:
            watch = HistoryWatch(
                parameters, publications, writer.directory, writer.position, messages=messages,
                first=types,
            )  # fmt: skip
            held.callback(watch.close)
        if uploader is not None:
            held.callback(uploader.close)
            uploader.start()
        upkeep = Upkeep(
            writer,
            target(begun.metadata),
            keeping,
            members,
            begun.opened,
            watch,
            types and types.types,
            uploader,
        )
        held.callback(upkeep.close)
        source = Source(
            parameters, slot, options,
            compare=lambda connection, position: check_resent(
                connection, slot, writer.directory, position
            ),
        )  # fmt: skip
        if snapshot == "only":
            if begun.opened is None:
                first_connection(lambda: _check(source, writer, stop), retry_for, stop)
            return _copy_only(writer, upkeep, stop, progress)
        started = first_connection(lambda: _start(source, writer, stop), retry_for, stop)
        # Where the server begins before the directory's end, nothing beyond is acknowledged until
        # the stream has come there: a PREPARE in between has its end behind it.
        receiver = Receiver(started.connection, started.confirmed, silence_timeout)
        link = Link(
            receiver, started.protocol, source, silence_timeout=silence_timeout, retry_for=retry_for
        )
        held.callback(link.close)
        unknown = unknown_prepared or ("empty" if writer.made_slot else "error")
        landing = Landing(link, writer, upkeep, max_memory, max_delay, unknown, progress)
        return landing.run(until_lsn, stop)


def _start(source: Source, writer: SegmentWriter, stop: threading.Event | None) -> Started:
    """Begin the stream where the directory ends."""
    return unless_stopped(
        lambda: source.start(writer.position, writer.timeline or None),
        lambda made: made.connection.close(),
        stop,
    )


def _check(source: Source, writer: SegmentWriter, stop: threading.Event | None) -> None:
    """Refuse a slot that can't go on where the directory ends."""

    def look() -> bool:
        source.check(writer.position, writer.timeline or None)
        return True

    unless_stopped(look, lambda _: None, stop)


def _copy_only(
    writer: SegmentWriter,
    upkeep: Upkeep,
    stop: threading.Event | None,
    progress: Callable[[CaptureProgress], None] | None,
) -> CaptureProgress:
    """Wait for the copies, without a stream."""

    def now() -> CaptureProgress:
        end = writer.position
        return CaptureProgress(
            0, 0, 0, end, end, end, connected=True, waiting_tables=upkeep.waiting,
            copying=upkeep.progress, uploaded_lsn=upkeep.uploaded_lsn,
        )  # fmt: skip

    def tell() -> None:
        if progress is not None:
            progress(now())

    upkeep.wait(stop, tell)
    upkeep.finish(stop, tell)
    return now()


def check_combined(
    *,
    directory: str | os.PathLike[str],
    upload: object,
    upload_endpoint: object,
    upload_keep: object,
    silent_after: object,
    give_up: object,
) -> UploadOptions | None:
    """Refuse arguments of `capture` that have no sense, alone or together, before anything is made.

    Returns
    -------
    UploadOptions or None
        Where the directory is to be copied to.

    Raises
    ------
    PgOutputError
        The directory is none; what is said of a copy can't be; or `give_up` has no time after which
        it holds.
    TypeError
        An argument is of another type.
    """
    _check_directory(os.fspath(directory))
    if give_up and silent_after is None:
        raise PgOutputError(
            "give_up=True needs silent_after=, the seconds after which a consumer that has not "
            "moved is removed"
        )
    return upload_options(upload, upload_endpoint, upload_keep)


def _check_directory(directory: str) -> None:
    """Refuse a directory that is none.

    Raises
    ------
    PgOutputError
        It is empty, or a URL.
    """
    if not directory:
        raise PgOutputError("directory= is empty; '.' is the current directory")
    if _URL.match(directory):
        scheme = directory.partition(":")[0]
        raise PgOutputError(
            f"the directory is a URL of {scheme}; a capture writes to a local disk: give a local "
            f"directory, and for a copy in object storage upload='s3://bucket/prefix'"
        )


def _check_arguments(
    until_lsn: object,
    progress: object,
    stop: object,
    **arguments: tuple[object, type | tuple[type, ...], str],
) -> None:
    """Refuse arguments of other types before anything is made.

    Raises
    ------
    PgOutputError
        `until_lsn` is out of an LSN's range.
    TypeError
        An argument is of another type. In `arguments`, each has its value, the types that it may be
        of, and what errors call these.
    """
    if until_lsn is not None:
        what = "an int, as pgoutput_fast.parse_lsn makes it of '16/B374D848'"
        arguments["until_lsn"] = (until_lsn, int, what)
    for name, (value, types, what) in arguments.items():
        # In Python a bool is an int too, but none is meant here.
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    if isinstance(until_lsn, int):
        format_lsn(until_lsn)  # refuses what is out of range
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, not {type(progress).__name__}")
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise TypeError(f"stop must be a threading.Event, not {type(stop).__name__}")
