"""Errors of this package in Spark's Python processes, found again in what Spark raises.

Of an error in another process the driver gets the text of a traceback. So an executor, and the
process that plans a query, puts a line of JSON behind the text, and the driver reads that line.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

from pgoutput_fast.errors import Argument, DecodeError, PgOutputError

from ._worker import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MARK = "[pgoutput_fast error] "
_ATTRIBUTES = ("code", "offset", "tag", "frame", "path", "column", "table", "parameter")
_LINE = re.compile(re.escape(_MARK) + r"(\{.*\})")


class WorkerError(PgOutputError):
    """What a process of Spark raises for an error of this package.

    Its message is the error's whole text, and a line with the error's fields: PySpark gives the
    driver the class and the text of an exception, but no attributes.
    """

    def text(self, shown: Callable[[Argument], str] | None = None) -> str:  # noqa: ARG002
        """Return the message, which has the code and the hint already."""
        return self.message


@contextlib.contextmanager
def telling(shown: Callable[[Argument], str] = str) -> Iterator[None]:
    """Run in a process of Spark: raise this package's errors as a `WorkerError`.

    And a worker prints no error where a LIMIT ends it early.

    Parameters
    ----------
    shown : callable
        How options are written that an error names.
    """
    prepare()
    try:
        yield
    except WorkerError:
        raise
    except PgOutputError as error:
        text = f"{error.text(shown)}\n{_MARK}{_fields(error)}"
        worker_error = WorkerError(text, code=error.code)
        # Spark shows the traceback, in which the text stands once: `error` is no cause in it.
        raise worker_error.with_traceback(error.__traceback__) from error.__cause__


def _fields(error: PgOutputError) -> str:
    """The class, the message, and the attributes that are set, as JSON."""
    kind = type(error)
    fields: dict[str, Any] = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "message": error.args[0] if error.args else "",
        "hint": [one if isinstance(one, str) else _named(one) for one in error.hint],
    }
    for name in _ATTRIBUTES:
        value = getattr(error, name)
        if value is not None:
            fields[name] = value
    return json.dumps(fields, separators=(",", ":"), default=str)


def _named(argument: Argument) -> dict[str, Any]:
    return {"name": argument.name, **({"value": argument.value} if argument.has_value else {})}


def error_of(exception: BaseException) -> PgOutputError | None:
    """The error of this package that made a Spark job fail.

    Parameters
    ----------
    exception : exception
        What PySpark has raised on the driver: a ``PythonException``, the exception of a streaming
        query, or one that has such an exception as its cause. An error of this package that was
        raised on the driver itself is found too.

    Returns
    -------
    PgOutputError or None
        None if the exception has another origin. Else the error, as an object of its class: an
        executor raised it while it ran :func:`read_segments`, :func:`decode_frames`,
        :func:`decode_udf`, :func:`current_state` or the source `pgoutput`, or the source refused or
        ended a query with it. For an error about a frame, `code` says what is wrong, `offset` is
        the byte from 0, `tag` the frame's first character, `frame` its index in its batch, `path`
        its file, and `column` the one whose value is refused. Each is None if it is not known.
    """
    seen: set[int] = set()
    current: BaseException | None = exception
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = _read(str(current))
        if found is None and isinstance(current, PgOutputError):
            return current
        if found is not None:
            return found
        current = current.__cause__ or current.__context__
    return None


def _read(text: str) -> PgOutputError | None:
    """The last error that a text tells of: those before it are its causes."""
    for match in reversed([*_LINE.finditer(text)]):
        try:
            told = json.loads(match[1])
            return _restored(told)
        except (ValueError, KeyError, TypeError):
            continue  # a text that has such a line, but not from here
    return None


def _restored(told: dict[str, Any]) -> PgOutputError:
    kind = _class(told["class"])
    error = kind.__new__(kind)
    error.args = (told["message"],)
    names = (
        _ATTRIBUTES
        if issubclass(kind, DecodeError)
        else [name for name in _ATTRIBUTES if name in told]
    )
    for name in names:
        setattr(error, name, told.get(name))
    error.hint = tuple(one if isinstance(one, str) else Argument(**one) for one in told["hint"])
    return error


def _class(name: str) -> type[PgOutputError]:
    """The class of this name if it is an error of this package, else the one for all of them."""
    known: list[type[PgOutputError]] = [PgOutputError]
    for one in known:  # which grows meanwhile
        if f"{one.__module__}.{one.__qualname__}" == name:
            return one
        known += one.__subclasses__()
    return PgOutputError
