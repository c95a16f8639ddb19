"""Classes of values that Python lacks: intervals, ranges, arrays with bounds, unchanged TOAST.

Their objects can be compared and pickled, and all but arrays can't be changed and can be hashed.
Classes and attributes are named as in psycopg where psycopg has them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=False)
class Interval:
    """An interval, as PostgreSQL keeps it: in months, days and microseconds.

    The three are kept apart because months differ in their days, and days in their hours.

    Attributes
    ----------
    months, days, microseconds : int
        Each has its own sign.
    """

    months: int = 0
    days: int = 0
    microseconds: int = 0


@functools.total_ordering
class Range(Generic[T]):
    """A range of values, or the empty range.

    It behaves as psycopg's Range: the empty range is false, ``value in range`` tests whether a
    value lies within the bounds, and ranges are ordered by `lower`, then `upper`, then `bounds`,
    where a missing bound comes before all others. (The server orders a missing upper bound after
    all others.)

    Attributes
    ----------
    lower, upper : object
        The bounds; None for a missing bound. Both are None in the empty range.
    bounds : str
        "[)", "[]", "(]" or "()": a bracket if the bound belongs to the range, a parenthesis if the
        bound is missing or does not belong to it. "" for the empty range.
    empty : bool

    Raises
    ------
    ValueError
        `bounds` is none of the four.
    """

    __slots__ = ("bounds", "empty", "lower", "upper")
    lower: T | None
    upper: T | None
    bounds: str
    empty: bool

    def __init__(
        self,
        lower: T | None = None,
        upper: T | None = None,
        bounds: str = "[)",
        empty: bool = False,
    ) -> None:
        if bounds not in ("[)", "[]", "(]", "()"):
            raise ValueError(f"bounds must be one of '[)', '[]', '(]', '()', not {bounds!r}")
        if empty:
            lower = upper = None
            bounds = ""
        else:
            bounds = ("(" if lower is None else bounds[0]) + (")" if upper is None else bounds[1])
        put = object.__setattr__
        put(self, "lower", lower)
        put(self, "upper", upper)
        put(self, "bounds", bounds)
        put(self, "empty", empty)

    @property
    def isempty(self) -> bool:
        """The same as `empty`, under psycopg's name."""
        return self.empty

    @property
    def lower_inc(self) -> bool:
        """Whether `lower` belongs to the range."""
        return self.bounds[:1] == "["

    @property
    def upper_inc(self) -> bool:
        """Whether `upper` belongs to the range."""
        return self.bounds[1:] == "]"

    @property
    def lower_inf(self) -> bool:
        """Whether the range has no lower bound."""
        return not self.empty and self.lower is None

    @property
    def upper_inf(self) -> bool:
        """Whether the range has no upper bound."""
        return not self.empty and self.upper is None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Range does not change, {name} neither")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Range):
            return NotImplemented
        return self._key() == other._key()

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Range):
            return NotImplemented
        for mine, others in zip(self._key(), other._key(), strict=True):
            if mine != others:
                return mine is None or (others is not None and bool(mine < others))
        return False

    def __bool__(self) -> bool:
        return not self.empty

    def __contains__(self, value: Any) -> bool:
        if self.empty:
            return False
        lower: Any = self.lower
        upper: Any = self.upper
        if lower is not None and not (lower <= value if self.lower_inc else lower < value):
            return False
        return upper is None or bool(value <= upper if self.upper_inc else value < upper)

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[object, ...]:
        return Range, (self.lower, self.upper, self.bounds or "[)", self.empty)

    def __repr__(self) -> str:
        if self.empty:
            return "Range(empty=True)"
        return f"Range({self.lower!r}, {self.upper!r}, {self.bounds!r})"

    def __str__(self) -> str:
        if self.empty:
            return "empty"
        return f"{self.bounds[0]}{self.lower}, {self.upper}{self.bounds[1]}"

    def _key(self) -> tuple[Any, ...]:
        return self.lower, self.upper, self.bounds


class Array(list[Any]):
    """An array whose elements PostgreSQL does not count from 1: a list with its lower bounds.

    Attributes
    ----------
    lower_bounds : tuple of int
        The subscript of the first element in each dimension.
    """

    __slots__ = ("lower_bounds",)
    lower_bounds: tuple[int, ...]

    def __init__(self, values: Iterable[Any] = (), lower_bounds: tuple[int, ...] = (1,)) -> None:
        super().__init__(values)
        self.lower_bounds = tuple(lower_bounds)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Array):
            return self.lower_bounds == other.lower_bounds and list.__eq__(self, other)
        return NotImplemented if not isinstance(other, list) else False

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __reduce__(self) -> tuple[object, ...]:
        return Array, (list(self), self.lower_bounds)

    def __repr__(self) -> str:
        return f"Array({list(self)!r}, lower_bounds={self.lower_bounds!r})"


@dataclass(frozen=True, slots=True)
class SparseVector:
    """A vector that keeps only its elements other than zero (``sparsevec`` of pgvector).

    Attributes
    ----------
    dim : int
        Number of dimensions. It can be 10⁹, so the vector is never made into a full list.
    indices : tuple of int
        Positions of the kept elements, in rising order, counted from 0.
    values : tuple of float
        The kept elements.
    """

    dim: int
    indices: tuple[int, ...]
    values: tuple[float, ...]


class Unchanged:
    """The class of :data:`UNCHANGED`, which stands for a value that the server did not send.

    A server does not send TOAST values that an UPDATE left unchanged. UNCHANGED is not None, which
    stands for NULL. It is neither true nor false (``bool()`` raises a TypeError), as nothing is
    known of the value.
    """

    __slots__ = ()
    _instance: ClassVar[Any] = None

    def __new__(cls) -> Self:
        """Return the only instance."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        instance: Self = cls._instance
        return instance

    def __repr__(self) -> str:
        return "UNCHANGED"

    def __bool__(self) -> NoReturn:
        raise TypeError("UNCHANGED is neither true nor false; compare with `is pf.UNCHANGED`")

    def __reduce__(self) -> tuple[object, ...]:
        return Unchanged, ()


UNCHANGED = Unchanged()
