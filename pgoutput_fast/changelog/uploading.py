"""A directory's copy in object storage: what is copied, and in which order.

The order is such that whoever reads the position object, and then lists, finds a whole directory:
what a reader needs before something else is there before it.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .._disk import read_json_file, write_whole
from .._forms import MALFORMED, of_form, unreadable
from ..errors import PgOutputError
from ..lsn import format_lsn, parse_lsn
from ..segments.folders import (
    BEGIN_NAME,
    DOWNLOAD_NAME,
    HISTORY,
    POSITION_NAME,
    SEEN_NAME,
    SNAPSHOTS,
    TABLES,
    UPLOAD_NAME,
    owner_of,
)
from ..segments.format import Segment
from ..segments.listing import Contents, asked_since, contents, listed, stored_metadata
from ..segments.reader import SegmentReader
from . import copies, snapshots
from .consumers import Consumer, consumers
from .copies import Tables, TableState
from .read_plan import next_reading
from .remote import Remote, parse_place

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from threading import Event

CONSUMER_NAME = "_upload"
"""The consumer for which a directory keeps what is not copied."""
_FOLDERS = (HISTORY, TABLES, SNAPSHOTS)
_ROUND = 5.0  # seconds after which what is copied is told to readers, though there is more
_SEEN_INTERVAL = 30.0  # seconds between two signs of life of a consumer that does not move


class Upload:
    """Copies a directory, of which the caller holds the lock, one round after the other.

    Parameters
    ----------
    directory : pathlib.Path
    url : str
        ``s3://bucket/prefix``.
    endpoint : str, optional
    keep : {"all", "local"}
        "local": what is deleted from the directory is deleted from the copy too.

    Attributes
    ----------
    position : int
        Everything before this LSN is in the copy; 0 before `begin`.

    Raises
    ------
    PgOutputError
        The URL has another form, or pyarrow lacks S3.
    """

    def __init__(
        self, directory: Path, url: str, endpoint: str | None, keep: Literal["all", "local"]
    ) -> None:
        self._directory = directory
        self._remote = Remote(parse_place(url, endpoint))
        self.url = self._remote.url
        self._mirrors = keep == "local"
        self._tables = Tables(directory)
        self.position = 0
        self._position: dict[str, Any] = {}  # what the position object says
        self._names: set[str] = set()  # in the copy; without `_mirrors` only marks
        self._history: dict[str, tuple[int, int]] = {}
        self._seen: bytes | None = None
        self._advanced = 0.0

    @property
    def is_registered(self) -> bool:
        """Whether the directory keeps what is not copied: an earlier call has begun."""
        return CONSUMER_NAME in {one.name for one in consumers(self._directory)}

    def check(self) -> None:
        """Refuse a place that can't be used, before anything is made.

        Raises
        ------
        RemoteError
            The storage refuses, or can't be reached.
        PgOutputError
            The place has something else.
        """
        self._remote.check()
        registered = self.is_registered
        own = self._read_own()
        if registered and own is not None and own["url"] != self.url:
            raise PgOutputError(
                f"{self._directory} is copied to {own['url']}, not to {self.url}: go on there, or "
                f"remove its consumer {CONSUMER_NAME}, and what is there by now is copied anew",
                code="bad_option",
                path=str(self._directory),
            )
        there = self._remote.read(UPLOAD_NAME)
        if there is None and registered:
            raise PgOutputError(
                f"what was copied to {self.url} is not there any more",
                code="missing_path",
                path=self.url,
                hint="Restore it, or remove the "
                f"consumer {CONSUMER_NAME} of {self._directory}, and what is there by now is "
                f"copied anew",
            )
        if there is None and self._remote.has_any():
            raise PgOutputError(
                f"{self.url} has other objects",
                code="not_ours",
                path=self.url,
                hint="Give a prefix of its own",
            )
        if there is not None and (
            own is None or _fields(there, self.url, "id") != {"id": own["id"]}
        ):
            raise PgOutputError(
                f"{self.url} has the copy of another directory than {self._directory}",
                code="another_history",
                path=self.url,
                hint="Give a prefix of its own",
            )

    def begin(self) -> None:
        """Begin, or go on with, the copy of a directory in which a capture has begun.

        Raises
        ------
        RemoteError
            The storage refuses, or can't be reached.
        PgOutputError
            As of `check`; or the copy does not go together with what the directory has.
        """
        self.check()
        own = self._read_own() or {"id": uuid.uuid4().hex}
        own = {"id": own["id"], "url": self.url}
        # First here, so that a kill can't leave a copy that is nobody's.
        write_whole(self._directory / UPLOAD_NAME, [json.dumps(own)])
        if self._remote.read(UPLOAD_NAME) is None:
            self._remote.write(UPLOAD_NAME, json.dumps({"id": own["id"]}).encode())
        stored = self._remote.read(POSITION_NAME)
        self._position = {} if stored is None else _fields(stored, self.url, "position", "begin")
        found = contents(self._directory)
        if self._position:
            there = parse_lsn(self._position["position"])
            if not found.begin <= there <= found.end:
                raise PgOutputError(
                    f"the copy at {self.url} ends at {format_lsn(there)}, and {self._directory} "
                    f"has what was committed from {format_lsn(found.begin)} to "
                    f"{format_lsn(found.end)}",
                    code="another_history",
                    path=self.url,
                    hint="Give a new prefix, and copy it anew",
                )
        self._consumer = Consumer(self._directory, CONSUMER_NAME)
        if self._mirrors:
            self._names = {
                name
                for folder in ("", *(one.name for one in _FOLDERS))
                for name in self._remote.names(folder)
                if owner_of(name) is not None
            }
        self.position = self._consumer.position.lsn

    def _read_own(self) -> dict[str, Any] | None:
        path = self._directory / UPLOAD_NAME
        try:
            return _fields(read_json_file(path), str(path), "id", "url")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PgOutputError(
                f"can't read {path}: {error.strerror}", code="io_failed", path=str(path)
            ) from error

    def round(self, stop: Event) -> bool:
        """Copy what there is, for some seconds at most, and tell readers of it.

        Parameters
        ----------
        stop : threading.Event
            Ends the round after the file that is being copied.

        Returns
        -------
        bool
            Whether there may be more at once.

        Raises
        ------
        RemoteError
            The storage refuses, or can't be reached: try again later.
        PgOutputError
            The directory can't be read, or an object is not what it should be.
        """
        # Before anything is listed: what has come in a place of theirs is copied in this round.
        gone = self._gone() if self._mirrors else set()
        found = contents(self._directory)
        states = self._tables.read()  # behind the end, as `next_reading` says
        try:
            if not self._copy_tables(states, stop):
                return True
            self._copy_history()
            end, is_whole = self._copy_segments(found, stop)
        except FileNotFoundError:
            return True  # it was merged or deleted since it was listed
        self._tell(found, end)
        after = next_reading(self._consumer.position, states, end).after
        now = time.monotonic()
        if after != self._consumer.position or now - self._advanced >= _SEEN_INTERVAL:
            self._consumer.advance(after)
            self._advanced = now
        self.position = end
        if is_whole:
            self._remote.delete(sorted(gone))
            self._names -= gone
        return not is_whole

    def _copy(self, path: Path, name: str) -> None:
        if name not in self._names:
            self._remote.copy(path, name)
            if self._mirrors:
                self._names.add(name)

    def _copy_tables(self, states: Mapping[int, TableState], stop: Event) -> bool:
        """Copy marks of tables; before that of a snapshot its files. Whether all are there."""
        files = None
        for copy in (copy for state in states.values() for copy in state.copies):
            name = f"{TABLES.name}/{copy.name}"
            if name in self._names:
                continue
            if copy.state == "snapshot" and self._remote.size(name) is None:
                files = files or snapshots.snapshot_files(self._directory)
                paths = files.get((copy.relation_id, copy.generation), [])
                for path in paths:
                    if stop.is_set():
                        return False
                    self._copy(path, f"{SNAPSHOTS.name}/{path.name}")
            self._copy(self._directory / name, name)
            self._names.add(name)
        return True

    def _copy_history(self) -> None:
        """Copy what has changed in the history of types and tables."""
        folder = HISTORY.path(self._directory)
        # This one is written again and again, after the others. So it is read before them, and
        # copied behind them.
        last = folder / SEEN_NAME
        seen = read_json_file(last) if last.exists() else None
        for path in (folder / name for name in HISTORY.names(self._directory)):
            status = path.stat()
            state = status.st_mtime_ns, status.st_size
            if path != last and self._history.get(path.name) != state:
                self._write_history(path.name, read_json_file(path))
                self._history[path.name] = state
        if seen is not None and seen != self._seen:
            self._write_history(SEEN_NAME, seen)
            self._seen = seen

    def _write_history(self, name: str, content: bytes) -> None:
        name = f"{HISTORY.name}/{name}"
        self._remote.write(name, content)
        if self._mirrors:
            self._names.add(name)

    def _copy_segments(self, found: Contents, stop: Event) -> tuple[int, bool]:
        """Copy segments in their order; where the copy then ends, and whether all are there."""
        until = time.monotonic() + _ROUND
        for (_, end), parts in itertools.groupby(
            found.segments, lambda one: (one.start_lsn, one.end_lsn)
        ):
            if end <= self.position and not self._mirrors:
                continue
            for segment in parts:
                if stop.is_set() or (time.monotonic() >= until and segment.part == 0):
                    return max(self.position, segment.start_lsn), False
                self._copy(segment.path, segment.path.name)
        return found.end, True

    def _tell(self, found: Contents, end: int) -> None:
        """Write the position object, if something has changed."""
        begin = found.begin
        if self._position and not self._mirrors:
            begin = parse_lsn(self._position["begin"])
        metadata = stored_metadata(self._directory)
        if metadata is None:
            with SegmentReader(found.segments[-1].path) as reader:
                metadata = reader.metadata
        ends = [one.end_lsn for one in found.segments if one.end_lsn <= end]
        fields = {
            "position": format_lsn(end),
            "begin": format_lsn(begin),
            "segments_end": format_lsn(max([found.begin, *ends])),
            "asked_since": format_lsn(asked_since(self._directory)),
            "metadata": json.loads(metadata.to_json()),
            "made_slot": False,  # who goes on in a download adopts the slot
        }
        if fields != self._position:
            self._remote.write(POSITION_NAME, json.dumps(fields).encode())
            self._position = fields

    def _gone(self) -> set[str]:
        """The objects whose files are deleted."""
        here = {segment.path.name for segment in listed(self._directory)}
        for folder in _FOLDERS:
            here |= {f"{folder.name}/{name}" for name in folder.names(self._directory)}
        return self._names - here - {UPLOAD_NAME, POSITION_NAME}


def download(url: str, directory: str | os.PathLike[str], *, endpoint: str | None = None) -> int:
    """Copy a directory out of object storage, for readers of local directories.

    If the original directory is lost, a capture with `adopt_slot` can continue in the copy: see
    docs/explanation/change-log-directory.md.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``, as it was given to :func:`pgoutput_fast.replication.capture`.
    directory : path
        An empty directory, or one that is made. After an error it has a part of the files.
    endpoint : str, optional
        ``http://host:port`` or ``https://host``, for storage that is not that of AWS; by default as
        AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL say.

    Returns
    -------
    int
        The LSN before which everything is there.

    Raises
    ------
    PgOutputError
        The URL has another form; the storage refuses, can't be reached, or has no such copy, or it
        was deleted meanwhile; the directory has files, or the disk refuses.
    """
    remote = Remote(parse_place(url, endpoint))
    target = Path(directory)
    remote.check()
    stored = remote.read(POSITION_NAME)
    if stored is None:
        raise PgOutputError(
            f"{remote.url} has no copy of a directory, or none that is whole yet",
            code="missing_path",
            path=remote.url,
        )
    position = _fields(stored, f"{remote.url}/{POSITION_NAME}", "position", "begin")
    end = parse_lsn(position["position"])
    try:
        target.mkdir(parents=True, exist_ok=True)
        if next(target.iterdir(), None) is not None:
            raise PgOutputError(
                f"{target} has files",
                code="not_ours",
                path=str(target),
                hint="Give an empty directory",
            )
        write_whole(target / DOWNLOAD_NAME, [json.dumps({"url": remote.url})])
        for name in _names_to_read(remote, target, end):
            path = target / name
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                remote.fetch(name, path)
        begin = {"begin": position.pop("begin")}
        write_whole(target / BEGIN_NAME, [json.dumps(begin)])
        write_whole(target / POSITION_NAME, [json.dumps(position)])
    except OSError as error:
        raise PgOutputError(
            f"can't write to {target}: {error.strerror or error}",
            code="io_failed",
            path=str(target),
        ) from error
    return end


def downloaded_from(directory: Path) -> str | None:
    """The URL from which a directory was downloaded; None: it is an original.

    Raises
    ------
    PgOutputError
        The file that tells it can't be read.
    """
    path = directory / DOWNLOAD_NAME
    try:
        return str(_fields(read_json_file(path), str(path), "url")["url"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PgOutputError(
            f"can't read {path}: {error.strerror}", code="io_failed", path=str(path)
        ) from error


def _names_to_read(remote: Remote, target: Path, end: int) -> Iterator[str]:
    """The objects of a copy. Each kind is listed before those that were written before it."""
    seen = f"{HISTORY.name}/{SEEN_NAME}"
    if remote.size(seen) is not None:
        yield seen
    whole: set[tuple[int, int]] = set()
    for folder in _FOLDERS:
        for name in remote.names(folder.name):
            # A listing is others' text: no other files are written.
            if owner_of(name) is not folder:
                continue
            copy = copies.Copy.named(name.rpartition("/")[2])
            if copy is not None and copy.state == "snapshot":
                whole.add((copy.relation_id, copy.generation))
            # Files of a copy whose mark is not there yet are being uploaded.
            number = snapshots.number_of(Path(name))
            if number is None or number[:2] in whole:
                yield name
    for name in remote.names():
        segment = Segment.named(target, name) if name.endswith(".arrow") else None
        if segment is not None and segment.end_lsn <= end:
            yield name


def _fields(content: bytes, where: str, *keys: str) -> dict[str, Any]:
    """The fields of a small file of a copy, in JSON, which have to have some texts."""
    try:
        fields: dict[str, Any] = of_form(json.loads(content), dict[str, Any], "fields")
        for key in keys:
            of_form(fields[key], str, key)
            if key in ("position", "begin"):
                parse_lsn(fields[key])
    except MALFORMED as error:
        raise unreadable(where, error, "which describes the copy of a directory") from error
    return fields
