"""The plans of a table, with every option of a sync; without a target and a change log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.expected_errors import expect_error

from pgoutput_fast import ColumnarDecoder, testing
from pgoutput_fast.catalog import CatalogColumn, CatalogTable

pa = pytest.importorskip("pyarrow")

from pgoutput_fast.apply.evolution import TableInCatalog  # noqa: E402
from pgoutput_fast.apply.options import SyncOptions  # noqa: E402
from pgoutput_fast.apply.table_plan import (  # noqa: E402
    LEFT_UNCOPIED,
    SELECTED_AGAIN,
    SKIPPED,
    UNSELECTED,
    CatalogPlan,
    LayoutPlan,
    Progress,
    TableRules,
    plan_from_catalog,
    plan_layout,
    plan_new_table,
    plan_snapshot,
)
from pgoutput_fast.apply.targets import (  # noqa: E402
    CHANGES_ALONE,
    AddedColumn,
    IncompleteError,
    RememberedOptions,
    Removed,
    Renamed,
    Retyped,
    TableState,
)
from pgoutput_fast.policies import Policies  # noqa: E402

RULES = TableRules.of(SyncOptions(), RememberedOptions(), Policies())
STRICT = RULES._replace(may_be_stale=False)
CHANGES = RULES._replace(has_state=False)
NEW = TableState(16390, "public", "t", "public.t")
OLD = {"id": "int4", "note": "text"}
INT4, INT8, TEXT = 23, 20, 25


def schema(columns: dict[str, Any], **options: Any) -> pa.Schema:
    table = testing.Table("t", columns, 16390, **{"key": ["id"], **options})
    frames = [table.relation(), testing.insert(table, [None] * len(columns))]
    (changes,) = ColumnarDecoder().decode(frames)
    return pa.record_batch(changes).schema


def column(number: int, name: str, type_id: int = TEXT, **fields: Any) -> CatalogColumn:
    nothing = CatalogColumn(name, type_id, "", -1, False, False, "", False, None, number)
    return dataclasses.replace(nothing, **fields)


def catalog(
    *reads: Sequence[CatalogColumn],
    key: tuple[str, ...] = ("id",),
    nodes: Sequence[int] = (),
    is_certain: bool = True,
) -> TableInCatalog:
    """What reads of the catalogue say of the table, the newest first."""
    tables = [
        CatalogTable(16390, "public", "t", "r", "d", None, (), key, (), tuple(columns), (node,))
        for columns, node in zip(reads, nodes or [5] * len(reads), strict=True)
    ]

    def value(name: str, text: str | None) -> pa.Array:
        return pa.array([text if name != "n" or text is None else int(text)])

    def earlier() -> Iterator[CatalogTable]:
        yield from tables[1:]

    newest = [*tables, None, None]
    return TableInCatalog(newest[0], newest[1], value, earlier, is_certain)


ID, NOTE = column(1, "id", INT4), column(2, "note")
NOTHING = catalog()
BEFORE = catalog([ID, NOTE])


def fits(_: pa.Schema) -> bool:
    return True


def layout(
    columns: dict[str, Any],
    now: TableInCatalog,
    state: TableState | None = None,
    rules: TableRules = RULES,
    fits: Callable[[pa.Schema], bool] = fits,
    **options: Any,
) -> LayoutPlan:
    """The plan of a layout, of a table that had the columns of `OLD` by default."""
    return plan_layout(state or known(), schema(columns, **options), now, rules, fits)


def known(columns: dict[str, Any] = OLD, now: TableInCatalog = BEFORE) -> TableState:
    return plan_layout(NEW, schema(columns), now, RULES, fits).table_state


# --- new tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uncopied", "has_snapshot", "is_skipped", "has_left", "stale"),
    [
        ("error", True, False, False, None),
        ("error", True, True, False, SKIPPED),
        ("empty", True, True, False, SKIPPED),
        ("error", False, False, True, LEFT_UNCOPIED),
        ("empty", False, False, False, None),
        ("changes", False, False, False, CHANGES_ALONE),
        ("changes", True, False, False, None),
    ],
)
def test_a_new_table(
    uncopied: str, has_snapshot: bool, is_skipped: bool, has_left: bool, stale: str | None
) -> None:
    planned = plan_new_table(
        NEW, RULES._replace(uncopied=uncopied), Path("log"), has_snapshot=has_snapshot,
        is_skipped=is_skipped, has_left=lambda: has_left,
    )  # fmt: skip
    assert planned == NEW._replace(stale=stale)


def test_a_new_table_without_a_snapshot() -> None:
    given: Any = {"has_snapshot": False, "is_skipped": False, "has_left": lambda: False}
    with expect_error(code="no_snapshot", table="public.t", path="log"):
        plan_new_table(NEW, RULES, Path("log"), **given)
    # Changes need no snapshot.
    assert plan_new_table(NEW, CHANGES, Path("log"), **given) == NEW


# --- layouts -------------------------------------------------------------------------------------


def test_the_first_layout() -> None:
    plan = layout(OLD, BEFORE, NEW)
    assert [tuple(each) for each in plan.table_state.columns] == [
        ("id", "id", INT4, -1, "int32", 1), ("note", "note", TEXT, -1, "string", 2),
    ]  # fmt: skip
    assert (plan.alterations, plan.begins_version, plan.key) == ([], False, ("id",))


@pytest.mark.parametrize(
    ("columns", "now", "stored", "alterations", "moves"),
    [
        pytest.param(OLD, BEFORE, ["id", "note"], [], False, id="the same"),
        pytest.param({"id": "int4"}, catalog([ID], [ID, NOTE]), ["id"], [Removed("note")], True,
                     id="removed"),
        pytest.param(
            {"id": "int4", "text": "text"}, catalog([ID, column(2, "text")], [ID, NOTE]),
            ["id", "text"], [Renamed("note", "note~"), Renamed("note~", "text")], True,
            id="renamed",
        ),
        pytest.param(
            {"id": "int4", "note": "text"},
            catalog([ID, column(3, "note", has_missing=True, missing="x")], [ID], [ID, NOTE]),
            ["id", "note"], [Removed("note"), AddedColumn("note", pa.array(["x"]))],
            True, id="removed and added",
        ),
        pytest.param(
            {**OLD, "n": "int4"},
            catalog([ID, NOTE, column(3, "n", INT4, has_missing=True, missing="7")], [ID, NOTE]),
            ["id", "note", "n"], [AddedColumn("n", pa.array([7]))], False, id="added",
        ),
        pytest.param(
            {**OLD, "ID": "text"}, catalog([ID, NOTE, column(3, "ID")], [ID, NOTE]),
            ["id", "note", "ID_"], [AddedColumn("ID_", pa.array([None], pa.null()))],
            False, id="added with a name that differs in case",
        ),
    ],
)  # fmt: skip
def test_an_altered_table(
    columns: dict[str, Any],
    now: TableInCatalog,
    stored: list[str],
    alterations: list[Any],
    moves: bool,
) -> None:
    plan = layout(columns, now)
    assert [each.stored_name for each in plan.table_state.columns] == stored
    assert plan.alterations == alterations
    assert plan.table_state.stale is None
    assert plan.moves_names is moves


def test_a_type_that_gets_wider() -> None:
    """varchar(10) becomes varchar(20), which has all values of the former."""
    shorter, longer = {"id": "int4", "note": "varchar(10)"}, {"id": "int4", "note": "varchar(20)"}
    before = column(2, "note", 1043, type_modifier=14)
    after = dataclasses.replace(before, type_modifier=24)
    state = known(shorter, catalog([ID, before]))
    plan = layout(longer, catalog([ID, after], [ID, before]), state)
    assert (plan.table_state.columns[1].type_modifier, plan.alterations) == (24, [])
    # But for a rewrite: then the values may be others.
    plan = layout(longer, catalog([ID, after], [ID, before], nodes=(6, 5)), state)
    assert plan.table_state.stale is not None


def test_a_column_that_gets_a_wider_type_in_arrow() -> None:
    precise, any_ = {"id": "int4", "n": "numeric(10,2)"}, {"id": "int4", "n": "numeric(12,2)"}
    modifier, wider = (10 << 16 | 2) + 4, (12 << 16 | 2) + 4
    before = column(2, "n", 1700, type_modifier=modifier)
    after = dataclasses.replace(before, type_modifier=wider)
    plan = layout(any_, catalog([ID, after], [ID, before]), known(precise, catalog([ID, before])))
    assert plan.alterations == [Retyped("n", pa.decimal128(12, 2))]


UNKNOWN = [
    pytest.param({"id": "int8", "note": "text"}, BEFORE, id="another type"),
    pytest.param({**OLD, "n": "int4"}, NOTHING, id="new, and no read says so"),
    pytest.param({**OLD, "n": "int4"}, catalog([ID, NOTE, column(3, "n", INT4, has_default=True)],
                                               [ID, NOTE]), id="a default for each row"),
    pytest.param({**OLD, "n": "int4"}, catalog([ID, NOTE, column(4, "n", INT4)], [ID, NOTE]),
                 id="a column between that nobody saw"),
    pytest.param({"note": "text"}, catalog([NOTE], [ID, NOTE]), id="the key was dropped"),
    pytest.param(OLD, catalog([ID, column(3, "note")], [ID, NOTE], is_certain=False),
                 id="two reads that differ"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "now"), UNKNOWN)
def test_rows_that_are_no_longer_known(columns: dict[str, Any], now: TableInCatalog) -> None:
    options = {} if "id" in columns else {"key": ["note"]}
    plan = layout(columns, now, **options)
    assert plan.table_state.stale is not None
    assert plan.alterations == []
    # The change table goes on with the new columns.
    assert [each.name for each in plan.table_state.columns] == [*columns]
    assert layout(columns, now, rules=CHANGES, **options).table_state.stale is None
    with expect_error(IncompleteError, code="stale", table="public.t"):
        layout(columns, now, rules=STRICT, **options)


def test_a_table_that_must_not_be_altered() -> None:
    rules = RULES._replace(evolves=False)
    assert layout(OLD, BEFORE, rules=rules).alterations == []
    with expect_error(code="unfit_schema", parameter="schema_changes", table="public.t"):
        layout({"id": "int4"}, catalog([ID], [ID, NOTE]), rules=rules)


@pytest.mark.parametrize("state", [NEW, None], ids=["new", "altered"])
def test_a_column_with_the_name_of_the_one_for_deleted_rows(state: TableState | None) -> None:
    now = catalog([ID, NOTE, column(3, "gone")], [ID, NOTE])
    with expect_error(code="unfit_schema", parameter="soft_deletes", table="public.t"):
        layout({**OLD, "gone": "text"}, now, state, rules=RULES._replace(marker="GONE"))


def test_a_version_of_the_change_table() -> None:
    asked = []

    def refuses(wanted: pa.Schema) -> bool:
        asked.append(wanted.field("after").type.field("note").type)
        return False

    assert layout(OLD, BEFORE, fits=refuses).begins_version
    assert asked == [pa.string()]
    # One column can't hold texts and digits of binary format, though both are texts.
    plan = layout(OLD, BEFORE, with_digits())
    assert plan.begins_version
    assert plan.table_state.stale is not None


def with_digits() -> TableState:
    """The table state of a table that has had digits of binary format in `note`."""
    columns = [
        each._replace(form="string of digits, from binary format") if each.name == "note" else each
        for each in known().columns
    ]
    return known()._replace(columns=tuple(columns))


def test_columns_have_their_stored_names() -> None:
    now = catalog([ID, NOTE, column(3, "ID")], [ID, NOTE])
    plan = layout({**OLD, "ID": "text"}, now, key=["ID"])
    assert plan.key == ("ID_",)
    assert plan.conversion.schema.field("after").type.names == ["id", "note", "ID_"]


@pytest.mark.parametrize(
    ("options", "now", "key"),
    [
        ({}, BEFORE, ("id",)),
        ({"key": ["note", "id"]}, BEFORE, ("id", "note")),
        ({"replica_identity": "f", "key": None}, BEFORE, ("id",)),
        ({"replica_identity": "f", "key": None}, NOTHING, None),
        ({"replica_identity": "n", "key": None}, catalog([ID, NOTE], key=()), ()),
    ],
)
def test_the_key(options: dict[str, Any], now: TableInCatalog, key: tuple[str, ...] | None) -> None:
    assert layout(OLD, now, **options).key == key


# --- snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lsn", "copy_lsn", "lacks"),
    [
        (0, 0, True), (50, 40, True), (100, 40, True),
        (101, 40, False), (50, 100, False), (100, 100, False),
    ],
)  # fmt: skip
def test_what_lacks_a_snapshot(lsn: int, copy_lsn: int, lacks: bool) -> None:
    assert Progress(lsn, copy_lsn).lacks(100) is lacks


@pytest.mark.parametrize(
    ("table", "state", "stale", "needs_rows", "begins"),
    [
        pytest.param((0, 0), (0, 0), None, True, True, id="new"),
        pytest.param((50, 40), (50, 40), None, True, True, id="a later one"),
        pytest.param((100, 100), (100, 100), None, False, False, id="again"),
        pytest.param((200, 40), (200, 40), None, False, False, id="too old"),
        pytest.param((50, 40), (100, 100), None, False, True, id="killed after the state table"),
        pytest.param((50, 40), (100, 100), "why", True, True, id="killed, and stale"),
        pytest.param((100, 100), (100, 100), "why", False, False,
                     id="stale since, so the same snapshot does not help"),
        pytest.param((50, 40), None, None, False, True, id="changes alone"),
    ],
)  # fmt: skip
def test_a_snapshot(
    table: tuple[int, int],
    state: tuple[int, int] | None,
    stale: str | None,
    needs_rows: bool,
    begins: bool,
) -> None:
    lsn, copy_lsn = table
    before = known()._replace(lsn=lsn, copy_lsn=copy_lsn, stale=stale, schema_lsn=7)
    plan = plan_snapshot(
        before, 100, schema({"id": "int8"}), catalog([column(1, "id", INT8)]), RULES, fits,
        None if state is None else Progress(*state),
    )  # fmt: skip
    assert (plan.needs_rows, plan.begins) == (needs_rows, begins)
    assert not plan.begins_version
    if begins:
        assert [each.form for each in plan.table_state.columns] == ["int64"]
        assert (plan.table_state.stale, plan.table_state.schema_lsn) == (None, 100)
    else:
        assert plan.table_state == before


@pytest.mark.parametrize(
    ("had_digits", "does_fit", "begins_version"),
    [(False, True, False), (False, False, True), (True, True, True)],
)
def test_a_version_begins_with_a_snapshot(
    had_digits: bool, does_fit: bool, begins_version: bool
) -> None:
    before = with_digits() if had_digits else known()
    plan = plan_snapshot(before, 100, schema(OLD), BEFORE, RULES, lambda _: does_fit, None)
    assert plan.begins_version is begins_version
    # A table that has the snapshot goes on with the version that it has.
    before = before._replace(lsn=100, copy_lsn=100)
    plan = plan_snapshot(before, 100, schema(OLD), BEFORE, RULES, lambda _: does_fit, None)
    assert not plan.begins_version


def test_a_snapshot_with_the_column_for_deleted_rows() -> None:
    with expect_error(code="unfit_schema", parameter="soft_deletes", table="public.t"):
        plan_snapshot(
            NEW, 100, schema(OLD), BEFORE, RULES._replace(marker="Note"), fits, Progress(0, 0)
        )


# --- the catalogue -------------------------------------------------------------------------------

NAME = CatalogPlan()
FOLLOWS = CatalogPlan(follows=True)


@pytest.mark.parametrize(
    ("columns", "start", "stale", "plan", "without_rows"),
    [
        ([ID, NOTE], 10, None, NAME, NAME),
        ([ID, NOTE], 5, None, None, None),
        ([ID], 10, None, FOLLOWS, NAME),
        ([ID], 10, "why", NAME, NAME),
        ([ID], 5, None, None, None),
        ([ID, column(3, "note")], 5, None, "column note was dropped", None),
        ([ID, column(3, "note")], 10, "why", NAME, NAME),
    ],
)
def test_a_table_follows_the_catalogue(
    columns: list[CatalogColumn],
    start: int,
    stale: str | None,
    plan: CatalogPlan | str | None,
    without_rows: CatalogPlan | None,
) -> None:
    state = known()._replace(schema_lsn=5, stale=stale)
    table = catalog(columns).table
    assert table is not None

    def planned(state: TableState, rules: TableRules) -> CatalogPlan | None:
        return plan_from_catalog(state, table, start, rules, is_selected=True)

    found = planned(state, RULES)
    if isinstance(plan, str):
        assert found is not None
        assert found.stale is not None
        assert found.stale.startswith(plan)
    else:
        assert found == plan
    assert planned(state, CHANGES) == without_rows
    assert planned(state._replace(columns=()), RULES) == without_rows


@pytest.mark.parametrize("rules", [RULES, CHANGES])
@pytest.mark.parametrize(
    ("is_selected", "start", "stale", "plan"),
    [
        (False, 10, None, CatalogPlan(UNSELECTED)),
        (False, 5, None, None),  # the last change had a selected name
        (False, 10, UNSELECTED, NAME),
        (False, 10, "why", NAME),
        (True, 10, UNSELECTED, CatalogPlan(SELECTED_AGAIN)),
        (True, 5, UNSELECTED, CatalogPlan(SELECTED_AGAIN)),
    ],
)
def test_a_table_whose_name_is_not_selected(
    rules: TableRules, is_selected: bool, start: int, stale: str | None, plan: CatalogPlan | None
) -> None:
    state = known()._replace(schema_lsn=5, stale=stale)
    assert BEFORE.table is not None
    found = plan_from_catalog(state, BEFORE.table, start, rules, is_selected=is_selected)
    assert found == plan


def test_a_plan_without_reason_and_columns_needs_the_name_alone() -> None:
    plans = (CatalogPlan(), CatalogPlan(UNSELECTED), CatalogPlan(follows=True))
    assert [plan.is_name for plan in plans] == [True, False, False]


def test_rules_say_whether_a_policy_makes_null() -> None:
    given = (Policies(), Policies(infinity="null"), Policies(out_of_range="null"))
    made = [TableRules.of(SyncOptions(), RememberedOptions(), policies) for policies in given]
    assert [rules.makes_null for rules in made] == [False, True, True]
