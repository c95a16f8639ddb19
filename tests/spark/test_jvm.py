"""What errors of calls into Java say, and that a JVM that has ended is known."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from support.expected_errors import expect_error

from pgoutput_fast.errors import PgOutputError, RetryableError
from pgoutput_fast.spark import _jvm
from pgoutput_fast.spark._jobs import SparkJobs

pytestmark = pytest.mark.spark

# As py4j gives it, but for most lines of the stacks.
CRASHED = """An error occurred while calling o66.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:\x20
\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:70)
Caused by: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 1 times\
: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).
\tat org.apache.spark.api.python.BasePythonRunner$1.applyOrElse(PythonRunner.scala:704)
Caused by: java.io.EOFException
\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:386)
\t... 24 more

Driver stacktrace:
\tat scala.Option.getOrElse(Option.scala:201)
Caused by: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).
\tat org.apache.spark.api.python.BasePythonRunner$1.applyOrElse(PythonRunner.scala:704)
"""
NO_MESSAGE = """An error occurred while calling o1.run.
: java.lang.RuntimeException
\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:386)
Caused by: java.io.EOFException
"""
OF_PYTHON = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "a.py", line 1, in run
ValueError: invalid literal
"""


@pytest.mark.parametrize(
    ("text", "one_line"),
    [
        (
            CRASHED,
            (
                "Job aborted due to stage failure: Task 0 failed 1 times: "
                "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)."
            ),
        ),
        (
            "An error occurred while calling o1.run.\n: a.B: first\n\tat c.D\nCaused by: e.F: why",
            "first; why",
        ),
        (NO_MESSAGE, "java.lang.RuntimeException; java.io.EOFException"),
        (OF_PYTHON, "ValueError: invalid literal"),
        ("[TABLE_OR_VIEW_NOT_FOUND] none\n'Plan", "RuntimeError: [TABLE_OR_VIEW_NOT_FOUND] none"),
        ("", "RuntimeError: without a message"),
    ],
)
def test_one_line_of_an_error(text: str, one_line: str) -> None:
    assert _jvm.said(RuntimeError(text)) == one_line


def test_an_error_that_only_the_jvm_can_tell() -> None:
    class Untold(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    assert _jvm.said(Untold()) == "Untold: without a message"


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """Where a JVM listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, port: socket.socket) -> None:
    parameters = SimpleNamespace(address="127.0.0.1", port=port.getsockname()[1])
    made = SimpleNamespace(gateway_parameters=parameters)
    monkeypatch.setattr(SparkContext, "_gateway", made)


class Refusing:
    """Of a session of which each call fails."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionRefusedError(f"no {name}")


@pytest.mark.usefixtures("gateway")
def test_calls_that_fail(port: socket.socket) -> None:
    with (
        expect_error(RetryableError, code="io_failed"),
        _jvm.calls("do it", TypeError),
    ):
        raise ValueError("too few")
    with (
        expect_error(code="io_failed") as lasting,
        _jvm.calls("do it", ValueError),
    ):
        raise ValueError("too few")
    assert not isinstance(lasting.value, RetryableError)
    own = PgOutputError("of its own")
    with pytest.raises(PgOutputError) as raised, _jvm.calls("do it"):
        raise own
    assert raised.value is own
    port.close()
    # What comes of a JVM that is gone is no lasting error, whatever it is.
    with (
        expect_error(RetryableError, code="process_failed"),
        _jvm.calls("do it", ValueError),
    ):
        raise ValueError("too few")


@pytest.mark.usefixtures("gateway")
def test_all_that_the_engine_asks_a_jvm_that_is_gone(port: socket.socket) -> None:
    port.close()
    session: Any = Refusing()
    jobs = SparkJobs(session)
    for ask in (
        lambda: jobs.cores,
        lambda: jobs.run("count", len, ["a"], lambda: None),
    ):
        with expect_error(RetryableError, code="process_failed"):
            ask()


def test_without_a_jvm_none_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)
    assert not _jvm.is_gone()
