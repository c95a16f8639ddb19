"""Changes as files: all formats, names, schema versions, resuming, what is refused."""

from __future__ import annotations

import collections
import contextlib
import csv
import datetime
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import uuid
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest
from catalog_types import registry_of
from column_values import same_value
from columnar import IMPLEMENTATIONS, chosen
from corpus_files import Capture, captures
from exported import manifest_of
from final_rows import copies
from server_text import OtherShape, ServerText, comparable

import pgoutput_fast as pf
from pgoutput_fast import files, testing
from pgoutput_fast.cli import main
from pgoutput_fast.files import _as_text, _manifest, _units, _write
from pgoutput_fast.files._flatten import Shape
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter
from pgoutput_fast.settings import Settings, make_settings
from pgoutput_fast.types import ColumnType

csv.field_size_limit(1 << 30)
DATA = Path(__file__).parent.parent / "data"
FINAL = DATA / "final"
"""Captures beside which the catalogue was recorded, and COPY."""
TEXT = pf.Policies(infinity="text", out_of_range="text", special_values="text")
SCENARIOS = ("18/all_types", "16/dml", "16/schema_evolution", "14/streaming", "16/two_phase")
HEAD = ["op", "xid", "subxid", "lsn", "commit_lsn", "commit_time", "seq", "old_kind"]


# --- frames and segments -------------------------------------------------------------------------


def relation(
    oid: int, name: str, *columns: tuple[int, str, int], namespace: str = "public"
) -> bytes:
    types = {column: type_id for _, column, type_id in columns}
    key = [column for flags, column, _ in columns if flags]
    return testing.Table(name, types, oid, namespace=namespace, key=key).relation()


def row(values: Sequence[Any]) -> list[Any]:
    return [pf.UNCHANGED if value == "<unchanged>" else value for value in values]


def insert(oid: int, *values: Any) -> bytes:
    return testing.insert(oid, row(values))


def update(oid: int, *values: Any) -> bytes:
    return testing.update(oid, row(values))


def delete(oid: int, *key: Any, kind: str = "K") -> bytes:
    return testing.delete(oid, row(key), kind)


class Landing:
    """Segments of synthetic transactions, one after the other."""

    def __init__(self, directory: Path, **metadata: Any) -> None:
        self.directory = directory
        self.lsn = 0x1000
        self.metadata = SegmentMetadata(
            **{
                "system_identifier": "1", "database": "d", "slot": "s", "publications": ("p",),
                "server_version": 180004, "encoding": "UTF8", "settings": {}, "options": {},
            } | metadata
        )  # fmt: skip

    def __call__(self, *transactions: Sequence[bytes], part_frames: int = 16_384) -> Path:
        """A segment of the transactions; several parts of it, if one is of so many frames."""
        with pytest.MonkeyPatch.context() as patched, SegmentWriter(
            self.directory, self.metadata, confirmed_flush_lsn=0,
            segment_bytes=1 if part_frames < 16_384 else 16 << 20,
        ) as writer:  # fmt: skip
            patched.setattr("pgoutput_fast.segments.writer.BATCH_FRAMES", part_frames)
            for frames in transactions:
                self.lsn += 0x1000
                commit = self.lsn + 0x800
                writer.write(self.lsn, testing.begin(self.lsn, commit, 5_000_000))
                for number, frame in enumerate(frames):
                    writer.write(self.lsn + number, frame)
                writer.write(commit, testing.commit(commit, commit + 8, 5_000_000))
            writer.flush()
        return self.directory


ACCOUNTS = relation(7, "accounts", (1, "id", 23), (0, "note", 25), (0, "span", 1186))


# --- reading it again ----------------------------------------------------------------------------


def read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pa.parquet.ParquetFile(path).read()
    if path.suffix == ".arrow":
        with pa.ipc.open_file(path) as reader:
            return reader.read_all()
    raise AssertionError(path)


def rows_of_all(
    directory: Path, tables: Sequence[files.ExportedTable]
) -> list[list[tuple[Any, ...]]]:
    """The rows of each; a database is opened once, which takes longer than to read a table."""
    if not any(table.table for table in tables):
        return [rows_of_files(table) for table in tables]
    found = []
    with duckdb.connect(str(directory / "changes.duckdb"), read_only=True) as connection:
        for table in tables:
            assert table.table is not None
            schema, name = (one.replace('"', '""') for one in table.table)
            found.append(connection.execute(f'FROM "{schema}"."{name}"').fetchall())
    return found


def rows_of(directory: Path, table: files.ExportedTable) -> list[tuple[Any, ...]]:
    """The rows of a version of a table as Python's values; of CSV as text."""
    return rows_of_all(directory, [table])[0]


def rows_of_files(table: files.ExportedTable) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for path in table.files:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                found += [tuple(one) for one in list(csv.reader(file))[1:]]
        else:
            found += [tuple(one.values()) for one in read(path).to_pylist()]
    return found


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a directory; a database as its tables' rows."""
    found = {}
    for path in sorted(directory.iterdir()):
        assert path.is_file(), path
        if path.suffix == ".duckdb":
            with duckdb.connect(str(path), read_only=True) as connection:
                names = connection.execute(
                    "SELECT schema_name, table_name FROM duckdb_tables() ORDER BY ALL"
                ).fetchall()
                for schema, name in names:
                    rows = connection.execute(f'FROM "{schema}"."{name}"').fetchall()
                    found[f"{schema}.{name}"] = repr(rows).encode()
        else:
            found[path.name] = path.read_bytes()
    return found


UNSENT = "<unsent>"
Key = tuple[str, str, int, int]  # namespace, table, xid, seq
Frames = collections.Counter[bytes]


def wanted_rows(
    capture: Capture, registry: pf.TypeRegistry | None
) -> tuple[dict[Key, tuple[Any, ...]], Frames]:
    """What the messages say of rows that were not rolled back, and the frames of those that were.

    op, subxid, commit LSN, old_kind, each column's value, text and bytes, and the frame.
    """
    decoder = pf.Decoder(TEXT, capture.encoding, registry)
    commits: dict[int, int] = {}
    aborted: set[tuple[int, int | None]] = set()
    found: dict[Key, tuple[Any, ...]] = {}
    seqs: dict[int, int] = {}
    xid = 0
    streaming = False
    for _, frame in capture.rows():
        message = decoder.decode(frame)
        if isinstance(message, (pf.Begin, pf.BeginPrepare, pf.StreamStart)):
            xid = message.xid
            if not isinstance(message, pf.StreamStart) or message.first_segment:
                seqs[xid] = 0
            streaming = isinstance(message, pf.StreamStart)
            if isinstance(message, pf.Begin):
                commits[xid] = message.final_lsn
        elif isinstance(message, (pf.StreamCommit, pf.CommitPrepared)):
            commits[message.xid] = message.commit_lsn
        elif isinstance(message, pf.StreamAbort):
            aborted.add((message.xid, message.subxid))
        elif isinstance(message, pf.RollbackPrepared):
            aborted.add((message.xid, message.xid))
        elif isinstance(message, pf.StreamStop):
            streaming = False
        elif isinstance(message, pf.Truncate):
            seqs[xid] += len(message.relation_ids)
        elif isinstance(message, (pf.Insert, pf.Update, pf.Delete)):
            data = message.old if isinstance(message, pf.Delete) else message.new
            is_key = isinstance(message, pf.Delete) and message.old_kind == "K"
            cells = []
            for i, column in enumerate(message.relation.columns):
                if data.kind(i) == "u" or (is_key and not column.is_key):
                    cells.append((UNSENT, UNSENT, b""))
                else:
                    try:
                        text = data.text(i)
                    except pf.DecodeError:
                        text = "<no text>"
                    try:
                        value = data[i]
                    except pf.DecodeError as error:
                        # Of a row that a file cannot have: nothing is the same as this.
                        value = error
                    cells.append((value, text, data.raw(i)))
            found[message.relation.namespace, message.relation.name, xid, seqs[xid]] = (
                type(message).__name__.lower(),
                message.xid if streaming else None,
                None if isinstance(message, pf.Insert) else message.old_kind,
                cells,
                frame,
            )
            seqs[xid] += 1
    rolled_back = {
        key for key, told in found.items() if {(key[2], key[2]), (key[2], told[1])} & aborted
    }
    return {
        key: (*told[:2], commits.get(key[2]), *told[2:])
        for key, told in found.items()
        if key not in rolled_back
    }, Frames(found[key][-1] for key in rolled_back)


class Kind(NamedTuple):
    """Of a column of a file: its Arrow type, and the type of the values that messages have."""

    arrow: pa.DataType
    type: ColumnType


def kinds_of(
    capture: Capture, format: str, settings: Settings, *, before: bool = False
) -> dict[str, dict[str, Kind]]:
    """By digest of a version's schema, its columns by name."""
    decoder = pf.ColumnarDecoder(
        TEXT, encoding=capture.encoding, registry=settings.registry, on_error="collect",
        target="arrow" if format == "arrow" else "portable",
    )  # fmt: skip
    found = {}
    for batch in decoder.decode([frame for _, frame in capture.rows()]):
        shape = Shape(pa.schema(batch), before=before, fold=format == "duckdb")
        columns = [one for one in shape.columns if one.part == "after"]
        types = [batch.layout.plan.column_types[field.position] for field in batch.layout.columns]
        found[shape.digest] = {
            one.name: Kind(one.type, type_) for one, type_ in zip(columns, types, strict=True)
        }
    return found


def parsed(found: Any, kind: pa.DataType) -> Any:
    """A value of a nested one as ``to_pylist`` would give it, from CSV's JSON or from duckdb."""
    if found is None:
        return None
    if pa.types.is_struct(kind):
        assert list(found) == [field.name for field in kind]
        return {field.name: parsed(found[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        pairs = found.items() if isinstance(found, dict) else found
        return [(parsed(k, kind.key_type), parsed(v, kind.item_type)) for k, v in pairs]
    if pa.types.is_nested(kind):
        return [parsed(one, kind.value_type) for one in found]
    if not isinstance(found, str):
        return found
    if pa.types.is_float32(kind):
        return struct.unpack("f", struct.pack("f", float(found)))[0]
    if pa.types.is_floating(kind):
        return float(found)
    if pa.types.is_integer(kind):
        return int(found)
    if pa.types.is_decimal(kind):
        return Decimal(found)
    if pa.types.is_binary(kind):
        return bytes.fromhex(found.removeprefix("\\x"))
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat(found)
    if pa.types.is_timestamp(kind):
        return datetime.datetime.fromisoformat(found.replace("Z", "+00:00"))
    if pa.types.is_time(kind):
        return datetime.time.fromisoformat(found)
    assert kind == pa.utf8() or isinstance(kind, (pa.UuidType, pa.JsonType)), kind
    return uuid.UUID(found) if isinstance(kind, pa.UuidType) else found


def is_same(found: Any, value: Any, text: Any, raw: Any, kind: Kind, settings: Settings) -> bool:
    """Whether what stands in a file is a value."""
    form = kind.arrow
    assert not pa.types.is_dictionary(form)
    if value is None or found is None:
        return found is value
    if pa.types.is_nested(form):
        if isinstance(found, str):
            found = json.loads(found, parse_int=str, parse_float=str)
        return same_value(parsed(found, form), form, value, kind.type, settings)
    if isinstance(value, pf.Interval):
        # By the policies of the test the column is as the server prints it.
        return bool(found == text)
    if isinstance(value, float):
        return repr(parsed(found, form)) == repr(value) or found == text
    if form == pa.binary():
        # Of a type that is not known it is what was sent.
        wanted = value if isinstance(value, bytes) else raw
        return bool(found == (f"\\x{wanted.hex()}" if isinstance(found, str) else wanted))
    if isinstance(found, str):
        if isinstance(value, bool):
            return found == str(value).lower()
        if isinstance(value, Decimal) and form != pa.utf8():
            return Decimal(found) == value
        if isinstance(value, datetime.datetime):
            return datetime.datetime.fromisoformat(found.replace("Z", "+00:00")) == value
        if isinstance(value, datetime.time) and pa.types.is_time(form):
            return datetime.time.fromisoformat(found) == value
        return found in (text, str(value))
    return bool(found == value)


def usual(capture: Capture) -> bool:
    return any(capture.name.startswith(f"{one}/") for one in SCENARIOS) and not (
        capture.name.endswith(("_error", "gucB", "gucC", "gucD", "copydata", "v4_on", "v4_par"))
    )


CAPTURES = [capture for capture in captures(DATA) if usual(capture)]
CATALOGUED = [
    capture
    for capture in captures(FINAL)
    if re.fullmatch("1[68]/(all_types|schema_evolution|fuzz_a)/v(1_text|1_bin|4_.*)", capture.name)
]


class Recorded:
    """A capture, and what holds of its rows in whatever format."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.registry = None
        if capture.root == FINAL:
            assert capture.truth is not None
            self.registry = registry_of(capture.truth)
        self.settings = make_settings(TEXT, capture.encoding, self.registry)
        self.wanted, self.rolled_back = wanted_rows(capture, self.registry)
        self._kinds: dict[str, dict[str, dict[str, Kind]]] = {}

    def kinds(self, format: str) -> dict[str, dict[str, Kind]]:
        alike = "parquet" if format == "csv" else format
        if alike not in self._kinds:
            self._kinds[alike] = kinds_of(self.capture, alike, self.settings)
        return self._kinds[alike]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(one, id=one.name) for one in CAPTURES),
        *(pytest.param(one, id=f"{one.name} with a catalogue") for one in CATALOGUED),
    ],
)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("impl", "format"), [*(("cython", one) for one in files.FORMATS), ("python", "parquet")]
)
def test_recorded_streams_give_what_their_messages_say(
    recorded: Recorded, impl: str, format: str, tmp_path: Path
) -> None:
    capture, registry, settings = recorded.capture, recorded.registry, recorded.settings
    with chosen(impl):
        result = files.export(
            capture.root / capture.entry["path"], tmp_path / "out", format,
            policies=TEXT, registry=registry, on_error="collect",
        )  # fmt: skip
    wanted, rolled_back = dict(recorded.wanted), recorded.rolled_back
    kinds = recorded.kinds(format)
    rows_by_table = rows_by_version(tmp_path / "out", result)
    count = len(wanted)
    truncated = values_compared = nested = 0
    for entry in manifest_of(tmp_path / "out")["tables"]:
        for version in entry["versions"]:
            name = entry["namespace"], entry["name"], version["version"]
            table, rows = rows_by_table.pop(name)
            assert len(rows) == table.rows == version["rows"]
            for values in rows:
                found = dict(zip([one["name"] for one in version["columns"]], values, strict=True))
                if found["op"] == "truncate":
                    truncated += 1
                    continue
                key = table.namespace, table.name, int(found["xid"]), int(found["seq"])
                op, subxid, commit_lsn, old_kind, cells, _ = wanted.pop(key)
                heads = [found[name] for name in ("op", "subxid", "commit_lsn", "old_kind")]
                if format == "csv":
                    told = [op, *("" if one is None else str(one) for one in
                                  (subxid, commit_lsn, old_kind))]  # fmt: skip
                else:
                    told = [op, subxid, commit_lsn, old_kind]
                assert heads == told
                unsent = found["unchanged"]
                if format == "csv" and unsent is not None:
                    unsent = json.loads(unsent or "[]")
                columns = [one for one in version["columns"] if one["part"] == "after"]
                for column, (value, text, raw) in zip(columns, cells, strict=True):
                    one = found[column["name"]]
                    assert (column["column"] in (unsent or ())) == (value == UNSENT)
                    if value == UNSENT:
                        assert one in (None, "")
                        continue
                    kind = kinds[version["schema"]][column["name"]]
                    if format == "csv" and (
                        value is None or (text == "" and not pa.types.is_nested(kind.arrow))
                    ):
                        assert one == ""  # told apart by quotes, which this reader does not tell
                    else:
                        assert is_same(one, value, text, raw, kind, settings), (column, one)
                        assert column["arrow"] == str(kind.arrow)
                        values_compared += 1
                        nested += pa.types.is_nested(kind.arrow)
    assert not rows_by_table
    # What was refused has an array that is of another shape than its column, or is of a composite
    # that is not what it was.
    errors = beside(tmp_path / "out", "errors") if result.errors else []
    assert all(
        "Policies(arrays" in one["message"] or "update_from" in one["message"] for one in errors
    )
    refused = Frames(
        bytes.fromhex(one["data"][2:]) if format == "csv" else one["data"] for one in errors
    )
    assert refused.total() == result.errors
    never_there = Frames(one[-1] for one in wanted.values())
    assert never_there <= refused
    assert refused - never_there <= rolled_back
    assert values_compared > 0
    assert nested > 0 or "all_types" not in capture.name
    assert truncated + count - len(wanted) == result.rows


def rows_by_version(
    directory: Path, result: files.ExportResult
) -> dict[tuple[str, str, int], tuple[files.ExportedTable, list[tuple[Any, ...]]]]:
    """By namespace, name and version, a table and its rows."""
    return {
        (table.namespace, table.name, table.version): (table, rows)
        for table, rows in zip(result.tables, rows_of_all(directory, result.tables), strict=True)
    }


def final_rows(version: dict[str, Any], rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What a table holds when the changes of its file are applied; its columns by name."""
    columns = version["columns"]
    sides = {
        part: {one["column"]: one["name"] for one in columns if one["part"] == part}
        for part in ("before", "after")
    }
    named = [dict(zip([one["name"] for one in columns], row, strict=True)) for row in rows]
    found: list[dict[str, Any]] = []
    for row in sorted(named, key=lambda one: (one["commit_lsn"], one["seq"])):
        op, old_kind = row["op"], row["old_kind"]
        if op == "truncate":
            found.clear()
            continue
        new = {column: row[name] for column, name in sides["after"].items()}
        previous: dict[str, Any] = {}
        if op != "insert":
            side = "before" if op == "update" and old_kind else "after"
            identity = list(new) if old_kind == "O" else version["key_columns"]
            wanted = {column: repr(row[sides[side][column]]) for column in identity}
            at = next(
                i
                for i, one in enumerate(found)
                if all(repr(one[column]) == value for column, value in wanted.items())
            )
            previous = found.pop(at)
        if op != "delete":
            unsent = row["unchanged"] or ()
            found.append(
                {
                    column: previous[column] if sides["after"][column] in unsent else value
                    for column, value in new.items()
                }
            )
    return found


@pytest.mark.parametrize("format", ["parquet", "duckdb"])
@pytest.mark.parametrize(
    "capture",
    [one for one in CATALOGUED if "all_types" in one.name],
    ids=lambda one: one.name,
)
def test_files_end_in_the_rows_that_the_server_copied(
    capture: Capture, format: str, tmp_path: Path
) -> None:
    assert capture.truth is not None
    registry = registry_of(capture.truth)
    settings = make_settings(TEXT, capture.encoding, registry)
    result = files.export(
        capture.root / capture.entry["path"], tmp_path / "out", format,
        policies=TEXT, registry=registry, on_error="collect", before=True,
    )  # fmt: skip
    kinds = kinds_of(capture, format, settings, before=True)
    rows_by_table = rows_by_version(tmp_path / "out", result)
    entries = {
        (one["namespace"], one["name"]): one for one in manifest_of(tmp_path / "out")["tables"]
    }
    text = ServerText(capture.truth.catalog())
    counts: collections.Counter[str] = collections.Counter()
    refused = [one["message"] for one in beside(tmp_path / "out", "errors")]
    assert all("Policies(arrays" in message for message in refused)
    for copy in copies(capture.truth.path, "default", "utf-8"):
        entry = entries.get((copy.schema, copy.table))
        if entry is None or len(entry["versions"]) > 1:
            counts["tables without a row in the stream, or altered"] += 1
            continue
        (version,) = entry["versions"]
        names = {one["column"]: one["name"] for one in version["columns"] if one["part"] == "after"}
        assert list(names) == copy.columns
        columns = [kinds[version["schema"]][names[column]] for column in copy.columns]
        if capture.name.endswith("_bin") and any(
            (kind.arrow == pa.binary() and kind.type.name != "bytea")
            or (kind.type.entry is not None and kind.type.entry.codec in ("money", "reg"))
            for kind in columns
        ):
            counts["tables with binary values that are not their text"] += 1
            continue
        _, found = rows_by_table[copy.schema, copy.table, version["version"]]
        rows = final_rows(version, found)
        lines = []
        for words in copy.text:
            # Rows with an array of another shape never were.
            with contextlib.suppress(OtherShape):
                lines.append(
                    [
                        comparable(text.read(word, kind.type.oid, kind.arrow))
                        for word, kind in zip(words, columns, strict=True)
                    ]
                )
        assert len(rows) == len(lines), (copy.schema, copy.table)
        for row in rows:
            # Rows often stand as they were inserted.
            lines.remove(
                [
                    comparable(parsed(row[column], kind.arrow))
                    for column, kind in zip(copy.columns, columns, strict=True)
                ]
            )
        counts["tables"] += 1
        counts["values"] += len(rows) * len(columns)
        counts["nested values"] += sum(
            row[column] is not None
            for row in rows
            for column, kind in zip(copy.columns, columns, strict=True)
            if pa.types.is_nested(kind.arrow)
        )
    assert counts["tables"] > 25, counts
    assert counts["nested values"] > 300, counts


# --- what is in a row ----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_in_every_format(impl: str, tmp_path: Path) -> None:
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
        if form == "csv":
            lines = (out / "public.accounts.csv").read_text().splitlines()
            xid, lsn = head[0], land.lsn
            assert lines[0] == (
                '"op","xid","subxid","lsn","commit_lsn","commit_time","seq","old_kind",'
                '"id","note","span","unchanged"'
            )
            time_ = '"2000-01-01 00:00:05.000000Z"'
            assert lines[1] == (
                f'"insert",{xid},,{lsn + 1},{commit},{time_},0,,1,,"P1Y2M-3DT4H5M6.789S",'
            )
            assert lines[2].endswith(',1,,2,"",,')  # an empty text, and NULL
            assert lines[4].endswith(',3,"K",1,,,"[""note"", ""span""]"')
        else:
            assert rows_of(out, table) == expected
        (events,) = [beside(out, "events")]
        assert [one["event"] for one in events] == ["truncate", "commit"]
        if form != "csv":
            assert json.loads(events[0]["details"])["restart_identity"] is True
            assert events[1]["commit_lsn"] == commit
            assert events[1]["commit_time"] == when


def beside(directory: Path, what: str) -> list[dict[str, Any]]:
    """The events, or the errors."""
    if (directory / "changes.duckdb").exists():
        with duckdb.connect(str(directory / "changes.duckdb"), read_only=True) as connection:
            found = connection.execute(f"FROM pgoutput_fast.{what}")
            names = [one[0] for one in found.description]
            return [dict(zip(names, one, strict=True)) for one in found.fetchall()]
    (path,) = directory.glob(f"_{what}.*")
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    return list(read(path).to_pylist())


def test_columns_called_as_ours_and_before(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    names = ("op", "OP", "after_op", "seq", "before_id", "id", "unchanged")
    table = relation(7, "t", *((int(name == "id"), name, 25) for name in names))
    values = [f"v{i}" for i in range(7)]
    land([table, insert(7, *values), update(7, "<unchanged>", *values[1:])])
    for form in ("parquet", "duckdb"):
        out = tmp_path / form
        (found,) = files.export(land.directory, out, form, before=True).tables
        columns = manifest_of(out)["tables"][0]["versions"][0]["columns"]
        after = [one["name"] for one in columns if one["part"] == "after"]
        upper = "OP" if form == "parquet" else "after_OP__"
        assert after == [
            "after_op_", upper, "after_op", "after_seq", "before_id", "id", "after_unchanged",
        ]  # fmt: skip
        before = [(one["name"], one["column"]) for one in columns if one["part"] == "before"]
        assert before[3:6] == [
            ("before_seq", "seq"), ("before_before_id", "before_id"), ("before_id_", "id"),
        ]  # fmt: skip
        first, second = rows_of(out, found)
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
        told = [
            (one.version, [row[8:-1] for row in rows_of(tmp_path / form, one)])
            for one in result.tables
        ]
        if form == "csv":
            assert told == [(1, [("1",), ("3",)]), (2, [("2", "x")]), (3, [("4",)])]
        else:
            assert told == [(1, [(1,), (3,)]), (2, [(2, "x")]), (3, [(4,)])]
        oids = [one["relation_id"] for one in manifest_of(tmp_path / form)["tables"][0]["versions"]]
        assert oids == [7, 7, 9]
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [
        "_events.csv", "_manifest.json", "public.t.csv", "public.t.v2.csv", "public.t.v3.csv",
    ]  # fmt: skip
    assert result.tables[1].table == ("public", "t__v2")


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
    expected: list[tuple[Any, ...]] = [
        (1, "ok", ["sad", None], {"m": "sad", "i": "P1D"}, "()"),
        (2, "new", ["ok", "new"], {"m": "new", "i": None}, None),
        (3, None, ["newer"], {"m": None, "i": "P2M"}, "()"),
        (4, "sad", None, None, None),
        (5, "newest", [], {"m": "newest", "i": None}, "()"),
    ]
    if form == "csv":
        expected = [
            tuple(
                json.dumps(value) if isinstance(value, (list, dict))
                else "" if value is None else str(value)
                for value in row
            )
            for row in expected
        ]  # fmt: skip
    assert [row[8:-1] for row in rows_of(tmp_path / "out", found)] == expected


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
    for form in ("parquet", "csv", "duckdb"):
        out = tmp_path / form
        result = files.export(land.directory, out, form)
        assert [(one.namespace, one.name) for one in result.tables] == NAMES
        for i, one in enumerate(result.tables):
            (row,) = rows_of(out, one)
            assert str(row[8]) == str(i)
            if form != "duckdb":
                (path,) = one.files
                assert path.parent == out
                assert re.fullmatch(r"[\w%][\w%.~-]*\.(parquet|csv)", path.name)
                assert not path.name.startswith("_")
                assert len(path.name.encode()) < 255
        if form != "duckdb":
            written = [path.name.casefold() for path in out.iterdir()]
            assert len(set(written)) == len(written) == len(NAMES) + 2
    assert result.tables[15].table == ("pgoutput_fast~2", "manifest")
    assert result.tables[0].table == ("a.b", "c")


# --- going on ------------------------------------------------------------------------------------


def many(land: Landing, count: int, first: int = 0) -> Path:
    """Segments, each with rows of three tables, the last in a new version from the third on."""
    for number in range(first, first + count):
        frames: list[bytes] = [ACCOUNTS]
        other = [(1, "id", 23), *([(0, "more", 25)] if number > 2 else [])]
        frames += [relation(8, "b", *other), relation(9, "c", (1, "id", 23))]
        more = ["m"] if number > 2 else []
        for i in range(300):
            frames.append(insert(7, str(number * 1000 + i), f"note {i}", "1 day"))
            frames.append(insert(8, str(i), *more))
        if number % 2:
            frames.append(insert(9, "1"))
        # Parts: a transaction that is larger than a segment.
        land(frames, part_frames=250 if number == 1 else 16_384)
    return land.directory


def part_bytes_of(directory: Path) -> int:
    """So that a step has about two segments."""
    units = _units.open_source([directory])
    assert units is not None
    return units.remaining(None, None)[0].size + 1


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
    rows = [
        [rows_of(directory, one) for one in found.tables]
        for directory, found in ((out, second), (tmp_path / "once", at_once))
    ]
    assert rows[0] == rows[1]
    if format != "duckdb":
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
    assert len(list(land.directory.glob("*-00002.arrow"))) == 1
    with chosen(impl):
        result = files.export(land.directory, tmp_path / "out")
    rows = [row for one in result.tables for row in rows_of(tmp_path / "out", one)]
    for xid in {row[1] for row in rows}:
        seqs = sorted(row[6] for row in rows if row[1] == xid)
        assert seqs == list(range(len(seqs)))


KILLED = """
import os, signal, sys
import duckdb, numpy, pyarrow.compute, pyarrow.csv, pyarrow.ipc, pyarrow.parquet
from pgoutput_fast import files
from pgoutput_fast.files import _manifest, _step, _units, _write

source, format, part_bytes = sys.argv[1:]

def run(out, limit):
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if "/files/" in frame.f_code.co_filename and event == "call":
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


@pytest.mark.sample(3)
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
                    if path.suffix in (".parquet", ".arrow"):
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
    assert [len(rows_of(out, one)) for one in result.tables] == [300, 300]
    assert not (out / _manifest.TEMPORARY).exists()


def test_a_database_gets_a_step_whole_however_many_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_write, "_DUCKDB_TABLES", 1)
    land = Landing(tmp_path / "segments")
    many(land, 2)
    out = tmp_path / "out"

    def dies(store: Any, manifest: Any) -> None:
        raise KeyboardInterrupt

    def killed() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(_write.DuckdbStore, "commit", dies)
            # As after a kill: nothing is cleared.
            patched.setattr(_write, "clear", lambda directory: None)
            with pytest.raises(KeyboardInterrupt):
                files.export(land.directory, out, "duckdb")

    killed()
    assert not (out / "changes.duckdb").exists()
    assert files.export(land.directory, out, "duckdb").rows == 1201
    before = contents(out)
    many(land, 2, first=2)
    killed()
    _manifest.clear(out)
    assert contents(out) == before
    assert files.export(land.directory, out, "duckdb").rows == 1201


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
    with pytest.raises(pf.PgOutputError, match=r"_manifest\.json is damaged|is no LSN"):
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
    (tmp_path / "blocked" / _manifest.TEMPORARY).write_text("")
    cases: list[tuple[Any, Path, dict[str, Any], str]] = [
        (land.directory, made, {}, r"other things in it \(notes\.txt\)"),
        (land.directory, land.directory, {}, "other things in it"),
        (land.directory, out, {"format": "csv"}, "begun as parquet, not csv"),
        (land.directory, out, {"format": "duckdb"}, "other things in it"),
        (land.directory, out, {"before": True}, "begun with before=False, not True"),
        (land.directory, out, {"tables": "public.b"}, "begun with tables=None"),
        (land.directory, out, {"policies": TEXT}, "begun with policies="),
        (land.directory, out, {"registry": pf.TypeRegistry()}, "begun without the types"),
        (other, out, {}, "another source: slot 's' is not 'another'"),
        (recording, out, {}, "another source: kind 'segments' is not 'recording'"),
        (land.directory, tmp_path / "file", {}, "can't use .*file for files"),
        (land.directory, tmp_path / "blocked", {}, "can't write .*blocked: File exists"),
        (land.directory, tmp_path / "new", {"format": "orc"}, "format='orc': expected one of"),
        (land.directory, tmp_path / "new", {"part_bytes": 0}, "part_bytes must be 1"),
        (land.directory, tmp_path / "new", {"on_error": "skip"}, "on_error='skip'"),
        ([recording, recording], tmp_path / "new", {}, "give it by itself"),
        ([], tmp_path / "new", {}, "no file and no directory"),
        (tmp_path / "nowhere", tmp_path / "new", {}, "can't read"),
    ]
    before = contents(out)
    for source, directory, options, message in cases:
        with pytest.raises(pf.PgOutputError, match=message):
            files.export(source, directory, **options)
        assert not (tmp_path / "new").exists()
    assert contents(out) == before
    assert (made / "notes.txt").read_text() == "mine"


def test_a_database_that_is_someone_elses_is_left_alone(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 1)
    (tmp_path / "out").mkdir()
    path = str(tmp_path / "out" / "changes.duckdb")
    with duckdb.connect(path) as connection:
        connection.execute("CREATE TABLE mine AS SELECT 1 AS x")
    with pytest.raises(pf.PgOutputError, match="was made by something else"):
        files.export(land.directory, tmp_path / "out", "duckdb")
    with duckdb.connect(path) as connection:
        assert connection.execute("FROM mine").fetchall() == [(1,)]
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["changes.duckdb"]


def test_a_gap_and_another_export_at_the_same_time(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 1)
    out = tmp_path / "out"
    files.export(land.directory, out)
    done = sorted(land.directory.glob("*.arrow"))
    many(land, 2, first=2)
    gap = max(set(land.directory.glob("*.arrow")) - set(done))
    with pytest.raises(pf.PgOutputError, match="a segment between them is missing"):
        files.export(gap, out)

    def inner(progress: files.ExportProgress) -> None:
        files.export(land.directory, out)

    with pytest.raises(pf.PgOutputError, match="another export writes into"):
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
    with pytest.raises(pf.PgOutputError, match="comes before that; export what is earlier"):
        files.export(land.directory, out)
    assert files.export(last, out).rows == 0


def test_refused_frames(tmp_path: Path) -> None:
    land = Landing(tmp_path / "segments")
    land([ACCOUNTS, insert(7, "1", "a", None)])
    land([ACCOUNTS, insert(7, "x", "b", None), insert(7, "3", "c", None)])
    out = tmp_path / "out"
    with pytest.raises(pf.PgOutputError, match=r"\.arrow, LSN 0/3001: frame 2: .*column 'id'"):
        files.export(land.directory, out, part_bytes=1)
    # What was whole before is there, and the same call goes on.
    assert (out / "public.accounts.parquet").exists()
    result = files.export(land.directory, out, on_error="collect", part_bytes=1)
    assert (result.rows, result.errors) == (1, 1)
    assert [row[8] for row in rows_of(out, result.tables[0])] == [1, 3]
    (error,) = beside(out, "errors")
    assert (error["tag"], error["code"], error["lsn"]) == ("I", "bad_value", 0x3001)
    assert error["data"] == insert(7, "x", "b", None)
    assert error["file"].endswith(".arrow")


def test_without_duckdb_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 1)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(pf.PgOutputError, match=r"install the extra pgoutput-fast\[duckdb\]"):
        files.export(land.directory, tmp_path / "out", "duckdb")
    assert not (tmp_path / "out").exists()


# --- much ----------------------------------------------------------------------------------------


MEASURED = """
import sys
import pyarrow as pa
from pgoutput_fast import files
result = files.export(sys.argv[1], sys.argv[2], sys.argv[3])
print(result.rows, pa.default_memory_pool().max_memory())
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["parquet", "arrow", "csv"])
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
    assert [row[8] for row in rows_of(tmp_path / "out", result.tables[299])] == [0, 1]


# --- values as text ------------------------------------------------------------------------------


def test_values_of_any_arrow_type_as_text() -> None:
    dictionary = pa.array(["sad", None, "sad"]).dictionary_encode()
    interval = pa.array([(1, 2, 3_000), None], pa.month_day_nano_interval())
    cases: list[tuple[Any, list[str | None]]] = [
        (pa.array([b"\x00\xff", b"", None]), ["\\x00ff", "\\x", None]),
        (pa.array([b"no", b"\x01", None, b"\xfe\x02"]).slice(1), ["\\x01", None, "\\xfe02"]),
        (pa.array([b"\1\2", None], pa.binary(2)), ["\\x0102", None]),
        (pa.array([b"", None]), ["\\x", None]),
        (pa.array([None, None], pa.binary()), [None, None]),
        (pa.array([], pa.list_(pa.int8())), []),
        (pa.array([-1, None, 253402300799999999], pa.timestamp("us", "UTC")),
         ["1969-12-31 23:59:59.999999Z", None, "9999-12-31 23:59:59.999999Z"]),
        (dictionary, ["sad", None, "sad"]),
        (interval, ["P1M2DT0.000003S", None]),
        (pa.array([[1, None], [], None]), ["[1, null]", "[]", None]),
        (pa.array([[[1]], [[2], None]]), ["[[1]]", "[[2], null]"]),
        (pa.array([['a"b', "é"]]), ['["a\\"b", "\\u00e9"]']),
        (pa.array([[1.5, float("nan"), float("inf"), -0.0]]), ['[1.5, "nan", "inf", -0]']),
        (pa.array([[Decimal("1.10")]]), ["[1.10]"]),
        (pa.array([[True, None]]), ["[true, null]"]),
        (pa.array([{"x": 1, "y": [b"\1"]}, None]), ['{"x": 1, "y": ["\\\\x01"]}', None]),
        (pa.array([[datetime.date(2026, 1, 2)]]), ['["2026-01-02"]']),
        (pa.array([[("a", 1), ("b", None)], None], pa.map_(pa.utf8(), pa.int32())),
         ['{"a": 1, "b": null}', None]),
        (pa.array([[(1, "x")]], pa.map_(pa.int32(), pa.utf8())), ['[[1, "x"]]']),
        (pa.array([[1.0, 2.5], None], pa.list_(pa.float32(), 2)), ["[1, 2.5]", None]),
        (pa.array([b"\1" * 16], pa.uuid()), ["01010101-0101-0101-0101-010101010101"]),
        (pa.StructArray.from_arrays([dictionary, dictionary], ["a", "b"]).slice(1),
         ['{"a": null, "b": null}', '{"a": "sad", "b": "sad"}']),
        (pa.array([[0], [1, 2], [3]]).slice(1, 1), ["[1, 2]"]),
        (pa.array([[0, 0], [1, 2]], pa.list_(pa.int8(), 2)).slice(1), ["[1, 2]"]),
        (pa.array([[("z", 1)], [("a", 1)]], pa.map_(pa.utf8(), pa.int8())).slice(1), ['{"a": 1}']),
    ]  # fmt: skip
    for array, expected in cases:
        assert _as_text.printed(array).to_pylist() == expected, array.type
        assert _as_text.csv_column(array).to_pylist() == expected, array.type


def test_nested_intervals_and_labels_are_stored_as_text() -> None:
    interval = pa.array([(1, 0, 0), None, (0, 3, 0)], pa.month_day_nano_interval())
    label = pa.array(["a", "b", None]).dictionary_encode()
    struct_ = pa.StructArray.from_arrays([interval, label], ["i", "l"])
    wanted = [{"i": "P1M", "l": "a"}, {"i": None, "l": "b"}, {"i": "P3D", "l": None}]
    assert _as_text.stored(struct_).to_pylist() == wanted
    assert _as_text.stored(struct_.slice(1)).to_pylist() == wanted[1:]
    lists = pa.ListArray.from_arrays(pa.array([0, 2, None, 3], pa.int32()), struct_)
    assert _as_text.stored(lists).to_pylist() == [wanted[:2], wanted[2:], None]
    assert _as_text.stored(lists.slice(1)).to_pylist() == [wanted[2:], None]
    keys = pa.array(["x", "y", "z"])
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 3], pa.int32()), keys, interval)
    assert _as_text.stored(maps).to_pylist() == [[("x", "P1M")], [("y", None), ("z", "P3D")]]
    fixed = pa.FixedSizeListArray.from_arrays(interval, 1)
    assert _as_text.stored(fixed.slice(1)).to_pylist() == [[None], ["P3D"]]
    for array in (struct_, lists, maps, fixed):
        stored = _as_text.stored(array)
        stored.validate(full=True)
        assert stored.type == _as_text.stored_type(array.type)


# --- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    land = Landing(tmp_path / "segments")
    many(land, 4)
    out = tmp_path / "out"

    def run(*arguments: Any, code: int = 0) -> str:
        assert main(["inspect", str(land.directory), *map(str, arguments)]) == code
        output, error = capsys.readouterr()
        return error if code else output

    said = run("--to", "csv", out)
    assert [line.split() for line in said.splitlines()[:-1]] == [
        ["public.accounts", "1,200", "public.accounts.csv"],
        ["public.b", "900", "public.b.csv"],
        ["public.b", "v2", "300", "public.b.v2.csv"],
        ["public.c", "2", "public.c.csv"],
    ]
    assert "2,402 rows added to" in said
    assert "0 rows added to" in run("--to", "csv", out)
    assert "1,200 rows added" in run("--to", "parquet", tmp_path / "b", "--table", "b", "--before")
    assert sorted(path.name for path in (tmp_path / "b").glob("public.*")) == [
        "public.b.parquet", "public.b.v2.parquet",
    ]  # fmt: skip
    assert "before_id" in read(tmp_path / "b" / "public.b.parquet").schema.names
    for kind in ("arrow", "duckdb"):
        # A name that was mistyped makes nothing that the right one would not go with.
        options = ("--to", kind, tmp_path / kind, "--table")
        assert "no changes of the tables" in run(*options, "nothing", code=1)
        assert not (tmp_path / kind).exists()
        assert "1,200 rows added" in run(*options, "b")
        assert "0 rows added" in run(*options, "b")
    for pattern in ("public.[bc]", "[bc]"):
        said = run("--to", "csv", tmp_path / pattern, "--table", pattern)
        assert [line.split()[0] for line in said.splitlines()[:-1]] == ["public.b"] * 2 + [
            "public.c"
        ]
    assert "begun with before=False" in run("--to", "csv", out, "--before", code=1)
    for option, why in (
        (["--stats"], "--stats is not for --to"), (["--xid", "3"], "--xid is not for --to"),
        (["--policy", "infinity"], "is not NAME=VALUE"),
        (["--policy", "infinity=never"], "expected 'error', 'null'"),
        (["--policy", "numeric=3"], "precision"),
    ):  # fmt: skip
        assert why in " ".join(run("--to", "csv", tmp_path / "x", *option, code=2).split())
    assert "--before is for --to" in run("--before", code=2)
    assert "--to" in run("--to", "orc", out, code=2)


def test_a_capture_that_has_nothing_yet_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    land = Landing(tmp_path / "segments")
    land.directory.mkdir(exist_ok=True)
    position = land.directory / "position.json"
    position.write_text("{}")
    arguments = ["inspect", str(land.directory), "--to", "csv", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert capsys.readouterr().out == (
        f"nothing was captured yet, as there is no segment in {land.directory}\n"
    )
    assert not (tmp_path / "out").exists()
    position.unlink()
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
