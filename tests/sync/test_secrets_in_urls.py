"""URLs of object storage that have secrets are refused wherever one is given, and never shown."""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pgoutput_fast import PgOutputError, apply
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.changelog.remote import refuse_secrets
from pgoutput_fast.cli import main
from pgoutput_fast.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("deltalake")

URLS = [
    "s3://AK:s3cret@127.0.0.1/lake",
    "s3://AK:a/s3cret@bucket/lake",
    "s3a://s3cret@bucket/lake.duckdb",
    "s3:/AK:s3cret@bucket/lake",
    "postgresql://u:s3cret@h/shop",
    "abfss://container:s3cret@account.example/lake",
    "s3://bucket/lake?access_key=a&secret_key=s3cret",
    "s3://bucket/lake?endpoint_override=http%3A%2F%2Fu%3As3cret%40h",
]


def told(call: Callable[[], Any]) -> str:
    """The error's text, after its traceback was seen to have no secret."""
    with pytest.raises(PgOutputError) as raised:
        call()
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))
    return str(raised.value)


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_secrets_is_refused_by_all_that_take_one(url: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"slot": "s", "publications": ["p"], "directory": tmp_path / "d"}
    for call in (
        lambda: apply.sync("host=/nowhere", target=url, **options),
        lambda: verify("host=/nowhere", publications=["p"], target=url),
        lambda: DeltaPlace(url),
    ):
        text = told(call)
        assert "AWS_SECRET_ACCESS_KEY" in text
        assert "storage_options" in text
    assert not (tmp_path / "d").exists()


def test_a_sync_by_spark_refuses_it_before_it_asks_spark(tmp_path: Path) -> None:
    spark = pytest.importorskip("pgoutput_fast.spark")
    options: dict[str, Any] = {"slot": "s", "publications": ["p"], "directory": tmp_path / "d"}
    running: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="local[2]", defaultParallelism=2)
    )
    told(lambda: spark.sync(running, "host=/nowhere", target=URLS[0], **options))


@pytest.mark.parametrize(
    "command",
    [
        ["sync", "--segments", "d", "--to"],
        ["verify", "--dsn", "host=/nowhere", "--publication", "p", "--target"],
    ],
    ids=lambda given: given[0],
)
def test_the_commands_refuse_it_alike(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, URLS[0]]) == 2
    errors = capsys.readouterr().err
    assert "[bad_option]" in errors
    assert "AWS_ACCESS_KEY_ID" in errors
    assert "s3cret" not in errors


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "aws_endpoint_url_s3"])
def test_an_endpoint_with_secrets_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = "http://u:s3cret@127.0.0.1:1"
    text = told(lambda: apply.sync(target="s3://bucket/x", storage_options={name: endpoint}))
    assert f" {name} " in text
    assert "[bad_option]" in text
    monkeypatch.setenv(name.upper(), endpoint)
    for call in (
        lambda: DeltaPlace("s3://bucket/x"),
        lambda: refuse_secrets("s3://bucket/x", parameter="x"),
    ):
        assert f" {name.upper()} " in told(call)
    assert DeltaPlace("/a").uri == "/a"  # which no endpoint concerns


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/a", "/home/a@b", "file:///home/a@b", "abfss://container@account.example/a"],
)
def test_names_without_secrets_are_taken(url: str) -> None:
    refuse_secrets(url, parameter="x")
    assert DeltaPlace(url).uri in {url, url.removeprefix("file://")}
