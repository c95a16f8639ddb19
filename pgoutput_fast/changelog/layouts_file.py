"""One file, layouts.txt, that lists for each segment the tables with changes in it.

A reader of one table then opens only the segments with changes of this table. The file is a cache
of the layout indexes. Without it, a reader opens the segments, and the capture writes it again.
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

_FEW = 100  # so few lines of deleted segments are not worth a rewrite of the file


class LayoutsReader:
    """Reads layouts.txt, which lists the tables with changes in each segment.

    Parameters
    ----------
    directory : pathlib.Path or None
        The change log; None for segments of several directories, which are then opened one by one.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lines: dict[str, bytes] | None = None

    def relation_ids(self, path: Path) -> frozenset[int]:
        """Return the relation ids of the tables with changes or Truncates in a segment's file.

        Raises
        ------
        PgOutputError
            The segment had to be opened, and can't be read or is damaged.
        """
        if self._lines is None:
            self._lines = {} if self._directory is None else _lines(self._directory)
        line = self._lines.get(path.name)
        relation_ids = None if line is None else _parsed(line, path)
        return _opened(path) if relation_ids is None else relation_ids


class LayoutsWriter:
    """Writes layouts.txt. The caller is the directory's only writer.

    Parameters
    ----------
    directory : pathlib.Path
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names = {*_lines(directory)}

    def gather(self) -> None:
        """Add a line for each new segment.

        A segment that can't be read gets no line. Whoever reads the segment gets the error.

        Raises
        ------
        OSError
            The file can't be written.
        """
        segments = listed(self._directory)
        if len(self._names) > 2 * len(segments) + _FEW:
            # Most lines belong to segments that were merged or deleted: write the file again.
            names = {segment.name for segment in segments} & self._names
            lines = _lines(self._directory)
            content = [f"\n{lines[name].decode()}" for name in names & lines.keys()]
            write_whole(self._directory / LAYOUTS_NAME, content)
            self._names = names
        new = [segment.path for segment in segments if segment.name not in self._names]
        if new:
            # Not synced: if a crash cuts a line short, its checksum is wrong. Each new line begins
            # with a line feed, which also ends such a line.
            with (self._directory / LAYOUTS_NAME).open("ab") as file:
                for path in new:
                    with contextlib.suppress(PgOutputError):
                        file.write(b"\n" + _line(path))
            self._names.update(path.name for path in new)


def _lines(directory: Path) -> dict[str, bytes]:
    """Return the lines with a right checksum, by segment name; empty without the file."""
    try:
        content = (directory / LAYOUTS_NAME).read_bytes()
    except FileNotFoundError:
        return {}
    lines = {}
    for line in content.splitlines():
        crc, _, text = line.partition(b" ")
        if crc == b"%08x" % zlib.crc32(text):
            lines[text.partition(b" ")[0].decode()] = line
    return lines


def _line(path: Path) -> bytes:
    stat = path.stat()
    fields = json.dumps([stat.st_size, stat.st_mtime_ns, sorted(_opened(path))])
    text = f"{path.name} {fields}".encode()
    return b"%08x %b" % (zlib.crc32(text), text)


def _parsed(line: bytes, path: Path) -> frozenset[int] | None:
    """Return the relation ids in a line; None if size or time of the segment differ."""
    size, modified, relation_ids = json.loads(line.split(b" ", 2)[2])
    stat = path.stat()
    is_same = (stat.st_size, stat.st_mtime_ns) == (size, modified)
    return frozenset(relation_ids) if is_same else None


def _opened(path: Path) -> frozenset[int]:
    with SegmentReader(path) as reader:
        return frozenset(span.relation_id for span in reader.index)
