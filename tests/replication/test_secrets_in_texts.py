"""Passwords in texts of servers and people: none is shown, however long the text is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgoutput_fast import errors
from pgoutput_fast.errors import MOST_SERVER_TEXT, printable, shortened, without_passwords

SECRETS = st.text("0123456789XYZ@/:?&=%'\"\\", min_size=6, max_size=20)
WORDS = st.text("abc .;(", max_size=30)
FORMS = {
    "plain": (
        "host=h password={} user=u",
        lambda one: one.replace("\\", r"\\").replace("'", r"\'"),
    ),
    "quoted": ("password = '{}' user=u", lambda one: one.replace("\\", r"\\").replace("'", r"\'")),
    "url": ("postgresql://u:{}@h/db", lambda one: one),
    "query": ("postgresql://h/db?password={}", lambda one: one.replace("\\", r"\\")),
}


def pieces(secret: str) -> list[str]:
    """Parts of a secret that nothing else in the texts has."""
    found = (secret[start : start + 5] for start in range(len(secret) - 4))
    return [one for one in found if sum(letter in "0123456789XYZ" for letter in one) > 3]


@given(st.sampled_from([*FORMS]), SECRETS, WORDS, WORDS, st.integers(0, 120))
def test_no_cut_uncovers_a_secret(
    form: str, secret: str, before: str, after: str, cut: int
) -> None:
    text, written = FORMS[form]
    if form in ("plain", "query"):
        secret = secret.strip("'\"")
    if form == "url":
        secret = secret.replace("?", "")
    given_text = f"{before} {text.format(written(secret))} {after}"
    most = errors.MOST_SERVER_TEXT
    errors.MOST_SERVER_TEXT = cut
    try:
        shown = shortened(given_text)
    finally:
        errors.MOST_SERVER_TEXT = most
    for piece in pieces(written(secret)):
        assert piece not in shown
        assert piece not in without_passwords(given_text)


@pytest.mark.parametrize(
    "shape", ["a.", "a:/", "a:/b", "password='", 'password="', "password=", "x://u:", "@", "\\",
              "scram_", "password ", "' ", "a", " "],
)  # fmt: skip
@pytest.mark.parametrize("end", ["", "@"])
def test_a_long_text_of_any_shape_is_gone_through_once(shape: str, end: str) -> None:
    """If a part of a text were looked at again and again, this would take days."""
    without_passwords(shape * (300_000 // len(shape)) + end)
    assert len(shortened(shape * 100_000)) <= MOST_SERVER_TEXT + 2 + 3 * MOST_SERVER_TEXT


def test_what_is_no_secret_stays() -> None:
    for text in (
        "connection to server at \"h\" (127.0.0.1), port 5432 failed",
        "see https://example.org/a:b and mail to a@b.c", "password authentication failed",
    ):  # fmt: skip
        assert shortened(text) == text
    assert shortened("x " * MOST_SERVER_TEXT).endswith("x  …")


@given(st.text())
def test_no_control_character_is_printed(text: str) -> None:
    assert printable(text).isprintable()
