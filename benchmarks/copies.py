"""Measure ADBC's reader of COPY BINARY with the workloads' rows, in tables of a private server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import workloads
from .harness import Case, optional_module, timed

_KINDS = {
    16: "bool", 20: "int8", 23: "int4", 25: "text", 701: "float8", 1042: "char(14)", 1082: "date",
    1184: "timestamptz", 1700: "numeric(12,2)", 2950: "uuid", 3802: "jsonb",
}  # fmt: skip
_REPEATS = 4
"""How many times a table has the rows, so that the cost of the query itself does not matter."""


def _fill(connection: Any, workload: workloads.Workload) -> None:
    assert workload.table is not None
    columns = workload.table.columns
    named = ", ".join(f"{column.name} {_KINDS[column.type.oid]}" for column in columns)
    connection.execute(f"CREATE TABLE {workload.name} ({named})")
    with connection.cursor().copy(f"COPY {workload.name} FROM STDIN") as copy:
        for _ in range(_REPEATS):
            for row in workload.rows:
                copy.write_row(
                    [
                        None if value is None else column.type.text(value)
                        for column, value in zip(columns, row, strict=True)
                    ]
                )


@contextlib.contextmanager
def cases(generated: Mapping[str, workloads.Workload], seconds: float) -> Iterator[list[Case]]:
    """A case for each workload; the server runs until the iterator is closed.

    Each measures the client's CPU time, with that of receiving, per frame of the workload.

    Raises
    ------
    NotMeasured
        The driver is not installed, or there are no server programs.
    """
    driver = optional_module("adbc_driver_postgresql.dbapi")
    psycopg = optional_module("psycopg")
    from pgoutput_fast.embedded import EmbeddedServer

    from .peers.site import find_server

    with EmbeddedServer(bindir=find_server(), tcp=True) as server:
        dsn = server.dsn(tcp=True)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for workload in generated.values():
                _fill(connection, workload)
        with driver.connect(dsn) as connection, connection.cursor() as cursor:

            def read(name: str, expected: int) -> Callable[[], None]:
                def run() -> None:
                    cursor.execute(f"SELECT * FROM {name}")
                    table = cursor.fetch_arrow_table()
                    assert table.num_rows == expected

                return run

            yield [
                timed(
                    f"{name}/binary/columns/ADBC COPY",
                    read(name, _REPEATS * len(workload.rows)),
                    _REPEATS * len(workload.frames),
                    seconds,
                )
                for name, workload in generated.items()
            ]
