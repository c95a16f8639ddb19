"""Checks of publications: whether they exist, and what they publish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import counted, printable
from ..options import near
from ._examined import listed, quoted, quoted_literal
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ._examined import Examined
    from ._published_tables import ExaminedPublication, ExaminedPublications, ExaminedTable

_MOST_TABLES = 50  # the most tables in a statement that makes or alters a publication
_NEW_NAME = "changes"  # the name for a new publication, if the caller gave none

# Tables that can be published without harm, as they have a primary key. Tables of extensions are
# left out. From PostgreSQL 13 on, a partitioned table can be published; before, its partitions.
_SUITABLE = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid >= 16384 AND c.relpersistence = 'p'
    AND CASE WHEN %s THEN c.relkind IN ('r', 'p') AND NOT c.relispartition
        ELSE c.relkind = 'r' END
    AND EXISTS (SELECT FROM pg_catalog.pg_index AS i
        WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
ORDER BY 1, 2
"""

# Whether the database has any table that a publication may have.
_ANY_TABLE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c
    WHERE c.oid >= 16384 AND c.relpersistence = 'p' AND c.relkind IN ('r', 'p')
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d
        WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'))
"""


def existence(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    """Check whether the given publications exist; or, if none was given, any publication."""
    there = {publication.name for publication in published.publications}
    if server.publication_names is None and not there:
        yield _missing(
            server, "no-publication", _NEW_NAME,
            f"there is no publication in database {printable(server.role.database)}",
        )  # fmt: skip
    for name in server.publication_names or ():
        if name not in there:
            yield _missing(
                server, "publication-missing", name,
                f"there is no publication {printable(name)} in database "
                f"{printable(server.role.database)}", published.all_names,
            )  # fmt: skip
    if not there and not server.role.can_create:
        database = quoted(server.role.database)
        yield Finding(
            "no-create-privilege",
            f"role {printable(server.role.current)} lacks CREATE on database "
            f"{printable(server.role.database)}",
            (f"GRANT CREATE ON DATABASE {database} TO {quoted(server.role.current)};",),
            objects=(database,),
        )


def _missing(
    server: Examined, kind: str, name: str, text: str, others: Sequence[str] = ()
) -> Finding:
    """Return the finding for a missing publication; `others` are the other existing names."""
    if others:
        text += f", which has {listed(others)}"
    tables = _suitable(server)
    which, fix = None, "list the tables that you want"
    if not tables and not server.rows(_ANY_TABLE)[0][0]:
        text += ", and the database has no tables"
        which = "ALL TABLES"
        fix = (
            "make tables first, or run the statement as a superuser: it publishes all tables that "
            "you make later"
        )
    elif not tables:
        fix = "give the tables that you want a primary key, then list them"
    elif len(tables) <= _MOST_TABLES:
        which = f"TABLE {', '.join(tables)}"
        fix += "; the statement has all tables with a primary key"
    if others:
        similar = near(name, map(printable, others))
        existing = f"give an existing name. {similar}" if similar else "give an existing name."
        fix = f"{existing} To make a new publication, {fix}"
    sql = () if which is None else (f"CREATE PUBLICATION {quoted(name)} FOR {which};",)
    return Finding(kind, text, sql, fix, (name,))


def _suitable(server: Examined) -> list[str]:
    """Return the names of tables that can be published without harm."""
    return [quoted(*names) for names in server.rows(_SUITABLE, server.version >= 130000)]


def contents(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    """Check what each publication publishes."""
    for publication in published.publications:
        name, objects = printable(publication.name), (quoted(publication.name),)
        if publication.all_tables:
            yield Finding(
                "publication-all-tables",
                f"publication {name} is FOR ALL TABLES",
                objects=objects,
            )
        elif not any(table.kind in "rp" for table in published.members(publication)):
            tables = _suitable(server)
            fits = 0 < len(tables) <= _MOST_TABLES
            yield Finding(
                "publication-empty",
                f"publication {name} has no tables",
                (f"ALTER PUBLICATION {quoted(publication.name)} ADD TABLE {', '.join(tables)};",)
                if fits
                else (),
                "add the tables that you want"
                + ("; the statement has all tables with a primary key" if fits else ""),
                objects,
            )
        left_out = [action for action, there in publication.actions.items() if not there]
        if left_out:
            every = quoted_literal(", ".join(publication.actions))
            yield Finding(
                "publication-actions",
                f"publication {name} leaves out {', '.join(left_out)}",
                (f"ALTER PUBLICATION {quoted(publication.name)} SET (publish = {every});",),
                objects=objects,
            )
        roots = _roots(published, publication)
        if roots and not publication.via_root and server.version >= 130000:
            yield Finding(
                "partitions-as-leaves",
                f"publication {name} sends {counted(len(roots), 'partitioned table')} without "
                f"publish_via_partition_root: {listed([root.shown for root in roots])}",
                (_set_via_root(publication),),
                objects=objects,
            )


def _roots(
    published: ExaminedPublications, publication: ExaminedPublication
) -> list[ExaminedTable]:
    """Return the partitioned tables of a publication whose partitions send rows."""
    roots = {
        root.oid: root
        for table in published.sent(publication)
        if (root := published.root(publication, table)) is not table
    }
    return list(roots.values())


def _set_via_root(publication: ExaminedPublication) -> str:
    return f"ALTER PUBLICATION {quoted(publication.name)} SET (publish_via_partition_root = true);"


def together(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    """Check whether one stream can read all given publications together."""
    several = published.publications
    if server.publication_names is None or len(several) < 2:
        return
    names = listed([publication.name for publication in several])
    lists: list[ExaminedTable] = []
    mixed: list[ExaminedTable] = []
    same_root: dict[str, None] = {}
    listing: dict[tuple[str, int], tuple[ExaminedPublication, ExaminedTable]] = {}
    for table in published.all_sent():
        of = [publication for publication in several if table.oid in publication.members]
        # If a publication sends the root, publications that send the partition itself do not count.
        by_root = [
            publication
            for publication in of
            if publication.via_root and published.root(publication, table) is not table
        ]
        if len({_list_of(published, publication, table) for publication in by_root or of}) > 1:
            lists.append(table)
            for publication in by_root or of:
                named = published.root(publication, table) if publication.via_root else table
                if published.entry(publication, table).columns is not None:
                    listing[publication.name, named.oid] = (publication, named)
        if 0 < len(by_root) < len(of):
            mixed.append(table)
            for publication in of:
                if published.root(publication, table) is not table:
                    same_root |= {} if publication.via_root else {_set_via_root(publication): None}
                elif table.oid in publication.entries:
                    drop = (
                        f"ALTER PUBLICATION {quoted(publication.name)} DROP TABLE ONLY {table.sql};"
                    )
                    same_root[drop] = None
    if lists:
        yield Finding(
            "column-lists-differ",
            f"the publications {names} have different column lists for "
            f"{counted(len(lists), 'table')}: {listed([table.shown for table in lists])}",
            tuple(
                statement
                for publication, table in listing.values()
                for statement in with_columns(server, publication, table, None)
            ),
            "publish all columns with the statements, or read each publication in its own stream",
            tuple(table.sql for table in lists),
        )
    if mixed:
        yield Finding(
            "via-root-mixed",
            f"the publications {names} have different values of publish_via_partition_root for "
            f"{counted(len(mixed), 'partition')}: {listed([table.shown for table in mixed])}",
            tuple(same_root),
            objects=tuple(table.sql for table in mixed),
        )


def _list_of(
    published: ExaminedPublications, publication: ExaminedPublication, table: ExaminedTable
) -> frozenset[str] | None:
    """Return a column list as the server compares it: a list of all columns counts as none."""
    columns = published.entry(publication, table).columns
    every = {column.name for column in table.columns}
    return None if columns is None or columns >= every else columns


def with_columns(
    server: Examined,
    publication: ExaminedPublication,
    table: ExaminedTable,
    columns: Iterable[str] | None,
) -> tuple[str, ...]:
    """Return the statements that give a table another column list; None publishes all columns.

    Only DROP TABLE and ADD TABLE can change the column list of one table. They need the table's row
    filter. Return no statements if another session has locked the table, as the filter can't be
    read without waiting. Return none either if the filter has control characters, which a terminal
    would obey.
    """
    name, row_filter = quoted(publication.name), None
    if publication.entries[table.oid].has_filter:
        row_filter = server.row_filter(publication.oid, table.oid)
        if row_filter is None or not row_filter.isprintable():
            return ()
    listed_columns = ""
    if columns is not None:
        names = {*columns}
        wanted = [quoted(column.name) for column in table.columns if column.name in names]
        listed_columns = f" ({', '.join(wanted)})"
    where = "" if row_filter is None else f" WHERE ({row_filter})"
    return (
        "BEGIN;",
        f"ALTER PUBLICATION {name} DROP TABLE ONLY {table.sql};",
        f"ALTER PUBLICATION {name} ADD TABLE ONLY {table.sql}{listed_columns}{where};",
        "COMMIT;",
    )
