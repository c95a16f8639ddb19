"""Files that are in the target's storage while a window is written.

Among them are its segments, for executors that do not see the driver's disk. The driver copies them
there, and the history of types beside them; each task takes those that it reads to its own disk.
They are deleted when the window is written.
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
"""The directory in a target that has such files."""

_NET_FILE = re.compile(r"[0-9]+-[0-9a-f]{32}\.arrow")
_THREADS = 8
_BLOCK = 1 << 20


@contextlib.contextmanager
def staging(place: DeltaPlace) -> Iterator[str]:
    """Have a directory of its own in a place, for as long as the block takes.

    Parameters
    ----------
    place : DeltaPlace
        Of the target.

    Yields
    ------
    str
        Its path in the place.
    """
    if place.path is not None:
        Folder(STAGED, "").path(place.path)
    prefix = f"{STAGED}/{uuid.uuid4().hex}"
    try:
        yield prefix
    finally:
        # What can't be deleted now goes when the next sync begins.
        with contextlib.suppress(PgOutputError):
            _delete(place, place.filesystem(), prefix)


@contextlib.contextmanager
def staged(place: DeltaPlace, directory: Path, reads: Iterable[Read]) -> Iterator[str]:
    """Have the files of reads in a place, for as long as the block takes.

    Parameters
    ----------
    place : DeltaPlace
        Of the target.
    directory : pathlib.Path
        Of the segments.
    reads : iterable of Read

    Yields
    ------
    str
        The directory in the place that has them.

    Raises
    ------
    PgOutputError
        The storage refuses, or a file can't be read.
    """
    files = [path for read in reads for path in read.files]
    files += [HISTORY.path(directory) / name for name in HISTORY.names(directory)]
    storage = place.filesystem()

    def put(path: Path, name: str) -> None:
        with (
            path.open("rb") as file,
            # Its stream takes nothing but bytes, which is what comes out of a buffer.
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
    """Delete what a driver has left that was killed.

    Raises
    ------
    PgOutputError
        The storage refuses.
    """
    _delete(place, place.filesystem(), STAGED)


def _is_own(path: str) -> bool:
    """Whether a file is of a driver's directory, by its path in the place."""
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
        found = [
            one.path for one in storage.get_file_info(chosen) if one.is_file and _is_own(one.path)
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(storage.delete_file, found))


@contextlib.contextmanager
def taken(
    place: DeltaPlace, prefix: str, directory: str, reads: Sequence[tuple[int, Read]]
) -> Iterator[tuple[Path, list[tuple[int, Read]]]]:
    """Have files that are in a place on the own disk, for as long as the block takes.

    Parameters
    ----------
    place : DeltaPlace
    prefix : str
        What `staged` has given.
    directory : str
        Of the segments, on the driver. Errors of the block name it in place of the own one.
    reads : sequence of (int, Read)

    Yields
    ------
    pathlib.Path
        A directory that has the history, and the files of these reads.
    list of (int, Read)
        The reads with the paths of these files.

    Raises
    ------
    PgOutputError
        The storage refuses.
    """
    storage = place.filesystem()
    with tempfile.TemporaryDirectory(prefix="pgoutput-fast-") as temporary:
        own = Path(temporary)

        def take(name: str) -> None:
            path = own / name
            path.parent.mkdir(exist_ok=True)
            with storage.open_input_file(f"{prefix}/{name}") as copy, path.open("wb") as file:
                shutil.copyfileobj(copy, file, _BLOCK)

        def local(path: Path) -> Path:
            return own / path.relative_to(directory)

        found = [
            (number, read._replace(files=tuple(map(local, read.files)))) for number, read in reads
        ]
        with place.refusals(prefix):
            chosen = fs.FileSelector(f"{prefix}/{HISTORY.name}", allow_not_found=True)
            names = [
                f"{HISTORY.name}/{Path(one.path).name}" for one in storage.get_file_info(chosen)
            ]
            names += [str(path.relative_to(own)) for _, read in found for path in read.files]
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(take, names))
        try:
            yield own, found
        except PgOutputError as error:
            if error.args:
                text = str(error.args[0]).replace(temporary, directory)
                error.args = (text, *error.args[1:])
            raise
