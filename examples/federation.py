"""A federation on this machine, next to the simulator: a SuperLink and three nodes, which talk over loopback.

The app is flower-digits, in the folder of this file. Each node is a process with data of its own. The
federation goes through the same models as the simulation with the same seed. This takes about half a minute.

python examples/federation.py [FIGURE]      (pip install 'fadamgc[flower]')
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

import fadamgc

APP, ROUNDS = Path(__file__).parent / "flower-digits", 6

with tempfile.TemporaryDirectory() as folder:
    server = Path(folder) / "server"
    command = [sys.executable, "-m", "fadamgc", "federation", "run", str(APP), "--folder", folder]
    subprocess.run([*command, "--config", f"rounds={ROUNDS} folder='{server}'"], check=True)
    federation = fadamgc.load_run(server / "runs" / "fadamgc-seed0")
    results = fadamgc.experiment(
        {"data": "digits", "clients": 3, "alpha": 0.5},  # as in the app's config
        [fadamgc.FAdamGC(eta_l=3e-3)],
        out=Path(folder) / "simulation", rounds=ROUNDS, seeds=[0],
        tracked=2, local_steps=20, batch_size=16, progress=False,
    )  # fmt: skip

(simulation,) = results.runs["FAdamGC"]
rounds = range(1, ROUNDS + 1)
losses = [[record.train_loss for record in run.history] for run in (federation, simulation)]
print(f"largest difference of the train losses: {max(abs(a - b) for a, b in zip(*losses, strict=True)):.1e}")

figure = Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
accuracy = [[record.test_accuracy for record in run.history] for run in (federation, simulation)]
panel.plot(rounds, accuracy[1], color="#0072B2", linewidth=2, label="simulation")
panel.plot(rounds, accuracy[0], "o", color="#D55E00", markersize=9, fillstyle="none", label="federation")
panel.set(xlabel="round", xticks=rounds, ylabel="test accuracy")
panel.legend(frameon=False, loc="lower right")
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
