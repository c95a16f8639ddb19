"""Frames that are decoded by the Relation that holds at their LSN, made of frames by hand."""

from __future__ import annotations

import pickle

import pytest
from pyspark.errors import PySparkException
from spark_frames import INT4, TEXT, begin, commit, insert, land, partitions, relation, transaction

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments import SegmentReader, list_segments
from pgoutput_fast.spark import (
    RelationRange,
    RelationRanges,
    decode_frames,
    error_of,
    relations_of,
)

pytestmark = pytest.mark.spark

# ALTER TABLE t DROP a, ADD c: both versions have three columns of the same types.
OLD = relation(1, "t", {"id": INT4, "a": TEXT, "b": TEXT})
NEW = relation(1, "t", {"id": INT4, "b": TEXT, "c": TEXT})
OTHER = relation(2, "other", {"id": INT4})
STREAM = [
    OLD, OTHER,
    *transaction(1100, 7, insert(1, "1", "a1", "b1"), insert(2, "5"), insert(1, "2", "a2", "b2")),
    NEW,
    *transaction(1200, 8, insert(1, "3", "b3", "c3"), testing.truncate([2, 1])),
]  # fmt: skip
LSNS = [n for n, frame in enumerate(STREAM, 1000) if frame[:1] not in b"RY"]
ROWS = [(n, frame) for n, frame in enumerate(STREAM, 1000) if frame[:1] not in b"RY"]
COLUMNS = "lsn bigint, data binary"
DECODED = [
    (1, "insert", (1, "b1", None), ["c"]),
    (1, "insert", (2, "b2", None), ["c"]),
    (2, "insert", (3, "b3", "c3"), None),
    (2, "truncate", None, None),
]


def decoded(changes):
    return [
        (1 if row.lsn < 1009 else 2, row.op, row.after and tuple(row.after), row.unchanged)
        for row in changes.orderBy("lsn").collect()
    ]


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_the_lsns_of_relations_in_segments(tmp_path, segment_bytes):
    directory = land(tmp_path / "s", STREAM, segment_bytes=segment_bytes)
    found = relations_of(directory)
    assert found.ranges == (
        RelationRange(1003, 1006, OLD),
        RelationRange(1009, 1011, NEW),
        RelationRange(1004, 1011, OTHER),
    )
    assert found.types == ()
    assert pickle.loads(pickle.dumps(found)) == found
    assert relations_of([one.path for one in list_segments(directory)]) == found
    (tmp_path / "nothing").mkdir()
    with pytest.raises(PgOutputError, match=r"there are no segments in .* no change of the stream"):
        relations_of(tmp_path / "nothing")


def test_types_are_told_too(tmp_path):
    type_ = testing.type_(testing.UserType(70000, "positive"))
    frames = [type_, relation(1, "t", {"id": (70000, -1)}), *transaction(100, 7, insert(1, "1"))]
    assert relations_of(land(tmp_path / "s", frames)).types == (type_,)


def test_rows_of_an_altered_table_have_the_columns_of_their_time(spark, tmp_path):
    """The case that bare Relations get wrong: both versions have the same number of columns."""
    ranges = relations_of(land(tmp_path / "s", STREAM))
    assert decoded(decode_frames(partitions(spark, ROWS, columns=COLUMNS), "public.t", ranges)) == (
        DECODED
    )
    # Each row in a partition of its own, and with the wrong Relation before it, which is left out.
    alone = partitions(spark, *([row] for row in ROWS), columns=COLUMNS)
    assert decoded(decode_frames(alone, "public.t", ranges)) == DECODED
    wrong = partitions(spark, *([(0, OLD), row] for row in ROWS), columns=COLUMNS)
    assert decoded(decode_frames(wrong, "public.t", ranges)) == DECODED
    # The same between two rows of one version.
    ranged = RelationRanges(((1000, 1010, OLD), (1010, 1020, NEW)))
    between = [(1010, insert(1, "3", "b3", "c3")), (0, OLD), (1011, insert(1, "4", "b4", "c4"))]
    found = decode_frames(partitions(spark, between, columns=COLUMNS), "public.t", ranged)
    assert [tuple(row.after) for row in found.collect()] == [(3, "b3", "c3"), (4, "b4", "c4")]
    # Bare Relations can't be told apart, which the page says.
    bare = decode_frames(alone, "public.t", [NEW, OTHER])
    assert [row.after.c for row in bare.orderBy("lsn").take(2)] == ["b1", "b2"]


def test_rows_of_several_versions_in_stream_chunks(spark, tmp_path):
    ranges = relations_of(land(tmp_path / "s", STREAM))
    inside = {n: testing.in_stream(one, 70) for n, one in ROWS if one[:1] in b"IT"}
    first = [(0, testing.stream_start(70, True)), *((n, inside[n]) for n in (1003, 1004, 1005))]
    second = [(0, testing.stream_start(70, False)), (1009, inside[1009])]
    stop = (0, testing.stream_stop())
    outside = [(1002, begin(1100, 7)), (1003, insert(1, "9", "a9", "b9")), (1006, commit(1100))]
    # The version of the last chunk is that of the row behind it, where it does not hold any more.
    third = [(0, testing.stream_start(70, False)), (1003, inside[1003])]
    frames = [*first, stop, *second, stop, *third, stop, *outside]
    changes = decode_frames(partitions(spark, frames, columns=COLUMNS), "public.t", ranges)
    assert [tuple(row) for row in changes.select("subxid", "seq", "after.*").collect()] == [
        (70, 0, 1, "b1", None),
        (70, 2, 2, "b2", None),
        (70, 3, 3, "b3", "c3"),
        (70, 4, 1, "b1", None),
        (None, 0, 9, "b9", None),
    ]


def test_rows_outside_of_all_ranges_are_refused(spark, tmp_path):
    ranges = relations_of(land(tmp_path / "s", STREAM))
    late = partitions(spark, [ROWS[0], (1500, insert(1, "4", "b4", "c4"))], columns=COLUMNS)
    with pytest.raises(PySparkException) as raised:
        decode_frames(late, "public.t", ranges).collect()
    error = error_of(raised.value)
    assert type(error) is PgOutputError
    assert str(error) == (
        "public.t: partition 0, batch 0, frame 1: no Relation is known that holds at LSN 0/5DC; "
        "relations= has those for LSNs 0/3EB to 0/3ED, 0/3F1 to 0/3F2. Give relations_of() of "
        "files that have this frame"
    )
    assert (error.code, error.frame, error.path) == ("unknown_relation", 1, None)
    between = partitions(spark, [(1007, insert(1, "4", "b4", "c4"))], columns=COLUMNS)
    with pytest.raises(PySparkException, match="no Relation is known that holds at LSN 0/3EF;"):
        decode_frames(between, "public.t", ranges).collect()
    none = partitions(spark, [(None, insert(1, "4", "b4", "c4"))], columns=COLUMNS)
    with pytest.raises(PySparkException, match="frame 0: its lsn is null, so that its Relation"):
        decode_frames(none, "public.t", ranges).collect()
    bare = partitions(spark, [frame for _, frame in ROWS])
    with pytest.raises(PgOutputError, match="the frames have no column lsn: add it"):
        decode_frames(bare, "public.t", ranges)
    with pytest.raises(PgOutputError, match=r"no range of LSNs of public\.missing"):
        decode_frames(late, "public.missing", ranges)


def test_the_position_of_an_error_is_that_of_the_frame(spark, tmp_path):
    """Relations that are put between frames do not count."""
    ranges = relations_of(land(tmp_path / "s", STREAM))
    frames = [*ROWS[:3], (1010, insert(1, "x", "b", "c"))]
    with pytest.raises(PySparkException) as raised:
        decode_frames(partitions(spark, frames, columns=COLUMNS), "public.t", ranges).collect()
    error = error_of(raised.value)
    assert (error.code, error.frame, error.tag) == ("bad_value", 3, "I")
    assert "batch 0, frame 3: 'I' frame" in str(error)
    for bad, code in (testing.truncate([1])[:-1], "bad_count"), (None, None):
        frames = partitions(spark, [*ROWS[:3], (1010, bad)], columns=COLUMNS)
        with pytest.raises(PySparkException) as raised:
            decode_frames(frames, "public.t", ranges).collect()
        error = error_of(raised.value)
        assert (error.code, error.frame) == (code, 3)


def test_versions_that_lie_within_each_other_are_left_out(tmp_path):
    frames = [
        OLD, begin(2000, 7), insert(1, "1", "a", "b"), insert(1, "2", "a", "b"), commit(2000),
        NEW, begin(2100, 8), insert(1, "3", "b", "c"), insert(1, "4", "b", "c"), commit(2100),
    ]  # fmt: skip
    lsns = [0, 1000, 1010, 1030, 2000, 0, 1005, 1020, 1040, 2100]
    directory = tmp_path / "s"
    from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

    metadata = SegmentMetadata("1", "d", "s", ("p",), 180000, "UTF8", {}, {"proto_version": "1"})
    with SegmentWriter(directory, metadata, confirmed_flush_lsn=0) as writer:
        for lsn, frame in zip(lsns, frames, strict=True):
            writer.write(lsn, frame)
        writer.flush()
    assert relations_of(directory).ranges == (
        RelationRange(1010, 1020, OLD),
        RelationRange(1031, 1041, NEW),
    )


@pytest.mark.parametrize(
    ("ranges", "types", "refused"),
    [
        ([(1, 1, OLD)], [], "relation 1: the range of LSNs 0/1 to 0/0 is empty"),
        ([(1, 9, OLD), (8, 20, NEW)], [], "0/1 to 0/8 and 0/8 to 0/13 overlap"),
        ([(1, 9, insert(1, "1"))], [], "needs a Relation's frame, not b'I"),
        ([(1, 9, OLD)], [NEW], "types= takes frames of Type messages, not b'R"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges, types, refused):
    with pytest.raises(PgOutputError, match=refused):
        RelationRanges(tuple(ranges), tuple(types))


def test_ranges_by_hand(spark):
    ranges = RelationRanges(((1000, 1008, OLD), (1008, 2000, NEW), (0, 2000, OTHER)))
    frames = partitions(spark, ROWS, columns=COLUMNS)
    assert decoded(decode_frames(frames, "public.t", ranges)) == DECODED


def test_segments_of_a_directory_are_decoded_as_read_segments_does(spark, tmp_path):
    """Each range holds for every row that the directory has."""
    directory = land(tmp_path / "s", STREAM, segment_bytes=1)
    ranges, rows = relations_of(directory), []
    for segment in list_segments(directory):
        with SegmentReader(segment.path) as reader:
            for batch in reader:
                rows += zip(batch["lsn"].to_pylist(), batch["data"].to_pylist(), strict=True)
    assert isinstance(pf.decode(rows[0][1]), pf.Relation)
    frames = partitions(spark, rows, columns=COLUMNS)
    assert decoded(decode_frames(frames, "public.t", ranges)) == DECODED
