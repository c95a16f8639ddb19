"""Databases of users' own as targets: SQLite here, and the example for PostgreSQL."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
import sqlite3
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error
from support.paths import ROOT

from pgoutput_fast import apply, testing
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.targets import ChangeTarget
from pgoutput_fast.testing.targets import check_target

THINGS = testing.Table("things", {"id": "int4", "note": "text"}, 16390, key=["id"])
OTHER = testing.Table("other", {"id": "int4"}, 16391, key=["id"])


class SqliteTarget(ChangeTarget):
    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store = sqlite3.connect(path, isolation_level=None)
        self._store.execute("CREATE TABLE IF NOT EXISTS progress (one INTEGER PRIMARY KEY, text)")

    def load(self) -> str | None:
        found = self._store.execute("SELECT text FROM progress").fetchone()
        return None if found is None else found[0]

    def begin(self) -> None:
        self._store.execute("BEGIN")

    def _columns(self, table: str) -> dict[str, str]:
        return {row[1]: row[2] for row in self._store.execute(f"PRAGMA table_info({_q(table)})")}

    def prepare(self, table: str, schema: Any) -> bool:
        wanted = {f"after.{one.name}": f"TEXT {one.type}" for one in schema.field("after").type}
        there = self._columns(table)
        if not there:
            self._store.execute(
                f"CREATE TABLE {_q(table)} (commit_lsn, seq, op, before, unchanged)"
            )
        if any(there.get(name, type_) != type_ for name, type_ in wanted.items()):
            return False
        for name, type_ in wanted.items():
            if name not in there:
                self._store.execute(f"ALTER TABLE {_q(table)} ADD {_q(name)} {_q(type_)}")
        return True

    def append(self, table: str, changes: Any) -> None:
        for row in changes.to_pylist():
            after = {f"after.{name}": one for name, one in (row["after"] or {}).items()}
            sides = {name: json.dumps(row[name], default=str) for name in ("before", "unchanged")}
            values = {**{name: row[name] for name in ("commit_lsn", "seq", "op")}, **sides, **after}
            if values.get("after.note") == "refused":
                raise PgOutputError("it can't have this", code="unfit_value")
            given = [None if one is None else str(one) for one in values.values()]
            names = ", ".join(map(_q, values))
            marks = ", ".join("?" * len(given))
            self._store.execute(f"INSERT INTO {_q(table)} ({names}) VALUES ({marks})", given)

    def rename(self, table: str, name: str) -> None:
        if self._columns(table):
            self._store.execute(f"ALTER TABLE {_q(table)} RENAME TO {_q(name)}")

    def commit(self, progress: str) -> None:
        self._store.execute("INSERT OR REPLACE INTO progress VALUES (1, ?)", [progress])
        self._store.execute("COMMIT")

    def rollback(self) -> None:
        if self._store.in_transaction:
            self._store.execute("ROLLBACK")

    def close(self) -> None:
        self._store.close()


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def rows(path: Path, table: str) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(path)) as store:
        found = store.execute(f"PRAGMA table_info({_q(table)})").fetchall()
        if not found:
            return []
        names = [row[1] for row in found]
        read = store.execute(f"SELECT * FROM {_q(table)}").fetchall()
    made = [dict(zip(names, row, strict=True)) for row in read]
    return [
        {
            **{name: row[name] for name in ("commit_lsn", "seq", "op")},
            **{name: json.loads(row[name]) for name in ("before", "unchanged")},
            "after": {name[6:]: row[name] for name in row if name.startswith("after.")},
        }
        for row in made
    ]


def test_a_target_that_has_columns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tables.sqlite"
    kills = check_target(
        lambda: SqliteTarget(path),
        lambda name: rows(path, name),
        lambda: path.unlink(missing_ok=True),
    )
    assert kills > 25
    assert caplog.messages == []


def test_a_target_whose_rows_and_text_do_not_stand_together_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tables.sqlite"

    class WithoutTransactions(SqliteTarget):
        def begin(self) -> None:
            pass

        def commit(self, progress: str) -> None:
            self._store.execute("INSERT OR REPLACE INTO progress VALUES (1, ?)", [progress])

    with pytest.raises(AssertionError, match="killed before"):
        check_target(
            lambda: WithoutTransactions(path),
            lambda name: rows(path, name),
            lambda: path.unlink(missing_ok=True),
        )


def test_a_table_that_a_target_refuses_is_paused(tmp_path: Path) -> None:
    path = tmp_path / "tables.sqlite"
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        made.commit(1000, THINGS.relation(), testing.insert(THINGS, [1, "refused"]),
                    OTHER.relation(), testing.insert(OTHER, [1]))  # fmt: skip
        given: dict[str, Any] = {"segments": made.directory, "until": "now"}
        ended = apply.sync(target=SqliteTarget(path), **given)
        assert [*ended.paused] == ["public.things"]
        assert [row["after"] for row in rows(path, "public.other")] == [{"id": 1}]
        with expect_error(code="unfit_value"):
            apply.sync(target=SqliteTarget(path), on_error="stop", **given)


def test_what_a_target_of_ones_own_can_not_have(tmp_path: Path) -> None:
    path = tmp_path / "tables.sqlite"
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        made.commit(1000, OTHER.relation(), testing.insert(OTHER, [1]))
        given: dict[str, Any] = {"segments": made.directory, "until": "now"}
        for option, value in (
            ("keep", "state"), ("keep", "both"), ("soft_deletes", "gone"),
            ("partition_by", {"public.t": ["a"]}), ("duckdb_memory", 1 << 30),
        ):  # fmt: skip
            with expect_error(code="bad_option", parameter=option):
                apply.sync(target=SqliteTarget(path), **{option: value}, **given)
        apply.sync(target=SqliteTarget(path), **given)
    with contextlib.closing(MadeDirectory(tmp_path / "others", 2000)) as made:
        store = sqlite3.connect(path)
        ((text,),) = store.execute("SELECT text FROM progress").fetchall()
        other = {**json.loads(text), "origin": ["7000000000000000009", "shop"]}
        store.execute("UPDATE progress SET text = ?", [json.dumps(other)])
        store.commit()
        store.close()
        with expect_error(code="another_history"):
            apply.sync(segments=made.directory, target=SqliteTarget(path), until="now")


def test_a_second_sync_of_a_target_of_ones_own(tmp_path: Path) -> None:
    """The second one has another consumer, so the change log does not refuse it."""
    path = tmp_path / "tables.sqlite"

    class Overtaken(SqliteTarget):
        """Another sync writes the target after this one has begun."""

        is_overtaken = False

        def load(self) -> str | None:
            text = super().load()
            if not self.is_overtaken:
                self.is_overtaken = True
                apply.sync(target=SqliteTarget(path), consumer="other", **given)
            return text

    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        given: dict[str, Any] = {"segments": made.directory, "until": "now"}
        made.commit(1000, OTHER.relation(), testing.insert(OTHER, [1]))
        with expect_error(code="in_use"):
            apply.sync(target=Overtaken(path), **given)
    assert [row["after"] for row in rows(path, "public.other")] == [{"id": 1}]


def test_the_guide_has_the_methods_of_a_target() -> None:
    guide = (ROOT / "docs/how-to/own-target.md").read_text()
    shown = guide.partition("```text\n")[2].partition("```")[0].splitlines()
    methods = [
        name + str(inspect.signature(getattr(ChangeTarget, name))).replace("'", "")
        for name in vars(ChangeTarget)
        if name in ChangeTarget.__abstractmethods__
    ]
    assert [one.replace("pyarrow.", "pa.") for one in shown] == [
        one.replace("(self, ", "(").replace("(self)", "()") for one in methods
    ]


def test_the_order_and_the_thread_of_the_calls_of_a_target(tmp_path: Path) -> None:
    calls: list[str] = []

    class Noted(SqliteTarget):
        def __getattribute__(self, name: str) -> Any:
            if name in ChangeTarget.__abstractmethods__:
                assert threading.current_thread() is here
                calls.append(name)
            return super().__getattribute__(name)

    here = threading.current_thread()
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        made.commit(1000, OTHER.relation(), testing.insert(OTHER, [1]))
        made.commit(2000, THINGS.relation(), testing.insert(THINGS, [2, "refused"]))
        apply.sync(target=Noted(tmp_path / "tables.sqlite"), segments=made.directory, until="now")
    window = "begin load (prepare |append |rename )*(commit|rollback) "
    assert re.fullmatch(f"(load )+({window})+(rollback )?close ", " ".join(calls) + " "), calls
    assert calls.count("prepare") == 3  # OTHER again, after the rollback because of THINGS


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/change_target.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_names_and_values_of_the_example(example: ModuleType) -> None:
    names = [f"public.{'a' * 70}{number}" for number in range(2)]
    assert [len(example.short(name)) for name in names] == [63, 63]
    assert example.short(names[0]) != example.short(names[1])
    assert example.short("public.accounts") == "public.accounts"
    assert example.as_json({"a": float("nan"), "b": 1.5}) == '{"a": "NaN", "b": 1.5}'
    assert example.as_json(None) is None


@pytest.mark.slow
@pytest.mark.server
def test_the_example_for_postgres(database18: Any, example: ModuleType) -> None:
    def read(name: str) -> list[dict[str, Any]]:
        table = f"changes.{_q(name)}"
        ((is_there,),) = database18.execute(f"SELECT to_regclass($n${table}$n$) IS NOT NULL")
        if not is_there:
            return []
        names = ("commit_lsn", "seq", "op", "before", "after", "unchanged")
        found = database18.execute(f"SELECT {', '.join(names)} FROM {table}")
        return [dict(zip(names, row, strict=True)) for row in found]

    kills = check_target(
        lambda: example.PostgresTarget(database18.dsn),
        read,
        lambda: database18.execute("DROP SCHEMA IF EXISTS changes CASCADE"),
    )
    assert kills > 25
