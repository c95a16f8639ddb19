"""Checks of published tables: replica identities, and rows and columns that are not sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import counted, printable
from ..numerics import advice, read_numerics
from ._check_publications import with_columns
from ._examined import listed, quoted
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ._examined import Examined
    from ._published_tables import ExaminedPublication, ExaminedPublications, ExaminedTable


def _finding(
    kind: str,
    text: str,
    tables: Sequence[ExaminedTable],
    sql: Iterable[str] = (),
    advice: str | None = None,
    what: str = "table",
) -> Finding:
    """Make a finding about tables, whose names follow the text."""
    return Finding(
        kind,
        f"{counted(len(tables), what)} {text}: {listed([table.shown for table in tables])}",
        tuple(sql),
        advice,
        tuple(table.sql for table in tables),
    )


def _set_identity(table: ExaminedTable, identity: str) -> str:
    return f"ALTER TABLE ONLY {table.sql} REPLICA IDENTITY {identity};"


def _key_of(table: ExaminedTable) -> str | None:
    """Return the replica identity that a table's indexes allow; None without such an index."""
    if table.primary_key:
        return "DEFAULT"
    return f"USING INDEX {quoted(table.candidate)}" if table.candidate else None


def identities(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:  # noqa: ARG001
    """Check replica identities; each partition has its own."""
    need = {
        table.oid
        for publication in published.publications
        if publication.sends_old
        for table in published.sent(publication)
    }
    tables = [table for table in published.all_sent() if table.oid in need]
    nothing = [table for table in tables if table.identity == "n"]
    missing = [table for table in tables if table.lacks_identity and table.identity != "n"]
    better = "better add a primary key: with FULL, each change writes the whole old row"
    for kind, text, which in (
        ("identity-nothing", "with REPLICA IDENTITY NOTHING", nothing),
        ("identity-missing", "without replica identity, as they lack a primary key", missing),
    ):
        if which:
            yield _finding(
                kind,
                f"{text}, published with UPDATE or DELETE",
                which,
                (_set_identity(table, _key_of(table) or "FULL") for table in which),
                better if any(_key_of(table) is None for table in which) else None,
            )
    full = [table for table in tables if table.identity == "f"]
    with_key = [table for table in full if _key_of(table) is not None]
    if with_key:
        yield _finding(
            "identity-full",
            "with REPLICA IDENTITY FULL that could have a key",
            with_key,
            (_set_identity(table, _key_of(table) or "") for table in with_key),
            "keep FULL if you want old values, or if a row filter needs them",
        )
    without = [table for table in full if _key_of(table) is None]
    if without:
        yield _finding(
            "identity-full-without-key",
            "with REPLICA IDENTITY FULL and no primary key",
            without,
            advice="add a primary key",
        )
    indexed = [table for table in tables if table.identity == "i" and table.key]
    if indexed:
        yield _finding("identity-index", "with REPLICA IDENTITY USING INDEX", indexed)
    large = [table for table in tables if table.toast and table.identity != "f"]
    if large:
        yield _finding(
            "toast-unchanged",
            "may have values that are stored out of line",
            large,
            advice="if such a value does not come, keep the value in the target; with REPLICA "
            "IDENTITY FULL, the old row has it",
        )


def partitions(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:  # noqa: ARG001
    """Find partitions whose replica identity differs from the root that publishes them."""
    pairs = {
        (table.oid, root.oid): (table, root)
        for publication in published.publications
        if publication.via_root and publication.sends_old
        for table in published.sent(publication)
        if (root := published.root(publication, table)).identity != table.identity
    }
    differ = [table for table, _ in pairs.values()]
    if not differ:
        return
    concerned = {table.oid: table for pair in pairs.values() for table in pair}.values()
    if all(table.primary_key for table in concerned):
        sql = [_set_identity(table, "DEFAULT") for table in concerned if table.identity != "d"]
    elif all("f" in (table.identity, root.identity) for table, root in pairs.values()):
        sql = [_set_identity(table, "FULL") for table in concerned if table.identity != "f"]
    else:
        sql = []
    yield _finding(
        "partition-identity",
        "with another replica identity than their root",
        differ,
        sql,
        "ALTER TABLE … REPLICA IDENTITY of a partitioned table does not change its partitions",
    )


def generated(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    """Check generated columns. From PostgreSQL 18 on, a publication can publish stored ones."""
    unsent: dict[int, ExaminedTable] = {}
    virtual: dict[int, ExaminedTable] = {}
    refused: dict[int, ExaminedTable] = {}
    sql: dict[str, None] = {}
    mending: dict[str, None] = {}
    for publication in published.publications:
        alter = f"ALTER PUBLICATION {quoted(publication.name)}"
        publish = f"{alter} SET (publish_generated_columns = stored);"
        for table in published.sent(publication):
            entry = published.entry(publication, table)
            stored = {column.name for column in table.columns if column.generated == "s"}
            computed = {column.name for column in table.columns if column.generated == "v"}
            sent = stored & entry.columns if entry.columns else set()
            missing = set() if publication.generated == "s" else stored - sent
            if computed:
                virtual[table.oid] = table
            if missing and entry.columns is None:
                unsent[table.oid] = table
                sql[publish] = None
            # Before PostgreSQL 18, REPLICA IDENTITY FULL sends old rows without generated columns.
            in_key = (
                (missing | computed) & table.key
                if server.version >= 180000 or table.identity != "f"
                else set()
            )
            if in_key and publication.sends_old:
                refused[table.oid] = table
                if server.version < 180000:
                    mending[_set_identity(table, "FULL")] = None
                elif in_key & computed:
                    if (key := _key_of(table)) is not None:
                        mending[_set_identity(table, key)] = None
                else:
                    mending[publish] = None
    if refused:
        yield _finding(
            "identity-generated",
            "with generated columns in their replica identity that are not sent",
            list(refused.values()),
            mending,
            None if mending else "give the table a primary key",
        )
    if unsent:
        yield _finding(
            "generated-columns",
            "with stored generated columns",
            list(unsent.values()),
            sql if server.version >= 180000 else (),
            None if server.version >= 180000 else "PostgreSQL 18 can send them",
        )
    if virtual:
        yield _finding("virtual-columns", "with virtual generated columns", list(virtual.values()))


def not_sent(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:  # noqa: ARG001
    """Find tables in publications whose changes are not sent."""
    tables = published.not_sent()
    unlogged = [table for table in tables if table.persistence == "u"]
    if unlogged:
        yield _finding(
            "table-unlogged",
            "in publications",
            unlogged,
            (f"ALTER TABLE {table.sql} SET LOGGED;" for table in unlogged),
            "the statement writes the whole table to the server's log",
            "unlogged table",
        )
    temporary = [table for table in tables if table.persistence == "t"]
    if temporary:
        yield _finding("table-temporary", "in publications", temporary, what="temporary table")
    foreign = [table for table in tables if table.kind == "f"]
    if foreign:
        yield _finding(
            "partition-foreign",
            "in publications",
            foreign,
            advice="capture them from their own servers",
            what="foreign table",
        )


def numerics(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    """Find numeric columns without precision."""
    readable = [table.oid for table in published.all_sent() if table.select and table.usage]
    columns = read_numerics(server.rows, readable)
    if columns:
        names = {(column.namespace, column.name) for column in columns}
        tables = [table for table in published.all_sent() if (table.namespace, table.name) in names]
        listing = listed([column.shown for column in columns])
        shown = f"with numeric columns without precision ({listing})"
        yield _finding("numeric-without-precision", shown, tables, advice=advice(columns))


def lists_and_filters(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    """Check column lists and row filters, and whether they fit the replica identities."""
    lists = []
    filters = []
    for publication in published.publications:
        for oid, entry in publication.entries.items():
            table = published.tables[oid]
            of = f"{table.shown} in publication {printable(publication.name)}"
            if entry.columns is not None:
                number = f"{len(entry.columns)} of {counted(len(table.columns), 'column')}"
                lists.append((table, f"{of} ({number})"))
            if entry.has_filter:
                filters.append((table, f"{of} ({listed(sorted(entry.filtered))})"))
    for kind, concerned, what in (
        ("column-list", lists, "column lists"),
        ("row-filter", filters, "row filters on columns"),
    ):
        if concerned:
            tables = [table for table, _ in concerned]
            texts = listed([text for _, text in concerned])
            yield Finding(
                kind,
                f"{counted(len(concerned), 'table')} with {what}: {texts}",
                objects=tuple(table.sql for table in tables),
            )
    if lists and 150000 <= server.version < 150002:
        yield Finding(
            "column-lists-broken",
            f"PostgreSQL 15.{server.version % 10000} has column lists of "
            f"{counted(len(lists), 'table')}",
            advice="update to PostgreSQL 15.2 or newer",
        )
    yield from _uncovered(server, published)


def _uncovered(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    lacking: dict[int, ExaminedTable] = {}
    lists: dict[tuple[str, int], tuple[ExaminedPublication, ExaminedTable, set[str] | None]] = {}
    filtered: dict[int, ExaminedTable] = {}
    for publication in published.publications:
        if not publication.sends_old:
            continue
        for table in published.sent(publication):
            entry = published.entry(publication, table)
            if table.lacks_identity:
                continue  # `identities` reports it
            if not entry.filtered <= table.key:
                filtered[table.oid] = table
            if entry.columns is None:
                continue
            # The server allows no column list with FULL, not even one with all columns.
            whole = table.identity == "f"
            if whole or not table.key <= entry.columns:
                lacking[table.oid] = table
                named = published.root(publication, table) if publication.via_root else table
                before = lists.get(
                    (publication.name, named.oid), (publication, named, set(entry.columns))
                )[2]
                wanted = None if whole or before is None else before | table.key
                lists[publication.name, named.oid] = (publication, named, wanted)
    if lacking:
        yield _finding(
            "column-list-identity",
            "with column lists that lack columns of the replica identity",
            list(lacking.values()),
            (
                statement
                for publication, table, columns in lists.values()
                for statement in with_columns(server, publication, table, columns)
            ),
            "or publish inserts only",
        )
    if filtered:
        yield _finding(
            "row-filter-identity",
            "with row filters on columns that are not in the replica identity",
            list(filtered.values()),
            (_set_identity(table, "FULL") for table in filtered.values()),
            "or publish inserts only",
        )
