"""The catalogue of published tables: facts about tables that the stream does not have.

These are a table's primary key (the stream only flags the columns of the replica identity), the
values of a column in rows that are older than the column, and a table's partitions. `read_catalog`
asks the server once. A `Catalog` can be saved as JSON, so that readers of segments need no
connection.

`pgoutput_fast.TypeRegistry` is the catalogue of types.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._disk import read_json_file, write_whole
from ._forms import of_form
from .errors import PgOutputError
from .names import qualified

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg


__all__ = ["Catalog", "CatalogColumn", "CatalogTable", "catalog_of", "read_catalog"]

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class CatalogColumn:
    """One column of a table.

    Attributes
    ----------
    name : str
    type_id : int
        The type's OID.
    type_name : str
        The type as PostgreSQL's ``format_type`` writes it, such as ``numeric(10,2)``.
    type_modifier : int
        ``pg_attribute.atttypmod``; -1 for none.
    not_null : bool
    has_default : bool
        Whether the column or its domain has a default now, as generated and identity columns do.
    generated : str
        "s" stored, "v" virtual, "" not generated.
    has_missing : bool
        Whether rows that are older than the column have the value `missing`
        (``pg_attribute.atthasmissing``).
    missing : str or None
        The value in those rows, as text under the session settings of the stream; None for NULL.
    number : int or None
        ``pg_attribute.attnum``, which stays the same when the column is renamed. None in catalogues
        that were stored without this field.
    is_published : bool
        Whether changes have the column. False if the publications' column lists lack it, or if it
        is generated and no publication publishes it. True in catalogues that were stored without
        this field.
    """

    name: str
    type_id: int
    type_name: str
    type_modifier: int
    not_null: bool
    has_default: bool
    generated: str
    has_missing: bool
    missing: str | None
    number: int | None = None
    is_published: bool = True


@dataclasses.dataclass(frozen=True)
class CatalogTable:
    """One published table. For a partitioned table, its partitions store the rows.

    Attributes
    ----------
    relation_id : int
        Its OID, which Relation messages have too.
    namespace, name : str
    kind : str
        ``pg_class.relkind``: "r" table, "p" partitioned table.
    replica_identity : str
        ``pg_class.relreplident``: "d" default, "n" nothing, "f" full, "i" index.
    root_id : int or None
        OID of the topmost partitioned table above it; None if it is no partition.
    partition_ids : tuple of int
        OIDs of its leaf partitions.
    primary_key : tuple of str
        Names of the primary key's columns, in the key's order. Empty without a primary key.
    identity_index : tuple of str
        Names of the columns of the index that REPLICA IDENTITY USING INDEX names, in the index's
        order. Empty without such an index.
    columns : tuple of CatalogColumn
        Its columns, in the table's order. For a partitioned table, `missing` is the value in rows
        of its partitions.
    file_nodes : tuple of int
        ``pg_class.relfilenode`` of the table and of its leaf partitions. It changes when the table
        is rewritten or truncated. Empty in catalogues that were stored without this field.
    """

    relation_id: int
    namespace: str
    name: str
    kind: str
    replica_identity: str
    root_id: int | None
    partition_ids: tuple[int, ...]
    primary_key: tuple[str, ...]
    identity_index: tuple[str, ...]
    columns: tuple[CatalogColumn, ...]
    file_nodes: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row; empty if only the whole row identifies it.

        With REPLICA IDENTITY USING INDEX, these are the columns of the index. Otherwise these are
        the columns of the primary key.
        """
        return self.identity_index if self.replica_identity == "i" else self.primary_key

    @property
    def added_values(self) -> dict[str, str | None]:
        """By column name: the value in rows older than the column, as text, or None for NULL.

        A column is missing here if the catalogue does not know the value: PostgreSQL computed a
        default for each row, or the table was rewritten since.
        """
        return {
            column.name: column.missing
            for column in self.columns
            if column.has_missing or not (column.has_default or column.not_null)
        }


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The published tables of a database.

    Attributes
    ----------
    system_identifier, database : str
        The cluster and the database from which the catalogue was read.
    publications : tuple of str
    tables : tuple of CatalogTable
    """

    system_identifier: str
    database: str
    publications: tuple[str, ...]
    tables: tuple[CatalogTable, ...]

    def table(self, name: str) -> CatalogTable:
        """Return a table by its qualified name, such as ``public.accounts``.

        Raises
        ------
        PgOutputError
            The table is not published.
        """
        for table in self.tables:
            if qualified(table) == name:
                return table
        raise PgOutputError(
            f"table {name!r} is not in the catalogue of database {self.database!r}, publications "
            f"{', '.join(self.publications)}; it has "
            f"{', '.join(map(qualified, self.tables)) or 'none'}",
            code="no_table",
            table=name,
        )

    def by_id(self) -> dict[int, CatalogTable]:
        """Return all tables, by relation id."""
        return {table.relation_id: table for table in self.tables}

    def to_json(self) -> str:
        """Return JSON, which `from_json` reads."""
        return json.dumps({"format_version": FORMAT_VERSION, **vars(self)}, default=vars)

    @classmethod
    def from_json(cls, text: str | bytes) -> Catalog:
        """Read what `to_json` wrote.

        Raises
        ------
        PgOutputError
            `text` is no catalogue, or has a newer format version.
        """
        try:
            fields = json.loads(text)
            version = fields.pop("format_version")
            if version == FORMAT_VERSION:
                catalog: Catalog = of_form(fields, cls)
                return catalog
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PgOutputError(
                f"this is not a catalogue ({error!r})",
                code="damaged",
                hint="Read the catalogue from the server again",
            ) from error
        raise PgOutputError(
            f"the catalogue has format version {version!r}, but this version of pgoutput_fast "
            f"reads only {FORMAT_VERSION}",
            code="not_supported",
            hint="Update pgoutput_fast",
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to a file, atomically: the file is complete or not there at all.

        Raises
        ------
        PgOutputError
            The file can't be written.
        """
        path = Path(path)
        try:
            write_whole(path, [self.to_json()])
        except OSError as error:
            raise PgOutputError(
                f"can't write catalogue {path}: {error.strerror}", code="io_failed", path=str(path)
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Catalog:
        """Read what `save` wrote.

        Raises
        ------
        PgOutputError
            The file can't be read, or is no catalogue.
        """
        try:
            content = read_json_file(Path(path))
        except OSError as error:
            raise PgOutputError(
                f"can't read catalogue {path}: {error.strerror}",
                code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
                path=str(path),
            ) from error
        try:
            return cls.from_json(content)
        except PgOutputError as error:
            raise PgOutputError(
                f"{path}: {error.message}", code=error.code, path=str(path)
            ) from error


# Without deferrable keys: within a transaction, two rows may have the same deferrable key.
_INDEXES = """
SELECT i.indrelid::bigint, i.indisprimary, i.indisreplident, array_agg(a.attname::text ORDER BY k.n)
FROM pg_catalog.pg_index AS i
CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, n)
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = ANY(%s::oid[]) AND (i.indisprimary OR i.indisreplident)
    AND i.indimmediate AND k.n <= i.indnkeyatts
GROUP BY i.indexrelid, 1, 2, 3
"""

# attmissingval is an array of one element of the column's type. A cast to text[] reads any type.
_COLUMNS = """
SELECT a.attrelid::bigint, a.attname, a.atttypid::bigint,
    pg_catalog.format_type(a.atttypid, a.atttypmod), a.atttypmod, a.attnotnull,
    a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL, a.attgenerated::text,
    a.atthasmissing, (a.attmissingval::text::text[])[1], a.attnum::int
FROM pg_catalog.pg_attribute AS a
JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""


def read_catalog(dsn: str, publications: Sequence[str]) -> Catalog:
    """Read from a server the tables that publications publish.

    The call reads everything in one snapshot. Values are text under the session settings of a
    stream.

    Parameters
    ----------
    dsn : str
        Connection string of libpq, or URL.
    publications : list or tuple of str

    Raises
    ------
    PgOutputError
        psycopg is not installed, the server can't be reached or refuses, or there is no such
        publication. No message has the password.
    TypeError
        `dsn` is no str.
    """
    from .connections import ConnectionParameters, server_error

    with ConnectionParameters(dsn).open(replication=False) as connection:
        import psycopg

        try:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        except psycopg.Error as error:
            raise server_error("can't read the catalogue", str(error), error.sqlstate) from error
        return catalog_of(connection, publications)


def catalog_of(
    connection: psycopg.Connection[tuple[object, ...]], publications: Sequence[str]
) -> Catalog:
    """Read the published tables on a connection, as its transaction sees the catalogue.

    The call locks no table, so it does not wait for other sessions.

    Parameters
    ----------
    connection : psycopg.Connection
        A connection in a transaction.
    publications : list or tuple of str

    Raises
    ------
    PgOutputError
        The server refuses, or there is no such publication.
    """
    import psycopg

    from .connections import server_error
    from .publications import Publications

    try:
        publication_set = Publications(connection, publications)
        every_published = publication_set.published()
        tables = [relation.table for relation in every_published]
        ids = [table.oid for table in tables]
        below = publication_set.partitions()
        leaves_of = {oid: sorted(below.get(oid, ()), key=lambda leaf: leaf.oid) for oid in ids}
        partitions = {oid: [leaf.oid for leaf in leaves] for oid, leaves in leaves_of.items()}
        every = [*ids, *(leaf for leaves in partitions.values() for leaf in leaves)]
        indexes: list[Any] = connection.execute(_INDEXES, [ids]).fetchall()
        primary_keys, identity_indexes = (
            {row[0]: tuple(row[3]) for row in indexes if row[flag]} for flag in (1, 2)
        )
        columns: list[Any] = connection.execute(_COLUMNS, [every]).fetchall()
        identity: Any = connection.execute(
            "SELECT system_identifier::text, current_database() FROM pg_catalog.pg_control_system()"
        ).fetchone()
    except psycopg.Error as error:
        raise server_error("can't read the catalogue", str(error), error.sqlstate) from error
    columns_of: dict[int, list[CatalogColumn]] = {oid: [] for oid in every}
    sent = {
        relation.table.oid: [
            publication_set.sent(publication, relation.table)
            for publication in relation.publications
        ]
        for relation in every_published
    }
    for oid, *fields in columns:
        column = CatalogColumn(*fields)
        by = sent.get(oid)
        if by and not any(is_sent(column.number, column.generated) for is_sent in by):
            column = dataclasses.replace(column, is_published=False)
        columns_of[oid].append(column)
    return Catalog(
        system_identifier=identity[0],
        database=identity[1],
        publications=tuple(publications),
        tables=tuple(
            CatalogTable(
                relation_id=table.oid,
                namespace=table.namespace,
                name=table.name,
                kind=table.kind,
                replica_identity=table.replica_identity,
                root_id=publication_set.ancestors(table)[-1].oid
                if table.parent is not None
                else None,
                partition_ids=tuple(partitions[table.oid]),
                primary_key=primary_keys.get(table.oid, ()),
                identity_index=identity_indexes.get(table.oid, ()),
                columns=_with_missing(
                    columns_of[table.oid], [columns_of[leaf] for leaf in partitions[table.oid]]
                ),
                file_nodes=(
                    table.filenode,
                    *(leaf.filenode for leaf in leaves_of[table.oid]),
                ),
            )
            for table in tables
        ),
    )


def _with_missing(
    columns: Sequence[CatalogColumn], leaves: Sequence[Sequence[CatalogColumn]]
) -> tuple[CatalogColumn, ...]:
    """Return a partitioned table's columns, with the values in older rows of its partitions.

    A change does not have the partition of its row. So if the partitions' values differ, the
    column's value counts as not known.
    """
    if not leaves:
        return tuple(columns)
    result = []
    for column in columns:
        missing_values = {
            (leaf_column.has_missing, leaf_column.missing)
            for leaf in leaves
            for leaf_column in leaf
            if leaf_column.name == column.name and leaf_column.has_missing
        }
        if len(missing_values) == 1:
            has_missing, missing = missing_values.pop()
            column = dataclasses.replace(column, has_missing=has_missing, missing=missing)
        elif missing_values:
            column = dataclasses.replace(column, has_default=True)
        result.append(column)
    return tuple(result)
