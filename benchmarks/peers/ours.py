"""pgoutput_fast's own drains: frames to columns, whole transactions, a capture to segments.

`stream` is what a user of frames writes, `loop` the same on libpq's bare functions.

Run by drain.py, as python_peers.py is, whose environment and answer it shares.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import pq

import pgoutput_fast
from pgoutput_fast import ColumnarDecoder
from pgoutput_fast.replication import capture, connect
from pgoutput_fast.segments import SegmentReader, list_segments

sys.path.insert(0, str(Path(__file__).parent))

import python_peers as peer

_TOGETHER = 4096
STOP_LSN = pgoutput_fast.parse_lsn(peer.ENV["DRAIN_STOP_LSN"])
VERSION = f"{pgoutput_fast.__version__}, psycopg {psycopg.__version__}"


def stream() -> Iterator[list[bytes]]:
    """What ReplicationStream receives, some thousand frames together or what came till a pause."""
    frames: list[bytes] = []
    with connect(peer.DSN, slot=peer.SLOT, publications=[peer.PUBLICATION], protocol=1) as received:
        peer.begin()  # its waiting for the first message counts too
        while (batch := received.receive(0.05)) is not None:
            if batch.frames:
                frames += [frame for _, _, _, frame in batch.frames]
            if len(frames) > _TOGETHER or (frames and not batch.frames):
                yield frames
                frames = []


def loop() -> Iterator[list[bytes]]:
    """The least that libpq needs, in the same thread; it does not answer the server."""
    connection = pq.PGconn.connect(f"{peer.DSN} replication=database".encode())
    result = connection.exec_(peer.START.encode())
    assert result.status == pq.ExecStatus.COPY_BOTH, result.error_message
    low_water = socket.socket(fileno=os.dup(connection.socket))
    low_water.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 65536)
    poll = select.poll()
    poll.register(low_water, select.POLLIN)
    get = connection.get_copy_data
    frames: list[bytes] = []
    waits = 0
    while True:
        length, data = get(1)
        if length > 0:
            message = data.tobytes()
            if message[0] == 0x77:
                frames.append(message[25:])
                peer.begin()
            continue
        if length < 0:
            return
        if len(frames) > _TOGETHER or (frames and waits > 3):
            yield frames
            frames = []
        waits = 0 if poll.poll(5) else waits + 1
        connection.consume_input()


def transactions() -> None:
    """Whole transactions, one by one or in groups, their changes as typed columns.

    pyarrow's import of a batch takes far longer than its decoding, if it has few rows. So `counted`
    asks for the batches, and only counts their rows.
    """
    how, _, protocol = peer.MODE.partition(" ")
    changes = total = 0
    with connect(
        peer.DSN, slot=peer.SLOT, publications=[peer.PUBLICATION],
        protocol=int(protocol) if protocol else "auto",
    ) as stream:  # fmt: skip
        peer.begin()
        iterate = stream.groups if how == "groups" else stream.transactions
        for transaction in iterate(stop_at=STOP_LSN):
            for batch in transaction.batches():
                if how == "counted":
                    changes += len(batch)
                    continue
                columns = pa.record_batch(batch)
                changes += len(columns)
                total += sum_of_keys(columns)
            stream.acknowledge(transaction)
        peer.done(VERSION, changes, check=total)


def captured() -> None:
    """A capture to durable segments, on the disk that the checkout is on."""
    _, _, compression = peer.MODE.partition("/")
    directory = tempfile.mkdtemp(dir=Path(__file__).parent)
    peer.begin()
    capture(
        peer.DSN, slot=peer.SLOT, publications=[peer.PUBLICATION], directory=directory,
        adopt_slot=True, until_lsn=STOP_LSN, compression=compression or None,
    )  # fmt: skip
    spent = peer.cpu() - peer._started[1]
    wall = time.perf_counter() - peer._started[0]
    memory = peer.resident()
    changes = size = 0
    for segment in list_segments(directory):
        with SegmentReader(segment.path) as reader:
            for batch in reader:
                changes += len(batch) - batch["seq"].null_count
                size += pc.sum(pc.binary_length(batch["data"])).as_py() or 0
    shutil.rmtree(directory)  # now, as done() ends the process
    peer.done(VERSION, changes, check=0, spent=spent, wall=wall, memory=memory)


def sum_of_keys(columns: pa.RecordBatch) -> int:
    """Somebody looks at a column of each row: the key of what it is now, or was."""
    keys = pc.struct_field(columns.column("after"), 0)
    if keys.null_count:
        keys = pc.coalesce(keys, pc.struct_field(columns.column("before"), 0))
    total: int = pc.sum(keys).as_py()
    return total


def main() -> None:
    # What is imported when it is needed is start-up too.
    import pyarrow.ipc  # noqa: F401

    import pgoutput_fast.replication.delivery  # noqa: F401

    pa.array([])  # pyarrow imports pandas at the first of these

    # The threads of NumPy's linear algebra, which nobody uses here, spin for a while after they are
    # made, and would be counted.
    time.sleep(0.5)
    if peer.MODE.startswith(("transactions", "groups", "counted")):
        transactions()
    if peer.MODE.startswith("capture"):
        captured()
    decoder = ColumnarDecoder()
    list(decoder.decode([]))  # imports what it needs: that is start-up
    changes = total = 0
    for frames in {"stream": stream, "loop": loop}[peer.MODE]():
        for batch in decoder.decode(frames):
            columns = pa.record_batch(batch)
            changes += len(columns)
            total += sum_of_keys(columns)
        ends = decoder.events.array["end_lsn"]
        if len(ends) and ends.max() >= peer.END_LSN:
            peer.done(VERSION, changes, check=total)


if __name__ == "__main__":
    main()
