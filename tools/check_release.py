"""Check that a tag, the version and the changelog agree.

    python tools/check_release.py [TAG]

Without a tag, a version of development (`.dev`) has to have the section "Unreleased", and any other
version a section of its own with a date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HEADING = re.compile(
    r"^## (?:\[?Unreleased\]?|\[?([0-9][^\] ]*)\]? - [0-9]{4}-[0-9]{2}-[0-9]{2})$"
)


def faults(version: str, changelog: str, tag: str | None = None) -> list[str]:
    """What does not agree."""
    found = []
    headings = [line for line in changelog.splitlines() if line.startswith("## ")]
    matches = [_HEADING.match(heading) for heading in headings]
    found += [
        f"the changelog's heading {heading!r} is neither 'Unreleased' nor 'VERSION - YYYY-MM-DD'"
        for heading, match in zip(headings, matches, strict=True)
        if match is None
    ]
    newest = matches[0][1] if matches and matches[0] else None
    if ".dev" in version:
        if newest is not None or not headings:
            found.append(f"the version is {version}, and the changelog lacks 'Unreleased'")
    elif newest != version:
        found.append(f"the version is {version}, and the changelog's newest is {newest}")
    if tag is not None and tag != f"v{version}":
        found.append(f"the tag is {tag}, and the version is {version}")
    return found


def main() -> int:
    """Print what does not agree; return the exit code."""
    text = (ROOT / "pgoutput_fast" / "_version.py").read_text()
    match = re.search(r'__version__ = "([^"]+)"', text)
    assert match is not None
    found = faults(match[1], (ROOT / "CHANGELOG.md").read_text(), *sys.argv[1:2])
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
