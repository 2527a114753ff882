"""Tasks of your own texts, predictions in Python and on the command line, and sections of specs."""

from __future__ import annotations

import copy
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fadamgc
import tiny
from fadamgc.cli.main import app
from fadamgc.errors import FadamgcError, InputError
from fadamgc.experiments.predict import predict
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.tasks.build import build_task, label_counts
from fadamgc.tasks.sections import KnownTextTask, TableTask, TextFileTask, task_spec

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache")]  # transformers takes seconds to import

TEXTS, NUMBERS = tiny.sentences(60)
NAMES = [("negative", "positive")[y] for y in NUMBERS]
ROWS = [
    {"text": text, "mood": name, "user": f"user {i % 3}"}
    for i, (text, name) in enumerate(zip(TEXTS, NAMES, strict=True))
]
RUN = {"rounds": 2, "local_epochs": 1, "batch_size": 8, "progress": False}


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def task_of(bases, data, kind="bert", **options):
    options = {"clients": 3, "alpha": None, "length": 16} | options
    return fadamgc.tasks.text(bases[kind], data, **options)


def trained(task):
    return fadamgc.simulate(fadamgc.FAdamGC(eta_l=0.05), task, **RUN)


@torch.no_grad()
def randomise(model):
    """Give adapters and head large weights, so that different texts have different outputs."""
    random = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.requires_grad:
            p.copy_(torch.randn(p.shape, generator=random))


def shown_by(*words):
    return CliRunner().invoke(app, ["predict", *map(str, words)])


# Tasks.


def test_an_accuracy_is_measured_without_a_test_file(bases):
    run = trained(task_of(bases, (TEXTS, NAMES)))
    assert [record.test_accuracy is not None for record in run.history] == [True, True]
    assert sum(map(len, run.task.samples)) == 48
    assert len(run.task.test_samples) == 12


def test_no_test_data_no_evaluation(bases):
    run = trained(task_of(bases, (TEXTS, NAMES), test=None))
    assert [record.test_accuracy for record in run.history] == [None, None]
    assert sum(map(len, run.task.samples)) == 60


def test_the_same_texts_are_held_out_whatever_the_seed(bases):
    tests = [task_of(bases, (TEXTS, NAMES), seed=seed, test=0.5).test_pair for seed in (0, 1)]
    assert torch.equal(tests[0][0], tests[1][0])
    assert len(tests[0][1]) == 30


def test_every_value_of_the_column_of_clients_is_a_client(bases, reviews):
    task = task_of(bases, reviews, label="mood", client="user", clients=50)
    assert [len(data) for data in task.samples] == [16, 16, 16]
    assert [len(data) for data in task.client_test_samples] == [4, 4, 4]
    whole = task_of(bases, reviews, label="mood", client="user", test=None)
    for i, (_, y) in enumerate(whole.pairs):
        assert y.tolist() == NUMBERS[i::3]


def test_names_are_in_the_config_of_transformers(bases, reviews):
    config = task_of(bases, reviews, label="mood").model.classifier.config
    assert config.id2label == {0: "negative", 1: "positive"}
    assert config.label2id == {"negative": 0, "positive": 1}
    assert config.num_labels == 2


def test_a_model_of_texts_can_be_pickled(bases):
    model = task_of(bases, (TEXTS, NAMES)).model
    again = pickle.loads(pickle.dumps(model))
    assert again.predict(TEXTS) == model.predict(TEXTS)
    assert copy.deepcopy(model).reading is model.reading


# Predictions.


@pytest.mark.parametrize(("kind", "upper_layers"), [("bert", None), ("bert", 1), ("gpt2", None)])
def test_predictions_are_those_of_the_trained_model(bases, reviews, kind, upper_layers, tmp_path):
    task = task_of(bases, reviews, kind, label="mood", upper_layers=upper_layers, test=None, clients=1)
    run = trained(task)
    randomise(run.model)
    inputs, _ = task.pairs[0]
    with torch.no_grad():
        probabilities = torch.softmax(run.model.eval()(inputs), dim=1)
    assert probabilities.std(dim=0).min() > 1e-3
    torch.testing.assert_close(run.model.probabilities(TEXTS), probabilities, rtol=1e-4, atol=1e-5)
    expected = [("negative", "positive")[i] for i in probabilities.argmax(dim=1).tolist()]
    assert run.predict(TEXTS) == expected
    run.model.save_adapter(tmp_path / "adapter")
    for i in (0, 17):
        shares = predict(tmp_path / "adapter", TEXTS[i])
        assert next(iter(shares)) == expected[i]
        assert shares["positive"] == pytest.approx(float(probabilities[i, 1]), abs=1e-4)


def test_predictions_do_not_change_the_mode_of_the_model(bases):
    run = trained(task_of(bases, (TEXTS, NAMES), dropout=0.5))
    randomise(run.model.train())
    assert torch.equal(run.model.probabilities(TEXTS), run.model.probabilities(TEXTS))
    assert run.model.training
    assert run.predict([]) == []


def test_labels_that_are_numbers_stay_numbers(bases, tmp_path):
    run = trained(task_of(bases, (TEXTS, [5 * y - 1 for y in NUMBERS])))
    assert set(run.predict(TEXTS)) <= {-1, 4}
    run.model.save_adapter(tmp_path)
    assert set(predict(tmp_path, "a film")) == {"-1", "4"}


def test_pairs_are_tuples(bases, tmp_path):
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    run = trained(task_of(bases, (pairs, NAMES)))
    assert set(run.predict(pairs)) <= {"negative", "positive"}
    with pytest.raises(InputError, match="text 0 is 'a'; the model classifies first and second: give two"):
        run.predict(["a"])
    run.model.save_adapter(tmp_path)
    assert shown_by(tmp_path, "a film", "a plot").exit_code == 0
    assert "give two texts" in " ".join(shown_by(tmp_path, "a film").output.split())


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a film", "texts='a film' is not accepted; it must be a list of texts"),
        (3, "texts=3 is not accepted"),
        (["a", ("b", "c")], "text 1 is ('b', 'c'); the model classifies text: give one text"),
        (["a", 3], "text 1 is 3; the model classifies text"),
        (["a", " "], "text 1: the text is empty"),
        (["\udcff"], "is not UTF-8"),
    ],
)
def test_bad_texts_are_not_classified(bases, texts, message):
    model = task_of(bases, (TEXTS, NAMES)).model
    with pytest.raises(InputError) as error:
        model.predict(texts)
    assert message in str(error.value)


def test_runs_of_other_tasks_do_not_predict(bases, tmp_path):
    data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
    task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=1, local_steps=1, progress=False)
    with pytest.raises(InputError, match="predict is for tasks of texts, .* this run's model is a Linear"):
        run.predict(["a film"])
    run.save(tmp_path)
    with pytest.raises(FadamgcError, match="loaded without its task"):
        fadamgc.load_run(tmp_path).predict(["a film"])
    shown = shown_by(tmp_path, "a film")
    assert shown.exit_code == 2
    assert "run.model.save_adapter(folder)" in " ".join(shown.output.split())


def test_the_command_line_reads_a_folder_of_adapters(bases, reviews, tmp_path):
    base = shutil.copytree(bases["bert"], tmp_path / "base")
    folder = tmp_path / "adapter"
    task_of({"bert": base}, reviews, label="mood").model.save_adapter(folder)
    shown = shown_by(folder, "a film")
    assert shown.exit_code == 0, shown.output
    assert "positive" in shown.output
    assert "negative" in shown.output
    base.rename(tmp_path / "moved")
    assert "--base" in shown_by(folder, "a film").output
    assert shown_by(folder, "a film", "--base", tmp_path / "moved").exit_code == 0
    for file, content in (("fadamgc.json", "{}"), ("config.json", "[")):
        original = (folder / file).read_text()
        (folder / file).write_text(content)
        assert "is damaged" in " ".join(shown_by(folder, "a film").output.split())
        (folder / file).write_text(original)
    (folder / "fadamgc.json").unlink()
    assert "does not say how texts are read" in " ".join(shown_by(folder, "a film").output.split())


def test_a_tokenizer_of_your_own_is_saved_with_the_adapters(bases, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bases["bert"], truncation_side="left")
    model = task_of(bases, (TEXTS, NAMES), tokenizer=tokenizer, length=4).model
    randomise(model)
    model.save_adapter(tmp_path)
    likely = model.probabilities(["a lovely plot"])[0].tolist()
    assert predict(tmp_path, "a lovely plot") == pytest.approx(
        dict(zip(("negative", "positive"), likely, strict=True)), abs=1e-5
    )
    usual = task_of(bases, (TEXTS, NAMES), length=4).model
    randomise(usual)
    assert usual.probabilities(["a lovely plot"])[0].tolist() != pytest.approx(likely, abs=1e-5)
    usual.save_adapter(tmp_path / "usual")
    assert not (tmp_path / "usual" / "tokenizer_config.json").exists()


# Specs.


@pytest.mark.parametrize("validation", [0.0, 0.25])
@pytest.mark.parametrize("client", [None, "user"])
def test_a_section_of_a_file_of_texts(bases, reviews, validation, client):
    options = {"client": client} if client else {"clients": 3, "partition": "iid"}
    options |= {"columns": "text", "label": "mood", "model": bases["bert"], "length": 16}
    spec = task_spec(data=str(reviews), **options)
    assert isinstance(spec, TextFileTask)
    task = build_task(spec, 0, validation)
    assert task.n == 3
    assert sum(map(len, task.samples)) == (36 if validation else 48)
    assert len(task.test_samples) == 12
    assert task.name == "reviews"
    counts = label_counts(spec, 0).counts
    assert counts.shape == (3, 2)
    assert counts.sum() == 48
    if client:
        assert counts.sum(axis=1).tolist() == [16] * 3
        assert sum(map(len, task.client_test_samples)) == 12
    assert np.array_equal(task.test_pair[1], build_task(spec, 1, validation).test_pair[1])


def test_keys_tell_texts_from_tables():
    assert isinstance(task_spec(data="a.jsonl"), TextFileTask)
    assert isinstance(task_spec(data="a.csv", columns=["x", "y"]), TextFileTask)
    assert isinstance(task_spec(data="a.PARQUET", label="y"), TextFileTask)
    assert isinstance(task_spec(data="a.csv", target="y"), TableTask)
    assert isinstance(task_spec(data="glue/sst2"), KnownTextTask)
    with pytest.raises(InputError, match="train_samples=5 and client='user' cannot be combined"):
        task_spec(data="a.jsonl", client="user", train_samples=5)


SPEC = """
name = "own"
[task]
data = "reviews.jsonl"
label = "mood"
client = "user"
test = 0.25
model = "{base}"
length = 16
[run]
rounds = 1
local_epochs = 1
batch_size = 8
seeds = [0]
[[method]]
algorithm = "fadamgc"
"""


def test_a_spec_of_your_own_texts_runs_and_predicts(bases, reviews, tmp_path, monkeypatch):
    monkeypatch.chdir(reviews.parent)
    spec = parse_spec(SPEC.format(base=bases["bert"]), "here")
    assert spec.task.clients == 3
    run_spec(spec, tmp_path / "out", workers=1, quiet=True)
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    assert set(predict(folder, "a lovely film")) == {"negative", "positive"}
    monkeypatch.chdir(tmp_path / "out")  # away from the data
    assert shown_by(folder, "a lovely film").exit_code == 0
