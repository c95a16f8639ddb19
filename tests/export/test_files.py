"""Changes as files: all formats, names, schema versions, the command, what is refused."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from support.changelogs.exported import manifest_of
from support.changelogs.exporting import (
    ACCOUNTS,
    Landing,
    beside,
    delete,
    insert,
    many,
    read,
    relation,
    rows_of,
    update,
)
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import files, testing
from pgoutput_fast.captured import stored as stored_form
from pgoutput_fast.cli import main
from pgoutput_fast.files._write import _write_parquet
from pgoutput_fast.segments import SegmentWriter

# --- what is in a row ----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows(impl: str, tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    land(
        [
            ACCOUNTS,
            insert(7, "1", None, "1 year 2 mons -3 days 04:05:06.789"),
            insert(7, "2", "", None),
            update(7, "2", "<unchanged>", None),
            delete(7, "1", None, None),
            delete(7, "2", "old", "1 day", kind="O"),
            testing.truncate([7], 2),
        ]
    )
    commit = land.lsn + 0x800
    head = (land.lsn, None)
    when = datetime.datetime(2000, 1, 1, 0, 0, 5, tzinfo=datetime.timezone.utc)

    def one(seq: int, op: str, kind: str | None, *values: Any) -> tuple[Any, ...]:
        return (op, *head, land.lsn + seq + 1, commit, when, seq, kind, *values)

    expected = [
        one(0, "insert", None, 1, None, "P1Y2M-3DT4H5M6.789S", None),
        one(1, "insert", None, 2, "", None, None),
        one(2, "update", None, 2, None, None, ["note"]),
        one(3, "delete", "K", 1, None, None, ["note", "span"]),
        one(4, "delete", "O", 2, "old", "P1D", None),
        one(5, "truncate", None, None, None, None, None),
    ]
    for form in files.FORMATS:
        out = tmp_path / f"{form}-{impl}"
        with chosen(impl):
            result = files.export(land.directory, out, form)
        (table,) = result.tables
        assert (table.namespace, table.name, table.version, table.rows) == (
            "public", "accounts", 1, 6,
        )  # fmt: skip
        assert (result.rows, result.errors, result.position) == (6, 0, commit + 8)
        assert rows_of(table) == expected
        events = beside(out, "events")
        assert [one["event"] for one in events] == ["truncate", "commit"]
        assert json.loads(events[0]["details"])["restart_identity"] is True
        assert events[1]["commit_lsn"] == commit
        assert events[1]["commit_time"] == when


def test_columns_called_as_ours_and_before(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    names = ("op", "OP", "after_op", "seq", "before_id", "id", "unchanged")
    table = relation(7, "t", *((int(name == "id"), name, 25) for name in names))
    values = [f"v{i}" for i in range(7)]
    land([table, insert(7, *values), update(7, "<unchanged>", *values[1:])])
    out = tmp_path / "out"
    (found,) = files.export(land.directory, out, before=True).tables
    columns = manifest_of(out)["tables"][0]["versions"][0]["columns"]
    after = [one["name"] for one in columns if one["part"] == "after"]
    assert after == [
        "after_op_", "OP", "after_op", "after_seq", "before_id", "id", "after_unchanged",
    ]  # fmt: skip
    before = [(one["name"], one["column"]) for one in columns if one["part"] == "before"]
    assert before[3:6] == [
        ("before_seq", "seq"), ("before_before_id", "before_id"), ("before_id_", "id"),
    ]  # fmt: skip
    first, second = rows_of(found)
    assert list(first[8:15]) == values
    assert second[8] is None
    assert second[-1] == ["after_op_"]  # by the name that it has in the file


def test_versions_of_a_table_are_never_mixed(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    narrow = relation(7, "t", (1, "id", 23))
    wide = relation(7, "t", (1, "id", 23), (0, "more", 25))
    again = relation(9, "t", (1, "id", 23))
    land([narrow, insert(7, "1")], [wide, insert(7, "2", "x")], [narrow, insert(7, "3")])
    land([again, insert(9, "4")])
    for form in files.FORMATS:
        result = files.export(land.directory, tmp_path / form, form)
        told = [(one.version, [row[8:-1] for row in rows_of(one)]) for one in result.tables]
        assert told == [(1, [(1,), (3,)]), (2, [(2, "x")]), (1, [(4,)])]
        # A table that was dropped and made again is another one.
        assert [one.relation_id for one in result.tables] == [7, 7, 9]
    assert sorted(path.name for path in (tmp_path / "parquet").iterdir()) == [
        "_events.parquet", "_manifest.json", "public.t.parquet", "public.t.v2.parquet",
        "public.t~9.parquet",
    ]  # fmt: skip


MOOD, MOODS, PAIR, NOTHING = 90_000, 90_001, 90_002, 90_003


def user_types() -> pf.TypeRegistry:
    """An enum, an array of it, a composite with it, one without fields."""
    types = [
        {"oid": MOOD, "name": "mood", "kind": "e", "labels": ["sad", "ok"]},
        {"oid": MOODS, "name": "_mood", "kind": "b", "element": MOOD},
        {"oid": PAIR, "name": "pair", "kind": "c", "fields": [["m", MOOD, -1], ["i", 1186, -1]]},
        {"oid": NOTHING, "name": "nothing", "kind": "c"},
    ]
    usual = {
        "namespace": "public", "element": 0, "modifier": -1, "delimiter": ",", "extension": "",
        "labels": [], "fields": [],
    }  # fmt: skip
    told = {"format_version": 1, "types": [usual | one for one in types]}
    return pf.TypeRegistry.from_json(json.dumps(told))


@pytest.mark.parametrize("form", files.FORMATS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_labels_that_are_added_in_the_middle(impl: str, form: str, tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    columns = ((1, "id", 23), (0, "m", MOOD), (0, "ms", MOODS), (0, "p", PAIR), (0, "n", NOTHING))
    table = relation(7, "t", *columns)
    rows = [
        ("1", "ok", "{sad,NULL}", '(sad,"1 day")', "()"),
        ("2", "new", "{ok,new}", "(new,)", None),
        ("3", None, "{newer}", '(,"2 mons")', "()"),
        ("4", "sad", None, None, None),
    ]
    land([table, *(insert(7, *row) for row in rows)])
    with chosen(impl):
        decoder = pf.ColumnarDecoder(registry=user_types())
        decoder_frames = [table, *(insert(7, *row) for row in rows)]
        begin = testing.begin(1, 9)
        assert len(list(decoder.decode([begin, *decoder_frames]))) > 1
        files.export(land.directory, tmp_path / "out", form, registry=user_types())
        land([table, insert(7, "5", "newest", "{}", "(newest,)", "()")])
        result = files.export(land.directory, tmp_path / "out", form, registry=user_types())
    (found,) = result.tables
    expected = [
        (1, "ok", ["sad", None], {"m": "sad", "i": "P1D"}, "()"),
        (2, "new", ["ok", "new"], {"m": "new", "i": None}, None),
        (3, None, ["newer"], {"m": None, "i": "P2M"}, "()"),
        (4, "sad", None, None, None),
        (5, "newest", [], {"m": "newest", "i": None}, "()"),
    ]
    assert [row[8:-1] for row in rows_of(found)] == expected


NAMES = [
    ("a.b", "c"), ("a", "b.c"), ("A", "b.C"), ("public", "../../etc/passwd"), ("public", "a\\b"),
    ("public", 'quo"ted\'; --'), ("public", "ta\tb\nnew"), ("public", "日本語"),
    ("public", "Straße"), ("public", "STRASSE"), ("public", "."), ("_x", "_y"), ("-x", "-y"),
    ("public", "x" * 63),
    ("ü" * 31, "é" * 31), ("pgoutput_fast", "manifest"), ("main", "t"), ("public", "t__v2"),
    ("information_schema", "t"), ("public", "*?[a]"), ("public", "t~2"), ("public", "_manifest"),
    ("\x01" * 63, "\x01" * 63), ("", "pg_thing"),
]  # fmt: skip


def test_any_name_of_a_table_makes_a_safe_and_unique_one(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    frames = []
    for i, (namespace, name) in enumerate(NAMES):
        frames += [relation(i, name, (1, "id", 23), namespace=namespace), insert(i, str(i))]
    land(frames)
    out = tmp_path / "out"
    result = files.export(land.directory, out)
    assert [(one.namespace, one.name) for one in result.tables] == NAMES
    for i, one in enumerate(result.tables):
        (row,) = rows_of(one)
        assert row[8] == i
        (path,) = one.files
        assert path.parent == out
        assert re.fullmatch(r"[\w%][\w%.~-]*\.parquet", path.name)
        assert not path.name.startswith("_")
        assert len(path.name.encode()) < 255
    written = [path.name.casefold() for path in out.iterdir()]
    assert len(set(written)) == len(written) == len(NAMES) + 2


def test_refused_frames(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    land([ACCOUNTS, insert(7, "1", "a", None)])
    land([ACCOUNTS, insert(7, "x", "b", None), insert(7, "3", "c", None)])
    out = tmp_path / "out"
    with expect_error(code="bad_value", frame=2, column="id"):
        files.export(land.directory, out, part_bytes=1)
    # What was whole before is there, and the same call goes on.
    assert (out / "public.accounts.parquet").exists()
    result = files.export(land.directory, out, on_error="collect", part_bytes=1)
    assert (result.rows, result.errors) == (1, 1)
    assert [row[8] for row in rows_of(result.tables[0])] == [1, 3]
    (error,) = beside(out, "errors")
    assert (error["tag"], error["code"], error["lsn"]) == ("I", "bad_value", 0x3001)
    assert error["data"] == insert(7, "x", "b", None)
    assert error["file"].endswith(".arrow")


# --- much ----------------------------------------------------------------------------------------


MEASURED = """
import sys
import pyarrow as pa
from pgoutput_fast import files
result = files.export(sys.argv[1], sys.argv[2], sys.argv[3])
print(result.rows, pa.default_memory_pool().max_memory())
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", files.FORMATS)
def test_memory_does_not_grow_with_the_input(form: str, tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    note = "x" * 1000
    for _ in range(12):  # 96 MB of frames
        land([ACCOUNTS, *(insert(7, str(i), note, None) for i in range(8_000))])
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(land.directory), str(tmp_path / "out"), form],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows, peak = map(int, ran.stdout.split())
    assert rows == 96_000
    # A chunk of the input, its columns, a row group.
    assert peak < 80 << 20


@pytest.mark.slow
def test_hundreds_of_tables_take_few_open_files(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    frames = [relation(i, f"t{i}", (1, "id", 23)) for i in range(300)]
    frames += [insert(i, str(n)) for n in range(2) for i in range(300)]
    land(frames)
    most = 0

    def watch(progress: files.ExportProgress) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))  # noqa: PTH208

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    result = files.export(land.directory, tmp_path / "out", progress=watch)
    assert len(result.tables) == 300
    assert most - before < 10
    assert [row[8] for row in rows_of(result.tables[299])] == [0, 1]


# --- values ------------------------------------------------------------------------------------


def test_which_columns_of_parquet_have_a_dictionary(tmp_path: Path) -> None:
    """All but those whose values hardly ever repeat, also those within nested ones."""
    made = [
        (i % 7, ["a", "b"], {"x": [i % 3], "t": i}, [("k", 1)], [0.5, 1.5], i, i, i, i)
        for i in range(2000)
    ]
    nested = pa.struct([("x", pa.list_(pa.int32())), ("t", pa.timestamp("us"))])
    kinds = {
        "a.b": pa.int32(), "texts": pa.list_(pa.utf8()), "pair": nested,
        "map": pa.map_(pa.utf8(), pa.int32()), "fixed": pa.list_(pa.float32(), 2),
        "at": pa.timestamp("us"), "seq": pa.int64(), "lsn": pa.uint64(),
        "commit_time": pa.timestamp("us", "UTC"),
    }  # fmt: skip
    columns = [
        pa.array(list(values), kind)
        for values, kind in zip(zip(*made, strict=True), kinds.values(), strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=list(kinds))
    path = tmp_path / "made.parquet"
    _write_parquet(path, batch.schema, [batch, batch.slice(0, 5)])
    file = pyarrow.parquet.ParquetFile(path)
    assert file.read().equals(pa.Table.from_batches([batch, batch.slice(0, 5)]))
    group = file.metadata.row_group(0)
    found = [group.column(i) for i in range(group.num_columns)]
    assert {one.compression for one in found} == {"ZSTD"}
    assert {one.path_in_schema for one in found if not one.has_dictionary_page} == {
        "at", "seq", "lsn"
    }  # fmt: skip
    assert len(found) == 11


def test_nested_intervals_and_labels_are_stored_as_text() -> None:
    interval = pa.array([(1, 0, 0), None, (0, 3, 0)], pa.month_day_nano_interval())
    label = pa.array(["a", "b", None]).dictionary_encode()
    struct_ = pa.StructArray.from_arrays([interval, label], ["i", "l"])
    wanted = [{"i": "P1M", "l": "a"}, {"i": None, "l": "b"}, {"i": "P3D", "l": None}]
    assert stored_form.stored(struct_).to_pylist() == wanted
    assert stored_form.stored(struct_.slice(1)).to_pylist() == wanted[1:]
    lists = pa.ListArray.from_arrays(pa.array([0, 2, None, 3], pa.int32()), struct_)
    assert stored_form.stored(lists).to_pylist() == [wanted[:2], wanted[2:], None]
    assert stored_form.stored(lists.slice(1)).to_pylist() == [wanted[2:], None]
    keys = pa.array(["x", "y", "z"])
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 3], pa.int32()), keys, interval)
    assert stored_form.stored(maps).to_pylist() == [[("x", "P1M")], [("y", None), ("z", "P3D")]]
    fixed = pa.FixedSizeListArray.from_arrays(interval, 1)
    assert stored_form.stored(fixed.slice(1)).to_pylist() == [[None], ["P3D"]]
    for array in (struct_, lists, maps, fixed):
        stored = stored_form.stored(array)
        stored.validate(full=True)
        assert stored.type == stored_form.stored_type(array.type)


# --- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 4)
    out = tmp_path / "out"

    def run(*arguments: Any, code: int = 0) -> str:
        assert main(["inspect", str(land.directory), *map(str, arguments)]) == code
        output, error = capsys.readouterr()
        return error if code else output

    said = run("--to", "parquet", out)
    assert [line.split() for line in said.splitlines()[:-1]] == [
        ["public.accounts", "1,200", "public.accounts.parquet"],
        ["public.b", "900", "public.b.parquet"],
        ["public.b", "v2", "300", "public.b.v2.parquet"],
        ["public.c", "2", "public.c.parquet"],
    ]
    assert "2,402 rows added to" in said
    assert "0 rows added to" in run("--to", "parquet", out)
    assert "1,200 rows added" in run("--to", "parquet", tmp_path / "b", "--table", "b", "--before")
    assert sorted(path.name for path in (tmp_path / "b").glob("public.*")) == [
        "public.b.parquet", "public.b.v2.parquet",
    ]  # fmt: skip
    assert "before_id" in read(tmp_path / "b" / "public.b.parquet").schema.names
    # A name that was mistyped makes nothing that the right one would not go with.
    options = ("--to", "parquet", tmp_path / "c", "--table")
    assert "no changes of the tables" in run(*options, "nothing", code=1)
    assert not (tmp_path / "c").exists()
    assert "1,200 rows added" in run(*options, "b")
    assert "0 rows added" in run(*options, "b")
    for pattern in ("public.[bc]", "[bc]"):
        said = run("--to", "parquet", tmp_path / pattern, "--table", pattern)
        assert [line.split()[0] for line in said.splitlines()[:-1]] == ["public.b"] * 2 + [
            "public.c"
        ]
    assert "begun with False, not True" in run("--to", "parquet", out, "--before", code=1)
    for option, why in (
        (["--stats"], "--stats is not for --to"), (["--xid", "3"], "--xid is not for --to"),
        (["--policy", "infinity"], "is not NAME=VALUE"),
        (["--policy", "infinity=never"], "'never' is not one of 'error', 'null'"),
        (["--policy", "numeric=3"], "precision"),
    ):  # fmt: skip
        assert why in " ".join(run("--to", "parquet", tmp_path / "x", *option, code=2).split())
    assert "--before is for --to" in run("--before", code=2)
    assert "--to" in run("--to", "csv", out, code=2)


def test_a_capture_that_has_nothing_yet_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    land = Landing(tmp_path / "segments")
    with SegmentWriter(land.directory, land.metadata, confirmed_flush_lsn=0) as writer:
        writer.store_position()
    arguments = ["inspect", str(land.directory), "--to", "parquet", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert capsys.readouterr().out == (
        f"nothing was captured yet, as there is no segment in {land.directory}\n"
    )
    assert not (tmp_path / "out").exists()
    land([relation(7, "t", (1, "id", 23)), insert(7, "1")])
    assert main(arguments) == 0
    assert "\n1 row added to" in capsys.readouterr().out


def test_policies_and_errors_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    land = Landing(tmp_path / "segments")
    dates = relation(7, "t", (1, "id", 23), (0, "at", 1082))
    land([dates, insert(7, "1", "infinity"), insert(7, "x", None)])
    for options, code, expected in (
        ((), 1, "infinity"),
        ((), 1, "--policy NAME=VALUE, --types FILE and --on-error"),
        (("--policy", "infinity=null"), 1, "column id"),
        (("--policy", "infinity=null", "--on-error", "collect"), 1, "1 frame was refused"),
    ):
        arguments = ["inspect", str(land.directory), "--to", "parquet", str(tmp_path / "out")]
        assert main([*arguments, *options]) == code
        error = capsys.readouterr().err
        assert expected in error.replace("'", ""), error
    assert read(tmp_path / "out" / "public.t.parquet").column("at").to_pylist() == [None]
