"""Names of tables and columns in errors, files, Arrow schemas and SQL."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .errors import PgOutputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

_UNQUOTED = re.compile(r"[a-z_][a-z0-9_]*")
_PART = re.compile(r""""(?P<quoted>(?:[^"]|"")+)"|(?P<plain>[^."\s]+)""")
_FOLDED = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


class Named(Protocol):
    """Anything with a name in a schema: a relation, a table of the catalogue, or a type."""

    @property
    def namespace(self) -> str:
        """The name of the schema."""

    @property
    def name(self) -> str:
        """The name within the schema."""


def qualified(thing: Named) -> str:
    """Return ``namespace.name``, neither quoted nor escaped."""
    return f"{thing.namespace}.{thing.name}"


class NamePart(NamedTuple):
    """One identifier of a name, as a user wrote it.

    Fields: text (without its quotes), is_quoted.
    """

    text: str
    is_quoted: bool

    @property
    def name(self) -> str:
        """The name in SQL: without quotes, ASCII letters become lower case."""
        return self.text if self.is_quoted else self.text.translate(_FOLDED)


def name_parts(text: str) -> list[NamePart]:
    """Split a name at its dots, with the quotes of SQL: ``public."My Table"``.

    Raises
    ------
    PgOutputError
        The text is not a valid name.
    """
    parts: list[NamePart] = []
    position = 0
    while match := _PART.match(text, position):
        quoted = match["quoted"]
        parts.append(
            NamePart(match["plain"], False)
            if quoted is None
            else NamePart(quoted.replace('""', '"'), True)
        )
        position = match.end()
        if position == len(text):
            return parts
        if text[position] != ".":
            break
        position += 1
    raise PgOutputError(
        f"{text!r} is no name as SQL has it: write public.orders, and with double quotes what has "
        f'capital letters, dots, quotes or spaces in it, as public."My Table"',
        code="unfit_input",
    )


def parse_name(text: str, form: str) -> tuple[str, ...]:
    """Return the parts of a name that is written as in SQL.

    Parameters
    ----------
    text : str
        The name as regclass takes it: ``public.orders``, ``public."My Table"``. Without quotes,
        ASCII letters become lower case.
    form : str
        The expected parts: ``"schema.table"``.

    Raises
    ------
    PgOutputError
        The text is not a valid name, or has more or fewer parts.
    """
    parts = name_parts(text)
    if len(parts) != len(form.split(".")):
        raise PgOutputError(f"{text!r} is no name of the form {form}", code="unfit_input")
    return tuple(part.name for part in parts)


def sql_name(*names: str) -> str:
    """Return a name as `parse_name` takes it, quoted if necessary: ``public."My Table"``."""
    return ".".join(
        name if _UNQUOTED.fullmatch(name) else '"' + name.replace('"', '""') + '"' for name in names
    )


def shown_name(name: str) -> str:
    r"""Return a name as Unicode for Arrow; bytes that are no valid text become ``\xNN``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def shown_table(thing: Named) -> str:
    """Return ``namespace.name`` as Unicode, escaped as in :func:`shown_name`."""
    return shown_name(qualified(thing))


def distinct_names(names: Iterable[str], reserved: Iterable[str] = ()) -> list[str]:
    """Return names for the parts of a table or of a composite that every target can distinguish.

    No two names are equal if case is ignored, as DuckDB and Delta do. No name equals another name's
    part before a dot: in Iceberg, ``a.b`` is both a column of that name and the attribute ``b`` of
    ``a``. A name in conflict with another gets ``_`` instead of its dots; if it has none, ``_`` is
    appended.

    Parameters
    ----------
    names : iterable of str
    reserved : iterable of str
        Names that are already in use.
    """
    used_names = {name.casefold() for name in reserved}
    prefixes = {start for name in used_names for start in _beginnings(name)}
    distinct = []
    for name in names:
        while _is_used(name.casefold(), used_names, prefixes):
            name = name.replace(".", "_") if "." in name else f"{name}_"
        distinct.append(name)
        used_names.add(name.casefold())
        prefixes.update(_beginnings(name.casefold()))
    return distinct


def _beginnings(name: str) -> Iterator[str]:
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _is_used(name: str, used_names: Collection[str], prefixes: Collection[str]) -> bool:
    return (
        name in used_names
        or name in prefixes
        or any(beginning in used_names for beginning in _beginnings(name))
    )
