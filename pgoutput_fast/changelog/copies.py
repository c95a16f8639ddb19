"""Which tables have a snapshot in a directory, and which wait for one.

Each state is a small file in the subdirectory `tables`, and its name says all that a reader needs.
So a reader lists names, and opens nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from .._disk import read_json_file, write_whole
from .._forms import MALFORMED, of_form, unreadable
from ..errors import PgOutputError
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
"""The fields of a file, of which it has some. A table that is not known by name has no names."""


class Copy(NamedTuple):
    """One copy of a table, or the order to make one.

    Attributes
    ----------
    relation_id : int
    generation : int
        1 for the table's first copy, 2 for the next one.
    first : bool
        Whether nothing that came of the table before counts, as it was not in the directory.
    state : {"waiting", "snapshot", "gone"}
        "gone" if there is none, as the table was dropped, or has left the publications.
    lsn : int
        "snapshot": the consistent point; the rows are those of every transaction that was
        committed before it. "waiting": where the directory ended when the copy was ordered. "gone":
        nothing of the table was committed from there on that counts without a further copy.
    """

    relation_id: int
    generation: int
    first: bool
    state: _State
    lsn: int

    @property
    def name(self) -> str:
        """The name of its file."""
        kind = "first" if self.first else "again"
        return (
            f"{self.relation_id:08X}-{self.generation:05d}-{kind}-{self.state}-{self.lsn:016X}.json"
        )

    @classmethod
    def named(cls, name: str) -> Copy | None:
        """The copy whose file has a name; None if it is the name of something else."""
        match = TABLES.match(name)
        if match is None:
            return None
        state = cast("_State", match[4])
        return cls(int(match[1], 16), int(match[2]), match[3] == "first", state, int(match[5], 16))


class Void(NamedTuple):
    """Changes of a table that never count.

    Fields: start (LSN), end (the consistent point of the copy that comes next, or None).
    """

    start: int
    end: int | None


class TableState(NamedTuple):
    """What a directory has of a table.

    Attributes
    ----------
    copies : tuple of Copy
        Oldest first.
    """

    copies: tuple[Copy, ...]

    @property
    def held_from(self) -> int | None:
        """The LSN from which on its changes wait for a copy; None: they do not wait."""
        last = self.copies[-1]
        return last.lsn if last.state == "waiting" else None

    @property
    def snapshots(self) -> tuple[Copy, ...]:
        """The copies that are whole."""
        return tuple(copy for copy in self.copies if copy.state == "snapshot")

    def void(self, lsn: int) -> Void | None:
        """Where an LSN is in a stretch whose changes never count, or the next such stretch.

        None if there is none. Where a table left while it waited for a copy, its changes do not go
        together with what was known of it before: they count for nothing up to the next copy.
        """
        for index, copy in enumerate(self.copies[:-1]):
            if copy.state == "waiting":
                later = (one.lsn for one in self.copies[index:] if one.state == "snapshot")
                end = next(later, None)
                if end is None or end > lsn:
                    return Void(copy.lsn, end)
        return None

    @property
    def begins(self) -> int | None:
        """Changes before this LSN do not count; None: none does."""
        first = self.copies[0]
        if not first.first:
            return 0
        return next((copy.lsn for copy in self.copies if copy.state == "snapshot"), None)


class Tables:
    """The states of tables in a directory, of which the caller is the only writer.

    Parameters
    ----------
    directory : pathlib.Path
        That of the segments.
    """

    def __init__(self, directory: Path) -> None:
        self._of = directory
        self._directory = TABLES.path(directory)
        self._states: dict[int, TableState] | None = None

    @property
    def states(self) -> dict[int, TableState]:
        """What `read` gave first, with all that was written here since, also by other threads."""
        if self._states is None:
            self._states = self.read()
        return self._states

    @property
    def waiting(self) -> dict[int, Copy]:
        """The orders of the tables that wait, by relation id."""
        return {
            relation_id: state.copies[-1]
            for relation_id, state in self.states.copy().items()
            if state.held_from is not None
        }

    def read(self) -> dict[int, TableState]:
        """The state of each table that has one, by relation id.

        Raises
        ------
        PgOutputError
            The directory can't be read.
        """
        found: dict[tuple[int, int], Copy] = {}
        try:
            names = TABLES.names(self._of)
        except OSError as error:
            raise PgOutputError(
                f"can't read {self._directory}: {error.strerror}",
                code="io_failed",
                path=str(self._directory),
            ) from error
        for name in names:
            copy = Copy.named(name)
            if copy is None:
                continue
            before = found.get(copy[:2])
            # A kill can leave the order beside what came of it.
            if before is None or before.state == "waiting":
                found[copy[:2]] = copy
        states: dict[int, list[Copy]] = {}
        for key in sorted(found):
            states.setdefault(key[0], []).append(found[key])
        return {relation_id: TableState(tuple(copies)) for relation_id, copies in states.items()}

    def fields(self, copy: Copy) -> dict[str, object]:
        """What is stored of a copy.

        Raises
        ------
        PgOutputError
            The file can't be read.
        """
        try:
            fields = json.loads(read_json_file(self._directory / copy.name))
            found: dict[str, object] = of_form(fields, dict[str, Any], "fields")
            for key in found.keys() & _FORMS.keys():
                of_form(found[key], _FORMS[key], key)
            if len(fields.get("table", [])) not in (0, 2):
                raise ValueError("table has no namespace and name")
            if copy.state == "snapshot" and "files" not in found:
                raise ValueError("it lacks 'files'")
        except (OSError, *MALFORMED) as error:
            raise self._unreadable(copy, error) from error
        return found

    def types(self, copy: Copy) -> TypeRegistry | None:
        """The types by which the server made the values of a copy; None if they are not stored.

        Raises
        ------
        PgOutputError
            The file can't be read, or has something else in their place.
        """
        stored = self.fields(copy).get("types")
        if stored is None:
            return None
        try:
            return TypeRegistry.from_json(json.dumps(stored))
        except PgOutputError as error:
            raise self._unreadable(copy, error) from error

    def _unreadable(self, copy: Copy, error: Exception) -> PgOutputError:
        what = "which says what there is of a table"
        return unreadable(self._directory / copy.name, error, what)

    def wait(self, relation_id: int, lsn: int, fields: dict[str, object], *, first: bool) -> Copy:
        """Order a copy: durable when this returns.

        It must be called before anything behind `lsn` becomes durable.

        Parameters
        ----------
        relation_id : int
        lsn : int
            Up to where everything is durable.
        first : bool
            As of `Copy`.
        fields : dict
            What is stored of it.
        """
        state = self.states.get(relation_id)
        generation = state.copies[-1].generation + 1 if state else 1
        return self._write(Copy(relation_id, generation, first, "waiting", lsn), fields)

    def finish(self, copy: Copy, lsn: int, fields: dict[str, object]) -> Copy:
        """A copy is whole, with its files durable.

        Parameters
        ----------
        copy : Copy
            What was ordered.
        lsn : int
            Its consistent point.
        fields : dict
            What is stored of it.
        """
        if lsn <= copy.lsn:
            raise PgOutputError(
                f"the snapshot of relation {copy.relation_id} is of {lsn:X}, which is not behind "
                f"{copy.lsn:X}, where its changes began to wait for it",
                code="another_history",
            )
        whole = self._write(copy._replace(state="snapshot", lsn=lsn), fields)
        TABLES.delete(self._of, copy.name, missing_ok=True)
        return whole

    def clear(self) -> None:
        """Forget all, in a directory in which no capture has begun.

        Raises
        ------
        OSError
            The disk refuses.
        """
        for name in TABLES.names(self._of):
            TABLES.delete(self._of, name)
        self._states = None

    def leave(self, relation_id: int, lsn: int, fields: dict[str, object]) -> Copy:
        """A table is gone; if it waits for a copy, there will be none.

        Parameters
        ----------
        relation_id : int
        lsn : int
            Nothing of it was committed from there on.
        fields : dict
            What is stored of it.
        """
        state = self.states.get(relation_id)
        generation = state.copies[-1].generation + 1 if state else 1
        return self._write(Copy(relation_id, generation, state is None, "gone", lsn), fields)

    def forget(self, relation_ids: Collection[int]) -> None:
        """Delete the files of tables' states, that of a table's newest state last.

        Parameters
        ----------
        relation_ids : collection of int

        Raises
        ------
        OSError
            The disk refuses.
        """
        for name in TABLES.names(self._of):
            copy = Copy.named(name)
            if copy is not None and copy.relation_id in relation_ids:
                TABLES.delete(self._of, name)
        for relation_id in relation_ids:
            self.states.pop(relation_id, None)

    def _write(self, copy: Copy, fields: dict[str, object]) -> Copy:
        try:
            TABLES.make(self._of)
            write_whole(self._directory / copy.name, [json.dumps(fields)])
        except OSError as error:
            raise PgOutputError(
                f"can't write {self._directory / copy.name}: {error.strerror or error}",
                code="io_failed",
                path=str(self._directory / copy.name),
            ) from error
        state = self.states.get(copy.relation_id)
        others = [one for one in state.copies if one[:2] != copy[:2]] if state else []
        self.states[copy.relation_id] = TableState((*others, copy))
        return copy
