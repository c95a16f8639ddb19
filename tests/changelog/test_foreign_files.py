"""Files that are not this package's stay, in every folder and whatever deletes files there."""

from __future__ import annotations

import ast
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.changelogs.made_directory import MadeDirectory, table
from support.changelogs.merged import merge
from support.changelogs.written_segments import (
    METADATA,
    insert,
    relation,
    transaction,
    write,
    writer,
)
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import _disk, testing
from pgoutput_fast._disk import Folder, read_json_file, temporary_path, write_whole
from pgoutput_fast.apply import sync
from pgoutput_fast.changelog.consumers import Consumer, claim_consumer, consumers, remove_consumer
from pgoutput_fast.changelog.merging import delete_covered
from pgoutput_fast.changelog.requests import forget_request, request_copy, requested
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.changelog.schema_history import HistoryWriter, forget_before
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.changelog.snapshots import delete_unfinished
from pgoutput_fast.changelog.view import view_of
from pgoutput_fast.segments import SegmentWriter, folders
from pgoutput_fast.segments.prepared import PreparedTransactions

OWN = {
    folders.SEGMENTS: "0000000000000032-000000000000006E-00000-of-00001.arrow",
    folders.TABLES: "00004000-00001-first-snapshot-0000000000000032.json",
    folders.SNAPSHOTS: "00004000-00001-00000000.arrow",
    folders.HISTORY: "0000000000000032-000000000000006E.json",
    folders.PREPARED: "0000000000000032-000002BC.arrow",
    folders.REQUESTS: "16384.json",
    folders.CONSUMERS: "reader.json",
}
"""A name of this package in each folder."""


def others(folder: Folder) -> list[str]:
    """Names that are nearly this package's, and names that file systems and people give."""
    own = OWN[folder]
    return [
        ".nfs00000000002d1b5c00000001", ".DS_Store", "._" + own, "important.csv", "notes.tmp",
        ".notes.json.tmp", own + ".bak", own + "~", own[:-1], f".{own}.tmp", f".{own}.swp",
        f".{own}.0123456789ABCDEF.tmp", f".{own}.0123456789abcdef.tmp.1", f".x{own} .0.tmp",
    ]  # fmt: skip


def fill(directory: Path, outside: Path) -> None:
    outside.mkdir()
    (outside / "theirs").write_text("outside")
    for folder in folders.FOLDERS:
        path = folder.make(directory)
        for name in others(folder):
            assert not folder.is_own(name), name
            (path / name).write_text(f"of somebody: {name}")
        (path / "theirs").mkdir()
        (path / "theirs" / OWN[folder]).write_text("deeper")
        (path / "link").symlink_to(outside)


def theirs(directory: Path, outside: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for folder in folders.FOLDERS
        for name in [*others(folder), f"theirs/{OWN[folder]}", "link/theirs"]
        for path in [directory / folder.name / name]
    } | {"outside": (outside / "theirs").read_bytes()}


def test_what_is_not_ours_stays_whatever_deletes_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, outside = tmp_path / "log", tmp_path / "outside"
    made = MadeDirectory(directory)
    orders = table(16384)
    made.wait(orders, 1000)
    made.copy(orders, 1100, [[1, "a"]])
    for number in range(20):
        made.commit(1200 + 100 * number, orders.relation(), testing.insert(orders, [number, "b"]))
    made.close()
    fill(directory, outside)
    before = theirs(directory, outside)
    left = [temporary_path(directory / folder.name / name) for folder, name in OWN.items()]
    for path in left:
        path.write_text("left by a kill")
        os.utime(path, (0, 0))

    folders.report_others(directory)
    assert len(caplog.records) == len(folders.FOLDERS)
    segment = view_of(directory).segments[0]
    merge(directory, 1 << 20)
    assert segment.path.exists()
    with SegmentWriter(directory, METADATA, confirmed_flush_lsn=1000) as out:
        assert not [path for path in left if path.exists()]
        out.store_position()
    delete_covered(directory, 0.0)
    assert not segment.path.exists()
    Consumer(directory, "reader")
    assert [one.name for one in consumers(directory)] == ["reader"]
    remove_consumer(directory, "reader")
    request_copy(directory, 16384, ["public", "orders"], "a test asks")
    assert [*requested(directory)] == [16384]
    forget_request(directory, 16384)
    (directory / "prepared" / "0000000000000032-000002BC-0000000000000046.arrow").touch()
    PreparedTransactions(directory, 1000)
    HistoryWriter(directory, None)
    forget_before(directory, 1 << 40)
    retain(directory, Keep(bytes=0), lambda: None)
    delete_unfinished(directory, {})
    SnapshotStates(directory).clear()
    assert theirs(directory, outside) == before
    kept = {name for folder in folders.FOLDERS for name in folder.names(directory)}
    assert kept <= {"position.json", "begin.json"}


@given(st.sampled_from([*OWN]), st.data())
def test_only_whole_names_are_ours(folder: Folder, data: Any) -> None:
    """One letter more, and a name is another one; with one letter less, in most cases."""
    own = OWN[folder]
    at = data.draw(st.integers(0, len(own)))
    letter = data.draw(st.sampled_from("\n /\\*\0é\u0660"))
    assert folder.is_own(own)
    assert folder.unfinished(temporary_path(Path(own)).name)
    for name in (own[:at] + letter + own[at:], f".{own}.{data.draw(st.text())}.tmp"):
        assert not folder.is_own(name)


@pytest.mark.parametrize("folder", folders.FOLDERS[1:], ids=lambda folder: folder.name)
def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, folder: Folder) -> None:
    directory, outside = tmp_path / "log", tmp_path / "outside"
    with writer(directory) as out:
        write(out, transaction(100, relation(1), insert()))
        out.flush()
    outside.mkdir()
    names = [OWN[folder], temporary_path(Path(OWN[folder])).name]
    for name in names:
        (outside / name).write_text("behind a link")
    (directory / folder.name).symlink_to(outside)
    users: dict[str, list[Callable[[], Any]]] = {
        "tables": [lambda: view_of(directory), lambda: SnapshotStates(directory).clear()],
        "snapshots": [lambda: view_of(directory), lambda: delete_unfinished(directory, {})],
        "history": [lambda: HistoryWriter(directory, None), lambda: forget_before(directory, 9)],
        "prepared": [lambda: PreparedTransactions(directory, 1 << 40)],
        "requests": [lambda: requested(directory), lambda: forget_request(directory, 16384)],
        "consumers": [
            lambda: consumers(directory), lambda: remove_consumer(directory, "reader"),
            lambda: retain(directory, Keep(bytes=0), lambda: None),
            lambda: claim_consumer(directory, "reader", "test"),
        ],
    }  # fmt: skip
    for use in [*users[folder.name], lambda: folders.report_others(directory),
                lambda: writer(directory, confirmed=110)]:  # fmt: skip
        with expect_error(code="not_ours", path=str(directory / folder.name)):
            use()
    assert sorted(path.name for path in outside.iterdir()) == sorted(names)


# --- what is written and read ------------------------------------------------------------------


def test_a_file_is_written_beside_whatever_is_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    path = tmp_path / "r.html"
    (tmp_path / ".r.html.tmp").symlink_to(outside)
    path.symlink_to(outside)
    write_whole(path, ["mine"])
    assert (path.read_text(), path.is_symlink(), outside.read_text()) == ("mine", False, "theirs")
    assert sorted(one.name for one in tmp_path.iterdir()) == [".r.html.tmp", "outside", "r.html"]


def test_a_temporary_name_that_is_taken_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    monkeypatch.setattr(_disk, "temporary_path", lambda path: path.with_name("taken"))
    for make in (lambda path: path.symlink_to(outside), lambda path: path.write_text("x")):
        make(tmp_path / "taken")
        with pytest.raises(FileExistsError):
            write_whole(tmp_path / "r.html", ["mine"])
        assert not outside.exists()
        (tmp_path / "taken").unlink(missing_ok=True)


def odd_files(directory: Path) -> Iterator[Path]:
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    link = directory / "zero"
    link.symlink_to("/dev/zero")
    yield from (fifo, link, directory)


def test_json_is_read_from_regular_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in odd_files(tmp_path):
        with pytest.raises(OSError) as refused:  # noqa: PT011 - its number is looked at
            read_json_file(path)
        assert refused.value.errno == errno.EINVAL
    monkeypatch.setattr(_disk, "MOST_JSON_BYTES", 10)
    (tmp_path / "x.json").write_text('"12345678"')
    assert json.loads(read_json_file(tmp_path / "x.json")) == "12345678"
    (tmp_path / "x.json").write_text('"123456789"')
    with pytest.raises(OSError) as refused:  # noqa: PT011 - its number is looked at
        read_json_file(tmp_path / "x.json")
    assert refused.value.errno == errno.EFBIG


def test_a_pipe_in_a_change_log_does_not_hang_its_readers(tmp_path: Path) -> None:
    for folder, own in OWN.items():
        if folder.name and own.endswith(".json"):
            os.mkfifo(folder.make(tmp_path) / own)
    os.mkfifo(tmp_path / "position.json")
    (copy,) = (
        one for state in SnapshotStates(tmp_path).read().values() for one in state.all_snapshots
    )
    for read in (
        lambda: writer(tmp_path), lambda: view_of(tmp_path), lambda: consumers(tmp_path),
        lambda: requested(tmp_path), lambda: HistoryWriter(tmp_path, None),
        lambda: SnapshotStates(tmp_path).fields(copy),
    ):  # fmt: skip
        with expect_error(code="io_failed"):
            read()


@pytest.mark.parametrize("name", ["x/../../../E", "../E", "", ".x", "a\n", "é", "x" * 64, "a/b"])
def test_names_of_consumers_are_checked_before_anything_is_made(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "a" / "b" / "c" / "log"
    MadeDirectory(directory).close()
    before = sorted(tmp_path.rglob("*"))
    for use in (
        lambda: sync(target=str(tmp_path / "lake"), segments=directory, consumer=name, until="now"),
        lambda: claim_consumer(directory, name, "test"),
        lambda: Consumer(directory, name),
        lambda: remove_consumer(directory, name),
    ):
        with expect_error(code="bad_option"):
            use()
    assert sorted(tmp_path.rglob("*")) == before


# --- one place -----------------------------------------------------------------------------------

DELETING = {"unlink", "rmtree", "remove", "removedirs"}
ELSEWHERE = {
    # Directories that the process itself has made under a random name.
    "embedded.py": {"rmtree"},
    "_server_keeper.py": {"rmtree"},
    "cli/demo.py": {"rmtree"},
    "spark/_java.py": {"rmtree"},
    "verify/databases.py": {"rmtree"},
}


@pytest.mark.slow
def test_files_are_deleted_in_one_place() -> None:
    root = Path(pf.__file__).parent
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            of_list = isinstance(node, ast.Attribute) and node.attr == "remove" and not (
                isinstance(node.value, ast.Name) and node.value.id == "os"
            )  # fmt: skip
            if isinstance(node, ast.Attribute) and node.attr in DELETING and not of_list:
                found.setdefault(str(path.relative_to(root)), set()).add(node.attr)
    assert found.pop("_disk.py") == {"unlink"}
    assert found == ELSEWHERE
