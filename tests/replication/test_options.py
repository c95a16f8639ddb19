"""What servers of each version are asked for."""

from __future__ import annotations

import re

import pytest
from support.expected_errors import expect_error

pytest.importorskip("psycopg")


from pgoutput_fast.capture_options import StreamOptions
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.errors import PgOutputError, without_passwords
from pgoutput_fast.replication import capture, connect
from pgoutput_fast.replication.negotiation import negotiate


def asked(version, marked=False, **options):
    """The options without the publications' names."""
    found = negotiate(StreamOptions(**options), ["p"], version * 10000 + 4, marked=marked)
    assert found.options.pop("publication_names") == '"p"'
    assert int(found.options.pop("proto_version")) == found.protocol
    assert found.two_phase == ("two_phase" in found.options)
    return found.protocol, found.options


@pytest.mark.parametrize(
    ("version", "protocol", "options"),
    [
        (10, 1, {}),
        (13, 1, {}),
        (14, 2, {"streaming": "on"}),
        (15, 3, {"streaming": "on"}),
        (16, 4, {"streaming": "parallel"}),
        (18, 4, {"streaming": "parallel"}),
        (19, 4, {"streaming": "parallel"}),
    ],
)
def test_the_best_that_the_server_has(version, protocol, options):
    assert asked(version) == (protocol, options)
    assert asked(version, streaming=False) == (protocol, {})
    assert asked(version, protocol=1) == (1, {})


def test_what_is_asked_for_is_sent():
    every = {"two_phase": True, "binary": True, "messages": True, "origin": "none"}
    assert asked(16, **every) == (
        4,
        {
            "streaming": "parallel",
            "two_phase": "on",
            "binary": "true",
            "messages": "true",
            "origin": "none",
        },
    )
    assert asked(16, streaming="on") == (4, {"streaming": "on"})
    assert asked(16, protocol=2) == (2, {"streaming": "on"})
    assert asked(15, marked=True, two_phase=None) == (3, {"streaming": "on", "two_phase": "on"})
    assert asked(15, marked=False, two_phase=None) == (3, {"streaming": "on"})
    # Its pgoutput does not know prepared transactions, though its slots do.
    assert asked(14, marked=True, two_phase=None) == (2, {"streaming": "on"})
    assert asked(14, marked=True) == (2, {"streaming": "on"})


@pytest.mark.parametrize(
    ("version", "options", "code", "parameter"),
    [
        (13, {"binary": True}, "not_supported", "binary"),
        (13, {"messages": True}, "not_supported", "messages"),
        (13, {"protocol": 2}, "not_supported", "protocol"),
        (14, {"protocol": 3}, "not_supported", "protocol"),
        (15, {"protocol": 4}, "not_supported", "protocol"),
        (13, {"streaming": "on"}, "not_supported", "streaming"),
        (15, {"streaming": "parallel"}, "not_supported", "streaming"),
        (16, {"streaming": "parallel", "protocol": 3}, "bad_option", "streaming"),
        (16, {"streaming": "on", "protocol": 1}, "bad_option", "streaming"),
        (15, {"origin": "any"}, "not_supported", "origin"),
        (14, {"two_phase": True}, "not_supported", "two_phase"),
        (16, {"two_phase": True, "protocol": 2}, "bad_option", "two_phase"),
        (16, {"marked": True}, "bad_option", "two_phase"),
        (16, {"marked": True, "two_phase": None, "protocol": 1}, "bad_option", "two_phase"),
    ],
)
def test_what_the_server_does_not_know(version, options, code, parameter):
    with expect_error(code=code, parameter=parameter):
        asked(version, **options)


WRONG = [
    # what is given, and the error's parameter, or a pattern: only a TypeError has no colon there
    ({"protocol": 5}, "protocol"),
    ({"protocol": "2"}, "protocol"),
    ({"protocol": True}, "^protocol "),
    ({"streaming": "off"}, "streaming"),
    ({"streaming": 1}, "^streaming "),
    ({"two_phase": "on"}, "^two_phase "),
    ({"binary": None}, "^binary "),
    ({"messages": 1}, "^messages "),
    ({"origin": "local"}, "origin"),
    ({"max_memory": "64 MB"}, "^max_memory "),
    ({"max_memory": -1}, "max_memory"),
    ({"unknown_prepared": "skip"}, "unknown_prepared"),
    *[
        ({name: given}, name if type(given) is not bool else f"^{name} ")
        for name in ("retry_for", "silence_timeout")
        for given in (float("nan"), 0, True)
    ],
    ({"create_slot": 1}, "^create_slot "),
    ({"publications": "p"}, "^publications .*str"),
]


def refuse(call, options, told):
    """Call a function that refuses its options, before it asks a server."""
    with pytest.raises((TypeError, PgOutputError)) as caught:
        call("host=/nonexistent", **{"slot": "s", "publications": ["p"], **options})
    if getattr(caught.value, "parameter", None) != told:
        assert re.search(told, str(caught.value))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *WRONG,
        ({"temporary": None}, "^temporary .*NoneType"),
        ({"start_lsn": "0/1"}, "^start_lsn .*parse_lsn.*str"),
        ({"start_lsn": -1}, r"-1 .*\[unfit_input\]"),
        ({"start_lsn": 5, "temporary": True}, "start_lsn"),
        ({"start_timeline": 1.0}, "^start_timeline .*float"),
        ({"slots": "s"}, "slots"),
        ({"tow_phase": True}, "tow_phase"),
        ({"directory": "d"}, "directory"),
        ({"publications": ["p", 5]}, "^publications .*int"),
        ({"publications": []}, "publications"),
        ({"spill_directory": "/nonexistent"}, "spill_directory"),
        ({"target": "polars"}, "target"),
        ({"columns": {"t": 5}}, "columns"),
        ({"prepared": "never"}, "prepared"),
        ({"host": "a@b"}, "host: "),
    ],
    ids=str,
)
def test_wrong_arguments_never_reach_a_server(options, told):
    refuse(connect, options, told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *WRONG,
        ({"policies": 1}, "policies"),
        ({"directory": ""}, "directory"),
        ({"compression": "gzip"}, "compression"),
        ({"segment_bytes": 0}, "segment_bytes"),
    ],
    ids=str,
)
def test_wrong_arguments_of_a_capture_never_reach_a_server(options, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuse(capture, {"directory": "d", **options}, told)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"],
)
def test_parameters_that_are_secrets(name):
    import psycopg

    known = {one.keyword.decode() for one in psycopg.pq.Conninfo.get_defaults()}
    if name in known or "password" in name:  # libpq before 18 has not all of them
        parameters = ConnectionParameters("host=h", {name: "geheim"})
        assert parameters.has_secret
        assert parameters.without_secrets("no geheim here") == "no *** here"
    assert without_passwords(f"host=h {name}=geheim user=u") == f"host=h {name}=*** user=u"


def test_parameters_show_no_secret():
    parameters = ConnectionParameters(
        "host=h password=s3cr-one", {"sslpassword": "s3cr-two", "user": "u", "dbname": None}
    )
    assert repr(parameters) == "<ConnectionParameters host=h user=u>"
    with pytest.raises(PgOutputError) as caught:
        ConnectionParameters("host=/nonexistent", {"password": "s3cr"}).open(replication=True)
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "keywords"),
    [
        ("postgresql://u:45/S3cret@h/db", {}),
        ("postgresql://u:45/S3cret@h:5432/db", {}),
        ("host=h;port=5432;password=S3cret", {}),
        ("host=/tmp;password=S3cret", {}),
        ("hostaddr=127.0.0.1;password=S3cret", {}),
        ("host=h port=5432;password=S3cret", {}),
        ("host=h user=u;password=S3cret", {}),
        ("host=h dbname=d; pwd=S3cret", {}),
        ("host=h dbname='d;pwd = S3cret'", {}),
        ("host='h password=S3cret'", {}),
        ("host=/tmp", {"dbname": "postgresql://u:S3cret@h/db"}),
        ("host=/tmp", {"dbname": "dbname=d password=S3cret"}),
    ],
)
def test_a_password_at_a_wrong_place_is_not_shown(given, keywords):
    with pytest.raises(PgOutputError) as caught:
        ConnectionParameters(given, keywords)
    assert "S3cret" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("host='/tmp/a b=c@d' dbname=a@b", "host=/tmp/a b=c@d dbname=a@b"),
        ("postgresql://u@%2Ftmp%2Fx/a%40b?application_name=a@b", "host=/tmp/x dbname=a@b user=u"),
        ("postgresql://a%40b:c%2Fd@[::1]:5432,h2:5433/db", "host=::1,h2 port=5432,5433 dbname=db"),
    ],
)
def test_odd_names_can_be_given(given, shown):
    assert shown in repr(ConnectionParameters(given))


def test_keywords_go_over_the_string():
    with expect_error(code="connection_lost") as caught:
        connect("host=/nonexistent1", slot="s", publications=["p"], host="/nonexistent2")
    assert "/nonexistent2" in str(caught.value)


def test_a_service_keeps_its_own_timeouts(monkeypatch):
    def open_parameters(*arguments):
        return ConnectionParameters(*arguments)._parameters

    assert open_parameters("host=h")["connect_timeout"] == "10"
    assert open_parameters("host=h connect_timeout=3")["connect_timeout"] == "3"
    assert "keepalives_idle" not in open_parameters("service=x")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "3")
    assert "connect_timeout" not in open_parameters("host=h")
    monkeypatch.setenv("PGSERVICE", "x")
    assert "keepalives_idle" not in open_parameters("host=h")
