"""The copy of a directory in object storage: its order, kills between any two steps, refusals."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.read_changes import changes_of
from support.expected_errors import check_fields, expect_error
from support.waiting import wait_until

pytest.importorskip("moto")
pytest.importorskip("psycopg")

from support.changelogs.made_directory import KilledError, MadeDirectory
from support.changelogs.merged import merge
from support.targets.object_storage import KEY_ID, SECRET, Storage, new_storage, serving

from pgoutput_fast import testing
from pgoutput_fast.capture_options import CaptureOptions
from pgoutput_fast.changelog import remote as remote_module
from pgoutput_fast.changelog.consumers import Consumer, consumers, remove_consumer
from pgoutput_fast.changelog.merging import FAN, delete_covered
from pgoutput_fast.changelog.remote import Remote, RemoteError, RemotePlace, parse_place
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.changelog.uploading import Upload, download
from pgoutput_fast.changelog.view import view_of
from pgoutput_fast.errors import Argument, RetryableError
from pgoutput_fast.replication import capture, uploader
from pgoutput_fast.replication.uploader import Uploader
from pgoutput_fast.segments import list_segments

ORDERS = testing.Table("orders", {"id": "int4", "v": "text"}, 16384)
ITEMS = testing.Table("items", {"id": "int4", "v": "text"}, 16385)
NEVER = threading.Event()


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serving() as found:
        yield found


@pytest.fixture
def storage(server: Any, monkeypatch: pytest.MonkeyPatch) -> Storage:
    return new_storage(server, monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    found = MadeDirectory(tmp_path / "lake")
    yield found
    found.close()


def upload_of(made: MadeDirectory, storage: Storage, keep: Any = "all") -> Upload:
    found = Upload(made.directory, storage.url, storage.endpoint, keep)
    found.begin()
    return found


def whole(upload: Upload) -> Upload:
    while upload.round(NEVER):
        pass
    return upload


def insert(made: MadeDirectory, table: testing.Table, lsn: int, *keys: int) -> None:
    rows = [testing.insert(table, [key, f"at {lsn}"]) for key in keys]
    made.commit(lsn, table.relation(), *rows)


def fill(made: MadeDirectory) -> None:
    """Two tables, of which one is copied at once and one joins later; a segment in parts."""
    made.wait(ORDERS, 1100)
    insert(made, ORDERS, 1200, 1)
    made.copy(ORDERS, 1300, [[1, "read"], [2, "read"]], [[3, "read"]])
    insert(made, ORDERS, 1400, 4, 5)
    made.wait(ITEMS, 1500)
    insert(made, ITEMS, 1600, 1)
    insert(made, ORDERS, 1700, 6)


def ids(changes: list[dict[str, Any]], table: str) -> list[tuple[str, int | None]]:
    found = [row for row in changes if row["table"] == table]
    return [(row["op"], row["after"] and row["after"]["id"]) for row in found]


def check_objects(made: MadeDirectory, storage: Storage) -> dict[str, bytes]:
    """Each object but the descriptions is the local file of its name."""
    found = storage.objects()
    for name, content in found.items():
        if name not in ("position.json", "upload.json"):
            assert (made.directory / name).read_bytes() == content, name
    return found


def test_what_is_copied_is_a_directory(
    made: MadeDirectory, storage: Storage, tmp_path: Path
) -> None:
    fill(made)
    whole(upload_of(made, storage))
    found = check_objects(made, storage)
    local = {
        str(path.relative_to(made.directory))
        for pattern in ("*.arrow", "tables/*", "snapshots/*")
        for path in made.directory.glob(pattern)
    }
    assert found.keys() == local | {"position.json", "upload.json"}
    assert len(local) == 4 + 2 + 3
    told = json.loads(found["position.json"])
    assert (told["position"], told["begin"], told["segments_end"]) == ("0/6AE", "0/3E8", "0/6AE")
    assert download(storage.url, tmp_path / "there", endpoint=storage.endpoint) == 1710
    here = changes_of(made.directory)
    assert changes_of(tmp_path / "there") == here
    assert ids(here, "orders") == [
        ("truncate", None), ("read", 1), ("read", 2), ("read", 3),
        ("insert", 4), ("insert", 5), ("insert", 6),
    ]  # fmt: skip
    # What is held back is there too, and comes with the copy.
    made.copy(ITEMS, 1650, [[1, "read"]])
    insert(made, ITEMS, 1800, 2)
    whole(upload_of(made, storage))
    download(storage.url, tmp_path / "later", endpoint=storage.endpoint)
    here = changes_of(made.directory)
    assert changes_of(tmp_path / "later") == here
    assert ids(here, "items") == [
        ("truncate", None), ("read", 1), ("insert", 2)
    ]  # fmt: skip


def test_what_a_reader_needs_before_is_there_before(made: MadeDirectory, storage: Storage) -> None:
    fill(made)
    whole(upload_of(made, storage))
    order = storage.written
    assert len(order) == len(set(order))
    files_ = [order.index(name) for name in order if name.startswith("snapshots/")]
    marks = {name.split("-")[3]: order.index(name) for name in order if name.startswith("tables/")}
    segments = [order.index(name) for name in order if name.endswith(".arrow")][3:]
    assert len(files_) == 3
    assert max(files_) < marks["snapshot"]
    assert max(marks.values()) < min(segments)
    assert [order[at] for at in segments] == [
        segment.path.name for segment in list_segments(made.directory)
    ]
    assert (order[0], order[-1]) == ("upload.json", "position.json")
    # Nothing that is there is written again, even if nobody knows that it is.
    remove_consumer(made.directory, "_upload")
    written = list(order)
    whole(upload_of(made, storage))
    assert storage.written == written


STEPS = ("write", "size", "read", "delete", "names")


class Killing:
    """Kills the process before or behind one of all requests and of all moves of the consumer."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.count, self.at = 0, at
        for kind, names in ((Remote, STEPS), (Consumer, ("_store",))):
            for name in names:
                patch.setattr(kind, name, self._stepping(getattr(kind, name)))

    def _stepping(self, function: Any) -> Any:
        def step(*arguments: Any) -> Any:
            self._count()
            found = function(*arguments)
            self._count()
            return found

        return step

    def _count(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise KilledError


def kills(made: MadeDirectory, storage: Storage, tmp_path: Path, every: int, first: int) -> None:
    """Kill an upload at some step, read what is there, go on; again until it is whole."""
    for at in range(first, 10_000, every):
        killed = False
        with pytest.MonkeyPatch.context() as patch:
            killing = Killing(patch, at)
            try:
                whole(upload_of(made, storage, "local"))
            except KilledError:
                killed = True
        if not killed:
            assert killing.count < at
            break
        target = tmp_path / f"at {at}"
        if "position.json" in storage.objects():
            end = download(storage.url, target, endpoint=storage.endpoint)
            # It is whole: there is nothing that a reader misses.
            Consumer(target, "one").plan()
            assert end <= list_segments(made.directory)[-1].end_lsn
    found = check_objects(made, storage)
    written = [name for name in storage.written if name != "position.json"]
    assert len(written) == len(set(written))
    assert {segment.path.name for segment in list_segments(made.directory)} <= found.keys()


@pytest.mark.slow
@pytest.mark.parametrize("every", [41, 1])
def test_killed_at_any_moment_it_goes_on(
    made: MadeDirectory, storage: Storage, tmp_path: Path, every: int
) -> None:
    fill(made)
    kills(made, storage, tmp_path, every, 1)
    made.copy(ITEMS, 1650, [[1, "read"]])
    for number in range(FAN):
        insert(made, ITEMS, 2000 + 100 * number, number)
    kills(made, storage, tmp_path / "more", every, 3)
    merge(made.directory, 1 << 20)
    delete_covered(made.directory, 0)
    kills(made, storage, tmp_path / "merged", every, 5)
    download(storage.url, tmp_path / "all", endpoint=storage.endpoint)
    assert changes_of(tmp_path / "all") == changes_of(made.directory)


def test_segments_behind_the_position_do_not_count_yet(
    made: MadeDirectory, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(made, ORDERS, 1200, 1)
    upload = whole(upload_of(made, storage))
    insert(made, ORDERS, 1300, 2)

    def tell(*_: Any) -> None:
        raise KilledError

    monkeypatch.setattr(upload, "_tell", tell)
    with pytest.raises(KilledError):
        upload.round(NEVER)
    assert len([name for name in storage.objects() if name.endswith(".arrow")]) == 2
    assert download(storage.url, tmp_path / "there", endpoint=storage.endpoint) == 1210
    assert [one.end_lsn for one in list_segments(tmp_path / "there")] == [1210]


def test_retention_waits_for_the_upload(made: MadeDirectory, storage: Storage) -> None:
    insert(made, ORDERS, 1200, 1)
    upload = upload_of(made, storage)
    insert(made, ORDERS, 1300, 2)
    keep = Keep(bytes=0)
    assert retain(made.directory, keep, made.writer.store_position) == 0
    stopped = threading.Event()
    stopped.set()
    assert upload.round(stopped) is True
    assert retain(made.directory, keep, made.writer.store_position) == 0
    whole(upload)
    assert [(one.name, one.position) for one in consumers(made.directory)] == [
        ("_upload", (1310, {}))
    ]
    assert retain(made.directory, keep, made.writer.store_position) == 2
    assert list_segments(made.directory) == []
    # The copy has all; what comes now follows it.
    insert(made, ORDERS, 1400, 3)
    whole(upload_of(made, storage))
    segments = sorted(name for name in storage.objects() if name.endswith(".arrow"))
    assert [name[:16] for name in segments] == [f"{lsn:016X}" for lsn in (1000, 1210, 1310)]
    assert json.loads(storage.objects()["position.json"])["begin"] == "0/3E8"


def test_the_files_of_a_copy_stay_until_they_are_uploaded(
    made: MadeDirectory, storage: Storage
) -> None:
    """The stream is beyond the copy's point before the copy is whole."""
    made.wait(ORDERS, 1100)
    insert(made, ORDERS, 1200, 1)
    insert(made, ITEMS, 1500, 1)
    upload = whole(upload_of(made, storage))
    made.copy(ORDERS, 1300, [[1, "read"]])
    assert retain(made.directory, Keep(bytes=0), made.writer.store_position) == 0
    whole(upload)
    assert len([name for name in storage.objects() if name.startswith("snapshots/")]) == 2
    assert consumers(made.directory)[0].position == (1510, {})


def test_a_mark_that_is_replaced_during_a_round_stays(
    made: MadeDirectory, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = whole(upload_of(made, storage, "local"))
    made.wait(ITEMS, 1100)
    insert(made, ITEMS, 1200, 1)
    tell = upload._tell

    def copied_meanwhile(*arguments: Any) -> None:
        made.copy(ITEMS, 1150, [[7, "read"]])
        tell(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(upload, "_tell", copied_meanwhile)
        upload.round(NEVER)
    marks = {name for name in storage.objects() if name.startswith("tables/")}
    assert marks == {"tables/00004001-00001-first-waiting-000000000000044C.json"}
    download(storage.url, tmp_path / "held", endpoint=storage.endpoint)
    assert changes_of(tmp_path / "held") == []
    whole(upload)
    marks = {name for name in storage.objects() if name.startswith("tables/")}
    assert marks == {"tables/00004001-00001-first-snapshot-000000000000047E.json"}


def test_a_download_has_no_files_of_copies_that_are_not_whole(
    made: MadeDirectory, storage: Storage, tmp_path: Path
) -> None:
    fill(made)
    whole(upload_of(made, storage))
    (state_file,) = (name for name in storage.objects() if name.startswith("tables/00004000-"))
    storage.s3.delete_file(f"{storage.root}/{state_file}")  # as if it was to be written next
    download(storage.url, tmp_path / "there", endpoint=storage.endpoint)
    assert not [*(tmp_path / "there" / "snapshots").glob("00004000-*")]
    view_of(tmp_path / "there")


@pytest.mark.slow
def test_what_is_merged_is_copied_once_or_instead(
    made: MadeDirectory, storage: Storage, tmp_path: Path
) -> None:
    for number in range(FAN):
        insert(made, ORDERS, 2000 + 100 * number, number)
    upload = whole(upload_of(made, storage))
    merged = merge(made.directory, 1 << 20)
    assert merged is not None
    whole(upload)
    assert merged.path.name not in storage.objects()
    upload = whole(upload_of(made, storage, "local"))
    assert len([name for name in storage.objects() if name.endswith(".arrow")]) == FAN + 1
    delete_covered(made.directory, 0)
    whole(upload)
    assert storage.objects().keys() == {merged.path.name, "position.json", "upload.json"}
    before = changes_of(made.directory)
    download(storage.url, tmp_path / "there", endpoint=storage.endpoint)
    assert changes_of(tmp_path / "there") == before
    # What is deleted for good: first readers are told, then it is deleted.
    storage.written.clear()
    assert retain(made.directory, Keep(bytes=0), made.writer.store_position) == 1
    whole(upload)
    assert storage.written == ["position.json"]
    assert storage.deleted[-1] == (merged.path.name, 1)
    assert json.loads(storage.objects()["position.json"])["begin"] == "0/DB6"
    download(storage.url, tmp_path / "empty", endpoint=storage.endpoint)
    assert list_segments(tmp_path / "empty") == []


def test_the_history_is_copied_and_its_last_file_again(
    made: MadeDirectory, storage: Storage, tmp_path: Path
) -> None:
    insert(made, ORDERS, 1200, 1)
    history = made.directory / "history"
    history.mkdir()
    (history / "seen.json").write_text("1")
    (history / "0000000000000000-0000000000000001.json").write_text("{}")
    (history / ".seen.json.0123456789abcdef.tmp").write_text("no")
    upload = whole(upload_of(made, storage))
    order = [name for name in storage.written if name.startswith("history/")]
    assert order == ["history/0000000000000000-0000000000000001.json", "history/seen.json"]
    (history / "seen.json").write_text("2")
    whole(upload)
    assert storage.objects()["history/seen.json"] == b"2"
    assert storage.written.count("history/0000000000000000-0000000000000001.json") == 1
    download(storage.url, tmp_path / "there", endpoint=storage.endpoint)
    found = {path.name: path.read_text() for path in (tmp_path / "there" / "history").iterdir()}
    assert found == {"seen.json": "2", "0000000000000000-0000000000000001.json": "{}"}


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("s3://user:hush@bucket/lake", None),
        ("s3://bucket/lake", "https://user:hush@host"),
        ("https://bucket/lake", None),
        ("s3://Bucket/lake", None),
        ("s3://bucket:80/lake", None),
        ("s3:///lake", None),
        ("s3://bucket", None),
        ("s3://bucket/a//b", None),
        ("s3://bucket/../b", None),
        ("s3://bucket/b?endpoint_override=x", None),
        ("s3://bucket/b?secret_key=hush", None),
        ("s3://BUCKET/b?secret_key=hush", None),
        ("s3://bucket/lake", "https://host?secret_key=hush"),
        ("s3://bucket/lake", "localhost:9000"),
        ("s3://bucket/lake", "http://host/path"),
        ("s3://bucket/lake", "http://host:none"),
    ],
)
def test_wrong_places_are_refused(url: str, endpoint: str | None) -> None:
    with expect_error(code="bad_option") as raised:
        parse_place(url, endpoint)
    assert "hush" not in str(raised.value)


def test_the_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert parse_place("s3://bucket/a/b/") == RemotePlace("bucket", "a/b", None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a:1/")
    assert parse_place("s3://bucket/a").endpoint == "http://a:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://b")
    assert parse_place("s3://bucket/a").endpoint == "http://b"
    assert parse_place("s3://bucket/a", "https://c").endpoint == "https://c"


@pytest.mark.parametrize("url", ["s3://bucket/lake", "s3:/bucket/lake", "gs://bucket/lake"])
def test_a_capture_does_not_write_to_object_storage(url: str) -> None:
    for directory in (url, Path(url)):
        options = [Argument("upload", "s3://bucket/prefix")]
        with expect_error(code="bad_option", parameter="directory", options=options):
            capture("host=/nowhere", slot="s", publications=["p"], directory=directory)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"upload_endpoint": "http://a"}, "upload_endpoint"),
        ({"upload": "s3://bucket/a", "upload_keep": "some"}, "upload_keep"),
        ({"upload": "s3://a:b@bucket/a"}, "upload"),
        ({"give_up": True}, "give_up"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], parameter: str | None, tmp_path: Path
) -> None:
    given = {"slot": "s", "publications": ["p"], "directory": tmp_path / "lake"}
    with expect_error(code="bad_option", parameter=parameter):
        capture("host=/nowhere", **given, **options)
    with pytest.raises(TypeError, match="upload"):
        capture("host=/nowhere", **given, upload=5)
    assert not (tmp_path / "lake").exists()


def copied(storage: Storage, endpoint: str | None = None) -> CaptureOptions:
    return CaptureOptions(upload=storage.url, upload_endpoint=endpoint or storage.endpoint)


def test_a_bucket_that_is_not_there(made: MadeDirectory, storage: Storage) -> None:
    options = CaptureOptions(upload="s3://another/lake", upload_endpoint=storage.endpoint)
    with expect_error(code="io_failed"):
        Uploader(made.directory, options)
    assert consumers(made.directory) == []


def test_wrong_credentials(made: MadeDirectory, storage: Storage) -> None:
    options = copied(storage)
    storage.refuse = lambda method, key, query: "403 InvalidAccessKeyId"
    with expect_error(RemoteError, code="io_failed") as one:
        Uploader(made.directory, options)
    # Who may read and not write is told when the copy begins.
    storage.refuse = lambda method, key, query: (
        "403 SignatureDoesNotMatch" if method == "PUT" else None
    )
    begun = Uploader(made.directory, options)
    with expect_error(RemoteError, code="io_failed") as other:
        begun.start()
    for raised in (one, other):
        check_fields(raised.value, passes=False)
        assert "AWS_ACCESS_KEY_ID" in str(raised.value)
        assert SECRET not in str(raised.value)
        assert KEY_ID not in str(raised.value)


@pytest.mark.slow
def test_an_endpoint_where_nobody_answers(made: MadeDirectory, storage: Storage) -> None:
    with expect_error(RetryableError, code="io_failed"):
        Uploader(made.directory, copied(storage, "http://127.0.0.1:1"))
    # A restart while the storage is away does not keep the capture from its work.
    whole(upload_of(made, storage))
    found = Uploader(made.directory, copied(storage, "http://127.0.0.1:1"))
    found.start()
    found.close()
    assert found.error is None


def test_places_that_have_something_else(
    made: MadeDirectory, storage: Storage, tmp_path: Path
) -> None:
    insert(made, ORDERS, 1200, 1)
    with storage.s3.open_output_stream(f"{storage.root}/other") as stream:
        stream.write(b"x")
    with expect_error(code="not_ours", path=storage.url):
        upload_of(made, storage)
    storage.s3.delete_file(f"{storage.root}/other")
    whole(upload_of(made, storage))
    another = MadeDirectory(tmp_path / "another")
    with expect_error(code="another_history", path=storage.url):
        upload_of(another, storage)
    # Nor if that one has a copy of its own elsewhere.
    elsewhere = Upload(another.directory, storage.url + "-2", storage.endpoint, "all")
    elsewhere.begin()
    remove_consumer(another.directory, "_upload")
    with expect_error(code="another_history", path=storage.url):
        upload_of(another, storage)
    another.close()
    storage.url += "/b"
    with expect_error(code="bad_option", parameter="upload", path=str(made.directory)):
        upload_of(made, storage)
    storage.url = storage.url.removesuffix("/b")
    # A copy to which something is missing that is deleted here does not go on.
    remove_consumer(made.directory, "_upload")
    insert(made, ORDERS, 1300, 2)
    insert(made, ORDERS, 1400, 3)
    retain(made.directory, Keep(bytes=1), made.writer.store_position)
    with expect_error(code="another_history", path=storage.url):
        upload_of(made, storage)


def test_a_copy_that_is_gone(made: MadeDirectory, storage: Storage, tmp_path: Path) -> None:
    with expect_error(code="missing_path", path=storage.url):
        download(storage.url, tmp_path / "a", endpoint=storage.endpoint)
    whole(upload_of(made, storage))
    storage.s3.delete_dir(storage.root)
    with expect_error(code="missing_path", path=storage.url):
        upload_of(made, storage)


def test_an_object_of_another_size(made: MadeDirectory, storage: Storage, tmp_path: Path) -> None:
    insert(made, ORDERS, 1200, 1)
    upload = upload_of(made, storage)
    name = list_segments(made.directory)[0].path.name
    with storage.s3.open_output_stream(f"{storage.root}/{name}") as stream:
        stream.write(b"x")
    with expect_error(code="not_ours", path=f"{storage.url}/{name}"):
        whole(upload)
    (tmp_path / "a").write_text("")
    with expect_error(code="missing_path", path=storage.url):
        download(storage.url, tmp_path, endpoint=storage.endpoint)


def test_download_refuses_a_directory_with_files(
    made: MadeDirectory, storage: Storage, tmp_path: Path
) -> None:
    whole(upload_of(made, storage))
    with expect_error(code="not_ours", path=str(tmp_path)):
        download(storage.url, tmp_path, endpoint=storage.endpoint)


@pytest.mark.slow
def test_half_an_object_is_none(storage: Storage) -> None:
    """An upload in parts of which one fails leaves nothing under the name."""
    remote = Remote(parse_place(storage.url, storage.endpoint))
    storage.refuse = lambda method, key, query: (
        "403 AccessDenied" if "partNumber=2" in query else None
    )
    with expect_error(RemoteError, code="io_failed", passes=False):
        remote.write("large", bytes(24 << 20))
    assert remote.size("large") is None
    storage.refuse = lambda method, key, query: None
    remote.write("large", bytes(24 << 20))
    assert remote.size("large") == 24 << 20


def test_it_goes_on_when_the_storage_is_there_again(
    made: MadeDirectory,
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uploader, "_INTERVAL", 0.01)
    monkeypatch.setattr(uploader, "_FIRST_WAIT", 0.01)
    caplog.set_level(logging.INFO)
    found = Uploader(made.directory, copied(storage))
    found.start()
    refused: list[str] = []

    def refuse(method: str, key: str, query: str) -> str | None:
        if method != "PUT":
            return None
        refused.append(key)
        return "403 ExpiredToken"

    storage.refuse = refuse
    insert(made, ORDERS, 1200, 1)
    found.ask()
    wait_until(lambda: len(refused) > 1)
    assert not found.is_idle
    storage.refuse = lambda method, key, query: None
    wait_until(lambda: found.is_idle)
    assert found.position == 1210
    assert found.error is None
    remove_consumer(made.directory, "_upload")
    insert(made, ORDERS, 1300, 1)
    wait_until(lambda: found.error is not None)
    check_fields(found.error, code="no_consumer", path=str(made.directory))
    found.close()
    # The segment, or before it the position, which is written again now and then.
    assert "the upload waits: can't write " in caplog.text
    assert "the upload continues at 0/4BA" in caplog.text
    assert SECRET not in caplog.text


def test_what_is_asked_for_is_done_by_a_round_that_begins_later(
    made: MadeDirectory, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "_INTERVAL", 0.0)
    found = Uploader(made.directory, copied(storage))
    idle: list[bool] = []

    def round_(_: Upload, stop: threading.Event) -> bool:
        idle.append(found.is_idle)
        if len(idle) == 2:
            found.ask()  # what came may not be in this round
        return len(idle) == 1

    monkeypatch.setattr(Upload, "round", round_)
    found.ask()
    found.start()
    wait_until(lambda: found.is_idle)
    found.close()
    assert idle[:4] == [False, False, False, *idle[3:4]]
    assert all(idle[3:])


def test_a_server_that_answers_with_errors_passes(storage: Storage) -> None:
    remote = Remote(parse_place(storage.url, storage.endpoint))
    for status, passes in (("503 SlowDown", True), ("404 NoSuchKey", False)):
        storage.refuse = lambda method, key, query, status=status: status
        with pytest.raises(RemoteError) as raised:
            remote.write("a", b"b")
        assert raised.value.passes == passes
    assert remote_module._ERROR.search("AWS Error UNKNOWN (HTTP status 500) during")[2] == "500"
