"""Rows of one value, for tests of how values are read."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from make_frames import OID, relation, type_frame

from pgoutput_fast.types import BUILTIN_TYPES

if TYPE_CHECKING:
    from types import ModuleType

    import pgoutput_fast as pf

OIDS = {entry.name: entry.oid for entry in BUILTIN_TYPES}
_EXTENSION_OID = 16500


def row_of(
    impl: ModuleType,
    type_: str | int,
    value: bytes,
    kind: bytes = b"t",
    policies: pf.Policies | None = None,
    encoding: str = "utf-8",
    registry: pf.TypeRegistry | None = None,
) -> Any:
    """A tuple of the column ``c`` with `value`; named types that are not built in are announced."""
    decoder = impl.Decoder(policies, encoding, registry)
    oid = type_ if isinstance(type_, int) else OIDS.get(type_, _EXTENSION_OID)
    if isinstance(type_, str) and oid == _EXTENSION_OID:
        decoder.decode(type_frame(oid, "public", type_))
    decoder.decode(relation("c", type_id=oid))
    body = struct.pack(">h", 1) + kind + struct.pack(">i", len(value)) + value
    return decoder.decode(b"I" + struct.pack(">I", OID) + b"N" + body).new


def same(value: Any, expected: Any) -> bool:
    """Equal in type and to the last digit; NaN equals NaN."""
    return type(value) is type(expected) and repr(value) == repr(expected)
