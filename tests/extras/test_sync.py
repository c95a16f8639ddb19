"""Tables that `apply.sync` keeps up to date, beside a simulated server and capture."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_directory import OIDS, MadeDirectory
from simulated_directory import Simulation

import pgoutput_fast as pf
from pgoutput_fast import apply, testing
from pgoutput_fast.apply import duckdb_target, syncing
from pgoutput_fast.apply.naming import free_name, renames, stored_table
from pgoutput_fast.apply.targets import Held
from pgoutput_fast.directory import merging
from pgoutput_fast.directory.retention import Keep, retain

duckdb = pytest.importorskip("duckdb")

PROGRESS = "SELECT * EXCLUDE (columns) FROM _progress ORDER BY relation_id"


class KilledError(BaseException):
    """The process was killed."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Any]:
    with contextlib.closing(duckdb.connect(str(path), read_only=True)) as connection:
        yield connection


def progress(path: Path) -> dict[int, dict[str, Any]]:
    with reading(path) as connection:
        return {row["relation_id"]: row for row in connection.sql(PROGRESS).to_arrow_table()
                .to_pylist()}  # fmt: skip


def state(path: Path, stored: str) -> list[dict[str, Any]]:
    with reading(path) as connection:
        found = connection.sql(f'FROM state."{stored}"').to_arrow_table().to_pylist()
        return sorted(found, key=str)


# --- at random -----------------------------------------------------------------------------------


class Syncing(Simulation):
    """Syncs of a directory into a file, some of which are killed."""

    killed = 0

    def read(self) -> None:
        path = self.root / "tables.duckdb"
        with contextlib.ExitStack() as stack:
            if self.chance.random() < 0.4:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                stack.enter_context(contextlib.suppress(KilledError))
                self.kill(patch)
            apply.sync(
                segments=self.directory, target=f"duckdb:{path}", until="now", uncopied="error",
                unknown="error", window_bytes=self.chance.choice((1, 3000, 1 << 20)),
            )  # fmt: skip
            self.compare(path)

    def kill(self, patch: pytest.MonkeyPatch) -> None:
        """Have a call end at some moment, as if the process were killed."""
        owner, name = self.chance.choice(
            [
                (syncing.Consumer, "advance"),
                (duckdb_target.DuckdbTarget, "commit"),
                (duckdb_target._State, "apply"),
                (duckdb_target._State, "append"),
                (duckdb_target._Changes, "flush"),
            ]
        )
        original, left = getattr(owner, name), [self.chance.randrange(3)]

        def called(*args: Any, **keywords: Any) -> Any:
            if not left[0]:
                self.killed += 1
                raise KilledError
            left[0] -= 1
            return original(*args, **keywords)

        patch.setattr(owner, name, called)

    def compare(self, path: Path) -> None:
        self.counts["reads"] += 1
        found = progress(path)
        for relation_id, held in found.items():
            rows = {row["id"]: row["v"] for row in state(path, held["stored"])}
            assert rows == self.world.rows(relation_id, held["lsn"])
            assert held["stale"] is None
            self.compare_changes(path, held)

    def compare_changes(self, path: Path, held: dict[str, Any]) -> None:
        """Each change is there once, and all from the newest snapshot on."""
        with reading(path) as connection:
            rows = connection.execute(
                "SELECT commit_lsn, seq, op, coalesce(after.id, before.id), after.v"
                f' FROM changes."{held["stored"]}" ORDER BY 1, 2'
            ).fetchall()
        assert len({row[:2] for row in rows}) == len(rows)
        made: dict[int, str] = {}
        for lsn, _, op, key, value in rows:
            assert lsn < held["lsn"]
            if op == "truncate":
                made.clear()
            elif op == "delete":
                made.pop(key)
            else:
                assert (key in made) == (op == "update")
                made[key] = value
        assert made == self.world.rows(held["relation_id"], held["lsn"])


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 80))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_the_tables_are_the_servers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FAN", 2)
    monkeypatch.setattr(merging, "_SMALLEST", 1 << 30)
    syncs = Syncing(tmp_path, seed)
    syncs.run(60)
    syncs.settle()
    syncs.capture.close()
    path = tmp_path / "tables.duckdb"
    apply.sync(segments=syncs.directory, target=f"duckdb:{path}", until="now")
    syncs.compare(path)
    assert set(progress(path)) <= set(OIDS)


# --- known values --------------------------------------------------------------------------------

ACCOUNTS = testing.Table("accounts", {"id": "int4", "note": "text"}, 16390, key=["id"])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def sync(made: MadeDirectory, tmp_path: Path, **options: Any) -> apply.SyncProgress:
    options = {"until": "now", "target": f"duckdb:{tmp_path / 't.duckdb'}", **options}
    return apply.sync(segments=made.directory, **options)


def test_a_table_without_a_snapshot(made: MadeDirectory, tmp_path: Path) -> None:
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    path = tmp_path / "t.duckdb"
    with pytest.raises(pf.PgOutputError, match=r"public\.accounts has no snapshot in .*: .*empty"):
        sync(made, tmp_path)
    assert progress(path) == {}
    found = sync(made, tmp_path, uncopied="empty")
    assert (found.changes, found.stale) == (1, {})
    assert state(path, "public.accounts") == [{"id": 1, "note": "a"}]


def test_changes_alone(made: MadeDirectory, tmp_path: Path) -> None:
    made.commit(2000, ACCOUNTS.relation(), testing.update(ACCOUNTS, [1, "b"]))
    found = sync(made, tmp_path, uncopied="changes")
    assert found.stale == {"public.accounts": "its rows before the capture are not known"}
    with reading(tmp_path / "t.duckdb") as connection:
        rows = connection.execute('SELECT op, after FROM changes."public.accounts"').fetchall()
        assert rows == [("update", {"id": 1, "note": "b"})]
        tables = connection.execute(
            "SELECT table_name FROM duckdb_tables() WHERE schema_name = 'state'"
        ).fetchall()
        assert tables == []


def test_changes_that_do_not_fit(made: MadeDirectory, tmp_path: Path) -> None:
    path = tmp_path / "t.duckdb"
    made.wait(ACCOUNTS, 1500)
    made.copy(ACCOUNTS, 1600, [[1, "a"], [2, "b"]])
    made.commit(2000, ACCOUNTS.relation(), testing.update(ACCOUNTS, [2, "c"]))
    sync(made, tmp_path)
    made.commit(3000, ACCOUNTS.relation(), testing.update(ACCOUNTS, [3, "lost"]))
    with pytest.raises(
        pf.PgOutputError, match=r"public\.accounts .* no row with \(id\) = \(3\).*copy it again"
    ):
        sync(made, tmp_path, unknown="error")
    assert progress(path)[16390]["lsn"] < 3000  # nothing of the window was written
    found = sync(made, tmp_path)
    assert list(found.stale) == ["public.accounts"]
    assert state(path, "public.accounts") == [{"id": 1, "note": "a"}, {"id": 2, "note": "c"}]
    requests = [*(made.directory / "requests").iterdir()]
    assert [json.loads(one.read_text()) for one in requests] == [{"table": ["public", "accounts"]}]
    # The capture answers with a copy, which has what came before it.
    made.wait(ACCOUNTS, 3100, first=False)
    made.copy(ACCOUNTS, 3200, [[1, "x"], [3, "y"]])
    made.commit(4000, ACCOUNTS.relation(), testing.delete(ACCOUNTS, [1, None], "K"))
    found = sync(made, tmp_path)
    assert found.stale == {}
    assert state(path, "public.accounts") == [{"id": 3, "note": "y"}]
    assert progress(path)[16390]["copy_lsn"] == 3200


def test_a_target_that_lacks_changes(made: MadeDirectory, tmp_path: Path) -> None:
    path = tmp_path / "t.duckdb"
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    sync(made, tmp_path, uncopied="empty")
    old = path.read_bytes()
    made.commit(3000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    sync(made, tmp_path)
    path.write_bytes(old)  # restored from a backup
    made.commit(4000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [3, "c"]))
    with pytest.raises(
        pf.PgOutputError, match=r"public\.accounts before .* goes on for it .* copied again"
    ):
        sync(made, tmp_path)
    path.unlink()  # a new one begins where the directory does
    sync(made, tmp_path, uncopied="empty")
    assert [row["id"] for row in state(path, "public.accounts")] == [1, 2, 3]


def test_a_directory_whose_beginning_is_deleted(made: MadeDirectory, tmp_path: Path) -> None:
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    made.commit(3000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2, "b"]))
    retain(made.directory, Keep(bytes=0), made.writer.store_position)
    with pytest.raises(pf.PgOutputError, match=r"first segments of .* are deleted, so tables"):
        sync(made, tmp_path, uncopied="empty")


def test_a_table_that_is_not_to_follow(made: MadeDirectory, tmp_path: Path) -> None:
    wider = testing.Table(
        "accounts", {"id": "int4", "note": "text", "n": "int4"}, 16390, key=["id"]
    )
    made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [1, "a"]))
    sync(made, tmp_path, uncopied="empty", schema_changes="fail")
    made.commit(3000, wider.relation(), testing.insert(wider, [2, "b", 3]))
    with pytest.raises(
        pf.PgOutputError,
        match=r"public\.accounts was altered, .*were id \(23, -1\), note.*and are id",
    ):
        sync(made, tmp_path, uncopied="empty", schema_changes="fail")
    assert state(tmp_path / "t.duckdb", "public.accounts") == [{"id": 1, "note": "a"}]
    # Without a catalogue nobody knows what the first row has in the new column.
    found = sync(made, tmp_path)
    assert list(found.stale.values()) == [
        (
            "column n is new, and no catalogue that was read says what older rows have in it; no "
            "change tells them"
        )
    ]


def test_what_is_not_a_targets(made: MadeDirectory, tmp_path: Path) -> None:
    path = tmp_path / "t.duckdb"
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("CREATE TABLE mine AS SELECT 1 AS x")
    with pytest.raises(pf.PgOutputError, match=r"has tables that no sync has made"):
        sync(made, tmp_path)
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("DROP TABLE mine")
    sync(made, tmp_path)
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("UPDATE _source SET database = 'other'")
    with pytest.raises(pf.PgOutputError, match=r"tables of database 'other'"):
        sync(made, tmp_path)
    with contextlib.closing(duckdb.connect(str(path))) as connection:
        connection.execute("UPDATE _source SET format = 9")
    with pytest.raises(pf.PgOutputError, match=r"has format 9, and this version knows 1"):
        sync(made, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "duckdb:"}, "names no file"),
        ({"target": "duckdb:/nowhere/at/all/t.duckdb"}, "there is no directory /nowhere/at/all"),
        ({"target": ""}, "target: give"),
        ({"slot": "s"}, "slot does not go together with segments"),
        ({"unknown": "guess"}, "unknown='guess': expected one of 'copy', 'error'"),
        ({"interval": -1}, "interval=-1"),
        ({"window_bytes": 0}, "window_bytes must be 1 at least"),
    ],
)
def test_options_are_checked(
    made: MadeDirectory, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(pf.PgOutputError, match=message):
        sync(made, tmp_path, **options)
    assert not (made.directory / "consumers").exists()


# --- names ---------------------------------------------------------------------------------------


def held(relation_id: int, name: str, stored: str) -> Held:
    return Held(relation_id, "s", name, stored)


def test_stored_names() -> None:
    assert stored_table("public", "accounts") == "public.accounts"
    assert stored_table("a.b", "c/d%") == "a%2Eb.c%2Fd%25"
    assert stored_table("Ä", 'q"u') == "Ä.q%22u"
    assert free_name("s.a", 7, {"s.a"}) == "s.a~7"
    assert free_name("s.A", 7, {"s.a"}) == "s.A~7"
    assert len(free_name("s." + "ä" * 200, 7, ()).encode()) < 255


@pytest.mark.parametrize(
    ("before", "seen", "after"),
    [
        # Renamed.
        ({1: ("b", "s.a")}, [1], {1: "s.b"}),
        # Dropped and made again: the old one stays aside.
        ({1: ("a", "s.a"), 2: ("a", "s.a~2")}, [2], {1: "s.a~1", 2: "s.a"}),
        # Two tables have changed places.
        ({1: ("b", "s.a"), 2: ("a", "s.b")}, [1, 2], {1: "s.b", 2: "s.a"}),
        # Three have.
        ({1: ("b", "s.a"), 2: ("c", "s.b"), 3: ("a", "s.c")}, [3, 1, 2],
         {1: "s.b", 2: "s.c", 3: "s.a"}),
        # Names that differ in case alone: who has it keeps it.
        ({1: ("a", "s.a"), 2: ("A", "s.A~2")}, [2, 1], {1: "s.a", 2: "s.A~2"}),
        # One had no changes since, and another table has its name now.
        ({1: ("a", "s.a"), 2: ("a", "s.b")}, [2], {1: "s.a~1", 2: "s.a"}),
        ({1: ("a", "s.a")}, [], {1: "s.a"}),
    ],
)  # fmt: skip
def test_tables_come_to_their_names(
    before: dict[int, tuple[str, str]], seen: list[int], after: dict[int, str]
) -> None:
    tables = {number: held(number, *names) for number, names in before.items()}
    now = {number: one.stored for number, one in tables.items()}
    for number, name in renames(tables, seen):
        assert name.casefold() not in {one.casefold() for one in now.values()} - {now[number]}
        now[number] = name
    assert now == after
    renamed = {number: one._replace(stored=now[number]) for number, one in tables.items()}
    assert renames(renamed, []) == []
