"""bytea, "char" and uuid."""

from __future__ import annotations

import binascii
import re
import uuid

from .base import Codec, CodecOf, expect_size, show_bytes, wrong_size


def _bytea_text(raw: bytes) -> bytes:
    if raw[:2] == b"\\x":
        try:
            if len(raw) % 2 == 0:
                return bytes.fromhex(raw[2:].decode("latin-1"))
        except ValueError:
            pass
        raise ValueError(f"{show_bytes(raw)} is no bytea in hex format")
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
_UUID_CLASS = uuid.UUID
_UNKNOWN_SAFETY = uuid.SafeUUID.unknown


def _make_uuid(value: int) -> uuid.UUID:
    """uuid.UUID(int=value) without its constructor, which takes three times as long."""
    made = _new(_UUID_CLASS)
    _set(made, "int", value)
    _set(made, "is_safe", _UNKNOWN_SAFETY)
    return made


CODECS: dict[str, CodecOf] = {
    "bytea": lambda policies, encoding: Codec(
        _bytea_text, lambda raw: raw, lambda raw: "\\x" + raw.hex()
    ),
    "char": lambda policies, encoding: Codec(_char_text, _char_binary, _char_form),
    "uuid": lambda policies, encoding: Codec(
        _uuid_text, _uuid_binary, lambda raw: str(_uuid_binary(raw))
    ),
}
