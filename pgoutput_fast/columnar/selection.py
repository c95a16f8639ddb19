"""Select the tables and columns to decode, by their names as Arrow schemas show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ..errors import PgOutputError
from ..names import Named, shown_name, shown_table
from ..protocol.messages import Relation


class Selection:
    """The tables and columns to decode.

    Parameters
    ----------
    tables : str or iterable of str, optional
        Patterns of ``namespace.name``, with ``*``, ``?`` and ``[...]``. By default all tables.
    columns : iterable of str, or mapping of str to iterable of str, optional
        Names of columns of all tables, or pattern of tables → names. By default, and for tables
        that no pattern matches, all columns.

    Raises
    ------
    PgOutputError
        A pattern can't match any table, or there is none.
    TypeError
        A pattern or name is no str.
    """

    def __init__(
        self,
        tables: str | Iterable[str] | None = None,
        columns: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.tables = None if tables is None else _names("tables", tables)
        if self.tables is not None:
            _check_patterns("tables", self.tables)
        if columns is None:
            self.columns: dict[str, tuple[str, ...]] = {}
        elif isinstance(columns, Mapping):
            _check_patterns("columns", columns)
            self.columns = {
                pattern: _names(f"columns[{pattern!r}]", names)
                for pattern, names in columns.items()
            }
        else:
            self.columns = {"*": _names("columns", columns)}

    def wants(self, relation: Named) -> bool:
        """Return whether a relation is selected."""
        name = shown_table(relation)
        return self.tables is None or any(fnmatchcase(name, pattern) for pattern in self.tables)

    def positions(self, relation: Relation) -> list[int]:
        """Return the positions of the selected columns of a relation.

        Raises
        ------
        PgOutputError
            The relation has none of the columns that were named.
        """
        table = shown_table(relation)
        names = [shown_name(column.name) for column in relation.columns]
        for pattern, wanted in self.columns.items():
            if fnmatchcase(table, pattern):
                found = [i for i, name in enumerate(names) if name in wanted]
                if not found:
                    raise PgOutputError(
                        f"{table} has none of the columns {', '.join(wanted) or '(none named)'}; "
                        f"it has {', '.join(names) or 'none'}",
                        code="no_table",
                        table=table,
                    )
                return found
        return list(range(len(names)))


def _names(what: str, names: str | Iterable[str]) -> tuple[str, ...]:
    try:
        found = (names,) if isinstance(names, str) else tuple(names)
    except TypeError:
        raise TypeError(f"{what} takes names, not {names!r}") from None
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{what} takes names, not {name!r}")
    return found


def _check_patterns(what: str, patterns: Iterable[str]) -> None:
    """Refuse patterns that can't match any table, such as a table's name without its schema."""
    found = list(patterns)
    if not found:
        raise PgOutputError(
            "it names no table",
            code="bad_option",
            parameter=what,
            hint="Leave it out to have all tables",
        )
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} takes patterns of tables, not {pattern!r}")
        if not any(sign in pattern for sign in ".*?["):
            plain = pattern.replace('"', "")
            raise PgOutputError(
                f"{pattern!r} matches no table: patterns are of namespace.name",
                code="bad_option",
                parameter=what,
                hint=f"Give 'public.{plain}' or '*.{plain}', without SQL's quotes",
            )
