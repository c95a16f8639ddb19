"""A server of each version for the tests of this directory: what one lacks is said by a skip.

With PGOUTPUT_FAST_REQUIRE_SERVERS, as `make test-matrix` has it, one that is missing is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.postgres.servers import find_server

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer

VERSIONS = (14, 15, 16, 17, 18)
SETTINGS = {"log_min_messages": "fatal", "logical_decoding_work_mem": "64kB"}


@pytest.fixture(scope="session", params=VERSIONS, ids="pg{}".format)
def version(request: pytest.FixtureRequest) -> int:
    """Each version in turn."""
    found: int = request.param
    return found


@pytest.fixture(scope="session")
def programs(version: int) -> Path:
    """The directory with the version's programs."""
    try:
        return find_server(version)
    except pf.PgOutputError as error:
        if os.environ.get("PGOUTPUT_FAST_REQUIRE_SERVERS"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server(programs: Path) -> Iterator[EmbeddedServer]:
    """A server that the tests of a file share, each with a database of its own."""
    with EmbeddedServer(settings=SETTINGS, bindir=programs) as running:
        yield running


@pytest.fixture
def own(programs: Path) -> Iterator[EmbeddedServer]:
    """A server that no other test uses."""
    with EmbeddedServer(settings=SETTINGS, bindir=programs) as running:
        yield running


@pytest.fixture
def needs(version: int) -> Callable[[int, str], None]:
    """`needs(since, what)` skips the test on servers that are older."""

    def check(since: int, what: str) -> None:
        if version < since:
            pytest.skip(f"{what} needs PostgreSQL {since}")

    return check
