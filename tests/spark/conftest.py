from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def spark():
    """One Spark for all tests: its start costs seconds."""
    from pgoutput_fast.spark import session

    running = session(
        "local[2]",
        "pgoutput_fast tests",
        {
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.memory": "1g",
            "spark.log.level": "ERROR",
        },
    )
    yield running
    running.stop()
