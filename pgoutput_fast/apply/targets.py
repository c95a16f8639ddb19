"""What tables are kept up to date in: the interface, and what is stored of each table.

A target has two tables for each of the server's, or one of them: in `changes` all its changes, in
`state` the rows that it has. With the rows it stores up to where they go. So whatever is cut short,
the next call sees what is there, and leaves out what would come twice.
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
"""Of what a target stores beside the tables."""

Keep = Literal["both", "state", "changes"]
"""Which tables a target has for each of the server's."""


class TargetOrigin(NamedTuple):
    """The database from which the changes in a target come."""

    system_identifier: str
    database: str


class StoredColumn(NamedTuple):
    """A column of a state table.

    Attributes
    ----------
    name : str
        The server's name.
    stored : str
        The target's name for it, which differs from every other one also where case is folded.
    type_id, type_modifier : int
        Of its type on the server.
    form : str
        The type of its values in Arrow, as the target takes them; and what else they have in
        common, as of `ColumnVersion.form`.
    number : int or None
        Its number on the server, which stays when it is renamed; None: it was not known.
    """

    name: str
    stored: str
    type_id: int
    type_modifier: int
    form: str
    number: int | None = None


class Pause(NamedTuple):
    """Why a table waits with its changes in the change log, and since when.

    Fields: reason, since (seconds since 1970).
    """

    reason: str
    since: float


class Gap(NamedTuple):
    """Changes that a change table will never get.

    Fields: start (it has what was committed before this LSN), end (and from this LSN on).
    """

    start: int
    end: int


class Held(NamedTuple):
    """What a target has of a table.

    Attributes
    ----------
    relation_id : int
    namespace, name : str
        The newest that the stream or the schema history told.
    stored : str
        The name of its two tables in the target: ``public.accounts``.
    version : int
        Of its change table, from 1; 0: the target has neither table yet, as the first changes of
        the table are paused.
    lsn : int
        It has what was committed before this LSN.
    copy_lsn : int
        The LSN of the snapshot with which it began; 0: it began empty.
    commit_time : int or None
        When the last change was committed that it has, in microseconds since 1970; None: it has no
        change yet.
    stale : str or None
        Why the state is no longer kept up to date, until the table is copied again.
    columns : tuple of StoredColumn
        Of the state table, in its order.
    gap : int or None
        Another program has changed the change table: its changes before this LSN may be others than
        the server's. None: that did not happen.
    paused : Pause or None
        Why its changes wait in the change log, until somebody has acted; None: they do not.
    gaps : tuple of Gap
        What its change table lacks for good.
    schema_lsn : int
        Its name and its columns are those that the server's table had at this LSN.
    """

    relation_id: int
    namespace: str
    name: str
    stored: str
    version: int = 1
    lsn: int = 0
    copy_lsn: int = 0
    commit_time: int | None = None
    stale: str | None = None
    columns: tuple[StoredColumn, ...] = ()
    gap: int | None = None
    paused: Pause | None = None
    gaps: tuple[Gap, ...] = ()
    schema_lsn: int = 0


class AddedColumn(NamedTuple):
    """A column comes to a state table.

    Fields: column (its stored name), value (pyarrow.Array of length 1: what rows have that are
    older than the column).
    """

    column: str
    value: pa.Array


class Retyped(NamedTuple):
    """A column's type becomes one that has all of its values. Fields: column, type."""

    column: str
    type: pa.DataType


class Removed(NamedTuple):
    """A column is dropped, with the values that it had. Field: column."""

    column: str


class Renamed(NamedTuple):
    """A column has another name. Fields: column, name (which is free when its turn comes)."""

    column: str
    name: str


Alteration = AddedColumn | Retyped | Removed | Renamed


class Stored(NamedTuple):
    """What a target has.

    Attributes
    ----------
    lsn : int
        Everything before was looked at; 0 in a new target.
    tables : dict of int to Held
        By relation id.
    newest : Commit or None
        That of the newest transaction that was looked at, whatever its tables are; None: it is not
        known.
    is_new : bool
        Whether the target was made just now.
    policies : Policies or None
        By which the rows were written that are there; None: there are none.
    """

    lsn: int
    tables: dict[int, Held]
    newest: CommitRecord | None = None
    is_new: bool = False
    policies: Policies | None = None


_NUMERIC = 1700
DELETED_AT = pa.timestamp("us", "UTC")
"""The type of the column in which soft deletes are marked."""


class Kept(NamedTuple):
    """What a target keeps to from its first call on, as its tables are made by it.

    Attributes
    ----------
    soft_deletes : str or None
        The column of state tables that says when a row was deleted, null for those that are there;
        None: rows that are deleted go.
    tables : tuple of str or None
        Of `sync`. The changes of other tables are passed over, and are not there later.
    policies : Policies or None
        By which values were written; None: a call does not say, and takes those of the target.
    keep : {"both", "state", "changes"} or None
        Which tables there are; None: as of `policies`, and both in a new target.
    changes_policies : bool
        Whether a call may have other policies than the target.
    """

    soft_deletes: str | None = None
    tables: tuple[str, ...] | None = None
    policies: Policies | None = None
    keep: Keep | None = None
    changes_policies: bool = False

    @property
    def has_changes(self) -> bool:
        """Whether there are change tables."""
        return self.keep != "state"

    @property
    def has_state(self) -> bool:
        """Whether there are state tables."""
        return self.keep != "changes"

    @property
    def listed(self) -> list[str] | None:
        """The tables, as a list."""
        return None if self.tables is None else [*self.tables]

    @property
    def policy_texts(self) -> list[str]:
        """The policies, as a target stores them."""
        return policy_texts(self.policies or Policies())

    @classmethod
    def of(
        cls,
        soft_deletes: str | None,
        tables: Sequence[str] | None,
        policies: Sequence[str],
        keep: Keep,
    ) -> Kept:
        """Return what a target has stored."""
        wanted = None if tables is None else tuple(tables)
        return cls(soft_deletes, wanted, policies_of(policies), keep)

    def is_like(self, found: Kept) -> bool:
        """Whether a target was made with what a call asks for."""
        policies = self.policies in (None, found.policies)
        return policies and self.keep in (None, found.keep) and self[:2] == found[:2]

    def check(self, where: str, found: Kept) -> Kept:
        """Refuse a target that was made otherwise; what holds for it from now on.

        Parameters
        ----------
        where : str
            What errors call the target.
        found : Kept
            What it was made with.
        """
        keep = self.keep or found.keep
        for name, given, made in (
            ("soft_deletes", self.soft_deletes, found.soft_deletes),
            ("tables", self.tables, found.tables),
            ("keep", keep, found.keep),
        ):
            if given != made:
                shown = [*made] if isinstance(made, tuple) else made
                had = "without it" if made is None else f"with {shown!r}"
                fix = ("Leave out ", Argument(name)) if made is None else (
                    "Give ", Argument(name, shown)
                )  # fmt: skip
                raise PgOutputError(
                    f"{where} was made {had}, and keeps to that", code="bad_option", parameter=name,
                    hint=(*fix, ", or begin anew in another target"),
                )  # fmt: skip
        if self.policies is None:
            return self._replace(policies=found.policies, keep=keep)
        if self.policies != found.policies and not self.changes_policies:
            made, given = (" ".join(one.policy_texts) or "the defaults" for one in (found, self))
            raise PgOutputError(
                f"the rows in {where} were written by other policies ({made}) than this call gives "
                f"({given})",
                code="bad_option",
                parameter="policies",
                hint=(
                    "Leave out ",
                    Argument("policies"),
                    " to go on with those of the target. With ",
                    Argument("change_policies", True),
                    (
                        " those of this call hold from now on, and "
                        "tables with a column that they concern get a new snapshot"
                    ),
                ),
            )
        return self._replace(keep=keep)

    def concerned(self, made: Policies, held: Held) -> str | None:
        """Why a table needs a new snapshot when other policies hold; None: its rows stay right.

        Parameters
        ----------
        made : Policies
            By which its rows were written.
        held : Held
        """
        now = self.policies or Policies()
        for name in Policies.__dataclass_fields__:
            before, after = getattr(made, name), getattr(now, name)
            # With "error" there is no value yet that another choice for values would change.
            if before == after or (before == "error" and after in ("null", "clamp", "replace")):
                continue
            for column in held.columns:
                if _depends(column, name):
                    return f"the policy {name} was {before}, is {after}, and concerns {column.name}"
        return None


_ON_POLICIES = {
    oid: {*type_.policies, *({"arrays"} if is_array else ())}
    for type_ in BUILTIN_TYPES
    for oid, is_array in ((type_.oid, False), (type_.array_oid, True))
    if oid
}
_SUBTYPES = {oid: type_.element for type_ in BUILTIN_TYPES if type_.element
             for oid in (type_.oid, type_.array_oid)}  # fmt: skip


def _depends(column: StoredColumn, policy: str) -> bool:
    """Whether values of a column depend on a policy; those of users' types may."""
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
"""How the name of a target begins that keeps change tables alone, as plain Parquet files."""
_KINDS = {"delta": "Delta tables", "parquet": "plain Parquet files", "iceberg": "Iceberg tables"}


def check_kind(where: str, kind: str, made: str) -> None:
    """Refuse change tables of another kind than a target was made with."""
    if made != kind:
        fix: list[str | Argument] = []
        if "parquet" in (kind, made):
            fix = ["Give ", Argument("target", f"{PARQUET}{where}" if made == "parquet" else where)]
        if kind == "iceberg":
            fix += [" without " if fix else "Leave out ", Argument("iceberg")]
        elif made == "iceberg":
            fix += [" with " if fix else "Give ", Argument("iceberg")]
        raise PgOutputError(
            f"the change tables in {where} are {_KINDS[made]}, and a target keeps to the kind with "
            "which it began",
            code="bad_option",
            hint=(*fix, ", or begin anew in another target"),
        )


DELETED = "its table of rows was deleted from the target"
"""Why a table is stale whose state table is not there."""
PUT_BACK = "an earlier state of its table of rows was put back into the target"
CHANGED = "another program changed its table of rows"
CHANGES_DELETED = "its change table was deleted from the target"
CHANGES_PUT_BACK = "an earlier state of its change table was put back into the target"
OTHER_HISTORY = (
    "the target has what did not happen by the directory: an earlier state of that was put back, "
    "and of the server"
)
RENAMED = "it has another name, and object storage can't move its table of rows there"
LOST = (DELETED, PUT_BACK, CHANGED, CHANGES_DELETED, CHANGES_PUT_BACK, OTHER_HISTORY, RENAMED)
"""Begin the reasons of tables of which the target has something else than a sync had written."""
CHANGES_ALONE = "its rows before the capture are not known"
"""Why a table without a snapshot has no state table."""


class IncompleteError(PgOutputError):
    """Changes do not fit what a state table has."""

    code = "stale"


class TargetError(PgOutputError):
    """A target refuses as a whole: no other table of it could be written either."""


class TableError(PgOutputError):
    """A target refuses to write one table, and tells so later than it was given the rows.

    Attributes
    ----------
    held : Held
    """

    def __init__(self, held: Held, text: str, **fields: Any) -> None:
        super().__init__(text, **fields)
        self.held = held


class ConflictError(PgOutputError):
    """Another program has written a table at the same time; nothing was done."""

    code = "conflict"


class StoppedError(RetryableError):
    """The sync was told to end while it waited for the target."""

    code = "stopped"


class NotForeseenError(Exception):
    """A window is not as it was taken to be by those that have written parts of it."""


class ChangeWriter(Protocol):
    """Writes a change table."""

    @property
    def lsn(self) -> int:
        """What was committed before this is there."""

    @property
    def copy_lsn(self) -> int:
        """The LSN of the newest snapshot that is there."""

    @property
    def gap(self) -> int | None:
        """As of `Held`, once it is committed."""

    def fits(self, schema: pa.Schema) -> bool:
        """Whether the table can have these changes: no column that it has is of another type."""

    def append(self, changes: pa.RecordBatch) -> None:
        """Write changes behind those that are there.

        Parameters
        ----------
        changes : pyarrow.RecordBatch
            The columns of a ChangeBatch, those of `before` and `after` by their stored names. They
            may differ from call to call in columns that are added or left out.
        """

    def commit(self, held: Held) -> None:
        """Have what was written stand, up to ``held.lsn`` and with the snapshot of `copy_lsn`."""


class NoChanges:
    """See `ChangeWriter`: of a target without change tables."""

    gap = None

    def __init__(self, held: Held) -> None:
        self.lsn, self.copy_lsn = held.lsn, held.copy_lsn

    def fits(self, schema: pa.Schema) -> bool:
        """See `ChangeWriter`."""
        del schema
        return True

    def append(self, changes: pa.RecordBatch) -> None:
        """See `ChangeWriter`."""

    def commit(self, held: Held) -> None:
        """See `ChangeWriter`."""


class StateWriter(Protocol):
    """Writes a state table."""

    @property
    def lsn(self) -> int:
        """As of `ChangeWriter`."""

    @property
    def copy_lsn(self) -> int:
        """As of `ChangeWriter`."""

    def load(self, schema: pa.Schema) -> None:
        """Begin to replace all rows by those of a snapshot, of these columns."""

    def append(self, rows: pa.RecordBatch) -> None:
        """Write rows of the snapshot."""

    def loaded(self, held: Held) -> None:
        """Have the rows of the snapshot stand."""

    def create(self, schema: pa.Schema) -> None:
        """Make the table, without rows."""

    def apply(self, alterations: Sequence[Alteration], net: NetChanges, held: Held) -> None:
        """Alter the table, then do to it what changes come to, and store how far it is: one step.

        Raises
        ------
        IncompleteError
            The changes do not fit what is there. Nothing was done.
        """


class Target(Protocol):
    """Where tables are kept up to date."""

    threads: int
    """So many tables are written at a time."""
    is_transactional: bool
    """Whether a window is one transaction, of which nothing can be written behind an error."""
    kept: Kept
    """`state` is not called for a target without state tables."""
    troubles: dict[int, PgOutputError]
    """Why tables can't be written, by relation id, as was met apart from their windows."""

    def claim(self) -> None:
        """Keep other syncs from writing it, until it is closed.

        Raises
        ------
        PgOutputError
            Another one writes it.
        """

    def open(self, origin: TargetOrigin) -> Stored:
        """Find out what is there; a new target is made. It is claimed.

        Raises
        ------
        PgOutputError
            It is something else's, or has tables of another database; or another process writes it.
        """

    def peek(self, origin: TargetOrigin) -> Stored:
        """Find out what is there, without making or claiming anything.

        Raises
        ------
        PgOutputError
            As of `open`, but for another process that writes it.
        """

    def retry(self, held: Held) -> None:
        """Look at a table again that is paused.

        Raises
        ------
        PgOutputError
            It still can't be written.
        """

    def begin(self) -> None:
        """Begin a window: changes that are written together."""

    def changes(self, held: Held) -> ChangeWriter:
        """What writes the change table of a table in this window."""

    def state(self, held: Held) -> StateWriter:
        """What writes its state table."""

    def shown(self, stored: str) -> str:
        """The name under which people find the tables that have a name in it."""

    def begun(self, held: Held) -> Held:
        """What is held of a table that begins under its stored name, which is free."""

    def rename(self, held: Held, stored: str) -> Held:
        """Have both tables by another name, which is free; what is held of them then."""

    def keep(self) -> None:
        """Store what `kept` has now, outside of a window."""

    def commit(self, stored: Stored) -> None:
        """End the window: all of it stands, and readers see how far each table is."""

    def abort(self) -> None:
        """Give up what can be given up of the window."""

    def close(self) -> None:
        """Let go of the target."""


@contextlib.contextmanager
def window(target: Target) -> Iterator[None]:
    """A window of a target, which is given up on errors."""
    target.begin()
    try:
        yield
    except BaseException:
        target.abort()
        raise
