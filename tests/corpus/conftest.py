"""What the tests of this directory tell of what they compared, at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`say(line)`: a line of the summary; shown with `--corpus` or `-v`."""
    return request.config.stash.setdefault(LINES, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines and (config.getoption("--corpus") or config.get_verbosity() > 0):
        terminalreporter.section("values compared with the server's")
        for line in lines:
            terminalreporter.write_line(line)
