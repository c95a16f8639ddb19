"""Draw each message of pgoutput into docs/explanation/decoding.md, from the wire table.

Called without arguments it rewrites the part of the page between its marks. A test compares the
page with what this makes.
"""

from __future__ import annotations

from pathlib import Path

import pgoutput_fast as pf
from pgoutput_fast.protocol.wire import LAYOUTS

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "decoding.md"

BEGIN = "<!-- The pictures are made by tools/wire_page.py from protocol/wire.py. -->\n"
END = "<!-- end of pictures -->"

# How a field is read → what stands in the frame. Numbers are bytes.
_CONTENT = {
    "uint8": "1",
    "bool": "1",
    "char": "1",
    "uint32": "4",
    "lsn": "8",
    "time": "8",
    "string": "text, 0",
    "stream_xid": "0 or 4",
    "truncate_count": "4",
    "columns": "2: how many; columns",
    "oids": "4 each",
    "sized_bytes": "4: size; bytes",
    "optional_lsn": "0 or 8",
    "optional_time": "0 or 8",
    "N": "N, tuple",
    "K or O": "K or O, tuple",
    "optional K or O": "nothing, or K or O, tuple",
}

_GROUPS: list[tuple[str, str]] = [
    ("Transactions", "BCO"),
    ("Tables and types", "RY"),
    ("Rows", "IUDT"),
    ("Messages of applications", "M"),
    ("Streamed transactions", "SEcA"),
    ("Prepared transactions", "bPKrp"),
]


def pictures() -> str:
    """Return the pictures of all messages, in groups."""
    parts = []
    for title, tags in _GROUPS:
        drawn = "\n".join(_picture(tag) for tag in tags)
        parts.append(f"### {title}\n\n```text\n{drawn}```\n")
    return "\n".join(parts)


def page(text: str) -> str:
    """Return the page with its pictures made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{pictures()}\n{END}{after}"


def _picture(tag: str) -> str:
    cells = [(tag, "1"), *((name, _CONTENT[kind]) for name, kind in LAYOUTS[tag])]
    widths = [max(map(len, cell)) for cell in cells]
    lines = [_NAMES[tag]]
    lines.append("┌" + "┬".join("─" * (width + 2) for width in widths) + "┐")
    for row in zip(*cells, strict=True):
        shown = (f" {text:{width}} " for text, width in zip(row, widths, strict=True))
        lines.append("│" + "│".join(shown) + "│")
    lines.append("└" + "┴".join("─" * (width + 2) for width in widths) + "┘")
    return "\n".join(lines) + "\n"


_NAMES = {
    found.tag: name
    for name, found in vars(pf).items()
    if isinstance(found, type) and isinstance(getattr(found, "tag", None), str)
}
"""Tag → the name of the class of such messages."""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
