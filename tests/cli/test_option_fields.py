"""Options as data: what their kinds take, and what holds of every class."""

from __future__ import annotations

import itertools

import pytest
from support.expected_errors import expect_error

pytest.importorskip("pyarrow", reason="the options of sync are in a package that needs it")

from pgoutput_fast.apply import sync
from pgoutput_fast.apply.options import SyncOptions, TargetOptions
from pgoutput_fast.apply.targets import check_kind
from pgoutput_fast.capture_options import CaptureOptions
from pgoutput_fast.changelog.uploading import download
from pgoutput_fast.changelog.view import view_of
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.options import byte_count, choice, flag, options_of, seconds
from pgoutput_fast.segments import list_segments
from pgoutput_fast.verify import verify

_ENDPOINT = {"AWS_ENDPOINT": "http://u:x@h"}

CLASSES = [CaptureOptions, SyncOptions, TargetOptions]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("65536", 65536),
        ("7B", 7),
        ("64kB", 64 << 10),
        (" 16 MB ", 16 << 20),
        ("1.5GB", 3 << 29),
        ("2.GB", 2 << 30),
        ("900TB", 900 << 40),
        ("0", 0),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_numbers_of_bytes(given, count):
    assert byte_count().from_text("x", given) == count


@pytest.mark.parametrize(
    "given",
    ["", "MB", "-1", "16MiB", "16mb", "1e3", "nan", "1,5GB", "٣", "8388608TB", "9" * 50, ".5GB"],
)
def test_what_is_no_number_of_bytes(given):
    with pytest.raises(PgOutputError) as caught:
        byte_count().from_text("x", given)
    assert caught.value.parameter == "x"


@pytest.mark.parametrize(
    ("given", "found"), [("0.5", 0.5), ("500ms", 0.5), (" 10 min", 600.0), ("7d", 604800.0)]
)
def test_times(given, found):
    assert seconds().from_text("x", given) == found


@pytest.mark.parametrize(
    "given", ["", "soon", "1 hour", "5m", "1s30", "nan", "inf", "1e999", "-1", "0", "0ms"]
)
def test_what_is_no_time(given):
    with pytest.raises(PgOutputError):
        seconds().from_text("x", given)


def test_a_time_may_be_zero_where_the_option_says_so():
    assert seconds(zero=True).from_text("x", "0") == 0


@pytest.mark.parametrize(
    ("kind", "value"),
    [(byte_count(), True), (seconds(), "1s"), (flag(), 1), (choice("a"), None)],
    ids=["byte_count", "seconds", "flag", "choice"],
)
def test_values_of_other_types(kind, value):
    with pytest.raises(TypeError, match=r"^x "):
        kind.check("x", value)


def test_no_two_classes_have_an_option_of_one_name():
    """`sync` takes the options of all of them as keywords, and the command in one file."""
    pytest.importorskip("click")
    from pgoutput_fast.cli._service import ServiceOptions
    from pgoutput_fast.cli._spark_engine import SparkOptions

    classes = [*CLASSES, ServiceOptions, SparkOptions]
    for one, other in itertools.combinations(classes, 2):
        assert not {a.name for a in one.options()} & {b.name for b in other.options()}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_default_is_allowed_and_every_help_is_a_sentence(kind):
    kind()
    for one in kind.options():
        assert one.help[0].isupper(), one.name
        assert one.help.endswith("."), one.name


def test_keywords_go_over_an_object_and_leave_the_rest():
    keywords = {"max_delay": 0.5, "host": "h"}
    found = options_of(CaptureOptions, CaptureOptions(max_delay=9.0, merge=False), keywords)
    assert (found.max_delay, found.merge) == (0.5, False)
    assert keywords == {"host": "h"}
    with pytest.raises(TypeError, match="options"):
        options_of(CaptureOptions, SyncOptions(), {})


def _verify(target):
    verify("host=/nonexistent", publications=["p"], target=target)


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda: CaptureOptions(segment_bytes=0), "segment_bytes"),
        (lambda: CaptureOptions(give_up=True), "give_up"),
        (lambda: CaptureOptions(upload_endpoint="http://x"), "upload_endpoint"),
        (lambda: CaptureOptions(upload_keep="local"), "upload_keep"),
        (lambda: CaptureOptions(protocol=5), "protocol"),
        (lambda: SyncOptions(interval=float("nan")), "interval"),
        (lambda: SyncOptions(tables=[]), "tables"),
        (lambda: TargetOptions(partition_by={"t": ["a", "a"]}), "partition_by"),
        # A URL is the value of several options.
        (lambda: CaptureOptions(upload="s3://u:x@bucket/a"), "upload"),
        (lambda: CaptureOptions(upload="gs://bucket/a"), "upload"),
        (lambda: CaptureOptions(upload="s3://bucket"), "upload"),
        (lambda: CaptureOptions(upload="s3://b1b/a", upload_endpoint="h:1"), "upload_endpoint"),
        (lambda: CaptureOptions(upload="s3://b1b/a", upload_endpoint="a://u@h"), "upload_endpoint"),
        (lambda: download("s3://bucket", "d"), "url"),
        (lambda: download("s3://bucket/a", "d", endpoint="h:1"), "endpoint"),
        (lambda: sync(target="s3://u:x@bucket/a"), "target"),
        (lambda: sync(target="s3://bucket/a?secret=x"), "target"),
        (lambda: sync(target="s3://bucket/a", storage_options=_ENDPOINT), "storage_options"),
        (lambda: _verify("s3://u:x@bucket/a"), "target"),
        (lambda: _verify("s3://bucket/a[b]"), "target"),
        (lambda: check_kind("lake", "delta", "parquet"), "target"),
        (lambda: check_kind("lake", "iceberg", "delta"), "iceberg"),
        (lambda: view_of([]), "path"),
        (lambda: list_segments(["."]), "path"),
        (lambda: ConnectionParameters("postgresql://u:x@y@h/d"), "dsn"),
        (lambda: ConnectionParameters("host=a;password=x"), "dsn"),
        (lambda: ConnectionParameters("dbname=a;b=c"), "dsn"),
        (lambda: ConnectionParameters("port=5432", {"host": "a@b"}), "host"),
        (lambda: ConnectionParameters("host=h", {"port": "x"}), "port"),
        (lambda: ConnectionParameters("host=h", {"user": "a; password=x"}), "user"),
        (lambda: EmbeddedServer(settings={"a b": 1}), "settings"),
        (lambda: EmbeddedServer(settings={"Port": 1}), "settings"),
        (lambda: EmbeddedServer(settings={"work_mem": "1MB\n"}), "settings"),
        (EmbeddedServer(bindir="/nonexistent").start, "bindir"),
    ],
)  # fmt: skip
def test_errors_say_which_option_is_wrong(call, parameter, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with expect_error(code="bad_option", parameter=parameter) as caught:
        call()
    # The front end writes the name of the option before the text.
    assert not caught.value.message.startswith(parameter)


def test_an_error_about_the_environment_names_no_option(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://u:x@h")
    with expect_error(code="bad_option", parameter=None):
        CaptureOptions(upload="s3://bucket/a")
    with expect_error(code="bad_option", parameter=None):
        sync(target="s3://bucket/a")


@pytest.mark.parametrize(
    "given", [{"storage_options": {"key": 5, "secret": "geheim"}}, {"iceberg": {"geheim": 5}}]
)
def test_no_error_shows_keys(given):
    with pytest.raises(PgOutputError) as caught:
        TargetOptions(**given)
    assert "geheim" not in str(caught.value)


def test_an_error_is_put_together_when_it_is_shown():
    error = PgOutputError(
        "it is wrong", parameter="slot", hint=("Give ", Argument("slot", "s"), " or none")
    )
    assert str(error) == "slot: it is wrong. Give slot='s' or none"
    shown = {"slot=": "--slot", "slot='s'": "--slot s"}
    assert error.text(lambda one: shown[str(one)]) == "--slot: it is wrong. Give --slot s or none"


def test_tables_are_a_tuple_in_whatever_form_they_are_given():
    for given in ("public.*", ["public.*"], ("public.*",)):
        assert SyncOptions(tables=given).tables == ("public.*",)
    assert SyncOptions().tables is None
    with expect_error(parameter="tables"):
        SyncOptions(tables="without_its_schema")
