"""The options of a sync, and of the target that it keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..changelog.consumers import CONSUMER_NAME
from ..changelog.history import POLICIES, POLICY_HELP, HistoryPolicy
from ..columnar.selection import Selection
from ..errors import PgOutputError
from ..options import OptionKind, Options, byte_count, choice, count, flag, option, seconds, text
from ..policies import Policies, policies_of
from .duckdb_file import LEAST_MEMORY
from .targets import Keep

OnError = Literal["pause", "stop"]
Uncopied = Literal["error", "empty", "changes"]

WINDOW_BYTES = 64 << 20


def _words(value: str) -> list[str]:
    # Not at commas: numeric=20,4 has one.
    return [word for word in re.split(r"[;\s]+", value) if word]


def _is_text_mapping(mapping: Any) -> bool:
    return all(isinstance(value, str) for pair in mapping.items() for value in pair)


def _are_columns(mapping: Mapping[str, Any]) -> bool:
    return all(
        not isinstance(columns, str)
        and columns
        and all(isinstance(column, str) for column in columns)
        and len({*columns}) == len(columns)
        for columns in mapping.values()
    )


def _no_text(value: str) -> Any:
    raise ValueError(value)


_POLICIES = OptionKind(
    (Policies,), "policies, such as infinity=null numeric=20,4",
    lambda value: policies_of(_words(value)), metavar="NAME=VALUE",
)  # fmt: skip
_TABLES = OptionKind(
    (str, Sequence), "names of tables",
    str, lambda names: bool(names) and all(isinstance(name, str) for name in names), "PATTERN",
    normal=lambda names: Selection(names).tables,
)  # fmt: skip
_STORAGE = OptionKind(
    (Mapping,), "a mapping of str to str", _no_text, _is_text_mapping, "{NAME=VALUE}",
    is_secret=True,
)  # fmt: skip
_ICEBERG = OptionKind(
    (str, Mapping), "the name of a catalogue, or a mapping of str to str", str,
    lambda catalog: bool(catalog) and (isinstance(catalog, str) or _is_text_mapping(catalog)),
    "CATALOG",
    is_secret=True,
)  # fmt: skip
_PARTITIONS = OptionKind(
    (Mapping,), "a mapping of tables to one or several different columns",
    _no_text, _are_columns, "TABLE=COLUMN",
)  # fmt: skip


@dataclass(frozen=True)
class TargetOptions(Options):
    """How the tables of a sync are kept: options of a target."""

    policies: Policies | None = option(
        _POLICIES, None,
        "Handle values that are refused; repeatable. The target refuses values that it cannot "
        "store. infinity=null stores NULL for an infinite value. numeric=20,4 stores numerics "
        "without precision as decimals. A target remembers its policies.",
        flag=True,
    )  # fmt: skip
    change_policies: bool = option(
        flag(), False,
        "Replace the policies of the target. Affected tables get a new snapshot.",
        flag=True,
    )  # fmt: skip
    keep: Keep | None = option(
        choice(*get_args(Keep)), None,
        "Rows (state), changes or both. parquet:DIR has only changes. A target remembers this.",
        flag=True,
        shown_default="both",
    )  # fmt: skip
    soft_deletes: str | None = option(
        text("COLUMN"), None,
        "Keep deleted rows; this column gets the time. The time is that of the commit that deleted "
        "the row, and NULL for other rows. A new row with the same key, or a new snapshot, removes "
        "the deleted row.",
        flag=True,
    )  # fmt: skip
    duckdb_memory: int | None = option(
        byte_count(LEAST_MEMORY), None,
        "Memory of DuckDB. The default is 1/4 of RAM, from 384MB to 4GB. The largest transaction "
        "has to fit.",
        flag=True,
        shown_default="1/4 of RAM",
    )  # fmt: skip
    lock_timeout: float | None = option(
        seconds(zero=True), None,
        "End if the DuckDB file is locked for this time. By default, windows wait, and the "
        "capture continues.",
    )  # fmt: skip
    partition_by: Mapping[str, Sequence[str]] | None = option(
        _PARTITIONS, None,
        "Partition a new Delta state table. TABLE is schema.name. Separate several columns by "
        "commas.",
        flag=True,
    )  # fmt: skip
    storage_options: Mapping[str, str] | None = option(
        _STORAGE, None,
        "Settings of delta-rs for the object storage of Delta tables, such as AWS_ENDPOINT_URL. "
        "Other settings come from where the AWS SDK looks.",
    )  # fmt: skip
    retention_hours: int | None = option(
        count(), None,
        "Hours after which files that Delta tables no longer need are deleted.",
        shown_default="6",
    )  # fmt: skip
    maintenance: bool | None = option(
        flag(), None,
        "Join the small files of Delta tables, and delete old files.",
        shown_default="true",
    )  # fmt: skip
    iceberg: str | Mapping[str, str] | None = option(
        _ICEBERG, None,
        "A catalogue of pyiceberg, by its name in pyiceberg's configuration or by its properties. "
        "Change tables are Iceberg tables in its namespace changes.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.soft_deletes is not None and not self.soft_deletes.isprintable():
            raise PgOutputError(
                f"{self.soft_deletes!r} is not the name of a column",
                code="bad_option",
                parameter="soft_deletes",
            )


@dataclass(frozen=True)
class SyncOptions(Options):
    """How a sync keeps tables up to date."""

    interval: float = option(
        seconds(zero=True), 1.0,
        "Time between the starts of windows.",
        flag=True,
        shown_default="1s",
    )  # fmt: skip
    tables: str | Sequence[str] | None = option(
        _TABLES, None,
        "Sync only these tables; repeatable. A pattern is schema.name, with *, ? and [...]. The "
        "flag also takes a name without the schema. A target remembers its selection.",
        flag=True,
    )  # fmt: skip
    on_error: OnError = option(
        choice("pause", "stop"), "pause",
        "Pause a table that fails, or stop. A table fails if a value or a commit is refused, or if "
        "changes are missing.",
        flag=True,
    )  # fmt: skip
    pause_bytes: int = option(
        byte_count(), 10 << 30,
        "Bytes of segments to keep for a paused table. Beyond this, its changes are skipped, and "
        "it gets a new snapshot.",
        shown_default="10GB",
    )  # fmt: skip
    pause_time: float = option(
        seconds(zero=True), 3 * 86400.0,
        "How long to keep segments for a paused table.",
        shown_default="3d",
    )  # fmt: skip
    schema_changes: Literal["evolve", "fail"] = option(
        choice("evolve", "fail"), "evolve",
        "Whether state tables follow added, dropped, renamed and retyped columns.",
    )  # fmt: skip
    uncopied: Uncopied = option(
        choice("error", "empty", "changes"), "error",
        "For a table without a snapshot: end with an error, assume that it was empty, or keep only "
        "its changes.",
    )  # fmt: skip
    history: HistoryPolicy = option(choice(*POLICIES), "newer", POLICY_HELP)
    window_bytes: int | None = option(
        byte_count(1), None,
        "Approximate limit for the changes of a window. A transaction is not cut.",
        shown_default="64MB, or 256MB where Spark has more than two cores",
    )  # fmt: skip
    consumer: str | None = option(
        CONSUMER_NAME, None,
        "Name of the consumer in the change log. The default is made from the target's name.",
    )  # fmt: skip
