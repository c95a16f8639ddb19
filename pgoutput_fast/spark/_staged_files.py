"""Put files into the target's storage while a window is written.

Among these files are the window's segments, for executors that cannot read the driver's disk. The
driver copies the segments and the schema history into the storage. Each task downloads the files
that it reads. The driver deletes the copies when the window is written.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from pgoutput_fast._disk import Folder, delete_below
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments.folders import HISTORY, owner_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pgoutput_fast.apply.delta_place import DeltaPlace
    from pgoutput_fast.changelog.read_plan import Read

STAGED = "_staged"
"""The directory in a target that has the staged files."""

_NET_FILE = re.compile(r"[0-9]+-[0-9a-f]{32}\.arrow")
_THREADS = 8
_BLOCK = 1 << 20


@contextlib.contextmanager
def staging(place: DeltaPlace) -> Iterator[str]:
    """Provide a new directory in a target's storage, and delete its files at the end of the block.

    Parameters
    ----------
    place : DeltaPlace
        The target's place.

    Yields
    ------
    str
        The path of the directory in the place.
    """
    if place.path is not None:
        Folder(STAGED, "").path(place.path)
    prefix = f"{STAGED}/{uuid.uuid4().hex}"
    try:
        yield prefix
    finally:
        # The next sync deletes the files that cannot be deleted now.
        with contextlib.suppress(PgOutputError):
            _delete(place, place.filesystem(), prefix)


@contextlib.contextmanager
def staged(place: DeltaPlace, directory: Path, reads: Iterable[Read]) -> Iterator[str]:
    """Copy the files of reads into a place, and delete the copies at the end of the block.

    Parameters
    ----------
    place : DeltaPlace
        The target's place.
    directory : pathlib.Path
        The change log.
    reads : iterable of Read

    Yields
    ------
    str
        The directory in the place that has the copies.

    Raises
    ------
    PgOutputError
        The storage has refused, or a file can't be read.
    """
    files = [path for read in reads for path in read.files]
    files += [HISTORY.path(directory) / name for name in HISTORY.names(directory)]
    storage = place.filesystem()

    def put(path: Path, name: str) -> None:
        with (
            path.open("rb") as file,
            # The stream accepts bytes only; with a buffer it gets bytes.
            storage.open_output_stream(name, buffer_size=8 * _BLOCK) as copy,
        ):
            shutil.copyfileobj(file, copy, _BLOCK)

    with staging(place) as prefix:
        names = [f"{prefix}/{path.relative_to(directory)}" for path in files]
        with place.refusals(prefix):
            if place.path is not None:
                for name in {str(Path(name).parent) for name in names}:
                    storage.create_dir(name, recursive=True)
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(put, files, names))
        yield prefix


def clear(place: DeltaPlace) -> None:
    """Delete the staged files of drivers that were killed.

    Raises
    ------
    PgOutputError
        The storage has refused.
    """
    _delete(place, place.filesystem(), STAGED)


def _is_own(path: str) -> bool:
    """Return whether a path in the place is a staged file of any driver."""
    match = re.fullmatch(rf"{STAGED}/[0-9a-f]{{32}}/(.+)", path)
    return match is not None and (
        owner_of(match[1]) is not None or _NET_FILE.fullmatch(match[1]) is not None
    )


def _delete(place: DeltaPlace, storage: Any, directory: str) -> None:
    with place.refusals(directory):
        if place.path is not None:
            delete_below(place.path / directory, lambda path: _is_own(f"{directory}/{path}"))
            return
        chosen = fs.FileSelector(directory, recursive=True, allow_not_found=True)
        paths = [
            info.path
            for info in storage.get_file_info(chosen)
            if info.is_file and _is_own(info.path)
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(storage.delete_file, paths))


@contextlib.contextmanager
def downloaded(
    place: DeltaPlace, prefix: str, directory: str, reads: Sequence[tuple[int, Read]]
) -> Iterator[tuple[Path, list[tuple[int, Read]]]]:
    """Download staged files to this machine, and delete the copies at the end of the block.

    Parameters
    ----------
    place : DeltaPlace
    prefix : str
        The directory that `staged` yields.
    directory : str
        The change log on the driver. Errors of the block name it instead of the local directory.
    reads : sequence of (int, Read)

    Yields
    ------
    pathlib.Path
        A directory with the schema history and the files of the reads.
    list of (int, Read)
        The reads with the local paths of their files.

    Raises
    ------
    PgOutputError
        The storage has refused.
    """
    storage = place.filesystem()
    with tempfile.TemporaryDirectory(prefix="pgoutput-fast-") as temporary:
        own = Path(temporary)

        def download(name: str) -> None:
            path = own / name
            path.parent.mkdir(exist_ok=True)
            with storage.open_input_file(f"{prefix}/{name}") as copy, path.open("wb") as file:
                shutil.copyfileobj(copy, file, _BLOCK)

        def local(path: Path) -> Path:
            return own / path.relative_to(directory)

        local_reads = [
            (number, read._replace(files=tuple(map(local, read.files)))) for number, read in reads
        ]
        with place.refusals(prefix):
            chosen = fs.FileSelector(f"{prefix}/{HISTORY.name}", allow_not_found=True)
            names = [
                f"{HISTORY.name}/{Path(info.path).name}" for info in storage.get_file_info(chosen)
            ]
            names += [str(path.relative_to(own)) for _, read in local_reads for path in read.files]
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(download, names))
        try:
            yield own, local_reads
        except PgOutputError as error:
            error.args = (error.message.replace(temporary, directory), *error.args[1:])
            error.path = error.path and error.path.replace(temporary, directory)
            raise
