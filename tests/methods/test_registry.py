"""One line per method: the registry, and the names that the package exports."""

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest

import fadamgc
from fadamgc import methods
from fadamgc.algorithm import Algorithm
from fadamgc.methods import algorithm_class, algorithm_name
from fadamgc.methods.local_sgd import LocalSGD


def final_classes(file):
    """Classes of algorithms that a file defines and that are not abstract."""
    module = importlib.import_module(f"fadamgc.methods.{file}")
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if issubclass(cls, Algorithm)]
    return [cls for cls in classes if cls.__module__ == module.__name__ and not inspect.isabstract(cls)]


def test_every_file_in_methods_is_registered_under_its_name():
    files = [path.stem for path in Path(methods.__file__).parent.glob("*.py") if path.stem != "__init__"]
    found = {file: final_classes(file) for file in files}
    registered = {file: cls for file, (cls,) in ((f, c) for f, c in found.items() if c)}
    assert registered | {"compose": fadamgc.Composed} == methods._REGISTRY
    for name in fadamgc.algorithms():
        assert algorithm_name(fadamgc.make_algorithm(name)) == name


def test_the_order_of_the_methods_in_tables():
    order = (
        "fadamgc", "fa_nt", "fa_nt_local", "local_adam", "fedavg", "fedavg_m", "scaffold", "scaffold_m",
        "fedadam", "fedams",
    )  # fmt: skip
    assert tuple(name for name in fadamgc.algorithms() if name in order) == order


def test_the_package_exports_every_method_and_no_more():
    classes = {algorithm_class(name).__name__: algorithm_class(name) for name in fadamgc.algorithms()}
    for name, cls in classes.items():
        assert getattr(fadamgc, name) is getattr(methods, name) is cls
    assert len(set(fadamgc.__all__)) == len(fadamgc.__all__)
    names = {}
    exec("from fadamgc import *", names)
    assert set(names) - {"__builtins__"} == set(fadamgc.__all__) >= set(classes)
    assert sorted(set(fadamgc.__all__) - set(classes)) == [
        "Algorithm", "CheckpointError", "CheckpointInUseError", "ClientOptimizer", "Cohort", "Correction",
        "CostModel", "FadamgcError", "InputError", "LazyClients", "NonFiniteError", "OtherRunError",
        "Privacy", "Ray", "Record", "RoundEnd", "Run", "Settings", "Task", "add", "algorithms", "compose",
        "correction", "experiment", "load_run", "local", "make_algorithm", "register", "report",
        "schedules", "server", "simulate", "simulate_many",
    ]  # fmt: skip


def test_an_algorithm_without_a_local_step_size_is_refused():
    @dataclass(frozen=True)
    class Stepless(LocalSGD):
        init_server = broadcast = aggregate = None

    with pytest.raises(fadamgc.InputError, match="Stepless has no local step size; declare the field eta_l"):
        Stepless()
