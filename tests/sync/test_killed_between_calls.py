"""The built-in targets, killed between two calls: each change is there once."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.targets.synced_tables import TABLES, Tables

from pgoutput_fast import apply, testing
from pgoutput_fast.apply import synchronize
from pgoutput_fast.apply.naming import stored_table
from pgoutput_fast.testing import targets

ODD = stored_table("Odd Schema", 'My "Ü".1')
EACH = 3
"""Of so many calls, a sync is killed before one."""


class KilledError(BaseException):
    """The process was killed."""


class Calls:
    """Counts calls, and raises `KilledError` in place of a number of them, and all later ones."""

    def __init__(self, left: int) -> None:
        self.left = left

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KilledError
        found = function(*arguments, **keywords)
        return Mortal(found, self) if function.__name__ in ("changes", "state") else found


class Mortal:
    """A target, or a writer of one of its tables, whose process is killed at a call."""

    def __init__(self, own: Any, calls: Calls) -> None:
        self._own = own
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        if not callable(found) or name == "close":  # a killed process has nothing open
            return found
        if name == "abort" and self._calls.left < 0:
            return lambda: None
        return lambda *arguments, **keywords: self._calls.call(found, *arguments, **keywords)


def is_killed(log: Path, tables: Tables, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a sync was killed before it had come to the end."""
    opened = synchronize.open_target

    def mortal(*arguments: Any, **keywords: Any) -> Any:
        found = opened(*arguments, **keywords)
        return found._replace(target=Mortal(found.target, calls))

    with monkeypatch.context() as patch:
        patch.setattr(synchronize, "open_target", mortal)
        try:
            apply.sync(segments=log, until="now", window_bytes=1, uncopied="empty", **tables.given)
        except KilledError:
            return True
    return False


def read(tables: Tables) -> Callable[[str], Iterable[dict[str, Any]]]:
    def rows(name: str) -> list[dict[str, Any]]:
        if not tables.has("changes", name):
            return []
        stored = name.removesuffix(".v2")
        found: list[dict[str, Any]] = tables.changes(stored, 1 + (stored != name)).to_pylist()
        return found

    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duckdb", "delta", "parquet"])
def test_each_change_is_there_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    targets._write(log)
    memory: dict[str, list[dict[str, Any]]] = {}
    targets._run(tmp_path / "memory", log, lambda: targets._Memory(memory), None)
    expected = targets._all(lambda name: memory.get(name, []))
    number, was_killed = 0, True
    while was_killed:
        root = tmp_path / str(number)
        root.mkdir()
        shutil.copytree(log, root / "log")
        tables = TABLES[kind](root)
        was_killed = is_killed(root / "log", tables, Calls(number), monkeypatch)
        if was_killed:
            assert not is_killed(root / "log", tables, Calls(1 << 30), monkeypatch)
        assert targets._all(read(tables)) == expected, number
        if tables.has_state:
            assert tables.state(ODD).to_pylist() == [{"Id": 1, "a.b": False}]
            # A type was altered by which the rows may have changed.
            stale = {held["stored"]: held["stale"] for held in tables.progress().values()}
            assert stale[ODD] is None
            assert stale[stored_table("public", "customers")] is not None
        number += EACH
    assert number > 50


RETYPED = (
    testing.Table("t", {"id": "int4", "note": "text"}, 16390, key=["id"]),
    testing.Table("t", {"id": "int4", "note": "int4"}, 16390, key=["id"]),
)
MONEY = testing.Table("t", {"id": "int4", "note": "money"}, 16390, key=["id"])


Changes = list[list[tuple[int, str, Any]]]
"""Of each version of a change table: commit LSN, op and the column `note`."""


def retype(made: MadeDirectory) -> Iterator[Changes]:
    """A snapshot has another type than the table had."""
    before, after = RETYPED
    made.wait(before, 1000)
    made.copy(before, 1050, [[1, "a"]])
    made.commit(1080, before.relation(), testing.insert(before, [5, "b"]))
    yield []
    made.wait(before, 1110, first=False)
    made.copy(after, 1150, [[1, 7]])
    made.commit(1200, after.relation(), testing.insert(after, [3, 9]))
    yield [
        [(1049, "truncate", None), (1049, "read", "a"), (1080, "insert", "b")],
        [(1149, "truncate", None), (1149, "read", 7), (1200, "insert", 9)],
    ]


def turn(made: MadeDirectory) -> Iterator[Changes]:
    """A snapshot has texts where the table had digits of binary format."""
    made.go_on(binary=True)
    made.wait(MONEY, 1000)
    made.copy(MONEY, 1050, [[b"\0\0\0\1", (1234).to_bytes(8, "big")]])
    row = [b"\0\0\0\2", (99).to_bytes(8, "big")]
    made.commit(1080, MONEY.relation(), testing.insert(MONEY, row))
    yield []
    made.go_on(binary=False)
    made.wait(MONEY, 1110, first=False)
    made.copy(MONEY, 1150, [[1, "$12.34"]])
    made.commit(1200, MONEY.relation(), testing.insert(MONEY, [3, "$9.00"]))
    yield [
        [(1049, "truncate", None), (1049, "read", "1234"), (1080, "insert", "99")],
        [(1149, "truncate", None), (1149, "read", "$12.34"), (1200, "insert", "$9.00")],
    ]


@pytest.mark.parametrize("kind", ["parquet", *(pytest.param(kind, marks=pytest.mark.slow)
                                               for kind in ("duckdb", "delta"))])  # fmt: skip
@pytest.mark.parametrize("write", [retype, turn])
def test_a_snapshot_that_begins_a_version(
    kind: str,
    write: Callable[[MadeDirectory], Iterator[Changes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number, was_killed = 0, True
    while was_killed:
        log = tmp_path / str(number) / "log"
        log.parent.mkdir()
        tables = TABLES[kind](log.parent)
        with contextlib.closing(MadeDirectory(log)) as made:
            parts = write(made)
            next(parts)
            assert not is_killed(log, tables, Calls(1 << 30), monkeypatch)
            (expected,) = parts
        was_killed = is_killed(log, tables, Calls(number), monkeypatch)
        if was_killed:
            assert not is_killed(log, tables, Calls(1 << 30), monkeypatch)
        assert changes_of(tables) == expected, number
        if tables.has_state:
            notes = {row["note"] for row in tables.state("public.t").to_pylist()}
            assert notes == {note for _, _, note in expected[1]} - {None}
        number += 1
    assert number > 10


def changes_of(tables: Tables) -> Changes:
    return [
        [
            (row["commit_lsn"], row["op"], row["after"] and row["after"]["note"])
            for row in sorted(rows.to_pylist(), key=lambda row: (row["commit_lsn"], row["seq"]))
        ]
        for rows in (tables.changes("public.t", version) for version in (1, 2))
    ]
