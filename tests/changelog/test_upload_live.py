"""A capture that copies its directory to object storage, killed at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import paths
from support.expected_errors import expect_error

pytest.importorskip("moto")

from support.changelogs.folded import Folded
from support.targets.object_storage import KEY_ID, SECRET, Storage, new_storage, serving

import pgoutput_fast as pf
from pgoutput_fast.changelog.consumers import consumers
from pgoutput_fast.changelog.uploading import download
from pgoutput_fast.errors import Argument
from pgoutput_fast.replication import CaptureProgress, capture, upkeep, uploader
from pgoutput_fast.segments import list_segments

pytestmark = pytest.mark.server

SLOTS = (
    "SELECT slot_name, confirmed_flush_lsn FROM pg_replication_slots"
    " WHERE database = current_database()"
)


@pytest.fixture(scope="module")
def storage_server() -> Iterator[Any]:
    with serving() as found:
        yield found


@pytest.fixture
def storage(storage_server: Any, monkeypatch: pytest.MonkeyPatch) -> Storage:
    return new_storage(storage_server, monkeypatch)


@pytest.fixture
def shop(make_database: Any, pg18: Any) -> Any:
    database = make_database(pg18)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, 'row ' || g FROM generate_series(1, 2000) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    return database


def now(database: Any) -> int:
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()")
    return pf.parse_lsn(lsn)


def options_of(database: Any, storage: Storage) -> dict[str, Any]:
    return {
        "slot": f"slot_{database.name}", "publications": ["p"], "create_slot": True,
        "snapshot": "initial", "max_delay": 0.05, "upload": storage.url,
        "upload_endpoint": storage.endpoint,
    }  # fmt: skip


def check(database: Any, storage: Storage, lake: Path, there: Path) -> None:
    """What is in object storage are the files of the directory, and has the server's rows."""
    found = storage.objects()
    for name, content in found.items():
        path = lake / name
        if name not in ("position.json", "upload.json") and path.exists():
            assert path.read_bytes() == content, name
    download(storage.url, there, endpoint=storage.endpoint)
    truth = {row[0]: row for row in database.execute("SELECT id::text, v FROM t")}
    ((oid,),) = database.execute("SELECT 't'::regclass::oid::bigint")
    assert Folded(there).take().rows[oid] == truth
    again = ("position.json", "history/")  # as docs/explanation/change-log-directory.md says
    written = [name for name in storage.written if not name.startswith(again)]
    assert len(written) == len(set(written))


@pytest.mark.slow
def test_a_capture_that_ends_has_uploaded_all(shop: Any, storage: Storage, tmp_path: Path) -> None:
    told: list[CaptureProgress] = []
    options = options_of(shop, storage)
    for number in range(2):
        shop.execute(f"UPDATE t SET v = 'u{number}' WHERE id < 100")
        end = capture(
            shop.dsn, directory=tmp_path / "lake", until_lsn=now(shop), progress=told.append,
            **options,
        )  # fmt: skip
        assert end.uploaded_lsn == end.durable_lsn
        check(shop, storage, tmp_path / "lake", tmp_path / f"there {number}")
    segments = list_segments(tmp_path / "lake")
    assert {one.path.name for one in segments} < storage.objects().keys()
    assert [(one.name, one.position.lsn) for one in consumers(tmp_path / "lake")] == [
        ("_upload", end.durable_lsn)
    ]


@pytest.mark.slow
def test_an_upload_is_given_up_only_when_it_fails(
    shop: Any, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when nothing is to be copied, or when no capture has run for a while."""
    for module, names in ((upkeep, ("_TICK", "_TIDY_INTERVAL")), (uploader, ("_FIRST_WAIT",))):
        for name in names:
            monkeypatch.setattr(module, name, 0.02)
    lake = tmp_path / "lake"
    options = options_of(shop, storage) | {"silent_after": 0.3, "give_up": True}
    capture(shop.dsn, directory=lake, until_lsn=now(shop), **options)
    (consumer,) = consumers(lake)
    stop = threading.Event()
    end = threading.Timer(1.0, stop.set)
    end.start()
    capture(shop.dsn, directory=lake, stop=stop, **options)
    end.join()
    assert [one.name for one in consumers(lake)] == ["_upload"]
    assert time.time() - consumer.seen > 1.0

    def refuse(_: object = None) -> None:
        storage.refuse = lambda method, key, query: "503 SlowDown"

    for number, begins in enumerate((refuse, lambda: None)):
        begins()
        shop.execute(f"INSERT INTO t VALUES (-{number}, 'new')")
        with expect_error(code="io_failed", options=[Argument("upload")]):
            capture(shop.dsn, directory=lake, progress=refuse, **options)
        assert consumers(lake) == []
        storage.refuse = lambda method, key, query: None
        capture(shop.dsn, directory=lake, until_lsn=now(shop), **options)
    check(shop, storage, lake, tmp_path / "there")


@pytest.mark.slow
def test_a_download_goes_on_only_in_place_of_the_original(
    shop: Any, storage: Storage, tmp_path: Path
) -> None:
    options = options_of(shop, storage)
    local = {name: value for name, value in options.items() if not name.startswith("upload")}
    lake, there = tmp_path / "lake", tmp_path / "there"
    capture(shop.dsn, directory=lake, until_lsn=now(shop), **options)
    check(shop, storage, lake, there)
    before = shop.execute(SLOTS)
    shop.execute("UPDATE t SET v = 'behind' WHERE id < 100")
    with expect_error(code="not_ours", path=str(there)):
        capture(shop.dsn, directory=there, until_lsn=now(shop), **local)
    assert shop.execute(SLOTS) == before
    # The original goes on, and what it has acknowledged the download lacks.
    capture(shop.dsn, directory=lake, until_lsn=now(shop), **local)
    shop.execute("UPDATE t SET v = 'later' WHERE id < 50")
    with expect_error(code="changes_missing", path=str(there)):
        capture(shop.dsn, directory=there, until_lsn=now(shop), adopt_slot=True, **local)
    with expect_error(code="not_ours", path=str(there)):
        capture(shop.dsn, directory=there, until_lsn=now(shop), **local)
    # With all that was acknowledged it takes the place of the original.
    capture(shop.dsn, directory=lake, until_lsn=now(shop), **options)
    new = tmp_path / "new"
    check(shop, storage, lake, new)
    partial = tmp_path / "partial"
    shutil.copytree(new, partial)
    (partial / "position.json").unlink()
    with expect_error(code="incomplete", path=str(partial)):
        capture(shop.dsn, directory=partial, until_lsn=now(shop), adopt_slot=True, **local)
    shop.execute("UPDATE t SET v = 'last' WHERE id < 20")
    for adopts in (True, False):
        capture(shop.dsn, directory=new, until_lsn=now(shop), adopt_slot=adopts, **local)
    truth = {row[0]: row for row in shop.execute("SELECT id::text, v FROM t")}
    ((oid,),) = shop.execute("SELECT 't'::regclass::oid::bigint")
    assert Folded(new, "last").take().rows[oid] == truth
    with expect_error(code="changes_missing", path=str(lake)):
        capture(shop.dsn, directory=lake, until_lsn=now(shop), **local)


@pytest.mark.slow
def test_a_prepared_transaction_that_a_download_lacks_is_no_gap(
    shop: Any, storage: Storage, tmp_path: Path
) -> None:
    options = options_of(shop, storage) | {"two_phase": True}
    lake, there = tmp_path / "lake", tmp_path / "there"
    capture(shop.dsn, directory=lake, until_lsn=now(shop), **options)
    with shop.connect() as connection:
        connection.execute("BEGIN")
        connection.execute("UPDATE t SET v = 'prepared' WHERE id = 1")
        connection.execute("PREPARE TRANSACTION 'lost'")
    shop.execute("UPDATE t SET v = 'behind' WHERE id = 2")
    capture(shop.dsn, directory=lake, until_lsn=now(shop), **options)
    assert [*(lake / "prepared").iterdir()]
    download(storage.url, there, endpoint=storage.endpoint)
    shop.execute("COMMIT PREPARED 'lost'")
    local = {name: value for name, value in options.items() if not name.startswith("upload")}
    before = shop.execute(SLOTS)
    with expect_error(options=[Argument("unknown_prepared", "empty")]):
        capture(shop.dsn, directory=there, until_lsn=now(shop), adopt_slot=True, **local)
    assert shop.execute(SLOTS) == before


@pytest.mark.slow
def test_the_command_ends_once_all_is_uploaded(shop: Any, storage: Storage, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        done = subprocess.run(
            [
                sys.executable, "-m", "pgoutput_fast", "capture", "--dsn", shop.dsn,
                "--slot", f"slot_{shop.name}", "--publication", "p", "--until", "now",
                "--log-format", "json", *arguments,
            ],
            capture_output=True, text=True, timeout=100, check=False,
            env={**os.environ, "AWS_ENDPOINT_URL": storage.endpoint},
        )  # fmt: skip
        assert SECRET not in done.stderr + done.stdout
        assert KEY_ID not in done.stderr + done.stdout
        return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]

    code, lines = run("--out", str(tmp_path / "lake"), "--upload", "s3://nobucket/lake")
    assert (code, lines[-1]["retryable"], lines[-1]["code"]) == (1, False, "io_failed")
    assert " nobucket" in lines[-1]["message"]
    assert shop.slots() == {}
    code, lines = run(
        "--out", str(tmp_path / "lake"), "--upload", storage.url, "--snapshot", "initial"
    )
    assert (code, lines[-1]["event"], lines[-1]["upload_lag_bytes"]) == (0, "stop", 0)
    check(shop, storage, tmp_path / "lake", tmp_path / "there")


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "local"])
def test_killed_while_it_uploads(shop: Any, storage: Storage, tmp_path: Path, keep: str) -> None:
    """Killed at moments that requests choose, while segments are merged and deleted."""
    chance = random.Random(7)
    lake = tmp_path / "lake"
    options = options_of(shop, storage) | {
        "upload_keep": keep, "quick": True, "grace": 0.2, "segment_bytes": 60_000,
    }  # fmt: skip
    if keep == "all":  # else new consumers would lack what is deleted
        options["keep_bytes"] = 100_000
    capturer = paths.TESTS / "chaos" / "capturer.py"
    ended = threading.Event()

    def load() -> None:
        number = 0
        with shop.connect() as connection:
            while not ended.is_set():
                number += 1
                key = number * 7 % 3000
                connection.execute(
                    f"INSERT INTO t VALUES ({key}, 'n{number}') ON CONFLICT (id)"
                    f" DO UPDATE SET v = repeat('u{number} ', 20)"
                )
                connection.execute(f"DELETE FROM t WHERE id = {number * 13 % 3000}")
                time.sleep(0.005)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        for number in range(8):
            process = subprocess.Popen(
                [sys.executable, str(capturer), str(lake), shop.dsn, json.dumps(options)],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            left = [chance.randrange(1, 120)]
            killed = threading.Event()

            def refuse(method: str, key: str, query: str) -> str | None:
                left[0] -= 1  # noqa: B023
                if left[0] == 0:  # noqa: B023
                    killed.set()  # noqa: B023
                    return "503 SlowDown" if chance.random() < 0.5 else None
                return "503 SlowDown" if chance.random() < 0.02 else None

            storage.refuse = refuse
            assert killed.wait(60), process.poll()
            process.kill()
            _, errors = process.communicate()
            storage.refuse = lambda method, key, query: None
            assert "Traceback" not in errors, errors
            assert SECRET not in errors
            if "position.json" in storage.objects():
                there = tmp_path / f"at {number}"
                download(storage.url, there, endpoint=storage.endpoint)
                Folded(there).take()  # which refuses gaps and what comes twice
    finally:
        ended.set()
        loading.join()
    del options["quick"]
    capture(shop.dsn, directory=lake, until_lsn=now(shop), **options)
    check(shop, storage, lake, tmp_path / "there")
