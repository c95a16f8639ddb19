"""The folders of a change log, and the names of files that are this package's in each of them.

Nothing else decides which files of a change log may be deleted.
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
"""While a capture makes its slot, this file names it."""
UPLOAD_NAME = "upload.json"
"""The file that names the copy, and the object that says which directory it is of."""
DOWNLOAD_NAME = "download.json"
"""The file that says that a directory was downloaded, and from where."""
SEEN_NAME = "seen.json"

_SEGMENT = r"([0-9A-F]{16})-([0-9A-F]{16})-([0-9]{5})-of-([0-9]{5})\.arrow"
LAYOUTS_NAME = "layouts.txt"
"""The file that gathers which tables each segment has changes of. It can be made anew."""

_JSON = r"(?:position|begin|slot|upload|download)\.json|layouts\.txt"

SEGMENTS = Folder("", f"{_SEGMENT}|{_JSON}", r"(?P<part>[0-9]{5})\.arrow")
"""The directory itself. While a segment is written, its parts are only numbered."""
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
"""PREPARE's LSN and xid; and where it was committed or rolled back, once that came."""
REQUESTS = Folder("requests", r"([0-9]{1,10})\.json")
CONSUMERS = Folder("consumers", r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,62})\.json")

FOLDERS = (SEGMENTS, TABLES, SNAPSHOTS, HISTORY, PREPARED, REQUESTS, CONSUMERS)

# What else may be there: locks of consumers, and what file systems make.
_BESIDE = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}\.lock|lost\+found", re.ASCII)
_AGE = 3600.0  # seconds after which nobody writes to a temporary file any more
_NAMED = 3  # the most names that a report lists


def owner_of(path: str) -> Folder | None:
    """The folder that has a file, by its path in a change log; None if it is not this package's."""
    folder, _, name = path.rpartition("/")
    return next((one for one in FOLDERS if one.name == folder and one.match(name)), None)


def delete_unfinished(directory: Path) -> None:
    """Delete what processes have left that were ended while they wrote; the caller has the lock.

    Other processes write requests and consumers, so that such a file may be another one's.

    Raises
    ------
    PgOutputError
        A folder is a symbolic link.
    OSError
        The disk refuses.
    """
    for folder in FOLDERS:
        folder.delete_unfinished(directory, _AGE if folder in (REQUESTS, CONSUMERS) else 0.0)


def others_in(folder: Folder, directory: Path) -> list[str]:
    """The names in a folder that are not this package's.

    Raises
    ------
    PgOutputError
        The folder is a symbolic link.
    OSError
        The disk refuses.
    """
    folders = {one.name for one in FOLDERS} if folder is SEGMENTS else {""}
    return [
        name
        for name in folder.listed(directory)
        if not (name in folders or folder.is_own(name) or _BESIDE.fullmatch(name))
    ]


def report_others(directory: Path) -> None:
    """Log the files in a change log that are not this package's, and are left alone.

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
                "%s has %d files that are not a capture's, and they are left alone: %s",
                folder.path(directory), len(others), shown + ", …" * (len(others) > _NAMED),
            )  # fmt: skip
