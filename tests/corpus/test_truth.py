"""What the tables hold in the end, value by value, as the server copied them.

The changes of a capture are applied, every final value is decoded, printed again (render.py) and
compared with the server's own COPY. `tests/data/final` always; the scenarios of `--corpus DIR` too.
Whatever is not compared is counted under a reason, and a type that is never compared is a failure.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import paths
from support.columns.final_rows import Cell, Copy, Row, Tables, committed, copies
from support.nightly import marks
from support.recordings.corpus_files import Capture, captures
from support.values.catalog_types import FIRST_UNPINNED_OID, registry_of
from support.values.render import DATES, FLOATS, PRINTED_FLOATS, Renderer

import pgoutput_fast as pf

pytest.importorskip("pyarrow", reason="captures are Arrow files")

DATA = paths.DATA / "final"
SCENARIOS = re.compile(r"all_types|dml|schema_evolution|fuzz_.*|encoding_.*")
PARTS_OF_TABLES = {"v1_text_upd_only", "v1_text_del_only", "v1_text_pub2", "v1_bin_error"}
"""Captures whose final rows are not the tables': of a publication that leaves out kinds of changes
or changes on the way, or that the server ended with an error. Their values are compared with what
was sent."""
NEVER_SENT = {("schema_evolution", "ul"): "rows of an UNLOGGED table, which became LOGGED later"}
"""Tables some of whose rows no stream brings."""

REG_DIGITS = "the OID's digits, as in the binary COPY"
BYTES = "a type without a decoder: the bytes of the binary COPY"
SETTING = re.compile(r"DateStyle|IntervalStyle|TimeZone|extra_float_digits|bytea_output")
Counts = collections.Counter[tuple[str, str]]


def groups(root: Path) -> list[tuple[Path, str, str]]:
    found = {
        (capture.entry["instance"], capture.entry["scenario"]): None
        for capture in captures(root)
        if SCENARIOS.fullmatch(capture.entry["scenario"])
        and capture.truth is not None
        and not capture.entry["performance"]
    }
    return [(root, *group) for group in found]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" not in metafunc.fixturenames:
        return
    parameters = [
        pytest.param(
            group,
            id=f"data/{group[1]}/{group[2]}",
            marks=marks(f"{group[1]}/{group[2]}/v1_text"),
        )
        for group in (groups(DATA) if DATA.exists() else [])
    ]
    corpus = metafunc.config.getoption("--corpus")
    if corpus is None:
        reason = "give --corpus DIR or PGOUTPUT_FAST_CORPUS: recorded streams of real servers"
        skipped = [pytest.mark.corpus, pytest.mark.skip(reason=reason)]
        parameters.append(pytest.param(None, id="corpus", marks=skipped))
    else:
        found = groups(Path(corpus))
        assert found, f"{corpus} has no scenario with truth"
        parameters += [
            pytest.param(group, id=f"corpus/{group[1]}/{group[2]}", marks=pytest.mark.corpus)
            for group in found
        ]
    metafunc.parametrize("group", parameters)


def label(root: Path, instance: str, scenario: str) -> str:
    return f"{'extract' if root == DATA else 'corpus'} {instance}/{scenario}"


class Comparison:
    """The final rows of one capture, beside the server's."""

    def __init__(self, impl: ModuleType, capture: Capture) -> None:
        truth = capture.truth
        assert truth is not None
        self.capture = capture
        self.registry = registry_of(truth)
        self.snapshots = truth.catalog()
        types: dict[int, Any] = {}
        for snapshot in self.snapshots:
            types.update({int(row["oid"]): row for row in snapshot["types"]})
        digits = int(capture.entry["session_gucs"].get("extra_float_digits", 1))
        self.rounded = digits < 1
        self.render = Renderer(types.values(), digits)
        self.compared: Counts = collections.Counter()  # type and "default", or the other settings
        self.listed: Counts = collections.Counter()  # type and reason
        self.as_bytes: Counts = collections.Counter()  # of those compared: type and reason
        self.tables: collections.Counter[str] = collections.Counter()
        self.total = 0
        self.failures: list[str] = []
        self.matched: dict[tuple[int, int], Row] = {}
        decoder = impl.Decoder(
            pf.Policies(infinity="text", out_of_range="text"),
            capture.entry["client_encoding"],
            self.registry,
        )
        frames = (frame for _, frame in capture.rows())
        self.state = Tables()
        for change in committed(map(decoder.decode, frames)):
            self.state.apply(change)
        usual = copies(truth.path, "default", "utf-8")
        guc_set = capture.entry["guc_set"]
        other = usual if guc_set == "default" else copies(truth.path, guc_set, "utf-8")
        for one, styled in zip(usual, other, strict=True):
            assert (one.oid, one.columns) == (styled.oid, styled.columns)
            self.table(one, styled)

    def published(self, copy: Copy) -> str:
        """Why the capture has not all changes of the table, empty if it has."""
        wanted = re.findall(r'"((?:[^"]|"")*)"', self.capture.options["publication_names"])
        kinds: set[str] = set()
        last = self.snapshots[-1]
        tables = {(row["pub"], row["schema"], row["table"]) for row in last["publication_tables"]}
        for publication in last["publications"]:
            name = publication["pubname"]
            if name in wanted and (name, copy.schema, copy.table) in tables:
                kinds |= {
                    kind
                    for kind in ("pubinsert", "pubupdate", "pubdelete", "pubtruncate")
                    if publication[kind]
                }
        if not kinds:
            return "a table that is not published"
        return "" if len(kinds) == 4 else "a table of which not all kinds of changes are published"

    def altered_types(self) -> set[int]:
        """Types that are not the same in all snapshots."""
        seen: dict[int, Any] = {}
        altered = set()
        for snapshot in self.snapshots:
            for row in snapshot["types"]:
                shape = row["enum_labels"], row["attributes"]
                if seen.setdefault(row["oid"], shape) != shape:
                    altered.add(int(row["oid"]))
        return altered

    def table(self, copy: Copy, styled: Copy) -> None:
        reason = self.published(copy)
        if reason:
            self.tables[reason] += 1
            return
        rows = self.state.rows.get(copy.oid, [])
        where = f"{self.capture.name}, {copy.schema}.{copy.table}"
        relation = self.state.relations.get(copy.oid)
        missing = NEVER_SENT.get((self.capture.entry["scenario"], copy.table), "")
        if relation is None:
            if copy.text:
                self.failures.append(f"{where}: {len(copy.text)} rows, none was sent")
            return
        self.tables["compared"] += 1
        columns = {column.name: column for column in relation.columns}
        altered = self.altered_types()
        shown = [[self.cell(row, name, columns, altered) for name in copy.columns] for row in rows]
        left = list(range(len(copy.text)))
        exact = collections.defaultdict(list)
        for number in left:
            exact[tuple(copy.text[number])].append(number)
        again = []
        for row, words in zip(rows, shown, strict=True):
            candidates = exact.get(tuple(words)) if all(map(plain, words)) else None
            if candidates:
                self.count(copy, styled, candidates.pop(), row, words)
            else:
                again.append((row, words))
        taken = {number for key, number in self.matched if key == copy.oid}
        left = [number for number in left if number not in taken]
        for row, words in again:

            def fit(number: int, words: list[Any] = words) -> int:
                return sum(
                    self.agrees(copy, styled, number, at, word) for at, word in enumerate(words)
                )

            # With ties the row of the same key, which stands in front.
            best = max(left, key=lambda n, f=fit: (f(n), -n), default=None)  # type: ignore[misc]
            if best is None:
                self.failures.append(f"{where}: a row too many: {words!r:.1000}")
                continue
            left.remove(best)
            self.count(copy, styled, best, row, words)
        if left and not missing:
            self.failures.append(f"{where}: rows are missing: {copy.text[left[0]]!r:.1000}")
        if left and missing:
            self.listed["", missing] += len(left) * len(copy.columns)

    def cell(self, row: Row, name: str, columns: dict[str, Any], altered: set[int]) -> Any:
        """The value printed, None for NULL, or why it cannot be compared so."""
        if name not in columns:
            return Listed("a generated column, which is not published", "", "")
        column = columns[name]
        cell = row.get(name)
        if (
            cell is None
            or (cell.column.type_id, cell.column.type_modifier)
            != (column.type_id, column.type_modifier)
            or (
                column.type_id in altered
                and shape(cell.relation.columns) != shape(columns.values())
            )
        ):
            type_name = self.render.name(column.type_id)
            return Listed("ALTER TABLE or ALTER TYPE changed it, which sends no row", type_name, "")
        return self.printed(cell)

    def printed(self, cell: Cell) -> Any:
        oid = cell.column.type_id
        try:
            value = cell.data[cell.number]
        except pf.DecodeError as error:
            assert cell.data.raw(cell.number) == cell.raw
            return Listed("refused", self.render.name(oid), str(error))
        if value is None:
            return None
        scalars = self.render.scalars(oid)
        if cell.data.kind(cell.number) == "b":
            if isinstance(value, bytes) and not scalars & {"bytea", "char"}:
                return Bytes(value, BYTES)
            if all(name.startswith("reg") for name in scalars):
                return Bytes(cell.raw, REG_DIGITS, digits_of(value, cell.raw))
        try:
            return self.render(value, oid)
        except AssertionError as error:
            return Listed("of the wrong type", self.render.name(oid), f"{value!r}: {error}")

    def agrees(self, copy: Copy, styled: Copy, number: int, at: int, word: Any) -> bool:
        if isinstance(word, Listed):
            return True
        if isinstance(word, Bytes):
            return bool(copy.binary and copy.binary[number][at] == word.raw and word.right)
        expected = copy.text[number][at]
        if word == expected:
            return True
        oid = self.oid(copy, at)
        if oid is None or word is None or expected is None or styled is copy:
            return False
        scalars = self.render.scalars(oid)
        other = styled.text[number][at]
        assert other is not None
        if scalars & AS_SENT or (self.rounded and scalars & (FLOATS | PRINTED_FLOATS)):
            return bool(word == other)
        # What Python's dates do not hold is the text that was sent, by the policy.
        parts = [leaves(text) for text in (word, expected, other)]
        return bool(
            scalars & DATES
            and len({len(part) for part in parts}) == 1
            and all(
                mine == usual or (mine == sent and BEYOND.search(usual))
                for mine, usual, sent in zip(*parts, strict=True)
            )
        )

    def oid(self, copy: Copy, at: int) -> int | None:
        for column in self.state.relations[copy.oid].columns:
            if column.name == copy.columns[at]:
                return int(column.type_id)
        return None

    def count(self, copy: Copy, styled: Copy, number: int, row: Row, words: list[Any]) -> None:
        self.matched[copy.oid, number] = row
        for at, word in enumerate(words):
            self.total += 1
            oid = self.oid(copy, at)
            type_name = "" if oid is None else self.render.name(oid)
            if isinstance(word, Listed):
                refused = word.reason == "refused"
                setting = SETTING.search(word.error)
                if refused and setting and self.capture.entry["guc_set"] != "default":
                    self.listed[type_name, f"refused: {setting[0]} is not what it must be"] += 1
                elif word.error:
                    self.fail(copy, number, at, row, f"{word.reason}: {word.error}")
                else:
                    self.listed[type_name, word.reason] += 1
            elif not self.agrees(copy, styled, number, at, word):
                self.fail(copy, number, at, row, f"printed {word!r:.300}")
            elif word is None:
                self.listed[type_name, "NULL"] += 1
            else:
                self.compared[type_name, self.capture.entry["guc_set"]] += 1
                if isinstance(word, Bytes):
                    self.as_bytes[type_name, word.reason] += 1

    def fail(self, copy: Copy, number: int, at: int, row: Row, found: str) -> None:
        cell = row.get(copy.columns[at])
        self.failures.append(
            f"{self.capture.name}, {copy.schema}.{copy.table}.{copy.columns[at]}: the server has "
            f"{copy.text[number][at]!r:.300}, {found}; sent {cell and cell.raw!r:.300}"
        )


BEYOND = re.compile(r"infinity| BC\Z|\A\d{5,}-|\A24:00")
AS_SENT = {"pg_mcv_list", "pg_ndistinct", "pg_dependencies"}
"""Types without a decoder whose text is that of a bytea."""


def leaves(text: str) -> list[str]:
    """The dates and times within a text, without what holds them together."""
    return [part for part in re.split(r'[{}\[\](),"\\=]+', text) if part]


def shape(columns: Iterable[Any]) -> list[tuple[str, int, int]]:
    return [(column.name, column.type_id, column.type_modifier) for column in columns]


class Listed:
    """A value that is not compared, and why."""

    def __init__(self, reason: str, type_name: str, error: str) -> None:
        self.reason, self.type_name, self.error = reason, type_name, error


class Bytes:
    """A value that is compared with the binary COPY."""

    def __init__(self, raw: Any, reason: str, right: bool = True) -> None:
        self.raw, self.reason, self.right = raw, reason, right

    def __repr__(self) -> str:
        return f"{self.raw!r}{'' if self.right else ', which it is not'}"


def digits_of(value: Any, raw: bytes) -> bool:
    """Whether the value is the digits of the OIDs in `raw`, an array's too."""
    if isinstance(value, str):
        return len(raw) == 4 and value == str(int.from_bytes(raw, "big"))
    leaves: list[Any] = []

    def walk(part: Any) -> None:
        for inner in part:
            if isinstance(inner, list):
                walk(inner)
            else:
                leaves.append(inner)

    walk(value)
    dimensions = int.from_bytes(raw[:4], "big")
    found: list[Any] = []
    at = 12 + 8 * dimensions
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "big", signed=True)
        at += 4 + max(size, 0)
        found.append(None if size < 0 else str(int.from_bytes(raw[at - 4 : at], "big")))
    return found == leaves


def plain(word: Any) -> bool:
    return word is None or isinstance(word, str)


def test_final_values_are_what_the_server_copied(
    impl: ModuleType, group: tuple[Path, str, str], say: Callable[[str], None]
) -> None:
    root, instance, scenario = group
    by_set: dict[str, Counts] = collections.defaultdict(collections.Counter)
    listed: dict[str, Counts] = collections.defaultdict(collections.Counter)
    as_bytes: dict[str, Counts] = collections.defaultdict(collections.Counter)
    tables: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: list[str] = []
    used = collections.Counter[str]()
    present: dict[str, set[str]] = collections.defaultdict(set)
    parts: list[str] = []
    for capture in captures(root, instance=instance, scenario=scenario):
        if capture.entry["optionset"] in PARTS_OF_TABLES:
            parts.append(f"{capture.name}: {printed_as_sent(impl, capture)}")
            continue
        comparison = Comparison(impl, capture)
        failures += comparison.failures
        guc_set = capture.entry["guc_set"]
        used[guc_set] += 1
        by_set[guc_set] += comparison.compared
        listed[guc_set] += comparison.listed
        as_bytes[guc_set] += comparison.as_bytes
        tables[guc_set] += comparison.tables
        present[guc_set] |= types_of(comparison)
        told = capture.entry.get("checks", {})
        total = sum(comparison.compared.values())
        # Whoever recorded the captures compared bytes with the COPY, of as many values at least.
        with_null = total + sum(n for (_, why), n in comparison.listed.items() if why == "NULL")
        assert guc_set != "default" or with_null >= told.get("final ok values", 1), capture.name
        assert comparison.total == total + sum(
            number for (_, reason), number in comparison.listed.items() if reason not in
            NEVER_SENT.values()
        ) + len([line for line in comparison.failures if " the server has " in line])  # fmt: skip
    assert not failures, f"{len(failures)} differ:\n" + "\n".join(failures[:20])
    assert used
    for line in parts:
        say(f"{line} values are printed as they were sent ({impl.__name__})")
    for guc_set, names in present.items():
        seen = {name for name, _ in by_set[guc_set]}
        refused = {name for name, reason in listed[guc_set] if reason.startswith("refused")}
        assert not names - seen - refused, f"never compared ({guc_set}): {names - seen - refused}"
        total = sum(by_set[guc_set].values())
        say(f"{label(*group)}, {impl.__name__}, {guc_set}: {used[guc_set]} captures, "
            f"{total} values of {len(seen)} types")  # fmt: skip
        counts = ", ".join(
            f"{name} {number}" for (name, _), number in sorted(by_set[guc_set].items())
        )
        say(f"  {counts}")
        say(f"  tables: {', '.join(f'{why} {n}' for why, n in tables[guc_set].items())}")
        for word, found in (("not compared", listed), ("compared otherwise", as_bytes)):
            for line in by_reason(found[guc_set]):
                say(f"  {word}, {line}")


def printed_as_sent(impl: ModuleType, capture: Capture) -> int:
    """How many values there are in the capture's rows; each, printed again, is the text sent."""
    assert capture.truth is not None
    types = {int(row["oid"]): row for part in capture.truth.catalog() for row in part["types"]}
    render = Renderer(types.values())
    decoder = impl.Decoder(encoding=capture.entry["client_encoding"])
    found = 0
    for message in decoder.decode_many(frame for _, frame in capture.rows()):
        if message.tag not in "IUD":
            continue
        for row in (getattr(message, "old", None), getattr(message, "new", None)):
            if row is None:
                continue
            assert "b" not in map(row.kind, range(len(row)))
            for at, column in enumerate(message.relation.columns):
                if row.kind(at) == "t":
                    value = row[at]
                    # Without a catalogue users' types are text, and so is varchar, which no column
                    # had any more when the catalogue was recorded.
                    known = column.type_id in types and column.type_id < FIRST_UNPINNED_OID
                    text = render(value, column.type_id) if known else value
                    assert text == row.raw(at).decode(capture.encoding), (capture.name, column)
                    found += 1
    return found


def by_reason(counts: Counts) -> Iterator[str]:
    """A line per reason, with the types it is for."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (name, reason), number in sorted(counts.items()):
        found[reason][name] += number
    for reason, names in found.items():
        of = ", ".join(f"{name} {number}" for name, number in names.items() if name)
        yield f"{reason}: {names.total()}" + (f" ({of})" if of and reason != "NULL" else "")


def types_of(comparison: Comparison) -> set[str]:
    """Types of which the server copied a value that is not NULL and could be compared."""
    names = set()
    for (oid, _), row in comparison.matched.items():
        for column in comparison.state.relations[oid].columns:
            cell = row.get(column.name)
            if cell is not None and cell.raw is not None and cell.column == column:
                names.add(comparison.render.name(column.type_id))
    return names


PAIRS = {
    "v1_bin": "v1_text",
    "v1_bin_utf8": "v1_text_utf8",
    "v1_bin_latin1": "v1_text_latin1",
}


@pytest.mark.everyday("18/all_types")
def test_text_is_binary(
    impl: ModuleType, group: tuple[Path, str, str], say: Callable[[str], None]
) -> None:
    """The same final rows, sent as text and as binary: values and their types."""
    root, instance, scenario = group
    by_name = {
        capture.entry["optionset"]: capture
        for capture in captures(root, instance=instance, scenario=scenario)
    }
    counts = collections.Counter[str]()
    listed: Counts = collections.Counter()
    for binary_name, text_name in PAIRS.items():
        if binary_name not in by_name or text_name not in by_name:
            continue
        binary, text = (Comparison(impl, by_name[name]) for name in (binary_name, text_name))
        differ = []
        for key, row in binary.matched.items():
            altered = binary.altered_types()
            for column in binary.state.relations[key[0]].columns:
                cell, other = row.get(column.name), text.matched[key].get(column.name)
                if cell is None or other is None or cell.column != column:
                    assert (cell is None) is (other is None)
                    listed["", "of a column that ALTER TABLE changed"] += 1
                    continue
                type_name = binary.render.name(column.type_id)
                if cell.raw is None or other.raw is None:
                    assert cell.raw is other.raw
                    continue
                if column.type_id in altered and shape(cell.relation.columns) != shape(
                    binary.state.relations[key[0]].columns
                ):
                    listed[type_name, "ALTER TYPE changed it"] += 1
                    continue
                if cell.data.kind(cell.number) != "b":
                    listed[type_name, "sent as text, it has no binary form"] += 1
                    continue
                scalars = binary.render.scalars(cell.column.type_id)
                outcomes = []
                for one in (cell, other):
                    try:
                        value = one.data[one.number]
                        outcomes.append((type(value), repr(value)))
                    except pf.DecodeError as error:
                        outcomes.append((type(error), error.code))
                reason = ""
                if any(scalar == "money" or scalar.startswith("reg") for scalar in scalars):
                    reason = "a type whose text needs the server"
                elif outcomes[0][0] is bytes and outcomes[1][0] is str:
                    reason = "a type without a decoder"
                if reason and outcomes[0] != outcomes[1]:
                    listed[type_name, reason] += 1
                elif outcomes[0] == outcomes[1]:
                    counts[type_name] += 1
                else:
                    differ.append(
                        f"{binary.capture.name} {column.name} {type_name}: {outcomes!r:.500}"
                    )
        assert not differ, "\n".join(differ[:20])
    pairs = [one for one, other in PAIRS.items() if {one, other} <= {*by_name}]
    assert bool(counts) is bool(pairs)
    if not pairs:
        return
    say(f"{label(*group)}, {impl.__name__}: {sum(counts.values())} values of {len(counts)} "
        "types are equal from text and binary")  # fmt: skip
    for line in by_reason(listed):
        say(f"  not compared, {line}")
