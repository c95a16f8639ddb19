"""Each error that the package raises has a code that the reference lists."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.commands.builds import ROOT

from pgoutput_fast.errors import CODES, SENTENCES


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    paths = sorted((ROOT / "pgoutput_fast").rglob("*.py"))
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths
    }


def nodes(trees: dict[str, ast.Module], kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    return (
        (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kind)
    )


def name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def errors(trees: dict[str, ast.Module]) -> dict[str, bool]:
    """The classes of errors, and whether all errors of the class have one code."""
    found = {"PgOutputError": False}
    classes = [node for _, node in nodes(trees, ast.ClassDef) if isinstance(node, ast.ClassDef)]
    before = 0
    while before != len(found):
        before = len(found)
        for one in classes:
            base = next((name for each in one.bases if (name := name_of(each)) in found), None)
            if base is not None:
                found[one.name] = found[base] or any(
                    isinstance(line, ast.Assign) and name_of(line.targets[0]) == "code"
                    for line in one.body
                )
    return found


def test_each_error_has_a_code(trees: dict[str, ast.Module]) -> None:
    kinds = errors(trees)
    without = []
    for path, tree in trees.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        # These take the code of a refused frame.
        located = {
            id(call.func.value)
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "locate"
        }
        without += [
            f"{path}:{call.lineno}"
            for call in calls
            if kinds.get(name_of(call.func) or "") is False
            and id(call) not in located
            and not any(one.arg == "code" for one in call.keywords)
        ]
    assert without == []


def test_the_reference_has_the_codes_that_are_used(trees: dict[str, ast.Module]) -> None:
    texts = {
        node.value
        for path, node in nodes(trees, ast.Constant)
        if path != "pgoutput_fast/errors.py"
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
    }
    assert [code for code in CODES if code not in texts] == []
    given = {
        one.value.value
        for _, call in nodes(trees, ast.Call)
        if isinstance(call, ast.Call)
        for one in call.keywords
        if one.arg == "code"
        and isinstance(one.value, ast.Constant)
        and isinstance(one.value.value, str)
    }
    assert given <= CODES.keys() | SENTENCES.keys()
