r"""The canonical text of a value: an SQL expression for the server, and one for a target's column.

Both expressions give the same text, byte for byte, for equal values, and different texts for other
values. A target may store a PostgreSQL type in several ways: a ``date`` is a date, or text if a
policy says so. So an entry of :data:`FORMS` is for a codec of the table of types, and for the kind
of column that stores its values. If a target stores text, the text is compared with the server's
text. Only types with several texts for a value need an entry in that case.

The text of a nested value joins the parts of its inner values. A part is a text with a comma after
it (:func:`part`). The text of a row joins the parts of its columns in the same way.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..errors import PgOutputError
from ..types import decimal_shape

if TYPE_CHECKING:
    from ..policies import Policies
    from ..types import ColumnType

UNKNOWN = "\\U"
"""The text, without comma, of a value that a target does not know. That of NULL is ``\\N``."""
_NULL = "\\N"


@dataclass(frozen=True, slots=True)
class ValueStorage:
    """How a target stores values.

    Attributes
    ----------
    kind : str
        DuckDB's name of the type in lower case: "varchar", "decimal", "list", "struct" …
    parts : tuple of (str, ValueStorage)
        The fields of a struct, the element of a list, or the key and the value of a map.
    """

    kind: str
    parts: tuple[tuple[str, ValueStorage], ...] = ()


class Texts(NamedTuple):
    """Two SQL expressions that give the same text for equal values."""

    server: str
    target: str


class NotComparable(PgOutputError):
    """A column or a table can't be compared. The message says why."""

    code = "not_comparable"


class NotTheTable(NotComparable):
    """A reader of the table's name sees another table or other columns, so the tables differ."""


@dataclass(frozen=True, slots=True)
class CommonText:
    """A kind of canonical text.

    Attributes
    ----------
    codecs : tuple of str
        The codecs of the table of types that have this text.
    kinds : tuple of str
        The kinds of columns (`ValueStorage.kind`) that have this text.
    server, duckdb : str
        The expressions, with ``{c}`` for the value. Both give NULL for NULL.
    text : str
        The description of the text in ``docs/reference/types.md``.
    """

    codecs: tuple[str, ...]
    kinds: tuple[str, ...]
    server: str
    duckdb: str
    text: str


# Three reasons: `{c}::text` drops the blanks of a bpchar. IS NULL is true for a composite of NULLs.
# And without COLLATE, the text has the value's collation: with a nondeterministic collation,
# servers before 18 can't replace text, and later ones may find a comma where there is none.
_SERVERS_TEXT = "CASE WHEN num_nulls({c}) = 0 THEN format('%s', {c}) COLLATE \"C\" END"
_AS_VARCHAR = "({c})::VARCHAR"

_INTEGERS = ("smallint", "integer", "bigint", "uinteger", "ubigint", "decimal")


def _bits(send: str, size: int, integer: str) -> str:
    bits = f"('x' || encode({send}({{c}}), 'hex'))::bit({size})::{integer}"
    return f"CASE WHEN {{c}} = 'NaN' THEN 'NaN' ELSE {bits}::text END"


def _from_iso() -> str:
    """Return the expression for months/days/microseconds of an iso_8601 or postgres interval."""

    def whole(pattern: str) -> str:
        matched = f"regexp_extract({{c}}, '{pattern}', 1)"
        return f"coalesce(try_cast({matched} AS BIGINT), 0)"

    def micros(pattern: str) -> str:
        matched = f"regexp_extract({{c}}, '{pattern}', 1)"
        return f"coalesce(try_cast({matched} AS DECIMAL(30,6)), 0)"

    n, f = "(-?[0-9]+)", "(-?[0-9.]+)"
    iso = (
        f"({whole(f'^P[^T]*?{n}Y')} * 12 + {whole(f'^P[^T]*?{n}M')})::VARCHAR || '/' || "
        f"{whole(f'^P[^T]*?{n}D')}::VARCHAR || '/' || "
        f"({micros(f'T.*?{n}H')} * 3600000000 + {micros(f'T.*?{n}M')} * 60000000 + "
        f"{micros(f'T.*?{f}S')} * 1000000)::BIGINT::VARCHAR"
    )
    clock = "([-+]?)([0-9]+):([0-9]+):([0-9.]+)$"

    def at(group: int) -> str:
        matched = f"regexp_extract({{c}}, '{clock}', {group})"
        return f"coalesce(try_cast({matched} AS DECIMAL(30,6)), 0)"

    postgres = (
        f"({whole(f'{n} year')} * 12 + {whole(f'{n} mon')})::VARCHAR || '/' || "
        f"{whole(f'{n} day')}::VARCHAR || '/' || "
        f"((CASE WHEN regexp_extract({{c}}, '{clock}', 1) = '-' THEN -1 ELSE 1 END) * "
        f"({at(2)} * 3600000000 + {at(3)} * 60000000 + {at(4)} * 1000000))::BIGINT::VARCHAR"
    )
    return (
        "CASE WHEN {c} IS NULL OR {c} LIKE '%infinity' THEN {c} "
        f"WHEN {{c}} LIKE 'P%' THEN {iso} ELSE {postgres} END"
    )


_INTERVAL = (
    "CASE WHEN NOT isfinite({c}) THEN {c}::text ELSE "
    "(date_part('year', {c}) * 12 + date_part('month', {c}))::bigint::text || '/' || "
    "date_part('day', {c})::bigint::text || '/' || "
    "(extract(hour FROM {c})::numeric * 3600000000 + extract(minute FROM {c})::numeric * 60000000 "
    "+ extract(microseconds FROM {c})::numeric)::bigint::text END"
)

_MONEY_SIGN = "CASE WHEN {t} ~ '[-(]' THEN '-' ELSE '' END"

FORMS: tuple[CommonText, ...] = (
    CommonText(("bool",), ("boolean",), "({c})::text", _AS_VARCHAR, "`true`, `false`"),
    CommonText(
        ("int2", "int4", "int8", "uint4", "uint8"), _INTEGERS,
        "({c})::text", _AS_VARCHAR, "decimal digits",
    ),
    CommonText(
        ("float4",), ("float",), _bits("float4send", 32, "int"),
        "CASE WHEN isnan({c}) THEN 'NaN' ELSE ({c})::BIT::INTEGER::VARCHAR END",
        "its bits as a signed integer, or `NaN`",
    ),
    CommonText(
        ("float8",), ("double",), _bits("float8send", 64, "bigint"),
        "CASE WHEN isnan({c}) THEN 'NaN' ELSE ({c})::BIT::BIGINT::VARCHAR END",
        "its bits as a signed integer, or `NaN`",
    ),
    # DuckDB prints no 0 before the point if the type has no digit there.
    CommonText(
        ("numeric",), ("decimal",), _SERVERS_TEXT,
        r"regexp_replace(({c})::VARCHAR, '^(-?)\.', '\10.')",
        "the server's text, with the column's scale",
    ),
    CommonText(
        ("bytea",), ("blob",), "encode({c}, 'hex')", "lower(hex({c}))", "hexadecimal digits",
    ),
    # PostgreSQL 14 prints a byte above 127 of a "char" as it is, and not as `\ooo`.
    CommonText(
        ("char",), ("varchar",),
        r"CASE WHEN get_byte(charsend({c}), 0) < 128 THEN format('%s', {c}) ELSE "
        r"'\' || (get_byte(charsend({c}), 0) >> 6)::text || "
        r"(get_byte(charsend({c}), 0) >> 3 & 7)::text || "
        r"(get_byte(charsend({c}), 0) & 7)::text END",
        "{c}", r"the server's text, with `\ooo` for bytes above 127",
    ),
    CommonText(("uuid",), ("uuid",), _SERVERS_TEXT, _AS_VARCHAR, "the server's text"),
    CommonText(("date",), ("date",), _SERVERS_TEXT, _AS_VARCHAR, "the server's text"),
    CommonText(
        ("timestamp",), ("timestamp",), _SERVERS_TEXT, _AS_VARCHAR, "the server's text",
    ),
    # DuckDB's own text needs time zone data, and depends on the session's time zone.
    CommonText(
        ("timestamptz",), ("timestamp with time zone",), _SERVERS_TEXT,
        "make_timestamp(epoch_us({c}))::VARCHAR || '+00'",
        "the server's text, in UTC",
    ),
    CommonText(("time",), ("time",), _SERVERS_TEXT, _AS_VARCHAR, "the server's text"),
    CommonText(("interval",), ("varchar",), _INTERVAL, _from_iso(),
         "months/days/microseconds, or `infinity`"),
    CommonText(
        ("money",), ("varchar",),
        _MONEY_SIGN.format(t="({c})::text")
        + " || ltrim(regexp_replace(({c})::text, '[^0-9]', '', 'g'), '0')",
        "CASE WHEN regexp_matches({c}, '[-(]') THEN '-' ELSE '' END"
        " || ltrim(regexp_replace({c}, '[^0-9]', '', 'g'), '0')",
        "the amount in the smallest unit, without leading zeros",
    ),
    CommonText(("hstore",), ("map",), "", "", "the pairs in the order of their keys' bytes"),
)  # fmt: skip
"""The canonical texts of types that need more than the server's text in a text column."""

NOT_COMPARED: dict[str, str] = {
    "reg": "its text depends on the search_path of the session, and on the format",
    "pgvector": "verify can't compare this type yet",
    "halfvec": "verify can't compare this type yet",
    "sparsevec": "verify can't compare this type yet",
    "ewkb": "verify can't compare this type yet",
}
"""Codec → the reason why its values are not compared."""

SERVERS_TEXT = CommonText((), ("varchar",), _SERVERS_TEXT, "{c}", "the server's text")
"""The canonical text of all types that a target stores as text, if they are not in `FORMS`."""

RAW_TEXT = CommonText(
    ("text",), ("blob",),
    # A "conversion" to SQL_ASCII converts nothing, so no byte of the text is refused.
    "CASE WHEN num_nulls({c}) = 0 THEN encode(convert_to(format('%s', {c}), 'SQL_ASCII'), 'hex') "
    "END",
    "lower(hex({c}))", "hexadecimal digits",
)  # fmt: skip
"""The canonical text of texts that a target stores as bytes, from an SQL_ASCII database."""


@dataclass(frozen=True, slots=True)
class TextsOf:
    """Builds the expressions for the columns of a target with certain policies."""

    policies: Policies
    _depth: int = field(default=0)

    def column(self, type: ColumnType, storage: ValueStorage, server: str, target: str) -> Texts:
        """Return the canonical texts of a value.

        Parameters
        ----------
        type : ColumnType
            The type in the server's catalogue.
        storage : ValueStorage
            How the target stores the value.
        server, target : str
            The SQL expressions of the value itself.

        Raises
        ------
        NotComparable
            No canonical text is known for this type in this storage.
        """
        if type.entry is not None and type.entry.codec in NOT_COMPARED:
            raise NotComparable(NOT_COMPARED[type.entry.codec])
        if type.kind == "array" and type.element is not None and has_codec(type, "reg"):
            raise NotComparable(NOT_COMPARED["reg"])
        if type.kind in ("array", "vector") and storage.kind in ("list", "array"):
            return self._list(type, storage, server, target)
        if type.kind == "range" and storage.kind == "struct":
            return self._range(type, storage, server, target)
        if type.kind == "multirange" and storage.kind == "list":
            return self._multirange(type, storage, server, target)
        if type.kind == "composite" and storage.kind == "struct":
            return self._composite(type, storage, server, target)
        codec = type.entry.codec if type.entry is not None else ""
        if codec == "hstore" and storage.kind == "map":
            return self._hstore(server, target)
        form = next(
            (
                form
                for form in (*FORMS, RAW_TEXT)
                if codec in form.codecs and storage.kind in form.kinds
            ),
            SERVERS_TEXT if storage.kind == "varchar" else None,
        )
        if form is None:
            raise NotComparable(f"verify can't compare values stored as {storage.kind}")
        if codec == "numeric" and storage.kind == "decimal":
            return self._decimal(type, form, server, target)
        text = form.server.format(c=self._changed(codec, server))
        if codec == "interval" and self.policies.infinity == "clamp":
            # Since PostgreSQL 17, no finite interval has the parts of these two.
            text = f"replace(replace({text}, '-infinity', '{_LEAST}'), 'infinity', '{_GREATEST}')"
        return Texts(text, form.duckdb.format(c=target))

    def _deeper(self) -> TextsOf:
        return TextsOf(self.policies, self._depth + 1)

    def _changed(self, codec: str, server: str) -> str:
        """Return the expression of the server's value after the policies.

        A policy changes its values in any kind of column. If another policy asks for text, or the
        target has no such type, the column has the text of the changed value.
        """
        ends = _ENDS.get(codec)
        changed = {"null": "NULL"}
        cases = []
        if ends is not None:
            changed["clamp"] = f"least(greatest({{c}}, '{ends[0]}'), '{ends[1]}')"
            cases = [("out_of_range", f"NOT {{c}} BETWEEN '{ends[0]}' AND '{ends[1]}'")]
        if codec in _WITH_INFINITY:
            # First, because infinity is also out of range.
            cases.insert(0, ("infinity", "NOT isfinite({c})"))
        choices = [(changed.get(getattr(self.policies, name), "{c}"), case) for name, case in cases]
        if all(result == "{c}" for result, _ in choices):
            return server
        whens = " ".join(f"WHEN {condition} THEN {result}" for result, condition in choices)
        return f"(CASE {whens} ELSE {{c}} END)".format(c=server)

    def _decimal(self, type: ColumnType, form: CommonText, server: str, target: str) -> Texts:
        shape = decimal_shape(type.modifier) or self.policies.numeric
        printed = form.duckdb.format(c=target)
        choice = self.policies.special_values
        if choice in ("null", "clamp") and shape is not None:
            digits = "9" * shape[0]
            most = digits[: shape[0] - shape[1]] + ("." + digits[: shape[1]] if shape[1] else "")
            special = "CASE ({c})::text WHEN 'NaN' THEN NULL"
            if choice == "clamp":
                special += f" WHEN 'Infinity' THEN {most} WHEN '-Infinity' THEN -{most}"
            else:
                special += " WHEN 'Infinity' THEN NULL WHEN '-Infinity' THEN NULL"
            server = f"({special} ELSE {{c}} END)".format(c=server)
        if decimal_shape(type.modifier) is not None:
            return Texts(form.server.format(c=server), printed)
        # The column has the policy's scale, so a value's own trailing zeros are lost.
        short = (
            f"CASE WHEN contains({printed}, '.') THEN rtrim(rtrim({printed}, '0'), '.') "
            f"ELSE {printed} END"
        )
        return Texts(f"trim_scale({server})::text", short)

    def _list(self, type: ColumnType, storage: ValueStorage, server: str, target: str) -> Texts:
        element, of_element = _element(type), storage.parts[0][1]
        levels = 1
        flat = target
        lengths = [f"len({target})"]
        while of_element.kind == "list" and element.kind not in ("multirange", "vector"):
            lengths.append(f"len({target}{'[1]' * levels})")
            flat = f"flatten({flat})"
            of_element = of_element.parts[0][1]
            levels += 1
        if type.kind == "vector":
            server = f"({server})::{_element(type).name}[]"
        n = self._depth
        own, item, at = self._deeper(), f"e{n}", f"i{n}"
        if element.kind == "composite":
            if levels > 1:
                raise NotComparable("it is an array of composites with more than one dimension")
            texts = own.column(element, of_element, f"({server})[{at}]", item)
            source = f"generate_subscripts({server}, 1) AS {at}"
        else:
            texts = own.column(element, of_element, item, item)
            source = f"unnest({server}) WITH ORDINALITY AS u{n}({item}, {at})"
        joined = f"coalesce((SELECT string_agg({part(texts.server)}, '' ORDER BY {at}) FROM {source}), '')"  # noqa: E501, S608
        printed = (
            f"array_to_string(list_transform({flat}, lambda {item}: {part(texts.target)}), '')"
        )
        if levels > 1:
            shape = "||','||".join(
                f"coalesce(array_length({server}, {i + 1}), 0)" for i in range(levels)
            )
            joined = f"{shape} || ':' || {joined}"
            printed_shape = "||','||".join(f"coalesce({length}, 0)" for length in lengths)
            printed = f"{printed_shape} || ':' || {printed}"
        return Texts(
            f"CASE WHEN num_nulls({server}) = 0 THEN {joined} END",
            f"CASE WHEN {target} IS NOT NULL THEN {printed} END",
        )

    def _range(self, type: ColumnType, storage: ValueStorage, server: str, target: str) -> Texts:
        fields = dict(storage.parts)
        bounds = _element(type)
        own = self._deeper()
        ends = [
            own.column(bounds, fields[end], f"{end}({server})", f"({target}).{end}")
            for end in ("lower", "upper")
        ]
        server_parts = [f"CASE WHEN lower_inc({server}) THEN '[' ELSE '(' END"]
        server_parts += [part(end.server) for end in ends]
        server_parts += [f"CASE WHEN upper_inc({server}) THEN ']' ELSE ')' END"]
        printed = [f"CASE WHEN ({target}).lower_inc THEN '[' ELSE '(' END"]
        printed += [part(end.target) for end in ends]
        printed += [f"CASE WHEN ({target}).upper_inc THEN ']' ELSE ')' END"]
        # If a policy turns a bound into NULL, the range becomes NULL: NULL as a bound would mean
        # that the range is unbounded.
        condition = " AND ".join(
            f"({name}_inf({server}) OR {end.server} IS NOT NULL)"
            for name, end in zip(("lower", "upper"), ends, strict=True)
        )
        return Texts(
            f"CASE WHEN isempty({server}) THEN 'empty' WHEN num_nulls({server}) = 0 AND "
            f"{condition} THEN {' || '.join(server_parts)} END",
            f"CASE WHEN ({target}).\"empty\" THEN 'empty' WHEN {target} IS NOT NULL THEN "
            f"{' || '.join(printed)} END",
        )

    def _multirange(
        self, type: ColumnType, storage: ValueStorage, server: str, target: str
    ) -> Texts:
        n = self._depth
        item, at = f"e{n}", f"i{n}"
        texts = self._deeper().column(_element(type), storage.parts[0][1], item, item)
        joined = (
            f"coalesce((SELECT string_agg({part(texts.server)}, '' ORDER BY {at}) "  # noqa: S608
            f"FROM unnest({server}) WITH ORDINALITY AS u{n}({item}, {at})), '')"
        )
        return Texts(
            f"CASE WHEN num_nulls({server}) = 0 THEN {joined} END",
            f"CASE WHEN {target} IS NOT NULL THEN array_to_string("
            f"list_transform({target}, lambda {item}: {part(texts.target)}), '') END",
        )

    def _composite(
        self, type: ColumnType, storage: ValueStorage, server: str, target: str
    ) -> Texts:
        if len(type.fields) != len(storage.parts):
            raise NotComparable("the composite has other fields in the target")
        own = self._deeper()
        texts = [
            own.column(
                type_, part_, f"({server}).{quoted(name)}", f"({target}).{quoted(target_name)}"
            )
            for (name, type_), (target_name, part_) in zip(type.fields, storage.parts, strict=True)
        ]
        return Texts(
            f"CASE WHEN num_nulls({server}) = 0 THEN {joined(t.server for t in texts)} END",
            f"CASE WHEN {target} IS NOT NULL THEN {joined(t.target for t in texts)} END",
        )

    def _hstore(self, server: str, target: str) -> Texts:
        n = self._depth
        # A cast needs no schema. The extension's functions may be in any schema.
        pairs = (
            f"coalesce((SELECT string_agg({part(f'k{n}')} || {part(f'v{n}')}, '' "  # noqa: S608
            f'ORDER BY k{n} COLLATE pg_catalog."C") '
            f"FROM json_each_text(({server})::json) AS u{n}(k{n}, v{n})), '')"
        )
        item = f"e{n}"
        printed = (
            f"array_to_string(list_transform(list_sort(map_entries({target})), lambda {item}: "
            f"{part(f'({item}).key')} || {part(f'({item}).value')}), '')"
        )
        return Texts(
            f"CASE WHEN num_nulls({server}) = 0 THEN {pairs} END",
            f"CASE WHEN {target} IS NOT NULL THEN {printed} END",
        )


_ENDS = {
    "date": ("0001-01-01", "9999-12-31"),
    "timestamp": ("0001-01-01", "9999-12-31 23:59:59.999999"),
    "timestamptz": ("0001-01-01 00:00:00+00", "9999-12-31 23:59:59.999999+00"),
    "time": ("00:00:00", "23:59:59.999999"),
}
"""Codec → the least and the greatest value that is not out of range for policies."""
_WITH_INFINITY = ("date", "timestamp", "timestamptz", "interval")
"""Codecs of types that have infinite values."""
_LEAST = "-2147483648/-2147483648/-9223372036854775808"
_GREATEST = "2147483647/2147483647/9223372036854775807"
"""The canonical texts of the least and the greatest interval."""


def _element(type: ColumnType) -> ColumnType:
    if type.element is None:
        raise NotComparable("the type of its elements is not known")
    return type.element


def has_codec(type: ColumnType, *codecs: str) -> bool:
    """Return whether a type, or any type inside it, has one of some codecs."""
    if type.entry is not None and type.entry.codec in codecs:
        return True
    inner = [part for _, part in type.fields]
    inner += [] if type.element is None else [type.element]
    return any(has_codec(part, *codecs) for part in inner)


def quoted(name: str) -> str:
    """Return a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return an SQL literal of a text; backslashes have no special meaning."""
    return "'" + text.replace("'", "''") + "'"


def part(text: str) -> str:
    r"""Return the expression for a part: the text, or ``\N`` for NULL, with a comma after it.

    Backslashes and commas in the text are escaped by a backslash. The expression is valid in
    PostgreSQL and in DuckDB.
    """
    escaped = rf"replace(replace({text}, '\', '\\'), ',', '\,')"
    return rf"(coalesce({escaped}, '\N') || ',')"


def joined(texts: object) -> str:
    """Return the expression for several parts."""
    return " || ".join(map(part, texts)) or "''"  # type: ignore[call-overload]


_PART = re.compile(r"((?:[^\\,]|\\.)*),", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def split(parts: str) -> list[str]:
    """Return the parts of a text, still escaped, without their commas."""
    return _PART.findall(parts)


def plain(part: str) -> str | None:
    """Return the text of a part; None for NULL and for an unknown value."""
    return None if part in (_NULL, UNKNOWN) else _ESCAPE.sub(r"\1", part)


_FLOATS = {"float4": ("=i", "=f"), "float8": ("=q", "=d")}


def shown(type: ColumnType, text: str | None) -> str | None:
    """Return a column's text for users: a float's value in place of its bits."""
    formats = _FLOATS.get(type.entry.codec if type.entry is not None else "")
    if formats is None or text is None or text == "NaN":
        return text
    (value,) = struct.unpack(formats[1], struct.pack(formats[0], int(text)))
    return repr(value)


_SPECIAL = re.compile(r"infinity|nan|\bBC\b|24:00:00|\d{5,}-\d\d-\d\d", re.IGNORECASE)


def may_be_changed(type: ColumnType, text: str | None) -> bool:
    """Return whether a policy may change a value that has this text on the server."""
    return (
        text is not None
        and has_codec(type, *_ENDS, "interval", "numeric")
        and _SPECIAL.search(text) is not None
    )


def described(codec: str) -> str:
    """Return the description of a codec's canonical text for ``docs/reference/types.md``."""
    if codec in NOT_COMPARED:
        return "not compared"
    if codec == "vector":
        return "its elements' texts"
    return next((form.text for form in FORMS if codec in form.codecs), SERVERS_TEXT.text)
