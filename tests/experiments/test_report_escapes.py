"""Reports of a stranger's files: names are escaped, links lead nowhere else."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shutil
from types import SimpleNamespace

import pytest
from rich.console import Console

from command import fadamgc
from fadamgc.errors import InputError
from fadamgc.experiments.report.numbers import (
    ReportedExperiment,
    read_results,
)
from fadamgc.experiments.report.tables import (
    caption,
    results_markdown,
    results_table,
    summary_latex,
    summary_markdown,
)
from fadamgc.experiments.report.write import write_report, write_summary
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.experiments.tune import tune
from fadamgc.paper.study import keep, read_study
from reported import SPEC, contents, write_facts

pytestmark = pytest.mark.usefixtures("quick")


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
    assert len(tex.splitlines()) == 12


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
def test_labels_are_not_formulas_in_csv(copy, start):
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
    none: dict[str, list[str]] = {method.label: []}
    results = dataclasses.replace(results, spec=spec, runs=runs, diverged=none, damaged=none)
    buffer = io.StringIO()
    Console(file=buffer, width=120, no_color=True).print(results_table(results).to_rich(caption(results)))
    assert not set(buffer.getvalue()) & {"\x1b", "\x9b"}
    assert r"a\x1b[2Jb\nc" in buffer.getvalue()
    shown = fadamgc("report", tmp_path / "a\x1b[2Jb")
    assert shown.exit_code == 2
    assert "\x1b" not in shown.output
    write_facts(tmp_path, title="\x1b[2J", axis=3)
    assert "\x1b" not in fadamgc("report", tmp_path).output
