"""Print what a sync would do, for `pgoutput-fast sync --dry-run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource
from rich.filesize import decimal

from ..apply.dry_run import ask_server, plan_sync
from ..apply.embedded_capture import DEFAULT_CAPTURE
from ..apply.options import SyncOptions, TargetOptions
from ..apply.synchronize import open_target, published_tables
from ..apply.targets import CHANGES_ALONE
from ..apply.unpublished import check_partitions
from ..capture_options import CaptureOptions
from ..connections import doctor_command
from ..errors import PgOutputError, counted, printable
from ..lsn import format_lsn
from ..replication.walsender import check_slot_name
from ._sync_events import column_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..apply.dry_run import SyncPlan, TablePlan
    from ..apply.synchronize import OpenedTarget
    from ..apply.targets import Target
    from ..connections import ConnectionParameters


@dataclass(frozen=True)
class SyncCall:
    """What a command asks of a sync, without the connection.

    Attributes
    ----------
    target : str
    slot : str or None
    publications : tuple of str
    segments, directory : str or None
    until : int or "now" or None
    options : SyncOptions
    target_options : TargetOptions
    capture_options : CaptureOptions or None
        None: read the change log of another capture.
    """

    target: str
    slot: str | None
    publications: tuple[str, ...] | None
    segments: str | None
    directory: str | None
    until: int | Literal["now"] | None
    options: SyncOptions
    target_options: TargetOptions
    capture_options: CaptureOptions | None

    @property
    def captures(self) -> bool:
        """Whether the sync itself captures a slot."""
        return self.capture_options is not None

    @property
    def source(self) -> str:
        """The source of the changes, for people."""
        if self.capture_options is None:
            return f"change log {self.segments}"
        return f"slot {self.slot}, publications {', '.join(self.publications or ())}"

    @property
    def names(self) -> dict[str, Any]:
        """The source and the target, for programs."""
        values = {name: getattr(self, name) for name in ("slot", "publications", "segments")}
        sources = {name: value for name, value in values.items() if value is not None}
        return {**sources, "target": self.target}

    def open(self) -> OpenedTarget:
        """Return the target, without reading or creating anything.

        Raises
        ------
        PgOutputError
            An argument is wrong.
        """
        opened = open_target(self.target, self.target_options, tables=self.options.tables)
        if self.captures:
            check_slot_name(self.slot or "")
            opened.directory(self.directory)
        return opened


def call_of(
    context: click.Context,
    options: Sequence[dict[str, Any]],
    *,
    target: str,
    slot: str | None,
    publications: tuple[str, ...],
    segments: str | None,
    directory: str | None,
    until: int | Literal["now"] | None,
) -> SyncCall:
    """Return what a command's flags and its file ask for.

    Parameters
    ----------
    context : click.Context
    options : sequence of dict
        The given options: of the sync, the target and the capture.
    target, slot, publications, segments, directory, until
        As in `SyncCall`.

    Raises
    ------
    PgOutputError, click.UsageError
        Options are wrong or contradict each other.
    """
    capture_options = None
    if segments is None:
        if slot is None or not publications:
            raise click.UsageError("give --slot and --publication, or --segments")
        capture_options = dataclasses.replace(DEFAULT_CAPTURE, **{"two_phase": None, **options[2]})
    else:
        if context.args:
            raise click.UsageError("unexpected extra argument; a DSN follows --dsn, in quotes")
        named = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
        wrong = [option for option in ("dsn", "dsn_file", "slot", "publications", "directory")
                 if context.get_parameter_source(option) in named]  # fmt: skip
        for name in (*wrong, *options[2]):
            raise PgOutputError(
                "it does not go together with --segments", code="bad_option", parameter=name
            )
    return SyncCall(
        target, slot, publications or None, segments, directory, until, SyncOptions(**options[0]),
        TargetOptions(**options[1]), capture_options,
    )  # fmt: skip


def print_plan(
    parameters: ConnectionParameters | None, call: SyncCall, opened: OpenedTarget
) -> int:
    """Print what a sync would do, and return the exit code.

    Parameters
    ----------
    parameters : ConnectionParameters or None
        For the server, if the sync captures a slot.
    call : SyncCall
    opened : OpenedTarget

    Raises
    ------
    PgOutputError
        The sync could not begin.
    """
    options = call.options
    partition_by = call.target_options.partition_by
    asked = None
    if parameters is not None and call.capture_options is not None:
        directory = opened.directory(call.directory)
        publications = call.publications or ()
        asked = ask_server(
            parameters, call.slot or "", publications, directory,
            adopt_slot=call.capture_options.adopt_slot,
        )  # fmt: skip
        if partition_by:
            published = published_tables(parameters, publications)
            check_partitions(
                partition_by, published, opened.target.peek(asked.origin).tables.values()
            )
    else:
        directory = Path(call.segments or "")
    consumer = options.consumer or opened.consumer
    plan = plan_sync(
        opened.target, call.target, opened.decode_for, directory, options, consumer, asked
    )
    for line in _lines(plan, call, opened.target):
        click.echo(line)
    return 0


def _lines(plan: SyncPlan, call: SyncCall, target: Target) -> Iterator[str]:
    if plan.slot is not None:
        confirmed = plan.slot.confirmed_lsn or 0
        behind = decimal(max(0, plan.slot.server_lsn - confirmed))
        yield (
            f"slot {plan.slot.name} exists, and continues at {format_lsn(confirmed)}; the server's "
            f"log is {behind} ahead"
            if plan.slot.exists
            else f"slot {plan.slot.name} would be made; check with "
            f"{doctor_command(call.publications or ())} that the server allows it"
        )
    if plan.has_begun:
        yield (
            f"{plan.directory} is read from {format_lsn(plan.lsn)} on, and ends at "
            f"{format_lsn(plan.end_lsn)}"
        )
    else:
        yield f"{plan.directory} would be made, as the change log of the slot"
    for warning in plan.mistaken:
        yield f"warning: {warning}"
    has = any(table.before is not None for table in plan.tables)
    yield f"{call.target} {'would be continued' if has else 'would be made'}"
    if not plan.tables:
        yield "there are no tables yet"
    names = [printable(table.name) for table in plan.tables]
    width = max(map(len, names), default=0)
    for name, table in zip(names, plan.tables, strict=True):
        said = "; ".join((_target(table, target.shown), *_comes(plan, table, call, target)))
        yield f"  {name:<{width}}  {said}"
    yield "nothing was written"


def _target(table: TablePlan, shown: Callable[[str], str]) -> str:
    state = table.before
    if state is None:
        return "not in the target"
    name = shown(state.stored_name)
    as_name = "" if name == table.name else f"as {printable(name)}, "
    at = f"{as_name}up to {format_lsn(state.lsn)} in the target"
    if state.paused is not None:
        return f"{at}, paused: {printable(state.paused.reason)}"
    return at if state.stale is None else f"{at}, not kept up to date: {printable(state.stale)}"


def _comes(plan: SyncPlan, table: TablePlan, call: SyncCall, target: Target) -> Iterator[str]:
    if table.refused is not None:
        yield f"would be paused: {printable(table.refused)}"
        return
    if table.copy_lsn is not None:
        yield f"its snapshot of {counted(table.rows, 'row')} as of {format_lsn(table.copy_lsn)}"
    if plan.has_begun and (table.before is not None or table.has_snapshot or table.changes):
        yield f"{counted(table.changes, 'change')} from {format_lsn(table.lsn)} on"
    before = None if table.before is None else table.before.stale
    after = None if table.after is None else table.after.stale
    if after is not None and after not in (before, CHANGES_ALONE):
        yield f"would not be kept up to date: {printable(after)}"
    elif table.before is not None and table.after is not None and table.copy_lsn is None:
        for text in column_events(table.before.columns, table.after.columns):
            yield f"then {printable(text)}"
    if table.is_lost:
        yield "would get a new snapshot, because the change log lacks changes of it"
    elif table.waits:
        yield "waits for its snapshot"
    elif table.has_snapshot or table.before is not None:
        pass
    elif (
        plan.slot is not None
        and not table.changes
        and call.capture_options is not None
        and call.capture_options.snapshot == "initial"
    ):
        yield "would get a snapshot"
    else:
        uncopied = call.options.uncopied if target.remembered.has_state else "changes"
        yield {
            "error": "no snapshot: an error at its first change",
            "empty": "no snapshot: it counts as empty when the capture began",
            "changes": "no snapshot: only its changes are kept",
        }[uncopied]
    if table.is_published is False:
        yield "not published any more"
