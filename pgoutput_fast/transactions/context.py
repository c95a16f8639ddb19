"""What a stream has announced before each of its transactions: relations and types.

A transaction can be decoded long after it was delivered, when later ones have altered its tables.
So each knows the context before it. Contexts are a chain, each with what was announced since the
one before; decoders follow the chain, and go on from where they are if they can.
"""

from __future__ import annotations

from typing import Any, cast

from .._impl import implementation
from ..columnar.decoder import ColumnarDecoder
from ..decoding.state import StreamState

_KEPT_STATES = 64
"""Every so many contexts one keeps its whole state, so that none is far from one that does."""


class Context:
    """The relations and types that were announced up to somewhere in the stream.

    Parameters
    ----------
    parent : Context or None
        The one before it.
    frames : list of bytes
        Relations and Types that were announced since, in the form that they have outside of stream
        chunks.
    state : StreamState
        What was announced in all. It is copied, but seldom.
    """

    __slots__ = ("_depth", "_frames", "_parent", "_state")

    def __init__(self, parent: Context | None, frames: list[bytes], state: StreamState) -> None:
        self._depth: int = 0 if parent is None else parent._depth + 1
        self._parent, self._frames = parent, frames
        self._state: StreamState | None = None
        if self._depth % _KEPT_STATES == 0:
            self._state = state.copy()
            self._parent, self._frames = None, []

    def state(self) -> StreamState:
        """A new state of a decoder that has seen what was announced."""
        chain: list[Context] = []
        context = self
        while context._state is None:
            chain.append(context)
            context = cast("Context", context._parent)
        state = context._state.copy()
        for one in reversed(chain):
            for frame in one._frames:
                state.receive(frame)
        return state


class Follower:
    """A decoder that goes from transaction to transaction, and is made anew where one was left out.

    Parameters
    ----------
    make : callable
        Makes a decoder of a state.
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self._context: Context | None = None
        self._decoder: Any = None

    def at(self, context: Context) -> Any:
        """A decoder in a context. It is its own until `moved` says where it is then."""
        decoder, self._decoder = self._decoder, None
        if decoder is None or self._context is not context:
            decoder = self._make(context.state())
        return decoder

    def moved(self, decoder: Any, context: Context) -> None:
        """A decoder has come to a context, and may be used from there."""
        self._decoder, self._context = decoder, context


def message_decoder(state: StreamState) -> Any:
    """A :class:`pgoutput_fast.Decoder` of a state."""
    return implementation.decoder_of(state)


def columnar_decoder(state: StreamState, options: dict[str, Any]) -> ColumnarDecoder:
    """A :class:`pgoutput_fast.ColumnarDecoder` of a state."""
    return ColumnarDecoder(decoder=message_decoder(state), **options)
