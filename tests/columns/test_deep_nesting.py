"""Columns of types within types within types, down to where the catalogue's limit is and past it.

By both implementations, for all targets, from text and from binary: what the values are, and what
becomes of bytes that are none.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.nightly import nightly

pytest.importorskip("pyarrow", reason="reads the batches, and the twin makes them with it")

import pyarrow as pa
from support.columns.columnar import IMPLEMENTATIONS, chosen, differences
from support.frames.made_vectors import NULL, binary, insert, relation, text

import pgoutput_fast as pf
from pgoutput_fast.columnar.fields import TARGETS
from pgoutput_fast.decoding import _core, _pure
from pgoutput_fast.types import MOST_NESTED, CatalogType

INT4, TEXT = 23, 25
FIRST = 50_000
KINDS = ("composite", "array", "composite", "range", "multirange", "array")
"""What the levels are, the innermost first, over and over, without more ranges than a few."""


@dataclass(frozen=True)
class Level:
    """A type: its OID, what it is, and the type that it is made of."""

    oid: int
    kind: str
    inner: Level | None


LEAF = Level(INT4, "int4", None)


def chain(depth: int) -> tuple[Level, pf.TypeRegistry]:
    """A type of so many levels, and the catalogue that tells of it."""
    found, types, oid = LEAF, [], FIRST
    while oid - FIRST < depth:
        kind = KINDS[(oid - FIRST) % len(KINDS)] if oid - FIRST < 12 else KINDS[oid % 2]
        found = Level(oid, kind, found)
        assert found.inner is not None
        inner, name = found.inner.oid, f"t{oid}"
        if kind == "composite":
            fields = (("n", INT4, -1), ("of", inner, -1), ("t", TEXT, -1))
            types.append(CatalogType(oid, "public", name, "c", fields=fields))
        else:
            letter = {"array": "b", "range": "r", "multirange": "m"}[kind]
            types.append(CatalogType(oid, "public", name, letter, inner))
        oid += 1
    return found, pf.TypeRegistry._of(types)


# A value is None, an int, a list (of an array or multirange), (n, of, t) or (lower, upper).


def value_of(level: Level, chance: random.Random, stop: int) -> Any:
    """A value of the type, of which nothing is left `stop` levels below."""
    if level.inner is None:
        return chance.randrange(-5, 100)
    if stop <= 0:
        return {"composite": (None, None, None), "range": (None, None)}.get(level.kind, [])
    inner = value_of(level.inner, chance, stop - 1)
    if level.kind == "composite":
        return chance.choice((None, 7)), inner, chance.choice((None, "", 'a "\\, b', "ü"))
    if level.kind == "range":
        return (inner, None)
    others = [None] if level.kind == "array" else []
    return [inner, *others][: chance.randrange(1, 3)]


def shown(level: Level, value: Any) -> str:
    """As the server writes it."""
    if level.inner is None:
        return str(value)
    if level.kind == "array":
        words = ["NULL" if one is None else in_array(shown(level.inner, one)) for one in value]
        return f"{{{','.join(words)}}}"
    if level.kind == "multirange":
        return f"{{{','.join(shown(level.inner, one) for one in value)}}}"
    if level.kind == "range":
        ends = ["" if one is None else quoted(shown(level.inner, one), "()[],") for one in value]
        return f"{'(' if value[0] is None else '['}{','.join(ends)})"
    n, inner, label = value
    words = [
        "" if n is None else str(n),
        "" if inner is None else quoted(shown(level.inner, inner), "(),"),
        "" if label is None else quoted(label, "(),"),
    ]
    return f"({','.join(words)})"


def quoted(word: str, special: str) -> str:
    if word and not any(c in word for c in special + ' "\\'):
        return word
    doubled = word.replace("\\", "\\\\").replace('"', '""')
    return f'"{doubled}"'


def in_array(word: str) -> str:
    if word and not any(c in word for c in '{}," \\'):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def part(raw: bytes | None) -> bytes:
    return struct.pack(">i", -1) if raw is None else struct.pack(">i", len(raw)) + raw


def sent(level: Level, value: Any) -> bytes:
    """As the server sends it in binary format."""
    inner = level.inner
    if inner is None:
        return struct.pack(">i", value)
    if level.kind == "array":
        if not value:
            return struct.pack(">iiI", 0, 0, inner.oid)
        head = struct.pack(">iiIii", 1, None in value, inner.oid, len(value), 1)
        return head + b"".join(part(None if one is None else sent(inner, one)) for one in value)
    if level.kind == "multirange":
        return struct.pack(">i", len(value)) + b"".join(part(sent(inner, one)) for one in value)
    if level.kind == "range":
        flags = (8 if value[0] is None else 2) | (16 if value[1] is None else 0)
        return bytes([flags]) + b"".join(part(sent(inner, one)) for one in value if one is not None)
    n, of, label = value
    fields = [
        (INT4, None if n is None else struct.pack(">i", n)),
        (inner.oid, None if of is None else sent(inner, of)),
        (TEXT, None if label is None else label.encode()),
    ]
    return struct.pack(">i", 3) + b"".join(struct.pack(">I", o) + part(raw) for o, raw in fields)


def expected(level: Level, value: Any) -> Any:
    """As pyarrow gives it."""
    if value is None or level.inner is None:
        return value
    if level.kind in ("array", "multirange"):
        return [expected(level.inner, one) for one in value]
    if level.kind == "range":
        return {
            "lower": expected(level.inner, value[0]), "upper": expected(level.inner, value[1]),
            "lower_inc": value[0] is not None, "upper_inc": False, "empty": False,
        }  # fmt: skip
    return {"n": value[0], "of": expected(level.inner, value[1]), "t": value[2]}


def arrow_of(level: Level) -> pa.DataType:
    if level.inner is None:
        return pa.int32()
    inner = arrow_of(level.inner)
    if level.kind in ("array", "multirange"):
        return pa.list_(inner)
    if level.kind == "range":
        flags = [(name, pa.bool_()) for name in ("lower_inc", "upper_inc", "empty")]
        return pa.struct([("lower", inner), ("upper", inner), *flags])
    return pa.struct([("n", pa.int32()), ("of", inner), ("t", pa.utf8())])


def both_forms(level: Level, value: Any) -> Iterator[tuple[str, bytes]]:
    if quotes(level, value) <= 9:  # they double from level to level
        yield text(shown(level, value))
    yield binary(sent(level, value))


def quotes(level: Level, value: Any) -> int:
    """How many levels of a value there are, of those that are put in quotes."""
    if value is None or level.inner is None:
        return 0
    parts = {"composite": value[1:2]}.get(level.kind, value)
    below = [quotes(level.inner, one) for one in parts]
    return max(below, default=0) + (level.kind != "multirange")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("depth", [1, 2, 7, *nightly(3, 5, 8, 12, 20), MOST_NESTED])
def test_values(depth: int, target: str) -> None:
    level, registry = chain(depth)
    chance = random.Random(depth)
    values = [value_of(level, chance, stop) for stop in (depth, depth // 2, 3, 1, 0) * 2]
    rows = [(value, form) for value in values for form in both_forms(level, value)]
    assert {kind for _, (kind, _) in rows} == {"t", "b"}
    frames = [relation([("id", INT4), ("c", level.oid)])]
    frames += [insert(text("1"), form) for _, form in rows] + [insert(text("1"), NULL)]
    for implementation in IMPLEMENTATIONS:
        with chosen(implementation):
            decoder = pf.ColumnarDecoder(registry=registry, target=target)
            (batch,) = map(pa.record_batch, decoder.decode(frames))
            batch.validate(full=True)
        found = batch.column("after").field("c")
        assert found.type == arrow_of(level)
        assert found.to_pylist() == [*(expected(level, value) for value, _ in rows), None]
    assert not differences([frames], registry=registry, target=target)
    # And the messages: text and binary are the same.
    for module in (_core, _pure):
        messages = [*module.Decoder(registry=registry).decode_many(frames)][1:]
        seen: dict[str, Any] = {}
        for (value, _), message in zip(rows, messages, strict=False):
            given = repr(message.new["c"])
            assert seen.setdefault(repr(value), given) == given


@pytest.mark.parametrize("target", TARGETS)
def test_past_the_limit_a_type_is_unknown(target: str) -> None:
    for depth in (MOST_NESTED + 1, MOST_NESTED + 2, 500):
        level, registry = chain(depth)
        frame = relation([("c", level.oid)])
        value = value_of(level, random.Random(0), 3)
        for form, kind in ((text(shown(level, value)), pa.utf8()), (binary(b"\0"), pa.binary())):
            for implementation in IMPLEMENTATIONS:
                with chosen(implementation):
                    decoder = pf.ColumnarDecoder(registry=registry, target=target)
                    (batch,) = map(pa.record_batch, decoder.decode([frame, insert(form)]))
                found = batch.column("after").field("c")
                _, raw = form
                assert found.type == kind
                assert found.to_pylist() == [raw.decode() if kind == pa.utf8() else raw]


def test_ranges_of_ranges_double() -> None:
    """A column has a range's subtype twice: so many parts are too many."""
    for depth, known in ((8, True), (15, True), (16, False), (31, False)):
        types = [
            CatalogType(FIRST + n, "public", f"r{n}", "r", FIRST + n - 1 if n else INT4)
            for n in range(depth)
        ]
        registry = pf.TypeRegistry._of(types)
        assert (registry.known(FIRST + depth - 1).kind == "range") is known
        if depth == 8 or not known:
            frames = [relation([("c", FIRST + depth - 1)]), insert(text("empty"))]
            assert not differences([frames], registry=registry)


# --- what is no value -----------------------------------------------------------------------------

MANY = 100_000
ENDLESS = [
    *(bytes([sign]) * MANY for sign in b'{}()["\\, '),
    b"{," * MANY,
    b"(," * MANY,
    b"{" * MANY + b"}" * MANY,
    b"(" * MANY + b")" * MANY,
    b'{"' * MANY,
    b'("' * MANY,
    b'["' * MANY,
    b"{" + b'"' * MANY + b"}",
    b"(" + b'"' * MANY + b")",
    b"(" + b'"' * (MANY + 1) + b")",
    b"{" + b"\\" * (MANY + 1) + b"}",
    b'{"' + b"\\" * MANY + b'"}',
    b'("' + b"\\" * (MANY + 1) + b'",)',
    b"[1:1]" * MANY + b"={1}",
    b"{" + b"{}," * MANY + b"}",
    b"{" + b"NULL," * MANY + b"NULL}",
    b"(" + b"," * MANY + b")",
    b"{" + b"empty," * MANY + b"empty}",
]  # fmt: skip


def number(value: int) -> bytes:
    return struct.pack(">I", value & 0xFFFFFFFF)


def hostile_numbers(raw: bytes, chance: random.Random, count: int) -> Iterator[bytes]:
    """The value with another number of four bytes: a length, a count, an OID, a dimension."""
    for _ in range(count):
        at = chance.randrange(max(len(raw) - 3, 1))
        for other in chance.sample(
            (-1, -2, -(2**31), 2**31 - 1, 0, 1, 6, 7, 2**16, len(raw), len(raw) - at - 4), 3
        ):
            yield raw[:at] + number(other) + raw[at + 4 :]


def hostile_texts(value: bytes, chance: random.Random, count: int) -> Iterator[bytes]:
    """The value without an end, without its quotes, with one sign more or less."""
    for _ in range(count):
        at = chance.randrange(len(value) + 1)
        sign = bytes([chance.choice(b'{}[]()",\\ N1')])
        yield value[:at]
        yield value[:at] + value[at + 1 :]
        yield value[:at] + sign + value[at:]
        yield value[:at] + sign * 3 + value[at + 1 :]
    yield value.replace(b'"', b"")
    yield value.replace(b'"', b'""')
    yield value.replace(b"\\", b"")


def refused_alike(
    level: Level, registry: pf.TypeRegistry, forms: list[tuple[str, bytes]], target: str
) -> int:
    """How many of the values are refused: by both engines and by the messages at the same place."""
    frames = [relation([("id", INT4), ("c", level.oid)])]
    frames += [insert(text("1"), form) for form in forms]
    policies = pf.Policies(arrays=1)
    options: dict[str, Any] = {"registry": registry, "target": target, "policies": policies}
    found = differences([frames], on_error="collect", **options)
    assert not found, found
    with chosen("cython"):
        decoder = pf.ColumnarDecoder(on_error="collect", **options)
        given = [pa.record_batch(batch) for batch in decoder.decode(frames)]
        refused = {bad.frame: bad.error for bad in decoder.errors}
    for batch in given:
        batch.validate(full=True)
    # The value of a frame begins behind its length, that of id behind another.
    offsets = {(error.code, error.offset) for error in refused.values()}
    assert offsets <= {(code, 19) for code in ("bad_value", "bad_encoding", "out_of_range")}
    for module in (_core, _pure):
        messages = [*module.Decoder(policies, registry=registry).decode_many(frames)]
        for at, message in enumerate(messages[1:], 1):
            error = error_of(message)
            mine = refused.get(at)
            if error is None:
                # What alone messages have: arrays of another shape.
                assert mine is None or mine.code == "out_of_range"
            else:
                assert mine is not None
                assert (error.code, error.offset) == (mine.code, mine.offset)
                assert str(mine) == f"frame {at}: {error}"
    return len(refused)


def error_of(message: Any) -> pf.DecodeError | None:
    try:
        message.new.values()
    except pf.DecodeError as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, *nightly(2, 3, 4, 6, 7), MOST_NESTED])
def test_endless_texts(depth: int) -> None:
    level, registry = chain(depth)
    target = TARGETS[depth % 3]
    assert refused_alike(level, registry, [text(one) for one in ENDLESS], target) > 20
    assert refused_alike(level, registry, [binary(one) for one in ENDLESS], target) > 20


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("depth", [2, *nightly(1, 3, 5, 8, 12, 20, MOST_NESTED)])
def test_hostile_values(depth: int, target: str) -> None:
    level, registry = chain(depth)
    chance = random.Random(f"{depth} {target}")
    value = value_of(level, chance, depth)
    raw = sent(level, value)
    forms = [binary(one) for one in hostile_numbers(raw, chance, 40)]
    forms += [binary(raw[: chance.randrange(len(raw))]) for _ in range(10)]
    word = shown(level, value_of(level, chance, min(depth, 9)))
    forms += [text(one) for one in hostile_texts(word.encode(), chance, 25)]
    assert refused_alike(level, registry, forms, target) > 100


@pytest.mark.parametrize("depth", [3, 8, pytest.param(MOST_NESTED, marks=pytest.mark.slow)])
def test_hostile_values_at_every_level(depth: int) -> None:
    """What is wrong stands in the innermost value, or anywhere above it."""
    level, registry = chain(depth)
    wrong: list[bytes] = []

    def spoil(at: Level, inner: bytes) -> bytes:
        """A value of the level around the bytes of the one below."""
        assert at.inner is not None
        if at.kind == "array":
            return struct.pack(">iiIii", 1, 0, at.inner.oid, 1, 1) + part(inner)
        if at.kind == "multirange":
            return struct.pack(">i", 1) + part(inner)
        if at.kind == "range":
            return bytes([2 | 16]) + part(inner)
        of = struct.pack(">I", at.inner.oid) + part(inner)
        return struct.pack(">iIi", 3, INT4, -1) + of + struct.pack(">Ii", TEXT, -1)

    levels = [level]
    while levels[-1].inner is not None:
        levels.append(levels[-1].inner)
    for n, at in enumerate(levels):
        good = sent(at, value_of(at, random.Random(n), depth))
        for bad in (
            b"", good[:-1], good + b"\0", number(-1) + good[4:], number(2**31 - 1) + good[4:],
            number(7) + good[4:], b"\xff" + good[1:], b"\1" * len(good), bytes(len(good)),
            struct.pack(">iiI", 6, 0, INT4) + struct.pack(">ii", 2**16, 1) * 6,
            struct.pack(">iiIii", 1, 0, INT4, -1, 1), struct.pack(">iiIii", 1, 0, INT4, 0, 1),
        ):  # fmt: skip
            raw = bad
            for above in levels[:n][::-1]:
                raw = spoil(above, raw)
            wrong.append(binary(raw))
    for target in TARGETS:
        refused = refused_alike(level, registry, wrong, target)
        assert len(wrong) * 3 // 4 < refused
