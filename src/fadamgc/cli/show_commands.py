"""The commands that show what there is, and what came of experiments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fadamgc.cli.console import DataRoot, say, terminal, use_data
from fadamgc.errors import InputError
from fadamgc.escape import printable

if TYPE_CHECKING:
    from fadamgc.experiments.report.numbers import Results

# What a command needs beside this is imported when it runs, so that --help is quick.

app = typer.Typer(rich_markup_mode="markdown")


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `compare`, `run` or `reproduce` has written.",
            metavar="FOLDER...",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder to write to; the given folders are then only read.",
            show_default="each folder itself; out/report for the common page of several",
        ),
    ] = None,
    down_mbps: Annotated[
        float | None, typer.Option(help="Link speed to the clients, in Mbps.", show_default="the spec's")
    ] = None,
    up_mbps: Annotated[
        float | None, typer.Option(help="Link speed to the server, in Mbps.", show_default="the spec's")
    ] = None,
    seconds_per_step: Annotated[
        float | None, typer.Option(help="Time of one local step.", show_default="the spec's")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="Seconds a round beside that.", show_default="the spec's")
    ] = None,
    per_round: Annotated[
        Literal["mean", "slowest"] | None,
        typer.Option(help="A round takes as long as its mean or slowest client.", show_default="the spec's"),
    ] = None,
) -> None:
    """Make all tables, figures and the page again from saved runs, without running anything.

    With options, the same runs are priced for other links and devices. Several folders also get one page
    and one table together. A folder of a study stands for the experiments in it. With --out, the folders
    stay as they are, and each of several experiments has a folder of its name there.

    Examples:

    - `fadamgc report out/compare`
    - `fadamgc report out/compare --down-mbps 10 --up-mbps 1 --per-round slowest --out out/slow`
    - `fadamgc report out/main-cifar10-laptop out/main-cifar100-laptop --out out/both`
    """
    from fadamgc.experiments.folder import SPEC, ExperimentFolder
    from fadamgc.experiments.report.write import write_report, write_reports, write_study_report
    from fadamgc.paper.study import read_study

    every: dict[Path, Path] = {}  # the folder of each experiment, and where its report is written
    places = _places(folders, out)
    for folder, place in places.items():
        read_study(folder)  # refuses one that leads elsewhere
        inside = sorted(path.parent for path in folder.glob(f"*/{SPEC}"))
        if ExperimentFolder(folder).has_experiment or not inside:
            every[folder] = place
        else:
            every |= {path: place / path.name for path in inside}
    cost = None
    for folder, place in every.items():
        spec = (
            ExperimentFolder(folder)
            .read_spec()
            .replace(
                "cost",
                down_mbps=down_mbps,
                up_mbps=up_mbps,
                seconds_per_step=seconds_per_step,
                latency=latency,
                per_round=per_round,
            )
        )
        cost = spec.cost.model()
        show(write_report(folder, cost, None if out is None else place), place)
    priced = any(v is not None for v in (down_mbps, up_mbps, seconds_per_step, latency, per_round))
    for folder, place in places.items():
        if read_study(folder) is not None:
            for path in write_study_report(folder, cost if priced else None, place):
                say(str(path))
    if len(folders) > 1 or (len(every) > 1 and read_study(folders[0]) is None):
        common = out or Path("out/report")
        write_reports(list(every), common, cost if priced else None)
        where = printable(str(common / "report.html"))
        terminal().print(where, highlight=False, soft_wrap=True, markup=False)


def _places(folders: list[Path], out: Path | None) -> dict[Path, Path]:
    """Where the reports of folders go: into the folders, or below ``out``, each of several by its name."""
    if out is None:
        return {folder: folder for folder in folders}
    if len(folders) == 1:
        return {folders[0]: out}
    places: dict[Path, Path] = {}
    for folder in folders:
        name, number = folder.resolve().name, 1
        while out / name in places.values():
            number += 1
            name = f"{folder.resolve().name}-{number}"
        places[folder] = out / name
    return places


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run on texts: OUT/runs/NAME.", show_default=False)],
    text: Annotated[str, typer.Argument(help="What is to be classified.", show_default=False)],
    second: Annotated[
        str | None, typer.Argument(help="The other text, where the data are pairs.", show_default=False)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The base model's folder.", show_default="where it was for the run"),
    ] = None,
) -> None:
    """Show what a trained text classifier says.

    Examples:

    - `fadamgc predict out/main-sst2-laptop/runs/fadamgc-seed0 "a film that never ends"`
    """
    from rich.table import Table
    from rich.text import Text

    from fadamgc.experiments.predict import predict as classify

    table = Table("label", "probability")
    for label, share in list(classify(run, text, second, base).items())[:5]:
        table.add_row(Text(printable(label)), f"{share:.1%}")
    terminal().print(table)


@app.command()
def keep(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that `compare`, `run` or `reproduce` has written.", show_default=False),
    ],
    to: Annotated[Path, typer.Argument(help="Where to copy it.", show_default=False)],
) -> None:
    """Copy an experiment's records, tables and figures, without weights: small enough for git.

    `fadamgc report` makes the rest again from the copy.

    Example: `fadamgc keep out/main-cifar10-laptop results/main-cifar10`
    """
    from fadamgc.experiments.report.write import keep as copy

    total = copy(folder, to)
    say(f"{to}: {total / 1e6:.1f} MB")


@app.command("list")
def list_() -> None:
    """Show what there is: algorithms with their settings and traffic, presets, tasks, executors."""
    from rich.table import Table

    from fadamgc.experiments.spec.sections import RUNNABLE, DigitsTask
    from fadamgc.experiments.spec.toml_io import preset, presets
    from fadamgc.federation.cost import traffic
    from fadamgc.methods import algorithm_class, algorithms
    from fadamgc.paper.study import studies
    from fadamgc.sim.executors import EXECUTORS

    console = terminal()
    table = Table(
        title="Algorithms: vectors of the model's size between the server and one client in a round"
    )
    for title in ("name", "title", "down", "up", "also up if tracked", "settings and their defaults"):
        table.add_column(title, justify="right" if "up" in title or title == "down" else "left")
    for name in algorithms():
        cls = algorithm_class(name)
        algorithm = cls()  # type: ignore[call-arg]  # every registered algorithm has defaults
        sent = traffic(algorithm, d=1)
        settings = ", ".join(
            f"{f.name}={getattr(algorithm, f.name)!r}" for f in dataclasses.fields(algorithm)
        )
        vectors = [sent.down // 4, sent.up // 4, sent.up_tracked // 4]
        table.add_row(name, cls.title, *map(str, vectors), settings)
    console.print(table)
    for name in presets():
        console.print(f"\npreset [bold]{name}[/]: {preset(name).title}", highlight=False)
    for title, names in (
        ("to reproduce", studies()),
        ("tasks", RUNNABLE),
        ("partitions", DigitsTask.PARTITION),
        ("executors", ("auto", *EXECUTORS)),
    ):
        console.print(f"{title}: {', '.join(names)}", highlight=False)


@app.command()
def partition(
    data: Annotated[str, typer.Option(help="Labelled data.")] = "digits",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 50,
    kind: Annotated[
        str, typer.Option("--partition", help="How labels are dealt: dirichlet, iid or shards.")
    ] = "dirichlet",
    alpha: Annotated[
        float | None, typer.Option(help="Concentration of dirichlet; small is skewed.", show_default="0.1")
    ] = None,
    min_size: Annotated[
        int | None, typer.Option(help="Least samples a client, of dirichlet.", show_default="1")
    ] = None,
    shards_per_client: Annotated[
        int | None, typer.Option(help="Shards a client, of shards.", show_default="2")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture.")] = Path("partition.png"),
    data_root: DataRoot = None,
) -> None:
    """Draw which client holds which labels.

    Examples:

    - `fadamgc partition`
    - `fadamgc partition --alpha 1 --clients 20 --out mild.png`
    - `fadamgc partition --partition shards --shards-per-client 2`
    - `fadamgc partition --data cifar10 --data-root ~/data`
    """
    import numpy as np

    from fadamgc.experiments.report.label_plot import save_label_picture
    from fadamgc.experiments.spec.toml_io import task_spec
    from fadamgc.tasks.build import label_counts

    use_data(data_root)
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
        raise InputError(f"data={data!r} has no labels to draw; use --data digits")
    sizes, held = labels.counts.sum(axis=1), (labels.counts > 0).sum(axis=1)
    try:
        save_label_picture(labels.counts, out, title=f"{labels.note} (seed {seed})")
    except OSError as error:
        raise InputError(f"out={str(out)!r} cannot be written: {error.strerror}") from None
    console = terminal()
    console.print(labels.note, highlight=False)
    for what, values in (("samples a client", sizes), ("labels a client", held)):
        console.print(
            f"{what}: least {values.min()}, median {np.median(values):g}, most {values.max()}",
            highlight=False,
        )
    console.print(f"picture: {out}", highlight=False, soft_wrap=True)


def show(results: Results, folder: Path, seconds: float | None = None) -> None:
    """Print the table of an experiment and where the rest of it is."""
    from fadamgc.experiments.report.write import rich_table

    console = terminal()
    console.print(rich_table(results))
    for reasons in results.damaged.values():
        for reason in reasons:
            say(f"warning: {reason}; the tables are without this run, `fadamgc run --resume` makes it again")
    if results.missing:
        console.print(f"{results.missing} runs of the spec are not there", highlight=False)
    took = "" if seconds is None else f" ({seconds:.0f} s)"
    where = f"written{took}: {folder / 'report.html'}, and the tables and figures beside it"
    console.print(printable(where), highlight=False, soft_wrap=True, markup=False)
