"""FedKeel next to the methods of the paper: pairs of seeds, verdicts, and how many rows it wins."""

from __future__ import annotations

import math

import pytest
from test_claims import experiment

from fadamgc.paper.ours import FADAMGC, FEDAVG_M, LEAN, OURS, ROWS, best_of, lines, table
from fadamgc.paper.study import load_study

LABELS = {"fedkeel": OURS, "fadamgc": FADAMGC, "fedavg_m": FEDAVG_M, "local_adam": LEAN}


def row(name, **reached):
    return experiment(name, labels=LABELS, **reached)


def found(ours, lean, **others):
    made = [row("CIFAR-10", fedkeel=ours, local_adam=lean)]
    return lines(made, {"main-cifar10": row("theirs", **others)})


def test_a_row_is_compared_with_the_best_of_the_others_and_with_fadamgc():
    (line,) = found([20, 21, 22], [10, 11, 12], fadamgc=[40, 41, 43], fedavg_m=[30, 31, 33])
    assert (line.name, line.best.rival, line.fadamgc.rival) == ("CIFAR-10", FEDAVG_M, FADAMGC)
    assert math.isclose(line.best.difference.mean, 31 / 3)
    assert (line.best.difference.clear, line.fadamgc.difference.clear) == (1, 1)
    assert line.lean is not None
    assert (line.lean.ours_text, line.lean.difference.clear) == ("11.0 ± 1.0", 1)
    assert line.lean.text == "FedAvg-M 31.3 ± 1.5: ahead"


def test_behind_and_not_clear():
    (line,) = found([30, 31, 33], [60, 61, 62], fadamgc=[30, 33, 31], fedavg_m=[20, 21, 22])
    assert (line.best.difference.clear, line.fadamgc.difference.clear) == (-1, 0)
    text = table([line])
    assert "| CIFAR-10 | 100 %: 31.3 ± 1.5 | FedAvg-M 21.0 ± 1.0: behind |" in text
    assert "| FAdamGC 31.3 ± 1.5: not clear |" in text
    assert "clearly behind the best of the others on 1 of 1 rows: CIFAR-10." in text
    assert "clearly ahead of FAdamGC on 0 of 1 rows" in text
    assert "clearly behind FedAvg-M on 1 of 1 rows" in text


def test_a_run_that_missed_the_target_counts_with_all_its_rounds():
    (line,) = found([50, 51], [50, 51], fadamgc=[None, None], fedavg_m=[None, 99])
    assert line.best.rival == FEDAVG_M
    assert line.fadamgc.difference.mean == 49.5
    assert line.fadamgc.text == "FAdamGC never (0/2): ahead"


def test_rows_that_have_not_run_and_methods_that_were_not_run():
    others = {"main-cifar10": row("theirs", fadamgc=[40, 41])}
    assert lines([], others) == []
    assert lines([row("CIFAR-100", fedkeel=[1, 2], local_adam=[1, 2])], others) == []
    (line,) = lines([row("CIFAR-10", fedkeel=[1, 2], local_adam=[1, 2])], others)
    assert line.lean is None
    assert "on 0 of 0 rows" in table([line])
    assert best_of(others["main-cifar10"].results) == FADAMGC


def test_the_study_has_the_settings_of_the_other_methods():
    """So that their runs are paired: data, model, rounds, seeds, batches and links are the same."""
    members = {member.name: member.spec for member in load_study("ours").members}
    assert members.keys() == ROWS.keys()
    for name, study in ROWS.items():
        (other,) = load_study(study).members
        mine, theirs = members[name], other.spec
        assert (mine.task, mine.cost) == (theirs.task, theirs.cost)
        assert mine.run == theirs.run.model_copy(update={"tracked": mine.run.tracked})
        assert mine.run.tracked == theirs.tracked(next(m for m in theirs.methods if m.algorithm == "fadamgc"))
        assert mine.tune is not None
        assert theirs.tune is not None
        assert mine.tune == theirs.tune.model_copy(update={"eta_g": (1.0,)})


@pytest.mark.parametrize(("reached", "clear"), [([None, None, None], 0), ([90, 91, 92], 1)])
def test_cheap_rounds_are_ahead_in_minutes_only_if_they_reach_the_target(reached, clear):
    ours = row("CIFAR-10", seconds={"local_adam": 1.0}, fedkeel=[20, 21, 22], local_adam=reached)
    (line,) = lines([ours], {"main-cifar10": row("theirs", fadamgc=[40, 41, 43], fedavg_m=[40, 41, 43])})
    assert line.lean is not None
    assert line.lean.difference.clear == clear
