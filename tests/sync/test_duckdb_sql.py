"""Equality in DuckDB's SQL, which is that of the fold."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgoutput_fast.apply.duckdb_sql import same
from pgoutput_fast.apply.keys import rows_as_bytes

duckdb = pytest.importorskip("duckdb")

_FLOATS = st.sampled_from([0.0, -0.0, float("nan"), -float("nan"), 1.5, float("-inf")])
_LEAVES = st.sampled_from(
    [
        (pa.float64(), _FLOATS),
        (pa.float32(), _FLOATS),
        (pa.string(), st.sampled_from(["", " ", "0", "-0"])),
        (pa.int64(), st.integers(0, 2)),
    ]
)


def _nested(parts: Any) -> Any:
    return st.one_of(
        parts.map(lambda of: (pa.list_(of[0]), st.lists(st.none() | of[1], max_size=2))),
        st.lists(parts, min_size=1, max_size=2).map(
            lambda fields: (
                pa.struct([(f"f {i}", type_) for i, (type_, _) in enumerate(fields)]),
                st.fixed_dictionaries(
                    {f"f {i}": st.none() | of for i, (_, of) in enumerate(fields)}
                ),
            )
        ),
        parts.map(
            lambda of: (
                pa.map_(pa.string(), of[0]),
                st.dictionaries(st.sampled_from("ab"), of[1], max_size=2).map(
                    lambda found: sorted(found.items())
                ),
            )
        ),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(of=st.recursive(_LEAVES, _nested, max_leaves=4), data=st.data())
def test_values_are_the_same_if_their_bytes_are(of: Any, data: st.DataObject) -> None:
    type_, values = of
    pairs = data.draw(st.lists(st.tuples(st.none() | values, st.none() | values), max_size=8))
    left, right = (pa.array([pair[i] for pair in pairs], type_) for i in (0, 1))
    names = pa.schema([('the "column"', type_)])
    with duckdb.connect() as connection:
        for name, column in (("s", left), ("n", right)):
            table = pa.table([column, pa.array(range(len(pairs)))], [*names.names, "i"])
            connection.register(name, table)
        found = connection.execute(
            f"SELECT {same(names, names.names, nulls=True)}, {same(names, names.names)} "
            "FROM s JOIN n USING (i) ORDER BY i"
        ).fetchall()
    packed = [rows_as_bytes([column], len(column)).to_pylist() for column in (left, right)]
    expected = [one == other for one, other in zip(*packed, strict=True)]
    assert [row[0] for row in found] == expected
    assert [bool(row[1]) for row in found] == [
        one and pair[0] is not None for one, pair in zip(expected, pairs, strict=True)
    ]
