"""The ways to run the jobs of a round and the choice between them."""

from fadamgc.sim.executors.auto import EXECUTORS
from fadamgc.sim.executors.base import Executor, Workload
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.ray_actors import Ray, RayExecutor
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import VectorizedExecutor

__all__ = [
    "EXECUTORS",
    "Executor",
    "LoopExecutor",
    "Ray",
    "RayExecutor",
    "ThreadsExecutor",
    "VectorizedExecutor",
    "Workload",
]
