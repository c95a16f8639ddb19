"""The DuckDB connection with which verify reads a target, with its limits of memory and disk."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..apply.duckdb_file import default_memory, is_busy, lacks_memory
from ..errors import PgOutputError
from .texts import ValueStorage, literal

if TYPE_CHECKING:
    from collections.abc import Iterator

ATTACHED = "target"
"""The name of the target's database while it is attached."""

_BUSY = 30.0
"""Seconds to try to open a database that another process has open."""
_PAUSE = 0.005
"""Seconds between two tries: a busy sync closes the file only for some milliseconds."""


class Database:
    """A DuckDB connection that reads a target, and a temporary directory.

    Parameters
    ----------
    path : pathlib.Path
        The target: a DuckDB file, or a directory.
    threads : int, optional
        Number of DuckDB's threads; by default one for each core.
    memory : int, optional
        DuckDB's memory limit in bytes; by default that of a sync.

    Attributes
    ----------
    directory : pathlib.Path
        The temporary directory, which `close` deletes.
    connection : duckdb.DuckDBPyConnection
    """

    def __init__(self, path: Path, threads: int | None = None, memory: int | None = None) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise PgOutputError(
                f"duckdb is not installed ({error})",
                code="missing_package",
                hint="Install the extra pgoutput-fast[duckdb]",
            ) from error
        self._duckdb = duckdb
        self.path = path
        self._resources = contextlib.ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="pgoutput_fast_verify_"))
        self._resources.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self._memory = default_memory() if memory is None else memory
        config: dict[str, Any] = {
            "memory_limit": f"{self._memory}B",
            "temp_directory": str(self.directory / "duckdb"),
            "autoinstall_known_extensions": False,
        }
        if threads is not None:
            config["threads"] = threads
        self.connection = self._resources.enter_context(duckdb.connect(config=config))

    def close(self) -> None:
        """Close the connection, and delete the temporary directory."""
        self._resources.close()

    def limit_memory(self, memory: int) -> None:
        """Set DuckDB's memory limit in bytes."""
        self._memory = memory
        self.connection.execute(f"SET memory_limit = '{memory}B'")

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Translate DuckDB's errors to `PgOutputError`."""
        try:
            yield
        except self._duckdb.Error as error:
            if lacks_memory(error):
                said = str(error).partition("\n")[0]
                raise PgOutputError(
                    f"can't read {self.path} within {self._memory} bytes ({said}): DuckDB reads up "
                    "to 2,048 rows of a column at once",
                    code="out_of_memory",
                    parameter="duckdb_memory",
                    hint="Give more memory",
                    path=str(self.path),
                ) from error
            raise PgOutputError(
                f"can't read {self.path}: {error}", code="io_failed", path=str(self.path)
            ) from error

    @contextlib.contextmanager
    def attached(self) -> Iterator[Any]:
        """Attach the target as `ATTACHED`, if it is a file; nobody else can write it meanwhile."""
        connection = self.connection
        with self.refusals():
            end = time.monotonic() + _BUSY
            while self.path.is_file():
                try:
                    connection.execute(
                        f"ATTACH {literal(str(self.path))} AS {ATTACHED} (READ_ONLY)"
                    )
                    break
                except self._duckdb.Error as error:
                    if not is_busy(error) or time.monotonic() > end:
                        raise
                    time.sleep(_PAUSE)
            try:
                yield connection
            finally:
                connection.execute(f"DETACH DATABASE IF EXISTS {ATTACHED}")

    def has(self, schema: str, table: str) -> bool:
        """Return whether the file has a certain table."""
        with self.attached() as connection:
            row = connection.execute(
                "SELECT count(*) FROM duckdb_tables() WHERE database_name = ? AND schema_name = ? "
                "AND table_name = ?",
                [ATTACHED, schema, table],
            ).fetchone()
        return bool(row != (0,))


def types_of(rows: Any) -> dict[str, ValueStorage]:
    """Return for each column of a DuckDB relation how it stores values."""
    return {name: _storage_of(type_) for name, type_ in zip(rows.columns, rows.types, strict=True)}


def _storage_of(type_: Any) -> ValueStorage:
    nested = type_.id in ("list", "array", "struct", "map")
    parts = (
        [(name, part) for name, part in type_.children if isinstance(part, type(type_))]
        if (nested)
        else []
    )
    return ValueStorage(type_.id, tuple((name, _storage_of(part)) for name, part in parts))
