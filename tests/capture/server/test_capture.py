"""Receiving from a slot, and landing it in segments: nothing lost or twice, no secrets shown."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.expected_errors import expect_error
from support.postgres.servers import NewServer
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.changelog.read_frames import frame_runs
from pgoutput_fast.changelog.view import view_of
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import Argument
from pgoutput_fast.replication import (
    CaptureProgress,
    ReplicationConnection,
    ReplicationError,
    RetryableError,
    capture,
    connect,
    landing,
    walsender,
)
from pgoutput_fast.segments import SegmentReader, list_segments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.server


SETUP = (
    "CREATE TABLE t (id bigint PRIMARY KEY, body text)",
    "CREATE TABLE unpublished (id int)",
    "CREATE PUBLICATION p FOR TABLE t",
)


@pytest.fixture
def prepared(database: Any) -> Any:
    database.execute(*SETUP, slot_sql(database))
    return database


@pytest.fixture
def prepared18(database18: Any) -> Any:
    database18.execute(*SETUP, slot_sql(database18))
    return database18


def slot_of(database: Any) -> str:
    """Slots belong to the whole server: a name for each database."""
    return f"slot_{database.name}"


def slot_sql(database: Any) -> str:
    return f"SELECT pg_create_logical_replication_slot('{slot_of(database)}', 'pgoutput')"


def now(database: Any) -> int:
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()")
    return pf.parse_lsn(lsn)


def confirmed(database: Any) -> int:
    ((lsn,),) = database.execute(
        "SELECT confirmed_flush_lsn FROM pg_replication_slots"
        f" WHERE slot_name = '{slot_of(database)}'"
    )
    return pf.parse_lsn(lsn)


def run(database: Any, directory: Path, **options: Any) -> Any:
    """A capture of the database's slot, up to now."""
    options = {
        "until_lsn": now(database),
        "publications": ["p"],
        "adopt_slot": True,  # most are made with SQL
        **options,
    }
    dsn = options.pop("dsn", database.dsn)
    return capture(dsn, directory=directory, **{"slot": slot_of(database), **options})


def receive(stream: Any) -> Iterator[Any]:
    """Messages of a stream; the test fails if nothing comes."""
    decoder = pf.Decoder()
    while True:
        batch = stream.receive(30)
        assert batch is not None
        assert batch.frames or batch.keepalive_lsn is not None, "waited in vain"
        for *_, frame in batch.frames:
            yield decoder.decode(frame)


def messages(directory: Path) -> Iterator[Any]:
    """All messages, each file decoded on its own, without what is repeated."""
    for segment in list_segments(directory):
        decoder = pf.Decoder()
        with SegmentReader(segment.path) as reader:
            for batch in reader:
                for row in batch.to_pylist():
                    message = decoder.decode(row["data"])
                    again = segment.part and isinstance(message, pf.Begin)
                    if (row["xid"] is not None and not again) or isinstance(
                        message, pf.LogicalMessage
                    ):
                        yield message


def inserted(directory: Path) -> list[int]:
    return [m.new["id"] for m in messages(directory) if isinstance(m, pf.Insert)]


def test_two_runs_land_everything_once(prepared: Any, tmp_path: Path) -> None:
    prepared.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 3) g")
    seen = []
    first = run(prepared, tmp_path, progress=seen.append)
    assert (first.transactions, inserted(tmp_path)) == (1, [1, 2, 3])
    assert seen[-1].frames == first.frames == 6  # with B, R and C
    assert confirmed(prepared) == first.durable_lsn
    prepared.execute(
        "UPDATE t SET body = 'y' WHERE id = 2", "DELETE FROM t WHERE id = 1", "TRUNCATE t"
    )
    second = run(prepared, tmp_path)
    assert second.transactions == 3
    kinds = [type(message).__name__ for message in messages(tmp_path)]
    assert kinds == [
        *("Begin", "Relation", "Insert", "Insert", "Insert", "Commit"),
        *("Begin", "Relation", "Update", "Commit"),
        *("Begin", "Delete", "Commit"),
        *("Begin", "Truncate", "Commit"),  # its Relation, which comes again, is left out
    ]
    # Nothing more: the server has nothing, and the directory is as it was.
    before = sorted(tmp_path.glob("*.arrow"))
    assert run(prepared, tmp_path).frames == 0
    assert sorted(tmp_path.glob("*.arrow")) == before


def test_progress_tells_what_is_captured(prepared18: Any, tmp_path: Path) -> None:
    """Also where the server's log goes on without anything for the slot."""
    prepared18.execute(
        "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 3) g",
        "UPDATE t SET body = 'y' WHERE id < 3; DELETE FROM t WHERE id = 3; TRUNCATE t",
    )
    with prepared18.connect() as connection:
        ((before,),) = connection.execute("SELECT pg_current_wal_lsn()::text").fetchall()
        ((since,),) = connection.execute("SELECT clock_timestamp()").fetchall()
        connection.execute("INSERT INTO unpublished SELECT generate_series(1, 100)")
    until = now(prepared18)
    done = run(prepared18, tmp_path, until_lsn=until)
    assert (done.changes, done.transactions, done.segments) == (3 + 2 + 1 + 1, 2, 1)
    assert pf.parse_lsn(before) < done.durable_lsn == done.captured_lsn == until
    assert done.commit_time is not None
    age = (since - pf.values.EPOCH_UTC).total_seconds() - done.commit_time / 1e6
    assert 0 < age < 60
    assert (done.open_transactions, done.spilled_bytes, done.reconnects) == (0, 0, 0)
    assert done.connected


def test_captured_is_what_the_server_has_nothing_of(
    prepared18: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its log goes on without anything for the slot, before that position is stored."""
    monkeypatch.setattr(landing, "_ASKED_INTERVAL", 3600.0)
    monkeypatch.setattr(landing, "_ADVANCE_INTERVAL", 3600.0)
    prepared18.execute("INSERT INTO t VALUES (1, 'x')")
    before = now(prepared18)
    prepared18.execute("INSERT INTO unpublished SELECT generate_series(1, 100)")
    end, stop = now(prepared18), threading.Event()
    latest = time.monotonic() + 30
    seen: list[CaptureProgress] = []

    def tell(progress: CaptureProgress) -> None:
        if progress.captured_lsn >= end or time.monotonic() > latest:
            seen.append(progress)
            stop.set()

    run(prepared18, tmp_path, until_lsn=None, stop=stop, progress=tell)
    assert (seen[0].transactions, seen[0].segments) == (1, 1)
    assert seen[0].durable_lsn <= before < seen[0].captured_lsn == seen[0].received_lsn


def test_what_waits_for_its_segment_is_not_captured(prepared18: Any, tmp_path: Path) -> None:
    prepared18.execute("INSERT INTO t VALUES (1, 'x')")
    stop = threading.Event()
    seen: list[CaptureProgress] = []

    def tell(progress: CaptureProgress) -> None:
        if progress.frames:
            seen.append(progress)
            stop.set()

    done = run(prepared18, tmp_path, until_lsn=None, max_delay=60, stop=stop, progress=tell)
    waiting = seen[0]
    assert (waiting.transactions, waiting.segments, waiting.commit_time) == (1, 0, None)
    assert waiting.captured_lsn == waiting.durable_lsn < waiting.received_lsn
    assert done.captured_lsn >= done.durable_lsn >= waiting.received_lsn
    assert done.commit_time is not None


def test_metadata_say_where_it_comes_from(prepared: Any, tmp_path: Path) -> None:
    name = prepared.name
    prepared.execute(
        f"ALTER DATABASE {name} SET datestyle = 'German'",
        f"ALTER DATABASE {name} SET intervalstyle = 'iso_8601'",
        f"ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'",
        f"ALTER DATABASE {name} SET bytea_output = 'escape'",
        "INSERT INTO t VALUES (1, 'x')",
    )
    run(prepared, tmp_path)
    (segment,) = list_segments(tmp_path)
    with SegmentReader(segment.path) as reader:
        found = reader.metadata
    ((system,),) = prepared.execute("SELECT system_identifier FROM pg_control_system()")
    assert found.system_identifier == str(system)
    assert (found.database, found.slot, found.publications) == (name, slot_of(prepared), ("p",))
    assert found.server_version // 10000 == prepared.server.version
    assert found.encoding == "UTF8"
    assert found.settings == {
        "client_encoding": "UTF8",
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "extra_float_digits": "3",
        "bytea_output": "hex",
    }
    assert found.options == {"proto_version": "1", "publication_names": '"p"'}


@pytest.mark.slow
def test_a_first_row_larger_than_a_block_is_read_by_parts(prepared18: Any, tmp_path: Path) -> None:
    prepared18.execute("INSERT INTO t SELECT g, repeat('x', 5000000) FROM generate_series(1, 8) g")
    run(prepared18, tmp_path, segment_bytes=8 << 20)
    assert len(list_segments(tmp_path)) > 1
    view = view_of(tmp_path)
    plan = view.plan(view.first_position())
    assert plan is not None
    frames = [
        frame
        for read in plan.reads
        for frame_run in frame_runs(read, view.metadata)
        for frame in frame_run.frames.to_pylist()
    ]
    assert [frame[:1] for frame in frames].count(b"I") == 8


def test_publication_names_are_quoted(prepared18: Any, tmp_path: Path) -> None:
    names = ["it's", 'say "x"', "a,b", "back\\slash", "Großes P"]
    for name in names:
        quoted = name.replace('"', '""')
        prepared18.execute(f'CREATE PUBLICATION "{quoted}" FOR TABLE t')
    prepared18.execute("INSERT INTO t VALUES (1, 'x')")
    run(prepared18, tmp_path, publications=names)
    assert inserted(tmp_path) == [1]
    (segment,) = list_segments(tmp_path)
    with SegmentReader(segment.path) as reader:
        assert reader.metadata.publications == tuple(names)


def test_binary_and_logical_messages(prepared: Any, tmp_path: Path) -> None:
    prepared.execute(
        "SELECT pg_logical_emit_message(false, 'outside', 'one')",
        "BEGIN; INSERT INTO t VALUES (1, 'x'); SELECT pg_logical_emit_message(true, 'in', 'two');"
        " SELECT pg_logical_emit_message(false, 'outside', 'three'); COMMIT",
    )
    run(prepared, tmp_path, binary=True, messages=True)
    found = list(messages(tmp_path))
    assert [
        (m.prefix, m.content, m.transactional) for m in found if isinstance(m, pf.LogicalMessage)
    ] == [("outside", b"one", False), ("outside", b"three", False), ("in", b"two", True)]
    (insert,) = (m for m in found if isinstance(m, pf.Insert))
    assert insert.new.kind(0) == "b"
    assert insert.new["id"] == 1
    # A message alone makes a segment, and is not sent again.
    prepared.execute(
        "SELECT pg_logical_emit_message(false, 'alone', '')",
        "INSERT INTO unpublished VALUES (1)",  # its commit writes the WAL out
    )
    run(prepared, tmp_path, messages=True)
    assert run(prepared, tmp_path, messages=True).frames == 0
    assert [m.prefix for m in messages(tmp_path) if isinstance(m, pf.LogicalMessage)] == [
        *("outside", "outside", "in", "alone")
    ]


def test_large_transaction_is_many_parts_that_stand_alone(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgoutput_fast.segments.writer.BATCH_FRAMES", 500)
    prepared.execute(
        "INSERT INTO t VALUES (0, 'small')",
        "INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g",
        "INSERT INTO t VALUES (5001, 'small')",
    )
    run(prepared, tmp_path, segment_bytes=50_000)
    assert inserted(tmp_path) == list(range(5002))
    assert len(list_segments(tmp_path)) > 4
    assert {segment.part for segment in list_segments(tmp_path)} >= {0, 1, 2, 3}


WORKER = """
import sys
from pgoutput_fast.replication import capture, receiver
# Positions are told at once, and with a long delay much that was received is not durable: what is
# acknowledged too early is then lost by a kill.
receiver._ACKNOWLEDGE_INTERVAL = 0.0
capture(sys.argv[1], slot=sys.argv[2], publications=["p"], directory=sys.argv[3],
        adopt_slot=True, segment_bytes=50_000, max_delay=float(sys.argv[4]),
        progress=lambda progress: print("progress", flush=True))
"""


def worker(database: Any, directory: Path, max_delay: float = 0.1) -> subprocess.Popen[str]:
    arguments = [database.dsn, slot_of(database), str(directory), str(max_delay)]
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_in_the_middle_it_goes_on_without_loss_or_doubling(
    prepared18: Any, tmp_path: Path, kills: int
) -> None:
    """Killed again and again while transactions of many sizes are written."""
    rows = 0
    for kill in range(kills):
        process = worker(prepared18, tmp_path, max_delay=60.0 if kill % 2 else 0.01)
        assert process.stdout is not None
        with prepared18.connect() as connection:
            for number in range(40):
                count = 1 + (number * 37 + kill) % 100
                connection.execute(
                    "INSERT INTO t SELECT g, repeat('x', 90)"
                    " FROM generate_series(%s::bigint, %s::bigint) g",
                    [rows, rows + count - 1],
                )
                rows += count
                if number % 10 == 5:
                    assert process.stdout.readline() == "progress\n"
        process.kill()
        process.communicate()
    run(prepared18, tmp_path)
    assert inserted(tmp_path) == list(range(rows))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    commits = [m.end_lsn for m in messages(tmp_path) if isinstance(m, pf.Commit)]
    assert commits == sorted(set(commits))


@pytest.mark.slow
def test_interrupted_it_ends_and_frees_the_slot(prepared18: Any, tmp_path: Path) -> None:
    prepared18.execute("INSERT INTO t VALUES (1, 'x')")
    process = worker(prepared18, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "progress\n"
    assert prepared18.slots() == {slot_of(prepared18): True}
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr
    wait_until(lambda: prepared18.slots() == {slot_of(prepared18): False})
    run(prepared18, tmp_path)
    assert inserted(tmp_path) == [1]


def test_stop_keeps_what_came(prepared18: Any, tmp_path: Path) -> None:
    stop = threading.Event()
    ended = []
    thread = threading.Thread(
        target=lambda: ended.append(run(prepared18, tmp_path, until_lsn=None, stop=stop))
    )
    thread.start()
    try:
        prepared18.execute("INSERT INTO t VALUES (1, 'x')")
        # Silence ends a segment, without any other change.
        wait_until(lambda: tmp_path.exists() and len(list_segments(tmp_path)) == 1)
        prepared18.execute("INSERT INTO t VALUES (2, 'x')")
        wait_until(lambda: len(list_segments(tmp_path)) == 2)
    finally:
        stop.set()
        thread.join()
    assert ended[0].transactions == 2
    assert confirmed(prepared18) == ended[0].durable_lsn
    assert prepared18.slots() == {slot_of(prepared18): False}


def test_idle_slot_moves_on(prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WAL of other tables is let go, and what was acknowledged so is known after a restart."""
    monkeypatch.setattr(landing, "_ADVANCE_INTERVAL", -1.0)
    prepared.execute("INSERT INTO t VALUES (1, 'x')")
    run(prepared, tmp_path)
    landed = list_segments(tmp_path)[-1].end_lsn
    prepared.execute(
        "INSERT INTO unpublished SELECT FROM generate_series(1, 1000)",
        "SELECT pg_switch_wal()",
        "INSERT INTO unpublished VALUES (1)",
    )
    until = now(prepared)
    run(prepared, tmp_path, until_lsn=until)
    assert confirmed(prepared) >= until > landed
    position = json.loads((tmp_path / "position.json").read_text())["position"]
    assert pf.parse_lsn(position) == confirmed(prepared)
    prepared.execute("INSERT INTO t VALUES (2, 'x')")
    run(prepared, tmp_path)
    assert inserted(tmp_path) == [1, 2]


def test_slot_beyond_the_directory_is_refused(prepared: Any, tmp_path: Path) -> None:
    prepared.execute("INSERT INTO t VALUES (1, 'x')")
    run(prepared, tmp_path)
    prepared.execute(
        "INSERT INTO t VALUES (2, 'x')",
        f"SELECT pg_replication_slot_advance('{slot_of(prepared)}', pg_current_wal_lsn())",
    )
    with expect_error(code="changes_missing"):
        run(prepared, tmp_path)
    with expect_error(code="changes_missing"):
        connect(
            prepared.dsn, slot=slot_of(prepared), publications=["p"],
            start_lsn=list_segments(tmp_path)[-1].end_lsn,
        )  # fmt: skip
    assert prepared.slots() == {slot_of(prepared): False}


def test_slot_that_was_there_does_not_begin_another_directory(
    prepared: Any, tmp_path: Path
) -> None:
    """A mistyped directory: what came into it would be missing in the right one."""
    prepared.execute("INSERT INTO t VALUES (1, 'x')")
    before = confirmed(prepared)
    mistyped = tmp_path / "segmets"
    for directory in (mistyped, tmp_path):  # an empty one neither
        for create in (False, True):
            advised = [Argument("slot"), Argument("directory"), Argument("adopt_slot", True)]
            with expect_error(code="not_ours", path=str(directory), options=advised):
                run(prepared, directory, adopt_slot=False, create_slot=create)
    assert list(tmp_path.iterdir()) == []
    assert confirmed(prepared) == before
    run(prepared, tmp_path / "segments")
    # Begun, it needs no word any more.
    prepared.execute("INSERT INTO t VALUES (2, 'x')")
    run(prepared, tmp_path / "segments", adopt_slot=False)
    assert inserted(tmp_path / "segments") == [1, 2]


def test_until_lsn_is_exact(prepared: Any, tmp_path: Path) -> None:
    """All that was committed before it, and nothing of what came after."""
    prepared.execute("INSERT INTO t VALUES (1, 'x')", "INSERT INTO t VALUES (2, 'x')")
    until = now(prepared)
    prepared.execute(
        "INSERT INTO t VALUES (3, 'x')",
        "SELECT pg_logical_emit_message(false, 'outside', 'one')",
        "INSERT INTO t VALUES (4, 'x')",
    )
    first = run(prepared, tmp_path, until_lsn=until, messages=True)
    assert inserted(tmp_path) == [1, 2]
    assert (first.transactions, first.frames) == (2, 7)  # twice B I C, and R
    assert first.durable_lsn == confirmed(prepared) <= until
    assert first.received_lsn <= until
    # The same once more, and an earlier one, bring nothing.
    for lsn in (until, 0):
        assert run(prepared, tmp_path, until_lsn=lsn, messages=True).frames == 0
    commits = [m for m in messages(tmp_path) if isinstance(m, pf.Commit)]
    assert commits[-1].end_lsn <= until
    # A transaction counts by the start of its commit record, a message by the end of its record.
    with connect(prepared.dsn, slot=slot_of(prepared), publications=["p"], messages=True) as stream:
        found = receive(stream)
        third = next(m.final_lsn for m in found if isinstance(m, pf.Begin))
        message = next(m.lsn for m in found if isinstance(m, pf.LogicalMessage))
    run(prepared, tmp_path, until_lsn=third, messages=True)
    assert inserted(tmp_path) == [1, 2]
    run(prepared, tmp_path, until_lsn=third + 1, messages=True)
    assert inserted(tmp_path) == [1, 2, 3]
    for lsn, count in ((message - 1, 0), (message, 1)):
        run(prepared, tmp_path, until_lsn=lsn, messages=True)
        kinds = [m for m in messages(tmp_path) if isinstance(m, pf.LogicalMessage)]
        assert len(kinds) == count
    run(prepared, tmp_path, messages=True)
    assert inserted(tmp_path) == [1, 2, 3, 4]


def test_slot_in_use(prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walsender, "_BUSY_WAITS", (0.01, 0.01))
    with connect(prepared.dsn, slot=slot_of(prepared), publications=["p"]) as stream:
        with expect_error(ReplicationError, code="in_use", sqlstate="55006"):
            run(prepared, tmp_path)
        monkeypatch.setattr(walsender, "_BUSY_WAITS", (0.1,) * 100)
        threading.Timer(0.5, stream.close).start()
        # It is tried again until the slot is free.
        prepared.execute("INSERT INTO t VALUES (1, 'x')")
        run(prepared, tmp_path)
    assert inserted(tmp_path) == [1]


def test_a_slot_that_stays_in_use_is_told_briefly(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pgoutput_fast.replication.walsender")
    monkeypatch.setattr(walsender, "_BUSY_WAITS", (0.01, 0.02, 0.03))
    slot = slot_of(prepared)
    with connect(prepared.dsn, slot=slot, publications=["p"]):
        with expect_error(ReplicationError, code="in_use", sqlstate="55006") as caught:
            connect(prepared.dsn, slot=slot, publications=["p"])
        still = f"slot {slot!r} is still in use; trying again in"
        assert [one for one in caplog.messages if "trying again" in one] == [
            f"{caught.value}; trying again in 0.01 s", f"{still} 0.02 s", f"{still} 0.03 s",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"slot": "nothing"}, "no_slot"),
        ({"slot": "No'thing"}, "bad_option"),
        ({"slot": "physical"}, "not_ours"),
        ({"publications": ["p", "q"]}, "no_publication"),
        ({"publications": ['"p"']}, "no_publication"),
        ({"publications": ["p\0"]}, "bad_option"),
    ],
)
def test_what_is_not_there(
    prepared18: Any, tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    if options.get("slot") == "physical":
        options = {**options, "slot": f"physical_{prepared18.name}"}
        prepared18.execute(f"SELECT pg_create_physical_replication_slot('{options['slot']}')")
    given = {"slot": slot_of(prepared18), "publications": ["p"], **options}
    try:
        with expect_error(code=code):
            capture(prepared18.dsn, directory=tmp_path / "new", **given)
    finally:
        prepared18.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            f" WHERE slot_name = 'physical_{prepared18.name}'"
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"until_lsn": -1}, "unfit_input"),
        ({"until_lsn": 1 << 64}, "unfit_input"),
        ({"segment_bytes": 0}, "bad_option"),
        # Those of other types.
        ({"slot": None}, None),
        ({"until_lsn": "0/1"}, None),
        ({"until_lsn": 1.0}, None),
        ({"until_lsn": True}, None),
        # Not a function of its own: tests have the same names in every process.
        ({"stop": len}, None),
        ({"progress": 1}, None),
        ({"directory": None}, None),
        ({"directory": b"x"}, None),
        ({"segment_bytes": "1"}, None),
        ({"binary": "false"}, None),
        ({"messages": 1}, None),
        ({"create_slot": "yes"}, None),
        ({"adopt_slot": None}, None),
        *[
            ({"dsn": dsn}, None)
            for dsn in (1.5, ["s3cret"], b"password=s3cret", {"password": "s3cret"})
        ],
    ],
    ids=str,
)
def test_wrong_arguments_leave_nothing_behind(
    database18: Any, tmp_path: Path, options: dict[str, Any], code: str | None
) -> None:
    database18.execute(*SETUP)
    given = {"create_slot": True, "directory": tmp_path / "new", **options}
    named = "connection string" if "dsn" in options else next(iter(options))
    with expect_error(code=code) if code else pytest.raises(TypeError, match=named) as caught:
        run(database18, given.pop("directory"), **given)
    assert "s3cret" not in str(caught.value)
    assert database18.slots() == {}
    assert list(tmp_path.iterdir()) == []


def test_slot_is_made_on_request(database: Any, tmp_path: Path) -> None:
    database.execute(*SETUP, "INSERT INTO t VALUES (1, 'before')")
    run(database, tmp_path, create_slot=True)
    database.execute("INSERT INTO t VALUES (2, 'after')")
    run(database, tmp_path, create_slot=True)
    assert inserted(tmp_path) == [2]


def test_invalidated_slot(tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "wal_keep_size": 0}
    with NewServer(18, settings) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for statement in SETUP:
                connection.execute(statement.encode())
            connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
            for _ in range(4):
                connection.execute("INSERT INTO unpublished VALUES (1)")
                connection.execute("SELECT pg_switch_wal()")
            connection.execute("CHECKPOINT")
        with expect_error(code="changes_missing"):
            capture(server.dsn(), slot="s", publications=["p"], directory=tmp_path)


@pytest.mark.slow
def test_end_of_the_server_is_an_error_and_harms_nothing(tmp_path: Path) -> None:
    with NewServer(18) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for statement in SETUP:
                connection.execute(statement.encode())
            connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
            connection.execute("INSERT INTO t VALUES (1, 'x')")
            connection.execute("BEGIN")
        threading.Timer(1.0, server.stop).start()
        with expect_error(RetryableError, code="connection_lost"):
            capture(
                server.dsn(), slot="s", publications=["p"], directory=tmp_path, adopt_slot=True,
                retry_for=0.5,
            )  # fmt: skip
    assert inserted(tmp_path) == [1]


def server_is_read(server: EmbeddedServer) -> bool:
    """Whether its slot is in use, and has sent everything."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        sent = connection.execute(
            "SELECT sent_lsn >= pg_current_wal_lsn() FROM pg_stat_replication"
        ).fetchall()
    return sent == [(True,)]


@pytest.mark.slow
def test_a_restart_of_the_server_is_survived(tmp_path: Path) -> None:
    with NewServer(18) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for statement in SETUP:
                connection.execute(statement.encode())
            connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
            connection.execute("INSERT INTO t VALUES (1, 'x')")
        stop = threading.Event()
        landed = []
        capturing = threading.Thread(
            target=lambda: landed.append(
                capture(
                    server.dsn(), slot="s", publications=["p"], directory=tmp_path,
                    adopt_slot=True, max_delay=60.0, stop=stop,
                )
            )
        )  # fmt: skip
        capturing.start()
        # What came before the connection is lost is made durable then, whatever max_delay says.
        wait_until(lambda: server_is_read(server))
        server.restart()
        wait_until(lambda: list_segments(tmp_path))
        assert inserted(tmp_path) == [1]
        wait_until(lambda: server_is_read(server))
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO t VALUES (2, 'x')")
        time.sleep(0.5)
        stop.set()
        capturing.join()
        assert [progress.transactions for progress in landed] == [2]
    assert inserted(tmp_path) == [1, 2]


def test_progress_is_told_while_nothing_comes(
    prepared18: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "_IDLE_PROGRESS", 0.0)
    stop = threading.Event()
    seen: list[Any] = []

    def progress(told: Any) -> None:
        seen.append(told)
        if len(seen) == 5:
            stop.set()

    run(prepared18, tmp_path, until_lsn=None, stop=stop, progress=progress)
    assert [told.frames for told in seen] == [0] * 5


def test_what_happens_is_logged_without_secrets(
    tcp_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pgoutput_fast")
    with psycopg.connect(tcp_server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION logged FOR ALL TABLES")
    dsn = tcp_server.dsn(tcp=True)
    with connect(dsn, slot="logged", publications=["logged"], temporary=True):
        pass
    found = [(one.name, one.levelname, one.getMessage().split(" ")[0]) for one in caplog.records]
    assert found == [
        ("pgoutput_fast.replication.walsender", "DEBUG", "connected"),
        ("pgoutput_fast.replication.walsender", "INFO", "made"),
        ("pgoutput_fast.replication.walsender", "DEBUG", "START_REPLICATION"),
    ]
    assert psycopg.conninfo.conninfo_to_dict(dsn)["password"] not in caplog.text


def test_stream_that_the_server_ends_with_an_error(prepared: Any, tmp_path: Path) -> None:
    """A row filter that raises: no frame of that transaction comes, only the error."""
    prepared.execute(
        "CREATE TABLE f (id int PRIMARY KEY)",
        "ALTER PUBLICATION p ADD TABLE f WHERE (1 / id > 0)",
        "INSERT INTO f VALUES (1)",
        "INSERT INTO f VALUES (0)",
    )
    with expect_error(ReplicationError, code="server_refused", sqlstate="22012"):
        run(prepared, tmp_path)
    assert prepared.slots() == {slot_of(prepared): False}


def _rows(number: int, first: int, last: int, columns: str = "") -> str:
    return f"INSERT INTO t SELECT g, '{number}'{columns} FROM generate_series({first}, {last}) g"


def test_what_the_server_can_not_stream_comes_whole(
    prepared18: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL 18.4 fails to decode this transaction in progress: it finds no relation."""
    statements = [
        _rows(1, 1, 3000),
        "SAVEPOINT s",
        "ALTER TABLE t ADD x int DEFAULT 3",
        _rows(2, 3001, 6000, ", g"),
        "ROLLBACK TO s",
        _rows(3, 3001, 6000),
        "ALTER TABLE t ADD y text DEFAULT 'q'",
        _rows(4, 6001, 9000),
        "SAVEPOINT s",
        "TRUNCATE t",
        "ROLLBACK TO s",
        "DELETE FROM t WHERE id % 11 = 0",
    ]
    whole = f"{slot_of(prepared18)}_whole"
    prepared18.execute(f"SELECT pg_create_logical_replication_slot('{whole}', 'pgoutput')")
    with prepared18.connect() as connection, connection.transaction():
        for statement in statements:
            connection.execute(statement.encode())
    little = prepared18.dsn + " options='-c logical_decoding_work_mem=64kB'"
    with caplog.at_level(logging.WARNING, "pgoutput_fast"):
        ended = run(prepared18, tmp_path / "streamed", dsn=little)
    told = [one for one in caplog.records if "without streaming" in one.getMessage()]
    assert ended.reconnects == len(told) <= 1  # a later server may have no such fault
    ended = run(prepared18, tmp_path / "whole", dsn=little, slot=whole, streaming=False)
    assert ended.reconnects == 0
    streamed, expected = (
        [one for one in messages(tmp_path / name) if isinstance(one, (pf.Insert, pf.Delete))]
        for name in ("streamed", "whole")
    )
    assert len(expected) == 9000 + 9000 // 11
    assert streamed == expected


SECRET = "s3cr€t/p@ss:word"


@pytest.mark.parametrize(
    ("dsn", "code"),
    [
        (
            "host={host} port={port} user=postgres dbname=postgres password='{secret}'",
            "connection_refused",
        ),
        ("postgresql://postgres:{secret}@{host}:{port}/postgres", "bad_option"),
        ("postgresql://postgres:a@{secret}@{host}:{port}/postgres", "bad_option"),
        ("postgresql://postgres:x/{secret}@{host}:{port}/postgres", "bad_option"),
        ("host={host} {secret}", "bad_option"),
        ("host={host} password={secret} nonsense={secret}", "bad_option"),
    ],
)
def test_password_is_in_no_message(
    tcp_server: EmbeddedServer, tmp_path: Path, dsn: str, code: str
) -> None:
    given = dsn.format(host="127.0.0.1", port=tcp_server.port, secret=SECRET)
    with expect_error(code=code) as caught:
        capture(given, slot="s", publications=["p"], directory=tmp_path)
    # With what Python prints of the causes.
    text = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    lines = [line for line in text.splitlines() if "SECRET" not in line and "given" not in line]
    # Nor does anything have it that a tool finds which follows causes and looks into objects.
    error: BaseException | None = caught.value
    while error is not None:
        lines.append(f"{error!r} {vars(error)!r}")
        error = error.__cause__ or error.__context__
    for part in (SECRET, "s3cr", "p@ss", "word'", "ss:word"):
        assert not any(part in line for line in lines), lines


@pytest.fixture(scope="module")
def tcp_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(18, {"log_min_messages": "fatal"}, tcp=True) as server:
        yield server


def test_tcp_and_reprs(tcp_server: EmbeddedServer, tmp_path: Path) -> None:
    with psycopg.connect(tcp_server.dsn(), autocommit=True) as connection:
        for statement in SETUP:
            connection.execute(statement.encode())
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        connection.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 20000) g")
        row = connection.execute("SELECT pg_current_wal_lsn()").fetchone()
    assert row is not None
    dsn = tcp_server.dsn(tcp=True)
    password = psycopg.conninfo.conninfo_to_dict(dsn)["password"]
    with ReplicationConnection(dsn) as replication:
        assert str(password) not in repr(replication)
    capture(
        dsn, slot="s", publications=["p"], directory=tmp_path, adopt_slot=True,
        until_lsn=pf.parse_lsn(row[0]),
    )  # fmt: skip
    assert inserted(tmp_path) == list(range(1, 20001))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(str(password).encode() not in path.read_bytes() for path in written)


def test_an_initial_snapshot_over_tcp(
    tcp_server: EmbeddedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers that are smaller than what a COPY's data are waited for with wake the client too."""
    with psycopg.connect(tcp_server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE copied")
    with psycopg.connect(tcp_server.dsn(dbname="copied"), autocommit=True) as connection:
        # Rows that come in parts, so that the rest of each is waited for.
        for n in range(8):
            connection.execute(f"CREATE TABLE t{n} (id int PRIMARY KEY, v text)".encode())
            connection.execute(f"ALTER TABLE t{n} ALTER v SET STORAGE EXTERNAL".encode())
            rows = f"SELECT g, repeat('v', 300000) FROM generate_series(1, {1 + 3 * n}) g"
            connection.execute(f"INSERT INTO t{n} {rows}".encode())
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        dsn = tcp_server.dsn(tcp=True, dbname="copied")
        capture(
            dsn, slot="copied", publications=["p"], directory=tmp_path, snapshot="only",
            create_slot=True,
        )  # fmt: skip
        found: dict[str, list[int]] = {f"t{n}": [] for n in range(8)}
        for segment in sorted((tmp_path / "snapshots").glob("*.arrow")):
            decoder = pf.Decoder()
            with SegmentReader(segment) as reader:
                for batch in reader:
                    for frame in batch.column("data").to_pylist():
                        message = decoder.decode(frame)
                        if isinstance(message, pf.Insert):
                            found[message.relation.name].append(message.new["id"])
    assert not [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    for n in range(8):
        assert sorted(found[f"t{n}"]) == list(range(1, 2 + 3 * n))


@pytest.mark.slow
def test_keepalives_are_answered_while_the_sink_stalls(prepared: Any) -> None:
    """The sink takes nothing for longer than the server's timeout, with all buffers full."""
    prepared.execute("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g")
    dsn = prepared.dsn + " options='-c wal_sender_timeout=1s'"
    with connect(dsn, slot=slot_of(prepared), publications=["p"]) as stream:
        assert stream.connection.wal_sender_timeout == 1
        found = []
        for message in receive(stream):
            if isinstance(message, pf.Insert):
                found.append(message.new["id"])
                if len(found) in (1, 10000):
                    time.sleep(2.5)
            elif isinstance(message, pf.Commit):
                stream.acknowledge(message.end_lsn)
                break
    assert found == list(range(1, 20001))
    assert confirmed(prepared) == message.end_lsn


def test_descriptors_may_be_many(prepared18: Any) -> None:
    """select() knows 1024 of them."""
    prepared18.execute("INSERT INTO t VALUES (1, 'x')")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(1100):
                files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            with connect(prepared18.dsn, slot=slot_of(prepared18), publications=["p"]) as stream:
                assert next(iter(stream)).frame[:1] == b"B"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_only_acknowledged_is_not_sent_again(prepared: Any) -> None:
    prepared.execute("INSERT INTO t VALUES (1, 'x')", "INSERT INTO t VALUES (2, 'x')")

    def ids(*, acknowledge: int) -> list[int]:
        """Ids that come; after which of them is acknowledged."""
        found = []
        with connect(prepared.dsn, slot=slot_of(prepared), publications=["p"]) as stream:
            for message in receive(stream):
                if isinstance(message, pf.Insert):
                    found.append(message.new["id"])
                elif isinstance(message, pf.Commit):
                    if acknowledge in found:
                        stream.acknowledge(message.end_lsn)
                        acknowledge = 0
                    if found[-1] == 2:
                        return found
        raise AssertionError

    assert ids(acknowledge=0) == [1, 2]
    assert ids(acknowledge=1) == [1, 2]
    assert ids(acknowledge=0) == [2]


def test_iteration_gives_named_fields(prepared18: Any) -> None:
    prepared18.execute("INSERT INTO t VALUES (1, 'x')")
    with connect(prepared18.dsn, slot=slot_of(prepared18), publications=["p"]) as stream:
        first = next(iter(stream))
    assert first.frame[:1] == b"B"
    assert first.lsn == first.wal_end > 0
    assert first.send_time > pf.decode(first.frame).commit_time


@pytest.mark.slow
def test_stream_leaves_no_thread_behind(prepared18: Any) -> None:
    threads = threading.active_count()
    stream = connect(prepared18.dsn, slot=slot_of(prepared18), publications=["p"])
    assert threading.active_count() == threads + 1
    assert stream.receive(0.01) is not None
    stream.close()
    stream.close()
    assert threading.active_count() == threads
    assert stream.receive() is None
    assert prepared18.slots() == {slot_of(prepared18): False}
