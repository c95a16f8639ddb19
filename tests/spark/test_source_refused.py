"""Values that the source refuses: records with errors, or errors of the query."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.spark import PgOutputDataSource, error_of

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::FutureWarning")]

COLUMNS = {
    "id": "int4", "d": "date", "n": "numeric", "ts": "timestamptz", "v": "text", "a": 1182,
    "ids": 1005,
}  # fmt: skip
T = testing.Table("t", COLUMNS, 16390, replica_identity="f")
KEYED = testing.Table("k", COLUMNS, 16391, key=["id"])
POLICIES = {"policies": "numeric=10,2"}

GOOD: dict[str, str | bytes] = {
    "d": "2024-02-29", "n": "1.50", "ts": "2024-02-29 00:00:00+00", "v": "a", "a": "{2024-02-29}",
    "ids": b"\0\0\0\1\0\0\0\0\0\0\0\x15\0\0\0\1\0\0\0\1\0\0\0\2\0\7",
}  # fmt: skip
BAD = [
    ("d", b"infinity", "out_of_range"),
    ("d", b"-infinity", "out_of_range"),
    ("d", b"4713-01-01 BC", "out_of_range"),
    ("n", b"NaN", "out_of_range"),
    ("n", b"123456789.00", "out_of_range"),
    ("ts", b"294276-12-31 23:59:59+00", "out_of_range"),
    ("ts", b"infinity", "out_of_range"),
    ("v", b"a\xff", "bad_encoding"),
    ("a", b"{2024-02-29,infinity}", "out_of_range"),
    ("ids", b"\0\0\0\1\0\0\0\0\0\0\0\x15\0\0\0\1\0\0\0\1\0\0\0\7\0\7", "bad_value"),
]
"""A column, the bytes of its value, and the code of the error."""
RAW = {(column, raw): code for column, raw, code in BAD}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def row(id_: int, **values: str | bytes) -> list[Any]:
    return [id_, *({**GOOD, **values}[name] for name in COLUMNS if name != "id")]


def with_raw(frame: bytes, column: str, raw: bytes) -> bytes:
    """The frame with bytes in place of each of a column's good values, as the same kind."""
    value = GOOD[column]
    kind = b"b" if isinstance(value, bytes) else b"t"
    before = value if isinstance(value, bytes) else value.encode()
    old, new = (kind + len(one).to_bytes(4, "big") + one for one in (before, raw))
    assert old in frame
    return frame.replace(old, new)


def read(directory: Path, **options: str) -> list[dict[str, Any]]:
    """The records of a directory as they come, with key and value parsed."""
    given = {"mode": "envelope", "segments": str(directory), **POLICIES, **options}
    reader = PgOutputDataSource(given).reader(None)  # type: ignore[arg-type]
    found = [
        record
        for partition in reader.partitions()
        for batch in reader.read(partition)
        for record in batch.to_pylist()
    ]
    for record in found:
        for name in ("key", "value"):
            record[name] = None if record[name] is None else json.loads(record[name])
    return found


def shown(raw: bytes) -> str:
    """How JSON has the bytes: the text, or base64 where they are no text."""
    is_text = raw.isascii() and b"\0" not in raw
    return raw.decode() if is_text else base64.b64encode(raw).decode()


def expected_of(record: dict[str, Any], bad: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    """The record of a row with values that are refused, made of that without them."""
    value = dict(record["value"])
    for side in ("before", "after"):
        there = value[side]
        if there is not None and there["d"] is not None:
            value[side] = there | {column: shown(raw) for column, raw in bad}
    errors = [(RAW[column, raw], column, raw) for column, raw in bad]
    return {**record, "value": value, "errors": sorted(errors)}


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """A record with what is told of its errors in a form to compare."""
    if record["errors"] is None:
        assert record["value"] is None or "errors" not in record["value"]
        return record
    value = dict(record["value"] or {})
    told = value.pop("errors")
    assert told == [{k: v for k, v in one.items() if k != "raw"} for one in record["errors"]]
    for one in record["errors"]:
        assert repr(one["column"]) in one["message"]
    errors = sorted((one["code"], one["column"], one["raw"]) for one in record["errors"])
    return {**record, "value": value, "errors": errors}


def frames_of(op: str, ids: Sequence[int], table: testing.Table = T) -> list[bytes]:
    if op == "insert":
        return [testing.insert(table, row(one)) for one in ids]
    if op == "update":
        return [testing.update(table, row(one), row(one), "O") for one in ids]
    return [testing.delete(table, row(one), "O") for one in ids]


@pytest.mark.parametrize("op", ["insert", "update", "delete", "read"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_refused_row_is_a_record(op: str, place: int, tmp_path: Path) -> None:
    """With all of its other values, in its place, and every other record as without it."""
    for number, (column, raw, _) in enumerate([("", b"", ""), *BAD]):
        with contextlib.closing(MadeDirectory(tmp_path / str(number))) as made:
            if op == "read":
                frames = frames_of("insert", [1, 2, 3])
            else:
                frames = frames_of(op, [1, 2, 3])
            if column:
                frames[place] = with_raw(frames[place], column, raw)
            if op == "read":
                made.wait(T, 1000)
                made.copy_frames(T, 1101, frames)
                made.commit(1200)  # the directory goes beyond the snapshot
            else:
                made.commit(1200, T.relation(), *frames)
            found = read(made.directory)
        if not column:
            good = found
            assert all(record["errors"] is None for record in good)
            continue
        expected = list(good)
        at = place + (op == "read")  # the rows of a snapshot come behind a truncate
        assert good[at]["value"]["op"] == op[0].replace("i", "c")
        expected[at] = expected_of(good[at], [(column, raw)])
        assert [*map(plain, found)] == expected, column


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_refused_rows_among_others(data: Any, tmp_path_factory: Any) -> None:
    """Records of two tables, in the order of each, whichever values of whichever rows are bad."""
    bads = st.lists(
        st.sampled_from([(column, raw) for column, raw, _ in BAD]), unique_by=lambda one: one[0],
        max_size=3,
    )  # fmt: skip
    given = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["T", "K", "again"]),
                      st.sampled_from(["insert", "update", "delete"]), bads),
            max_size=30,
        )
    )  # fmt: skip
    good, bad, expected_bads = [], [], []
    for number, (name, op, values) in enumerate(given):
        table = T if name != "K" else KEYED
        if name == "again":
            # The table has another name and other columns behind this.
            other = testing.Table("t", {**COLUMNS, f"x{number}": "text"}, 16390)
            for frames in (good, bad):
                frames += [other.relation(), testing.insert(other, [*row(number), "x"])]
                frames.append(T.relation())
            expected_bads.append([])
            continue
        if table is KEYED and op == "delete":
            op = "insert"
        (frame,) = frames_of(op, [number], table)
        good.append(frame)
        for column, raw in values:
            frame = with_raw(frame, column, raw)
        bad.append(frame)
        expected_bads.append(values)
    path = tmp_path_factory.mktemp("refused")
    found = []
    for number, frames in enumerate((good, bad)):
        with contextlib.closing(MadeDirectory(path / str(number))) as made:
            made.commit(1200, T.relation(), KEYED.relation(), *frames)
            found.append(read(made.directory))
    unrefused, refused = found
    for topic in {record["topic"] for record in unrefused}:
        records = [plain(one) for one in refused if one["topic"] == topic]
        assert records == [
            expected_of(one, expected_bads[one["seq"]]) if expected_bads[one["seq"]] else one
            for one in unrefused
            if one["topic"] == topic
        ]
        order = [(one["seq"], one["part"]) for one in records]
        assert order == sorted(order)


def test_a_refused_key_moves(made: MadeDirectory) -> None:
    """All records of one change tell of it, so that they go the same way."""
    table = testing.Table("t", {"d": "date", "v": "text"}, 16390, key=["d"])
    made.commit(1200, table.relation(),
                testing.update(table, ["infinity", "a"], ["2024-02-29", None], "K"),
                testing.update(table, ["infinity", pf.UNCHANGED]))  # fmt: skip
    end, tombstone, new, same = read(made.directory, tombstones="true")
    assert end["key"] == tombstone["key"] == {"d": "2024-02-29"}
    assert new["key"] == same["key"] == {"d": "infinity"}
    assert tombstone["value"] is None
    for one in (end, tombstone, new, same):
        assert [(error["column"], error["raw"]) for error in one["errors"]] == [("d", b"infinity")]
    assert new["value"]["after"] == {"d": "infinity", "v": "a"}
    assert same["value"]["after"] == {"d": "infinity", "v": "__debezium_unavailable_value"}


def test_more_than_a_value_is_refused(made: MadeDirectory) -> None:
    """A frame that is broken ends the query: what it was is not known."""
    made.commit(1200, T.relation(), testing.insert(T, row(1))[:-1])
    with expect_error(code="bad_length", column=None):
        read(made.directory)


@pytest.mark.slow
def test_refused_values_by_spark(spark: Any, made: MadeDirectory, tmp_path: Path) -> None:
    """In a batch and in a stream, in each mode."""
    spark.dataSource.register(PgOutputDataSource)
    bad = with_raw(testing.insert(T, row(2)), "d", b"infinity")
    made.commit(1200, T.relation(), testing.insert(T, row(1)), bad, testing.insert(T, row(3)))
    given = {"segments": str(made.directory), **POLICIES}
    modes: dict[str, dict[str, str]] = {
        "envelope": {}, "table": {"table": "public.t"}, "manifest": {"output": str(tmp_path / "o")},
    }  # fmt: skip

    def loaded(mode: str, reader: Any) -> Any:
        return reader.format("pgoutput").options(mode=mode, **given, **modes[mode]).load()

    def streamed(mode: str) -> Any:
        frame = loaded(mode, spark.readStream)
        query = (
            frame.writeStream.format("memory").queryName(mode).trigger(availableNow=True)
            .option("checkpointLocation", str(tmp_path / mode)).start()
        )  # fmt: skip
        query.awaitTermination()
        return spark.table(mode).collect()

    found = loaded("envelope", spark.read).collect()
    assert found == streamed("envelope")
    assert [json.loads(one.value)["after"]["id"] for one in found] == [1, 2, 3]
    assert [one.errors and one.errors[0].raw for one in found] == [None, b"infinity", None]
    for mode in ("table", "manifest"):
        for run in (lambda mode: loaded(mode, spark.read).collect(), streamed):
            with pytest.raises(Exception) as raised:  # noqa: PT011 - Spark has several
                run(mode)
            error = error_of(raised.value)
            assert error is not None
            assert (error.code, error.column) == ("out_of_range", "d")
            for name in ("public.t", "'d'", "0/4AB", " infinity "):
                assert name in str(error), mode
