"""Hypothesis strategies for values of every type, as text that the server reads.

The sets behind the strategies name the types that a test has to treat differently, and why.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

texts = st.text(
    st.one_of(
        st.sampled_from("\"\\'{}(),[] \t\n\r\v\f;:=>NULnul\u00a0\u0085"),
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]),
    ),
    max_size=12,
)


def integers(bits: int) -> st.SearchStrategy[str]:
    return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).map(str)


def unsigned(bits: int) -> st.SearchStrategy[str]:
    return st.integers(0, (1 << bits) - 1).map(str)


def float_text(value: float) -> str:
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))


floats8 = st.floats().map(float_text)
floats4 = st.floats(width=32).map(float_text)
finite = st.floats(-1e30, 1e30).map(repr)
decimals = st.one_of(
    st.decimals(allow_nan=True, allow_infinity=False, places=None).filter(
        lambda value: value.is_nan() or -1000 < value.adjusted() < 1000
    ).map(lambda value: "NaN" if value.is_nan() else f"{value:f}"),
    st.sampled_from(["Infinity", "-Infinity", "0.00", "-0.10", "1" + "0" * 60, "1e-60"]),
)  # fmt: skip
prices = st.decimals(-(10**8) + 1, 10**8 - 1, places=2).map(str)
beyond = st.sampled_from(["infinity", "-infinity", "0044-03-15 BC", "12345-06-07"])
dates = st.one_of(st.dates().map(str), beyond)
timestamps = st.one_of(st.datetimes().map(str), beyond)
# Near to the ends of Python's calendar the time zone of the text can lead beyond.
timestamptzs = st.one_of(
    st.tuples(st.datetimes(), st.integers(-15, 15)).map(lambda v: f"{v[0]}{v[1]:+03d}"), beyond
)
times = st.one_of(st.times().map(str), st.just("24:00:00"))
timetzs = st.tuples(times, st.integers(-15, 15), st.integers(0, 59)).map(
    lambda v: f"{v[0]}{v[1]:+03d}:{v[2]:02d}"
)
intervals = st.tuples(
    st.integers(-30_000, 30_000), st.integers(-100_000, 100_000), st.integers(-(10**15), 10**15)
).map(lambda v: f"{v[0]} mons {v[1]} days {v[2]} microseconds") | st.sampled_from(
    ["infinity", "-infinity", "0"]
)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | texts.filter(lambda t: "\x7f" not in t),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
).map(json.dumps)
points = st.tuples(finite, finite).map(lambda p: f"({p[0]},{p[1]})")
hexes = st.binary(max_size=20).map(lambda data: "\\x" + data.hex())
uuids = st.uuids().map(str)
ipv4 = st.ip_addresses(v=4).map(str)
ips = st.ip_addresses().map(str)
macs = st.binary(min_size=6, max_size=6).map(lambda data: data.hex(":"))
macs8 = st.binary(min_size=8, max_size=8).map(lambda data: data.hex(":"))
lsns = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).map(
    lambda v: f"{v[0]:X}/{v[1]:X}"
)
letters = st.text(st.sampled_from("abcxyzäß' \\:&|!()"), min_size=1, max_size=6)
lexemes = letters.map(lambda w: "'" + w.replace("\\", "\\\\").replace("'", "''") + "'")


def tsquery(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, st.sampled_from(["&", "|", "<->", "<3>"]), inner).map(
        lambda v: f"({v[0]} {v[1]} {v[2]})"
    ) | inner.map(lambda v: f"!({v})")


def array(inner: st.SearchStrategy[str], delimiter: str = ",") -> st.SearchStrategy[str]:
    element = st.one_of(
        st.just("NULL"),
        inner.map(lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    )
    one = st.lists(element, max_size=4)

    def brace(parts: list[str]) -> str:
        return "{" + delimiter.join(parts) + "}"

    two = st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(element, min_size=width, max_size=width).map(brace), min_size=1, max_size=3
        ).map(brace)
    )
    shifted = st.tuples(st.lists(element, min_size=1, max_size=3), st.integers(-5, 5)).map(
        lambda v: f"[{v[1]}:{v[1] + len(v[0]) - 1}]={brace(v[0])}"
    )
    return st.one_of(one.map(brace), two, shifted)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def ranges(
    inner: st.SearchStrategy[Any], show: Callable[[Any], str] = str
) -> st.SearchStrategy[str]:
    """Ranges of values that Python orders as the server does."""
    return st.one_of(
        st.just("empty"),
        st.tuples(
            st.lists(inner, min_size=2, max_size=2).map(sorted),
            st.sampled_from(["[]", "[)", "(]", "()"]),
            st.tuples(st.booleans(), st.booleans()),
        ).map(
            lambda v: (
                v[1][0]
                + ("" if v[2][0] else quoted(show(v[0][0])))
                + ","
                + ("" if v[2][1] else quoted(show(v[0][1])))
                + v[1][1]
            )
        ),
    )


def multi(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}")


def record(*fields: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    nullable = [st.one_of(st.just(""), field.map(quoted)) for field in fields]
    return st.tuples(*nullable).map(lambda parts: "(" + ",".join(parts) + ")")


def reg(*names: str) -> st.SearchStrategy[str]:
    """Names that the server knows, and the OID of nothing."""
    return st.sampled_from([*names, "4294967295"])


def equally_long(corners: tuple[str, str]) -> str:
    """Two corners of a cube, the longer one cut."""
    numbers = [corner[1:-1].split(",") for corner in corners]
    width = min(map(len, numbers))
    return ",".join(f"({','.join(corner[:width])})" for corner in numbers)


moods = st.sampled_from(["sad", "", "with space", "q'y\"z", "NULL", "ünï", "{},"])
int4ranges = ranges(st.integers(-1000, 1000))
int8ranges = ranges(st.integers(-(2**60), 2**60))
numranges = ranges(st.decimals(-(10**9), 10**9, places=3))
dateranges = ranges(st.dates().filter(lambda day: day.year < 9999))
tsranges = ranges(st.datetimes())
tstzranges = ranges(st.datetimes(), lambda value: f"{value}+00")
textranges = ranges(st.text("abc", max_size=4), lambda text: text and text + '"\\,( ')
addrs = record(texts, prices, array(texts), int4ranges, moods)
corners = st.lists(finite, min_size=1, max_size=3).map(lambda v: f"({','.join(v)})")
small = st.floats(-1000, 1000, width=16).map(repr)

VALUES: dict[str, st.SearchStrategy[str]] = {
    "bool": st.sampled_from(["t", "f"]),
    "bytea": hexes,
    '"char"': st.integers(1, 255).map(lambda n: chr(n) if n < 128 else f"\\{n:03o}") | st.just(""),
    "name": texts.filter(lambda text: len(text.encode()) < 64),
    "int2": integers(16),
    "int4": integers(32),
    "int8": integers(64),
    "int2vector": st.lists(integers(16), max_size=4).map(" ".join),
    "oidvector": st.lists(unsigned(32), max_size=4).map(" ".join),
    "oid": unsigned(32),
    "xid": unsigned(32),
    "cid": unsigned(32),
    "xid8": unsigned(64),
    "tid": st.tuples(unsigned(32), unsigned(16)).map(lambda v: f"({v[0]},{v[1]})"),
    "text": texts,
    "varchar": texts,
    "bpchar": texts,
    "char(5)": st.text("ab ü", max_size=5),
    "refcursor": texts,
    "json": jsons,
    "jsonb": jsons.filter(lambda text: "\\u0000" not in text),
    "jsonpath": st.sampled_from(["$", "$.a[*]", 'strict $."b c" ? (@ > 1.5)', "$.x + -1"]),
    "xml": st.sampled_from(["<a/>", "text", "<a b='c'>ü</a>", "<?xml version='1.0'?><a/>"]),
    "float4": floats4,
    "float8": floats8,
    "numeric": decimals,
    "numeric(30,10)": st.decimals(-(10**19), 10**19, places=10).map(lambda v: f"{v:f}"),
    "money": integers(63).map(lambda text: f"{int(text) // 100}.{abs(int(text)) % 100:02d}"),
    "date": dates,
    "time": times,
    "timetz": timetzs,
    "timestamp": timestamps,
    "timestamptz": timestamptzs,
    "interval": intervals,
    "uuid": uuids,
    "inet": st.one_of(ips, st.tuples(ipv4, st.integers(0, 32)).map(lambda v: f"{v[0]}/{v[1]}")),
    "cidr": ips,
    "macaddr": macs,
    "macaddr8": macs8,
    "bit(11)": st.text("01", min_size=11, max_size=11),
    "varbit": st.text("01", max_size=40),
    "pg_lsn": lsns,
    "pg_snapshot": st.sampled_from(["1:1:", "10:20:10,14,15", "1:9223372036854775807:"]),
    "txid_snapshot": st.sampled_from(["1:1:", "10:20:10,14,15"]),
    "tsvector": st.lists(
        st.tuples(lexemes, st.sampled_from(["", ":3", ":1A,2B", ":16383C"])).map("".join),
        max_size=4,
    ).map(" ".join),
    "tsquery": st.recursive(
        st.tuples(lexemes, st.sampled_from(["", ":*", ":A", ":BD"])).map("".join), tsquery,
        max_leaves=5,
    ),
    "point": points,
    "lseg": st.tuples(points, points).map(lambda v: f"[{v[0]},{v[1]}]"),
    "box": st.tuples(points, points).map(",".join),
    "path": st.tuples(st.sampled_from(["()", "[]"]), st.lists(points, min_size=1, max_size=4)).map(
        lambda v: v[0][0] + ",".join(v[1]) + v[0][1]
    ),
    "polygon": st.lists(points, min_size=1, max_size=4).map(lambda v: f"({','.join(v)})"),
    "line": st.tuples(st.floats(1, 9), finite, finite).map(lambda v: f"{{{v[0]},{v[1]},{v[2]}}}"),
    "circle": st.tuples(points, st.floats(0, 1e9)).map(lambda v: f"<{v[0]},{v[1]}>"),
    "regclass": reg("pg_class", "t", "-"),
    "regcollation": reg('"C"', '"POSIX"', "-"),
    "regconfig": reg("english", "simple", "-"),
    "regdictionary": reg("english_stem", "simple", "-"),
    "regnamespace": reg("pg_catalog", "public", "-"),
    "regoper": reg("|/", "||/", "0"),
    "regoperator": reg("+(integer,integer)", "-(NONE,bigint)", "0"),
    "regproc": reg("now", "array_in", "-"),
    "regprocedure": reg("sum(integer)", "now()", "-"),
    "regrole": reg("postgres", "pg_monitor", "-"),
    "regtype": reg("integer", "mood", "addr[]", "-"),
    "aclitem": st.sampled_from(["=r/postgres", "postgres=arwd*/postgres", "pg_monitor=U/postgres"]),
    "int4range": int4ranges,
    "int8range": int8ranges,
    "numrange": numranges,
    "daterange": dateranges,
    "tsrange": tsranges,
    "tstzrange": tstzranges,
    "int4multirange": multi(int4ranges),
    "int8multirange": multi(int8ranges),
    "nummultirange": multi(numranges),
    "datemultirange": multi(dateranges),
    "tsmultirange": multi(tsranges),
    "tstzmultirange": multi(tstzranges),
    "mood": moods,
    "feeling": moods,
    "home": addrs,
    "span": int4ranges,
    "cheap": prices,
    "price": prices,
    "ints": array(integers(32)),
    "addr": addrs,
    "nest": record(addrs, array(addrs), timestamptzs),
    "textrange": textranges,
    "textmultirange": multi(textranges),
    "vector": st.lists(small, min_size=1, max_size=5).map(lambda v: f"[{','.join(v)}]"),
    "vector(3)": st.lists(small, min_size=3, max_size=3).map(lambda v: f"[{','.join(v)}]"),
    "halfvec": st.lists(small, min_size=1, max_size=5).map(lambda v: f"[{','.join(v)}]"),
    "sparsevec": st.dictionaries(st.integers(1, 99), small, max_size=4).map(
        lambda v: "{" + ",".join(f"{at}:{number}" for at, number in v.items()) + "}/99"
    ),
    "hstore": st.dictionaries(texts, st.none() | texts, max_size=3).map(
        lambda v: ",".join(
            f"{quoted(key)}=>{'NULL' if part is None else quoted(part)}" for key, part in v.items()
        )
    ),
    "citext": texts,
    "ltree": st.lists(st.text("abc1", min_size=1, max_size=4), max_size=3).map(".".join),
    "lquery": st.sampled_from(["*", "a.*{1,2}.!b|c", "Top@.x_1%*", "*.a{,3}.b*"]),
    "ltxtquery": st.sampled_from(["a & !b", "(a | b*) & c@", "x_1%"]),
    "cube": st.one_of(corners, st.tuples(corners, corners).map(equally_long), st.just("()")),
    "geometry": st.tuples(finite, finite).map(lambda p: f"SRID=4326;POINT({p[0]} {p[1]})"),
    "geography": st.tuples(st.integers(-180, 180), st.integers(-90, 90)).map(
        lambda p: f"POINT({p[0]} {p[1]})"
    ),
    "seg": st.sampled_from(["1.50", "1 .. 2", "~3.0", "<5", "7 .."]),
    "ean13": st.sampled_from(["0220356483481", "9780306406157"]),
    "isbn": st.sampled_from(["0-306-40615-2"]),
    "query_int": st.sampled_from(["1&2", "(3|4)&!5"]),
}  # fmt: skip
FROM_BINARY_DIFFERENT = {"money"} | {name for name in VALUES if name.startswith("reg")}
"""Types whose text needs what the server alone knows."""
NO_BINARY = {"aclitem", "seg", "ean13", "isbn", "query_int"}
"""Types without a send function: text in binary format too, and the server refuses their arrays."""
NO_EQUALITY = {
    "json", "xml", "jsonpath", "point", "polygon", "path", "lseg", "box", "line", "circle",
    "pg_snapshot", "txid_snapshot", "refcursor", "tsquery", "lquery", "ltxtquery", "query_int",
    "geometry", "geography", "feeling", "home", "span",
}  # fmt: skip
"""Types of which only texts are compared: without an operator of equality (domains over what is
polymorphic have none) or with a geometric one, and tsquery, whose text does not say how the server
grouped equal operators.
"""
NO_ARRAYS = {"ints"} | NO_BINARY
"""Lists within lists do not say where an array ends and its elements, arrays themselves, begin."""
NOT_MADE = {
    "unknown": "no column has it since PostgreSQL 10",
    "gtsvector": "it is what indexes hold, and has no text to read",
    **dict.fromkeys(
        ["pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list",
         "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"],
        "the server makes its values, and reads none",
    ),
}  # fmt: skip
"""Types of the table of which nobody can insert a value, and why."""
