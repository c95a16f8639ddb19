"""What publications publish at a point: tables, columns, row filters, and the frames that say so.

All of it is read from the system catalogue's own tables, in a transaction that has the snapshot.
The server's functions and views for this (``pg_publication_tables``) look at the catalogue as it is
now: a table that was renamed or dropped since the snapshot would be missing, and nothing would say
so. Which tables, columns and rows are published, and by which relation, is decided as pgoutput
decides it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from ..columnar.mapping import has_text
from ..connections import check_publications
from ..errors import PgOutputError
from ..names import qualified
from ..protocol.encode import encode_fields
from ..types import column_type

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import psycopg

    Connection = psycopg.Connection[tuple[object, ...]]

# The server sends a Type message for types from this OID on: FirstGenbkiObjectId of its source.
_FIRST_ANNOUNCED = 10000
# Tables of the system have smaller OIDs: FirstNormalObjectId.
_FIRST_PUBLISHED = 16384
_PG_CATALOG = "pg_catalog"


class Attribute(NamedTuple):
    """A column that is not dropped, as ``pg_attribute`` has it."""

    number: int
    name: str
    type_id: int
    modifier: int
    generated: str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A table with rows of its own.

    Attributes
    ----------
    relation_id, filenode : int
    columns : tuple of Attribute
        The published columns, in the order of the table by which they are published.
    """

    relation_id: int
    filenode: int
    columns: tuple[Attribute, ...]


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    """A table by which changes are published: an ordinary one, or the root of partitions.

    Attributes
    ----------
    relation_id : int
    namespace, name : str
    announced : tuple of bytes
        The frames with which a stream announces it: Types, then the Relation.
    formats : str
        "b" or "t" for each column: the format of its values.
    filters : tuple of int
        OIDs of the publications whose row filters choose its rows: those that one of them lets
        pass. Empty if all are published.
    leaves : tuple of Leaf
    """

    relation_id: int
    namespace: str
    name: str
    announced: tuple[bytes, ...]
    formats: str
    filters: tuple[int, ...]
    leaves: tuple[Leaf, ...]


class Member(NamedTuple):
    """That a table is published.

    Attributes
    ----------
    relation_id : int
    namespace, name : str
    rows : tuple of int
        OIDs of the rows of pg_publication_rel and pg_publication_namespace by which the table, or a
        partitioned table that it belongs to, is in a publication, and of the publications of all
        tables. They are others once it has left and returned, or its row filter or columns were
        changed.
    partitions : tuple of int
        OIDs of the partitions whose rows come as rows of this table.
    """

    relation_id: int
    namespace: str
    name: str
    rows: tuple[int, ...]
    partitions: tuple[int, ...]


class _Publication(NamedTuple):
    oid: int
    name: str
    all_tables: bool
    via_root: bool
    generated: bool


class _Class(NamedTuple):
    oid: int
    namespace_id: int
    namespace: str
    name: str
    kind: str
    replica_identity: str
    filenode: int
    parent: int | None


class _Type(NamedTuple):
    namespace: str
    name: str
    kind: str
    base: int
    has_send: bool
    parts: Sequence[int]


_PUBLICATIONS = """
SELECT oid::bigint, pubname::text, puballtables, pubviaroot, {generated}
FROM pg_catalog.pg_publication WHERE pubname = ANY(%s) ORDER BY pubname
"""

_MEMBERS = """
SELECT prpubid::bigint, prrelid::bigint, oid::bigint, {columns}, {filter}
FROM pg_catalog.pg_publication_rel WHERE prpubid = ANY(%s::oid[])
"""

_SCHEMAS = """
SELECT pnpubid::bigint, pnnspid::bigint, oid::bigint
FROM pg_catalog.pg_publication_namespace WHERE pnpubid = ANY(%s::oid[])
"""

# A partition that is being detached has two parents at most in name: inhdetachpending.
_CLASSES = """
SELECT c.oid::bigint, n.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text,
    c.relreplident::text, c.relfilenode::bigint,
    CASE WHEN c.relispartition THEN i.inhparent::bigint END
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_inherits AS i ON c.relispartition AND i.inhrelid = c.oid
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= %s
ORDER BY n.nspname, c.relname
"""

ATTRIBUTES = """
SELECT attrelid::bigint, attnum, attname::text, atttypid::bigint, atttypmod, attgenerated::text
FROM pg_catalog.pg_attribute
WHERE attrelid = ANY(%s::oid[]) AND attnum > 0 AND NOT attisdropped
ORDER BY attrelid, attnum
"""

# The index of the replica identity, as RelationGetIndexList chooses it.
_IDENTITIES = """
SELECT i.indrelid::bigint, (i.indkey::int2[])[0:i.indnkeyatts - 1]
FROM pg_catalog.pg_index AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.indrelid
WHERE i.indrelid = ANY(%s::oid[]) AND i.indisunique AND i.indimmediate AND i.indpred IS NULL
    AND i.indislive AND (i.indisvalid OR {invalid})
    AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END
"""

# Types of columns, and of all that is in their values.
_TYPES = """
WITH RECURSIVE part(whole, oid) AS (
    SELECT 0::oid, oid FROM pg_catalog.pg_type WHERE oid = ANY(%s::oid[])
  UNION
    SELECT p.oid, found.oid
    FROM part AS p
    JOIN pg_catalog.pg_type AS t ON t.oid = p.oid
    LEFT JOIN pg_catalog.pg_range AS r ON t.oid IN (r.rngtypid, {multirange})
    CROSS JOIN LATERAL (
        SELECT pg_catalog.unnest(ARRAY[t.typbasetype, t.typelem,
            CASE t.oid WHEN r.rngtypid THEN r.rngsubtype ELSE r.rngtypid END])
        UNION ALL
        SELECT a.atttypid
        FROM pg_catalog.pg_attribute AS a
        WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) AS found(oid)
    WHERE found.oid <> 0
)
SELECT t.oid::bigint, n.nspname::text, t.typname::text, t.typtype::text, t.typbasetype::bigint,
    t.typsend <> 0,
    ARRAY(SELECT DISTINCT p.oid::bigint FROM part AS p WHERE p.whole = t.oid)
FROM pg_catalog.pg_type AS t
JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
WHERE t.oid IN (SELECT oid FROM part)
"""


def read_published(
    connection: Connection, publications: Sequence[str], *, binary: bool
) -> list[PublishedTable]:
    """The tables that publications publish, as the transaction's snapshot sees them.

    Parameters
    ----------
    connection : psycopg.Connection
        In a transaction, which stays open.
    publications : list or tuple of str
    binary : bool
        Whether a stream sends values in binary format where it can.

    Raises
    ------
    PgOutputError
        A publication is not there, or the server can't publish a table by them all.
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    catalog = _Catalog(connection, publications)
    found = catalog.published()
    catalog.read_columns(found)
    return [catalog.table(*published, binary=binary) for published in found]


def read_members(connection: Connection, publications: Sequence[str]) -> list[Member]:
    """Which tables publications publish, as the transaction's snapshot sees it.

    No table is touched, so that it does not wait for the locks of others: where an ALTER TABLE
    waits for a copy that is being made, pg_publication_tables would wait for both.

    Parameters
    ----------
    connection : psycopg.Connection
        In a transaction, which stays open.
    publications : list or tuple of str

    Raises
    ------
    PgOutputError
        A publication is not there.
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    catalog = _Catalog(connection, publications)
    return [catalog.member(table, leaves) for table, _, leaves in catalog.published()]


class _Catalog:
    """The rows of the system catalogue by which publishing is decided."""

    def __init__(self, connection: Connection, publications: Sequence[str]) -> None:
        check_publications(connection, publications)
        self._connection = connection
        self._version = version = connection.info.server_version
        ask = self._ask
        since_15 = version >= 150000
        generated = "pubgencols = 's'" if version >= 180000 else "false"
        self._publications = [
            _Publication(*row)
            for row in ask(_PUBLICATIONS, list(publications), generated=generated)
        ]
        ids = [one.oid for one in self._publications]
        self._members: dict[tuple[int, int], tuple[int, Sequence[int] | None, bool]] = {
            (publication, relation): (oid, columns, has_filter)
            for publication, relation, oid, columns, has_filter in ask(
                _MEMBERS,
                ids,
                columns="prattrs::int2[]" if since_15 else "NULL",
                filter="prqual IS NOT NULL" if since_15 else "false",
            )
        }
        self._schemas: dict[tuple[int, int], int] = {
            (publication, namespace): oid
            for publication, namespace, oid in (ask(_SCHEMAS, ids) if since_15 else ())
        }
        self._classes = {
            found.oid: found for found in (_Class(*row) for row in ask(_CLASSES, _FIRST_PUBLISHED))
        }

    def _ask(self, query: str, *parameters: object, **parts: str) -> Any:
        text = query.format(**parts) if parts else query
        return self._connection.execute(text.encode(), parameters).fetchall()

    def published(self) -> list[tuple[_Class, list[_Publication], list[_Class]]]:
        """Tables by which something is published, by which publications, and their leaves."""
        found: dict[int, tuple[list[_Publication], list[_Class]]] = {}
        for leaf in self._classes.values():
            if leaf.kind == "r":
                oid, publications = self._publishing(leaf)
                if publications:
                    found.setdefault(oid, (publications, []))[1].append(leaf)
        # A root without partitions has no rows; it is published all the same.
        for root in self._classes.values():
            if root.kind == "p" and root.oid not in found:
                oid, publications = self._publishing(root)
                publications = [one for one in publications if one.via_root]
                if oid == root.oid and publications:
                    found[oid] = publications, []
        return [(self._classes[oid], *rest) for oid, rest in found.items()]

    def member(self, table: _Class, leaves: Iterable[_Class]) -> Member:
        """By which rows of the catalogue a table is in the publications."""
        rows = []
        for publication in self._publications:
            rows += [publication.oid] if publication.all_tables else []
            for one in (table, *self._ancestors(table)):
                key = publication.oid, one.oid
                rows += [self._members[key][0]] if key in self._members else []
                key = publication.oid, one.namespace_id
                rows += [self._schemas[key]] if key in self._schemas else []
        partitions = tuple(leaf.oid for leaf in leaves if leaf is not table)
        return Member(table.oid, table.namespace, table.name, tuple(sorted({*rows})), partitions)

    def _publishing(self, table: _Class) -> tuple[int, list[_Publication]]:
        """By which table the rows of one are published, and the publications that do so.

        It is the topmost ancestor of all publications, as of get_rel_sync_entry in pgoutput.c.
        """
        ancestors = self._ancestors(table)
        oid, level = table.oid, 0
        found: list[_Publication] = []
        for publication in self._publications:
            own, own_level = table.oid, 0
            top = self._topmost(publication, ancestors)
            if not (publication.all_tables or top or self._has(publication, table)):
                continue
            if publication.via_root and publication.all_tables and ancestors:
                top = len(ancestors)
            if publication.via_root and top:
                own, own_level = ancestors[top - 1].oid, top
            if own_level > level:
                oid, level, found = own, own_level, []
            if own_level == level:
                found.append(publication)
        return oid, found

    def _ancestors(self, table: _Class) -> list[_Class]:
        """The partitioned tables above a partition, from its parent on."""
        found: list[_Class] = []
        while table.parent in self._classes and len(found) < len(self._classes):
            table = self._classes[table.parent]
            found.append(table)
        return found

    def _topmost(self, publication: _Publication, ancestors: Sequence[_Class]) -> int:
        """How many levels up the topmost ancestor is that a publication names; 0 for none."""
        levels = [i for i, one in enumerate(ancestors, 1) if self._has(publication, one)]
        return max(levels, default=0)

    def _has(self, publication: _Publication, table: _Class) -> bool:
        return (publication.oid, table.oid) in self._members or (
            publication.oid,
            table.namespace_id,
        ) in self._schemas

    def _is_whole(self, publication: _Publication, table: _Class) -> bool:
        """Whether a publication has a table without a list of columns and a row filter."""
        schema = (publication.oid, table.namespace_id) in self._schemas
        return publication.all_tables or schema

    def read_columns(
        self, published: Sequence[tuple[_Class, list[_Publication], list[_Class]]]
    ) -> None:
        """Read the columns of tables that `published` gave, and of their leaves."""
        roots = [root.oid for root, _, _ in published]
        relation_ids = [*roots, *(leaf.oid for _, _, leaves in published for leaf in leaves)]
        self._columns: dict[int, list[Attribute]] = defaultdict(list)
        for relation_id, *fields in self._ask(ATTRIBUTES, relation_ids):
            self._columns[relation_id].append(Attribute(*fields))
        invalid = "i.indisprimary AND c.relkind = 'p'" if self._version >= 170000 else "false"
        self._identities = dict(self._ask(_IDENTITIES, roots, invalid=invalid))
        types = {one.type_id for columns in self._columns.values() for one in columns}
        multirange = "r.rngmultitypid" if self._version >= 140000 else "0"
        self._types = {
            oid: _Type(*row) for oid, *row in self._ask(_TYPES, list(types), multirange=multirange)
        }

    def table(
        self,
        table: _Class,
        publications: Sequence[_Publication],
        leaves: Iterable[_Class],
        *,
        binary: bool,
    ) -> PublishedTable:
        columns = self._published_columns(table, publications)
        filtered = [
            one.oid
            for one in publications
            if not self._is_whole(one, table)
            and self._members.get((one.oid, table.oid), (0, None, False))[2]
        ]
        made = []
        for leaf in leaves:
            by_name = {one.name: one for one in self._columns[leaf.oid]}
            own = tuple(by_name[one.name] for one in columns)
            made.append(Leaf(leaf.oid, leaf.filenode, own))
        return PublishedTable(
            table.oid,
            table.namespace,
            table.name,
            self._announced(table, columns),
            "".join(self._format(one, binary=binary) for one in columns),
            tuple(filtered) if len(filtered) == len(publications) else (),
            tuple(made),
        )

    def _published_columns(
        self, table: _Class, publications: Sequence[_Publication]
    ) -> list[Attribute]:
        """The columns that the publications publish.

        Raises
        ------
        PgOutputError
            They publish different ones, at which the server ends the stream.
        """
        chosen: dict[tuple[int, ...], str] = {}
        columns = self._columns[table.oid]
        for publication in publications:
            listed = None
            if not self._is_whole(publication, table):
                listed = self._members.get((publication.oid, table.oid), (0, None, False))[1]
            numbers = [
                one.number
                for one in columns
                if (
                    one.number in listed
                    if listed is not None
                    else one.generated == "" or (one.generated == "s" and publication.generated)
                )
            ]
            chosen.setdefault(tuple(numbers), publication.name)
        if len(chosen) > 1:
            first, second = list(chosen.values())[:2]
            raise PgOutputError(
                f"publications {first!r} and {second!r} publish different columns of table "
                f"{qualified(table)}, at which the server ends a stream of both: give them the "
                f"same list of columns, or take them in streams of their own"
            )
        (published,) = chosen
        return [one for one in columns if one.number in published]

    def _announced(self, table: _Class, columns: Sequence[Attribute]) -> tuple[bytes, ...]:
        key: Collection[int] = self._identities.get(table.oid, ())
        whole = table.replica_identity == "f"
        frames = []
        for one in columns:
            if one.type_id >= _FIRST_ANNOUNCED:
                namespace, name = self._base_name(one.type_id)
                frames.append(
                    encode_fields("Y", type_id=one.type_id, namespace=namespace, name=name)
                )
        relation = encode_fields(
            "R",
            relation_id=table.oid,
            namespace=_sent_namespace(table.namespace),
            name=table.name,
            replica_identity=table.replica_identity,
            columns=[
                (int(whole or one.number in key), one.name, one.type_id, one.modifier)
                for one in columns
            ],
        )
        return (*frames, relation)

    def _base_name(self, type_id: int) -> tuple[str, str]:
        """Namespace and name in a Type message: those of a domain's base type."""
        found = self._types[type_id]
        while found.kind == "d":
            found = self._types[found.base]
        return _sent_namespace(found.namespace), found.name

    def _format(self, column: Attribute, *, binary: bool) -> str:
        if not _has_send(self._types, column.type_id, set()):
            return "t"
        if binary:
            return "b"
        announced = None
        if column.type_id >= _FIRST_ANNOUNCED:
            announced = self._base_name(column.type_id)
        found = column_type(column.type_id, column.modifier, announced=announced)
        # Types of users and extensions are text, as a decoder knows them by their name at best, and
        # makes another column of binary values if it does not.
        return "b" if found.namespace == _PG_CATALOG and has_text(found) else "t"


def _sent_namespace(namespace: str) -> str:
    return "" if namespace == _PG_CATALOG else namespace


def _has_send(types: Mapping[int, _Type], oid: int, seen: set[int]) -> bool:
    """Whether a type, and each type in its values, has a send function."""
    if oid in seen:
        return True
    seen.add(oid)
    found = types.get(oid)
    return (
        found is not None
        and found.has_send
        and all(_has_send(types, part, seen) for part in found.parts)
    )
