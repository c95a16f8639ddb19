"""Fail if modules of the package import what they must not.

No modules import each other in a circle, no compiled module imports one of a layer above it, and no
module imports one of the two implementations by name: ``_impl`` chooses between them. Headers
include none of a layer above theirs.

import-linter checks the layers that pyproject.toml declares, but reads only Python modules. This
script also reads compiled modules and what they cimport, in their .pxd files too, and imports
inside functions.
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
    r"^[ \t]*(?:from ([.\w]+) c?import (\([^)]*\)|[^\n(]+)|c?import ([^\n#]+))", re.MULTILINE
)
TWIN = re.compile(r"\btwin\(\s*\"([.\w]+)\"")
INCLUDE = re.compile(r"^[ \t]*#include \"([^\"]+)\"", re.MULTILINE)

FOR_TYPE_CHECKERS = re.compile(r"^if (?:\w+\.)?TYPE_CHECKING:.*\n(?:(?:[ \t].*)?\n)*", re.MULTILINE)
# What may be imported by a string is a module of another package that is named there, and a
# package's own submodules.
IMPORT_BY_STRING = re.compile(
    r"(?:import_module|__import__)\(\s*(?![\"'](?!pgoutput_fast|\.)|f\"\{__name__\}\.)"
)


def modules(root: Path) -> dict[str, list[Path]]:
    """The files of every module of the package below `root`, by its name.

    A compiled module has a .pyx file, a .pxd file, or both.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted((root / PACKAGE).rglob("*.p*")):
        if path.suffix in (".py", ".pyx", ".pxd"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found.setdefault(name.removesuffix(".__init__"), []).append(path)
    return found


def imports(name: str, text: str, known: dict[str, list[Path]]) -> set[str]:
    """The modules of the package that the code of the module `name` imports, in functions too."""
    is_package = any(path.name == "__init__.py" for path in known[name])
    package = name if is_package else name.rpartition(".")[0]
    found: set[str] = set()
    for start, names, whole in IMPORT.findall(text):
        found |= {one.split()[0] for one in whole.split(",") if one.strip()} & known.keys()
        if not start:
            continue
        target = start
        if target.startswith("."):
            parts = package.split(".")
            base = parts[: len(parts) - (len(target) - len(target.lstrip(".")) - 1)]
            target = ".".join([*base, *filter(None, [target.lstrip(".")])])
        below = {f"{target}.{one.split()[0]}" for one in re.findall(r"\w[^,()\n]*", names)}
        found |= (below & known.keys()) or ({target} & known.keys())
    return found - {name}


def implementation_of(name: str, paths: list[Path]) -> str:
    """The implementation that a module is a part of; "" if both use it."""
    if any(path.suffix in (".pyx", ".pxd") for path in paths):
        return "cython"
    last = name.rpartition(".")[2]
    return "python" if last == "_pure" or last.startswith("_pure_") else ""


def named_implementations(name: str, text: str, known: dict[str, list[Path]]) -> list[str]:
    """What is wrong with how the module `name` imports a part of an implementation.

    Parts of an implementation import each other. Others ask ``_impl`` for them; what only type
    checkers read may name them.
    """
    if name == f"{PACKAGE}._impl":
        return []
    own = implementation_of(name, known[name])
    faults = [
        f"{name} imports {other} by name; ask _impl for it"
        for other in sorted(imports(name, FOR_TYPE_CHECKERS.sub("", text), known))
        if implementation_of(other, known[other]) not in ("", own)
    ]
    if IMPORT_BY_STRING.search(text):
        faults.append(f"{name} imports a module of the package by a literal name; ask _impl for it")
    return faults


def layer_of(name: str, layers: list[str]) -> int | None:
    """The number of a module's layer, counted from the top; None for the package itself."""
    part = name.split(".")[1] if "." in name else ""
    for number, layer in enumerate(layers):
        if part in re.findall(r"\w+", layer):
            return number
    return None


def included_from_above(root: Path, layers: list[str]) -> list[str]:
    """What is wrong with the headers that headers include."""
    headers = {path.name: path for path in (root / PACKAGE).rglob("*.h")}

    def layer(path: Path) -> int | None:
        return layer_of(".".join(path.relative_to(root).with_suffix("").parts), layers)

    faults = []
    for path in headers.values():
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            other = headers.get(Path(name).name)
            if other is None:
                continue
            own, theirs = layer(path), layer(other)
            if own is not None and theirs is not None and theirs < own:
                faults.append(f"{path.name} includes {other.name}, which lies above it")
    return faults


def main() -> int:
    """Print the faults; return 1 if there are any."""
    root = Path(__file__).parents[1]
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    known = modules(root)
    texts = {
        name: "\n".join(path.read_text(encoding="utf-8") for path in paths)
        for name, paths in known.items()
    }
    graph = {
        name: imports(name, text, known)
        | ({f"{PACKAGE}.{twin}" for twin in TWIN.findall(text)} & known.keys())
        for name, text in texts.items()
    }
    faults = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append("a circle of imports: " + " <- ".join(error.args[1]))
    for name, paths in known.items():
        faults += named_implementations(name, texts[name], known)
        own = layer_of(name, layers)
        for other in sorted(graph[name]) if implementation_of(name, paths) == "cython" else ():
            theirs = layer_of(other, layers)
            if own is not None and theirs is not None and theirs < own:
                faults.append(f"{name}, which is compiled, imports {other}, which lies above it")
    faults += included_from_above(root, layers)
    print("\n".join(faults) or f"{len(graph)} modules, no circle")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
