"""Live: what receives only, and what does more, over each transport and size of transactions.

All is measured as in drain.py: peers drain copies of a slot. Only the bare loop and ours take part,
as what counts here is how many times as much CPU ours take as that loop does on the same socket.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..harness import Case, NotMeasured, Results, measure
from .drain import Peer, Transport, compare, drained, peers
from .site import Site, serving

BARE = "psycopg 3, SO_RCVLOWAT"
OURS = {
    "transactions": "pgoutput_fast, transactions",
    "groups": "pgoutput_fast, groups",
    "groups, protocol 1": "pgoutput_fast, groups, protocol 1",
    "capture": "pgoutput_fast, capture",
}


class Way(NamedTuple):
    """How changes come."""

    traffic: str
    """The workload, as site.py has it."""
    transport: Transport = "TCP"
    busy: bool = False
    """Whether a process spins on each core beside it."""


WAYS = {
    "narrow, unix socket": Way("narrow", "unix"),
    "narrow, TCP": Way("narrow"),
    "narrow, TLS": Way("narrow", "TLS"),
    "mixed, unix socket": Way("mixed", "unix"),
    "mixed, TCP": Way("mixed"),
    "mixed, TLS": Way("mixed", "TLS"),
    "tiny, TCP": Way("tiny"),
    "big, TCP": Way("big"),
    "huge, TCP": Way("huge"),
    "narrow, busy machine": Way("narrow", busy=True),
    "mixed, busy machine": Way("mixed", busy=True),
}


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure each consumer on each way; those of one workload together."""
    scale = options.scale or (0.1 if options.quick else 1.0)
    known = peers()
    chosen = {who: known[name] for who, name in {"receive only": BARE, **OURS}.items()}
    ways = {name: way for name, way in WAYS.items() if not options.way or name in options.way}
    for traffic in dict.fromkeys(way.traffic for way in ways.values()):
        with serving(scale, [traffic]) as site:
            results.described[f"ways: {traffic}"] = f"{site.traffic[traffic].changes:,} changes"
            here = {name: way for name, way in ways.items() if way.traffic == traffic}
            _measure(site, here, chosen, options, results)


def _measure(
    site: Site,
    ways: Mapping[str, Way],
    chosen: Mapping[str, Peer],
    options: argparse.Namespace,
    results: Results,
) -> None:
    cases = []
    for name, way in ways.items():
        if way.transport == "TLS":
            try:
                site.turn_on_tls()
            except NotMeasured as reason:
                results.missing[f"way: {name}"] = str(reason)
                continue
        for who, peer in chosen.items():
            key = f"way: {name}/{who}"
            sample = functools.partial(_sample, site, way, key, peer, results)
            cases.append(Case(key, sample))
    if cases:
        cases[0].warm_up = cases[0].sample
    measure(cases, options.rounds or (1 if options.quick else 3), results)
    for name, way in ways.items():
        compare(site.traffic[way.traffic], chosen, results, f"way: {name}")


def _sample(site: Site, way: Way, key: str, peer: Peer, results: Results) -> Mapping[str, float]:
    with _spinning() if way.busy else contextlib.nullcontext():
        return drained(site, site.traffic[way.traffic], key, peer, results, way.transport)


@contextlib.contextmanager
def _spinning() -> Iterator[None]:
    """Other work for each core."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
