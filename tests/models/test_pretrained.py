"""Base models and files that are not what they should be: nothing is trained on noise without a word."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import fadamgc
import sets
import tiny
from fadamgc import runtime
from fadamgc.cli.main import app
from fadamgc.data import own_texts
from fadamgc.errors import InputError
from fadamgc.experiments.predict import predict
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from fadamgc.models.pretrained import load_adapter, load_base, lora  # noqa: E402
from fadamgc.models.text import TextClassifier, encode  # noqa: E402

pytestmark = pytest.mark.slow  # transformers alone takes seconds to import

TEXTS = "text,label\ngood film,0\nbad film,1\na lovely plot,0\nawful,1\n"


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text(TEXTS)
    return path


@pytest.fixture
def copied(bases, tmp_path):
    """Copy a base model, so that a test can damage its files."""
    return lambda kind: shutil.copytree(bases[kind], tmp_path / f"copied-{kind}")


def task(base, data, **options):
    return fadamgc.tasks.text(
        base, data, **{"clients": 1, "alpha": None, "length": 16, "test": None} | options
    )


def refused(message, base, data, **options):
    with pytest.raises(InputError) as error:
        task(base, data, **options)
    assert message in str(error.value)


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder, change):
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Base models.


def test_weights_that_do_not_fit_are_refused(copied, reviews):
    folder = copied("bert")
    change_weights(folder, lambda weights: {f"foo.{name}": value for name, value in weights.items()})
    refused("are config.json and the weights of the same model?", folder, reviews)


def test_a_config_of_another_width_is_refused(copied, reviews):
    folder = copied("bert")
    change_config(folder, hidden_size=32)
    refused("there are no weights that fit for 5", folder, reviews)


@pytest.mark.parametrize("damaged", ["model.safetensors", "tokenizer.json", "config.json"])
def test_damaged_files_are_refused(copied, reviews, damaged):
    folder = copied("bert")
    (folder / damaged).write_bytes((folder / damaged).read_bytes()[:50])
    refused(f"base={str(folder)!r} cannot be used as a text classifier", folder, reviews)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_folder_without_tokenizer_is_refused(copied, reviews, kind):
    folder = copied(kind)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    refused("has no tokenizer's files", folder, reviews)


def test_a_tokenizer_of_another_model_is_refused(bases, reviews):
    gpt2 = load_base(bases["gpt2"], 2, seed=0).tokenizer
    refused("the tokenizer has 50257 tokens and base=", bases["bert"], reviews, tokenizer=gpt2)
    refused(
        "tokenizer='bert' is not accepted; it must be one of transformers",
        bases["bert"],
        reviews,
        tokenizer="bert",
    )


def test_the_given_tokenizer_does_not_change(bases, reviews):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bases["gpt2"])
    assert tokenizer.pad_token is None
    task(bases["gpt2"], reviews, tokenizer=tokenizer)
    assert tokenizer.pad_token is None


def test_a_folder_that_does_not_exist_is_not_a_name_on_the_hub(reviews, tmp_path):
    refused("there is no such folder", tmp_path / "nothing", reviews)
    refused("there is no such folder", "./nothing", reviews)


def test_a_missing_pooling_layer_is_trained_and_saved(copied, reviews, tmp_path):
    folder = copied("bert")
    change_weights(folder, lambda w: {name: value for name, value in w.items() if "pooler" not in name})
    text_task = task(folder, reviews)
    run = fadamgc.simulate(
        fadamgc.FAdamGC(eta_l=0.1), text_task, rounds=2, local_steps=2, batch_size=2, progress=False
    )
    run.model.save_adapter(tmp_path / "adapter")
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert any("pooler" in name for name in trained)
    tokens = text_task.pairs[0][0]
    with torch.no_grad():
        expected = run.model.eval()(tokens)
        for _ in range(2):
            base = load_adapter(folder, 2, tmp_path / "adapter")
            torch.testing.assert_close(TextClassifier(base.net, 0).eval()(tokens), expected)


@pytest.mark.parametrize(
    ("kind", "model", "config"),
    [
        ("distilbert", "DistilBertModel", {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
        (
            "albert",
            "AlbertModel",
            {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
        ),
        ("gpt2", "GPT2Model", {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0}),
    ],
)
def test_dropout_reaches_every_part(bases, tmp_path, kind, model, config):
    import transformers

    cls = getattr(transformers, model)
    words = {"vocab_size": 50257 if kind == "gpt2" else 30522}
    cls(cls.config_class(**words, **config)).save_pretrained(tmp_path / kind)
    tokenizer = load_base(bases["gpt2" if kind == "gpt2" else "bert"], 2, seed=0).tokenizer
    adapters = lora(2, "all-linear") if kind == "albert" else None
    base = load_base(tmp_path / kind, 2, seed=0, tokenizer=tokenizer, adapters=adapters, dropout=0.25)
    found = {name: m.p for name, m in base.net.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert found
    assert set(found.values()) == {0.25}, found


@pytest.mark.parametrize("dropout", [2.0, -0.1, "0.1", True])
def test_a_dropout_outside_0_to_1_is_refused(bases, reviews, dropout):
    refused(
        f"dropout={dropout!r} is not accepted; it must be a number >= 0 and < 1",
        bases["bert"],
        reviews,
        dropout=dropout,
    )


# Heads.


def modernbert():
    from transformers import ModernBertConfig, ModernBertModel

    ids = {
        "pad_token_id": 0,
        "cls_token_id": 101,
        "sep_token_id": 102,
        "bos_token_id": 101,
        "eos_token_id": 102,
    }
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ModernBertModel(ModernBertConfig(vocab_size=30522, max_position_embeddings=64, **small, **ids))


def xlnet():
    from transformers import XLNetConfig, XLNetModel

    return XLNetModel(
        XLNetConfig(vocab_size=30522, d_model=16, n_layer=2, n_head=2, d_inner=32, pad_token_id=0)
    )


@pytest.mark.parametrize(
    ("make", "targets", "parts"),
    [
        (modernbert, ["Wqkv"], {"head", "classifier"}),
        (xlnet, ["layer_1"], {"sequence_summary", "logits_proj"}),
    ],
)
def test_a_head_is_trained_and_saved_whatever_its_name(bases, reviews, tmp_path, make, targets, parts):
    from transformers import AutoModelForSequenceClassification

    folder = shutil.copytree(bases["bert"], tmp_path / "base")
    torch.manual_seed(0)
    make().save_pretrained(folder)
    text_task = task(folder, reviews, adapters=peft.LoraConfig(r=2, target_modules=targets), seed=3)
    inside = dict(text_task.model.classifier.named_parameters())
    trained = {name.split(".")[0] for name, value in inside.items() if value.requires_grad}
    assert parts <= trained
    options = {"rounds": 2, "local_epochs": 1, "batch_size": 2, "progress": False}
    run = fadamgc.simulate(fadamgc.FAdamGC(eta_l=0.01), text_task, **options)
    run.model.save_adapter(tmp_path / "adapter")
    torch.manual_seed(7)  # of a head that nobody has trained
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    base.config.pad_token_id = 0
    alone = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    tokens = text_task.pairs[0][0]
    with torch.no_grad():
        expected = run.model.eval()(tokens)
        torch.testing.assert_close(TextClassifier(alone, 0)(tokens), expected)
        again = load_adapter(folder, 2, tmp_path / "adapter")
        torch.testing.assert_close(TextClassifier(again.net, 0).eval()(tokens), expected)


# Adapters.


def test_the_head_is_trained_and_saved_without_task_type(bases, reviews, tmp_path):
    text_task = task(bases["bert"], reviews, adapters=peft.LoraConfig(r=4, target_modules=["query"]))
    run = fadamgc.simulate(
        fadamgc.FAdamGC(eta_l=0.1), text_task, rounds=2, local_steps=2, batch_size=2, progress=False
    )
    run.model.save_adapter(tmp_path / "adapter")
    base = load_adapter(bases["bert"], 2, tmp_path / "adapter")
    tokens = text_task.pairs[0][0]
    with torch.no_grad():
        torch.testing.assert_close(TextClassifier(base.net, 0).eval()(tokens), run.model.eval()(tokens))


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"task_type": "CAUSAL_LM", "target_modules": ["query"]}, "task_type='CAUSAL_LM' is not accepted"),
        ({"target_modules": ["query", "valeu"]}, "target_modules: 'valeu' matches nothing"),
        ({"target_modules": ["classifier"]}, "it has dense, key, query, value"),
        ({"target_modules": ".*nothing"}, "match nothing that LoRA can adapt"),
        ({"target_modules": "("}, "target_modules='(' match nothing"),
        ({"target_modules": ["query"], "lora_dropout": 1.5}, "dropout probability has to be between 0 and 1"),
        ({"target_modules": ["query"], "modules_to_save": ["nil"]}, "modules_to_save: 'nil' matches nothing"),
        ({"target_modules": ["query"], "inference_mode": True}, "inference_mode=True is not accepted"),
    ],
)
def test_bad_adapters_are_refused(bases, reviews, adapters, message):
    refused(message, bases["bert"], reviews, adapters=peft.LoraConfig(**adapters))


def test_adapters_are_a_lora_config(bases, reviews):
    refused("it must be a peft.LoraConfig", bases["bert"], reviews, adapters={"r": 4})
    prefix = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    refused("it must be a peft.LoraConfig", bases["bert"], reviews, adapters=prefix)


def test_upper_layers_cannot_be_combined_with_a_pattern(bases, reviews):
    adapters = lora(4, "all-linear")
    refused(
        "cannot be combined with target_modules='all-linear'",
        bases["bert"],
        reviews,
        adapters=adapters,
        upper_layers=1,
    )


# Lengths.


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("upper_layers", [None, 1])
def test_more_tokens_than_a_model_takes_are_refused(bases, tmp_path, kind, upper_layers):
    path = tmp_path / "long.csv"
    path.write_text(TEXTS + f"{'film ' * 100},1\n")
    message = f"length=80 is not accepted; base={bases[kind]!r} takes at most 64 tokens"
    refused(message, bases[kind], path, length=80, upper_layers=upper_layers)
    assert task(bases[kind], path, length=64, upper_layers=upper_layers).clients


def test_roberta_takes_fewer_tokens_than_it_has_positions(bases, tmp_path):
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(
        **{"vocab_size": 30522, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 32, "max_position_embeddings": 20, "pad_token_id": 1},
    )
    RobertaModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "roberta")
    tokenizer = load_base(bases["bert"], 2, seed=0).tokenizer  # its padding is token 0
    path = tmp_path / "long.csv"
    path.write_text(TEXTS + f"{'film ' * 100},1\n")
    refused("takes at most 19 tokens", tmp_path / "roberta", path, tokenizer=tokenizer, length=20)
    text_task = task(tmp_path / "roberta", path, tokenizer=tokenizer, length=19)
    fadamgc.simulate(fadamgc.FAdamGC(), text_task, rounds=1, local_epochs=1, batch_size=5, progress=False)


def test_length_must_allow_one_token_per_text(bases, tmp_path):
    path = tiny.csv(tmp_path / "pairs.csv")
    columns = ("text", "other")
    refused(
        "length=4 is not accepted; it must be a whole number >= 5",
        bases["bert"],
        path,
        columns=columns,
        length=4,
    )
    refused("length=2 is not accepted; it must be a whole number >= 3", bases["bert"], path, length=2)
    assert task(bases["bert"], path, columns=columns, length=5).pairs[0][0].shape[2] == 5


def test_a_line_break_separates_the_texts_of_a_pair_for_a_decoder(bases):
    tokenizer = load_base(bases["gpt2"], 2, seed=0).tokenizer
    assert tokenizer.decode(encode(tokenizer, ["good film"], ["bad film"], 16)[0, 0]) == "good film\nbad film"


def test_lower_layers_that_do_not_fit_into_memory_are_refused(bases, reviews, monkeypatch):
    monkeypatch.setattr("fadamgc.models.text.memory", lambda: 1000)
    refused(
        "upper_layers=1: the outputs of the layers below, for 4 texts", bases["bert"], reviews, upper_layers=1
    )
    assert runtime.memory() > 1000


# Files of texts.


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"text,label\ngood,0\nbad,0\n", {}, "all rows have label=0; there must be at least two labels"),
        (b"text,label\ngood,0\nbad,2\n", {"classes": 2}, "row 1 has label=2; there are 2 classes"),
        (b"text,label\ngood,0\nbad,1\n", {"classes": 1}, "classes=1 is not accepted"),
        (b"text,label\ngood,0\nna\xefve,1\n", {}, "invalid UTF8 data; save it as UTF-8"),
        (b"t\xe9xt,label\ngood,0\n", {}, "save it as UTF-8"),
        (b"text,text,label\ngood,bad,0\n", {}, "there is more than one column 'text'"),
        (b"text,label\n", {}, "reviews.csv: there are no rows in it"),
        (TEXTS.encode(), {"columns": "review"}, "there is no column 'review'; it has text, label"),
        (TEXTS.encode(), {"columns": ("text",) * 3}, "it must be one column of texts, or two"),
        (TEXTS.encode(), {"test": "nothing.csv"}, "test='nothing.csv' does not exist"),
        (TEXTS.encode(), {"test": "/"}, "test='/' is not a file"),
        (TEXTS.encode(), {"length": 2.5}, "length=2.5 is not accepted"),
        (TEXTS.encode(), {"length": None}, "length=None is not accepted"),
        (TEXTS.encode(), {"upper_layers": 1.5}, "upper_layers=1.5 is not accepted"),
        (TEXTS.encode(), {"seed": -1}, "seed=-1 is not accepted"),
        (TEXTS.encode(), {"seed": 2**70}, "it must be a whole number <= 9223372036854775807"),
        (TEXTS.encode(), {"length": 2**70}, "it must be a whole number <= 2147483647"),
        (TEXTS.encode(), {"columns": 5}, "columns=5 is not accepted; it must be the name of a column"),
        (TEXTS.encode(), {"columns": [5]}, "columns=[5] is not accepted"),
        (TEXTS.encode(), {"columns": {"text"}}, "columns={'text'} is not accepted"),
        (TEXTS.encode(), {"label": 5}, "label=5 is not accepted"),
        (TEXTS.encode(), {"test": "~nobody-is-called-so/x.csv"}, "does not exist"),
        ("text,label\ngood,0\n\u200b,1\n".encode(), {}, "has no tokens"),
        (TEXTS.encode(), {"clients": 0}, "clients=0 is not accepted"),
    ],
)
def test_bad_files_are_refused(bases, tmp_path, content, options, message):
    path = tmp_path / "reviews.csv"
    path.write_bytes(content)
    refused(message, bases["bert"], path, **options)


def test_numbers_are_not_texts(bases, tmp_path):
    sets.write_rows(tmp_path / "reviews.parquet", text=[3, 4], label=[0, 1])
    refused("row 0 has text=3, which is not a text", bases["bert"], tmp_path / "reviews.parquet")


def test_bytes_that_are_not_text_are_refused(bases, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    damaged = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"b\xff"], pa.binary()).buffers())
    parquet.write_table(pa.table({"text": damaged, "label": [0, 1]}), tmp_path / "reviews.parquet")
    refused("a text in 'text', from row 0 on, is not UTF-8", bases["bert"], tmp_path / "reviews.parquet")


def test_texts_may_look_like_anything(bases, tmp_path):
    path = tmp_path / "REVIEWS.CSV"
    path.write_text("text,label\n3,0\n2020-01-01,1\ntrue,0\nNA,2\n" + f'"{"long " * 500_000}",1\n')
    found = own_texts.read(path, ("text",), "label")
    assert found.first[:4] == ["3", "2020-01-01", "true", "NA"]
    assert found.labels == [0, 1, 0, 2, 1]


def test_classes_that_are_not_in_the_train_data(bases, reviews):
    model = task(bases["bert"], reviews, classes=5).model
    assert model.classifier.classifier.modules_to_save["default"].out_features == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("test", "x.csv"), ("columns", "text"), ("label", "y"), ("classes", 3), ("client", "user")],
)
def test_known_data_sets_have_their_own_settings(bases, field, value):
    refused(
        f"{field}={value!r} is for your own data, not for glue/sst2",
        bases["bert"],
        "glue/sst2",
        **{field: value},
    )


def test_base_and_data_of_other_types_are_refused(bases, reviews):
    refused("base=3 is not accepted", 3, reviews)
    refused("data of type int is not accepted; give a .csv", bases["bert"], 3)


# Saved runs.

SPEC = """
name = "texts"

[task]
data = "glue/sst2"
model = "{base}"
clients = 3
length = 16
rank = 4
targets = {targets}

[run]
rounds = 1
batch_size = 8
local_epochs = 1
target = 0.9
seeds = [0]

[[method]]
algorithm = "fadamgc"
eta_l = 0.05
"""


@pytest.fixture
def saved_run(bases, tmp_path, monkeypatch):
    """The folder of a run on texts; its base model can be changed."""
    monkeypatch.setenv("FADAMGC_DATA", str(tmp_path / "data"))
    sets.texts(tmp_path / "data", "glue/sst2")
    base = shutil.copytree(bases["bert"], tmp_path / "base")
    spec = parse_spec(SPEC.format(base=base, targets='["query"]'), "here")
    run_spec(spec, tmp_path / "out", workers=1, quiet=True)
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    return folder


def test_a_run_with_custom_targets_predicts(saved_run):
    assert sum(predict(saved_run, "a lovely film").values()) == pytest.approx(1)
    assert sum(predict(saved_run, "a lovely film " * 100).values()) == pytest.approx(1)


def test_a_run_of_an_earlier_version_predicts(saved_run):
    now = predict(saved_run, "a lovely film")
    for file in ("fadamgc.json", "config.json"):
        (saved_run / "adapter" / file).unlink()
    assert predict(saved_run, "a lovely film") == now


def test_an_adapter_is_saved_next_to_other_files(bases, reviews, tmp_path, monkeypatch):
    model = task(bases["bert"], reviews).model
    place = tmp_path / "place"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    for _ in range(2):
        model.save_adapter(place)
    files = {path.name for path in place.iterdir()}
    assert files >= {"thesis.txt", "adapter_config.json", "adapter_model.safetensors"}
    assert not [name for name in files if name.startswith(".")]
    with pytest.raises(InputError, match="cannot be written"):
        model.save_adapter(place / "thesis.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    model.save_adapter("~/deep/adapter")
    load_adapter(bases["bert"], 2, tmp_path / "deep" / "adapter")


def test_the_base_model_of_a_run_may_move(saved_run, tmp_path):
    before = predict(saved_run, "a film")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="give its path with --base"):
        predict(saved_run, "a film")
    assert predict(saved_run, "a film", base=tmp_path / "moved") == before
    shown = CliRunner().invoke(app, ["predict", str(saved_run), "a film", "--base", str(tmp_path / "moved")])
    assert shown.exit_code == 0, shown.output


def test_a_text_that_is_not_unicode_is_refused(saved_run):
    with pytest.raises(InputError, match="is not UTF-8"):
        predict(saved_run, "a \udcff film")


def test_a_damaged_run_is_refused(saved_run, tmp_path):
    weights = saved_run / "adapter" / "adapter_model.safetensors"
    original = weights.read_bytes()
    base = tmp_path / "base"

    def refuses(message):
        shown = CliRunner().invoke(app, ["predict", str(saved_run), "a film"])
        assert shown.exit_code == 2, shown.output
        assert message in " ".join(shown.output.split()), shown.output

    weights.write_bytes(original[:100])
    refuses("or is damaged")
    weights.unlink()
    refuses("has no adapter_model.safetensors")
    weights.write_bytes(original)
    shutil.rmtree(base)
    refuses("there is no such folder")
    base.mkdir()
    refuses("cannot be used as a text classifier")
    shutil.rmtree(base)
    wide = tiny.bert(base)
    assert predict(saved_run, "a film")
    config = json.loads((base / "config.json").read_text())
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(**config | {"hidden_size": 32})).save_pretrained(wide)
    refuses("does not fit base=")
