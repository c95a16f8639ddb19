"""The states of snapshots: which tables of a change log have one, and which wait for one.

Each state is a small file in the subdirectory `tables`. The name of the file says all that a reader
needs, so a reader lists the names and opens no file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from .._disk import read_json_file, write_whole
from .._forms import MALFORMED, of_form, unreadable
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..segments.folders import TABLES
from ..types import TypeRegistry

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_State = Literal["waiting", "snapshot", "gone"]
_FORMS: dict[str, Any] = {
    "table": list[str],
    "members": list[int],
    "actions": dict[str, list[str]],
    "generated": dict[str, int],
    "rows": int,
    "files": list[int],
}
"""The types of the fields of a state file. All are optional; `table` is empty without a name."""


class Snapshot(NamedTuple):
    """One snapshot of a table, in one of three states.

    Attributes
    ----------
    relation_id : int
    number : int
        The number of the snapshot: 1 for the first one of the table, then 2, …
    first : bool
        Whether the table was not in the change log before this snapshot. Then changes of the table
        before the first complete snapshot do not count.
    state : {"waiting", "snapshot", "gone"}
        "waiting": requested, or being made. "snapshot": complete. "gone": the table was dropped, or
        has left the publications, so there is no snapshot.
    lsn : int
        "waiting": the end of the change log when the snapshot was requested. "snapshot": the
        consistent point. The rows contain every transaction that was committed before it. "gone":
        no later change of the table counts, unless a further snapshot comes.
    """

    relation_id: int
    number: int
    first: bool
    state: _State
    lsn: int

    @property
    def name(self) -> str:
        """The name of the state file."""
        kind = "first" if self.first else "again"
        return f"{self.relation_id:08X}-{self.number:05d}-{kind}-{self.state}-{self.lsn:016X}.json"

    @classmethod
    def named(cls, name: str) -> Snapshot | None:
        """Parse the name of a state file; return None if the name has another form."""
        match = TABLES.match(name)
        if match is None:
            return None
        state = cast("_State", match[4])
        return cls(int(match[1], 16), int(match[2]), match[3] == "first", state, int(match[5], 16))


class Void(NamedTuple):
    """A range of a table's changes that never count.

    Fields: start (an LSN); end (the consistent point of the next complete snapshot, or None).
    """

    start: int
    end: int | None


class TableSnapshots(NamedTuple):
    """The snapshots of one table in a change log.

    Attributes
    ----------
    all_snapshots : tuple of Snapshot
        All snapshots in any state, oldest first.
    """

    all_snapshots: tuple[Snapshot, ...]

    @property
    def waits_from(self) -> int | None:
        """The LSN from which on changes wait for the next snapshot; None if none is waiting."""
        last = self.all_snapshots[-1]
        return last.lsn if last.state == "waiting" else None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The complete snapshots."""
        return tuple(snapshot for snapshot in self.all_snapshots if snapshot.state == "snapshot")

    def void(self, lsn: int) -> Void | None:
        """Return the range of void changes that contains an LSN, or the next one; or None.

        A table may be dropped, or leave the publications, while it waits for a snapshot. Then its
        changes since the wait began do not continue its earlier rows. They are void: they do not
        count, up to the next complete snapshot.
        """
        for index, snapshot in enumerate(self.all_snapshots[:-1]):
            if snapshot.state == "waiting":
                later = (
                    later.lsn for later in self.all_snapshots[index:] if later.state == "snapshot"
                )
                end = next(later, None)
                if end is None or end > lsn:
                    return Void(snapshot.lsn, end)
        return None

    @property
    def begins(self) -> int | None:
        """The LSN from which on changes count; None if no change counts yet."""
        first = self.all_snapshots[0]
        if not first.first:
            return 0
        return next(
            (snapshot.lsn for snapshot in self.all_snapshots if snapshot.state == "snapshot"), None
        )


class SnapshotStates:
    """Reads and writes the states of tables in a change log. Only one process may write them.

    Parameters
    ----------
    directory : pathlib.Path
        The directory of the change log.
    """

    def __init__(self, directory: Path) -> None:
        self._of = directory
        self._directory = TABLES.path(directory)
        self._states: dict[int, TableSnapshots] | None = None

    @property
    def states(self) -> dict[int, TableSnapshots]:
        """The states from the first `read`, updated by each later write through this object."""
        if self._states is None:
            self._states = self.read()
        return self._states

    @property
    def waiting(self) -> dict[int, Snapshot]:
        """The snapshots that tables wait for, by relation id."""
        return {
            relation_id: state.all_snapshots[-1]
            for relation_id, state in self.states.copy().items()
            if state.waits_from is not None
        }

    def read(self) -> dict[int, TableSnapshots]:
        """Read the state of each table from the file names; return them by relation id.

        Raises
        ------
        PgOutputError
            The folder can't be read.
        """
        copies: dict[tuple[int, int], Snapshot] = {}
        try:
            # While a folder is listed, the system may miss a file that is new, and one that is
            # deleted. A capture writes a table's new state before it deletes the old one. So if
            # the first listing has neither, the second one has the new state.
            names = {*TABLES.listed(self._of), *TABLES.listed(self._of)}
        except OSError as error:
            raise PgOutputError(
                f"can't read {self._directory}: {error.strerror}",
                code="io_failed",
                path=str(self._directory),
            ) from error
        for name in names:
            snapshot = Snapshot.named(name)
            if snapshot is None:
                continue
            before = copies.get(snapshot[:2])
            # A kill can leave the file of a waiting snapshot beside the one of its outcome.
            if before is None or before.state == "waiting":
                copies[snapshot[:2]] = snapshot
        states: dict[int, list[Snapshot]] = {}
        for key in sorted(copies):
            states.setdefault(key[0], []).append(copies[key])
        return {
            relation_id: TableSnapshots(tuple(copies)) for relation_id, copies in states.items()
        }

    def fields(self, snapshot: Snapshot) -> dict[str, object]:
        """Return the fields in a snapshot's state file.

        If a snapshot is no longer waiting, these are the fields of its new state.

        Raises
        ------
        PgOutputError
            The file can't be read, or is malformed.
        """
        try:
            return self._fields(snapshot)
        except PgOutputError:
            state = self.read().get(snapshot.relation_id)
            now = [] if state is None else [
                other for other in state.all_snapshots
                if other[:2] == snapshot[:2] and other != snapshot
            ]  # fmt: skip
            if not now:
                raise
            return self._fields(now[0])

    def _fields(self, snapshot: Snapshot) -> dict[str, object]:
        try:
            fields = json.loads(read_json_file(self._directory / snapshot.name))
            checked: dict[str, object] = of_form(fields, dict[str, Any], "fields")
            for key in checked.keys() & _FORMS.keys():
                of_form(checked[key], _FORMS[key], key)
            if len(fields.get("table", [])) not in (0, 2):
                raise ValueError("table has no namespace and name")
            if snapshot.state == "snapshot" and "files" not in checked:
                raise ValueError("it lacks 'files'")
        except (OSError, *MALFORMED) as error:
            raise self._unreadable(snapshot, error) from error
        return checked

    def types(self, snapshot: Snapshot) -> TypeRegistry | None:
        """Return the user-defined types in force when a snapshot was made; None if not stored.

        Raises
        ------
        PgOutputError
            The file can't be read, or its types are malformed.
        """
        stored = self.fields(snapshot).get("types")
        if stored is None:
            return None
        try:
            return TypeRegistry.from_json(json.dumps(stored))
        except PgOutputError as error:
            raise self._unreadable(snapshot, error) from error

    def _unreadable(self, snapshot: Snapshot, error: Exception) -> PgOutputError:
        what = "which records the snapshots of a table"
        return unreadable(self._directory / snapshot.name, error, what)

    def wait(
        self, relation_id: int, lsn: int, fields: dict[str, object], *, first: bool
    ) -> Snapshot:
        """Store durably that a table waits for a new snapshot.

        Call it before anything after `lsn` becomes durable. Otherwise readers would take changes
        that have to wait. The stream may not have reached the table's last snapshot, or the LSN at
        which the table left. Then the table waits from there.

        Parameters
        ----------
        relation_id : int
        lsn : int
            The LSN up to which everything is durable.
        fields : dict
            The fields of the state file.
        first : bool
            As in `Snapshot`.
        """
        state = self.states.get(relation_id)
        number = 1
        if state is not None:
            last = state.all_snapshots[-1]
            number, lsn = last.number + 1, max(lsn, last.lsn)
        return self._write(Snapshot(relation_id, number, first, "waiting", lsn), fields)

    def finish(self, snapshot: Snapshot, lsn: int, fields: dict[str, object]) -> Snapshot:
        """Store that a snapshot is complete. Its files must be durable already.

        Parameters
        ----------
        snapshot : Snapshot
            The waiting snapshot.
        lsn : int
            The consistent point of the snapshot.
        fields : dict
            The fields of the state file.

        Raises
        ------
        PgOutputError
            The consistent point is not after the LSN at which the table began to wait.
        """
        if lsn <= snapshot.lsn:
            raise PgOutputError(
                f"the snapshot of relation {snapshot.relation_id} is at {format_lsn(lsn)}, but the "
                f"changes of the table wait for a snapshot after {format_lsn(snapshot.lsn)}",
                code="another_history",
            )
        whole = self._write(snapshot._replace(state="snapshot", lsn=lsn), fields)
        TABLES.delete(self._of, snapshot.name, missing_ok=True)
        return whole

    def clear(self) -> None:
        """Delete all states of a directory in which no capture has begun.

        Raises
        ------
        OSError
            A file can't be deleted.
        """
        for name in TABLES.names(self._of):
            TABLES.delete(self._of, name)
        self._states = None

    def leave(self, relation_id: int, lsn: int, fields: dict[str, object]) -> Snapshot:
        """Store that a table was dropped or has left the publications. It waits no longer.

        Parameters
        ----------
        relation_id : int
        lsn : int
            No change of the table was committed from this LSN on.
        fields : dict
            The fields of the state file.
        """
        state = self.states.get(relation_id)
        number = state.all_snapshots[-1].number + 1 if state else 1
        return self._write(Snapshot(relation_id, number, state is None, "gone", lsn), fields)

    def forget(self, relation_ids: Collection[int]) -> None:
        """Delete the state files of tables, the newest state of each table last.

        Parameters
        ----------
        relation_ids : collection of int

        Raises
        ------
        OSError
            A file can't be deleted.
        """
        for name in TABLES.names(self._of):
            snapshot = Snapshot.named(name)
            if snapshot is not None and snapshot.relation_id in relation_ids:
                TABLES.delete(self._of, name)
        for relation_id in relation_ids:
            self.states.pop(relation_id, None)

    def _write(self, snapshot: Snapshot, fields: dict[str, object]) -> Snapshot:
        try:
            TABLES.make(self._of)
            write_whole(self._directory / snapshot.name, [json.dumps(fields)])
        except OSError as error:
            raise PgOutputError(
                f"can't write {self._directory / snapshot.name}: {error.strerror or error}",
                code="io_failed",
                path=str(self._directory / snapshot.name),
            ) from error
        state = self.states.get(snapshot.relation_id)
        others = (
            [other for other in state.all_snapshots if other[:2] != snapshot[:2]] if state else []
        )
        self.states[snapshot.relation_id] = TableSnapshots((*others, snapshot))
        return snapshot
