"""What a server says beside its answers: it fills no memory and no log, and breaks nothing."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psycopg")

from psycopg import sql
from support.expected_errors import expect_error
from support.postgres.talking_server import (
    COPY_BOTH,
    COPY_DONE,
    COPY_OUT,
    DONE,
    READY,
    TalkingServer,
    copied,
    error,
    notice,
    notification,
)

from pgoutput_fast import _impl, testing
from pgoutput_fast.connections import ConnectionParameters, result_error
from pgoutput_fast.errors import ReplicationError
from pgoutput_fast.replication import imported, receiver, walsender
from pgoutput_fast.replication.waiter import next_result

MANY = 40_000
FEW = 2000
"""More than libpq finds in what it reads at once."""
ODD = b"\xff\x9b\x80aZ"


@pytest.fixture
def talk() -> Iterator[Callable[..., ConnectionParameters]]:
    """Start a server; it gives the answer to a query that has a word, and says yes to others."""
    with contextlib.ExitStack() as stack:

        def start(word: bytes, answer: bytes, greeting: bytes | None = None) -> Any:
            server = TalkingServer(
                lambda query: answer if word in query else DONE + READY, greeting
            )
            stack.callback(server.close)
            return ConnectionParameters(server.dsn)

        yield start


def kept(pgconn: Any) -> int:
    """How many notifications libpq has kept, which it then has no more."""
    return sum(1 for _ in iter(pgconn.notifies, None))


def streamed(parameters: ConnectionParameters) -> receiver.Receiver:
    """A stream that has begun."""
    connection = parameters.open(replication=False)
    pgconn: Any = connection.pgconn
    pgconn.send_query(b"START_REPLICATION")
    result = next_result(pgconn)  # get_result() would wait with the lock that the server needs
    assert result is not None
    assert result.status == receiver.pq.ExecStatus.COPY_BOTH
    pgconn.nonblocking = 1
    made: Any = SimpleNamespace(
        pgconn=pgconn, wal_sender_timeout=0, left_out=None, close=connection.close,
        follow_timeline=lambda: None,
    )  # fmt: skip
    return receiver.Receiver(made, 0)


def test_notifications_beside_the_answer_to_a_query(talk: Any) -> None:
    with talk(b"SELECT", MANY * notification() + DONE + READY).open(replication=False) as one:
        one.execute("SELECT")
        assert kept(one.pgconn) < FEW
        assert not one._notifies_backlog
        one.pgconn.send_query(b"SELECT")
        assert next_result(one.pgconn) is not None
        assert kept(one.pgconn) < FEW


@pytest.mark.parametrize("implementation", ["cython", "python"])
def test_notifications_in_a_copy(
    talk: Any, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """Before it begins, between its rows and before its end."""
    found = _impl.twin("replication._libpq_frames", implementation)
    monkeypatch.setattr(imported, "twin", lambda _: found)
    row = copied(struct.pack("!hi", 1, 100_000) + bytes(100_000))
    answer = (
        MANY * notification() + COPY_OUT + copied(b"PGCOPY\n\xff\r\n\0" + bytes(8))
        + 50 * (row + MANY // 50 * notification())
        + copied(b"\xff\xff") + COPY_DONE + MANY * notification() + b"C\0\0\0\x0cCOPY 50\0" + READY
    )  # fmt: skip
    reader = imported.Reader(talk(b"COPY", answer), "s")
    counts: list[int] = []

    def check() -> None:
        counts.append(kept(reader.connection.pgconn))

    source = imported.CopySource(sql.Identifier("t"), sql.SQL("*"), None, "b")
    table = imported.SnapshotTable(1, "public", "t", (), None, 0, 1)
    rows = 0
    for one in reader.frames(source, imported.SnapshotRange(table, 1, 1, 0, None), check):
        rows += len(one.offsets) - 1
        check()
    reader.close()
    assert (rows, len(counts) > 4) == (50, True)
    assert sum(counts) < FEW


def test_notifications_in_a_stream(talk: Any) -> None:
    answer = COPY_BOTH + b"".join(
        copied(testing.xlog_data(b"frame", lsn, lsn, 1)) + MANY // 10 * notification()
        for lsn in range(1, 11)
    )
    one = streamed(talk(b"START", answer))
    count = 0
    for _ in range(20):
        received = receiver.ReceivedFrames()
        assert one.receive(received, 0.3)
        count += len(received)
        if not received:
            break
    assert count == 10
    assert kept(one.connection.pgconn) < FEW
    one.close()


def test_notices_are_logged_a_few_a_minute(
    talk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgoutput_fast")
    monkeypatch.setattr(walsender, "_notices", walsender._Notices())
    frame = copied(testing.xlog_data(b"frame", 1, 1, 1))
    for at_first in (True, False):
        one = streamed(talk(b"START", COPY_BOTH + 5000 * notice(b"so \x1b[31m") + frame))
        assert one.receive(received := receiver.ReceivedFrames(), 10)
        assert len(received) == 1
        one.close()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 20 if at_first else len(said) < 50
        assert all(text.isprintable() for text in said)
        walsender._notices._until = 0.0
    assert sum("more notices" in text for text in said) == 1


def test_a_sqlstate_that_is_no_text(talk: Any) -> None:
    refused = error(b"no", ODD) + READY
    with contextlib.closing(talk(b"SELECT", refused).open(replication=False)) as one:
        with (
            expect_error(ReplicationError, code="server_refused") as caught,
            imported.asking("can't ask", one),
        ):
            one.execute("SELECT")
        assert str(caught.value).isprintable()
        one.pgconn.send_query(b"SELECT")
        result = next_result(one.pgconn)
        assert result is not None
        told = result_error("can't ask", result)
        assert isinstance(told, ReplicationError)
        assert str(told).isprintable()
    with expect_error(code="connection_lost"):
        talk(b"", b"", greeting=error(b"no", ODD)).open(replication=False)
