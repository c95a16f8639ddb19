"""The source `pgoutput`: changes of a directory as batch and streaming DataFrames."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import (
    AnalysisException,
    PySparkException,
    PythonException,
    StreamingQueryException,
)
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import GreaterThanOrEqual, LessThan
from pyspark.sql.streaming.datasource import ReadMaxBytes
from pyspark.sql.types import StructType
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error
from support.sparks.spark_frames import rows

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.apply.embedded_capture import DEFAULT_CAPTURE
from pgoutput_fast.catalog import Catalog, CatalogColumn, CatalogTable
from pgoutput_fast.changelog.consumers import check_consumer_name, consumers
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.changelog.schema_history import CatalogRead, HistoryWriter
from pgoutput_fast.errors import Argument
from pgoutput_fast.segments.listing import Segment
from pgoutput_fast.spark import data_source, read_segments
from pgoutput_fast.spark._source_options import source_options
from pgoutput_fast.spark.data_source import (
    PgOutputDataSource,
    _bounds,
    _consumer_name,
    _FilteringReader,
    _StreamReader,
)

pytestmark = [
    pytest.mark.spark, pytest.mark.filterwarnings("ignore::FutureWarning"),
]  # fmt: skip

T = testing.Table("t", {"id": "int4", "v": "text"}, 16390, key=["id"])
WIDE = testing.Table("t", {"id": "int4", "v": "text", "w": "int4"}, 16390, key=["id"])
OTHER = testing.Table("other", {"id": "int4"}, 16391, key=["id"])
NAME = "spark_public.t"


@pytest.fixture(scope="module")
def source(spark: Any) -> Any:
    """The session, which knows the source."""
    spark.dataSource.register(PgOutputDataSource)
    return spark


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


class Query:
    """A query whose batches are collected: ids of `after` by the batch's number."""

    def __init__(self, spark: Any, made: MadeDirectory, checkpoint: Path, **options: str) -> None:
        self._spark, self._checkpoint = spark, checkpoint
        self._options = {"segments": str(made.directory), "table": "public.t", **options}
        self.batches: dict[int, list[Any]] = {}
        self.rows: list[tuple[Any, ...]] = []
        self.fails_at: int | None = None

    def run(self, loaded: Callable[[], object] = lambda: None, **options: str) -> list[Any]:
        """The changes of all that is there, as (op, id); those of this call.

        `loaded` is called when there is a DataFrame, and no query yet.
        """
        before = set(self.batches)
        given = {**self._options, **options}
        frame = self._spark.readStream.format("pgoutput").options(**given).load()
        loaded()

        def take(batch: Any, number: int) -> None:
            found = batch.orderBy("commit_lsn", "seq").select("op", "after.id", "after").collect()
            if number == self.fails_at:
                raise RuntimeError("the sink fails")
            self.batches[number] = [(row.op, row.id) for row in found]
            self.rows += [tuple(row.after) for row in found if row.after]

        query = (
            frame.writeStream.foreachBatch(take).trigger(availableNow=True)
            .option("checkpointLocation", str(self._checkpoint)).start()
        )  # fmt: skip
        query.awaitTermination()
        return [one for number in sorted(set(self.batches) - before)
                for one in self.batches[number]]  # fmt: skip


def fill(made: MadeDirectory, first: int, count: int, *announced: bytes) -> None:
    """A segment for each of some inserts into `t`, of which the id is the commit LSN."""
    for number in range(count):
        lsn = first + 20 * number
        made.commit(lsn, *(announced or [T.relation()]), testing.insert(T, [lsn, "x"]))


def test_a_batch_has_what_read_segments_has(source: Any, made: MadeDirectory) -> None:
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a"]], [[2, None]])
    fill(made, 1200, 3)
    made.commit(1300, testing.update(T, [1, pf.UNCHANGED]), testing.delete(T, [2, None], "K"))
    read = source.read.format("pgoutput").option("table", "public.t")
    found = read.load(str(made.directory))
    wanted = read_segments(source, made.directory, "public.t")
    assert found.schema.simpleString() == wanted.schema.simpleString()
    assert rows(found) == rows(wanted)
    assert [row[0] for row in rows(found)] == [
        "truncate", "read", "read", "insert", "insert", "insert", "update", "delete"
    ]  # fmt: skip
    some = read.options(startingLsn="0/4C4", endingLsn=pf.format_lsn(1300))
    assert [row[4] for row in rows(some.load(str(made.directory)))] == [1220, 1240]


def test_filters_of_the_commit_choose_what_is_read(source: Any, made: MadeDirectory) -> None:
    fill(made, 1200, 4)
    read = source.read.format("pgoutput").options(table="public.t", segments=made.directory)
    with conf(source, "spark.sql.python.filterPushdown.enabled", "true"):
        lsn = F.col("commit_lsn")
        for chosen, ids in [
            ((lsn >= 1220) & (lsn < 1260), [1220, 1240]),
            ((lsn > 1220) & (lsn <= 1260) & (F.col("op") == "insert"), [1240, 1260]),
            (lsn == 1200, [1200]),
            (lsn.isin(1200, 1260), [1200, 1260]),
            (lsn > 5000, []),
        ]:
            frame = read.load().filter(chosen)
            assert [row.id for row in frame.select("after.id").orderBy("id").collect()] == ids
    # What is pushed is not read.
    assert _bounds(GreaterThanOrEqual(("commit_lsn",), 7)) == (7, None)
    assert _bounds(LessThan(("commit_lsn",), 7)) == (0, 7)
    assert _bounds(LessThan(("after", "id"), 7)) is None


def test_filters_of_the_commit_add_no_records(source: Any, made: MadeDirectory) -> None:
    """A table's records begin with its newest snapshot, whatever a filter lets pass."""
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "old"]])
    made.commit(1200, T.relation(), testing.insert(T, [2, "before"]))
    made.wait(T, 1300, first=False)
    made.copy(T, 1401, [[1, "a"], [2, "b"]])
    made.commit(1500, T.relation(), testing.insert(T, [3, "c"]))
    made.commit(1600, T.relation(), testing.insert(T, [4, "d"]))
    read = source.read.format("pgoutput").options(
        mode="envelope", topicPrefix="p", segments=made.directory
    )
    everything = sorted((row.commit_lsn, row.seq, row.value) for row in read.load().collect())
    assert [row[0] for row in everything] == [1400, 1400, 1400, 1500, 1600]
    lsn = F.col("commit_lsn")
    with conf(source, "spark.sql.python.filterPushdown.enabled", "true"):
        for chosen, first, end in [
            (lsn >= 1, 1, 2000), (lsn >= 1150, 1150, 2000), (lsn > 1400, 1401, 2000),
            ((lsn > 1500) & (lsn <= 1600), 1501, 1601), (lsn == 1500, 1500, 1501),
            (lsn < 1500, 0, 1500), (lsn < 1300, 0, 1300),
        ]:  # fmt: skip
            found = read.load().filter(chosen).collect()
            wanted = [row for row in everything if first <= row[0] < end]
            assert sorted((row.commit_lsn, row.seq, row.value) for row in found) == wanted
    given = {"mode": "envelope", "topicPrefix": "p", "segments": str(made.directory)}
    filtering: Any = _FilteringReader(source_options(given), None)  # type: ignore[arg-type]
    kept = list(filtering.pushFilters([GreaterThanOrEqual(("commit_lsn",), 1600)]))
    assert kept == [GreaterThanOrEqual(("commit_lsn",), 1600)]
    (partition,) = filtering.partitions()
    (taken,) = partition.reads
    assert Segment.from_path(taken.files[0]).end_lsn > 1600


@contextlib.contextmanager
def conf(spark: Any, name: str, value: str) -> Iterator[None]:
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name)


@pytest.mark.parametrize("mode", ["table", "manifest"])
@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, None, [1350, 1350, 1350, 1400]),
        (None, 1330, [1100, 1100, 1200]),
        (1150, 1330, [1200]),
        (1150, None, [1200, 1350, 1350, 1350, 1400]),
        (None, 1150, [1100, 1100]),
        (None, 1050, []),
    ],
)
def test_a_stretch_before_a_later_copy(
    source: Any, made: MadeDirectory, tmp_path: Path, mode: str, start: int | None,
    end: int | None, expected: list[int],
) -> None:  # fmt: skip
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a"]])
    fill(made, 1200, 1)
    made.wait(T, 1210, first=False)
    made.copy(T, 1351, [[1, "a"], [1200, "x"]])
    fill(made, 1400, 1)
    given = {"segments": str(made.directory), "mode": mode}
    given |= {"table": "public.t"} if mode == "table" else {"output": str(tmp_path / "files")}
    for name, lsn in (("startingLsn", start), ("endingLsn", end)):
        if lsn is not None:
            given[name] = f"0/{lsn:X}"
    rows = source.read.format("pgoutput").options(**given).load().collect()
    if mode == "manifest":
        rows = [row for file in rows for row in source.read.parquet(file.path).collect()]
    assert sorted(row.commit_lsn for row in rows) == expected


@pytest.mark.parametrize("most", [1, None])
def test_a_later_copy_takes_nothing_from_a_batch(
    source: Any, made: MadeDirectory, tmp_path: Path, most: int | None
) -> None:
    """A batch that ends before a copy has what came before it, also where it is run again."""
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a"]])
    fill(made, 1200, 2)
    reader = _StreamReader(*parts_of(made, tmp_path))
    offsets = [reader.initialOffset()]
    limit = reader.getDefaultReadLimit() if most is None else ReadMaxBytes(most)
    if most is None:
        offsets.append(reader.latestOffset(offsets[0], limit))
    made.wait(T, 1230, first=False)
    made.copy(T, 1351, [[2, "a"]])
    fill(made, 1400, 1)
    while len(offsets) < 2 or offsets[-1] != offsets[-2]:
        offsets.append(reader.latestOffset(offsets[-1], limit))
    found = [ids(reader, one, other) for one, other in itertools.pairwise(offsets)]
    assert [one for batch in found for one in batch] == [1, 1200, 1220, 2, 1400]
    reader.stop()


def test_a_table_that_leaves_the_publications(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    """A stream that waits for it would wait without end and without a word."""
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a"]])
    fill(made, 1200, 1)
    made.tables.leave(T.relation_id, 1211, {"table": [T.namespace, T.name]})
    other = testing.Table("u", {"id": "int4"}, 16391, key=["id"])
    made.commit(1300, other.relation(), testing.insert(other, [7]))
    reader = _StreamReader(*parts_of(made, tmp_path))
    first = reader.initialOffset()
    limit = reader.getDefaultReadLimit()
    last = reader.latestOffset(first, limit)
    assert ids(reader, first, last) == [1, 1200]
    with expect_error(code="no_table", table="public.t"):
        reader.latestOffset(last, limit)
    made.wait(T, 1310, first=False)
    made.copy(T, 1351, [[3, "a"]])
    fill(made, 1400, 1)
    assert ids(reader, last, reader.latestOffset(last, limit)) == [3, 1400]
    reader.stop()


def test_a_stream_goes_on_where_its_checkpoint_is(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    fill(made, 1200, 6)
    query = Query(source, made, tmp_path / "checkpoint")
    # About two segments a batch.
    size = 2 * max(path.stat().st_size for path in made.directory.glob("*.arrow"))
    assert query.run(maxBytesPerTrigger=str(size)) == [
        ("insert", 1200 + 20 * n) for n in range(6)
    ]  # fmt: skip
    assert len(query.batches) == 3
    assert query.run() == []
    fill(made, 1400, 2)
    assert query.run() == [("insert", 1400), ("insert", 1420)]
    # What is in the checkpoint is acknowledged, the last batch with the next call.
    assert query.run() == []
    (consumer,) = consumers(made.directory)
    assert (consumer.name, consumer.position.lsn) == (NAME, 1430)
    # A new checkpoint begins anew.
    assert len(Query(source, made, tmp_path / "other").run()) == 8
    assert len(Query(source, made, tmp_path / "third").run(startingLsn="0/578")) == 2


def test_a_batch_that_failed_comes_again(source: Any, made: MadeDirectory, tmp_path: Path) -> None:
    fill(made, 1200, 2)
    query = Query(source, made, tmp_path / "checkpoint")
    query.fails_at = 1
    query.run()
    fill(made, 1400, 1)
    with pytest.raises(StreamingQueryException, match="the sink fails"):
        query.run()
    # More comes, and files are others meanwhile; the batch that is repeated has what it had.
    fill(made, 1420, 1)
    made.commit(1500, testing.truncate([T.relation_id]))
    query.fails_at = None
    query.run()
    assert query.batches == {
        0: [("insert", 1200), ("insert", 1220)],
        1: [("insert", 1400)],
        2: [("insert", 1420), ("truncate", None)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("is_finished", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_of_another_query(
    source: Any, made: MadeDirectory, tmp_path: Path, is_finished: bool
) -> None:
    """Also where its only batch was planned, and has not been finished."""
    fill(made, 1200, 1)
    made.commit(1300, OTHER.relation(), testing.insert(OTHER, [7]))
    query = Query(source, made, tmp_path / "checkpoint")
    query.fails_at = None if is_finished else 0
    with contextlib.nullcontext() if is_finished else pytest.raises(StreamingQueryException):
        query.run()
    query.fails_at = None
    with expect_error(StreamingQueryException, code="another_history", table="public.other"):
        query.run(table="public.other")
    fill(made, 1400, 1)
    envelopes = {"mode": "envelope", "segments": str(made.directory), "topicPrefix": "p"}
    with expect_error(StreamingQueryException, parameter="mode"):
        run_any(source, envelopes, tmp_path / "checkpoint")
    assert query.run() == [("insert", 1200)] * (not is_finished) + [("insert", 1400)]
    # And of one that read the records of all tables.
    run_any(source, envelopes, tmp_path / "records")
    given = {"table": "public.t", "segments": str(made.directory), "consumer": "again"}
    with expect_error(StreamingQueryException, parameter="mode"):
        run_any(source, given, tmp_path / "records")


def run_any(spark: Any, options: dict[str, str], checkpoint: Path) -> None:
    """Have a query with these options end with what is there by now."""
    frame = spark.readStream.format("pgoutput").options(**options).load()
    query = (
        frame.writeStream.format("noop").trigger(availableNow=True)
        .option("checkpointLocation", str(checkpoint)).start()
    )  # fmt: skip
    query.awaitTermination()


@pytest.mark.slow
def test_tables_that_wait_for_a_copy(source: Any, made: MadeDirectory, tmp_path: Path) -> None:
    made.wait(T, 1000)
    made.wait(OTHER, 1000)
    fill(made, 1100, 1)
    query = Query(source, made, tmp_path / "checkpoint")
    made.commit(1150, OTHER.relation(), testing.insert(OTHER, [1]))
    assert query.run() == []
    made.copy(T, 1171, [[5, "a"]])
    made.commit(1200, T.relation(), testing.insert(T, [6, "b"]))
    assert query.run() == [("truncate", None), ("read", 5), ("insert", 6)]
    # Copied anew.
    made.wait(T, 1210, first=False)
    made.commit(1220, testing.insert(T, [7, "c"]))
    assert query.run() == []
    made.copy(T, 1251, [[5, "a"], [7, "c"]])
    made.commit(1300, testing.insert(T, [8, "d"]))
    assert query.run() == [
        ("insert", 7), ("truncate", None), ("read", 5), ("read", 7), ("insert", 8)
    ]  # fmt: skip


def test_a_column_that_comes_while_a_stream_runs(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    fill(made, 1200, 1)
    reader = _StreamReader(*parts_of(made, tmp_path))
    begin = reader.initialOffset()
    first = reader.latestOffset(begin, reader.getDefaultReadLimit())
    assert ids(reader, begin, first) == [1200]
    made.commit(1300, WIDE.relation(), testing.insert(WIDE, [1300, "x", 7]))
    second = reader.latestOffset(first, reader.getDefaultReadLimit())
    with expect_error(code="unfit_schema", table="public.t"):
        ids(reader, first, second)
    reader.stop()
    # A query that begins now has it, also in the changes that lack it.
    assert read_anew(made, tmp_path, begin, second) == [1200, 1300]
    ignoring = _StreamReader(*parts_of(made, tmp_path, newColumns="ignore", consumer="i"))
    third = ignoring.latestOffset(begin, ignoring.getDefaultReadLimit())
    assert ids(ignoring, begin, first) == [1200]
    columns = {"id": "int4", "v": "text", "w": "int4", "u": "int4"}
    wider = testing.Table("t", columns, 16390, key=["id"])
    made.commit(1400, wider.relation(), testing.insert(wider, [1400, "x", 7, 8]))
    fourth = ignoring.latestOffset(third, ignoring.getDefaultReadLimit())
    assert ids(ignoring, third, fourth) == [1400]
    ignoring.stop()


@pytest.mark.slow
def test_a_column_that_comes_before_a_stream_has_read(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    """The DataFrame was made before: by a job that lands the changes itself, that is always so."""
    fill(made, 1200, 1)
    query = Query(source, made, tmp_path / "checkpoint")
    frame = source.read.format("pgoutput").options(table="public.t", segments=made.directory)
    before, ignoring = frame.load(), frame.option("newColumns", "ignore").load()
    assert query.run() == [("insert", 1200)]
    wide = [WIDE.relation(), testing.insert(WIDE, [1300, "x", 7])]
    with expect_error(StreamingQueryException, code="unfit_schema", table="public.t"):
        query.run(lambda: made.commit(1300, *wide))
    assert query.run() == [("insert", 1300)]
    assert query.rows == [(1200, "x"), (1300, "x", 7)]
    with expect_error(PythonException, code="unfit_schema", table="public.t"):
        before.collect()
    assert sorted(tuple(row.after) for row in ignoring.collect()) == [(1200, "x"), (1300, "x")]


def test_a_column_that_comes_with_a_copy(source: Any, made: MadeDirectory, tmp_path: Path) -> None:
    """The DataFrame was made while the copy was, and the stream is beyond the copy's point."""
    other = testing.Table("o", {"id": "int4"}, 16777, key=["id"])
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a"]])
    fill(made, 1200, 1)
    made.wait(T, 1210, first=False)
    made.commit(1300, other.relation(), testing.insert(other, [1]))
    reader = _StreamReader(*parts_of(made, tmp_path))
    made.copy(WIDE, 1250, [[1, "a", 7], [1200, "x", 7]])
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    with expect_error(code="unfit_schema", table="public.t"):
        ids(reader, begin, end)
    reader.stop()
    assert read_anew(made, tmp_path, begin, end) == [1, 1200]


def test_a_type_that_is_altered_while_a_stream_runs(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    wider = testing.Table("t", {"id": "int8", "v": "text"}, 16390, key=["id"])
    fill(made, 1200, 1)
    reader = _StreamReader(*parts_of(made, tmp_path))
    begin = reader.initialOffset()
    made.commit(1300, wider.relation(), testing.insert(wider, [1 << 40, "x"]))
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    with expect_error(code="unfit_schema", table="public.t"):
        ids(reader, begin, end)
    reader.stop()
    assert read_anew(made, tmp_path, begin, end) == [1200, 1 << 40]


@pytest.mark.slow
def test_another_table_has_got_the_name(source: Any, made: MadeDirectory, tmp_path: Path) -> None:
    fill(made, 1200, 1)
    query = Query(source, made, tmp_path / "checkpoint")
    assert query.run() == [("insert", 1200)]
    renamed = testing.Table("t_old", {"id": "int4", "v": "text"}, 16390, key=["id"])
    another = testing.Table("t", {"id": "int4", "v": "text"}, 16999, key=["id"])
    made.commit(1300, renamed.relation(), testing.insert(renamed, [1300, "old"]))
    made.commit(1320, another.relation(), testing.insert(another, [1320, "new"]))
    with expect_error(StreamingQueryException, code="another_history", table="public.t"):
        query.run()
    assert query.run(table="public.t_old") == [("insert", 1300)]
    assert query.rows == [(1200, "x"), (1300, "old")]


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("copied", [(), (16390, 16391), (16391, 16390)])
def test_tables_that_change_names(
    source: Any, made: MadeDirectory, tmp_path: Path, copied: tuple[int, ...], *, is_told: bool
) -> None:
    """The table is found that got the name last, whichever was copied last or announced first."""

    def named(relation_id: int, name: str) -> testing.Table:
        return testing.Table(name, {"id": "int4", "v": "text"}, relation_id, key=["id"])

    before = {16390: "t", 16391: "u"}
    for number, relation_id in enumerate(copied):
        table = named(relation_id, before[relation_id])
        made.wait(table, 1000 + 100 * number)
        made.copy(table, 1051 + 100 * number, [[relation_id, "a"]])
    told = [(16391, "u"), (16390, "t"), *[(16390, "old")] * is_told, (16391, "t"), (16999, "o")]
    for number, (relation_id, name) in enumerate(told):
        table = named(relation_id, name)
        insert = testing.insert(table, [number, "x"])
        made.commit(1300 + 20 * number, table.relation(), insert)
    expected = [0, 2 + is_told, *[16391] * bool(copied)]
    frame = source.read.format("pgoutput").options(table="public.t", segments=made.directory)
    found = frame.load().where("op != 'truncate'").select("after.id").collect()
    assert sorted(row.id for row in found) == expected
    reader = _StreamReader(*parts_of(made, tmp_path))
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    assert ids(reader, begin, end) == expected
    # Another table gets the name while it runs.
    third = named(16400, "t")
    made.commit(1500, third.relation(), testing.insert(third, [9, "x"]))
    later = reader.latestOffset(end, reader.getDefaultReadLimit())
    with expect_error(code="another_history", table="public.t"):
        ids(reader, end, later)
    reader.stop()


def parts_of(made: MadeDirectory, tmp_path: Path, **options: str) -> tuple[Any, Any]:
    """The options and the schema of a stream of `t`."""
    given = {"segments": str(made.directory), "table": "public.t", **options}
    from pyspark.sql.types import StructType

    made_source = PgOutputDataSource(given)
    return source_options(given), StructType.fromDDL(made_source.schema())


def ids(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """The ids of the changes between two offsets, as they come out of JSON."""
    start, end = json.loads(json.dumps(start)), json.loads(json.dumps(end))
    return sorted(
        value
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for value in batch.column("after").field("id").drop_null().to_pylist()
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"slot": "another"}, "another_history"),
        ({"database": "another"}, "another_history"),
        ({"system_identifier": "1"}, "another_history"),
        ({"position": "0/FFFFFF"}, "another_history"),
        ({"position": "0/10"}, "changes_missing"),
        ({"position": "x"}, "not_ours"),
        ({"tables": {"a": "0/1"}}, "not_ours"),
    ],
)
def test_a_checkpoint_of_something_else(
    source: Any, made: MadeDirectory, tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    fill(made, 1200, 2)
    reader = _StreamReader(*parts_of(made, tmp_path))
    offset = {**reader.initialOffset(), **change}
    with expect_error(code=code):
        reader.latestOffset(offset, reader.getDefaultReadLimit())
    reader.stop()


def read_anew(
    made: MadeDirectory, tmp_path: Path, start: dict[str, Any], end: dict[str, Any]
) -> list[int]:
    """The same of a query that begins now, between offsets that another one had."""
    reader = _StreamReader(*parts_of(made, tmp_path))
    found = ids(reader, start, end)
    reader.stop()
    return found


def test_a_checkpoint_of_another_slot_makes_no_slot(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    fill(made, 1200, 1)
    options, schema = parts_of(made, tmp_path)
    begin = _StreamReader(options, schema).initialOffset()
    given = {"segments": str(tmp_path / "new"), "table": "public.t", "slot": "other",
             "publications": "p", "dsn": "host=/nowhere"}  # fmt: skip
    reader = _StreamReader(source_options(given), schema)
    with expect_error(parameter="slot", options=[Argument("slot", "s")]):
        reader.latestOffset(begin, reader.getDefaultReadLimit())
    with expect_error(parameter="slot"):  # Spark runs an unfinished batch again first
        reader.partitions(begin, begin)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_behind_what_was_acknowledged(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    """As it is with asyncProgressTrackingEnabled, and of a checkpoint that was restored."""
    fill(made, 1200, 1)
    reader = _StreamReader(*parts_of(made, tmp_path))
    begin = reader.initialOffset()
    first = reader.latestOffset(begin, reader.getDefaultReadLimit())
    fill(made, 1300, 1)
    second = reader.latestOffset(first, reader.getDefaultReadLimit())
    assert reader.latestOffset(second, reader.getDefaultReadLimit()) == second
    reader.stop()
    again = _StreamReader(*parts_of(made, tmp_path))
    end = again.latestOffset(begin, again.getDefaultReadLimit())
    assert ids(again, begin, end) == [1200, 1300]
    again.stop()


def test_a_checkpoint_under_another_name(source: Any, made: MadeDirectory, tmp_path: Path) -> None:
    """What is before its offset may be deleted; so it is of a table that was renamed."""
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a"]])
    fill(made, 1200, 2)
    reader = _StreamReader(*parts_of(made, tmp_path))
    first = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    reader.stop()
    for path in made.directory.glob("*.arrow"):
        path.unlink()
    fill(made, 1300, 1)
    for options in ({"consumer": "another"}, {"consumer": "third", "startingLsn": "0/500"}):
        again = _StreamReader(*parts_of(made, tmp_path, **options))
        start = again.initialOffset() if "startingLsn" in options else first
        end = again.latestOffset(start, again.getDefaultReadLimit())
        assert ids(again, start, end) == [1300]
        again.stop()


def test_two_queries_as_one_consumer(
    source: Any, made: MadeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_source, "_ENDING", 0.2)
    fill(made, 1200, 1)
    reader = _StreamReader(*parts_of(made, tmp_path))
    reader.initialOffset()
    with expect_error(code="in_use"):
        _StreamReader(*parts_of(made, tmp_path)).initialOffset()
    other = _StreamReader(*parts_of(made, tmp_path, consumer="another"))
    other.initialOffset()
    other.stop()
    # One that is about to end is waited for.
    monkeypatch.setattr(data_source, "_ENDING", 10.0)
    threading.Timer(0.3, reader.stop).start()
    _StreamReader(*parts_of(made, tmp_path)).initialOffset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "code"),
    [
        (1000, "another_history"),
        (4000, "changes_missing"),
    ],
)
def test_a_directory_that_was_replaced(
    source: Any, made: MadeDirectory, tmp_path: Path, begin: int, code: str
) -> None:
    fill(made, 1200, 3)
    query = Query(source, made, tmp_path / "checkpoint")
    query.run()
    shutil.rmtree(made.directory)
    with contextlib.closing(MadeDirectory(made.directory, begin)) as anew:
        fill(anew, begin + 100, 1)
        with expect_error(StreamingQueryException, code=code, path=str(made.directory)):
            query.run()
    # What is refused is not acknowledged.
    assert list((made.directory / "consumers").glob("*.json")) == []


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({}, "mode"),
        ({"table": "t", "mode": "manifes"}, "mode"),
        ({"table": "t", "mode": "manifest"}, "mode"),
        ({"mode": "manifest", "segments": "a"}, "mode"),
        ({"table": "t", "segments": "a", "output": "b"}, "output"),
        ({"table": "t"}, "segments"),
        ({"table": "t", "segments": "a", "path": "b"}, "segments"),
        ({"table": "t", "segments": "s3://a/b"}, "segments"),
        ({"table": "t", "segments": "a", "tab": "b"}, "tab"),
        ({"table": "t", "segments": "a", "maxBytesPerTrigger": "x"}, "max_bytes_per_trigger"),
        ({"table": "t", "segments": "a", "startingLsn": "x"}, "starting_lsn"),
        ({"table": "t", "segments": "a", "policies": "x=y"}, "policies"),
        ({"table": "t", "segments": "a", "policies": "json=x"}, "policies"),
        ({"table": "t", "segments": "a", "slot": "s"}, "capture"),
        (
            {"table": "t", "segments": "a", "slot": "s", "publicatons": "p"},
            "publicatons",
        ),
        (
            {"table": "t", "segments": "a", "registry": "/nowhere"},
            "registry",
        ),
        ({"table": "t", "checkpointLocation": "hdfs:/a"}, "checkpoint_location"),
        ({"table": "t", "segments": "a", "slot": ""}, "slot"),
        ({"table": "t", "segments": "a", "binary": "true"}, "binary"),
        (
            {"table": "t", "segments": "a", "slot": "s", "publications": "p", "binary": "x"},
            "binary",
        ),
        (
            {"table": "t", "segments": "a", "slot": "s", "publications": "p", "protocol": "9"},
            "protocol",
        ),
        (
            {"table": "t", "segments": "a", "slot": "s", "publications": "p",
             "dsn": "host=h password=geheim"},
            "dsn",
        ),
        (
            {"table": "t", "segments": "a", "slot": "s", "publications": "p",
             "dsn": "postgresql://u:geheim@h/shop"},
            "dsn",
        ),
        (
            {"table": "t", "segments": "a", "slot": "s", "publications": "p",
             "dsn": "postgresql:///shop?sslpassword=geheim"},
            "dsn",
        ),
        (
            {"mode": "manifest", "segments": "a", "output": "s3://AK:geheim@bucket/x"},
            "output",
        ),
        (
            {"table": "t", "path": "postgresql://u:geheim@h/db?password=geheim"},
            "path",
        ),
        (
            {"table": "t", "checkpointLocation": "s3a://AK:a/geheim@bucket/x"},
            "checkpoint_location",
        ),
    ],
)  # fmt: skip
def test_wrong_options(given: dict[str, str], parameter: str | None) -> None:
    with expect_error(parameter=parameter) as caught:
        source_options(given)
    assert "geheim" not in str(caught.value)


def test_options_that_are_taken() -> None:
    found = source_options({
        "TABLE": "public.t", "checkpointlocation": "/a/cp/", "slot": "s", "publications": "p, q",
        "policies": "numeric=10,2;json=parse arrays=2", "maxBytesPerTrigger": "16MB",
        "maxDelay": "0.5", "protocol": "2", "binary": "TRUE", "startingLsn": "0/10",
    })  # fmt: skip
    assert found.directory == Path("/a/cp.segments")
    assert (found.is_embedded, found.slot, found.publications) == (True, "s", ("p", "q"))
    assert found.policies == pf.Policies(numeric=(10, 2), json="parse", arrays=2)
    assert (found.max_bytes_per_trigger, found.starting_lsn) == (16 << 20, 16)
    wanted = {"max_delay": 0.5, "protocol": 2, "binary": True}
    assert found.capture_options == dataclasses.replace(DEFAULT_CAPTURE, **wanted)


@pytest.mark.parametrize("given", ["/a/cp/", "file:/a/cp", "file:///a/cp"])
def test_segments_beside_a_checkpoint(given: str) -> None:
    found = source_options({"table": "t", "checkpointLocation": given})
    assert found.directory == Path("/a/cp.segments")


def test_names_of_the_consumers_of_queries(tmp_path: Path) -> None:
    assert _consumer_name("public.t") == NAME
    names = ["Sch-X.Ta b", "Sch-X.Ta_b", "Sch X.Ta-b", "public.é", "x" * 63 + ".y", "x" * 63 + ".z"]
    found = {_consumer_name(name) for name in names}
    assert len(found) == len(names)
    assert [check_consumer_name(name) for name in found] == [*found]


@pytest.mark.slow
def test_options_that_do_not_go_together_with_a_query(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    given = {"table": "public.t", "segments": str(made.directory)}
    fill(made, 1200, 1)
    query = Query(source, made, tmp_path / "checkpoint")
    with expect_error(PySparkException, code="bad_option"):
        query.run(endingLsn="0/10")
    with expect_error(StreamingQueryException, code="bad_option", path=str(made.directory)):
        query.run(startingLsn="FF/0")
    server = {"slot": "s", "publications": "p", "segments": str(tmp_path / "none")}
    batch = source.read.format("pgoutput").options(**{**given, **server}).schema(
        source.read.format("pgoutput").options(**given).load().schema
    )  # fmt: skip
    with expect_error(AnalysisException, path=str(tmp_path / "none")):
        batch.load().collect()


def test_errors_reach_the_user(source: Any, made: MadeDirectory) -> None:
    read: Callable[..., Any] = source.read.format("pgoutput").options(segments=made.directory).load
    with expect_error(AnalysisException, parameter="mode"):
        read()
    fill(made, 1200, 1)
    given = {"table": "public.t", "segments": str(made.directory)}
    whole = source.read.format("pgoutput").options(**given).load()
    for schema in ("id int", "op string, after struct<id: int, v: string>"):
        with expect_error(AnalysisException, code="bad_option", parameter="schema"):
            source.read.format("pgoutput").options(**given).schema(schema).load().count()
    # The text of any column may be asked for, and some of the columns.
    ddl = ", ".join(
        f"{one.name} struct<id: string>" if one.name in ("before", "after")
        else f"{one.name} {one.dataType.simpleString()}"
        for one in whole.schema
    )  # fmt: skip
    chosen = source.read.format("pgoutput").options(**given).schema(ddl).load()
    assert [row.after for row in chosen.collect()] == [("1200",)]
    with expect_error(AnalysisException, code="no_table", table="public.u"):
        read(table="public.u")


# --- files of changes ----------------------------------------------------------------------------


def files_of(rows: list[Any]) -> dict[str, list[tuple[Any, ...]]]:
    """The changes in the files that a manifest names, by table: (commit_lsn, seq, op, id)."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        table = pq.read_table(row.path)
        lsns = table.column("commit_lsn").to_pylist()
        assert (row.rows, row.first_lsn, row.last_lsn) == (len(lsns), min(lsns), max(lsns))
        assert row.bytes == Path(row.path).stat().st_size
        changes = [
            (
                one["commit_lsn"],
                one["seq"],
                one["op"],
                (one["after"] or one["before"] or {}).get("id"),
            )
            for one in table.to_pylist()
        ]
        assert changes == sorted(changes, key=lambda one: one[:2])
        found.setdefault(row.table, []).extend(changes)
    return {name: sorted(changes, key=lambda one: one[:2]) for name, changes in found.items()}


@pytest.mark.slow
def test_files_of_all_tables_in_one_pass(source: Any, made: MadeDirectory, tmp_path: Path) -> None:
    odd = testing.Table("a.b ä", {"id": "int4"}, 16392, key=["id"])
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a"]], [[2, None]])
    made.commit(1200, T.relation(), testing.insert(T, [3, "b"]), OTHER.relation(),
                testing.insert(OTHER, [7]), odd.relation(), testing.insert(odd, [8]))  # fmt: skip
    made.commit(1300, WIDE.relation(), testing.insert(WIDE, [4, "c", 9]),
                testing.delete(WIDE, [3, None, None], "K"))  # fmt: skip
    made.commit(1400, testing.truncate([OTHER.relation_id, T.relation_id]))
    expected = {
        "public.t": [
            (1100, 0, "truncate", None), (1100, 1 << 32, "read", 1), (1100, 2 << 32, "read", 2),
            (1200, 0, "insert", 3), (1300, 0, "insert", 4), (1300, 1, "delete", 3),
            (1400, 1, "truncate", None),
        ],
        "public.other": [(1200, 1, "insert", 7), (1400, 0, "truncate", None)],
        "public.a.b ä": [(1200, 2, "insert", 8)],
    }  # fmt: skip
    given = {"mode": "manifest", "segments": str(made.directory), "partitions": "2"}
    read = source.read.format("pgoutput").options(**given, output=str(tmp_path / "batch"))
    assert files_of(read.load().collect()) == expected
    one = read.options(tables="*.other").load().collect()
    assert files_of(one) == {"public.other": expected["public.other"]}
    ranged = read.options(tables="*", startingLsn="0/4B1", endingLsn="0/578").load().collect()
    assert files_of(ranged)["public.t"] == expected["public.t"][4:6]

    # As a stream, from batch to batch; nothing comes twice.
    told: list[Any] = []
    for number in range(2):
        frame = source.readStream.format("pgoutput").options(**given, output=str(tmp_path / "s"))
        query = (
            frame.load().writeStream.trigger(availableNow=True)
            .foreachBatch(lambda batch, number: told.extend(batch.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        )  # fmt: skip
        query.awaitTermination()
        assert files_of(told) == expected
        if not number:
            made.commit(1500, OTHER.relation(), testing.insert(OTHER, [9]))
            expected["public.other"].append((1500, 0, "insert", 9))


def test_timestamps_of_a_session_without_zones(source: Any, made: MadeDirectory) -> None:
    """`timestamp` in DDL means another type then."""
    columns = {"id": "int4", "timestamp": "timestamptz", "n": "timestamp", "all": 1185}
    table = testing.Table("t", columns, 16390, key=["id"])
    row = [1, "2024-05-06 07:08:09+02", "2024-05-06 07:08:09", '{"2024-05-06 07:08:09+00"}']
    made.commit(1200, table.relation(), testing.insert(table, row))
    source.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        given = {"segments": str(made.directory)}
        found = source.read.format("pgoutput").options(**given, table="public.t").load()
        records = source.read.format("pgoutput").options(**given, mode="envelope").load()
        read = read_segments(source, made.directory, "public.t")
        assert found.schema.simpleString() == read.schema.simpleString()
        assert found.schema["commit_time"].dataType.simpleString() == "timestamp"
        types = [field.dataType.simpleString() for field in found.schema["after"].dataType]
        assert types == ["int", "timestamp", "timestamp_ntz", "array<timestamp>"]
        assert found.collect() == read.collect()
        assert records.select("commit_time").collect() == found.select("commit_time").collect()
    finally:
        source.conf.unset("spark.sql.timestampType")


def test_files_that_can_not_be_written(source: Any, made: MadeDirectory, tmp_path: Path) -> None:
    dates = testing.Table("t", {"id": "int4", "day": "date"}, 16390, key=["id"])
    made.commit(1200, dates.relation(), testing.insert(dates, [1, "2024-01-01"]),
                testing.insert(dates, [2, "infinity"]))  # fmt: skip
    given = {"mode": "manifest", "segments": str(made.directory)}
    read = source.read.format("pgoutput").options(**given)
    with expect_error(PythonException, code="out_of_range", column="day"):
        read.options(output=str(tmp_path / "files")).load().collect()
    # Nothing is left of what a failed task began.
    assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []
    (tmp_path / "file").write_text("")
    with expect_error(PythonException, code="io_failed", path=str(tmp_path / "file")):
        read.options(output=str(tmp_path / "file"), policies="infinity=null").load().collect()


@pytest.mark.slow
def test_files_with_times_are_read_by_spark(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    times = testing.Table("t", {"id": "int4", "at": "time", "more": 1183}, 16390, key=["id"])
    given = testing.insert(times, [1, "23:59:59.999999", "{00:00:01,NULL}"])
    made.commit(1200, times.relation(), given)
    read = source.read.format("pgoutput").options(mode="manifest", segments=made.directory)
    (file,) = read.option("output", str(tmp_path / "files")).load().collect()
    (row,) = source.read.parquet(file.path).collect()
    wanted = (1, datetime.time(23, 59, 59, 999999), [datetime.time(0, 0, 1), None])
    assert tuple(row.after) == wanted


def publish_quiet(made: MadeDirectory) -> None:
    """A catalogue of one table, of which nothing comes."""
    columns = tuple(
        CatalogColumn(name, type_id, "", modifier, False, False, "", False, None)
        for name, type_id, modifier in (("id", 23, -1), ("n", 1700, (10 << 16 | 2) + 4))
    )
    quiet = CatalogTable(16400, "public", "quiet", "r", "d", None, (), ("id",), (), columns)
    catalog = Catalog("1", "d", ("p",), (quiet,)).to_json()
    HistoryWriter(made.directory, None).note(
        CatalogRead(1000, 1000, frozenset(), frozenset(), False, pf.TypeRegistry(), catalog)
    )


@pytest.mark.parametrize("mode", ["envelope", "manifest"])
def test_a_pattern_that_matches_nothing_is_told_of(
    made: MadeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    fill(made, 1200, 1)
    given = {"segments": str(made.directory), "mode": mode, "tables": "public.quit, *.quiet"}
    if mode == "manifest":
        given["output"] = str(tmp_path / "files")
    source = PgOutputDataSource(given)
    schema = StructType([])  # these modes have one of their own
    stream = source.streamReader(schema)
    limit = ReadMaxBytes(1)

    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    begin = stream.initialOffset()
    next_one = stream.latestOffset(begin, limit)
    assert told() == []  # no catalogue says yet what is published
    publish_quiet(made)
    wanted = ["the pattern 'public.quit' matches no published table; did you mean public.quiet?"]
    assert stream.latestOffset(next_one, limit) == next_one
    assert told() == wanted
    stream.latestOffset(next_one, limit)
    assert told() == []  # once
    stream.stop()
    source.reader(schema).partitions()
    assert told() == wanted


@pytest.mark.slow
def test_what_another_table_lacks_does_not_matter(
    source: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    """A query of one table needs what there is of that one."""
    made.wait(OTHER, 1000)
    made.copy(OTHER, 1101, [[7]])
    made.wait(T, 1000)
    made.copy(T, 1101, [[7, "old"]])
    fill(made, 1200, 2)
    retain(made.directory, Keep(bytes=0), made.writer.store_position)
    made.wait(T, 1300, first=False)
    made.copy(T, 1401, [[1, "a"]])
    fill(made, 1500, 1)
    read = source.read.format("pgoutput").option("segments", str(made.directory))
    found = read.option("table", "public.t").load()
    assert [(row[0], row[9]) for row in rows(found)] == [
        ("truncate", None), ("read", (1, "a")), ("insert", (1500, "x"))
    ]  # fmt: skip
    query = Query(source, made, tmp_path / "checkpoint")
    assert query.run() == [("truncate", None), ("read", 1), ("insert", 1500)]
    fill(made, 1600, 1)
    assert query.run() == [("insert", 1600)]
    with expect_error(code="changes_missing", table="public.other"):
        read_segments(source, made.directory, "public.other")


@pytest.mark.parametrize(
    "mode",
    ["manifest", *(pytest.param(one, marks=pytest.mark.slow) for one in ("table", "envelope"))],
)
def test_a_batch_from_before_the_first_segment(
    source: Any, made: MadeDirectory, tmp_path: Path, mode: str
) -> None:
    """The rows of the first copies have the LSN before that; nothing else was there."""
    made.wait(T, 990)
    made.copy(T, 1000, [[1, "a"]])
    made.commit(1100, T.relation(), testing.insert(T, [2, "b"]))
    given = {"segments": str(made.directory), "mode": mode}
    given |= {"table": "public.t"} if mode == "table" else {}
    given |= {"topicPrefix": "p"} if mode == "envelope" else {}
    for start, lsns in ((1, [999, 999, 1100]), (999, [999, 999, 1100]), (1000, [1100])):
        read = source.read.format("pgoutput").options(
            **given, startingLsn=pf.format_lsn(start),
            **({"output": str(tmp_path / str(start))} if mode == "manifest" else {}),
        )  # fmt: skip
        found = read.load().collect()
        if mode == "manifest":
            got = [place[0] for place in files_of(found)["public.t"]]
        else:
            got = sorted(row.commit_lsn for row in found)
        assert got == lsns
    retain(made.directory, Keep(bytes=0), made.writer.store_position)
    given |= {"output": str(tmp_path / "late")} if mode == "manifest" else {}
    made.commit(1200, T.relation(), testing.insert(T, [3, "c"]))
    with expect_error(AnalysisException, code="changes_missing", path=str(made.directory)):
        source.read.format("pgoutput").options(**given, startingLsn="0/1").load().collect()


@pytest.mark.slow
def test_a_published_table_without_changes(source: Any, made: MadeDirectory) -> None:
    """It is an empty DataFrame of the columns that the catalogue has."""
    fill(made, 1200, 1)
    publish_quiet(made)
    found = read_segments(source, made.directory, "public.quiet")
    assert found.schema["after"].dataType.simpleString() == "struct<id:int,n:decimal(10,2)>"
    assert found.collect() == []
    read = source.read.format("pgoutput").option("table", "public.quiet")
    assert read.load(str(made.directory)).collect() == []
    with expect_error(code="no_table", table="public.nobody"):
        read_segments(source, made.directory, "public.nobody")
    listed = read_segments(source, made.directory).collect()
    assert [(row.table, row.schema) for row in listed] == [
        ("public.quiet", "`id` int, `n` decimal(10,2)"), ("public.t", listed[1].schema)
    ]  # fmt: skip
