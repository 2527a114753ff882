"""Pretrained transformers with adapters: tokens, layers computed beforehand, executors, bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import fadamgc
import sets
import tiny
from fadamgc.cli.main import app
from fadamgc.data import own_texts, texts
from fadamgc.errors import InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.predict import predict
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.run.runner import Runner, run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.paper.study import load_study
from fadamgc.tasks.build import build_task, label_counts
from fadamgc.tasks.sections import task_spec

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from fadamgc import tasks
from fadamgc.federation.functions import TaskFunctions
from fadamgc.models import text as models
from fadamgc.models.pretrained import TARGETS, default_adapters, load_base, lora
from fadamgc.models.text import TextClassifier, encode
from problems import REPRESENTATIVES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("cache"),
]  # transformers alone takes seconds to import


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.csv(tmp_path_factory.mktemp("data") / "reviews.csv")


def task_of(base, data, **options):
    options = {"clients": 3, "alpha": None, "length": 16, "test": data} | options
    return fadamgc.tasks.text(base, data, **options)


# The base model.


def test_minilm_has_the_known_number_of_parameters():
    base = load_base("minilm", 2, seed=0)
    trained = [p for p in base.net.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 74_498
    every = sum(p.numel() for name, p in base.net.named_parameters() if "original_module" not in name)
    assert every == 22_713_216 + 74_498


def test_gpt2_trains_the_share_of_weights_of_the_paper():
    import peft
    from transformers import GPT2Config, GPT2ForSequenceClassification

    adapters = default_adapters("gpt2")
    adapters.fan_in_fan_out = True
    with torch.device("meta"):
        net = peft.get_peft_model(GPT2ForSequenceClassification(GPT2Config(num_labels=2)), adapters)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert trained == 16 * 147_456 + 2 * 768
    assert round(100 * trained / (124_439_808 + trained), 1) == 1.9


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_new_weights_depend_on_the_seed_and_base_weights_do_not(bases, kind):
    one, same, other = (load_base(bases[kind], 2, seed=s).net for s in (0, 0, 1))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.requires_grad and "lora_B" not in name and "bias" not in name:  # these begin with 0
            assert not torch.equal(a, c), name
        elif "original_module" not in name:
            assert torch.equal(a, c), name


def test_a_head_for_other_classes_is_replaced(bases, tmp_path):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(bases["bert"], num_labels=3)
    model.save_pretrained(tmp_path)
    tokenizer = load_base(bases["bert"], 2, seed=0).tokenizer
    heads = [
        load_base(tmp_path, n, seed=0, tokenizer=tokenizer).net.base_model.model.classifier for n in (3, 5)
    ]
    assert torch.equal(heads[0].original_module.weight, model.classifier.weight)
    assert heads[1].original_module.weight.shape == (5, 16)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("pair", [False, True])
def test_logits_are_those_of_transformers(bases, kind, pair):
    base = load_base(bases[kind], 3, seed=0)
    first, _ = tiny.sentences(80)
    second = tiny.sentences(80, seed=1)[0] if pair else None
    tokens = encode(base.tokenizer, first, second, 24)
    model = TextClassifier(base.net, base.tokenizer.pad_token_id).eval()
    with torch.no_grad():
        got = model(tokens)  # sorted and in pieces
        for i in (0, 1, 17, 79):  # alone: nothing is padded
            other = [f"\n{second[i]}" if kind == "gpt2" else second[i]] if pair else []
            encoded = base.tokenizer(first[i], *other, return_tensors="pt")
            torch.testing.assert_close(got[i], base.net(**encoded).logits[0], rtol=1e-4, atol=1e-5)


def test_a_text_that_ends_with_the_padding_token_ends_before_it(bases):
    base = load_base(bases["gpt2"], 2, seed=0)
    end = base.tokenizer.eos_token
    tokens = encode(base.tokenizer, [f"good film{end}", "good film"], None, 16)
    assert torch.equal(tokens[0], tokens[1])
    with pytest.raises(InputError, match=r"text 1 .* has no tokens"):
        encode(base.tokenizer, ["good", end], None, 16)

    class WithTypes:
        pad_token_id = 9

        def num_special_tokens_to_add(self, pair):
            return 1

        def __call__(self, *_, **__):
            return {"input_ids": [[5, 6, 9, 9], [5, 6]], "token_type_ids": [[0, 1, 1, 1], [0, 1]]}

    both = encode(WithTypes(), ["good film", "good film"], ["", ""], 16)
    assert both.tolist() == [[[5, 6], [0, 1]]] * 2


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_cached_outputs_of_lower_layers_depend_on_the_config(bases, monkeypatch, tmp_path, kind):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    tokens = torch.randint(5, 30, (3, 1, 6), dtype=torch.int32)
    found = []
    for slope in (1.0, 30.0):
        base = load_base(bases[kind], 2, seed=0, upper_layers=1)
        config = base.net.base_model.model.config
        name = "layer_norm_eps" if kind == "bert" else "layer_norm_epsilon"
        setattr(config, name, slope)
        for module in base.net.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = slope
        model = TextClassifier(base.net, base.tokenizer.pad_token_id)
        found.append(models.cached_lower_outputs(model, 2, tokens))
        torch.testing.assert_close(found[-1], models.lower_outputs(model, 2, tokens))
    assert not torch.allclose(*found)


def test_lower_layers_from_a_damaged_cache_are_computed_again(bases, monkeypatch, tmp_path):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    tokens = torch.randint(5, 30, (3, 1, 6), dtype=torch.int32)
    base = load_base(bases["bert"], 2, seed=0, upper_layers=1)
    model = TextClassifier(base.net, base.tokenizer.pad_token_id)
    whole = models.cached_lower_outputs(model, 2, tokens)
    (file,) = (tmp_path / "texts").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert torch.equal(models.cached_lower_outputs(model, 2, tokens), whole)


def test_trained_modules_below_the_upper_layers_are_refused(bases, data):
    adapters = lora(4, ["query"])
    adapters.modules_to_save = ["classifier", "LayerNorm"]
    with pytest.raises(InputError, match="upper_layers=1 does not train the layers below"):
        task_of(bases["bert"], data, adapters=adapters, upper_layers=1)


def test_unsupported_models_have_no_parts(bases):
    def in_parts(kind, change=None, saved=None):
        adapters = default_adapters(kind)
        adapters.modules_to_save = saved
        base = load_base(bases[kind], 2, seed=0, adapters=adapters)
        if change:
            change(base.net.base_model.model)
        return TextClassifier(base.net, 0).parts is not None

    assert in_parts("bert")
    assert in_parts("gpt2")
    assert not in_parts("gpt2", saved=["score", "attn"])
    assert not in_parts("bert", lambda model: model.gradient_checkpointing_enable())


def randomise(net):
    """Give adapters random weights: they start at 0, which would hide mistakes."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "lora_B" in name:
                p.normal_()


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("lengths", [(3, 1, 9, 9, 2), (4, 4), (1, 1, 1), (7,)])
def test_computing_without_padding_changes_nothing(bases, monkeypatch, kind, lengths):
    """The model in parts and the whole one of transformers: same logits, same gradients."""
    base = load_base(bases[kind], 3, seed=0, dropout=0.0)
    randomise(base.net)
    model = TextClassifier(base.net, base.tokenizer.pad_token_id).train()
    tokens = torch.randint(5, 30, (len(lengths), 1, max(lengths)), dtype=torch.int32)
    tokens[torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None, None]] = models.PADDING
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for parts in (models.packed, lambda _: None):
        monkeypatch.setattr(models, "packed", parts)
        logits = model(tokens)
        targets = torch.arange(len(lengths)) % 3
        found.append([logits, *torch.autograd.grad(cross_entropy(logits, targets), trained)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if max(lengths) > 1:  # a token that is alone is all that its query finds
        assert all(bool(g.any()) for g in found[0])


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("upper", [1, 2])
def test_layers_computed_beforehand_change_nothing(bases, data, kind, upper):
    base = load_base(bases[kind], 2, seed=0, upper_layers=upper)
    randomise(base.net)
    found = own_texts.read(data, ("text",), "label")
    tokens = encode(base.tokenizer, found.first, None, 16)
    model = TextClassifier(base.net, base.tokenizer.pad_token_id)
    first = len(model.parts.layers) - upper
    hidden = models.lower_outputs(model, first, tokens)
    short = models.without_lower_layers(model, first)
    y = torch.tensor(found.labels)
    for batch in (slice(0, 7), slice(7, 60)):
        losses = [cross_entropy(m(x[batch]), y[batch]) for m, x in ((model, tokens), (short, hidden))]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        gradients = [
            torch.autograd.grad(loss, [p for p in m.parameters() if p.requires_grad])
            for loss, m in zip(losses, (model, short), strict=True)
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in short.named_parameters() if p.requires_grad
    ]
    assert sum(p.numel() for p in short.parameters()) < sum(p.numel() for p in model.parameters()) / 2


# Tasks.


@pytest.mark.parametrize(
    ("kind", "algo"),
    [
        pytest.param("bert", REPRESENTATIVES["fadamgc"], id="bert-fadamgc"),
        *(pytest.param("gpt2", algo, id=f"gpt2-{name}") for name, algo in REPRESENTATIVES.items()),
    ],
)
def test_the_fast_executor_gives_the_loops_numbers(bases, data, kind, algo):
    task = task_of(bases[kind], data)
    some = {} if algo.full_participation else {"sampled": 2}
    options = some | {"rounds": 2, "local_epochs": 1, "batch_size": 8, "progress": False}
    one, two = (fadamgc.simulate(algo, task, executor=e, **options) for e in ("loop", "threads"))
    torch.testing.assert_close(two.x, one.x, rtol=1e-4, atol=1e-5)
    assert [r.test_accuracy for r in two.history] == [r.test_accuracy for r in one.history]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_with_dropout_a_run_depends_on_its_seed_alone(bases, data, kind):
    from fadamgc.sim.executors import ThreadsExecutor

    task = task_of(bases[kind], data, dropout=0.2)
    options = {"rounds": 2, "local_epochs": 1, "batch_size": 8, "progress": False}
    runs = [
        fadamgc.simulate(fadamgc.FAdamGC(), task, executor=how, seed=seed, **options)
        for how, seed in (
            (lambda p: ThreadsExecutor(p, workers=1), 0),
            (lambda p: ThreadsExecutor(p, workers=3), 0),
            (lambda p: ThreadsExecutor(p, workers=3), 1),
        )
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    assert not torch.equal(runs[0].x, runs[2].x)
    still = task_of(bases[kind], data, dropout=0.0)
    assert not torch.equal(runs[0].x, fadamgc.simulate(fadamgc.FAdamGC(), still, **options).x)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_dropout_of_adapters_alone(bases, data, kind):
    task = task_of(bases[kind], data, dropout=0.0, adapters=lora(4, TARGETS[kind], dropout=0.3))
    options = {"rounds": 2, "local_epochs": 1, "batch_size": 8, "progress": False}
    runs = [
        fadamgc.simulate(fadamgc.FAdamGC(), task, executor="threads", seed=seed, **options)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    assert not torch.equal(runs[0].x, runs[2].x)


@pytest.mark.usefixtures("two_threads")
def test_auto_skips_an_executor_that_cannot_run_the_model(bases, data, monkeypatch):
    tried = []

    def fails(executor, jobs):
        tried.append(executor)
        raise InputError("not this one")

    monkeypatch.setattr("fadamgc.sim.executors.threads.ThreadsExecutor.run", fails)
    monkeypatch.setattr("fadamgc.sim.executors.auto.LONG_RUN", 0)
    options = {"rounds": 1, "local_epochs": 1, "batch_size": 8, "progress": False}
    run = fadamgc.simulate(fadamgc.FAdamGC(), task_of(bases["bert"], data), **options)
    assert tried
    assert run.settings["executor"] != "threads"


def test_auto_runs_texts(bases, data):
    task = task_of(bases["bert"], data, upper_layers=1)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=2, local_epochs=1, batch_size=8, progress=False)
    assert torch.isfinite(run.x).all()


def test_only_adapters_and_head_are_in_the_flat_vector(bases, data):
    problem = TaskFunctions(task_of(bases["bert"], data))
    assert all("lora_" in name or "classifier" in name for name in problem.flat.names)
    assert problem.flat.d == 3 * 2 * 2 * 8 * 16 + 2 * 16 + 2
    assert problem.buffers0 == {}


def test_the_base_model_is_in_memory_once(bases, data):
    from fadamgc.sim.executors.trainer import Trainer

    task = task_of(bases["bert"], data)
    problem = TaskFunctions(task)
    places = [Trainer(problem) for _ in range(2)]
    modules = [task.model, problem.module, *(place.module for place in places)]
    where = [{n: p.data_ptr() for n, p in m.named_parameters() if n in problem.fixed} for m in modules]
    assert where[0]
    assert all(other == where[0] for other in where)
    trained = [{p.data_ptr() for n, p in m.named_parameters() if n in problem.flat.names} for m in modules]
    assert not any(a & b for i, a in enumerate(trained) for b in trained[:i])


def test_a_run_does_not_change_the_task(bases, data):
    task = task_of(bases["bert"], data)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    options = {"rounds": 1, "local_epochs": 1, "batch_size": 8, "progress": False, "dtype": torch.float64}
    fadamgc.simulate(fadamgc.FAdamGC(), task, **options)
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype


# Texts.


def test_headers_footers_and_quotes_of_posts_are_removed():
    post = (
        "From: someone@somewhere\nSubject: Re: engines\n\nIn article <1> other writes:\n> it is hot\n"
        "It is cold here.\n\n--\nSomeone, Somewhere\n"
    )
    cut = " here!there!other\nSubject: Re: engines\nFrom: other@there\n\nWarm.\n"
    found = texts.without_headers(
        texts.Texts([post, "From: a@b\nSubject: c\n\n> all quoted\n", cut], None, np.arange(3))
    )
    assert found.first == ["It is cold here.", "Warm."]
    assert found.y.tolist() == [0, 2]
    bare = texts.Texts(["no header here", "Note: it is none\n\nof these", "nor here"], None, np.arange(3))
    assert texts.without_headers(bare).first == bare.first


def test_custom_texts_are_read_from_parquet_as_from_csv(tmp_path, data):
    import pyarrow.csv
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.csv.read_csv(data), tmp_path / "reviews.parquet")
    for columns in (("text",), ("text", "other")):
        one, two = (own_texts.read(p, columns, "label") for p in (data, tmp_path / "reviews.parquet"))
        assert one.first == two.first
        assert one.second == two.second
        assert one.labels == two.labels
    assert one.first == tiny.sentences(60)[0]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("text,label\ngood,1\n", {"columns": ("review",)}, "there is no column 'review'; it has text, label"),
        ("text,label\ngood,1\n  ,0\n", {}, "row 1 has an empty text in 'text'"),
        ("text,label\ngood,1\nbad,\n", {}, "row 1 has label=''; it must be a text or a whole number"),
        ("text,label\ngood,yes\n", {}, "all rows have label='yes'; there must be at least two labels"),
        ("text,label\ngood,0\nbad,1\n", {"length": 1}, "length=1 is not accepted"),
        (
            "text,label\ngood,0\nbad,1\n",
            {"upper_layers": 9},
            "upper_layers=9 is not accepted; the model has 3",
        ),
        (
            "text,label\ngood,0\nbad,1\n",
            {"base": "nobody/nothing"},
            "is neither a local model folder nor downloadable",
        ),
        (None, {}, "does not exist"),
    ],
)
def test_bad_texts_are_refused(bases, tmp_path, monkeypatch, content, options, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it would try for half a minute
    path = tmp_path / "own.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        tasks.text(
            **({"base": bases["bert"], "data": path, "clients": 1, "alpha": None, "test": None} | options)
        )


def test_targets_that_match_nothing_are_refused(bases, data):
    with pytest.raises(InputError, match=r"target_modules: 'nothing' matches nothing.*it has .*query"):
        task_of(bases["bert"], data, adapters=lora(4, ["nothing"]))


def test_a_label_of_the_test_data_that_is_not_a_class_is_refused(bases, tmp_path, data):
    test = tmp_path / "test.csv"
    test.write_text("text,label\ngood,0\nbad,7\n")
    with pytest.raises(InputError, match=r"row 1 has label=7; there are 2 classes, .* classes="):
        task_of(bases["bert"], data, test=test)


@pytest.mark.parametrize("name", ["20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp"])
def test_known_sets_are_read(bases, folders, name):
    sets.texts(folders, name)
    train, test = (texts.load(name, split) for split in ("train", "test"))
    assert (len(train.first), len(test.y)) == (60, 20)
    assert (train.second is None) == (name in ("20_newsgroups", "glue/sst2"))
    task = tasks.text(bases["bert"], name, clients=4, alpha=1.0, length=16, upper_layers=1)
    assert task.n == 4
    assert len(task.test_pair[1]) == 20
    assert task.name == name
    assert task.model.reading.labels == texts.label_names(name)
    assert tasks.text(bases["bert"], name, clients=4, alpha=1.0, length=16, test=None).test_pair is None


# Experiments.


@pytest.mark.parametrize("validation", [0.0, 0.25])
@pytest.mark.parametrize("upper_layers", [None, 1])
def test_a_spec_of_texts(bases, folders, validation, upper_layers):
    sets.texts(folders, "glue/qnli", train=80)
    spec = task_spec(
        data="glue/qnli",
        model=bases["bert"],
        clients=4,
        alpha=1.0,
        length=16,
        upper_layers=upper_layers,
        train_samples=60,
        test_samples=10,
    )
    task = build_task(spec, 0, validation)
    assert sum(len(y) for _, y in task.pairs) == (45 if validation else 60)
    assert len(task.test_pair[1]) == 10
    assert label_counts(spec, 0).counts.sum() == 60
    again = build_task(spec, 0, validation)  # the lower layers' output from the cache
    for (x, y), (x2, y2) in zip(task.pairs, again.pairs, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=1, local_epochs=1, batch_size=8, progress=False)
    assert run.history[-1].test_accuracy is not None


def test_rank_and_targets_go_together():
    with pytest.raises(InputError, match="rank=4 and targets=None: give both or neither"):
        task_spec(data="glue/sst2", rank=4)


SPEC = """
name = "texts"
[task]
data = "{data}"
model = "{base}"
clients = 3
alpha = 1.0
length = 16
{more}
[run]
rounds = 2
local_epochs = 1
batch_size = 8
seeds = [0]
[[method]]
algorithm = "fadamgc"
eta_l = 0.05
"""


@pytest.mark.parametrize(("kind", "more"), [("bert", "upper_layers = 1"), ("gpt2", "")])
def test_a_run_saves_an_adapter_that_peft_can_read(bases, folders, tmp_path, kind, more):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    sets.texts(folders, "glue/sst2")
    spec = parse_spec(SPEC.format(data="glue/sst2", base=bases[kind], more=more), "here")
    runner = Runner(workers=1, quiet=True, save_models="last")
    runner.check(ExperimentFolder(tmp_path / "out").plan(spec))
    run_spec(spec, tmp_path / "out", runner=runner)
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    assert {path.name for path in (folder / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not list(folder.glob(".*"))
    base = AutoModelForSequenceClassification.from_pretrained(bases[kind], num_labels=2)
    tokenizer = load_base(bases[kind], 2, seed=0).tokenizer
    base.config.pad_token_id = tokenizer.pad_token_id
    net = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    task = build_task(spec.task, 0)
    with torch.no_grad():
        alone = torch.softmax(net(**tokenizer("a lovely film", return_tensors="pt")).logits[0], 0)
    shares = predict(folder, "a lovely film")
    assert list(shares) in (["negative", "positive"], ["positive", "negative"])
    torch.testing.assert_close(torch.tensor([shares["negative"], shares["positive"]]), alone)
    trained, first = load_file(folder / "model.safetensors"), dict(task.model.named_parameters())
    saved = dict(net.named_parameters())
    for name in TaskFunctions(task).flat.names:
        assert torch.equal(trained[name], saved[name.removeprefix("net.")])
        assert not torch.equal(trained[name], first[name])

    shown = CliRunner().invoke(app, ["predict", str(folder), "a lovely film"])
    assert shown.exit_code == 0, shown.output
    assert "positive" in shown.output
    for words, why in (
        ([str(folder), " "], "the text is empty"),
        ([str(folder), "one", "two"], "the model classifies sentence: give one text"),
        ([str(tmp_path / "out"), "one"], f"not a run on texts: there is no adapter in it; it has {folder}"),
        ([f"{folder}0", "one"], f"there is no such folder; did you mean '{folder}'?"),
    ):
        shown = CliRunner().invoke(app, ["predict", *words])
        assert shown.exit_code != 0
        assert why in " ".join((str(shown.exception) + shown.output).split())


def test_labels_have_names(folders):
    assert texts.label_names("20_newsgroups") == tuple(map(str, range(20)))
    folders.joinpath("20_newsgroups").mkdir(parents=True)
    folders.joinpath("20_newsgroups", "labels.json").write_text(json.dumps([f"group {i}" for i in range(20)]))
    assert texts.label_names("20_newsgroups")[3] == "group 3"


@pytest.mark.parametrize(
    ("name", "scale", "kind"),
    [
        ("main-20news", "laptop", "bert"),
        ("main-qnli", "laptop", "bert"),
        ("main-qqp", "paper", "gpt2"),
        ("main-sst2", "paper", "gpt2"),
    ],
)
def test_the_papers_language_studies_run_and_resume(bases, folders, tmp_path, name, scale, kind):
    (member,) = load_study(name, scale).members
    assert [m.label for m in member.spec.methods] == [
        *("FedAvg-M", "SCAFFOLD-M", "FedAdam", "FedAMS", "LocalAdam", "FA-NT", "FAdamGC")
    ]
    assert (member.spec.run.local_epochs, member.spec.run.sampled, member.spec.task.clients) == (1, 10, 100)
    sets.texts(folders, member.spec.task.data, train=300, test=30)
    spec = member.spec.replace("task", model=bases[kind], train_samples=None, length=16)
    spec = spec.replace("run", rounds=2, seeds=(0,), eval_every=1, batch_size=2)
    spec = spec.model_copy(update={"methods": spec.methods[-1:], "tune": None})
    out = tmp_path / "out"
    run_spec(spec, out, workers=1, quiet=True)
    one = read_results(out).runs["FAdamGC"][0]
    assert len(one.history) == 2
    assert len({k for r in one.history for w in r.work for k in w.steps}) > 1  # an epoch is what a client has
    next(out.glob("runs/*/run.json")).unlink()
    run_spec(spec, out, workers=1, quiet=True, resume=True)
    again = read_results(out).runs["FAdamGC"][0]
    assert [r.test_accuracy for r in again.history] == [r.test_accuracy for r in one.history]


# In a federation.


def test_a_federation_sends_adapters_and_nothing_else(bases, data, tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from fadamgc.federation.settings import Settings
    from fadamgc.flower import client_app
    from fadamgc.flower.clientapp import client_number
    from fadamgc.flower.config import ServerConfig, ServerOptions
    from fadamgc.flower.coordinator import Coordinator
    from fadamgc.flower.strategy import Strategy
    from in_process_grid import Here, held

    task = task_of(bases["bert"], data, clients=2)
    app = client_app(lambda context: (task.model, task.loss, task.pairs[client_number(context)]))
    settings = Settings(rounds=2, local_epochs=1, batch_size=8)
    config = ServerConfig(fadamgc.FAdamGC(), settings, ServerOptions(clients=2, experiment="texts"), {})
    coordinator = Coordinator(task, config, tmp_path / "server")
    grid, down = Here(app, tmp_path, 2), []
    push = grid.push_messages
    grid.push_messages = lambda messages: (down.extend(held(m.content) for m in messages), push(messages))[1]
    Strategy(coordinator, round_timeout=60, wait_timeout=60, poll=0.01).start(grid)
    trained = TaskFunctions(task).flat.d
    assert max(down) == 2 * 4 * trained  # x and y
    assert sum(down) == sum(r.bytes_down for r in coordinator.history)
    run = fadamgc.simulate(
        fadamgc.FAdamGC(), task, rounds=2, local_epochs=1, batch_size=8, executor="loop", progress=False
    )
    assert torch.equal(coordinator.server.x, run.x)
