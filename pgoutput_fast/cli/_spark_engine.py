"""Start Spark for a command, and log what its Java process prints."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ..errors import PgOutputError, RetryableError
from ..options import Options, flag, option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..spark import SparkEngine

_CONFIGURATION = {"spark.log.level": "ERROR"}
_RECORD = re.compile(r"(?:[-/\d]{8,10}[ T])?\d\d:\d\d:\d\d\S* ([A-Z]+) (.*)")
"""The beginning of a record in Java's log."""
_THROWN = re.compile(
    r'^Exception in thread "main" (.*)|'
    # The JVM did not start because it can't get the memory that it was told to use.
    r"^Error occurred during initialization of VM\n(.*)|"
    r"^(.*)\nError: Could not create the Java Virtual Machine",
    re.MULTILINE,
)
_MAY_PASS = re.compile(
    # Spark stops itself if no master answers. The other texts mean that nobody answers there.
    r"stopped SparkContext|Connection refused|Connection timed out|No route to host|"
    r"UnknownHostException|connect timed out|failed to connect to",
    re.IGNORECASE,
)
"""Matches reasons for a failed start that may pass."""
_BEGUN = b"\0begun\0"
"""Written to the pipe after everything that Java printed before the session was ready."""
_ENDING = 5.0  # seconds to wait for the rest of the output in the pipe

_log = logging.getLogger(__name__)


def _configuration(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Return Spark's settings by name."""
    del context, parameter
    configuration = {}
    for value in values:
        name, equals, setting = value.partition("=")
        if not (name.startswith("spark.") and equals):
            # The argument may contain a key of an object storage.
            raise click.BadParameter(
                "expected spark.NAME=VALUE; the value may be secret, and is not shown"
            )
        configuration[name] = setting
    return configuration


@dataclass(frozen=True)
class SparkOptions(Options):
    """Options of a sync with Spark."""

    stage: bool | None = option(
        flag(), None,
        "Copy segments into the target's storage, for executors that cannot read the directory.",
        shown_default="true if the target is a URL and Spark runs on a cluster",
    )  # fmt: skip


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options `--engine`, `--master` and `--conf`."""
    for decorator in reversed((
        click.option(
            "--engine",
            type=click.Choice(["local", "spark"]),
            default="local",
            help="In this process, or with Spark. [default: local]",
        ),
        click.option(
            "--master",
            metavar="URL",
            help="Master. [default: from spark-submit, else local[*]]",
        ),
        click.option(
            "--conf",
            metavar="spark.NAME=VALUE",
            multiple=True,
            callback=_configuration,
            help="Setting of Spark; repeatable.",
        ),
    )):  # fmt: skip
        command = decorator(command)
    return command


def check_options(engine: str, master: str | None, conf: Mapping[str, str]) -> None:
    """Refuse options that contradict each other.

    Raises
    ------
    click.UsageError
        Some of the options contradict each other.
    """
    for name, value in (("--master", master), ("--conf", conf)):
        if value and engine != "spark":
            raise click.UsageError(f"{name} is for --engine spark")


@contextlib.contextmanager
def running_engine(
    name: str,
    engine: str,
    master: str | None,
    conf: Mapping[str, str],
    *,
    stage: bool | None = None,
) -> Iterator[SparkEngine | None]:
    """Start an engine and stop its Spark at the end; None for the local engine.

    Parameters
    ----------
    name : str
        The command's name.
    engine, master, conf, stage
        The command's options.

    Raises
    ------
    PgOutputError
        Spark does not start; a `RetryableError` if it may start later.
    """
    if engine != "spark":
        yield None
        return
    # The start takes 10 to 30 seconds without any other output, imports included.
    _log.info(
        "starting Spark%s", "" if master is None else f" ({master})",
        extra={"event": "spark", "numbers": {} if master is None else {"master": master}},
    )  # fmt: skip
    from ..spark import SparkEngine
    from ..spark._jvm import is_gone
    from ..spark._session import begin_java, plain_session

    # PySpark's own handler would end a job in the middle of a window.
    interrupted = signal.getsignal(signal.SIGINT)
    settings = (master, f"pgoutput-fast {name}", {**_CONFIGURATION, **conf})
    output = _JavaOutput()
    root = logging.getLogger()
    root.addFilter(_is_not_of_py4j)
    try:
        try:
            begin_java(*settings, output.file)
            spark = plain_session(*settings)  # a sync does not use the source
        except BaseException as error:
            # An interrupted start has not failed.
            printed = output.end_start(well=not isinstance(error, Exception))
            if isinstance(error, PgOutputError) or not isinstance(error, Exception):
                raise
            raise not_started(error, printed) from error
        output.end_start(well=True)
        signal.signal(signal.SIGINT, interrupted)
        try:
            yield SparkEngine(spark, stage=stage)
        finally:
            # Do not stop a JVM that has ended: its last call has reported that. A signal to all
            # processes, as from a terminal or a service manager, may end the JVM just now.
            if not is_gone():
                with contextlib.suppress(Exception), warnings.catch_warnings():
                    # PySpark would warn in this log that the JVM was killed.
                    warnings.simplefilter("ignore", RuntimeWarning)
                    spark.stop()
    finally:
        root.removeFilter(_is_not_of_py4j)


def not_started(error: Exception, printed: str) -> PgOutputError:
    """Return the error that says why Spark does not start.

    Parameters
    ----------
    error : Exception
        The error that PySpark raised.
    printed : str
        The output of Spark's Java process.
    """
    from ..spark._jvm import is_gone, said

    # A JVM that ends at once gives the reason on its standard error only. Spark's log alone has the
    # answer of a master. Records with a stack trace are skipped, because they are raised, too.
    thrown = _THROWN.search(printed)
    logged = [line for level, line, more in records(printed) if level == logging.ERROR and not more]
    reason = thrown[thrown.lastindex or 0] if thrown else "; ".join(logged) or said(error)
    may_pass = is_gone() or _MAY_PASS.search(f"{error}\n{reason}")
    return (RetryableError if may_pass else PgOutputError)(f"Spark does not start: {reason}")


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Return False for the tracebacks that py4j logs of failed calls: the errors are raised."""
    return record.module != "java_gateway"


class _JavaOutput:
    """Logs the output of Spark's Java process, except that of a successful start.

    Attributes
    ----------
    file : int
        The file descriptor for Java's output.
    """

    def __init__(self) -> None:
        self._read, self.file = os.pipe()
        self._start = b""
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="pgoutput_fast-java", daemon=True).start()

    def end_start(self, *, well: bool) -> str:
        """Stop collecting the output of the start: settings, packages and warnings.

        Parameters
        ----------
        well : bool
            Whether Spark has started. If not, the output is logged.

        Returns
        -------
        str
            The output of the start.
        """
        os.write(self.file, _BEGUN)
        os.close(self.file)
        self._is_over.wait(_ENDING)
        text = self._start.decode(errors="replace").strip()
        if text and not well:
            _log.error("Spark failed; it printed the following", extra={"details": text})
        return text

    def _run(self) -> None:
        # Java may outlive this process for a moment.
        while some := os.read(self._read, 1 << 16):
            if not self._is_over.is_set():
                self._start, marker, some = (self._start + some).partition(_BEGUN)
                if not marker:
                    continue
                self._is_over.set()
            for level, said, details in records(some.decode(errors="replace")):
                extra = {"details": details} if details else {}
                _log.log(level, "Spark: %s", said, extra=extra)
        os.close(self._read)


def records(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the records of a Java log: level, first line, and the lines that follow it.

    Text that is no record, such as a worker's traceback, becomes a record of level WARNING.
    """
    parsed: list[tuple[int, str, list[str]]] = []
    for line in text.splitlines():
        match = _RECORD.match(line)
        if match is not None:
            level = logging.ERROR if match[1] in ("ERROR", "FATAL") else logging.WARNING
            parsed.append((level, match[2], []))
        elif parsed:
            parsed[-1][2].append(line)
        elif line.strip():
            parsed.append((logging.WARNING, line, []))
    for level, said, more in parsed:
        yield level, said, "\n".join(more)
