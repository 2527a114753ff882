"""An algorithm's rules on long vectors: in place, piece by piece, in memory that is used again.

The rules of an algorithm are a dozen passes over vectors of millions of numbers. Where each number depends
only on those at its own place, all passes are done over a short piece at a time, or compiled into one, for
a piece as well: such code is the same for all large models.
"""

from __future__ import annotations

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
    """

    def __init__(self, algorithm: AnyAlgorithm, compile: bool) -> None:
        self.algorithm, self.compile = algorithm, compile
        self.names = liftable(algorithm) if compile else ()
        self.hyper = [torch.tensor(float(getattr(algorithm, n)), dtype=torch.float64) for n in self.names]
        self._code: Code | None = None  # of a step
        self._step: Callable[..., Any] | None = None  # the same, not compiled
        self._pieces = False
        self.failed = False  # to become machine code
        self.lock = threading.Lock()
        self._by_pieces: dict[Any, bool] = {}

    def begin(self, down: Any, client: Any, g_x: Tensor | None, x: Tensor, workspace: Workspace) -> Any:
        """Return what the client's steps start from, in memory that nothing else uses until ``finish``."""
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
        new = self._map("begin", begin, tensors, x, (), workspace.vector)
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

    def finish(
        self, down: Any, client: Any, local: Any, x: Tensor, K: int, tracked: bool, workspace: Workspace
    ) -> tuple[Any, Any]:
        """Return what the client keeps and what it sends; ``x`` and the workspace may be used again."""
        shape = Shape(0, down, client, local)
        made: Any = None

        def finish(*tensors: Tensor) -> list[Tensor]:
            nonlocal made
            _, down, client, x, local, _ = shape.fill(tensors)
            made = self.algorithm.finish(down, client, local, x, K, tracked)
            return [*made[0], *made[1]]

        tensors = [*down, *client, x, *local, x]
        shared = (*down, *client, *local)
        new = self._map(("finish", tracked), finish, tensors, x, shared, torch.empty_like)
        workspace.take_back(except_for=new)
        state, up = made
        return type(state)(*new[: len(state)]), type(up)(*new[len(state) :])

    def _map(
        self,
        kind: Any,
        function: Callable[..., list[Tensor]],
        tensors: list[Tensor],
        x: Tensor,
        shared: Sequence[Tensor],
        vector: Callable[..., Tensor],
    ) -> list[Tensor]:
        """Return the function's results: a ``shared`` tensor where a result is that tensor, else new memory.

        ``vector(x, dtype=...)`` provides the memory of a long vector.
        """
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
                for t in pieces:
                    same = t.clone() if t.ndim == 0 else at.get(t.data_ptr())
                    results.append(vector(x, dtype=t.dtype) if same is None else same)
            for result, piece in zip(results, pieces, strict=True):
                if result.ndim and result.data_ptr() not in at:
                    result[first : first + WIDE].copy_(piece)
        return results

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


class Workspace:
    """Memory of one thread for the long vectors of a client's steps, used again for its next client.

    To get tens of megabytes from the system and to give them back, for every vector of every client, can
    take as long as the calculation itself.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    def vector(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Lend a vector as long as x, with anything in it."""
        for i, vector in enumerate(self._free):
            if vector.shape == x.shape and vector.dtype == dtype:
                self._lent.append(self._free.pop(i))
                break
        else:
            self._lent.append(torch.empty_like(x, dtype=dtype))
        return self._lent[-1]

    def take_back(self, except_for: Sequence[Tensor]) -> None:
        """Use all vectors again, except for results that are one of them: these belong to the receiver."""
        results = {t.data_ptr() for t in except_for}
        self._free += [t for t in self._lent if t.data_ptr() not in results]
        self._lent = []
