"""Every reader reads what a capture writes: rows around each size that cuts a stream."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.changelogs.merged import merge
from support.changelogs.written_segments import METADATA
from support.columns.columnar import IMPLEMENTATIONS, chosen

from pgoutput_fast.changelog import merging
from pgoutput_fast.changelog.changes import ChangeReader
from pgoutput_fast.changelog.read_frames import frame_runs
from pgoutput_fast.changelog.view import View, view_of
from pgoutput_fast.cli import inspect
from pgoutput_fast.cli._show import Shown
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.protocol.wire import relation_id_of
from pgoutput_fast.segments import Segment, SegmentReader, SegmentWriter, copying, list_segments
from pgoutput_fast.segments import format as form
from pgoutput_fast.segments import writer as writing
from pgoutput_fast.segments.file import SegmentFile
from pgoutput_fast.segments.prepared import PreparedTransactions
from pgoutput_fast.segments.structure import Structure
from pgoutput_fast.testing import Server, Table, UserType
from pgoutput_fast.transactions import Assembler, staging
from pgoutput_fast.transactions.runs import runs_of

MOOD = UserType(16300, "mood")
TABLES = [
    Table("one", {"id": "int4", "note": "text"}, 16400),
    Table("two", {"id": "int4", "note": "text", "feels": MOOD}, 16500),
]
# Of a block of a staged transaction, a record batch, and a part.
BLOCK, BATCH, PART = 300, 400, 700
SIZES = [1, 20, 150, BLOCK, BATCH, PART, 2500]


class Row(NamedTuple):
    """A row as readers have to give it."""

    commit_lsn: int
    seq: int
    lsn: int
    data: bytes


# --- streams -------------------------------------------------------------------------------------

KINDS = ["plain", "streamed", "prepared", "streamed and prepared"]
transactions = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "origin": st.sampled_from([None, "elsewhere"]),
        # Of each change a table, or none for a message, and its size.
        "changes": st.lists(
            st.tuples(st.sampled_from([0, 0, 1, None]), st.sampled_from(SIZES)),
            min_size=1, max_size=6,
        ),
        "chunk": st.integers(1, 6),
        "ends_with": st.sampled_from([None, "truncate", "message between"]),
    }
)  # fmt: skip


def make(server: Server, number: int, described: dict[str, Any]) -> None:
    """Have the server send a transaction."""
    kind = described["kind"]
    transaction = server.begin(described["origin"])
    for index, (table, size) in enumerate(described["changes"]):
        if table is None:
            transaction.message("p", b"m" * size)
        else:
            feels = ["happy"] if table else []
            transaction.insert(TABLES[table], [number * 100 + index, "x" * size, *feels])
        if kind.startswith("streamed") and index % described["chunk"] == 0:
            transaction.stream()
    if described["ends_with"] == "truncate":
        transaction.truncate(TABLES)
    if kind.endswith("prepared"):
        transaction.prepare(f"g{number}")
    transaction.commit()
    if described["ends_with"] == "message between":
        server.message("p", b"between" * 20)


def truth(server: Server) -> list[Row]:
    return [
        Row(one.commit_lsn, change.seq, change.lsn, change.frame)
        for one in server.committed
        for change in one.changes
        if change.seq is not None
    ]


def capture(directory: Path, server: Server, cut: int, max_memory: int) -> None:
    """What a capture does with the frames that it receives."""
    with SegmentWriter(directory, METADATA, confirmed_flush_lsn=0, segment_bytes=PART) as out:
        kept = PreparedTransactions(directory, out.position)
        assembler = Assembler(max_memory, keeper=kept, spill_directory=directory)
        for start in range(0, len(server.sent), cut):
            sent = server.sent[start : start + cut]
            runs = runs_of([one.frame for one in sent], None, [one.lsn for one in sent])
            for found in assembler.feed_groups(runs):
                for run in found.runs():
                    out.write_run(run)
        out.flush()
        assert out.position == server.sent[-1].lsn


# --- readers -------------------------------------------------------------------------------------


def is_row(data: bytes) -> bool:
    return data[:1] in (b"I", b"U", b"D", b"T")


def by_files(directory: Path) -> list[Row]:
    """The rows of all files. Each Begin has the LSN of its transaction's first change."""
    found: list[Row] = []
    begins: dict[int, int] = {}
    firsts: dict[int, int] = {}
    for segment in list_segments(directory):
        with SegmentReader(segment.path) as reader:
            rows = [row for batch in reader for row in batch.to_pylist()]
        for row in rows:
            commit_lsn, data = row["commit_lsn"], row["data"]
            if data[:1] == b"B":
                assert begins.setdefault(commit_lsn, row["lsn"]) == row["lsn"] != 0
            elif data[:1] not in (b"R", b"Y") and commit_lsn is not None:
                firsts.setdefault(commit_lsn, row["lsn"])
            if is_row(data):
                found.append(Row(commit_lsn, row["seq"], row["lsn"], data))
    assert begins == firsts
    return found


def all_frame_runs(view: View) -> Iterator[Any]:
    plan = view.plan(view.first_position())
    for read in [] if plan is None else plan.reads:
        yield from frame_runs(read, view.metadata)


def by_reads(view: View) -> list[Row]:
    """The rows as exports, syncs and Spark's executors take them."""
    found = []
    for frame_run in all_frame_runs(view):
        beside = frame_run.beside.to_pylist()
        data = frame_run.frames.to_pylist()
        found += [
            Row(row["commit_lsn"], row["seq"], row["lsn"], frame)
            for row, frame in zip(beside, data, strict=True)
            if is_row(frame)
        ]
    return found


def decoded(batches: Iterator[tuple[int, Any]]) -> dict[tuple[int, int, int], Any]:
    return {
        (relation_id, row["commit_lsn"], row["seq"]): row["after"] and row["after"]["id"]
        for relation_id, batch in batches
        for row in batch.to_pylist()
    }


def by_sync(view: View) -> dict[tuple[int, int, int], Any]:
    """The changes as a sync in this process decodes them."""
    reader = ChangeReader({"on_error": "raise"})
    return decoded(
        (changes.relation.relation_id, batch)
        for frame_run in all_frame_runs(view)
        for changes, batch in reader.changes(frame_run)
    )


def by_spark(directory: Path, tables: list[Table]) -> dict[tuple[int, int, int], Any]:
    """The changes as Spark's executors decode files, whole and in windows that cut them."""
    from pyspark.sql import types

    from pgoutput_fast.spark._planning import read_batches
    from pgoutput_fast.spark.dataframes import find_table

    found: dict[tuple[int, int, int], Any] = {}
    for table in tables:
        schema = types.StructType([types.StructField("id", types.IntegerType())])
        for column in table.columns[1:]:
            schema.add(column.name, types.StringType())
        chosen_ = find_table(directory, f"public.{table.name}").chosen(schema, "error")
        for read in chosen_.reads():
            segment = Segment.from_path(read.files[0])
            middle = (segment.start_lsn + segment.end_lsn) // 2
            for range_ in [(0, 1 << 60), (middle, 1 << 60)]:
                part = read._replace(ranges={table.relation_id: range_})
                batches = read_batches(part, chosen_.metadata, chosen_.target)
                found |= decoded((table.relation_id, batch) for batch in batches)
    return found


def by_inspect(directory: Path) -> int:
    """How many rows `inspect` shows."""
    return sum(
        isinstance(shown, Shown) and shown.message.tag in "IUDT"
        for segment in list_segments(directory)
        for shown in inspect._messages(segment.path, None, None, None)
    )


def check(directory: Path, server: Server, *, spark: bool) -> None:
    """Compare what each reader gives with what the server committed."""
    expected = truth(server)
    assert by_files(directory) == expected
    listed = [str(one.path) for one in list_segments(directory)]
    tables = {
        (relation_id, row.commit_lsn, row.seq + index)
        for row in expected
        for index, relation_id in enumerate(
            [table.relation_id for table in TABLES]
            if row.data[:1] == b"T"
            else [relation_id_of(row.data, False)]
        )
    }
    for view in (view_of(directory), view_of(listed[::-1])):
        assert by_reads(view) == expected
        assert by_sync(view).keys() == tables
    assert by_inspect(directory) == len(expected)
    if spark:  # which takes seconds
        with_rows = [table for table in TABLES if table.relation_id in {one[0] for one in tables}]
        assert by_spark(directory, with_rows).keys() == tables


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that cut streams are small, and few segments are merged."""
    monkeypatch.setattr(merging, "FAN", 2)
    monkeypatch.setattr(staging, "_BLOCK", BLOCK)
    monkeypatch.setattr(writing, "_LEAST_PART", PART)
    for module in (form, writing, copying):
        monkeypatch.setattr(module, "BATCH_BYTES", BATCH)
        monkeypatch.setattr(module, "BATCH_FRAMES", 7)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_row_that_fills_a_block_alone(kind: str, tmp_path: Path) -> None:
    """Its Relation lies in a block before it, and the transaction is cut into parts."""
    server = Server()
    for number, origin in enumerate([None, "elsewhere"]):
        changes = [(1, 2500), (0, 1), (None, 700), (0, 700)]
        described = {"kind": kind, "origin": origin, "changes": changes, "chunk": 1}
        make(server, number, described | {"ends_with": "truncate"})
    capture(tmp_path, server, 3, 0)
    assert sum(one.part > 0 for one in list_segments(tmp_path)) > 2
    check(tmp_path, server, spark=kind == "streamed")


@pytest.mark.everyday("cython")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("examples", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_every_reader_reads_what_is_written(examples: int, implementation: str) -> None:
    counts = {"parts": 0, "merged": 0}
    is_slow = examples > 100

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(transactions, min_size=1, max_size=5),
        st.sampled_from([1, 3, 1000]),
        st.sampled_from([0, 1 << 20]),
    )
    def run(described: list[dict[str, Any]], cut: int, max_memory: int) -> None:
        server = Server()
        short = {"kind": "plain", "origin": None, "changes": [(0, BLOCK)], "chunk": 1}
        # At the end, segments of one part, which are merged.
        for number, one in enumerate([*described, *[short | {"ends_with": None}] * 6]):
            make(server, number, one)
        with tempfile.TemporaryDirectory() as name, chosen(implementation):
            directory = Path(name)
            capture(directory, server, cut, max_memory)
            counts["parts"] += sum(one.part > 0 for one in list_segments(directory))
            check(directory, server, spark=is_slow)
            if merge(directory, 1 << 20) is not None:
                counts["merged"] += 1
                check(directory, server, spark=is_slow)

    run()
    assert counts["parts"] > examples
    assert counts["merged"] > 0


# --- what the check refuses ----------------------------------------------------------------------


def rewritten(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The rows of a file with one fault."""
    tags = [row["data"][:1] for row in rows]
    begin, row = tags.index(b"B"), tags.index(b"I")
    relation, commit = tags.index(b"R"), tags.index(b"C")
    faults: dict[str, Any] = {
        "no Begin": lambda: rows.pop(begin),
        "two Begins": lambda: rows.insert(begin, rows[begin]),
        "no Commit": lambda: rows.pop(commit),
        "no Relation": lambda: rows.pop(relation),
        "a lost row": lambda: rows.pop(row),
        "another order": lambda: rows.insert(commit, rows.pop(begin)),
        "another xid": lambda: rows[row].update(xid=1),
        "another time": lambda: rows[row].update(commit_time=1),
        "another commit": lambda: rows[row].update(commit_lsn=1),
        "another row": lambda: rows[row].update(seq=7),
        "no number": lambda: rows[row].update(seq=None),
        "a stream chunk": lambda: rows[row].update(data=b"S" + rows[row]["data"][1:]),
        "a short row": lambda: rows[row].update(data=b"I"),
    }
    faults[kind]()
    return rows


def write_whole(file: SegmentFile, batch: Any) -> None:
    file.write(batch.columns)
    file.finish(last=True)


FAULTS = [
    "no Begin", "two Begins", "no Commit", "no Relation", "a lost row", "another order",
    "another xid", "another time", "another commit", "another row", "no number", "a stream chunk",
    "a short row",
]  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_writers_and_readers_refuse_the_same(
    fault: str, implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    changes = [(0, 1), (1, 1), (0, 20), (0, 30)]
    make(server, 1, {"kind": "plain", "origin": None, "changes": changes, "ends_with": None})
    with chosen(implementation):
        capture(tmp_path, server, 1000, 0)
        (segment,) = list_segments(tmp_path)
        with SegmentReader(segment.path) as reader:
            (batch,) = reader
            metadata = reader.metadata
        faulty = pa.RecordBatch.from_pylist(
            rewritten(batch.to_pylist(), fault), form.segment_schema()
        )
        path = tmp_path / ".faulty.arrow.tmp"
        file = SegmentFile(path, metadata)
        with pytest.raises(PgOutputError):
            write_whole(file, faulty)
        file.discard()
        path.unlink()
        with monkeypatch.context() as patch:
            # A writer without the check.
            patch.setattr(Structure, "check", lambda self, batch: None)
            patch.setattr(Structure, "end", lambda self, is_last: None)
            file = SegmentFile(path, metadata)
            write_whole(file, faulty)
        path.rename(segment.path)
        with pytest.raises(PgOutputError):
            by_files(tmp_path)


def test_nothing_is_acknowledged_that_readers_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer loses a Begin where a part begins."""
    monkeypatch.setattr(writing, "_LEAST_PART", PART)
    monkeypatch.setattr(SegmentWriter, "_begin_at", lambda self, piece, index: None)
    server = Server()
    changes = [(0, 2500), (0, 2500), (0, 2500)]
    make(server, 1, {"kind": "plain", "origin": None, "changes": changes, "ends_with": None})
    with SegmentWriter(tmp_path, METADATA, confirmed_flush_lsn=7, segment_bytes=PART) as out:
        with pytest.raises(PgOutputError):
            out.write_frames(server.frames, server.lsns)
        assert out.position == 7
    assert list_segments(tmp_path) == []
