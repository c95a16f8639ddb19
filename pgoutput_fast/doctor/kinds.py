"""All kinds of findings: their ids, levels and meanings."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["error", "warning", "info"]

# Limits from which a check reports something. The meanings below name them.
SMALL_KEEP = 1 << 30  # bytes of max_slot_wal_keep_size
SMALL_MEMORY = 64 << 20  # bytes of logical_decoding_work_mem, as PostgreSQL's default is
SHORT_TIMEOUT = 10  # seconds of wal_sender_timeout
LONG_TRANSACTION = 300  # seconds
MUCH_LOG = 1 << 30  # bytes that a slot keeps


class Kind(NamedTuple):
    """A kind of finding.

    Attributes
    ----------
    level : {"error", "warning", "info"}
        "error": a capture fails or loses changes, or statements of the application fail. "warning":
        this may happen, or a snapshot or the data may be incomplete. "info": worth knowing.
    meaning : str
        What the finding means.
    """

    level: Level
    meaning: str


KINDS: dict[str, Kind] = {
    # The server.
    "server-too-old": Kind("error", "pgoutput needs PostgreSQL 10 or newer."),
    "protocol": Kind("info", "This is the protocol version that `protocol='auto'` chooses."),
    "wal-level": Kind("error", "Logical decoding needs wal_level = logical."),
    "wal-senders-exhausted": Kind(
        "error", "Each stream takes a walsender, and the server has none left."
    ),
    "wal-senders-few": Kind(
        "warning", "A stream from a standby takes two walsenders, and backups take walsenders too."
    ),
    "slots-exhausted": Kind("error", "The server has no replication slot left."),
    "slots-few": Kind("warning", "The server has only one replication slot left."),
    "encoding-sql-ascii": Kind(
        "warning", "The database holds bytes of unknown encoding, which may not be valid UTF-8."
    ),
    "standby": Kind("info", "Publications and tables can be altered only on the primary."),
    "standby-too-old": Kind("error", "Logical decoding on a standby needs PostgreSQL 16 or newer."),
    "standby-feedback-off": Kind(
        "error",
        "The primary may remove catalogue rows that a slot here needs, which invalidates the slot.",
    ),
    "standby-without-slot": Kind(
        "warning",
        "While the standby is disconnected from the primary, hot_standby_feedback protects "
        "nothing.",
    ),
    "wal-keep-unlimited": Kind(
        "info", "A slot that nobody reads keeps the server's log until the disk is full."
    ),
    "wal-keep-small": Kind(
        "warning",
        "max_slot_wal_keep_size is less than "
        f"{SMALL_KEEP >> 30} GiB. A slot is lost once its reader is behind by more than that.",
    ),
    "wal-sender-timeout-off": Kind(
        "info", "The server does not notice a client that is gone, and keeps the slot in use."
    ),
    "wal-sender-timeout-short": Kind(
        "warning",
        f"The server ends a stream whose client is silent for less than {SHORT_TIMEOUT} seconds.",
    ),
    "idle-slot-timeout": Kind(
        "warning", "A slot that nobody reads for idle_replication_slot_timeout is lost."
    ),
    "decoding-memory-small": Kind(
        "info",
        "logical_decoding_work_mem is less than "
        f"{SMALL_MEMORY >> 20} MiB. Larger transactions go to the server's disk, or to the client "
        "before they end.",
    ),
    "session-timeout": Kind(
        "warning", "The server may end the role's session while it copies tables for a snapshot."
    ),
    "long-transaction": Kind(
        "warning",
        "The server makes a slot only when all transactions that were writing have ended. This one "
        f"has been open for {LONG_TRANSACTION // 60} minutes or more.",
    ),
    "prepared-transaction": Kind(
        "warning",
        "The server makes a slot only when all transactions have ended. This one has been prepared "
        f"for {LONG_TRANSACTION // 60} minutes or more.",
    ),
    # Slots.
    "slot-missing": Kind("warning", "The slot does not exist, so a stream has to make it."),
    "slot-not-pgoutput": Kind("error", "A stream can read only logical slots of pgoutput."),
    "slot-of-other-database": Kind("error", "A slot has only the changes of its own database."),
    "slot-invalidated": Kind(
        "error",
        "The slot can't be read any more, and changes are lost: take new snapshots of the tables.",
    ),
    "other-slot-invalidated": Kind(
        "warning", "The slot can't be read any more, but counts for max_replication_slots."
    ),
    "slot-nearly-lost": Kind(
        "error", "The next checkpoint may remove the part of the log that the slot needs."
    ),
    "slot-near-limit": Kind(
        "warning", "The slot uses more than half of max_slot_wal_keep_size, and may be lost."
    ),
    "slot-two-phase": Kind(
        "info", "A stream of this slot sends prepared transactions when they are prepared."
    ),
    "slot-in-use": Kind("info", "Only one client at a time can read a slot."),
    "slot-synced": Kind(
        "warning", "A standby's copy of a slot can be read only after the standby is promoted."
    ),
    "slot-behind": Kind(
        "warning",
        f"The server keeps {MUCH_LOG >> 30} GiB or more of its log for the slot.",
    ),
    "slot-inactive": Kind(
        "warning",
        "Nobody reads the slot, and the server keeps its log and old catalogue rows for it.",
    ),
    "physical-slot-inactive": Kind(
        "warning", "No standby reads the slot, and the server keeps its log for it."
    ),
    "slot-spills": Kind(
        "info", "Transactions larger than logical_decoding_work_mem went to the server's disk."
    ),
    # The role.
    "role-replication": Kind(
        "error", "The server refused the connection: a stream needs a role with REPLICATION."
    ),
    "replication-connection": Kind(
        "error", "The server refused a replication connection, which each stream needs."
    ),
    "select-privilege": Kind(
        "warning",
        "The role can't copy these tables for a snapshot. Their changes still come.",
    ),
    "schema-usage": Kind("warning", "The role can't copy the tables of these schemas."),
    "row-security": Kind(
        "warning", "A snapshot has only the rows that the role may see; changes come for all rows."
    ),
    "ddl-history": Kind(
        "info", "Only a superuser can make the event trigger for an exact schema history."
    ),
    # Publications.
    "no-publication": Kind("error", "A stream needs a publication."),
    "publication-missing": Kind(
        "error", "The server ends a stream of a missing publication, or sends no changes."
    ),
    "no-create-privilege": Kind("warning", "There is no publication, and the role can't make one."),
    "publication-empty": Kind("warning", "A stream of this publication has no rows."),
    "publication-actions": Kind(
        "warning", "The server does not send the other operations, so the target will differ."
    ),
    "publication-all-tables": Kind(
        "info", "Tables that are made later are published too, and need a replica identity."
    ),
    "partitions-as-leaves": Kind(
        "info", "Changes of these partitioned tables come as changes of their partitions."
    ),
    "via-root-mixed": Kind(
        "warning",
        "The changes come as changes of the root. Row filters and column lists of publications "
        "without publish_via_partition_root do not apply.",
    ),
    "column-lists-differ": Kind("error", "The server ends a stream of these publications."),
    "column-lists-broken": Kind(
        "error", "PostgreSQL 15.0 and 15.1 may send rows that do not fit their column lists."
    ),
    # Tables.
    "identity-nothing": Kind(
        "error", "The server refuses the application's UPDATE and DELETE of such a table."
    ),
    "identity-missing": Kind(
        "error",
        "The server refuses the application's UPDATE and DELETE of a table without replica "
        "identity.",
    ),
    "identity-generated": Kind(
        "error",
        "A generated column of the replica identity is not sent: rows can't be told apart, and "
        "PostgreSQL 18 refuses their UPDATE and DELETE.",
    ),
    "identity-full": Kind(
        "info",
        "Each UPDATE and DELETE writes the whole old row to the log, with unchanged large values.",
    ),
    "identity-full-without-key": Kind(
        "warning", "Without a primary key, rows with the same values can't be told apart."
    ),
    "identity-index": Kind("info", "The replica identity is another index than the primary key."),
    "numeric-without-precision": Kind(
        "info", "Sync stores such a column as text, so sum() needs a cast."
    ),
    "partition-identity": Kind(
        "warning",
        "A partition's own replica identity, not the root's, decides which old values come.",
    ),
    "table-unlogged": Kind("warning", "Changes of unlogged tables are not sent."),
    "table-temporary": Kind("info", "Changes of temporary tables are not sent."),
    "partition-foreign": Kind("warning", "Changes of partitions on other servers are not sent."),
    "column-list": Kind("info", "The other columns of these tables are not sent."),
    "column-list-identity": Kind(
        "error",
        "The server refuses the application's UPDATE and DELETE of a table whose column list lacks "
        "columns of its replica identity.",
    ),
    "row-filter": Kind("info", "An UPDATE may come as INSERT or DELETE, or not at all."),
    "row-filter-identity": Kind(
        "error",
        "The server refuses the application's UPDATE and DELETE of a table whose row filter has "
        "columns that are not in its replica identity.",
    ),
    "generated-columns": Kind("info", "Stored generated columns of these tables are not sent."),
    "virtual-columns": Kind("info", "Virtual generated columns are never sent."),
    "toast-unchanged": Kind(
        "info",
        "An UPDATE does not send a large value that it left unchanged; the value is not NULL.",
    ),
    # The examination.
    "could-not-check": Kind("warning", "This check failed, so its findings are unknown."),
}
"""The kinds of findings, by id."""
