"""Read, write and delete files: written whole or not at all, private, one writer a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .errors import PgOutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MOST_JSON_BYTES = 256 << 20
"""The largest JSON file that is read. The catalogue of 100,000 tables takes a quarter of it."""

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk.

    Raises
    ------
    OSError
        The operating system reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_file(path: Path) -> bytes:
    """Read a JSON file safely: a pipe or a device in its place neither blocks nor fills memory.

    Raises
    ------
    OSError
        The path is no regular file, the file is larger than `MOST_JSON_BYTES`, or reading fails.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(MOST_JSON_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MOST_JSON_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_JSON_BYTES:,} bytes")
    return content


def create_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Create a new file to write and read bytes; a symbolic link is not followed.

    Raises
    ------
    OSError
        The name exists already, or the operating system reports another error.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w+b", buffering)


def temporary_path(path: Path) -> Path:
    """Return a random name beside `path` for a file that is not whole yet."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def becoming(path: Path, within: Path | None = None, *, replaces: bool = True) -> Iterator[Path]:
    """Provide a temporary name for a file; rename the file at the end, or delete it on an error.

    Parameters and exceptions are those of `write_whole`.

    Yields
    ------
    pathlib.Path
        The temporary name, under which the block creates a file with `create_file`.
    """
    temporary = temporary_path(path if within is None else within / path.name)
    try:
        yield temporary
        if replaces:
            temporary.rename(path)
        else:
            path.hardlink_to(temporary)
            temporary.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(
    path: Path, parts: Iterable[str], within: Path | None = None, *, replaces: bool = True
) -> None:
    """Write a text file so that it is there whole or not at all, however the process ends.

    The file is on disk when this function returns.

    Parameters
    ----------
    path : pathlib.Path
    parts : iterable of str
        The parts of the text, in their order.
    within : pathlib.Path, optional
        A directory in the same file system, where the file is written first. The default is the
        directory of `path`.
    replaces : bool
        Whether to replace a file of that name. A symbolic link is replaced, not followed.

    Raises
    ------
    FileExistsError
        The name exists, and `replaces` is false.
    OSError
        The operating system reports an error. An older file of that name is unchanged.
    """
    with (
        becoming(path, within, replaces=replaces) as temporary,
        create_file(temporary) as file,
    ):
        for part in parts:
            file.write(part.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)


class Folder:
    """A folder in which this package deletes only its own files, which it knows by their names.

    All other files in the folder are left alone, such as ``.DS_Store`` or the files of a network
    file system.

    Parameters
    ----------
    name : str
        The folder's name in a directory; empty for the directory itself.
    pattern : str
        A regular expression that matches the whole name of each file of this package.
    unfinished : str, optional
        The same for the names of files that are not whole yet, if there are further ones.

    Attributes
    ----------
    name : str
    """

    def __init__(self, name: str, pattern: str, unfinished: str | None = None) -> None:
        self.name = name
        self._pattern = re.compile(pattern)
        more = "" if unfinished is None else f"|{unfinished}"
        self._unfinished = re.compile(f"(?:{pattern}){more}")

    def match(self, name: str) -> re.Match[str] | None:
        """Match the name of a whole file; None if the file is not this package's."""
        return self._pattern.fullmatch(name)

    def unfinished(self, name: str) -> re.Match[str] | None:
        """Match the final name of a temporary file; None if the file is no such file."""
        temporary = _TEMPORARY.fullmatch(name)
        return temporary and self._unfinished.fullmatch(temporary[1])

    def is_own(self, name: str) -> bool:
        """Return whether a file of this name belongs to this package."""
        return self.match(name) is not None or self.unfinished(name) is not None

    def path(self, directory: Path) -> Path:
        """Return the folder's path in a directory.

        Raises
        ------
        PgOutputError
            The folder is a symbolic link, so it may contain somebody else's files.
        """
        path = directory / self.name
        if self.name and path.is_symlink():
            raise PgOutputError(
                f"{path} is a symbolic link, and this package only uses a directory there: move "
                f"the directory itself to {path}",
                code="not_ours",
                path=str(path),
            )
        return path

    def make(self, directory: Path) -> Path:
        """Create the folder durably if it does not exist."""
        path = self.path(directory)
        if not path.exists():
            path.mkdir(exist_ok=True)
            fsync_path(directory)
        return path

    def listed(self, directory: Path) -> list[str]:
        """Return all names in the folder, sorted; an empty list if there is no folder."""
        try:
            return sorted(os.listdir(self.path(directory)))  # noqa: PTH208 - names are enough
        except FileNotFoundError:
            return []

    def names(self, directory: Path) -> list[str]:
        """Return the names of this package's whole files, sorted."""
        return [name for name in self.listed(directory) if self.match(name)]

    def delete(self, directory: Path, name: str, *, missing_ok: bool = False) -> None:
        """Delete a file of this package.

        Raises
        ------
        PgOutputError
            A file of this name is not this package's, or the folder is a symbolic link.
        OSError
            The operating system reports an error.
        """
        path = self.path(directory) / name
        if not self.is_own(name):
            raise PgOutputError(
                f"{path} is not of this package, and is not deleted",
                code="not_ours",
                path=str(path),
            )
        path.unlink(missing_ok=missing_ok)

    def delete_unfinished(self, directory: Path, age: float = 0.0) -> None:
        """Delete the files of processes that ended before their files were whole.

        Parameters
        ----------
        directory : pathlib.Path
        age : float
            The least number of seconds since the last write; 0 if nobody else writes.
        """
        for name in self.listed(directory):
            if self.unfinished(name):
                with contextlib.suppress(FileNotFoundError):  # it got its final name just now
                    path = self.path(directory) / name
                    if time.time() - path.lstat().st_mtime >= age:
                        self.delete(directory, name)


def delete_below(top: Path, is_own: Callable[[str], bool]) -> None:
    """Delete this package's files below a folder, and the folders that are empty then.

    Symbolic links are not followed.

    Parameters
    ----------
    top : pathlib.Path
    is_own : callable
        Returns whether a file belongs to this package, by its path below `top`.

    Raises
    ------
    PgOutputError
        The folder is a symbolic link.
    OSError
        The operating system reports an error.
    """
    for path, _, names in os.walk(Folder(top.name, "").path(top.parent), topdown=False):
        for name in names:
            if is_own(os.path.relpath(f"{path}/{name}", top)):
                (Path(path) / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder has other files
            Path(path).rmdir()


def claim_directory(directory: Path, writer: str, contents: str, name: str | None = None) -> int:
    """Create a directory if it does not exist, and keep other writers out of it.

    Parameters
    ----------
    directory : pathlib.Path
    writer, contents : str
        Words for errors: what writes into the directory, such as "capture", and what the directory
        contains, such as "segments".
    name : str, optional
        The name in errors of what is written, if the directory only serves as a lock.

    Returns
    -------
    int
        The file descriptor of the lock. The lock ends when it is closed, or with the process.

    Raises
    ------
    PgOutputError
        Another writer has the directory, or the operating system reports an error.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fsync_path(directory.parent)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PgOutputError(
            f"can't use {name or directory} for {contents}: {error.strerror}",
            code="io_failed",
            path=str(directory),
            hint=f"Make the directory {_nearest(directory)} writable"
            if isinstance(error, PermissionError)
            else (),
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            if name is not None:
                raise PgOutputError(
                    f"another {writer} writes {name}",
                    code="in_use",
                    path=str(directory),
                    hint="Wait for its end, or stop it",
                ) from None
            raise PgOutputError(
                f"another {writer} writes into {directory}",
                code="in_use",
                path=str(directory),
                hint="Wait for its end, stop it, or give another directory",
            ) from None
        raise PgOutputError(
            f"can't lock {directory} ({error.strerror}); {contents} need a local directory",
            code="io_failed",
            path=str(directory),
        ) from error
    if not _is_at(descriptor, directory):
        # Another writer was refused meanwhile, and deleted the directory that it had created.
        os.close(descriptor)
        return claim_directory(directory, writer, contents, name)
    return descriptor


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    for parent in (path, *path.parents):
        # Path.exists raises an error for a parent that may not be searched.
        if os.path.exists(parent):  # noqa: PTH110
            return parent
    return path


def _is_at(descriptor: int, directory: Path) -> bool:
    """Return whether an open directory is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    except FileNotFoundError:
        return False
