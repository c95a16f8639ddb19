"""Test a target of your own: it must have each change once, whenever a sync is killed."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..apply import sync
from ..apply.naming import stored_table
from ..changelog.snapshot_states import SnapshotStates
from ..changelog.snapshots import SnapshotFiles
from ..objects import UNCHANGED
from ..segments import SegmentMetadata, SegmentWriter
from ..targets import ChangeTarget
from .frames import begin, commit, delete, insert, truncate, update
from .tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pyarrow as pa

__all__ = ["check_target"]

_METADATA = SegmentMetadata(
    "7000000000000000001", "shop", "slot", ("p",), 180000, "UTF8", {}, {"proto_version": "1"}
)
_VERSIONS = ("", ".v2")


def check_target(
    connect: Callable[[], ChangeTarget],
    read: Callable[[str], Iterable[Mapping[str, Any]]],
    reset: Callable[[], None],
) -> int:
    """Sync a made-up change log into a target, and kill the sync before each call of the target.

    The change log has inserts, deletes, a truncate, a snapshot, an update that moves a key, and one
    that leaves a value out. It adds a column, changes a column's type, renames a table, and has
    unusual names.

    Parameters
    ----------
    connect : callable
        Returns the target with a new connection, as another process would make it.
    read : callable
        Returns the rows of a table by its name; no rows if there is no such table. A row has
        `commit_lsn`, `seq` and `op`; `before` and `after`, each a mapping of columns to values or
        None; and `unchanged`, a list of columns or None. Values are compared as texts.
    reset : callable
        Empties the database. No target is connected at that time.

    Returns
    -------
    int
        The number of times that a sync was killed.

    Raises
    ------
    AssertionError
        A table has other changes than expected.
    """
    with tempfile.TemporaryDirectory() as directory:
        change_log = Path(directory, "log")
        _write(change_log)
        memory: dict[str, list[dict[str, Any]]] = {}
        _run(Path(directory, "memory"), change_log, lambda: _Memory(memory), None)
        wanted = _all(lambda name: memory.get(name, []))
        kills = 0
        while True:
            reset()
            place = Path(directory, f"{kills}")
            killed = _run(place, change_log, connect, kills)
            if killed is not None:
                _run(place, change_log, connect, None)
            actual = _all(read)
            where = "without a kill" if killed is None else f"killed before {killed}, call {kills}"
            for name in wanted:
                if actual[name] != wanted[name]:
                    raise AssertionError(
                        f"{name}, {where}: it has {actual[name]}, and should have {wanted[name]}"
                    )
            if killed is None:
                return kills
            kills += 1


class _KilledError(BaseException):
    """Simulates the kill of the process. Field: before (the name of the call)."""

    def __init__(self, before: str) -> None:
        self.before = before


class _Mortal(ChangeTarget):
    """A target that simulates a kill before the call number `calls`; None: no kill."""

    def __init__(self, own: ChangeTarget, calls: int | None) -> None:
        self.name = own.name
        self._own = own
        self._left = calls
        self._is_dead = False

    def _live(self, call: str) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._is_dead = True
                raise _KilledError(call)

    def load(self) -> str | None:
        self._live("load")
        return self._own.load()

    def begin(self) -> None:
        self._live("begin")
        self._own.begin()

    def prepare(self, table: str, schema: pa.Schema) -> bool:
        self._live("prepare")
        return self._own.prepare(table, schema)

    def append(self, table: str, changes: pa.RecordBatch) -> None:
        self._live("append")
        self._own.append(table, changes)

    def rename(self, table: str, name: str) -> None:
        self._live("rename")
        self._own.rename(table, name)

    def commit(self, progress: str) -> None:
        self._live("commit")
        self._own.commit(progress)

    def rollback(self) -> None:
        if not self._is_dead:
            self._own.rollback()

    def close(self) -> None:
        self._own.close()  # the connection of a killed process is closed, too


class _Memory(ChangeTarget):
    """A target in memory: lists of rows."""

    name = "memory"

    def __init__(self, tables: dict[str, list[dict[str, Any]]]) -> None:
        self._tables = tables
        self._progress: str | None = None

    def load(self) -> str | None:
        return self._progress

    def begin(self) -> None:
        pass

    def prepare(self, table: str, schema: pa.Schema) -> bool:
        del schema
        self._tables.setdefault(table, [])
        return True

    def append(self, table: str, changes: pa.RecordBatch) -> None:
        self._tables[table] += changes.to_pylist()

    def rename(self, table: str, name: str) -> None:
        if table in self._tables:
            self._tables[name] = self._tables.pop(table)

    def commit(self, progress: str) -> None:
        self._progress = progress

    def rollback(self) -> None:
        pass

    def close(self) -> None:
        pass


def _run(
    place: Path, change_log: Path, connect: Callable[[], ChangeTarget], calls: int | None
) -> str | None:
    """Sync a copy of a change log; return the call before which the sync was killed, or None."""
    if not place.exists():
        shutil.copytree(change_log, place)
    try:
        sync(segments=place, target=_Mortal(connect(), calls), until="now", window_bytes=1)
    except _KilledError as error:
        return error.before
    return None


def _all(
    read: Callable[[str], Iterable[Mapping[str, Any]]],
) -> dict[str, list[tuple[Any, ...]]]:
    """Return the changes of each table, in their order."""
    changes = {}
    for name in (
        stored_table("public", "customers"),
        stored_table("Odd Schema", 'My "Ü".1'),
        stored_table("public", "copied"),
    ):
        rows = [row for version in _VERSIONS for row in read(name + version)]
        changes[name] = sorted(
            (
                int(row["commit_lsn"]),
                int(row["seq"]),
                str(row["op"]),
                _texts(row["before"]),
                _texts(row["after"]),
                sorted(row["unchanged"] or ()),
            )
            for row in rows
        )
    return changes


def _texts(row: Mapping[str, Any] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (row or {}).items() if value is not None}


def _copy(directory: Path, table: Table, lsn: int, rows: list[list[Any]]) -> None:
    """Add a snapshot of a table, as of an LSN."""
    states = SnapshotStates(directory)
    fields: dict[str, Any] = {"table": [table.namespace, table.name]}
    waiting = states.wait(table.relation_id, lsn - 100, fields, first=True)
    files = SnapshotFiles(directory, waiting, _METADATA, lsn, lsn, [table.relation()])
    files.begin()
    frames = [insert(table, row) for row in rows]
    files.write(1, [(b"".join(frames), [0, *itertools.accumulate(map(len, frames))])])
    states.finish(waiting, lsn, {**fields, "rows": len(rows), "files": files.finish()})


def _write(directory: Path) -> None:
    columns: dict[str, Any] = {"id": "int4", "note": "text", "amount": "numeric(12,2)"}
    accounts = Table("accounts", columns, 16384, key=["id"])
    wider = Table("accounts", columns | {"big": "int8"}, 16384, key=["id"])
    retyped = Table("accounts", columns | {"big": "text"}, 16384, key=["id"])
    customers = Table("customers", columns | {"big": "text"}, 16384, key=["id"])
    odd = Table('My "Ü".1', {"Id": "int8", "a.b": "bool"}, 16385,
                namespace="Odd Schema", key=["Id"])  # fmt: skip
    copied = Table("copied", {"id": "int4", "note": "text"}, 16386)
    windows = [
        [accounts.relation(), insert(accounts, [1, "a", None]),
         insert(accounts, [2, "'\"\\ü", "1.50"]), odd.relation(), insert(odd, [1, True])],
        [accounts.relation(), update(accounts, [3, "b", "2.00"], old={"id": 1}),
         delete(accounts, {"id": 2}), odd.relation(), insert(odd, [2, None])],
        [wider.relation(), insert(wider, [4, "c", "3.00", 1 << 40]),
         update(wider, [4, UNCHANGED, None, 1])],
        [odd.relation(), truncate([odd]), insert(odd, [1, False])],
        [retyped.relation(), insert(retyped, [5, "d", None, "text"])],
        [customers.relation(), insert(customers, [6, "e", None, None]),
         delete(customers, {"id": 4}), copied.relation(), update(copied, [2, None])],
    ]  # fmt: skip
    with contextlib.closing(SegmentWriter(directory, _METADATA, confirmed_flush_lsn=900)) as writer:
        for number, frames in enumerate(windows, 1):
            lsn = 1000 * number
            writer.write(lsn, begin(number, lsn, lsn))
            for frame in frames:
                writer.write(0 if frame[:1] == b"R" else lsn - 5, frame)
            writer.write(lsn + 10, commit(lsn, lsn + 10, lsn))
            writer.flush()
    _copy(directory, copied, 3500, [[1, "a"], [2, "b"]])
