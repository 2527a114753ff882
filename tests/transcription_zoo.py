"""More published methods in plain numpy loops, to be compared with the package.

Nothing here comes from the package: every method is one function that spells out its loops over rounds,
clients and local steps. The functions repeat each other on purpose, so that each can be read next to its
rule. The problem, the schedule and the result are those of ``transcription.py``.

Aggregation is uniform over the sampled clients. There is no bias correction unless the rule has one. Where K
differs between clients, the server divides by the mean K of the round.
"""

from collections.abc import Sequence

import numpy as np

from transcription import Problem, Result, Schedule, Steps, mean_steps, quotient, steps_of


def fedprox(
    problem: Problem, schedule: Schedule, K: Steps, eta_l: float, mu: float, eta_g: float = 1.0
) -> Result:
    """FedProx (Li et al. 2020): every local step is pulled back to the global model."""
    d = problem.d
    x = problem.x.copy()
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (g + mu * (x_i - x))
            dx_sum = dx_sum + (x_i - x)
        x = x + eta_g * (dx_sum / len(sampled))
        xs.append(x)
    return {"x": xs}


def feddyn(problem: Problem, schedule: Schedule, K: Steps, eta_l: float, alpha: float) -> Result:
    """FedDyn (Acar et al. 2021): h_i is the sum of the client's own D_i, h their mean over all clients."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    h = np.zeros(d)
    h_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (g + alpha * (x_i - x + h_i[i]))
            h_i[i] = h_i[i] + (x_i - x)
            dx_sum = dx_sum + (x_i - x)
        h = h + dx_sum / n
        x = x + dx_sum / len(sampled) + h
        xs.append(x)
    return {"x": xs, "h": h, "h_i": h_i}


def feddc(problem: Problem, schedule: Schedule, K: Steps, eta_l: float, alpha: float) -> Result:
    """FedDC (Gao et al. 2022): the drift h_i of FedDyn and the control variate s_i of SCAFFOLD.

    All sampled clients update h_i; only tracked clients update s_i and s.
    """
    n, d = problem.n, problem.d
    x = problem.x.copy()
    h = np.zeros(d)
    s = np.zeros(d)
    h_i = [np.zeros(d) for _ in range(n)]
    s_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        ds_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (g + alpha * (x_i - x + h_i[i]) + s - s_i[i])
            h_i[i] = h_i[i] + (x_i - x)
            if i in tracked:
                s_new = s_i[i] - s - (x_i - x) / (K_i * eta_l)
                ds_sum = ds_sum + (s_new - s_i[i])
                s_i[i] = s_new
            dx_sum = dx_sum + (x_i - x)
        s = s + ds_sum / n
        h = h + dx_sum / n
        x = x + dx_sum / len(sampled) + h
        xs.append(x)
    return {"x": xs, "h": h, "s": s, "h_i": h_i, "s_i": s_i}


def fednova(
    problem: Problem, schedule: Schedule, K: Steps, eta_l: float, eta_g: float = 1.0, rho: float = 0.0
) -> Result:
    """FedNova (Wang et al. 2020), with local momentum rho that starts at zero in every round.

    a_i is the sum of the weights that the gradients of the K steps have in D_i / (-eta_l).
    """
    d = problem.d
    x = problem.x.copy()
    xs = []
    for sampled, _tracked in schedule:
        normalized_sum = np.zeros(d)
        a_sum = 0.0
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            u = np.zeros(d)
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                u = rho * u + g
                x_i = x_i - eta_l * u
            a = (K_i - rho * (1 - rho**K_i) / (1 - rho)) / (1 - rho)
            normalized_sum = normalized_sum + (x_i - x) / a
            a_sum = a_sum + a
        x = x + eta_g * (a_sum / len(sampled)) * (normalized_sum / len(sampled))
        xs.append(x)
    return {"x": xs}


def server_momentum(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta: float = 0.9,
    nesterov: bool = False,
) -> Result:
    """Server momentum (Hsu et al. 2019), which other libraries call FedAvgM."""
    d = problem.d
    x = problem.x.copy()
    m = np.zeros(d)
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
        m = beta * m + D
        step = beta * m + D if nesterov else m
        x = x + eta_g * step
        xs.append(x)
    return {"x": xs, "m": m}


def fedadagrad(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    tau: float = 1e-3,
) -> Result:
    """FedAdagrad (Reddi et al. 2020): SGD at the clients, Adagrad with momentum at the server."""
    d = problem.d
    x = problem.x.copy()
    m = np.zeros(d)
    v = np.full(d, tau**2)
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
        v = v + D**2
        x = x + eta_g * quotient(m, np.sqrt(v) + tau)
        xs.append(x)
    return {"x": xs, "m": m, "v": v}


def fedyogi(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
) -> Result:
    """FedYogi (Reddi et al. 2020): SGD at the clients, Yogi at the server."""
    d = problem.d
    x = problem.x.copy()
    m = np.zeros(d)
    v = np.full(d, tau**2)
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
        v = v - (1 - beta2) * D**2 * np.sign(v - D**2)
        x = x + eta_g * quotient(m, np.sqrt(v) + tau)
        xs.append(x)
    return {"x": xs, "m": m, "v": v}


def fedexp(problem: Problem, schedule: Schedule, K: Steps, eta_l: float, eps: float = 1e-3) -> Result:
    """FedExP (Jhunjhunwala et al. 2023): a global step size that grows with the clients' disagreement."""
    d = problem.d
    x = problem.x.copy()
    xs = []
    eta_gs = []
    for sampled, _tracked in schedule:
        S = len(sampled)
        dx_sum = np.zeros(d)
        square_sum = 0.0
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * g
            dx_sum = dx_sum + (x_i - x)
            square_sum = square_sum + float(np.sum((x_i - x) ** 2))
        D = dx_sum / S
        eta_g = max(1.0, square_sum / (2 * S * (float(np.sum(D**2)) + eps)))
        x = x + eta_g * D
        xs.append(x)
        eta_gs.append(eta_g)
    return {"x": xs, "eta_g": eta_gs}


def fedacg(
    problem: Problem, schedule: Schedule, K: Steps, eta_l: float, beta: float, lam: float = 0.85
) -> Result:
    """FedACG (Kim et al. 2024): the clients start from the model that the momentum looks ahead to."""
    d = problem.d
    x = problem.x.copy()
    m = np.zeros(d)
    xs = []
    for sampled, _tracked in schedule:
        x_ahead = x + lam * m
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x_ahead.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (g + beta * (x_i - x_ahead))
            dx_sum = dx_sum + (x_i - x_ahead)
        m = lam * m + dx_sum / len(sampled)
        x = x + m
        xs.append(x)
    return {"x": xs, "m": m}


def scaffnew(problem: Problem, schedule: Schedule, K: Steps, eta_l: float, p: float | None = None) -> Result:
    """Scaffnew, also called ProxSkip (Mishchenko et al. 2022), for full participation.

    With p = None the rounds have K steps, which counts as p = 1 / K. Otherwise K has one number for each
    round: the number of steps until the coin that all clients share, of probability p, says to communicate.
    """
    n, d = problem.n, problem.d
    x = problem.x.copy()
    h_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for t, (sampled, tracked) in enumerate(schedule):
        assert sorted(sampled) == sorted(tracked) == list(range(n)), "Scaffnew needs every client"
        x_end = [x for _ in range(n)]
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i) if p is None else steps_of(K, t)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (g - h_i[i])
            x_end[i] = x_i
        dx_sum = np.zeros(d)
        for i in sampled:
            dx_sum = dx_sum + (x_end[i] - x)
        x = x + dx_sum / n
        for i in sampled:
            if p is None:
                h_i[i] = h_i[i] + (x - x_end[i]) / (steps_of(K, i) * eta_l)
            else:
                h_i[i] = h_i[i] + (p / eta_l) * (x - x_end[i])
        xs.append(x)
    return {"x": xs, "h_i": h_i}


def scaffold_local(
    problem: Problem, schedule: Schedule, K: Steps, eta_l: float, eta_g: float = 1.0
) -> Result:
    """SCAFFOLD in the form with z_i = y - y_i, which sends x only, for full participation."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    z_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, tracked in schedule:
        assert sorted(sampled) == sorted(tracked) == list(range(n)), "this form needs every client"
        x_end = [x for _ in range(n)]
        for i in sampled:
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * (g + z_i[i])
            x_end[i] = x_i
        dx_sum = np.zeros(d)
        for i in sampled:
            dx_sum = dx_sum + (x_end[i] - x)
        x_new = x + eta_g * (dx_sum / n)
        for i in sampled:
            z_i[i] = z_i[i] + ((x_end[i] - x) - (x_new - x) / eta_g) / (steps_of(K, i) * eta_l)
        x = x_new
        xs.append(x)
    return {"x": xs, "z_i": z_i}


def fedlada(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eps: float,
    eta_g: float = 1.0,
    alpha: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
) -> Result:
    """FedLADA: Adam with a shared second moment, mixed with the direction G of the last round."""
    d = problem.d
    x = problem.x.copy()
    v_server = np.full(d, eps**2)
    G = np.zeros(d)
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        vh_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            m = np.zeros(d)
            v = v_server
            vh = v_server
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                vh = np.maximum(vh, v)
                x_i = x_i - eta_l * (alpha * quotient(m, np.sqrt(vh)) + (1 - alpha) * G)
            dx_sum = dx_sum + (x_i - x)
            vh_sum = vh_sum + vh
        D = dx_sum / len(sampled)
        v_server = vh_sum / len(sampled)
        G = -D / (eta_l * mean_steps(K, sampled))
        x = x + eta_g * D
        xs.append(x)
    return {"x": xs, "v": v_server, "G": G}


def fedkeel(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eps: float,
    eta_g: float = 1.0,
    alpha: float = 0.4,
    beta1: float = 0.5,
    beta2: float = 0.99,
    init: str = "zero",
) -> Result:
    """FedKeel: FedLADA on the corrected gradient g + y - y_i."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    y = np.zeros(d)
    y_i = [np.zeros(d) for _ in range(n)]
    if init == "gradient":
        y_i = [problem.gradient(i, x) for i in range(n)]
        y = sum(y_i, np.zeros(d)) / n
    v_server = np.full(d, eps**2)
    G = np.zeros(d)
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        vh_sum = np.zeros(d)
        dy_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            m = np.zeros(d)
            v = v_server
            vh = v_server
            g_sum = np.zeros(d)
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                g_hat = g + y - y_i[i]
                m = beta1 * m + (1 - beta1) * g_hat
                v = beta2 * v + (1 - beta2) * g_hat**2
                vh = np.maximum(vh, v)
                x_i = x_i - eta_l * (alpha * quotient(m, np.sqrt(vh)) + (1 - alpha) * G)
                g_sum = g_sum + g
            if i in tracked:
                dy_sum = dy_sum + (g_sum / K_i - y_i[i])
                y_i[i] = g_sum / K_i
            dx_sum = dx_sum + (x_i - x)
            vh_sum = vh_sum + vh
        D = dx_sum / len(sampled)
        v_server = vh_sum / len(sampled)
        G = -D / (eta_l * mean_steps(K, sampled))
        x = x + eta_g * D
        y = y + dy_sum / n
        xs.append(x)
    return {"x": xs, "v": v_server, "G": G, "y": y, "y_i": y_i}


def fedlalr(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 0.0,
) -> Result:
    """FedLALR: AMSGrad at the clients; the server averages m and v_hat and sends them back.

    With eps = 0, a coordinate where v_hat is 0 does not move.
    """
    d = problem.d
    x = problem.x.copy()
    m_server = np.zeros(d)
    vh_server = np.full(d, eps**2)
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        m_sum = np.zeros(d)
        vh_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            m = m_server
            v = vh_server
            vh = vh_server
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                vh = np.maximum(vh, v)
                x_i = x_i - eta_l * quotient(m, np.sqrt(vh))
            dx_sum = dx_sum + (x_i - x)
            m_sum = m_sum + m
            vh_sum = vh_sum + vh
        x = x + eta_g * (dx_sum / len(sampled))
        m_server = m_sum / len(sampled)
        vh_server = vh_sum / len(sampled)
        xs.append(x)
    return {"x": xs, "m": m_server, "v_hat": vh_server}


def fedadamw(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    alpha: float,
    weight_decay: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    second_moment: str = "blocks",
    sizes: Sequence[int] | None = None,
) -> Result:
    """FedAdamW: AdamW with a shared second moment and the direction G of the last round.

    m starts at zero in every round, and its bias correction counts the steps of the round. v comes from the
    server, and its bias correction counts the steps of all rounds: t grows by the mean K of each round.
    ``sizes`` has the lengths of the blocks whose means of v are shared; None is one block.
    """
    d = problem.d
    x = problem.x.copy()
    v_server = np.zeros(d)
    G = np.zeros(d)
    t = 0.0
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        v_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            m = np.zeros(d)
            v = v_server
            for k in range(1, steps_of(K, i) + 1):
                g = problem.gradient(i, x_i)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                m_unbiased = m / (1 - beta1**k)
                v_unbiased = v / (1 - beta2 ** (t + k))
                delta = quotient(m_unbiased, np.sqrt(v_unbiased) + eps)
                x_i = x_i - eta_l * (delta + alpha * G + weight_decay * x_i)
            dx_sum = dx_sum + (x_i - x)
            v_sum = v_sum + v
        D = dx_sum / len(sampled)
        v_server = v_sum / len(sampled)
        if second_moment == "blocks":
            start = 0
            for size in [d] if sizes is None else sizes:
                v_server[start : start + size] = np.mean(v_server[start : start + size])
                start = start + size
            assert start == d, "the blocks must cover all parameters"
        G = -D / (eta_l * mean_steps(K, sampled))
        x = x + eta_g * D
        t = t + mean_steps(K, sampled)
        xs.append(x)
    return {"x": xs, "v": v_server, "G": G, "t": t}


def diloco(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    weight_decay: float,
    eta_g: float = 0.7,
    mu: float = 0.9,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    bias_correction: bool = False,
) -> Result:
    """DiLoCo: AdamW whose state stays at the client, Nesterov momentum at the server.

    The bias correction counts all steps that the client has taken, in all its rounds.
    """
    n, d = problem.n, problem.d
    x = problem.x.copy()
    u = np.zeros(d)
    m_i = [np.zeros(d) for _ in range(n)]
    v_i = [np.zeros(d) for _ in range(n)]
    t_i = [0 for _ in range(n)]
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            m = m_i[i]
            v = v_i[i]
            t = t_i[i]
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                t = t + 1
                if bias_correction:
                    delta = quotient(m / (1 - beta1**t), np.sqrt(v / (1 - beta2**t)) + eps)
                else:
                    delta = quotient(m, np.sqrt(v) + eps)
                x_i = x_i - eta_l * (delta + weight_decay * x_i)
            m_i[i] = m
            v_i[i] = v
            t_i[i] = t
            dx_sum = dx_sum + (x_i - x)
        D = dx_sum / len(sampled)
        u = mu * u - D
        x = x - eta_g * (mu * u - D)
        xs.append(x)
    return {"x": xs, "u": u, "m_i": m_i, "v_i": v_i, "t_i": t_i}


def fedlion(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
) -> Result:
    """FedLion: Lion at the clients; the server averages its momentum and sends it back."""
    d = problem.d
    x = problem.x.copy()
    m_server = np.zeros(d)
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        m_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            m = m_server
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                c = beta1 * m + (1 - beta1) * g
                x_i = x_i - eta_l * np.sign(c)
                m = beta2 * m + (1 - beta2) * g
            dx_sum = dx_sum + (x_i - x)
            m_sum = m_sum + m
        x = x + eta_g * (dx_sum / len(sampled))
        m_server = m_sum / len(sampled)
        xs.append(x)
    return {"x": xs, "m": m_server}


def fedmuon_sign(
    problem: Problem, schedule: Schedule, K: Steps, eta_l: float, alpha: float, eta_g: float = 1.0
) -> Result:
    """FedMuon in its sign form: a bias correction in front of the sign.

    M_i stays at the client between rounds, tracked or not; only tracked clients update C_i and C.
    """
    n, d = problem.n, problem.d
    x = problem.x.copy()
    C = np.zeros(d)
    C_i = [np.zeros(d) for _ in range(n)]
    M_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, tracked in schedule:
        S = len(sampled)
        dx_sum = np.zeros(d)
        dC_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            M = M_i[i]
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                M = (1 - alpha) * M + alpha * g
                x_i = x_i - eta_l * np.sign(M - C_i[i] + C)
            M_i[i] = M
            if i in tracked:
                dC_sum = dC_sum + (M - C_i[i])
                C_i[i] = M
            dx_sum = dx_sum + (x_i - x)
        x = x + eta_g * (S / n) * (dx_sum / S)
        C = C + dC_sum / n
        xs.append(x)
    return {"x": xs, "C": C, "C_i": C_i, "M_i": M_i}


def mimelite(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eps: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
) -> Result:
    """MimeLite with Adam: the server's moments, which no client changes, in every local step.

    m and v start at zero, so the steps of the first round are (1 - beta1) g / eps.
    """
    d = problem.d
    x = problem.x.copy()
    m = np.zeros(d)
    v = np.zeros(d)
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        c_sum = np.zeros(d)
        for i in sampled:
            c_sum = c_sum + problem.gradient(i, x)
            x_i = x.copy()
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                x_i = x_i - eta_l * quotient(beta1 * m + (1 - beta1) * g, np.sqrt(v) + eps)
            dx_sum = dx_sum + (x_i - x)
        c = c_sum / len(sampled)
        m = beta1 * m + (1 - beta1) * c
        v = beta2 * v + (1 - beta2) * c**2
        x = x + eta_g * (dx_sum / len(sampled))
        xs.append(x)
    return {"x": xs, "m": m, "v": v}


# Products of the algebra that have no name of their own.


def amsgrad_pre_direction(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    alpha: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
) -> Result:
    """AMSGrad (m reset, v keep) x pre+direction x Average.

    The moments see g + y - y_i. The step is the mean of their direction, with weight alpha, and of G, the
    mean direction of the last round. y_i is the mean raw gradient of the last round in which i was tracked.
    """
    n, d = problem.n, problem.d
    x = problem.x.copy()
    y = np.zeros(d)
    G = np.zeros(d)
    y_i = [np.zeros(d) for _ in range(n)]
    v_i = [np.zeros(d) for _ in range(n)]
    vh_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        dy_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            m = np.zeros(d)
            v = v_i[i]
            vh = vh_i[i]
            g_sum = np.zeros(d)
            for _k in range(K_i):
                g = problem.gradient(i, x_i)
                g_hat = g + y - y_i[i]
                m = beta1 * m + (1 - beta1) * g_hat
                v = beta2 * v + (1 - beta2) * g_hat**2
                vh = np.maximum(vh, v)
                x_i = x_i - eta_l * (alpha * quotient(m, np.sqrt(vh) + eps) + (1 - alpha) * G)
                g_sum = g_sum + g
            v_i[i] = v
            vh_i[i] = vh
            dx_sum = dx_sum + (x_i - x)
            if i in tracked:
                dy_sum = dy_sum + (g_sum / K_i - y_i[i])
                y_i[i] = g_sum / K_i
        D = dx_sum / len(sampled)
        y = y + dy_sum / n
        G = -D / (eta_l * mean_steps(K, sampled))
        x = x + eta_g * D
        xs.append(x)
    return {"x": xs, "y": y, "y_i": y_i, "G": G}


def adam_shared_pre(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    eta_g: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    bias_correction: bool = False,
) -> Result:
    """Adam (m share, v share) x pre x Average: all clients start from the mean moments of the last round.

    The moments see g + y - y_i. The bias correction counts the steps in the mean moments: t grows by the mean
    K of each round.
    """
    n, d = problem.n, problem.d
    x = problem.x.copy()
    y = np.zeros(d)
    y_i = [np.zeros(d) for _ in range(n)]
    m_server = np.zeros(d)
    v_server = np.zeros(d)
    t = 0.0
    xs = []
    for sampled, tracked in schedule:
        dx_sum = np.zeros(d)
        dy_sum = np.zeros(d)
        m_sum = np.zeros(d)
        v_sum = np.zeros(d)
        for i in sampled:
            K_i = steps_of(K, i)
            x_i = x.copy()
            m = m_server
            v = v_server
            g_sum = np.zeros(d)
            for k in range(1, K_i + 1):
                g = problem.gradient(i, x_i)
                g_hat = g + y - y_i[i]
                m = beta1 * m + (1 - beta1) * g_hat
                v = beta2 * v + (1 - beta2) * g_hat**2
                if bias_correction:
                    root = np.sqrt(v / (1 - beta2 ** (t + k)))
                    x_i = x_i - eta_l * quotient(m / (1 - beta1 ** (t + k)), root + eps)
                else:
                    x_i = x_i - eta_l * quotient(m, np.sqrt(v) + eps)
                g_sum = g_sum + g
            dx_sum = dx_sum + (x_i - x)
            m_sum = m_sum + m
            v_sum = v_sum + v
            if i in tracked:
                dy_sum = dy_sum + (g_sum / K_i - y_i[i])
                y_i[i] = g_sum / K_i
        x = x + eta_g * (dx_sum / len(sampled))
        y = y + dy_sum / n
        m_server = m_sum / len(sampled)
        v_server = v_sum / len(sampled)
        t = t + mean_steps(K, sampled)
        xs.append(x)
    return {"x": xs, "y": y, "y_i": y_i, "m": m_server, "v": v_server}


def momentum_direction(
    problem: Problem,
    schedule: Schedule,
    K: Steps,
    eta_l: float,
    alpha: float,
    eta_g: float = 1.0,
    beta: float = 0.9,
    nesterov: bool = False,
) -> Result:
    """Momentum (m keep) x direction x Average: m stays at the client between its rounds."""
    n, d = problem.n, problem.d
    x = problem.x.copy()
    G = np.zeros(d)
    m_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for sampled, _tracked in schedule:
        dx_sum = np.zeros(d)
        for i in sampled:
            x_i = x.copy()
            m = m_i[i]
            for _k in range(steps_of(K, i)):
                g = problem.gradient(i, x_i)
                m = beta * m + g
                delta = g + beta * m if nesterov else m
                x_i = x_i - eta_l * (alpha * delta + (1 - alpha) * G)
            m_i[i] = m
            dx_sum = dx_sum + (x_i - x)
        D = dx_sum / len(sampled)
        G = -D / (eta_l * mean_steps(K, sampled))
        x = x + eta_g * D
        xs.append(x)
    return {"x": xs, "G": G, "m_i": m_i}


# Clients in groups.


def mtgc(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    group_rounds: int,
    H: int,
    rounds: int,
    eta_l: float,
    z: str = "keep",
) -> Result:
    """MTGC (Fang et al. 2024): SGD in groups of clients; all clients take part.

    The global model is the mean over all clients, so a group counts as its number of clients. z = "reset"
    sets z_i to zero at the start of every global round, as the authors' code does.
    """
    n, d = problem.n, problem.d
    assert sorted(i for group in groups for i in group) == list(range(n)), "every client is in one group"
    x = problem.x.copy()
    y_j = [np.zeros(d) for _ in groups]
    z_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for _t in range(rounds):
        if z == "reset":
            z_i = [np.zeros(d) for _ in range(n)]
        x_j = [x.copy() for _ in groups]
        for _e in range(group_rounds):
            for j, group in enumerate(groups):
                x_end = {}
                for i in group:
                    x_i = x_j[j].copy()
                    for _k in range(H):
                        g = problem.gradient(i, x_i)
                        x_i = x_i - eta_l * (g + z_i[i] + y_j[j])
                    x_end[i] = x_i
                x_sum = np.zeros(d)
                for i in group:
                    x_sum = x_sum + x_end[i]
                x_j[j] = x_sum / len(group)
                for i in group:
                    z_i[i] = z_i[i] + (x_end[i] - x_j[j]) / (H * eta_l)
        x_sum = np.zeros(d)
        for j, group in enumerate(groups):
            x_sum = x_sum + len(group) * x_j[j]
        x = x_sum / n
        for j in range(len(groups)):
            y_j[j] = y_j[j] + (x_j[j] - x) / (H * group_rounds * eta_l)
        xs.append(x)
    return {"x": xs, "y_j": y_j, "z_i": z_i}


def mtgc_adam(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    group_rounds: int,
    H: int,
    rounds: int,
    eta_l: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    z: str = "keep",
) -> Result:
    """MTGC with FAdamGC's local steps: both corrections are added to g before the moments.

    g_i is the client's mean raw gradient of its last group round. z_i is updated at the end of every group
    round and y_j at the end of every global round; "reset" sets z_i to zero in between. m starts
    at zero in every group round; v and v_hat stay at the client.
    """
    n, d = problem.n, problem.d
    assert sorted(i for group in groups for i in group) == list(range(n)), "every client is in one group"
    x = problem.x.copy()
    y_j = [np.zeros(d) for _ in groups]
    z_i = [np.zeros(d) for _ in range(n)]
    v_i = [np.zeros(d) for _ in range(n)]
    v_hat_i = [np.zeros(d) for _ in range(n)]
    xs = []
    for _t in range(rounds):
        if z == "reset":
            z_i = [np.zeros(d) for _ in range(n)]
        x_j = [x.copy() for _ in groups]
        g_i = [np.zeros(d) for _ in range(n)]
        g_j = [np.zeros(d) for _ in groups]
        for _e in range(group_rounds):
            for j, group in enumerate(groups):
                x_sum = np.zeros(d)
                for i in group:
                    x_i = x_j[j].copy()
                    m = np.zeros(d)
                    v = v_i[i]
                    vh = v_hat_i[i]
                    g_sum = np.zeros(d)
                    for _k in range(H):
                        g = problem.gradient(i, x_i)
                        g_hat = g + z_i[i] + y_j[j]
                        m = beta1 * m + (1 - beta1) * g_hat
                        v = beta2 * v + (1 - beta2) * g_hat**2
                        vh = np.maximum(vh, v)
                        x_i = x_i - eta_l * quotient(m, np.sqrt(vh) + eps)
                        g_sum = g_sum + g
                    v_i[i] = v
                    v_hat_i[i] = vh
                    g_i[i] = g_sum / H
                    x_sum = x_sum + x_i
                x_j[j] = x_sum / len(group)
                g_j[j] = sum((g_i[i] for i in group), np.zeros(d)) / len(group)
                for i in group:
                    z_i[i] = g_j[j] - g_i[i]
        x_sum = np.zeros(d)
        for j, group in enumerate(groups):
            x_sum = x_sum + len(group) * x_j[j]
        x = x_sum / n
        g_mean = sum(g_i, np.zeros(d)) / n
        for j in range(len(groups)):
            y_j[j] = g_mean - g_j[j]
        xs.append(x)
    return {"x": xs, "y_j": y_j, "z_i": z_i, "v_i": v_i, "v_hat_i": v_hat_i}
