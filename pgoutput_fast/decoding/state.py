"""Keep what a decoder knows between frames: relations, types, the open transaction and chunk.

The state is one object in pure Python that can be pickled. The decoders of both implementations use
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import fail
from ..protocol.messages import (
    BeginPrepare,
    Message,
    Prepare,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    decode_rare,
    is_repeated,
    published,
    set_relations,
)
from ..protocol.wire import relation_id_of
from ..settings import Settings
from .plan import RelationPlan

if TYPE_CHECKING:
    from collections.abc import Mapping


class Staged:
    """The relations and types that one streamed transaction announced and has not yet committed.

    Only the rows of that transaction are decoded by them, as it may still be rolled back.
    `messages` are its Relation and Type messages in the order in which they came; if one
    subtransaction sent several on one relation or type, only the last is kept. `plans` and `types`
    are made from them, by OID.
    """

    __slots__ = ("_messages", "plans", "types")

    def __init__(self) -> None:
        self._messages: dict[tuple[str, int, int | None], Relation | Type] = {}
        self.plans: dict[int, RelationPlan] = {}
        self.types: dict[int, Type] = {}

    def copy(self) -> Staged:
        """Return an independent copy."""
        copy = Staged()
        copy._messages = dict(self._messages)
        copy.plans = dict(self.plans)
        copy.types = dict(self.types)
        return copy

    @property
    def messages(self) -> list[Relation | Type]:
        """The Relation and Type messages, in the order in which they came."""
        return list(self._messages.values())

    def add(self, message: Relation | Type) -> None:
        """Add a message, and remove the one that it replaces."""
        number = message.type_id if isinstance(message, Type) else message.relation_id
        key = (message.tag, number, message.xid)
        self._messages.pop(key, None)
        self._messages[key] = message


class Names:
    """Which relation has which name, to find relations that no longer exist.

    No frame says that a table was dropped. But if a Relation message has a name that another
    relation had, the other relation was dropped or renamed, and its entry can be forgotten.
    PostgreSQL 14 and 15, however, send rows of a relation under its old name after its *schema* was
    renamed. So a relation that lost its name is kept until many others have lost theirs too.
    """

    __slots__ = ("_bearers", "_names", "_superseded")

    def __init__(self) -> None:
        self._bearers: dict[tuple[str, str], int] = {}
        self._names: dict[int, tuple[str, str]] = {}
        self._superseded: dict[int, None] = {}  # in the order in which they lost their names

    def copy(self) -> Names:
        """Return an independent copy."""
        copy = Names()
        copy._bearers = dict(self._bearers)
        copy._names = dict(self._names)
        copy._superseded = dict(self._superseded)
        return copy

    def give(self, relation: Relation) -> list[int]:
        """Note the name of an announced relation. Returns the OIDs of relations to forget."""
        relation_id, name = relation.relation_id, (relation.namespace, relation.name)
        before = self._names.get(relation_id)
        if before == name and self._bearers.get(name) == relation_id:
            return []
        if before is not None and self._bearers.get(before) == relation_id:
            del self._bearers[before]
        other = self._bearers.get(name)
        if other is not None:
            self._superseded[other] = None
        self._superseded.pop(relation_id, None)
        self._bearers[name] = relation_id
        self._names[relation_id] = name
        if len(self._superseded) <= 2 * MOST_SUPERSEDED:
            return []
        # Many are forgotten at a time, as each time the types that they used are searched for.
        old = list(self._superseded)[:-MOST_SUPERSEDED]
        for relation_id in old:
            del self._superseded[relation_id], self._names[relation_id]
        return old


class StreamState:
    """The state of one stream of frames.

    Attributes
    ----------
    settings : Settings
    relations, types : dict of int to Relation, dict of int to Type
        The messages that came outside stream chunks or in streamed transactions that were
        committed, by OID.
    plans : dict of int to RelationPlan
        A plan for each of `relations`, by OID.
    staged : dict of int to Staged
        The relations and types that streamed transactions in progress announced, by top-level xid.
    open_xid : int or None
        Top-level xid of the open stream chunk.
    xid : int or None
        The transaction between Begin (or Begin Prepare) and its end.
    commit_lsn, commit_time : int or None
        The commit of that transaction, from its Begin.
    row : int
        Number of rows so far in the open transaction, streamed or not. A TRUNCATE of k tables
        counts as k rows.
    suspect : set of int or None
        OIDs of types whose Type message was malformed; None if the OID could not be read either.
        A relation that uses such a type stays unknown.
    names : Names
        The names of `relations`.
    most_types : int
        The number of `types` beyond which those that no relation uses are forgotten.
    rows : dict of int to int
        The number of rows so far of streamed transactions whose chunk is not open, by top-level
        xid.
    """

    __slots__ = (
        "commit_lsn",
        "commit_time",
        "most_types",
        "names",
        "open_xid",
        "plans",
        "relations",
        "row",
        "rows",
        "settings",
        "staged",
        "suspect",
        "types",
        "xid",
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.relations: dict[int, Relation] = {}
        self.types: dict[int, Type] = {}
        self.plans: dict[int, RelationPlan] = {}
        self.suspect: set[int | None] = set()
        self.names = Names()
        self.most_types = MOST_UNUSED_TYPES
        self.reset()

    def reset(self) -> None:
        """Begin a new connection: forget open transactions and what streamed ones announced."""
        self.staged: dict[int, Staged] = {}
        self.open_xid: int | None = None
        self.rows: dict[int, int] = {}
        self.end()

    def copy(self, settings: Settings | None = None) -> StreamState:
        """Return an independent copy, with other settings if they are given."""
        copy = StreamState(self.settings)
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(copy, name, type(value)(value) if isinstance(value, (dict, set)) else value)
        copy.staged = {xid: staged.copy() for xid, staged in self.staged.items()}
        copy.names = self.names.copy()
        if settings is not None:
            copy.settings = settings
            for plans in (copy.plans, *(staged.plans for staged in copy.staged.values())):
                for relation_id, plan in plans.items():
                    plans[relation_id] = RelationPlan(plan.relation, plan.types, settings)
        return copy

    def begin(self, xid: int, commit_lsn: int | None, commit_time: int | None) -> None:
        """Note that a transaction begins."""
        self.xid: int | None = xid
        self.commit_lsn = commit_lsn
        self.commit_time = commit_time
        self.row = 0

    def end(self) -> None:
        """Note that no transaction is open any more."""
        self.xid = self.commit_lsn = self.commit_time = None
        self.row = 0

    def plan(self, relation_id: int) -> RelationPlan | None:
        """Return the plan of a relation in the open transaction; None if it was not announced."""
        if self.open_xid is not None:
            plan = self.staged[self.open_xid].plans.get(relation_id)
            if plan is not None:
                return plan
        return self.plans.get(relation_id)

    def check_order(self, frame: bytes) -> None:
        """Refuse a frame that can't come now: stream chunks don't nest and contain changes only.

        Raises
        ------
        DecodeError
            ``stream_order``.
        """
        tag = frame[:1]
        if self.open_xid is None:
            if tag == b"E":
                fail("stream_order", frame, 0, found="Stream Stop, and no stream chunk is open")
            if tag == b"S" and self.xid is not None:
                found = f"Stream Start, and transaction {self.xid} is still open; expected its end"
                fail("stream_order", frame, 0, found=found)
        elif tag in _OUTSIDE_CHUNKS:
            found = f"{_OUTSIDE_CHUNKS[tag]}, and the stream chunk of xid {self.open_xid} is "
            fail("stream_order", frame, 0, found=found + "still open; expected its Stream Stop")

    def receive(self, frame: bytes) -> Message:
        """Decode a frame whose tag is none of B, C, I, U and D, and note what it says.

        Raises
        ------
        DecodeError
            The frame is malformed or can't come now. The state is as it was before.
        """
        self.check_order(frame)
        message = self._known(frame)
        if message is None:
            message = decode_rare(frame, self.open_xid is not None, self.settings.encoding)
        if isinstance(message, (Relation, Type)):
            announced = self._announce(message)
            if self.suspect:
                self._suspect(message)
            return announced
        if isinstance(message, Truncate):
            self.row += len(message.relation_ids)
            plans = [self.plan(relation_id) for relation_id in message.relation_ids]
            set_relations(message, tuple([plan.relation if plan else None for plan in plans]))
        elif isinstance(message, StreamStart):
            self.end()
            if message.first_segment:
                # The server sends the transaction from its start again, after an earlier
                # connection was lost in it.
                self._forget(message.xid)
            self.open_xid = message.xid
            self.row = self.rows.pop(message.xid, 0)
            self.staged.setdefault(message.xid, Staged())
        elif isinstance(message, StreamStop) and self.open_xid is not None:
            self.rows[self.open_xid] = self.row
            self.open_xid = None
            self.end()
        elif isinstance(message, StreamCommit):
            for announced in self._forget(message.xid):
                self._publish(published(announced))
        elif isinstance(message, StreamPrepare):
            self._forget(message.xid)
        elif isinstance(message, StreamAbort):
            if message.subxid == message.xid:
                self._forget(message.xid)
            else:
                self._take_back(message.xid, message.subxid)
        elif isinstance(message, BeginPrepare):
            self.begin(message.xid, None, None)
        elif isinstance(message, Prepare):
            self.end()
        return message

    def announces(self, frame: bytes) -> bool:
        """Return whether a Relation or Type from outside stream chunks repeats a known one."""
        number = relation_id_of(frame, in_stream=False)
        announced: Mapping[int, Relation | Type]
        announced = self.relations if frame[:1] == b"R" else self.types
        known = None if number is None else announced.get(number)
        return known is not None and is_repeated(known, frame, self.settings.encoding)

    def _known(self, frame: bytes) -> Message | None:
        """The known Relation if the frame repeats it, as servers do when their caches are reset."""
        if frame[:1] != b"R" or self.open_xid is not None:
            return None
        number = relation_id_of(frame, in_stream=False)
        known = None if number is None else self.relations.get(number)
        if known is None or not is_repeated(known, frame, self.settings.encoding):
            return None
        return known

    def _suspect(self, message: Relation | Type) -> None:
        """Note a Relation or Type message that comes after a Type message that was malformed."""
        if isinstance(message, Type):
            self.suspect.discard(message.type_id)
            return
        # A server sends Type messages right before the relation that uses the types.
        any_type = None in self.suspect
        self.suspect.discard(None)
        for column in message.columns:
            if column.type_id in self.suspect or (any_type and column.type_id >= FIRST_USER_OID):
                self.forget_relation(message.relation_id)

    def forget_type(self, type_id: int | None) -> None:
        """Note a malformed Type message; `type_id` is None if its OID could not be read."""
        self.suspect.add(type_id)

    def forget_relation(self, relation_id: int | None) -> None:
        """Forget the relation of a malformed Relation message, or all if its OID is not known.

        The open streamed transaction forgets what it announced of the relation too. Its rows must
        not be decoded by the relation that other transactions know.
        """
        if relation_id is None:
            self.relations.clear()
            self.plans.clear()
        else:
            self.relations.pop(relation_id, None)
            self.plans.pop(relation_id, None)
        if self.open_xid is not None:
            staged = self.staged[self.open_xid]
            kept = [
                message
                for message in staged.messages
                if not isinstance(message, Relation)
                or relation_id not in (None, message.relation_id)
            ]
            self.staged[self.open_xid] = Staged()
            for message in kept:
                self._stage(self.staged[self.open_xid], message)

    def lose_stream(self, xid: int | None) -> None:
        """Note a malformed Stream Commit; `xid` is None if the xid could not be read.

        The transaction may have changed relations and types that other transactions use, so those
        that it announced are forgotten.
        """
        lost = [xid] if xid in self.staged else list(self.staged)
        for message in [message for xid in lost for message in self.staged[xid].messages]:
            if isinstance(message, Relation):
                self.relations.pop(message.relation_id, None)
                self.plans.pop(message.relation_id, None)
            else:
                self.forget_type(message.type_id)

    def _forget(self, xid: int) -> list[Relation | Type]:
        """Forget a streamed transaction that has ended, and return what it announced."""
        self.rows.pop(xid, None)
        staged = self.staged.pop(xid, None)
        return staged.messages if staged is not None else []

    def _take_back(self, xid: int, subxid: int) -> None:
        """Forget what a subtransaction announced, as it was rolled back."""
        staged = self.staged.get(xid)
        if staged is None:
            return
        kept = [message for message in staged.messages if message.xid != subxid]
        if len(kept) < len(staged.messages):
            self.staged[xid] = Staged()
            for message in kept:
                self._stage(self.staged[xid], message)

    def _announce(self, message: Relation | Type) -> Message:
        if self.open_xid is None:
            return self._publish(message)
        return self._stage(self.staged[self.open_xid], message)

    def _publish(self, message: Relation | Type) -> Message:
        if isinstance(message, Type):
            known_type = self.types.get(message.type_id)
            if known_type == message:
                return known_type
            self.types[message.type_id] = message
            return message
        known = self.relations.get(message.relation_id)
        if known == message:
            message = known
        else:
            self.relations[message.relation_id] = message
            if old := self.names.give(message):
                self._drop(old)
        self._plan(self.plans, message, self.types)
        if len(self.types) > self.most_types:
            # Types come right before the relation that uses them, so that no relation that is still
            # to come needs those that are unused now.
            used = {type_id for plan in self.plans.values() for type_id in plan.types}
            self.types = {type_id: self.types[type_id] for type_id in self.types.keys() & used}
            self.most_types = len(self.types) + MOST_UNUSED_TYPES
        return message

    def _drop(self, relation_ids: list[int]) -> None:
        """Forget relations that no longer exist, and the types that no other relation uses."""
        types: set[int] = set()
        for relation_id in relation_ids:
            self.relations.pop(relation_id, None)
            plan = self.plans.pop(relation_id, None)
            if plan is not None:
                types.update(plan.types)
        if types:
            for plan in self.plans.values():
                types.difference_update(plan.types)
            for type_id in types:
                self.types.pop(type_id, None)

    def _stage(self, staged: Staged, message: Relation | Type) -> Relation | Type:
        """Note what a streamed transaction announces. A repeated message gives the known object."""
        if isinstance(message, Type):
            known_type = staged.types.get(message.type_id)
            if known_type == message:
                return known_type
            staged.add(message)
            staged.types[message.type_id] = message
            return message
        known = staged.plans.get(message.relation_id)
        if known is not None and known.relation == message:
            message = known.relation
        else:
            staged.add(message)
        self._plan(staged.plans, message, {**self.types, **staged.types})
        return message

    def _plan(
        self, plans: dict[int, RelationPlan], relation: Relation, types: dict[int, Type]
    ) -> None:
        """Make the relation's plan, unless the relation and its types are still the same."""
        used = {
            column.type_id: types[column.type_id]
            for column in relation.columns
            if column.type_id in types
        }
        known = plans.get(relation.relation_id)
        if known is None or known.relation is not relation or known.types != used:
            plans[relation.relation_id] = RelationPlan(relation, used, self.settings)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


MOST_SUPERSEDED = 1000
"""How many relations are kept whose names belong to others now. They are forgotten when there are
twice as many."""

MOST_UNUSED_TYPES = 1000
"""How many types may be added before those are forgotten that no relation uses any more. Such types
are left over when columns are altered."""

FIRST_USER_OID = 16_384
"""The least OID of types that are not built in, which Type messages announce
(``FirstNormalObjectId``)."""

_OUTSIDE_CHUNKS = {
    b"B": "Begin",
    b"C": "Commit",
    b"S": "Stream Start",
    b"c": "Stream Commit",
    b"A": "Stream Abort",
    b"p": "Stream Prepare",
    b"b": "Begin Prepare",
    b"P": "Prepare",
    b"K": "Commit Prepared",
    b"r": "Rollback Prepared",
}
