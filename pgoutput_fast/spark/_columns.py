"""Spark's types of columns, and their values as pyarrow takes them.

Values of Spark's nested types are tuples here: of an array's elements, of a struct's fields, of a
map's pairs. A list is only ever the dimension of an array that is not checked yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.layout import CONVERTERS, Field, field_of, interval_iso, text_field
from pgoutput_fast.objects import Array, Interval, Range, SparseVector
from pgoutput_fast.plan import Settings
from pgoutput_fast.policies import MOST_DIMENSIONS, Policies
from pgoutput_fast.types import ColumnType, decimal_shape, spark_type
from pgoutput_fast.values import Codec, OutOfRange, codec_of

# Spark's types, each of which holds all values of those before it.
_INTEGERS = ("smallint", "int", "bigint")
_FLOATS = ("float", "double")
_RANGE = "lower_inc:boolean,upper_inc:boolean,empty:boolean"
_KEEPS_ALL = Policies(infinity="text", out_of_range="text")


def column_ddl(type_: ColumnType, policies: Policies, *, binary: bool) -> str:
    """Spark's type of a column, as DDL.

    Parameters
    ----------
    type_ : ColumnType
    policies : Policies
        "text" makes a column string whose type could not hold some of its values; `json` "parse"
        makes JSON a variant; `numeric` and `arrays` choose the shapes of theirs.
    binary : bool
        Values of unknown types come in binary format.
    """

    def ddl(part: ColumnType) -> str:
        return column_ddl(part, policies, binary=binary)

    if type_.registered is not None and type_.registered.arrow is not None:
        return _registered_ddl(type_.registered.arrow)
    if type_.kind == "composite":
        fields = (f"`{name.replace('`', '``')}`:{ddl(field)}" for name, field in type_.fields)
        return f"struct<{','.join(fields)}>"
    if type_.kind == "array" and policies.arrays == "text":
        return "string"
    if type_.element is not None:
        element = ddl(type_.element)
        if type_.kind == "range":
            return f"struct<lower:{element},upper:{element},{_RANGE}>"
        dimensions = _dimensions(type_, policies)
        return "array<" * dimensions + element + ">" * dimensions
    found = spark_type(type_, binary=binary)
    entry = type_.entry
    if entry is None or (found == "string" and entry.codec not in ("numeric", "json", "jsonb")):
        return found
    if entry.codec == "numeric" and decimal_shape(type_.modifier) is None and policies.numeric:
        found = f"decimal({policies.numeric[0]},{policies.numeric[1]})"
    if "json" in entry.policies and policies.json == "parse":
        return "variant"
    limits = {"infinity", "out_of_range", "special_values"}.intersection(entry.policies)
    return "string" if any(getattr(policies, name) == "text" for name in limits) else found


def _registered_ddl(arrow: Any) -> str:
    """Spark's type of the Arrow type that a user registered."""
    import pyarrow as pa
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        found = pa.type_for_alias(arrow) if isinstance(arrow, str) else arrow
        return from_arrow_type(found).simpleString()
    except (ValueError, TypeError, PySparkException) as error:
        raise PgOutputError(
            f"a type was registered with arrow={arrow!r}, which is no Arrow type that Spark has: "
            f"{error}"
        ) from error


def _dimensions(type_: ColumnType, policies: Policies) -> int:
    """How many of them all values have that are arrays in Spark."""
    return policies.arrays if type_.kind == "array" and isinstance(policies.arrays, int) else 1


def policies_for(
    type_: ColumnType, wanted: str, policies: Policies
) -> tuple[Policies, bool] | None:
    """The policies by which Spark's type `wanted` holds every value of the column as it is.

    Arrays may be wanted with any number of dimensions. The second is whether values of unknown
    types are to be binary. None if the type does not fit.
    """
    shaped = (replace(policies, arrays=n + 1) for n in range(MOST_DIMENSIONS))
    for candidate in (policies, *shaped):
        for binary in (False, True):
            if _fits(column_ddl(type_, candidate, binary=binary), wanted):
                return candidate, binary
    return None


def _fits(ddl: str, wanted: str) -> bool:
    # Spark shows a struct without the quotes of its fields' names, and a time with its precision.
    found, wanted = (re.sub(r"`|(?<=\btime)\(6\)", "", name) for name in (ddl, wanted))
    if found == wanted or wanted == "string":
        return True
    for family in (_INTEGERS, _FLOATS):
        if found in family and wanted in family:
            return family.index(found) <= family.index(wanted)
    if found.startswith("decimal(") and wanted.startswith("decimal("):
        (precision, scale), (wanted_precision, wanted_scale) = (
            [int(number) for number in name[8:-1].split(",")] for name in (found, wanted)
        )
        return scale <= wanted_scale and precision - scale <= wanted_precision - wanted_scale
    return False


def is_plain(type_: ColumnType) -> bool:
    """Whether the decoder's own value is what pyarrow takes, where the column is no string.

    Of a numeric, where it is finite.
    """
    entry = type_.entry
    return (
        type_.kind == "base"
        and entry is not None
        and type_.registered is None
        and not entry.extension
        and entry.codec not in ("json", "jsonb")
    )


def is_text(type_: ColumnType, ddl: str) -> bool:
    """Whether the column has the server's text."""
    if type_.entry is not None and type_.entry.codec == "interval":
        return False
    registered = type_.registered
    made = registered is not None and registered.arrow is not None
    return ddl == "string" and not (made and column_ddl(type_, Policies(), binary=False) == ddl)


def column_field(
    type_: ColumnType, settings: Settings, ddl: str, *, binary: bool
) -> tuple[Field, Codec | None]:
    """How the columnar engine stores a column, and what makes Spark's values of it.

    Parameters
    ----------
    type_, settings, ddl, binary
        As of :func:`column_codec`.

    Returns
    -------
    field : Field
    codec : Codec or None
        The field has the raw bytes of the values, of which these functions make what pyarrow takes.
        None: the field has the values as they are to be.
    """
    if is_text(type_, ddl):
        return text_field(type_, settings), None
    plain = _without_functions(type_)
    if is_plain(plain) and plain.entry is not None:
        if plain.entry.codec == "interval":
            return _interval_field(plain, settings), None
        if plain.entry.codec == "numeric":
            # The decimal that is wanted holds more than the column's own, or as much.
            precision, scale = _precision_and_scale(ddl)
            plain = replace(plain, modifier=(precision << 16 | scale) + 4)
        return field_of(plain, settings, "spark"), None
    code = CONVERTERS["bytes"]
    raw = Field("", "z", text=bytes, binary=bytes, text_code=code, binary_code=code, by_format=True)
    return raw, column_codec(type_, settings, ddl, binary=binary)


def column_codec(type_: ColumnType, settings: Settings, ddl: str, *, binary: bool) -> Codec:
    """The functions from a value's bytes to what pyarrow takes for Spark's type.

    Parameters
    ----------
    type_ : ColumnType
    settings : Settings
        With policies of :func:`policies_for`.
    ddl : str
        Spark's type; "string" takes the text of any value.
    binary : bool
        As of :func:`column_ddl`.
    """

    def shaped(part: ColumnType, codec: Codec, encoding: str) -> Codec:
        name = ddl if part is top else column_ddl(part, settings.policies, binary=binary)
        return _shaped(part, codec, name, replace(settings, encoding=encoding))

    top = _without_functions(type_)
    return codec_of(top, settings, shaped)


def _without_functions(type_: ColumnType) -> ColumnType:
    """The type without registered functions whose values are of no known Arrow type."""
    registered = type_.registered
    if registered is not None and registered.arrow is None:
        registered = None
    return replace(
        type_,
        registered=registered,
        element=None if type_.element is None else _without_functions(type_.element),
        fields=tuple((name, _without_functions(field)) for name, field in type_.fields),
    )


def _shaped(type_: ColumnType, codec: Codec, ddl: str, settings: Settings) -> Codec:
    """The functions of a type or of a part of one, made to give what pyarrow takes."""
    if type_.registered is not None:
        return codec
    entry = type_.entry
    kind = entry.codec if entry is not None and type_.kind == "base" else type_.kind
    if kind == "interval":
        # Whatever it is, a string holds it.
        exact = codec_of(type_, replace(settings, policies=_KEEPS_ALL))
        return _then(exact, _iso_interval)
    if ddl == "string":
        encoding = settings.encoding
        return codec._replace(text=lambda raw: raw.decode(encoding), binary=codec.text_form)
    if kind in ("json", "jsonb"):
        exact = codec_of(type_, replace(settings, policies=_KEEPS_ALL))
        return _then(exact, _variant)
    if kind == "numeric":
        return _then(codec, decimal_check(ddl, settings.policies.special_values))
    if kind == "array":
        return _then(codec, _array(_dimensions(type_, settings.policies)))
    return _then(codec, _AFTER[kind]) if kind in _AFTER else codec


def _then(codec: Codec, after: Callable[[Any], Any]) -> Codec:
    """The functions, and then another; a policy may have made NULL of the value."""

    def follow(first: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def both(raw: bytes) -> Any:
            value = first(raw)
            return None if value is None else after(value)

        return both

    return codec._replace(text=follow(codec.text), binary=follow(codec.binary))


def _range(value: Range[Any]) -> tuple[Any, ...]:
    return value.lower, value.upper, value.lower_inc, value.upper_inc, value.empty


def _sparse_vector(value: SparseVector) -> tuple[Any, ...]:
    return value.dim, value.indices, value.values


_AFTER: dict[str, Callable[[Any], Any]] = {
    "vector": tuple,
    "multirange": tuple,
    "pgvector": tuple,
    "halfvec": tuple,
    "range": _range,
    "hstore": lambda value: tuple(value.items()),
    "sparsevec": _sparse_vector,
}


def _array(dimensions: int) -> Callable[[Any], Any]:
    def check(value: list[Any]) -> tuple[Any, ...]:
        if not value:
            return ()  # of no dimension at all, and in Spark like one of any
        found = 0
        inner: Any = value
        while isinstance(inner, list):
            found += 1
            inner = inner[0]
        if found != dimensions or isinstance(value, Array):
            lowers = f" counted from {value.lower_bounds}" if isinstance(value, Array) else ""
            plural = "s" * (found > 1)
            raise OutOfRange(
                f"an array of {found} dimension{plural}{lowers} does not fit where all have "
                f"{dimensions}, counted from 1; Policies(arrays=...) can make it text, or have "
                "another number of dimensions, and so can schema= for a column"
            )
        return tuple(value)

    return check


def decimal_check(ddl: str, choice: str) -> Callable[[Decimal], Decimal | None]:
    """What makes of NaN and ±Infinity, which Spark's decimals have not, what the policy says."""
    precision, scale = _precision_and_scale(ddl)
    greatest = Decimal((0, (9,) * precision, -scale))

    def check(value: Decimal) -> Decimal | None:
        if value.is_finite():
            return value
        if choice == "null":
            return None
        if choice == "clamp" and value.is_infinite():
            return greatest.copy_sign(value)
        ways = "None or text" if value.is_nan() else "None, the nearest value or text"
        raise OutOfRange(
            f"{value} does not fit into {ddl}; Policies(special_values=...) can make it {ways}, "
            "and schema= with the column as string takes its text"
        )

    return check


def _precision_and_scale(ddl: str) -> tuple[int, int]:
    precision, scale = ddl.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)


def _variant(value: str) -> dict[str, bytes]:
    from pyspark.sql.types import VariantVal

    try:
        made = VariantVal.parseJson(value)
    except RecursionError:
        raise ValueError("the JSON is nested too deep for a variant") from None
    return {"value": bytes(made.value), "metadata": bytes(made.metadata)}


def _iso_interval(value: Interval | str) -> str:
    """An interval as the server writes it with IntervalStyle iso_8601."""
    return value if isinstance(value, str) else interval_iso(value)


def _interval_field(type_: ColumnType, settings: Settings) -> Field:
    exact = codec_of(type_, replace(settings, policies=_KEEPS_ALL))
    return Field(
        "",
        "u",
        text=lambda raw: _iso_interval(exact.text(raw)).encode(),
        binary=lambda raw: _iso_interval(exact.binary(raw)).encode(),
    )
