"""A command that runs until it is told to end, beside what a test looks at."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from pgoutput_fast.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Running:
    """A command in this process, while a test looks at it from another thread.

    Parameters
    ----------
    command : str
    capsys, monkeypatch
        pytest's fixtures.
    """

    def __init__(
        self,
        command: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from pgoutput_fast.cli import _live

        logged = _live.logged
        monkeypatch.setattr(_live, "logged", lambda formatter: logged(formatter, self.write))
        self._command = command
        self._capsys = capsys
        self.text = ""
        self.failure: BaseException | None = None

    def __call__(
        self, given: list[str], look: Callable[[], None] | None = None, code: int = 0
    ) -> list[str]:
        """Run it, and end it by SIGTERM after `look`; the lines of standard error."""
        self.text = ""
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # if it has ended before
        thread = threading.Thread(target=self._look, args=[look])
        if look is not None:
            thread.start()
        try:
            ended = main([self._command, *given])
        finally:
            if look is not None:
                thread.join()
            signal.signal(signal.SIGTERM, before)
        assert "".join(self._capsys.readouterr().out) == ""
        if self.failure is not None:
            raise self.failure
        assert ended == code, self.text
        return self.text.splitlines()

    def _look(self, look: Callable[[], None]) -> None:
        try:
            look()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self.failure = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def write(self, text: str) -> None:
        self.text += text + "\n"

    def events(self) -> list[dict[str, Any]]:
        """The lines of JSON; each is an object."""
        return [json.loads(line) for line in self.text.splitlines()]

    def event(self, name: str) -> dict[str, Any] | None:
        """The last one of a name."""
        return next((one for one in self.events()[::-1] if one["event"] == name), None)
