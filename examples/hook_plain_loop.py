"""AdamW at clients with different data: it drifts, and with the correction it does not.

Four clients fit a line to their own data. Each of them runs 10 steps of torch's AdamW per round on the
averaged model; the server averages models and the changes of y_i.

python examples/hook_plain_loop.py
"""

import copy

import torch
from torch.nn.functional import mse_loss

import fadamgc

torch.manual_seed(0)
CLIENTS, ROUNDS, STEPS = 4, 250, 10

# Every client has its own inputs and its own line, so that its own optimum is far from the global one.
data = []
for i in range(CLIENTS):
    inputs = torch.randn(40, 3) * torch.tensor([0.5, 1.0, 2.0]).roll(i)
    data.append((inputs, inputs @ torch.randn(3, 1) + i))
start = torch.nn.Linear(3, 1)

# The model with the smallest mean loss of all clients, for comparison: it solves a linear system.
rows = torch.cat([torch.cat([inputs, torch.ones(40, 1)], dim=1) for inputs, _ in data])
optimum = torch.linalg.lstsq(rows, torch.cat([targets for _, targets in data])).solution.flatten()


def train(correct: bool) -> float:
    """Train for some rounds; return the distance of the model from the optimum."""
    server = copy.deepcopy(start)
    models = [copy.deepcopy(start) for _ in data]
    # eps bounds the steps of AdamW, so that they become small near the optimum.
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, eps=0.1) for model in models
    ]
    corrections = [fadamgc.Correction(model.parameters()) for model in models]
    if correct:
        for correction, optimizer in zip(corrections, optimizers, strict=True):
            correction.attach(optimizer)
    y = torch.zeros(4)
    for _ in range(ROUNDS):
        changes = []
        for model, optimizer, correction, (inputs, targets) in zip(
            models, optimizers, corrections, data, strict=True
        ):
            model.load_state_dict(server.state_dict())
            if correct:
                correction.start_round(y)
            for _ in range(STEPS):
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
            if correct:
                changes.append(correction.finish_round(tracked=True))
        with torch.no_grad():
            for name, p in server.named_parameters():
                p.copy_(torch.stack([model.get_parameter(name) for model in models]).mean(0))
        if correct:
            y = y + sum(changes) / CLIENTS
    x = torch.nn.utils.parameters_to_vector(server.parameters()).detach()
    return float((x - optimum).norm())


if __name__ == "__main__":
    drifted, corrected = train(correct=False), train(correct=True)
    print(f"distance from the optimum: AdamW {drifted:.2e}, with correction {corrected:.2e}")
