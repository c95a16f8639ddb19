"""Checks of the role: whether it may stream, and copy the tables for a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PgOutputError, counted, printable
from ..replication import ReplicationConnection
from ._examined import listed, quoted
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..connections import ConnectionParameters
    from ._examined import Examined
    from ._published_tables import ExaminedPublications

# Roles of managed servers whose members may stream without the attribute REPLICATION.
_MANAGED = ("rds_replication",)

_MANAGED_ROLES = """
SELECT rolname::text, pg_catalog.pg_has_role(session_user, oid, 'MEMBER')
FROM pg_catalog.pg_roles WHERE rolname = ANY(%s)
"""


def replication(
    server: Examined, parameters: ConnectionParameters, before: Sequence[Finding]
) -> Iterator[Finding]:
    """Try a connection in replication mode: only this shows what pg_hba.conf allows.

    `before` has the findings of earlier checks.
    """
    try:
        ReplicationConnection(parameters).close()
    except PgOutputError as error:
        managed = server.rows(_MANAGED_ROLES, list(_MANAGED))
        role = server.role
        if not (role.superuser or role.replication or any(member for _, member in managed)):
            yield Finding(
                "role-replication",
                f"role {printable(role.name)} lacks the attribute REPLICATION",
                server.grant(quoted(managed[0][0]))
                if managed
                else (f"ALTER ROLE {quoted(role.name)} REPLICATION;",),
                objects=(role.name,),
            )
        elif "wal-senders-exhausted" not in {finding.id for finding in before}:
            yield Finding(
                "replication-connection",
                printable(str(error)),
                advice="connect to the server itself, without a pooler. If pg_hba.conf refuses, "
                "add a line for this role, this address and this database",
            )


def history(server: Examined) -> Iterator[Finding]:
    """Check whether the role could make the event triggers for an exact schema history."""
    if not server.role.superuser:
        yield Finding(
            "ddl-history", f"role {printable(server.role.current)} is no superuser",
            objects=(server.role.current,),
        )  # fmt: skip


def privileges(server: Examined, published: ExaminedPublications) -> Iterator[Finding]:
    """Check whether the role may read the published tables, and all of their rows."""
    role = server.role.current
    tables = published.read()
    schemas = sorted({table.namespace for table in tables if not table.usage})
    if schemas:
        yield Finding(
            "schema-usage",
            f"role {printable(role)} lacks USAGE on {counted(len(schemas), 'schema')}: "
            f"{listed(schemas)}",
            tuple(f"GRANT USAGE ON SCHEMA {quoted(name)} TO {quoted(role)};" for name in schemas),
            objects=tuple(map(quoted, schemas)),
        )
    unread = [table for table in tables if not table.select]
    if unread:
        yield Finding(
            "select-privilege",
            f"role {printable(role)} lacks SELECT on {counted(len(unread), 'table')}: "
            f"{listed([table.shown for table in unread])}",
            tuple(f"GRANT SELECT ON {table.sql} TO {quoted(role)};" for table in unread),
            objects=tuple(table.sql for table in unread),
        )
    secured = [table for table in tables if table.row_security]
    if secured:
        yield Finding(
            "row-security",
            f"row-level security applies to role {printable(role)} in "
            f"{counted(len(secured), 'table')}: {listed([table.shown for table in secured])}",
            (f"ALTER ROLE {quoted(role)} BYPASSRLS;",),
            objects=tuple(table.sql for table in secured),
        )
