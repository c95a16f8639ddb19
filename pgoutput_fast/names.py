"""Names of tables and columns, as errors, files and Arrow show them."""

from __future__ import annotations

from typing import Protocol


class Named(Protocol):
    """What has a name in a schema: a relation, a table of the catalogue, a type."""

    @property
    def namespace(self) -> str:
        """The name of its schema."""

    @property
    def name(self) -> str:
        """Its own name."""


def qualified(thing: Named) -> str:
    """``namespace.name`` as the server has them."""
    return f"{thing.namespace}.{thing.name}"


def shown_name(name: str) -> str:
    r"""A name as Arrow can take it: bytes that are no text in the encoding as ``\xNN``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def shown_table(thing: Named) -> str:
    """``namespace.name`` as Arrow can take it."""
    return shown_name(qualified(thing))
