"""What a consumer of a capture's directory makes of it: the tables' rows, change by change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pgoutput_fast as pf
from pgoutput_fast.changelog.consumers import Consumer
from pgoutput_fast.changelog.read_plan import Read, ReadPlan
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.segments import SegmentReader


class Folded:
    """A consumer that keeps each table's rows by their first column.

    Parameters
    ----------
    directory : pathlib.Path
    name : str

    Attributes
    ----------
    rows : dict of int to dict
        For each relation id the rows, as tuples of text, by the first column's text.
    reads : dict of int to int
        How many rows came by copies.
    """

    def __init__(self, directory: Path, name: str = "folded") -> None:
        self.directory = directory
        self.consumer = Consumer(directory, name)
        self.rows: dict[int, dict[str, tuple[Any, ...]]] = {}
        self.reads: dict[int, int] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def take(self) -> Folded:
        """Take what is there, and check that each table's changes come once and in order."""
        plan = self.consumer.plan()
        if plan is None:
            return self
        for read in plan.reads:
            decoder = pf.Decoder()
            for path in read.files:
                with SegmentReader(path) as reader:
                    assert reader.metadata.snapshot == (read.snapshot is not None)
                    for batch in reader:
                        for row in batch.to_pylist():
                            message = decoder.decode(row["data"])
                            self._apply(message, row["commit_lsn"], row["seq"], read, plan)
        self.consumer.advance(plan.after)
        return self

    def settle(self) -> Folded:
        """Take all that is there. A reading ends before changes that a later copy voids."""
        position = None
        while position != self.consumer.position:
            position = self.consumer.position
            self.take()
        return self

    def _apply(self, message: Any, commit_lsn: int, seq: int, read: Read, plan: ReadPlan) -> None:
        if isinstance(message, pf.Truncate):
            for offset, oid in enumerate(message.relation_ids):
                if self._counts(oid, commit_lsn, seq + offset, read):
                    self.rows[oid] = {}
        elif isinstance(message, (pf.Insert, pf.Update, pf.Delete)):
            oid = message.relation_id
            snapshots = (one.snapshot for one in plan.reads if one.snapshot is not None)
            later = [
                copy.lsn
                for copy in snapshots
                if copy.relation_id == oid and copy.lsn > commit_lsn + 1
            ]
            # What a copy voids need not go together with what is known.
            if self._counts(oid, commit_lsn, seq, read) and not later:
                try:
                    self._change(self.rows.setdefault(oid, {}), message)
                except (AssertionError, KeyError) as error:
                    raise AssertionError(
                        f"{message} of {oid} at {format_lsn(commit_lsn)} ({seq}) does not go with "
                        f"what is known of it; {read}, {plan}"
                    ) from error
                self.reads[oid] = self.reads.get(oid, 0) + (read.snapshot is not None)

    def _counts(self, oid: int, commit_lsn: int, seq: int, read: Read) -> bool:
        copy = read.snapshot
        start, end = read.range_of(oid)
        if copy is None and not start <= commit_lsn < end:
            return False
        if copy is not None:
            assert (oid, commit_lsn) == (copy.relation_id, copy.lsn - 1)
        # Nothing comes twice, or before what it follows.
        assert (commit_lsn, seq) > self._last.get(oid, (0, -1)), (oid, commit_lsn, seq)
        self._last[oid] = commit_lsn, seq
        return True

    @staticmethod
    def _change(rows: dict[str, tuple[Any, ...]], message: Any) -> None:
        if isinstance(message, pf.Insert):
            key = message.new.text(0)
            assert key not in rows
            rows[key] = message.new.texts()
        elif isinstance(message, pf.Delete):
            del rows[message.old.text(0)]
        else:
            if message.old is not None:
                before = rows.pop(message.old.text(0))
            else:
                before = rows.pop(message.new.text(0))
            rows[message.new.text(0)] = tuple(
                old if new is pf.UNCHANGED else new
                for old, new in zip(before, message.new.texts(), strict=True)
            )
