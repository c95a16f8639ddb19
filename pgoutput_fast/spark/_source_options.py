"""The options of the source `pgoutput`, which come from Spark as strings."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pgoutput_fast._disk import read_json_file
from pgoutput_fast.apply.embedded_capture import DEFAULT_CAPTURE
from pgoutput_fast.capture_options import CaptureOptions
from pgoutput_fast.changelog.consumers import check_consumer_name
from pgoutput_fast.changelog.history import HistoryPolicy, check_policy
from pgoutput_fast.changelog.remote import refuse_secrets, without_secrets
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.lsn import parse_lsn
from pgoutput_fast.options import OptionKind, byte_count, choice, count
from pgoutput_fast.policies import Policies, policies_of, policy_texts
from pgoutput_fast.types import TypeRegistry

from ._envelopes import PLACEHOLDER, Style

Mode = Literal["table", "manifest", "envelope"]

_MODES = ("table", "manifest", "envelope")
_CAPTURES = ("embedded", "external")
_SEGMENTS = "segments"
"""The end of a directory's name beside a checkpoint."""


@dataclass(frozen=True)
class SourceOptions:
    """What a query asks of the source.

    Attributes
    ----------
    segments : pathlib.Path
        The directory of the capture.
    mode : {"table", "manifest", "envelope"}
    table : str or None
        ``namespace.name``, of mode "table".
    tables : tuple of str or None
        Patterns of the tables, of modes "manifest" and "envelope"; None: all.
    output : str or None
        Where mode "manifest" writes files of changes.
    consumer : str or None
        The name under which a stream reads the directory.
    capture : {"embedded", "external"}
    dsn : str or None
    slot : str or None
    publications : tuple of str
    capture_options : CaptureOptions or None
        None: another process captures.
    policies : Policies
    registry : TypeRegistry or None
        The users' types, in place of those that the directory or the server tells.
    history : {"error", "older", "newer"}
    max_bytes : int or None
        Bytes of a micro-batch.
    starting_lsn, ending_lsn : int or None
    partitions : int
        The most tasks of a batch.
    new_columns : {"error", "ignore"}
        What to do when the table gets a column while a stream runs.
    style : Style
        Of the records of mode "envelope".
    """

    segments: Path
    mode: Mode
    table: str | None = None
    tables: tuple[str, ...] | None = None
    output: str | None = None
    consumer: str | None = None
    capture: Literal["embedded", "external"] = "external"
    dsn: str | None = None
    slot: str | None = None
    publications: tuple[str, ...] = ()
    capture_options: CaptureOptions | None = None
    policies: Policies = field(default_factory=Policies)
    registry: TypeRegistry | None = None
    history: HistoryPolicy = "newer"
    max_bytes: int | None = None
    starting_lsn: int | None = None
    ending_lsn: int | None = None
    partitions: int = 1
    new_columns: Literal["error", "ignore"] = "error"
    style: Style = field(default_factory=Style)


def source_options(given: Mapping[str, str]) -> SourceOptions:
    """Read the options of a query.

    Raises
    ------
    PgOutputError
        One is unknown, has no such value, lacks another one, or has a secret.
    """
    found = _Options(given)
    mode = found.choice("mode", _MODES, "table")
    table, tables = found.text("table"), found.names("tables")
    if mode == "table" and (table is None or tables is not None):
        raise PgOutputError(
            "one table is read", code="bad_option",
            parameter="mode",
            hint=(
                "Give a schema.name as ", Argument("table"), ", or ", Argument("mode", "manifest"),
                " or ", Argument("mode", "envelope"),
            ),
        )  # fmt: skip
    if mode != "table" and table is not None:
        raise PgOutputError(
            f"{mode!r} reads all tables, or some",
            code="bad_option",
            parameter="mode",
            hint=("Give ", Argument("tables"), " in place of ", Argument("table")),
        )
    output = found.value("output", _output)
    if output is None and mode == "manifest":
        raise PgOutputError(
            "'manifest' writes files",
            code="bad_option",
            parameter="mode",
            hint=("Give the directory of the files as ", Argument("output")),
        )
    if output is not None and mode != "manifest":
        raise _goes_with("output", "manifest")
    registry = found.value("registry", _registry)
    if registry is not None and mode != "table":
        raise PgOutputError(
            f"{mode!r} has the types of the directory",
            code="bad_option",
            parameter="mode",
            hint=("Leave out ", Argument("registry")),
        )
    slot, publications = found.text("slot"), found.names("publications") or ()
    capture = found.choice("capture", _CAPTURES, "embedded" if slot else "external")
    if capture == "embedded" and not (slot and publications):
        raise PgOutputError(
            "'embedded' reads a slot",
            code="bad_option",
            parameter="capture",
            hint=("Give ", Argument("slot"), " and ", Argument("publications")),
        )
    if capture == "external" and (slot or publications):
        raise _is_of_capture("slot" if slot else "publications")
    return SourceOptions(
        segments=_directory(found),
        mode=mode,
        table=table,
        tables=tables,
        output=output,
        consumer=found.value("consumer", check_consumer_name),
        capture=capture,
        dsn=_dsn(found.text("dsn")),
        slot=slot,
        publications=publications,
        capture_options=_capture_options(found, capture),
        policies=found.value("policies", _policies) or Policies(),
        registry=registry,
        history=found.value("history", _history) or "newer",
        max_bytes=found.of_kind("maxBytesPerTrigger", byte_count(1)),
        starting_lsn=found.value("startingLsn", parse_lsn),
        ending_lsn=found.value("endingLsn", parse_lsn),
        partitions=found.of_kind("partitions", count(1)) or _tasks(mode),
        new_columns=found.choice("newColumns", ("error", "ignore"), "error"),
        style=_style(found, mode),
    )


def _tasks(mode: str) -> int:
    """The most tasks by default: one, where the records of a topic must not overtake each other."""
    return 1 if mode == "envelope" else os.cpu_count() or 1


def _style(found: _Options, mode: str) -> Style:
    """What is chosen of the records of mode "envelope"."""
    prefix, placeholder = found.text("topicPrefix"), found.text("placeholder")
    tombstones, omitted = found.value("tombstones", _flag), found.value("omitUnchanged", _flag)
    given = {
        "topicPrefix": prefix, "placeholder": placeholder, "tombstones": tombstones,
        "omitUnchanged": omitted,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None and mode != "envelope":
            raise _goes_with(name, "envelope")
    if omitted and placeholder is not None:
        raise PgOutputError(
            "there is none if unchanged values are omitted",
            code="bad_option",
            parameter="placeholder",
            hint=("Leave out it or ", Argument("omitUnchanged")),
        )
    return Style(prefix, bool(tombstones), None if omitted else placeholder or PLACEHOLDER)


def _camel(name: str) -> str:
    """The name of an option as Spark writes names."""
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))


_CAPTURE = {_camel(one.name): one for one in CaptureOptions.options()}
"""The options of an embedded capture."""


def shown(argument: Argument) -> str:
    """Return how a query gives an option: ``maxDelay=0.5``."""
    name, value = _camel(argument.name), argument.value
    if isinstance(value, Policies):
        value = " ".join(policy_texts(value))
    if isinstance(value, bool):
        value = str(value).lower()
    return f"{name}={value}" if argument.has_value else name


_NAMES = frozenset(
    {
        "mode", "table", "tables", "output", "topicPrefix", "tombstones", "placeholder",
        "omitUnchanged", "segments", "path", "checkpointLocation", "slot", "publications", "dsn",
        "capture", "maxBytesPerTrigger", "startingLsn",
        "endingLsn", "policies", "registry", "history", "newColumns", "consumer", "partitions",
        *_CAPTURE,
    }
)  # fmt: skip


class _Options:
    """Options by their names, whose case does not count."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        # Before one that is misspelled is missed.
        known = {name.lower(): name for name in _NAMES}
        for name in given:
            if name.lower() not in known:
                close = difflib.get_close_matches(name.lower(), known, 1)
                raise PgOutputError(
                    f"the source pgoutput has no option {name!r}",
                    code="bad_option",
                    hint=("Did you mean ", Argument(known[close[0]]), "?") if close else (),
                )

    def text(self, name: str) -> str | None:
        assert name in _NAMES, name  # noqa: S101
        value = self._given.get(name.lower())
        if value is not None and not value.strip():
            raise PgOutputError("it is empty", code="bad_option", parameter=name)
        return value

    def names(self, name: str) -> tuple[str, ...] | None:
        """Those that a text lists, with commas between them."""
        text = self.text(name)
        found = None if text is None else tuple(one.strip() for one in text.split(","))
        if found is not None and not all(found):
            raise PgOutputError(f"{text!r} has an empty name", code="bad_option", parameter=name)
        return found

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> Any:
        value = self.text(name)
        if value is not None and value not in allowed:
            choice(*allowed).check(name, value)
        return value or default

    def of_kind(self, name: str, kind: OptionKind) -> Any:
        """The value of an option of a kind; None if it is not given."""
        text = self.text(name)
        return None if text is None else kind.from_text(name, text)

    def value(self, name: str, read: Callable[[str], Any]) -> Any:
        """What a function makes of a text; None if there is none."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return read(text)
        except (OSError, ValueError, PgOutputError) as error:
            # Spark shows errors in plans and logs, and a URL or a list may have a secret in it.
            why = error.message if isinstance(error, PgOutputError) else str(error)
            hint = error.hint if isinstance(error, PgOutputError) else ()
            raise PgOutputError(
                _EXPECTED.get(name, why), code="bad_option", parameter=name, hint=hint
            ) from None


_EXPECTED = {
    "registry": "expected the path of a file that the driver can read, with a catalogue of types",
    "policies": "expected names with values, such as infinity=null, with spaces between them",
}
"""What is wrong with options whose values no error shows."""


def _directory(found: _Options) -> Path:
    given, path = found.text("segments"), found.text("path")
    checkpoint = found.text("checkpointLocation")
    if given and path:
        raise PgOutputError(
            "the directory is given as the path too",
            code="bad_option",
            parameter="segments",
            hint="Give one of them",
        )
    where = given or path
    if where is None and checkpoint is not None:
        where = f"{checkpoint.rstrip('/')}.{_SEGMENTS}"
    if where is None:
        raise PgOutputError(
            "nothing says where the directory of the capture is", code="bad_option",
            hint=(
                "Give ", Argument("segments"), "; or ", Argument("checkpointLocation"), (" here as "
                "for the query, so that the directory lies beside the checkpoint"),
            ),
        )  # fmt: skip
    local = re.sub("^file:(//)?(?=/)", "", where)
    if re.match("[A-Za-z][A-Za-z0-9+.-]*:", local):
        shown = without_secrets(local)
        raise PgOutputError(
            f"{shown} is not a local directory",
            code="bad_option",
            parameter="segments" if given else "path",
        )
    return Path(local).absolute()


def _output(text: str) -> str:
    refuse_secrets(text)
    return text


def _dsn(text: str | None) -> str | None:
    if text is None:
        return None
    from pgoutput_fast.connections import ConnectionParameters

    if ConnectionParameters(text).has_secret:
        raise PgOutputError(
            "it has a password, which Spark would show in plans and logs",
            code="bad_option",
            parameter="dsn",
            hint="Have libpq take the password from ~/.pgpass, a service file or PGPASSWORD, where "
            "the driver runs",
        )
    return text


def _policies(text: str) -> Policies:
    # Not commas, as numeric=10,2 has one.
    return policies_of(one for one in re.split(r"[;\s]+", text) if one)


def _registry(path: str) -> TypeRegistry:
    return TypeRegistry.from_json(read_json_file(Path(path.removeprefix("file://"))))


def _capture_options(found: _Options, capture: str) -> CaptureOptions | None:
    """The options of an embedded capture; None if another process captures."""
    given = {one.name: found.text(name) for name, one in _CAPTURE.items()}
    made = {
        one.name: one.kind.from_text(one.name, text)
        for one in CaptureOptions.options()
        if (text := given[one.name]) is not None
    }
    if capture == "embedded":
        return dataclasses.replace(DEFAULT_CAPTURE, **made)
    for name in made:
        raise _is_of_capture(name)
    return None


def _is_of_capture(name: str) -> PgOutputError:
    return PgOutputError(
        "another process captures", code="bad_option", parameter=name,
        hint=("Give it there, or ", Argument("capture", "embedded"), " here"),
    )  # fmt: skip


def _goes_with(name: str, mode: str) -> PgOutputError:
    return PgOutputError(
        "another mode is chosen",
        code="bad_option",
        parameter=name,
        hint=("It goes with ", Argument("mode", mode)),
    )


def _one_of(text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise ValueError(f"{text!r} is none of {', '.join(map(repr, allowed))}")
    return text


def _flag(text: str) -> bool:
    return _one_of(text.lower(), ("true", "false")) == "true"


def _history(text: str) -> str:
    check_policy(text)
    return text
