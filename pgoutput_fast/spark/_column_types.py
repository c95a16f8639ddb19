"""Choose the Spark type of a column, and how the columnar engine stores its values."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pgoutput_fast.columnar.fields import VARIANT, Field
from pgoutput_fast.columnar.mapping import field_of, text_field, without_functions
from pgoutput_fast.columnar.packed import packed
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.objects import Interval
from pgoutput_fast.policies import MOST_DIMENSIONS, Policies
from pgoutput_fast.settings import Settings
from pgoutput_fast.types import ColumnType
from pgoutput_fast.values import codec_of
from pgoutput_fast.values.temporal import interval_iso

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

# In each family, every type can hold all values of the types before it.
_INTEGERS = ("smallint", "int", "bigint")
_FLOATS = ("float", "double")
_KEEPS_ALL = Policies(infinity="text", out_of_range="text")


def arrow_schema(schema: StructType, zone: str = "UTC") -> pa.Schema:
    """Return the Arrow schema of record batches with the columns of a DataFrame."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # Before PySpark 4.1 the function has no such argument and uses UTC.
    takes_zone = "timezone" in inspect.signature(to_arrow_schema).parameters
    arguments: dict[str, Any] = {"timezone": zone} if takes_zone else {}
    return to_arrow_schema(schema, **arguments)


_TIMESTAMP = re.compile(r"`[^`]*`|\btimestamp\b")
"""The word `timestamp`, or a quoted name, which must stay as it is."""


def explicit(ddl: str) -> str:
    """Return DDL with `timestamp_ltz` for `timestamp`, whose meaning depends on the session.

    ``spark.sql.timestampType`` decides whether a plain `timestamp` is a point in time.
    """
    return _TIMESTAMP.sub(
        lambda match: "timestamp_ltz" if match[0] == "timestamp" else match[0], ddl
    )


def parsed(name: str, ddl: str) -> DataType:
    """Parse the DDL of one column's type.

    Raises
    ------
    PgOutputError
        This version of Spark lacks the type.
    """
    from pyspark.errors import ParseException
    from pyspark.sql import types as T  # noqa: N812 - its usual name

    try:
        return T.DataType.fromDDL(explicit(ddl))
    except ParseException as error:
        if hasattr(T, "TimeType") or "time" not in ddl:
            raise
        raise PgOutputError(
            f"column {name} has the type time, which needs Spark 4.1 or newer",
            code="not_supported",
            hint=("Give ", Argument("schema"), " with string for the column"),
        ) from error


def column_ddl(type_: ColumnType, settings: Settings, *, binary: bool) -> str:
    """Return Spark's type of a column, as DDL.

    Parameters
    ----------
    type_ : ColumnType
    settings : Settings
        With a policy of "text", a column becomes a string if Spark's type cannot hold all of its
        values. With `json` "parse", JSON becomes a variant. `numeric` chooses the type of numerics
        without a precision, and `arrays` the type of arrays.
    binary : bool
        Whether the server sends values of unknown types in binary format.
    """
    return _natural(type_, settings, binary=binary).spark_type


def policies_for(
    type_: ColumnType, wanted: str, settings: Settings
) -> tuple[Policies, bool] | None:
    """Return the policies with which Spark's type `wanted` holds each value unchanged.

    Returns
    -------
    Policies
        The policies of `settings`, except that an array may have any number of dimensions.
    bool
        Whether values of unknown types are to be binary.

    Returns None in place of both if `wanted` does not fit the column.
    """
    policies = settings.policies
    shaped = (replace(policies, arrays=n + 1) for n in range(MOST_DIMENSIONS))
    for candidate in (policies, *shaped):
        for binary in (False, True):
            used = replace(settings, policies=candidate)
            if _fits(column_ddl(type_, used, binary=binary), wanted):
                return candidate, binary
    return None


def _fits(ddl: str, wanted: str) -> bool:
    # Spark prints the names of a struct's fields without quotes, and a time with its precision.
    own_type, wanted = (re.sub(r"`|(?<=\btime)\(6\)", "", name) for name in (ddl, wanted))
    if own_type == wanted or wanted == "string":
        return True
    for family in (_INTEGERS, _FLOATS):
        if own_type in family and wanted in family:
            return family.index(own_type) <= family.index(wanted)
    if own_type.startswith("decimal(") and wanted.startswith("decimal("):
        (precision, scale), (wanted_precision, wanted_scale) = (
            [int(number) for number in name[8:-1].split(",")] for name in (own_type, wanted)
        )
        return scale <= wanted_scale and precision - scale <= wanted_precision - wanted_scale
    return False


def is_text(type_: ColumnType, ddl: str) -> bool:
    """Return whether the column holds the server's text, not values of a type of its own."""
    if type_.entry is not None and type_.entry.codec == "interval":
        return False
    registered = type_.registered
    has_arrow = registered is not None and registered.arrow is not None
    return ddl == "string" and not (
        has_arrow and column_ddl(type_, Settings(), binary=False) == ddl
    )


def column_field(type_: ColumnType, settings: Settings, ddl: str, *, binary: bool) -> Field:
    """Return how the columnar engine stores a column for Spark.

    Parameters
    ----------
    type_ : ColumnType
    settings : Settings
        With the policies that :func:`policies_for` returned.
    ddl : str
        Spark's type. "string" fits every column; the column then holds the server's text.
    binary : bool
        As in :func:`column_ddl`.
    """
    if is_text(type_, ddl):
        return text_field(type_, settings)
    plain = without_functions(type_)
    entry = plain.entry
    if plain.registered is None and entry is not None and entry.codec == "numeric":
        # `policies_for` has checked that the wanted decimal holds all values of the column's own.
        precision, scale = _precision_and_scale(ddl)
        plain = plain._replace(modifier=(precision << 16 | scale) + 4)
    return _natural(plain, settings, binary=binary)


def _natural(type_: ColumnType, settings: Settings, *, binary: bool) -> Field:
    """Return the column that a type gets in Spark if the user asks for no other type."""

    def special(part: ColumnType, settings: Settings) -> Field | None:
        if part.registered is not None:
            return None
        codec = part.entry.codec if part.entry is not None else part.kind
        if codec == "interval":
            return _interval_field(part, settings)
        if codec in ("json", "jsonb") and settings.policies.json == "parse":
            return _variant_field(part, settings)
        if codec in ("unknown", "other"):
            return _unknown_field(part, settings, binary=binary)
        if codec == "array" and settings.policies.arrays == "text":
            return text_field(part, settings)
        return None

    return field_of(type_, settings, "spark", special=special)


def _precision_and_scale(ddl: str) -> tuple[int, int]:
    precision, scale = ddl.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)


def _unknown_field(type_: ColumnType, settings: Settings, *, binary: bool) -> Field:
    """Return the column of an unknown type: bytes if `binary`, else text, in either format."""
    codec, encoding = codec_of(type_, settings), settings.encoding

    def text(raw: bytes) -> bytes:
        return raw.decode(encoding).encode()

    if binary:
        return Field("", "z", text=text, binary=bytes)
    return Field("", "u", text=text, binary=lambda raw: codec.text_form(raw).encode())


def _variant_field(type_: ColumnType, settings: Settings) -> Field:
    exact = codec_of(type_, replace(settings, policies=_KEEPS_ALL))
    parts = (
        Field("value", "z", nullable=False),
        Field("metadata", "z", VARIANT, nullable=False),
    )
    return Field(
        "", "+s", children=parts,
        text=lambda raw: _variant(exact.text(raw)), binary=lambda raw: _variant(exact.binary(raw)),
    )  # fmt: skip


def _variant(value: str) -> bytes:
    from pyspark.sql.types import VariantVal

    try:
        variant = VariantVal.parseJson(value)
    except RecursionError:
        raise ValueError("the JSON is nested too deep for a variant") from None
    return packed((bytes(variant.value), bytes(variant.metadata)))


def _iso_interval(value: Interval | str) -> str:
    """Return an interval as the server writes it with IntervalStyle iso_8601."""
    return value if isinstance(value, str) else interval_iso(value)


def _interval_field(type_: ColumnType, settings: Settings) -> Field:
    exact = codec_of(type_, replace(settings, policies=_KEEPS_ALL))
    return Field(
        "",
        "u",
        text=lambda raw: _iso_interval(exact.text(raw)).encode(),
        binary=lambda raw: _iso_interval(exact.binary(raw)).encode(),
    )
