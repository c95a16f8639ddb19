"""Whole streams of real servers against what the servers themselves told of them.

The captures of tests/data always; those of `--corpus DIR` (make test-corpus) too where it is given.
Both implementations decode every frame, the counts are those of index.json, and the changes are the
ones that test_decoding told of the same WAL records, in the same order.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.expected_errors import expect_error
from support.nightly import marks
from support.paths import DATA
from support.recordings.corpus_files import Capture, captures
from support.recordings.told_changes import DETACHED, PARTIAL, agrees

import pgoutput_fast as pf
from pgoutput_fast.testing import encode

pytest.importorskip("pyarrow", reason="captures are Arrow files")


PAIRS = {"v1_bin": "v1_text", "v2_stream_bin_msgs": "v2_stream", "v1_bin_utf8": "v1_text_utf8"}
"""Captures in binary mode, and the ones of the same scenario that have its changes as text."""


def text_twin(capture: Capture) -> Capture | None:
    entry = capture.entry
    found = captures(
        capture.root,
        instance=entry["instance"],
        scenario=entry["scenario"],
        optionset=PAIRS.get(entry["optionset"]),
    )
    return found[0] if found else None


CHOICES = {
    "capture": lambda capture: True,
    "told": lambda capture: capture.truth is not None,
    "binary": lambda capture: text_twin(capture) is not None,
    "other_settings": lambda capture: capture.entry["guc_set"] != "default",
}
"""Name of a test's argument → of which captures it is."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = next((name for name in CHOICES if name in metafunc.fixturenames), None)
    if name is None:
        return
    parameters = [
        pytest.param(c, id=f"data/{c.name}", marks=marks(c.name))
        for c in captures(DATA)
        if CHOICES[name](c)
    ]
    corpus = metafunc.config.getoption("--corpus")
    if corpus is None:
        reason = "give --corpus DIR or PGOUTPUT_FAST_CORPUS: recorded streams of real servers"
        skipped = [pytest.mark.corpus, pytest.mark.skip(reason=reason)]
        parameters.append(pytest.param(None, id="corpus", marks=skipped))
    else:
        found = captures(Path(corpus))
        assert found, f"{corpus} has no captures"
        parameters += [
            pytest.param(c, id=f"corpus/{c.name}", marks=pytest.mark.corpus)
            for c in found
            if CHOICES[name](c)
        ]
    metafunc.parametrize(name, parameters)


class Stream:
    """The messages of a capture, with the LSN of their header and their transaction's xid."""

    def __init__(self, impl: ModuleType, capture: Capture) -> None:
        self.capture = capture
        self.decoder = impl.Decoder(encoding=capture.encoding)

    def __iter__(self) -> Iterator[tuple[int, int | None, Any]]:
        top: int | None = None
        decode = self.decoder.decode
        for number, (lsn, frame) in enumerate(self.capture.rows()):
            try:
                message = decode(frame)
            except pf.DecodeError as error:
                pytest.fail(f"{self.capture.name}, frame {number}, {frame.hex():.2000}: {error}")
            if message.tag in "BbS":
                top = message.xid
            yield lsn, top, message


def test_every_frame_decodes(impl: ModuleType, capture: Capture) -> None:
    counts: collections.Counter[str] = collections.Counter()
    with_xid: collections.Counter[str] = collections.Counter()
    aborts = set()
    for _, top, message in Stream(impl, capture):
        counts[message.tag] += 1
        if message.in_stream and message.tag in "IUDTRYM":
            assert message.xid is not None
            with_xid[message.tag] += 1
        elif message.tag in "IUDTRYM":
            assert message.xid is None
        if message.tag == "M" and message.in_stream:
            assert message.xid == top
        if message.tag == "A":
            aborts.add(message.abort_lsn is not None)
    told = capture.entry["message_counts"]
    if sum(counts.values()) == capture.entry["frames"] < sum(told.values()):
        assert counts <= collections.Counter(told)  # the capture is the beginning of a longer one
    else:
        assert dict(counts) == told
    assert dict(with_xid) == capture.entry["with_xid_field"]
    # what decides is what the session asked for, and not the protocol's version
    assert aborts <= {capture.options.get("streaming") == "parallel"}


def test_every_frame_is_what_its_fields_make(impl: ModuleType, capture: Capture) -> None:
    decoder = impl.Decoder(encoding=capture.encoding)
    for number, (_, frame) in enumerate(capture.rows()):
        message = decoder.decode(frame)
        assert encode(message) == frame, (capture.name, number, message)


def test_the_implementations_agree(both: tuple[ModuleType, ModuleType], capture: Capture) -> None:
    for (_, _, one), (_, _, other) in zip(*(Stream(impl, capture) for impl in both), strict=True):
        assert type(one).__name__ == type(other).__name__
        assert repr(one) == repr(other)
        for which in ("old", "new"):
            data = getattr(one, which, None)
            if data is not None:
                assert data.raws() == getattr(other, which).raws()
                assert results(data) == results(getattr(other, which))


def results(data: Any) -> list[str]:
    return [result(data.values), result(data.texts)]


def result(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except pf.DecodeError as error:
        return f"{error.offset} {error}"


def test_changes_are_those_of_test_decoding(impl: ModuleType, told: Capture) -> None:
    capture = told
    assert capture.truth is not None
    by_lsn = capture.truth.by_lsn
    transactions = capture.truth.transactions
    told_xids = {transaction.xid for transaction in transactions}
    committed = []
    seen: dict[int | None, set[int]] = collections.defaultdict(set)
    unknown: collections.Counter[int | None] = collections.Counter()
    for lsn, top, message in Stream(impl, capture):
        if message.tag in "IUD":
            changes = [
                change
                for change in by_lsn.get(lsn, ())
                if change.xid == top and change.kind != "MESSAGE"
            ]
            match = next((change for change in changes if agrees(message, change, capture)), None)
            if match is not None:
                seen[top].add(id(match))
            elif changes:
                pytest.fail(
                    f"{capture.name}: {message.frame.hex():.2000} at {pf.format_lsn(lsn)}, "
                    f"{message!r:.1000}, is not {changes[0].text:.1000}"
                )
            else:
                unknown[top] += 1
        elif message.tag == "T":
            changes = [c for c in by_lsn.get(lsn, ()) if c.kind == "TRUNCATE" and c.xid == top]
            for change in changes:
                assert message.cascade is ("cascade" in change.text)
                assert message.restart_identity is ("restart_seqs" in change.text)
                assert 1 <= len(message.relation_ids) <= len(change.tables)
            seen[top].update(id(change) for change in changes)
        elif message.tag == "C":
            committed.append(top)
        elif message.tag in "cK":
            committed.append(message.xid)
    assert [xid for xid in committed if xid in told_xids] == [
        transaction.xid for transaction in transactions if transaction.xid in set(committed)
    ]
    # a change that test_decoding tells nothing of is one of a subtransaction that was rolled back
    rolled_back = {xid for xid in committed if unknown[xid]}
    assert not rolled_back or capture.options.get("streaming") in ("on", "parallel")
    if any(part in capture.entry["optionset"] for part in PARTIAL):
        return
    done = set(committed)
    wanted = [
        change
        for transaction in transactions
        if transaction.xid in done
        for change in transaction.changes
        if change.kind in ("INSERT", "UPDATE", "DELETE") and DETACHED not in change.text
    ]
    published = {
        (change.tables, change.kind) for change in wanted if id(change) in seen[change.xid]
    }
    missing = [
        change.text[:200]
        for change in wanted
        if (change.tables, change.kind) in published and id(change) not in seen[change.xid]
    ]
    assert not missing


def test_binary_values_are_the_text_values(impl: ModuleType, binary: Capture) -> None:
    """The same change came as text and as binary: same texts, and same typed values."""
    twin = text_twin(binary)
    assert twin is not None
    compared = 0
    as_text = rows(impl, twin)
    for key, message in rows(impl, binary).items():
        if key not in as_text:
            continue
        for which in ("old", "new"):
            data = getattr(message, which, None)
            if data is None:
                continue
            for number, column in enumerate(message.relation.columns):
                if data.kind(number) == "b":
                    compare(data, getattr(as_text[key], which), number, column)
                    compared += 1
    assert compared


MOMENTS = {1082, 1083, 1114, 1184}
FLOATS = {700, 701}


def test_other_session_settings_are_read_or_refused(
    impl: ModuleType, other_settings: Capture
) -> None:
    """Dates in SQL's, German's or Postgres' style, bytea in escape: never another value."""
    entry = other_settings.entry
    usual = captures(
        other_settings.root,
        instance=entry["instance"],
        scenario=entry["scenario"],
        optionset="v1_text",
    )[0]
    rounded = int(entry["session_gucs"]["extra_float_digits"]) < 1
    refused = 0
    expected = rows(impl, usual)
    for key, message in rows(impl, other_settings).items():
        for which in ("old", "new"):
            data = getattr(message, which, None)
            if data is None:
                continue
            for number, column in enumerate(message.relation.columns):
                if column.type_id not in TYPED or (rounded and column.type_id in FLOATS):
                    continue
                wanted = outcome(getattr(expected[key], which), number)
                found = outcome(data, number)
                if found == wanted:
                    continue
                assert found == "bad_value", (column, data.text(number), found, wanted)
                assert column.type_id in MOMENTS
                with expect_error(pf.DecodeError, code="bad_value"):
                    data[number]
                refused += 1
    assert refused


TYPED = {*MOMENTS, *FLOATS, 16, 17, 20, 21, 23, 25, 26, 1042, 1043, 1700, 2950}


def rows(impl: ModuleType, capture: Capture) -> dict[tuple[Any, ...], Any]:
    found: dict[tuple[Any, ...], Any] = {}
    seen: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for lsn, top, message in Stream(impl, capture):
        if message.tag in "IUD":
            key = (lsn, top, message.tag)
            seen[key] += 1
            found[(*key, seen[key])] = message
    return found


def compare(binary: Any, text: Any, number: int, column: pf.Column) -> None:
    where = f"column {column.name!r} of type {column.type_id}, {binary.raw(number)!r:.200}"
    try:
        printed = binary.text(number)
    except pf.DecodeError as error:
        if error.code == "no_text_form":
            return  # nor is there a typed value of it
        raise
    assert printed == text.text(number), where
    value, expected = (outcome(data, number) for data in (binary, text))
    assert value == expected, where


def outcome(data: Any, number: int) -> Any:
    try:
        value = data[number]
    except pf.DecodeError as error:
        return error.code
    return type(value), repr(value)
