"""Begin a capture: check its slot and its directory against each other, make the slot if wanted."""

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
    """A file that says which slot is being made for a directory.

    A process that is killed just after it has made the slot leaves both, and the next one knows by
    the file that the slot is its own.
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
        """Whether the slot is the one that was to be made."""
        try:
            found: object = json.loads(read_json_file(self._path))
        except FileNotFoundError:
            return False
        except (OSError, *MALFORMED) as error:
            raise unreadable(self._path, error, "which names the slot to be made") from error
        return found == self._fields

    def give_up(self) -> None:
        """The slot was refused, or is dropped: leave nothing behind."""
        self.remove()
        if self._is_new_directory:
            with contextlib.suppress(OSError):  # another program has written into it
                self._path.parent.rmdir()

    def remove(self) -> None:
        """The directory has begun with the slot."""
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
    """A directory to which a capture can write.

    Attributes
    ----------
    writer : SegmentWriter
    metadata : SegmentMetadata
        That of the session.
    opened : ServerSnapshot or None
        What `open_first` gave, if the slot was made here.
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
    """Check the slot and the directory against each other; make the slot if that is wanted.

    If a slot is made here, `open_first` is called with it before the directory has begun, while the
    snapshot of the slot's beginning is there.

    Raises
    ------
    PgOutputError
        As of `capture`. Where the slot was made here, it is dropped again.
    """
    with contextlib.ExitStack() as held:
        connection = unless_stopped(
            lambda: ReplicationConnection(parameters), ReplicationConnection.close, stop
        )
        held.enter_context(connection)
        connection.check_publications(publications)
        state = connection.slot(slot)
        marked = state is not None and state.two_phase
        negotiated = negotiate(options, publications, connection.server_version, marked=marked)
        intention = _Intention(directory, connection, slot)
        is_own = state is not None and not has_begun(directory) and intention.is_there()
        if not is_own:
            check_beginning(state, slot, directory, adopt_slot=options.adopt_slot)
            state = _once_unused(connection, state, directory)
        lock = made = opened = None
        if state is not None:
            confirmed = state.confirmed_flush_lsn or 0
        elif options.create_slot:
            lock = claim_directory(directory, "capture", "segments")
            held.callback(os.close, lock)
            check_beginning(None, slot, directory, adopt_slot=options.adopt_slot)
            two_phase = bool(options.two_phase)
            made = _make_slot(
                connection, slot, intention, stop, two_phase=two_phase,
                snapshot=open_first is not None,
            )  # fmt: skip
            confirmed = made.lsn
        else:
            raise missing_slot(slot)
        # What lands has the form of version 1, whichever way it came.
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
            if made is not None and open_first is not None:
                opened = open_first(made, metadata)
                held.callback(opened.close)
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
            if state is None:  # the slot was made here, and would keep the server's log for ever
                connection.drop_slot(slot)
                intention.give_up()
            raise
        intention.remove()
        _adopt_download(directory)
        if opened is not None:
            held.pop_all()
            connection.close()
            if lock is not None:
                os.close(lock)
        return CaptureStart(writer, metadata, opened)


def _once_unused(
    connection: ReplicationConnection, state: SlotState | None, directory: Path
) -> SlotState | None:
    """The slot with which a new directory is to begin, once nobody reads it.

    This comes before anything is written: a slot that is refused later would leave that behind.

    Raises
    ------
    RetryableError
        It is in use.
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
    """Make the slot.

    If another program has made the slot meanwhile, this fails, as that slot does not belong to this
    directory.
    """
    intention.write()
    try:
        return connection.make_slot(slot, two_phase=two_phase, snapshot=snapshot, stop=stop)
    except PgOutputError as error:
        # Where the connection was lost, the server may have made it.
        if not isinstance(error, RetryableError):
            intention.give_up()
        raise


def _check_empty(directory: Path) -> None:
    """Refuse a new directory that holds something else, such as an export.

    Raises
    ------
    PgOutputError
        There are other things in it, or it can't be read.
    """
    try:
        found = others_in(SEGMENTS, directory)
    except OSError as error:
        raise PgOutputError(
            f"can't read {directory}: {error.strerror}", code="io_failed", path=str(directory)
        ) from error
    others = [name for name in found if not name.startswith(".")]
    if others:
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise PgOutputError(
            f"{directory} has other things in it ({shown}), and no capture has begun there",
            code="not_ours",
            path=str(directory),
            hint="Give a new or an empty directory",
        )


def _check_download(directory: Path, *, adopt_slot: bool) -> None:
    """Refuse a directory that was downloaded, unless it takes the original's place.

    Raises
    ------
    PgOutputError
        It was downloaded.
    """
    url = downloaded_from(directory)
    if url is None:
        return
    if not adopt_slot:
        raise PgOutputError(
            f"{directory} is a copy that was downloaded from {url}, and what a capture brings here "
            f"the original would lack",
            code="not_ours", path=str(directory),
            hint=("Go on in that. If it is lost for good, ", Argument("adopt_slot", True),
                  " has this one take its place, if the slot is not beyond its end"),
        )  # fmt: skip
    if not (directory / POSITION_NAME).exists():
        raise PgOutputError(
            f"{directory} was not downloaded from {url} to the end: download it anew into an empty "
            f"directory",
            code="incomplete",
            path=str(directory),
        )


def _adopt_download(directory: Path) -> None:
    """The directory goes on with the slot, so that it is an original."""
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
    begun = has_begun(directory)
    if begun:
        _check_download(Path(directory), adopt_slot=adopt_slot)
    else:
        _check_empty(Path(directory))
    if state is not None and not adopt_slot and not begun:
        raise PgOutputError(
            f"slot {slot!r} is there already, and no capture has begun in {os.fspath(directory)}",
            code="not_ours",
            path=os.fspath(directory),
            hint=(
                "Give the directory that has what the slot brought so far, or, if there is none, ",
                Argument("adopt_slot", True),
                (f" to begin where the slot stands, {format_lsn(state.confirmed_flush_lsn or 0)}"),
            ),
        )
    if state is None and begun:
        metadata = metadata_of(Path(directory))
        begun_with = slot if metadata is None else metadata.slot
        raise PgOutputError(
            f"the server has no slot {slot!r}, and a capture has begun in {os.fspath(directory)} "
            f"with slot {begun_with!r}",
            code="no_slot",
            path=os.fspath(directory),
            parameter="slot",
            hint=(
                *(() if begun_with == slot else ("Give ", Argument("slot", begun_with), ". ")),
                (
                    "If it was dropped, begin with a new slot and an empty directory, and copy the "
                    "tables anew, as a slot that is made now brings nothing of what was committed "
                    "since this one's end"
                ),
            ),
        )
