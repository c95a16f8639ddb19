"""Read the options of the source `pgoutput`, which Spark passes as strings."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pgoutput_fast._disk import read_json_file
from pgoutput_fast.apply.embedded_capture import DEFAULT_CAPTURE
from pgoutput_fast.capture_options import CaptureOptions
from pgoutput_fast.changelog.consumers import CONSUMER_NAME
from pgoutput_fast.changelog.history import POLICIES, POLICY_HELP, HistoryPolicy
from pgoutput_fast.changelog.remote import refuse_secrets, without_secrets
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.lsn import parse_lsn
from pgoutput_fast.options import (
    OptionKind,
    Options,
    byte_count,
    choice,
    count,
    flag,
    near,
    option,
    text,
)
from pgoutput_fast.policies import Policies, policies_of, policy_texts
from pgoutput_fast.types import TypeRegistry

from ._envelopes import PLACEHOLDER, Style

Mode = Literal["table", "manifest", "envelope"]

_SEGMENTS = "segments"
"""The last part of the default directory's name, beside a checkpoint."""


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


def _policies(value: str) -> Policies:
    try:
        # Do not split at commas: numeric=10,2 contains one.
        return policies_of(word for word in re.split(r"[;\s]+", value) if word)
    except PgOutputError as error:  # its text may show the option's value
        raise ValueError from error


def _registry(path: str) -> TypeRegistry:
    try:
        return TypeRegistry.from_json(read_json_file(Path(path.removeprefix("file://"))))
    except (OSError, PgOutputError) as error:
        raise ValueError from error


def _lsn(value: str) -> int:
    try:
        return parse_lsn(value)
    except PgOutputError as error:
        raise ValueError from error


# Spark shows errors in plans and logs. The value of one of these options may contain a secret.
_NAMES = OptionKind((tuple,), "names with commas between them", _names, all, "NAME,…")
_POLICIES = OptionKind(
    (Policies,), "names with values, such as infinity=null, with spaces between them", _policies,
    metavar="NAME=VALUE …", is_secret=True,
)  # fmt: skip
_REGISTRY = OptionKind(
    (TypeRegistry,), "the path of a file that the driver can read, with a catalogue of types",
    _registry, metavar="PATH", is_secret=True,
)  # fmt: skip
_LSN = OptionKind((int,), "an LSN, such as 16/B374D848", _lsn, metavar="LSN")
_PATH = text()._replace(metavar="PATH")


@dataclass(frozen=True)
class SourceOptions(Options):
    """The options of a query over the source.

    Attributes
    ----------
    capture_options : CaptureOptions or None
        Options of the embedded capture. None: another process captures.
    directory : pathlib.Path
        The absolute path of the change log.
    """

    mode: Mode = option(
        choice("table", "manifest", "envelope"), "table",
        "Read the changes of one table, write files of all tables, or make a record for each "
        "change as Debezium does.",
    )  # fmt: skip
    table: str | None = option(text(), None, "The table of mode table, as schema.name.")
    tables: tuple[str, ...] | None = option(
        _NAMES, None,
        "Read only these tables, in modes manifest and envelope. A pattern is schema.name.",
        shown_default="all",
    )  # fmt: skip
    segments: str | None = option(
        _PATH, None,
        "The directory of the change log. The default is the checkpoint's path with .segments at "
        "its end.",
    )  # fmt: skip
    path: str | None = option(_PATH, None, "The same as segments, given as load(PATH).")
    checkpoint_location: str | None = option(
        _PATH, None, "The query's checkpoint, beside which the change log is kept."
    )
    output: str | None = option(_PATH, None, "Where mode manifest writes files.")
    dsn: str | None = option(
        text()._replace(metavar="DSN", is_secret=True), None,
        "The server, without a password. Give the driver ~/.pgpass or PGPASSWORD.",
    )  # fmt: skip
    slot: str | None = option(text(), None, "The slot to capture.")
    publications: tuple[str, ...] | None = option(_NAMES, None, "The publications to capture.")
    capture: Literal["embedded", "external"] | None = option(
        choice("embedded", "external"), None,
        "Whether the query captures the slot, or another process does. The default is embedded if "
        "slot is given, else external.",
    )  # fmt: skip
    consumer: str | None = option(
        CONSUMER_NAME, None,
        "Name of the consumer in the change log. Each query needs its own. The default is made "
        "from the table's name.",
    )  # fmt: skip
    max_bytes_per_trigger: int | None = option(
        byte_count(1), None, "Approximate number of bytes of a micro-batch."
    )
    partitions: int | None = option(
        count(1), None,
        "The most tasks of a micro-batch. The default is the number of cores, and 1 with mode "
        "envelope.",
    )  # fmt: skip
    starting_lsn: int | None = option(_LSN, None, "Where a new query begins.")
    ending_lsn: int | None = option(_LSN, None, "Where a batch query ends.")
    policies: Policies = option(
        _POLICIES, Policies(), "Handle values that Spark's types cannot store.",
        shown_default="none",
    )  # fmt: skip
    registry: TypeRegistry | None = option(
        _REGISTRY, None,
        "Users' types, in place of those of the change log or the server. Only for mode table.",
    )  # fmt: skip
    history: HistoryPolicy = option(choice(*POLICIES), "newer", POLICY_HELP)
    new_columns: Literal["error", "ignore"] = option(
        choice("error", "ignore"), "error",
        "What to do when the table gets a column while a stream runs.",
    )  # fmt: skip
    topic_prefix: str | None = option(
        text(), None, "What topics begin with. Only for mode envelope.",
        shown_default="the database's name",
    )  # fmt: skip
    tombstones: bool | None = option(
        flag(), None, "Add a record without a value after each deletion. Only for mode envelope.",
        shown_default="false",
    )  # fmt: skip
    placeholder: str | None = option(
        text(), None,
        "What stands for a value that the server did not send. Only for mode envelope.",
        shown_default=PLACEHOLDER,
    )  # fmt: skip
    omit_unchanged: bool | None = option(
        flag(), None,
        "Leave out values that the server did not send, instead of a placeholder. Only for mode "
        "envelope.",
        shown_default="false",
    )  # fmt: skip
    capture_options: CaptureOptions | None = None
    directory: Path = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_the_mode()
        if self.omit_unchanged and self.placeholder is not None:
            raise _refused(
                "placeholder", "unchanged values are omitted, so there is no placeholder",
                "Leave out this option or ", Argument("omit_unchanged"),
            )  # fmt: skip
        if self.is_embedded and not (self.slot and self.publications):
            raise _refused(
                "capture", "'embedded' needs a slot and its publications",
                "Give ", Argument("slot"), " and ", Argument("publications"),
            )  # fmt: skip
        if self.dsn is not None:
            _refuse_password(self.dsn)
        if self.output is not None:
            refuse_secrets(self.output, parameter="output")
        object.__setattr__(self, "directory", self._directory())

    def _check_the_mode(self) -> None:
        mode = self.mode
        if mode == "table" and (self.table is None or self.tables is not None):
            raise _refused(
                "mode", "'table' reads one table", "Give its schema.name as ", Argument("table"),
                ". To read several tables, give ",
                Argument("mode", "manifest"), " or ", Argument("mode", "envelope"),
            )  # fmt: skip
        if mode != "table" and self.table is not None:
            raise _refused(
                "mode", f"{mode!r} can read several tables",
                "Give ", Argument("tables"), " in place of ", Argument("table"),
            )  # fmt: skip
        if mode == "manifest" and self.output is None:
            raise _refused(
                "mode", "'manifest' writes files",
                "Give the directory of the files as ", Argument("output"),
            )  # fmt: skip
        if mode != "table" and self.registry is not None:
            raise _refused(
                "mode", f"{mode!r} takes types only from the change log",
                "Leave out ", Argument("registry"),
            )  # fmt: skip
        for name, its in _MODE_OF.items():
            if mode != its and getattr(self, name) is not None:
                raise _refused(
                    name,
                    f"it is not for the mode {mode!r}",
                    "Leave it out, or give ",
                    Argument("mode", its),
                )

    @property
    def is_embedded(self) -> bool:
        """Whether the query itself captures the slot."""
        return self.capture == "embedded" or (self.capture is None and self.slot is not None)

    @property
    def tasks(self) -> int:
        """The largest number of tasks of a batch.

        The default is 1 for records, because records of a topic must not overtake each other.
        """
        return self.partitions or (1 if self.mode == "envelope" else os.cpu_count() or 1)

    @property
    def style(self) -> Style:
        """The user's choices about the records of mode "envelope"."""
        placeholder = None if self.omit_unchanged else self.placeholder or PLACEHOLDER
        return Style(self.topic_prefix, bool(self.tombstones), placeholder)

    def _directory(self) -> Path:
        if self.segments and self.path:
            raise _refused("segments", "the path names a change log, too", "Give only one of them")
        where = self.segments or self.path
        if where is None and self.checkpoint_location is not None:
            where = f"{self.checkpoint_location.rstrip('/')}.{_SEGMENTS}"
        if where is None:
            raise _refused(
                "segments", "no change log is given",
                "Give its directory. For a change log beside the checkpoint, give the source the "
                "same ", Argument("checkpoint_location"), " as the query",
            )  # fmt: skip
        local = re.sub("^file:(//)?(?=/)", "", where)
        if re.match("[A-Za-z][A-Za-z0-9+.-]*:", local):
            name = "segments" if self.segments else "path" if self.path else "checkpoint_location"
            raise _refused(name, f"{without_secrets(local)} is not a local directory")
        return Path(local).absolute()


_MODE_OF = {
    "output": "manifest", "topic_prefix": "envelope", "placeholder": "envelope",
    "tombstones": "envelope", "omit_unchanged": "envelope",
}  # fmt: skip
"""Options that belong to one mode only."""


def _refused(name: str, why: str, *hint: str | Argument) -> PgOutputError:
    return PgOutputError(why, code="bad_option", parameter=name, hint=hint)


def _refuse_password(dsn: str) -> None:
    from pgoutput_fast.connections import ConnectionParameters

    if ConnectionParameters(dsn).has_secret:
        raise _refused(
            "dsn", "it has a password, which Spark would show in plans and logs",
            "Have libpq take the password from ~/.pgpass, a service file or PGPASSWORD, where the "
            "driver runs",
        )  # fmt: skip


def in_spark(name: str) -> str:
    """Return the name of an option as Spark spells it."""
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))


def shown(argument: Argument) -> str:
    """Return an option as a query sets it: ``maxDelay=0.5``."""
    name, value = in_spark(argument.name), argument.value
    if isinstance(value, Policies):
        value = " ".join(policy_texts(value))
    if isinstance(value, bool):
        value = str(value).lower()
    return f"{name}={value}" if argument.has_value else name


_DEFINITIONS = {
    in_spark(definition.name).lower(): definition
    for definition in (*CaptureOptions.options(), *SourceOptions.options())
}
"""The options by their names in lower case: Spark ignores the case of option names."""
_OWN = frozenset(definition.name for definition in SourceOptions.options())


def source_options(query_options: Mapping[str, str]) -> SourceOptions:
    """Read the options of a query.

    Raises
    ------
    PgOutputError
        An option is unknown, has an invalid value, lacks another option, or contains a secret.
    """
    own: dict[str, Any] = {}
    of_capture: dict[str, Any] = {}
    for name, value in query_options.items():
        option = _DEFINITIONS.get(name.lower())
        if option is None:
            raise PgOutputError(
                f"the source pgoutput has no option {name!r}", code="bad_option",
                parameter=name,
                hint=near(name, [in_spark(entry.name) for entry in _DEFINITIONS.values()]),
            )  # fmt: skip
        if not value.strip():
            raise _refused(option.name, "it is empty")
        values = own if option.name in _OWN else of_capture
        values[option.name] = option.kind.from_text(option.name, value)
    options = SourceOptions(**own)
    if options.is_embedded:
        return dataclasses.replace(
            options, capture_options=dataclasses.replace(DEFAULT_CAPTURE, **of_capture)
        )
    for name in (*of_capture, *({"slot", "publications"} & own.keys())):
        raise _refused(
            name, "it is an option of the capture, which another process runs",
            "Give it to that process, or give the query ", Argument("capture", "embedded"),
        )  # fmt: skip
    return options
