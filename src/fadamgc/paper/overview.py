"""The answer in a few lines and one figure: who needs the fewest rounds on which row, and what holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fadamgc.escape import markdown, printable
from fadamgc.experiments.report.means import mean_of
from fadamgc.experiments.report.numbers import Experiments, ReportedExperiment, values_by_seed
from fadamgc.experiments.report.plots import line_style
from fadamgc.paper import ours
from fadamgc.paper.claims import Claim, Finding, ahead
from fadamgc.paper.published import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "overview.png"
FADAMGC, ADAM = ours.FADAMGC, ("LocalAdam", "FA-NT")
FEWEST = 4  # methods of a row
KINDS = {  # of rows, by their data sets
    "images": ("digits", "cifar10", "cifar100", "tiny-imagenet"),
    "texts": ("20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp"),
    "people's activities": ("uci_har",),
}
MARKERS = "osD^vP*Xp<>hd"


class Standing(NamedTuple):
    """A row: the rounds to the target by label, where a run that missed it counts with all its rounds."""

    name: str
    kind: str
    rounds: Mapping[str, float]  # of the methods of the paper
    more: Mapping[str, float]  # of others
    behind: Sequence[str]  # methods that FAdamGC is clearly ahead of
    ahead: Sequence[str]  # methods that are clearly ahead of FAdamGC


def standings(records: Mapping[str, Experiments]) -> list[Standing]:
    """List the rows that compare methods of different kinds at tuned step sizes."""
    added = {e.name: e for e in records.get(ours.STUDY, ())}
    with_ours = {study: added[name] for name, study in ours.ROWS.items() if name in added}
    found = []
    for study, experiments in records.items():
        if not study.startswith(("main-", "har", "digits")):
            continue
        for experiment in experiments:
            row = _standing(study, experiment, with_ours.get(study))
            if row is not None:
                found.append(row)
    return found


def _standing(study: str, experiment: ReportedExperiment, more: ReportedExperiment | None) -> Standing | None:
    results = experiment.results
    data = getattr(results.spec.task, "data", None)
    kind = next((kind for kind, names in KINDS.items() if data in names), None)
    methods = results.spec.methods
    rounds = _rounds(experiment, [method.label for method in methods if method.algorithm in METHODS])
    if kind is None or FADAMGC not in rounds or len(rounds) < FEWEST:
        return None
    order = {other: ahead(results, FADAMGC, other, "rounds") for other in rounds if other != FADAMGC}
    others = [method.label for method in methods if method.algorithm not in METHODS]
    added = {} if more is None else _rounds(more, [ours.OURS])
    name = next((row for row, other in ours.ROWS.items() if other == study), study)
    return Standing(
        name=name,
        kind=kind,
        rounds=rounds,
        more=_rounds(experiment, others) | added,
        behind=[other for other, sign in order.items() if sign > 0],
        ahead=[other for other, sign in order.items() if sign < 0],
    )


def _rounds(experiment: ReportedExperiment, labels: Sequence[str]) -> dict[str, float]:
    values = {label: values_by_seed(experiment.results, label, "rounds") for label in labels}
    return {label: mean_of(list(by_seed.values())) for label, by_seed in values.items() if by_seed}


# The answer.


def answer(
    rows: Sequence[Standing],
    checked: Sequence[tuple[Claim, Sequence[Finding]]],
    of_ours: Sequence[ours.Line],
) -> str:
    """Write the answer as a list."""
    lines = [*_claims(checked)]
    for kind in KINDS:
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            lines.append(_firsts(kind, of_kind))
    if rows:
        lines.append(_adam(rows))
    if of_ours:
        lines.append(_ours(of_ours))
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _claims(checked: Sequence[tuple[Claim, Sequence[Finding]]]) -> list[str]:
    verdicts = Counter[str]()
    for _, found in checked:
        answers = {finding.holds for finding in found}
        if not answers:
            verdicts["not tested"] += 1
        elif True in answers:
            verdicts["hold in some settings and not in others" if False in answers else "hold"] += 1
        else:
            verdicts["do not hold" if False in answers else "cannot be told"] += 1
    order = ("hold", "hold in some settings and not in others", "do not hold", "cannot be told", "not tested")
    counts = [f"{verdicts[verdict]} {verdict}" for verdict in order if verdicts[verdict]]
    return [f"**Of the paper's {len(checked)} claims, {', '.join(counts)}** in the settings that were run."]


def _firsts(kind: str, rows: Sequence[Standing]) -> str:
    firsts = Counter(
        label for row in rows for label, rounds in row.rounds.items() if rounds == min(row.rounds.values())
    )
    first = ", ".join(f"{markdown(label)} on {count}" for label, count in firsts.most_common())
    places = [1 + sum(v < row.rounds[FADAMGC] for v in row.rounds.values()) for row in rows]
    behind = sum(bool(row.ahead) for row in rows)
    most = max(len(row.rounds) for row in rows)
    return (
        f"**On {kind} ({_rows(len(rows))}), the fewest rounds of the paper's methods**: {first}; methods "
        f"that are level count both. FAdamGC is at place {', '.join(map(str, places))} of up to {most}, and "
        f"on {behind} of {len(rows)} rows some method is clearly ahead of it."
    )


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _adam(rows: Sequence[Standing]) -> str:
    rivals = [label for label in ADAM if any(label in row.rounds for row in rows)]
    parts = []
    for rival in rivals:
        clear = sum(rival in row.behind for row in rows)
        worse = sum(rival in row.ahead for row in rows)
        parts.append(f"{markdown(rival)} on {clear} of {len(rows)} rows, and clearly behind it on {worse}")
    what = "**Among the methods with Adam at the clients, FAdamGC is clearly ahead of**"
    return f"{what} {'; of '.join(parts)}."


def _ours(found: Sequence[ours.Line]) -> str:
    behind = sum(line.best.difference.clear < 0 for line in found)
    over = sum(line.best.difference.clear > 0 for line in found)
    ahead_of = sum(line.fadamgc.difference.clear > 0 for line in found)
    return (
        f"**FedKeel, the method of this package** ([its page](fedkeel.md)), is clearly ahead of FAdamGC on "
        f"{ahead_of} of {_rows(len(found))}; against the best of the others, chosen after the fact, it is "
        f"clearly behind on {behind} and clearly ahead on {over}."
    )


# The figure.


def figure(rows: Sequence[Standing]) -> Figure:
    """Draw the rounds of all methods relative to the fewest, one line per row."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for row in rows for label in (*row.rounds, *row.more)))
    drawn = Figure(figsize=(9, 1.4 + 0.55 * len(rows)), layout="constrained")
    panel = drawn.subplots()
    for number, label in enumerate(labels):
        points = []
        for place, row in enumerate(rows):
            everything = {**row.rounds, **row.more}
            if label in everything:
                shift = 0.7 * ((number + 0.5) / len(labels) - 0.5)  # so that equal methods stay visible
                points.append((everything[label] / min(everything.values()), place + shift))
        x, y = zip(*points, strict=True)
        style = line_style(number)
        marker = MARKERS[number % len(MARKERS)]
        ours_ = label in (ours.OURS, "FAdamGC")
        panel.plot(
            *(x, y),
            marker=marker,
            linestyle="none",
            color=style["color"],
            markersize=9 if ours_ else 6,
            markeredgecolor="black" if ours_ else "none",
            label=printable(label),
            zorder=4 if ours_ else 3,
        )
    panel.set_yticks(range(len(rows)), [printable(row.name) for row in rows])
    panel.invert_yaxis()
    panel.set_xscale("log")
    most = panel.get_xlim()[1]
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16) if tick <= most]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel("rounds to the target, relative to the fewest of the row")
    panel.grid(color="0.92", axis="x")
    panel.hlines(
        [place + 0.5 for place in range(len(rows) - 1)], *panel.get_xlim(), color="0.85", linewidth=0.8
    )
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return drawn
