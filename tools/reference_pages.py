"""Make the generated parts of the reference: Markdown from what the code says of itself.

python tools/reference_pages.py NAME     # prints one part

`docs/conf.py` puts each part where a page has the comment ``<!-- generated: NAME -->``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import click

from pgoutput_fast import errors
from pgoutput_fast.apply.embedded_capture import DEFAULT_CAPTURE
from pgoutput_fast.apply.options import SyncOptions, TargetOptions
from pgoutput_fast.capture_options import CaptureOptions, StreamOptions
from pgoutput_fast.cli import _group
from pgoutput_fast.cli._options import flag_of
from pgoutput_fast.cli._service import ServiceOptions
from pgoutput_fast.cli._spark_engine import SparkOptions
from pgoutput_fast.doctor import KINDS
from pgoutput_fast.options import OptionField, Options
from pgoutput_fast.watching.metrics import (
    METRICS,
    PREFIX,
    QUERY_METRICS,
    SYNC_METRICS,
    SYNC_PREFIX,
    MetricKind,
)

CLASSES: list[tuple[type[Options], str]] = [
    (StreamOptions, "For `connect`, `capture` and a `sync` of a slot: how to read the slot."),
    (
        CaptureOptions,
        "For `capture` and a `sync` of a slot, as `capture_options=`: the change log.",
    ),
    (SyncOptions, "For `sync(sync_options=)`: how to keep tables up to date."),
    (TargetOptions, "For `sync(target_options=)`: how the target stores tables."),
    (SparkOptions, "For `sync --engine spark`. In Python, these are arguments of `SparkEngine`."),
    (ServiceOptions, "For the commands `capture` and `sync`: what they report while they run."),
]

_ADVICE = {
    "empty_frame": "Check the program that delivers the frames: an empty frame is never sent.",
    "unknown_tag": "Pass the payload of XLogData alone. Strip the 25 bytes of its header first.",
    "truncated": "Compare the frame's length with what the server sent. For a frame from inside a "
    "stream chunk, use a `Decoder`, or `decode(frame, in_stream=True)`.",
    "trailing_bytes": "Pass one frame at a time. For a frame from inside a stream chunk, use "
    "a `Decoder`, or `decode(frame, in_stream=True)`.",
    "bad_marker": "The frame is damaged, or its bytes do not begin at a frame's start.",
    "bad_column_kind": "The frame is damaged, or its bytes do not begin at a frame's start.",
    "bad_length": "The frame is damaged or cut short.",
    "bad_count": "The frame is damaged or cut short.",
    "unterminated_string": "The frame is damaged or cut short.",
    "unknown_relation": "Decode the frames from the start of the connection, or decode the table's "
    "Relation first. A call of `decode` keeps no relations: use a `Decoder`.",
    "column_count": "The row belongs to another version of the table. Pass all frames, in order.",
    "stream_order": "Pass all frames of a connection, in order, to one decoder.",
    "bad_encoding": "Give the decoder the session's `client_encoding` as `encoding`. For a "
    "database of encoding SQL_ASCII, choose the policy `invalid_text`.",
    "bad_value": "Check the column's type in the server, and that the registry of types is the "
    "one that was in force. `raw()` returns the value's bytes.",
    "out_of_range": "Choose the policy that the error names: see [Policies](policies.md).",
    "no_text_form": "Choose another policy than `text` for this column: see "
    "[Policies](policies.md).",
}
"""Error code → what to do. A code without an entry fails the build."""


def commands() -> str:
    """Return the help of the command and of each subcommand."""
    group = _group()
    with click.Context(group, info_name=group.name, **group.context_settings) as context:
        return "\n".join(_helps(group, context, 2))


def _helps(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            with click.Context(child, info_name=name, parent=context, max_content_width=90) as own:
                yield from _helps(child, own, min(level + 1, 3))


def options() -> str:
    """Return each class of options, and the name, values, default and flag of each option."""
    parts = []
    shown: set[str] = set()
    for kind, text in CLASSES:
        fields = [field for field in kind.options() if field.name not in shown]
        shown |= {field.name for field in fields}
        listed = "\n".join(map(_option, fields))
        parts.append(f"## {kind.__name__}\n\n{text}\n\n{listed}")
    return "\n".join(parts)


def source_options() -> str:
    """Return each option of Spark's source that is none of a capture."""
    # The other parts need no PySpark.
    from pgoutput_fast.spark._source_options import SourceOptions, in_spark

    fields = SourceOptions.options()
    return "\n".join(
        _option(dataclasses.replace(field, name=in_spark(field.name))) for field in fields
    )


def _option(field: OptionField) -> str:
    said = [f"Values: `{field.kind.metavar}`"]
    if "default is" not in field.help:
        said.append(f"default: {_default(field)}")
    if field.has_flag:
        said.append(f"flag: `{flag_of(field)}`")
    return f"`{field.name}`\n: {field.help}\n\n  {'; '.join(said)}.\n"


def _default(field: OptionField) -> str:
    other = getattr(DEFAULT_CAPTURE, field.name, field.default)
    found = field.shown_default or _shown(field.default)
    return found if other == field.default else f"{found} (of a sync: {_shown(other)})"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def error_codes() -> str:
    """Return each code of a refused frame: its sentence, and what to do."""
    return "\n".join(
        f"## `{code}`\n\n```text\n{sentence}\n```\n\n{_ADVICE[code]}\n"
        for code, sentence in errors.SENTENCES.items()
    )


def package_codes() -> str:
    """Return each code of an error that is not about a frame, with its meaning."""
    return "| code | meaning |\n|---|---|\n" + "\n".join(
        f"| `{code}` | {meaning} |" for code, meaning in errors.CODES.items()
    )


def findings() -> str:
    """Return each finding of `doctor`."""
    return "| id | level | meaning |\n|---|---|---|\n" + "\n".join(
        f"| `{name}` | {kind.level} | {kind.meaning} |" for name, kind in KINDS.items()
    )


def capture_metrics() -> str:
    """Return the metrics of a capture."""
    return _metrics(PREFIX, METRICS)


def sync_metrics() -> str:
    """Return the metrics of a sync."""
    return _metrics(SYNC_PREFIX, SYNC_METRICS)


def query_metrics() -> str:
    """Return the metrics of queries of Spark."""
    return "\n".join(f"- `{SYNC_PREFIX}{kind.name}`" for kind in QUERY_METRICS)


def _metrics(prefix: str, kinds: tuple[MetricKind, ...]) -> str:
    return "| metric | type | meaning |\n|---|---|---|\n" + "\n".join(
        f"| `{prefix}{kind.name}` | {kind.type} | {kind.help} |" for kind in kinds
    )


PARTS: dict[str, Callable[[], str]] = {
    "capture_metrics": capture_metrics,
    "commands": commands,
    "error_codes": error_codes,
    "findings": findings,
    "options": options,
    "package_codes": package_codes,
    "query_metrics": query_metrics,
    "source_options": source_options,
    "sync_metrics": sync_metrics,
}


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PARTS:
        sys.exit(f"usage: reference_pages.py {'|'.join(PARTS)}")
    print(PARTS[sys.argv[1]]())
