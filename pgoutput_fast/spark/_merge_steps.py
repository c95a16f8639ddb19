"""Merge net changes into large state tables: Spark's executors search and rewrite files together.

The net changes are meanwhile in a file of the target that all tasks read. The driver decides which
rows to write, and commits.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from pgoutput_fast.apply.delta_files import DeltaFileWriter
from pgoutput_fast.apply.delta_merge import LocalSteps, balanced, counted, keyed
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.apply.delta_rewrite import MergeFiles, Rewrite
from pgoutput_fast.apply.delta_table import LakeTable
from pgoutput_fast.apply.folding import NetChanges

from ._staged_files import staging

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pgoutput_fast.apply.delta_files import Written
    from pgoutput_fast.apply.delta_merge import Merge
    from pgoutput_fast.apply.delta_rewrite import Hits, MergePart
    from pgoutput_fast.apply.delta_shape import Shape
    from pgoutput_fast.apply.delta_table import File
    from pgoutput_fast.apply.merge_keys import MergeKeys

    from ._jobs import Jobs


class NetFile(NamedTuple):
    """Net changes in a file of the target; `path` is in the target, the rest as in `NetChanges`."""

    path: str
    table: str
    relation_id: int | None
    key: tuple[str, ...]
    truncated: bool
    num_rows: int
    truncated_at: int | None


def write_net(place: DeltaPlace, net: NetChanges, prefix: str) -> NetFile:
    """Write net changes into a file of the target.

    Parameters
    ----------
    place : DeltaPlace
        The target's place.
    net : NetChanges
    prefix : str
        A directory in the target.

    Raises
    ------
    PgOutputError
        The storage has refused.
    """
    # Part of the name is random, because a task may run twice at the same time.
    path = f"{prefix}/{net.relation_id}-{uuid.uuid4().hex}.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with place.refusals(path):
        files = place.filesystem()
        if place.path is not None:
            files.create_dir(prefix, recursive=True)
        with (
            files.open_output_stream(path) as sink,
            pa.ipc.new_stream(sink, net.schema, options=options) as stream,
        ):
            for batch in net.batches():
                stream.write_batch(batch)
    return NetFile(
        path, net.table, net.relation_id, net.key, net.truncated, net.num_rows, net.truncated_at
    )


def opened_net(place: DeltaPlace, file: NetFile) -> NetChanges:
    """Return the net changes in a file; errors of reading it are errors of the storage."""

    def opened() -> Any:
        return pa.ipc.open_stream(place.filesystem().open_input_stream(file.path))

    def batches() -> Iterator[pa.RecordBatch]:
        with opened() as stream:
            yield from stream

    with place.refusals(file.path), opened() as stream:
        schema = stream.schema
    return NetChanges(
        file.table, file.relation_id, file.key, file.truncated, schema, file.num_rows, batches,
        file.truncated_at,
    )  # fmt: skip


class Staging(NamedTuple):
    """Where tasks write net changes that the driver merges.

    Fields: prefix (a directory in the target); least_bytes (of files to rewrite, from which on the
    driver merges).
    """

    prefix: str
    least_bytes: int


class MergedTable(NamedTuple):
    """A state table and its net changes, in a form that can be sent to tasks.

    Attributes
    ----------
    uri : str
        The target's URI.
    storage_options : dict of str to str
        May contain secrets.
    directory : str
        The table's directory in the target.
    shape : Shape
    marker : str or None
        The column that marks deleted rows.
    net : NetFile
    """

    uri: str
    storage_options: dict[str, str]
    directory: str
    shape: Shape
    marker: str | None
    net: NetFile

    def __repr__(self) -> str:
        return f"MergedTable({self.directory!r})"

    def opened(self) -> tuple[LakeTable, MergeFiles, NetChanges]:
        """Return the table, not loaded yet, its files for the merge, and the net changes."""
        place = DeltaPlace(self.uri, self.storage_options)
        table = LakeTable(place, self.directory, "", 0)
        return table, MergeFiles(table, self.shape, self.marker), opened_net(place, self.net)


class FindTask(NamedTuple):
    """Files for one task to search. Fields: table; files (with their numbers)."""

    table: MergedTable
    files: Sequence[tuple[int, File]]


class RewriteTask(NamedTuple):
    """Files for one task to rewrite.

    Fields: table; part (of the merge); partition_by (the table's partition columns).
    """

    table: MergedTable
    part: MergePart
    partition_by: list[str]


def find_hits(task: FindTask) -> list[Hits]:
    """Search some files for the rows of net changes; errors are those of the storage."""
    table, files, net = task.table.opened()
    schema = task.table.shape.schema
    with table.refusals():
        keys = keyed(net, schema)[0] if net.key else counted(net, schema)[0]
        names = net.key or [field.name for field in net.schema.field("row").type]
        return list(files.find(keys, names, task.files))


def rewrite_files(task: RewriteTask) -> Written:
    """Write a part of a merge; errors are those of the storage, and of values in partitions."""
    table, files, net = task.table.opened()
    prefix, schema = f"{net.relation_id}", task.table.shape.schema
    with (
        table.refusals(),
        DeltaFileWriter(table, schema, task.partition_by, prefix) as writer,
    ):
        Rewrite(files, net, task.part).write(writer)
        return writer.finish()


class SparkSteps(LocalSteps):
    """Steps of a merge that Spark's executors share if there is much to read; see `MergeSteps`.

    Parameters
    ----------
    jobs : Jobs
    least_bytes : int
        The process does a step itself if the step's files have fewer bytes.
    resources : contextlib.ExitStack
        Keeps the staged file of net changes until the merge has ended.
    net : NetFile, optional
        A file that already has the net changes; by default a step writes it when tasks need it.
    """

    def __init__(
        self, jobs: Jobs, least_bytes: int, resources: contextlib.ExitStack, net: NetFile | None
    ) -> None:
        self._jobs = jobs
        self._least_bytes = least_bytes
        self._resources = resources
        self._net = net

    def find(
        self, merge: Merge, keys: MergeKeys, names: Sequence[str], files: list[tuple[int, File]]
    ) -> Iterable[Hits]:
        """See `MergeSteps`."""
        sizes = [file.size for _, file in files]
        if not self._is_shared(sizes):
            return super().find(merge, keys, names, files)
        table = self._table(merge)
        tasks = [FindTask(table, group) for group in balanced(files, sizes, self._jobs.cores)]
        results = self._jobs.run("find rows of a state table", find_hits, tasks, _nothing)
        return itertools.chain.from_iterable(results)

    def rewrite(self, merge: Merge, writer: DeltaFileWriter) -> Written:
        """See `MergeSteps`."""
        if not self._is_shared([file.size for file in merge.files]):
            return super().rewrite(merge, writer)
        table = self._table(merge)
        parts = merge.parts(self._jobs.cores)
        tasks = [RewriteTask(table, part, writer.partition_by) for part in parts]
        results = self._jobs.run("write files of a state table", rewrite_files, tasks, _nothing)
        return [file for files in results for file in files]

    def _is_shared(self, sizes: Sequence[int]) -> bool:
        return bool(sizes) and sum(sizes) >= self._least_bytes

    def _table(self, merge: Merge) -> MergedTable:
        place = merge.table.place
        if self._net is None:
            self._net = write_net(place, merge.net, self._resources.enter_context(staging(place)))
        return MergedTable(
            place.uri, place.options, merge.table.directory, merge.merge_files.shape,
            merge.merge_files.marker, self._net,
        )  # fmt: skip


@contextlib.contextmanager
def spark_steps(jobs: Jobs, least_bytes: int, net: NetFile | None = None) -> Iterator[SparkSteps]:
    """Let Spark do the steps of a merge; the arguments are those of `SparkSteps`."""
    with contextlib.ExitStack() as resources:
        yield SparkSteps(jobs, least_bytes, resources, net)


def _nothing() -> None:
    """Report nothing: the thread that waits for the merge reports."""
