"""Where Delta tables are: a directory or object storage, and what either can't do."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow import fs

from .._disk import fsync_path
from ..changelog.remote import refuse_secrets
from ..errors import PgOutputError, RetryableError
from .targets import ConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LONGEST = 600  # characters of an error of the storage
_PAINT = re.compile(r"\x1b\[[0-9;]*m|\\u\{1b\}\[[0-9;]*m")
# How errors of a storage read that may answer later.
_PASSES = re.compile(
    r"error sending request|connection (refused|reset|closed)|connect error|dns error|timed? ?out|"
    r"broken pipe|slow ?down|too many requests|internal ?error|service ?unavailable|"
    r"\b(429|500|502|503|504)\b",
    re.IGNORECASE,
)
_FULL = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
_SECRET = re.compile(r"secret|token|password|key|credential|sas|signature", re.IGNORECASE)


def require_deltalake() -> Any:
    """The module deltalake.

    Raises
    ------
    PgOutputError
        It is not installed.
    """
    try:
        import deltalake
    except ImportError as error:
        raise PgOutputError(
            f"deltalake is not installed ({error})",
            code="missing_package",
            hint="Install the extra pgoutput-fast[delta]",
        ) from error
    return deltalake


def may_pass(text: str) -> bool:
    """Whether an error of a storage reads as if it might answer later."""
    return _PASSES.search(text) is not None


class DeltaPlace:
    """Where tables are.

    Parameters
    ----------
    uri : str
        A path, or a URL such as ``s3://bucket/lake``.
    options : mapping of str to str, optional
        What delta-rs has to know of the storage. No error shows secrets among them.

    Raises
    ------
    PgOutputError
        The URL or an endpoint has a secret, or delta-rs can't keep tables in such a place.

    Attributes
    ----------
    path : pathlib.Path or None
        None: it is not in this file system.
    """

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        refuse_secrets(uri, options)
        self.options = dict(options or {})
        self.path: Path | None = None
        if "://" not in uri:
            self.path = Path(uri).absolute()
            uri = str(self.path)
        elif uri.startswith("file://"):
            self.path = Path(unquote(uri.removeprefix("file://")))
            uri = str(self.path)
        self.uri = uri.rstrip("/")
        if bad := re.search(r"[%\[\]{}`^|<>\\?*]", self.uri):
            raise PgOutputError(
                f"delta-rs can't keep tables in {self.uri}, as its name has {bad.group()!r}",
                code="bad_option",
                hint="Give a directory of another name",
            )

    def __repr__(self) -> str:
        return f"Place({self.uri!r})"

    def filesystem(self, directory: str = "") -> Any:
        """The files of a directory in it."""
        if self.path is not None:
            return fs.SubTreeFileSystem(str(self.path / directory), fs.LocalFileSystem())
        from deltalake.fs import DeltaStorageHandler

        uri = f"{self.uri}/{directory}" if directory else self.uri
        return fs.PyFileSystem(DeltaStorageHandler(uri, self.options))

    def move(self, before: str, after: str) -> None:
        """Move a table's directory, which object storage can't do."""
        if self.path is None:
            raise PgOutputError(f"nothing can be moved in {self.uri}", code="not_supported")
        with self.refusals(before):
            if (self.path / after).is_dir() and any((self.path / after).iterdir()):
                raise PgOutputError(
                    f"the table in {self.path / before} was renamed, but the directory of its new "
                    f"name, {self.path / after}, is there already",
                    code="not_ours",
                    path=str(self.path / after),
                    hint="Find out which of the two directories holds the table, and move the "
                    "other one away",
                )
            (self.path / before).rename(self.path / after)
            fsync_path((self.path / after).parent)

    def has_files(self, directory: str) -> bool:
        """Whether there is anything in a directory."""
        with self.refusals(directory):
            chosen = fs.FileSelector(directory, allow_not_found=True)
            return bool(self.filesystem().get_file_info(chosen))

    @contextlib.contextmanager
    def refusals(self, what: str) -> Iterator[None]:
        """Raise errors of delta-rs and of the storage as this package's, without secrets."""
        from deltalake.exceptions import CommitFailedError, DeltaError

        try:
            yield
        except CommitFailedError as error:
            raise self.conflict(what, f" ({self.shown(error)})") from None
        except Exception as error:
            # delta-rs raises plain exceptions too.
            known = isinstance(error, (DeltaError, OSError, pa.ArrowException))
            if not known and type(error) is not Exception:
                raise
            text = f"can't read or write {what} in {self.uri}: {self.shown(error)}"
            if self.path is None:
                text += ". Look at the credentials, the endpoint and the bucket"
                if "URL scheme is not allowed" in text:
                    text += "; an endpoint of http:// needs AWS_ALLOW_HTTP=true"
                if may_pass(text):
                    raise RetryableError(text, code="io_failed") from None
            code = "io_failed"
            if _FULL.search(text):
                code = "disk_full"
                text += ". Nothing is lost: free space there, and call it again"
            raise PgOutputError(text, code=code) from None

    def conflict(self, what: str, shown: str = "") -> ConflictError:
        """The error that another program has written something first, with what was said of it."""
        return ConflictError(
            f"another program has written {what} in {self.uri} at the same time{shown}. One sync "
            "at a time can write a target"
        )

    def shown(self, error: BaseException) -> str:
        """The text of an error in one line, without the secrets that are known."""
        text = " ".join(_PAINT.sub(" ", str(error).replace("\\n", " ")).split())
        known = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        for name, value in (*self.options.items(), *known.items()):
            if len(value) > 3 and _SECRET.search(name):
                text = text.replace(value, "…")
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def directory_of(name: str) -> str:
    """The directory of a table of this name.

    delta-rs 1.6 takes ``%XX`` in a path for the character, and fails on some others; polars 2.1
    does on spaces and what is not ASCII. So they are ``@XX``, and ``@`` itself too.
    """
    return quote(name, safe="%").replace("%", "@")
