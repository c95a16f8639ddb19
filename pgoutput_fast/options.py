"""Options as data: a frozen class for each job, whose fields say what each option takes and does.

Keywords of Python's functions, the command's flags and its file, the options of Spark's source and
the reference in the documentation are all made from these fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import PgOutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BYTES = re.compile(r"\s*(\d{1,19}(?:\.\d{0,19})?)\s*(|B|kB|MB|GB|TB)\s*", re.ASCII)
_TIME = re.compile(r"\s*(\d{1,19}(?:\.\d{0,19})?)\s*(ms|s|min|h|d)\s*", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_POWERS = {"": 0, "B": 0, "kB": 1, "MB": 2, "GB": 3, "TB": 4}
_MOST = (1 << 63) - 1  # as of a file's size
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class OptionKind:
    """What values an option takes.

    Attributes
    ----------
    types : tuple of type
        The types that Python's callers may give.
    expected : str
        What an error calls a value of these types.
    read : callable
        Makes a value of a text, and raises ValueError where the text is none.
    allows : callable
        Whether a value of these types is allowed.
    metavar : str
        What help calls a value.
    choices : tuple of str
        The values of an option that has few.
    is_secret : bool
        Whether no error may show a value.
    normal : callable
        Makes the one form of an allowed value that has several.
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
        """Refuse a value.

        Raises
        ------
        TypeError
            It has another type.
        PgOutputError
            It is not allowed.
        """
        # In Python a bool is an int too, but none is meant here.
        if not isinstance(value, self.types) or (type(value) is bool and bool not in self.types):
            raise TypeError(f"{name} must be {self.expected}, not {type(value).__name__}")
        if not self.allows(value):
            raise self._refused(name, value)

    def from_text(self, name: str, text: str) -> Any:
        """Return the value that a text stands for.

        Raises
        ------
        PgOutputError
            It stands for none.
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
    """True or false."""
    return OptionKind((bool,), "a bool", _word, metavar="true|false")


def choice(*names: str) -> OptionKind:
    """One of some words."""
    expected = f"one of {', '.join(map(repr, names))}"
    return OptionKind((str,), expected, str, names.__contains__, "|".join(names), names)


def text() -> OptionKind:
    """Any text but an empty one."""
    return OptionKind((str,), "a non-empty text", str, bool)


def count(least: int = 0, most: int | None = None) -> OptionKind:
    """A number from `least` to `most`."""
    expected = f"a number from {least} on" if most is None else f"a number from {least} to {most}"
    allows = lambda value: least <= value and (most is None or value <= most)  # noqa: E731
    return OptionKind((int,), expected, int, allows, "N")


def byte_count(least: int = 0) -> OptionKind:
    """A number of bytes; in text with PostgreSQL's units of 1024, such as 64kB, 16MB or 1.5GB."""
    expected = f"a number of bytes from {least} on, such as 65536, 64kB, 16MB or 1.5GB"
    return OptionKind((int,), expected, _bytes, lambda value: least <= value <= _MOST, "BYTES")


def seconds(*, zero: bool = False) -> OptionKind:
    """A number of seconds; in text with PostgreSQL's units, such as 500ms, 10min, 12h or 7d."""
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
    """A field of a class of options.

    Parameters
    ----------
    kind : OptionKind
    default : object
        None: the option need not have a value.
    help : str
        What the option does, as a sentence that stands alone.
    flag : bool
        Whether the command has a flag for it; all can be in its file.
    shown_default : str, optional
        What the default is, where the value does not say it.
    may_be_none : bool
        Whether None is allowed though the default is another value.
    """
    may_be_none = may_be_none or default is None
    metadata = {
        _KIND: kind, _HELP: help, _FLAG: flag, _DEFAULT: shown_default, _NONE: may_be_none
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class OptionField:
    """An option, as a front end shows it.

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
    """The base of classes of options; each value is checked when one is made.

    Raises
    ------
    PgOutputError
        A value is not allowed.
    TypeError
        A value has another type.
    """

    def __post_init__(self) -> None:
        for one in self.options():
            value = getattr(self, one.name)
            if value is not None or not one.may_be_none:
                one.kind.check(one.name, value)
                if one.kind.normal is not None:
                    object.__setattr__(self, one.name, one.kind.normal(value))

    @classmethod
    def options(cls) -> tuple[OptionField, ...]:
        """Return all options, in the order in which they are declared."""
        return tuple(
            OptionField(
                one.name, one.metadata[_KIND], one.default, one.metadata[_HELP],
                one.metadata[_FLAG], one.metadata[_DEFAULT], one.metadata[_NONE],
            )
            for one in dataclasses.fields(cls)
            if _KIND in one.metadata
        )  # fmt: skip


def options_of(kind: type[_Options], given: _Options | None, keywords: dict[str, Any]) -> _Options:
    """Return the options of a function that takes them as an object or as keywords, or both.

    Parameters
    ----------
    kind : type
    given : Options or None
    keywords : dict
        Those that name an option leave it.
    """
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"options must be a {kind.__name__}, not {type(given).__name__}")
    names = [one.name for one in dataclasses.fields(kind) if one.name in keywords]
    values = {name: keywords.pop(name) for name in names}
    return kind(**values) if given is None else dataclasses.replace(given, **values)


def arguments_of(function: Callable[..., Any], *kinds: type[Options]) -> set[str]:
    """Return the names of a function's arguments, and of the options that are keywords of it."""
    own = inspect.signature(function).parameters.values()
    names = {one.name for one in own if one.kind is not one.VAR_KEYWORD}
    return names.union(*({one.name for one in kind.options()} for kind in kinds))


def near(name: str, known: Iterable[str]) -> str:
    """Return what an error says of a name that is none: which one may be meant."""
    found = difflib.get_close_matches(name, [*known], 1)
    return f"Did you mean {found[0]}?" if found else ""
