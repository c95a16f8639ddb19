"""What type checkers tell users: a typo in a word that is one of a few is an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands.builds import ROOT

GOOD = """\
import pgoutput_fast as pf

decoder = pf.ColumnarDecoder(target="portable", on_error="collect")
policies = pf.Policies(
    infinity="text", out_of_range="null", special_values="clamp", json="parse", arrays=2
)
for changes in decoder.decode([], lsns=[]):
    batch: pf.ChangeBatch = changes.with_commit(1, 2)
event: pf.Event
for event in decoder.events:
    print(event.commit_lsn + 1)
bad: pf.BadFrame = decoder.errors[0]
"""

BAD = """\
import pgoutput_fast as pf

pf.ColumnarDecoder(target="arow")
pf.ColumnarDecoder(on_error="collec")
pf.Policies(infinity="nul")
pf.Policies(out_of_range="clam")
pf.Policies(special_values="errors")
pf.Policies(json="parsed")
pf.Policies(arrays="txt")
pf.Dekoder()
"""


def errors_of(source: str, path: Path) -> list[tuple[int, str]]:
    """Line and code of each error that mypy finds."""
    path.write_text(source)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent",
         "--config-file=", "--ignore-missing-imports", path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.stderr == ""
    found = [line for line in checked.stdout.splitlines() if ": error: " in line]
    return [(int(line.split(":")[1]), line.rsplit("[", 1)[1].rstrip("]")) for line in found]


@pytest.mark.slow
def test_words_are_checked(tmp_path: Path) -> None:
    assert errors_of(GOOD, tmp_path / "good.py") == []
    lines = BAD.splitlines()
    expected = [(number, "arg-type") for number in range(3, len(lines))]
    assert errors_of(BAD, tmp_path / "bad.py") == [*expected, (len(lines), "attr-defined")]


MESSAGES = """\
import pgoutput_fast as pf
from pgoutput_fast.transactions import Transaction

def names(transaction: Transaction) -> list[str]:
    found: list[str] = []
    for message in transaction:
        if isinstance(message, pf.Insert | pf.Update | pf.Delete):
            found.append(message.relation.name)
        elif isinstance(message, pf.Truncate):
            found += [relation.name for relation in message.relations]
            message.relation
        message.newer
    return found
"""


@pytest.mark.slow
def test_messages_of_a_transaction_are_known(tmp_path: Path) -> None:
    found = errors_of(MESSAGES, tmp_path / "messages.py")
    assert sorted(set(found)) == [(11, "attr-defined"), (12, "union-attr")]
