"""Files of snapshots: their names, and where they lie."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .._disk import fsync_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .copies import Copy, TableState

DIRECTORY_NAME = "snapshots"
_NAME = re.compile(r"([0-9A-F]{8})-([0-9]{5})-([0-9]{8})\.arrow", re.ASCII)


def snapshot_path(directory: Path, copy: Copy, number: int) -> Path:
    """The path of one file of a copy: 0 has the Truncate, the others rows of a range each."""
    name = f"{copy.relation_id:08X}-{copy.generation:05d}-{number:08d}.arrow"
    return directory / DIRECTORY_NAME / name


def snapshot_files(directory: Path) -> dict[tuple[int, int], list[Path]]:
    """The files by relation id and generation, each list in the order of the rows."""
    found: dict[tuple[int, int], list[Path]] = {}
    path = directory / DIRECTORY_NAME
    for one in sorted(path.iterdir()) if path.exists() else ():
        match = _NAME.fullmatch(one.name)
        if match is not None:
            found.setdefault((int(match[1], 16), int(match[2])), []).append(one)
    return found


def delete_unfinished(
    directory: Path, states: Mapping[int, TableState], relation_id: int | None = None
) -> None:
    """Delete the files of copies that were begun and are not whole.

    Parameters
    ----------
    directory : pathlib.Path
    states : mapping of int to TableState
    relation_id : int, optional
        Only those of this table; by default all, as no copy is being made.

    Raises
    ------
    OSError
        The disk refuses.
    """
    path = directory / DIRECTORY_NAME
    if not path.exists():
        return
    whole = {
        (relation_id, copy.generation)
        for relation_id, state in states.items()
        for copy in state.snapshots
    }
    for key, files in snapshot_files(directory).items():
        if key not in whole and relation_id in (None, key[0]):
            for one in files:
                one.unlink()
    for one in path.iterdir() if relation_id is None else ():
        if one.suffix == ".tmp":
            one.unlink()
    fsync_path(path)
