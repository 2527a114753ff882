"""Which methods are exact? Run all of them on quadratics, and write results/exactness/results.json.

python benchmarks/exactness.py [--only NAME ...]        about 15 minutes; `make docs` writes the table

Twelve clients with different curvatures and minimisers, exact gradients, K = 10, 1,500 rounds, the best of
five local step sizes; all other hyperparameters have their defaults. See src/fadamgc/judge/quadratics.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import fadamgc
from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.federation.cost import traffic
from fadamgc.judge.quadratics import CLIENTS, ROUNDS, SAMPLED, STEP_SIZES, STEPS, exactness
from fadamgc.tree import leaves

RESULTS = Path(__file__).resolve().parent.parent / "results" / "exactness" / "results.json"
SIZE = 1000  # of a model, to count vectors

FURTHER = {
    "SGD, corrected": fadamgc.compose(fadamgc.local.SGD(), "pre"),
    "AMSGrad, corrected, v shared": fadamgc.compose(fadamgc.local.Adam(amsgrad=True, v="share"), "pre"),
    "DiLoCo, corrected": fadamgc.compose(
        fadamgc.local.AdamW(m="keep", eps=1e-3, weight_decay=0.0), "pre", fadamgc.server.Nesterov()
    ),
    "Lion, corrected": fadamgc.compose(fadamgc.local.Lion(), "pre"),
    "MTGC, z reset": fadamgc.MTGC(z="reset"),
}


def vectors(algorithm: AnyAlgorithm) -> dict[str, float]:
    """Return what a client keeps, receives and sends, in vectors of the model's size."""
    state = sum(leaf.numel() for leaf in leaves(example(algorithm, torch.zeros(SIZE)).client)) / SIZE
    sent = traffic(algorithm, SIZE)
    down, up, tracked = (value / (4 * SIZE) for value in sent)
    return {
        "state": round(state, 2),
        "down": round(down, 2),
        "up": round(up, 2),
        "tracked": round(tracked, 2),
    }


def measure(algorithm: AnyAlgorithm) -> list[dict[str, Any]]:
    """Run the method with all clients and, if it can, with some of them per round."""
    counts = (CLIENTS,) if algorithm.full_participation else (CLIENTS, SAMPLED)
    results = [exactness(algorithm, sampled) for sampled in counts]
    return [result._asdict() | {"verdict": result.verdict} for result in results]


def named() -> dict[str, AnyAlgorithm]:
    """Return the algorithms to measure, with all registered ones."""
    names = (name for name in fadamgc.algorithms() if name != "compose")
    return {name: fadamgc.make_algorithm(name) for name in names} | FURTHER


def main() -> None:
    """Measure all methods, or some of them, and keep the results of the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=())
    only = parser.parse_args().only
    algorithms = named()
    methods = json.loads(RESULTS.read_text())["methods"] if only and RESULTS.exists() else {}
    for name, algorithm in algorithms.items():
        if only and name not in only:
            continue
        title = name if name in FURTHER else algorithm.title
        methods[name] = {"title": title, **vectors(algorithm), "quadratics": measure(algorithm)}
        shown = ", ".join(f"{r['norm']:.1e} {r['verdict']}" for r in methods[name]["quadratics"])
        print(f"{title}: {shown}", file=sys.stderr, flush=True)
    settings = {"clients": CLIENTS, "steps": STEPS, "rounds": ROUNDS, "eta_l": STEP_SIZES}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: methods[name] for name in algorithms if name in methods}
    environment = {"torch": torch.__version__, "fadamgc": fadamgc.__version__}
    content = {"settings": settings, "environment": environment, "methods": ordered}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
