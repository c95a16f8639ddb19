"""Values that Python has no class for: intervals, ranges, arrays with bounds, sparse vectors.

They are small, do not change, compare, hash and pickle. Names follow psycopg's where it has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=False)
class Interval:
    """An interval as PostgreSQL keeps it: a month is no number of days, nor a day of hours.

    Attributes
    ----------
    months, days, microseconds : int
        Each with a sign of its own.
    """

    months: int = 0
    days: int = 0
    microseconds: int = 0


class Range(Generic[T]):
    """A range of values, or the empty one.

    Attributes
    ----------
    lower, upper : object
        The ends; None where there is none (of an empty range both).
    bounds : str
        "[)", "[]", "(]" or "()": whether the ends belong to it.
    empty : bool
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
            bounds = "[)"
        put = object.__setattr__
        put(self, "lower", lower)
        put(self, "upper", upper)
        put(self, "bounds", bounds)
        put(self, "empty", empty)

    @property
    def isempty(self) -> bool:
        """As `empty`, by psycopg's name."""
        return self.empty

    @property
    def lower_inc(self) -> bool:
        """Whether `lower` belongs to the range."""
        return not self.empty and self.lower is not None and self.bounds[0] == "["

    @property
    def upper_inc(self) -> bool:
        """Whether `upper` belongs to the range."""
        return not self.empty and self.upper is not None and self.bounds[1] == "]"

    @property
    def lower_inf(self) -> bool:
        """Whether the range has no lower end."""
        return not self.empty and self.lower is None

    @property
    def upper_inf(self) -> bool:
        """Whether the range has no upper end."""
        return not self.empty and self.upper is None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Range does not change, {name} neither")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Range):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[object, ...]:
        return Range, (self.lower, self.upper, self.bounds, self.empty)

    def __repr__(self) -> str:
        if self.empty:
            return "Range(empty=True)"
        return f"Range({self.lower!r}, {self.upper!r}, {self.bounds!r})"

    def _key(self) -> tuple[Any, ...]:
        if self.empty:
            return (True,)
        # An end that is not there belongs to nothing, whatever the bracket says.
        return self.lower, self.upper, self.lower_inc, self.upper_inc


class Array(list[Any]):
    """A list whose elements are not counted from 1: an array with other lower bounds.

    Attributes
    ----------
    lower_bounds : tuple of int
        One per dimension.
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
    """A vector of which only the elements that are not zero are kept.

    Attributes
    ----------
    dim : int
        Number of dimensions; up to 10⁹, so it is never written out.
    indices : tuple of int
        Positions from 0 on, rising.
    values : tuple of float
    """

    dim: int
    indices: tuple[int, ...]
    values: tuple[float, ...]
