"""The client side of every algorithm as a torch optimizer, for custom training loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fadamgc.algorithm import Algorithm, AnyAlgorithm, Example, example, stand_in
from fadamgc.errors import FadamgcError, InputError, nearest
from fadamgc.hyperparameters import schedules
from fadamgc.pieces import Program, as_array, record
from fadamgc.tree import from_names, leaves, map_leaves, named_leaves, names, rebuild

GROUP_KEYS = ("params", "lr", "param_names", "initial_lr")
PIECE = 1 << 17  # numbers of a vector that go through a step at once, per thread


class ClientOptimizer(Optimizer):
    """The client's part of a federated algorithm, for a loop that you write.

    For the server's part, call the algorithm: ``init_server``, ``broadcast``, ``aggregate``. Its vectors are
    the trainable parameters of all groups, one after the other; with ``model.parameters()``, this is the
    order of ``Run.x``. The optimizer keeps the client's state (y_i, v_i, ...) from round to round, and
    ``state_dict`` saves it, also in the middle of a round. Buffers such as BatchNorm's statistics are not
    part of the optimizer: average them separately.

    The ``lr`` of a group is its eta_l; a scheduler may change it. A change takes effect at the next
    ``start_round``, because rules such as SCAFFOLD's divide by the step size of the whole round. The
    server's rule of FedAvg-M and SCAFFOLD-M divides by eta_l as well: if lr differs from the algorithm's
    eta_l, aggregate with ``algorithm.replace(eta_l=lr)``, and use one lr for all groups.

    A single number in the server's message goes to every group. A number in the client's message (FedExP,
    FedNova) cannot be joined from several groups: such algorithms need one group.

    The steps of long vectors on a CPU work in place and in pieces (see ``pieces.py``): the numbers are the
    same, on a single thread up to the rounding of square roots.

    Move or convert the model before the optimizer is made. If you do so later, the next call raises an
    error; ``optimizer.load_state_dict(optimizer.state_dict())`` converts the optimizer's state.

    Args:
        params: parameters or groups, as for any torch optimizer.
        algorithm: the algorithm; its ``eta_l`` is the default ``lr``.
        gradient: the client's gradient at the initial model, as a vector, for ``init="gradient"``.

    Example:
        >>> import fadamgc, torch
        >>> model, algo = torch.nn.Linear(2, 1), fadamgc.FAdamGC(eta_l=0.1)
        >>> x = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        >>> server = algo.init_server(x)
        >>> optimizer = fadamgc.ClientOptimizer(model.parameters(), algo)
        >>> optimizer.start_round(algo.broadcast(server))
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 2)).square().mean().backward()
        ...     optimizer.step()
        >>> up = optimizer.finish_round(tracked=True)
        >>> server = algo.aggregate(server, up, fadamgc.Cohort(n=1, S=1, K=3))
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        algorithm: AnyAlgorithm,
        gradient: Tensor | None = None,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise InputError(
                f"algorithm={algorithm!r} is not an algorithm; give one such as fadamgc.FAdamGC()"
            )
        if named := schedules(algorithm):
            name, schedule = next(iter(named.items()))
            raise InputError(
                f"algorithm has the schedule {name}={schedule}, and a ClientOptimizer knows no rounds; "
                "give the algorithm of the first round, algorithm.at(1), and change 'lr' of its groups"
            )
        self.algorithm = algorithm
        self._gradient = gradient
        self._example_of: tuple[int, Example] | None = None
        self._steps: dict[int, _Steps] = {}  # by group; only while nothing else uses the tensors of ``local``
        self._programs: dict[int, _Recorded] = {}  # the last recorded step of each group
        super().__init__(params, {"lr": algorithm.eta_l})
        if algorithm.init_gradient and gradient is None:
            raise InputError(
                f"{type(algorithm).__name__} starts from gradients: pass gradient=, the client's gradient "
                "at the initial model as a vector"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group before the first round; later, the length of the vectors could not change."""
        if any(self._state(group) for group in self.param_groups):
            raise FadamgcError("add_param_group() after the first start_round(); add groups before it")
        for key in param_group:
            if key not in GROUP_KEYS:
                raise InputError(
                    f"a parameter group has no option {key!r}{nearest(key, GROUP_KEYS)}; "
                    "it has 'lr'; set all other hyperparameters in the algorithm"
                )
        super().add_param_group(param_group)
        kinds = {(p.dtype, p.device) for p in _trainable(self.param_groups[-1])}
        if len(kinds) != 1:
            raise InputError(
                "a parameter group needs trainable parameters of one type and on one device; "
                f"got {sorted(map(str, kinds))}"
            )

    def __getstate__(self) -> dict[str, Any]:
        attributes = {"algorithm": self.algorithm, "_gradient": self._gradient}
        return {**super().__getstate__(), **attributes, "_example_of": None, "_steps": {}, "_programs": {}}

    def state_dict(self) -> dict[str, Any]:
        """Return the state; later steps do not change it."""
        self._steps.clear()
        saved = super().state_dict()
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` has returned."""
        self._steps.clear()
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, mine, strict=True):  # torch has converted all to the parameters' type
            for name, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor) and value.shape == (1,) and p.dtype.itemsize == 2:
                    self.state[p][name] = value.detach().to(p.device, copy=True)

    @property
    def in_round(self) -> bool:
        """Whether a round was started and not finished."""
        return any("k" in self._state(group) for group in self.param_groups)

    @torch.no_grad()
    def start_round(self, down: Any, gradient: Tensor | None = None) -> None:
        """Set the parameters to ``down.x`` and begin the local steps.

        A round that was started and not finished is discarded, without effect on the client's state.

        Args:
            down: the server's message, ``algorithm.broadcast(server)``.
            gradient: the gradient of the client's whole data at ``down.x``, for algorithms that need
                it (SCAFFOLD's option I).
        """
        like = self._example()
        if not isinstance(down, type(like.down)):
            raise InputError(
                f"down of type {type(down).__name__} is not what {type(self.algorithm).__name__} sends; "
                "give algorithm.broadcast(server)"
            )
        if self.algorithm.round_gradient and gradient is None:
            raise InputError(
                f"{type(self.algorithm).__name__} needs the client's gradient at x: "
                "pass start_round(down, gradient=...)"
            )
        self._check_up(like.up)
        none: list[Any] = [None] * len(self.param_groups)
        round_gradients = self._split("gradient", gradient) if self.algorithm.round_gradient else none
        init_gradients = self._split("gradient", self._gradient) if self.algorithm.init_gradient else none
        shapes = [t.shape for t in leaves(like.down)]
        named = self._checked(down, like.down).items()
        columns = [self._split(name, t, shape) for (name, t), shape in zip(named, shapes, strict=True)]
        starts = []
        for i, group in enumerate(self.param_groups):
            state, part = self._state(group), rebuild(down, [column[i] for column in columns])
            if any(name.startswith("client.") for name in state):
                self._check_type(group)
                (client,) = self._recall(group, "client")
                self._check_client(group, client, like.client)
            else:  # the first round, or an algorithm without a state
                client = self.algorithm.init_client(_flatten(group), init_gradients[i])
            eta_l = float(group["lr"])
            if not (eta_l > 0 and math.isfinite(eta_l)):
                raise InputError(f"lr={eta_l} of a parameter group is not accepted; it must be a number > 0")
            local = self.algorithm.replace(eta_l=eta_l).begin(part, client, round_gradients[i])
            starts.append((group, {"k": 0, "eta_l": eta_l}, {"client": client, "down": part, "local": local}))
        self._steps.clear()
        for group, numbers, states in starts:
            self._state(group).update(numbers)
            self._keep(group, **states)
            _write(_trainable(group), states["down"].x)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one local step with the gradients that ``backward`` has computed."""
        if not self.in_round:
            raise FadamgcError("step() outside a round; call start_round(down) first")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._check_type(group)
        for i, group in enumerate(self.param_groups):
            down, client, local = self._recall(group, "down", "client", "local")
            steps = self._steps.get(i)
            if steps is None or not steps.fits(_trainable(group), (down, client, local)):
                algorithm, earlier = self._algorithm(group), self._programs.get(i)
                steps = _Steps(algorithm, _trainable(group), (down, client, local), earlier)
                self._steps[i], self._programs[i] = steps, steps.recorded
            self._keep(group, local=steps.step())
            self._state(group)["k"] += 1
        return loss

    @torch.no_grad()
    def finish_round(self, tracked: bool = True) -> Any:
        """End the round: keep the client's new state and return the client's message to the server."""
        if not self.in_round:
            raise FadamgcError("finish_round() outside a round; call start_round(down) first")
        if any(self._state(group)["k"] == 0 for group in self.param_groups):
            raise FadamgcError("finish_round() before any step(); a round needs at least one local step")
        ends = []
        for group in self.param_groups:
            self._check_type(group)
            algorithm, K = self._algorithm(group), self._state(group)["k"]
            down, client, local = self._recall(group, "down", "client", "local")
            ends.append(algorithm.finish(down, client, local, _flatten(group), K, bool(tracked)))
        self._steps.clear()
        for group, (client, _) in zip(self.param_groups, ends, strict=True):
            self._state(group).clear()
            self._keep(group, client=client)
        return map_leaves(lambda *pieces: torch.cat(pieces), *(up for _, up in ends))

    def _algorithm(self, group: dict[str, Any]) -> AnyAlgorithm:
        return self.algorithm.replace(eta_l=self._state(group)["eta_l"])

    def _sizes(self) -> list[int]:
        return [sum(p.numel() for p in _trainable(group)) for group in self.param_groups]

    def _example(self) -> Example:
        """Return one of each kind of state and message, for the parameters of all groups."""
        d = sum(self._sizes())
        if self._example_of is None or self._example_of[0] != d:
            self._example_of = (
                d,
                example(self.algorithm, stand_in(d, _trainable(self.param_groups[0])[0].dtype)),
            )
        return self._example_of[1]

    def _checked(self, down: Any, like: Any) -> dict[str, Tensor]:
        """Return the tensors of a message by name; refuse one that the algorithm does not send."""
        try:
            tensors = named_leaves(down, "down")
        except (AttributeError, TypeError, ValueError):
            tensors = {}
        if tensors.keys() != named_leaves(like, "down").keys():
            raise InputError(
                f"down has {', '.join(tensors) or 'no tensors'}; {type(self.algorithm).__name__} sends "
                f"{', '.join(named_leaves(like, 'down'))}: give algorithm.broadcast(server)"
            )
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                kind = f"of type {tensor.dtype}" if not tensor.is_floating_point() else "not finite"
                raise InputError(f"{name} is {kind}; give finite floating-point numbers")
        return tensors

    def _split(self, name: str, tensor: Tensor | None, shape: torch.Size | None = None) -> list[Tensor]:
        """Return the piece of a vector that belongs to each group; a single number belongs to all groups."""
        sizes = self._sizes()
        whole = torch.Size([sum(sizes)])
        shape = shape or whole
        if tensor is None or tensor.shape != shape:
            got = None if tensor is None else tuple(tensor.shape)
            accepted = f"; its shape is {tuple(shape)}" if shape != whole else ""
            raise InputError(
                f"{name} of shape {got} does not fit parameters of {whole.numel()} numbers{accepted}"
            )
        tensor = tensor.detach()
        if len(sizes) == 1 or shape == (1,):
            pieces = [tensor] * len(sizes)
        elif shape == whole:
            pieces = list(torch.split(tensor, sizes))
        else:
            raise self._one_group(name, shape)
        firsts = [_trainable(group)[0] for group in self.param_groups]
        # If parameters have 16 bits, a single number keeps its type, because it may count steps.
        return [
            p.to(first.device if shape == (1,) and first.dtype.itemsize == 2 else first)
            for first, p in zip(firsts, pieces, strict=True)
        ]

    def _check_up(self, up: Any) -> None:
        """Check that the messages of the groups can be joined."""
        sizes = self._sizes()
        for name, tensor in named_leaves(up, "up").items():
            if len(sizes) > 1 and tensor.shape != (sum(sizes),):
                raise self._one_group(name, tensor.shape)

    def _one_group(self, name: str, shape: torch.Size) -> InputError:
        return InputError(
            f"{name} of {type(self.algorithm).__name__} has the shape {tuple(shape)}, which "
            f"{len(self.param_groups)} parameter groups cannot share; put all parameters into one group"
        )

    def _check_type(self, group: dict[str, Any]) -> None:
        """Check that the parameters are as they were when the state was made."""
        parameters = _trainable(group)
        vectors = [(n, t) for n, t in self._state(group).items() if n == "down.x" or n.startswith("client.")]
        for name, tensor in vectors:
            for p in parameters if name == "down.x" or tensor.shape != (1,) else ():
                if (p.dtype, p.device) != (tensor.dtype, tensor.device):
                    raise FadamgcError(
                        f"a parameter is {p.dtype} on {p.device}, but {name} of the optimizer is "
                        f"{tensor.dtype} on {tensor.device}: the model was converted; convert the state "
                        "with optimizer.load_state_dict(optimizer.state_dict())"
                    )
            if name == "down.x" and len(tensor) != sum(p.numel() for p in parameters):
                raise FadamgcError(
                    f"the group has {sum(p.numel() for p in parameters)} trainable numbers, and had "
                    f"{len(tensor)} at start_round(): parameters were frozen or changed since; freeze before "
                    "the first round"
                )

    def _check_client(self, group: dict[str, Any], client: Any, like: Any) -> None:
        d, whole = sum(p.numel() for p in _trainable(group)), sum(self._sizes())
        for name, t, other in zip(names(client, "client"), leaves(client), leaves(like), strict=True):
            if other.shape == (whole,) and t.shape != (d,):
                raise FadamgcError(
                    f"the group has {d} trainable numbers, but {name} of the optimizer has {len(t)}: "
                    "parameters were frozen or changed since; freeze before the first round"
                )

    # A group's vectors are stored as the state of its first parameter, so that torch's state_dict and
    # load_state_dict include them.

    def _state(self, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[_trainable(group)[0]]
        return state

    def _keep(self, group: dict[str, Any], **states: Any) -> None:
        for kind, state in states.items():
            self._state(group).update(named_leaves(state, kind))

    def _recall(self, group: dict[str, Any], *kinds: str) -> list[Any]:
        try:
            return [from_names(getattr(self._example(), kind), self._state(group), kind) for kind in kinds]
        except KeyError as error:
            raise FadamgcError(
                f"the optimizer's state has no {error.args[0]}; it belongs to another algorithm, or "
                "parameters were frozen or changed since"
            ) from None


class _Recorded(NamedTuple):
    """A recorded step; ``program`` is None if the step runs as it is written."""

    algorithm: AnyAlgorithm
    dtype: torch.dtype
    program: Program | None


class _Steps:
    """The steps of one group in one round: in place and in pieces if possible, else as they are written.

    Args:
        algorithm: the algorithm with the group's eta_l.
        parameters: the group's trainable parameters.
        states: down, client and local.
        earlier: the recorded step of an earlier round, reused if algorithm and dtype are the same.
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        parameters: list[nn.Parameter],
        states: tuple[Any, Any, Any],
        earlier: _Recorded | None,
    ) -> None:
        self.algorithm, self.parameters = algorithm, parameters
        down, client, local = states
        self.states = down, client, map_leaves(torch.clone, local)  # the clones are changed in place
        self.piece = PIECE * torch.get_num_threads()
        x = down.x
        if earlier is None or earlier[:2] != (algorithm, x.dtype):
            long = x.device.type == "cpu" and len(x) > self.piece
            earlier = _Recorded(algorithm, x.dtype, self._record(x) if long else None)
        self.recorded = earlier
        if earlier.program is not None:
            self.runs = _runs(parameters, self.piece)
            in_numpy = None
            if torch.get_num_threads() == 1 and x.dtype in (torch.float32, torch.float64):
                in_numpy = earlier.program.in_numpy()
            self.view: Callable[[Any], Any] = _same if in_numpy is None else as_array
            self.run = (in_numpy or earlier.program).run
            self.positions, self.rows = self._rows(earlier.program, x)

    def _record(self, x: Tensor) -> Program | None:
        def step(x: Tensor, g: Tensor, *tensors: Tensor) -> list[Tensor]:
            down, client, local = rebuild(self.states, tensors)
            return leaves(self.algorithm.step(down, client, local, x, g))

        inputs = [x, x, *leaves(self.states)]
        first_local = len(inputs) - len(leaves(self.states[2]))
        return record(step, inputs, [0, *range(first_local, len(inputs))])

    def _rows(self, program: Program, x: Tensor) -> tuple[list[int], list[list[Any]]]:
        """Return the pieces of the states' vectors and scratch memory, and their positions in a program."""
        vectors = {i: t for i, t in enumerate(leaves(self.states), 2) if t.shape == x.shape}
        scratch = [torch.empty(self.piece, dtype=dtype) for dtype in program.scratch]
        positions = [*vectors, *range(program.first_scratch, program.first_scratch + len(scratch))]
        sizes = [n for run in self.runs for n in _cut(sum(p.numel() for p in run), self.piece)]
        columns = [torch.split(t, sizes) for t in vectors.values()]
        rows = [[c[i] for c in columns] + [t[:n] for t in scratch] for i, n in enumerate(sizes)]
        return positions, [[self.view(t) for t in row] for row in rows]

    def fits(self, parameters: list[nn.Parameter], states: tuple[Any, Any, Any]) -> bool:
        """Whether parameters and states are still the same tensors as when this object was made."""
        before, now = leaves((self.states, self.parameters)), leaves((states, parameters))
        return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))

    def step(self) -> Any:
        """Change the parameters by one step; return the new local state."""
        down, client, local = self.states
        program = self.recorded.program
        if program is None:
            x, g = _flat(self.parameters), _gradient(self.parameters)
            x, local = self.algorithm.step(down, client, local, x, g)
            _write(self.parameters, x)
        else:
            with np.errstate(all="ignore"):  # as in torch, 0/0 is NaN without a warning
                local = self._step_in_place(program)
        self.states = down, client, local
        return local

    def _step_in_place(self, program: Program) -> Any:
        tensors = leaves(self.states)
        numbers = program.values([tensors[0], tensors[0], *tensors])
        values = [self.view(number) for number in numbers] + [None] * len(program.scratch)
        rows = iter(self.rows)
        for run in self.runs:
            x, g = _flat(run), _gradient(run)
            x_view, g_view = self.view(x), self.view(g)
            for first in range(0, len(x), self.piece):
                values[0], values[1] = x_view[first : first + self.piece], g_view[first : first + self.piece]
                for position, tensor in zip(self.positions, next(rows), strict=True):
                    values[position] = tensor
                self.run(values)
            if len(run) > 1 or not run[0].is_contiguous():  # x is a copy
                _write(run, x)
            else:  # autograd does not see what numpy writes
                torch.autograd.graph.increment_version(run[0])
        local = leaves(self.states[2])
        first = 2 + len(tensors) - len(local)
        new = [numbers[program.new_numbers.get(i, i)] for i in range(first, first + len(local))]
        return rebuild(self.states[2], new)


def _same(value: Any) -> Any:
    return value


def _runs(parameters: list[nn.Parameter], piece: int) -> list[list[nn.Parameter]]:
    """Group the parameters: each large one alone, small ones together up to the size of one piece."""
    runs: list[list[nn.Parameter]] = []
    room = 0
    for p in parameters:
        large = p.numel() > piece // 4
        if large or p.numel() > room:
            runs.append([])
            room = 0 if large else piece
        runs[-1].append(p)
        room -= 0 if large else p.numel()
    return runs


def _cut(length: int, piece: int) -> list[int]:
    """Return the lengths of the pieces of a vector."""
    return [min(piece, length - first) for first in range(0, length, piece)]


def _trainable(group: dict[str, Any]) -> list[nn.Parameter]:
    return [p for p in group["params"] if p.requires_grad]


def _flatten(group: dict[str, Any]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in _trainable(group)])


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    """Return parameters as one vector; a single contiguous parameter is not copied."""
    return _joined([p.detach() for p in parameters])


def _gradient(parameters: list[nn.Parameter]) -> Tensor:
    return _joined([torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters])


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def _write(parameters: list[nn.Parameter], x: Tensor) -> None:
    for p, value in zip(parameters, torch.split(x, [p.numel() for p in parameters]), strict=True):
        p.copy_(value.view_as(p))
