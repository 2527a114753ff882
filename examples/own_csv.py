"""Your own table: each value of a column is a client, and two methods are compared on three seeds.

Here the table is made first: sensors of eight machines. Each machine has its own offsets, so that most rows
of one machine have the same label.

python examples/own_csv.py [FIGURE]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import fadamgc

random = np.random.default_rng(0)
machine = random.integers(0, 8, 1600)
sensors = random.normal(size=(1600, 4)) + 2 * random.normal(size=(8, 4))[machine]
fault = (sensors @ [1.0, -1.0, 0.5, 0.0] + 0.5 * random.normal(size=1600) > 0).astype(int)
table = pd.DataFrame(sensors, columns=["heat", "speed", "sound", "load"])

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "machines.csv"
    table.assign(machine=machine, fault=fault).to_csv(file, index=False)
    results = fadamgc.experiment(
        {"data": str(file), "target": "fault", "client": "machine"},
        [fadamgc.FAdamGC(eta_l=3e-3), fadamgc.LocalAdam(eta_l=3e-3)],
        out=Path(folder) / "out", rounds=30, seeds=3, title="Eight machines",
        sampled=4, local_steps=10, batch_size=16, target=0.9, progress=False,
    )  # fmt: skip
    for row in results.rows:
        print(f"{row.method.label}: {row.final.mean:.3f}")
    if sys.argv[1:]:
        Path(sys.argv[1]).write_bytes((Path(folder) / "out" / "rounds.png").read_bytes())
