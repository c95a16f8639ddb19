"""The option that names a server, and what is refused or said so that no password shows."""

from __future__ import annotations

import os
import sys

import click
from click.core import ParameterSource

from ..connections import ConnectionParameters

_SERVERS = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")
"""Variables of libpq; if one of them is set, it is clear which server or database is meant."""

dsn_option = click.option(
    "--dsn",
    envvar="PGOUTPUT_FAST_DSN",
    help="Connection string or URL of libpq; the default is PGOUTPUT_FAST_DSN. What it leaves out, "
    "or all of it, is taken from libpq's variables (PGHOST, PGPORT, PGDATABASE, PGUSER, …) and "
    "service files (PGSERVICE). A password is best in a password file (~/.pgpass).",
)


def refuse_arguments(context: click.Context) -> None:
    """Refuse arguments besides the options; the command needs ``allow_extra_args``."""
    if context.args:
        # click would print the argument, which may be the password in a DSN without quotes.
        raise click.UsageError("unexpected extra argument; a DSN follows --dsn, in quotes")


def check_server(context: click.Context, dsn: str | None) -> None:
    """Refuse a call that names no server, and warn of a password that others can read.

    Raises
    ------
    PgOutputError
        The connection string can't be read.
    """
    if dsn is None and not any(os.environ.get(name) for name in _SERVERS):
        raise click.UsageError(
            "no server is named: give --dsn, or set libpq's variables, as PGHOST and PGDATABASE, "
            "or PGSERVICE for an entry of a service file"
        )
    named = context.get_parameter_source("dsn") == ParameterSource.COMMANDLINE
    if named and ConnectionParameters(dsn).has_secret:
        print(
            "pgoutput-fast: other users of this machine can read a password in --dsn, as they can "
            "read every command line; a password file (~/.pgpass) or PGOUTPUT_FAST_DSN hides it",
            file=sys.stderr,
        )
