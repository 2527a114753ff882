"""Gradient correction as a hook on any torch optimizer, for training loops that keep their optimizer.

    g_hat = g + y - y_i                  what the optimizer sees
    y_i   = (1/K) sum of the raw g       at the end of a round of K steps, if tracked
    dy    = y_i new - y_i old            what the client sends
    y     = y + (1/n) sum of the dy      at the server, over the tracked clients

This is the correction "pre" of ``fadamgc.compose`` with the torch optimizer as the local rule. y_i has no
step size in it, so that schedules, warm-up and clipping do not break it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fadamgc.errors import FadamgcError, InputError, finite, listed, not_accepted, shown

# The Corrections of each optimizer, so that no gradient is corrected twice.
_attached: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Correction]] = weakref.WeakKeyDictionary()


class Correction:
    """Adds y - y_i to the gradients in every step of a torch optimizer, and keeps y_i.

    All vectors have one number for each trainable number, in the order of ``parameters``; their type is that
    of the parameters, and at least float32. Each client has its own Correction and its own optimizer. The
    optimizer sees the corrected gradient; after its step, ``.grad`` is again what ``backward`` left there.

    - A parameter whose ``.grad`` is None has the gradient 0. It is corrected as well: the optimizer sees
      y - y_i. Only where y - y_i is zero for a whole parameter does the optimizer skip that parameter, as it
      would without the hook.
    - Accumulated gradients are corrected once per ``optimizer.step()``.
    - A gradient that is clipped before ``optimizer.step()`` is the raw gradient, and y_i is the mean of
      clipped gradients. ``max_norm`` clips the corrected gradient instead.
    - Steps that a ``torch.amp.GradScaler`` skips do not count.
    - ``step(closure)`` works if the optimizer calls the closure once; LBFGS is refused.

    Args:
        parameters: the parameters to correct, or pairs (name, parameter); frozen ones are skipped.
        max_norm: norm to which the corrected gradient of all parameters together is clipped; None: no
            clipping.

    Example:
        >>> import fadamgc, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> correction = fadamgc.Correction(model.parameters())
        >>> correction.attach(optimizer)
        >>> correction.start_round(None)                     # y = 0
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 2)).square().mean().backward()
        ...     _ = optimizer.step()
        >>> correction.finish_round(tracked=True).shape      # dy
        torch.Size([3])
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        max_norm: float | None = None,
    ) -> None:
        entries: list[Any] | None = None if isinstance(parameters, Tensor) else listed(parameters)
        if entries is None:
            got = type(parameters).__name__
            raise InputError(f"parameters of type {got} are not accepted; give model.parameters()")
        tensors = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in entries]
        for p in tensors:
            if not isinstance(p, Tensor) or not p.is_floating_point():
                kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
                raise InputError(
                    f"parameters contains a {kind}; give floating-point parameters: model.parameters()"
                )
        self._all: list[Tensor] = tensors
        self._parameters = self._trainable()
        if not self._parameters:
            raise InputError(
                f"none of {len(tensors)} parameters is trainable; give some that require gradients"
            )
        if any(hasattr(p, "to_local") for p in tensors):
            raise InputError("parameters contains a DTensor; sharded parameters (FSDP2) are not supported")
        if len({id(p) for p in tensors}) < len(tensors):
            raise InputError("parameters contains a parameter twice; give each one once")
        devices = {str(p.device) for p in self._parameters}
        if len(devices) > 1:
            raise InputError(
                f"parameters are on {len(devices)} devices, {', '.join(sorted(devices))}; make one "
                "Correction and one optimizer per device"
            )
        self._max_norm = None if max_norm is None else finite("max_norm", max_norm, 0, exclusive=True)
        self._sizes = [p.numel() for p in self._parameters]
        dtype = torch.float32
        for p in self._parameters:
            dtype = torch.promote_types(dtype, p.dtype)
        zero = torch.zeros(sum(self._sizes), dtype=dtype, device=self._parameters[0].device)
        self._y, self._y_i = zero, zero.clone()
        self._dy: Tensor | None = None  # the last round's dy, until ``sync`` or the next round
        self._g_sum: Tensor | None = None  # sum of the raw gradients; None outside a round
        self._steps = 0
        self._z: list[Tensor | None] = []  # y - y_i of each parameter; None where it is zero
        self._raw: list[Tensor | None] | None = None  # the raw gradients, while the optimizer steps
        self._corrected: list[tuple[Tensor | None, int]] = []  # each corrected .grad and its version
        self._optimizer: Optimizer | None = None
        self._members: list[Tensor] = []  # all parameters of the optimizer
        self._handles: list[Any] = []

    # Public properties.

    @property
    def y(self) -> Tensor:
        """The server's y: the vector of the last ``start_round``, or the result of the last ``sync``."""
        return self._y

    @property
    def y_i(self) -> Tensor:
        """The client's y_i: the mean raw gradient of the last tracked round."""
        return self._y_i

    @property
    def in_round(self) -> bool:
        """Whether a round was started and not finished."""
        return self._g_sum is not None

    @property
    def steps(self) -> int:
        """Number of optimizer steps in this round; skipped steps do not count."""
        return self._steps

    # The optimizer.

    def attach(self, optimizer: Optimizer) -> None:
        """Correct the gradients of an optimizer's steps from now on.

        If ``optimizer`` is a wrapper such as Accelerate's, the hooks go to the optimizer inside it. A copy of
        the optimizer has no hooks: attach another Correction to the copy. Parameters of the optimizer that
        the Correction does not have are not corrected. Do not add or remove parameters after ``attach``.
        """
        inner: Any = optimizer
        while isinstance(getattr(inner, "optimizer", None), Optimizer) and hasattr(inner, "param_groups"):
            inner = inner.optimizer
        if not isinstance(inner, Optimizer):
            raise InputError(f"optimizer={shown(optimizer)} is not a torch optimizer")
        if self._optimizer is not None:
            raise FadamgcError(
                f"this Correction is already attached to {type(self._optimizer).__name__}; call detach() "
                "first, or make one Correction per optimizer"
            )
        if isinstance(inner, LBFGS):
            raise InputError(
                "LBFGS evaluates several gradients per step, and its line search would need a corrected "
                "loss; attach an optimizer with one gradient per step"
            )
        members = _members(inner)
        missing = len(self._parameters) - len({id(p) for p in self._parameters} & set(map(id, members)))
        if missing:
            raise InputError(
                f"{missing} of {len(self._parameters)} parameters are not in the optimizer; make one "
                "Correction per optimizer, from that optimizer's parameters"
            )
        mine = {id(p) for p in self._parameters}
        others = _attached.setdefault(inner, weakref.WeakSet())
        if any(mine.intersection(map(id, other._parameters)) for other in others):
            raise FadamgcError(
                "another Correction of these parameters is attached to this optimizer; detach it"
            )
        others.add(self)
        self._optimizer, self._members = inner, members
        self._handles = [
            inner.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Remove the hooks; y, y_i and a round that was started stay."""
        if self._optimizer is None:
            raise FadamgcError("this Correction is not attached; call attach(optimizer) first")
        for handle in self._handles:
            handle.remove()
        _attached[self._optimizer].discard(self)
        self._optimizer, self._members, self._handles, self._raw = None, [], [], None

    # A round.

    @torch.no_grad()
    def start_round(self, y: Tensor | None) -> None:
        """Begin the local steps of a round.

        A round that was started and not finished is discarded, without effect on y_i.

        Args:
            y: the server's y, a vector of any floating-point type; None is zero.
        """
        self._check_parameters()
        if self._optimizer is None:
            raise FadamgcError("start_round() before attach(optimizer): no step would be corrected")
        self._check_members(self._optimizer)
        new = torch.zeros_like(self._y) if y is None else self._vector("y", y)
        if not torch.isfinite(new).all():
            raise InputError("y is not finite; the server added a dy that is not finite")
        self._undo_correction()
        self._y, self._dy = new, None
        self._g_sum, self._steps = torch.zeros_like(new), 0
        self._set_z()

    @torch.no_grad()
    def finish_round(self, tracked: bool = True) -> Tensor:
        """End the round and return dy = y_i new - y_i old; not tracked: y_i stays, and dy is zero.

        If a GradScaler has skipped all steps, y_i stays as well, with a warning.
        """
        self._check_parameters()
        if self._g_sum is None:
            raise FadamgcError("finish_round() outside a round; call start_round(y) first")
        if not isinstance(tracked, bool):
            raise not_accepted("tracked", tracked, "True or False")
        if self._optimizer is not None:
            self._check_members(self._optimizer)
        if self._steps == 0:
            warnings.warn("the round had no optimizer.step(), so y_i stays and dy is zero", stacklevel=2)
        self._undo_correction()
        new = self._y_i
        if tracked and self._steps:
            new = self._g_sum / self._steps
            if not torch.isfinite(new).all():
                raise FadamgcError(
                    f"the gradients of the round's {self._steps} steps are not finite; discard the round "
                    "with start_round(y), or keep y_i with finish_round(tracked=False)"
                )
        dy = new - self._y_i
        self._y_i, self._dy = new, dy
        self._g_sum, self._steps, self._z = None, 0, []
        return dy.clone()

    def _undo_correction(self) -> None:
        """Put the raw gradients back after a step that failed."""
        for p, raw, (corrected, _) in zip(self._parameters, self._raw or (), self._corrected, strict=False):
            if p.grad is corrected:
                p.grad = raw
        self._raw, self._corrected = None, []

    @torch.no_grad()
    def sync(self, group: Any = None) -> Tensor:
        """Average dy over the ranks of torch.distributed with one all-reduce, add it to y and return y.

        No server is needed then. All ranks take part in every round, each as one client, and all of them call
        ``sync`` after ``finish_round``. A rank that was not tracked adds zero.

        Args:
            group: the process group; None is the default group.
        """
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise FadamgcError(
                "sync() needs torch.distributed; call torch.distributed.init_process_group(...) first, or "
                "send dy to a server"
            )
        ranks = torch.distributed.get_world_size(group)
        if ranks < 1:
            raise FadamgcError(
                "sync(group): this rank is not in the group; call it on the group's ranks only"
            )
        if self._dy is None:
            raise FadamgcError("sync() without a finished round; call finish_round() first, then sync() once")
        total = self._dy.clone()
        torch.distributed.all_reduce(total, group=group)
        self._y = self._y + total / ranks
        self._dy = None
        return self._y

    # Files.

    def state_dict(self) -> dict[str, Any]:
        """Return y, y_i and the round so far, as copies; ``torch.save`` can store it."""
        tensors = {"y": self._y, "y_i": self._y_i, "dy": self._dy, "g_sum": self._g_sum}
        return {name: t if t is None else t.clone() for name, t in tensors.items()} | {"steps": self._steps}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` has returned, also in the middle of a round."""
        names = {"y", "y_i", "dy", "g_sum", "steps"}
        if not isinstance(state_dict, dict) or set(state_dict) != names:
            got = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
            raise InputError(f"state_dict={shown(got)} is not the state of a Correction: {sorted(names)}")
        steps = state_dict["steps"]
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise InputError(f"steps={shown(steps)} is not accepted; it must be a whole number >= 0")
        y, y_i = (self._vector(name, state_dict[name]) for name in ("y", "y_i"))
        dy, g_sum = (
            None if state_dict[name] is None else self._vector(name, state_dict[name])
            for name in ("dy", "g_sum")
        )
        for name, vector in {"y": y, "y_i": y_i, "dy": dy, "g_sum": g_sum}.items():
            if vector is not None and not torch.isfinite(vector).all():
                raise InputError(f"{name} of the state_dict is not finite; load another")
        if steps and g_sum is None:
            raise InputError(f"steps={steps} without g_sum is not the state of a Correction; load another")
        self._check_parameters()
        self._y, self._y_i, self._dy, self._g_sum, self._steps = y, y_i, dy, g_sum, steps
        self._raw, self._z = None, []
        if self.in_round:
            self._set_z()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of an optimizer has no hooks, so a copy of a Correction is not attached.
        return self.__dict__ | {
            **{"_optimizer": None, "_members": [], "_handles": []},
            **{"_raw": None, "_corrected": []},
        }

    # The hooks. Before the step: .grad = raw + z. After it: g_sum += raw, .grad = raw.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.in_round:
            raise FadamgcError("optimizer.step() outside a round; call start_round(y) first, or detach()")
        if sum(len(group["params"]) for group in optimizer.param_groups) != len(self._members):
            self._check_members(optimizer)
        if kwargs.get("grad_scaler") is not None:
            raise FadamgcError(
                f"{type(optimizer).__name__} takes the GradScaler itself, so its gradients are unknown; use "
                "an optimizer without the argument grad_scaler"
            )
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            if self._raw is None or self._failed(optimizer):
                self._correct(optimizer)
            return None
        if getattr(closure, "corrected_by", None) is self:  # a step() that calls the step() of its base class
            return None
        self._raw = None
        closure = self._with_correction(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _failed(self, optimizer: Optimizer) -> bool:
        """Whether the last step has failed, if a step begins before the last correction is undone.

        If it has not failed, a step() calls the step() of its base class, whose hooks run as well.
        """
        gradients = zip(self._parameters, self._corrected, strict=True)
        if all(p.grad is g and (g is None or g._version == version) for p, (g, version) in gradients):
            return False  # the gradients are corrected already
        if sum("step" in vars(cls) for cls in type(optimizer).__mro__[:-1] if cls is not Optimizer) > 1:
            raise FadamgcError(
                f"{type(optimizer).__name__}.step() changes gradients before it calls the step() of its base "
                "class, or an earlier step failed; start the round again, with start_round(y)"
            )
        return True

    def _with_correction(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def corrected() -> Any:
            if self._raw is not None:
                raise FadamgcError(
                    f"{type(optimizer).__name__} calls its closure more than once per step; attach an "
                    "optimizer with one gradient per step"
                )
            loss = closure()
            self._correct(optimizer)
            return loss

        corrected.corrected_by = self  # type: ignore[attr-defined]
        return corrected

    @torch.no_grad()
    def _correct(self, optimizer: Optimizer) -> None:
        self._raw, self._corrected = None, []
        self._check_parameters()
        for p in self._parameters:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise InputError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient of layout {p.grad.layout}; use "
                    "dense gradients, such as those of Embedding(sparse=False)"
                )
        # A fused optimizer receives scaled gradients, and skips the step itself.
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return
        raw = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        for p, z in zip(self._parameters, self._z, strict=True):
            if z is None:
                continue
            z = z.view_as(p) if scale is None else z.view_as(p) * scale
            if p.grad is None:
                p.grad = torch.empty_like(p).copy_(z)
            else:
                p.grad.add_(z)
        if self._max_norm is not None:
            max_norm = self._max_norm * (1.0 if scale is None else float(scale))
            torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)
        self._raw = raw
        self._corrected = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self._parameters]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self._raw is None or self._g_sum is None:  # skipped: the gradients were not finite
            return
        scale = getattr(optimizer, "grad_scale", None)
        for p, raw, g_sum in zip(self._parameters, self._raw, self._pieces(self._g_sum), strict=True):
            if raw is None:
                p.grad = None
                continue
            if scale is not None:
                raw.div_(scale)
            g_sum.view_as(p).add_(raw)
            if p.grad is None:  # some optimizers free the gradients in their step
                continue
            p.grad.copy_(raw)
        self._steps += 1
        self._raw, self._corrected = None, []

    # Helpers.

    def _trainable(self) -> list[Tensor]:
        return [p for p in self._all if p.requires_grad]

    def _check_parameters(self) -> None:
        now = self._trainable()
        sizes = [p.numel() for p in now]
        same = len(now) == len(self._parameters) and sizes == self._sizes
        if not same or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            raise FadamgcError(
                f"{len(now)} parameters with {sum(sizes)} numbers are trainable now, {len(self._parameters)} "
                f"with {sum(self._sizes)} were when the Correction was made; freeze and unfreeze parameters "
                "first, then make a new Correction"
            )
        for p in now:
            if p.device != self._y.device:
                raise FadamgcError(
                    f"a parameter is on {p.device}, but y_i is on {self._y.device}; move the model before "
                    "the Correction is made"
                )

    def _check_members(self, optimizer: Optimizer) -> None:
        now = _members(optimizer)
        if set(map(id, now)) != set(map(id, self._members)):
            raise FadamgcError(
                f"{type(optimizer).__name__} has {len(now)} parameters now, not the {len(self._members)} "
                "that it had at attach(): parameters were added or removed; make a new Correction, or call "
                "detach() and attach(optimizer) again to correct only this Correction's parameters"
            )

    def _vector(self, name: str, value: Any) -> Tensor:
        """Return a copy of a vector, of the type and on the device of y_i."""
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name}={shown(value)} is not a tensor; give a vector of {len(self._y)} numbers"
            )
        if value.shape != self._y.shape or not value.is_floating_point():
            raise InputError(
                f"{name} of shape {tuple(value.shape)} and type {value.dtype} does not fit; it must be a "
                f"vector of {len(self._y)} numbers of a floating-point type"
            )
        return value.detach().to(self._y.device, self._y.dtype, copy=True)

    def _pieces(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, self._sizes)

    def _set_z(self) -> None:
        self._z = [z if z.any() else None for z in self._pieces(self._y - self._y_i)]


def _members(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
