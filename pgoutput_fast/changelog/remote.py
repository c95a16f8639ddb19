"""Read and write objects in S3-compatible object storage, for the upload of a change log.

The AWS SDK finds the credentials; a URL never has any.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from .._disk import create_file
from ..errors import Argument, PgOutputError, printable
from ..segments.format import require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PART_BYTES = 16 << 20  # bytes to send or receive at a time
_CONNECT_TIMEOUT, _REQUEST_TIMEOUT = 5.0, 30.0  # seconds
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_LOCAL = frozenset({"file", "duckdb"})
_BLOBS = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""The schemes of URLs in which a container's name stands before an '@'."""
_SECRET = re.compile(
    r"(?:secret|token|password|key|credential|sas|sig(?:nature)?)[^=&]*=", re.IGNORECASE
)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_STEP = re.compile(r"(?!\.{1,2}(?:/|$))[A-Za-z0-9_.=-]+", re.ASCII)
_ERROR = re.compile(r"AWS Error ([A-Z0-9_]+)(?: \(HTTP status ([0-9]+)\))?", re.ASCII)
_PASSING = {
    "INTERNAL_FAILURE", "NETWORK_CONNECTION", "REQUEST_TIMEOUT", "SERVICE_UNAVAILABLE", "SLOW_DOWN",
    "THROTTLING",
}  # fmt: skip
_CREDENTIALS = (
    "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile AWS_PROFILE, "
    "or the machine's role; they need the rights to list, read and write there"
)
_OPTIONS = (
    f"Leave it out. {_CREDENTIALS}. For Delta tables, give credentials in ",
    Argument("storage_options"),
)
_ADVICE = {
    "NO_SUCH_BUCKET": ("Create the bucket, or give another name",),
    "NETWORK_CONNECTION": (
        "Check the network, and the endpoint of ",
        Argument("upload_endpoint"),
        " or AWS_ENDPOINT_URL",
    ),
}
_REGION_ADVICE = "Set AWS_REGION to the region of the bucket"


class RemoteError(PgOutputError):
    """The object storage returns an error, or can't be reached.

    Attributes
    ----------
    passes : bool
        Whether a later try may succeed.
    """

    code = "io_failed"

    def __init__(
        self, message: str, *, passes: bool, hint: str | Sequence[str | Argument] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.passes = passes


class RemotePlace(NamedTuple):
    """A prefix in object storage.

    Fields: bucket; prefix (without slashes at its ends); endpoint (a URL, or None for AWS).
    """

    bucket: str
    prefix: str
    endpoint: str | None

    @property
    def url(self) -> str:
        """The URL. It has no secrets."""
        return f"s3://{self.bucket}/{self.prefix}"


def parse_place(
    url: str, endpoint: str | None = None, *, names: tuple[str, str] = ("url", "endpoint")
) -> RemotePlace:
    """Parse a URL ``s3://bucket/prefix``, and the endpoint of the storage.

    Parameters
    ----------
    url : str
    endpoint : str, optional
        ``http://host:port`` or ``https://host``; by default the value of the environment variable
        AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.
    names : pair of str
        The caller's options for the URL and the endpoint, for errors.

    Raises
    ------
    PgOutputError
        The URL or the endpoint is malformed, or has a user or a password. The error shows neither
        these nor what follows a '?'.
    """
    _refuse_user(url, "the URL", names[0])
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    if scheme != "s3" or not _BUCKET.fullmatch(bucket):
        raise PgOutputError(
            f"{printable(without_secrets(url))} is not a URL of S3",
            code="bad_option",
            parameter=names[0],
            hint="Give s3://bucket/prefix, with the name of a "
            "bucket in lower-case letters, digits, '-' and '.'",
        )
    if not prefix or not all(map(_STEP.fullmatch, prefix.split("/"))):
        raise PgOutputError(
            f"{printable(without_secrets(url))} needs a prefix after the bucket, such as "
            "s3://bucket/lake. The prefix has names of letters, digits, '_', '-', '=' and '.', "
            "separated by '/', and no '?' after it",
            code="bad_option",
            parameter=names[0],
        )
    parameter: str | None = names[1]
    if endpoint is None:
        variable = next((name for name in _ENDPOINT_VARIABLES if os.environ.get(name)), "")
        endpoint, parameter = os.environ.get(variable, ""), None
    if endpoint:
        _refuse_user(endpoint, "the endpoint", parameter)
        try:
            parts = urlsplit(endpoint)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise PgOutputError(
                f"{printable(without_secrets(endpoint))} is not an endpoint",
                code="bad_option",
                parameter=parameter,
                hint="Give http://host:port or https://host",
            )
    return RemotePlace(bucket, prefix, endpoint.removesuffix("/") or None)


def refuse_secrets(url: str, options: Mapping[str, str] | None = None, *, parameter: str) -> None:
    """Raise an error if a URL of object storage, or the endpoint of the storage, has a secret.

    Libraries show URLs and endpoints in their errors, and Spark shows them in its plans. Local
    paths are never refused.

    Parameters
    ----------
    url : str
        A path, or a URL of any storage.
    options : mapping of str to str, optional
        The storage options of a library. Only the endpoints among them are checked: secrets in
        other options are allowed.
    parameter : str
        The caller's option for the URL, for errors. `options` are always its storage_options.

    Raises
    ------
    PgOutputError
        The URL or an endpoint has a secret. The error does not show it.
    """
    match = _URL.match(url)
    if match is not None and match[1].lower() not in _LOCAL:
        scheme, rest = match[1].lower(), url[match.end() :]
        # A secret key may contain slashes, so check everything up to the last '@'.
        before, at, _ = rest.rpartition("@")
        if at and (scheme not in _BLOBS or ":" in before):
            _refuse_user(url, "the URL", parameter, takes_options=True)
        query = unquote(rest.partition("?")[2])
        if "@" in query or _SECRET.search(query):
            raise PgOutputError(
                "the URL of the object storage has a secret after its '?'",
                code="bad_option",
                parameter=parameter,
                hint=_OPTIONS,
            )
        for name, value in os.environ.items():
            if name.startswith("AWS_ENDPOINT"):
                _refuse_user(value, f"the endpoint {name}", None)
    for name, value in (options or {}).items():
        if "ENDPOINT" in name.upper():
            _refuse_user(value, f"the endpoint {name}", "storage_options", takes_options=True)


def without_secrets(url: str) -> str:
    """Return a URL to show in an error: without the query, and all that is before an '@'."""
    match = _URL.match(url)
    begin = "" if match is None else match[0]
    return begin + url[len(begin) :].rpartition("@")[2].partition("?")[0]


def _refuse_user(
    url: str, what: str, parameter: str | None, *, takes_options: bool = False
) -> None:
    if "@" in url:
        raise PgOutputError(
            f"{what} of the object storage has a user or password before an '@'",
            code="bad_option",
            parameter=parameter,
            hint=_OPTIONS if takes_options else f"Leave it out. {_CREDENTIALS}",
        )


class Remote:
    """The objects under one prefix.

    Parameters
    ----------
    place : RemotePlace

    Raises
    ------
    PgOutputError
        pyarrow is not installed, or was built without S3.
    """

    def __init__(self, place: RemotePlace) -> None:
        self.url = place.url
        self._bucket = place.bucket
        self._root = f"{place.bucket}/{place.prefix}"
        self._pa = require_pyarrow()
        try:
            from pyarrow import fs
        except ImportError as error:  # pragma: no cover
            raise PgOutputError(
                f"object storage needs pyarrow with S3 ({error})", code="missing_package"
            ) from error
        if not hasattr(fs, "S3FileSystem"):
            raise PgOutputError(
                "this build of pyarrow lacks S3",
                code="missing_package",
                hint="Install pyarrow from the Python Package Index",
            )
        self._fs = fs
        # Upload parts in the background. If a stream that uploads in the foreground fails, its
        # destructor creates an object from the parts so far (seen with pyarrow 26).
        options: dict[str, Any] = {
            "endpoint_override": place.endpoint,
            "connect_timeout": _CONNECT_TIMEOUT,
            "request_timeout": _REQUEST_TIMEOUT,
            "background_writes": True,
        }
        try:
            # One request for a small object instead of three.
            self._s3 = fs.S3FileSystem(allow_delayed_open=True, **options)
        except TypeError:  # pyarrow 18
            self._s3 = fs.S3FileSystem(**options)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def check(self) -> None:
        """Check that the bucket exists.

        Raises
        ------
        RemoteError
            The bucket does not exist, or the storage returns an error or can't be reached.
        """
        try:
            info = self._s3.get_file_info(self._bucket)
        except OSError as error:
            raise self._error("look at the bucket", error) from error
        if info.type == self._fs.FileType.NotFound:
            raise RemoteError(
                f"can't use {self.url}: there is no bucket {self._bucket}",
                passes=False,
                hint=_ADVICE["NO_SUCH_BUCKET"],
            )

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if the object does not exist.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        """
        try:
            info = self._s3.get_file_info(self._path(name))
        except OSError as error:
            raise self._error(f"look at {name}", error) from error
        size: int | None = info.size if info.is_file else None
        return size

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if the object does not exist.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        """
        try:
            with self._s3.open_input_file(self._path(name)) as file:
                content: bytes = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(f"read {name}", error) from error
        return content

    def write(self, name: str, content: Any) -> None:
        """Write an object. After an error, no part of it exists.

        Parameters
        ----------
        name : str
        content : bytes or pyarrow.Buffer

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        """
        try:
            stream = self._s3.open_output_stream(self._path(name))
            view = memoryview(content)
            for start in range(0, len(view), _PART_BYTES):
                if start:
                    stream.flush()  # waits, so that only one part is in memory
                stream.write(view[start : start + _PART_BYTES])
            # No `with`: after an error it would close the stream, which creates a partial object.
            stream.close()
        except OSError as error:
            raise self._error(f"write {name}", error) from error

    def copy(self, path: Path, name: str) -> bool:
        """Upload a local file, unless an object of this name exists already.

        Returns
        -------
        bool
            Whether the file was uploaded.

        Raises
        ------
        FileNotFoundError
            The local file does not exist any more.
        PgOutputError
            The existing object has another size, or the local file can't be read.
        RemoteError
            The storage returns an error, or can't be reached.
        """
        try:
            with self._pa.memory_map(os.fspath(path)) as file:
                content = file.read_buffer()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise PgOutputError(
                f"can't read {path}: {error.strerror or error}", code="io_failed", path=str(path)
            ) from error
        size = self.size(name)
        if size is None:
            self.write(name, content)
        elif size != content.size:
            raise PgOutputError(
                f"{self.url}/{name} has {size} bytes, but {path} has {content.size}: another "
                "program wrote there",
                code="not_ours",
                path=f"{self.url}/{name}",
                hint="Give another prefix",
            )
        return size is None

    def fetch(self, name: str, path: Path) -> None:
        """Download an object to a new local file.

        Raises
        ------
        PgOutputError
            The object does not exist any more.
        OSError
            The file can't be written.
        RemoteError
            The storage returns an error, or can't be reached.
        """
        try:
            source = self._s3.open_input_file(self._path(name))
        except FileNotFoundError:
            raise PgOutputError(
                f"{self.url}/{name} was deleted during the download",
                code="changes_missing",
                path=f"{self.url}/{name}",
                hint="Start again with an empty directory",
            ) from None
        except OSError as error:
            raise self._error(f"read {name}", error) from error
        with source, create_file(path) as file:
            while content := self._part(source, name):
                file.write(content)

    def _part(self, source: Any, name: str) -> bytes:
        try:
            content: bytes = source.read(_PART_BYTES)
        except OSError as error:
            raise self._error(f"read {name}", error) from error
        return content

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names of the objects in a folder, each with the folder's name.

        Without a folder, return the objects that are in none.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        """
        path = f"{self._root}/{folder}".removesuffix("/")
        try:
            infos = self._s3.get_file_info(self._fs.FileSelector(path, allow_not_found=True))
        except OSError as error:
            raise self._error(f"list {folder or 'what is there'}", error) from error
        before = f"{folder}/" if folder else ""
        return sorted(before + info.base_name for info in infos if info.is_file)

    def has_any(self) -> bool:
        """Return whether the prefix has any object.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        """
        try:
            selector = self._fs.FileSelector(self._root, allow_not_found=True)
            return bool(self._s3.get_file_info(selector))
        except OSError as error:
            raise self._error("list what is there", error) from error

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects in the given order.

        Raises
        ------
        RemoteError
            The storage returns an error, or can't be reached.
        """
        for name in names:
            try:
                self._s3.delete_file(self._path(name))
            except FileNotFoundError:
                pass  # an earlier try has deleted it
            except OSError as error:
                raise self._error(f"delete {name}", error) from error

    def _error(self, action: str, error: OSError) -> RemoteError:
        """Return the RemoteError for an error of the storage, with advice."""
        match = _ERROR.search(str(error))
        name, status = (match[1], match[2] or "") if match else ("", "")
        passes = not match or name in _PASSING or status[:1] == "5" or status == "429"
        hint: str | tuple[str | Argument, ...] = _ADVICE.get(name, ())
        if status == "301" or name in ("PERMANENT_REDIRECT", "AUTHORIZATION_HEADER_MALFORMED"):
            hint = _REGION_ADVICE
        if not hint and not passes:
            hint = _CREDENTIALS
        text = printable(" ".join(str(error).split()))
        return RemoteError(f"can't {action} in {self.url}: {text}", passes=passes, hint=hint)
