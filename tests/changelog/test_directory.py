"""Merging, retention and consumers of a directory: what the model of its rules does not look at."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.merged import merge
from support.changelogs.written_segments import (
    METADATA,
    begin,
    commit,
    data,
    insert,
    message,
    relation,
    rows,
    transaction,
    write,
    writer,
)
from support.expected_errors import expect_error

from pgoutput_fast._disk import claim_directory
from pgoutput_fast.changelog import merging
from pgoutput_fast.changelog.consumers import Consumer, consumers, remove_consumer
from pgoutput_fast.changelog.merging import FAN, delete_covered, mergeable, merges
from pgoutput_fast.changelog.read_plan import (
    CommitRange,
    Position,
    ReadRanges,
    first_position,
    next_ranges,
)
from pgoutput_fast.changelog.requests import forget_request, request_copy, requested
from pgoutput_fast.changelog.retention import Keep, forget_dropped, retain
from pgoutput_fast.changelog.snapshot_states import Snapshot, SnapshotStates, TableSnapshots
from pgoutput_fast.changelog.snapshots import snapshot_path
from pgoutput_fast.segments import SegmentReader, SegmentWriter, copying, list_segments, listing
from pgoutput_fast.segments.listing import contents


def arrow_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.arrow"))


def sent(lsn: int, *body: bytes) -> list[tuple[int, bytes]]:
    """A transaction with the LSNs that a server gives: 0 for a Relation."""
    found = transaction(lsn, *body, announces=False)
    return [(0 if frame[:1] == b"R" else at, frame) for at, frame in found]


def many(directory: Path, count: int, **options: Any) -> None:
    """Segments of one transaction each; the first announces both tables, every third one."""
    with writer(directory, **options) as out:
        for number in range(1, count + 1):
            tables = [relation(1 + number % 2, f"t{number % 2}")] if number % 3 == 1 else []
            tables += [relation(1, "t0")] if number == 1 else []
            write(out, sent(100 * number, *tables, insert(1 + number % 2)))
            out.flush()


def test_a_merged_segment_has_what_those_before_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BATCH_FRAMES", 8)
    many(tmp_path, FAN)
    with writer(tmp_path) as out:
        write(out, [(1650, message(1650))], transaction(1700, insert()))
        out.flush()
    before = list_segments(tmp_path)
    told = [row for segment in before for row in rows(segment) if row["lsn"]]
    merged = merge(tmp_path, 1 << 20)
    assert merged is not None
    assert list_segments(tmp_path) == [merged, before[-1]]
    assert merged[:4] == (50, 1610, 0, 1)
    found = rows(merged)
    assert [row for row in found if row["lsn"]] + [
        row for row in rows(before[-1]) if row["lsn"]
    ] == told
    # Tables are announced where the server did so, and not where a file only repeated them.
    announced = [row["data"] for row in found if not row["lsn"]]
    first = [relation(2, "t1"), relation(1, "t0")]
    others = [relation(1 + n % 2, f"t{n % 2}") for n in range(4, FAN + 1, 3)]
    assert announced == first + others
    # Readers that have listed the directory before still find the files.
    assert delete_covered(tmp_path, 60) == 0
    assert [segment.path.exists() for segment in before] == [True] * (FAN + 1)
    assert delete_covered(tmp_path, 0) == FAN
    assert arrow_files(tmp_path) == [merged.name, before[-1].name]
    # A capture goes on behind them.
    with writer(tmp_path, confirmed=1700) as out:
        assert out.position == 1710


def test_tables_that_change_between_merged_segments(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        for number in range(1, FAN + 1):
            frames = [relation(1, "old" if number < 3 else "new")] if number in (1, 3) else []
            write(out, sent(100 * number, *frames, insert()))
            out.flush()
    merged = merge(tmp_path, 1 << 20)
    assert merged is not None
    assert data(merged)[:10] == [
        begin(100), relation(1, "old"), insert(), commit(100, 110),
        begin(200), insert(), commit(200, 210),
        begin(300), relation(1, "new"), insert(),
    ]  # fmt: skip
    assert (
        data(merged)[10:]
        == [
            frame
            for lsn in range(300, 100 * FAN + 1, 100)
            for frame in (begin(lsn), insert(), commit(lsn, lsn + 10))
        ][2:]
    )


def test_segments_of_sessions_of_other_forms_are_not_merged(tmp_path: Path) -> None:
    """A file says once whether its values are binary."""
    binary = dataclasses.replace(METADATA, options={"proto_version": "1", "binary": "true"})
    for metadata, first, count in ((binary, 1, 3), (METADATA, 4, FAN)):
        with SegmentWriter(tmp_path, metadata, confirmed_flush_lsn=50) as out:
            for number in range(first, first + count):
                write(out, sent(100 * number, relation(1), insert()))
                out.flush()
    merged = merge(tmp_path, 1 << 20)
    assert merged is not None
    assert (merged.start_lsn, merged.end_lsn) == (310, 100 * (FAN + 3) + 10)
    with SegmentReader(merged.path) as reader:
        assert not reader.metadata.is_binary
    assert merge(tmp_path, 1 << 20) is None


def test_which_segments_are_merged() -> None:
    small, large = 3000, 1 << 20
    assert mergeable([small] * (FAN - 1), large) is None
    assert mergeable([large, *[small] * FAN], large) == (1, FAN + 1)
    assert mergeable([small, 0, *[small] * FAN], large) == (2, FAN + 2)  # 0: it has parts
    assert mergeable([small] * FAN, FAN * small - 1) is None
    assert mergeable([small] * FAN, FAN * small) == (0, FAN)
    # Those that were merged are merged again with others of their kind, not with small ones.
    sizes = [FAN * 4096 + 1] * (FAN - 1) + [small] * (FAN - 1)
    assert mergeable(sizes, 1 << 30) is None
    assert mergeable([*sizes, small], 1 << 30) == (FAN - 1, 2 * FAN - 1)


def test_frames_are_copied_once_for_each_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = 0
    add = copying.SegmentCopy.add

    def counted(self: copying.SegmentCopy, path: Path) -> None:
        nonlocal copied
        copied += 1
        add(self, path)

    monkeypatch.setattr(copying.SegmentCopy, "add", counted)
    monkeypatch.setattr(merging, "FAN", 4)
    for number in range(64):
        with writer(tmp_path, confirmed=0) as out:
            write(out, transaction(100 * number + 100, insert(value=b"x" * 4000)))
            out.flush()
        for _ in merges(tmp_path, 1 << 20):
            delete_covered(tmp_path, 0)
    assert len(arrow_files(tmp_path)) <= 12
    assert copied <= 64 * 3
    commits = [row for one in list_segments(tmp_path) for row in rows(one) if row["seq"] == 0]
    assert [row["commit_lsn"] for row in commits] == [100 * n for n in range(1, 65)]


def test_all_that_one_listing_merges_is_what_steps_with_a_listing_each_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FAN", 3)
    chance = random.Random(3)
    with writer(tmp_path / "one", confirmed=0) as out:
        for number in range(80):
            value = b"x" * chance.choice((10, 10, 10, 10, 9000, 40_000))
            write(out, transaction(100 * number + 100, insert(value=value)))
            out.flush()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    steps = len([*merges(tmp_path / "one", 60_000)])
    assert steps > 10
    while merge(tmp_path / "other", 60_000) is not None:
        steps -= 1
    assert steps == 0
    assert arrow_files(tmp_path / "one") == arrow_files(tmp_path / "other")


def test_retention_keeps_what_consumers_need(tmp_path: Path) -> None:
    many(tmp_path, 6)
    consumer = Consumer(tmp_path, "lake")
    assert consumer.position == Position(50, {})
    consumer.advance(Position(310, {}))
    with writer(tmp_path, confirmed=610) as out:
        assert retain(tmp_path, Keep(), out.store_position) == 0
        assert retain(tmp_path, Keep(bytes=0), out.store_position) == 3
        assert [one.start_lsn for one in list_segments(tmp_path)] == [310, 410, 510]
        plan = consumer.plan()
        assert plan is not None
        assert plan.after == Position(610, {})
        assert [read.files for read in plan.reads] == [
            (one.path,) for one in list_segments(tmp_path)
        ]
        with expect_error(code="no_consumer", path=str(tmp_path)):
            remove_consumer(tmp_path, "lak")
        remove_consumer(tmp_path, "lake")
        assert consumers(tmp_path) == []
        assert retain(tmp_path, Keep(seconds=1000), out.store_position) == 0
        oldest = list_segments(tmp_path)[0].path
        os.utime(oldest, (0, 0))
        assert retain(tmp_path, Keep(seconds=1000), out.store_position) == 1
        sizes = [one.path.stat().st_size for one in list_segments(tmp_path)]
        assert retain(tmp_path, Keep(bytes=sum(sizes)), out.store_position) == 0
        assert retain(tmp_path, Keep(bytes=sizes[-1]), out.store_position) == 1
        assert retain(tmp_path, Keep(bytes=0), out.store_position) == 1
    assert arrow_files(tmp_path) == []
    assert contents(tmp_path) == ([], 610, 610)
    # With every segment gone the next capture goes on, and nobody sees a gap.
    with writer(tmp_path, confirmed=610) as out:
        assert out.position == 610
        write(out, transaction(700, insert()))
        out.flush()
    assert [one[:2] for one in list_segments(tmp_path)] == [(610, 710)]


def test_a_consumer_whose_segments_are_gone_is_told(tmp_path: Path) -> None:
    many(tmp_path, 3)
    consumer = Consumer(tmp_path, "lake")
    consumer.advance(Position(110, {16384: 50}))
    (tmp_path / "consumers" / "lake.json").rename(tmp_path / "kept")
    with writer(tmp_path, confirmed=310) as out:
        retain(tmp_path, Keep(bytes=0), out.store_position)
    with expect_error(code="no_consumer", path=str(tmp_path)):
        consumer.advance(Position(310, {}))
    (tmp_path / "kept").rename(tmp_path / "consumers" / "lake.json")
    with expect_error(code="changes_missing", path=str(tmp_path)):
        Consumer(tmp_path, "lake").plan()


def test_the_states_of_dropped_tables_are_forgotten(tmp_path: Path) -> None:
    many(tmp_path, 3)  # up to 310
    tables = SnapshotStates(tmp_path)
    for oid in (1, 2, 3, 4):
        tables.finish(tables.wait(oid, 99, {}, first=True), 100, {})
        tables.leave(oid, 200 if oid < 4 else 400, {})
    # What a kill leaves beside it.
    kept = tmp_path / "tables" / Snapshot(1, 1, True, "waiting", 99).name
    kept.write_text("{}")
    file = snapshot_path(tmp_path, tables.states[2].all_snapshots[0], 0)
    file.parent.mkdir()
    file.touch()
    (tmp_path / "consumers").mkdir()

    def forgotten(as_of: int = 300) -> list[int]:
        return forget_dropped(tmp_path, tables, {3, 5}, as_of)  # 3 has only left the publication

    assert forgotten() == []  # its changes are there
    consumer = Consumer(tmp_path, "lake")
    consumer.advance(Position(310, {1: 199}))
    with writer(tmp_path, confirmed=310) as out:
        (tmp_path / "consumers" / "lake.json").rename(tmp_path / "aside")
        retain(tmp_path, Keep(bytes=0), out.store_position)
        (tmp_path / "aside").rename(tmp_path / "consumers" / "lake.json")
    file.touch()
    assert forgotten() == []  # a consumer has not read it
    consumer.advance(Position(310, {}))
    assert forgotten(as_of=199) == []  # it may have been made since
    assert forgotten() == [1]
    assert not kept.exists()
    assert [*SnapshotStates(tmp_path).read()] == [*tables.states] == [2, 3, 4]
    file.unlink()
    assert forgotten() == [2]


def test_a_writer_reads_the_states_of_tables_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], SnapshotStates.read
    monkeypatch.setattr(SnapshotStates, "read", lambda self: reads.append(self) or read(self))
    tables = SnapshotStates(tmp_path)
    for oid in range(1, 4):
        tables.finish(tables.wait(oid, 99, {}, first=True), 100, {})
        tables.wait(oid, 500, {}, first=False)
    tables.leave(2, 700, {})
    assert reads == [tables]
    assert tables.states == read(SnapshotStates(tmp_path))
    assert {oid: copy.lsn for oid, copy in tables.waiting.items()} == {1: 500, 3: 500}


def test_a_damaged_consumer_and_wrong_names_are_refused(tmp_path: Path) -> None:
    many(tmp_path, 1)
    for name in ("", "a/b", ".a", "ä", "x" * 64):
        with expect_error(code="bad_option"):
            Consumer(tmp_path, name)
    Consumer(tmp_path, "lake")
    path = tmp_path / "consumers" / "lake.json"
    for text in ("", "{}", '{"position": 1, "tables": {}, "seen": 1.0}', "[]"):
        path.write_text(text)
        with expect_error(code="damaged", path=str(path)):
            consumers(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        '{"table": "public.t"}',
        '{"table": ["public"]}',
        '{"table": ["public", 7]}',
        '{"table": [], "members": 5}',
        '{"table": ["public", "t"], "members": ["5"]}',
        '{"generated": {"16384/2": "16390"}}',
        '{"rows": "many"}',
        "[1]",
    ],
)
def test_a_mark_that_was_changed_is_refused(tmp_path: Path, content: str) -> None:
    tables = SnapshotStates(tmp_path)
    copy = tables.wait(16384, 100, {"table": ["public", "t"]}, first=True)
    path = tmp_path / "tables" / copy.name
    path.write_text(content)
    with expect_error(code="damaged", path=str(path)):
        tables.fields(copy)


def test_requests_that_cannot_be_read(tmp_path: Path) -> None:
    assert requested(tmp_path) == {}
    request_copy(tmp_path, 16384, ["public", "t"], "a test asks")
    assert requested(tmp_path) == {16384: (["public", "t"], "a test asks")}
    place = tmp_path / "requests"
    (place / "16385.json").write_text('{"table": ["public", "t"]}')
    with expect_error(code="damaged", path=str(place / "16385.json")):
        requested(tmp_path)
    (place / "16385.json").unlink()
    (place / "16385.json").mkdir()
    with expect_error(code="io_failed", path=str(place / "16385.json")):
        requested(tmp_path)
    (place / "16385.json").rmdir()
    # One that is answered while it is looked at.
    (place / "16385.json").symlink_to(tmp_path / "gone")
    assert [*requested(tmp_path)] == [16384]
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    place.touch()
    with expect_error(code="io_failed", path=str(place)):
        requested(tmp_path)
    with expect_error(code="io_failed", path=str(place / "16384.json")):
        forget_request(tmp_path, 16384)


def test_a_segment_under_another_ones_name_is_refused(tmp_path: Path) -> None:
    many(tmp_path, 3)
    first, second, third = list_segments(tmp_path)
    second.path.write_bytes(first.path.read_bytes())
    assert list_segments(tmp_path) == [first, second, third]
    with expect_error(code="damaged", path=str(second.path)):
        rows(second)


def test_what_is_stored_while_a_directory_is_listed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(tmp_path, 2)
    with writer(tmp_path, confirmed=200) as out:

        def meanwhile(directory: Path) -> Any:
            found = listing_present(directory)
            write(out, sent(300, relation(1), insert()))
            out.flush()
            out.advance(5000)  # behind a segment that was not listed
            return found

        listing_present = listing.present
        monkeypatch.setattr(listing, "present", meanwhile)
        found = contents(tmp_path)
        monkeypatch.undo()
        assert (found.end, [one.end_lsn for one in found.segments]) == (210, [110, 210])
        assert contents(tmp_path).end == 5000


def test_what_a_table_had_that_left_while_it_waited_does_not_count(tmp_path: Path) -> None:
    tables = SnapshotStates(tmp_path)
    tables.finish(tables.wait(1, 99, {}, first=True), 100, {})
    tables.wait(1, 500, {}, first=False)  # it had left and returned
    tables.leave(1, 700, {})

    def windows(start: int, end: int) -> tuple[tuple[int, int], int]:
        read_ranges = next_ranges(Position(start, {}), tables.read(), end)
        return read_ranges.of(1).window, read_ranges.after.of(1)

    assert windows(99, 600) == ((100, 500), 500)
    assert windows(500, 900) == ((0, 0), 900)
    tables.finish(tables.wait(1, 800, {}, first=False), 850, {})
    assert windows(500, 840) == ((850, 500), 500)  # held until the copy can be read with it
    assert windows(500, 900) == ((850, 900), 900)
    assert windows(99, 900) == ((100, 500), 500)
    read_ranges = next_ranges(Position(500, {}), tables.read(), 900)
    assert [copy.lsn for copy in read_ranges.of(1).snapshots] == [850]


def test_a_table_that_waits_again_before_the_stream_reaches_its_snapshot(tmp_path: Path) -> None:
    """What was committed since the first wait comes with the snapshot: it may lack changes."""
    tables = SnapshotStates(tmp_path)
    tables.finish(tables.wait(1, 10, {}, first=True), 20, {})
    tables.finish(tables.wait(1, 30, {}, first=False), 60, {})
    tables.wait(1, 40, {}, first=False)
    assert next_ranges(Position(25, {}), tables.read(), 40).of(1)[:2] == (25, 25)
    (start, end, _, snapshots) = next_ranges(Position(25, {}), tables.read(), 70).of(1)
    assert (start, end, [one.lsn for one in snapshots]) == (25, 60, [60])


def test_where_a_new_consumer_begins_with_a_table_that_waits() -> None:
    whole, order = Snapshot(1, 1, True, "snapshot", 100), Snapshot(1, 2, False, "waiting", 500)
    states = {1: TableSnapshots((whole, order))}
    assert first_position(states, 100) == Position(100, {1: 99})
    # What came behind the copy is deleted.
    assert first_position(states, 300) == Position(300, {1: 500})
    # A table that is gone has no changes to read but those after a snapshot that is still there.
    gone = {1: TableSnapshots((whole, Snapshot(1, 2, False, "gone", 600)))}
    assert first_position(gone, 100) == Position(100, {1: 99})
    assert first_position(gone, 300) == Position(300, {1: 600})


def test_empty_ranges_do_not_decide_where_a_window_begins_or_ends() -> None:
    tables = {1: CommitRange(5, 5), 2: CommitRange(20, 30), 3: CommitRange(90, 90)}
    read_ranges = ReadRanges(CommitRange(10, 40), tables, Position(40, {}))
    assert (read_ranges.start, read_ranges.end) == (10, 30)
    nothing = ReadRanges(CommitRange(40, 40), {1: CommitRange(5, 5)}, Position(40, {}))
    assert (nothing.start, nothing.end) == (40, 40)


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    hint = (f"Make the directory {tmp_path} writable",)
    with expect_error(code="io_failed", hint=hint) as caught:
        claim_directory(tmp_path / "ro" / "x.lock", "sync", "tables", "ro/x")
    assert "can't use ro/x for tables: Permission denied" in str(caught.value)


def test_a_directory_that_is_deleted_while_it_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that was refused deletes what it had made, which another has opened by then."""
    claimed, lock, moments = tmp_path / "lake", fcntl.flock, iter([True])

    def deletes_first(descriptor: int, operation: int) -> None:
        if next(moments, False):
            claimed.rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", deletes_first)
    held = claim_directory(claimed, "sync", "tables")
    try:
        with expect_error(code="in_use", path=str(claimed)):
            claim_directory(claimed, "sync", "tables")
    finally:
        os.close(held)


def test_a_state_that_is_replaced_while_its_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may list neither the new file nor the old one; both states have the name."""
    states = SnapshotStates(tmp_path)
    fields: dict[str, object] = {"table": ["public", "accounts"]}
    waiting = states.wait(16390, 100, fields, first=True)
    list_files, snapshots = os.listdir, []

    def listdir(path: Path) -> list[str]:
        names = list_files(path)
        if not snapshots:
            snapshots.append(states.finish(waiting, 200, {**fields, "files": []}))
            names.remove(waiting.name)
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    found = SnapshotStates(tmp_path)
    assert found.read()[16390].all_snapshots == (*snapshots,)
    # Who has listed it as waiting reads what there is of it now.
    assert found.fields(waiting) == {**fields, "files": []}
    with expect_error(code="io_failed"):
        found.fields(waiting._replace(relation_id=16391))
