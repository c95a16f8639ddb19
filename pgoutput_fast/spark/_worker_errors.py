"""Pass errors of this package from Spark's Python processes to the driver.

The driver gets only the text of a traceback from another process. So an executor, and the process
that plans a query, appends a line of JSON to the text. The driver restores the error from this
line.
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

_PREFIX = "[pgoutput_fast error] "
_ATTRIBUTES = ("code", "offset", "tag", "frame", "path", "column", "table", "parameter")
_LINE = re.compile(re.escape(_PREFIX) + r"(\{.*\})")


class WorkerError(PgOutputError):
    """The exception that a process of Spark raises for an error of this package.

    Its message is the error's whole text and a line with the error's fields. PySpark passes the
    class and the text of an exception to the driver, but no attributes.
    """

    def text(self, shown: Callable[[Argument], str] | None = None) -> str:  # noqa: ARG002
        """Return the message, which already contains the code and the hint."""
        return self.message


@contextlib.contextmanager
def worker_errors(shown: Callable[[Argument], str] = str) -> Iterator[None]:
    """Raise this package's errors as `WorkerError` in a process of Spark.

    A worker also prints no error when a LIMIT ends it early.

    Parameters
    ----------
    shown : callable
        Formats an option that an error names.
    """
    prepare()
    try:
        yield
    except WorkerError:
        raise
    except PgOutputError as error:
        text = f"{error.text(shown)}\n{_PREFIX}{_fields(error)}"
        worker_error = WorkerError(text, code=error.code)
        # `error` is not the cause: Spark would print its text twice in the traceback.
        raise worker_error.with_traceback(error.__traceback__) from error.__cause__


def _fields(error: PgOutputError) -> str:
    """Return the class, the message, and the attributes that are set, as JSON."""
    kind = type(error)
    fields: dict[str, Any] = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "message": error.args[0] if error.args else "",
        "hint": [part if isinstance(part, str) else _named(part) for part in error.hint],
    }
    for name in _ATTRIBUTES:
        value = getattr(error, name)
        if value is not None:
            fields[name] = value
    return json.dumps(fields, separators=(",", ":"), default=str)


def _named(argument: Argument) -> dict[str, Any]:
    return {"name": argument.name, **({"value": argument.value} if argument.has_value else {})}


def error_of(exception: BaseException) -> PgOutputError | None:
    """Return the error of this package that made a Spark job fail.

    Parameters
    ----------
    exception : exception
        An exception that PySpark raised on the driver: a ``PythonException``, the exception of a
        streaming query, or an exception with such a cause. The function also finds an error of this
        package that was raised on the driver itself.

    Returns
    -------
    PgOutputError or None
        The error, as an object of its own class; None if the exception has another origin. An
        executor raised it while it ran :func:`read_segments`, :func:`decode_frames`,
        :func:`decode_udf`, :func:`current_state` or the source `pgoutput`. Or the source refused or
        ended a query with it. For an error about a frame, `code` says what is wrong, `offset` is
        the byte from 0, `tag` the frame's first character, `frame` its index in its batch, `path`
        its file, and `column` the column of the refused value. Each is None if it is not known.
    """
    exception_ids: set[int] = set()
    current: BaseException | None = exception
    while current is not None and id(current) not in exception_ids:
        exception_ids.add(id(current))
        error = _read(str(current))
        if error is None and isinstance(current, PgOutputError):
            return current
        if error is not None:
            return error
        current = current.__cause__ or current.__context__
    return None


def _read(text: str) -> PgOutputError | None:
    """Return the last error in a text; the errors before it are its causes."""
    for match in reversed([*_LINE.finditer(text)]):
        try:
            fields = json.loads(match[1])
            return _restored(fields)
        except (ValueError, KeyError, TypeError):
            continue  # this package did not write the line
    return None


def _restored(fields: dict[str, Any]) -> PgOutputError:
    kind = _class(fields["class"])
    error = kind.__new__(kind)
    error.args = (fields["message"],)
    names = (
        _ATTRIBUTES
        if issubclass(kind, DecodeError)
        else [name for name in _ATTRIBUTES if name in fields]
    )
    for name in names:
        setattr(error, name, fields.get(name))
    error.hint = tuple(
        part if isinstance(part, str) else Argument(**part) for part in fields["hint"]
    )
    return error


def _class(name: str) -> type[PgOutputError]:
    """Return the class of an error of this package by its name; an unknown one: the base class."""
    classes: list[type[PgOutputError]] = [PgOutputError]
    for kind in classes:  # the loop adds subclasses to the list
        if f"{kind.__module__}.{kind.__qualname__}" == name:
            return kind
        classes += kind.__subclasses__()
    return PgOutputError
