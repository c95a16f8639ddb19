"""`pgoutput-fast inspect`: print segments and recorded streams."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import (
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    StreamCommit,
    Truncate,
    Update,
    format_lsn,
)
from .._disk import read_json_file
from ..changelog.history import POLICIES, HistoryFollower, HistoryPolicy, history_of
from ..changelog.log import ChangeLog
from ..columnar.arrays import OPERATIONS, READ
from ..errors import PgOutputError, counted, printable
from ..protocol.copydata import Keepalive
from ..protocol.wire import TAGS, relation_id_of
from ..segments import SegmentReader, list_segments
from ..segments.reader import is_segment
from ..segments.recordings import Frame, Recording
from ..types import TypeRegistry
from ..values import timestamp_form
from ._help import GroupedCommand
from ._inspect_directory import described, files_of, lines_of
from ._options import is_of, policies_option, table_patterns
from ._show import Lines, Messages, Shown, Values, as_json, values_option
from ._style import Paint, paint_for, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..policies import Policies

_NAMED = 20  # the largest number of tables that an error lists


def _files(paths: tuple[Path, ...]) -> list[Path]:
    """List the files in paths. Several segments must follow each other in one stream.

    Raises
    ------
    PgOutputError
        Segments do not follow each other, or a file is given twice.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
        elif (log := ChangeLog(path)).has_begun:
            files += files_of(log.view())
    if len(paths) == 1:
        return files
    segments: list[Path] = []
    others: dict[Path, Path] = {}  # each of these files is a stream of its own
    for path in files:
        if is_segment(path) and not _is_of_snapshot(path):
            segments.append(path)
        elif (before := others.setdefault(path.resolve(), path)) is not path:
            raise PgOutputError(
                f"{path} is given twice, once as {before}",
                code="bad_option",
                parameter="paths",
                path=str(path),
            )
    return [*others.values(), *(segment.path for segment in list_segments(segments))]


def _is_of_snapshot(path: Path) -> bool:
    with SegmentReader(path) as reader:
        return reader.metadata.snapshot


def _messages(
    path: Path,
    policies: Policies | None,
    registry: TypeRegistry | None,
    follower: HistoryFollower | None,
) -> Iterator[Shown | Keepalive]:
    """Decode the messages of a file, from its start, with the types of `follower`."""
    if is_segment(path):
        with SegmentReader(path) as reader:
            metadata = reader.metadata
            types = registry if follower is None else follower.registry
            messages = Messages(
                metadata.encoding, policies, types, continues=True, read=metadata.snapshot
            )
            for batch in reader:
                for part in (
                    [batch] if follower is None else follower.split(batch, path, metadata.encoding)
                ):
                    columns = (part.column(name).to_pylist() for name in ("lsn", "data", "seq"))
                    for lsn, frame, seq in zip(*columns, strict=True):
                        yield messages.decode(lsn, None, frame, seq)
        return
    recording = Recording(path)
    try:
        messages = Messages(recording.encoding, policies, registry)
        for frame in recording.frames():
            yield messages.decode(*frame) if isinstance(frame, Frame) else frame
    finally:
        recording.close()


class _Filter:
    """Chooses messages by table, transaction and tag; a message must match all given options."""

    def __init__(self, tables: tuple[str, ...], xids: tuple[int, ...], tags: str) -> None:
        self._tables = table_patterns(tables)
        self._xids = set(xids)
        self._tags = set(tags)
        self.is_empty = not (self._tables or self._xids or self._tags)
        self.matches = 0
        self._present_tables: set[str] = set()
        self._present_tags: set[str] = set()

    def __call__(self, shown: Shown) -> bool:
        self._present_tables.update(shown.tables)
        matches = self._holds(shown)
        self.matches += matches
        return matches

    def _holds(self, shown: Shown) -> bool:
        xids = {shown.xid, getattr(shown.message, "xid", None)}
        if self._xids and not self._xids & xids:
            return False
        if not is_of(shown.tables, self._tables):
            return False
        if shown.is_read:  # the frame is an Insert, but the server did not send it
            return not self._tags
        self._present_tags.add(shown.tag)
        return not self._tags or shown.tag in self._tags

    def nothing(self) -> str:
        """Return the error for the case that no message matched."""
        tables = [printable(table) for table in sorted(self._present_tables)]
        more = f" and {len(tables) - _NAMED} more" if len(tables) > _NAMED else ""
        where = f"of the tables {', '.join(tables[:_NAMED])}{more}" if tables else "of no table"
        tags = ""
        if self._tags and self._present_tags - {""}:
            others = " of the tables and transactions" if self._tables or self._xids else ""
            tags = f"; the tags{others} are {' '.join(sorted(self._present_tags - {''}))}"
        return f"no message matches; there are messages {where}{tags}"


def _widened(span: tuple[int, int] | None, value: int) -> tuple[int, int]:
    return (value, value) if span is None else (min(span[0], value), max(span[1], value))


class _Stats:
    """Counts the chosen messages."""

    def __init__(self) -> None:
        self.tags: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.tables: dict[str, collections.Counter[str]] = {}
        self.files = self.transactions = self.errors = 0
        self.lsns: tuple[int, int] | None = None
        self.times: tuple[int, int] | None = None

    def add(self, shown: Shown) -> None:
        message = shown.message
        name = "undecodable" if message is None else shown.name
        self.tags[name] += 1
        self.bytes[name] += len(shown.frame)
        self.errors += message is None
        if shown.lsn:
            self.lsns = _widened(self.lsns, shown.lsn)
        if isinstance(message, (Commit, CommitPrepared, StreamCommit)):
            self.transactions += 1
            self.times = _widened(self.times, message.commit_time)
        if isinstance(message, (Insert, Update, Delete, Truncate)):
            for table in shown.tables:
                self.tables.setdefault(table, collections.Counter())[name.lower()] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "frames": self.tags.total(),
            "bytes": self.bytes.total(),
            "transactions": self.transactions,
            "errors": self.errors,
            "lsns": [format_lsn(lsn) for lsn in self.lsns or ()],
            "commit_times": [timestamp_form(time, "+00") for time in self.times or ()],
            "messages": {
                name: {"frames": count, "bytes": self.bytes[name]}
                for name, count in self.tags.most_common()
            },
            "tables": {name: dict(self.tables[name]) for name in sorted(self.tables)},
        }

    def lines(self, paint: Paint = plain) -> Iterator[str]:
        stats = self.as_dict()
        for name in ("files", "frames", "bytes", "transactions", "errors"):
            yield f"{name:<14}{stats[name]:>14,}"
        for name in ("lsns", "commit_times"):
            if stats[name]:
                yield f"{name.replace('_', ' '):<16}{stats[name][0]} to {stats[name][1]}"
        yield ""
        yield paint(f"{'message':<18}{'frames':>12}{'bytes':>16}", "heading")
        for name, counts in stats["messages"].items():
            yield f"{name:<18}{counts['frames']:>12,}{counts['bytes']:>16,}"
        if self.tables:
            width = max(len(printable(name)) for name in self.tables) + 2
            yield ""
            operations = list(OPERATIONS.values())
            if any(READ in counts for counts in self.tables.values()):
                operations.append(READ)
            names = "".join(f"{name:>12}" for name in operations)
            yield paint(f"{'table':<{width}}{names}", "heading")
            for table, counts in stats["tables"].items():
                yield f"{printable(table):<{width}}" + "".join(
                    f"{counts.get(name, 0):>12,}" for name in operations
                )


def _checked_tags(_: click.Context, __: click.Parameter, value: str | None) -> str:
    if value is None:
        return ""
    tags = value.replace(",", "").replace(" ", "")
    unknown = sorted(set(tags) - set(TAGS))
    if unknown or not tags:
        what = f"no message has tag {', '.join(map(repr, unknown))}" if unknown else "no tag given"
        raise click.BadParameter(f"{what}; the tags are {' '.join(TAGS)}")
    return tags


def _registry(_: click.Context, __: click.Parameter, path: Path | None) -> TypeRegistry | None:
    """Read a type registry from a file.

    Raises
    ------
    PgOutputError
        The file can't be read, or contains no catalogue of types.
    """
    if path is None:
        return None
    try:
        return TypeRegistry.from_json(read_json_file(path))
    except PgOutputError as error:
        raise PgOutputError(
            f"{path}: {error.message}", code=error.code, hint=error.hint, path=str(path)
        ) from error
    except OSError as error:
        raise PgOutputError(
            f"can't read {path}: {error.strerror or error}",
            code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
            path=str(path),
        ) from error


@click.command(
    cls=GroupedCommand,
    groups={
        "What to print": "tables xids tags stats",
        "How to print": "as_objects values full",
        "With --values typed": "policies types history",
    },
    examples=(
        "pgoutput-fast inspect captured --stats",
        "pgoutput-fast inspect captured --table public.orders --tag IUD",
        "pgoutput-fast inspect captured --json --values typed",
    ),
)
@click.argument(
    "paths", metavar="FILE|DIR…", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--json", "as_objects", is_flag=True, help="Print a JSON object per line.")
@values_option
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="PATTERN",
    help="Only these tables, such as public.order*; repeatable.",
)
@click.option("--xid", "xids", multiple=True, type=int, help="Only this transaction; repeatable.")
@click.option(
    "--tag",
    "tags",
    callback=_checked_tags,
    help="Only these tags, such as IUD; no rows of snapshots.",
)
@click.option("--full", is_flag=True, help="Print long values whole.")
@click.option(
    "--stats", is_flag=True, help="Print counts, tables and consumers instead of messages."
)
@policies_option("Handle values that are refused; repeatable.")
@click.option(
    "--types",
    metavar="FILE",
    type=click.Path(path_type=Path),
    callback=_registry,
    help="Users' types, from TypeRegistry.to_json().",
)
@click.option(
    "--history",
    type=click.Choice(POLICIES),
    help="Values near an ALTER TYPE. [default: error]",
)
def command(
    paths: tuple[Path, ...],
    as_objects: bool,
    values: Values | None,
    tables: tuple[str, ...],
    xids: tuple[int, ...],
    tags: str,
    full: bool,
    stats: bool,
    policies: Policies | None,
    types: TypeRegistry | None,
    history: HistoryPolicy | None,
) -> int:
    """Print the messages of a change log, of its files, or of recorded streams.

    The rows of a snapshot are printed as READ. A frame that cannot be decoded is printed with its
    error, and the exit code is 1. The exit code is also 1 if no message matches the options.
    """
    if values != "typed":
        of_types = {"--policy": policies, "--types": types, "--history": history}
        _refuse(of_types, "is for --json --values typed")
    if not as_objects:
        _refuse({"--values": values}, "is for --json")
    wanted, counts = _Filter(tables, xids, tags), _Stats()
    paint = plain if as_objects else paint_for(sys.stdout)
    lines = Lines(full=full, paint=paint)
    errors = 0
    files = _files(paths)
    schema_history = history_of(paths) if values == "typed" and types is None else None
    follower = (
        None if schema_history is None else HistoryFollower(schema_history, history or "error")
    )
    for path in files:
        counts.files += 1
        for shown in _messages(path, policies, types, follower):
            if isinstance(shown, Keepalive):
                if wanted.is_empty and not stats:
                    _print_keepalive(shown, as_objects=as_objects)
                continue
            errors += shown.message is None
            if not wanted(shown):
                continue
            if follower is not None:
                _check_types(shown, follower, path)
            if stats:
                counts.add(shown)
            else:
                print(as_json(shown, typed=values == "typed") if as_objects else lines(shown))
    if counts.files == 0:
        text = f"there is no segment in {', '.join(repr(str(path)) for path in paths)}"
        raise PgOutputError(text, code="missing_path")
    if stats:
        directories = [described(path) for path in paths if path.is_dir()]
        if as_objects:
            print(json.dumps({**counts.as_dict(), "directories": directories}))
        else:
            below = (line for directory in directories for line in lines_of(directory, paint))
            print("\n".join([*counts.lines(paint), *below]))
    if errors:
        text = f"{counted(errors, 'frame')} could not be decoded"
        raise PgOutputError(text, code="frames_refused")
    if not wanted.is_empty and not wanted.matches:
        raise PgOutputError(wanted.nothing(), code="no_table")
    return 0


def _check_types(shown: Shown, follower: HistoryFollower, path: Path) -> None:
    """Refuse a row if the schema history does not say which types decode its values."""
    if shown.frame[:1] not in (b"I", b"U", b"D"):
        return
    relation_id = relation_id_of(shown.frame, in_stream=False)
    tuples = [getattr(shown.message, name, None) for name in ("old", "new")]
    columns = None
    if shown.message is not None:
        rows = [row for row in tuples if row is not None]
        columns = {i for row in rows for i in range(len(row)) if row.kind(i) not in "nu"}
    if relation_id is not None:
        follower.check(relation_id, path, columns)


def _refuse(options: Mapping[str, object], way: str) -> None:
    """Refuse a given option that has no effect with the other options."""
    for name, value in options.items():
        if value:
            raise click.UsageError(f"{name} {way}")


def _print_keepalive(keepalive: Keepalive, *, as_objects: bool) -> None:
    lsn, sent = format_lsn(keepalive.lsn), timestamp_form(keepalive.time, "+00")
    if as_objects:
        fields = {"lsn": lsn, "xid": None, "tag": "k", "sent": sent, "message": "Keepalive"}
        print(json.dumps({**fields, "reply_requested": keepalive.reply_requested}))
    else:
        asks = ", reply requested" if keepalive.reply_requested else ""
        print(f"{lsn} - Keepalive({sent}{asks})")
