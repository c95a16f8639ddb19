"""`pgoutput-fast inspect` of directories with snapshots, tables that wait, and consumers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory

from pgoutput_fast import testing
from pgoutput_fast.changelog.consumers import Consumer
from pgoutput_fast.changelog.snapshots import snapshot_files
from pgoutput_fast.cli import main

ACCOUNTS = testing.Table("accounts", {"id": "int4", "note": "text"}, 16390, key=["id"])
OTHER = testing.Table("other", {"id": "int4"}, 16391, key=["id"])
INSERT, UPDATE = testing.insert(OTHER, [5]), testing.update(ACCOUNTS, [1, "new"])
Run = Callable[..., list[str]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    """A table that is copied within the second segment, and one that waits."""
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        found.wait(ACCOUNTS, 999)
        found.wait(OTHER, 999)
        found.copy(ACCOUNTS, 1151, [[1, "one"]], [[2, None]])
        found.commit(1100, OTHER.relation(), INSERT)
        found.commit(1200, ACCOUNTS.relation(), UPDATE)
        Consumer(found.directory, "lake")
        yield found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: Any, code: int = 0) -> list[str]:
        assert main(["inspect", *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        return (out or err).splitlines()

    return call


def test_rows_of_snapshots_are_shown_as_read(made: MadeDirectory, run: Run) -> None:
    lines = [line for line in run(made.directory) if "accounts" in line or "other" in line]
    assert [line for line in lines if "Relation" not in line] == [
        "0/447 7 INSERT public.other id='5'",
        "0/47E - TRUNCATE public.accounts",
        "0/47E - READ public.accounts id='1' note='one'",
        "0/47E - READ public.accounts id='2' note=NULL",
        "0/4AB 7 UPDATE public.accounts id='1' note='new'",
    ]
    _, first, second = snapshot_files(made.directory)[16390, 1]
    # A row of a snapshot is no Insert, though its frame is one.
    assert len(run(second, "--tag", "IUD", code=1)) == 1
    (read,) = [one for one in map(json.loads, run("--json", first)) if one["message"] == "Read"]
    assert read == {
        "lsn": "0/47E", "xid": None, "tag": "I", "message": "Read", "relation_id": 16390,
        "new": {"id": "1", "note": "one"}, "table": "public.accounts",
    }  # fmt: skip
    # Files of snapshots do not follow each other, and go together with all others.
    segments = sorted(made.directory.glob("*.arrow"))
    assert len(run(second, *segments, first, "--tag", "IU")) == 2
    assert run(second, second, code=1)[0].endswith(f" {second} [bad_option]")


def test_the_summary_has_tables_and_consumers(made: MadeDirectory, run: Run) -> None:
    (found,) = map(json.loads, run("--stats", "--json", made.directory))
    assert found["files"] == 5
    assert found["tables"] == {
        "public.accounts": {"truncate": 1, "read": 2, "update": 1}, "public.other": {"insert": 1},
    }  # fmt: skip
    assert found["directories"] == [
        {
            "path": str(made.directory), "begin": "0/3E8", "end": "0/4BA",
            "tables": [
                {"relation_id": 16390, "table": "public.accounts", "state": "copied",
                 "waits_from": None, "copied_as_of": "0/47F", "rows": 2},
                {"relation_id": 16391, "table": "public.other", "state": "waiting",
                 "waits_from": "0/3E7", "copied_as_of": None, "rows": None},
            ],
            "layouts": [
                {"relation_id": 16390, "table": "public.accounts", "layouts": 1, "changes": 1,
                 "bytes": len(UPDATE), "truncates": 0, "first_commit_lsn": "0/4B0",
                 "last_commit_lsn": "0/4B0"},
                {"relation_id": 16391, "table": "public.other", "layouts": 1, "changes": 1,
                 "bytes": len(INSERT), "truncates": 0, "first_commit_lsn": "0/44C",
                 "last_commit_lsn": "0/44C"},
            ],
            "consumers": [
                {"name": "lake", "position": "0/3E8", "tables": [
                    {"relation_id": 16390, "table": "public.accounts", "position": "0/47E"},
                    {"relation_id": 16391, "table": "public.other", "position": "0/3E7"},
                ]},
            ],
        }
    ]  # fmt: skip
    lines = [line.split() for line in run("--stats", made.directory)]
    heads = [line for line in lines if line[:1] == ["table"]]
    assert heads[0][-1] == "read"
    assert ["public.accounts", "0", "1", "0", "1", "2"] in lines
    assert ["public.accounts", "copied", "0/47F", "2"] in lines
    assert ["public.other", "1", "1", f"{len(INSERT)}", "0", "0/44C", "0/44C"] in lines
    assert ["public.other", "waiting", "0/3E7"] in lines
    assert " ".join(lines[-1]) == "lake 0/3E8 public.accounts at 0/47E, public.other at 0/3E7"
