"""Histories of a table, as frames and as what a plain model makes of them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pgoutput_fast as pf
from pgoutput_fast import testing as t

__all__ = ["History", "apply_net"]

Row = dict[str, Any]
Key = tuple[Any, ...]

TYPES = {"int4": int, "text": str, "numeric(12,2)": str, "uuid": str}


@dataclasses.dataclass
class Window:
    """Changes between two commits, with what the table holds before and after them.

    `columns` are those that the table has after them; the last changes may have been before some of
    them came or went.
    """

    frames: list[bytes]
    before: dict[Key, Row]
    after: dict[Key, Row]
    columns: tuple[str, ...]


class History:
    """A random table, changed at random; values are text, as the frames have them.

    Parameters
    ----------
    chance : random.Random
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.key = chance.choice(
            [["id"], ["id"], ["name"], ["id", "name"], ["name", "id"], ["amount"], ["code"]]
        )
        self.full = chance.random() < 0.25
        self.columns = {
            "id": "int4", "name": "text", "amount": "numeric(12,2)", "code": "uuid", "long": "text",
        }  # fmt: skip
        self.rows: dict[Key, Row] = {}
        self.lsn = 0x1000
        self.added = 0
        self.announced = False
        self._made = self._table()

    def _table(self) -> t.Table:
        if self.full:
            return t.Table("things", self.columns, replica_identity="f")
        return t.Table("things", self.columns, key=self.key)

    def windows(self, count: int) -> Iterator[Window]:
        """So many stretches of the stream; each can be decoded alone."""
        for _ in range(count):
            self.announced = False
            before = {key: dict(row) for key, row in self.rows.items()}
            frames: list[bytes] = []
            for _ in range(self.chance.randint(1, 4)):
                frames += self._transaction()
            after = {key: dict(row) for key, row in self.rows.items()}
            yield Window(frames, before, after, tuple(self.columns))

    def _transaction(self) -> Iterator[bytes]:
        self.lsn += self.chance.randint(1, 500)
        yield t.begin(7, self.lsn, self.lsn * 1000)
        for _ in range(self.chance.choice([1, 1, 2, 5, 20])):
            yield from self._change()
        yield t.commit(self.lsn, self.lsn + 8, self.lsn * 1000)

    def _change(self) -> Iterator[bytes]:
        chance = self.chance
        if chance.random() < 0.02:
            self._alter()
        if not self.announced:
            self.announced = True
            yield from self._made.announcement()
        draw = chance.random()
        if draw < 0.02:
            self.rows.clear()
            yield t.truncate([self._made])
        elif draw < 0.4 or not self.rows:
            row = {name: self._value(name) for name in self.columns}
            if self._key_of(row) not in self.rows:
                self.rows[self._key_of(row)] = row
                yield t.insert(self._made, row)
        elif draw < 0.6:
            row = self.rows.pop(chance.choice(list(self.rows)))
            yield t.delete(self._made, row if self.full else self._key_row(row))
        elif draw < 0.68 and len(self.rows) > 1:
            yield from self._swap()
        else:
            key = chance.choice(list(self.rows))
            new = dict(self.rows[key])
            for name in self.columns:
                if name not in self.key and chance.random() < 0.5:
                    new[name] = self._value(name)
            if chance.random() < 0.3:
                for name in self.key:
                    new[name] = self._value(name)
                if self._key_of(new) != key and self._key_of(new) in self.rows:
                    return
            yield self._update(key, new)

    def _swap(self) -> Iterator[bytes]:
        """Two rows take each other's key, by way of one that nobody has."""
        one, other = self.chance.sample(list(self.rows), 2)
        free = {name: self._free(name) for name in self.key}
        first, second = self.rows[one], self.rows[other]
        keys = [{name: row[name] for name in self.key} for row in (first, second)]
        yield self._update(one, {**first, **free})
        yield self._update(other, {**second, **keys[0]})
        yield self._update(self._key_of(free), {**first, **keys[1]})

    def _update(self, key: Key, new: Row) -> bytes:
        old = self.rows.pop(key)
        self.rows[self._key_of(new)] = new
        sent: dict[str, Any] = dict(new)
        for name in self.columns:
            # Values that are stored out of line, and that the update leaves as they are.
            if new[name] == old[name] and new[name] is not None and self.chance.random() < 0.3:
                sent[name] = pf.UNCHANGED
        if self.full:
            return t.update(self._made, sent, old)
        changed = self._key_of(new) != key
        if changed or any(sent[name] is pf.UNCHANGED for name in self.key):
            return t.update(self._made, sent, self._key_row(old))
        return t.update(self._made, sent)

    def _alter(self) -> None:
        """A column comes, with null in all rows, or one that came goes."""
        more = [name for name in self.columns if name.startswith("added")]
        if more and self.chance.random() < 0.5:
            gone = self.chance.choice(more)
            del self.columns[gone]
            for row in self.rows.values():
                del row[gone]
        else:
            name = f"added {self.added}"
            self.added += 1
            self.columns[name] = self.chance.choice(["int4", "text"])
            for row in self.rows.values():
                row[name] = None
        self.announced = False
        self._made = self._table()

    def _value(self, name: str) -> Any:
        chance, kind = self.chance, self.columns[name]
        if name not in self.key and chance.random() < 0.1:
            return None
        number = chance.randint(0, 8)
        return self._of(kind, number)

    def _free(self, name: str) -> Any:
        return self._of(self.columns[name], 1000)

    @staticmethod
    def _of(kind: str, number: int) -> Any:
        if kind == "int4":
            return str(number - 4)
        if kind == "text":
            return "" if number == 0 else "ä" * number
        if kind == "uuid":
            return f"00000000-0000-0000-0000-{number:012}"
        return f"{number - 4}.50"

    def _key_of(self, row: Row) -> Key:
        return tuple(row[name] for name in self.key)

    def _key_row(self, row: Row) -> Row:
        return {name: row[name] for name in self.key}


def apply_net(net: Any, held: dict[Key, Row], columns: Sequence[str]) -> dict[Key, Row]:
    """What a target holds after net changes, by their meaning alone.

    `held` has values as pyarrow's Python objects. A column that nothing tells is null.
    """
    table = {} if net.truncated else dict(held)
    rows = net.rows.to_pylist()
    keys = [tuple(row["row"][name] for name in net.key) for row in rows]
    assert len(set(keys)) == len(keys)
    new: dict[Key, Row] = {}
    gone = set()
    for key, row in zip(keys, rows, strict=True):
        assert row["op"] in ("upsert", "delete")
        expected = {"present": key in table, "absent": key not in table, "any": net.truncated}
        assert expected[row["expects"]], (key, row)
        gone.add(key)
        if row["op"] == "delete":
            assert row["from_"] is None
            continue
        source = key
        if row["from_"] is not None:
            source = tuple(row["from_"][name] for name in net.key)
            assert source in table
            gone.add(source)
        values = dict(row["row"])
        for name in row["unchanged"] or ():
            assert values[name] is None
            assert name not in net.key
            values[name] = table.get(source, {}).get(name)
        new[key] = values
    for key in gone:
        table.pop(key, None)
    table.update(new)
    return {key: {name: row.get(name) for name in columns} for key, row in table.items()}
