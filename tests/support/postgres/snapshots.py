"""Tables of all kinds that a stream announces, and what a snapshot and a stream say of them."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pgoutput_fast as pf

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pgoutput_fast.replication.snapshot import ServerSnapshot

__all__ = ["SCHEMA", "SINCE", "announced", "by_name", "frames_by_table", "peek", "rows"]

SCHEMA = (
    'CREATE SCHEMA "Odd ""schema"',
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TYPE pair AS (a int, b mood)",
    "CREATE DOMAIN price AS numeric(10,2)",
    'CREATE DOMAIN "Odd ""schema"."Cheap" AS price',
    'CREATE DOMAIN "Odd ""schema".moods AS mood[]',
    """CREATE TABLE "Odd ""schema"."Table 'x' %s" ("Id ""x" int PRIMARY KEY, "%s" varchar(7),
        c "Odd ""schema"."Cheap", m mood, ms mood[], p pair, d "Odd ""schema".moods,
        n numeric(12,3), t timestamptz(2), m2 mood)""",
    """INSERT INTO "Odd ""schema"."Table 'x' %%s" VALUES (1, 'a', 2.5, 'ok', '{sad,ok}', '(1,ok)',
        '{ok}', 1.5, '2001-02-03 04:05:06.78Z', NULL), (2, NULL, NULL, NULL, NULL, '(,)', NULL,
        NULL, NULL, 'sad')""".replace("%%", "%"),
    "CREATE TABLE whole (gone int, id int PRIMARY KEY, v text)",
    "ALTER TABLE whole DROP gone",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    "INSERT INTO whole VALUES (1, 'one')",
    "CREATE TABLE nothing (id int PRIMARY KEY, v text)",
    "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
    "INSERT INTO nothing VALUES (1, 'one')",
    "CREATE TABLE indexed (k int NOT NULL, l int NOT NULL, v text, id int PRIMARY KEY)",
    "CREATE UNIQUE INDEX indexed_k ON indexed (l, k) INCLUDE (v)",
    "ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_k",
    "INSERT INTO indexed VALUES (1, 2, 'x', 3)",
    "CREATE TABLE keyless (v text)",
    "INSERT INTO keyless VALUES ('a'), ('a'), (NULL)",
    "CREATE TABLE late (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, u int)",
    "CREATE UNIQUE INDEX late_part ON late (u) WHERE u > 0",
    "INSERT INTO late VALUES (1, 2)",
    "CREATE TABLE heir (extra int) INHERITS (whole)",
    "INSERT INTO heir VALUES (7, 'child', 8)",
    "CREATE TABLE made (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED, c int)",
    "INSERT INTO made (a, c) VALUES (1, 5)",
    "CREATE TABLE bare ()",
    "INSERT INTO bare DEFAULT VALUES",
    # The text of these depends on the session: its search_path, and its lc_monetary.
    "CREATE TABLE odd (id int PRIMARY KEY, r regclass, rs regclass[], m money, a aclitem)",
    (
        "INSERT INTO odd VALUES (1, 'whole', '{whole,pg_class}', 12.5, NULL),"
        " (2, NULL, '{}', NULL, '=r/postgres')"
    ),
    "CREATE UNLOGGED TABLE unlogged (id int)",
    # Partitions whose columns have another order and other numbers, some of them dropped.
    "CREATE TABLE root (id int, v text, p price, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
    "CREATE TABLE leaf_a PARTITION OF root FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE middle (p price, x int, id int NOT NULL, v text) PARTITION BY RANGE (id)",
    "ALTER TABLE middle DROP x",
    "ALTER TABLE root ATTACH PARTITION middle FOR VALUES FROM (100) TO (300)",
    "CREATE TABLE leaf_b (y text, v text, z int, id int NOT NULL, p price)",
    "ALTER TABLE leaf_b DROP y, DROP z",
    "ALTER TABLE middle ATTACH PARTITION leaf_b FOR VALUES FROM (100) TO (200)",
    "CREATE TABLE leaf_c PARTITION OF middle FOR VALUES FROM (200) TO (300)",
    "INSERT INTO root VALUES (1, 'a', 1.25), (101, 'b', NULL), (201, NULL, 3.5), (102, 'bb', 4)",
    "CREATE TABLE childless (id int, v text) PARTITION BY LIST (id)",
)
"""Tables of which every server version knows all."""

SINCE = {
    15: (
        "CREATE TABLE listed (a int PRIMARY KEY, b text, c mood, d int)",
        "INSERT INTO listed VALUES (1, 'not sent', 'ok', 4), (2, 'not sent', NULL, 5)",
        'CREATE TABLE filtered (id int PRIMARY KEY, "V ""v" text, t text)',
        "INSERT INTO filtered VALUES (1, 'a', 'b'), (2, 'b', 'b'), (3, 'c', 'c'), (4, NULL, 'd')",
    ),
    18: (
        (
            "CREATE TABLE made_too (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 3) STORED,"
            " v int GENERATED ALWAYS AS (a * 4) VIRTUAL, c text)"
        ),
        "INSERT INTO made_too (a, c) VALUES (1, 'c')",
    ),
}
"""More tables, by the version from which on they can be published in a special way."""


def rows(announced: Iterable[bytes], frames: Iterable[bytes]) -> list[tuple[Any, ...]]:
    """The values of Insert frames, in any order."""
    decoder = pf.Decoder()
    for frame in announced:
        decoder.decode(frame)
    found = [decoder.decode(frame).new.values() for frame in frames]
    return sorted(found, key=repr)


def frames_by_table(snapshot: ServerSnapshot) -> dict[str, list[bytes]]:
    """The Insert frames of each table, by name; those without rows too."""
    found: dict[str, list[bytes]] = {}
    ended: list[str] = []
    lock = threading.Lock()

    def take(part: Any, frames: Any) -> None:
        for made in frames:
            ends = made.offsets.tolist()
            cut = [made.data[a:b] for a, b in itertools.pairwise(ends)]
            with lock:
                assert part.table.name not in ended
                found.setdefault(part.table.name, []).extend(cut)

    def finished(table: Any) -> None:
        with lock:
            ended.append(table.name)
            found.setdefault(table.name, [])

    snapshot.copy(take, finished)
    assert sorted(ended) == sorted(table.name for table in snapshot.tables)
    return found


def peek(database: Any, slot: str, publications: str, *, binary: bool = False) -> list[bytes]:
    """What a slot brings, which it brings again."""
    found = database.execute(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL,"
        f" 'proto_version', '1', 'publication_names', '{publications}', 'binary', '{binary}')"
    )
    return [row[0] for row in found]


def announced(frames: Iterable[bytes]) -> dict[int, tuple[bytes, ...]]:
    """The Types and the Relation of each table, as they came first."""
    found: dict[int, tuple[bytes, ...]] = {}
    types: list[bytes] = []
    decoder = pf.Decoder()
    for frame in frames:
        if frame[:1] == b"Y":
            types.append(frame)
        elif frame[:1] == b"R":
            relation = decoder.decode(frame)
            found.setdefault(relation.relation_id, (*types, frame))
            types = []
    return found


def by_name(frames: Iterable[bytes]) -> dict[str, list[bytes]]:
    """The Insert frames by the names of their tables."""
    decoder = pf.Decoder()
    found: dict[str, list[bytes]] = defaultdict(list)
    for frame in frames:
        message = decoder.decode(frame)
        if frame[:1] == b"I":
            found[message.relation.name].append(frame)
    return found
