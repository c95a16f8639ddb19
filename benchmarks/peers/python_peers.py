"""What can be written in Python with others' packages: one peer, named by DRAIN_MODE.

Reads a slot until the commit behind DRAIN_END_LSN, and prints one line of JSON: how many changes,
the seconds by the clock and of CPU from the first message on, the greatest resident size. Needs
nothing but the peer's own package, as the peers have environments of their own. It ends without
good-bye: the slot is a throw-away copy.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import time
from importlib.metadata import version

ENV = os.environ
MODE = ENV["DRAIN_MODE"]
SLOT, PUBLICATION = ENV["DRAIN_SLOT"], ENV["DRAIN_PUBLICATION"]
END_LSN = int(ENV["DRAIN_END_LSN"])
LIMIT = int(ENV.get("DRAIN_LIMIT", "0"))  # changes, of peers that are too slow for all; 0: none
HOST, PORT, USER = ENV["DRAIN_HOST"], ENV["DRAIN_PORT"], ENV["DRAIN_USER"]
DATABASE, PASSWORD = ENV["DRAIN_DATABASE"], ENV["PGPASSWORD"]
DSN = f"host={HOST} port={PORT} user={USER} dbname={DATABASE}"
OPTIONS = {"proto_version": "1", "publication_names": PUBLICATION}
START = (
    f"START_REPLICATION SLOT {SLOT} LOGICAL 0/0 "
    f"(proto_version '1', publication_names '{PUBLICATION}')"
)
ROWS = frozenset(b"IUD")

_started = None


def cpu(who=resource.RUSAGE_SELF):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def begin():
    """The first message is there: from here on it counts."""
    global _started
    if _started is None:
        _started = time.perf_counter(), cpu()


def resident(pid="self"):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def done(version, changes, *, check=0, wall=None, spent=None, memory=None):
    wall_start, cpu_start = _started or (0.0, 0.0)
    answer = {
        "version": version,
        "changes": changes,
        "wall": time.perf_counter() - wall_start if wall is None else wall,
        "cpu": cpu() - cpu_start if spent is None else spent,
        "memory": resident() if memory is None else memory,
        "check": check,
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)


def is_last(frame, changes):
    """Whether a Commit is the last one."""
    return struct.unpack_from(">Q", frame, 10)[0] >= END_LSN or (LIMIT and changes >= LIMIT)


# Receive only.


def pg_recvlogical():
    program = ENV["DRAIN_PG_RECVLOGICAL"]
    start, memory = time.perf_counter(), 0
    process = subprocess.Popen(
        [program, "-d", DSN, "-S", SLOT, "--start", "--no-loop", "-f", "/dev/null"]
        + ["--endpos", ENV["DRAIN_STOP_LSN"], "-o", "proto_version=1"]
        + ["-o", f"publication_names={PUBLICATION}"],
        stderr=subprocess.PIPE,
    )
    while process.poll() is None:
        try:
            memory = max(memory, resident(process.pid))
        except (OSError, StopIteration):
            pass
        time.sleep(0.01)
    wall = time.perf_counter() - start
    if process.returncode:
        sys.exit(process.stderr.read().decode())
    spent = cpu(resource.RUSAGE_CHILDREN)
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    # It does not count changes.
    done(told.split()[2], int(ENV["DRAIN_CHANGES"]), wall=wall, spent=spent, memory=memory)


def psycopg3(low_water=0):
    import psycopg
    from psycopg import pq

    connection = pq.PGconn.connect((DSN + " replication=database").encode())
    result = connection.exec_(START.encode())
    if result.status != pq.ExecStatus.COPY_BOTH:
        sys.exit(result.error_message.decode())
    get, changes, size = connection.get_copy_data, 0, 0
    wait = None
    if low_water:
        wait = sparing(connection, low_water)
    while True:
        length, data = get(1 if low_water else 0)
        begin()
        if length == 0:
            wait()
            continue
        if length < 0:
            sys.exit("the stream has ended")
        if data[0] != 0x77:
            continue
        size += length - 25
        tag = data[25]
        if tag in ROWS:
            changes += 1
        elif tag == 0x43 and is_last(bytes(data[25:]), changes):
            done(f"psycopg {psycopg.__version__} ({pq.__impl__})", changes, check=size)


def sparing(connection, low_water):
    """Be woken for many bytes, or after 5 ms.

    On a unix socket, where poll() knows no such mark, sleep for a moment instead.
    """
    import select
    import socket

    duplicate = socket.socket(fileno=os.dup(connection.socket))
    if duplicate.family == socket.AF_UNIX:

        def nap():
            time.sleep(0.0002)
            connection.consume_input()

        return nap
    duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
    poll = select.poll()
    poll.register(duplicate, select.POLLIN)

    def wait():
        poll.poll(5)
        connection.consume_input()
        return duplicate  # not closed as long as it is polled

    return wait


def psycopg3_low_water():
    psycopg3(65536)


class Last(Exception):
    """Ends psycopg2's loop."""


def consume(take):
    """psycopg2's loop; its version."""
    import psycopg2
    import psycopg2.extras

    connection = psycopg2.connect(
        DSN, connection_factory=psycopg2.extras.LogicalReplicationConnection
    )
    cursor = connection.cursor()
    cursor.start_replication(slot_name=SLOT, decode=False, options=OPTIONS)
    try:
        cursor.consume_stream(take)
    except Last:
        pass
    return "psycopg2 " + psycopg2.__version__.split()[0]


def psycopg2_receive():
    changes = size = 0

    def take(message):
        nonlocal changes, size
        begin()
        frame = message.payload
        size += len(frame)
        if frame[0] in ROWS:
            changes += 1
        elif frame[0] == 0x43 and is_last(frame, changes):
            raise Last

    told = consume(take)
    done(told, changes, check=size)


# Decode.


def pypgoutput_decoders():
    from pypgoutput import decoders

    classes = {
        ord(name[0]): getattr(decoders, name)
        for name in ("Begin", "Commit", "Delete", "Insert", "Relation", "Update")
    }
    changes = total = 0

    def take(message):
        nonlocal changes, total
        begin()
        frame = message.payload
        tag = frame[0]
        decoded = classes[tag](frame)
        if tag in ROWS:
            changes += 1
            row = decoded.old_tuple if tag == 0x44 else decoded.new_tuple
            total += int(row.column_data[0].col_data)
        elif tag == 0x43 and is_last(frame, changes):
            raise Last

    told = consume(take)
    done(f"{version('pypgoutput')}, {told}", changes, check=total)


def pypgoutput_reader():
    import pypgoutput

    reader = pypgoutput.LogicalReplicationReader(
        publication_name=PUBLICATION, slot_name=SLOT, host=HOST, port=PORT, user=USER,
        password=PASSWORD, database=DATABASE,
    )  # fmt: skip
    child = reader.extractor.pid  # a second process receives

    def child_cpu():
        with open(f"/proc/{child}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    changes = total = 0
    before = 0.0
    for event in reader:
        if not changes:
            begin()
            before = child_cpu()
        changes += 1
        row = event.after or event.before
        total += int(next(iter(row.values())))
        if event.table_schema.table.startswith("finish") or (LIMIT and changes >= LIMIT):
            break
    spent = cpu() - _started[1] + child_cpu() - before
    memory = resident() + resident(child)
    reader.extractor.terminate()
    told = f"{version('pypgoutput')}, pydantic {version('pydantic')}"
    done(told, changes, check=total, spent=spent, memory=memory)


def pgoutput_decoder():
    import asyncio

    import pgoutput_decoder as package

    async def read():
        reader = package.LogicalReplicationReader(
            publication_name=PUBLICATION, slot_name=SLOT, host=HOST, port=int(PORT), user=USER,
            password=PASSWORD, database=DATABASE,
        )  # fmt: skip
        changes = total = 0
        async for message in reader:
            begin()
            changes += 1
            row = message.after or message.before
            total += int(next(iter(row.values())))
            if message.source["table"].startswith("finish") or (LIMIT and changes >= LIMIT):
                done(version("pgoutput-decoder"), changes, check=total)

    asyncio.run(read())


if __name__ == "__main__":
    globals()[MODE]()
