"""Lay out the record batches of a relation: their columns and metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..decoding.plan import RelationPlan
from ..names import qualified, shown_name
from .fields import Field
from .mapping import field_of
from .packed import Labels
from .selection import Selection


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The layout of the record batches of one version of a relation.

    Attributes
    ----------
    plan : RelationPlan
    columns : tuple of Field
        The selected columns of the relation, in their order.
    head : tuple of Field
        The columns of the record batch before `before`, `after` and `unchanged`.
    metadata : dict of bytes to bytes
        The metadata of the schema.
    """

    plan: RelationPlan
    columns: tuple[Field, ...]
    head: tuple[Field, ...]
    metadata: Mapping[bytes, bytes]

    @property
    def side_bytes(self) -> int:
        """Bytes that a row takes in the columns of ``before`` or ``after``.

        Values of varying length are not included. In ``before`` a row takes them as soon as any row
        of its batch has an old tuple.
        """
        widths = [field.width if field.width >= 0 else 4 for field in self.columns]
        return len(widths) + sum(widths)

    @property
    def row_bytes(self) -> int:
        """Bytes that a row without an old tuple takes, without its values of varying length."""
        # The columns op, old_kind and unchanged take up to 20 bytes together.
        return 20 + sum(field.width for field in self.head if field.width > 0) + self.side_bytes

    def schema(self, binary: Iterable[int]) -> Field:
        """Return the schema of a batch, as a struct of its columns.

        Parameters
        ----------
        binary : iterable of int
            Positions in `columns` of the columns of unknown types whose values came in binary
            format. They are of Arrow's type binary in this batch.
        """
        columns = list(self.columns)
        for i in binary:
            columns[i] = columns[i].in_binary()
        return Field(
            "",
            "+s",
            self.metadata,
            (
                *self.head,
                Field("before", "+s", children=tuple(columns)),
                Field("after", "+s", children=tuple(columns)),
                Field("unchanged", "+l", children=(Field("item", "u"),)),
            ),
        )


def version_of(plan: RelationPlan) -> tuple[object, ...]:
    """Return a key for all that was announced of a relation: equal keys can share a batch."""
    relation, registry = plan.relation, plan.settings.registry
    return (
        relation.relation_id,
        relation.namespace,
        relation.name,
        relation.replica_identity,
        relation.columns,
        tuple([(oid, one.namespace, one.name) for oid, one in sorted(plan.types.items())]),
        None if registry is None else registry.version,
    )


def head_fields(target: str) -> tuple[Field, ...]:
    """Return the columns from op to old_kind."""
    unsigned4, unsigned8 = ("l", "l") if target == "spark" else ("I", "L")
    formats = {
        "op": "u",
        "xid": unsigned4,
        "subxid": unsigned4,
        "lsn": unsigned8,
        "commit_lsn": unsigned8,
        "commit_time": "tsu:UTC",
        "seq": "l",
        "old_kind": "u",
    }
    widths = {"u": -1, "I": 4}
    return tuple(Field(name, of, width=widths.get(of, 8)) for name, of in formats.items())


def layout_of(plan: RelationPlan, target: str, selection: Selection) -> Layout:
    """Make the layout of a relation's record batches.

    Raises
    ------
    PgOutputError
        The relation has none of the columns that were named, or a type was registered with an Arrow
        type that columns can't have.
    """
    relation = plan.relation
    labels: dict[int, Labels] = {}
    columns = tuple(
        replace(
            field_of(plan.column_types[i], plan.settings, target, labels),
            name=shown_name(relation.columns[i].name),
            position=i,
        )
        for i in selection.positions(relation)
    )
    return Layout(plan, columns, head_fields(target), relation_metadata(plan))


def relation_metadata(plan: RelationPlan) -> dict[bytes, bytes]:
    """Return what the metadata of a batch's schema say of its relation."""
    relation = plan.relation
    described = []
    for column, type_ in zip(relation.columns, plan.column_types, strict=True):
        one: dict[str, object] = {
            "name": shown_name(column.name),
            "type_id": column.type_id,
            "type_modifier": column.type_modifier,
            "type": shown_name(
                qualified(type_) if type_.namespace not in ("", "pg_catalog") else type_.name
            ),
            "key": column.is_key,
        }
        if shown_name(column.name) != column.name:
            raw = column.name.encode(plan.settings.encoding, "surrogateescape")
            one["name_bytes"] = raw.hex()
        described.append(one)
    entries = {
        "namespace": shown_name(relation.namespace),
        "relation": shown_name(relation.name),
        "relation_id": str(relation.relation_id),
        "replica_identity": relation.replica_identity,
        "key_columns": json.dumps([one["name"] for one in described if one["key"]]),
        "columns": json.dumps(described),
    }
    return {f"pgoutput.{name}".encode(): value.encode() for name, value in entries.items()}
