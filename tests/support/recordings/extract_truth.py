"""Takes whole captures with the server's COPY of their tables out of a corpus.

    PYTHONPATH=tests python -m support.recordings.extract_truth CORPUS [--out tests/data/final]

The result has the corpus' own form (see corpus_files.py), without what test_decoding told.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
from support import paths
from support.recordings.corpus_files import Capture, captures

WANTED = {
    "14": {"dml": ["v1_text", "v1_bin"], "fuzz_a": ["v1_text", "v1_bin"]},
    "16": {
        "all_types": ["v1_text", "v1_bin", "v1_text_gucB", "v1_text_gucC", "v1_text_gucD"],
        "dml": ["v1_text", "v1_bin"],
        "encoding_latin1": ["v1_text_latin1", "v1_bin_latin1", "v1_text_utf8", "v1_bin_utf8"],
        "encoding_utf8": ["v1_text_latin1", "v1_bin_latin1"],
        "fuzz_a": ["v4_par_2pc_imm_bin"],
        "schema_evolution": ["v1_text", "v1_bin", "v4_par_2pc_imm_bin"],
    },
    "18": {"all_types": ["v1_text", "v1_bin"], "schema_evolution": ["v1_text", "v1_bin"]},
}
TRUTH_ALONE = {
    "14": ["messages", "streaming"],
    "16": ["messages", "origin", "partitions", "streaming", "two_phase"],
    "18": ["partitions"],
}
"""Scenarios whose captures are in tests/data already."""
DROPPED = {"file_bytes", "payload_bytes", "sha256", "committed_transactions"}


def copy_capture(capture: Capture, out: Path) -> None:
    with pyarrow.ipc.open_file(capture.root / capture.entry["path"]) as reader:
        table = reader.read_all()
    path = out / capture.entry["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    options = pyarrow.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 19))
    with pyarrow.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())


def copy_truth(capture: Capture, out: Path) -> None:
    path = out / capture.entry["truth"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        zipfile.ZipFile(capture.root / capture.entry["truth"]) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
    ):
        for name in source.namelist():
            if name in ("catalog.json", "script.sql") or name.startswith("copy/"):
                # a fixed time: the same input makes the same bytes
                archive.writestr(
                    zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0)),
                    source.read(name),
                    compress_type=zipfile.ZIP_DEFLATED,
                    compresslevel=9,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, default=paths.DATA / "final")
    arguments = parser.parse_args()
    entries = []
    for instance, scenarios in WANTED.items():
        for scenario, optionsets in scenarios.items():
            found = {
                capture.entry["optionset"]: capture
                for capture in captures(arguments.corpus, instance=instance, scenario=scenario)
            }
            for optionset in optionsets:
                copy_capture(found[optionset], arguments.out)
                entries.append(
                    {k: v for k, v in found[optionset].entry.items() if k not in DROPPED}
                )
            copy_truth(found[optionsets[0]], arguments.out)
    for instance, names in TRUTH_ALONE.items():
        for scenario in names:
            found_here = captures(arguments.corpus, instance=instance, scenario=scenario)
            copy_truth(found_here[0], arguments.out)
    index = {"format": "pgcap-index/1", "captures": entries}
    text = json.dumps(index, indent=1, sort_keys=True) + "\n"
    (arguments.out / "index.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
