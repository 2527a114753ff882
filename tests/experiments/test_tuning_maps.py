"""The tuning on the report page: maps of eta_l and eta_g, from tuning.csv."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.points import read_points
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.report.tuning import read_tuning, tuning_maps
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import open_folder, run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.experiments.tune import tune
from places import ROOT

pytestmark = pytest.mark.usefixtures("quick")
SPEC = """
name = "tuned"
[task]
data = "quadratics"
clients = 3
dim = 3
[run]
rounds = 6
local_steps = 2
seeds = [0, 1]
target = 1e-2
executor = "loop"
[tune]
eta_l = [1e-9, 0.05, 1e9]
eta_g = [0.1, 1.0]
seeds = [5]
rounds = 6
[tune.methods.fedprox]
eta_g = [1.0]
mu = [0.001, 0.1, 1.0]
[[method]]
algorithm = "scaffold"
[[method]]
algorithm = "fedprox"
label = "=FedProx"
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "out"
    spec = parse_spec(SPEC, "test")
    with open_folder(ExperimentFolder(folder), spec, resume=False, overwrite=False, tuned=True):
        result = tune(spec, folder, workers=1, quiet=True)
    run_spec(result.spec, folder, resume=True, tuned=True, workers=1, quiet=True)
    return folder, result


@pytest.fixture
def maps(tuned):
    results = read_results(tuned[0])
    return {one.label: one for one in tuning_maps(results, read_tuning(tuned[0], results))}


def test_the_file_gives_back_the_points(tuned):
    folder, result = tuned
    labels = [method.label for method in result.spec.methods]
    points = read_points(folder / "tuning.csv", labels, "min", seeds=1)
    assert set(points) == {replace(point, goal="min") for point in result.points}
    assert {point for point, chosen in points.items() if chosen} == set(result.best)
    assert read_points(folder / "tuning.csv", ["another"], "min", seeds=1) == {}


def test_a_map_has_a_row_per_eta_l_and_a_column_per_eta_g(maps, tuned):
    one = maps["SCAFFOLD"]
    assert one.corner == r"eta_l \ eta_g"
    assert one.columns == ["0.1", "1"]
    assert [head for head, _ in one.rows] == ["1e-09", "0.05", "1e+09"]
    assert one.others is None
    cells = {
        (head, column): cell for head, row in one.rows for column, cell in zip(one.columns, row, strict=True)
    }
    (chosen,) = [place for place, cell in cells.items() if cell.chosen]
    assert dict(tuned[1].best[0].values) == {"eta_l": float(chosen[0]), "eta_g": float(chosen[1])}
    assert cells[chosen].shade == 1.0
    best = tuned[1].best[0]
    assert cells[chosen].lines[:2] == (f"{best.rounds:.3g} rounds", f"{best.final:.3g}")
    assert cells["1e+09", "1"].diverged
    assert cells["1e+09", "1"].lines == ("diverged",)
    assert not cells["1e-09", "1"].diverged
    shades = sorted(cell.shade for cell in cells.values())
    assert shades == pytest.approx([i / 5 for i in range(6)])


def test_a_method_with_one_step_size_has_one_row_and_the_others_a_table(maps):
    one = maps["=FedProx"]
    assert one.corner == "eta_l"
    assert one.columns == ["1e-09", "0.05", "1e+09"]
    assert [head for head, _ in one.rows] == ["eta_g = 1"]
    assert [[cell.text for cell in row[:2]] for row in one.others.rows] == [
        ["mu", "0.001"],
        ["mu", "0.1"],
        ["mu", "1"],
    ]
    assert sum(row[3].text == "chosen" for row in one.others.rows) == 1


def test_a_value_at_the_end_of_its_grid_is_warned_about(maps, tuned):
    assert maps["SCAFFOLD"].warnings == ["chosen at the high end of eta_g: extend the grid"]
    notes = [note for note in tuned[1].notes if "end of the grid" in note]
    assert len(notes) == sum(len(one.warnings) for one in maps.values())


def test_the_page_has_the_maps_and_says_what_is_wrong_with_a_file(tuned, tmp_path):
    folder = tuned[0]
    write_report(folder, out=tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "<h2>Tuning</h2>" in html
    assert "<span>diverged</span>" in html
    assert html.count("<span>chosen</span>") == 2
    assert "chosen at the high end of eta_g: extend the grid" in html
    saved = (folder / "tuning.csv").read_bytes()
    for damaged in (b"method,chosen\nSCAFFOLD,True\n", b"\xff\xfe", saved.replace(b",1,", b",x,")):
        (folder / "tuning.csv").write_bytes(damaged)
        write_report(folder, out=tmp_path)
        html = (tmp_path / "report.html").read_text()
        assert "not what `fadamgc tune` wrote there" in html
        assert "<span>chosen</span>" not in html
    (folder / "tuning.csv").write_bytes(saved)


def test_without_tuning_there_is_no_panel(done):
    assert not (done / "tuning.csv").exists()
    assert "<h2>Tuning</h2>" not in (done / "report.html").read_text()


def test_files_of_earlier_versions_are_read():
    folder = ROOT / "results" / "digits"
    spec, _ = ExperimentFolder(folder).read_plan()
    results = read_results(folder)
    assert "seeds_tried" not in (folder / "tuning.csv").read_text().splitlines()[0]
    maps = tuning_maps(results, read_tuning(folder, results))
    assert [one.label for one in maps] == [method.label for method in spec.methods]
    texts = [line for one in maps for _, row in one.rows for cell in row for line in cell.lines]
    assert "1/2 seeds" in texts
