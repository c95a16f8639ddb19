"""Takes the vectors of tests/vectors out of a corpus of recorded streams.

    PYTHONPATH=tests python -m support.frames.extract_vectors CORPUS [--out tests/vectors]

From every capture it keeps the frames that show something that no frame before them showed: a
message in or out of a stream, a mix of column kinds, a value of a typed column. What is expected of
a frame is said by reference_parser.py and never by the package. Before anything is written, every
change of every capture is held against what test_decoding told of the same WAL record, and values
against the servers' own COPY; a contradiction stops the run.

A file is one JSON object: `context`, frames that vectors name by their index in `before`, and
`vectors`, each with

    id             capture and number of the frame
    facts          the facts of the protocol that it shows, by the names in FACTS
    server         version; `options` as given to START_REPLICATION
    encoding       Python's name of client_encoding, where it is not utf-8
    sql            a statement of the scenario that made the frame, as near as can be told; or null
    in_stream      whether the frame stood between Stream Start and Stream Stop
    before         frames that a decoder has to have seen
    frame          the frame, hexadecimal
    class, fields  the message; bytes are {"bytes": hexadecimal}
    tuples         of old and new: `columns` as [kind] or [kind, offset, length] in the frame,
                   `values` by column: [Python type, text], or ["error", code]; `texts` of binary
                   values by column, as the server itself printed them in a capture in text mode
    relation       namespace and name of the relation that belongs to the frame
    copy           true where the server's COPY holds the very same row
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import paths
from support.frames.made_sequences import made_sequences
from support.frames.made_vectors import made_vectors
from support.frames.reference_parser import ReferenceStream, binary_value, dumps, text_value
from support.recordings.corpus_files import UNCHANGED, Capture, Change, captures

MAX_FRAME = 2000
"""Bytes of the longest frame that is kept for its values alone."""

MAX_VALUES = 50
"""Columns of a tuple whose values are given; a table of 1600 columns repeats itself."""

LARGE = ("1600 columns", "unchanged value, filled in the old row")
"""Facts that only longer frames show."""

Message = dict[str, Any]
Statement = str | None

# Every fact is a predicate of (message, frame, capture). Facts that a made frame shows are in
# made_vectors.py.
FACTS: dict[str, Callable[[Message, bytes, Capture], Any]] = {
    "abort without LSN at version 4": lambda m, f, c: (
        m["tag"] == "A" and len(f) == 9 and c.options.get("proto_version") == "4"
    ),
    "abort with LSN in parallel streaming": lambda m, f, c: m["tag"] == "A" and len(f) == 25,
    "abort of a subtransaction": lambda m, f, c: (
        m["tag"] == "A" and m["fields"]["xid"] != m["fields"]["subxid"]
    ),
    "xid of a subtransaction in a chunk": lambda m, f, c: (
        m["in_stream"] and m["tag"] in "IUDTRY" and m["fields"]["xid"] != m["stream_xid"]
    ),
    "message in a chunk has the top-level xid": lambda m, f, c: m["in_stream"] and m["tag"] == "M",
    "origin in a chunk has no xid": lambda m, f, c: m["in_stream"] and m["tag"] == "O",
    "empty first chunk": lambda m, f, c: m["tag"] == "E" and m["previous"] == "S",
    "empty transaction": lambda m, f, c: m["tag"] == "C" and m["previous"] == "B",
    "empty prepared transaction": lambda m, f, c: m["tag"] == "P" and m["previous"] == "b",
    "time before 2000": lambda m, f, c: m["fields"].get("commit_time", 0) < 0,
    "LSN past 2**63": lambda m, f, c: m["fields"].get("commit_lsn", 0) >= 2**63,
    "message with NULs": lambda m, f, c: (
        m["tag"] == "M" and "00" in m["fields"]["content"]["bytes"]
    ),
    "empty prefix and content": lambda m, f, c: (
        m["tag"] == "M" and not m["fields"]["prefix"] and not m["fields"]["content"]["bytes"]
    ),
    "truncate of several relations": lambda m, f, c: (
        m["tag"] == "T" and len(m["fields"]["relation_ids"]) > 1
    ),
    "truncate options": lambda m, f, c: m["tag"] == "T" and m["fields"]["options"],
    "domain looks like its base type": lambda m, f, c: (
        m["tag"] == "Y" and m["fields"]["namespace"] == "" and m["fields"]["type_id"] >= 16384
    ),
    "full identity flags every column": lambda m, f, c: (
        m["tag"] == "R" and m["fields"]["replica_identity"] == "f" and m["fields"]["columns"]
    ),
    "identity by index": lambda m, f, c: m["tag"] == "R" and m["fields"]["replica_identity"] == "i",
    "no identity": lambda m, f, c: m["tag"] == "R" and m["fields"]["replica_identity"] == "n",
    "root before leaf": lambda m, f, c: (
        m["tag"] == "R" and m["previous"] == "R" and c.entry["optionset"].endswith("_root")
    ),
    "generated columns": lambda m, f, c: (
        m["tag"] == "R" and c.entry["optionset"].endswith("_gen") and c.major >= 18
    ),
    "column list": lambda m, f, c: m["tag"] == "R" and c.entry["optionset"].endswith("_cl"),
    "same name, another OID": lambda m, f, c: m["tag"] == "R" and m["fields"]["name"] == "again",
    "no columns": lambda m, f, c: m["tag"] == "R" and not m["fields"]["columns"],
    "tuple without columns": lambda m, f, c: any(
        not data["columns"] for data in m["tuples"].values()
    ),
    "1600 columns": lambda m, f, c: len(m.get("relation", {}).get("columns", ())) == 1600,
    "unchanged value": lambda m, f, c: "u" in _kinds(m, "new"),
    "unchanged value, filled in the old row": lambda m, f, c: (
        "u" in _kinds(m, "new") and m["fields"].get("old_kind") == "O"
    ),
    "changed key with an unchanged value": lambda m, f, c: (
        "u" in _kinds(m, "new") and m["fields"].get("old_kind") == "K"
    ),
    "key tuple of full width": lambda m, f, c: (
        m["fields"].get("old_kind") == "K" and "n" in _kinds(m, "old")
    ),
    "text and binary in one tuple": lambda m, f, c: {"t", "b"} <= set(_kinds(m, "new")),
    "empty value": lambda m, f, c: any(
        column[2:] == [0] for data in m["tuples"].values() for column in data["columns"]
    ),
    "GID of 199 bytes": lambda m, f, c: len(m["fields"].get("gid", "")) >= 199,
    "GID with quotes": lambda m, f, c: '"' in m["fields"].get("gid", ""),
    "names that are not ASCII": lambda m, f, c: (
        m["tag"] in "RYMO"
        and not f.isascii()
        and not str(m["fields"].get("name", m["fields"].get("prefix"))).isascii()
    ),
    "another client_encoding": lambda m, f, c: c.encoding != "utf-8" and not f.isascii(),
    "update under a row filter becomes an insert": lambda m, f, c: (
        m["tag"] == "I" and m.get("test_decoding") == "UPDATE"
    ),
    "update under a row filter becomes a delete": lambda m, f, c: (
        m["tag"] == "D" and m.get("test_decoding") == "UPDATE"
    ),
}


def _kinds(message: Message, name: str) -> str:
    data = message["tuples"].get(name)
    return "" if data is None else "".join(column[0] for column in data["columns"])


def _raws(message: Message, frame: bytes) -> Iterator[tuple[str, bytes]]:
    for data in message["tuples"].values():
        for column in data["columns"]:
            if len(column) == 3:
                yield column[0], frame[column[1] : column[1] + column[2]]


class Scenario:
    """The captures of a scenario, and the texts of its changes from one in text mode."""

    def __init__(self, root: Path, members: list[Capture]) -> None:
        self.captures = members
        self.instance = members[0].entry["instance"]
        self.name = members[0].entry["scenario"]
        types = json.loads((root / self.instance / "pg_type.json").read_text(encoding="utf-8"))
        self.type_ids = {row["name"]: row["oid"] for row in types}
        self.texts: dict[tuple[Any, ...], list[str | None]] = {}
        self.copies: dict[str, dict[tuple[str, ...], set[tuple[Any, ...]]]] = {}
        for capture in members:
            optionset = capture.entry["optionset"]
            if optionset == "v2_stream" or (
                optionset.startswith("v1_text") and capture.entry["guc_set"] == "default"
            ):
                self._read_texts(capture)

    def _read_texts(self, capture: Capture) -> None:
        for key, message, frame in walk(capture):
            if key is not None and key not in self.texts:
                self.texts[key] = [
                    frame[column[1] : column[1] + column[2]].decode(capture.encoding, "replace")
                    if column[0] == "t"
                    else None
                    for data in message["tuples"].values()
                    for column in data["columns"]
                ]

    def in_copy(self, relation: Message, row: tuple[Any, ...], guc_set: str, form: str) -> bool:
        """Whether the server's COPY of the relation's table holds `row` (text or binary values)."""
        if form not in self.copies:
            self.copies[form] = self._read_copies(form)
        names = tuple(column[1] for column in relation["columns"])
        key = (guc_set, relation["namespace"], relation["name"], *names)
        return row in self.copies[form].get(key, ())

    def _read_copies(self, form: str) -> dict[tuple[str, ...], set[tuple[Any, ...]]]:
        truth = self.captures[0].truth
        assert truth is not None
        found: dict[tuple[str, ...], set[tuple[Any, ...]]] = {}
        for file in json.loads(truth.read("copy/index.json"))["files"]:
            if file.get(form):
                key = (file["guc_set"], file["schema"], file["table"], *file["columns"])
                read = copy_text if form == "text" else copy_binary
                found.setdefault(key, set()).update(read(truth.read(file[form])))
        return found


_ESCAPES = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def copy_text(data: bytes) -> Iterator[tuple[Any, ...]]:
    """Rows of COPY's text format, as bytes or None."""
    for line in data.split(b"\n")[:-1]:
        row: list[bytes | None] = []
        for field in line.split(b"\t") if line else []:
            if field == b"\\N":
                row.append(None)
                continue
            head, *rest = field.split(b"\\")
            value = head
            skip = False
            for number, part in enumerate(rest):
                if skip:
                    value += part
                    skip = False
                elif not part and number < len(rest) - 1:
                    value += b"\\"  # two backslashes are one
                    skip = True
                else:
                    value += _ESCAPES.get(part[:1], part[:1]) + part[1:]
            row.append(value)
        yield tuple(row)


def copy_binary(data: bytes) -> Iterator[tuple[Any, ...]]:
    """Rows of COPY's binary format, as bytes or None."""
    at = 19 + int.from_bytes(data[15:19], "big")
    while True:
        count = int.from_bytes(data[at : at + 2], "big", signed=True)
        at += 2
        if count < 0:
            return
        row: list[bytes | None] = []
        for _ in range(count):
            length = int.from_bytes(data[at : at + 4], "big", signed=True)
            at += 4
            row.append(None if length < 0 else data[at : at + length])
            at += max(length, 0)
        yield tuple(row)


def walk(capture: Capture) -> Iterator[tuple[tuple[Any, ...] | None, Message, bytes]]:
    """Of every frame: a key that a change has in every capture of the scenario, message, frame.

    The message has, beside what the reference parser says: "number", "previous" (the tag before),
    "context", "top_xid" of the transaction, and "base_types" of the relation's columns.
    """
    stream = ReferenceStream(capture.encoding)
    seen: collections.Counter[tuple[int, str]] = collections.Counter()
    top: int | None = None
    previous = ""
    for number, (lsn, frame) in enumerate(capture.rows()):
        relation_id = None
        context: list[bytes] = []
        if frame[:1] in b"IUD":
            at = 5 if stream.open_xid is not None else 1
            relation_id = int.from_bytes(frame[at : at + 4], "big")
            context = stream.context(relation_id)
        elif stream.open_xid is not None:
            context = stream.context(0)
        message = stream.feed(frame)
        tag = message["tag"]
        if tag in "BbS":
            top = message["fields"]["xid"]
        message.update(number=number, previous=previous, context=context, lsn=lsn)
        message["top_xid"] = message["fields"].get("xid") if tag in "cApPKrb" else top
        previous = tag
        key = None
        if relation_id is not None:
            message["base_types"] = [
                stream.base_type(column[2]) for column in message["relation"]["columns"]
            ]
            # an aborted subtransaction may have changes at LSNs of its own; they match nothing
            seen[lsn, tag] += 1
            # a publication may send the columns of a partition's root, or some of them
            names = tuple(column[1] for column in message["relation"]["columns"])
            key = (lsn, tag, seen[lsn, tag], names)
        yield key, message, frame


def type_ids(message: Message, scenario: Scenario) -> list[int]:
    """The columns' types, a domain's base type in its place."""
    return [
        column[2] if base is None or column[2] < 16384 else scenario.type_ids.get(base, 0)
        for column, base in zip(message["relation"]["columns"], message["base_types"], strict=True)
    ]


# --- the truth ----------------------------------------------------------------------------------


def told(message: Message, frame: bytes, capture: Capture, scenario: Scenario) -> Change | None:
    """The change that test_decoding told of this frame's WAL record; AssertionError if another.

    None where it told nothing: a change of a transaction that did not commit.
    """
    assert capture.truth is not None
    candidates = [
        change
        for change in capture.truth.by_lsn.get(message["lsn"], ())
        if change.xid == message["top_xid"] and change.kind in ("INSERT", "UPDATE", "DELETE")
    ]
    if not candidates:
        return None
    for change in candidates:
        if agrees(message, frame, change, capture, scenario):
            return change
    raise AssertionError(
        f"{capture.name} frame {message['number']}: {frame[:80]!r} is not "
        f"{candidates[0].text[:300]}"
    )


FILTERED = ("_rf", "_both")
"""Option sets of publications with a row filter: an update may arrive as another kind."""

KINDS = {"I": "INSERT", "U": "UPDATE", "D": "DELETE"}


def agrees(
    message: Message, frame: bytes, change: Change, capture: Capture, scenario: Scenario
) -> bool:
    filtered = any(name in capture.entry["optionset"] for name in FILTERED)
    if KINDS[message["tag"]] != change.kind and not (filtered and change.kind == "UPDATE"):
        return False
    columns = message["relation"]["columns"]
    oids = type_ids(message, scenario)
    comparable = capture.entry["guc_set"] == "default"
    for name, data in message["tuples"].items():
        told_columns = change.old if name == "old" else change.new
        if told_columns is None:
            continue  # test_decoding has no tuple where the table has no replica identity
        told_values = {column: value for column, _, value in told_columns}
        for column, oid, slot in zip(columns, oids, data["columns"], strict=True):
            if name == "old" and slot[0] == "n":
                if told_values.get(column[1]) is not None:
                    return False
                continue
            if column[1] not in told_values and change.kind != KINDS[message["tag"]]:
                continue
            if column[1] not in told_values:
                return False
            value = told_values[column[1]]
            if (slot[0] == "u") != (value is UNCHANGED) and KINDS[message["tag"]] == change.kind:
                return False
            if (slot[0] == "n") != (value is None):
                return False
            if slot[0] in "nu" or value is UNCHANGED or not comparable:
                continue
            if not same_value(oid, slot[0], frame[slot[1] : slot[1] + slot[2]], value, capture):
                return False
    return True


def same_value(oid: int, kind: str, raw: bytes, truth: str, capture: Capture) -> bool:
    # test_decoding's texts are in UTF-8, or in whatever bytes an SQL_ASCII database holds
    if kind == "t":
        try:
            text = raw.decode(capture.encoding)
        except UnicodeDecodeError:
            return raw == truth.encode("utf-8", "surrogateescape")
        return text == truth or capture.entry["server_encoding"] != "UTF8"
    value = binary_value(oid, raw, capture.encoding)
    if value is None or value[0] == "error" or capture.entry["server_encoding"] != "UTF8":
        return True
    return value == text_value(oid, truth.encode("utf-8", "surrogateescape"), "utf-8")


# --- the SQL ------------------------------------------------------------------------------------

VERBS = {
    "I": ("INSERT", "COPY", "MERGE", "UPDATE"),
    "U": ("UPDATE", "INSERT", "MERGE"),
    "D": ("DELETE", "UPDATE", "MERGE"),
    "T": ("TRUNCATE",),
}


class Attribution:
    """Finds the statement of the script that is likeliest to have made a frame."""

    def __init__(self, script: list[str]) -> None:
        self.script = script
        self.upper = [statement.upper() for statement in script]
        self.by_xid: dict[int, str] = {}

    def best(self, verbs: tuple[str, ...], words: list[str], literals: list[str]) -> Statement:
        """The first statement with one of the words, and then the most of the literals."""
        best: tuple[float, int] | None = None
        for number, statement in enumerate(self.upper):
            verb = next((v for v in verbs if v in statement), None)
            if verb is None or (words and not any(word.upper() in statement for word in words)):
                continue
            # the verb that names the tag counts most, then literals, each once
            score = (verb == verbs[0]) * 0.5 + sum(
                1 for literal in literals if literal and literal.upper() in statement
            )
            if best is None or score > best[0]:
                best = (score, number)
        return None if best is None else clip(self.script[best[1]])

    def of(self, message: Message, frame: bytes, capture: Capture) -> Statement:
        tag, fields = message["tag"], message["fields"]
        if tag in VERBS and tag != "T":
            relation = message["relation"]
            literals = [
                raw.decode(capture.encoding, "replace")[:80]
                for kind, raw in _raws(message, frame)
                if kind == "t"
            ]
            # of a partition the statement may name an ancestor, of the same first letters
            words = [relation["name"], relation["name"].partition("_")[0]]
            return self.best(VERBS[tag], words, list(dict.fromkeys(literals)))
        if tag == "T":
            return self.best(VERBS[tag], [], [])
        if tag == "R":
            return self.best(("CREATE TABLE", "CREATE UNLOGGED"), [f" {fields['name']} ("], [])
        if tag == "Y":
            return self.best(
                ("CREATE TYPE", "CREATE DOMAIN", "CREATE EXTENSION"), [fields["name"]], []
            )
        if tag == "M":
            content = bytes.fromhex(fields["content"]["bytes"]).decode("utf-8", "replace")
            return self.best(("EMIT_MESSAGE",), [f"'{fields['prefix'][:80]}"], [content[:40]])
        if tag == "O":
            return self.best(("PG_REPLICATION_ORIGIN",), [fields["name"]], ["SESSION_SETUP"])
        if fields.get("gid"):
            verbs = {"K": "COMMIT PREPARED", "r": "ROLLBACK PREPARED"}
            quoted = "'" + fields["gid"].replace("'", "''") + "'"
            return self.best((verbs.get(tag, "PREPARE TRANSACTION"),), [quoted], [])
        return self.by_xid.get(message["top_xid"])


def clip(statement: str) -> str:
    return statement if len(statement) <= 240 else statement[:239] + "…"


# --- what to keep -------------------------------------------------------------------------------


def novelties(message: Message, frame: bytes, capture: Capture, scenario: Scenario) -> set[Any]:
    """What a frame shows; it is kept if nothing before it showed one of these."""
    tag = message["tag"]
    key = (capture.entry["instance"], capture.entry["scenario"])
    shown: set[Any] = {
        ("fact", capture.major, name)
        for name, holds in FACTS.items()
        if holds(message, frame, capture)
    }
    shown.add(("tag", capture.entry["instance"], capture.entry["scenario"], tag, len(frame) == 9))
    shown.add(("in stream", capture.major, tag, message["in_stream"]))
    if not frame.isascii() and capture.entry["scenario"].startswith("encoding"):
        shown.add(("encoding", capture.encoding, capture.entry["optionset"], tag))
    if message["tuples"]:
        fields = message["fields"]
        kinds = [(name, "".join(sorted(set(_kinds(message, name))))) for name in message["tuples"]]
        shown.add(("kinds", capture.major, tag, fields.get("old_kind"), *kinds))
        settings = capture.entry["guc_set"]
        for data in message["tuples"].values():
            for oid, column in zip(type_ids(message, scenario), data["columns"], strict=True):
                if column[0] not in "tb":
                    continue
                raw = frame[column[1] : column[1] + column[2]]
                if settings == "default" and oid < 16384:
                    shown.add(("type", capture.major, oid, column[0]))
                typed = value_of(oid, column[0], raw, capture) is not None
                if typed and key == ("16", "all_types") and len(raw) <= 40:
                    shown.add(("value", oid, column[0], raw))
    return shown


def value_of(oid: int, kind: str, raw: bytes, capture: Capture) -> list[str] | None:
    if kind == "b":
        return binary_value(oid, raw, capture.encoding)
    if capture.entry["guc_set"] != "default" and oid not in (16, 20, 21, 23, 25, 26, 1043):
        return None  # another DateStyle, extra_float_digits or bytea_output
    return text_value(oid, raw, capture.encoding)


def described(
    message: Message, frame: bytes, capture: Capture, scenario: Scenario, key: Any
) -> Message:
    tuples: dict[str, Any] = {}
    texts = scenario.texts.get(key, []) if capture.entry["guc_set"] == "default" else []
    position = 0
    oids = type_ids(message, scenario) if message["tuples"] else []
    copied = bool(message["tuples"])
    for name, data in message["tuples"].items():
        values: dict[str, Any] = {}
        printed: dict[str, Any] = {}
        row: list[bytes | None] = []
        for number, (oid, column) in enumerate(zip(oids, data["columns"], strict=True)):
            raw = frame[column[1] : column[1] + column[2]] if len(column) == 3 else None
            row.append(raw)
            if raw is not None and number < MAX_VALUES:
                value = value_of(oid, column[0], raw, capture)
                if value is not None:
                    values[str(number)] = value
                text = texts[position] if position < len(texts) else None
                if column[0] == "b" and text is not None and len(text) < 2000:
                    printed[str(number)] = text
            position += 1
        entry: dict[str, Any] = {"columns": data["columns"]}
        if values:
            entry["values"] = values
        if printed:
            entry["texts"] = printed
        tuples[name] = entry
        kinds = set(_kinds(message, name))
        form = "binary" if "b" in kinds else "text"
        copied = (
            name == "new"
            and kinds != {"t", "b"}
            and "u" not in kinds
            and scenario.in_copy(message["relation"], tuple(row), capture.entry["guc_set"], form)
        )
    result: dict[str, Any] = {"class": message["class"], "fields": message["fields"]}
    if tuples:
        result["tuples"] = tuples
        result["relation"] = [message["relation"]["namespace"], message["relation"]["name"]]
        if copied:
            result["copy"] = True
    return result


def extract(scenario: Scenario, shown: set[Any], report: collections.Counter[str]) -> Message:
    """The file of a scenario's vectors; adds to `shown` what they show."""
    context: list[str] = []
    vectors = []
    truth = scenario.captures[0].truth
    assert truth is not None
    attribution = Attribution(truth.script)
    for capture in scenario.captures:
        pending: list[tuple[Any, Message, bytes]] = []
        attribution.by_xid = {}
        for key, message, frame in walk(capture):
            if message["tuples"]:
                change = told(message, frame, capture, scenario)
                report["changes told by test_decoding"] += change is not None
                message["test_decoding"] = None if change is None else change.kind
            new = novelties(message, frame, capture, scenario) - shown
            if len(frame) > MAX_FRAME:
                new = {thing for thing in new if thing[-1] in LARGE and len(frame) < 30_000}
            if new:
                shown |= new
                message["facts"] = sorted(thing[2] for thing in new if thing[0] == "fact")
                pending.append((key, message, frame))
            if message["tag"] in "IUDM" and message["top_xid"] not in attribution.by_xid:
                statement = attribution.of(message, frame, capture)
                if statement is not None:
                    attribution.by_xid[message["top_xid"]] = statement
        for key, message, frame in pending:
            before = []
            for piece in message["context"]:
                if piece.hex() not in context:
                    context.append(piece.hex())
                before.append(context.index(piece.hex()))
            vector: dict[str, Any] = {"id": f"{capture.name}:{message['number']}"}
            if message["facts"]:
                vector["facts"] = message["facts"]
            vector["server"] = capture.entry["server_version"]
            vector["options"] = capture.options
            if capture.encoding != "utf-8":
                vector["encoding"] = capture.encoding
            vector["sql"] = attribution.of(message, frame, capture)
            vector["in_stream"] = message["in_stream"]
            vector["before"] = before
            vector["frame"] = frame.hex()
            vector.update(described(message, frame, capture, scenario, key))
            report["rows confirmed by COPY"] += "copy" in vector
            report["rows"] += "tuples" in vector
            report["with SQL"] += vector["sql"] is not None
            report["vectors"] += 1
            vectors.append(vector)
    return {"context": context, "vectors": vectors}


def with_context(vectors: list[Message]) -> Message:
    """A file's content: the frames of `before` become indexes into one list."""
    context: list[str] = []
    for vector in vectors:
        for number, frame in enumerate(vector["before"]):
            if frame not in context:
                context.append(frame)
            vector["before"][number] = context.index(frame)
    return {"context": context, "vectors": vectors}


def write(path: Path, content: Message) -> int:
    """One line for each context frame and each vector; the bytes written."""
    lists = [
        f'"{name}": [\n' + ",\n".join(dumps(entry) for entry in entries) + "\n]"
        for name, entries in content.items()
    ]
    data = ("{\n" + ",\n".join(lists) + "\n}\n").encode("ascii")
    path.write_bytes(data)
    return len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, default=paths.TESTS / "vectors")
    arguments = parser.parse_args()
    scenarios: dict[tuple[str, str], list[Capture]] = {}
    for capture in captures(arguments.corpus, performance=False):
        if capture.truth is not None and not capture.entry["optionset"].endswith("_copydata"):
            key = (capture.entry["instance"], capture.entry["scenario"])
            scenarios.setdefault(key, []).append(capture)
    shown: set[Any] = set()
    report: collections.Counter[str] = collections.Counter()
    # the scenarios that were written by hand come before the random one: their SQL says more
    order = sorted(scenarios, key=lambda key: (key[0], key[1].startswith("fuzz"), key[1]))
    for instance, name in order:
        if name == "pgbench":
            continue
        members = scenarios[instance, name]
        content = extract(Scenario(arguments.corpus, members), shown, report)
        size = write(arguments.out / f"{instance}-{name}.json", content)
        report["bytes"] += size
        print(f"{instance}-{name}: {len(content['vectors'])} vectors, {size} bytes")
    missing = [name for name in FACTS if not any(s[0] == "fact" and s[2] == name for s in shown)]
    report["bytes"] += write(arguments.out / "made.json", with_context(made_vectors()))
    report["bytes"] += write(arguments.out / "sequences.json", {"sequences": made_sequences()})
    for what, number in report.items():
        print(f"{what}: {number}")
    print("facts that no frame shows:", missing)


if __name__ == "__main__":
    main()
