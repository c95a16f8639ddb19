"""Other programs that work on the tables of a running sync: rows are the server's, or stale."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.targets.synced_database import Synced
from support.targets.synced_tables import DeltaTables, IcebergTables
from support.waiting import wait_until

from pgoutput_fast.apply.targets import CHANGED
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.verify import verify

deltalake = pytest.importorskip("deltalake")

from deltalake import DeltaTable, write_deltalake  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quick_upkeep")]

COLUMNS = "id, v, n, d"
NTZ = deltalake.TableFeatures.TimestampWithoutTimezone
HARMLESS: dict[str, Callable[[str], Any]] = {
    "compact": lambda path: DeltaTable(path).optimize.compact(),
    "z_order": lambda path: DeltaTable(path).optimize.z_order(["id"]),
    # Those of a window that is being written are no table's yet, so it keeps to retention.
    "vacuum": lambda path: DeltaTable(path).vacuum(dry_run=False),
    "feature": lambda path: DeltaTable(path).alter.add_feature(
        NTZ, allow_protocol_versions_increase=True
    ),
}
HARMFUL: dict[str, Callable[[str], Any]] = {
    "update": lambda path: DeltaTable(path).update({"n": "7"}, predicate="id = 2"),
    "delete": lambda path: DeltaTable(path).delete("id = 2"),
    "append": lambda path: write_deltalake(
        path, DeltaTable(path).to_pyarrow_table().slice(0, 1), mode="append"
    ),
    "restore": lambda path: DeltaTable(path).restore(DeltaTable(path).version() - 1),
}


@pytest.fixture
def server(pg18: EmbeddedServer) -> EmbeddedServer:
    return pg18


@contextlib.contextmanager
def repeated(do: Callable[[], Any]) -> Iterator[Callable[[], bool]]:
    """Do something again and again meanwhile; what comes says whether it has succeeded."""
    stop, done = threading.Event(), [0]
    errors: list[Exception] = []

    def run() -> None:
        while not stop.wait(0.05):
            try:
                do()
                done[0] += 1
            except Exception as error:  # noqa: BLE001 - such as conflicts with the sync's commits
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: done[0] > 0
    finally:
        stop.set()
        thread.join()
        assert done[0], [str(getattr(one, "java_exception", one))[:900] for one in errors]


def follow(synced: Synced, windows: int, is_done: Callable[[], bool]) -> None:
    """Sync window after window, then wait until another program was first at least once."""
    for number in range(windows):
        synced.database.execute(
            f"UPDATE t SET n = n + 1 WHERE id % 7 = {number % 7}",
            f"DELETE FROM t WHERE id = {number + 30}",
            f"INSERT INTO t VALUES ({1000 + number}, 'x', {number}, 'd')",
        )
        with contextlib.suppress(RetryableError):  # others were first too often
            synced.sync()
    wait_until(is_done, 60)  # Spark takes seconds for a commit, and loses to each of ours


def check(synced: Synced, caplog: pytest.LogCaptureFixture, *, is_harmful: bool) -> None:
    """All tables are the server's; those that others have changed were stale by name."""
    synced.settle()
    # The snapshot may come within the call that asks for it.
    assert (f"is not kept up to date: {CHANGED}: state/public.t" in caplog.text) == is_harmful
    assert ("is not kept up to date" in caplog.text) == is_harmful
    synced.compare("t", COLUMNS)
    report = verify(synced.database.dsn, publications=["p"], target=synced.tables.target)
    assert {one.state for one in report.tables} == {"equal"}, report


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["delta", "distributed"], indirect=True)
@pytest.mark.parametrize("foreign", [*HARMLESS, *HARMFUL])
def test_a_loop_beside_a_sync(
    synced: Synced, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    synced.options["maintenance"] = False
    synced.sync()
    path = str(synced.tables.path / "state" / "public.t")
    with repeated(lambda: {**HARMLESS, **HARMFUL}[foreign](path)) as is_done:
        follow(synced, 8, is_done)
    check(synced, caplog, is_harmful=foreign in HARMFUL)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.delta_spark
@pytest.mark.parametrize("shared_bytes", [1, 1 << 40])
@pytest.mark.parametrize("foreign", ["z_order", "optimize", "update by spark", "append"])
def test_a_loop_beside_a_sync_by_spark(
    make_database: Any, server: EmbeddedServer, tmp_path: Path, delta_spark: Any, foreign: str,
    shared_bytes: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Spark's own commits, too."""
    from support.targets.synced_database import synced_with

    from pgoutput_fast.spark import SparkEngine, sync_engine

    monkeypatch.setattr(sync_engine, "_SHARED_BYTES", shared_bytes)
    tables = DeltaTables(tmp_path)
    tables.given["engine"] = SparkEngine(delta_spark, driver_bytes=0)
    synced = synced_with(make_database(server), tables)
    synced.options["maintenance"] = False
    synced.sync()
    path = str(tables.path / "state" / "public.t")
    by_spark = {
        "optimize": f"OPTIMIZE delta.`file:{path}` ZORDER BY (id)",
        "update by spark": f"UPDATE delta.`file:{path}` SET n = 7 WHERE id = 2",
    }
    if foreign in by_spark:
        session = delta_spark.newSession()
        # delta-rs replaces files without the checksums that Hadoop writes beside each.
        session.conf.set("fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")
        session.conf.set("fs.file.impl.disable.cache", "true")
        session.conf.set("fs.AbstractFileSystem.file.impl", "org.apache.hadoop.fs.local.RawLocalFs")

    def do() -> None:
        if foreign in by_spark:
            session.sql(by_spark[foreign])
        else:
            {**HARMLESS, **HARMFUL}[foreign](path)

    with repeated(do) as is_done:
        follow(synced, 4, is_done)
    check(synced, caplog, is_harmful=foreign in ("update by spark", "append"))


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["iceberg"], indirect=True)
@pytest.mark.parametrize("foreign", ["append", "delete", "rollback", "properties"])
def test_a_change_table_of_iceberg(synced: Synced, foreign: str, caplog: Any) -> None:
    """What others did to its changes is a gap: recorded, told, and no reason for a copy."""
    assert isinstance(synced.tables, IcebergTables)
    synced.sync()
    synced.database.execute("UPDATE t SET n = 99 WHERE id < 20")
    synced.sync()
    table = synced.tables.opened().load_table(("changes", "public.t"))
    if foreign == "append":
        table.append(table.scan().to_arrow().slice(0, 1))
    elif foreign == "delete":
        table.delete("op = 'update'")
    elif foreign == "rollback":
        first = table.history()[0].snapshot_id
        table.manage_snapshots().rollback_to_snapshot(first).commit()
    else:
        with table.transaction() as transaction:
            transaction.set_properties(owner="somebody")
    for _ in range(2):  # the first call records it
        synced.database.execute("UPDATE t SET n = n + 1 WHERE id < 5")
        ended = synced.sync()
        (held,) = (one for one in ended.table_states if one.name == "t")
        assert ended.stale == {}
        assert (held.gap is None) == (foreign == "properties")
    assert ("changed its change table" in caplog.text) == (foreign != "properties")
    progress = DeltaTable(str(synced.tables.path / "_progress")).to_pyarrow_table().to_pylist()
    assert {row["table"]: row["gap"] for row in progress} == {"t": held.gap, "bag": None}
