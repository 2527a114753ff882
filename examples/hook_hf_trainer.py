"""Gradient correction in the Trainer of Hugging Face: two clients with different labels, AdamW, no download.

A TrainerCallback starts the correction's round when training begins and finishes it when training ends. The
rest is the usual Trainer: one short training per client and round.

python examples/hook_hf_trainer.py
"""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fadamgc

ROUNDS, STEPS = 4, 5


class CorrectionCallback(TrainerCallback):
    """Corrects the gradients of one training of one client."""

    def __init__(self, correction: fadamgc.Correction, y: torch.Tensor) -> None:
        self.correction, self.y = correction, y
        self.dy = torch.zeros_like(y)

    def on_train_begin(self, *_, optimizer, **__):
        """Start the round; ``attach`` finds torch's optimizer inside that of Accelerate."""
        self.correction.attach(optimizer)
        self.correction.start_round(self.y)

    def on_train_end(self, *_, **__):
        """Finish the round and keep dy for the server."""
        self.dy = self.correction.finish_round(tracked=True)
        self.correction.detach()


torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=8, **sizes))

# Client 0 has mostly label 0, client 1 mostly label 1; the first token says which one it is.
clients = []
for i in range(2):
    labels = (torch.rand(40) < (0.1, 0.9)[i]).long()
    tokens = torch.cat([labels[:, None], torch.randint(2, 50, (40, 5))], dim=1)
    clients.append([{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)])

optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for _ in clients]
# The Trainer would clip the raw gradient (max_grad_norm); here the corrected one is clipped.
corrections = [fadamgc.Correction(model.parameters(), max_norm=1.0) for _ in clients]
quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
batches = {"max_steps": STEPS, "per_device_train_batch_size": 20, "max_grad_norm": 0.0}
arguments = TrainingArguments(output_dir="out", use_cpu=True, **batches, **quiet)

x = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
y, losses = torch.zeros_like(x), []
for _ in range(ROUNDS):
    changes, dys, loss = [], [], 0.0
    for data, optimizer, correction in zip(clients, optimizers, corrections, strict=True):
        torch.nn.utils.vector_to_parameters(x.clone(), model.parameters())
        callback = CorrectionCallback(correction, y)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer = Trainer(
            model, arguments, train_dataset=data, callbacks=[callback], optimizers=(optimizer, scheduler)
        )
        loss += trainer.train().training_loss / len(clients)
        changes.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach() - x)
        dys.append(callback.dy)
    x, y = x + sum(changes) / len(clients), y + sum(dys) / len(clients)
    losses.append(loss)
print("mean training loss of each round:", [round(loss, 3) for loss in losses])
