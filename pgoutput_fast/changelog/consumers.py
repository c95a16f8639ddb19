"""The consumers of a change log: named readers, each with the position that it has reached.

The capture does not delete segments and snapshots that a consumer still needs. Each consumer is a
small file in the subdirectory `consumers`, which is replaced whenever the position moves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .._disk import claim_directory, read_json_file, write_whole
from .._forms import MALFORMED, of_form, unreadable
from ..errors import PgOutputError, counted
from ..options import OptionKind
from ..segments.folders import CONSUMERS
from ..segments.listing import has_begun, not_begun
from .known import how_to_copy
from .read_plan import Position, first_position, lacking
from .view import view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .read_plan import ReadPlan

CONSUMER_NAME = OptionKind(
    (str,), "a consumer's name: letters, digits, '_', '-' and '.'", str,
    lambda name: CONSUMERS.match(f"{name}.json") is not None, "NAME",
)  # fmt: skip
"""The name of a consumer. It is part of file names, so few characters are allowed."""


class ConsumerState(NamedTuple):
    """The stored state of a consumer.

    Fields: name; position (`Position`); seen (when the position was last stored, in seconds since
    1970).
    """

    name: str
    position: Position
    seen: float


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock that keeps adding a consumer and deleting segments apart."""
    path = CONSUMERS.make(directory)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def consumers(directory: Path) -> list[ConsumerState]:
    """Return all consumers of a change log.

    Raises
    ------
    PgOutputError
        The directory, or a consumer's file, can't be read.
    """
    try:
        names = CONSUMERS.names(directory)
    except OSError as error:
        raise PgOutputError(
            f"can't read consumers of {directory}: {error.strerror}",
            code="io_failed",
            path=str(directory),
        ) from error
    return [_read(CONSUMERS.path(directory) / name) for name in names]


def check_consumer_name(name: str) -> str:
    """Return the name of a consumer if it is allowed.

    Raises
    ------
    PgOutputError
        The name is not allowed.
    """
    CONSUMER_NAME.check("consumer", name)
    return name


def claim_consumer(directory: Path, name: str, reader: str, advice: str = "") -> int:
    """Lock a consumer, so that no other process reads under its name.

    Parameters
    ----------
    directory : pathlib.Path
    name : str
    reader : str
        The kind of reader for error texts, such as "sync".
    advice : str
        Further advice for the error that another process holds the lock.

    Returns
    -------
    int
        The file descriptor of the lock, as `claim_directory` returns it.

    Raises
    ------
    PgOutputError
        The name is not allowed, another process holds the lock, or the lock file can't be made.
    """
    lock = f".{check_consumer_name(name)}.lock"
    return claim_directory(
        CONSUMERS.make(directory) / lock, reader, "a consumer",
        f"the tables of consumer {name!r} of {directory}{advice}",
    )  # fmt: skip


def _path(directory: Path, name: str) -> Path:
    """Return the path of a consumer's file."""
    return CONSUMERS.path(directory) / f"{check_consumer_name(name)}.json"


def _read(path: Path) -> ConsumerState:
    try:
        fields = json.loads(read_json_file(path))
        form = {"position": str, "tables": dict[str, str], "seen": float}
        for key, kind in form.items():
            of_form(fields[key], kind, key)
        return ConsumerState(path.stem, Position.of_fields(fields), fields["seen"])
    except (OSError, *MALFORMED) as error:
        raise unreadable(
            path,
            error,
            "which says how far a consumer has read",
            "Restore it, or remove the consumer and add it again",
        ) from error


class Consumer:
    """A named reader of a change log, with a stored position.

    Parameters
    ----------
    directory : path
    name : str
        Letters, digits, ``_``, ``-`` and dots. An existing consumer resumes at its position; a new
        one begins with the newest snapshot of each table.
    position : Position, optional
        The position at which a new consumer begins instead.

    Attributes
    ----------
    position : Position

    Raises
    ------
    PgOutputError
        The name is not allowed, the directory can't be read, or changes that a new consumer needs
        are deleted.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, position: Position | None = None
    ) -> None:
        self.directory = Path(directory)
        self.name = name
        self._path = _path(self.directory, name)
        if self._path.exists():
            self.position = _read(self._path).position
            return
        if not has_begun(self.directory):
            raise not_begun(self.directory)
        with locked(self.directory):
            view = view_of(self.directory)
            self.position = position or first_position(view.states, view.begin)
            missing = lacking(self.position, view.states, view.begin)
            if missing:
                raise PgOutputError(
                    f"a new consumer of {self.directory} needs the changes since each table's "
                    f"snapshot, but those of {counted(len(missing), 'table')} are deleted: "
                    f"{how_to_copy(self.directory, missing)}",
                    code="changes_missing",
                    path=str(self.directory),
                )
            self._store(self.position)

    def plan(self, max_bytes: int | None = None) -> ReadPlan | None:
        """Return what to read next, as :meth:`View.plan` does; None if there is nothing new.

        The capture keeps the files of the plan until you call `advance`. It may delete earlier
        files at any time.
        """
        return view_of(self.directory).plan(self.position, max_bytes)

    def advance(self, position: Position) -> None:
        """Store durably that the consumer does not need anything before a position any more.

        Raises
        ------
        PgOutputError
            The file can't be written, or the consumer was removed meanwhile.
        """
        if not self._path.exists():
            raise PgOutputError(
                f"consumer {self.name!r} was removed from {self.directory} while it was reading: "
                "add it again",
                code="no_consumer",
                path=str(self.directory),
            )
        self._store(position)
        self.position = position

    def _store(self, position: Position) -> None:
        fields = {**position.fields(), "seen": time.time()}
        try:
            write_whole(self._path, [json.dumps(fields)])
        except OSError as error:
            raise PgOutputError(
                f"can't write {self._path}: {error.strerror or error}",
                code="io_failed",
                path=str(self._path),
            ) from error


def remove_consumer(directory: Path, name: str) -> None:
    """Remove a consumer, so that the capture keeps no files for it any more.

    Raises
    ------
    PgOutputError
        There is no consumer of this name, or the name is not allowed.
    """
    try:
        CONSUMERS.delete(directory, _path(directory, name).name)
    except FileNotFoundError:
        names = ", ".join(consumer.name for consumer in consumers(directory)) or "none"
        raise PgOutputError(
            f"{directory} has no consumer {name!r}; it has {names}",
            code="no_consumer",
            path=str(directory),
        ) from None
