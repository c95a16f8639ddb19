"""From the bytes of one value to a Python object, and from a binary value to the server's text.

A codec is a name in :mod:`pgoutput_fast.types`; here it gets its functions. They raise ValueError
for bytes that are no value of the type, :class:`OutOfRange` for a value that Python cannot hold
(after the user's policy said so), and never return a guess. The caller names the column.

The binary forms are those of the types' ``*_send`` functions in PostgreSQL's
``src/backend/utils/adt``; the texts are what the server prints with DateStyle ISO, TimeZone UTC,
bytea_output hex and extra_float_digits 1.
"""

from __future__ import annotations

from . import extensions, geometry, network, numbers, raw, search, temporal, text
from .base import Codec, CodecOf, NoTextForm, OutOfRange
from .temporal import EPOCH_UTC, timestamp_form

__all__ = ["CODECS", "EPOCH_UTC", "Codec", "NoTextForm", "OutOfRange", "timestamp_form"]

CODECS: dict[str, CodecOf] = {
    **extensions.CODECS,
    **geometry.CODECS,
    **network.CODECS,
    **numbers.CODECS,
    **raw.CODECS,
    **search.CODECS,
    **temporal.CODECS,
    **text.CODECS,
}
"""Codec → its functions for given policies and a Python encoding."""
