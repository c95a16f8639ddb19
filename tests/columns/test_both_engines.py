"""The two columnar engines over the same frames: equal to the last byte, errors included.

And what both give, against the messages of the same frames. PGOUTPUT_FAST_DIFFERENTIAL multiplies
the random cases.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import paths
from support.nightly import marks, nightly, recorded

pytest.importorskip("pyarrow", reason="the twin makes Arrow arrays with it")

import numpy as np
import pyarrow as pa
from support.columns.columnar import IMPLEMENTATIONS, chosen, differences, exact, observe
from support.columns.rows import compare_with_messages
from support.frames.comparison import refused
from support.frames.made_vectors import TWO, relation
from support.frames.mutations import RELATION_IDS, length_places, mutated, stream_frame
from support.frames.vector_files import read_vectors
from support.recordings.corpus_files import Capture, captures
from support.values.catalog_types import registry_of

import pgoutput_fast as pf
from pgoutput_fast.settings import make_settings

TIMES = int(os.environ.get("PGOUTPUT_FAST_DIFFERENTIAL", "1"))
CAPTURES = captures(paths.DATA)
VECTORS = [vector for vector in read_vectors() if len(vector["frame"]) < 4000]
FRAMES = [vector["frame"] for vector in VECTORS if vector["frame"]]
LENIENT = pf.Policies(infinity="text", out_of_range="text", special_values="text")
"""Whose columns hold every value."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"target": "spark", "policies": pf.Policies(infinity="null", out_of_range="null")},
    {"target": "portable", "policies": pf.Policies(infinity="clamp", out_of_range="clamp")},
    {"target": "spark", "policies": LENIENT, "fill_unchanged": True},
    {"on_error": "collect", "fill_unchanged": True, "max_rows": 3},
    {"target": "portable", "on_error": "collect", "max_bytes": 500},
    {"tables": "*.t*", "policies": pf.Policies(numeric=(20, 4), special_values="null")},
    {"tables": ("*.[a-m]*", "public.t"), "columns": ("id", "k", "name"), "on_error": "collect"},
    {"columns": {"*.t": ["id", "name"], "*_types*": ["id", "c_int4"]}, "on_error": "collect"},
    {"max_rows": 1},
    {"max_bytes": 1},
)

CATALOGUE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"on_error": "collect"},
    {"on_error": "collect", "target": "spark", "policies": replace(LENIENT, arrays=2)},
    {"on_error": "collect", "target": "portable", "fill_unchanged": True, "max_rows": 3},
)

# With what the catalogue says of users' types.
CATALOGUED = captures(paths.DATA / "final")

each_capture = pytest.mark.parametrize("capture", recorded(CAPTURES))


def cut(frames: Sequence[Any], size: int | random.Random) -> Iterator[Sequence[Any]]:
    """The frames in parts of `size`, or of random sizes."""
    start = 0
    while start < len(frames):
        length = size if isinstance(size, int) else size.randrange(1, 40)
        yield frames[start : start + length]
        start += length


def frames_of(capture: Capture) -> list[bytes]:
    return [frame for _, frame in capture.rows()]


# --- the engines against each other --------------------------------------------------------------


@pytest.mark.everyday("14/dml/v1_bin", "16/fuzz_a", "18/all_types/v1_text")
@each_capture
def test_captures(capture: Capture) -> None:
    """Each with some of the options; all of them with PGOUTPUT_FAST_DIFFERENTIAL."""
    first = CAPTURES.index(capture) % 4 if TIMES == 1 else 0
    for options in OPTIONS[first :: 4 if TIMES == 1 else 1]:
        frames = frames_of(capture)
        if options.keys() & {"max_rows", "max_bytes"}:
            frames = frames[:150]  # many batches
        found = differences([frames], encoding=capture.encoding, **options)
        assert not found, (options, found)


@pytest.mark.everyday("16/all_types/v1_bin", "18/schema_evolution/v1_bin")
@pytest.mark.parametrize("capture", recorded(CATALOGUED))
def test_captures_with_a_catalogue(capture: Capture) -> None:
    assert capture.truth is not None
    registry = registry_of(capture.truth)
    first = CATALOGUED.index(capture) % 3 if TIMES == 1 else 0
    for options in CATALOGUE_OPTIONS[first :: 3 if TIMES == 1 else 1]:
        frames = frames_of(capture)[:2000]
        found = differences([frames], encoding=capture.encoding, registry=registry, **options)
        assert not found, (options, found)


@pytest.mark.parametrize("first", [0, *nightly(1, 2, 3)])
def test_vectors(first: int) -> None:
    """Each after the frames that it follows, good and bad ones; the batches are cut before it."""
    for i, vector in enumerate(VECTORS[first::4]):
        calls = [vector["before"], [vector["frame"]]]
        for options in OPTIONS[i % 5 : 5 : 5 if TIMES == 1 else 1]:
            found = differences(calls, encoding=vector.get("encoding", "utf-8"), **options)
            assert not found, (vector["id"], options, found)


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 8 * TIMES))])
def test_batches_with_mutated_frames(seed: int) -> None:
    """Bad frames at any place of a batch, whose other frames are as before."""
    chance = random.Random(seed)
    outcomes = set()
    for _ in range(150):
        vector = chance.choice(VECTORS)
        options = chance.choice(OPTIONS)
        places = length_places(vector)
        frames = [*vector["before"]]
        for _ in range(8):
            frames += [vector["frame"], mutated(chance, vector["frame"], FRAMES, places)]
        calls = list(cut(frames, chance if chance.random() < 0.3 else len(frames)))
        bits = chance.choice((40, 64))
        lsns = [np.array([chance.getrandbits(bits) for _ in call], np.uint64) for call in calls]
        options = {**options, "encoding": vector.get("encoding", "utf-8")}
        if chance.random() < 0.5:
            options["lsns"] = lsns
        found = differences(calls, **options)
        assert not found, ([frame.hex() for frame in frames], options, found)
        for call in observe("cython", calls, **options):
            errors = [call["error"]] if call["error"] else [bad[2] for bad in call["bad"]]
            outcomes |= {error[1] for error in errors if isinstance(error, tuple)}
    assert outcomes >= {"truncated", "bad_marker", "bad_column_kind", "column_count", "bad_value"}


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 6 * TIMES))])
def test_batches_of_streams_in_any_order(seed: int) -> None:
    """Segments, aborts, prepared transactions, tables that change; resets in between."""
    chance = random.Random(1000 + seed)
    rows = 0
    for _ in range(8):
        options = chance.choice((*OPTIONS[:6], *OPTIONS[9:]))
        inside: int | None = None
        calls = [[relation(TWO, relation_id) for relation_id in RELATION_IDS]]
        for _ in range(80):
            frame = stream_frame(chance, inside)
            if frame == b"reset":
                continue
            if frame[:1] == b"S" and inside is None and len(frame) == 6:
                (inside,) = struct.unpack_from(">I", frame, 1)
            elif frame == b"E":
                inside = None
            if chance.random() < 0.1:
                calls.append([])
            calls[-1].append(frame)
        found = differences(calls, **options)
        assert not found, ([[frame.hex() for frame in call] for call in calls], options, found)
        collected = observe("python", calls, **{**options, "on_error": "collect"})
        rows += sum(batch[2] for call in collected for batch in call["batches"])
    assert rows > 20


@pytest.mark.everyday("14/streaming/v2_stream", "16/two_phase/v3_2pc", "18/all_types/v1_text")
@each_capture
def test_any_cutting(capture: Capture) -> None:
    """The same rows, events and state, whatever the frames are cut into, by both engines."""
    frames = frames_of(capture)[: 300 * TIMES]
    expected = rows_of("cython", capture, [frames])
    for implementation in IMPLEMENTATIONS:
        for size in (1, 7, random.Random(1)):
            found = rows_of(implementation, capture, list(cut(frames, size)))
            assert found == expected, (implementation, size)


def rows_of(implementation: str, capture: Capture, calls: list[Any]) -> Any:
    rows: dict[str, list[Any]] = {}
    events: list[Any] = []
    before = 0
    with chosen(implementation):
        decoder = pf.ColumnarDecoder(LENIENT, encoding=capture.encoding, on_error="collect")
        for call in calls:
            for batch in decoder.decode(call):
                read = pa.record_batch(batch)
                columns = [flat(column) for column in read.columns]
                rows.setdefault(repr(batch.relation), []).extend(zip(*columns, strict=True))
            events += [repr(event._replace(frame=event.frame + before)) for event in decoder.events]
            events += [(bad.frame + before, bad.error.code, bad.data) for bad in decoder.errors]
            before += len(call)
    return rows, sorted(events, key=str), repr(decoder.state.relations)


def flat(column: Any) -> list[Any]:
    """A column as Python objects, structs as tuples: names may come twice."""
    if not pa.types.is_struct(column.type):
        return [repr(value) for value in column.to_pylist()]
    fields = [flat(column.field(i)) for i in range(column.type.num_fields)]
    rows = zip(*fields, strict=True) if fields else [()] * len(column)
    valid = column.is_valid().to_pylist()
    return [row if there else None for row, there in zip(rows, valid, strict=True)]


# --- columns against messages --------------------------------------------------------------------


@pytest.mark.everyday(
    "cython-16/all_types/v1_bin with",
    "cython-18/schema_evolution/v1_bin",
    "python-16/dml/v1_text",
    "python-16/streaming/v4_on",
)
@pytest.mark.parametrize(
    ("capture", "catalogued"),
    [pytest.param(c, False, id=c.name, marks=marks(c.name)) for c in CAPTURES]
    + [
        pytest.param(c, True, id=f"{c.name} with a catalogue", marks=marks(c.name))
        for c in CATALOGUED
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_by_columns_are_rows_by_messages(
    implementation: str, capture: Capture, catalogued: bool
) -> None:
    registry = registry_of(capture.truth) if catalogued and capture.truth is not None else None
    settings = make_settings(LENIENT, capture.encoding, registry)
    frames, lsns = frames_of(capture), [lsn for lsn, _ in capture.rows()]
    told = compare_with_messages(implementation, frames, lsns, settings)
    assert bool(told.rows) is bool(capture.entry["message_counts"].keys() & set("IUDT"))


# --- frames --------------------------------------------------------------------------------------


def observe_frames(implementation: str, *arguments: Any) -> Any:
    with chosen(implementation):
        try:
            batch = pf.decode_batch(*arguments)
        except pf.DecodeError as error:
            return refused(error)
        arrays = (
            batch.tags, batch.xids, batch.relation_ids, batch.old_kinds, batch.old_columns,
            batch.new_columns, batch.first_slices, batch.slices, batch.begins, batch.commits,
        )  # fmt: skip
        told = [(array.dtype.descr, array.tolist()) for array in arrays]
        in_stream = (type(batch.in_stream), batch.in_stream)
        return told, {i: repr(m) for i, m in batch.messages.items()}, in_stream, repr(batch)


def frame_differences(*arguments: Any) -> list[Any]:
    seen = [observe_frames(name, *arguments) for name in IMPLEMENTATIONS]
    return [] if seen[0] == seen[1] else seen


@pytest.mark.everyday("16/schema_evolution/v1_text", "16/dml/v1_text")
@each_capture
def test_frames_of_captures(capture: Capture) -> None:
    frames = frames_of(capture)
    assert not frame_differences(frames)
    for implementation in IMPLEMENTATIONS:
        with chosen(implementation):
            whole = pf.decode_batch(frames)
            in_stream: int | bool = False
            tags = b""
            for part in cut(frames, 7):
                batch = pf.decode_batch(part, None, in_stream)
                in_stream = batch.in_stream
                tags += batch.tags.tobytes()
            assert (tags, in_stream) == (whole.tags.tobytes(), whole.in_stream)
            # What a batch of frames came from is decoded as that is.
            decoder = pf.ColumnarDecoder(LENIENT, encoding=capture.encoding, on_error="collect")
            again = [exact(pa.record_batch(b).to_struct_array()) for b in decoder.decode(whole)]
            decoder = pf.ColumnarDecoder(LENIENT, encoding=capture.encoding, on_error="collect")
            first = [exact(pa.record_batch(b).to_struct_array()) for b in decoder.decode(frames)]
            assert again == first


@pytest.mark.parametrize("seed", range(4 * TIMES))
def test_mutated_batches_of_frames(seed: int) -> None:
    chance = random.Random(2000 + seed)
    outcomes = set()
    for _ in range(300):
        inside: int | bool = chance.choice((False, False, True, 7))
        frames = []
        opened = inside
        for _ in range(chance.randrange(12)):
            vector = chance.choice(VECTORS)
            if chance.random() < 0.8 and vector["in_stream"] != (opened is not False):
                continue
            frame = vector["frame"]
            if chance.random() < 0.05:
                frame = mutated(chance, frame, FRAMES, length_places(vector))
            if frame[:1] == b"S":
                opened = 1
            elif frame[:1] == b"E":
                opened = False
            frames.append(frame)
        found = frame_differences(frames, None, inside)
        assert not found, ([frame.hex() for frame in frames], inside, found)
        seen = observe_frames("cython", frames, None, inside)
        outcomes.add(seen[1] if seen[0] == "error" else "sound")
    assert outcomes >= {"sound", "stream_order", "truncated"}


# --- the comparison itself -----------------------------------------------------------------------


def test_a_planted_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from pgoutput_fast.columnar import _pure_engine

    frames = frames_of(CAPTURES[0])[:50]
    assert not differences([frames])
    monkeypatch.setitem(_pure_engine._OPS, "I", b"Insert")
    assert any("batches" in sentence for sentence in differences([frames]))


def test_captures_have_rows_of_every_kind() -> None:
    """Comparing nothing would find nothing."""
    counts = [capture.entry["message_counts"] for capture in CAPTURES]
    assert {"I", "U", "D", "T", "S", "A", "b", "p"} <= {tag for one in counts for tag in one}
