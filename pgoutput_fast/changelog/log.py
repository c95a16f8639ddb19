"""The public entry to a change log, for everything that reads it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from ..segments.folders import HISTORY, SEGMENTS, SNAPSHOTS, TABLES
from ..segments.format import require_pyarrow
from ..segments.listing import has_begun, not_begun
from .history import history_of
from .view import find_snapshots, view_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from .._disk import Folder
    from ..policies import Policies
    from .history import History, HistoryPolicy
    from .log_consumer import LogConsumer
    from .read_plan import Position
    from .view import View

_T = TypeVar("_T")
_SETTLED = 1_000_000_000  # nanoseconds; a younger modification time may miss a later change


class ChangeLog:
    """A change log: the directory that a capture writes.

    The methods keep their last listing. They read the directory again only if the modification time
    of a folder has changed, or is less than a second old.

    Parameters
    ----------
    directory : path

    Attributes
    ----------
    directory : pathlib.Path
    awaited : int or None
        Somebody waited in vain for a schema history that is confirmed beyond this LSN, perhaps
        because no capture runs.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.awaited: int | None = None
        self._snapshots = _Cached(self.directory, (TABLES, SNAPSHOTS), find_snapshots)
        self._view = _Cached(self.directory, (SEGMENTS, TABLES, SNAPSHOTS), self._view_of)
        self._history = _Cached(self.directory, (SEGMENTS, HISTORY), _history_of)

    def _view_of(self, directory: Path) -> View:
        if not self.has_begun:
            raise not_begun(directory)
        return view_of(directory, lambda _: self._snapshots.get())

    @property
    def has_begun(self) -> bool:
        """Whether a capture has begun in the directory."""
        return has_begun(self.directory)

    def view(self) -> View:
        """Return a view: an immutable listing of the change log as it is now.

        Raises
        ------
        PgOutputError
            No capture has begun in the directory, or files can't be read, are damaged, or come from
            different slots.
        """
        return self._view.get()

    def history(self) -> History | None:
        """Return the schema history; None if the change log has none.

        Raises
        ------
        PgOutputError
            The schema history can't be read, or is damaged.
        """
        return self._history.get()

    def consumer(
        self,
        name: str,
        *,
        position: Position | None = None,
        tables: Sequence[str] | None = None,
        policies: Policies | None = None,
        target: Literal["arrow", "portable", "spark"] = "arrow",
        history: HistoryPolicy = "newer",
    ) -> LogConsumer:
        """Return a consumer, which reads the changes in the change log and waits for later ones.

        Parameters
        ----------
        name : str
            Letters, digits, ``_``, ``-`` and dots. An existing consumer resumes at its position; a
            new one begins with the newest snapshot of each table.
        position : Position, optional
            Resume here instead: the position that you stored with the last changes.
        tables : sequence of str, optional
            Patterns of the tables to read, as ``schema.name``; by default all tables.
        policies : Policies, optional
            What to do with values that a column can't hold.
        target : {"arrow", "portable", "spark"}
            The types of columns: see docs/reference/types.md.
        history : {"newer", "older", "error"}
            As in `SyncOptions`.

        Raises
        ------
        PgOutputError
            The name is not allowed. Another process reads under this name. The change log can't be
            read. Changes that a new consumer needs are deleted.
        """
        require_pyarrow()
        from .log_consumer import LogConsumer

        return LogConsumer(
            self.directory, name, self.view, self.history, position=position, tables=tables,
            policies=policies, target=target, policy=history,
        )  # fmt: skip


class _Cached(Generic[_T]):
    """Caches a value computed from a directory until one of the given folders changes."""

    def __init__(
        self, directory: Path, folders: tuple[Folder, ...], make: Callable[[Path], _T]
    ) -> None:
        self._directory, self._folders, self._make = directory, folders, make
        self._cache: tuple[list[int], _T] | None = None

    def get(self) -> _T:
        modified = [_modified(folder.path(self._directory)) for folder in self._folders]
        if self._cache is not None and self._cache[0] == modified:
            return self._cache[1]
        value = self._make(self._directory)
        is_settled = max(modified) + _SETTLED < time.time_ns()
        self._cache = (modified, value) if is_settled else None
        return value


def _history_of(directory: Path) -> History | None:
    return history_of([directory])


def _modified(path: Path) -> int:
    """Return a folder's modification time in nanoseconds; 0 if the folder does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
