"""Format the names of tables and columns for error messages, files and Arrow schemas."""

from __future__ import annotations

from typing import Protocol


class Named(Protocol):
    """Anything with a name in a schema: a relation, a table of the catalogue, a type."""

    @property
    def namespace(self) -> str:
        """The schema's name."""

    @property
    def name(self) -> str:
        """The name within the schema."""


def qualified(thing: Named) -> str:
    """``namespace.name``, neither quoted nor escaped."""
    return f"{thing.namespace}.{thing.name}"


def shown_name(name: str) -> str:
    r"""A name as Unicode for Arrow: bytes that are no text in the encoding become ``\xNN``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def shown_table(thing: Named) -> str:
    """``namespace.name`` as Unicode, escaped as :func:`shown_name` does it."""
    return shown_name(qualified(thing))
