"""Begin a capture: check that its slot and directory belong together, or make both."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .._disk import claim_directory, fsync_path, read_json_file, write_whole
from .._forms import MALFORMED, unreadable
from ..changelog.uploading import downloaded_from
from ..errors import Argument, PgOutputError, RetryableError
from ..lsn import format_lsn
from ..segments import SegmentMetadata, SegmentWriter
from ..segments.folders import (
    DOWNLOAD_NAME,
    POSITION_NAME,
    SEGMENTS,
    SLOT_NAME,
    others_in,
)
from ..segments.listing import has_begun, metadata_of
from .attempt import unless_stopped
from .negotiation import negotiate
from .source import missing_slot
from .walsender import CreatedSlot, ReplicationConnection, SlotState

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from ..capture_options import CaptureOptions
    from ..connections import ConnectionParameters
    from .snapshot import ServerSnapshot

_log = logging.getLogger(__name__)


class _Intention:
    """A file in a new directory that names the slot which a capture is making for it.

    A process may be killed just after it has made the slot. The next process then finds the slot
    and this file, and knows by the file that the slot belongs to the directory.
    """

    def __init__(self, directory: Path, connection: ReplicationConnection, slot: str) -> None:
        self._path = directory / SLOT_NAME
        self._is_new_directory = not directory.exists()
        self._fields = {
            "system_identifier": connection.system_identifier,
            "database": connection.database,
            "slot": slot,
        }

    def write(self) -> None:
        try:
            write_whole(self._path, [json.dumps(self._fields)])
        except OSError as error:
            raise PgOutputError(
                f"can't write {self._path}: {error.strerror}",
                code="io_failed",
                path=str(self._path),
            ) from error

    def is_there(self) -> bool:
        """Return whether the file is there and names this slot."""
        try:
            fields: object = json.loads(read_json_file(self._path))
        except FileNotFoundError:
            return False
        except (OSError, *MALFORMED) as error:
            raise unreadable(self._path, error, "which names the slot to be made") from error
        return fields == self._fields

    def give_up(self) -> None:
        """Remove the file, and a new directory: the slot was refused, or is dropped again."""
        self.remove()
        if self._is_new_directory:
            with contextlib.suppress(OSError):  # another program may have written into it
                self._path.parent.rmdir()

    def remove(self) -> None:
        """Delete the file: the change log has begun, and its metadata name the slot."""
        try:
            SEGMENTS.delete(self._path.parent, SLOT_NAME)
            fsync_path(self._path.parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise PgOutputError(
                f"can't delete {self._path}: {error.strerror}",
                code="io_failed",
                path=str(self._path),
            ) from error


class CaptureStart(NamedTuple):
    """A change log to which a capture can write.

    Attributes
    ----------
    writer : SegmentWriter
    metadata : SegmentMetadata
        The metadata of this session.
    opened : ServerSnapshot or None
        What `open_first` returned, if `begin_directory` made the slot.
    """

    writer: SegmentWriter
    metadata: SegmentMetadata
    opened: ServerSnapshot | None


def begin_directory(
    parameters: ConnectionParameters,
    slot: str,
    publications: Sequence[str],
    options: CaptureOptions,
    directory: Path,
    *,
    open_first: Callable[[CreatedSlot, SegmentMetadata], ServerSnapshot] | None,
    stop: threading.Event | None,
) -> CaptureStart:
    """Check that the slot and the directory belong together; make the slot if the options ask.

    If this function makes the slot, it calls `open_first` with the slot before the change log
    begins, while the slot's exported snapshot still exists.

    Raises
    ------
    PgOutputError
        See `capture`. If this function made the slot, it has dropped the slot again.
    """
    with contextlib.ExitStack() as stack:
        connection = unless_stopped(
            lambda: ReplicationConnection(parameters), ReplicationConnection.close, stop
        )
        stack.enter_context(connection)
        connection.check_publications(publications)
        state = connection.slot(slot)
        marked = state is not None and state.two_phase
        negotiated = negotiate(options, publications, connection.server_version, marked=marked)
        intention = _Intention(directory, connection, slot)
        is_own = state is not None and not has_begun(directory) and intention.is_there()
        if not is_own:
            check_beginning(state, slot, directory, adopt_slot=options.adopt_slot)
            state = _once_unused(connection, state, directory)
        lock = created_slot = opened = None
        if state is not None:
            confirmed = state.confirmed_flush_lsn or 0
        elif options.create_slot:
            lock = claim_directory(directory, "capture", "segments")
            stack.callback(os.close, lock)
            check_beginning(None, slot, directory, adopt_slot=options.adopt_slot)
            two_phase = bool(options.two_phase)
            created_slot = _make_slot(
                connection, slot, intention, stop, two_phase=two_phase,
                snapshot=open_first is not None,
            )  # fmt: skip
            confirmed = created_slot.lsn
        else:
            raise missing_slot(slot)
        # Segments have frames in the form of protocol version 1, whichever version the stream has.
        said = {**negotiated.options, "proto_version": "1"}
        said.pop("streaming", None)
        metadata = SegmentMetadata(
            system_identifier=connection.system_identifier,
            database=connection.database,
            slot=slot,
            publications=tuple(publications),
            server_version=connection.server_version,
            encoding=connection.settings["client_encoding"],
            settings=connection.settings,
            options=said,
            timeline=connection.timeline,
        )
        try:
            if created_slot is not None and open_first is not None:
                opened = open_first(created_slot, metadata)
                stack.callback(opened.close)
            writer = SegmentWriter(
                directory,
                metadata,
                confirmed_flush_lsn=confirmed,
                made_slot=state is None or is_own,
                lock=lock,
                segment_bytes=options.segment_bytes,
                compression=options.compression,
            )
        except BaseException:
            if state is None:  # made above; without a reader it would keep log for ever
                connection.drop_slot(slot)
                intention.give_up()
            raise
        intention.remove()
        _adopt_download(directory)
        if opened is not None:
            stack.pop_all()
            connection.close()
            if lock is not None:
                os.close(lock)
        return CaptureStart(writer, metadata, opened)


def _once_unused(
    connection: ReplicationConnection, state: SlotState | None, directory: Path
) -> SlotState | None:
    """For a new directory, wait until nobody reads the existing slot, and return its state.

    This comes before anything is written, so that a slot in use leaves no files behind.

    Raises
    ------
    RetryableError
        The slot is still in use.
    """
    if state is None or has_begun(directory):
        return state
    return connection.unused_slot(state.name)


def _make_slot(
    connection: ReplicationConnection,
    slot: str,
    intention: _Intention,
    stop: threading.Event | None,
    *,
    two_phase: bool,
    snapshot: bool,
) -> CreatedSlot:
    """Make the slot, and write before that which slot it will be.

    If another program has made a slot of this name meanwhile, this fails, as that slot does not
    belong to this directory.
    """
    intention.write()
    try:
        return connection.make_slot(slot, two_phase=two_phase, snapshot=snapshot, stop=stop)
    except PgOutputError as error:
        # If the connection was lost, the server may have made the slot: keep the file.
        if not isinstance(error, RetryableError):
            intention.give_up()
        raise


def _check_empty(directory: Path) -> None:
    """Refuse a new directory that has other files in it, such as an export.

    Raises
    ------
    PgOutputError
        The directory has other files in it, or can't be read.
    """
    try:
        names = others_in(SEGMENTS, directory)
    except OSError as error:
        raise PgOutputError(
            f"can't read {directory}: {error.strerror}", code="io_failed", path=str(directory)
        ) from error
    others = [name for name in names if not name.startswith(".")]
    if others:
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise PgOutputError(
            f"{directory} has other files in it ({shown}), and no change log",
            code="not_ours",
            path=str(directory),
            hint="Give an empty or a new directory",
        )


def _check_download(directory: Path, *, adopt_slot: bool) -> None:
    """Refuse a downloaded directory, unless `adopt_slot` says that it replaces the original.

    Raises
    ------
    PgOutputError
        The directory was downloaded, and `adopt_slot` is false or the download is not complete.
    """
    url = downloaded_from(directory)
    if url is None:
        return
    if not adopt_slot:
        raise PgOutputError(
            f"{directory} is a copy that was downloaded from {url}: the original would lack the "
            f"changes that are captured here",
            code="not_ours", path=str(directory),
            hint=("Continue in the original. If it is lost for good, give ",
                  Argument("adopt_slot", True),
                  " to continue in the copy, unless the slot is beyond the copy's end"),
        )  # fmt: skip
    if not (directory / POSITION_NAME).exists():
        raise PgOutputError(
            f"the download of {directory} from {url} is not complete",
            code="incomplete",
            path=str(directory),
            hint="Download it again into an empty directory",
        )


def _adopt_download(directory: Path) -> None:
    """Delete the file that names a download: the directory now continues with the slot."""
    path = directory / DOWNLOAD_NAME
    try:
        SEGMENTS.delete(directory, DOWNLOAD_NAME)
        fsync_path(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PgOutputError(
            f"can't delete {path}: {error.strerror}", code="io_failed", path=str(path)
        ) from error


def check_beginning(
    state: SlotState | None, slot: str, directory: str | os.PathLike[str], *, adopt_slot: bool
) -> None:
    """Refuse an existing slot for a new directory, and a directory whose slot is gone.

    Raises
    ------
    PgOutputError
        The slot exists and the directory is new, or the slot does not exist and the directory is
        not new; or the directory was downloaded.
    """
    has_log = has_begun(directory)
    if has_log:
        _check_download(Path(directory), adopt_slot=adopt_slot)
    else:
        _check_empty(Path(directory))
    if state is not None and not adopt_slot and not has_log:
        raise PgOutputError(
            f"slot {slot!r} exists already, but {os.fspath(directory)} has no change log",
            code="not_ours",
            path=os.fspath(directory),
            hint=(
                "For another target, give another ",
                Argument("slot"),
                ". To continue the slot's change log, give its directory as ",
                Argument("directory"),
                ". If no change log of the slot is in use, give ",
                Argument("adopt_slot", True),
                f" to begin at the slot's position {format_lsn(state.confirmed_flush_lsn or 0)}",
            ),
        )
    if state is None and has_log:
        metadata = metadata_of(Path(directory))
        captured_slot = slot if metadata is None else metadata.slot
        raise PgOutputError(
            f"the server has no slot {slot!r}, and {os.fspath(directory)} was captured from slot "
            f"{captured_slot!r}",
            code="no_slot",
            path=os.fspath(directory),
            parameter="slot",
            hint=(
                *(
                    ()
                    if captured_slot == slot
                    else ("Give ", Argument("slot", captured_slot), ". ")
                ),
                (
                    f"If slot {captured_slot!r} was dropped, changes are lost. Move the change log "
                    "away, and start again with a new slot and new snapshots of all tables"
                ),
            ),
        )
