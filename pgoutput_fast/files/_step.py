"""Decode some units of the source: their rows by table, their events and their errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pgoutput_fast.captured.changes import ChangeReader
from pgoutput_fast.captured.units import Chunk, Unit
from pgoutput_fast.columnar.arrays import commit_of
from pgoutput_fast.columnar.decoder import ColumnarDecoder
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.names import shown_name
from pgoutput_fast.segments.format import RESTORE

from ._events import errors_of, events_of
from ._flatten import Shape
from ._write import Spill

if TYPE_CHECKING:
    from pgoutput_fast.history import HistoryFollower

_EVENTS, _ERRORS = -1, -2


class Step:
    """Decodes units from their start to their end, and keeps what they have in a file.

    Files of a copy have rows of one table alone, so that they need not be kept: they are decoded
    when their table is written.

    Attributes
    ----------
    decoded : int
        Rows that were decoded.
    names : dict of int to (str, str)
        Schema and name that each table had last, by relation id.
    rolled_back, undecided : int
        Rows of streamed and prepared transactions that were rolled back, and rows whose transaction
        does not end in the source. They are counted when the tables are written.
    """

    def __init__(
        self,
        path: Path,
        decoding: dict[str, Any],
        *,
        before: bool,
        follower: HistoryFollower | None = None,
    ) -> None:
        self._spill = Spill(path)
        self._reader = ChangeReader(decoding, follower, self._take_rest)
        self._on_error = decoding["on_error"]
        self._before = before
        # Id of a batch's layout and its format → the layout, and the number of its shape, which is
        # its key in the spill. The layout is kept here so that no other one gets its id.
        self._known: dict[tuple[int, Any], tuple[Any, int]] = {}
        self._numbers: dict[str, int] = {}
        self._shapes: list[Shape] = []
        # Of the copy that was read last, as (relation id, generation): the shape of its rows.
        self._copied: tuple[tuple[int, int], int] | None = None
        self.decoded = 0
        self.names: dict[int, tuple[str, str]] = {}
        self._commits: dict[int, tuple[int, int]] = {}
        self._aborted: set[tuple[int, int]] = set()
        self.rolled_back = self.undecided = 0

    def close(self) -> None:
        """Delete the temporary file."""
        self._spill.close()

    def add(self, chunk: Chunk) -> None:
        """Decode the next frames, and keep their rows, events and errors.

        Raises
        ------
        PgOutputError
            A frame is refused, and ``on_error`` is "raise"; or a value's type was altered at about
            the same time, and nothing says before or after.
        """
        copy = None if chunk.step is None else chunk.step.copy
        for changes, number, rows in self._decode(chunk):
            relation = changes.relation
            named = shown_name(relation.namespace), shown_name(relation.name)
            self.names[relation.relation_id] = named
            self._spill.add(number, rows)
            # The form of a column of an unknown type is known only when there is a value.
            if copy is not None and not any(one.by_format for one in changes.layout.columns):
                self._copied = (copy.relation_id, copy.generation), number

    def put_off(self, unit: Unit) -> bool:
        """Have a unit decoded when its table is written, if that is known to be the same.

        It is if the unit is a file of a copy of which another file, the one before, was decoded.
        """
        copy = None if unit.step is None else unit.step.copy
        if copy is None or self._copied is None or self._on_error != "raise":
            return False
        of, number = self._copied
        if of != (copy.relation_id, copy.generation):
            return False
        self._spill.put_off(number, unit)
        return True

    def refuse_earlier(self, read: Callable[[Unit], Iterable[Chunk]]) -> None:
        """Raise the error of a frame that was put off, as it comes before one that was refused."""
        self._reader.restart()
        for unit in self._spill.waiting():
            for chunk in read(unit):
                for _ in self._decode(chunk):
                    pass

    def _decode(self, chunk: Chunk) -> Iterator[tuple[Any, int, Any]]:
        """Decode frames: each batch of changes, the number of its shape, and its rows."""
        for changes, batch in self._reader.changes(chunk):
            number = self._number(changes)
            self.decoded += len(batch)
            yield changes, number, self._shapes[number].rows(batch)

    def _take_rest(self, decoder: ColumnarDecoder, chunk: Chunk, errors: list[int]) -> None:
        """Keep the events of frames, and the errors of those that count."""
        if chunk.step is None or chunk.step.copy is None:  # those of a copy do not count
            events = events_of(decoder, chunk)
            if len(events):
                self._spill.add(_EVENTS, events)
                self._note(decoder)
        if errors:
            self._spill.add(_ERRORS, errors_of(decoder, chunk.path).take(pa.array(errors)))

    def _number(self, changes: Any) -> int:
        """The number of the shape of a batch's rows; batches of one shape are kept together."""
        known = id(changes.layout), changes.binary
        if known not in self._known:
            shape = Shape(pa.schema(changes), before=self._before)
            number = self._numbers.setdefault(shape.digest, len(self._shapes))
            if number == len(self._shapes):
                self._shapes.append(shape)
            self._known[known] = changes.layout, number
        return self._known[known][1]

    def _note(self, decoder: ColumnarDecoder) -> None:
        """Remember how streamed and prepared transactions ended; their rows came before."""
        array = decoder.events.array
        for place in np.flatnonzero(np.isin(array["tag"], [ord(tag) for tag in "cAKr"])):
            event = decoder.events[int(place)]
            message: Any = event.message
            if event.tag in "cK":
                self._commits[message.xid] = (message.commit_lsn, message.commit_time)
            elif event.tag == "A":
                self._aborted.add((message.xid, message.subxid))
            else:
                self._aborted.add((message.xid, message.xid))

    def tables(
        self, read: Callable[[Unit], Iterable[Chunk]]
    ) -> Iterator[tuple[Shape, Iterable[Any]]]:
        """Each version of a table with its rows, in the order in which they came first.

        Parameters
        ----------
        read : callable
            Gives the frames of a unit that was put off.
        """

        def decode(number: int, unit: Unit) -> Iterator[Any]:
            for chunk in read(unit):
                for _, found, rows in self._decode(chunk):
                    if found != number:
                        raise PgOutputError(
                            f"{chunk.path} has rows of another form than the files of its copy "
                            f"before it: {RESTORE}",
                            code="damaged",
                            path=str(chunk.path),
                        )
                    yield rows

        for number in self._spill:
            if number >= 0:
                shape = self._shapes[number]
                rows = self._decided(self._spill.batches(number, decode))
                first = next(rows, None)
                if first is not None:
                    yield shape, itertools.chain([first], rows)

    def beside(self, what: str) -> Iterable[Any] | None:
        """The events, or the errors; None if there are none."""
        key = {"events": _EVENTS, "errors": _ERRORS}[what]
        return self._spill.batches(key) if key in self._spill else None

    def _decided(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Leave out rows that were rolled back, and fill in the commit of rows without one."""
        for batch in batches:
            open_rows = batch.column("commit_lsn").is_null()
            if open_rows.true_count:
                batch = self._resolved(batch, open_rows.to_numpy(zero_copy_only=False))
            if len(batch):
                yield batch

    def _resolved(self, batch: Any, is_open: Any) -> Any:
        xids = batch.column("xid").to_numpy(zero_copy_only=False)
        subxids = batch.column("subxid").to_pylist()
        keep = np.ones(len(batch), bool)
        lsns: list[int | None] = batch.column("commit_lsn").to_pylist()
        times: list[int | None] = batch.column("commit_time").cast(pa.int64()).to_pylist()
        for i in np.flatnonzero(is_open):
            xid = int(xids[i])
            if (xid, xid) in self._aborted or (xid, subxids[i]) in self._aborted:
                keep[i] = False
            elif xid in self._commits:
                lsns[i], times[i] = commit_of(*self._commits[xid], "arrow")
            else:
                self.undecided += 1
        self.rolled_back += int((~keep).sum())
        names = batch.schema.names
        for name, values in (("commit_lsn", lsns), ("commit_time", times)):
            at = names.index(name)
            field = batch.schema.field(at)
            made = pa.array(values, pa.uint64() if name == "commit_lsn" else pa.int64())
            batch = batch.set_column(at, field, made.cast(field.type))
        return batch if keep.all() else batch.filter(pa.array(keep))
