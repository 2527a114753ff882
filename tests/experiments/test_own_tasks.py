"""Data and models from outside the package: functions, tables and Python, in everything that a spec does."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fadamgc
from command import fadamgc as command
from fadamgc import loading, schedules
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report.tables import results_markdown
from fadamgc.experiments.spec.toml_io import load_spec
from fadamgc.runtime import seeded
from fadamgc.tasks.build import build_task
from fadamgc.tasks.own import held_out

SOURCE = """
import torch, fadamgc

CENTRES = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])


def points(labels, noise, generator):
    return CENTRES[labels] + noise * torch.randn(len(labels), 2, generator=generator), labels


def make_task(seed, clients=6, noise=0.8):
    g = torch.Generator().manual_seed(seed)
    data = [points(torch.randint(0, 2, (30,), generator=g) + i % 2, noise, g) for i in range(clients)]
    test = points(torch.arange(3).repeat(20), noise, g)
    model = torch.nn.Linear(2, 3)
    return fadamgc.Task(model, torch.nn.functional.cross_entropy, data, test, name="points")


def with_validation(seed, validation):
    task = make_task(seed)
    if not validation:
        return task
    kept = [(x[5:], y[5:]) for x, y in task.pairs]
    held = [torch.cat([pair[part][:5] for pair in task.pairs]) for part in (0, 1)]
    return fadamgc.Task(task.model, task.loss, kept, tuple(held))


def ignores_validation(seed, validation):
    return make_task(seed)


def macro(output, target):
    return float((output.argmax(1) == target).double().mean())


def own_metric(seed):
    task = make_task(seed)
    return fadamgc.Task(task.model, task.loss, task.pairs, task.test, metric=macro)


def named(output, target):
    values = fadamgc.metrics.classification(output, target)
    return {"macro-F1": values["macro-F1"], **values}


def named_metric(seed, metric=fadamgc.metrics.classification):
    task = make_task(seed)
    return fadamgc.Task(task.model, task.loss, task.pairs, task.test, metric=metric)


def other_named_metric(seed):
    return named_metric(seed, named)


def counted(seed):
    import os

    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{os.getpid()} ")
    return make_task(seed)


def fails(seed):
    raise OSError("no such disk")


def no_task(seed):
    return 3


number = 3
"""
RUN = """
[run]
rounds = 3
local_steps = 2
batch_size = 8
seeds = [0, 1]
executor = "loop"
[tune]
eta_l = [0.1, 0.01]
eta_g = [1.0]
rounds = 2
seeds = [5]
[[method]]
algorithm = "fadamgc"
[[method]]
algorithm = "fedavg"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"my_tasks_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.setattr(loading, "_folders", [])
    monkeypatch.setattr(loading, "_imported", [])
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return name


def spec_of(folder: Path, task: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(f'name = "mine"\n[task]\n{task}\n{RUN}')
    return path


# A function.


@pytest.mark.slow
def test_a_function_in_a_spec_does_what_built_in_data_do(module: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f'data = "{module}.py:make_task"\noptions = {{ noise = 0.5 }}')
    out = tmp_path / "out"
    result = command("run", path, "--out", out, "--workers", 2)
    assert result.exit_code == 0, result.output
    written = {p.name for p in out.iterdir()}
    assert {"results.md", "results.tex", "curves.png", "report.html", "partition.png", "spec.toml"} <= written
    spec = load_spec(out / "spec.toml")
    assert (spec.task.clients, spec.task.metric) == (6, "accuracy")
    run = fadamgc.load_run(out / "runs" / "fadamgc-seed1")
    task = build_task(spec.task, seed=1)
    expected = fadamgc.simulate(
        fadamgc.FAdamGC(), task, rounds=3, local_steps=2, batch_size=8, seed=1, executor="loop"
    )
    assert run.history == expected.history
    again = command("run", path, "--out", out, "--workers", 1, "--resume")
    assert again.exit_code == 0
    assert "[1/" not in again.stderr


def test_the_partition_of_a_function_is_drawn(module: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f'data = "{module}.py:make_task"')
    result = command("partition", path, "--out", tmp_path / "mine.png")
    assert result.exit_code == 0, result.output
    assert "6 clients" in result.output
    assert "samples per client: least" in result.output
    assert (tmp_path / "mine.png").stat().st_size > 1000


@pytest.mark.slow
def test_workers_share_the_task_of_a_function(module: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The function is called once per seed in this process, and never in the workers."""
    path = spec_of(tmp_path, f'data = "{module}.py:counted"')
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    result = command("run", path, "--out", tmp_path / "out", "--workers", 2)
    assert result.exit_code == 0, result.output
    calls = (tmp_path / "calls").read_text().split()
    seeds = load_spec(path).run.seeds
    assert set(calls) == {str(os.getpid())}
    assert len(calls) <= 3 + len(seeds)  # to complete the spec, to plot the partition, and to check it


@pytest.mark.parametrize("function", ["make_task", "with_validation", "own_metric"])
def test_tuning_holds_out_train_data(module: str, function: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f'data = "{module}.py:{function}"')
    spec = load_spec(path)
    tuned = build_task(spec.task, 5, 0.25)
    plain = build_task(spec.task, 5)
    train = sum(len(x) for x, _ in plain.pairs)
    assert sum(len(x) for x, _ in tuned.pairs) + len(tuned.test_pair[0]) == train
    result = command("tune", path, "--out", tmp_path / "tuned", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "tuned" / "tuned.toml").exists()
    assert spec.task.metric == {"own_metric": "macro"}.get(function, "accuracy")


def test_a_share_of_each_client_is_held_out(module: str, tmp_path: Path) -> None:
    task = build_task(load_spec(spec_of(tmp_path, f'data = "{module}.py:make_task"')).task, seed=0)
    without = held_out(task, 0.2)
    assert [len(data) for data in without.client_test_samples] == [6] * 6
    assert [len(x) for x, _ in without.pairs] == [24] * 6
    rows = {tuple(row) for x, _ in task.pairs for row in x.tolist()}
    assert {tuple(row) for row in without.test_pair[0].tolist()} <= rows
    assert not {tuple(r) for x, _ in without.pairs for r in x.tolist()} & {
        tuple(row) for row in without.test_pair[0].tolist()
    }


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ('data = "{m}.py:make_tsk"', "has no 'make_tsk'; did you mean 'make_task'"),
        ('data = "{m}.py:fails"', "failed for seed 0: OSError: no such disk"),
        ('data = "{m}.py:no_task"', "returns a int; it must return a fadamgc.Task"),
        ('data = "{m}.py:number"', "is not a function"),
        ('data = "{m}.py:make_task"\noptions = {{ nois = 1 }}', "has no such argument; did you mean 'noise'"),
        ('data = "{m}.py:make_task"\nalpha = 0.1', "has no key 'alpha'"),
        ('data = "{m}x.py:make_task"', "there is no file"),
        ('data = "unknown"', "or a function such as 'my_module:make_task'"),
    ],
)
def test_bad_functions_are_refused(module: str, task: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(fadamgc.InputError, match=message):
        load_spec(spec_of(tmp_path, task.format(m=module)))


@pytest.mark.parametrize(
    ("function", "measure"), [("named_metric", "accuracy"), ("other_named_metric", "macro-F1")]
)
def test_the_first_of_several_numbers_is_the_metric(
    module: str, function: str, measure: str, tmp_path: Path
) -> None:
    """An experiment of an earlier version, which had the name of the function there, can be resumed."""
    spec = load_spec(spec_of(tmp_path, f'data = "{module}.py:{function}"'))
    assert spec.task.metric == measure
    old = spec.replace("task", measure="classification")
    folder = ExperimentFolder(tmp_path / "out")
    folder.path.mkdir()
    (folder.path / "spec.toml").write_text(old.to_toml())
    folder.check_resumable(spec)
    runs = [folder.plan(one)[0] for one in (old, spec, spec.replace("task", options={"seed": 1}))]
    runs[0].save_diverged("reason")
    assert [planned.diverged() for planned in runs] == ["reason", "reason", None]


def test_a_function_that_would_tune_on_the_test_data_is_refused(module: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f'data = "{module}.py:ignores_validation"')
    refused = command("tune", path, "--out", tmp_path / "tuned", "--workers", 1)
    assert refused.exit_code == 2
    assert "returns its test data for validation=0.25" in refused.stderr


# A table.


def table(folder: Path, kind: str, regression: bool = False) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3))
    labels = np.array(["cat", "dog", "owl"])[x.argmax(axis=1)]
    target = x.sum(axis=1) if regression else labels
    path = folder / f"table.{kind}"
    owner = random.integers(0, 7, 200)
    if kind == "npz":
        np.savez(path, X=x, y=x.argmax(axis=1), who=owner)
        return path
    colour = np.array(["red", "green"])[random.integers(0, 2, 200)]
    frame = pd.DataFrame(
        {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "colour": colour, "y": target, "who": owner}
    )
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
@pytest.mark.parametrize("how", ["clients = 5\nalpha = 0.5", 'client = "who"'])
def test_a_table_in_a_spec(kind: str, how: str, tmp_path: Path) -> None:
    table(tmp_path, kind)
    path = spec_of(tmp_path, f'data = "table.{kind}"\ntarget = "y"\n{how}')
    spec = load_spec(path)
    assert spec.task.clients == (7 if "who" in how else 5)
    task = build_task(spec.task, seed=0)
    assert task.n == spec.task.clients
    assert sum(len(x) for x, _ in task.pairs) + len(task.test_pair[0]) == 200
    assert {int(label) for _, y in task.pairs for label in y} == {0, 1, 2}
    expected = {"csv": 5, "parquet": 5, "npz": 3}[kind] + (1 if kind != "npz" and "who" not in how else 0)
    assert task.pairs[0][0].shape[1] == expected
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.5), task, rounds=40, local_steps=5, progress=False)
    assert run.history[-1].test_accuracy > 0.85
    out = tmp_path / "out"
    assert command("run", path, "--out", out, "--workers", 1).exit_code == 0
    assert (out / "partition.png").exists()


def test_a_regression(tmp_path: Path) -> None:
    table(tmp_path, "csv", regression=True)
    section = 'data = "table.csv"\ntarget = "y"\nfeatures = ["a", "b", "c"]\nkind = "regression"\nhidden = []'
    path = spec_of(tmp_path, f'{section}\npartition = "iid"\nclients = 4')
    task = build_task(load_spec(path).task, seed=0)
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.3), task, rounds=60, local_steps=5, progress=False)
    assert run.history[-1].test_loss < 1e-3
    with pytest.raises(fadamgc.InputError, match="for a regression give partition"):
        load_spec(spec_of(tmp_path, section))


def test_another_file_is_the_test_data(tmp_path: Path) -> None:
    table(tmp_path, "csv")
    (tmp_path / "test.csv").write_bytes((tmp_path / "table.csv").read_bytes())
    path = spec_of(tmp_path, 'data = "table.csv"\ntarget = "y"\ntest = "test.csv"')
    task = build_task(load_spec(path).task, seed=0)
    assert len(task.test_pair[0]) == sum(len(x) for x, _ in task.pairs) == 200


def test_a_test_file_is_read_with_the_columns_of_the_train_file(tmp_path: Path) -> None:
    """Columns in another order, other columns, and categories that do not occur keep their meaning."""
    table(tmp_path, "csv")
    frame = pd.read_csv(tmp_path / "table.csv")
    frame["c"] = frame["c"].abs()
    frame.to_csv(tmp_path / "table.csv", index=False)
    kept = frame[frame["colour"] == "red"]
    kept[["y", "c", "colour", "b", "a"]].assign(more=1).to_csv(tmp_path / "other.csv", index=False)
    kept.to_csv(tmp_path / "same.csv", index=False)
    section = 'data = "table.csv"\ntarget = "y"\nclient = "who"'
    pairs = [
        build_task(load_spec(spec_of(tmp_path, f'{section}\ntest = "{file}"')).task, seed=0).test_pair
        for file in ("other.csv", "same.csv", "table.csv")
    ]
    assert torch.equal(pairs[0][0], pairs[1][0])
    assert torch.equal(pairs[0][1], pairs[1][1])
    assert torch.equal(pairs[0][0], pairs[2][0][np.flatnonzero(frame["colour"] == "red")])


@pytest.mark.parametrize("test", ["0.2", '"other.csv"'])
@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_clients_of_a_table_are_tested_on_their_own_rows(
    test: str, validation: float, tmp_path: Path
) -> None:
    table(tmp_path, "csv")
    frame = pd.read_csv(tmp_path / "table.csv")
    frame[frame["who"] == 2].to_csv(tmp_path / "other.csv", index=False)
    path = spec_of(tmp_path, f'data = "table.csv"\ntarget = "y"\nclient = "who"\ntest = {test}')
    task = build_task(load_spec(path).task, 0, validation)
    tests = [data.pair()[0] for data in task.client_test_samples]
    assert task.evaluated == ([2] if test != "0.2" and not validation else list(range(7)))
    assert sum(map(len, tests)) == len(task.test_pair[0])
    assert {tuple(row) for x in tests for row in x.tolist()} == set(map(tuple, task.test_pair[0].tolist()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "violet"}, "row 0 has colour='violet', which does not occur in table.csv; it has green"),
        ({"a": "high"}, "'a' has (object|str), such as 'high', and not numbers; change the file"),
        ({"b": None}, "200 rows have no value of 'b'"),
        (["y", "a", "b", "colour"], "there is no column 'c' of table.csv"),
    ],
)
def test_a_test_file_with_other_columns_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    table(tmp_path, "csv")
    frame = pd.read_csv(tmp_path / "table.csv")
    other = frame.assign(**change) if isinstance(change, dict) else frame[change]
    other.to_csv(tmp_path / "other.csv", index=False)
    path = spec_of(tmp_path, 'data = "table.csv"\ntarget = "y"\ntest = "other.csv"\nclients = 3')
    with pytest.raises(fadamgc.InputError, match=message):
        build_task(load_spec(path).task, seed=0)


def test_a_test_file_of_arrays_has_the_same_features(tmp_path: Path) -> None:
    table(tmp_path, "npz")
    np.savez(tmp_path / "other.npz", X=np.zeros((5, 2)), y=np.zeros(5, dtype=int))
    path = spec_of(tmp_path, 'data = "table.npz"\ntarget = "y"\nclient = "who"\ntest = "other.npz"')
    with pytest.raises(fadamgc.InputError, match=r"have the shape \(2,\), and \(3,\) in table.npz"):
        build_task(load_spec(path).task, seed=0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ('data = "nothing.csv"\ntarget = "y"', "there is no file 'nothing.csv'"),
        ('data = "table.csv"', "needs the key 'target'"),
        ('data = "table.csv"\ntarget = "z"', "there is no column 'z'"),
        ('data = "table.csv"\ntarget = "y"\nfeatures = ["aa"]', "there is no column 'aa'; did you mean 'a'"),
        ('data = "table.csv"\ntarget = "y"\ntest = 1.5', "test=1.5 is not accepted"),
        ('data = "gaps.csv"\ntarget = "y"', "1 rows have no value of 'a'; fill or remove them"),
        ('data = "binary.parquet"\ntarget = "y"', "cannot be read"),
    ],
)
def test_bad_tables_are_refused(section: str, message: str, tmp_path: Path) -> None:
    table(tmp_path, "csv")
    (tmp_path / "gaps.csv").write_text("a,y\n1,2\n,3\n")
    (tmp_path / "binary.parquet").write_bytes(b"no table")
    path = spec_of(tmp_path, section)

    def load() -> None:
        build_task(load_spec(path).task, seed=0)

    with pytest.raises(fadamgc.InputError, match=message):
        load()


# Python.


def make_task(seed: int, noise: float = 0.8) -> fadamgc.Task:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    with seeded(seed):  # the weights of the model
        return names["make_task"](seed, noise=noise)


METHODS = {"mine": fadamgc.FAdamGC(eta_l=0.05), "plain": fadamgc.FedAvg(eta_l=0.1)}
HOW: dict[str, Any] = {"rounds": 3, "local_steps": 2, "batch_size": 8, "progress": False, "executor": "loop"}


@pytest.mark.slow
def test_an_experiment_in_python(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seeds": 2, "target": 0.8, "title": "Points", "options": {"noise": 0.5}, **HOW}
    results = fadamgc.experiment(make_task, METHODS, out=tmp_path / "out", **options)
    assert {label: len(runs) for label, runs in results.runs.items()} == {"mine": 2, "plain": 2}
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"results.md", "results.tex", "curves.png", "report.html", "partition.png", "spec.toml"} <= written
    assert "Points" in (tmp_path / "out" / "report.html").read_text()
    expected = fadamgc.simulate(METHODS["mine"], make_task(1, 0.5), seed=1, **HOW)
    assert results.runs["mine"][1].history == expected.history
    again = fadamgc.experiment(make_task, METHODS, out=tmp_path / "out", resume=True, **options)
    assert results_markdown(again) == results_markdown(results)


@pytest.mark.slow
def test_an_experiment_with_tuning_and_a_class_of_this_program(tmp_path: Path) -> None:
    class Mine(fadamgc.FedAvg):
        title = "Mine"

    grid = {"eta_l": [0.1, 0.001], "eta_g": [1.0], "rounds": 2, "seeds": [7]}
    results = fadamgc.experiment(
        lambda seed: make_task(seed),
        [Mine(), fadamgc.FedAvg()],
        out=tmp_path / "out",
        seeds=[3],
        tune=grid,
        **HOW,
    )
    assert (tmp_path / "out" / "tuning.csv").exists()
    assert list(results.runs) == ["Mine", "FedAvg"]
    assert results.spec.methods[0].hyperparameters["eta_l"] == 0.1


@pytest.mark.slow
def test_an_experiment_with_functions_of_this_program(tmp_path: Path) -> None:
    """Schedules and local steps may be functions that are in no module; other values are other runs."""

    def run(first: float, **change: Any) -> Any:
        halving = schedules.warmup(1, then=lambda t: first / 2**t)
        methods = {"a": fadamgc.FedAvg(eta_l=lambda t: first / t), "b": fadamgc.FedAvg(eta_l=halving)}
        how = HOW | {"local_steps": lambda i, t: 1 + (i + t) % 3, "out": tmp_path / "out", "seeds": 1}
        return fadamgc.experiment(make_task, methods, **how | change)

    results = run(0.1)
    assert [len(set(record.work[-1].steps)) for record in results.runs["a"][0].history] == [3, 3, 3]
    how = HOW | {"local_steps": lambda i, t: 1 + (i + t) % 3}
    expected = fadamgc.simulate(fadamgc.FedAvg(eta_l=lambda t: 0.1 / t), make_task(0), **how)
    assert results.runs["a"][0].history == expected.history
    record = tmp_path / "out" / "runs" / "a-seed0" / "run.json"
    written = record.stat().st_mtime_ns
    run(0.1, resume=True)
    assert record.stat().st_mtime_ns == written
    with pytest.raises(fadamgc.InputError, match="eta_l"):
        run(0.2, resume=True)
    with pytest.raises(fadamgc.InputError, match="local_steps"):
        run(0.1, local_steps=lambda i, t: 1, resume=True)


@pytest.mark.slow
def test_a_task_is_known_by_its_data(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "out", "seeds": 1, "resume": True, **HOW}
    fadamgc.experiment(make_task(0), METHODS, **options)
    fadamgc.experiment(make_task(0), METHODS, **options)
    with pytest.raises(fadamgc.InputError, match="data"):
        fadamgc.experiment(make_task(1), METHODS, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": {}}, "methods={} is empty"),
        ({"methods": {"a": 3}}, r"methods\['a'\]=3 is not an algorithm"),
        ({"task": 3}, "task=3 is not accepted"),
        ({"task": lambda: None, "workers": 2}, "is not in a module"),
        ({"rounds": 0}, "rounds=0"),
        ({"local_stepz": 3}, "has no key 'local_stepz'"),
        ({"keep": "best"}, "keep='best' is for one run; give save_models='best'"),
        ({"local_steps": lambda i, t: 1 / 0}, "failed for client 0 in round 1: division by zero"),
        ({"local_steps": lambda i, t: 3, "workers": 2, "task": "math:x"}, "is not in a module"),
        ({"methods": [fadamgc.FedAvg(eta_l=lambda t: t)], "workers": 2, "task": "math:x"}, "not in a module"),
        ({"methods": [fadamgc.FedAvg(eta_l=lambda t: 1 / (2 - t))]}, "failed for round 2"),
    ],
)
def test_bad_experiments_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"task": make_task, "methods": METHODS, "out": tmp_path / "out", **HOW}
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.experiment(**arguments | change)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_report_from_runs_that_exist(tmp_path: Path) -> None:
    task = make_task(0)
    runs = [{"algorithm": algo, "seed": seed} for algo in METHODS.values() for seed in (0, 1)]
    made = fadamgc.simulate_many(runs, task=task, **HOW)
    by_label = {"A": made[:2], "B": made[2:]}
    results = fadamgc.report(by_label, tmp_path / "out", title="Mine", target=0.5)
    assert list(results.runs) == ["A", "B"]
    assert "Rounds to 50 %" in (tmp_path / "out" / "results.md").read_text()
    assert "Mine" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "partition.png").stat().st_size > 1000
    listed = fadamgc.report(made, tmp_path / "listed")
    assert list(listed.runs) == ["FAdamGC", "FedAvg"]
    assert ExperimentFolder(tmp_path / "out").has_experiment
    with pytest.raises(fadamgc.InputError, match="two runs of 'A' have seed 0"):
        fadamgc.report({"A": [made[0], made[0]]}, tmp_path / "twice")
    with pytest.raises(fadamgc.InputError, match="give runs of simulate"):
        fadamgc.report([3], tmp_path / "none")


# From arrays to clients.


def test_split_by_labels() -> None:
    X, y = np.random.default_rng(0).normal(size=(600, 4)), np.arange(600) % 3
    model, loss = torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy
    task = fadamgc.Task.split(model, loss, X, y, clients=10, alpha=0.1, test=0.2, seed=1)
    assert task.n == 10
    assert len(task.test_pair[0]) == 120
    assert np.bincount(task.test_pair[1]).tolist() == [40, 40, 40]
    shares = [np.bincount(labels, minlength=3).max() / len(labels) for _, labels in task.pairs]
    assert np.mean(shares) > 0.6  # skewed
    again = fadamgc.Task.split(model, loss, X, y, clients=10, alpha=0.1, test=0.2, seed=1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(task.pairs, again.pairs, strict=True))
    even = fadamgc.Task.split(model, loss, X, y, clients=10, alpha=math.inf)
    assert {len(x) for x, _ in even.pairs} == {48}


def test_split_by_owner_and_of_regressions() -> None:
    X, y = torch.randn(90, 2), torch.randn(90, 1)
    owner = np.repeat(["ann", "bob", "eve"], 30)
    model, loss = torch.nn.Linear(2, 1), torch.nn.functional.mse_loss
    task = fadamgc.Task.split(model, loss, X, y, clients=owner, metric="loss")
    assert [len(x) for x, _ in task.pairs] == [24, 24, 24]
    assert fadamgc.Task.split(model, loss, X, y, clients=4, metric="loss", test=(X, y)).n == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": 1.0}, r"test=1\.0 is not accepted"),
        ({"test": "x"}, "test='x' is not accepted"),
        ({"y": torch.zeros(3)}, "X has 60 samples and y 3"),
        ({"clients": [0, 1]}, "or the client of each of the 60 samples"),
        ({"y": torch.zeros(60, 1), "alpha": 0.1}, "needs labels"),
        ({"X": [[1], [2, 3]]}, "X cannot be a tensor"),
    ],
)
def test_bad_splits_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"X": torch.randn(60, 2), "y": torch.arange(60) % 2, "clients": 3} | change
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.Task.split(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, **arguments)


def test_a_partition_can_be_iterated() -> None:
    parts = fadamgc.data.iid(10, clients=3, seed=0)
    assert len(parts) == 3
    assert sorted(i for part in parts for i in part) == list(range(10))
    assert json.dumps(parts[0].tolist()) == json.dumps(parts.indices[0].tolist())
