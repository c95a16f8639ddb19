"""The result of a verification: a report with a result for each table."""

from __future__ import annotations

import dataclasses
from typing import Literal

State = Literal["equal", "different", "not compared", "unsettled"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One row that is not the same on both sides.

    Attributes
    ----------
    kind : {"different", "missing", "extra", "doubled", "too few"}
        "missing": only the server has the row. "extra": only the target has it. "doubled": the
        target has it more often than the server. "too few": the target has it less often.
    key : dict of str to (str or None)
        The canonical texts of the key's columns; of all columns in a table without a key.
    columns : dict of str to (str or None, str or None)
        The columns that differ, of a "different" row: their canonical texts on the server and in
        the target. None is NULL.
    times : (int, int)
        How often the server and the target have the row.
    """

    kind: Literal["different", "missing", "extra", "doubled", "too few"]
    key: dict[str, str | None]
    columns: dict[str, tuple[str | None, str | None]]
    times: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class TableResult:
    """The result for one table.

    Attributes
    ----------
    namespace, name : str
    state : {"equal", "different", "not compared", "unsettled"}
    why : str
        Why the table was not compared, or is unsettled. If it differs: the likely cause, or a note
        that a reader of the table's name sees another table or more columns. Else "".
    rows : int
        Rows of the server's table at P.
    target_rows : int
        Rows of the target at its position.
    differing : int
        Rows, by key, that differ. There may be more if `differing_is_least`.
    differing_is_least : bool
    differences : tuple of Difference
        The first differing rows.
    unsettled : int
        Rows, by key, that changed each time they were read.
    looked_again : int
        Rows, by key, that changed between P and the target's position, and were read again.
    excluded : tuple of str
        Columns that the caller excluded.
    """

    namespace: str
    name: str
    state: State
    why: str = ""
    rows: int = 0
    target_rows: int = 0
    differing: int = 0
    differing_is_least: bool = False
    differences: tuple[Difference, ...] = ()
    unsettled: int = 0
    looked_again: int = 0
    excluded: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a verification.

    Attributes
    ----------
    lsn : int
        P, where the server was read.
    position : int
        The position of the target that was compared with it.
    tables : tuple of TableResult
    only_in_target : tuple of str
        Tables of the target that are not in the publications. They do not count.
    """

    lsn: int
    position: int
    tables: tuple[TableResult, ...]
    only_in_target: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0: all tables are equal; 1: one differs; 2: one was not compared or is unsettled."""
        states = {table.state for table in self.tables}
        if "different" in states:
            return 1
        return 0 if states == {"equal"} else 2
