"""Algorithms from outside the package, in every place where a built-in one can be named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fadamgc
from command import fadamgc as command
from fadamgc import loading, methods
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import load_spec, parse_spec
from fadamgc.flower.config import read_config
from problems import class_task

METHOD = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
import fadamgc
from fadamgc.fields import positive
from fadamgc.methods.fedprox import FedProx


@dataclass(frozen=True)
class MyProx(FedProx):
    """FedProx with another name."""

    title: ClassVar[str] = "My FedProx"
    mu: float = positive(0.3)


@dataclass(frozen=True)
class Asks(fadamgc.FedAvg):
    """A rule that inspects a value."""

    title: ClassVar[str] = "Asks"

    def finish(self, down, client, local, x, K, tracked):
        if tracked:
            return super().finish(down, client, local, x, K, tracked)
        return super().finish(down, client, local, x, K, False)


def steps(client, round):
    return 1 + client % 2


def halved(t):
    return 0.1 / 2**t


not_a_method = 3
'''
SPEC = """
name = "own"
[task]
data = "digits"
clients = 4
[run]
rounds = 2
local_steps = 2
seeds = [0, 1]
executor = "loop"
[tune]
eta_l = [0.1]
eta_g = [1.0]
rounds = 2
seeds = [0]
[[method]]
algorithm = "{reference}"
mu = 0.5
[[method]]
algorithm = "fedavg"
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with own methods, in the folder of a spec."""
    name = f"my_algos_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(METHOD)
    monkeypatch.setattr(loading, "_folders", [])
    monkeypatch.setattr(loading, "_imported", [])
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def spec_of(folder: Path, reference: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(SPEC.format(reference=reference))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", ".py"])
def test_a_spec_names_a_class_in_a_module_or_a_file(name: str, ending: str, tmp_path: Path) -> None:
    """The file is beside the spec; the working folder is another one. Two workers import it as well."""
    reference = f"{name}{ending}:MyProx"
    spec = load_spec(spec_of(tmp_path, reference))
    run_spec(spec, tmp_path / "out", workers=2, quiet=True)
    run = fadamgc.load_run(tmp_path / "out" / "runs" / "my-fedprox-seed1")
    assert (run.settings["algorithm"], run.algorithm.mu) == (reference, 0.5)
    assert type(run.algorithm).__name__ == "MyProx"


@pytest.mark.parametrize("ending", ["", ".py"])
def test_it_is_chosen_by_its_reference(name: str, ending: str, tmp_path: Path) -> None:
    """Names of modules and classes have capitals, which --methods does not compare."""
    spec = load_spec(spec_of(tmp_path, f"{name}{ending}:MyProx"))
    assert [method.label for method in spec.only([f"{name}{ending}:MyProx"]).methods] == ["My FedProx"]


@pytest.mark.slow
def test_the_commands_know_it(name: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f"{name}.py:MyProx")
    out = tmp_path / "out"
    assert command("run", path, "--out", out, "--workers", 1).exit_code == 0
    assert "My FedProx" in (out / "results.md").read_text()
    assert command("tune", path, "--out", tmp_path / "tuned", "--workers", 1).exit_code == 0
    assert f'algorithm = "{name}.py:MyProx"' in (tmp_path / "tuned" / "tuned.toml").read_text()


@pytest.mark.slow
def test_a_report_imports_nothing(name: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f"{name}.py:MyProx")
    out = tmp_path / "out"
    assert command("run", path, "--out", out, "--workers", 1).exit_code == 0
    (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    del sys.modules[name]
    (out / "results.md").unlink()
    result = command("report", out)
    assert result.exit_code == 0, result.output
    assert "My FedProx" in (out / "results.md").read_text()


@pytest.mark.slow
def test_import_makes_registered_names_known(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(METHOD + "\nfadamgc.register('my_prox', MyProx)\n")
    assert "my_prox" in command("--import", file, "list").output
    path = spec_of(tmp_path, "my_prox")
    assert command("--import", file, "run", path, "--out", tmp_path / "out", "--workers", 2).exit_code == 0
    run = fadamgc.load_run(tmp_path / "out" / "runs" / "my-fedprox-seed0")
    assert run.settings["algorithm"] == "my_prox"


@pytest.mark.slow
def test_an_entry_point_of_another_package(name: str, tmp_path: Path) -> None:
    """As an installed package has it; one that cannot be imported is skipped with a warning."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    entries = f"[fadamgc.algorithms]\nmine = {name}:MyProx\nbroken = {name}:Missing\n"
    (info / "entry_points.txt").write_text(entries)
    places = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import fadamgc; print(fadamgc.algorithms()[-1], fadamgc.make_algorithm('mine', mu=1.0).title)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "mine My FedProx", done.stderr
    assert "broken" in done.stderr
    assert "is skipped" in done.stderr


def test_a_config_of_flower_names_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config({"clients": 2, "algorithm": f"{name}:MyProx", "mu": 0.2})
    assert (type(config.algorithm).__name__, config.algorithm.mu) == ("MyProx", 0.2)


def test_a_federation_runs_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    from in_process_grid import LOCAL, make

    algorithm = fadamgc.make_algorithm(str(tmp_path / f"{name}.py") + ":MyProx", eta_l=0.05)
    task, grid, strategy = make(tmp_path, algorithm)
    strategy.start(grid)
    run = fadamgc.simulate(algorithm, task, rounds=3, executor="loop", **LOCAL)
    assert torch.equal(strategy.coordinator.server.x, run.x)


def test_messages_and_files_import_nothing(name: str, tmp_path: Path) -> None:
    """A server could otherwise let its nodes import, and call, anything."""
    reference = f"{tmp_path / name}.py:MyProx"
    with loading.untrusted(), pytest.raises(fadamgc.InputError, match="is not known here; import"):
        fadamgc.make_algorithm(reference)
    assert name not in sys.modules
    called: list[str] = []
    sys.modules[name] = type(sys)(name)
    sys.modules[name].f = lambda t: called.append("called") or 0.1  # type: ignore[attr-defined]
    with loading.untrusted():
        algorithm = fadamgc.make_algorithm("fedavg", eta_l={"function": f"{name}:f"})
        with pytest.raises(fadamgc.InputError, match="give it again"):
            algorithm.at(1)
    assert called == []


@pytest.mark.slow
def test_a_rule_that_cannot_be_mapped_runs_in_the_loop(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = fadamgc.make_algorithm(f"{tmp_path / name}.py:Asks", eta_l=0.05)
    options: dict[str, Any] = {"rounds": 200, "local_steps": 3, "batch_size": 8, "progress": False}
    with caplog.at_level("INFO", "fadamgc"):
        run = fadamgc.simulate(algorithm, class_task(), **options | {"rounds": 3})
        long = fadamgc.simulate(algorithm, class_task(), **options)
    assert {run.settings["executor"], long.settings["executor"]} <= {"loop", "threads"}
    warnings = [record for record in caplog.records if "docs/extending.md" in record.getMessage()]
    assert [record.levelname for record in warnings] == ["WARNING"]
    with pytest.raises(fadamgc.InputError, match="cannot map the rules of Asks over clients"):
        fadamgc.simulate(algorithm, class_task(), executor="vectorized", **options)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{name}:MyProks", "has no 'MyProks'; did you mean 'MyProx'"),
        ("{name}:not_a_method", "is not a class of algorithms"),
        ("{name}x:MyProx", "there is no module"),
        ("{name}x.py:MyProx", "there is no file"),
        ("{name}:", "does not name an object"),
        ("my_prox", "and your own as 'my_module:MyMethod'"),
    ],
)
def test_bad_references_are_refused(name: str, reference: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(fadamgc.InputError, match=message):
        load_spec(spec_of(tmp_path, reference.format(name=name)))


@pytest.mark.slow
def test_the_command_says_once_that_a_rule_cannot_be_mapped(name: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f"{name}.py:Asks")
    text = path.read_text().replace("mu = 0.5", "eta_l = 0.1").replace('executor = "loop"', "")
    path.write_text(text.replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    result = command("run", path, "--methods", f"{name}.py:Asks", "--out", tmp_path / "out", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "warning: executor='auto' runs Asks one client at a time" in result.stderr
    assert result.stderr.count("see 'Rules' in docs/extending.md") == 1


def test_a_spec_has_a_function_of_local_steps(name: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f"{name}:MyProx")
    text = path.read_text()
    path.write_text(text.replace("local_steps = 2", f'local_steps = "{name}.py:steps"'))
    spec = load_spec(path)
    assert parse_spec(spec.to_toml(), "again") == spec
    run_spec(spec.only(["my fedprox"]), tmp_path / "out", workers=1, quiet=True)
    run = fadamgc.load_run(tmp_path / "out" / "runs" / "my-fedprox-seed0")
    assert [record.work[-1].steps for record in run.history] == [(1, 2, 1, 2)] * 2
    path.write_text(text.replace("local_steps = 2", f'local_steps = "{name}.py:step"'))
    with pytest.raises(fadamgc.InputError, match="has no 'step'; did you mean 'steps'"):
        run_spec(load_spec(path), tmp_path / "other", workers=1, quiet=True)
    assert not (tmp_path / "other").exists()


def test_a_spec_has_a_function_as_schedule(name: str, tmp_path: Path) -> None:
    path = spec_of(tmp_path, f"{name}:MyProx")
    path.write_text(path.read_text().replace("mu = 0.5", f'eta_l = {{ function = "{name}:halved" }}'))
    run_spec(load_spec(path), tmp_path / "out", workers=1, quiet=True)
    run = fadamgc.load_run(tmp_path / "out" / "runs" / "my-fedprox-seed0")
    assert run.settings["hyperparameters"]["eta_l"] == {"function": f"{name}:halved"}
