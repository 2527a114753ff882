"""Robust aggregation: what it computes, what stays a sum, what it resists, and what it refuses."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

import fadamgc
from fadamgc.data import synthetic
from fadamgc.errors import InputError
from fadamgc.experiments.spec.toml_io import spec_of
from fadamgc.federation import robust
from fadamgc.federation.robust import RobustSums, robust_fields, robust_mean, trimmed_count
from fadamgc.sim.executors import VectorizedExecutor
from problems import class_task, linear_task

OPTIONS = {
    "rounds": 4,
    "sampled": 5,
    "tracked": 3,
    "local_steps": 3,
    "batch_size": 5,
    "seed": 2,
    "progress": False,
}


@pytest.mark.parametrize("S", range(1, 10))
def test_the_mean_is_numpys_median_and_scipys_trimmed_mean(S, monkeypatch):
    monkeypatch.setattr(robust, "COLUMNS", 4)  # several parts
    rows = np.random.default_rng(S).normal(size=(S, 3, 5))
    values = [torch.from_numpy(row) for row in rows]
    found = robust_mean(values, trimmed_count("median", S)).numpy()
    np.testing.assert_allclose(found, np.median(rows, axis=0), rtol=1e-14)
    k = trimmed_count("trimmed:0.2", S)
    np.testing.assert_allclose(
        robust_mean(values, k).numpy(), trim_mean(rows, k / S + 1e-9, axis=0), rtol=1e-14
    )


def test_a_trimmed_mean_always_leaves_somebody_out_and_somebody_in():
    assert [trimmed_count("trimmed:0.01", S) for S in (1, 2, 3, 100, 101)] == [0, 0, 1, 1, 2]
    assert [trimmed_count("trimmed:0.49", S) for S in (1, 2, 3, 4, 9)] == [0, 0, 1, 1, 4]


def test_tracking_stays_a_sum():
    assert robust_fields(fadamgc.FAdamGC()) == ("dx",)
    assert robust_fields(fadamgc.FedAvgM()) == ("dx",)
    composed = fadamgc.compose(local=fadamgc.local.Adam(), correction="pre")
    assert "correction.dy" not in robust_fields(composed)
    assert len(robust_fields(composed)) >= 1


@pytest.mark.parametrize("algo", [fadamgc.FAdamGC(), fadamgc.Scaffold(), fadamgc.FedAdamW()])
@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
def test_a_round_is_the_median_of_the_clients_models(algo, executor):
    """One round with every client; ``algo`` has eta_g = 1, so the new model is the median of theirs."""
    task = class_task()
    options = OPTIONS | {"rounds": 1, "sampled": None, "tracked": None, "executor": executor}
    run = fadamgc.simulate(dataclasses.replace(algo, eta_g=1.0), task, aggregation="median", **options)
    models = []
    for i in range(task.n):
        alone = [([i], [i])]
        alone = fadamgc.simulate(algo, task, schedule=alone, **options | {"sampled": None, "rounds": None})
        models.append(alone.x.numpy())
    np.testing.assert_allclose(run.x.numpy(), np.median(models, axis=0), atol=2e-6)
    assert run.settings["aggregation"] == "median"


@pytest.mark.parametrize("kind", ["median", "trimmed:0.25"])
def test_y_stays_the_mean_of_the_y_i(kind):
    run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(), aggregation=kind, **OPTIONS | {"rounds": 30})
    mean = torch.stack([client.y for client in run.clients]).mean(dim=0)
    assert torch.allclose(run.server.y, mean, atol=1e-6)


DATA = synthetic.quadratics(clients=5, dim=4, spread=1.0, seed=1)
EXACT = {"fadamgc": 0.03, "scaffold": 0.01, "scaffold_m": 0.01}  # with the median, too; and their eta_l
ONE_LEVEL = [name for name in fadamgc.algorithms() if not name.startswith("mtgc")]


def distance(name, rounds, eta_l):
    """How far from the optimum a method ends, on clients with different minimisers, with the median."""
    options = {
        "rounds": rounds,
        "local_steps": 5,
        "eval_every": rounds,
        "progress": False,
        "executor": partial(VectorizedExecutor, compile=False),
    }
    algorithm = fadamgc.make_algorithm(name, eta_l=eta_l)
    run = fadamgc.simulate(algorithm, linear_task(DATA), aggregation="median", **options)
    return float((run.x - DATA.optimum).norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_correction_removes_the_bias_of_the_median(name):
    assert distance(name, 500, EXACT[name]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "local_adam", "fedadam"])
def test_without_a_correction_the_median_is_not_the_optimum(name):
    assert distance(name, 400, 0.01) > 0.1


@pytest.mark.parametrize("name", ONE_LEVEL)
def test_methods_whose_clients_keep_what_they_send_are_refused(name):
    """The server of these keeps the sum of the same numbers: with the median they would miss the optimum."""
    if name in ("feddyn", "feddc", "scaffnew", "scaffold_local", "fa_nt_local"):
        with pytest.raises(InputError, match="keep what they have sent, and its server the sum"):
            distance(name, 1, 0.01)
    else:
        assert np.isfinite(distance(name, 1, 0.01))


@pytest.mark.parametrize(("kind", "moves"), [("median", False), ("trimmed:0.2", False), (None, True)])
def test_one_client_of_five_cannot_move_the_model_far(kind, moves):
    algo = fadamgc.FedAvg()
    up = algo.finish(algo.init_server(torch.zeros(3)), (), (), torch.ones(3), 1, True)[1]
    sums = RobustSums(kind, ("dx",)) if kind else fadamgc.federation.sums.Sums()
    for i, size in enumerate((1.0, 1.1, 0.9, 1.0, -1e6)):
        sums.add(i, 1, type(up)(*(size * leaf for leaf in up)), {}, torch.tensor(0.0))
    mean = sums.total().dx / sums.S
    assert bool((mean < 0.9).all()) == moves
    assert bool((mean <= 1.1).all())


def test_runs_resume_bit_for_bit_and_not_with_another_aggregation(tmp_path):
    task, algo = class_task(), fadamgc.FAdamGC()
    whole = fadamgc.simulate(algo, task, aggregation="median", **OPTIONS)
    options = OPTIONS | {"checkpoint": tmp_path, "aggregation": "median"}
    fadamgc.simulate(algo, task, callbacks=[lambda end: end.record.round == 2], **options)
    resumed = fadamgc.simulate(algo, task, resume=True, **options)
    assert torch.equal(whole.x, resumed.x)
    with pytest.raises(fadamgc.FadamgcError, match="aggregation"):
        fadamgc.simulate(algo, task, resume=True, **options | {"aggregation": "trimmed:0.1", "rounds": 9})


@pytest.mark.parametrize(
    "more",
    [{}, {"local_parameters": "0"}, {"codec": {"dx": "topk:0.5", "dy": "int8"}}, {"clip_norm": 0.1}],
    ids=lambda more: "".join(more) or "plain",
)
@pytest.mark.parametrize(
    "algo",
    [fadamgc.FAdamGC(), fadamgc.compose(local=fadamgc.local.Adam(v="share"), correction="pre")],
    ids=["literal", "composed"],
)
def test_many_runs_at_once_and_other_settings(algo, more):
    """The median makes a difference, and each of many runs is the run alone."""
    settings = {"algorithm": algo, "task": class_task(), "aggregation": "median", **OPTIONS, **more}
    if "codec" in more and hasattr(algo, "correction"):
        settings["codec"] = {"dx": "topk:0.5", "correction.dy": "int8"}
    settings.pop("progress")
    alone = fadamgc.simulate(**settings, progress=False)
    plain = fadamgc.simulate(**settings | {"aggregation": None}, progress=False)
    assert not torch.equal(alone.x, plain.x)
    first, second = fadamgc.simulate_many([settings, settings | {"seed": 3}], progress=False)
    assert torch.allclose(first.x, alone.x, atol=1e-6)
    assert not torch.equal(first.x, second.x)


def test_mean_is_no_setting():
    runs = [
        fadamgc.simulate(fadamgc.FedAvg(), class_task(), aggregation=a, **OPTIONS) for a in ("mean", None)
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    assert "aggregation" not in runs[0].settings


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("fedavg", {"aggregation": "mode"}, "aggregation='mode' is not accepted; .*'median'"),
        ("fedavg", {"aggregation": "trimmed:0.5"}, "below 0.5"),
        ("fedavg", {"aggregation": "trimmed:nan"}, "not accepted"),
        ("fedavg", {"aggregation": "trimmed"}, "'trimmed:0.1'"),
        ("fedavg", {"aggregation": 1}, "aggregation=1 is not accepted"),
        ("fedavg", {"aggregation": "median", "weights": "size"}, "use weights='uniform'"),
        ("mtgc", {"aggregation": "median"}, "MTGC has clients in groups"),
        ("feddyn", {"aggregation": "median"}, "clients of FedDyn keep what they have sent, and its server"),
    ],
)
def test_refusals(algorithm, options, message):
    with pytest.raises(InputError, match=message):
        fadamgc.simulate(
            fadamgc.make_algorithm(algorithm),
            class_task(),
            **OPTIONS | {"sampled": None, "tracked": None} | options,
        )


SPEC = {
    "task": {"data": "digits", "clients": 5},
    "run": {"rounds": 2, "local_steps": 2, "aggregation": "median"},
    "method": [{"algorithm": "fedavg"}, {"algorithm": "fadamgc", "label": "plain", "aggregation": "mean"}],
}


def test_a_method_of_a_spec_may_have_its_own():
    spec = spec_of(SPEC)
    assert [spec.aggregation(method) for method in spec.methods] == ["median", None]
    with pytest.raises(
        InputError, match=r"\[run\] .*weights.*give \[\[method\]\] FedAvg aggregation = 'mean'"
    ):
        spec.replace("run", weights="size")
    with pytest.raises(InputError, match=r"\[\[method\]\] MTGC: .*groups"):
        spec_of(
            SPEC
            | {
                "run": SPEC["run"] | {"aggregation": "mean"},
                "method": [{"algorithm": "mtgc", "aggregation": "median"}],
            }
        )
