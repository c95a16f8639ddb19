"""Calls into Java, by which PySpark has everything done: how their errors are said.

The Java process of the driver, its JVM, can be killed while the driver's Python goes on. Then each
call fails, and by which exception depends on the moment.
"""

from __future__ import annotations

import contextlib
import re
import socket
from typing import TYPE_CHECKING, Any

from pgoutput_fast.errors import PgOutputError, RetryableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANSWER = 5.0  # seconds until a JVM that accepts no connection is taken to be gone
_RAISED = re.compile(r"^[\w.]+(?:Error|Exception|Interrupt|Exit)(?::.*)?$")
_CAUSE = re.compile(r"^(?:Caused by)?: ([\w.$]+)(?:: (.*))?$")
"""A line of a Java stack trace that begins an exception: its class and its message."""


@contextlib.contextmanager
def calls(what: str, *lasting: type[Exception]) -> Iterator[None]:
    """Have errors of calls into Java say what Spark could not do.

    Parameters
    ----------
    what : str
        What is done.
    *lasting : type
        Exceptions that come again. All others may pass: executors, or a JVM, that were lost may be
        there later.

    Raises
    ------
    PgOutputError
        A call has failed.
    """
    try:
        yield
    except PgOutputError:
        raise
    except Exception as error:
        if is_gone():
            raise RetryableError(
                f"Spark could not {what}: its Java process, the driver's JVM, has ended, as by a "
                "kill or for lack of memory; start again, with a new Spark session",
                code="process_failed",
            ) from error
        kind = PgOutputError if isinstance(error, lasting) else RetryableError
        raise kind(f"Spark could not {what}: {said(error)}", code="io_failed") from error


def is_gone() -> bool:
    """Whether the JVM that this process had has ended."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001 - nothing public tells it
    if gateway is None:
        return False
    at = gateway.gateway_parameters
    # A call would tell too, but py4j logs a traceback of each one that fails.
    try:
        socket.create_connection((at.address, at.port), _ANSWER).close()
    except OSError:
        return True
    return False


def said(error: Exception) -> str:
    """One line of an error: of a traceback, its end; of a Java stack trace, its messages."""
    try:
        text = str(error)  # for which py4j asks the JVM
    except Exception:  # noqa: BLE001 - it is gone meanwhile
        text = ""
    found = raised_in(text)
    is_whole = _RAISED.match(found) or _messages(text)
    return found if is_whole else f"{type(error).__name__}: {found}"


def raised_in(text: str) -> str:
    """One line of what Spark says of an error.

    Of a traceback it is the end, of a Java stack trace the messages, else the first line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    if raised:
        return raised[-1]
    return _messages(text) or (lines[0] if lines else "without a message")


def _messages(text: str) -> str:
    """The messages of the exceptions of a Java stack trace; of those without one, the classes."""
    causes = [found for line in text.splitlines() if (found := _CAUSE.match(line))]
    messages: list[str] = []
    for one in causes:
        message = (one[2] or "").strip()
        # One that ends so has its cause say it, and one that says it all may be told twice.
        if message and not message.endswith(":") and not any(message in had for had in messages):
            messages.append(message)
    return "; ".join(messages or dict.fromkeys(one[1] for one in causes))
