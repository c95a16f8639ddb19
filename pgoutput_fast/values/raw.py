"""Decode bytea, "char", uuid, bit strings, tid, pg_lsn, MAC addresses and snapshots."""

from __future__ import annotations

import binascii
import functools
import operator
import re
import struct
from typing import TYPE_CHECKING

from .base import Codec, CodecOf, expect_size, show_bytes, wrong_size

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Sequence


def _bytea_text(raw: bytes) -> bytes:
    if raw[:2] == b"\\x":
        try:
            return _unhexlify(raw[2:])
        except ValueError:
            raise ValueError(f"{show_bytes(raw)} is no bytea in hex format") from None
    if b"\\" not in raw:
        return raw
    if _ESCAPED.fullmatch(raw) is None:
        raise ValueError(f"{show_bytes(raw)} is no bytea in escape format")
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]) if match[1] else b"\\", raw)


_ESCAPE = re.compile(rb"\\(?:\\|([0-3][0-7]{2}))")
_ESCAPED = re.compile(rb"(?:[^\\]|\\\\|\\[0-3][0-7]{2})*", re.DOTALL)


def _char_text(raw: bytes) -> bytes:
    if not raw:
        return b"\0"
    if len(raw) == 1:
        return raw
    if len(raw) == 4 and (match := _ESCAPE.fullmatch(raw)) is not None and match[1]:
        return bytes([int(match[1], 8)])
    raise ValueError(f'{show_bytes(raw)} is no "char"')


def _char_binary(raw: bytes) -> bytes:
    expect_size(raw, 1, '"char"')
    return raw


def _char_form(raw: bytes) -> str:
    byte = _char_binary(raw)[0]
    if byte == 0:
        return ""
    return chr(byte) if byte < 128 else f"\\{byte:03o}"


def _uuid_text(raw: bytes) -> uuid.UUID:
    if len(raw) == 36 and raw[8:24:5] == b"----":
        try:
            sixteen = _unhexlify(raw.replace(b"-", b""))
            if len(sixteen) == 16:
                return _make_uuid(_from_bytes(sixteen, "big"))
        except ValueError:
            pass
    raise ValueError(f"{show_bytes(raw)} is no uuid")


def _uuid_binary(raw: bytes) -> uuid.UUID:
    if len(raw) != 16:
        raise wrong_size(raw, 16, "uuid")
    return _make_uuid(_from_bytes(raw, "big"))


_from_bytes = int.from_bytes
_unhexlify = binascii.unhexlify
_new = object.__new__
_set = object.__setattr__


@functools.cache
def _uuid_parts() -> tuple[type[uuid.UUID], uuid.SafeUUID]:
    import uuid  # imports slowly

    return uuid.UUID, uuid.SafeUUID.unknown


def _make_uuid(value: int) -> uuid.UUID:
    """The same as uuid.UUID(int=value), whose constructor takes three times as long."""
    kind, safety = _uuid_parts()
    made = _new(kind)
    _set(made, "int", value)
    _set(made, "is_safe", safety)
    return made


def _bits(name: str) -> Codec:
    """The type bit or varbit: a str of "0" and "1".

    Binary format: int32 number of bits, then the bits from the highest one on.
    """

    def text(raw: bytes) -> str:
        if raw.strip(b"01"):
            raise ValueError(f"{show_bytes(raw)} is no {name}")
        return raw.decode()

    def form(raw: bytes) -> str:
        if len(raw) < 4:
            raise ValueError(f"a binary {name} has at least 4 bytes, found {len(raw)}")
        count: int = _int32(raw, 0)[0]
        if count < 0 or len(raw) != 4 + (count + 7) // 8:
            raise ValueError(f"a binary {name} of {count} bits in {len(raw) - 4} bytes")
        if not count:
            return ""
        number = _from_bytes(raw[4:], "big")
        unused = -count % 8
        if number & ((1 << unused) - 1):
            raise ValueError(f"a binary {name} of {count} bits with other bits after them")
        return f"{number >> unused:0{count}b}"

    return Codec(text, form, form)


_int32 = struct.Struct(">i").unpack_from


def _plain(name: str, pattern: bytes, size: int, form: Callable[[bytes], str]) -> Codec:
    """A type whose values are str, the server's texts, and have a fixed size in binary format."""
    matches = re.compile(pattern).fullmatch

    def text(raw: bytes) -> str:
        if matches(raw) is None:
            raise ValueError(f"{show_bytes(raw)} is no {name}")
        return raw.decode()

    def binary(raw: bytes) -> str:
        if len(raw) != size:
            raise wrong_size(raw, size, name)
        return form(raw)

    return Codec(text, binary, binary)


_tid_parts = struct.Struct(">IH").unpack
_lsn_parts = struct.Struct(">II").unpack
_TID_TEXT = re.compile(rb"\((\d{1,10}),(\d{1,5})\)").fullmatch


def _tid_text(raw: bytes) -> str:
    match = _TID_TEXT(raw)
    if match is None or int(match[1]) > 0xFFFFFFFF or int(match[2]) > 0xFFFF:
        raise ValueError(f"{show_bytes(raw)} is no tid")
    return raw.decode()


def _tid_form(raw: bytes) -> str:
    if len(raw) != 6:
        raise wrong_size(raw, 6, "tid")
    block, offset = _tid_parts(raw)
    return f"({block},{offset})"


_PG_LSN = _plain(
    "pg_lsn",
    rb"[0-9A-F]{1,8}/[0-9A-F]{1,8}",
    8,
    lambda raw: "{:X}/{:X}".format(*_lsn_parts(raw)),
)
_MACADDR = _plain("macaddr", rb"[0-9a-f]{2}(?::[0-9a-f]{2}){5}", 6, lambda raw: raw.hex(":"))
_MACADDR8 = _plain("macaddr8", rb"[0-9a-f]{2}(?::[0-9a-f]{2}){7}", 8, lambda raw: raw.hex(":"))

_SNAPSHOT = rb"(\d{1,20}):(\d{1,20}):((?:\d{1,20}(?:,\d{1,20})*)?)"
_snapshot_head = struct.Struct(">iQQ").unpack_from


def _snapshot_check(lowest: int, highest: int, running: Sequence[int]) -> None:
    """Refuse a snapshot unless its running transactions rise from `lowest` to below `highest`."""
    bounds = [lowest, *running, highest]
    if (
        not 0 < lowest <= highest < 1 << 64
        or any(map(operator.gt, bounds, bounds[1:]))
        or (running and running[-1] == highest)
    ):
        raise ValueError(f"the transactions of a snapshot do not rise from {lowest} to {highest}")


def _snapshot_text(raw: bytes) -> str:
    match = re.fullmatch(_SNAPSHOT, raw)
    if match is None:
        raise ValueError(f"{show_bytes(raw)} is no snapshot")
    lowest, highest, running = match.groups()
    _snapshot_check(int(lowest), int(highest), [int(xid) for xid in running.split(b",") if xid])
    return raw.decode()


def _snapshot_form(raw: bytes) -> str:
    if len(raw) < 20:
        raise ValueError(f"a binary snapshot has at least 20 bytes, found {len(raw)}")
    count, lowest, highest = _snapshot_head(raw)
    if len(raw) != 20 + 8 * count:
        raise ValueError(f"a binary snapshot of {count} transactions in {len(raw)} bytes")
    running = struct.unpack_from(f">{count}Q", raw, 20)
    _snapshot_check(lowest, highest, running)
    return f"{lowest}:{highest}:{','.join(map(str, running))}"


CODECS: dict[str, CodecOf] = {
    "bytea": lambda policies, encoding: Codec(
        _bytea_text, lambda raw: raw, lambda raw: "\\x" + raw.hex()
    ),
    "char": lambda policies, encoding: Codec(_char_text, _char_binary, _char_form),
    "bit": lambda policies, encoding: _bits("bit"),
    "varbit": lambda policies, encoding: _bits("varbit"),
    "tid": lambda policies, encoding: Codec(_tid_text, _tid_form, _tid_form),
    "pg_lsn": lambda policies, encoding: _PG_LSN,
    "macaddr": lambda policies, encoding: _MACADDR,
    "macaddr8": lambda policies, encoding: _MACADDR8,
    "snapshot": lambda policies, encoding: Codec(_snapshot_text, _snapshot_form, _snapshot_form),
    "uuid": lambda policies, encoding: Codec(
        _uuid_text, _uuid_binary, lambda raw: str(_uuid_binary(raw))
    ),
}
