"""Write files that a crash leaves whole, and let one writer at a time into a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

from .errors import PgOutputError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk.

    Raises
    ------
    OSError
        The disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(
    path: Path, parts: Iterable[str], temporary: Path | None = None, *, replaces: bool = True
) -> None:
    """Write a text file so that it is there whole or not at all, whatever ends the process.

    It is on disk when this returns.

    Parameters
    ----------
    path : pathlib.Path
    parts : iterable of str
        The parts of the text, in their order.
    temporary : pathlib.Path, optional
        The name of the file until it is whole, in the same file system. By default it is the file's
        name with a dot before and ``.tmp`` behind it.
    replaces : bool
        Whether it replaces a file of its name.

    Raises
    ------
    FileExistsError
        There is one that it does not replace.
    OSError
        The disk refuses. The file is as it was before.
    """
    if temporary is None:
        temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            temporary.rename(path)
        else:
            path.hardlink_to(temporary)
            temporary.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def claim_directory(directory: Path, writer: str, contents: str, name: str | None = None) -> int:
    """Make a directory if it is not there, and keep other writers out of it.

    Parameters
    ----------
    directory : pathlib.Path
    writer, contents : str
        Words for errors: what writes into the directory, such as "capture", and what it holds, such
        as "segments".
    name : str, optional
        What errors call what is written, if the directory is only there to be claimed.

    Returns
    -------
    int
        A file descriptor that holds the lock. The lock ends when it is closed, or with the process.

    Raises
    ------
    PgOutputError
        Another writer has the directory, or the operating system refuses.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fsync_path(directory.parent)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PgOutputError(f"can't use {directory} for {contents}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            if name is not None:
                raise PgOutputError(
                    f"another {writer} writes {name}: wait for its end or stop it"
                ) from None
            raise PgOutputError(
                f"another {writer} writes into {directory}; wait for its end or stop it, or give "
                f"another directory"
            ) from None
        raise PgOutputError(
            f"can't lock {directory} ({error.strerror}); {contents} need a local directory"
        ) from error
    if not _is_at(descriptor, directory):
        # Another writer was refused meanwhile, and deleted what it had made.
        os.close(descriptor)
        return claim_directory(directory, writer, contents, name)
    return descriptor


def _is_at(descriptor: int, directory: Path) -> bool:
    """Whether an open directory is the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    except FileNotFoundError:
        return False
