"""What an export has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb


def manifest_of(directory: Path) -> dict[str, Any]:
    """The manifest of a directory."""
    if (directory / "changes.duckdb").exists():
        with duckdb.connect(str(directory / "changes.duckdb"), read_only=True) as connection:
            text = connection.execute("FROM pgoutput_fast.manifest").fetchall()[0][0]
    else:
        text = (directory / "_manifest.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
