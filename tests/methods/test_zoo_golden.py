"""The first rounds of every method on problems of one parameter, computed by hand.

Unless an entry says otherwise, x = 2, eta = 1/2, and the two clients are

    client 0: f(w) = w^2 / 2,        g = w            A step of SGD halves w.
    client 1: f(w) = (w - 1)^2 / 2,  g = w - 1        A step of SGD halves w - 1.
    client q: f(w) = (w - 1)^2 / 8,  g = (w - 1) / 4  A step of SGD multiplies w - 1 by 7/8.

Two steps of SGD from x: D_0 = -3/4 x, D_1 = -3/4 (x - 1), mean D = -3/4 (x - 1/2), and
D_q = -15/64 (x - 1).
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from test_transcription import make_task
from test_transcription_zoo import PRODUCTS, zoo

import fadamgc
import transcription_zoo
from transcription import Problem, Schedule

BOTH: Schedule = [([0, 1], [0, 1])]
FIRST: Schedule = [([0], [0])]

ZERO, ONE, QUARTER, EIGHT = (1.0, 0.0), (1.0, 1.0), (0.5, 0.5), (1.0, 8.0)  # A, b: f(w) = (A w - b)^2 / 2


@dataclass(frozen=True)
class Golden:
    """One run by hand: ``x`` has the global model after each round."""

    cls: str
    function: str
    options: dict[str, Any]
    x: list[float]
    schedule: Schedule = field(default_factory=lambda: BOTH)
    K: int = 2
    clients: tuple[tuple[float, float], ...] = (ZERO, ONE)
    start: float = 2.0
    rows: tuple[int, ...] = (1, 1)  # with other rows, a client takes one step for each of its equal rows

    def problem(self) -> Problem:
        A = [np.full((r, 1), A_i) for r, (A_i, _) in zip(self.rows, self.clients, strict=True)]
        b = [np.full(r, b_i) for r, (_, b_i) in zip(self.rows, self.clients, strict=True)]
        return Problem(A, b, np.array([self.start]))

    def how(self) -> dict[str, Any]:
        """The arguments of simulate for the numbers of local steps."""
        if self.rows == (1, 1):
            return {"local_steps": self.K, "batch_size": None}
        return {"local_epochs": 1, "batch_size": 1}


# Two AdamW steps by hand. FedAdamW, round 2: v = .75 * .625 + .25 * 1.5875^2 = .46875 + .6300390625.
ADAMW_V = 1.0987890625
ADAMW_DELTA = 1.5875 / (sqrt(ADAMW_V / 0.4375) + 3)
# DiLoCo, round 2: v = .75 * 1 + .25 * 1.690625^2 = .75 + .71455322265625 ; m = .5 * 1 + .5 * 1.690625.
DILOCO_V = 1.46455322265625
DILOCO_D = -0.5 * (1.3453125 / (sqrt(DILOCO_V) + 1.5) + 0.42265625)
DILOCO_D_BIAS = -0.5 * (1.79375 / (sqrt(DILOCO_V / 0.4375) + 3) + 0.42265625)

KEEL_X = 2 - 0.2 / sqrt(1.75)  # of FedKeel, after round 1

GOLDEN = {
    # client 0: 2 -> 2 - (2 + 0)/2 = 1 -> 1 - (1 - .5)/2 = .75, D = -1.25
    # client 1: 2 -> 2 - (1 + 0)/2 = 1.5 -> 1.5 - (.5 - .25)/2 = 1.375, D = -.625
    # mean D = -.9375 ; x = 2 - .8 * .9375
    "fedprox": Golden("FedProx", "fedprox", {"eta_l": 0.5, "eta_g": 0.8, "mu": 0.5}, [1.25]),
    # Round 1: as FedProx, D = -1.25, -.625 ; h_0 = -1.25, h = -.9375 ; x = 2 - .9375 - .9375 = .125
    # Round 2, client 0: .125 -> .125 - (.125 + .5 (0 - 1.25))/2 = .375
    #                    -> .375 - (.375 + .5 (.25 - 1.25))/2 = .4375, D = .3125
    # h = -.9375 + .3125/2 = -.78125 ; x = .125 + .3125 - .78125
    "feddyn": Golden(
        "FedDyn", "feddyn", {"eta_l": 0.5, "alpha": 0.5}, [0.125, -0.34375], schedule=BOTH + FIRST
    ),
    # Round 1: as FedDyn ; K eta = 1 ; client 0 is tracked: s_0 = 0 - 0 + 1.25 ; s = 1.25/2 = .625
    # Round 2, client 0: s - s_0 = -.625
    #     .125 -> .125 - (.125 + .5 (0 - 1.25) - .625)/2 = .125 + 1.125/2 = .6875
    #     -> .6875 - (.6875 + .5 (.5625 - 1.25) - .625)/2 = .6875 + .28125/2 = .828125, D = .703125
    # client 1: s - s_1 = .625
    #     .125 -> .125 - (-.875 + .5 (0 - .625) + .625)/2 = .125 + .5625/2 = .40625
    #     -> .40625 - (-.59375 + .5 (.28125 - .625) + .625)/2 = .40625 + .140625/2 = .4765625, D = .3515625
    # mean D = .52734375 ; h = -.9375 + .52734375 = -.41015625 ; x = .125 + .52734375 - .41015625
    "feddc": Golden(
        "FedDC",
        "feddc",
        {"eta_l": 0.5, "alpha": 0.5},
        [0.125, 0.2421875],
        schedule=[([0, 1], [0]), ([0, 1], [0, 1])],
    ),
    # K = 2 and 1: D = -1.5, -.5 ; a = 2, 1 ; D/a = -.75, -.5 ; x = 2 - 1.5 * .625
    "fednova": Golden("FedNova", "fednova", {"eta_l": 0.5}, [1.0625], rows=(2, 1)),
    # client 0: u = 2, 2 -> 1 ; u = .5 * 2 + 1 = 2, 1 -> 0 ; D = -2 ; a = 1 + 1.5 = 2.5 ; D/a = -.8
    # client 1: D = -.5 ; a = 1 ; mean(D/a) = -.65 ; mean a = 1.75 ; x = 2 - .8 * 1.75 * .65
    "fednova-momentum": Golden(
        "FedNova", "fednova", {"eta_l": 0.5, "eta_g": 0.8, "rho": 0.5}, [1.09], rows=(2, 1)
    ),
    # Round 1: m = -1.125 ; x = 2 - .8 * 1.125 = 1.1
    # Round 2: D = -.75 * .6 = -.45 ; m = -.5625 - .45 = -1.0125 ; x = 1.1 - .81
    "server_momentum": Golden(
        "ServerMomentum",
        "server_momentum",
        {"eta_l": 0.5, "eta_g": 0.8, "beta": 0.5},
        [1.1, 0.29],
        schedule=BOTH * 2,
    ),
    # Round 1: m = -1.125 ; x = 2 + (-.5625 - 1.125) = .3125
    # Round 2: D = -.75 * -.1875 = .140625 ; m = -.5625 + .140625 = -.421875
    #     x = .3125 + (-.2109375 + .140625)
    "server_momentum-nesterov": Golden(
        "ServerMomentum",
        "server_momentum",
        {"eta_l": 0.5, "beta": 0.5, "nesterov": True},
        [0.3125, 0.2421875],
        schedule=BOTH * 2,
    ),
    # Round 1: D = -1.125 ; m = -.5625 ; v = 2.25 + 1.265625 = 1.875^2 ; x = 2 - .6 * .5625/3.375 = 1.9
    # Round 2: D = -.75 * 1.4 = -1.05 ; m = -.28125 - .525 = -.80625 ; v = 3.515625 + 1.1025 = 4.618125
    "fedadagrad": Golden(
        "FedAdagrad",
        "fedadagrad",
        {"eta_l": 0.5, "eta_g": 0.6, "beta1": 0.5, "tau": 1.5},
        [1.9, 1.9 - 0.6 * 0.80625 / (sqrt(4.618125) + 1.5)],
        schedule=BOTH * 2,
    ),
    # D = -1.125, D^2 = 1.265625 > v = 1, so v grows: v = 1 + .8 * 1.265625 = 2.0125 ; m = -.5625
    "fedyogi-grows": Golden(
        "FedYogi",
        "fedyogi",
        {"eta_l": 0.5, "eta_g": 0.6, "beta1": 0.5, "beta2": 0.2, "tau": 1.0},
        [2 - 0.6 * 0.5625 / (sqrt(2.0125) + 1)],
    ),
    # D^2 = 1.265625 < v = 2.25, so v shrinks: v = 2.25 - .8 * 1.265625 = 1.2375
    "fedyogi-shrinks": Golden(
        "FedYogi",
        "fedyogi",
        {"eta_l": 0.5, "eta_g": 0.6, "beta1": 0.5, "beta2": 0.2, "tau": 1.5},
        [2 - 0.6 * 0.5625 / (sqrt(1.2375) + 1.5)],
    ),
    # x = .75: D = -.5625, .1875 ; sum of squares 360/1024 ; mean D = -.1875, its square 36/1024
    # eps = 9/1024: eta_g = 360/(4 * 45) = 2 ; x = .75 - 2 * .1875 = .375
    # Round 2: D = -.28125, .46875 ; sum of squares 306/1024 ; mean D = .09375, its square 9/1024
    # eta_g = 306/(4 * 18) = 4.25 ; x = .375 + 4.25 * .09375
    "fedexp": Golden(
        "FedExP",
        "fedexp",
        {"eta_l": 0.5, "eps": 9 / 1024},
        [0.375, 0.7734375],
        schedule=BOTH * 2,
        start=0.75,
    ),
    # x = 2: 2.8125/(4 (1.265625 + eps)) < 1, so eta_g = 1 ; x = 2 - 1.125
    "fedexp-at-least-1": Golden("FedExP", "fedexp", {"eta_l": 0.5, "eps": 9 / 1024}, [0.875]),
    # Two steps with beta = 1/2 as in FedProx: D_i = -.625 (x~ - b_i), mean D = -.625 (x~ - .5)
    # Round 1: m = -.9375 ; x = 1.0625
    # Round 2: x~ = 1.0625 - .46875 = .59375 ; D = -.05859375
    #     m = -.46875 - .05859375 = -.52734375 ; x = 1.0625 - .52734375
    "fedacg": Golden(
        "FedACG",
        "fedacg",
        {"eta_l": 0.5, "lam": 0.5, "beta": 0.5},
        [1.0625, 0.53515625],
        schedule=BOTH * 2,
    ),
    # Clients 0 and q, K eta = 1.
    # Round 1: x_0 = .5 ; x_q = 1 + 49/64 = 1.765625 ; x = 1.1328125 ; h_0 = .6328125 = -h_q
    # Round 2: x_0 = .6328125 + .5/4 = .7578125
    #     q: g - h_q = (w + 1.53125)/4 ; x_q = 2.6640625 * 49/64 - 1.53125 = .5084228515625 ; x is the mean
    "scaffnew": Golden(
        "Scaffnew",
        "scaffnew",
        {"eta_l": 0.5},
        [1.1328125, 0.63311767578125],
        schedule=BOTH * 2,
        clients=(ZERO, QUARTER),
    ),
    # The same with p/eta = 1/2: h_0 = .31640625 = -h_q
    # Round 2: x_0 = .31640625 + .81640625/4 = .5205078125
    #     q: g - h_q = (w + .265625)/4 ; x_q = 1.3984375 * 49/64 - .265625 = .8050537109375
    "scaffnew-p": Golden(
        "Scaffnew",
        "scaffnew",
        {"eta_l": 0.5, "p": 0.25},
        [1.1328125, 0.66278076171875],
        schedule=BOTH * 2,
        clients=(ZERO, QUARTER),
    ),
    # Clients 0 and q, K eta = 1.
    # Round 1: D = -1.5, -.234375, mean -.8671875 ; x = 2 - .8 * .8671875 = 1.30625
    #     z_0 = -1.5 + .8671875 = -.6328125 = -z_q
    # Round 2: D_0 = -3/4 (1.30625 - .6328125) = -.505078125
    #     q: g + z_q = (w + 1.53125)/4 ; D_q = -15/64 * 2.8375 = -.6650390625
    #     mean D = -.58505859375 ; x = 1.30625 - .468046875
    "scaffold_local": Golden(
        "ScaffoldLocal",
        "scaffold_local",
        {"eta_l": 0.5, "eta_g": 0.8},
        [1.30625, 0.838203125],
        schedule=BOTH * 2,
        clients=(ZERO, QUARTER),
    ),
    # eps = 2: v starts at 4, and v = .75 * 4 + .25 g^2 never exceeds 4, so sqrt(v_hat) = 2. K = 1.
    # Round 1: m = 1, .5 ; D = -.5 (.5 * m/2) = -.125, -.0625 ; x = 2 - .09375 = 1.90625 ; G = .09375/.5
    # Round 2: m = .953125, .453125 ; D = -.5 (.5 * m/2 + .5 * .1875) = -.166015625, -.103515625
    "fedlada": Golden(
        "FedLADA",
        "fedlada",
        {"eta_l": 0.5, "alpha": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 2.0},
        [1.90625, 1.771484375],
        schedule=BOTH * 2,
        K=1,
    ),
    # eps = 1, client 0: m = 1 ; v = .75 + 1 = 1.75 = v_hat ; x = 2 - .8 * .5 * .5/sqrt(1.75)
    "fedlada-grows": Golden(
        "FedLADA",
        "fedlada",
        {"eta_l": 0.5, "eta_g": 0.8, "alpha": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 1.0},
        [2 - 0.2 / sqrt(1.75)],
        schedule=FIRST,
        K=1,
    ),
    # Round 1, eps = 2: as FedLADA: x = 1.90625, G = .1875 ; only client 0 is tracked: y_0 = 2, y = 1
    # Round 2, client 0: g_hat = 1.90625 + 1 - 2 = .90625 ; m = .453125 ; v = 3 + .205 < v_hat = 4
    # D = -.5 (.5 * .453125/2 + .5 * .1875) = -.103515625
    "fedkeel": Golden(
        "FedKeel",
        "fedkeel",
        {"eta_l": 0.5, "alpha": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 2.0},
        [1.90625, 1.802734375],
        schedule=[([0, 1], [0]), ([0], [0])],
        K=1,
    ),
    # Round 1: as FedLADA's: v_hat = 1.75 ; x = 2 - .2/sqrt(1.75) ; G = .5/sqrt(1.75) ; y_0 = 2, y = 1
    # Round 2, client 1: g = x - 1 ; g_hat = x - 1 + 1 - 0 = x ; m = x/2 ; v = 1.3125 + x^2/4 = v_hat
    "fedkeel-grows": Golden(
        "FedKeel",
        "fedkeel",
        {"eta_l": 0.5, "eta_g": 0.8, "alpha": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 1.0},
        [KEEL_X, KEEL_X - 0.4 * (0.25 * KEEL_X / sqrt(1.3125 + KEEL_X**2 / 4) + 0.25 / sqrt(1.75))],
        schedule=[([0], [0]), ([1], [1])],
        K=1,
    ),
    # Round 1, K = 1: m = 1, .5 ; v = 1, .25 ; both D = -.5 ; x = 2 - .8 * .5 = 1.6 ; m = .75 ; v_hat = .625
    # Round 2, client 0: m = .375 + .8 = 1.175 ; v = .46875 + .64 = 1.10875 = v_hat
    "fedlalr": Golden(
        "FedLALR",
        "fedlalr",
        {"eta_l": 0.5, "eta_g": 0.8, "beta1": 0.5, "beta2": 0.75},
        [1.6, 1.6 - 0.8 * 0.5 * 1.175 / sqrt(1.10875)],
        schedule=BOTH + FIRST,
        K=1,
    ),
    # Round 1, K = 1: m/(1-b1) = g ; v/(1-b2) = g^2 ; g/(|g| + 3) = .4, .25
    #     D = -.5 (.4 + .5), -.5 (.25 + .5) = -.45, -.375 ; x = 2 - .4125 = 1.5875 ; G = .825
    #     v = 1, .25 ; their mean .625
    # Round 2, client 0: t = 2, k = 1: m/(1-b1) = 1.5875 ; v/(1-b2^2) = ADAMW_V/.4375
    #     x = 1.5875 - .5 (delta + .5 * .825 + .25 * 1.5875) = 1.1828125 - .5 delta
    "fedadamw": Golden(
        "FedAdamW",
        "fedadamw",
        {"eta_l": 0.5, "alpha": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 3.0, "weight_decay": 0.25},
        [1.5875, 1.1828125 - 0.5 * ADAMW_DELTA],
        schedule=BOTH + FIRST,
        K=1,
    ),
    # Round 1, K = 1: m = 1, .5 ; v = 1, .25 ; m/(sqrt(v) + 1.5) = .4, .25 ; D = -.45, -.375, mean -.4125
    #     u = .4125 ; x = 2 - .5 (.20625 + .4125) = 1.690625
    # Round 2, client 0: D = -.5 (m/(sqrt(v) + 1.5) + .25 * 1.690625) ; u = .20625 - D
    #     x = 1.690625 - .5 (.5 u - D) = 1.6390625 + .75 D
    "diloco": Golden(
        "DiLoCo",
        "diloco",
        {"eta_l": 0.5, "eta_g": 0.5, "mu": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 1.5}
        | {"weight_decay": 0.25, "bias_correction": False},
        [1.690625, 1.6390625 + 0.75 * DILOCO_D],
        schedule=BOTH + FIRST,
        K=1,
    ),
    # Round 1: g/(|g| + 3) = .4, .25, so D and x are the same
    # Round 2, client 0, its step 2: m/(1 - .25) = 1.3453125/.75 = 1.79375 ; v/(1 - .5625)
    "diloco-bias": Golden(
        "DiLoCo",
        "diloco",
        {"eta_l": 0.5, "eta_g": 0.5, "mu": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 3.0}
        | {"weight_decay": 0.25, "bias_correction": True},
        [1.690625, 1.6390625 + 0.75 * DILOCO_D_BIAS],
        schedule=BOTH + FIRST,
        K=1,
    ),
    # Round 1: all signs are +, D = -1, -1 ; x = 1.2
    #     m_0: .25 * 2 = .5, .375 + .25 * 1.5 = .75 ; m_1: .25, .1875 + .25 * .5 = .3125 ; m = .53125
    # Round 2: client 0: 1.2 -> .7 -> .2 ; m_0 = .3984375 + .3 = .6984375, .523828125 + .175 = .698828125
    #     client 1: c = .265625 + .1 > 0, 1.2 -> .7 ; m_1 = .3984375 + .05 = .4484375
    #               c = .22421875 - .15 > 0, .7 -> .2 ; m_1 = .336328125 - .075 = .261328125
    #     D = -1, -1 ; x = .4 ; m = .480078125
    # Round 3: client 0: .4 -> -.1 ; m_0 = .36005859375 + .1
    #               c = .230029296875 - .05 > 0, -.1 -> -.6 ; D = -1
    #     client 1: c = .2400390625 - .3 < 0, .4 -> .9 ; m_1 = .36005859375 - .15 = .21005859375
    #               c = .105029296875 - .05 > 0, .9 -> .4 ; D = 0 ;  x = .4 - .8 * .5
    "fedlion": Golden(
        "FedLion",
        "fedlion",
        {"eta_l": 0.5, "eta_g": 0.8, "beta1": 0.5, "beta2": 0.75},
        [1.2, 0.4, 0.0],
        schedule=BOTH * 3,
    ),
    # Client 1: g = w - 8. K = 1, n = 2.
    # Round 1, client 0: M_0 = 1 ; D = -.5 ; x = 2 - .8 * 1/2 * .5 = 1.8 ; C_0 = 1 ; C = .5
    # Round 2: client 0: M_0 = .5 + .9 = 1.4 ; 1.4 - 1 + .5 > 0 ; D = -.5, not tracked
    #     client 1: M_1 = -3.1 ; -3.1 - 0 + .5 < 0 ; D = .5 ; x = 1.8 ; C_1 = -3.1 ; C = .5 - 1.55 = -1.05
    # Round 3: client 0: M_0 = .7 + .9 = 1.6 ; 1.6 - 1 - 1.05 < 0 ; D = .5
    #     client 1: M_1 = -1.55 - 3.1 = -4.65 ; -4.65 + 3.1 - 1.05 < 0 ; D = .5 ; x = 1.8 + .8 * .5
    "fedmuon_sign": Golden(
        "FedMuonSign",
        "fedmuon_sign",
        {"eta_l": 0.5, "eta_g": 0.8, "alpha": 0.5},
        [1.8, 1.8, 2.2],
        schedule=[([0], [0]), ([0, 1], [1]), ([0, 1], [])],
        K=1,
        clients=(ZERO, EIGHT),
    ),
    # Round 1: m = v = 0, steps of .5 * .5 g/.25 = g: 2 -> 0 -> 0 and 2 -> 1 -> 1
    #     mean D = -1.5 ; x = 2 - 1.2 = .8
    #     c = (2 + 1)/2 = 1.5 ; m = .75 ; v = .25 * 2.25 = .75^2
    # Round 2: steps of .5 (.5 * .75 + .5 g)/(.75 + .25) = .1875 + .25 g
    #     client 0: .8 -> .4125 -> .121875, D = -.678125 ; client 1: .8 -> .6625 -> .559375, D = -.240625
    #     mean D = -.459375 ; x = .8 - .3675
    "mimelite": Golden(
        "MimeLite",
        "mimelite",
        {"eta_l": 0.5, "eta_g": 0.8, "beta1": 0.5, "beta2": 0.75, "eps": 0.25},
        [0.8, 0.4325],
        schedule=BOTH * 2,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_transcription_gives_the_number(name: str) -> None:
    golden = GOLDEN[name]
    K: Any = golden.K if golden.rows == (1, 1) else list(golden.rows)
    result = getattr(transcription_zoo, golden.function)(
        golden.problem(), golden.schedule, K, **golden.options
    )
    np.testing.assert_allclose([x[0] for x in result["x"]], golden.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GOLDEN)
def test_package_gives_the_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = GOLDEN[name]
    monkeypatch.setattr("fadamgc.federation.settings.draw_steps", lambda *_: golden.K)  # a coin that is known
    algorithm = getattr(fadamgc, golden.cls)(**golden.options)
    for rounds in range(1, len(golden.schedule) + 1):
        run = fadamgc.simulate(
            algorithm,
            make_task(golden.problem()),
            rounds=rounds,
            schedule=golden.schedule[:rounds],
            dtype=torch.float64,
            executor="loop",
            progress=False,
            **golden.how(),
        )
        assert run.x.item() == pytest.approx(golden.x[rounds - 1], rel=0, abs=1e-12), f"round {rounds}"


@pytest.mark.parametrize(
    ("second_moment", "v"), [("full", (1.56, 0.37890625)), ("blocks", (1.27875, 0.66015625))]
)
def test_fedadamw_shares_all_of_v_or_the_means_of_blocks(second_moment: str, v: tuple[float, float]) -> None:
    """One client with g = w, two parameters from (2, 1), eta = 1/2, no decay, alpha = 0.

    Round 1, as above: g/(|g| + 3) = .4, .25 ; x = 1.8, .875 ; v = 1, .25 or, as one block, .625 twice
    Round 2, full: v = .75 + .25 * 3.24, .1875 + .25 * .765625 ; blocks: .46875 instead of .75 and .1875
        x = x - .5 x/(sqrt(v/.4375) + 3)
    """
    problem = Problem([sqrt(2) * np.eye(2)], [np.zeros(2)], np.array([2.0, 1.0]))
    options: dict[str, Any] = {"eta_l": 0.5, "alpha": 0.0, "beta1": 0.5, "beta2": 0.75, "eps": 3.0}
    options |= {"weight_decay": 0.0, "second_moment": second_moment}
    expected = [x - 0.5 * x / (sqrt(v_j / 0.4375) + 3) for x, v_j in zip((1.8, 0.875), v, strict=True)]
    by_hand = transcription_zoo.fedadamw(problem, FIRST * 2, 1, **options)["x"]
    run = fadamgc.simulate(
        fadamgc.FedAdamW(**options),
        make_task(problem),
        schedule=FIRST * 2,
        rounds=2,
        local_steps=1,
        batch_size=None,
        dtype=torch.float64,
        executor="loop",
        progress=False,
    )
    for x in (by_hand[1], run.x.numpy()):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


def test_every_method_has_a_number() -> None:
    functions = {golden.function for golden in GOLDEN.values()}
    public = {name for name in vars(transcription_zoo) if is_method(name)}
    assert functions == public - {"mtgc", "mtgc_adam", *PRODUCTS}
    assert {golden.cls for golden in GOLDEN.values()} == zoo()


def is_method(name: str) -> bool:
    value = getattr(transcription_zoo, name)
    return getattr(value, "__module__", "") == "transcription_zoo" and callable(value)
