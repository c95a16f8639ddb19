"""Know which relations and types a stream had announced before each of its transactions.

A transaction can be decoded long after it was delivered, when later ones have altered its tables.
So each transaction keeps its context: what was announced before it. Contexts form a chain, in which
each has only what was announced since the one before. A decoder that is in a context moves along
the chain to a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from .._impl import implementation
from ..columnar.decoder import ColumnarDecoder
from ..decoding.state import StreamState
from ..protocol.wire import relation_id_of

_STATE_INTERVAL = 64
"""Each context whose number is a multiple of this keeps its whole state: to restore any other one,
at most so many contexts are gone through."""


class Context:
    """The relations and types that were announced up to one place in the stream.

    Parameters
    ----------
    parent : Context or None
        The context before it.
    frames : list of bytes
        Relations and Types that were announced since, in the form that they have outside of stream
        chunks.
    state : StreamState
        All that was announced up to here. It is copied only if this context keeps its whole state.
    """

    __slots__ = ("_depth", "_frames", "_parent", "_state")

    def __init__(self, parent: Context | None, frames: list[bytes], state: StreamState) -> None:
        self._depth: int = 0 if parent is None else parent._depth + 1
        self._parent, self._frames = parent, frames
        self._state: StreamState | None = None
        if self._depth % _STATE_INTERVAL == 0:
            self._state = state.copy()
            self._parent, self._frames = None, []

    def state(self) -> StreamState:
        """Make the state of a decoder to which all of it was announced."""
        chain: list[Context] = []
        context = self
        while context._state is None:
            chain.append(context)
            context = cast("Context", context._parent)
        state = context._state.copy()
        for later in reversed(chain):
            for frame in later._frames:
                state.receive(frame)
        return state


class Follower:
    """Keeps a decoder for transactions that are read in their order; otherwise it makes a new one.

    Parameters
    ----------
    make : callable
        A function that makes a decoder from a state.
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self._context: Context | None = None
        self._decoder: Any = None

    def at(self, context: Context) -> Any:
        """Return a decoder in `context`, for the caller alone until `moved` takes it back."""
        decoder, self._decoder = self._decoder, None
        if decoder is None or self._context is not context:
            decoder = self._make(context.state())
        return decoder

    def moved(self, decoder: Any, context: Context) -> None:
        """Take back a decoder, which is in `context` now."""
        self._decoder, self._context = decoder, context


def message_decoder(state: StreamState) -> Any:
    """Make a :class:`pgoutput_fast.Decoder` with a state."""
    return implementation.decoder_of(state)


def columnar_decoder(state: StreamState, options: dict[str, Any]) -> ColumnarDecoder:
    """Make a :class:`pgoutput_fast.ColumnarDecoder` with a state."""
    return ColumnarDecoder(decoder=message_decoder(state), **options)


def by_relation(frames: Iterable[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield each relation that is announced, with the frames of its Types and its Relation."""
    announcement: list[bytes] = []
    for frame in frames:
        announcement.append(frame)
        if frame[:1] == b"R":
            yield cast("int", relation_id_of(frame, in_stream=False)), announcement
            announcement = []


def first_announcements(announced: list[tuple[int, bytes]]) -> dict[int, int]:
    """Return the index of the first Relation of each relation."""
    indexes: dict[int, int] = {}
    for index, frame in announced:
        if frame[:1] == b"R":
            indexes.setdefault(cast("int", relation_id_of(frame, in_stream=False)), index)
    return indexes
