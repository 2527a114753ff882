"""The step of an algorithm on long vectors: in place, one short piece after the other.

A step is a dozen operations on vectors of millions of numbers. As written, each operation reads its vectors
from memory and writes a new one. If every number depends only on the numbers at its own position, all
operations can run on one short piece at a time, which stays in the cache, and write into memory that is used
again. The operations and their order are those of the algorithm, so the results are the same to the bit in
torch, and the same up to the rounding of square roots in numpy.

``record`` runs the step once on short vectors and writes down its operations; None if one of them is not
pointwise. ``Program.run`` repeats them on the pieces of long vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# The one interface of torch that sees every operation of a function; torch documents its use but keeps it in
# a private module. ``record`` returns None if it fails, and the step then runs as it is written.
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = (7, 10)  # lengths of the vectors on which a step is recorded; both recordings must be equal
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # the result is the argument
COPIES = (torch.ops.aten.clone.default, torch.ops.aten.zeros_like.default, torch.ops.aten._to_copy.default)


def _maximum(a: Any, b: Any, out: Any) -> None:
    np.maximum(a, b, out=out)  # by keyword: numpy deprecates a third positional argument


def _minimum(a: Any, b: Any, out: Any) -> None:
    np.minimum(a, b, out=out)


def _where(condition: Any, yes: Any, no: Any, out: Any) -> None:
    if out is not yes:  # they are the same memory in Adam's direction, where(v > 0, m / sqrt(v), 0)
        out[:] = np.where(condition, yes, no)  # the arguments may use the memory of ``out``
        return
    np.copyto(out, no, where=np.logical_not(condition))


# numpy's calls, and its square root, take a third of the time of torch's. The results are the same to the
# bit, except for the square root: numpy's is exactly rounded, torch's is not always.
UFUNCS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "sqrt": np.sqrt,
    "maximum": _maximum,
    "minimum": _minimum,
    "neg": np.negative,
    "abs": np.absolute,
    "gt": np.greater,
    "where": _where,
}
NUMPY_TYPES = (torch.float32, torch.float64, torch.bool)


class _NotPointwise(Exception):  # noqa: N818  # not an error: the step runs as it is written
    """The step has an operation that cannot be repeated on pieces."""


class Operation(NamedTuple):
    """One operation of a step; numbers are positions in the list of values."""

    function: Callable[..., Any]
    arguments: tuple[int, ...]
    options: dict[str, Any]
    result: int
    writes: bool  # whether the function writes into the result's memory (out=), or returns new memory


class Program(NamedTuple):
    """The operations of a step.

    They work on a list of values: the inputs first, then constants, intermediate numbers and scratch memory.
    """

    constants: list[Any]
    on_numbers: list[Operation]  # once per step
    on_vectors: list[Operation]  # once per piece
    first_scratch: int  # position of the scratch memory
    scratch: list[torch.dtype]
    copies: list[tuple[int, int]]  # vectors to copy at the end of a piece: to, from
    new_numbers: dict[int, int]  # position of the new value of each number that the step changes

    def values(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Return the list of values of one step up to the scratch memory, with all numbers computed."""
        values: list[Any] = [*inputs, *self.constants, *[None] * len(self.on_numbers)]
        for function, arguments, options, result, _ in self.on_numbers:
            values[result] = function(*[values[i] for i in arguments], **options)
        return values

    def in_numpy(self) -> NumpyProgram | None:
        """Return the program for numpy arrays; None if numpy does not have all of its operations."""
        if not set(NUMPY_TYPES).issuperset(self.scratch):
            return None
        calls: list[tuple[Callable[..., Any], Callable[[list[Any]], Any]]] = []
        for operation in self.on_vectors:
            ufunc = UFUNCS.get(operation.function.__name__)
            if ufunc is None or operation.options or not operation.writes:
                return None
            calls.append((ufunc, itemgetter(*operation.arguments, operation.result)))
        return NumpyProgram(calls, self.copies)

    def run(self, values: list[Any]) -> None:
        """Change one piece, whose vectors and scratch memory are in ``values``, in place."""
        for function, arguments, options, result, writes in self.on_vectors:
            if writes:
                function(*[values[i] for i in arguments], **options, out=values[result])
            else:
                values[result] = function(*[values[i] for i in arguments], **options)
        for to, source in self.copies:
            values[to][:] = values[source]


class NumpyProgram(NamedTuple):
    """The operations of a step on one piece, for numpy arrays."""

    calls: list[tuple[Callable[..., Any], Callable[[list[Any]], Any]]]  # functions; their arguments, then out
    copies: list[tuple[int, int]]

    def run(self, values: list[Any]) -> None:
        """Change one piece in place; ``values`` are those of ``Program.run`` as arrays."""
        for function, arguments in self.calls:
            function(*arguments(values))
        for to, source in self.copies:
            values[to][:] = values[source]


def as_array(value: Any) -> Any:
    """Return a value for a program in numpy: the same memory as an array, or a constant as a number."""
    if not isinstance(value, Tensor):
        return value
    return value.numpy() if value.ndim else value.item()


def record(
    step: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], changed: Sequence[int]
) -> Program | None:
    """Record a step that maps ``inputs`` to the new values of the ``changed`` inputs.

    Inputs of the shape of the first one are vectors; inputs of one number are the same for all pieces.
    Returns None if the step is not pointwise.
    """
    try:
        programs = [_program(step, inputs, list(changed), length) for length in LENGTHS]
        first, second = (
            p._replace(constants=[c.tolist() if isinstance(c, Tensor) else c for c in p.constants])
            for p in programs
        )
        return programs[0] if first == second else None
    except Exception:  # the step runs as it is written, and raises there whatever it has to raise
        return None


def _program(
    step: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], changed: list[int], length: int
) -> Program:
    shape = inputs[0].shape
    vectors = [i for i, t in enumerate(inputs) if t.shape == shape]
    numbers = [i for i, t in enumerate(inputs) if t.shape == (1,)]
    generator = torch.Generator().manual_seed(0)
    short = [
        (torch.rand(length if i in vectors else t.shape, generator=generator) + 0.5).to(t.dtype)
        for i, t in enumerate(inputs)
    ]
    recorder = _Recorder(short, {*vectors, *numbers}, length)
    with recorder:
        results = [recorder.slot(t) for t in step(*short)]
    return _Allocation(recorder, changed, results).program()


class _Call(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[int, ...]
    options: dict[str, Any]
    slot: int
    writes: bool


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations of a function: every tensor or constant has a slot."""

    def __init__(self, inputs: list[Tensor], usable: set[int], length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs, self.length = len(inputs), length
        self.values: list[Any] = list(inputs)
        self.usable = usable
        self.slots = {id(t): i for i, t in enumerate(inputs)}
        self.calls: list[_Call] = []
        self.constants: list[int] = []

    def slot(self, tensor: Tensor) -> int:
        return self.slots[id(tensor)]

    def _new(self, value: Any) -> int:
        self.values.append(value)  # keeps the tensor alive, so that its id stays unique
        if isinstance(value, Tensor):
            self.slots[id(value)] = len(self.values) - 1
        self.usable.add(len(self.values) - 1)
        return len(self.values) - 1

    def _constant(self, value: Any) -> int:
        self.constants.append(self._new(value))
        return self.constants[-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        tensors = [a for a in (*args, *options.values()) if isinstance(a, Tensor)]
        if not tensors and isinstance(result, Tensor) and result.numel() == 1:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise _NotPointwise
            self._constant(result)
            return result
        if func in SAME:
            self._keep_alias(result, args[0])
            return result
        if (torch.Tag.pointwise not in func.tags and func not in COPIES) or func._schema.is_mutable:
            raise _NotPointwise
        if not isinstance(result, Tensor) or any(isinstance(a, Tensor) for a in options.values()):
            raise _NotPointwise
        function: Callable[..., Any] = func
        writing, constants = None, args
        if result.shape == (self.length,):
            writing, constants = _writing(func, args, options, result)
            function = writing or func
        arguments = tuple(
            self.slot(a) if isinstance(a, Tensor) else self._constant(constant)
            for a, constant in zip(args, constants, strict=True)
        )
        if not self.usable.issuperset(arguments):
            raise _NotPointwise
        self.calls.append(_Call(function, arguments, options, self._new(result), writing is not None))
        return result

    def _keep_alias(self, result: Tensor, argument: Tensor) -> None:
        slot = self.slot(argument)
        self._new(result)
        self.slots[id(result)] = slot


def _writing(
    func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Tensor
) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
    """Return torch's function that writes the same result into given memory (out=), and its arguments.

    A tensor instead of a constant saves a third of the time of a call.
    """
    function: Any = getattr(torch, func.overloadpacket.__name__, None)
    memory = torch.empty_like(result)
    tensors = tuple(torch.tensor(a, dtype=torch.float64) if isinstance(a, float) else a for a in args)
    for arguments in (tensors, args):
        try:
            function(*arguments, **options, out=memory)
        except Exception:  # an operation without out=, or whose argument must be a constant
            continue
        if torch.equal(memory, result):
            return function, arguments
    return None, args


class _Allocation:
    """Chooses the memory of every intermediate vector: the changed input itself, or scratch memory."""

    def __init__(self, recorder: _Recorder, changed: list[int], results: list[int]) -> None:
        self.recorder, self.changed, self.results = recorder, changed, results
        self.is_vector = [isinstance(v, Tensor) and v.shape == (recorder.length,) for v in recorder.values]
        for place, slot in zip(changed, results, strict=True):
            if self.is_vector[place] != self.is_vector[slot] or (slot in changed and slot != place):
                raise _NotPointwise
            if recorder.values[place].dtype != recorder.values[slot].dtype:
                raise _NotPointwise
        self.scratch_positions: set[int] = set()

    def program(self) -> Program:
        recorder = self.recorder
        on_numbers = [call for call in recorder.calls if not self.is_vector[call.slot]]
        on_vectors = [call for call in recorder.calls if self.is_vector[call.slot]]
        position = {slot: slot for slot in range(recorder.inputs)}
        for slot in (*recorder.constants, *(call.slot for call in on_numbers)):
            position[slot] = len(position)
        scratch = self._place(on_vectors, position)
        placed = list(zip(self.changed, (position[slot] for slot in self.results), strict=True))
        return Program(
            constants=[recorder.values[slot] for slot in recorder.constants],
            on_numbers=[_operation(call, position) for call in on_numbers],
            on_vectors=[_operation(call, position) for call in on_vectors],
            first_scratch=recorder.inputs + len(recorder.constants) + len(on_numbers),
            scratch=scratch,
            copies=[(to, source) for to, source in placed if self.is_vector[to] and to != source],
            new_numbers={to: source for to, source in placed if not self.is_vector[to]},
        )

    def _place(self, calls: list[_Call], position: dict[int, int]) -> list[torch.dtype]:
        """Add the positions of the results of all calls; return the types of the scratch memory."""
        last_use = {slot: n for n, call in enumerate(calls) for slot in call.arguments}
        first = len(position)
        scratch: list[torch.dtype] = []
        free: list[int] = []
        for n, call in enumerate(calls):
            dtype = self.recorder.values[call.slot].dtype
            unused = [s for s in set(call.arguments) if last_use[s] == n and s not in self.results]
            free += [position[slot] for slot in unused if position[slot] in self.scratch_positions]
            place = self._home(call.slot, n, last_use) if call.writes else None
            if place is None:
                suitable = [i for i in free if call.writes and scratch[i - first] == dtype]
                if suitable:
                    place = suitable[-1]  # the memory of an argument, if possible: it is in the cache
                    free.remove(place)
                else:
                    place = first + len(scratch)
                    scratch.append(dtype)
                    if call.writes:
                        self.scratch_positions.add(place)
            position[call.slot] = place
        return scratch

    def _home(self, slot: int, n: int, last_use: dict[int, int]) -> int | None:
        """Return the changed input whose new value is in ``slot``, if no later call reads its old value."""
        for place, result in zip(self.changed, self.results, strict=True):
            if result == slot and last_use.get(place, -1) <= n:
                return place
        return None


def _operation(call: _Call, position: dict[int, int]) -> Operation:
    arguments = tuple(position[slot] for slot in call.arguments)
    return Operation(call.function, arguments, call.options, position[call.slot], call.writes)
