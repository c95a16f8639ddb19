"""Make a command's flags and its file from classes of options, and name options in errors."""

from __future__ import annotations

import dataclasses
import glob
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import Argument, PgOutputError, printable
from ..names import NamePart, name_parts
from ..options import OptionField, OptionKind, Options, near
from ..policies import Policies, policies_of, policy_texts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MOST = 1 << 20  # the largest number of bytes in a file of options
_CLASSES = "pgoutput_fast.classes"
_FROM_FILE = "pgoutput_fast.options"
_NOT_IN_FILE = frozenset({"dsn", "dsn_file"})
"""Options that a file of options can't have, as a connection string may contain a password."""
_FLAG_NAMES = {"tables": "--table", "policies": "--policy"}
"""Flags with names of their own: each of them is repeated to give several values."""


class Value(click.ParamType[Any]):
    """The click type of an option's value: its kind parses the value.

    Parameters
    ----------
    kind : OptionKind
    """

    name = "value"

    def __init__(self, kind: OptionKind) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; called by click."""
        try:
            return value_of("", self._kind, value)
        except PgOutputError as error:
            self.fail(error.message, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete one of a few values; called by click."""
        return click.Choice(self._kind.choices).shell_complete(ctx, param, incomplete)


def value_of(name: str, kind: OptionKind, value: Any) -> Any:
    """Return an option's value: a flag gives it as text, a file as text or as a TOML value.

    Raises
    ------
    PgOutputError
        The option does not allow the value.
    """
    if isinstance(value, str):
        return kind.from_text(name, value)
    try:
        kind.check(name, value)
    except TypeError as error:
        raise PgOutputError(
            f"it {str(error).removeprefix(name).lstrip()}", code="bad_option", parameter=name
        ) from None
    return value


def options_from(
    *classes: type[Options], defaults: Options | None = None, no_flags: Sequence[str] = ()
) -> Callable[[_Command], _Command]:
    """Give a command a flag for each option that has one, and `--config` for all options.

    Parameters
    ----------
    *classes : type
    defaults : Options, optional
        Defaults of this command that replace the options' own.
    no_flags : sequence of str
        Options that have no flag in this command.
    """
    changed = {} if defaults is None else vars(defaults)

    def give(function: _Command) -> _Command:
        fields = [option for kind in classes for option in kind.options()]
        function = _config(fields)(function)
        for field in reversed([field for field in fields if field.has_flag]):
            if field.name not in no_flags:
                default = changed.get(field.name, field.default)
                function = _flag(dataclasses.replace(field, default=default))(function)
        return function

    return give


def flag_of(field: OptionField) -> str:
    """Return the flag of an option."""
    return _FLAG_NAMES.get(field.name, f"--{field.name.replace('_', '-')}")


def _flag(field: OptionField) -> Callable[[_Command], _Command]:
    shown = field.shown_default or _shown(field.default)
    # Help shows the first sentence; the reference has the rest.
    text = field.help.partition(". ")[0].removesuffix(".") + "."
    text = text if shown is None else f"{text} [default: {shown}]"
    flag = flag_of(field)
    if type(field.default) is bool:
        return click.option(flag, field.name, is_flag=True, default=None, help=text)
    if field.name in _SEVERAL:
        return click.option(
            flag, field.name, multiple=True, metavar=field.kind.metavar, help=text,
            callback=_SEVERAL[field.name], shell_complete=_COMPLETED.get(field.name),
        )  # fmt: skip
    return click.option(
        flag, field.name, type=Value(field.kind), metavar=field.kind.metavar, help=text
    )


def _shown(default: Any) -> str | None:
    return None if default is None or isinstance(default, bool) else f"{default}"


def is_of(tables: Iterable[str], patterns: Sequence[str]) -> bool:
    """Return whether any of the tables matches any of the patterns; True without patterns."""
    return not patterns or any(
        fnmatchcase(table, pattern) for table in tables for pattern in patterns
    )


def table_patterns(tables: Sequence[str]) -> list[str]:
    """Add the schema to patterns that may lack it, so that they match ``namespace.name``.

    Text in SQL's double quotes is a name, not a pattern.

    Raises
    ------
    PgOutputError
        The double quotes are not valid SQL.
    """
    patterns = []
    for table in tables:
        parts = name_parts(table) if '"' in table else [NamePart(table, is_quoted=False)]
        pattern = ".".join(
            glob.escape(part.text) if part.is_quoted else part.text for part in parts
        )
        # A pattern with a dot may still lack the schema, because a table's name may have a dot.
        if len(parts) == 1:
            patterns.append(f"*.{pattern}")
        if len(parts) > 1 or (not parts[0].is_quoted and "." in pattern):
            patterns.append(pattern)
    return patterns


def _policies(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> Policies | None:
    try:
        return policies_of(texts) if texts else None
    except PgOutputError as error:
        raise click.BadParameter(str(error)) from error


def _tables(_: click.Context, __: click.Parameter, patterns: Sequence[str]) -> list[str] | None:
    return table_patterns(patterns) if patterns else None


def _partitions(
    _: click.Context, __: click.Parameter, texts: Sequence[str]
) -> dict[str, list[str]] | None:
    partitions: dict[str, list[str]] = {}
    for value in texts:
        table, _equals, columns = value.partition("=")
        partitions[table] = columns.split(",")
        if not table or not all(partitions[table]):
            raise click.BadParameter(f"{value!r}: expected schema.name=COLUMN or =COLUMN,COLUMN")
    return partitions or None


def _completed_policy(
    _: click.Context, __: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a policy: each name with each value, or the name alone if it takes numbers."""
    from click.shell_completion import CompletionItem

    from ..policies import CHOICES

    offered = [f"{name}={choice}" for name, choices in CHOICES.items() for choice in choices]
    offered += [f"{name}=" for name in Policies.__dataclass_fields__ if name not in CHOICES]
    return [CompletionItem(choice) for choice in offered if choice.startswith(incomplete)]


# Options whose flag is repeated to give several values.
_SEVERAL: Mapping[str, Callable[[click.Context, click.Parameter, Sequence[str]], Any]] = {
    "policies": _policies,
    "tables": _tables,
    "partition_by": _partitions,
}
_COMPLETED: Mapping[str, Any] = {"policies": _completed_policy}


def policies_option(help_text: str) -> Callable[[_Command], _Command]:
    """Make the option --policy, which may be given several times."""
    return click.option(
        "--policy", "policies", multiple=True, metavar="NAME=VALUE", callback=_policies,
        shell_complete=_completed_policy, help=help_text,
    )  # fmt: skip


# --- the file ------------------------------------------------------------------------------------


def _config(fields: Sequence[OptionField]) -> Callable[[_Command], _Command]:
    """Give a command `--config`; the file's values become the defaults of the command's flags."""
    by_name = {field.name: field for field in fields}

    def read(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        flags = {
            option.name: option
            for option in context.command.params
            if option.name != parameter.name
        }
        context.default_map = {}
        values: dict[str, Any] = {}
        for name, value in _read(path).items():
            try:
                if name in by_name:
                    values[name] = value_of(name, by_name[name].kind, value)
                elif name in flags.keys() - _NOT_IN_FILE:
                    context.default_map[name] = value
                elif name in flags:  # and not allowed in the file
                    raise PgOutputError(
                        "it is not allowed in the file. Give --dsn, --dsn-file or "
                        "PGOUTPUT_FAST_DSN",
                        code="bad_option",
                        parameter=name,
                    )
                else:
                    names = {*by_name, *(flag for flag in flags if flag)} - _NOT_IN_FILE
                    raise PgOutputError(
                        f"there is no such option. {near(name, names)}".strip(),
                        code="bad_option",
                        parameter=name,
                    )
            except PgOutputError as error:
                raise click.BadParameter(f"{path}: {name}: {error.message}") from error
        context.meta[_FROM_FILE] = values

    return click.option(
        "--config",
        metavar="FILE.toml",
        type=click.Path(dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=read,
        help="File with options; a flag overrides the file.",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST + 1)
        if len(text) > _MOST:
            raise click.BadParameter(f"{path} has more than {_MOST} bytes")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise click.BadParameter(f"can't read {path}: {error.strerror or error}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise click.BadParameter(f"{path}: {error}") from error


def chosen(
    context: click.Context, arguments: dict[str, Any], *classes: type[Options]
) -> dict[str, Any]:
    """Return the options that flags and the file set, by name, and remove them from `arguments`."""
    values: dict[str, Any] = dict(context.meta.get(_FROM_FILE, {}))
    names = {option.name for kind in classes for option in kind.options()}
    flags = {name: arguments.pop(name) for name in names & arguments.keys()}
    values |= {name: value for name, value in flags.items() if value is not None}
    return {name: value for name, value in values.items() if name in names}


# --- errors --------------------------------------------------------------------------------------

_PARAMETERS = {"path": "paths", "registry": "types", "until_lsn": "until"}
"""Arguments that commands take by other names."""


def shown_by(command: click.Command) -> Callable[[Argument], str]:
    """Return a function that writes an option as the command's flag, or as a line of its file."""
    options = {option.name: option for option in command.params if option.name}

    def shown(argument: Argument) -> str:
        option = options.get(_PARAMETERS.get(argument.name, argument.name))
        if isinstance(option, click.Argument):
            return option.human_readable_name
        if not isinstance(option, click.Option):
            value = argument.value
            is_plain = argument.has_value and isinstance(value, (bool, int, float, str))
            if is_plain:
                return f"{argument.name} = {json.dumps(value)}"  # in TOML
            return str(argument).removesuffix("=")
        flag, value = option.opts[0], argument.value
        if not argument.has_value or (option.is_flag and value is True):
            return flag
        if option.is_flag:
            return f"no {flag}"
        values = policy_texts(value) if isinstance(value, Policies) else value
        if isinstance(values, (list, tuple)):
            # The command makes two patterns of a name without a schema. Show one.
            items = [
                item for item in values if str(item).removeprefix("*.") not in {*values} - {item}
            ]
            return " ".join(f"{flag} {shlex.quote(str(item))}" for item in items)
        return f"{flag} {shlex.quote(str(values))}"

    return shown


def text_by(command: click.Command, error: PgOutputError) -> str:
    """Return the text of an error with a command's options, for a terminal."""
    return printable(error.text(shown_by(command)))
