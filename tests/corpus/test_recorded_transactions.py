"""Whole transactions of recorded streams: every protocol version gives those of protocol 1.

And they are the ones that test_decoding told of. The captures of tests/data always; those of
`--corpus DIR` (make test-corpus) too where it is given. Captures that were cut are compared up to
where the shorter one ends.
"""

from __future__ import annotations

import functools
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.nightly import marks
from support.paths import DATA
from support.recordings.corpus_files import Capture, Change, captures
from support.recordings.told_changes import DETACHED, KINDS, PARTIAL, agrees

pytest.importorskip("pyarrow", reason="captures are Arrow files")

from support.columns.columnar import IMPLEMENTATIONS, chosen

import pgoutput_fast as pf
from pgoutput_fast.segments import SegmentMetadata, SegmentReader, SegmentWriter, list_segments
from pgoutput_fast.transactions import Assembler, Transaction
from pgoutput_fast.transactions.runs import runs_of


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


class Whole(NamedTuple):
    """A transaction, or a message outside of any, as it was delivered."""

    kind: str
    xid: int | None
    commit_lsn: int
    end_lsn: int
    commit_time: int | None
    origin: str | None
    gid: str | None
    frames: list[bytes]
    messages: list[Any]

    @property
    def content(self) -> list[bytes]:
        """The frames of changes and messages."""
        return [frame for frame in self.frames if frame[:1] in (b"I", b"U", b"D", b"T", b"M")]


def assembled(capture: Capture, **options: Any) -> list[Whole]:
    """A capture's transactions, of reads of any size; large ones go through a file."""
    assembler = Assembler(max_memory=20_000, encoding=capture.encoding, **options)
    rows = list(capture.rows())
    sizes = random.Random(capture.name)
    found: list[Transaction] = []
    start = 0
    while start < len(rows):
        part = rows[start : start + sizes.choice((1, 10, 500))]
        found += assembler.feed([frame for _, frame in part], [lsn for lsn, _ in part])
        start += len(part)
    return [
        Whole(
            one.kind, one.xid, one.commit_lsn, one.end_lsn, one.commit_time, one.origin, one.gid,
            list(one.frames()), list(one),
        )
        for one in found
    ]  # fmt: skip


@functools.lru_cache(maxsize=3)
def transactions(implementation: str, root: Path, name: str) -> list[Whole]:
    """The same, by the capture's name: a capture is often compared with several others."""
    (found,) = (one for one in captures(root) if one.name == name)
    return assembled(found)


def has_messages(capture: Capture) -> bool:
    return capture.options.get("messages") == "true"


def asked_for(capture: Capture) -> tuple[Any, ...]:
    """What two sessions have in common to which the server sends the same changes."""
    options = capture.options
    return (
        capture.entry["instance"], capture.entry["scenario"], capture.entry["guc_set"],
        capture.entry["client_encoding"], options["publication_names"],
        options.get("binary", "false"), options.get("origin", "any"),
        options.get("publish_generated_columns"),
    )  # fmt: skip


def reference(capture: Capture) -> Capture | None:
    """The capture of protocol 1 with the same changes, if there is one with the messages too.

    Where no session had protocol 1, it is the first of the others.
    """
    similar = [
        one
        for one in captures(capture.root, scenario=capture.entry["scenario"])
        if asked_for(one) == asked_for(capture)
    ]
    similar.sort(
        key=lambda one: (
            one.options["proto_version"] != "1", has_messages(one) != has_messages(capture),
        )
    )  # fmt: skip
    return None if similar[0] == capture else similar[0]


CHOICES: dict[str, Callable[[Capture], bool]] = {
    "compared": lambda capture: reference(capture) is not None,
    "told": lambda capture: (
        capture.truth is not None and not any(p in capture.entry["optionset"] for p in PARTIAL)
    ),
    "two_phase": lambda capture: capture.options.get("two_phase") == "true",
}
"""Name of a test's argument → of which captures it is."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = next((name for name in CHOICES if name in metafunc.fixturenames), None)
    if name is None:
        return
    roots = [("data", DATA)]
    if (corpus := metafunc.config.getoption("--corpus")) is not None:
        roots.append(("corpus", Path(corpus)))
    metafunc.parametrize(
        name,
        [
            pytest.param(
                one,
                id=f"{root}/{one.name}",
                marks=[pytest.mark.corpus] if root == "corpus" else marks(one.name),
            )
            for root, path in roots
            for one in captures(path)
            if CHOICES[name](one)
        ],
    )


def rolled_back_in_part(capture: Capture) -> set[int]:
    """Streamed transactions of which a subtransaction was rolled back."""
    aborts = (frame for _, frame in capture.rows() if frame[:1] == b"A")
    return {int.from_bytes(one[1:5], "big") for one in aborts if one[1:5] != one[5:9]}


def comparable(frames: list[bytes], messages: bool) -> list[bytes]:
    """What protocol 1 and streamed transactions have alike.

    In stream chunks Origin does not have the LSN of the commit that it came with. And as a chunk
    repeats what is known, it brings the new name of a type that was renamed; protocol 1 does not,
    as the table is the same. So a Type counts only with the Relation that it is sent for.
    """
    found: list[bytes] = []
    types: list[bytes] = []
    for frame in frames:
        if frame[:1] == b"Y":
            types.append(frame)
            continue
        if frame[:1] == b"R":
            found += types
        types = []
        if frame[:1] == b"O":
            frame = b"O" + bytes(8) + frame[9:]
        if frame[:1] != b"M" or messages:
            found.append(frame)
    return found


def without_surplus(found: list[bytes], expected: list[bytes]) -> tuple[list[bytes], int]:
    """A transaction's frames without the messages that the expected ones do not have."""
    kept = [frame for frame in found if frame[:1] != b"M" or frame in expected]
    return kept, len(found) - len(kept)


@pytest.mark.slow
def test_every_protocol_gives_the_transactions_of_protocol_1(
    implementation: str, compared: Capture, say: Callable[[str], None]
) -> None:
    """Frame for frame, with the same xid, LSNs, time and origin, in the same order."""
    usual = reference(compared)
    assert usual is not None
    messages = has_messages(compared) and has_messages(usual)
    sides = [
        [
            one._replace(frames=comparable(one.frames, messages), messages=[], gid=None)
            for one in transactions(implementation, capture.root, capture.name)
        ]
        for capture in (usual, compared)
    ]
    # Which transactions without a change are sent depends on the version and on the protocol.
    expected, found = ([one for one in side if one.content] for side in sides)
    if compared.entry.get("cut") or usual.entry.get("cut"):
        end = min(max(one.end_lsn for one in side) for side in (expected, found))
        expected, found = (
            [one for one in side if one.end_lsn <= end] for side in (expected, found)
        )
    assert [one[:6] for one in found] == [one[:6] for one in expected]
    may_have_more = rolled_back_in_part(compared)
    more = 0
    for one, wanted in zip(found, expected, strict=True):
        frames = one.frames
        if one.xid in may_have_more:
            # A message of a rolled-back savepoint before its first row can't be told from others.
            frames, surplus = without_surplus(frames, wanted.frames)
            more += surplus
        assert frames == wanted.frames, (one.xid, pf.format_lsn(one.commit_lsn))
    said = f", {more} messages more" if more else ""
    say(
        f"{compared.name}, {implementation}: {len(found)} transactions are those of "
        f"{usual.entry['optionset']}{said}"
    )


class Row(NamedTuple):
    """A frame in a segment, with what stands beside it. A message outside has no xid."""

    data: bytes
    xid: int | None
    commit_lsn: int | None
    seq: int | None
    commit_time: int | None
    lsn: int


@functools.lru_cache(maxsize=3)
def segment_rows(implementation: str, root: Path, name: str) -> list[Row]:
    """What a capture of the stream puts into segments, of reads of any size."""
    (capture,) = (one for one in captures(root) if one.name == name)
    assembler = Assembler(max_memory=20_000, encoding=capture.encoding)
    metadata = SegmentMetadata(
        "7", "db", "s", ("p",), 10000 * capture.major, "UTF8", {}, capture.options
    )
    rows = list(capture.rows())
    sizes = random.Random(capture.name)
    start = 0
    found = []
    with tempfile.TemporaryDirectory() as directory:
        # All in one file, so that nothing is repeated.
        with SegmentWriter(
            directory, metadata, confirmed_flush_lsn=0, segment_bytes=1 << 40
        ) as writer:
            while start < len(rows):
                part = rows[start : start + sizes.choice((1, 10, 500))]
                start += len(part)
                runs = runs_of([frame for _, frame in part], None, [lsn for lsn, _ in part])
                for group in assembler.feed_groups(runs):
                    for run in group.runs():
                        writer.write_run(run)
            writer.flush()
        for segment in list_segments(directory):
            with SegmentReader(segment.path) as reader:
                for batch in reader:
                    columns = [batch[field].to_pylist() for field in Row._fields]
                    found += [Row(*row) for row in zip(*columns, strict=True)]
    return found


def comparable_rows(rows: list[Row], messages: bool) -> list[tuple[int, list[Row]]]:
    """The transactions in segments as far as they have to be alike: end LSN and rows of each.

    Left out are, as in `comparable`, what Origins in stream chunks and Types without their Relation
    differ in, and transactions without a change. The column `lsn` is compared for changes alone: a
    Begin has the LSN of the first change that was sent, which may be one of an unpublished table or
    a message, and an Origin in a chunk that of the chunk's first change.
    """
    found = []
    whole: list[Row] = []
    for row in rows:
        whole.append(row)
        if row.data[:1] != b"C" and row.xid is not None:
            continue
        kept = iter(comparable([one.data for one in whole], messages))
        wanted = next(kept, None)
        alike = []
        for one in whole:
            data = one.data
            if data[:1] == b"O":
                data = b"O" + bytes(8) + data[9:]
            if data == wanted:
                alike.append(one._replace(data=data, lsn=one.lsn if data[:1] in CONTENT else 0))
                wanted = next(kept, None)
        assert wanted is None
        if any(one.data[:1] in CONTENT for one in alike):
            end = row.lsn
            found.append((end, alike))
        whole = []
    assert not whole
    return found


CONTENT = (b"I", b"U", b"D", b"T", b"M")


@pytest.mark.slow
def test_segments_of_every_protocol_are_those_of_protocol_1(
    implementation: str, compared: Capture, say: Callable[[str], None]
) -> None:
    """Byte for byte in data, xid, commit LSN, commit time and seq."""
    usual = reference(compared)
    assert usual is not None
    messages = has_messages(compared) and has_messages(usual)
    expected, found = (
        comparable_rows(segment_rows(implementation, one.root, one.name), messages)
        for one in (usual, compared)
    )
    if compared.entry.get("cut") or usual.entry.get("cut"):
        last = min(max(end for end, _ in side) for side in (expected, found))
        expected, found = ([one for one in side if one[0] <= last] for side in (expected, found))
    assert [end for end, _ in found] == [end for end, _ in expected]
    may_have_more = rolled_back_in_part(compared)
    count = 0
    for (end, rows), (_, wanted) in zip(found, expected, strict=True):
        if rows[0].xid in may_have_more:
            # As of frames: a message of a savepoint that was rolled back.
            frames = [one.data for one in wanted]
            rows = [one for one in rows if one.data[:1] != b"M" or one.data in frames]
        assert rows == wanted, pf.format_lsn(end)
        count += len(rows)
    say(
        f"{compared.name}, {implementation}: {count} rows of segments are those of "
        f"{usual.entry['optionset']}"
    )


_NAME = re.compile(r'((?:[^."]|"(?:[^"]|"")*")+)\.((?:[^."]|"(?:[^"]|"")*")+)')


def name_of(told: str) -> tuple[str, str]:
    """Schema and name of a table as test_decoding writes them."""
    matched = _NAME.fullmatch(told)
    assert matched is not None, told
    schema, name = (
        one[1:-1].replace('""', '"') if one.startswith('"') else one for one in matched.groups()
    )
    return schema, name


def changes_of(one: Whole, relations: dict[int, Any]) -> Iterator[tuple[str, set[Any], Any]]:
    """Kind, tables and message of each change; `relations` is what was announced, by OID."""
    for message in one.messages:
        if message.tag == "R":
            relations[message.relation_id] = message
        elif message.tag in "IUD":
            relation = message.relation
            yield KINDS[type(message).__name__], {(relation.namespace, relation.name)}, message
        elif message.tag == "T":
            tables = [relations[oid] for oid in message.relation_ids]
            yield "TRUNCATE", {(table.namespace, table.name) for table in tables}, message
        elif message.tag == "M":
            yield "MESSAGE", set(), message


def text_of_message(message: Any, capture: Capture) -> str:
    """As test_decoding prints it; the content has the server's encoding."""
    encoding = {"LATIN1": "latin-1"}.get(capture.entry["server_encoding"], "utf-8")
    content = message.content.decode(encoding, "surrogateescape")
    return (
        f"message: transactional: {message.flags & 1} prefix: {message.prefix}, "
        f"sz: {len(message.content)} content:{content}"
    )


@pytest.mark.everyday("cython")
def test_transactions_are_those_of_test_decoding(
    implementation: str, told: Capture, say: Callable[[str], None]
) -> None:
    """The same changes in the same order, each with its tables and its values."""
    assert told.truth is not None
    relations: dict[int, Any] = {}
    found = [
        (one, list(changes_of(one, relations)))
        for one in transactions(implementation, told.root, told.name)
    ]
    found = [(one, changes) for one, changes in found if changes]
    published = {
        (table, kind) for _, changes in found for kind, tables, _ in changes for table in tables
    }
    messages = has_messages(told)

    def was_sent(change: Change) -> bool:
        if change.kind == "MESSAGE":
            return messages
        return DETACHED not in change.text and any(
            (name_of(table), change.kind) in published for table in change.tables
        )

    last = max((one.end_lsn for one, _ in found), default=0)
    wanted = [
        (one, changes)
        for one in told.truth.delivered
        if (changes := [change for change in one.changes if was_sent(change)])
        and (one.end_lsn <= last or not told.entry.get("cut"))
    ]
    assert [(one.xid, one.end_lsn) for one, _ in found] == [
        (one.xid, one.end_lsn) for one, _ in wanted
    ]
    may_have_more = rolled_back_in_part(told)
    count = 0
    for (one, changes), (_, expected) in zip(found, wanted, strict=True):
        if one.xid in may_have_more:
            texts = {change.text for change in expected}
            changes = [
                change
                for change in changes
                if change[0] != "MESSAGE" or text_of_message(change[2], told) in texts
            ]
        assert [kind for kind, _, _ in changes] == [change.kind for change in expected]
        for (kind, tables, message), change in zip(changes, expected, strict=True):
            count += 1
            if kind == "MESSAGE":
                assert text_of_message(message, told) == change.text
                continue
            assert tables == {
                name_of(table) for table in change.tables if (name_of(table), kind) in published
            }
            if kind == "TRUNCATE":
                assert message.cascade is ("cascade" in change.text)
                assert message.restart_identity is ("restart_seqs" in change.text)
            else:
                assert agrees(message, change, told), (message, change.text)
    assert count
    say(
        f"{told.name}, {implementation}: {len(found)} transactions and {count} changes are "
        "those of test_decoding"
    )


@pytest.mark.slow
def test_prepared_transactions_have_at_prepare_what_they_have_at_commit(
    implementation: str, two_phase: Capture
) -> None:
    found = transactions(implementation, two_phase.root, two_phase.name)
    at_commit = [one for one in found if one.gid is not None]
    at_prepare = assembled(two_phase, prepared="prepare")
    contents = {(one.xid, one.gid): one.content for one in at_prepare if one.kind == "prepare"}
    ended = [one for one in at_prepare if one.kind == "commit prepared"]
    assert [one[1:5] for one in ended] == [one[1:5] for one in at_commit]
    assert not any(one.content for one in ended)
    for one in at_commit:
        assert contents.get((one.xid, one.gid), []) == one.content
    others = [one for one in at_prepare if one.gid is None]
    assert [(one[:6], one.content) for one in others] == [
        (one[:6], one.content) for one in found if one.gid is None
    ]
