"""Measure the columnar engine, plain C on the same frames, and CSV readers on the same values."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv

import pgoutput_fast as pf
from pgoutput_fast import _impl

from . import baseline, native, workloads
from .decoders import WrongResult
from .harness import Case, NotMeasured, optional_module

LEVELS = {
    "columns": "batches of frames: memcpy, C walk and C layout are plain C (native.c) on the same "
    "bytes; headers is decode_batch(); Arrow a ColumnarDecoder whose batches are exported and "
    "dropped, kept one whose last batches are held; CSV readers get the same values",
}

Run = Callable[[], object]


@contextlib.contextmanager
def twin() -> Iterator[None]:
    """A context in which new decoders are those of the pure Python implementation."""
    before = _impl.IMPLEMENTATION
    _impl.IMPLEMENTATION = "python"
    try:
        yield
    finally:
        _impl.IMPLEMENTATION = before


def check(workload: workloads.Workload) -> None:
    """Compare the rows of both implementations with the values that the workload was made of.

    Raises
    ------
    WrongResult
        They differ.
    """
    data, offsets = workload.packed()
    ours = pf.ColumnarDecoder()
    with twin():
        theirs = pf.ColumnarDecoder()
        slow = [row for b in theirs.decode(data, offsets) for row in pa.record_batch(b).to_pylist()]
    fast = [row for b in ours.decode(data, offsets) for row in pa.record_batch(b).to_pylist()]
    # Compared as text, as NaN does not equal itself.
    if list(map(str, fast)) != list(map(str, slow)):
        raise WrongResult(f"{workload}: the twin's columns are not the engine's")
    if workload.table is not None:
        for side, expected in (
            ("before", [change.old for change in workload.changes]),
            ("after", [change.new for change in workload.changes]),
        ):
            found = [None if row[side] is None else tuple(row[side].values()) for row in fast]
            _compare(f"{workload}, Arrow, {side}", found, expected)


def _compare(
    who: str, rows: Iterable[workloads.Row | None], expected: Iterable[workloads.Row | None]
) -> None:
    if [row and _plain(row) for row in rows] != [row and _plain(row) for row in expected]:
        raise WrongResult(f"{who}: its rows are not the workload's")


def check_layout(workload: workloads.Workload, layout: native.Layout) -> None:
    """Compare the columns that plain C makes with those of the engine.

    Raises
    ------
    WrongResult
        They differ.
    """
    count = layout()
    made = [pa.record_batch(batch) for batch in pf.ColumnarDecoder().decode(workload.frames)]
    table = pa.Table.from_batches(made).combine_chunks()
    for name, side in (("before", layout.before), ("after", layout.after)):
        [rows] = table.column(name).chunks
        if rows.null_count == len(rows):
            continue  # plain C leaves its columns alone then
        for i, buffers in enumerate(side):
            # A column by itself: its own nulls are those of the rows too.
            ours = rows.field(i)
            ours = ours.storage if isinstance(ours, pa.ExtensionArray) else ours
            theirs = pa.Array.from_buffers(ours.type, count, list(map(pa.py_buffer, buffers)))
            # As text, as NaN does not equal itself.
            if str(theirs.to_pylist()) != str(ours.to_pylist()):
                raise WrongResult(
                    f"{workload}, C layout: {name}.{rows.type[i].name} is not the engine's"
                )


def csv_rows(workload: workloads.Workload) -> list[workloads.Row]:
    """A row for each change: the new one, or the key of a deleted one.

    So CSV readers read fewer values than the engine makes, which has the columns of `before` too.
    """
    return [change.new or change.old or () for change in workload.changes]


def _plain(row: Iterable[object]) -> tuple[str, ...]:
    """A row as text, as not all readers have values for uuid, jsonb, time zones and bool."""
    texts = (str(value).removesuffix("+00:00") for value in row)
    return tuple({"True": "t", "False": "f"}.get(text, text) for text in texts)


def csv_of(workload: workloads.Workload) -> bytes:
    """The workload's rows as CSV, NULL as an empty field."""
    assert workload.table is not None
    text = io.StringIO()
    writer = csv.writer(text)
    for row in csv_rows(workload):
        writer.writerow(
            "" if value is None else column.type.text(value).removesuffix("+00")
            for column, value in zip(workload.table.columns, row, strict=True)
        )
    return text.getvalue().encode()


def csv_readers(workload: workloads.Workload, missing: dict[str, str]) -> dict[str, Run]:
    """CSV readers with one thread, which read into the engine's types as far as they have them.

    Raises
    ------
    WrongResult
        A reader gives other values than the workload was made of.
    """
    data = csv_of(workload)
    [batch] = pf.ColumnarDecoder().decode(workload.frames)
    types = {
        field.name: pa.string() if isinstance(field.type, pa.BaseExtensionType) else field.type
        for field in pa.record_batch(batch).schema.field("after").type
    }
    names = list(types)
    for name, kind in types.items():
        if pa.types.is_timestamp(kind):
            types[name] = pa.timestamp("us")
    options = {
        "read_options": pa.csv.ReadOptions(column_names=names, use_threads=False),
        "convert_options": pa.csv.ConvertOptions(
            column_types=types, strings_can_be_null=True, true_values=["t"], false_values=["f"]
        ),
    }

    def by_pyarrow() -> object:
        return pa.csv.read_csv(io.BytesIO(data), **options)

    kept: list[object] = []

    def hold() -> None:
        kept[:] = [by_pyarrow()]

    readers: dict[str, Run] = {"pyarrow.csv": by_pyarrow, "pyarrow.csv, kept": hold}
    try:
        os.environ.setdefault("POLARS_MAX_THREADS", "1")  # read when polars is imported
        polars = optional_module("polars")
        # polars can't parse "t" and "f" as bool, so such columns are read as str.
        schema = {
            name: polars.String if kind == polars.Boolean else kind
            for name, kind in polars.from_arrow(by_pyarrow()).schema.items()
        }
        readers["polars CSV"] = lambda: polars.read_csv(
            io.BytesIO(data), has_header=False, new_columns=names, schema=schema
        )
    except NotMeasured as reason:
        missing[f"{workload}/columns/polars CSV"] = str(reason)
    try:
        duckdb = optional_module("duckdb")
        connection = duckdb.connect()
        connection.execute("SET threads = 1")
        kinds = connection.from_arrow(by_pyarrow()).types
        columns = {name: str(kind) for name, kind in zip(names, kinds, strict=True)}
        # duckdb reads only files; this one stays in the page cache.
        file = tempfile.NamedTemporaryFile(suffix=".csv")  # noqa: SIM115 - as long as the reader
        file.write(data)
        file.flush()
        # All options are given, as duckdb would find them out by itself at each call.
        readers["duckdb CSV"] = lambda: connection.read_csv(
            file.name, header=False, columns=columns, auto_detect=False,
            delimiter=",", quotechar='"', escapechar='"',
        ).to_arrow_table()  # fmt: skip
    except NotMeasured as reason:
        missing[f"{workload}/columns/duckdb CSV"] = str(reason)
    for who, read in readers.items():
        if who != "pyarrow.csv, kept":
            found: Any = read()
            table = found if isinstance(found, pa.Table) else found.to_arrow()
            rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
            _compare(f"{workload}, {who}", rows, csv_rows(workload))
    return readers


def plain_c(workload: workloads.Workload, missing: dict[str, str]) -> dict[str, Run]:
    """The loops of native.c that support the workload.

    Raises
    ------
    subprocess.CalledProcessError
        native.c does not compile.
    WrongResult
        "C layout" makes other columns than the engine.
    """
    try:
        found = native.loops(workload)
    except OSError as error:
        missing[f"{workload}/columns/plain C"] = f"no C compiler: {error}"
        return {}
    for name, loop in list(found.items()):
        if loop() < 0:
            missing[f"{workload}/columns/{name}"] = "it knows no frames of this kind"
            del found[name]
        elif isinstance(loop, native.Layout):
            check_layout(workload, loop)
    return dict(found)


def loops(workload: workloads.Workload, missing: dict[str, str]) -> Iterator[tuple[str, Run]]:
    """All loops over a workload's frames."""
    data, offsets = workload.packed()
    frames = workload.frames
    decoder = pf.ColumnarDecoder()
    with twin():
        slow = pf.ColumnarDecoder()
    plain = baseline.Decoder("typed" if workload.table is not None else "texts")

    def exported(decoder: pf.ColumnarDecoder) -> None:
        for batch in decoder.decode(data, offsets):
            batch.__arrow_c_array__()

    def by_twin() -> None:
        with twin():
            exported(slow)

    kept: list[Any] = []

    def hold() -> None:
        kept[:] = list(decoder.decode(data, offsets))

    def imported() -> None:
        for batch in decoder.decode(data, offsets):
            pa.record_batch(batch)

    def by_baseline() -> None:
        for frame in frames:
            plain.decode(frame)

    yield from plain_c(workload, missing).items()
    yield "headers", lambda: pf.decode_batch(data, offsets)
    yield "headers of a list", lambda: pf.decode_batch(frames)
    yield "Arrow", lambda: exported(decoder)
    yield "Arrow, kept", hold
    yield "Arrow, in pyarrow", imported
    yield "Arrow, twin", by_twin
    yield "baseline", by_baseline
    # The documents of "fat" have line ends, at which CSV readers would split rows.
    if workload.tuple_format == "text" and workload.name != "fat" and workload.table is not None:
        yield from csv_readers(workload, missing).items()


def thread_cases(workload: workloads.Workload) -> list[Case]:
    """One decoder in one thread, and two in two threads: seconds of wall clock per frame."""
    data, offsets = workload.packed()
    repeats = 20

    def work() -> None:
        decoder = pf.ColumnarDecoder()
        for _ in range(repeats):
            for batch in decoder.decode(data, offsets):
                batch.__arrow_c_array__()

    def wall(count: int) -> dict[str, float]:
        threads = [threading.Thread(target=work) for _ in range(count)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - start
        return {"wall": spent / count / repeats / len(workload.frames)}

    return [
        Case(f"{workload}/columns/Arrow, one thread", lambda: wall(1)),
        Case(f"{workload}/columns/Arrow, two threads", lambda: wall(2)),
    ]


def growth(most: int) -> dict[str, float]:
    """Seconds of CPU per frame, for calls with ten thousand frames up to `most`."""
    import numpy as np

    workload = workloads.generate("narrow", "text", 8_000)
    data, offsets = workload.packed()
    found = {}
    count = 1
    while count * len(workload.frames) <= most:
        shifted = [offsets[:-1] + i * len(data) for i in range(count)]
        again = np.concatenate([*shifted, np.array([count * len(data)], np.int64)])
        found[f"{len(again) - 1:,} frames in one call"] = _best(data * count, again, 200 // count)
        count *= 10
    return found


def relations(known: int) -> float:
    """Seconds of CPU per frame, with `known` relations announced and rows of 8 of them."""
    workload = workloads.generate("narrow", "text", 8_000)
    relation, *frames = workload.frames

    def of(oid: int, frame: bytes) -> bytes:
        number = oid.to_bytes(4, "big")
        if (
            frame[:1] == b"R"
        ):  # a name of its own: the decoder forgets a relation that lost its name
            schema, name, rest = frame[5:].split(b"\0", 2)
            return b"R" + number + b"\0".join((schema, b"%s%d" % (name, oid), rest))
        return frame[:1] + number + frame[5:] if frame[:1] in (b"I", b"U") else frame

    decoder = pf.ColumnarDecoder()
    for _ in decoder.decode([of(20_000 + i, relation) for i in range(known)]):
        pass
    step = known // 8
    traffic = [of(20_000 + i % 8 * step, frame) for i, frame in enumerate(frames)]
    return _best(traffic, None, 30, decoder)


def _best(
    data: Any, offsets: Any, repeats: int, decoder: pf.ColumnarDecoder | None = None
) -> float:
    """The least time of some calls; each makes a new decoder unless one is given."""
    samples = []
    for _ in range(max(3, repeats)):
        own = decoder or pf.ColumnarDecoder()
        start = time.process_time_ns()
        for batch in own.decode(data, offsets):
            batch.__arrow_c_array__()
        samples.append((time.process_time_ns() - start) / 1e9)
    return min(samples) / (len(offsets) - 1 if offsets is not None else len(data))


def scaling(most: int) -> dict[str, dict[str, float]]:
    """One sample of the costs per frame that must not grow with size: cases and their metrics."""
    found = {f"8 relations of {known:,} known": relations(known) for known in (8, 10_000)}
    found |= growth(most)
    return {f"narrow/text/scaling/{name}": {"cpu": value} for name, value in found.items()}
