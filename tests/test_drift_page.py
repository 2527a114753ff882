"""The interactive figure of docs/drift.md: it computes what the package computes, and works in a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fadamgc

DOCS = Path(__file__).resolve().parents[1] / "docs"
SCRIPT = DOCS / "website" / "drift.js"
METHODS = {
    "FedAvg": fadamgc.FedAvg,
    "SCAFFOLD": fadamgc.Scaffold,
    "LocalAdam": fadamgc.LocalAdam,
    "FA-NT": fadamgc.FANT,
    "FAdamGC": fadamgc.FAdamGC,
}
SETTINGS = [(0.0, 5, 0.1), (0.8, 1, 0.3), (0.8, 10, 0.1), (1.0, 7, 0.02), (0.35, 3, 0.05)]  # h, K, eta
RUN = """
const fs = require("fs"), vm = require("vm");
const [script, calls] = JSON.parse(fs.readFileSync(0, "utf8"));
const out = {}, context = { Math, Object, Array, calls, out };
vm.runInNewContext(script + `
  out.constants = { CURVATURES, GRADIENTS, START, ROUNDS, methods: Object.keys(METHODS) };
  out.clients = calls.map(([, s]) => clientsAt(s.h));
  out.paths = calls.map(([name, s]) => trajectory(name, s));
`, context);
console.log(JSON.stringify(out));
"""


@pytest.fixture(scope="module")
def computed():
    """What the script computes: constants; the losses of clients and the paths per method and settings."""
    node = shutil.which("node")
    if node is None:
        playwright = pytest.importorskip("playwright", reason="there is no node to run the page's script")
        node = str(Path(playwright.__file__).parent / "driver" / "node")
    keys = [(name, *settings) for name in METHODS for settings in [*SETTINGS, (0.8, 10, 0.02)]]
    calls = [(name, {"h": h, "K": K, "eta": eta}) for name, h, K, eta in keys]
    text = json.dumps([SCRIPT.read_text(encoding="utf-8"), calls])
    done = subprocess.run([node, "-e", RUN], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["constants"], dict(
        zip(keys, zip(found["clients"], found["paths"], strict=True), strict=True)
    )


class Point(torch.nn.Module):
    """A model that is a point in the plane; a row has the loss of a client: xx, xy, yy, b."""

    def __init__(self, at):
        super().__init__()
        self.at = torch.nn.Parameter(torch.tensor(at, dtype=torch.float64))

    def forward(self, rows):
        x, y = self.at
        return rows @ torch.stack((x * x / 2, x * y, y * y / 2, x, y))


def simulated(cls, clients, start, rounds, K, eta):
    """The server's models of a run."""
    rows = [torch.tensor([[*c["A"], *c["b"]]], dtype=torch.float64) for c in clients]
    data = [(row, torch.zeros(1)) for row in rows]
    task = fadamgc.Task(Point(start), lambda loss, _: loss.mean(), data)
    models = [start]
    fadamgc.simulate(
        cls(eta_l=eta), task, rounds=rounds, local_steps=K, batch_size=None, executor="loop",
        callbacks=[lambda end: models.append(end.server.x.tolist())],
    )  # fmt: skip
    return models


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("h", "K", "eta"), SETTINGS)
def test_the_script_computes_what_simulate_computes(computed, name, h, K, eta):
    constants, paths = computed
    clients, path = paths[name, h, K, eta]
    rounds = 8
    models = simulated(METHODS[name], clients, constants["START"], rounds, K, eta)
    torch.testing.assert_close(
        torch.tensor(path["server"][: rounds + 1]), torch.tensor(models), atol=1e-9, rtol=0
    )
    for before, locals_, after in zip(path["server"], path["local"], path["server"][1:], strict=False):
        assert [len(p) for p in locals_] == [K + 1] * 3
        assert all(p[0] == before for p in locals_)
        assert [sum(p[-1][j] for p in locals_) / 3 for j in (0, 1)] == pytest.approx(after, abs=1e-12)


def test_the_page_offers_the_methods(computed):
    constants, _ = computed
    assert constants["methods"] == list(METHODS)


def test_the_optimum_is_where_the_cross_is(computed):
    constants, paths = computed
    assert [sum(b[j] for b in constants["GRADIENTS"]) for j in (0, 1)] == pytest.approx([0, 0], abs=1e-12)
    means = [[sum(c["A"][j] for c in clients) / 3 for j in range(3)] for clients, _ in paths.values()]
    assert all(mean == pytest.approx(means[0]) for mean in means)
    for xx, xy, yy in constants["CURVATURES"]:
        assert min(xx, yy, xx * yy - xy * xy) > 0


def test_what_the_page_says_is_so(computed):
    constants, paths = computed
    last = {key: math.hypot(*path["server"][-1]) for key, (_, path) in paths.items()}
    assert len(paths["FedAvg", *SETTINGS[0]][1]["server"]) == constants["ROUNDS"] + 1
    without = [paths[name, *SETTINGS[0]][1]["server"] for name in ("LocalAdam", "FA-NT", "FAdamGC")]
    assert without[1][-1] == pytest.approx(without[0][-1], abs=1e-12)
    assert without[2][-1] == pytest.approx(without[0][-1], abs=1e-12)
    first = [paths[name, 0.8, 10, 0.1][1]["server"][1] for name in ("LocalAdam", "FAdamGC")]
    assert first[0] == first[1]
    assert last["LocalAdam", 0.8, 10, 0.1] > 0.1 > 1e-8 > last["FAdamGC", 0.8, 10, 0.1]
    assert last["LocalAdam", 0.8, 1, 0.3] > 0.1 > 1e-5 > last["FedAvg", 0.8, 1, 0.3]
    assert last["FedAvg", 0.8, 10, 0.1] > 2 * last["FedAvg", 0.8, 10, 0.02] > 0.02
    assert max(last["SCAFFOLD", 0.8, 10, eta] for eta in (0.1, 0.02)) < 1e-3
    assert last["FA-NT", 0.8, 10, 0.1] > 0.1


# In a browser.

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page as the site has it, without the site's theme."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    markdown = pytest.importorskip("markdown", reason="mkdocs is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; apt-get install chromium")
    folder = tmp_path_factory.mktemp("site")
    body = markdown.markdown((DOCS / "drift.md").read_text(encoding="utf-8"))
    (folder / "drift").mkdir()
    html = f'<!DOCTYPE html><html lang="en"><meta name="viewport" content="width=device-width">{body}'
    (folder / "drift" / "index.html").write_text(html, encoding="utf-8")
    shutil.copytree(
        DOCS / "website", folder / "website", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 360, "height": 700}, reduced_motion="no-preference")
        page.seen = []
        page.on("console", lambda m: page.seen.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.seen.append(str(error)))
        page.on("request", lambda r: page.seen.append(r.url) if not r.url.startswith("file:") else None)
        page.goto((folder / "drift" / "index.html").as_uri())
        yield page
        browser.close()


def status(page):
    text = page.inner_text("#drift-said")
    rounds, *values = re.findall(r"(?:below )?[\d.]+(?:e-\d+)?", text.rstrip("."))
    return int(rounds), values


@pytest.mark.slow
def test_the_page_works_with_the_keyboard_on_a_narrow_screen(page):
    assert page.seen == []
    assert status(page)[0] == 60
    assert status(page)[1][1] == "below 1e-8"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    unnamed = """() => [...document.querySelectorAll("#drift input, #drift select")].filter(
        (field) => !field.labels.length && !field.getAttribute("aria-label")).length"""
    assert page.evaluate(unnamed) == 0
    page.focus("#drift-h")
    page.keyboard.press("Home")
    assert page.inner_text("#drift-h-shown") == "0.00"
    values = status(page)[1]
    assert values[0] == values[1]  # nothing to correct
    page.keyboard.press("End")
    assert float(status(page)[1][0]) > 0.1
    page.focus("#drift-eta")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#drift-eta", "aria-valuetext") == "0.05"
    page.select_option("#drift-method-0", "SCAFFOLD")
    assert "with SCAFFOLD" in page.inner_text("#drift-said")


@pytest.mark.slow
def test_the_page_plays(page):
    page.click("#drift-again")
    assert status(page)[0] == 0
    page.click("#drift-step")
    assert page.inner_text("#drift-round-shown").startswith("0, step 1 of")
    points = "() => document.querySelectorAll('#drift-plane-0 .server circle').length"
    before = page.evaluate(points)
    page.click("#drift-next")
    page.click("#drift-next")
    assert status(page)[0] == 2
    assert page.evaluate(points) == before + 2
    page.focus("#drift-play")
    page.keyboard.press("Space")
    assert page.inner_text("#drift-play") == "Pause"
    page.wait_for_function("document.getElementById('drift-round').value > 2")
    page.keyboard.press("Space")
    assert page.inner_text("#drift-play") == "Play"
    assert page.seen == []
