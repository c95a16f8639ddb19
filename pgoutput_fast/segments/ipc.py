"""Find out whether record batches of an Arrow IPC file are compressed, before they are read.

While pyarrow reads a batch, it unpacks compressed buffers to whatever size they claim, and it has
no function that tells before. So this module reads the two FlatBuffers that tell it: the file's
footer, and the message before a batch. Both are described in "Serialization and Interprocess
Communication (IPC)", https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format; the
numbers of fields below are those of Arrow's ``File.fbs`` and ``Message.fbs``.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")  # at the end of a file: the footer's size, the magic bytes
_BLOCK = struct.Struct("<qi4xq")  # a message's place, and the sizes of its metadata and its body
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")
_UINT16 = struct.Struct("<H")

_FOOTER_DICTIONARIES = 2
_FOOTER_RECORD_BATCHES = 3
_MESSAGE_HEADER_TYPE = 1
_MESSAGE_HEADER = 2
_RECORD_BATCH = 3  # a value of the union's type
_RECORD_BATCH_COMPRESSION = 3


class Block(NamedTuple):
    """The place of a record batch in a file."""

    offset: int
    size: int


def record_batch_blocks(file: Any) -> list[Block]:
    """The record batches that a file's footer lists.

    Parameters
    ----------
    file : pyarrow.NativeFile
        Arrow has opened it, so that its footer is a FlatBuffer that was verified.

    Raises
    ------
    ValueError
        The file has dictionaries too, or is damaged.
    """
    end = file.size() - _TAIL.size
    size, magic = _unpack(_TAIL, file.read_at(_TAIL.size, end), 0)
    if magic != _MAGIC or not 0 < size <= end:
        raise ValueError("no footer of an Arrow IPC file is at its end")
    footer = file.read_at(size, end - size)
    root = _root(footer)
    if _vector(footer, root, _FOOTER_DICTIONARIES)[1]:
        raise ValueError("it has dictionaries, which no column of a segment uses")
    start, count = _vector(footer, root, _FOOTER_RECORD_BATCHES)
    found = [_unpack(_BLOCK, footer, start + i * _BLOCK.size) for i in range(count)]
    return [Block(offset, size) for offset, size, _ in found]


def is_compressed(file: Any, block: Block) -> bool:
    """Whether the buffers of a record batch are compressed.

    Raises
    ------
    ValueError
        There is no record batch at that place.
    """
    metadata = file.read_at(block.size, block.offset)
    # Since Arrow 0.15, four bytes of ones stand before the size.
    start = 8 if metadata[:4] == b"\xff\xff\xff\xff" else 4
    message = metadata[start:]
    root = _root(message)
    header_type = _field(message, root, _MESSAGE_HEADER_TYPE)
    header = _field(message, root, _MESSAGE_HEADER)
    if header_type is None or header is None or message[header_type] != _RECORD_BATCH:
        raise ValueError(f"at byte {block.offset} is no record batch")
    batch = header + _unpack(_UINT32, message, header)[0]
    return _field(message, batch, _RECORD_BATCH_COMPRESSION) is not None


def _unpack(form: struct.Struct, data: bytes, offset: int) -> tuple[Any, ...]:
    if not 0 <= offset <= len(data) - form.size:
        raise ValueError(f"{form.size} bytes are missing at byte {offset} of its metadata")
    return form.unpack_from(data, offset)


def _root(data: bytes) -> int:
    """The place of the table that a FlatBuffer has."""
    found: int = _unpack(_UINT32, data, 0)[0]
    return found


def _field(data: bytes, table: int, number: int) -> int | None:
    """The place of a table's field; None where it is left out."""
    vtable = table - _unpack(_INT32, data, table)[0]
    size = _unpack(_UINT16, data, vtable)[0]
    slot = 4 + 2 * number
    offset = _unpack(_UINT16, data, vtable + slot)[0] if slot < size else 0
    if offset and table + offset >= len(data):
        raise ValueError(f"field {number} lies beyond its metadata's end")
    return table + offset if offset else None


def _vector(data: bytes, table: int, number: int) -> tuple[int, int]:
    """Where the first item of a vector lies, and how many there are."""
    field = _field(data, table, number)
    if field is None:
        return 0, 0
    start = field + _unpack(_UINT32, data, field)[0]
    return start + 4, _unpack(_UINT32, data, start)[0]
