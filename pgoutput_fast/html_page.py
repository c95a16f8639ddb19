"""HTML pages that need no other file: the reports of a sync and of the demonstration.

Names and other texts from outside go through `text`; all other arguments are HTML.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ._disk import write_whole
from .errors import PgOutputError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}<title>{title}</title>
<style>
:root {{
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --soft: #5d6879; --line: #dfe3ea;
  --good: #17803d; --bad: #c0262d; --wait: #9a5b00; --bar: #2563a8;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #12161c; --card: #1b2129; --ink: #e6eaf0; --soft: #9aa5b5; --line: #2f3843;
    --good: #4cc776; --bad: #ff7a76; --wait: #e3aa4e; --bar: #6aa9ee;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 24px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 1400px; margin: 0 auto; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 16px; margin: 0 0 2px; }}
p {{ margin: 0 0 12px; color: var(--soft); overflow-wrap: anywhere; }}
.verdict {{ font-weight: 600; }}
section {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin-top: 16px; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 12px;
  margin-top: 16px; }}
.figures div {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 12px; color: var(--soft); font-size: 13px; }}
.figures b {{ display: block; font-size: 17px; line-height: 1.3; color: var(--ink);
  overflow-wrap: anywhere; }}
svg {{ display: block; width: 100%; }}
rect {{ fill: var(--bar); }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }}
th, td {{ padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 500; }}
th:first-child, td:first-child {{ padding-left: 0; }}
.left {{ text-align: left; }}
.name, .long {{ white-space: normal; overflow-wrap: anywhere; }}
.name {{ min-width: 130px; }}
.time {{ white-space: normal; min-width: 100px; }}
.long {{ min-width: 160px; }}
tr:last-child td {{ border-bottom: 0; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }} .wait {{ color: var(--wait); }}
</style>
</head>
<body>
<main>
<h1>{heading}</h1>
<p>{lead}</p>
{content}
</main>
</body>
</html>
"""


def write_page(html: str, path: Path) -> None:
    """Write a page; one that is there is replaced at once.

    Raises
    ------
    PgOutputError
        The file can't be written.
    """
    try:
        write_whole(path, [html])
    except OSError as error:
        raise PgOutputError(
            f"can't write the report {path}: {error.strerror or error}",
            code="io_failed",
            path=str(path),
        ) from error


def page(title: str, heading: str, lead: str, *content: str, refresh: int | None = None) -> str:
    """Make a page; a browser loads it again after `refresh` seconds."""
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">\n'
    return _PAGE.format(
        title=title, heading=heading, lead=lead, refresh=again, content="\n".join(content)
    )


def text(content: str) -> str:
    """Return a name or another text from outside as HTML."""
    return escape(printable(content))


def figures(*pairs: tuple[str, str]) -> str:
    """Return numbers, each with what it is, side by side."""
    boxes = "".join(f"<div><b>{value}</b>{label}</div>" for value, label in pairs)
    return f'<div class="figures">{boxes}</div>'


def section(heading: str, lead: str, *content: str) -> str:
    """Return a part of a page."""
    return "\n".join(["<section>", f"<h2>{heading}</h2>", f"<p>{lead}</p>", *content, "</section>"])


def cell(html: str, kind: str = "", tag: str = "td") -> str:
    """Return a cell of a table; `kind` are CSS classes, and the tag of a head is th."""
    return f'<{tag} class="{kind}">{html}</{tag}>' if kind else f"<{tag}>{html}</{tag}>"


def table(heads: Iterable[str], rows: Iterable[str]) -> str:
    """Return a table, of the cells of its heads and of each row."""
    head, body = "".join(heads), "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bars(label: str, values: Sequence[tuple[float | None, str]]) -> str:
    """Return a chart of bars from left to right, each with a text; None leaves a gap."""
    longest = max(1e-9, *(value or 0.0 for value, _ in values), 0.0)
    shown = []
    for number, (value, title) in enumerate(values):
        if value is None:
            continue
        height = max(100 * value / longest, 1.0)
        shown.append(
            f'<rect x="{100 * number / len(values):.3f}%" y="{100 - height:.1f}%" '
            f'width="{80 / len(values):.3f}%" height="{height:.1f}%"><title>{title}</title></rect>'
        )
    return f'<svg height="120" role="img" aria-label="{label}">{"".join(shown)}</svg>'
