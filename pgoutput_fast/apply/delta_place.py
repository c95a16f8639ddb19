"""The place of Delta tables: a local directory or object storage, with the errors of both."""

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

_LONGEST = 600  # characters to which an error text of the storage is cut
_PAINT = re.compile(r"\x1b\[[0-9;]*m|\\u\{1b\}\[[0-9;]*m")
# Texts of errors after which a retry may succeed.
_PASSES = re.compile(
    r"error sending request|connection (refused|reset|closed)|connect error|dns error|timed? ?out|"
    r"broken pipe|slow ?down|too many requests|internal ?error|service ?unavailable|"
    r"\b(429|500|502|503|504)\b",
    re.IGNORECASE,
)
_FULL = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
_SECRET = re.compile(r"secret|token|password|key|credential|sas|signature", re.IGNORECASE)


def require_deltalake() -> Any:
    """Return the module deltalake.

    Raises
    ------
    PgOutputError
        The package deltalake is not installed.
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
    """Whether an error text of a storage suggests that a retry may succeed."""
    return _PASSES.search(text) is not None


class DeltaPlace:
    """A directory, local or in object storage, that holds the tables of a target.

    Parameters
    ----------
    uri : str
        A path, or a URL such as ``s3://bucket/lake``.
    options : mapping of str to str, optional
        Storage options of delta-rs. Errors do not show secrets among them.

    Raises
    ------
    PgOutputError
        The URL or an endpoint has a secret, or the path has a character that delta-rs can't handle.

    Attributes
    ----------
    path : pathlib.Path or None
        None if the place is not in the local file system.
    """

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        refuse_secrets(uri, options, parameter="target")
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
                f"delta-rs can't keep tables in {self.uri}: its name has {bad.group()!r}",
                code="bad_option",
                parameter="target",
                hint="Give a directory with another name",
            )

    def __repr__(self) -> str:
        return f"Place({self.uri!r})"

    def filesystem(self, directory: str = "") -> Any:
        """Return the file system of a directory in this place."""
        if self.path is not None:
            return fs.SubTreeFileSystem(str(self.path / directory), fs.LocalFileSystem())
        from deltalake.fs import DeltaStorageHandler

        uri = f"{self.uri}/{directory}" if directory else self.uri
        return fs.PyFileSystem(DeltaStorageHandler(uri, self.options))

    def move(self, before: str, after: str) -> None:
        """Move a table's directory; only a local place can do that."""
        if self.path is None:
            raise PgOutputError(f"nothing can be moved in {self.uri}", code="not_supported")
        with self.refusals(before):
            if (self.path / after).is_dir() and any((self.path / after).iterdir()):
                raise PgOutputError(
                    f"the table in {self.path / before} was renamed, but the directory of its new "
                    f"name, {self.path / after}, exists already",
                    code="not_ours",
                    path=str(self.path / after),
                    hint="Find out which of the two directories holds the table, and move the "
                    "other one away",
                )
            (self.path / before).rename(self.path / after)
            fsync_path((self.path / after).parent)

    def has_files(self, directory: str) -> bool:
        """Whether a directory has any files."""
        with self.refusals(directory):
            chosen = fs.FileSelector(directory, allow_not_found=True)
            return bool(self.filesystem().get_file_info(chosen))

    @contextlib.contextmanager
    def refusals(self, subject: str) -> Iterator[None]:
        """Translate errors of delta-rs and the storage to `PgOutputError`, without secrets."""
        from deltalake.exceptions import CommitFailedError, DeltaError

        try:
            yield
        except CommitFailedError as error:
            raise self.conflict(subject, f" ({self.shown(error)})") from None
        except Exception as error:
            # delta-rs also raises bare `Exception`s.
            is_expected = isinstance(error, (DeltaError, OSError, pa.ArrowException))
            if not is_expected and type(error) is not Exception:
                raise
            text = f"can't read or write {subject} in {self.uri}: {self.shown(error)}"
            if self.path is None:
                text += ". Check the credentials, the endpoint and the bucket"
                if "URL scheme is not allowed" in text:
                    text += "; an http:// endpoint needs AWS_ALLOW_HTTP=true"
                if may_pass(text):
                    raise RetryableError(text, code="io_failed") from None
            code = "io_failed"
            if _FULL.search(text):
                code = "disk_full"
                text += ". Nothing is lost. Free space there, and start sync again"
            raise PgOutputError(text, code=code) from None

    def conflict(self, subject: str, shown: str = "") -> ConflictError:
        """Return the error that another program has committed first; `shown` is its details."""
        return ConflictError(
            f"another program wrote {subject} in {self.uri} at the same time{shown}. Only one sync "
            "at a time can write a target"
        )

    def shown(self, error: BaseException) -> str:
        """Return the text of an error in one line, without known secrets."""
        text = " ".join(_PAINT.sub(" ", str(error).replace("\\n", " ")).split())
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        for name, value in (*self.options.items(), *environment.items()):
            if len(value) > 3 and _SECRET.search(name):
                text = text.replace(value, "…")
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def directory_of(name: str) -> str:
    """Return the directory for a table's name, with special characters as ``@XX``.

    delta-rs 1.6 decodes ``%XX`` in a path, and fails on some characters. polars 2.1 fails on spaces
    and characters beyond ASCII.
    """
    return quote(name, safe="%").replace("%", "@")
