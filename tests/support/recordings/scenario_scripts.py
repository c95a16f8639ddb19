"""The SQL of the recorded scenarios, which a server of any version can be given again.

`tests/data/<instance>/<scenario>/truth.zip` has it as `script.sql`: statements, each of which ends
with its line, and comments `-- @…` that say in which session, and on which versions, they run.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from support.paths import DATA

__all__ = ["Script", "Sessions", "changes_told", "read_script"]

_TOLD = re.compile(r'table ((?:[^:"]|"(?:[^"]|"")*")+): (INSERT|UPDATE|DELETE):')
_DETACHED = "'detached'"
"""A row of a partition while it is detached, when it belongs to no published table."""
_UNQUOTED = re.compile(r'"((?:[^"]|"")*)"')


class Script(NamedTuple):
    """A scenario.

    Attributes
    ----------
    setup : list of str
        Statements that make tables and publications.
    run : list of (str, str)
        The session of each further statement, and the statement.
    """

    setup: list[str]
    run: list[tuple[str, str]]

    def halves(self) -> list[list[tuple[str, str]]]:
        """What runs, divided about in the middle, where no transaction is open or prepared.

        One that has altered a table keeps others from reading what the catalogue has of it.
        """
        opened: Counter[str] = Counter()
        for number, (session, statement) in enumerate(self.run, 1):
            word, _, rest = statement.rstrip(";").partition(" ")
            is_prepared = rest.startswith("PREPARED")
            opened["prepared"] -= is_prepared
            opened["prepared"] += word == "PREPARE"
            if word == "BEGIN":
                opened[session] = 1
            elif word in ("COMMIT", "ROLLBACK", "PREPARE") and not (
                is_prepared or rest.startswith("TO ")
            ):
                opened[session] = 0
            if 2 * number >= len(self.run) and not opened.total():
                return [self.run[:number], self.run[number:]]
        return [self.run]


def read_script(scenario: str, version: int) -> Script:
    """The statements of a scenario, such as "16/dml", for a server of a version."""
    with zipfile.ZipFile(DATA / scenario / "truth.zip") as archive:
        text = archive.read("script.sql").decode()
    script = Script([], [])
    session, part, is_for = "main", "", True
    statement: list[str] = []
    for line in text.splitlines():
        word, _, rest = line.removeprefix("-- @").partition(" ")
        if not statement and line.startswith("--"):
            if not line.startswith("-- @"):
                continue
            if word == "pg":
                first, _, last = rest.partition("-")
                is_for = rest == "all" or int(first) <= version <= int(last or version)
            elif word == "s":
                session = rest
            elif word in ("setup", "run"):
                part = word
            else:  # the recorder's own: it waited, or read the catalogue
                assert word in ("sync", "meta"), line
            continue
        if not line.strip() and not statement:
            continue
        statement.append(line)
        if not line.endswith(";"):
            continue
        whole = "\n".join(statement)
        statement = []
        if is_for and part == "setup":
            script.setup.append(whole)
        elif is_for:
            script.run.append((session, whole))
    assert not statement, statement
    return script


class Sessions(contextlib.ExitStack):
    """The connections of a scenario, each with the transaction that it has open."""

    def __init__(self, database: Any) -> None:
        super().__init__()
        self._database = database
        self._open: dict[str, psycopg.Connection[Any]] = {}

    def run(self, statements: Sequence[tuple[str, str]]) -> None:
        for session, statement in statements:
            if session not in self._open:
                self._open[session] = self.enter_context(self._database.connect())
            self._open[session].execute(statement.encode())


def changes_told(database: Any, slot: str) -> Counter[tuple[str, str]]:
    """How many changes of each table, `schema.name`, and kind a slot of test_decoding tells."""
    found: Counter[tuple[str, str]] = Counter()
    with database.connect() as connection, connection.cursor() as cursor:
        rows = cursor.execute(
            f"SELECT data FROM pg_logical_slot_peek_changes('{slot}', NULL, NULL)".encode()
        )
        for (line,) in rows:
            told = _TOLD.match(line)
            if told is not None and _DETACHED not in line:
                name = _UNQUOTED.sub(lambda one: one[1].replace('""', '"'), told[1])
                found[name, told[2].lower()] += 1
    return found
