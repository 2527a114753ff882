"""The command line as a user meets it: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command import fadamgc, hear_interrupts, process
from fadamgc.cli.main import app
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.run import execution
from fadamgc.experiments.run.ray_tasks import RayTasks
from fadamgc.methods import algorithms

TINY = """
name = "tiny"
[task]
data = "digits"
hidden = [8]
clients = 6
alpha = 1.0
[run]
rounds = 2
sampled = 3
tracked = 2
local_steps = 2
batch_size = 8
seeds = [0, 1]
target = 0.05
executor = "loop"
[tune]
eta_l = [1e-9, 0.01]
eta_g = [1.0]
seeds = [7]
rounds = 12
[[method]]
algorithm = "local_adam"
[[method]]
algorithm = "fadamgc"
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "spec.toml").write_text(TINY)
    result = fadamgc("run", folder / "spec.toml", "--out", folder / "out", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "[4/4] FAdamGC, seed 1: 2 rounds, accuracy" in result.stderr  # no terminal: a line a run
    assert "Rounds to 5 %" in result.stdout
    assert "report.html" in result.stdout
    return folder / "out"


# What it does.


def test_too_little_memory_is_a_message(monkeypatch):
    def fail():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(sys.modules["fadamgc.methods"], "algorithms", fail)
    shown = CliRunner().invoke(app, ["list"])
    assert shown.exit_code == 2
    assert "there is not enough memory" in shown.output


def test_help_and_version_say_what_a_stranger_needs():
    top = fadamgc("--help")
    assert top.exit_code == 0
    for command in ("compare", "run", "list", "report", "partition"):
        assert command in top.stdout
        text = fadamgc(command, "--help").stdout
        assert command == "list" or f"fadamgc {command}" in text
    assert re.fullmatch(r"fadamgc \d+\.\d+\.\d+\n", fadamgc("--version").stdout)


def test_list_shows_every_algorithm_with_what_it_sends():
    text = fadamgc("list").stdout
    row = next(line for line in text.splitlines() if re.search(r"\bfadamgc\b", line))
    assert re.search(r"\W2\W+1\W+1\W", row)  # x, y down; dx up; and also dy if tracked
    assert "…" not in text
    for name in algorithms():
        assert name in text
    for name in ("digits", "scaffold_m", "dirichlet", "vectorized"):
        assert name in text


def test_list_shows_an_algorithm_with_its_rule_and_settings():
    text = fadamgc("list", "fadamgc").stdout
    assert "FAdamGC" in text
    assert "beta2=0.99" in text
    assert "g_hat" in text
    assert "adamw" in fadamgc("list", "compose").stdout
    refused = fadamgc("list", "fadam")
    assert refused.exit_code == 2
    assert "did you mean" in refused.stderr


def test_list_as_json():
    found = {one["name"]: one for one in json.loads(fadamgc("list", "--json").stdout)}
    assert tuple(found) == algorithms()
    assert found["fadamgc"]["vectors"] == {"down": 2, "up": 1, "tracked": 1}
    assert found["fadamgc"]["settings"]["beta2"] == 0.99
    assert found["mtgc"]["needs"] == ["all clients", "groups"]


@pytest.mark.slow
def test_run_writes_everything_and_the_options_change_the_spec(spec, tmp_path):
    out = tmp_path / "out"
    options = ("--seed", 5, "--seeds", 1, "--rounds", 1, "--methods", "fadamgc", "--workers", 1, "--quiet")
    result = fadamgc("run", spec, "--out", out, *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert [p.name for p in (out / "runs").iterdir()] == ["fadamgc-seed5"]
    written = {p.name for p in out.iterdir()}
    assert {"spec.toml", "partition.png", "results.csv", "results.md", "curves.csv", "report.html"} <= written
    assert {"rounds.png", "minutes.png", "curves.png"} <= written
    assert "rounds = 1\n" in (out / "spec.toml").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_tuning_from_the_command_line(spec, tmp_path):
    out = tmp_path / "out"
    spec.write_text(TINY.replace("target = 0.05", "target = 0.9"))
    result = fadamgc("run", spec, "--tune", "--rounds", 1, "--out", out, "--workers", 1, "--quiet")
    assert result.exit_code == 0, result.output
    assert "tuned FAdamGC: eta_l=0.01, eta_g=1\n" in result.stderr
    assert "note: FAdamGC: eta_l=0.01 is at the high end of the grid\n" in result.stderr
    assert (out / "tuning.csv").exists()
    assert (out / "tuned.toml").read_text() == (out / "spec.toml").read_text()
    assert "eta_l = 0.01" in (out / "spec.toml").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_the_folder_asks_what_to_do_with_what_it_holds(done):
    again = ("run", done / "spec.toml", "--out", done, "--workers", 1)
    refused = fadamgc(*again)
    assert refused.exit_code == 2
    assert "already has an experiment; --resume continues it, --overwrite replaces it" in refused.stderr
    resumed = fadamgc(*again, "--resume")
    assert resumed.exit_code == 0
    assert "[" not in resumed.stderr  # no run was made again


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_report_prices_the_same_runs_for_other_links(done):
    def minutes() -> list[float]:
        rows = (done / "results.csv").read_text().splitlines()
        column = rows[0].split(",").index("minutes_mean")
        return [float(row.split(",")[column]) for row in rows[1:]]

    before = minutes()
    runs = {p: p.read_bytes() for p in (done / "runs").rglob("*") if p.is_file()}
    free = ("--down-mbps", "inf", "--up-mbps", "inf", "--seconds-per-step", 30, "--per-round", "slowest")
    assert fadamgc("report", done, *free).exit_code == 0
    assert minutes() == [1.0, 1.0]  # a round of two steps
    assert "its slowest client" in (done / "results.md").read_text()
    assert fadamgc("report", done).exit_code == 0
    assert minutes() == before != [1.0, 1.0]
    assert {p: p.read_bytes() for p in runs} == runs


def test_partition_draws_and_tells(tmp_path):
    out = tmp_path / "labels.png"
    result = fadamgc("partition", "--clients", 7, "--alpha", 0.5, "--seed", 3, "--out", out)
    assert result.exit_code == 0, result.output
    assert "Dirichlet(0.5) over 7 clients" in result.stdout
    assert "samples per client: least" in result.stdout
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_each_task_is_built_once_and_each_method_checked_once(spec, tmp_path, monkeypatch):
    from fadamgc.experiments.run import execution, runner

    built, build = [], execution.build_task
    monkeypatch.setattr(execution, "build_task", lambda *a: built.append(a[1:]) or build(*a))
    checked, dry_run = [], runner.dry_run
    monkeypatch.setattr(runner, "dry_run", lambda *a: checked.append(a[0].name) or dry_run(*a))

    def command(name, *options):
        built.clear()
        checked.clear()
        result = fadamgc(name, spec, "--out", tmp_path / str(len(list(tmp_path.iterdir()))), *options)
        assert result.exit_code == 0, result.output
        return result.stderr

    said = command("run", "--rounds", 1, "--workers", 1)
    assert said.startswith("preparing digits ...\nchecking 2 methods ...\n")
    assert sorted(built) == [(0, 0.0), (1, 0.0)]
    assert checked == ["LocalAdam, seed 0", "FAdamGC, seed 0"]
    assert command("run", "--rounds", 1, "--seeds", 1, "--workers", 1, "-q") == ""
    said = command("run", "--rounds", 1, "--seeds", 1, "--workers", 1, "--tune")
    assert said.count("checking") == 2
    assert sorted(built) == [(0, 0.0), (7, 0.25)]
    assert len(checked) == 4  # two methods, on the test data and on held-out data
    command("tune", "--workers", 1)
    assert built == [(7, 0.25)]
    command("run", "--rounds", 1, "--seeds", 1, "--workers", 2)
    assert built == [(0, 0.0)]  # and once in each worker
    monkeypatch.setattr(execution, "CACHED", 0)
    command("run", "--rounds", 1, "--seeds", 1, "--workers", 1)
    assert built == [(0, 0.0)] * 3  # where memory is short: for the check, and for each run


@pytest.mark.parametrize(
    "words", [("run",), ("run", "--tune"), ("tune",), ("reproduce", "digits"), ("compare",)], ids=" ".join
)
@pytest.mark.usefixtures("without_figures")
def test_every_command_gives_its_runs_to_a_cluster(spec, tmp_path, monkeypatch, words):
    from fadamgc.experiments.run import workers

    asked = []

    def on_ray(plan, options, listener):
        asked.append(options)
        workers.run_all(plan, 1, execution.TaskCache(), listener)

    monkeypatch.setattr(workers, "run_on_ray", on_ray)
    command, *more = words
    if command in ("run", "tune"):
        more = [spec, *more]
    if command != "tune":
        more += ["--rounds", 1, "--seeds", 1]
    cluster = ["--ray", "10.0.0.1:6379", "--ray-cpus", 2, "--ray-gpus", 0.5]
    result = fadamgc(command, *more, "--methods", "fadamgc", *cluster, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert asked == [RayTasks("10.0.0.1:6379", 2, 0.5)] * (2 if "--tune" in words else 1)


# What it refuses.

REFUSED = {
    "unknown key": (
        "local_steps",
        "local_step",
        "[run] has no key 'local_step'; did you mean 'local_steps'?",
    ),
    "bad TOML": ("[run]", "[run", "spec.toml: not TOML"),
    "tracked > sampled": ("tracked = 2", "tracked = 4", "error: tracked=4 exceeds sampled=3"),
    "sampled > clients": ("sampled = 3", "sampled = 7", "error: sampled=7 exceeds clients=6"),
    "K = 0": ("local_steps = 2", "local_steps = 0", "[run] local_steps=0 is not accepted"),
    "unknown algorithm": ('"fadamgc"', '"fadamg"', "'fadamg' is not known; did you mean 'fadamgc'?"),
    "too many clients": ("clients = 6", "clients = 2000", "clients=2000"),
}


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_spec_ends_with_the_reason(spec, tmp_path, old, new, message):
    spec.write_text(TINY.replace(old, new, 1))
    result = fadamgc("run", spec, "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 2
    assert message in result.stderr
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


COMMANDS = {
    "missing file": (("run", "none.toml"), "none.toml does not exist"),
    "a folder as spec": (("run", "."), "cannot be read"),
    "unknown preset": (("compare", "--preset", "digts"), "'digts' is not known; did you mean 'digits'?"),
    "unknown method": (("compare", "--methods", "fadam"), "method 'fadam' is not in the spec; did you mean"),
    "no rounds": (("compare", "--rounds", 0), "[run] rounds=0 is not accepted"),
    "no seeds": (("compare", "--seeds", 0), "seeds=0 is not accepted"),
    "negative seed": (("compare", "--seed", -1), "seeds[0]=-1 is not accepted"),
    "both flags": (("compare", "--resume", "--overwrite"), "both given"),
    "no experiment": (("report", "."), "has no spec.toml"),
    "unknown partition": (("partition", "--partition", "diri"), 'partition="diri" is not accepted'),
    "no labels": (
        ("partition", "--data", "quadratics"),
        "[task] with data='quadratics' has no key 'partition'",
    ),
    "no picture format": (("partition", "--out", "a.xyz"), "accepted are"),
}


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS.keys())
def test_a_bad_command_ends_with_the_reason(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = fadamgc(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "out"])


def test_a_folder_that_cannot_be_used_ends_with_the_reason(spec, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").write_text("mine")
    for out, message in (
        (taken, "has other files and no experiment"),
        (spec, "is a file; give a folder"),
        (spec / "below", "cannot be written"),
        ("/proc/nothing", "cannot be written"),
    ):
        result = fadamgc("run", spec, "--out", out)
        assert result.exit_code == 2
        assert message in result.stderr
    assert (taken / "thesis.tex").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_a_run_that_diverges_is_named_after_the_table(spec, tmp_path):
    spec.write_text(TINY + 'eta_l = 1e30\n[[method]]\nalgorithm = "fedavg"\neta_l = 1e30')
    out = tmp_path / "out"
    result = fadamgc("run", spec, "--out", out, "--workers", 1, "--quiet", "--methods", "local_adam,fedavg")
    assert result.exit_code == 2
    assert "error: FedAvg, seed 0: client" in result.stderr
    assert "LocalAdam" in result.stdout
    assert re.search(r"FedAvg\W+diverged\W+diverged\W+diverged", result.stdout)
    assert "runs of the spec are missing" not in result.stdout


# In a process of its own.


@pytest.mark.slow
def test_the_shell_sees_a_message_and_an_exit_code(tmp_path):
    child = process("run", tmp_path / "none.toml")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert out == ""
    assert err == f"error: {tmp_path / 'none.toml'} does not exist; give the path of a spec in TOML\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_keeps_finished_runs_and_says_how_to_resume(spec, tmp_path, workers):
    options = ("--seeds", 1000, "--out", tmp_path / "out", "--workers", workers)
    child = process("run", spec, *options, start_new_session=True, preexec_fn=hear_interrupts)
    try:
        seen = [child.stderr.readline() for _ in range(5)]
        os.killpg(child.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        out, err = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    assert seen[4].startswith("[3/2000] LocalAdam, seed ")
    assert child.returncode == 130
    assert "Traceback" not in out + err
    said = re.search(
        r"^stopped; (\d+) of 2000 runs are saved, and the same command with --resume continues$", err, re.M
    )
    assert said
    assert len(list(tmp_path.glob("out/runs/*/run.json"))) >= int(said[1]) >= 3


# What a mistake must not cost.


@pytest.mark.slow
def test_a_refused_command_overwrites_nothing(done, spec, tmp_path):
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    plain = tmp_path / "plain.toml"
    plain.write_text(TINY.split("[tune]")[0] + "[[method]]" + TINY.split("[[method]]", 1)[1])
    for arguments in ((spec, "--workers", 0), (spec, "--workers", 0, "--tune"), (plain, "--tune")):
        result = fadamgc("run", *arguments, "--out", done, "--overwrite")
        assert result.exit_code == 2
        assert "workers=0" in result.stderr or "no [tune] section" in result.stderr
    result = fadamgc("run", spec, "--out", done, "--resume", "--rounds", 1)
    assert result.exit_code == 2
    assert "[run] rounds=2 there, 1 here" in result.stderr
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file()} == before


def test_if_all_runs_diverge_the_reason_is_printed(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(TINY.split("[[method]]")[0] + '[[method]]\nalgorithm = "fedavg"\neta_l = 1e30\n')
    result = fadamgc("run", path, "--out", tmp_path / "out", "--workers", 1, "--quiet")
    assert result.exit_code == 2
    assert re.search(r"FedAvg, seed 0: client \d+ produced a non-finite update in round 1", result.stderr)


@pytest.mark.slow
def test_names_with_brackets_are_names(tmp_path):
    path = tmp_path / "spec.toml"
    text = TINY.replace('name = "tiny"', 'name = "tiny"\ntitle = "[/x] [bold]"')
    path.write_text(text.replace('algorithm = "fadamgc"', 'algorithm = "fadamgc"\nlabel = "[/y]"'))
    result = fadamgc("run", path, "--out", tmp_path / "out", "--workers", 1)
    assert result.exit_code == 0
    assert "[/x] [bold]" in result.stdout
    assert "[/y]" in result.stdout


@pytest.mark.slow
def test_a_terminal_that_cannot_print_some_characters(done):
    child = process("report", done, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "Rounds to 5 %" in out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [0, 1]", "seeds = [36893488147419103232]", "seeds"),
        ('name = "tiny"', 'name = ".."', "it names a folder"),
        ('name = "tiny"', 'name = "a/b"', "it names a folder"),
        ("hidden = [8]", "hidden = [100000000000000]", "hidden=[100000000000000] is too large"),
        ("[[method]]", "[cost]\nlatency = 1e308\n[[method]]", "latency=1e+308"),
        ("seeds = [0, 1]", "seeds = 3", "seeds=3 is not accepted; it must be a list"),
    ],
)
def test_extreme_values(tmp_path, old, new, message):
    path = tmp_path / "spec.toml"
    path.write_text(TINY.replace(old, new, 1))
    result = fadamgc("run", path, "--out", tmp_path / "out", "--workers", 1, "--quiet")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_two_at_once_do_not_write_into_one_folder(spec, tmp_path):
    out = tmp_path / "out"
    with ExperimentFolder(out).lock():
        for option in ("--resume", "--overwrite"):
            result = fadamgc("run", spec, "--out", out, option, "--workers", 1)
            assert result.exit_code == 2
            assert "is being written by another fadamgc" in result.stderr
    assert fadamgc("run", spec, "--out", out, "--workers", 1, "--quiet").exit_code == 0


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["list"], ["list", "fadamgc"], ["--version"]]
)
def test_help_and_list_need_no_torch(words):
    code = (
        "import sys; from fadamgc.cli.main import app; "
        f"\ntry:\n    app({words!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "slow = {'torch', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)\nassert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_list_has_algorithms_of_plug_ins(tmp_path):
    source = "import fadamgc\n\n\nclass Mine(fadamgc.FedAvg):\n    'My own rule.'\n\n    title = 'Mine'\n\n\n"
    (tmp_path / "my_plug_in.py").write_text(source + "fadamgc.register('mine', Mine)\n")
    done = subprocess.run(
        [sys.executable, "-m", "fadamgc", "--import", tmp_path / "my_plug_in.py", "list"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "My own rule." in done.stdout, done.stderr
    assert "fadamgc" in done.stdout
