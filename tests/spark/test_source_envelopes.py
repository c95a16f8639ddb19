"""Mode `envelope` of the source: records as Debezium sends them."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from datetime import date, datetime, time, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.spark import PgOutputDataSource
from pgoutput_fast.spark._envelopes import Style, records, topic_of
from pgoutput_fast.spark._json_columns import json_column
from pgoutput_fast.spark._source_options import source_options

pytestmark = [
    pytest.mark.spark, pytest.mark.filterwarnings("ignore::FutureWarning"),
]  # fmt: skip

T = testing.Table("t", {"id": "int4", "v": "text", "y": "bytea", "a": 1009}, 16390, key=["id"])
FULL = testing.Table("f", {"id": "int4", "v": "text"}, 16391, replica_identity="f")
ODD = testing.Table('o"d d', {'k"\\': "text", "Ä": "int4"}, 16392, key=['k"\\'])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def read(made: MadeDirectory, **options: str) -> list[dict[str, Any]]:
    """The records of a directory, in their order, with key and value parsed."""
    given = {"mode": "envelope", "segments": str(made.directory), "topicPrefix": "p", **options}
    reader = PgOutputDataSource(given).reader(None)  # type: ignore[arg-type]
    found = [
        row
        for partition in reader.partitions()
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]
    found.sort(key=lambda row: (row["commit_lsn"], row["seq"], row["part"]))
    for row in found:
        for name in ("key", "value"):
            row[name] = None if row[name] is None else json.loads(row[name])
    return found


def shown(rows: list[dict[str, Any]]) -> list[Any]:
    """Of each record: the key's values, and op, before and after."""
    return [
        (
            row["key"] and list(row["key"].values()),
            row["value"] and tuple(row["value"][name] for name in ("op", "before", "after")),
        )
        for row in rows
    ]


def row(id_: int | None, v: Any = None, y: Any = None, a: Any = None) -> dict[str, Any]:
    return {"id": id_, "v": v, "y": y, "a": a}


def test_changes_of_all_kinds(made: MadeDirectory) -> None:
    made.wait(T, 1000)
    made.copy(T, 1101, [[1, "a", None, None]])
    made.commit(1200, T.relation(), testing.insert(T, [2, "b", b"\x00\xff", '{x,NULL,"q\\"r"}']),
                testing.update(T, [2, "c", pf.UNCHANGED, pf.UNCHANGED]),
                testing.update(T, [3, "c", None, None], [2, None, None, None], "K"),
                testing.delete(T, [3, None, None, None], "K"),
                testing.truncate([T.relation_id]))  # fmt: skip
    hidden = "__debezium_unavailable_value"
    expected = [
        (None, ("t", None, None)),
        ([1], ("r", None, row(1, "a"))),
        ([2], ("c", None, row(2, "b", "AP8=", ["x", None, 'q"r']))),
        ([2], ("u", None, row(2, "c", "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==", [hidden]))),
        ([2], ("d", row(2), None)),
        ([3], ("c", None, row(3, "c"))),
        ([3], ("d", row(3), None)),
        (None, ("t", None, None)),
    ]
    found = read(made)
    assert shown(found) == expected
    assert {one["topic"] for one in found} == {"p.public.t"}
    with_tombstones = shown(read(made, tombstones="true"))
    assert with_tombstones == [*expected[:5], ([2], None), *expected[5:7], ([3], None),
                               expected[7]]  # fmt: skip
    changed = shown(read(made, omitUnchanged="true"))[3][1]
    assert changed == ("u", None, {"id": 2, "v": "c"})
    changed = shown(read(made, placeholder="?"))[3][1]
    assert changed == ("u", None, row(2, "c", "Pw==", ["?"]))


def test_a_key_that_is_stored_out_of_line(made: MadeDirectory) -> None:
    """Its old row comes though the key did not change, and its new row without that value."""
    both = testing.Table("b", {"id": "int4", "k": "text", "v": "text"}, 16393, key=["id", "k"])
    made.commit(1200, both.relation(), testing.insert(both, [1, "long", "a"]),
                testing.update(both, [1, pf.UNCHANGED, "b"], [1, "long", None], "K"),
                testing.update(both, [2, pf.UNCHANGED, "b"], [1, "long", None], "K"),
                testing.update(both, [2, pf.UNCHANGED, pf.UNCHANGED]))  # fmt: skip

    def of(id_: int, v: str | None, k: str = "long") -> dict[str, Any]:
        return {"id": id_, "k": k, "v": v}

    hidden = "__debezium_unavailable_value"
    assert shown(read(made))[:4] == [
        ([1, "long"], ("c", None, of(1, "a"))),
        ([1, "long"], ("u", of(1, None), of(1, "b"))),
        ([1, "long"], ("d", of(1, None), None)),
        ([2, "long"], ("c", None, of(2, "b"))),
    ]
    assert shown(read(made))[4][1] == ("u", None, of(2, hidden, hidden))


def test_where_a_record_comes_from(made: MadeDirectory) -> None:
    made.commit(1200, T.relation(), testing.insert(T, [1, None, None, None]))
    (found,) = read(made)
    millis = 946_684_805_000
    times = {"ts_ms": millis, "ts_us": millis * 1000, "ts_ns": millis * 1_000_000}
    assert found["value"] == {
        "before": None, "after": found["value"]["after"], "source": found["value"]["source"],
        "transaction": None, "op": "c", **times,
    }  # fmt: skip
    assert found["value"]["source"] == {
        "version": pf.__version__, "connector": "postgresql", "name": "p", **times,
        "snapshot": "false", "db": found["value"]["source"]["db"],
        "sequence": '["1200","1195"]',
        "schema": "public", "table": "t", "txId": 7, "lsn": 1195, "xmin": None,
    }  # fmt: skip
    assert (found["lsn"], found["commit_lsn"], found["xid"], found["part"]) == (1195, 1200, 7, 0)


def test_odd_names_and_rows_without_a_key(made: MadeDirectory) -> None:
    text = 'q"b\\t\tn\n\x01\x7fü€😀'
    made.commit(1200, ODD.relation(), testing.insert(ODD, [text, 1]), FULL.relation(),
                testing.update(FULL, [2, pf.UNCHANGED], [1, "old"], "O"))  # fmt: skip
    odd, full = read(made)
    assert odd["topic"] == "p.public.o_d_d"
    assert odd["key"] == {'k"\\': text}
    assert odd["value"]["after"] == {'k"\\': text, "Ä": 1}
    assert odd["value"]["source"]["table"] == 'o"d d'
    # What was not sent is in the old row.
    assert shown([full]) == [
        (None, ("u", {"id": 1, "v": "old"}, {"id": 2, "v": "old"}))
    ]  # fmt: skip
    assert topic_of("a b", "ä", "t-1.x") == "a_b._.t-1.x"


@pytest.mark.parametrize("identity", ["f", "n"])
def test_a_key_that_the_stream_does_not_tell(identity: str) -> None:
    table = testing.Table("f", {"id": "int4", "v": "text"}, replica_identity=identity)
    decoder = pf.ColumnarDecoder(target="spark")
    (changes,) = decoder.decode([table.relation(), testing.insert(table, [1, "a"])])
    batch = pa.record_batch(changes.with_commit(1200, 5))
    for given, expected in ((["id"], '{"id":1}'), ([], None)):
        assert records(batch, "shop", Style(), given).column("key").to_pylist() == [expected]


def test_json_of_columns() -> None:
    range_ = pa.struct([("lower", pa.int32()), ("empty", pa.bool_())])
    micros = datetime(2024, 2, 29, 1, 2, 3, 120_000)
    for type_, values, expected in [
        (pa.int64(), [-(2**63), None], [-(2**63), None]),
        (pa.bool_(), [True, False], [True, False]),
        (pa.float64(), [1e300, 0.1, -0.0, None], [1e300, 0.1, -0.0, None]),
        (pa.float64(), [float("nan"), float("inf"), float("-inf"), None, 1.5],
         ["NaN", "Infinity", "-Infinity", None, 1.5]),
        (pa.decimal128(20, 10), [Decimal("0.0000000010"), Decimal("-1.5"), None],
         ["0.0000000010", "-1.5000000000", None]),
        (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)], ["0001-01-01Z", "9999-12-31Z"]),
        (pa.timestamp("us"), [micros, datetime(1969, 12, 31)],
         ["2024-02-29T01:02:03.12Z", "1969-12-31T00:00:00Z"]),
        (pa.timestamp("us", "UTC"), [None, micros.replace(tzinfo=timezone.utc)],
         [None, "2024-02-29T01:02:03.12Z"]),
        (pa.time64("ns"), [time(0), time(23, 59, 59, 500_000)], ["00:00:00Z", "23:59:59.5Z"]),
        (pa.binary(), [b"", None, b"a", b"ab", b"abc", bytes(range(256))],
         ["", None, "YQ==", "YWI=", "YWJj", base64.b64encode(bytes(range(256))).decode()]),
        (pa.list_(pa.string()), [["a", None, '"'], [], None], [["a", None, '"'], [], None]),
        (pa.list_(pa.list_(pa.int32())), [[[1], []], None], [[[1], []], None]),
        (pa.map_(pa.string(), pa.string()), [[("k\n", None)], []], [{"k\n": None}, {}]),
        (range_, [{"lower": 1, "empty": False}, None], [{"lower": 1, "empty": False}, None]),
        (pa.struct([]), [{}, None], [{}, None]),
        (pa.null(), [None], [None]),
    ]:  # fmt: skip
        array = pa.array(values, type_)
        for first in range(len(values)):
            found = [json.loads(one) for one in json_column(array.slice(first)).to_pylist()]
            assert found == expected[first:], type_
            assert list(map(str, found)) == list(map(str, expected[first:]))


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"table": "t"}, "mode"),
        ({"output": "o"}, "output"),
        ({"omitUnchanged": "true", "placeholder": "x"}, "placeholder"),
        ({"mode": "table", "table": "t", "tombstones": "true"}, "tombstones"),
        ({"tombstones": "yes"}, "tombstones"),
    ],
)
def test_options_of_records(given: dict[str, str], parameter: str) -> None:
    with expect_error(parameter=parameter):
        source_options({"mode": "envelope", "segments": "a", **given})


def test_records_by_spark(spark: Any, made: MadeDirectory, tmp_path: Path) -> None:
    """A batch and a stream have the same, which Spark writes as lines of JSON."""
    spark.dataSource.register(PgOutputDataSource)
    made.commit(1200, T.relation(), testing.insert(T, [1, "a", None, None]))
    given = {"mode": "envelope", "segments": str(made.directory)}
    batch = spark.read.format("pgoutput").options(**given).load().collect()
    assert [json.loads(one.key) for one in batch] == [{"id": 1}]
    frame = spark.readStream.format("pgoutput").options(**given).load()
    query = (
        frame.select("value").writeStream.format("text").trigger(availableNow=True)
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    query.awaitTermination()
    lines = spark.read.text(str(tmp_path / "out")).collect()
    assert [one.value for one in lines] == [one.value for one in batch]
    assert json.loads(lines[0].value)["after"] == row(1, "a")
