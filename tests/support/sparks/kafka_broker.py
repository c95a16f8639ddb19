"""A Kafka broker of one process, which Maven fetches: see `maven_jars`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.sparks.maven_jars import with_dependencies
from support.waiting import wait_until

from pgoutput_fast.spark._java import java_home

__all__ = ["CONNECTOR", "broker"]

BROKER = "org.apache.kafka:kafka_2.13:3.9.1"
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
_SETTINGS = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={directory}/logs
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
num.partitions=1
"""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _takes_connections(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def broker(directory: Path) -> Iterator[str]:
    """The address of a new broker, which is stopped at the end.

    Raises
    ------
    LackingError
        Its jars are not here.
    """
    jars = os.pathsep.join(map(str, with_dependencies(BROKER, target="test-kafka")))
    port, controller = _free_ports(2)
    settings = directory / "server.properties"
    settings.write_text(_SETTINGS.format(port=port, controller=controller, directory=directory))
    java = [str(Path(java_home(), "bin", "java")), "-Xmx512m", "-cp", jars]
    making = ["kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", settings]
    subprocess.run([*java, *making], check=True, capture_output=True)
    with (directory / "broker.log").open("wb") as log:
        running = subprocess.Popen([*java, "kafka.Kafka", settings], stdout=log, stderr=log)
    try:
        read_log = (directory / "broker.log").read_text
        wait_until(lambda: _takes_connections(port), 60, process=running, log=read_log)
        yield f"127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()
