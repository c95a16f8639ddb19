"""Encodings: what a server means by bytes, and what the decoder makes of them."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import pytest
from support.expected_errors import expect_error

from pgoutput_fast.encodings import python_encoding

if TYPE_CHECKING:
    from conftest import Database

pytestmark = pytest.mark.server

# The server's encodings, and the other names that it takes for each.
NAMES = {
    "UTF8": ["unicode"], "EUC_CN": [], "EUC_KR": [], "GB18030": [], "JOHAB": [],
    "GBK": ["win936", "windows936"],
    "SJIS": ["mskanji", "shiftjis", "win932", "windows932"], "UHC": ["win949", "Windows949"],
    "KOI8R": ["koi8"], "KOI8U": [],
    **{f"LATIN{n}": [f"iso8859{p}", f"ISO-8859-{p}"]
       for n, p in zip(range(1, 11), (1, 2, 3, 4, 9, 10, 13, 14, 15, 16), strict=True)},
    **{f"ISO_8859_{part}": [f"iso8859{part}"] for part in (5, 6, 7, 8)},
    **{f"WIN{page}": [f"windows{page}"] for page in (866, 874, *range(1250, 1259))},
}  # fmt: skip
NAMES["WIN866"] += ["alt"]
NAMES["WIN1251"] += ["win"]
NAMES["WIN1258"] += ["abc", "tcvn", "TCVN5712", "vscii"]
REFUSED = {
    "BIG5": ["win950", "windows950"], "EUC_JP": [], "EUC_JIS_2004": [], "SHIFT_JIS_2004": [],
    "EUC_TW": [], "MULE_INTERNAL": [],
}  # fmt: skip
UNKNOWN_TO_PSYCOPG = ("EUC_TW", "MULE_INTERNAL")
OF_TWO_BYTES = ("EUC_CN", "EUC_KR", "GB18030", "GBK", "JOHAB", "SJIS", "UHC")
UNKNOWN_TO_PYTHON = {"UHC": 189, "EUC_KR": 2, "JOHAB": 1}
"""How many of the bytes that a server accepts are an error."""
MEANING = """
CREATE FUNCTION meaning(encoding text, bytes bytea[]) RETURNS TABLE (b bytea, t text)
LANGUAGE plpgsql AS $$
BEGIN
    FOREACH b IN ARRAY bytes LOOP
        BEGIN
            t := convert_from(b, encoding);
            RETURN NEXT;
        EXCEPTION WHEN OTHERS THEN
            NULL;
        END;
    END LOOP;
END $$
"""


def test_names_are_the_servers(database18: Database) -> None:
    with database18.connect() as connection:
        for encoding, aliases in (NAMES | REFUSED).items():
            for alias in (encoding, *aliases):
                if encoding in UNKNOWN_TO_PSYCOPG:
                    continue
                connection.execute(
                    "SELECT pg_catalog.set_config('client_encoding', %s, false)", [alias]
                )
                assert connection.info.parameter_status("client_encoding") == encoding
                connection.execute("SET client_encoding = 'UTF8'")
    for encoding, aliases in NAMES.items():
        assert {python_encoding(alias) for alias in aliases} <= {python_encoding(encoding)}
    for encoding, aliases in REFUSED.items():
        code = "bad_option" if encoding in UNKNOWN_TO_PSYCOPG else "not_supported"
        for alias in (encoding, *aliases):
            with expect_error(code=code):
                python_encoding(alias)


@pytest.mark.slow
def test_characters_are_the_servers(database18: Database) -> None:
    """Every byte, and where an encoding has such, every two bytes: the same, or an error."""
    database18.execute(MEANING)
    single = [bytes([byte]) for byte in range(1, 256)]
    double = [bytes([high, low]) for high in range(0x80, 0x100) for low in range(0x30, 0x100)]
    with database18.connect() as connection:
        for encoding in NAMES:
            bytes_ = single + double if encoding in OF_TWO_BYTES else single
            rows = connection.execute(
                "SELECT b, t FROM meaning(%s, %s)", [encoding, bytes_]
            ).fetchall()
            decode = codecs.lookup(python_encoding(encoding)).decode
            errors = 0
            for raw, meant in rows:
                try:
                    assert decode(raw)[0] == meant, (encoding, raw)
                except UnicodeDecodeError:
                    errors += 1
            assert errors == UNKNOWN_TO_PYTHON.get(encoding, 0), encoding
            assert len(rows) > (5000 if encoding in OF_TWO_BYTES else 126), encoding
