"""The plot of a partition: the number of samples of every client, and the shares of their labels.

Drawn without pyplot, so that no backend is chosen and no global state is touched.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fadamgc.errors import InputError
from fadamgc.experiments.report.plots import side_legend
from fadamgc.files import write_atomic

MOST_BARS = 60  # clients; above, a heatmap
MOST_IN_LEGEND = 20  # classes; above, a colour bar
SHARES = "share of the client's samples"


def label_figure(counts: npt.ArrayLike, title: str | None = None) -> Figure:
    """Draw client sizes above and label shares below: stacked bars, or a heatmap for more than 60 clients.

    ``counts`` has the samples per client and class, (clients, classes).
    """
    table = np.asarray(counts)
    if table.ndim != 2 or not table.size:
        raise InputError(f"counts has shape {table.shape}; accepted is (clients, classes), not empty")
    if table.dtype.kind not in "iu" or table.min() < 0:
        received = f"dtype {table.dtype} and minimum {table.min()}"
        raise InputError(f"counts has {received}; accepted are integers >= 0")
    clients, classes = table.shape
    panels = max(4.5, 0.2 * clients) if clients <= MOST_BARS else 9
    width = panels + 2 + 0.08 * len(str(classes - 1))  # inches, with room for the numbers of the classes
    figure = Figure(figsize=(width, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2.5])
    top.set_ylabel("samples")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(textwrap.fill(title, int(width * 11)), fontsize=11, parse_math=False)
    draw = _draw_bars if clients <= MOST_BARS else _draw_heatmap
    draw(figure, top, bottom, table.astype(np.int64))
    return figure


def save_label_plot(counts: npt.ArrayLike, path: str | Path, title: str | None = None) -> Path:
    """Write `label_figure` to a file atomically; the suffix (.png, .pdf, .svg) sets the format."""
    path = Path(path)
    figure = label_figure(counts, title)
    formats = figure.canvas.get_supported_filetypes()
    ending = path.suffix[1:].lower()
    if ending not in formats:
        raise InputError(f"path={str(path)!r} ends in {path.suffix!r}; accepted are {', '.join(formats)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: figure.savefig(file, format=ending, dpi=150))
    return path


def _draw_bars(figure: Figure, top: Axes, bottom: Axes, table: npt.NDArray[np.int64]) -> None:
    clients, classes = table.shape
    x, sizes = np.arange(clients), table.sum(axis=1)
    crowded = clients * len(str(sizes.max())) > 40
    bars = top.bar(x, sizes, width=0.8, color="0.55")
    top.bar_label(bars, padding=2, fontsize=7 if crowded else 8, rotation=90 if crowded else 0)
    top.margins(y=0.45 if crowded else 0.2)

    if classes > MOST_IN_LEGEND:
        colours = np.asarray(colormaps["turbo"](np.linspace(0, 1, classes)))
    else:
        colours = np.asarray(colormaps["tab10" if classes <= 10 else "tab20"](np.arange(classes)))
    # One collection: a patch for each of 60 x 200 bars would take many seconds.
    shares = _shares(table)
    client, c = table.nonzero()
    high = shares.cumsum(axis=1)[client, c]
    low = high - shares[client, c]
    left, right = client - 0.4, client + 0.4
    corners = np.array([[left, low], [right, low], [right, high], [left, high]]).transpose(2, 0, 1)
    bottom.add_collection(PolyCollection(list(corners), facecolors=colours[c], edgecolors="none"))
    bottom.set(xlabel="client", ylabel=SHARES, ylim=(0, 1), xlim=(-0.6, clients - 0.4))
    bottom.set_xticks(x[:: 1 if clients <= 25 else 5])

    if classes <= MOST_IN_LEGEND:
        patches = [Patch(color=colour) for colour in colours[::-1]]
        side_legend(figure, patches, [str(c) for c in reversed(range(classes))], "class")
    else:
        scale = ScalarMappable(BoundaryNorm(np.arange(classes + 1) - 0.5, classes), ListedColormap(colours))
        bar = figure.colorbar(scale, ax=[top, bottom], label="class", spacing="proportional")
        bar.set_ticks(_ticks(classes))
        bar.minorticks_off()


def _draw_heatmap(figure: Figure, top: Axes, bottom: Axes, table: npt.NDArray[np.int64]) -> None:
    clients, classes = table.shape
    # Largest clients first; clients of the same size by their most frequent label.
    table = table[np.lexsort((table.argmax(axis=1), -table.sum(axis=1)))]
    sizes = table.sum(axis=1)
    top.stairs(sizes, np.arange(clients + 1) - 0.5, fill=True, color="0.55")
    top.set_ylim(0, None)
    spread = f"largest {sizes[0]}, median {np.median(sizes):g}, smallest {sizes[-1]}"
    top.text(0.99, 0.92, spread, transform=top.transAxes, ha="right", va="top", fontsize=9)

    # The square root brings out small shares; the scale is the same in every plot.
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    heatmap = bottom.imshow(_shares(table).T, aspect="auto", origin="lower", cmap="Blues", norm=norm)
    bottom.set(xlabel=f"rank of the client by size ({clients} clients, largest first)", ylabel="class")
    bottom.set_yticks(range(classes) if classes <= MOST_IN_LEGEND else _ticks(classes))
    figure.colorbar(heatmap, ax=bottom, label=SHARES)


def _shares(table: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Divide rows by their sums; the rows of empty clients stay zero."""
    sizes: npt.NDArray[np.int64] = table.sum(axis=1, keepdims=True)
    return table / np.maximum(sizes, 1)


def _ticks(classes: int) -> list[int]:
    """Return about ten class numbers at equal distances."""
    return list(range(0, classes, -(-classes // 10)))
