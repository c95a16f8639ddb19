"""Batches as others read them: polars, duckdb and nanoarrow get the values that pyarrow gets.

What one of them does not take, or reads otherwise, stands in REFUSED. A test fails when that is not
so any more.
"""

from __future__ import annotations

import datetime
import functools
import re
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="reads the batches")
pytest.importorskip("nanoarrow", reason="reads the batches")
pytest.importorskip("polars", reason="reads the batches")

import duckdb
import nanoarrow
import polars
import pyarrow as pa
from support import paths
from support.frames.made_vectors import NULL, insert, text
from support.frames.make_frames import type_frame
from support.recordings.corpus_files import captures
from support.values.catalog_types import registry_of

import pgoutput_fast as pf
from pgoutput_fast import testing

DATA = paths.DATA / "final"
SCENARIOS = ("18/all_types", "18/schema_evolution")
# What no library's Python objects hold is asked for elsewhere.
POLICIES = [
    pf.Policies(infinity="null", out_of_range="null", special_values="null", arrays=arrays)
    for arrays in ("error", 2, "text")
]

REFUSED = {
    ("arrow", "polars", "interval"): "an error: polars has no such type",
    ("arrow", "duckdb", "interval"): "a timedelta, in which a month is 30 days; or an overflow",
    ("arrow", "duckdb", "decimal256"): "an error: duckdb's decimals have 38 digits",
    ("arrow", "nanoarrow", "decimal128"): "negative numbers as those of 128 bits without a sign",
    ("arrow", "nanoarrow", "map"): "an error: it makes no Python objects of maps",
    ("portable", "nanoarrow", "map"): "an error: it makes no Python objects of maps",
    ("portable", "nanoarrow", "decimal128"): "negative numbers as those of 128 bits without a sign",
}
"""Target, library and type → what it makes of it instead."""


@functools.cache
def columns(target: str) -> dict[str, list[pa.RecordBatch]]:
    """Kind of type → record batches of one column each, from streams in both tuple formats."""
    found: dict[str, list[pa.RecordBatch]] = {}
    for scenario in SCENARIOS:
        for capture in captures(DATA):
            if not capture.name.startswith(f"{scenario}/"):
                continue
            assert capture.truth is not None
            registry = registry_of(capture.truth)
            for policies in POLICIES:
                # Some were made in styles that hide a value, some have arrays of another shape.
                decoder = pf.ColumnarDecoder(
                    policies,
                    target=target,
                    encoding=capture.encoding,
                    registry=registry,
                    on_error="collect",
                )
                for changes in decoder.decode([frame for _, frame in capture.rows()]):
                    for kind, one in columns_of(changes):
                        found.setdefault(kind, []).append(one)
    # No capture has a vector of so many dimensions.
    announced = testing.Table("t", {"c": (16500, 3)}).relation()
    frames = [type_frame(16500, "public", "vector"), announced]
    frames += [insert(text("[1,2.5,-3]")), insert(NULL), insert(text("[0,0,1e-3]"))]
    for changes in pf.ColumnarDecoder(target=target).decode(frames):
        for kind, one in columns_of(changes):
            found.setdefault(kind, []).append(one)
    return {kind: joined(batches) for kind, batches in found.items()}


def columns_of(changes: Any) -> Iterator[tuple[str, pa.RecordBatch]]:
    batch = pa.record_batch(changes)
    after = batch.column("after")
    for field in after.type:
        kept = pa.schema([field.with_name("c")])
        yield kind_of(field.type), pa.record_batch([after.field(field.name)], schema=kept)
    for name in ("op", "xid", "commit_lsn", "commit_time", "seq", "unchanged"):
        kept = pa.schema([batch.schema.field(name).with_name("c")])
        yield kind_of(kept.field(0).type), pa.record_batch([batch.column(name)], schema=kept)


def joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """One batch of each type: decimals are of many."""
    types = {str(batch.schema): batch.schema for batch in batches}
    tables = (
        pa.Table.from_batches([batch for batch in batches if str(batch.schema) == name], schema)
        for name, schema in types.items()
    )
    return [table.combine_chunks().to_batches()[0] for table in tables]


def kind_of(type_: pa.DataType) -> str:
    if isinstance(type_, pa.BaseExtensionType):
        return str(type_.extension_name)
    if pa.types.is_dictionary(type_):
        return "dictionary"
    if pa.types.is_map(type_):
        return "map"
    if pa.types.is_nested(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        return f"{str(type_).partition('<')[0]} of {', '.join(kind_of(one.type) for one in fields)}"
    name = str(type_).partition("(")[0]
    return {"month_day_nano_interval": "interval"}.get(name, name)


def expected(batch: pa.RecordBatch) -> list[Any]:
    column = batch.column(0)
    return list(getattr(column, "storage", column).to_pylist())


def by_polars(batch: pa.RecordBatch) -> list[Any]:
    return polars.DataFrame(batch).to_series(0).to_list()


@functools.cache
def connection() -> duckdb.DuckDBPyConnection:
    # It is not to look for extensions anywhere.
    return duckdb.connect(config={"autoinstall_known_extensions": False})


def by_duckdb(batch: pa.RecordBatch) -> list[Any]:
    relation = connection().from_arrow(pa.table(batch))
    return [value.bytes if hasattr(value, "bytes") else value for (value,) in relation.fetchall()]


def by_nanoarrow(batch: pa.RecordBatch) -> list[Any]:
    return list(nanoarrow.Array(batch).child(0).iter_py())


READERS: dict[str, Callable[[pa.RecordBatch], list[Any]]] = {
    "polars": by_polars,
    "duckdb": by_duckdb,
    "nanoarrow": by_nanoarrow,
}


def comparable(value: Any) -> Any:
    """NaN as something that equals itself, moments as what they are in any zone."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.timezone.utc)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, dict):
        if set(value) == {"key", "value"}:
            return list(map(comparable, value.values()))  # a pair of a map, as polars gives it
        return [[name, comparable(part)] for name, part in value.items()]
    if isinstance(value, (list, tuple)) or hasattr(value, "to_list"):
        parts = value if isinstance(value, (list, tuple)) else value.to_list()
        return list(map(comparable, parts))
    return value


def same(got: list[Any], want: list[Any]) -> bool:
    return [comparable(value) for value in got] == [comparable(value) for value in want]


# nanoarrow says that arrow.uuid and arrow.json are bytes and text to it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nanoarrow.iterator.UnregisteredExtensionWarning")
@pytest.mark.parametrize("library", READERS)
@pytest.mark.parametrize("target", ["arrow", "portable"])
def test_others_read_the_values_that_pyarrow_reads(target: str, library: str) -> None:
    read = READERS[library]
    counts = {}
    for kind, batches in columns(target).items():
        if any((target, library, part) in REFUSED for part in re.split(" of |, ", kind)):
            continue
        for batch in batches:
            assert same(read(batch), expected(batch)), (kind, batch.to_pylist())
        counts[kind] = sum(batch.num_rows for batch in batches)
    # Each of them is asked for every kind of type that a target has.
    assert {"bool", "int16", "int32", "int64", "uint32", "uint64", "float", "double"} <= set(counts)
    assert {"string", "binary", "date32[day]", "time64[us]", "timestamp[us]"} <= set(counts)
    assert {"dictionary", "list of int32", "list of list of int32"} <= set(counts)
    assert {"list of dictionary", "fixed_size_list of float"} <= set(counts)
    assert any(kind.startswith("struct of int32, int32, bool, bool, bool") for kind in counts)
    assert min(counts.values()) > 0


@pytest.mark.parametrize(("target", "library", "kind"), REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_they_refuse_is_still_refused(target: str, library: str, kind: str) -> None:
    if kind not in columns(target):
        batches = [pa.record_batch([pa.array([Decimal(10) ** 40], pa.decimal256(50, 2))], ["c"])]
    else:
        batches = columns(target)[kind]
    for batch in batches:
        try:
            got = READERS[library](batch)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return
        if not same(got, expected(batch)):
            return
    pytest.fail(f"{library} takes {kind} now")


def test_a_portable_batch_has_no_type_that_is_refused() -> None:
    kinds = set(columns("portable"))
    assert "interval" not in kinds
    assert "decimal256" not in kinds
