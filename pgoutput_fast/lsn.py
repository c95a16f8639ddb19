"""Parse and format log sequence numbers (LSNs) as PostgreSQL prints them: ``16/B374D848``."""

from __future__ import annotations

import operator
import re

from .errors import PgOutputError

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", re.ASCII)


def parse_lsn(text: str) -> int:
    """Return the LSN that `text` names, as an unsigned 64-bit integer.

    Raises
    ------
    PgOutputError
        `text` is not of PostgreSQL's form, two hexadecimal numbers of up to 8 digits and a slash.
    TypeError
        `text` is no str.
    """
    if not isinstance(text, str):
        raise TypeError(f"an LSN must be a str such as '16/B374D848', not {type(text).__name__}")
    match = _LSN.fullmatch(text)
    if match is None:
        raise PgOutputError(
            f"{text[:40]!r} is no LSN; expected a form such as '16/B374D848'", code="unfit_input"
        )
    return int(match[1], 16) << 32 | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """Return `lsn` as PostgreSQL prints it: ``format_lsn(0x16B374D848) == "16/B374D848"``.

    Raises
    ------
    PgOutputError
        `lsn` does not fit into an unsigned 64-bit integer.
    TypeError
        `lsn` is no int.
    """
    try:
        number = operator.index(lsn)
    except TypeError:
        raise TypeError(
            f"an LSN to format must be an int such as 0x16B374D848, not {type(lsn).__name__}"
        ) from None
    if not 0 <= number <= 0xFFFFFFFFFFFFFFFF:
        raise PgOutputError(f"{number} is no LSN; expected 0 to 2**64 - 1", code="unfit_input")
    return f"{number >> 32:X}/{number & 0xFFFFFFFF:X}"


def check_lsn(name: str, lsn: object) -> None:
    """Refuse an argument that is no LSN.

    Raises
    ------
    PgOutputError
        It is out of an LSN's range.
    TypeError
        It is no int.
    """
    if type(lsn) is not int:
        raise TypeError(
            f"{name} must be an int, as pgoutput_fast.parse_lsn makes it of '16/B374D848', not "
            f"{type(lsn).__name__}"
        )
    format_lsn(lsn)
