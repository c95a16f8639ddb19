"""What a session has announced, with which every file of a segment begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..decoding.state import MOST_UNUSED_TYPES, Names
from ..protocol.messages import Relation, Type, decode_rare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Announced:
    """The Types and Relations of a session that are in force, with which every file begins.

    Relations of tables that no longer exist, and types that only these used, are forgotten as a
    decoder forgets them. So files do not grow with every table that is dropped and made again.
    """

    def __init__(self) -> None:
        self._types: dict[int, bytes] = {}
        self._relations: dict[int, Relation] = {}
        self._names = Names()
        self._most_types = MOST_UNUSED_TYPES

    def take(self, frame: bytes) -> None:
        """Note a Type or Relation, in place of the one that it replaces."""
        # Names are only compared, and Latin-1 decodes all bytes.
        message = decode_rare(frame, in_stream=False, encoding="latin-1")
        if isinstance(message, Type):
            self._types[message.type_id] = frame
        elif isinstance(message, Relation):
            # Readers take the last one that has a name for the table that has it.
            self._relations.pop(message.relation_id, None)
            self._relations[message.relation_id] = message
            gone = [self._relations.pop(one) for one in self._names.give(message)]
            if gone:
                for type_id in _types_of(gone) - _types_of(self._relations.values()):
                    self._types.pop(type_id, None)
            if len(self._types) > self._most_types:
                used = self._types.keys() & _types_of(self._relations.values())
                self._types = {type_id: self._types[type_id] for type_id in used}
                self._most_types = len(used) + MOST_UNUSED_TYPES

    def frames(self) -> Iterator[bytes]:
        """The frames that are in force, types before the relations that use them."""
        yield from self._types.values()
        yield from (relation.frame for relation in self._relations.values())


def _types_of(relations: Iterable[Relation]) -> set[int]:
    return {column.type_id for relation in relations for column in relation.columns}
