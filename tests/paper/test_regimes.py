"""Maps of regimes: the best rival, the ratio of rounds, missed targets, and the files."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from test_claims import ROUNDS, experiment, results

from fadamgc.errors import InputError
from fadamgc.paper.regimes import RegimeMap, cell, map_files, map_markdown
from fadamgc.paper.study import parse_study

OURS = RegimeMap(method="fadamgc", rivals=("fedavg_m", "fedadam"))


def test_the_best_rival_is_the_one_with_the_fewest_rounds():
    found = cell(results(fadamgc=[10, 10, 10], fedavg_m=[30, 30, 30], fedadam=[20, 20, 21]), OURS)
    assert found is not None
    assert (found.rival, found.rounds, found.missed, found.clear) == ("fedadam", 10, 0, 1)
    assert found.ratio == pytest.approx(61 / 30)
    assert found.text == "2"
    behind = cell(results(fadamgc=[30, 31, 30], fedavg_m=[10, 10, 10], fedadam=[20, 20, 20]), OURS)
    assert behind is not None
    assert (behind.rival, behind.text, behind.clear) == ("fedavg_m", "0.33", -1)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ([50, 50], [100, 100], "2"),
        ([50, 50], [None, None], ">2"),
        ([50, 50], [80, None], ">1.8"),
        ([None, 50], [50, 25], "<0.5"),
        ([None, 50], [None, 50], "≈1"),
    ],
)
def test_a_run_that_missed_the_target_counts_with_all_its_rounds(ours, theirs, text):
    found = cell(results(fadamgc=ours, fedavg_m=theirs), OURS)
    assert found is not None
    assert found.text == text
    assert ROUNDS == 100


def test_a_method_without_runs_has_no_cell():
    assert cell(results(fadamgc=[10], scaffold_m=[10]), OURS) is None
    assert cell(results(fedavg_m=[10]), OURS) is None
    assert cell(results(fadamgc=[float("nan")] * 2, fedavg_m=[10, 10]), OURS) is None


def placed(K, S, ours, group="CNN"):
    name = f"K = {K}, S = {S}"
    return experiment(name, S, group, fadamgc=ours, fedavg_m=[20, 20])._replace(row=K)


def test_the_files_of_a_map():
    members = [
        placed(5, 10, [40, 41]),
        placed(60, 10, [10, 10]),
        placed(5, 20, [20, 20]),
        placed(5, 2, [5, 5]),
    ]
    files = map_files([*members, experiment("elsewhere", fadamgc=[1])], [OURS], "S", "K", "Who | where?")
    assert files["map.png"].startswith(b"\x89PNG")
    assert files["map.pdf"].startswith(b"%PDF")
    frame = pd.read_csv(io.BytesIO(files["map.csv"]))
    assert frame[["K", "S"]].to_numpy().tolist() == [[5, 10], [60, 10], [5, 20], [5, 2]]
    assert frame["ratio"].tolist() == pytest.approx([20 / 40.5, 2, 1, 4])
    lines = files["map.md"].decode().splitlines()
    assert lines[0] == r"# Who \| where?"
    assert lines[4] == "| K | S 2 | S 10 | S 20 |"  # both axes in order, whatever that of the experiments is
    assert lines[6] == "| 5 | **4** fedavg_m | **0.49** fedavg_m | 1 fedavg_m |"
    assert lines[7] == "| 60 |  | **2** fedavg_m |  |"


def test_a_group_has_a_table_for_itself():
    members = [placed(5, 10, [40, 41], "CNN"), placed(60, 10, [10, 10], "MLP")]
    text = map_markdown(members, [OURS, OURS], "S", "K")
    assert text.count("**CNN: fadamgc against the best of fedavg_m, fedadam**") == 2
    assert text.count("| 60 | **2**") == 2
    assert text.count("| K | S 10 |") == 4


def test_nothing_is_written_while_no_experiment_has_run():
    assert map_files([], [OURS], "S", "K", "title") == {}
    assert map_files([experiment("no place", fadamgc=[1], fedavg_m=[1])], [OURS], "S", "K", "title") == {}


STUDY = """
name = "small"
[study]
axis = "S"
rows = "K"
[[study.maps]]
method = "FAdamGC"
rivals = ["FedAvg"]
[task]
data = "digits"
[run]
rounds = 2
[[method]]
algorithm = "fadamgc"
[[method]]
algorithm = "fedavg"
[[experiment]]
name = "one"
value = 2
row = 5
run = { sampled = 2, local_steps = 5 }
"""


def test_a_study_has_maps():
    study = parse_study(STUDY, "here", "laptop")
    assert study.maps == (RegimeMap(method="FAdamGC", rivals=("FedAvg",)),)
    assert (study.rows, study.members[0].row, study.members[0].value) == ("K", 5, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('rows = "K"\n', ""), "maps need the titles of their axes, axis and rows"),
        (
            ('method = "FAdamGC"', 'method = "FadamGC"'),
            "'FadamGC' is not the label of a method; did you mean 'FAdamGC'",
        ),
        (('["FedAvg"]', '["Adam"]'), "'Adam' is not the label of a method"),
    ],
)
def test_a_mistake_in_a_map_is_named(change, said):
    with pytest.raises(InputError, match=said):
        parse_study(STUDY.replace(*change), "here", "laptop")
