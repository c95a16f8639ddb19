"""The rules of the site's pages, and the parts of the reference that are made from the code."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.commands.builds import ROOT
from support.commands.documents import blocks

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def paragraphs(text: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph and item of a list.

    Code, tables, headings and the addresses of links are none.
    """
    found: list[str] = []
    in_code = False
    for line in [*text.splitlines(), ""]:
        is_fence = line.lstrip().startswith("```")
        begins = re.match(r" *([-*:]|\d+\.) ", line) is not None
        is_other = re.match(r"\||#|<!--|\[[^]]+\]: ", line) is not None
        is_text = not (in_code or is_fence or not line or is_other)
        if found and (begins or not is_text):
            yield found
            found = []
        if is_text:
            found.append(line)
        in_code ^= is_fence


def faults(text: str) -> list[str]:
    """What a page's text breaks of the rules."""
    found = []
    if (lines := text.count("\n")) > 300:
        found.append(f"{lines} lines")
    for paragraph in paragraphs(text):
        if len(paragraph) > 6:
            found.append(f"a paragraph of {len(paragraph)} lines: {paragraph[0]}")
        found += [
            f"a long line: {one}" for one in paragraph if len(one) > 100 and " " in one.strip()
        ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_is_short(page: Path) -> None:
    assert faults(page.read_text()) == []


def test_the_rules_find_what_is_long() -> None:
    code = "```python\n" + "x = 1  # …\n" * 7 + "```\n"
    table = "| a |\n|---|\n" + f"| {'word ' * 30}|\n" * 7
    items = "- one\n  line\n" * 7
    assert faults(f"# A page\n\n{code}\n{table}\n{items}\n" + "line\n" * 6) == []
    assert len(faults("line\n" * 7)) == 1
    assert len(faults("- one\n" + "  line\n" * 6)) == 1
    assert len(faults("word " * 21 + "\n")) == 1
    assert len(faults("line\n\n" * 151)) == 1


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page.stem}{number}")
        for page in PAGES
        for number, block in enumerate(blocks("toml", page))
    ],
)
def test_a_file_of_options_is_read(block: str, tmp_path: Path) -> None:
    click = pytest.importorskip("click")
    pytest.importorskip("psycopg")
    pytest.importorskip("pyarrow")
    from pgoutput_fast.cli import capture, sync

    file = tmp_path / "options.toml"
    file.write_text(block)
    needed = ["--config", str(file), "--slot", "shop", "--publication", "shop"]
    errors = []
    for command, option in ((sync.command, "--to"), (capture.command, "--out")):
        try:
            command.make_context("command", [*needed, option, str(tmp_path / "out")])
        except click.ClickException as error:
            errors.append(error.format_message())
    assert len(errors) < 2, errors


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """The module that makes parts of the reference."""
    for name in ("click", "rich", "prometheus_client", "psycopg", "pyarrow"):
        pytest.importorskip(name)
    path = ROOT / "tools" / "reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_generated_part_is_on_a_page(made: ModuleType) -> None:
    named = [name for page in PAGES for name in GENERATED.findall(page.read_text())]
    assert sorted(named) == sorted(made.PARTS)


def test_the_parts_have_everything(made: ModuleType) -> None:
    from pgoutput_fast.errors import SENTENCES

    assert re.findall(r"^## `(\w+)`$", made.error_codes(), re.MULTILINE) == list(SENTENCES)
    assert made.commands().count("\nUsage: pgoutput-fast consumers") == 4
    names = [field.name for kind, _ in made.CLASSES for field in kind.options()]
    listed = re.findall(r"^`(\w+)`$", made.options(), re.MULTILINE)
    assert sorted(listed) == sorted(set(names))


def test_the_versions_of_libraries_are_those_required() -> None:
    page = (DOCS / "reference" / "versions.md").read_text()
    named = dict(
        re.findall(r"^\| (\w+).*? \| ([\d.]+) and newer \| the newest \|$", page, re.MULTILINE)
    )
    required = re.findall(
        r'"(\w+)(?:\[[\w-]+\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()
    )
    libraries = {name.lower(): version for name, version in named.items()}
    assert len(libraries) == 6
    assert libraries.items() <= set(required)
