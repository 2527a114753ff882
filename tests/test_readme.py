"""The README and the docs say what is so."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from packaging.utils import canonicalize_name
from packaging.version import Version

import fadamgc
import lowest
import tables
from fadamgc.algorithm import example
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.report.tables import results_markdown
from fadamgc.experiments.spec.toml_io import preset
from fadamgc.paper import comparison
from fadamgc.tree import named_leaves
from places import ROOT

README = (ROOT / "README.md").read_text()


def section(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
    assert found, name
    return found.group(1)


def test_the_example_runs(capsys):
    code = section("example").removeprefix("```python\n").rstrip().removesuffix("```")
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    run = names["run"]
    assert isinstance(run, fadamgc.Run)
    assert run.rounds_to(0.85) is not None
    assert capsys.readouterr().out.startswith(f"{run.rounds_to(0.85)} ")


def test_generated_blocks_are_up_to_date():
    """README.md and docs/*.md are what ``make docs`` writes."""
    for page, text in tables.pages():
        assert page.read_text() == text, f"{page.name} is out of date; run make docs"


def test_the_example_of_many_runs_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/speed.md").read_text(), re.DOTALL)
    data = [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(12)]
    task = fadamgc.Task(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data)
    names: dict[str, object] = {"fadamgc": fadamgc, "task": task}
    short = block.replace("rounds=200", "rounds=2").replace("workers=2", "workers=1")
    exec(compile(short, "speed.md", "exec"), names)
    assert [len(run.history) for run in names["runs"]] == [2] * 8


def test_the_example_of_a_flower_app_makes_apps():
    pytest.importorskip("flwr")
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/flower.md").read_text(), re.DOTALL)
    names: dict[str, object] = {"load": lambda context: None, "load_test": lambda context: None}
    exec(compile(block, "flower.md", "exec"), names)
    assert {type(names["client"]).__name__, type(names["server"]).__name__} == {"ClientApp", "ServerApp"}


def test_the_examples_of_text_tasks_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    from fadamgc.models.pretrained import base_folder, quiet

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/text.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    rows = [f"{('good', 'bad')[i % 2]} film {i},{('positive', 'negative')[i % 2]}" for i in range(60)]
    Path("reviews.csv").write_text("\n".join(["review,sentiment", *rows]) + "\n")
    names: dict[str, object] = {}
    for block in blocks:
        short = block.replace("rounds=30", "rounds=1").replace("sampled=5", "sampled=1")
        short = short.replace("FOLDER OF THE BASE MODEL", base_folder("minilm"))
        with quiet():
            exec(compile(short, "text.md", "exec"), names)
        if "run" in names and "reviews" not in names:
            accuracy, labels = capsys.readouterr().out.splitlines()[-2:]
            assert 0 <= float(accuracy) <= 1
            assert set(json.loads(labels.replace("'", '"'))) <= {"positive", "negative"}
    assert [len(data) for data in names["task"].samples] == [8, 8]
    assert names["model"].config.id2label == {0: "negative", 1: "positive"}


def test_the_table_of_algorithms_shows_what_clients_send():
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in section("algorithms").splitlines()[2:]
    ]
    expected = []
    for name in fadamgc.algorithms():
        algorithm = fadamgc.make_algorithm(name)
        one = example(algorithm, torch.empty(7))
        down, up = (
            {key: "" if len(leaf) == 7 else " (a number)" for key, leaf in named_leaves(message).items()}
            for message in (one.down, one.up)
        )
        tracked = [key for key in up if key.split(".")[0] in algorithm.tracked_only]
        cells = (down, [key for key in up if key not in tracked], tracked)
        short = [", ".join(key.split(".")[-1] + (down | up)[key] for key in keys) for keys in cells]
        expected.append([name, type(algorithm).__name__, *short])
    assert rows == expected


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_exist():
    pages = ("*.md", "docs/*.md", "docs/adr/*.md", "benchmarks/*.md")
    for page in (page for pattern in pages for page in ROOT.glob(pattern)):
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" in target:
                continue
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fadamgc.__version__
    assert f"\nversion: {fadamgc.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{fadamgc.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# Newer than the lowest version in the record: no older build of torch for CPUs, and what transformers needs.
RAISED = {"torch", "safetensors"}
LOWEST_EXTRAS = ("data", "optuna", "ray", "text", "track", "wandb")


def test_the_lowest_versions_are_those_that_were_tested():
    """constraints-lowest.txt is what ``make test-lowest`` has installed."""
    lines = [line for line in lowest.RECORD.read_text().splitlines() if "==" in line]
    tested = {canonicalize_name(name): Version(version) for name, version in (x.split("==") for x in lines)}
    for extra in (None, *LOWEST_EXTRAS):
        for name, requirement in lowest.requirements(extra).items():
            _, _, version = lowest.lowest(requirement).partition("==")
            if name not in RAISED and version:
                assert tested[canonicalize_name(name)] == Version(version), name
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"--extra (\w+)", makefile) == list(LOWEST_EXTRAS)


@pytest.mark.slow
def test_the_results_page_is_made_from_the_records():
    """docs/results.md is what ``make results`` writes."""
    page = ROOT / "docs" / "results.md"
    assert comparison.page(ROOT / "results", page) == page.read_text()


def test_the_results_are_those_of_the_saved_runs():
    """The README's table is what ``fadamgc report results/digits`` makes of the records in that folder."""
    folder = ROOT / "results" / "digits"
    made = results_markdown(read_results(folder))
    assert made == (folder / "results.md").read_text()
    assert made.strip() in section("results")


def benchmark(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_on_quadratics_have_every_method_and_its_vectors():
    """results/exactness was measured with the methods and their states and messages as they are now."""
    exactness = benchmark("exactness")
    saved = json.loads(exactness.RESULTS.read_text())["methods"]
    expected = exactness.named()
    assert saved.keys() == expected.keys()
    for name, algorithm in expected.items():
        vectors = {key: saved[name][key] for key in ("state", "down", "up", "tracked")}
        assert vectors == exactness.vectors(algorithm), name
        assert len(saved[name]["quadratics"]) == (1 if algorithm.full_participation else 2), name


def test_the_speeds_are_those_of_the_last_benchmark():
    """The README's table and the pages beside the results are what their JSON says."""
    report = benchmark("report")
    for name in ("benchmarks", "benchmarks-texts"):
        folder = ROOT / "results" / name
        results = json.loads((folder / "results.json").read_text())
        assert report.table(results) == (folder / "table.md").read_text()
        if name == "benchmarks":
            assert report.summary(results).strip() in section("bench")


def test_the_preset_has_the_step_sizes_that_tuning_chose():
    tuning = pd.read_csv(ROOT / "results" / "digits" / "tuning.csv")
    chosen = tuning[tuning["chosen"]].set_index("method")
    spec = preset("digits")
    assert len(chosen) == len(spec.methods) == 7
    assert spec.tune is not None
    assert len(tuning) == 7 * len(spec.tune.eta_l) * len(spec.tune.eta_g)
    for method in spec.methods:
        assert method.hyperparameters["eta_l"] == chosen.loc[method.label, "eta_l"]
        assert method.hyperparameters["eta_g"] == chosen.loc[method.label, "eta_g"]
