"""What is done to tables while a sync follows them."""

from __future__ import annotations

__all__ = ["EVOLVED", "MADE", "REUSED"]

MADE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(6, 2), d varchar(5))",
    "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
    "INSERT INTO t SELECT g, repeat(g::text, 3000), g, g FROM generate_series(1, 50) g",
)
"""The table, of 50 rows."""

_ADDED = "ALTER TABLE t ADD c int DEFAULT"
REUSED = (
    "ALTER TABLE t DROP v; ALTER TABLE t ADD v text",
    "ALTER TABLE t DROP d; ALTER TABLE t ADD d varchar(5)",
    "ALTER TABLE t RENAME d TO e; ALTER TABLE t ADD d varchar(5) DEFAULT 'q'",
    "ALTER TABLE t RENAME v TO x; ALTER TABLE t RENAME d TO v; ALTER TABLE t RENAME x TO d",
    "ALTER TABLE t DROP COLUMN n; ALTER TABLE t ADD n int DEFAULT 3",
    f"{_ADDED} 5; INSERT INTO t (id) VALUES (201); ALTER TABLE t DROP c; {_ADDED} 7",
)
"""Another column gets a name that there was, among changes of which none tells it."""

EVOLVED = (
    # Statements before further changes, and the columns that are there then.
    ("ALTER TABLE t ADD c int DEFAULT 5", "id, v, n, d, c"),
    ("ALTER TABLE t ADD c int", "id, v, n, d, c"),
    ("ALTER TABLE t DROP COLUMN n", "id, v, d"),
    ("ALTER TABLE t RENAME v TO w", "id, w, n, d"),
    ("ALTER TABLE t ALTER d TYPE varchar(9)", "id, v, n, d"),
    ("ALTER TABLE t ALTER n TYPE numeric(9, 2)", "id, v, n, d"),
    ('ALTER TABLE t ADD "ID" text DEFAULT \'q"\'', 'id, v, n, d'),
    ("ALTER TABLE t RENAME TO t2", "id, v, n, d"),
    ("ALTER TABLE t ADD c int GENERATED ALWAYS AS IDENTITY", None),
    ("ALTER TABLE t ADD c float8 DEFAULT random()", None),
    ("ALTER TABLE t ALTER n TYPE text USING n::int::text || '!'", None),
    ("ALTER TABLE t ALTER id TYPE bigint USING id * 10", None),
    ("ALTER TABLE t ADD c int DEFAULT 5; VACUUM FULL t; ALTER TABLE t ALTER c DROP DEFAULT", None),
)  # fmt: skip
