"""Files of options, as the command takes them with `--config`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

_PLACE = tempfile.TemporaryDirectory(prefix="options-")


def config(**options: object) -> list[str]:
    """Write options to a file, and return the arguments that give it to a command."""
    text = "".join(f"{name} = {_toml(value)}\n" for name, value in options.items())
    path = Path(_PLACE.name) / f"{abs(hash(text)):x}.toml"
    path.write_text(text)
    return ["--config", str(path)]


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        items = (f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items())
        return f"{{{', '.join(items)}}}"
    return json.dumps(value).replace("NaN", "nan")
