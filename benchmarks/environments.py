"""The environments of the other systems, ``.bench/pfl`` and ``.bench/flower``, created when they are needed.

python benchmarks/environments.py [pfl] [flower]
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDER = ROOT / ".bench"
TORCH = "torch==2.13.0"
RIVALS = ("pfl", "flower")
FIRST_STEP = "BENCH_FIRST_STEP"  # environment variable that names the file of workers/first_step.py


class NoEnvironmentError(RuntimeError):
    """An environment could not be created; the message says why."""


def python_of(name: str) -> Path:
    """Return the interpreter of an environment; "own" is the running interpreter."""
    return Path(sys.executable) if name == "own" else FOLDER / name / "bin" / "python"


def ensure(name: str) -> Path:
    """Create an environment unless it exists in its present version; return its interpreter."""
    python = python_of(name)
    if name == "own":
        _check_torch(python)
        return python
    requirements = HERE / f"requirements-{name}.txt"
    wanted = hashlib.sha256(TORCH.encode() + requirements.read_bytes()).hexdigest()
    stamp = FOLDER / name / "installed"
    if not (stamp.exists() and stamp.read_text() == wanted):
        say(f"creating the environment {name} (once): torch, then {requirements.name}")
        _make(python, requirements)
        stamp.write_text(wanted)
    _check_torch(python)
    return python


def _make(python: Path, requirements: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    venv.create(python.parent.parent, with_pip=True, clear=True)
    _run(python, "-m", "pip", "install", "--quiet", TORCH)  # first, and so the only build
    _check_torch(python)
    _run(python, "-m", "pip", "install", "--quiet", "--requirement", str(requirements))


def _check_torch(python: Path) -> None:
    """Refuse a build of torch for GPUs, which other packages may have installed."""
    version = _run(python, "-c", "import torch; print(torch.__version__)").strip()
    if not version.endswith("+cpu"):
        raise NoEnvironmentError(f"torch is {version} in {python.parent.parent.name}, not a CPU build")


def _run(python: Path, *arguments: str) -> str:
    done = subprocess.run([str(python), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoEnvironmentError(f"{' '.join(arguments[:3])} failed: {last}")
    return done.stdout


def say(message: str) -> None:
    """Print progress to stderr, apart from the results."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RIVALS:
        say(f"{chosen}: {ensure(chosen)}")
