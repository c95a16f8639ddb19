"""Find the server that a command connects to: by --dsn, --dsn-file, or libpq's variables."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..connections import ConnectionParameters, check_publication_names, doctor_command
from ..errors import PgOutputError, ReplicationError, RetryableError
from ._help import GroupedCommand

_SERVERS = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")
"""Variables of libpq; each of them names a server or a database."""

_MOST = 64 << 10  # the largest number of bytes in a file with a DSN

_Command = TypeVar("_Command", bound=Callable[..., Any])


def server_command(
    *, groups: Mapping[str, str] | None = None, examples: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], GroupedCommand]:
    """Make a command with the options --dsn and --dsn-file; `dsn_of` evaluates them.

    An extra argument may be the password of a DSN without quotes, and click's own error would print
    the argument. So the command allows extra arguments, and `dsn_of` refuses them.

    Parameters
    ----------
    groups, examples
        Parameters of `GroupedCommand`.
    """
    command = click.command(
        cls=GroupedCommand,
        groups=groups,
        examples=examples,
        context_settings={"allow_extra_args": True},
    )
    string = click.option(
        "--dsn",
        metavar="DSN|URL",
        envvar="PGOUTPUT_FAST_DSN",
        help="The server. [default: PGOUTPUT_FAST_DSN, PGHOST, …]",
    )
    file = click.option(
        "--dsn-file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="File with the DSN; only its owner may read it.",
    )
    return lambda function: command(string(file(function)))


def publications_option(**options: Any) -> Callable[[_Command], _Command]:
    """Make the option --publication, which may be given several times.

    Parameters
    ----------
    **options
        Parameters of click's option.
    """

    def checked(
        context: click.Context, parameter: click.Parameter, names: tuple[str, ...]
    ) -> tuple[str, ...]:
        try:
            if names:
                check_publication_names(names)
        except PgOutputError as error:
            raise click.BadParameter(str(error), context, parameter) from error
        return names

    return click.option(
        "--publication", "publications", multiple=True, metavar="NAME", callback=checked, **options
    )


_NOT_READY = frozenset({"42501", "42704", "53400", "55000"})
"""SQLSTATEs of a server that lacks a setting, a right, a publication or a free slot."""
_NOT_READY_CODES = frozenset({"no_publication", "no_rights", "server_setting"})
"""Codes of the same errors, where the server has sent no SQLSTATE."""


@contextlib.contextmanager
def naming_doctor(publications: Sequence[str]) -> Iterator[None]:
    """Add a hint to the command `doctor` to the error of a server that is not ready."""
    try:
        yield
    except RetryableError:
        raise
    except PgOutputError as error:
        sqlstate = error.sqlstate if isinstance(error, ReplicationError) else None
        is_ready = sqlstate not in _NOT_READY and error.code not in _NOT_READY_CODES
        if not is_ready and "doctor" not in str(error):
            text = f"Run {doctor_command(publications)} to see all that the server lacks"
            error.hint = (*error.hint, f". {text}") if error.hint else (text,)
        raise


def _warn(text: str) -> None:
    print(f"pgoutput-fast: {text}", file=sys.stderr)


def dsn_of(
    context: click.Context,
    dsn: str | None,
    file: Path | None,
    warn: Callable[[str], None] = _warn,
) -> str | None:
    """Return the DSN of a command's options; None if libpq's variables name the server.

    Parameters
    ----------
    context : click.Context
        The context of a `server_command`.
    dsn, file
        The options' values.
    warn : callable, optional
        Called if other users can read a password; by default it prints on standard error.

    Raises
    ------
    click.UsageError
        No server is named, or two servers are.
    PgOutputError
        The file can't be read, or others can read it. The error shows nothing of its content.
    """
    if context.args:
        raise click.UsageError("unexpected extra argument; a DSN follows --dsn, in quotes")
    named = context.get_parameter_source("dsn") == ParameterSource.COMMANDLINE
    if file is not None:
        if named:
            raise click.UsageError("--dsn and --dsn-file exclude each other")
        return _read(file)
    if dsn is None and not any(os.environ.get(name) for name in _SERVERS):
        raise click.UsageError(
            "no server is named: give --dsn or --dsn-file, or set libpq's variables, such as "
            "PGHOST and PGDATABASE, or PGSERVICE"
        )
    if named and ConnectionParameters(dsn).has_secret:
        warn(
            "other users of this machine can read a password in --dsn. To hide it, use --dsn-file, "
            "a password file (~/.pgpass) or PGOUTPUT_FAST_DSN"
        )
    return dsn


def _read(path: Path) -> str:
    """Read the DSN in a file.

    Raises
    ------
    PgOutputError
        The file can't be read, others can read it, or it contains no DSN.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # libpq's rule for private keys: a group may read a file that belongs to root. systemd
            # and Kubernetes provide such files.
            refused = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid else stat.S_IWGRP)
            if status.st_mode & refused:
                raise PgOutputError(
                    f"other users can read or write {path}, which may contain a password",
                    code="bad_option",
                    parameter="dsn_file",
                    hint=f"Run chmod 600 {path}",
                    path=str(path),
                )
            text = file.read(_MOST + 1)
    except OSError as error:
        raise PgOutputError(
            f"can't read {path}: {error.strerror or error}",
            code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
            path=str(path),
        ) from error
    try:
        dsn = text.decode().strip()
    except UnicodeDecodeError:
        dsn = ""
    if not dsn or "\0" in dsn or len(text) > _MOST:
        raise PgOutputError(
            f"{path} has no DSN",
            code="bad_option",
            parameter="dsn_file",
            hint="Write only a DSN into it, such as 'host=… dbname=…'",
            path=str(path),
        )
    return dsn
