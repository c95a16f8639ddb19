"""The Types and Relations in force in a session. Every file of a segment begins with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..decoding.state import MOST_UNUSED_TYPES, Names
from ..protocol.messages import Relation, Type, decode_rare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Announced:
    """The Types and Relations in force in a session.

    As a decoder does, it forgets the Relation of a dropped table, and the types that only dropped
    tables used. Otherwise files would grow with each table that is dropped and created again.
    """

    def __init__(self) -> None:
        self._types: dict[int, bytes] = {}
        self._relations: dict[int, Relation] = {}
        self._names = Names()
        self._most_types = MOST_UNUSED_TYPES

    def take(self, frame: bytes) -> None:
        """Note a Type or Relation frame; it replaces the earlier one with the same OID."""
        # Latin-1 decodes any bytes, which is enough to compare names.
        message = decode_rare(frame, in_stream=False, encoding="latin-1")
        if isinstance(message, Type):
            self._types[message.type_id] = frame
        elif isinstance(message, Relation):
            # Put it last: for readers, the last Relation with a name is the table of that name.
            self._relations.pop(message.relation_id, None)
            self._relations[message.relation_id] = message
            gone = [self._relations.pop(relation_id) for relation_id in self._names.give(message)]
            if gone:
                for type_id in _types_of(gone) - _types_of(self._relations.values()):
                    self._types.pop(type_id, None)
            if len(self._types) > self._most_types:
                used = self._types.keys() & _types_of(self._relations.values())
                self._types = {type_id: self._types[type_id] for type_id in used}
                self._most_types = len(used) + MOST_UNUSED_TYPES

    def frames(self) -> Iterator[bytes]:
        """Yield the frames in force: types first, because relations refer to them."""
        yield from self._types.values()
        yield from (relation.frame for relation in self._relations.values())


def _types_of(relations: Iterable[Relation]) -> set[int]:
    return {column.type_id for relation in relations for column in relation.columns}
