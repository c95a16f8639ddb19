"""`sync`: from a slot, or from a capture's directory, to tables that are kept up to date."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._disk import claim_directory
from ..captured.units import SegmentSource, open_source
from ..columnar.decoder import ColumnarDecoder
from ..directory.consumers import check_consumer_name, claim_consumer
from ..directory.known import known_tables
from ..directory.remote import refuse_secrets
from ..directory.requests import request_copy
from ..errors import PgOutputError, RetryableError
from ..history import check_policy, history_of
from ..lsn import check_lsn
from ..names import shown_table
from ..policies import Policies
from ..segments.listing import contents, has_begun
from .continuity import consumer_name, lost_tables, origin_of
from .departures import check_partitions, check_tables
from .duckdb_file import check_memory
from .embedded_capture import EmbeddedCapture, check_slot, libpq_keywords
from .syncing import (
    Engine,
    Syncing,
    SyncProgress,
)
from .targets import Kept, Origin, StoppedError, Stored
from .window_writer import PAUSE_BYTES, PAUSE_TIME, OnError, SyncOptions, Uncopied

if TYPE_CHECKING:
    from ..catalog import CatalogTable
    from ..connections import ConnectionParameters
    from ..history import HistoryPolicy
    from .duckdb_file import DuckdbFile
    from .targets import Target

_log = logging.getLogger(__name__)

_DUCKDB = "duckdb:"
_SCHEME = re.compile(r"(?!s3a?://|file://)[A-Za-z][A-Za-z0-9+.-]+:")
_FILES = (".duckdb", ".db", ".ddb")
"""How names of files end that are meant as such."""
_CATALOG_TIMEOUT = 10.0  # seconds to wait for the first catalogue
_WINDOW_BYTES = 64 << 20
_SHOWN = 8  # tables that a warning names
_POLL = 0.01  # seconds between two looks whether the capture has begun


def sync(
    dsn: str | None = None,
    *,
    target: str | os.PathLike[str],
    slot: str | None = None,
    publications: Sequence[str] | None = None,
    segments: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    snapshot: Literal["initial", "never"] = "initial",
    until: int | Literal["now"] | None = None,
    interval: float = 1.0,
    tables: str | Sequence[str] | None = None,
    policies: Policies | None = None, change_policies: bool = False,
    history: HistoryPolicy = "newer",
    schema_changes: Literal["evolve", "fail"] = "evolve",
    on_error: OnError = "pause",
    uncopied: Uncopied = "error",
    window_bytes: int | None = None,
    pause_bytes: int = PAUSE_BYTES, pause_time: float = PAUSE_TIME,
    consumer: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    partition_by: Mapping[str, Sequence[str]] | None = None,
    retention_hours: int | None = None, maintenance: bool | None = None,
    iceberg: str | Mapping[str, str] | None = None,
    changes: Literal["delta", "parquet"] | None = None,
    soft_deletes: str | None = None,
    duckdb_memory: int | None = None, lock_timeout: float | None = None,
    progress: Callable[[SyncProgress], None] | None = None,
    stop: threading.Event | None = None, engine: Engine | None = None, **capture_options: Any,
) -> SyncProgress:  # fmt: skip
    """Keep tables up to date with a server's, each change exactly once.

    Either a slot is captured, into a directory beside the target; or the directory of another
    capture is followed. However a call ends, even by a kill, the next one goes on.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL; by default as libpq's variables say.
    target : str or path
        ``duckdb:FILE``; or a directory, or ``s3://bucket/prefix``, for Delta tables.
    slot : str
        It is made if it does not exist.
    publications : list or tuple of str
    segments : path
        The directory of another capture, in place of `slot` and `publications`.
    directory : path
        Where the slot's changes are captured; by default beside the target, whose name with
        ``.segments`` behind it it has.
    snapshot : {"initial", "never"}
        As of :func:`pgoutput_fast.replication.capture`.
    until : int or "now", optional
        End when the tables have what was committed before this LSN, or by now.
    interval : float
        Seconds from one window to the next.
    tables : str or sequence of str
        ``namespace.name`` of those that are wanted; by default all. A target keeps to what it began
        with, as the changes of other tables are passed over. One has to be published when a slot is
        captured for a target without tables.
    policies : Policies
        What to do with values that a column can't hold. A target keeps to those with which it
        began; by default they are taken, and others are refused.
    change_policies : bool
        Whether other `policies` hold for the target from now on. Tables with columns that the
        difference concerns get a new snapshot.
    history : {"newer", "older", "error"}
        What to do with values of types that were altered at about that time: see docs/types.md.
    schema_changes : {"evolve", "fail"}
        Whether state tables follow when columns are added, dropped and altered.
    on_error : {"pause", "stop"}
        What to do when one table can't go on. "pause": the others go on. A table of which a value
        or a commit is refused waits with its changes in the directory, and is tried again each
        minute. For a table whose rows are not known any more, the capture is asked for a new copy.
        "stop": end with the error.
    uncopied : {"error", "empty", "changes"}
        What to do with a table of which the directory has no snapshot: end; take it that it was
        empty when the capture began; or write its change table alone.
    window_bytes : int
        About so many bytes of frames are decoded and written together at most; by default 64 MiB,
        or as `engine` says. A transaction, and a snapshot of a table, is not cut.
    pause_bytes, pause_time : int, float
        What is kept for a paused table: so many bytes of segments, by default 10 GiB, for so many
        seconds, by default 3 days. Beyond that its changes are passed over, and it is copied again.
    consumer : str
        The name by which the directory keeps what was not read; by default made of the target's.
    storage_options : mapping of str to str
        What delta-rs has to know of the object storage of Delta tables, such as
        ``{"AWS_ENDPOINT_URL": …}``; otherwise it looks where the AWS SDK does.
    partition_by : mapping of str to sequence of str
        Columns by which the Delta state table of a table, ``namespace.name``, is partitioned.
    retention_hours : int
        Files that Delta tables need no more are deleted after so many hours, by default 6: a
        reader may take so long.
    maintenance : bool
        Whether the small files of Delta tables are joined and old ones deleted, by default True;
        else that is left to another job, such as Spark's OPTIMIZE and VACUUM.
    iceberg : str or mapping of str to str
        A catalogue of pyiceberg: its name in pyiceberg's configuration, or its properties, with
        its name as ``name``, by default ``pgoutput_fast``, which readers have to use too. Change
        tables are Iceberg tables then, in its namespace ``changes``; a target keeps to that.
    changes : {"delta", "parquet"}
        Whether change tables are Delta tables, the default, or directories of Parquet files without
        a table's log, for readers that know no other form; a target keeps to that.
    soft_deletes : str
        A column that state tables get, of timestamps: a row that is deleted, or goes by a truncate
        or as its key changes, stays, and has there when that was committed. It goes when a row
        comes under its key, and when the table is copied again. By default deleted rows go.
    duckdb_memory : int
        The bytes of memory that DuckDB may take, by default a quarter of what the machine or the
        container has, but 384 MB at least and 4 GB at most. One transaction has to fit in it.
    lock_timeout : float
        End after so many seconds for which another process has a DuckDB file open. By default
        windows wait, and the capture goes on, until 10 GiB of segments wait for the file.
    progress : callable
        Called with a :class:`SyncProgress` before the first window, after each, and each second
        meanwhile.
    stop : threading.Event
        Ends it after the window that is being written.
    engine : Engine
        What writes the tables, such as a :class:`pgoutput_fast.spark.SparkEngine`; by default this
        process.
    **capture_options
        Options of :func:`pgoutput_fast.replication.capture`, or parameters of libpq.

    Returns
    -------
    SyncProgress

    Raises
    ------
    PgOutputError
        An option is wrong; the target is something else's, or has tables of another database;
        changes that it lacks are deleted; the rows of a table are not known; another sync writes
        it; or as of :func:`pgoutput_fast.replication.capture`.
    TypeError
        An argument has a wrong type.
    """
    options = checked_options(
        engine, tables, policies, history, schema_changes, on_error, uncopied, interval,
        window_bytes, pause_bytes, pause_time,
    )  # fmt: skip
    _check_reading(until, consumer)
    opened = open_target(
        target, storage_options=storage_options, partition_by=partition_by, maintenance=maintenance,
        retention_hours=retention_hours, iceberg=iceberg, changes=changes,
        soft_deletes=soft_deletes, duckdb_memory=duckdb_memory, lock_timeout=lock_timeout,
        policies=policies, change_policies=change_policies, tables=options.tables, engine=engine,
    )  # fmt: skip
    name, stop = consumer or opened.consumer, stop or threading.Event()
    with contextlib.ExitStack() as held:
        held.enter_context(_closing(opened, stop))
        if segments is not None:
            _refuse(dsn=dsn, slot=slot, publications=publications, directory=directory,
                    **capture_options)  # fmt: skip
            where = _begun(Path(segments), opened.target, partition_by)
            is_over = stop.is_set if until != "now" else lambda: True
            until_lsn, captured = (contents(where).end if until == "now" else until), None
        else:
            slot, publications = _required(slot, publications)
            where = opened.directory(directory)
            lost = _Lost(where, opened.target, name, asks=on_error == "pause")
            stored = _claim_target(opened.target, where, slot, dsn, capture_options, stop)
            _check_by_server(
                dsn, publications, capture_options, where, stored, partition_by, options
            )
            lost.ask()  # what is asked for now, the capture sees when it begins
            run = EmbeddedCapture(
                dsn, where, stop, until, slot=slot, publications=publications, snapshot=snapshot,
                **capture_options,
            )  # fmt: skip
            held.callback(run.end)
            run.start()
            lost.wait(run.is_over)
            is_over, until_lsn, captured = run.is_over, None, run.latest
        held.enter_context(_claimed(where, name))
        found = Syncing(
            where, opened.target, str(target), opened.decode_for, options, name, progress, captured,
            engine, opened.file,
        ).run(until_lsn, is_over, stop.is_set)  # fmt: skip
        if segments is None:
            run.result()
        return found


def _ending_by(stop: threading.Event) -> Callable[[], None]:
    """A function that raises `StoppedError` once an event is set."""

    def check() -> None:
        if stop.is_set():
            raise StoppedError("the sync was stopped before it could open its target")

    return check


def _check_reading(until: int | str | None, consumer: str | None) -> None:
    """Refuse an end that is no LSN, and what can't be a consumer's name."""
    if until is not None and until != "now":
        check_lsn("until", until)
    if consumer is not None:
        check_consumer_name(consumer)


@contextlib.contextmanager
def _closing(opened: OpenedTarget, stop: threading.Event) -> Iterator[None]:
    """Close a target at the end; one that is refused leaves no empty directory behind."""
    if opened.file is not None:
        opened.file.on_wait = _ending_by(stop)
    own = opened.path and (opened.path, opened.path.with_name(f"{opened.path.name}.lock"))
    made = [one for one in own or () if not one.exists()]
    try:
        yield
    except BaseException:
        for one in made:
            with contextlib.suppress(OSError):  # it is a file, has something in it, or is not there
                one.rmdir()
        raise
    finally:
        opened.target.close()


def _begun(
    directory: Path, target: Target, partition_by: Mapping[str, Sequence[str]] | None
) -> Path:
    """The directory, in which a capture has begun that knows the columns of partitions."""
    if not has_begun(directory):
        raise PgOutputError(f"no capture has begun in {directory}")
    _check_by_history(target, directory, partition_by)
    return directory


def _required(slot: str | None, publications: Sequence[str] | None) -> tuple[str, Sequence[str]]:
    """The slot and the publications of a capture, which have to be given."""
    if slot is None or publications is None:
        raise PgOutputError("give slot and publications, or segments")
    return slot, publications


def _refuse(**given: Any) -> None:
    """Refuse arguments that are a capture's, where another one's directory is read."""
    for name, value in given.items():
        if value is not None:
            raise PgOutputError(f"{name} does not go together with segments")


def checked_options(
    engine: Engine | None, tables: str | Sequence[str] | None, policies: Policies | None,
    history: HistoryPolicy, schema_changes: Any, on_error: Any, uncopied: Any, interval: float,
    window_bytes: int | None, pause_bytes: int = PAUSE_BYTES, pause_time: float = PAUSE_TIME,
) -> SyncOptions:  # fmt: skip
    """The options of a sync.

    Raises
    ------
    PgOutputError
        One is wrong.
    TypeError
        One has a wrong type.
    """
    wanted = (tables,) if isinstance(tables, str) else None if tables is None else tuple(tables)
    check_policy(history)
    for name, value, allowed in (
        ("schema_changes", schema_changes, ("evolve", "fail")),
        ("on_error", on_error, ("pause", "stop")),
        ("uncopied", uncopied, ("error", "empty", "changes")),
    ):
        if value not in allowed:
            raise PgOutputError(
                f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}"
            )
    for name, value in (("interval", interval), ("pause_time", pause_time)):
        if type(value) not in (int, float):
            raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
        if not value >= 0:
            raise PgOutputError(f"{name}={value}: expected a number of seconds")
    if window_bytes is None:
        window_bytes = _WINDOW_BYTES if engine is None else engine.window_bytes
    for name, value, least in (("window_bytes", window_bytes, 1), ("pause_bytes", pause_bytes, 0)):
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        if value < least:
            raise PgOutputError(f"{name} must be {least} at least, not {value}")
    made = policies or Policies()
    ColumnarDecoder(tables=wanted, policies=made)  # refuses wrong ones
    return SyncOptions(
        wanted, made, history, schema_changes, on_error, uncopied, interval, window_bytes,
        pause_bytes, pause_time,
    )  # fmt: skip


class OpenedTarget(NamedTuple):
    """A target, and what goes with it.

    Attributes
    ----------
    target : Target
    decode_for : {"portable", "spark"}
        The decoder's target whose columns it takes.
    name : str
        Where it is: a whole path, or a URL.
    path : pathlib.Path or None
        None: it is not in this file system.
    file : DuckdbFile or None
        The file that other processes may keep from being opened.
    """

    target: Target
    decode_for: Any
    name: str
    path: Path | None
    file: DuckdbFile | None = None

    @property
    def consumer(self) -> str:
        """The name under which a sync into it reads a directory, if none is given."""
        return consumer_name(self.name)

    def directory(self, given: str | os.PathLike[str] | None) -> Path:
        """Where a slot is captured: as it is given, or beside the target.

        Raises
        ------
        PgOutputError
            The target is elsewhere, and nothing is given.
        """
        if given:
            return Path(given)
        if self.path is None:
            raise PgOutputError(
                f"give directory=, where the slot is captured: {self.name} is not in this file "
                "system"
            )
        return self.path.with_name(f"{self.path.name}.segments")


def open_target(
    target: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
    partition_by: Mapping[str, Sequence[str]] | None = None,
    retention_hours: int | None = None,
    maintenance: bool | None = None,
    iceberg: str | Mapping[str, str] | None = None,
    changes: Literal["delta", "parquet"] | None = None,
    soft_deletes: str | None = None,
    duckdb_memory: int | None = None,
    lock_timeout: float | None = None,
    policies: Policies | None = None,
    change_policies: bool = False,
    tables: Sequence[str] | None = None,
    engine: Engine | None = None,
) -> OpenedTarget:
    """The target of a name. Nothing is read or made yet.

    Parameters
    ----------
    target : str or path
        ``duckdb:FILE``, or a directory or URL for Delta tables.
    storage_options, partition_by, retention_hours, maintenance, iceberg, changes, soft_deletes
        As of :func:`sync`.
    duckdb_memory, lock_timeout, policies, change_policies, tables, engine
        As of :func:`sync`.

    Raises
    ------
    PgOutputError
        It can't be one; or a library is not installed.
    """
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(f"target must be a str or a path, not {type(target).__name__}")
    text = os.fspath(target)
    if not text or "\0" in text:
        raise PgOutputError("target: give duckdb:FILE, or a directory for Delta tables")
    _check_types(storage_options, partition_by, iceberg)
    refuse_secrets(text, storage_options)  # before another error shows the text
    _check_numbers(duckdb_memory, lock_timeout)
    if changes not in (None, "delta", "parquet"):
        raise PgOutputError(f"changes={changes!r}: expected one of 'delta', 'parquet'")
    if changes is not None and iceberg is not None:
        raise PgOutputError("changes= and iceberg= do not go together: give one of them")
    if soft_deletes is not None and not (soft_deletes and soft_deletes.isprintable()):
        raise PgOutputError(f"soft_deletes={soft_deletes!r}: expected the name of a column")
    delta = {"storage_options": storage_options, "partition_by": partition_by,
             "retention_hours": retention_hours, "maintenance": maintenance,
             "iceberg": iceberg, "changes": changes}  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in delta.items() if value is not None}
    wanted = None if tables is None else tuple(sorted(tables))
    kept = Kept(soft_deletes, wanted, policies, change_policies)
    if f"{text}:" == _DUCKDB:
        raise PgOutputError(f"target {text!r} names no file: give duckdb:FILE")
    if text.startswith(_DUCKDB):
        from .duckdb_target import DECODED_FOR, DuckdbTarget

        if soft_deletes is not None and soft_deletes.casefold() == "rowid":
            raise PgOutputError(
                f"soft_deletes={soft_deletes!r} is what DuckDB calls a row's own number: give "
                "another name"
            )
        if given:
            raise PgOutputError(f"{next(iter(given))}= is for Delta tables, not for {text!r}")
        path = Path(text.removeprefix(_DUCKDB)).absolute()
        if text == _DUCKDB or not path.name or text.startswith(f"{_DUCKDB}//"):
            raise PgOutputError(f"target {text!r} names no file: give duckdb:FILE")
        if path.is_dir():
            raise PgOutputError(f"target {text!r} is a directory: give duckdb:FILE")
        if not path.parent.is_dir():
            raise PgOutputError(f"target {text!r}: there is no directory {path.parent}")
        made = DuckdbTarget(path, kept, memory=duckdb_memory, lock_timeout=lock_timeout)
        return _opened(OpenedTarget(made, DECODED_FOR, str(path), path, made.file), engine)
    from . import delta_target

    if _SCHEME.match(text) or text.endswith(_FILES):
        raise PgOutputError(
            f"target {text!r} is neither duckdb:FILE, nor a directory, nor s3://bucket/prefix"
        )
    for name, value in (("duckdb_memory", duckdb_memory), ("lock_timeout", lock_timeout)):
        if value is not None:
            raise PgOutputError(f"{name}= is for DuckDB files, not for {text!r}")
    delta_tables = delta_target.DeltaTarget(text, kept=kept, **given)
    where = delta_tables.place.path
    if where is not None and where.is_file():
        raise PgOutputError(f"target {text!r} is a file: give a directory, or duckdb:{text}")
    if where is not None and not where.parent.is_dir():
        raise PgOutputError(f"target {text!r}: there is no directory {where.parent}")
    uri = delta_tables.place.uri
    return _opened(OpenedTarget(delta_tables, delta_target.DECODED_FOR, uri, where), engine)


def _opened(opened: OpenedTarget, engine: Engine | None) -> OpenedTarget:
    """The same, which an engine can write."""
    if engine is not None:
        engine.check(opened.target)
    return opened


def _check_numbers(duckdb_memory: int | None, lock_timeout: float | None) -> None:
    """Refuse numbers that are none, or too small."""
    check_memory(duckdb_memory)
    if lock_timeout is not None and type(lock_timeout) not in (int, float):
        kind = type(lock_timeout).__name__
        raise TypeError(f"lock_timeout must be a number of seconds, not {kind}")
    if lock_timeout is not None and not lock_timeout >= 0:
        raise PgOutputError(f"lock_timeout={lock_timeout}: expected a number of seconds")


def _check_types(
    storage_options: Mapping[str, str] | None,
    partition_by: Mapping[str, Sequence[str]] | None,
    iceberg: str | Mapping[str, str] | None,
) -> None:
    """Refuse arguments whose errors others would raise, later and without their names."""
    catalog = {} if isinstance(iceberg, str) else iceberg
    for name, given in (("storage_options", storage_options), ("iceberg", catalog)):
        options: Any = given or {}
        is_mapping = isinstance(options, Mapping)
        if not is_mapping or {type(one) for pair in options.items() for one in pair} - {str}:
            raise TypeError(f"{name} must be a mapping of str to str")
    if iceberg is not None and not iceberg:
        raise PgOutputError("iceberg= is empty: give the name of a catalogue, or its properties")
    if partition_by is not None and not isinstance(partition_by, Mapping):
        raise TypeError(
            f"partition_by must be a mapping of tables, not {type(partition_by).__name__}"
        )
    for name, columns in (partition_by or {}).items():
        if isinstance(columns, str) or not all(isinstance(one, str) for one in columns):
            raise TypeError(f"partition_by of {name} must be a sequence of names of columns")
        if not columns or len({*columns}) < len(columns):
            raise PgOutputError(
                f"partition_by= has {name} with {list(columns)}: give one column, or several "
                "different ones"
            )


def _claim_target(
    target: Target,
    directory: Path,
    slot: str,
    dsn: str | None,
    options: Mapping[str, Any],
    stop: threading.Event,
) -> Stored:
    """What a target has, before a slot is made, and before anything is read.

    Raises
    ------
    PgOutputError
        It is another database's, or the directory is, or another slot's; or another sync writes it.
    """
    from ..connections import ConnectionParameters
    from ..replication.link import first_connection
    from ..replication.server_position import check_target
    from ..replication.stream_options import check_seconds
    from ..replication.walsender import ReplicationConnection

    parameters = ConnectionParameters(dsn, libpq_keywords(options))
    check_seconds(retry_for=options.get("retry_for"))
    check_slot(directory, slot)

    end: tuple[int, bool] | None = None

    def asked() -> Origin:
        nonlocal end
        with ReplicationConnection(parameters) as connection:
            end = connection.current_lsn(), connection.in_recovery
            return Origin(connection.system_identifier, connection.database)

    source = open_source([directory]) if has_begun(directory) else None
    if isinstance(source, SegmentSource):
        origin = origin_of(source)
        with contextlib.suppress(RetryableError):  # the capture tries again, and looks itself
            if (found := asked()) != origin:
                raise PgOutputError(
                    f"{directory} has changes of database {origin.database!r} of "
                    f"{origin.system_identifier}, and the server's are of {found.database!r} of "
                    f"{found.system_identifier}: give the DSN of that database, or another "
                    "directory="
                )
    else:
        origin = first_connection(asked, options.get("retry_for"), stop)
    stored = target.peek(origin)
    if end is not None:
        check_target(
            max((one.lsn for one in stored.tables.values()), default=0), end[0], in_recovery=end[1]
        )
    target.claim()
    if has_begun(directory):
        # The capture claims it for good, later: by then its tables would be in the target.
        os.close(claim_directory(directory, "capture", "segments"))
    return stored


def _check_by_server(
    dsn: str | None,
    publications: Sequence[str],
    options: Mapping[str, Any],
    directory: Path,
    stored: Stored,
    partition_by: Mapping[str, Sequence[str]] | None,
    wanted: SyncOptions,
) -> None:
    """Refuse partitions and tables that a server does not publish, before a slot is made.

    For a new target it lists columns for which a policy may be chosen.
    """
    from ..connections import ConnectionParameters

    tables = wanted.tables
    if not stored.tables and wanted.policies.numeric is None:
        _say_numerics(dsn, publications, options)
    is_new = tables is not None and not stored.tables
    if not partition_by and not is_new:
        return
    parameters = ConnectionParameters(dsn, libpq_keywords(options))
    try:
        published = published_tables(parameters, publications)
    except RetryableError:
        if partition_by or not has_begun(directory):
            raise
        return  # the slot is there, and the capture tries again
    if partition_by:
        check_partitions(partition_by, published, stored.tables.values())
    if is_new:
        check_tables(tables, [*map(shown_table, published)], directory)


def _check_by_history(
    target: Target, directory: Path, partition_by: Mapping[str, Sequence[str]] | None
) -> None:
    """Refuse partitions by what the newest catalogue of a directory has not."""
    history = history_of([directory]) if partition_by else None
    source = open_source([directory])
    if not partition_by or history is None or history.is_empty:
        return
    if isinstance(source, SegmentSource):
        held = target.peek(origin_of(source)).tables.values()
        check_partitions(partition_by, history.newest_tables.tables, held)


def _say_numerics(dsn: str | None, publications: Sequence[str], options: Mapping[str, Any]) -> None:
    """List numeric columns without precision, which are text, and propose a policy."""
    import psycopg

    from ..catalog import catalog_of
    from ..connections import ConnectionParameters
    from ..numerics import advice, read_numerics

    parameters = ConnectionParameters(dsn, libpq_keywords(options))
    try:
        with parameters.open(replication=False) as connection:
            oids = [one.relation_id for one in catalog_of(connection, publications).tables]
            found = read_numerics(
                lambda query, *given: connection.execute(query, given or None).fetchall(), oids
            )
    except (PgOutputError, psycopg.Error) as error:
        _log.debug("can't look at numeric columns: %s", error)
        return
    if found:
        names = ", ".join(one.shown for one in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more tables" if len(found) > _SHOWN else ""
        _log.warning(
            "numeric columns without precision are text in the target: %s%s. To change that, %s",
            names, more, advice(found),
        )  # fmt: skip


def published_tables(
    parameters: ConnectionParameters, publications: Sequence[str]
) -> tuple[CatalogTable, ...]:
    """The tables that a server publishes now."""
    from ..catalog import catalog_of

    with parameters.open(replication=False) as connection:
        return catalog_of(connection, publications).tables


@contextlib.contextmanager
def _claimed(directory: Path, name: str) -> Iterator[None]:
    """Keep other syncs from reading as the same consumer."""
    lock = claim_consumer(directory, name, "sync")
    try:
        yield
    finally:
        os.close(lock)


class _Lost:
    """Tables of which the directory lacks changes that the target has not.

    The capture has to know that they are to be copied before the target can go on.
    """

    def __init__(self, directory: Path, target: Target, consumer: str, *, asks: bool) -> None:
        self._directory = directory
        self._target = target
        self._consumer = consumer
        self._asks = asks
        self._asked: set[int] = set()

    def _has_tables(self) -> bool:
        source = open_source([self._directory])
        if not isinstance(source, SegmentSource):
            return False
        return bool(self._target.peek(origin_of(source)).tables)

    def ask(self) -> bool:
        """Ask for copies, if that is to be done; whether there are such tables."""
        if not self._asks or not has_begun(self._directory):
            return False
        source = open_source([self._directory])
        if not isinstance(source, SegmentSource):
            return False
        stored = self._target.peek(origin_of(source))
        lost = lost_tables(self._directory, stored, self._consumer)
        names = known_tables(self._directory) if lost else {}
        for relation_id in {*lost} - self._asked:
            self._asked.add(relation_id)
            name = names.get(relation_id, ("", str(relation_id)))
            _log.warning(
                "%s goes on behind changes of %s that %s lacks: it is copied again",
                self._directory, ".".join(name), "a new target" if not stored.lsn else "the target",
            )  # fmt: skip
            why = f"the sync that reads as {self._consumer} asks for it: it lacks changes of it"
            request_copy(self._directory, relation_id, name, why)
        return bool(lost)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until the capture has them wait for their copies."""
        if not self._asks:
            return
        # Only the catalogue says which tables can be copied.
        end = time.monotonic() + _CATALOG_TIMEOUT
        while (
            history_of([self._directory]) is None
            and not is_over()
            and time.monotonic() < end
            and self._has_tables()
        ):
            time.sleep(_POLL)
        while self.ask() and not is_over():
            time.sleep(_POLL)
