"""The numbers that a capture shows: its lag at a busy, an idle and a silent server, its rates."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("rich")

from rich.console import Console, Group

from pgoutput_fast.cli._live import folded
from pgoutput_fast.replication import CaptureProgress, server_position
from pgoutput_fast.replication.server_position import ServerPosition
from pgoutput_fast.watching import figures
from pgoutput_fast.watching.figures import Lag, Meter
from pgoutput_fast.watching.logs import RecordFormatter

YEAR_2000 = 946_684_800  # in seconds since 1970


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 5000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(figures, "time", made)
    monkeypatch.setattr(server_position, "time", made)
    return made


def progress(captured: int, committed: float | None = None, **more: Any) -> CaptureProgress:
    """`committed`: seconds after 2000 of the last transaction that is durable."""
    time = None if committed is None else int(committed * 1e6)
    numbers = {
        "frames": 0, "transactions": 0, "bytes": 0, "received_lsn": captured,
        "durable_lsn": captured, "changes": 0, "segments": 0, "open_transactions": 0,
        "spilled_bytes": 0, "connected": True, "reconnects": 0,
    }  # fmt: skip
    return CaptureProgress(**{**numbers, "captured_lsn": captured, "commit_time": time, **more})


def told(clock: Clock, lsn: int, server_time: float) -> ServerPosition:
    return ServerPosition(lsn, "d", YEAR_2000 + server_time, clock.now)


def lag(one: Lag, given: CaptureProgress, position: ServerPosition | None) -> tuple[Any, Any]:
    found = one.figures(given, position)
    return found.lag_bytes, found.lag_seconds


def test_lag_while_it_catches_up(clock: Clock) -> None:
    """Since the last commit that is durable, by the server's clock, which goes on between."""
    one = Lag()
    assert lag(one, progress(100, 10), None) == (None, None)
    assert lag(one, progress(100), told(clock, 900, 60)) == (800, 50)
    position = told(clock, 1000, 62)
    clock.now += 1
    assert lag(one, progress(300, 40), position) == (700, 23)
    # A clock that was set back does not make what is captured less.
    assert lag(one, progress(400, 39), position) == (600, 23)
    assert lag(one, progress(1000, 61), position) == (0, 0)


def test_lag_where_no_commit_is_known(clock: Clock) -> None:
    assert lag(Lag(), progress(100), told(clock, 900, 60)) == (800, None)


def test_an_idle_server_has_no_lag(clock: Clock) -> None:
    """However long ago the last commit was; and what comes then is not as old as that."""
    one = Lag()
    assert lag(one, progress(900, 10), told(clock, 900, 4000)) == (0, 0)
    clock.now += 2
    assert lag(one, progress(900, 10), told(clock, 950, 4002)) == (50, 2)
    assert lag(one, progress(990, 10), told(clock, 950, 4002)) == (0, 0)


def test_a_silent_server(clock: Clock) -> None:
    """What it said before is out of date: how much is missing is not known, since when is."""
    one = Lag()
    position = told(clock, 900, 60)
    assert lag(one, progress(900, 10), position) == (0, 0)
    clock.now += 100
    assert lag(one, progress(900, 10), position) == (None, 100)


def test_rates(clock: Clock) -> None:
    meter = Meter()
    clock.now += 2
    assert meter.rates(progress(0, changes=10, transactions=4, bytes=1000)) == (5, 2, 500)
    clock.now += 4
    assert meter.rates(progress(0, changes=30, transactions=4, bytes=1000)) == (5, 0, 0)


def test_lines_of_the_log_are_lines() -> None:
    """Whatever a server's message has in it; and a secret in none, in tracebacks neither."""
    try:
        raise ValueError("with s3cret\nand another line")
    except ValueError:
        failed = sys.exc_info()
    record = logging.LogRecord(
        "x", logging.ERROR, "", 0, "a %s\nb\x1b[31m\x7f\x9b", ("s3cret",), failed
    )
    for kind in ("text", "json"):
        formatter = RecordFormatter(kind)  # type: ignore[arg-type]
        formatter.change = lambda text: text.replace("s3cret", "***")
        line = formatter.format(record)
        assert "s3cret" not in line
        if kind == "json":
            assert line.isprintable()
            assert line.isascii()
            found = json.loads(line)
            assert found["message"] == "a ***\nb\x1b[31m\x7f\x9b"
            assert found["traceback"].endswith("ValueError: with ***\nand another line")
        else:
            first, *rest = line.splitlines()
            assert first.endswith("ERROR a ***\\nb\\x1b[31m\\x7f\\x9b")
            assert rest[-2:] == ["ValueError: with ***", "and another line"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (24, ["lag 0 │ 12 changes/s", "3 segments │ 0/15"]),
        (20, ["lag 0 │ 12 changes/s", "3 segments │ 0/15"]),
        (19, ["lag 0", "12 changes/s", "3 segments │ 0/15"]),
        (11, ["lag 0", "12 changes…", "3 segments", "0/15"]),
        (200, ["lag 0 │ 12 changes/s │ 3 segments │ 0/15"]),
    ],
)
def test_a_live_line_fits_the_terminal(width: int, lines: list[str]) -> None:
    parts = [("lag 0", "bold"), ("", ""), ("12 changes/s", ""), ("3 segments", ""), ("0/15", "dim")]
    console = Console(width=width, file=io.StringIO())
    with console.capture() as shown:
        console.print(Group(folded(parts, width)))
    assert shown.get().splitlines() == lines
