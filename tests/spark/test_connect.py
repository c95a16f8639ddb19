"""What a client of Spark Connect reads, from a server in the Java process of all tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.sparks.spark_frames import INT4, TEXT, insert, land, relation, rows, transaction

from pgoutput_fast.spark import read_segments

pytestmark = [pytest.mark.spark, pytest.mark.slow]

# What a client needs beside PySpark, which brings it as its extra `connect`.
for name in ("grpc", "grpc_status", "zstandard"):
    pytest.importorskip(name)

# A process has either clients or sessions of its own.
CLIENT = """
import json, sys
from pyspark.sql import SparkSession
from pgoutput_fast.spark import read_segments
client = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
found = read_segments(client, sys.argv[2], "public.t").orderBy("commit_lsn", "seq")
print(json.dumps([found.select("op", "lsn").collect(), found.schema.json()]))
"""


@pytest.fixture
def connect_url(spark):
    context, jvm = spark._jsc.sc(), spark._jvm
    context.conf().set("spark.connect.grpc.binding.address", "127.0.0.1")
    context.conf().set("spark.connect.grpc.binding.port", "0")
    # As PySpark's own client looks for the port.
    service = getattr(
        getattr(jvm, "org.apache.spark.sql.connect.service.SparkConnectService$"), "MODULE$"
    )
    service.start(context)
    yield f"sc://127.0.0.1:{service.localPort()}"
    nothing = jvm.scala.Option.empty()
    service.stop(nothing, nothing)


def test_a_client_reads_segments_as_a_session_does(spark, connect_url, tmp_path):
    columns = {"id": INT4, "a": TEXT}
    frames = [
        relation(1, "t", columns),
        *transaction(100, 7, insert(1, "1", "one"), insert(1, "2", None)),
        *transaction(200, 8, insert(1, "3", "three")),
    ]
    directory = land(tmp_path / "s", frames, segment_bytes=1)
    process = subprocess.run(
        [sys.executable, "-c", CLIENT, connect_url, str(directory)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    found, schema = json.loads(process.stdout.splitlines()[-1])
    expected = read_segments(spark, directory, "public.t")
    assert found == [[row[0], row[3]] for row in rows(expected)]
    assert len(found) == 3
    assert schema == expected.schema.json()
