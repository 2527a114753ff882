"""Flower's simulation engine on Ray: two actors of one CPU and one thread each, FedAvg at the server.

Run it in a network namespace with loopback only, because Ray listens on the machine's own address.
"""

from __future__ import annotations

import logging
import os

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from workers.flower_client import app as client_app
from workers.protocol import Gate, parser
from workloads import WORKLOADS

ACTORS = 2


def main() -> None:
    """Run rounds when the orchestrator asks for them."""
    options = parser(__doc__).parse_args()
    workload = WORKLOADS[options.workload]
    logging.getLogger("flwr").setLevel(logging.WARNING)
    gate = Gate(workload, options.warmup, "flwr", "ray")
    gate.info["threads"] = ACTORS
    torch.set_num_threads(1)
    server = ServerApp()

    @server.main()
    def rounds(grid: Grid, context: Context) -> None:
        del context
        strategy = FedAvg(
            fraction_train=workload.sampled / workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.sampled,
            min_available_nodes=workload.clients,
        )
        arrays = ArrayRecord(workload.make_model(0).state_dict())
        config = ConfigRecord({"workload": workload.name, "optimizer": options.optimizer})
        number, more = 0, True
        while more:
            number += 1
            messages = strategy.configure_train(number, arrays, config, grid)
            replies = list(grid.send_and_receive(messages))
            failures = [reply.error.reason for reply in replies if reply.has_error()]
            if failures or len(replies) != workload.sampled:
                raise RuntimeError(f"{len(replies)} replies in round {number}, failures: {failures[:1]}")
            mean, _ = strategy.aggregate_train(number, replies)
            assert mean is not None
            arrays = mean
            more = gate.round_done()

    run_simulation(
        server_app=server,
        client_app=client_app,
        num_supernodes=workload.clients,
        backend_config={
            "init_args": {"num_cpus": ACTORS, "include_dashboard": False, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    os._exit(0)  # Ray has been shut down; its threads would keep the interpreter for seconds


if __name__ == "__main__":
    main()
