"""Epsilon: against published values, other formulas, and the exact divergence of single rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

from fadamgc.errors import InputError
from fadamgc.federation.accounting import ORDERS, Accounting, converted, known_clients, subsampled

ONE = {"noise": 2.0, "sampled": 0.1, "tracked": 1.0, "fields": 1, "tracked_fields": 0, "secret": True}


def accounting(**changes):
    return Accounting(**ONE | changes)


def log_binomial(n, k):
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)


def poisson_rdp(a, q, mu):
    """Mironov, Talwar and Zhang (2019) for whole orders: each client is drawn on its own."""
    k = np.arange(a + 1)
    logs = log_binomial(a, k) + (a - k) * np.log1p(-q) + k * np.log(q) + k * (k - 1) * mu**2 / 2
    return logsumexp(logs) / (a - 1)


def fixed_size_rdp(a, q, mu):
    """Wang, Balle and Kasiviswanathan (2019), Theorem 9, for a Gaussian: a weaker bound of the same thing."""
    logs = [
        0.0,
        2 * math.log(q) + log_binomial(a, 2) + min(math.log(4 * math.expm1(mu**2)), math.log(2) + mu**2),
    ]
    logs += [
        math.log(2) + j * math.log(q) + log_binomial(a, j) + j * (j - 1) * mu**2 / 2 for j in range(3, a + 1)
    ]
    return logsumexp(logs) / (a - 1)


MNIST = 256 / 60000, 1 / 1.1, 60 * 60000 // 256  # batches of 256, noise 1.1, 60 epochs


def test_the_conversion_gives_the_known_values_of_the_mnist_example():
    q, mu, T = MNIST
    bounds = {a: T * poisson_rdp(a, q, mu) for a in range(2, 64)}
    # The tutorials of TensorFlow Privacy print 3.01, by the conversion of Mironov (2017).
    assert min(rdp - math.log(1e-5) / (a - 1) for a, rdp in bounds.items()) == pytest.approx(3.01, abs=0.01)
    # RdpAccountant of dp-accounting 0.6.0, for these orders
    assert min(converted(a, rdp, 1e-5) for a, rdp in bounds.items()) == pytest.approx(2.59659, abs=1e-3)


@pytest.mark.parametrize(
    ("scale", "rounds", "epsilon"),
    [(1, 1, 4.728507067217623), (4, 10, 3.617099772983339)],  # GaussianDpEvent in dp-accounting 0.6.0
)
def test_without_sampling_a_run_is_a_composition_of_gaussians(scale, rounds, epsilon):
    for secret in (True, False):
        found = accounting(noise=2.0 * scale, sampled=1.0, secret=secret).epsilon(rounds, 1e-5)
        assert found == pytest.approx(epsilon, rel=1e-5)


@pytest.mark.parametrize("mu", [0.01, 0.5, 2.0, 8.0])
def test_the_integral_has_the_value_of_the_formula(mu):
    for a in (ORDERS[0], 2, 8, 63, ORDERS[-1]):
        assert subsampled(a, 1.0, [(1.0, mu)]) == pytest.approx(a * mu**2 / 2, rel=1e-4)
        assert known_clients(a, 1.0, [(1.0, mu)]) == pytest.approx(a * mu**2 / 2, rel=1e-9)


@pytest.mark.parametrize("q", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_a_secret_draw_of_a_fixed_size_is_between_the_bounds_of_others(q, mu):
    for a in (2, 3, 8, 32):
        found = subsampled(a, q, [(1.0, mu)])
        assert poisson_rdp(a, q, mu) <= found * (1 + 1e-6)
        assert found <= fixed_size_rdp(a, q, mu)
        assert found <= known_clients(a, q, [(1.0, mu)]) * (1 + 1e-6)
    assert subsampled(63, q, [(1.0, 3.0)]) == pytest.approx(poisson_rdp(63, q, 3.0), rel=1e-6)


def exact_rdp(a, first, second):
    """The divergence of order a of two mixtures of normal densities: pairs of a weight and a mean."""
    z = np.linspace(-60, 60, 20001)
    logs = [
        logsumexp([math.log(w) + norm.logpdf(z, m) for w, m in mixture], axis=0)
        for mixture in (first, second)
    ]
    return (logsumexp(a * logs[0] + (1 - a) * logs[1]) + math.log(z[1] - z[0])) / (a - 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_pair_of_neighbours_exceeds_the_bound(seed):
    """One round: the sum without the client, with it and with its replacement differ by at most mu."""
    random = np.random.default_rng(seed)
    q, share, mu = random.uniform(0.05, 0.95), random.uniform(0.1, 0.9), random.uniform(0.3, 2.0)
    both = math.sqrt(2) * mu  # tracked clients send two fields
    rest = [(1 - q, 0.0)] if seed % 2 else [((1 - q) / 2, 0.0), ((1 - q) / 2, 0.3 * mu)]
    ways = [(q * (1 - share), mu), (q * share, both)]
    if seed % 2:
        first, second = (rest + [(w, sign * m / 2) for w, m in ways] for sign in (1, -1))
    else:
        first, second = rest + ways, rest + [(w, random.uniform(0, 0.3) * mu) for w, _ in ways]
    for a in (1.5, 4, 12):
        bounds = [bound(a, q, [(1 - share, mu), (share, both)]) for bound in (subsampled, known_clients)]
        found = max(exact_rdp(a, first, second), exact_rdp(a, second, first))
        assert 0 < found <= min(bounds) * (1 + 1e-6)


def test_what_costs_privacy():
    """More rounds, more clients per round, less noise, more fields, more tracked clients, kept states."""
    base = accounting().epsilon(100, 1e-5)
    assert base < accounting().epsilon(101, 1e-5)
    assert base < accounting(sampled=0.2).epsilon(100, 1e-5)
    assert base < accounting(noise=1.9).epsilon(100, 1e-5)
    assert base < accounting().epsilon(100, 1e-6)
    assert base < accounting(secret=False).epsilon(100, 1e-5)
    two = [accounting(tracked_fields=1, tracked=share).epsilon(100, 1e-5) for share in (0.0, 0.3, 1.0)]
    assert base == pytest.approx(two[0])
    assert two == sorted(two)
    assert two[-1] == pytest.approx(accounting(fields=2).epsilon(100, 1e-5))
    assert two[-1] == pytest.approx(accounting(noise=2.0 / math.sqrt(2)).epsilon(100, 1e-5))


def test_the_ends():
    assert accounting().epsilon(0, 1e-5) == 0
    assert accounting(noise=0.0).epsilon(1, 1e-5) == math.inf
    assert accounting(fields=0, tracked_fields=1, tracked=0.0).epsilon(9, 1e-5) < 0.01
    assert 0 < accounting(noise=1e-3, sampled=1e-6).epsilon(10**6, 1e-12) < math.inf
    assert accounting(noise=1e-300).epsilon(1, 1e-5) == math.inf
    assert accounting(noise=1e-8).epsilon(1, 1e-5) > 1e10
    assert accounting(noise=1e300).epsilon(1, 1e-5) < 0.01
    assert Accounting.of(accounting()._asdict()) == accounting()
    for delta in (0, 1, -1, math.nan, "1e-5", None):
        with pytest.raises(InputError, match="delta=.* is not accepted"):
            accounting().epsilon(1, delta)
