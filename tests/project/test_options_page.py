"""The reference of options is what the fields say."""

from __future__ import annotations

import importlib.util

import pytest
from support.commands.builds import ROOT

for _name in ("click", "rich", "pyarrow", "psycopg"):
    pytest.importorskip(_name)


def test_the_page_is_what_the_fields_say() -> None:
    path = ROOT / "tools" / "options_page.py"
    spec = importlib.util.spec_from_file_location("options_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = "make it anew: .venv/bin/python tools/options_page.py"
    assert module.PAGE.read_text() == module.page(), made
