"""autocast and channels_last: how a model is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.run import execution
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.settings import Settings
from problems import class_task
from tiny_experiments import TINY, spec_of

FEW = {"rounds": 2, "sampled": 2, "tracked": 2, "local_steps": 2, "batch_size": 4, "progress": False}


class Watched(nn.Module):
    """A convolution that notes the types and layouts that it sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 3)
        self.seen = []

    def forward(self, x):
        y = self.convolution(x)
        last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, self.convolution.weight))
        self.seen.append((y.dtype, last))
        return self.linear(y.flatten(1))


@pytest.fixture(scope="module")
def task():
    random = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(8, 3, 8, 8, generator=random), torch.randint(3, (8,), generator=random))
        for _ in range(3)
    ]
    return fadamgc.Task(Watched(), F.cross_entropy, data, data[0])


def functions_of(task, **options):
    functions = TaskFunctions(task, computing=Settings.of(rounds=1, **options).computing)
    functions.module.seen.clear()
    return functions


@pytest.mark.parametrize("last", [None, True])
@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_how_the_model_is_computed(task, autocast, last):
    functions = functions_of(task, autocast=autocast, channels_last=last)
    g, loss = functions.gradient(functions.x0, {}, *functions.sample)
    functions.evaluate(functions.x0, {}, 0, 1)
    assert set(functions.module.seen) == {(torch.bfloat16 if autocast else torch.float32, bool(last))}
    assert g.dtype == loss.dtype == torch.float32
    plain, _ = functions_of(task).gradient(functions.x0, {}, *functions.sample)
    assert torch.allclose(g, plain, rtol=0.1, atol=0.02 if autocast else 1e-6)
    assert torch.equal(g, plain) == (autocast is None and last is None) or last


@pytest.mark.parametrize("options", [{"autocast": "bf16"}, {"channels_last": True}])
def test_executors_agree(task, options):
    loop = fadamgc.simulate(fadamgc.FAdamGC(eta_l=1e-3), task, executor="loop", **FEW, **options)
    threads = fadamgc.simulate(fadamgc.FAdamGC(eta_l=1e-3), task, executor="threads", **FEW, **options)
    assert torch.allclose(loop.x, threads.x, atol=1e-3 if "autocast" in options else 1e-6)
    assert loop.settings["autocast"] == options.get("autocast")
    assert loop.settings["channels_last"] == options.get("channels_last")


def test_blocks_with_autocast():
    loop, block = (
        fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), class_task(), executor=e, autocast="bf16", **FEW)
        for e in ("loop", "vectorized")
    )
    assert torch.allclose(loop.x, block.x, atol=1e-3)
    plain = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), class_task(), executor="loop", **FEW)
    assert not torch.equal(loop.x, plain.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"autocast": "fp8"}, "autocast='fp8' .* None or 'bf16'"),
        ({"channels_last": "yes"}, "channels_last='yes' .* True or False"),
        ({"autocast": "bf16", "dtype": torch.float64}, "autocast='bf16' needs dtype=torch.float32"),
        ({"channels_last": True}, "channels_last=True needs a model with 2D convolutions"),
    ],
)
def test_refused(options, message):
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.simulate(fadamgc.FedAvg(), class_task(), **FEW, **options)


def test_blocks_have_no_channels_last(task):
    with pytest.raises(fadamgc.InputError, match="executor='vectorized' cannot run"):
        fadamgc.simulate(fadamgc.FedAvg(), task, executor="vectorized", channels_last=True, **FEW)


def test_the_options_belong_to_a_run_but_their_defaults_do_not(task, tmp_path):
    fadamgc.simulate(fadamgc.FedAvg(), task, checkpoint=tmp_path, executor="loop", **FEW)
    options = FEW | {"rounds": 3, "checkpoint": tmp_path, "resume": True, "executor": "loop"}
    with pytest.raises(fadamgc.FadamgcError, match="autocast=None there, autocast='bf16' here"):
        fadamgc.simulate(fadamgc.FedAvg(), task, autocast="bf16", **options)
    assert len(fadamgc.simulate(fadamgc.FedAvg(), task, channels_last=False, **options).history) == 3


def test_specs(tmp_path):
    text = TINY.replace("[cost]", 'autocast = "bf16"\nchannels_last = true\n\n[cost]')
    plain, chosen = (ExperimentFolder(tmp_path).plan(spec_of(t))[0] for t in (TINY, text))
    arguments = execution.arguments(chosen, class_task())
    assert (arguments["autocast"], arguments["channels_last"]) == ("bf16", True)
    assert not plain._is_identity(chosen.identity())
    old = plain.identity()
    assert old["run"].pop("autocast") is old["run"].pop("channels_last") is None
    assert plain._is_identity(old)
    off = spec_of(TINY.replace("[cost]", "channels_last = false\n\n[cost]"))
    assert ExperimentFolder(tmp_path).plan(off)[0].identity() == plain.identity()
