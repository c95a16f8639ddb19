"""The benchmarks' arithmetic: samples, ratios, goals, what is stored and counted."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

if str(ROOT := Path(__file__).parents[2]) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks import goals, guard, harness
from benchmarks.decoders import WrongResult
from benchmarks.harness import Case, NotMeasured, Results


def results_of(**samples):
    """Of names that end in their metric."""
    results = Results({"machine": "none"})
    for name, values in samples.items():
        case, _, metric = name.rpartition(" ")
        results.samples[case, metric] = values
    return results


def test_each_round_begins_one_case_later():
    order = []
    cases = [Case(name, lambda name=name: order.append(name) or {"cpu": 1.0}) for name in "abc"]
    results = Results()
    harness.measure(cases, 4, results)
    assert "".join(order) == "abcbcacababc"
    assert results.samples == {(name, "cpu"): [1.0] * 4 for name in "abc"}


def test_a_case_that_can_not_be_measured_is_told_and_left_out():
    def fail():
        raise NotMeasured("no server")

    results = Results()
    cases = [
        Case("at once", lambda: {"cpu": 1.0}, fail),
        Case("later", fail),
        Case("well", lambda: {"wall": 2.0, "memory": 3.0}),
    ]
    harness.measure(cases, 2, results)
    assert results.missing == {"at once": "no server", "later": "no server"}
    assert results.samples == {("well", "wall"): [2.0, 2.0], ("well", "memory"): [3.0, 3.0]}


def test_a_timed_case_runs_in_loops_and_tells_seconds_per_item(monkeypatch):
    now = 0
    calls = []
    monkeypatch.setattr(harness.time, "process_time_ns", lambda: now)

    def run():
        nonlocal now
        calls.append(now)
        now += 2_000_000

    case = harness.timed("x", run, items=1_000, seconds=0.01)
    case.warm_up()
    assert len(calls) == 2
    assert case.sample() == {"cpu": pytest.approx(2e-6)}
    assert len(calls) == 2 + 5


def test_a_ratio_is_that_of_the_rounds():
    # The second round was twice as slow for both.
    results = results_of(**{"a cpu": [1.0, 2.0, 1.0], "b cpu": [3.0, 6.0, 9.0], "c cpu": [8.0]})
    assert results.ratio("b", "a") == 3.0
    assert results.ratio("a", "b") == pytest.approx(1 / 3)
    assert results.ratio("c", "a") == 8.0
    assert results.ratio("c", "none") is None
    assert results.ratio("a", "b", "wall") is None


def test_the_spread_is_the_quartiles_distance():
    results = results_of(**{"a cpu": [1.0, 2.0, 3.0, 4.0, 5.0], "b cpu": [1.0]})
    assert results.median("a") == 3.0
    assert results.spread("a") == pytest.approx(2 / 3)
    assert results.spread("b") == 0.0
    assert results.median("none") is None


def stored(tmp_path):
    results = results_of(**{"n/text/message/cython cpu": [1e-9, 2e-9], "x memory": [5.0]})
    results.missing["y"] = 'no "y"'
    results.versions["x"] = "1.0"
    path = tmp_path / "results.json"
    results.dump(path)
    return results, path


def test_what_is_stored_is_read_again(tmp_path):
    results, path = stored(tmp_path)
    again = Results.load(path)
    assert again.samples == results.samples
    assert again.described == {"machine": "none"}
    assert again.missing == {"y": 'no "y"'}
    assert again.versions == {"x": "1.0"}


def test_pyperf_reads_what_is_stored(tmp_path):
    pyperf = pytest.importorskip("pyperf")
    _, path = stored(tmp_path)
    suite = pyperf.BenchmarkSuite.load(str(path))
    found = {one.get_name(): (one.get_unit(), one.get_values()) for one in suite.get_benchmarks()}
    assert found == {
        "n/text/message/cython [cpu]": ("second", (1e-9, 2e-9)),
        "x [memory]": ("byte", (5.0,)),
    }


def test_what_no_clock_has_seen_is_no_sample():
    results = Results()
    results.add("a", {"cpu": 1.0, "server": 0.0})
    results.add("a", {"cpu": 2.0, "server": 3.0})
    assert results.samples == {("a", "cpu"): [1.0, 2.0], ("a", "server"): [3.0]}


def test_a_later_run_takes_the_place_of_the_same_cases():
    first = results_of(**{"a cpu": [1.0], "b cpu": [2.0]})
    first.update(results_of(**{"b cpu": [3.0]}))
    assert first.samples == {("a", "cpu"): [1.0], ("b", "cpu"): [3.0]}


def test_what_a_later_run_does_not_have_stays_as_it_was_told():
    first = Results({"psycopg": "3.3", "duckdb": "1.5"})
    first.update(Results({"psycopg": "not installed", "duckdb": "2.0", "numpy": "not installed"}))
    assert first.described == {"psycopg": "3.3", "duckdb": "2.0", "numpy": "not installed"}


def verdict(results, level, workload):
    return next(
        verdict
        for verdict in goals.verdicts(results)
        if verdict.goal.level == level and verdict.workload == workload
    )


def test_a_goal_is_met_by_the_ratio_it_asks_for():
    level, name = "headers and slices, packed", "narrow/text/columns/"
    results = results_of(**{f"{name}headers cpu": [10.0], f"{name}C walk cpu": [8.6]})
    found = verdict(results, level, "narrow/text")
    assert (found.got, found.bound, found.met) == (pytest.approx(0.86), 0.85, True)
    assert found.against == "C walk"
    results.samples[f"{name}headers", "cpu"] = [10.2]
    assert verdict(results, level, "narrow/text").met is False
    assert verdict(results, level, "wide/text").met is None


def test_a_goal_of_at_most_is_met_below_its_bound():
    level, name = "fold, beside decoding", "fold: int key"
    results = results_of(**{f"{name}/fold cpu": [20.0], f"{name}/decoding cpu": [10.0]})
    found = verdict(results, level, name)
    assert (found.got, found.met) == (pytest.approx(2.0), True)
    results.samples[f"{name}/fold", "cpu"] = [20.1]
    assert verdict(results, level, name).met is False


def test_a_goal_without_a_competitor_is_one_of_time_or_memory():
    results = results_of(**{"snapshot/DuckDB cpu": [1.1e-6, 1.3e-6, 1.2e-6]})
    found = verdict(results, "a row of 19 columns in a snapshot to DuckDB", "snapshot")
    assert (found.got, found.met) == (1.2e-6, True)
    results.add("snapshot/DuckDB", {"memory": 501e6})
    assert verdict(results, "memory of a snapshot to DuckDB", "snapshot").met is False


def test_every_goal_is_in_the_table_measured_or_not():
    lines = goals.goal_table(Results()).splitlines()
    assert len(lines) == 2 + len(list(goals.verdicts(Results())))
    assert all(line.rstrip(" |").endswith("not measured") for line in lines[2:])
    asked = {goal.level for goal in goals.GOALS}
    assert {line.split("|")[1].strip() for line in lines[2:]} == asked


PEAK = """
from benchmarks import harness
def prepare():
    held = bytearray(30 << 20)
    return lambda: len(bytearray(64 << 20)) + len(held)
print(harness.peak_memory(prepare))
def fail():
    raise ValueError("none")
try:
    harness.peak_memory(lambda: fail)
except harness.NotMeasured as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_the_call_alone():
    """A fresh process: one that has run tests may have 64 MB of its own that lie idle."""
    ran = subprocess.run(
        [sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    peak, error = ran.stdout.splitlines()
    assert 63 << 20 < float(peak) < 68 << 20
    assert error == "ValueError: none"


def test_reasons_that_are_the_same_are_told_once():
    missing = {"a/b/x": "no x", "c/d/x": "no x", "a/b/y": "no y"}
    assert harness.grouped(missing) == {"x, 2 cases": "no x", "a/b/y": "no y"}


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.8512, "0.85×"), (46.32, "46.3×"), (204.4, "204×")]
)  # fmt: skip
def test_ratios_have_as_many_digits_as_mean_something(ratio, text):
    assert harness.times(ratio) == text


# The guard.


def test_counts_are_free_of_what_counting_takes():
    assert guard.per_frame({"x": [(200, 2_500), (100, 1_500)]}) == {"x": 10.0}


def test_four_percent_more_is_slower():
    known = {"same": 100.0, "little": 100.0, "slower": 100.0, "faster": 100.0, "gone": 1.0}
    counts = {"same": 100.0, "little": 104.0, "slower": 104.1, "faster": 50.0, "new": 1.0}
    text, slower, unknown = guard.compare(counts, known)
    assert slower == ["slower"]
    assert unknown == ["gone", "new"]
    assert "+4.1%" in text
    assert "-50.0%" in text


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Runs the guard with counts that are made up, and stored ones of this environment."""
    path = tmp_path / "guard.json"
    monkeypatch.setattr(guard, "COUNTS", path)
    here = {"python": "3.99"}
    monkeypatch.setattr(guard, "environment", lambda: here)
    path.write_text(json.dumps({"environment": here, "counts": {"x": 100.0}}))

    def run(count, *arguments, environment=here):
        monkeypatch.setattr(guard, "count", lambda: {"x": count})
        monkeypatch.setattr(guard, "environment", lambda: environment)
        return guard.main(list(arguments))

    return run


def test_the_guard_fails_where_a_case_got_slower(counted, capsys):
    assert counted(104.0) == 0
    assert counted(106.0) == 1
    assert "Over 4% more instructions: x" in capsys.readouterr().err
    assert counted(106.0, "--write") == 0
    assert counted(106.0) == 0


def test_the_guard_does_not_judge_what_another_compiler_made(counted, capsys):
    assert counted(1_000.0, environment={"python": "3.100"}) == 0
    assert "Not judged" in capsys.readouterr().out


def test_the_guard_fails_where_nothing_is_stored(counted, capsys):
    guard.COUNTS.unlink()
    assert counted(100.0) == 1
    assert "there is no" in capsys.readouterr().err
    assert counted(100.0, "--write") == 0
    assert counted(100.0) == 0


@pytest.mark.parametrize(
    ("keys", "size", "match"),
    [((7, 7), 99, None), ((7, 8), 99, "sums of keys"), ((7, 7), 98, "sums of bytes")],
)
def test_live_clients_must_agree(keys, size, match):
    pytest.importorskip("psycopg")
    from benchmarks.peers.drain import Peer, compare
    from benchmarks.peers.site import Traffic

    peers = {name: Peer((), "", "", "", what) for name, what in
             (("one", "keys"), ("two", "keys"), ("bare", "bytes"), ("any", ""))}  # fmt: skip
    results = results_of()
    for name, check in zip(peers, (*keys, size, 1234), strict=True):
        results.checks[f"live/narrow/{name}"] = {check}
    traffic = Traffic("narrow", "slot", 1, "0/1", changes=5, bytes=99)
    with pytest.raises(WrongResult, match=match) if match else contextlib.nullcontext():
        compare(traffic, peers, results, "live/narrow")


def test_a_part_that_is_measured_anew_leaves_the_others(monkeypatch, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    from benchmarks import suite

    stored = results_of(**{"x/y/l/a cpu": [1.0], "spark/b wall": [2.0]})
    stored.described |= {"date": "then", "load": "0.1", "machine": "one"}
    path = tmp_path / "results.json"
    stored.dump(path)
    monkeypatch.setattr(harness, "describe", lambda: {"date": "now", "load": "9.9",
                                                      "machine": "other"})  # fmt: skip
    monkeypatch.setitem(
        suite.PARTS, "spark", lambda _, results: results.add("spark/b", {"wall": 3.0})
    )
    assert suite.main(["--part", "spark", "--json", str(path)]) == 0
    found = Results.load(path)
    assert found.samples == {("x/y/l/a", "cpu"): [1.0], ("spark/b", "wall"): [3.0]}
    assert found.described == {
        "machine": "one", "date": "then", "load": "0.1", "spark, measured anew": "now on other",
    }  # fmt: skip
    capsys.readouterr()
