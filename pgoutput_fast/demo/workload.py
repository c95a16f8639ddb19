"""The tables of the demo, and the SQL that changes them.

The server makes all values itself, with a seeded random(). So the same number of changes gives the
same tables, except the tables of pgbench, which runs at the same time.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PUBLICATION = SLOT = "demo"

TABLES = {
    "demo.accounts": "many small transactions, changed keys, reused keys",
    "demo.orders": "columns of mixed types, new columns during the run",
    "demo.wide": "forty types with edge cases, NULLs, large values",
    "demo.documents": "large TOASTed values in rows whose key changes",
    "demo.events": "no primary key, equal rows, REPLICA IDENTITY FULL",
    "demo.measurements": "partitioned, published as its root table",
    "demo.baskets": "truncated during the run",
    "public.pgbench_accounts": "updated by pgbench during the whole run",
    "public.pgbench_tellers": "few rows, updated very often",
    "public.pgbench_branches": "updated by each transaction of pgbench",
    "public.pgbench_history": "no primary key, only inserts",
}
"""The published tables, and the special property of each."""

# Name, type, and the expression for the value of row g. Each column also gets NULLs.
_WIDE = r"""
flag | bool | random() < 0.5
small | int2 | (ARRAY[32767, -32768, 7])[1 + g % 3]
number | int4 | (ARRAY[2147483647, -2147483648, 7])[1 + g % 3]
big | int8 | (ARRAY['9223372036854775807', '-9223372036854775808', '7'])[1 + g % 3]
object | oid | 4294967295 - g
full_transaction | xid8 | (ARRAY['18446744073709551615', '7'])[1 + g % 2]
real4 | float4 | (ARRAY['NaN', 'Infinity', '-0', '1e-45', '0.1'])[1 + g % 5]
real8 | float8 | (ARRAY['NaN', '-Infinity', '-0', '5e-324', '1e200'])[1 + g % 5]
amount | numeric(12,2) | random() * 1e9
widest | numeric(38,10) | repeat('9', 28) || '.9999999999'
exact | numeric | (ARRAY['NaN', 'Infinity', '1e-40', '1e60', '1.500', '0.00'])[1 + g % 6]
words | text | (ARRAY['', 'a "quote" and \ ', E'tab\tnew\nline\r\n', 'Ünï 🐘', '\N'])[1 + g % 5]
short | varchar(12) | left(md5(g::text), g % 13)
padded | char(5) | (ARRAY['ab', '', ' x '])[1 + g % 3]
byte | "char" | (ARRAY['a', '', '"'])[1 + g % 3]
bytes | bytea | decode(md5(g::text), 'hex')
day | date | (ARRAY['0001-01-01', '9999-12-31', '1600-02-29'])[1 + g % 3]
local | timestamp | timestamp '9999-12-31 23:59:59.999999' - g * interval '17 minutes'
at | timestamptz | (ARRAY['1970-01-01 00:00-12', '1890-06-01 12:00:00.5+00'])[1 + g % 2]
clock | time | (ARRAY['00:00', '23:59:59.999999'])[1 + g % 2]
zoned | timetz | (ARRAY['12:30:00.25+05:30', '24:00:00-15:59:59'])[1 + g % 2]
span | interval | (ARRAY['1 year -2 mons 3 days -04:05:06.000007', '0', '-1 mon'])[1 + g % 3]
uid | uuid | md5('w' || g)
as_written | json | (ARRAY['{"b": 1,  "a": [1,2,  3], "a": null}', '  1e400 '])[1 + g % 2]
document | jsonb | jsonb_build_object('n', g, 'x', random()::numeric(6,2), 'q', 'a "b" ü')
path_in_json | jsonpath | '$."a b"[*] ? (@ > ' || g || ')'
lexemes | tsvector | to_tsvector('english', 'the fat cats ate ' || g || ' rats')
query | tsquery | g || ':A & (!cat:* | fat <2> rat)'
position_in_log | pg_lsn | '16/' || to_hex(g)
cash | money | (random() * 1e6 - 5e5)::numeric
host | inet | '10.0.' || g % 256 || '.1/24'
mac | macaddr | lpad(to_hex(g), 12, '0')
spot | point | (ARRAY['(NaN,-0)', '(Infinity,1e-300)'])[1 + g % 2]
shape | polygon | polygon(box(point(g, 0), point(0, random())))
any_bits | varbit | (g % 512)::bit(9)
numbers | int4[] | ARRAY[g, NULL, -g]
texts | text[] | '{"",NULL,"NULL","a,b","q\"q","b\\s"," ü "}'
moments | timestamptz[] | ARRAY[timestamptz '2024-01-01 00:00+00' + g * interval '1 h', NULL]
mood | demo.mood | (enum_range(NULL::demo.mood))[1 + g % 4]
fee | demo.price | random() * 1e6
place | demo.place | ROW('quote " , ( \', ROW('NaN', '-0'), '{"a b",NULL}', 'glad, very', 1.5)
ints | int4range | (ARRAY['[1,5)', 'empty', '(,)'])[1 + g % 3]
many_ints | int4multirange | (ARRAY['{}', '{[1,3),[7,)}', '{(,)}'])[1 + g % 3]
large_text | text | repeat(md5('l' || g), CASE WHEN g % 4 = 0 THEN 100 ELSE 1 END)
"""
_COLUMNS = [line.split(" | ", 2) for line in _WIDE.strip().splitlines()]

SCHEMA = """
CREATE SCHEMA demo;
CREATE TABLE demo.accounts (id int PRIMARY KEY, branch int, balance numeric(14,2), filler text);
CREATE TABLE demo.orders (
    id bigint PRIMARY KEY, customer_id int, reference uuid, status text, total numeric(38,10),
    rate numeric, quantity bigint, weight float8, paid boolean, ordered_at timestamptz, due date,
    details jsonb, fingerprint bytea, comment text
);
CREATE TYPE demo.mood AS ENUM ('sad', 'so so', 'glad, very', 'o''k "x"');
CREATE DOMAIN demo.price AS numeric(10,2) CHECK (VALUE >= 0);
CREATE TYPE demo.spot AS (x float8, y float8);
CREATE TYPE demo.place AS (name text, at demo.spot, tags text[], mood demo.mood, fee demo.price);
CREATE TABLE demo.wide (id int PRIMARY KEY, {wide});
ALTER TABLE demo.wide ALTER large_text SET STORAGE EXTERNAL;
CREATE TABLE demo.documents (
    id int PRIMARY KEY, title text, body text, appendix text, revision int NOT NULL DEFAULT 1
);
ALTER TABLE demo.documents
    ALTER body SET STORAGE EXTERNAL, ALTER appendix SET STORAGE EXTERNAL;
CREATE TABLE demo.events (kind text, at timestamptz, amount float8, payload jsonb);
ALTER TABLE demo.events REPLICA IDENTITY FULL;
CREATE TABLE demo.measurements (
    sensor int, taken_at timestamptz, value float8, unit text, PRIMARY KEY (sensor, taken_at)
) PARTITION BY RANGE (taken_at);
CREATE TABLE demo.measurements_2024 PARTITION OF demo.measurements
    FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
-- A leaf with its columns in another order.
CREATE TABLE demo.measurements_2025 (
    unit text, value float8, taken_at timestamptz NOT NULL, sensor int NOT NULL
);
ALTER TABLE demo.measurements ATTACH PARTITION demo.measurements_2025
    FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
CREATE TABLE demo.baskets (id int PRIMARY KEY, owner text, items jsonb);
CREATE PUBLICATION demo FOR TABLE {tables} WITH (publish_via_partition_root = true);
SELECT setseed(0.5)
""".format(wide=", ".join(f"{name} {type_}" for name, type_, _ in _COLUMNS),
           tables=", ".join(TABLES))  # fmt: skip

_ORDERS = """
INSERT INTO demo.orders SELECT g, (random() * 1e6)::int, md5('r' || g)::uuid,
    (ARRAY['new', 'paid', 'sent', 'returned'])[1 + (random() * 3)::int],
    (random() * 1e9)::numeric(38,10), round((random() * 1000)::numeric, g % 9),
    (random() * 9e18)::bigint - 4500000000000000000,
    CASE WHEN g % 97 = 0 THEN 'NaN' WHEN g % 98 = 0 THEN '-Infinity' ELSE random() * 1e-5 END,
    random() < 0.5, timestamptz '2024-01-01 00:00:00+00' + random() * interval '2 years',
    date '1600-02-29' + (random() * 200000)::int,
    CASE WHEN g % 11 <> 0 THEN jsonb_build_object('n', g, 'name', 'Grüße "' || g || '"') END,
    decode(md5(g::text), 'hex'), (ARRAY[NULL, '', 'plain', E'tab\\tnew\\nline\\r\\n', ' padded ',
    'Ünïcødé 🐘 '])[1 + (random() * 5)::int] {more} FROM generate_series({first}, {last}) AS g"""

_EVENTS = """
INSERT INTO demo.events SELECT (ARRAY['click', 'view', 'buy', NULL, ''])[1 + g % 5],
    timestamptz '2024-05-01 00:00:00+00' + (g % 300) * interval '1 minute',
    (ARRAY[0, '-0', 1.5, 'NaN', NULL])[1 + g % 5]::float8,
    CASE WHEN g % 2 = 0 THEN jsonb_build_object('v', g % 10) END
    FROM generate_series(1, {rows}) AS g"""

_FIRST_ROWS = """
INSERT INTO demo.accounts SELECT g, g % 1000, (random() * 1e6)::numeric(14,2),
    CASE WHEN g % 10 <> 0 THEN repeat('·', g % 40) END FROM generate_series(1, {accounts}) AS g;
{orders};
{wide};
INSERT INTO demo.documents SELECT g, 'Document ' || g, repeat(md5('b' || g), 150 + g % 100),
    CASE WHEN g % 3 = 0 THEN repeat(md5('a' || g), 80) WHEN g % 3 = 1 THEN '' END
    FROM generate_series(1, {documents}) AS g;
{events};
INSERT INTO demo.measurements SELECT g % 50,
    timestamptz '2024-03-01 00:00:00+00' + g * interval '20 minutes 0.5 seconds', random() * 100,
    (ARRAY['K', '°C', NULL])[1 + g % 3]
    FROM generate_series(1, least({measurements}, 40000)) AS g;
INSERT INTO demo.baskets SELECT g, 'owner ' || g % 10, jsonb_build_array(g)
    FROM generate_series(1, {baskets}) AS g
"""

_SMALL_TRANSACTIONS = """
DO $$
    BEGIN
        FOR t IN 1 .. {transactions} LOOP
            UPDATE demo.accounts SET balance = balance + t, branch = (branch + t) % 1000
            WHERE id BETWEEN 1 + (t * 5) % {rows} AND 5 + (t * 5) % {rows};
            COMMIT;
        END LOOP;
    END $$
"""

_ROLLED_BACK = """
BEGIN;
INSERT INTO demo.accounts SELECT -g, 0, 0, 'never' FROM generate_series(1, 500) AS g;
TRUNCATE demo.orders;
ROLLBACK;
BEGIN;
UPDATE demo.accounts SET filler = 'before the savepoint' WHERE id % 200 = 1;
SAVEPOINT one;
DELETE FROM demo.accounts WHERE id % 3 = 0;
UPDATE demo.documents SET body = 'never', id = id + 5000000 WHERE id % 2 = 0;
ROLLBACK TO SAVEPOINT one;
UPDATE demo.accounts SET filler = filler || '!' WHERE id % 300 = 2;
COMMIT
"""

# The large values of documents do not change, so the server omits them, even if the key changes.
_KEYS_AND_TOAST = """
UPDATE demo.documents SET title = title || ' (2)', revision = 2 WHERE id % 2 = 0;
UPDATE demo.documents SET id = id + 1000000 WHERE id % 5 = 0;
UPDATE demo.documents SET id = id + 1000000, title = NULL WHERE id > 1000000;
UPDATE demo.documents SET id = id + 3000000, body = repeat(md5('new' || id), 120)
    WHERE id < 1000000 AND id % 7 = 0;
UPDATE demo.documents SET appendix = CASE WHEN id % 2 = 1 THEN repeat(md5('app' || id), 90) END
    WHERE id % 9 = 0;
DELETE FROM demo.documents WHERE id % 29 = 0;
UPDATE demo.wide SET flag = NOT flag WHERE id % 3 = 0;
UPDATE demo.wide SET id = -id, texts = texts || '{{more}}' WHERE id % 5 = 0;
UPDATE demo.wide SET place.name = 'moved', ints = '[7,9)' WHERE id % 7 = 0;
DELETE FROM demo.wide WHERE id % 13 = 0;
BEGIN;
UPDATE demo.documents SET id = -1 WHERE id = 1;
UPDATE demo.documents SET id = 1 WHERE id = 2;
UPDATE demo.documents SET id = 2 WHERE id = -1;
COMMIT;
UPDATE demo.accounts SET id = -id WHERE id <= {unit};
INSERT INTO demo.accounts SELECT g, 0, 0, 'in the place of another'
    FROM generate_series(1, {unit} / 2) AS g;
UPDATE demo.accounts SET id = id - 1000000 WHERE id < 0;
BEGIN;
DELETE FROM demo.accounts WHERE id = 7;
INSERT INTO demo.accounts VALUES (7, 7, 7, 'again');
COMMIT
"""

_TRUNCATE = """
TRUNCATE demo.baskets, demo.events;
{events};
BEGIN;
INSERT INTO demo.baskets SELECT g, 'second', NULL FROM generate_series(1, {baskets} / 3) AS g;
TRUNCATE demo.baskets;
INSERT INTO demo.baskets SELECT g, 'third', jsonb_build_object('basket', g)
    FROM generate_series(1, {baskets} / 3) AS g;
UPDATE demo.baskets SET id = -id WHERE id % 10 = 0;
COMMIT
"""

_NEW_COLUMNS = """
ALTER TABLE demo.orders ADD note text;
ALTER TABLE demo.orders ADD priority int NOT NULL DEFAULT 3,
    ADD checked_at timestamptz DEFAULT '2024-07-01 12:00:00.25+02';
ALTER TABLE demo.wide ADD added_array int[] DEFAULT '{1,NULL}',
    ADD added_mood demo.mood DEFAULT 'sad';
ALTER TABLE demo.events ADD origin text DEFAULT 'before', ADD extra int;
ALTER TABLE demo.measurements ADD quality numeric(5,2) DEFAULT 99.5
"""

# Some of several equal events are deleted. Some measurements move to another partition.
_BACKLOG = """
UPDATE public.pgbench_accounts SET abalance = abalance + 1;
{orders};
UPDATE demo.orders SET status = 'sent', note = 'sent' WHERE id % 3 = 0;
UPDATE demo.orders SET details = details || '{{"vip": true}}' WHERE id % 20 = 1;
DELETE FROM demo.orders WHERE id % 10 = 9;
UPDATE demo.documents SET id = id + 10000000 WHERE id % 11 = 0;
{wide};
UPDATE demo.wide SET added_array = NULL, added_mood = 'glad, very' WHERE id % 11 = 0;
DELETE FROM demo.events WHERE ctid IN
    (SELECT ctid FROM demo.events WHERE kind = 'click' ORDER BY ctid LIMIT {unit});
UPDATE demo.events SET amount = 2.5 WHERE ctid IN
    (SELECT ctid FROM demo.events WHERE kind = 'view' ORDER BY ctid LIMIT {unit});
UPDATE demo.measurements SET value = -value WHERE sensor % 4 = 0;
UPDATE demo.measurements SET taken_at = taken_at + interval '1 year'
    WHERE taken_at < '2024-04-01' AND sensor % 5 = 0;
DELETE FROM demo.measurements WHERE sensor = 13;
UPDATE demo.accounts SET balance = balance * 1.01, filler = left(filler, 5) WHERE id % 5 < 2;
DELETE FROM demo.accounts WHERE id % 12 = 5
"""


class WorkloadStep(NamedTuple):
    """One step of the demo, with its SQL."""

    title: str
    sql: str

    def statements(self) -> list[str]:
        """Return the statements; each begins a line, and its further lines are indented."""
        return re.split(r";\n(?=\S)", self.sql.strip())


def _wide_rows(first: int, last: int, more: str = "") -> str:
    values = ", ".join(
        f"CASE WHEN (g + {n}) % 23 <> 0 THEN ({value})::{type_} END"
        for n, (_, type_, value) in enumerate(_COLUMNS)
    )
    return (
        f"INSERT INTO demo.wide SELECT g, {values}{more} FROM generate_series({first}, {last}) AS g"
    )


class Workload:
    """The SQL of a run.

    Parameters
    ----------
    changes : int
        The approximate number of changes to the demo's own tables, at least 5,000.

    Attributes
    ----------
    first : list of WorkloadStep
        Makes the rows that are there before the sync starts. They come with the snapshot.
    live : list of WorkloadStep
        Makes changes while the sync runs, among them a truncate and new columns.
    backlog : WorkloadStep
        Makes changes while no sync runs; they include all rows of pgbench's largest table.
    scale : int
        The scale of pgbench; 1 stands for 100,000 accounts.
    """

    def __init__(self, changes: int) -> None:
        unit = max(changes, 5000) // 100 + 1
        orders, wide = 14 * unit, max(unit // 4, 50)
        sizes = {
            "unit": unit, "accounts": 32 * unit, "documents": 2 * unit, "measurements": 4 * unit,
            "baskets": 3 * unit,
        }  # fmt: skip
        self.scale = max(1, changes // 100_000)
        self.first = [
            WorkloadStep("tables", SCHEMA),
            WorkloadStep("first rows", _FIRST_ROWS.format(
                orders=_ORDERS.format(first=1, last=orders // 2, more="").strip(),
                wide=_wide_rows(1, wide), events=_EVENTS.format(rows=2 * unit).strip(), **sizes,
            )),
        ]  # fmt: skip
        self.live = [
            WorkloadStep("small transactions", _SMALL_TRANSACTIONS.format(
                transactions=2 * unit, rows=32 * unit - 5,
            )),
            WorkloadStep("rolled back", _ROLLED_BACK),
            WorkloadStep("keys and TOAST", _KEYS_AND_TOAST.format(**sizes)),
            WorkloadStep("truncate", _TRUNCATE.format(
                events=_EVENTS.format(rows=8 * unit).strip(), **sizes,
            )),
            WorkloadStep("new columns", _NEW_COLUMNS),
        ]  # fmt: skip
        added = ", CASE WHEN g % 2 = 0 THEN 'note ' || g END, g % 5, NULL"
        self.backlog = WorkloadStep("backlog", _BACKLOG.format(
            orders=_ORDERS.format(first=orders // 2 + 1, last=orders, more=added).strip(),
            wide=_wide_rows(wide + 1, wide + wide // 2, ", NULL, 'so so'"), **sizes,
        ))  # fmt: skip
