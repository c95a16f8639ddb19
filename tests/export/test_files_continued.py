"""Exports that go on where an earlier one ended, or was killed; and what they do not touch."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.exporting import (
    Landing,
    many,
    read,
    rows_of,
)
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.expected_errors import expect_error
from support.paths import DATA

import pgoutput_fast as pf
from pgoutput_fast import files
from pgoutput_fast.captured import units as _units
from pgoutput_fast.errors import Argument
from pgoutput_fast.files import _manifest, _write


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def part_bytes_of(directory: Path) -> int:
    """So that a step has about two segments."""
    source = _units.open_source([directory])
    assert source is not None
    plan = source.plan({"start": None, "position": None}, source.begin(), 1)
    assert plan is not None
    return plan.units[0].size + 1


@pytest.mark.parametrize("format", files.FORMATS)
def test_what_is_new_is_added(format: str, tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 2)
    out = tmp_path / "out"
    first = files.export(land.directory, out, format)
    before = contents(out)
    assert files.export(land.directory, out, format).rows == 0
    assert contents(out) == before
    many(land, 2, first=2)
    second = files.export(land.directory, out, format)
    assert (first.rows, second.rows) == (1201, 1201)
    at_once = files.export(land.directory, tmp_path / "once", format)
    assert at_once.rows == 2402
    first_rows, second_rows = (
        [rows_of(one) for one in found.tables] for found in (second, at_once)
    )
    assert first_rows == second_rows
    assert [path.name for path in second.tables[0].files] == [
        f"public.accounts.{format}", f"public.accounts.part2.{format}",
    ]  # fmt: skip
    # Segments that are done may be deleted.
    groups = sorted(land.directory.glob("*.arrow"))
    for path in groups[:-1]:
        path.unlink()
    assert files.export(land.directory, out, format).rows == 0


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_seq_goes_on_through_the_parts_of_a_segment(impl: str, tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 2)
    assert len(list(land.directory.glob("*-00002-of-*.arrow"))) == 1
    with chosen(impl):
        result = files.export(land.directory, tmp_path / "out")
    rows = [row for one in result.tables for row in rows_of(one)]
    for xid in {row[1] for row in rows}:
        seqs = sorted(row[6] for row in rows if row[1] == xid)
        assert seqs == list(range(len(seqs)))


KILLED = """
import os, signal, sys
import numpy, pyarrow.compute, pyarrow.ipc, pyarrow.parquet
from pgoutput_fast import files
from pgoutput_fast.captured import changes, units, windows
from pgoutput_fast.files import _manifest, _step, _write

source, format, part_bytes = sys.argv[1:]

def where(path):
    return "/files/" in path or "/captured/" in path

def run(out, limit):
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if where(frame.f_code.co_filename) and event == "call":
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(trace)
    files.export(source, out, format, part_bytes=int(part_bytes))
    sys.setprofile(None)
    return count

for line in sys.stdin:
    limit, out = line.rstrip().split(maxsplit=1)
    child = os.fork()
    if not child:
        print(run(out, int(limit)), end=" ", flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Exports in a child each, so that the modules are imported once; prints calls and exit status."""


@pytest.mark.slow
@pytest.mark.parametrize("format", files.FORMATS)
def test_killed_anywhere_the_next_call_gives_the_same(format: str, tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 5)
    part_bytes = part_bytes_of(land.directory)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(land.directory), format, str(part_bytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as exports:  # fmt: skip

        def run(out: Path, limit: int) -> list[int]:
            assert exports.stdin is not None
            assert exports.stdout is not None
            exports.stdin.write(f"{limit} {out}\n")
            return [int(word) for word in exports.stdout.readline().split()]

        calls, status = run(tmp_path / "whole", 0)
        assert status == 0
        expected = contents(tmp_path / "whole")
        chance = random.Random(5)
        for number in range(2):
            out = tmp_path / f"killed{number}"
            kills = 0
            while True:
                *_, status = run(out, chance.randrange(1, calls + 1))
                if status == 0:
                    break
                assert status == -signal.SIGKILL
                kills += 1
                for path in out.iterdir() if out.exists() else ():
                    if path.suffix == ".parquet":
                        read(path).validate(full=True)
                if kills == 3:
                    result = files.export(land.directory, out, format, part_bytes=part_bytes)
                    assert sum(one.rows for one in result.tables) == 3002
                    break
            assert kills
            assert contents(out) == expected


def test_files_get_their_names_when_the_manifest_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 1)
    out = tmp_path / "out"

    def dies(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_write, "give_names", dies)
        # As after a kill: nothing is cleared.
        patched.setattr(_write, "clear", lambda directory: None)
        with pytest.raises(KeyboardInterrupt):
            files.export(land.directory, out)
    assert [path.name for path in out.iterdir() if path.is_file()] == ["_manifest.json"]
    result = files.export(land.directory, out)
    assert result.rows == 0
    assert [len(rows_of(one)) for one in result.tables] == [300, 300]
    assert not (out / _manifest.TEMPORARY.name).exists()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("publishing",), ["../outside.parquet"]),
        (("publishing",), ["/tmp/outside.parquet"]),
        (("publishing",), ["..\\outside.parquet"]),
        (("publishing",), [".hidden"]),
        (("publishing",), ["_manifest.json"]),
        (("publishing",), [""]),
        (("publishing",), ["-rf.parquet"]),
        (("tables", 0, "files"), "-rf"),
        (("publishing",), ["a\0b"]),
        (("tables", 0, "files"), "../outside"),
        (("tables", 0, "versions", 0, "parts", 0, "file"), "../outside.parquet"),
        (("events", 0, "file"), "a/../../outside.parquet"),
        (("tables", 0, "versions", 0, "rows"), "7"),
        (("tables",), {}),
        (("position",), 7),
        (("start",), "nowhere"),
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(
    tmp_path: Path, place: tuple[Any, ...], value: object
) -> None:
    """Whoever wrote it: nothing outside of the directory is named, moved or overwritten."""
    land = Landing(tmp_path / "segments")
    many(land, 1)
    out = tmp_path / "out"
    files.export(land.directory, out)
    path = out / _manifest.NAME
    manifest = json.loads(path.read_text())
    *steps, last = place
    inner = manifest
    for step in steps:
        inner = inner[step]
    inner[last] = value
    path.write_text(json.dumps(manifest))
    (out / "outside.parquet").write_bytes(b"moved")
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    with expect_error(code="damaged", path=str(path)):
        files.export(land.directory, out)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize("format", files.FORMATS)
def test_what_someone_else_put_there_stays(tmp_path: Path, format: str) -> None:
    """An export of no changes removes what it made, and nothing that came meanwhile."""
    land = Landing(tmp_path / "segments")
    many(land, 1)
    out = tmp_path / "out"

    def meanwhile(_: object) -> None:
        (out / "theirs").mkdir(exist_ok=True)
        (out / "theirs" / "notes.txt").write_text("mine")
        (out / "notes.txt").write_text("mine")

    result = files.export(land.directory, out, format, tables="public.nothing", progress=meanwhile)
    assert (result.rows, result.position, result.tables) == (0, None, ())
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == [
        "notes.txt", "theirs", "theirs/notes.txt",
    ]  # fmt: skip


def test_directories_that_are_not_to_be_continued(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 1)
    out = tmp_path / "out"
    files.export(land.directory, out)
    other = many(Landing(tmp_path / "other", slot="another"), 1)
    recording = DATA / "16" / "dml" / "v1_text.arrow"
    made = tmp_path / "made"
    made.mkdir()
    (made / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / _manifest.TEMPORARY.name).write_text("")
    cases: list[tuple[Any, Path, dict[str, Any], str | None]] = [
        # and the parameter that the error names, if one is wrong
        (land.directory, made, {}, None),
        (land.directory, land.directory, {}, None),
        (land.directory, out, {"before": True}, "before"),
        (land.directory, out, {"tables": "public.b"}, "tables"),
        (
            land.directory,
            out,
            {"policies": pf.Policies(infinity="text")},
            "infinity",
        ),
        (land.directory, out, {"registry": pf.TypeRegistry()}, "registry"),
        (other, out, {}, None),
        (recording, out, {}, None),
        (land.directory, tmp_path / "file", {}, None),
        (land.directory, tmp_path / "blocked", {}, None),
        (land.directory, tmp_path / "new", {"format": "csv"}, "format"),
        (land.directory, tmp_path / "new", {"part_bytes": 0}, "part_bytes"),
        (land.directory, tmp_path / "new", {"on_error": "skip"}, "on_error"),
        ([recording, recording], tmp_path / "new", {}, None),
        ([], tmp_path / "new", {}, None),
        (tmp_path / "nowhere", tmp_path / "new", {}, None),
    ]
    before = contents(out)
    for source, directory, options, parameter in cases:
        refuses = made, land.directory, out, tmp_path / "file", tmp_path / "blocked"
        path = {"path": str(directory)} if directory in refuses else {}
        with expect_error(parameter=parameter, **path):
            files.export(source, directory, **options)
        assert not (tmp_path / "new").exists()
    assert contents(out) == before
    assert (made / "notes.txt").read_text() == "mine"


def test_a_gap_and_another_export_at_the_same_time(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 1)
    out = tmp_path / "out"
    files.export(land.directory, out)
    done = sorted(land.directory.glob("*.arrow"))
    many(land, 2, first=2)
    gap = max(set(land.directory.glob("*.arrow")) - set(done))
    with expect_error(code="changes_missing", options=[Argument("consumer")]):
        files.export(gap, out)

    def inner(progress: files.ExportProgress) -> None:
        files.export(land.directory, out)

    with expect_error(code="in_use", path=str(out)):
        files.export(land.directory, out, progress=inner)
    assert files.export(land.directory, out).rows == 1201


def test_what_comes_before_the_start_is_not_left_out(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 1)
    early = set(land.directory.glob("*.arrow"))
    many(land, 1, first=2)
    (last,) = set(land.directory.glob("*.arrow")) - early
    out = tmp_path / "out"
    assert files.export(last, out).rows > 0
    with expect_error(code="bad_option"):
        files.export(land.directory, out)
    assert files.export(last, out).rows == 0
