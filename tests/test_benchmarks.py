"""The tables of benchmarks have every measurement, and ``bench.py --update`` keeps what is not new."""

from __future__ import annotations

import json
import sys

import pytest

from places import ROOT


@pytest.fixture(scope="module")
def benchmarks():
    """The modules bench, extras and report, imported as the scripts import them."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import bench
        import extras
        import report

        yield bench, extras, report
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in set(sys.modules) - before:
            if "benchmarks" in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def turns(*seconds, **more):
    return {
        "turns": [{"seconds": [s], "cpu": 1.0, "others": 0.0, "counts": True, **more} for s in seconds],
        "executor": "threads",
        "start": [2.0],
    }


def results(**extras):
    """Results of which only the extras matter."""
    found = json.loads((ROOT / "results" / "benchmarks" / "results.json").read_text())
    return found | {"groups": [], "extras": {name: {"others": 0.0, **one} for name, one in extras.items()}}


def test_every_extra_has_a_writer(benchmarks):
    _, extras, report = benchmarks
    assert set(extras.EXTRAS) == set(report.WRITERS)


def test_rounds_on_ray_are_compared_with_threads_and_the_bytes_with_the_model(benchmarks):
    _, _, report = benchmarks
    moved = {"sent": 4 * 100 * (10 * 3 + 2), "received": 4 * 100 * 10 * 5}
    systems = {"ours_fadamgc": turns(1.0, 2.0), "ours_fadamgc_ray": turns(2.0, 4.0, moved=moved)}
    one = {"systems": systems, "sampled": 10, "nodes": 1, "parameters": 100}
    text = report.table(results(ray_rounds={"workloads": {"cnn": one}}))
    assert "| cnn | 1.5 (threads) | 3 | 0.50 (0.50 to 0.50) | 0.0328 | 1.000 |" in text


def test_the_sweep_on_ray_is_compared_with_the_pool(benchmarks):
    _, _, report = benchmarks
    systems = {"pool": turns(9.0), "ray": turns(10.0) | {"start": [6.0]}}
    text = report.table(results(ray_sweep={"runs": 2, "rounds": 5, "workers": 2, "systems": systems}))
    assert "900.00 ms per round of a run on the process pool, 1000.00 ms on Ray, 0.90" in text
    assert "starting a Ray cluster on this machine, 4.0 s" in text


def test_growth_is_per_round_and_per_new_client(benchmarks):
    _, _, report = benchmarks
    first = {"last_round": 10, "rss_anon": 0, "participants": 10}
    last = {"last_round": 20, "rss_anon": 4000, "participants": 18}
    assert report._growth(first, last) == (400, 500)


def test_a_measurement_that_failed_says_why(benchmarks):
    _, _, report = benchmarks
    commands = {"cpu": {"x": [1.0, 3.0, 2.0]}, "first_step": {"not_measured": "no data"}}
    text = report.table(results(commands=commands, many={"not_measured": "why"}))
    assert "| `x` | 2.00 |" in text
    assert "First training step of a study: not measured: no data" in text
    assert "many: not measured: why" in text


def test_an_extra_of_another_day_says_so(benchmarks):
    _, _, report = benchmarks
    later = {"not_measured": "why", "date": "2031-01-01", "command": "bench --update"}
    assert "(Measured 2031-01-01: `bench --update`.)" in report.table(results(many=later))
    later["machine"] = results()["machine"] | {"cores": 7}
    assert "2031-01-01 on another machine (AMD EPYC, 7 cores," in report.table(results(many=later))


def test_update_keeps_other_groups_in_order(benchmarks):
    bench, _, _ = benchmarks
    found = {"groups": []}
    for name, optimizer in (("cnn", "adam"), ("digits", "adam"), ("cnn", "sgd"), ("cnn", "adam")):
        bench.put_group(
            found, {"workload": {"name": name}, "optimizer": optimizer, "n": len(found["groups"])}
        )
    kept = [(group["workload"]["name"], group["optimizer"], group["n"]) for group in found["groups"]]
    assert kept == [("digits", "adam", 1), ("cnn", "sgd", 2), ("cnn", "adam", 3)]


def test_update_refuses_groups_of_another_machine(benchmarks, tmp_path):
    bench, _, _ = benchmarks
    old = results()
    path = tmp_path / "results.json"
    assert bench.saved(old, path, groups=True) is old
    path.write_text(json.dumps(old))
    assert bench.saved(old | {"date": "later"}, path, groups=True) == old
    other = old | {"machine": old["machine"] | {"cores": 3}}
    assert bench.saved(other, path, groups=False) == old
    with pytest.raises(SystemExit, match="cores=2, now it is 3"):
        bench.saved(other, path, groups=True)
    with pytest.raises(SystemExit, match="quick=False"):
        bench.saved(old | {"settings": old["settings"] | {"quick": True}}, path, groups=False)
