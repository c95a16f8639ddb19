"""The texts of errors about options, as Python, the command and Spark show them.

``tests/data/error_texts.txt`` has them all, so that a reader of a change sees what users will read.
``PGOUTPUT_FAST_RENEW=1`` writes it anew.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import paths

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("psycopg")
pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

import pgoutput_fast as pf
from pgoutput_fast.apply import sync
from pgoutput_fast.apply.targets import RememberedOptions, check_kind
from pgoutput_fast.capture_options import StreamOptions
from pgoutput_fast.cli._options import shown_by
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.replication import capture
from pgoutput_fast.replication.negotiation import negotiate
from pgoutput_fast.replication.source import missing_slot
from pgoutput_fast.spark._source_options import shown as shown_by_spark
from pgoutput_fast.verify import verify

TEXTS = paths.DATA / "error_texts.txt"


def _raise(error: Exception) -> None:
    raise error


def _capture(**given: Any) -> Callable[[], Any]:
    return lambda: capture(
        "host=/nonexistent", **{"slot": "s", "publications": ["p"], "directory": "d", **given}
    )


def _sync(**given: Any) -> Callable[[], Any]:
    return lambda: sync(**{"segments": "nowhere", "target": "duckdb:x.duckdb", **given})


def _asks(version: int, **given: Any) -> Callable[[], Any]:
    return lambda: negotiate(StreamOptions(**given), ["p"], version)


_KEPT = RememberedOptions("gone", ("a", "b"), pf.Policies(infinity="null"))

ERRORS: dict[str, list[Callable[[], Any]]] = {
    "capture": [
        _capture(segment_bytes=0),
        _capture(max_delay=-1),
        _capture(compression="gzip"),
        _capture(protocol=5),
        _capture(streaming="off"),
        _capture(origin="local"),
        _capture(snapshot="always"),
        _capture(connections=0),
        _capture(publications=[]),
        _capture(give_up=True),
        _capture(upload_endpoint="http://x"),
        _capture(upload_keep="local"),
        _capture(upload=""),
        _capture(directory=""),
        lambda: ConnectionParameters("hots=foo"),
        lambda: ConnectionParameters("postgresql://u@x@y/z"),
        _capture(directory="s3://bucket/lake"),
        _asks(130004, protocol=2),
        _asks(150004, streaming="parallel"),
        _asks(160004, protocol=1, streaming="on"),
        _asks(160004, protocol=2, two_phase=True),
        _asks(140004, two_phase=True),
        _asks(150004, origin="none"),
        lambda: negotiate(StreamOptions(), ["p"], 160004, marked=True),
        lambda: _raise(missing_slot("shop")),
    ],
    "sync": [
        _sync(),
        _sync(segments="."),
        _sync(segments=None),
        _sync(slot="s"),
        _sync(snapshot="only"),
        _sync(interval=float("nan")),
        _sync(on_error="guess"),
        _sync(tables=[]),
        _sync(tables=["orders"]),
        _sync(pause_bytes=-1),
        _sync(target=""),
        _sync(target="oops.duckdb"),
        _sync(target="ducdb:x"),
        _sync(target="duckdb:/nonexistent/x.duckdb"),
        _sync(target="/nonexistent/lake/x"),
        _sync(soft_deletes="a\nb"),
        _sync(soft_deletes="rowid"),
        _sync(partition_by={"public.t": ["a"]}),
        _sync(partition_by={"public.t": ["a", "a"]}),
        _sync(target="lake", duckdb_memory=1 << 30),
        _sync(target="parquet:"),
        _sync(target="duckdb:"),
        _sync(target="s3://u:p@bucket/lake"),
        _sync(target="parquet:lake", iceberg="shop"),
        _sync(storage_options={"secret": 5}, target="lake"),
        lambda: _KEPT.check(
            "lake", RememberedOptions(None, ("a", "b"), pf.Policies(infinity="null"))
        ),
        lambda: _KEPT.check(
            "lake", RememberedOptions("gone", ("a",), pf.Policies(infinity="null"))
        ),
        lambda: _KEPT.check(
            "lake", RememberedOptions("gone", ("a", "b"), pf.Policies(infinity="clamp"))
        ),
        lambda: check_kind("lake", "delta", "parquet"),
        lambda: check_kind("lake", "parquet", "delta"),
        lambda: check_kind("lake", "delta", "iceberg"),
        lambda: check_kind("lake", "parquet", "iceberg"),
    ],
    "verify": [lambda: verify("host=h", publications=["p"], target="segments", timeout=0)],
}


def texts() -> str:
    """The errors, each in the three ways; a way that does not differ from Python's is left out."""
    lines = []
    for name, makers in ERRORS.items():
        command = importlib.import_module(f"pgoutput_fast.cli.{name}").command
        for make in makers:
            with pytest.raises(pf.PgOutputError) as caught:
                make()
            error = caught.value
            shown = {"command": error.text(shown_by(command)), "Spark": error.text(shown_by_spark)}
            lines.append(f"{name}: {error}")
            lines += [f"    {way}: {text}" for way, text in shown.items() if text != str(error)]
    return "\n".join(lines) + "\n"


def test_the_texts_of_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = texts()
    if os.environ.get("PGOUTPUT_FAST_RENEW"):
        TEXTS.write_text(found)
    assert found.splitlines() == TEXTS.read_text().splitlines()
    assert list(tmp_path.iterdir()) == []
