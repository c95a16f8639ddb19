"""The two sides of a comparison without a server: rows after changes, and ranges that differ."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import paths

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.types import BUILTIN_TYPES, EXTENSION_TYPES, ColumnType
from pgoutput_fast.verify import compare
from pgoutput_fast.verify.compare import compare_all, compare_named, differences
from pgoutput_fast.verify.fold import FoldedRows, FoldedRowStore, HistoryError, KeyChange
from pgoutput_fast.verify.moment import _ChangeCollector
from pgoutput_fast.verify.sums import Sum, halves, md5
from pgoutput_fast.verify.texts import described, plain, split

TEXT = ColumnType("base", 25, entry=next(one for one in BUILTIN_TYPES if one.name == "text"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FoldedRowStore]:
    made = FoldedRowStore(tmp_path / "rows")
    yield made
    made.close()


def row(*values: str | None) -> tuple[str, ...]:
    return tuple("\\N," if one is None else f"{one}," for one in values)


SENT_NOT = "\\U"


def insert(*values: str | None) -> KeyChange:
    return KeyChange("insert", None, row(*values), row(*[None] * len(values)))


def update(
    new: Sequence[str | None], old: Sequence[str | None] | None = None, kind: str = "K"
) -> KeyChange:
    nothing = [None] * len(new)
    return KeyChange("update", kind if old else None, row(*new), row(*(old or nothing)))


def delete(*old: str | None, kind: str = "K") -> KeyChange:
    return KeyChange("delete", kind, row(*old), row(*old))


def held(rows: FoldedRows) -> dict[str, int]:
    names = [name for name, _, _ in rows.digests([""])]
    return {parts: times for _, parts, times in rows.parts(names)}


def test_the_rows_of_a_table_with_a_key(store: FoldedRowStore) -> None:
    rows = FoldedRows(store, "t", [0])
    rows.apply([
        insert("1", "a", "big"), insert("2", "b", "large"), insert("3", None, "x"),
        update(["1", "A", SENT_NOT]),
        update(["4", "B", SENT_NOT], ["2", None, None]),
        update(["2", "C", SENT_NOT], ["4", None, None]),
        update(["5", "moved", SENT_NOT], ["1", None, None]),
        insert("1", "again", "new"),
        delete("3", None, None),
        update(["9", SENT_NOT, SENT_NOT]),
    ])  # fmt: skip
    assert held(rows) == {
        "5,moved,big,": 1, "1,again,new,": 1, "2,C,large,": 1, "9,\\U,\\U,": 1,
    }  # fmt: skip
    assert rows.incomplete() == (1, ["9", "\\U", "\\U"])
    rows.apply([update(["9", "x", "y"])])
    assert rows.incomplete() is None
    rows.apply(
        [KeyChange("truncate", None, (), ()), KeyChange("read", None, row("7", "r", ""), ())]
    )
    assert held(rows) == {"7,r,,": 1}


def test_a_row_that_is_inserted_twice_is_there_twice(store: FoldedRowStore) -> None:
    rows = FoldedRows(store, "t", [0])
    rows.apply([insert("1", "a"), insert("1", "a"), update(["1", "b"])])
    assert held(rows) == {"1,b,": 2}
    rows.apply([delete("1", None)])
    assert held(rows) == {}


def test_the_rows_of_a_multiset(store: FoldedRowStore) -> None:
    rows = FoldedRows(store, "t", [])
    rows.apply([
        insert("1", "a"), insert("1", "a"), insert("1", None), insert("2", "b"),
        delete("1", "a", kind="O"),
        update(["3", SENT_NOT], ["2", "b"], "O"),
    ])  # fmt: skip
    assert held(rows) == {"1,a,": 1, "1,\\N,": 1, "3,b,": 1}
    rows.apply([delete("8", "z", kind="O")])
    assert held(rows)["8,z,"] == -1


def test_unknown_values_of_a_multiset(store: FoldedRowStore) -> None:
    """Older changes have no values for a column that was added while another one was dropped."""
    rows = FoldedRows(store, "t", [])
    rows.apply([insert("1", SENT_NOT), insert("2", SENT_NOT), delete("1", SENT_NOT, kind="O")])
    assert rows.incomplete() == (1, ["2", SENT_NOT])
    rows.apply([delete("2", "x", kind="O")])  # it may be another row
    assert rows.incomplete() == (1, ["2", SENT_NOT])
    rows.apply([KeyChange("truncate", None, (), ()), insert("3", "x")])
    assert rows.incomplete() is None
    assert held(rows) == {"3,x,": 1}


@pytest.mark.parametrize("change", [
    KeyChange("delete", "K", row("1", None), row("1", None)),
    KeyChange("update", None, row("1", "x"), row(None, None)),
])  # fmt: skip
def test_a_multiset_needs_whole_old_rows(store: FoldedRowStore, change: KeyChange) -> None:
    rows = FoldedRows(store, "t", [])
    with pytest.raises(HistoryError):
        rows.apply([change])


def test_keys_are_needed(store: FoldedRowStore) -> None:
    rows = FoldedRows(store, "t", [0])
    with pytest.raises(HistoryError):
        rows.apply([update([SENT_NOT, "x"])])


@pytest.mark.parametrize(
    "values", [[], [""], [None], ["\\N"], ["a,b", "\\", None, "\\,"], [",", "\n", "\\U", "é"]]
)
def test_parts_are_split_as_they_were_joined(values: list[str | None]) -> None:
    made = ""
    for one in values:
        made += "\\N," if one is None else one.replace("\\", "\\\\").replace(",", "\\,") + ","
    assert [plain(one) for one in split(made)] == values


# --- comparing -----------------------------------------------------------------------------------


class Fake:
    """Rows in a list: name, parts, times."""

    def __init__(self, rows: Iterable[tuple[str, str, int]]) -> None:
        self.rows = list(rows)
        self.asked: list[tuple[int, Any]] = []

    def sums(self, digits: int, within: Sequence[str] | None) -> dict[str, Sum]:
        self.asked.append((digits, within))
        found: dict[str, Sum] = {}
        for name, parts, times in self.rows:
            if within is None or name.startswith(tuple(within)):
                first, second = halves(md5(parts))
                before = found.get(name[:digits], Sum(0, 0, 0))
                found[name[:digits]] = Sum(
                    before.rows + times,
                    before.first + times * first,
                    before.second + times * second,
                )
        return found

    def digests(self, within: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        for name, parts, times in self.rows:
            if name.startswith(tuple(within)):
                yield name, md5(parts), times

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        for name, parts, times in self.parts(names):
            yield name, md5(parts), times

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        wanted = set(names)
        yield from (one for one in self.rows if one[0] in wanted)


def rows_of(numbers: Iterable[int], **changed: str) -> Fake:
    return Fake((md5(f"{i},"), f"{i},{changed.get(f'_{i}', 'v')},", 1) for i in numbers)


def names_of(*numbers: int) -> set[str]:
    return {md5(f"{i},") for i in numbers}


def test_ranges_are_divided_until_few_rows_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_ROWS", 2)
    server, target = rows_of(range(20_000)), rows_of(range(20_000), _5="w", _9999="w")
    found = compare_all(server, target, set())
    assert found == (names_of(5, 9999), False, 20_000, 20_000)
    assert [digits for digits, _ in server.asked] == [3, 6]
    assert len(server.asked[1][1]) == 2


def test_rows_that_changed_are_left_out_of_the_sums() -> None:
    server, target = rows_of(range(500)), rows_of(range(10, 600), _300="w", _301="w")
    changed = {*names_of(*range(10), *range(500, 600)), *names_of(301)}
    found = compare_all(server, target, changed)
    assert found == (names_of(300), False, 500, 590)


def test_more_differs_than_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_RANGES", 10)
    found = compare_all(rows_of(range(1000)), rows_of([]), set())
    assert found.is_least
    assert 10 <= len(found.names) < 1000


def test_the_sums_are_exact() -> None:
    """Sums of many digests take more than 64 bits."""
    made = random.Random(7)
    parts = [f"{made.random()}," for _ in range(1000)]
    side = Fake((f"00{i:04x}", one, 1) for i, one in enumerate(parts))
    (total,) = side.sums(2, None).values()
    assert total.first == sum(halves(md5(one))[0] for one in parts)
    assert halves("f" * 32) == (-1, -1)
    assert halves("7" + "f" * 15 + "8" + "0" * 15) == (2**63 - 1, -(2**63))


def test_what_differs_in_rows() -> None:
    server = Fake([("a", "1,x,\\N,", 1), ("b", "2,y,y,", 1), ("c", "3,z,z,", 1)])
    target = Fake([("a", "1,x,,", 1), ("b", "2,y,y,", 2), ("d", "4,q,q,", 1)])
    assert compare_named(server, target, ["a", "b", "c", "d", "e"]) == {"a", "b", "c", "d"}
    columns = {"id": TEXT, "t": TEXT, "u": TEXT}
    found = differences(server, target, ["a", "b", "c", "d"], columns, ["id"])
    assert [(one.kind, one.key, one.columns, one.times) for one in found] == [
        ("different", {"id": "1"}, {"u": (None, "")}, (1, 1)),
        ("doubled", {"id": "2"}, {}, (1, 2)),
        ("missing", {"id": "3"}, {}, (1, 0)),
        ("extra", {"id": "4"}, {}, (0, 1)),
    ]


def test_the_document_of_canonical_texts() -> None:
    document = (paths.ROOT / "docs" / "reference" / "types.md").read_text()
    section = document.split("\n## Built-in types, and those of extensions\n")[1].split("\n## ")[0]
    names = {one.name: one for one in (*BUILTIN_TYPES, *EXTENSION_TYPES)}
    seen = set()
    for line in [one for one in section.splitlines() if one.startswith("| `")]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`([^`]+)`", cells[0].partition(" (")[0]):
            assert cells[-1] == described(names[name].codec), name
            seen.add(name)
    ranges = {one.name for one in BUILTIN_TYPES if one.codec in ("range", "multirange")}
    assert seen == names.keys() - ranges


@pytest.mark.parametrize(("old", "is_told"), [([1, "long"], True), ([1, None], False)])
def test_a_row_that_changed_is_told_by_an_old_row_that_is_whole(
    old: list[Any], is_told: bool
) -> None:
    """One that has NULL for what was not sent is of a partition with another identity."""
    whole = testing.Table("t", {"id": "int4", "note": "text"}, replica_identity="f")
    frames = [whole.relation(), testing.update(whole, [2, pf.UNCHANGED], old=old)]
    decoded: list[Any] = [*pf.Decoder().decode_many(frames)]
    columns = [SimpleNamespace(name=one.name, type_id=one.type_id) for one in decoded[0].columns]
    table: Any = SimpleNamespace(
        table=SimpleNamespace(columns=columns), columns=("id", "note"), key=()
    )
    named: Any = SimpleNamespace(names_of=lambda _, rows: map(repr, rows))
    collector = _ChangeCollector(table, named)
    for message in decoded:
        collector.take(message)
    names, why = collector.result()
    if is_told:
        assert (names, why) == ({"('1', 'long')", "('2', 'long')"}, "")
    else:
        assert why == "a row changed meanwhile, and the change does not identify it"
