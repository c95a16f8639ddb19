"""Segments of streams that come in runs of any size: the same rows, and files of a bounded size."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.columns.columnar import IMPLEMENTATIONS, chosen

import pgoutput_fast as pf
from pgoutput_fast.segments import SegmentMetadata, SegmentReader, SegmentWriter, list_segments
from pgoutput_fast.segments import format as form
from pgoutput_fast.segments import writer as writing
from pgoutput_fast.testing import Server, Table, strategies
from pgoutput_fast.transactions.runs import runs_of

METADATA = SegmentMetadata("7", "shop", "s", ("p",), 180004, "UTF8", {}, {"proto_version": "1"})
TABLES = [Table("one", {"id": "int4", "note": "text"}, 16400), Table("two", {"id": "int8"}, 16500)]
AROUND = 1536
"""Bytes at most that Arrow writes around the buffers of a record batch: its message and padding."""
Row = dict[str, Any]


def truth(server: Server) -> list[Row]:
    """The rows that segments must have, as the server made its frames."""
    found = []
    committed = iter(server.committed)
    within: Row = dict.fromkeys(("commit_lsn", "commit_time", "xid"))
    for lsn, frame, seq in server.sent:
        if frame[:1] == b"B":
            one = next(committed)
            within = {
                "commit_lsn": one.commit_lsn,
                "commit_time": one.commit_time,
                "xid": one.xid,
            }
        found.append({"lsn": lsn, **within, "seq": seq, "data": frame})
        if frame[:1] == b"C":
            within = dict.fromkeys(within)
    return found


def write(directory: Path, server: Server, cuts: list[int], segment_bytes: int) -> None:
    """Write what the server sent in runs that end at these places, by both methods in turn."""
    count = len(server.sent)
    ends = sorted({min(cut, count) for cut in cuts} | {0, count})
    (run,) = runs_of(server.frames, None, server.lsns)
    with SegmentWriter(
        directory, METADATA, confirmed_flush_lsn=0, segment_bytes=segment_bytes
    ) as out:
        positions = []
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            part = run.part(start, end)
            if number % 2:
                positions.append(out.write_run(part))
            else:
                positions.append(out.write_frames(part.data, part.lsns, part.offsets))
        positions.append(out.flush())
        told = [position for position in positions if position is not None]
        assert told == sorted(set(told))
        # A commit or a message outside of transactions comes last, with the LSN of its end.
        assert out.position == max([0, *told]) == (server.sent[-1].lsn if count else 0)


def bytes_of(batch: pa.RecordBatch) -> int:
    """The bytes of the batch's buffers in a file, where each is padded."""
    buffers = (buffer for column in batch.columns for buffer in column.buffers())
    return sum(-(-buffer.size // 64) * 64 for buffer in buffers if buffer)


def read(directory: Path, segment_bytes: int) -> list[Row]:
    """The rows of all files but what they repeat; each file is checked by itself."""
    found: list[Row] = []
    segments = list_segments(directory)
    for segment in segments:
        with SegmentReader(segment.path) as reader:
            batches = list(reader)
        sizes = []
        for batch in batches:
            sizes.append(bytes_of(batch))
            assert batch.num_rows > 0
            assert batch.num_rows <= form.BATCH_FRAMES
            content = sum(map(len, batch["data"].to_pylist()))
            assert content <= writing.BATCH_BYTES or batch.num_rows == 1
        with pa.ipc.open_file(str(segment.path)) as opened:
            assert opened.num_record_batches == len(batches) + 1
            # Beside the record batches a file has a head, the end batch with the layout index, and
            # a footer, which repeats the head and lists the batches.
            others = 2 * opened.schema.serialize().size + AROUND + 24 * opened.num_record_batches
            others += bytes_of(opened.get_batch(len(batches)))
        size = segment.path.stat().st_size
        assert size <= 1.5 * segment_bytes + max(sizes) + 2 * AROUND + others

        rows: list[Row] = [row for batch in batches for row in batch.to_pylist()]
        decoder = pf.Decoder()  # which knows nothing of other files
        for message in decoder.decode_many(row["data"] for row in rows):
            if message.tag in ("I", "U", "D"):
                assert message.relation.relation_id == message.relation_id
        while rows[0]["data"][:1] in (b"R", b"Y") and rows[0]["xid"] is None:
            assert (rows[0]["lsn"], rows[0]["seq"]) == (form.ANNOUNCED_LSN, None)
            del rows[0]
        if segment.part:
            # A transaction goes on: its Begin is repeated.
            assert found[-1]["data"][:1] != b"C"
            begins = [row for row in found if row["data"][:1] == b"B"]
            assert rows.pop(0) == begins[-1]
        commits = {row["commit_lsn"] for row in rows if row["commit_lsn"] is not None}
        assert all(segment.start_lsn <= lsn < segment.end_lsn for lsn in commits)
        found += rows
    return found


def large(sizes: list[int], value: int) -> Server:
    """A server with transactions of so many rows, which are cut into parts."""
    server = Server()
    for number, size in enumerate(sizes):
        with server.begin() as transaction:
            for row in range(size):
                if row % 3 == 2:
                    transaction.truncate(TABLES)
                else:
                    transaction.insert(TABLES[0], [row, "x" * (value * (row % 4) + number)])
        if number % 2:
            server.message("p", b"between")
    return server


any_server = st.one_of(
    strategies.servers(streaming=False, two_phase=False),
    st.builds(
        large,
        st.lists(st.sampled_from([1, 2, 3, 40, 120]), max_size=6),
        st.sampled_from([0, 10, 100, 1000]),
    ),
)


@pytest.mark.everyday("cython")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_cut_into_runs_gives_the_same_rows(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"parts": 0, "segments": 0}

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        any_server,
        st.one_of(st.just(range(1000)), st.lists(st.integers(0, 300), max_size=8)),
        st.sampled_from([1, 3, 16, 16384]),
        st.sampled_from([1, 100, 2000, 4 << 20]),
        st.sampled_from([1, 3000, 8000, 16 << 20]),
    )
    @example(large([40, 120], 100), [50], 16, 2000, 3000)  # in several parts
    def run(
        server: Server, cuts: Any, batch_frames: int, batch_bytes: int, segment_bytes: int
    ) -> None:
        for module in (form, writing):
            monkeypatch.setattr(module, "BATCH_FRAMES", batch_frames)
            monkeypatch.setattr(module, "BATCH_BYTES", batch_bytes)
        with tempfile.TemporaryDirectory() as name, chosen(implementation):
            write(Path(name), server, list(cuts), segment_bytes)
            assert read(Path(name), segment_bytes) == truth(server)
            found = list_segments(Path(name))
            seen["parts"] += sum(one.part > 0 for one in found)
            seen["segments"] += len(found)

    run()
    assert seen["parts"] > 0
    assert seen["segments"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("segment_bytes", [1, 1 << 16, 1 << 20])
def test_a_transaction_in_one_run_is_cut_within_it(
    implementation: str, compression: Any, segment_bytes: int, tmp_path: Path
) -> None:
    server = Server()
    with server.begin() as transaction:
        for row in range(4000):
            # Text that can't be compressed to less than its half, and short rows.
            text = random.Random(row).randbytes(500).hex() if row % 3 else ""
            transaction.insert(TABLES[0], [row, text])
    (run,) = runs_of(server.frames, None, server.lsns)
    assert run.size > 2 << 20
    with (
        chosen(implementation),
        SegmentWriter(
            tmp_path, METADATA, confirmed_flush_lsn=0, segment_bytes=segment_bytes,
            compression=compression,
        ) as out,
    ):  # fmt: skip
        out.write_run(run)
        out.flush()
    found = list_segments(tmp_path)
    sizes = [segment.path.stat().st_size for segment in found]
    assert max(sizes) < 1.5 * segment_bytes + writing._LEAST_PART + 10_000
    # Where compression makes them smaller, they are filled up.
    assert all(size > min(segment_bytes, writing._LEAST_PART / 4) for size in sizes[:-1])
    rows: list[Row] = []
    for segment in found:
        with SegmentReader(segment.path) as reader:
            rows += [row for batch in reader for row in batch.to_pylist() if row["seq"] is not None]
    inserts = [row["data"] for row in rows if row["data"][:1] == b"I"]
    assert inserts == [frame for frame in server.frames if frame[:1] == b"I"]
