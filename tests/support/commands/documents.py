"""The code in documents, and what runs it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
from support.commands.builds import ROOT, clean_environment
from support.postgres.servers import NewServer

from pgoutput_fast.embedded import EmbeddedServer


def blocks(language: str, document: Path = ROOT / "README.md") -> list[str]:
    """What stands in the document's fences of a language; "" for those without."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [text for named, text in found if named == language]


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


def run_shell(block: str, dsn: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run commands of a document, with a server's DSN; those that go on end with what is there."""
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
