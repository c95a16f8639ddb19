"""Find out from a row's values which of two possible states of the types is the right one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from .. import Decoder
from ..errors import DecodeError
from ..policies import Policies
from ..protocol.messages import decode_rare
from ..protocol.wire import relation_id_of
from ..types import TypeRegistry


class TypesInForce(NamedTuple):
    """The types at a position of the history, and the names of the uncertain ones by OID."""

    registry: TypeRegistry
    uncertain: dict[int, str]


class TypeChooser:
    """Chooses one of two states of the types for each row: the state in which its values decode.

    Parameters
    ----------
    states : tuple of TypesInForce
        The types before and after a schema change.
    policy_types : TypesInForce
        The types to use if the values of a row fit both states.
    encoding : str
        The client_encoding of text.
    announced : iterable of bytes
        The Relation and Type frames that came before.
    """

    def __init__(
        self,
        states: tuple[TypesInForce, TypesInForce],
        policy_types: TypesInForce,
        encoding: str,
        announced: Iterable[bytes],
    ) -> None:
        self._states = states
        self._policy_types = policy_types
        # A date outside Python's range, or bytes that are no text, do not prove the other state.
        lenient = Policies(infinity="text", out_of_range="text", invalid_text="replace")
        self._decoders = [
            Decoder(lenient, encoding=encoding, registry=types.registry) for types in states
        ]
        # For each relation: its columns with differing types, and the two possible states.
        self._columns: dict[int, tuple[tuple[int, ...], tuple[TypesInForce, TypesInForce]]] = {}
        for frame in announced:
            self.types(frame)

    def types(self, frame: bytes) -> TypesInForce | None:
        """Return the types of a row.

        Return None if the row has no value of a differing type. Note a Relation or a Type, and
        return None.
        """
        if frame[:1] in (b"R", b"Y"):
            self._note(frame)
            return None
        relation_id = relation_id_of(frame, in_stream=False)
        columns, states = self._columns.get(relation_id or 0, ((), self._states))
        counts = [_values(decoder, frame, columns) for decoder in self._decoders]
        if 0 in counts:
            return None
        if counts.count(None) != 1:
            return self._policy_types
        return states[counts[0] is None]

    def _note(self, frame: bytes) -> None:
        for decoder in self._decoders:
            with contextlib.suppress(DecodeError):  # decoding the changes raises it again
                decoder.decode(frame)
        if frame[:1] != b"R":
            return
        relation_id, types = columns_of(frame)
        uncertain = self._policy_types.uncertain
        older, newer = (types.registry for types in self._states)
        differing = [
            uncertain.keys() & (older.contained([oid]) | newer.contained([oid])) for oid in types
        ]
        # If several types differ, some may have been altered before others: all stay uncertain.
        left = uncertain if len(set().union(*differing)) > 1 else {}
        columns = tuple(i for i, some in enumerate(differing) if some)
        self._columns[relation_id] = columns, (TypesInForce(older, left), TypesInForce(newer, left))


def _values(decoder: Decoder, frame: bytes, columns: Iterable[int]) -> int | None:
    """Count the values of a row in some columns; return None if the decoder refuses one."""
    count = 0
    try:
        message: Any = decoder.decode(frame)
        for name in ("old", "new"):
            row: Any = getattr(message, name, None)
            for i in columns if row is not None else ():
                if i < len(row) and row.kind(i) not in "nu":
                    row[i]  # decodes it
                    count += 1
    except DecodeError:
        return None
    return count


def columns_of(frame: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the relation id of a Relation frame, and the type OIDs of its columns."""
    relation: Any = decode_rare(frame, in_stream=False, encoding="latin-1")
    return relation.relation_id, tuple(column.type_id for column in relation.columns)
