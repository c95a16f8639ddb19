"""A server of S3-compatible object storage in this process, whose requests tests see and refuse.

    python object_storage.py

serves one in a process of its own, prints its endpoint, and ends when standard input does.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import make_server

SECRET = "a-secret-that-nobody-may-see"
KEY_ID = "AKIAKEYTHATISNOSECRET"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_numbers = itertools.count(1)


class Storage:
    """The server, and one bucket.

    Attributes
    ----------
    endpoint, url : str
        `url` is a prefix in the bucket.
    refuse : callable
        Called with the method, the key and the query of each request, before it is done; what it
        gives is an HTTP status with which the request is refused, such as "503 Slow Down".
    written : list of str
        Names of objects under the prefix, in the order in which they were.
    deleted : list of (str, int)
        The same, each with how many were written before.
    """

    def __init__(self, endpoint: str, bucket: str) -> None:
        self.endpoint = endpoint
        self.bucket = bucket
        self.root = f"{bucket}/some/lake"
        self.url = f"s3://{self.root}"
        self.refuse: Callable[[str, str, str], str | None] = lambda method, key, query: None
        self.written: list[str] = []
        self.deleted: list[tuple[str, int]] = []
        self.s3 = fs.S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True)
        self.s3.create_dir(bucket)

    def name(self, path: str) -> str:
        return unquote(path).removeprefix(f"/{self.root}").removeprefix("/")

    def note(self, method: str, path: str, query: str) -> None:
        if path.startswith(f"/{self.root}/"):
            part = "uploadId" in query
            if (method == "PUT" and not part and path[-1] != "/") or (method == "POST" and part):
                self.written.append(self.name(path))
            elif method == "DELETE":
                self.deleted.append((self.name(path), len(self.written)))

    def objects(self) -> dict[str, bytes]:
        """All objects under the prefix."""
        found = self.s3.get_file_info(
            fs.FileSelector(self.root, allow_not_found=True, recursive=True)
        )
        return {
            one.path.removeprefix(f"{self.root}/"): self.s3.open_input_file(one.path).read()
            for one in found
            if one.is_file
        }


class _Server:
    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self.current: Storage | None = None
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING", "")
        storage = self.current
        if storage is not None and (status := storage.refuse(method, path, query)):
            number, _, code = status.partition(" ")
            length = int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"].read(length)
            start(f"{number} Refused", [("Content-Type", "application/xml")])
            text = f"<Error><Code>{code}</Code><Message>It is refused.</Message></Error>"
            return [text.encode() if method != "HEAD" else b""]
        seen: list[str] = []

        def started(status: str, *rest: Any) -> Any:
            seen.append(status)
            return start(status, *rest)

        found = self._moto(environ, started)
        if storage is not None and seen and seen[0][:1] == "2":
            storage.note(method, path, query)
        return found

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@contextlib.contextmanager
def serving() -> Iterator[_Server]:
    """A server, for a module's tests."""
    server = _Server()
    try:
        yield server
    finally:
        server.close()


def new_storage(server: _Server, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A bucket of its own, whose credentials the environment has."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    server.current = None
    server.current = Storage(server.endpoint, f"bucket-{next(_numbers)}")
    return server.current


if __name__ == "__main__":
    with serving() as alone:
        print(alone.endpoint, flush=True)
        sys.stdin.read()
