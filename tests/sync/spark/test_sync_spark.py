"""`pgoutput-fast sync --engine spark`, with a real server and a Spark of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support import paths
from support.changelogs.made_directory import MadeDirectory
from support.commands.option_files import config
from support.waiting import wait_until

from pgoutput_fast import cli, testing
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.cli import _spark_engine
from pgoutput_fast.cli.sync import command as sync
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.spark import _session
from pgoutput_fast.spark._java import java_home
from pgoutput_fast.spark._staged_files import STAGED
from pgoutput_fast.verify import verify
from pgoutput_fast.watching.logs import RecordFormatter

pytest.importorskip("deltalake")

pytestmark = [pytest.mark.server, pytest.mark.spark]


class Process(NamedTuple):
    """Fields: pid, name (of its program)."""

    pid: int
    name: str


def running(session: int) -> list[Process]:
    """What runs in a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:
            continue
        if int(after.split()[3]) == session and after.split()[0] != "Z":
            found.append(Process(int(path.parent.name), before.partition("(")[2]))
    return found


@contextlib.contextmanager
def started(command: list[Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, of which nothing is left behind a test that fails."""
    with log.open("wb") as file, subprocess.Popen(
        command, stderr=file, start_new_session=True
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            for one in running(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_the_command_with_spark(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    database = make_database(pg16)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 300000) AS i",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    lake = tmp_path / "lake"
    command = [
        sys.executable, "-m", "pgoutput_fast", "sync", "--dsn", database.dsn,
        "--slot", f"slot_{database.name}", "--publication", "p", "--to", str(lake),
        "--engine", "spark", "--master", "local[3]", "--log-format", "json",
        "--conf", "spark.sql.shuffle.partitions=3", "--interval", "0.1s", "--metrics-port", "0",
        *config(max_delay="0.1s", log_interval="0.2s"),
    ]  # fmt: skip
    log = tmp_path / "log"
    with started(command, log) as process:

        def told() -> dict[str, Any]:
            """What it has logged last of its numbers."""
            assert process.poll() is None, log.read_text()
            found = [one for one in lines() if one["event"] == "progress"]
            return found[-1] if found else {"tables": {}}

        def lines() -> list[dict[str, Any]]:
            """Each whole line, as nothing but its own log is on standard error."""
            whole = log.read_text().rpartition("\n")[0]
            return [json.loads(line) for line in whole.splitlines()]

        def wait(changes: int) -> None:
            wait_until(lambda: told()["tables"].get("public.t") == changes, 60, log=log.read_text)

        wait(300_000)
        database.execute("UPDATE t SET v = 'new' WHERE id % 10 = 0")
        wait(330_000)
        assert told()["table_seconds"]["public.t"] > 0
        (url,) = (one["url"] for one in lines() if one["event"] == "metrics")
        with urllib.request.urlopen(url) as answer:
            metrics = answer.read().decode()
        for name, table in (("changes", 330_000), ("windows", None), ("write_seconds", 0)):
            label = "" if table is None else '{table="public.t"}'
            kind = f"{name}_total" if table is None else f"table_{name}_total"
            (value,) = re.findall(
                rf"^pgoutput_fast_sync_{kind}{label} (.*)$", metrics, re.MULTILINE
            )
            assert float(value) == table if table else float(value) > 0
        # Ctrl-C goes to all processes of the terminal.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
        # The JVM ends by itself, a moment later.
        wait_until(lambda: not running(process.pid), log=lambda: running(process.pid))
        assert lines()[-1]["event"] == "stop"
    report = verify(database.dsn, publications=["p"], target=str(lake))
    assert [(one.name, one.state, one.rows) for one in report.tables] == [("t", "equal", 300_000)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("when", ["before a job", "in a job", "while none is needed"])
def test_a_jvm_that_is_killed(made: MadeDirectory, tmp_path: Path, when: str) -> None:
    """What needs it ends by an error that may pass; what does not goes on."""
    table = testing.Table("t", {"id": "int4", "v": "text"}, 16390, key=["id"])
    large = testing.insert(table, [2, "x" * (33 << 20)])  # of which the driver makes a job
    made.commit(1200, table.relation(), *([large] if when == "in a job" else []))
    log = tmp_path / "log"
    command = [
        sys.executable, "-m", "pgoutput_fast", "sync", "--segments", made.directory, "--to",
        tmp_path / "lake", *config(uncopied="empty"), "--engine", "spark", "--master", "local[3]",
        "--log-format", "json", "--interval", "0.1s",
    ]  # fmt: skip
    with started(command, log) as process:
        wait = functools.partial(wait_until, timeout=60, process=process, log=log.read_text)

        def children(name: str) -> list[int]:
            return [one.pid for one in running(process.pid) if one.name == name]

        wait(lambda: '"event": "progress"' in log.read_text())
        if when == "in a job":
            wait(lambda: len(children("python")) > 1)
        (java,) = children("java")
        os.kill(java, signal.SIGKILL)
        if when != "in a job":
            wait(lambda: not children("java"))
            made.commit(1300, table.relation(), testing.insert(table, [1, "a"]))
            wait(lambda: "public.t is new" in log.read_text())
        if when == "while none is needed":
            process.send_signal(signal.SIGTERM)
        else:  # on a busy machine the job that was seen may have ended before the kill
            made.commit(1400, table.relation(), large)
        code = process.wait(60)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    if when == "while none is needed":
        assert (code, lines[-1]["event"]) == (0, "stop"), lines
        return
    (last,) = (one for one in lines if one["level"] in ("error", "critical"))
    assert (code, last["event"], last["retryable"]) == (75, "error", True), lines
    # In the moment of the kill its socket may still be open.
    assert last["code"] in ("process_failed", "io_failed"), last
    assert "traceback" not in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("master", "reason", "code"),
    [
        ("nonsense://", "Master must", 1),
        ("spark://127.0.0.1:1", "All masters are unresponsive", 75),  # after a minute
    ],
)
def test_a_spark_that_does_not_start(
    tmp_path: Path, made: MadeDirectory, master: str, reason: str, code: int
) -> None:
    """What it printed is in the log then, and the reason is in the error."""
    ended = subprocess.run(
        [sys.executable, "-m", "pgoutput_fast", "sync", "--segments", made.directory, "--to",
         tmp_path / "lake", "--engine", "spark", "--master", master, "--log-format", "json"],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    (printed,) = (
        one for one in lines if one["message"] == "Spark failed; it printed the following"
    )
    assert reason in printed["traceback"]
    first, last = lines[0], lines[-1]
    assert (first["level"], first["event"], first["master"]) == ("info", "spark", master)
    assert first["message"] == f"starting Spark ({master})"
    assert (last["event"], last["retryable"], ended.returncode) == ("error", code == 75, code)
    assert last["message"].startswith("Spark does not start: ")
    assert reason in last["message"]


STOPPED = """An error occurred while calling None.org.apache.spark.sql.classic.SparkSession.
: java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.
This stopped SparkContext was created at:
"""
NO_MASTER = "S: Application has been killed. Reason: All masters are unresponsive! Giving up."
KUBERNETES = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: External scheduler cannot be instantiated
\tat org.apache.spark.SparkContext$.a(SparkContext.scala:1)
Caused by: java.net.UnknownHostException: k8s.example: Name or service not known
"""
EXITED = "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
NO_SIZE = "Invalid maximum heap size: -Xmxlots"
NO_JVM = "Error: Could not create the Java Virtual Machine."
NO_SPACE = "Could not reserve enough space for 1048576000000KB object heap"


@pytest.mark.parametrize(
    ("raised", "printed", "reason", "may_pass"),
    [
        (STOPPED, f"03:50:57 WARN A: b\n03:50:58 ERROR {NO_MASTER}\n", NO_MASTER, True),
        (STOPPED, "", "Cannot call methods on a stopped SparkContext.", True),  # with no log
        (
            ": a.B: Could not parse Master URL: 'x'\n\tat c",
            "03:50:58 ERROR SparkContext: Error initializing SparkContext.\na.B: Could not\n",
            "Could not parse Master URL: 'x'", False,
        ),
        (EXITED, 'Exception in thread "main" a.B: Master must\n\tat c', "a.B: Master must", False),
        (EXITED, "some: words\n", f"RuntimeError: {EXITED}", False),
        (EXITED, f"NOTE: a\n{NO_SIZE}\n{NO_JVM}\n", NO_SIZE, False),
        (EXITED, f"Error occurred during initialization of VM\n{NO_SPACE}\n", NO_SPACE, False),
        (
            KUBERNETES, "",
            "External scheduler cannot be instantiated; k8s.example: Name or service not known",
            True,
        ),
    ],
)  # fmt: skip
def test_why_a_spark_does_not_start(raised: str, printed: str, reason: str, may_pass: bool) -> None:
    error = _spark_engine.not_started(RuntimeError(raised), printed)
    assert str(error).endswith(f": {reason}")
    assert isinstance(error, RetryableError) == may_pass


def test_a_spark_that_is_interrupted_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C is no failure: neither what Java printed nor py4j's calls are in the log."""
    caplog.set_level(logging.INFO)

    def begin_java(*given: Any) -> None:
        os.write(given[-1], b"WARNING: Using incubator modules: jdk.incubator.vector\n")
        failed = "Exception while sending command."
        record = logging.LogRecord("root", logging.ERROR, "java_gateway.py", 1, failed, (), None)
        logging.getLogger().handle(record)
        raise KeyboardInterrupt

    monkeypatch.setattr("pgoutput_fast.spark._session.begin_java", begin_java)
    filters = list(logging.getLogger().filters)
    with (
        pytest.raises(KeyboardInterrupt),
        _spark_engine.running_engine("sync", "spark", None, {}),
    ):
        pass
    assert [one.getMessage() for one in caplog.records] == ["starting Spark"]
    assert logging.getLogger().filters == filters


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def test_a_jvm_that_ends_while_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a service's or a terminal's signal comes to Java too: the sync has ended well."""

    class Ending:
        sparkContext = SimpleNamespace(master="local[2]", defaultParallelism=2)  # noqa: N815

        def stop(self) -> None:
            raise RuntimeError("Error while sending or receiving")

    def nothing(*_: Any) -> None:
        """It is not needed here."""

    monkeypatch.setattr(_session, "begin_java", nothing)
    monkeypatch.setattr(_session, "plain_session", lambda *_: Ending())
    with _spark_engine.running_engine("sync", "spark", None, {}) as engine:
        assert engine is not None


def test_what_spark_prints_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pgoutput_fast")
    output = _spark_engine._JavaOutput()
    java = os.dup(output.file)  # which goes on with it
    os.write(java, b"Setting default log level\n26/11/24 03:50:57 WARN NativeCodeLoader: none\n")
    wait_until(lambda: output._start)  # what comes at its start comes in several parts
    os.write(java, b"26/11/24 03:50:58 WARN another\n")
    output.end_start(well=True)
    os.write(java, b"26/11/24 03:50:57 ERROR Executor: failed\nat java\n\tat scala\n")
    os.close(java)
    wait_until(lambda: caplog.records)
    (one,) = caplog.records
    assert (one.levelname, one.getMessage()) == ("ERROR", "Spark: Executor: failed")
    formatted = RecordFormatter("text").format(one).splitlines()
    assert formatted[0].endswith(" ERROR Spark: Executor: failed")
    assert formatted[1:] == ["at java", "\tat scala"]
    assert json.loads(RecordFormatter("json").format(one))["traceback"] == "at java\n\tat scala"


def test_what_spark_prints_before_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    output = _spark_engine._JavaOutput()
    os.write(output.file, b"no such package\nat line 2\n")
    output.end_start(well=False)
    (one,) = caplog.records
    shown = RecordFormatter("text").format(one).splitlines()[1:]
    assert (one.levelname, shown) == ("ERROR", ["no such package", "at line 2"])


def test_records_of_javas_log() -> None:
    text = "Traceback\n  File\n\n26/11/24 03:50:57 WARN A: b\n03:50:58 ERROR C: d\nat e\n"
    assert list(_spark_engine.records(text)) == [
        (logging.WARNING, "Traceback", "  File\n"),
        (logging.WARNING, "A: b", ""),
        (logging.ERROR, "C: d", "at e"),
    ]


@pytest.mark.slow
def test_a_cluster_and_object_storage(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    """The example: executors are processes of their own, and nothing of the target is local.

    Its windows are larger than those that the driver writes by itself.
    """
    pytest.importorskip("moto")
    from pyarrow import fs

    database = make_database(pg16)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, day date, v text)",
        "INSERT INTO t SELECT i, date '2024-05-01' + i % 2, repeat('x', 100)"
        " FROM generate_series(1, 240000) AS i",
        "CREATE PUBLICATION p FOR TABLE t",
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, paths.SUPPORT / "targets" / "object_storage.py"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as storage:  # fmt: skip
        assert storage.stdout is not None
        endpoint = storage.stdout.readline().strip()
        fs.S3FileSystem(
            endpoint_override=endpoint, access_key="k", secret_key="s", allow_bucket_creation=True
        ).create_dir("bucket")
        keys = {
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "some-secret",
            "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        environment = {
            **os.environ, **keys, "PYTHON": sys.executable, "MASTER_PORT": str(port),
            "JAVA_HOME": java_home(),
        }  # fmt: skip
        target = {"target": "s3://bucket/lake", "segments": str(tmp_path / "segments")}
        command = [
            paths.ROOT / "examples" / "cluster" / "standalone.sh",
            "--dsn", database.dsn, "--slot", f"slot_{database.name}", "--publication", "p",
            "--to", target["target"], "--dir", target["segments"], "--until", "now",
            "--partition-by", "public.t=day",
        ]  # fmt: skip
        for statement in ("UPDATE t SET v = repeat(v, 4) WHERE id % 2 = 0", None):
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=200
            )
            assert ended.returncode == 0, ended.stderr
            assert "some-secret" not in ended.stderr
            if statement is not None:
                assert "240,000 changes in 1 window" in ended.stderr
                database.execute(statement)
        assert "120,000 changes in 1 window" in ended.stderr
        report = verify(database.dsn, publications=["p"], **target, storage_options=keys)
        # Where executors found the segments: it was there, and nothing has been left.
        assert list(DeltaPlace("s3://bucket/lake", keys).filesystem().get_file_info(
            fs.FileSelector(STAGED, recursive=True, allow_not_found=True)
        )) == []  # fmt: skip
        assert [(one.state, one.rows) for one in report.tables] == [("equal", 240_000)]


def test_manifests_for_kubernetes() -> None:
    """What can be seen without a cluster: names that belong together, options that there are."""
    yaml = pytest.importorskip("yaml")
    path = paths.ROOT / "examples" / "cluster" / "kubernetes.yaml"
    parts = {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}
    pod = parts["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    conf = dict(one.removeprefix("--conf=").split("=", 1) for one in container["command"]
                if one.startswith("--conf="))  # fmt: skip
    assert conf["spark.kubernetes.container.image"] == container["image"]
    account = parts["ServiceAccount"]["metadata"]["name"]
    assert pod["spec"]["serviceAccountName"] == account
    assert parts["RoleBinding"]["subjects"][0]["name"] == account
    assert conf["spark.kubernetes.authenticate.driver.serviceAccountName"] == account
    assert parts["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    assert conf["spark.driver.host"] == parts["Service"]["metadata"]["name"]
    assert [str(one["port"]) for one in parts["Service"]["spec"]["ports"]] == [
        conf["spark.driver.port"], conf["spark.blockManager.port"]
    ]  # fmt: skip
    (volume,), (mount,) = pod["spec"]["volumes"], container["volumeMounts"]
    claim = parts["PersistentVolumeClaim"]["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    assert volume["name"] == mount["name"]
    assert f"--dir={mount['mountPath']}/shop" in container["command"]
    names = {name for one in sync.params for name in one.opts}
    assert {one.partition("=")[0] for one in container["command"][2:]} <= names


def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sync", "--segments", str(tmp_path), "--until", "now"]
    for options, text in (
        (["--to", f"duckdb:{tmp_path}/a", "--engine", "spark"], "--engine spark writes Delta"),
        (["--to", str(tmp_path / "lake"), "--master", "local"], "--master is for --engine spark"),
        (["--to", str(tmp_path / "lake"), "--conf", "spark.a=b"], "--conf is for --engine spark"),
        (
            ["--to", str(tmp_path / "lake"), *config(stage=True)],
            "stage: it is for --engine spark",
        ),
        (["--to", str(tmp_path / "lake"), "--conf", "spark.secret"], "expected spark.NAME=VALUE"),
    ):
        assert cli.main([*given, *options]) == 2
        found = capsys.readouterr().err
        assert text in " ".join(found.split())
        assert "spark.secret" not in found
