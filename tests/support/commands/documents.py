"""The code in documents, and what runs it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from support.commands.builds import ROOT, clean_environment
from support.postgres.servers import NewServer
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer

if TYPE_CHECKING:
    from typing_extensions import LiteralString


def blocks(language: str, document: Path = ROOT / "README.md") -> list[str]:
    """What stands in the document's fences of a language; "" for those without."""
    fences = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
    found = fences.findall(document.read_text())
    return [textwrap.dedent(text) for _, named, text in found if named == language]


def python_blocks(document: Path) -> list[str]:
    return blocks("python", document)


@contextlib.contextmanager
def fresh_server() -> Iterator[EmbeddedServer]:
    """A server on which only the README's SQL was run."""
    (setup,) = blocks("sql")
    with NewServer(18) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(setup)
        yield server


def on(server: EmbeddedServer, example: str) -> str:
    """The example, with that server's DSN."""
    assert '"postgresql:///shop"' in example
    return example.replace('"postgresql:///shop"', repr(server.dsn()))


def run_shell(
    block: str, dsn: str | None, cwd: Path, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run commands of a document, with a server's DSN; those that go on end with what is there."""
    text = block
    if dsn is not None:
        assert "postgresql:///shop" in block
        text = block.replace("postgresql:///shop", shlex.quote(dsn))
    text = text.replace("pgoutput-fast sync ", "pgoutput-fast sync --until now ")
    with tempfile.TemporaryDirectory() as directory:
        for name, module in (("pgoutput-fast", "-m pgoutput_fast"), ("python", "")):
            command = Path(directory) / name
            command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
            command.chmod(0o755)
        path = f"{directory}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["/bin/sh", "-e", "-c", text], cwd=cwd, env=clean_environment(PATH=path, **settings),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip


def wait_for(
    connection: psycopg.Connection[Any], query: LiteralString, process: subprocess.Popen[str]
) -> None:
    """Wait until the query has a row, which a process brings about."""
    has_row = lambda: connection.execute(query).fetchone() is not None  # noqa: E731
    wait_until(has_row, 60, process=process, log=lambda: query)


def consume(example: str) -> None:
    """Run a loop that prints what it gets, until the server was told of it."""
    slot = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE active"
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        reading = subprocess.Popen(
            [sys.executable, "-c", on(server, example)], stdout=subprocess.PIPE, text=True
        )
        try:
            wait_for(connection, slot, reading)
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL)")
            ((end,),) = connection.execute("SELECT pg_current_wal_lsn()")
            assert reading.stdout is not None
            assert reading.stdout.readline() == (
                "['insert'] [{'id': 1, 'balance': Decimal('99.50'), 'note': None}]\n"
            )
            confirmed = f"SELECT 1 FROM ({slot}) s WHERE confirmed_flush_lsn >= '{end}'"
            wait_for(connection, confirmed, reading)
        finally:
            reading.kill()
            reading.communicate()
