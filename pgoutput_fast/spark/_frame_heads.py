"""The tags and relation ids of many frames, without decoding them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW_TAGS = [ord(tag) for tag in "IUD"]
"""The tags of messages with one row, behind whose tag the relation id stands."""

_XID_BYTES = 4


def heads(
    frames: pa.Array, inside: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """The tag of each frame, and the four bytes behind it, where some messages have a relation id.

    Parameters
    ----------
    frames : pyarrow.BinaryArray
        With n frames.
    inside : bool[n], optional
        Which frames come from inside a stream chunk, and so have an xid behind the tag, which is
        left out.

    Returns
    -------
    uint8[n]
        The tags; 0 for a frame that is null or empty.
    uint32[n]
        The relation ids; 0 for a frame that is too short to have one.
    """
    count = len(frames)
    tags, numbers = np.zeros(count, np.uint8), np.zeros(count, np.uint32)
    if not count:
        return tags, numbers
    _, offset_buffer, data_buffer = frames.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[frames.offset : frames.offset + count + 1]
    if data_buffer is None or not data_buffer.size:
        return tags, numbers
    data = np.frombuffer(data_buffer, np.uint8)
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets)
    if frames.null_count:
        lengths = np.where(frames.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    has_tag = lengths > 0
    tags[has_tag] = data[starts[has_tag]]
    skipped: Any = 0 if inside is None else np.where(inside, _XID_BYTES, 0)
    long = lengths >= 5 + skipped
    places = (starts + 1 + skipped)[long]
    found = np.zeros(len(places), np.uint32)
    for i in range(4):
        found = (found << np.uint32(8)) | data[places + i]
    numbers[long] = found
    return tags, numbers


def chunks(tags: NDArray[np.uint8], *, is_open: bool) -> NDArray[np.int64]:
    """Which frames are inside which stream chunk.

    Parameters
    ----------
    tags : uint8[n]
    is_open : bool
        Whether a chunk is open before the first frame.

    Returns
    -------
    int64[n]
        0 outside of chunks; else a number that differs from chunk to chunk.
    """
    starts, stops = tags == ord("S"), tags == ord("E")
    marks = np.where(starts | stops, np.arange(len(tags)), -1)
    last = np.maximum.accumulate(marks) if len(tags) else marks
    begun = np.where(last < 0, is_open, starts[last])
    inside = begun & ~starts
    return np.where(inside, last + 2, 0)


def as_binary(frames: pa.Array) -> pa.Array:
    """Frames as an array with offsets of 32 bits."""
    return frames if frames.type == pa.binary() else frames.cast(pa.binary())
