"""The options of a capture that every command has that captures a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ._quantities import ByteCount, Seconds

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--create-slot/--no-create-slot",
        default=True,
        show_default=True,
        help="Whether to make the slot if it is not there and the directory is new.",
    ),
    click.option(
        "--adopt-slot",
        is_flag=True,
        help="Begin a new directory with a slot that is there already, or go on in a directory "
        "that was downloaded, as the original is lost.",
    ),
    click.option(
        "--connections",
        type=click.IntRange(1),
        default=2,
        show_default=True,
        help="So many read tables that are copied, beside the stream's.",
    ),
    click.option("--binary", is_flag=True, help="Ask for values in binary form."),
    click.option("--messages", is_flag=True, help="Logical messages too."),
    click.option(
        "--two-phase",
        is_flag=True,
        help="Take prepared transactions when they are prepared; a slot that is made is marked so. "
        "Without, as the slot is.",
    ),
    click.option(
        "--streaming/--no-streaming",
        default=True,
        show_default=True,
        help="Whether the server sends large transactions while they are in progress. Without, it "
        "decodes each transaction once it has ended.",
    ),
    click.option(
        "--max-delay",
        type=Seconds(min_open=False),
        default=1.0,
        show_default=True,
        metavar="SECONDS",
        help="After so long a commit is in a segment on disk.",
    ),
    click.option(
        "--segment-bytes",
        metavar="BYTES",
        type=ByteCount(1),
        default="16MB",
        show_default=True,
        help="A segment ends with the first commit after so much.",
    ),
    click.option(
        "--compression", type=click.Choice(["lz4", "zstd"]), help="Of segments; else none."
    ),
    click.option(
        "--merge/--no-merge",
        default=True,
        show_default=True,
        help="Whether small segments are merged, up to --segment-bytes.",
    ),
    click.option(
        "--grace",
        type=Seconds(),
        default=3600.0,
        show_default=True,
        metavar="SECONDS",
        help="For so long a file stays after it was merged into another one.",
    ),
    click.option(
        "--keep-seconds",
        type=Seconds(),
        metavar="SECONDS",
        help="Delete segments that are older, once all consumers have read them.",
    ),
    click.option(
        "--keep-bytes",
        metavar="BYTES",
        type=ByteCount(),
        help="Delete the oldest segments beyond so much, once all consumers have read them.",
    ),
    click.option(
        "--min-free",
        metavar="BYTES",
        type=ByteCount(),
        default="256MB",
        show_default=True,
        help="End with an error when less is free on the disk.",
    ),
    click.option(
        "--max-memory",
        metavar="BYTES",
        type=ByteCount(),
        default="64MB",
        show_default=True,
        help="For transactions that have not ended. Beyond it they go to files without a name.",
    ),
    click.option(
        "--retry-for",
        type=Seconds(),
        metavar="SECONDS",
        help="How long connecting is tried again. Without, the first connection is tried once, and "
        "one that was lost is made again without end.",
    ),
    click.option(
        "--silence-timeout",
        type=Seconds(),
        metavar="SECONDS",
        help="A server that is silent for so long is given up; by default twice "
        "wal_sender_timeout.",
    ),
)


CAPTURE_OPTIONS = (
    "create_slot", "adopt_slot", "connections", "binary", "messages", "two_phase", "streaming",
    "max_delay", "segment_bytes", "compression", "merge", "grace", "keep_seconds", "keep_bytes",
    "min_free", "max_memory", "retry_for", "silence_timeout",
)  # fmt: skip
"""Their names, which are those of the arguments of `capture`."""


def capture_options(function: _Command) -> _Command:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
