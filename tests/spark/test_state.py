"""Current-state tables against a table that is simulated change by change."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from pyspark.errors import PySparkException

from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.spark.state import rows_after

pytestmark = pytest.mark.spark

ROW = "id int, part string, a double, big string, late string, late_default string"
COLUMNS = [column.split()[0] for column in ROW.split(", ")]
CHANGE = (
    "op string, commit_lsn bigint, seq bigint, old_kind string, "
    f"before struct<{ROW.replace(' ', ':')}>, after struct<{ROW.replace(' ', ':')}>, "
    "unchanged array<string>"
).replace(",:", ", ")
KEY = ["id", "part"]
DEFAULT = "as added"


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
        self.width = 4
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
        self.changes.append((op, self.commit_lsn, self.seq, old_kind, *rows, names or None))
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
        self.width = 6
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


def state(spark, changes, *, key=KEY, added=None):
    if added is None:
        added = {"late": None, "late_default": DEFAULT}
    shuffled = list(changes)
    random.Random(0).shuffle(shuffled)
    frame = spark.createDataFrame(shuffled, CHANGE).repartition(3)
    return Counter(shown(row) for row in rows_after(frame, table="s.t", key=key, added=added).collect())


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_of_a_table_with_a_key(spark, seed):
    server = Server(seed, full=seed % 3 == 2).run(400)
    assert state(spark, server.changes) == server.result()


@pytest.mark.parametrize("seed", range(2))
def test_random_histories_of_a_multiset(spark, seed):
    server = Server(seed, full=True, keyed=False).run(200)
    assert state(spark, server.changes, key=[]) == server.result()
