"""Every vector of tests/vectors: fields, values, errors, and what every message can do."""

# ruff: noqa: B023 (functions are called before the loop goes on)

from __future__ import annotations

import copy
import datetime
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from support.frames.made_vectors import insert, relation, text
from support.frames.vector_files import field_value, python_value, read_sequences, read_vectors

import pgoutput_fast as pf

VECTORS = read_vectors()
SEQUENCES = read_sequences()
EPOCH = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
TIMES = {
    "commit_time": "commit_datetime",
    "prepare_time": "prepare_datetime",
    "rollback_time": "rollback_datetime",
    "abort_time": "abort_datetime",
}
MESSAGES = [vector for vector in VECTORS if "class" in vector]
IN_ORDER = [vector for vector in MESSAGES if "decoder_error" not in vector]
REFUSED = [vector for vector in VECTORS if "class" not in vector]


def each_server(vectors: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """A case for the vectors of each server, and one for those that are written by hand."""
    servers: dict[str, list[dict[str, Any]]] = {}
    for vector in vectors:
        servers.setdefault(vector["id"].partition("/")[0], []).append(vector)
    return pytest.mark.parametrize("vectors", servers.values(), ids=servers)


def each(vectors: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each vector. pytest shows what was printed last: the one that fails."""
    for vector in vectors:
        print(vector["id"])
        yield vector


def decoder_of(impl: ModuleType, vector: dict[str, Any]) -> Any:
    """A decoder that has seen what comes before the vector's frame."""
    decoder = impl.Decoder(encoding=vector.get("encoding", "utf-8"))
    for frame in vector["before"]:
        decoder.decode(frame)
    return decoder


def check_error(error: pf.DecodeError, told: dict[str, Any], frame: bytes) -> None:
    assert (error.code, error.offset, error.tag) == (told["code"], told["offset"], told["tag"])
    assert error.frame is None
    assert told["code"] in str(error)
    assert f"byte {told['offset']}" in str(error)
    assert 0 <= error.offset <= len(frame)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is pf.DecodeError
    assert str(again) == str(error)
    assert (again.code, again.offset, again.tag, again.frame) == (
        error.code,
        error.offset,
        error.tag,
        None,
    )


def check_fields(message: Any, vector: dict[str, Any], encoding: str) -> None:
    assert type(message).__name__ == vector["class"]
    assert message.frame == vector["frame"]
    assert type(message.frame) is bytes
    assert message.in_stream is vector["in_stream"]
    for name, told in vector["fields"].items():
        expected = field_value(told)
        if isinstance(expected, str) and encoding != vector.get("encoding", "utf-8"):
            expected = redecoded(expected, vector["encoding"], encoding)
        if name == "columns":
            check_columns(message.columns, told, vector.get("encoding", "utf-8"), encoding)
            continue
        value = getattr(message, name)
        assert value == expected, name
        assert type(value) is type(expected), name
    for name, moment in TIMES.items():
        if name in vector["fields"]:
            check_time(message, moment, vector["fields"][name])
    if vector["class"] == "Truncate":
        assert message.cascade is bool(vector["fields"]["options"] & 1)
        assert message.restart_identity is bool(vector["fields"]["options"] & 2)
    if vector["class"] == "LogicalMessage":
        assert message.transactional is bool(vector["fields"]["flags"] & 1)


def redecoded(text: str, encoding: str, other: str) -> str:
    return text.encode(encoding, "surrogateescape").decode(other, "surrogateescape")


def check_columns(columns: Any, told: list[list[Any]], encoding: str, other: str) -> None:
    assert type(columns) is tuple
    assert len(columns) == len(told)
    for column, (flags, name, type_id, type_modifier) in zip(columns, told, strict=True):
        assert type(column) is pf.Column
        assert column == (flags, redecoded(name, encoding, other), type_id, type_modifier)
        assert column.is_key is bool(flags & 1)


def check_time(message: Any, name: str, microseconds: int | None) -> None:
    if microseconds is None:
        assert getattr(message, name) is None
        return
    try:
        expected = EPOCH + datetime.timedelta(microseconds=microseconds)
    except OverflowError:
        with pytest.raises(pf.DecodeError) as caught:
            getattr(message, name)
        assert caught.value.code == "out_of_range"
        offset = caught.value.offset
        assert message.frame[offset : offset + 8] == microseconds.to_bytes(8, "big", signed=True)
        return
    assert getattr(message, name) == expected
    assert getattr(message, name).tzinfo is datetime.timezone.utc


def check_tuples(message: Any, vector: dict[str, Any], encoding: str, decoded_alone: bool) -> None:
    tuples = vector.get("tuples", {})
    if vector["class"] == "Update" and "old" not in tuples:
        assert message.old is None
        assert message.old_kind is None
    for which, told in tuples.items():
        data = getattr(message, which)
        assert type(data).__name__ == "TupleData"
        assert len(data) == len(told["columns"])
        for number, (kind, raw) in enumerate(told["columns"]):
            expected = {"n": None, "u": pf.UNCHANGED}.get(kind, raw)
            assert data.kind(number) == kind
            assert data.raw(number) == expected
            assert data.raw(number - len(data)) == expected
            check_text(data, number, kind, raw, told, encoding, decoded_alone)
        assert data.raws() == tuple(data.raw(number) for number in range(len(data)))
        for number in (len(data), -len(data) - 1):
            for accessor in (data.kind, data.raw, data.text, data.__getitem__):
                with pytest.raises(IndexError):
                    accessor(number)
        for accessor in (data.kind, data.raw, data.text, data.__getitem__):
            with pytest.raises(TypeError):
                accessor(1.0)


def check_text(
    data: Any,
    number: int,
    kind: str,
    raw: bytes,
    told: dict[str, Any],
    encoding: str,
    decoded_alone: bool,
) -> None:
    if kind in "nu":
        assert data.text(number) is {"n": None, "u": pf.UNCHANGED}[kind]
        return
    if kind == "t":
        try:
            expected = raw.decode(encoding)
        except UnicodeDecodeError:
            with pytest.raises(pf.DecodeError) as caught:
                data.text(number)
            assert caught.value.code == "bad_encoding"
            assert caught.value.offset == told["offsets"][number]
        else:
            assert data.text(number) == expected
    elif decoded_alone:
        with pytest.raises(pf.DecodeError) as caught:
            data.text(number)
        assert caught.value.code == "unknown_relation"
    elif str(number) in told.get("texts", {}):
        text, error = attempt(lambda: data.text(number))
        if error is None:
            assert text == told["texts"][str(number)]
        else:
            # the types whose text is not known yet say so, and none says something else
            assert error.code == "no_text_form"
            assert error.offset == told["offsets"][number]
            assert str(number) not in told.get("values", {})


def attempt(call: Callable[[], Any]) -> tuple[Any, pf.DecodeError | None]:
    """What the call gives, or the DecodeError that it raises."""
    try:
        return call(), None
    except pf.DecodeError as error:
        return None, error


def check_values(message: Any, vector: dict[str, Any]) -> None:
    """Typed values, one at a time and all at once."""
    for which, told in vector.get("tuples", {}).items():
        data = getattr(message, which)
        names = [column.name for column in message.relation.columns]
        refused: dict[int, str] = {}
        values: list[Any] = []
        for number, (kind, raw) in enumerate(told["columns"]):
            expected = told.get("values", {}).get(str(number))
            if kind in "nu":
                values.append({"n": None, "u": pf.UNCHANGED}[kind])
                assert data[number] is values[-1]
                continue
            value, error = attempt(lambda: data[number])
            values.append(value)
            if error is not None:
                assert error.offset == told["offsets"][number]
                assert error.tag == message.tag
                assert repr(names[number]) in str(error)
                assert expected in (None, ["error", error.code]), (names[number], raw, error)
                refused[number] = error.code
                continue
            if expected is not None:
                assert expected[0] != "error", (names[number], raw, values[-1])
                same(values[-1], python_value(expected))
            if names.count(names[number]) == 1:
                same(data[names[number]], values[-1])
        with pytest.raises(KeyError):
            data["no column has this name"]
        if refused:
            for whole in (data.values, lambda: list(data), data.as_dict):
                with pytest.raises(pf.DecodeError) as caught:
                    whole()
                assert caught.value.code == refused[min(refused)]
                assert caught.value.offset == told["offsets"][min(refused)]
            continue
        for whole in (data.values(), tuple(data), data[:]):
            assert len(whole) == len(values)
            for one, other in zip(whole, values, strict=True):
                same(one, other)
        left_out = set()
        if which == "old" and message.old_kind == "K":
            left_out = {
                column.name
                for column, (kind, _) in zip(message.relation.columns, told["columns"], strict=True)
                if kind == "n" and not column.is_key
            }
        as_dict = data.as_dict()
        assert list(as_dict) == [name for name in dict.fromkeys(names) if name not in left_out]


def same(value: Any, expected: Any) -> None:
    assert type(value) is type(expected)
    # NaN, -0, scale of a Decimal and zone of a datetime too
    assert repr(value) == repr(expected)


def check_refusal(
    decode: Callable[[], object], told: dict[str, Any], vector: dict[str, Any]
) -> None:
    with pytest.raises(pf.DecodeError) as caught:
        decode()
    check_error(caught.value, told, vector["frame"])


@each_server(MESSAGES)
def test_decode(impl: ModuleType, vectors: list[dict[str, Any]]) -> None:
    """The stateless decoder, which knows neither relations nor order."""
    for vector in each(vectors):
        in_stream = vector["in_stream"]
        message = impl.decode(vector["frame"], in_stream=in_stream)
        check_fields(message, vector, "utf-8")
        check_tuples(message, vector, "utf-8", decoded_alone=True)
        for which in vector.get("tuples", {}):
            data = getattr(message, which)
            for access in (
                lambda: message.relation,
                lambda: data["id"],
                lambda: data.values(),
                lambda: data.as_dict(),
                lambda: list(data),
            ):
                with pytest.raises(pf.DecodeError) as caught:
                    access()
                assert caught.value.code == "unknown_relation"
                assert caught.value.offset == (5 if in_stream else 1)


@each_server(MESSAGES)
def test_decoder(impl: ModuleType, vectors: list[dict[str, Any]]) -> None:
    """A decoder, which knows relations and order."""
    for vector in each(vectors):
        decoder = decoder_of(impl, vector)
        if "decoder_error" in vector:
            before = pickle.dumps(decoder)
            check_refusal(lambda: decoder.decode(vector["frame"]), vector["decoder_error"], vector)
            assert pickle.dumps(decoder) == before
            continue
        message = decoder.decode(vector["frame"])
        encoding = vector.get("encoding", "utf-8")
        check_fields(message, vector, encoding)
        check_tuples(message, vector, encoding, decoded_alone=False)
        if "relation" in vector:
            assert [message.relation.namespace, message.relation.name] == vector["relation"]
            check_values(message, vector)


@each_server(REFUSED)
def test_refused(impl: ModuleType, vectors: list[dict[str, Any]]) -> None:
    """Frames that are no messages: cut at every byte, and with one fault each."""
    for vector in each(vectors):
        frame, in_stream = vector["frame"], vector["in_stream"]
        check_refusal(lambda: impl.decode(frame, in_stream), vector["error"], vector)
        decoder = decoder_of(impl, vector)
        before = pickle.dumps(decoder)
        told = vector.get("decoder_error", vector["error"])
        check_refusal(lambda: decoder.decode(frame), told, vector)
        assert pickle.dumps(decoder) == before


@each_server(IN_ORDER)
def test_what_every_message_can_do(impl: ModuleType, vectors: list[dict[str, Any]]) -> None:
    for vector in each(vectors):
        message = decoder_of(impl, vector).decode(vector["frame"])
        twin = decoder_of(impl, vector).decode(bytearray(vector["frame"]))
        assert message == twin
        assert (message != twin) is False
        assert hash(message) == hash(twin)
        assert message != vector["frame"]
        assert message != impl.decode(b"E", True) or vector["class"] == "StreamStop"
        assert repr(message) == repr(twin)
        assert repr(message).startswith(vector["class"] + "(")
        for name, told in vector["fields"].items():
            if told is not None and name != "old_kind":
                assert f"{name}=" in repr(message)
        again = pickle.loads(pickle.dumps(message))
        public = getattr(pf, vector["class"])
        assert type(again) is public
        assert repr(again) == repr(message)
        assert (again.frame, again.in_stream) == (message.frame, message.in_stream)
        if type(message) is public:
            assert again == message
            assert hash(again) == hash(message)
        for copied in (copy.copy(message), copy.deepcopy(message)):
            assert copied == message
            assert type(copied) is type(message)
        for which, told in vector.get("tuples", {}).items():
            data = getattr(message, which)
            assert data == getattr(twin, which)
            assert hash(data) == hash(getattr(twin, which))
            restored = pickle.loads(pickle.dumps(data))
            assert restored.raws() == data.raws()
            assert repr(restored) == repr(data)
            assert getattr(again, which).raws() == data.raws()
            assert len(told["columns"]) == len(restored)
            assert again.relation == message.relation
        for name in (*vector["fields"], "frame", "in_stream"):
            with pytest.raises(AttributeError):
                setattr(message, name, None)
        with pytest.raises(AttributeError):
            message.no_such_attribute = 1


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence["id"])
@pytest.mark.parametrize("travels", [False, True], ids=["stays", "travels"])
def test_sequence(impl: ModuleType, sequence: dict[str, Any], travels: bool) -> None:
    """Frames one after the other; `travels` pickles the decoder between any two of them."""
    decoder = impl.Decoder()
    for number, step in enumerate(sequence["steps"]):
        if travels:
            decoder = pickle.loads(pickle.dumps(decoder))
        if "reset" in step:
            decoder.reset()
        elif "error" in step:
            before = pickle.dumps(decoder)
            with pytest.raises(pf.DecodeError) as caught:
                decoder.decode(step["frame"])
            check_error(caught.value, step["error"], step["frame"])
            assert pickle.dumps(decoder) == before, number
        else:
            message = decoder.decode(step["frame"])
            check_fields(message, step, "utf-8")
            if "relation" in step:
                namespace, name, columns = step["relation"]
                assert (message.relation.namespace, message.relation.name) == (namespace, name)
                assert [column.name for column in message.relation.columns] == columns, number
        relations = {
            str(key): [relation.namespace, relation.name, [c.name for c in relation.columns]]
            for key, relation in sorted(decoder.relations.items())
        }
        assert relations == step["relations"], number
        assert all(relation.xid is None for relation in decoder.relations.values())


@pytest.mark.parametrize(
    "sequence",
    [s for s in SEQUENCES if not any("reset" in step for step in s["steps"])],
    ids=lambda sequence: sequence["id"],
)
def test_decode_many(impl: ModuleType, sequence: dict[str, Any]) -> None:
    """decode_many() gives what decode() gives up to the first error, which names its frame."""
    steps = sequence["steps"]
    decoder, single = impl.Decoder(), impl.Decoder()
    failing = next((n for n, step in enumerate(steps) if "error" in step), None)
    messages = []
    many = decoder.decode_many(step["frame"] for step in steps)
    if failing is None:
        messages = list(many)
    else:
        with pytest.raises(pf.DecodeError) as caught:
            messages.extend(many)
        assert caught.value.frame == failing
        assert caught.value.code == steps[failing]["error"]["code"]
        assert f"frame {failing}" in str(caught.value)
    assert messages == [single.decode(step["frame"]) for step in steps[:failing]]


def test_same_relation_again_is_the_same_object(impl: ModuleType) -> None:
    frames = [v["frame"] for v in VECTORS if v.get("class") == "Relation" and not v["in_stream"]]
    for frame in frames:
        decoder = impl.Decoder()
        first = decoder.decode(frame)
        again = decoder.decode(bytes(bytearray(frame)))
        assert again is first
        assert decoder.relations[first.relation_id] is first


def test_equality_knows_the_stream(impl: ModuleType) -> None:
    # Stream Stop, Origin and Stream Start have the same bytes in and out of a chunk
    for frame in (b"E", b"O" + bytes(8) + b"\0"):
        assert impl.decode(frame, True) != impl.decode(frame, False)
        assert impl.decode(frame, True) == impl.decode(frame, True)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: memoryview(bytearray(b))])
def test_any_buffer_is_taken(impl: ModuleType, make: Any) -> None:
    for vector in MESSAGES[::7]:
        message = impl.decode(make(vector["frame"]), vector["in_stream"])
        assert type(message.frame) is bytes
        assert message == impl.decode(vector["frame"], vector["in_stream"])


def test_a_buffer_is_copied(impl: ModuleType) -> None:
    vector = next(
        v for v in VECTORS if v.get("class") == "Insert" and v["tuples"]["new"]["columns"]
    )
    buffer = bytearray(vector["frame"])
    message = impl.decode(buffer, vector["in_stream"])
    for number in range(len(buffer)):
        buffer[number] = 0xFF
    buffer.clear()
    assert message.frame == vector["frame"]
    assert message.new.raws() == impl.decode(vector["frame"], vector["in_stream"]).new.raws()


@pytest.mark.parametrize("frame", [None, "B", 66, object(), [66], memoryview(b"BBBB")[::2]])
def test_no_buffer_is_the_callers_mistake(impl: ModuleType, frame: Any) -> None:
    with pytest.raises(TypeError):
        impl.decode(frame)
    with pytest.raises(TypeError):
        impl.Decoder().decode(frame)


def test_every_tag_alone(impl: ModuleType) -> None:
    """A tag and nothing behind it: unknown, cut short, or the one message without fields."""
    assert repr(impl.decode(b"E")) == "StreamStop()"
    for tag in range(256):
        frame = bytes([tag])
        if frame == b"E":
            continue
        with pytest.raises(pf.DecodeError) as caught:
            impl.decode(frame)
        known = frame in b"BCORYIUDTMSEcAbPKrp"
        assert caught.value.code == ("truncated" if known else "unknown_tag")
        assert caught.value.offset == (1 if known else 0)
        assert caught.value.tag == chr(tag)


@pytest.mark.slow
def test_a_frame_of_a_gigabyte_is_refused(impl: ModuleType) -> None:
    frame = b"I" + bytes(2**30 - 1)
    for decode in (impl.decode, impl.Decoder().decode):
        with pytest.raises(pf.DecodeError) as caught:
            decode(frame)
        assert (caught.value.code, caught.value.offset) == ("bad_length", 0)
        assert caught.value.tag == "I"


@pytest.mark.parametrize("type_id", [700, 701])
@pytest.mark.parametrize("digits", ["1.79769313486232e+308", "-1e400", "9" * 400])
def test_rounded_past_the_greatest_float_is_no_infinity(
    impl: ModuleType, type_id: int, digits: str
) -> None:
    # with extra_float_digits 0 the server prints the greatest float8 as the first of these
    decoder = impl.Decoder()
    decoder.decode(relation([("v", type_id)]))
    with pytest.raises(pf.DecodeError) as caught:
        decoder.decode(insert(text(digits))).new[0]
    assert caught.value.code in ("bad_value", "out_of_range")


@pytest.mark.parametrize("count", [1600, 32767, 32768, 65535])
def test_a_count_is_signed(impl: ModuleType, count: int) -> None:
    """More columns than an int16 counts are a negative count, even if they are all there."""
    columns = count.to_bytes(2, "big") + b"n" * count
    frame = b"I\0\0\x40\1N" + columns
    double = b"U\0\0\x40\1O\0\1nN" + columns
    if count < 2**15:
        assert len(impl.decode(frame).new) == len(impl.decode(double).new) == count
        return
    for bad, offset in ((frame, 6), (double, 10)):
        with pytest.raises(pf.DecodeError) as caught:
            impl.decode(bad)
        assert (caught.value.code, caught.value.offset) == ("bad_count", offset)


def test_all_nineteen_messages_and_all_facts_have_vectors() -> None:
    classes = {vector["class"] for vector in VECTORS if "class" in vector}
    assert len(classes) == 19
    captured = {v["class"] for v in VECTORS if "class" in v and not v.get("made")}
    assert captured == classes
    codes = {vector["error"]["code"] for vector in VECTORS if "error" in vector}
    codes |= {vector["decoder_error"]["code"] for vector in VECTORS if "decoder_error" in vector}
    assert codes == {
        "empty_frame", "unknown_tag", "truncated", "trailing_bytes", "bad_marker",
        "bad_column_kind", "bad_length", "bad_count", "unterminated_string", "unknown_relation",
        "column_count", "stream_order",
    }  # fmt: skip
