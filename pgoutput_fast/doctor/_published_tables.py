"""The examined publications and their tables, read from the system catalogue."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import printable
from ..names import qualified
from ._examined import quoted

if TYPE_CHECKING:
    from .. import publications
    from ..publications import Attribute
    from ._examined import Examined


@dataclasses.dataclass
class ExaminedTable:
    """A table of a publication, even if its rows are not sent.

    Attributes
    ----------
    oid : int
    namespace, name : str
    kind, persistence, identity : str
        relkind, relpersistence and relreplident of pg_class.
    toast, row_security, select, usage : bool
        Whether the table may store values out of line; whether row-level security applies to the
        role; whether the role may read the table; whether the role may use its schema.
    columns : tuple of Attribute
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
    toast: bool
    row_security: bool
    select: bool
    usage: bool
    columns: tuple[Attribute, ...] = ()
    primary_key: bool = False
    key: frozenset[str] = frozenset()
    candidate: str | None = None

    @property
    def sql(self) -> str:
        """The qualified name, quoted for SQL."""
        return quoted(self.namespace, self.name)

    @property
    def shown(self) -> str:
        """The qualified name, for a text."""
        return printable(qualified(self))

    @property
    def has_rows(self) -> bool:
        """Whether the server sends its rows."""
        return self.kind == "r" and self.persistence == "p"

    @property
    def lacks_identity(self) -> bool:
        """Whether the server refuses its published updates and deletes."""
        return self.identity != "f" and not self.key

    def names(self, numbers: Any) -> frozenset[str]:
        """Return the names of columns, given by number."""
        wanted = set(numbers)
        return frozenset(column.name for column in self.columns if column.number in wanted)


class ExaminedEntry(NamedTuple):
    """A table that a publication names.

    Fields: columns (its column list; None without one), has_filter (whether it has a row filter),
    filtered (the columns in the row filter).
    """

    columns: frozenset[str] | None
    has_filter: bool
    filtered: frozenset[str]


@dataclasses.dataclass
class ExaminedPublication:
    """A publication.

    Attributes
    ----------
    oid : int
    name : str
    all_tables, via_root : bool
    actions : dict of str to bool
        Whether "insert", "update", "delete" and, from PostgreSQL 11 on, "truncate" are published.
    generated : str or None
        pubgencols: "n" or "s"; None before PostgreSQL 18.
    entries : dict of int to ExaminedEntry
        The entries of the tables that it names, by OID.
    members : set of int
        OIDs of all its tables, with partitions. It also has tables whose rows are not sent, as they
        are temporary, unlogged or foreign.
    """

    oid: int
    name: str
    all_tables: bool
    via_root: bool
    actions: dict[str, bool]
    generated: str | None
    entries: dict[int, ExaminedEntry] = dataclasses.field(default_factory=dict)
    members: set[int] = dataclasses.field(default_factory=set)

    @property
    def sends_old(self) -> bool:
        """Whether it publishes updates or deletes, which need a replica identity."""
        return self.actions["update"] or self.actions["delete"]


class ExaminedPublications:
    """The examined publications, and all their tables.

    Parameters
    ----------
    server : Examined

    Attributes
    ----------
    publications : tuple of ExaminedPublication
        The given publications, or all of the database.
    tables : dict of int to ExaminedTable
        By OID.
    all_names : list of str
        The names of all publications of the database.

    Raises
    ------
    psycopg.Error
        The server refuses a query.
    """

    def __init__(self, server: Examined) -> None:
        self._all = server.publications()
        self.publications = tuple(
            ExaminedPublication(*publication[:-1])
            for publication in self._all.publications
            if server.publication_names is None or publication.name in server.publication_names
        )
        self.all_names = sorted(publication.name for publication in self._all.publications)
        for publication in self.publications:
            of = self._of(publication)
            publication.members.update(
                table.oid for table in self._all.tables.values() if self._all.has(of, table)
            )
        members = sorted(
            {member for publication in self.publications for member in publication.members}
        )
        self.tables = _tables(server, [self._all.tables[oid] for oid in members])
        for publication in self.publications:
            for oid in publication.members & self.tables.keys():
                entry = self._all.named(self._of(publication), self._all.tables[oid])
                if entry is not None:
                    table = self.tables[oid]
                    publication.entries[oid] = ExaminedEntry(
                        None if entry.columns is None else table.names(entry.columns),
                        entry.has_filter,
                        table.names(entry.filtered),
                    )

    def sent(self, publication: ExaminedPublication) -> list[ExaminedTable]:
        """Return the tables whose rows a publication sends: partitions, not their roots."""
        return [table for table in self.members(publication) if table.has_rows]

    def members(self, publication: ExaminedPublication) -> list[ExaminedTable]:
        """Return all tables of a publication."""
        # A table that was dropped meanwhile is not in `tables`.
        return self._sorted(self.tables[oid] for oid in publication.members if oid in self.tables)

    def _sorted(self, tables: Any) -> list[ExaminedTable]:
        return sorted(tables, key=qualified)

    def all_sent(self) -> list[ExaminedTable]:
        """Return the tables whose rows any of the publications sends."""
        oids = {table.oid for publication in self.publications for table in self.sent(publication)}
        return self._sorted(self.tables[oid] for oid in oids)

    def not_sent(self) -> list[ExaminedTable]:
        """Return member tables whose rows are not sent, without partitioned tables."""
        oids = {
            table.oid for publication in self.publications for table in self.members(publication)
        }
        tables = (self.tables[oid] for oid in oids)
        return self._sorted(table for table in tables if not table.has_rows and table.kind != "p")

    def read(self) -> list[ExaminedTable]:
        """Return the tables that a snapshot reads or locks.

        A snapshot reads partitions, even if they are published by their root. It then also locks
        the root, for which the role needs the same privileges.
        """
        oids = {table.oid for publication in self.publications for table in self.sent(publication)}
        oids |= {
            self.root(publication, table).oid
            for publication in self.publications
            if publication.via_root
            for table in self.members(publication)
            if table.persistence == "p" and table.kind in ("r", "p")
        }
        return self._sorted(self.tables[oid] for oid in oids)

    def root(self, publication: ExaminedPublication, table: ExaminedTable) -> ExaminedTable:
        """Return the topmost table above `table` that the publication names; or `table`."""
        top = self._all.top(self._of(publication), self._all.tables[table.oid])
        return self.tables.get(top.oid, table)  # `table` if the root was dropped meanwhile

    def _of(self, publication: ExaminedPublication) -> publications.Publication:
        return next(
            candidate for candidate in self._all.publications if candidate.oid == publication.oid
        )

    def entry(self, publication: ExaminedPublication, table: ExaminedTable) -> ExaminedEntry:
        """Return the entry that applies to a table: with via_root, the root's entry."""
        of = self.root(publication, table) if publication.via_root else table
        return publication.entries.get(of.oid, ExaminedEntry(None, False, frozenset()))


_TABLES = """
SELECT c.oid::bigint, c.reltoastrelid <> 0, pg_catalog.row_security_active(c.oid),
    pg_catalog.has_table_privilege(c.oid, 'SELECT'),
    pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
FROM pg_catalog.pg_class AS c WHERE c.oid = ANY(%s::oid[])
"""


def _tables(
    server: Examined, relations: list[publications.CatalogRelation]
) -> dict[int, ExaminedTable]:
    oids = [relation.oid for relation in relations]
    privileges = {oid: more for oid, *more in server.rows(_TABLES, oids)}
    tables = {
        relation.oid: ExaminedTable(
            relation.oid,
            relation.namespace,
            relation.name,
            relation.kind,
            relation.persistence,
            relation.replica_identity,
            *privileges[relation.oid],
        )
        for relation in relations
        if relation.oid in privileges
    }
    for oid, columns in server.attributes(list(tables)).items():
        tables[oid].columns = tuple(columns)
        if tables[oid].identity == "f":
            tables[oid].key = frozenset(column.name for column in columns)
    for oid, name, primary, identity, suitable, numbers in server.unique_indexes(oids):
        table = tables.get(oid)
        if table is None:
            continue
        table.primary_key |= primary
        if suitable and not primary and table.candidate is None:
            table.candidate = name
        if (table.identity == "i" and identity) or (table.identity == "d" and primary):
            table.key = table.names(numbers)
    return tables
