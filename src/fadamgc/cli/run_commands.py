"""The commands that run experiments."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fadamgc.cli.console import DataRoot, say, terminal, use_data
from fadamgc.cli.show_commands import show
from fadamgc.errors import FadamgcError, InputError, whole

if TYPE_CHECKING:
    from fadamgc.experiments.report.numbers import Results
    from fadamgc.experiments.run.runner import Failure
    from fadamgc.experiments.spec.sections import Spec

# What a command needs beside this is imported when it runs, so that --help is quick.

app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True)
class How:
    """How an experiment is carried out; its numbers do not depend on it."""

    workers: int | None
    quiet: bool
    resume: bool
    overwrite: bool


SpecFile = Annotated[Path, typer.Argument(help="The experiment as a TOML file.", show_default=False)]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for everything that is written.")]
OutOfSpec = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder to write to.", show_default="out/ and the name of the spec"),
]
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
    data_root: DataRoot = None,
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
    from fadamgc.experiments.spec.toml_io import preset as preset_named

    use_data(data_root)
    _use_trackers(track)
    chosen = _adjusted(preset_named(preset), seed, seeds, rounds, methods)
    _experiment(chosen, out, tune, How(workers, quiet, resume, overwrite))


@app.command()
def run(
    spec: SpecFile,
    tune: Tune = False,
    seed: Seed = None,
    seeds: SeedCount = None,
    rounds: Rounds = None,
    methods: Methods = None,
    out: OutOfSpec = None,
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
    from fadamgc.experiments.spec.toml_io import load_spec

    use_data(data_root)
    _use_trackers(track)
    chosen = _adjusted(load_spec(spec), seed, seeds, rounds, methods)
    _experiment(chosen, _folder(out, chosen), tune, How(workers, quiet, resume, overwrite))


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
    from fadamgc.experiments.report.write import write_study_report
    from fadamgc.experiments.run.runner import duration
    from fadamgc.paper.study import load_study, write_study

    use_data(data_root)
    _use_trackers(track)
    study = load_study(name, scale)
    folder = out or Path("out") / f"{name}-{scale}"
    how = How(workers, quiet, resume, overwrite)
    single, began = len(study.cells) == 1, time.perf_counter()
    if not single:
        write_study(study, folder)
    tuned: Spec | None = None
    for number, cell in enumerate(study.ordered(), start=1):
        if not single:
            spent = time.perf_counter() - began
            left = f"; about {duration(spent * study.left(number - 1))} left" if number > 1 else ""
            say(f"{study.name}: {cell.name} ({number} of {len(study.cells)}{left})")
        spec = _adjusted(cell.spec, None, seeds, rounds, methods)
        if tuned is not None:
            spec = spec.with_steps_of(tuned)
        given = all("eta_l" in method.hyperparameters for method in spec.methods)
        searching = (not given if tune is None else tune) and spec.tune is not None and tuned is None
        results = _experiment(spec, folder if single else folder / spec.name, searching, how)
        if study.tune_on == cell.name:
            tuned = results.spec
    if not single:
        for path in write_study_report(folder):
            say(str(path))


@app.command()
def tune(
    spec: SpecFile,
    methods: Methods = None,
    out: OutOfSpec = None,
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
    from fadamgc.experiments.folder import ExperimentFolder
    from fadamgc.experiments.spec.toml_io import load_spec

    use_data(data_root)
    chosen = _adjusted(load_spec(spec), None, None, None, methods)
    folder = _folder(out, chosen)
    with ExperimentFolder(folder).lock():
        _tuned(chosen, folder, How(workers, quiet, resume, overwrite))
    terminal().print(f"{folder / 'tuned.toml'}, {folder / 'tuning.csv'}", highlight=False, soft_wrap=True)


def _use_trackers(names: str) -> None:
    if names:
        from fadamgc.trackers import choose

        choose(names)


# What the commands have in common.


def _folder(out: Path | None, spec: Spec) -> Path:
    return out or Path("out") / Path(spec.name).name


def _adjusted(
    spec: Spec, seed: int | None, seeds: int | None, rounds: int | None, methods: str | None
) -> Spec:
    """The spec with what the command line says."""
    if seeds is not None:
        whole("seeds", seeds, 1)
    first = spec.run.seeds[0] if seed is None else seed
    count = len(spec.run.seeds) if seeds is None else seeds
    all_seeds = spec.run.seeds if seed is None and seeds is None else tuple(range(first, first + count))
    spec = spec.replace("run", rounds=rounds, seeds=all_seeds)
    return spec if methods is None else spec.only(name.strip() for name in methods.split(","))


def _experiment(spec: Spec, out: Path, tune: bool, how: How) -> Results:
    """Run an experiment, after choosing its step sizes if so wished, and show what came of it."""
    from fadamgc.experiments.folder import ExperimentFolder
    from fadamgc.experiments.report.write import write_report
    from fadamgc.experiments.run.runner import check, run_spec
    from fadamgc.experiments.run.workers import check_workers

    began = time.perf_counter()
    check_workers(how.workers)
    check(ExperimentFolder(out).plan(spec), how.workers, how.quiet)  # before a folder is made
    with ExperimentFolder(out).lock():
        if tune:
            spec = _tuned(spec, out, how)
            how = replace(how, resume=True, overwrite=False)  # what the folder holds now is this command's
        failures = run_spec(
            *(spec, out, how.workers, how.quiet, how.resume, how.overwrite),
            tuned=tune,
            checked=not tune,
        )
        try:
            results = write_report(out)
        except InputError:
            _refuse(failures)  # if no run was finished, that is why
            raise
    show(results, out, time.perf_counter() - began)
    _refuse(failures)
    return results


def _tuned(spec: Spec, out: Path, how: How) -> Spec:
    """The spec with the step sizes that its grid gives."""
    from fadamgc.experiments.folder import ExperimentFolder
    from fadamgc.experiments.run.runner import check, write_spec
    from fadamgc.experiments.run.workers import check_workers
    from fadamgc.experiments.spec.sections import STEPS
    from fadamgc.experiments.tune import grid_of, tune, tune_jobs

    check_workers(how.workers)
    check(tune_jobs(spec, grid_of(spec), out), how.workers, how.quiet)
    folder = ExperimentFolder(out)
    if how.resume:
        folder.check_resumable(spec, tuned=True)
    folder.make_ready(how.resume, how.overwrite)
    write_spec(spec, folder)
    tuned = tune(spec, out, how.workers, how.quiet, how.resume, checked=True)
    for method in tuned.spec.methods:
        chosen = ", ".join(f"{key}={method.hyperparameters[key]:g}" for key in STEPS)
        say(f"tuned {method.label}: {chosen}")
    for note in tuned.notes:
        say(f"note: {note}")
    return tuned.spec


def _refuse(failures: tuple[Failure, ...]) -> None:
    if failures:
        raise FadamgcError("\n".join(f"{failure.job}: {failure.error}" for failure in failures))
