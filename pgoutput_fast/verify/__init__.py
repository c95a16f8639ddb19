"""Prove that a target has the same rows as the server's tables.

:func:`verify` compares each table with the server while both change, and returns a report of the
rows that differ. Targets are change logs and the tables that sync writes.

>>> from pgoutput_fast.verify import verify
>>> verify(dsn, publications=["shop"], target="segments").exit_code  # doctest: +SKIP
0

``docs/explanation/verify.md`` describes how the two sides are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..apply.duckdb_file import check_memory
from ..connections import ConnectionParameters, check_publication_names
from ..errors import Argument, PgOutputError
from ..lsn import format_lsn
from ..names import parse_name, qualified, sql_name
from ..options import arguments_of
from ..policies import Policies
from ..segments.format import require_pyarrow
from ..types import TypeRegistry
from .compare import compare_all, compare_named, differences
from .moment import Changes, Moment, ServerRows, ServerTable, refusals
from .opening import open_target
from .result import Difference, Report, State, TableResult
from .states import States
from .targets import Tell, VerifiedTarget
from .texts import NotComparable, NotTheTable, may_be_changed

if TYPE_CHECKING:
    from .distributed_states import VerifyEngine
    from .sums import Rows

__all__ = ["Difference", "Report", "TableResult", "VerifyProgress", "verify"]

_PAUSE = 0.2  # least seconds between two reads of the target's position
_PART = 9  # a pause is this many times as long as the read before: a sync has to write meanwhile

_POLICIES = (
    "the values that differ may have been changed by a policy, such as infinity=null: give verify "
    "the policies of the sync that wrote the target"
)


class VerifyProgress(NamedTuple):
    """What a verification is doing.

    Attributes
    ----------
    doing : str
        "making a snapshot", "waiting for the target", "reading the segments", "reading the
        target", "reading what changed", "comparing", "looking again". While it waits, the LSNs of
        the target and the server follow.
    table : str
        The table's name; "" if the step concerns no single table.
    done, total : int
        Number of finished tables and of all tables; 0 while not known.
    rows : int
        Changes that this step has read so far, of one table if `table` is given.
    """

    doing: str
    table: str
    done: int
    total: int
    rows: int = 0


def verify(
    dsn: str | None = None,
    *,
    publications: Sequence[str],
    target: str,
    segments: str | None = None,
    tables: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    timeout: float = 60.0,
    rounds: int = 10,
    shown: int = 10,
    storage_options: Mapping[str, str] | None = None,
    engine: VerifyEngine | None = None,
    policies: Policies | None = None,
    duckdb_memory: int | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    **keywords: object,
) -> Report:
    """Compare the published tables of a server with the tables of a target.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL; by default as libpq's variables say. The role needs the
        right to replicate, and to read the tables.
    publications : list or tuple of str
        The publications of the target's slot.
    target : str
        A change log; ``duckdb:`` and the file of a sync; or the Delta tables of a sync: a
        directory, or a URL such as ``s3://bucket/lake``.
    segments : str, optional
        The change log from which a sync keeps the target up to date. Only the change log shows
        whether anything was committed since the target's last transaction. The default is the
        change log beside the target, if it has the default name.
    tables : iterable of str, optional
        Names with their schemas, as SQL writes them: ``public.orders``, ``public."My Table"``. The
        default is all published tables for which the target was made.
    exclude : iterable of str
        Columns that are not compared: ``schema.table.column``, as SQL writes them.
    timeout : float
        Seconds to wait until the target reaches the position at which the server was read, and to
        wait for the server's stream.
    rounds : int
        How often to compare rows again if they changed while they were compared.
    shown : int
        How many differing rows to describe for each table.
    storage_options : mapping of str to str, optional
        Options of delta-rs for object storage, as for `sync`.
    engine : Engine, optional
        What reads the rows of Delta tables, such as a :class:`pgoutput_fast.spark.SparkEngine`. The
        default is this process.
    policies : Policies, optional
        The policies of the sync that keeps the target. They apply to the server's values too.
    duckdb_memory : int, optional
        DuckDB's memory limit in this process, in bytes. The default is that of `sync`.
    progress : callable, optional
        Called with a :class:`VerifyProgress`.
    **keywords
        Parameters of libpq by name.

    Returns
    -------
    Report

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses. The target can't be read, is of another cluster or
        database, or does not reach the position in time. There is no such table or column. No
        message has the password.
    TypeError
        An argument is of another type.
    """
    require_pyarrow()
    check_publication_names(publications)
    for name, number in (("rounds", rounds), ("shown", shown)):
        least = int(name == "rounds")
        if type(number) is not int or number < least:
            raise PgOutputError(
                f"{number!r} is not a number from {least} on", code="bad_option", parameter=name
            )
    if type(timeout) not in (int, float) or not timeout > 0:
        raise PgOutputError(
            f"{timeout!r} is not a number of seconds above 0",
            code="bad_option",
            parameter="timeout",
        )
    check_memory(duckdb_memory)
    if policies is not None and not isinstance(policies, Policies):
        raise TypeError(f"policies must be a Policies, not {type(policies).__name__}")
    parameters = ConnectionParameters(dsn, keywords, arguments_of(verify))

    def types() -> TypeRegistry:
        with parameters.open(replication=False) as connection, refusals("can't read the types"):
            return TypeRegistry.from_connection(connection)

    with contextlib.closing(
        open_target(target, segments, types, storage_options, engine, policies, duckdb_memory)
    ) as opened:
        run = _Verification(
            parameters, publications, opened, _Chosen(tables, exclude), timeout, shown, progress
        )
        run.compare_tables()
        for number in range(1, rounds):
            if not run.is_pending:
                break
            time.sleep(min(_PAUSE * number, 2.0))
            run.compare_pending()
        return run.report()


class _Chosen:
    """The tables and columns that the caller has selected."""

    def __init__(self, tables: Iterable[str] | None, exclude: Iterable[str]) -> None:
        for name, names in (("tables", tables), ("exclude", exclude)):
            if isinstance(names, str):
                raise TypeError(f"{name} must be a list of names, not str")
        self._tables = (
            None if tables is None else {parse_name(name, "schema.table") for name in tables}
        )
        self._exclude = {parse_name(name, "schema.table.column") for name in exclude}

    @property
    def has_names(self) -> bool:
        """Whether the caller named tables."""
        return self._tables is not None

    def take(self, server_tables: list[ServerTable]) -> list[ServerTable]:
        """Return the selected tables.

        Raises
        ------
        PgOutputError
            A table or column does not exist.
        """
        columns = {
            (table.table.namespace, table.table.name): table.columns for table in server_tables
        }
        there = ", ".join(sql_name(*name) for name in columns) or "none"
        for what, names in (("tables", self._tables or ()), ("exclude", self._exclude)):
            for name in sorted(names):
                if name[:2] not in columns:
                    raise PgOutputError(
                        f"table {sql_name(*name[:2])} is not published; published tables: {there}",
                        code="no_table",
                        parameter=what,
                        table=".".join(name[:2]),
                    )
        for namespace, table, column in sorted(self._exclude):
            published = columns[namespace, table]
            if column not in published:
                raise PgOutputError(
                    f"table {sql_name(namespace, table)} has no published column "
                    f"{sql_name(column)}; it has {', '.join(map(sql_name, published)) or 'none'}",
                    code="no_table",
                    parameter="exclude",
                    table=f"{namespace}.{table}",
                )
        return [
            table
            for table in server_tables
            if self._tables is None or (table.table.namespace, table.table.name) in self._tables
        ]

    def excluded(self, table: ServerTable) -> tuple[str, ...]:
        """Return the excluded columns of a table."""
        return tuple(
            column
            for column in table.columns
            if (table.table.namespace, table.table.name, column) in self._exclude
        )


class _Sides(NamedTuple):
    """The rows of a table on both sides, at one moment, and the compared columns."""

    table: ServerTable
    server: ServerRows
    target: Rows
    columns: tuple[str, ...]


class _Verification:
    """A verification: the result of each table so far, and the rows to compare again."""

    def __init__(
        self,
        parameters: ConnectionParameters,
        publications: Sequence[str],
        target: VerifiedTarget,
        chosen: _Chosen,
        timeout: float,
        shown: int,
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        self._parameters, self._publications = parameters, publications
        self._target, self._chosen = target, chosen
        self._timeout, self._shown = timeout, shown
        self._progress = progress
        self._lsn = self._position = 0
        self._only_in_target: tuple[str, ...] = ()
        self._results: dict[int, TableResult] = {}
        self._pending: dict[int, set[str]] = {}

    @property
    def is_pending(self) -> bool:
        """Whether any rows have to be compared again."""
        return any(self._pending.values())

    def report(self) -> Report:
        """Return the result. Rows that are still pending count as unsettled."""
        results = []
        for relation_id, result in self._results.items():
            if pending := self._pending.get(relation_id):
                state = "unsettled" if result.state == "equal" else result.state
                result = dataclasses.replace(
                    result,
                    state=state,
                    unsettled=len(pending),
                    why="rows changed each time verify read them"
                    if state == "unsettled"
                    else result.why,
                )
            results.append(result)
        return Report(self._lsn, self._position, tuple(results), self._only_in_target)

    # --- steps -----------------------------------------------------------------------------------

    def compare_tables(self) -> None:
        """Compare all rows of all tables."""
        self._target.identify()
        moment = self._moment()
        with contextlib.closing(moment):
            tables = self._chosen.take(moment.tables)
            if not self._chosen.has_names:
                tables = [table for table in tables if self._target.wants(table)]
            self._lsn = moment.lsn
            position = self._position = self._wait(moment, tables)
            relation_ids = {table.table.relation_id for table in moment.tables}
            roots = {leaf for table in moment.tables for leaf in table.table.partition_ids}
            self._only_in_target = tuple(
                sorted(
                    f"{namespace}.{name}"
                    for (namespace, name), relation_id in self._target.tables.items()
                    if relation_id not in relation_ids | roots
                )
            )
            sides = self._sides(moment, tables)
            changes = self._changes(moment, sides, position)
            for number, (relation_id, side) in enumerate(sides.items()):
                self._tell("comparing", side.table, number, len(sides))
                try:
                    result = self._first_result(side, changes[relation_id])
                except NotComparable as error:
                    result = _refused(side.table, error)
                self._results[relation_id] = result

    def compare_pending(self) -> None:
        """Compare the pending rows at a later moment."""
        self._pending = {key: names for key, names in self._pending.items() if names}
        moment = self._moment(self._pending.keys())
        with contextlib.closing(moment):
            wanted = moment.tables
            position = self._wait(moment, wanted)
            for relation_id in self._pending.keys() - {table.table.relation_id for table in wanted}:
                self._pending.pop(relation_id)
                self._unsettle(relation_id, "it is not published any more")
            before = dict(self._results)
            sides = self._sides(moment, wanted)
            for relation_id in self._pending.keys() - sides.keys():
                # `_sides` has replaced the result: take the reason, and restore the result.
                self._pending.pop(relation_id)
                why = self._results[relation_id].why
                self._results[relation_id] = before[relation_id]
                self._unsettle(relation_id, why)
            changes = self._changes(moment, sides, position)
            for number, (relation_id, side) in enumerate(sides.items()):
                self._tell("looking again", side.table, number, len(sides))
                try:
                    self._again(relation_id, side, changes[relation_id])
                except NotComparable as error:
                    self._pending.pop(relation_id)
                    self._unsettle(relation_id, error.message)

    def _moment(self, relation_ids: Collection[int] | None = None) -> Moment:
        self._tell("making a snapshot", None, 0, 0)
        return Moment(
            self._parameters,
            self._publications,
            self._timeout,
            relation_ids,
            lambda *server: _check_same(server, self._target),
        )

    def _tell(
        self, doing: str, table: ServerTable | None, done: int, total: int, rows: int = 0
    ) -> None:
        if self._progress is not None:
            name = qualified(table.table) if table is not None else ""
            self._progress(VerifyProgress(doing, name, done, total, rows))

    def _wait(self, moment: Moment, wanted: list[ServerTable]) -> int:
        """Wait until the target is at P or beyond it; return its position.

        If all selected tables are paused, it does not wait.

        Raises
        ------
        PgOutputError
            The target does not reach P in time, or is of another server.
        """
        total = len(moment.tables)
        relation_ids = {table.table.relation_id for table in wanted}
        self._tell("waiting for the target", None, 0, total)
        end = time.monotonic() + self._timeout
        target = self._target
        while True:
            begin = time.monotonic()
            confirmed = moment.confirmed(target.slot) if target.slot else 0
            position = target.refresh(
                confirmed, lambda rows: self._tell("reading the segments", None, 0, total, rows)
            )
            _check_same((moment.system_identifier, moment.database), target)
            if position >= moment.lsn:
                moment.check(position)
                return position
            if relation_ids and relation_ids <= target.paused:
                return position
            self._tell(
                f"waiting for the target to reach {format_lsn(moment.lsn)}: it is at "
                f"{format_lsn(position)}", None, 0, total,
            )  # fmt: skip
            if time.monotonic() > end:
                there = f"is at {format_lsn(position)}" if position else "is empty"
                raise PgOutputError(
                    f"the target {there}. It did not reach {format_lsn(moment.lsn)}, where verify "
                    f"read the server, within {self._timeout:g} s",
                    code="timed_out",
                    hint=("Check that its capture or sync runs", *_segments(target)),
                )
            # While verify reads a DuckDB file, sync can't write it: give sync time.
            time.sleep(max(_PAUSE, _PART * (time.monotonic() - begin)))

    def _sides(self, moment: Moment, tables: list[ServerTable]) -> dict[int, _Sides]:
        """Read both sides of tables; store the result of each table that can't be compared."""
        sides: dict[int, _Sides] = {}
        for number, table in enumerate(tables):

            def tell(rows: int, table: ServerTable = table, number: int = number) -> None:
                self._tell("reading the target", table, number, len(tables), rows)

            tell(0)
            try:
                side = self._side(moment, table, tell)
            except NotComparable as error:
                self._results[table.table.relation_id] = _refused(table, error)
            else:
                sides[table.table.relation_id] = side
        return sides

    def _side(self, moment: Moment, table: ServerTable, tell: Tell) -> _Sides:
        if table.refused:
            raise NotComparable(table.refused)
        compared = self._target.table(table)
        excluded = self._chosen.excluded(table)
        for name in excluded:
            compared.texts.pop(name, None)
            compared.left_out.pop(name, None)
        lost = [name for name in table.key if name not in compared.texts]
        if lost:
            raise NotComparable(f"its key has {', '.join(lost)}, which can't be compared")
        if compared.left_out:
            name, why = next(iter(compared.left_out.items()))
            more = f" (and {len(compared.left_out) - 1} more)" if len(compared.left_out) > 1 else ""
            raise NotComparable(
                f"column {name}{more}: {why}; exclude "
                f"{sql_name(table.table.namespace, table.table.name, name)} to compare the others"
            )
        server = ServerRows(moment.connection, table, compared.texts)
        target = self._target.rows(table, compared, server.part_of, tell)
        return _Sides(table, server, target, tuple(compared.texts))

    def _changes(
        self, moment: Moment, sides: dict[int, _Sides], position: int
    ) -> dict[int, Changes]:
        self._tell("reading what changed", None, 0, len(sides))
        return moment.changes(
            {key: (side.table, side.server) for key, side in sides.items()},
            # A target at a later position also has changes from after P.
            max(position, self._target.furthest),
            self._timeout,
        )

    # --- results ---------------------------------------------------------------------------------

    def _first_result(self, side: _Sides, changes: Changes) -> TableResult:
        table = side.table.table
        if changes.why:
            return TableResult(table.namespace, table.name, "unsettled", changes.why)
        comparison = compare_all(side.server, side.target, changes.names)
        self._pending[table.relation_id] = set(changes.names)
        described = self._described(side, comparison.names, self._shown)
        return TableResult(
            table.namespace,
            table.name,
            "different" if comparison.names else "equal",
            self._advice(side.table, described),
            rows=comparison.rows,
            target_rows=comparison.target_rows,
            differing=len(comparison.names),
            differing_is_least=comparison.is_least,
            differences=described,
            looked_again=len(changes.names),
            excluded=self._chosen.excluded(side.table),
        )

    def _again(self, relation_id: int, side: _Sides, changes: Changes) -> None:
        if changes.why:
            self._pending.pop(relation_id)
            self._unsettle(relation_id, changes.why)
            return
        unsettled = self._pending[relation_id] & changes.names
        settled = self._pending[relation_id] - unsettled
        self._pending[relation_id] = unsettled
        differing = compare_named(side.server, side.target, settled)
        if differing:
            result = self._results[relation_id]
            room = self._shown - len(result.differences)
            described = result.differences + self._described(side, differing, room)
            self._results[relation_id] = dataclasses.replace(
                result,
                state="different",
                why=self._advice(side.table, described),
                differing=result.differing + len(differing),
                differences=described,
            )

    def _described(self, side: _Sides, names: set[str], room: int) -> tuple[Difference, ...]:
        some = sorted(names)[: max(room, 0)]
        if not some:
            return ()
        columns = {name: side.table.types[name] for name in side.columns}
        described = differences(side.server, side.target, some, columns, side.table.key)
        return tuple(described)

    def _advice(self, table: ServerTable, described: Iterable[Difference]) -> str:
        """Return a likely cause of differences, if the values suggest one; else ""."""
        changed = isinstance(self._target, States) and any(
            may_be_changed(table.types[name], here)
            for difference in described
            for name, (here, _) in difference.columns.items()
        )
        return _POLICIES if changed else ""

    def _unsettle(self, relation_id: int, why: str) -> None:
        result = self._results[relation_id]
        if result.state == "equal":
            self._results[relation_id] = dataclasses.replace(result, state="unsettled", why=why)


def _refused(table: ServerTable, error: NotComparable) -> TableResult:
    """Return the result for a table that can't be compared."""
    state: State = "different" if isinstance(error, NotTheTable) else "not compared"
    state = "unsettled" if table.is_moving else state
    return TableResult(table.table.namespace, table.table.name, state, error.message)


def _segments(target: VerifiedTarget) -> tuple[str | Argument, ...]:
    """Return a hint to give `segments`, if the target's change log is not known."""
    if target.slot:
        return ()
    why = (
        ". If the target has all commits, only its change log shows that: give the directory of "
        "the capture or the sync as "
    )
    return why, Argument("segments")


def _check_same(server: tuple[str, str], target: VerifiedTarget) -> None:
    """Refuse a target of another server or database; an empty target fits any."""
    system_identifier, database = server
    if target.system_identifier not in ("", system_identifier):
        raise PgOutputError(
            f"the target belongs to another server: its system identifier is "
            f"{target.system_identifier!r}, and the server's is {system_identifier!r}",
            code="another_history",
            hint=("Give ", Argument("dsn"), " of the target's server"),
        )
    if target.database not in ("", database):
        raise PgOutputError(
            f"the target has tables of database {target.database!r}, and this is database "
            f"{database!r} of the same server",
            code="another_history",
            hint=("Give ", Argument("dsn"), f" of database {target.database!r}"),
        )
