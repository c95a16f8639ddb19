"""Values of mutated bytes: the compiled paths give what the Python functions give, or refuse alike.

Seeded by type and format. First the types that have compiled paths, from what is unusual of them;
then every type of a server, from the values of a recorded stream.
"""

from __future__ import annotations

import ast
import collections
import random
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from support import paths
from support.frames.make_frames import OID, relation
from support.values.catalog_types import registry_of

import pgoutput_fast as pf
from pgoutput_fast import testing

if TYPE_CHECKING:
    from types import ModuleType

# OID: what a server sends, as text and as binary
SEEDS: dict[str, tuple[int, list[bytes], list[bytes]]] = {
    "bool": (16, [b"t", b"f"], [b"\0", b"\1"]),
    "int2": (21, [b"-32768", b"32767", b"0"], [b"\x80\0", b"\x7f\xff"]),
    "int4": (23, [b"-2147483648", b"2147483647", b"-1"], [b"\x80\0\0\0", b"\xff" * 4]),
    "int8": (
        20,
        [b"-9223372036854775808", b"9223372036854775807", b"999999999999999999"],
        [b"\x80" + bytes(7), b"\xff" * 8],
    ),
    "oid": (26, [b"4294967295", b"0", b"16384"], [b"\xff" * 4, bytes(4)]),
    "float8": (
        701,
        [b"0.1", b"-1.5e-07", b"9007199254740993", b"1.7976931348623157e+308", b"-0", b"0.30000001",
         b"123456789012345.6", b"5e-324", b"0.0001", b"NaN", b"-Infinity",
         b"12345678901234567890123", b"0.00000000000000000000001234"],
        [struct.pack(">d", 0.1), b"\x7f\xf0" + bytes(6), b"\xff" * 8],
    ),
    "numeric": (
        1700,
        [b"-12345.6780", b"0", b"0.00", b"NaN", b"1" * 40, b"0.00001", b"-0.5", b"9" * 19,
         b"99999999999.99999999", b"-0.00", b"-1000000000000000.0000"],
        [struct.pack(">hhHH3h", 3, 1, 0x4000, 3, 1, 2345, 6780),
         struct.pack(">hhHHh", 1, -1, 0, 5, 1), struct.pack(">hhHH", 0, 0, 0, 2),
         struct.pack(">hhHH", 0, 0, 0xC000, 0), struct.pack(">hhHHh", 1, 7, 0, 0, 12),
         struct.pack(">hhHH8h", 8, 7, 0, 0, *range(1, 9)), struct.pack(">hhHHh", 1, 3, 0, 30, 9),
         struct.pack(">hhHHh", 1, -8, 0, 32, 1), struct.pack(">hhHHh", 1, -2, 0, 8, 9999),
         struct.pack(">hhHH5h", 5, 4, 0x4000, 0, 999, *[9999] * 4),
         struct.pack(">hhHH5h", 5, 4, 0, 0, 1000, 0, 0, 0, 1),
         struct.pack(">hhHH5h", 5, 0, 0, 15, 3, *[3330] * 4),
         struct.pack(">hhHHh", 1, -4000, 0, 16002, 100)],
    ),
    "text": (25, [b"plain", "größe".encode(), b""], [b"plain", b"\xff", b"a"]),
    "bytea": (17, [b"\\x00ff", b"a\\\\b\\001"], [b"\x00\xff", b""]),
    "uuid": (
        2950,
        [b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", b"A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"],
        [bytes(range(16)), b"\xff" * 16],
    ),
    "date": (
        1082,
        [b"2024-02-29", b"1900-02-28", b"2000-02-29", b"0001-01-01", b"9999-12-31", b"infinity",
         b"0044-03-15 BC", b"10000-01-01"],
        [struct.pack(">i", days) for days in (0, -1, 59, 2921939, 2921940, -730119, -730120,
                                              0x7FFFFFFF, -0x80000000, -36525, 36524, 1461)],
    ),
    "time": (
        1083,
        [b"23:59:59.999999", b"00:00:00", b"24:00:00", b"12:34:56.7"],
        [struct.pack(">q", t) for t in (0, 86_399_999_999, 86_400_000_000, -1, 45_296_700_000)],
    ),
    "timestamp": (
        1114,
        [b"2024-02-29 12:00:00.5", b"1999-12-31 23:59:59.999999", b"-infinity",
         b"0001-01-01 00:00:00"],
        [struct.pack(">q", t) for t in (0, -1, 762_523_200_500_000, 2**63 - 1, -(2**63),
                                        252_455_615_999_999_999, 252_455_616_000_000_000,
                                        -63_082_281_600_000_000, -63_082_281_600_000_001)],
    ),
    "timestamptz": (
        1184,
        [b"2024-02-29 12:00:00.5+00", b"2024-02-29 17:45:00+05:45", b"9999-12-31 23:59:59-01",
         b"0001-01-01 00:00:00+00", b"12024-01-01 00:00:00+00"],
        [struct.pack(">q", t) for t in (0, -1, 762_523_200_500_000, 2**63 - 1)],
    ),
    "jsonb": (3802, [b'{"a": 1}', b"[]"], [b'\1{"a": 1}', b"\1"]),
    "point": (600, [b"(1,2)"], [bytes(16)]),
}  # fmt: skip
CASES_EACH = 1500
ALPHABET = b"0123456789-+.: eEtfNaInxX_,;T\\\0\xff\x80BC{}()[]\"'/=<>&|!*\n"
EDGES = (-1, 0, 1, 2, 7, 255, 65535, 2**24, 2**28, 2**31 - 1, -(2**31), -5)
NESTING = (b"{", b"(", b"[", b'{"', b'("', b"\\", b'""', b"9", b"[1:1]", b"!", b"( ", b"[1,2),")


def mutated(rng: random.Random, value: bytes, binary: bool) -> bytes:
    """`value` with one to three places changed, or as it is."""
    data = bytearray(value)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        byte = rng.randrange(256) if binary else rng.choice(ALPHABET)
        match rng.randrange(8):
            case 0:
                data.insert(at, byte)
            case 1 if data:
                del data[at - 1]
            case 2 if data:
                data[at - 1] ^= 1 << rng.randrange(8)
            case 3 if data:
                del data[at:]
            case 4 if binary:  # a length or count
                data[at : at + 4] = struct.pack(">i", rng.choice(EDGES))
            case 5 if binary:
                data[at : at + 2] = struct.pack(">H", rng.choice(EDGES) & 0xFFFF)
            case 5:
                data[at:at] = rng.choice(NESTING) * rng.choice((1, 2, 40, 500))
            case 6 if data:  # a part once more
                start = rng.randrange(len(data))
                data[at:at] = data[start : start + rng.choice((4, 8, 16))]
            case _ if data:
                data[at - 1] = byte
    return bytes(data)


def decoder_of(
    module: ModuleType, oid: int, policies: pf.Policies, registry: pf.TypeRegistry | None = None
) -> Any:
    """A decoder that knows a relation with one column of the type."""
    decoder = module.Decoder(policies, registry=registry)
    decoder.decode(relation("c", type_id=oid))
    return decoder


def outcome(decoder: Any, kind: bytes, value: bytes) -> Any:
    row = decoder.decode(testing.insert(OID, [(kind.decode(), value)])).new

    def attempt(function: Any) -> Any:
        try:
            result = function()
        except pf.DecodeError as error:
            return error.code, error.offset, str(error)
        return type(result), repr(result)

    return attempt(lambda: row[0]), attempt(row.values), attempt(row.texts)


POLICIES = [
    pf.Policies(),
    pf.Policies(infinity="text", out_of_range="clamp", json="parse"),
    pf.Policies(infinity="null", out_of_range="null"),
    pf.Policies(infinity="clamp", out_of_range="text"),
]


@pytest.mark.everyday(
    "text-bool",
    "text-float8",
    "text-timestamp",
    "binary-numeric",
    "binary-jsonb",
    "binary-timestamptz",
)
@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize("kind", [b"t", b"b"], ids=["text", "binary"])
def test_both_give_the_same(both: tuple[ModuleType, ModuleType], name: str, kind: bytes) -> None:
    oid, texts, binaries = SEEDS[name]
    seeds = texts if kind == b"t" else binaries
    rng = random.Random(f"{name}-{kind!r}")
    decoders = [[decoder_of(module, oid, policies) for module in both] for policies in POLICIES]
    refused = 0
    for case in range(CASES_EACH):
        value = seeds[case] if case < len(seeds) else mutated(rng, rng.choice(seeds), kind == b"b")
        one, other = decoders[case % len(POLICIES)]
        compiled = outcome(one, kind, value)
        assert compiled == outcome(other, kind, value), (case, value)
        refused += isinstance(compiled[0][0], str)
    # Both outcomes occur, or nothing was compared. (Any bytes are a bytea, a text maybe.)
    if name not in {"text", "bytea", "point"}:
        assert CASES_EACH // 20 < refused < CASES_EACH


RECORDED = paths.DATA / "final"
MUTANTS = 12
"""Of each type, format and policies."""
PEAK = 8 << 20
"""Bytes that values of less than 20 kB may take; a numeric alone can have 147,455 digits."""


@pytest.mark.slow
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_both_give_the_same_of_every_type(
    both: tuple[ModuleType, ModuleType], binary: bool
) -> None:
    pytest.importorskip("pyarrow", reason="captures are Arrow files")
    from support.recordings.corpus_files import captures

    name = "v1_bin" if binary else "v1_text"
    (capture,) = captures(RECORDED, instance="18", scenario="all_types", optionset=name)
    assert capture.truth is not None
    registry = registry_of(capture.truth)
    kind = b"b" if binary else b"t"
    seeds: dict[int, set[bytes]] = collections.defaultdict(set)
    for message in both[1].Decoder(registry=registry).decode_many(f for _, f in capture.rows()):
        if message.tag in "IU":
            new = message.new
            for at, column in enumerate(message.relation.columns):
                if new.kind(at) == kind.decode() and len(new.raw(at)) < 3000:
                    seeds[column.type_id].add(new.raw(at))
    assert len(seeds) >= 200
    outcomes = collections.Counter[str]()
    for oid, values in sorted(seeds.items()):
        rng = random.Random(f"{oid}-{binary}")
        sound = sorted(values)
        for policies in POLICIES:
            one, other = (decoder_of(module, oid, policies, registry) for module in both)
            traced = policies == pf.Policies()  # it takes four times as long
            if traced:
                tracemalloc.start()
            try:
                for _ in range(MUTANTS):
                    value = mutated(rng, rng.choice(sound), binary)
                    compiled = outcome(one, kind, value)
                    assert compiled == outcome(other, kind, value), (oid, value)
                    first, _, texts = compiled
                    outcomes[first[0] if isinstance(first[0], str) else "a value"] += 1
                    if isinstance(first[0], type) and isinstance(texts[0], type) and binary:
                        # The text that it would have had is one of the same value.
                        (text,) = ast.literal_eval(texts[1])
                        assert outcome(one, b"t", text.encode())[0] == first, (oid, value)
                        outcomes["read again"] += 1
                if traced:
                    assert tracemalloc.get_traced_memory()[1] < PEAK, oid
            finally:
                tracemalloc.stop()
    assert min(outcomes["a value"], outcomes["bad_value"]) > 2000
    assert {"bad_encoding", "out_of_range"} < set(outcomes)
    assert (outcomes["read again"] > 2000) is binary
