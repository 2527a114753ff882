"""The correction as a hook on torch optimizers."""

from __future__ import annotations

import copy
import io
import re
import runpy
import socket
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from fadamgc import Correction
from places import ROOT
from problems import class_task, mlp

X, Y = class_task().pairs[1]
D = 75  # numbers of mlp()


def numbers(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def load(model: nn.Module, x: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(x.clone(), model.parameters())


def backward(model: nn.Module, k: int, scaler=None) -> None:
    for p in model.parameters():
        p.grad = None
    loss = F.cross_entropy(model(X[k : k + 4]), Y[k : k + 4])
    (loss if scaler is None else scaler.scale(loss)).backward()


def some(seed: int = 0, scale: float = 0.3) -> torch.Tensor:
    return scale * torch.randn(D, generator=torch.Generator().manual_seed(seed))


def attached(optimizer_class=torch.optim.SGD, max_norm=None, **options):
    model = mlp()
    optimizer = optimizer_class(model.parameters(), **{"lr": 0.1, **options})
    correction = Correction(model.parameters(), max_norm=max_norm)
    correction.attach(optimizer)
    return model, optimizer, correction


# Against the algebra.


@pytest.mark.parametrize(
    "algo",
    [
        fadamgc.ScaffoldM(eta_l=0.1, beta=1.0),
        fadamgc.compose(fadamgc.local.SGD(eta_l=0.1), "pre"),
        fadamgc.compose(fadamgc.local.Momentum(eta_l=0.1, m="keep"), "pre"),
        fadamgc.compose(
            fadamgc.local.AdamW(eta_l=0.01, beta2=0.999, bias_correction=True, m="keep", weight_decay=0.1),
            "pre",
        ),
    ],
    ids=["scaffold_m", "sgd", "momentum", "adamw"],
)
def test_the_hook_is_the_correction_of_the_algebra(algo):
    """Four clients, five rounds, some of them not tracked: the same models and the same y."""
    data = [(X[i : i + 6], Y[i : i + 6]) for i in range(4)]
    tracked = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 1, 2, 3], [3]]
    model = mlp()
    start = numbers(model)
    local = getattr(algo, "local", None)

    def torch_optimizer():
        if isinstance(local, fadamgc.local.Momentum):
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if isinstance(local, fadamgc.local.AdamW):
            return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    optimizers = [torch_optimizer() for _ in data]
    corrections = [Correction(model.parameters()) for _ in data]
    for optimizer, correction in zip(optimizers, corrections, strict=True):
        correction.attach(optimizer)
    clients = [fadamgc.ClientOptimizer(model.parameters(), algo) for _ in data]
    server, x, y = algo.init_server(start), start, torch.zeros(D)
    for round_tracked in tracked:
        D_sum = dy_sum = torch.zeros(D)
        total = None
        for i, (inputs, targets) in enumerate(data):
            load(model, x)
            corrections[i].start_round(y)
            for _ in range(3):
                optimizers[i].zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizers[i].step()
            D_sum = D_sum + numbers(model) - x
            dy_sum = dy_sum + corrections[i].finish_round(tracked=i in round_tracked)

            clients[i].start_round(algo.broadcast(server))
            for _ in range(3):
                clients[i].zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                clients[i].step()
            up = clients[i].finish_round(tracked=i in round_tracked)
            total = up if total is None else fadamgc.add(total, up)
        x, y = x + D_sum / 4, y + dy_sum / 4
        server = algo.aggregate(server, total, fadamgc.Cohort(n=4, S=4, K=3))
        torch.testing.assert_close(x, server.x, rtol=1e-4, atol=1e-6)
        server_y = server.y if hasattr(server, "y") else server.correction.y
        torch.testing.assert_close(y, server_y, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(y, torch.stack([c.y_i for c in corrections]).mean(0), rtol=1e-4, atol=1e-6)
    assert (x - start).norm() > 0.01


class EightBit(torch.optim.Optimizer):
    """Momentum in 8 bits: an optimizer from elsewhere, which reads only .grad."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = 0.9 * state["m"].float() * state["scale"] + p.grad if state else p.grad.clone()
                state["scale"] = m.abs().max() / 127 + 1e-12
                state["m"] = (m / state["scale"]).round().to(torch.int8)
                p.sub_(group["lr"] * m)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "8 bits": (EightBit, {}),
}


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_optimizer_sees_the_corrected_gradient(cls, options):
    """Next to the same optimizer whose .grad is corrected by hand; groups with their own step sizes."""
    result = []
    for by_hand in (False, True):
        model = mlp()
        groups = [{"params": model[2].parameters(), "lr": 0.02}, {"params": model[0].parameters()}]
        optimizer = cls(groups, lr=0.01, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        y_i, trajectory = torch.zeros(D), []
        correction = Correction(model.parameters())
        if not by_hand:
            correction.attach(optimizer)
        for t in range(3):
            y, raw = some(t), []
            if not by_hand:
                correction.start_round(y)
            for k in range(4):
                backward(model, k)
                raw.append(gradient(model))
                if by_hand:
                    pieces = torch.split(y - y_i, [p.numel() for p in model.parameters()])
                    for p, z in zip(model.parameters(), pieces, strict=True):
                        p.grad += z.view_as(p)
                optimizer.step()
                scheduler.step()
                if not by_hand:
                    assert torch.equal(gradient(model), raw[-1])  # the raw gradient again
                    assert correction.steps == k + 1
                trajectory.append(numbers(model))
            new = sum(raw) / 4
            if not by_hand:
                dy = correction.finish_round()
                torch.testing.assert_close(dy, new - y_i)
                new = correction.y_i
            y_i = new
        result.append(torch.stack(trajectory))
    torch.testing.assert_close(*result)


def test_adamw_in_8_bits_sees_the_corrected_gradient():
    """That of bitsandbytes, which also runs on a CPU, next to the same whose .grad is corrected by hand."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    trajectories = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 32)
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01, min_8bit_size=1)
        correction, xs, y_i = Correction(model.parameters()), [], torch.zeros(2080)
        if not by_hand:
            correction.attach(optimizer)
        inputs = torch.randn(8, 64)
        for _ in range(2):
            y, raw = 0.1 * torch.randn(2080), torch.zeros(2080)
            if not by_hand:
                correction.start_round(y)
            for _ in range(3):
                optimizer.zero_grad()
                (model(inputs) - 1).square().mean().backward()
                raw += gradient(model)
                if by_hand:
                    for p, z in zip(model.parameters(), torch.split(y - y_i, [2048, 32]), strict=True):
                        p.grad += z.view_as(p)
                optimizer.step()
                xs.append(numbers(model))
            y_i = raw / 3
            if not by_hand:
                correction.finish_round()
                torch.testing.assert_close(correction.y_i, y_i)
        states = optimizer.state[model.weight]
        assert states["state1"].dtype == states["state2"].dtype == torch.uint8
        trajectories.append(torch.stack(xs))
    torch.testing.assert_close(*trajectories)
    assert (trajectories[0][0] != trajectories[0][-1]).any()


def test_muon_and_adamw_with_one_correction_each():
    result = []
    for by_hand in (False, True):
        model = mlp()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
        corrections = [Correction(matrices), Correction(vectors)]
        sizes = [len(c.y) for c in corrections]
        y = torch.split(some(), sizes)
        if not by_hand:
            for correction, optimizer, part in zip(corrections, optimizers, y, strict=True):
                correction.attach(optimizer)
                correction.start_round(part)
        for k in range(3):
            backward(model, k)
            for params, optimizer, part in zip((matrices, vectors), optimizers, y, strict=True):
                if by_hand:
                    for p, z in zip(params, torch.split(part, [p.numel() for p in params]), strict=True):
                        p.grad += z.view_as(p)
                optimizer.step()
        result.append(numbers(model))
    torch.testing.assert_close(*result)


# What training loops do.


def test_accumulated_gradients_are_corrected_once():
    model, optimizer, correction = attached()
    y = some()
    correction.start_round(y)
    before = numbers(model)
    optimizer.zero_grad()
    for k in range(3):
        (F.cross_entropy(model(X[k : k + 4]), Y[k : k + 4]) / 3).backward()
    raw = gradient(model)
    optimizer.step()
    torch.testing.assert_close(numbers(model), before - 0.1 * (raw + y))
    assert correction.steps == 1
    torch.testing.assert_close(correction.finish_round(), raw)


def test_clipping_before_the_step_and_of_the_corrected_gradient():
    y = some(scale=1.0)
    model, optimizer, correction = attached()
    correction.start_round(y)
    before = numbers(model)
    backward(model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = gradient(model)
    optimizer.step()
    torch.testing.assert_close(numbers(model), before - 0.1 * (clipped + y))
    torch.testing.assert_close(correction.finish_round(), clipped)

    model, optimizer, correction = attached(max_norm=0.5)
    correction.start_round(y)
    backward(model, 0)
    raw = gradient(model)
    optimizer.step()
    assert (numbers(model) - before).norm() == pytest.approx(0.1 * 0.5, rel=1e-4)
    assert torch.equal(gradient(model), raw)
    torch.testing.assert_close(correction.finish_round(), raw)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused, max_norm, unscale):
    """Scaled gradients give the numbers of unscaled ones, and a step that the scaler skips does not count."""
    results = []
    for scaled in (False, True):
        model, optimizer, correction = attached(torch.optim.AdamW, max_norm, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for t in range(2):
            correction.start_round(some(t))
            for k in range(4):
                if k == 2 and not scaled:
                    continue
                backward(model, k, scaler)
                if k == 2:
                    model[0].weight.grad[0, 0] = torch.inf
                if unscale:
                    scaler.unscale_(optimizer)
                before = numbers(model)
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(before, numbers(model)) == (k == 2)
            assert correction.steps == 3
            correction.finish_round()
            results.append((numbers(model), gradient(model), correction.y_i))
    for plain, scaled in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-6)


def test_a_closure_is_corrected():
    y = some()
    models = []
    for closures in (False, True):
        model, optimizer, correction = attached(torch.optim.Adam)
        correction.start_round(y)
        for k in range(3):
            if closures:

                def closure(model=model, optimizer=optimizer, k=k):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(X[k : k + 4]), Y[k : k + 4])
                    loss.backward()
                    return loss

                loss = optimizer.step(closure) if k else optimizer.step(closure=closure)
                assert loss > 0
            else:
                backward(model, k)
                optimizer.step()
        models.append((numbers(model), correction.finish_round()))
    torch.testing.assert_close(*models)


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        closure()
        return super().step(closure)


def test_a_closure_that_is_called_twice_is_refused():
    _, optimizer, correction = attached(Twice)
    correction.start_round(None)
    with pytest.raises(fadamgc.FadamgcError, match="calls its closure more than once"):
        optimizer.step(lambda: 0.0)
    assert correction.steps == 0


class Derived(torch.optim.SGD):
    """Its base class has hooks of its own: torch runs them twice per step."""

    clips = False

    def step(self, closure=None):
        if self.clips:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_base_class_is_corrected_once():
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # now torch has patched the base class
    results = []
    for cls in (torch.optim.SGD, Derived):
        model, optimizer, correction = attached(cls)
        correction.start_round(some())
        for k in range(2):
            backward(model, k)
            optimizer.step()
        optimizer.step(lambda model=model: backward(model, 3))
        assert correction.steps == 3
        results.append((numbers(model), gradient(model), correction.finish_round()))
    torch.testing.assert_close(*results)
    correction.start_round(some())
    optimizer.clips = True
    with pytest.raises(fadamgc.FadamgcError, match="changes gradients before it calls"):
        optimizer.step()


def test_a_step_that_fails_does_not_count():
    class Failing(torch.optim.Optimizer):
        fails = True

        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            if self.fails:
                raise OSError("no power")
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad)

    model, optimizer, correction = attached(Failing)
    correction.start_round(some())
    before = numbers(model)
    for again in (False, True):  # the same gradients, or new ones
        optimizer.fails = True
        backward(model, 0)
        raw = gradient(model)
        with pytest.raises(OSError, match="no power"):
            optimizer.step()
        optimizer.fails = False
        if again:
            backward(model, 1)
            raw = gradient(model)
        optimizer.step()
        torch.testing.assert_close(numbers(model), before - 0.1 * (raw + some()))
        before = numbers(model)
    assert correction.steps == 2


def test_a_parameter_without_gradient_is_corrected():
    """As in the algebra, g = 0; where the correction is zero as well, the optimizer skips the parameter."""
    model, optimizer, correction = attached(torch.optim.AdamW, weight_decay=0.5)
    y = torch.zeros(D)
    y[48:72] = 1.0  # the weight of the last layer, not its bias
    correction.start_round(y)
    optimizer.zero_grad()
    model[0](X).sum().backward()
    weight, bias = model[2].weight.detach().clone(), model[2].bias.detach().clone()
    optimizer.step()
    assert (model[2].weight < weight * 0.95).all()  # weight decay and Adam's step of 0.1
    assert torch.equal(model[2].bias, bias)
    assert model[2].weight.grad is None
    assert model[2].bias.grad is None
    dy = correction.finish_round()
    assert (dy[48:] == 0).all()
    assert (dy[:48] != 0).any()


def test_groups_of_images_keep_their_memory_format():
    """A parameter in channels_last, with and without a gradient."""
    models = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        optimizer = torch.optim.AdamW(conv.parameters(), lr=0.1, fused=True)
        correction = Correction(conv.parameters())
        correction.attach(optimizer)
        correction.start_round(torch.linspace(-1, 1, 112))
        optimizer.step()
        conv(torch.linspace(0, 1, 75).view(1, 3, 5, 5)).square().sum().backward()
        optimizer.step()
        models.append((numbers(conv), correction.finish_round()))
    torch.testing.assert_close(*models)


def test_with_zero_correction_the_hook_changes_nothing():
    models = []
    for hooked in (False, True):
        model, optimizer, correction = attached(torch.optim.AdamW)
        if hooked:
            correction.start_round(None)
        else:
            correction.detach()
        for k in range(3):
            backward(model, k)
            optimizer.step()
        models.append(numbers(model))
    assert torch.equal(*models)


def test_low_precision_parameters_have_vectors_in_float32():
    model = mlp().to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = Correction(model.named_parameters())
    correction.attach(optimizer)
    correction.start_round(torch.ones(35, dtype=torch.float16))
    assert correction.y.dtype == torch.float32
    sums = 0
    for k in range(5):
        for p in model.parameters():
            p.grad = None
        F.cross_entropy(model(X[k : k + 4].bfloat16()), Y[k : k + 4]).backward()
        sums = sums + torch.cat([p.grad.float().reshape(-1) for p in model.parameters() if p.requires_grad])
        optimizer.step()
    torch.testing.assert_close(correction.finish_round(), sums / 5)


# Rounds, files and mistakes.


def test_state_dict_between_and_inside_rounds():
    model, optimizer, correction = attached(torch.optim.AdamW)
    correction.start_round(some())
    backward(model, 0)
    optimizer.step()
    correction.finish_round()
    correction.start_round(some(1))
    for k in range(2):
        backward(model, k)
        optimizer.step()
    file = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "correction": correction}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed_optimizer, resumed = attached(torch.optim.AdamW)
    other.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["correction"])
    assert resumed.in_round
    assert resumed.steps == 2
    results = []
    for m, o, c in ((model, optimizer, correction), (other, resumed_optimizer, resumed)):
        for k in range(2, 4):
            backward(m, k)
            o.step()
        results += [(numbers(m), c.finish_round(), c.y, c.y_i)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    wrong = {**saved["correction"], "y_i": torch.zeros(3)}
    before = resumed.state_dict()
    for bad in (wrong, {"y": 1}, None, {**saved["correction"], "steps": -1}):
        with pytest.raises(fadamgc.InputError):
            resumed.load_state_dict(bad)
    after = resumed.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in ("y", "y_i", "dy"))


def test_a_round_that_is_started_again_discards_the_steps():
    model, optimizer, correction = attached()
    correction.start_round(None)
    backward(model, 0)
    optimizer.step()
    correction.start_round(some())
    assert correction.steps == 0
    assert (correction.y_i == 0).all()
    assert torch.equal(correction.y, some())


def test_y_is_copied():
    _, _, correction = attached()
    y = some()
    correction.start_round(y)
    y.zero_()
    assert torch.equal(correction.y, some())


def test_not_tracked():
    model, optimizer, correction = attached()
    correction.start_round(some())
    backward(model, 0)
    optimizer.step()
    assert (correction.finish_round(tracked=False) == 0).all()
    assert (correction.y_i == 0).all()
    assert not correction.in_round


def test_detach_and_attach_again():
    model, optimizer, correction = attached()
    correction.start_round(some())
    correction.detach()
    before = numbers(model)
    backward(model, 0)
    optimizer.step()
    torch.testing.assert_close(numbers(model), before - 0.1 * gradient(model))
    assert correction.in_round
    assert correction.steps == 0
    correction.attach(optimizer)
    backward(model, 0)
    optimizer.step()
    assert correction.steps == 1


def test_a_copy_is_not_attached():
    model, optimizer, correction = attached()
    correction.start_round(some())
    twin_model, twin_optimizer, twin = copy.deepcopy((model, optimizer, correction))
    twin.attach(twin_optimizer)
    for m, o in ((model, optimizer), (twin_model, twin_optimizer)):
        backward(m, 0)
        o.step()
    assert torch.equal(correction.finish_round(), twin.finish_round())
    assert torch.equal(numbers(model), numbers(twin_model))


def test_errors_change_no_state():
    model, optimizer, correction = attached()
    backward(model, 0)
    with pytest.raises(fadamgc.FadamgcError, match=r"finish_round\(\) outside a round; call start_round"):
        correction.finish_round()
    with pytest.raises(fadamgc.FadamgcError, match=r"optimizer.step\(\) outside a round; call start_round"):
        optimizer.step()
    with pytest.raises(fadamgc.FadamgcError, match="already attached to SGD; call detach"):
        correction.attach(optimizer)
    with pytest.raises(fadamgc.FadamgcError, match="another Correction of these parameters"):
        Correction(model.parameters()).attach(optimizer)
    correction.start_round(some())
    with pytest.raises(fadamgc.InputError, match="tracked='no' is not accepted"):
        correction.finish_round(tracked="no")
    for parameters in (None, torch.nn.Linear(2, 1), 3):
        with pytest.raises(fadamgc.InputError, match=r"give model\.parameters\(\)"):
            Correction(parameters)
    for y, message in (
        (torch.zeros(3), r"y of shape \(3,\) and type torch.float32 does not fit; .* vector of 75 numbers"),
        (torch.zeros(D, dtype=torch.int64), "type torch.int64 does not fit"),
        (torch.zeros(D, 1), r"shape \(75, 1\)"),
        ([0.0] * D, "is not a tensor"),
        (torch.full((D,), torch.nan), "y is not finite"),
    ):
        with pytest.raises(fadamgc.InputError, match=message):
            correction.start_round(y)
    with pytest.raises(fadamgc.FadamgcError, match=r"sync\(\) needs torch.distributed"):
        correction.sync()
    assert correction.in_round
    assert torch.equal(correction.y, some())

    before, raw = numbers(model), gradient(model)
    model[2].weight.requires_grad_(False)
    for call in (optimizer.step, correction.finish_round, lambda: correction.start_round(None)):
        with pytest.raises(fadamgc.FadamgcError, match="3 parameters with 51 numbers .* now, 4 with 75 were"):
            call()
    model[2].weight.requires_grad_(True)
    assert torch.equal(numbers(model), before)
    assert torch.equal(gradient(model), raw)
    optimizer.step()
    model[0].bias.grad[0] = torch.nan
    optimizer.step()
    with pytest.raises(fadamgc.FadamgcError, match="gradients of the round's 2 steps are not finite"):
        correction.finish_round()
    assert (correction.finish_round(tracked=False) == 0).all()


def test_the_parameters_of_the_optimizer_stay_the_same():
    """Added, removed and exchanged ones: each an error, and no state changed."""

    def add(optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def remove(optimizer):
        optimizer.param_groups[0]["params"].pop()

    for change in (add, remove):
        model, optimizer, correction = attached()
        correction.start_round(some())
        backward(model, 0)
        optimizer.step()
        backward(model, 1)
        change(optimizer)
        before, raw, state = numbers(model), gradient(model), correction.state_dict()
        message = (
            r"SGD has [35] parameters now, not the 4 that it had at attach\(\): .* make a new Correction"
        )
        for call in (optimizer.step, lambda c=correction: c.start_round(None), correction.finish_round):
            with pytest.raises(fadamgc.FadamgcError, match=message):
                call()
        assert torch.equal(numbers(model), before)
        assert torch.equal(gradient(model), raw)
        after = correction.state_dict()
        assert all(torch.equal(after[name], state[name]) for name in ("y", "y_i", "g_sum"))
        assert after["steps"] == 1

    model, optimizer, correction = attached()
    correction.start_round(some())
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(8, 5))  # as many as before
    with pytest.raises(fadamgc.FadamgcError, match="SGD has 4 parameters now, not the 4"):
        correction.start_round(None)


def test_a_subset_of_the_optimizer_is_corrected():
    """Chosen at attach: also after detach, with parameters that were added."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = Correction(model[2].parameters())
    correction.attach(optimizer)
    added = nn.Parameter(torch.ones(2))
    y = torch.ones(27)
    for again in (False, True):
        if again:
            correction.detach()
            optimizer.add_param_group({"params": [added]})
            correction.attach(optimizer)
            added.grad = torch.ones(2)
        correction.start_round(y)
        backward(model, 0)
        before = numbers(model)
        optimizer.step()
        corrected = gradient(model)
        corrected[48:] += y
        torch.testing.assert_close(numbers(model), before - 0.1 * corrected)
        correction.finish_round(tracked=False)
    torch.testing.assert_close(added.detach(), torch.full((2,), 0.9))


def test_two_optimizers_of_one_model_have_their_own_corrections():
    """A simulation with one model. Each step sees one correction, also while both rounds are open."""
    model, *first = attached()
    second = [torch.optim.SGD(model.parameters(), lr=0.1), Correction(model.parameters())]
    second[1].attach(second[0])
    for seed, (_, correction) in enumerate((first, second)):
        correction.start_round(some(seed))
    for seed, (optimizer, _) in enumerate((first, second)):
        backward(model, 0)
        before, raw = numbers(model), gradient(model)
        optimizer.step()
        torch.testing.assert_close(numbers(model), before - 0.1 * (raw + some(seed)))
        assert torch.equal(gradient(model), raw)
    assert [correction.steps for _, correction in (first, second)] == [1, 1]


def test_errors_of_construction_and_attach():
    model = mlp()
    parameters = list(model.parameters())
    for bad, message in (
        ([], "none of 0 parameters is trainable"),
        ([torch.ones(2)], "none of 1 parameters is trainable"),
        ([torch.ones(2, dtype=torch.int64)], "contains a torch.int64"),
        (["weight"], "contains a str"),
        ([parameters[0], parameters[0]], "a parameter twice"),
        ([parameters[0], nn.Parameter(torch.ones(2, device="meta"))], "on 2 devices, cpu, meta"),
    ):
        with pytest.raises(fadamgc.InputError, match=message):
            Correction(bad)
    with pytest.raises(fadamgc.InputError, match="max_norm=0 is not accepted"):
        Correction(parameters, max_norm=0)
    correction = Correction(parameters)
    with pytest.raises(fadamgc.FadamgcError, match="before attach"):
        correction.start_round(None)
    with pytest.raises(fadamgc.FadamgcError, match="not attached"):
        correction.detach()
    with pytest.raises(fadamgc.InputError, match="LBFGS evaluates several gradients"):
        correction.attach(torch.optim.LBFGS(parameters))
    optimizer = torch.optim.SGD(parameters)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for bad in (model, scheduler):
        with pytest.raises(fadamgc.InputError, match="is not a torch optimizer"):
            correction.attach(bad)
    with pytest.raises(fadamgc.InputError, match="2 of 4 parameters are not in the optimizer"):
        correction.attach(torch.optim.SGD(model[0].parameters()))
    correction.attach(optimizer)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters())
    correction = Correction(model.parameters())
    correction.attach(optimizer)
    correction.start_round(None)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(fadamgc.InputError, match="layout torch.sparse_coo; use dense gradients"):
        optimizer.step()


# Documentation and examples.

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hook.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_blocks_of_the_page_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "hook.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", ["plain_loop", "hf_trainer"])
def test_the_examples_are_short(name):
    assert len((ROOT / "examples" / f"hook_{name}.py").read_text().splitlines()) < 80


@pytest.mark.slow
def test_the_plain_loop_reaches_the_global_optimum(capsys):
    result = runpy.run_path(str(ROOT / "examples" / "hook_plain_loop.py"), run_name="__main__")
    assert result["corrected"] < 1e-3 < 1e-2 < result["drifted"]
    assert "with correction" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_trainer_example_runs(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    result = runpy.run_path(str(ROOT / "examples" / "hook_hf_trainer.py"), run_name="__main__")
    assert result["losses"][-1] < result["losses"][0]
    torch.testing.assert_close(result["y"], sum(c.y_i for c in result["corrections"]) / 2)


# One all-reduce.


def rank_main(rank, port, folder):
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), rank=rank, world_size=2
    )
    model, optimizer, correction = attached()
    with pytest.raises(fadamgc.FadamgcError, match="without a finished round"):
        correction.sync()
    for t in range(3):
        correction.start_round(correction.y)
        for k in range(2):
            backward(model, k + rank)
            optimizer.step()
        correction.finish_round(tracked=t != 1 or rank == 0)
        assert correction.sync() is correction.y
        with pytest.raises(fadamgc.FadamgcError, match="without a finished round"):
            correction.sync()
    torch.save((correction.y, correction.y_i), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sync_keeps_y_at_the_mean_of_y_i(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.spawn(rank_main, (port, str(tmp_path)), nprocs=2, join=False)
    deadline = time.monotonic() + 120
    while not context.join(timeout=5):
        assert time.monotonic() < deadline
    (y0, a), (y1, b) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(y0, y1)
    assert (a != b).any()
    torch.testing.assert_close(y0, (a + b) / 2)


def test_a_round_whose_steps_were_all_skipped_changes_nothing():
    """As a GradScaler does with gradients that are not finite."""
    _, _, correction = attached()
    correction.start_round(some())
    before = correction.y_i.clone()
    with pytest.warns(UserWarning, match="no optimizer.step"):
        dy = correction.finish_round()
    assert not dy.any()
    assert torch.equal(correction.y_i, before)
    assert not correction.in_round


def test_a_step_that_fails_leaves_the_raw_gradients_for_the_next_round():
    model, optimizer, correction = attached()
    correction.start_round(some())
    backward(model, 0)
    raw = [p.grad.clone() for p in model.parameters()]

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    optimizer.register_step_pre_hook(broken)  # after the correction's own
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert not all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True))
    correction.start_round(some())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.full((D,), torch.nan)}, "y of the state_dict is not finite"),
        ({"y_i": torch.full((D,), torch.inf)}, "y_i of the state_dict is not finite"),
        ({"steps": 3, "g_sum": None}, "steps=3 without g_sum"),
    ],
)
def test_a_state_that_no_correction_has_is_refused(change, message):
    _, _, correction = attached()
    before = correction.state_dict()
    with pytest.raises(fadamgc.InputError, match=message):
        correction.load_state_dict(before | change)
    after = correction.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("y", "y_i"))
