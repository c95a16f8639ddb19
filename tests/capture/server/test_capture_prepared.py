"""A capture keeps prepared transactions on disk until the segment with their commit is there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.expected_errors import expect_error
from support.postgres.servers import NewServer

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import Argument
from pgoutput_fast.replication import capture
from pgoutput_fast.segments import SegmentReader, list_segments
from pgoutput_fast.segments.prepared import PreparedTransactions

pytestmark = pytest.mark.server

SETTINGS = {"max_prepared_transactions": 10, "logical_decoding_work_mem": "64kB"}


@pytest.fixture(scope="module")
def server() -> Any:
    with NewServer(18, SETTINGS) as server:
        yield server


@pytest.fixture
def site(server: EmbeddedServer, tmp_path: Path) -> Any:
    """A server, a table that a publication has, and a capture of it."""
    return Site(server, tmp_path)


class Site:
    def __init__(self, server: EmbeddedServer, path: Path) -> None:
        self.server, self.path = server, path / "segments"
        self.slot = f"s{abs(hash(str(path)))}"[:20]
        # Those that a test which failed has left hold locks.
        for (gid,) in self.execute("SELECT gid FROM pg_prepared_xacts"):
            self.execute(f"ROLLBACK PREPARED '{gid}'")
        self.execute(
            "DROP TABLE IF EXISTS t",
            "DROP PUBLICATION IF EXISTS p",
            "CREATE TABLE t (id bigint PRIMARY KEY, body text)",
            "CREATE PUBLICATION p FOR TABLE t",
        )
        self.options: dict[str, Any] = {"create_slot": True}

    def execute(self, *statements: str) -> Any:
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            for statement in statements:
                last = connection.execute(statement.encode())
            return last.fetchall() if last.description else None

    def capture(self, **options: Any) -> Any:
        ((lsn,),) = self.execute("SELECT pg_current_wal_lsn()")
        options = {"two_phase": True, **self.options, **options}
        return capture(
            self.server.dsn(), slot=self.slot, publications=["p"], directory=self.path,
            until_lsn=pf.parse_lsn(lsn), **options,
        )  # fmt: skip

    def kept(self) -> list[str]:
        directory = self.path / "prepared"
        return sorted(path.name for path in directory.iterdir()) if directory.exists() else []

    def ids(self) -> list[int]:
        """Keys of the rows that the segments have, each file decoded alone."""
        found = []
        for segment in list_segments(self.path):
            decoder = pf.Decoder()
            with SegmentReader(segment.path) as reader:
                for batch in reader:
                    for frame in batch["data"].to_pylist():
                        message = decoder.decode(frame)
                        if isinstance(message, pf.Insert):
                            found.append(message.new["id"])
        return found


def prepare(gid: str, first: int, last: int) -> tuple[str, ...]:
    return (
        "BEGIN",
        f"INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series({first}, {last}) g",
        f"PREPARE TRANSACTION '{gid}'",
    )


@pytest.mark.parametrize("rows", [3, 3000])  # these are streamed
def test_prepared_before_a_restart_and_committed_after_it(site: Site, rows: int) -> None:
    site.capture()
    # Its Relation comes with this one, and not again within the connection.
    site.execute("INSERT INTO t VALUES (-1, 'before')", *prepare("a", 1, rows))
    site.execute("INSERT INTO t VALUES (-2, 'behind the PREPARE')")
    progress = site.capture()
    assert (progress.transactions, site.ids()) == (2, [-1, -2])
    assert len(site.kept()) == 1
    ((confirmed,),) = site.execute(
        f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{site.slot}'"
    )
    prepared_at = int(site.kept()[0][:16], 16)
    # The server will not send it again.
    assert pf.parse_lsn(confirmed) == progress.durable_lsn > prepared_at
    site.server.restart()
    site.execute("COMMIT PREPARED 'a'")
    site.capture()
    assert site.ids() == [-1, -2, *range(1, rows + 1)]
    assert site.kept() == []
    site.capture()
    assert site.ids() == [-1, -2, *range(1, rows + 1)]


def test_rolled_back_it_never_lands(site: Site) -> None:
    site.capture()
    site.execute(*prepare("b", 1, 3))
    site.execute("INSERT INTO t VALUES (4, 'x')")
    site.capture()
    assert len(site.kept()) == 1
    site.execute("ROLLBACK PREPARED 'b'", "INSERT INTO t VALUES (5, 'x')")
    site.capture()
    assert (site.ids(), site.kept()) == ([4, 5], [])


def test_a_crash_between_its_commit_and_the_segment(site: Site, tmp_path: Path) -> None:
    """Its file has the name that it gets before the segment is there, and is needed still."""
    site.capture()
    site.execute(*prepare("c", 1, 3))
    site.execute("INSERT INTO t VALUES (4, 'x')")
    site.capture()
    (name,) = site.kept()
    shutil.copytree(site.path, tmp_path / "crashed")
    site.execute("COMMIT PREPARED 'c'")
    end = site.capture().durable_lsn
    assert site.ids() == [4, 1, 2, 3]
    # As if the machine had stopped behind the renaming: the slot is where it was, too.
    crashed = tmp_path / "crashed" / "prepared" / name
    crashed.rename(crashed.with_name(f"{name.removesuffix('.arrow')}-{end:016X}.arrow"))
    store = PreparedTransactions(tmp_path / "crashed", end - 1)
    (kept,) = store.load(None)
    assert (kept.gid, len(kept.stage)) == ("c", 4)  # with the Relation
    # And as if it had stopped behind the segment, before the file was deleted.
    assert list(PreparedTransactions(tmp_path / "crashed", end).load(None)) == []
    assert list((tmp_path / "crashed" / "prepared").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_what_comes_again_is_not_kept_for_ever(
    site: Site, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """The server sends what it was not told to forget, though the directory is beyond it."""
    site.capture()
    slot, copy = site.slot, f"{site.slot}_copy"
    site.execute(
        f"SELECT pg_copy_logical_replication_slot('{slot}', '{copy}')",
        *prepare("f", 1, 3),
        "INSERT INTO t VALUES (4, 'x')",
        *prepare("g", 5, 6),
        "COMMIT PREPARED 'f'",
        "ROLLBACK PREPARED 'g'",
        *prepare("h", 7, 8),
        "INSERT INTO t VALUES (9, 'x')",
    )
    site.capture()
    (still,) = site.kept()
    site.execute(
        f"SELECT pg_drop_replication_slot('{slot}')",
        f"SELECT pg_copy_logical_replication_slot('{copy}', '{slot}')",
        f"SELECT pg_drop_replication_slot('{copy}')",
        "INSERT INTO t VALUES (10, 'x')",
    )
    if killed:  # between a PREPARE and its end
        with monkeypatch.context() as patch:
            patch.setattr(PreparedTransactions, "end", killing)
            with pytest.raises(RuntimeError, match="killed"):
                site.capture()
    site.capture()
    assert (site.ids(), site.kept()) == ([4, 1, 2, 3, 9, 10], [still])
    site.execute("COMMIT PREPARED 'h'")
    site.capture()
    assert (site.ids(), site.kept()) == ([4, 1, 2, 3, 9, 10, 7, 8], [])


def killing(*_: object) -> None:
    raise RuntimeError("killed")


def test_a_session_without_them_leaves_them_to_the_next(site: Site) -> None:
    """The directory is beyond a PREPARE that only the next session is told of."""
    site.capture(two_phase=False)
    site.execute(
        f"SELECT pg_copy_logical_replication_slot('{site.slot}', '{site.slot}_copy')",
        *prepare("i", 1, 3),
        "INSERT INTO t VALUES (4, 'x')",
    )
    site.capture(two_phase=False)
    site.execute(
        f"SELECT pg_drop_replication_slot('{site.slot}')",
        f"SELECT pg_copy_logical_replication_slot('{site.slot}_copy', '{site.slot}')",
        f"SELECT pg_drop_replication_slot('{site.slot}_copy')",
        "INSERT INTO t VALUES (5, 'x')",
    )
    site.capture()
    assert len(site.kept()) == 1
    site.execute("COMMIT PREPARED 'i'")
    site.capture()
    assert (site.ids(), site.kept()) == ([4, 5, 1, 2, 3], [])


def test_damaged_it_is_refused(site: Site) -> None:
    site.capture()
    site.execute(*prepare("d", 1, 3))
    site.execute("INSERT INTO t VALUES (4, 'x')")
    site.capture()
    path = site.path / "prepared" / site.kept()[0]
    sound = path.read_bytes()
    (kept,) = PreparedTransactions(site.path, 0).load(None)
    content = [frame for run in kept.stage.runs() for frame in run.frames()]
    assert [frame[:1] for frame in content] == [b"R", b"I", b"I", b"I"]
    refused = 0
    for at in range(0, len(sound), 7):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x10]) + sound[at + 1 :])
        try:
            (kept,) = PreparedTransactions(site.path, 0).load(None)
        except pf.PgOutputError:
            refused += 1
        else:  # a byte of padding
            frames = [frame for run in kept.stage.runs() for frame in run.frames()]
            assert (kept.gid, frames) == ("d", content)
    assert refused > len(sound) // 14
    path.write_bytes(sound[:-20])
    with expect_error(code="damaged", path=str(path)):
        site.capture()
    path.write_bytes(sound)
    site.execute("COMMIT PREPARED 'd'")
    site.capture()
    assert site.ids() == [4, 1, 2, 3]


@pytest.mark.slow
def test_an_adopted_slot_may_lack_what_was_prepared_before(site: Site) -> None:
    site.execute(
        f"SELECT pg_create_logical_replication_slot('{site.slot}', 'pgoutput', false, true)",
        *prepare("e", 1, 3),
    )
    ((end,),) = site.execute("SELECT pg_current_wal_lsn()")
    site.execute(f"SELECT pg_replication_slot_advance('{site.slot}', '{end}')")
    site.options = {"adopt_slot": True}
    site.execute("COMMIT PREPARED 'e'")
    with expect_error(code="changes_missing", options=[Argument("unknown_prepared", "empty")]):
        site.capture()
    with expect_error(code="changes_missing", options=[Argument("unknown_prepared", "empty")]):
        site.capture()
    site.capture(unknown_prepared="empty")
    assert site.ids() == []
