"""`pgoutput-fast consumers`: add, list and remove, on a directory of segments."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.changelogs.written_segments import insert, relation, transaction, write, writer

from pgoutput_fast import testing
from pgoutput_fast.changelog.consumers import Consumer, consumers
from pgoutput_fast.changelog.read_plan import Position
from pgoutput_fast.cli import main


class Run:
    """The command on one directory."""

    def __init__(self, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
        self._capsys = capsys
        self.directory = directory

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What it printed, or its error."""
        assert main(["consumers", "--dir", str(self.directory), *arguments]) == code
        output, errors = self._capsys.readouterr()
        assert (output == "") if code else (errors == "")
        return errors if code else output


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """A directory that begins at 0/32 and ends at 0/136."""
    directory = tmp_path / "lake"
    with writer(directory) as out:
        write(out, transaction(300, relation(1), insert()))
        out.flush()
    return Run(capsys, directory)


def test_consumers_have_no_control_characters(run: Run) -> None:
    """Neither in the table, nor in JSON, nor of what was given, in an error."""
    with writer(run.directory) as out:
        write(out, transaction(600, relation(1, "t\x1b[31m\x7f\x9b"), insert()))
        out.flush()
    run("add", "b")
    Consumer(run.directory, "b").advance(Position(310, {1: 300}))
    for options in ((), ("--json",)):
        text = run("list", *options)
        assert "[31m" in text
        assert all(line.isprintable() for line in text.splitlines())
    (found,) = map(json.loads, run("list", "--json").splitlines())
    assert found["tables"][0]["table"] == "public.t\x1b[31m\x7f\x9b"
    for command in ("add", "remove"):
        error = run(command, "b\x1b[31m\x7f\x9b", code=1)
        assert all(line.isprintable() for line in error.splitlines())


def test_added_listed_and_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    header = "name  " + "position".rjust(17) + "bytes behind".rjust(18) + "moved, s ago".rjust(14)
    header += "  tables at other positions"
    assert run("list") == header + "\n"
    assert run("list", "--json") == ""
    assert run("add", "warehouse") == "warehouse begins at 0/32\n"
    run("add", "b")
    Consumer(run.directory, "b").advance(Position(310, {16384: 300, 1: 200}))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    found: list[dict[str, Any]] = [json.loads(line) for line in run("list", "--json").splitlines()]
    for one in found:
        assert 3600 <= one.pop("seconds_since_moved") < 3700
    assert found == [
        {
            "name": "b", "position": "0/136", "bytes_behind": 110,
            "tables": [
                {"relation_id": 1, "table": "public.t", "position": "0/C8"},
                {"relation_id": 16384, "table": None, "position": "0/12C"},
            ],
        },
        {"name": "warehouse", "position": "0/32", "bytes_behind": 260, "tables": []},
    ]  # fmt: skip
    lines = run("list").splitlines()
    assert lines[1].split()[:3] == ["b", "0/136", "110"]
    assert lines[1].split()[4:] == ["public.t", "at", "0/C8,", "16384", "at", "0/12C"]
    assert lines[2].split()[:3] == ["warehouse", "0/32", "260"]
    assert run("remove", "b") == ""
    assert [state.name for state in consumers(run.directory)] == ["warehouse"]


def test_refusals(run: Run, tmp_path: Path) -> None:
    run("add", "a")
    assert "[already_exists]" in run("add", "a", code=1)
    refused = run("remove", "b", code=1)
    assert "'b'" in refused
    assert " a [no_consumer]" in refused
    # None of these leaves the directory of consumers.
    for name in ("../position", "/etc/x", "", ".a"):
        assert "[bad_option]" in run("add", name, code=1)
        assert "[bad_option]" in run("remove", name, code=1)
    assert (run.directory / "position.json").exists()
    # A damaged one can be removed, as the error says.
    (run.directory / "consumers" / "a.json").write_text("{")
    assert "a.json" in run("list", code=1)
    run("remove", "a")
    run.directory = tmp_path
    assert f"{tmp_path} [not_begun]" in run("add", "a", code=1)
    assert not (tmp_path / "consumers").exists()
    run.directory = tmp_path / "none"
    assert "[missing_path]" in run("list", code=1)
    assert "'lists'" in run("lists", code=2)


def test_positions_agree_with_those_of_inspect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    accounts = testing.Table("accounts", {"id": "int4"}, 16390, key=["id"])
    waiting = testing.Table("waiting", {"id": "int4"}, 16391, key=["id"])
    with contextlib.closing(MadeDirectory(tmp_path / "lake")) as made:
        made.wait(accounts, 999)
        made.wait(waiting, 999)
        made.copy(accounts, 1151, [[1]])
        made.commit(1200, accounts.relation(), testing.insert(accounts, [2]))
        run = Run(capsys, made.directory)
        begins = run("add", "lake")
        Consumer(made.directory, "whole").advance(Position(made.writer.position, {}))
        listed = list(map(json.loads, run("list", "--json").splitlines()))
        assert main(["inspect", "--stats", "--json", str(made.directory)]) == 0
        (found,) = json.loads(capsys.readouterr().out)["directories"]
        for one in listed:
            del one["bytes_behind"], one["seconds_since_moved"]
        assert found["consumers"] == listed
        assert [len(one["tables"]) for one in listed] == [2, 0]
        tables = "public.accounts at 0/47E, public.waiting at 0/3E7"
        assert begins == f"lake begins at {listed[0]['position']}, {tables}\n"
        listing = run("list")
        assert main(["inspect", "--stats", str(made.directory)]) == 0
        for shown in (listing, capsys.readouterr().out):
            assert any(
                line.startswith("lake ") and line.endswith(tables) for line in shown.splitlines()
            )


@pytest.mark.parametrize("arguments", [["list"], ["add", "a"], ["remove", "a"]])
def test_a_directory_has_to_be_given(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["consumers", *arguments]) == 2
    assert "'--dir'" in capsys.readouterr().err
