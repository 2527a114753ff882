"""Try the package on several versions of Python, without torch: ``make test-interpreters``.

For each version that is installed (as ``python3.12``, or by pyenv), every file is compiled with warnings as
errors, and an environment with the wheel and the requirements that need no torch runs what needs none. A
version that is not installed is skipped, with a line that says so. Where torch can be installed,
``make test PYTHON=python3.13 VENV=.venv313`` runs all tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lowest import requirements
from wheel import call, copy_sources

VERSIONS = ("3.11", "3.12", "3.13")
NEEDS_TORCH = ("torch", "safetensors", "scikit-learn")  # safetensors only with torch's tensors
USE = """
import sys
import fadamgc
from fadamgc.paper.advice import Situation, advise
from fadamgc.toml import parse_toml

assert parse_toml('a = 1\\n[b]\\nc = [1, 2]\\n')["b"]["c"] == [1, 2]
assert advise(Situation(kind="texts")).suggestions
assert "torch" not in sys.modules
"""


def find(version: str) -> Path | None:
    """Return the interpreter of a version, if there is one."""
    found = shutil.which(f"python{version}")
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for path in ([Path(found)] if found else []) + pyenv[::-1]:
        if (
            subprocess.run(
                [path, "-c", "import venv, ensurepip"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return path
    return None


def compile_all(python: Path, folder: Path) -> None:
    """Compile every file, with warnings as errors."""
    code = (
        "import pathlib, sys\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('*.py'):\n"
        "    compile(path.read_text(encoding='utf-8'), str(path), 'exec')\n"
    )
    call(python, "-W", "error", "-c", code, folder)


def use(python: Path, wheel: Path, folder: Path) -> None:
    """Install the wheel with the requirements that need no torch, and use what needs none."""
    call(python, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile")
    call(*pip, *(str(needed) for name, needed in requirements().items() if name not in NEEDS_TORCH))
    call(*pip, "--no-deps", wheel)
    clean = {"cwd": folder, "env": {"HOME": str(folder), "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}}
    for command in (["--version"], ["--help"], ["list"], ["list", "fadamgc"], ["advise"]):
        call("fadamgc", *command, **clean)
    call(folder / "bin" / "python", "-W", "error", "-c", USE, **clean)


def main(versions: Sequence[str]) -> None:
    """Try every version."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder / "sources")
        build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", folder)
        call(sys.executable, *build, folder / "sources")
        (wheel,) = folder.glob("*.whl")
        for version in versions:
            python = find(version)
            if python is None:
                print(f"Python {version}: skipped, it is not installed")
                continue
            compile_all(python, folder / "sources")
            use(python, wheel, folder / version)
            print(f"Python {version}: every file compiles; the commands that need no torch run")


if __name__ == "__main__":
    main(sys.argv[1:] or VERSIONS)
