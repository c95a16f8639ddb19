"""Generate pgoutput streams for the benchmarks: the workloads `narrow`, `wide`, `fat` and twins.

Each is a stream of protocol version 1 as a server sends it: the Relation first, then transactions
of five rows (Begin, Insert or Update, Commit), with values in text or in binary format. The same
name, number of rows and seed give the same rows in both formats, so that results can be compared.
Texts are those that a server prints with DateStyle ISO and TimeZone UTC.

`narrow_varied` and `wide_varied` are twins of `narrow` and `wide` with what real streams have: old
keys, deletes, and values whose length no processor can foresee. They are decoded as columns alone.

Row frames, mean length in bytes (text / binary): narrow 55 / 54, wide 440 / 390, fat 8,200,
narrow_varied 64 / 61, wide_varied 480 / 425.
"""

from __future__ import annotations

import functools
import json
import random
import struct
import uuid
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pgoutput_fast import testing

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

TupleFormat = Literal["text", "binary"]

NAMES = ("narrow", "wide", "fat", "narrow_varied", "wide_varied")
VARIED = NAMES[3:]
"""Those that are decoded as columns alone."""
FORMATS: tuple[TupleFormat, ...] = ("text", "binary")

SEED = 20_240_229
ROWS_PER_TRANSACTION = 5
NULL_SHARE = 0.05
UPDATE_SHARE = 0.5
VARIED_DELETE_SHARE = 0.1
VARIED_OLD_KEY_SHARE = 0.05
"""Of the updates of a twin."""

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)
_FIRST_TIMESTAMP = datetime(2024, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


# --- How a server sends a value -------------------------------------------------------------------


def _text_bool(value: bool) -> str:
    return "t" if value else "f"


def _text_float8(value: float) -> str:
    # Python and the server print the shortest digits that read back as the same double. Between
    # 1e-4 and 1e15 they differ only in the ".0" of whole numbers.
    return repr(value).removesuffix(".0")


def _text_timestamptz(value: datetime) -> str:
    text = value.strftime("%Y-%m-%d %H:%M:%S")
    if value.microsecond:
        text += f".{value.microsecond:06d}".rstrip("0")
    return text + "+00"


def _binary_bool(value: bool) -> bytes:
    return b"\x01" if value else b"\x00"


def _binary_numeric(value: Decimal) -> bytes:
    """numeric_send's form: number of digits, weight, sign, scale, then the base-10,000 digits."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    scale = -exponent
    padding = -scale % 4
    number = int("".join(map(str, digits))) * 10**padding
    groups: list[int] = []
    while number:
        number, group = divmod(number, 10_000)
        groups.insert(0, group)
    weight = len(groups) - (scale + padding) // 4 - 1 if groups else 0
    while groups and groups[-1] == 0:
        groups.pop()
    return struct.pack(
        f">hhHH{len(groups)}H",
        len(groups),
        weight,
        0x4000 if sign and groups else 0,
        scale,
        *groups,
    )


def _binary_date(value: date) -> bytes:
    return struct.pack(">i", value.toordinal() - _POSTGRES_EPOCH.toordinal())


def _microseconds(value: datetime) -> int:
    return (value - _POSTGRES_EPOCH) // _MICROSECOND


def _binary_timestamptz(value: datetime) -> bytes:
    return struct.pack(">q", _microseconds(value))


@dataclass(frozen=True)
class Type:
    """A built-in type: its OID, and functions that make its text and binary format of a value."""

    oid: int
    text: Callable[[Any], str]
    binary: Callable[[Any], bytes]


BOOL = Type(16, _text_bool, _binary_bool)
INT8 = Type(20, str, struct.Struct(">q").pack)
INT4 = Type(23, str, struct.Struct(">i").pack)
TEXT = Type(25, str, str.encode)
FLOAT8 = Type(701, _text_float8, struct.Struct(">d").pack)
BPCHAR = Type(1042, str, str.encode)
DATE = Type(1082, date.isoformat, _binary_date)
TIMESTAMPTZ = Type(1184, _text_timestamptz, _binary_timestamptz)
NUMERIC = Type(1700, str, _binary_numeric)
UUID = Type(2950, str, lambda value: value.bytes)
JSONB = Type(3802, str, lambda value: b"\x01" + value.encode())


# --- Values ---------------------------------------------------------------------------------------

_WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty"),
    *("knoll", "ledge", "maple", "north", "ocean", "plain", "quarry", "river", "stone", "thorn"),
    *("upper", "valley", "willow", "yonder", "zephyr"),
)

# Phrases whose characters take two, three and four bytes in UTF-8.
_PHRASES = (
    "съешь ещё этих мягких французских булок",
    "ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "いろはにほへと ちりぬるを",
    "天地玄黃 宇宙洪荒",
    "다람쥐 헌 쳇바퀴에 타고파",
    "🚚 📦 ✅",
)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def _uuid4(rng: random.Random) -> uuid.UUID:
    return uuid.UUID(int=rng.getrandbits(128), version=4)


def _timestamp(rng: random.Random) -> datetime:
    return _FIRST_TIMESTAMP + rng.randrange(365 * 86_400 * 1_000_000) * _MICROSECOND


def _numeric_12_2(rng: random.Random) -> Decimal:
    return Decimal(rng.randrange(-999_999, 10_000_000)).scaleb(-2)


def _jsonb(document: object) -> str:
    """The document as jsonb prints it; its keys must be in the order of jsonb, shortest first."""
    return json.dumps(document, ensure_ascii=False)


def _small_document(rng: random.Random) -> str:
    return _jsonb(
        {"n": rng.randrange(1_000), "tag": rng.choice(_WORDS), "open": rng.random() < 0.5}
    )


def _large_document(rng: random.Random) -> str:
    """A document of about 8 kB in UTF-8; a fifth of its notes is in other scripts than Latin."""
    events = [
        {
            "at": _timestamp(rng).isoformat(),
            "id": str(_uuid4(rng)),
            "note": rng.choice(_PHRASES) if rng.random() < 0.2 else _words(rng, 8),
            "price": rng.randrange(1, 100_000) / 100,
        }
        for _ in range(49)
    ]
    return _jsonb({"events": events, "source": _words(rng, 2)})


# Values of the twins: small ones are as frequent as large ones, so that no length is usual.


def _integer(bits: int, signed: bool) -> Callable[[random.Random], int]:
    """A function that makes integers of any magnitude; if `signed`, one in four is negative."""

    def make(rng: random.Random) -> int:
        value = rng.getrandbits(rng.randint(1, bits))
        return -value if signed and rng.random() < 0.25 else value

    return make


def _varied_numeric(rng: random.Random) -> Decimal:
    return Decimal(_integer(39, True)(rng)).scaleb(-2)


def _varied_float(rng: random.Random) -> float:
    return round(rng.uniform(-180, 180), rng.randint(0, 14))


def _varied_text(rng: random.Random) -> str:
    """A text of 1 to some 75 bytes; one in five is in another script than Latin."""
    text = rng.choice(_PHRASES) if rng.random() < 0.2 else _words(rng, 8)
    return text[: rng.randint(1, len(text))].rstrip()


def _varied_timestamp(rng: random.Random) -> datetime:
    """A time with none to six digits of a fraction, each as frequent as the others."""
    unit = 10 ** rng.randint(0, 6)
    value = _timestamp(rng)
    return value.replace(microsecond=value.microsecond // unit * unit)


def _varied_document(rng: random.Random) -> str:
    return _jsonb(
        {"n": _integer(31, True)(rng), "tag": _varied_text(rng), "open": rng.random() < 0.5}
    )


# --- Tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table; `make` returns its next value. Key columns are never NULL."""

    name: str
    type: Type
    make: Callable[[random.Random], Any]
    modifier: int = -1
    is_key: bool = False


@dataclass(frozen=True)
class Table:
    oid: int
    name: str
    columns: tuple[Column, ...]
    null_share: float = 0.0
    delete_share: float = 0.0
    old_key_share: float = 0.0  # of its updates


_NUMERIC_12_2 = (12 << 16 | 2) + 4
_BPCHAR_14 = 14 + 4

_NARROW = Table(
    16_401,
    "accounts",
    (
        Column("aid", INT4, lambda rng: rng.randrange(1, 1_000_001), is_key=True),
        Column("bid", INT4, lambda rng: rng.randrange(1, 100)),
        Column("abalance", INT4, lambda rng: rng.randrange(-50_000, 50_001)),
        Column("filler", BPCHAR, lambda rng: rng.choice(_WORDS).ljust(14), _BPCHAR_14),
    ),
)

_WIDE = Table(
    16_402,
    "orders",
    (
        Column("id", INT8, lambda rng: rng.randrange(10**6, 10**8), is_key=True),
        Column("tenant_id", INT4, lambda rng: rng.randrange(1, 1_000)),
        Column("customer_id", INT8, lambda rng: rng.randrange(1, 10**8)),
        Column("status", TEXT, lambda rng: rng.choice(_WORDS)),
        Column("quantity", INT4, lambda rng: rng.randrange(1, 10_000)),
        Column("price", NUMERIC, _numeric_12_2, _NUMERIC_12_2),
        Column("discount", NUMERIC, _numeric_12_2, _NUMERIC_12_2),
        Column("created_at", TIMESTAMPTZ, _timestamp),
        Column("order_date", DATE, lambda rng: _timestamp(rng).date()),
        Column("is_paid", BOOL, lambda rng: rng.random() < 0.5),
        Column("reference", UUID, _uuid4),
        Column("attributes", JSONB, _small_document),
        Column("latitude", FLOAT8, lambda rng: rng.randrange(1, 9_000_000) / 100_000),
        Column("city", TEXT, lambda rng: _words(rng, 2)),
        Column("weight_g", INT4, lambda rng: rng.randrange(1, 10**6)),
        Column("is_gift", BOOL, lambda rng: rng.random() < 0.1),
        Column("carrier_id", INT4, lambda rng: rng.randrange(1, 10**7)),
        Column("tax", NUMERIC, _numeric_12_2, _NUMERIC_12_2),
        Column("shipped_on", DATE, lambda rng: _timestamp(rng).date()),
        Column("updated_at", TIMESTAMPTZ, _timestamp),
        Column("longitude", FLOAT8, lambda rng: rng.randrange(1, 18_000_000) / 100_000),
        Column("is_express", BOOL, lambda rng: rng.random() < 0.3),
        Column("warehouse_id", INT4, lambda rng: rng.randrange(1, 10**5)),
        Column("note", TEXT, lambda rng: _words(rng, 3)),
        Column("points", INT4, lambda rng: rng.randrange(-(10**6), 10**6)),
        Column("total", NUMERIC, _numeric_12_2, _NUMERIC_12_2),
        Column("score", FLOAT8, lambda rng: rng.randrange(1, 10_000) / 100),
        Column("coupon", TEXT, lambda rng: f"{rng.choice(_WORDS)}-{rng.randrange(100)}"),
        Column("version", INT4, lambda rng: rng.randrange(1, 100_000)),
        Column("is_active", BOOL, lambda rng: rng.random() < 0.9),
    ),
    NULL_SHARE,
)

_FAT = Table(
    16_403,
    "documents",
    (
        Column("id", INT8, lambda rng: rng.randrange(1, 10**9), is_key=True),
        Column("kind", TEXT, lambda rng: rng.choice(_WORDS)),
        Column("changed_at", TIMESTAMPTZ, _timestamp),
        Column("document", JSONB, _large_document),
    ),
)

_VARIED_VALUES: dict[Type, Callable[[random.Random], Any]] = {
    INT4: _integer(31, True),
    INT8: _integer(63, True),
    NUMERIC: _varied_numeric,
    FLOAT8: _varied_float,
    TEXT: _varied_text,
    TIMESTAMPTZ: _varied_timestamp,
    JSONB: _varied_document,
}


def _varied_column(column: Column) -> Column:
    if column.is_key:
        return replace(column, make=_integer(31 if column.type is INT4 else 63, False))
    if column.type is BPCHAR:
        column = replace(column, type=TEXT, modifier=-1)
    return replace(column, make=_VARIED_VALUES.get(column.type, column.make))


def _twin(table: Table, oid: int) -> Table:
    """A table with the same columns, whose values and changes are varied."""
    return replace(
        table,
        oid=oid,
        name=f"varied_{table.name}",
        columns=tuple(map(_varied_column, table.columns)),
        delete_share=VARIED_DELETE_SHARE,
        old_key_share=VARIED_OLD_KEY_SHARE,
    )


TABLES = {
    "narrow": _NARROW,
    "wide": _WIDE,
    "fat": _FAT,
    "narrow_varied": _twin(_NARROW, 16_404),
    "wide_varied": _twin(_WIDE, 16_405),
}


# --- Frames ---------------------------------------------------------------------------------------


def _relation(table: Table) -> bytes:
    types = {column.name: (column.type.oid, column.modifier) for column in table.columns}
    key = [column.name for column in table.columns if column.is_key]
    return testing.Table(table.name, types, table.oid, key=key).relation()


Row = tuple[Any, ...]


class Change(NamedTuple):
    """An Insert, Update or Delete: its tag and its tuples. Of an old row, only the key is sent."""

    tag: str
    old: Row | None
    new: Row | None


def _change(table: Table, rng: random.Random) -> Change:
    draw = rng.random()
    tag = "U" if draw < UPDATE_SHARE else "D" if draw >= 1 - table.delete_share else "I"
    old = new = None
    # Tables without old keys take no number for them, so that their streams stay as they were.
    if tag == "D" or (tag == "U" and table.old_key_share and rng.random() < table.old_key_share):
        old = tuple(column.make(rng) if column.is_key else None for column in table.columns)
    if tag != "D":
        new = tuple(
            None if not column.is_key and rng.random() < table.null_share else column.make(rng)
            for column in table.columns
        )
    return Change(tag, old, new)


def _sent(table: Table, row: Row, tuple_format: TupleFormat) -> list[str | bytes | None]:
    """The values of a row as a server sends them."""
    return [
        None
        if value is None
        else (column.type.text(value) if tuple_format == "text" else column.type.binary(value))
        for column, value in zip(table.columns, row, strict=True)
    ]


def _frame(table: Table, change: Change, tuple_format: TupleFormat) -> bytes:
    old = _sent(table, change.old, tuple_format) if change.old else None
    if change.new is None:
        assert old is not None
        return testing.delete(table.oid, old)
    new = _sent(table, change.new, tuple_format)
    if change.tag == "I":
        return testing.insert(table.oid, new)
    return testing.update(table.oid, new, old)


@dataclass(frozen=True)
class Workload:
    """A generated stream.

    The first `preamble` of its `frames` are Relations. `changes` has the values of its Insert,
    Update and Delete frames in their order, as Python objects (jsonb as str). A recorded stream has
    no table and no changes; its Relations come first too.
    """

    name: str
    tuple_format: TupleFormat
    table: Table | None
    frames: list[bytes]
    preamble: int
    changes: list[Change]

    def __str__(self) -> str:
        return f"{self.name}/{self.tuple_format}"

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The new rows of its Insert and Update frames."""
        return [change.new for change in self.changes if change.new is not None]

    def packed(self) -> tuple[bytes, NDArray[np.int64]]:
        """All frames in one buffer, and n + 1 offsets into it."""
        import numpy as np

        offsets = np.zeros(len(self.frames) + 1, dtype=np.int64)
        np.cumsum([len(frame) for frame in self.frames], out=offsets[1:])
        return b"".join(self.frames), offsets

    def copied(self) -> bytes:
        """The rows as ``COPY … TO STDOUT (FORMAT binary)`` sends them, without header and trailer.

        Raises ValueError for a recorded stream, whose rows are not known.
        """
        if self.table is None:
            raise ValueError(f"{self} has no rows to copy")
        parts = []
        for row in self.rows:
            parts.append(struct.pack(">h", len(row)))
            for column, value in zip(self.table.columns, row, strict=True):
                data = None if value is None else column.type.binary(value)
                parts.append(struct.pack(">i", -1 if data is None else len(data)))
                parts.append(data or b"")
        return b"".join(parts)

    def arrow(self) -> pa.BinaryArray:
        """The frames as an Arrow binary array (32-bit offsets: up to 2 GiB)."""
        import pyarrow as pa

        return pa.array(self.frames, type=pa.binary())


@functools.cache
def generate(name: str, tuple_format: TupleFormat, rows: int, seed: int = SEED) -> Workload:
    """Make a workload of `rows` rows, a multiple of five.

    `name` is one of NAMES. Raises ValueError if an argument has another value.
    """
    if name not in TABLES or tuple_format not in FORMATS:
        raise ValueError(f"no workload {name!r} in format {tuple_format!r}")
    if rows <= 0 or rows % ROWS_PER_TRANSACTION:
        raise ValueError(f"rows must be a positive multiple of {ROWS_PER_TRANSACTION}, not {rows}")
    table = TABLES[name]
    # The seed does not contain the format, so that both formats have the same rows.
    rng = random.Random(f"{name} {seed}")
    frames = [_relation(table)]
    changes: list[Change] = []
    lsn, xid, time = 0x16_B374_D848, 747, _microseconds(_FIRST_TIMESTAMP)
    for _ in range(rows // ROWS_PER_TRANSACTION):
        transaction = [_change(table, rng) for _ in range(ROWS_PER_TRANSACTION)]
        changes += transaction
        # The WAL does not depend on the format of values, so LSNs rise by the same in both formats.
        commit_lsn = lsn + 1_024
        end_lsn = commit_lsn + 48
        time += rng.randrange(50, 5_000)
        frames.append(testing.begin(xid, commit_lsn, time))
        frames += [_frame(table, change, tuple_format) for change in transaction]
        frames.append(testing.commit(commit_lsn, end_lsn, time))
        lsn = end_lsn
        xid += 1
    return Workload(name, tuple_format, table, frames, 1, changes)


def recorded(path: Path, most: int = 20_000) -> Workload:
    """Read a recorded stream: an Arrow IPC file whose column ``payload`` has a frame in each row.

    At most `most` frames of whole transactions are taken, and the Relations put before them. Raises
    ValueError if there is no transaction.
    """
    import pyarrow.ipc

    with pyarrow.ipc.open_file(path) as reader:
        frames = reader.read_all().column("payload").to_pylist()
    relations = [frame for frame in frames if frame[:1] == b"R"]
    others = [frame for frame in frames if frame[:1] in b"BCDIU"][:most]
    while others and others[-1][:1] != b"C":
        others.pop()
    if not others:
        raise ValueError(f"{path} has no transaction in its first {most:,} frames")
    changes = next((frame for frame in others if frame[:1] in b"IU"), b"")
    tuple_format: TupleFormat = "binary" if changes[8:9] == b"b" else "text"
    unique = list(dict.fromkeys(relations))
    return Workload(f"recorded {path.stem}", tuple_format, None, unique + others, len(unique), [])
