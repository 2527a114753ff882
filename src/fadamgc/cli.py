"""The command line. Errors of this package end it with their message alone; tracebacks are defects."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from fadamgc.console import DataRoot, say, terminal, use_data
from fadamgc.data.commands import app as data_app
from fadamgc.errors import FadamgcError, InputError
from fadamgc.flower.commands import app as federation_app

if TYPE_CHECKING:
    from fadamgc.experiments.results import Results
    from fadamgc.experiments.runner import Failure
    from fadamgc.experiments.spec import Spec

# What a command needs beside this is imported when it runs, so that --help is quick.

BAD_INPUT = 2
INTERRUPTED = 130


class Commands(TyperGroup):
    """The group of commands, and the one place where errors become messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except FadamgcError as error:
            from fadamgc.experiments.runner import Interrupted

            if isinstance(error, Interrupted):
                say(str(error))
                raise typer.Exit(INTERRUPTED) from None
            for line in str(error).splitlines():
                say(f"error: {line}")
            raise typer.Exit(BAD_INPUT) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            say(f"error: {where}{error.strerror or error}")
            raise typer.Exit(BAD_INPUT) from None
        except MemoryError:
            say("error: there is not enough memory for this; make the task smaller or use fewer --workers")
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the command ``fadamgc``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no sign for it shows a question mark
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending; a second Ctrl-C has nothing to say
        raise


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fadamgc {version('fadamgc')}")
        raise typer.Exit


@app.callback()
def _fadamgc(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Federated optimisation with adaptive optimizers that do not drift.

    Start with `fadamgc compare`: it runs seven methods on handwritten digits in about a minute, prints a
    table and writes a report page.
    """


Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for everything that is written.")]
Rounds = Annotated[int | None, typer.Option(help="Global rounds, instead of the spec's.", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="The first seed, instead of the spec's.", show_default=False)]
SeedCount = Annotated[
    int | None,
    typer.Option("--seeds", help="How many seeds, counted up from the first.", show_default=False),
]
Methods = Annotated[
    str | None,
    typer.Option(help="Only these methods of the spec, separated by commas.", show_default=False),
]
Workers = Annotated[
    int | None,
    typer.Option(help="Processes; the results do not depend on it.", show_default="one for each core"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the finished runs in the folder and go on.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the experiment in the folder.")]
Track = Annotated[
    str,
    typer.Option(help="Watch the runs with tensorboard or mlflow, or both, separated by a comma."),
]
Tune = Annotated[
    bool,
    typer.Option("--tune", help="Choose the step sizes anew from the spec's grid first; takes much longer."),
]


@app.command()
def compare(
    preset: Annotated[str, typer.Option(help="A comparison that comes with fadamgc.")] = "digits",
    tune: Tune = False,
    seed: Seed = None,
    seeds: SeedCount = None,
    rounds: Rounds = None,
    methods: Methods = None,
    out: Out = Path("out/compare"),
    workers: Workers = None,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    track: Track = "",
) -> None:
    """Compare methods: rounds and simulated minutes to a target accuracy, over several seeds.

    Prints a table and writes into the folder: `report.html` (one page that needs no network),
    `results.csv`, `results.md`, `curves.csv`, `curves.png`, the spec, and the record of every run.

    Examples:

    - `fadamgc compare`
    - `fadamgc compare --methods fadamgc,local_adam --rounds 30 --out out/two`
    - `fadamgc compare --tune --out out/tuned`
    """
    from fadamgc.experiments.reading import preset as preset_named

    _use_trackers(track)
    chosen = _adjusted(preset_named(preset), seed, seeds, rounds, methods)
    _experiment(chosen, out, tune, workers, quiet, resume, overwrite)


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(help="The experiment as a TOML file.", show_default=False)],
    tune: Tune = False,
    seed: Seed = None,
    seeds: SeedCount = None,
    rounds: Rounds = None,
    methods: Methods = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write to.", show_default="out/ and the name of the spec"),
    ] = None,
    workers: Workers = None,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    data_root: DataRoot = None,
    track: Track = "",
) -> None:
    """Run an experiment of your own from a TOML file.

    Every experiment's folder holds its `spec.toml`: run `fadamgc compare --rounds 1`, copy that file,
    and change what you like.

    Examples:

    - `fadamgc run spec.toml`
    - `fadamgc run spec.toml --seed 10 --seeds 2 --out out/again`
    """
    from fadamgc.experiments.reading import load_spec

    use_data(data_root)
    _use_trackers(track)
    chosen = _adjusted(load_spec(spec), seed, seeds, rounds, methods)
    folder = out or Path("out") / Path(chosen.name).name
    _experiment(chosen, folder, tune, workers, quiet, resume, overwrite)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment of the paper's; 'fadamgc list' shows them.")],
    scale: Annotated[
        str, typer.Option(help="laptop: minutes on two cores; paper: the paper's own setting, for a GPU.")
    ] = "laptop",
    tune: Annotated[
        bool | None,
        typer.Option(
            "--tune/--no-tune",
            help="Choose the step sizes from the grid first.",
            show_default="where none are given",
        ),
    ] = None,
    seeds: SeedCount = None,
    rounds: Rounds = None,
    methods: Methods = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write to.", show_default="out/NAME-SCALE"),
    ] = None,
    workers: Workers = None,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    data_root: DataRoot = None,
    track: Track = "",
) -> None:
    """Run one of the paper's experiments, on real data.

    Stop it with Ctrl-C whenever you like; the same command with --resume goes on where it was.

    Examples:

    - `fadamgc reproduce digits`
    - `fadamgc reproduce main-cifar10 --data-root ~/data`
    - `fadamgc reproduce heterogeneity --scale laptop --seeds 2 --resume`
    """
    from fadamgc.experiments.report import write_study_report
    from fadamgc.experiments.runner import duration
    from fadamgc.experiments.study import load_study, write_study

    use_data(data_root)
    _use_trackers(track)
    study = load_study(name, scale)
    folder = out or Path("out") / f"{name}-{scale}"
    single, began = len(study.cells) == 1, time.perf_counter()
    if not single:
        write_study(study, folder)
    steps: dict[str, dict[str, Any]] = {}
    for number, cell in enumerate(study.ordered(), start=1):
        if not single:
            spent = time.perf_counter() - began
            left = f"; about {duration(spent * study.left(number - 1))} left" if number > 1 else ""
            say(f"{study.name}: {cell.name} ({number} of {len(study.cells)}{left})")
        spec = _adjusted(cell.spec, None, seeds, rounds, methods)
        if steps:
            chosen = tuple(m.with_(**steps[m.label]) if m.label in steps else m for m in spec.methods)
            spec = spec.model_copy(update={"methods": chosen})
        given = all("eta_l" in method.hyperparameters for method in spec.methods)
        searching = (not given if tune is None else tune) and spec.tune is not None and not steps
        at = folder if single else folder / spec.name
        results = _experiment(spec, at, searching, workers, quiet, resume, overwrite)
        if study.tune_on == cell.name:
            keys = ("eta_l", "eta_g")
            steps = {
                m.label: {key: m.hyperparameters[key] for key in keys if key in m.hyperparameters}
                for m in results.spec.methods
            }
    if not single:
        for path in write_study_report(folder):
            say(str(path))


@app.command()
def tune(
    spec: Annotated[Path, typer.Argument(help="The experiment as a TOML file.", show_default=False)],
    methods: Methods = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write to.", show_default="out/ and the name of the spec"),
    ] = None,
    workers: Workers = None,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    data_root: DataRoot = None,
) -> None:
    """Choose step sizes from the spec's grid, the same for every method, on held-out train data.

    Writes `tuning.csv`, the whole grid with what came of it, and `tuned.toml`, the spec with the step
    sizes that were chosen. The test data are never looked at.

    Example: `fadamgc tune spec.toml --out out/tuning`
    """
    from fadamgc.experiments.reading import load_spec
    from fadamgc.experiments.runner import only_one

    use_data(data_root)
    chosen = _adjusted(load_spec(spec), None, None, None, methods)
    folder = out or Path("out") / Path(chosen.name).name
    with only_one(folder):
        _tuned(chosen, folder, workers, quiet, resume, overwrite)
    terminal().print(f"{folder / 'tuned.toml'}, {folder / 'tuning.csv'}", highlight=False, soft_wrap=True)


@app.command("list")
def list_() -> None:
    """Show what there is: algorithms with their settings and traffic, presets, tasks, executors."""
    from rich.table import Table

    from fadamgc.algorithms import algorithm_class, algorithms
    from fadamgc.experiments.reading import preset, presets
    from fadamgc.experiments.spec import RUNNABLE, DigitsTask
    from fadamgc.experiments.study import studies
    from fadamgc.sim.cost import traffic
    from fadamgc.sim.executors import EXECUTORS

    console = terminal()
    table = Table(
        title="Algorithms: vectors of the model's size between the server and one client in a round"
    )
    for title in ("name", "title", "down", "up", "up if tracked", "settings and their defaults"):
        table.add_column(title, justify="right" if "up" in title or title == "down" else "left")
    for name in algorithms():
        cls = algorithm_class(name)
        algorithm = cls()  # type: ignore[call-arg]  # every registered algorithm has defaults
        sent = traffic(algorithm, d=1)
        settings = ", ".join(
            f"{f.name}={getattr(algorithm, f.name)!r}" for f in dataclasses.fields(algorithm)
        )
        vectors = [sent.down // 4, sent.up // 4, (sent.up + sent.up_tracked) // 4]
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
        typer.Option("--out", "-o", help="Folder for the common page of several.", show_default="out/report"),
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
    and one table together. A folder of a study stands for the experiments in it.

    Examples:

    - `fadamgc report out/compare`
    - `fadamgc report out/compare --down-mbps 10 --up-mbps 1 --per-round slowest`
    - `fadamgc report out/main-cifar10-laptop out/main-cifar100-laptop --out out/both`
    """
    from fadamgc.experiments.report import write_report, write_reports, write_study_report
    from fadamgc.experiments.runner import SPEC, read_spec
    from fadamgc.experiments.study import read_study

    every: list[Path] = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob(f"*/{SPEC}"))
        every += [folder] if (folder / SPEC).is_file() or not inside else inside
    cost = None
    for folder in every:
        spec = read_spec(folder).replace(
            "cost",
            down_mbps=down_mbps,
            up_mbps=up_mbps,
            seconds_per_step=seconds_per_step,
            latency=latency,
            per_round=per_round,
        )
        cost = spec.cost.model()
        _show(write_report(folder, cost), folder)
    priced = any(v is not None for v in (down_mbps, up_mbps, seconds_per_step, latency, per_round))
    for folder in folders:
        if read_study(folder) is not None:
            for path in write_study_report(folder, cost if priced else None):
                say(str(path))
    if len(folders) > 1 or (len(every) > 1 and read_study(folders[0]) is None):
        common = out or Path("out/report")
        write_reports(every, common, cost if priced else None)
        terminal().print(f"{common / 'report.html'}", highlight=False, soft_wrap=True)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run on texts: OUT/runs/NAME.", show_default=False)],
    text: Annotated[str, typer.Argument(help="What is to be classified.", show_default=False)],
    second: Annotated[
        str | None, typer.Argument(help="The other text, where the data are pairs.", show_default=False)
    ] = None,
) -> None:
    """Show what a trained text classifier says.

    Examples:

    - `fadamgc predict out/main-sst2-laptop/runs/fadamgc-seed0 "a film that never ends"`
    """
    from rich.table import Table

    from fadamgc.experiments.predict import predict as classify

    table = Table("label", "probability")
    for label, share in list(classify(run, text, second).items())[:5]:
        table.add_row(label, f"{share:.1%}")
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
    from fadamgc.experiments.report import keep as copy

    total = copy(folder, to)
    say(f"{to}: {total / 1e6:.1f} MB")


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
) -> None:
    """Draw which client holds which labels.

    Examples:

    - `fadamgc partition`
    - `fadamgc partition --alpha 1 --clients 20 --out mild.png`
    - `fadamgc partition --partition shards --shards-per-client 2`
    """
    import numpy as np

    from fadamgc.data.picture import save_label_picture
    from fadamgc.experiments.build import label_counts
    from fadamgc.experiments.reading import task_spec

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


app.add_typer(data_app, name="data")
app.add_typer(federation_app, name="federation")


def _use_trackers(names: str) -> None:
    if names:
        from fadamgc.trackers import choose

        choose(names)


# What compare and run have in common.


def _adjusted(
    spec: Spec, seed: int | None, seeds: int | None, rounds: int | None, methods: str | None
) -> Spec:
    """The spec with what the command line says."""
    if seeds is not None and seeds < 1:
        raise InputError(f"seeds={seeds} is not accepted; it must be a whole number >= 1")
    first = spec.run.seeds[0] if seed is None else seed
    count = len(spec.run.seeds) if seeds is None else seeds
    all_seeds = spec.run.seeds if seed is None and seeds is None else tuple(range(first, first + count))
    spec = spec.replace("run", rounds=rounds, seeds=all_seeds)
    return spec if methods is None else spec.only(name.strip() for name in methods.split(","))


def _experiment(
    spec: Spec, out: Path, tune: bool, workers: int | None, quiet: bool, resume: bool, overwrite: bool
) -> Results:
    from fadamgc.experiments.report import write_report
    from fadamgc.experiments.runner import check, only_one, plan, run_spec

    began = time.perf_counter()
    check(plan(spec, out), workers)  # before a folder is made
    with only_one(out):
        if tune:
            spec = _tuned(spec, out, workers, quiet, resume, overwrite)
            resume, overwrite = True, False  # what the folder holds now is this command's own
        failures = run_spec(spec, out, workers, quiet, resume, overwrite, tuned=tune)
        try:
            results = write_report(out)
        except InputError:
            _refuse(failures)  # if no run was finished, that is why
            raise
    _show(results, out, time.perf_counter() - began)
    _refuse(failures)
    return results


def _tuned(spec: Spec, out: Path, workers: int | None, quiet: bool, resume: bool, overwrite: bool) -> Spec:
    """The spec with the step sizes that its grid gives."""
    from fadamgc.experiments.pool import check_workers
    from fadamgc.experiments.runner import check, check_same, prepare, write_spec
    from fadamgc.experiments.tune import grid_of, tune, tune_jobs

    check_workers(workers)
    check(tune_jobs(spec, grid_of(spec), out), workers)
    if resume:
        check_same(spec, out, tuned=True)
    prepare(out, resume, overwrite)
    write_spec(spec, out)
    tuned = tune(spec, out, workers, quiet, resume)
    for method in tuned.spec.methods:
        chosen = ", ".join(f"{key}={method.hyperparameters[key]:g}" for key in ("eta_l", "eta_g"))
        say(f"tuned {method.label}: {chosen}")
    for note in tuned.notes:
        say(f"note: {note}")
    return tuned.spec


def _show(results: Results, folder: Path, seconds: float | None = None) -> None:
    from fadamgc.experiments.report import rich_table

    console = terminal()
    console.print(rich_table(results))
    if results.missing:
        console.print(f"{results.missing} runs of the spec are not there", highlight=False)
    took = "" if seconds is None else f" ({seconds:.0f} s)"
    where = f"written{took}: {folder / 'report.html'}, and the tables and figures beside it"
    console.print(where, highlight=False, soft_wrap=True, markup=False)


def _refuse(failures: tuple[Failure, ...]) -> None:
    if failures:
        raise FadamgcError("\n".join(f"{failure.job}: {failure.error}" for failure in failures))
