"""Reads a corpus of recorded streams: captures, and beside them the truth of their scenario.

The form is the one of `tests/data`: `<instance>/<scenario>/<optionset>.arrow` (Arrow IPC, column
`payload`), `<instance>/<scenario>/truth.zip` (`test_decoding.jsonl`, `script.sql` …), `index.json`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pgoutput_fast as pf

__all__ = [
    "POLICIES", "TEXT", "Capture", "Change", "Transaction", "Truth", "captures",
    "parse_test_decoding", "truth_of",
]  # fmt: skip

TEXT = pf.Policies(infinity="text", out_of_range="text", special_values="text", arrays="text")
POLICIES = {"all_types": TEXT, "fuzz_a": TEXT, "dml": pf.Policies(infinity="text")}
"""Of scenarios with values that typed columns can't hold; those of others are all typed."""


@dataclasses.dataclass(frozen=True)
class Capture:
    """One capture: where it is, and its entry of index.json."""

    root: Path
    entry: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.entry["path"]).removesuffix(".arrow")

    @property
    def major(self) -> int:
        return int(self.entry["pg_major"])

    @property
    def options(self) -> dict[str, str]:
        return dict(self.entry["options"])

    @property
    def encoding(self) -> str:
        """Python's name of client_encoding; SQL_ASCII is read as bytes are."""
        name = self.entry["client_encoding"]
        return {"UTF8": "utf-8", "LATIN1": "latin-1", "SQL_ASCII": "utf-8"}[name]

    @property
    def truth(self) -> Truth | None:
        path = self.entry.get("truth")
        if not path or not (self.root / path).exists():
            return None
        return truth_of(self.root / path)

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """(LSN of the header, pgoutput frame); keepalives of `*_copydata` are left out."""
        import pyarrow.ipc

        with pyarrow.ipc.open_file(self.root / self.entry["path"]) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                lsns = batch.column("start_lsn").to_pylist()
                for lsn, payload in zip(lsns, batch.column("payload").to_pylist(), strict=True):
                    if not self.entry["optionset"].endswith("_copydata"):
                        yield lsn, payload
                    elif payload[:1] == b"w":
                        yield lsn, payload[25:]


def captures(root: Path, **wanted: Any) -> list[Capture]:
    """The captures of index.json whose entries have the values `wanted`, in its order."""
    index = json.loads((root / "index.json").read_text(encoding="utf-8"))
    return [
        Capture(root, entry)
        for entry in index["captures"]
        if all(entry.get(key) == value for key, value in wanted.items())
    ]


@dataclasses.dataclass(frozen=True)
class Change:
    """One row change, TRUNCATE or message as test_decoding tells it.

    Columns are (name, type, text): text is None for NULL and `unchanged` for unchanged TOAST.
    """

    lsn: int
    xid: int
    kind: str  # INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE
    tables: tuple[str, ...]
    old: tuple[tuple[str, str, Any], ...] | None
    new: tuple[tuple[str, str, Any], ...] | None
    text: str


@dataclasses.dataclass(frozen=True)
class Transaction:
    """A committed transaction, or a message outside of transactions, which has no xid."""

    xid: int | None
    end_lsn: int
    changes: tuple[Change, ...]


UNCHANGED = object()
_TABLE = re.compile(r'table ((?:[^:"]|"(?:[^"]|"")*")+): (INSERT|UPDATE|DELETE|TRUNCATE):')
_COLUMN = re.compile(r' ((?:[^\[" ]|"(?:[^"]|"")*")+)\[((?:[^\]"]|"(?:[^"]|"")*"|\[\])+)\]:')


def parse_test_decoding(lsn: int, xid: int, text: str) -> Change | None:
    """The change that a line of test_decoding tells; None for BEGIN and COMMIT."""
    if text.startswith("message: "):
        return Change(lsn, xid, "MESSAGE", (), None, None, text)
    match = _TABLE.match(text)
    if match is None:
        return None
    kind = match[2]
    tables = (match[1],)
    if kind == "TRUNCATE":
        return Change(lsn, xid, kind, tuple(match[1].split(", ")), None, None, text)
    at = match.end()
    old = new = None
    if text.startswith(" old-key:", at):
        at += len(" old-key:")
        old, at = _columns(text, at)
        assert text.startswith(" new-tuple:", at), text[at : at + 40]
        at += len(" new-tuple:")
    if text[at:] == " (no-tuple-data)":
        return Change(lsn, xid, kind, tables, None, None, text)
    columns, at = _columns(text, at)
    assert at == len(text), text[at : at + 40]
    if kind == "DELETE":
        old = columns
    else:
        new = columns
    return Change(lsn, xid, kind, tables, old, new, text)


def _columns(text: str, at: int) -> tuple[tuple[tuple[str, str, Any], ...], int]:
    columns = []
    while at < len(text):
        match = _COLUMN.match(text, at)
        if match is None:
            break
        at = match.end()
        value, at = _value(text, at)
        columns.append((_unquote(match[1]), match[2], value))
    return tuple(columns), at


def _value(text: str, at: int) -> tuple[Any, int]:
    quoted = at + 1 if text.startswith("B'", at) else at
    if text.startswith("'", quoted):
        at = quoted + 1
        parts = []
        while True:
            end = text.index("'", at)
            parts.append(text[at:end])
            if text.startswith("''", end):
                at = end + 2
                continue
            return "'".join(parts), end + 1
    end = text.find(" ", at)
    end = len(text) if end < 0 else end
    word = text[at:end]
    if word == "null":
        return None, end
    if word == "unchanged-toast-datum":
        return UNCHANGED, end
    if word in ("true", "false"):
        return word[0], end
    return word, end


def _unquote(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


class Truth:
    """A scenario's truth.zip."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)

    @functools.cached_property
    def lines(self) -> list[tuple[int, int, str]]:
        """(LSN, xid, text) of every line; text that is no UTF-8 with surrogate escapes."""
        rows = []
        for line in self.read("test_decoding.jsonl").splitlines():
            row = json.loads(line)
            text = row[2]
            if text is None:
                text = base64.b64decode(row[3]).decode("utf-8", "surrogateescape")
            rows.append((row[0], row[1], text))
        return rows

    @functools.cached_property
    def delivered(self) -> list[Transaction]:
        """The committed transactions in commit order, and between them messages outside any."""
        done = []
        changes: list[Change] | None = None
        for lsn, xid, text in self.lines:
            if text.startswith("BEGIN "):
                changes = []
            elif text.startswith("COMMIT "):
                assert changes is not None
                done.append(Transaction(xid, lsn, tuple(changes)))
                changes = None
            else:
                change = parse_test_decoding(lsn, xid, text)
                if change is not None and changes is not None:
                    changes.append(change)
                elif change is not None:
                    done.append(Transaction(None, lsn, (change,)))
        return done

    @functools.cached_property
    def transactions(self) -> list[Transaction]:
        """The committed transactions in commit order; messages outside any are left out."""
        return [one for one in self.delivered if one.xid is not None]

    @functools.cached_property
    def by_lsn(self) -> dict[int, list[Change]]:
        """Changes of committed transactions by the LSN of their WAL record."""
        found: dict[int, list[Change]] = {}
        for transaction in self.transactions:
            for change in transaction.changes:
                found.setdefault(change.lsn, []).append(change)
        return found

    @functools.cached_property
    def script(self) -> list[str]:
        """The statements of script.sql, without directives and comments."""
        return split_script(self.read("script.sql").decode("utf-8", "surrogateescape"))

    def catalog(self) -> list[dict[str, Any]]:
        return list(json.loads(self.read("catalog.json")))


@functools.lru_cache(maxsize=2)
def truth_of(path: Path) -> Truth:
    """The truth of a scenario, read once for all its captures."""
    return Truth(path)


def split_script(script: str) -> list[str]:
    """Statements, split at semicolons outside quotes, dollar quotes and parentheses."""
    text = "\n".join(line for line in script.split("\n") if not line.startswith("--"))
    statements = []
    start = 0
    quote = re.compile(r"'|\"|\$\w*\$|;")
    at = 0
    while match := quote.search(text, at):
        token = match[0]
        if token == ";":
            statements.append(text[start : match.end()].strip())
            start = at = match.end()
            continue
        end = text.find(token, match.end())
        if token == "'" and text[match.start() - 1 : match.start()] in ("E", "e"):
            while end > 0 and text[end - 1] == "\\":
                end = text.find(token, end + 1)
        at = len(text) if end < 0 else end + len(token)
    return [statement for statement in statements if statement != ";"]
