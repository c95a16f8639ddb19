"""The demonstration's tables, and the SQL that changes them.

The server makes all values itself, with a seeded random(): the same seed and number of changes
give the same tables, but for those of pgbench, which runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PUBLICATION = "demo"
SLOT = "demo"


PGBENCH = "ALTER PUBLICATION demo ADD TABLE " + ", ".join(
    f"public.pgbench_{name}" for name in ("accounts", "tellers", "branches", "history")
)
"""Has the tables published that ``pgbench -i`` has made."""


class Table(NamedTuple):
    """One published table, and what is special about it."""

    name: str
    about: str


TABLES = (
    Table("demo.accounts", "many small transactions, keys swapped and moved on"),
    Table("demo.orders", "30 columns of mixed types, more are added on the way"),
    Table("demo.wide", "a column of each family of types, their edge cases, NULLs, large values"),
    Table("demo.documents", "large TOASTed values, a key that may be TOASTed too"),
    Table("demo.events", "REPLICA IDENTITY FULL without a key: a multiset"),
    Table("demo.measurements", "partitioned, published by its root"),
    Table("demo.baskets", "truncated"),
    Table("public.pgbench_accounts", "pgbench runs all the time"),
    Table("public.pgbench_tellers", "few rows, changed again and again"),
    Table("public.pgbench_branches", "a row that each transaction changes"),
    Table("public.pgbench_history", "without a key: rows are added only"),
)


class Wide(NamedTuple):
    """A column of ``demo.wide``, and the expression that makes the value of row `g`."""

    name: str
    type: str
    value: str


def _choice(*values: str) -> str:
    """An expression that gives one of some expressions after the other, row by row."""
    whens = " ".join(f"WHEN {n} THEN {value}" for n, value in enumerate(values[1:], 1))
    return f"CASE g % {len(values)} {whens} ELSE {values[0]} END"


WIDE = (
    Wide("flag", "bool", "random() < 0.5"),
    Wide("small", "int2", _choice("32767", "-32768", "(random() * 30000)::int")),
    Wide("number", "int4", _choice("2147483647", "-2147483648", "(random() * 1e9)::int")),
    Wide(
        "big",
        "int8",
        _choice("9223372036854775807", "-9223372036854775808", "(random() * 9e18)::int8"),
    ),
    Wide("object", "oid", "4294967295 - g"),
    Wide("transaction", "xid", "(4294967295 - g)::text::xid"),
    Wide("command", "cid", "g::text::cid"),
    Wide("full_transaction", "xid8", _choice("'18446744073709551615'::xid8", "g::text::xid8")),
    Wide(
        "real4",
        "float4",
        _choice("'NaN'", "'Infinity'", "'-Infinity'", "'-0'", "'1e-45'", "random()::float4"),
    ),
    Wide(
        "real8",
        "float8",
        _choice("'NaN'", "'Infinity'", "'-Infinity'", "'-0'", "'5e-324'", "random() * 1e200"),
    ),
    Wide("amount", "numeric(12,2)", "random() * 1e9"),
    Wide("thousands", "numeric(6,-3)", "random() * 1e8"),
    Wide("tiny", "numeric(3,6)", "random() * 9e-4"),
    Wide(
        "widest",
        "numeric(38,10)",
        _choice("(repeat('9', 28) || '.9999999999')::numeric", "-random()::numeric"),
    ),
    Wide("wider_still", "numeric(60,20)", "repeat('7', 40)::numeric + random()::numeric"),
    Wide(
        "exact",
        "numeric",
        _choice("'NaN'", "'Infinity'", "'-Infinity'", "1e-40", "1e60 + g", "1.500", "0.00", "-g"),
    ),
    Wide(
        "words",
        "text",
        _choice(
            "''",
            "'plain'",
            "'quote \" and '' and \\ '",
            "E'tab\\tnew\\nline\\r\\n'",
            "'Ünï 🐘'",
            "'\\N'",
        ),
    ),
    Wide("short", "varchar(12)", "left(md5(g::text), g % 13)"),
    Wide("padded", "char(5)", _choice("'ab'", "''", "' x '")),
    Wide("called", "name", "'name ' || g"),
    Wide("byte", '"char"', _choice("'a'", "''", "'\\200'", "'\"'")),
    Wide("bytes", "bytea", _choice("''", "decode(md5(g::text), 'hex')", "'\\x00ff'")),
    Wide("day", "date", _choice("'0001-01-01'", "'9999-12-31'", "date '1600-02-29' + g * 31")),
    Wide(
        "local",
        "timestamp",
        _choice(
            "'0001-01-01 00:00:00'",
            "'9999-12-31 23:59:59.999999'",
            "timestamp '2000-01-01' - g * interval '17 minutes 0.000001 seconds'",
        ),
    ),
    Wide(
        "at",
        "timestamptz",
        _choice(
            "'1970-01-01 00:00:00-12'",
            "'9999-12-31 23:59:59.999999+00'",
            "timestamptz '1890-06-01 12:00:00.5+00' + random() * interval '200 years'",
        ),
    ),
    Wide(
        "clock",
        "time",
        _choice("'00:00'", "'23:59:59.999999'", "time '00:00' + random() * interval '23 hours'"),
    ),
    Wide("zoned", "timetz", _choice("'12:30:00.25+05:30'", "'24:00:00-15:59:59'", "'00:00:00+00'")),
    Wide(
        "span",
        "interval",
        _choice(
            "'1 year -2 mons 3 days -04:05:06.000007'",
            "'0'",
            "'-1 mon'",
            "make_interval(days => g, secs => -random() * 1e7)",
        ),
    ),
    Wide("uid", "uuid", "md5('w' || g)::uuid"),
    Wide(
        "as_written",
        "json",
        _choice("""'{"b": 1,  "a": [1,2,  3], "a": null}'""", "'  1e400 '", "'\"\\u00e9\"'"),
    ),
    Wide(
        "document",
        "jsonb",
        "jsonb_build_object('n', g, 'x', random()::numeric(6,2), 'q', 'a \"b\" ü')",
    ),
    Wide("path_in_json", "jsonpath", "'$.\"a b\"[*] ? (@ > ' || g || ')'"),
    Wide("lexemes", "tsvector", "to_tsvector('english', 'the fat cats ate ' || g || ' rats')"),
    Wide("query", "tsquery", "(g || ':A & (!cat:* | fat <2> rat)')::tsquery"),
    Wide("position_in_log", "pg_lsn", "('16/' || to_hex(g))::pg_lsn"),
    Wide("snapshot", "pg_snapshot", "(g || ':' || g + 9 || ':' || g + 2)::pg_snapshot"),
    Wide("row_place", "tid", "('(' || g || ',1)')::tid"),
    Wide("cash", "money", "(random() * 1e6 - 5e5)::numeric::money"),
    Wide(
        "host", "inet", _choice("('10.0.' || g % 256 || '.1/24')::inet", "'::1'", "'192.168.0.1'")
    ),
    Wide("net", "cidr", _choice("'10.0.0.0/8'", "'2001:db8::/32'")),
    Wide("mac", "macaddr", "lpad(to_hex(g), 12, '0')::macaddr"),
    Wide("mac8", "macaddr8", "lpad(to_hex(g), 16, '0')::macaddr8"),
    Wide(
        "spot", "point", _choice("point(random(), -random())", "'(NaN,-0)'", "'(Infinity,1e-300)'")
    ),
    Wide("straight", "line", "line(point(0, g), point(1, random()))"),
    Wide("segment", "lseg", "lseg(point(g, 0), point(0, random()))"),
    Wide("frame", "box", "box(point(g, 0), point(0, random()))"),
    Wide("way", "path", _choice("'[(0,0),(1,2.5)]'", "'((0,0),(1,2),(3,4))'")),
    Wide("shape", "polygon", "polygon(box(point(g, 0), point(0, random())))"),
    Wide("disc", "circle", "circle(point(random(), 0), g)"),
    Wide("bits", "bit(4)", "(g % 16)::bit(4)"),
    Wide("any_bits", "varbit", _choice("''", "(g % 512)::bit(9)")),
    Wide("class", "regclass", _choice("'pg_class'", "'demo.accounts'")),
    Wide("kind", "regtype", _choice("'int4'", "'demo.mood[]'")),
    Wide("shorts", "int2vector", _choice("'1 -2 3'", "''")),
    Wide("oids", "oidvector", "('23 ' || g)::oidvector"),
    Wide("numbers", "int4[]", _choice("'{}'", "'{NULL}'", "ARRAY[g, NULL, -g]")),
    Wide(
        "texts",
        "text[]",
        _choice("""'{"",NULL,"NULL","a,b","q\\"q","b\\\\s","{x}"," ü "}'""", "ARRAY[md5(g::text)]"),
    ),
    Wide("amounts", "numeric(8,2)[]", "ARRAY[random() * 1e5, NULL, -0.5]::numeric(8,2)[]"),
    Wide("reals", "float8[]", "'{NaN,-0,0,Infinity,NULL,1e-300}'"),
    Wide(
        "moments",
        "timestamptz[]",
        "ARRAY[timestamptz '2024-01-01 00:00+00' + g * interval '1 h', NULL]",
    ),
    Wide("blobs", "bytea[]", "ARRAY[decode(md5(g::text), 'hex'), '', NULL]"),
    Wide("spans", "interval[]", "'{1 day,-3 mons}'"),
    Wide("boxes", "box[]", "ARRAY[box(point(g, 0), point(0, 1)), NULL]"),
    Wide("mood", "demo.mood", "(enum_range(NULL::demo.mood))[1 + g % 4]"),
    Wide("moods", "demo.mood[]", "enum_range(NULL::demo.mood)"),
    Wide("fee", "demo.price", "random() * 1e6"),
    Wide("tags", "demo.tags", _choice("'{a,b}'", "'{}'")),
    Wide(
        "place",
        "demo.place",
        _choice(
            """ROW('quote " , ( \\', ROW('NaN', '-0', g), '{"a b",NULL}',
                '[2024-01-01 00:00+00,)', 'glad, very', 1.5)::demo.place""",
            "ROW(NULL, NULL, NULL, NULL, NULL, NULL)::demo.place",
            "ROW('', ROW(NULL, 1e300, g), '{}', 'empty', 'o''k \"x\"', g)::demo.place",
        ),
    ),
    Wide(
        "places",
        "demo.place[]",
        "ARRAY[ROW('a', ROW(g, 2, 3), '{x}', NULL, NULL, 0)::demo.place, NULL]",
    ),
    Wide("ints", "int4range", _choice("'[1,5)'", "'empty'", "'(,)'", "int4range(-g, g, '[]')")),
    Wide("numerics", "numrange", _choice("'(1.50,]'", "'[-2.0,1e20]'")),
    Wide(
        "open",
        "tstzrange",
        _choice("'[2024-01-01 00:00+00,2024-06-01 12:00:00.5+00)'", "'(,2024-01-01 00:00+00]'"),
    ),
    Wide("days", "daterange", "daterange(date '2024-01-01', date '2024-01-02' + g)"),
    Wide("doubles", "demo.floatrange", _choice("'[-0,NaN]'", "'(1e-5,Infinity)'", "'empty'")),
    Wide("ranges", "int4range[]", """'{"[1,2)",NULL,empty,"(,7)"}'"""),
    Wide("many_ints", "int4multirange", _choice("'{}'", "'{[1,3),[7,)}'", "'{(,)}'")),
    Wide("many_doubles", "demo.floatmultirange", "'{[-1.5,2],(3,4.25]}'"),
    Wide("embedding", "demo.vector(3)", "ARRAY[random(), -1.5, g]::float4[]::demo.vector"),
    Wide("half", "demo.halfvec(2)", "ARRAY[0.5, -2]::float4[]::demo.halfvec"),
    Wide("sparse", "demo.sparsevec(9)", _choice("'{1:1.5,9:-2}/9'", "'{}/9'")),
    Wide("large_text", "text", "repeat(md5('l' || g), CASE WHEN g % 4 = 0 THEN 100 ELSE 1 END)"),
    Wide(
        "large_array",
        "int4[]",
        "(SELECT array_agg(i * g) "
        "FROM generate_series(1, CASE WHEN g % 4 = 1 THEN 700 ELSE 2 END) AS i)",
    ),
)
"""Each of these columns also gets NULLs."""

NOT_COMPARED = tuple(
    f"demo.wide.{name}" for name in ("class", "kind", "embedding", "half", "sparse")
)
"""Columns of types of which `verify` knows no text that is always the same: reg* and pgvector's."""

_WIDE = "INSERT INTO demo.wide SELECT g, {values} FROM generate_series({first}, {last}) AS g"


def _wide_rows(first: int, last: int, more: tuple[str, ...] = ()) -> str:
    values = [
        f"CASE WHEN (g + {n}) % 23 <> 0 THEN ({column.value})::{column.type} END"
        for n, column in enumerate(WIDE)
    ]
    return _WIDE.format(values=", ".join([*values, *more]), first=first, last=last)


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

CREATE EXTENSION vector SCHEMA demo;
CREATE TYPE demo.mood AS ENUM ('sad', 'so so', 'glad, very', 'o''k "x"');
CREATE DOMAIN demo.price AS numeric(10,2) CHECK (VALUE >= 0);
CREATE DOMAIN demo.tags AS text[];
CREATE TYPE demo.point3 AS (x float8, y float8, z float8);
CREATE TYPE demo.place AS (
    name text, at demo.point3, tags demo.tags, open tstzrange, mood demo.mood, fee demo.price
);
CREATE TYPE demo.floatrange AS RANGE (
    subtype = float8, subtype_diff = float8mi, multirange_type_name = demo.floatmultirange
);
CREATE TABLE demo.wide (
    id int PRIMARY KEY,
    {wide}
);
ALTER TABLE demo.wide ALTER large_text SET STORAGE EXTERNAL, ALTER large_array SET STORAGE EXTERNAL;

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
    demo.accounts, demo.orders, demo.wide, demo.documents, demo.events, demo.measurements,
    demo.baskets
    WITH (publish_via_partition_root = true);
""".format(wide=",\n    ".join(f"{column.name} {column.type}" for column in WIDE))

# Some values are NULL or empty, or have characters at which CSV splits lines and fields.
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


@dataclass(frozen=True)
class _Amounts:
    """How many rows each table gets at first.

    Attributes
    ----------
    unit : int
        A hundredth of the number of changes.
    """

    unit: int

    @property
    def accounts(self) -> int:
        return 32 * self.unit

    @property
    def orders(self) -> int:
        return 14 * self.unit

    @property
    def documents(self) -> int:
        return 2 * self.unit

    @property
    def events(self) -> int:
        return 8 * self.unit

    @property
    def measurements(self) -> int:
        return 4 * self.unit

    @property
    def baskets(self) -> int:
        return 3 * self.unit

    @property
    def wide(self) -> int:
        return max(self.unit // 4, 50)


def _first_rows(rows: _Amounts, seed: int) -> Step:
    return Step(
        "first rows",
        (
            (
                "INSERT INTO demo.accounts SELECT g, g % 1000, (random() * 1e6)::numeric(14,2), "
                "CASE WHEN g % 10 = 0 THEN NULL ELSE repeat('·', g % 40) END "
                f"FROM generate_series(1, {rows.accounts}) AS g"
            ),
            _ORDERS.format(first=1, last=rows.orders // 2, seed=seed, added=""),
            _wide_rows(1, rows.wide),
            _DOCUMENTS.format(first=1, last=rows.documents, seed=seed),
            _EVENTS.format(rows=rows.events // 4),
            _MEASUREMENTS.format(first=1, last=rows.measurements),
            (
                "INSERT INTO demo.baskets SELECT g, 'owner ' || g % 10, jsonb_build_array(g) "
                f"FROM generate_series(1, {rows.baskets}) AS g"
            ),
        ),
    )


def _keys_and_toast(rows: _Amounts) -> Step:
    return Step(
        "keys and TOAST",
        (
            # The large values are not changed, so they are not sent.
            "UPDATE demo.documents SET title = title || ' (2)', revision = 2 WHERE id % 2 = 0",
            # The same while the key changes, twice.
            "UPDATE demo.documents SET id = id + 1000000 WHERE id % 5 = 0",
            "UPDATE demo.documents SET id = id + 1000000, title = NULL WHERE id > 1000000",
            (
                "UPDATE demo.documents SET id = id - 500000, path = '/moved/' || id "
                "WHERE id > 2000000 AND id % 3 = 0"
            ),
            # The key and one large value change, the other large value does not.
            (
                "UPDATE demo.documents SET id = id + 3000000, "
                "body = repeat(md5('new' || id), 120) WHERE id < 1000000 AND id % 7 = 0"
            ),
            (
                "UPDATE demo.documents SET appendix = CASE WHEN id % 2 = 0 THEN NULL "
                "ELSE repeat(md5('app' || id), 90) END WHERE id % 9 = 0"
            ),
            "DELETE FROM demo.documents WHERE id % 29 = 0",
            "UPDATE demo.wide SET flag = NOT flag WHERE id % 3 = 0",
            "UPDATE demo.wide SET id = -id, texts = texts || '{more}' WHERE id % 5 = 0",
            "UPDATE demo.wide SET place.name = 'moved', ints = '[7,9)' WHERE id % 7 = 0",
            "DELETE FROM demo.wide WHERE id % 13 = 0",
            # Two rows swap their keys, and a new row comes under a key that another one has left.
            "BEGIN",
            "UPDATE demo.documents SET id = -1 WHERE id = 1",
            "UPDATE demo.documents SET id = 1, path = '/docs/1' WHERE id = 2",
            "UPDATE demo.documents SET id = 2, path = '/docs/2' WHERE id = -1",
            "COMMIT",
            "UPDATE demo.documents SET id = -3 WHERE id = 3",
            "INSERT INTO demo.documents VALUES (3, '/docs/3', 'another', repeat('short ', 3), '')",
            f"UPDATE demo.accounts SET id = -id WHERE id <= {rows.unit}",
            (
                "INSERT INTO demo.accounts "
                "SELECT g, 0, 0, 'in the place of another' "
                f"FROM generate_series(1, {rows.unit // 2}) AS g"
            ),
            "UPDATE demo.accounts SET id = id - 1000000 WHERE id < 0",
            f"DELETE FROM demo.accounts WHERE id < {-1000000 - rows.unit // 2}",
            # Deleted, and made again in the same transaction.
            "BEGIN",
            "DELETE FROM demo.accounts WHERE id = 7",
            "INSERT INTO demo.accounts VALUES (7, 7, 7, 'again')",
            "COMMIT",
        ),
    )


def _truncate(rows: _Amounts) -> Step:
    return Step(
        "truncate",
        (
            "TRUNCATE demo.baskets, demo.events",
            _EVENTS.format(rows=rows.events),
            (
                "INSERT INTO demo.baskets SELECT g, 'second', NULL "
                f"FROM generate_series(1, {rows.baskets // 3}) AS g"
            ),
            "BEGIN",
            "UPDATE demo.baskets SET owner = 'gone soon'",
            "TRUNCATE demo.baskets",
            (
                "INSERT INTO demo.baskets SELECT g, 'third', jsonb_build_object('basket', g) "
                f"FROM generate_series(1, {rows.baskets // 3}) AS g"
            ),
            "UPDATE demo.baskets SET id = -id WHERE id % 10 = 0",
            "COMMIT",
        ),
    )


def _second_rows(rows: _Amounts, seed: int) -> Step:
    return Step(
        "second rows",
        (
            _ORDERS.format(
                first=rows.orders // 2 + 1,
                last=rows.orders,
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
            _wide_rows(
                rows.wide + 1,
                rows.wide + rows.wide // 2,
                ("NULL", "'(,2]'", "'so so'", "NULL", "'1 mon'"),
            ),
            "UPDATE demo.wide SET added_array = NULL, added_mood = 'glad, very' WHERE id % 11 = 0",
            # Of equal rows some are deleted and some are not.
            (
                "DELETE FROM demo.events WHERE ctid IN "
                "(SELECT ctid FROM demo.events WHERE kind = 'click' "
                f"ORDER BY ctid LIMIT {rows.unit})"
            ),
            (
                "UPDATE demo.events SET amount = 2.5 WHERE ctid IN "
                "(SELECT ctid FROM demo.events WHERE kind = 'view' "
                f"ORDER BY ctid LIMIT {rows.unit})"
            ),
            (
                "INSERT INTO demo.events SELECT kind, at, amount, payload, NULL, 1 "
                f"FROM demo.events ORDER BY ctid LIMIT {rows.unit}"
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


_ROLLED_BACK = Step(
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

_PGBENCH_BACKLOG = Step(
    "all of pgbench's accounts", ("UPDATE public.pgbench_accounts SET abalance = abalance + 1",)
)

_NEW_COLUMNS = Step(
    "new columns",
    (
        "ALTER TABLE demo.orders ADD note text",
        (
            "ALTER TABLE demo.orders ADD priority int NOT NULL DEFAULT 3, "
            "ADD checked_at timestamptz DEFAULT '2024-07-01 12:00:00.25+02', "
            "ADD rate numeric(6,3) DEFAULT 1.5, "
            "ADD label text DEFAULT 'a ''quoted'', {braced} \\'"
        ),
        (
            "ALTER TABLE demo.wide ADD added_array int[] DEFAULT '{1,NULL}', "
            "ADD added_range numrange DEFAULT '[1.50,)', "
            "ADD added_mood demo.mood DEFAULT 'sad', "
            "ADD added_place demo.place DEFAULT "
            "ROW('x', ROW(1, '-0', 'NaN'), '{a}', 'empty', NULL, 1)::demo.place, "
            "ADD added_span interval DEFAULT '1 day'"
        ),
        "ALTER TABLE demo.documents ADD language text DEFAULT 'en', ADD reviewer text",
        "ALTER TABLE demo.events ADD origin text DEFAULT 'before', ADD extra int",
        "ALTER TABLE demo.measurements ADD quality numeric(5,2) DEFAULT 99.5, ADD flag boolean",
    ),
)


class Workload:
    """The SQL of a run.

    Parameters
    ----------
    changes : int
        About how many changes the demonstration's own tables get; at least 5,000 are made.
    seed : int
        The seed of random(), which also varies the values that are not random. The statements are
        run by one connection, in the order of the attributes.

    Attributes
    ----------
    first : list of Step
        Rows that are there before anybody reads: they come by the snapshot.
    live : list of Step
        Changes that are followed: a truncate and new columns among them.
    backlog : list of Step
        Changes that are made while nobody reads, with all rows of pgbench's largest table.
    scale : int
        That of pgbench: so many times 100,000 accounts.
    """

    def __init__(self, changes: int, seed: int) -> None:
        rows = _Amounts(max(changes, 5000) // 100 + 1)
        small = _SMALL_TRANSACTIONS.format(
            transactions=2 * rows.unit, first=1, rows=rows.accounts - 5
        )
        self.scale = max(1, changes // 100_000)
        self.first = [
            Step("seed", (f"SELECT setseed({(seed % 2001 - 1000) / 1000})",)),
            _first_rows(rows, seed),
        ]
        self.live = [
            Step("small transactions", (small,)),
            _ROLLED_BACK,
            _keys_and_toast(rows),
            _truncate(rows),
            _NEW_COLUMNS,
        ]
        self.backlog = [_PGBENCH_BACKLOG, _second_rows(rows, seed)]
