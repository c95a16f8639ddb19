"""Fuzz targets in Python: both implementations over the same bytes, and what reads text and files.

    python tests/fuzz/python_targets.py TARGET [option of libFuzzer]… [corpus]…
    python tests/fuzz/python_targets.py --seeds DIRECTORY

A target takes bytes, and raises if it finds a fault: an exception that callers do not expect, a
difference between the implementations, or a secret in a text. Each has a function of seeds; those
of core_targets.c have only this function here. fuzz.py runs all targets.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import atheris

sys.path.append(str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["pgoutput_fast"]):
    import pgoutput_fast as pf
    from pgoutput_fast import _impl, errors, testing
    from pgoutput_fast.apply.options import SyncOptions, TargetOptions
    from pgoutput_fast.capture_options import CaptureOptions
    from pgoutput_fast.changelog.remote import parse_place, refuse_secrets
    from pgoutput_fast.changelog.remote import without_secrets as without_secrets_of_url
    from pgoutput_fast.columnar.fields import CONVERTERS
    from pgoutput_fast.connections import ConnectionParameters
    from pgoutput_fast.decoding import _core, _pure
    from pgoutput_fast.names import name_parts, parse_name
    from pgoutput_fast.policies import policies_of
    from pgoutput_fast.segments import layout_index, reader
    from pgoutput_fast.segments.format import checksum
    from pgoutput_fast.spark._source_options import SourceOptions, source_options
    from pgoutput_fast.transactions import Assembler
    from pgoutput_fast.transcode import inserts_of_copy, without_xids
    from pgoutput_fast.types.table import BUILTIN_TYPES

import numpy as np
import pyarrow as pa
from support.changelogs import written_segments
from support.columns.columnar import IMPLEMENTATIONS, chosen, exact
from support.columns.columnar import differences as column_differences
from support.frames.comparison import (
    differences,
    fingerprint,
    observe,
    observe_decode,
    refused,
)
from support.frames.made_vectors import binary, insert, relation, text
from support.frames.mutations import stream_frame
from support.frames.vector_files import read_vectors

# The compiled modules are imported now, as libFuzzer counts them when it starts.
for module in ("columnar._engine", "segments._annotate", "transactions._scan", "transcode._bulk"):
    for implementation in IMPLEMENTATIONS:
        _impl.twin(module, implementation)

Seeds = Iterator[bytes]
BOTH: list[Any] = [_core, _pure]
POLICIES = (
    None,
    pf.Policies(infinity="null", out_of_range="clamp", json="parse"),
    pf.Policies(infinity="clamp", out_of_range="null", special_values="null"),
    pf.Policies(infinity="text", out_of_range="text", special_values="text"),
)
TYPES = [oid for row in BUILTIN_TYPES for oid in (row.oid, row.array_oid) if oid]
MOST_FRAMES = 40
SECRET = "S3cr3t"


def expect(found: object, *context: object) -> None:
    """Raise if something was found."""
    if found:
        raise AssertionError(found, *context)


def split(data: bytes) -> list[bytes]:
    """Return the frames in `data`: each lies behind two bytes with its length."""
    frames, at = [], 0
    while at < len(data) and len(frames) < MOST_FRAMES:
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        frames.append(data[at + 2 : end])
        at = end
    return frames


def joined(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(2, "big") + frame for frame in frames)


def vectors() -> list[dict[str, Any]]:
    """Return the shortest vector of each class and fault, to read seeds takes time too."""
    found: dict[Any, dict[str, Any]] = {}
    for vector in read_vectors():
        error, decoder_error = (vector.get(key, {}) for key in ("error", "decoder_error"))
        key = (vector["frame"][:1], vector["in_stream"], vector.get("class"), error.get("code"),
               decoder_error.get("code"), *(kind for data in vector.get("tuples", {}).values()
                                            for kind, _ in data["columns"][:3]))  # fmt: skip
        if vector["frame"] and len(vector["before"]) < MOST_FRAMES:
            found.setdefault(key, vector)
            if len(joined(vector["before"])) < len(joined(found[key]["before"])):
                found[key] = vector
    return [*found.values()]


def observed(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or its error, as data that can be compared."""
    try:
        return call()
    except pf.DecodeError as error:
        return refused(error)
    except pf.PgOutputError as error:
        return str(error)


def by_both(call: Callable[[], Any]) -> None:
    """Make a call with each implementation, and compare what comes of it."""
    seen = []
    for name in IMPLEMENTATIONS:
        with chosen(name):
            seen.append(observed(call))
    expect(seen[0] != seen[1] and seen)


# --- frames --------------------------------------------------------------------------------------


def frames(data: bytes) -> None:
    """A decoder of each implementation over the same frames."""
    settings = data[0] if data else 0
    decoders = [module.Decoder(policies=POLICIES[settings % len(POLICIES)]) for module in BOTH]
    for frame in split(data[1:]):
        seen = [outline(decoder, frame) for decoder in decoders]
        expect(seen[0] != seen[1] and seen)
    states = [fingerprint(decoder) for decoder in decoders]
    expect(states[0] != states[1] and "their states differ")


def outline(decoder: Any, frame: bytes) -> Any:
    """Decode a frame. Return what `observe_decode` returns, but for accessors of single values."""
    message = observed(lambda: decoder.decode(frame))
    if type(message) is tuple:  # an error
        return message
    found = [type(message).__name__, repr(message), hash(message)]
    for name in ("old", "new"):
        data = getattr(message, name, None)
        if data is not None:
            found += [observe(data.values), observe(data.texts), data.raws()]
    return found


def frames_seeds() -> Seeds:
    for number, vector in enumerate(vectors()):
        yield bytes([number % 4]) + joined([*vector["before"], vector["frame"]])


def alone(data: bytes) -> None:
    """`decode` of each implementation, which knows no relations."""
    is_streamed, frame = bool(data[:1] > b"\x7f"), data[1:]
    expect(differences(*(observe_decode(module.decode, frame, is_streamed) for module in BOTH)))


def alone_seeds() -> Seeds:
    return (bytes([255 * vector["in_stream"]]) + vector["frame"] for vector in vectors())


# --- values --------------------------------------------------------------------------------------


@functools.cache
def primed(number: int, policies: int) -> Any:
    """Return decoders that know a table whose only column has a type: of messages, of columns."""
    frame = relation([("v", TYPES[number])])
    messages = [module.Decoder(policies=POLICIES[policies]) for module in BOTH]
    columns = []
    for decoder in messages:
        decoder.decode(frame)
    for name in IMPLEMENTATIONS:
        with chosen(name):
            columns.append(pf.ColumnarDecoder(policies=POLICIES[policies]))
            list(columns[-1].decode([frame]))
    return messages, columns


def values(data: bytes) -> None:
    """One value of any type, in text or binary format, as messages have it."""
    if len(data) > 1:
        messages, _ = primed(data[0] % len(TYPES), data[1] >> 1 & 3)
        seen = [outline(decoder, value_frame(data)) for decoder in messages]
        expect(seen[0] != seen[1] and seen)


def fields(data: bytes) -> None:
    """One value of any type, in text or binary format, as columns have it."""
    if len(data) < 2:
        return
    seen = []
    _, columns = primed(data[0] % len(TYPES), data[1] >> 1 & 3)
    for name, decoder in zip(IMPLEMENTATIONS, columns, strict=True):
        with chosen(name):
            seen.append(observed(lambda: after_of(decoder.decode([value_frame(data)]))))  # noqa: B023
    expect(seen[0] != seen[1] and seen)


def value_frame(data: bytes) -> bytes:
    return insert((binary if data[1] & 1 else text)(data[2:]))


def after_of(batches: Iterable[Any]) -> list[Any]:
    """Return the new tuples of batches, to the last byte."""
    return [exact(pa.record_batch(batch).column("after")) for batch in batches]


def values_seeds() -> Seeds:
    """One value of each type, format and form."""
    forms = {}
    for vector in read_vectors():
        if not vector.get("tuples") or "error" in vector or "decoder_error" in vector:
            continue
        decoder = BOTH[0].Decoder(encoding=vector.get("encoding", "utf-8"))
        *_, message = [decoder.decode(frame) for frame in (*vector["before"], vector["frame"])]
        for data in vector["tuples"].values():
            described = message.relation.columns
            for column, (kind, raw) in zip(described, data["columns"], strict=True):
                if raw is not None and len(raw) < 50 and column.type_id in TYPES:
                    form = re.sub(rb"[1-9]+", b"1", re.sub(rb"[a-z]+", b"a", raw))
                    if kind == "b":
                        form = bytes([len(raw)])
                    seed = bytes([TYPES.index(column.type_id), kind == "b"])
                    forms[seed + form] = seed + raw
    return iter(forms.values())


fields_seeds = values_seeds


# --- batches -------------------------------------------------------------------------------------

OPTIONS: tuple[dict[str, Any], ...] = (
    {"on_error": "collect"},
    {"policies": POLICIES[3], "target": "spark", "fill_unchanged": True, "on_error": "collect"},
    {"policies": POLICIES[2], "target": "portable", "max_rows": 3, "on_error": "collect"},
    {"policies": POLICIES[1], "max_bytes": 300},
    {"tables": "*.[a-m]*", "columns": ("id", "name"), "on_error": "collect"},
)


def columns(data: bytes) -> None:
    """A columnar decoder of each implementation over the same frames, in one or two calls."""
    settings, whole = data[0] if data else 0, split(data[1:])
    middle = len(whole) // 2 if settings & 64 else len(whole)
    calls = [whole[:middle], whole[middle:]]
    expect(column_differences(calls, **OPTIONS[settings % 8 % len(OPTIONS)]))


columns_seeds = frames_seeds


def arrays_of(batch: Any) -> Any:
    arrays = (
        batch.tags, batch.xids, batch.relation_ids, batch.old_kinds, batch.old_columns,
        batch.new_columns, batch.first_slices, batch.slices, batch.begins, batch.commits,
    )  # fmt: skip
    rare = {i: repr(message) for i, message in batch.messages.items()}
    return [(array.dtype.descr, array.tolist()) for array in arrays], rare, repr(batch)


def batches(data: bytes) -> None:
    """What goes over the frames of a buffer: `decode_batch`, scans, checks, cuts of xids."""
    settings, whole = data[0] if data else 0, split(data[1:])
    inside: int | bool = 7 if settings & 1 else False
    buffer = b"".join(whole)
    offsets = np.array([*itertools.accumulate(map(len, whole), initial=0)], np.int64)
    start = min(settings >> 1 & 3, len(whole))
    by_both(lambda: arrays_of(pf.decode_batch(buffer, offsets, inside)))
    by_both(lambda: tuple(map(bytes, without_xids(buffer, offsets))))
    by_both(lambda: repr(_impl.twin("transactions._scan").scan(buffer, offsets, start, inside)))

    def whole_transactions() -> Any:
        table, end = _impl.twin("transactions._scan").whole(buffer, offsets, start)
        return table.tolist(), end

    def annotated() -> Any:
        annotate = _impl.twin("segments._annotate").annotate
        beside, marks, commits, *more = annotate(buffer, offsets, None, 0)
        # Behind a fault, nothing is said of frames.
        count = len(whole) if more[2] is None else more[2][0]
        return [array[:count].tolist() for array in beside], marks, commits.tolist(), more

    by_both(whole_transactions)
    by_both(annotated)


batches_seeds = frames_seeds


def copies(data: bytes) -> None:
    """Rows in COPY's binary format."""
    settings = data[0] if data else 0
    formats, header = "bt" * (settings & 3), bool(settings & 4)

    def made() -> Any:
        found = inserts_of_copy(data[1:], 1, formats, xid=settings & 8 or None, header=header)
        return [part if isinstance(part, (int, bool)) else bytes(part) for part in found]

    by_both(made)


def copies_seeds() -> Seeds:
    row = b"\0\2\0\0\0\4\0\0\0\1\xff\xff\xff\xff"
    yield b"\1" + row * 3 + b"\xff\xff"
    yield b"\5PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0" + row


# --- transactions --------------------------------------------------------------------------------


class Chance(random.Random):
    """A generator whose numbers are bytes of the input, and zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data, self.at = data, 0

    def getrandbits(self, k: int) -> int:
        count = (k + 7) // 8
        number = int.from_bytes(self.data[self.at : self.at + count], "little")
        self.at += count
        return number & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(8) / 256


def transactions(data: bytes) -> None:
    """An assembler of each implementation over messages in any order."""
    chance = Chance(data)
    prepared = chance.choice(("commit", "prepare"))
    memory = chance.choice((0, 100, 1 << 20))
    inside, calls = None, [[relation([("id", 23), ("name", 25)])]]
    while chance.at < len(data) and sum(map(len, calls)) < 60:
        frame = stream_frame(chance, inside)
        if frame == b"reset":
            calls.append([])
            continue
        if frame[:1] == b"S" and len(frame) == 6:
            inside = int.from_bytes(frame[1:5], "big")
        elif frame[:1] == b"E":
            inside = None
        calls[-1].append(frame)

    def assembled() -> list[Any]:
        assembler = Assembler(memory, prepared=prepared)
        return [observed(lambda: arrivals(assembler, call)) for call in calls]  # noqa: B023

    by_both(assembled)


def arrivals(assembler: Assembler, call: list[bytes]) -> list[Any]:
    return [
        (repr(one), list(one.frames()), observed(lambda: [repr(m) for m in one]),  # noqa: B023
         observed(lambda: after_of(one.batches())))  # noqa: B023
        for one in assembler.feed(call, [1] * len(call))
    ]  # fmt: skip


def transactions_seeds() -> Seeds:
    return (random.Random(seed).randbytes(100 + 10 * seed) for seed in range(40))


# --- files ---------------------------------------------------------------------------------------

_PLACE = Path(
    tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").exists() else None)
)


def segments(data: bytes) -> None:
    """A damaged file of a segment, whose checksums fit: only an error of this package."""
    path = _PLACE / "0000000000000064-000000000000006E-00000-of-00001.arrow"
    path.write_bytes(data)
    for name in IMPLEMENTATIONS:
        with chosen(name):
            try:
                with reader.SegmentReader(path) as opened:
                    expect(not isinstance(opened.index, list))
                    for batch in opened:
                        batch.to_pylist()
                    opened.newest_commit()
            except pf.PgOutputError as error:
                expect(path.name not in str(error) or not str(error).isprintable(), str(error))


def fitting(self: Any, index: int, batch: Any, custom: Any, more: bytes = b"") -> None:
    """Check a batch as the reader does, but take any checksum: an attacker can make one."""
    if checksum(index, batch, more) is None:
        raise self._damaged("a buffer is too short")


reader.SegmentReader._check = fitting  # type: ignore[method-assign]


def segments_seeds() -> Seeds:
    for size in (0, 3, 200):
        with (
            tempfile.TemporaryDirectory() as directory,
            written_segments.writer(Path(directory)) as out,
        ):
            rows = [written_segments.insert(value=b"x" * size) for _ in range(size)]
            body = written_segments.transaction(100, written_segments.relation(1), *rows)
            written_segments.write(out, body, [(200, written_segments.message(200))])
            out.flush()
            for path in Path(directory).glob("*.arrow"):
                yield path.read_bytes()


def layouts(data: bytes) -> None:
    """A layout index: it is refused as malformed, or gives the same again."""
    try:
        spans = layout_index.read_index(data)
    except reader.MALFORMED:
        return
    expect(layout_index.read_index(layout_index.index_bytes(spans)) != spans)


def layouts_seeds() -> Seeds:
    span = layout_index.Span(16385, 3, 100, 1, 5, 9, relation([("id", 23)]), (b"Y",))
    yield layout_index.index_bytes([])
    yield layout_index.index_bytes([span])
    yield layout_index.index_bytes([span, span._replace(types=())])


# --- texts ---------------------------------------------------------------------------------------

FIELDS = [
    field
    for kind in (CaptureOptions, SyncOptions, TargetOptions, SourceOptions)
    for field in kind.options()
]


def options(data: bytes) -> None:
    """The text of an option, of a name and of an LSN: a value, or an error of this package."""
    written = data[1:].decode("utf-8", "surrogateescape")
    field = FIELDS[data[0] % len(FIELDS)] if data else FIELDS[0]
    words = written.split()
    for call in (
        lambda: field.kind.from_text(field.name, written),
        lambda: source_options({field.name: written}),
        lambda: policies_of(words),
        lambda: pf.parse_lsn(written),
        lambda: name_parts(written),
        lambda: parse_name(written, "schema.table"),
    ):
        try:
            call()
        except pf.PgOutputError as error:
            expect(field.kind.is_secret and SECRET in str(error))


def options_seeds() -> Seeds:
    texts = ["16MB", "1.5GB", "10min", "true", "on", "parallel", "4", "infinity=null", "a.b,c",
             "numeric=10,2 json=parse", '"a.b".c', "16/B374D848", "zstd", "s3://b/c"]  # fmt: skip
    for number, field in enumerate(FIELDS):
        for written in (*texts, str(field.default), *field.kind.choices):
            yield bytes([number]) + written.encode()


def connections(data: bytes) -> None:
    """Strings and URLs with a password: errors and reprs never show it."""
    form, rest = (data[0], data[1:].decode("utf-8", "replace")) if data else (0, "")
    before, _, behind = rest.partition("\n")
    written = (
        f"{before} password={SECRET} {behind}",
        f"{before} password='{SECRET} x' {behind}",
        f"postgresql://{before}:{SECRET}@{behind}",
        f"postgresql://{before}?password={SECRET}&{behind}",
        f"s3://{before}:{SECRET}@{behind}",
        f"s3://{before}?secret_key={SECRET}&{behind}",
    )[form % 6]
    shown = []
    calls: list[Callable[[], Any]] = [
        lambda: (ConnectionParameters(written), errors.without_passwords(written))
    ]
    if form % 6 > 3:
        calls = [
            lambda: refuse_secrets(written, parameter="target"),
            lambda: parse_place(written),
            lambda: without_secrets_of_url(written),
        ]
    for call in calls:
        try:
            shown.append(repr(call()))
        except pf.PgOutputError as error:
            shown += traceback.format_exception(error)
    # The lines of this file in a traceback have the word only as a name.
    expect([one for one in shown if SECRET in one], written)


def connections_seeds() -> Seeds:
    for form in range(6):
        for written in (
            "host=h\nuser=u",
            "u\nh:5432/db?sslmode=require",
            "h/db\nport=1",
            "host='a b\n'",
        ):
            yield bytes([form]) + written.encode()


# --- the targets in C ----------------------------------------------------------------------------


def core_tuples_seeds() -> Seeds:
    for vector in vectors():
        if vector["frame"][:1] in b"ID":
            yield vector["frame"][6 + 4 * vector["in_stream"] :]


def core_values_seeds() -> Seeds:
    """One value of each form, for each converter."""
    shapes = {re.sub(rb"[1-9]", b"1", seed[2:]): seed[2:] for seed in values_seeds()}.values()
    return (bytes([code, 5]) + value for value in shapes for code in range(len(CONVERTERS)))


def core_nested_seeds() -> Seeds:
    """Values that may be nested, for each of the nine trees in core_targets.c."""
    raws = {seed[2:]: seed[1] for seed in values_seeds() if seed[1] or seed[2:3] in b"{[("}
    raws |= {b'(1,"a""b",t,1.50,)': 0, b"{[1,2),(3,)}": 0, b"[1,2.5,-3]": 0, b"empty": 0}
    raws |= {b'{"a\\"b",NULL,c}': 0, b'("{a,b}","[1,5)")': 0, b"{1,2,NULL}": 0}
    for raw, is_binary in raws.items():
        for tree in range(9):
            yield bytes([128 + (tree + 7) % 9 if is_binary else tree, 0]) + raw


def core_rows_seeds() -> Seeds:
    rows = [
        [text("1"), text("abc")],
        [binary(bytes(size)) for size in (4, 8, 8, 1, 16)]
        + [binary(b"\1{}"), binary(b"x"), binary(b"\0\1")],
        [
            text(t)
            for t in ("2026-01-02 03:04:05.5", "1.5", "1.50", "t", "2026-01-02", "7", "\\x01", "")
        ],
        [text("a" * 30), text("\u00e9"), None],
    ]
    for settings in range(16):
        xid = 7 if settings & 2 else None
        made = [testing.begin(5)] * (xid is None)
        for number, row in enumerate(rows):
            made += [insert(*row, relation_id=number, xid=xid)] * 2
        yield bytes([settings]) + b"".join(bytes([len(frame)]) + frame for frame in made)


def main() -> None:
    """Fuzz a target, or write the seeds of all targets."""
    if sys.argv[1] == "--seeds":
        for name, seeds in globals().items():
            if name.endswith("_seeds"):
                target = name.removesuffix("_seeds").replace("_", "-")
                write_files(Path(sys.argv[2], target), seeds())
        return
    atheris.Setup([sys.argv[0], *sys.argv[2:]], globals()[sys.argv[1]])
    atheris.Fuzz()


def write_files(directory: Path, seeds: Seeds) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (directory / str(number)).write_bytes(seed)


if __name__ == "__main__":
    main()
