"""The command `pgoutput-fast`, with a module for each subcommand.

The command imports a subcommand's module only when you call the subcommand. The options come from
the classes of options that the functions of this package use.

Exit codes:

- 0: success. `tail` also ends with 0 on Ctrl-C, its usual end. `capture` and `sync` also end with 0
  on SIGTERM or SIGHUP, because their work is on disk then.
- 1: an error, or nothing matched; one line on standard error says which. `doctor` has found an
  error.
- 2: wrong usage.
- 3: `sync --until` has ended, but some tables are paused or stale.
- 75 (EX_TEMPFAIL): `capture` or `sync` met an error that may pass; theirs is 1 if it is lasting.
- 129 and 143: SIGHUP and SIGTERM ended `demo`.
- 130: Ctrl-C.
- 141: standard output is a pipe that nobody reads any more.

The exit code of `verify` is its result: 1 if a table differs, 2 if a table could not be compared.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from .. import FALLBACK_REASON, IMPLEMENTATION, __version__
from ..errors import PgOutputError, printable, without_passwords

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click

_COMMANDS = {
    "capture": "Write the changes of a slot to a change log.",
    "consumers": "List, add or remove the consumers of a change log.",
    "demo": "Run a server, load, a sync and a kill, and compare the tables.",
    "doctor": "Check whether a server is ready, and say what to change.",
    "inspect": "Print the messages of a change log or a recorded stream.",
    "snapshot": "Ask a capture for new snapshots of tables.",
    "sync": "Keep tables in DuckDB or Delta up to date with a server.",
    "tail": "Print the changes of a server as they are committed.",
    "verify": "Compare each row of a target with the server.",
}
"""The help of each subcommand. The module of the same name in this package defines `command`."""


_COMPLETE = "_PGOUTPUT_FAST_COMPLETE"
"""The environment variable by which a shell asks for completions, or for its completion script."""


def _group() -> click.Group:
    import click
    from click.shell_completion import CompletionItem

    from ._style import StyledContext

    class Group(click.Group):
        """The group of commands, which imports a command when it is needed."""

        context_class = StyledContext

        def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
            return sorted(_COMMANDS)

        def get_command(
            self,
            ctx: click.Context,
            cmd_name: str,
        ) -> click.Command | None:
            if "=" in cmd_name or "://" in cmd_name:
                # click's own error would print the argument, which may contain a password.
                ctx.fail("the first argument is a command; a DSN follows --dsn of a command")
            if cmd_name not in _COMMANDS:
                near = difflib.get_close_matches(cmd_name, _COMMANDS, 1)
                if near and not ctx.resilient_parsing:
                    ctx.fail(f"No such command {cmd_name!r}; did you mean {near[0]}?")
                return None
            command: click.Command = _imported(cmd_name).command
            return command

        def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
            if incomplete.startswith("-"):
                return super().shell_complete(ctx, incomplete)
            return [
                CompletionItem(name, help=text)
                for name, text in sorted(_COMMANDS.items())
                if name.startswith(incomplete)
            ]

        def format_commands(
            self,
            ctx: click.Context,  # noqa: ARG002
            formatter: click.HelpFormatter,
        ) -> None:
            with formatter.section("Commands"):
                formatter.write_dl(sorted(_COMMANDS.items()))

    implementation = f"implementation {IMPLEMENTATION}"
    if FALLBACK_REASON is not None:
        implementation += f" ({FALLBACK_REASON})"
    group = Group(
        name="pgoutput-fast",
        help="Stream changes out of PostgreSQL, into tables in DuckDB, Delta and Spark.",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
    )
    return click.version_option(
        __version__, prog_name="pgoutput-fast", message=f"%(prog)s %(version)s, {implementation}"
    )(group)


_POOL = "ARROW_DEFAULT_MEMORY_POOL"
"""The environment variable for Arrow's allocator; pyarrow reads it when it is imported."""


def _imported(name: str) -> Any:
    """Import the module of a subcommand; `sync` on Linux gets the allocator jemalloc.

    A sync runs for months. When many threads free memory, Arrow's default allocator keeps several
    times as much as was ever in use: it grew from 270 to 420 MB while larger and larger files were
    joined. With jemalloc it stayed at 270 MB.
    """
    chooses = name == "sync" and sys.platform == "linux" and _POOL not in os.environ
    if chooses:
        os.environ[_POOL] = "jemalloc"
    try:
        return importlib.import_module(f"{__name__}.{name}")
    finally:
        if chooses:
            del os.environ[_POOL]  # child processes choose for themselves


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments; by default those of the process.
    """
    try:
        import click
    except ImportError as error:
        print(
            f"pgoutput-fast: the command needs click ({error}); install the extra "
            "pgoutput-fast[cli]",
            file=sys.stderr,
        )
        return 1
    for stream in (sys.stdout, sys.stderr):
        # Print characters that the terminal's encoding lacks as escapes, instead of an error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Do not call Group.main(): it handles Ctrl-C and closed pipes in its own way.
        group = _group()
        if instruction := os.environ.get(_COMPLETE):
            return _completed(group, instruction)
        with group.make_context("pgoutput-fast", command_line) as context:
            try:
                code = group.invoke(context)
            except PgOutputError as error:
                _print_error(_text_of(error, group, context))
                return 1
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        _print_usage(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except PgOutputError as error:
        _print_error(str(error))
        return 1
    except BrokenPipeError:
        # Python flushes standard output at exit, and would print the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        # Standard output can't be written, for example because the disk is full.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _print_error(f"can't write the output: {error}")
        return 1


def _print_usage(error: click.ClickException) -> None:
    """Print wrong usage as click does, but hide passwords in misplaced arguments."""
    printed = io.StringIO()
    error.show(file=printed)
    for line in without_passwords(printed.getvalue()).splitlines():
        print(printable(line), file=sys.stderr)


def _completed(group: click.Group, instruction: str) -> int:
    """Answer a shell: ``bash_source`` asks for a script, ``bash_complete`` for completions."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(group, {}, "pgoutput-fast", _COMPLETE, instruction)
    except PgOutputError:
        return 1  # an extra is missing; a message would disturb the shell's prompt


def _text_of(error: PgOutputError, group: click.Group, context: click.Context) -> str:
    """Return an error's text, with the options of the subcommand that raised it."""
    from ._options import shown_by

    command = group.get_command(context, context.invoked_subcommand or "")
    return str(error) if command is None else error.text(shown_by(command))


def _print_error(text: str) -> None:
    from ._style import paint_for

    paint = paint_for(sys.stderr)
    print(
        f"{paint('pgoutput-fast:', 'error')} {printable(without_passwords(text))}", file=sys.stderr
    )
