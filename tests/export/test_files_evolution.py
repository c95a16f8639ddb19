"""Files of tables that change: they end in the rows that the server copied."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from support import paths
from support.changelogs.exported import manifest_of
from support.columns.final_rows import copies
from support.recordings.corpus_files import Capture, captures
from support.values.catalog_types import registry_of

import pgoutput_fast as pf
from pgoutput_fast import files

FINAL = paths.DATA / "final"
EXPECTED = {
    "16/schema_evolution/v4_par_2pc_imm_bin": {
        "values": 108,
        "of another type": 3,
        "rows of ul that are not there": 1,  # it was UNLOGGED
        "rows of ty that are not there": 4,  # refused: a composite had other fields than now
    },
    "18/schema_evolution/v1_text": {
        "values": 111,
        "of another type": 1,
        "rows of ul that are not there": 1,
        "rows of ty that are not there": 1,
        "p of ty as it was before": 3,  # text that fits the composite's other fields too
        "m of ty as it was before": 5,  # a column that was dropped, and another added by its name
    },
}
EVOLVING = [one for one in captures(FINAL, scenario="schema_evolution") if one.name in EXPECTED]
AS_TEXT = pf.Policies(infinity="text", out_of_range="text", special_values="text")
"""By these, timestamps and numerics stand in files as COPY has them."""
Row = dict[str, Any]


def rows_of(directory: Path, version: dict[str, Any]) -> list[Row]:
    """The rows of a version of a table."""
    rows: list[Row] = []
    for part in version["parts"]:
        path = directory / part["file"]
        if path.suffix == ".parquet":
            rows += pa.parquet.ParquetFile(path).read().to_pylist()
        else:
            with pa.ipc.open_file(path) as reader:
                rows += reader.read_all().to_pylist()
    return rows


class Cell:
    """A value, and the type with which it was sent."""

    def __init__(self, value: Any, type_: Any) -> None:
        if isinstance(value, dict):
            value = "(" + ",".join("" if one is None else str(one) for one in value.values()) + ")"
        self.text = None if value is None else str(value)
        self.type = type_


def final_tables(directory: Path) -> tuple[dict[int, list[dict[str, Cell]]], dict[int, Any]]:
    """What tables hold when the changes of their files are applied, and their last versions.

    Both by the table's OID: it stays when a table, or its schema, is renamed.
    """
    changes = []
    for table in manifest_of(directory)["tables"]:
        for version in table["versions"]:
            changes += [(row, version) for row in rows_of(directory, version)]
    changes.sort(key=lambda one: (one[0]["commit_lsn"], one[0]["seq"]))
    tables: dict[int, list[dict[str, Cell]]] = collections.defaultdict(list)
    last: dict[int, Any] = {}
    for row, version in changes:
        rows = tables[version["relation_id"]]
        last[version["relation_id"]] = version
        if row["op"] == "truncate":
            rows.clear()
            continue
        sides: dict[str, dict[str, Cell]] = {"after": {}, "before": {}}
        for one in version["columns"]:
            if one["part"] in sides:
                sides[one["part"]][one["column"]] = Cell(row[one["name"]], one["type"])
        new, previous = sides["after"], {}
        if row["op"] != "insert":
            old = sides["before"] if row["op"] == "update" and row["old_kind"] else new
            identity = list(new) if row["old_kind"] == "O" else version["key_columns"]
            places = [
                i
                for i, mine in enumerate(rows)
                if all(mine[one].text == old[one].text for one in identity if one in mine)
            ]
            if places:
                previous = rows.pop(places[0])
            else:
                # Only where the frame that brought it was refused.
                assert "p" in new
        if row["op"] != "delete":
            unsent = row["unchanged"] or ()
            rows.append(new | {name: previous[name] for name in new if name in unsent})
    return tables, last


@pytest.mark.parametrize("format", files.FORMATS)
@pytest.mark.parametrize("capture", EVOLVING, ids=lambda one: one.name)
def test_tables_that_change_end_in_the_rows_that_the_server_copied(
    capture: Capture, format: str, tmp_path: Path
) -> None:
    assert capture.truth is not None
    files.export(
        capture.root / capture.entry["path"], tmp_path / "out", format,
        policies=AS_TEXT, registry=registry_of(capture.truth), on_error="collect", before=True,
    )  # fmt: skip
    tables, last = final_tables(tmp_path / "out")
    counts: collections.Counter[str] = collections.Counter()
    added = set()
    for copy in copies(capture.truth.path, "default", "utf-8"):
        rows = tables[copy.oid]
        types = {
            one["column"]: one["type"]
            for one in last[copy.oid]["columns"]
            if one["part"] == "after"
        }
        assert list(types) == copy.columns
        for words in copy.text:
            # The first column is the key, or a part of it that is enough.
            found = [one for one in rows if one[copy.columns[0]].text == words[0]]
            if not found:
                counts[f"rows of {copy.table} that are not there"] += 1
                continue
            (row,) = found
            rows.remove(row)
            for name, word in zip(copy.columns, words, strict=True):
                # What ALTER TABLE puts into rows that are there already is not sent.
                if name not in row:
                    added.add((name, word))
                elif row[name].type != types[name]:
                    counts["of another type"] += 1
                elif copy.table == "ty" and name != "id" and row[name].text != word:
                    counts[f"{name} of ty as it was before"] += 1
                else:
                    assert row[name].text == word, (copy.table, words, name)
                    counts["values"] += 1
        assert not rows, copy.table
    assert added == {
        *(("n", None), ("mid2", "7"), ("concurrent", "1")),  # defaults of columns that were added
        ("k2", "00000000-0000-0000-0000-000000000001"),
        ("mid2", "14"),  # sent as mid1, which was renamed
    }
    assert counts == EXPECTED[capture.name]
