"""`sync` keeps a target's tables up to date, from a slot or from another capture's change log."""

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
from ..capture_options import CaptureOptions
from ..changelog.consumers import claim_consumer
from ..changelog.known import known_tables
from ..changelog.log import ChangeLog
from ..changelog.remote import refuse_secrets
from ..changelog.requests import request_copy
from ..errors import Argument, PgOutputError, RetryableError
from ..lsn import check_lsn
from ..names import shown_table
from ..options import arguments_of, near, options_of
from ..targets import ChangeTarget
from .continuity import consumer_name, lost_tables, origin_of
from .duckdb_file import SUFFIXES
from .embedded_capture import DEFAULT_CAPTURE, EmbeddedCapture, check_slot
from .options import SyncOptions, TargetOptions
from .own_target import OwnTarget
from .syncing import (
    Engine,
    Syncing,
    SyncProgress,
)
from .targets import PARQUET, RememberedOptions, StoppedError, TargetOrigin, TargetState
from .unpublished import check_partitions, check_tables

if TYPE_CHECKING:
    from ..catalog import CatalogTable
    from ..connections import ConnectionParameters
    from .delta_target import DeltaTarget
    from .duckdb_file import DuckdbFile
    from .targets import Target

_log = logging.getLogger(__name__)

_DUCKDB = "duckdb:"
_OWN_DECODED_FOR = "portable"
_SCHEME = re.compile(r"(?!s3a?://|file://)[A-Za-z][A-Za-z0-9+.-]+:")
_CATALOG_TIMEOUT = 10.0  # seconds to wait for the first catalogue
_SHOWN = 8  # tables that a warning names
_POLL = 0.01  # seconds between two checks whether the capture has begun


def sync(
    dsn: str | ConnectionParameters | None = None,
    *,
    target: str | os.PathLike[str] | ChangeTarget,
    slot: str | None = None,
    publications: Sequence[str] | None = None,
    segments: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    until: int | Literal["now"] | None = None,
    sync_options: SyncOptions | None = None,
    target_options: TargetOptions | None = None,
    capture_options: CaptureOptions | None = None,
    progress: Callable[[SyncProgress], None] | None = None,
    stop: threading.Event | None = None,
    engine: Engine | None = None,
    **keywords: object,
) -> SyncProgress:
    """Keep tables up to date with a server's, each change exactly once.

    The call captures a slot into a directory beside the target, or it follows the directory of
    another capture. However a call ends, even by a kill, the next call goes on.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL; by default as libpq's variables say.
    target : str or path
        ``duckdb:FILE``; a directory, or ``s3://bucket/prefix``, for Delta tables; or
        ``parquet:DIR`` for change tables alone, as plain Parquet files. DIR may be a URL. Or a
        database of your own, as a :class:`pgoutput_fast.targets.ChangeTarget`.
    slot : str
        The replication slot. It is made if it does not exist.
    publications : list or tuple of str
        Names of publications, without quotes.
    segments : path
        The directory of another capture, in place of `slot` and `publications`.
    directory : path
        Where the slot's changes are captured. The default is the target's name with ``.segments``
        behind it.
    until : int or "now", optional
        End when the tables have everything that was committed before this LSN, or by now.
    sync_options : SyncOptions, optional
        How the tables are kept up to date.
    target_options : TargetOptions, optional
        How the target stores the tables.
    capture_options : CaptureOptions, optional
        How the slot is captured. By default the slot is made if it does not exist, each table gets
        a snapshot, and segments that were read stay for 10 minutes.
    progress : callable
        Called with a :class:`SyncProgress` before the first window, after each window, and each
        second in between.
    stop : threading.Event
        Set it to end the sync after the window that is being written.
    engine : Engine
        What writes the tables, such as a :class:`pgoutput_fast.spark.SparkEngine`. The default is
        this process.
    **keywords
        Fields of :class:`SyncOptions`, :class:`TargetOptions` and :class:`CaptureOptions`, which
        override those of the objects. Also parameters of libpq by name, which override those of
        `dsn`.

    Returns
    -------
    SyncProgress
        The numbers at the end.

    Raises
    ------
    PgOutputError
        An option is wrong. The target belongs to something else, has tables of another database, or
        is written by another sync. Changes that the target lacks are deleted, or the rows of a
        table are not known. All reasons of :func:`pgoutput_fast.replication.capture` apply too.
    TypeError
        An argument has a wrong type.
    """
    captures = _of_the_capture(keywords)
    options = options_of(SyncOptions, sync_options, keywords)
    target_options = options_of(TargetOptions, target_options, keywords)
    capture_options = options_of(CaptureOptions, capture_options or DEFAULT_CAPTURE, keywords)
    if capture_options.snapshot == "only":
        raise PgOutputError(
            "'only' is for capture, not for sync", code="bad_option", parameter="snapshot"
        )
    if until is not None and until != "now":
        check_lsn("until", until)
    opened = open_target(target, target_options, tables=options.tables, engine=engine)
    name, stop = options.consumer or opened.consumer, stop or threading.Event()
    with contextlib.ExitStack() as resources:
        resources.enter_context(_closing(opened, stop))
        if segments is not None:
            for option, value in {
                **captures, "dsn": dsn, "slot": slot, "publications": publications,
                "directory": directory,
            }.items():  # fmt: skip
                if value is not None:
                    raise PgOutputError(
                        "it does not go together with segments", code="bad_option",
                        parameter=option,
                        hint=near(option, _arguments()) if option not in _arguments() else (),
                    )  # fmt: skip
            log = ChangeLog(segments)
            _check_by_history(opened.target, log, target_options.partition_by)
            is_over = stop.is_set if until != "now" else lambda: True
            until_lsn, captured = (log.view().end if until == "now" else until), None
            wait: Callable[[float], bool] = stop.wait
        else:
            slot, publications = _required(slot, publications)
            log = ChangeLog(opened.directory(directory))
            lost = _Lost(log, opened.target, name, asks=options.on_error == "pause")
            from ..connections import ConnectionParameters

            parameters = ConnectionParameters.of(dsn, keywords, _arguments())
            stored = _claim_target(
                opened.target, log, slot, parameters, capture_options.retry_for, stop
            )
            _check_by_server(parameters, publications, log, stored, target_options, options)
            lost.ask()  # the capture sees these requests when it begins
            run = EmbeddedCapture(
                parameters, log.directory, stop, until, slot, publications, capture_options
            )
            resources.callback(run.end)
            run.start()
            lost.wait(run.is_over)
            is_over, until_lsn, captured, wait = run.is_over, None, run.latest, run.wait
        resources.enter_context(_claimed(log.directory, name))
        syncing = Syncing(
            log, opened.target, opened.argument, opened.decode_for, options, name, progress,
            captured, engine, opened.file,
        ).run(until_lsn, is_over, stop.is_set, wait)  # fmt: skip
        if segments is None:
            run.result()
        return syncing


def _ending_by(stop: threading.Event) -> Callable[[], None]:
    """Return a function that raises `StoppedError` once an event is set."""

    def check() -> None:
        if stop.is_set():
            raise StoppedError("the sync was stopped before it could open its target")

    return check


@contextlib.contextmanager
def _closing(opened: OpenedTarget, stop: threading.Event) -> Iterator[None]:
    """Close a target at the end; after an error, remove the empty directories that it has made."""
    if opened.file is not None:
        opened.file.on_wait = _ending_by(stop)
    own = opened.path and (opened.path, opened.path.with_name(f"{opened.path.name}.lock"))
    new_paths = [path for path in own or () if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new_paths:
            with contextlib.suppress(OSError):  # a file, not empty, or missing
                path.rmdir()
        raise
    finally:
        opened.target.close()


def _required(slot: str | None, publications: Sequence[str] | None) -> tuple[str, Sequence[str]]:
    """Return the slot and the publications; refuse a call that lacks one of them."""
    if slot is None or publications is None:
        raise PgOutputError(
            "sync has no source", code="bad_option",
            hint=("Give ", Argument("slot"), " and ", Argument("publications"), ", or ",
                  Argument("segments")),
        )  # fmt: skip
    return slot, publications


def _arguments() -> set[str]:
    return arguments_of(sync, SyncOptions, TargetOptions, CaptureOptions)


def _of_the_capture(keywords: Mapping[str, object]) -> dict[str, object]:
    """Return the keywords that concern the capture: its options, and libpq's parameters."""
    own = {option.name for kind in (SyncOptions, TargetOptions) for option in kind.options()}
    return {name: value for name, value in keywords.items() if name not in own}


class OpenedTarget(NamedTuple):
    """A target, and how a sync names it, decodes for it and finds its files.

    Attributes
    ----------
    target : Target
    argument : str
        The target as the caller wrote it, for errors.
    decode_for : {"portable", "spark"}
        The target for which `ColumnarDecoder` decodes, which fixes the Arrow types.
    name : str
        An absolute path, a URL, or the name of a `ChangeTarget`.
    path : pathlib.Path or None
        None if the target is not in the local file system.
    file : DuckdbFile or None
        The DuckDB file, which other processes may have locked.
    """

    target: Target
    argument: str
    decode_for: Any
    name: str
    path: Path | None
    file: DuckdbFile | None = None

    @property
    def consumer(self) -> str:
        """The default name of the consumer that reads a change log for this target."""
        return consumer_name(self.name)

    def directory(self, directory: str | os.PathLike[str] | None) -> Path:
        """Return the directory of the capture: the given one, or one beside the target.

        Raises
        ------
        PgOutputError
            No directory is given, and the target is not in the local file system.
        """
        if directory:
            return Path(directory)
        if self.path is None:
            raise PgOutputError(
                f"sync needs a local directory for the change log, because {self.name} is not in "
                "this file system",
                code="bad_option",
                parameter="directory",
            )
        return self.path.with_name(f"{self.path.name}.segments")


def open_target(
    target: str | os.PathLike[str] | ChangeTarget,
    options: TargetOptions,
    *,
    tables: Sequence[str] | None = None,
    engine: Engine | None = None,
) -> OpenedTarget:
    """Return the target with a name, before anything of it is read or created.

    Parameters
    ----------
    target : str or path
        ``duckdb:FILE``, ``parquet:DIR``, or a directory or URL for Delta tables. Or a
        `ChangeTarget`.
    options : TargetOptions
    tables, engine
        See :func:`sync`.

    Raises
    ------
    PgOutputError
        The name is no valid target, an option does not fit this kind of target, or a library is not
        installed.
    """
    if isinstance(target, ChangeTarget):
        return _open_own(target, options, tables, engine)
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(
            f"target must be a str, a path or a ChangeTarget, not {type(target).__name__}"
        )
    text = os.fspath(target)
    if not text or "\0" in text:
        raise _wrong_target("it names no target")
    # First of all, because the other errors show the text.
    refuse_secrets(text.removeprefix(PARQUET), options.storage_options, parameter="target")
    wanted = None if tables is None else tuple(sorted(tables))
    _check_keep(options, is_parquet=text.startswith(PARQUET))
    remembered = RememberedOptions(
        options.soft_deletes, wanted, options.policies, options.keep, options.change_policies
    )
    if text.startswith(_DUCKDB) or f"{text}:" == _DUCKDB:
        _check_kind(options, _DELTA_OPTIONS, f"Delta tables, and {text!r} is a DuckDB file")
        opened = _open_duckdb(text, options, remembered)
    elif text.startswith(PARQUET):
        _check_kind(options, _NOT_OF_PARQUET, f"Delta tables, and {text!r} has only Parquet files")
        _check_kind(options, _DUCKDB_OPTIONS, f"DuckDB files, and {text!r} is a directory")
        from .parquet_target import ParquetTarget

        opened = _open_directory(
            text, text.removeprefix(PARQUET), options, remembered, ParquetTarget
        )
    else:
        _check_kind(options, _DUCKDB_OPTIONS, f"DuckDB files, and {text!r} is a directory")
        from .delta_target import DeltaTarget

        opened = _open_directory(text, text, options, remembered, DeltaTarget)
    if engine is not None:
        engine.check(opened.target)
    return opened


_DUCKDB_OPTIONS = ("duckdb_memory", "lock_timeout")
_DELTA_OPTIONS = (
    "storage_options", "partition_by", "retention_hours", "maintenance", "iceberg",
)  # fmt: skip
_NOT_OF_PARQUET = ("soft_deletes", "partition_by", "iceberg")


def _check_kind(options: TargetOptions, others: Sequence[str], why: str) -> None:
    """Refuse options of another kind of target."""
    for name in others:
        if getattr(options, name) is not None:
            raise PgOutputError(f"it is for {why}", code="bad_option", parameter=name)


def _check_keep(options: TargetOptions, *, is_parquet: bool) -> None:
    """Refuse options that concern change tables or state tables which the target will not have."""
    if options.keep in ("both", "state") and (is_parquet or options.iceberg is not None):
        raise PgOutputError(
            "Parquet files and Iceberg tables can keep only changes", code="bad_option",
            parameter="keep", hint=("Leave out ", Argument("keep")),
        )  # fmt: skip
    if options.keep == "changes":
        for name in ("soft_deletes", "partition_by"):
            if getattr(options, name) is not None:
                raise PgOutputError(
                    "it is for state tables, but this target keeps only changes",
                    code="bad_option", parameter=name,
                )  # fmt: skip


def _wrong_target(why: str) -> PgOutputError:
    return PgOutputError(
        why, code="bad_option", parameter="target",
        hint="Give duckdb:FILE, parquet:DIR, or a directory or s3://bucket/prefix for Delta tables",
    )  # fmt: skip


def _open_duckdb(text: str, options: TargetOptions, remembered: RememberedOptions) -> OpenedTarget:
    from .duckdb_target import DECODED_FOR, DuckdbTarget

    if (options.soft_deletes or "").casefold() == "rowid":
        raise PgOutputError(
            "DuckDB reserves the name rowid", code="bad_option", parameter="soft_deletes",
            hint="Give another name",
        )  # fmt: skip
    name = text.removeprefix(_DUCKDB)
    path = Path(name).absolute()
    if f"{text}:" == _DUCKDB or not name or not path.name or name.startswith("//"):
        raise _wrong_target(f"{text!r} names no file")
    if path.is_dir():
        raise _wrong_target(f"{text!r} is a directory")
    if not path.parent.is_dir():
        raise PgOutputError(
            f"{text!r}: there is no directory {path.parent}",
            code="missing_path",
            path=str(path.parent),
            parameter="target",
        )
    target = DuckdbTarget(
        path, remembered, memory=options.duckdb_memory, lock_timeout=options.lock_timeout
    )
    return OpenedTarget(target, text, DECODED_FOR, str(path), path, target.file)


def _open_directory(
    text: str,
    name: str,
    options: TargetOptions,
    remembered: RememberedOptions,
    kind: type[DeltaTarget],
) -> OpenedTarget:
    """Return the target in a directory, or under a URL."""
    from .delta_types import DECODED_FOR

    if not name:
        raise _wrong_target(f"{text!r} names no directory")
    if _SCHEME.match(name):
        raise _wrong_target(f"{text!r} is not a known kind of target")
    path = Path(name)
    if name.endswith(SUFFIXES) or path.is_file():
        raise PgOutputError(
            f"{name!r} is a file", code="bad_option", path=str(path), parameter="target",
            hint=("Give ", Argument("target", f"{_DUCKDB}{name}"), ", or a directory"),
        )  # fmt: skip
    arguments = {
        option: value
        for option in _DELTA_OPTIONS
        if (value := getattr(options, option)) is not None
    }
    target = kind(name, remembered=remembered, **arguments)
    where = target.place.path
    if where is not None and not where.parent.is_dir():
        raise PgOutputError(
            f"{name!r}: there is no directory {where.parent}",
            code="missing_path",
            path=str(where.parent),
            parameter="target",
        )
    return OpenedTarget(target, text, DECODED_FOR, target.place.uri, where)


def _open_own(
    target: ChangeTarget,
    options: TargetOptions,
    tables: Sequence[str] | None,
    engine: Engine | None,
) -> OpenedTarget:
    """Return the target that wraps a user's `ChangeTarget`."""
    why = f"other targets than {target.name}"
    _check_kind(options, (*_DELTA_OPTIONS, *_DUCKDB_OPTIONS, "soft_deletes"), why)
    wanted = None if tables is None else tuple(sorted(tables))
    remembered = RememberedOptions(
        None, wanted, options.policies, options.keep, options.change_policies
    )
    own_target = OwnTarget(target, remembered)
    if engine is not None:
        engine.check(own_target)
    return OpenedTarget(own_target, target.name, _OWN_DECODED_FOR, target.name, None)


def _claim_target(
    target: Target,
    log: ChangeLog,
    slot: str,
    parameters: ConnectionParameters,
    retry_for: float | None,
    stop: threading.Event,
) -> TargetState:
    """Claim a target and return its state, before a slot is created and anything is read.

    Raises
    ------
    PgOutputError
        The target or the directory belongs to another database, or the directory to another slot;
        or another sync writes the target.
    """
    from ..replication.link import first_connection
    from ..replication.server_position import check_target
    from ..replication.walsender import ReplicationConnection

    directory = log.directory
    check_slot(directory, slot)

    end: tuple[int, bool] | None = None

    def asked() -> TargetOrigin:
        nonlocal end
        with ReplicationConnection(parameters) as connection:
            end = connection.current_lsn(), connection.in_recovery
            return TargetOrigin(connection.system_identifier, connection.database)

    view = log.view() if log.has_begun else None
    if view is not None:
        origin = origin_of(view)
        with contextlib.suppress(RetryableError):  # the capture retries and checks this itself
            if (server_origin := asked()) != origin:
                raise PgOutputError(
                    f"{directory} has changes of database {origin.database!r} (system identifier "
                    f"{origin.system_identifier}), but the server has {server_origin.database!r} "
                    f"({server_origin.system_identifier})",
                    code="another_history",
                    path=str(directory),
                    hint=("Give the DSN of that database, or another ", Argument("directory")),
                )
    else:
        origin = first_connection(asked, retry_for, stop)
    stored = target.peek(origin)
    if end is not None:
        check_target(
            max((table_state.lsn for table_state in stored.tables.values()), default=0),
            end[0],
            in_recovery=end[1],
        )
    target.claim()
    if log.has_begun:
        # Fail now if another process captures here. The embedded capture claims the directory only
        # later, when the first tables may already be in the target.
        os.close(claim_directory(directory, "capture", "segments"))
    return stored


def _check_by_server(
    parameters: ConnectionParameters,
    publications: Sequence[str],
    log: ChangeLog,
    stored: TargetState,
    target_options: TargetOptions,
    options: SyncOptions,
) -> None:
    """Refuse partitions and tables that the server does not publish, before a slot is created.

    For a new target, list the numeric columns for which the user may choose a policy.
    """
    tables, partition_by = options.tables, target_options.partition_by
    policies = target_options.policies
    if not stored.tables and (policies is None or policies.numeric is None):
        _say_numerics(parameters, publications)
    is_new = tables is not None and not stored.tables
    if not partition_by and not is_new:
        return
    try:
        published = published_tables(parameters, publications)
    except RetryableError:
        if partition_by or not log.has_begun:
            raise
        return  # the slot exists already, and the capture tries again
    if partition_by:
        check_partitions(partition_by, published, stored.tables.values())
    if is_new:
        check_tables(tables, [*map(shown_table, published)], log.directory)


def _check_by_history(
    target: Target, log: ChangeLog, partition_by: Mapping[str, Sequence[str]] | None
) -> None:
    """Refuse partition columns that are not in the newest catalogue of a change log."""
    view, history = log.view(), log.history()
    if partition_by and history is not None:
        table_states = target.peek(origin_of(view)).tables.values()
        check_partitions(partition_by, history.newest_tables.tables, table_states)


def _say_numerics(parameters: ConnectionParameters, publications: Sequence[str]) -> None:
    """Warn that numeric columns without precision become text, and propose a policy."""
    import psycopg

    from ..catalog import catalog_of
    from ..numerics import advice, read_numerics

    try:
        with parameters.open(replication=False) as connection:
            oids = [table.relation_id for table in catalog_of(connection, publications).tables]
            numerics = read_numerics(
                lambda query, *values: connection.execute(query, values or None).fetchall(), oids
            )
    except (PgOutputError, psycopg.Error) as error:
        _log.debug("can't read the numeric columns: %s", error)
        return
    if numerics:
        names = ", ".join(numeric.shown for numeric in numerics[:_SHOWN])
        more = f" and {len(numerics) - _SHOWN} more tables" if len(numerics) > _SHOWN else ""
        _log.warning(
            "numeric columns without precision are text in the target: %s%s. To change that, %s",
            names, more, advice(numerics),
        )  # fmt: skip


def published_tables(
    parameters: ConnectionParameters, publications: Sequence[str]
) -> tuple[CatalogTable, ...]:
    """Return the tables that the server publishes now."""
    from ..catalog import catalog_of

    with parameters.open(replication=False) as connection:
        return catalog_of(connection, publications).tables


@contextlib.contextmanager
def _claimed(directory: Path, name: str) -> Iterator[None]:
    """Lock a consumer against other syncs."""
    lock = claim_consumer(directory, name, "sync")
    try:
        yield
    finally:
        os.close(lock)


class _Lost:
    """Tables with changes that neither the change log nor the target has.

    Such a table needs a new snapshot. The capture has to know of the request before sync goes on.
    """

    def __init__(self, log: ChangeLog, target: Target, consumer: str, *, asks: bool) -> None:
        self._log, self._directory = log, log.directory
        self._target = target
        self._consumer = consumer
        self._asks = asks
        self._asked: set[int] = set()

    def _has_tables(self) -> bool:
        if not self._log.has_begun:
            return False
        return bool(self._target.peek(origin_of(self._log.view())).tables)

    def ask(self) -> bool:
        """Request snapshots if the options allow it; return whether there are such tables."""
        if not self._asks or not self._log.has_begun:
            return False
        stored = self._target.peek(origin_of(self._log.view()))
        lost = lost_tables(self._log, stored, self._consumer)
        names = known_tables(self._directory) if lost else {}
        for relation_id in {*lost} - self._asked:
            self._asked.add(relation_id)
            name = names.get(relation_id, ("", str(relation_id)))
            _log.warning(
                "%s no longer has changes of %s that %s lacks: the table gets a new snapshot",
                self._directory, ".".join(name), "a new target" if not stored.lsn else "the target",
            )  # fmt: skip
            why = (
                f"the sync with consumer {self._consumer} requested it: the target lacks changes "
                "of the table"
            )
            request_copy(self._directory, relation_id, name, why)
        return bool(lost)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until the capture has accepted the requests, so that these tables wait."""
        if not self._asks:
            return
        # Only the catalogue says which tables can get a snapshot.
        end = time.monotonic() + _CATALOG_TIMEOUT
        while (
            self._log.history() is None
            and not is_over()
            and time.monotonic() < end
            and self._has_tables()
        ):
            time.sleep(_POLL)
        while self.ask() and not is_over():
            time.sleep(_POLL)
