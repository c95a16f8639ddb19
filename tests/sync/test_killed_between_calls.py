"""The built-in targets, killed between two calls: each change is there once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.targets.synced_tables import TABLES, Tables

from pgoutput_fast import apply
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
