"""Numbers that options have: of bytes and of seconds, with PostgreSQL's units."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from typing import Any

_BYTES = re.compile(r"\s*(\d{1,19}(?:\.\d{0,19})?)\s*(|B|kB|MB|GB|TB)\s*", re.ASCII)
_TIME = re.compile(r"\s*(\d{1,19}(?:\.\d{0,19})?)\s*(ms|s|min|h|d)\s*", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_POWERS = {"": 0, "B": 0, "kB": 1, "MB": 2, "GB": 3, "TB": 4}
_MOST = (1 << 63) - 1  # as of a file's size


class ByteCount(click.IntRange):
    """A number of bytes as PostgreSQL's settings have it: 65536, 64kB, 1.5GB; units are of 1024.

    Parameters
    ----------
    least : int
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__(min=least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; click calls it."""
        match = _BYTES.fullmatch(str(value))
        if match is None:
            shown = "65536, 64kB, 16MB, 1.5GB or 2TB"
            self.fail(f"{value!r} is no number of bytes, such as {shown}", param, ctx)
        found = round(Decimal(match[1]) * (1 << 10 * _POWERS[match[2]]))
        if found > _MOST:
            self.fail(f"{value!r} is more than {_MOST} bytes", param, ctx)
        return int(super().convert(found, param, ctx))


class Seconds(click.FloatRange):
    """A number of seconds, of which an infinite one is none; or a time with PostgreSQL's units.

    Such as 0.5, 500ms, 1s, 10min, 12h or 7d.

    Parameters
    ----------
    min_open : bool
        Whether it is above 0; else it may be 0.
    """

    def __init__(self, *, min_open: bool = True) -> None:
        super().__init__(min=0, min_open=min_open)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; click calls it."""
        match = _TIME.fullmatch(str(value))
        if match is not None:
            value = float(match[1]) * _SECONDS[match[2]]
        elif not _is_number(value):
            self.fail(f"{value!r} is no time, such as 0.5, 500ms, 1s, 10min, 12h or 7d", param, ctx)
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return found


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
