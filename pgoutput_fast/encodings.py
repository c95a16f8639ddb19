"""Find the Python codec of a PostgreSQL text encoding."""

from __future__ import annotations

import codecs
from typing import Any

from .errors import PgOutputError

_POSTGRESQL_ENCODINGS = {
    "unicode": "utf-8",
    # These are Windows code pages on the server. Python's codecs of the same names are the
    # standards that the code pages extend, and lack some of their characters.
    **dict.fromkeys(("sjis", "shiftjis", "mskanji", "win932", "windows932"), "cp932"),
    **dict.fromkeys(("uhc", "win949", "windows949"), "cp949"),
    **dict.fromkeys(("win936", "windows936"), "gbk"),
    **dict.fromkeys(("win950", "windows950"), "big5"),
    "alt": "cp866",
    "win": "cp1251",
    **dict.fromkeys(("abc", "tcvn", "tcvn5712", "vscii"), "cp1258"),
    "koi8": "koi8-r",
    "koi8r": "koi8-r",
    "koi8u": "koi8-u",
    "euccn": "gb2312",
    "eucjp": "euc_jp",
    "euckr": "euc_kr",
    "shiftjis2004": "shift_jis_2004",
    "eucjis2004": "euc_jis_2004",
    "latin5": "iso8859-9",
    "latin6": "iso8859-10",
    "latin7": "iso8859-13",
    "latin8": "iso8859-14",
    "latin9": "iso8859-15",
    "latin10": "iso8859-16",
    **{f"iso8859{part}": f"iso8859-{part}" for part in (*range(1, 10), 10, 13, 14, 15, 16)},
    **{
        f"{prefix}{page}": f"cp{page}"
        for prefix in ("win", "windows")
        for page in (866, 874, *range(1250, 1259))
    },
}
"""PostgreSQL's name of an encoding, without punctuation → Python's name.

Only encodings that Python knows by another name, or whose name means something else in Python."""

_OTHER_MAPS = frozenset(
    {"big5", "big5hkscs", "cp950", "euc_jp", "euc_jis_2004", "euc_jisx0213"}
    | {"shift_jis_2004", "shift_jisx0213"}
)
"""Python codecs that decode some bytes to other characters than a PostgreSQL server does."""

REPLACING = "pgoutput_fast_replacing"
"""A codec of Python's: UTF-8 with U+FFFD in the place of bytes that are not UTF-8.

Only for values: where the caller names another way to handle errors, as for names, the codec is
UTF-8."""


def _decode_replacing(raw: Any, errors: str = "strict") -> tuple[str, int]:
    return codecs.utf_8_decode(raw, "replace" if errors == "strict" else errors, True)


def _replacing(name: str) -> codecs.CodecInfo | None:
    if name != REPLACING:
        return None
    return codecs.CodecInfo(codecs.utf_8_encode, _decode_replacing, name=REPLACING)


codecs.register(_replacing)


def is_sql_ascii(name: object) -> bool:
    """Return whether an encoding is SQL_ASCII: bytes that the server does not check."""
    return isinstance(name, str) and _plain(name) == "sqlascii"


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def python_encoding(name: str) -> str:
    """Return Python's name of an encoding, which may have PostgreSQL's (``LATIN1``, ``WIN1252``).

    SQL_ASCII is read as UTF-8.

    Raises
    ------
    PgOutputError
        Python has no such text encoding, the encoding does not contain ASCII, or Python decodes
        some of its characters differently than a server does.
    TypeError
        `name` is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"an encoding must be a str, not {type(name).__name__}")
    plain = "unicode" if is_sql_ascii(name) else _plain(name)
    try:
        codec = codecs.lookup(_POSTGRESQL_ENCODINGS.get(plain, name)).name
        usable = "pgoutput".encode(codec) == b"pgoutput"
    except (LookupError, ValueError):
        usable = False
    if not usable:
        raise PgOutputError(
            f"{name[:40]!r} is unknown; expected the client_encoding of the session, such as "
            "'UTF8' or 'LATIN1'",
            code="bad_option",
            parameter="encoding",
        )
    if codec in _OTHER_MAPS:
        raise PgOutputError(
            f"encoding {name[:40]!r}: Python's codec of that name makes other characters of some "
            "bytes than the server means",
            code="not_supported",
            hint="Set the session's client_encoding to UTF8, to which the server converts exactly",
        )
    return codec
