"""Read, write and delete files: whole or not at all, ours alone, one writer in a directory."""

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
        The disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_file(path: Path) -> bytes:
    """Read a JSON file, whoever has put it there: a pipe or a device neither hangs nor floods.

    Raises
    ------
    OSError
        The path is no regular file, the file has more than `MOST_JSON_BYTES`, or the disk refuses.
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
    """Make a file that is not there, to write and read bytes; a symbolic link is not followed.

    Raises
    ------
    OSError
        There is something of this name, or the disk refuses.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w+b", buffering)


def temporary_path(path: Path) -> Path:
    """Return a name for a file until it is whole, beside `path` and unknown to anybody else."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def becoming(path: Path, within: Path | None = None, *, replaces: bool = True) -> Iterator[Path]:
    """Have a file under a temporary name in the block, then give it its name, or delete it.

    Parameters and exceptions are those of `write_whole`.

    Yields
    ------
    pathlib.Path
        The temporary name, of which the block makes a file by `create_file`.
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
    """Write a text file so that it is there whole or not at all, whatever ends the process.

    It is on disk when this returns.

    Parameters
    ----------
    path : pathlib.Path
    parts : iterable of str
        The parts of the text, in their order.
    within : pathlib.Path, optional
        The directory, in the same file system, that has the file until the file is whole. By
        default it is the file's own.
    replaces : bool
        Whether it replaces a file of its name. A symbolic link is replaced, not followed.

    Raises
    ------
    FileExistsError
        There is one that it does not replace.
    OSError
        The disk refuses. The file is as it was before.
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
    """A folder in which names of one form are this package's; only files of such names are deleted.

    Anything else that is there, such as ``.DS_Store`` or what a network file system makes, is left
    alone.

    Parameters
    ----------
    name : str
        The folder's name in a directory; empty for the directory itself.
    pattern : str
        A regular expression that matches the whole name of each file of this package.
    unfinished : str, optional
        The same for the names that `temporary_path` was given, if there are others.

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
        """Match the name of a whole file; None if it is not this package's."""
        return self._pattern.fullmatch(name)

    def unfinished(self, name: str) -> re.Match[str] | None:
        """Match the name that a temporary file is to get; None if it is no such file."""
        temporary = _TEMPORARY.fullmatch(name)
        return temporary and self._unfinished.fullmatch(temporary[1])

    def is_own(self, name: str) -> bool:
        """Whether a file of this name is this package's."""
        return self.match(name) is not None or self.unfinished(name) is not None

    def path(self, directory: Path) -> Path:
        """The folder in a directory.

        Raises
        ------
        PgOutputError
            It is a symbolic link, so that files of somebody else may be behind it.
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
        """Make the folder durably, if it is not there."""
        path = self.path(directory)
        if not path.exists():
            path.mkdir(exist_ok=True)
            fsync_path(directory)
        return path

    def listed(self, directory: Path) -> list[str]:
        """All names in the folder, sorted; none if it is not there."""
        try:
            return sorted(os.listdir(self.path(directory)))  # noqa: PTH208 - names are enough
        except FileNotFoundError:
            return []

    def names(self, directory: Path) -> list[str]:
        """The names of this package's whole files, sorted."""
        return [name for name in self.listed(directory) if self.match(name)]

    def delete(self, directory: Path, name: str, *, missing_ok: bool = False) -> None:
        """Delete a file of this package.

        Raises
        ------
        PgOutputError
            A file of this name is not this package's, or the folder is a symbolic link.
        OSError
            The disk refuses.
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
        """Delete the files that a process has left which was ended before they were whole.

        Parameters
        ----------
        directory : pathlib.Path
        age : float
            Seconds since the last write to such a file; 0 where nobody else writes.
        """
        for name in self.listed(directory):
            if self.unfinished(name):
                with contextlib.suppress(FileNotFoundError):  # it has got its name
                    path = self.path(directory) / name
                    if time.time() - path.lstat().st_mtime >= age:
                        self.delete(directory, name)


def delete_below(top: Path, is_own: Callable[[str], bool]) -> None:
    """Delete the files of this package below a folder, and the folders that are then empty.

    Symbolic links are not followed.

    Parameters
    ----------
    top : pathlib.Path
    is_own : callable
        Whether a file is this package's, by its path below `top`.

    Raises
    ------
    PgOutputError
        The folder is a symbolic link.
    OSError
        The disk refuses.
    """
    for path, _, names in os.walk(Folder(top.name, "").path(top.parent), topdown=False):
        for name in names:
            if is_own(os.path.relpath(f"{path}/{name}", top)):
                (Path(path) / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is there
            Path(path).rmdir()


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
        raise PgOutputError(
            f"can't use {directory} for {contents}: {error.strerror}",
            code="io_failed",
            path=str(directory),
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
