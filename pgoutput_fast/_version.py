"""The version, in this place alone: pyproject.toml takes it from here."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
