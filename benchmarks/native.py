"""Loops in plain C over a workload's frames: ``native.c``, which is compiled at first use."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import workloads

_HERE = Path(__file__).parent
_PACKAGE = _HERE.parent / "pgoutput_fast"

# OID of a column's type → its number in the enum of native.c.
_TYPES = {
    16: (0, 0),
    23: (1, 4),
    20: (2, 8),
    701: (3, 8),
    1700: (4, 16),
    25: (5, -1),
    1042: (5, -1),
    2950: (6, 16),
    1082: (7, 4),
    1184: (8, 8),
    3802: (9, -1),
}


def compiler() -> list[str]:
    """The C compiler that Python was built with, or `CC`."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


@functools.cache
def load() -> ctypes.CDLL:
    """Compile and load the library, with the flags that the extension has.

    Raises
    ------
    subprocess.CalledProcessError, FileNotFoundError
        There is no compiler, or it fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "native.so"
        command = [
            *compiler(),
            "-O3",
            "-shared",
            "-fPIC",
            *(f"-I{_PACKAGE / part}" for part in ("", "protocol", "values")),
        ]
        subprocess.run([*command, "-o", str(path), str(_HERE / "native.c")], check=True)
        library = ctypes.CDLL(str(path))
    for name in ("copy", "walk", "layout"):
        getattr(library, name).restype = ctypes.c_int64
    for power in range(-342, 309):
        if power >= 0:
            number = 10**power << 128
        else:
            divisor = 10**-power
            number = (1 << (divisor.bit_length() + 128)) // divisor
        number >>= number.bit_length() - 128
        library.set_power(
            ctypes.c_int32(power),
            ctypes.c_uint64(number >> 64),
            ctypes.c_uint64(number & 0xFFFFFFFFFFFFFFFF),
        )
    return library


class _Column(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("validity", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
    )


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Layout:
    """The loop that makes typed Arrow columns of a generated workload, in memory that it keeps.

    `before` and `after` have the buffers of each column as an Arrow array has them: validity, then
    offsets if it is variable, then data. Those of `before` stay as they are if no row is old.
    """

    def __init__(self, workload: workloads.Workload) -> None:
        assert workload.table is not None
        self._library = load()
        packed, self._offsets = workload.packed()
        self._data = np.frombuffer(packed, np.uint8)
        self._rows = len(workload.changes)
        types = [column.type.oid for column in workload.table.columns]
        self.before = [self._buffers(type_id) for type_id in types]
        self.after = [self._buffers(type_id) for type_id in types]
        self._sides = [self._columns(types, side) for side in (self.before, self.after)]

    def _buffers(self, type_id: int) -> list[NDArray[Any]]:
        _, width = _TYPES[type_id]
        validity = np.full(self._rows // 8 + 1, 0xFF, np.uint8)
        if width < 0:
            data = np.zeros(len(self._data) + 32, np.uint8)
            return [validity, np.zeros(self._rows + 1, np.int32), data]
        return [validity, np.zeros(self._rows * max(width, 1) + 32, np.uint8)]

    def _columns(self, types: list[int], side: list[list[NDArray[Any]]]) -> Any:
        columns = (_Column * len(types))()
        for column, type_id, (validity, *offsets, data) in zip(columns, types, side, strict=True):
            column.type, _ = _TYPES[type_id]
            column.validity, column.data = validity.ctypes.data, data.ctypes.data
            column.offsets = offsets[0].ctypes.data if offsets else None
        return columns

    def __call__(self) -> int:
        """Read the frames once, and return the number of rows; -1 if it does not support one."""
        before, after = self._sides
        return int(
            self._library.layout(
                _address(self._data),
                _address(self._offsets),
                ctypes.c_int64(len(self._offsets) - 1),
                before,
                after,
                ctypes.c_int32(len(after)),
            )
        )


def loops(workload: workloads.Workload) -> dict[str, Callable[[], int]]:
    """Functions that read a workload's frames once: "memcpy", "C walk" and "C layout".

    Each returns how much it read: bytes, slices or rows, or -1 if there was a frame that it does
    not support. Only generated workloads have "C layout", which is a :class:`Layout`.
    """
    library = load()
    packed, offsets = workload.packed()
    data = np.frombuffer(packed, np.uint8)
    frames = (_address(data), _address(offsets), ctypes.c_int64(len(offsets) - 1))
    copied = np.empty(len(data), np.uint8)
    headers = np.empty((len(offsets) - 1) * 16, np.uint8)
    slices = np.empty(len(data) * 8, np.uint8)
    bounds = np.empty((len(offsets) - 1) * 32, np.uint8)
    # The frames are only addresses. The default arguments keep their memory alive.
    kept = data, offsets

    def copy(_kept: object = kept) -> int:
        return int(library.copy(*frames, _address(copied)))

    def walk(_kept: object = kept) -> int:
        return int(library.walk(*frames, *map(_address, (headers, slices, bounds))))

    found: dict[str, Callable[[], int]] = {"memcpy": copy, "C walk": walk}
    if workload.table is not None:
        found["C layout"] = Layout(workload)
    return found
