"""An algorithm's rules on long vectors: in place, piece by piece, in memory that is used again.

The rules of an algorithm are a dozen passes over vectors of millions of numbers. Where each number depends
only on those at its own place, all passes are done over a short piece at a time, or compiled into one, for
a piece as well: such code is the same for all large models.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.sim.executors.machine_code import Code, compiled
from fadamgc.sim.executors.trace import liftable, lifted, pointwise, record

PIECE = 1 << 15  # numbers of a vector that go through a step's rules at once, so that they stay in the cache
WIDE = 1 << 17  # and through the rules of a round, which are few: threads wait for Python at every piece


class Rules:
    """What a client does beside its gradients.

    Args:
        algorithm: whose rules.
        compile: whether a step becomes machine code, if that can be had.
        vectors: where memory comes from.
    """

    def __init__(self, algorithm: AnyAlgorithm, compile: bool, vectors: Vectors) -> None:
        self.algorithm, self.compile, self.vectors = algorithm, compile, vectors
        self.names = liftable(algorithm) if compile else ()
        self.hyper = [torch.tensor(float(getattr(algorithm, n)), dtype=torch.float64) for n in self.names]
        self._code: Code | None = None  # of a step
        self._step: Callable[..., Any] | None = None  # the same, not compiled
        self._pieces = False
        self.failed = False  # to become machine code
        self.lock = threading.Lock()
        self._by_pieces: dict[Any, bool] = {}

    def begin(self, down: Any, client: Any, g_x: Tensor | None, x: Tensor) -> Any:
        """What the client's steps start from, in memory that nothing else uses."""
        made: Any = None

        def begin(*tensors: Tensor) -> list[Tensor]:
            nonlocal made
            rest = iter(tensors)
            made = self.algorithm.begin(
                type(down)(*(next(rest) for _ in down)),
                type(client)(*(next(rest) for _ in client)),
                None if g_x is None else next(rest),
            )
            return list(made)

        tensors = [*down, *client, *(() if g_x is None else (g_x,))]
        new = self._map("begin", begin, tensors, x, shared=())
        return type(made)(*new)

    def step(self, down: Any, client: Any, x: Tensor, local: Any, g: Tensor) -> None:
        """``x`` and ``local`` after one step with gradient ``g``."""
        tensors = [*self.hyper, *down, *client, x, *local, g]
        with self.lock:
            if self._step is None:
                self._make(Shape(len(self.hyper), down, client, local), tensors, x)
        assert self._step is not None
        if not self._pieces:
            (self._code or self._step)(*tensors)
            return
        if self._code is None:
            for first in range(0, len(x), PIECE):
                self._step(*_piece(tensors, x, first, PIECE))
            return
        fixed = [t for t in tensors if t.shape != x.shape]
        long = [t for t in tensors if t.shape == x.shape]
        whole = len(x) // PIECE * PIECE
        self._code.repeat(fixed, [t[:whole].view(-1, PIECE) for t in long], parts=whole // PIECE)
        if whole < len(x):
            rows = [torch.zeros(1, PIECE, dtype=t.dtype) for t in long]
            for row, t in zip(rows, long, strict=True):
                row[0, : len(x) - whole] = t[whole:]
            self._code(*fixed, *rows)
            for row, t in zip(rows, long, strict=True):
                if any(t is changed for changed in (x, *local)):  # the others may be for reading only
                    t[whole:] = row[0, : len(x) - whole]

    def finish(self, down: Any, client: Any, local: Any, x: Tensor, K: int, tracked: bool) -> tuple[Any, Any]:
        """What the client keeps and what it sends; ``x`` may be used again."""
        shape = Shape(0, down, client, local)
        made: Any = None

        def finish(*tensors: Tensor) -> list[Tensor]:
            nonlocal made
            _, down, client, x, local, _ = shape.fill(tensors)
            made = self.algorithm.finish(down, client, local, x, K, tracked)
            return [*made[0], *made[1]]

        tensors = [*down, *client, x, *local, x]
        new = self._map(("finish", tracked), finish, tensors, x, shared=(*down, *client, *local))
        state, up = made
        return type(state)(*new[: len(state)]), type(up)(*new[len(state) :])

    def _map(
        self,
        kind: Any,
        function: Callable[..., list[Tensor]],
        tensors: list[Tensor],
        x: Tensor,
        shared: Sequence[Tensor],
    ) -> list[Tensor]:
        """The function's tensors, in memory of their own but for those that are a ``shared`` one as it is."""
        with self.lock:
            if kind not in self._by_pieces:
                few = [t[:8] if t.shape == x.shape else t for t in tensors]
                self._by_pieces[kind] = len(x) > WIDE and pointwise(record(function, few))
        at = {t.data_ptr(): t for t in shared if t.shape == x.shape}
        if not self._by_pieces[kind]:
            given = {t.untyped_storage().data_ptr() for t in tensors}
            new = function(*tensors)
            return [
                at.get(t.data_ptr(), t.clone() if not at or t.untyped_storage().data_ptr() in given else t)
                for t in new
            ]
        results: list[Tensor] = []
        for first in range(0, len(x), WIDE):
            pieces = function(*_piece(tensors, x, first, WIDE))
            if not results:
                results = [self._place(t, x, at) for t in pieces]
            for result, piece in zip(results, pieces, strict=True):
                if result.ndim and result.data_ptr() not in at:
                    result[first : first + WIDE].copy_(piece)
        return results

    def _place(self, piece: Tensor, x: Tensor, at: dict[int, Tensor]) -> Tensor:
        """Where a result goes whose first piece this is."""
        if piece.ndim == 0:
            return piece.clone()
        same = at.get(piece.data_ptr())
        return self.vectors.like(x, piece.dtype) if same is None else same

    def _make(self, shape: Shape, tensors: list[Tensor], x: Tensor) -> None:
        def pure(*tensors: Tensor) -> list[Tensor]:
            hyper, down, client, x, local, g = shape.fill(tensors)
            algo = self.algorithm
            if self.names:
                algo = lifted(algo, dict(zip(self.names, hyper, strict=True)))
            x, new = algo.step(down, client, local, x, g)
            return [x, *new]

        def in_place(*tensors: Tensor) -> list[Tensor]:
            _, _, _, x, local, _ = shape.fill(tensors)
            for old, new in zip((x, *local), pure(*tensors), strict=True):
                old.copy_(new)
            return []

        few = [t[:8] if t.shape == x.shape else t for t in tensors]
        each = all(t.shape == x.shape for t in shape.fill(tensors)[4])  # else a piece would change it for all
        self._pieces = len(x) > PIECE and each and pointwise(record(pure, few))
        if self.compile:
            places = list(range(len(tensors)))
            if self._pieces:
                places.sort(key=lambda i: tensors[i].shape == x.shape)  # vectors last, as in a step
                tensors = [tensors[i] for i in places]
                tensors = [t[:PIECE].view(1, PIECE) if t.shape == x.shape else t for t in tensors]

            def in_order(*given: Tensor) -> list[Tensor]:
                return in_place(*(given[places.index(i)] for i in range(len(given))))

            code = compiled(record(in_order, tensors), tensors)
            self._code, self.failed = (code, False) if code.machine else (None, True)
        self._step = in_place


def _piece(tensors: Sequence[Tensor], x: Tensor, first: int, size: int) -> list[Tensor]:
    return [t[first : first + size] if t.shape == x.shape else t for t in tensors]


class Shape(NamedTuple):
    """How the arguments of a step lie in a list of tensors."""

    hyper: int
    down: Any
    client: Any
    local: Any

    def fill(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of a step."""
        rest = iter(tensors)
        hyper = [next(rest) for _ in range(self.hyper)]
        down = type(self.down)(*(next(rest) for _ in self.down))
        client = type(self.client)(*(next(rest) for _ in self.client))
        x = next(rest)
        local = type(self.local)(*(next(rest) for _ in self.local))
        return hyper, down, client, x, local, next(rest)


class Vectors:
    """Long vectors whose memory is used again as soon as nothing refers to it.

    To get tens of megabytes from the system and to give them back, for every vector of every client, can
    take as long as the calculation itself.
    """

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._lock = threading.Lock()

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A vector as long as x, with anything in it."""
        dtype = dtype or x.dtype
        with self._lock:
            for vector in self._all:
                if vector.shape == x.shape and vector.dtype == dtype and _references(vector) <= IDLE:
                    return vector.detach()
            if not IDLE:
                return torch.empty_like(x, dtype=dtype)
            self._all.append(_plain(len(x), dtype))
            return self._all[-1].detach()


def _plain(d: int, dtype: torch.dtype) -> Tensor:
    """A vector in pages of the usual size: those that stay are cheaper to get than huge ones."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(-1, d * dtype.itemsize, flags=flags), dtype=dtype)


def _references(vector: Tensor) -> int:
    """How many tensors share the vector's memory, counting itself."""
    count: int = torch._C._storage_Use_Count(vector.untyped_storage()._cdata)
    return count


def _idle() -> int:
    try:
        vector = torch.empty(1)
        alone = _references(vector)
        view = vector.detach()
        shared = _references(vector)
        del view
        return alone if shared > alone == _references(vector) else 0
    except (AttributeError, TypeError):  # another version of torch
        return 0


IDLE = _idle()  # references to a vector that nobody uses; 0 if that cannot be known
