"""Compares decoded changes with those that test_decoding told of the same WAL records."""

from __future__ import annotations

from typing import Any

from support.recordings.corpus_files import UNCHANGED, Capture, Change

import pgoutput_fast as pf

# Publications that leave out changes of tables that they name: by rows, kinds, columns, or time.
PARTIAL = (
    "_rf", "_both", "_cl", "_misc", "_leaf", "_mid", "_schema", "_pub2", "_only", "_gen",
    "_root", "_origin_none", "_error", "_emptypub",
)  # fmt: skip
# Rows of a partition while it is detached belong to no published table.
DETACHED = "'detached'"
KINDS = {"Insert": "INSERT", "Update": "UPDATE", "Delete": "DELETE"}


def agrees(message: Any, change: Change, capture: Capture) -> bool:
    """Whether the message is the change that test_decoding told."""
    optionset = capture.entry["optionset"]
    kind = KINDS[type(message).__name__]
    if kind != change.kind and not ("_rf" in optionset or "_both" in optionset):
        return False
    names = [column.name for column in message.relation.columns]
    for which in ("old", "new"):
        data = getattr(message, which, None)
        told = change.old if which == "old" else change.new
        if data is None or told is None:
            continue
        texts = {name: text for name, _, text in told}
        for number, name in enumerate(names):
            if which == "old" and data.kind(number) == "n":
                if texts.get(name) is not None:
                    return False
            elif name not in texts:
                if kind == change.kind:
                    return False
            elif not same_value(data, number, texts[name], capture, kind == change.kind):
                return False
    return True


def same_value(data: Any, number: int, told: Any, capture: Capture, same_kind: bool) -> bool:
    kind = data.kind(number)
    if told is None or kind == "n":
        return kind == "n" and told is None
    if told is UNCHANGED or kind == "u":
        # an update that a row filter turned into an insert brings what it had not changed
        return (kind == "u" and told is UNCHANGED) or not same_kind
    if capture.entry["guc_set"] != "default" or capture.entry["server_encoding"] != "UTF8":
        return True
    try:
        return bool(data.text(number) == told)
    except pf.DecodeError as error:
        return error.code == "no_text_form"
