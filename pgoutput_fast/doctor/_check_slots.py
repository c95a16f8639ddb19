"""Checks of replication slots: the given slot, and all slots that keep the server's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import counted, printable
from ._examined import quoted_literal, shown_size
from .findings import Finding
from .kinds import MUCH_LOG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._examined import Examined

_SLOTS = """
SELECT to_jsonb(s) || jsonb_build_object('retained', pg_catalog.pg_wal_lsn_diff(
    CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_current_wal_lsn()
    ELSE COALESCE(pg_catalog.pg_last_wal_replay_lsn(), s.restart_lsn) END, s.restart_lsn))
FROM pg_catalog.pg_replication_slots AS s ORDER BY s.slot_name
"""


def slots(server: Examined) -> Iterator[Finding]:
    """Check all slots of the server."""
    rows = server.objects(_SLOTS)
    for slot in rows:
        if slot["slot_name"] == server.slot:
            yield from _named(server, slot)
        elif not slot["temporary"]:
            yield from _other(server, slot)
        yield from _retained_log(server, slot)
    name = server.slot
    if name is not None and name not in {slot["slot_name"] for slot in rows}:
        yield Finding(
            "slot-missing",
            f"there is no slot {name}",
            advice="make the publications, then start sync or capture: they make the slot. If you "
            "make the slot by hand, give them --adopt-slot",
            objects=(name,),
        )


def _lost(slot: dict[str, Any]) -> bool:
    return slot.get("wal_status") == "lost" or bool(slot.get("invalidation_reason"))


def _named(server: Examined, slot: dict[str, Any]) -> Iterator[Finding]:
    """Check the given slot."""
    name = slot["slot_name"]
    objects = (name,)
    if slot["plugin"] != "pgoutput":
        kind = (
            "a physical slot"
            if slot["plugin"] is None
            else f"a slot of plugin {printable(slot['plugin'])}"
        )
        yield Finding(
            "slot-not-pgoutput",
            f"slot {name} is {kind}",
            advice="give another slot",
            objects=objects,
        )
        return
    if slot["database"] != server.role.database:
        yield Finding(
            "slot-of-other-database",
            f"slot {name} belongs to database {printable(slot['database'])}, not to "
            f"{printable(server.role.database)}",
            advice="give another slot, or a connection to that database",
            objects=objects,
        )
    if _lost(slot):
        yield _invalidated(slot, "slot-invalidated")
        return
    if slot.get("synced") and server.role.in_recovery:
        yield Finding(
            "slot-synced",
            f"slot {name} is the standby's copy of a slot of the primary",
            objects=objects,
        )
    if slot.get("two_phase"):
        yield Finding("slot-two-phase", f"slot {name} is marked two_phase", objects=objects)
    if slot["active"]:
        yield Finding(
            "slot-in-use", f"process {slot['active_pid']} reads slot {name}", objects=objects
        )


def _other(server: Examined, slot: dict[str, Any]) -> Iterator[Finding]:
    """Check another slot, which somebody may have forgotten."""
    if slot.get("synced") and server.role.in_recovery:
        return  # the standby itself maintains it
    if _lost(slot):
        ours = slot["plugin"] == "pgoutput" and slot["database"] == server.role.database
        unnamed = server.slot is None
        kind = "slot-invalidated" if ours and unnamed else "other-slot-invalidated"
        yield _invalidated(slot, kind)
    elif not slot["active"] and slot["restart_lsn"] is not None:
        name, retained = slot["slot_name"], shown_size(int(slot["retained"]))
        # inactive_since exists from PostgreSQL 17 on.
        reader = (
            f"has had no reader since {slot['inactive_since']}"
            if slot.get("inactive_since")
            else "has no reader now"
        )
        of = f" of database {printable(slot['database'])}" if slot["database"] else ""
        yield Finding(
            "slot-inactive" if slot["plugin"] else "physical-slot-inactive",
            f"slot {name}{of} {reader}, and keeps {retained} of the server's log",
            _drop(slot),
            "drop the slot only if nobody will read it any more",
            (name,),
        )


def _drop(slot: dict[str, Any]) -> tuple[str, ...]:
    return (f"SELECT pg_catalog.pg_drop_replication_slot({quoted_literal(slot['slot_name'])});",)


def _invalidated(slot: dict[str, Any], kind: str) -> Finding:
    name = slot["slot_name"]
    reason = slot.get("invalidation_reason") or "its log is gone"
    return Finding(
        kind,
        f"slot {name} is invalidated: {reason}",
        _drop(slot),
        "the changes since then are lost. Drop the slot, move the change log away, and start sync "
        "or capture again: they make a new slot and new snapshots of all tables",
        (name,),
    )


def _retained_log(server: Examined, slot: dict[str, Any]) -> Iterator[Finding]:
    """Compare the log that a slot keeps with the server's limits."""
    if slot["restart_lsn"] is None or _lost(slot):
        return
    name, retained, left = slot["slot_name"], int(slot["retained"]), slot.get("safe_wal_size")
    shown = f"slot {name} keeps {shown_size(retained)} of the server's log"
    setting = "max_slot_wal_keep_size"
    more = f"{max(4 * retained >> 20, 1024)}MB"
    if slot.get("wal_status") == "unreserved" or (left is not None and int(left) < retained):
        nearly = slot.get("wal_status") == "unreserved"
        yield Finding(
            "slot-nearly-lost" if nearly else "slot-near-limit",
            f"{shown}, and may keep {shown_size(max(int(left or 0), 0))} more",
            server.set_setting(setting, more),
            "start the reader of the slot, or drop the slot",
            (name,),
        )
    if retained >= MUCH_LOG:
        yield Finding(
            "slot-behind",
            shown + (f", and process {slot['active_pid']} reads it" if slot["active"] else ""),
            advice="read the slot faster, or acknowledge the changes that were read",
            objects=(name,),
        )


_SPILLED = """
SELECT slot_name::text, spill_txns, spill_count, spill_bytes, stream_bytes
FROM pg_catalog.pg_stat_replication_slots WHERE spill_bytes > 0 ORDER BY slot_name
"""


def spills(server: Examined) -> Iterator[Finding]:
    """Check how much decoding has written to the server's disk."""
    if server.version < 140000:
        return
    memory = server.setting("logical_decoding_work_mem")
    for name, transactions, times, spilled, streamed in server.rows(_SPILLED):
        if server.slot not in (None, name) or memory is None:
            continue
        more = f"{max(4 * memory.size >> 20, 64)}MB"
        yield Finding(
            "slot-spills",
            f"slot {name} has spilled {shown_size(spilled)} of "
            f"{counted(transactions, 'transaction')}, {counted(times, 'time')}, and streamed "
            f"{shown_size(streamed)}; logical_decoding_work_mem is {shown_size(memory.size)}",
            (
                *server.set_setting("logical_decoding_work_mem", more),
                f"SELECT pg_catalog.pg_stat_reset_replication_slot({quoted_literal(name)});",
            ),
            "each stream may use this much memory; protocol version 2 or newer spills less",
            (name,),
        )
