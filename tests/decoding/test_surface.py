"""What both implementations promise: names, signatures, docs, and what every message can do.

The class table is written down in class_table.py, and nowhere derived from the package.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import operator
import os
import pickle
import re
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import pytest
from support.expected_errors import expect_error
from support.frames.class_table import FIELDS, PROPERTIES, TAGS, TUPLE_METHODS
from support.frames.made_vectors import (
    NULL,
    SAME,
    STOP,
    TWO,
    WELL_FORMED,
    binary,
    insert,
    relation,
    row,
    start,
    text,
    tuple_data,
)

import pgoutput_fast as pf
from pgoutput_fast.decoding import _pure

HOT = ("Begin", "Commit", "Insert", "Update", "Delete")
SHARED = tuple(name for name in FIELDS if name not in HOT)
TWINS = (*HOT, "TupleData", "Decoder", "decode")

EXAMPLES: dict[str, tuple[bytes, bool]] = {
    "Begin": WELL_FORMED["begin"],
    "Commit": WELL_FORMED["commit"],
    "Origin": WELL_FORMED["origin"],
    "Relation": WELL_FORMED["relation"],
    "Type": WELL_FORMED["type"],
    "Insert": WELL_FORMED["insert"],
    "Update": WELL_FORMED["update-key"],
    "Delete": WELL_FORMED["delete-key"],
    "Truncate": WELL_FORMED["truncate"],
    "LogicalMessage": WELL_FORMED["message"],
    "StreamStart": WELL_FORMED["stream-start"],
    "StreamStop": WELL_FORMED["stream-stop"],
    "StreamCommit": WELL_FORMED["stream-commit"],
    "StreamAbort": WELL_FORMED["stream-abort-parallel"],
    "BeginPrepare": WELL_FORMED["begin-prepare"],
    "Prepare": WELL_FORMED["prepare"],
    "StreamPrepare": WELL_FORMED["stream-prepare"],
    "CommitPrepared": WELL_FORMED["commit-prepared"],
    "RollbackPrepared": WELL_FORMED["rollback-prepared"],
}
each_class = pytest.mark.parametrize("name", FIELDS)

PUBLIC = {
    *FIELDS,
    "BadFrame", "ChangeBatch", "ChangeStream", "Column", "ColumnarDecoder", "DecodeError",
    "Decoder", "ErrorBatch", "Event", "Events", "FALLBACK_REASON", "FrameBatch", "IMPLEMENTATION",
    "PgOutputError", "Policies", "TupleData", "UNCHANGED", "decode", "decode_batch", "format_lsn",
    "json_default", "parse_lsn", "__version__",
}  # fmt: skip


def example(impl: ModuleType, name: str) -> Any:
    """A message of the class, from a decoder that knows its relation."""
    frame, in_stream = EXAMPLES[name]
    decoder = impl.Decoder()
    decoder.decode(relation(TWO))
    if in_stream:
        decoder.decode(start(7))
    return decoder.decode(frame)


def public_names(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


# --- the twins ----------------------------------------------------------------------------------


def test_the_package_has_every_promised_name() -> None:
    assert set(pf.__all__) >= PUBLIC
    assert [name for name in pf.__all__ if not hasattr(pf, name)] == []
    assert sorted(pf.__all__) == sorted(set(pf.__all__))


def alone(code: str, implementation: str) -> str:
    """What code prints that has a process, and an implementation, of its own."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        env={**os.environ, "PGOUTPUT_FAST_IMPL": implementation},
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_tab_completion_shows_what_users_import() -> None:
    """What is exported, and the submodules for users before they are imported too.

    Those that need an extra are shown where it is installed: without it, help() would fail at them.
    """
    code = """
import sys
for name in ("psycopg", "pyarrow", "pyspark"):  # no extra is installed
    sys.modules[name] = None
import inspect
import types
import pgoutput_fast as pf
always = {"catalog", "embedded", "segments", "testing", "transactions", "transcode"}
assert set(dir(pf)) - set(pf.__all__) == always, dir(pf)
assert always <= dict(inspect.getmembers(pf, inspect.ismodule)).keys()
for name in ("pandas", "psycopg", "pyarrow", "pyspark"):  # as if all of them were installed
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = object()
assert set(dir(pf)) - set(pf.__all__) == {*always, "apply", "replication", "spark"}
sys.modules["pandas"] = None
assert set(dir(pf)) - set(pf.__all__) == {*always, "apply", "replication"}
exec("from pgoutput_fast import *")
print(pf.embedded.__name__, pf.catalog.__name__, pf.transcode.__name__)
assert not hasattr(pf, "Dekoder")
"""
    printed = alone(code, "python")
    assert printed.split() == [
        "pgoutput_fast.embedded", "pgoutput_fast.catalog", "pgoutput_fast.transcode",
    ]  # fmt: skip


MODULES_OF_CLASSES = """
import pickle
import pgoutput_fast as pf
import pgoutput_fast.errors
for name in pf.__all__:
    thing = getattr(pf, name)
    if callable(thing):
        print(name, thing.__module__)
        assert pickle.loads(pickle.dumps(thing)) is thing
assert pickle.loads(b"cpgoutput_fast.errors\\nDecodeError\\n.") is pf.DecodeError
"""


@pytest.mark.parametrize("implementation", ["cython", "python"])
def test_what_is_public_says_where_it_is_imported_from(implementation: str) -> None:
    """What help() and an editor show of a class is not the module that it is written in."""
    printed = alone(MODULES_OF_CLASSES, implementation)
    found = dict(line.split() for line in printed.splitlines())
    assert set(found) >= PUBLIC - {"FALLBACK_REASON", "IMPLEMENTATION", "UNCHANGED", "__version__"}
    assert set(found.values()) == {"pgoutput_fast"}


def test_annotations_of_policies_can_be_evaluated() -> None:
    """Their names are those of the module that the class is written in."""
    hints = typing.get_type_hints(pf.Policies)
    assert hints["infinity"] == Literal["error", "null", "clamp", "text"]


def test_the_package_shows_the_chosen_implementation() -> None:
    chosen = sys.modules[
        {"cython": "pgoutput_fast.decoding._core", "python": "pgoutput_fast.decoding._pure"}[
            pf.IMPLEMENTATION
        ]
    ]
    assert chosen.IMPLEMENTATION == pf.IMPLEMENTATION
    for name in TWINS:
        assert getattr(pf, name) is getattr(chosen, name)


def test_the_twins_have_the_same_names(both: tuple[ModuleType, ModuleType]) -> None:
    for module in both:
        assert set(TWINS) <= public_names(module)
    assert [module.IMPLEMENTATION for module in both] == ["cython", "python"]


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_alike(both: tuple[ModuleType, ModuleType], name: str) -> None:
    compiled, plain = (getattr(module, name) for module in both)
    assert compiled is not plain
    assert compiled.__name__ == plain.__name__ == name
    # from 3.13 on the interpreter takes the indentation out of docstrings, Cython does not
    assert inspect.getdoc(compiled) == inspect.getdoc(plain)
    assert inspect.getdoc(compiled)
    if not inspect.isclass(plain):
        check_signatures(compiled, plain)
        return
    assert public_names(compiled) == public_names(plain)
    assert special_names(compiled) == special_names(plain)
    assert getattr(compiled, "__match_args__", None) == getattr(plain, "__match_args__", None)
    assert getattr(compiled, "tag", None) == getattr(plain, "tag", None)
    for member in public_names(plain):
        one, other = inspect.getattr_static(compiled, member), inspect.getattr_static(plain, member)
        if member == "tag":
            continue
        assert inspect.getdoc(getattr(compiled, member)) == inspect.getdoc(getattr(plain, member))
        assert inspect.getdoc(getattr(plain, member)), member
        is_property = isinstance(other, property)
        assert is_property == (isinstance(one, property) or inspect.isgetsetdescriptor(one)), member
        if not is_property:
            check_signatures(getattr(compiled, member), getattr(plain, member))


COLUMNAR = {
    "headers": ("decode_batch",),
    "engine": ("ColumnEngine",),
    "batch": ("ChangeBatch", "export_stream"),
    "export": ("export",),
}
FIELDS_OF_C = {"binary", "layout", "messages", "num_rows", "state"}  # they have no docstrings


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in COLUMNAR for name in COLUMNAR[module]]
)
def test_columnar_twins_are_alike(module: str, name: str) -> None:
    compiled, plain = (
        getattr(importlib.import_module(f"pgoutput_fast.columnar.{prefix}{module}"), name)
        for prefix in ("_", "_pure_")
    )
    assert compiled is not plain
    assert inspect.getdoc(compiled) == inspect.getdoc(plain)
    assert inspect.getdoc(compiled)
    if not inspect.isclass(plain):
        check_signatures(compiled, plain)
        return
    members = public_names(plain) - FIELDS_OF_C
    assert public_names(compiled) - FIELDS_OF_C == members
    members |= {member for member in dir(plain) if member.startswith("__arrow")}
    if name == "ChangeBatch":
        assert special_names(compiled) == special_names(plain)
    for member in members:
        one, other = inspect.getattr_static(compiled, member), inspect.getattr_static(plain, member)
        assert inspect.getdoc(getattr(compiled, member)) == inspect.getdoc(getattr(plain, member))
        assert inspect.getdoc(getattr(plain, member)) or name == "Engine", member
        if inspect.isroutine(other):
            arguments = [
                [(p.name, p.default) for p in inspect.signature(method).parameters.values()]
                for method in (one, other)
            ]
            assert arguments[0] == arguments[1], member


OPERATORS = (
    "__eq__", "__hash__", "__len__", "__getitem__", "__iter__", "__contains__", "__reversed__",
    "__reduce__", "__copy__", "__deepcopy__", "__repr__", "__call__", "__bool__", "__add__",
    "__enter__", "__next__", "__lt__",
)  # fmt: skip


def special_names(cls: type) -> set[str]:
    """The operators that the class, or a base of its own, defines; not those of object."""
    # A slot of a C type comes with the operators of its family: __ne__ and __lt__ beside __eq__.
    return {
        name
        for name in OPERATORS
        if name != "__lt__" and getattr(cls, name, None) is not getattr(object, name, None)
    }


def check_signatures(compiled: Any, plain: Any) -> None:
    one, other = inspect.signature(compiled), inspect.signature(plain)
    # a method in C takes no self by keyword, which nobody gives
    assert [(p.name, p.name == "self" or p.kind, p.default) for p in one.parameters.values()] == [
        (p.name, p.name == "self" or p.kind, p.default) for p in other.parameters.values()
    ]
    # annotations are strings in both, where Cython keeps them
    for name, parameter in one.parameters.items():
        if parameter.annotation is not inspect.Parameter.empty:
            assert parameter.annotation == other.parameters[name].annotation
    if one.return_annotation is not inspect.Signature.empty:
        assert one.return_annotation == other.return_annotation


def test_signatures(impl: ModuleType) -> None:
    assert list(inspect.signature(impl.decode).parameters) == ["frame", "in_stream"]
    assert inspect.signature(impl.decode).parameters["in_stream"].default is False
    assert list(inspect.signature(impl.Decoder).parameters.values()) == list(
        inspect.signature(_pure.Decoder).parameters.values()
    )
    arguments = {"policies": pf.Policies(), "encoding": "utf-8", "registry": None}
    for count in range(4):
        names = list(arguments)
        positional = [arguments[name] for name in names[:count]]
        impl.Decoder(*positional, **{name: arguments[name] for name in names[count:]})
        impl.Decoder(*positional)
    with pytest.raises(TypeError):
        impl.Decoder(enc="utf-8")
    with expect_error(code="bad_option"):
        impl.Decoder(encoding="no such encoding")
    assert {"decode", "decode_many", "relations", "reset", "state"} <= public_names(impl.Decoder)


def test_rare_messages_have_one_class(both: tuple[ModuleType, ModuleType]) -> None:
    """What is rare exists once, so it can't drift."""
    for name in SHARED:
        messages = [example(module, name) for module in both]
        assert type(messages[0]) is type(messages[1]) is getattr(pf, name)


# --- the class table ----------------------------------------------------------------------------


@each_class
def test_fields(impl: ModuleType, name: str) -> None:
    message = example(impl, name)
    assert type(message).__name__ == name
    assert type(message).__match_args__ == FIELDS[name]
    promised = {*FIELDS[name], *PROPERTIES.get(name, ()), "frame", "in_stream", "tag"}
    assert public_names(message) == promised
    assert message.tag == TAGS[name] == chr(message.frame[0])
    assert type(message).__doc__
    doc = type(message).__doc__ + (pf.Prepare.__doc__ if name == "StreamPrepare" else "")
    for field in FIELDS[name]:
        assert re.search(rf"\b{field}\b", doc), field
    for time in PROPERTIES.get(name, ()):
        if time.endswith("_datetime"):
            assert f"`{time}`" in doc
    assert not hasattr(message, "__dict__")


@each_class
def test_a_message_is_made_by_decoding_alone(impl: ModuleType, name: str) -> None:
    cls = type(example(impl, name))
    with pytest.raises(TypeError):
        cls()
    with pytest.raises(TypeError):
        cls(EXAMPLES[name][0])


@each_class
def test_match(impl: ModuleType, name: str) -> None:
    """A class pattern binds the fields in the order of the table."""
    cls = type(example(impl, name))
    bound = ", ".join(f"x{number}" for number in range(len(FIELDS[name])))
    source = f"""
match message:
    case cls({bound}):
        found = [{bound}]
    case _:
        found = None
"""
    message = example(impl, name)
    scope: dict[str, Any] = {"message": message, "cls": cls}
    exec(source, scope)
    assert scope["found"] == [getattr(message, field) for field in FIELDS[name]]
    scope = {"message": message, "cls": pf.StreamStop if name != "StreamStop" else pf.Type}
    exec(
        "match message:\n    case cls():\n        found = 1\n    case _:\n        found = 2", scope
    )
    assert scope["found"] == 2


@each_class
def test_equality_and_hash(impl: ModuleType, name: str) -> None:
    one, same = example(impl, name), example(impl, name)
    assert one is not same or name == "Relation"
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same}) == 1
    others = [example(impl, other) for other in FIELDS if other != name]
    assert all(one != other for other in others)
    assert one != one.frame
    assert one.__eq__(one.frame) is NotImplemented
    frame, in_stream = EXAMPLES[name]
    for at in range(1, len(frame)):
        changed = frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]
        try:
            assert impl.decode(changed, in_stream) != one
        except pf.DecodeError:
            continue
    with pytest.raises(TypeError):
        one < same  # noqa: B015


@each_class
def test_repr_names_every_field(impl: ModuleType, name: str) -> None:
    message = example(impl, name)
    shown = repr(message)
    assert shown.startswith(f"{name}(")
    assert shown.endswith(")")
    assert "\n" not in shown
    for field in FIELDS[name]:
        if field != "old_kind" and getattr(message, field) is not None:
            assert f"{field}=" in shown
    assert "object at 0x" not in shown


@each_class
def test_copies_and_pickles(impl: ModuleType, name: str) -> None:
    message = example(impl, name)
    assert copy.copy(message) == message
    assert copy.deepcopy([message]) == [message]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(message, protocol))
        assert type(again) is getattr(pf, name)
        assert repr(again) == repr(message)
        assert again.frame == message.frame
    # a private name in a pickle ties it to one implementation
    data = pickle.dumps(message)
    assert b"_core" not in data
    assert b"_pure" not in data


@each_class
def test_messages_do_not_change(impl: ModuleType, name: str) -> None:
    message = example(impl, name)
    for field in (*FIELDS[name], "frame", "in_stream", *PROPERTIES.get(name, ()), "other"):
        with pytest.raises(AttributeError):
            setattr(message, field, 1)
        with pytest.raises(AttributeError):
            delattr(message, field)
    assert message == example(impl, name)


# --- tuples -------------------------------------------------------------------------------------


def test_tuple_is_a_sequence(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation([("id", 23), ("name", 25), ("big", 25), ("n", 20)]))
    data = decoder.decode(insert(text("1"), text("é"), SAME, NULL)).new
    assert isinstance(data, Sequence)
    assert set(TUPLE_METHODS) == public_names(data)
    assert len(data) == 4
    assert list(data) == [1, "é", pf.UNCHANGED, None]
    assert data[0] == data["id"] == data[-4] == 1
    assert data[1:3] == ("é", pf.UNCHANGED)
    assert data[::-1] == (None, pf.UNCHANGED, "é", 1)
    assert list(reversed(data)) == [None, pf.UNCHANGED, "é", 1]
    assert 1 in data
    assert 2 not in data
    assert data.index("é") == 1
    assert data.count(None) == 1
    with pytest.raises(ValueError, match="not in"):
        data.index("nowhere")
    assert data.values() == (1, "é", pf.UNCHANGED, None)
    assert data.raws() == (b"1", "é".encode(), pf.UNCHANGED, None)
    assert data.texts() == ("1", "é", pf.UNCHANGED, None)
    assert data.as_dict() == {"id": 1, "name": "é", "big": pf.UNCHANGED, "n": None}
    assert [data.kind(i) for i in range(4)] == ["t", "t", "u", "n"]
    assert operator.length_hint(data) == 4
    match data:
        case [first, *_, last]:
            assert (first, last) == (1, None)
        case _:
            pytest.fail("no sequence pattern matches")
    for wrong in (4, -5, 2**70):
        with pytest.raises(IndexError):
            data[wrong]
    for wrong in (1.0, None, b"id"):
        with pytest.raises(TypeError):
            data[wrong]
    for by_position in (data.raw, data.kind, data.text):
        for wrong in ("id", slice(1), 1.0):
            with pytest.raises(TypeError, match="position"):
                by_position(wrong)
    for wrong in (lambda: data["nowhere"], lambda: data.as_dict(["id", "nowhere"])):
        with pytest.raises(KeyError, match="nowhere"):
            wrong()
    with pytest.raises(TypeError):
        data[0] = 1
    with pytest.raises(TypeError):
        type(data)()


def test_key_tuple_leaves_out_what_nobody_knows(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation(TWO))
    rest = tuple_data(text("1"), NULL)
    key = decoder.decode(row("D", b"K" + rest)).old
    whole = decoder.decode(row("D", b"O" + rest)).old
    assert key.as_dict() == {"id": 1}
    assert key.values() == (1, None)
    assert key[1] is None
    assert key.kind(1) == "n"
    assert whole.as_dict() == {"id": 1, "name": None}
    assert key != whole
    decoder.decode(relation(TWO, keys=2))
    assert decoder.decode(row("D", b"K" + rest)).old.as_dict() == {"id": 1, "name": None}


def test_unchanged_is_not_null() -> None:
    assert pf.UNCHANGED is not None
    assert repr(pf.UNCHANGED) == "UNCHANGED"
    assert pickle.loads(pickle.dumps(pf.UNCHANGED)) is pf.UNCHANGED
    assert copy.deepcopy(pf.UNCHANGED) is pf.UNCHANGED
    with pytest.raises(TypeError):
        bool(pf.UNCHANGED)


def test_a_tuple_keeps_its_frame_alive(impl: ModuleType) -> None:
    data = impl.decode(insert(text("x" * 1000), NULL)).new
    for _ in range(100):
        impl.decode(insert(text("y" * 1000), NULL))
    assert data.raw(0) == b"x" * 1000


# --- decoders -----------------------------------------------------------------------------------


def test_relations_cannot_be_written_to(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation(TWO))
    assert isinstance(decoder.relations, Mapping)
    assert list(decoder.relations) == [16385]
    with pytest.raises(TypeError):
        decoder.relations[1] = None


def test_decode_many_is_lazy(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    messages = decoder.decode_many(iter([relation(TWO), insert(text("1"), NULL), b"?"]))
    assert iter(messages) is messages
    assert type(next(messages)).__name__ == "Relation"
    assert next(messages).new["id"] == 1
    with pytest.raises(pf.DecodeError) as caught:
        next(messages)
    assert caught.value.frame == 2
    with pytest.raises(TypeError):
        decoder.decode_many(None)


def test_decode_many_leaves_errors_of_its_iterable_alone(impl: ModuleType) -> None:
    """An index of frames that another decoder counted is not this one's to change."""

    def frames() -> Iterator[bytes]:
        yield relation(TWO)
        for message in impl.Decoder().decode_many([b"?"]):
            yield message.frame

    with pytest.raises(pf.DecodeError) as caught:
        list(impl.Decoder().decode_many(frames()))
    assert caught.value.frame == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_decoder_goes_its_own_way(impl: ModuleType, copied: Any) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation(TWO))
    other = copied(decoder)
    decoder.decode(relation([("x", 25)]))
    decoder.decode(start(7))
    assert [column.name for column in other.relations[16385].columns] == ["id", "name"]
    assert other.decode(insert(text("1"), NULL)).new.as_dict() == {"id": 1, "name": None}


def test_what_an_error_says_and_how_it_travels(impl: ModuleType) -> None:
    with pytest.raises(pf.DecodeError) as caught:
        impl.decode(b"?")
    error = caught.value
    assert isinstance(error, pf.PgOutputError)
    assert isinstance(error, ValueError)
    assert not issubclass(pf.PgOutputError, ValueError)
    error.frame = 17
    error.add_note("a note") if sys.version_info >= (3, 11) else None
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is pf.DecodeError
        assert (again.code, again.offset, again.tag, again.frame) == ("unknown_tag", 0, "?", 17)
        assert str(again) == str(error)
        assert getattr(again, "__notes__", None) == getattr(error, "__notes__", None)


# --- the other implementation is elsewhere ------------------------------------------------------

ELSEWHERE = """
import pickle, sys
import pgoutput_fast as pf
missing = {"cython": "_pure", "python": "_core"}[pf.IMPLEMENTATION]
assert f"pgoutput_fast.decoding.{missing}" not in sys.modules
messages, decoder, error, tuples = pickle.loads(sys.stdin.buffer.read())
for message in messages:
    assert type(message) is getattr(pf, type(message).__name__), type(message)
assert type(decoder) is pf.Decoder
after = decoder.decode(pickle.loads(pickle.dumps(%r)))
answer = (
    pf.IMPLEMENTATION,
    [repr(message) for message in messages],
    [data.values() for data in tuples],
    (error.code, error.offset, error.tag, error.frame, str(error)),
    repr(after),
    sorted(decoder.relations),
    [message for message in messages],
)
sys.stdout.buffer.write(pickle.dumps(answer))
"""


@pytest.mark.slow
@pytest.mark.parametrize("other", ["cython", "python"])
def test_pickles_load_where_only_the_other_implementation_is(impl: ModuleType, other: str) -> None:
    """`other` never imports this one's module; what it pickles comes back equal."""
    decoder = impl.Decoder()
    for frame in (relation(TWO), start(10), relation([*TWO, ("more", 20)], xid=10)):
        decoder.decode(frame)
    next_frame = insert(binary(b"\0\0\0\5"), text("x"), text("6"), xid=11)
    messages = [example(impl, name) for name in FIELDS]
    tuples = [message.new for message in messages if hasattr(message, "new")]
    with pytest.raises(pf.DecodeError) as caught:
        impl.decode(b"C\0")
    caught.value.frame = 3
    process = subprocess.run(
        [sys.executable, "-c", ELSEWHERE % next_frame],
        input=pickle.dumps((messages, decoder, caught.value, tuples)),
        capture_output=True,
        env={**os.environ, "PGOUTPUT_FAST_IMPL": other},
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    name, reprs, values, error, after, relations, returned = pickle.loads(process.stdout)
    assert name == other
    assert reprs == [repr(message) for message in messages]
    assert values == [data.values() for data in tuples]
    assert error == ("truncated", 2, "C", 3, str(caught.value))
    message = decoder.decode(next_frame)
    assert after == repr(message)
    assert relations == sorted(decoder.relations)
    assert [repr(one) for one in returned] == reprs
    assert [type(one) for one in returned] == [getattr(pf, name) for name in FIELDS]
    decoder.decode(STOP)
