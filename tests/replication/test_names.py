"""Names as SQL has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.expected_errors import expect_error

from pgoutput_fast.errors import counted
from pgoutput_fast.names import distinct_names, parse_name, sql_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("public.orders", ("public", "orders")),
        ("Public.ORDERS_1", ("public", "orders_1")),
        ('public."My Table"', ("public", "My Table")),
        ('"a.b"."c"', ("a.b", "c")),
        ('"say ""hi"""."c""."', ('say "hi"', 'c".')),
        ("public.größe-Ä$", ("public", "größe-Ä$")),
        ('"a\nb".c', ("a\nb", "c")),
    ],
)
def test_names_are_read_as_regclass_reads_them(text: str, expected: tuple[str, ...]) -> None:
    assert parse_name(text, "schema.table") == expected
    assert parse_name(sql_name(*expected), "schema.table") == expected


@pytest.mark.parametrize(
    "text",
    ["", ".", "a.", ".a", "a..b", "a b.c", 'a."b', 'a."b"c', 'a"b".c', 'a.""', "a .b", 'a."b".'],
)
def test_what_is_no_name(text: str) -> None:
    with expect_error(code="unfit_input"):
        parse_name(text, "schema.table")


def test_names_of_another_form() -> None:
    with expect_error(code="unfit_input"):
        parse_name("a", "schema.table")
    with expect_error(code="unfit_input"):
        parse_name("a.b", "schema.table.column")


def test_quotes_stand_where_they_are_needed() -> None:
    assert sql_name("public", "a_1") == "public.a_1"
    assert sql_name("S", "1a", 'b"c', "d.e", "") == '"S"."1a"."b""c"."d.e".""'


def test_counts() -> None:
    shown = [counted(number, "table") for number in (0, 1, 2, 1000)]
    assert shown == ["0 tables", "1 table", "2 tables", "1,000 tables"]


_NAMES = st.lists(st.text("aAßs._", min_size=1, max_size=5), unique=True, max_size=8)


@given(_NAMES, _NAMES)
def test_names_that_every_reader_tells_apart(names: list[str], reserved: list[str]) -> None:
    made = distinct_names(names, reserved)
    assert len(made) == len(names)
    # As paths, with case folded, each is one place; what is inside of one is inside of no other.
    paths = [f"{name.casefold()}." for name in made]
    for i, path in enumerate(paths):
        others = [*paths[:i], *paths[i + 1 :], *(f"{name.casefold()}." for name in reserved)]
        assert not any(one.startswith(path) or path.startswith(one) for one in others)
    assert distinct_names(made, reserved) == made
