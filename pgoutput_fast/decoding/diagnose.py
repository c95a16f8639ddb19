"""Find the first fault of a malformed Begin, Commit, Insert, Update or Delete.

The fast decoders of both implementations only find out *that* a frame is malformed. Then the frame
is read again here, slowly and in the order of its bytes, with all bounds checked. So both
implementations report the same fault, the one with the lowest offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ..errors import UNKNOWN_HINT, PgOutputError, fail, printable
from ..names import qualified
from ..protocol.wire import LAYOUTS, Cursor, check_size
from .plan import RelationPlan

_MARKERS = {"I": "N", "U": "NKO", "D": "KO"}


def diagnose(
    frame: bytes, in_stream: bool, plan_of: Callable[[int], RelationPlan | None] | None
) -> NoReturn:
    """Raise the DecodeError of a malformed Begin, Commit, Insert, Update or Delete.

    `plan_of` finds the plan of a relation. It is None if the frame is decoded without a Decoder.

    Raises
    ------
    DecodeError
    PgOutputError
        Nothing is wrong with the frame: its bytes changed in between.
    """
    tag = chr(frame[0])
    cursor = Cursor(frame, in_stream, "latin-1")
    check_size(frame)
    if tag in "BC":
        for field, kind in LAYOUTS[tag]:
            getattr(cursor, kind)(field)
    else:
        cursor.stream_xid("the xid")
        start = cursor.position
        relation_id = cursor.uint32("the relation's OID")
        plan = None
        if plan_of is not None:
            plan = plan_of(relation_id)
            if plan is None:
                fail("unknown_relation", frame, start, relation_id=relation_id, hint=UNKNOWN_HINT)
        marker = _marker(cursor, _MARKERS[tag])
        _tuple(cursor, plan)
        if tag == "U" and marker != "N":
            _marker(cursor, "N")
            _tuple(cursor, plan)
    cursor.finish()
    refuse_changed()


def refuse_changed() -> NoReturn:
    """Raise the error for a frame that was malformed at first, and not when it was read again.

    Raises
    ------
    PgOutputError
    """
    raise PgOutputError(
        "a frame was refused when it was read first, and nothing is wrong with it when it is read "
        "again: another thread writes into the frames or their LSNs",
        code="unfit_input",
        hint="Leave buffers alone until their frames are decoded",
    )


def _marker(cursor: Cursor, markers: str) -> str:
    start = cursor.position
    marker = cursor.char("the marker of a tuple")
    if marker not in markers:
        expected = " or ".join(map(repr, markers))
        fail("bad_marker", cursor.frame, start, expected=expected, found=_shown(marker))
    return marker


def _tuple(cursor: Cursor, plan: RelationPlan | None) -> None:
    """Read and check a tuple: an int16 count of columns, then for each column its kind (a byte).

    The kinds "t" and "b" are followed by an int32 length and that many bytes.
    """
    frame = cursor.frame
    start = cursor.position
    field = "the number of columns"
    count = cursor.count(cursor.int16(field), 1, start, field)
    if plan is not None and count != plan.width:
        relation = printable(qualified(plan.relation))
        hint = WIDER_HINT if count > plan.width else NARROWER_HINT
        fail(
            "column_count", frame, start,
            found=count, expected=plan.width, relation=relation, hint=hint,
        )  # fmt: skip
    for column in range(count):
        start = cursor.position
        kind = cursor.char(f"the kind of column {column}")
        if kind in "tb":
            cursor.sized_bytes(f"column {column}")
        elif kind not in "nu":
            fail("bad_column_kind", frame, start, column=column, found=_shown(kind))


def _shown(character: str) -> str:
    printable = 32 < ord(character) < 127
    return repr(character) if printable else f"byte 0x{ord(character):02X}"


WIDER_HINT = ("Update the server: PostgreSQL 15.0 and 15.1 send such tuples for a column list",)
NARROWER_HINT = ("Is a frame missing between the two?",)
