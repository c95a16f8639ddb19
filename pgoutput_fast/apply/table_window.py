"""One table in one window: append its changes, and apply their net effect to its state table.

After a kill, the target may have a part of a window. The change table and the state table each have
an LSN in the target, and changes before it are skipped.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import Argument, PgOutputError
from ..names import qualified
from .evolution import TableInCatalog, evolve, new_columns, turns_digits
from .folding import Folding, NullKeyError
from .outcomes import Committed, Stale
from .stored_changes import BatchConversion, check_copied_keys, stored_version, with_added
from .targets import IncompleteError, Removed, Renamed, TableState
from .versions import shown_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..catalog import CatalogTable
    from ..changelog.snapshot_states import Snapshot
    from .outcomes import Outcome
    from .row_stores import SpillFile
    from .targets import Alteration, ChangeWriter, StateWriter, StoredColumn, Target
    from .versions import Version


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


class SnapshotNeeds(NamedTuple):
    """Which tables still lack a snapshot. Fields: changes, rows (of the state table)."""

    changes: bool
    rows: bool


_Layout = tuple["pa.Schema", BatchConversion, "Version"]
"""A schema of batches, its conversion for the target, and its version of the table."""


class TableWindow:
    """A table in a window.

    Parameters
    ----------
    target : Target
    table_state : TableState
        The table state before the window.
    is_new : bool
        Whether the target has no such table yet.
    evolves : bool
        Whether the state table follows alterations; if not, an alteration is an error.
    stops : bool
        Whether the table becomes stale when its rows are no longer known; if not, an error is
        raised.
    makes_null : bool
        Whether a policy replaces values by NULL. Then a NULL in a key is the policy's, and a new
        snapshot would not help.
    spill_file : SpillFile, optional
        As in `Folding`.

    Attributes
    ----------
    table_state : TableState
        The table state after what was taken so far.
    changes : int
        The number of written changes.
    """

    def __init__(
        self, target: Target, table_state: TableState, *, is_new: bool, evolves: bool, stops: bool,
        makes_null: bool = False, spill_file: SpillFile | None = None,
    ) -> None:  # fmt: skip
        self._target = target
        self._spill_file = spill_file
        self.table_state = table_state
        self._writers: list[ChangeWriter] = [target.changes(table_state)]
        self._state: StateWriter | None = None
        if target.remembered.has_state and table_state.stale is None:
            self._state = target.state(table_state)
        self._is_new = is_new
        self._first: pa.Schema | None = None  # columns of a new state table
        self._evolves = evolves
        self._stops = stops
        self._makes_null = makes_null
        # Changes of the newest layout that are not written yet.
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self._parts: list[_Part] = []
        self._last: _Layout | None = None
        self._snapshot_needs: SnapshotNeeds | None = None
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

    def stop(self, reason: str) -> None:
        """Mark the table as stale: its rows are no longer known."""
        if not self._stops:
            raise IncompleteError(
                f"the rows of {qualified(self.table_state)} are no longer known: {reason}",
                table=qualified(self.table_state),
                hint=(
                    "Give ",
                    Argument("on_error", "pause"),
                    ": sync then requests a new snapshot",
                ),
            )
        self.table_state = self.table_state._replace(stale=reason)
        self._state, self._parts, self._last = None, [], None

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
        writer = self._writers[-1]
        self._append(since(rows, writer.lsn))
        if self._state is not None and self._parts:
            part = since(rows, self._state.lsn)
            if part.num_rows:
                try:
                    with as_incomplete(makes_null=self._makes_null):
                        self._parts[-1].folding.add(part)
                    self._folded = part.column("commit_lsn")[-1].as_py()
                except IncompleteError as error:
                    self._stop_by(error)

    def _stop_by(self, error: IncompleteError) -> None:
        if not self._stops:
            raise error
        self.stop(error.message)

    def _append(self, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            self._writers[-1].append(rows)
            self.changes += rows.num_rows
            time = rows.column("commit_time")[-1].cast(pa.int64()).as_py()
            self.table_state = self.table_state._replace(commit_time=time)

    def _meet(
        self, schema: pa.Schema, lsn: int, catalog_at: Callable[[int], TableInCatalog]
    ) -> _Layout:
        """Go on with the layout of a transaction that was committed at an LSN."""
        version = stored_version(schema)
        table_in_catalog = catalog_at(lsn)
        turns = turns_digits(self.table_state.columns, version)
        alterations = self._evolve(version, table_in_catalog)
        conversion = BatchConversion.of(schema, self.table_state.columns)
        if turns or not self._writers[-1].fits(conversion.schema):
            self._next_version()
        self._last = schema, conversion, version
        if self._is_new and self._first is None:
            self._first = pa.schema(list(conversion.schema.field("after").type))
        if self._state is not None:
            self._fold_on(conversion, version, alterations, table_in_catalog.table, lsn)
        return schema, conversion, version

    def _evolve(self, version: Version, table_in_catalog: TableInCatalog) -> list[Alteration]:
        """Let the state table follow new columns; return its alterations."""
        alterations: list[Alteration] = []
        if not self.table_state.columns:
            self.table_state = self.table_state._replace(
                columns=new_columns(version, table_in_catalog)
            )
        else:
            self._check_same(version)
            evolved = evolve(self.table_state.columns, version, table_in_catalog)
            if evolved.unknown is not None:
                if self._target.remembered.has_state:
                    self.stop(evolved.unknown)
                # The change table goes on with the new columns.
                self.table_state = self.table_state._replace(
                    columns=new_columns(version, table_in_catalog)
                )
            else:
                self.table_state = self.table_state._replace(columns=evolved.columns)
                alterations = evolved.alterations
        self._check_marker()
        return alterations

    def follow(self, schema: pa.Schema, table_in_catalog: TableInCatalog) -> None:
        """Let the state table follow the catalogue before a change has the new columns.

        Parameters
        ----------
        schema : pyarrow.Schema
            The schema that changes would have now.
        table_in_catalog : TableInCatalog
        """
        self.take_gathered()
        version = stored_version(schema)
        alterations = self._evolve(version, table_in_catalog)
        if self._state is not None:
            conversion = BatchConversion.of(schema, self.table_state.columns)
            self._fold_on(
                conversion, version, alterations, table_in_catalog.table, self._folded + 1
            )
        self._last = None  # the next change begins with these columns

    def _check_same(self, version: Version) -> None:
        """Refuse an alteration if the state table must not follow it."""
        old_columns = {
            (column.name, column.type_id, column.type_modifier)
            for column in self.table_state.columns
        }
        current_columns = {
            (column.name, column.type_id, column.type_modifier) for column in version.columns
        }
        if not self._evolves and old_columns != current_columns:
            raise PgOutputError(
                f"{version.table} was altered: its columns were {_listed(old_columns)}, and are "
                f"now {_listed(current_columns)}",
                code="unfit_schema",
                parameter="schema_changes",
                table=version.table,
                hint=("Give ", Argument("schema_changes", "evolve"), ": its state table follows"),
            )

    def _check_marker(self) -> None:
        """Refuse a column of the server with the name of the column for deleted rows."""
        marker = self._target.remembered.soft_deletes
        if marker is None:
            return
        for column in self.table_state.columns:
            if column.stored.casefold() == marker.casefold():
                raise PgOutputError(
                    f"{qualified(self.table_state)} has its own column "
                    f"{column.name!r}, so sync cannot mark deleted rows in a column with this name",
                    code="unfit_schema",
                    parameter="soft_deletes",
                    table=qualified(self.table_state),
                    hint="Give another name, and a new target",
                )

    def _fold_on(
        self,
        conversion: BatchConversion,
        version: Version,
        alterations: list[Alteration],
        table: CatalogTable | None,
        lsn: int,
    ) -> None:
        """Fold the next changes together with those before, if possible."""
        # The Relation has the key of these changes; with FULL, it flags all columns.
        names = version.key if version.replica_identity not in ("f", "n") else ()
        if not names and table is not None:
            names = table.key
        key = None if not names and table is None else tuple(
            column.stored
            for name in names
            for column in self.table_state.columns
            if column.name == name
        )  # fmt: skip
        nothing = _empty(conversion.schema)
        # Changes before a rename or a removal have other columns under the same names.
        renames = any(isinstance(alteration, (Removed, Renamed)) for alteration in alterations)
        if self._parts and self._parts[-1].key == key and not renames and self._goes_on(nothing):
            self._parts[-1].alterations.extend(alterations)
            self._parts[-1] = self._parts[-1]._replace(schema=conversion.schema)
            return
        if self._parts and lsn <= self._folded:
            subject = "columns were" if renames else "key was"
            self.stop(f"its {subject} altered within a transaction")
            return
        folding = Folding(key, self._spill_file)
        self._parts.append(_Part(alterations, folding, key, lsn, conversion.schema))
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
        needs = self._snapshot_needs
        if needs is None:
            self.take_gathered()
            needs = self._begin_snapshot(schema, catalog_at(snapshot.lsn), snapshot)
            self._snapshot_needs = needs
        if not (needs.changes or needs.rows):
            return
        last = self._last
        if last is None or last[0] is not schema:
            last = self._last = self._layout(schema, self.table_state.columns)
        if needs.rows:
            check_copied_keys(batch)
        rows = last[1].batch(batch)
        if needs.changes:
            self._append(rows)
        if needs.rows and self._state is not None:
            read = rows.filter(pc.equal(rows.column("op"), "read"))
            if read.num_rows:
                after = read.column("after")
                self._state.append(
                    pa.RecordBatch.from_arrays(after.flatten(), schema=pa.schema(list(after.type)))
                )

    def _begin_snapshot(
        self, schema: pa.Schema, table_in_catalog: TableInCatalog, snapshot: Snapshot
    ) -> SnapshotNeeds:
        """Begin a snapshot; return which tables still lack it."""
        state = self._state
        if state is None and self._target.remembered.has_state:
            state = self._target.state(self.table_state)
        # A snapshot older than the table would remove the changes in between, and nothing reads
        # them again. `check_position` reports such a snapshot.
        needs_changes = (
            snapshot.lsn > self._writers[-1].copy_lsn and snapshot.lsn >= self._writers[-1].lsn
        )
        # A snapshot that the table has already can't repair a table that became stale later.
        is_new = snapshot.lsn > self.table_state.copy_lsn and snapshot.lsn >= self.table_state.lsn
        needs_rows = state is not None and (
            (snapshot.lsn > state.copy_lsn and snapshot.lsn >= state.lsn)
            or (self.table_state.stale is not None and is_new)
        )
        # A killed process may have loaded the state table without committing the table state.
        begins = is_new or needs_rows
        if not (needs_changes or begins):
            return SnapshotNeeds(changes=False, rows=False)
        version = stored_version(schema)
        columns = new_columns(version, table_in_catalog) if begins else self.table_state.columns
        self._last = self._layout(schema, columns)
        conversion = self._last[1]
        turns = turns_digits(self.table_state.columns, version)
        if needs_changes and (turns or not self._writers[-1].fits(conversion.schema)):
            self._next_version()
        if begins:
            # Reads of the catalogue count from the snapshot on.
            self.table_state = self.table_state._replace(
                columns=columns, stale=None, schema_lsn=snapshot.lsn
            )
            self._check_marker()
            self._state, self._parts, self._is_new = state, [], False
        if state is not None and needs_rows:
            state.load(pa.schema(list(conversion.schema.field("after").type)))
        return SnapshotNeeds(needs_changes, needs_rows)

    @staticmethod
    def _layout(schema: pa.Schema, columns: Sequence[StoredColumn]) -> _Layout:
        return schema, BatchConversion.of(schema, columns), stored_version(schema)

    def _next_version(self) -> None:
        """Begin a new version of the change table."""
        self.table_state = self.table_state._replace(version=self.table_state.version + 1)
        self._writers.append(self._target.changes(self.table_state))

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """End a snapshot, after its last row."""
        needs = self._snapshot_needs or SnapshotNeeds(changes=False, rows=False)
        self._snapshot_needs = self._last = None
        if needs.changes:
            # A snapshot counts as its rows, without its Truncate.
            self.changes -= 1
        if snapshot.lsn >= self.table_state.lsn:
            self.table_state = self.table_state._replace(
                copy_lsn=max(self.table_state.copy_lsn, snapshot.lsn), lsn=snapshot.lsn
            )
        if needs.rows:
            self._commit_snapshot()

    def _commit_snapshot(self) -> None:
        """Commit the snapshot's rows in the state table."""
        if self._state is not None:
            self._state.loaded(self.table_state)

    # --- the end ---------------------------------------------------------------------------------

    def commit_changes(self, lsn: int) -> None:
        """Commit the change table, after the last change."""
        for writer in self._writers:
            writer.commit(self.table_state._replace(lsn=lsn))
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
                with as_incomplete(makes_null=self._makes_null):
                    net = with_added(part.folding.finish(), part.alterations)
                part.folding.forget()
                if not (net.num_rows or net.truncated or part.alterations):
                    continue
                state.apply(part.alterations, net, self.table_state._replace(lsn=end))
            except IncompleteError as error:
                self._stop_by(error)
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


def _listed(columns: set[tuple[str, Any, Any]]) -> str:
    return ", ".join(
        sorted(f"{name} {shown_type(type_id, modifier)}" for name, type_id, modifier in columns)
    )
