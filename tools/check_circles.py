"""Fail if modules of the package import each other in a circle, or a compiled one imports upwards.

import-linter checks the layers that pyproject.toml declares, but reads only Python modules. This
script also reads compiled modules and what they cimport, and imports inside functions.
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = "pgoutput_fast"
IMPORT = re.compile(
    r"^[ \t]*(?:from ([.\w]+) c?import (\([^)]*\)|[^\n(]+)|c?import (pgoutput_fast[.\w]*))",
    re.MULTILINE,
)


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package below `root`, compiled or not, by its name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py*")):
        if path.suffix in (".py", ".pyx"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that the module `name` imports, also inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for start, names, whole in IMPORT.findall(path.read_text(encoding="utf-8")):
        target = whole or start
        if target.startswith("."):
            parts = package.split(".")
            base = parts[: len(parts) - (len(target) - len(target.lstrip(".")) - 1)]
            target = ".".join([*base, *filter(None, [target.lstrip(".")])])
        below = {f"{target}.{one.split()[0]}" for one in re.findall(r"\w[^,()\n]*", names)}
        found |= (below & known.keys()) or ({target} & known.keys())
    return found - {name}


def layer_of(name: str, layers: list[str]) -> int | None:
    """The number of a module's layer, counted from the top; None for the package itself."""
    part = name.split(".")[1] if "." in name else ""
    for number, layer in enumerate(layers):
        if part in re.findall(r"\w+", layer):
            return number
    return None


def main() -> int:
    """Print the faults; return 1 if there are any."""
    root = Path(__file__).parents[1]
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    known = modules(root)
    graph = {name: imports(name, path, known) for name, path in known.items()}
    faults = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append("a circle of imports: " + " <- ".join(error.args[1]))
    for name, path in known.items():
        own = layer_of(name, layers)
        for other in sorted(graph[name]) if path.suffix == ".pyx" else ():
            theirs = layer_of(other, layers)
            if own is not None and theirs is not None and theirs < own:
                faults.append(f"{path.relative_to(root)} imports {other}, which lies above it")
    print("\n".join(faults) or f"{len(graph)} modules, no circle")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
