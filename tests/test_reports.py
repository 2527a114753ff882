"""Reports of what went wrong: runs that diverged, records that are damaged, and text from elsewhere."""

from __future__ import annotations

import csv
import dataclasses
import errno
import io
import json
import math
import re
import shutil
import subprocess
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console

from command import fadamgc
from fadamgc import CostModel, bundle, errors
from fadamgc.errors import CheckpointError, InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report import plots
from fadamgc.experiments.report.numbers import (
    ReportedExperiment,
    Spread,
    curves,
    mean_curves,
    read_results,
    summary_frame,
)
from fadamgc.experiments.report.page import page
from fadamgc.experiments.report.plots import summary_figure
from fadamgc.experiments.report.tables import (
    DASH,
    caption,
    pricing,
    results_markdown,
    results_table,
    summary_latex,
    summary_markdown,
)
from fadamgc.experiments.report.write import write_report, write_summary
from fadamgc.experiments.run import execution, workers
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.experiments.tune import tune
from fadamgc.paper.study import keep, parse_study, read_members, read_study, write_study, write_study_report

RUN = """[run]
rounds = 6
local_steps = 2
seeds = [0, 1]
target = 1e-3
executor = "loop"
"""
SPEC = """
name = "small"
[task]
data = "quadratics"
clients = 3
dim = 3
RUN_SECTION
[[method]]
algorithm = "fedavg"
eta_l = ETA
[[method]]
algorithm = "scaffold"
eta_l = 0.09
""".replace("RUN_SECTION\n", RUN)
DIVERGES = 10.0  # the model stays finite for some rounds in which its metric is not
STUDY = """
name = "theory"
title = "Least squares"
[study]
axis = "clients"
measures = ["rounds", "final", "average"]
[task]
data = "quadratics"
dim = 3
measure = "gradient"
RUN_SECTION
[[method]]
algorithm = "fadamgc"
[[method]]
algorithm = "fedavg"
eta_l = 0.05
[[experiment]]
name = "two"
value = 2
task = { clients = 2 }
[[experiment]]
name = "four"
value = 4
task = { clients = 4 }
""".replace("RUN_SECTION\n", RUN)


def spec_of(eta_l=0.05, **run):
    spec = parse_spec(SPEC.replace("ETA", str(eta_l)), "test")
    return spec.replace("run", **run) if run else spec


def experiment(folder, eta_l=0.05, **run):
    spec = spec_of(eta_l, **run)
    run_spec(spec, folder, workers=1, quiet=True)
    return spec


@pytest.fixture
def figures():
    """Real ones, which take their time."""


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """No figures where a test does not ask for them."""
    if "figures" not in request.fixturenames:
        for name in ("png", "svg"):
            monkeypatch.setattr(plots, name, lambda figure: b"")


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """An experiment whose runs are fine."""
    folder = tmp_path_factory.mktemp("ready") / "out"
    experiment(folder)
    return folder


@pytest.fixture
def copy(ready, tmp_path):
    return Path(shutil.copytree(ready, tmp_path / "copy"))


def forge(folder, metrics, label="FedAvg", **others):
    """Give the runs of a method other metrics: for each seed one in each round, or the same in all."""
    jobs = ExperimentFolder(folder).plan(parse_spec((folder / "spec.toml").read_text(), ""))
    for job, values in zip([j for j in jobs if j.method.label == label], metrics, strict=True):
        run = job.saved()
        values = values if isinstance(values, list) else [values] * len(run.history)
        pairs = zip(run.history, values, strict=True)
        history = [dataclasses.replace(record, test_metric=value, **others) for record, value in pairs]
        dataclasses.replace(run, history=history).save(job.folder, states=False)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# Runs that diverged.


def test_a_method_that_diverges_leaves_the_table_to_the_others(tmp_path, figures):
    experiment(tmp_path, DIVERGES)
    results = write_report(tmp_path)
    assert not math.isfinite(results.runs["FedAvg"][0].history[-1].test_metric)
    assert [cell.text for cell in results_table(results).rows[0]][1:4] == ["diverged"] * 3
    assert re.fullmatch(r"\d\.\d\de-\d\d ± \d\.\d\de-\d\d", results_table(results).rows[1][3].text)
    assert results_table(results).rows[1][3].bold
    buffer = io.StringIO()
    Console(file=buffer, width=120).print(results_table(results).to_rich(caption(results)))
    texts = [buffer.getvalue()]
    texts += [(tmp_path / name).read_text() for name in ("results.md", "results.tex", "report.html")]
    for text in texts:
        assert "diverged" in text
        assert re.search(r"\d\.\d\d(e-\d\d| \\cdot 10\^\{-\d+\})", text)
    row = pd.read_csv(tmp_path / "results.csv").set_index("method").loc["FedAvg"]
    assert (row["runs"], row["runs_diverged"]) == (2, 2)
    assert math.isnan(row["final_mean"])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_seed_that_diverges_is_counted_and_not_averaged(copy, value):
    forge(copy, [value, 0.5])
    results = write_report(copy)
    assert results_table(results).rows[0][1].text == "never (0/2, 1 diverged)"
    assert results_table(results).rows[0][3].text == "5.00e-01 (1/2 diverged)"
    assert not results_table(results).rows[0][3].bold
    row = summary_frame(read_results(copy)).set_index("method").loc["FedAvg"]
    assert (row["runs_diverged"], row["final_mean"]) == (1, 0.5)
    assert "diverged" in fadamgc("report", copy).stdout


def test_numbers_too_large_to_add_have_a_mean():
    assert Spread.of([1.5e308, 1.7e308]).mean == pytest.approx(1.6e308)
    assert Spread.of([math.inf, 1.0, 3.0]).mean == 2.0


def test_a_run_that_stopped_is_diverged_also_in_what_is_kept(copy, tmp_path):
    spec = spec_of(1e30)
    folder = tmp_path / "stopped"
    assert len(run_spec(spec, folder, workers=1, quiet=True)) == 2
    for place in (folder, tmp_path / "kept"):
        results = read_results(place) if place == folder else keep(folder, place) and read_results(place)
        assert [cell.text for cell in results_table(results).rows[0]] == ["FedAvg", *["diverged"] * 3, DASH]
        assert results.missing == 0
    only = spec.only(["fedavg"])
    run_spec(only, tmp_path / "only", workers=1, quiet=True)
    with pytest.raises(InputError, match=r"has no finished run of its spec\nFedAvg, seed 0: client \d"):
        read_results(tmp_path / "only")


def test_a_study_shows_what_diverged(tmp_path):
    study = parse_study(STUDY, "here", "laptop")
    write_study(study, tmp_path)
    for member in study.members:
        run_spec(member.spec, tmp_path / member.spec.name, workers=1, quiet=True)
        forge(tmp_path / member.spec.name, [math.inf, math.nan], "FAdamGC")
    write_study_report(tmp_path)
    for name in ("summary.md", "summary.tex", "bounds.md"):
        text = (tmp_path / name).read_text()
        assert "diverged" in text
        assert not re.search(r"\b(nan|inf)\b", text)
    frame = pd.read_csv(tmp_path / "summary.csv")
    assert frame["runs_diverged"].tolist() == [2, 0, 2, 0]
    experiments = read_members(tmp_path, read_study(tmp_path))
    assert "| two | diverged | **" in summary_markdown(experiments, ["final"])


def test_tuning_counts_a_point_whose_metric_is_not_finite(tmp_path):
    text = (
        SPEC.replace("ETA", "1.0") + "[tune]\neta_l = [0.05, 10.0]\neta_g = [1.0]\nrounds = 6\nseeds = [3]\n"
    )
    spec = parse_spec(text, "test").only(["fedavg"])
    for search in ("full", "race", "halving"):
        tuned = tune(spec.replace("tune", search=search), tmp_path / search, workers=1, quiet=True)
        diverged = {point.eta_l: point.diverged for point in tuned.points if point.tried == 6}
        assert diverged[0.05] == 0
        assert diverged.get(10.0, 1) == 1
        assert tuned.spec.methods[0].hyperparameters["eta_l"] == 0.05


# A metric that is not above 0.


def test_a_metric_that_is_never_above_0_has_a_linear_axis(copy, figures):
    for label in ("FedAvg", "SCAFFOLD"):
        forge(copy, [-1.0, [-3.0, -2.0, -1.0, 0.0, 0.0, 0.0]], label)
    results = write_report(copy)
    assert not results.logarithmic
    line = mean_curves(results, curves(results))["FedAvg"]
    assert line["mean"].tolist() == [-2.0, -1.5, -1.0, -0.5, -0.5, -0.5]
    experiments = [ReportedExperiment("a", results, 1.0), ReportedExperiment("b", results, 2.0)]
    summary_figure(experiments, "axis", "title", ("final",)).savefig(io.BytesIO())


def test_a_metric_that_is_never_finite_has_no_curve(tmp_path, figures):
    spec = spec_of(DIVERGES, seeds=(0,), rounds=1).only(["fedavg"])
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"target": None})})
    run_spec(spec, tmp_path, workers=1, quiet=True)
    forge(tmp_path, [math.inf])
    results = write_report(tmp_path)
    assert mean_curves(results, curves(results)) == {}


def test_the_largest_numbers_and_runs_without_rounds_are_reported(copy):
    forge(copy, [1.7e308] * 2)
    results = write_report(copy)
    assert "FedAvg" not in mean_curves(results, curves(results))
    assert results_table(results).rows[0][3].text.startswith("1.70e+308")
    for job in ExperimentFolder(copy).plan(parse_spec((copy / "spec.toml").read_text(), ""))[:2]:
        dataclasses.replace(job.saved(), history=[]).save(job.folder, states=False)
    assert results_table(write_report(copy)).rows[0][3].text == DASH


def test_a_metric_that_is_sometimes_0_has_a_logarithmic_axis_without_that_round(copy):
    forge(copy, [[1.0, 0.1, 0.0, 1e-3, 1e-4, 1e-5]] * 2)
    results = write_report(copy)
    assert results.logarithmic
    line = mean_curves(results, curves(results))["FedAvg"]
    assert line["round"].tolist() == [1, 2, 4, 5, 6]
    assert line["mean"].min() == pytest.approx(1e-5)


# The script of the page.

STUB = """
const fs = require("fs"), vm = require("vm");
const [data, script] = JSON.parse(fs.readFileSync(0, "utf8"));
const nodes = {}, plots = {};
function node(id) {
  return nodes[id] ??= {
    id, value: "0", min: "-3", textContent: "", dataset: {}, tagName: "DIV",
    classList: { toggle: () => {} }, addEventListener: () => {}, querySelector: (s) => node(s),
  };
}
nodes.experiments = { textContent: data };
const document = { getElementById: node, querySelectorAll: () => [] };
const Plotly = { react: (box, traces, layout) => { plots[box.id] = { traces, layout }; } };
const said = {}, context = { document, Plotly, Number, Math, JSON, console, said };
vm.runInNewContext(script + "said.pricing = pricing();", context);
const names = Object.keys(nodes).filter((name) => name.startsWith("[data-minutes"));
const minutes = names.map((name) => nodes[name].textContent);
console.log(JSON.stringify({ minutes, plots, pricing: said.pricing }));
"""


def drawn(folder):
    """What the page's script does, with a stand-in for the browser."""
    node = shutil.which("node")
    if node is None:
        playwright = pytest.importorskip("playwright", reason="there is no node to run the page's script")
        node = str(Path(playwright.__file__).parent / "driver" / "node")
    html = (folder / "report.html").read_text()
    data = re.search(r'<script type="application/json" id="experiments">(.*?)</script>', html, re.DOTALL)
    script = html.rsplit("<script>", 1)[1].split("</script>")[0]
    done = subprocess.run(
        [node, "-e", STUB], input=json.dumps([data[1], script]), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(**json.loads(done.stdout))


@pytest.mark.parametrize("metrics", [[math.inf, math.nan], [math.nan, 1e-4]])
def test_the_script_of_the_page_agrees_about_what_diverged(copy, metrics):
    forge(copy, metrics)
    results = write_report(copy)
    seen = drawn(copy)
    assert seen.minutes == [line[2].text for line in results_table(results).rows]
    for plot in seen.plots.values():
        assert plot["layout"]["yaxis"]["type"] == "log"
        assert all(value is not None and value > 0 for trace in plot["traces"] for value in trace["y"])


@pytest.mark.parametrize("per_round", ["mean", "slowest"])
def test_the_script_of_the_page_says_how_rounds_are_priced(copy, per_round):
    cost = CostModel(down_mbps=0.1, up_mbps=0.05, seconds_per_step=0.5, latency=2.0, per_round=per_round)
    results = write_report(copy, cost)
    assert drawn(copy).pricing == pricing(results)


def test_the_script_of_the_page_draws_negative_numbers(copy):
    for label in ("FedAvg", "SCAFFOLD"):
        forge(copy, [-1.0, -3.0], label)
    write_report(copy)
    plot = drawn(copy).plots['[data-axis="round"]']
    assert plot["layout"]["yaxis"]["type"] == "linear"
    assert plot["traces"][1]["y"] == [-2.0] * 6


def test_the_page_has_no_number_that_json_has_not(copy):
    forge(copy, [1e-4, 1e-4], simulated_seconds=math.inf)
    results = read_results(copy)
    (copy / "report.html").write_text(page("title", [ReportedExperiment("title", results)]))
    assert drawn(copy).minutes == [line[2].text for line in results_table(results).rows]
    assert results_table(results).rows[0][2].text == DASH


# Checkpoints and records that cannot be read.


def stopped(tmp_path, rounds=30):
    """A job that was stopped after its first checkpoint."""
    job = ExperimentFolder(tmp_path).plan(spec_of(rounds=rounds))[0]
    answers = iter([False] * 26 + [True])
    with pytest.raises(execution.Stopped):
        execution.execute([job], lambda i: next(answers))
    return job


def newer_format(job):
    path = job.folder / "checkpoint" / "checkpoint.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 99', 1))
    return path.read_bytes()


def test_a_checkpoint_that_cannot_be_read_is_moved_aside_and_named(tmp_path):
    warnings = []
    for number in (1, 2):
        job = stopped(tmp_path)
        data = newer_format(job)
        execution.execute([job], lambda i: False, warnings.append)
        aside = job.folder / f"checkpoint.unreadable-{number}"
        assert (aside / "checkpoint.json").read_bytes() == data
        assert len(warnings) == number
        assert "has format 99" in warnings[-1]
        assert f"moved to {aside}, and FedAvg, seed 0 starts from round 1" in warnings[-1]
        assert len(job.saved().history) == 30
        (job.folder / "run.json").unlink()
    assert (job.folder / "checkpoint.unreadable-1" / "checkpoint.json").exists()


def test_a_warning_of_a_worker_reaches_the_user(tmp_path, monkeypatch):
    job = stopped(tmp_path)
    newer_format(job)
    messages, sender = Pipe(duplex=False)
    stop, stopper = Pipe(duplex=False)
    rounds, said = [], []
    monkeypatch.setattr(workers, "_sender", sender)
    monkeypatch.setattr(workers, "_stop", stop)
    listener = threading.Thread(target=workers._listen, args=(messages, rounds.append, said.append))
    listener.start()
    workers._work([7], [job])
    sender.send_bytes(workers.END)
    listener.join(timeout=60)
    assert len(said) == 1
    assert "moved to" in said[0]
    assert rounds == [7] * job.run.rounds
    stopper.send_bytes(b"stop")
    (job.folder / "run.json").unlink()
    for _ in range(2):  # what says stop stays there for every worker
        with pytest.raises(execution.Stopped):
            workers._work([7], [job])
    for end in (messages, sender, stop, stopper):
        end.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOSPC])
def test_an_error_of_the_system_removes_no_checkpoint(tmp_path, monkeypatch, number):
    job = stopped(tmp_path)
    before = contents(job.folder)

    def fails(*_, **__):
        error = OSError(number, "the system says no")
        raise CheckpointError("checkpoint.json cannot be read") from error

    monkeypatch.setattr(execution, "start_from", fails)
    with pytest.raises(CheckpointError, match="cannot be read"):
        execution.execute([job], lambda i: False)
    assert contents(job.folder) == before


def test_a_checkpoint_in_use_is_left_alone(tmp_path, monkeypatch):
    job = stopped(tmp_path)
    before = contents(job.folder)

    def fails(*_, **__):
        raise errors.CheckpointInUseError("used by another process")

    monkeypatch.setattr(execution, "start_from", fails)
    with pytest.raises(errors.CheckpointInUseError):
        execution.execute([job], lambda i: False)
    assert contents(job.folder) == before


def test_a_damaged_record_is_named_by_the_report_and_made_again(copy):
    path = copy / "runs" / "fedavg-seed0" / "run.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    shown = fadamgc("report", copy)
    assert shown.exit_code == 0
    assert f"warning: FedAvg, seed 0: {path} cannot be read" in shown.stderr
    assert "(1 of 2 runs, 1 damaged)" in shown.stdout
    assert "(1 of 2 runs, 1 damaged)" in (copy / "results.md").read_text()
    again = fadamgc("run", copy / "spec.toml", "--out", copy, "--resume", "--workers", 1, "--quiet")
    assert again.exit_code == 0
    assert f"warning: {path} cannot be read" in again.stderr
    assert "run.json.unreadable-1, and FedAvg, seed 0 is run again" in again.stderr
    assert "1 damaged" not in again.stdout
    histories = [json.loads(text)["history"] for text in (whole, path.read_text())]
    before, after = [[record["test_metric"] for record in history] for history in histories]
    assert before == after


def test_records_that_are_all_damaged_are_named(copy):
    for path in (copy / "runs").glob("*/run.json"):
        path.write_text("{")
    with pytest.raises(InputError, match=r"no finished run of its spec\nFedAvg, seed 0: .*run\.json"):
        read_results(copy)


# The table in LaTeX, and another folder for a report.


def test_latex_is_as_precise_as_markdown_and_has_the_final_metric(copy):
    forge(copy, [1e-4, 1e-4])
    results = write_report(copy)
    minutes = results_table(results).rows[0][2].text
    assert re.match(r"\d\.\d\de-\d\d ± ", minutes)
    tex = (copy / "results.tex").read_text()
    power = re.compile(r" \\cdot 10\^\{(-?)(\d+)\}")
    plain = power.sub(lambda found: f"e{found[1] or '+'}{int(found[2]):02}", tex)
    assert plain != tex
    assert minutes.replace("±", r"\pm") in plain.replace(r"\mathbf{", "").replace("}", "")
    assert "Excess objective at the end & small & " in tex
    assert results_table(results).rows[0][3].text.replace("±", r"\pm") in plain


def test_where_there_is_no_target_nothing_is_never_reached(tmp_path):
    spec = parse_spec(SPEC.replace("ETA", "0.05").replace("target = 1e-3\n", ""), "test")
    run_spec(spec, tmp_path, workers=1, quiet=True)
    results = write_report(tmp_path)
    tex = (tmp_path / "results.tex").read_text()
    assert "never" not in tex
    assert r"Rounds to target & small & -- & -- \\" in tex
    assert "never" not in summary_markdown([ReportedExperiment("small", results)])


def test_a_report_elsewhere_leaves_the_folder_as_it_is(copy, tmp_path):
    write_report(copy)
    before = contents(copy)
    out = tmp_path / "other" / "place"
    shown = fadamgc("report", copy, "--seconds-per-step", 100, "--out", out)
    assert shown.exit_code == 0
    assert contents(copy) == before
    names = {path.name for path in copy.iterdir() if path.suffix in (".csv", ".md", ".tex", ".html", ".svg")}
    assert {path.name for path in out.iterdir()} >= names
    assert "100 s per local step" in (out / "results.md").read_text()
    assert str(out / "report.html") in shown.stdout.replace("\n", "")
    both = fadamgc("report", copy, copy.parent / "copy" / ".." / "copy", "--out", tmp_path / "both")
    assert both.exit_code == 0
    assert contents(copy) == before
    assert {"copy", "copy-2", "report.html", "summary.tex"} <= {p.name for p in (tmp_path / "both").iterdir()}


def test_a_study_can_be_reported_on_elsewhere(ready, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(ready, study / "small")
    cell = {"name": "a", "folder": "small", "value": 1.0, "group": None, "axis": None}
    write_facts(study, cell)
    before = contents(study)
    assert fadamgc("report", study, "--out", tmp_path / "other").exit_code == 0
    assert contents(study) == before
    assert (tmp_path / "other" / "summary.md").exists()
    assert (tmp_path / "other" / "small" / "results.md").exists()


# A stranger's files.


def write_facts(folder, *cells, **facts):
    usual = {"name": "s", "title": "t", "scale": "laptop", "axis": None, "measures": ["rounds"]}
    (folder / "study.json").write_text(json.dumps(usual | facts | {"cells": cells}))


@pytest.mark.parametrize(
    "place", ["../evil", "/ABSOLUTE/evil", "a/../../evil", "..", ".", "", "link", 3, None]
)
def test_a_study_that_leads_elsewhere_is_refused(ready, tmp_path, place):
    study, evil = tmp_path / "study", tmp_path / "evil"
    study.mkdir()
    shutil.copytree(ready, evil)
    (study / "link").symlink_to(evil)
    place = place.replace("/ABSOLUTE", str(tmp_path)) if isinstance(place, str) else place
    write_facts(study, {"name": "a", "folder": place, "value": None, "group": None, "axis": None})
    before = contents(tmp_path)
    for words in (("keep", study, tmp_path / "to" / "kept"), ("report", study)):
        refused = fadamgc(*words)
        assert refused.exit_code == 2
        assert "study.json: " in refused.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "facts", [{"measures": ["evil"]}, {"measures": 3}, {"title": 3}, {"axis": ["x"]}, {"name": None}]
)
def test_a_study_of_other_types_is_refused(ready, tmp_path, facts):
    write_facts(tmp_path, **facts)
    with pytest.raises(InputError, match=r"study\.json: not what"):
        read_study(tmp_path)


def test_keep_follows_no_link_out_of_its_folders(copy, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (copy / "results.md").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="leads out of"):
        keep(copy, tmp_path / "kept")
    (copy / "results.md").unlink()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "runs").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(InputError, match="leads out of"):
        keep(copy, tmp_path / "target")
    assert not list((tmp_path / "elsewhere").iterdir())


HOSTILE = {
    "latex": r"\input{/etc/passwd} \\ \hline ~^<>|#$%&_{}",
    "csv": "=cmd|' /C calc'!A0",
    "markdown": "a | b \\| <script>x</script> [x](y) `z` *w*",
}


def hostile(copy, label):
    text = (copy / "spec.toml").read_text()
    (copy / "spec.toml").write_text(text.replace('label = "FedAvg"', f"label = {json.dumps(label)}"))
    spec = parse_spec((copy / "spec.toml").read_text(), "")
    for seed in spec.run.seeds:
        (copy / "runs" / f"fedavg-seed{seed}").rename(copy / "runs" / f"{spec.methods[0].slug}-seed{seed}")
    return write_report(copy)


def test_labels_are_escaped_in_latex(copy):
    hostile(copy, HOSTILE["latex"])
    tex = (copy / "results.tex").read_text()
    assert r"\input" not in tex
    assert r"\hline" not in tex
    assert (
        r"\textbackslash{}input\{/etc/passwd\} \textbackslash{}\textbackslash{} \textbackslash{}hline" in tex
    )
    assert r"\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}\#\$\%\&\_\{\}" in tex
    assert len(tex.splitlines()) == 11


def test_the_name_of_the_metric_is_escaped(copy):
    results = read_results(copy)
    task = SimpleNamespace(metric="R_2 | 100 % <b>[/x]", clients=3)
    spec = results.spec.model_copy(update={"task": task})
    results = dataclasses.replace(results, spec=spec)
    assert r"R\_2 \textbar{} 100 \% \textless{}b\textgreater{}[/x] at the end" in summary_latex(
        [ReportedExperiment("x", results)], ["final"]
    )
    assert r"Final R_2 \| 100 % &lt;b>\[/x\]" in results_markdown(results)
    Console(file=io.StringIO()).print(results_table(results).to_rich(caption(results)))  # it is not markup


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_labels_are_no_formulas_in_csv(copy, start):
    label = start + HOSTILE["csv"][1:]
    results = hostile(copy, label)
    for name in ("results.csv", "curves.csv"):
        with open(copy / name, newline="") as file:
            lines = list(csv.DictReader(file))
        assert lines[0]["method"] == f"'{label}"
        assert all(
            not value.startswith("'") for line in lines for key, value in line.items() if key != "method"
        )
    assert next(iter(results.runs)) == label


def test_the_tables_of_tuning_and_studies_have_no_formulas(copy, tmp_path):
    results = hostile(copy, "=1")
    text = SPEC.replace("ETA", '1.0\nlabel = "=1"')
    text += "[tune]\neta_l = [0.05]\neta_g = [1.0]\nrounds = 1\nseeds = [3]\n"
    tune(parse_spec(text, "test"), tmp_path, workers=1, quiet=True)
    assert (tmp_path / "tuning.csv").read_text().splitlines()[1].startswith("'=1,0.05,1.0")
    write_summary(tmp_path, [ReportedExperiment("@here", results)], "title")
    assert (tmp_path / "summary.csv").read_text().splitlines()[1].startswith("'@here,,'=1,")


def test_labels_and_names_are_escaped_in_markdown(copy):
    results = hostile(copy, HOSTILE["markdown"])
    row = (copy / "results.md").read_text().splitlines()[-2]
    assert row.startswith(r"| a \| b \\\| &lt;script>x&lt;/script> \[x\](y) \`z\` \*w\* | ")
    assert len(re.findall(r"(?<!\\)\|", row.replace(r"\\", ""))) == 6
    text = summary_markdown([ReportedExperiment("one\n| two <i>", results)])
    assert r"| one\\n\| two &lt;i> | " in text


@pytest.mark.parametrize("sign", ["\x1b", "\n", "\r", "\x7f", "\x9b", "\u202e", "\u2028"])
def test_a_spec_with_control_characters_is_refused(sign):
    text = json.dumps(f"a{sign}b")
    for old, new in (
        ('name = "small"', f'name = "small"\ntitle = {text}'),
        ('algorithm = "scaffold"', f'algorithm = "scaffold"\nlabel = {text}'),
    ):
        with pytest.raises(InputError, match="it must have no control characters"):
            parse_spec(SPEC.replace("ETA", "1.0").replace(old, new), "test")


def test_nothing_from_elsewhere_moves_the_cursor(copy, tmp_path):
    results = read_results(copy)
    method = results.spec.methods[0].model_copy(update={"label": "a\x1b[2Jb\nc"})
    spec = results.spec.model_copy(update={"methods": (method,), "title": "t\x9b2Jt"})
    runs = {method.label: results.runs["FedAvg"]}
    results = dataclasses.replace(results, spec=spec, runs=runs)
    buffer = io.StringIO()
    Console(file=buffer, width=120, no_color=True).print(results_table(results).to_rich(caption(results)))
    assert not set(buffer.getvalue()) & {"\x1b", "\x9b"}
    assert r"a\x1b[2Jb\nc" in buffer.getvalue()
    shown = fadamgc("report", tmp_path / "a\x1b[2Jb")
    assert shown.exit_code == 2
    assert "\x1b" not in shown.output
    write_facts(tmp_path, title="\x1b[2J", axis=3)
    assert "\x1b" not in fadamgc("report", tmp_path).output


# Runs of programs.


def program(copy, algorithm="fedprox", **hyperparameters):
    """The experiment as if a program had made it with its own task and algorithm."""
    (copy / "spec.toml").write_text(
        '[task]\ndata = "custom"\nclients = 3\nmeasure = "excess objective"\n'
        "[run]\nrounds = 6\nlocal_steps = 2\nseeds = [0]\n"
        f'[[method]]\nalgorithm = "{algorithm}"\nlabel = "Ours"\nmu = 0.1\neta_l = 0.5\n'
    )
    spec = parse_spec((copy / "spec.toml").read_text(), "")
    (job,) = ExperimentFolder(copy).plan(spec)
    (copy / "runs" / "fedavg-seed0").rename(job.folder)
    run = bundle.read_bundle(job.folder, "run")[0]
    identity = job.identity()
    identity["method"]["hyperparameters"] |= hyperparameters
    run["settings"] |= {"algorithm": algorithm, "hyperparameters": {"mu": 0.1}, "job": identity}
    body = {key: value for key, value in run.items() if key not in ("sha256", "format", "tensors")}
    body.pop("tensors_sha256")
    bundle.write_bundle(job.folder, "run", body, {})
    return copy


def test_a_report_needs_no_class_of_an_algorithm(copy):
    shown = fadamgc("report", program(copy, v0=None))
    assert shown.exit_code == 0, shown.output
    assert "Ours" in shown.stdout
    row = pd.read_csv(copy / "results.csv").iloc[0]
    assert (row["method"], row["algorithm"], row["eta_l"]) == ("Ours", "fedprox", 0.5)
    assert math.isnan(row["eta_g"])
    refused = fadamgc("run", copy / "spec.toml", "--out", copy / "again")
    assert refused.exit_code == 2
    assert "custom" in refused.stderr


def test_the_page_of_a_program_does_not_say_that_run_repeats_it(copy):
    write_report(copy)
    sentence = "<code>fadamgc run spec.toml</code> repeats the runs"
    assert sentence in (copy / "report.html").read_text()
    write_report(program(copy))
    html = (copy / "report.html").read_text()
    assert sentence not in html
    assert "<code>fadamgc run</code> cannot repeat them" in html
