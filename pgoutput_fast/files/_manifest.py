"""The manifest of an export's directory, ``_manifest.json``: its files, and how far it has come.

Only the files that the manifest lists belong to the export. The files of a step are written under
temporary names and synced. Then a manifest that lists them replaces the one before, and only then
are they renamed to their final names. If the process is killed before that, the manifest says which
files are still to be renamed, and the next process renames them. So every file is whole, and either
all files of a step are there or none of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from pgoutput_fast._disk import Folder, fsync_path
from pgoutput_fast._forms import of_form
from pgoutput_fast.captured.progress import Progress
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.lsn import parse_lsn

from ._flatten import Shape

FORMAT_VERSION = 3
NAME = "_manifest.json"
_STEM = r"[\w%~-]+\.[\w%~-]+|[\w%~-]+~[0-9a-f]{12}"
_FILES = (
    r"_manifest\.json"
    rf"|(?:_events|_errors|{_STEM})(?:\.v[0-9]+)?(?:\.part[0-9]+)?\.parquet"
)
EXPORTED = Folder("", _FILES)
TEMPORARY = Folder(".pgoutput_fast.tmp", rf"rows|{_FILES}")
"""Where the files of a step are until it is whole."""
_LONGEST = 180  # most bytes of a file's name before the version, part and suffix


class Part(TypedDict):
    """A file of a table, of the events or of the errors."""

    file: str
    bytes: int
    rows: int


class _ColumnOfTable(TypedDict, total=False):
    column: str
    type: Any


class ColumnEntry(_ColumnOfTable):
    """A column of the files. `part` says where its values come from: "change", "after" or "before".

    A column that comes from a column of the table has that column's name and type as `column` and
    `type`.
    """

    name: str
    part: str
    arrow: str


class Version(TypedDict):
    """A version of a table's schema."""

    version: int
    schema: str
    relation_id: int
    replica_identity: str
    key_columns: list[str]
    columns: list[ColumnEntry]
    rows: int
    parts: list[Part]


class _TableRenamed(TypedDict, total=False):
    first: list[str]


class TableEntry(_TableRenamed):
    """A table. `files` is what the names of its files begin with.

    `namespace` and `name` are those that it had last. `first` has those that it had first, by which
    its files are named, if they are others.
    """

    relation_id: int
    namespace: str
    name: str
    files: str
    versions: list[Version]


class Copying(TypedDict):
    """A snapshot of which so many files were read."""

    relation_id: int
    generation: int
    files: int


class Manifest(TypedDict):
    """The whole manifest.

    `publishing` has the names of the files that the last step made. `elsewhere` has the positions
    of tables that are at another one than `position`, by relation id.
    """

    pgoutput_fast_files: int
    format: str
    publishing: list[str]
    options: dict[str, Any]
    source: dict[str, Any]
    start: str | None
    position: str | None
    elsewhere: dict[str, str]
    copying: Copying | None
    rolled_back: int
    undecided: int
    tables: list[TableEntry]
    events: list[Part]
    errors: list[Part]


def new_manifest(format: str, options: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """Make the manifest of a directory to which nothing was written yet."""
    return {
        "pgoutput_fast_files": FORMAT_VERSION,
        "format": format,
        "publishing": [],
        "options": options,
        "source": source,
        "start": None,
        "position": None,
        "elsewhere": {},
        "copying": None,
        "rolled_back": 0,
        "undecided": 0,
        "tables": [],
        "events": [],
        "errors": [],
    }


def checked(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse and check the JSON of a manifest.

    Raises
    ------
    PgOutputError
        The text is no manifest, is of another version, or names files outside the directory.
    """
    try:
        found = json.loads(text)
        version = found["pgoutput_fast_files"]
        if version == FORMAT_VERSION:
            manifest: dict[str, Any] = of_form(found, Manifest)
            if manifest["position"] not in (None, "end"):
                Progress.of(manifest)
            if manifest["start"] is not None:
                parse_lsn(manifest["start"])
            stems = [table["files"] for table in manifest["tables"]]
            for name in (*manifest["publishing"], *stems, *file_names(manifest)):
                _check_file_name(name)
            return manifest
    except (ValueError, KeyError, TypeError, RecursionError, PgOutputError) as error:
        raise PgOutputError(
            f"{where} is damaged, or no manifest ({error!r})", code="damaged", path=str(where)
        ) from error
    raise PgOutputError(
        f"{where} is of version {version!r}, and this pgoutput_fast reads {FORMAT_VERSION}",
        code="not_supported",
        path=str(where),
        hint="Begin again with a new directory",
    )


def file_names(manifest: dict[str, Any]) -> Iterator[str]:
    """The names of all files that a manifest lists, without that of the manifest itself."""
    parts = [*manifest["events"], *manifest["errors"]]
    for table in manifest["tables"]:
        for version in table["versions"]:
            parts += version["parts"]
    yield from (part["file"] for part in parts)


def _check_file_name(name: str) -> None:
    """Refuse a name that no export gives to a file, as it may lead to a file of someone else.

    Raises
    ------
    ValueError
        No export gives this name.
    """
    if not name or name[0] in ".-" or name == NAME or re.search(r"[/\\\0]", name):
        raise ValueError(f"{name!r} is no name of an exported file")


def manifest_lines(manifest: dict[str, Any]) -> Iterator[str]:
    """A manifest as JSON, a line for each entry, and for each table.

    Python's own encoder takes tens of times as long if it indents.
    """
    start = "{"
    for key, value in manifest.items():
        yield f"{start}{json.dumps(key)}: "
        if key == "tables":
            yield "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
        else:
            yield json.dumps(value)
        start = ",\n"
    yield "}\n"


# --- names ---------------------------------------------------------------------------------------


def _part(name: str) -> str:
    """A name as a part of a file's name: letters, digits, - and _ stay, all else becomes %XX."""
    return "".join(
        letter
        if letter.isalnum() or letter in "-_"
        else "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogateescape"))
        for letter in name
    )


def file_stem(namespace: str, name: str) -> str:
    """What the names of a table's files begin with, before version and part.

    In rare cases two tables get the same text here; :func:`unique` makes them different.
    """
    stem = f"{_part(namespace or 'pg_catalog')}.{_part(name)}"
    if stem[0] in "-_":
        # Spark and others pass over files that begin with _, and - begins a command's option.
        stem = f"%{ord(stem[0]):02X}{stem[1:]}"
    if len(stem.encode()) > _LONGEST:
        digest = hashlib.sha256(stem.encode()).hexdigest()[:12]
        stem = stem.encode()[: _LONGEST - 13].decode("utf-8", "ignore") + "~" + digest
    return stem


def first_names(table: dict[str, Any]) -> tuple[str, str]:
    """Schema and name that a table had first, by which its files are named."""
    namespace, name = table.get("first") or (table["namespace"], table["name"])
    return namespace, name


def folded(name: str) -> str:
    """A text that is equal for names that a file system may take for the same."""
    return unicodedata.normalize("NFKC", name).casefold()


def unique(name: str, taken: set[str]) -> str:
    """The name, with ~2, ~3 … at its end if it is in `taken`; the result is added to `taken`."""
    found = name
    number = 1
    while folded(found) in taken:
        number += 1
        found = f"{name}~{number}"
    taken.add(folded(found))
    return found


# --- tables and versions -------------------------------------------------------------------------


class Tables:
    """The tables of a manifest, and the versions of their schemas.

    A table is known by its relation id: it is one table under each name that it has had.
    """

    def __init__(self, manifest: dict[str, Any]) -> None:
        self._tables = manifest["tables"]
        self._by_id = {one["relation_id"]: one for one in self._tables}

    def version(
        self, shape: Shape, newest: tuple[str, str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's entries for a table and its version, which are added if they are new.

        Parameters
        ----------
        shape : Shape
        newest : (str, str)
            Schema and name that the table has now.
        """
        metadata = {key.decode(): value.decode() for key, value in shape.schema.metadata.items()}
        relation_id = int(metadata["pgoutput.relation_id"])
        namespace, name = metadata["pgoutput.namespace"], metadata["pgoutput.relation"]
        table = self._by_id.get(relation_id)
        if table is None:
            table = {
                "relation_id": relation_id, "namespace": namespace, "name": name, "versions": []
            }  # fmt: skip
            self._by_id[relation_id] = table
            self._tables.append(table)
        if (table["namespace"], table["name"]) != newest:
            table.setdefault("first", [table["namespace"], table["name"]])
            table.update(zip(("namespace", "name"), newest, strict=True))
        for version in table["versions"]:
            if version["schema"] == shape.digest:
                return table, version
        described = {one["name"]: one for one in json.loads(metadata["pgoutput.columns"])}
        version = {
            "version": len(table["versions"]) + 1,
            "schema": shape.digest,
            "relation_id": relation_id,
            "replica_identity": metadata["pgoutput.replica_identity"],
            "key_columns": json.loads(metadata["pgoutput.key_columns"]),
            "columns": [
                {"name": one.name, "part": one.part, "arrow": str(one.type)}
                | (
                    {"column": one.column, "type": described[one.column]["type"]}
                    if one.column is not None
                    else {}
                )
                for one in shape.columns
            ],
            "rows": 0,
            "parts": [],
        }
        table["versions"].append(version)
        return table, version


# --- the directory -------------------------------------------------------------------------------


def give_names(directory: Path, names: list[str]) -> None:
    """Rename the files of a step from their temporary names to those that the manifest lists.

    Raises
    ------
    PgOutputError
        A file exists neither under its temporary name nor under its final name.
    """
    temporary = TEMPORARY.path(directory)
    for name in names:
        written = temporary / name
        if written.exists():
            written.rename(directory / name)
        elif not (directory / name).exists():
            raise PgOutputError(
                f"{directory / name} is missing, which {NAME} has",
                code="missing_path",
                path=str(directory / name),
                hint="Begin again with a new directory",
            )
    fsync_path(directory)


def clear(directory: Path) -> None:
    """Delete the files of work that was not finished, as far as that is possible.

    Raises
    ------
    PgOutputError
        Their folder is a symbolic link.
    """
    with contextlib.suppress(OSError):  # something else is there, which makes it fail later
        for name in TEMPORARY.listed(directory):
            if TEMPORARY.is_own(name):
                TEMPORARY.delete(directory, name)
        TEMPORARY.path(directory).rmdir()
