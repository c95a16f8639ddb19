"""Read many frames from one buffer, a list, or Arrow arrays. The twin of ``_input.pyx``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import frame_bytes
from .arrays import FrameBatch, check_offsets, check_rising, null_frame, pyarrow, refuse_input


class _Packed:
    """Frames that lie one after the other in one buffer."""

    def __init__(self, data: Any, offsets: object) -> None:
        try:
            self._bytes = np.frombuffer(data, np.uint8)
        except (AttributeError, BufferError, ValueError) as error:
            raise TypeError(f"frames must lie in a contiguous buffer: {error}") from None
        self._offsets = checked = check_offsets(offsets)
        check_rising(checked, len(self._bytes))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> bytes:
        return self._bytes[self._offsets[i] : self._offsets[i + 1]].tobytes()


class _Arrow:
    """Frames in an Arrow array; `before` is how many frames the arrays before it have."""

    def __init__(self, array: Any, before: int) -> None:
        pa = pyarrow()
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if array.type not in (pa.binary(), pa.large_binary(), pa.binary_view()):
            refuse_input(str(array.type))
        array.validate(full=True)
        if array.null_count:
            null_frame(before + array.is_null().to_pylist().index(True))
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, i: int) -> bytes:
        frame: bytes = self._array[i].as_py()
        return frame


Piece = _Packed | _Arrow | tuple[bytes, ...]


def pieces_of(data: Any, offsets: Any) -> list[Piece]:
    """Return the frames that :func:`pgoutput_fast.decode_batch` takes as `data` and `offsets`."""
    if isinstance(data, FrameBatch):
        if offsets is not None:
            raise TypeError("a decode_batch() result has its offsets")
        return data.pieces
    if offsets is not None:
        return [_Packed(data, offsets)]
    if hasattr(data, "__arrow_c_array__"):
        return [_Arrow(pyarrow().array(data), 0)]
    if hasattr(data, "__arrow_c_stream__"):
        pieces: list[Piece] = []
        before = 0
        for chunk in pyarrow().chunked_array(data).chunks:
            pieces.append(_Arrow(chunk, before))
            before += len(chunk)
        return pieces
    refuse_input(data)
    return [tuple([frame_bytes(frame) for frame in data])]
