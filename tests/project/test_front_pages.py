"""README and explanation: made parts are up to date, and figures are those of their sources."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from support.commands.builds import ROOT

# The benchmarks are no part of the package: they are found beside the tests.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks import figures, goals

EXPLANATION = ROOT / "docs" / "explanation"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_stored_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- figures: " in text
    results = figures.Results.load(figures.RESULTS)
    assert text == figures.filled(text, results), "make it anew: python -m benchmarks.figures"


def test_each_block_of_figures_stands_in_one_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    assert sorted(re.findall(r"<!-- figures: (\w+) -->", text)) == sorted(figures.BLOCKS)


def test_the_report_measures_every_goal_and_explains_each_missed_one() -> None:
    verdicts = list(goals.verdicts(figures.Results.load(figures.RESULTS)))
    assert [(one.goal.level, one.workload) for one in verdicts if one.met is None] == []
    assert {one.goal.level for one in verdicts if not one.met} == goals.LIMITS.keys()


def test_pictures_of_messages_are_those_of_the_wire_table() -> None:
    spec = importlib.util.spec_from_file_location("wire_page", ROOT / "tools" / "wire_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text(encoding="utf-8")
    assert text == module.page(text), "make it anew: .venv/bin/python tools/wire_page.py"


def test_the_page_of_faults_has_the_counts_of_make_chaos() -> None:
    source = (ROOT / "tests" / "chaos" / "chaos.py").read_text()
    kinds = dict(re.findall(r"""^    "([\w-]+)": \(.*, (\d+)\),$""", source, re.MULTILINE))
    page = (EXPLANATION / "how-it-fails.md").read_text()
    table = page.partition("| fault | stream | capture |")[2].partition("\n\n")[0]
    told = re.findall(r"\| (\d+) \| (\d*) *\|$", table, re.MULTILINE)
    assert told == [
        (kinds[stream], kinds.get(capture, ""))
        for stream, capture in (
            ("client-kills", "capture-kills"), ("server-kills", "capture-server-kills"),
            ("cuts", "capture-cuts"), ("disk-full", "capture-disk-full"),
            ("slow", ""), ("two-clients", "two-captures"),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_a_front_page_is_read_in_a_minute(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= 150
