"""The page's choice of codecs: it prices saved rounds as runs with these codecs are priced."""

from __future__ import annotations

import json

import pytest

from fadamgc.codecs import make_codec
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.report.page import _messages
from fadamgc.experiments.report.tables import results_table
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from page_script import drawn

pytestmark = pytest.mark.slow

SPEC = """
name = "lean"
[task]
data = "digits"
hidden = [8]
clients = 6
[run]
rounds = 2
sampled = 3
tracked = 2
local_steps = 2
batch_size = 8
dropout = 0.3
seeds = [0, 1]
target = 0.01
executor = "loop"
[cost]
down_mbps = 0.1
up_mbps = 0.05
seconds_per_step = 0.01
[[method]]
algorithm = "fadamgc"
CODEC
[[method]]
algorithm = "fadamgc"
label = "gradient"
init = "gradient"
CODEC
[[method]]
algorithm = "fedavg"
DX
"""
BOTH = 'y = "int8", dy = "int8"'
DX = 'dx = "int8"'


def written(folder, codec="", dx=""):
    codec = f"codec = {{ {', '.join(filter(None, (codec, dx)))} }}" if codec or dx else ""
    dx = f"codec = {{ {dx} }}" if dx else ""
    spec = parse_spec(SPEC.replace("CODEC", codec).replace("DX", dx), "spec.toml")
    run_spec(spec, folder, workers=1, quiet=True)
    return write_report(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "out"
    return folder, written(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "dx"),
    [
        (BOTH.replace("int8", "int4"), 'dx = "topk:0.1"'),
        (BOTH, ""),
        ("", DX),
    ],
)
def test_a_codec_prices_rounds_as_runs_with_it_are_priced(plain, codec, dx, tmp_path):
    """The rounds of the two experiments differ; their clients, steps and so their costs do not."""
    folder, _ = plain
    results = written(tmp_path, codec, dx)
    chosen = {"tracking": "int4" if "int4" in codec else "int8" if codec else "", "change": dx[6:-1]}
    page = drawn(folder, codecs=chosen)
    for runs, priced, sent in zip(results.runs.values(), page.priced, page.bytes, strict=True):
        for run, minutes, total in zip(runs, priced, sent, strict=True):
            assert minutes[-1] == pytest.approx(sum(r.simulated_seconds for r in run.history) / 60)
            assert total[-1] == sum(r.bytes_down + r.bytes_up for r in run.history)
    assert page.megabytes == [line[4].text for line in results_table(results).rows]
    assert page.note is None


def test_without_a_choice_the_page_has_the_records_own_numbers(plain):
    folder, results = plain
    page = drawn(folder)
    assert page.megabytes == [line[4].text for line in results_table(results).rows]
    assert page.note is None


@pytest.mark.slow
def test_runs_with_codecs_can_be_priced_without(plain, tmp_path):
    _, results = plain
    written(tmp_path, BOTH, DX)
    page = drawn(tmp_path, codecs={"tracking": "float32", "change": "float32"})
    assert page.megabytes == [line[4].text for line in results_table(results).rows]


def test_records_that_do_not_say_what_was_sent_keep_their_price(plain, tmp_path):
    folder, results = plain
    page = folder / "report.html"
    old = tmp_path / "report.html"
    kept = [method["messages"] for method in data_of(page)[0]["methods"]]
    text = page.read_text()
    for messages in kept[:1]:
        text = text.replace(f'"messages": {json.dumps(messages)}', '"messages": null', 2)
    old.write_text(text)
    seen = drawn(tmp_path, codecs={"tracking": "int8", "change": "int8"})
    texts = [line[4].text for line in results_table(results).rows]
    assert seen.megabytes[:2] == texts[:2]
    assert seen.megabytes[2] != texts[2]
    assert seen.note.startswith("FAdamGC, gradient: priced as it was run")


def data_of(page):
    text = page.read_text()
    start = text.index('id="experiments">') + len('id="experiments">')
    return json.loads(text[start : text.index("</script>", start)])


def test_the_data_of_the_page_have_the_bytes_of_each_field(plain):
    folder, _ = plain
    (fields, *_) = [method["messages"] for method in data_of(folder / "report.html")[0]["methods"]]
    d = fields[0]["bytes"] // 4
    assert [(f["part"], f["kind"], f["bytes"]) for f in fields] == [
        ("down", "model", 4 * d), ("down", "tracking", 4 * d), ("up", "change", 4 * d),
        ("tracked", "tracking", 4 * d),
    ]  # fmt: skip
    assert fields[0]["codecs"] == {}
    assert fields[2]["codecs"]["topk:0.1"] == make_codec("topk:0.1").size(d)
    assert all(f["codecs"]["int8"] == make_codec("int8").size(d) for f in fields[1:])


@pytest.mark.parametrize(
    "messages",
    [None, 3, {}, {"down": 3}, {"down": {"x": [1]}}, {"down": {"x": ["a", 2]}}, {"down": {"y": [-9, 4]}}],
)
def test_a_record_with_other_descriptions_of_its_messages_has_no_choice(plain, messages):
    _, results = plain
    (run, *_) = results.runs["FedAvg"]
    before = run.settings["messages"]
    run.settings["messages"] = messages
    try:
        assert _messages([run]) is None
    finally:
        run.settings["messages"] = before
    assert _messages([]) is None
    assert _messages([run]) is not None


def test_the_records_are_read_with_their_sizes(plain):
    folder, _ = plain
    for runs in read_results(folder).runs.values():
        for run in runs:
            sizes = {part: sum(b for _, b in f.values()) for part, f in run.settings["messages"].items()}
            work = run.history[-1].work[-1]
            assert set(work.down) == {sizes["down"]}
            assert set(work.up) <= {0, sizes["up"], sizes["up"] + sizes["tracked"]}
