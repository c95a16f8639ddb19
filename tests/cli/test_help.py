"""The help of each command, as on a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("click")
pytest.importorskip("psycopg")
pytest.importorskip("pyarrow")

from pgoutput_fast.cli import _COMMANDS, main

_CALLS: list[tuple[str, ...]] = [(name,) for name in sorted(_COMMANDS)]
_CALLS += [("consumers", name) for name in ("add", "list", "remove")]
_MOST_LINES = 100  # two screens


@pytest.mark.parametrize("call", _CALLS, ids=" ".join)
def test_help_has_a_line_for_each_option_and_examples(
    call: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*call, "--help"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [one for one in lines if len(one) > 80] == []
    assert len(lines) <= _MOST_LINES
    options, _, examples = text.partition("\nExamples:\n")
    first = examples.lstrip().split()
    assert first[: 1 + len(call)] == ["pgoutput-fast", *call] or call[0] == "consumers"
    assert set(call) <= {*first}
    # The second and each later line of an option is indented as far as the texts of its group.
    assert re.findall(r"^ {5,}\S.*", options, re.MULTILINE) == []
