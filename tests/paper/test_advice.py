"""What ``fadamgc advise`` says: the order, the weights, the links, S~, extrapolations, and its records."""

from __future__ import annotations

import json
import re

import pytest

from command import fadamgc
from fadamgc.errors import InputError
from fadamgc.experiments.report.write import read_experiment
from fadamgc.paper.advice import TRACKING, Evidence, RecordedMethod, Situation, advise, recorded
from fadamgc.paper.advice_records import evidence

VECTORS = {  # down, up, up if tracked, kept
    "fadamgc": (2, 1, 1, 3),
    "fedavg_m": (2, 1, 0, 0),
    "fedadam": (1, 1, 0, 0),
    "local_adam": (1, 1, 0, 2),
}


def method(algorithm, rounds, missed=0, share=0.5, **settings):
    down, up, tracked, state = VECTORS[algorithm]
    return RecordedMethod(
        label=algorithm, algorithm=algorithm, settings=settings, tracked_share=share if tracked else 1.0,
        rounds={str(seed): value for seed, value in enumerate(rounds)}, missed=missed,
        down=down, up=up, up_tracked=tracked, state=state,
    )  # fmt: skip


def found(K=10, participation=0.1, kind="images", study="main", data="cifar10", **rounds):
    return Evidence(
        study=study, experiment=f"K = {K}", data=data, kind=kind, model="cnn", clients=100,
        participation=participation, local_steps=K, alpha=0.1, parameters=10_000, target=0.4,
        methods=tuple(method(name, values, eta_l=K) for name, values in rounds.items()),
    )  # fmt: skip


FEW = found(5, fadamgc=[40, 40], fedavg_m=[20, 22], fedadam=[30, 30])
MANY = found(60, fadamgc=[10, 11], fedavg_m=[30, 29], fedadam=[20, 20])
HERE = Situation(parameters=1e4)


def order(situation, *experiments):
    return [suggestion.algorithm for suggestion in advise(situation, experiments).suggestions]


def test_the_nearest_experiments_decide():
    few = Situation(local_steps=5, parameters=1e4)
    many = Situation(local_steps=60, parameters=1e4)
    assert order(few, FEW, MANY) == ["fedavg_m", "fedadam", "fadamgc"]
    assert order(many, FEW, MANY) == ["fadamgc", "fedadam", "fedavg_m"]
    advice = advise(many, [FEW, MANY])
    assert [e.local_steps for _, e in advice.evidence] == [60, 5]
    assert sum(share for share, _ in advice.evidence) == pytest.approx(1)
    first, second, _ = advice.suggestions
    assert dict(first.settings) == {"eta_l": 60}
    assert (first.ratio, first.tracked, second.tracked) == (1.0, 5, None)
    assert second.clear == (1, 1)  # ahead with many steps, behind with few
    assert second.shared == 2


def test_the_ratio_is_that_of_the_only_experiment():
    advice = advise(HERE, [found(fadamgc=[10, 10], fedavg_m=[30, 30])])
    assert [s.ratio for s in advice.suggestions] == pytest.approx([1, 3])
    assert [s.rounds for s in advice.suggestions] == pytest.approx([10, 30])


def test_other_kinds_of_data_count_less():
    images = found(fadamgc=[10, 11], fedavg_m=[30, 29])
    texts = found(kind="texts", data="glue/sst2", fadamgc=[40, 42], fedavg_m=[20, 22])
    assert order(Situation(kind="images", parameters=1e4), images, texts)[0] == "fadamgc"
    assert order(Situation(kind="texts", parameters=1e4), images, texts)[0] == "fedavg_m"


def test_a_link_makes_it_minutes():
    even = found(fadamgc=[20, 21], fedadam=[22, 23])
    assert order(HERE, even) == ["fadamgc", "fedadam"]
    linked = Situation(parameters=1e4, down_mbps=1, up_mbps=2, seconds_per_step=0.01)
    advice = advise(linked, [even])
    assert [s.algorithm for s in advice.suggestions] == ["fedadam", "fadamgc"]
    vector = 32 * 1e4 / 1e6  # megabits
    seconds = [vector * (1 + 1 / 2) + 0.1, vector * (2 + 1.5 / 2) + 0.1]
    assert [s.seconds for s in advice.suggestions] == pytest.approx(seconds)
    assert advice.suggestions[1].ratio == pytest.approx(20.5 * seconds[1] / (22.5 * seconds[0]))


def test_clients_that_keep_nothing():
    experiments = found(fadamgc=[10, 11], fedavg_m=[30, 29], local_adam=[20, 20])
    assert order(Situation(stateless=True, parameters=1e4), experiments) == ["fedavg_m"]


def test_a_method_with_too_few_runs_is_not_ranked():
    more = [found(fadamgc=[10], fedavg_m=[20]) for _ in range(3)]
    rare = found(fadamgc=[10], fedadam=[1])
    assert order(HERE, *more, rare) == ["fadamgc", "fedavg_m"]
    assert order(HERE, *more, rare, rare)[0] == "fedadam"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"local_steps": 500},
            "this extrapolates: local_steps is 500, and the experiments have from 5 to 60",
        ),
        (
            {"parameters": 1e9},
            "this extrapolates: parameters is 1e\\+09, and the experiments have 10000 only",
        ),
        ({"alpha": 100}, "alpha is 100, and the experiments have 0.1 only"),
        ({"clients": 10_000}, "participation is 0.001"),
        ({"clients": 10_000, "local_steps": 5000, "alpha": 100}, "no experiment is near this situation"),
    ],
)
def test_extrapolation_is_said(changes, said):
    warnings = advise(Situation(**({"parameters": 1e4} | changes)), [FEW, MANY]).warnings
    assert any(re.search(said, warning) for warning in warnings)
    assert not advise(HERE, [FEW, MANY]).warnings


def test_s_tilde_is_that_of_the_study_of_s_tilde():
    def tracked(share, rounds, data):
        line = found(study=TRACKING, data=data, fadamgc=rounds)
        return line.model_copy(update={"methods": (method("fadamgc", rounds, share=share),)})

    study = [
        *(tracked(share, [r, r], "cifar100") for share, r in ((0.1, 20), (0.5, 10), (1.0, 8))),
        *(tracked(share, [r, r], "tiny-imagenet") for share, r in ((0.1, 30), (0.5, 10), (1.0, 9))),
    ]
    advice = advise(HERE, [FEW, *study])
    assert advice.tracking is not None
    assert (advice.tracking.share, advice.tracking.data) == (1.0, ("cifar100", "tiny-imagenet"))
    assert advice.tracking.ratio == pytest.approx((0.8 * 0.9) ** 0.5)
    assert "tracking 10 of 10 takes 0.85 times as many rounds as tracking 5" in advice.tracking.text(HERE)
    slow = advise(Situation(parameters=1e4, up_mbps=0.1), [FEW, *study]).tracking
    assert slow is not None
    assert (
        slow.share == 0.5
    )  # with a slow link, what all clients send more is dearer than the rounds it saves
    assert advise(HERE, [FEW]).tracking is None
    assert order(HERE, FEW, *study) == order(HERE, FEW)  # the study compares no methods


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"sampled": 200}, "advise: sampled=200 is more than clients=100"),
        ({"kind": "image"}, "advise: kind=\"image\" is not accepted.*did you mean 'images'"),
        ({"alpha": 0.0}, "advise: alpha=0.0 is not accepted; it must be > 0"),
        ({"local_steps": float("nan")}, "advise: local_steps=nan is not accepted"),
        ({"up_mbps": float("inf")}, "advise: up_mbps=inf is not accepted"),
    ],
)
def test_a_mistake_is_named(table, said):
    with pytest.raises(InputError, match=said):
        Situation.from_table(table, "advise:")


# The records.


SPEC = """
name = "small"
[task]
data = "digits"
clients = 10
alpha = 0.5
[run]
rounds = 4
sampled = 4
tracked = 1
local_steps = 3
batch_size = 5
seeds = [0, 1]
target = 0.99
[[method]]
algorithm = "fadamgc"
eta_l = 0.002
[[method]]
algorithm = "fedavg_m"
[[method]]
algorithm = "fedadam"
[[method]]
algorithm = "local_adam"
codec = { dx = "int8" }
[[method]]
algorithm = "scaffold_m"
"""


def test_records_become_evidence(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    ran = fadamgc("run", tmp_path / "spec.toml", "--out", tmp_path / "out", "--workers", 1, "--quiet")
    assert ran.exit_code == 0, ran.output
    (line,) = evidence("main-small", [read_experiment(tmp_path / "out")])
    assert (line.study, line.kind, line.clients, line.participation) == ("main-small", "images", 10, 0.4)
    assert (line.local_steps, line.alpha, line.parameters, line.target) == (3, 0.5, 4810, 0.99)
    assert [entry.algorithm for entry in line.methods] == ["fadamgc", "fedavg_m", "fedadam", "scaffold_m"]
    ours, momentum, *_ = line.methods  # bytes with a codec are not those of the method
    assert (ours.tracked_share, ours.rounds, ours.missed) == (0.25, {"0": 4, "1": 4}, 2)
    assert (ours.down, ours.up, ours.up_tracked, ours.state, ours.settings) == (2, 1, 1, 3, {"eta_l": 0.002})
    assert (momentum.down, momentum.up, momentum.up_tracked, momentum.state) == (2, 1, 0, 0)
    few = SPEC.replace('[[method]]\nalgorithm = "fedavg_m"\n', "")
    (tmp_path / "spec.toml").write_text(few)
    fadamgc("run", tmp_path / "spec.toml", "--out", tmp_path / "few", "--workers", 1, "--quiet")
    assert not list(evidence("main-small", [read_experiment(tmp_path / "few")]))


def test_what_the_package_knows():
    lines = recorded()
    assert {line.kind for line in lines} == {"images", "texts", "sensors"}
    assert all(line.methods[0].rounds for line in lines)
    for line in lines:
        by_name = {entry.algorithm: entry for entry in line.methods}
        assert by_name["fadamgc"].down == 2
        assert (by_name["fadamgc"].up, by_name["fadamgc"].up_tracked, by_name["fadamgc"].state) == (1, 1, 3)
        assert 0 < line.participation <= 1
    cifar = next(line for line in lines if line.study == "main-cifar10")
    assert cifar.parameters == 10_602
    assert {entry.algorithm: entry.tracked_share for entry in cifar.methods}["fadamgc"] == 0.5


def test_the_command():
    shown = fadamgc("advise", "--local-steps", 10, "--kind", "images")
    assert shown.exit_code == 0, shown.output
    assert "start with eta_l=" in shown.output
    assert "results/main-cifar10, CIFAR-10: 10,602 parameters" in shown.output
    assert "warning" not in shown.output
    far = fadamgc("advise", "--local-steps", 900, "--up-mbps", 1, "--parameters", "1e9")
    assert "relative" in far.output
    assert "warning: this extrapolates: local_steps is 900" in far.output
    plain = json.loads(fadamgc("advise", "--json").stdout)
    assert plain["suggestions"][0]["ratio"] == 1.0
    assert sum(line["weight"] for line in plain["relies_on"]) == pytest.approx(1, abs=0.1)
    wrong = fadamgc("advise", "--clients", 5, "--sampled", 10)
    assert wrong.exit_code == 2
    assert "sampled=10 is more than clients=5" in wrong.output
