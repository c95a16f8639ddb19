"""A server whose disk is put back to an earlier state, with its slots and on the same timeline.

Once its log is longer than what a capture has, no LSN tells that what came did not happen.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.expected_errors import expect_error
from support.postgres.servers import backup, execute, now, put_back
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import ReplicationConnection, RetryableError, capture, resent
from pgoutput_fast.replication.source import Source, Started
from pgoutput_fast.segments import SegmentReader, list_segments

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.slow]


class Captured:
    """A server's table t, and a directory."""

    def __init__(self, server: EmbeddedServer, directory: Path) -> None:
        self.server, self.directory = server, directory

    def capture(self, **given: Any) -> None:
        options: dict[str, Any] = {
            "slot": "s",
            "publications": ["p"],
            "create_slot": True,
            "until_lsn": now(self.server),
            **given,
        }
        capture(self.server.dsn(), directory=self.directory, **options)

    def insert(self, *ids: int, table: str = "t") -> None:
        execute(self.server, *(f"INSERT INTO {table} VALUES ({one})" for one in ids))

    def refused(self, **given: Any) -> None:
        """The capture is refused each time, and brings nothing."""
        before = self.ids()
        for _ in range(2):
            with expect_error(code="another_history") as caught:
                self.capture(**given)
            assert not isinstance(caught.value, RetryableError)
        assert self.ids() == before

    def ids(self) -> list[int]:
        """What was inserted into t, as the directory has it."""
        decoder = pf.Decoder()
        found = []
        for segment in list_segments(self.directory):
            with SegmentReader(segment.path) as reader:
                for frames in (batch.column("data").to_pylist() for batch in reader):
                    messages = [decoder.decode(frame) for frame in frames]
                    found += [int(m.new["id"]) for m in messages if isinstance(m, pf.Insert)]
        return found

    def beyond(self, end: int) -> None:
        """Have the server's log become longer, without a change of what is published."""
        while now(self.server) <= end:
            execute(self.server, "SELECT pg_switch_wal()", "INSERT INTO other VALUES (0)")


@pytest.fixture
def captured(own: EmbeddedServer, tmp_path: Path) -> Captured:
    """What was captured of a server with three rows."""
    execute(
        own,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE other (id int)",
        "CREATE PUBLICATION p FOR TABLE t",
        "CREATE PUBLICATION q FOR TABLE t, other WITH (publish = 'insert, truncate')",
        "ALTER SYSTEM SET wal_keep_size = '1GB'",
        "SELECT pg_reload_conf()",
    )
    made = Captured(own, tmp_path / "segments")
    made.capture()
    made.insert(1, 2, 3)
    made.capture()
    assert made.ids() == [1, 2, 3]
    return made


def test_what_was_captured_did_not_happen(captured: Captured) -> None:
    server = captured.server
    image = backup(server, slots=True)
    captured.insert(4, 5)
    captured.capture()
    end = now(server)
    put_back(server, image)
    captured.refused()
    captured.insert(-4, -5)
    captured.beyond(end)
    captured.refused()
    captured.refused(snapshot="only")


def put_back_before_others(captured: Captured) -> int:
    """Put the server back to before changes that were not published; where its log ended then."""
    server = captured.server
    image = backup(server, slots=True)
    captured.insert(*range(8), table="other")
    captured.capture()
    end = now(server)
    put_back(server, image)
    return end


def test_what_happened_was_not_captured(captured: Captured) -> None:
    """The directory's end is beyond the image, though nothing that it has is."""
    end = put_back_before_others(captured)
    captured.insert(-4)
    captured.beyond(end)
    captured.refused()


def test_nothing_happened_in_between(captured: Captured) -> None:
    """Without a change up to the directory's end, it has what happened."""
    end = put_back_before_others(captured)
    captured.beyond(end)
    captured.insert(-4)
    captured.capture()
    assert captured.ids() == [1, 2, 3, -4]


def test_under_a_capture_that_runs(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a new connection, as after any restart of the server, and is refused then."""
    server, stop = captured.server, threading.Event()
    image = backup(server, slots=True)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            captured.capture(until_lsn=None, stop=stop, max_delay=0.1)
        except pf.PgOutputError as error:
            errors.append(error)

    # By the time it comes again, the server's log is longer than what it has.
    put, again = threading.Event(), Source.again

    def later(*given: Any) -> Started:
        assert put.wait(60)
        return again(*given)

    monkeypatch.setattr(Source, "again", later)
    running = threading.Thread(target=run)
    running.start()
    captured.insert(4, 5)
    wait_until(lambda: captured.ids() == [1, 2, 3, 4, 5])
    end = now(server)
    put_back(server, image)
    captured.insert(-4, -5)
    captured.beyond(end)
    put.set()
    running.join(30)
    stop.set()
    running.join(30)
    assert not running.is_alive()
    (error,) = errors
    assert error.code == "another_history"
    captured.refused()


class Forgetful:
    """Has a server forget what was acknowledged since, as it may in a crash."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._slots = server.directory / "data" / "pg_replslot"
        self._kept = server.directory / "kept"
        self.save()

    def save(self) -> None:
        """Remember the slots as they are."""
        execute(self._server, "CHECKPOINT")
        shutil.rmtree(self._kept, ignore_errors=True)
        subprocess.run(["cp", "-a", self._slots, self._kept], check=True)

    def __call__(self) -> None:
        shutil.rmtree(self._slots)
        subprocess.run(["cp", "-a", self._kept, self._slots], check=True)
        self._server.restart("kill")


@pytest.fixture
def forgetful(captured: Captured) -> Forgetful:
    return Forgetful(captured.server)


def compared(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether it was looked what comes again."""
    return any(
        "comparing the transactions that the server would send" in one.message
        for one in caplog.records
    )


@pytest.mark.parametrize("two_phase", [False, True], ids=["", "two_phase"])
def test_what_comes_again_after_a_crash_is_the_same(
    captured: Captured,
    forgetful: Forgetful,
    caplog: pytest.LogCaptureFixture,
    version: int,
    two_phase: bool,
) -> None:
    """Of all that a stream can bring, and in all sessions since, whatever their options were."""
    if two_phase and version < 15:
        pytest.skip("prepared transactions come from PostgreSQL 15 on")
    server = captured.server
    captured.insert(10)
    # Streamed, as it is larger than logical_decoding_work_mem; with a part that was rolled back.
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("INSERT INTO t SELECT generate_series(1000, 4999)")
        connection.execute("SAVEPOINT a")
        connection.execute("INSERT INTO t SELECT generate_series(5000, 8999)")
        connection.execute("ROLLBACK TO a")
    with psycopg.connect(server.dsn()) as connection:  # nothing is left of it
        connection.execute("SAVEPOINT a")
        connection.execute("INSERT INTO t SELECT generate_series(5000, 8999)")
        connection.execute("ROLLBACK TO a")
        connection.execute("INSERT INTO other VALUES (1)")
    execute(server, "SELECT pg_logical_emit_message(true, 'p', 'x')", "TRUNCATE other")
    captured.capture(segment_bytes=1 << 10)
    given: dict[str, Any] = {"publications": ["p", "q"], "messages": True, "binary": True}
    if two_phase:
        given["two_phase"] = True
    execute(server, "BEGIN; INSERT INTO t VALUES (11); PREPARE TRANSACTION 'g'")
    execute(server, "SELECT pg_logical_emit_message(true, 'p', 'x')")
    execute(server, "SELECT pg_logical_emit_message(false, 'p', 'x')")
    captured.insert(12, table="other")
    captured.insert(13)
    captured.capture(**given)
    execute(server, "COMMIT PREPARED 'g'", "ALTER TABLE t ADD note text", "TRUNCATE t, other")
    execute(server, "ALTER PUBLICATION p DROP TABLE t")
    captured.insert(14)
    captured.capture(**given)
    execute(server, "ALTER PUBLICATION p ADD TABLE t", "DROP TABLE other")
    captured.insert(15)
    captured.capture(**given)
    captured.insert(16)
    forgetful()
    caplog.clear()
    with caplog.at_level("INFO", logger="pgoutput_fast"):
        captured.capture(**given)
    assert compared(caplog)
    caplog.clear()
    with caplog.at_level("INFO", logger="pgoutput_fast"):
        captured.capture(**given)
    assert not compared(caplog)
    found = captured.ids()
    large = list(range(1000, 5000))
    assert [one for one in found if one not in {1, 12}] == [2, 3, 10, *large, 13, 11, 14, 15, 16]


def test_prepared_before_the_place_where_the_slot_stands(
    captured: Captured, forgetful: Forgetful, version: int
) -> None:
    """Its changes are not sent again, and the server may not even have them any more."""
    if version < 15:
        pytest.skip("prepared transactions come from PostgreSQL 15 on")
    given: dict[str, Any] = {"two_phase": True}
    captured.capture(**given)
    execute(captured.server, "BEGIN; INSERT INTO t VALUES (4); PREPARE TRANSACTION 'g'")
    for row in (5, 6, 7):  # by the log of running transactions the slot needs less and less
        captured.capture(**given)
        execute(captured.server, "CHECKPOINT")
        captured.insert(row)
    captured.capture(**given)
    forgetful.save()
    execute(captured.server, "COMMIT PREPARED 'g'")
    captured.capture(**given)
    assert captured.ids() == [1, 2, 3, 5, 6, 7, 4]
    captured.insert(8)
    forgetful()
    captured.capture(**given)
    assert captured.ids() == [1, 2, 3, 5, 6, 7, 4, 8]


def test_sessions_of_different_publications_since(captured: Captured, forgetful: Forgetful) -> None:
    """What the first session was not to bring is not missed; what it was is looked for.

    Where the slot stands the second publication is not there yet, so that before PostgreSQL 18 the
    server does not tell what it would send of that.
    """
    server = captured.server
    execute(server, "CREATE PUBLICATION r FOR TABLE other")
    captured.insert(21, 22, table="other")
    captured.insert(4)
    image = backup(server, slots=True)
    captured.insert(5)
    captured.capture()
    captured.capture(publications=["r"])
    forgetful()
    captured.capture(publications=["r"])
    end = now(server)
    assert captured.ids() == [1, 2, 3, 4, 5]
    put_back(server, image)
    captured.insert(-5)
    captured.beyond(end)
    captured.refused()


def test_a_publication_that_was_added_to_the_capture(
    captured: Captured, forgetful: Forgetful
) -> None:
    """What it had before that is not missed, though the session since has brought nothing yet."""
    execute(captured.server, "CREATE PUBLICATION r FOR TABLE other")
    forgetful.save()
    captured.insert(21, 22, table="other")
    captured.capture()
    captured.capture(publications=["p", "r"])
    forgetful()
    captured.insert(4)
    captured.capture(publications=["p", "r"])
    assert captured.ids() == [1, 2, 3, 4]


def test_without_the_right_to_look(
    captured: Captured, forgetful: Forgetful, caplog: pytest.LogCaptureFixture
) -> None:
    server = captured.server
    execute(
        server,
        "REVOKE EXECUTE ON FUNCTION pg_logical_slot_peek_binary_changes FROM PUBLIC",
        "CREATE ROLE reader LOGIN REPLICATION",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader",
    )
    captured.insert(4)
    captured.capture()
    captured.insert(5)
    forgetful()
    dsn = f"{server.dsn()} user=reader"
    capture(dsn, slot="s", publications=["p"], directory=captured.directory, until_lsn=now(server))
    assert captured.ids() == [1, 2, 3, 4, 5]
    (told,) = [one.message for one in caplog.records if "can't check whether" in one.message]
    assert "permission denied for function pg_logical_slot_peek_binary_changes" in told


def test_without_room_for_the_answer(
    captured: Captured, forgetful: Forgetful, caplog: pytest.LogCaptureFixture
) -> None:
    execute(captured.server, "ALTER ROLE postgres SET temp_file_limit = '1MB'")
    execute(captured.server, "ALTER ROLE postgres SET work_mem = '64kB'")
    execute(captured.server, "INSERT INTO t SELECT generate_series(10, 50000)")
    captured.capture()
    captured.insert(4)
    forgetful()
    captured.capture()
    assert captured.ids() == [1, 2, 3, *range(10, 50001), 4]
    (told,) = [one.message for one in caplog.records if "can't check whether" in one.message]
    assert "(1024kB)" in told
    assert "temp_file_limit" in told
    assert "max_replication_slots" not in told


def test_many_come_again(
    captured: Captured, forgetful: Forgetful, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """More than are fetched at once; no timeout of the role ends that."""
    timeouts = ["statement_timeout", *["transaction_timeout"] * (version >= 17)]
    for name in timeouts:
        execute(captured.server, f"ALTER ROLE postgres SET {name} = '1min'")
    seen = []

    def fetched(connection: ReplicationConnection, stretch: Any) -> Any:
        seen.extend(connection.query(f"SHOW {name}") for name in timeouts)
        return original(connection, stretch)

    original = resent._fetched
    monkeypatch.setattr(resent, "_fetched", fetched)
    monkeypatch.setattr(resent, "_FETCHED", 3)
    captured.insert(*range(10, 20))
    captured.capture()
    captured.insert(20)
    forgetful()
    captured.capture()
    assert captured.ids() == [1, 2, 3, *range(10, 21)]
    assert seen == [[("0",)]] * len(timeouts)


def test_some_of_what_comes_again_was_deleted(captured: Captured, forgetful: Forgetful) -> None:
    """As everybody has read it; it can't be compared, and is not missed."""
    captured.insert(4, 5)
    captured.capture()
    captured.insert(6)
    captured.capture(keep_seconds=0.001)
    assert captured.ids() == [6]
    captured.insert(7)
    forgetful()
    captured.capture()
    assert captured.ids() == [6, 7]
