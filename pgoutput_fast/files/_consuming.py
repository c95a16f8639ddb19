"""An export as a registered consumer of the directory that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pgoutput_fast.directory.consumers import Consumer, consumers, remove_consumer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.segments.listing import contents

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from typing_extensions import Self

    from pgoutput_fast.directory.reading import Position


class Registered:
    """A consumer, which is removed again if it is new and nothing was read.

    Parameters
    ----------
    paths : sequence of paths
        What is read: one directory.
    name : str

    Raises
    ------
    PgOutputError
        What is read is no directory; or as of :class:`Consumer`.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], name: str) -> None:
        if len(paths) != 1 or not Path(paths[0]).is_dir():
            raise PgOutputError(
                "it needs one directory of segments, which then keeps what was not read",
                code="bad_option",
                parameter="consumer",
            )
        self._directory = Path(paths[0])
        self._is_made = name not in {one.name for one in consumers(self._directory)}
        self._keeps = not self._is_made
        self._consumer = Consumer(self._directory, name)

    def begin(self, position: Position, *, is_new: bool) -> None:
        """Begin where the export is.

        Raises
        ------
        PgOutputError
            The consumer is beyond that: it is another reader's.
        """
        at = self._consumer.position.lsn
        first = contents(self._directory).begin if is_new else position.lsn
        if not self._is_made and at > first:
            raise PgOutputError(
                f"consumer {self._consumer.name!r} of {self._directory} is at {format_lsn(at)}, "
                f"and this export at {format_lsn(first)}",
                code="bad_option",
                path=str(self._directory),
                hint="Give the name of no other reader, or "
                "remove the consumer if it has none any more",
            )
        self._consumer.advance(position)

    def advance(self, position: Position) -> None:
        """Store that everything before a position is in files, which are durable."""
        self._consumer.advance(position)
        self.keep()

    def keep(self) -> None:
        """Stay registered."""
        self._keeps = True

    def drop(self) -> None:
        """Do not stay registered, if it is new: its files were deleted."""
        self._keeps = not self._is_made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._keeps:
            remove_consumer(self._directory, self._consumer.name)
