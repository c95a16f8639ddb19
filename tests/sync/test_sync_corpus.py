"""Recorded streams through `sync`: the tables end in the rows that the server copied.

Each protocol version, as text and binary, cut into windows anywhere, by both implementations, into
all kinds of targets, which take turns. The captures of tests/data always; with `--corpus DIR` those
of a whole corpus.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.columns.final_rows import Copy, committed, copies
from support.expected_errors import expect_error
from support.paths import DATA
from support.postgres.server_text import ServerText, comparable
from support.recordings.corpus_files import POLICIES, TEXT, Capture, Truth, captures, truth_of
from support.recordings.recorded_directory import Recorded
from support.targets.synced_tables import KINDS, TABLES, Tables
from support.values.render import Renderer

import pgoutput_fast as pf
from pgoutput_fast import apply
from pgoutput_fast.apply.naming import stored_table

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

FINAL = DATA / "final"
"""Beside which there is what the server copied."""

PARTS_OF_TABLES = re.compile(r".*/(\w+_(only|pub2|origin_none|error|emptypub)|\w+guc\w)")
"""Captures that leave out changes, rows or all of it on the way, or that no capture would make, as
its sessions have settings of their own."""
SELECTED = {
    # Tables of 1600 columns take most of the time. One has a test of its own.
    "dml": ("[!p]*.*", "public.[!w]*"),
    # `ty`: see below.
    "schema_evolution": ("[!p]*.*", "public.[!t]*"),
}
STALE = {
    # Columns that were added; which of them depends on the windows.
    "ev": "is new, and the catalogue does not say which value older rows have in it",
    # A generated column that became a plain one, without a change behind that.
    "d_gen": "is new, and the catalogue does not say which value older rows have in it",
}
"""Tables whose rows can't be known, and why."""
DIFFERENT = {
    "ul": (0, 1),  # a row of when it was UNLOGGED
    # A partition was truncated, which its root does not tell; a row of a detached one.
    "pt": (9, 1),
    "pt_2": (0, 1),
}
"""Tables of which no stream tells all: rows that the server has not, and that it alone has."""
CUTS = ("whole", "transactions", "random")
MOST_WINDOWS = 8
"""Of a capture that is cut after each transaction: the rest comes in one."""


def truth(capture: Capture) -> Truth:
    """What the server copied."""
    path = capture.root / capture.entry["truth"]
    return truth_of(path if capture.root != DATA else FINAL / capture.entry["truth"])


def is_whole(capture: Capture) -> bool:
    return not (
        PARTS_OF_TABLES.fullmatch(capture.name)
        or capture.entry["performance"]
        or capture.entry.get("cut")
    )


def recorded(root: Path | None) -> list[Capture]:
    if root is not None:
        return list(filter(is_whole, captures(root)))
    found = {one.name: one for place in (DATA, FINAL) for one in captures(place) if is_whole(one)}
    return [found[name] for name in sorted(found)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each capture, with each target; implementations and cuts take turns."""
    if "cut" not in metafunc.fixturenames:
        return
    corpus = metafunc.config.getoption("--corpus")
    parameters = []
    for number, capture in enumerate(recorded(None if corpus is None else Path(corpus))):
        # Of Delta tables, who writes them takes turns, and the kind of their change tables.
        duckdb, *deltas = [*TABLES]
        first, others = deltas[:2], deltas[2:]
        turns = [duckdb, first[number % 2], others[number % len(others)]]
        kinds = {one for n, one in enumerate(turns) if corpus is not None or n == number % 3}
        kinds |= {kind for name, kind in QUICK if name == capture.name}
        for place, kind in enumerate(sorted(kinds)):
            implementation = IMPLEMENTATIONS[(number // 2 + place) % len(IMPLEMENTATIONS)]
            cut = QUICK.get((capture.name, kind)) or CUTS[number // 3 % len(CUTS)]
            parameters.append(
                pytest.param(
                    capture, kind, implementation, cut,
                    id=f"{capture.name}-{kind}-{implementation}-{cut}",
                    marks=[] if (capture.name, kind) in QUICK else [pytest.mark.slow],
                )
            )  # fmt: skip
    metafunc.parametrize(("capture", "kind", "implementation", "cut"), parameters)


QUICK = {
    ("16/two_phase/v4_par_2pc_imm_bin", "duckdb"): "transactions",
    ("16/streaming/v2_stream", "delta"): "random",
}


# --- what the server has -------------------------------------------------------------------------


def publications(capture: Capture) -> list[str]:
    return re.findall(r'"((?:[^"]|"")*)"', capture.options["publication_names"])


def expected(capture: Capture) -> dict[int, Copy]:
    """By OID what a table of the capture's publications ends in."""
    found = truth(capture)
    wanted = publications(capture)
    last = found.catalog()[-1]
    published = {
        (row["schema"], row["table"]) for row in last["publication_tables"] if row["pub"] in wanted
    }
    result = {
        copy.oid: copy
        for copy in copies(found.path, "default", "utf-8")
        if (copy.schema, copy.table) in published
    }
    in_part: dict[int, Copy] = {}
    for name in wanted:
        for copy in copies(found.path, "default", "utf-8", name):
            if copy.oid in in_part:  # of two row filters what either lets through
                more = [row for row in copy.text if row not in in_part[copy.oid].text]
                in_part[copy.oid].text.extend(more)
            else:
                in_part[copy.oid] = copy
    return result | in_part


class Server:
    """The server's rows, in the types that columns of a target have."""

    def __init__(self, capture: Capture) -> None:
        snapshots = truth(capture).catalog()
        rows = {int(row["oid"]): row for one in snapshots for row in one["types"]}
        self._types = Renderer(rows.values())
        arrays = POLICIES.get(capture.entry["scenario"]) is not TEXT
        self._text = ServerText(snapshots, arrays=arrays)
        self._is_binary = capture.options.get("binary") == "true"
        self._columns = {
            (table["oid"], column["name"]): int(column["type_oid"])
            for one in snapshots
            for table in one["tables"]
            for column in table["columns"]
        }

    def column(self, copy: Copy, name: str, kind: pa.DataType) -> list[Any]:
        """The values of a column."""
        oid, at = self._columns[copy.oid, name], copy.columns.index(name)
        names = self._types.scalars(oid)
        differs = pa.types.is_binary(kind) or any(
            one == "money" or one.startswith("reg") for one in names
        )
        if self._is_binary and differs and copy.binary is not None:
            return [self._text.read_binary(row[at], oid, kind) for row in copy.binary]
        return [self._text.read(row[at], oid, kind) for row in copy.text]


def changes_told(impl: ModuleType, capture: Capture) -> collections.Counter[tuple[int, str]]:
    """How many changes were committed, by the OID of their table and the kind."""
    kinds = {"I": "insert", "U": "update", "D": "delete"}
    found: collections.Counter[tuple[int, str]] = collections.Counter()
    decoder = impl.Decoder(encoding=capture.entry["client_encoding"])
    for change in committed(map(decoder.decode, (frame for _, frame in capture.rows()))):
        if change.tag == "T":
            found.update((oid, "truncate") for oid in change.relation_ids)
        else:
            found[change.relation.relation_id, kinds[change.tag]] += 1
    return found


# --- beside what the targets have ----------------------------------------------------------------


def in_utc(value: Any) -> Any:
    """A time with its zone's name as one with the offset."""
    is_zoned = isinstance(value, datetime.datetime) and value.tzinfo is not None
    return value.astimezone(datetime.timezone.utc) if is_zoned else value


def compare_rows(tables: Tables, held: dict[str, Any], copy: Copy, server: Server) -> int:
    """The number of values of a state table, all of which are the server's."""
    rows = tables.state(held["stored"])
    if not copy.columns:  # another one stands for them
        assert rows.num_rows == len(copy.text)
        return 0
    names = rows.column_names
    found, wanted = [], []
    for name in names:
        kind = rows.schema.field(name).type
        found.append([comparable(in_utc(value)) for value in rows.column(name).to_pylist()])
        wanted.append([comparable(value) for value in server.column(copy, name, kind)])
    mine, its = (collections.Counter(zip(*one, strict=True)) for one in (found, wanted))
    more, less = mine - its, its - mine
    assert (more.total(), less.total()) == DIFFERENT.get(copy.table, (0, 0)), (
        copy.table, list(more)[:2], list(less)[:2]
    )  # fmt: skip
    return rows.num_rows * len(names)


def compare_changes(
    tables: Tables, held: dict[str, Any], told: collections.Counter[tuple[int, str]]
) -> int:
    """The number of changes of a table, each of which is there once."""
    relation_id = held["relation_id"]
    places, kinds = [], []
    for version in range(1, held["version"] + 1):
        columns = tables.changes(held["stored"], version).select(["commit_lsn", "seq", "op"])
        for row in columns.to_pylist():
            places.append((row["commit_lsn"], row["seq"]))
            kinds.append(row["op"])
    assert len(set(places)) == len(places)
    assert all(place[0] < held["lsn"] for place in places)
    expected_kinds = {kind: n for (oid, kind), n in told.items() if oid == relation_id}
    assert collections.Counter(kinds) == expected_kinds
    return len(kinds)


def compare(impl: ModuleType, capture: Capture, tables: Tables, directory: Path) -> int:
    """Compare everything; the number of values, or of changes where there are no rows."""
    server = Server(capture)
    told = changes_told(impl, capture)
    progress = tables.progress()
    values = 0
    every = expected(capture)
    requested = {json.loads(one.read_text())["table"][1]
                 for one in (directory / "requests").glob("*")}  # fmt: skip
    for oid, held in progress.items():
        assert held["lsn"] > 0
        reason = STALE.get(held["table"]) if tables.has_state else None
        assert (held["stale"] is None) == (reason is None), held
        assert (held["table"] in requested) == (reason is not None)
        if reason is not None:
            assert reason in held["stale"]
        changes = compare_changes(tables, held, told)
        if not tables.has_state:
            values += changes
            continue
        # Of a table that was dropped, nobody copied what it had.
        if oid in every and reason is None:
            copy = every[oid]
            assert held["stored"] == stored_table(copy.schema, copy.table)
            values += compare_rows(tables, held, copy, server)
    # Of tables that were left out, or empty all the while, there is nothing.
    assert all(
        oid in progress or not copy.text or is_left_out(capture, copy)
        for oid, copy in every.items()
    )
    return values


def is_left_out(capture: Capture, copy: Copy) -> bool:
    return capture.entry["scenario"] in SELECTED and copy.table[0] in "tw"


@contextlib.contextmanager
def directory_of(capture: Capture, path: Path) -> Iterator[Recorded]:
    with contextlib.closing(Recorded(path / "segments", capture, truth(capture))) as found:
        yield found


def synced(capture: Capture, directory: Path, into: Tables, **options: Any) -> int:
    """Sync, and return how many windows that took."""
    scenario = capture.entry["scenario"]
    options = {
        "uncopied": "empty", "policies": POLICIES.get(scenario), "tables": SELECTED.get(scenario),
        **options,
    }  # fmt: skip
    found = apply.sync(segments=directory, **into.given, until="now", **options)
    return found.windows


def sync_in_windows(capture: Capture, made: Recorded, tables: Tables, cut: str) -> int:
    chance = random.Random(capture.name)
    if cut == "random":
        windows = 0
        for _ in made.write(lambda: chance.random() < 0.3):
            if chance.random() < 0.15:
                size = chance.choice((1, 3000, 1 << 26))
                windows += synced(capture, made.directory, tables, window_bytes=size)
        return windows + synced(capture, made.directory, tables)
    ends = 0

    def is_end() -> bool:
        nonlocal ends
        ends += 1
        return cut == "transactions" and ends <= MOST_WINDOWS

    for _ in made.write(is_end):
        pass
    size = 1 if cut == "transactions" else 1 << 26
    return synced(capture, made.directory, tables, window_bytes=size)


@pytest.mark.everyday("duckdb")
def test_tables_end_in_the_rows_that_the_server_copied(
    capture: Capture, kind: str, implementation: str, cut: str, tmp_path: Path,
    both: tuple[ModuleType, ModuleType],
) -> None:  # fmt: skip
    tables = TABLES[kind](tmp_path)
    with chosen(implementation), directory_of(capture, tmp_path) as made:
        windows = sync_in_windows(capture, made, tables, cut)
        values = compare(both[0], capture, tables, made.directory)
    # Windows for executors end before a layout change.
    assert windows == 1 or cut != "whole" or kind.startswith("distributed")
    assert values > 0


# --- what can't be known -------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return TABLES[request.param](tmp_path)


def capture_of(name: str) -> Capture:
    (found,) = (one for one in recorded(None) if one.name == name)
    return found


def write_all(made: Recorded, skipped: int = 0) -> None:
    for _ in made.write(lambda: True, skipped):
        pass


@pytest.mark.slow
def test_a_directory_that_lacks_the_first_changes(tables: Tables, tmp_path: Path) -> None:
    """Said to begin with empty tables, which they were not."""
    capture = capture_of("16/dml/v1_bin")
    wanted = ["public.d_pk", "public.d_full"]
    with directory_of(capture, tmp_path) as made:
        write_all(made, skipped=4)
        with expect_error(code="unfit_row"):
            synced(capture, made.directory, tables, tables=wanted, on_error="stop")
        assert tables.progress() == {}
        synced(capture, made.directory, tables, tables=wanted)
        assert len(list((made.directory / "requests").iterdir())) > 0
    reasons = [held["stale"] for held in tables.progress().values() if held["stale"]]
    assert reasons
    assert all("no row with" in reason for reason in reasons)


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["16/schema_evolution/v1_text", "18/schema_evolution/v1_bin"])
def test_types_that_were_altered_between_two_reads(
    capture: str, tables: Tables, tmp_path: Path
) -> None:
    """A composite has got a field and lost another since the catalogue was read, and before."""
    recording = capture_of(capture)
    with directory_of(recording, tmp_path) as made:
        write_all(made)
        with pytest.raises(pf.PgOutputError, match=r"public\.ty"):
            synced(recording, made.directory, tables, tables="public.ty", on_error="stop")
    assert "ty" not in {held["table"] for held in tables.progress().values()}


@pytest.mark.slow
def test_tables_that_are_copied_again(
    tables: Tables, tmp_path: Path, both: tuple[ModuleType, ModuleType]
) -> None:
    """What was not known is the server's after a copy."""
    capture = capture_of("16/schema_evolution/v1_text")
    (copy,) = (one for one in expected(capture).values() if one.table == "ev")
    decoder = both[0].Decoder()
    relation = b""
    for _, frame in capture.rows():
        message = decoder.decode(frame)
        if isinstance(message, pf.Relation) and message.relation_id == copy.oid:
            relation = frame
    with directory_of(capture, tmp_path) as made:
        write_all(made)
        synced(capture, made.directory, tables)
        assert STALE["ev"] in tables.progress()[copy.oid]["stale"]
        lsn = made.copy(relation, (copy.schema, copy.table), copy.text)
        synced(capture, made.directory, tables)
    held = tables.progress()[copy.oid]
    assert (held["stale"], held["copy_lsn"]) == (None, lsn)
    assert compare_rows(tables, held, copy, Server(capture)) > 0


@pytest.mark.slow
def test_the_widest_table(tables: Tables, tmp_path: Path) -> None:
    capture = capture_of("16/dml/v1_bin")
    (copy,) = (one for one in expected(capture).values() if one.table == "w1600")
    with directory_of(capture, tmp_path) as made:
        write_all(made)
        synced(capture, made.directory, tables, tables=["public.w1600"])
    (held,) = tables.progress().values()
    assert compare_rows(tables, held, copy, Server(capture)) == 1600 * len(copy.text)
