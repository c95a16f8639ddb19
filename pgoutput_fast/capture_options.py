"""The options of a stream, and of a capture.

This module opens no connection and does not import psycopg, so that a program that only reads a
change log needs no psycopg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .changelog.remote import parse_place
from .errors import Argument, PgOutputError
from .options import OptionKind, Options, byte_count, choice, count, flag, option, seconds, text

Protocol = Literal["auto"] | int
Streaming = Literal["on", "parallel"] | bool

NEWEST_PROTOCOL = 4


def _protocol(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _streaming(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


_PROTOCOLS = OptionKind(
    (int, str), "'auto', or a version from 1 to 4", _protocol,
    lambda value: value in ("auto", *range(1, NEWEST_PROTOCOL + 1)), "auto|1|2|3|4",
)  # fmt: skip
_STREAMINGS = OptionKind(
    (bool, str), "a bool, 'on' or 'parallel'", _streaming,
    lambda value: value in (True, False, "on", "parallel"), "true|false|on|parallel",
)  # fmt: skip


@dataclass(frozen=True)
class StreamOptions(Options):
    """How to read a slot: options of `connect` and `capture`."""

    protocol: Protocol = option(
        _PROTOCOLS, "auto",
        "Version of the replication protocol. The default is the server's newest version.",
    )  # fmt: skip
    streaming: Streaming = option(
        _STREAMINGS, True,
        "Receive large transactions while they run. With false, the server sends each transaction "
        "after its commit.",
    )  # fmt: skip
    two_phase: bool | None = option(
        flag(), False,
        "Receive a prepared transaction when it is prepared (PostgreSQL 15 and newer). A slot "
        "keeps this setting. None, the default of the command, means the slot's setting.",
        may_be_none=True,
    )  # fmt: skip
    binary: bool = option(flag(), False, "Receive values in binary format where a type has one.")
    messages: bool = option(flag(), False, "Receive logical messages (pg_logical_emit_message).")
    origin: Literal["any", "none"] | None = option(
        choice("any", "none"), None,
        "With none, receive only changes that were made on this server (PostgreSQL 16 and newer).",
        shown_default="any",
    )  # fmt: skip
    unknown_prepared: Literal["empty", "error"] | None = option(
        choice("empty", "error"), None,
        "At the commit of a prepared transaction whose changes never came, take it as empty, or "
        "end with an error. The default is empty if the call makes the slot, else error.",
        shown_default="see there",
    )  # fmt: skip
    max_memory: int = option(
        byte_count(), 64 << 20,
        "Memory for transactions that have not ended. Beyond this, the largest transaction goes "
        "to an unnamed temporary file.",
        shown_default="64MB",
    )  # fmt: skip
    silence_timeout: float | None = option(
        seconds(), None,
        "Close a connection after this time without a byte. The default is twice "
        "wal_sender_timeout.",
    )  # fmt: skip
    retry_for: float | None = option(
        seconds(), None,
        "How long to try to connect. By default, there is one try at the start, and endless tries "
        "after a connection is lost.",
    )  # fmt: skip


@dataclass(frozen=True)
class CaptureOptions(StreamOptions):
    """How to capture a slot: options of `capture`, and of a sync that captures."""

    snapshot: Literal["never", "initial", "only"] = option(
        choice("never", "initial", "only"), "never",
        "Snapshot existing rows. initial includes tables that join the publications later. With "
        "only, the capture ends after the snapshots.",
        flag=True,
    )  # fmt: skip
    create_slot: bool = option(
        flag(), False,
        "Make a missing slot if the directory is new. The default of the command and of a sync is "
        "true.",
    )  # fmt: skip
    adopt_slot: bool = option(
        flag(), False,
        "Begin with an existing slot. Or continue in a downloaded copy of a directory, if the "
        "original is lost.",
        flag=True,
    )  # fmt: skip
    connections: int = option(
        count(1),
        2,
        "Number of connections that read snapshots.",
    )
    segment_bytes: int = option(
        byte_count(1), 16 << 20,
        "End a segment with the first commit after this many bytes. A transaction larger than 1.5 "
        "times this size is cut into parts.",
        shown_default="16MB",
    )  # fmt: skip
    max_delay: float = option(
        seconds(zero=True), 1.0,
        "Time until a commit is durable in a segment and acknowledged.",
    )  # fmt: skip
    compression: Literal["lz4", "zstd"] | None = option(
        choice("lz4", "zstd"), None, "Compression of segments.", shown_default="none"
    )
    merge: bool = option(flag(), True, "Merge small segments, up to segment_bytes.")
    grace: float = option(
        seconds(), 3600.0,
        "How long a merged file stays for readers that listed the directory before the merge.",
        shown_default="1h",
    )  # fmt: skip
    keep_seconds: float | None = option(
        seconds(), None,
        "Delete segments older than this once every consumer has read them.",
    )  # fmt: skip
    keep_bytes: int | None = option(
        byte_count(), None,
        "Delete the oldest segments beyond this size once every consumer has read them.",
    )  # fmt: skip
    silent_after: float | None = option(
        seconds(), None,
        "Report a consumer that has something to read and has not moved for this time.",
        shown_default="2d",
    )  # fmt: skip
    give_up: bool = option(
        flag(), False,
        "Remove a consumer that silent_after reports, and keep no segment for it.",
    )  # fmt: skip
    min_free: int = option(
        byte_count(), 256 << 20, "End with an error when the disk has fewer free bytes.",
        shown_default="256MB",
    )  # fmt: skip
    schema_history: bool = option(
        flag(), True,
        "Keep the schema history, types and tables by LSN, through a second connection.",
    )  # fmt: skip
    upload: str | None = option(
        text("URL"), None,
        "Also copy the change log to s3://BUCKET/PREFIX. Credentials are found as the AWS SDK "
        "finds them.",
        flag=True,
    )  # fmt: skip
    upload_endpoint: str | None = option(
        text(), None,
        "URL of S3-compatible storage. The default is AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or "
        "AWS itself.",
    )  # fmt: skip
    upload_keep: Literal["all", "local"] = option(
        choice("all", "local"), "all",
        "With local, a file that is deleted from the directory is also deleted from its copy.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.give_up and self.silent_after is None:
            raise PgOutputError(
                "it needs the time after which a consumer counts as silent",
                code="bad_option", parameter="give_up",
                hint=("Give ", Argument("silent_after"), " too"),
            )  # fmt: skip
        if self.upload is not None:
            # Raises an error for a malformed URL.
            parse_place(self.upload, self.upload_endpoint, names=("upload", "upload_endpoint"))
        elif self.upload_endpoint is not None or self.upload_keep != "all":
            wrong = "upload_endpoint" if self.upload_endpoint is not None else "upload_keep"
            raise PgOutputError(
                "it needs an upload", code="bad_option", parameter=wrong,
                hint=("Give ", Argument("upload"), " too"),
            )  # fmt: skip
