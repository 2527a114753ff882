"""The script of the report page, run by Node with a stand-in for the browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

STUB = """
const fs = require("fs"), vm = require("vm");
const [library, data, script, chosen, chosenCodecs] = JSON.parse(fs.readFileSync(0, "utf8"));
const nodes = {}, plots = {};
function node(id) {
  return nodes[id] ??= {
    id, value: chosen[id] ?? "0", min: "-3", textContent: "", dataset: {}, tagName: "DIV",
    classList: { toggle: () => {} }, addEventListener: () => {}, querySelector: (s) => node(s),
    setAttribute: () => {}, querySelectorAll: () => [],
  };
}
nodes.experiments = { textContent: data };
const document = { getElementById: node, querySelectorAll: () => [] };
function uPlot(options, series, box) {
  plots[box.id] = { ...box.plot, series, labels: options.series.map(({ label }) => label) };
  this.destroy = () => {};
}
const kept = {};
vm.runInNewContext(`${library}; kept.join = uPlot.join;`, { kept });
uPlot.join = kept.join;
const ResizeObserver = class { observe() {} };
const matchMedia = () => ({ matches: false, addEventListener: () => {} });
const said = {}, context = { document, matchMedia, uPlot, ResizeObserver, said, chosenCodecs };
const further = `
  const experiment = EXPERIMENTS[0];
  const times = timesToTarget(experiment);
  said.best = experiment.methods[times.indexOf(clearlyBest(experiment, times))]?.label ?? null;
  said.pricing = pricing(experiment);
  Object.assign(codecs, chosenCodecs);
  said.priced = experiment.methods.map((method) => method.runs.map((run) => price(experiment, run, method)));
  said.bytes = experiment.methods.map((method) => method.runs.map((run) => bytesOf(experiment, run, method)));
  if (recoded()) changed();
`;
vm.runInNewContext(script + further, context);
const names = Object.keys(nodes).filter((name) => name.startsWith("[data-minutes"));
const minutes = names.map((name) => nodes[name].textContent);
const cells = Object.keys(nodes).filter((name) => name.startsWith("[data-megabytes"));
const megabytes = cells.map((name) => nodes[name].textContent);
const note = nodes["codec-note"].hidden ? null : nodes["codec-note"].textContent;
console.log(JSON.stringify({ minutes, megabytes, note, plots, ...said }));
"""


def drawn(folder, y="metric", x=("round", "minutes"), codecs=None):
    """What the page's script does, with a stand-in for the browser; the plots are numbered.

    ``codecs`` are chosen by kind of a field, as a reader would.
    """
    node = shutil.which("node")
    if node is None:
        playwright = pytest.importorskip("playwright", reason="there is no node to run the page's script")
        node = str(Path(playwright.__file__).parent / "driver" / "node")
    html = (folder / "report.html").read_text()
    data = re.search(r'<script type="application/json" id="experiments">(.*?)</script>', html, re.DOTALL)
    library, script = (part.split("</script>")[0] for part in html.split("<script>")[1:])
    chosen = {"[data-y]": y, '[data-x="0"]': x[0], '[data-x="1"]': x[1]}
    done = subprocess.run(
        [node, "-e", STUB],
        input=json.dumps([library, data[1], script, chosen, codecs or {}]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(**json.loads(done.stdout))
