"""The config of a federation."""

from __future__ import annotations

import dataclasses

import pytest

import fadamgc

flwr = pytest.importorskip("flwr", reason="Flower is not installed")


from fadamgc.errors import InputError  # noqa: E402
from fadamgc.federation.settings import Settings  # noqa: E402
from fadamgc.flower.config import NOT_IN_CONFIG, ServerConfig, ServerOptions, config_keys, read_config  # noqa: E402
from fadamgc.flower.coordinator import Coordinator  # noqa: E402
from places import ROOT  # noqa: E402
from problems import class_task  # noqa: E402


def test_the_config_is_read_and_what_is_not_known_refused():
    config = read_config({"algorithm": "scaffold", "eta_l": 0.1, "data.alpha": 0.3, "eval-every": 2})
    assert config.algorithm == fadamgc.Scaffold(eta_l=0.1)
    assert config.settings == Settings(rounds=10, local_steps=10, eval_every=2)
    assert config.options == ServerOptions(algorithm="scaffold")
    assert config.app == {"data.alpha": 0.3}
    assert read_config({"local-epochs": 2}).settings == Settings(rounds=10, local_epochs=2)
    with pytest.raises(InputError, match=r"config localsteps=3 is not known.*local-steps"):
        read_config({"localsteps": 3})
    with pytest.raises(InputError, match="config beta2=0.9 is not known"):
        read_config({"algorithm": "fedavg", "beta2": 0.9})


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("reset-states", "true", "true or false"),
        ("round-timeout", "long", "a number"),
        ("clients", [], "a n"),
    ],
)
def test_values_of_a_wrong_kind_are_refused(key, value, accepted):
    with pytest.raises(InputError, match=f"config {key}=.* is not accepted; it must be {accepted}"):
        read_config({key: value})


def test_every_setting_of_a_run_is_a_key_or_cannot_be_one():
    """The accepted keys: a new setting or option must be added here, and to the documentation."""
    assert set(config_keys()) == {
        *("rounds", "sampled", "tracked", "local-steps", "local-epochs", "batch-size", "seed", "weights"),
        *(
            "eval-every",
            "eval-clients",
            "target",
            "clip-norm",
            "weight-decay",
            "autocast",
            "channels-last",
            "codec",
            "aggregation",
        ),
        *("algorithm", "clients", "experiment", "folder", "min-clients", "round-timeout", "wait-timeout"),
        *("below-minimum", "max-update-norm", "max-norm-ratio", "max-samples", "max-size-ratio"),
        *("reset-states", "checkpoints", "restore-round", "bind-clients", "unbind-clients", "metrics-file"),
    }
    names = {field.name for field in dataclasses.fields(Settings)}
    assert set(NOT_IN_CONFIG) <= names
    text = (ROOT / "docs" / "flower.md").read_text()
    assert all(f"`{key}`" in text for key in config_keys())


@pytest.mark.parametrize("key", ["privacy", "privacy.noise"])
def test_a_federation_has_no_noise_that_everybody_knows(key, tmp_path):
    with pytest.raises(InputError, match=r"privacy is for fadamgc\.simulate"):
        read_config({key: 1.0})
    privacy = fadamgc.Privacy({"dx": 1.0, "dy": 1.0}, noise=1.0)
    settings = Settings(rounds=1, local_steps=1, privacy=privacy)
    config = ServerConfig(fadamgc.FAdamGC(), settings, ServerOptions(), {})
    with pytest.raises(InputError, match="its noise is a function of the seed"):
        Coordinator(class_task(), config, tmp_path)
