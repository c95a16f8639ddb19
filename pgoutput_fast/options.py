"""Options as data: a frozen class for each job, with a field for each option.

A field says which values its option takes and what the option does. The keywords of Python's
functions, the command's flags and file, the options of Spark's source, and the reference in the
documentation are all made from these fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .errors import PgOutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BYTES = re.compile(r"\s*(\d{1,19}(?:\.\d{0,19})?)\s*(|B|kB|MB|GB|TB)\s*", re.ASCII)
_TIME = re.compile(r"\s*(\d{1,19}(?:\.\d{0,19})?)\s*(ms|s|min|h|d)\s*", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_POWERS = {"": 0, "B": 0, "kB": 1, "MB": 2, "GB": 3, "TB": 4}
_MOST = (1 << 63) - 1  # the largest size of a file
_WORDS = {"true": True, "false": False}


class OptionKind(NamedTuple):
    """The values that an option takes.

    Attributes
    ----------
    types : tuple of type
        The types that callers in Python may pass.
    expected : str
        The words for these values in an error.
    read : callable
        Converts a text to a value, and raises ValueError if the text stands for no value.
    allows : callable
        Returns whether a value of these types is allowed.
    metavar : str
        The name of a value in help.
    choices : tuple of str
        All values, if there are only a few.
    is_secret : bool
        Whether errors must not show the value.
    normal : callable
        Converts an allowed value that has several forms to one form.
    """

    types: tuple[type, ...]
    expected: str
    read: Callable[[str], Any]
    allows: Callable[[Any], bool] = lambda _: True
    metavar: str = "TEXT"
    choices: tuple[str, ...] = ()
    is_secret: bool = False
    normal: Callable[[Any], Any] | None = None

    def check(self, name: str, value: object) -> None:
        """Refuse a value that is not allowed.

        Raises
        ------
        TypeError
            The value has another type.
        PgOutputError
            The value is not allowed.
        """
        # In Python a bool is an int, too. Here it is one only if `types` has bool.
        if not isinstance(value, self.types) or (type(value) is bool and bool not in self.types):
            raise TypeError(f"{name} must be {self.expected}, not {type(value).__name__}")
        if not self.allows(value):
            raise self._refused(name, value)

    def from_text(self, name: str, text: str) -> Any:
        """Return the value that a text stands for.

        Raises
        ------
        PgOutputError
            The text stands for no value.
        """
        try:
            value = self.read(text)
        except ValueError:
            raise self._refused(name, text) from None
        self.check(name, value)
        return value

    def _refused(self, name: str, value: object) -> PgOutputError:
        shown = "this" if self.is_secret else repr(value)
        return PgOutputError(f"{shown} is not {self.expected}", code="bad_option", parameter=name)


def flag() -> OptionKind:
    """Return the kind of an option that is true or false."""
    return OptionKind((bool,), "a bool", _word, metavar="true|false")


def choice(*names: str) -> OptionKind:
    """Return the kind of an option that takes one of some words."""
    expected = f"one of {', '.join(map(repr, names))}"
    return OptionKind((str,), expected, str, names.__contains__, "|".join(names), names)


def text(metavar: str = "TEXT") -> OptionKind:
    """Return the kind of an option that takes any text, except an empty one."""
    return OptionKind((str,), "a non-empty text", str, bool, metavar)


def count(least: int = 0, most: int | None = None) -> OptionKind:
    """Return the kind of an option that takes a number from `least` to `most`."""
    expected = f"a number from {least} on" if most is None else f"a number from {least} to {most}"
    allows = lambda value: least <= value and (most is None or value <= most)  # noqa: E731
    return OptionKind((int,), expected, int, allows, "N")


def byte_count(least: int = 0) -> OptionKind:
    """Return the kind of an option that takes a number of bytes.

    In text, the number may have PostgreSQL's units of 1024, such as 64kB, 16MB or 1.5GB.
    """
    expected = f"a number of bytes from {least} on, such as 65536, 64kB, 16MB or 1.5GB"
    return OptionKind((int,), expected, _bytes, lambda value: least <= value <= _MOST, "BYTES")


def seconds(*, zero: bool = False) -> OptionKind:
    """Return the kind of an option that takes a number of seconds.

    In text, the number may have PostgreSQL's units, such as 500ms, 10min, 12h or 7d.
    """
    expected = "a number of seconds, such as 0.5, 500ms, 10min, 12h or 7d"
    if not zero:
        expected += ", above 0"
    allows = lambda value: math.isfinite(value) and (value > 0 or (zero and value == 0))  # noqa: E731
    return OptionKind((int, float), expected, _time, allows, "TIME")


def _word(text: str) -> bool:
    try:
        return _WORDS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _bytes(text: str) -> int:
    match = _BYTES.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return round(Decimal(match[1]) * (1 << 10 * _POWERS[match[2]]))


def _time(text: str) -> float:
    match = _TIME.fullmatch(text)
    return float(text) if match is None else float(match[1]) * _SECONDS[match[2]]


_KIND, _HELP, _FLAG, _DEFAULT, _NONE = "kind", "help", "flag", "shown_default", "may_be_none"


def option(
    kind: OptionKind,
    default: Any,
    help: str,
    *,
    flag: bool = False,
    shown_default: str | None = None,
    may_be_none: bool = False,
) -> Any:
    """Declare a field of a class of options.

    Parameters
    ----------
    kind : OptionKind
    default : object
        None: the option may be without a value.
    help : str
        What the option does. A command's help shows the first sentence, in one line with the
        default. The reference has all sentences.
    flag : bool
        Whether the command has a flag for the option. The command's file may have every option.
    shown_default : str, optional
        The text for the default in help, if the value alone does not explain it.
    may_be_none : bool
        Whether None is allowed although the default is another value.
    """
    may_be_none = may_be_none or default is None
    metadata = {
        _KIND: kind, _HELP: help, _FLAG: flag, _DEFAULT: shown_default, _NONE: may_be_none
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class OptionField:
    """An option, as front ends use it.

    Attributes
    ----------
    name : str
    kind : OptionKind
    default : object
    help : str
    has_flag : bool
    shown_default : str or None
    may_be_none : bool
    """

    name: str
    kind: OptionKind
    default: Any
    help: str
    has_flag: bool
    shown_default: str | None
    may_be_none: bool


_Options = TypeVar("_Options", bound="Options")


@dataclass(frozen=True)
class Options:
    """Base of the classes of options. Making an object checks each value.

    Raises
    ------
    PgOutputError
        A value is not allowed.
    TypeError
        A value has another type.
    """

    def __post_init__(self) -> None:
        for field in self.options():
            value = getattr(self, field.name)
            if value is not None or not field.may_be_none:
                field.kind.check(field.name, value)
                if field.kind.normal is not None:
                    object.__setattr__(self, field.name, field.kind.normal(value))

    @classmethod
    def options(cls) -> tuple[OptionField, ...]:
        """Return all options, in the order in which they are declared."""
        return tuple(
            OptionField(
                field.name, field.metadata[_KIND], field.default, field.metadata[_HELP],
                field.metadata[_FLAG], field.metadata[_DEFAULT], field.metadata[_NONE],
            )
            for field in dataclasses.fields(cls)
            if _KIND in field.metadata
        )  # fmt: skip


def options_of(
    kind: type[_Options], options: _Options | None, keywords: dict[str, Any]
) -> _Options:
    """Return a function's options; callers pass them as an object, as keywords, or both.

    Parameters
    ----------
    kind : type
    options : Options or None
    keywords : dict
        The function removes the keywords that name an option.
    """
    if options is not None and not isinstance(options, kind):
        raise TypeError(f"options must be a {kind.__name__}, not {type(options).__name__}")
    names = [field.name for field in dataclasses.fields(kind) if field.name in keywords]
    values = {name: keywords.pop(name) for name in names}
    return kind(**values) if options is None else dataclasses.replace(options, **values)


def arguments_of(function: Callable[..., Any], *kinds: type[Options]) -> set[str]:
    """Return the names of a function's arguments, and of the options that are its keywords."""
    own = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in own if parameter.kind is not parameter.VAR_KEYWORD}
    return names.union(*({field.name for field in kind.options()} for kind in kinds))


def near(name: str, candidates: Iterable[str]) -> str:
    """Return an error's suggestion for an unknown name: the known name that is most similar."""
    import difflib

    similar = difflib.get_close_matches(name, [*candidates], 1)
    return f"Did you mean {similar[0]}?" if similar else ""
