"""Cuts the captures that the tests need out of a corpus of recorded streams.

    PYTHONPATH=tests python -m support.recordings.extract_captures CORPUS [--out tests/data]

The result has the corpus' own form (see corpus_files.py), so that every test that takes a corpus
takes it too. A capture is cut after the first frame past `FRAMES` at which no transaction is open,
and the truth of a scenario to the transactions that the captures of it still hold.
"""

from __future__ import annotations

import argparse
import collections
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
from support import paths
from support.frames.reference_parser import LAYOUTS, ReferenceStream
from support.recordings.corpus_files import Capture, captures

FRAMES = 6000
"""Frames after which a capture is cut, at the next moment without an open transaction."""

WANTED = {
    "14": {
        "dml": ["v1_text", "v1_bin", "v2_stream"],
        "fuzz_a": ["v1_text", "v2_stream"],
        "messages": ["v1_msgs", "v1_bin", "v2_stream_bin_msgs"],
        "streaming": ["v1_text", "v2_stream"],
    },
    "16": {
        "all_types": [
            "v1_text",
            "v1_bin",
            "v1_bin_error",
            "v1_text_gucB",
            "v1_text_gucC",
            "v1_text_gucD",
        ],
        "dml": ["v1_text", "v1_text_copydata", "v1_bin", "v2_imm", "v3_2pc_stream", "v4_par"],
        "encoding_latin1": ["v1_text_latin1", "v1_bin_utf8"],
        "fuzz_a": ["v1_text", "v1_bin", "v2_stream", "v3_2pc_stream", "v4_par_2pc_imm_bin"],
        "messages": ["v1_msgs", "v3_2pc_stream_msgs", "v4_par_2pc_msgs"],
        "origin": [
            "v1_text",
            "v1_bin",
            "v1_origin_none",
            "v2_imm",
            "v3_2pc_stream",
            "v4_par_2pc_imm_bin",
            "v4_par_2pc_msgs",
        ],
        "partitions": ["v1_text", "v1_bin_root", "v1_text_rf", "v3_2pc_stream", "v4_par"],
        "schema_evolution": ["v1_text", "v2_imm", "v3_2pc_stream", "v4_par"],
        "streaming": ["v1_text", "v2_stream", "v2_imm", "v3_2pc_stream", "v4_on", "v4_par"],
        "two_phase": [
            "v1_text",
            "v1_bin",
            "v2_stream",
            "v3_2pc",
            "v3_2pc_stream",
            "v4_par_2pc_imm_bin",
        ],
    },
    "18": {
        "all_types": ["v1_text", "v1_bin"],
        "partitions": ["v1_text", "v1_text_gen", "v1_text_root", "v4_par_imm_root"],
        "schema_evolution": ["v1_text", "v1_bin", "v2_imm", "v3_2pc_stream", "v4_par_2pc_imm_bin"],
    },
}


def cut(capture: Capture) -> tuple[int, collections.Counter[str], collections.Counter[str]]:
    """How many rows of the capture to keep, and their messages by tag: all, and with an xid."""
    stream = ReferenceStream(capture.encoding)
    counts: collections.Counter[str] = collections.Counter()
    with_xid: collections.Counter[str] = collections.Counter()
    streamed: set[int] = set()
    inside = False
    for number, (_, frame) in enumerate(capture.rows(), 1):
        message = stream.feed(frame)
        tag, fields = message["tag"], message["fields"]
        counts[tag] += 1
        if message["in_stream"] and ("xid", "xid?") in LAYOUTS[tag][1]:
            with_xid[tag] += 1
        if tag in "Bb":
            inside = True
        elif tag in "CP":
            inside = False
        elif tag == "S":
            streamed.add(fields["xid"])
        elif tag in "cp" or (tag == "A" and fields["xid"] == fields["subxid"]):
            streamed.discard(fields["xid"])
        if number >= FRAMES and not inside and not streamed:
            return number, counts, with_xid
    return sum(counts.values()), counts, with_xid


def write(capture: Capture, out: Path) -> tuple[dict[str, Any], set[int]]:
    """Writes the cut capture; its entry of index.json, and the xids that commit in it."""
    kept, counts, with_xid = cut(capture)
    with pyarrow.ipc.open_file(capture.root / capture.entry["path"]) as reader:
        table = reader.read_all()
    if not capture.entry["optionset"].endswith("_copydata"):
        table = table.slice(0, kept)
    elif kept < capture.entry["frames"]:
        of_messages = [payload[:1] == b"w" for payload in table["payload"].to_pylist()]
        seen = [number for number, message in enumerate(of_messages, 1) if message]
        table = table.slice(0, seen[kept - 1])
    metadata = dict(table.schema.metadata)
    described = json.loads(metadata[b"pgcap"])
    described["frames"] = table.num_rows
    metadata[b"pgcap"] = json.dumps(described, sort_keys=True).encode()
    path = out / capture.entry["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    options = pyarrow.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 19))
    table = table.replace_schema_metadata(metadata).combine_chunks()
    with pyarrow.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table)
    entry = {
        key: capture.entry[key]
        for key in (
            "client_encoding",
            "guc_set",
            "instance",
            "live",
            "method",
            "options",
            "optionset",
            "path",
            "performance",
            "pg_major",
            "scenario",
            "server_encoding",
            "server_version",
            "session_gucs",
            "truth",
        )
    }
    entry["cut"] = kept < sum(capture.entry["message_counts"].values())
    entry["frames"] = table.num_rows
    entry["message_counts"] = dict(sorted(counts.items()))
    entry["with_xid_field"] = dict(sorted(with_xid.items()))
    committed = set()
    stream = ReferenceStream(capture.encoding)
    for number, (_, frame) in enumerate(capture.rows()):
        if number == kept:
            break
        message = stream.feed(frame)
        if message["tag"] in "BcK":
            committed.add(message["fields"]["xid"])
    return entry, committed


def write_truth(capture: Capture, xids: set[int], out: Path) -> None:
    """The scenario's script, and the lines of test_decoding up to its last wanted transaction."""
    truth = capture.truth
    assert truth is not None
    lines = truth.read("test_decoding.jsonl").splitlines(keepends=True)
    last = max(n for n, (_, xid, _) in enumerate(truth.lines) if xid in xids)
    path = out / capture.entry["truth"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in (
            ("test_decoding.jsonl", b"".join(lines[: last + 1])),
            ("script.sql", truth.read("script.sql")),
        ):
            # a fixed time: the same input makes the same bytes
            archive.writestr(
                zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0)),
                data,
                compress_type=zipfile.ZIP_DEFLATED,
                compresslevel=9,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, default=paths.DATA)
    arguments = parser.parse_args()
    entries = []
    for instance, scenarios in WANTED.items():
        for scenario, optionsets in scenarios.items():
            found = {
                capture.entry["optionset"]: capture
                for capture in captures(arguments.corpus, instance=instance, scenario=scenario)
            }
            xids: set[int] = set()
            for optionset in optionsets:
                entry, committed = write(found[optionset], arguments.out)
                entries.append(entry)
                xids |= committed
            write_truth(found[optionsets[0]], xids, arguments.out)
    index = {"format": "pgcap-index/1", "captures": entries}
    text = json.dumps(index, indent=1, sort_keys=True) + "\n"
    (arguments.out / "index.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
