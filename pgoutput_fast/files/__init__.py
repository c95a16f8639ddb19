"""Write changes as typed files: Parquet or Arrow, one or more per table.

>>> from pgoutput_fast import files
>>> files.export("segments", "tables", "parquet")  # doctest: +SKIP

The same call, made again, goes on where the last one ended: after a kill it finishes the work, and
after more was captured it adds what is new. ``docs/how-to/export-files.md`` describes what is
written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pgoutput_fast._disk import claim_directory
from pgoutput_fast.columnar.decoder import ColumnarDecoder
from pgoutput_fast.columnar.options import OnError
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.history import HistoryFollower, HistoryPolicy, check_policy, history_of
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.options import byte_count, choice
from pgoutput_fast.policies import Policies
from pgoutput_fast.segments.format import require_pyarrow

if TYPE_CHECKING:
    from pgoutput_fast.captured.units import Chunk, Plan, Source, Unit
    from pgoutput_fast.types import TypeRegistry

    from ._consuming import Registered

__all__ = ["FORMATS", "ExportProgress", "ExportResult", "ExportedTable", "export"]

Format = Literal["parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)


def __dir__() -> list[str]:
    """The public names, without those that this module imports."""
    return sorted(__all__)


class ExportProgress(NamedTuple):
    """How far an export has come."""

    bytes: int
    """Bytes of the source's files that were read in this call."""
    total_bytes: int
    """Bytes of the source's files that this call reads."""
    rows: int
    """Rows that this call has decoded."""
    rows_written: int
    """Of these rows, those that are in files."""


class ExportedTable(NamedTuple):
    """One version of a table, and the files that the directory has of it."""

    namespace: str
    name: str
    """The names that the table had last."""
    version: int
    """1 for the table's first schema (columns, types, keys, OID), 2 for the next one, and so on."""
    rows: int
    """All rows of this version, those of earlier calls included."""
    files: tuple[Path, ...]
    """Its files in the order of the stream."""
    relation_id: int
    """The table's OID. A table that is renamed keeps it; one that is made anew gets another."""


class ExportResult(NamedTuple):
    """The result of an export."""

    rows: int
    """Rows that this call wrote."""
    errors: int
    """Frames that this call refused and put aside, with ``on_error="collect"``."""
    rolled_back: int
    """Rows of a recording that were rolled back; they are not written."""
    undecided: int
    """Rows of a recording that ends before their transaction does; their commit_lsn is null."""
    position: int | None
    """LSN up to which the directory has everything, but of the tables in `elsewhere`; None for a
    recording, and if there were no changes of the wanted tables."""
    tables: tuple[ExportedTable, ...]
    """All tables of the directory, also those to which this call added nothing."""
    elsewhere: Mapping[int, int]
    """The same LSN, by relation id, of tables that wait for a snapshot: a later call goes on there
    once it has come."""


def export(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    directory: str | os.PathLike[str],
    format: Format = "parquet",
    *,
    before: bool = False,
    tables: str | Iterable[str] | None = None,
    columns: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
    policies: Policies | None = None,
    registry: TypeRegistry | None = None,
    history: HistoryPolicy = "error",
    on_error: OnError = "raise",
    part_bytes: int = 1 << 30,
    progress: Callable[[ExportProgress], None] | None = None,
    consumer: str | None = None,
) -> ExportResult:
    """Write the changes of segments, or of a recorded stream, to one file per relation.

    Parameters
    ----------
    paths : path or iterable of paths
        A change log with its snapshots, files of consecutive segments, or one recorded stream.
    directory : path
        A new or empty directory, or one that an export of the same source made, which is continued.
    format : {"parquet"}
    before : bool
        Also write the old row, as columns ``before_…``.
    tables, columns, policies, registry
        See :class:`~pgoutput_fast.ColumnarDecoder`. Without `registry`, the types are those of the
        directory's history, if it has one.
    history : {"error", "older", "newer"}
        What to do with a value whose type was altered at about the same time: refuse it, or decode
        it in the type's older or newer form.
    on_error : {"raise", "collect"}
        Raise the error of a refused frame, or put the frame into the table of errors.
    part_bytes : int
        Bytes of input after which a table gets a new part, at the next end of a segment. After a
        kill, at most this much work is repeated. The export needs about as much disk space for a
        temporary file in `directory`. Rows of snapshots need none, unless `on_error` is "collect".
    progress : callable
        Called after each batch of frames, and each table that is written.
    consumer : str, optional
        Name of this export as a consumer of the change log, which then keeps what the export has
        not read. Each export needs its own name.

    Raises
    ------
    PgOutputError
        The input can't be read, or does not follow what the directory has. The directory has other
        contents, or was begun with other options. A frame is refused. A file can't be written.
        Another export is writing there. Finished parts stay.
    TypeError
        An argument is of another type.
    """
    require_pyarrow()
    from pgoutput_fast.captured.units import open_source

    from ._consuming import Registered
    from ._write import refusals

    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    _check_arguments(part_bytes, format)
    decoding: dict[str, Any] = {
        "policies": policies or Policies(),
        "target": "portable",
        "tables": (tables,) if isinstance(tables, str) else tables and tuple(tables),
        "columns": columns
        if columns is None or isinstance(columns, Mapping)
        else ((columns,) if isinstance(columns, str) else tuple(columns)),
        "registry": registry,
        "on_error": on_error,
        "max_bytes": 16 << 20,
    }
    ColumnarDecoder(**decoding)  # refuses wrong arguments before anything is made
    check_policy(history)
    options = {
        "before": bool(before),
        "tables": decoding["tables"] and sorted(decoding["tables"]),
        "columns": _listed(decoding["columns"]),
        "policies": _listed(dataclasses.asdict(decoding["policies"])),
        # Only whether there is a registry: its types may change, as those of the database do.
        "types": registry is not None,
    }
    with contextlib.ExitStack() as stack:
        # Before anything is looked at, so that it is kept.
        registered = stack.enter_context(Registered(given, consumer)) if consumer else None
        source = open_source(given)
        if source is None:
            return ExportResult(0, 0, 0, 0, None, (), {})
        follower = None
        if registry is None and source.identity["kind"] == "segments":
            found = history_of(given)  # after it is known up to where the source is read
            follower = None if found is None else HistoryFollower(found, history)
        if follower is not None:
            decoding["registry"], options["types"] = follower.registry, True
        stack.enter_context(_claimed(Path(directory)))
        with refusals(str(directory)):
            run = _Export(
                Path(directory), format, source, options, decoding, follower, progress, registered
            )
        try:
            result = run.result(part_bytes)
        finally:
            run.close()
        if run.is_new and tables is not None and not (result.tables or result.errors):
            # A mistyped name would else be one of the options that this directory was begun with.
            with refusals(str(directory)):
                run.discard()
            if registered is not None:
                registered.drop()
            return result._replace(position=None, elsewhere={})
        if registered is not None:
            registered.keep()
        return result


def _check_arguments(part_bytes: object, format: str) -> None:
    byte_count(1).check("part_bytes", part_bytes)
    choice(*FORMATS).check("format", format)


def _listed(value: Any) -> Any:
    """An option's value as JSON has it."""
    if isinstance(value, Mapping):
        return {name: _listed(one) for name, one in value.items()}
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else value


@contextlib.contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """Make the directory if it is new, and keep other exports out of it."""
    try:
        made = not directory.exists()
    except OSError as error:
        raise PgOutputError(
            f"can't use {directory} for files: {error.strerror}",
            code="io_failed",
            path=str(directory),
        ) from error
    lock = claim_directory(directory, "export", "files")
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):
                directory.rmdir()  # if nothing was written
        os.close(lock)


class _Export:
    """An export into one directory."""

    def __init__(
        self,
        directory: Path,
        format: str,
        source: Source,
        options: dict[str, Any],
        decoding: dict[str, Any],
        follower: HistoryFollower | None,
        progress: Callable[[ExportProgress], None] | None,
        consumer: Registered | None,
    ) -> None:
        from ._manifest import TEMPORARY, new_manifest
        from ._write import Store

        self._directory = directory
        self._source = source
        self._decoding = decoding
        self._follower = follower
        self._before = options["before"]
        self._progress = progress
        self._consumer = consumer
        self._counts = dict.fromkeys(("rows", "errors", "rolled_back", "undecided"), 0)
        self._bytes = self._total_bytes = self._rows_decoded = 0
        self._check_contents()
        self._store = Store(directory, format)
        found = self._store.load()
        if found is not None:
            self._check(found, format, options)
        self.is_new = found is None
        self._manifest = found or new_manifest(format, options, source.identity)
        TEMPORARY.make(directory)

    def _check_contents(self) -> None:
        """Refuse a directory that is not an export's."""
        from ._manifest import NAME, TEMPORARY

        found = {path.name for path in self._directory.iterdir()} - {TEMPORARY.name}
        if found and NAME not in found:
            shown = ", ".join(sorted(found)[:3]) + (", …" if len(found) > 3 else "")
            raise PgOutputError(
                f"{self._directory} has other things in it ({shown})",
                code="not_ours",
                hint="Give a new or empty directory, or one that an export has made",
                path=str(self._directory),
            )

    def _check(self, found: dict[str, Any], format: str, options: dict[str, Any]) -> None:
        """Refuse to continue an export that was begun with other options or of another source."""

        def differs(message: str, parameter: str | None = None) -> PgOutputError:
            hint = "Give another directory, or remove this one to begin again"
            return PgOutputError(
                f"{self._directory} {message}", code="another_history",
                parameter=parameter, hint=hint, path=str(self._directory),
            )  # fmt: skip

        if found["format"] != format:
            raise differs(f"was begun as {found['format']}, not {format}", "format")
        for name, value in self._source.identity.items():
            before = found["source"].get(name)
            if before != value:
                raise differs(
                    f"has the changes of another source: {name} {before!r} is not {value!r}"
                )
        for name, value in options.items():
            before = found["options"].get(name)
            if before == value:
                continue
            if name == "types":
                begun, now = ("with", "without") if before else ("without", "with")
                raise differs(
                    f"was begun {begun} the types that the server has, and would go on {now} them",
                    "registry",
                )
            if name == "policies":
                name, before, value = next(
                    (one, before.get(one), now)
                    for one, now in value.items()
                    if before.get(one) != now
                )
            raise differs(f"was begun with {before!r}, not {value!r}", name)

    def close(self) -> None:
        """Drop the work that was not finished."""
        self._store.close()

    def discard(self) -> None:
        """Delete what was made in a directory that was new, and nothing else."""
        self._store.discard(self._manifest)

    def result(self, part_bytes: int) -> ExportResult:
        """Write what the directory does not have yet, and return what was done."""
        from pgoutput_fast.captured.progress import Progress

        manifest = self._manifest
        progress = None
        if manifest["position"] is None:
            progress = self._source.begin()
            manifest["start"] = progress and format_lsn(progress.position.lsn)
        elif manifest["position"] != "end":
            progress = Progress.of(manifest)
        is_read = manifest["position"] is not None
        if self._consumer is not None and progress is not None:
            self._consumer.begin(progress.position, is_new=not is_read)
        while (plan := self._source.plan(manifest, progress, part_bytes)) is not None:
            self._total_bytes = self._bytes + plan.total
            self._step(plan)
            progress, is_read = plan.after, True
        position = progress.position if progress is not None and is_read else None
        return ExportResult(
            **self._counts,
            position=None if position is None else position.lsn,
            tables=tuple(self._tables()),
            elsewhere={} if position is None else dict(position.tables),
        )

    def _tables(self) -> Iterator[ExportedTable]:
        for table in self._manifest["tables"]:
            for version in table["versions"]:
                yield ExportedTable(
                    table["namespace"],
                    table["name"],
                    version["version"],
                    version["rows"],
                    tuple(self._directory / part["file"] for part in version["parts"]),
                    version["relation_id"],
                )

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(
                ExportProgress(
                    self._bytes, self._total_bytes, self._rows_decoded, self._counts["rows"]
                )
            )

    def _step(self, plan: Plan) -> None:
        """Decode some units from start to end, and write their contents."""
        from ._manifest import TEMPORARY
        from ._step import Step
        from ._write import refusals

        path = TEMPORARY.path(self._directory) / "rows"
        with (
            refusals(str(self._directory)),
            contextlib.closing(
                Step(path, self._decoding, before=self._before, follower=self._follower)
            ) as step,
        ):
            try:
                for unit in plan.units:
                    if not step.put_off(unit):
                        for chunk in self._chunks(unit, step):
                            step.add(chunk)
            except PgOutputError:
                step.refuse_earlier(self._source.chunks)
                raise
            self._write(step)
        if plan.after is None:
            self._manifest["position"] = "end"
        else:
            plan.after.store(self._manifest)
        self._store.commit(self._manifest)
        if self._consumer is not None and plan.after is not None:
            self._consumer.advance(plan.after.position)
        TEMPORARY.delete(self._directory, path.name, missing_ok=True)
        self._tell()

    def _chunks(self, unit: Unit, step: Any) -> Iterator[Chunk]:
        """The frames of a unit, which are told as read when the next ones are asked for."""
        done = self._bytes
        for chunk in self._source.chunks(unit):
            decoded = step.decoded
            yield chunk
            self._rows_decoded += step.decoded - decoded
            self._bytes = min(self._bytes + chunk.size, done + unit.size)
            self._tell()
        self._bytes = done + unit.size

    def _write(self, step: Any) -> None:
        """Write the contents of a step, table by table."""
        from ._events import ERRORS, EVENTS
        from ._manifest import Tables

        manifest, counts = self._manifest, self._counts
        tables = Tables(manifest)
        for shape, batches in step.tables(lambda unit: self._chunks(unit, step)):
            table, version = tables.version(shape, step.names[shape.relation_id])
            rows = self._store.table(table, version, shape.schema, batches)
            version["rows"] += rows
            counts["rows"] += rows
            self._tell()
        for what, schema in (("events", EVENTS), ("errors", ERRORS)):
            batches = step.beside(what)
            if batches is not None:
                written = self._store.beside(manifest, what, schema, batches)
                if what == "errors":
                    counts["errors"] += written
        for name in ("rolled_back", "undecided"):
            found = getattr(step, name)
            counts[name] += found
            manifest[name] += found
