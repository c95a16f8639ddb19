"""What the batches of both implementations share: layouts of arrays, checks of arguments, errors.

NumPy is imported when the first array is made.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from ..errors import PgOutputError, fail
from .fields import EPOCH_SHIFT, Field
from .packed import unpacked

if TYPE_CHECKING:
    import numpy as np

    from ..protocol.messages import Message

OPERATIONS = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}
"""Tag of a message → the value of the column `op` in its rows. Compiled code stores the position in
this table (``PGF_INSERT`` and the others of ``_columns.h``)."""

READ = "read"
"""The value of the column `op` in rows of a snapshot."""

MOST_ROWS = 0x7FFFFFFF // max(map(len, OPERATIONS.values()))
"""The most rows of a batch: Arrow's offsets of 32 bits count the letters of the column `op`."""

_DTYPES: dict[str, list[tuple[str, str]]] = {
    "heads": [
        ("tag", "u1"), ("old_kind", "u1"), ("old_columns", "u2"), ("new_columns", "u2"),
        ("unused", "u2"), ("relation_id", "u4"), ("xid", "u4"), ("first_slice", "u8"),
    ],
    "slices": [("offset", "u4"), ("length_and_kind", "u4")],
    "begins": [
        ("frame", "i8"), ("final_lsn", "u8"), ("commit_time", "i8"), ("xid", "u4"),
        ("unused", "u4"),
    ],
    "commits": [
        ("frame", "i8"), ("commit_lsn", "u8"), ("end_lsn", "u8"), ("commit_time", "i8"),
        ("flags", "u1"), ("unused", "V7"),
    ],
    "events": [
        ("frame", "i8"), ("commit_lsn", "u8"), ("end_lsn", "u8"), ("commit_time", "i8"),
        ("xid", "u4"), ("subxid", "u4"), ("tag", "u1"), ("unused", "V7"),
    ],
}  # fmt: skip

ITEM_SIZES = {name: sum(int(kind[1:]) for _, kind in fields) for name, fields in _DTYPES.items()}
"""Name of a structured array → bytes of one item."""


def array_of(name: str, memory: object) -> np.ndarray[Any, Any]:
    """Return an array over the bytes in `memory`, with the items of the structured array `name`."""
    import numpy as np

    return np.frombuffer(memory, _dtype(name))  # type: ignore[call-overload, no-any-return]


@functools.cache
def _dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    return np.dtype(_DTYPES[name])


class FrameBatch:
    """The headers of many frames, and where their columns lie, in NumPy arrays.

    Attributes
    ----------
    tags : uint8[n]
        The tag of each frame.
    xids : uint32[n]
        The xid in the frame (in stream chunks that of the subtransaction); 0 if it has none.
    relation_ids : uint32[n]
        The OID of the table of a Relation, Insert, Update or Delete; 0 for other frames.
    old_kinds : uint8[n]
        The marker of the old tuple, "K" or "O"; 0 if there is none.
    old_columns, new_columns : uint16[n]
        Number of columns in the old tuple and in the new one.
    first_slices : uint64[n]
        Index in `slices` of the frame's first column. The columns of the old tuple come first, then
        those of the new one.
    slices : structured array
        One item for each column of a tuple: ``offset`` (uint32) is where its value begins in the
        frame. ``length_and_kind`` (uint32) has the length of the value in the upper 30 bits and the
        kind in the lower 2: 0 NULL, 1 unchanged, 2 text, 3 binary.
    begins, commits : structured arrays
        The fields of Begin frames (``frame``, which is the index, ``final_lsn``, ``commit_time``,
        ``xid``) and of Commit frames (``frame``, ``commit_lsn``, ``end_lsn``, ``commit_time``,
        ``flags``).
    messages : dict of int to message
        All other frames except Insert, Update and Delete, decoded, by index.
    in_stream : int or bool
        The xid of the stream chunk that is open after the last frame, or False if none is.
    """

    def __init__(
        self,
        pieces: list[Any],
        heads: Any,
        slices: Any,
        begins: Any,
        commits: Any,
        messages: dict[int, Message],
        in_stream: int | bool,
    ) -> None:
        self.pieces = pieces
        self.tags = heads["tag"]
        self.xids = heads["xid"]
        self.relation_ids = heads["relation_id"]
        self.old_kinds = heads["old_kind"]
        self.old_columns = heads["old_columns"]
        self.new_columns = heads["new_columns"]
        self.first_slices = heads["first_slice"]
        self.slices = slices
        self.begins = begins
        self.commits = commits
        self.messages = messages
        self.in_stream = in_stream

    def __len__(self) -> int:
        return len(self.tags)

    def __repr__(self) -> str:
        return f"<FrameBatch: {len(self)} frames, {len(self.slices)} columns>"


def check_offsets(offsets: object) -> np.ndarray[Any, Any]:
    """Return offsets as a contiguous array of int64.

    Raises
    ------
    ValueError
        They are no integers, have not one dimension, or are empty.
    """
    import numpy as np

    array = np.asarray(offsets)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise ValueError(
            "offsets must be n + 1 integers for n frames, "
            f"not an array of {array.dtype} in the shape {array.shape}"
        )
    if array.dtype.kind == "u" and int(array.max()) > 0x7FFFFFFFFFFFFFFF:
        raise ValueError(f"the offset {array.max()} is beyond any buffer")
    return np.ascontiguousarray(array, np.int64)


def check_rising(offsets: np.ndarray[Any, Any], size: int) -> None:
    """Refuse offsets, as :func:`check_offsets` gives them, that fall or leave a buffer.

    Raises
    ------
    ValueError
    """
    import numpy as np

    before = np.concatenate(([0], offsets[:-1]))
    wrong = np.flatnonzero((offsets < before) | (offsets > size))
    if len(wrong):
        first = wrong[0]
        refuse_offset(first, offsets[first], before[first], size)


def refuse_input(data: object) -> None:
    """Raise a TypeError if `data` can't be many frames."""
    if isinstance(data, str) and data:
        raise TypeError(
            f"frames come in Arrow arrays of binary, large_binary or binary_view, not {data!r}; of "
            "a table, pass the column that has them"
        )
    if isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError("a buffer of frames needs offsets, where each begins and ends")
    if not isinstance(data, Iterable):
        raise TypeError(
            "frames come as a sequence of bytes, as an Arrow array, or as a buffer with offsets, "
            f"not as {type(data).__name__}"
        )


def null_frame(index: int) -> NoReturn:
    """Raise the error for a frame that is null in an Arrow array."""
    error = PgOutputError(
        f"frame {index} is null, and no frame may be",
        code="unfit_input",
        hint="Drop the nulls, or find out what was lost",
    )
    error.frame = index
    raise error


def refuse_offset(index: int, offset: int, least: int, size: int) -> NoReturn:
    """Raise the error for an offset that is below the previous one, or beyond the buffer."""
    raise ValueError(
        f"offset {index} is {offset}; expected {least} to {size}, the buffer's size: offsets begin "
        "at 0 or later and never fall"
    )


def lsns_of(lsns: object, count: int) -> np.ndarray[Any, Any]:
    """Return LSNs as a contiguous array of uint64, one for each of `count` frames.

    Raises
    ------
    TypeError
        They are no integers, or not in one dimension.
    ValueError
        An LSN is negative or too large, or their number is not `count`.
    """
    import numpy as np

    array = np.asarray(lsns)
    if array.dtype.kind in ("f", "O") and all(
        type(lsn) is int for lsn in cast("Iterable[object]", lsns)
    ):
        # NumPy makes floats or objects of a list of ints if some are greater than the greatest
        # signed integer.
        try:
            array = np.array(lsns, np.uint64)
        except OverflowError:
            raise ValueError("an LSN is negative, or has more than 64 bits") from None
    if len(array) == 0 and count == 0:
        return np.empty(0, np.uint64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"lsns must be integers, not an array of {array.dtype}")
    if len(array) != count:
        raise ValueError(f"{len(array)} LSNs were given for {count} frames")
    if array.dtype.kind == "i" and len(array) and int(array.min()) < 0:
        raise ValueError(f"the LSN {array.min()} is negative")
    return np.ascontiguousarray(array, np.uint64)


def refuse_time(frame: bytes, offset: int, name: str, value: int) -> NoReturn:
    """Raise the DecodeError for an LSN or a time that does not fit into its column."""
    kind = "Spark's long" if name != "commit_time" else "Arrow's timestamp"
    fail("out_of_range", frame, offset, column=name, found=f"{value} does not fit into {kind}")


def metadata_bytes(metadata: Mapping[bytes, bytes]) -> bytes:
    """Return metadata in the form of the Arrow C data interface."""
    parts = [struct.pack("=i", len(metadata))]
    for pair in metadata.items():
        for part in pair:
            parts += [struct.pack("=i", len(part)), part]
    return b"".join(parts)


UNSENT_BEFORE = "an old row is sent whole, and this value of it was not"
TWO_FORMS = "the old row and the new one have it in different formats"


def commit_of(commit_lsn: int, commit_time: int, target: str) -> tuple[int, int]:
    """Return the values of the columns commit_lsn and commit_time for a commit.

    Raises
    ------
    TypeError
        An argument is no int.
    OverflowError
        A value does not fit into its column.
    """
    for name, value in (("commit_lsn", commit_lsn), ("commit_time", commit_time)):
        if type(value) is not int:
            unit = ", in microseconds since 2000-01-01" if name == "commit_time" else ""
            raise TypeError(f"{name} must be an int{unit}, not {type(value).__name__}")
    if not 0 <= commit_lsn < 1 << (63 if target == "spark" else 64):
        kind = "Spark's long" if target == "spark" else "64 bits"
        raise OverflowError(f"the LSN {commit_lsn} does not fit into {kind}")
    time = commit_time + EPOCH_SHIFT
    if not -1 << 63 <= time - EPOCH_SHIFT <= time < 1 << 63:
        raise OverflowError(f"the time {commit_time} does not fit into Arrow's timestamp")
    return commit_lsn, time


def first_seq_of(first_seq: int, rows: int) -> int:
    """Return the `seq` of the first of some rows.

    Raises
    ------
    TypeError
        It is no int.
    OverflowError
        That of the last one does not fit into its column.
    """
    if type(first_seq) is not int:
        raise TypeError(f"first_seq must be an int, not {type(first_seq).__name__}")
    if not 0 <= first_seq <= (1 << 63) - max(rows, 1):
        raise OverflowError(f"first_seq={first_seq} and {rows} rows do not fit into 63 bits")
    return first_seq


def refuse_read(row: int, operation: bytes) -> NoReturn:
    """Raise the error for a change that can't be a row of a snapshot."""
    raise PgOutputError(
        f"row {row} is of operation {operation.decode()!r}: a snapshot has inserts, and a TRUNCATE "
        f"before them",
        code="unfit_input",
    )


def refuse_part(start: int, end: int, rows: int) -> NoReturn:
    """Raise the error for a part of a batch that has other rows."""
    raise IndexError(f"a batch of {rows} rows has no rows from {start} to before {end}")


def pyarrow() -> Any:
    """Import pyarrow, which the Python implementation needs for Arrow data.

    Raises
    ------
    PgOutputError
        pyarrow is not installed.
    """
    try:
        import pyarrow as module
    except ImportError:
        raise PgOutputError(
            "without the compiled extension Arrow data need pyarrow",
            code="missing_package",
            hint="Install pgoutput-fast[arrow]",
        ) from None
    return module


class ArrayBuffers(NamedTuple):
    """The buffers of an Arrow array, and those of its children.

    Fields: length, null_count, buffers (bytes; None for the validity bitmap if nothing is null),
    children, dictionary, offset (index of the first value in the buffers and the children).
    """

    length: int
    null_count: int
    buffers: tuple[bytes | None, ...]
    children: tuple[ArrayBuffers, ...] = ()
    dictionary: ArrayBuffers | None = None
    offset: int = 0


def bits_of(flags: Iterable[int]) -> bytes:
    """Return a bitmap with a bit for each flag."""
    import numpy as np

    return np.packbits(np.frombuffer(bytes(flags), np.uint8), bitorder="little").tobytes()


def validity(present: Sequence[int]) -> bytes | None:
    """Return the validity bitmap for flags that say whether a value is present; None if all are."""
    return None if all(present) else bits_of(present)


def fixed_column(letter: str, values: Sequence[Any]) -> ArrayBuffers:
    """Return a column of numbers with the format `letter` of :mod:`struct`, None for null."""
    null_count = values.count(None)
    packed = struct.pack(f"={len(values)}{letter}", *(value or 0 for value in values))
    present = [value is not None for value in values]
    return ArrayBuffers(len(values), null_count, (validity(present), packed))


def variable_column(values: Sequence[bytes | None]) -> ArrayBuffers:
    """Return a column of bytes of any length, None for null."""
    ends = [0]
    for value in values:
        ends.append(ends[-1] + len(value or b""))
    present = [value is not None for value in values]
    offsets = struct.pack(f"={len(ends)}i", *ends)
    data = b"".join([value for value in values if value is not None])
    return ArrayBuffers(len(values), values.count(None), (validity(present), offsets, data))


def column_of(field: Field, values: Sequence[bytes | None]) -> ArrayBuffers:
    """Return a column of the bytes that a field's functions made of each value, None for null."""
    count, null_count = len(values), values.count(None)
    bits = validity([value is not None for value in values])
    if field.format == "+s":
        nulls = [None] * len(field.children)
        rows = [nulls if value is None else list(unpacked(value)) for value in values]
        children = [
            column_of(child, [row[i] for row in rows]) for i, child in enumerate(field.children)
        ]
        return ArrayBuffers(count, null_count, (bits,), tuple(children))
    if field.children:
        parts: list[bytes | None] = []
        ends = array("i", [0])
        # In a list of fixed size, a null has as many items as any other value.
        nulls = [None] * int(field.format[3:] or 0)
        for value in values:
            parts += nulls if value is None else unpacked(value)
            ends.append(len(parts))
        buffers = (bits,) if field.format[:2] == "+w" else (bits, ends.tobytes())
        return ArrayBuffers(count, null_count, buffers, (column_of(field.children[0], parts),))
    if field.width < 0:
        return variable_column(values)
    null = bytes(field.width or 1)
    data = b"".join([null if value is None else value for value in values])
    buffers = (bits, bits_of(data) if field.width == 0 else data)
    return ArrayBuffers(count, null_count, buffers, dictionary=dictionary_of(field))


def dictionary_of(field: Field) -> ArrayBuffers | None:
    """Return the dictionary of an enum's column, which has its labels; None for other columns."""
    return None if field.labels is None else variable_column(list(field.labels.numbers))
