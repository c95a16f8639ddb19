"""Names as SQL has them."""

from __future__ import annotations

import pytest

from pgoutput_fast.errors import PgOutputError, counted
from pgoutput_fast.names import parse_name, sql_name


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
    with pytest.raises(PgOutputError, match=r"is no name as SQL has it: write public\.orders"):
        parse_name(text, "schema.table")


def test_names_of_another_form() -> None:
    with pytest.raises(PgOutputError, match=r"^'a' is no name of the form schema\.table$"):
        parse_name("a", "schema.table")
    with pytest.raises(PgOutputError, match=r"'a\.b' is no name of the form schema\.table\.column"):
        parse_name("a.b", "schema.table.column")


def test_quotes_stand_where_they_are_needed() -> None:
    assert sql_name("public", "a_1") == "public.a_1"
    assert sql_name("S", "1a", 'b"c', "d.e", "") == '"S"."1a"."b""c"."d.e".""'


def test_counts() -> None:
    shown = [counted(number, "table") for number in (0, 1, 2, 1000)]
    assert shown == ["0 tables", "1 table", "2 tables", "1,000 tables"]
