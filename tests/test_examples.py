"""The gallery: every example is short, runs, draws its figure, and shows what its page says."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gallery
from fadamgc.experiments.report.means import Difference
from fadamgc.experiments.report.numbers import read_results
from places import ROOT

GALLERY = ROOT / "docs" / "gallery.md"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
FEWER_THAN = 60  # lines
PNG = b"\x89PNG"


def numbers(text):
    """The last number of every line, by the text before it."""
    lines = (line.rpartition(" ") for line in text.splitlines())
    return {name.rstrip(":"): float(value) for name, _, value in lines if re.fullmatch(r"[\d.e+-]+", value)}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in this process; return what it prints, and its variables."""

    def run(name):
        figure = tmp_path / f"{name}.png"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", str(figure)])
        monkeypatch.chdir(tmp_path)
        with torch.random.fork_rng():
            variables = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        assert figure.read_bytes().startswith(PNG)
        return capsys.readouterr().out, variables

    return run


def test_the_gallery_shows_every_example_and_its_figure():
    text = GALLERY.read_text(encoding="utf-8")
    for name in gallery.EXAMPLES:
        assert f"(../examples/{name}.py)" in text, name
        assert f"(figures/{name}.png)" in text, name
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < FEWER_THAN, name
    for path in NOTEBOOKS:
        assert f"(../examples/{path.name})" in text, path
    drawn = {path.stem for path in (ROOT / "docs" / "figures").glob("*.png")}
    assert drawn == {*gallery.EXAMPLES, gallery.places_cifar10.__name__}


@pytest.mark.slow
def test_drift(run):
    output, _ = run("drift")
    found = numbers(output)
    assert found["LocalAdam: distance to the optimum"] > 0.1
    assert found["FAdamGC: distance to the optimum"] < 1e-4
    assert len((ROOT / "examples" / "drift.py").read_text().splitlines()) <= 40  # as its first line says


@pytest.mark.slow
def test_fadamgc_is_ahead_of_local_adam(run):
    output, variables = run("fadamgc_and_local_adam")
    local_adam, fadamgc = numbers(output).values()
    assert fadamgc > local_adam + 5
    last = Difference.of(variables["difference"][:, 10].tolist())
    assert last.clear == 1
    drawn = variables["T"] * variables["difference"][:, 10].std() / variables["SEEDS"] ** 0.5
    assert float(drawn) == pytest.approx(last.half, rel=1e-3)


@pytest.mark.slow
def test_only_the_correction_before_the_moments_reaches_the_optimum(run):
    output, _ = run("scaffold_and_adam")
    none, after, before = numbers(output).values()
    assert min(none, after) > 0.1
    assert before < 1e-4


@pytest.mark.slow
def test_own_algorithm(run):
    output, _ = run("own_algorithm")
    none, corrected = numbers(output).values()
    assert corrected > none


@pytest.mark.slow
def test_own_csv(run):
    output, _ = run("own_csv")
    assert min(numbers(output).values()) > 0.9


@pytest.mark.slow
def test_slow_uplink(run):
    output, _ = run("slow_uplink")
    lines = dict(line.split(" [") for line in output.splitlines())
    minutes = {name: [float(m) for m in re.findall(r"[\d.]+", values)] for name, values in lines.items()}
    assert all(values == sorted(values, reverse=True) for values in minutes.values())
    for name in ("FedAvg-M", "FAdamGC"):
        assert minutes[f"{name}, int8"][0] < 0.5 * minutes[name][0]


@pytest.mark.slow
def test_private(run):
    output, _ = run("private")
    found = numbers(output)
    for method in ("FedAvg", "FAdamGC"):
        values = [value for name, value in found.items() if name.startswith(f"{method},")]
        assert values == sorted(values, reverse=True)  # the less epsilon, the less accuracy
        assert values[0] > 0.85


@pytest.mark.slow
def test_lora_texts(run):
    pytest.importorskip("peft")
    output, variables = run("lora_texts")
    assert output.startswith("13443 numbers are trained")
    assert "13,443 numbers" in variables["__doc__"]
    assert variables["run"].history[-1].test_accuracy > 0.8  # chance is a third
    assert "['animals', 'food', 'tools']" in output


@pytest.mark.slow
def test_corrected_diloco(tmp_path):
    """In processes of its own."""
    figure = tmp_path / "figure.png"
    command = [sys.executable, str(ROOT / "examples" / "corrected_diloco.py"), str(figure)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = numbers(done.stdout)
    assert found["corrected DiLoCo: distance to the optimum"] < 1e-4, done.stdout
    assert found["DiLoCo: distance to the optimum"] > 0.1, done.stdout
    assert figure.read_bytes().startswith(PNG)


# sim/test_ray.py runs ray_sweep.py, and e2e/test_superlink.py federation.py.


# Notebooks.


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path):
    """The fields that nbformat 4.5 asks for."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert set(book) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert set(book["metadata"]["kernelspec"]) == {"name", "display_name", "language"}
    assert book["metadata"]["language_info"]["name"] == "python"
    for cell in book["cells"]:
        code = cell["cell_type"] == "code"
        assert code or cell["cell_type"] == "markdown"
        assert set(cell) == {
            *("cell_type", "id", "metadata", "source"),
            *(("execution_count", "outputs") if code else ()),
        }
        assert re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", cell["id"])
        assert all(isinstance(line, str) for line in cell["source"])
        assert cell.get("execution_count") is None
        assert cell.get("outputs", []) == []
    identities = [cell["id"] for cell in book["cells"]]
    assert len(set(identities)) == len(identities)
    text = "".join(
        line for cell in book["cells"] if cell["cell_type"] == "markdown" for line in cell["source"]
    )
    for target in re.findall(r"\]\(([^)]*)\)", text):
        assert (path.parent / target).exists(), target


def execute(name, folder, monkeypatch):
    """Execute the cells of a notebook in order; return its variables."""
    from matplotlib import pyplot

    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(folder)
    pyplot.switch_backend("agg")
    variables = {"__name__": "__main__"}
    try:
        with torch.random.fork_rng():
            for cell in json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]:
                if cell["cell_type"] == "code":
                    exec(compile("".join(cell["source"]), f"{name}, {cell['id']}", "exec"), variables)
        assert pyplot.get_fignums()
    finally:
        pyplot.close("all")
    return variables


@pytest.mark.slow
def test_the_notebook_drift_step_by_step(tmp_path, monkeypatch):
    """What is computed by hand is what the library computes."""
    found = execute("drift_step_by_step", tmp_path, monkeypatch)
    plain, corrected = (path[-1] for path in found["paths"].values())
    torch.testing.assert_close(plain, found["runs"]["LocalAdam"], rtol=0, atol=1e-4)
    torch.testing.assert_close(corrected, found["runs"]["FAdamGC"], rtol=0, atol=1e-4)
    torch.testing.assert_close(corrected, found["OPTIMUM"], rtol=0, atol=1e-4)
    assert (plain - found["OPTIMUM"]).norm() > 1
    assert found["moves"].mean(0).norm() > 0.5  # one round from the optimum leaves it


@pytest.mark.slow
def test_the_notebook_own_data(tmp_path, monkeypatch, capsys):
    found = execute("own_data", tmp_path, monkeypatch)
    assert [row.method.label for row in found["results"].rows] == ["FedAvg", "LocalAdam", "FAdamGC"]
    assert all(row.final.mean > 0.9 for row in found["results"].rows)
    assert "| FAdamGC |" in capsys.readouterr().out
    assert not Path(found["folder"].name).exists()


# The figure of docs/scaffold-and-adam.md.


def test_the_figure_of_cifar10_shows_the_saved_runs():
    results = read_results(gallery.CIFAR10)
    finals = {
        name: [run.history[-1].test_metric for run in results.runs[name]] for name in ("FAdamGC", "FA-NT")
    }
    by_round = gallery.differences(results, "FAdamGC", "FA-NT")
    paired = [a - b for a, b in zip(*finals.values(), strict=True)]
    assert by_round[results.spec.run.rounds] == pytest.approx(Difference.of(paired))
    left, right = gallery.places_cifar10().axes
    for line, name in zip(left.lines, gallery.PLACES, strict=True):
        runs = results.runs[name]
        mean = 100 * sum(run.history[-1].test_metric for run in runs) / len(runs)
        assert line.get_ydata()[-1] == pytest.approx(mean), name
    assert right.lines[0].get_ydata()[-1] == pytest.approx(100 * Difference.of(paired).mean)
