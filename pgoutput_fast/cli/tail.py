"""`pgoutput-fast tail`: print a server's changes live, through a temporary slot."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from pathlib import Path

import click

from .. import Begin, Commit, TypeRegistry
from ..connections import ConnectionParameters, server_error
from ..replication import connect
from ..replication.membership import warn_of_publications
from ..watching.logs import RecordFormatter, logged
from ._dsn import dsn_of, naming_doctor, publications_option, server_command
from ._options import is_of, table_patterns
from ._show import Lines, Messages, Values, as_json, values_option
from ._style import paint_for


def _types(dsn: str) -> TypeRegistry:
    """Read the types in the catalogue of the server's database."""
    with ConnectionParameters(dsn).open(replication=False) as connection:
        import psycopg

        try:
            return TypeRegistry.from_connection(connection)
        except psycopg.Error as error:
            raise server_error("can't read the types", str(error), error.sqlstate) from error


@server_command(
    examples=(
        "pgoutput-fast tail --dsn postgresql:///shop --publication shop",
        "pgoutput-fast tail --publication shop --table 'public.order*' --json",
    ),
)
@publications_option(required=True, help="Publication to read; repeatable.")
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="PATTERN",
    help="Only these tables, such as public.order*; repeatable.",
)
@click.option("--json", "as_objects", is_flag=True, help="Print a JSON object per line.")
@values_option
@click.option("--binary", is_flag=True, help="Receive values in binary format.")
@click.option("--messages", is_flag=True, help="Also print logical messages.")
@click.option("--full", is_flag=True, help="Print long values whole.")
@click.pass_context
def command(
    context: click.Context,
    dsn: str | None,
    dsn_file: Path | None,
    publications: tuple[str, ...],
    tables: tuple[str, ...],
    as_objects: bool,
    values: Values | None,
    binary: bool,
    messages: bool,
    full: bool,
) -> int:
    """Print the changes of a server from now on, in commit order, until Ctrl-C.

    The command uses a temporary slot, which the server drops when the command ends, even after a
    kill. Ctrl-C ends with exit code 0.

    With --values typed or --binary, the command reads user-defined types once, when it starts.
    """
    if values and not as_objects:
        raise click.UsageError("--values is for --json")
    dsn = dsn_of(context, dsn, dsn_file)
    patterns = table_patterns(tables)
    lines = Lines(full=full, paint=paint_for(sys.stdout))
    slot = f"pgoutput_fast_tail_{os.getpid()}_{secrets.token_hex(4)}"
    try:
        # Only the catalogue has the fields of a composite and the binary format of a type.
        registry = _types(dsn or "") if values == "typed" or binary else None
        with (
            logged(RecordFormatter("text"), level=logging.WARNING),
            naming_doctor(publications),
            connect(
                dsn,
                slot=slot,
                publications=publications,
                temporary=True,
                protocol=1,
                binary=binary,
                messages=messages,
            ) as stream,
        ):
            print(f"tail of {', '.join(publications)} begins; Ctrl-C ends it", file=sys.stderr)
            warn_of_publications(ConnectionParameters(dsn or ""), publications)
            decoder = Messages(stream.connection.settings["client_encoding"], registry=registry)
            in_transaction = False
            while (batch := stream.receive()) is not None:
                for lsn, _, time, frame in batch.frames:
                    shown = decoder.decode(lsn, time, frame)
                    if is_of(shown.tables, patterns):
                        typed = values == "typed"
                        print(as_json(shown, typed=typed) if as_objects else lines(shown))
                    if isinstance(shown.message, Begin):
                        in_transaction = True
                    elif isinstance(shown.message, Commit):
                        in_transaction = False
                        # The transaction is printed, so the server may forget it.
                        stream.acknowledge(shown.message.end_lsn)
                sys.stdout.flush()
                if batch.keepalive_lsn is not None and not in_transaction:
                    stream.acknowledge(batch.keepalive_lsn)
    except KeyboardInterrupt:
        return 0
    return 0
