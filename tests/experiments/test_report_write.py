"""Tables in LaTeX, reports in another folder, runs of programs."""

from __future__ import annotations

import math
import re
import shutil

import pandas as pd
import pytest

from command import fadamgc
from fadamgc import InputError, bundle
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report.numbers import ReportedExperiment, read_results
from fadamgc.experiments.report.tables import results_table, summary_latex, summary_markdown
from fadamgc.experiments.report.write import write_report, write_reports
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from reported import SPEC, contents, forge, write_facts

pytestmark = pytest.mark.usefixtures("quick")


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


def test_without_a_target_nothing_is_called_never_reached(tmp_path):
    spec = parse_spec(SPEC.replace("ETA", "0.05").replace("target = 1e-3\n", ""), "test")
    run_spec(spec, tmp_path, workers=1, quiet=True)
    results = write_report(tmp_path)
    tex = (tmp_path / "results.tex").read_text()
    assert "never" not in tex
    assert r"Rounds to target & small & -- & -- \\" in tex
    assert "never" not in summary_markdown([ReportedExperiment("small", results)])


def test_latex_of_accuracies_has_the_digits_of_markdown(done):
    results = read_results(done)
    tex = summary_latex([ReportedExperiment("tiny", results)], precise_minutes=True)
    plain = tex.replace(r"\pm", "±").replace("$", "").replace("\\%", "%")
    for row in results_table(results).rows:
        mean, std = re.fullmatch(r"(\d+\.\d) ± (\d+\.\d) %", row[3].text).groups()
        assert f"{mean}% ± {std}%" in plain
        assert f"& {row[2].text} " in plain  # minutes


def test_latex_of_several_experiments_ends_with_the_final_metric(copy):
    both = [ReportedExperiment(name, read_results(copy)) for name in ("a", "b")]
    blocks = summary_latex(both, ["rounds"]).split(r"\midrule")[1:]
    assert [block.split(" & ")[0].strip() for block in blocks] == [
        "Rounds to target",
        "Excess objective at the end",
    ]
    assert summary_latex(both, ["final", "average"]).count("Excess objective at the end") == 1


@pytest.mark.slow
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


def test_a_report_elsewhere_is_never_written_over_what_it_reads(ready, tmp_path):
    """Nothing is written, neither over a source nor elsewhere, and the message names the folder."""
    for name in ("a", "b", "study/c", "study/d"):
        shutil.copytree(ready, tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = contents(tmp_path)
    a, b, study = tmp_path / "a", tmp_path / "b", tmp_path / "study"
    for folders, out in (
        ([a], a),
        ([a], tmp_path / "link"),
        ([a], tmp_path / "b" / ".." / "a"),
        ([a, b], tmp_path),  # the reports of a and b would be written to OUT/a and OUT/b
        ([a, b], a),
        ([study], study),
        ([study / "c"], study / "c"),
        ([a], a / "report"),
        ([a], tmp_path / "link" / "runs" / "new"),
        ([a, b], b / "report"),
        ([study], study / "c" / "report"),
    ):
        refused = fadamgc("report", *folders, "--out", out)
        assert refused.exit_code == 2, refused.output
        assert "which is only read" in refused.stderr.replace("\n", " ")
        assert contents(tmp_path) == before
    with pytest.raises(InputError, match="which is only read; give another folder"):
        write_report(a, out=a)
    with pytest.raises(InputError, match="which is only read"):
        write_reports([a, b], b)


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


# Runs of programs.


def program(copy, algorithm="fed_ours", **hyperparameters):
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
    assert (row["method"], row["algorithm"], row["eta_l"]) == ("Ours", "fed_ours", 0.5)
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
