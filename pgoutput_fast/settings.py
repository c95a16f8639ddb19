"""The arguments of a decoder, checked: policies, encoding and registered types."""

from __future__ import annotations

from dataclasses import dataclass, field

from .encodings import python_encoding
from .policies import Policies
from .types import TypeRegistry


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a decoder, which decide how values are decoded."""

    policies: Policies = field(default_factory=Policies)
    encoding: str = "utf-8"  # Python's name
    registry: TypeRegistry | None = None


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
    return Settings(policies, python_encoding(encoding), registry)
