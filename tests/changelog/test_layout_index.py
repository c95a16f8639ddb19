"""The layout index of a file says what a reader of its frames finds."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.merged import merge
from support.changelogs.written_segments import METADATA, rows, writer
from support.columns.columnar import IMPLEMENTATIONS, chosen

from pgoutput_fast import testing
from pgoutput_fast.changelog import layouts_file, merging
from pgoutput_fast.changelog.read_plan import Position, ReadPlan
from pgoutput_fast.changelog.snapshot_states import Snapshot
from pgoutput_fast.changelog.snapshots import SnapshotFiles, snapshot_path
from pgoutput_fast.changelog.view import view_of
from pgoutput_fast.protocol.messages import decode_rare
from pgoutput_fast.segments import Segment, SegmentReader, list_segments
from pgoutput_fast.segments import writer as writing
from pgoutput_fast.segments.layout_index import Span

MOODS = [testing.UserType(16300, name) for name in ("mood", "temper")]
# The same number of a slot in the compiled twin, and another table.
TABLES = [16400, 16400 + 256, 16500]

KINDS = ["insert", "insert", "delete", "truncate", "alter", "rename"]


def relation(oid: int, version: int) -> bytes:
    columns: dict[str, Any] = {"id": "int4"} | {f"c{i}": "text" for i in range(version)}
    if oid == TABLES[0]:
        columns["feels"] = MOODS[0]
    return testing.Table(f"t{oid}", columns, oid).relation()


def random_frames(rng: random.Random, most: int) -> list[bytes]:
    """Return some frames of one transaction."""
    frames: list[bytes] = []
    for kind in rng.choices(KINDS, k=rng.randrange(1, most)):
        table = rng.choice(TABLES)
        frames.append(
            {
                "insert": lambda oid: testing.insert(oid, ["x" * rng.randrange(30)]),
                "delete": lambda oid: testing.delete(oid, ["x"]),
                "truncate": lambda oid: testing.truncate(sorted({oid, rng.choice(TABLES)})),
                "alter": lambda oid: relation(oid, rng.randrange(3)),
                "rename": lambda _: testing.type_(rng.choice(MOODS)),
            }[kind](table)
        )
    return frames


def expected(segment: Segment) -> list[Span]:
    """The spans of a file, one frame after the other."""
    types: dict[int, bytes] = {}
    layouts: dict[int, tuple[bytes, tuple[bytes, ...]]] = {}
    spans: list[Span] = []
    for row in rows(segment):
        frame, tag = row["data"], row["data"][:1]
        relation_ids: list[int] = []
        if tag in (b"I", b"D"):
            relation_ids = [int.from_bytes(frame[1:5], "big")]
        elif tag in (b"Y", b"R", b"T"):
            message: Any = decode_rare(frame, in_stream=False, encoding="utf-8")
            if tag == b"Y":
                types[message.type_id] = frame
            elif tag == b"T":
                relation_ids = list(message.relation_ids)
            else:
                used = sorted({one.type_id for one in message.columns} & types.keys())
                layouts[message.relation_id] = frame, tuple(types[oid] for oid in used)
        for oid in relation_ids:
            lsn = row["commit_lsn"]
            of_table = [i for i, span in enumerate(spans) if span.relation_id == oid]
            if not of_table or spans[of_table[-1]][-2:] != layouts[oid]:
                of_table.append(len(spans))
                spans.append(Span(oid, 0, 0, 0, lsn, lsn, *layouts[oid]))
            span = spans[of_table[-1]]
            is_change = tag != b"T"
            spans[of_table[-1]] = span._replace(
                changes=span.changes + is_change, size=span.size + is_change * len(frame),
                truncates=span.truncates + (not is_change), last_commit_lsn=lsn,
            )  # fmt: skip
    return spans


def by_table(spans: list[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in spans:
        found.setdefault(span.relation_id, []).append(span)
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_index_says_what_a_file_has(
    implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_FRAMES", 5)
    monkeypatch.setattr(writing, "_LEAST_PART", 300)
    monkeypatch.setattr(merging, "FAN", 2)
    rng = random.Random(implementation)
    first = [testing.type_(MOODS[0]), *(relation(oid, 0) for oid in TABLES)]
    with chosen(implementation), writer(tmp_path, segment_bytes=2000) as out:
        for number in range(30):
            lsn = 100 + 20 * number
            is_short = number > 15  # for segments of one part, which are merged
            body = [*(first if not number else []), *random_frames(rng, 4 if is_short else 60)]
            frames = [testing.begin(7, lsn, -5), *body, testing.commit(lsn, lsn + 10, -5)]
            out.write_frames(frames, [lsn] * len(frames))
            if is_short:
                out.flush()
        out.flush()
        segments = list_segments(tmp_path)
        assert merge(tmp_path, 1 << 20) is not None
        most = 0
        for segment in [*segments, *list_segments(tmp_path)]:
            with SegmentReader(segment.path) as reader:
                found = by_table(reader.index)
            assert found == by_table(expected(segment))
            most = max([most, *map(len, found.values())])
    assert max(segment.parts for segment in segments) > 1
    assert most > 1


def test_files_of_a_snapshot_have_an_index(tmp_path: Path) -> None:
    copy = Snapshot(16500, 1, True, "waiting", 300)
    files = SnapshotFiles(tmp_path, copy, METADATA, 300, 7, [relation(16500, 1)])
    files.begin()
    rows_ = testing.insert(16500, ["1"]) * 3
    size = len(rows_) // 3
    assert files.write(1, [(rows_, [0, size, 2 * size, 3 * size])]) == 3
    found = []
    for number in (0, 1):
        with SegmentReader(snapshot_path(tmp_path, copy, number)) as reader:
            found += reader.index
    layout = relation(16500, 1), ()
    assert found == [
        Span(16500, 0, 0, 1, 299, 299, *layout),
        Span(16500, 3, 3 * size, 0, 299, 299, *layout),
    ]


def test_a_reader_of_one_table_opens_no_file_without_its_changes(tmp_path: Path) -> None:
    busy, quiet = TABLES[:2]
    with writer(tmp_path) as out:
        for number in range(20):
            lsn = 100 + 20 * number
            tables = [busy, quiet] if number in (0, 7) else [busy]
            frames = [relation(oid, 0) for oid in tables] if not number else []
            frames += [testing.insert(oid, ["x"]) for oid in tables]
            frames = [testing.begin(7, lsn, -5), *frames, testing.commit(lsn, lsn + 10, -5)]
            out.write_frames(frames, [lsn] * len(frames))
            out.flush()
    segments = list_segments(tmp_path)
    wanted = [(segments[number].path,) for number in (0, 7)]
    view = view_of(tmp_path)
    position = view.first_position()
    alone = view.of_table(quiet).plan(position)
    assert alone is not None
    assert [read.files for read in alone.of_table(quiet)] == wanted
    assert alone.after == Position(490, {})
    apart = view.plan(position, table=quiet)
    assert apart is not None
    assert [read.files for read in apart.reads] == wanted
    assert apart.after == Position(position.lsn, {quiet: 490})
    # It passes segments that have nothing of it.
    rest = view.plan(Position(490, {quiet: 300}), table=quiet)
    assert rest == ReadPlan([], Position(490, {quiet: 490}))
    everything = view.plan(position)
    assert everything is not None
    assert len(everything.reads) == 20


def test_one_file_gathers_what_segments_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_one(lsn: int, table: int) -> Path:
        with writer(tmp_path) as out:
            frames = [testing.begin(7, lsn, -5), relation(table, 0), testing.insert(table, ["x"])]
            frames.append(testing.commit(lsn, lsn + 10, -5))
            out.write_frames(frames, [lsn] * len(frames))
            out.flush()
        return list_segments(tmp_path)[-1].path

    opened: list[Path] = []
    open_ = SegmentReader.__init__

    def counted(self: SegmentReader, path: Path) -> None:
        opened.append(path)
        open_(self, path)

    def relation_ids(*paths: Path) -> list[set[int]]:
        opened.clear()
        gathered_ = layouts_file.LayoutsReader(tmp_path)
        return [{*gathered_.relation_ids(path)} for path in paths]

    monkeypatch.setattr(SegmentReader, "__init__", counted)
    first, second = write_one(100, TABLES[0]), write_one(200, TABLES[1])
    assert relation_ids(first, second) == [{TABLES[0]}, {TABLES[1]}]
    assert opened == [first, second]
    gatherer = layouts_file.LayoutsWriter(tmp_path)
    gatherer.gather()
    assert relation_ids(first, second) == [{TABLES[0]}, {TABLES[1]}]
    assert opened == []
    # A line that a crash cut short, another file under a name, and one that came since.
    third = write_one(300, TABLES[2])
    file = tmp_path / "layouts.txt"
    file.write_bytes(file.read_bytes()[:-3])
    os.utime(first)
    assert relation_ids(first, second, third) == [{one} for one in TABLES]
    assert opened == [first, second, third]
    layouts_file.LayoutsWriter(tmp_path).gather()
    assert relation_ids(second, third) == [{TABLES[1]}, {TABLES[2]}]
    assert opened == []
    # What is gone goes from the file too.
    monkeypatch.setattr(layouts_file, "_FEW", 0)
    for path in (first, second):
        path.unlink()
    layouts_file.LayoutsWriter(tmp_path).gather()
    assert relation_ids(third) == [{TABLES[2]}]
    assert [line.split()[1] for line in file.read_text().split("\n") if line] == [third.name]
