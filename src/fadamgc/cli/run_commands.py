"""The commands that run experiments."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fadamgc.cli.console import DataRoot, argument, option, say, use_data
from fadamgc.cli.show_commands import show
from fadamgc.errors import FadamgcError, InputError, whole

if TYPE_CHECKING:
    from fadamgc.experiments.folder import ExperimentFolder
    from fadamgc.experiments.report.numbers import Results
    from fadamgc.experiments.run.ray_tasks import RayTasks
    from fadamgc.experiments.run.runner import Failure, Runner
    from fadamgc.experiments.spec.sections import Spec

# A command imports the rest when it runs, so that --help is quick.

app = typer.Typer(rich_markup_mode="markdown")


SpecFile = Annotated[Path, argument("The experiment, a TOML file.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")]
OutOfSpec = Annotated[
    Path | None, option("Folder to write to.", "--out", "-o", default="out/NAME, with the name in the spec")
]
Rounds = Annotated[int | None, option("Number of rounds, instead of the spec's.")]
Seed = Annotated[int | None, option("The first seed, instead of the spec's.")]
SeedCount = Annotated[int | None, option("Number of seeds, starting with the first seed.", "--seeds")]
Methods = Annotated[str | None, option("Run only these methods of the spec, separated by commas.")]
Codec = Annotated[
    str | None,
    option("How fields of messages are sent, such as y=int8,dy=int8; instead of the spec's [run] codec."),
]
Workers = Annotated[
    int | None, option("Number of processes; it does not change the results.", default="one per core")
]
Device = Annotated[
    str | None,
    option("Where to compute: auto, cpu, cuda, cuda:1, mps; several workers share the GPUs.", default="auto"),
]
Ray = Annotated[
    str | None,
    option(
        "Run on a Ray cluster: its address, or auto for the one on this machine or a new one.",
        default="no cluster",
    ),
]
RayCpus = Annotated[float, typer.Option(help="CPUs of one run on the Ray cluster.")]
RayGpus = Annotated[float, typer.Option(help="GPUs of one run on the Ray cluster, such as 1 or 0.5.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep finished runs in the folder and run the rest.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the experiment in the folder.")]
Track = Annotated[
    str,
    typer.Option(help="Track the runs with tensorboard, mlflow or wandb, or several, separated by commas."),
]
SaveModels = Annotated[
    Literal["last", "best"] | None,
    option("Keep the model of the last or the best round of each run.", default="no models"),
]
Tune = Annotated[
    bool, typer.Option("--tune", help="First choose the step sizes from the spec's grid; takes much longer.")
]


@app.command()
def compare(
    preset: Annotated[
        str, typer.Option(help="Name of a comparison in the package; `fadamgc list` shows all of them.")
    ] = "digits",
    tune: Tune = False,
    seed: Seed = None,
    seeds: SeedCount = None,
    rounds: Rounds = None,
    methods: Methods = None,
    codec: Codec = None,
    out: Out = Path("out/compare"),
    workers: Workers = None,
    device: Device = None,
    ray: Ray = None,
    ray_cpus: RayCpus = 1,
    ray_gpus: RayGpus = 0,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    data_root: DataRoot = None,
    track: Track = "",
    save_models: SaveModels = None,
) -> None:
    """Compare methods: rounds and simulated minutes to a target accuracy, over several seeds.

    Prints a table, and writes to the folder: `report.html` (a page that works offline), `results.csv`,
    `results.md`, `curves.csv`, `curves.png`, the spec, and the record of every run.

    Examples:

    - `fadamgc compare`
    - `fadamgc compare --methods fadamgc,local_adam --rounds 30 --out out/two`
    - `fadamgc compare --tune --out out/tuned`
    """
    from fadamgc.experiments.spec.toml_io import preset as preset_named

    cluster = _prepare(data_root, track, ray, ray_cpus, ray_gpus)
    spec = _adjusted(preset_named(preset), seed, seeds, rounds, methods, device, codec)
    _run_and_report(spec, out, tune, workers, cluster, quiet, resume, overwrite, save_models)


@app.command()
def run(
    spec: SpecFile,
    tune: Tune = False,
    seed: Seed = None,
    seeds: SeedCount = None,
    rounds: Rounds = None,
    methods: Methods = None,
    codec: Codec = None,
    out: OutOfSpec = None,
    workers: Workers = None,
    device: Device = None,
    ray: Ray = None,
    ray_cpus: RayCpus = 1,
    ray_gpus: RayGpus = 0,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    data_root: DataRoot = None,
    track: Track = "",
    save_models: SaveModels = None,
) -> None:
    """Run your own experiment from a TOML file.

    The folder of every experiment contains its `spec.toml`: run `fadamgc compare --rounds 1`, copy that
    file, and edit it.

    Examples:

    - `fadamgc run spec.toml`
    - `fadamgc run spec.toml --seed 10 --seeds 2 --out out/again`
    """
    from fadamgc.experiments.spec.toml_io import load_spec

    cluster = _prepare(data_root, track, ray, ray_cpus, ray_gpus)
    experiment = _adjusted(load_spec(spec), seed, seeds, rounds, methods, device, codec)
    folder = out or Path("out", experiment.name)
    _run_and_report(experiment, folder, tune, workers, cluster, quiet, resume, overwrite, save_models)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="Name of a study of the paper; `fadamgc list` shows all.")],
    scale: Annotated[
        str,
        typer.Option(
            help="laptop: minutes on two cores; desk: hours on two cores, nearer to the paper; "
            "paper: the setting of the paper, for a GPU."
        ),
    ] = "laptop",
    tune: Annotated[
        bool | None,
        option(
            "First choose the step sizes from the grid.", "--tune/--no-tune", default="if the study has none"
        ),
    ] = None,
    seeds: SeedCount = None,
    rounds: Rounds = None,
    methods: Methods = None,
    codec: Codec = None,
    out: Annotated[
        Path | None, option("Folder to write to.", "--out", "-o", default="out/NAME-SCALE")
    ] = None,
    workers: Workers = None,
    device: Device = None,
    ray: Ray = None,
    ray_cpus: RayCpus = 1,
    ray_gpus: RayGpus = 0,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    data_root: DataRoot = None,
    track: Track = "",
    save_models: SaveModels = None,
) -> None:
    """Run one of the paper's studies, on real data.

    You can stop the command with Ctrl-C at any time; the same command with --resume continues.

    Examples:

    - `fadamgc reproduce digits`
    - `fadamgc reproduce main-cifar10 --data-root ~/data`
    - `fadamgc reproduce heterogeneity --scale laptop --seeds 2 --resume`
    """
    from fadamgc.escape import duration
    from fadamgc.paper.study import load_study, write_study, write_study_report

    cluster = _prepare(data_root, track, ray, ray_cpus, ray_gpus)
    study = load_study(name, scale)
    folder = out or Path("out") / f"{name}-{scale}"
    single, began = len(study.members) == 1, time.perf_counter()
    if not single:
        write_study(study, folder)
    tuned: Spec | None = None
    for number, member in enumerate(study.ordered(), start=1):
        if not single:
            spent = time.perf_counter() - began
            left = f"; about {duration(spent * study.left(number - 1))} left" if number > 1 else ""
            say(f"{study.name}: {member.name} ({number} of {len(study.members)}{left})")
        spec = _adjusted(member.spec, None, seeds, rounds, methods, device, codec)
        if tuned is not None:
            spec = spec.with_steps_of(tuned)
        has_steps = all("eta_l" in method.hyperparameters for method in spec.methods)
        search = (not has_steps if tune is None else tune) and spec.tune is not None and tuned is None
        target = folder if single else folder / spec.name
        results = _run_and_report(
            spec, target, search, workers, cluster, quiet, resume, overwrite, save_models
        )
        if study.tune_on == member.name:
            tuned = results.spec
    if not single:
        for path in write_study_report(folder):
            say(str(path))


@app.command()
def tune(
    spec: SpecFile,
    methods: Methods = None,
    codec: Codec = None,
    out: OutOfSpec = None,
    workers: Workers = None,
    device: Device = None,
    ray: Ray = None,
    ray_cpus: RayCpus = 1,
    ray_gpus: RayGpus = 0,
    quiet: Quiet = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    data_root: DataRoot = None,
) -> None:
    """Choose step sizes on held-out train data, from a grid that is the same for every method.

    Writes `tuning.csv`, the results of the whole grid, and `tuned.toml`, the spec with the chosen step
    sizes. The test data are never used.

    Example: `fadamgc tune spec.toml --out out/tuning`
    """
    from fadamgc.experiments.folder import TUNED_SPEC, TUNING_TABLE, ExperimentFolder
    from fadamgc.experiments.run.runner import Runner
    from fadamgc.experiments.spec.toml_io import load_spec
    from fadamgc.experiments.tune import tuning_plan

    cluster = _prepare(data_root, "", ray, ray_cpus, ray_gpus)
    experiment = _adjusted(load_spec(spec), None, None, None, methods, device, codec)
    folder = ExperimentFolder(out or Path("out", experiment.name))
    runner = Runner(workers, quiet, ray=cluster)
    runner.check(tuning_plan(experiment, folder.path))
    with folder.lock():
        _tuned(experiment, folder, runner, resume, overwrite)
    print(f"{folder.path / TUNED_SPEC}, {folder.path / TUNING_TABLE}")


def _prepare(
    data_root: Path | None, trackers: str, ray: str | None, ray_cpus: float, ray_gpus: float
) -> RayTasks | None:
    """Set the environment of a command; return the cluster that its runs are executed on."""
    use_data(data_root)
    if trackers:
        from fadamgc.trackers import track_with

        track_with(trackers)
    if ray is None:
        return None
    from fadamgc.experiments.run.ray_tasks import RayTasks

    return RayTasks.of(ray, ray_cpus, ray_gpus)


def _adjusted(
    spec: Spec,
    seed: int | None,
    seeds: int | None,
    rounds: int | None,
    methods: str | None,
    device: str | None,
    codec: str | None,
) -> Spec:
    """Change a spec by the options of the command line."""
    if seeds is not None:
        whole("seeds", seeds, 1)
    first = spec.run.seeds[0] if seed is None else seed
    count = len(spec.run.seeds) if seeds is None else seeds
    all_seeds = spec.run.seeds if seed is None and seeds is None else tuple(range(first, first + count))
    if methods is not None:
        spec = spec.only(name.strip() for name in methods.split(","))
    return spec.replace("run", rounds=rounds, seeds=all_seeds, device=device, codec=codec)


def _run_and_report(
    spec: Spec,
    out: Path,
    tune: bool,
    workers: int | None,
    ray: RayTasks | None,
    quiet: bool,
    resume: bool,
    overwrite: bool,
    save_models: Literal["last", "best"] | None,
) -> Results:
    """Run an experiment, with ``tune`` after choosing its step sizes, and print its table."""
    from fadamgc.experiments.folder import ExperimentFolder
    from fadamgc.experiments.report.write import write_report
    from fadamgc.experiments.run.runner import Runner, run_spec
    from fadamgc.experiments.tune import tuning_plan

    began = time.perf_counter()
    folder = ExperimentFolder(out)
    runner = Runner(workers, quiet, save_models, ray)
    runner.check(folder.plan(spec))  # before the folder is made
    if tune:
        runner.check(tuning_plan(spec, out))
    with folder.lock():
        if tune:
            with runner.before(folder.plan(spec)):
                spec = _tuned(spec, folder, runner, resume, overwrite)
            resume, overwrite = True, False  # the folder now has the experiment of this command
        failures = run_spec(spec, out, resume=resume, overwrite=overwrite, tuned=tune, runner=runner)
        try:
            results = write_report(out)
        except InputError:
            _raise(failures)  # if no run finished, the failures are the reason
            raise
    show(results, out, time.perf_counter() - began)
    _raise(failures)
    return results


def _tuned(spec: Spec, folder: ExperimentFolder, runner: Runner, resume: bool, overwrite: bool) -> Spec:
    """Choose the step sizes of a spec from its grid."""
    from fadamgc.experiments.run.runner import open_folder
    from fadamgc.experiments.tune import tune

    with open_folder(folder, spec, resume, overwrite, tuned=True):
        tuned = tune(spec, folder.path, resume=resume, runner=runner)
    for method in tuned.spec.methods:
        say(f"tuned {method.label}: {tuned.chosen[method.label]}")
    for note in tuned.notes:
        say(f"note: {note}")
    return tuned.spec


def _raise(failures: tuple[Failure, ...]) -> None:
    if failures:
        raise FadamgcError("\n".join(f"{failure.run}: {failure.error}" for failure in failures))
