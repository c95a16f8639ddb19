"""Raise the errors of :mod:`pgoutput_fast.transcode`, for both implementations."""

from __future__ import annotations

from typing import NoReturn

from ..errors import MAX_FRAME_LENGTH, DecodeError, PgOutputError, fail

_SENTENCES = {
    "signature": "expected the signature of COPY's binary format, found {found!r}; was the format "
    "text?",
    "flags": "the header's flags are 0x{found:08x}; no flag of the upper 16 bits is known",
    "extension": "the length of the header's extension is {found}",
    "columns": "the row has {found} columns, and {expected} were expected",
    "length": "the length of column {column} is {found}",
    "frame": f"with column {{column}} of {{found}} bytes the frame would be longer than "
    f"{MAX_FRAME_LENGTH} bytes",
    "end": "{found} bytes follow the trailer",
}


def refuse_copy(code: str, position: int, found: object, **details: object) -> NoReturn:
    """Raise the PgOutputError for a fault in COPY's bytes, at byte `position` of the input."""
    sentence = _SENTENCES[code].format(found=found, **details)
    error = PgOutputError(f"COPY in binary format, byte {position}: {sentence}", code="unfit_input")
    error.offset = position
    raise error


def refuse_frame(frame: bytes, index: int, xid_length: int) -> NoReturn:
    """Raise the DecodeError for a frame from which no xid can be cut."""
    try:
        if not frame:
            fail("empty_frame", frame, 0)
        if xid_length == 0xFF:
            found = f"no message with the tag {chr(frame[0])!r} can be inside a stream chunk"
            fail("stream_order", frame, 0, found=found)
        fail("truncated", frame, 1, field="xid", expected=xid_length, found=len(frame) - 1)
    except DecodeError as error:
        error.frame = index
        raise
