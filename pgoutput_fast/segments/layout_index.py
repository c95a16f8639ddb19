"""The layout index of a file: how many changes of each table and layout the file holds.

`check` counts the changes while it checks the frames, so a writer gets the index without another
pass. A reader plans from the index and does not have to read the batches of frames.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol.messages import decode_rare
from ..protocol.wire import relation_id_of

if TYPE_CHECKING:
    from collections.abc import Iterable


class Span(NamedTuple):
    """The changes of one table in one file that have one layout.

    Attributes
    ----------
    relation_id : int
    changes : int
        Insert, Update and Delete frames.
    size : int
        Bytes of these frames.
    truncates : int
        Truncates of the table.
    first_commit_lsn, last_commit_lsn : int
        Commit LSNs of the first and the last transaction with a change or Truncate of the span.
    relation : bytes
        The Relation frame of the layout.
    types : tuple of bytes
        The Type frames of the relation's columns.
    """

    relation_id: int
    changes: int
    size: int
    truncates: int
    first_commit_lsn: int
    last_commit_lsn: int
    relation: bytes
    types: tuple[bytes, ...]


_NUMBERS = Span._fields[:-2]


class LayoutCounter:
    """Counts the changes of a file by relation and layout, as `check` goes through its frames.

    Attributes
    ----------
    counts : dict of int to list
        For each relation id announced in the file: changes, size, truncates, first commit LSN
        and last commit LSN. The numbers begin anew when the layout changes. `check` adds to them.
    """

    def __init__(self) -> None:
        self.counts: dict[int, list[int]] = {}
        # For each announced layout, in order: counts, Relation frame, Type frames in force.
        self._spans: list[tuple[list[int], bytes, dict[int, bytes]]] = []
        self._newest: dict[int, tuple[bytes, dict[int, bytes]]] = {}
        # The spans share this dictionary: replace it, never change it.
        self._types: dict[int, bytes] = {}

    def announce(self, frame: bytes) -> None:
        """Note a Type or Relation frame. Ignore a frame that is too short to hold its OID."""
        oid = relation_id_of(frame, False)
        if oid is None:
            return
        if frame[:1] == b"Y":
            if self._types.get(oid) != frame:
                self._types = {**self._types, oid: frame}
        elif self._newest.get(oid) != (frame, self._types):
            self._newest[oid] = (frame, self._types)
            self.counts[oid] = [0, 0, 0, 0, 0]
            self._spans.append((self.counts[oid], frame, self._types))

    def spans(self) -> list[Span]:
        """Return the spans with changes or Truncates, in the order of their Relation frames.

        Raises
        ------
        DecodeError
            A Relation frame is malformed.
        """
        spans: list[Span] = []
        newest: dict[int, int] = {}
        for counts, frame, types in self._spans:
            if not (counts[0] or counts[2]):
                continue
            # Latin-1 decodes any bytes. Only type OIDs are read here.
            relation: Any = decode_rare(frame, in_stream=False, encoding="latin-1")
            used = {column.type_id for column in relation.columns}
            layout = frame, tuple(types[oid] for oid in sorted(used & types.keys()))
            changes, size, truncates, first, last = counts
            span = Span(relation.relation_id, changes, size, truncates, first, last, *layout)
            index = newest.get(span.relation_id)
            if index is not None and spans[index][-2:] == layout:
                # A Type that this table does not use began a new span: the layout is the same.
                before = spans[index]
                spans[index] = span._replace(
                    changes=before.changes + span.changes,
                    size=before.size + span.size,
                    truncates=before.truncates + span.truncates,
                    first_commit_lsn=before.first_commit_lsn,
                )
            else:
                newest[span.relation_id] = len(spans)
                spans.append(span)
        return spans


def index_bytes(spans: Iterable[Span]) -> bytes:
    """Return a layout index as JSON: a list of spans, with frames in base64."""
    return json.dumps(
        [
            {
                **span._asdict(),
                "relation": base64.b64encode(span.relation).decode(),
                "types": [base64.b64encode(frame).decode() for frame in span.types],
            }
            for span in spans
        ]
    ).encode()


def read_index(content: bytes) -> list[Span]:
    """Return the spans of a layout index that `index_bytes` wrote.

    Raises
    ------
    Exception
        One of `MALFORMED`: the bytes are not a layout index.
    """
    return [_span(fields) for fields in json.loads(content)]


def _span(fields: dict[str, Any]) -> Span:
    numbers = {name: fields[name] for name in _NUMBERS}
    if any(type(number) is not int for number in numbers.values()):
        raise TypeError(f"a number of a span is none: {numbers}")
    relation = base64.b64decode(fields["relation"], validate=True)
    types = tuple(base64.b64decode(frame, validate=True) for frame in fields["types"])
    return Span(**numbers, relation=relation, types=types)
