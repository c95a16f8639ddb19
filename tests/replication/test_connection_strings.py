"""What is said of a connection string that libpq can't read."""

from __future__ import annotations

import re

import pytest
from support.expected_errors import expect_error

pytest.importorskip("psycopg")

from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.errors import PgOutputError


@pytest.mark.parametrize(
    ("dsn", "names"),
    [
        ("hots=foo", ["hots", "host"]),
        ("host=a dbnam=s3cret", ["dbnam", "dbname"]),
        ("host=a passwort=s3cret", ["passwort", "password"]),
        ("postgresql://h/d?sslmod=off", ["sslmod", "sslmode"]),
        ("postgresql://u:s3cret@h/d?prot=5", ["prot", "port"]),
        # It resembles no parameter.
        ("foo=s3cret", ["foo"]),
        ("host=a foo=s3cret password=s3cret", ["foo"]),
        ("postgresql://u:s3cret@h/d?foo=s3cret", ["foo"]),
    ],
)
def test_a_parameter_that_is_unknown_is_named(dsn: str, names: list[str]) -> None:
    with pytest.raises(PgOutputError) as caught:
        ConnectionParameters(dsn)
    assert (caught.value.code, caught.value.parameter) == ("bad_option", "dsn")
    assert re.findall(r"'(\w+)'", caught.value.message) == names
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "dsn",
    [
        # What looks like a name is part of the password, or may be.
        "host=a password=x hots=1",
        "host=hots= password=x hots=1",
        "sslpassword=x hots=1",
        "oauth_client_secret=x hots=1",
        "postgresql://u:x/hots?hots=1@h/d",
        "postgresql://u:x/y?hots=1&a=b@h/d",
        "host=a;pwd=x hots=1",
        "c2VjcmV0hots==",
        "host=a hots",
        "hots",
    ],
)
def test_what_may_be_of_a_password_is_not_shown(dsn: str) -> None:
    with expect_error(code="bad_option") as caught:
        ConnectionParameters(dsn)
    assert "hots" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("dsn", "keywords"),
    [
        ("host=a\0 sslmode=verify-full", {}),
        ("postgresql://h\0 'a b:s3cret@'", {}),
        ("host=a", {"password": "s3cret\0"}),
    ],
)
def test_a_string_that_libpq_would_cut_is_refused(dsn: str, keywords: dict[str, str]) -> None:
    with expect_error(code="bad_option") as caught:
        ConnectionParameters(dsn, keywords)
    assert "s3cret" not in str(caught.value)
