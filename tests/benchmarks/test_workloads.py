"""The benchmarks: the streams that they decode, and that they notice wrong results."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import shutil
import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="the benchmarks need it")

# The benchmarks are no part of the package: they are found beside the tests.
if str(ROOT := Path(__file__).parents[2]) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks import baseline, decoders, harness, native, suite, workloads
from pgoutput_fast.decoding import _pure
from pgoutput_fast.transcode import inserts_of_copy

ROWS = {"narrow": 500, "wide": 500, "fat": 50, "narrow_varied": 1_000, "wide_varied": 500}
LENGTHS = {
    ("narrow", "text"): 55,
    ("narrow", "binary"): 54,
    ("wide", "text"): 440,
    ("wide", "binary"): 390,
    ("fat", "text"): 8_200,
    ("fat", "binary"): 8_200,
    ("narrow_varied", "text"): 64,
    ("narrow_varied", "binary"): 61,
    ("wide_varied", "text"): 480,
    ("wide_varied", "binary"): 425,
}
CASES = list(LENGTHS)
DIGESTS = {
    ("narrow", "text"): "afee05f2e33aa41b",
    ("narrow", "binary"): "a1dc3c2a9792806f",
    ("wide", "text"): "2fb106e50d8fade4",
    ("wide", "binary"): "fb10149d7a07425c",
    ("fat", "text"): "4944639c9ec54733",
    ("fat", "binary"): "bee24cdbdb0e3f04",
    ("narrow_varied", "text"): "9f53ed2868b263f7",
    ("narrow_varied", "binary"): "d3cf0d58f92c5b22",
    ("wide_varied", "text"): "7e1f46eb814e0949",
    ("wide_varied", "binary"): "6d83957dd202d458",
}
"""Of the frames of 100 rows: figures of two versions are of the same bytes."""


def decode(workload, columns):
    decoder = baseline.Decoder(columns)
    return [decoder.decode(frame) for frame in workload.frames]


def rows_of(messages):
    return [
        tuple(message.new)
        for message in messages
        if isinstance(message, (baseline.Insert, baseline.Update))
    ]


@pytest.mark.parametrize(("name", "tuple_format"), CASES)
def test_typed_values_are_those_that_were_generated(name, tuple_format):
    workload = workloads.generate(name, tuple_format, ROWS[name])
    rows = rows_of(decode(workload, "typed"))
    assert len(workload.changes) == ROWS[name]
    # repr tells True from 1 and 1.50 from 1.5.
    assert repr(rows) == repr(workload.rows)


@pytest.mark.parametrize(("name", "tuple_format"), CASES)
def test_frames_are_the_same_from_version_to_version(name, tuple_format):
    frames = b"".join(workloads.generate(name, tuple_format, 100).frames)
    assert hashlib.sha256(frames).hexdigest()[:16] == DIGESTS[name, tuple_format]


@pytest.mark.parametrize("name", sorted({*workloads.NAMES} - {*workloads.VARIED}))
def test_rows_of_copy_are_those_of_the_inserts(name):
    workload = workloads.generate(name, "binary", ROWS[name])
    formats = "b" * len(workload.table.columns)
    made = inserts_of_copy(workload.copied(), workload.table.oid, formats)
    assert made.consumed == len(workload.copied())
    rows = [frame[1:] for frame in workload.frames if frame[:1] in b"IU"]
    ends = made.offsets.tolist()
    pairs = itertools.pairwise(ends)
    # An Update without an old row has the form of an Insert.
    assert [made.data[begin + 1 : end] for begin, end in pairs] == rows


@pytest.mark.parametrize("name", workloads.NAMES)
def test_both_formats_hold_the_same_rows(name):
    text, binary = (workloads.generate(name, form, ROWS[name]) for form in workloads.FORMATS)
    assert text.rows == binary.rows
    assert [frame[:1] for frame in text.frames] == [frame[:1] for frame in binary.frames]
    kinds = {"text": b"t", "binary": b"b"}
    for workload in (text, binary):
        insert = next(frame for frame in workload.frames if frame[:1] == b"I")
        assert insert[8:9] == kinds[workload.tuple_format]


@pytest.mark.parametrize(("name", "tuple_format"), CASES)
def test_row_frames_have_the_length_that_is_documented(name, tuple_format):
    workload = workloads.generate(name, tuple_format, ROWS[name])
    mean = statistics.mean(
        len(frame) for frame in workload.frames if frame[:1] in (b"I", b"U", b"D")
    )
    assert mean == pytest.approx(LENGTHS[name, tuple_format], rel=0.03)


def test_transactions_of_five_rows_follow_their_relation():
    messages = decode(workloads.generate("narrow", "text", 500), "bytes")
    relation, *stream = messages
    assert [(column.name, column.type_id, column.flags) for column in relation.columns] == [
        ("aid", 23, 1),
        ("bid", 23, 0),
        ("abalance", 23, 0),
        ("filler", 1042, 0),
    ]
    assert len(stream) == 700
    tags = collections.Counter(type(message).__name__ for message in stream)
    assert tags["Begin"] == tags["Commit"] == 100
    assert tags["Insert"] > 150
    assert tags["Update"] > 150
    last_lsn = 0
    for first in range(0, len(stream), 7):
        begin, *changes, commit = stream[first : first + 7]
        assert {type(change).__name__ for change in changes} <= {"Insert", "Update"}
        assert begin.final_lsn == commit.commit_lsn
        assert begin.commit_time == commit.commit_time
        assert last_lsn < commit.commit_lsn < commit.end_lsn
        last_lsn = commit.end_lsn


def test_nulls_are_in_wide_alone_and_never_in_the_key():
    rows = workloads.generate("wide", "text", ROWS["wide"]).rows
    nulls = sum(row.count(None) for row in rows)
    assert nulls / (29 * len(rows)) == pytest.approx(0.05, rel=0.1)
    assert all(row[0] is not None for row in rows)
    for name in ("narrow", "fat", "narrow_varied"):
        assert not any(None in row for row in workloads.generate(name, "text", ROWS[name]).rows)


def shares(found):
    """The share of each item."""
    return {item: n / len(found) for item, n in collections.Counter(found).items()}


@pytest.mark.parametrize("name", workloads.VARIED)
def test_twins_have_old_keys_and_deletes(name):
    workload = workloads.generate(name, "text", 2_000)
    table = workloads.TABLES[name]
    changes = [
        message
        for message in decode(workload, "typed")
        if isinstance(message, (baseline.Insert, baseline.Update, baseline.Delete))
    ]
    tags = shares([type(message).__name__ for message in changes])
    assert tags == pytest.approx({"Insert": 0.4, "Update": 0.5, "Delete": 0.1}, rel=0.2)
    updates = [message for message in changes if isinstance(message, baseline.Update)]
    assert shares([update.old_kind for update in updates])["K"] == pytest.approx(0.05, rel=0.2)
    olds = [change.old for change in changes if getattr(change, "old", None) is not None]
    for old in olds:
        assert [value is not None for value in old] == [c.is_key for c in table.columns]
    told = [None if change.old is None else list(change.old) for change in workload.changes]
    assert [getattr(change, "old", None) for change in changes] == told


@pytest.mark.parametrize("name", workloads.VARIED)
def test_no_length_of_a_twins_values_is_usual(name):
    """How long the texts of a type's values are, and how many are as long, in one column of it."""
    workload = workloads.generate(name, "text", 2_000)
    original = workloads.TABLES[name.removesuffix("_varied")]
    table = workloads.TABLES[name]
    assert [c.name for c in table.columns] == [c.name for c in original.columns]
    rows = [message.new for message in decode(workload, "texts") if hasattr(message, "new")]
    values = {c.name: [row[i] for row in rows] for i, c in enumerate(table.columns)}
    found = {
        column.type: [text for text in values[column.name] if text is not None]
        for column in table.columns
        if not column.is_key
    }

    def lengths(kind, part):
        return shares([len(part(text)) for text in found[kind]])

    digits = lengths(workloads.INT4, lambda text: text.lstrip("-"))
    assert digits.keys() == set(range(1, 11))
    assert max(digits.values()) < 0.2
    signs = shares([text[0] == "-" for text in found[workloads.INT4]])
    assert signs[True] == pytest.approx(0.25, abs=0.03)
    texts = found[workloads.TEXT]
    assert max(lengths(workloads.TEXT, str.encode).values()) < 0.05
    sizes = [len(text.encode()) for text in texts]
    assert max(sizes) > 64
    assert sum(size > 16 for size in sizes) / len(sizes) == pytest.approx(0.65, abs=0.05)
    assert shares(list(map(str.isascii, texts)))[False] == pytest.approx(0.2, abs=0.03)
    if name == "narrow_varied":
        return
    digits = lengths(workloads.INT8, lambda text: text.lstrip("-"))
    assert digits.keys() == set(range(1, 20))
    digits = lengths(workloads.NUMERIC, lambda text: text.lstrip("-"))
    assert digits.keys() == set(range(4, 14))
    assert max(digits.values()) < 0.3
    fractions = lengths(workloads.TIMESTAMPTZ, lambda text: text[20:-3])
    assert fractions == pytest.approx(dict.fromkeys(range(7), 1 / 7), abs=0.04)
    assert max(lengths(workloads.FLOAT8, str).values()) < 0.15
    assert max(lengths(workloads.JSONB, str).values()) < 0.05


@pytest.fixture
def compiler():
    if shutil.which(native.compiler()[0]) is None:
        pytest.skip("there is no C compiler")


@pytest.mark.slow
@pytest.mark.parametrize("name", workloads.VARIED)
def test_plain_c_makes_the_columns_of_the_engine(compiler, name):
    missing = {}
    for tuple_format in workloads.FORMATS:
        workload = workloads.generate(name, tuple_format, 50)
        assert "C layout" in suite.columns.plain_c(workload, missing)
    assert set(missing.values()) <= {"it knows no frames of this kind"}  # the walk


def test_plain_c_that_makes_other_columns_is_noticed(compiler):
    layout = native.Layout(workloads.generate("narrow_varied", "text", 50, seed=1))
    workload = workloads.generate("narrow_varied", "text", 50, seed=2)
    with pytest.raises(decoders.WrongResult, match="C layout: "):
        suite.columns.check_layout(workload, layout)


def test_a_seed_gives_the_same_stream_again():
    first = workloads.generate("narrow", "text", 50, seed=1)
    workloads.generate.cache_clear()
    assert workloads.generate("narrow", "text", 50, seed=1).frames == first.frames
    assert workloads.generate("narrow", "text", 50, seed=2).frames != first.frames


def test_fat_has_text_that_is_not_latin():
    document = workloads.generate("fat", "text", 5).rows[0][3]
    assert max(map(ord, document)) > 0x3000


def test_packed_and_arrow_forms_hold_the_frames():
    workload = workloads.generate("wide", "binary", 50)
    buffer, offsets = workload.packed()
    assert offsets.dtype == "int64"
    assert offsets[-1] == len(buffer)
    frames = [buffer[start:end] for start, end in itertools.pairwise(offsets)]
    assert frames == workload.frames
    pyarrow = pytest.importorskip("pyarrow")
    array = workload.arrow()
    assert array.type == pyarrow.binary()
    assert array.to_pylist() == workload.frames


@pytest.mark.parametrize("rows", [0, -5, 7])
def test_a_number_of_rows_that_makes_no_transactions_is_refused(rows):
    with pytest.raises(ValueError, match="multiple of 5"):
        workloads.generate("narrow", "text", rows)


def test_an_unknown_workload_is_refused():
    with pytest.raises(ValueError, match="no workload 'broad'"):
        workloads.generate("broad", "text", 5)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "empty frame"),
        (b"?", "unknown tag"),
        (b"I\x00\x00\x40\x11N\x00\x01n", "1 columns"),
        (b"I\x00\x00\x40\x12N\x00\x01n", "no Relation message"),
        (b"I\x00\x00\x40\x11K\x00\x04nnnn", "expected N"),
        (b"I\x00\x00\x40\x11N\x00\x04nnnnn", "left over"),
        (b"I\x00\x00\x40\x11N\x00\x04nnnx", "unknown column kind"),
        (b"I\x00\x00\x40\x11N\x00\x04nnnt\x00\x00\x00\x02a", "does not fit"),
        (b"I\x00\x00\x40\x11N\x00\x04nnnt\xff\xff\xff\xff", "does not fit"),
        (b"I\x00\x00\x40\x11N\x00\x04nnn", "too short"),
    ],
)
def test_the_baseline_refuses_what_is_malformed(frame, message):
    decoder = baseline.Decoder()
    decoder.decode(workloads.generate("narrow", "text", 5).frames[0])
    with pytest.raises(baseline.BaselineError, match=message):
        decoder.decode(frame)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(suite, "ROWS", dict.fromkeys(workloads.NAMES, 10))
    recorded = functools.partial(workloads.recorded, most=100)
    monkeypatch.setattr(suite.workloads, "recorded", recorded)
    monkeypatch.setattr(suite.copies, "cases", lambda *_: contextlib.nullcontext([]))


CAPTURES = ROOT / "benchmarks" / "captures"
ARGUMENTS = [
    *("--quick", "--part", "decode", "--workload", "narrow", "--rounds", "2"),
    *("--capture", str(CAPTURES / "pgbench.arrow")),
]


@pytest.mark.slow
def test_a_run_prints_tables_and_stores_all_samples(small, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    path = tmp_path / "made" / "result.json"
    assert suite.main([*ARGUMENTS, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    results = harness.Results.load(path)
    for who in ("baseline", "python"):
        for level in ("message", "message, one by one", "texts", "values"):
            assert len(results.samples[f"narrow/text/{level}/{who}", "cpu"]) == 2
    assert len(results.samples["recorded pgbench/text/columns/Arrow", "cpu"]) == 2
    assert "| typed Arrow, binary " in printed
    assert "not measured" in printed


def test_a_wrong_decoder_is_not_timed(small, monkeypatch, capsys):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(_pure.TupleData, "texts", lambda self: ("1",) * len(self))
    assert suite.main(ARGUMENTS) == 1
    assert "narrow/text/texts/python, frame 1: ('" in capsys.readouterr().err


@pytest.mark.parametrize("level", ["iteration", "tuple"])
def test_rows_as_sequences_have_their_values(level):
    workload = workloads.generate("narrow", "text", 20)
    loop = decoders.own_loop(workload, level, "python", _pure)
    loop.run()
    values = decoders.own_loop(workload, "values", "python", _pure)
    decoders.compare(level, loop.result(), values.result())
    assert sum(isinstance(fields[-1], tuple) for fields in loop.result()) >= 20


@pytest.mark.parametrize(("one", "other"), [(1, True), (1.0, 1), ((1,), [1]), ((1,), (1, 2))])
def test_results_of_other_types_are_not_the_same(one, other):
    with pytest.raises(decoders.WrongResult, match="case, frame 0"):
        decoders.compare("case", [one], [other])


@pytest.mark.parametrize(
    "change",
    [lambda csv: csv[: csv.index(b"\n") + 1], lambda csv: csv.replace(b"1", b"2", 1)],
    ids=["rows", "digit"],
)
def test_csv_readers_that_get_something_else_are_noticed(monkeypatch, change):
    columns = suite.columns
    csv_of = columns.csv_of
    workload = workloads.generate("narrow", "text", 200)
    dict(columns.loops(workload, {}))
    monkeypatch.setattr(columns, "csv_of", lambda workload: change(csv_of(workload)))
    with pytest.raises(decoders.WrongResult, match=r"pyarrow\.csv: its rows are not"):
        dict(columns.loops(workload, {}))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("pgbench", {"R": 4, "B": 1200, "C": 1200, "U": 3600, "I": 1200}),
        ("wide", {"R": 1, "B": 3, "C": 3, "I": 600, "U": 200, "D": 1000}),
    ],
)
def test_recorded_streams_begin_with_their_relations(name, counts):
    pytest.importorskip("pyarrow")
    path = CAPTURES / f"{name}.arrow"
    workload = workloads.recorded(path)
    assert str(workload) == f"recorded {name}/text"
    tags = [frame[:1].decode() for frame in workload.frames]
    assert collections.Counter(tags) == counts
    assert tags[: workload.preamble] == ["R"] * workload.preamble
    assert "R" not in tags[workload.preamble :]
    decode(workload, "texts")
    short = workloads.recorded(path, most=1_000)
    assert short.frames[-1][:1] == b"C"
    assert len(short.frames) <= 1_000 + short.preamble
    with pytest.raises(ValueError, match="no transaction in its first 2 frames"):
        workloads.recorded(path, most=2)
