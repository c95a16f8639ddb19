"""A database of your own as the target of a sync.

Derive a class from :class:`ChangeTarget`, and give an object of it to
:func:`pgoutput_fast.apply.sync` as `target`. :func:`pgoutput_fast.testing.targets.check_target`
tests it.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ChangeTarget"]


class ChangeTarget(abc.ABC):
    """A database with transactions, in which a sync keeps change tables.

    A sync writes *windows*. For each it calls `begin`, then any of `prepare`, `append` and
    `rename`, and `commit` at the end. If anything fails in between, it calls `rollback`. All calls
    come from the thread that called `sync`.

    **What must be atomic**: everything written between `begin` and `commit`, and the text that
    `commit` stores. After a kill, the next sync continues from this text. So each change is in the
    tables exactly once if one transaction has the rows and the text.

    An exception of a method ends the sync, and the next call continues. In `prepare` and `append`,
    a `PgOutputError`, an `OSError` or an error of pyarrow pauses only the table, and other tables
    continue. A `RetryableError` always ends the sync.

    Attributes
    ----------
    name : str
        What messages call the target. The sync's name as a consumer of the change log is made from
        it, so it must stay the same.
    """

    name: str

    @abc.abstractmethod
    def load(self) -> str | None:
        """Return the text that `commit` stored last; None if there is none.

        It is called before the first window, and in each window after `begin`. If the text is not
        the one that this sync stored last, another sync writes the target, and this one ends.
        """

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin a transaction. If another one is running, wait for its end."""

    @abc.abstractmethod
    def prepare(self, table: str, schema: pa.Schema) -> bool:
        """Prepare a table for batches of a schema: make it, or add the columns it lacks.

        Parameters
        ----------
        table : str
            Such as ``public.accounts``, or ``public.accounts.v2``. It may have any characters.
        schema : pyarrow.Schema
            The columns of change tables. `before` and `after` are structs of the table's columns.

        Returns
        -------
        bool
            False if the table is there, and a column has another type: the changes then go to a
            table with the next version.
        """

    @abc.abstractmethod
    def append(self, table: str, changes: pa.RecordBatch) -> None:
        """Write changes behind those that a table has; it was prepared for their schema.

        Store `unchanged` with each row: it lists the columns whose value the server did not send,
        and which are null in `after`. A snapshot comes as a row with the op "truncate", and then
        its rows with the op "read".
        """

    @abc.abstractmethod
    def rename(self, table: str, name: str) -> None:
        """Give a table another name, which is free. Do nothing if there is no such table."""

    @abc.abstractmethod
    def commit(self, progress: str) -> None:
        """Store a text in place of the one before, and commit all of the transaction.

        Parameters
        ----------
        progress : str
            JSON, some hundred bytes for each table.
        """

    @abc.abstractmethod
    def rollback(self) -> None:
        """Give up the transaction, if there is one."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the database; the sync has ended."""
