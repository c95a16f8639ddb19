"""Spark's MERGE into state tables: for tables of which one task would write too much anew.

The task that folds a table writes its net changes into a file. The driver has Spark merge them, by
one statement that moves the table's position too: Delta's connector writes it into the same commit,
by the name that commits of delta-rs have it by.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import unquote

from pgoutput_fast._disk import fsync_path
from pgoutput_fast.apply.delta_log import MERGED_ON
from pgoutput_fast.apply.delta_merge import SHOWN
from pgoutput_fast.apply.table_window import TableWindow
from pgoutput_fast.apply.window_writer import WindowWriter
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.lsn import format_lsn

from ._jvm import calls, said
from ._net_files import is_for_spark, misfit_of, write_net
from ._staged_files import staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from pgoutput_fast.apply.delta_place import DeltaPlace
    from pgoutput_fast.apply.delta_table import LakeTable
    from pgoutput_fast.apply.delta_target import DeltaTarget
    from pgoutput_fast.apply.folding import NetChanges
    from pgoutput_fast.apply.targets import Alteration, ConflictError, Held

    from ._net_files import NetFile

MergeBy = Literal["auto", "task", "spark"]
MERGE_BY: tuple[MergeBy, ...] = ("auto", "task", "spark")

_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_LOG_STORE = "io.delta.storage.LogStore"
_NEEDED = (
    "start Spark with the packages io.delta:delta-spark_4.2_2.13:4.4.0 and "
    "io.delta:delta-storage:4.4.0 (spark.jars.packages) and the settings "
    f"spark.sql.extensions={_EXTENSION} and spark.sql.catalog.spark_catalog={_CATALOG}"
)

# Measured: docs/explanation/spark-sync.md.
_STATEMENT_SECONDS = 3.0
"""What a statement takes at least."""
_TASK_RATE, _CORE_RATE = 100e6, 15e6
"""Bytes of files that are written anew in a second: by one task, and by each core in a MERGE."""

_MISFIT = "pgoutput_fast: rows do not fit"
_CONCURRENT = re.compile(r"\bConcurrent\w+Exception\b|\bDELTA_MAX_COMMIT_RETRIES_EXCEEDED\b")

_SETTINGS = {
    # Values come as they are: no zone, calendar or type of the session counts.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.storeAssignmentPolicy": "ANSI",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    "spark.sql.parquet.writeLegacyFormat": "false",
    # No part of a name stands for something else.
    "spark.sql.variable.substitute": "false",
    "spark.sql.caseSensitive": "false",
    # Nothing is passed over, and the table keeps its columns.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.databricks.delta.schema.autoMerge.enabled": "false",
    "spark.databricks.delta.stats.collect": "true",
    # By its retries it would commit behind what another program has added meanwhile.
    "spark.databricks.delta.maxCommitAttempts": "0",
    # As the files that delta-rs has: a task reads a group of rows at a time.
    "spark.sql.parquet.compression.codec": "zstd",
    "parquet.block.size": str(32 << 20),
    # Hadoop's own checksums lie beside each file; delta-rs deletes and replaces files without them.
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
    "fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
}


def lacking_connector(spark: SparkSession) -> str | None:
    """What a session lacks of Delta's connector, and what to do; None: nothing.

    Raises
    ------
    RetryableError
        Nobody can tell any more.
    """
    with calls("say whether it has Delta's connector"):
        return _lacking(spark)


def _lacking(spark: SparkSession) -> str | None:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    extensions = str(spark.conf.get("spark.sql.extensions", "")).split(",")
    if _EXTENSION not in [one.strip() for one in extensions]:
        return f"its setting spark.sql.extensions does not have it: {_NEEDED}"
    if spark.conf.get("spark.sql.catalog.spark_catalog", "") != _CATALOG:
        return f"its setting spark.sql.catalog.spark_catalog is another one: {_NEEDED}"
    loader = spark.sparkContext._jvm.java.lang.Thread.currentThread().getContextClassLoader()  # type: ignore[union-attr]  # noqa: SLF001
    for name in (_EXTENSION, _CATALOG, _LOG_STORE):
        try:
            loader.loadClass(name)
        except Py4JJavaError:
            return f"there is no class {name}: {_NEEDED}"
    return None


def bytes_for_spark(cores: int) -> int | None:
    """Of how many bytes of files Spark writes a table anew faster than one task; None: of none."""
    gained = 1 / _TASK_RATE - 1 / (cores * _CORE_RATE)
    return int(_STATEMENT_SECONDS / gained) if gained > 0 else None


class Merger(Protocol):
    """What merges net changes into large state tables."""

    least_bytes: int
    """Tables of which fewer bytes of files may be written anew are merged by the tasks that fold
    them."""

    def merge(self, net: NetFile) -> None:
        """Merge net changes, unless the table has them already.

        Raises
        ------
        IncompleteError
            They do not fit what is there. Nothing was done.
        ConflictError
            Another program has written the table at the same time.
        PgOutputError
            They can't be merged.
        """


class SparkMerger:
    """See `Merger`: a MERGE statement of Spark.

    Parameters
    ----------
    spark : SparkSession
        With Delta's connector.
    place : DeltaPlace
        Of the target, in a file system.
    least_bytes : int
    """

    def __init__(self, spark: SparkSession, place: DeltaPlace, least_bytes: int) -> None:
        self._spark = spark
        self._place = place
        self.least_bytes = least_bytes

    def merge(self, net: NetFile) -> None:
        """See `Merger`."""
        from pyspark.errors import AnalysisException

        # What Spark refuses it refuses again.
        with calls(f"merge into {net.directory}", AnalysisException):
            session = self._session(net)
            context = self._spark.sparkContext
            context.setJobDescription(f"pgoutput: merge {net.name}")  # of this thread
            try:
                session.read.parquet(self._uri(net.path)).createOrReplaceTempView("net")
                session.sql(_statement(net, self._table(net)))
            except Exception as error:
                text = str(error)
                if _MISFIT in text:
                    raise self._misfit(session, net) from None
                if _CONCURRENT.search(text):
                    raise self._conflict(net, said(error)) from error
                raise

    def _uri(self, path: str) -> str:
        # Without a scheme it would be a path of the cluster's own file system.
        return f"file:{self._place.path}/{path}"

    def _table(self, net: NetFile) -> str:
        return f"delta.{_quoted(self._uri(net.directory))}"

    def _session(self, net: NetFile) -> SparkSession:
        """A session of its own, as the position that a statement moves is a setting of it."""
        session = self._spark.newSession()
        own = session.conf.getAll
        for name, value in self._spark.conf.getAll.items():
            if own.get(name) != value and session.conf.isModifiable(name):
                session.conf.set(name, value)
        for name, value in _SETTINGS.items():
            session.conf.set(name, value)
        session.conf.set("spark.databricks.delta.write.txnAppId", net.app)
        session.conf.set("spark.databricks.delta.write.txnVersion", net.lsn)
        # The statement reads the newest version, which may have commits that nobody looked at.
        session.conf.set(
            "spark.databricks.delta.commitInfo.userMetadata", f"{MERGED_ON}{net.version}"
        )
        return session

    def _misfit(self, session: SparkSession, net: NetFile) -> PgOutputError:
        """Which rows do not fit, in the order in which `delta_merge.Merge` looks for them."""
        target = f"{self._table(net)} VERSION AS OF {net.version}"
        own, old = (
            f"(SELECT 1 FROM {target} AS t WHERE {_same(net, of, 't')})"  # noqa: S608 - quoted
            for of in "vf"
        )
        for condition, what, of in (
            (f"expects = 'present' AND NOT EXISTS {own}", "it has no row with", "v"),
            (f"expects = 'absent' AND EXISTS {own}", "it has a row already with", "v"),
            (f"moves AND NOT EXISTS {old}", "it has no row with", "f"),
        ):
            query = f"SELECT n FROM net AS s WHERE {condition} ORDER BY n LIMIT {SHOWN + 1}"  # noqa: S608
            if found := [row.n for row in session.sql(query).collect()]:
                return misfit_of(self._place, net, found, what, of)
        return self._conflict(net, "its rows were others a moment before")

    def _conflict(self, net: NetFile, why: str) -> ConflictError:
        return self._place.conflict(net.directory, f" ({why})")


def merge(merger: Merger, state: Any, net: NetFile) -> None:
    """Have net changes be merged, see that the table has them, and go on from there.

    Parameters
    ----------
    merger : Merger
    state
        What `DeltaTarget.state` gives.
    net : NetFile

    Raises
    ------
    IncompleteError
        Another program has changed the table's rows, or the changes do not fit them.
    PgOutputError
        The table does not have it.
    """

    def attempt() -> None:
        state.check_rows()
        merger.merge(net)

    state.table.until_it_stands(attempt)
    state.table.load()
    if state.table.position[0] < net.lsn:
        raise PgOutputError(
            f"Spark has merged changes into {net.directory}, and its position is not "
            f"{format_lsn(net.lsn)}: the session has another connector than Delta's",
            code="not_supported",
            path=str(net.directory),
        )
    with state.table.refusals():
        _have_on_disk(state.table, net.version)
    state.own = state.table.position
    state.check_rows()  # of commits between the net changes and the statement


def _have_on_disk(table: LakeTable, version: int) -> None:
    """Wait until what a table got since a version is on the local disk, as Spark does not."""
    if table.place.path is None:
        return
    directory = table.place.path / table.directory
    log = directory / "_delta_log"
    names = [f"{one:020}.json" for one in range(version + 1, table.delta.version() + 1)]
    for name in names:
        lines = (log / name).read_text(encoding="utf-8").splitlines()
        for action in map(json.loads, lines):
            if "add" in action:
                fsync_path(directory / unquote(action["add"]["path"]))
        fsync_path(log / name)
    fsync_path(log)


class MergingWindow(WindowWriter):
    """What is written together by this process, but for state tables that Spark merges.

    Parameters
    ----------
    merger : Merger
    given
        As of `WindowWriter`.
    """

    def __init__(self, merger: Merger, *given: Any) -> None:
        super().__init__(*given)
        self._table_window = functools.partial(_MergingTable, merger)


class _MergingTable(TableWindow):
    """A table in such a window."""

    def __init__(self, merger: Merger, target: DeltaTarget, held: Held, **options: Any) -> None:
        super().__init__(target, held, **options)
        self._merger = merger

    def _apply(
        self, state: Any, alterations: Sequence[Alteration], net: NetChanges, held: Held
    ) -> None:
        if is_for_spark(state, alterations, net, held, self._merger.least_bytes):
            merge_here(self._merger, state, net, held)
        else:
            super()._apply(state, alterations, net, held)


def merge_here(merger: Merger, state: Any, net: NetChanges, held: Held) -> None:
    """Have what this process has folded be merged.

    Parameters
    ----------
    merger : Merger
    state
        What `DeltaTarget.state` gives.
    net, held
        What its `apply` takes.
    """
    with staging(state.table.place) as prefix:
        merge(merger, state, write_net(state, net, held, prefix))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _same(net: NetFile, of: str, table: str) -> str:
    """A condition: a table has the key of a net row (`of` "v"), or the one that it had ("f")."""
    at = [net.columns.index(name) for name in net.key] if of == "v" else range(len(net.key))
    pairs = zip(at, net.key, strict=True)
    return " AND ".join(f"s.{of}{i} = {table}.{_quoted(name)}" for i, name in pairs)


def _statement(net: NetFile, table: str) -> str:
    """The statement. Rows that do not fit have it fail by an error that has `_MISFIT`."""
    names = [_quoted(name) for name in net.columns]
    updated = [f"s.v{i}" for i in range(len(names))]
    inserted = [*updated]
    source, absent, present = "net", "false", "false"
    if not net.truncated:
        # Of a new row no value was kept that did not come: it is null.
        for i in net.unsent:
            sent = f"WHEN array_contains(s.unchanged, {i}) IS NOT TRUE THEN s.v{i}"
            moved = f" WHEN s.moves THEN s.o{i}" if net.moves else ""
            inserted[i] = f"CASE {sent}{moved} END"
            updated[i] = f"CASE {sent}{moved} WHEN s.expects = 'present' THEN t.{names[i]} END"
        lost = " OR s.lost" if net.moves else ""
        absent, present = (f"(s.expects = '{one}'{lost})" for one in ("absent", "present"))
    if net.moves:
        old = "".join(f", o.{names[i]} AS o{i}" for i in net.unsent)
        lost = f"s.moves AND o.{_quoted(net.key[0])} IS NULL AS lost"
        source = (
            f"(SELECT s.*{old}, {lost} FROM net AS s "  # noqa: S608 - quoted
            f"LEFT JOIN {table} VERSION AS OF {net.version} AS o "
            f"ON s.moves AND {_same(net, 'f', 'o')})"
        )
    # What does not fit is refused by a value: conditions are evaluated for rows of other clauses
    # too.
    refused = f"raise_error('{_MISFIT}')"
    first = net.columns.index(net.key[0])
    inserted[first] = f"CASE WHEN {present} THEN {refused} ELSE s.v{first} END"
    assigned = ", ".join(f"{name} = {value}" for name, value in zip(names, updated, strict=True))
    lines = [
        f"MERGE INTO {table} AS t USING {source} AS s ON {_same(net, 'v', 't')}",
        f"WHEN MATCHED AND {absent} THEN UPDATE SET {names[first]} = {refused}",
        "WHEN MATCHED AND s.op = 'delete' THEN DELETE",
        f"WHEN MATCHED THEN UPDATE SET {assigned}",
        f"WHEN NOT MATCHED AND (s.op = 'upsert' OR {present}) THEN INSERT ({', '.join(names)})",
        f"VALUES ({', '.join(inserted)})",
    ]
    if net.truncated:
        lines.append("WHEN NOT MATCHED BY SOURCE THEN DELETE")
    return "\n".join(lines)
