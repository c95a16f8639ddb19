"""The repr of messages and decoders, and how they are restored from pickles.

A process with one implementation can load what a process with the other one pickled: pickles name
the functions of this module, which call the implementation that was chosen where they are loaded.
"""

from __future__ import annotations

from typing import Any

from ..errors import PgOutputError, printable
from ..protocol.messages import SHOWN_CHARACTERS, shown_bytes
from .plan import RelationPlan
from .state import StreamState

chosen: Any = None
"""The module of the implementation that was chosen; :mod:`pgoutput_fast._impl` sets it."""

_SHOWN_COLUMNS = 20


def restore(frame: bytes, in_stream: bool, plan: RelationPlan | None) -> Any:
    """Return the message in a pickled frame; `plan` is None if it was decoded without a Decoder."""
    return chosen.restore(frame, in_stream, plan)


def restore_tuple(frame: bytes, in_stream: bool, plan: RelationPlan | None, which: str) -> Any:
    """Return the tuple `which` ("old" or "new") of the message in a pickled frame."""
    return getattr(restore(frame, in_stream, plan), which)


def restore_decoder(state: StreamState) -> Any:
    """Return a decoder with a pickled state, of the implementation that this process chose."""
    return chosen.decoder_of(state)


def describe_decoder(decoder: Any) -> str:
    """Return the repr of a decoder."""
    try:
        state = decoder.state
    except PgOutputError:
        return "<Decoder: another thread decodes with it>"
    parts = [f"{len(state.relations)} relations"]
    if state.open_xid is not None:
        parts.append(f"in the stream chunk of xid {state.open_xid}")
    elif state.xid is not None:
        parts.append(f"in transaction {state.xid}")
    return f"<Decoder: {', '.join(parts)}>"


def describe_tuple(tuple_data: Any, plan: RelationPlan | None, is_key: bool) -> str:
    """Return the repr of a tuple: name and text of its first columns, long texts cut.

    A tuple that is a key has NULL for each column that the server did not send. No column of a key
    can be NULL, so those columns are left out.
    """
    encoding = plan.settings.encoding if plan is not None else "utf-8"
    parts = []
    positions = [i for i in range(len(tuple_data)) if not is_key or tuple_data.kind(i) != "n"]
    for position in positions[:_SHOWN_COLUMNS]:
        kind = tuple_data.kind(position)
        if kind == "n":
            shown = "NULL"
        elif kind == "u":
            shown = "UNCHANGED"
        else:
            raw = tuple_data.raw(position)
            if kind == "b":
                shown = shown_bytes(raw)
            else:
                # A character has at most four bytes, so all that are shown are before this cut.
                most = 4 * (SHOWN_CHARACTERS + 1)
                text = raw[:most].decode(encoding, "backslashreplace")
                more = len(text) > SHOWN_CHARACTERS or len(raw) > most
                shown = repr(text[:SHOWN_CHARACTERS]) + ("…" if more else "")
        parts.append(f"{printable(plan.names[position])}={shown}" if plan is not None else shown)
    if len(positions) > _SHOWN_COLUMNS:
        parts.append(f"… {len(positions) - _SHOWN_COLUMNS} more")
    return f"TupleData({', '.join(parts)})"
