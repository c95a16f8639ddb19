"""Have Spark run functions of this package on its executors."""

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
_TOLD = 0.5  # seconds between two looks whether a job has ended


class Jobs(Protocol):
    """What runs functions, each on arguments of its own, beside each other."""

    @property
    def cores(self) -> int:
        """So many at a time.

        Raises
        ------
        RetryableError
            Nobody can tell any more.
        """

    def run(
        self,
        what: str,
        function: Callable[[_T], _R],
        tasks: Sequence[_T],
        tell: Callable[[], None],
    ) -> list[_R]:
        """Run a function once for each of some arguments, each in a task of its own.

        A task may run several times, also at the same time: the function has to be such that this
        does no harm.

        Parameters
        ----------
        what : str
            What is done.
        function : callable
            A module's.
        tasks : sequence
        tell : callable
            Called now and then.

        Returns
        -------
        list
            The results, in the order of the arguments.

        Raises
        ------
        PgOutputError
            As the function has raised it; or the tasks can't be run.
        """


class SparkJobs:
    """See `Jobs`: tasks of Spark."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        # One thread, as each has a connection of its own to the JVM.
        self._thread = ThreadPoolExecutor(1, "pgoutput_fast-spark")

    @property
    def cores(self) -> int:
        """See `Jobs`."""
        with calls("say how many tasks it runs"):
            return int(self._spark.sparkContext.defaultParallelism)

    def run(
        self,
        what: str,
        function: Callable[[_T], _R],
        tasks: Sequence[_T],
        tell: Callable[[], None],
    ) -> list[_R]:
        """See `Jobs`."""
        job = self._thread.submit(self._run, what, function, tasks)
        while not wait([job], _TOLD).done:
            tell()
        from pyspark.errors import PythonException

        with calls(what, PythonException):  # an error of a function comes again
            found = job.result()
        results = {number: unpickled(payload) for number, payload in found}
        for number in range(len(tasks)):
            if isinstance(results[number], PgOutputError):
                raise results[number]
        return [results[number] for number in range(len(tasks))]

    def _run(
        self, what: str, function: Callable[[_T], _R], tasks: Sequence[_T]
    ) -> list[tuple[int, bytes]]:
        payloads = [pickle.dumps(task) for task in tasks]

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            prepare()
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    made = pa.array([outcome(function, payloads[number])], pa.binary())
                    columns = [pa.array([number], pa.int64()), made]
                    yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)

        self._spark.sparkContext.setJobDescription(f"pgoutput: {what}")  # of this thread
        numbers = self._spark.range(0, len(tasks), 1, len(tasks))
        found = numbers.mapInArrow(run, _DDL).toArrow()
        return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


def outcome(function: Callable[[Any], Any], task: bytes) -> bytes:
    """What a function gives for an argument, or the error of this package that it raises.

    Such an error comes back as what it is, and its task is not run again.
    """
    result: Any
    try:
        result = function(unpickled(task))
    except PgOutputError as error:
        result = error
    return pickle.dumps(result)


def unpickled(payload: bytes) -> Any:
    """What this module has pickled, on the driver or on an executor."""
    return pickle.loads(payload)  # noqa: S301
