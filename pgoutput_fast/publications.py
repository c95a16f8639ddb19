"""Decide, as pgoutput does, which tables, columns and rows publications publish.

No other module decides this. This module reads only tables of the system catalogue, as the
transaction sees them. It does not use the server's functions and views for the purpose
(``pg_publication_tables``, ``pg_partition_tree``, ``pg_get_expr``), for two reasons:

- They use the present catalogue. A table that was renamed or dropped since the snapshot would be
  missing without an error.
- They lock the tables. They would wait behind an ALTER TABLE or TRUNCATE, and others would wait
  behind them.

This holds for PostgreSQL 10 to 18. In these versions, a publication FOR ALL TABLES can't exclude a
table.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from .connections import check_publications
from .errors import PgOutputError
from .names import qualified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import psycopg

    Connection = psycopg.Connection[tuple[object, ...]]

__all__ = [
    "ACTIONS",
    "Attribute",
    "CatalogRelation",
    "Generated",
    "Publication",
    "PublicationEntry",
    "Publications",
    "PublishedRelation",
    "UniqueIndex",
    "empty_publications",
    "read_attributes",
    "read_generated",
    "read_unidentified",
    "read_unique_indexes",
    "row_filters",
]

# FirstNormalObjectId in the server's source. System tables have smaller OIDs.
_FIRST_PUBLISHED = 16384


class Attribute(NamedTuple):
    """A column of a table, from ``pg_attribute``, that is not dropped.

    Fields: number, name, type_id, modifier, generated ("s" stored, "v" virtual, "" not generated).
    """

    number: int
    name: str
    type_id: int
    modifier: int
    generated: str


class Generated(NamedTuple):
    """A stored generated column.

    Fields: number, name, expression (the OID of its row in ``pg_attrdef``). The OID changes when
    the column gets another expression, even if it gets the old one back later. The server then
    rewrites all rows.
    """

    number: int
    name: str
    expression: int


class UniqueIndex(NamedTuple):
    """A unique index that is not deferrable.

    Fields: relation_id (OID of the table), name, is_primary, is_identity (whether ALTER TABLE …
    REPLICA IDENTITY USING INDEX names it), is_suitable (whether it can be the replica identity),
    numbers (of the indexed columns).
    """

    relation_id: int
    name: str
    is_primary: bool
    is_identity: bool
    is_suitable: bool
    numbers: Sequence[int]


class Publication(NamedTuple):
    """A publication.

    Fields: oid, name, all_tables, via_root (publish_via_partition_root), actions (whether "insert",
    "update", "delete" and, from PostgreSQL 11 on, "truncate" are published), generated (pubgencols:
    "n" or "s"; None before PostgreSQL 18), version (xmin, the transaction that wrote the row of
    ``pg_publication``). The version changes when the publication is altered, even if it is altered
    back later.
    """

    oid: int
    name: str
    all_tables: bool
    via_root: bool
    actions: dict[str, bool]
    generated: str | None
    version: int

    @property
    def sends_old(self) -> bool:
        """Whether it publishes updates or deletes, which need a replica identity."""
        return self.actions["update"] or self.actions["delete"]


class PublicationEntry(NamedTuple):
    """A table that a publication names: a row of ``pg_publication_rel``.

    Fields: oid (of the row), columns (numbers of the columns in its column list; None without one),
    has_filter, filtered (numbers of the columns in its row filter).
    """

    oid: int
    columns: Sequence[int] | None
    has_filter: bool
    filtered: Sequence[int]


class CatalogRelation(NamedTuple):
    """A table, a partitioned table, or a foreign table that is a partition, from ``pg_class``.

    Fields: oid, namespace_id, namespace, name, kind, persistence, replica_identity, filenode,
    parent (OID of the partitioned table whose partition this is; None if it is no partition),
    attached (xmin of its row in ``pg_inherits``; None if it is no partition), placed (xmin of its
    row in ``pg_depend`` for the schema; None without such a row). `attached` changes when the
    partition is detached and attached again. `placed` changes when the table moves to another
    schema.
    """

    oid: int
    namespace_id: int
    namespace: str
    name: str
    kind: str
    persistence: str
    replica_identity: str
    filenode: int
    parent: int | None
    attached: int | None
    placed: int | None


class PublishedRelation(NamedTuple):
    """A table under which changes are published: an ordinary table, or the root of partitions.

    Fields: table, publications (those that publish rows under this table, with its column lists and
    row filters), leaves (the tables that store the rows), actions (those of "insert", "update",
    "delete" and "truncate" that are published for all leaves).
    """

    table: CatalogRelation
    publications: list[Publication]
    leaves: list[CatalogRelation]
    actions: set[str]


ACTIONS = ("insert", "update", "delete", "truncate")

_PUBLICATIONS = """
SELECT oid::bigint, pubname::text, puballtables, {via_root}, pubinsert, pubupdate, pubdelete,
    {truncate}, {generated}, xmin::text::bigint
FROM pg_catalog.pg_publication WHERE %s::text[] IS NULL OR pubname = ANY(%s) ORDER BY pubname
"""

# No function returns the columns of an expression, so read their numbers from its node tree.
_ENTRIES = """
SELECT prpubid::bigint, prrelid::bigint, oid::bigint, {parts}
FROM pg_catalog.pg_publication_rel WHERE prpubid = ANY(%s::oid[])
"""
_ENTRY_PARTS = r"""
    prattrs::int2[], prqual IS NOT NULL,
    ARRAY(SELECT found[1]::int
        FROM pg_catalog.regexp_matches(prqual::text, ':varattno (\d+)', 'g') AS found)
"""

_SCHEMAS = """
SELECT pnpubid::bigint, pnnspid::bigint, oid::bigint
FROM pg_catalog.pg_publication_namespace WHERE pnpubid = ANY(%s::oid[])
"""

# A partition has one row in pg_inherits, even while it is being detached (inhdetachpending).
_TABLES = """
SELECT c.oid::bigint, n.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text,
    c.relpersistence::text, c.relreplident::text, c.relfilenode::bigint,
    CASE WHEN c.relispartition THEN i.inhparent::bigint END,
    CASE WHEN c.relispartition THEN i.xmin::text::bigint END,
    (SELECT max(d.xmin::text::bigint) FROM pg_catalog.pg_depend AS d
        WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
        AND d.objsubid = 0 AND d.deptype = 'n'
        AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_inherits AS i ON c.relispartition AND i.inhrelid = c.oid
WHERE (c.relkind IN ('r', 'p') OR (c.relkind = 'f' AND c.relispartition)) AND c.oid >= %s
ORDER BY n.nspname, c.relname
"""

_ATTRIBUTES = """
SELECT attrelid::bigint, attnum, attname::text, atttypid::bigint, atttypmod, {generated}
FROM pg_catalog.pg_attribute
WHERE attrelid = ANY(%s::oid[]) AND attnum > 0 AND NOT attisdropped
ORDER BY attrelid, attnum
"""

_UNIQUE_INDEXES = """
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
"""

_GENERATED = """
SELECT a.attrelid::bigint, a.attnum, a.attname::text, d.oid::bigint
FROM pg_catalog.pg_attrdef AS d
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
WHERE a.attgenerated = 's'
"""

_FILTERS = """
SELECT pg_catalog.pg_get_expr(prqual, prrelid)
FROM pg_catalog.pg_publication_rel WHERE prrelid = %s AND prpubid = ANY(%s::oid[])
ORDER BY prpubid
"""


class Publications:
    """Publications, and the tables that they publish.

    Parameters
    ----------
    connection : psycopg.Connection
        For a consistent result, a connection in a REPEATABLE READ transaction.
    names : list or tuple of str, optional
        Names of publications. By default all publications of the database.

    Attributes
    ----------
    publications : list of Publication
        In the order of their names.
    tables : dict of int to CatalogRelation
        All tables of the database by OID, in the order of their names.

    Raises
    ------
    PgOutputError
        A publication does not exist.
    psycopg.Error
        The server refuses, or the connection is lost.
    """

    def __init__(self, connection: Connection, names: Sequence[str] | None = None) -> None:
        if names is not None:
            check_publications(connection, names)
        version = connection.info.server_version
        wanted = None if names is None else list(names)
        self.publications = [
            Publication(oid, name, all_tables, via_root, _set(actions), generated, version)
            for oid, name, all_tables, via_root, *actions, generated, version in _ask(
                connection,
                _PUBLICATIONS.format(
                    via_root="pubviaroot" if version >= 130000 else "false",
                    truncate="pubtruncate" if version >= 110000 else "NULL::bool",
                    generated="pubgencols::text" if version >= 180000 else "NULL",
                ),
                wanted,
                wanted,
            )
        ]
        ids = [publication.oid for publication in self.publications]
        has_parts = version >= 150000
        parts = _ENTRY_PARTS if has_parts else "NULL, false, ARRAY[]::int[]"
        self._entries = {
            (publication, relation): PublicationEntry(*entry)
            for publication, relation, *entry in _ask(connection, _ENTRIES.format(parts=parts), ids)
        }
        self._schemas: dict[tuple[int, int], int] = {
            (publication, namespace): oid
            for publication, namespace, oid in (
                _ask(connection, _SCHEMAS, ids) if has_parts else ()
            )
        }
        self.tables = {
            table.oid: table
            for table in (
                CatalogRelation(*row) for row in _ask(connection, _TABLES, _FIRST_PUBLISHED)
            )
        }

    # --- tables ----------------------------------------------------------------------------------

    def published(self) -> list[PublishedRelation]:
        """Return the tables under which changes are published, in the order of their names."""
        relations: dict[int, PublishedRelation] = {}
        for leaf in self.tables.values():
            if leaf.kind == "r" and leaf.persistence == "p":
                oid, publications, actions = self._publishing(leaf)
                if publications:
                    new = PublishedRelation(self.tables[oid], publications, [], set(actions))
                    relation = relations.setdefault(oid, new)
                    relation.leaves.append(leaf)
                    relation.actions.intersection_update(actions)
        # A root without partitions has no rows, but it is published too.
        for root in self.tables.values():
            if root.kind == "p" and root.persistence == "p" and root.oid not in relations:
                oid, publications, actions = self._publishing(root)
                publications = [publication for publication in publications if publication.via_root]
                if oid == root.oid and publications:
                    relations[oid] = PublishedRelation(root, publications, [], actions)
        return sorted(
            relations.values(), key=lambda relation: (relation.table.namespace, relation.table.name)
        )

    def _publishing(self, table: CatalogRelation) -> tuple[int, list[Publication], set[str]]:
        """Return the OID under which a table's rows are published, by which publications; actions.

        Several publications may publish the table under different ancestors. The topmost one wins,
        as in get_rel_sync_entry of pgoutput.c. The actions are those of all publications that have
        the table.
        """
        oid, level = table.oid, 0
        publications: list[Publication] = []
        actions: set[str] = set()
        for publication in self.publications:
            if not self.has(publication, table):
                continue
            actions.update(name for name, is_set in publication.actions.items() if is_set)
            own, own_level = table, 0
            if publication.via_root:
                own, own_level = self._topmost(publication, table)
            if own_level > level:
                oid, level, publications = own.oid, own_level, []
            if own_level == level:
                publications.append(publication)
        return oid, publications, actions

    def has(self, publication: Publication, table: CatalogRelation) -> bool:
        """Return whether a publication has a table, or a partitioned table above it.

        The server sends no rows of temporary, unlogged and foreign tables, even if a publication
        has them.
        """
        return any(self._names(publication, member) for member in (table, *self.ancestors(table)))

    def top(self, publication: Publication, table: CatalogRelation) -> CatalogRelation:
        """Return the topmost table above `table` that a publication names; or `table` itself."""
        return self._topmost(publication, table)[0]

    def _topmost(
        self, publication: Publication, table: CatalogRelation
    ) -> tuple[CatalogRelation, int]:
        """Return the result of `top`, and how many levels above `table` it is."""
        levels = enumerate([table, *self.ancestors(table)])
        named = [(member, level) for level, member in levels if self._names(publication, member)]
        return max(named, key=lambda pair: pair[1], default=(table, 0))

    def ancestors(self, table: CatalogRelation) -> list[CatalogRelation]:
        """Return the partitioned tables above a partition, its parent first."""
        ancestors: list[CatalogRelation] = []
        while table.parent in self.tables and len(ancestors) < len(self.tables):
            table = self.tables[table.parent]
            ancestors.append(table)
        return ancestors

    def partitions(self) -> dict[int, list[CatalogRelation]]:
        """Return the leaf partitions of each partitioned table, by its OID."""
        partitions: dict[int, list[CatalogRelation]] = defaultdict(list)
        for table in self.tables.values():
            if table.kind != "p":
                for ancestor in self.ancestors(table):
                    partitions[ancestor.oid].append(table)
        return partitions

    def _names(self, publication: Publication, table: CatalogRelation) -> bool:
        """Return whether a publication names the table or its schema, or is FOR ALL TABLES."""
        return (publication.oid, table.oid) in self._entries or self._is_whole(publication, table)

    def _is_whole(self, publication: Publication, table: CatalogRelation) -> bool:
        """Return whether a publication has the whole table, by its schema or FOR ALL TABLES."""
        schema = (publication.oid, table.namespace_id) in self._schemas
        return table.kind != "f" and (publication.all_tables or schema)

    def rows(self, table: CatalogRelation) -> tuple[int, ...]:
        """Return sorted numbers that change when a table leaves the publications and returns.

        The numbers are:

        - OIDs of the publications FOR ALL TABLES
        - OIDs of the rows of pg_publication_rel and pg_publication_namespace that name the table,
          or a partitioned table above it
        - `attached`, if only a partitioned table above it is named: while the table is detached,
          the server sends none of its changes
        - `placed`, if only its schema is named: while the table is in another schema, the server
          sends none of its changes
        """
        numbers = set()
        lineage = [table, *self.ancestors(table)]
        for publication in self.publications:
            numbers |= {publication.oid} if publication.all_tables else set()
            for level, member in enumerate(lineage):
                key = publication.oid, member.oid
                numbers |= {self._entries[key].oid} if key in self._entries else set()
                key = publication.oid, member.namespace_id
                if key in self._schemas:
                    numbers.add(self._schemas[key])
                    is_named = (
                        publication.all_tables or (publication.oid, member.oid) in self._entries
                    )
                    numbers |= {member.placed} if member.placed and not is_named else set()
                if self._names(publication, member) and not self._names(publication, table):
                    links = (below.attached for below in lineage[:level])
                    numbers |= {link for link in links if link is not None}
        return tuple(sorted(numbers))

    def sources(self, published: PublishedRelation) -> dict[str, list[str]]:
        """Return for each action the texts that show later whether it was published without a gap.

        If an action has one text in common at two times, the server sent this action in between
        without a gap, for the same rows and under the same table. A text names publications with
        their versions. For an ordinary table, each text names one publication, as any other one
        takes nothing away from it. With row filters or partitions, one text names all publications,
        as each one can change what the others publish.
        """
        table, leaves = published.table, published.leaves
        is_simple = table.kind == "r" and table.parent is None
        entries = [self.entry(publication, table) for publication in published.publications]
        if is_simple and not any(entry is not None and entry.has_filter for entry in entries):
            return {
                action: [
                    f"{publication.oid}/{publication.version}"
                    for publication in published.publications
                    if publication.actions.get(action)
                ]
                for action in ACTIONS
            }
        text = " ".join(
            f"{publication.oid}/{publication.version}"
            for publication in self.publications
            if any(self.has(publication, member) for member in (table, *leaves))
        )
        return {action: [text] if action in published.actions else [] for action in ACTIONS}

    def expressions(
        self, published: PublishedRelation, columns: Mapping[int, Sequence[Generated]]
    ) -> dict[str, int]:
        """Return the expressions of a table's published generated columns.

        Parameters
        ----------
        published : PublishedRelation
        columns : mapping of int to sequence of Generated
            The result of `read_generated`.

        Returns
        -------
        dict of str to int
            `Generated.expression` by "OID/number" of a column, for the table and each of its
            leaves: a partition's expression may differ from the root's.
        """
        table = published.table
        sent = [self.sent(publication, table) for publication in published.publications]
        names = {
            column.name
            for column in columns.get(table.oid, ())
            if any(is_sent(column.number, "s") for is_sent in sent)
        }
        return {
            f"{oid}/{column.number}": column.expression
            for oid in (table.oid, *(leaf.oid for leaf in published.leaves))
            for column in columns.get(oid, ())
            if column.name in names
        }

    # --- columns and row filters -----------------------------------------------------------------

    def entry(self, publication: Publication, table: CatalogRelation) -> PublicationEntry | None:
        """Return a publication's entry for a table; None without one, or if it has no effect.

        An entry has no effect if the publication also has the whole table: see `_is_whole`.
        """
        return None if self._is_whole(publication, table) else self.named(publication, table)

    def named(self, publication: Publication, table: CatalogRelation) -> PublicationEntry | None:
        """Return a publication's entry for a table, even if the entry has no effect."""
        return self._entries.get((publication.oid, table.oid))

    def filters(self, published: PublishedRelation) -> tuple[int, ...]:
        """Return the OIDs of the publications whose row filters choose the rows of a table.

        A row is published if one of the filters is true. Empty if all rows are published.
        """
        filtered = [
            publication.oid
            for publication in published.publications
            if (entry := self.entry(publication, published.table)) is not None and entry.has_filter
        ]
        return tuple(filtered) if len(filtered) == len(published.publications) else ()

    def sent(
        self, publication: Publication, table: CatalogRelation
    ) -> Callable[[int | None, str], bool]:
        """Return a function that takes a column's number and `generated`: whether it is sent."""
        entry = self.entry(publication, table)
        listed = None if entry is None else entry.columns
        if listed is not None:
            return lambda number, generated: number in listed
        return lambda number, generated: generated in ("", publication.generated)

    def columns(
        self, published: PublishedRelation, columns: Sequence[Attribute]
    ) -> list[Attribute]:
        """Return those of a table's columns that are published.

        Raises
        ------
        PgOutputError
            The publications publish different columns: the server would end the stream.
        """
        table = published.table
        chosen: dict[tuple[int, ...], str] = {}
        for publication in published.publications:
            sent = self.sent(publication, table)
            numbers = [column.number for column in columns if sent(column.number, column.generated)]
            chosen.setdefault(tuple(numbers), publication.name)
        if len(chosen) > 1:
            first, second = list(chosen.values())[:2]
            raise PgOutputError(
                f"{first!r} and {second!r} publish different columns of table "
                f"{qualified(table)}: the server refuses to send both in one stream",
                code="bad_option",
                parameter="publications",
                table=qualified(table),
                hint="Give both the same column list, or read each publication in its own stream",
            )
        (published_numbers,) = chosen
        return [column for column in columns if column.number in published_numbers]


def read_attributes(
    connection: Connection, relation_ids: Sequence[int]
) -> dict[int, list[Attribute]]:
    """Return the columns of tables, by the tables' OIDs, in the order of each table.

    Raises
    ------
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    has_generated = connection.info.server_version >= 120000
    query = _ATTRIBUTES.format(generated="attgenerated::text" if has_generated else "''")
    attributes: dict[int, list[Attribute]] = {oid: [] for oid in relation_ids}
    for relation_id, *fields in _ask(connection, query, list(relation_ids)):
        attributes[relation_id].append(Attribute(*fields))
    return attributes


def read_unique_indexes(connection: Connection, relation_ids: Sequence[int]) -> list[UniqueIndex]:
    """Return the unique indexes of tables, in the order of the tables' OIDs.

    Of one table, those with fewer columns come first.

    Raises
    ------
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    count = "indnkeyatts" if connection.info.server_version >= 110000 else "indnatts"
    query = _UNIQUE_INDEXES.format(count=count)
    return [UniqueIndex(*row) for row in _ask(connection, query, list(relation_ids))]


def empty_publications(publications: Publications) -> list[str]:
    """Return the names of the publications that publish no table now."""
    tables = [
        table
        for relation in publications.published()
        for table in (relation.table, *relation.leaves)
    ]
    return [
        publication.name
        for publication in publications.publications
        if not any(publications.has(publication, table) for table in tables)
    ]


def read_unidentified(
    connection: Connection, publications: Publications
) -> list[tuple[CatalogRelation, str]]:
    """Return the tables whose published updates and deletes the server refuses.

    The list has partitions, not their roots, as each partition has its own replica identity.

    Returns
    -------
    list of (CatalogRelation, str)
        Each table, with the replica identity to give it, in the syntax of ALTER TABLE.

    Raises
    ------
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    concerned = [publication for publication in publications.publications if publication.sends_old]
    tables = {
        leaf.oid: leaf
        for published in publications.published()
        for leaf in published.leaves
        if leaf.replica_identity != "f"
        and any(publications.has(publication, leaf) for publication in concerned)
    }
    offered: dict[int, str] = {}
    for index in read_unique_indexes(connection, list(tables)):
        table = tables.get(index.relation_id)
        if table is None:
            continue
        if index.is_primary if table.replica_identity == "d" else index.is_identity:
            del tables[table.oid]
        elif index.is_primary:
            offered[table.oid] = "DEFAULT"
        elif index.is_suitable:
            name = index.name.replace('"', '""')
            offered.setdefault(table.oid, f'USING INDEX "{name}"')
    return [(table, offered.get(oid, "FULL")) for oid, table in tables.items()]


def read_generated(connection: Connection) -> dict[int, list[Generated]]:
    """Return the stored generated columns of a database, by their tables' OIDs.

    Empty for a server before PostgreSQL 18, which can't publish generated columns.

    Raises
    ------
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    columns: dict[int, list[Generated]] = defaultdict(list)
    if connection.info.server_version >= 180000:
        for relation_id, *fields in _ask(connection, _GENERATED):
            columns[relation_id].append(Generated(*fields))
    return columns


def row_filters(
    connection: Connection, relation_id: int, publications: Sequence[int]
) -> Iterator[str]:
    """Yield the row filters of publications, given by OID, for a table, as SQL.

    The server locks the table for this (ACCESS SHARE). It qualifies names that are not in the
    search_path.

    Raises
    ------
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    for (text,) in _ask(connection, _FILTERS, relation_id, list(publications)):
        yield text


def _set(actions: Sequence[bool | None]) -> dict[str, bool]:
    """Return whether each action is published, without actions that the server does not have."""
    return {
        action: is_set
        for action, is_set in zip(ACTIONS, actions, strict=True)
        if is_set is not None
    }


def _ask(connection: Connection, query: str, *parameters: object) -> list[Any]:
    return connection.execute(query.encode(), parameters).fetchall()
