"""Plan the columns, the version and the state of a table, before its rows are written.

The functions take the table state, the schema of decoded batches, and what the catalogue says.
They return plans, and write nothing. The options of a sync that depend on a table's layout, on its
snapshots or on the catalogue are applied here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..changelog.known import how_to_copy
from ..errors import Argument, PgOutputError
from ..names import qualified
from .evolution import differs, evolve, new_columns, replaced, turns_digits
from .stored_changes import BatchConversion, stored_version
from .targets import CHANGES_ALONE, IncompleteError, Removed, Renamed, TableState
from .versions import shown_type

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pyarrow as pa

    from ..catalog import CatalogTable
    from ..policies import Policies
    from .evolution import TableInCatalog
    from .options import SyncOptions
    from .targets import Alteration, RememberedOptions
    from .versions import Version


LEFT_UNCOPIED = (
    "it has no snapshot, and was dropped or left the publications before one could be made; its "
    "changes are kept"
)
"""Reason of a stale table that can't get a snapshot any more."""
SKIPPED = (
    "its snapshot was made under another name, which the patterns of tables do not select, so sync "
    "did not read it"
)
UNSELECTED = "it was renamed, and the patterns of tables do not select its new name"
"""Reason of a stale table whose changes sync no longer reads."""
SELECTED_AGAIN = "the patterns of tables did not select its name for a while"


class TableRules(NamedTuple):
    """The options of a sync on which the plans of its tables depend.

    Attributes
    ----------
    evolves : bool
        Whether state tables follow alterations; if not, an alteration is an error.
    may_be_stale : bool
        Whether a table becomes stale when its rows are no longer known; if not, this is an error.
    uncopied : {"error", "empty", "changes"}
        See `SyncOptions`.
    has_state : bool
        Whether the target has state tables.
    marker : str or None
        The column for deleted rows; None if state tables have none.
    makes_null : bool
        Whether a policy replaces values by NULL. Then such a policy may have made a NULL in a key,
        and a new snapshot would have the same NULL.
    """

    evolves: bool
    may_be_stale: bool
    uncopied: str
    has_state: bool
    marker: str | None
    makes_null: bool

    @classmethod
    def of(
        cls, options: SyncOptions, remembered: RememberedOptions, policies: Policies
    ) -> TableRules:
        """Return the rules of a call with these options, policies and target."""
        return cls(
            options.schema_changes == "evolve",
            options.on_error == "pause",
            options.uncopied,
            remembered.has_state,
            remembered.soft_deletes,
            "null" in (policies.infinity, policies.out_of_range, policies.special_values),
        )

    def stale(self, table_state: TableState, reason: str) -> TableState:
        """Return a table state as stale: the rows of the table are no longer known.

        Raises
        ------
        IncompleteError
            The table must not become stale.
        """
        if not self.may_be_stale:
            raise IncompleteError(
                f"the rows of {qualified(table_state)} are no longer known: {reason}",
                table=qualified(table_state),
                hint=(
                    "Give ",
                    Argument("on_error", "pause"),
                    ": sync then requests a new snapshot",
                ),
            )
        return table_state._replace(stale=reason)


# --- new tables ----------------------------------------------------------------------------------


def plan_new_table(
    table_state: TableState,
    rules: TableRules,
    directory: Path,
    *,
    has_snapshot: bool,
    is_skipped: bool,
    has_left: Callable[[], bool],
) -> TableState:
    """Return the first table state of a table that is new in the target.

    Parameters
    ----------
    table_state : TableState
        With the table's name, and without columns.
    rules : TableRules
    directory : pathlib.Path
        The change log, for an error.
    has_snapshot : bool
        Whether the change log has a snapshot of the table.
    is_skipped : bool
        Whether that snapshot came before the first change of the table, and sync did not read it.
    has_left : callable
        Returns whether the table is dropped or no longer published, so that it can't get a
        snapshot.

    Raises
    ------
    PgOutputError
        ``no_snapshot``: the table has none, and `rules.uncopied` is "error".
    IncompleteError
        The snapshot was skipped, and the table must not become stale.
    """
    if is_skipped and table_state.stale is None:
        return rules.stale(table_state, SKIPPED)
    if has_snapshot or not rules.has_state or rules.uncopied == "empty":
        return table_state
    if rules.uncopied == "changes":
        return table_state._replace(stale=CHANGES_ALONE)
    if has_left():
        return table_state._replace(stale=LEFT_UNCOPIED)
    raise PgOutputError(
        f"{qualified(table_state)} has no snapshot in {directory}, so its rows before its first "
        "change there are unknown",
        code="no_snapshot", path=str(directory), table=qualified(table_state),
        hint=("Capture with ", Argument("snapshot", "initial"),
              f", or {how_to_copy(directory, [table_state.relation_id])}. ",
              Argument("uncopied", "empty"), " assumes that it was empty, ",
              Argument("uncopied", "changes"), " keeps only its changes"),
    )  # fmt: skip


# --- layouts -------------------------------------------------------------------------------------


class LayoutPlan(NamedTuple):
    """How the changes of one layout are written.

    Attributes
    ----------
    table_state : TableState
        With the columns after the alterations; stale if the rows are no longer known.
    conversion : BatchConversion
        Converts decoded batches to those of the target.
    alterations : list of Alteration
        What the state table needs before the changes are applied.
    begins_version : bool
        Whether the changes go to a new version of the change table, as it can't store them.
    key : tuple of str or None
        The stored names of the columns that identify a row; empty if the table has no key, None if
        the key is not known.
    """

    table_state: TableState
    conversion: BatchConversion
    alterations: list[Alteration]
    begins_version: bool
    key: tuple[str, ...] | None

    @property
    def moves_names(self) -> bool:
        """Whether a column's name in the target may have meant another column before."""
        return any(isinstance(alteration, (Removed, Renamed)) for alteration in self.alterations)


def plan_layout(
    table_state: TableState,
    schema: pa.Schema,
    table_in_catalog: TableInCatalog,
    rules: TableRules,
    fits: Callable[[pa.Schema], bool],
) -> LayoutPlan:
    """Plan how the next changes of a table are written.

    Parameters
    ----------
    table_state : TableState
        The table state after all earlier changes.
    schema : pyarrow.Schema
        The schema of decoded batches.
    table_in_catalog : TableInCatalog
    rules : TableRules
    fits : callable
        Whether the change table can store batches with a schema, as `ChangeWriter.fits`.

    Raises
    ------
    PgOutputError
        ``unfit_schema``: the table must not be altered, or has a column with the name of the one
        for deleted rows.
    IncompleteError
        The rows are no longer known, and the table must not become stale.
    """
    version = stored_version(schema)
    turns = turns_digits(table_state.columns, version)
    alterations: list[Alteration] = []
    if not table_state.columns:
        columns = new_columns(version, table_in_catalog)
    else:
        if not rules.evolves:
            _check_same(table_state, version)
        evolved = evolve(table_state.columns, version, table_in_catalog)
        columns, alterations = evolved.columns, evolved.alterations
        if evolved.unknown is not None:
            if rules.has_state:
                table_state = rules.stale(table_state, evolved.unknown)
            columns = new_columns(version, table_in_catalog)  # for the change table
    table_state = table_state._replace(columns=columns)
    _check_marker(table_state, rules)
    conversion = BatchConversion.of(schema, columns)
    begins_version = turns or not fits(conversion.schema)
    key = _key(table_state, version, table_in_catalog.table)
    return LayoutPlan(table_state, conversion, alterations, begins_version, key)


def _key(
    table_state: TableState, version: Version, table: CatalogTable | None
) -> tuple[str, ...] | None:
    """Return the stored names of the key's columns; None if the key is not known."""
    # The Relation has the key of these changes; with FULL, it flags all columns.
    names = version.key if version.replica_identity not in ("f", "n") else ()
    if not names:
        if table is None:
            return None
        names = table.key
    stored_names = {column.name: column.stored_name for column in table_state.columns}
    return tuple(stored_names[name] for name in names if name in stored_names)


def _check_same(table_state: TableState, version: Version) -> None:
    """Refuse an alteration, because state tables must not follow it."""
    before, after = _described(table_state.columns), _described(version.columns)
    if before != after:
        raise PgOutputError(
            f"{version.table} was altered: its columns were {_shown(before)}, and are now "
            f"{_shown(after)}",
            code="unfit_schema",
            parameter="schema_changes",
            table=version.table,
            hint=("Give ", Argument("schema_changes", "evolve"), ": its state table follows"),
        )


def _described(columns: Any) -> set[tuple[str, Any, Any]]:
    return {(column.name, column.type_id, column.type_modifier) for column in columns}


def _shown(columns: set[tuple[str, Any, Any]]) -> str:
    return ", ".join(
        sorted(f"{name} {shown_type(type_id, modifier)}" for name, type_id, modifier in columns)
    )


def _check_marker(table_state: TableState, rules: TableRules) -> None:
    """Refuse a column of the server with the name of the column for deleted rows."""
    if rules.marker is None:
        return
    for column in table_state.columns:
        if column.stored_name.casefold() == rules.marker.casefold():
            raise PgOutputError(
                f"{qualified(table_state)} has its own column {column.name!r}, so sync cannot mark "
                "deleted rows in a column with this name",
                code="unfit_schema",
                parameter="soft_deletes",
                table=qualified(table_state),
                hint="Rename the column on the server, then request a new snapshot with "
                "pgoutput-fast snapshot. Or give another name, and a new target",
            )


# --- snapshots -----------------------------------------------------------------------------------


class Progress(NamedTuple):
    """How far a change table or a state table is, by its own record.

    Fields: lsn (it has all changes that were committed before this LSN), copy_lsn (the LSN of its
    newest snapshot).
    """

    lsn: int
    copy_lsn: int

    def lacks(self, snapshot_lsn: int) -> bool:
        """Whether the table needs a snapshot: it has neither the snapshot nor a later change.

        The rows of an older snapshot would replace those with later changes, and nothing reads
        these changes again.
        """
        return snapshot_lsn > self.copy_lsn and snapshot_lsn >= self.lsn


class SnapshotPlan(NamedTuple):
    """How the rows of a snapshot are written.

    Attributes
    ----------
    table_state : TableState
        If the table begins with the snapshot, it has the snapshot's columns, and is not stale.
    conversion : BatchConversion
    begins : bool
        Whether the table begins with the snapshot, whatever it was before.
    begins_version : bool
        As in `LayoutPlan`.
    needs_rows : bool
        Whether the state table needs the snapshot.
    """

    table_state: TableState
    conversion: BatchConversion
    begins: bool
    begins_version: bool
    needs_rows: bool


def plan_snapshot(
    table_state: TableState,
    snapshot_lsn: int,
    schema: pa.Schema,
    table_in_catalog: TableInCatalog,
    rules: TableRules,
    fits: Callable[[pa.Schema], bool],
    state: Progress | None,
) -> SnapshotPlan:
    """Plan how a snapshot of a table is written.

    The plan does not say whether the change table needs the snapshot. That depends on the progress
    of its version, which may be a new one.

    Parameters
    ----------
    table_state, schema, table_in_catalog, rules, fits
        As in `plan_layout`.
    snapshot_lsn : int
    state : Progress or None
        Of the state table; None if the target has none.

    Raises
    ------
    PgOutputError
        ``unfit_schema``, as in `plan_layout`.
    """
    # A snapshot that the table has already can't repair a table that became stale later.
    is_new = Progress(table_state.lsn, table_state.copy_lsn).lacks(snapshot_lsn)
    needs_rows = state is not None and (
        state.lacks(snapshot_lsn) or (table_state.stale is not None and is_new)
    )
    # If a process was killed after it had loaded the state table, the table state is still older.
    begins = is_new or needs_rows
    version = stored_version(schema)
    turns = turns_digits(table_state.columns, version)
    if begins:
        # Reads of the catalogue count from the snapshot on.
        table_state = table_state._replace(
            columns=new_columns(version, table_in_catalog), stale=None, schema_lsn=snapshot_lsn
        )
        _check_marker(table_state, rules)
    conversion = BatchConversion.of(schema, table_state.columns)
    begins_version = begins and (turns or not fits(conversion.schema))
    return SnapshotPlan(table_state, conversion, begins, begins_version, needs_rows)


# --- the catalogue -------------------------------------------------------------------------------


class CatalogPlan(NamedTuple):
    """What a table needs after a read of the catalogue: its name there, and perhaps more.

    Attributes
    ----------
    stale : str or None
        Why the table becomes stale; else None.
    follows : bool
        Whether the state table gets the columns of the catalogue.
    """

    stale: str | None = None
    follows: bool = False

    @property
    def is_name(self) -> bool:
        """Whether the table needs nothing but its name."""
        return self.stale is None and not self.follows


def plan_from_catalog(
    table_state: TableState,
    table: CatalogTable,
    start: int,
    rules: TableRules,
    *,
    is_selected: bool,
) -> CatalogPlan | None:
    """Plan what a table needs if the catalogue was read after its last change; None: nothing.

    Parameters
    ----------
    table_state : TableState
        The table state after all changes.
    table : CatalogTable
        The table in the read.
    start : int
        The LSN from which on the read counts.
    rules : TableRules
    is_selected : bool
        Whether the patterns of tables select the table's name in the read.
    """
    has_rows = bool(rules.has_state and table_state.stale is None and table_state.columns)
    # The stream does not show that a column was dropped and created again, so this check does not
    # depend on the last change.
    column = replaced(table_state.columns, table) if has_rows else None
    if column is not None:
        return CatalogPlan(
            f"column {column} was dropped or renamed, and another column has its name: sync may "
            "have taken later changes for those of the former column"
        )
    if table_state.stale == UNSELECTED and is_selected:
        return CatalogPlan(SELECTED_AGAIN)
    if start <= table_state.schema_lsn:
        return None
    if table_state.stale is None and not is_selected:
        return CatalogPlan(UNSELECTED)
    return CatalogPlan(follows=has_rows and differs(table_state.columns, table))
