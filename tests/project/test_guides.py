"""The examples of the tutorials and guides, run as they stand."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import psycopg
import pytest
from psycopg import conninfo
from support import paths
from support.commands.builds import ROOT, clean_environment, run_python
from support.commands.documents import (
    blocks,
    consume,
    fresh_server,
    on,
    python_blocks,
    run_shell,
    wait_for,
)
from support.waiting import wait_until

from pgoutput_fast.watching.metrics import METRICS, PREFIX, SYNC_METRICS, SYNC_PREFIX

GUIDES = ROOT / "docs" / "how-to"
TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.slow
@pytest.mark.server
def test_a_consumer_takes_transactions() -> None:
    consume(python_blocks(GUIDES / "stream-in-python.md")[0])


@pytest.mark.slow
@pytest.mark.server
def test_a_consumer_takes_groups() -> None:
    """The second loop of the document, with what stands before the first."""
    one_by_one, together, *_ = python_blocks(GUIDES / "stream-in-python.md")
    consume(one_by_one[: one_by_one.index("with connect")] + together)


@pytest.mark.slow
@pytest.mark.server
def test_a_consumer_for_asyncio(tmp_path: Path) -> None:
    """The loop of the document, and the one that ends after a minute without transactions."""
    document = python_blocks(GUIDES / "stream-in-python.md")
    loop, timeout = document[7:9]
    consume(document[0][: document[0].index("with connect")] + loop)
    ended = timeout.replace("60", "1")
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("SELECT pg_create_logical_replication_slot('live', 'pgoutput')")
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL)")
        ran = run_python("-W", "error", "-c", on(server, ended), cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(r"<Transaction: .*>\nno transaction for a minute\n", ran.stdout)


@pytest.mark.slow
@pytest.mark.server
def test_other_examples_of_live_changes(tmp_path: Path) -> None:
    """Each ends by itself, once the stream is made to end."""
    document = python_blocks(GUIDES / "stream-in-python.md")
    _, _, stopping, _, managing, frames, columns, *_ = document
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("SELECT pg_create_logical_replication_slot('live', 'pgoutput')")
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL)")
        ended = stopping.replace("...", "stop.set()") + "    print(stream.acknowledged_lsn > 0)\n"
        ran = run_python("-W", "error", "-c", on(server, ended), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")
        ran = run_python("-W", "error", "-c", on(server, managing), cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout == "live None None\norders None None\n"
        ended = frames + "            break\n    print(message.tag)\n"
        ran = run_python("-W", "error", "-c", on(server, ended), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "C\n", "")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (2, 1, NULL)")
        ended = columns + "            stream.close()\n"
        ran = run_python("-W", "error", "-c", on(server, ended), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "accounts 1\n", "")


@pytest.mark.slow
@pytest.mark.server
def test_a_snapshot_and_the_stream_behind_it(tmp_path: Path) -> None:
    """The example of the document, with what stands before the first loop."""
    loop, _, _, example, *_ = python_blocks(GUIDES / "stream-in-python.md")
    begin = loop[: loop.index("with connect")]
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL)")
        ran = run_python("-W", "error", "-c", on(server, begin + example), cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
        row = "{'id': 1, 'balance': Decimal('99.50'), 'note': None}"
        assert ran.stdout.splitlines() == ["['truncate'] [None]", f"['read'] [{row}]"]


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_a_capture_that_signals_end(number: signal.Signals, tmp_path: Path) -> None:
    example = python_blocks(GUIDES / "stream-in-python.md")[-1]
    example = example.replace("stop=stop", "stop=stop, create_slot=True")
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        capturing = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", on(server, example)],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            slot = "SELECT FROM pg_replication_slots WHERE active AND slot_name = 'lake'"
            wait_for(connection, slot, capturing)
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL)")
            ((end,),) = connection.execute("SELECT pg_current_wal_lsn()")
            wait_for(connection, f"{slot} AND confirmed_flush_lsn >= '{end}'", capturing)
            capturing.send_signal(number)
            assert capturing.communicate(timeout=30) == (b"", b"")
            assert capturing.returncode == 0
        finally:
            capturing.kill()
            capturing.communicate()
    assert len(list((tmp_path / "lake").glob("[0-9A-F]*.arrow"))) == 1


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("name", ["minimal_consumer", "asyncio_consumer", "the tutorial"])
def test_a_consumer_has_everything_once(name: str, tmp_path: Path) -> None:
    """Killed, ended and started again, while rows are written."""
    file = tmp_path / "consumed.sqlite"
    script = ROOT / "examples" / f"{name}.py"
    program, check = python_blocks(TUTORIALS / "consumer.md")
    if name == "the tutorial":
        script = tmp_path / "consumer.py"
        script.write_text(program)
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:

        def consumer() -> subprocess.Popen[bytes]:
            arguments = [sys.executable, "-W", "error", script, server.dsn(), "shop", file]
            begun = subprocess.Popen(arguments, stderr=subprocess.PIPE)
            # It is active while it is being made, too, and has no position then.
            slot = "SELECT FROM pg_replication_slots WHERE active AND confirmed_flush_lsn > '0/0'"
            wait_for(connection, slot, begun)
            return begun

        def stored() -> list[int]:
            with contextlib.closing(sqlite3.connect(file, timeout=60)) as reader:
                rows = reader.execute("SELECT row FROM changes ORDER BY rowid")
                return [json.loads(row)["id"] for (row,) in rows]

        for number in range(3):
            reading = consumer()
            for row in range(100):
                connection.execute(
                    "INSERT INTO accounts VALUES (%s::int, 1, NULL)", [number * 100 + row]
                )
            if number < 2:
                reading.kill()
                reading.communicate()
                continue
            wait_until(lambda: len(stored()) >= 300, process=reading)
            reading.send_signal(signal.SIGTERM)
            _, errors = reading.communicate(timeout=30)
            assert reading.returncode == 0, errors
        assert stored() == list(range(300))
    ran = run_python("-c", check, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.spark
def test_the_source_for_spark(tmp_path: Path) -> None:
    """The stream ends with what is there, and the batch has the same, as the page says."""
    stream, files, watch, count, batch, *_ = python_blocks(GUIDES / "spark-streams.md")
    first, second = stream.split("changes = (", 1)
    shown = "spark.read.parquet('accounts').orderBy('commit_lsn', 'seq').show()\n"
    batch = batch.replace("23456789", "0")
    watch = watch.replace("9188", "0")
    # What Spark tells comes in another thread.
    ended = (
        "while not listener.numbers(): __import__('time').sleep(0.01)\n"
        "(numbers,) = listener.numbers().values()\nprint(numbers['tables'], listener.url)\n"
    )
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.5, NULL), (2, 1, 'x')")
        program = on(
            server,
            f"{first}{watch}changes = ({second}{shown}{files}{ended}{count}{batch}",
        )
        ran = run_python("-c", program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"^\| *(read|truncate)\|.*\| *(\d|NULL)\| *([\d.]+|NULL)\| *\w+\|$",
                      ran.stdout, re.MULTILINE) == [
        ("truncate", "NULL", "NULL"), ("read", "1", "99.50"), ("read", "2", "1.00")
    ]  # fmt: skip
    assert "public.accounts 3 3\n" in ran.stdout
    assert "{'public.accounts': 3} http://127.0.0.1:" in ran.stdout
    assert '"event": "start", "message": "query ' in ran.stderr
    assert sorted(re.findall(r"^\| *(\w+)\| *(\d)\|$", ran.stdout, re.MULTILINE)) == [
        ("read", "2"), ("truncate", "1")
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.spark
def test_records_as_debeziums(tmp_path: Path) -> None:
    """Files of records and VARIANTs, as the page says; test_kafka_sink has the sink for Kafka."""
    records, files, variants, _ = python_blocks(GUIDES / "coming-from-debezium.md")
    program = f"""
import sys
sys.path.insert(0, {str(paths.TESTS)!r})
from pathlib import Path
from support.sparks.spark_frames import INT4, TEXT, insert, land, relation, transaction
from pgoutput_fast.spark import session

stream = [relation(1, "accounts", {{"id": INT4, "note": TEXT}}),
          *transaction(100, 7, insert(1, "1", 'a "b"'), insert(1, "2", "c"))]
land(Path("accounts.segments"), stream)
spark = session("local[1]")
{records.partition("query = ")[0]}{files}{variants}"""
    ran = run_python("-c", program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"^\|(\w) *\|(\d) *\|(.*?) *\|$", ran.stdout, re.MULTILINE) == [
        ("c", id_, "OBJECT<id: BIGINT, note: STRING>") for id_ in "12"
    ]
    lines = [
        json.loads(line)
        for path in (tmp_path / "records").glob("*.txt")
        for line in path.read_text().splitlines()
    ]
    assert [(line["op"], line["before"], line["after"]) for line in lines] == [
        ("c", None, {"id": 1, "note": 'a "b"'}), ("c", None, {"id": 2, "note": "c"})
    ]  # fmt: skip
    assert {line["source"]["table"] for line in lines} == {"accounts"}


@pytest.mark.slow
@pytest.mark.spark
def test_frames_for_spark(tmp_path: Path) -> None:
    """Frames of segments, in order and each by itself; and an error of a segment that is bad."""
    *_, frames, errors = python_blocks(GUIDES / "spark-streams.md")
    program = f"""
import sys
sys.path.insert(0, {str(paths.TESTS)!r})
from pgoutput_fast.spark import read_segments, session
from support.sparks.spark_frames import INT4, NUMERIC, insert, land, relation, transaction
spark = session("local[2]")
table = relation(1, "accounts", {{"id": INT4, "balance": NUMERIC}})
land("accounts.segments", [table, *transaction(2000, 7, insert(1, "1", "99.5"))])
{frames}
land("bad", [table, *transaction(2000, 7, insert(1, "1", "99.5"), insert(1, "x", "1"))])
changes = read_segments(spark, "bad", "public.accounts")
{errors}"""
    ran = run_python("-c", program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"^\| *(\w+)\| *(\d)\| *([\d.]+)\|$", ran.stdout, re.MULTILINE) == [
        ("insert", "1", "99.50")
    ]
    (shown,) = re.findall(r"^\|(\d+) *\|(\{.*\}) *\|$", ran.stdout, re.MULTILINE)
    assert shown[0] == "1002"
    change = json.loads(shown[1])
    assert (change["op"], change["after"]) == ("insert", {"id": 1, "balance": 99.5})
    assert re.search(r"^bad_value bad/\S+\.arrow 3$", ran.stdout, re.MULTILINE)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.spark
def test_tables_by_spark(tmp_path: Path) -> None:
    """The page's example, and its command, which goes on with the same tables."""
    page = GUIDES / "sync.md"
    *_, example = python_blocks(page)
    *_, command = blocks("sh", page)
    example = example.replace('until="now"', 'until="now", driver_bytes=0')
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
            ran = run_python("-c", on(server, example), cwd=tmp_path)
            assert (ran.returncode, ran.stdout) == (0, "2 {}\n"), ran.stderr
            connection.execute("DELETE FROM accounts WHERE id = 1")
        ran = run_shell(command, server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr
    reading = "print(deltalake.DeltaTable('lake/state/public.accounts').to_pyarrow_table()['id'])"
    ran = run_python("-c", f"import deltalake; {reading}", cwd=tmp_path)
    assert re.findall(r"\d+", ran.stdout.partition("[")[2]) == ["2"]


@pytest.mark.server
def test_tables_that_are_kept_up_to_date(tmp_path: Path) -> None:
    """The page's examples, then its first command, which goes on with the same file."""
    page = GUIDES / "sync.md"
    example = "\n".join(python_blocks(page)[:2])
    (printed,) = blocks("", page)
    command, with_policies, _ = blocks("sh", page)
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
        assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", printed)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("DELETE FROM accounts WHERE id = 1")
        for one in (command, with_policies):
            ran = run_shell(one, server.dsn(), tmp_path)
            assert ran.returncode == 0, ran.stderr
        reading = example[example.index("import duckdb") :]
        ran = run_python("-W", "error", "-c", reading, cwd=tmp_path)
    assert ran.stdout.splitlines()[:2] == [
        "[(2, Decimal('1.00'))]",
        "[('truncate', None), ('read', 1), ('read', 2), ('delete', None)]",
    ]


@pytest.mark.slow
@pytest.mark.server
def test_delta_tables(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    page = GUIDES / "delta-tables.md"
    example = "\n".join(python_blocks(page))
    (printed,) = blocks("", page)
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
        assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", printed)
        (command,) = blocks("sh", page)
        ran = run_shell(command, server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.spark
def test_changes_as_plain_files(tmp_path: Path) -> None:
    """The page's examples before and behind an ALTER TABLE, and its command."""
    for module in ("deltalake", "duckdb", "pyspark"):
        pytest.importorskip(module)
    page = GUIDES / "change-tables.md"
    example, *readers = python_blocks(page)
    (printed,) = blocks("", page)
    first, second, *rest = printed.splitlines(keepends=True)
    *_, command, export = blocks("sh", page)
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        for expected in (first, second):
            ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
            assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", expected)
            if expected is first:
                connection.execute("ALTER TABLE accounts ADD kind text")
                connection.execute("INSERT INTO accounts VALUES (3, 5, NULL, 'new')")
        exporting = export.replace("captured", "files.segments")
        for ran in (run_shell(command, server.dsn(), tmp_path),
                    run_shell(exporting, None, tmp_path)):  # fmt: skip
            assert ran.returncode == 0, ran.stderr
    there = [[*(tmp_path / name).glob("changes/*/*.parquet")] for name in ("files", "exported")]
    assert (len(there[0]), len(there[1])) == (2, 2)
    ran = run_python("-c", "\n".join(readers), cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "".join(rest)), ran.stderr


@pytest.mark.slow
@pytest.mark.server
def test_readers_of_the_tables(tmp_path: Path) -> None:
    for module in ("deltalake", "polars", "duckdb", "pyspark"):
        pytest.importorskip(module)
    page = GUIDES / "read-the-tables.md"
    example = "\n".join(python_blocks(page))
    (printed,) = blocks("", page)
    cut = GUIDES / "consistent-cut.md"
    (cut_printed,) = blocks("", cut)
    kept = """
from pgoutput_fast.apply import sync
for target, slot in (("duckdb:shop.duckdb", "a"), ("lake", "b")):
    sync("postgresql:///shop", slot=slot, publications=["shop"], target=target, until="now")
"""
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_python("-W", "error", "-c", on(server, kept), cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
    ran = run_python("-c", example, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr
    ran = run_python("-c", "\n".join(python_blocks(cut)), cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, cut_printed), ran.stderr


@pytest.mark.slow
@pytest.mark.server
def test_a_table_whose_type_is_altered(tmp_path: Path) -> None:
    page = GUIDES / "schema-changes.md"
    (example,) = python_blocks(page)
    (printed,) = blocks("", page)
    with fresh_server() as server:
        ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
        assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("ALTER TABLE accounts ALTER id TYPE bigint")
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL)")
        once = example.replace("until=", 'on_error="pause",\n    until=')
        for expected in (printed, "", ""):
            ran = run_python("-W", "error", "-c", on(server, once), cwd=tmp_path)
            assert ran.returncode == 0, ran.stderr
            if expected:
                assert ran.stdout == expected
        assert ran.stdout == ""


ROWS = "INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')"


@contextlib.contextmanager
def the_shop(tmp_path: Path) -> Iterator[str]:
    """The server of the tutorials, while it is written to: its DSN."""
    script = tmp_path / "shop.py"
    script.write_text(python_blocks(TUTORIALS / "duckdb.md")[0])
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as shop:
        assert shop.stdout is not None
        try:
            name, _, dsn = shop.stdout.readline().removeprefix("export ").partition("=")
            assert name == "PGOUTPUT_FAST_DSN"
            yield shlex.split(dsn)[0]
        finally:
            shop.send_signal(signal.SIGINT)
            shop.wait(60)


def follow(tutorial: str, query: str, says: Callable[[str], bool], tmp_path: Path) -> None:
    """Do what a tutorial says: its query has to say so before sync is killed, and after that."""
    *others, sync, _, kill, verify = blocks("sh", TUTORIALS / tutorial)
    (pattern,) = re.findall(r"^kill -9 \$\(pgrep -f '(.*)'\)$", kill, re.MULTILINE)
    assert f"pgoutput-fast {pattern}" in sync
    command = [sys.executable, "-m", "pgoutput_fast", *shlex.split(sync)[1:]]

    def is_there() -> bool:
        ran = run_python("-c", query, cwd=tmp_path)
        return ran.returncode == 0 and says(ran.stdout)

    with the_shop(tmp_path) as dsn:
        for one in others:
            if "doctor" in one:
                assert run_shell(one, None, tmp_path, PGOUTPUT_FAST_DSN=dsn).returncode == 0
        environment = clean_environment(PGOUTPUT_FAST_DSN=dsn)
        for killed in (True, False):
            with subprocess.Popen(command, cwd=tmp_path, env=environment) as following:
                try:
                    wait_until(is_there, 120, process=following)
                    if not killed:
                        ran = run_shell(verify, None, tmp_path, PGOUTPUT_FAST_DSN=dsn)
                        assert ran.returncode == 0, ran.stdout + ran.stderr
                finally:
                    following.kill()


@pytest.mark.slow
@pytest.mark.server
def test_the_tutorial_of_duckdb(tmp_path: Path) -> None:
    *_, query = python_blocks(TUTORIALS / "duckdb.md")

    def grows(printed: str) -> bool:
        first, second, third = re.findall(r"^\((\d+), ", printed, re.MULTILINE)
        return 0 < int(first) < int(second) < int(third)

    follow("duckdb.md", query, grows, tmp_path)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.spark
def test_the_tutorial_of_spark(tmp_path: Path) -> None:
    (query,) = python_blocks(TUTORIALS / "spark.md")

    def has_both(printed: str) -> bool:
        best = re.findall(r"^\| *customer \d+\|", printed, re.MULTILINE)
        ops = re.findall(r"^\| *(insert|read|truncate)\| *\d+\|$", printed, re.MULTILINE)
        return len(best) == 5 and ops == ["insert", "read", "truncate"]

    follow("spark.md", query, has_both, tmp_path)


def test_pages_install_extras_that_there_are() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("**/*.md"))
    named = ",".join(re.findall(r"pgoutput-fast\[([\w,-]+)\]", text)).split(",")
    (extras,) = re.findall(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(),
        re.DOTALL | re.MULTILINE,
    )  # fmt: skip
    assert set(named) <= set(re.findall(r"^([\w-]+) = \[", extras, re.MULTILINE))


def test_alerts_are_of_metrics_that_there_are() -> None:
    (rules,) = blocks("yaml", GUIDES / "run-as-a-service.md")
    named = re.findall(r"^ +expr: (\w+) [=>]+ [\de]+$", rules, re.MULTILINE)
    assert len(named) == rules.count("alert:")
    there = {PREFIX + kind.name for kind in METRICS}
    assert set(named) <= there | {SYNC_PREFIX + kind.name for kind in SYNC_METRICS}


@pytest.mark.slow
@pytest.mark.server
def test_a_server_is_prepared(tmp_path: Path) -> None:
    page = GUIDES / "prepare-server.md"
    (check,) = blocks("sh", page)
    (examine,) = python_blocks(page)
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("DROP PUBLICATION shop")
            for block in blocks("sql", page):
                for statement in block.split(";\n"):
                    connection.execute(statement.encode())
            connection.execute("SELECT pg_reload_conf()")
        dsn = conninfo.make_conninfo(server.dsn(), user="capture")
        check = check.replace("//capture@localhost/", "///")
        ran = run_shell(check, dsn, tmp_path)
        assert ran.returncode == 0, ran.stdout
        ran = run_python("-c", on(server, examine) + "print(report.ready)", cwd=tmp_path)
        assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


@pytest.mark.slow
@pytest.mark.server
def test_statements_of_guides(tmp_path: Path) -> None:
    """Large values are the last: the query is for the tables of a sync."""
    query, full = blocks("sql", GUIDES / "large-values.md")
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        for name in ("tables-without-a-key.md", "lost-slot.md", "failover-and-standbys.md"):
            for block in blocks("sql", GUIDES / name):
                connection.execute(block.encode())
        connection.execute("CREATE TABLE docs (id int PRIMARY KEY, title text, body text)")
        connection.execute("ALTER TABLE docs ALTER body SET STORAGE EXTERNAL")
        connection.execute("ALTER PUBLICATION shop ADD TABLE docs")
        connection.execute("INSERT INTO docs VALUES (1, 'a', repeat('x', 5000)), (2, 'b', '')")
        sync = blocks("sh", GUIDES / "sync.md")[0]
        # The slot is that of the guide to failover.
        first = f"{sync.rstrip()} --adopt-slot"
        assert run_shell(first, server.dsn(), tmp_path).returncode == 0
        connection.execute("UPDATE docs SET title = 'c'")
        assert run_shell(sync, server.dsn(), tmp_path).returncode == 0
        connection.execute(full.encode())
    with duckdb.connect(str(tmp_path / "shop.duckdb"), read_only=True) as tables:
        rows = tables.execute(query).fetchall()
    assert sorted(rows, key=str) == [(1,), (2,), (2,), (None,)]  # the last one is TRUNCATE's


@pytest.mark.slow
@pytest.mark.server
def test_users_types_of_the_guide(tmp_path: Path) -> None:
    write, register, trigger = python_blocks(GUIDES / "user-types.md")
    ran = run_python("-W", "error", "-c", register, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "21.5\n", "")
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
        for example in (write, trigger):
            ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
            assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
        assert '"mood"' in (tmp_path / "types.json").read_text()
        found = connection.execute("SELECT count(*) FROM pg_event_trigger").fetchone()
        assert found == (2,)
        connection.execute("DROP FUNCTION public.pgoutput_fast_ddl() CASCADE")


@pytest.mark.slow
@pytest.mark.server
def test_time_travel(tmp_path: Path) -> None:
    """The examples, and a sync afterwards, which leaves the property of the table as it is."""
    deltalake = pytest.importorskip("deltalake")
    page = GUIDES / "time-travel.md"
    (printed,) = blocks("", page)
    sync = blocks("sh", GUIDES / "delta-tables.md")[0]
    (options,) = blocks("toml", page)
    (tmp_path / "sync.toml").write_text(options)
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(ROWS)
        assert run_shell(sync, server.dsn(), tmp_path).returncode == 0
        connection.execute("DELETE FROM accounts WHERE id = 1")
        assert run_shell(sync, server.dsn(), tmp_path).returncode == 0
        ran = run_python("-c", "\n".join(python_blocks(page)), cwd=tmp_path)
        assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr
        connection.execute("DELETE FROM accounts")
        with_options = f"{sync.rstrip()} --config sync.toml"
        assert run_shell(with_options, server.dsn(), tmp_path).returncode == 0
    table = deltalake.DeltaTable(tmp_path / "lake" / "state" / "public.accounts")
    assert table.to_pyarrow_table().num_rows == 0
    kept = table.metadata().configuration["delta.logRetentionDuration"]
    assert kept == "interval 72 hours"


@pytest.mark.slow
@pytest.mark.server
def test_a_slot_that_is_lost(tmp_path: Path) -> None:
    """The steps of the guide: afterwards the same target has the server's rows."""
    sync = blocks("sh", GUIDES / "sync.md")[0]
    verify = blocks("sh", GUIDES / "verify.md")[0].splitlines()[1]
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(ROWS)
        assert run_shell(sync, server.dsn(), tmp_path).returncode == 0
        connection.execute("SELECT pg_drop_replication_slot('shop_tables')")
        connection.execute("DELETE FROM accounts WHERE id = 1")
        assert run_shell(sync, server.dsn(), tmp_path).returncode == 1  # never continued
        (tmp_path / "shop.duckdb.segments").rename(tmp_path / "away")
        codes = [run_shell(sync, server.dsn(), tmp_path).returncode for _ in range(2)]
        assert codes[-1] == 0
        ran = run_shell(verify, server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
@pytest.mark.server
def test_commands_of_guides(tmp_path: Path) -> None:
    """Those of the change log, and what mends the tables of a sync."""
    capture, *others, _ = blocks("sh", GUIDES / "capture.md")
    sync = blocks("sh", GUIDES / "sync.md")[0]
    paused = blocks("sh", GUIDES / "paused-and-stale-tables.md")
    altered = blocks("sh", GUIDES / "schema-changes.md")
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(ROWS)
        for block in (capture, *others, sync, *paused, *altered):
            dsn = server.dsn() if "postgresql:///shop" in block else None
            ran = run_shell(block, dsn, tmp_path)
            assert ran.returncode == 0, (block, ran.stdout, ran.stderr)
