"""A snapshot's Relations, Types and rows on every server version, held against the stream's."""

from __future__ import annotations

from typing import Any

import pytest
from support.postgres.snapshot_values import check_values
from support.postgres.snapshots import (
    SCHEMA,
    SINCE,
    announced,
    by_name,
    frames_by_table,
    peek,
    rows,
)

from pgoutput_fast.replication.snapshot import open_snapshot

pytestmark = [pytest.mark.server, pytest.mark.slow]

PUBLICATIONS = {
    "leaves": {14: "FOR ALL TABLES"},
    "roots": {14: "FOR ALL TABLES WITH (publish_via_partition_root = true)"},
    "special": {
        14: "FOR TABLE root, made, whole",
        15: "FOR TABLE listed (d, a, c), root WHERE (id <> 101 AND v IS DISTINCT FROM 'q''')"
        ", made, filtered WHERE (\"V \"\"v\" IN ('a', 'c')), whole"
        " WITH (publish_via_partition_root = true)",
        18: "FOR TABLE listed (d, a, c), root WHERE (id <> 101 AND v IS DISTINCT FROM 'q''')"
        ", made (c, a, b), filtered WHERE (\"V \"\"v\" IN ('a', 'c')), whole, made_too"
        " WITH (publish_via_partition_root = true, publish_generated_columns = stored)",
    },
    "also": {14: "FOR TABLE leaf_b", 15: "FOR TABLE filtered WHERE (t = 'd'), leaf_b"},
}
"""By name what each is from a server version on."""


@pytest.fixture
def published(database: Any, version: int) -> Any:
    """Tables without rows, all published, and the statements that bring rows."""
    statements = [*SCHEMA, *(one for since in SINCE if version >= since for one in SINCE[since])]
    database.inserts = [one for one in statements if one.startswith("INSERT")]
    database.execute(*(one for one in statements if one not in database.inserts))
    for name, of in PUBLICATIONS.items():
        given = next(text for since, text in reversed(of.items()) if version >= since)
        database.execute(f"CREATE PUBLICATION {name} {given}")
    return database


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize(
    "publications",
    [["leaves"], ["roots"], ["special"], ["special", "also"], ["leaves", "roots"]],
    ids=",".join,
)
def test_a_snapshot_has_what_a_stream_has_brought(
    published: Any, publications: list[str], binary: bool
) -> None:
    """Types and Relations byte for byte, and the same rows."""
    slot = f"{published.name}_s"
    published.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    published.execute(*published.inserts)
    frames = peek(published, slot, ",".join(publications), binary=binary)
    streamed, relations = by_name(frames), announced(frames)
    with open_snapshot(published.dsn, publications, binary=binary) as snapshot:
        found = frames_by_table(snapshot)
        tables = {table.name: table for table in snapshot.tables}
        assert snapshot.lost == {}
    assert {name for name, inserts in found.items() if inserts} == set(streamed)
    assert ("childless" in found) == ("roots" in publications)
    for name, inserts in streamed.items():
        table = tables[name]
        assert table.announced == relations[table.relation_id]
        assert rows(table.announced, found[name]) == rows(table.announced, inserts)
        if binary:
            assert sorted(found[name]) == sorted(inserts)


def test_values_of_every_type(database: Any) -> None:
    """In both formats: the same columns and values as in a stream of the same format."""
    assert check_values(database) > 60
