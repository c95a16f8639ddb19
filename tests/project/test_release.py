"""The version, the changelog and a tag agree."""

from __future__ import annotations

import runpy

import pytest
from support.commands.builds import ROOT

import pgoutput_fast

faults = runpy.run_path(str(ROOT / "tools" / "check_release.py"))["faults"]


def test_the_version_and_the_changelog_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert faults(pgoutput_fast.__version__, changelog) == []


@pytest.mark.parametrize(
    ("version", "headings", "tag", "count"),
    [
        ("0.2.0.dev0", "## Unreleased\n\n## 0.1.0 - 2026-12-01\n", None, 0),
        ("0.1.0", "## 0.1.0 - 2026-12-01\n", "v0.1.0", 0),
        ("0.1.0", "## Unreleased\n", None, 1),
        ("0.2.0.dev0", "## 0.1.0 - 2026-12-01\n", None, 1),
        ("0.2.0.dev0", "", None, 1),
        ("0.1.0", "## 0.1.0 - 2026-12-01\n", "v0.1", 1),
        ("0.1.0", "## 0.1.0 - 2026-12-01\n\n## 0.0.9\n", None, 1),
    ],
)
def test_what_does_not_agree(version: str, headings: str, tag: str | None, count: int) -> None:
    assert len(faults(version, headings, tag)) == count
