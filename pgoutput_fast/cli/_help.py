"""Format the help of a command: options in groups, and examples.

Each option has one line on a terminal of 80 columns; a test measures this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ._style import StyledContext


class GroupedCommand(click.Command):
    """A command whose help shows options in groups, and examples at the end.

    Parameters
    ----------
    *arguments
        Parameters of click's command.
    groups : mapping of str to str, optional
        For each heading the names of the group's parameters, separated by spaces. Other options
        come last.
    examples : sequence of str, optional
        Command lines.
    **options
        Parameters of click's command.
    """

    context_class = StyledContext

    def __init__(
        self,
        *arguments: Any,
        groups: Mapping[str, str] | None = None,
        examples: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._groups = groups or {}
        self._examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all options; called by click."""
        options = {
            option.name: option
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
        }
        grouped = {heading: names.split() for heading, names in self._groups.items()}
        named = [name for names in grouped.values() for name in names]
        rest = "Other options" if grouped else "Options"
        grouped[rest] = [name for name in options if name not in named]
        for heading, names in grouped.items():
            records = [options[name].get_help_record(ctx) for name in names]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record is not None])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples; called by click."""
        super().format_epilog(ctx, formatter)
        if self._examples:
            with formatter.section("Examples"):
                for line in self._examples:
                    formatter.write(f"  {line}\n")


class GroupWithExamples(GroupedCommand, click.Group):
    """A group of commands whose help shows examples at the end, as its commands' help does."""

    command_class = GroupedCommand

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all options and commands; called by click."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
