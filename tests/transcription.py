"""The update rules once more, in plain numpy loops, to be compared with the package.

Nothing here comes from the package: every algorithm is one function that spells out its loops over rounds,
clients and local steps. The functions repeat each other on purpose, so that each can be read beside its rule.

The problem is linear least squares, and a batch is always a client's whole data, so a run has no randomness.

Every function returns a dict: ``x`` is the list of global models after each round; all else is the state
after the last round: ``y``, ``G``, ``m``, ``v``, ``v_hat`` of the server, and the lists ``y_i``, ``v_i``,
``v_hat_i``, ``z_i`` with one vector for each client, where the algorithm has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Schedule = list[tuple[list[int], list[int]]]  # for each round: sampled ids, tracked ids
Steps = int | Sequence[int]  # K, the same for all clients or one for each
Result = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """f_i(w) = 1/2 mean over rows of (A_i w - b_i)^2, and the model that the first round starts from."""

    A: list[NDArray[np.float64]]
    b: list[Vector]
    x: Vector

    @property
    def n(self) -> int:
        """The number of clients."""
        return len(self.A)

    @property
    def d(self) -> int:
        """The number of parameters."""
        return len(self.x)

    def gradient(self, i: int, w: Vector) -> Vector:
        """The gradient of f_i at w."""
        residual = self.A[i] @ w - self.b[i]
        return self.A[i].T @ residual / len(self.b[i])

    def optimum(self) -> Vector:
        """The minimiser of the mean of all f_i (the one of least norm where there are many)."""
        H = np.zeros((self.d, self.d))
        c = np.zeros(self.d)
        for A, b in zip(self.A, self.b, strict=True):
            H = H + A.T @ A / len(b)
            c = c + A.T @ b / len(b)
        w: Vector = np.linalg.pinv(H) @ c
        return w


def steps_of(K: Steps, i: int) -> int:
    """The number of local steps of client i."""
    return K if isinstance(K, int) else K[i]


def mean_steps(K: Steps, sampled: Sequence[int]) -> float:
    """The mean number of local steps of the sampled clients."""
    return sum(steps_of(K, i) for i in sampled) / len(sampled)


def quotient(m: Vector, root: Vector) -> Vector:
    """m / root, and 0 where root is 0."""
    out = np.zeros(len(m))
    for j in range(len(m)):
        if root[j] != 0.0:
            out[j] = m[j] / root[j]
    return out


def fadamgc(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    v_hat: str = "carry",
    init: str = "zero",
) -> Result:
    """FAdamGC, Algorithm 1 of the paper."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    y = np.zeros(d)
    y_i = [np.zeros(d) for _ in range(n)]
    if init == "gradient":
        y_i = [problem.gradient(i, x) for i in range(n)]
        y = sum(y_i, np.zeros(d)) / n
    v_i = [np.zeros(d) for _ in range(n)]
    v_hat_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        dy_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            m = np.zeros(d)
            v = v_i[i]
            vh = v_hat_i[i] if v_hat == "carry" else v_i[i]
            g_sum = np.zeros(d)
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                g_hat = g + y - y_i[i]
                m = beta1 * m + (1 - beta1) * g_hat
                v = beta2 * v + (1 - beta2) * g_hat**2
                vh = np.maximum(vh, v)
                x_i = x_i - eta_l * quotient(m, np.sqrt(vh) + eps)
                g_sum = g_sum + g
            if i in tracked:
                y_new = g_sum / K_i
                dy_sum = dy_sum + (y_new - y_i[i])
                y_i[i] = y_new
            v_i[i] = v
            v_hat_i[i] = vh
            dx_sum = dx_sum + (x_i - x)
        x = x + eta_g * (dx_sum / len(sampled))
        y = y + dy_sum / n
        xs.append(x)
    return {"x": xs, "y": y, "y_i": y_i, "v_i": v_i, "v_hat_i": v_hat_i}


def fa_nt(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    v_hat: str = "carry",
) -> Result:
    """FA-NT, naive tracking, as the appendix has it."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    y = np.zeros(d)
    y_i = [np.zeros(d) for _ in range(n)]
    v_i = [np.zeros(d) for _ in range(n)]
    v_hat_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        dy_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            m = np.zeros(d)
            v = v_i[i]
            vh = v_hat_i[i] if v_hat == "carry" else v_i[i]
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                vh = np.maximum(vh, v)
                delta = quotient(m, np.sqrt(vh) + eps)
                x_i = x_i - eta_l * (delta + y - y_i[i])
            if i in tracked:
                y_new = y_i[i] - y + (x - x_i) / (K_i * eta_l)
                dy_sum = dy_sum + (y_new - y_i[i])
                y_i[i] = y_new
            v_i[i] = v
            v_hat_i[i] = vh
            dx_sum = dx_sum + (x_i - x)
        x = x + eta_g * (dx_sum / len(sampled))
        y = y + dy_sum / n
        xs.append(x)
    return {"x": xs, "y": y, "y_i": y_i, "v_i": v_i, "v_hat_i": v_hat_i}


def fa_nt_local(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    v_hat: str = "carry",
) -> Result:
    """FA-NT in the form with z_i = y - y_i, for full participation and the same K at all clients.

    The paper's z_i += (x_i - x_new) / (K eta_g eta_l) is the rule below with eta_g = 1.
    """
    n, d = problem.n, problem.d
    x = problem.x.copy()
    z_i = [np.zeros(d) for _ in range(n)]
    v_i = [np.zeros(d) for _ in range(n)]
    v_hat_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, tracked in schedule:
        assert sorted(sampled) == sorted(tracked) == list(range(n)), (
            "this form needs every client in every round"
        )
        x_end = [x for _ in range(n)]
        for i in sampled:
            x_i = x.copy()
            m = np.zeros(d)
            v = v_i[i]
            vh = v_hat_i[i] if v_hat == "carry" else v_i[i]
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                vh = np.maximum(vh, v)
                delta = quotient(m, np.sqrt(vh) + eps)
                x_i = x_i - eta_l * (delta + z_i[i])
            v_i[i] = v
            v_hat_i[i] = vh
            x_end[i] = x_i
        dx_sum = np.zeros(d)
        for i in sampled:
            dx_sum = dx_sum + (x_end[i] - x)
        x_new = x + eta_g * (dx_sum / n)
        for i in sampled:
            z_i[i] = z_i[i] + ((x_end[i] - x) - (x_new - x) / eta_g) / (steps_of(K, i) * eta_l)
        x = x_new
        xs.append(x)
    return {"x": xs, "z_i": z_i, "v_i": v_i, "v_hat_i": v_hat_i}


def local_adam(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    v_hat: str = "carry",
    moments: str = "keep",
) -> Result:
    """LocalAdam: Adam at the clients, with nothing that corrects their drift."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    v_i = [np.zeros(d) for _ in range(n)]
    v_hat_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            m = np.zeros(d)
            if moments == "reset":
                v = np.zeros(d)
                vh = np.zeros(d)
            else:
                v = v_i[i]
                vh = v_hat_i[i] if v_hat == "carry" else v_i[i]
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                vh = np.maximum(vh, v)
                x_i = x_i - eta_l * quotient(m, np.sqrt(vh) + eps)
            v_i[i] = v
            v_hat_i[i] = vh
            dx_sum = dx_sum + (x_i - x)
        x = x + eta_g * (dx_sum / len(sampled))
        xs.append(x)
    return {"x": xs, "v_i": v_i, "v_hat_i": v_hat_i}


def fedavg(problem: Problem, schedule: Schedule, K: Steps, eta_l: float, eta_g: float = 1.0) -> Result:
    """FedAvg."""
    d = problem.d
    x = problem.x.copy()
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * g
            dx_sum = dx_sum + (x_i - x)
        x = x + eta_g * (dx_sum / len(sampled))
        xs.append(x)
    return {"x": xs}


def fedavg_m(
    problem: Problem, schedule: Schedule, K: Steps, eta_l: float, eta_g: float = 1.0, beta: float = 0.1
) -> Result:
    """FedAvg-M (Cheng et al. 2023): beta weighs the fresh gradient."""
    d = problem.d
    x = problem.x.copy()
    G = np.zeros(d)
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (beta * g + (1 - beta) * G)
            dx_sum = dx_sum + (x_i - x)
        D = dx_sum / len(sampled)
        G = -D / (eta_l * mean_steps(K, sampled))
        x = x + eta_g * D
        xs.append(x)
    return {"x": xs, "G": G}


def scaffold(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    option: str = "II",
    init: str = "zero",
) -> Result:
    """SCAFFOLD."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    y = np.zeros(d)
    y_i = [np.zeros(d) for _ in range(n)]
    if init == "gradient":
        y_i = [problem.gradient(i, x) for i in range(n)]
        y = sum(y_i, np.zeros(d)) / n
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        dy_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (g - y_i[i] + y)
            if i in tracked:
                y_new = y_i[i] - y + (x - x_i) / (K_i * eta_l)
                if option == "I":
                    y_new = problem.gradient(i, x)
                dy_sum = dy_sum + (y_new - y_i[i])
                y_i[i] = y_new
            dx_sum = dx_sum + (x_i - x)
        x = x + eta_g * (dx_sum / len(sampled))
        y = y + dy_sum / n
        xs.append(x)
    return {"x": xs, "y": y, "y_i": y_i}


def scaffold_m(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta: float = 0.1,
    init: str = "zero",
) -> Result:
    """SCAFFOLD-M (Cheng et al. 2023): beta weighs the fresh, corrected gradient."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    G = np.zeros(d)
    y = np.zeros(d)
    y_i = [np.zeros(d) for _ in range(n)]
    if init == "gradient":
        y_i = [problem.gradient(i, x) for i in range(n)]
        y = sum(y_i, np.zeros(d)) / n
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        dy_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            g_sum = np.zeros(d)
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (beta * (g - y_i[i] + y) + (1 - beta) * G)
                g_sum = g_sum + g
            if i in tracked:
                y_new = g_sum / K_i
                dy_sum = dy_sum + (y_new - y_i[i])
                y_i[i] = y_new
            dx_sum = dx_sum + (x_i - x)
        D = dx_sum / len(sampled)
        G = -D / (eta_l * mean_steps(K, sampled))
        x = x + eta_g * D
        y = y + dy_sum / n
        xs.append(x)
    return {"x": xs, "y": y, "G": G, "y_i": y_i}


def fedadam(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
    bias_correction: bool = False,
) -> Result:
    """FedAdam (Reddi et al. 2020): SGD at the clients, Adam at the server."""
    d = problem.d
    x = problem.x.copy()
    m = np.zeros(d)
    v = np.full(d, tau**2 if v0 is None else v0)
    xs = []
    for t, (sampled, _tracked) in enumerate(schedule, start=1):
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * g
            dx_sum = dx_sum + (x_i - x)
        D = dx_sum / len(sampled)
        m = beta1 * m + (1 - beta1) * D
        v = beta2 * v + (1 - beta2) * D**2
        if bias_correction:
            x = x + eta_g * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + tau)
        else:
            x = x + eta_g * m / (np.sqrt(v) + tau)
        xs.append(x)
    return {"x": xs, "m": m, "v": v}


def fedams(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    option: str = "fedams",
) -> Result:
    """FedAMS (Wang et al. 2022): SGD at the clients, AMSGrad at the server."""
    d = problem.d
    x = problem.x.copy()
    m = np.zeros(d)
    v = np.zeros(d)
    vh = np.zeros(d)
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * g
            dx_sum = dx_sum + (x_i - x)
        D = dx_sum / len(sampled)
        m = beta1 * m + (1 - beta1) * D
        v = beta2 * v + (1 - beta2) * D**2
        if option == "amsgrad":
            vh = np.maximum(vh, v)
            x = x + eta_g * m / (np.sqrt(vh) + eps)
        else:
            vh = np.maximum(np.maximum(vh, v), eps)
            x = x + eta_g * m / np.sqrt(vh)
        xs.append(x)
    return {"x": xs, "m": m, "v": v, "v_hat": vh}
