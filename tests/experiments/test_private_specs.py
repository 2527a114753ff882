"""Privacy in specs and in records, and the refusal in a federation's config."""

from __future__ import annotations

import pytest

import fadamgc
from fadamgc.errors import InputError
from fadamgc.experiments.citations import PRIVATE, cited
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from tiny_experiments import TINY

pytestmark = pytest.mark.usefixtures("quick")

PRIVATE_SPEC = TINY.replace("[run]\n", "[run]\nprivacy = { clip = { dx = 0.1 }, noise = 2.0 }\n").replace(
    "tracked = 3\n", "tracked = 3\nprivacy = { clip = { dx = 0.1, dy = 1 }, noise = 1 }\n"
)


def spec_of(text):
    return parse_spec(text, "spec.toml")


def test_a_method_replaces_the_privacy_of_the_run():
    spec = spec_of(PRIVATE_SPEC)
    first, second = map(spec.privacy, spec.methods)
    assert first == {"clip": {"dx": 0.1}, "noise": 2.0}
    assert second == {"clip": {"dx": 0.1, "dy": 1.0}, "noise": 1.0}
    none = spec_of(
        PRIVATE_SPEC.replace("privacy = { clip = { dx = 0.1, dy = 1 }, noise = 1 }", "privacy = {}")
    )
    assert [none.privacy(m) for m in none.methods] == [first, None]
    for again in (spec, none, spec_of(TINY)):
        assert spec_of(again.to_toml()) == again


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("dy = 1 ", "dz = 1 ", r"\[\[method\]\] FAdamGC \(all tracked\): privacy clip has 'dz'"),
        ("{ dx = 0.1 }", "{ dx = -1 }", r"\[run\] privacy=.* clip of dx=-1"),
        ("noise = 2.0", "nois = 2.0", r"\[run\] privacy=.*no key 'nois'; did you mean 'noise'"),
        (
            "{ dx = 0.1 }",
            "{ dx = 0.1, dy = 1 }",
            r"\[run\] privacy clip has 'dy', .*; give \[\[method\]\] LocalAdam privacy of its own, or pri",
        ),
        ("[run]\n", '[run]\nweights = "size"\n', r"\[run\] privacy is given together with weights='size'"),
    ],
)
def test_privacy_that_does_not_fit_is_refused(before, after, message):
    with pytest.raises(InputError, match=message):
        spec_of(PRIVATE_SPEC.replace(before, after, 1))


def test_runs_are_private_and_are_found_again(tmp_path):
    spec = spec_of(PRIVATE_SPEC)
    run_spec(spec, tmp_path / "out", workers=1)
    runs = ExperimentFolder(tmp_path / "out").load().runs.values()
    settings = [of_method[0].settings for of_method in runs]
    assert [s["privacy"] for s in settings] == [spec.privacy(m) for m in spec.methods]
    for (run, *_), method in zip(runs, spec.methods, strict=True):
        privacy = fadamgc.Privacy.of(spec.privacy(method))
        plan = {"rounds": spec.run.rounds, "clients": spec.task.clients, "sampled": spec.run.sampled}
        assert run.epsilon() == privacy.epsilon(method.make(), tracked=spec.tracked(method), **plan)
    assert set(PRIVATE) <= set(cited(str(tmp_path / "out")))
    other = spec_of(PRIVATE_SPEC.replace("noise = 2.0", "noise = 3.0"))
    with pytest.raises(InputError, match="an experiment with other settings: .*privacy="):
        run_spec(other, tmp_path / "out", resume=True, workers=1)
