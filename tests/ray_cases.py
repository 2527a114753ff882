"""Cases on Ray clusters, in one process whose network and processes are its own; see sim/test_ray.py.

``python tests/ray_cases.py FOLDER`` writes found.json: a dict per case.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch

import fadamgc
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.run import ray_tasks
from fadamgc.experiments.run.ray_tasks import RayTasks
from fadamgc.experiments.run.runner import Runner, run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.experiments.tune import tune
from fadamgc.sim.executors import RayExecutor
from places import ROOT

DRIVER = os.getpid()
RUN = {
    "rounds": 4,
    "sampled": 6,
    "tracked": 3,
    "local_steps": 3,
    "batch_size": 8,
    "seed": 1,
    "progress": False,
}
ALGO = fadamgc.FAdamGC(eta_l=0.01)
COMPOSED = fadamgc.compose(
    local=fadamgc.local.Adam(eta_l=0.01, v="share"), correction="pre", server=fadamgc.server.Nesterov()
)


def loopback_up() -> None:
    """Switch the loopback interface of a new network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(s, 0x8913, request))[1]
        fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", flags | 1))


def pairs(n=12, shape=(4,)):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(20 + i, *shape, generator=generator), torch.randint(3, (20 + i,), generator=generator))
        for i in range(n)
    ]


def task(loss=torch.nn.functional.cross_entropy, model=None, data=None):
    torch.manual_seed(0)
    model = (
        model or torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    )
    data = data or [(x.double(), y) for x, y in pairs()]
    return fadamgc.Task(model, loss, data, data[0])


def images():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    return task(model=torch.nn.Sequential(*layers, torch.nn.Linear(4 * 36, 3)), data=pairs(6, (1, 8, 8)))


def far(a, b) -> float:
    return float((a.x - b.x).abs().max())


def gone_once(flag: Path, how):
    """A loss that does something to the first actor that computes it."""

    def loss(output, target):
        if os.getpid() != DRIVER and not flag.exists():
            flag.touch()
            how()
        return torch.nn.functional.cross_entropy(output, target)

    return loss


class Borrowed:
    """An executor that outlives the run."""

    name = "borrowed"

    def __init__(self, executor):
        self.run = executor.run


def every_algorithm(_):
    """One after the other on the same two actors."""
    example, shared, found = task(), None, {}

    def borrowed(workload):
        nonlocal shared
        shared = shared or RayExecutor(workload, fadamgc.Ray(actors=2, inner="loop"))
        return Borrowed(shared)

    for name in fadamgc.algorithms():
        options = RUN | {"rounds": 2}
        algorithm = COMPOSED if name == "compose" else fadamgc.make_algorithm(name, eta_l=0.01)
        if name in ("fa_nt_local", "scaffnew", "scaffold_local"):
            options = options | {"sampled": None, "tracked": None}
        if name.startswith("mtgc"):
            options = options | {"sampled": None, "tracked": None, "groups": 3, "group_rounds": 2}
        runs = [fadamgc.simulate(algorithm, example, executor=e, **options) for e in ("loop", borrowed)]
        found[name] = far(*runs)
    training = {"clip_norm": 0.5, "weight_decay": 0.01, "dropout": 0.3, "stragglers": 0.3}
    noise = fadamgc.Task(example.model, example.loss, example.pairs, transform=noisy)
    algorithm = fadamgc.FAdamGC(eta_l=fadamgc.schedules.cosine(0.01))
    runs = [fadamgc.simulate(algorithm, noise, executor=e, **RUN | training) for e in ("loop", borrowed)]
    shared.close()
    return {
        "differences": found,
        "training": far(*runs),
        "absent": any(record.absent for record in runs[1].history),
        "partial": any(set(record.work[-1].steps) != {3} for record in runs[1].history),
    }


def noisy(inputs, targets):
    return inputs + torch.randn_like(inputs), targets


def number_of_actors(_):
    vectorized = fadamgc.simulate(ALGO, task(), executor="vectorized", **RUN)
    runs = [fadamgc.simulate(ALGO, task(), executor=fadamgc.Ray(actors=a), **RUN) for a in (1, 3)]
    return {
        "equal": all(torch.equal(run.x, vectorized.x) for run in runs),
        "history": [r.train_loss for r in runs[0].history] == [r.train_loss for r in runs[1].history],
        "settings": runs[0].settings["executor"] + " " + runs[0].settings["inner"],
    }


def convolutions(_):
    threads = fadamgc.simulate(ALGO, images(), executor="threads", **RUN | {"tracked": None})
    run = fadamgc.simulate(ALGO, images(), executor=fadamgc.Ray(actors=2, cpus=2), **RUN | {"tracked": None})
    buffers = [torch.equal(run.model[1].running_mean, threads.model[1].running_mean)]
    return {"equal": torch.equal(run.x, threads.x) and all(buffers), "inner": run.settings["inner"]}


def local_parameters(_):
    options = RUN | {"local_parameters": "0", "eval_clients": "epoch"}
    runs = [fadamgc.simulate(ALGO, task(), executor=e, **options) for e in ("loop", fadamgc.Ray(actors=2))]
    return {"difference": far(*runs), "metrics": runs[0].history[-1].metrics == runs[1].history[-1].metrics}


def codecs(_):
    options = RUN | {"codec": {"dx": "topk:0.1", "y": "int8", "dy": "int8"}}
    executors = ("loop", fadamgc.Ray(actors=2, inner="loop"))
    one, other = (fadamgc.simulate(ALGO, task(), executor=executor, **options) for executor in executors)
    rests = [torch.equal(a.rest.dx, b.rest.dx) for a, b in zip(one.clients, other.clients, strict=True)]
    return {"difference": far(one, other), "rests": all(rests)}


def resumed(folder):
    first = {"executor": "ray", "checkpoint": folder / "without"}
    fadamgc.simulate(ALGO, task(), callbacks=[lambda end: end.record.round == 2], **RUN, **first)
    shutil.copytree(folder / "without", folder / "with Ray")
    found = {}
    for name, executor in {"with Ray": fadamgc.Ray(actors=1), "without": "auto"}.items():
        run = fadamgc.simulate(ALGO, task(), executor=executor, checkpoint=folder / name, resume=True, **RUN)
        found[name] = torch.equal(run.x, reference().x) and len(run.history) == 4
    return found


def killed_actor(folder):
    loss = gone_once(folder / "flag", lambda: os.kill(os.getpid(), signal.SIGKILL))
    run = fadamgc.simulate(ALGO, task(loss), executor=fadamgc.Ray(actors=2), **RUN)
    return {"happened": (folder / "flag").exists(), "equal": torch.equal(run.x, reference().x)}


def hanging_actor(folder):
    loss = gone_once(folder / "flag", lambda: time.sleep(1000))
    run = fadamgc.simulate(ALGO, task(loss), executor=fadamgc.Ray(actors=2, inner="loop", deadline=12), **RUN)
    return {"happened": (folder / "flag").exists(), "difference": far(run, reference())}


def always_killed(_):
    def loss(output, target):
        if os.getpid() != DRIVER:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(output, target)

    with refused() as message:
        fadamgc.simulate(ALGO, task(loss), executor=fadamgc.Ray(actors=1, attempts=2), **RUN)
    return {"message": message}


def failing_model(_):
    def loss(output, target):
        if os.getpid() != DRIVER:
            raise RuntimeError("no such luck")
        return torch.nn.functional.cross_entropy(output, target)

    with refused() as message:
        fadamgc.simulate(ALGO, task(loss), executor=fadamgc.Ray(actors=1, inner="loop"), **RUN)
    return {"message": message}


def no_room(_):
    with refused() as message:
        fadamgc.simulate(ALGO, task(), executor=fadamgc.Ray(gpus=1), **RUN)
    return {"message": message}


def many_runs(_):
    grid = [{"algorithm": fadamgc.FAdamGC(eta_l=e), "seed": s} for e in (0.01, 0.1) for s in (0, 1)]
    options = {k: v for k, v in RUN.items() if k != "seed"} | {"task": task(), "executor": "vectorized"}
    here, there = (fadamgc.simulate_many(grid, workers=w, **options) for w in (1, "ray"))
    return {
        "equal": all(torch.equal(a.x, b.x) for a, b in zip(here, there, strict=True)),
        "task": all(run.task is options["task"] for run in there),
    }


def example(folder):
    """The example of the gallery."""
    sys.argv = ["ray_sweep.py", str(folder / "figure.png")]
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(ROOT / "examples" / "ray_sweep.py"), run_name="__main__")
    return {"output": output.getvalue(), "figure": (folder / "figure.png").stat().st_size}


SPEC = """
name = "sweep"
[task]
data = "quadratics"
clients = 6
[run]
rounds = 60
seeds = [0, 1]
local_steps = 2
executor = "loop"
[[method]]
algorithm = "fadamgc"
eta_l = 0.01
[[method]]
algorithm = "fedavg"
eta_l = 0.01
"""


TUNE = """
[tune]
seeds = [2]
rounds = 400
eta_l = [0.01, 0.1]
"""


def records(folder: Path):
    """The numbers of all runs in a folder of an experiment."""
    return {
        path.name: [(r.train_loss, r.test_metric) for r in fadamgc.load_run(path).history]
        for path in sorted((folder / "runs").iterdir())
    }


def sweep(folder):
    spec = parse_spec(SPEC, "spec")
    run_spec(spec, folder / "here", workers=1, quiet=True)
    found = {}
    for name in ("seen", "not seen"):
        proof, out = ray_tasks._proof, folder / name.replace(" ", "-")
        if name == "not seen":
            ray_tasks._proof = elsewhere
        runner = Runner(quiet=True, ray=RayTasks("auto", 1, 0), save_models="last")
        runner.check(ExperimentFolder(out).plan(spec))
        failures = run_spec(spec, out, runner=runner)
        ray_tasks._proof = proof
        files = sorted(path.name for path in (out / "runs").rglob("*") if path.is_file())
        found[name] = {
            "failures": len(failures),
            "equal": records(out) == records(folder / "here"),
            "models": files.count("model.safetensors"),
            "left": [file for file in files if file.startswith(".") or "checkpoint" in file],
        }
    return found


@contextmanager
def elsewhere(_):
    yield "/nowhere/proof", "content"


def killed_tuning(folder):
    """A process of the cluster is killed in the middle of a run; Ray starts the task again."""
    spec = parse_spec(SPEC.replace("rounds = 60", "rounds = 400") + TUNE, "spec")
    killed = []

    def kill():
        while not (begun := list((folder / "out").rglob("checkpoint.json"))):
            time.sleep(0.05)
        saved = begun[0].parent.parent / "run.json"
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            if path.read_bytes().startswith(b"ray::run_group"):
                killed.append(not saved.exists())
                os.kill(int(path.parent.name), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    tuned = tune(spec, folder / "out", runner=Runner(quiet=True, ray=RayTasks("auto", 1, 0)))
    thread.join(timeout=60)
    alone = tune(spec, folder / "here", workers=1, quiet=True)
    return {"killed": killed, "equal": tuned.points == alone.points, "chosen": tuned.spec == alone.spec}


def stopped_sweep(folder):
    """The command, stopped with Ctrl-C and resumed."""
    spec = folder / "spec.toml"
    spec.write_text(SPEC.replace("rounds = 60", "rounds = 400"))
    command = [
        sys.executable,
        "-m",
        "fadamgc",
        "run",
        str(spec),
        "--out",
        str(folder / "out"),
        "--ray",
        "auto",
    ]
    process = subprocess.Popen(
        [*command, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    runs = folder / "out" / "runs"
    while process.poll() is None and not list(runs.glob("*/checkpoint/*.json")):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    left = len(list(runs.glob("*/checkpoint")))
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120)
    run_spec(parse_spec(spec.read_text(), "spec"), folder / "here", workers=1, quiet=True)
    return {
        "code": process.returncode,
        "output": output[-500:],
        "checkpoints": left,
        "resumed": done.returncode,
        "error": done.stderr[-500:],
        "equal": records(folder / "out") == records(folder / "here"),
    }


def reference():
    return fadamgc.simulate(ALGO, task(), executor="vectorized", **RUN)


@contextmanager
def refused():
    message: list[str] = []
    try:
        yield message
    except fadamgc.FadamgcError as error:
        message += [type(error).__name__, str(error)]


def lost_node(folder, cluster):
    """A machine with actors disappears during a run."""
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    def remove(end):
        if end.record.round == 2:
            cluster.remove_node(node)

    run = fadamgc.simulate(
        ALGO, task(), executor=fadamgc.Ray(actors=3, inner="vectorized"), callbacks=[remove], **RUN
    )
    return {"equal": torch.equal(run.x, reference().x), "rounds": len(run.history)}


def lost_cluster(folder):
    """All processes of a cluster die during a run of another process; the run is resumed without Ray."""
    script = f"import ray_cases; ray_cases.run_and_lose({str(folder / 'checkpoint')!r})"
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, env=environment
    )
    for path in Path("/proc").glob("[0-9]*/stat"):  # what is left of the cluster has lost its parent
        pid, rest = int(path.parent.name), path.read_text().rpartition(")")
        if "ray::" in rest[0] and rest[2].split()[1] == "1":
            os.kill(pid, signal.SIGKILL)
    place = {"checkpoint": folder / "checkpoint", "resume": True}
    assert (folder / "checkpoint" / "checkpoint.json").exists(), done.stdout + done.stderr
    saved = len(fadamgc.load_run(folder / "checkpoint").history)
    run = fadamgc.simulate(ALGO, task(), executor="auto", **RUN, **place)
    equal = torch.equal(run.x, reference().x)
    return {
        "code": done.returncode,
        "output": done.stdout + done.stderr[-1500:],
        "saved": saved,
        "equal": equal,
    }


def run_and_lose(checkpoint: str) -> None:
    """Run on a new cluster, and kill it after two rounds."""

    def kill(end):
        if end.record.round == 2:
            import ray

            session = ray._private.worker._global_node.get_session_dir_path()
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                text = path.read_bytes().decode(errors="replace")
                if session in text and ("gcs_server" in text or "raylet" in text):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    executor = fadamgc.Ray(address="local", actors=2, deadline=30, attempts=2)
    with refused() as message:
        fadamgc.simulate(ALGO, task(), executor=executor, callbacks=[kill], checkpoint=checkpoint, **RUN)
    print(message, flush=True)


ON_ONE_NODE = (
    every_algorithm,
    number_of_actors,
    convolutions,
    local_parameters,
    codecs,
    resumed,
    killed_actor,
    hanging_actor,
    always_killed,
    failing_model,
    no_room,
    many_runs,
    example,
    sweep,
    killed_tuning,
    stopped_sweep,
    lost_cluster,
)
ON_TWO_NODES = (lost_node,)


def cases() -> list[str]:
    return [case.__name__ for case in (*ON_ONE_NODE, *ON_TWO_NODES)]


def processes() -> list[str]:
    """The command lines of all other processes in this process's namespace."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if text and int(path.parent.name) not in (os.getpid(), 1):
            found.append(text[:200])
    return found


def main(folder: Path, wanted: list[str]) -> None:
    loopback_up()
    import ray
    from ray.cluster_utils import Cluster

    found = {}

    def attempt(case, *arguments):
        if wanted and case.__name__ not in wanted:
            return
        place = folder / case.__name__
        place.mkdir()
        began = time.monotonic()
        try:
            found[case.__name__] = case(place, *arguments)
        except BaseException:
            found[case.__name__] = {"error": traceback.format_exc()[-3000:]}
        found[case.__name__]["time"] = round(time.monotonic() - began, 1)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    for case in ON_ONE_NODE:
        attempt(case)
    for case in ON_TWO_NODES:
        attempt(case, cluster)
    ray.shutdown()
    cluster.shutdown()
    del os.environ["RAY_ADDRESS"]
    run = fadamgc.simulate(ALGO, task(), executor="ray", **RUN)  # on a new cluster of its own
    found["own cluster"] = {"equal": torch.equal(run.x, reference().x)}
    deadline = time.monotonic() + 20
    while processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    found["left behind"] = {"processes": processes()}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
