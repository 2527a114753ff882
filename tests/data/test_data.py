"""Partitions, their plot, and the data sources that need no download."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from fadamgc.data import Partition, digits, dirichlet, iid, natural, partition, shards, synthetic
from fadamgc.errors import InputError
from fadamgc.experiments.report import label_plot

BALANCED = np.repeat(np.arange(10), 100)


def assert_each_sample_once(split: Partition, count: int) -> None:
    assert sorted(np.concatenate(split.indices).tolist()) == list(range(count))
    for samples in split.indices:
        assert samples.dtype == np.int64
        assert (np.diff(samples) > 0).all()


def same(a: Partition, b: Partition) -> bool:
    return len(a.indices) == len(b.indices) and all(map(np.array_equal, a.indices, b.indices))


@st.composite
def dirichlet_arguments(draw: st.DrawFn) -> tuple[list[int], int, float, int, int, int]:
    clients = draw(st.integers(1, 12))
    min_size = draw(st.integers(1, 4))
    labels = draw(st.lists(st.integers(-3, 6), min_size=clients * min_size, max_size=120))
    alpha = 10.0 ** draw(st.floats(-8, 6))
    return labels, clients, alpha, min_size, draw(st.integers(1, 5)), draw(st.integers(0, 2**70))


@settings(deadline=None)
@given(dirichlet_arguments())
def test_dirichlet_assigns_each_sample_once_and_gives_every_client_min_size(
    arguments: tuple[list[int], int, float, int, int, int],
) -> None:
    labels, clients, alpha, min_size, retries, seed = arguments
    with mock.patch.object(partition, "_draw", wraps=partition._draw) as draws:
        split = dirichlet(labels, clients, alpha, seed, min_size=min_size, retries=retries)
    assert len(split.indices) == clients
    assert_each_sample_once(split, len(labels))
    assert split.sizes().min() >= min_size
    assert 1 <= draws.call_count <= retries
    if "moved" in split.note:
        assert draws.call_count == retries
    else:
        assert f"draw {draws.call_count} of at most {retries}" in split.note
    assert same(split, dirichlet(labels, clients, alpha, seed, min_size=min_size, retries=retries))


def test_dirichlet_repairs_the_draw_that_lacks_the_fewest_samples() -> None:
    def table(*sizes: int) -> np.ndarray:
        return np.array(sizes).reshape(-1, 1)

    draws = [table(8, 0, 0, 0), table(3, 4, 1, 0), table(4, 3, 0, 1)]
    with mock.patch.object(partition, "_draw", side_effect=draws):
        split = dirichlet([0] * 8, 4, 0.1, seed=0, retries=3)
    assert split.sizes().tolist() == [3, 3, 1, 1]
    assert split.note == (
        "Dirichlet(0.1) over 4 clients; draw 2 of at most 3; 1 sample moved so that no client is empty"
    )


def test_dirichlet_uses_the_first_draw_without_small_clients() -> None:
    tables = [np.array([[4], [0]]), np.array([[3], [1]])]
    with mock.patch.object(partition, "_draw", side_effect=tables):
        split = dirichlet([0] * 4, 2, 0.1, seed=0)
    assert split.sizes().tolist() == [3, 1]
    assert split.note == "Dirichlet(0.1) over 2 clients; draw 2 of at most 20"


def test_dirichlet_says_how_many_samples_it_moved() -> None:
    split = dirichlet(BALANCED, 20, 1e-6, seed=0, min_size=5, retries=1)
    before = partition._draw(partition.generator(0, partition.STREAM), np.full(10, 100), 20, 1e-6).sum(axis=1)
    lacking = np.maximum(5 - before, 0).sum()
    assert split.note.endswith(f"; {lacking} samples moved so that every client has at least 5")
    assert split.sizes().min() == 5


def test_a_smaller_alpha_gives_more_label_skew() -> None:
    def largest_share(alpha: float) -> float:
        counts = dirichlet(BALANCED, 10, alpha, seed=0).counts(BALANCED)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert largest_share(0.05) > 0.7 > 0.4 > largest_share(1) > 0.15 > largest_share(1000)


def test_clients_do_not_get_consecutive_samples() -> None:
    first, second = dirichlet([0] * 100, 2, 1e6, seed=0).indices
    assert first.min() < second.max()
    assert second.min() < first.max()


def test_no_sample_is_lost_if_shares_do_not_sum_to_1() -> None:
    rng = mock.Mock(spec=np.random.Generator)
    rng.permutation.side_effect = np.arange
    for shares in ([0.5, 0.4999999], [0.5, 0.5000001, 0.0]):
        rng.dirichlet.return_value = np.array(shares)
        counts = partition._draw(rng, np.array([10**8]), len(shares), 1.0)
        assert counts.sum() == 10**8
        assert counts.min() >= 0


def test_rounding_favours_no_client() -> None:
    labels = np.repeat(np.arange(400), 5)
    sizes = dirichlet(labels, 20, 1e6, seed=0).sizes()
    assert sizes.min() > 70
    assert sizes.max() < 130


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6])
def test_tiny_alpha_gives_each_class_to_one_client(alpha: float) -> None:
    split = dirichlet(BALANCED, 3, alpha, seed=0)
    assert_each_sample_once(split, len(BALANCED))
    assert (split.counts(BALANCED) > 0).sum() <= 10 + 2


def test_huge_alpha_shares_equally() -> None:
    assert dirichlet(BALANCED, 4, 1e308, seed=0).sizes().tolist() == [250] * 4


@pytest.mark.parametrize("broken", [0.0, float("nan")])
def test_draws_that_underflow_are_replaced_by_the_limit_of_the_distribution(broken: float) -> None:
    rng = mock.Mock(spec=np.random.Generator)
    rng.dirichlet.return_value = np.full(5, broken)
    rng.integers.return_value = 3
    assert partition._shares(rng, 5, 1e-6).tolist() == [0, 0, 0, 1, 0]
    assert partition._shares(rng, 5, 1e300).tolist() == [0.2] * 5


PARTITIONS = {
    "dirichlet": lambda labels, seed: dirichlet(labels, 10, 0.5, seed),
    "iid": lambda labels, seed: iid(labels, 10, seed),
    "shards": lambda labels, seed: shards(labels, 10, seed),
}


@pytest.mark.parametrize("split", PARTITIONS.values(), ids=PARTITIONS.keys())
def test_a_partition_depends_on_the_seed_only(split: Callable[..., Partition]) -> None:
    first = split(BALANCED, 7)
    assert_each_sample_once(first, len(BALANCED))
    assert same(first, split(BALANCED, 7))
    assert first.note == split(BALANCED, 7).note
    assert not same(first, split(BALANCED, 8))
    for other in (BALANCED.tolist(), torch.from_numpy(BALANCED), BALANCED.astype(np.uint8)):
        assert same(first, split(other, 7))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 2**32))
def test_iid_sizes_differ_by_at_most_one(count: int, clients: int, seed: int) -> None:
    count, clients = max(count, clients), min(count, clients)
    split = iid(count, clients, seed)
    assert len(split.indices) == clients
    assert_each_sample_once(split, count)
    assert np.ptp(split.sizes()) <= 1


def test_iid_mixes_the_labels() -> None:
    counts = iid(BALANCED, 5, seed=0).counts(BALANCED)
    assert counts.min() >= 8
    assert counts.max() <= 32


def test_iid_takes_a_numpy_count() -> None:
    assert same(iid(np.int64(20), 3, seed=0), iid([1] * 20, 3, seed=0))


@pytest.mark.parametrize(("shards_per_client", "most"), [(1, 1), (2, 2), (3, 6)])
def test_a_shard_has_few_labels(shards_per_client: int, most: int) -> None:
    labels = np.random.default_rng(0).permutation(BALANCED)
    counts = shards(labels, 10, 0, shards_per_client).counts(labels)
    assert (counts > 0).sum(axis=1).max() <= most


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.data())
def test_shards_are_of_equal_size(labels: list[int], data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    each = data.draw(st.integers(1, len(labels) // clients))
    split = shards(labels, clients, 0, each)
    assert len(split.indices) == clients
    assert_each_sample_once(split, len(labels))
    assert split.sizes().min() >= each * (len(labels) // (clients * each))


def test_natural_is_one_client_per_value_in_sorted_order() -> None:
    split = natural(["cy", "ann", "bob", "ann"])
    assert [rows.tolist() for rows in split.indices] == [[1, 3], [2], [0]]
    assert "3 clients" in split.note
    assert same(natural(torch.tensor([30, 2, 2, 7])), natural(np.array(["c", "a", "a", "b"], dtype=object)))


def test_counts_have_a_column_per_distinct_label() -> None:
    split = Partition((np.array([0, 3]), np.array([1, 2])), "")
    assert split.counts([7, -1, 7, 7]).tolist() == [[0, 2], [1, 1]]
    assert split.sizes().tolist() == [2, 2]


LABELS = [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dirichlet(LABELS, 3, 0.1, 0, min_size=2), r"5 samples; clients=3 with min_size=2 .* 6"),
        (lambda: dirichlet(LABELS, 2, 0.0, 0), r"alpha=0\.0 is not accepted; .* > 0"),
        (lambda: dirichlet(LABELS, 2, -1, 0), "alpha=-1 is not"),
        (lambda: dirichlet(LABELS, 2, float("nan"), 0), "alpha=nan is not"),
        (lambda: dirichlet(LABELS, 2, float("inf"), 0), "alpha=inf is not"),
        (lambda: dirichlet(LABELS, 2, "0.1", 0), "alpha='0.1' is not"),  # type: ignore[arg-type]
        (lambda: dirichlet(LABELS, 0, 0.1, 0), r"clients=0 is not accepted; .* >= 1"),
        (lambda: dirichlet(LABELS, 2.0, 0.1, 0), r"clients=2\.0 is not accepted; .* whole"),  # type: ignore[arg-type]
        (lambda: dirichlet(LABELS, True, 0.1, 0), "clients=True is not"),
        (lambda: dirichlet(LABELS, 2, 0.1, 0, min_size=0), r"min_size=0 is .* >= 1"),
        (lambda: dirichlet(LABELS, 2, 0.1, 0, retries=0), r"retries=0 is .* >= 1"),
        (lambda: dirichlet(LABELS, 2, 0.1, -1), r"seed=-1 is .* >= 0"),
        (lambda: dirichlet([LABELS], 2, 0.1, 0), r"labels has shape \(1, 5\)"),
        (lambda: dirichlet([[0], [1, 2]], 2, 0.1, 0), "labels is not an array"),
        (lambda: dirichlet([], 2, 0.1, 0), r"labels has shape \(0,\)"),
        (lambda: dirichlet([0.5, 1.0], 2, 0.1, 0), "labels has dtype float64"),
        (lambda: dirichlet(torch.tensor([True, False]), 2, 0.1, 0), "labels has dtype bool"),
        (lambda: iid(3, 4, 0), "count gives 3 samples; clients=4"),
        (lambda: iid([0, 1], 4, 0), "labels gives 2 samples; clients=4"),
        (lambda: iid(3, 0, 0), "clients=0"),
        (lambda: iid(3, 1, -5), "seed=-5"),
        (lambda: shards(LABELS, 3, 0), r"5 samples; clients=3 with shards_per_client=2 .* 6"),
        (lambda: shards(LABELS, 1, 0, 0), "shards_per_client=0"),
        (lambda: shards(LABELS, -1, 0), "clients=-1"),
        (lambda: natural([]), r"groups has shape \(0,\)"),
        (lambda: natural([0.5, 1.5]), "groups has dtype float64"),
        (lambda: natural(np.array(["a", None], dtype=object)), "groups cannot be sorted"),
        (lambda: iid(4, 2, 0).counts(LABELS), "labels has 5 samples; .* 4"),
        (lambda: digits.load(validation=-0.1), r"validation=-0\.1"),
        (lambda: digits.load(validation=0.001), r"validation=0\.001 is .* 0\.01"),
        (lambda: digits.load(validation=1.0), r"validation=1\.0 is .* 0\.99"),
        (lambda: synthetic.quadratics(clients=0), "clients=0"),
        (lambda: synthetic.quadratics(dim=0), "dim=0"),
        (lambda: synthetic.quadratics(condition=0.5), r"condition=0\.5 is .* >= 1"),
        (lambda: synthetic.quadratics(spread=-1.0), r"spread=-1\.0"),
        (lambda: synthetic.linear_regression(samples=0), "samples=0"),
        (lambda: synthetic.linear_regression(samples=(5, 2)), r"samples=\(5, 2\) is .* low <= high"),
        (lambda: synthetic.linear_regression(samples=(1, 2, 3)), r"samples=\(1, 2, 3\)"),  # type: ignore[arg-type]
        (lambda: synthetic.linear_regression(clients=2, dim=9, samples=4), "samples=4 .* dim=9"),
        (lambda: synthetic.linear_regression(noise=float("nan")), "noise=nan"),
        (lambda: synthetic.linear_regression(heterogeneity=-1.0), r"heterogeneity=-1\.0"),
        (lambda: label_plot.label_figure([1, 2]), r"counts has shape \(2,\)"),
        (lambda: label_plot.label_figure([[1, -2]]), "counts has .* minimum -2"),
        (lambda: label_plot.label_figure([[1.5, 2.0]]), "counts has dtype float64"),
        (lambda: label_plot.save_label_plot([[1, 2]], "labels.txt"), r"path='labels\.txt' ends in '\.txt'"),
    ],
)
def test_errors_name_the_field_and_the_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def rows(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.tolist()}


def test_the_split_of_the_digits_never_changes() -> None:
    data = digits.load()
    assert data.train_x.shape == (1437, 64)
    assert data.test_x.shape == (360, 64)
    assert data.train_x.dtype == data.test_x.dtype == torch.float32
    assert data.train_y.dtype == data.test_y.dtype == torch.int64
    assert data.train_x.min() == 0
    assert data.train_x.max() == 1
    assert len(rows(data.train_x)) + len(rows(data.test_x)) == 1797
    assert rows(data.train_x).isdisjoint(rows(data.test_x))
    share = data.test_y.bincount() / (data.train_y.bincount() + data.test_y.bincount())
    assert torch.allclose(share, torch.tensor(0.2), atol=0.01)
    # The very samples: results are comparable only on this test set.
    assert data.test_y[:8].tolist() == [7, 6, 3, 7, 7, 3, 2, 8]
    assert (data.test_x * 16).sum() == 112350


@pytest.mark.parametrize("share", [0.01, 0.25, 0.99])
def test_validation_data_are_from_the_train_part(share: float) -> None:
    whole, tuning = digits.load(), digits.load(validation=share)
    assert rows(tuning.train_x) | rows(tuning.test_x) == rows(whole.train_x)
    assert len(tuning.train_y) + len(tuning.test_y) == len(whole.train_y)
    assert len(tuning.test_y) == pytest.approx(1437 * share, abs=1)
    assert rows(tuning.test_x).isdisjoint(rows(whole.test_x))
    assert (tuning.test_y.bincount(minlength=10) >= 1).all()


def mean_objective(problem: synthetic.Synthetic, w: torch.Tensor) -> torch.Tensor:
    return torch.stack([0.5 * ((X @ w[:, None] - Y) ** 2).mean() for X, Y in problem.clients]).mean()


PROBLEMS = {
    "quadratics": synthetic.quadratics(),
    "quadratics, stiff": synthetic.quadratics(clients=3, dim=7, seed=5, condition=1e3, spread=2.0),
    "quadratics, equal": synthetic.quadratics(condition=1.0, spread=0.0),
    "regression": synthetic.linear_regression(),
    "regression, unequal": synthetic.linear_regression(clients=7, dim=4, samples=(1, 30), seed=3),
    "regression, one client": synthetic.linear_regression(clients=1, dim=5, samples=9, noise=1.0),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_the_gradient_is_zero_at_the_optimum_only(problem: synthetic.Synthetic) -> None:
    w = problem.optimum.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mean_objective(problem, w), w)
    assert problem.optimum.dtype == torch.float64
    assert problem.optimum.shape == (problem.dim,)
    assert gradient.abs().max() < 1e-12
    assert mean_objective(problem, problem.optimum + 1e-3) > mean_objective(problem, problem.optimum)


def test_quadratics_equal_the_closed_form() -> None:
    problem = synthetic.quadratics(clients=4, dim=6, seed=1, condition=50.0)
    w = torch.linspace(-1, 1, 6, dtype=torch.float64)
    for X, Y in problem.clients:
        assert X.shape == (6, 6)
        assert Y.shape == (6, 1)
        a, c = X.diagonal() ** 2 / 6, Y[:, 0] / X.diagonal()
        assert torch.equal(X, X.diagonal().diag())
        assert ((a >= 1) & (a <= 50)).all()
        assert 0.5 * ((X @ w[:, None] - Y) ** 2).mean() == pytest.approx(
            0.5 * (a * (w - c) ** 2).sum().item()
        )


def test_problems_depend_on_the_seed() -> None:
    for make in (synthetic.quadratics, synthetic.linear_regression):
        assert torch.equal(make(seed=1).optimum, make(seed=1).optimum)
        assert not torch.equal(make(seed=1).optimum, make(seed=2).optimum)


def test_heterogeneity_is_the_spread_of_the_ground_truths() -> None:
    def disagreement(heterogeneity: float) -> float:
        problem = synthetic.linear_regression(samples=50, heterogeneity=heterogeneity, noise=0.0)
        solutions = [torch.linalg.lstsq(X, Y).solution[:, 0] for X, Y in problem.clients]
        return torch.stack(solutions).std(dim=0).mean().item()

    assert disagreement(0.0) < 1e-12
    assert disagreement(2.0) == pytest.approx(2 * disagreement(1.0))
    assert 0.5 < disagreement(1.0) < 1.5


def test_regression_sizes_stay_in_the_range() -> None:
    sizes = {len(X) for X, _ in synthetic.linear_regression(clients=60, samples=(3, 6)).clients}
    assert sizes == {3, 4, 5, 6}


@pytest.mark.parametrize(
    ("clients", "classes"), [(1, 1), (10, 10), (50, 10), (60, 20), (8, 21), (30, 200), (61, 10), (300, 200)]
)
def test_the_plot_is_a_legible_png(tmp_path: Path, clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).poisson(2.0, (clients, classes))
    counts[0] = 0  # an empty client has no shares
    path = label_plot.save_label_plot(counts, tmp_path / "new" / "labels.png", title="a note " * 40)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    height, width, _ = imread(path).shape
    assert 600 <= height <= 1000
    assert 800 <= width <= 3000
    assert os.listdir(path.parent) == ["labels.png"]


def test_the_bars_are_the_sizes_and_the_shares() -> None:
    figure = label_plot.label_figure([[3, 1], [0, 5]], title="$^$")
    top, bottom = figure.axes
    assert [bar.get_bbox().height for bar in top.patches if isinstance(bar, Rectangle)] == [4, 5]
    assert [text.get_text() for text in top.texts] == ["4", "5"]
    (bars,) = bottom.collections
    boxes = [np.asarray(path.get_extents().extents).tolist() for path in bars.get_paths()]
    assert boxes == [[-0.4, 0, 0.4, 0.75], [-0.4, 0.75, 0.4, 1], [0.6, 0, 1.4, 1]]
    blue, orange, last = np.asarray(bars.get_facecolor())
    assert np.array_equal(orange, last)
    assert [patch.get_facecolor() for patch in figure.legends[0].get_patches()] == [
        tuple(orange),
        tuple(blue),
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1", "0"]
    figure.draw_without_rendering()


def test_the_heatmap_has_the_largest_client_first() -> None:
    counts = np.ones((70, 2), dtype=int)
    counts[41] = [9, 0]
    _, bottom, _ = label_plot.label_figure(counts).axes
    shares = bottom.images[0].get_array()
    assert shares is not None
    assert shares.shape == (2, 70)
    assert shares[:, 0].tolist() == [1, 0]
    assert shares[:, 1].tolist() == [0.5, 0.5]
    assert [label.get_text() for label in bottom.get_yticklabels()] == ["0", "1"]


@pytest.mark.parametrize("classes", [20, 21])
def test_many_classes_have_a_colour_bar_instead_of_a_legend(classes: int) -> None:
    figure = label_plot.label_figure(np.ones((5, classes), dtype=int))
    assert len(figure.legends) == (classes == 20)
    assert len(figure.axes) == 2 + (classes == 21)


def test_a_plot_that_fails_does_not_replace_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.png"
    path.write_bytes(b"old")

    def full_disk(self: Figure, target: BinaryIO, **options: object) -> None:
        target.write(b"half")
        raise OSError("disk full")

    with mock.patch.object(Figure, "savefig", full_disk), pytest.raises(OSError, match="disk full"):
        label_plot.save_label_plot([[1, 2]], path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["labels.png"]


@pytest.mark.slow
def test_drawing_does_not_change_the_settings_of_matplotlib(tmp_path: Path) -> None:
    program = """
import sys, matplotlib
before = matplotlib.rcParams.copy()
from fadamgc.experiments.report.label_plot import save_label_plot
save_label_plot([[1, 2], [3, 0]], sys.argv[1])
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "labels.png"], check=True)
