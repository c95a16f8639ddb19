"""The rules of the history of types and tables, without a server."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.expected_errors import expect_error

pytest.importorskip("pyarrow")

import pyarrow as pa
from support.changelogs.made_history import (
    MOOD,
    NEW,
    OLD,
    OTHER,
    PAIR,
    captured,
    composite,
    copied,
    enum,
    read,
    registry,
    transaction,
    written,
)
from support.changelogs.read_changes import batches_of, changes_of

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.changelog.history import History, HistoryFollower, HistoryPlace
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.changelog.schema_history import (
    DDL_PREFIX,
    HistoryEntry,
    HistoryWriter,
    change_lsns,
    entries,
    forget_before,
    read_change,
    read_seen,
)
from pgoutput_fast.cli import main
from pgoutput_fast.segments import folders
from pgoutput_fast.transactions.runs import runs_of


def place(history: History, lsn: int, commit_lsn: int) -> HistoryPlace:
    found = history.places(np.array([lsn], np.uint64), np.array([commit_lsn], np.uint64))
    return HistoryPlace(*found[:, 0].tolist())


def test_an_equal_read_extends_an_entry(tmp_path: Path) -> None:
    written(tmp_path, read(100, 110), read(200, 210), read(300, 310))
    assert entries(tmp_path) == [HistoryEntry(0, 110)]
    history = History(tmp_path)
    for lsn in (110, 200, 299):
        found = history.registry_at(lsn)
        assert (found.registry, found.uncertain, found.lower, found.upper) == (OLD, {}, 0, 0)
    before, behind = history.registry_at(109), history.registry_at(300)
    assert before.uncertain == behind.uncertain == {PAIR: f"public.type{PAIR}"}
    assert (before.lower, before.upper) == (0, 110)
    assert (behind.lower, behind.upper) == (300, (1 << 64) - 1)


def test_between_two_different_reads_either_may_hold(tmp_path: Path) -> None:
    written(tmp_path, read(100, 110), read(200, 210), read(300, 310, NEW), read(400, 410, NEW))
    assert entries(tmp_path) == [HistoryEntry(0, 110), HistoryEntry(200, 310)]
    history = History(tmp_path)
    # LSN of the change, that of its commit → the oldest and the newest entry that are possible.
    expected = {
        (199, 199): (1, 1), (200, 200): (1, 2), (199, 200): (1, 2), (309, 309): (1, 2),
        (310, 310): (2, 2), (309, 310): (1, 2), (199, 310): (1, 1), (310, 390): (2, 2),
        (109, 310): (0, 1), (390, 400): (2, 3), (400, 400): (2, 3),
    }  # fmt: skip
    assert {key: place(history, *key)[:2] for key in expected} == expected
    assert history.registry_at(250, "older").registry == OLD
    assert history.registry_at(250, "newer").registry == NEW
    assert history.registry_at(199).registry == OLD
    assert history.registry_at(310).registry == NEW


def test_a_state_that_was_read_once_is_never_certain(tmp_path: Path) -> None:
    third = registry(composite(PAIR, "z"))
    written(tmp_path, read(100, 110), read(200, 210, NEW), read(300, 310, third))
    assert entries(tmp_path) == [
        HistoryEntry(0, 110),
        HistoryEntry(100, 210),
        HistoryEntry(200, 310),
    ]
    found = {lsn: place(History(tmp_path), lsn, lsn)[:2] for lsn in (205, 210, 250, 310)}
    assert found == {205: (1, 3), 210: (2, 3), 250: (2, 3), 310: (3, 4)}


def test_only_what_changes_values_is_uncertain(tmp_path: Path) -> None:
    old = registry(composite(PAIR, "x"), enum("a"), composite(OTHER, "o"))
    new = registry(composite(PAIR, "y"), enum("a", "b"), composite(OTHER, "o"))
    written(tmp_path, read(100, 110, old), read(200, 210, new), read(300, 310, new))
    assert History(tmp_path).registry_at(150).uncertain == {PAIR: f"public.type{PAIR}"}


@pytest.mark.parametrize(
    ("running", "lower"),
    [({7, 8}, 300), ({7}, 200), (set(), 100)],
    ids=["both still run", "the later one has ended", "both have ended"],
)
def test_a_commit_in_the_log_that_was_not_seen_yet(
    tmp_path: Path, running: set[int], lower: int
) -> None:
    """A transaction that had not ended in a read may have altered before that read's LSN."""
    written(
        tmp_path, read(100, 110), read(200, 210, unsure={7}), read(300, 310, unsure={7, 8}),
        read(400, 410, NEW, running=running),
    )  # fmt: skip
    assert entries(tmp_path)[-1] == HistoryEntry(lower, 410)


def test_what_is_unsure_confirms_nothing(tmp_path: Path) -> None:
    written(tmp_path, read(100, 110), read(200, 210, unsure={7}))
    assert place(History(tmp_path), 150, 150)[:2] == (1, 2)
    written(tmp_path, read(300, 310))
    assert place(History(tmp_path), 250, 250)[:2] == (1, 1)
    assert [one.lsn for one in read_seen(tmp_path).marks] == ["0/12C"]


def test_a_server_that_lags_tells_nothing(tmp_path: Path) -> None:
    written(tmp_path, read(200, 210), read(100, 110, NEW))
    assert entries(tmp_path) == [HistoryEntry(0, 210)]


class KilledError(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("after", range(3))
def test_a_kill_leaves_files_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    written(tmp_path, read(100, 110), read(200, 210))
    left = [after]
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if not left[0]:
            raise KilledError
        left[0] -= 1
        return rename(path, target)

    with monkeypatch.context() as patched, contextlib.suppress(KilledError):
        patched.setattr(Path, "rename", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # nothing is done behind it
        written(tmp_path, read(300, 310, NEW))
    history = History(tmp_path)
    assert place(history, 150, 150)[:2] == (1, 1)
    assert place(history, 250, 250)[:2] == (1, 2)  # as nothing says what is true there
    assert place(history, 305, 305)[:2] == ((1, 2), (1, 3))[after > 0]
    assert place(history, 310, 310)[:2] == ((1, 2), (2, 3))[after > 0]
    written(tmp_path, read(400, 410, NEW), read(500, 510, NEW))
    assert [one.lower for one in entries(tmp_path)] == [0, 200]
    assert place(History(tmp_path), 450, 450)[:2] == (2, 2)
    folders.delete_unfinished(tmp_path)  # as a capture does when it begins
    assert not list(tmp_path.rglob("*.tmp"))


# --- what an event trigger tells


def message(lsn: int, content: object, *, prefix: str = DDL_PREFIX) -> bytes:
    return testing.message(prefix, json.dumps(content).encode(), lsn, flags=1)


def recorded(writer: HistoryWriter, *frames: bytes) -> None:
    ends = np.cumsum([0, *map(len, frames)])
    (run,) = runs_of(b"".join(frames), ends, np.zeros(len(frames), np.uint64))
    writer.record(run)


def test_messages_become_changes(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 50)
    first, *rest = transaction(
        500, message(410, {"types": [PAIR]}), message(420, {"types": [MOOD, PAIR]})
    )
    recorded(writer, *transaction(300), first, *rest[:1])
    recorded(writer, *rest[1:], *transaction(600, message(590, {"types": []}, prefix="other")))
    recorded(writer, *transaction(700, message(690, {"types": None})))
    recorded(writer, *transaction(800, message(790, "anything"), message(795, {"types": [1]})))
    assert change_lsns(tmp_path) == [500, 700, 800]
    found = [read_change(tmp_path, lsn) for lsn in change_lsns(tmp_path)]
    assert [(pf.parse_lsn(one.first), pf.parse_lsn(one.last)) for one in found] == [
        (410, 420), (690, 690), (790, 795),
    ]  # fmt: skip
    assert [one.types for one in found] == [(PAIR, MOOD), None, None]


def test_a_change_is_exact_where_messages_tell_of_it(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 50)
    both = registry(composite(PAIR, "y"), composite(OTHER, "o"))
    for one in (
        read(100, 110, trigger=True), read(200, 210, trigger=True),
        read(900, 910, both, trigger=True),
    ):  # fmt: skip
        writer.note(one)
    recorded(
        writer, *transaction(500, message(420, {"types": [PAIR]})),
        *transaction(600, message(590, {"types": [OTHER]})),
    )  # fmt: skip
    captured(tmp_path, 1000)
    history = History(tmp_path)
    # LSN of the change, that of its commit → the field that a pair has.
    expected = {
        (450, 450): "x", (499, 550): "x", (510, 550): "y", (410, 500): "x", (420, 500): "y",
        (590, 600): "y", (499, 950): "x", (700, 700): "y", (950, 950): "y",
    }  # fmt: skip
    for key, field in expected.items():
        found = history.types(place(history, *key), "newer")
        assert found.registry.catalog[PAIR].fields[0][0] == field, key
        assert not found.uncertain, key
    # What comes behind the last read is certain, as no message tells of a change.
    assert history.registry_at(999).uncertain == {}
    # Without messages from the beginning on nothing is exact.
    HistoryWriter(tmp_path, None)
    HistoryWriter(tmp_path, 50)
    assert History(tmp_path).registry_at(450).uncertain == {}
    HistoryWriter(tmp_path, None)
    HistoryWriter(tmp_path, 300)
    assert set(History(tmp_path).registry_at(450).uncertain) == {PAIR, OTHER}


def test_a_change_that_may_still_come(tmp_path: Path) -> None:
    """The catalogue is ahead of the stream, in which a second change may come."""
    writer = HistoryWriter(tmp_path, 50)
    for one in (read(200, 210, trigger=True), read(900, 910, NEW, trigger=True)):
        writer.note(one)
    recorded(writer, *transaction(500, message(500, {"types": [PAIR]})))
    captured(tmp_path, 700)
    history = History(tmp_path)
    assert history.registry_at(450).uncertain == {}
    assert set(history.registry_at(650).uncertain) == {PAIR}
    assert set(history.registry_at(750).uncertain) == {PAIR}  # is not in the directory


def test_a_type_that_two_transactions_changed(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 50)
    for one in (read(200, 210, trigger=True), read(900, 910, NEW, trigger=True)):
        writer.note(one)
    for lsn in (500, 600):
        recorded(writer, *transaction(lsn, message(lsn, {"types": [PAIR]})))
    captured(tmp_path, 1000)
    history = History(tmp_path)
    found = {lsn: set(history.registry_at(lsn).uncertain) for lsn in (499, 500, 599, 600)}
    assert found == {499: set(), 500: {PAIR}, 599: {PAIR}, 600: set()}


# --- reading


def values_of(directory: Path, policy: Any) -> list[Any]:
    return [(row["after"] or {}).get("p") for row in changes_of(directory, policy)]


def test_a_batch_is_decoded_in_parts(tmp_path: Path) -> None:
    captured(tmp_path, 1000, (140, 150, "(1)"), (240, 250, "(2)"), (440, 450, "(3)"))
    written(tmp_path, read(60, 70), read(200, 210), read(300, 310, NEW), read(900, 910, NEW))
    with expect_error(code="schema_unknown", parameter="history"):
        changes_of(tmp_path)
    for policy, second in (("older", {"x": 2}), ("newer", {"y": 2})):
        assert values_of(tmp_path, policy) == [{"x": 1}, second, {"y": 3}]


def test_rows_of_a_snapshot_have_the_types_of_their_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "segments"
    captured(directory, 1000, (940, 950, "(2)"))
    copied(directory, 60, json.loads(OLD.to_json()), "(1)")
    written(directory, read(200, 210, NEW), read(960, 970, NEW))
    for policy in ("error", "older", "newer"):
        batches = [batch for _, batch in batches_of(directory, policy)]  # type: ignore[arg-type]
        # The Truncate has no values, but the columns of the rows behind it.
        types = [[*batch.schema.field("after").type.field("p").type] for batch in batches]
        assert [[field.name for field in one] for one in types] == [["x"], ["x"], ["y"]]
        assert values_of(directory, policy) == [None, {"x": 1}, {"y": 2}]
    (one,) = directory.glob("snapshots/*-00000001.arrow")
    for path, fields in ((directory, [{"x": 1}, {"y": 2}]), (one, [{"x": 1}])):
        assert main(["inspect", str(path), "--json", "--values", "typed"]) == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [one["new"]["p"] for one in shown if "new" in one] == fields


def test_a_snapshot_whose_types_were_not_stored(tmp_path: Path) -> None:
    directory = tmp_path / "segments"
    captured(directory, 1000)
    copied(directory, 100, None, "(1)")
    written(directory, read(60, 70), read(960, 970))
    assert values_of(directory, "error") == [None, {"x": 1}]


@pytest.mark.parametrize("types", [7, {}, {"format_version": 1, "types": [{}]}])
def test_a_snapshot_whose_types_are_damaged(tmp_path: Path, types: object) -> None:
    directory = tmp_path / "segments"
    captured(directory, 1000)
    copied(directory, 100, types, "(1)")
    written(directory, read(60, 70))
    with expect_error(code="damaged"):
        changes_of(directory)


def test_a_value_that_only_one_state_can_have(tmp_path: Path) -> None:
    rows = ["(1)", "(2,3)", None, "(4)", "(5,6)"]
    lsns = range(220, 300, 20)
    given = [(lsn, lsn + 5, row) for lsn, row in zip([*lsns, 400], rows, strict=True)]
    captured(tmp_path, 1000, *given)  # type: ignore[arg-type]
    wider = registry(composite(PAIR, "x", "y"))
    written(tmp_path, read(60, 70), read(200, 210), read(310, 320, wider), read(900, 910, wider))
    expected = [{"x": 1}, {"x": 2, "y": 3}, None, {"x": 4}, {"x": 5, "y": 6}]
    for policy in ("error", "older", "newer"):
        assert values_of(tmp_path, policy) == expected
    assert main(["inspect", str(tmp_path), "--json", "--values", "typed", "--tag", "I"]) == 0


def test_of_several_changes_one_may_concern_a_value(tmp_path: Path) -> None:
    """A read that saw another change alone, and was itself followed by one of the type."""
    captured(tmp_path, 1000, (205, 206, "(1)"), (220, 225, "(2,3)"))
    wider = registry(composite(PAIR, "x", "y"))
    reads = [read(60, 70), read(100, 110), read(200, 240, name="u")]
    written(tmp_path, *reads, *(read(at, at + 10, wider, name="u") for at in (300, 900)))
    assert place(History(tmp_path), 220, 225)[:2] == (1, 3)
    for policy in ("error", "older", "newer"):
        assert values_of(tmp_path, policy) == [{"x": 1}, {"x": 2, "y": 3}]


def test_of_two_types_one_may_have_been_altered_before_the_other(tmp_path: Path) -> None:
    def pair(*fields: str) -> dict[str, Any]:
        made = composite(PAIR, *fields)
        return made | {"fields": [*made["fields"], ["o", OTHER, -1]]}

    captured(tmp_path, 1000, (220, 225, '(1,"(7)")'), (230, 235, '(2,3,"(7)")'))
    old = registry(pair("x"), composite(OTHER, "a"))
    new = registry(pair("x", "y"), composite(OTHER, "b"))
    written(tmp_path, read(60, 70, old), read(200, 210, old), read(310, 320, new))
    with expect_error(code="schema_unknown", parameter="history"):
        values_of(tmp_path, "error")
    # It can't be read otherwise.
    for policy in ("older", "newer"):
        assert values_of(tmp_path, policy) == [
            {"x": 1, "o": {"a": 7}}, {"x": 2, "y": 3, "o": {"b": 7}},
        ]  # fmt: skip


def test_a_type_that_no_entry_has(tmp_path: Path) -> None:
    captured(tmp_path, 1000, (140, 150, "(1)"))
    written(tmp_path, read(60, 70, registry()), read(900, 910, registry()))
    with expect_error(code="schema_unknown", parameter="history"):
        changes_of(tmp_path)
    assert len(changes_of(tmp_path, "newer")) == 1


def test_a_frame_that_the_wrong_type_refuses(tmp_path: Path) -> None:
    captured(tmp_path, 1000, (240, 250, "(2,3)"))
    written(tmp_path, read(60, 70), read(200, 210), read(300, 310, registry(composite(PAIR, "z"))))
    with expect_error(parameter="history"):
        changes_of(tmp_path)


def test_frames_of_any_length_have_tags(tmp_path: Path) -> None:
    data = pa.chunked_array([[b"", b"C"], [], [b"B", b""]], pa.binary())
    parts = HistoryFollower(History(tmp_path), "error").parts(
        data, np.zeros(4), None, tmp_path, "UTF8"
    )
    assert list(parts) == [(0, 4)]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("seen.json", "{", "damaged"),
        ("seen.json", '{"format_version": 2}', "not_supported"),
        ("seen.json", '{"format_version": 1, "entry": 7}', "damaged"),
        ("seen.json", "[]", "damaged"),
        (HistoryEntry(0, 110).name, '{"format_version": 1}', "damaged"),
        ("seen.json", "{}", "not_supported"),
        (HistoryEntry(0, 110).name, "{}", "not_supported"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: str, code: str) -> None:
    written(tmp_path, read(100, 110), read(200, 210))
    (tmp_path / "history" / name).write_text(content)
    with expect_error(code=code, path=str(tmp_path / "history" / name)):
        History(tmp_path).registry_at(150)


def test_what_concerns_only_deleted_segments_is_deleted(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 50)
    for one in (read(100, 110), read(200, 210, NEW), read(300, 310), read(400, 410, NEW)):
        writer.note(one)
    for lsn in (150, 250, 350):
        recorded(writer, *transaction(lsn, message(lsn, {"types": [PAIR]})))
    assert forget_before(tmp_path, 309) == 1
    # The entry that is in force, and the one before it.
    assert [one.start for one in entries(tmp_path)] == [110, 210, 310, 410]
    assert change_lsns(tmp_path) == [250, 350]
    assert forget_before(tmp_path, 100) == 0
    assert forget_before(tmp_path, 310) == 2
    assert [one.start for one in entries(tmp_path)] == [210, 310, 410]
    assert History(tmp_path).registry_at(1000).registry == NEW


def test_a_directory_without_history(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert history.is_empty
    with expect_error(code="schema_unknown", path=str(tmp_path)):
        history.registry_at(1)


def test_a_kill_before_it_is_written_how_long_an_entry_was_seen(tmp_path: Path) -> None:
    written(tmp_path, read(100, 110), read(200, 210))
    before = (tmp_path / "history/seen.json").read_bytes()
    written(tmp_path, read(300, 310, NEW))
    (tmp_path / "history/seen.json").write_bytes(before)
    written(tmp_path, read(400, 410))
    assert entries(tmp_path)[-1] == HistoryEntry(300, 410)


def test_retention_deletes_what_concerns_only_deleted_segments(tmp_path: Path) -> None:
    captured(tmp_path, 1000, (140, 150, "(1)"), (440, 450, "(2)"))
    written(
        tmp_path, read(20, 30, NEW), read(60, 70), read(200, 210, NEW), read(900, 910),
        read(950, 960),
    )  # fmt: skip
    assert retain(tmp_path, Keep(seconds=1e9), lambda: None) == 0
    assert retain(tmp_path, Keep(seconds=0.0), lambda: None) == 2  # a segment, an entry
    assert [one.start for one in entries(tmp_path)] == [70, 210, 910]


def test_tables_are_made_of_an_entry_once(tmp_path: Path) -> None:
    written(tmp_path, read(100, 110), read(200, 210, NEW, name="u"))
    history = History(tmp_path)
    newer, older = history.tables_at(150).catalog, history.tables_at(150, "older").catalog
    assert (newer.database, older.database) == ("u", "t")
    assert history.tables_at(300).catalog is newer
    assert history.tables_at(99).catalog is older
