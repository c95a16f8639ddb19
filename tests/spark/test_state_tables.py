"""Current-state tables against a table that is simulated change by change."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from support.expected_errors import expect_error
from support.nightly import nightly
from support.sparks.spark_frames import (
    INT4,
    INT8,
    TEXT,
    insert,
    land,
    needs_time,
    partitions,
    relation,
    transaction,
    update,
)

from pgoutput_fast.catalog import CatalogColumn, CatalogTable
from pgoutput_fast.errors import Argument
from pgoutput_fast.spark import current_state, decode_frames, read_segments
from pgoutput_fast.spark._state_rows import united

pytestmark = pytest.mark.spark

ROW = "id int, part string, a double, big string, late string, late_default string"
COLUMNS = [column.split()[0] for column in ROW.split(", ")]
CHANGE = (
    "op string, commit_lsn bigint, seq bigint, old_kind string, "
    f"before struct<{ROW.replace(' ', ':')}>, after struct<{ROW.replace(' ', ':')}>, "
    "unchanged array<string>, relation string"
).replace(",:", ", ")
TYPES = {"id": 23, "a": 701}  # the others are text
KEY = ["id", "part"]
DEFAULT = "as added"


def described(names, types=TYPES, relation_id=1):
    """The column `relation` of a change that is the first with these columns."""
    columns = [
        {"name": name, "type_id": types.get(name, 25), "type_modifier": -1} for name in names
    ]
    metadata = {
        "namespace": "s", "relation": "t", "relation_id": str(relation_id),
        "replica_identity": "f", "key_columns": "[]", "columns": json.dumps(columns),
    }  # fmt: skip
    return json.dumps({f"pgoutput.{name}": value for name, value in metadata.items()})


class Server:
    """A table with a key of two columns, one of them long enough for TOAST at times.

    It keeps rows as PostgreSQL would show them and writes the changes as pgoutput would send them.
    """

    def __init__(self, seed, *, full=False, keyed=True):
        self.random = random.Random(seed)
        self.full = full
        self.keyed = keyed
        self.rows = []
        self.changes = []
        self.width, self.is_altered = 4, True
        self.commit_lsn = 1000
        self.seq = 0

    def toasted(self, value):
        return isinstance(value, str) and value.startswith("long")

    def value(self):
        number = self.random.randrange(1000)
        return self.random.choice([None, "", f"short{number}", f"long{number}", f"long{number}"])

    def emit(self, op, *, old_kind=None, before=None, after=None, unchanged=()):
        if self.random.random() < 0.3:
            self.commit_lsn += self.random.randrange(1, 50)
            self.seq = 0
        lacking = [] if op == "truncate" else COLUMNS[self.width :]
        names = [*unchanged, *lacking]
        rows = [
            None
            if row is None
            else tuple(None if name in lacking else row.get(name) for name in COLUMNS)
            for row in (before, after)
        ]
        told = described(COLUMNS[: self.width]) if self.is_altered else None
        self.is_altered = False
        self.changes.append((op, self.commit_lsn, self.seq, old_kind, *rows, names or None, told))
        self.seq += 1

    def shown(self, row):
        return {name: row[name] for name in COLUMNS}

    def old_tuple(self, row, new=None):
        if self.full:
            return "O", self.shown(row)
        changed = new is not None and any(row[name] != new[name] for name in KEY)
        if new is None or changed or any(self.toasted(row[name]) for name in KEY):
            return "K", {name: row[name] for name in KEY}
        return None, None

    def free_key(self):
        taken = {(row["id"], row["part"]) for row in self.rows}
        while True:
            key = self.random.randrange(6), self.random.choice(["x", "longpart"])
            if key not in taken or not self.keyed:
                return key
            if len(taken) >= 10:
                return self.random.randrange(100, 10**6), "x"

    def insert(self):
        number, part = self.free_key()
        row = dict.fromkeys(COLUMNS)
        row |= {"id": number, "part": part, "a": self.double(), "big": self.value()}
        if self.width > 4:
            row |= {"late": self.value(), "late_default": self.value()}
        self.rows.append(row)
        self.emit("insert", after=self.shown(row))

    def double(self):
        return self.random.choice([None, 0.0, -0.0, 1.5, float("nan"), float("inf")])

    def update(self, row, key=None):
        new = dict(row)
        if key is not None:
            new["id"], new["part"] = key
        for name in COLUMNS[2 : self.width]:
            if self.random.random() < 0.4:
                new[name] = self.double() if name == "a" else self.value()
        old_kind, before = self.old_tuple(row, new)
        after, unchanged = self.shown(new), []
        for name in COLUMNS[: self.width]:
            if self.toasted(new[name]) and new[name] == row[name]:
                after[name] = None
                unchanged.append(name)
        row.update(new)
        self.emit("update", old_kind=old_kind, before=before, after=after, unchanged=unchanged)

    def delete(self, row):
        self.rows.remove(row) if self.keyed else self.remove_one(row)
        old_kind, before = self.old_tuple(row)
        self.emit("delete", old_kind=old_kind, before=before)

    def remove_one(self, row):
        del self.rows[next(i for i, other in enumerate(self.rows) if other is row)]

    def swap(self, one, other):
        first, second = (one["id"], one["part"]), (other["id"], other["part"])
        self.update(one, (-1, "x"))
        self.update(other, first)
        self.update(one, second)

    def step(self):
        action = self.random.random()
        if not self.rows or action < 0.25:
            self.insert()
        elif action < 0.45:
            self.update(self.random.choice(self.rows))
        elif action < 0.65:
            self.update(self.random.choice(self.rows), self.free_key())
        elif action < 0.72 and len(self.rows) > 1:
            self.swap(*self.random.sample(self.rows, 2))
        elif action < 0.8:  # away and back, or gone and another one in its place
            row = self.random.choice(self.rows)
            key = row["id"], row["part"]
            self.update(row, (-2, "x"))
            if self.random.random() < 0.5:
                self.update(row, key)
            else:
                self.delete(row)
        elif action < 0.997:
            self.delete(self.random.choice(self.rows))
        else:
            self.rows.clear()
            self.emit("truncate")

    def add_columns(self):
        self.width, self.is_altered = 6, True
        for row in self.rows:
            row["late_default"] = DEFAULT

    def run(self, steps):
        for _ in range(steps):
            self.step()
        self.add_columns()
        for _ in range(steps):
            self.step()
        return self

    def result(self):
        return Counter(shown(row[name] for name in COLUMNS) for row in self.rows)


def shown(values):
    return tuple(repr(value) for value in values)  # tells -0.0 from 0.0, and NaN equals itself


def column(name, type_id=25, *, missing=None, has_default=False, not_null=False):
    return CatalogColumn(
        name, type_id, "", -1, not_null, has_default, "", missing is not None, missing
    )


def catalogued(*columns, key=("id",), file_node=1):
    numbered = (replace(known, number=n) for n, known in enumerate(columns, 1))
    return CatalogTable(
        1, "s", "t", "r", "d", None, (), tuple(key), (), tuple(numbered), (file_node,)
    )


def state(spark, changes, *, key=KEY, late=(), file_node=1, **options):
    """The rows after changes, which come in any order; `late` are other columns than they are."""
    known = {
        **{name: column(name, type_id) for name, type_id in TYPES.items()},
        "late_default": column("late_default", missing=DEFAULT),
    }
    known.update({one.name: one for one in late})
    table = catalogued(
        *(known.get(name, column(name)) for name in COLUMNS), key=key, file_node=file_node
    )
    shuffled = list(changes)
    random.Random(0).shuffle(shuffled)
    frame = spark.createDataFrame(shuffled, CHANGE)
    return Counter(shown(row) for row in current_state(frame, table, **options).collect())


@pytest.mark.everyday("1-0")
@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
@pytest.mark.parametrize("partitions", [3, 1])
def test_random_histories_of_a_table_with_a_key(spark, seed, partitions):
    server = Server(seed, full=seed == 2).run(500)
    assert state(spark, server.changes, partitions=partitions) == server.result()


def test_keys_that_moves_connect_are_united():
    chance = random.Random(3)
    edges = [(chance.randrange(3000), chance.randrange(3000)) for _ in range(1400)]
    edges += [(10_000 + i, 10_001 + i) for i in range(3000)]  # one chain
    chance.shuffle(edges)
    whole = {}
    for one, other in edges:  # united one by one
        merged = whole.get(one, {one}) | whole.get(other, {other})
        whole.update(dict.fromkeys(merged, merged))
    parts = [pa.record_batch(np.array(part).T.tolist(), ["a", "b"]) for part in
             (edges[:1000], edges[1000:])]  # fmt: skip
    found = dict(pair for batch in united(iter(parts)) for pair in zip(
        *(one.to_pylist() for one in batch.columns), strict=True))  # fmt: skip
    assert found == {one: min(merged) for one, merged in whole.items()}
    assert list(united(iter([]))) == []


def row(id_, big=None, *, part="x", a=None, late=None, late_default=None):
    return (id_, part, a, big, late, late_default)


def key_of(id_, part="x"):
    return (id_, part, None, None, None, None)


def numbered(*changes):
    """(op, old_kind, before, after, unchanged) as changes of one transaction each."""
    return [
        (op, 100 + n, 0, *rest, None if n else described(COLUMNS))
        for n, (op, *rest) in enumerate(changes)
    ]


def moved(source, target, *, unchanged=("big",)):
    return ("update", "K", key_of(source), row(target), list(unchanged))


@pytest.mark.slow
def test_a_long_chain_of_moves_keeps_what_was_sent_once(spark):
    changes = numbered(
        ("insert", None, None, row(0, "long"), None),
        *(moved(n, n + 1) for n in range(100)),
        # Others pass through the same keys meanwhile.
        ("insert", None, None, row(50, "another"), None),
        moved(50, 49),
        moved(100, 50),
    )
    assert state(spark, changes) == Counter([shown(row(50, "long")), shown(row(49, "another"))])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("update", None, None, row(2, "sent"), None),
        ("delete", "K", key_of(2), None, None),
        moved(2, 1, unchanged=()),
        ("insert", None, None, row(1), None),
    ],
    ids=["update", "delete", "move", "insert"],
)
def test_changes_of_rows_that_were_there_before_are_an_error(spark, change):
    """As where a slot was made after its table was filled."""
    changes = numbered(("insert", None, None, row(1, "here"), None), change)
    with expect_error(PySparkException, code="unfit_row", table="s.t"):
        state(spark, changes)


@pytest.mark.slow
def test_a_column_added_with_a_value_that_nobody_knows_is_an_error(spark):
    ((*change, _),) = numbered(("insert", None, None, row(1, "here"), ["late", "late_default"]))
    changes = [(*change, described(COLUMNS[:4]))]
    computed = column("late_default", has_default=True)
    for key in (KEY, []):
        with expect_error(PySparkException, code="unfit_row", table="s.t"):
            state(spark, changes, key=key, late=[computed])
    # A default that was dropped may have been written into the rows, where they were written anew.
    plain = column("late_default")
    with expect_error(PySparkException, code="unfit_row", table="s.t"):
        state(spark, changes, late=[plain], file_node=7)
    assert state(spark, changes, late=[plain]) == Counter([shown(row(1, "here"))])
    before = catalogued(column("id", 23), file_node=7)
    assert state(spark, changes, late=[plain], file_node=7, before=before) == Counter(
        [shown(row(1, "here"))]
    )


@pytest.mark.slow
def test_another_key_in_the_middle_is_an_error(spark):
    changes = numbered(
        ("insert", None, None, row(1, "here"), None),
        ("delete", "K", (None, "x", None, None, None, None), None, None),
    )
    with expect_error(PySparkException, code="null_key", table="s.t"):
        state(spark, changes)


def test_changes_without_their_place_are_an_error(spark):
    changes = [("insert", None, 0, None, None, row(1, "here"), None, None)]
    with expect_error(code="unfit_input", table="s.t"):
        state(spark, changes)
    with expect_error(code="unfit_input", table="s.t"):
        state(spark, numbered(("insert", None, None, row(1), None)), key=["none"])


@pytest.mark.slow
def test_without_a_key_an_update_needs_the_whole_old_row(spark):
    changes = numbered(("insert", None, None, row(1), None), moved(1, 2))
    with expect_error(PySparkException, options=[Argument("key")]):
        state(spark, changes, key=[])


@pytest.mark.slow
def test_an_old_row_of_a_partition_has_its_key_alone_though_it_is_called_whole(spark):
    """As the root has REPLICA IDENTITY FULL, and the partition has not."""
    changes = numbered(
        ("insert", None, None, row(1, "long"), None),
        ("update", "O", key_of(1), row(2), ["big"]),
    )
    assert state(spark, changes) == Counter([shown(row(2, "long"))])
    with expect_error(PySparkException, code="no_key", table="s.t"):
        state(spark, changes, key=[])


@pytest.mark.slow
def test_a_delete_of_a_row_that_was_never_seen_is_an_error_without_a_key_too(spark):
    changes = numbered(
        ("insert", None, None, row(1, "same"), None),
        ("delete", "O", row(1, "same"), None, None),
        ("delete", "O", row(1, "same"), None, None),
    )
    with expect_error(PySparkException, code="unfit_row", table="s.t"):
        state(spark, changes, key=[])


@pytest.mark.slow
@pytest.mark.parametrize("key", [KEY, []], ids=["key", "multiset"])
def test_a_snapshot_replaces_what_was_there_before(spark, key):
    """Its rows come after its TRUNCATE, and are there like inserted ones."""
    at = 50  # one below the point from which changes count
    read = [
        ("read", at, 1 << 32, None, None, row(1, "here"), None, None),
        ("read", at, 2 << 32, None, None, row(2, "here"), None, None),
        ("read", at, (2 << 32) + 1, None, None, row(3, "here"), None, None),
    ]
    changes = [
        ("insert", 10, 0, None, None, row(1, "before"), None, described(COLUMNS)),
        ("insert", 10, 1, None, None, row(9, "before"), None, None),
        ("truncate", at, 0, None, None, None, None, None),
        *read,
        ("update", 51, 0, "O", row(1, "here"), row(1, "changed"), None, None),
        ("delete", 51, 1, "O", row(2, "here"), None, None, None),
    ]
    assert state(spark, changes, key=key) == Counter(
        [shown(row(1, "changed")), shown(row(3, "here"))]
    )
    again = [*changes, ("truncate", 60, 0, None, None, None, None, None)]
    again += [("read", 60, *rest) for _, _, *rest in read[:2]]
    assert state(spark, again, key=key) == Counter([shown(row(1, "here")), shown(row(2, "here"))])


@pytest.mark.slow
@needs_time
def test_what_the_catalogue_knows_of_added_columns(spark):
    kinds = "id int, at timestamp, u string, raw binary, t time, flag boolean, none int, d date"
    change = (
        "op string, commit_lsn bigint, seq bigint, old_kind string, before struct<x:int>, after "
        f"struct<{', '.join(':'.join(kind.split()) for kind in kinds.split(', '))}>, "
        "unchanged array<string>, relation string"
    )
    names = [kind.split()[0] for kind in kinds.split(", ")]
    table = catalogued(
        column("id", 23, not_null=True),
        column("at", 1184, missing="2024-07-01 10:00:00.25+00"),
        column("u", 2950, missing="00000000-0000-4000-8000-00000000000a"),
        column("raw", 17, missing="\\x00ff"),
        column("t", 1083, missing="10:11:12.5"),
        column("flag", 16, missing="t"),
        column("none", 23),
        column("d", 1082, missing="1600-02-29"),
        column("later", 23),  # than all changes, as far as they tell
    )
    types = {known.name: known.type_id for known in table.columns}
    first, second = ((number, *[None] * 7) for number in (1, 2))
    # before has only what the schema above says; a table with a key asks it for the key alone
    changes = spark.createDataFrame(
        [
            ("insert", 100, 0, None, None, first, names[1:], described(["id"])),
            ("insert", 101, 0, None, None, second, None, described(names, types)),
        ],
        change.replace("struct<x:int>", change.split("after ")[1].split(", unchanged")[0]),
    )
    rows = current_state(changes, table).selectExpr("*", "cast(at as string) as shown")
    found, later = rows.orderBy("id").collect()
    assert tuple(later) == (2, *[None] * 9)
    assert found.shown == "2024-07-01 10:00:00.25"
    assert tuple(found)[2:8] == (
        "00000000-0000-4000-8000-00000000000a", b"\0\xff", dt.time(10, 11, 12, 500000), True, None,
        dt.date(1600, 2, 29),
    )  # fmt: skip


@pytest.mark.slow
def test_alterations_after_the_last_change(spark):
    def table(*columns, relation_id=1):
        known = (CatalogColumn(name, 23, "", -1, False, False, "", missing is not None, missing,
                               number) for name, number, missing in columns)  # fmt: skip
        return CatalogTable(
            relation_id, "s", "t", "r", "d", None, (), ("id",), (), tuple(known), (relation_id,)
        )

    types = dict.fromkeys(("id", "v"), 23)
    schema = (
        "op string, commit_lsn bigint, seq bigint, old_kind string, before struct<id:int,v:int>, "
        "after struct<id:int,v:int>, unchanged array<string>, relation string"
    )
    change = ("insert", 100, 0, None, None, (1, 2), None)
    changes = spark.createDataFrame([(*change, described(types, types))], schema)
    was = table(("id", 1, None), ("v", 2, None))
    for columns, names, expected in (
        ((("id", 1, None),), ["id"], (1,)),
        ((("id", 1, None), ("v", 2, None), ("late", 3, "7")), ["id", "v", "late"], (1, 2, 7)),
        ((("id", 1, None), ("w", 2, None)), ["id", "w"], (1, 2)),
    ):
        for before in (was, None):
            state = current_state(changes, table(*columns), before=before)
            assert (state.columns, tuple(state.first())) == (names, expected)
    again = table(("id", 1, None), ("v", 3, None), ("late", 4, "7"))
    assert tuple(current_state(changes, again, before=was).first()) == (1, None, 7)
    # Another column has the name of one that was dropped: the catalogue's numbers tell. Without the
    # table from before, they may also tell that a column was dropped before the first change.
    for now, before in (
        (table(("id", 1, None), ("v", 3, "4")), was),
        (again, None),
        (table(("v", 1, None), ("id", 2, None)), None),
    ):
        with expect_error(PySparkException, code="unfit_row", table="s.t"):
            current_state(changes, now, before=before).collect()
    with expect_error(code="another_history", table="s.t"):
        current_state(changes, table(("id", 1, None), ("v", 2, None), relation_id=2))
    # Nothing says what these changes are.
    with expect_error(code="unfit_input", table="s.t"):
        current_state(changes.drop("relation"), was)
    with expect_error(PySparkException, code="unfit_input", table="s.t"):
        current_state(spark.createDataFrame([(*change, None)], schema), was).collect()


@pytest.mark.slow
def test_random_histories_of_a_multiset(spark):
    server = Server(5, full=True, keyed=False).run(200)
    assert state(spark, server.changes, key=[]) == server.result()


def altered(last):
    """A table that is renamed, loses `d` and gets `c`; `last` is the type of `n` in the end."""
    return [
        relation(1, "old", {"id": INT4, "n": INT4, "d": TEXT}),
        *transaction(100, 7, insert(1, "1", "11", "10"), insert(1, "2", "21", "20")),
        relation(1, "t", {"id": INT4, "n": INT4}, namespace="s"),
        *transaction(200, 8, update(1, ["1", "12"])),
        relation(1, "t", {"id": INT4, "n": last, "c": INT4}, namespace="s"),
        *transaction(300, 9, insert(1, "3", "31", "30")),
    ]


@pytest.mark.slow
def test_what_relations_tell(spark, tmp_path):
    def table(type_):
        columns = (column("id", 23), column("n", type_), column("c", 23, missing="5"))
        numbered = tuple(map(lambda known, n: replace(known, number=n), columns, (1, 2, 4)))
        return CatalogTable(1, "s", "t", "r", "d", None, (), ("id",), (), numbered, (1,))

    changes = read_segments(spark, land(tmp_path / "same", altered(INT4)), "s.t")
    found = current_state(changes, table(23))
    assert found.columns == ["id", "n", "c"]
    assert sorted(map(tuple, found.collect())) == [(1, 12, 5), (2, 21, 5), (3, 31, 30)]
    changes = read_segments(spark, land(tmp_path / "other", altered(INT8)), "s.t")
    with expect_error(PySparkException, code="unfit_row", table="s.t"):
        current_state(changes, table(20)).collect()


@pytest.mark.slow
def test_a_table_made_again_is_no_guess_where_its_relation_is_given(spark):
    frames = partitions(
        spark,
        [relation(1, "t", {"id": INT4}), *transaction(100, 7, insert(1, "1")),
         relation(2, "t", {"id": INT4}), *transaction(200, 8, insert(2, "2"))],
    )  # fmt: skip
    assert [row.after.id for row in decode_frames(frames, "public.t").collect()] == [2]
    given = [relation(oid, "t", {"id": INT4}) for oid in (1, 2)]
    for oid in (1, 2):
        changes = decode_frames(frames, "public.t", [given[oid - 1]])
        with expect_error(PySparkException, code="another_history", table="public.t"):
            changes.collect()
    changes = decode_frames(frames, "public.t", given)
    assert [row.after.id for row in changes.collect()] == [2]


def test_arguments_that_can_not_be(spark):
    changes = spark.createDataFrame([], CHANGE)
    with expect_error(parameter="partitions"):
        current_state(changes, catalogued(column("id", 23)), partitions=0)
