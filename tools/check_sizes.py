"""Fail if a function has more than 80 lines, and no comment says why.

The comment begins with "Long because" and stands right above the function. A function's docstring
does not count.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_LINES_OF_FUNCTION = 80
WHY = "Long because"


def main() -> int:
    """Print what is too long; return 1 if anything is."""
    root = Path(__file__).parents[1]
    found = [line for path in sources(root) for line in too_long(path, path.relative_to(root))]
    print("\n".join(found) or "no function is too long")
    return int(bool(found))


def sources(root: Path) -> Iterator[Path]:
    """All code files of the package, its benchmarks and tools."""
    for directory in ("pgoutput_fast", "benchmarks", "tools"):
        for path in sorted((root / directory).rglob("*")):
            if path.suffix in (".py", ".pyx", ".pxd", ".h", ".c") and path.is_file():
                yield path


def too_long(path: Path, shown: Path) -> Iterator[str]:
    """A line for each function in a file that is too long."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    functions = python_functions(text) if path.suffix == ".py" else other_functions(path, lines)
    for first, name, length in functions:
        above = lines[max(first - 6, 0) : first]
        if length > MOST_LINES_OF_FUNCTION and not any(WHY in line for line in above):
            yield f"{shown}:{first + 1}: {name} has {length} lines"


def python_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """First line (counted from 0), name, and number of lines without docstring of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.lineno - 1, node.name, length


def macros(lines: list[str]) -> Iterator[tuple[int, str, int]]:
    """The same for macros, which go on where a line ends with a backslash."""
    start = None
    for number, line in enumerate(lines):
        if start is None and (head := re.match(r"#define (\w+)", line)):
            start, name = number, head[1]
        if start is not None and not line.endswith("\\"):
            yield start, name, number - start + 1
            start = None


def other_functions(path: Path, lines: list[str]) -> Iterator[tuple[int, str, int]]:
    """The same for Cython, by indentation, and for C, by the braces at the outermost level."""
    if path.suffix in (".h", ".c"):
        yield from macros(lines)
        start = None
        for number, line in enumerate(lines):
            if line.startswith("{") or (line.endswith("{") and line[:1].isalpha() and "(" in line):
                start = number
            elif line.startswith("}") and start is not None:
                head = " ".join(lines[max(start - 8, 0) : start + 1])
                yield start, (re.findall(r"(\w+)\(", head) or ["?"])[-1], number - start + 1
                start = None
        return
    for number, line in enumerate(lines):
        head = re.match(r"( *)(?:cdef|def|cpdef)\b(?! class)[^=]*?(\w+)\(", line)
        if head is None:
            continue
        end = number + 1
        while end < len(lines) and (
            not lines[end].strip()
            or len(lines[end]) - len(lines[end].lstrip()) > len(head[1])
            or lines[end].lstrip().startswith(")")
        ):
            end += 1
        body = "\n".join(lines[number:end]).rstrip()
        docstring = re.search(r':\n\s*r?"""(?:.|\n)*?"""', body)
        length = body.count("\n") + 1 - (docstring[0].count("\n") if docstring else 0)
        yield number, head[2], length


if __name__ == "__main__":
    sys.exit(main())
