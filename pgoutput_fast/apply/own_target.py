"""The target that wraps a `ChangeTarget` of the user."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..errors import Argument, PgOutputError
from ..segments.reader import CommitRecord
from .duckdb_sql import versioned
from .progress_rows import progress_fields, table_state_of
from .targets import TARGET_FORMAT, RememberedOptions, TargetError, TargetOrigin, TargetState

if TYPE_CHECKING:
    import pyarrow as pa

    from ..targets import ChangeTarget
    from .targets import StateWriter, TableState


class OwnTarget:
    """A `Target` that keeps change tables in a `ChangeTarget`.

    Parameters
    ----------
    own : ChangeTarget
    remembered : RememberedOptions
    """

    threads = 1
    is_transactional = True

    def __init__(self, own: ChangeTarget, remembered: RememberedOptions) -> None:
        if remembered.keep in ("both", "state"):
            raise PgOutputError(
                f"{own.name} keeps only change tables", code="bad_option", parameter="keep",
                hint=("Leave out ", Argument("keep")),
            )  # fmt: skip
        self.own = own
        self.remembered = remembered._replace(keep="changes")
        self.troubles: dict[int, PgOutputError] = {}
        self.prepared: dict[str, list[pa.Schema]] = {}
        self._origin: TargetOrigin | None = None
        self._target_state = TargetState(0, {})
        self._text: str | None = None  # which the target has

    def __repr__(self) -> str:
        return f"OwnTarget({self.own.name!r})"

    def claim(self) -> None:
        """See `Target`. `begin` finds out whether another sync has written."""

    def open(self, origin: TargetOrigin) -> TargetState:
        """See `Target`."""
        self._target_state = self.peek(origin)
        return self._target_state

    def peek(self, origin: TargetOrigin) -> TargetState:
        """See `Target`."""
        self._origin = origin
        self._text = text = self.own.load()
        if text is None:
            return TargetState(0, {}, is_new=True)
        progress = json.loads(text)
        if progress["format"] != TARGET_FORMAT:
            raise PgOutputError(
                f"{self.own.name} has target format {progress['format']}, but this version of "
                f"pgoutput_fast needs {TARGET_FORMAT}",
                code="not_supported",
                hint="Use the version that wrote it, or start with a new target",
            )
        if progress["origin"] != [*origin]:
            raise PgOutputError(
                f"{self.own.name} has changes of database {progress['origin'][1]!r} (system "
                f"identifier {progress['origin'][0]}), but the changes come from "
                f"{origin.database!r} ({origin.system_identifier})",
                code="another_history",
                hint="Give another target",
            )
        tables = {row["relation_id"]: table_state_of(row) for row in progress["tables"]}
        remembered = RememberedOptions.of(
            None, progress["selection"], progress["policies"], "changes"
        )
        if not tables and not self.remembered.is_like(remembered):
            return TargetState(0, {})
        self.remembered = self.remembered.check(self.own.name, remembered)
        newest = None if progress["newest"] is None else CommitRecord(*progress["newest"])
        return TargetState(progress["lsn"], tables, newest, policies=remembered.policies)

    def retry(self, table_state: TableState) -> None:
        """See `Target`. Only a write can show whether the table can be written again."""

    def begin(self) -> None:
        """See `Target`.

        Raises
        ------
        TargetError
            Another sync has written the target since.
        """
        self.own.begin()
        if self.own.load() != self._text:
            raise TargetError(
                f"another sync writes {self.own.name}",
                code="in_use",
                hint="Let only one sync write a target",
            )

    def changes(self, table_state: TableState) -> _OwnChanges:
        """See `Target`."""
        return _OwnChanges(self, table_state)

    def state(self, table_state: TableState) -> StateWriter:
        """See `Target`. Nobody calls it, as there are no state tables."""
        raise PgOutputError(
            f"{self.own.name} keeps no state of {table_state.stored_name}", code="internal"
        )

    def shown(self, stored_name: str) -> str:
        """See `Target`."""
        return stored_name

    def new_table_state(self, table_state: TableState) -> TableState:
        """See `Target`."""
        return table_state

    def rename(self, table_state: TableState, stored_name: str) -> TableState:
        """See `Target`."""
        for version in range(1, table_state.version + 1):
            self.own.rename(
                versioned(table_state.stored_name, version), versioned(stored_name, version)
            )
        self.prepared.clear()
        return table_state._replace(stored_name=stored_name)

    def keep(self) -> None:
        """See `Target`."""
        self.begin()
        self._commit(self._target_state)

    def commit(self, target_state: TargetState) -> None:
        """See `Target`."""
        self._commit(target_state)
        self._target_state = target_state

    def _commit(self, target_state: TargetState) -> None:
        text = self._progress(target_state)
        self.own.commit(text)
        self._text = text

    def _progress(self, target_state: TargetState) -> str:
        return json.dumps(
            {
                "format": TARGET_FORMAT,
                "origin": self._origin,
                "lsn": target_state.lsn,
                "newest": target_state.newest,
                "selection": self.remembered.listed,
                "policies": self.remembered.policy_texts,
                "tables": [
                    progress_fields(table_state) for table_state in target_state.tables.values()
                ],
            }
        )

    def abort(self) -> None:
        """See `Target`."""
        self.prepared.clear()
        self.own.rollback()

    def close(self) -> None:
        """See `Target`."""
        self.abort()
        self.own.close()


class _OwnChanges:
    """A `ChangeWriter` of a `ChangeTarget`."""

    gap = None

    def __init__(self, target: OwnTarget, table_state: TableState) -> None:
        self._target = target
        self._name = versioned(table_state.stored_name, table_state.version)
        self.lsn, self.copy_lsn = table_state.lsn, table_state.copy_lsn

    def fits(self, schema: pa.Schema) -> bool:
        """See `ChangeWriter`."""
        prepared = self._target.prepared.setdefault(self._name, [])
        if schema in prepared:
            return True
        is_prepared = self._target.own.prepare(self._name, schema)
        if is_prepared:
            prepared.append(schema)
        return is_prepared

    def append(self, changes: pa.RecordBatch) -> None:
        """See `ChangeWriter`."""
        if not self.fits(changes.schema):
            raise PgOutputError(
                f"{self._target.own.name} does not make {self._name}", code="unfit_schema"
            )
        self._target.own.append(self._name, changes)

    def commit(self, table_state: TableState) -> None:
        """See `ChangeWriter`."""
        del table_state  # the target's commit stores it
