"""Measure both implementations beside the plain decoder and other decoders on PyPI, as messages.

Before anything is timed, the results of each are compared with those of the plain decoder, and
these with the values that the workload was made of. So no decoder is fast by being wrong.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import baseline, workloads
from .harness import NotMeasured, optional_module

LEVELS = {
    "message": "message object, validated, columns lazy: decoder.decode_many(frames)",
    "message, one by one": "the same through decoder.decode(frame)",
    "texts": "decode_many, and texts() of each row",
    "texts, one by one": "the same through decoder.decode(frame)",
    "values": "decode_many, and values() of each row",
}

COMPETITORS = {
    "python": "pgoutput_fast.decoding._pure",
    "cython": "pgoutput_fast.decoding._core",
    "pypgoutput": "pypgoutput.decoders",
    "walflux": "walflux.protocol",
    # psycopg is no decoder of pgoutput; its loaders make the values of a SELECT.
    "psycopg": "psycopg_binary._psycopg",
}
"""The competitors and the module of each."""

_EPOCH = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
_MICROSECOND = datetime.timedelta(microseconds=1)


@dataclasses.dataclass
class Loop:
    """`run` decodes the frames once. `result` does so too and returns the messages, as `fields`."""

    level: str
    who: str
    run: Callable[[], object]
    result: Callable[[], list[Any]]


# All loops have the same form: an iterator of messages (map() over the frames if the decoder has no
# decode_many), which compress() reduces to the rows if only their values are decoded. No message is
# kept, so objects are freed as in a consumer of a stream.


def exhaust(messages: Iterable[Any]) -> None:
    for _ in messages:
        pass


def stream_of(workload: workloads.Workload) -> tuple[list[bytes], list[bytes], list[bool]]:
    """The Relation frames at the begin, the frames after them, and which of these are rows."""
    preamble, frames = workload.frames[: workload.preamble], workload.frames[workload.preamble :]
    return preamble, frames, [frame[:1] in {b"I", b"U"} for frame in frames]


def fields(message: Any, columns: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The fields of a message, by the names that the baseline and pgoutput_fast share."""
    kind = type(message).__name__
    if kind == "Begin":
        return kind, message.final_lsn, message.commit_time, message.xid
    if kind == "Commit":
        return kind, message.flags, message.commit_lsn, message.end_lsn, message.commit_time
    if kind == "Relation":
        return kind, message.relation_id, message.name
    if kind == "Insert":
        return kind, message.relation_id, tuple(columns(message.new))
    old = None if message.old is None else tuple(columns(message.old))
    if kind == "Delete":
        return kind, message.relation_id, message.old_kind, old
    return kind, message.relation_id, message.old_kind, old, tuple(columns(message.new))


def baseline_loop(workload: workloads.Workload, level: str) -> Loop:
    preamble, frames, rows = stream_of(workload)
    decoder = baseline.Decoder(
        "typed" if level == "values" else "texts" if level.startswith("texts") else "bytes"
    )
    exhaust(map(decoder.decode, preamble))

    def run_messages() -> None:
        for _message in map(decoder.decode, frames):
            pass

    def run_rows() -> None:
        for message in itertools.compress(map(decoder.decode, frames), rows):
            message.new  # noqa: B018

    def result() -> list[Any]:
        return [fields(message, tuple) for message in map(decoder.decode, frames)]

    run = run_messages if level.startswith("message") else run_rows
    return Loop(level, "baseline", run, result)


def own_loop(workload: workloads.Workload, level: str, who: str, module: Any) -> Loop:
    """A loop of pgoutput_fast: a level of `LEVELS`, or "iteration" or "tuple", of each row."""
    preamble, frames, rows = stream_of(workload)
    decoder = module.Decoder()
    exhaust(decoder.decode_many(preamble))

    def run_messages() -> None:
        for _message in decoder.decode_many(frames):
            pass

    def run_one_by_one() -> None:
        for _message in map(decoder.decode, frames):
            pass

    def run_texts() -> None:
        for message in itertools.compress(decoder.decode_many(frames), rows):
            message.new.texts()

    def run_texts_one_by_one() -> None:
        for message in itertools.compress(map(decoder.decode, frames), rows):
            message.new.texts()

    def run_values() -> None:
        for message in itertools.compress(decoder.decode_many(frames), rows):
            message.new.values()

    def run_iteration() -> None:
        for message in itertools.compress(decoder.decode_many(frames), rows):
            for _value in message.new:
                pass

    def run_tuples() -> None:
        for message in itertools.compress(decoder.decode_many(frames), rows):
            tuple(message.new)

    def result() -> list[Any]:
        if level.endswith("one by one"):
            messages: Iterable[Any] = map(decoder.decode, frames)
        else:
            messages = decoder.decode_many(frames)
        if level.startswith("texts"):
            return [fields(message, lambda row: row.texts()) for message in messages]
        if level == "values":
            return [fields(message, lambda row: row.values()) for message in messages]
        if level in {"iteration", "tuple"}:
            return [fields(message, tuple) for message in messages]
        return [fields(message, lambda row: row.raws()) for message in messages]

    run = {
        "message": run_messages,
        "message, one by one": run_one_by_one,
        "texts": run_texts,
        "texts, one by one": run_texts_one_by_one,
        "values": run_values,
        "iteration": run_iteration,
        "tuple": run_tuples,
    }[level]
    return Loop(level, who, run, result)


def pypgoutput_loop(workload: workloads.Workload, level: str, who: str, decoders: Any) -> Loop:
    """The loop of pypgoutput, which decodes all columns to str at once in every case."""
    if level not in {"message", "texts"}:
        raise NotMeasured("its columns are always str")
    _, frames, rows = stream_of(workload)
    classes = {
        ord(kind[0]): getattr(decoders, kind)
        for kind in ("Begin", "Commit", "Delete", "Insert", "Relation", "Update")
    }

    def decode(frame: bytes) -> Any:
        return classes[frame[0]](frame)

    def run_messages() -> None:
        for _message in map(decode, frames):
            pass

    def run_rows() -> None:
        for message in itertools.compress(map(decode, frames), rows):
            message.new_tuple.column_data  # noqa: B018

    def columns(row: Any) -> tuple[Any, ...] | None:
        if row is None:
            return None
        texts = tuple(data.col_data for data in row.column_data)
        return texts if level == "texts" else tuple(text and text.encode() for text in texts)

    def told(message: Any) -> tuple[Any, ...]:
        kind = type(message).__name__
        if kind == "Begin":
            return kind, message.lsn, (message.commit_ts - _EPOCH) // _MICROSECOND, message.tx_xid
        if kind == "Commit":
            time = (message.commit_ts - _EPOCH) // _MICROSECOND
            return kind, message.flags, message.lsn_commit, message.lsn, time
        if kind == "Relation":
            return kind, message.relation_id, message.relation_name
        if kind == "Insert":
            return kind, message.relation_id, columns(message.new_tuple)
        old_kind = message.message_type if kind == "Delete" else message.optional_tuple_identifier
        old = columns(message.old_tuple)
        if kind == "Delete":
            return kind, message.relation_id, old_kind, old
        # Without an old tuple, old_kind is the new tuple's marker.
        old_kind = None if old_kind in {None, "", "N"} else old_kind
        return kind, message.relation_id, old_kind, old, columns(message.new_tuple)

    run = run_messages if level == "message" else run_rows
    return Loop(level, who, run, lambda: list(map(told, map(decode, frames))))


def walflux_loop(workload: workloads.Workload, level: str, who: str, module: Any) -> Loop:
    """The loop of walflux, which decodes all columns to str at once.

    Its typed values are numbers, booleans, and str for other types.
    """
    if level not in {"message", "texts"}:
        raise NotMeasured("dates, times and uuids stay str")
    _, frames, rows = stream_of(workload)
    decode = module.decode_message

    def run_messages() -> None:
        for _message in map(decode, frames):
            pass

    def run_rows() -> None:
        for message in itertools.compress(map(decode, frames), rows):
            message.new  # noqa: B018

    def columns(row: Any) -> tuple[Any, ...] | None:
        if row is None or level == "texts":
            return None if row is None else tuple(row)
        return tuple(None if text is None else text.encode() for text in row)

    def told(message: Any) -> tuple[Any, ...]:
        kind = type(message).__name__
        if kind == "Begin":
            time = (message.commit_ts - _EPOCH) // _MICROSECOND
            return kind, message.final_lsn, time, message.xid
        if kind == "Commit":
            time = (message.commit_ts - _EPOCH) // _MICROSECOND
            return kind, message.flags, message.commit_lsn, message.end_lsn, time
        if kind == "Relation":
            return kind, message.rel_id, message.name
        if kind == "Insert":
            return kind, message.rel_id, columns(message.new)
        old_kind = "K" if message.key is not None else "O" if message.old is not None else None
        old = columns(message.key if message.key is not None else message.old)
        if kind == "Delete":
            return kind, message.rel_id, old_kind, old
        return kind, message.rel_id, old_kind, old, columns(message.new)

    run = run_messages if level == "message" else run_rows
    return Loop(level, who, run, lambda: list(map(told, map(decode, frames))))


def psycopg_loop(workload: workloads.Workload, level: str, who: str, module: Any) -> Loop:
    """The loop of psycopg's loaders, over text values that were taken from the frames before."""
    if level != "values" or workload.table is None:
        raise NotMeasured("it loads the values of one table")
    split = baseline_loop(workload, "message").result()
    split_rows = [message[-1] for message in split if message[0] in {"Insert", "Update"}]
    transformer = module.Transformer()
    # jsonb is loaded as text, as the other decoders do; psycopg would parse it.
    oids = [25 if c.type.oid == 3802 else c.type.oid for c in workload.table.columns]
    transformer.set_loader_types(oids, 0)
    load = transformer.load_sequence

    def run() -> None:
        for row in split_rows:
            load(row)

    def result() -> list[Any]:
        loaded = iter([tuple(load(row)) for row in split_rows])
        return [
            (*message[:-1], next(loaded)) if message[0] in {"Insert", "Update"} else message
            for message in split
        ]

    return Loop(level, who, run, result)


_MAKE: dict[str, Callable[[workloads.Workload, str, str, Any], Loop]] = {
    "python": own_loop,
    "cython": own_loop,
    "pypgoutput": pypgoutput_loop,
    "walflux": walflux_loop,
    "psycopg": psycopg_loop,
}


# --- Checking -------------------------------------------------------------------------------------


class WrongResult(Exception):
    """A decoder gave another result than the baseline."""


def check_baseline(workload: workloads.Workload, level: str, result: list[Any]) -> None:
    """Compare the baseline's rows with the values that the workload was made of."""
    if workload.table is None:
        return  # a recorded workload, whose values are not known
    columns = workload.table.columns
    if level == "values":
        rows = workload.rows
    else:
        text = workload.tuple_format == "text"
        rows = [
            tuple(
                None
                if value is None
                else (column.type.text(value).encode() if text else column.type.binary(value))
                for column, value in zip(columns, row, strict=True)
            )
            for row in workload.rows
        ]
        if level.startswith("texts"):
            rows = [
                tuple(None if value is None else value.decode() for value in row) for row in rows
            ]
    _, _, is_row = stream_of(workload)
    compare(
        f"{workload}/{level}/baseline",
        [found[-1] for found in itertools.compress(result, is_row)],
        rows,
    )


def compare(name: str, found: list[Any], expected: list[Any]) -> None:
    """Raise WrongResult at the first difference, also of types: 1 differs from True and 1.0."""
    if len(found) != len(expected):
        raise WrongResult(f"{name}: {len(found)} results, expected {len(expected)}")
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not same(one, other):
            raise WrongResult(f"{name}, frame {i}: {one!r:.500}, expected {other!r:.500}")


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# --- All loops of a workload ----------------------------------------------------------------------


def loops(
    workload: workloads.Workload, missing: dict[str, str], check: bool = True
) -> Iterator[Loop]:
    """All loops over a workload. Those that can't be run are put into `missing`, with the reason.

    With `check`, the results of all loops are compared.

    Raises
    ------
    WrongResult
        A result is wrong.
    """
    for level in LEVELS:
        # The plain decoder, with which results are compared, makes no text of binary values, and
        # does not know all types of recorded streams.
        if (level.startswith("texts") and workload.tuple_format == "binary") or (
            level == "values" and workload.table is None
        ):
            continue
        base = baseline_loop(workload, level)
        expected = base.result() if check else []
        if check:
            check_baseline(workload, level, expected)
        yield base
        for who, module in COMPETITORS.items():
            if who not in {"python", "cython"} and workload.tuple_format == "binary":
                continue
            try:
                loop = _MAKE[who](workload, level, who, optional_module(module))
            except NotMeasured as reason:
                missing[f"{workload}/{level}/{who}"] = str(reason)
                continue
            if check:
                compare(f"{workload}/{level}/{who}", loop.result(), expected)
            yield loop
