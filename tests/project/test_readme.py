"""The examples of the README, run as they stand."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support import paths
from support.commands.builds import ROOT, run_python
from support.commands.documents import blocks, fresh_server, on, python_blocks, run_shell
from support.waiting import wait_until

if TYPE_CHECKING:
    from typing_extensions import LiteralString


DECODE = ROOT / "docs" / "reference" / "decode.md"
CHANGE_LOG = ROOT / "docs" / "how-to" / "capture-and-read.md"
LOOK = ROOT / "docs" / "how-to" / "look-at-changes.md"


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("impl", ["cython", "python"])
def test_decoding_prints_what_its_comments_say(impl: str, number: int, tmp_path: Path) -> None:
    example = python_blocks(DECODE)[number]
    expected = re.findall(r"^ *print\(.*\) +# (.*)$", example, re.MULTILINE)
    assert expected
    ran = run_python("-W", "error", "-c", example, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == expected


def wait_for(
    connection: psycopg.Connection[Any], query: LiteralString, process: subprocess.Popen[str]
) -> None:
    """Wait until the query has a row, which a process brings about."""
    has_row = lambda: connection.execute(query).fetchone() is not None  # noqa: E731
    wait_until(has_row, 60, process=process, log=lambda: query)


def without_numbers(line: str) -> str:
    """A line with 0 for what differs from run to run: LSNs, xids, OIDs and times."""
    line = re.sub(r"\d{4}-\d\d-\d\d [\d:.]+\+00", "TIME", line)
    return re.sub(r"^\S+ \d+|[0-9A-F]+/[0-9A-F]+|(?<=_id=|xid=)\d+", "0", line)


@pytest.mark.slow
@pytest.mark.server
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """In order: doctor, sync and a query. Installing is what make and test_wheel do."""
    install, commands = blocks("sh")
    assert "pip install" in install
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_shell(commands, server.dsn(), tmp_path)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert re.findall(r"^│ +(\d) │ +([\d.]+) │ (\w+) +│$", ran.stdout, re.MULTILINE) == [
        ("1", "99.50", "NULL"), ("2", "1.00", "x")
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.server
def test_live_changes_of_the_readme() -> None:
    """The examples print changes, and the same changes as Arrow batches."""
    messages, batches, _ = python_blocks(ROOT / "README.md")
    with fresh_server() as server, contextlib.ExitStack() as ended:
        reading = [
            ended.enter_context(
                subprocess.Popen(
                    [sys.executable, "-u", "-c", on(server, example)],
                    stdout=subprocess.PIPE, text=True,
                )
            )
            for example in (messages, batches)
        ]  # fmt: skip
        for process in reading:
            ended.callback(process.kill)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for slot, process in zip(("watch", "arrow"), reading, strict=True):
                active = "SELECT FROM pg_replication_slots WHERE active AND slot_name = "
                wait_for(connection, f"{active}'{slot}'", process)
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        first, second = (process.stdout for process in reading)
        assert first is not None
        assert second is not None
        assert [first.readline() for _ in range(2)] == [
            "accounts {'id': 1, 'balance': Decimal('99.50'), 'note': None}\n",
            "accounts {'id': 2, 'balance': Decimal('1.00'), 'note': 'x'}\n",
        ]
        assert second.readline() == "accounts ['insert', 'insert']\n"


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.spark
def test_a_stream_of_spark_of_the_readme(tmp_path: Path) -> None:
    *_, example = python_blocks(ROOT / "README.md")
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_python("-c", on(server, example), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"^\| *(read)\| *(\d)\| *([\d.]+)\| *(\w+)\|$", ran.stdout, re.MULTILINE) == [
        ("read", "1", "99.50", "NULL"), ("read", "2", "1.00", "x")
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.server
def test_capture_and_inspect(tmp_path: Path) -> None:
    capture, _, _, decode = python_blocks(CHANGE_LOG)
    (commands,) = blocks("sh", LOOK)
    (printed,) = blocks("", LOOK)
    with fresh_server() as server:
        ran = run_python("-W", "error", "-c", on(server, capture), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    shown, typed, stats = (
        run_python("-m", "pgoutput_fast", *shlex.split(command)[1:], cwd=tmp_path)
        for command in commands.splitlines()
    )
    assert list(map(without_numbers, shown.stdout.splitlines())) == list(
        map(without_numbers, printed.splitlines())
    )
    assert [json.loads(line)["tag"] for line in typed.stdout.splitlines()] == ["I", "I", "U"]
    assert (stats.returncode, stats.stderr) == (0, "")
    ran = run_python("-W", "error", "-c", decode, cwd=tmp_path)
    assert ran.stdout.splitlines() == [
        "accounts {'id': 1, 'balance': Decimal('99.50'), 'note': None}",
        "accounts {'id': 2, 'balance': Decimal('1.00'), 'note': 'x'}",
        "accounts {'id': 2, 'balance': Decimal('7.00'), 'note': 'x'}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["cython", "python"])
def test_columns_for_polars(impl: str, tmp_path: Path) -> None:
    pytest.importorskip("polars")
    example, _ = python_blocks(ROOT / "docs" / "reference" / "change-columns.md")
    expected = re.findall(r"^ *print\(.*\) +# (.*)$", example, re.MULTILINE)
    assert len(expected) == 2
    ran = run_python("-W", "error", "-c", example, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == expected


@pytest.mark.slow
@pytest.mark.server
def test_a_consumer_acknowledges_by_events() -> None:
    """The loop of the document: what it has stored, the server need not keep."""
    consume(python_blocks(ROOT / "docs" / "reference" / "change-columns.md")[1])


@pytest.mark.slow
@pytest.mark.server
def test_a_consumer_takes_transactions() -> None:
    consume(python_blocks(ROOT / "docs" / "replication.md")[0])


@pytest.mark.slow
@pytest.mark.server
def test_a_consumer_takes_groups() -> None:
    """The second loop of the document, with what stands before the first."""
    one_by_one, together, *_ = python_blocks(ROOT / "docs" / "replication.md")
    consume(one_by_one[: one_by_one.index("with connect")] + together)


@pytest.mark.slow
@pytest.mark.server
def test_other_examples_of_live_changes(tmp_path: Path) -> None:
    """Each ends by itself, once the stream is made to end."""
    document = python_blocks(ROOT / "docs" / "replication.md")
    _, _, stopping, _, managing, copying, frames, columns, _ = document
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
        copied = copying + "print(rows)\n"
        ran = run_python("-W", "error", "-c", on(server, copied), cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout == "[(1, Decimal('99.50'), None)]\n"
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
    loop, _, _, example, *_ = python_blocks(ROOT / "docs" / "replication.md")
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
    example = python_blocks(ROOT / "docs" / "replication.md")[-1]
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
def test_the_minimal_consumer_has_everything_once(tmp_path: Path) -> None:
    """Killed, ended and started again, while rows are written."""
    file = tmp_path / "consumed.sqlite"
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:

        def consumer() -> subprocess.Popen[bytes]:
            script = ROOT / "examples" / "minimal_consumer.py"
            arguments = [sys.executable, "-W", "error", script, server.dsn(), "shop", file]
            begun = subprocess.Popen(arguments, stderr=subprocess.PIPE)
            # It is active while it is being made, too, and has no position then.
            slot = "SELECT FROM pg_replication_slots WHERE active AND confirmed_flush_lsn > '0/0'"
            wait_for(connection, slot, begun)
            return begun

        def stored() -> list[int]:
            with contextlib.closing(sqlite3.connect(file)) as reader:
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
            deadline = time.monotonic() + 30
            while len(stored()) < 300 and time.monotonic() < deadline:
                time.sleep(0.05)
            reading.send_signal(signal.SIGTERM)
            _, errors = reading.communicate(timeout=30)
            assert reading.returncode == 0, errors
        assert stored() == list(range(300))


def consume(example: str) -> None:
    """Run a loop that prints what it gets, until the server was told of it."""
    slot = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE active"
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        reading = subprocess.Popen(
            [sys.executable, "-c", on(server, example)], stdout=subprocess.PIPE, text=True
        )
        try:
            wait_for(connection, slot, reading)
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL)")
            ((end,),) = connection.execute("SELECT pg_current_wal_lsn()")
            assert reading.stdout is not None
            assert reading.stdout.readline() == (
                "['insert'] [{'id': 1, 'balance': Decimal('99.50'), 'note': None}]\n"
            )
            confirmed = f"SELECT 1 FROM ({slot}) s WHERE confirmed_flush_lsn >= '{end}'"
            wait_for(connection, confirmed, reading)
        finally:
            reading.kill()
            reading.communicate()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.spark
def test_capture_and_spark(tmp_path: Path) -> None:
    capture, spark, typed, _ = python_blocks(CHANGE_LOG)
    with fresh_server() as server:
        ran = run_python("-c", on(server, capture), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
        typed = on(server, typed)
        ran = run_python("-c", spark + typed, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    changes, rows, schema = ran.stdout.strip().split("\n\n")
    assert schema.count("|-- balance: decimal(12,2)") == 2  # before and after
    assert re.findall(r"^\| *(\w+)\| *(\d)\| *([\d.]+)\| *(\w+)\|$", changes, re.MULTILINE) == [
        ("insert", "1", "99.50", "NULL"),
        ("insert", "2", "1.00", "x"),
        ("update", "2", "7.00", "x"),
    ]
    assert sorted(re.findall(r"^\| *(\d)\| *([\d.]+)\| *(\w+)\|$", rows, re.MULTILINE)) == [
        ("1", "99.50", "NULL"),
        ("2", "7.00", "x"),
    ]


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.spark
def test_the_source_for_spark(tmp_path: Path) -> None:
    """The stream ends with what is there, and the batch has the same, as the page says."""
    stream, files, watch, count, batch, *_ = python_blocks(ROOT / "docs" / "spark-source.md")
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
    records, files, variants = python_blocks(ROOT / "docs" / "debezium.md")
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
    *_, frames, errors = python_blocks(ROOT / "docs" / "spark-source.md")
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
    page = ROOT / "docs" / "spark-sync.md"
    (example,) = python_blocks(page)
    command = blocks("sh", page)[0].split()
    example = example.replace('until="now"', 'until="now", driver_bytes=0')
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
            ran = run_python("-c", on(server, example), cwd=tmp_path)
            assert (ran.returncode, ran.stdout) == (0, "3 {}\n"), ran.stderr
            connection.execute("DELETE FROM accounts WHERE id = 1")
        given = [server.dsn() if one == "postgresql:///shop" else one for one in command[1:]]
        ran = run_python("-m", "pgoutput_fast", *given, "--until", "now", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
    reading = "print(deltalake.DeltaTable('lake/state/public.accounts').to_pyarrow_table()['id'])"
    ran = run_python("-c", f"import deltalake; {reading}", cwd=tmp_path)
    assert re.findall(r"\d+", ran.stdout.partition("[")[2]) == ["2"]


@pytest.mark.server
def test_tables_that_are_kept_up_to_date(tmp_path: Path) -> None:
    """The page's examples, then its first command, which goes on with the same file."""
    page = ROOT / "docs" / "sync.md"
    example = "\n".join(python_blocks(page))
    (printed,) = blocks("", page)
    command = blocks("sh", page)[0].split()
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
        assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", printed)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("DELETE FROM accounts WHERE id = 1")
        given = [server.dsn() if one == "postgresql:///shop" else one for one in command[1:]]
        ran = run_python("-m", "pgoutput_fast", *given, "--until", "now", cwd=tmp_path)
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
    page = ROOT / "docs" / "delta.md"
    example = "\n".join(python_blocks(page))
    (printed,) = blocks("", page)
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
        assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", printed)
        command = blocks("sh", page)[0].split()
        given = [server.dsn() if one == "postgresql:///shop" else one for one in command[1:]]
        ran = run_python("-m", "pgoutput_fast", *given, "--until", "now", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.spark
def test_changes_as_plain_files(tmp_path: Path) -> None:
    """The page's examples before and behind an ALTER TABLE, and its command."""
    for module in ("deltalake", "duckdb", "pyspark"):
        pytest.importorskip(module)
    page = ROOT / "docs" / "parquet-changes.md"
    example, *readers = python_blocks(page)
    (printed,) = blocks("", page)
    first, second, *rest = printed.splitlines(keepends=True)
    command = blocks("sh", page)[0].split()
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        for expected in (first, second):
            ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
            assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", expected)
            if expected is first:
                connection.execute("ALTER TABLE accounts ADD kind text")
                connection.execute("INSERT INTO accounts VALUES (3, 5, NULL, 'new')")
        given = [server.dsn() if one == "postgresql:///shop" else one for one in command[1:]]
        ran = run_python("-m", "pgoutput_fast", *given, "--until", "now", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
    ran = run_python("-c", "\n".join(readers), cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "".join(rest)), ran.stderr


@pytest.mark.slow
@pytest.mark.server
def test_readers_of_the_tables(tmp_path: Path) -> None:
    for module in ("deltalake", "polars", "duckdb", "pyspark"):
        pytest.importorskip(module)
    page = ROOT / "docs" / "reading.md"
    example = "\n".join(python_blocks(page))
    (printed,) = blocks("", page)
    cut = ROOT / "docs" / "consistent-cut.md"
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
    page = ROOT / "docs" / "schema-changes.md"
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


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["cython", "python"])
@pytest.mark.parametrize("name", ["testing.md", "reference/net-changes.md"])
def test_examples_print_what_their_page_says(impl: str, name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / name
    example = "\n".join(python_blocks(page))
    ran = run_python("-W", "error", "-c", example, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "".join(blocks("", page))


def test_examples_of_all_documents_are_python() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    for document in documents:
        for block in python_blocks(document):
            compile(block, document, "exec")
