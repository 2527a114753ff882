"""``fadamgc cite``: every method has a reference, entries are whole, and folders say what they used."""

from __future__ import annotations

import re

import pytest

import fadamgc
from command import fadamgc as command
from fadamgc.experiments.citations import DATA, MODELS, PARTITIONS, PRIVATE, ROBUST, bibtex, cited, references
from fadamgc.tasks.sections import RUNNABLE

SPEC = """
name = "small"
[task]
data = "digits"
clients = 4
partition = "iid"
[run]
rounds = 1
local_steps = 1
batch_size = 2
seeds = [0]
[[method]]
algorithm = "scaffold"
[[method]]
algorithm = "fedadam"
"""


def keys_of(text):
    return re.findall(r"^@\w+\{([^,]+),$", text, flags=re.MULTILINE)


def test_every_entry_is_whole():
    for key, entry in references().items():
        assert entry.count("{") == entry.count("}"), key
        assert entry.endswith("\n}"), key
        fields = re.findall(r"^  (\w+) += \{.*\},?$", entry, flags=re.MULTILINE)
        assert {"title", "author", "year"} <= set(fields), key
        lines = entry.splitlines()[1:-1]
        assert all(line.endswith("},") for line in lines[:-1]), key
        assert lines[-1].endswith("}"), key
        assert not re.search(r"VERSION|\.\.\.", entry), key


def test_every_method_has_a_reference_and_every_reference_is_used():
    used = {"fadamgc", *ROBUST, *PRIVATE}
    for table in (DATA, MODELS, PARTITIONS):
        used |= {key for keys in table.values() for key in keys}
    for name in fadamgc.algorithms():
        if name != "compose":
            algorithm = fadamgc.make_algorithm(name)
            assert algorithm.cites, name
            used |= set(algorithm.cites)
    kinds = (fadamgc.local, fadamgc.correction, fadamgc.server)
    used |= {key for kind in kinds for name in kind.__all__ for key in getattr(kind, name).cites}
    assert used == set(references())


def test_every_data_set_has_a_reference():
    made_here = {"quadratics", "linear_regression"}
    assert set(DATA) == set(RUNNABLE) - made_here


def test_a_composition_cites_its_factors():
    algo = fadamgc.compose(fadamgc.local.Adam(), "pre", fadamgc.server.Nesterov())
    assert algo.cites == ("kingma2015adam", "chen2025gradient", "douillard2023diloco")
    assert fadamgc.compose().cites == ()


def test_a_method_of_a_users_own_has_an_entry_of_its_own():
    entry = "@misc{me,\n  title = {Mine}\n}"
    assert bibtex(["kingma2015adam", entry, "kingma2015adam"]).count("@") == 2
    assert bibtex([entry]) == entry + "\n"


def test_folders_say_what_they_used(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    ran = command("run", tmp_path / "spec.toml", "--out", tmp_path / "out", "--workers", 1, "--quiet")
    assert ran.exit_code == 0, ran.output
    wanted = ["fadamgc", "karimireddy2020scaffold", "reddi2021adaptive", "alpaydin1998optical"]
    assert keys_of(command("cite", tmp_path / "out").stdout) == wanted
    one = tmp_path / "out" / "runs" / "scaffold-seed0"
    assert keys_of(command("cite", one).stdout) == [*wanted[:2], wanted[3]]
    both = command("cite", one, "fedprox").stdout
    assert keys_of(both) == [*wanted[:2], wanted[3], "li2020federated"]
    assert f"Version {fadamgc.__version__}" in both


def test_a_method_that_is_not_known_here_is_a_comment(tmp_path):
    text = SPEC.replace('algorithm = "scaffold"', 'algorithm = "my_module:Mine"')
    (tmp_path / "spec.toml").write_text(text)
    assert "% my_module:Mine: not known here" in bibtex(cited(str(tmp_path)))


def test_names_and_nothing():
    assert keys_of(command("cite").stdout) == ["fadamgc", "chen2025gradient"]
    assert keys_of(command("cite", "fedavg_m").stdout) == ["fadamgc", "cheng2024momentum", "xu2021fedcm"]
    wrong = command("cite", "fedavgm")
    assert wrong.exit_code == 2
    assert "'fedavgm' is neither a folder nor an algorithm" in wrong.output


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(fadamgc.InputError, match=r"has no spec.toml and no run.json"):
        cited(str(tmp_path))
