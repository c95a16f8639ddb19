"""Colours for the command's output on a terminal; none if NO_COLOR is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import click

Paint = Callable[[str, str], str]
"""A function that colours a text. Its second argument is a key of `_STYLES`."""

_STYLES: dict[str, dict[str, Any]] = {
    "column": {"fg": "cyan"},
    "delete": {"fg": "red"},
    "error": {"fg": "red", "bold": True},
    "heading": {"bold": True},
    "insert": {"fg": "green"},
    "message": {"fg": "blue"},
    "no value": {"dim": True},
    "place": {"dim": True},
    "table": {"bold": True},
    "truncate": {"fg": "magenta"},
    "update": {"fg": "yellow"},
    "warning": {"fg": "yellow", "bold": True},
}


def plain(text: str, _: str) -> str:
    """Return the text unchanged."""
    return text


def _coloured(text: str, what: str) -> str:
    return click.style(text, **_STYLES[what])


def paint_for(stream: TextIO) -> Paint:
    """Return the function that colours text for `stream`; :func:`plain` if it is no terminal."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return _coloured if wanted and stream.isatty() else plain


class StyledHelp(click.HelpFormatter):
    """Help with coloured headings and options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._paint: Paint = paint_for(sys.stdout)

    def write_heading(self, heading: str) -> None:
        """Write the heading of a section."""
        self.write(f"{'':>{self.current_indent}}{self._paint(heading + ':', 'heading')}\n")

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Write a list of options or commands with their help."""
        painted = [(self._paint(first, "column"), second) for first, second in rows]
        super().write_dl(painted, col_max, col_spacing)


class StyledContext(click.Context):
    """The context of a command with coloured help."""

    formatter_class = StyledHelp
