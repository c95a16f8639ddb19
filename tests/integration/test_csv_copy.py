"""CSV that an export has made: the server reads it again by COPY."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pgoutput_fast import files, testing
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

if TYPE_CHECKING:
    from conftest import Database

pytestmark = pytest.mark.integration

COLUMNS: list[tuple[str, int, list[str | None]]] = [
    ("int4", 23, ["-2147483648", "7", None]),
    ("text", 25, ["", 'a "quoted", text\r\nof two lines', "NULL"]),
    ("text", 25, [None, "\\N", "\\."]),
    ("float8", 701, ["NaN", "-Infinity", "1e-300"]),
    ("float4", 700, ["Infinity", "0.1", "-0"]),
    ("numeric(8,2)", 1700, ["-999999.99", "0.10", None]),
    ("bool", 16, ["t", "f", None]),
    ("bytea", 17, ["\\x", "\\x00ff5c22", None]),
    ("date", 1082, ["0001-01-01", "9999-12-31", None]),
    ("time", 1083, ["00:00:00", "23:59:59.999999", None]),
    ("timestamp", 1114, ["0001-01-01 00:00:00", "1969-12-31 23:59:59.999999", None]),
    ("timestamptz", 1184, ["0001-01-01 00:00:00+00", "1969-12-31 23:59:59.999999+00", None]),
    ("interval", 1186, ["1 year 2 mons -3 days +04:05:06.789", "-00:00:00.000001", "00:00:00"]),
    ("uuid", 2950, ["00000000-0000-0000-0000-00000000000f", None, None]),
    ("jsonb", 3802, ['{"a": [1, "x,\\"y"]}', "null", None]),
]  # fmt: skip


def test_the_server_reads_csv_again(database18: Database, tmp_path: Path) -> None:
    table = testing.Table(
        "t",
        {f"c{n}": name if "(" in name else oid for n, (name, oid, _) in enumerate(COLUMNS)},
        7,
        key=[],
    )
    frames = [testing.begin(9, 0x1800, 5_000_000), table.relation()]
    frames += [testing.insert(table, [texts[i] for _, _, texts in COLUMNS]) for i in range(3)]
    frames.append(testing.commit(0x1800, commit_time=5_000_000))
    metadata = SegmentMetadata(
        system_identifier="1", database="d", slot="s", publications=("p",), server_version=180004,
        encoding="UTF8", settings={}, options={},
    )  # fmt: skip
    with SegmentWriter(tmp_path / "segments", metadata, confirmed_flush_lsn=0) as writer:
        for number, frame in enumerate(frames):
            writer.write(0x1800 if frame[:1] == b"C" else 0x1000 + number, frame)
        writer.flush()
    files.export(tmp_path / "segments", tmp_path / "out", "csv")
    types = [one[0] for one in COLUMNS]
    head = ["text", "int8", "int8", "int8", "int8", "timestamptz", "int8", "text"]
    with database18.connect() as connection:
        # What a session's time zone is changes nothing.
        connection.execute("SET timezone = 'Asia/Tokyo'")
        made = ", ".join(
            [f"h{i} {name}" for i, name in enumerate(head)]
            + [f"c{i} {name}" for i, name in enumerate(types)]
            + ["unchanged text"]
        )
        connection.execute(f"CREATE TABLE again ({made})")
        with connection.cursor().copy("COPY again FROM STDIN (FORMAT csv, HEADER)") as copy:
            copy.write((tmp_path / "out" / "public.t.csv").read_bytes())
        connection.execute("SET timezone = 'UTC'; SET intervalstyle = 'postgres'")
        shown = ", ".join(f"c{i}::text" for i in range(len(types)))
        found = connection.execute(f"SELECT {shown} FROM again ORDER BY h6").fetchall()
        (when,) = connection.execute("SELECT DISTINCT h5::text FROM again").fetchone()
    wanted = list(zip(*(texts for _, _, texts in COLUMNS), strict=True))
    bools = {"t": "true", "f": "false"}
    assert [tuple(bools.get(one, one) for one in row) for row in wanted] == found
    assert when == "2000-01-01 00:00:05+00"
