"""How a stream hands over what comes: a connection that is made up, whose data come in pieces."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import paths
from support.expected_errors import expect_error
from support.waiting import wait_until

pytest.importorskip("psycopg")

import psycopg
from support.postgres.made_connection import Connection, Notice

from pgoutput_fast import _impl, replication, testing
from pgoutput_fast.connections import server_error
from pgoutput_fast.errors import ReplicationError, RetryableError
from pgoutput_fast.replication import receiver, waiter, walsender
from pgoutput_fast.replication import stream as module
from pgoutput_fast.replication.link import Link


def xlog(lsn, frame):
    return testing.xlog_data(frame, lsn, lsn + 8, 1)


def keepalive(lsn, answer=0):
    return testing.keepalive(lsn, 1, answer)


def stream_of(connection):
    return module.ReplicationStream(Link(receiver.Receiver(connection, 0)))


@pytest.fixture
def begin(impl, monkeypatch):
    """Streams that never find that nothing has come for a while, once something came."""
    frames = _impl.twin("replication._libpq_frames", impl.IMPLEMENTATION)
    monkeypatch.setattr(receiver, "take_copy_data", frames.take_copy_data)
    monkeypatch.setattr(waiter, "IDLE_AFTER", 60.0)
    monkeypatch.setattr(waiter, "IDLE_POLL", 0.01)
    streams = []

    def begin(pieces, collect, **options):
        monkeypatch.setattr(receiver, "_COLLECT", collect)
        connection = Connection(pieces, **options)
        stream = stream_of(connection)
        streams.append(stream)
        return stream, connection

    yield begin
    for stream in streams:
        stream.close()


def batches(stream, count):
    """The frames of as many batches, and their keepalives."""
    found = []
    while len(found) < count:
        batch = stream.receive(10)
        found.append(([frame for _, _, _, frame in batch.frames], batch.keepalive_lsn))
    return found


PIECES = [
    [xlog(1, b"a"), xlog(2, b"b")],
    [xlog(3, b"c")],
    [xlog(4, b"d"), keepalive(9)],
    [xlog(5, b"e"), keepalive(10)],
]


def test_what_flows_goes_together(begin):
    stream, _ = begin(PIECES, collect=60.0)
    assert batches(stream, 1) == [([b"a", b"b", b"c", b"d", b"e"], 10)]
    assert stream.receive(0.05) == ([], None)


def test_what_has_waited_long_enough_goes_by_itself(begin):
    stream, _ = begin(PIECES, collect=0.0)
    assert batches(stream, 4) == [
        ([b"a", b"b"], None),
        ([b"c"], None),
        ([b"d"], 9),
        ([b"e"], 10),
    ]


def test_the_first_after_a_while_goes_once_nothing_follows(begin):
    stream, connection = begin([], collect=60.0)
    time.sleep(0.1)
    connection.pieces = [*PIECES[:2], []]
    connection.ends[1].send(b"wake up")
    began = time.monotonic()
    assert batches(stream, 1) == [([b"a", b"b", b"c"], None)]
    assert time.monotonic() - began < 30  # and not with what is collected for longer


def test_a_batch_that_is_large_goes_while_more_comes(begin, monkeypatch):
    monkeypatch.setattr(receiver, "_BATCH_BYTES", 50)
    stream, _ = begin([[xlog(i, b"x") for i in range(5)]], collect=60.0)
    assert batches(stream, 3) == [([b"x", b"x"], None), ([b"x", b"x"], None), ([b"x"], None)]


def test_what_came_before_the_connection_was_lost_is_handed_over(begin):
    lost = psycopg.OperationalError("server closed the connection")
    stream, _ = begin(PIECES[:2], collect=60.0, error=lost)
    assert batches(stream, 1) == [([b"a", b"b", b"c"], None)]
    with expect_error(RetryableError, code="connection_lost"):
        stream.receive(10)


def test_a_keepalive_that_asks_is_answered_while_frames_are_collected(begin):
    pieces = [[xlog(1, b"a"), keepalive(7, answer=1)], [xlog(8, b"b")]]
    stream, connection = begin(pieces, collect=60.0)
    assert batches(stream, 1) == [([b"a", b"b"], None)]
    # The first one is sent when the stream begins.
    written = [struct.unpack(">cQQQqB", message)[1:3] for message in connection.sent]
    assert written[:2] == [(0, 0), (7, 0)]


@pytest.mark.parametrize("timeout", [0, 0.02])
def test_what_came_until_the_timeout_is_handed_over(begin, timeout):
    stream, _ = begin([PIECES[0]], collect=60.0)
    assert stream.receive(timeout) == ([(1, 9, 1, b"a"), (2, 10, 1, b"b")], None)


def test_what_flows_goes_at_the_timeout(begin):
    stream, _ = begin([[xlog(1, b"x")] for _ in range(3000)], collect=60.0)
    assert 0 < len(stream.receive(0.02).frames) < 3000


def test_after_a_pause_what_flows_goes_together_again(begin, monkeypatch):
    """A batch for each packet would cost the consumer a multiple."""
    monkeypatch.setattr(waiter, "IDLE_AFTER", 0.1)
    stream, connection = begin([], collect=60.0)
    for pause in range(3):
        time.sleep(0.2)
        assert stream.receive(0.2) == ([], None)
        connection.pieces = [[xlog(10 * pause + i, b"x")] for i in range(1, 9)]
        connection.ends[1].send(b"wake up")
        found = batches(stream, 1)
        connection.ends[0].recv(100)
        assert [len(frames) for frames, _ in found] == [8]


def test_much_is_collected_through_a_short_rest(begin, monkeypatch):
    """A server that has much to bring rests where the machine has other work."""
    monkeypatch.setattr(receiver, "_MUCH_BYTES", 50)
    rest = [[]] * 3
    pieces = [[xlog(1, b"a")], *rest, [xlog(2, b"b"), xlog(3, b"c")], *rest, [xlog(4, b"d")]]
    stream, _ = begin(pieces, collect=60.0)
    assert batches(stream, 1) == [([b"a"], None)]
    monkeypatch.setattr(receiver, "_COLLECT", 0.5)
    assert batches(stream, 1) == [([b"b", b"c", b"d"], None)]


def test_the_time_of_the_consumer_is_not_a_pause_of_the_server(begin, monkeypatch):
    monkeypatch.setattr(waiter, "IDLE_AFTER", 0.2)
    stream, connection = begin([[xlog(1, b"a")]], collect=0.0)
    assert batches(stream, 1) == [([b"a"], None)]
    time.sleep(0.4)
    monkeypatch.setattr(receiver, "_COLLECT", 60.0)
    connection.pieces = [[xlog(2, b"b")], [xlog(3, b"c")]]
    connection.ends[1].send(b"wake up")
    assert batches(stream, 1) == [([b"b", b"c"], None)]


def test_an_iteration_that_is_left_loses_nothing(begin):
    stream, _ = begin(PIECES, collect=60.0)
    assert [received.frame for received in itertools.islice(stream, 2)] == [b"a", b"b"]
    for received in stream:
        assert received.frame == b"c"
        break
    assert batches(stream, 1) == [([b"d", b"e"], None)]
    assert stream.receive(0.05) == ([], None)


def test_a_forked_process_leaves_the_stream_alone(begin):
    stream, connection = begin([[xlog(1, b"a")]], collect=0.0)
    sent = len(connection.sent)
    child = os.fork()
    if not child:
        try:
            stream.close()
            os._exit(len(connection.sent) - sent)
        finally:
            os._exit(100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert batches(stream, 1) == [([b"a"], None)]


def test_who_does_not_receive_says_each_second_that_he_is_there(begin, monkeypatch):
    """The server's timeout may be less than it was when the stream began."""
    monkeypatch.setattr(receiver, "_AWAY_INTERVAL", 0.02)
    monkeypatch.setattr(receiver, "_ACKNOWLEDGE_INTERVAL", 0.01)
    _, connection = begin([], collect=0.0)
    wait_until(lambda: len(connection.sent) >= 4)


def test_an_interrupted_stream_does_not_go_on(begin):
    """The frame that was on its way may be lost."""
    pieces = [[keepalive(77)], [xlog(80, b"a"), KeyboardInterrupt(), xlog(81, b"b")]]
    stream, connection = begin(pieces, collect=0.0)
    assert stream.receive(10) == ([], 77)
    with pytest.raises(KeyboardInterrupt):
        stream.receive(10)
    for _ in range(2):
        with expect_error(code="incomplete"):
            stream.receive(10)
    stream.acknowledge(77)
    stream.close()
    # What is durable is told nevertheless.
    assert struct.unpack(">cQQQqB", connection.sent[-1])[2] == 77


def test_after_its_end_a_stream_has_nothing(begin):
    stream, _ = begin(PIECES, collect=60.0)
    assert "closed" not in repr(stream)
    stream.close()
    assert stream.receive(10) is None
    assert repr(stream).startswith("<closed ReplicationStream")


def test_a_stream_may_be_closed_while_it_receives(begin):
    """By the handler of a signal, or by another thread."""
    stream, connection = begin([], collect=60.0)
    connection.consume_input = stream.close
    assert stream.receive(10) is None
    stream, _ = begin([], collect=60.0)
    threading.Timer(0.2, stream.close).start()
    assert stream.receive(10) is None


@pytest.mark.parametrize(
    "data",
    [b"w" + bytes(23), b"k" + bytes(16), b"x" + bytes(30)],
)
def test_copy_data_of_no_known_kind(begin, data):
    stream, _ = begin([[xlog(1, b"a"), data]], collect=60.0)
    assert batches(stream, 1) == [([b"a"], None)]
    with expect_error(code="unfit_stream"):
        stream.receive(10)


def test_a_frame_without_a_byte_and_times_before_the_epoch(begin):
    data = testing.xlog_data(b"", 2**64 - 1, 5, -1)
    stream, _ = begin([[data]], collect=0.0)
    assert stream.receive(10) == ([(2**64 - 1, 5, -1, b"")], None)


def test_a_closed_stream_is_not_acknowledged(begin):
    stream, _ = begin([[xlog(5, b"a"), keepalive(9)]], collect=0.0)
    assert batches(stream, 1) == [([b"a"], 9)]
    stream.close()
    with expect_error(code="unfit_input"):
        stream.acknowledge(9)
    assert stream.acknowledged_lsn == 0


@pytest.mark.parametrize(
    ("lsn", "code"),
    [
        ("0/1", None),
        (True, None),
        (None, None),
        (1.0, None),
        (-1, "unfit_input"),
        (1 << 64, "unfit_input"),
        (10, "unfit_input"),
        # The commit time of a Commit, given by mistake.
        (843_000_000_000_000, "unfit_input"),
    ],
)
def test_what_is_no_lsn_is_not_acknowledged(begin, lsn, code):
    """It would end the thread that tells the server; or lose all changes before it."""
    stream, _ = begin([[xlog(5, b"a"), keepalive(9)]], collect=0.0)
    assert batches(stream, 1) == [([b"a"], 9)]
    with expect_error(code=code) if code else pytest.raises(TypeError):
        stream.acknowledge(lsn)
    assert stream.acknowledged_lsn == 0
    stream.acknowledge(9)
    stream.acknowledge(7)
    assert stream.acknowledged_lsn == 9


def test_a_transaction_is_acknowledged_by_its_end(begin):
    from pgoutput_fast.transactions import Assembler

    server = testing.Server()
    with server.begin() as transaction:
        transaction.message("a", b"b")
    (transaction,) = Assembler().feed(server.frames, server.lsns)
    stream, _ = begin([list(server.copy_data())], collect=0.0)
    with expect_error(code="unfit_input"):
        stream.acknowledge(transaction)
    assert len(stream.receive(10).frames) == 3
    stream.acknowledge(transaction)
    assert stream.acknowledged_lsn == transaction.end_lsn == server.lsn


class Result:
    status = psycopg.pq.ExecStatus.COMMAND_OK


class Beginning:
    status = psycopg.pq.ExecStatus.COPY_BOTH


def test_an_end_without_an_error_is_one(begin, caplog):
    """Else a supervisor would not start the program again after a restart of the server."""
    caplog.set_level("DEBUG", "pgoutput_fast")
    stream, connection = begin([[xlog(1, b"a")]], collect=0.0)
    assert batches(stream, 1) == [([b"a"], None)]
    connection.get_copy_data = lambda no_wait: (-1, memoryview(b""))
    connection.get_result = Result
    for _ in range(2):
        with expect_error(RetryableError, code="connection_lost"):
            stream.receive(10)
    with pytest.raises(RetryableError):
        next(iter(stream))
    assert caplog.records == []  # who connects again logs it, and nobody twice


@pytest.mark.parametrize(
    ("sqlstate", "said", "retryable"),
    [
        ("57P01", "terminating connection due to administrator command", True),
        ("57P03", "the database system is starting up", True),
        ("08006", "", True),
        ("53300", "too many clients", True),
        ("55006", "is active for PID 1", True),
        ("53400", "all replication slots are in use", False),
        ("42704", "no such slot", False),
        ("55000", "can no longer get changes", False),
        ("57P04", "the database was dropped", False),
        (None, "server closed the connection unexpectedly", True),
        (None, "SSL error: unexpected eof while reading", True),
        (None, "connection to server on socket failed: No such file or directory", True),
        (None, "FATAL:  the database system is shutting down", True),
        (None, 'FATAL:  password authentication failed for user "u"', False),
        (None, 'FATAL:  database "x" does not exist', False),
        (None, 'FATAL:  role "u" is not permitted to log in', False),
        (None, "SSL error: certificate verify failed", False),
        (None, "SSL error: tlsv1 alert unknown ca", False),
        (None, "server does not support SSL, but SSL was required", False),
        (None, 'no pg_hba.conf entry for host "::1"', False),
    ],
)
def test_what_passes_is_told_from_what_stays(sqlstate, said, retryable):
    error = server_error("can't", said, sqlstate)
    assert type(error) is (RetryableError if retryable else ReplicationError)
    assert error.sqlstate == sqlstate


def test_who_does_not_receive_is_alive_and_acknowledges(begin, monkeypatch):
    monkeypatch.setattr(receiver, "_ACKNOWLEDGE_INTERVAL", 0.05)
    stream, connection = begin([[keepalive(50)]], collect=0.0)
    assert stream.receive(10) == ([], 50)
    sent = len(connection.sent)
    stream.acknowledge(42)
    wait_until(lambda: len(connection.sent) > sent)
    assert struct.unpack(">cQQQqB", connection.sent[sent])[1:4] == (50, 42, 42)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("logical decoding requires wal_level >= logical", "and restart the server"),
        (
            'replication slots can only be used if "max_replication_slots" > 0',
            "and restart the server",
        ),
        ("can no longer get changes from replication slot", "new snapshots of all tables"),
    ],
)
def test_the_same_state_has_advice_for_what_was_said(said, advice):
    error = server_error("can't", said, "55000")
    assert error.message == f"can't: {said} (SQLSTATE 55000)"
    assert [one.endswith(advice) for one in error.hint] == [True]


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        ([Notice()], []),
        ([xlog(1, b"a"), xlog(2, b"b"), Notice()], [b"a", b"b"]),
        ([xlog(1, b"a"), keepalive(7), Notice()], [b"a"]),
        # The status that answers is sent before the next message is taken.
        ([xlog(1, b"a"), keepalive(7, answer=1), Notice()], [b"a"]),
        ([xlog(1, b"a"), Notice(b"another"), xlog(2, b"b"), Notice(), Notice()], [b"a", b"b"]),
    ],
)
def test_nothing_behind_what_the_server_leaves_out_is_given(begin, messages, given):
    stream, _ = begin([[*messages, xlog(8, b"x"), keepalive(9)], [xlog(10, b"y")]], collect=60.0)
    if given:
        assert batches(stream, 1) == [(given, None)]
    for _ in range(2):
        with expect_error(ReplicationError, code="no_publication"):
            stream.receive(10)


def test_it_is_come_upon_while_the_consumer_works(begin, monkeypatch):
    """By the thread that tells the server that the client is alive."""
    monkeypatch.setattr(receiver, "_BATCH_BYTES", 50)
    monkeypatch.setattr(receiver, "_AWAY_INTERVAL", 0.02)
    monkeypatch.setattr(receiver, "_ACKNOWLEDGE_INTERVAL", 0.01)
    behind = [xlog(3, b"x"), xlog(4, b"y"), keepalive(9)]
    stream, connection = begin([[xlog(1, b"a"), xlog(2, b"b"), Notice(), *behind]], collect=60.0)
    assert batches(stream, 1) == [([b"a", b"b"], None)]
    wait_until(lambda: len(connection.messages) <= len(behind))
    assert len(connection.messages) == len(behind)
    for _ in range(2):
        with expect_error(ReplicationError, code="no_publication"):
            stream.receive(10)


def test_it_comes_with_the_answer_that_the_stream_begins(begin, monkeypatch):
    _, connection = begin([], collect=0.0)
    connection.messages = [Notice(), xlog(1, b"x")]
    connection.send_query = lambda command: None
    connection.get_result = lambda: Beginning
    # libpq has read on when it gives the answer.
    connection.is_busy = connection.hand_over_notices
    monkeypatch.setattr(walsender.ReplicationConnection, "__init__", lambda _: None)
    monkeypatch.setattr(walsender.ReplicationConnection, "query", lambda *_: [])
    made = walsender.ReplicationConnection()
    made._connection, made.left_out, made.wal_sender_timeout = connection, None, 0
    made._beside, made.in_recovery = None, False
    made.settings = {"client_encoding": "UTF8"}
    made.start("s", 0, {})
    assert len(connection.messages) == 1
    stream = stream_of(made)
    with expect_error(ReplicationError, code="no_publication"):
        stream.receive(10)
    stream.close()


HERE = Path(__file__).parent

RECEIVING = """
import sys
sys.path[:0] = sys.argv[1:]
from test_stream import Connection, batches, receiver, stream_of, xlog
stream = stream_of(Connection([[xlog(1, b"a"), xlog(2, b"b")]]))
print(batches(stream, 1), receiver.take_copy_data.__module__)
stream.close()
print(sorted({"numpy", "pyarrow"} & set(sys.modules)))
"""


@pytest.mark.parametrize("name", ["cython", "python"])
def test_receiving_loads_no_numpy(name):
    done = subprocess.run(
        [sys.executable, "-c", RECEIVING, str(HERE), str(paths.TESTS)],
        env={**os.environ, "PGOUTPUT_FAST_IMPL": name},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    implementation = {"cython": "_libpq_frames", "python": "_pure_libpq_frames"}[name]
    assert (done.stdout.splitlines(), done.stderr) == (
        [f"[([b'a', b'b'], None)] pgoutput_fast.replication.{implementation}", "[]"],
        "",
    )


@pytest.mark.parametrize(
    "cls",
    [
        replication.Batch,
        replication.CaptureProgress,
        replication.CreatedSlot,
        replication.Received,
        replication.SlotState,
    ],
)
def test_help_says_what_each_field_is(cls):
    section = cls.__doc__.partition("Attributes\n")[2]
    named = [line.partition(" : ")[0] for line in section.splitlines() if " : " in line]
    assert sorted(", ".join(named).replace(",", " ").split()) == sorted(cls._fields)
