"""Decode the geometric types, from point to circle, to str: the server's texts."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from .base import Codec, CodecOf, show_bytes, wrong_size
from .numbers import float8_text

_FLOAT = r"(?:-?(?:\d+(?:\.\d+)?(?:e[+-]\d+)?|Infinity)|NaN)"
_POINT = rf"\({_FLOAT},{_FLOAT}\)"
_POINTS = rf"{_POINT}(?:,{_POINT})*"


def _points(numbers: tuple[float, ...]) -> str:
    shown = list(map(float8_text, numbers))
    return ",".join([f"({x},{y})" for x, y in zip(shown[::2], shown[1::2], strict=True)])


def _codec(name: str, pattern: str, form: Callable[[bytes], str]) -> Codec:
    encoded = pattern.encode()

    def text(raw: bytes) -> str:
        if re.fullmatch(encoded, raw) is None:
            raise ValueError(f"{show_bytes(raw)} is no {name}")
        return raw.decode()

    return Codec(text, form, form)


def _fixed(
    name: str, count: int, pattern: str, layout: Callable[[tuple[float, ...]], str]
) -> Codec:
    """A type whose binary format is `count` float8."""
    unpack = struct.Struct(f">{count}d").unpack

    def form(raw: bytes) -> str:
        if len(raw) != 8 * count:
            raise wrong_size(raw, 8 * count, name)
        return layout(unpack(raw))

    return _codec(name, pattern, form)


def _counted(name: str, raw: bytes, start: int) -> str:
    """The text of points in binary format: at byte `start` an int32 number, then so many points."""
    count = int.from_bytes(raw[start : start + 4], "big")
    if len(raw) < start + 4 or len(raw) != start + 4 + 16 * count or not count:
        raise ValueError(f"a binary {name} of {count} points in {len(raw)} bytes")
    return _points(struct.unpack_from(f">{2 * count}d", raw, start + 4))


def _path_form(raw: bytes) -> str:
    if raw[:1] not in (b"\0", b"\1"):
        raise ValueError(f"a binary path begins with 0, if open, or 1, not with {raw[:1]!r}")
    points = _counted("path", raw, 1)
    return f"({points})" if raw[0] else f"[{points}]"


def _polygon_form(raw: bytes) -> str:
    return f"({_counted('polygon', raw, 0)})"


def _line_layout(numbers: tuple[float, ...]) -> str:
    return f"{{{','.join(map(float8_text, numbers))}}}"


def _circle_layout(numbers: tuple[float, ...]) -> str:
    return f"<{_points(numbers[:2])},{float8_text(numbers[2])}>"


_CODECS: dict[str, Codec] = {
    "point": _fixed("point", 2, _POINT, _points),
    "lseg": _fixed("lseg", 4, rf"\[{_POINT},{_POINT}\]", lambda numbers: f"[{_points(numbers)}]"),
    "box": _fixed("box", 4, rf"{_POINT},{_POINT}", _points),
    "line": _fixed("line", 3, rf"\{{{_FLOAT},{_FLOAT},{_FLOAT}\}}", _line_layout),
    "circle": _fixed("circle", 3, rf"<{_POINT},{_FLOAT}>", _circle_layout),
    "path": _codec("path", rf"\[{_POINTS}\]|\({_POINTS}\)", _path_form),
    "polygon": _codec("polygon", rf"\({_POINTS}\)", _polygon_form),
}

CODECS: dict[str, CodecOf] = {
    name: lambda policies, encoding, codec=codec: codec  # type: ignore[misc]
    for name, codec in _CODECS.items()
}
