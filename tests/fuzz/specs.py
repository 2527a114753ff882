"""Specs, damaged as text and as tables. Some of those that are accepted are run, with their report."""

from __future__ import annotations

import os
import random
import re
import tomllib
from pathlib import Path
from typing import Any

from .harness import Target

WHOLE = 0.1  # of the accepted small specs, those that are run to the end, with their report
RUN = 0.3  # those that are run without

SMALL = {
    "quadratics": 'data = "quadratics"\nclients = 4\ndim = 3\ncondition = 4.0\nspread = 0.5',
    "linear_regression": 'data = "linear_regression"\nclients = 3\ndim = 2\nsamples = [4, 8]\nnoise = 0.1',
    "digits": 'data = "digits"\nclients = 5\npartition = "dirichlet"\nalpha = 0.5\nhidden = [4]',
    "shards": 'data = "digits"\nclients = 5\npartition = "shards"\nshards_per_client = 2\nhidden = []',
    "iid": 'data = "digits"\nclients = 5\npartition = "iid"\nhidden = [3, 3]',
    "cifar10": 'data = "cifar10"\nclients = 3\nmodel = "cnn"\nwidth = 4\nshrink = 4\npartition = "iid"\n'
    'mean = [0.5, 0.5, 0.5]\nstd = [0.2, 0.2, 0.2]\naugment = "crop-flip"\ntrain_samples = 40',
    "uci_har": 'data = "uci_har"\nwidth = 4',
    "glue/sst2": 'data = "glue/sst2"\nclients = 3\npartition = "iid"\nlength = 8\nupper_layers = 1',
}
RUNS = (
    "rounds = 2\nsampled = 2\nlocal_steps = 1\nseeds = [0]\nprivacy = { clip = { dx = 1.0 }, noise = 0.5 }",
    "rounds = 2\nsampled = 2\ntracked = 1\nlocal_steps = 2\nbatch_size = 4\nseeds = [0, 1]",
    'rounds = 2\nsampled = 2\nlocal_steps = 2\nbatch_size = 4\nseeds = [0]\ncodec = { dx = "int8" }',
    'rounds = 3\nlocal_epochs = 1\nbatch_size = 8\nseeds = [3]\ndtype = "float64"\nexecutor = "loop"',
    'rounds = 2\nsampled = 3\nlocal_steps = 1\nseeds = [0]\nweights = "size"\non_nonfinite = "drop"',
    "rounds = 3\nsampled = 2\nlocal_steps = 2\nbatch_size = 4\nseeds = [0, 1]\ntarget = 0.5\neval_every = 2",
)
METHODS = (
    "fadamgc\neta_l = 0.01\nbeta2 = 0.9\ntau = 0.1",
    "fedavg\neta_l = 0.1\neta_g = 1.0",
    'local_adam\neta_l = 0.01\nlabel = "Adam"',
    "scaffold\neta_l = 0.1",
    "scaffold_m\neta_l = 0.1",
    "fedadam\neta_l = 0.1\neta_g = 0.01",
    "fedams\neta_l = 0.1",
    "fa_nt\neta_l = 0.01",
    "fedavg_m\neta_l = 0.1",
)
NUMBERS = (
    *("0", "-1", "1", "2", "3", "0.0", "-0.0", "0.5", "1.0", "1e-320", "1e-30", "1e30", "1e300", "1e308"),
    *("inf", "-inf", "nan", "true", "false", "9007199254740993", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "1" + "0" * 5000, "0x" + "f" * 6000),
    *("1e400", "4294967296", "1_000", "0b101", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"),
)
STRINGS = (
    *("", " ", "x", "\x00", "../evil", "/etc/passwd", "\u202e", "é" * 50, "😀", "{{7*7}}", "%s%s%n", "nan"),
    *(
        "$(id)",
        "\\input{x}",
        "a|b",
        "line\nbreak",
        "\x1b[31m",
        "=1+1",
        "y" * 30_000,
        "NUL",
        ".",
        "-",
        "digits",
    ),
    *("quadratics", "fadamgc", "uniform", "size", "accuracy", "iid", "mean", "error", "drop", "vectorized"),
)
NAMES = (
    *[
        "task",
        "run",
        "cost",
        "tune",
        "method",
        "name",
        "title",
        "data",
        "model",
        "clients",
        "partition",
        "alpha",
        "min_size",
        "hidden",
        "width",
        "norm",
    ],
    *[
        "rounds",
        "sampled",
        "tracked",
        "local_steps",
        "local_epochs",
        "batch_size",
        "codec",
        "aggregation",
        "privacy",
        "seeds",
        "target",
        "stop_at_target",
        "weights",
    ],
    *[
        "eta_l",
        "eta_g",
        "beta1",
        "beta2",
        "eps",
        "tau",
        "label",
        "algorithm",
        "down_mbps",
        "up_mbps",
        "latency",
        "per_round",
        "dim",
        "samples",
    ],
    *[
        "shards_per_client",
        "train_samples",
        "shrink",
        "executor",
        "dtype",
        "measure",
        "spread",
        "condition",
        "noise",
        "search",
        "rank",
    ],
)


def prepare(shared: Path) -> None:
    import sets
    from fadamgc.data.sources import source

    sets.cifar10(shared / "data")
    sets.har(shared / "data")
    sets.texts(shared / "data", source("glue/sst2").name)
    from fadamgc.paper.study import load_study, scales_of, studies

    found = shared / "specs"
    found.mkdir()
    root = Path(__file__).parents[2]
    for name in studies():
        for scale in scales_of(name):
            for i, member in enumerate(load_study(name, scale).members[:2]):
                (found / f"{name}-{scale}-{i}.toml").write_text(member.spec.to_toml())
    blocks = re.findall(r"```toml\n(.*?)```", (root / "docs" / "specs.md").read_text(), re.DOTALL)
    for i, block in enumerate(blocks):
        (found / f"docs-{i}.toml").write_text(block)


def small(r: random.Random) -> str:
    """A spec that takes a moment."""
    name, task = r.choice([item for item in SMALL.items() if item[0] != "glue/sst2" or r.random() < 0.1])
    run = r.choice(RUNS)
    if "target" in run and r.random() < 0.5:
        run += "\nstop_at_target = true"
    methods = "".join(
        f'[[method]]\nalgorithm = "{name}"\n{rest}\n'
        for name, _, rest in (m.partition("\n") for m in r.sample(METHODS, r.choice((1, 1, 2))))
    )
    cost = "[cost]\ndown_mbps = 10\nup_mbps = 1.5\nlatency = 0.01\n" if r.random() < 0.4 else ""
    tune = "[tune]\neta_l = [0.01, 0.1]\neta_g = [1.0]\nrounds = 1\nseeds = [7]\n" if r.random() < 0.2 else ""
    return f'name = "{name.replace("/", "-")}"\n[task]\n{task}\n[run]\n{run}\n{cost}{tune}{methods}'


def any_value(r: random.Random) -> str:
    """A value as TOML has it, or nearly."""
    kind = r.random()
    if kind < 0.5:
        return r.choice(NUMBERS)
    if kind < 0.75:
        return toml_string(r.choice(STRINGS))
    if kind < 0.9:
        return "[" + ", ".join(any_value(r) for _ in range(r.choice((0, 1, 2, 3, 5)))) + "]"
    if kind < 0.96:
        return (
            "{" + ", ".join(f"{r.choice(NAMES)} = {any_value(r)}" for _ in range(r.choice((0, 1, 2)))) + "}"
        )
    deep = r.choice((2, 10, 100, 1000, 5000))
    return r.choice(("[" * deep + "]" * deep, "{a=" * deep + "1" + "}" * deep))


def toml_string(text: str) -> str:
    from fadamgc.toml import toml_value

    return toml_value(text)


def damage_text(r: random.Random, text: str) -> str:
    """One change of the text."""
    lines = text.split("\n")
    i = r.randrange(len(lines))
    match r.randrange(12):
        case 0:
            del lines[i]
        case 1:
            lines.insert(r.randrange(len(lines) + 1), lines[i])
        case 2:
            j = r.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
        case 3 | 4 | 5 | 6:
            keys = [k for k, line in enumerate(lines) if "=" in line]
            if keys:
                k = r.choice(keys)
                lines[k] = f"{lines[k].partition('=')[0]}= {any_value(r)}"
        case 7:
            lines.insert(i, f"{r.choice(NAMES)} = {any_value(r)}")
        case 8:
            lines.insert(
                i, r.choice(("[task]", "[x]", "[[method]]", "[run.x]", "[[task]]", "[", "]", "'", '"""'))
            )
        case 9:
            dots = ".".join(["a"] * r.choice((2, 30, 2000)))
            lines.insert(i, r.choice((f"{dots} = 1", f"[{dots}]", f'"{"k" * 3000}" = 1')))
        case 10:
            text = "\n".join(lines)
            at = r.randrange(len(text) + 1)
            bad = chr(r.choice((0, 7, 34, 39, 61, 91, 93, 123, 0x202E, 0x1F600, r.randrange(32, 127))))
            return text[:at] + bad + text[at + r.randrange(2) :]
        case 11:
            text = "\n".join(lines)
            return text[: r.randrange(len(text) + 1)]
    return "\n".join(lines)


def damage_tables(r: random.Random, text: str) -> str:
    """Values of one spec exchanged with others, from its tables."""
    from fadamgc.toml import toml_value

    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError):
        return text
    sections: list[tuple[str, dict[str, Any]]] = [
        (f"[{key}]", value) for key, value in tables.items() if isinstance(value, dict)
    ]
    methods = tables.get("method", [])
    sections += [
        ("[[method]]", m) for m in (methods if isinstance(methods, list) else []) if isinstance(m, dict)
    ]
    if not sections:
        return text
    _, chosen = r.choice(sections)
    _, other = r.choice(sections)
    key = r.choice([*chosen, *NAMES]) if chosen else r.choice(NAMES)
    match r.randrange(4):
        case 0:
            chosen.pop(key, None)
        case 1:
            chosen[key] = r.choice(list(other.values()) or [0])
        case 2:
            chosen[r.choice(NAMES)] = chosen.get(key, 1)
        case 3:
            chosen[key] = [chosen.get(key, 1)] * r.choice((0, 1, 2, 5))
    try:
        parts = [f"{key} = {toml_value(v)}" for key, v in tables.items() if not isinstance(v, (dict, list))]
        for header, section in sections:
            parts += [
                header,
                *(f"{k} = {toml_value(v)}" for k, v in section.items() if not isinstance(v, dict)),
            ]
    except (ValueError, RecursionError):  # an integer that Python does not write, lists in lists in lists
        return text
    return "\n".join(parts)


def is_small(spec: Any) -> bool:
    """Whether it takes a few seconds at the most."""
    from fadamgc.tasks.sections import CustomTask, DigitsTask, ImagesTask, TextTask

    task, run = spec.task, spec.run
    if isinstance(task, CustomTask) or (isinstance(task, ImagesTask) and task.data != "cifar10"):
        return False
    if isinstance(task, TextTask) and (task.data != "glue/sst2" or task.model != "minilm"):
        return False
    if (getattr(task, "width", None) or 0) > 16 or (getattr(task, "length", 0)) > 32:
        return False
    if isinstance(task, ImagesTask) and task.model == "resnet18":
        return False
    if isinstance(task, DigitsTask) and (sum(task.hidden) > 300 or len(task.hidden) > 5):
        return False
    samples = getattr(task, "samples", 1)
    samples = max(samples) if isinstance(samples, tuple) else samples
    if task.clients > 60 or getattr(task, "dim", 1) > 100 or samples > 1000:
        return False
    steps = run.local_steps or (run.local_epochs or 1) * 20
    clients = min(run.sampled or task.clients, task.clients)
    return len(spec.methods) <= 3 and run.rounds * len(run.seeds) * steps * clients <= 400


def case(r: random.Random, shared: Path, folder: Path) -> str:
    from fadamgc.errors import FadamgcError
    from fadamgc.experiments.spec.toml_io import load_spec

    given = r.choice(sorted((shared / "specs").iterdir()))
    text = small(r) if r.random() < 0.6 else given.read_text()
    for _ in range(r.choice((0, 1, 1, 1, 2, 3, 6))):
        text = (damage_text if r.random() < 0.7 else damage_tables)(r, text)
    path = folder / "spec.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if os.environ.get("FUZZ_SHOW"):
        print(text[:3000])
    spec = load_spec(path)
    if not is_small(spec):
        return "accepted"
    choice = r.random()
    if choice < WHOLE:
        return commands(r, path, shared / "data", folder / "out", spec.tune is not None)
    if choice < WHOLE + RUN:
        from fadamgc.experiments.run.runner import run_spec

        os.environ["FADAMGC_DATA"] = str(shared / "data")
        os.environ["FADAMGC_CACHE"] = str(shared / "cache")
        try:
            run_spec(spec, folder / "out", workers=1, quiet=True)
        except FadamgcError:
            return "refused"
        return "run"
    return "accepted"


def commands(r: random.Random, path: Path, data: Path, out: Path, tune: bool) -> str:
    """The spec at the command line: run, and a report again."""
    options = ["--workers", "1", "--quiet", "--data-root", str(data), "--out", str(out)]
    if tune and r.random() < 0.5:
        options.append("--tune")
    code = command("run", str(path), *options)
    if code == 0:
        code = command("report", str(out), *(["--up-mbps", "3"] if r.random() < 0.5 else []))
    return "refused" if code else "reported"


def command(*arguments: str) -> int:
    """The command line in this process; an error that is no message is raised."""
    from typer.testing import CliRunner

    from fadamgc.cli.main import app

    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code and not result.output.strip():
        raise AssertionError(f"exit code {result.exit_code} without a message")
    if os.environ.get("FUZZ_SHOW"):
        print(result.output[-3000:])
    return result.exit_code


TARGET = Target("specs", prepare, case)
