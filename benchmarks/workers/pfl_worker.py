"""pfl-research: SimulatedBackend and FederatedAveraging on preloaded tensors, evaluation off.

Under torchrun, pfl divides the clients of a round between the processes. Only the first process communicates
with the orchestrator, and the others follow it.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workers.protocol import Gate, parser
from workloads import ETA_L, WORKLOADS, Workload

FOREVER = 10**9
THREADS = 2


class Wait(TrainingProcessCallback):
    """Waits at the gate after each central iteration; without a gate, for the process that has one."""

    def __init__(self, gate: Gate | None, processes: int) -> None:
        self.gate, self.processes = gate, processes

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Stop when no more rounds are requested."""
        del aggregate_metrics, model, central_iteration
        more = torch.tensor([self.gate is not None and self.gate.round_done()])
        if self.processes > 1:
            torch.distributed.broadcast(more, src=0)
        return not bool(more), Metrics()


def _loss(self: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(self(inputs), targets)


@torch.no_grad()
def _metrics(self: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
    """Return the metrics; only called in iteration 0, which pfl always evaluates, so in the warm-up."""
    return {"loss": Weighted(float(_loss(self, inputs, targets)) * len(inputs), len(inputs))}


def make_model(workload: Workload, optimizer: str, fused: bool) -> PyTorchModel:
    """Make the workload's module with the methods that pfl needs."""
    module = workload.make_model(0).train()
    module.loss = types.MethodType(_loss, module)
    module.metrics = types.MethodType(_metrics, module)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    return PyTorchModel(
        model=module,
        local_optimizer_create=partial(kind, fused=True) if fused else kind,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )


def make_data(workload: Workload) -> FederatedDataset:
    """Make one Dataset per client; it keeps its batches, so that no round slices them again."""
    users = [Dataset((x, y), user_id=str(i)) for i, (x, y) in enumerate(zip(*workload.data(), strict=True))]
    return FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(len(users)))))


def main() -> None:
    """Run rounds when the orchestrator asks for them."""
    arguments = parser(__doc__)
    arguments.add_argument("--fused", action="store_true", help="a fused local optimizer")
    options = arguments.parse_args()
    distributed = get_default_framework_module().distributed
    torch.set_num_threads(max(1, THREADS // distributed.world_size))
    np.random.seed(0)
    torch.manual_seed(0)
    workload = WORKLOADS[options.workload]
    data = make_data(workload)
    model = make_model(workload, options.optimizer, options.fused)
    gate = None
    if distributed.global_rank == 0:
        gate = Gate(workload, options.warmup, "pfl")
        gate.info["threads"] = torch.get_num_threads() * distributed.world_size
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=FOREVER,
            evaluation_frequency=FOREVER,
            train_cohort_size=workload.sampled,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=workload.batch,
            local_num_epochs=None,
            local_num_steps=workload.steps,
            local_learning_rate=ETA_L[options.optimizer],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=workload.batch),
        callbacks=[Wait(gate, distributed.world_size)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
