"""The interface of a target, and the state that a target stores for each table.

For each table of the server, a target has a change table with all its changes, a state table with
its current rows, or both. The target commits the rows of a table together with the table's LSN.
After an interruption, the next call reads this LSN and skips the changes that are already there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from ..errors import Argument, PgOutputError, RetryableError
from ..policies import Policies, policies_of, policy_texts
from ..types.table import BUILTIN_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..segments.reader import CommitRecord
    from .folding import NetChanges

TARGET_FORMAT = 5
"""Version of the format in which a target stores the state of its tables."""

Keep = Literal["both", "state", "changes"]
"""Which tables a target has for each of the server's."""


class TargetOrigin(NamedTuple):
    """The database whose changes a target has."""

    system_identifier: str
    database: str


class StateColumn(NamedTuple):
    """A column of a state table.

    Attributes
    ----------
    name : str
        The column's name on the server.
    stored_name : str
        The column's name in the target. It is unique in the table, even if case is ignored.
    type_id, type_modifier : int
        OID and modifier of the column's type on the server.
    form : str
        The Arrow type of the values, with a suffix for digits; see `ColumnVersion.form`.
    number : int or None
        The column's number on the server (``attnum``), which a rename does not change. None if the
        number is not known.
    """

    name: str
    stored_name: str
    type_id: int
    type_modifier: int
    form: str
    number: int | None = None


class Pause(NamedTuple):
    """A table is paused: its changes wait in the change log.

    Fields: reason (why), since (seconds since 1970).
    """

    reason: str
    since: float


class Gap(NamedTuple):
    """A range of changes that a change table will never get.

    Fields: start, end (LSNs). Changes that were committed from `start` on and before `end` are
    missing.
    """

    start: int
    end: int


class TableState(NamedTuple):
    """The table state: what a target has of one table.

    Attributes
    ----------
    relation_id : int
    namespace, name : str
        The table's newest name, from the stream or the schema history.
    stored_name : str
        The name of the change table and the state table in the target: ``public.accounts``.
    version : int
        Version of the change table, from 1. 0 if the target has neither table yet, because the
        first changes of the table are paused.
    lsn : int
        The target has all changes of the table that were committed before this LSN.
    copy_lsn : int
        LSN of the snapshot with which the table began; 0 if the table began empty.
    commit_time : int or None
        Commit time of the table's newest change in the target, in microseconds since 1970; None
        before the first change.
    stale : str or None
        Why the state table is not kept up to date until the table gets a new snapshot; else None.
    columns : tuple of StateColumn
        The columns of the state table, in its order.
    gap : int or None
        Another program changed the change table: its changes before this LSN may differ from the
        server's. Else None.
    paused : Pause or None
        Why the table's changes wait in the change log until somebody acts; else None.
    gaps : tuple of Gap
        The changes that the change table will never get.
    schema_lsn : int
        The name and the columns are those that the server's table had at this LSN.
    """

    relation_id: int
    namespace: str
    name: str
    stored_name: str
    version: int = 1
    lsn: int = 0
    copy_lsn: int = 0
    commit_time: int | None = None
    stale: str | None = None
    columns: tuple[StateColumn, ...] = ()
    gap: int | None = None
    paused: Pause | None = None
    gaps: tuple[Gap, ...] = ()
    schema_lsn: int = 0


class AddedColumn(NamedTuple):
    """A column is added to a state table.

    Fields: column (its stored name), value (pyarrow.Array of length 1: the column's value in rows
    that are older than the column).
    """

    column: str
    value: pa.Array


class Retyped(NamedTuple):
    """A column gets a wider type, which has all of its values. Fields: column, type."""

    column: str
    type: pa.DataType


class Removed(NamedTuple):
    """A column is dropped with its values. Field: column."""

    column: str


class Renamed(NamedTuple):
    """A column is renamed. Fields: column, name (free once the earlier alterations are done)."""

    column: str
    name: str


Alteration = AddedColumn | Retyped | Removed | Renamed


class TargetState(NamedTuple):
    """The target state: what a target has of all tables.

    Attributes
    ----------
    lsn : int
        Sync has read all transactions that were committed before this LSN; 0 in a new target.
    tables : dict of int to TableState
        The table states by relation id.
    newest : CommitRecord or None
        The commit of the newest transaction that sync has read, whether or not the transaction
        concerns a table of the target. None if it is not known.
    is_new : bool
        Whether this call has created the target.
    policies : Policies or None
        The policies by which the rows in the target were written; None if there are no rows.
    """

    lsn: int
    tables: dict[int, TableState]
    newest: CommitRecord | None = None
    is_new: bool = False
    policies: Policies | None = None


_NUMERIC = 1700
DELETED_AT = pa.timestamp("us", "UTC")
"""Arrow type of the column that marks soft-deleted rows."""


class RememberedOptions(NamedTuple):
    """The options that a target remembers from its first call on, as its tables depend on them.

    Attributes
    ----------
    soft_deletes : str or None
        The column of state tables that has the time at which a row was deleted, and null in rows
        that exist. None: deleted rows are removed.
    tables : tuple of str or None
        The option `tables` of `sync`. Sync skips the changes of other tables for good.
    policies : Policies or None
        The policies by which values are written. None: the call gives none, and uses the target's.
    keep : {"both", "state", "changes"} or None
        Which tables the target has. None: the call does not say, and uses what the target has, or
        both in a new target.
    changes_policies : bool
        Whether the call may give other policies than the target has.
    """

    soft_deletes: str | None = None
    tables: tuple[str, ...] | None = None
    policies: Policies | None = None
    keep: Keep | None = None
    changes_policies: bool = False

    @property
    def has_changes(self) -> bool:
        """Whether the target has change tables."""
        return self.keep != "state"

    @property
    def has_state(self) -> bool:
        """Whether the target has state tables."""
        return self.keep != "changes"

    @property
    def listed(self) -> list[str] | None:
        """The selected tables as a list; None if all are."""
        return None if self.tables is None else [*self.tables]

    @property
    def policy_texts(self) -> list[str]:
        """The policies in the text form that a target stores."""
        return policy_texts(self.policies or Policies())

    @classmethod
    def of(
        cls,
        soft_deletes: str | None,
        tables: Sequence[str] | None,
        policies: Sequence[str],
        keep: Keep,
    ) -> RememberedOptions:
        """Return the options of a target from the values that it stores."""
        wanted = None if tables is None else tuple(tables)
        return cls(soft_deletes, wanted, policies_of(policies), keep)

    def is_like(self, target_options: RememberedOptions) -> bool:
        """Whether a target has the options of this call."""
        policies = self.policies in (None, target_options.policies)
        return (
            policies and self.keep in (None, target_options.keep) and self[:2] == target_options[:2]
        )

    def check(self, where: str, target_options: RememberedOptions) -> RememberedOptions:
        """Return the options that hold from now on; refuse a target that was made with others.

        Parameters
        ----------
        where : str
            The target's name in errors.
        target_options : RememberedOptions
            The options with which the target was made.

        Raises
        ------
        PgOutputError
            `soft_deletes`, `tables` or `keep` differ; or the policies do, and the call may not
            change them.
        """
        keep = self.keep or target_options.keep
        for name, value, target_value in (
            ("soft_deletes", self.soft_deletes, target_options.soft_deletes),
            ("tables", self.tables, target_options.tables),
            ("keep", keep, target_options.keep),
        ):
            if value != target_value:
                shown = [*target_value] if isinstance(target_value, tuple) else target_value
                setting = "without it" if target_value is None else f"with {shown!r}"
                fix = ("Leave out ", Argument(name)) if target_value is None else (
                    "Give ", Argument(name, shown)
                )  # fmt: skip
                raise PgOutputError(
                    f"{where} was created {setting}, and this cannot be changed",
                    code="bad_option", parameter=name,
                    hint=(*fix, ", or start with a new target"),
                )  # fmt: skip
        if self.policies is None:
            return self._replace(policies=target_options.policies, keep=keep)
        if self.policies != target_options.policies and not self.changes_policies:
            target_policies, own_policies = (
                " ".join(options.policy_texts) or "the defaults"
                for options in (target_options, self)
            )
            raise PgOutputError(
                f"the rows in {where} were written with other policies ({target_policies}) than "
                f"those you give ({own_policies})",
                code="bad_option",
                parameter="policies",
                hint=(
                    "Leave out ",
                    Argument("policies"),
                    " to keep the policies of the target. Add ",
                    Argument("change_policies", True),
                    " to change them: tables with an affected column then get a new snapshot",
                ),
            )
        return self._replace(keep=keep)

    def concerned(self, policies: Policies, table_state: TableState) -> str | None:
        """Return why a table needs a new snapshot under this call's policies; None if it does not.

        Parameters
        ----------
        policies : Policies
            The policies by which the table's rows were written.
        table_state : TableState
        """
        now = self.policies or Policies()
        for name in Policies.__dataclass_fields__:
            before, after = getattr(policies, name), getattr(now, name)
            # "error" stored no such value: rows stay right under a policy that replaces values.
            if before == after or (before == "error" and after in ("null", "clamp", "replace")):
                continue
            for column in table_state.columns:
                if _depends(column, name):
                    return (
                        f"the policy {name} changed from {before} to {after}, which affects column "
                        f"{column.name}"
                    )
        return None


_ON_POLICIES = {
    oid: {*type_.policies, *({"arrays"} if is_array else ())}
    for type_ in BUILTIN_TYPES
    for oid, is_array in ((type_.oid, False), (type_.array_oid, True))
    if oid
}
_SUBTYPES = {oid: type_.element for type_ in BUILTIN_TYPES if type_.element
             for oid in (type_.oid, type_.array_oid)}  # fmt: skip


def _depends(column: StateColumn, policy: str) -> bool:
    """Whether a policy concerns a column. For a user-defined type, it may, so the answer is yes."""
    oid = column.type_id
    if policy == "numeric" and oid == _NUMERIC:
        return column.type_modifier < 0
    while oid in _ON_POLICIES:
        if policy in _ON_POLICIES[oid]:
            return True
        if oid not in _SUBTYPES:
            return False
        oid = _SUBTYPES[oid]
    return True


PARQUET = "parquet:"
"""Prefix of the name of a target that keeps change tables only, as plain Parquet files."""
_KINDS = {"delta": "Delta tables", "parquet": "plain Parquet files", "iceberg": "Iceberg tables"}


def check_kind(where: str, kind: str, target_kind: str) -> None:
    """Refuse change tables of another kind than a target was made with."""
    if target_kind != kind:
        fix: list[str | Argument] = []
        if "parquet" in (kind, target_kind):
            fix = [
                "Give ",
                Argument("target", f"{PARQUET}{where}" if target_kind == "parquet" else where),
            ]
        if kind == "iceberg":
            fix += [" without " if fix else "Leave out ", Argument("iceberg")]
        elif target_kind == "iceberg":
            fix += [" with " if fix else "Give ", Argument("iceberg")]
        raise PgOutputError(
            f"the change tables in {where} are {_KINDS[target_kind]}, and a target cannot "
            "change their kind",
            code="bad_option",
            parameter="target" if "parquet" in (kind, target_kind) else "iceberg",
            hint=(*fix, ", or start with a new target"),
        )


DELETED = "its state table was deleted from the target"
"""Reason of a stale table whose state table is missing."""
PUT_BACK = "an earlier state of its state table was restored in the target"
CHANGED = "another program changed its state table"
CHANGES_DELETED = "its change table was deleted from the target"
CHANGES_PUT_BACK = "an earlier state of its change table was restored in the target"
OTHER_HISTORY = (
    "the target has changes that the change log lacks: an earlier state of the change log and of "
    "the server was restored"
)
RENAMED = "it was renamed, and object storage can't rename the directory of its state table"
LOST = (DELETED, PUT_BACK, CHANGED, CHANGES_DELETED, CHANGES_PUT_BACK, OTHER_HISTORY, RENAMED)
"""Beginnings of the reasons of stale tables whose data in the target is not what sync wrote."""
CHANGES_ALONE = "its rows before the capture are not known"
"""Reason of a table that has no state table because it got no snapshot."""


class IncompleteError(PgOutputError):
    """Changes do not fit the rows of a state table."""

    code = "stale"


class TargetError(PgOutputError):
    """The whole target refuses: no other table could be written either."""


class TableError(PgOutputError):
    """A target refuses to write one table, and says so only after it has taken the rows.

    Attributes
    ----------
    table_state : TableState
    """

    def __init__(self, table_state: TableState, text: str, **fields: Any) -> None:
        super().__init__(text, **fields)
        self.table_state = table_state


class ConflictError(PgOutputError):
    """Another program has written a table at the same time; nothing was committed."""

    code = "conflict"


class UnplannedError(PgOutputError):
    """Executors can't write a window: the target has a part of it, or a layout differs."""

    code = "unfit_schema"


class StoppedError(RetryableError):
    """The sync was stopped while it waited for the target."""

    code = "stopped"


class ChangeWriter(Protocol):
    """Writes a change table.

    In a transactional target, what it commits takes effect with `Target.commit`.
    """

    @property
    def lsn(self) -> int:
        """The table has all changes that were committed before this LSN."""

    @property
    def copy_lsn(self) -> int:
        """LSN of the newest snapshot in the table."""

    @property
    def gap(self) -> int | None:
        """`TableState.gap`, valid after `commit`."""

    def fits(self, schema: pa.Schema) -> bool:
        """Whether the table can store these changes: no existing column has another type."""

    def append(self, changes: pa.RecordBatch) -> None:
        """Append changes to the table.

        Parameters
        ----------
        changes : pyarrow.RecordBatch
            The columns of a ChangeBatch, where `before` and `after` have the stored names. Later
            calls may add or leave out columns.
        """

    def commit(self, table_state: TableState) -> None:
        """Commit the appended changes, with the `lsn` and `copy_lsn` of the table state."""


class NoChanges:
    """A `ChangeWriter` that drops all changes, for a target without change tables."""

    gap = None

    def __init__(self, table_state: TableState) -> None:
        self.lsn, self.copy_lsn = table_state.lsn, table_state.copy_lsn

    def fits(self, schema: pa.Schema) -> bool:
        """See `ChangeWriter`."""
        del schema
        return True

    def append(self, changes: pa.RecordBatch) -> None:
        """See `ChangeWriter`."""

    def commit(self, table_state: TableState) -> None:
        """See `ChangeWriter`."""


class StateWriter(Protocol):
    """Writes a state table.

    In a transactional target, what it commits takes effect with `Target.commit`.
    """

    @property
    def lsn(self) -> int:
        """See `ChangeWriter.lsn`."""

    @property
    def copy_lsn(self) -> int:
        """See `ChangeWriter.copy_lsn`."""

    def load(self, schema: pa.Schema) -> None:
        """Begin to replace all rows by the rows of a snapshot, which have this schema."""

    def append(self, rows: pa.RecordBatch) -> None:
        """Write rows of the snapshot."""

    def loaded(self, table_state: TableState) -> None:
        """Finish loading the snapshot: commit its rows, and the table state with them."""

    def create(self, schema: pa.Schema) -> None:
        """Create the table without rows."""

    def apply(
        self, alterations: Sequence[Alteration], net: NetChanges, table_state: TableState
    ) -> None:
        """Alter the table, apply the net changes, and store the table state, all in one commit.

        Raises
        ------
        IncompleteError
            The net changes do not fit the table's rows. Nothing was committed.
        """


class Target(Protocol):
    """A place where sync keeps tables up to date, such as a DuckDB file."""

    threads: int
    """Maximum number of tables that are written at a time."""
    is_transactional: bool
    """Whether a window is one transaction: after an error, nothing of the window can be written."""
    remembered: RememberedOptions
    """The options that the target remembers. Without state tables, nobody calls `state`."""
    troubles: dict[int, PgOutputError]
    """By relation id: why a table can't be written, where that was found outside of a window."""

    def claim(self) -> None:
        """Lock the target against other syncs until it is closed.

        Raises
        ------
        PgOutputError
            Another sync writes the target.
        """

    def open(self, origin: TargetOrigin) -> TargetState:
        """Claim the target, create it if it does not exist, and return its state.

        Raises
        ------
        PgOutputError
            The target belongs to something else, or has tables of another database; or another
            process writes it.
        """

    def peek(self, origin: TargetOrigin) -> TargetState:
        """Return the target's state, and neither create nor claim anything.

        Raises
        ------
        PgOutputError
            As for `open`. Another process that writes the target is no error.
        """

    def retry(self, table_state: TableState) -> None:
        """Check whether a paused table can be written again.

        Raises
        ------
        PgOutputError
            The table still can't be written.
        """

    def begin(self) -> None:
        """Begin a window, whose changes are committed together."""

    def changes(self, table_state: TableState) -> ChangeWriter:
        """Return the writer of a table's change table in this window."""

    def state(self, table_state: TableState) -> StateWriter:
        """Return the writer of a table's state table in this window."""

    def shown(self, stored_name: str) -> str:
        """Return the name under which users find the tables with a stored name."""

    def new_table_state(self, table_state: TableState) -> TableState:
        """Return the table state of a new table, whose stored name is free."""

    def rename(self, table_state: TableState, stored_name: str) -> TableState:
        """Rename both tables to a free name; return the table state."""

    def keep(self) -> None:
        """Store `remembered`, outside of a window."""

    def commit(self, target_state: TargetState) -> None:
        """Commit the window, and publish the LSN of each table to readers."""

    def abort(self) -> None:
        """Discard the window, as far as it is not committed yet."""

    def close(self) -> None:
        """Close the target and release its lock."""


@contextlib.contextmanager
def window(target: Target) -> Iterator[None]:
    """Begin a window of a target, and abort it on errors."""
    target.begin()
    try:
        yield
    except BaseException:
        target.abort()
        raise
