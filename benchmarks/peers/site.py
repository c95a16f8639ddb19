"""A server with workloads, and one slot before each that is copied for every run.

`narrow` is transactions of a thousand inserts into six columns. `mixed` is inserts into thirty
columns, and then many small transactions over four tables: updates, deletes, old rows of REPLICA
IDENTITY FULL, unchanged TOAST. `tiny`, `big` and `huge` are the rows of `narrow` in transactions of
1, 100,000 and 5 million. The last transaction of each inserts into a table ``finish_…``: its commit
is where a peer ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

from pgoutput_fast import parse_lsn
from pgoutput_fast.embedded import EmbeddedServer, find_server_bindir
from pgoutput_fast.errors import PgOutputError

from ..harness import NotMeasured, progress

VERSIONS = (15, 18, 17, 16, 14)
"""Of PostgreSQL: the first that is found."""

SETTINGS: dict[str, object] = {
    "max_wal_senders": 40,
    "max_replication_slots": 40,
    "synchronous_commit": False,
    "autovacuum": False,
    "shared_buffers": "512MB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "logical_decoding_work_mem": "256MB",
    "log_min_messages": "warning",
}

_SECONDS = "interval '1.000123 second'"
_KINDS = (
    ("int4", "(g * {k} % 100000)::int4"),
    ("int8", "g::int8 * {k} * 1000003"),
    ("numeric(12,2)", "((g * {k} % 10000000)::numeric / 100)::numeric(12,2)"),
    ("timestamptz", f"timestamptz '2024-01-01 00:00:00+00' + (g * {{k}} % 31536000) * {_SECONDS}"),
    ("date", "date '2020-01-01' + (g * {k} % 2000)::int"),
    ("text", "md5((g * {k})::text)"),
    ("uuid", "md5((g * {k})::text)::uuid"),
    ("jsonb", "jsonb_build_object('k', g % 1000, 't', 'v' || (g * {k} % 977))"),
    ("bool", "g * {k} % 3 = 0"),
    ("float8", "(g * {k} % 100003)::float8 / 7"),
)
_WIDE = [(f"c{i:02}", *_KINDS[i % len(_KINDS)]) for i in range(29)]
# 5 % NULL.
_WIDE_VALUES = [
    f"CASE WHEN g * {i + 1} % 20 = 7 THEN NULL ELSE {value.format(k=i + 1)} END"
    for i, (_, _, value) in enumerate(_WIDE)
]

TABLES = f"""
CREATE TABLE narrow (id int8 PRIMARY KEY, a int4, t text, n numeric(12,2), ts timestamptz, b bool);
CREATE TABLE wide (id int8 PRIMARY KEY, {", ".join(f"{name} {kind}" for name, kind, _ in _WIDE)});
CREATE TABLE accounts
    (aid int8 PRIMARY KEY, bid int4, abalance numeric(12,2), filler text, mtime timestamptz);
CREATE TABLE orders (oid int8 PRIMARY KEY, aid int8, qty int4, price numeric(12,2), paid bool,
    note text, at timestamptz);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE TABLE docs (id int8 PRIMARY KEY, version int4, body text, tag text);
ALTER TABLE docs ALTER body SET STORAGE EXTERNAL;
INSERT INTO accounts SELECT g, g % 100, 0, repeat('x', 40), '2024-01-01'
    FROM generate_series(1, 50000) g;
INSERT INTO docs SELECT g, 0, repeat(md5(g::text), 128), 'tag' || g FROM generate_series(1, 2000) g;
"""

_NARROW = """
DO $$ BEGIN FOR i IN 0 .. {transactions} - 1 LOOP
    INSERT INTO narrow SELECT g, (g * 7919 % 1000000)::int4, md5(g::text) || ' r' || g % 100000,
        ((g * 31337 % 100000000)::numeric / 100)::numeric(12,2),
        timestamptz '2024-01-01 00:00:00+00' + g * interval '1.000123 second', g % 3 = 0
        FROM generate_series(i * {rows}::int8 + 1, (i + 1) * {rows}::int8) g;
    COMMIT;
END LOOP; END $$
"""
_MIXED = f"""
DO $$ BEGIN FOR i IN 0 .. {{wide}} - 1 LOOP
    INSERT INTO wide SELECT g, {", ".join(_WIDE_VALUES)}
        FROM generate_series(i * 1000::int8 + 1, (i + 1) * 1000::int8) g;
    COMMIT;
END LOOP; END $$;
DO $$ BEGIN FOR i IN 1 .. {{small}} LOOP
    UPDATE accounts SET abalance = abalance + i % 1000,
        mtime = timestamptz '2024-06-01 00:00:00+00' + i * interval '0.25 second'
        WHERE aid = i * 37 % 50000 + 1;
    UPDATE accounts SET abalance = abalance - i % 1000 WHERE aid = i * 101 % 50000 + 1;
    INSERT INTO orders VALUES (i, i * 37 % 50000 + 1, i % 50, i % 99999 / 100.0, false,
        'order ' || md5(i::text),
        timestamptz '2024-06-01 00:00:00+00' + i * interval '0.25 second');
    IF i % 2 = 0 THEN UPDATE orders SET paid = true WHERE oid = i / 2; END IF;
    IF i % 5 = 0 THEN DELETE FROM orders WHERE oid = i / 5; END IF;
    IF i % 10 = 0 THEN UPDATE docs SET version = version + 1 WHERE id = i % 2000 + 1; END IF;
    IF i % 10 = 1 THEN UPDATE wide SET c00 = i, c02 = i / 100.0 WHERE id = i; END IF;
    IF i % 100 = 2 THEN
        UPDATE docs SET body = repeat(md5((i + 7)::text), 128) WHERE id = i % 2000 + 1;
    END IF;
    COMMIT;
END LOOP; END $$
"""

COPIED = f"""
CREATE TABLE copied (id int8, {", ".join(f"{name} {kind}" for name, kind, _ in _WIDE[:18])});
INSERT INTO copied SELECT g, {", ".join(_WIDE_VALUES[:18])} FROM generate_series(1, {{rows}}) g;
ALTER TABLE copied ADD PRIMARY KEY (id)
"""
"""A table of 19 columns that has rows before anybody copies it."""

# Workload → number and size of its transactions of rows of `narrow`, at scale 1.
_SIZES = {
    "narrow": (1_000, 1_000),
    "tiny": (200_000, 1),
    "big": (10, 100_000),
    "huge": (1, 5_000_000),
}
# Of servers that send the transactions in progress: the memory for changes, beyond which they do.
_STREAMED = {"big": "4MB", "huge": "64MB"}


def statements(name: str, scale: float) -> str:
    """What makes a workload."""
    if name == "mixed":
        return _MIXED.format(wide=max(1, round(100 * scale)), small=round(20_000 * scale))
    transactions, rows = _SIZES[name]
    if transactions == 1:
        rows = round(rows * scale)
    return _NARROW.format(transactions=max(1, round(transactions * scale)), rows=rows)


def parts(statement: str) -> list[str]:
    """The blocks of a workload, which commit by themselves and so can't be executed together."""
    return [
        one if one.lstrip().startswith("DO") else f"DO {one}" for one in statement.split(";\nDO ")
    ]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A workload's changes, as they stand in the server's log."""

    name: str
    slot: str
    end_lsn: int
    """Within the last transaction: its commit ends behind it."""
    stop_lsn: str
    """Behind the last transaction."""
    changes: int
    bytes: int


class Site:
    """The server, with workloads in its log."""

    def __init__(
        self, server: EmbeddedServer, bindir: Path, scale: float, names: Sequence[str]
    ) -> None:
        self.server = server
        self.bindir = bindir
        self.pid = int((server.directory / "data" / "postmaster.pid").read_text().split()[0])
        self._connection = psycopg.connect(server.dsn(), autocommit=True)
        self.version = self.value("SHOW server_version")
        self._connection.execute("CREATE DATABASE bench")
        self._connection.close()
        self._connection = psycopg.connect(server.dsn("bench"), autocommit=True)
        self._connection.execute(TABLES)
        self.traffic: dict[str, Traffic] = {}
        for name in names:
            progress(f"making the server's workload {name}")
            self.traffic[name] = self._make(name, statements(name, scale))

    def value(self, query: str, *parameters: object) -> Any:
        row = self._connection.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    def _make(self, name: str, statement: str) -> Traffic:
        slot = f"before_{name}"
        tables = "wide, accounts, orders, docs" if name == "mixed" else "narrow"
        self._connection.execute(f"CREATE TABLE finish_{name} (id int8 PRIMARY KEY, note text)")
        self._connection.execute(f"CREATE PUBLICATION {name} FOR TABLE {tables}, finish_{name}")
        self.value("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
        for one in parts(statement):
            self._connection.execute(one)
        with self._connection.transaction():
            self._connection.execute(f"INSERT INTO finish_{name} VALUES (1, 'the end')")
            end = parse_lsn(self.value("SELECT pg_current_wal_insert_lsn()::text"))
        stop = self.value("SELECT pg_current_wal_insert_lsn()::text")
        self._connection.execute("CHECKPOINT")
        self.value("SELECT pg_switch_wal()")
        # The first bytes of the messages, read in SQL: what all are held against. It also brings
        # the server to working temperature.
        counted = self._connection.execute(
            "SELECT count(*) FILTER (WHERE get_byte(data, 0) IN (68, 73, 85)), sum(length(data))"
            " FROM pg_logical_slot_peek_binary_changes"
            f"('{slot}', NULL, NULL, 'proto_version', '1', 'publication_names', '{name}')"
        ).fetchone()
        assert counted is not None
        return Traffic(name, slot, end, stop, int(counted[0]), int(counted[1]))

    @contextlib.contextmanager
    def slot_of(self, traffic: Traffic) -> Iterator[str]:
        """A copy of the slot before the traffic, for one run."""
        slot = "one_run"
        memory = _STREAMED.get(traffic.name, SETTINGS["logical_decoding_work_mem"])
        self._connection.execute(f"ALTER DATABASE bench SET logical_decoding_work_mem = '{memory}'")
        self.value("SELECT pg_copy_logical_replication_slot(%s, %s)", traffic.slot, slot)
        try:
            yield slot
        finally:
            # The server notices only after a while that a peer is gone.
            for _ in range(100):
                pid = self.value(
                    "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", slot
                )
                if pid is None:
                    break
                time.sleep(0.05)
            else:
                self.value("SELECT pg_terminate_backend(%s)", pid)
                time.sleep(0.5)
            self.value("SELECT pg_drop_replication_slot(%s)", slot)
            # What it took is the server's only when it has been waited for.
            for _ in range(100):
                if not any(map(_is_ending, self._children())):
                    break
                time.sleep(0.05)

    def turn_on_tls(self) -> None:
        """Let clients that ask for it connect by TLS, with a certificate that is made here.

        Raises
        ------
        NotMeasured
            There is no openssl, or the server was built without TLS.
        """
        if shutil.which("openssl") is None:
            raise NotMeasured("no openssl, which makes the server's certificate")
        directory = self.server.directory
        owner = (directory / "data").stat()
        key, certificate = directory / "server.key", directory / "server.crt"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=localhost", "-keyout", key, "-out", certificate),
            ],
            check=True,
            capture_output=True,
        )
        for path in (key, certificate):
            path.chmod(0o600)
            shutil.chown(path, owner.st_uid, owner.st_gid)
        try:
            self._connection.execute(f"ALTER SYSTEM SET ssl_key_file = '{key}'")
            self._connection.execute(f"ALTER SYSTEM SET ssl_cert_file = '{certificate}'")
            self._connection.execute("ALTER SYSTEM SET ssl = on")
        except psycopg.Error as error:
            raise NotMeasured(f"the server has no TLS: {error}") from None
        self.value("SELECT pg_reload_conf()")
        time.sleep(1)

    def _children(self) -> list[Path]:
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [Path("/proc", pid) for pid in found]

    def cpu(self) -> float:
        """Seconds of CPU of the server's processes that have ended: a walsender of a run is one."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._connection.close()


def _is_ending(process: Path) -> bool:
    """Whether it is a walsender, or has ended."""
    try:
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return not command or b"walsender" in command


def find_server() -> Path:
    """The programs of the first server that is found.

    Raises
    ------
    NotMeasured
    """
    for version in VERSIONS:
        try:
            return find_server_bindir(version)
        except PgOutputError:
            continue
    raise NotMeasured("no PostgreSQL server of version 14 to 18 is installed")


@contextlib.contextmanager
def serving(scale: float, names: Sequence[str]) -> Iterator[Site]:
    """A site with the workloads of these names, of `scale` times their changes.

    At most one of those of one table.
    """
    bindir = find_server()
    with EmbeddedServer(bindir=bindir, settings=SETTINGS, tcp=True) as server:
        site = Site(server, bindir, scale, names)
        try:
            yield site
        finally:
            site.close()
