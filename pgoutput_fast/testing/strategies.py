"""Hypothesis strategies for tuples, tables, messages and whole streams.

The strategies need the extra ``pgoutput-fast[testing]``. They draw well-formed data only. Names and
values are of all kinds that a server sends, with text in UTF-8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._impl import implementation
from ..errors import PgOutputError
from ..objects import UNCHANGED
from ..protocol.encode import encode_fields
from ..protocol.wire import LAYOUTS, TAGS, Column
from .server import MadeTransaction, Savepoint, Server
from .tables import Table, UserType

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise PgOutputError(
        f"strategies need Hypothesis ({error})",
        code="missing_package",
        hint="Install the extra pgoutput-fast[testing]",
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = [
    "columns",
    "frames",
    "messages",
    "names",
    "rows",
    "servers",
    "tables",
    "tuples",
    "values",
]

IN_STREAM = "RYIUDTMOE"
"""Tags of the messages that come inside stream chunks."""

_uint32 = st.integers(0, 0xFFFFFFFF)
_characters = st.characters(codec="utf-8")

_TYPES: dict[str | UserType, SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int4": st.integers(-(2**31), 2**31 - 1),
    "int8": st.integers(-(2**63), 2**63 - 1).flatmap(
        lambda number: st.sampled_from((number, number.to_bytes(8, "big", signed=True)))
    ),
    "float8": st.floats(),
    "numeric(12,2)": st.decimals(-(10**9), 10**9, places=2).map(str),
    "text": st.text(_characters),
    "bytea": st.binary().flatmap(lambda data: st.sampled_from((data, f"\\x{data.hex()}"))),
    "uuid": st.uuids().map(str),
    "date": st.dates().map(str),
    UserType(16400, "mood"): st.sampled_from(("sad", "ok", "happy")),
}
"""The column types to draw, and their values, some in text and some in binary format."""


def names() -> SearchStrategy[str]:
    """Draw names of tables, columns, origins and so on: text without NUL, at most 63 bytes long."""
    characters = _characters.filter(lambda character: character != "\0")
    return st.text(characters, min_size=1, max_size=63).filter(lambda name: len(name.encode()) < 64)


def values(*, unchanged: bool = True) -> SearchStrategy[Any]:
    """Draw values of columns as :func:`pgoutput_fast.testing.encode_tuple` takes them.

    Parameters
    ----------
    unchanged : bool
        Whether to draw unchanged TOAST values, which old tuples never have.
    """
    kinds: list[SearchStrategy[Any]] = [st.none(), st.text(_characters), st.binary()]
    kinds.append(st.tuples(st.sampled_from("tb"), st.binary()))
    return st.one_of(*kinds, *([st.just(UNCHANGED)] if unchanged else []))


def tuples(
    width: int | SearchStrategy[int] | None = None, *, unchanged: bool = True
) -> SearchStrategy[list[Any]]:
    """Draw tuples as :func:`pgoutput_fast.testing.encode_tuple` takes them.

    Parameters
    ----------
    width : int or strategy of int, optional
        The number of columns; by default 0 to 8.
    unchanged : bool
        Whether to draw unchanged TOAST values, which old tuples never have.
    """
    widths = st.integers(0, 8) if width is None else width
    if isinstance(widths, int):
        return st.lists(values(unchanged=unchanged), min_size=widths, max_size=widths)
    return widths.flatmap(lambda count: tuples(count, unchanged=unchanged))


def columns() -> SearchStrategy[list[Column]]:
    """Draw the columns of a Relation, of any types."""
    column = st.builds(
        Column, st.integers(0, 255), names(), _uint32, st.integers(-(2**31), 2**31 - 1)
    )
    return st.lists(column, max_size=8)


@st.composite
def tables(draw: DrawFn, relation_id: int | SearchStrategy[int] | None = None) -> Table:
    """Draw tables with columns of some built-in types and a user's enum, any replica identity.

    Parameters
    ----------
    relation_id : int or strategy of int, optional
        The table's OID; by default any OID from 16384 on.
    """
    oids = st.integers(16384, 0xFFFFFFFF) if relation_id is None else relation_id
    shape: dict[str, Any] = draw(
        st.dictionaries(names(), st.sampled_from(list(_TYPES)), max_size=6)
    )
    identity = draw(st.sampled_from("dfin"))
    key = None
    if identity in "di" and shape:
        key = draw(st.lists(st.sampled_from(sorted(shape)), min_size=1, unique=True))
    return Table(
        draw(names()),
        shape,
        oids if isinstance(oids, int) else draw(oids),
        namespace=draw(names()),
        key=key,
        replica_identity=identity,
    )


def rows(table: Table, *, unchanged: bool = False) -> SearchStrategy[list[Any]]:
    """Draw rows of a table; values fit the columns' types.

    Parameters
    ----------
    table : Table
        A table that :func:`tables` has drawn.
    unchanged : bool
        Whether to draw unchanged TOAST values.
    """
    by_oid = {Table("t", {"c": type_}).columns[0].type_id: drawn for type_, drawn in _TYPES.items()}
    kinds = [by_oid[column.type_id] for column in table.columns]
    others = [st.none(), *([st.just(UNCHANGED)] if unchanged else [])]
    return st.tuples(*(st.one_of(kind, *others) for kind in kinds)).map(list)


_FIELDS: dict[str, Callable[[], SearchStrategy[Any]]] = {
    "uint8": lambda: st.integers(0, 255),
    "char": lambda: st.characters(max_codepoint=255),
    "bool": st.booleans,
    "uint32": lambda: _uint32,
    "lsn": lambda: st.integers(0, 2**64 - 1),
    "time": lambda: st.integers(-(2**63), 2**63 - 1),
    "string": lambda: st.one_of(st.just(""), names()),
    "columns": columns,
    "oids": lambda: st.lists(_uint32, max_size=5),
    "sized_bytes": st.binary,
    "N": tuples,
    "K or O": lambda: tuples(unchanged=False),
}
"""For each kind of field in the wire layout, the strategy that draws it."""


@st.composite
def frames(draw: DrawFn, tags: str = TAGS, in_stream: bool = False) -> bytes:
    """Draw frames of any message, with any value in each field.

    Parameters
    ----------
    tags : str
        The tags of the messages to choose from.
    in_stream : bool
        Whether to draw frames in the form inside a stream chunk. Messages that cannot be inside a
        stream chunk are then left out.
    """
    tag = draw(st.sampled_from([tag for tag in tags if not in_stream or tag in IN_STREAM]))
    fields: dict[str, Any] = {}
    for name, kind in LAYOUTS[tag]:
        if kind == "stream_xid":
            fields[name] = draw(_uint32) if in_stream else None
        elif kind in _FIELDS:
            fields[name] = draw(_FIELDS[kind]())
    if tag == "A" and draw(st.booleans()):
        fields["abort_lsn"], fields["abort_time"] = draw(_FIELDS["lsn"]()), draw(_FIELDS["time"]())
    if tag == "U" and draw(st.booleans()):
        fields["old"] = draw(tuples(unchanged=False))
    if "old" in fields:
        fields["old_kind"] = draw(st.sampled_from("KO"))
    return encode_fields(tag, **fields)


def messages(tags: str = TAGS, in_stream: bool = False) -> SearchStrategy[Any]:
    """Draw decoded messages, from frames that :func:`frames` draws.

    Parameters
    ----------
    tags, in_stream
        As for :func:`frames`.
    """
    return frames(tags, in_stream).map(lambda frame: implementation.decode(frame, in_stream))


@st.composite
def servers(draw: DrawFn, *, streaming: bool = True, two_phase: bool = True) -> Server:
    """Draw servers that have sent transactions, interleaved in all possible ways.

    Parameters
    ----------
    streaming : bool
        Whether open transactions, with subtransactions, are sent in stream chunks.
    two_phase : bool
        Whether some transactions are prepared.
    """
    server = Server(
        lsn=draw(st.integers(1, 2**63)),
        xid=draw(st.one_of(st.integers(3, 2**32 - 1), st.integers(2**32 - 5, 2**32 - 1))),
        time=draw(st.integers(-(2**50), 2**60)),
        streaming=draw(st.sampled_from(("on", "parallel"))),
        version=draw(st.sampled_from((14, 18))),
    )
    drawn_tables = [draw(tables(16385 + i)) for i in range(draw(st.integers(1, 3)))]
    run = _DrawnHistory(draw, server, drawn_tables)
    steps = [run.begin, run.change, run.change, run.change, run.savepoint, run.end_savepoint]
    steps += [run.end, run.outside]
    steps += [run.stream, run.stream] if streaming else []
    steps += [run.prepare] if two_phase else []
    for step in draw(st.lists(st.sampled_from(steps), max_size=30)):
        step()
    while run.open or run.prepared:
        run.end()
    return server


class _DrawnHistory:
    """Draws the events on a server, one by one."""

    def __init__(self, draw: DrawFn, server: Server, tables: list[Table]) -> None:
        self.draw = draw
        self.server = server
        self.tables = tables
        self.open: list[MadeTransaction] = []
        self.prepared: list[MadeTransaction] = []
        self.savepoints: dict[int, list[Savepoint]] = {}

    def open_transaction(self) -> MadeTransaction:
        """Return one of the open transactions, or a new one if none is open."""
        if not self.open:
            self.begin()
        return self.draw(st.sampled_from(self.open))

    def begin(self) -> None:
        if len(self.open) < 3:
            origin = self.draw(st.one_of(st.none(), names()))
            transaction = self.server.begin(origin, self.draw(_FIELDS["lsn"]()))
            self.open.append(transaction)
            self.savepoints[transaction.xid] = []

    def change(self) -> None:
        transaction = self.open_transaction()
        table = self.draw(st.sampled_from(self.tables))
        new, old = rows(table, unchanged=True), rows(table)
        tag = self.draw(st.sampled_from("IIUDTM"))
        if tag == "I":
            transaction.insert(table, self.draw(old))
        elif tag == "U":
            transaction.update(table, self.draw(new), self.draw(st.one_of(st.none(), old)))
        elif tag == "D":
            transaction.delete(table, self.draw(old))
        elif tag == "T":
            several = st.lists(st.sampled_from(self.tables), min_size=1, unique_by=id)
            transaction.truncate(self.draw(several), self.draw(st.integers(0, 3)))
        else:
            transaction.message(self.draw(names()), self.draw(st.binary()))

    def savepoint(self) -> None:
        transaction = self.open_transaction()
        self.savepoints[transaction.xid].append(transaction.savepoint())

    def end_savepoint(self) -> None:
        """End a savepoint, and with it the savepoints inside it."""
        savepoints = self.savepoints[self.open_transaction().xid]
        if savepoints:
            number = self.draw(st.integers(0, len(savepoints) - 1))
            chosen = savepoints[number]
            del savepoints[number:]
            self.draw(st.sampled_from((chosen.release, chosen.rollback)))()

    def stream(self) -> None:
        self.open_transaction().stream()

    def prepare(self) -> None:
        transaction = self.open_transaction()
        transaction.prepare(self.draw(st.one_of(st.just(""), names())))
        self.open.remove(transaction)
        self.prepared.append(transaction)

    def end(self) -> None:
        """Commit or abort a transaction that is open or prepared."""
        unfinished = [*self.open, *self.prepared]
        if unfinished:
            chosen = self.draw(st.sampled_from(unfinished))
            for transactions in (self.open, self.prepared):
                if chosen in transactions:
                    transactions.remove(chosen)
            self.draw(st.sampled_from((chosen.commit, chosen.commit, chosen.abort)))()

    def outside(self) -> None:
        self.server.message(self.draw(names()), self.draw(st.binary()))
