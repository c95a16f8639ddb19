"""Write the log of a long-running command to standard error, as lines of text or of JSON."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
from typing import TYPE_CHECKING, Any, Literal

from ..errors import Argument, PgOutputError, printable, without_passwords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LogFormat = Literal["text", "json"]


class RecordFormatter(logging.Formatter):
    """Makes one line of each record of the command and of the library.

    A record may have the attributes `event` (str), `numbers` (dict), and `details` (str, instead of
    a traceback). Set them with logging's ``extra=``.

    Parameters
    ----------
    kind : {"text", "json"}
    """

    def __init__(self, kind: LogFormat) -> None:
        super().__init__()
        self._kind = kind
        self.change: Callable[[str], str] = str
        """Removes from a text what the log must not show, such as secrets."""
        self.name_option: Callable[[Argument], str] = str
        """Returns the name of an option as the user of this command writes it."""

    def shown(self, text: str) -> str:
        """Return a text without secrets and passwords."""
        return without_passwords(self.change(text))

    def _message(self, record: logging.LogRecord) -> str:
        arguments = record.args
        if not isinstance(arguments, tuple) or not arguments:
            return record.getMessage()
        return str(record.msg) % tuple(map(self._named, arguments))

    def _named(self, value: object) -> object:
        if isinstance(value, Argument):
            return self.name_option(value)
        return value.text(self.name_option) if isinstance(value, PgOutputError) else value

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without a line end."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        when = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = self.shown(self._message(record))
        failed = getattr(record, "details", None)
        if record.exc_info is not None:
            failed = self.formatException(record.exc_info)
        if failed is not None:
            failed = self.shown(failed)
        if self._kind == "text":
            lines = [f"{when} {record.levelname} {printable(message)}"]
            if failed is not None:
                parts = (line.split("\t") for line in failed.splitlines())
                lines += ["\t".join(map(printable, line)) for line in parts]
            return "\n".join(lines)
        fields: dict[str, Any] = {
            "ts": when,
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": message,
            "logger": record.name,
            **{
                name: without_passwords(value) if isinstance(value, str) else value
                for name, value in getattr(record, "numbers", {}).items()
            },
        }
        if failed is not None:
            fields["traceback"] = failed
        return json.dumps(fields, default=str)


class LineHandler(logging.Handler):
    """Calls `write` with the line of each record."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Format and write a record."""
        # A log that can't be written must not end a capture.
        with contextlib.suppress(Exception):
            self._write(self.format(record))


def write_line(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def logged(
    formatter: RecordFormatter, write: Callable[[str], None] = write_line, level: int = logging.INFO
) -> Iterator[None]:
    """Call `write` with a line for each record, within the block.

    Records of this package count from `level` on, records of other packages from WARNING on.
    """
    handler = LineHandler(write)
    handler.setFormatter(formatter)
    root, own = logging.getLogger(), logging.getLogger(__name__.partition(".")[0])
    before = own.level
    root.addHandler(handler)
    own.setLevel(level)
    try:
        yield
    finally:
        own.setLevel(before)
        root.removeHandler(handler)
