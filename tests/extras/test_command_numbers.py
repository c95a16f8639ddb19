"""Options of the command that are numbers of bytes or of seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("psycopg")
pytest.importorskip("pyarrow")

import click

from pgoutput_fast.cli import main
from pgoutput_fast.cli._quantities import ByteCount, Seconds


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("65536", 65536),
        ("7B", 7),
        ("64kB", 64 << 10),
        (" 16 MB ", 16 << 20),
        ("1.5GB", 3 << 29),
        ("2.GB", 2 << 30),
        ("900TB", 900 << 40),
        ("0", 0),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_numbers_of_bytes(given: str, count: int) -> None:
    assert ByteCount().convert(given, None, None) == count


@pytest.mark.parametrize(
    "given",
    ["", "MB", "-1", "16MiB", "16mb", "1e3", "nan", "1,5GB", "٣", "8388608TB", "9" * 50, ".5GB"],
)
def test_what_is_no_number_of_bytes(given: str) -> None:
    with pytest.raises(
        click.BadParameter, match=r"is no number of bytes|is more than 9223372036854775807 bytes"
    ):
        ByteCount().convert(given, None, None)


@pytest.mark.parametrize(
    ("given", "seconds"), [("0.5", 0.5), ("500ms", 0.5), (" 10 min", 600.0), ("7d", 604800.0)]
)
def test_times(given: str, seconds: float) -> None:
    assert Seconds().convert(given, None, None) == seconds


@pytest.mark.parametrize("given", ["", "soon", "1 hour", "5m", "1s30"])
def test_what_is_no_time(given: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is no time, such as 0\.5, 500ms, 1s, 10min"):
        Seconds().convert(given, None, None)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *(
            ("capture", option, value)
            for option in (
                "--max-delay", "--grace", "--keep-seconds", "--silent-after", "--retry-for",
                "--silence-timeout", "--log-interval",
            )
            for value in ("nan", "inf", "-1")
        ),
        *(("capture", option, "0") for option in ("--grace", "--segment-bytes")),
        *(("capture", option, "1XB") for option in ("--keep-bytes", "--min-free", "--max-memory")),
        ("snapshot", "--wait", "nan"),
    ],
)  # fmt: skip
def test_wrong_numbers_are_wrong_usage(
    command: str, option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "capture": ["--slot", "s", "--publication", "p", "--out", str(tmp_path / "new")],
        "snapshot": ["--dir", str(tmp_path), "--table", "public.t"],
    }[command]
    dsn = ["--dsn", "host=/nonexistent"] if command == "capture" else []
    assert main([command, *dsn, *given, option, value]) == 2
    assert f"Invalid value for '{option}'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
