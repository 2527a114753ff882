"""The commands that show results, and that list the contents of the package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fadamgc.cli.console import DataRoot, argument, option, say, terminal, use_data
from fadamgc.errors import InputError
from fadamgc.escape import printable

if TYPE_CHECKING:
    from fadamgc.experiments.report.numbers import Results
    from fadamgc.paper.advice import Advice, Situation

# A command imports the rest when it runs, so that --help is quick.

app = typer.Typer(rich_markup_mode="markdown")
PLOT = Path("partition.png")
CLOSE = 1.1  # methods within this ratio of the first one are close to it
price = partial(option, default="the spec's")


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `compare`, `run`, `reproduce` or a Flower server has written.",
            metavar="FOLDER...",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        option(
            *("Folder to write to; the other folders are then only read.", "--out", "-o"),
            default="each folder itself; out/report for the common page",
        ),
    ] = None,
    down_mbps: Annotated[float | None, price("Link speed from the server to a client, in Mbps.")] = None,
    up_mbps: Annotated[float | None, price("Link speed from a client to the server, in Mbps.")] = None,
    seconds_per_step: Annotated[float | None, price("Seconds per local step.")] = None,
    latency: Annotated[float | None, price("Additional seconds per round.")] = None,
    per_round: Annotated[
        Literal["mean", "slowest"] | None,
        price("Whether a round takes as long as its mean or its slowest client."),
    ] = None,
    group_down_mbps: Annotated[float | None, price("Link speed from the server to a group.")] = None,
    group_up_mbps: Annotated[float | None, price("Link speed from a group to the server.")] = None,
) -> None:
    """Make all tables, figures and the page again from saved runs, without running anything.

    The options price the same runs for other links and devices. Several folders also get one common page
    with common tables. The folder of a study means all experiments of the study. With --out, the folders are
    only read, and each of several experiments gets a folder with its name inside the given folder.

    Examples:

    - `fadamgc report out/compare`
    - `fadamgc report out/compare --down-mbps 10 --up-mbps 1 --per-round slowest --out out/slow`
    - `fadamgc report out/main-cifar10-laptop out/main-cifar100-laptop --out out/both`
    """
    from fadamgc.experiments.folder import SPEC, ExperimentFolder
    from fadamgc.experiments.report.write import check_elsewhere, write_report, write_reports
    from fadamgc.paper.study import read_study, write_study_report

    targets: dict[Path, Path] = {}  # by the folder of each experiment: the folder of its report
    targets_of_arguments = _targets(folders, out)
    for folder, target in targets_of_arguments.items():
        read_study(folder)  # refuses a study that leads out of its folder
        inside = sorted(path.parent for path in folder.glob(f"*/{SPEC}"))
        if ExperimentFolder(folder).has_experiment or not inside:
            targets[folder] = target
        else:
            targets |= {path: target / path.name for path in inside}
    if out is not None:
        check_elsewhere([out, *targets.values()], [*folders, *targets])
    links = {"down_mbps": down_mbps, "up_mbps": up_mbps, "latency": latency}
    links |= {"group_down_mbps": group_down_mbps, "group_up_mbps": group_up_mbps}
    cost = links | {"seconds_per_step": seconds_per_step, "per_round": per_round}
    for folder, target in targets.items():
        show(write_report(folder, cost, None if out is None else target), target)
    for folder, target in targets_of_arguments.items():
        if read_study(folder) is not None:
            for path in write_study_report(folder, cost, target):
                say(str(path))
    if len(folders) > 1 or (len(targets) > 1 and read_study(folders[0]) is None):
        common = out or Path("out/report")
        write_reports(targets, common, cost)
        print(printable(common / "report.html"))


def _targets(folders: list[Path], out: Path | None) -> dict[Path, Path]:
    """Map each folder to the folder of its report: itself, ``out``, or a subfolder of ``out``."""
    if out is None:
        return {folder: folder for folder in folders}
    if len(folders) == 1:
        return {folders[0]: out}
    targets: dict[Path, Path] = {}
    for folder in folders:
        name = folder.resolve().name
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        targets[folder] = next(out / n for n in names if out / n not in targets.values())
    return targets


@app.command()
def export(
    folder: Annotated[Path, argument("A run (OUT/runs/NAME), a checkpoint, or a Flower server's folder.")],
    to: Annotated[Path, option("File to write, .safetensors or .pt.", "--to")] = Path("model.safetensors"),
    which: Annotated[
        Literal["last", "best"], typer.Option(help="The model after the last round, or after the best round.")
    ] = "last",
    task: Annotated[
        str | None,
        option("my_module:make_task, if the folder does not say how its model is made.", default="the run's"),
    ] = None,
) -> None:
    """Write the trained model of a folder as a state_dict.

    A run keeps its model if it was run with --save-models; a checkpoint and a server always have it.

    Examples:

    - `fadamgc export out/compare/runs/fadamgc-seed0 --to model.safetensors`
    - `fadamgc export my_checkpoint --task my_module.py:make_task --to model.pt`
    """
    from fadamgc.experiments.export import export as write_model

    print(printable(write_model(folder, to, which, task)))


@app.command()
def cite(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders of studies, experiments or runs, or names of algorithms.",
            metavar="[FOLDER|NAME]...",
            show_default="the package and the paper of FAdamGC",
        ),
    ] = None,
) -> None:
    """Print the BibTeX of what runs used: this package, the methods, the data and the models.

    Examples:

    - `fadamgc cite out/compare > used.bib`
    - `fadamgc cite fadamgc scaffold fedadam`
    """
    from fadamgc.experiments.citations import bibtex, cited

    print(bibtex(key for source in sources or ["fadamgc"] for key in cited(source)), end="")


@app.command()
def predict(
    run: Annotated[Path, argument("A run on texts, OUT/runs/NAME; or a folder of save_adapter.")],
    text: Annotated[str, argument("The text to classify.")],
    second: Annotated[str | None, argument("The other text, if the data are pairs.")] = None,
    base: Annotated[str | None, option("Folder of the base model.", default="as in the run")] = None,
) -> None:
    """Classify a text with the result of a run, or saved adapters: likely labels and their probabilities.

    Examples:

    - `fadamgc predict out/main-sst2-laptop/runs/fadamgc-seed0 "a film that never ends"`
    - `fadamgc predict adapter "a film that never ends"`
    """
    from rich.table import Table
    from rich.text import Text

    from fadamgc.experiments.predict import predict as classify

    table = Table("label", "probability")
    for label, probability in list(classify(run, text, second, base).items())[:5]:
        table.add_row(Text(printable(label)), f"{probability:.1%}")
    terminal().print(table)


@app.command()
def keep(
    folder: Annotated[Path, argument("A folder that `compare`, `run` or `reproduce` has written.")],
    to: Annotated[Path, argument("Folder to copy to.")],
) -> None:
    """Copy the records, tables and figures of an experiment, without weights: small enough for git.

    `fadamgc report` makes the other files again from the copy.

    Example: `fadamgc keep out/main-cifar10-laptop results/main-cifar10`
    """
    from fadamgc.paper.study import keep as copy

    say(f"{to}: {copy(folder, to) / 1e6:.1f} MB")


@app.command("list")
def list_(
    name: Annotated[str | None, argument("An algorithm, to show its rule and its settings.")] = None,
    as_json: Annotated[bool, option("Print the algorithms as JSON.", "--json")] = False,
) -> None:
    """List algorithms, presets, studies, tasks, partitions and executors; or show one algorithm.

    Example: `fadamgc list fadamgc`
    """
    import json

    from fadamgc.cli.catalogue import catalogue, described_algorithm

    console, known = terminal(), catalogue()
    described = known["algorithms"]
    if name is not None:
        described = [entry for entry in described if entry["name"] == name] or [described_algorithm(name)]
    if as_json:
        print(json.dumps(described, indent=1))
        return
    if name is not None:
        _show_algorithm(console, described[0])
        return
    table = Table(title="Algorithms: vectors of the model's size between the server and one client per round")
    for title in ("name", "what it is", "down", "up", "if tracked", "needs"):
        table.add_column(title, justify="right" if title in ("down", "up", "if tracked") else "left")
    for entry in described:
        vectors = [str(entry["vectors"][key]) for key in ("down", "up", "tracked")]
        table.add_row(f"[bold]{entry['name']}[/]", escape(entry["what"]), *vectors, ", ".join(entry["needs"]))
    console.print(table)
    console.print("fadamgc list NAME shows the rule of an algorithm and its settings\n", highlight=False)
    for preset, title in known["presets"].items():
        console.print(f"preset [bold]{preset}[/]: {title}", highlight=False)
    for title, names in known["names"].items():
        console.print(f"{title}: {', '.join(names)}", highlight=False)


def _show_algorithm(console: Console, described: Mapping[str, Any]) -> None:
    console.print(f"{described['name']}: {described['title']}\n", markup=False, highlight=False)
    console.print(described["text"], markup=False, highlight=False)
    console.print(f"\nsettings and their defaults: {_settings(described['settings'])}", markup=False)
    if described["name"] == "compose":
        from fadamgc.algebra.compose import NAMES, rule_table

        factors = Table("factor", "rule", "settings and their defaults", title="The factors")
        for kind, rules in NAMES.items():
            for name, rule in rules.items():
                factors.add_row(kind, name, _settings(rule_table(kind, rule())))
        console.print(factors)


def _settings(values: Mapping[str, Any]) -> str:
    """Show settings with their values; a rule in an algorithm by its name."""
    names = {key: value["rule"] if isinstance(value, dict) else repr(value) for key, value in values.items()}
    return ", ".join(f"{key}={name}" for key, name in names.items() if key != "rule")


@app.command()
def partition(
    spec: Annotated[
        Path | None, typer.Argument(help="Plot the task of this spec, a TOML file, instead.", show_default="")
    ] = None,
    data: Annotated[str, typer.Option(help="A data set with labels.")] = "digits",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 50,
    kind: Annotated[
        str, typer.Option("--partition", help="How samples are distributed: dirichlet, iid or shards.")
    ] = "dirichlet",
    alpha: Annotated[
        float | None, option("Concentration of dirichlet; small values give skewed labels.", default="0.1")
    ] = None,
    min_size: Annotated[int | None, option("Minimum samples per client, for dirichlet.", default="1")] = None,
    shards_per_client: Annotated[int | None, option("Shards per client, for shards.", default="2")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    out: Annotated[Path, option("File of the plot: .png, .svg or .pdf.", "--out", "-o", default=True)] = PLOT,
    data_root: DataRoot = None,
) -> None:
    """Plot which client has which labels.

    Examples:

    - `fadamgc partition`
    - `fadamgc partition --alpha 1 --clients 20 --out mild.png`
    - `fadamgc partition --partition shards --shards-per-client 2`
    - `fadamgc partition --data cifar10 --data-root ~/data`
    - `fadamgc partition spec.toml`, for data of your own
    """
    import numpy as np

    from fadamgc.experiments.report.label_plot import save_label_plot
    from fadamgc.experiments.spec.toml_io import load_spec
    from fadamgc.tasks.build import label_counts
    from fadamgc.tasks.sections import task_spec

    use_data(data_root)
    if spec is not None:
        task = load_spec(spec).task
    else:
        task = task_spec(
            data=data,
            clients=clients,
            partition=kind,
            alpha=alpha,
            min_size=min_size,
            shards_per_client=shards_per_client,
        )
    labels = label_counts(task, seed)
    if labels is None:
        raise InputError(f"data={task.data!r} has no labels to plot; use --data digits")
    sizes, classes = labels.counts.sum(axis=1), (labels.counts > 0).sum(axis=1)
    try:
        save_label_plot(labels.counts, out, title=f"{labels.note} (seed {seed})")
    except OSError as error:
        raise InputError(f"out={str(out)!r} cannot be written: {error.strerror}") from None
    print(labels.note)
    for name, values in (("samples per client", sizes), ("labels per client", classes)):
        print(f"{name}: least {values.min()}, median {np.median(values):g}, most {values.max()}")
    print(f"plot: {out}")


@app.command()
def advise(
    clients: Annotated[int, typer.Option(help="Number of clients, n.")] = 100,
    sampled: Annotated[int | None, option("Clients per round, S.", default="a tenth of all")] = None,
    local_steps: Annotated[float, typer.Option(help="Local steps of a client per round, K.")] = 10,
    alpha: Annotated[
        float,
        typer.Option(
            help="How different the clients' labels are: the alpha of Dirichlet(alpha); small is different."
        ),
    ] = 0.1,
    parameters: Annotated[float, typer.Option(help="Trained parameters of the model, such as 1e6.")] = 1e5,
    kind: Annotated[str | None, option("Kind of the data: images, texts or sensors.", default="any")] = None,
    down_mbps: Annotated[
        float | None, option("Link from the server to a client, in Mbps.", default="takes no time")
    ] = None,
    up_mbps: Annotated[
        float | None, option("Link from a client to the server, in Mbps.", default="takes no time")
    ] = None,
    seconds_per_step: Annotated[float, typer.Option(help="Seconds per local step.")] = 0.0,
    stateless: Annotated[
        bool, option("Only methods whose clients keep nothing between rounds.", "--stateless")
    ] = False,
    as_json: Annotated[bool, option("Print everything as JSON.", "--json")] = False,
) -> None:
    """Say which method to start with, at which step sizes, and which saved runs say so.

    The runs are those of the package: experiments count the more, the nearer they are to yours. With a link,
    methods are compared by simulated minutes, else by rounds.

    Examples:

    - `fadamgc advise --clients 1000 --sampled 20 --local-steps 50 --kind images`
    - `fadamgc advise --kind texts --parameters 3e5 --down-mbps 20 --up-mbps 2`
    """
    import json

    from fadamgc.paper.advice import Situation
    from fadamgc.paper.advice import advise as advice

    table = {
        "clients": clients,
        "sampled": max(1, round(clients / 10)) if sampled is None else sampled,
        **{"local_steps": local_steps, "alpha": alpha, "parameters": parameters, "kind": kind},
        **{"down_mbps": down_mbps, "up_mbps": up_mbps, "seconds_per_step": seconds_per_step},
        "stateless": stateless,
    }
    situation = Situation.from_table(table, "advise:")
    found = advice(situation)
    if as_json:
        print(json.dumps(found.plain(), indent=1))
        return
    _show_advice(terminal(), situation, found)


def _show_advice(console: Console, situation: Situation, found: Advice) -> None:
    first, *others = found.suggestions
    steps = ", ".join(f"{name}={value:g}" for name, value in first.settings.items())
    tracked = "" if first.tracked is None else f", tracked={first.tracked} of {situation.sampled} (S~)"
    console.print(f"[bold]{first.label}[/]: start with {steps}{tracked}\n", highlight=False)
    close = [f"{entry.label} ({entry.ratio:.2f} x)" for entry in others if entry.ratio < CLOSE]
    if close:
        console.print(f"Close to it: {', '.join(close)}\n", highlight=False)
    unit = situation.by
    table = Table(title=f"Methods by their {unit} to the targets of the runs below")
    numbers = ("relative", "rounds", "missed")
    for title in ("method", *numbers, "start with", f"{first.label} is clearly"):
        table.add_column(title, justify="right" if title in numbers else "left")
    for entry in found.suggestions:
        settings = ", ".join(f"{name}={value:g}" for name, value in entry.settings.items())
        order = (
            ""
            if entry is first
            else f"ahead in {entry.clear[0]}, behind in {entry.clear[1]} of {entry.shared}"
        )
        missed = f"{entry.missed}/{entry.runs}"
        cells = (f"{entry.ratio:.2f} x", f"{entry.rounds:.0f}", missed, settings, order)
        table.add_row(escape(printable(entry.label)), *map(escape, cells))
    console.print(table)
    if found.tracking is not None and first.tracked is not None:
        console.print(f"\nS~: {found.tracking.text(situation)}", highlight=False, soft_wrap=True)
    console.print("\nIt relies on:", highlight=False)
    for share, evidence in found.evidence:
        console.print(f"- {share:4.0%} {escape(evidence.text)}", highlight=False, soft_wrap=True)
    if not others:
        say("warning: only one method has enough runs near this situation")
    for warning in found.warnings:
        say(f"warning: {warning}")


def show(results: Results, folder: Path, seconds: float | None = None) -> None:
    """Print the table of an experiment and the path of its report."""
    from fadamgc.experiments.report.numbers import CLEARLY_BEST
    from fadamgc.experiments.report.tables import caption, results_table

    terminal().print(results_table(results).to_rich(caption(results), CLEARLY_BEST))
    for reason in chain(*results.damaged.values()):
        say(f"warning: {reason}; the tables omit this run; `fadamgc run --resume` runs it again")
    if results.missing:
        print(f"{results.missing} runs of the spec are missing")
    took = "" if seconds is None else f" ({seconds:.0f} s)"
    print(printable(f"written{took}: {folder / 'report.html'}, with the tables and figures next to it"))
