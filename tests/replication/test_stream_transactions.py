"""Whole transactions of a stream: from connections that are made up, which may be lost."""

from __future__ import annotations

import itertools
import random
import threading
from array import array
from typing import Any

import pytest
from support.expected_errors import expect_error
from support.nightly import nightly

pytest.importorskip("psycopg")

import psycopg
from support.postgres.made_connection import Connection

from pgoutput_fast import Insert, _impl, testing
from pgoutput_fast.errors import PgOutputError, ReplicationError, RetryableError
from pgoutput_fast.replication import delivery, link, receiver, waiter
from pgoutput_fast.replication.source import Started
from pgoutput_fast.replication.stream import ReplicationStream

TABLE = testing.Table("t", {"id": "int4", "note": "text"})
LOST = psycopg.OperationalError("server closed the connection unexpectedly")


class Source:
    """Connections that are made up, one after the other; errors are raised."""

    def __init__(self, *connections):
        self.connections = list(connections)
        self.asked = []
        self.streams = True

    def stop_streaming(self):
        was, self.streams = self.streams, False
        return was

    def again(self, position, timeline, received):
        self.asked.append((position, timeline, received))
        made = self.connections.pop(0)
        if isinstance(made, Exception):
            raise made
        made.timeline = 1
        return Started(made, position, position, 4, made_slot=False)


@pytest.fixture(autouse=True)
def quick(impl, monkeypatch):
    frames = _impl.twin("replication._libpq_frames", impl.IMPLEMENTATION)
    monkeypatch.setattr(receiver, "pack_copy_data", frames.pack_copy_data)
    monkeypatch.setattr(receiver, "_COLLECT", 0.0)
    monkeypatch.setattr(receiver, "_ACKNOWLEDGE_INTERVAL", 0.0)
    monkeypatch.setattr(waiter, "IDLE_POLL", 0.005)
    monkeypatch.setattr(link, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(delivery, "IDLE_POLL", 0.02)


@pytest.fixture
def begin():
    streams = []

    def begin(pieces, *more, error=None, position=0, retry_for=None, source=None, **assembling):
        connection = Connection(pieces, error=error)
        connection.timeline = 1
        source = source or (Source(*more) if more else None)
        made = link.Link(
            receiver.Receiver(connection, position),
            4,
            source,
            retry_for=retry_for,
        )
        streams.append(ReplicationStream(made, position, assembling))
        return streams[-1], source

    yield begin
    for stream in streams:
        stream.close()


def server_of(count):
    """A server that has committed as many transactions, each with one row."""
    server = testing.Server()
    for number in range(count):
        with server.begin() as transaction:
            transaction.insert(TABLE, [number, "x"])
    return server


def copy_data(server, start=0):
    return list(server.copy_data())[start:]


def keepalive(lsn, answer=0):
    return testing.keepalive(lsn, 1, answer)


def ids(transactions):
    return [message.new["id"] for one in transactions for message in one if type(message) is Insert]


def test_packing_is_as_taking(impl):
    twin = _impl.twin("replication._libpq_frames", impl.IMPLEMENTATION)
    messages = [
        testing.xlog_data(b"abc", 5, 5, 1),
        testing.xlog_data(b"", 2**64 - 1, 5, -1),
        testing.xlog_data(b"d" * 100_000, 7, 5, 1),
        keepalive(9),
        testing.xlog_data(b"e", 8, 5, 1),
        b"w" + bytes(23),
        testing.xlog_data(b"f", 3, 5, 1),
        testing.xlog_data(b"g", 4, 5, 1),
    ]

    def both(most, drain=False):
        # Each of these comes when the socket is read.
        pieces = [messages[i : i + 2] for i in range(0, len(messages), 2)]
        given = {name: Connection(pieces, flows=True) for name in ("taken", "packed")}
        if not drain:
            for connection in given.values():
                connection.messages, connection.pieces = list(messages), []
        frames: list[Any] = []
        data, ends, lsns = bytearray(b"before"), array("q", [6]), array("Q")
        calls = 0
        while any(one.pieces or one.messages for one in given.values()):
            taken = twin.take_copy_data(given["taken"], frames, most, drain)
            packed = twin.pack_copy_data(given["packed"], data, ends, lsns, most, drain)
            assert packed[:3] == taken[:3]
            assert (packed[3] is None) == (taken[3] is None)
            assert packed[3] is None or bytes(packed[3]) == bytes(taken[3])
            calls += 1
        assert lsns.tolist() == [lsn for lsn, *_ in frames]
        starts = ends.tolist()
        assert [bytes(data[a:b]) for a, b in itertools.pairwise(starts)] == [
            frame for *_, frame in frames
        ]
        assert len(frames) == 6
        for connection in given.values():
            connection.close()
        return calls

    assert both(1 << 20) == both(1 << 20, drain=True) == 3
    assert both(1) == both(1, drain=True) == 8
    with pytest.raises(TypeError):
        twin.pack_copy_data(None, bytearray(), array("i", [0]), array("Q"), 1, False)


def test_libpq_is_called_directly():
    """Where psycopg is compiled: else each frame would cost three objects."""
    compiled = pytest.importorskip("pgoutput_fast.replication._libpq_frames")
    found = compiled._functions()
    assert (found is not None) == (psycopg.pq.__impl__ in ("binary", "c"))
    assert found is None or (len(set(found)) == 3 and all(found))


@pytest.mark.parametrize("name", ["take_copy_data", "pack_copy_data"])
def test_what_came_before_reading_failed_is_taken(impl, name):
    twin = _impl.twin("replication._libpq_frames", impl.IMPLEMENTATION)
    lost = psycopg.OperationalError("the server is gone")
    connection = Connection([[testing.xlog_data(b"abc", 5, 5, 1)]], error=lost, flows=True)
    into = ([],) if name == "take_copy_data" else (bytearray(), array("q", [0]), array("Q"))
    assert getattr(twin, name)(connection, *into, 100, True) == (28, 5, 0, lost)
    assert into[0] in ([(5, 5, 1, b"abc")], b"abc")
    connection.close()


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_transactions_come_whole_however_their_frames_come(begin, size):
    server = testing.Server()
    streamed = server.begin()
    streamed.insert(TABLE, [1, "a"])
    streamed.stream()
    with server.begin() as other:
        other.insert(TABLE, [2, "b"])
    streamed.insert(TABLE, [3, "c"])
    streamed.commit()
    data = copy_data(server)
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    stream, _ = begin(pieces)
    found = list(stream.transactions(stop_at=server.lsn))
    assert ids(found) == [2, 1, 3]
    assert [(one.xid, one.commit_lsn, one.end_lsn) for one in found] == [
        (one.xid, one.commit_lsn, one.end_lsn) for one in server.committed
    ]
    rows = [batch.num_rows for one in found for batch in one.batches()]
    assert rows == [1, 2]


def test_options_are_those_of_columns(begin):
    server = server_of(1)
    stream, _ = begin([copy_data(server)], tables="other.*")
    (one,) = stream.transactions(stop_at=server.lsn)
    assert list(one.batches()) == []
    stream, _ = begin([copy_data(server)], target="wrong")
    with expect_error(parameter="target"):
        stream.transactions()


def test_where_an_iteration_stops_the_next_goes_on(begin):
    server = server_of(5)
    third = server.committed[2]
    stream, _ = begin([copy_data(server)])
    assert ids(stream.transactions(stop_at=third.commit_lsn)) == [0, 1]
    assert ids(stream.transactions(stop_at=third.commit_lsn)) == []
    assert ids(stream.transactions(stop_at=third.commit_lsn + 1)) == [2]
    for transaction in stream.transactions():
        assert ids([transaction]) == [3]
        break
    assert ids(stream.transactions(idle_timeout=0.05)) == [4]
    assert ids(stream.transactions(idle_timeout=0)) == []


def test_a_message_is_before_an_lsn_if_it_ends_there(begin):
    server = testing.Server()
    server.message("a", b"")
    stream, _ = begin([copy_data(server)])
    assert list(stream.transactions(stop_at=server.lsn - 1)) == []
    assert [one.kind for one in stream.transactions(stop_at=server.lsn)] == ["message"]


def test_an_event_ends_it_between_two_transactions(begin):
    server = server_of(3)
    stop = threading.Event()
    stream, _ = begin([copy_data(server)])
    found = []
    for transaction in stream.transactions(stop=stop):
        found.append(transaction)
        if len(found) == 2:
            stop.set()
    assert ids(found) == [0, 1]
    assert ids(stream.transactions(stop=stop)) == []
    stop.clear()
    threading.Timer(0.1, stop.set).start()
    assert ids(stream.transactions(stop=stop)) == [2]


def test_closing_ends_it(begin):
    stream, _ = begin([copy_data(server_of(2))])
    found = []
    for transaction in stream.transactions():
        found.append(transaction)
        stream.close()
    assert ids(found) == [0]


def test_only_what_was_delivered_is_acknowledged(begin):
    server = server_of(2)
    stream, _ = begin([copy_data(server)], position=7)
    first, second = server.committed
    found = stream.transactions(stop_at=server.lsn)
    transaction = next(found)
    with expect_error(code="unfit_input"):
        stream.acknowledge(second.end_lsn)
    with expect_error(code="unfit_input"):
        stream.acknowledge(transaction.commit_time)
    assert stream.acknowledged_lsn == 7
    stream.acknowledge(transaction)
    assert stream.acknowledged_lsn == first.end_lsn
    stream.acknowledge(next(found).end_lsn)
    assert stream.acknowledged_lsn == second.end_lsn


@pytest.mark.parametrize("how", ["transactions", "groups", "__iter__"])
def test_a_closed_stream_is_not_taken_for_one_at_its_end(begin, how):
    stream, _ = begin([copy_data(server_of(3))])
    stream.close()
    with expect_error(code="unfit_input"):
        list(getattr(stream, how)())
    # One that is closed by its consumer meanwhile ends in good order.
    stream, _ = begin([copy_data(server_of(3))])
    for one in getattr(stream, how)():
        assert one is not None
        stream.close()


@pytest.mark.parametrize("given", [-1, -0.5, float("nan"), True, "1"])
@pytest.mark.parametrize("how", ["transactions", "groups"])
def test_an_idle_timeout_is_a_number_of_seconds(begin, how, given):
    stream, _ = begin([copy_data(server_of(1))])
    with pytest.raises((PgOutputError, TypeError), match="idle_timeout"):
        getattr(stream, how)(idle_timeout=given)


def test_idleness_is_acknowledged_once_all_else_is(begin):
    server = server_of(1)
    end = server.lsn
    stream, _ = begin([copy_data(server), [keepalive(end + 100)]])
    (transaction,) = stream.transactions(idle_timeout=0.1)
    assert stream.acknowledged_lsn == 0
    stream.acknowledge(transaction)
    assert list(stream.transactions(idle_timeout=0.1)) == []
    assert stream.acknowledged_lsn == end + 100


@pytest.mark.parametrize("how", ["transactions", "groups"])
def test_idleness_is_not_acknowledged_while_a_transaction_waits(begin, how):
    """It came already, before the keepalive, and is beyond where the iteration ends."""
    server = server_of(3)
    third = server.committed[2]
    stream, _ = begin([[*copy_data(server), keepalive(server.lsn + 100)]])
    last = 0
    for found in getattr(stream, how)(stop_at=third.commit_lsn):
        stream.acknowledge(found)
        last = found.end_lsn
    assert 0 < last < third.end_lsn
    assert list(getattr(stream, how)(stop_at=third.commit_lsn)) == []
    assert stream.acknowledged_lsn == last
    assert [found.end_lsn for found in getattr(stream, how)(stop_at=server.lsn)] == [third.end_lsn]


def test_idleness_is_not_acknowledged_while_a_transaction_is_open(begin):
    server = testing.Server()
    streamed = server.begin()
    streamed.insert(TABLE, [1, "a"])
    streamed.stream()
    before = len(server.sent)
    stream, _ = begin([[*copy_data(server), keepalive(server.lsn + 8)]])
    assert list(stream.transactions(idle_timeout=0.1)) == []
    assert stream.acknowledged_lsn == 0
    streamed.commit()
    connection = stream.connection
    connection.pieces = [[*copy_data(server, before), keepalive(server.lsn + 8)]]
    for transaction in stream.transactions(idle_timeout=0.1):
        stream.acknowledge(transaction)
    assert stream.acknowledged_lsn == server.lsn + 8


def told(connection):
    """The LSN that the last status says to be durable."""
    return int.from_bytes(connection.sent[-1][9:17], "big")


def test_nothing_beyond_a_prepared_transaction_is_told(begin):
    """A stream that begins beyond it would bring its commit alone."""
    server = testing.Server()
    prepared = server.begin()
    prepared.insert(TABLE, [1, "a"])
    prepared.prepare("gid")
    with server.begin() as other:
        other.insert(TABLE, [2, "b"])
    stream, _ = begin([[*copy_data(server), keepalive(server.lsn)]])
    (transaction,) = stream.transactions(idle_timeout=0.1)
    stream.acknowledge(transaction)
    assert list(stream.transactions(idle_timeout=0.1)) == []
    assert 0 < told(stream.connection) < transaction.commit_lsn
    assert stream.acknowledged_lsn == transaction.end_lsn
    before = len(server.sent)
    prepared.commit()
    stream.connection.pieces = [copy_data(server, before)]
    (transaction,) = stream.transactions(idle_timeout=0.1)
    assert (transaction.gid, ids([transaction])) == ("gid", [1])
    stream.acknowledge(transaction)
    stream.close()
    assert told(stream.connection) == transaction.end_lsn


def test_a_prepared_transaction_holds_until_its_commit_is_acknowledged(begin):
    """Its commit has come, but the consumer is not so far: the rows must come again after a kill.

    Nor is a position told between the PREPARE and the commit of one that is acknowledged, while
    another one holds: a stream from there would bring that commit without its rows.
    """
    server = testing.Server()
    safe, prepared = [], {}
    for step in ("x", "a+", "x", "b+", "a-", "x", "b-", "x", "c+", "x", "c rolled back", "x"):
        if step.endswith("+"):
            prepared[step[0]] = one = server.begin()
            one.insert(TABLE, [1, step])
            if step != "b+":  # "b" is prepared within the time of "a"
                safe.append(server.lsn)
            one.prepare(step[0])
        elif step.endswith("-"):
            prepared[step[0]].commit()
        elif step == "x":
            with server.begin() as other:
                other.insert(TABLE, [2, step])
        else:
            prepared[step[0]].abort()
    first, _, a, _, b, fourth, _, last = (one.end_lsn for one in server.committed)
    stream, _ = begin([copy_data(server)])
    said = {}
    for transaction in stream.transactions(idle_timeout=0.1):
        stream.acknowledge(transaction)
        stream._link.receiver._send_status()
        said[transaction.end_lsn] = told(stream.connection)
    before_a, before_c = safe
    assert list(said.values()) == [
        first, before_a, before_a, before_a, b, fourth, before_c, last
    ]  # fmt: skip
    assert a < b


def test_a_lost_connection_is_made_again_and_nothing_comes_twice(begin):
    server = server_of(6)
    data = copy_data(server)
    third = server.committed[2]
    # The first two end in the middle of a transaction. The server sends what is not acknowledged.
    stream, source = begin(
        [data[:9]],
        RetryableError("the server starts up"),
        Connection([data[:12]], error=LOST),
        Connection([data[10:]]),
        error=LOST,
    )
    found = []
    for transaction in stream.transactions(stop_at=server.lsn):
        found.append(transaction)
        if len(found) == 3:
            stream.acknowledge(transaction)
    assert ids(found) == [0, 1, 2, 3, 4, 5]
    assert [timeline for _, timeline, _ in source.asked] == [1, 1, 1]
    assert source.asked[-1][0] == third.end_lsn
    assert [received for *_, received in source.asked][:2] == [server.committed[1].end_lsn] * 2


def test_a_streamed_transaction_begins_anew_with_the_connection(begin):
    server = testing.Server()
    streamed = server.begin()
    streamed.insert(TABLE, [1, "a"])
    streamed.stream()
    first = copy_data(server)
    server.reconnect()
    streamed.insert(TABLE, [2, "b"])
    streamed.commit()
    again = copy_data(server, len(first))
    stream, _ = begin([first], Connection([again]), error=LOST)
    (transaction,) = stream.transactions(stop_at=server.lsn)
    assert ids([transaction]) == [1, 2]


def test_what_was_acknowledged_is_told_on_the_next_connection(begin):
    server = server_of(1)
    after = Connection([])
    stream, _ = begin([copy_data(server)], after, error=LOST)
    for transaction in stream.transactions(idle_timeout=0.3):
        stream.acknowledge(transaction)
    assert stream.connection is after
    assert told(after) == server.lsn


def test_the_end_of_one_servers_log_is_not_acknowledged_to_the_next(begin):
    """What a standby that lagged has there, once it is promoted, is something else."""
    server = server_of(2)
    pieces = [[*copy_data(server)[:2], keepalive(server.lsn)]]
    after = Connection([])
    stream, _ = begin(pieces, after, error=LOST)
    assert list(stream.transactions(idle_timeout=0.3)) == []
    assert stream.connection is after
    assert (stream.acknowledged_lsn, told(after)) == (0, 0)


def test_what_a_standby_sent_is_not_given_without_its_timeline(begin):
    """It may be of the time after the standby was promoted."""
    server = server_of(2)
    data = copy_data(server)
    first, second = Connection([data], error=LOST), Connection([data])

    def fails():
        raise RetryableError("can't ask the standby for its timeline")

    def promoted():
        second.timeline = 2

    first.follow_timeline, second.follow_timeline = fails, promoted
    stream, source = begin([], first, second, error=LOST)
    timelines = [stream.timeline for _ in stream.transactions(stop_at=server.lsn)]
    assert timelines == [2, 2]
    assert [received for *_, received in source.asked] == [0, 0]


def test_an_error_that_stays_ends_it(begin):
    stream, _ = begin([], PgOutputError("the slot is gone", code="no_slot"), error=LOST)
    with expect_error(code="no_slot"):
        list(stream.transactions())


@pytest.mark.parametrize("code", ["XX000", "XX001", "22012", "42704", None])
def test_an_internal_error_stops_streaming_and_only_once(begin, code):
    """The transaction that was in progress when the error came is given once, and whole."""
    server = server_of(1)
    streamed = server.begin()
    streamed.insert(TABLE, [1, "a"])
    streamed.stream()
    before = copy_data(server)
    server.reconnect()
    streamed.insert(TABLE, [2, "b"])
    streamed.commit()
    refused = ReplicationError("the server ended the stream")
    refused.sqlstate = code
    is_internal = code in ("XX000", "XX001")
    again = [Connection([copy_data(server, len(before))], error=refused)] if is_internal else []
    stream, source = begin([before], error=refused, source=Source(*again))
    found: list[int] = []

    def take():
        for transaction in stream.transactions():
            found.extend(ids([transaction]))

    with pytest.raises(ReplicationError) as raised:
        take()
    assert raised.value is refused
    assert found == ([0, 1, 2] if is_internal else [0])
    assert source.streams is not is_internal
    assert source.connections == []


def test_it_tries_for_as_long_as_it_is_told(begin):
    tries = [RetryableError(f"try {number}", code="standby") for number in range(1000)]
    stream, source = begin([], *tries, error=LOST, retry_for=0.05)
    with expect_error(RetryableError, code="standby"):
        list(stream.transactions())
    assert 0 < len(source.asked) < 20


def test_a_lost_connection_that_can_not_be_made_again(begin):
    stream, _ = begin([], error=LOST)
    with expect_error(RetryableError, code="connection_lost"):
        list(stream.transactions())


def test_an_event_ends_the_tries(begin, monkeypatch):
    monkeypatch.setattr(link, "_FIRST_WAIT", 60.0)
    server = server_of(1)
    stop = threading.Event()
    stream, source = begin([], Connection([copy_data(server)]), error=LOST)
    threading.Timer(0.1, stop.set).start()
    assert list(stream.transactions(stop=stop)) == []
    assert source.asked == []
    # The next iteration tries again.
    stream._link._retries.next_try = 0.0
    assert ids(stream.transactions(stop_at=server.lsn)) == [0]


def test_a_malformed_frame_comes_after_what_was_before_it(begin):
    server = server_of(2)
    stream, _ = begin([[*copy_data(server), testing.xlog_data(b"C", server.lsn)]])
    found = stream.transactions()
    assert ids([next(found), next(found)]) == [0, 1]
    for again in (found, stream.transactions()):
        with expect_error(code="stream_order"):
            next(again)


def test_an_interrupted_iteration_does_not_go_on(begin):
    stream, _ = begin([[*copy_data(server_of(1))[:2], KeyboardInterrupt()]])
    with pytest.raises(KeyboardInterrupt):
        list(stream.transactions())
    with expect_error(code="incomplete"):
        list(stream.transactions())


def test_frames_or_transactions_but_not_both(begin):
    stream, _ = begin([copy_data(server_of(1))])
    assert stream.receive(0) is not None
    with expect_error(code="unfit_input"):
        stream.transactions()
    stream, _ = begin([copy_data(server_of(1))])
    stream.transactions()
    with expect_error(code="unfit_input"):
        stream.receive(0)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"stop_at": "0/1"}, None),
        ({"stop_at": -1}, "unfit_input"),
        ({"idle_timeout": "1"}, None),
        ({"stop": len}, None),
    ],
)
def test_arguments_of_an_iteration(begin, options, code):
    stream, _ = begin([])
    named = next(iter(options))
    with expect_error(code=code) if code else pytest.raises(TypeError, match=named):
        stream.transactions(**options)


def test_a_server_that_says_nothing_is_given_up(begin, monkeypatch):
    """It was asked before."""
    server = server_of(1)
    stream, _ = begin([], Connection([copy_data(server)]))
    stream._link.receiver._silence_limit = 0.1
    stream._link.receiver._status_interval = 0.02
    silent = stream.connection
    assert ids(stream.transactions(stop_at=server.lsn)) == [0]
    assert any(message[-1] == 1 for message in silent.sent)


class Resending(Source):
    """A server that sends what was not acknowledged again, on connections that are lost.

    Parameters
    ----------
    server : testing.Server
        What was committed.
    losses : list of int
        After how many frames each connection is lost; the one after them stays.
    size : int
        How many frames come together.
    announces : bool
        Whether tables are announced again on each connection, as servers do.
    """

    def __init__(self, server, losses, size, announces):
        super().__init__()
        self.server, self.losses, self.size = server, list(losses), size
        self.announces = announces

    def sends(self, position):
        """What comes on a connection that begins there, and the error with which it ends."""
        first = sum(one.end_lsn <= position for one in self.server.committed)
        begins = [i for i, sent in enumerate(self.server.sent) if sent.frame[:1] == b"B"]
        start = [*begins, len(self.server.sent)][first]
        data = copy_data(self.server, start)
        if self.announces and data:
            data[1:1] = [testing.xlog_data(frame, 0) for frame in TABLE.announcement()]
        error = None
        if self.losses:
            data, error = data[: self.losses.pop(0)], LOST
        return [data[i : i + self.size] for i in range(0, len(data), self.size)], error

    def again(self, position, timeline, received):
        pieces, error = self.sends(position)
        self.connections.append(Connection(pieces, error=error))
        return super().again(position, timeline, received)


def told_of(found):
    """What is told of transactions, and their rows, one by one."""
    return [
        (one.xid, one.commit_lsn, one.end_lsn, one.commit_time, *ids([one]))
        for either in found
        for one in either.transactions()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *nightly(*range(2, 8))])
def test_groups_are_the_transactions_whatever_is_lost(begin, seed):
    """None comes twice and none is lost, wherever an iteration or a connection ends."""
    chance = random.Random(seed)
    server = server_of(chance.randrange(1, 25))
    expected = [
        (one.xid, one.commit_lsn, one.end_lsn, one.commit_time, number)
        for number, one in enumerate(server.committed)
    ]
    losses = [chance.randrange(0, len(server.sent)) for _ in range(chance.randrange(0, 4))]
    size = chance.choice((1, 2, 5, 1000))
    for name in ("transactions", "groups"):
        source = Resending(server, losses, size, announces=seed % 2 == 0)
        pieces, error = source.sends(0)
        stream, _ = begin(pieces, error=error, source=source)
        found = []
        together = 0
        stops = sorted(chance.choice(expected)[1] + chance.randrange(2) for _ in range(3))
        ends = [(stop_at, None) for stop_at in stops]
        for stop_at, idle_timeout in [*ends, (None, 0.03), (server.lsn, None)]:
            for one in getattr(stream, name)(stop_at=stop_at, idle_timeout=idle_timeout):
                found.append(one)
                together = max(together, one.commits)
                # The whole of it, one that is in it, or nothing.
                done = chance.choice([one, *one.transactions(), None])
                if done is not None:
                    stream.acknowledge(done)
            if stop_at is not None:
                assert told_of(found) == [one for one in expected if one[1] < stop_at]
        assert told_of(found) == expected
        assert together == 1 or name == "groups"
        rows = [batch.num_rows for one in found for batch in one.batches()]
        assert sum(rows) == len(expected)
        assert source.losses == []


def test_a_group_is_cut_where_an_iteration_stops(begin):
    server = server_of(7)
    ends = [one.end_lsn for one in server.committed]
    stream, _ = begin([copy_data(server)])
    first, group = stream.groups(stop_at=server.committed[4].commit_lsn)
    # The first one announces the table.
    assert (ids([first]), ids(group.transactions()), group.end_lsn) == ([0], [1, 2, 3], ends[3])
    assert list(stream.groups(stop_at=server.committed[4].commit_lsn)) == []
    with expect_error(code="unfit_input"):
        stream.acknowledge(ends[4])
    stream.acknowledge(ends[2])
    assert stream.acknowledged_lsn == ends[2]
    stream.acknowledge(group)
    assert stream.acknowledged_lsn == ends[3]
    # Of a group that was begun one by one, the rest comes so.
    assert ids([next(stream.transactions())]) == [4]
    assert [ids([one]) for one in stream.groups(stop_at=server.lsn)] == [[5], [6]]


@pytest.mark.parametrize("announces", [False, True])
def test_of_a_group_that_comes_again_only_what_is_new(begin, announces):
    server = server_of(9)
    ends = [one.end_lsn for one in server.committed]
    # The first connection ends within the sixth transaction, the second within the eighth.
    source = Resending(server, [1 + 3 * 5 + 2, 1 + 3 * 4 + announces + 1], 1000, announces)
    pieces, error = source.sends(0)
    stream, _ = begin(pieces, error=error, source=source)
    found = []
    for one in stream.groups(stop_at=server.lsn):
        found.append(ids(one.transactions()))
        if len(found) == 2:
            stream.acknowledge(ends[2])
    assert found[:2] == [[0], [1, 2, 3, 4]]
    assert [number for one in found for number in one] == list(range(9))
    # Those from the fourth on came again, and with them what follows.
    assert found[2] == [5, 6]
    assert [position for position, *_ in source.asked] == [ends[2]] * 2
