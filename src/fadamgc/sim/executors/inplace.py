"""An algorithm's rules on long vectors: in place, piece by piece, in memory that is used again.

The rules of an algorithm are a dozen passes over vectors of millions of numbers. If every number depends only
on the numbers at the same position, all passes run over one short piece at a time, or are compiled into one
pass. Code for a piece fits every large model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.hyperparameters import numbers, with_values
from fadamgc.sim.executors.machine_code import NativeCode, compiled
from fadamgc.sim.executors.trace import flat_function, pointwise, record
from fadamgc.tree import leaves, rebuild, skeleton

PIECE = 1 << 15  # numbers per piece in the rule of a step, so that a piece stays in the cache
WIDE_PIECE = 1 << 17  # in the rules of a round: larger, because threads wait for Python at every piece


class Code:
    """How the rules of one kind of algorithm run; shared by all its algorithms and by all threads.

    With ``compile``, a step becomes machine code if possible, in which the lifted numbers are inputs.
    """

    def __init__(self, lifted_names: Sequence[str] = (), compile: bool = False) -> None:
        self.names, self.compile = lifted_names if compile else (), compile
        self.failed = False  # whether the compilation of a step has failed
        self.step: NativeCode | None = None  # compiled
        self.in_pieces: dict[Any, bool] = {}  # by rule: whether it runs piece by piece
        self.lock = threading.Lock()


class Rules:
    """The rules of an algorithm for one client, working in place; shared by all threads."""

    def __init__(self, algorithm: AnyAlgorithm, code: Code) -> None:
        self.algorithm, self.code = algorithm, code
        values = numbers(algorithm) if code.names else {}
        self.hyper = [torch.tensor(float(values[name]), dtype=torch.float64) for name in code.names]
        self._step: Callable[..., Any] | None = None  # in place, on flat arguments

    def begin(self, down: Any, client: Any, g_x: Tensor | None, x: Tensor, workspace: Workspace) -> Any:
        """Return the local state before step 1, in memory that nothing else uses until ``finish``."""
        return self._run("begin", self.algorithm.begin, (down, client, g_x), x, [], workspace.vector)

    def step(self, down: Any, client: Any, x: Tensor, local: Any, g: Tensor) -> None:
        """Change ``x`` and ``local`` by one step with gradient ``g``."""
        arguments = (self.hyper, down, client, x, local, g)
        with self.code.lock:
            if self._step is None:
                self._make_step(arguments)
        assert self._step is not None
        tensors = leaves(arguments)
        if not self.code.in_pieces["step"]:
            (self.code.step or self._step)(*tensors)
        elif self.code.step is None:
            for first in range(0, len(x), PIECE):
                self._step(*_piece(tensors, x, first, PIECE))
        else:
            self._run_code(self.code.step, tensors, x, local)

    def _run_code(self, code: NativeCode, tensors: list[Tensor], x: Tensor, local: Any) -> None:
        """Run the compiled step over all whole pieces, then over the rest in a padded copy."""
        fixed = [t for t in tensors if t.shape != x.shape]
        vectors = [t for t in tensors if t.shape == x.shape]
        whole = len(x) // PIECE * PIECE
        code.repeat(fixed, [t[:whole].view(-1, PIECE) for t in vectors], parts=whole // PIECE)
        if whole < len(x):
            rows = [torch.zeros(1, PIECE, dtype=t.dtype) for t in vectors]
            for row, vector in zip(rows, vectors, strict=True):
                row[0, : len(x) - whole] = vector[whole:]
            code(*fixed, *rows)
            changed = [x, *leaves(local)]  # the other vectors may be read-only
            for row, vector in zip(rows, vectors, strict=True):
                if any(vector is t for t in changed):
                    vector[whole:] = row[0, : len(x) - whole]

    def finish(
        self, down: Any, client: Any, local: Any, x: Tensor, K: int, tracked: bool, workspace: Workspace
    ) -> tuple[Any, Any]:
        """Return the client's new state and its message; ``x`` and the workspace may be used again."""

        def finish(down: Any, client: Any, local: Any, x: Tensor) -> Any:
            return self.algorithm.finish(down, client, local, x, K, tracked)

        arguments, shared = (down, client, local, x), leaves((down, client, local))
        state, up = self._run(("finish", tracked), finish, arguments, x, shared, torch.empty_like)
        workspace.take_back(except_for=leaves((state, up)))
        return state, up

    def _run(
        self,
        kind: Any,
        rule: Callable[..., Any],
        arguments: tuple[Any, ...],
        x: Tensor,
        shared: list[Tensor],
        new_vector: Callable[..., Tensor],
    ) -> Any:
        """Return the result of a rule, in new memory except for results that are ``shared`` tensors.

        ``new_vector(x, dtype=...)`` provides the memory of a long vector.
        """
        tensors, like = leaves(arguments), skeleton(arguments)
        with self.code.lock:
            if kind not in self.code.in_pieces:
                function = flat_function(rule, arguments)
                self.code.in_pieces[kind] = len(x) > WIDE_PIECE and _fits_pieces(function, tensors, x)
        shared_at = {t.data_ptr(): t for t in shared if t.shape == x.shape}
        if not self.code.in_pieces[kind]:
            memory = {t.untyped_storage().data_ptr() for t in tensors}
            result = rule(*arguments)

            def separate(t: Tensor) -> Tensor:
                copy = not shared_at or t.untyped_storage().data_ptr() in memory
                return shared_at.get(t.data_ptr(), t.clone() if copy else t)

            return rebuild(result, [separate(t) for t in leaves(result)])
        results: list[Tensor] = []
        for first in range(0, len(x), WIDE_PIECE):
            result = rule(*rebuild(like, _piece(tensors, x, first, WIDE_PIECE)))
            pieces = leaves(result)
            if not results:
                for t in pieces:
                    same = shared_at.get(t.data_ptr()) if t.shape == (WIDE_PIECE,) else t.clone()
                    results.append(new_vector(x, dtype=t.dtype) if same is None else same)
            for t, piece in zip(results, pieces, strict=True):
                if t.shape == x.shape and t.data_ptr() not in shared_at:
                    t[first : first + WIDE_PIECE].copy_(piece)
        return rebuild(result, results)

    def _make_step(self, arguments: tuple[Any, ...]) -> None:
        _, _, _, x, local, _ = arguments
        like, tensors = skeleton(arguments), leaves(arguments)

        def step(hyper: list[Tensor], down: Any, client: Any, x: Tensor, local: Any, g: Tensor) -> Any:
            algo = self.algorithm
            if self.code.names:
                algo = with_values(algo, dict(zip(self.code.names, hyper, strict=True)))
            return algo.step(down, client, local, x, g)

        pure = flat_function(step, arguments)

        def in_place(*tensors: Tensor) -> list[Tensor]:
            _, _, _, x, local, _ = rebuild(like, tensors)
            for old, new in zip([x, *leaves(local)], pure(*tensors), strict=True):
                old.copy_(new)
            return []

        self._step = in_place
        if "step" in self.code.in_pieces:  # known from another algorithm of this kind
            return
        # A number in the local state would be changed by every piece.
        only_vectors = all(t.shape == x.shape for t in leaves(local))
        self.code.in_pieces["step"] = len(x) > PIECE and only_vectors and _fits_pieces(pure, tensors, x)
        if self.code.compile:
            order = list(range(len(tensors)))
            if self.code.in_pieces["step"]:  # vectors come last, as in ``_run_code``
                order.sort(key=lambda i: tensors[i].shape == x.shape)
                tensors = [tensors[i] for i in order]
                tensors = [t[:PIECE].view(1, PIECE) if t.shape == x.shape else t for t in tensors]

            def in_order(*tensors: Tensor) -> list[Tensor]:
                return in_place(*(tensors[order.index(i)] for i in range(len(tensors))))

            self.code.step = compiled(record(in_order, tensors), tensors)
            self.code.failed = self.code.step is None


def _fits_pieces(function: Callable[..., Any], tensors: Sequence[Tensor], x: Tensor) -> bool:
    """Whether a rule gives the same numbers if it runs on one piece after the other.

    Each number must depend only on the numbers at its position, and not on the length of the vectors.
    """
    graphs = [record(function, _piece(tensors, x, 0, length)) for length in (8, 11)]
    return all(map(pointwise, graphs)) and len({graph.code for graph in graphs}) == 1  # type: ignore[attr-defined]


def _piece(tensors: Sequence[Tensor], x: Tensor, first: int, size: int) -> list[Tensor]:
    """Return a piece of every tensor that is a vector like x, and the other tensors as they are."""
    return [t[first : first + size] if t.shape == x.shape else t for t in tensors]


class Workspace:
    """Memory of one thread for the long vectors of a client's steps, used again for its next client.

    Allocating and freeing tens of megabytes for every vector of every client can take as long as the
    calculation itself.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    def vector(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Lend a vector as long as x, without initialising it."""
        for i, vector in enumerate(self._free):
            if vector.shape == x.shape and vector.dtype == dtype:
                self._lent.append(self._free.pop(i))
                break
        else:
            self._lent.append(torch.empty_like(x, dtype=dtype))
        return self._lent[-1]

    def take_back(self, except_for: Sequence[Tensor]) -> None:
        """Take back all vectors, except those that are part of a result and now belong to its receiver."""
        results = {t.data_ptr() for t in except_for}
        self._free += [t for t in self._lent if t.data_ptr() not in results]
        self._lent = []
