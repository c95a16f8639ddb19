"""Lock the tables of a snapshot, find tables that changed since, and plan the ranges to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg import sql

from ..connections import server_error
from ..errors import PgOutputError, RetryableError
from ..names import qualified, sql_name
from ..publications import Attribute, read_attributes, row_filters
from .imported import (
    ADVICE,
    SEE_DOCTOR,
    CopyPlan,
    CopySource,
    SnapshotRange,
    SnapshotTable,
    ask,
    asking,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .imported import Reader
    from .published import PublishedTable

_RENAMES = 5  # how often a table may be renamed while it is locked
_HEAP = 2  # the OID of the access method heap; only its tables are copied in ranges of blocks
_MOST_RANGES = 1 << 31  # a range's number is the upper half of an int64, `seq`
_ROW_SECURITY = (
    "Give the role the attribute: ALTER ROLE … BYPASSRLS. Or let the table's owner take the "
    "snapshot, if the table has no FORCE ROW LEVEL SECURITY. Row security hides rows from the role"
)

_NOW = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relfilenode::bigint, c.relam::bigint,
    c.reltuples::float8
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = ANY(%s::oid[])
"""
_SIZES = """
SELECT found.oid::bigint, found.bytes / pg_catalog.current_setting('block_size')::int, found.bytes
FROM (
    SELECT oid, pg_catalog.pg_relation_size(oid::pg_catalog.regclass) AS bytes
    FROM pg_catalog.unnest(%s::oid[]) AS wanted(oid)
) AS found
"""
_RIGHTS = """
SELECT pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
    pg_catalog.row_security_active(c.oid)
FROM pg_catalog.pg_class AS c WHERE c.oid = ANY(%s::oid[])
"""


class Now(NamedTuple):
    """A table as it is now, not as the snapshot sees it."""

    namespace: str
    name: str
    filenode: int
    access_method: int
    rows: float


class Locking:
    """Locks tables on the first connection, and checks that they are as the snapshot has them.

    Parameters
    ----------
    reader : Reader
        The first connection.
    beside : psycopg.Connection
        A connection that sees what is committed now. It must not touch the tables: if an ALTER
        TABLE waits for the first connection, this one would wait for ever.
    timeout : float
        Seconds to wait for the lock of each table.
    check : callable
        Called between two tables. It may raise.
    refused : dict of int to PgOutputError, optional
        See `open_snapshot`.
    """

    def __init__(
        self,
        reader: Reader,
        beside: psycopg.Connection[tuple[object, ...]],
        timeout: float,
        check: Callable[[], None],
        refused: dict[int, PgOutputError] | None,
    ) -> None:
        self._reader, self._beside = reader, beside
        self._can_range = beside.info.server_version >= 140000
        self._timeout, self._check = timeout, check
        self._refused = refused
        self._errors: dict[int, PgOutputError] = {}  # by the OID that is locked

    def plans(
        self,
        published: Sequence[PublishedTable],
        lost: dict[int, str],
        blocks: int,
    ) -> Iterator[CopyPlan]:
        """Yield how to copy each table, in ranges of `blocks` blocks.

        Put tables that changed since the snapshot into `lost`, with the reason.
        """
        # Lock a root before its partitions, as ALTER TABLE does. Another order could deadlock.
        wanted = [
            oid
            for table in published
            for oid in dict.fromkeys(
                [table.relation_id, *(leaf.relation_id for leaf in table.leaves)]
            )
        ]
        now, reasons = self._locked(wanted)
        with asking("can't read the catalogue", self._beside):
            columns = {
                oid: {attribute.number: attribute for attribute in attributes}
                for oid, attributes in read_attributes(self._beside, list(now)).items()
            }
        with asking("can't read the catalogue", self._reader.connection):
            sizes = {oid: sizes for oid, *sizes in ask(self._reader.connection, _SIZES, list(now))}
            for table in published:
                oids = [table.relation_id, *(leaf.relation_id for leaf in table.leaves)]
                if self._refused is not None and (
                    errors := [self._errors[oid] for oid in oids if oid in self._errors]
                ):
                    self._refused[table.relation_id] = errors[0]
                    continue
                reason = next((reasons[oid] for oid in oids if oid in reasons), None)
                reason = reason or _change(table, now, columns)
                if reason is not None:
                    lost[table.relation_id] = reason
                    continue
                filter_ = self._filter(table)
                sources = {
                    leaf.relation_id: CopySource(
                        sql.Identifier(now[leaf.relation_id].namespace, now[leaf.relation_id].name),
                        _selected(
                            [
                                columns[leaf.relation_id][column.number].name
                                for column in leaf.columns
                            ],
                            table.formats,
                        ),
                        filter_,
                        table.formats,
                    )
                    for leaf in table.leaves
                }
                yield _planned(table, sources, now, sizes, blocks if self._can_range else None)

    def _locked(self, wanted: Sequence[int]) -> tuple[dict[int, Now], dict[int, str]]:
        """Lock tables; return the locked ones as they are now, and why others are not locked."""
        tables: dict[int, Now] = {}
        reasons: dict[int, str] = {}
        waiting = list(wanted)
        for _ in range(_RENAMES):
            before = self._now(waiting)
            for oid in waiting:
                if oid not in before:
                    reasons[oid] = "it was dropped"
            waiting = [oid for oid in waiting if oid in before]
            locked = set()
            for oid in waiting:
                self._check()
                try:
                    if self._lock(oid, before[oid]):
                        locked.add(oid)
                except psycopg.errors.LockNotAvailable:
                    reasons[oid] = f"other sessions kept it locked for {self._timeout} s"
                except PgOutputError as error:
                    if self._refused is None or isinstance(error, RetryableError):
                        raise
                    self._errors[oid] = error
                    reasons[oid] = str(error)
            # A lock names a table. If the table still has the name, the lock is on this table, and
            # prevents a later rename.
            tables |= {
                oid: now
                for oid, now in self._now(list(locked)).items()
                if now[:2] == before[oid][:2]
            }
            waiting = [oid for oid in waiting if oid not in tables and oid not in reasons]
        reasons |= dict.fromkeys(waiting, "it was renamed too often")
        return {oid: now for oid, now in tables.items() if oid not in reasons}, reasons

    def _now(self, oids: Sequence[int]) -> dict[int, Now]:
        with asking("can't read the catalogue", self._beside):
            return {oid: Now(*row) for oid, *row in ask(self._beside, _NOW, list(oids))}

    def _lock(self, oid: int, now: Now) -> bool:
        """Lock a table; False if it was dropped or renamed just now.

        Raises
        ------
        PgOutputError
            The role may not read the table, or the server refuses for another reason.
        psycopg.errors.LockNotAvailable
            Other sessions have locked the table.
        """
        try:
            self._reader.lock(oid, sql.Identifier(now.namespace, now.name), self._timeout)
        except psycopg.errors.LockNotAvailable:
            raise
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            return False
        except psycopg.Error as error:
            advice = ADVICE
            if error.sqlstate == "42501":
                advice = {**ADVICE, "42501": self._lacking(oid, now) or ADVICE["42501"]}
            doing = f"can't copy table {now.namespace}.{now.name}"
            raise server_error(
                doing, str(error), error.sqlstate, advice, table=f"{now.namespace}.{now.name}"
            ) from error
        return True

    def _lacking(self, oid: int, now: Now) -> str | None:
        """Return the advice if the role lacks something other than SELECT on the table."""
        with asking("can't read the catalogue", self._beside):
            rights = ask(self._beside, _RIGHTS, [oid])
        if not rights:  # the table was dropped just now
            return None
        ((uses_schema, has_row_security),) = rights
        if not uses_schema:
            return (
                f"Give the role USAGE on the schema: GRANT USAGE ON SCHEMA "
                f"{sql_name(now.namespace)} TO …. {SEE_DOCTOR}"
            )
        return _ROW_SECURITY if has_row_security else None

    def _filter(self, table: PublishedTable) -> sql.Composable | None:
        """Return the row filter as SQL, under the search_path of the COPY; None for all rows."""
        if not table.filters:
            return None
        self._reader.use_path(of_stream="t" in table.formats)
        filters = row_filters(self._reader.connection, table.relation_id, table.filters)
        return sql.SQL(" OR ").join(sql.SQL(f"({filter_})") for filter_ in filters)


def _change(
    table: PublishedTable, now: Mapping[int, Now], columns: Mapping[int, Mapping[int, Attribute]]
) -> str | None:
    """Return why a table's rows can't be copied any more; None if they can."""
    for leaf in table.leaves:
        current = now[leaf.relation_id]
        name = f"{current.namespace}.{current.name}"
        if current.filenode != leaf.filenode:
            return (
                f"{name} was truncated or rewritten (TRUNCATE, ALTER TABLE, VACUUM FULL or "
                f"CLUSTER) after the snapshot began: its rows are gone"
            )
        for column in leaf.columns:
            own = columns.get(leaf.relation_id, {}).get(column.number)
            if own is None or (own.type_id, own.modifier) != (column.type_id, column.modifier):
                return (
                    f"column {column.name!r} of {name} was dropped or altered after the snapshot "
                    "began"
                )
    return None


def _selected(names: Iterable[str], formats: str) -> sql.Composable:
    """Return the SELECT list of a COPY.

    For the text format, `format` calls the type's output function, as pgoutput does. A cast to text
    gives another text for some types. `num_nulls` replaces IS NULL, which is true for a composite
    whose fields are all NULL.
    """
    text = sql.SQL(
        "CASE WHEN pg_catalog.num_nulls({0}) OPERATOR(pg_catalog.=) 0 "
        "THEN pg_catalog.format('%s', {0}) END"
    )
    return sql.SQL(", ").join(
        sql.Identifier(name) if kind == "b" else text.format(sql.Identifier(name))
        for name, kind in zip(names, formats, strict=True)
    )


def _planned(
    table: PublishedTable,
    sources: dict[int, CopySource],
    now: Mapping[int, Now],
    sizes: Mapping[int, tuple[int, int]],
    step: int | None,
) -> CopyPlan:
    """Plan the ranges of a table, each of `step` blocks; None for one range per leaf."""
    parts: list[tuple[int, int, int | None]] = []
    for oid in sources:
        blocks, _ = sizes[oid]
        # The present size covers all rows of the snapshot: the table was not rewritten since, and
        # the lock prevents it.
        size = step if step is not None and now[oid].access_method == _HEAP else max(blocks, 1)
        parts += [
            (oid, first, first + size if first + size < blocks else None)
            for first in range(0, blocks, size)
        ]
    if len(parts) >= _MOST_RANGES:
        raise PgOutputError(
            f"table {qualified(table)} would be copied in {len(parts)} ranges",
            code="out_of_memory",
            table=qualified(table),
            hint="Give a larger range_bytes",
        )
    rows = [now[oid].rows for oid in sources]
    snapshot_table = SnapshotTable(
        relation_id=table.relation_id,
        namespace=table.namespace,
        name=table.name,
        announced=table.announced,
        rows=None if any(row_count < 0 for row_count in rows) else round(sum(rows)),
        bytes=sum(sizes[oid][1] for oid in sources),
        ranges=len(parts),
    )
    ranges = [SnapshotRange(snapshot_table, number, *part) for number, part in enumerate(parts, 1)]
    return CopyPlan(snapshot_table, sources, ranges)
