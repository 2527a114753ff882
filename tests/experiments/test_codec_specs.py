"""Codecs in specs, in records, and on the command line."""

from __future__ import annotations

import json

import pytest

import command
import fadamgc
from fadamgc.errors import InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from problems import class_task
from tiny_experiments import TINY

pytestmark = pytest.mark.usefixtures("quick")

LEAN = TINY.replace("[run]\n", '[run]\ncodec = { dx = "int8" }\n').replace(
    "tracked = 3\n", 'tracked = 3\ncodec = { y = "int4", dy = "topk" }\n'
)


def spec_of(text):
    return parse_spec(text, "spec.toml")


def test_a_method_replaces_the_codecs_of_the_run():
    spec = spec_of(LEAN)
    assert [spec.codec(m) for m in spec.methods] == [{"dx": "int8"}, {"dy": "topk:0.01", "y": "int4"}]
    none = spec_of(LEAN.replace('codec = { y = "int4", dy = "topk" }', "codec = {}"))
    assert [none.codec(m) for m in none.methods] == [{"dx": "int8"}, None]
    assert [spec_of(TINY).codec(m) for m in spec_of(TINY).methods] == [None, None]
    for again in (spec, none):
        assert spec_of(again.to_toml()) == again


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            '{ dx = "int8" }',
            '{ dy = "int8" }',
            r"\[run\] codec for 'dy': no message of LocalAdam has this field; did you mean 'dx'\?; "
            r"it has x, dx; give \[\[method\]\] LocalAdam a codec of its own, or codec = \{\} for none",
        ),
        ('{ dx = "int8" }', '{ dx = "int9" }', r"\[run\] codec=.* codec for dx='int9' is not accepted"),
        ('{ dx = "int8" }', "3", r"\[run\] codec=3 is not accepted"),
        ('y = "int4"', 'z = "int4"', r"\[\[method\]\] FAdamGC \(all tracked\): codec for 'z': no message"),
        ('y = "int4"', 'y = "int:4"', r"\[\[method\]\] 2 codec=.*codec for y='int:4' is not accepted"),
        ('"local_adam"', '"mtgc"', r"\[run\] codec=.*clients in groups.*\[\[method\]\] MTGC"),
    ],
)
def test_codecs_that_do_not_fit_are_refused(before, after, message):
    with pytest.raises(InputError, match=message):
        spec_of(LEAN.replace(before, after))


@pytest.mark.slow
def test_runs_use_the_codecs_of_their_method_and_are_found_again(tmp_path):
    spec = spec_of(LEAN).replace("run", rounds=2, seeds=(0,))
    run_spec(spec, tmp_path, workers=1, quiet=True)
    folder = ExperimentFolder(tmp_path)
    used = [runs[0].settings["codec"] for runs in folder.load().runs.values()]
    assert used == [[["dx", "int8"]], [["dy", "topk:0.01"], ["y", "int4"]]]
    assert all(planned.load() is not None for planned in folder.plan(spec))
    for other in (spec.replace("run", codec={"dx": "int4"}), spec_of(TINY).replace("run", rounds=2)):
        plan = folder.plan(other.replace("run", seeds=(0,)))
        assert plan[0].load() is None
        with pytest.raises(InputError, match="an experiment with other settings: .*codec="):
            folder.check_resumable(other)
    (tmp_path / "spec.toml").unlink()
    derived, _ = folder.read_plan()
    codecs = {method.algorithm: spec.codec(method) for method in spec.methods}
    assert {method.algorithm: derived.codec(method) for method in derived.methods} == codecs


def test_records_from_before_there_were_codecs_are_still_those_of_their_runs(tmp_path):
    spec = spec_of(TINY)
    planned = PlannedRun.of(spec, spec.methods[0], 0, tmp_path / "run")
    old = json.loads(json.dumps(planned.identity()))
    assert old["run"].pop("codec") is None
    assert planned._is_identity(old)
    lean = PlannedRun.of(spec.replace("run", codec={"dx": "int8"}), spec.methods[0], 0, tmp_path / "run")
    assert not lean._is_identity(old)


def test_runs_of_a_program_are_reported_with_their_codecs(tmp_path):
    options = {"rounds": 2, "local_steps": 2, "progress": False, "executor": "loop"}
    for name, codec in {"a": "y=int8,dy=int8", "b": None}.items():
        run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(), codec=codec, **options)
        run.save(tmp_path / "runs" / name, states=False)
    spec, plan = ExperimentFolder(tmp_path).read_plan()
    codecs = [spec.codec(method) for method in spec.methods]
    assert codecs in ([{"dy": "int8", "y": "int8"}, None], [None, {"dy": "int8", "y": "int8"}])
    assert all(planned.load() is not None for planned in plan)


@pytest.mark.slow
def test_the_command_line_replaces_the_codecs_of_a_spec(tmp_path):
    (tmp_path / "spec.toml").write_text(LEAN)
    options = ("--rounds", 1, "--seeds", 1, "--workers", 1, "--quiet", "--out", tmp_path / "out")
    refused = command.fadamgc("run", tmp_path / "spec.toml", "--codec", "dz=int4", *options)
    assert refused.exit_code != 0
    assert "no message of LocalAdam has this field" in refused.output
    assert not (tmp_path / "out").exists()
    assert command.fadamgc("run", tmp_path / "spec.toml", "--codec", "dx=int4", *options).exit_code == 0
    spec, _ = ExperimentFolder(tmp_path / "out").read_plan()
    assert [spec.codec(m) for m in spec.methods] == [{"dx": "int4"}, {"dy": "topk:0.01", "y": "int4"}]
