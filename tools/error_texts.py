"""List the package's error codes and their texts, from the calls that make the errors.

``python tools/error_texts.py`` writes ``tests/data/error_codes.txt``, which a test compares with
the code: a change of it shows each text that was changed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "tests" / "data" / "error_codes.txt"


def error_texts() -> dict[str, list[str]]:
    """Read the sources.

    Returns
    -------
    dict of str to list of str
        Error code → the texts of its errors, with braces where a fact stands. Codes of
        ``DecodeError`` are in :data:`pgoutput_fast.errors.SENTENCES` instead.

    Raises
    ------
    ValueError
        Some calls make an error without a code.
    """
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "pgoutput_fast").rglob("*.py"))
    }
    family = _family(trees)
    found: dict[str, set[str]] = {}
    without: list[str] = []
    for path, tree in trees.items():
        located = {id(call.func.value) for call in _calls(tree) if _is_locate(call)}
        for call in _calls(tree):
            name = _name(call.func)
            if name not in family or id(call) in located:
                continue
            code = next((one.value for one in call.keywords if one.arg == "code"), None)
            for one in _constants(code):
                found.setdefault(one, set()).add(_text(call))
            if code is None and family[name] is not None:
                found.setdefault(str(family[name]), set()).add(_text(call))
            elif code is None:
                without.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name} without a code")
    if without:
        raise ValueError("\n".join(without))
    return {code: sorted(texts) for code, texts in sorted(found.items())}


def _family(trees: dict[Path, ast.Module]) -> dict[str, str | None]:
    """The error classes, each with the code that all of its errors have."""
    family: dict[str, str | None] = {"PgOutputError": None}
    classes = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    size = 0
    while size != len(family):
        size = len(family)
        for one in classes:
            base = next((name for base in one.bases if (name := _name(base)) in family), None)
            if base is not None:
                family[one.name] = _class_code(one) or family[base]
    return family


def _class_code(node: ast.ClassDef) -> str | None:
    for one in node.body:
        if isinstance(one, ast.Assign) and _name(one.targets[0]) == "code":
            assert isinstance(one.value, ast.Constant)
            return str(one.value.value)
    return None


def _constants(code: ast.expr | None) -> list[str]:
    """The codes that an argument can be. That of another error stands for none."""
    if isinstance(code, ast.IfExp):
        return [*_constants(code.body), *_constants(code.orelse)]
    return [str(code.value)] if isinstance(code, ast.Constant) else []


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _is_locate(call: ast.Call) -> bool:
    """Whether the call gives an error the attributes of a refused frame, its code too."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "locate"


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _text(call: ast.Call) -> str:
    message = next((one.value for one in call.keywords if one.arg == "message"), None)
    return _template(call.args[0] if call.args else message)


def _template(node: ast.expr | None) -> str:
    """A text as it stands in the source, with the expressions in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "" if node is None else "{" + ast.unparse(node) + "}"


def listing() -> str:
    """Return the content of the list."""
    return "".join(
        f"{code}\n" + "".join(f"    {text!r}\n" for text in texts)
        for code, texts in error_texts().items()
    )


if __name__ == "__main__":
    try:
        LISTED.write_text(listing(), encoding="utf-8")
    except ValueError as error:
        sys.exit(str(error))
