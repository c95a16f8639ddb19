"""Sphinx builds the site from this directory: `make docs`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

# Python's own classes show their signatures and types, and no compiler is needed.
os.environ["PGOUTPUT_FAST_IMPL"] = "python"
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import reference_pages  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.domains.python import PyObject  # noqa: E402

from pgoutput_fast import __version__  # noqa: E402

project = "pgoutput_fast"
author = "The pgoutput_fast developers"
copyright = author  # noqa: A001
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_show_sphinx = False

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "none"  # the docstrings have the types of parameters
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # members would be described twice
python_maximum_signature_line_length = 80

# The site is built without a network: other projects' names are not looked up.
nitpick_ignore_regex = [("py:.*", r"(?!pgoutput_fast\b).*")]
# A page on the server that answers nobody else.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1)"]

_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_NOT_ON_SITE = re.compile(
    r"^<!-- not on the site -->\n.*?^<!-- end -->\n\n", re.MULTILINE | re.DOTALL
)
_OUTSIDE = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def _fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Put generated parts in place of their comments, and offer files outside for download."""

    def link(found: re.Match[str]) -> str:
        path = (Path(app.srcdir) / page).parent / found[1]
        is_page = path.resolve().is_relative_to(app.srcdir)
        return found[0] if is_page else f"](path:{found[1]})"

    text = _NOT_ON_SITE.sub("", source[0])
    text = _GENERATED.sub(lambda found: reference_pages.PARTS[found[1]](), text)
    source[0] = _OUTSIDE.sub(link, text)


def _leave_out(*arguments: object) -> bool | None:
    """Leave out the fields of named tuples: the docstring of the class describes them."""
    member = arguments[3]
    return True if type(member).__name__ == "_tuplegetter" else None


_PAGE = re.compile(r"(?:``)?docs/([\w/-]+)\.md(?:``)?")
_WIRE = re.compile(r"(https://www\.postgresql\.org/docs/\S+?)(?=[\s).,]*$)")


def _make_links(*arguments: Any) -> None:
    """Have docstrings refer to pages, and keep napoleon from taking a summary apart at a colon."""
    _, what, _, _, _, lines = arguments
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(": ", " \u2013 ", 1)
    for number, line in enumerate(lines):
        line = _PAGE.sub(r":doc:`/\1`", line)
        lines[number] = _WIRE.sub(r"`PostgreSQL's documentation <\1>`__", line)


def _name_several(*arguments: Any) -> None:
    """Have one entry for attributes that a docstring names together."""
    lines = arguments[5]
    for number, line in enumerate(lines):
        if found := re.match(r":(ivar|vartype) (\w+(?:, \w+)+):", line):
            lines[number] = f":{found[1]} {found[2].replace(' ', '')}:{line[found.end() :]}"


def setup(app: Sphinx) -> None:
    """Have Sphinx call the functions above."""
    app.connect("autodoc-process-docstring", _make_links, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _name_several, priority=600)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-skip-member", _leave_out)
    app.connect("source-read", _fill_in)
