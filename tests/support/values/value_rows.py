"""Rows of one value, for tests of how values are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.frames.make_frames import OID, relation, type_frame

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.types import BUILTIN_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

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
    return decoder.decode(testing.insert(OID, [(kind.decode(), value)])).new


def same(value: Any, expected: Any) -> bool:
    """Equal in type and to the last digit; NaN equals NaN."""
    return type(value) is type(expected) and repr(value) == repr(expected)


def check_both_forms(
    impl: ModuleType, type_name: str, text: bytes, binary: bytes, value: Any
) -> tuple[Any, Any]:
    """Every way to a value gives it, from its text and from its binary form; the two rows."""
    rows = row_of(impl, type_name, text), row_of(impl, type_name, binary, b"b")
    for row in rows:
        for decoded in (row[0], row["c"], row.values()[0], row.as_dict()["c"]):
            assert same(decoded, value)
    return rows


def check_refused(row: Any, value: bytes, *more: Callable[[], Any]) -> list[str]:
    """No way to the row's value, nor any of `more`, gives one, but its bytes stay; the errors."""
    sentences = []
    for attempt in (lambda: row[0], row.values, row.as_dict, lambda: list(row), *more):
        with pytest.raises(pf.DecodeError) as caught:
            attempt()
        assert (caught.value.code, caught.value.offset) == ("bad_value", 13)
        assert caught.value.column == "c"
        assert "public.t" in str(caught.value)
        sentences.append(str(caught.value))
    assert row.raw(0) == value
    return sentences
