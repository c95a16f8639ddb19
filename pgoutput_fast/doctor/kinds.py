"""Everything that an examination can find: ids, levels, and what each finding means."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["error", "warning", "info"]

# From where on something is found. The meanings below say so.
SMALL_KEEP = 1 << 30  # bytes of max_slot_wal_keep_size
SMALL_MEMORY = 64 << 20  # bytes of logical_decoding_work_mem, as PostgreSQL's default is
SHORT_TIMEOUT = 10  # seconds of wal_sender_timeout
LONG_TRANSACTION = 300  # seconds
MUCH_LOG = 1 << 30  # bytes that a slot keeps


class Kind(NamedTuple):
    """What can be found.

    Attributes
    ----------
    level : {"error", "warning", "info"}
        "error": a capture fails, loses changes, or makes the application fail. "warning": it will,
        or may, under some circumstance; or rows, tables or a snapshot lack something. "info": worth
        knowing.
    meaning : str
        What it means, in one sentence.
    """

    level: Level
    meaning: str


KINDS: dict[str, Kind] = {
    # The server.
    "server-too-old": Kind("error", "pgoutput came with PostgreSQL 10."),
    "protocol": Kind("info", "This is the protocol version that `protocol='auto'` chooses."),
    "wal-level": Kind(
        "error", "Without wal_level = logical the server's log lacks what decoding needs."
    ),
    "wal-senders-exhausted": Kind(
        "error", "Each stream takes a walsender, and the server refuses a further one."
    ),
    "wal-senders-few": Kind(
        "warning", "A stream from a standby takes two walsenders, and backups take them too."
    ),
    "slots-exhausted": Kind("error", "The server refuses to make a further replication slot."),
    "slots-few": Kind("warning", "The server can make one further replication slot only."),
    "encoding-sql-ascii": Kind(
        "warning",
        "The database holds bytes of unknown encoding, which may be no text in UTF-8.",
    ),
    "standby": Kind("info", "Publications and tables can be altered on the primary only."),
    "standby-too-old": Kind("error", "Standbys decode their log from PostgreSQL 16 on."),
    "standby-feedback-off": Kind(
        "error",
        "The primary removes rows of the catalogue that a slot here needs, which invalidates it.",
    ),
    "standby-without-slot": Kind(
        "warning",
        "While the standby is away from the primary, hot_standby_feedback protects nothing.",
    ),
    "wal-keep-unlimited": Kind(
        "info", "A slot that nobody reads keeps the server's log until the disk is full."
    ),
    "wal-keep-small": Kind(
        "warning",
        "A slot is lost once its reader is behind by more than max_slot_wal_keep_size, which is "
        f"less than {SMALL_KEEP >> 30} GiB.",
    ),
    "wal-sender-timeout-off": Kind(
        "info", "The server does not notice a client that is gone, and keeps its slot in use."
    ),
    "wal-sender-timeout-short": Kind(
        "warning",
        f"The server ends a stream whose client is silent for less than {SHORT_TIMEOUT} seconds.",
    ),
    "idle-slot-timeout": Kind(
        "warning", "A slot is lost once nobody has read it for idle_replication_slot_timeout."
    ),
    "decoding-memory-small": Kind(
        "info",
        "Transactions beyond logical_decoding_work_mem, which is less than "
        f"{SMALL_MEMORY >> 20} MiB, go to the server's disk, or to the client before they end.",
    ),
    "session-timeout": Kind(
        "warning", "The server may end the session of the role that copies tables for a snapshot."
    ),
    "long-transaction": Kind(
        "warning",
        "The server makes a slot once all transactions that were writing have ended, and this one "
        f"has been open for {LONG_TRANSACTION // 60} minutes or more.",
    ),
    "prepared-transaction": Kind(
        "warning",
        "The server makes a slot once all transactions have ended, and this one has been prepared "
        f"for {LONG_TRANSACTION // 60} minutes or more.",
    ),
    # Slots.
    "slot-missing": Kind("warning", "A stream of this slot can begin only if it makes the slot."),
    "slot-not-pgoutput": Kind("error", "A stream can read logical slots of pgoutput only."),
    "slot-of-other-database": Kind("error", "A slot brings the changes of its own database only."),
    "slot-invalidated": Kind(
        "error", "The slot can't be read any more, and changes are lost: copy the tables anew."
    ),
    "other-slot-invalidated": Kind(
        "warning", "A slot can't be read any more, and takes one of max_replication_slots."
    ),
    "slot-nearly-lost": Kind(
        "error", "The next checkpoint may remove the part of the log that the slot needs."
    ),
    "slot-near-limit": Kind(
        "warning", "More than half of max_slot_wal_keep_size is used up: the slot may be lost."
    ),
    "slot-two-phase": Kind(
        "info", "A stream of this slot brings prepared transactions when they are prepared."
    ),
    "slot-in-use": Kind("info", "Only one client at a time reads a slot."),
    "slot-synced": Kind(
        "warning", "A standby's copy of a slot can be read once the standby is promoted."
    ),
    "slot-behind": Kind(
        "warning",
        f"The server keeps {MUCH_LOG >> 30} GiB or more of its log for the slot.",
    ),
    "slot-inactive": Kind(
        "warning",
        "Nobody reads the slot, for which the server keeps its log and old rows of its catalogue.",
    ),
    "physical-slot-inactive": Kind(
        "warning", "No standby reads the slot, for which the server keeps its log."
    ),
    "slot-spills": Kind(
        "info", "Transactions larger than logical_decoding_work_mem went to the server's disk."
    ),
    # The role.
    "role-replication": Kind(
        "error", "The server lets only roles with REPLICATION stream, and refused the connection."
    ),
    "replication-connection": Kind("error", "No stream can begin without such a connection."),
    "select-privilege": Kind(
        "warning", "The role can't copy these tables for a snapshot; changes come all the same."
    ),
    "schema-usage": Kind("warning", "The role can't copy the tables of these schemas."),
    "row-security": Kind(
        "warning", "A snapshot has only the rows that the role may see; changes come of all rows."
    ),
    "ddl-history": Kind(
        "info", "Only a superuser makes event triggers, with which a history of DDL is kept."
    ),
    # Publications.
    "no-publication": Kind("error", "A stream brings the changes of publications."),
    "publication-missing": Kind("error", "The server ends a stream of it, or sends no changes."),
    "no-create-privilege": Kind("warning", "There is no publication, and the role can't make one."),
    "publication-empty": Kind("warning", "A stream of this publication brings no rows."),
    "publication-actions": Kind(
        "warning", "What is left out never comes, and what follows the tables differs from them."
    ),
    "publication-all-tables": Kind(
        "info", "Tables that are made later are published, and need a replica identity then."
    ),
    "partitions-as-leaves": Kind(
        "info", "Changes of these partitioned tables come as those of their partitions."
    ),
    "via-root-mixed": Kind(
        "warning",
        "The changes come as those of the root, and row filters and column lists of publications "
        "without publish_via_partition_root do not count.",
    ),
    "column-lists-differ": Kind("error", "The server ends a stream of these publications."),
    "column-lists-broken": Kind(
        "error", "PostgreSQL 15.0 and 15.1 may send rows that do not fit their column lists."
    ),
    # Tables.
    "identity-nothing": Kind(
        "error",
        "The server refuses the application's UPDATE and DELETE of such a table.",
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
        "Each UPDATE and DELETE writes the whole old row to the log; it brings unchanged large "
        "values.",
    ),
    "identity-full-without-key": Kind(
        "warning", "Without a primary key, rows with the same values can't be told apart."
    ),
    "identity-index": Kind("info", "Another index than the primary key tells the rows apart."),
    "numeric-without-precision": Kind(
        "info",
        "Tables of sync have such a column as text, so that sum() needs a cast.",
    ),
    "partition-identity": Kind(
        "warning",
        "A partition's own replica identity decides what its changes bring, not that of its root.",
    ),
    "table-unlogged": Kind("warning", "Changes of unlogged tables are not sent."),
    "table-temporary": Kind("info", "Changes of temporary tables are not sent."),
    "partition-foreign": Kind("warning", "Changes of partitions on other servers are not sent."),
    "column-list": Kind("info", "The other columns of these tables do not come."),
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
    "generated-columns": Kind("info", "Stored generated columns of these tables do not come."),
    "virtual-columns": Kind("info", "Virtual generated columns are never sent."),
    "toast-unchanged": Kind(
        "info",
        "An UPDATE does not bring a large value that it left as it was, which is not NULL.",
    ),
    # The examination.
    "could-not-check": Kind("warning", "What this check would find is not known."),
}
"""Id of a finding → its kind."""
