"""Threads: each with a decoder of its own, one decoder or one row for several.

With or without the GIL, what threads share gives the right result or an error.
"""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.frames.make_frames import OID, begin, commit, insert, relation
from support.threads import THREADS, frequent_switches, in_threads

import pgoutput_fast as pf
from pgoutput_fast.decoding import _core, plan
from pgoutput_fast.decoding.state import StreamState
from pgoutput_fast.settings import make_settings
from pgoutput_fast.values import CODES

if TYPE_CHECKING:
    from types import ModuleType

ROUNDS = 20
ROWS = 3_000
FRAMES = [
    relation("a", "b"),
    *[
        frame
        for xid in range(1, 6)
        for frame in (begin(xid), insert(b"%d" % xid, b"text"), insert(b"-1", b""), commit())
    ],
    relation("a", "c"),
    begin(6),
    insert(b"6", b"other"),
    commit(),
]


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    with frequent_switches():
        yield


def shown(message: Any) -> Any:
    """A message as plain data."""
    if message.tag == "I":
        return message.new.as_dict()
    return message.tag, getattr(message, "xid", None)


def test_threads_with_decoders_of_their_own(impl: ModuleType) -> None:
    def work() -> list[Any]:
        return [
            [shown(message) for message in impl.Decoder().decode_many(FRAMES)]
            for _ in range(ROUNDS)
        ]

    (expected, *others) = [*work()[:1], *in_threads(work)]
    assert expected[2] == {"a": "1", "b": "text"}
    assert expected[-2] == {"a": "6", "c": "other"}
    assert others == [[expected] * ROUNDS] * THREADS


class Waiting(StreamState):
    """A state that lets another thread act in the midst of a Relation."""

    disturb: Callable[[], None]

    def receive(self, frame: bytes) -> Any:
        message = super().receive(frame)
        thread = threading.Thread(target=self.disturb)
        thread.start()
        thread.join()
        return message


def test_a_decoder_refuses_a_second_thread(impl: ModuleType) -> None:
    """It would take a row by the relation before, or keep that relation's columns for later."""
    refused: list[str] = []

    def disturb() -> None:
        for name, call in (
            ("insert", lambda: decoder.decode(insert(b"1"))),
            ("begin", lambda: decoder.decode(begin(7))),
            ("relation", lambda: decoder.decode(relation("z"))),
            ("iterator", lambda: next(decoder.decode_many([insert(b"1")]))),
            ("state", lambda: decoder.state),
            ("reset", decoder.reset),
        ):
            with expect_error(code="unfit_input"):
                call()
            refused.append(name)
        shown.append(repr(decoder))

    shown: list[str] = []
    state = Waiting(make_settings(None, "utf-8", None))
    decoder = impl.decoder_of(state)
    state.disturb = lambda: None
    decoder.decode(relation("a"))
    decoder.decode(insert(b"1"))
    state.disturb = disturb
    decoder.decode(relation("b"))
    assert refused == ["insert", "begin", "relation", "iterator", "state", "reset"]
    assert shown == ["<Decoder: another thread decodes with it>"]
    state.disturb = lambda: None
    assert decoder.decode(insert(b"1")).new.as_dict() == {"b": "1"}
    assert decoder.state.row == 2


def test_a_refused_frame_leaves_a_decoder_free(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation("a"))
    for bad in (insert(b"1")[:-1], insert(b"1", b"2"), commit()[:-1], b"?", b""):
        with expect_error(pf.DecodeError):
            decoder.decode(bad)
    assert decoder.decode(insert(b"1")).new.as_dict() == {"a": "1"}


def test_threads_that_share_a_decoder(impl: ModuleType) -> None:
    """Each message is right by itself, or refused."""
    decoder = impl.Decoder()
    decoder.decode(FRAMES[0])
    codes: set[str | None] = set()

    def work() -> int:
        count = 0
        for _ in range(ROUNDS):
            for frame in FRAMES:
                try:
                    message = shown(decoder.decode(frame))
                except pf.PgOutputError as error:
                    codes.add(error.code)
                else:
                    count += 1
                    assert message in allowed
        return count

    allowed = [shown(message) for message in impl.Decoder().decode_many(FRAMES)]
    # The relation has the columns of one version or the other.
    allowed += [
        {"a": row["a"], name: list(row.values())[1]}
        for row in allowed
        if isinstance(row, dict)
        for name in "bc"
    ]
    counts = in_threads(work)
    assert {type(count) for count in counts} == {int}, counts
    assert sum(counts) > 0
    assert codes <= {"unfit_input"}
    decoder.reset()
    decoder.decode(relation("z"))
    assert decoder.decode(insert(b"1")).new.as_dict() == {"z": "1"}


READERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "position": (lambda row: [row[i] for i in range(3)], [1, "é", 2.5]),
    "name": (lambda row: [row[name] for name in "abc"], [1, "é", 2.5]),
    "values": (lambda row: row.values(), (1, "é", 2.5)),
    "texts": (lambda row: row.texts(), ("1", "é", "2.5")),
    "raws": (lambda row: row.raws(), (b"1", "é".encode(), b"2.5")),
    "dict": (lambda row: row.as_dict(), {"a": 1, "b": "é", "c": 2.5}),
    "slice": (lambda row: row[1:], ("é", 2.5)),
    "kinds": (lambda row: [row.kind(i) for i in range(3)], ["t", "t", "t"]),
}


@pytest.mark.parametrize("reader", READERS)
def test_threads_that_read_the_same_rows(impl: ModuleType, reader: str) -> None:
    """The first access finds the columns, and the first of a relation how they are decoded."""
    table = pf.testing.Table("t", {"a": "int4", "b": "text", "c": "float8"}, OID)
    read, expected = READERS[reader]
    decoder = impl.Decoder()
    rows = []
    for number in range(ROWS):
        if number % 10 == 0:
            decoder.decode(table.relation())
        rows.append(decoder.decode(insert(b"1", "é".encode(), b"2.5")).new)
    assert in_threads(lambda: [read(row) for row in rows]) == [[expected] * ROWS] * THREADS


def test_threads_that_read_rows_while_a_decoder_goes_on(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation("a"))
    ready: list[Any] = []
    done = threading.Event()

    def read() -> int:
        number = 0
        while not (done.is_set() and number == len(ready)):
            if number < len(ready):
                ((name, value),) = ready[number].new.as_dict().items()
                assert (name, value) == ("ab"[number % 2], str(number))
                number += 1
        return number

    def decode_all() -> None:
        for number in range(500):
            decoder.decode(relation("ab"[number % 2]))
            ready.append(decoder.decode(insert(b"%d" % number)))
        done.set()

    thread = threading.Thread(target=decode_all)
    thread.start()
    counts = in_threads(read, 2)
    thread.join()
    assert counts == [500, 500]


def test_a_registry_changes_in_the_midst_of_a_lookup(
    impl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that comes while another finds the types must not see those from before."""
    registry = pf.TypeRegistry()
    decoder = impl.Decoder(registry=registry)
    decoder.decode(relation("a", type_id=16400))
    row = decoder.decode(insert(b"1")).new
    assert row[0] == "1"
    registry.register(16400, text=lambda raw: ("registered", raw))
    seen: list[Any] = []

    def slow(*arguments: Any, **more: Any) -> Any:
        monkeypatch.undo()
        thread = threading.Thread(target=lambda: seen.append(row[0]))
        thread.start()
        thread.join()
        return found(*arguments, **more)

    found = plan.column_type
    monkeypatch.setattr(plan, "column_type", slow)
    assert row[0] == ("registered", b"1")
    assert seen == [("registered", b"1")]


def test_another_thread_decodes_with_what_it_found_first(
    impl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads find how to decode a relation's columns. The first to finish decodes meanwhile.

    The memory of what it found must not be freed when the second one finishes.
    """
    width = 300
    decodes, both_found = threading.Event(), threading.Event()
    memory: list[bytes] = []
    rows: list[Any] = []

    def number(raw: bytes) -> int:
        if threading.current_thread() is other:
            decodes.set()
            assert both_found.wait(10)
        else:
            # Bytes as large as the codes of the columns, whose memory they take if it is free.
            memory.extend(bytes([CODES["text"]]) * width for _ in range(1_000))
            both_found.set()
        return int(raw)

    def pause(*arguments: Any, **more: Any) -> Any:
        monkeypatch.undo()
        other.start()
        assert decodes.wait(10)
        return column_type(*arguments, **more)

    registry = pf.TypeRegistry()
    registry.register(16400, text=number)
    decoder = impl.Decoder(registry=registry)
    types = {"a": 16400} | {f"c{i}": 23 for i in range(1, width)}
    decoder.decode(pf.testing.Table("t", types, OID).relation())
    row = decoder.decode(insert(*[b"1"] * width)).new
    other = threading.Thread(target=lambda: rows.append(row.values()))
    column_type = plan.column_type
    monkeypatch.setattr(plan, "column_type", pause)
    rows.append(row.values())
    other.join()
    assert rows == [(1,) * width] * 2


def test_threads_that_share_an_iterator() -> None:
    """Of the compiled decoder; that of the twin is a generator, which Python itself refuses."""
    messages = _core.Decoder().decode_many(FRAMES * ROUNDS)
    numbers = in_threads(lambda: sum(1 for _ in messages))
    assert sum(numbers) == len(FRAMES) * ROUNDS


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="Python has a GIL")
def test_modules_leave_the_gil_off() -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    root = Path(pf.__file__).parent
    modules = [
        ".".join(path.relative_to(root.parent).parts).removesuffix(suffix)
        for path in root.rglob(f"*{suffix}")
        if path.parent.name != "replication"  # it imports psycopg, which may need the GIL
    ]
    assert "pgoutput_fast.decoding._core" in modules
    # A dependency of a module may be missing. Python warns if it has to enable the GIL.
    program = """
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program, *modules], check=True)
