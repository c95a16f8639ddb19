"""Records of `mode=envelope` in a Kafka broker, by Spark's sink: coming-from-debezium.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import paths
from support.commands.builds import clean_environment
from support.sparks.kafka_broker import CONNECTOR, broker
from support.sparks.maven_jars import LackingError, is_required, with_dependencies
from support.sparks.spark_frames import INT4, TEXT, insert, land, relation, transaction, update

from pgoutput_fast import testing

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.slow, pytest.mark.kafka]

PAGE = paths.ROOT / "docs" / "how-to" / "coming-from-debezium.md"
PROGRAM = """
import json, sys
from pgoutput_fast.spark import PgOutputDataSource, session

spark = session("local[1]", configuration={{"spark.jars": sys.argv[1]}})
spark.dataSource.register(PgOutputDataSource)
{sink}
query.awaitTermination()
read = spark.read.format("kafka").option("kafka.bootstrap.servers", sys.argv[2])
found = read.option("subscribe", "shop.public.accounts").load()
texts = found.selectExpr("offset", "cast(key AS string) AS key", "cast(value AS string) AS value")
for row in texts.orderBy("offset").collect():
    print(json.dumps([row.key, row.value]))
"""


def test_records_in_kafka(tmp_path: Path) -> None:
    try:
        jars = with_dependencies(CONNECTOR, target="test-kafka")
        with broker(tmp_path) as address:
            found = in_kafka(tmp_path, ",".join(map(str, jars)), address)
    except LackingError as error:
        if is_required():
            raise
        pytest.skip(str(error))
    told = [
        (json.loads(key)["id"], value and operator(json.loads(value)))
        for key, value in found
    ]  # fmt: skip
    first, second = {"id": 1, "note": 'a "b"'}, {"id": 2, "note": "c"}
    assert told == [
        (1, ("c", None, first)),
        (2, ("c", None, second)),
        (2, ("u", None, {"id": 2, "note": "d"})),
        (1, ("d", {"id": 1, "note": None}, None)),
        (1, None),  # the tombstone
    ]


def operator(value: dict[str, object]) -> tuple[object, object, object]:
    """What a record has of the change."""
    return value["op"], value["before"], value["after"]


def in_kafka(root: Path, jars: str, address: str) -> list[tuple[str, str | None]]:
    """Keys and values, in the order of the topic."""
    land(root / "accounts.segments", [
        relation(1, "accounts", {"id": INT4, "note": TEXT}),
        *transaction(100, 7, insert(1, "1", 'a "b"'), insert(1, "2", "c")),
        *transaction(200, 8, update(1, ["2", "d"]), testing.delete(1, ["1", None], "K")),
    ])  # fmt: skip
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    for text, ours in (
        ('"localhost:9092"', repr(address)),
        ("    .load()", '    .option("tombstones", "true").load()'),
        ("    .start()", "    .trigger(availableNow=True).start()"),
    ):
        assert block.count(text) == 1
        block = block.replace(text, ours)
    program = PROGRAM.format(sink=block)
    ran = subprocess.run(
        [sys.executable, "-c", program, jars, address], cwd=root, env=clean_environment(),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]
