"""Which implementation is loaded: unasked, forced, and with an extension absent or broken.

Each case is a process of its own: the choice is made once, at the first import.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands.builds import run_python

REPORT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pgoutput_fast as pf
    import pgoutput_fast.protocol.messages
    frame = b"B" + bytes(20)
    pf.Decoder().decode(frame)
    pf.decode(frame)
print(json.dumps({
    "implementation": pf.IMPLEMENTATION,
    "reason": pf.FALLBACK_REASON,
    "warnings": [f"{w.category.__name__}: {w.message}" for w in caught],
}))
"""
ABSENT = "import sys; sys.modules['pgoutput_fast.decoding._core'] = None\n"
BROKEN = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "pgoutput_fast.decoding._core":
            raise ImportError("undefined symbol: PyExact_Nonsense")
sys.meta_path.insert(0, Broken())
"""


def report(tmp_path: Path, before: str = "", **settings: str) -> dict[str, object]:
    ran = run_python("-c", before + REPORT, cwd=tmp_path, **settings)
    assert (ran.returncode, ran.stderr) == (0, "")
    return json.loads(ran.stdout)


@pytest.mark.parametrize("settings", [{}, {"PGOUTPUT_FAST_IMPL": "cython"}])
def test_extension_is_taken(settings: dict[str, str], tmp_path: Path) -> None:
    found = report(tmp_path, **settings)
    assert found["implementation"] == "cython"
    assert found["reason"] is None
    assert found["warnings"] == []


def test_twin_is_taken_when_forced(tmp_path: Path) -> None:
    found = report(tmp_path, PGOUTPUT_FAST_IMPL="python")
    assert found["implementation"] == "python"
    assert found["reason"] is None
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("before", "why"), [(ABSENT, "pgoutput_fast.decoding._core"), (BROKEN, "PyExact_Nonsense")]
)
def test_fallback_warns_once_and_says_why(before: str, why: str, tmp_path: Path) -> None:
    found = report(tmp_path, before)
    assert found["implementation"] == "python"
    assert why in str(found["reason"])
    (warning,) = found["warnings"]
    assert warning.startswith("RuntimeWarning: ")
    assert why in warning


@pytest.mark.parametrize("before", [ABSENT, BROKEN])
def test_twin_that_is_asked_for_is_no_fallback(before: str, tmp_path: Path) -> None:
    found = report(tmp_path, before, PGOUTPUT_FAST_IMPL="python")
    assert (found["implementation"], found["reason"], found["warnings"]) == ("python", None, [])


@pytest.mark.parametrize(
    ("before", "why"), [(ABSENT, "pgoutput_fast.decoding._core"), (BROKEN, "PyExact_Nonsense")]
)
def test_forced_and_absent_is_an_import_error(before: str, why: str, tmp_path: Path) -> None:
    ran = run_python("-c", before + REPORT, cwd=tmp_path, PGOUTPUT_FAST_IMPL="cython")
    assert ran.returncode == 1
    last_line = ran.stderr.splitlines()[-1]
    assert last_line.startswith("ImportError: ")
    assert "PGOUTPUT_FAST_IMPL" in last_line
    assert why in ran.stderr


def test_unknown_implementation_is_an_import_error(tmp_path: Path) -> None:
    ran = run_python("-c", REPORT, cwd=tmp_path, PGOUTPUT_FAST_IMPL="rust")
    assert ran.returncode == 1
    last_line = ran.stderr.splitlines()[-1]
    assert last_line.startswith("ImportError: ")
    for word in ("PGOUTPUT_FAST_IMPL", "rust", "cython", "python"):
        assert word in last_line
