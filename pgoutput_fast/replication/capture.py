"""The function `capture`, which turns a slot into a change log and acknowledges what is durable."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..capture_options import CaptureOptions
from ..connections import ConnectionParameters, check_publication_names
from ..errors import Argument, PgOutputError
from ..lsn import check_lsn
from ..options import arguments_of, options_of
from ..segments import SegmentWriter
from ..segments.folders import report_others
from .attempt import unless_stopped
from .beginning import CaptureStart, begin_directory
from .copier import CopyTarget
from .history import HistoryWatch, first_state
from .landing import CaptureProgress, Landing
from .link import Link, first_connection
from .membership import Members, read_members, warn_of_publications
from .receiver import Receiver
from .resent import check_resent
from .server_position import end_of_commits
from .source import Source, Started
from .upkeep import Upkeep, order_first
from .uploader import Uploader

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from ..changelog.schema_history import CatalogRead
    from ..segments import SegmentMetadata
    from .snapshot import ServerSnapshot
    from .walsender import CreatedSlot

# One slash is enough: `Path("s3://bucket")` has become "s3:/bucket".
_URL = re.compile(r"(?:s3[an]?|gs|gcs|abfss?|wasbs?|hdfs|https?|file):/", re.ASCII | re.IGNORECASE)


def capture(
    dsn: str | ConnectionParameters | None = None,
    *,
    slot: str,
    publications: Sequence[str],
    directory: str | os.PathLike[str],
    until_lsn: int | Literal["now"] | None = None,
    progress: Callable[[CaptureProgress], None] | None = None,
    stop: threading.Event | None = None,
    capture_options: CaptureOptions | None = None,
    **keywords: object,
) -> CaptureProgress:
    """Write the changes of a slot to a change log, from where the change log ends.

    The call ends with `until_lsn`, `stop`, Ctrl-C or an error. It reconnects after a lost
    connection. It completes a segment at the first commit after `segment_bytes`, or when the oldest
    commit in the segment is `max_delay` old. However a call ends, even by a kill, the next call
    continues, and no change is lost or written twice.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL. The default is what libpq's environment variables say.
    slot : str
        The replication slot.
    publications : list or tuple of str
        Names of publications, without quotes.
    directory : path
        The change log. The directory is made if it does not exist.
    until_lsn : int or "now"
        Capture exactly what was committed before this LSN, then end. "now" stands for an LSN that
        is greater than all present commits. A transaction counts if its commit record begins before
        the LSN. A non-transactional message counts if its record ends
        at the LSN or before. The slot keeps the rest. Waiting tables get their snapshots before the
        capture ends. If the LSN of a snapshot is later, the capture goes on up to that LSN.
    progress : callable
        Called with a `CaptureProgress` when the stream begins, and after each batch of frames. Also
        called once a second while no frames come, and while the capture writes a large transaction.
    stop : threading.Event
        Set it in another thread to end the capture within some tenths of a second. All whole
        transactions that the capture received are then durable.
    capture_options : CaptureOptions, optional
        How to capture the changes.
    **keywords
        Fields of :class:`CaptureOptions`, which override those of the object. Also parameters of
        libpq by name, which override those of `dsn`.

    Returns
    -------
    CaptureProgress
        The numbers at the end.

    Raises
    ------
    RetryableError
        The slot is in use, the server can't be reached, or the connection was lost. The capture
        got no connection within `retry_for`, or before `stop` was set. Call again to go on.
    PgOutputError
        The server refuses, or there is no such publication or slot. The slot is beyond the end of
        the directory, or exists already while the directory is new. The directory is damaged, or
        belongs to another slot or capture. The server's log is not the one from which the directory
        was written, for example after a restored backup. The disk or the object storage refuses.
        pyarrow or NumPy is not installed. No message has the password.
    TypeError
        An argument has a wrong type. Nothing was made.
    KeyboardInterrupt
        Ctrl-C was pressed. All changes that the capture acknowledged are durable, and the slot has
        the rest. Call again to go on.
    """
    options = options_of(CaptureOptions, capture_options, keywords)
    _check_arguments(until_lsn, progress, stop, directory)
    check_publication_names(publications)
    copies = options.snapshot != "never"
    parameters = ConnectionParameters.of(dsn, keywords, arguments_of(capture, CaptureOptions))
    uploader = None if options.upload is None else Uploader(Path(directory), options)

    def target(metadata: SegmentMetadata) -> CopyTarget:
        return CopyTarget(
            parameters, metadata, Path(directory), options.connections, options.compression
        )

    def open_first(created_slot: CreatedSlot, metadata: SegmentMetadata) -> ServerSnapshot:
        opened = target(metadata).open(None, stop, created_slot)
        order_first(Path(directory), opened)
        return opened

    def begin() -> tuple[Members, CatalogRead | None, int | None, CaptureStart]:
        unless_stopped(lambda: warn_of_publications(parameters, publications), lambda _: None, stop)
        # Read before the slot is made, so that a later change of the publications is noticed.
        members = read_members(parameters, publications) if copies else Members({}, 0)
        types = _first_read(parameters, publications, options, stop)
        end = _end(until_lsn, parameters, stop)  # after the read, which then counts
        return members, types, end, begin_directory(
            parameters, slot, publications, options, Path(directory),
            open_first=open_first if copies else None, stop=stop,
        )  # fmt: skip

    report_others(Path(directory))
    members, types, end, capture_start = first_connection(begin, options.retry_for, stop)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(capture_start.writer)
        if capture_start.opened is not None:
            stack.callback(capture_start.opened.close)
        watch = None
        if options.schema_history:
            watch = HistoryWatch(
                parameters, publications, writer.directory, writer.position,
                messages=options.messages, first=types,
            )  # fmt: skip
            stack.callback(watch.close)
        if uploader is not None:
            stack.callback(uploader.close)
            uploader.start()
        upkeep = Upkeep(
            writer, target(capture_start.metadata), options, members, capture_start.opened, watch,
            types and types.types, uploader,
        )  # fmt: skip
        stack.callback(upkeep.close)
        source = Source(
            parameters, slot, publications, options,
            compare=lambda connection, position: check_resent(
                connection, slot, writer.directory, position
            ),
        )  # fmt: skip
        if options.snapshot == "only":
            if capture_start.opened is None:
                first_connection(lambda: _check(source, writer, stop), options.retry_for, stop)
            return _copy_only(writer, upkeep, stop, progress)
        link = _link(source, writer, options, stop)
        stack.callback(link.close)
        unknown = options.unknown_prepared or ("empty" if writer.made_slot else "error")
        landing = Landing(
            link, writer, upkeep, options.max_memory, options.max_delay, unknown, progress
        )
        return landing.run(end, stop)


def _end(
    until_lsn: int | Literal["now"] | None,
    parameters: ConnectionParameters,
    stop: threading.Event | None,
) -> int | None:
    """Return the LSN at which a capture ends; None if it has no end."""
    if until_lsn != "now":
        return until_lsn
    return unless_stopped(lambda: end_of_commits(parameters), lambda _: None, stop)


def _first_read(
    parameters: ConnectionParameters,
    publications: Sequence[str],
    options: CaptureOptions,
    stop: threading.Event | None,
) -> CatalogRead | None:
    """Read the catalogue for the schema history; None if the capture keeps no history."""
    if not options.schema_history:
        return None
    read = lambda: (first_state(parameters, publications, messages=options.messages),)  # noqa: E731
    (types,) = unless_stopped(read, lambda _: None, stop)
    return types


def _link(
    source: Source, writer: SegmentWriter, options: CaptureOptions, stop: threading.Event | None
) -> Link:
    """Begin the stream at the end of the change log, and make its link."""
    started = first_connection(lambda: _start(source, writer, stop), options.retry_for, stop)
    # With two_phase, the server may begin before the end of the change log. Do not acknowledge more
    # until the stream has reached that end: a transaction may be prepared in between and committed
    # later.
    receiver = Receiver(started.connection, started.confirmed, options.silence_timeout)
    return Link(
        receiver, started.protocol, source, silence_timeout=options.silence_timeout,
        retry_for=options.retry_for,
    )  # fmt: skip


def _start(source: Source, writer: SegmentWriter, stop: threading.Event | None) -> Started:
    """Begin the stream at the end of the change log; give up if `stop` is set."""
    return unless_stopped(
        lambda: source.start(writer.position, writer.timeline or None),
        lambda started: started.connection.close(),
        stop,
    )


def _check(source: Source, writer: SegmentWriter, stop: threading.Event | None) -> None:
    """Refuse a slot that can't go on at the end of the change log."""

    def check() -> bool:
        source.check(writer.position, writer.timeline or None)
        return True

    unless_stopped(check, lambda _: None, stop)


def _copy_only(
    writer: SegmentWriter,
    upkeep: Upkeep,
    stop: threading.Event | None,
    progress: Callable[[CaptureProgress], None] | None,
) -> CaptureProgress:
    """Make the snapshots of the waiting tables, without a stream."""

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


def _check_arguments(
    until_lsn: object, progress: object, stop: object, directory: str | os.PathLike[str]
) -> None:
    """Check the arguments that are not fields of `CaptureOptions`, before anything is made.

    Raises
    ------
    PgOutputError
        The directory is empty or a URL; or `until_lsn` is out of an LSN's range.
    TypeError
        An argument is of another type.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, not {type(directory).__name__}")
    check_local(os.fspath(directory))
    if until_lsn not in (None, "now"):
        check_lsn("until_lsn", until_lsn)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, not {type(progress).__name__}")
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise TypeError(f"stop must be a threading.Event, not {type(stop).__name__}")


def check_local(directory: str) -> None:
    """Refuse an empty path or a URL as the directory of a capture."""
    if not directory:
        raise PgOutputError(
            "it is empty",
            code="bad_option",
            parameter="directory",
            hint="Give '.' for the current directory",
        )
    if match := _URL.match(directory):
        scheme = match[0].partition(":")[0]
        raise PgOutputError(
            f"it is a URL of {scheme}, but a capture writes to a local disk", code="bad_option",
            parameter="directory",
            hint=("Give a local directory. To copy it to object storage, also give ",
                  Argument("upload", "s3://bucket/prefix")),
        )  # fmt: skip
