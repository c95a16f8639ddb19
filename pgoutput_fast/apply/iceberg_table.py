"""Change tables as Iceberg tables in a catalogue of pyiceberg.

The Parquet files are the same as for a Delta change table, in the same directory. A commit of
pyiceberg adds them in a new snapshot, and sets the table's position in its properties.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ..errors import Argument, PgOutputError, RetryableError, without_passwords
from .delta_place import may_pass
from .delta_table import LakeTable
from .delta_types import schema_of, schema_text
from .targets import ConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from .delta_files import AddedFile, Written
    from .delta_joins import Joins
    from .delta_place import DeltaPlace
    from .delta_table import File

NAMESPACE = "changes"
"""The tables' namespace in the catalogue."""

_NAME = "pgoutput_fast"
_SHORT = 3  # characters up to which a property is no secret

# With retries, pyiceberg would add our files after another program's snapshot.
_NO_RETRIES = {"commit.retry.num-retries": "0"}
_CONFLICT = (
    "another program wrote the Iceberg table {} at the same time. Only one sync at a time can "
    "write a target"
)
_APP, _LSN, _COPY_LSN, _SCHEMA, _GAP = (
    f"pgoutput_fast.{name}" for name in ("app", "lsn", "copy-lsn", "arrow-schema", "gap")
)


class IcebergCatalog:
    """A catalogue of Iceberg tables, opened at its first use.

    Parameters
    ----------
    catalog : str or mapping of str to str
        The catalogue's name in the configuration of pyiceberg; or its properties, which may have
        secrets. The property ``name`` is its name, by default ``pgoutput_fast``.

    Raises
    ------
    PgOutputError
        pyiceberg is not installed.
    """

    def __init__(self, catalog: str | Mapping[str, str]) -> None:
        try:
            import pyiceberg  # noqa: F401
        except ImportError as error:
            raise PgOutputError(
                f"pyiceberg is not installed ({error})",
                code="missing_package",
                hint="Install the extra pgoutput-fast[iceberg]",
            ) from error
        self._properties = {} if isinstance(catalog, str) else dict(catalog)
        self._name = catalog if isinstance(catalog, str) else self._properties.pop("name", _NAME)
        self._opened: Any = None
        # Catalogues of pyiceberg are not thread-safe.
        self.guard = threading.RLock()

    def __repr__(self) -> str:
        return f"Catalog({self._name!r})"

    @property
    def opened(self) -> Any:
        """The catalogue object of pyiceberg."""
        if self._opened is None:
            from pyiceberg.catalog import load_catalog

            with self.refusals(""):
                self._opened = load_catalog(self._name, **self._properties)
                self._opened.create_namespace_if_not_exists(NAMESPACE)
        return self._opened

    @contextlib.contextmanager
    def refusals(self, subject: str) -> Iterator[None]:
        """Translate errors of pyiceberg, the catalogue and the storage to `PgOutputError`.

        The errors name the table `subject`; if it is empty, only the catalogue.
        """
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

        try:
            with self.guard:
                yield
        except PgOutputError:
            raise
        except CommitFailedException:
            raise ConflictError(_CONFLICT.format(subject)) from None
        except CommitStateUnknownException:
            raise RetryableError(
                "the catalogue did not say whether it accepted a commit to the Iceberg table "
                f"{subject}. The next sync checks this",
                code="io_failed",
            ) from None
        except Exception as error:  # noqa: BLE001 - of their libraries
            # The text may have the catalogue's URI with a password.
            text = without_passwords(str(error).partition("\n")[0])
            for value in self._properties.values():
                if len(value) > _SHORT:
                    text = text.replace(value, "…")
            doing = f"read or write {subject} in" if subject else "open"
            text = (
                f"can't {doing} the Iceberg catalogue {self._name!r}: "
                f"{type(error).__name__}: {text}"
            )
            raise (RetryableError if may_pass(text) else PgOutputError)(
                text, code="io_failed"
            ) from None


class IcebergTable(LakeTable):
    """A change table in an Iceberg catalogue. See `LakeTable`.

    Parameters
    ----------
    place, directory, app, retention_hours
        See `LakeTable`. The table's files are in `directory`.
    catalog : IcebergCatalog
    name : str
        The table's name in the catalogue.
    """

    def __init__(
        self,
        place: DeltaPlace,
        directory: str,
        app: str,
        retention_hours: int,
        catalog: IcebergCatalog,
        name: str,
    ) -> None:
        super().__init__(place, directory, app, retention_hours)
        self._catalog = catalog
        self._identifier = (NAMESPACE, name)
        self._table: Any = None

    @property
    def exists(self) -> bool:
        """Whether the table exists, as of the last `load` or `create`."""
        return self._table is not None

    def load(self) -> None:
        """Load the table's newest metadata, if the table exists.

        Raises
        ------
        PgOutputError
            The table is not of this sync, or a Delta table is in the directory.
        """
        local = self.place.path
        if local is not None and (local / self.directory / "_delta_log").is_dir():
            raise PgOutputError(
                f"{local / self.directory} is a Delta table, and a target cannot change the kind "
                "of its change tables",
                code="bad_option",
                path=str(local / self.directory),
                parameter="iceberg",
                hint=("Give another target, or leave ", Argument("iceberg"), " out"),
            )
        with self._catalog.refusals(str(self._identifier)):
            if self._table is not None:
                self._table.refresh()
            elif self._catalog.opened.table_exists(self._identifier):
                self._table = self._catalog.opened.load_table(self._identifier)
        if self._table is not None and self._property(_APP) != self.app:
            raise PgOutputError(
                f"the Iceberg table {self._identifier} does not belong to this sync ({self.app})",
                code="not_ours",
                hint="Rename it, or give another catalogue",
            )
        if self._table is not None:
            self._check_foreign_commits()

    def _property(self, name: str, other: str = "") -> str:
        return str(self._table.properties.get(name, other))

    def is_its_own(self) -> bool:
        """Whether the table exists and has changes of `app`."""
        with self._catalog.refusals(str(self._identifier)):
            if not self._catalog.opened.table_exists(self._identifier):
                return False
            table = self._catalog.opened.load_table(self._identifier)
        return bool(table.properties.get(_APP) == self.app)

    def rename(self, name: str) -> None:
        """Rename the table; its files stay where they are."""
        with self._catalog.refusals(str(self._identifier)):
            self._catalog.opened.rename_table(self._identifier, (NAMESPACE, name))

    @property
    def position(self) -> tuple[int, int]:
        """The table's LSN and its snapshot LSN."""
        if self._table is None:
            return 0, 0
        return int(self._property(_LSN, "0")), int(self._property(_COPY_LSN, "0"))

    @property
    def version(self) -> str:
        """See `LakeTable`: the location of the table's metadata."""
        return str(self._table.metadata_location)

    @property
    def gap(self) -> int | None:
        """See `LakeTable`."""
        if self._table is None:
            return None
        if self.changed is not None:
            return self.position[0]
        return int(self._property(_GAP)) if _GAP in self._table.properties else None

    def _check_foreign_commits(self) -> None:
        """Find out what other programs did since our last commit, by the snapshots' operations."""
        self.changed = None
        snapshot, ours = self._table.current_snapshot(), None
        while snapshot is not None:
            summary = snapshot.summary
            ours = None if summary is None else summary.additional_properties.get(_LSN)
            if ours is not None:
                break
            operation = "" if summary is None else summary.operation.value
            if operation != "replace":
                self.changed = f"{operation} in snapshot {snapshot.snapshot_id}"
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
            if parent is not None and snapshot is None:
                self.changed = f"snapshot {parent} has expired"
        if ours is not None and int(ours) < self.position[0]:
            self.changed = "a rollback"

    @property
    def schema(self) -> pa.Schema:
        """The table's columns, with the types of its files; Iceberg widens some types."""
        return schema_of(self._property(_SCHEMA))

    def create(
        self,
        schema: pa.Schema,
        position: tuple[int, int],
        partition_by: Sequence[str] = (),
        description: str | None = None,
        files: Sequence[AddedFile] = (),
    ) -> None:
        """Create the table, and add its first files in a second commit."""
        del partition_by, description  # only state tables have these
        with self._catalog.refusals(str(self._identifier)):
            self._table = self._catalog.opened.create_table(
                self._identifier,
                schema=schema,
                location=self.uri,
                properties={
                    _APP: self.app,
                    **_properties((0, 0) if files else position),
                    **_encoded(schema),
                    **_NO_RETRIES,
                },
            )
        if files:
            self.commit(list(files), [], position)

    def add_columns(self, schema: pa.Schema) -> None:
        """Add the columns that a schema has and the table lacks; existing rows are null there."""
        if schema == self.schema:
            return
        with (
            self._catalog.refusals(str(self._identifier)),
            self._table.transaction() as transaction,
        ):
            with transaction.update_schema() as update:
                update.union_by_name(schema)
            transaction.set_properties(_encoded(schema))

    def commit(
        self,
        files: Written,
        removed: Sequence[File],
        position: tuple[int, int] | None,
        *,
        schema: pa.Schema | None = None,
        **more: int,
    ) -> None:
        """Add files and set the position in one commit."""
        if removed or schema is not None or more or position is None:
            raise PgOutputError("a change table is only added to", code="not_supported")
        with self._catalog.refusals(str(self._identifier)):
            with self._table.transaction() as transaction:
                self._add(transaction, files, position)
            self._check_foreign_commits()

    def _add(self, transaction: Any, files: Written, position: tuple[int, int]) -> None:
        """Add files and the position to a transaction, which fails if the snapshot has changed."""
        gap = {} if self.changed is None else {_GAP: str(self.gap)}
        transaction.set_properties({**_properties(position), **gap})
        # Even without files: `_check_foreign_commits` finds our snapshots by their positions.
        transaction.add_files(
            [f"{self.uri}/{file.path}" for file in files],
            snapshot_properties=_properties(position),
            check_duplicate_files=False,
        )

    def maintain(self, joins: Joins | None = None) -> None:
        """Do nothing: leave expired snapshots and small files to the user's Iceberg maintenance."""


def _properties(position: tuple[int, int]) -> dict[str, str]:
    return {_LSN: str(position[0]), _COPY_LSN: str(position[1])}


def _encoded(schema: pa.Schema) -> dict[str, str]:
    return {_SCHEMA: schema_text(schema)}
