"""Mode "manifest" of the source: executors write files of changes and report the files.

A file holds the changes of one version of one table, in the order of the stream. Part of its name
is random. A task that runs twice, or goes on after Spark has given it up, therefore never writes
into another task's file. Only the files that the DataFrame lists are valid.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from pgoutput_fast.apply.delta_place import directory_of
from pgoutput_fast.apply.delta_statistics import bounded_leaves, repeating
from pgoutput_fast.apply.naming import stored_table
from pgoutput_fast.apply.stored_changes import BatchConversion, with_a_column
from pgoutput_fast.changelog.changes import ChangeReader
from pgoutput_fast.changelog.history import HistoryPolicy, history_of
from pgoutput_fast.changelog.remote import refuse_secrets
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.names import shown_table

if TYPE_CHECKING:
    from pgoutput_fast.changelog.read_plan import Read
    from pgoutput_fast.policies import Policies
    from pgoutput_fast.segments import SegmentMetadata

SCHEMA = pa.schema(
    {
        "relation_id": pa.int64(),
        "table": pa.string(),
        "path": pa.string(),
        "rows": pa.int64(),
        "bytes": pa.int64(),
        "first_lsn": pa.int64(),
        "last_lsn": pa.int64(),
    }
)
"""The DataFrame's columns; the LSNs are the smallest and largest `commit_lsn` of each file."""

DDL = "relation_id bigint, table string, path string, rows bigint, bytes bigint, first_lsn bigint, last_lsn bigint"  # noqa: E501

_PENDING = 64 << 20
"""Bytes of changes of all tables that a task keeps in memory before it writes."""
_ROW_GROUP = 16 << 20
"""Bytes of changes of one table that make a row group; memory pressure may write fewer."""


def _of_parquet(schema: pa.Schema) -> pa.Schema:
    """Return a schema with times in microseconds, because Spark cannot read nanoseconds."""
    fields = [field.with_type(_micros(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _micros(type_: pa.DataType) -> pa.DataType:
    if type_ == pa.time64("ns"):
        return pa.time64("us")
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_micros(field.type)) for field in type_])
    if pa.types.is_list(type_):
        field = type_.value_field
        return pa.list_(field.with_type(_micros(field.type)))
    return type_


class _ChangeFile:
    """One file with changes of one table.

    Parameters
    ----------
    files : pyarrow.fs.FileSystem
    root : str
        The directory that holds the files of all tables.
    relation : Relation
    schema : pyarrow.Schema
    """

    def __init__(self, files: Any, root: str, relation: Any, schema: pa.Schema) -> None:
        self._relation = relation
        self._files, self._schema = files, _of_parquet(schema)
        name = directory_of(stored_table(relation.namespace, relation.name))
        self._directory = f"{root}/{name}"
        self._path = f"{self._directory}/{relation.relation_id}-{uuid.uuid4().hex}.parquet"
        self._writer: Any = None
        self._waiting: list[pa.RecordBatch] = []
        self.pending = 0
        self._rows = 0
        self._first, self._last = 1 << 63, 0

    def add(self, changes: pa.RecordBatch) -> None:
        """Keep changes in memory, and write them once there are enough for a row group."""
        self._waiting.append(changes)
        self.pending += changes.nbytes
        if self.pending >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the changes that are in memory."""
        if not self._waiting:
            return
        rows = pa.Table.from_batches(self._waiting).cast(self._schema)
        if self._writer is None:
            self._files.create_dir(self._directory, recursive=True)
            self._writer = pq.ParquetWriter(
                self._path, self._schema, filesystem=self._files, compression="zstd",
                use_dictionary=repeating(rows), write_statistics=bounded_leaves(self._schema),
            )  # fmt: skip
        self._waiting, self.pending = [], 0
        self._writer.write_table(rows, row_group_size=max(1, len(rows)))
        lsns = rows.column("commit_lsn")
        self._first = min(self._first, lsns[0].as_py())
        self._last = max(self._last, lsns[-1].as_py())
        self._rows += len(rows)

    def finish(self) -> dict[str, Any]:
        """Close the file and return its row of the DataFrame."""
        self.flush()
        self._writer.close()
        return {
            "relation_id": self._relation.relation_id,
            "table": shown_table(self._relation),
            "path": self._path,
            "rows": self._rows,
            "bytes": self._files.get_file_info(self._path).size,
            "first_lsn": self._first,
            "last_lsn": self._last,
        }

    def discard(self) -> None:
        """Delete the file, because the task has failed."""
        if self._writer is not None:
            with contextlib.suppress(OSError, pa.ArrowException):
                self._writer.close()
                self._files.delete_file(self._path)


def write_changes(
    reads: Sequence[Read],
    metadata: SegmentMetadata,
    directory: str,
    output: str,
    *,
    tables: tuple[str, ...] | None,
    policies: Policies,
    history: HistoryPolicy,
) -> Iterator[pa.RecordBatch]:
    """Write the changes of reads into files, and yield the list of the files.

    Parameters
    ----------
    reads : sequence of Read
        In the order of the stream.
    metadata : SegmentMetadata
    directory : str
        The change log, whose schema history has the types.
    output : str
        A directory, or a URL such as ``s3://bucket/files``.
    tables, policies, history
        As in the options of the source.

    Raises
    ------
    PgOutputError
        A frame or a value is refused, or the files can't be written.
    """
    # Again: the environment of this machine may set another endpoint.
    refuse_secrets(output, parameter="output")
    try:
        files, root = fs.FileSystem.from_uri(output) if "://" in output else (
            fs.LocalFileSystem(), output
        )  # fmt: skip
    except (ValueError, OSError, pa.ArrowException) as error:
        raise PgOutputError(
            f"can't write into {output}: {error}", code="io_failed", path=str(output)
        ) from error
    decoding: dict[str, Any] = {
        "policies": policies, "target": "spark", "tables": tables, "on_error": "raise",
        "max_bytes": 16 << 20,
    }  # fmt: skip
    reader = ChangeReader(decoding, history_of([directory]), history)
    open_files: dict[tuple[int, pa.Schema], tuple[_ChangeFile, BatchConversion]] = {}
    try:
        for read in reads:
            for frame_run in reader.frame_runs(read, metadata):
                for changes, decoded in reader.changes(frame_run):
                    batch = with_a_column(decoded)
                    key = changes.relation.relation_id, batch.schema
                    if key not in open_files:
                        form = BatchConversion.of(batch.schema, ())
                        file = _ChangeFile(files, root, changes.relation, form.schema)
                        open_files[key] = file, form
                    file, form = open_files[key]
                    file.add(form.batch(batch))
                while sum(file.pending for file, _ in open_files.values()) > _PENDING:
                    max(
                        (file for file, _ in open_files.values()), key=lambda file: file.pending
                    ).flush()
        manifest = [file.finish() for file, _ in open_files.values()]
    except BaseException as error:
        for file, _ in open_files.values():
            file.discard()
        if isinstance(error, (OSError, pa.ArrowException)):
            raise PgOutputError(
                f"can't write into {output}: {error}", code="io_failed", path=str(output)
            ) from error
        raise
    yield pa.RecordBatch.from_pylist(manifest, schema=SCHEMA)
