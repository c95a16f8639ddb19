"""Files of a directory that are missing or damaged: every reader refuses them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.changelogs.read_changes import changes_of
from support.changelogs.written_segments import writer
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.apply import sync
from pgoutput_fast.changelog.consumers import Consumer
from pgoutput_fast.changelog.known import known_tables
from pgoutput_fast.changelog.requests import requested
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.changelog.schema_history import read_seen
from pgoutput_fast.changelog.uploading import downloaded_from
from pgoutput_fast.changelog.view import view_of
from pgoutput_fast.segments.listing import contents, stored_metadata
from pgoutput_fast.verify.targets import DirectoryTarget

ORDERS = testing.Table("orders", {"id": "int4", "v": "text"}, 16390, key=["id"])
ITEMS = testing.Table("items", {"id": "int4", "v": "text"}, 16391, key=["id"])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    """Two tables with copies, orders in three ranges, and a change of each behind them."""
    with contextlib.closing(MadeDirectory(tmp_path / "lake")) as found:
        found.wait(ORDERS, 999)
        found.copy(ORDERS, 1001, [[1, "a"], [2, "b"]], [[3, "c"], [4, "d"]], [[5, "e"]])
        found.wait(ITEMS, 999)
        found.copy(ITEMS, 1001, [[1, "x"]])
        for lsn, table in ((1100, ORDERS), (1200, ITEMS)):
            found.commit(lsn, table.relation(), testing.insert(table, [9, "z"]))
        yield found


def snapshot(directory: Path, file_number: int, snapshot_number: int = 1) -> Path:
    return directory / "snapshots" / f"00004006-{snapshot_number:05d}-{file_number:08d}.arrow"


def state_file(directory: Path) -> Path:
    (path,) = (directory / "tables").glob("00004006-*.json")
    return path


def verified(directory: Path) -> None:
    pytest.importorskip("duckdb")
    with contextlib.closing(DirectoryTarget(directory, pf.TypeRegistry)) as found:
        found.refresh(0)


def synced(directory: Path) -> None:
    pytest.importorskip("deltalake")
    sync(segments=directory, target=f"parquet:{directory.with_name('out')}", until="now",
         on_error="stop")  # fmt: skip


def inspect(directory: Path) -> None:
    _inspect(directory)


def stats(directory: Path) -> None:
    _inspect("--stats", directory)


def _inspect(*arguments: object) -> None:
    from click.testing import CliRunner

    from pgoutput_fast.cli.inspect import command

    found = CliRunner().invoke(command, [*map(str, arguments)])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output


def spark(directory: Path) -> None:
    pytest.importorskip("pyspark")
    from pgoutput_fast.spark._planning import Planned

    Planned(directory).reads(ORDERS.relation_id)


def consumer(directory: Path) -> None:
    Consumer(directory, "reader").plan()


READERS = [changes_of, inspect, stats, verified, synced, spark, consumer]


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("damage", "code", "name"),
    [
        (lambda lake: snapshot(lake, 1).unlink(), "missing_path", "00004006-00001-00000001.arrow"),
        (lambda lake: snapshot(lake, 3).unlink(), "missing_path", "00004006-00001-00000003.arrow"),
        (lambda lake: state_file(lake).write_text("{x"), "damaged", None),
        (lambda lake: state_file(lake).write_text('{"files": ["2"]}'), "damaged", None),
    ],
)
def test_readers_refuse_a_snapshot_without_a_file(
    made: MadeDirectory,
    reader: Callable[[Path], None],
    damage: Callable[[Path], Any],
    code: str,
    name: str | None,
) -> None:
    reader(made.directory)
    shutil.rmtree(made.directory.with_name("out"), ignore_errors=True)
    shutil.rmtree(made.directory / "consumers", ignore_errors=True)
    path = made.directory / "snapshots" / name if name else state_file(made.directory)
    damage(made.directory)
    with expect_error(code=code, path=str(path)) as raised:
        reader(made.directory)
    if name:
        command = f"pgoutput-fast snapshot --dir {made.directory} --table public.orders"
        assert command in str(raised.value)


def test_a_mark_without_files_is_refused(made: MadeDirectory) -> None:
    fields = json.loads(state_file(made.directory).read_text())
    del fields["files"]
    state_file(made.directory).write_text(json.dumps(fields))
    with expect_error(code="damaged", path=str(state_file(made.directory))):
        changes_of(made.directory)


def test_what_is_read_already_is_not_needed(made: MadeDirectory) -> None:
    view = view_of(made.directory)
    plan = view.plan(view.first_position())
    assert plan is not None
    snapshot(made.directory, 1).unlink()
    made.commit(1300, testing.insert(ORDERS, [10, "y"]))
    assert len(changes_of(made.directory, position=plan.after)) == 1
    # Nor what a newer copy replaces.
    made.wait(ORDERS, 1310, first=False)
    made.copy(ORDERS, 1401, [[1, "again"]])
    made.commit(1500, testing.insert(ORDERS, [11, "y"]))
    found = changes_of(made.directory)
    assert [one["op"] for one in found if one["table"] == "orders"] == [
        "truncate", "read", "insert",
    ]  # fmt: skip


def test_a_snapshot_that_is_deleted_while_it_is_listed(made: MadeDirectory) -> None:
    made.wait(ORDERS, 1210, first=False)
    made.copy(ORDERS, 1301, [[1, "again"]])
    view = view_of(made.directory)
    first = view.states[16390].all_snapshots[0]
    view.files[16390, 1].pop(2)  # as if it was deleted while they were listed
    with expect_error(code="missing_path", path=str(snapshot(made.directory, 2))):
        view.snapshot_paths(first)
    deleted = []

    def unlink(path: Path, **_: Any) -> None:
        deleted.append(path.name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        retain(made.directory, Keep(bytes=1 << 20), made.writer.store_position)
    # Readers know by the first one that the others are being deleted.
    assert deleted == [f"00004006-00001-{number:08d}.arrow" for number in range(4)]
    snapshot(made.directory, 0).unlink()
    with expect_error(code="changes_missing", path=str(made.directory)):
        view.snapshot_paths(first)


# --- JSON files ----------------------------------------------------------------------------------

CONTENTS = [
    "", "[]", "{}", "5", "null", '"text"', "{x", "[" * 100_000, '{"a": 1}', '{"position": 5}',
    '{"position": []}', '{"begin": {}}', '{"begin": "x"}', '{"table": 5}', '{"table": ["a"]}',
    '{"table": [1, 2]}', '{"rows": "1"}', '{"files": 3}', '{"metadata": []}', '{"url": 7}',
    '{"metadata": {}, "position": "0/1"}', '{"position": "0/1", "tables": [], "seen": 1.0}',
    '{"position": "0/1", "tables": {"x": "0/1"}, "seen": 1.0}', '{"format_version": []}', "\udcff",
]  # fmt: skip


def position_readers(lake: Path) -> list[Callable[[], object]]:
    return [
        lambda: contents(lake), lambda: stored_metadata(lake), lambda: changes_of(lake),
        lambda: writer(lake, confirmed=1000).close(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("position.json", position_readers),
        ("begin.json", position_readers),
        ("tables", lambda lake: [lambda: stats(lake), lambda: known_tables(lake)]),
        ("requests/16390.json", lambda lake: [lambda: requested(lake)]),
        ("consumers/one.json", lambda lake: [lambda: Consumer(lake, "one"), lambda: stats(lake)]),
        ("history/seen.json", lambda lake: [lambda: read_seen(lake), lambda: changes_of(lake)]),
        ("download.json", lambda lake: [lambda: downloaded_from(lake)]),
    ],
)
def test_json_of_another_form_is_an_error_of_this_package(
    tmp_path: Path, name: str, readers: Callable[[Path], list[Callable[[], object]]]
) -> None:
    lake = tmp_path / "lake"
    with contextlib.closing(MadeDirectory(lake)) as made:
        made.wait(ORDERS, 999)
        made.copy(ORDERS, 1001, [[1, "a"]])
        made.commit(1100, ORDERS.relation(), testing.insert(ORDERS, [9, "z"]))
    path = state_file(lake) if name == "tables" else lake / name
    path.parent.mkdir(exist_ok=True)
    told: list[str] = []
    for content in CONTENTS:
        for reader in readers(lake):
            shutil.rmtree(lake.with_name("out"), ignore_errors=True)
            path.write_text(content, encoding="utf-8", errors="surrogateescape")
            # Some contents are allowed, as a key may be optional.
            try:
                reader()
            except pf.PgOutputError as error:
                told.append(str(error))
    assert len(told) >= 10
    assert [one for one in told if path.name not in one or "object has no" in one] == []
