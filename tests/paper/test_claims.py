"""What the records say about the paper's claims: paired comparisons, verdicts and their tables."""

from __future__ import annotations

import math

import pytest

from fadamgc.experiments.report.numbers import ReportedExperiment, Results
from fadamgc.experiments.spec.toml_io import spec_of
from fadamgc.federation.cost import CostModel
from fadamgc.federation.record import Record
from fadamgc.federation.run import Run
from fadamgc.paper import claims, comparison
from fadamgc.paper.claims import CLAIMS, FADAMGC, LOCAL_ADAM, ahead

ROUNDS = 100  # of a run that missed the target
SGD = "fedavg_m"


def run_of(seed, reached, seconds):
    """A run that reached the target 1 in a round; with None it missed it, with NaN it diverged."""
    last = ROUNDS if reached is None or math.isnan(reached) else reached
    metrics = [0.0] * (last - 1) + [0.0 if reached is None else math.nan if math.isnan(reached) else 1.0]
    history = [
        Record(t, 0.0, 0.0, value, value, 1, 1, seconds, 0.0, (0,), (0,))
        for t, value in enumerate(metrics, 1)
    ]
    return Run(None, None, None, {}, history, {"seed": seed}, {}, CostModel())


def results(data="cifar10", local_steps=10, seconds=None, labels=None, **reached):
    """Results by algorithm: for each seed the round in which it reached the target."""
    seeds = max(map(len, reached.values()))
    seconds, labels = seconds or {}, labels or {}
    spec = spec_of(
        {
            "task": {"data": data},
            "run": {
                **{"rounds": ROUNDS, "local_steps": local_steps, "sampled": 5},
                **{"seeds": [*range(seeds)], "target": 1.0},
            },
            "method": [{"algorithm": name, "label": labels.get(name, name)} for name in reached],
        }
    )
    runs = {
        labels.get(name, name): [run_of(seed, r, seconds.get(name, 60.0)) for seed, r in enumerate(rounds)]
        for name, rounds in reached.items()
    }
    nothing = {label: [] for label in runs}
    return Results(spec, runs, nothing, nothing)


def experiment(name, value=None, group=None, **settings):
    return ReportedExperiment(name, results(**settings), value, group)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([10, 11, 12, 13], [20, 20, 23, 22], 1),
        ([20, 20, 23, 22], [10, 11, 12, 13], -1),
        ([10, 30, 50, 70], [12, 33, 51, 72], 1),  # the pairs decide, not the spread over seeds
        ([10, 30, 50, 70], [12, 10, 60, 55], 0),
        ([10, 10, 10, 10], [None, None, None, None], 1),
        ([90, 92, None, None], [None, None, None, None], 0),  # two runs that were almost too late
        ([None] * 4, [None] * 4, 0),
        ([None] * 4, [math.nan] * 4, 0),  # neither reaches it
        ([50, 60, 70, 99], [math.nan] * 4, 1),
        ([math.nan] * 4, [50, 60, 70, 99], -1),
        ([5], [9], 0),  # a single pair has no spread
    ],
)
def test_who_is_ahead(one, other, found):
    compared = results(**{FADAMGC: one, SGD: other})
    assert ahead(compared, FADAMGC, SGD, "rounds") == found
    assert ahead(compared, SGD, FADAMGC, "rounds") == -found


def test_minutes_may_have_another_order_than_rounds():
    compared = results(seconds={FADAMGC: 100.0}, **{FADAMGC: [10, 11, 12], SGD: [14, 15, 16]})
    assert ahead(compared, FADAMGC, SGD, "rounds") == 1
    assert ahead(compared, FADAMGC, SGD, "minutes") == -1


def test_pairs_are_compared_with_the_papers():
    compared = results(
        **{FADAMGC: [10, 10, 11], SGD: [20, 20, 21], LOCAL_ADAM: [9, 12, 10], "fedadam": [1, 1, 1]}
    )
    agreed = comparison.agreement({FADAMGC: 5.0, SGD: 1.0, LOCAL_ADAM: 2.0}, compared, "rounds")
    assert agreed.same == []
    assert agreed.opposite == [(FADAMGC, SGD), (LOCAL_ADAM, SGD)]
    assert agreed.open == [(FADAMGC, LOCAL_ADAM)]


FAST, SLOW, VAGUE = [10, 11, 10, 11], [40, 41, 42, 41], [5, 60, 2, 15]


def verdicts(number, **records):
    return [finding.holds for finding in CLAIMS[number - 1].check(records)]


def main(fadamgc, sgd, data="cifar10", **others):
    return {
        "main_x": [],
        "main-x": [experiment("main-x", data=data, fadamgc=fadamgc, fedavg_m=sgd, **others)],
    }


def study(name, *experiments):
    return {name: list(experiments)}


def heterogeneity(adam_most, adam_least, **others):
    return study(
        "heterogeneity",
        experiment("most", fadamgc=FAST, local_adam=adam_most, **others),
        experiment("least", fadamgc=FAST, local_adam=adam_least),
    )


def tracking(few, many, algorithm=FADAMGC, seconds=60.0):
    return study(
        "tracking",
        experiment("few", 1, "data", seconds={algorithm: seconds}, **{algorithm: few}),
        experiment("all", 5, "data", **{algorithm: many}),
    )


def participation(value=10, local_steps=10, **reached):
    return study("participation", experiment("x", value, "data", local_steps=local_steps, **reached))


CASES = [
    (1, main(FAST, SLOW), [True]),
    (1, main(SLOW, FAST), [False]),
    (1, main(FAST, VAGUE), [None]),
    (1, main(FAST, SLOW, local_adam=VAGUE), [None]),
    (1, main(FAST, SLOW, data="glue/sst2"), []),
    (10, main(FAST, SLOW, data="glue/sst2"), [True]),
    (13, main(FAST, SLOW), [True]),
    (2, main(FAST, SLOW, fa_nt=[20, 20, 21, 22], local_adam=SLOW), [True]),
    (2, main(FAST, SLOW, fa_nt=SLOW, local_adam=[20, 20, 21, 22]), [False]),
    (2, main(FAST, SLOW, fa_nt=SLOW, local_adam=SLOW), [None]),
    (3, heterogeneity(SLOW, FAST), [True]),
    (3, heterogeneity(FAST, SLOW), [False]),
    (3, heterogeneity(VAGUE, FAST), [None]),
    (4, tracking([15, 15, 16, 15], FAST), [True]),
    (4, tracking(SLOW, FAST), [False]),
    (4, tracking(FAST, SLOW), [False]),  # rounds fall
    (4, tracking(VAGUE, FAST), [None]),
    (4, tracking([None] * 4, [None] * 4), [None]),
    (5, tracking([12, 12, 12, 13], FAST, seconds=6.0), [True]),
    (5, tracking(SLOW, FAST), [False]),
    (5, tracking(VAGUE, FAST), [None]),
    (5, tracking([None] * 4, FAST), [None]),
    (8, participation(fa_nt=FAST, fadamgc=SLOW), [True]),
    (8, participation(fa_nt=SLOW, fadamgc=FAST), [False]),
    (8, participation(fa_nt=SLOW, fadamgc=FAST, local_steps=60), []),
    (8, participation(fa_nt=SLOW, fadamgc=FAST, value=50), []),
    (14, heterogeneity(SLOW, [10, 11, 10, 11]), [True]),
    (14, heterogeneity(SLOW, SLOW), [False]),
    (15, heterogeneity(SLOW, FAST), [True]),
    (15, heterogeneity([2, 2, 1, 1], FAST), [False]),
    (16, heterogeneity(SLOW, FAST, fa_nt=SLOW), [True]),
    (16, heterogeneity(SLOW, FAST), []),  # FA-NT did not run
    (17, participation(fa_nt=SLOW, fadamgc=FAST, local_adam=SLOW), [True]),
    (17, participation(fa_nt=SLOW, fadamgc=FAST, local_adam=[2, 2, 1, 1]), [False]),
    (17, participation(fa_nt=SLOW, fadamgc=FAST, local_adam=VAGUE), [None]),
]


@pytest.mark.parametrize(("number", "records", "found"), CASES)
def test_verdicts(number, records, found):
    assert verdicts(number, **records) == found


def test_more_participation():
    few, many = (experiment("x", value, "data", fadamgc=r) for value, r in ((5, SLOW), (50, FAST)))
    assert verdicts(9, **study("participation", few, many)) == [True]
    assert verdicts(9, **study("participation", few)) == []
    worse = experiment("x", 100, "data", fadamgc=[80, 81, 82, 84])
    assert verdicts(9, **study("participation", worse, few, many)) == [False]


def test_second_moments_are_compared_by_label():
    names = {"fadamgc": "FAdamGC, b2 = 0.99", "fa_nt": "FAdamGC, b2 = 0"}
    one = experiment("x", labels=names, fadamgc=FAST, fa_nt=SLOW)
    other = experiment("x", labels=names, fadamgc=SLOW, fa_nt=FAST)
    assert verdicts(6, **study("beta2", one, other)) == [True, False]


def test_the_papers_minutes():
    """Those of SCAFFOLD-M on images fit no five vectors."""
    found = {finding.experiment: finding.holds for finding in CLAIMS[6].check({})}
    assert len(found) == 7
    assert [name for name, holds in found.items() if not holds] == ["scaffold_m"]


def test_the_tables_count_experiments_and_name_the_claim():
    records = main(FAST, SLOW) | heterogeneity(SLOW, FAST)
    checked = claims.findings(records)
    lines = claims.summary_table(checked).to_markdown().splitlines()
    assert len(lines) == 2 + len(CLAIMS)
    assert lines[2] == "| 1 | On images, FAdamGC needs the fewest rounds | main-x | | |"
    assert "the paper's numbers (6) | the paper's numbers | |" in lines[8]
    table = claims.study_table(checked, "main-x").to_markdown()
    assert "| 1 | On images, FAdamGC needs the fewest rounds | holds | rounds: ahead of fedavg_m |" in table
    assert "heterogeneity" not in table
    assert claims.study_table(checked, "digits") is None
