"""Decode inet and cidr to the classes of :mod:`ipaddress`, as psycopg does.

An inet without a prefix is an address, an inet with a prefix is an interface, a cidr is a network.
"""

from __future__ import annotations

import re
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)

from .base import Codec, CodecOf, show_bytes

Inet = IPv4Address | IPv6Address | IPv4Interface | IPv6Interface
Cidr = IPv4Network | IPv6Network

# The pattern excludes forms that ipaddress accepts and servers never print: netmasks and zones.
_TEXT = re.compile(rb"([0-9.]{7,15}|(?=.{0,4}:)[0-9a-f:.]{2,45})(?:/(0|[1-9]\d{0,2}))?")
_IPV4, _IPV6 = 2, 3  # PGSQL_AF_INET and PGSQL_AF_INET6


def _text(raw: bytes, name: str) -> tuple[bool, str, int | None]:
    """Whether the text is IPv6, the address, and the prefix, or None without a prefix."""
    match = _TEXT.fullmatch(raw)
    if match is None:
        raise ValueError(f"{show_bytes(raw)} is no {name}")
    address, prefix = match.groups()
    return b":" in address, address.decode(), None if prefix is None else int(prefix)


def _inet_text(raw: bytes) -> Inet:
    ipv6, address, prefix = _text(raw, "inet")
    try:
        return _inet(ipv6, address, prefix)
    except ValueError as error:
        raise ValueError(f"{show_bytes(raw)} is no inet: {error}") from None


def _inet(ipv6: bool, address: str, prefix: int | None) -> Inet:
    # The server leaves out the prefix of a whole address, except in its function text().
    if prefix is None or prefix == (128 if ipv6 else 32):
        return IPv6Address(address) if ipv6 else IPv4Address(address)
    return IPv6Interface((address, prefix)) if ipv6 else IPv4Interface((address, prefix))


def _cidr_text(raw: bytes) -> Cidr:
    ipv6, address, prefix = _text(raw, "cidr")
    if prefix is None:
        raise ValueError(f"{show_bytes(raw)} is no cidr: it has no prefix")
    try:
        return IPv6Network((address, prefix)) if ipv6 else IPv4Network((address, prefix))
    except ValueError as error:
        raise ValueError(f"{show_bytes(raw)} is no cidr: {error}") from None


def _parts(raw: bytes, name: str, is_cidr: int) -> tuple[bool, int, bytes]:
    """Whether a binary value is IPv6, the prefix, and the address.

    Binary format: address family, prefix, whether it is a cidr, size of the address (a byte each),
    then the address.
    """
    if len(raw) not in (8, 20):
        raise ValueError(f"a binary {name} has 8 or 20 bytes, found {len(raw)}")
    family, prefix, flag, size = raw[:4]
    ipv6 = len(raw) == 20
    if (
        family != (_IPV6 if ipv6 else _IPV4)
        or size != len(raw) - 4
        or prefix > 8 * size
        or flag != is_cidr
    ):
        raise ValueError(f"a binary {name} of {len(raw)} bytes that begins with {raw[:4]!r}")
    return ipv6, prefix, raw[4:]


def _inet_binary(raw: bytes) -> Inet:
    ipv6, prefix, address = _parts(raw, "inet", 0)
    if prefix == 8 * len(address):
        return IPv6Address(address) if ipv6 else IPv4Address(address)
    return IPv6Interface((address, prefix)) if ipv6 else IPv4Interface((address, prefix))


def _cidr_binary(raw: bytes) -> Cidr:
    ipv6, prefix, address = _parts(raw, "cidr", 1)
    return IPv6Network((address, prefix)) if ipv6 else IPv4Network((address, prefix))


def _address(ipv6: bool, address: bytes) -> str:
    """An address as ``pg_inet_net_ntop`` writes it.

    The longest run of zero words (the first, if several are equally long) is printed as ``::``. An
    IPv4 address at the end of an IPv6 one is printed with dots, which Python does not always do.
    """
    if not ipv6:
        return ".".join(map(str, address))
    words = address.hex(":", 2).split(":")
    best = length = start = 0
    for end in range(9):
        if end == 8 or words[end] != "0000":
            if end - start > length:
                best, length = start, end - start
            start = end + 1
    words = [word.lstrip("0") or "0" for word in words]
    if length < 2:
        return ":".join(words)
    if best == 0 and (length == 6 or (length == 5 and words[5] == "ffff")):
        words[6:] = [".".join(map(str, address[12:]))]
    return ":".join(words[:best]) + "::" + ":".join(words[best + length :])


def _inet_form(raw: bytes) -> str:
    ipv6, prefix, address = _parts(raw, "inet", 0)
    shown = _address(ipv6, address)
    return shown if prefix == 8 * len(address) else f"{shown}/{prefix}"


def _cidr_form(raw: bytes) -> str:
    ipv6, prefix, address = _parts(raw, "cidr", 1)
    if int.from_bytes(address, "big") & ((1 << (8 * len(address) - prefix)) - 1):
        raise ValueError(f"a binary cidr with bits beyond its prefix of {prefix}")
    return f"{_address(ipv6, address)}/{prefix}"


CODECS: dict[str, CodecOf] = {
    "inet": lambda policies, encoding: Codec(_inet_text, _inet_binary, _inet_form),
    "cidr": lambda policies, encoding: Codec(_cidr_text, _cidr_binary, _cidr_form),
}
