"""Requests for a new snapshot of a table, from other processes to the capture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from .._disk import fsync_path, read_json_file, write_whole
from .._forms import MALFORMED, of_form, unreadable
from ..errors import PgOutputError
from ..segments.folders import REQUESTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Request(NamedTuple):
    """A request for a new snapshot of a table.

    Fields: table (namespace and name); why (who asks, and for which reason).
    """

    table: list[str]
    why: str


def request_copy(directory: Path, relation_id: int, table: Sequence[str], why: str) -> None:
    """Request a new snapshot of a table from the capture of a change log.

    Parameters
    ----------
    directory : pathlib.Path
    relation_id : int
    table : sequence of str
        Namespace and name of the table. They are shown to people; the relation id decides.
    why : str
        Who asks, and for which reason. The capture logs this text.

    Raises
    ------
    PgOutputError
        The request can't be written.
    """
    path = REQUESTS.path(directory)
    try:
        REQUESTS.make(directory)
        fields = {"table": [*table], "why": why}
        write_whole(path / f"{relation_id}.json", [json.dumps(fields)])
    except OSError as error:
        raise PgOutputError(
            f"can't write into {path}: {error.strerror or error}", code="io_failed", path=str(path)
        ) from error


def requested(directory: Path) -> dict[int, Request]:
    """Return the open requests for snapshots, by relation id.

    Raises
    ------
    PgOutputError
        The requests can't be read.
    """
    path = REQUESTS.path(directory)
    requests: dict[int, Request] = {}
    try:
        paths = [path / name for name in REQUESTS.names(directory)]
    except OSError as error:
        raise PgOutputError(
            f"can't read {path}: {error.strerror or error}", code="io_failed", path=str(path)
        ) from error
    for file in paths:
        relation_id = int(file.stem)
        try:
            fields = json.loads(read_json_file(file))
            table: list[str] = of_form(fields["table"], list[str], "table")
            if len(table) != 2:
                raise ValueError("table is not a schema and a name")
            requests[relation_id] = Request(table, of_form(fields["why"], str, "why"))
        except FileNotFoundError:
            continue  # the capture has deleted it since the listing
        except (OSError, *MALFORMED) as error:
            raise unreadable(
                file,
                error,
                "which requests a snapshot of a table",
                "Delete it, and request the snapshot again",
            ) from error
    return requests


def forget_request(directory: Path, relation_id: int) -> None:
    """Delete the request for a table's snapshot.

    Raises
    ------
    PgOutputError
        The request can't be deleted.
    """
    path = REQUESTS.path(directory) / f"{relation_id}.json"
    try:
        REQUESTS.delete(directory, path.name, missing_ok=True)
        fsync_path(path.parent)
    except OSError as error:
        raise PgOutputError(
            f"can't delete {path}: {error.strerror or error}", code="io_failed", path=str(path)
        ) from error
