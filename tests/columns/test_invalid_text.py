"""Text of an SQL_ASCII database, which may be any bytes, under each policy for such text."""

from __future__ import annotations

import pickle
import struct
from types import ModuleType
from typing import Any

import pytest
from support.expected_errors import check_fields

pytest.importorskip("hypothesis")
pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.frames.made_vectors import binary, insert, relation, text

import pgoutput_fast as pf
from pgoutput_fast.errors import Argument

TEXT, VARCHAR, TEXTS, JSON = 25, 1043, 1009, 114
CHOICES: tuple[Any, ...] = ("error", "replace", "binary")
COLUMNS = [("a", TEXT), ("b", VARCHAR), ("c", TEXTS), ("d", JSON)]
ARROW = {
    choice: pa.struct([("a", kind), ("b", kind), ("c", pa.list_(kind)), ("d", pa.json_(pa.utf8()))])
    for choice, kind in (("error", pa.utf8()), ("replace", pa.utf8()), ("binary", pa.binary()))
}

SENT = st.one_of(
    st.binary(max_size=40).map(lambda raw: raw.replace(b"\0", b"\x80")),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(str.encode),
    st.tuples(st.text("aé€🚚", min_size=1), st.integers(0, 3)).map(
        lambda cut: cut[0].encode()[: -cut[1] or None]
    ),
)
"""What a server of SQL_ASCII can send: any bytes but NUL, whole UTF-8, and UTF-8 that is cut."""


def array_of(values: list[bytes], format: str) -> Any:
    if format == "t":
        quoted = [one.replace(b"\\", b"\\\\").replace(b'"', b'\\"') for one in values]
        return text(b"{" + b",".join(b'"' + one + b'"' for one in quoted) + b"}")
    head = struct.pack(">iiIii", 1, 0, TEXT, len(values), 1) if values else struct.pack(
        ">iiI", 0, 0, TEXT
    )  # fmt: skip
    return binary(head + b"".join(struct.pack(">i", len(one)) + one for one in values))


def expected(raw: Any, choice: str) -> Any:
    if isinstance(raw, list):
        return [expected(one, choice) for one in raw]
    return (
        raw
        if choice == "binary"
        else raw.decode(errors="replace" if choice == "replace" else "strict")
    )


def outcomes(values: list[Any], choice: str) -> list[Any]:
    """What the columns have to have; the code of an error for those that are refused."""
    found: list[Any] = []
    for raw, kind in zip(values, COLUMNS, strict=True):
        try:
            found.append(
                expected(raw, "error" if (choice, kind[1]) == ("binary", JSON) else choice)
            )
        except UnicodeDecodeError:
            found.append("bad_encoding")
    return found


def decoded(module: ModuleType, frames: list[bytes], policies: pf.Policies) -> list[Any]:
    decoder = module.Decoder(policies, "SQL_ASCII")
    row = pickle.loads(pickle.dumps([decoder.decode(frame) for frame in frames][-1])).new
    found: list[tuple[Any, Any]] = []
    for i, (name, _) in enumerate(COLUMNS):
        try:
            found.append((row[i], None))
        except pf.DecodeError as error:
            told = all(word in str(error) for word in (repr(name), "public.t", "invalid_text"))
            found.append((error.code, error.offset if told else str(error)))
    return found


def in_columns(name: str, frames: list[bytes], policies: pf.Policies) -> Any:
    """The type of the rows and the row; of one that is refused the code and the offset."""
    with chosen(name):
        decoder = pf.ColumnarDecoder(policies, encoding="SQL_ASCII", on_error="collect")
        batches = [pa.record_batch(batch) for batch in decoder.decode(frames)]
    errors = [(one.error.code, one.error.offset) for one in decoder.errors]
    rows = [batch.column("after") for batch in batches]
    assert [bool(errors), bool(rows)] in ([True, False], [False, True])
    return errors or [(str(one.type), one.to_pylist()) for one in rows]


def check(both: tuple[ModuleType, ModuleType], format: str, choice: Any, values: list[Any]) -> None:
    policies = pf.Policies(invalid_text=choice)
    sent = [(format, one) if isinstance(one, bytes) else array_of(one, format) for one in values]
    frames = [relation(COLUMNS), insert(*sent)]
    wanted = outcomes(values, choice)
    first, second = (decoded(module, frames, policies) for module in both)
    assert first == second
    assert [value for value, _ in first] == wanted
    compiled, pure = (in_columns(name, frames, policies) for name in IMPLEMENTATIONS)
    assert compiled == pure
    if "bad_encoding" in wanted:
        assert compiled == [first[wanted.index("bad_encoding")]]
    else:
        names = [name for name, _ in COLUMNS]
        assert compiled == [(str(ARROW[choice]), [dict(zip(names, wanted, strict=True))])]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("format", ["t", "b"])
def test_text_of_any_bytes(both: tuple[ModuleType, ModuleType], format: str, choice: str) -> None:
    """Values, types, codes and offsets, in messages and in columns of both implementations."""

    @settings(
        max_examples=60, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(st.tuples(SENT, SENT, st.lists(SENT, max_size=3), SENT))
    def draw(values: Any) -> None:
        check(both, format, choice, list(values))

    draw()
    check(both, format, choice, [b"caf\xe9", "€".encode()[:2], [b"ok", b"\xff"], b'"ok"'])
    check(both, format, choice, [b"ok", "é".encode(), ["é".encode()], b'"\xe9"'])


def test_only_of_sql_ascii(both: tuple[ModuleType, ModuleType]) -> None:
    """In another encoding bytes that are no text mean that the encoding is wrong."""
    frames = [relation(COLUMNS[:1]), insert(text(b"caf\xe9"))]
    for module in both:
        for choice in CHOICES:
            decoder = module.Decoder(pf.Policies(invalid_text=choice), "UTF8")
            row = [decoder.decode(frame) for frame in frames][-1].new
            with pytest.raises(pf.DecodeError) as caught:
                row[0]
            check_fields(caught.value, code="bad_encoding", options=[Argument("encoding")])
            check_fields(pickle.loads(pickle.dumps(caught.value)), options=[Argument("encoding")])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_decoder_that_goes_on_with_another_policy(implementation: str) -> None:
    with chosen(implementation):
        known = pf.Decoder(encoding="SQL_ASCII")
        known.decode(relation(COLUMNS[:1]))
        for choice, value in zip(CHOICES[:0:-1], (b"caf\xe9", "caf�"), strict=True):
            decoder = pf.ColumnarDecoder(pf.Policies(invalid_text=choice), known)
            (batch,) = decoder.decode([insert(text(b"caf\xe9"))])
            assert pa.record_batch(batch).column("after").to_pylist() == [{"a": value}]


def test_names_of_any_bytes(impl: ModuleType) -> None:
    """They are escaped where a policy replaces what is no text in values, too."""
    for choice in CHOICES:
        decoder = impl.Decoder(pf.Policies(invalid_text=choice), "SQL_ASCII")
        message = decoder.decode(relation([(b"caf\xe9".decode(errors="surrogateescape"), TEXT)]))
        assert message.columns[0].name == "caf\udce9"
        decoder.decode(insert(text("ok")))
        (batch,) = pf.ColumnarDecoder(decoder=decoder).decode([insert(text("ok"))])
        assert pa.record_batch(batch).schema.field("after").type.field(0).name == r"caf\xe9"
