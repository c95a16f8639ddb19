"""The process that keeps one embedded PostgreSQL server: starts it, waits, and cleans up after it.

`pgoutput_fast.embedded` runs it as a script that imports only the standard library
(``python -I -S``). The process that does so is the owner of the server. The keeper's standard input
is a pipe from the owner. One line of JSON in it says what to run. The end of the pipe says that the
owner wants the server stopped, or has ended: the pipes of a killed process are closed too. So
neither the server nor its directory outlives the owner.

The keeper is a process of its own because a thread would die with a killed owner. A death signal
set in the server by the owner would not do either: Linux sends it when the *thread* that forked the
server ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
# Forked children of the owner hold the write end of the pipe open too, so the keeper also checks
# at this interval whether the owner is still its parent. Seconds.
_PARENT_POLL = 0.5
# PostgreSQL itself kills its children 5 seconds after an immediate shutdown. Seconds.
_STOP_TIMEOUT = 15.0


def _die_with_keeper() -> None:
    """In the forked child: have Linux stop the server when this keeper is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _run(command: list[str], options: dict[str, Any], owner: int, wakeup: int) -> int | None:
    """Run a command. Returns its exit code, or None if it was stopped because of the owner."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_keeper,  # noqa: PLW1509 - this process has one thread
        **options,
    )
    try:
        while child.poll() is None:
            readable, _, _ = select.select([sys.stdin, wakeup], [], [], _PARENT_POLL)
            if wakeup in readable:
                os.read(wakeup, 512)
            if sys.stdin in readable or os.getppid() != owner:
                return None
        return child.returncode
    finally:
        if child.poll() is None:
            # Immediate shutdown without a checkpoint, as the data are thrown away.
            child.send_signal(signal.SIGQUIT)
            try:
                child.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def main() -> int:
    """Run the commands one after the other, then remove the directory."""
    owner = os.getppid()
    # Signals of a terminal or a service manager are handled by the owner, who closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    # Read without a buffer, as select() would not see what a buffer has already read.
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    job = json.loads(line)
    code: int | None = 0
    try:
        for command in job["commands"]:
            code = _run(command, job["options"], owner, wakeup)
            if code != 0:
                break
    finally:
        shutil.rmtree(job["directory"], ignore_errors=True)
    return 0 if code is None else code or 0


if __name__ == "__main__":
    sys.exit(main())
