"""Find out from a Delta table's log what other programs did since our last commit.

Each of our commits that moves the table's position has a transaction of the app. It was computed
from the version right before it. So only commits after our last one can have unknown changes.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE_ACTIONS = ("add", "remove", "cdc")


class CommitsSince(NamedTuple):
    """The newest commits of a log, back to our last one.

    Attributes
    ----------
    has_ours : bool
        Whether our last commit is among them.
    has_foreign : bool
        Whether commits without a transaction of the app are among them.
    changed : str or None
        How another program has changed rows since our last commit; None if none has.
    """

    has_ours: bool
    has_foreign: bool
    changed: str | None


class _LogCommit(NamedTuple):
    """A commit. Fields: is_ours, changes (whether it changes rows), operation (its name)."""

    is_ours: bool
    changes: bool
    operation: str


def commits_since(filesystem: Any, newest: int, last_read: int, app: str) -> CommitsSince:
    """Read the commits of a log, from the newest one back to our last one.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
        The table's files.
    newest : int
        The version of the newest commit.
    last_read : int
        The version up to which the log was read before; -1 if it was not.
    app : str
        The application id of our transactions; those with ``/`` and a suffix are ours, too.
    """
    has_ours = has_foreign = False
    changed = None
    for version in range(newest, last_read, -1):
        commit = _commit(filesystem, version, app)
        if commit is None:
            changed = f"version {version} of its log is missing"
            break
        if commit.is_ours:
            has_ours = True
            break
        has_foreign = True
        if commit.changes:
            changed = f"{commit.operation} in version {version}"
    return CommitsSince(has_ours, has_foreign, changed)


def _commit(filesystem: Any, version: int, app: str) -> _LogCommit | None:
    """Read a commit; None if the log does not have it any more."""
    info: dict[str, Any] = {}
    is_ours = changes = False
    try:
        for name, action in _actions(filesystem, f"_delta_log/{version:020}.json"):
            if name == "commitInfo":
                info = action
            elif name == "txn":
                is_ours |= action["appId"] == app or action["appId"].startswith(f"{app}/")
            elif name in _FILE_ACTIONS:
                changes |= action.get("dataChange", True)
    except FileNotFoundError:
        return None
    return _LogCommit(is_ours, changes, str(info.get("operation", "a commit")))


def _actions(filesystem: Any, path: str) -> Iterator[tuple[str, Any]]:
    with (
        filesystem.open_input_stream(path) as file,
        io.TextIOWrapper(file, "utf-8") as lines,
    ):
        for line in lines:
            if line.strip():
                yield from json.loads(line).items()
