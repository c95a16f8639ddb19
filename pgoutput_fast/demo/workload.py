"""What the demonstration does to its server: tables, and a great many changes.

Everything is made by the server itself, in SQL, with random() seeded: the same seed and number of
changes leave the same tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PUBLICATION = "demo"
SLOT = "demo"


class Table(NamedTuple):
    """One published table, and what is special about it."""

    name: str
    about: str


TABLES = (
    Table("demo.accounts", "many small transactions, keys swapped and moved on"),
    Table("demo.orders", "30 columns of mixed types, more are added on the way"),
    Table("demo.documents", "large TOASTed values, a key that may be TOASTed too"),
    Table("demo.events", "REPLICA IDENTITY FULL without a key: a multiset"),
    Table("demo.measurements", "partitioned, published by its root"),
    Table("demo.baskets", "truncated"),
)

SCHEMA = """
CREATE SCHEMA demo;

CREATE TABLE demo.accounts (
    id int PRIMARY KEY,
    branch int NOT NULL,
    balance numeric(14,2) NOT NULL,
    filler text
);

CREATE TABLE demo.orders (
    id bigint PRIMARY KEY,
    customer_id int NOT NULL,
    store_id smallint,
    reference uuid NOT NULL,
    external_id uuid,
    status text NOT NULL,
    channel varchar(12),
    currency char(5),
    subtotal numeric(12,2) NOT NULL,
    tax numeric(12,2),
    discount numeric(5,4),
    total numeric(38,10),
    exact_rate numeric,
    quantity int,
    reserved bigint,
    weight double precision,
    score real,
    paid boolean NOT NULL,
    gift boolean,
    ordered_at timestamptz NOT NULL,
    shipped_at timestamptz,
    noted_at timestamp,
    due date,
    pickup time,
    details jsonb,
    raw json,
    fingerprint bytea,
    source inet,
    region oid,
    comment text
);

CREATE TABLE demo.documents (
    id int,
    path text,
    title text,
    body text,
    appendix text,
    revision int NOT NULL DEFAULT 1,
    PRIMARY KEY (id, path)
);
ALTER TABLE demo.documents
    ALTER path SET STORAGE EXTERNAL,
    ALTER body SET STORAGE EXTERNAL,
    ALTER appendix SET STORAGE EXTERNAL;

CREATE TABLE demo.events (
    kind text,
    at timestamptz,
    amount double precision,
    payload jsonb
);
ALTER TABLE demo.events REPLICA IDENTITY FULL;

CREATE TABLE demo.measurements (
    sensor int,
    taken_at timestamptz,
    value double precision,
    unit text,
    PRIMARY KEY (sensor, taken_at)
) PARTITION BY RANGE (taken_at);
CREATE TABLE demo.measurements_2024 PARTITION OF demo.measurements
    FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
-- A leaf with its columns in another order.
CREATE TABLE demo.measurements_2025 (
    unit text, value double precision, taken_at timestamptz NOT NULL, sensor int NOT NULL
);
ALTER TABLE demo.measurements ATTACH PARTITION demo.measurements_2025
    FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');

CREATE TABLE demo.baskets (
    id int PRIMARY KEY,
    owner text,
    items jsonb
);

CREATE PUBLICATION demo FOR TABLE
    demo.accounts, demo.orders, demo.documents, demo.events, demo.measurements, demo.baskets
    WITH (publish_via_partition_root = true);
"""

# A value now and then is NULL, empty, or hard on whoever splits lines and fields.
_ORDERS = """
INSERT INTO demo.orders
SELECT g,
    (random() * 1e6)::int,
    (random() * 100)::smallint,
    md5({seed} || 'r' || g)::uuid,
    CASE WHEN g % 20 <> 0 THEN md5({seed} || 'x' || g)::uuid END,
    (ARRAY['new', 'paid', 'packed', 'sent', 'returned'])[1 + (random() * 4)::int],
    CASE WHEN g % 7 <> 0 THEN (ARRAY['web', 'phone', 'shop', ''])[1 + (random() * 3)::int] END,
    (ARRAY['EUR', 'USD', 'JPY', 'X'])[1 + (random() * 3)::int],
    (random() * 1e6)::numeric(12,2),
    (random() * -1e5)::numeric(12,2),
    random()::numeric(5,4),
    CASE WHEN g % 500 = 0 THEN 9999999999999999999999999999.9999999999
        ELSE (random() * 1e9)::numeric(38,10) END,
    CASE WHEN g % 300 = 0 THEN 'NaN' WHEN g % 301 = 0 THEN 1e-40
        ELSE round((random() * 1000)::numeric, g % 9) END,
    (random() * 2147483647)::int - 1000000000,
    (random() * 9e18)::bigint - 4500000000000000000,
    CASE WHEN g % 97 = 0 THEN 'NaN' WHEN g % 98 = 0 THEN '-Infinity' WHEN g % 99 = 0 THEN '-0'
        ELSE random() * 1e-5 END,
    (random() * 1e30)::real,
    random() < 0.5,
    CASE WHEN g % 3 <> 0 THEN random() < 0.1 END,
    timestamptz '2024-01-01 00:00:00+00' + random() * interval '2 years',
    CASE WHEN g % 4 <> 0 THEN timestamptz '1890-06-01 12:00:00.5+00' + g * interval '1 hour' END,
    timestamp '2024-02-29 23:59:59.999999' - g * interval '17 minutes 0.000001 seconds',
    date '1600-02-29' + (random() * 200000)::int,
    time '00:00' + random() * interval '23 hours',
    CASE WHEN g % 11 <> 0 THEN jsonb_build_object('n', g, 'tags', jsonb_build_array('a', g % 5),
        'price', (random() * 100)::numeric(6,2), 'name', 'Grüße "' || g || '"') END,
    CASE WHEN g % 13 <> 0 THEN ('{{"b": ' || g || ',  "a": [1,2,  3]}}')::json END,
    CASE WHEN g % 50 = 0 THEN ''::bytea ELSE decode(md5(g::text), 'hex') END,
    ('10.' || g % 256 || '.' || g % 7 || '.0/24')::cidr::inet,
    4294967295 - g % 5,
    (ARRAY[NULL, '', 'plain', 'quote " and '' and \\ ', E'tab\\tnew\\nline\\r\\n', 'Ünïcødé 🐘 ',
        '\\N', ' padded ', ','])[1 + (random() * 8)::int]
    {added}
FROM generate_series({first}, {last}) AS g
"""

_DOCUMENTS = """
INSERT INTO demo.documents
SELECT g,
    CASE WHEN g % 40 = 0 THEN repeat(md5('p' || g), 70) ELSE '/docs/' || g END,
    'Document ' || g,
    repeat(md5({seed} || 'b' || g), 150 + g % 100),
    CASE WHEN g % 3 = 0 THEN repeat(md5({seed} || 'a' || g), 80) WHEN g % 3 = 1 THEN '' END
FROM generate_series({first}, {last}) AS g
"""

_EVENTS = """
INSERT INTO demo.events (kind, at, amount, payload)
SELECT (ARRAY['click', 'view', 'buy', NULL, ''])[1 + g % 5],
    timestamptz '2024-05-01 00:00:00+00' + (g % 300) * interval '1 minute',
    (ARRAY[0, '-0', 1.5, 'NaN', NULL])[1 + g % 5]::float8,
    CASE WHEN g % 2 = 0 THEN jsonb_build_object('v', g % 10) END
FROM generate_series(1, {rows}) AS g
"""

_MEASUREMENTS = """
INSERT INTO demo.measurements (sensor, taken_at, value, unit)
SELECT g % 50, timestamptz '2024-03-01 00:00:00+00' + g * interval '20 minutes 0.5 seconds',
    random() * 100, (ARRAY['K', '°C', NULL])[1 + g % 3]
FROM generate_series({first}, {last}) AS g
WHERE g * interval '20 minutes 0.5 seconds' < interval '600 days'
"""

# Transactions of five rows each, as applications make them.
_SMALL_TRANSACTIONS = """
DO $$
BEGIN
    FOR t IN 1 .. {transactions} LOOP
        UPDATE demo.accounts SET balance = balance + t, branch = (branch + t) % 1000
        WHERE id BETWEEN {first} + (t * 5) % {rows} AND {first} + (t * 5) % {rows} + 4;
        COMMIT;
    END LOOP;
END $$
"""

# Subtransactions, one in three rolled back.
_SUBTRANSACTIONS = """
DO $$
BEGIN
    FOR t IN 1 .. 60 LOOP
        BEGIN
            UPDATE demo.accounts SET filler = 'kept ' || t WHERE id % 500 = t;
            INSERT INTO demo.baskets VALUES (900000 + t, 'kept', NULL);
            IF t % 3 = 0 THEN
                DELETE FROM demo.accounts WHERE id % 100 = t;
                RAISE EXCEPTION 'taken back';
            END IF;
        EXCEPTION WHEN raise_exception THEN
            UPDATE demo.accounts SET filler = 'after taking back ' || t WHERE id % 700 = t;
        END;
    END LOOP;
END $$
"""


class Step(NamedTuple):
    """Statements that the demonstration runs, each one on its own (autocommit)."""

    title: str
    statements: tuple[str, ...]


def steps(changes: int, seed: int) -> Iterator[Step]:
    """The workload.

    Parameters
    ----------
    changes : int
        How many changes there are to be, at least; 5,000 is the least that it can make.
    seed : int
        Of random(), and of what is not random.
    """
    unit = max(changes, 5000) // 100 + 1
    accounts, orders, documents, events = 32 * unit, 14 * unit, 2 * unit, 8 * unit
    measurements, baskets = 4 * unit, 3 * unit
    yield Step("seed", (f"SELECT setseed({(seed % 2001 - 1000) / 1000})",))
    yield Step(
        "first rows",
        (
            (
                "INSERT INTO demo.accounts SELECT g, g % 1000, (random() * 1e6)::numeric(14,2), "
                "CASE WHEN g % 10 = 0 THEN NULL ELSE repeat('·', g % 40) END "
                f"FROM generate_series(1, {accounts}) AS g"
            ),
            _ORDERS.format(first=1, last=orders // 2, seed=seed, added=""),
            _DOCUMENTS.format(first=1, last=documents, seed=seed),
            _EVENTS.format(rows=events // 4),
            _MEASUREMENTS.format(first=1, last=measurements),
            (
                "INSERT INTO demo.baskets SELECT g, 'owner ' || g % 10, jsonb_build_array(g) "
                f"FROM generate_series(1, {baskets}) AS g"
            ),
        ),
    )
    yield Step(
        "small transactions",
        (_SMALL_TRANSACTIONS.format(transactions=2 * unit, first=1, rows=accounts - 5),),
    )
    yield Step(
        "rolled back",
        (
            "BEGIN",
            "INSERT INTO demo.accounts SELECT -g, 0, 0, 'never' FROM generate_series(1, 500) AS g",
            "TRUNCATE demo.orders",
            "ROLLBACK",
            "BEGIN",
            "UPDATE demo.accounts SET filler = 'before the savepoint' WHERE id % 200 = 1",
            "SAVEPOINT one",
            "DELETE FROM demo.accounts WHERE id % 3 = 0",
            "SAVEPOINT two",
            "UPDATE demo.documents SET body = 'never', id = id + 5000000 WHERE id % 2 = 0",
            "ROLLBACK TO SAVEPOINT one",
            "UPDATE demo.accounts SET filler = filler || '!' WHERE id % 300 = 2",
            "RELEASE SAVEPOINT one",
            "COMMIT",
            _SUBTRANSACTIONS,
        ),
    )
    yield Step(
        "keys and TOAST",
        (
            # The large values stay as they are: they are not sent.
            "UPDATE demo.documents SET title = title || ' (2)', revision = 2 WHERE id % 2 = 0",
            # The same with another key, and again with yet another one.
            "UPDATE demo.documents SET id = id + 1000000 WHERE id % 5 = 0",
            "UPDATE demo.documents SET id = id + 1000000, title = NULL WHERE id > 1000000",
            (
                "UPDATE demo.documents SET id = id - 500000, path = '/moved/' || id "
                "WHERE id > 2000000 AND id % 3 = 0"
            ),
            # Key and large value at once, the other large value stays.
            (
                "UPDATE demo.documents SET id = id + 3000000, "
                "body = repeat(md5('new' || id), 120) WHERE id < 1000000 AND id % 7 = 0"
            ),
            (
                "UPDATE demo.documents SET appendix = CASE WHEN id % 2 = 0 THEN NULL "
                "ELSE repeat(md5('app' || id), 90) END WHERE id % 9 = 0"
            ),
            "DELETE FROM demo.documents WHERE id % 29 = 0",
            # Two rows swap their keys, and a new row comes under a key that another one has left.
            "BEGIN",
            "UPDATE demo.documents SET id = -1 WHERE id = 1",
            "UPDATE demo.documents SET id = 1, path = '/docs/1' WHERE id = 2",
            "UPDATE demo.documents SET id = 2, path = '/docs/2' WHERE id = -1",
            "COMMIT",
            "UPDATE demo.documents SET id = -3 WHERE id = 3",
            "INSERT INTO demo.documents VALUES (3, '/docs/3', 'another', repeat('short ', 3), '')",
            f"UPDATE demo.accounts SET id = -id WHERE id <= {unit}",
            (
                "INSERT INTO demo.accounts "
                "SELECT g, 0, 0, 'in the place of another' "
                f"FROM generate_series(1, {unit // 2}) AS g"
            ),
            "UPDATE demo.accounts SET id = id - 1000000 WHERE id < 0",
            f"DELETE FROM demo.accounts WHERE id < {-1000000 - unit // 2}",
            # Deleted, and made again in the same transaction.
            "BEGIN",
            "DELETE FROM demo.accounts WHERE id = 7",
            "INSERT INTO demo.accounts VALUES (7, 7, 7, 'again')",
            "COMMIT",
        ),
    )
    yield Step(
        "truncate",
        (
            "TRUNCATE demo.baskets, demo.events",
            _EVENTS.format(rows=events),
            (
                "INSERT INTO demo.baskets SELECT g, 'second', NULL "
                f"FROM generate_series(1, {baskets // 3}) AS g"
            ),
            "BEGIN",
            "UPDATE demo.baskets SET owner = 'gone soon'",
            "TRUNCATE demo.baskets",
            (
                "INSERT INTO demo.baskets SELECT g, 'third', jsonb_build_object('basket', g) "
                f"FROM generate_series(1, {baskets // 3}) AS g"
            ),
            "UPDATE demo.baskets SET id = -id WHERE id % 10 = 0",
            "COMMIT",
        ),
    )
    yield Step(
        "new columns",
        (
            "ALTER TABLE demo.orders ADD note text",
            (
                "ALTER TABLE demo.orders ADD priority int NOT NULL DEFAULT 3, "
                "ADD checked_at timestamptz DEFAULT '2024-07-01 12:00:00.25+02', "
                "ADD rate numeric(6,3) DEFAULT 1.5, "
                "ADD label text DEFAULT 'a ''quoted'', {braced} \\'"
            ),
            "ALTER TABLE demo.documents ADD language text DEFAULT 'en', ADD reviewer text",
            "ALTER TABLE demo.events ADD origin text DEFAULT 'before', ADD extra int",
            "ALTER TABLE demo.measurements ADD quality numeric(5,2) DEFAULT 99.5, ADD flag boolean",
        ),
    )
    yield Step(
        "second rows",
        (
            _ORDERS.format(
                first=orders // 2 + 1,
                last=orders,
                seed=seed,
                added=", CASE WHEN g % 2 = 0 THEN 'note ' || g END, g % 5, NULL, g % 1000 / 7.0",
            ),
            # Some rows have been written since, so that the new columns' values were sent.
            (
                "UPDATE demo.orders SET status = 'sent', shipped_at = '2025-06-01 08:00+00', "
                "note = 'sent' WHERE id % 3 = 0"
            ),
            "UPDATE demo.orders SET details = details || '{\"vip\": true}' WHERE id % 20 = 1",
            "DELETE FROM demo.orders WHERE id % 10 = 9",
            "UPDATE demo.documents SET reviewer = 'someone' WHERE id % 4 = 0",
            "UPDATE demo.documents SET id = id + 10000000 WHERE id % 11 = 0",
            # Of rows that are alike some go and some stay.
            (
                "DELETE FROM demo.events WHERE ctid IN "
                f"(SELECT ctid FROM demo.events WHERE kind = 'click' ORDER BY ctid LIMIT {unit})"
            ),
            (
                "UPDATE demo.events SET amount = 2.5 WHERE ctid IN "
                f"(SELECT ctid FROM demo.events WHERE kind = 'view' ORDER BY ctid LIMIT {unit})"
            ),
            (
                "INSERT INTO demo.events SELECT kind, at, amount, payload, NULL, 1 "
                f"FROM demo.events ORDER BY ctid LIMIT {unit}"
            ),
            "UPDATE demo.measurements SET value = -value WHERE sensor % 4 = 0",
            # From one partition to the other.
            (
                "UPDATE demo.measurements SET taken_at = taken_at + interval '1 year' "
                "WHERE taken_at < '2024-04-01' AND sensor % 5 = 0"
            ),
            "DELETE FROM demo.measurements WHERE sensor = 13",
            (
                "INSERT INTO demo.measurements "
                "SELECT sensor + 100, taken_at, value, unit, 50, true "
                "FROM demo.measurements WHERE sensor < 10"
            ),
            (
                "UPDATE demo.accounts SET balance = balance * 1.01, filler = left(filler, 5) "
                "WHERE id % 5 < 2"
            ),
            "DELETE FROM demo.accounts WHERE id % 12 = 5",
        ),
    )
