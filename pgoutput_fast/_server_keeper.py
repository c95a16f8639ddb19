"""The process that keeps one embedded PostgreSQL server: starts it, waits, and cleans up after it.

Run as a script by `pgoutput_fast.embedded`, with the standard library alone (``python -I -S``).
Its standard input is a pipe: one line of JSON says what to run, each further line is the number of
a signal with which the server is to be ended and then started again, and the end of file says that
the owner wants the server gone, or is gone itself, however it ended: a killed process closes its
pipes.
The server therefore can't outlive its owner, and neither can its directory.

This is a process and not a thread, nor a death signal set in the server itself: a thread dies with
a killed owner, and Linux sends the death signal when the *thread* that forked ends.
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
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
# A child that the owner forked holds the write end of the pipe too, and may outlive it. So the
# keeper also looks, after so many seconds, whether its parent is still the owner.
_PARENT_POLL = 0.5
# PostgreSQL itself kills its children 5 seconds after an immediate shutdown. Seconds.
_STOP_TIMEOUT = 15.0
# The processes of a server that was killed end by themselves, soon; until then it can't start.
_RESTART_TIMEOUT = 30.0


def _die_with_keeper() -> None:
    """Have Linux stop the server when this keeper is killed. Call this in the forked child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _start(command: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_keeper,  # noqa: PLW1509 - this process has one thread
        **options,
    )


def _end(child: subprocess.Popen[bytes], number: int) -> None:
    """End a server by a signal, by stronger ones if it does not go.

    An orderly end waits until each replication client has acknowledged everything.
    """
    for sent in (number, signal.SIGQUIT, signal.SIGKILL):
        child.send_signal(sent)
        try:
            child.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            continue
        return


def _run(command: list[str], options: dict[str, Any], owner: int, wakeup: int) -> int | None:
    """Run a command until it ends (its exit code) or the owner wants it gone (None).

    It is ended by a signal and started again if the owner wants that.
    """
    child = _start(command, options)
    retry_until = 0.0
    try:
        while True:
            if child.poll() is not None:
                if time.monotonic() > retry_until:
                    return child.returncode
                time.sleep(0.1)
                child = _start(command, options)
            readable, _, _ = select.select([0, wakeup], [], [], _PARENT_POLL)
            if wakeup in readable:
                os.read(wakeup, 512)
            asked = os.read(0, 512) if 0 in readable else None
            if asked == b"" or os.getppid() != owner:
                return None
            if asked:
                _end(child, int(asked.split()[-1]))
                retry_until = time.monotonic() + _RESTART_TIMEOUT
    finally:
        if child.poll() is None:
            # An immediate shutdown: the data are thrown away, so no checkpoint is needed.
            _end(child, signal.SIGQUIT)


def main() -> int:
    """Run the commands one after the other, then remove the directory."""
    owner = os.getppid()
    # Signals of a terminal or a service manager are left to the owner, which closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    # Read byte by byte: what follows the line would hide from select() in a buffer.
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
