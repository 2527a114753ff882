"""Experiments from Python: what the command ``fadamgc run`` does with a spec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fadamgc.algorithm import Algorithm, AnyAlgorithm
from fadamgc.bundle import tensor_bytes
from fadamgc.errors import InputError, full_name, listed, shown, whole
from fadamgc.experiments.folder import PARTITION, ExperimentFolder
from fadamgc.experiments.planned_run import REPORT
from fadamgc.experiments.report.label_plot import save_label_plot
from fadamgc.experiments.report.numbers import Results
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import Runner, open_folder, run_spec
from fadamgc.experiments.spec.sections import CostSpec, MethodSpec, RunSpec, Spec, TuneSpec
from fadamgc.experiments.tune import tune as tune_spec
from fadamgc.experiments.tune import tuning_plan
from fadamgc.federation.cost import CostModel
from fadamgc.federation.run import Run
from fadamgc.federation.settings import Settings
from fadamgc.hyperparameters import schedules
from fadamgc.loading import is_importable, provide
from fadamgc.methods import algorithm_class, algorithm_name
from fadamgc.samples import Items
from fadamgc.schedules import Function, functions_of
from fadamgc.task import Task
from fadamgc.tasks.build import completed
from fadamgc.tasks.own import task_labels
from fadamgc.tasks.sections import FunctionTask, TaskSpec, task_spec
from fadamgc.toml import frozen
from fadamgc.tree import leaves

TaskMaker = Callable[..., Task]


def experiment(
    task: TaskMaker | Task | str | Mapping[str, Any],
    methods: Mapping[str, AnyAlgorithm] | Sequence[AnyAlgorithm],
    *,
    out: str | Path,
    rounds: int,
    seeds: int | Sequence[int] = 4,
    title: str | None = None,
    options: Mapping[str, Any] | None = None,
    tune: Mapping[str, Any] | None = None,
    cost: CostModel | None = None,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    save_models: Literal["last", "best"] | None = None,
    **settings: Any,
) -> Results:
    """Compare methods on a task of your own: runs, tables, figures and the page, in one folder.

    It does what ``fadamgc run`` does with a spec, and writes the spec as well. With ``tune``, the step sizes
    are chosen on held-out train data first.

    Args:
        task: a function ``make_task(seed, validation, **options)`` that returns a Task. It needs only the
            arguments that it uses; without ``validation``, tuning holds out a share of each client's data.
            Or a Task, which is then the same for all seeds; or "my_module:make_task"; or the [task] section
            of a spec as a dict.
        methods: algorithms by label, or a list of algorithms.
        out: the folder to write to, new or empty unless ``resume`` or ``overwrite``.
        rounds: global rounds.
        seeds: the number of seeds, or a list of seeds.
        title: title of tables, figures and page.
        options: further arguments of ``make_task``.
        tune: the [tune] section of a spec: ``{"eta_l": [...], "eta_g": [...], "rounds": 50}``.
        cost: the cost model, for simulated minutes; None is the default.
        workers: processes; with more than one, functions and algorithms must be in modules, and a script
            needs the usual ``if __name__ == "__main__":``.
        resume: keep the saved runs in the folder that have the same settings.
        overwrite: remove the experiment in the folder.
        progress: show the progress on stderr.
        save_models: the model that each run saves as model.safetensors, "last" or "best"; None: no model.
        settings: further keys of the [run] section, as for ``simulate``: sampled, local_steps, target, ...

    Returns:
        The results, with all runs: ``results.runs["FAdamGC"][0].history``.

    Example:
        >>> import fadamgc, tempfile, torch
        >>> def make_task(seed):
        ...     data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        ...     return fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data, data[0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = fadamgc.experiment(
        ...         make_task, [fadamgc.FAdamGC(), fadamgc.FedAvg()], out=folder, rounds=2, seeds=2,
        ...         local_steps=2, progress=False)
        >>> [len(runs) for runs in results.runs.values()]
        [2, 2]
    """
    out = Path(out)
    _check_importable(task, methods, settings.get("local_steps"), whole("workers", workers, 1))
    whole("rounds", rounds, 1)
    if "keep" in settings:
        raise InputError(
            f"keep={shown(settings['keep'])} is for one run; give save_models='best' or 'last', and each run "
            "leaves that model in its folder"
        )
    section = completed(_task_section(task, options or {}, out.name))
    seed_list = range(whole("seeds", seeds, 1)) if isinstance(seeds, int) else seeds
    if "local_steps" not in settings and "local_epochs" not in settings:
        settings["local_steps"] = 10
    if callable(settings.get("local_steps")):
        settings["local_steps"] = _steps_name(settings["local_steps"], section.clients, rounds)
    run = {"rounds": rounds, "seeds": tuple(seed_list), **settings}
    parts = {
        "name": _folder_name(out.resolve().name),
        "title": title,
        "task": section,
        "run": RunSpec.from_table(frozen(run), "[run]"),
        "cost": CostSpec(**asdict(cost or CostModel())),
        "tune": None if tune is None else TuneSpec.from_table(frozen(dict(tune)), "[tune]"),
        "methods": tuple(_method(label, algorithm, rounds) for label, algorithm in _labelled(methods)),
    }
    spec = Spec.from_table(parts, "")
    folder = ExperimentFolder(out)
    runner = Runner(workers, quiet=not progress, save_models=save_models)
    runner.check(folder.plan(spec))
    if tune is not None:
        runner.check(tuning_plan(spec, out))
    with folder.lock():
        if tune is not None:
            opened = open_folder(folder, spec, resume, overwrite, tuned=True)
            with opened, runner.before(folder.plan(spec)):
                spec = tune_spec(spec, out, resume=resume, runner=runner).spec
            resume, overwrite = True, False
        run_spec(spec, out, resume=resume, overwrite=overwrite, tuned=tune is not None, runner=runner)
        return write_report(out)


def report(
    runs: Mapping[str, Sequence[Run]] | Sequence[Run],
    out: str | Path,
    *,
    title: str | None = None,
    target: float | None = None,
    measure: str | None = None,
) -> Results:
    """Make tables, figures and the page from runs that exist, such as those of ``simulate_many``.

    Args:
        runs: runs by the label of their method, or a list of runs, whose labels are their algorithms' titles.
            They must agree in everything but method and seed.
        out: the folder to write to.
        title: title of tables, figures and page.
        target: value of the metric that rounds and minutes are counted to.
        measure: name of the metric.

    Returns:
        The results; the files are in the folder.

    Example:
        >>> import fadamgc, tempfile, torch
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data, data[0])
        >>> runs = [fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, seed=seed) for seed in (0, 1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = fadamgc.report({"FedAvg": runs}, folder)
        >>> [row.method.label for row in results.rows]
        ['FedAvg']
    """
    pairs = _runs_by_label(runs)
    out = Path(out)
    places: dict[Path, Run] = {}
    for label, run in pairs:
        shown_as = {"label": label, "title": title, "measure": measure}
        described = {key: value for key, value in shown_as.items() if value is not None}
        wanted = run.settings.get("target") if target is None else target
        settings = run.settings | {REPORT: run.settings.get(REPORT, {}) | described, "target": wanted}
        method = MethodSpec(algorithm=str(run.settings["algorithm"]), label=label)
        place = out / "runs" / f"{method.slug}-seed{run.settings['seed']}"
        if place in places:
            raise InputError(
                f"two runs of {label!r} have seed {run.settings['seed']}; give each its own seed"
            )
        places[place] = replace(run, settings=settings)
    for place, run in places.items():
        run.save(place, states=False)
    with_task = next((run for _, run in pairs if run.task is not None), None)
    labels = None if with_task is None or with_task.task is None else task_labels(with_task.task)
    if with_task is not None and labels is not None:
        note = f"{labels.note} (seed {with_task.settings['seed']})"
        save_label_plot(labels.counts, out / PARTITION, title=note)
    return write_report(out)


def _runs_by_label(runs: Any) -> list[tuple[str, Run]]:
    if isinstance(runs, Mapping):
        pairs = [(str(label), run) for label, of_method in runs.items() for run in of_method]
    else:
        entries = listed(runs) or []
        pairs = [(_label(run), run) for run in entries]
    if not pairs or not all(isinstance(run, Run) for _, run in pairs):
        raise InputError(f"runs={shown(runs)} is not accepted; give runs of simulate, in a list or by label")
    return pairs


def _label(run: Any) -> str:
    algorithm = getattr(run, "algorithm", None)
    return str(getattr(algorithm, "title", None) or getattr(run, "settings", {}).get("algorithm"))


def _folder_name(name: str) -> str:
    cleaned = "".join(c if c.isalnum() or c in " ._-" else "-" for c in name).lstrip(" .-")
    return cleaned or "experiment"


def _task_section(task: Any, options: Mapping[str, Any], name: str) -> TaskSpec:
    """Return the [task] section for a function, a task, a name or a table."""
    if isinstance(task, Mapping):
        return task_spec(**task)
    if isinstance(task, str):
        return task_spec(data=task, options=dict(options)) if ":" in task else task_spec(data=task, **options)
    if isinstance(task, Task):
        fixed = task
        reference = f"{name or 'experiment'}:task_{_digest(task)}"
        provide(reference, lambda: fixed)
    elif callable(task):
        reference = full_name(task) if is_importable(task) else _provided(task)
    else:
        raise InputError(f"task={shown(task)} is not accepted; give a function that returns a fadamgc.Task")
    return FunctionTask(data=reference, options=frozen(dict(options)))


def _provided(value: Any, values: Sequence[Any] = ()) -> str:
    """Let this process find an object that is not in a module; return its name, with a digest of values."""
    name = full_name(value).replace("<", "").replace(">", "").replace(".", "_")
    if values:
        name += f"_{hashlib.sha256(repr(values).encode()).hexdigest()[:16]}"
    provide(name, value)
    return name


def _functions(algorithm: AnyAlgorithm) -> list[Function]:
    """Return the functions among the schedules of an algorithm."""
    return [function for schedule in schedules(algorithm).values() for function in functions_of(schedule)]


def _provide_schedules(algorithm: AnyAlgorithm, rounds: int) -> None:
    """Let this process find the schedules of an algorithm that are functions and not in a module.

    Their values are part of their names, so that a run with other values is not taken for the same.
    """
    for schedule in _functions(algorithm):
        if not is_importable(schedule.function):
            _provided(schedule.function, [schedule.at(t) for t in range(1, rounds + 1)])


def _steps_name(function: Any, clients: int, rounds: int) -> str:
    """Return the name of a function of local steps; if it is not in a module, this process can find it."""
    if is_importable(function):
        return full_name(function)
    settings = Settings.of(rounds=rounds, local_steps=function)
    some, when = (np.unique(np.linspace(0, n - 1, min(n, 100)).astype(int)) for n in (clients, rounds))
    return _provided(function, [settings.steps(int(i), 1, int(t) + 1) for t in when for i in some])


def _check_importable(task: Any, methods: Any, local_steps: Any, workers: int) -> None:
    """Refuse several workers if they could not import the task, an algorithm or a function."""
    if workers == 1:
        return
    values = [] if isinstance(task, str | Mapping) else [task]
    values += [local_steps] if callable(local_steps) else []
    for _, algorithm in _labelled(methods):
        values += [type(algorithm), *(schedule.function for schedule in _functions(algorithm))]
    for value in values:
        if not is_importable(value):
            raise InputError(
                f"workers={workers} needs a task, algorithms and functions that other processes can import; "
                f"{shown(value)} is not in a module; move it into one, or use workers=1"
            )


def _digest(task: Task) -> str:
    """Return a name for the task's data and model, so that runs of another task are not reused for it."""
    sha = hashlib.sha256(repr(task.model).encode())
    if not task.in_memory() or any(isinstance(data, Items) for data in task.in_memory()):  # hash two samples
        sha.update(repr(task.sizes.tolist()).encode())
        tensors = leaves(task.sample())
    else:
        tensors = [t for pair in (*task.pairs, task.test_pair or ()) for t in pair]
    for tensor in (*tensors, *task.model.state_dict().values()):
        sha.update(tensor_bytes(tensor.detach().cpu()))
    return sha.hexdigest()[:16]


def _labelled(methods: Any) -> list[tuple[str, AnyAlgorithm]]:
    if isinstance(methods, Mapping):
        pairs = list(methods.items())
    else:
        pairs = [(getattr(method, "title", "?"), method) for method in listed(methods) or []]
    for label, algorithm in pairs:
        if not isinstance(algorithm, Algorithm):
            raise InputError(
                f"methods[{label!r}]={shown(algorithm)} is not an algorithm; give fadamgc.FAdamGC()"
            )
    if not pairs:
        raise InputError(f"methods={shown(methods)} is empty; give algorithms by label, or a list of them")
    return pairs


def _method(label: str, algorithm: AnyAlgorithm, rounds: int) -> MethodSpec:
    _provide_schedules(algorithm, rounds)
    name = algorithm_name(algorithm)
    if ":" not in name and name == type(algorithm).__name__:  # not registered
        kind = type(algorithm)
        name = full_name(kind) if is_importable(kind) else _provided(kind)
    algorithm_class(name)
    return MethodSpec(algorithm=name, label=label, hyperparameters=frozen(algorithm.plain()))
