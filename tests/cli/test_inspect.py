"""`pgoutput-fast inspect`, and what all of the command shares."""

from __future__ import annotations

import collections
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from support.nightly import nightly
from support.paths import DATA

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.cli import main
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

# A directory of segments is none.
RECORDINGS = sorted(one for one in DATA.glob("*/*/*.arrow") if one.parent.name != "segments")
COMMAND = [sys.executable, "-m", "pgoutput_fast"]


def relation(oid: int, namespace: str, name: str, *columns: tuple[int, str, int]) -> bytes:
    types = {column: type_id for _, column, type_id in columns}
    key = [column for flags, column, _ in columns if flags]
    return testing.Table(name, types, oid, namespace=namespace, key=key).relation()


def begin(lsn: int, xid: int) -> bytes:
    return testing.begin(xid, lsn)


def commit(lsn: int) -> bytes:
    return testing.commit(lsn, lsn + 1, 1_500_000)


TABLE = relation(7, "public", "t", (1, "id", 23), (0, "a b", 25), (0, "raw", 600))
OTHER = relation(8, "other", "t", (1, "id", 23))
FRAMES = [
    begin(256, 41),
    TABLE,
    testing.insert(7, ["1", "it's\n\x1b[31m", b"\x00\xff"]),
    testing.update(7, ["2", pf.UNCHANGED, None], ["1", None, None]),
    testing.delete(7, ["2", "x" * 100, None], "O"),
    commit(256),
    begin(512, 42),
    OTHER,
    testing.truncate([7, 8], 3),
    testing.insert(8, ["5"]),
    testing.message("note", b"\x00\xfe", 510, 1),
    commit(512),
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two segments, a transaction in each."""
    metadata = SegmentMetadata("1", "d", "s", ("p",), 180004, "UTF8", {}, {})
    path = tmp_path / "segments"
    with SegmentWriter(path, metadata, confirmed_flush_lsn=0) as writer:
        for number, frame in enumerate(FRAMES):
            writer.write(0x1000 + number, frame)
            if frame[:1] == b"C":
                writer.flush()
    return path


def recording(path: Path, frames: Sequence[bytes], *, payload: Any = None, **metadata: Any) -> Path:
    payload = payload or pa.binary()
    schema = pa.schema(
        [("start_lsn", pa.uint64()), ("server_time", pa.int64()), ("payload", payload)],
        metadata={"pgcap": json.dumps({"client_encoding": "UTF8", **metadata})},
    )
    count = len(frames)
    columns = [pa.array(range(1, count + 1), pa.uint64()), pa.nulls(count, pa.int64())]
    with pa.ipc.new_file(str(path), schema) as file:
        file.write_batch(
            pa.RecordBatch.from_arrays([*columns, pa.array(frames, payload)], schema=schema)
        )
    return path


class Run:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> list[str]:
        """Lines of standard output; its error output is in `error`."""
        assert main([str(argument) for argument in arguments]) == code
        output, self.error = self._capsys.readouterr()
        assert code or self.error == ""
        return output.splitlines()

    def objects(self, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self("inspect", "--json", *arguments, code=code)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def test_lines(run: Run, directory: Path) -> None:
    assert run("inspect", directory) == [
        "0/1000 41 Begin(final_lsn=0/100, commit_time=2000-01-01 00:00:00+00, xid=41)",
        "0/1001 41 " + repr(pf.decode(TABLE)),
        '0/1002 41 INSERT public.t id=\'1\' "a b"="it\'s\\n\\x1b[31m" raw=\\x00ff',
        "0/1003 41 UPDATE public.t old key (id='1') id='2' \"a b\"=UNCHANGED raw=NULL",
        "0/1004 41 DELETE public.t id='2' \"a b\"='" + "x" * 60 + "'… raw=NULL",
        "0/1005 41 " + repr(pf.decode(FRAMES[5])) + " 3 changes",
        # The second segment says again what is in force.
        "0/0 - " + repr(pf.decode(TABLE)),
        "0/1006 42 Begin(final_lsn=0/200, commit_time=2000-01-01 00:00:00+00, xid=42)",
        "0/1007 42 " + repr(pf.decode(OTHER)),
        "0/1008 42 TRUNCATE public.t, other.t CASCADE RESTART IDENTITY",
        "0/1009 42 INSERT other.t id='5'",
        "0/100A 42 " + repr(pf.decode(FRAMES[10])),
        "0/100B 42 " + repr(pf.decode(FRAMES[11])) + " 3 changes",
    ]
    assert "x" * 100 in run("inspect", "--full", directory)[4]


def test_json(run: Run, directory: Path) -> None:
    found = run.objects(directory)
    assert found[0] == {
        "lsn": "0/1000",
        "xid": 41,
        "tag": "B",
        "message": "Begin",
        "final_lsn": "0/100",
        "commit_time": "2000-01-01 00:00:00+00",
    }
    assert found[2] == {
        "lsn": "0/1002",
        "xid": 41,
        "tag": "I",
        "message": "Insert",
        "relation_id": 7,
        "table": "public.t",
        "new": {"id": "1", "a b": "it's\n\x1b[31m", "raw": {"hex": "00ff"}},
    }
    assert {name: found[3][name] for name in ("old_kind", "old", "new")} == {
        "old_kind": "K",
        "old": {"id": "1"},
        "new": {"id": "2", "a b": {"unchanged": True}, "raw": None},
    }
    assert (found[4]["old_kind"], found[4]["old"]["a b"]) == ("O", "x" * 100)
    assert found[6]["lsn"] == "0/0"
    assert found[6]["xid"] is None
    assert found[6]["columns"][0] == {
        "flags": 1,
        "name": "id",
        "type_id": 23,
        "type_modifier": -1,
        "is_key": True,
    }
    assert (found[9]["tables"], found[9]["options"]) == (["public.t", "other.t"], 3)
    assert found[11]["content"] == {"hex": "00fe"}
    assert found[11]["message_lsn"] == "0/1FE"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tag", "IUD"], "IUDI"),
        (["--tag", "I,T"], "ITI"),
        (["--table", "t"], "RIUDRRTI"),
        (["--table", "public.t"], "RIUDRT"),
        (["--table", "other.t", "--tag", "I"], "I"),
        (["--table", "pub*", "--table", "*.nope"], ""),
        (["--table", "pub*.?"], "RIUDRT"),
        (["--table", "[s-u]"], "RIUDRRTI"),
        (["--table", '"t"'], "RIUDRRTI"),
        (["--table", 'pub*."t"'], "RIUDRT"),
        (["--table", '"[s-u]"'], ""),
        (["--table", '"public.t"'], ""),
        (["--xid", "41"], "BRIUDC"),
        (["--xid", "41", "--xid", "42", "--tag", "BC"], "BCBC"),
    ],
)
def test_filters(run: Run, directory: Path, options: list[str], expected: str) -> None:
    found = run.objects(*options, directory, code=0 if expected else 1)
    assert "".join(shown["tag"] for shown in found) == expected


@pytest.mark.parametrize(
    "options",
    [
        ["--table", "nope"],
        ["--table", "public.nope", "--table", "T"],
        ["--xid", "99"],
        ["--xid", "99", "--tag", "I"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("as_objects", [False, True])
def test_nothing_found_is_said(
    run: Run, directory: Path, options: list[str], as_objects: bool
) -> None:
    assert run("inspect", *["--json"] * as_objects, *options, directory, code=1) == []
    assert "[no_table]" in run.error
    assert "other.t, public.t" in run.error


@pytest.mark.parametrize(
    ("options", "tags"),
    [
        (["--tag", "c P,K"], "B C D I M R T U"),
        (["--table", "other.t", "--tag", "D"], "I R T"),
    ],
)
def test_nothing_found_of_a_tag(run: Run, directory: Path, options: list[str], tags: str) -> None:
    assert run("inspect", *options, directory, code=1) == []
    assert run.error.endswith(f" {tags} [no_table]\n")


def test_files_that_do_not_go_together_are_refused(
    run: Run, tmp_path: Path, directory: Path
) -> None:
    first, second = sorted(directory.glob("*.arrow"))
    other = tmp_path / "other"
    metadata = SegmentMetadata("1", "d", "other", ("p",), 180004, "UTF8", {}, {})
    with SegmentWriter(other, metadata, confirmed_flush_lsn=0) as writer:
        for number, frame in enumerate([begin(999, 43), commit(999)]):
            writer.write(0x2000 + number, frame)
        writer.flush()
    recorded = recording(tmp_path / "r.arrow", FRAMES)
    again = recording(tmp_path / "again.arrow", FRAMES)
    for paths, code in [
        ([directory, directory], "bad_option"),
        ([first, directory], "bad_option"),
        ([directory, other], "another_history"),
        ([recorded, tmp_path / "other" / ".." / "r.arrow"], "bad_option"),
    ]:
        for options in ([], ["--stats"]):
            assert run("inspect", *options, *paths, code=1) == []
            assert f"[{code}]" in run.error
            assert ("FILE|DIR…: " in run.error) == (code == "bad_option")
    assert run("inspect", second, first) == run("inspect", directory)
    assert len(run("inspect", recorded, again, directory)) == 3 * len(FRAMES) + 1


def test_an_empty_directory_is_said(run: Run, tmp_path: Path) -> None:
    assert run("inspect", tmp_path, code=1) == []
    assert run.error.endswith(f" {str(tmp_path)!r} [missing_path]\n")


def test_nothing_found_among_many_tables_or_none(run: Run, tmp_path: Path) -> None:
    frames = [relation(n, "s", f"t{n:02}") for n in range(22)]
    run("inspect", "--table", "t", recording(tmp_path / "a.arrow", frames), code=1)
    assert f"{', '.join(f's.t{n:02}' for n in range(20))} and 2 " in run.error
    assert "s.t20" not in run.error
    run("inspect", "--tag", "I", recording(tmp_path / "b.arrow", [begin(1, 1)]), code=1)
    assert run.error.endswith(" B [no_table]\n")


def test_stats(run: Run, directory: Path) -> None:
    (found,) = run.objects("--stats", directory)
    assert {**found, "messages": None} == {
        "files": 2,
        "frames": 13,
        "bytes": sum(map(len, FRAMES)) + len(TABLE),
        "transactions": 2,
        "errors": 0,
        "lsns": ["0/1000", "0/100B"],
        "commit_times": ["2000-01-01 00:00:01.5+00"] * 2,
        "messages": None,
        "tables": {
            "other.t": {"truncate": 1, "insert": 1},
            "public.t": {"insert": 1, "update": 1, "delete": 1, "truncate": 1},
        },
        "directories": [
            {
                "path": str(directory),
                "begin": "0/0",
                "end": "0/201",
                "tables": [],
                "layouts": found["directories"][0]["layouts"],
                "consumers": [],
            }
        ],
    }
    assert found["messages"]["Relation"] == {"frames": 3, "bytes": 2 * len(TABLE) + len(OTHER)}
    lines = run("inspect", "--stats", directory)
    assert [line.split() for line in lines if line.startswith(("frames", "public.t"))] == [
        ["frames", "13"],
        ["public.t", "1", "1", "1", "1"],
        ["public.t", "1", "3", "183", "1", "0/100", "0/200"],
    ]
    (empty,) = run.objects("--stats", "--tag", "K", directory, code=1)
    assert (empty["frames"], empty["lsns"], empty["tables"]) == (0, [], {})
    assert "[no_table]" in run.error


@pytest.mark.everyday(
    "14/dml/v1_bin.", "16/all_types/v1_bin.", "16/dml/v4_par.", "16/two_phase/v3_2pc."
)
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: "/".join(path.parts[-3:]))
def test_every_recording_is_shown_whole(run: Run, path: Path) -> None:
    with pa.ipc.open_file(str(path)) as reader:
        payloads = reader.read_all()["payload"].to_pylist()
    if "copydata" in path.name:
        payloads = [payload[25:] if payload[:1] == b"w" else payload[:1] for payload in payloads]
    expected = [payload[:1].decode() for payload in payloads]
    found = run.objects(path)
    assert [shown["tag"] for shown in found] == expected
    assert not any("error" in shown for shown in found)
    lines = run("inspect", path)
    assert len(lines) == len(payloads)
    assert all(line.isprintable() for line in lines)
    (stats,) = run.objects("--stats", path)
    counts = collections.Counter(tag for tag in expected if tag != "k")
    assert stats["frames"] == counts.total()
    assert sum(table.get("insert", 0) for table in stats["tables"].values()) == counts["I"]
    # Without the rows of a transaction there is no transaction that a filter could find.
    xids = {shown["xid"] for shown in found if shown["tag"] in "IUD"}
    assert None not in xids


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) > 20


def test_encoding_is_the_files(run: Run, tmp_path: Path) -> None:
    frames = [
        begin(1, 1),
        relation(1, "public", "gr\udcfc\udcdfe", (1, "id", 25)),
        testing.insert(1, [("t", b"\xe9t\xe9")]),
    ]
    found = run.objects(recording(tmp_path / "a", frames, client_encoding="LATIN1"))
    assert (found[2]["table"], found[2]["new"]) == ("public.grüße", {"id": "été"})
    # What is no text in the encoding is shown as what it is.
    path = recording(tmp_path / "b", frames, client_encoding="UTF8")
    found = run.objects(path)
    assert found[2]["new"] == {"id": {"hex": "e974e9"}}
    assert found[2]["table"].encode("utf-8", "surrogateescape") == b"public.gr\xfc\xdfe"
    assert all(line.isprintable() for line in run("inspect", path))


def test_tables_have_no_control_characters(run: Run, tmp_path: Path) -> None:
    """Neither of names nor of values, in lines, tables, JSON and errors."""
    odd = "a\x1b[31m\x7f\x9b"
    rows = [relation(1, odd, odd, (1, odd, 25)), testing.insert(1, [odd])]
    path = recording(tmp_path / "a", [begin(1, 1), *rows, commit(1)])
    for options in ((), ("--stats",), ("--json",), ("--stats", "--json")):
        lines = run("inspect", *options, path)
        assert all(line.isprintable() for line in lines)
        assert any("[31m" in line for line in lines)
    found = run.objects(path)
    assert (found[2]["table"], found[2]["new"]) == (f"{odd}.{odd}", {odd: odd})
    assert f"{odd}.{odd}" in run.objects("--stats", path)[0]["tables"]


def test_frame_that_cannot_be_decoded_is_shown_and_counted(run: Run, tmp_path: Path) -> None:
    frames = [begin(1, 1), testing.insert(99, ["1"]), b"", b"?", commit(1)]
    path = recording(tmp_path / "a", frames)
    found = run.objects(path, code=1)
    assert "3 frames" in run.error
    assert "[frames_refused]" in run.error
    assert [shown.get("error", {}).get("code") for shown in found] == [
        *(None, "unknown_relation", "empty_frame", "unknown_tag"),
        None,
    ]
    assert found[1]["frame"] == {"hex": frames[1].hex()}
    assert found[1]["xid"] == 1
    run("inspect", recording(tmp_path / "b", [b"?"]), code=1)
    assert "1 frame " in run.error
    assert "[frames_refused]" in run.error
    lines = run("inspect", path, code=1)
    assert lines[1].startswith("0/2 1 ERROR unknown_relation at byte 1: ")
    (stats,) = run.objects("--stats", path, code=1)
    assert (stats["frames"], stats["errors"]) == (5, 3)


def test_files_that_are_none(run: Run, tmp_path: Path, directory: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    table = tmp_path / "table.arrow"
    with pa.ipc.new_file(str(table), pa.schema([("a", pa.int32())])):
        pass
    copy_data = recording(tmp_path / "c", [b"w123"], method="walsender_raw")
    segment = min(directory.glob("*.arrow"))
    cut = tmp_path / "cut"
    cut.write_bytes(segment.read_bytes()[:-20])
    for path, code in [
        (tmp_path / "none", "missing_path"),
        (text, "damaged"),
        (cut, "damaged"),
        (table, "not_ours"),
        (copy_data, "damaged"),
        (recording(tmp_path / "e", [], client_encoding="klingon"), "bad_option"),
        (recording(tmp_path / "n", [], client_encoding=7), "not_ours"),
        (recording(tmp_path / "t", [], payload=pa.utf8()), "not_ours"),
    ]:
        assert run("inspect", path, code=1) == []
        assert run.error.startswith("pgoutput-fast: ")
        assert run.error.count("\n") == 1
        assert f"[{code}]" in run.error
    damaged = bytearray(segment.read_bytes())
    damaged[damaged.index(b"public\0")] ^= 1
    segment.write_bytes(damaged)
    assert run("inspect", directory, code=1) == []
    assert "[damaged]" in run.error


def test_usage_and_version(run: Run) -> None:
    (version,) = run("--version")
    assert version.startswith(f"pgoutput-fast {pf.__version__}, implementation {pf.IMPLEMENTATION}")
    help_ = "\n".join(run("--help"))
    assert all(name in help_ for name in ("demo", "inspect", "tail"))
    for arguments, parts in [
        (["nothing"], ["'nothing'"]),
        (["inspekt"], ["'inspekt'", " inspect?"]),
        (["inspect"], ["'FILE|DIR…'"]),
        (["inspect", "--xid", "x", "f"], ["'--xid'", "'x'"]),
        (["inspect", "--tag", "IQ", "f"], ["'--tag'", "'Q'", "A B C D E I K M O"]),
        (["inspect", "--tag", "i", "f"], ["'--tag'", "'i'"]),
        (["inspect", "--tag", ",", "f"], ["'--tag'", "A B C D E I K M O"]),
        (["tail"], ["'--publication'"]),
        ([], ["Usage: pgoutput-fast"]),
    ]:
        run(*arguments, code=2)
        for part in parts:
            assert part in run.error


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["tail", "--dsn", "host=h", "password=s3cret", "--publication", "p"], "--dsn"),
        (["tail", "--publication", "p", "--dsn", "host=h", "user=u", "password=s3cret"], "--dsn"),
        (["tail", "host=h", "password=s3cret", "--publication", "p"], "--dsn"),
        (["tail", "--dsn", "host=h", "--password=s3cret"], "--password"),
        (["password=s3cret"], "--dsn"),
        (["postgresql://u:s3cret@h/d"], "--dsn"),
    ],
)
def test_dsn_that_is_no_option_is_not_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], option: str
) -> None:
    monkeypatch.delenv("PGOUTPUT_FAST_DSN", raising=False)
    assert run(*arguments, code=2) == []
    assert option in run.error
    assert "s3cret" not in run.error


def test_a_server_has_to_be_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an option, or as libpq is told: what it falls back on is nobody's wish."""
    for name in ("PGOUTPUT_FAST_DSN", *(name for name in os.environ if name.startswith("PG"))):
        monkeypatch.delenv(name, raising=False)
    arguments = ["tail", "--publication", "p"]
    run(*arguments, code=2)
    for way in ("--dsn ", "--dsn-file", "PGHOST", "PGSERVICE"):
        assert way in run.error
    monkeypatch.setenv("PGHOST", "/nonexistent")
    run(*arguments, code=1)
    assert "[connection_lost]" in run.error
    monkeypatch.delenv("PGHOST")
    run(*arguments, "--dsn", "host=/nonexistent", code=1)
    assert "[connection_lost]" in run.error


def test_two_phase_commit(run: Run, tmp_path: Path) -> None:
    """The ends of prepared transactions come alone: nothing before says whose they are."""
    told = ("gid", 100, 110, 1_500_000)
    insert = testing.insert(7, ["1", None, None])
    frames = [
        *(testing.begin_prepare(41, *told), TABLE, insert, testing.prepare(41, *told)),
        testing.commit_prepared(41, *told),
        testing.rollback_prepared(42, *told, 2_500_000),
        testing.prepare(43, *told),
    ]
    path = recording(tmp_path / "a", frames)
    found = run.objects(path)
    assert [(shown["message"], shown["xid"]) for shown in found] == [
        ("BeginPrepare", 41),
        ("Relation", 41),
        ("Insert", 41),
        ("Prepare", 41),
        ("CommitPrepared", 41),
        ("RollbackPrepared", 42),
        ("Prepare", 43),
    ]
    assert not any("subxid" in shown for shown in found)
    assert run("inspect", path)[4].startswith("0/5 41 CommitPrepared(")
    (stats,) = run.objects("--stats", path)
    assert stats["transactions"] == 1
    assert stats["commit_times"] == ["2000-01-01 00:00:01.5+00"] * 2


def test_ends_tell_how_many_changes_there_were(run: Run, tmp_path: Path) -> None:
    """Streamed ones without what was rolled back, prepared ones, and what began before."""
    told = ("gid", 100, 110, 1_500_000)
    row = ["1", None, None]

    def chunk(xid: int, *rows: bytes, first: bool = True) -> list[bytes]:
        return [testing.stream_start(xid, first), *rows, testing.stream_stop()]

    def rows(xid: int, count: int) -> list[bytes]:
        return [testing.insert(7, row, xid)] * count

    announced = [pf.testing.in_stream(TABLE, 50)]
    frames = [
        commit(90),  # of which nothing came
        *(begin(100, 41), TABLE, testing.insert(7, row), commit(100)),
        *chunk(50, *announced, *rows(50, 2), *rows(51, 3), *rows(52, 4)),
        *chunk(60, pf.testing.in_stream(TABLE, 60), *rows(60, 5)),
        testing.stream_abort(50, 51),
        *chunk(50, *rows(53, 6), testing.truncate([7], xid=50), first=False),
        *(testing.stream_commit(50, 200), testing.stream_prepare(60, *told)),
        *(testing.commit_prepared(60, *told), testing.commit_prepared(61, *told)),
        *chunk(70, pf.testing.in_stream(TABLE, 70), *rows(70, 1)),
        testing.stream_abort(70, 70),
        *(testing.begin_prepare(80, *told), TABLE, testing.insert(7, row)),
        *(testing.prepare(80, *told), testing.rollback_prepared(80, *told, 2_500_000)),
    ]
    path = recording(tmp_path / "a", frames)
    ends = [
        (shown["message"], shown.get("changes"))
        for shown in run.objects(path)
        if "Commit" in shown["message"] or "epare" in shown["message"]
    ]
    assert ends == [
        ("Commit", None),
        ("Commit", 1),
        ("StreamCommit", 2 + 6 + 1),
        ("StreamPrepare", 5),
        ("CommitPrepared", 5),
        ("CommitPrepared", None),
        ("BeginPrepare", None),
        ("Prepare", 1),
        ("RollbackPrepared", None),
    ]
    lines = [line for line in run("inspect", path) if line.endswith((" change", " changes"))]
    assert [line.rpartition(") ")[2] for line in lines] == [
        *("1 change", "9 changes", "5 changes", "5 changes", "1 change"),
    ]


@pytest.mark.parametrize("rows_in_last", [0, 1])
def test_the_end_of_a_transaction_of_several_files(
    run: Run, tmp_path: Path, rows_in_last: int
) -> None:
    """It is told by the position of the last file's rows, and not known if that has none."""
    metadata = SegmentMetadata("1", "d", "s", ("p",), 180004, "UTF8", {}, {})
    row = testing.insert(7, ["1", "x" * (200 << 10), None])
    rows = [row] * 6 + [row if rows_in_last == 0 else testing.insert(7, ["1", None, None])]
    directory = tmp_path / "segments"
    with SegmentWriter(directory, metadata, confirmed_flush_lsn=0, segment_bytes=1 << 10) as writer:
        for number, frame in enumerate([begin(256, 41), TABLE, *rows, commit(256)]):
            writer.write(0x1000 + number, frame)
        writer.flush()
    parts = sorted(directory.glob("*.arrow"))
    assert len(parts) > 1
    (line,) = run("inspect", "--tag", "C", directory)
    assert line.endswith("+00)" if rows_in_last == 0 else " 7 changes")


def test_segment_with_a_damaged_end_is_not_left_out(run: Run, directory: Path) -> None:
    last = max(directory.glob("*.arrow"))
    content = last.read_bytes()
    damaged = bytearray(content)
    damaged[content.rindex(b"pgoutput_fast.end")] ^= 1
    last.write_bytes(damaged)
    for path in (directory, last):
        assert run("inspect", path, code=1) == []
        assert str(last) in run.error
        assert "[damaged]" in run.error


def test_closed_pipe_is_quiet(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.arrow", FRAMES * 500)
    process = subprocess.Popen(
        [*COMMAND, "inspect", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert "Begin" in process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_output_that_has_no_room_is_an_error(directory: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ran = subprocess.run(
            [*COMMAND, "inspect", str(directory)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr == (
        "pgoutput-fast: can't write the output: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("click", ["--version"], "pgoutput-fast[cli]"),
        ("pyarrow", ["inspect", __file__], "pgoutput-fast[arrow]"),
        ("psycopg", ["tail", "--dsn", "", "--publication", "p"], "pgoutput-fast[replication]"),
    ],
)
def test_command_names_the_extra_that_is_missing(
    module: str, arguments: list[str], extra: str
) -> None:
    script = f"import sys; sys.modules[{module!r}] = None; from pgoutput_fast.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", f"{script}sys.exit(main({arguments!r}))"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert extra in done.stderr
    assert done.stderr.count("\n") == 1


# --- what a terminal shows -----------------------------------------------------------------------


def on_terminal(*arguments: str | Path, **settings: str) -> str:
    """What the command prints to a terminal."""
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=follower,
        stderr=follower,
        env={**environment, "TERM": "xterm", "COLUMNS": "200", **settings},
    )
    os.close(follower)
    printed = b""
    try:
        while data := os.read(leader, 1 << 16):
            printed += data
    except OSError:  # Linux says so that nobody writes any more
        pass
    os.close(leader)
    process.wait(timeout=60)
    return printed.decode().replace("\r\n", "\n")


COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m")


@pytest.mark.slow
def test_a_terminal_gets_colours(directory: Path, run: Run) -> None:
    printed = on_terminal("inspect", directory).splitlines()
    assert COLOURED.findall(printed[2]) == [
        ("2", "0/1002 41"), ("32", "INSERT"), ("1", "public.t"), ("36", "id"), ("36", '"a b"'),
        ("36", "raw"),
    ]  # fmt: skip
    assert ("2", "UNCHANGED") in COLOURED.findall(printed[3])
    assert [COLOURED.sub(r"\2", line) for line in printed] == run("inspect", directory)
    helped = on_terminal("inspect", "--help")
    assert ("36", "--json") in COLOURED.findall(helped)
    failed = on_terminal("inspect", directory, "--tag", "c")
    assert failed.startswith("\x1b[31m\x1b[1mpgoutput-fast:\x1b[0m no message matches")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {"NO_COLOR": "1"}),
        ([], {"TERM": "dumb"}),
        (["--json"], {}),
        (["--json", "--stats"], {}),
    ],
)
def test_colours_that_nobody_wants(
    directory: Path, options: list[str], settings: dict[str, str]
) -> None:
    printed = on_terminal("inspect", *options, directory, **settings)
    assert "\x1b[" not in printed
    assert len(printed) > 100
    assert "\x1b[" not in on_terminal("inspect", "--help", NO_COLOR="1")


def completed(*words: str) -> list[str]:
    """What bash is told of these words, of which the last is to be completed."""
    process = subprocess.run(
        COMMAND,
        env={
            **os.environ,
            "_PGOUTPUT_FAST_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["pgoutput-fast", *words]),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert process.stderr == ""
    return [line.removeprefix("plain,") for line in process.stdout.splitlines()]


@pytest.mark.slow
def test_shells_complete_commands_and_options() -> None:
    assert completed("") == [
        *(
            "capture",
            "consumers",
            "demo",
            "doctor",
            "inspect",
            "snapshot",
            "sync",
            "tail",
            "verify",
        ),
    ]
    assert completed("in") == ["inspect"]
    assert completed("inspect", "--va") == ["--values"]
    assert completed("inspect", "--values", "t") == ["text", "typed"]
    assert completed("tail", "--pub") == ["--publication"]
    assert completed("inspect", "--policy", "j") == ["json=text", "json=parse"]
    assert completed("inspect", "--policy", "") == [
        *(f"{name}={choice}" for name in ("infinity", "out_of_range", "special_values")
          for choice in ("error", "null", "clamp", "text")),
        *("json=text", "json=parse"),
        *(f"invalid_text={choice}" for choice in ("error", "replace", "binary")),
        *("numeric=", "arrays="),
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", *nightly("zsh", "fish")])
def test_shells_get_the_script_that_completes(shell: str) -> None:
    process = subprocess.run(
        COMMAND,
        env={**os.environ, "_PGOUTPUT_FAST_COMPLETE": f"{shell}_source"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert f"_PGOUTPUT_FAST_COMPLETE={shell}_complete" in process.stdout


# --- typed values --------------------------------------------------------------------------------


def typed_recording(tmp_path: Path) -> Path:
    columns = [
        ("b", 16, "t"), ("i", 20, "9007199254740993"), ("f", 701, "0.5"), ("nan", 701, "-Infinity"),
        ("n", 1700, "99.50"), ("a", 1007, "{1,NULL}"), ("fs", 1022, "{NaN}"), ("s", 25, "x"),
        ("raw", 17, "\\x00ff"), ("at", 1184, "2026-01-31 12:00:00+00"), ("day", 1082, "infinity"),
        ("r", 3904, "[1,5)"), ("j", 3802, '{"x": 1.50}'),
    ]  # fmt: skip
    frames = [
        begin(1, 1),
        relation(7, "public", "t", *((0, name, oid) for name, oid, _ in columns)),
        testing.insert(7, [text for *_, text in columns]),
    ]
    return recording(tmp_path / "typed.arrow", frames)


TYPED = {
    "b": True, "i": 9007199254740993, "f": 0.5, "nan": "-Infinity", "n": "99.50", "a": [1, None],
    "fs": ["NaN"], "s": "x", "raw": {"hex": "00ff"}, "at": "2026-01-31T12:00:00+00:00",
    "day": "infinity", "r": {"lower": 1, "upper": 5, "bounds": "[)"}, "j": '{"x": 1.50}',
}  # fmt: skip


def test_values_that_json_has_itself(run: Run, tmp_path: Path) -> None:
    path = typed_recording(tmp_path)
    *_, found = run.objects("--values", "typed", path)
    assert found["new"] == TYPED
    assert found["xid"] == 1
    for options in ([], ["--values", "text"]):
        *_, found = run.objects(*options, path)
        assert {name: found["new"][name] for name in ("b", "i", "n", "day")} == {
            "b": "t", "i": "9007199254740993", "n": "99.50", "day": "infinity"
        }  # fmt: skip


def test_policies_say_what_typed_values_are(run: Run, tmp_path: Path) -> None:
    options = ["--values", "typed", "--policy", "json=parse", "--policy", "infinity=null"]
    *_, found = run.objects(*options, typed_recording(tmp_path))
    assert found["new"] == {**TYPED, "j": {"x": 1.5}, "day": None}


def test_users_types_are_typed_too(run: Run, tmp_path: Path) -> None:
    """A composite is an object; what is no number of JSON's is a string in it as well."""
    registry = pf.TypeRegistry()
    path = tmp_path / "types.json"
    path.write_text(registry.to_json())
    *_, found = run.objects("--values", "typed", "--types", path, typed_recording(tmp_path))
    assert found["new"] == TYPED


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--values", "typed"], ["--values", "--json"]),
        (["--json", "--policy", "json=parse"], ["--policy", "--json --values typed"]),
        (["--json", "--values", "text", "--policy", "json=parse"], ["--policy", "--json"]),
    ],
)
def test_values_and_policies_where_they_do_nothing(
    run: Run, directory: Path, options: list[str], named: list[str]
) -> None:
    run("inspect", *options, directory, code=2)
    for option in named:
        assert option in run.error


def test_a_file_that_has_no_types_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    options = ["--values", "typed", "--types", path]
    run.objects(*options, typed_recording(tmp_path), code=1)
    assert str(path) in run.error
    assert "[damaged]" in run.error
