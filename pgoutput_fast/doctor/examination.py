"""Run all checks of a server, and sort their findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from ..connections import ConnectionParameters, check_publication_names, server_error
from ..errors import PgOutputError, printable
from ..replication.walsender import check_slot_name
from . import _check_access as access
from . import _check_publications as publication_checks
from . import _check_server as server_checks
from . import _check_slots as slot_checks
from . import _check_tables as table_checks
from ._examined import Examined
from ._published_tables import ExaminedPublications
from .findings import LEVELS, DoctorReport, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_OLDEST = 100000
_NO_PRIVILEGE = "42501"  # SQLSTATE insufficient_privilege

# The checks, each with the text that the finding "could-not-check" shows.
_OF_SERVER = (
    ("the version", server_checks.version),
    ("wal_level", server_checks.log_level),
    ("the numbers of walsenders and slots", server_checks.limits),
    ("the log that is kept", server_checks.retained_log),
    ("timeouts", server_checks.timeouts),
    ("the memory of decoding", server_checks.memory),
    ("timeouts of sessions", server_checks.session_timeouts),
    ("the standby", server_checks.standby),
    ("transactions that are open", server_checks.transactions),
    ("prepared transactions", server_checks.prepared_transactions),
    ("replication slots", slot_checks.slots),
    ("statistics of slots", slot_checks.spills),
    ("the role", access.history),
)
_OF_PUBLICATIONS = (
    ("publications", publication_checks.existence),
    ("what publications publish", publication_checks.contents),
    ("publications that are read together", publication_checks.together),
    ("replica identities", table_checks.identities),
    ("partitions", table_checks.partitions),
    ("generated columns", table_checks.generated),
    ("tables that are not sent", table_checks.not_sent),
    ("numeric columns", table_checks.numerics),
    ("column lists and row filters", table_checks.lists_and_filters),
    ("privileges", access.privileges),
)


def examine(
    dsn: str | None = None,
    publications: Sequence[str] | None = None,
    slot: str | None = None,
) -> DoctorReport:
    """Check whether a server and its tables are ready for a capture.

    The check changes nothing, and makes no slot. If the role may not read something, the report has
    a finding that says so.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL. Missing parameters come from libpq's environment
        variables.
    publications : list or tuple of str, optional
        The publications that one stream will read. By default, each publication of the database is
        examined on its own.
    slot : str, optional
        The slot that the stream will read. Without a slot, all slots are examined as other
        readers' slots.

    Raises
    ------
    PgOutputError
        The connection string can't be read, the server can't be reached or refuses the connection,
        or a name is not valid. No message has the password.
    TypeError
        An argument has a wrong type.
    """
    if publications is not None:
        check_publication_names(publications)
    if slot is not None:
        check_slot_name(slot)
    parameters = ConnectionParameters(dsn)
    with parameters.open(replication=False) as connection:
        if connection.info.server_version < _OLDEST:
            return _too_old(connection, slot)
        server = Examined(connection, publications, slot)
        findings: list[Finding] = []

        published: list[ExaminedPublications] = []

        def check(what: str, run: Callable[..., Iterable[Finding]], *arguments: object) -> None:
            findings.extend(_checked(connection, what, run, *arguments))

        def read_publications() -> Iterable[Finding]:
            published.append(ExaminedPublications(server))
            return ()

        for what, of_server in _OF_SERVER:
            check(what, of_server, server)
        check("the replication connection", access.replication, server, parameters, tuple(findings))
        check("publications", read_publications)
        for what, of_publications in _OF_PUBLICATIONS if published else ():
            check(what, of_publications, server, published[0])
    return DoctorReport(
        server.version,
        server.role.database,
        server.role.name,
        tuple(publication.name for publication in published[0].publications) if published else (),
        slot,
        tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level))),
    )


def _checked(
    connection: psycopg.Connection[tuple[object, ...]],
    what: str,
    run: Callable[..., Iterable[Finding]],
    *arguments: object,
) -> list[Finding]:
    """Run a check, and return its findings; an error of the server becomes a finding.

    Raises
    ------
    PgOutputError
        The connection is lost.
    """
    findings: list[Finding] = []
    try:
        # One by one, to keep the findings before an error.
        for finding in run(*arguments):
            findings.append(finding)  # noqa: PERF402
    except (psycopg.Error, PgOutputError) as error:
        state = error.sqlstate if isinstance(error, psycopg.Error) else None
        if connection.closed:
            raise server_error("the connection is lost", str(error), state) from error
        findings.append(
            Finding(
                "could-not-check",
                f"could not check {what}: {printable(' '.join(str(error).split()))}",
                advice="grant the role the right to read it, or run doctor as another role"
                if state == _NO_PRIVILEGE
                else None,
            )
        )
    return findings


def _too_old(connection: psycopg.Connection[tuple[object, ...]], slot: str | None) -> DoctorReport:
    number, info = connection.info.server_version, connection.info
    finding = Finding(
        "server-too-old",
        f"the server is PostgreSQL {number // 10000}.{number // 100 % 100}",
        advice="update to a newer version",
    )
    return DoctorReport(number, info.dbname, info.user, (), slot, (finding,))
