"""The numbers of saved runs that advice needs, which ``make tables`` writes to advice.json."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import torch

from fadamgc.experiments.report.numbers import Experiments, ReportedExperiment, Results, Row, values_by_seed
from fadamgc.federation.cost import state_bytes, traffic
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.paper.advice import REFERENCE, TRACKING, Evidence, RecordedMethod

KIND_OF_DATA = {
    **dict.fromkeys(("digits", "cifar10", "cifar100", "tiny-imagenet"), "images"),
    **dict.fromkeys(("20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp"), "texts"),
    "uci_har": "sensors",
}
SIZE = 1000  # of a model, to count the vectors of messages
FEWEST = 4  # methods of an experiment that says something about their order
STUDIES = ("main-", "digits", "har", "regimes", TRACKING)  # whose methods have step sizes that were tuned


def evidence(study: str, experiments: Experiments) -> Iterator[Evidence]:
    """List those experiments of a study that advice can use."""
    for experiment in experiments:
        found = _evidence(study, experiment)
        if found is not None and (study == TRACKING or len(found.methods) >= FEWEST):
            yield found


def _evidence(study: str, experiment: ReportedExperiment) -> Evidence | None:
    results = experiment.results
    task, run = results.spec.task, results.spec.run
    data = getattr(task, "data", None)
    methods = [found for row in results.rows if (found := _method(results, row)) is not None]
    if data not in KIND_OF_DATA or run.target is None or REFERENCE not in {m.algorithm for m in methods}:
        return None
    label = methods[0].label
    record = results.runs[label][0].history[0]
    return Evidence(
        study=study,
        experiment=experiment.name,
        data=data,
        kind=KIND_OF_DATA[data],
        model=getattr(task, "model", ""),
        clients=task.clients,
        participation=(run.sampled or task.clients) / task.clients,
        local_steps=_local_steps(results),
        alpha=getattr(task, "alpha", None),
        parameters=round(record.bytes_down / len(record.sampled) / 4 / methods[0].down),
        target=run.target,
        methods=tuple(methods),
    )


def _method(results: Results, row: Row) -> RecordedMethod | None:
    """Return what advice needs of a row; None if a run diverged, or had codecs, privacy or groups."""
    method, runs = row.method, results.runs[row.method.label]
    rounds = values_by_seed(results, method.label, "rounds")
    algorithm = runs[0].algorithm if runs else None
    if algorithm is None or isinstance(algorithm, GroupedAlgorithm) or row.diverged or not rounds:
        return None
    if results.spec.codec(method) is not None or results.spec.privacy(method) is not None:
        return None
    sizes = [size / 4 / SIZE for size in traffic(algorithm, SIZE)]
    state = state_bytes(algorithm.init_client(torch.zeros(SIZE))) / 4 / SIZE
    records = [record for run in runs for record in run.history]
    return RecordedMethod(
        label=method.label,
        algorithm=method.algorithm,
        settings=dict(method.hyperparameters),
        tracked_share=round(fmean(len(r.tracked) / len(r.sampled) for r in records), 2),
        rounds={str(seed): round(value) for seed, value in rounds.items()},
        missed=row.runs - row.reached,
        down=round(sizes[0], 2),
        up=round(sizes[1], 2),
        up_tracked=round(sizes[2], 2),
        state=round(state),
    )


def _local_steps(results: Results) -> float:
    """Return the mean number of steps of a client; it differs between clients if it is given in epochs."""
    if isinstance(results.spec.run.local_steps, int):
        return results.spec.run.local_steps
    runs = next(iter(results.runs.values()))
    steps = [step for record in runs[0].history for work in record.work for step in work.steps]
    return round(fmean(steps), 1)
