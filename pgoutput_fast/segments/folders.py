"""The folders of a change log, and the names of this package's files in each folder.

This package deletes no file of a change log whose name does not match the patterns here.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from .._disk import Folder
from ..errors import PgOutputError, printable

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

POSITION_NAME = "position.json"
BEGIN_NAME = "begin.json"
SLOT_NAME = "slot.json"
"""Names the slot while a capture creates it."""
UPLOAD_NAME = "upload.json"
"""In the directory: names its remote copy. In the remote copy: names the directory."""
DOWNLOAD_NAME = "download.json"
"""Marks a directory as downloaded, and says from where."""
SEEN_NAME = "seen.json"

_SEGMENT = r"([0-9A-F]{16})-([0-9A-F]{16})-([0-9]{5})-of-([0-9]{5})\.arrow"
LAYOUTS_NAME = "layouts.txt"
"""Lists the tables that each segment has changes of: a cache that can be rebuilt."""

_JSON = r"(?:position|begin|slot|upload|download)\.json|layouts\.txt"

SEGMENTS = Folder("", f"{_SEGMENT}|{_JSON}", r"(?P<part>[0-9]{5})\.arrow")
"""The directory itself. The temporary name of a part is only its number."""
TABLES = Folder(
    "tables",
    r"([0-9A-F]{8})-([0-9]{5})-(first|again)-(waiting|snapshot|gone)-([0-9A-F]{16})\.json",
)
SNAPSHOTS = Folder("snapshots", r"([0-9A-F]{8})-([0-9]{5})-([0-9]{8})\.arrow")
HISTORY = Folder(
    "history",
    r"(?P<lower>[0-9A-F]{16})-(?P<start>[0-9A-F]{16})\.json|(?P<ddl>[0-9A-F]{16})\.ddl\.json"
    r"|seen\.json",
)
PREPARED = Folder("prepared", r"([0-9A-F]{16})-([0-9A-F]{8})(?:-([0-9A-F]{16}))?\.arrow")
"""LSN and xid of the PREPARE; then the end LSN of its commit or rollback, once that arrived."""
REQUESTS = Folder("requests", r"([0-9]{1,10})\.json")
CONSUMERS = Folder("consumers", r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,62})\.json")

FOLDERS = (SEGMENTS, TABLES, SNAPSHOTS, HISTORY, PREPARED, REQUESTS, CONSUMERS)

# Other files to expect without a warning: locks of consumers, and what file systems create.
_BESIDE = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}\.lock|lost\+found", re.ASCII)
_AGE = 3600.0  # seconds; an older temporary file has no writer any more
_NAMED = 3  # the most names in a warning


def owner_of(path: str) -> Folder | None:
    """Return the folder of a file, by its path in the change log; None for a foreign file."""
    folder, _, name = path.rpartition("/")
    return next(
        (subfolder for subfolder in FOLDERS if subfolder.name == folder and subfolder.match(name)),
        None,
    )


def delete_unfinished(directory: Path) -> None:
    """Delete the temporary files of killed processes. The caller holds the directory's lock.

    Processes without the lock write requests and consumers. Therefore a temporary file in these two
    folders is deleted only after an hour.

    Raises
    ------
    PgOutputError
        A folder is a symbolic link.
    OSError
        A file can't be deleted.
    """
    for folder in FOLDERS:
        folder.delete_unfinished(directory, _AGE if folder in (REQUESTS, CONSUMERS) else 0.0)


def others_in(folder: Folder, directory: Path) -> list[str]:
    """Return the names of the foreign files in a folder: those that this package did not write.

    Raises
    ------
    PgOutputError
        The folder is a symbolic link.
    OSError
        The folder can't be read.
    """
    folders = {subfolder.name for subfolder in FOLDERS} if folder is SEGMENTS else {""}
    return [
        name
        for name in folder.listed(directory)
        if not (name in folders or folder.is_own(name) or _BESIDE.fullmatch(name))
    ]


def report_others(directory: Path) -> None:
    """Log a warning about foreign files in a change log. They are never deleted.

    Raises
    ------
    PgOutputError
        A folder is a symbolic link, or can't be read.
    """
    for folder in FOLDERS:
        try:
            others = others_in(folder, directory)
        except OSError as error:
            where = folder.path(directory)
            raise PgOutputError(
                f"can't read {where}: {error.strerror}", code="io_failed", path=str(where)
            ) from error
        if others:
            shown = ", ".join(map(printable, others[:_NAMED]))
            _log.warning(
                "%s has %d files that no capture wrote; they are ignored: %s",
                folder.path(directory), len(others), shown + ", …" * (len(others) > _NAMED),
            )  # fmt: skip
