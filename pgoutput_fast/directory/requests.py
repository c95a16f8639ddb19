"""Orders to a capture to copy a table again, from processes that do not hold its directory."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from .._disk import fsync_path, write_whole
from ..errors import PgOutputError

if TYPE_CHECKING:
    from pathlib import Path

DIRECTORY_NAME = "requests"
_NAME = re.compile(r"([0-9]{1,10})\.json", re.ASCII)


def request_copy(directory: Path, relation_id: int) -> None:
    """Ask the capture of a directory to copy a table again.

    Raises
    ------
    PgOutputError
        The disk refuses.
    """
    path = directory / DIRECTORY_NAME
    try:
        if not path.exists():
            path.mkdir(exist_ok=True)
            fsync_path(directory)
        write_whole(path / f"{relation_id}.json", [json.dumps({})])
    except OSError as error:
        raise PgOutputError(f"can't write into {path}: {error.strerror or error}") from error


def requested(directory: Path) -> list[int]:
    """The relation ids of tables that are to be copied again.

    Raises
    ------
    OSError
        The disk refuses.
    """
    path = directory / DIRECTORY_NAME
    if not path.exists():
        return []
    names = map(_NAME.fullmatch, (one.name for one in path.iterdir()))
    return sorted(int(match[1]) for match in names if match is not None)


def forget_request(directory: Path, relation_id: int) -> None:
    """A request was answered: delete it.

    Raises
    ------
    OSError
        The disk refuses.
    """
    path = directory / DIRECTORY_NAME
    (path / f"{relation_id}.json").unlink(missing_ok=True)
    fsync_path(path)
