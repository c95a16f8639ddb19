"""What all tests share: the two implementations, and where recorded streams are."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

IMPLEMENTATIONS = {
    "cython": "pgoutput_fast.decoding._core",
    "python": "pgoutput_fast.decoding._pure",
}


# Where there is no psycopg, a wheel is tested: without servers.
pytest_plugins = ["support.postgres.fixtures"] if importlib.util.find_spec("psycopg") else []

# A shell without job control has SIGINT ignored in what it starts in the background, and programs
# that tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--corpus",
        type=Path,
        metavar="DIR",
        default=os.environ.get("PGOUTPUT_FAST_CORPUS") or None,
        help="decode every capture of this directory too (default: PGOUTPUT_FAST_CORPUS)",
    )


def pytest_report_header() -> list[str]:
    """Says which implementation is loaded: tests of the wrong one are green too."""
    import pgoutput_fast

    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    versions = [f"Python {platform.python_version()}"] + [
        f"{name} {installed[name]}" if name in installed else f"no {name}"
        for name in ("numpy", "pyarrow", "psycopg", "pyspark")
    ]
    reason = pgoutput_fast.FALLBACK_REASON
    return [
        f"pgoutput_fast {pgoutput_fast.__version__}: IMPLEMENTATION={pgoutput_fast.IMPLEMENTATION}"
        + (f" ({reason})" if reason else "")
        + f", {Path(pgoutput_fast.__file__).parent}",
        ", ".join(versions),
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Half as many processes again as cores, since many tests wait for servers most of the time.

    `-k` chooses few tests: they are done before other processes would have begun.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 0 if config.getoption("keyword") else 3 * (cores or 1) // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file run in one process, and all of Spark's files do, for one Java process.

    Its start, and the first of its jobs, cost more than most tests.
    """
    from xdist.scheduler import LoadFileScheduling

    class OneSparkScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return _SPARK if scope.startswith(_SPARK) else scope

    return OneSparkScheduling(config, log)


_SPARK = "tests/spark/test_"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the cases that the marker `everyday` of their test does not name."""
    parts, matched = set(), set()
    for item in items:
        if everyday := item.get_closest_marker("everyday"):
            test = item.nodeid.partition("[")[0]
            named = [part for part in everyday.args if part in item.nodeid]
            parts.update((test, part) for part in everyday.args)
            matched.update((test, part) for part in named)
            if not named:
                item.add_marker(pytest.mark.slow)
    if parts != matched and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"everyday names no case: {sorted(parts - matched)}")
    items.sort(key=lambda item: not item.nodeid.startswith(_SPARK))  # what takes longest, first


def implementation(name: str) -> ModuleType:
    """The module of an implementation. One that is missing fails the test, it does not skip."""
    try:
        return importlib.import_module(IMPLEMENTATIONS[name])
    except ImportError as error:
        pytest.fail(
            f"the {name} implementation cannot be imported ({error}); build the extension with "
            "PGOUTPUT_FAST_REQUIRE_EXT=1 python setup.py build_ext --inplace",
            pytrace=False,
        )


@pytest.fixture(params=list(IMPLEMENTATIONS))
def impl(request: pytest.FixtureRequest) -> ModuleType:
    """Each implementation's module in turn."""
    return implementation(request.param)


@pytest.fixture
def both() -> tuple[ModuleType, ModuleType]:
    """Both implementations' modules, the compiled one first."""
    return implementation("cython"), implementation("python")


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One Spark for all tests: its start costs seconds.

    It has Delta's connector if any of the tests needs that.
    """
    from support.sparks.delta_connector import settings

    from pgoutput_fast.spark import session

    wanted = any(item.get_closest_marker("delta_spark") for item in request.session.items)
    connector = settings() if wanted else {}
    running = session(
        "local[2]",
        "pgoutput_fast tests",
        {
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.memory": "1g",
            # Of a JVM that lives for a minute, most of the time would go into its second compiler.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            # Tables of a few rows: to compile expressions takes longer than to interpret them.
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.log.level": "ERROR",
            **{name: value for name, value in connector.items() if name},
        },
    )
    yield running
    running.stop()


@pytest.fixture
def delta_spark(spark: Any) -> Any:
    """That Spark, with Delta's connector; tests that ask for it are marked ``delta_spark``."""
    from support.sparks.delta_connector import is_required, settings

    if reason := settings().get(""):
        if is_required():
            pytest.fail(reason)
        pytest.skip(reason)
    return spark
