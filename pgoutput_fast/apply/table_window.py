"""One table in one window: append its changes, and apply their net effect to its state table.

After a kill, the target may have a part of a window. The change table and the state table each have
an LSN in the target, and changes before it are skipped.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import PgOutputError
from .folding import Folding, NullKeyError
from .outcomes import Committed, Stale
from .stored_changes import BatchConversion, check_copied_keys, with_added
from .table_plan import Progress, plan_layout, plan_snapshot
from .targets import IncompleteError, Removed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..changelog.snapshot_states import Snapshot
    from .evolution import TableInCatalog
    from .outcomes import Outcome
    from .row_stores import SpillFile
    from .table_plan import LayoutPlan, SnapshotPlan, TableRules
    from .targets import Alteration, ChangeWriter, StateWriter, TableState, Target


_TOGETHER = 4096
"""Number of changes of a table that are written and folded together."""


class _Part(NamedTuple):
    """Changes that are folded together, and the alterations before them.

    Fields: alterations, folding, key, begins (the first commit LSN), schema (of the last changes).
    """

    alterations: list[Alteration]
    folding: Folding
    key: tuple[str, ...] | None
    begins: int
    schema: pa.Schema


_Layout = tuple["pa.Schema", BatchConversion]
"""A schema of decoded batches, and its conversion for the target."""


class TableWindow:
    """A table in a window.

    Parameters
    ----------
    target : Target
    table_state : TableState
        The table state before the window.
    rules : TableRules
    is_new : bool
        Whether the target has no such table yet.
    spill_file : SpillFile, optional
        As in `Folding`.

    Attributes
    ----------
    table_state : TableState
        The table state after the changes so far.
    changes : int
        The number of written changes.
    """

    def __init__(
        self,
        target: Target,
        table_state: TableState,
        rules: TableRules,
        *,
        is_new: bool,
        spill_file: SpillFile | None = None,
    ) -> None:
        self._target = target
        self._rules = rules
        self._spill_file = spill_file
        self.table_state = table_state
        self._writer: ChangeWriter = target.changes(table_state)
        # The earlier versions of the change table, each with the table state at its end.
        self._earlier: list[tuple[ChangeWriter, TableState]] = []
        self._state: StateWriter | None = None
        if rules.has_state and table_state.stale is None:
            self._state = target.state(table_state)
        self._is_new = is_new
        self._first: pa.Schema | None = None  # columns of a new state table
        # Changes of the newest layout that are not written yet.
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self._parts: list[_Part] = []
        self._last: _Layout | None = None
        self._snapshot: SnapshotPlan | None = None
        self._copies_changes = False  # whether the change table needs the snapshot
        self._folded = 0  # commit LSN of the last folded change
        self.changes = 0

    @property
    def outcome(self) -> Outcome:
        """The outcome of the window for this table, after the commit."""
        table_state = self.table_state
        return (
            Committed(table_state)
            if table_state.stale is None
            else Stale(table_state, table_state.stale)
        )

    @property
    def removed(self) -> list[str]:
        """The stored names of the columns that the window has removed from the state table."""
        alterations = [alteration for part in self._parts for alteration in part.alterations]
        return [alteration.column for alteration in alterations if isinstance(alteration, Removed)]

    def is_beyond(self, lsn: int) -> bool:
        """Whether the state table has later changes, from a window that a kill ended."""
        return self._state is not None and self._state.lsn > lsn

    def make_stale(self, reason: str) -> None:
        """Mark the table as stale: its rows are no longer known.

        Raises
        ------
        IncompleteError
            The table must not become stale.
        """
        self._go_to(self._rules.stale(self.table_state, reason))

    def _go_to(self, table_state: TableState) -> None:
        """Take a planned table state. A stale table gets no more rows."""
        self.table_state = table_state
        if table_state.stale is not None:
            self._state, self._parts = None, []

    # --- changes ---------------------------------------------------------------------------------

    def add(
        self, schema: pa.Schema, batch: pa.RecordBatch, catalog_at: Callable[[int], TableInCatalog]
    ) -> None:
        """Add changes of the stream.

        Parameters
        ----------
        schema : pyarrow.Schema
            The batch's schema, which is the same object for all batches of a layout.
        batch : pyarrow.RecordBatch
        catalog_at : callable
            Takes a commit LSN; returns what the catalogue says of the table there.
        """
        if batch.column("commit_lsn")[-1].as_py() < self.table_state.lsn:
            return  # the target has them, maybe with later alterations
        last = self._last
        if last is None or last[0] is not schema:
            self.take_gathered()
            last = self._meet(schema, batch.column("commit_lsn")[0].as_py(), catalog_at)
        self._gathered.append(last[1].batch(batch))
        self._gathered_rows += batch.num_rows
        if self._gathered_rows >= _TOGETHER:
            self.take_gathered()

    def take_gathered(self) -> None:
        """Write and fold the gathered changes together, because small batches cost more."""
        if not self._gathered:
            return
        rows, *others = self._gathered
        if others:
            rows = pa.concat_batches(self._gathered)
        self._gathered, self._gathered_rows = [], 0
        self._append(since(rows, self._writer.lsn))
        if self._state is not None and self._parts:
            part = since(rows, self._state.lsn)
            if part.num_rows:
                try:
                    with as_incomplete(makes_null=self._rules.makes_null):
                        self._parts[-1].folding.add(part)
                    self._folded = part.column("commit_lsn")[-1].as_py()
                except IncompleteError as error:
                    self._make_stale_by(error)

    def _make_stale_by(self, error: IncompleteError) -> None:
        if not self._rules.may_be_stale:
            raise error
        self.make_stale(error.message)

    def _append(self, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            self._writer.append(rows)
            self.changes += rows.num_rows
            time = rows.column("commit_time")[-1].cast(pa.int64()).as_py()
            self.table_state = self.table_state._replace(commit_time=time)

    def _meet(
        self, schema: pa.Schema, lsn: int, catalog_at: Callable[[int], TableInCatalog]
    ) -> _Layout:
        """Go on with the layout of a transaction that was committed at an LSN."""
        plan = self._planned(schema, catalog_at(lsn))
        self._begin_layout(plan, lsn)
        self._last = schema, plan.conversion
        if self._is_new and self._first is None:
            self._first = pa.schema(list(plan.conversion.schema.field("after").type))
        return self._last

    def follow(self, schema: pa.Schema, table_in_catalog: TableInCatalog) -> None:
        """Let the state table follow the catalogue before a change has the new columns.

        Parameters
        ----------
        schema : pyarrow.Schema
            The schema that changes would have now.
        table_in_catalog : TableInCatalog
        """
        self.take_gathered()
        plan = self._planned(schema, table_in_catalog)
        self._begin_layout(plan, self._folded + 1)
        if plan.begins_version:
            # Without its first changes, the version still needs its table: DuckDB's target takes a
            # version without one as deleted.
            self._writer.append(_empty(plan.conversion.schema))
        self._last = None

    def _planned(self, schema: pa.Schema, table_in_catalog: TableInCatalog) -> LayoutPlan:
        fits = self._writer.fits
        return plan_layout(self.table_state, schema, table_in_catalog, self._rules, fits)

    def _begin_layout(self, plan: LayoutPlan, lsn: int) -> None:
        self._go_to(plan.table_state)
        if plan.begins_version:
            self._next_version()
        self._fold_on(plan, lsn)

    def _fold_on(self, plan: LayoutPlan, lsn: int) -> None:
        """Fold the next changes together with those before, if possible."""
        if self._state is None:
            return
        schema, key, renames = plan.conversion.schema, plan.key, plan.moves_names
        nothing = _empty(schema)
        if self._parts and self._parts[-1].key == key and not renames and self._goes_on(nothing):
            self._parts[-1].alterations.extend(plan.alterations)
            self._parts[-1] = self._parts[-1]._replace(schema=schema)
            return
        if self._parts and lsn <= self._folded:
            subject = "columns were" if renames else "key was"
            self.make_stale(f"its {subject} altered within a transaction")
            return
        folding = Folding(key, self._spill_file)
        self._parts.append(_Part(plan.alterations, folding, key, lsn, schema))
        self._parts[-1].folding.add(nothing)

    def _goes_on(self, nothing: pa.RecordBatch) -> bool:
        """Whether the next changes can be folded together with those before."""
        try:
            self._parts[-1].folding.add(nothing)
        except PgOutputError:
            return False
        return True

    # --- snapshots -------------------------------------------------------------------------------

    def add_snapshot(
        self,
        schema: pa.Schema,
        batch: pa.RecordBatch,
        catalog_at: Callable[[int], TableInCatalog],
        snapshot: Snapshot,
    ) -> None:
        """Add rows of a snapshot; the first batch begins with a Truncate."""
        plan = self._snapshot
        if plan is None:
            self.take_gathered()
            plan = self._snapshot = self._begin_snapshot(schema, catalog_at(snapshot.lsn), snapshot)
        if not (self._copies_changes or plan.needs_rows):
            return
        last = self._last
        if last is None or last[0] is not schema:
            columns = self.table_state.columns
            last = self._last = schema, BatchConversion.of(schema, columns)
        if plan.needs_rows:
            check_copied_keys(batch)
        rows = last[1].batch(batch)
        if self._copies_changes:
            self._append(rows)
        if plan.needs_rows and self._state is not None:
            read = rows.filter(pc.equal(rows.column("op"), "read"))
            if read.num_rows:
                after = read.column("after")
                self._state.append(
                    pa.RecordBatch.from_arrays(after.flatten(), schema=pa.schema(list(after.type)))
                )

    def _begin_snapshot(
        self, schema: pa.Schema, table_in_catalog: TableInCatalog, snapshot: Snapshot
    ) -> SnapshotPlan:
        """Begin a snapshot, and return its plan."""
        state = self._state
        if state is None and self._rules.has_state:
            state = self._target.state(self.table_state)
        plan = plan_snapshot(
            self.table_state, snapshot.lsn, schema, table_in_catalog, self._rules,
            self._writer.fits, None if state is None else Progress(state.lsn, state.copy_lsn),
        )  # fmt: skip
        self.table_state = plan.table_state
        if plan.begins_version:
            self._next_version()
        progress = Progress(self._writer.lsn, self._writer.copy_lsn)
        self._copies_changes = progress.lacks(snapshot.lsn)
        self._last = schema, plan.conversion
        if plan.begins:
            self._state, self._parts, self._is_new = state, [], False
        if state is not None and plan.needs_rows:
            state.load(pa.schema(list(plan.conversion.schema.field("after").type)))
        return plan

    def _next_version(self) -> None:
        """Begin a new version of the change table."""
        self._earlier.append((self._writer, self.table_state))
        self.table_state = self.table_state._replace(version=self.table_state.version + 1)
        self._writer = self._target.changes(self.table_state)

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """End a snapshot, after its last row."""
        plan = self._snapshot
        self._snapshot = self._last = None
        if plan is not None and self._copies_changes:
            # A snapshot counts as its rows, without its Truncate.
            self.changes -= 1
        if snapshot.lsn >= self.table_state.lsn:
            self.table_state = self.table_state._replace(
                copy_lsn=max(self.table_state.copy_lsn, snapshot.lsn), lsn=snapshot.lsn
            )
        if plan is not None and plan.needs_rows:
            self._commit_snapshot()

    def _commit_snapshot(self) -> None:
        """Commit the snapshot's rows in the state table."""
        if self._state is not None:
            self._state.loaded(self.table_state)

    # --- the end ---------------------------------------------------------------------------------

    def commit_changes(self, lsn: int) -> None:
        """Commit the change table, after the last change."""
        for writer, table_state in (*self._earlier, (self._writer, self.table_state)):
            writer.commit(table_state._replace(lsn=lsn))
            self.table_state = self.table_state._replace(gap=writer.gap or self.table_state.gap)

    def commit_state(self, lsn: int) -> None:
        """Apply the net changes to the state table, and commit it.

        Raises
        ------
        IncompleteError
            The net changes do not fit the rows, and the table must not become stale.
        """
        state = self._state
        if state is None:
            return
        if self._is_new and self._first is not None:
            state.create(self._first)
        for number, part in enumerate(self._parts, 1):
            is_last = number == len(self._parts)
            end = lsn if is_last else self._parts[number].begins
            try:
                with as_incomplete(makes_null=self._rules.makes_null):
                    net = with_added(part.folding.finish(), part.alterations)
                part.folding.forget()
                if not (net.num_rows or net.truncated or part.alterations):
                    continue
                state.apply(part.alterations, net, self.table_state._replace(lsn=end))
            except IncompleteError as error:
                self._make_stale_by(error)
                return


@contextlib.contextmanager
def as_incomplete(*, makes_null: bool = False) -> Iterator[None]:
    """Raise the errors of a fold as `IncompleteError`: the changes do not fit the state table.

    Changes may be missing, or the known key may be wrong. A new snapshot repairs both. It does not
    help if a policy has replaced a key's value by NULL (`makes_null`), so that error stays.
    """
    try:
        yield
    except PgOutputError as error:
        if makes_null and isinstance(error, NullKeyError):
            raise
        raise IncompleteError(
            error.message,
            code=error.code,
            parameter=error.parameter,
            hint=error.hint,
            table=error.table,
        ) from error


def since(rows: pa.RecordBatch, lsn: int) -> pa.RecordBatch:
    """Return the changes that were committed from an LSN on."""
    lsns = rows.column("commit_lsn")
    if not lsn or rows.num_rows == 0 or lsns[0].as_py() >= lsn:
        return rows
    return rows.filter(pc.greater_equal(lsns, pa.scalar(lsn, lsns.type)))


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
