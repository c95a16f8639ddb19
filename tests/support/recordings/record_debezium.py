"""Record what Debezium sends of a workload, beside a capture of the same transactions.

In this directory, ``mvn -f debezium/pom.xml -DbuildDirectory=BUILD package
dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=BUILD/lib`` builds Debezium's
part. ``PYTHONPATH=tests python -m support.recordings.record_debezium BUILD TARGET`` runs both on a
private server, each with a slot of its own, and writes the records and the captured directory into
TARGET.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import LiteralString

import psycopg
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import capture

TABLES: tuple[LiteralString, ...] = (
    "CREATE TYPE mood AS ENUM ('sad', 'glad')",
    "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    "CREATE TYPE pair AS (a int, b text)",
    """CREATE TABLE kinds (id int PRIMARY KEY, i2 int2, i8 int8, f4 float4, f8 float8, n numeric,
       n2 numeric(10, 2), b bool, t text, v varchar(20), c char(5), y bytea, d date, ts timestamp,
       tz timestamptz, tm time, tmtz timetz, iv interval, u uuid, j json, jb jsonb, m mood,
       p positive, ai int[], at text[], ip inet, cd cidr, mac macaddr, o oid, bt bit(3),
       vb varbit(8), r int4range, tr tstzrange, pt point, mn money, ad date[], ab bool[],
       ats timestamp[], an numeric[], co pair, mr int4multirange, tv tsvector)""",
    'CREATE TABLE "odd ""name" ("Id x" int, "q""\\" text, PRIMARY KEY ("Id x", "q""\\"))',
    "CREATE TABLE toast (id int PRIMARY KEY, t text, y bytea, a text[], j jsonb, n int)",
    """ALTER TABLE toast ALTER t SET STORAGE EXTERNAL, ALTER y SET STORAGE EXTERNAL,
       ALTER a SET STORAGE EXTERNAL, ALTER j SET STORAGE EXTERNAL""",
    "CREATE TABLE full_row (id int PRIMARY KEY, t text, n int)",
    "ALTER TABLE full_row REPLICA IDENTITY FULL, ALTER t SET STORAGE EXTERNAL",
    "CREATE TABLE done (id int PRIMARY KEY)",
    "INSERT INTO kinds (id, t, n2, ts) VALUES (1, 'there', 1.50, '2024-02-29 12:00')",
    "CREATE PUBLICATION p FOR ALL TABLES",
)
CHANGES: tuple[LiteralString, ...] = (
    """INSERT INTO kinds VALUES (2, -32768, 9223372036854775807, 1.5, 0.1,
       12345678901234567890.0123, 99.50, true, 'plain', 'vär', 'ab', '\\x00ff10', '2024-02-29',
       '2024-02-29 23:59:59.123456',
       '2024-02-29 23:59:59.12+02', '23:59:59.5', '12:00:00+02', '1 year 2 mons 3 days 04:05:06.7',
       'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a": [1, "x"]}', '{"b": null}', 'glad', 7,
       '{1,NULL,3}', '{"a","b c",NULL,"q\\"uote"}', '10.0.0.1/24', '10.0.0.0/8',
       '08:00:2b:01:02:03', 4294967295, '101', '1011', '[1,5)', '[2024-01-01 00:00+00,)',
       '(1.5,-2)', '12.34', '{2024-01-01}', '{t,f,NULL}', '{2024-01-01 01:02:03}',
       '{1.10,2}', '(1,x)', '{[1,3),[5,7)}', 'a b')""",
    "INSERT INTO kinds (id) VALUES (3)",
    """INSERT INTO kinds (id, t, f4, f8, n, ts, tz, tm, n2, iv, y, ai, at, c) VALUES
       (4, E'quote " back \\\\ tab \\t new \\n one \\x01 del \\x7f end', 'NaN', '-Infinity',
       0.000000010, '0001-01-01 00:00', '9999-12-31 23:59:59.999999+00', '00:00', 0,
       '-1 mon -00:00:01', '', '{}', '{}', ''),
       (5, '', '1e-20', 1e300, 1e20, '1969-12-31 23:59:59.999', '1969-12-31 23:59:59.999999+00',
       '12:34:56.789', -0.01, '0', '\\x0102', '{-1}', '{""}', 'e')""",
    "UPDATE kinds SET t = 'new', n2 = 2 WHERE id = 1",
    "UPDATE kinds SET id = 20, t = 'moved' WHERE id = 2",
    "DELETE FROM kinds WHERE id = 3",
    """INSERT INTO "odd ""name" VALUES (1, 'k"1')""",
    """UPDATE "odd ""name" SET "Id x" = 2""",
    'DELETE FROM "odd ""name"',
    """INSERT INTO toast SELECT 1, repeat('t', 5000), convert_to(repeat('y', 5000), 'UTF8'),
       ARRAY[repeat('a', 5000)], to_jsonb(repeat('j', 5000)), 1""",
    "UPDATE toast SET n = 2",
    "INSERT INTO full_row VALUES (1, repeat('f', 5000), 1), (2, 'short', 2)",
    "UPDATE full_row SET n = 3",
    "UPDATE full_row SET id = 9 WHERE id = 2",
    "DELETE FROM full_row WHERE id = 9",
    "BEGIN; INSERT INTO full_row VALUES (3, 'a', 3); DELETE FROM full_row WHERE id = 3; COMMIT",
    "TRUNCATE toast, full_row",
    "INSERT INTO done VALUES (1)",
)
SETTINGS = {
    "name": "recorder",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "topic.prefix": "shop", "plugin.name": "pgoutput", "slot.name": "debezium",
    "publication.name": "p", "publication.autocreate.mode": "disabled",
    "database.hostname": "127.0.0.1", "database.user": "postgres", "database.dbname": "postgres",
    "snapshot.mode": "initial", "skipped.operations": "none", "include.unknown.datatypes": "true",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    "key.converter.schemas.enable": "false", "value.converter.schemas.enable": "false",
    "decimal.handling.mode": "string", "time.precision.mode": "isostring",
    "interval.handling.mode": "string", "binary.handling.mode": "base64",
    "poll.interval.ms": "50",
}  # fmt: skip
"""What `mode=envelope` has by default is what Debezium has with these settings."""


def main() -> None:
    build, target = map(Path, sys.argv[1:])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    settings = {"wal_level": "logical", "log_min_messages": "fatal"}
    with EmbeddedServer(18, settings, tcp=True) as server, tempfile.TemporaryDirectory() as name:
        given = psycopg.conninfo.conninfo_to_dict(server.dsn(tcp=True))
        properties = Path(name, "properties")
        told = {**SETTINGS, "database.port": given["port"],
                "database.password": given["password"]}  # fmt: skip
        lines = "".join(f"{key}={value}\n" for key, value in told.items())
        properties.write_text(lines)
        records = Path(name, "records")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for statement in TABLES:
                connection.execute(statement)
            take(server.dsn(), target, create=True)
            classpath = f"{build}/debezium-recorder.jar:{build}/lib/*"
            running = subprocess.Popen(
                ["java", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp",
                 classpath, "recorder.Recorder", properties, records, "shop.public.done"],
            )  # fmt: skip
            active = "SELECT FROM pg_replication_slots WHERE slot_name = 'debezium' AND active"
            is_active = lambda: connection.execute(active).fetchone() is not None  # noqa: E731
            wait_until(is_active, 60, process=running, log=lambda: "Debezium does not start")
            time.sleep(3)
            for statement in CHANGES:
                connection.execute(statement)
            if running.wait(timeout=120):
                raise SystemExit("Debezium has failed")
            take(server.dsn(), target, create=False)
        with gzip.GzipFile(target / "debezium.txt.gz", "wb", mtime=0) as file:
            file.write(records.read_bytes())


def take(dsn: str, target: Path, *, create: bool) -> None:
    """Capture up to now."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()
    assert row is not None
    capture(
        dsn, slot="fast", publications=["p"], directory=target / "segments", create_slot=create,
        snapshot="initial", until_lsn=int(row[0]), compression="zstd",
    )  # fmt: skip


if __name__ == "__main__":
    main()
