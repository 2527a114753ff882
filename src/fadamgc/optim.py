"""The client side of every algorithm as a torch optimizer, for custom training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fadamgc.algorithm import Algorithm, AnyAlgorithm, example
from fadamgc.errors import FadamgcError, InputError, nearest
from fadamgc.tree import from_names, map_leaves, named_leaves, rebuild

GROUP_KEYS = ("params", "lr", "param_names", "initial_lr")


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
        self.algorithm = algorithm
        self._gradient = gradient
        self._example = example(algorithm, torch.empty(0))
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
        attributes = {name: getattr(self, name) for name in ("algorithm", "_example", "_gradient")}
        return {**super().__getstate__(), **attributes}

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
        if not isinstance(down, type(self._example.down)):
            raise InputError(
                f"down of type {type(down).__name__} is not what {type(self.algorithm).__name__} sends; "
                "give algorithm.broadcast(server)"
            )
        if self.algorithm.round_gradient and gradient is None:
            raise InputError(
                f"{type(self.algorithm).__name__} needs the client's gradient at x: "
                "pass start_round(down, gradient=...)"
            )
        none: list[Any] = [None] * len(self.param_groups)
        round_gradients = self._split("gradient", gradient) if self.algorithm.round_gradient else none
        init_gradients = self._split("gradient", self._gradient) if self.algorithm.init_gradient else none
        columns = [self._split(name, vector) for name, vector in named_leaves(down, "down").items()]
        for i, group in enumerate(self.param_groups):
            state = self._state(group)
            if not state:  # the first round
                self._keep(group, client=self.algorithm.init_client(_flatten(group), init_gradients[i]))
            part = rebuild(down, [column[i] for column in columns])
            state["k"], state["eta_l"] = 0, float(group["lr"])
            (client,) = self._recall(group, "client")
            self._keep(group, down=part, local=self._algorithm(group).begin(part, client, round_gradients[i]))
            _load(group, part.x)

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
            down, client, local = self._recall(group, "down", "client", "local")
            x, local = self._algorithm(group).step(down, client, local, _flatten(group), _gradient(group))
            _load(group, x)
            self._keep(group, local=local)
            self._state(group)["k"] += 1
        return loss

    @torch.no_grad()
    def finish_round(self, tracked: bool = True) -> Any:
        """End the round: keep the client's new state and return the client's message to the server."""
        if not self.in_round:
            raise FadamgcError("finish_round() outside a round; call start_round(down) first")
        if any(self._state(group)["k"] == 0 for group in self.param_groups):
            raise FadamgcError("finish_round() before any step(); a round needs at least one local step")
        ups = []
        for group in self.param_groups:
            state, algorithm = self._state(group), self._algorithm(group)
            down, client, local = self._recall(group, "down", "client", "local")
            client, up = algorithm.finish(down, client, local, _flatten(group), state["k"], bool(tracked))
            state.clear()
            self._keep(group, client=client)
            ups.append(up)
        return map_leaves(lambda *pieces: torch.cat(pieces), *ups)

    def _algorithm(self, group: dict[str, Any]) -> AnyAlgorithm:
        return self.algorithm.replace(eta_l=self._state(group)["eta_l"])

    def _split(self, name: str, vector: Tensor | None) -> list[Tensor]:
        """Return the piece of a vector that belongs to each group."""
        sizes = [sum(p.numel() for p in _trainable(group)) for group in self.param_groups]
        if vector is None or vector.shape != (sum(sizes),):
            got = None if vector is None else tuple(vector.shape)
            raise InputError(f"{name} of shape {got} does not fit parameters of {sum(sizes)} numbers")
        pieces = torch.split(vector.detach(), sizes)
        return [p.to(_trainable(group)[0]) for group, p in zip(self.param_groups, pieces, strict=True)]

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
            return [from_names(getattr(self._example, kind), self._state(group), kind) for kind in kinds]
        except KeyError as error:
            raise FadamgcError(
                f"the optimizer's state has no {error.args[0]}; it belongs to another algorithm, or "
                "parameters were frozen or changed since"
            ) from None


def _trainable(group: dict[str, Any]) -> list[nn.Parameter]:
    return [p for p in group["params"] if p.requires_grad]


def _flatten(group: dict[str, Any]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in _trainable(group)])


def _gradient(group: dict[str, Any]) -> Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in _trainable(group)]
    )


def _load(group: dict[str, Any], x: Tensor) -> None:
    parameters = _trainable(group)
    for p, value in zip(parameters, torch.split(x, [p.numel() for p in parameters]), strict=True):
        p.copy_(value.view_as(p))
