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


def loops(workload: workloads.Workload) -> dict[str, Callable[[], int]]:
    """Functions that read a workload's frames once: "copy", "walk" and "layout".

    Each returns how much it read: bytes, slices or rows, or -1 if there was a frame that it does
    not support. Only generated workloads have "layout".
    """
    library = load()
    packed, offsets = workload.packed()
    data = np.frombuffer(packed, np.uint8)
    count = ctypes.c_int64(len(offsets) - 1)
    frames = (_address(data), _address(offsets), count)
    copied = np.empty(len(data), np.uint8)
    headers = np.empty((len(offsets) - 1) * 16, np.uint8)
    slices = np.empty(len(data) * 8, np.uint8)
    rows = len(workload.rows)
    types = [column.type.oid for column in workload.table.columns] if workload.table else []
    columns = (_Column * len(types))()
    bounds = np.empty((len(offsets) - 1) * 32, np.uint8)
    kept: list[NDArray[Any]] = [data, offsets, copied, headers, slices, bounds]
    for column, type_id in zip(columns, types, strict=True):
        column.type, width = _TYPES[type_id]
        validity = np.full(rows // 8 + 1, 0xFF, np.uint8)
        room = len(data) + 32 if width < 0 else rows * max(width, 1) + 32
        values = np.zeros(room, np.uint8)
        column.validity, column.data = validity.ctypes.data, values.ctypes.data
        kept += [validity, values]
        if width < 0:
            ends = np.zeros(rows + 1, np.int32)
            column.offsets = ends.ctypes.data
            kept.append(ends)

    def copy() -> int:
        return int(library.copy(*frames, _address(kept[2])))

    def walk() -> int:
        return int(library.walk(*frames, *map(_address, kept[3:6])))

    # The columns are only addresses. The default argument keeps their memory alive.
    def layout(_kept: object = kept) -> int:
        return int(library.layout(*frames, columns, ctypes.c_int32(len(columns))))

    found = {"memcpy": copy, "C walk": walk}
    return found if workload.table is None else {**found, "C layout": layout}
