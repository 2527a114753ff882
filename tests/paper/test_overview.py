"""The answer in a few lines: who is first on which row, what FAdamGC and FedKeel are ahead of, what holds."""

from __future__ import annotations

from test_claims import experiment

from fadamgc.experiments.report.plots import png
from fadamgc.paper import ours
from fadamgc.paper.claims import CLAIMS, Finding
from fadamgc.paper.overview import answer, figure, standings

LABELS = {
    **{"fadamgc": "FAdamGC", "fedavg_m": "FedAvg-M", "local_adam": "LocalAdam", "fa_nt": "FA-NT"},
    **{"fedavg": "FedAvg", "fedkeel": ours.OURS},
}


def row(name, **reached):
    return experiment(name, labels=LABELS, **reached)


FIRST = {"fadamgc": [10, 11, 12], "fedavg_m": [20, 21, 23], "local_adam": [90, 91, 94], "fa_nt": [None] * 3}
BEHIND = {
    "fadamgc": [40, 41, 43],
    "fedavg_m": [20, 20, 20],
    "local_adam": [20, 20, 20],
    "fa_nt": [40, 41, 43],
}
RECORDS = {
    "main-cifar10": [row("main-cifar10", **FIRST, fedavg=[5, 5, 5])],
    "main-cifar100": [row("main-cifar100", data="cifar100", **BEHIND)],
    "main-sst2": [row("main-sst2", data="glue/sst2", **FIRST)],
    "participation": [row("CIFAR-10", **BEHIND)],  # compares no methods of different kinds
    "har": [row("har", data="uci_har", fadamgc=[1, 1], fedavg_m=[1, 1])],  # too few methods
    "ours": [row("CIFAR-10", fedkeel=[4, 4, 4])],
}
HOLDS, NOT, OPEN = (Finding("study", "experiment", holds, "") for holds in (True, False, None))


def test_the_rows_and_their_order():
    first, second, text = standings(RECORDS)
    assert [found.name for found in (first, second, text)] == ["CIFAR-10", "CIFAR-100", "SST-2"]
    assert (first.kind, text.kind) == ("images", "texts")
    assert first.rounds == {"FAdamGC": 11, "FedAvg-M": 64 / 3, "LocalAdam": 275 / 3, "FA-NT": 100}
    assert first.more == {"FedAvg": 5, "FedKeel": 4}
    assert set(first.behind) == {"FedAvg-M", "LocalAdam", "FA-NT"}
    assert (first.ahead, set(second.ahead), second.more) == ([], {"FedAvg-M", "LocalAdam"}, {})


def test_the_lines():
    checked = [
        *((CLAIMS[0], found) for found in ([HOLDS], [HOLDS, OPEN], [HOLDS, NOT], [NOT, OPEN], [OPEN], [])),
    ]
    lines = answer(standings(RECORDS), checked, []).splitlines()
    assert lines[0].startswith(
        "- **Of the paper's 6 claims, 2 hold, 1 hold in some settings and not in others, 1 do not hold, "
        "1 cannot be told, 1 not tested**"
    )
    assert "On images (2 rows)" in lines[1]
    assert "FAdamGC on 1, FedAvg-M on 1, LocalAdam on 1; methods that are level count both" in lines[1]
    assert "FAdamGC is at place 1, 3 of up to 4, and on 1 of 2 rows some method is clearly ahead" in lines[1]
    assert "On texts (1 row)" in lines[2]
    assert "LocalAdam on 2 of 3 rows, and clearly behind it on 1" in lines[3]
    assert "FA-NT on 2 of 3 rows, and clearly behind it on 0" in lines[3]
    assert len(lines) == 4


def test_the_line_of_the_method_of_this_package():
    mine = [row("CIFAR-10", fedkeel=[4, 4, 5])]
    others = {"main-cifar10": row("main-cifar10", **FIRST)}
    line = answer([], [], ours.lines(mine, others)).splitlines()[-1]
    assert "clearly ahead of FAdamGC on 1 of 1 row;" in line
    assert "clearly behind on 0 and clearly ahead on 1" in line


def test_the_figure_has_a_point_for_every_method():
    drawn = figure(standings(RECORDS))
    (panel,) = drawn.axes
    counts = {line.get_label(): len(line.get_xdata()) for line in panel.lines}
    assert counts == {"FAdamGC": 3, "FedAvg-M": 3, "LocalAdam": 3, "FA-NT": 3, "FedAvg": 1, "FedKeel": 1}
    assert min(min(line.get_xdata()) for line in panel.lines) == 1
    assert png(drawn).startswith(b"\x89PNG")
