"""What an export has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def manifest_of(directory: Path) -> dict[str, Any]:
    """The manifest of a directory."""
    return dict(json.loads((directory / "_manifest.json").read_text(encoding="utf-8")))
