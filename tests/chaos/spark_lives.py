"""The lives of a sync with Spark, and the faults in each: planned by a seed, each kind for sure."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from chaos import wait_for
from sync_processes import LOOK, Life, SparkSyncer

if TYPE_CHECKING:
    from sync import Writer

ENDS = {
    "driver": 12,
    "driver between change tables": 6,
    "driver between state tables": 5,
}
"""Kills of the driver, each with its share of 100 faults. The next start takes the longest."""
OTHERS = {
    "worker": 15,
    "worker between state tables": 17,
    "executor": 7,
    "executor between state tables": 6,
    "capture": 21,
    "server": 11,
}
"""Faults over which the driver lives, likewise. An executor takes long to be replaced."""
KINDS = {**ENDS, **OTHERS}
LOCAL, CLUSTER = "local[2,4]", "local-cluster[2,1,1024]"
BETWEEN = {
    "driver between change tables": "changes",
    "driver between state tables": "state",
    "worker between state tables": "worker",
    "executor between state tables": "executor",
}


def planned(chance: random.Random, faults: int) -> list[Life]:
    """Lives in which each kind of fault comes once at least, and no kind that can't come there."""
    if faults < len(KINDS):
        raise SystemExit(
            f"--kills={faults}: give {len(KINDS)} at least, as many as there are kinds"
        )
    kinds = [*KINDS, *chance.choices([*KINDS], [*KINDS.values()], k=faults - len(KINDS))]
    ends = [kind for kind in kinds if kind in ENDS]
    chance.shuffle(ends)
    lives = [_life(chance, end) for end in ends]
    # In the first one a capture begins, which knows the sync as its reader.
    lives[0] = lives[0]._replace(is_following=False)
    # One in which each of the other faults can come.
    at = chance.choice([n for n, end in enumerate(ends) if n and not _is_of_state(end)])
    lives[at] = Life(CLUSTER, 0, True, [])
    for kind in kinds:
        if kind in OTHERS:
            fitting = [one for one in lives if _fits(kind, one)]
            chance.choice(fitting).faults.append(kind)
    for life, end in zip(lives, ends, strict=True):
        chance.shuffle(life.faults)
        life.faults.append(end)
    return lives


def _is_of_state(end: str) -> bool:
    return BETWEEN.get(end) == "state"


def _life(chance: random.Random, end: str) -> Life:
    # By default the driver writes these windows by itself, the state tables too.
    driver_bytes = None if _is_of_state(end) else chance.choice((0, 0, 0, 50_000, None))
    master = CLUSTER if driver_bytes == 0 and chance.random() < 0.2 else LOCAL
    return Life(master, driver_bytes, chance.random() < 0.5, [])


def _fits(kind: str, life: Life) -> bool:
    if kind.startswith("executor"):
        return life.has_executors
    if kind.startswith("worker"):
        return life.driver_bytes == 0
    return life.is_following if kind == "capture" else True


def last_life(chance: random.Random) -> Life:
    """The one that comes to the end."""
    return Life(LOCAL, chance.choice((0, None)), False, [])


def take_part(
    lives: list[Life], syncer: SparkSyncer, writer: Writer, look: Callable[[int], None]
) -> Counter[str]:
    """Have the sync live these lives: how many faults of each kind came."""
    came: Counter[str] = Counter()
    begin = time.monotonic()
    for life in lives:
        syncer.life = life
        syncer.start()
        if not came:
            wait_for("the first window", syncer.has_written, LOOK)
        look(came.total())
        for kind in life.faults:
            syncer.live()
            how = _have(kind, syncer, writer)
            came[kind] += 1
            print(f"{time.monotonic() - begin:6.1f} s: {kind}{how} ({syncer.life})", flush=True)
            if kind in OTHERS:
                look(came.total())
    return came


def _have(kind: str, syncer: SparkSyncer, writer: Writer) -> str:
    """Have a fault come; what is to be said of it besides."""
    if kind in BETWEEN:
        syncer.kill_between(BETWEEN[kind])
    elif kind == "driver":
        return ", its JVM first" if syncer.kill_driver() else ""
    elif kind == "worker":
        wait_for("tasks", syncer.kill_workers)
    elif kind == "executor":
        wait_for("executors", syncer.kill_executor)
    elif kind == "capture":
        syncer.kill_capture()
    else:
        writer.restart_server()
    return ""
