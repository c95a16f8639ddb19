"""What the layout indexes of all segments say, gathered in one file.

So a reader of one table opens no file without its changes. The file can be deleted at any time:
a reader opens the segments that it lacks, and the capture writes it anew.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from typing import TYPE_CHECKING

from .._disk import write_whole
from ..errors import PgOutputError
from ..segments.folders import LAYOUTS_NAME
from ..segments.listing import listed
from ..segments.reader import SegmentReader

if TYPE_CHECKING:
    from pathlib import Path

_FEW = 100  # lines of files that are gone, which are not worth to write the file anew


class Gathered:
    """The relation ids that segments have changes of.

    Parameters
    ----------
    directory : pathlib.Path or None
        None: files of several directories, which are opened.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lines: dict[str, bytes] | None = None

    def relation_ids(self, path: Path) -> frozenset[int]:
        """Return the tables of which a segment has changes or Truncates.

        Raises
        ------
        PgOutputError
            The file has to be opened, and can't be read, or is damaged.
        """
        if self._lines is None:
            self._lines = {} if self._directory is None else _lines(self._directory)
        line = self._lines.get(path.name)
        found = None if line is None else _parsed(line, path)
        return _opened(path) if found is None else found


class Gatherer:
    """Writes that file. The caller is the directory's only writer.

    Parameters
    ----------
    directory : pathlib.Path
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names = {*_lines(directory)}

    def gather(self) -> None:
        """Add what the file lacks. What can't be read is left out; who reads it is told.

        Raises
        ------
        OSError
            The disk refuses.
        """
        segments = listed(self._directory)
        if len(self._names) > 2 * len(segments) + _FEW:
            # Most are of segments that were merged or deleted.
            kept = {segment.name for segment in segments} & self._names
            lines = _lines(self._directory)
            content = [f"\n{lines[name].decode()}" for name in kept & lines.keys()]
            write_whole(self._directory / LAYOUTS_NAME, content)
            self._names = kept
        new = [segment.path for segment in segments if segment.name not in self._names]
        if new:
            # Not synced: a line that a crash cuts short has another checksum. It gets its end here.
            with (self._directory / LAYOUTS_NAME).open("ab") as file:
                for path in new:
                    with contextlib.suppress(PgOutputError):
                        file.write(b"\n" + _line(path))
            self._names.update(path.name for path in new)


def _lines(directory: Path) -> dict[str, bytes]:
    """Return the sound lines of the file by the names of segments; none if it is not there."""
    try:
        content = (directory / LAYOUTS_NAME).read_bytes()
    except FileNotFoundError:
        return {}
    found = {}
    for line in content.splitlines():
        crc, _, text = line.partition(b" ")
        if crc == b"%08x" % zlib.crc32(text):
            found[text.partition(b" ")[0].decode()] = line
    return found


def _line(path: Path) -> bytes:
    stat = path.stat()
    told = json.dumps([stat.st_size, stat.st_mtime_ns, sorted(_opened(path))])
    text = f"{path.name} {told}".encode()
    return b"%08x %b" % (zlib.crc32(text), text)


def _parsed(line: bytes, path: Path) -> frozenset[int] | None:
    """Return what a line says of a file; None if it is of another file."""
    size, modified, relation_ids = json.loads(line.split(b" ", 2)[2])
    stat = path.stat()
    is_same = (stat.st_size, stat.st_mtime_ns) == (size, modified)
    return frozenset(relation_ids) if is_same else None


def _opened(path: Path) -> frozenset[int]:
    with SegmentReader(path) as reader:
        return frozenset(span.relation_id for span in reader.index)
