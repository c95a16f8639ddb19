"""What a failure to connect is taken for: one that passes, one that stays, or one of the two."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.expected_errors import expect_error

from pgoutput_fast.connections import IDENTIFY_ADVICE, ConnectionParameters, server_error
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.replication import ReplicationConnection, ReplicationError, link

pytestmark = pytest.mark.server


# A server that refuses whoever comes with one message. It is a process of its own, as libpq keeps
# Python's threads waiting while it looks whether a server accepts connections.
REFUSING = """
import socket, struct, sys
code, words = sys.argv[1:]
fields = f"SFATAL\\0VFATAL\\0C{code}\\0M{words}\\0\\0".encode()
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    with listener.accept()[0] as client:
        client.recv(1 << 16)
        client.sendall(b"E" + struct.pack(">i", len(fields) + 4) + fields)
"""


@contextlib.contextmanager
def refusing(code: str, words: str) -> Iterator[int]:
    """The port of such a server."""
    command = [sys.executable, "-X", "utf8", "-c", REFUSING, code, words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("sqlstate", "words", "passes"),
    [
        ("57P03", "the database system is starting up", True),
        ("57P03", "el sistema de base de datos está iniciándose", True),
        ("57P03", "le système de bases de données se lance", True),
        ("53300", "sorry, too many clients already", True),
        ("57014", "canceling authentication due to timeout", True),
        ("28P01", 'password authentication failed for user "u"', False),
        ("08P01", "unsupported startup parameter: replication", False),
        ("55000", 'database "shop" is not currently accepting connections', False),
        ("28P01", "Passwort-Authentifizierung für Benutzer »u« fehlgeschlagen", None),
        ("3D000", "Datenbank »shop« existiert nicht", None),
        ("53300", "tut mir leid, schon zu viele Verbindungen", None),
    ],
)
def test_words_of_a_server(sqlstate: str, words: str, passes: bool | None) -> None:
    """Those of other languages are final after a while, but for a server that starts."""
    given = {"host": "127.0.0.1", "user": "u", "sslmode": "disable", "gssencmode": "disable"}
    with refusing(sqlstate, words) as port, pytest.raises(ReplicationError) as caught:
        ReplicationConnection(port=port, **given)
    assert isinstance(caught.value, RetryableError) == (passes is not False)
    assert getattr(caught.value, "retry_for", None) == (60.0 if passes is None else None)
    assert caught.value.code == ("connection_refused" if passes is False else "connection_lost")
    assert ("lc_messages" in str(caught.value.hint)) == (passes is None)
    assert words in str(caught.value)


def test_lines_of_libpq_are_told_apart() -> None:
    text = (
        'connection to server at "127.0.0.1", port 1 failed: Connection refused\n'
        "\tIs the server running on that host and accepting TCP/IP connections?\n"
        "Multiple connection attempts failed. All failures were:\n- host: 'a'\n- host: 'b'\n"
    )
    assert server_error("can't connect", text, None).message == (
        'can\'t connect to server at "127.0.0.1", port 1: Connection refused; '
        "Is the server running on that host and accepting TCP/IP connections? Multiple connection "
        "attempts failed. All failures were: - host: 'a'; - host: 'b'"
    )


@pytest.mark.parametrize("prefix", ["", "connection failed: ", "connection is bad: "])
def test_the_failure_to_connect_is_said_once(prefix: str) -> None:
    text = (
        'connection to server at "h" (::1), port 5432 failed: FATAL:  database "x" does not exist'
    )
    assert server_error("can't connect", prefix + text, None).message == (
        'can\'t connect to server at "h" (::1), port 5432: FATAL: database "x" does not exist'
    )


def test_an_error_that_passes_does_not_say_later() -> None:
    """It may stand before "connecting again in 0.1 s"."""
    error = server_error("the server ended the stream", "terminating connection", "57P01")
    assert isinstance(error, RetryableError)
    (advice,) = error.hint
    assert "again" not in str(advice)


def test_a_directory_may_have_any_name() -> None:
    """Such as one with the words of a refusal."""
    with expect_error(RetryableError, code="connection_lost", retry_for=None):
        ReplicationConnection("host=/nowhere/alert-db/password user=u")


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        (
            'connection to server at "invalid.example" (::1), port 5 failed: Connection refused',
            True,
        ),
        ("failed to resolve host 'password.example': Name or service not known", True),
        (
            "expired\n- host: 'password', port: '5432', hostaddr: '10.0.0.1': timeout expired",
            True,
        ),
        (
            'to server at "a" failed: timeout\nto "b" failed: FATAL:  role "u" does not exist',
            False,
        ),
        ('could not load private key file "/key": bad decrypt', False),
        ('definition of service "shop" not found', False),
        ("server does not support SSL, but SSL was required", False),
        ("server closed the connection unexpectedly", True),
    ],
)
def test_words_without_a_code(text: str, passes: bool) -> None:
    assert isinstance(server_error("can't connect", text, None), RetryableError) is passes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('FATAL:  password authentication failed for user "u"', "password"),
        ('to server at "a", port 5432 failed: fe_sendauth: no password supplied', "password"),
        ('FATAL:  database "does" does not exist', "database's name"),
        ('FATAL:  role "u" does not exist', "user's name"),
        (
            'FATAL:  no pg_hba.conf entry for host "::1", user "u", database "d", no encryption',
            "pg_hba.conf",
        ),
    ],
)
def test_advice_while_a_connection_is_made(text: str, names: str) -> None:
    """There is no SQLSTATE then."""
    said = " ".join(text.split())
    error = server_error("can't connect", text, None)
    assert (error.code, error.message) == ("connection_refused", f"can't connect: {said}")
    (advice,) = error.hint
    assert names in str(advice)
    assert not isinstance(error, RetryableError)


def test_what_may_not_pass_is_tried_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the first such error, and anew after one that is known to pass."""
    monkeypatch.setattr(link, "_LONGEST_WAIT", 0.5)
    now = itertools.count(1000.0, 25.0)
    monkeypatch.setattr(link.time, "monotonic", lambda: next(now))
    unclear = RetryableError("unclear")
    unclear.retry_for = 60.0
    retries = link.Retries(None)
    errors: list[Any] = [RetryableError("passes")] * 9 + [unclear] * 2
    for error in [*errors, *errors]:
        retries.plan(error)
    retries.plan(unclear)
    with pytest.raises(RetryableError) as caught:
        retries.plan(unclear)
    assert caught.value is unclear


def test_a_pooler_in_between_is_named(database18: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse the parameter by which a connection is one of replication, others drop it."""
    words = "unsupported startup parameter: replication"
    with refusing("08P01", words) as port, pytest.raises(ReplicationError) as refused:
        ReplicationConnection(f"host=127.0.0.1 port={port} user=u dbname=shop sslmode=disable")
    open_ = ConnectionParameters.open
    monkeypatch.setattr(
        ConnectionParameters, "open", lambda self, replication: open_(self, replication=False)
    )
    with pytest.raises(ReplicationError) as unknown:
        ReplicationConnection(database18.dsn)
    assert (refused.value.sqlstate, unknown.value.sqlstate) == (None, "42601")
    for raised in (refused, unknown):
        assert not isinstance(raised.value, RetryableError)
        assert raised.value.hint == (IDENTIFY_ADVICE["42601"],)
