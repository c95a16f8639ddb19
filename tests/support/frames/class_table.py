"""The public message classes and their fields, as the package promises them to its users."""

from __future__ import annotations

FIELDS: dict[str, tuple[str, ...]] = {
    "Begin": ("final_lsn", "commit_time", "xid"),
    "Commit": ("flags", "commit_lsn", "end_lsn", "commit_time"),
    "Origin": ("commit_lsn", "name"),
    "Relation": ("xid", "relation_id", "namespace", "name", "replica_identity", "columns"),
    "Type": ("xid", "type_id", "namespace", "name"),
    "Insert": ("xid", "relation_id", "new"),
    "Update": ("xid", "relation_id", "old_kind", "old", "new"),
    "Delete": ("xid", "relation_id", "old_kind", "old"),
    "Truncate": ("xid", "relation_ids", "options"),
    "LogicalMessage": ("xid", "flags", "lsn", "prefix", "content"),
    "StreamStart": ("xid", "first_segment"),
    "StreamStop": (),
    "StreamCommit": ("xid", "flags", "commit_lsn", "end_lsn", "commit_time"),
    "StreamAbort": ("xid", "subxid", "abort_lsn", "abort_time"),
    "BeginPrepare": ("prepare_lsn", "end_lsn", "prepare_time", "xid", "gid"),
    "Prepare": ("flags", "prepare_lsn", "end_lsn", "prepare_time", "xid", "gid"),
    "StreamPrepare": ("flags", "prepare_lsn", "end_lsn", "prepare_time", "xid", "gid"),
    "CommitPrepared": ("flags", "commit_lsn", "end_lsn", "commit_time", "xid", "gid"),
    "RollbackPrepared": (
        "flags",
        "prepare_end_lsn",
        "rollback_end_lsn",
        "prepare_time",
        "rollback_time",
        "xid",
        "gid",
    ),
}
"""Class → its fields, in the order in which a class pattern binds them."""

PROPERTIES: dict[str, tuple[str, ...]] = {
    "Begin": ("commit_datetime",),
    "Commit": ("commit_datetime",),
    "Insert": ("relation",),
    "Update": ("relation",),
    "Delete": ("relation",),
    "Truncate": ("cascade", "restart_identity", "relations"),
    "LogicalMessage": ("transactional",),
    "StreamCommit": ("commit_datetime",),
    "StreamAbort": ("abort_datetime",),
    "BeginPrepare": ("prepare_datetime",),
    "Prepare": ("prepare_datetime",),
    "StreamPrepare": ("prepare_datetime",),
    "CommitPrepared": ("commit_datetime",),
    "RollbackPrepared": ("prepare_datetime", "rollback_datetime"),
}
"""Class → what else a message of it tells beside its fields, `frame` and `in_stream`."""

TAGS: dict[str, str] = dict(zip(FIELDS, "BCORYIUDTMSEcAbPpKr", strict=True))
"""Class → the first byte of its frames."""

TUPLE_METHODS = ("kind", "raw", "text", "raws", "texts", "values", "as_dict", "index", "count")
