"""The arguments of a decoder, checked: policies, encoding and registered types."""

from __future__ import annotations

from dataclasses import dataclass, field

from .encodings import REPLACING, is_sql_ascii, python_encoding
from .policies import Policies
from .types import TypeRegistry


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a decoder, which decide how values are decoded.

    Attributes
    ----------
    policies : Policies
    encoding : str
        Python's name of the codec with which text is decoded.
    registry : TypeRegistry or None
    is_sql_ascii : bool
        Whether the session's client_encoding is SQL_ASCII, so that any bytes can be in a text.
    """

    policies: Policies = field(default_factory=Policies)
    encoding: str = "utf-8"
    registry: TypeRegistry | None = None
    is_sql_ascii: bool = False

    @property
    def text_is_bytes(self) -> bool:
        """Whether values of text types are bytes."""
        return self.is_sql_ascii and self.policies.invalid_text == "binary"

    @property
    def client_encoding(self) -> str:
        """The encoding of which :func:`make_settings` makes the same again."""
        return "SQL_ASCII" if self.is_sql_ascii else self.encoding


def make_settings(
    policies: Policies | None = None,
    encoding: str = "utf-8",
    registry: TypeRegistry | None = None,
) -> Settings:
    """Check a decoder's arguments.

    Raises
    ------
    PgOutputError
        The encoding is unknown or can't be used.
    TypeError
        An argument is of a wrong type.
    """
    if policies is None:
        policies = Policies()
    elif not isinstance(policies, Policies):
        raise TypeError(f"policies must be a Policies, not {type(policies).__name__}")
    if registry is not None and not isinstance(registry, TypeRegistry):
        raise TypeError(f"registry must be a TypeRegistry, not {type(registry).__name__}")
    sql_ascii = is_sql_ascii(encoding)
    replaces = sql_ascii and policies.invalid_text == "replace"
    codec = REPLACING if replaces else python_encoding(encoding)
    return Settings(policies, codec, registry, sql_ascii)
