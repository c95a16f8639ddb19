"""What Spark's Python workers print when Spark has enough of their rows."""

from __future__ import annotations

import gc
import importlib.machinery
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.commands.builds import clean_environment
from support.frames.made_vectors import TWO, insert, relation, text
from support.sparks.spark_frames import land, transaction

from pgoutput_fast.spark import _worker

LIMITED = """
import sys
import warnings
warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
from pgoutput_fast.spark import (
    PgOutputDataSource, decode_frames, decode_udf, read_segments, session
)
spark = session("local[1]", configuration={"spark.driver.memory": "1g"})
relation, row = (bytes.fromhex(frame) for frame in sys.argv[2:])
frames = spark.range(0, 300_000, 1, 1).selectExpr(f"x'{row.hex()}' AS data")
changes = decode_frames(frames, "public.t", [relation])
print([found.after.id for found in changes.limit(3).collect()])
print(changes.take(1)[0].after.id)
alone = frames.select(decode_udf("data", "public.t", [relation]).alias("change"))
print(alone.take(1)[0].change.after.id)
segments = read_segments(spark, sys.argv[1], "public.t", partitions=1)
print(segments.take(1)[0].after.id, segments.limit(1).collect()[0].after.id)
spark.dataSource.register(PgOutputDataSource)
source = spark.read.format("pgoutput").option("table", "public.t").load(sys.argv[1])
print(source.take(1)[0].after.id)
# The same worker's other errors are told as ever.
def fail(batches):
    yield from batches
    raise ValueError("of its own")
try:
    changes.select("op").mapInArrow(fail, "op string").count()
except Exception as error:
    print("of its own" in str(error))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.spark
def test_a_limit_that_ends_early_prints_nothing(tmp_path: Path) -> None:
    frames = [relation(TWO), insert(text("7"), text("x" * 100))]
    many = transaction(1 << 40, 7, *(200_000 * frames[1:]))
    land(tmp_path / "segments", [frames[0], *many], segment_bytes=1 << 30)
    arguments = [str(tmp_path / "segments"), *(frame.hex() for frame in frames)]
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        env=clean_environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    told = ["[7, 7, 7]", "7", "7", "7 7", "7", "True"]
    assert run.stdout.splitlines() == told, run.stderr
    assert "BrokenPipeError" not in run.stderr


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError])
def test_a_closed_socket_is_no_error(error: type[OSError], capsys: pytest.CaptureFixture) -> None:
    try:
        raise error
    except error:
        _worker._Traceback().print_exc()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_other_errors_are_printed(error: type[Exception], capsys: pytest.CaptureFixture) -> None:
    try:
        raise error("something else")
    except error:
        _worker._Traceback().print_exc()
    assert capsys.readouterr().err.endswith(f"{error.__name__}: something else\n")


def test_nothing_is_touched_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    before = dict(vars(main))
    _worker.prepare()
    assert vars(main) == before


def test_what_modules_made_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = ModuleType("__main__")
    daemon.__spec__ = importlib.machinery.ModuleSpec("pyspark.daemon", None)
    monkeypatch.setitem(sys.modules, "__main__", daemon)
    before = gc.get_freeze_count()
    try:
        _worker.prepare()
        frozen = gc.get_freeze_count()
        assert frozen > before + 10_000
        # Later tasks leave what they make to the collector, unless they import modules. The limits
        # lie between, as some of what is frozen may have been freed by then.
        made = [[] for _ in range(20_000)]
        _worker.prepare()
        assert gc.get_freeze_count() < frozen + len(made) // 2
        monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
        _worker.prepare()
        assert gc.get_freeze_count() > frozen + len(made) // 2
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("module", "printed"),
    [("pyspark.sql.streaming.python_streaming_source_runner", ""), ("another", "of a socket")],
)
def test_a_query_that_is_stopped_prints_nothing(
    module: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = importlib.machinery.ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    _worker.end_quietly()
    sys.excepthook(BrokenPipeError, BrokenPipeError("of a socket"), None)
    told = capsys.readouterr().err
    assert told == "" if printed == "" else printed in told
    sys.excepthook(ValueError, ValueError("something else"), None)
    assert "ValueError: something else" in capsys.readouterr().err
