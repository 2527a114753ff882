"""The gallery: every example is short, runs, draws its figure, and shows what its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "docs" / "gallery.md"
NAMES = [path.stem for path in sorted((ROOT / "examples").glob("*.py")) if not path.stem.startswith("hook_")]
LONGEST = 60  # lines


def numbers(text):
    """The last number of every line, by the text before it."""
    lines = (line.rpartition(" ") for line in text.splitlines())
    return {name.rstrip(":"): float(value) for name, _, value in lines if re.fullmatch(r"[\d.e+-]+", value)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run an example once, and return what it printed."""
    folder, texts = tmp_path_factory.mktemp("figures"), {}

    def run(name):
        if name not in texts:
            figure = folder / f"{name}.png"
            done = subprocess.run(
                [sys.executable, ROOT / "examples" / f"{name}.py", figure],
                capture_output=True, text=True, timeout=300, cwd=folder,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert figure.read_bytes().startswith(b"\x89PNG")
            texts[name] = done.stdout
        return texts[name]

    return run


def test_the_gallery_shows_every_example_and_its_figure():
    text = GALLERY.read_text(encoding="utf-8")
    for name in NAMES:
        assert f"(../examples/{name}.py)" in text, name
        assert f"(figures/{name}.png)" in text, name
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= LONGEST, name
    assert {path.stem for path in (ROOT / "docs" / "figures").glob("*.png")} >= set(NAMES)


@pytest.mark.slow
def test_drift(ran):
    found = numbers(ran("drift"))
    assert found["LocalAdam: distance to the optimum"] > 0.1
    assert found["FAdamGC: distance to the optimum"] < 1e-4


@pytest.mark.slow
def test_only_the_correction_before_the_moments_reaches_the_optimum(ran):
    none, after, before = numbers(ran("scaffold_and_adam")).values()
    assert min(none, after) > 0.1
    assert before < 1e-4


@pytest.mark.slow
def test_own_algorithm(ran):
    none, corrected = numbers(ran("own_algorithm")).values()
    assert corrected > none


@pytest.mark.slow
def test_own_csv(ran):
    assert min(numbers(ran("own_csv")).values()) > 0.85


@pytest.mark.slow
def test_slow_uplink(ran):
    lines = dict(line.split(" [") for line in ran("slow_uplink").splitlines())
    minutes = {name: [float(m) for m in re.findall(r"[\d.]+", values)] for name, values in lines.items()}
    assert all(values == sorted(values, reverse=True) for values in minutes.values())
    assert minutes["FAdamGC, int8"][0] < 0.5 * minutes["FAdamGC"][0]


@pytest.mark.slow
def test_private(ran):
    found = numbers(ran("private"))
    for method in ("FedAvg", "FAdamGC"):
        values = [value for name, value in found.items() if name.startswith(f"{method},")]
        assert values == sorted(values, reverse=True)  # the less epsilon, the less accuracy
        assert values[0] > 0.85
