"""What the tests of this directory tell of what they compared, at the end of the run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

COMPARED = "compared"


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`say(line)`: a line of the summary; shown with `--corpus` or `-v`.

    It goes by the test's report, which may come from another process.
    """
    return functools.partial(record_property, COMPARED)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    lines = [line for one in reports for name, line in one.user_properties if name == COMPARED]
    if lines and (config.getoption("--corpus") or config.get_verbosity() > 0):
        terminalreporter.section("values compared with the server's")
        for line in lines:
            terminalreporter.write_line(line)
