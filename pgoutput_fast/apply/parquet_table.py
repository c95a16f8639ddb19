"""A change table as plain Parquet files in a directory, for readers that know no table format.

Files are first written to `_uncommitted`, which readers ignore. A commit writes one entry to a log,
atomically. The entry has the table's position, the files, and their final names. After that, the
files are moved to these names in stream order. If a crash interrupts the moves, the next load does
the rest. So every file with a final name is committed, and stays.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from .._disk import fsync_path, write_whole
from .._forms import MALFORMED, of_form
from ..errors import PgOutputError
from .delta_table import VACUUMED, LakeTable
from .delta_types import schema_of, schema_text

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from pathlib import Path

    import pyarrow as pa

    from .delta_files import AddedFile, Written
    from .delta_joins import Joins
    from .delta_place import DeltaPlace
    from .delta_table import File

_FORMAT = 1
_LOG = "_log"
_BUFFER = 1 << 20
_ENTRY = re.compile(r"(\d{20})\.json", re.ASCII)
_FILE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*\.parquet")
# Leftovers of attempts without a commit: files of rows, and temporary entries of the log.
_WRITTEN = re.compile(r"[\w-]+-[0-9a-f]{32}\.parquet|\.\d{20}\.json\.[0-9a-f]{16}\.tmp", re.ASCII)


@dataclasses.dataclass(frozen=True)
class _LogEntry:
    """The log entry of a commit.

    Attributes
    ----------
    format : int
    app : str
        The application id whose changes the table has.
    lsn, copy_lsn : int
        The table's position.
    schema : str
        The table's columns. The newest files have all of them, older files may lack some.
    numbered : int
        Number of files that got a final name so far.
    files : dict of str to str
        The files of the commit in stream order: name in `_uncommitted` to final name.
    """

    format: int
    app: str
    lsn: int
    copy_lsn: int
    schema: str
    numbered: int
    files: dict[str, str]


class ParquetTable(LakeTable):
    """A change table of plain Parquet files. See `LakeTable`."""

    uncommitted = "_uncommitted/"

    def __init__(self, place: DeltaPlace, directory: str, app: str, retention_hours: int) -> None:
        super().__init__(place, directory, app, retention_hours)
        self._version = 0
        self._entry: _LogEntry | None = None
        self._schema: pa.Schema | None = None

    @property
    def exists(self) -> bool:
        """Whether the table exists, as of the last `load` or `create`."""
        return self._schema is not None

    @property
    def _local(self) -> Path | None:
        """The table's directory, if it is in the local file system."""
        return None if self.place.path is None else self.place.path / self.directory

    @property
    def _read_filesystem(self) -> Any:
        """The file system of the directory for reading. It does not create the directory."""
        return self.filesystem if self._local is None else self.place.filesystem(self.directory)

    def _listed(self, directory: str) -> list[Any]:
        """List a subdirectory, which need not exist."""
        chosen = fs.FileSelector(directory, allow_not_found=True)
        infos: list[Any] = self._read_filesystem.get_file_info(chosen)
        return infos

    # --- what is there ---------------------------------------------------------------------------

    def load(self) -> None:
        """Load the newest log entry, and do the moves that a crash has left.

        Raises
        ------
        PgOutputError
            The directory has other things, the table is not of this sync, or its log is damaged.
        """
        with self.refusals():
            versions = self._versions()
            if not versions:
                self._refuse_other_things()
            elif versions[-1] != self._version:
                entry, schema = self._read(versions[-1])
                if entry.app != self.app:
                    raise self.is_foreign()
                waiting = {info.base_name for info in self._listed(self.uncommitted.rstrip("/"))}
                self._settle(entry, waiting, versions[:-1])
                self._version = self._maintained_at = versions[-1]
                self._entry, self._schema = entry, schema

    def _versions(self) -> list[int]:
        """Return the versions of the log's entries, in ascending order."""
        infos = [info for info in self._listed(_LOG) if info.is_file]
        names = (_ENTRY.fullmatch(info.base_name) for info in infos)
        return sorted(int(name[1]) for name in names if name)

    def _read(self, version: int) -> tuple[_LogEntry, pa.Schema]:
        """Read an entry of the log; return it with its schema."""
        name = _entry_name(version)
        with self._read_filesystem.open_input_file(name) as file:
            text = file.read()
        where = f"{self.uri}/{name}"
        try:
            fields = json.loads(text)
            if isinstance(fields, dict) and fields.get("format", _FORMAT) != _FORMAT:
                raise PgOutputError(
                    f"{where} has format {fields['format']!r:.20}, but this version of "
                    f"pgoutput_fast needs {_FORMAT}",
                    code="not_supported",
                    path=where,
                    hint="Update pgoutput_fast",
                )
            entry: _LogEntry = of_form(fields, _LogEntry)
            for file_name in (*entry.files, *entry.files.values()):
                if not _FILE.fullmatch(file_name):
                    raise ValueError(f"{file_name!r:.60} is no name of a file")
            return entry, schema_of(entry.schema)
        except PgOutputError:
            raise
        except MALFORMED as error:
            raise PgOutputError(
                f"{where}, the list of the files of a change table, is damaged ({error})",
                code="damaged",
                path=where,
                hint="Restore the file, or move the directory away and start sync again: the table "
                "gets a new snapshot",
            ) from None

    def _refuse_other_things(self) -> None:
        """Refuse a directory with other things than leftovers of an attempt without a commit."""
        own = (_LOG, self.uncommitted.rstrip("/"))
        if other := [info.base_name for info in self._listed("") if info.base_name not in own]:
            raise PgOutputError(
                f"{self.uri} has other files, such as {other[0]!r}, and no log of a change table",
                code="not_ours",
                path=self.uri,
                hint="Move them away, or give another target",
            )

    def is_its_own(self) -> bool:
        """Whether the table exists and has changes of `app`."""
        with self.refusals():
            versions = self._versions()
            return bool(versions) and self._read(versions[-1])[0].app == self.app

    @property
    def position(self) -> tuple[int, int]:
        """The table's LSN and its snapshot LSN."""
        return (0, 0) if self._entry is None else (self._entry.lsn, self._entry.copy_lsn)

    @property
    def version(self) -> int:
        """See `LakeTable`."""
        return self._version

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return self._schema

    # --- changing it -----------------------------------------------------------------------------

    def create(
        self,
        schema: pa.Schema,
        position: tuple[int, int],
        partition_by: Sequence[str] = (),
        description: str | None = None,
        files: Sequence[AddedFile] = (),
    ) -> None:
        """Create the table by its first commit."""
        del partition_by, description  # only state tables have these
        self._schema = schema
        self.commit(list(files), [], position)

    def add_columns(self, schema: pa.Schema) -> None:
        """Set the columns for the next commit; the schema has all columns of the table."""
        self._schema = schema

    def commit(
        self,
        files: Written,
        removed: Sequence[File],
        position: tuple[int, int] | None,
        *,
        schema: pa.Schema | None = None,
        **more: int,
    ) -> None:
        """Add files and set the position in one commit."""
        if removed or schema is not None or more or position is None:
            raise PgOutputError("a change table is only added to", code="not_supported")
        numbered = 0 if self._entry is None else self._entry.numbered
        names = {
            file.path.removeprefix(self.uncommitted): _final_name(file, number)
            for number, file in enumerate(files, numbered)
        }
        entry = _LogEntry(
            _FORMAT, self.app, *position, schema_text(self._schema), numbered + len(names), names
        )
        with self.refusals():
            versions = self._versions()
            if (versions or [0])[-1] != self._version:
                raise self.place.conflict(self.directory)
            self._put(entry)
            self._entry = entry
            self._settle(entry, names, versions)

    def _put(self, entry: _LogEntry) -> None:
        """Write the next entry of the log atomically."""
        version = self._version + 1
        name, text = _entry_name(version), json.dumps(dataclasses.asdict(entry))
        local = self._local
        if local is None:
            # The stream of delta-rs takes only bytes; a buffer gives it bytes.
            with self.filesystem.open_output_stream(name, buffer_size=_BUFFER) as file:
                file.write(text.encode())
        else:
            written = local / self.uncommitted
            for directory in (written, local / _LOG):
                directory.mkdir(parents=True, exist_ok=True)
            # Flush the names of the files to disk before the log refers to them.
            is_new = [local, local.parent, local.parent.parent] if version == 1 else []
            for directory in (written, *is_new):
                fsync_path(directory)
            try:
                write_whole(local / name, [text], written, replaces=False)
            except FileExistsError:
                raise self.place.conflict(self.directory) from None
        self._version = version

    def _settle(self, entry: _LogEntry, waiting: Container[str], older: Sequence[int]) -> None:
        """Move the files of the newest entry to their final names, and delete older entries."""
        for name, final in entry.files.items():
            if name in waiting:
                self._move(name, final)
        if self._local is not None:
            fsync_path(self._local)
        for version in older:
            self.filesystem.delete_file(_entry_name(version))

    def _move(self, name: str, final: str) -> None:
        # In object storage, a move is a copy and a delete; after a crash, it is repeated.
        self.filesystem.move(self.uncommitted + name, final)

    def committed(self, file: AddedFile) -> str:
        """Return the path of a committed file in the place."""
        if self._entry is None:
            raise PgOutputError("commit() was not called", code="unfit_input")
        return f"{self.directory}/{self._entry.files[file.path.removeprefix(self.uncommitted)]}"

    # --- maintenance -----------------------------------------------------------------------------

    def maintain(self, joins: Joins | None = None) -> None:
        """Delete files that no commit has, if enough commits were made.

        Files are not joined: a reader that lists them meanwhile would see rows twice or not at all.
        """
        del joins
        before, self._maintained_at = self._maintained_at, self._version
        if before // VACUUMED != self._version // VACUUMED:
            self.vacuum()

    def vacuum(self) -> None:
        """Delete leftovers of attempts without a commit, after the retention time."""
        now = datetime.datetime.now(datetime.timezone.utc)
        oldest = now - datetime.timedelta(hours=self._retention)
        with self.refusals():
            for info in self._listed(self.uncommitted.rstrip("/")):
                is_own = info.is_file and _WRITTEN.fullmatch(info.base_name)
                if is_own and info.mtime < oldest:
                    self.filesystem.delete_file(self.uncommitted + info.base_name)


def _entry_name(version: int) -> str:
    return f"{_LOG}/{version:020}.json"


def _final_name(file: AddedFile, number: int) -> str:
    """Return a unique name of a file; files sorted by these names are in stream order."""
    statistics = json.loads(file.statistics)
    first, last = (statistics[of]["commit_lsn"] for of in ("minValues", "maxValues"))
    return f"{first:016X}-{last:016X}-{number:08}.parquet"
