"""`ChangeLog.consumer`: a program of one's own, killed between any two of its steps."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory, catalog_read
from support.expected_errors import expect_error
from support.paths import ROOT
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.changelog import ChangeLog, Position
from pgoutput_fast.changelog.consumers import consumers
from pgoutput_fast.changelog.schema_history import HistoryWriter
from pgoutput_fast.errors import PgOutputError, RetryableError
from pgoutput_fast.segments import SegmentReader

T = testing.Table("t", {"id": "int4", "name": "text"}, relation_id=16384)
LATE = testing.Table("late", {"id": "int4"}, relation_id=16385)


class KilledError(Exception):
    """Stands for the end of the process."""


class Store:
    """Changes and position, which are stored together."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, str, Any]] = []
        self.position: Position | None = None


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    """A change log with three commits, and a snapshot of a table that joined between them."""
    with contextlib.closing(MadeDirectory(tmp_path / "log")) as one:
        one.commit(1100, T.relation(), testing.insert(T, [1, "a"]))
        one.wait(LATE, 1110)
        one.commit(1200, testing.update(T, [1, "b"]), LATE.relation(), testing.insert(LATE, [8]))
        one.copy(LATE, 1300, [[7], [8]])
        one.commit(1400, testing.insert(T, [2, "c"]), testing.insert(LATE, [9]))
        yield one


def consume(log: Path, store: Store, step: Callable[[], None], **options: Any) -> None:
    """Store all that is there; `step` may end it between any two steps."""
    with ChangeLog(log).consumer("own", position=store.position, **options) as consumer:
        while (found := consumer.next(max_bytes=1)) is not None:
            step()
            rows = [
                (changes.relation.name, row["commit_lsn"], row["seq"], row["op"], row["after"])
                for changes, batch in found
                for row in batch.to_pylist()
            ]
            step()
            store.rows, store.position = store.rows + rows, found.position
            step()
            consumer.advance(found.position)
            step()


def test_each_change_once_under_kills(made: MadeDirectory) -> None:
    whole = Store()
    consume(made.directory, whole, lambda: None, target="portable")
    assert [(name, op, row and row["id"]) for name, _, _, op, row in whole.rows] == [
        ("t", "insert", 1), ("t", "update", 1), ("t", "insert", 2),
        ("late", "truncate", None), ("late", "read", 7), ("late", "read", 8), ("late", "insert", 9),
    ]  # fmt: skip
    for kill in range(20):
        (made.directory / "consumers" / "own.json").unlink()
        store, left = Store(), [kill]

        def step(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise KilledError

        with contextlib.suppress(KilledError):
            consume(made.directory, store, step, target="portable")
        if store.position is not None:
            store.position = Position.from_json(store.position.to_json())
        consume(made.directory, store, lambda: None, target="portable")
        assert store.rows == whole.rows
    assert consumers(made.directory)[0].position == whole.position


def test_tables_and_policies_of_a_consumer(made: MadeDirectory) -> None:
    store = Store()
    consume(made.directory, store, lambda: None, tables=["public.late"], policies=pf.Policies())
    assert {row[0] for row in store.rows} == {"late"}
    with pytest.raises(TypeError, match="policies"):
        ChangeLog(made.directory).consumer("other", policies="infinity=null")  # type: ignore[arg-type]
    assert [one.name for one in consumers(made.directory)] == ["own"]


def test_one_process_reads_under_a_name(made: MadeDirectory) -> None:
    log = ChangeLog(made.directory)
    with log.consumer("own"), expect_error(code="in_use"):
        log.consumer("own")
    with log.consumer("own") as consumer:
        assert consumer.position.lsn < 1100


def test_another_change_log_is_refused(made: MadeDirectory) -> None:
    beyond = Position(1 << 40, {})
    with (
        ChangeLog(made.directory).consumer("own", position=beyond) as consumer,
        expect_error(code="another_history", path=str(made.directory)),
    ):
        consumer.next()
    with expect_error(code="unfit_input"):
        Position.from_json('{"position": 5}')
    with expect_error(code="missing_path"):
        ChangeLog(made.directory / "none").consumer("own")


def test_a_closed_consumer(made: MadeDirectory) -> None:
    with ChangeLog(made.directory).consumer("own") as consumer:
        changes = consumer.next()
        assert changes is not None
        beyond = Position(changes.position.lsn + 1_000, {})
        with expect_error(code="unfit_input"):
            consumer.advance(beyond)
    with expect_error(code="unfit_input"):
        consumer.next()
    with expect_error(code="unfit_input"):
        consumer.advance(changes.position)


def test_files_without_changes_of_the_tables_are_not_read(
    made: MadeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lsn in range(2000, 3000, 100):
        made.commit(lsn, testing.update(T, [1, "d"]))
    reads, batches = [], SegmentReader.__iter__
    monkeypatch.setattr(
        SegmentReader, "__iter__", lambda self: reads.append(self.path.name) or batches(self)
    )
    with ChangeLog(made.directory).consumer("late", tables=["public.late"]) as consumer:
        changes = consumer.next()
        assert changes is not None
        found = [row for _, batch in changes for row in batch.to_pylist()]
    assert [row["op"] for row in found] == ["truncate", "read", "read", "insert"]
    # Two files of the snapshot, and two of thirteen segments; the snapshot lies within one of them.
    assert len({*reads}) == 4
    assert len(reads) == 5


def test_a_value_whose_type_may_have_been_altered(made: MadeDirectory) -> None:
    """The capture has not read the catalogue since, so the value may fit soon."""
    history = HistoryWriter(made.directory, 0)
    history.note(catalog_read(1500, T))
    made.commit(2000, testing.insert(T, ["no number", "a"]))
    with ChangeLog(made.directory).consumer("own") as consumer:

        def read() -> None:
            changes = consumer.next()
            assert changes is not None
            assert [*changes]

        with expect_error(RetryableError, code="bad_value"):
            read()
        history.note(catalog_read(3000, T))
        with pytest.raises(PgOutputError) as caught:
            read()
        assert (caught.value.code, caught.type) == ("bad_value", PgOutputError)


def test_what_comes_later_is_followed(made: MadeDirectory) -> None:
    stop, seen = threading.Event(), []
    with ChangeLog(made.directory).consumer("own") as consumer:
        for found in consumer.follow(stop):
            seen += [row for _, batch in found for row in batch.column("op").to_pylist()]
            consumer.advance(found.position)
            if "delete" in seen:
                stop.set()
            else:
                made.commit(1500 + len(seen), testing.delete(T, [1, None]))
    assert seen.count("delete") == 1


def test_the_example_is_killed(made: MadeDirectory, tmp_path: Path) -> None:
    script, file = ROOT / "examples" / "read_change_log.py", tmp_path / "changes.sqlite"

    def ids() -> list[int]:
        with contextlib.closing(sqlite3.connect(file)) as store:
            try:
                rows = store.execute("SELECT row FROM changes WHERE op = 'insert'").fetchall()
            except sqlite3.OperationalError:  # it has no table yet
                return []
        return sorted(json.loads(row)["id"] for (row,) in rows)

    expected = [1, 2, 9]
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen([sys.executable, script, made.directory, file]) as process:
            wait_until(lambda wanted=expected: ids() == wanted)
            process.send_signal(number)
        made.commit(2000 + 100 * len(expected), testing.insert(T, [len(expected) + 7, "x"]))
        expected = sorted([*expected, len(expected) + 7])
    assert process.returncode == 0
