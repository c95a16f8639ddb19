"""Streams over TLS: certificates are checked, and no secret is shown."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.expected_errors import expect_error
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import ReplicationConnection, RetryableError, connect, snapshot

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl"),
]


def openssl(*arguments: object, cwd: Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], cwd=cwd, check=True, capture_output=True)


def make_certificate(directory: Path, name: str, subject: str, authority: str | None) -> None:
    """A key and a certificate, signed by an authority or by itself."""
    key = ("-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-subj", f"/CN={subject}")
    if authority is None:
        openssl("req", "-x509", *key, "-days", 2, "-out", f"{name}.crt", cwd=directory)
        return
    openssl("req", "-new", *key, "-out", f"{name}.csr", cwd=directory)
    (directory / "extensions").write_text(f"subjectAltName=DNS:{subject}\n")
    openssl(
        *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt"),
        *("-CAkey", f"{authority}.key", "-CAcreateserial", "-days", 2),
        *("-extfile", "extensions", "-out", f"{name}.crt"),
        cwd=directory,
    )


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with TLS on, and the directory of the certificates."""
    made = tmp_path_factory.mktemp("tls")
    make_certificate(made, "ca", "authority", None)
    make_certificate(made, "server", "localhost", "ca")
    make_certificate(made, "client", "postgres", "ca")
    make_certificate(made, "other", "authority", None)
    # Those of Python packages are built without TLS.
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not installed:
        pytest.skip("no installed PostgreSQL")
    bindir = installed[-1].parent
    with EmbeddedServer(settings={"log_min_messages": "fatal"}, bindir=bindir, tcp=True) as server:
        owner = (server.directory / "data").stat()
        for name in ("server.key", "server.crt", "ca.crt"):
            path = server.directory / name
            shutil.copy(made / name, path)
            path.chmod(0o600)
            shutil.chown(path, owner.st_uid, owner.st_gid)
        rules = server.directory / "pg_hba.conf"
        rules.write_text(
            "local all,replication all trust\n"
            "hostssl all,replication certified 127.0.0.1/32 cert map=any\n"
            "hostssl all,replication all 127.0.0.1/32 scram-sha-256\n"
        )
        (server.directory / "pg_ident.conf").write_text("any /.* certified\n")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE ROLE certified REPLICATION LOGIN")
            connection.execute("CREATE TABLE t (id int)")
            connection.execute("CREATE PUBLICATION p FOR TABLE t")
            for name, file in {
                "ssl_cert_file": "server.crt",
                "ssl_key_file": "server.key",
                "ssl_ca_file": "ca.crt",
            }.items():
                connection.execute(
                    psycopg.sql.SQL("ALTER SYSTEM SET {} = {}").format(
                        psycopg.sql.Identifier(name), str(server.directory / file)
                    )
                )
            connection.execute("ALTER SYSTEM SET ssl = on")
            connection.execute("SELECT pg_reload_conf()")
            has_tls = lambda: connection.execute("SHOW ssl").fetchone() == ("on",)  # noqa: E731
            wait_until(has_tls, log=server.log)
        server.certificates = made  # type: ignore[attr-defined]
        yield server


def keywords(server: Any, **more: Any) -> dict[str, Any]:
    """The parameters of a verified connection; the server's name is in its certificate."""
    return {
        "host": "localhost",
        "hostaddr": "127.0.0.1",
        "sslmode": "verify-full",
        "sslrootcert": server.certificates / "ca.crt",
        **more,
    }


@pytest.mark.slow
def test_a_verified_stream_with_channel_binding(tls: Any) -> None:
    dsn = tls.dsn(tcp=True)
    with connect(
        dsn, slot="tls", publications=["p"], temporary=True,
        **keywords(tls, channel_binding="require"),
    ) as stream:  # fmt: skip
        assert stream.connection.pgconn.ssl_in_use
        with psycopg.connect(tls.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO t SELECT generate_series(1, 5000)")
        found: list[bytes] = []
        while not found or found[-1][:1] != b"C":
            batch = stream.receive(30)
            assert batch is not None
            found += [frame for *_, frame in batch.frames]
    assert sum(frame[:1] == b"I" for frame in found) == 5000


def test_a_snapshot_over_tls(tls: Any) -> None:
    with psycopg.connect(tls.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE many (id int, v text)")
        connection.execute(
            "INSERT INTO many SELECT g, repeat('v', 300) FROM generate_series(1, 3000) g"
        )
        connection.execute("CREATE PUBLICATION of_many FOR TABLE many")
    found: list[int] = []
    try:
        with snapshot(
            tls.dsn(tcp=True), ["of_many"], range_bytes=128 << 10, **keywords(tls)
        ) as batches:
            for batch in batches:
                rows = pa.record_batch(batch).filter(pc.field("op") == "read")
                found += rows.column("after").field("id").to_pylist()
    finally:
        with psycopg.connect(tls.dsn(), autocommit=True) as connection:
            connection.execute("DROP TABLE many")
            connection.execute("DROP PUBLICATION of_many")
    assert sorted(found) == list(range(1, 3001))


def test_a_client_certificate(tls: Any) -> None:
    own = {"sslcert": tls.certificates / "client.crt", "sslkey": tls.certificates / "client.key"}
    given = keywords(tls, port=tls.port, dbname="postgres", user="certified")
    with ReplicationConnection(**given, **own) as connection:
        assert connection.database == "postgres"
    with expect_error(code="connection_refused") as caught:
        ReplicationConnection(**given)
    assert not isinstance(caught.value, RetryableError)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"sslrootcert": "other.crt"},
        {"host": "elsewhere"},
        {"sslmode": "disable"},
        {"password": "wr0ng-s3cret"},
        {"sslpassword": "wr0ng-s3cret", "sslmode": "nonsense"},
    ],
    ids=str,
)
def test_what_is_refused_stays_refused(tls: Any, more: dict[str, Any]) -> None:
    if "sslrootcert" in more:
        more["sslrootcert"] = tls.certificates / more["sslrootcert"]
    with expect_error(code="connection_refused") as caught:
        connect(tls.dsn(tcp=True), slot="s", publications=["p"], **{**keywords(tls), **more})
    assert not isinstance(caught.value, RetryableError)
    assert "s3cret" not in str(caught.value)
