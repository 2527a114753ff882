"""Build the sdist and the wheel, and use the wheel without the repository: ``make test-wheel``.

The environment has the packages that the wheel's metadata requires and no others, as links to the packages
of the environment that this runs in. So a missing file and an undeclared requirement are both found.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path, PurePath

from packaging.requirements import Requirement

from places import ROOT

IN_SDIST = {
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
    *("pyproject.toml", "setup.cfg"),
}
METADATA = {
    *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"),
    "licenses/src/fadamgc/experiments/report/web/uPlot.LICENSE",
}
USE = """
import importlib, pkgutil
import fadamgc, torch

data = [(torch.ones(4, 2), torch.ones(4, 1))] * 3
task = fadamgc.Task(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data)
run = fadamgc.simulate(fadamgc.FAdamGC(eta_l=0.05), task, rounds=5, sampled=2, local_steps=2)
assert run.history[-1].train_loss < run.history[0].train_loss

names = [module.name for module in pkgutil.walk_packages(fadamgc.__path__, "fadamgc.")]
for name in names:
    if not name.startswith("fadamgc.flower") and not name.endswith("__main__"):
        importlib.import_module(name)
"""


def call(*command: str | Path, **more: object) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, **more)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def copy_sources(folder: Path) -> None:
    """Copy the files of the repository, so that the build leaves nothing in it and finds nothing stale."""
    listed = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith("results/"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())


def package_files() -> set[str]:
    """Every file of the package, relative to ``src``."""
    files = (
        file.relative_to(ROOT / "src") for file in (ROOT / "src" / "fadamgc").rglob("*") if file.is_file()
    )
    return {file.as_posix() for file in files if "__pycache__" not in file.parts}


def same(where: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Fail if two sets of files differ."""
    missing, more = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or more:
        sys.exit(f"{where}: missing {missing}, and should not have {more}")


def check_sdist(file: Path) -> None:
    """The sdist has the package and the files about it, and no others."""
    with tarfile.open(file) as archive:
        names = [PurePath(member.name) for member in archive if member.isfile()]
    found = {name.relative_to(name.parts[0]).as_posix() for name in names}
    metadata = {name for name in found if name.startswith("src/fadamgc.egg-info/")}
    same(file.name, found - metadata, IN_SDIST | {f"src/{name}" for name in package_files()})


def check_wheel(file: Path) -> None:
    """The wheel has all files of the package, its metadata and nothing else."""
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    metadata = {name for name in names if ".dist-info/" in name}
    same(file.name, set(names) - metadata, package_files())
    described = {name.split(".dist-info/")[1] for name in metadata}
    same("the metadata", described, METADATA)


def required(requirements: Iterable[str]) -> set[str]:
    """The names of the distributions that requirements need, directly or not."""
    todo, seen = [Requirement(text) for text in requirements], set()
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            inner = map(Requirement, distribution(requirement.name).requires or ())
            todo += [r for r in inner if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def make_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with the wheel and links to what it requires; return its folder of commands."""
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    commands = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", commands / "python")
    call(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().split("\n\n")[0].splitlines()
    texts = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    for name in required(text for text in texts if "extra ==" not in text):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__", "/"}:
            if not top.endswith(".pth") and not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))  # type: ignore[arg-type]
    return commands


def main() -> None:
    """Build, look at the files, install, and run the command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder / "sources")
        call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "sources")
        (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
        check_sdist(sdist)
        check_wheel(wheel)
        commands = make_environment(folder / "venv", wheel)
        empty = folder / "empty"
        empty.mkdir()
        clean = {
            "cwd": empty,
            "env": {"HOME": str(empty), "PATH": f"{commands}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        }
        version = wheel.name.split("-")[1]
        assert call("fadamgc", "--version", **clean) == f"fadamgc {version}\n"
        listed = call("fadamgc", "list", **clean)
        for path in (PurePath(file) for file in package_files() if file.endswith(".toml")):
            assert path.stem in listed, f"fadamgc list does not name {path.stem}"
        options = ("--methods", "fadamgc,local_adam", "--rounds", "2", "--seeds", "1", "--workers", "1")
        assert "FAdamGC" in call("fadamgc", "compare", *options, "--quiet", **clean)
        assert (empty / "out" / "compare" / "report.html").stat().st_size > 100_000
        call(commands / "python", "-c", USE, **clean)
        print(", ".join(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB" for file in (sdist, wheel)))


if __name__ == "__main__":
    main()
