"""The publications that are examined, and their tables, as the catalogue has them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import printable
from ..names import qualified
from ._examined import quoted

if TYPE_CHECKING:
    from ._examined import Examined


class Column(NamedTuple):
    """A column of a table.

    Fields: number (its attnum), name, generated ("s" stored, "v" virtual, "" not generated).
    """

    number: int
    name: str
    generated: str


@dataclasses.dataclass
class Table:
    """A table that is published, or that one might take to be.

    Attributes
    ----------
    oid : int
    namespace, name : str
    kind, persistence, identity : str
        relkind, relpersistence and relreplident of pg_class.
    parent : int or None
        The partitioned table of which it is a partition.
    toast, row_security, select, usage : bool
        Whether it may have values out of line; whether row-level security applies to the role;
        whether the role may read it; and use its schema.
    columns : tuple of Column
    primary_key : bool
    key : frozenset of str
        The columns of the replica identity; empty if there is none.
    candidate : str or None
        The name of an index that could be the replica identity.
    """

    oid: int
    namespace: str
    name: str
    kind: str
    persistence: str
    identity: str
    parent: int | None
    toast: bool
    row_security: bool
    select: bool
    usage: bool
    columns: tuple[Column, ...] = ()
    primary_key: bool = False
    key: frozenset[str] = frozenset()
    candidate: str | None = None

    @property
    def sql(self) -> str:
        """Its name as SQL has it."""
        return quoted(self.namespace, self.name)

    @property
    def shown(self) -> str:
        """Its name as a person reads it."""
        return printable(qualified(self))

    @property
    def has_rows(self) -> bool:
        """Whether rows of it are sent."""
        return self.kind == "r" and self.persistence == "p"

    @property
    def lacks_identity(self) -> bool:
        """Whether the server refuses its published updates and deletes."""
        return self.identity != "f" and not self.key

    def names(self, numbers: Any) -> frozenset[str]:
        """The names of columns by their numbers."""
        wanted = set(numbers)
        return frozenset(column.name for column in self.columns if column.number in wanted)


class Entry(NamedTuple):
    """A table that a publication names.

    Fields: columns (its column list; None for all), filter (its row filter as SQL; None without
    one), filtered (the columns in it).
    """

    columns: frozenset[str] | None
    filter: str | None
    filtered: frozenset[str]


@dataclasses.dataclass
class Publication:
    """A publication.

    Attributes
    ----------
    oid : int
    name : str
    all_tables, via_root : bool
    actions : dict of str to bool
        "insert", "update", "delete" and, where the server has it, "truncate" → whether published.
    generated : str or None
        pubgencols: "n" or "s"; None before PostgreSQL 18.
    entries : dict of int to Entry
        OID of each table that it names → how it publishes it.
    members : set of int
        OIDs of all its tables: partitions of its tables too, and those that are not sent, as they
        are unlogged or foreign.
    """

    oid: int
    name: str
    all_tables: bool
    via_root: bool
    actions: dict[str, bool]
    generated: str | None
    entries: dict[int, Entry] = dataclasses.field(default_factory=dict)
    members: set[int] = dataclasses.field(default_factory=set)

    @property
    def sends_old(self) -> bool:
        """Whether it publishes updates or deletes, which need a replica identity."""
        return self.actions["update"] or self.actions["delete"]


class Published:
    """The publications that are examined, and all tables that they concern.

    Parameters
    ----------
    server : Examined

    Attributes
    ----------
    publications : tuple of Publication
        Those that were named, or all.
    tables : dict of int to Table

    Raises
    ------
    psycopg.Error
        The server refuses a query.
    """

    def __init__(self, server: Examined) -> None:
        found = server.objects(
            "SELECT to_jsonb(p) || jsonb_build_object('oid', p.oid::bigint)"
            " FROM pg_catalog.pg_publication AS p ORDER BY p.pubname"
        )
        self.publications = tuple(
            Publication(
                oid=row["oid"],
                name=row["pubname"],
                all_tables=row["puballtables"],
                via_root=row.get("pubviaroot", False),
                actions={
                    action: row[f"pub{action}"]
                    for action in ("insert", "update", "delete", "truncate")
                    if f"pub{action}" in row
                },
                generated=row.get("pubgencols"),
            )
            for row in found
            if server.given is None or row["pubname"] in server.given
        )
        oids = [one.oid for one in self.publications]
        by_oid = {one.oid: one for one in self.publications}
        for oid, member in server.rows(_members(server.version), oids):
            by_oid[oid].members.add(member)
        members = sorted({member for one in self.publications for member in one.members})
        self.tables = _tables(server, members)
        for oid, table, attributes, expression, tree in server.rows(_entries(server.version), oids):
            if table in self.tables:
                of = self.tables[table]
                by_oid[oid].entries[table] = Entry(
                    None if attributes is None else of.names(attributes),
                    expression,
                    of.names(tree),
                )

    def sent(self, publication: Publication) -> list[Table]:
        """The tables whose rows a publication sends, partitions by themselves."""
        return [table for table in self.members(publication) if table.has_rows]

    def members(self, publication: Publication) -> list[Table]:
        """All tables that a publication has."""
        # One that was dropped since is not among the tables.
        return self._sorted(self.tables[oid] for oid in publication.members if oid in self.tables)

    def _sorted(self, tables: Any) -> list[Table]:
        return sorted(tables, key=qualified)

    def all_sent(self) -> list[Table]:
        """The tables whose rows any of the publications sends."""
        oids = {table.oid for one in self.publications for table in self.sent(one)}
        return self._sorted(self.tables[oid] for oid in oids)

    def not_sent(self) -> list[Table]:
        """Tables without partitions that are members, and whose rows are not sent."""
        oids = {table.oid for one in self.publications for table in self.members(one)}
        found = (self.tables[oid] for oid in oids)
        return self._sorted(one for one in found if not one.has_rows and one.kind != "p")

    def read(self) -> list[Table]:
        """The tables that a snapshot reads: partitions themselves, also if their root is sent."""
        oids = {table.oid for one in self.publications for table in self.sent(one)}
        return self._sorted(self.tables[oid] for oid in oids)

    def root(self, publication: Publication, table: Table) -> Table:
        """The topmost table that the publication has, of which `table` is a partition; or it."""
        top = one = table
        while one.parent in self.tables:
            one = self.tables[one.parent]
            if one.oid in publication.members:
                top = one
        return top

    def entry(self, publication: Publication, table: Table) -> Entry:
        """How a publication sends a table: that of its root where it goes by the root."""
        of = self.root(publication, table) if publication.via_root else table
        return publication.entries.get(of.oid, Entry(None, None, frozenset()))


# All tables that publications have. Partitions are found by their parents, as partitioned tables
# are published from PostgreSQL 13 on.
def _members(version: int) -> Any:
    schemas = """
    UNION SELECT n.pnpubid, c.oid FROM pg_catalog.pg_publication_namespace AS n
    JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.pnnspid
    WHERE c.relkind IN ('r', 'p')
    """
    # Objects that initdb made have OIDs below 16384.
    return f"""
    WITH RECURSIVE member(pub, rel) AS (
        SELECT * FROM (
            SELECT p.oid, c.oid FROM pg_catalog.pg_publication AS p, pg_catalog.pg_class AS c
            WHERE p.puballtables AND c.relkind IN ('r', 'p') AND c.oid >= 16384
            UNION SELECT prpubid, prrelid FROM pg_catalog.pg_publication_rel
            {schemas if version >= 150000 else ""}
        ) AS listed(pub, rel)
        UNION
        SELECT m.pub, i.inhrelid FROM member AS m
        JOIN pg_catalog.pg_inherits AS i ON i.inhparent = m.rel
        JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid WHERE c.relispartition
    )
    SELECT pub::bigint, rel::bigint FROM member WHERE pub = ANY(%s::oid[])
    """  # noqa: S608 - of constants


def _entries(version: int) -> Any:
    if version < 150000:
        return """
        SELECT prpubid::bigint, prrelid::bigint, NULL, NULL, ARRAY[]::int[]
        FROM pg_catalog.pg_publication_rel WHERE prpubid = ANY(%s::oid[])
        """
    # No function tells which columns an expression has; its tree names their numbers.
    return """
    SELECT prpubid::bigint, prrelid::bigint, prattrs::int2[],
        pg_catalog.pg_get_expr(prqual, prrelid),
        ARRAY(SELECT found[1]::int
            FROM pg_catalog.regexp_matches(prqual::text, ':varattno (\\d+)', 'g') AS found)
    FROM pg_catalog.pg_publication_rel WHERE prpubid = ANY(%s::oid[])
    """


_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
    c.relreplident::text,
    CASE WHEN c.relispartition THEN (
        SELECT i.inhparent::bigint FROM pg_catalog.pg_inherits AS i
        WHERE i.inhrelid = c.oid ORDER BY i.inhseqno LIMIT 1) END,
    c.reltoastrelid <> 0, pg_catalog.row_security_active(c.oid),
    pg_catalog.has_table_privilege(c.oid, 'SELECT'),
    pg_catalog.has_schema_privilege(n.oid, 'USAGE')
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = ANY(%s::oid[])
"""


def _columns(version: int) -> Any:
    generated = "attgenerated::text" if version >= 120000 else "''"
    return f"""
    SELECT attrelid::bigint, attnum, attname::text, {generated} FROM pg_catalog.pg_attribute
    WHERE attrelid = ANY(%s::oid[]) AND attnum > 0 AND NOT attisdropped ORDER BY attrelid, attnum
    """  # noqa: S608 - of constants


def _indexes(version: int) -> Any:
    count = "indnkeyatts" if version >= 110000 else "indnatts"
    return f"""
    SELECT i.indrelid::bigint, c.relname::text, i.indisprimary, i.indisreplident,
        i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
            AND NOT EXISTS (
                SELECT FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = i.indrelid
                AND a.attnum = ANY(keys.numbers) AND NOT a.attnotnull),
        keys.numbers
    FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid,
    LATERAL (SELECT (i.indkey::int2[])[0:i.{count} - 1]) AS keys(numbers)
    WHERE i.indrelid = ANY(%s::oid[]) AND i.indisunique AND i.indimmediate
    ORDER BY i.indrelid, pg_catalog.array_length(keys.numbers, 1), c.relname
    """  # noqa: S608 - of constants


def _tables(server: Examined, oids: list[int]) -> dict[int, Table]:
    tables = {row[0]: Table(*row) for row in server.rows(_TABLES, oids)}
    columns: dict[int, list[Column]] = {oid: [] for oid in tables}
    for oid, *column in server.rows(_columns(server.version), oids):
        if oid in columns:
            columns[oid].append(Column(*column))
    for oid, found in columns.items():
        tables[oid].columns = tuple(found)
        if tables[oid].identity == "f":
            tables[oid].key = frozenset(column.name for column in found)
    for oid, name, primary, identity, suitable, numbers in server.rows(
        _indexes(server.version), oids
    ):
        table = tables.get(oid)
        if table is None:
            continue
        table.primary_key |= primary
        if suitable and not primary and table.candidate is None:
            table.candidate = name
        if (table.identity == "i" and identity) or (table.identity == "d" and primary):
            table.key = table.names(numbers)
    return tables
