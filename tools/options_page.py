"""Write docs/options.md from the fields of the classes of options.

Called without arguments it replaces the page. A test compares the page with what this makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pgoutput_fast.apply.embedded_capture import DEFAULT_CAPTURE
from pgoutput_fast.apply.options import SyncOptions, TargetOptions
from pgoutput_fast.capture_options import CaptureOptions, StreamOptions
from pgoutput_fast.cli._options import flag_of
from pgoutput_fast.cli._service import ServiceOptions
from pgoutput_fast.cli._spark_engine import SparkOptions
from pgoutput_fast.options import OptionField, Options

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

_BEGIN = """\
# Options

<!-- This page is made by tools/options_page.py from the fields in the code. Change them there. -->

Each option has one name and one meaning wherever it is given:

- In Python it is a keyword of `connect`, `capture` or `apply.sync`, or a field of a class below:
  `capture(…, capture_options=CaptureOptions(merge=False))`. A keyword goes before the object.
- The commands `capture` and `sync` have a flag where the list names one. All others are in a file,
  `--config FILE.toml`, by the same names. A flag goes before the file. The file may also have the
  command's own arguments, such as `slot = "shop"` and `publications = ["shop"]`, but no connection
  string.
- The Spark source `pgoutput` takes the options of a capture in camelCase: `maxDelay`.

```toml
# sync.toml
slot = "shop"
publications = ["shop"]
max_delay = "500ms"
keep_seconds = "1h"
policies = "infinity=null numeric=20,4"
partition_by = { "public.orders" = ["day"] }
```

In text, numbers of bytes may have PostgreSQL's units of 1024 (`64kB`, `1.5GB`), and times its units
(`500ms`, `10min`, `12h`, `7d`). Without a unit they are bytes and seconds. Python takes numbers.
"""

_CLASSES: list[tuple[type[Options], str]] = [
    (StreamOptions, "`connect`, `capture` and a `sync` of a slot: the stream of a slot."),
    (CaptureOptions, "`capture(options=)` and `sync(capture_options=)`: the directory of a slot."),
    (SyncOptions, "`sync(options=)`: how tables are kept up to date."),
    (TargetOptions, "`sync(target_options=)`: how tables are kept in the target."),
    (SparkOptions, "The command `sync --engine spark`; in Python, arguments of `SparkEngine`."),
    (ServiceOptions, "The commands `capture` and `sync`: what they tell while they run."),
]


def page() -> str:
    """Return the whole page."""
    parts = [_BEGIN]
    shown: set[str] = set()
    for kind, text in _CLASSES:
        fields = [one for one in kind.options() if one.name not in shown]
        shown |= {one.name for one in fields}
        rows = "\n".join(_rows(fields))
        parts.append(f"## {kind.__name__}\n\n{text}\n\n{rows}\n")
    return "\n".join(parts)


def _rows(fields: list[OptionField]) -> Iterator[str]:
    yield "| option | values | default | flag | |"
    yield "|---|---|---|---|---|"
    for one in fields:
        flag = f"`{flag_of(one)}`" if one.has_flag else ""
        values = one.kind.metavar.replace("|", "\\|")
        yield f"| `{one.name}` | `{values}` | {_default(one)} | {flag} | {one.help} |"


def _default(one: OptionField) -> str:
    other = getattr(DEFAULT_CAPTURE, one.name, one.default)
    found = one.shown_default or _shown(one.default)
    return found if other == one.default else f"{found}; sync: {_shown(other)}"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


if __name__ == "__main__":
    PAGE.write_text(page())
