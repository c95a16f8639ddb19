"""Live: every peer drains the same slot's copy from a real server, one after the other.

A peer is a program that reads the slot DRAIN_SLOT until the commit behind DRAIN_END_LSN and prints
one line of JSON (see python_peers.py). What it needs is built by build.sh; who can't run is listed
with the reason. Peers that are too slow for all changes take a limited number of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pgoutput_fast.embedded import EmbeddedServer

from ..decoders import WrongResult
from ..harness import Case, NotMeasured, Results, measure
from .site import Site, Traffic, serving

HERE = Path(__file__).parent
_TIMEOUT = 300.0  # seconds
Transport = Literal["unix", "TCP", "TLS"]


def built() -> Path:
    """Where build.sh puts what it builds: PEERS_BUILD, or build/peers of the checkout."""
    return Path(os.environ.get("PEERS_BUILD") or HERE.parents[1] / "build" / "peers").absolute()


@dataclasses.dataclass(frozen=True)
class Peer:
    """How a peer is run, and what it makes of a change."""

    command: tuple[str, ...]
    mode: str
    does: str
    lacks: str
    """What it does not do, or not as the server means it."""
    checks: str = ""
    """What it adds up: `bytes` of frames, or `keys`, the first column of each changed row."""
    limit: int = 0
    needs: tuple[str, ...] = ()
    """Modules that this Python must have."""


def peers() -> dict[str, Peer]:
    """All peers; of some it is tried in vain to run them."""
    build = built()
    here = sys.executable
    python = (str(build / "py/bin/python"), str(HERE / "python_peers.py"))
    python312 = (str(build / "py312/bin/python"), str(HERE / "python_peers.py"))
    this = (here, str(HERE / "python_peers.py"))
    ours = (here, str(HERE / "ours.py"))
    go, rust = (str(build / "pglogrepl_peer"),), (str(build / "pg_walstream_peer"),)
    java = (
        "java", "-Xmx2g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
        "-cp", f"{build}/java/peer.jar:{build}/java/lib/*", "peers.Drain",
    )  # fmt: skip
    typed, receives = "all columns typed, Arrow batches", "receives only"
    whole, parses = "ask for transactions before they end", "parse anything but Commit"
    return {
        "pgoutput_fast": Peer(ours, "stream", typed, whole, "keys"),
        "pgoutput_fast, bare loop": Peer(ours, "loop", typed, "answer keepalives", "keys"),
        "pgoutput_fast, transactions": Peer(
            ours, "transactions", "whole transactions, all columns typed, each acknowledged",
            "", "keys",
        ),
        "pgoutput_fast, transactions, protocol 1": Peer(
            ours, "transactions 1", "the same", whole, "keys"
        ),
        "pgoutput_fast, transactions, counted": Peer(
            ours, "counted", "the same, batches not read by pyarrow", ""
        ),
        "pgoutput_fast, groups": Peer(
            ours, "groups", "the same, those together that came together", "", "keys"
        ),
        "pgoutput_fast, groups, protocol 1": Peer(ours, "groups 1", "the same", whole, "keys"),
        "pgoutput_fast, capture": Peer(ours, "capture", "durable segments", "type values"),
        "pgoutput_fast, capture, lz4": Peer(
            ours, "capture/lz4", "durable segments, compressed", "type values"
        ),
        "psycopg 3, SO_RCVLOWAT": Peer(this, "psycopg3_low_water", receives, parses, "bytes"),
        "psycopg 3, receive": Peer(this, "psycopg3", receives, parses, "bytes"),
        "pg_recvlogical": Peer(this, "pg_recvlogical", receives, "parse anything"),
        "psycopg2, receive": Peer(python, "psycopg2_receive", receives, parses, "bytes"),
        "pg_walstream, raw": Peer(rust, "raw", receives, parses, "bytes"),
        "pg_walstream": Peer(
            rust, "typed", "int, float and bool typed into structs, else String",
            "type numeric, timestamps, uuid, json; show unchanged TOAST, which is left out of the "
            "row; make the structs, which are written by hand", "keys",
        ),
        "pglogrepl": Peer(go, "parse", "messages, columns as bytes", "type values"),
        "pglogrepl, typed": Peer(
            go, "typed", "all columns typed into a map",
            "show unchanged TOAST, or which row is the old one: left to the caller", "keys",
        ),
        "Debezium, SourceRecord": Peer(
            java, "connect", "all columns typed, SourceRecord",
            "show unchanged TOAST but by a text in the value's place; write to Kafka, or store "
            "its offsets, here", "keys",
        ),
        "Debezium, JSON": Peer(
            java, "json", "all columns typed, JSON text", "the same, and no schema in the JSON"
        ),
        "pypgoutput, decoders": Peer(
            python, "pypgoutput_decoders", "messages, columns as str",
            "type values; read Type, Origin and logical messages", "keys",
        ),
        "pypgoutput, reader": Peer(
            python, "pypgoutput_reader", "pydantic rows, few types",
            "tell unchanged TOAST from NULL; keep numeric exact (float); take all changes here",
            limit=10_000,
        ),
        "pgoutput-decoder": Peer(
            python312, "pgoutput_decoder", "dicts, as Debezium's",
            "tell unchanged TOAST from NULL; keep numeric exact (float); type timestamps; take all "
            "changes here", limit=30_000,
        ),
    }  # fmt: skip


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure the peers on both workloads, and what reads a table in binary."""
    scale = options.scale or (0.1 if options.quick else 1.0)
    chosen = peers()
    if options.quick:
        chosen = {name: chosen[name] for name in list(chosen)[:6]}
    if options.peer:
        chosen = {name: peer for name, peer in chosen.items() if name in options.peer}
    with serving(scale, ("narrow", "mixed")) as site:
        results.described["server"] = f"PostgreSQL {site.version}, TCP on the loopback"
        for traffic in site.traffic.values():
            key = f"live/{traffic.name}"
            results.described[key] = (
                f"{traffic.changes:,} changes, {traffic.bytes / 1e6:,.1f} MB of pgoutput"
            )
            cases = []
            for name, peer in chosen.items():
                results.versions[f"{name}, does"] = peer.does
                sample = functools.partial(drained, site, traffic, f"{key}/{name}", peer, results)
                cases.append(Case(f"{key}/{name}", sample))
            if cases:
                # The first run of a server's workload is slow whoever it is.
                cases[0].warm_up = cases[0].sample
            measure(cases, options.rounds or (1 if options.quick else 3), results)
            compare(traffic, chosen, results, key)


def compare(traffic: Traffic, chosen: Mapping[str, Peer], results: Results, key: str) -> None:
    """Hold what peers made of the same changes against each other, and their bytes against SQL's.

    Their results are those of the cases ``key/name``.

    Raises
    ------
    WrongResult
    """
    for kind in ("bytes", "keys"):
        sums = {
            name: sorted(results.checks.get(f"{key}/{name}", ()))
            for name, peer in chosen.items()
            if peer.checks == kind
        }
        expected = {traffic.bytes} if kind == "bytes" else set()
        if len(expected.union(*sums.values())) > 1:
            raise WrongResult(f"{key}: sums of {kind}: {sums}, of SQL: {expected}")


def drained(
    site: Site,
    traffic: Traffic,
    name: str,
    peer: Peer,
    results: Results,
    transport: Transport = "TCP",
) -> Mapping[str, float]:
    """One run of a peer; seconds per change.

    Raises
    ------
    NotMeasured
        It is not there, fails, or saw another number of changes.
    """
    if shutil.which(peer.command[0]) is None:
        raise NotMeasured(f"{Path(peer.command[0]).name} is not built: see benchmarks/README.md")
    missing = [module for module in peer.needs if importlib.util.find_spec(module) is None]
    if missing:
        raise NotMeasured(f"no module {missing[0]}")
    server_before = site.cpu()
    with site.slot_of(traffic) as slot:
        environment = {
            **environment_of(site.server, "bench"),
            "DRAIN_MODE": peer.mode,
            "PGSSLMODE": "require" if transport == "TLS" else "disable",
            "DRAIN_SLOT": slot,
            "DRAIN_PUBLICATION": traffic.name,
            "DRAIN_END_LSN": str(traffic.end_lsn),
            "DRAIN_STOP_LSN": traffic.stop_lsn,
            "DRAIN_CHANGES": str(traffic.changes),
            "DRAIN_LIMIT": str(peer.limit),
            "DRAIN_PG_RECVLOGICAL": str(recvlogical(site)),
        }
        if transport == "unix":
            environment["DRAIN_HOST"] = str(site.server.directory)
        if peer.command[0] != sys.executable:
            del environment["PYTHONPATH"]
        answer, used = answer_of(peer, environment)
    changes = answer["changes"]
    if not peer.limit and changes != traffic.changes:
        raise NotMeasured(f"it saw {changes:,} changes of {traffic.changes:,}")
    if answer["version"]:
        results.versions[name.rpartition("/")[2]] = answer["version"]
    results.checks.setdefault(name, set()).add(int(answer["check"]))
    sample = {
        "cpu": answer["cpu"] / changes,
        "wall": answer["wall"] / changes,
        "process": used / changes,
        "memory": answer["memory"],
    }
    if not peer.limit:
        sample["server"] = (site.cpu() - server_before) / changes
    return sample


def environment_of(server: EmbeddedServer, database: str) -> dict[str, str]:
    """The environment in which a peer connects to a database by TCP."""
    parameters = dict(part.partition("=")[::2] for part in server.dsn(database, tcp=True).split())
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)]),
        "PGPASSWORD": parameters["password"].strip("'"),
        "PGSSLMODE": "disable",
        "DRAIN_HOST": "127.0.0.1",
        "DRAIN_PORT": str(server.port),
        "DRAIN_USER": "postgres",
        "DRAIN_DATABASE": database,
    }


def recvlogical(site: Site) -> Path | str:
    """The server's own client, of the same version where it is there."""
    for directory in (site.bindir, Path(f"/usr/lib/postgresql/{site.version.split('.')[0]}/bin")):
        if (directory / "pg_recvlogical").exists():
            return directory / "pg_recvlogical"
    return shutil.which("pg_recvlogical") or "pg_recvlogical"


def answer_of(peer: Peer, environment: Mapping[str, str]) -> tuple[dict[str, Any], float]:
    """What a peer prints, and the CPU seconds of it and its helpers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        peer.command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(_TIMEOUT, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        printed, complaint = process.communicate()
    finally:
        timer.cancel()
        try:
            os.killpg(process.pid, signal.SIGKILL)  # a helper that it left
        except ProcessLookupError:
            pass
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        said = " ".join(complaint.split())[-300:]
        raise NotMeasured(f"it ended with {process.returncode}: {said}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(lines[-1]), used
