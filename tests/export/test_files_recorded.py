"""Recorded streams in files: what their messages say, and what the server copied."""

from __future__ import annotations

import collections
import contextlib
import datetime
import re
import struct
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from support.changelogs.exported import manifest_of
from support.changelogs.exporting import (
    TEXT,
    beside,
    rows_of,
)
from support.columns.columnar import chosen
from support.columns.final_rows import copies
from support.columns.values import same_value
from support.nightly import marks
from support.nightly import recorded as recorded_cases
from support.paths import DATA
from support.postgres.server_text import OtherShape, ServerText, comparable
from support.recordings.corpus_files import Capture, captures
from support.values.catalog_types import registry_of

import pgoutput_fast as pf
from pgoutput_fast import files
from pgoutput_fast.files._flatten import Shape
from pgoutput_fast.settings import Settings, make_settings
from pgoutput_fast.types import ColumnType

FINAL = DATA / "final"
"""Captures beside which the catalogue was recorded, and COPY."""

SCENARIOS = ("18/all_types", "16/dml", "16/schema_evolution", "14/streaming", "16/two_phase")


def usual(capture: Capture) -> bool:
    return any(capture.name.startswith(f"{one}/") for one in SCENARIOS) and not (
        capture.name.endswith(("_error", "gucB", "gucC", "gucD", "copydata", "v4_on", "v4_par"))
    )


UNSENT = "<unsent>"
Key = tuple[int, int, int]  # relation id, xid, seq
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
            found[message.relation_id, xid, seqs[xid]] = (
                type(message).__name__.lower(),
                message.xid if streaming else None,
                None if isinstance(message, pf.Insert) else message.old_kind,
                cells,
                frame,
            )
            seqs[xid] += 1
    rolled_back = {
        key for key, told in found.items() if {(key[1], key[1]), (key[1], told[1])} & aborted
    }
    return {
        key: (*told[:2], commits.get(key[1]), *told[2:])
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
        target="portable",
    )  # fmt: skip
    found = {}
    for batch in decoder.decode([frame for _, frame in capture.rows()]):
        shape = Shape(pa.schema(batch), before=before)
        columns = [one for one in shape.columns if one.part == "after"]
        types = [batch.layout.plan.column_types[field.position] for field in batch.layout.columns]
        found[shape.digest] = {
            one.name: Kind(one.type, type_) for one, type_ in zip(columns, types, strict=True)
        }
    return found


def parsed(found: Any, kind: pa.DataType) -> Any:
    """A value of a nested one as ``to_pylist`` would give it, from text."""
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
        return same_value(parsed(found, form), form, value, kind.type, settings)
    if isinstance(value, pf.Interval):
        # By the policies of the test the column is as the server prints it.
        return bool(found == text)
    if isinstance(value, float):
        return repr(parsed(found, form)) == repr(value) or found == text
    if form == pa.binary():
        # Of a type that is not known it is what was sent.
        return bool(found == (value if isinstance(value, bytes) else raw))
    if isinstance(found, str):
        return found in (text, str(value))
    return bool(found == value)


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
        if format not in self._kinds:
            self._kinds[format] = kinds_of(self.capture, format, self.settings)
        return self._kinds[format]


@pytest.fixture(
    scope="module",
    params=[
        *recorded_cases(CAPTURES),
        *(
            pytest.param(one, id=f"{one.name} with a catalogue", marks=marks(one.name))
            for one in CATALOGUED
        ),
    ],
)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


@pytest.mark.everyday("16/dml/v1_text-cython", "18/all_types/v1_text-cython")
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
    rows_by_table = rows_by_version(result)
    count = len(wanted)
    truncated = values_compared = nested = 0
    for entry in manifest_of(tmp_path / "out")["tables"]:
        for version in entry["versions"]:
            table, rows = rows_by_table.pop((version["relation_id"], version["version"]))
            assert len(rows) == table.rows == version["rows"]
            for values in rows:
                found = dict(zip([one["name"] for one in version["columns"]], values, strict=True))
                if found["op"] == "truncate":
                    truncated += 1
                    continue
                key = table.relation_id, int(found["xid"]), int(found["seq"])
                op, subxid, commit_lsn, old_kind, cells, _ = wanted.pop(key)
                heads = [found[name] for name in ("op", "subxid", "commit_lsn", "old_kind")]
                assert heads == [op, subxid, commit_lsn, old_kind]
                unsent = found["unchanged"]
                columns = [one for one in version["columns"] if one["part"] == "after"]
                for column, (value, text, raw) in zip(columns, cells, strict=True):
                    one = found[column["name"]]
                    assert (column["column"] in (unsent or ())) == (value == UNSENT)
                    if value == UNSENT:
                        assert one is None
                        continue
                    kind = kinds[version["schema"]][column["name"]]
                    assert is_same(one, value, text, raw, kind, settings), (column, one)
                    assert column["arrow"] == str(kind.arrow)
                    values_compared += 1
                    nested += pa.types.is_nested(kind.arrow)
    assert not rows_by_table
    # What was refused has an array that is of another shape than its column, or is of a composite
    # that is not what it was.
    errors = beside(tmp_path / "out", "errors") if result.errors else []
    assert all(
        "policy arrays" in one["message"] or "update_from" in one["message"] for one in errors
    )
    refused = Frames(one["data"] for one in errors)
    assert refused.total() == result.errors
    never_there = Frames(one[-1] for one in wanted.values())
    assert never_there <= refused
    assert refused - never_there <= rolled_back
    assert values_compared > 0
    assert nested > 0 or "all_types" not in capture.name
    assert truncated + count - len(wanted) == result.rows


def rows_by_version(
    result: files.ExportResult,
) -> dict[tuple[int, int], tuple[files.ExportedTable, list[tuple[Any, ...]]]]:
    """By relation id and version, a table and its rows."""
    return {(table.relation_id, table.version): (table, rows_of(table)) for table in result.tables}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "capture",
    recorded_cases(one for one in CATALOGUED if "all_types" in one.name),
)
def test_files_end_in_the_rows_that_the_server_copied(capture: Capture, tmp_path: Path) -> None:
    assert capture.truth is not None
    registry = registry_of(capture.truth)
    settings = make_settings(TEXT, capture.encoding, registry)
    result = files.export(
        capture.root / capture.entry["path"], tmp_path / "out",
        policies=TEXT, registry=registry, on_error="collect", before=True,
    )  # fmt: skip
    kinds = kinds_of(capture, "parquet", settings, before=True)
    rows_by_table = rows_by_version(result)
    entries = {
        (one["namespace"], one["name"]): one for one in manifest_of(tmp_path / "out")["tables"]
    }
    text = ServerText(capture.truth.catalog())
    counts: collections.Counter[str] = collections.Counter()
    refused = [one["message"] for one in beside(tmp_path / "out", "errors")]
    assert all("policy arrays" in message for message in refused)
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
        _, found = rows_by_table[version["relation_id"], version["version"]]
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
