"""Read published tables as a stream would announce them: Type and Relation frames, and formats.

The module `publications` decides which tables, columns and rows are published, and by which
relation. Like that module, this one reads only tables of the system catalogue, in the transaction
that has the snapshot.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from ..columnar.mapping import has_text
from ..protocol.encode import encode_fields
from ..publications import ACTIONS, Attribute, Publications, read_attributes, read_generated
from ..types import column_type

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import psycopg

    from ..publications import CatalogRelation, PublishedRelation

    Connection = psycopg.Connection[tuple[object, ...]]

# The server sends a Type message for types from this OID on: FirstGenbkiObjectId of its source.
_FIRST_ANNOUNCED = 10000
_PG_CATALOG = "pg_catalog"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A table that stores rows: a partition, or a table without partitions.

    Attributes
    ----------
    relation_id, filenode : int
    columns : tuple of Attribute
        The published columns, in the column order of the table that publishes them.
    """

    relation_id: int
    filenode: int
    columns: tuple[Attribute, ...]


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    """A table under which changes are published: an ordinary table, or the root of partitions.

    Attributes
    ----------
    relation_id : int
    namespace, name : str
    announced : tuple of bytes
        The frames with which a stream announces the table: Types, then the Relation.
    formats : str
        "b" or "t" for each column: the format of its values.
    filters : tuple of int
        OIDs of the publications with row filters. A row is published if one of the filters is true.
        Empty if all rows are published.
    leaves : tuple of Leaf
        The tables that store its rows.
    """

    relation_id: int
    namespace: str
    name: str
    announced: tuple[bytes, ...]
    formats: str
    filters: tuple[int, ...]
    leaves: tuple[Leaf, ...]


class Member(NamedTuple):
    """A published table, with the values that show later whether its publication has changed.

    Attributes
    ----------
    relation_id : int
    namespace, name : str
    rows : tuple of int
        `Publications.rows`. The numbers differ once the table has left and returned, or its row
        filter or column list was changed.
    actions : dict of str to list of str
        Which publications publish "insert", "update", "delete" and "truncate":
        `Publications.sources`.
    generated : dict of str to int
        The expressions of its generated columns: `Publications.expressions`.
    partitions : tuple of int
        OIDs of the partitions whose rows come as rows of this table.
    """

    relation_id: int
    namespace: str
    name: str
    rows: tuple[int, ...]
    actions: dict[str, list[str]]
    generated: dict[str, int]
    partitions: tuple[int, ...]

    @property
    def state_fields(self) -> dict[str, object]:
        """The fields to store with a snapshot, for a later call of `change`."""
        return {
            "members": [*self.rows],
            "actions": self.actions,
            "generated": self.generated,
        }

    def change(self, state_fields: Mapping[str, object]) -> str | None:
        """Return why the stream may lack changes of the table since a snapshot; None if it has all.

        The comparison also finds a change that was undone since: the stream lacks what happened
        in between.
        """
        if state_fields.get("members") != [*self.rows]:
            return "it has left the publications and returned, or its row filter or columns changed"
        before, generated = state_fields.get("actions"), state_fields.get("generated")
        if not isinstance(before, dict) or not isinstance(generated, dict):
            return "its snapshot does not say what was published"
        # A new column or partition is no reason: the stream or the catalogue shows its values.
        if any(
            generated.get(key, expression) != expression
            for key, expression in self.generated.items()
        ):
            return "a generated column got another expression, and the server rewrote its rows"
        if lost := [
            action for action in ACTIONS if before.get(action) and not self.actions[action]
        ]:
            names = " and ".join(f"{action}s" for action in lost)
            return f"its publications no longer publish its {names}"
        if all(_goes_on(before.get(action), self.actions[action]) for action in ACTIONS):
            return None
        return "its publications were altered, so some of its changes may be missing"


def _goes_on(before: object, now: list[str]) -> bool:
    """Return whether an action was published without a gap, or never."""
    if not now or not isinstance(before, list):
        return before == now
    return any(text in before for text in now)


class _TypeRow(NamedTuple):
    namespace: str
    name: str
    kind: str
    base: int
    has_send: bool
    parts: Sequence[int]


# The index of the replica identity, as RelationGetIndexList chooses it.
_IDENTITIES = """
SELECT i.indrelid::bigint, (i.indkey::int2[])[0:i.indnkeyatts - 1]
FROM pg_catalog.pg_index AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.indrelid
WHERE i.indrelid = ANY(%s::oid[]) AND i.indisunique AND i.indimmediate AND i.indpred IS NULL
    AND i.indislive AND (i.indisvalid OR {invalid})
    AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END
"""

# The types of columns, and the types that their values contain.
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
    """Read the tables that publications publish, as the transaction's snapshot sees them.

    Parameters
    ----------
    connection : psycopg.Connection
        A connection in a transaction, which stays open.
    publications : list or tuple of str
    binary : bool
        Whether a stream sends values in binary format where it can.

    Raises
    ------
    PgOutputError
        A publication does not exist. Or two publications publish different columns of one table,
        which the server can't send in one stream.
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    publication_set = Publications(connection, publications)
    published = publication_set.published()
    catalog = _CatalogRows(connection, publication_set, published)
    return [catalog.table(relation, binary=binary) for relation in published]


def read_members(
    connection: Connection, publications: Sequence[str]
) -> tuple[list[Member], frozenset[int]]:
    """Read the published tables, and the OIDs of all tables, as the transaction sees them.

    The queries lock no user table, so they wait for nobody. The view pg_publication_tables would
    wait: for example behind an ALTER TABLE, which itself waits for a running snapshot.

    Parameters
    ----------
    connection : psycopg.Connection
        A connection in a transaction, which stays open.
    publications : list or tuple of str

    Raises
    ------
    PgOutputError
        A publication does not exist.
    psycopg.Error
        The server refuses, or the connection is lost.
    """
    publication_set = Publications(connection, publications)
    generated = read_generated(connection)
    members = [
        Member(
            relation.table.oid,
            relation.table.namespace,
            relation.table.name,
            publication_set.rows(relation.table),
            publication_set.sources(relation),
            publication_set.expressions(relation, generated),
            tuple(leaf.oid for leaf in relation.leaves if leaf is not relation.table),
        )
        for relation in publication_set.published()
    ]
    return members, frozenset(publication_set.tables)


class _CatalogRows:
    """The columns, keys and types of published tables and of their leaves."""

    def __init__(
        self,
        connection: Connection,
        publications: Publications,
        published: Sequence[PublishedRelation],
    ) -> None:
        self._connection, self._publications = connection, publications
        roots = [relation.table.oid for relation in published]
        relation_ids = [*roots, *(leaf.oid for relation in published for leaf in relation.leaves)]
        self._columns = read_attributes(connection, relation_ids)
        version = connection.info.server_version
        invalid = "i.indisprimary AND c.relkind = 'p'" if version >= 170000 else "false"
        self._identities = dict(self._ask(_IDENTITIES, roots, invalid=invalid))
        types = {column.type_id for columns in self._columns.values() for column in columns}
        multirange = "r.rngmultitypid" if version >= 140000 else "0"
        self._types = {
            oid: _TypeRow(*row)
            for oid, *row in self._ask(_TYPES, list(types), multirange=multirange)
        }

    def _ask(self, query: str, *parameters: object, **parts: str) -> Any:
        return self._connection.execute(query.format(**parts).encode(), parameters).fetchall()

    def table(self, published: PublishedRelation, *, binary: bool) -> PublishedTable:
        table = published.table
        columns = self._publications.columns(published, self._columns[table.oid])
        leaves = []
        for leaf in published.leaves:
            by_name = {column.name: column for column in self._columns[leaf.oid]}
            own = tuple(by_name[column.name] for column in columns)
            leaves.append(Leaf(leaf.oid, leaf.filenode, own))
        return PublishedTable(
            table.oid,
            table.namespace,
            table.name,
            self._announced(table, columns),
            "".join(self._format(column, binary=binary) for column in columns),
            self._publications.filters(published),
            tuple(leaves),
        )

    def _announced(self, table: CatalogRelation, columns: Sequence[Attribute]) -> tuple[bytes, ...]:
        key: Collection[int] = self._identities.get(table.oid, ())
        whole = table.replica_identity == "f"
        frames = []
        for column in columns:
            if column.type_id >= _FIRST_ANNOUNCED:
                namespace, name = self._base_name(column.type_id)
                frames.append(
                    encode_fields("Y", type_id=column.type_id, namespace=namespace, name=name)
                )
        relation = encode_fields(
            "R",
            relation_id=table.oid,
            namespace=_sent_namespace(table.namespace),
            name=table.name,
            replica_identity=table.replica_identity,
            columns=[
                (int(whole or column.number in key), column.name, column.type_id, column.modifier)
                for column in columns
            ],
        )
        return (*frames, relation)

    def _base_name(self, type_id: int) -> tuple[str, str]:
        """Return namespace and name for a Type message; for a domain, of its base type."""
        type_ = self._types[type_id]
        while type_.kind == "d":
            type_ = self._types[type_.base]
        return _sent_namespace(type_.namespace), type_.name

    def _format(self, column: Attribute, *, binary: bool) -> str:
        if not _has_send(self._types, column.type_id, set()):
            return "t"
        if binary:
            return "b"
        announced = None
        if column.type_id >= _FIRST_ANNOUNCED:
            announced = self._base_name(column.type_id)
        type_ = column_type(column.type_id, column.modifier, announced=announced)
        # Types of users and extensions come as text: a decoder knows them at most by name, and an
        # unknown type's binary values would become another kind of column.
        return "b" if type_.namespace == _PG_CATALOG and has_text(type_) else "t"


def _sent_namespace(namespace: str) -> str:
    return "" if namespace == _PG_CATALOG else namespace


def _has_send(types: Mapping[int, _TypeRow], oid: int, checked_types: set[int]) -> bool:
    """Return whether a type, and each type in its values, has a send function."""
    if oid in checked_types:
        return True
    checked_types.add(oid)
    type_ = types.get(oid)
    return (
        type_ is not None
        and type_.has_send
        and all(_has_send(types, part, checked_types) for part in type_.parts)
    )
