"""BibTeX of what a run used: this package, the method, the data and the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fadamgc.bundle import has_bundle
from fadamgc.errors import InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.planned_run import IDENTITY
from fadamgc.experiments.spec.sections import Spec
from fadamgc.federation.run import NAME as RECORD
from fadamgc.federation.run import Run
from fadamgc.loading import untrusted
from fadamgc.methods import algorithms, make_algorithm
from fadamgc.sim.checkpoint import NAME as CHECKPOINT
from fadamgc.sim.checkpoint import load_run

FILE = Path(__file__).with_name("references.bib")
PACKAGE = "fadamgc"
DATA: dict[str, tuple[str, ...]] = {
    "cifar10": ("krizhevsky2009learning",),
    "cifar100": ("krizhevsky2009learning",),
    "tiny-imagenet": ("le2015tiny",),
    "20_newsgroups": ("lang1995newsweeder",),
    **dict.fromkeys(("glue/sst2", "glue/qnli", "glue/qqp"), ("wang2019glue",)),
    "uci_har": ("anguita2013public",),
    "digits": ("alpaydin1998optical",),
}
MODELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("resnet8", "resnet18"), ("he2016deep",)),
    "minilm": ("wang2020minilm", "hu2022lora"),
    "gpt2": ("radford2019language", "hu2022lora"),
}
PARTITIONS: dict[str, tuple[str, ...]] = {"dirichlet": ("hsu2019measuring",)}
ROBUST = ("yin2018byzantine",)  # the median and the trimmed mean of the replies
PRIVATE = ("mcmahan2018learning", "balle2018privacy")  # the mechanism and its accounting


@cache
def references() -> dict[str, str]:
    """Return the entries of references.bib by their keys."""
    text = FILE.read_text(encoding="utf-8").replace("VERSION", version("fadamgc"))
    return {re.findall(r"^@\w+\{([^,]+),", entry)[0]: entry for entry in text.strip().split("\n\n")}


def bibtex(keys: Iterable[str]) -> str:
    """Return the entries of keys, each once; entries and comments among the keys are returned as they are.

    >>> print(bibtex(["kingma2015adam"]).splitlines()[0])
    @inproceedings{kingma2015adam,
    """
    entries = dict.fromkeys(references().get(key, key) for key in keys)
    return "\n\n".join(entry.strip() for entry in entries) + "\n"


def cited(source: str) -> list[str]:
    """List the keys for the name of an algorithm, or for the folder of a study, an experiment or a run."""
    if source in algorithms():
        return [PACKAGE, *make_algorithm(source).cites]
    folder = Path(source)
    if not folder.is_dir():
        raise InputError(
            f"{source!r} is neither a folder nor an algorithm; `fadamgc list` shows the algorithms"
        )
    inside = [ExperimentFolder(path) for path in (folder, *sorted(folder.iterdir()))]
    specs = [experiment.read_plan()[0] for experiment in inside if experiment.has_spec]
    if not specs and not any(has_bundle(folder, name) for name in (RECORD, CHECKPOINT)):
        raise InputError(f"{source!r} has no spec.toml and no run.json; give a folder with saved runs")
    keys = [key for spec in specs for key in _of_spec(spec)] if specs else _of_run(load_run(folder))
    return list(dict.fromkeys(keys))


def _of_spec(spec: Spec) -> list[str]:
    keys = [PACKAGE]
    with untrusted():  # reading a folder runs no code of it
        for method in spec.methods:
            try:
                keys += method.make().cites
            except InputError:
                keys.append(
                    f"% {method.algorithm}: not known here; a method of your own has a reference of your own"
                )
    robust = spec.run.aggregation or any(method.aggregation for method in spec.methods)
    private = any(map(spec.privacy, spec.methods))
    of_messages = (*(ROBUST if robust else ()), *(PRIVATE if private else ()))
    return [*keys, *_of_task(spec.task.model_dump()), *of_messages]


def _of_run(run: Run) -> list[str]:
    if run.algorithm is None:
        name = run.settings.get("algorithm")
        raise InputError(f"the run is of {name!r}, which is not registered; import its module first")
    identity: Any = run.settings.get(IDENTITY) or {}
    robust = ROBUST if run.settings.get("aggregation") else ()
    private = PRIVATE if run.settings.get("privacy") else ()
    return [PACKAGE, *run.algorithm.cites, *_of_task(identity.get("task", {})), *robust, *private]


def _of_task(task: Mapping[str, Any]) -> list[str]:
    tables = {"data": DATA, "model": MODELS, "partition": PARTITIONS}
    return [key for name, table in tables.items() for key in table.get(str(task.get(name)), ())]
