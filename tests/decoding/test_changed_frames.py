"""Frames that change while they are read: the error says so.

This is a mistake of the caller's that needs a second thread. Here a profile function does in its
place, and always at the same point, what such a thread does sometimes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the twin makes Arrow arrays with it")

from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.expected_errors import expect_error
from support.frames.made_vectors import TWO, insert, relation, text

import pgoutput_fast as pf

ROW = insert(text("1"), text("a"))


@contextmanager
def when_called(name: str, act: Callable[[], object]) -> Iterator[None]:
    """Act once when a Python function of this name is called inside of the block."""

    def notice(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == name:
            sys.setprofile(None)
            act()

    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_buffer_that_another_thread_writes_to(implementation: str) -> None:
    """The walk of frames refuses the second one, which is mended when its error is looked for."""
    data = bytearray(b"O" + bytes(8) + b"o\0" + ROW)
    start = len(data) - len(ROW)
    data[start + 5] = ord("X")  # the marker of its tuple

    def mend() -> None:
        data[start + 5] = ord("N")

    offsets = [0, start, len(data)]
    with chosen(implementation), when_called("decode_rare", mend):
        if implementation == "python":  # which looks at one frame after the other
            assert pf.decode_batch(data, offsets).tags.tobytes() == b"OI"
        else:
            with expect_error(code="unfit_input"):
                pf.decode_batch(data, offsets)


def test_lsns_that_another_thread_writes_to() -> None:
    """The engine refuses an LSN, which is mended when its error is looked for."""
    lsns = np.array([1 << 63], np.uint64)

    def mend() -> None:
        lsns[0] = 1

    with chosen("cython"):
        decoder = pf.ColumnarDecoder(target="spark")
        list(decoder.decode([relation(TWO)]))
        with when_called("check_order", mend), expect_error(code="unfit_input") as caught:
            list(decoder.decode([ROW], lsns=lsns))
    assert not isinstance(caught.value, pf.DecodeError)
