"""Errors name arguments of Python functions; a command shows its own options in their place."""

from __future__ import annotations

import ast
import re
import shlex
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

# An argument with a value, as in adopt_slot=True, history="newer" or tables=['a', 'b']; or alone,
# as in consumer=.
_ARGUMENT = re.compile(
    r"""
    (?<![\w./-]) ([a-z]+(?:_[a-z]+)*) =
    (?: (["'])([^"']*)\2 | (-?\w+(?:\.\w+)*) | (\[(?:'[^']*'|"[^"]*"|,[ ])*\]) | (?=[\s,;:)]|$) )
    """,
    re.ASCII | re.VERBOSE,
)
_POLICY = re.compile(r"Policies\(([a-z_]+=[^()]*)\)", re.ASCII)
# Arguments whose options have other names.
_PARAMETERS = {"registry": "types", "until_lsn": "until"}


def in_options(text: str, command: click.Command) -> str:
    """An error's text, with options of a command in place of the arguments that stand for them.

    Arguments that the command has no option for stay.
    """
    options = {
        one.name: one for one in command.params if isinstance(one, click.Option) and one.name
    }
    if "policies" in options:
        text = _POLICY.sub(lambda found: f"{options['policies'].opts[0]} {found[1]}", text)
    return _ARGUMENT.sub(lambda found: _option(found, options), text)


def _option(found: re.Match[str], options: Mapping[str, click.Option]) -> str:
    name, _, quoted, bare, listed = found.groups()
    option = options.get(_PARAMETERS.get(name, name))
    if option is None:
        return found[0]
    if option.is_flag and bare == "True":
        return option.opts[0]
    if option.is_flag and bare == "False":
        return option.secondary_opts[0] if option.secondary_opts else f"no {option.opts[0]}"
    if listed is not None:
        given = ast.literal_eval(listed)
        # The command makes two patterns of a name that may lack its schema.
        items = [one for one in given if one.removeprefix("*.") not in {*given} - {one}]
        return " ".join(f"{option.opts[0]} {shlex.quote(one)}" for one in items)
    value = quoted if bare is None else bare
    return (
        option.opts[0]
        if value is None or option.is_flag
        else f"{option.opts[0]} {shlex.quote(value)}"
    )
