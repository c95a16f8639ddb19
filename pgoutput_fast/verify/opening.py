"""Open the target that the caller names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..apply.delta_place import DeltaPlace
from ..apply.duckdb_file import SUFFIXES
from ..apply.targets import PARQUET
from ..changelog.remote import refuse_secrets
from ..errors import Argument, PgOutputError
from ..segments.listing import has_begun, not_begun
from .databases import Database
from .distributed_states import DistributedStates
from .states import DeltaStates, DuckdbStates, States, without_rows
from .targets import DirectoryTarget

if TYPE_CHECKING:
    from ..policies import Policies
    from ..types import TypeRegistry
    from .distributed_states import VerifyEngine
    from .targets import VerifiedTarget

_DUCKDB = "duckdb:"


def open_target(
    target_name: str,
    segments: str | None,
    types: Callable[[], TypeRegistry],
    storage_options: Mapping[str, str] | None = None,
    engine: VerifyEngine | None = None,
    policies: Policies | None = None,
    duckdb_memory: int | None = None,
) -> VerifiedTarget:
    """Open the target that the caller names.

    Parameters
    ----------
    target_name : str
        A change log, or the target of a sync: a directory or URL of Delta tables, or ``duckdb:``
        and a file.
    segments : str, optional
        The change log from which a sync keeps the target. The default is the one beside the target.
    types : callable
        Reads the server's catalogue of types.
    storage_options : mapping of str to str, optional
        Options of delta-rs for a target in object storage.
    engine : VerifyEngine, optional
        What reads the rows of Delta tables; by default this process.
    policies : Policies, optional
        The policies with which a sync wrote the target.
    duckdb_memory : int, optional
        DuckDB's memory limit in bytes.

    Raises
    ------
    PgOutputError
        The target does not exist, can't be verified, or does not fit the engine or the policies.
    """
    # First, because other errors show the name.
    refuse_secrets(target_name, storage_options, parameter="target")
    target = _opened(target_name, segments, types, storage_options, engine)
    if engine is not None and not isinstance(target, DistributedStates):
        target.close()
        raise PgOutputError(
            f"an engine reads only the Delta tables of a sync, and {target_name} has none",
            code="bad_option",
            parameter="engine",
            hint="Leave out the option",
        )
    if policies is not None:
        if not isinstance(target, States):
            target.close()
            raise PgOutputError(
                f"policies are for the tables of a sync, and {target_name} is a change log, which "
                "has the server's values",
                code="bad_option",
                parameter="policies",
                hint="Leave out the option",
            )
        target.policies = policies
    if duckdb_memory is not None:
        target.limit_memory(duckdb_memory)
    return target


def _opened(
    target_name: str,
    segments: str | None,
    types: Callable[[], TypeRegistry],
    storage_options: Mapping[str, str] | None,
    engine: VerifyEngine | None,
) -> VerifiedTarget:
    if target_name.startswith(_DUCKDB):
        return _database(Path(target_name.removeprefix(_DUCKDB)), segments)
    if target_name.startswith(PARQUET):
        raise without_rows(target_name)
    if "://" in target_name and not target_name.startswith("file://"):
        change_log = None if segments is None else _segments_of(Path(), segments)
        return _delta(DeltaPlace(target_name, storage_options), change_log, engine)
    path = Path(target_name.removeprefix("file://"))
    if path.is_file() or target_name.endswith(SUFFIXES):
        raise PgOutputError(
            f"{target_name!r} is a file",
            code="bad_option",
            parameter="target",
            hint=("Give ", Argument("target", f"{_DUCKDB}{path}"), ", or a directory"),
            path=str(path),
        )
    if not path.is_dir():
        raise PgOutputError(
            f"there is no directory {path}", code="missing_path", parameter="target", path=str(path)
        )
    if (path / "_progress" / "_delta_log").is_dir():
        return _delta(DeltaPlace(str(path)), _segments_of(path.absolute(), segments), engine)
    if segments is not None:
        raise PgOutputError(
            f"{path} is not the target of a sync",
            code="bad_option",
            parameter="segments",
            hint="Leave out the option",
            path=str(path),
        )
    if has_begun(path):
        return DirectoryTarget(path, types)
    if any((path / name).is_dir() for name in ("changes", "state")):
        raise PgOutputError(
            f"{path} has tables of a sync, but not _progress, which has their positions",
            code="damaged",
            hint="Restore the directory _progress",
            path=str(path),
        )
    raise PgOutputError(
        f"{path} has no segments and no tables of a sync",
        code="not_ours",
        parameter="target",
        hint="Give a change log, a directory of Delta tables, or duckdb:FILE",
        path=str(path),
    )


def _delta(place: DeltaPlace, segments: Path | None, engine: VerifyEngine | None) -> VerifiedTarget:
    if engine is None:
        return DeltaStates(place, segments)
    return DistributedStates(place, segments, engine)


def _database(path: Path, segments: str | None) -> VerifiedTarget:
    if not path.is_file():
        raise PgOutputError(
            f"there is no file {path}", code="missing_path", parameter="target", path=str(path)
        )
    with closing(Database(path)) as database:
        if not database.has("main", "_source"):
            raise PgOutputError(
                f"{path} has no tables of a sync",
                code="not_ours",
                parameter="target",
                path=str(path),
            )
    return DuckdbStates(path, _segments_of(path, segments))


def _segments_of(path: Path, segments: str | None) -> Path | None:
    """Return the change log of a target: the given one, or one beside it; None if unknown."""
    if segments is not None:
        if not has_begun(Path(segments)):
            raise not_begun(segments)
        return Path(segments)
    beside = path.with_name(f"{path.name}.segments")
    return beside if has_begun(beside) else None
