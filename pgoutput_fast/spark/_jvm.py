"""Report errors of calls into Java, through which PySpark does all its work.

The driver's Java process, its JVM, can be killed while the driver's Python process goes on. Then
each call fails, with an exception that depends on the moment.
"""

from __future__ import annotations

import contextlib
import re
import socket
from typing import TYPE_CHECKING, Any

from pgoutput_fast.errors import PgOutputError, RetryableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANSWER = 5.0  # seconds after which a JVM that accepts no connection counts as ended
_RAISED = re.compile(r"^[\w.]+(?:Error|Exception|Interrupt|Exit)(?::.*)?$")
_CAUSE = re.compile(r"^(?:Caused by)?: ([\w.$]+)(?:: (.*))?$")
"""A line of a Java stack trace where an exception begins: its class and its message."""


@contextlib.contextmanager
def calls(action: str, *lasting: type[Exception]) -> Iterator[None]:
    """Raise errors of calls into Java as errors that say what Spark could not do.

    Parameters
    ----------
    action : str
        What the calls do.
    *lasting : type
        Exceptions that would come again. Any other exception may pass: lost executors, or a lost
        JVM, may be back later.

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
                f"Spark could not {action}: the driver's JVM has ended. It may have been killed, "
                "or had too little memory",
                code="process_failed",
                hint="Start again with a new Spark session",
            ) from error
        kind = PgOutputError if isinstance(error, lasting) else RetryableError
        raise kind(f"Spark could not {action}: {said(error)}", code="io_failed") from error


def is_gone() -> bool:
    """Return whether this process had a JVM that has ended."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001 - nothing public tells it
    if gateway is None:
        return False
    at = gateway.gateway_parameters
    # Do not make a call: py4j logs a traceback of each call that fails.
    try:
        socket.create_connection((at.address, at.port), _ANSWER).close()
    except OSError:
        return True
    return False


def said(error: Exception) -> str:
    """Return one line of an error: a traceback's end, or the messages of a Java stack trace."""
    try:
        text = str(error)  # py4j asks the JVM for the text
    except Exception:  # noqa: BLE001 - the JVM has ended
        text = ""
    message = raised_in(text)
    is_whole = _RAISED.match(message) or _messages(text)
    return message if is_whole else f"{type(error).__name__}: {message}"


def raised_in(text: str) -> str:
    """Return one line of Spark's text of an error.

    The line is the end of a traceback, the messages of a Java stack trace, or else the first line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    if raised:
        return raised[-1]
    return _messages(text) or (lines[0] if lines else "without a message")


def _messages(text: str) -> str:
    """Return the messages of a Java stack trace; the exceptions' classes if none has a message."""
    causes = [match for line in text.splitlines() if (match := _CAUSE.match(line))]
    messages: list[str] = []
    for cause in causes:
        message = (cause[2] or "").strip()
        # A message that ends with a colon is followed by its cause. Causes repeat messages, too.
        if (
            message
            and not message.endswith(":")
            and not any(message in earlier for earlier in messages)
        ):
            messages.append(message)
    return "; ".join(messages or dict.fromkeys(cause[1] for cause in causes))
