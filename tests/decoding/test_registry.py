"""What a registry knows, how it travels, and what it does when types change."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.frames.make_frames import OID, insert, relation, type_frame

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.types import MOST_NESTED, column_type

if TYPE_CHECKING:
    from types import ModuleType

FIELDS = {"modifier": -1, "delimiter": ",", "extension": "", "labels": [], "fields": []}


def entry(oid: int, name: str, kind: str = "b", element: int = 0, **more: Any) -> dict[str, Any]:
    fields = {"oid": oid, "namespace": "public", "name": name, "kind": kind, "element": element}
    return {**FIELDS, **fields, **more}


def registry_of(*types: dict[str, Any]) -> pf.TypeRegistry:
    return pf.TypeRegistry.from_json(json.dumps({"format_version": 1, "types": types}))


def composite(oid: int, name: str, *fields: tuple[str, int]) -> dict[str, Any]:
    return entry(oid, name, "c", fields=[[field, type_id, -1] for field, type_id in fields])


MOOD = entry(16400, "mood", "e", labels=["sad", "ok", "happy"])
MOODS = entry(16401, "_mood", element=16400)
POINT = composite(16402, "point2", ("x", 23), ("y", 23))
POSITIVE = entry(16403, "positive", "d", 16404)
MONEY = entry(16404, "price", "d", 1700, modifier=655366)
BOXES = entry(16405, "_boxlike", element=16406)
BOX = entry(16406, "boxlike", delimiter=";")
SPAN = entry(16407, "span", "r", 16403)
SPANS = entry(16408, "spans", "m", 16407)
HSTORE = entry(16409, "hstore", extension="hstore")
ALL = (MOOD, MOODS, POINT, POSITIVE, MONEY, BOXES, BOX, SPAN, SPANS, HSTORE)


def negative(raw: bytes) -> int:
    return -int(raw)


def test_types_of_a_catalogue() -> None:
    registry = registry_of(*ALL)
    mood = registry.known(16400)
    assert (mood.kind, mood.namespace, mood.name) == ("enum", "public", "mood")
    assert mood.labels == ("sad", "ok", "happy")
    moods = registry.known(16401)
    assert (moods.kind, moods.element, moods.delimiter) == ("array", mood, ",")
    point = registry.known(16402)
    assert point.kind == "composite"
    assert [(name, field.name) for name, field in point.fields] == [("x", "int4"), ("y", "int4")]
    # A domain keeps its OID, and has the rest from what it is made of, the modifier too.
    positive = registry.known(16403)
    assert (positive.kind, positive.oid, positive.name) == ("base", 16403, "numeric")
    assert positive.modifier == 655366
    assert registry.known(16405).delimiter == ";"
    assert registry.known(16406).kind == "unknown"
    spans = registry.known(16408)
    assert spans.kind == "multirange"
    assert spans.element == registry.known(16407)
    assert registry.known(16407).element == positive
    hstore = registry.known(16409)
    assert hstore.entry is not None
    assert hstore.entry.codec == "hstore"
    assert registry.known(16410).kind == "unknown"
    assert len(registry.catalog) == len(ALL)
    with pytest.raises(TypeError):
        registry.catalog[1] = 2  # type: ignore[index]


def test_a_name_alone_makes_no_extension_type() -> None:
    own = registry_of(entry(16409, "vector"), entry(16410, "_vector", element=16409))
    assert column_type(16409, announced=("public", "vector"), registry=own).kind == "unknown"
    assert column_type(16410, announced=("public", "_vector"), registry=own).element is not None
    assert column_type(16409, announced=("public", "vector")).kind == "base"


def test_it_travels() -> None:
    registry = registry_of(*ALL)
    again = pf.TypeRegistry.from_json(registry.to_json())
    assert again == registry
    assert pf.TypeRegistry.from_json(registry.to_json().encode()) == registry
    assert again.catalog == registry.catalog
    registry.register("complex", text=negative, arrow="int64")
    copied = pickle.loads(pickle.dumps(registry))
    assert copied == registry != again
    assert copied.known(16401) == registry.known(16401)
    # Functions are not in JSON.
    assert pf.TypeRegistry.from_json(registry.to_json()) == again
    assert repr(copied) == "<TypeRegistry: 10 types of a catalogue, registered: complex>"
    assert repr(pf.TypeRegistry()) == "<TypeRegistry: 0 types of a catalogue, registered: none>"
    names = registry_of(entry(16400, "m\udce9 'ö"))
    assert pf.TypeRegistry.from_json(names.to_json()) == names
    with pytest.raises(TypeError):
        hash(registry)


def test_merging_takes_the_newer() -> None:
    registry = registry_of(MOOD, POINT)
    registry.register("a", text=negative)
    registry.register("b", text=negative)
    other = registry_of(composite(16402, "point2", ("x", 25)), MOODS)
    other.register("b", text=int)
    assert registry.merge(other) is registry
    assert set(registry.catalog) == {16400, 16401, 16402}
    assert registry.known(16402).fields[0][1].name == "text"
    assert registry.find(0, "s", "a") is not None
    found = registry.find(0, "s", "b")
    assert found is not None
    assert found.text is int
    loop = registry_of(entry(16500, "a", "d", 16501))
    loop.merge(registry_of(entry(16501, "b", "d", 16500)))
    assert loop.known(16500).kind == loop.known(16501).kind == "unknown"


BAD_JSON: list[Any] = [
    b"", "{", "[]", "null", "3", "{}", '{"format_version": 1}', '{"format_version": 1, "types": 3}',
    '{"format_version": 1, "types": [3]}', '{"format_version": 1, "types": [{}]}', b"\xff",
    "[" * 100_000,
    *[json.dumps({"format_version": 1, "types": [type_]}) for type_ in (
        {**MOOD, "oid": "16400"}, {**MOOD, "oid": True}, {**MOOD, "oid": 1 << 32},
        {**MOOD, "oid": 1.5}, {**MOOD, "name": 3}, {**MOOD, "namespace": None},
        {**MOOD, "labels": [1]}, {**MOOD, "labels": None}, {**MOOD, "kind": "p"},
        {**MOOD, "kind": []}, {**MOOD, "delimiter": ""}, {**MOOD, "delimiter": "{"},
        {**MOOD, "delimiter": "é"}, {**MOOD, "extra": 1}, {**POINT, "fields": [["x", 23]]},
        {**POINT, "fields": [["x", "23", -1]]}, {**POINT, "fields": [[1, 23, -1]]},
        {**POINT, "fields": [1]}, {**MOOD, "labels": "sad"}, {**POINT, "fields": ""},
        {**MOOD, "element": -5}, {**MOOD, "modifier": None},
    )],
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: str(text)[:90])
def test_json_that_is_no_catalogue(text: str | bytes) -> None:
    with expect_error(code="damaged"):
        pf.TypeRegistry.from_json(text)


def test_a_newer_format() -> None:
    with expect_error(code="not_supported"):
        pf.TypeRegistry.from_json('{"format_version": 2, "types": []}')
    with expect_error(code="not_supported"):
        pf.TypeRegistry.from_json('{"format_version": true, "types": []}')


def chain(length: int) -> list[dict[str, Any]]:
    return [entry(20_000 + i, f"d{i}", "d", 20_001 + i) for i in range(length)]


def test_nesting_has_an_end() -> None:
    deepest = [*chain(MOST_NESTED), entry(20_000 + MOST_NESTED, "end", "d", 23)]
    assert registry_of(*deepest[1:]).known(20_001).name == "int4"
    loops = [
        deepest,
        [*chain(5000)],
        [entry(16400, "a", "d", 16400)],
        [entry(16400, "a", "d", 16401), entry(16401, "b", "d", 16400)],
        [composite(16400, "a", ("x", 16401)), entry(16401, "_a", element=16400)],
        # Few types that are made of many.
        [composite(20_000 + i, f"c{i}", *[("f", 20_001 + i)] * 10) for i in range(20)],
    ]
    for types in loops:
        first = types[0]["oid"]
        array = entry(17_000, "_a", element=first)
        around = composite(17_001, "around", ("x", 23), ("y", 17_000))
        plain = entry(17_002, "plain", "e", labels=["x"])
        for order in ([*types, array, around, plain], [plain, around, array, *types[::-1]]):
            registry = registry_of(*order)
            # The type, and what is made of it, is unknown; all the others are as they were.
            for oid in (first, 17_000, 17_001):
                name = registry.catalog[oid].name
                found = column_type(oid, announced=("public", name), registry=registry)
                assert (found.kind, found.name) == ("unknown", name)
            assert registry.known(17_002).kind == "enum"
            assert pickle.loads(pickle.dumps(registry)).known(first).kind == "unknown"
    # Whatever is not too deep itself stays known.
    assert registry_of(*deepest).known(20_001).name == "int4"


def test_values_of_a_type_that_nests_too_deep(impl: ModuleType) -> None:
    types = [composite(20_000 + i, f"c{i}", ("x", 20_001 + i)) for i in range(MOST_NESTED)]
    last = composite(20_000 + MOST_NESTED, "last", ("x", 23))
    registry = registry_of(*types, last)
    deep = decoder_of(impl, registry, types[0])
    assert send(deep, b"((1))")[0] == "((1))"
    assert send(deep, b"\0\1", b"b")[0] == b"\0\1"
    assert send(decoder_of(impl, registry, types[-1]), b'("(1)")')[0] == ((1,),)


def test_from_connection_wants_a_connection() -> None:
    with pytest.raises(TypeError):
        pf.TypeRegistry.from_connection("dbname=postgres")
    psycopg = pytest.importorskip("psycopg")
    connection = object.__new__(psycopg.AsyncConnection)
    with pytest.raises(TypeError):
        pf.TypeRegistry.from_connection(connection)


def send(decoder: Any, value: bytes, kind: bytes = b"t") -> Any:
    return decoder.decode(testing.insert(OID, [(kind.decode(), value)])).new


def decoder_of(impl: ModuleType, registry: pf.TypeRegistry, type_: dict[str, Any]) -> Any:
    decoder = impl.Decoder(registry=registry)
    decoder.decode(type_frame(type_["oid"], type_["namespace"], type_["name"]))
    decoder.decode(relation("c", type_id=type_["oid"]))
    return decoder


def test_a_composite_that_was_altered(impl: ModuleType) -> None:
    registry = registry_of(POINT)
    decoder = decoder_of(impl, registry, POINT)
    assert send(decoder, b"(1,2)")[0] == (1, 2)
    row = send(decoder, b"(1,2,three)")
    with expect_error(pf.DecodeError, code="bad_value", column="c"):
        row.values()
    # Looked up again, the registry serves the decoders, and even the rows, that there are.
    newer = composite(16402, "point2", ("x", 23), ("y", 23), ("z", 25))
    registry.merge(registry_of(newer))
    assert row[0] == (1, 2, "three")
    assert row[0].z == "three"
    assert send(decoder, b"(4,5,six)")["c"].z == "six"
    with expect_error(pf.DecodeError, code="bad_value", column="c"):
        send(decoder, b"(1,2)").values()


def test_types_that_are_looked_up_later(impl: ModuleType) -> None:
    registry = pf.TypeRegistry()
    decoder = decoder_of(impl, registry, POINT)
    row = send(decoder, b"(1,2)")
    assert row[0] == "(1,2)"
    registry.merge(registry_of(POINT))
    assert row[0] == (1, 2)
    registry.register("point2", text=bytes.upper)
    assert row[0] == b"(1,2)"


def test_a_label_that_was_added(impl: ModuleType) -> None:
    decoder = decoder_of(impl, registry_of(MOOD), MOOD)
    for kind in (b"t", b"b"):
        assert send(decoder, b"elated", kind)[0] == "elated"
        assert send(decoder, b"elated", kind).text(0) == "elated"


@pytest.mark.parametrize(
    ("announced", "text", "binary"),
    [
        (("public", "other"), "(1,2)", b"\0\0"),
        (("elsewhere", "point2"), "(1,2)", b"\0\0"),
        (("", "int2"), None, 0),
        (("public", "citext"), "(1,2)", "\0\0"),
    ],
)
def test_a_stream_that_contradicts_the_catalogue(
    impl: ModuleType, announced: tuple[str, str], text: str | None, binary: Any
) -> None:
    """What the stream says of the type counts alone: the catalogue's is another one."""
    decoder = impl.Decoder(registry=registry_of(*ALL))
    for frame in (type_frame(16402, *announced), relation("c", type_id=16402)):
        decoder.decode(frame)
    if text is not None:
        assert send(decoder, b"(1,2)")[0] == text
    assert send(decoder, b"\0\0", b"b")[0] == binary
    # The same of a domain, which the stream calls by its base type.
    known = column_type(16403, announced=("", "numeric"), registry=registry_of(*ALL))
    assert known.modifier == 655366
    other = column_type(16403, announced=("", "int4"), registry=registry_of(*ALL))
    assert (other.name, other.modifier, other.oid) == ("int4", -1, 16403)


def test_without_a_type_message_the_catalogue_counts(impl: ModuleType) -> None:
    decoder = impl.Decoder(registry=registry_of(*ALL))
    decoder.decode(relation("c", type_id=16401))
    assert decoder.decode(insert(b"{sad,NULL}")).new[0] == ["sad", None]


def test_decoders_travel_with_their_registry(impl: ModuleType) -> None:
    decoder = pickle.loads(pickle.dumps(decoder_of(impl, registry_of(*ALL), POINT)))
    row = pickle.loads(pickle.dumps(send(decoder, b"(1,2)")))
    assert row[0].x == 1


def test_registered_types_go_first() -> None:
    registry = registry_of(*ALL)
    registry.register(16400, text=negative)
    registry.register("public.positive", text=negative)
    assert registry.known(16400).registered is not None
    element = registry.known(16401).element
    assert element is not None
    assert element.registered is not None
    assert registry.known(16403).registered is not None
    assert registry.known(16404).registered is None
    # A domain has what is registered for its base type.
    registry.register("numeric", text=int)
    found = registry.known(16404).registered
    assert found is not None
    assert found.text is int
    again = registry.known(16403).registered
    assert again is not None
    assert again.text is negative
    assert column_type(16999, announced=("", "numeric"), registry=registry).registered == found


@pytest.mark.parametrize("type_", ["", 0, -1, 1 << 32])
def test_what_no_type_has_is_not_registered(type_: int | str) -> None:
    with expect_error(code="unfit_input"):
        pf.TypeRegistry().register(type_, text=negative)


def test_a_bool_is_no_oid() -> None:
    with pytest.raises(TypeError):
        pf.TypeRegistry().register(True, text=negative)


def test_a_types_name_is_all_that_makes_it_an_extensions(impl: ModuleType) -> None:
    """A user's own type that bears the name of an extension's: the error says what to do."""
    for name, value in (("cube", b"(1,two)"), ("_cube", b'{"(1,two)"}')):
        for registry in (None, pf.TypeRegistry(), registry_of(*ALL)):
            decoder = impl.Decoder(registry=registry)
            decoder.decode(type_frame(17_000, "app", name))
            decoder.decode(relation("c", type_id=17_000))
            with expect_error(pf.DecodeError, code="bad_value", column="c") as caught:
                send(decoder, value).values()
            assert "TypeRegistry.from_connection" in str(caught.value)
        own = composite(17_001, "cube", ("x", 23), ("y", 25))
        array = entry(17_000, "_cube", element=17_001)
        types = [array, own] if name == "_cube" else [{**own, "oid": 17_000}]
        decoder = decoder_of(impl, registry_of(*types), types[0])
        assert send(decoder, value)[0] == ((1, "two") if name == "cube" else [(1, "two")])
    # Where the catalogue says that it is the extension's, nothing is in doubt.
    cube = entry(17_000, "cube", extension="cube")
    with pytest.raises(pf.DecodeError) as caught:
        send(decoder_of(impl, registry_of(cube), cube), b"(1,two)").values()
    assert "TypeRegistry.from_connection" not in str(caught.value)
    # Nor of a built-in type.
    decoder = impl.Decoder()
    decoder.decode(relation("c", type_id=23))
    with pytest.raises(pf.DecodeError) as caught:
        send(decoder, b"x").values()
    assert "TypeRegistry.from_connection" not in str(caught.value)
