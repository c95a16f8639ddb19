"""Decode text in the session's encoding, XML and JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ..policies import Policies
from .base import Codec, CodecOf, NoTextForm, show_bytes


def _text(encoding: str) -> Codec:
    if encoding == "utf-8":
        # bytes.decode is faster than a Python function that calls it with an encoding.
        return Codec(bytes.decode, bytes.decode, bytes.decode)

    def decode(raw: bytes) -> str:
        return raw.decode(encoding)

    return Codec(decode, decode, decode)


def _other(encoding: str) -> Codec:
    """A type of which nothing is known: str from text format, bytes from binary format."""

    def form(raw: bytes) -> str:
        raise NoTextForm(
            f"the text of this binary value of {len(raw)} bytes is not known, as its type is not; "
            "raw() gives its bytes"
        )

    return Codec(_text(encoding).text, bytes, form)


_XML_DECLARATION = re.compile(r'<\?xml version="([^"]*)" encoding="[^"]*"([^?]*)\?>')


def _xml(encoding: str) -> Codec:
    decode = _text(encoding).text

    def form(raw: bytes) -> str:
        """The text of a binary xml, without the encoding that xml_send puts before it."""
        text: str = decode(raw)
        match = _XML_DECLARATION.match(text)
        if match is None:
            return text
        version, more = match.groups()
        rest = text[match.end() :]
        return rest if version == "1.0" and not more else f'<?xml version="{version}"{more}?>{rest}'

    return Codec(decode, form, form)


def _no_json_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _json_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too great for a float")
    return value


# By itself, Python's parser accepts NaN and Infinity, which are no JSON, and makes infinity of
# 1e999.
_parse_json = json.JSONDecoder(parse_constant=_no_json_constant, parse_float=_json_float).decode


def _json(policies: Policies, encoding: str, binary_prefix: bytes) -> Codec:
    decode = _text(encoding).text
    skipped = len(binary_prefix)

    def parse(text: str) -> Any:
        try:
            return _parse_json(text)
        except (ValueError, RecursionError) as error:
            shown = show_bytes(text.encode(encoding))
            raise ValueError(
                f"{shown} is refused by Python's parser ({error}); the policy json=text keeps it "
                "as str"
            ) from error

    def form(raw: bytes) -> str:
        if not raw.startswith(binary_prefix):
            raise ValueError(f"{show_bytes(raw[:1])} is no version of binary jsonb; expected 1")
        text: str = decode(raw[skipped:])
        return text

    if policies.json == "text":
        return Codec(decode, form, form)
    return Codec(lambda raw: parse(decode(raw)), lambda raw: parse(form(raw)), form)


def _versioned(encoding: str) -> Codec:
    """Text types whose binary format is a version byte (so far always 1) and the text."""
    decode = _text(encoding).text

    def form(raw: bytes) -> str:
        if raw[:1] != b"\x01":
            raise ValueError(f"{show_bytes(raw[:1])} is no version of the binary form; expected 1")
        text: str = decode(raw[1:])
        return text

    return Codec(decode, form, form)


CODECS: dict[str, CodecOf] = {
    "text": lambda policies, encoding: _text(encoding),
    "xml": lambda policies, encoding: _xml(encoding),
    "json": lambda policies, encoding: _json(policies, encoding, b""),
    "jsonb": lambda policies, encoding: _json(policies, encoding, b"\x01"),
    # PostgreSQL has no aclitemsend(), so values always come in text format.
    "aclitem": lambda policies, encoding: _other(encoding),
    "jsonpath": lambda policies, encoding: _versioned(encoding),
    "versioned_text": lambda policies, encoding: _versioned(encoding),
    "other": lambda policies, encoding: _other(encoding),
}
