"""The examples that run a capture as a service: their options are those of the command."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands.builds import ROOT

pytest.importorskip("psycopg")

from pgoutput_fast.cli.capture import command

UNIT = ROOT / "examples" / "pgoutput-fast-capture.service"
CONTAINER = ROOT / "examples" / "Containerfile"


def options(arguments: list[str]) -> dict[str, object]:
    """What the command makes of arguments, which it refuses if they are not its own."""
    with command.make_context("capture", arguments) as context:
        assert context.args == []
        return context.params


def test_the_unit_calls_the_command() -> None:
    text = UNIT.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, name, *arguments = shlex.split(line)
    assert (Path(program).name, name) == ("pgoutput-fast", "capture")
    found = options(arguments)
    assert found["directory"] == "/var/lib/pgoutput-fast/segments"
    assert found["dsn_file"] == Path("${CREDENTIALS_DIRECTORY}/dsn")
    assert "LoadCredential=dsn:" in text
    assert "Type=notify" in text


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    programs = shutil.which("systemd-analyze")
    if programs is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / UNIT.name
    program = re.compile(r"(?<=^ExecStart=)\S+", re.MULTILINE)  # which is not installed here
    unit.write_text(program.sub(sys.executable, UNIT.read_text()))
    ran = subprocess.run(
        [programs, "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_container_calls_the_command() -> None:
    text = CONTAINER.read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    program, name, *first = json.loads(entry)
    assert (program, name) == ("/opt/pgoutput-fast/bin/pgoutput-fast", "capture")
    commented = "\n".join(re.findall(r"^# ?(.*)$", text, re.MULTILINE)).replace("\\\n", " ")
    (run,) = re.findall(r"^ *podman run .* pgoutput-fast +(--.*)$", commented, re.MULTILINE)
    found = options([*first, *shlex.split(run)])
    assert found["directory"] == "/data/segments"
    assert "VOLUME /data\n" in text
