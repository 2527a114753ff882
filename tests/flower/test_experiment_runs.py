"""Runs of an app on a federation of this machine: keys of the config, and experiments that are complete."""

from __future__ import annotations

import json

import pytest

from fadamgc.errors import InputError
from fadamgc.flower.experiment_runs import app_with_keys, make_room, parse_config, read_app, say_complete
from places import ROOT

DIGITS = ROOT / "examples" / "flower-digits"
APP = """
[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
experiment = "mine"
rounds = 3
data.alpha = 0.5
"""


@pytest.fixture
def app(tmp_path):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(APP)
    (folder / "app.py").write_text("server = client = None\n")
    (folder / ".secret").write_text("x")
    return folder


def test_a_config_is_read_as_flower_reads_it():
    assert parse_config("") == {}
    assert parse_config("rounds=3 algorithm='scaffold' data.alpha=0.1") == {
        "rounds": 3,
        "algorithm": "scaffold",
        "data.alpha": 0.1,
    }
    for text in ("rounds", "rounds=x"):
        with pytest.raises(InputError, match="is not understood"):
            parse_config(text)


def test_keys_that_an_app_lists_need_no_copy(app, tmp_path):
    assert app_with_keys(app, {"rounds": 5, "data.alpha": 0.1}, tmp_path / "copies") == app
    assert not (tmp_path / "copies").exists()


def test_every_documented_key_may_be_given(app, tmp_path):
    values = {"min-clients": 2, "eta_l": 0.1, "data.beta": "x", "weights": "size", "reset-states": True}
    copy = app_with_keys(app, values, app / "out" / "copies")  # inside the app's own folder
    assert (copy / "app.py").exists()
    assert not (copy / ".secret").exists()
    assert not (copy / "out").exists()
    _, listed = read_app(copy)
    assert listed == {"experiment": "mine", "rounds": 3, "data.alpha": 0.5, **values}
    assert read_app(app)[0] == APP  # the app is as it was
    again = app_with_keys(app, {"seed": 1}, app / "out" / "copies")
    assert "min-clients" not in read_app(again)[1]


@pytest.mark.parametrize(
    ("key", "message"),
    [("min-client", "config min-client=2 is not known; did you mean 'min-clients'"), ("eta", "is not known")],
)
def test_unknown_keys_are_refused(app, tmp_path, key, message):
    with pytest.raises(InputError, match=message):
        app_with_keys(app, {key: 2}, tmp_path / "copies")


def test_a_folder_that_is_no_app_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"it has no pyproject.toml"):
        read_app(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(InputError, match=r"it has no \[tool.flwr.app\]"):
        read_app(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A federation's folder with an experiment that is complete after 3 rounds."""
    for node in ("node-0", "node-1"):
        (tmp_path / "states" / node / "mine" / "client-0").mkdir(parents=True)
        (tmp_path / "states" / node / "other").mkdir()
    (tmp_path / "servers" / "mine").mkdir(parents=True)
    (tmp_path / "servers" / "mine" / "model").write_text("x")
    say_complete(tmp_path / "servers" / "mine", 3, target_reached=False)
    return tmp_path


def test_a_complete_experiment_makes_room_and_loses_nothing(folder):
    aside = make_room(folder, {"experiment": "mine", "rounds": 3})
    assert aside == folder / "finished" / "mine-1"
    assert (aside / "server" / "model").read_text() == "x"
    assert (aside / "node-1" / "client-0").is_dir()
    assert not (folder / "servers" / "mine").exists()
    assert (folder / "states" / "node-0" / "other").is_dir()
    assert make_room(folder, {"experiment": "mine", "rounds": 3}) is None
    (folder / "servers" / "mine").mkdir()
    say_complete(folder / "servers" / "mine", 2, target_reached=True)
    assert make_room(folder, {"experiment": "mine", "rounds": 3}) == folder / "finished" / "mine-2"


@pytest.mark.parametrize(
    "config",
    [{"rounds": 4}, {"rounds": 3, "reset-states": True}, {"rounds": 3, "restore-round": 1}, {"folder": "x"}],
)
def test_an_experiment_that_resumes_stays(folder, config):
    assert make_room(folder, {"experiment": "mine", **config}) is None
    assert (folder / "servers" / "mine").exists()


def test_an_interrupted_experiment_resumes(folder):
    (folder / "servers" / "mine" / "complete.json").unlink()
    assert make_room(folder, {"experiment": "mine", "rounds": 3}) is None
    (folder / "servers" / "mine" / "complete.json").write_text(json.dumps([1]))
    assert make_room(folder, {"experiment": "mine", "rounds": 3}) is None


def test_states_of_an_earlier_version_are_named(folder, monkeypatch):
    earlier = folder / "home"
    (earlier / "servers" / "mine").mkdir(parents=True)
    monkeypatch.setattr("fadamgc.flower.experiment_runs.user_folder", lambda kind: earlier)
    (folder / "servers" / "mine").rename(folder / "gone")
    with pytest.raises(InputError, match="which an earlier version has written, in .*; move that folder to"):
        make_room(folder, {"experiment": "mine", "rounds": 3})


def test_the_example_lists_its_keys():
    _, listed = read_app(DIGITS)
    assert {"min-clients", "experiment", "rounds"} <= set(listed)
