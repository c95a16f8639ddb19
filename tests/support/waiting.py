"""How a test waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    timeout: float = 30.0,
    *,
    process: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None,
    log: Callable[[], object] = str,
) -> None:
    """Wait for what another thread or process brings about.

    Fails after `timeout` seconds, or where the process has ended, with what `log` returns.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert process is None or process.poll() is None, log()
        assert time.monotonic() < deadline, f"waited in vain for {timeout} s. {log()}"
        time.sleep(0.02)
