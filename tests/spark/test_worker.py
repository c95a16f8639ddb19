"""What Spark's Python workers print when Spark has enough of their rows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from builds import clean_environment
from made_vectors import TWO, insert, relation, text

from pgoutput_fast.spark import _worker

LIMITED = """
import sys
import warnings
warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
from pgoutput_fast.spark import decode_frames, session
spark = session("local[1]", configuration={"spark.driver.memory": "1g"})
relation, row = (bytes.fromhex(frame) for frame in sys.argv[1:])
frames = spark.range(0, 300_000, 1, 1).selectExpr(f"x'{row.hex()}' AS data")
changes = decode_frames(frames, "public.t", [relation])
print([found.after.id for found in changes.limit(3).collect()])
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
def test_a_limit_that_ends_early_prints_nothing() -> None:
    frames = [relation(TWO), insert(text("7"), text("x" * 100))]
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, *(frame.hex() for frame in frames)],
        env=clean_environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.stdout.splitlines() == ["[7, 7, 7]", "True"], run.stderr
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
    _worker.end_quietly()
    assert vars(main) == before
