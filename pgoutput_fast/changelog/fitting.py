"""The types of a row where two states of them are possible, as far as its values tell which."""

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


class Types(NamedTuple):
    """The types of a place, and the names of those that are uncertain, by OID."""

    registry: TypeRegistry
    uncertain: dict[int, str]


class Fitting:
    """Tells in which of two states of the types rows were written, where their values tell it.

    Parameters
    ----------
    states : tuple of Types
        Before and after a change.
    found : Types
        What is taken where either is possible.
    encoding : str
        The client_encoding of text.
    announced : iterable of bytes
        Relations and Types that came before.
    """

    def __init__(
        self, states: tuple[Types, Types], found: Types, encoding: str, announced: Iterable[bytes]
    ) -> None:
        self._states = states
        self._found = found
        # A date that Python lacks is no reason to take the other state, nor are bytes of no text.
        lenient = Policies(infinity="text", out_of_range="text", invalid_text="replace")
        self._decoders = [
            Decoder(lenient, encoding=encoding, registry=one.registry) for one in states
        ]
        # Columns of each relation that contain types which differ, and what its rows may have.
        self._columns: dict[int, tuple[tuple[int, ...], tuple[Types, Types]]] = {}
        for frame in announced:
            self.types(frame)

    def types(self, frame: bytes) -> Types | None:
        """The types of a row.

        None if it has no value of a type that differs, and for a Relation or a Type, of which note
        is taken.
        """
        if frame[:1] in (b"R", b"Y"):
            self._note(frame)
            return None
        relation_id = relation_id_of(frame, in_stream=False)
        columns, states = self._columns.get(relation_id or 0, ((), self._states))
        told = [_values(decoder, frame, columns) for decoder in self._decoders]
        if 0 in told:
            return None
        if told.count(None) != 1:
            return self._found
        return states[told[0] is None]

    def _note(self, frame: bytes) -> None:
        for decoder in self._decoders:
            with contextlib.suppress(DecodeError):  # whoever decodes the frame tells it
                decoder.decode(frame)
        if frame[:1] != b"R":
            return
        relation_id, types = columns_of(frame)
        uncertain = self._found.uncertain
        older, newer = (one.registry for one in self._states)
        differing = [
            uncertain.keys() & (older.contained([oid]) | newer.contained([oid])) for oid in types
        ]
        # Of several types, some may have been altered before others.
        left = uncertain if len(set().union(*differing)) > 1 else {}
        columns = tuple(i for i, some in enumerate(differing) if some)
        self._columns[relation_id] = columns, (Types(older, left), Types(newer, left))


def _values(decoder: Decoder, frame: bytes, columns: Iterable[int]) -> int | None:
    """The number of values that a row has in some columns; None if one of them is refused."""
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
    """The id of a Relation, and the types of its columns."""
    relation: Any = decode_rare(frame, in_stream=False, encoding="latin-1")
    return relation.relation_id, tuple(column.type_id for column in relation.columns)
