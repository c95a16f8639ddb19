"""Consumers of a directory: what reads it, and how far each has come.

Segments and snapshots that a consumer still needs are not deleted. Each consumer is a file in the
subdirectory `consumers`, which is written whole each time.
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
"""The name is a part of the names of files."""


class ConsumerState(NamedTuple):
    """What a directory knows of a consumer.

    Fields: name, position (`Position`), seen (seconds since 1970 when it last moved).
    """

    name: str
    position: Position
    seen: float


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep consumers from being added while segments are deleted, and the other way round."""
    path = CONSUMERS.make(directory)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def consumers(directory: Path) -> list[ConsumerState]:
    """All consumers of a directory, by name.

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
    """Return the name of a consumer, which is a part of the names of its files.

    Raises
    ------
    PgOutputError
        The name is not allowed.
    """
    CONSUMER_NAME.check("consumer", name)
    return name


def claim_consumer(directory: Path, name: str, reader: str, advice: str = "") -> int:
    """Keep others from reading as the same consumer.

    Parameters
    ----------
    directory : pathlib.Path
    name : str
    reader : str
        What reads, for errors, such as "sync".
    advice : str
        What else to do, for the error that another one reads.

    Returns
    -------
    int
        As of `claim_directory`.

    Raises
    ------
    PgOutputError
        The name is not allowed, another one reads, or the operating system refuses.
    """
    lock = f".{check_consumer_name(name)}.lock"
    return claim_directory(
        CONSUMERS.make(directory) / lock, reader, "a consumer",
        f"the tables of consumer {name!r} of {directory}{advice}",
    )  # fmt: skip


def _path(directory: Path, name: str) -> Path:
    """The file of a consumer."""
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
            "Restore it, or remove the consumer and add it anew",
        ) from error


class Consumer:
    """One reader of a directory, which remembers how far it has come.

    Parameters
    ----------
    directory : path
    name : str
        Letters, digits, ``_``, ``-`` and dots. A consumer of this name goes on where it was; a new
        one begins with the newest snapshot of each table.
    position : Position, optional
        Where a new one begins instead.

    Attributes
    ----------
    position : Position

    Raises
    ------
    PgOutputError
        The name is not allowed, the directory can't be read, or what a new consumer needs is gone.
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
                    f"snapshot, and for {counted(len(missing), 'table')} they are deleted: "
                    f"{how_to_copy(self.directory, missing)}",
                    code="changes_missing",
                    path=str(self.directory),
                )
            self._store(self.position)

    def plan(self, max_bytes: int | None = None) -> ReadPlan | None:
        """Return what to read next, as :meth:`View.plan` does; None if nothing is left.

        The files stay until `advance`; earlier ones may be deleted at any time.
        """
        return view_of(self.directory).plan(self.position, max_bytes)

    def advance(self, position: Position) -> None:
        """Store durably that everything before a position was taken.

        Raises
        ------
        PgOutputError
            The disk refuses, or the consumer was removed meanwhile.
        """
        if not self._path.exists():
            raise PgOutputError(
                f"consumer {self.name!r} was removed from {self.directory} while it was reading: "
                f"add it anew",
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
    """Forget a consumer: nothing is kept for it any more.

    Raises
    ------
    PgOutputError
        There is none of this name, or it can't be one.
    """
    try:
        CONSUMERS.delete(directory, _path(directory, name).name)
    except FileNotFoundError:
        names = ", ".join(one.name for one in consumers(directory)) or "none"
        raise PgOutputError(
            f"{directory} has no consumer {name!r}; it has {names}",
            code="no_consumer",
            path=str(directory),
        ) from None
