"""Upload a change log to object storage, and download it.

The order of uploads keeps the remote copy complete. An object that others depend on is uploaded
before them, and the position object comes last. So a reader that reads the position object first,
and then lists the objects, finds a complete change log.
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
from . import snapshot_states, snapshots
from .consumers import Consumer, consumers
from .read_plan import next_ranges
from .remote import Remote, parse_place
from .snapshot_states import SnapshotStates, TableSnapshots

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from threading import Event

CONSUMER_NAME = "_upload"
"""The consumer of the upload: for it, the change log keeps files that are not uploaded yet."""
_FOLDERS = (HISTORY, TABLES, SNAPSHOTS)
_ROUND = 5.0  # seconds; then the position object is updated, even if more segments wait
_REWRITE_INTERVAL = 30.0  # seconds; then the consumer's file is rewritten even without progress


class Upload:
    """Uploads a change log, round by round. The caller holds the directory's lock.

    Parameters
    ----------
    directory : pathlib.Path
    url : str
        ``s3://bucket/prefix``.
    endpoint : str, optional
        As for :func:`download`.
    keep : {"all", "local"}
        "local": delete an object once its local file is deleted. "all": delete no object.

    Attributes
    ----------
    position : int
        Everything before this LSN is uploaded; 0 before `begin`.

    Raises
    ------
    PgOutputError
        The URL is malformed, or pyarrow lacks S3.
    """

    def __init__(
        self, directory: Path, url: str, endpoint: str | None, keep: Literal["all", "local"]
    ) -> None:
        self._directory = directory
        self._remote = Remote(parse_place(url, endpoint, names=("upload", "upload_endpoint")))
        self.url = self._remote.url
        self._mirrors = keep == "local"
        self._tables = SnapshotStates(directory)
        self.position = 0
        self._position: dict[str, Any] = {}  # the content of the position object
        self._names: set[str] = set()  # uploaded objects; without `_mirrors`, only state files
        self._history: dict[str, tuple[int, int]] = {}
        self._confirmation: bytes | None = None
        self._advanced = 0.0

    @property
    def is_registered(self) -> bool:
        """Whether an earlier upload has begun, so that the directory keeps files for it."""
        return CONSUMER_NAME in {consumer.name for consumer in consumers(self._directory)}

    def check(self) -> None:
        """Check that the prefix can be used for this directory, before anything is created.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        PgOutputError
            The prefix has other objects or the copy of another directory. Or the directory is
            uploaded to another URL.
        """
        self._remote.check()
        registered = self.is_registered
        own = self._read_own()
        if registered and own is not None and own["url"] != self.url:
            raise PgOutputError(
                f"{self._directory} is copied to {own['url']}, not to {self.url}",
                code="bad_option",
                parameter="upload",
                path=str(self._directory),
                hint=f"Give the former URL, or remove the consumer {CONSUMER_NAME} of "
                f"{self._directory}: the capture then copies everything again",
            )
        there = self._remote.read(UPLOAD_NAME)
        if there is None and registered:
            raise PgOutputError(
                f"the copy at {self.url} is missing",
                code="missing_path",
                path=self.url,
                hint=f"Restore it, or remove the consumer {CONSUMER_NAME} of {self._directory}: "
                "the capture then copies everything again",
            )
        if there is None and self._remote.has_any():
            raise PgOutputError(
                f"{self.url} has objects of another program",
                code="not_ours",
                path=self.url,
                hint="Give an unused prefix",
            )
        if there is not None and (
            own is None or _fields(there, self.url, "id") != {"id": own["id"]}
        ):
            raise PgOutputError(
                f"{self.url} has the copy of another directory, not of {self._directory}",
                code="another_history",
                path=self.url,
                hint="Give an unused prefix",
            )

    def begin(self) -> None:
        """Begin or resume the upload. A capture must have begun in the directory.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        PgOutputError
            As `check`; or the remote copy ends outside the range of the directory.
        """
        self.check()
        own = self._read_own() or {"id": uuid.uuid4().hex}
        own = {"id": own["id"], "url": self.url}
        # Write the local file first. Otherwise a kill could leave a remote copy without an owner.
        write_whole(self._directory / UPLOAD_NAME, [json.dumps(own)])
        if self._remote.read(UPLOAD_NAME) is None:
            self._remote.write(UPLOAD_NAME, json.dumps({"id": own["id"]}).encode())
        stored = self._remote.read(POSITION_NAME)
        self._position = {} if stored is None else _fields(stored, self.url, "position", "begin")
        listing = contents(self._directory)
        if self._position:
            there = parse_lsn(self._position["position"])
            if not listing.begin <= there <= listing.end:
                raise PgOutputError(
                    f"the copy at {self.url} ends at {format_lsn(there)}, but {self._directory} "
                    f"has only changes from {format_lsn(listing.begin)} to "
                    f"{format_lsn(listing.end)}",
                    code="another_history",
                    path=self.url,
                    hint="Give a new prefix: the capture then copies everything again",
                )
        self._consumer = Consumer(self._directory, CONSUMER_NAME)
        if self._mirrors:
            self._names = {
                name
                for folder in ("", *(subfolder.name for subfolder in _FOLDERS))
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
        """Upload new files for about five seconds, then update the position object.

        Parameters
        ----------
        stop : threading.Event
            Ends the round after the current file.

        Returns
        -------
        bool
            Whether more files may wait: call it again at once.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached: try again later.
        PgOutputError
            The directory can't be read, or an object has an unexpected content or size.
        """
        # Find deleted files before listing: this round then uploads the files that replace them.
        obsolete_names = self._gone() if self._mirrors else set()
        listing = contents(self._directory)
        states = self._tables.read()  # after the end was read: see `next_ranges`
        try:
            if not self._copy_tables(states, stop):
                return True
            self._copy_history()
            end, is_whole = self._copy_segments(listing, stop)
        except FileNotFoundError:
            return True  # a file was merged or deleted since the listing
        self._tell(listing, end)
        after = next_ranges(self._consumer.position, states, end).after
        now = time.monotonic()
        if after != self._consumer.position or now - self._advanced >= _REWRITE_INTERVAL:
            self._consumer.advance(after)
            self._advanced = now
        self.position = end
        if is_whole:
            self._remote.delete(sorted(obsolete_names))
            self._names -= obsolete_names
        return not is_whole

    def _copy(self, path: Path, name: str) -> None:
        if name not in self._names:
            self._remote.copy(path, name)
            if self._mirrors:
                self._names.add(name)

    def _copy_tables(self, states: Mapping[int, TableSnapshots], stop: Event) -> bool:
        """Upload state files, each after its snapshot's files; return whether all are uploaded."""
        files = None
        for snapshot in (snapshot for state in states.values() for snapshot in state.all_snapshots):
            name = f"{TABLES.name}/{snapshot.name}"
            if name in self._names:
                continue
            if snapshot.state == "snapshot" and self._remote.size(name) is None:
                files = files or snapshots.snapshot_files(self._directory)
                paths = files.get((snapshot.relation_id, snapshot.number), [])
                for path in paths:
                    if stop.is_set():
                        return False
                    self._copy(path, f"{SNAPSHOTS.name}/{path.name}")
            self._copy(self._directory / name, name)
            self._names.add(name)
        return True

    def _copy_history(self) -> None:
        """Upload the changed files of the schema history."""
        folder = HISTORY.path(self._directory)
        # A capture rewrites seen.json often, after the other files. So read it before them, and
        # upload it after them.
        last = folder / SEEN_NAME
        confirmation = read_json_file(last) if last.exists() else None
        for path in (folder / name for name in HISTORY.names(self._directory)):
            status = path.stat()
            state = status.st_mtime_ns, status.st_size
            if path != last and self._history.get(path.name) != state:
                self._write_history(path.name, read_json_file(path))
                self._history[path.name] = state
        if confirmation is not None and confirmation != self._confirmation:
            self._write_history(SEEN_NAME, confirmation)
            self._confirmation = confirmation

    def _write_history(self, name: str, content: bytes) -> None:
        name = f"{HISTORY.name}/{name}"
        self._remote.write(name, content)
        if self._mirrors:
            self._names.add(name)

    def _copy_segments(self, listing: Contents, stop: Event) -> tuple[int, bool]:
        """Upload segments in order; return the new end, and whether all are uploaded."""
        until = time.monotonic() + _ROUND
        for (_, end), parts in itertools.groupby(
            listing.segments, lambda segment: (segment.start_lsn, segment.end_lsn)
        ):
            if end <= self.position and not self._mirrors:
                continue
            for segment in parts:
                if stop.is_set() or (time.monotonic() >= until and segment.part == 0):
                    return max(self.position, segment.start_lsn), False
                self._copy(segment.path, segment.path.name)
        return listing.end, True

    def _tell(self, listing: Contents, end: int) -> None:
        """Write the position object if it changes."""
        begin = listing.begin
        if self._position and not self._mirrors:
            begin = parse_lsn(self._position["begin"])
        metadata = stored_metadata(self._directory)
        if metadata is None:
            with SegmentReader(listing.segments[-1].path) as reader:
                metadata = reader.metadata
        ends = [segment.end_lsn for segment in listing.segments if segment.end_lsn <= end]
        fields = {
            "position": format_lsn(end),
            "begin": format_lsn(begin),
            "segments_end": format_lsn(max([listing.begin, *ends])),
            "asked_since": format_lsn(asked_since(self._directory)),
            "metadata": json.loads(metadata.to_json()),
            "made_slot": False,  # a capture that resumes in a download has to adopt the slot
        }
        if fields != self._position:
            self._remote.write(POSITION_NAME, json.dumps(fields).encode())
            self._position = fields

    def _gone(self) -> set[str]:
        """Return the objects whose local files are deleted."""
        here = {segment.path.name for segment in listed(self._directory)}
        for folder in _FOLDERS:
            here |= {f"{folder.name}/{name}" for name in folder.names(self._directory)}
        return self._names - here - {UPLOAD_NAME, POSITION_NAME}


def download(url: str, directory: str | os.PathLike[str], *, endpoint: str | None = None) -> int:
    """Download a change log from object storage into a local directory.

    If the original directory is lost, a capture with `adopt_slot` can continue in the downloaded
    one: see docs/explanation/change-log-directory.md.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``, as given to :func:`pgoutput_fast.replication.capture`.
    directory : path
        An empty directory, or a new one. After an error, it has only a part of the files.
    endpoint : str, optional
        ``http://host:port`` or ``https://host``, for storage other than AWS; by default the value
        of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.

    Returns
    -------
    int
        The LSN before which the downloaded change log has everything.

    Raises
    ------
    PgOutputError
        The URL is malformed. The storage returns an error or can't be reached. The remote copy does
        not exist, or objects of it were deleted meanwhile. The directory has files, or can't be
        written.
    """
    remote = Remote(parse_place(url, endpoint))
    target = Path(directory)
    remote.check()
    stored = remote.read(POSITION_NAME)
    if stored is None:
        raise PgOutputError(
            f"{remote.url} has no copy of a directory, or no complete one yet",
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
    """Return the URL from which a directory was downloaded; None for an original directory.

    Raises
    ------
    PgOutputError
        download.json can't be read.
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
    """Yield the objects to download: kinds that are uploaded later come first, segments last."""
    # An object depends on objects that were uploaded before it. So a later listing has them.
    confirmation_name = f"{HISTORY.name}/{SEEN_NAME}"
    if remote.size(confirmation_name) is not None:
        yield confirmation_name
    whole: set[tuple[int, int]] = set()
    for folder in _FOLDERS:
        for name in remote.names(folder.name):
            # A listing is untrusted text: create only files with names of this package.
            if owner_of(name) is not folder:
                continue
            snapshot = snapshot_states.Snapshot.named(name.rpartition("/")[2])
            if snapshot is not None and snapshot.state == "snapshot":
                whole.add((snapshot.relation_id, snapshot.number))
            # A snapshot without its state file is still being uploaded: leave it out.
            number = snapshots.number_of(Path(name))
            if number is None or number[:2] in whole:
                yield name
    for name in remote.names():
        segment = Segment.named(target, name) if name.endswith(".arrow") else None
        if segment is not None and segment.end_lsn <= end:
            yield name


def _fields(content: bytes, where: str, *keys: str) -> dict[str, Any]:
    """Parse a small JSON file; check that the fields `keys` are texts."""
    try:
        fields: dict[str, Any] = of_form(json.loads(content), dict[str, Any], "fields")
        for key in keys:
            of_form(fields[key], str, key)
            if key in ("position", "begin"):
                parse_lsn(fields[key])
    except MALFORMED as error:
        raise unreadable(where, error, "which describes the copy of a directory") from error
    return fields
