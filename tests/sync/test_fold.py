"""The net effect of changes: by hand, against a plain model, and what is refused."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.expected_errors import expect_error
from support.targets.histories import History, apply_net

import pgoutput_fast as pf
from pgoutput_fast import testing as t
from pgoutput_fast.apply import NetChanges, fold, row_stores
from pgoutput_fast.apply.keys import digests_of
from pgoutput_fast.errors import Argument

THINGS = t.Table("things", {"id": "int4", "name": "text", "note": "text"})
NAMED = t.Table("things", {"id": "int4", "name": "text", "note": "text"}, key=["name"])
WHOLE = t.Table("things", {"id": "int4", "note": "text"}, replica_identity="f")
OPEN = t.Table("things", {"id": "int4", "note": "text"}, replica_identity="n")
UNSENT = pf.UNCHANGED


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest) -> Any:
    """Each test, with each implementation."""
    with chosen(request.param):
        yield request.param


def batches(*frames: bytes, lsn: int = 0x100) -> list[Any]:
    """Change batches of one transaction."""
    return list(pf.ColumnarDecoder().decode([t.begin(1, lsn, 5), *frames, t.commit(lsn)]))


def folded(*frames: bytes, key: Sequence[str] | None = None) -> NetChanges:
    return fold(batches(*frames), key=key)


def shown(net: NetChanges) -> list[tuple[Any, ...]]:
    """op, row's values, expects, unchanged, from_ of each row."""
    return [
        (
            row["op"],
            tuple(row["row"].values()),
            row["expects"],
            row["unchanged"],
            row["from_"] and tuple(row["from_"].values()),
        )
        for row in net.rows.to_pylist()
    ]


def test_rows_that_differ_have_different_digests() -> None:
    """Also where one is the other with zero bytes behind it, or where columns have other parts."""
    values = [first + bytes(zeros) for first in (b"", b"\1", b"\2") for zeros in range(34)]
    one = pa.array([*values, None], pa.binary())
    pairs = list(itertools.product([*values[:12], None], repeat=2))
    two = [pa.array(side, pa.binary()) for side in zip(*pairs, strict=True)]
    numbers = pa.array([number % 5 for number in range(len(pairs))], pa.int32())
    for columns in ([one], two, [numbers, *two]):
        count = len(columns[0])
        assert len({*map(tuple, digests_of(columns, count).tolist())}) == count


def test_an_insert_is_expected_to_find_nothing() -> None:
    net = folded(THINGS.relation(), t.insert(THINGS, [1, "a", None]))
    assert shown(net) == [("upsert", (1, "a", None), "absent", None, None)]
    assert net[:4] == ("public.things", THINGS.relation_id, ("id",), False)


def test_the_last_values_count_and_the_last_change_is_named() -> None:
    net = folded(
        THINGS.relation(),
        t.update(THINGS, [1, "a", "x"]),
        t.insert(THINGS, [2, "b", None]),
        t.update(THINGS, [1, "c", "y"]),
    )
    assert shown(net) == [
        ("upsert", (2, "b", None), "absent", None, None),
        ("upsert", (1, "c", "y"), "present", None, None),
    ]
    assert net.rows.column("seq").to_pylist() == [1, 2]
    assert net.rows.column("commit_lsn").to_pylist() == [0x100, 0x100]
    assert net.rows.column("commit_time").cast(pa.int64()).to_pylist() == [946684800000005] * 2


def test_what_comes_and_goes_leaves_nothing_but_what_goes_leaves_a_delete() -> None:
    net = folded(
        THINGS.relation(),
        t.insert(THINGS, [1, "a", None]),
        t.delete(THINGS, {"id": 1}),
        t.delete(THINGS, {"id": 2}),
    )
    assert shown(net) == [("delete", (2, None, None), "present", None, None)]


def test_a_delete_and_an_insert_need_nothing_of_the_row_before() -> None:
    net = folded(THINGS.relation(), t.delete(THINGS, {"id": 1}), t.insert(THINGS, [1, "n", None]))
    assert shown(net) == [("upsert", (1, "n", None), "present", None, None)]


def test_a_moved_row_takes_what_was_not_sent_along() -> None:
    net = folded(
        THINGS.relation(),
        t.update(THINGS, [1, "sent", UNSENT]),
        t.update(THINGS, [2, UNSENT, UNSENT], old={"id": 1}),
        t.update(THINGS, [3, UNSENT, UNSENT], old={"id": 2}),
    )
    assert shown(net) == [
        ("delete", (1, None, None), "present", None, None),
        ("upsert", (3, "sent", None), "absent", ["note"], (1,)),
    ]


def test_two_rows_swap_their_keys() -> None:
    net = folded(
        THINGS.relation(),
        t.update(THINGS, [9, "one", UNSENT], old={"id": 1}),
        t.update(THINGS, [1, "two", UNSENT], old={"id": 2}),
        t.update(THINGS, [2, "one", UNSENT], old={"id": 9}),
    )
    assert shown(net) == [
        ("upsert", (1, "two", None), "present", ["note"], (2,)),
        ("upsert", (2, "one", None), "present", ["note"], (1,)),
    ]


def test_a_row_that_moves_away_and_back_has_not_moved() -> None:
    net = folded(
        THINGS.relation(),
        t.update(THINGS, [2, "x", UNSENT], old={"id": 1}),
        t.update(THINGS, [1, UNSENT, "y"], old={"id": 2}),
    )
    assert shown(net) == [("upsert", (1, "x", "y"), "present", None, None)]


def test_an_inserted_row_that_moves_comes_from_nowhere() -> None:
    net = folded(
        THINGS.relation(),
        t.insert(THINGS, [1, "a", "long"]),
        t.update(THINGS, [2, "b", UNSENT], old={"id": 1}),
    )
    assert shown(net) == [("upsert", (2, "b", "long"), "absent", None, None)]


def test_an_old_key_that_is_the_same_moves_nothing() -> None:
    # A key that is stored out of line brings its old value, and is itself not sent.
    net = folded(NAMED.relation(), t.update(NAMED, [1, UNSENT, "x"], old={"name": "long"}))
    assert shown(net) == [("upsert", (1, "long", "x"), "present", None, None)]


def test_a_truncate_voids_what_was_before() -> None:
    net = folded(
        THINGS.relation(),
        t.update(THINGS, [1, "a", "b"]),
        t.insert(THINGS, [2, "c", "d"]),
        t.truncate([THINGS]),
        t.insert(THINGS, [2, "e", None]),
    )
    assert net.truncated
    assert shown(net) == [("upsert", (2, "e", None), "any", None, None)]


def test_a_truncate_alone_leaves_no_rows() -> None:
    net = folded(THINGS.relation(), t.insert(THINGS, [2, "c", "d"]), t.truncate([THINGS]))
    assert net.truncated
    assert net.rows.num_rows == 0
    assert net.rows.schema.field("row").type.num_fields == 3


def test_rows_of_a_snapshot_are_inserts() -> None:
    (batch,) = batches(THINGS.relation(), t.truncate([THINGS]), t.insert(THINGS, [1, "a", "b"]))
    net = fold([batch.as_read(0x200, 0, 0)])
    assert net.truncated
    assert shown(net) == [("upsert", (1, "a", "b"), "any", None, None)]


def test_values_that_were_not_sent_come_from_a_whole_old_row() -> None:
    net = folded(
        WHOLE.relation(),
        t.update(WHOLE, [2, UNSENT], old=[1, "long"]),
        t.update(WHOLE, [3, UNSENT], old=[3, None]),  # of a partition with another identity
        key=["id"],
    )
    assert shown(net) == [
        ("delete", (1, None), "present", None, None),
        ("upsert", (2, "long"), "absent", None, (1,)),
        ("upsert", (3, None), "present", ["note"], None),
    ]
    with expect_error(code="no_key", table="public.things"):
        folded(WHOLE.relation(), t.update(WHOLE, [3, UNSENT], old=[3, None]))


def test_a_table_without_a_key_counts_its_rows() -> None:
    net = folded(
        WHOLE.relation(),
        t.insert(WHOLE, [1, None]),
        t.insert(WHOLE, [1, None]),
        t.insert(WHOLE, [2, "b"]),
        t.update(WHOLE, [4, UNSENT], old=[3, "long"]),
        t.delete(WHOLE, [2, "b"]),
        t.delete(WHOLE, [1, ""]),
    )
    rows = net.rows.to_pylist()
    assert [(row["op"], tuple(row["row"].values()), row["count"]) for row in rows] == [
        ("upsert", (1, None), 2),
        ("delete", (3, "long"), 1),
        ("upsert", (4, "long"), 1),
        ("delete", (1, ""), 1),
    ]
    assert [row["expects"] for row in rows] == ["any", "present", "any", "present"]
    assert net.key == ()


def test_a_truncate_of_a_table_without_a_key() -> None:
    rows = [t.insert(WHOLE, [1, "a"]), t.truncate([WHOLE]), t.insert(WHOLE, [2, "b"])]
    net = folded(WHOLE.relation(), *rows)
    assert net.truncated
    assert [tuple(row["row"].values()) for row in net.rows.to_pylist()] == [(2, "b")]
    with expect_error(code="unfit_row", table="public.things"):
        folded(WHOLE.relation(), *rows, t.delete(WHOLE, [1, "a"]))


def test_a_table_that_sends_no_old_rows_is_a_multiset_of_inserts() -> None:
    net = folded(OPEN.relation(), t.insert(OPEN, [1, "a"]), t.insert(OPEN, [1, "a"]))
    assert net.rows.column("count").to_pylist() == [2]


def test_a_column_that_came_is_unknown_in_rows_from_before_and_known_after() -> None:
    wider = t.Table("things", {"id": "int4", "name": "text", "note": "text", "more": "int4"})
    net = folded(
        THINGS.relation(),
        t.insert(THINGS, [1, "a", "b"]),
        t.update(THINGS, [2, "c", "d"]),
        t.insert(THINGS, [3, "e", "f"]),
        wider.relation(),
        t.update(wider, [3, "e", UNSENT, 7]),
        t.update(wider, [2, "g", "h", UNSENT]),
        t.insert(wider, [4, "i", "j", None]),
    )
    assert shown(net) == [
        ("upsert", (1, "a", "b", None), "absent", ["more"], None),
        ("upsert", (3, "e", "f", 7), "absent", None, None),
        ("upsert", (2, "g", "h", None), "present", ["more"], None),
        ("upsert", (4, "i", "j", None), "absent", None, None),
    ]


def test_a_column_that_went_and_came_again_is_another_one() -> None:
    narrower = t.Table("things", {"id": "int4", "name": "text"})
    net = folded(
        THINGS.relation(),
        t.insert(THINGS, [1, "a", "old"]),
        t.insert(THINGS, [2, "b", "old"]),
        narrower.relation(),
        t.insert(narrower, [3, "c"]),
        THINGS.relation(),
        t.update(THINGS, [2, "d", "new"]),
    )
    assert shown(net) == [
        ("upsert", (1, "a", None), "absent", ["note"], None),
        ("upsert", (3, "c", None), "absent", ["note"], None),
        ("upsert", (2, "d", "new"), "absent", None, None),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("varchar(5)", "varchar(9)"),
        ("varchar(5)", "varchar"),
        ("varchar(5)", "text"),
        ("text", "varchar"),
        ("numeric(5,2)", "numeric(9,2)"),
        (("timestamp", 3), "timestamp"),
        (("timestamp", 3), ("timestamp", 6)),
    ],
)
def test_a_longer_type_evolves(before: Any, after: Any) -> None:
    old = t.Table("things", {"id": "int4", "value": before})
    new = t.Table("things", {"id": "int4", "value": after})
    text = {"numeric(5,2)": "1.25"}.get(str(before), "2020-01-01 00:00:00")
    net = folded(
        old.relation(),
        t.insert(old, [1, text]),
        t.update(old, [2, text]),
        new.relation(),
        t.update(new, [2, UNSENT]),
    )
    values = [row[1][1] for row in shown(net)]
    assert values[0] == values[1]
    assert str(values[0]) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("int4", "int8"),
        ("int4", "text"),
        ("text", "varchar(3)"),
        ("varchar(9)", "varchar(5)"),
        ("numeric(9,2)", "numeric(9,3)"),
        ("numeric(9,2)", "numeric(8,2)"),
        (("timestamp", 6), ("timestamp", 3)),
        ("timestamp", "timestamptz"),
    ],
)
def test_a_type_that_rewrites_the_table_is_refused(before: Any, after: Any) -> None:
    old = t.Table("things", {"id": "int4", "value": before})
    new = t.Table("things", {"id": "int4", "value": after})
    with expect_error(code="unfit_schema", table="public.things"):
        folded(old.relation(), t.insert(old, [1, None]), new.relation(), t.insert(new, [2, None]))


@pytest.mark.parametrize(
    "frames",
    [
        [t.insert(THINGS, [1, "a", "b"])] * 2,
        [t.delete(THINGS, {"id": 1})] * 2,
        [t.delete(THINGS, {"id": 1}), t.update(THINGS, [1, "a", "b"])],
        [t.truncate([THINGS]), t.update(THINGS, [3, "a", "b"])],
        [
            t.update(THINGS, [2, "a", "b"], old={"id": 1}),
            t.update(THINGS, [3, "a", "b"], old={"id": 1}),
        ],
        [t.update(THINGS, [5, "a", "b"]), t.update(THINGS, [5, "a", "b"], old={"id": 1})],
    ],
)
def test_changes_that_do_not_go_together_are_refused(frames: list[bytes]) -> None:
    with expect_error(code="unfit_row", table="public.things"):
        folded(THINGS.relation(), *frames)


def test_changes_come_once_and_in_order() -> None:
    first = batches(THINGS.relation(), t.insert(THINGS, [1, "a", "b"]))
    second = batches(THINGS.relation(), t.insert(THINGS, [2, "a", "b"]), lsn=0x80)
    for wrong in (first * 2, first + second):
        with expect_error(code="unfit_input", table="public.things"):
            fold(wrong)
    assert fold(second + first).rows.num_rows == 2


def test_changes_without_a_commit_are_refused() -> None:
    frames = [t.stream_start(7), THINGS.relation(7), t.insert(THINGS, [1, "a", "b"], 7)]
    with expect_error(code="incomplete", table="public.things"):
        fold(pf.ColumnarDecoder().decode([*frames, t.stream_stop()]))


def test_two_tables_are_refused() -> None:
    other = t.Table("things", {"id": "int4", "name": "text", "note": "text"}, relation_id=9)
    with expect_error(code="unfit_input", table="public.things"):
        folded(
            THINGS.relation(),
            t.insert(THINGS, [1, "a", "b"]),
            other.relation(),
            t.insert(other, [2, "a", "b"]),
        )


def test_wrong_keys_are_refused() -> None:
    given_batches = batches(THINGS.relation(), t.delete(THINGS, {"id": 1}))
    with expect_error(parameter="key", options=[Argument("key", ["id"])]):
        fold(given_batches, key="id")
    with expect_error(code="bad_option", parameter="key", table="public.things"):
        fold(given_batches, key=["nothing"])
    with expect_error(code="bad_option", parameter="key"):
        fold(given_batches, key=["id", "id"])
    with expect_error(code="null_key", table="public.things"):
        fold(given_batches, key=["name"])
    with expect_error(code="no_key", table="public.things"):
        fold(given_batches, key=[])
    with expect_error(code="unfit_input"):
        fold([])


def test_a_key_that_changes_is_refused() -> None:
    rows = [t.insert(THINGS, [1, "a", "b"]), NAMED.relation(), t.insert(NAMED, [2, "c", "d"])]
    with expect_error(code="unfit_schema", table="public.things"):
        folded(THINGS.relation(), *rows)


def test_arrow_batches_of_other_columns_are_refused() -> None:
    with expect_error(code="unfit_input"):
        fold([pa.record_batch({"a": [1]})])


@pytest.mark.parametrize(
    ("name", "value"), [("op", ["merge"]), ("unchanged", [["else"]]), ("unchanged", [["note"]])]
)
def test_batches_of_pyarrow_that_no_decoder_makes_are_refused(name: str, value: Any) -> None:
    (batch,) = map(pa.record_batch, batches(THINGS.relation(), t.insert(THINGS, [1, "a", None])))
    at = batch.schema.get_field_index(name)
    changed = batch.set_column(at, batch.schema.field(at), pa.array(value, batch.column(at).type))
    with expect_error(code="unfit_input", table="public.things"):
        fold([changed])


def test_tables_and_batches_of_pyarrow_are_taken() -> None:
    (batch,) = batches(THINGS.relation(), *(t.insert(THINGS, [i, str(i), "b"]) for i in range(9)))
    record_batch = pa.record_batch(batch)
    whole = fold([batch]).rows
    assert fold([record_batch[:4], record_batch[4:]]).rows.equals(whole)
    assert fold([pa.Table.from_batches([record_batch[2:4]])]).rows.equals(whole[2:4])


# --- against a plain model -----------------------------------------------------------------------

_TYPED = {"int4": int, "text": str, "numeric(12,2)": Decimal, "uuid": UUID}


def _typed(rows: dict[Any, Any], columns: dict[str, str], key: Sequence[str]) -> dict[Any, Any]:
    """A model's rows with typed values, by another order of the key's columns."""
    result = {}
    for row in rows.values():
        typed = {
            name: None if value is None else _TYPED[columns[name]](value)
            for name, value in row.items()
        }
        result[tuple(typed[name] for name in key)] = typed
    return result


def check_history(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold each window of a history by both implementations; its batches are cut anywhere."""
    module = sys.modules[fold.__module__]
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", chance.choice([4, 1 << 17]))
    monkeypatch.setattr(row_stores, "_MOST_BYTES", chance.choice([0, 1000, 1 << 20]))
    monkeypatch.setattr(row_stores, "_LEAST_ROWS", chance.choice([1, 5, 1 << 12]))
    history = History(chance)
    types = dict(history.columns)
    for window in history.windows(2):
        types |= history.columns
        frames_at_once = chance.choice([4, 1000, 1000])
        decoder = pf.ColumnarDecoder()
        changes = [
            pa.record_batch(batch)
            for i in range(0, len(window.frames), frames_at_once)
            for batch in decoder.decode(window.frames[i : i + frames_at_once])
        ]
        nets = []
        for name in IMPLEMENTATIONS if changes else ():
            with chosen(name):
                nets.append(fold(changes, key=history.key if history.full else None))
        if not nets:
            # Columns may have come or gone.
            assert window.before.keys() == window.after.keys()
            continue
        net = nets[0]
        assert net[:4] == nets[1][:4]
        assert net.rows.equals(nets[1].rows)
        net.rows.validate(full=True)
        before = _typed(window.before, types, net.key)
        sent = net.rows.schema.field("row").type.names
        columns = [name for name in sent if name in window.columns]
        expected = {
            key: {name: row.get(name) for name in columns}
            for key, row in _typed(window.after, types, net.key).items()
        }
        assert apply_net(net, before, columns) == expected


@pytest.mark.parametrize("implementation", ["cython"], indirect=True)
@settings(max_examples=40, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_net_changes_do_what_the_changes_do(chance: random.Random) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_history(chance, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["cython"], indirect=True)
@pytest.mark.parametrize("first", range(0, 1_500, 300))
def test_many_histories(first: int) -> None:
    for seed in range(first, first + 300):
        with pytest.MonkeyPatch.context() as monkeypatch:
            check_history(random.Random(seed), monkeypatch)


@pytest.mark.parametrize("changes", [None, 7, [None], ["x"], [[1]]])
def test_what_is_no_change_batch(changes: Any) -> None:
    with pytest.raises(TypeError, match="changes"):
        fold(changes)
