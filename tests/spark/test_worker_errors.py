"""Errors of executors, found again on the driver with what they are about."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException
from support.expected_errors import check_fields
from support.sparks.spark_frames import INT4, insert, land, partitions, relation, transaction

from pgoutput_fast.errors import Argument, DecodeError, PgOutputError
from pgoutput_fast.segments import list_segments
from pgoutput_fast.spark import PgOutputDataSource, _worker_errors, decode_frames, error_of
from pgoutput_fast.spark import read_segments as read

pytestmark = pytest.mark.spark

TABLE = relation(1, "t", {"id": INT4})
# The text of the int4 begins at byte 13 of the frame, which is the fourth of the file.
BAD = [TABLE, *transaction(1100, 7, insert(1, "1"), insert(1, "one"))]


def raised_by(frame):
    with pytest.raises(PySparkException) as raised:
        frame.collect()
    return raised.value


@pytest.mark.parametrize("how", ["read_segments", "source"])
def test_an_error_of_a_file_has_its_path(spark, tmp_path, how):
    directory = land(tmp_path / "s", BAD)
    if how == "source":
        spark.dataSource.register(PgOutputDataSource)
        changes = spark.read.format("pgoutput").option("table", "public.t").load(str(directory))
    else:
        changes = read(spark, directory, "public.t")
    exception = raised_by(changes)
    error = error_of(exception)
    assert type(error) is PgOutputError
    path = str(list_segments(directory)[0].path)
    assert (error.code, error.offset, error.tag) == ("bad_value", 13, "I")
    assert (error.frame, error.path) == (3, path)
    text = str(error)
    assert "public.t" in text
    assert path in text
    assert "\n" not in text
    assert _worker_errors._PREFIX not in text
    assert text in str(exception)


@pytest.mark.slow
def test_an_error_of_a_stream_is_found_in_the_exception_of_its_query(spark, tmp_path):
    spark.dataSource.register(PgOutputDataSource)
    directory = land(tmp_path / "s", BAD)
    changes = (
        spark.readStream.format("pgoutput")
        .options(table="public.t", capture="external")
        .load(str(directory))
    )
    writing = changes.writeStream.format("noop").trigger(availableNow=True)
    query = writing.option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(PySparkException) as raised:
        query.awaitTermination()
    for exception in (raised.value, query.exception()):
        error = error_of(exception)
        assert (error.code, error.frame) == ("bad_value", 3)
        assert error.path == str(list_segments(directory)[0].path)


@pytest.mark.slow
def test_an_error_while_a_query_is_planned_has_its_message(spark, tmp_path):
    spark.dataSource.register(PgOutputDataSource)
    directory = land(tmp_path / "s", BAD)
    given = {"table": "public.t", "capture": "external", "startingLsn": "F/0"}
    changes = spark.readStream.format("pgoutput").options(**given).load(str(directory))
    writing = changes.writeStream.format("noop").trigger(availableNow=True)
    query = writing.option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(PySparkException) as raised:
        query.awaitTermination()
    for exception in (raised.value, query.exception()):
        error = error_of(exception)
        assert type(error) is PgOutputError
        check_fields(error, code="bad_option", path=str(directory))
        assert "SQLSTATE" not in str(error)
    with pytest.raises(PySparkException) as raised:
        spark.read.format("pgoutput").option("table", "public.t").load(str(tmp_path / "none"))
    check_fields(error_of(raised.value), path=str(tmp_path / "none"))


@pytest.mark.slow
def test_a_refused_option_is_found_with_its_hint(spark):
    spark.dataSource.register(PgOutputDataSource)
    for reader in (spark.read, spark.readStream):
        with pytest.raises(PySparkException) as raised:
            reader.format("pgoutput").options(mode="manifest", output="o", topicPrefix="a").load(
                "there"
            )
        check_fields(
            error_of(raised.value), parameter="topic_prefix", options=[Argument("mode", "envelope")]
        )


@pytest.mark.slow
def test_an_error_of_frames_has_no_path(spark):
    error = error_of(raised_by(decode_frames(partitions(spark, BAD[2:]), "public.t", [TABLE])))
    assert (error.code, error.offset, error.tag) == ("bad_value", 13, "I")
    assert (error.frame, error.path) == (1, None)


@pytest.mark.slow
def test_an_error_among_relations_is_found(spark):
    frames = partitions(spark, [TABLE[:20]])
    with pytest.raises(PySparkException) as raised:
        decode_frames(frames, "public.t")
    assert error_of(raised.value).code == "bad_count"


def test_exceptions_of_other_origin_have_none(spark):
    def fail(batches):
        raise ValueError("of its own")
        yield from batches

    assert error_of(raised_by(spark.range(1).mapInArrow(fail, "id bigint"))) is None
    assert error_of(ValueError('[pgoutput_fast error] {"class": 1}')) is None
    assert error_of(ValueError("[pgoutput_fast error] {no JSON}")) is None
    loop = ValueError("its own cause")
    loop.__cause__ = loop
    assert error_of(loop) is None


def test_errors_of_the_driver_and_causes_are_found():
    error = PgOutputError("here")
    assert error_of(error) is error
    outer = RuntimeError("there")
    outer.__cause__ = error
    assert error_of(outer) is error


def test_classes_and_messages_come_back():
    first = DecodeError("a [bad_value] text", code="bad_value", offset=5, tag=None, frame=7)
    with (
        pytest.raises(PgOutputError) as raised,
        _worker_errors.worker_errors(),
        _worker_errors.worker_errors(),
    ):
        raise first
    told = str(raised.value)
    assert told.count(_worker_errors._PREFIX) == 1
    assert told.splitlines()[0] == "frame 7: a [bad_value] text [bad_value]"
    found = error_of(RuntimeError(f"Traceback\n  before: {told}\n\n  behind"))
    assert type(found) is DecodeError
    assert (found.args, found.path) == (("a [bad_value] text",), None)
    assert (found.code, found.offset, found.tag, found.frame) == ("bad_value", 5, None, 7)
    gone = told.replace("DecodeError", "NotThere")
    assert type(error_of(RuntimeError(gone))) is PgOutputError
