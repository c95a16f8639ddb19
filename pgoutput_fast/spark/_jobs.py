"""Run functions of this package on Spark's executors."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa

from pgoutput_fast.errors import PgOutputError

from ._jvm import calls
from ._worker import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

_T = TypeVar("_T")
_R = TypeVar("_R")
_SCHEMA = pa.schema({"id": pa.int64(), "result": pa.binary()})
_DDL = "id bigint, result binary"
_TELL_INTERVAL = 0.5  # seconds between two calls of `tell` while a job runs


class Jobs(Protocol):
    """Runs a function on many arguments in parallel."""

    @property
    def cores(self) -> int:
        """The number of tasks that run at once.

        Raises
        ------
        RetryableError
            Spark does not answer any more.
        """

    def run(
        self,
        action: str,
        function: Callable[[_T], _R],
        tasks: Sequence[_T],
        tell: Callable[[], None],
    ) -> list[_R]:
        """Run a function once for each argument, each in its own task.

        A task may run several times, even at the same time. The function must allow this.

        Parameters
        ----------
        action : str
            What the tasks do, for errors and Spark's user interface.
        function : callable
            A function at the top level of a module.
        tasks : sequence
            The arguments.
        tell : callable
            Called from time to time while the tasks run.

        Returns
        -------
        list
            The results, in the order of the arguments.

        Raises
        ------
        PgOutputError
            The function has raised it, or Spark cannot run the tasks.
        """


class SparkJobs:
    """Runs functions as tasks of Spark; see `Jobs`."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        # One thread, because each thread opens its own connection to the JVM.
        self._thread = ThreadPoolExecutor(1, "pgoutput_fast-spark")

    @property
    def cores(self) -> int:
        """See `Jobs`."""
        with calls("say how many tasks it runs"):
            return int(self._spark.sparkContext.defaultParallelism)

    def run(
        self,
        action: str,
        function: Callable[[_T], _R],
        tasks: Sequence[_T],
        tell: Callable[[], None],
    ) -> list[_R]:
        """See `Jobs`."""
        job = self._thread.submit(self._run, action, function, tasks)
        while not wait([job], _TELL_INTERVAL).done:
            tell()
        from pyspark.errors import PythonException

        with calls(action, PythonException):  # an error of the function would only come again
            pairs = job.result()
        results = {number: unpickled(payload) for number, payload in pairs}
        for number in range(len(tasks)):
            if isinstance(results[number], PgOutputError):
                raise results[number]
        return [results[number] for number in range(len(tasks))]

    def _run(
        self, action: str, function: Callable[[_T], _R], tasks: Sequence[_T]
    ) -> list[tuple[int, bytes]]:
        payloads = [pickle.dumps(task) for task in tasks]

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            prepare()
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    payload = pa.array([outcome(function, payloads[number])], pa.binary())
                    columns = [pa.array([number], pa.int64()), payload]
                    yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)

        self._spark.sparkContext.setJobDescription(f"pgoutput: {action}")  # for this thread only
        numbers = self._spark.range(0, len(tasks), 1, len(tasks))
        table = numbers.mapInArrow(run, _DDL).toArrow()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def outcome(function: Callable[[Any], Any], task: bytes) -> bytes:
    """Return a function's pickled result, or the pickled error of this package that it raises.

    The error reaches the driver unchanged, and Spark does not run the task again.
    """
    result: Any
    try:
        result = function(unpickled(task))
    except PgOutputError as error:
        result = error
    return pickle.dumps(result)


def unpickled(payload: bytes) -> Any:
    """Load a payload that this module has pickled, on the driver or on an executor."""
    return pickle.loads(payload)  # noqa: S301
