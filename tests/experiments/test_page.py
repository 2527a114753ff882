"""The report page in a real browser: it loads without errors, and sliders price as the cost model does."""

from __future__ import annotations

import dataclasses
import math
import shutil

import pytest

from fadamgc import CostModel
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.report.tables import results_table
from fadamgc.experiments.report.write import write_report, write_reports
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium"),
]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DIGITS = """
name = "seen"
title = "Seen in a browser"
[task]
data = "digits"
hidden = [8]
clients = 6
alpha = 1.0
[run]
rounds = 8
sampled = 3
local_epochs = 1
batch_size = 16
seeds = [0, 1]
target = 0.3
[cost]
down_mbps = 0.1
up_mbps = 0.05
seconds_per_step = 0.01
[[method]]
algorithm = "fedavg"
eta_l = 0.3
[[method]]
algorithm = "fadamgc"
label = "FAdamGC <&>"
tracked = 1
init = "gradient"
eta_l = 0.01
[[method]]
algorithm = "local_adam"
eta_l = 1e-9
"""
QUADRATICS = """
name = "other"
[task]
data = "quadratics"
clients = 4
[run]
rounds = 5
local_steps = 2
seeds = [0]
target = 1e9
[cost]
down_mbps = [1.0, 2.0, 3.0, 4.0]
[[method]]
algorithm = "fadamgc"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for name, text in (("one", DIGITS), ("two", QUADRATICS)):
        run_spec(parse_spec(text, "test"), folder / name, workers=1, quiet=True)
        write_report(folder / name)
    write_reports([folder / "one", folder / "two"], folder / "both")
    return folder


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def view(browser, folder):
    pages = []

    def opened(name):
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.said = []
        page.on("console", lambda m: page.said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on(
            "request", lambda r: page.said.append(r.url) if not r.url.startswith(("file:", "data:")) else None
        )
        page.goto((folder / name / "report.html").as_uri())
        page.wait_for_selector(".plot canvas")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()


def minutes(page, within=""):
    return page.eval_on_selector_all(f"{within} td[data-minutes]", "cells => cells.map(c => c.textContent)")


def expected(folder, **cost):
    results = read_results(folder, dataclasses.asdict(CostModel(**cost)) if cost else {})
    return [line[2].text for line in results_table(results).rows]


def move(page, **powers):
    for name, value in powers.items():
        page.evaluate(
            "([id, value]) => { const s = document.getElementById(id); s.value = value;"
            " s.dispatchEvent(new Event('input')); }",
            [f"cost-{name}", value],
        )


@pytest.mark.slow
def test_the_page_loads_without_an_error_and_without_the_network(view, folder):
    page = view("one")
    assert page.said == []
    assert page.title() == "Seen in a browser"
    assert minutes(page) == expected(folder / "one")
    assert page.locator(".plot canvas").count() == 2
    assert page.locator("img").evaluate("image => image.naturalWidth") > 300
    assert "FAdamGC <&>" in page.locator("table").first.inner_text()


@pytest.mark.parametrize("slowest", [False, True])
def test_a_slider_prices_as_the_cost_model_does(view, folder, slowest):
    page = view("one")
    if slowest:
        page.select_option("#cost-per_round", "slowest")
    move(page, down_mbps=-1.5, up_mbps=-2, seconds_per_step=-1, latency=0.25)
    cost = {"down_mbps": 10**-1.5, "up_mbps": 1e-2, "seconds_per_step": 0.1, "latency": 10**0.25}
    wanted = expected(folder / "one", **cost, per_round="slowest" if slowest else "mean")
    assert minutes(page) == wanted != expected(folder / "one")
    said = page.locator("[data-pricing]").inner_text()
    assert "0.0316 Mbps down and 0.01 Mbps up, 0.1 s per local step, 1.78 s latency" in said
    assert ("slowest" in said) == slowest
    best = page.eval_on_selector_all("td[data-minutes].best", "cells => cells.map(c => c.textContent)")
    cost["per_round"] = "slowest" if slowest else "mean"
    results = read_results(folder / "one", cost)
    assert best == [line[2].text for line in results_table(results).rows if line[2].bold]
    ends = "boxes => Math.max(...boxes[0].plot.lines.flatMap(line => line.x))"
    last = page.eval_on_selector_all('[data-plot="1"]', ends)
    longest = max(
        math.fsum(r.simulated_seconds for r in run.history) / 60
        for runs in results.runs.values()
        for run in runs
    )
    assert last == pytest.approx(longest, rel=0.2)
    page.click("#cost-reset")
    assert minutes(page) == expected(folder / "one")
    assert page.said == []


def test_a_step_may_cost_nothing(view, folder):
    page = view("one")
    move(page, seconds_per_step=-5, latency=-3)
    cost = {"down_mbps": 0.1, "up_mbps": 0.05, "seconds_per_step": 0, "latency": 0}
    assert minutes(page) == expected(folder / "one", **cost)


def test_a_codec_can_be_chosen(view, folder):
    page = view("one")
    megabytes = "cells => cells.map(c => Number(c.textContent))"
    before = page.eval_on_selector_all("td[data-megabytes]", megabytes)
    was = minutes(page)
    assert page.locator("#codec-note").is_hidden()
    page.select_option("#codec-tracking", "int8")
    after = page.eval_on_selector_all("td[data-megabytes]", megabytes)
    assert [new < old for old, new in zip(before, after, strict=True)] == [False, True, False]
    now = minutes(page)
    assert now[0] == was[0]
    assert now[1] != was[1]
    page.select_option("#codec-change", "topk:0.01")
    last = page.eval_on_selector_all("td[data-megabytes]", megabytes)
    assert all(new < old for old, new in zip(after, last, strict=True))
    page.select_option('[data-x="1"]', "bytes")
    ends = "boxes => Math.max(...boxes[0].plot.lines.flatMap(line => line.x))"
    assert page.eval_on_selector_all('[data-plot="1"]', ends) == pytest.approx(8 * max(last), rel=0.02)
    page.click("#cost-reset")
    assert page.eval_on_selector_all("td[data-megabytes]", megabytes) == before
    assert minutes(page) == was
    assert page.said == []


def test_methods_can_be_hidden(view):
    page = view("one")
    count = "boxes => boxes.map(box => (box.chart.series.length - 2) / 3)"  # without x and the target
    assert page.eval_on_selector_all(".plot", count) == [3, 3]
    page.uncheck('input[data-method="FAdamGC <&>"]')
    assert page.eval_on_selector_all(".plot", count) == [2, 2]
    page.check('input[data-method="FAdamGC <&>"]')
    assert page.eval_on_selector_all(".plot", count) == [3, 3]
    assert page.said == []


def test_the_quantity_and_the_axes_can_be_chosen(view):
    page = view("one")
    titles = "boxes => boxes.map(box => box.chart.axes.map(axis => axis.label).reverse())"
    assert page.eval_on_selector_all(".plot", titles) == [
        ["test accuracy", "round"],
        ["test accuracy", "simulated minutes"],
    ]
    page.select_option("[data-y]", "train_loss")
    page.select_option('[data-x="0"]', "bytes")
    page.select_option('[data-x="1"]', "wall")
    assert page.eval_on_selector_all(".plot", titles) == [
        ["train loss", "megabytes"],
        ["train loss", "wall clock seconds"],
    ]
    assert page.said == []


def test_the_page_is_dark_where_the_reader_wants_it(view):
    page = view("one")
    colours = """() => [getComputedStyle(document.body).backgroundColor,
        document.querySelector(".plot").chart.axes[0].stroke()]"""
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"document.querySelector('.plot').chart.axes[0].stroke() !== '{light[1]}'")
    assert page.evaluate(colours)[0] != light[0]
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 400")
    assert page.said == []


def test_values_are_read_with_the_keyboard_and_the_pointer(view):
    page = view("one")
    values = "cells => cells.map(cell => cell.textContent)"
    plot = page.locator('[data-plot="0"]')
    legend = '[data-plot="0"] .u-series:not(.edge) td'
    plot.focus()
    page.keyboard.press("End")
    last = page.evaluate(
        """() => document.querySelector('[data-plot="0"]').plot.lines.map(l => l.y.at(-1))"""
    )
    shown = page.eval_on_selector_all(legend, values)
    assert shown == ["8", *(f"{value:.1f} %" for value in last), ""]
    page.keyboard.press("Home")
    assert page.eval_on_selector_all(legend, values)[0] == "1"
    box = plot.locator(".u-over").bounding_box()
    scale = """() => {
        const { min, max } = document.querySelector('[data-plot="0"]').chart.scales.x;
        return [min, max];
    }"""
    whole = page.evaluate(scale)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 200, steps=4)
    page.mouse.up()
    low, high = page.evaluate(scale)
    assert whole[0] < low < high < whole[1]
    plot.focus()
    page.keyboard.press("Escape")
    assert page.evaluate(scale) == whole
    assert page.said == []


def test_every_control_has_a_name_and_can_be_reached(view):
    page = view("one")
    unnamed = """() => [...document.querySelectorAll("input, select, button, .plot")]
        .filter((field) => !field.labels?.length && !field.getAttribute("aria-label"))
        .filter((field) => field.tagName !== "BUTTON" || !field.textContent.trim())
        .map((field) => field.outerHTML)"""
    assert page.evaluate(unnamed) == []
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.dataset.plot || ''")
        )
    for name in ("cost-down_mbps", "cost-latency", "codec-change", "cost-reset", "0", "1"):
        assert name in reached
    assert page.get_attribute("#cost-down_mbps", "aria-valuetext") == "0.1"


@pytest.mark.slow
def test_several_experiments_share_a_page(view, folder):
    page = view("both")
    assert minutes(page, "#experiment-0") == expected(folder / "one")
    page.click("#experiment-1 > summary")
    page.wait_for_selector("#experiment-1 canvas")
    assert minutes(page, "#experiment-1") == expected(folder / "two")
    move(page, down_mbps=0)
    cost = {"down_mbps": 1.0, "up_mbps": 0.05, "seconds_per_step": 0.01}
    assert minutes(page, "#experiment-0") == expected(folder / "one", **cost)
    assert minutes(page, "#experiment-1") == expected(folder / "two", **cost)
    assert page.said == []
    assert (folder / "both" / "summary.tex").exists()
