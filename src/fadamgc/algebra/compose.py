"""A federated optimizer as a product: a local rule, a correction and a server rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algebra import correction as corrections
from fadamgc.algebra import local as local_rules
from fadamgc.algebra import server as server_rules
from fadamgc.algebra.correction import Correction, NoCorrection
from fadamgc.algebra.local import HOMES, LocalRule
from fadamgc.algebra.server import Average, ServerRule
from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.errors import InputError, first_line, nearest, shown
from fadamgc.hyperparameters import plain_value, with_schedules
from fadamgc.loading import load_object
from fadamgc.schedules import first_number
from fadamgc.tree import leaves, map_leaves


class Server(NamedTuple):
    x: Tensor  # the model
    moments: Any  # mean of the clients' shared moments
    correction: Any
    rule: Any  # state of the server rule


class Down(NamedTuple):
    x: Tensor
    moments: Any
    correction: Any


class Client(NamedTuple):
    moments: Any  # those that the client keeps
    correction: Any


class Local(NamedTuple):
    moments: Any
    correction: Any


class Up(NamedTuple):
    dx: Tensor
    moments: Any
    correction: Any


class Parts(NamedTuple):
    """The three factors of a composition."""

    local: LocalRule
    correction: Correction
    server: ServerRule


@dataclass(frozen=True)
class Composition(Algorithm[Server, Down, Client, Local, Up]):
    """An algorithm that is a product of a local rule, a correction and a server rule; abstract.

    A method that is a composition under a name of its own is a subclass whose ``parts`` are made from its
    hyperparameters.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.parts()
        _check_moments(parts.local)
        _check_parts(parts)
        _check_methods(parts)

    @abstractmethod
    def parts(self) -> Parts:
        """Return the factors."""

    @property
    def tracked_only(self) -> tuple[str, ...]:  # type: ignore[override]
        """The message of a correction that tracks is sent by tracked clients only."""
        return ("correction",) if self.parts().correction.tracks else ()

    @property
    def changes(self) -> dict[str, str]:  # type: ignore[override]
        """The changes that the correction sends."""
        changes = self.parts().correction.changes
        return {f"correction.{field}": f"correction.{kept}" for field, kept in changes.items()}

    @property
    def init_gradient(self) -> bool:
        """Whether the correction starts from gradients at the initial model."""
        return self.parts().correction.init_gradient

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        local, correction, server = self.parts()
        moments = _shared(local, local.start(x))
        return Server(x, moments, correction.init_server(x, g), server.start(x))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        local, correction, _ = self.parts()
        return Client(_at_home(local, local.start(x), "keep"), correction.init_client(x, g))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.moments, server.correction)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        local, correction, _ = self.parts()
        start = local.start(down.x)
        moments = {}
        for name, moment in start._asdict().items():
            home = getattr(local, name)
            if home == "keep":
                moment = getattr(client.moments, name)
            elif home == "share":
                moment = local.received(name, getattr(down.moments, name))
            moments[name] = moment
        return Local(type(start)(**moments), correction.begin(down, client.correction))

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        rule, correction, _ = self.parts()
        g_hat, state = correction.before(down, client.correction, local.correction, x, g)
        d, moments = rule.direction(local.moments, x, g_hat)
        d = correction.after(down, client.correction, local.correction, d)
        return x - rule.eta_l * d, Local(moments, state)

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        rule, correction, _ = self.parts()
        state, up = correction.finish(down, client.correction, local.correction, x, K, rule.eta_l, tracked)
        kept = _at_home(rule, local.moments, "keep")
        return Client(kept, state), Up(x - down.x, _shared(rule, local.moments), up)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        local, correction, rule = self.parts()
        D = total.dx / cohort.S
        x, state = rule.step(server.rule, server.x, D)
        return Server(
            x=x,
            moments=map_leaves(lambda moment: moment / cohort.S, total.moments),
            correction=correction.aggregate(server.correction, total.correction, D, cohort, local.eta_l),
            rule=state,
        )


def _at_home(rule: LocalRule, moments: Any, home: str) -> Any:
    """Return the moments whose home this is, and nothing in the place of the others."""
    at_home = (value if getattr(rule, name) == home else Empty() for name, value in moments._asdict().items())
    return type(moments)(*at_home)


def _shared(rule: LocalRule, moments: Any) -> Any:
    """Return what the server averages of the moments."""
    shared = {name: rule.shared(name, moment) for name, moment in moments._asdict().items()}
    return _at_home(rule, type(moments)(**shared), "share")


# Factors by name, for specs, files and messages.

NAMES: dict[str, dict[str, type[Any]]] = {
    "local": {
        cls.__name__.lower(): cls
        for cls in (
            *(local_rules.SGD, local_rules.Momentum, local_rules.Adam, local_rules.AdamW),
            *(local_rules.AdaGrad, local_rules.RMSProp, local_rules.Lion, local_rules.Sign),
        )
    },
    "correction": {
        cls.title: cls
        for cls in (
            *(NoCorrection, corrections.Pre, corrections.Post, corrections.Direction),
            *(corrections.PreDirection, corrections.Proximal),
        )
    },
    "server": {
        cls.__name__.lower(): cls
        for cls in (
            *(Average, server_rules.Momentum, server_rules.Nesterov, server_rules.Adam),
            *(server_rules.AMSGrad, server_rules.Yogi, server_rules.AdaGrad),
        )
    },
}
KINDS: dict[str, type[Any]] = {"local": LocalRule, "correction": Correction, "server": ServerRule}
REFERENCES: dict[type[Any], str] = {}  # classes that were loaded as "module:Class"
STEP_SIZES = {"eta_l": "local", "eta_g": "server"}  # the factor that has each step size


@dataclass(frozen=True)
class Composed(Composition):
    """A federated optimizer that is composed of a local rule, a correction and a server rule.

        g_hat = the corrected gradient                   "pre": g + y - y_i
        d     = the local rule's direction for g_hat
        x_i   = x_i - eta_l (the corrected d)            "post": d + y - y_i
                                                         "direction": alpha d + (1 - alpha) G
        D     = mean(x_i - x)                            over the S sampled clients
        x     = the server rule's step from x along D

    ``fadamgc.compose`` makes one, and explains the arguments.

    >>> import fadamgc
    >>> composed = fadamgc.Composed(fadamgc.local.Lion(), fadamgc.correction.Pre(), fadamgc.server.Nesterov())
    >>> composed.title
    'Lion (m reset) x pre x Nesterov'
    """

    local: LocalRule = local_rules.SGD()
    correction: Correction = NoCorrection()
    server: ServerRule = Average()

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if isinstance(value, type):
                raise InputError(f"{name}={value.__name__} is a class; make an instance: {value.__name__}()")
            if not isinstance(value, kind):
                known = ", ".join(f"fadamgc.{name}.{cls.__name__}" for cls in NAMES[name].values())
                raise InputError(f"{name}={shown(value)} is not a {kind.__name__}; there are {known}")
        super().__post_init__()

    @property
    def title(self) -> str:  # type: ignore[override]
        """The factors, such as ``AMSGrad (m reset, v keep) x pre x Average``."""
        return _title(self.parts())

    @property
    def cites(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the factors cite."""
        return tuple(dict.fromkeys(key for part in self.parts() for key in part.cites))

    @property
    def eta_l(self) -> float:
        """The local step size."""
        return self.local.eta_l

    @property
    def eta_g(self) -> float:
        """The global step size."""
        return self.server.eta_g

    def parts(self) -> Parts:
        return Parts(self.local, self.correction, self.server)

    def replace(self, **changes: Any) -> Composed:
        """Return the composition with other factors, or with other values of ``eta_l`` and ``eta_g``."""
        for name in changes:
            if name not in self.setting_names():
                raise InputError(f"a composition has no {name!r}{nearest(name, self.setting_names())}")
        changed = replace(self, **{name: changes[name] for name in KINDS if name in changes})
        if "alpha" in changes:
            changed = compose(changed.local, changed.correction, changed.server, changes["alpha"])
        for name, factor in STEP_SIZES.items():
            if name in changes:
                rule = replace(getattr(changed, factor), **{name: changes[name]})
                changed = replace(changed, **{factor: rule})
        return changed

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the factors, and the numbers that ``make`` puts into them."""
        return (*KINDS, *STEP_SIZES, "alpha")

    @classmethod
    def make(cls, **settings: Any) -> Composed:
        """Make a composition from plain data: a factor is a name, or a table with the name as ``rule``."""
        factors = {name: factor(name, settings[name]) for name in KINDS if name in settings}
        composed = compose(**factors, alpha=settings.get("alpha"))
        return composed.replace(**{name: settings[name] for name in STEP_SIZES if name in settings})

    def plain(self) -> dict[str, Any]:
        """Return the factors as tables, with the names of their rules; the inverse of ``make``."""
        return {name: rule_table(name, getattr(self, name)) for name in KINDS}


def compose(
    local: LocalRule = Composed.local,
    correction: Correction | str = "none",
    server: ServerRule = Composed.server,
    alpha: float | None = None,
) -> Composed:
    """Compose a federated optimizer from a local rule, a correction and a server rule.

    Args:
        local: how clients step, one of ``fadamgc.local``.
        correction: "none", "pre" (gradient correction, before the moments), "post" (naive tracking, after
            them), "direction" (FedCM's global direction), "pre+direction", or one of ``fadamgc.correction``.
        server: how the server moves the model, one of ``fadamgc.server``.
        alpha: weight of a client's own direction, for the corrections with a global direction (default 0.1).

    Returns:
        An algorithm like any other.

    Example:
        >>> import fadamgc
        >>> local = fadamgc.local.Adam(eta_l=1e-3, amsgrad=True, m="reset", v="keep")
        >>> fadamgc.compose(local=local, correction="pre").title      # this is FAdamGC
        'AMSGrad (m reset, v keep) x pre x Average'
    """
    composed = Composed(
        local=local,
        correction=factor("correction", correction),
        server=server,
    )
    if alpha is None:
        return composed
    if not hasattr(composed.correction, "alpha"):
        name = composed.correction.title
        raise InputError(f"alpha={shown(alpha)} is not accepted: correction={name!r} has no alpha")
    changed: Any = replace(composed.correction, alpha=alpha)  # type: ignore[call-arg]
    return replace(composed, correction=changed)


def factor(kind: str, value: Any) -> Any:
    """Return a factor from its name, or from a table with its name as ``rule`` and its fields."""
    if not isinstance(value, (str, Mapping)):
        return value
    table = {"rule": value} if isinstance(value, str) else dict(value)
    name = table.pop("rule", None)
    known = NAMES[kind]
    if isinstance(name, str) and ":" in name:  # a class of the user's own
        cls = load_object(name)
        if not isinstance(cls, type) or not issubclass(cls, KINDS[kind]):
            raise InputError(f"{name} is not a class of {KINDS[kind].__name__}")
        REFERENCES[cls] = name
        known = {**known, name: cls}
    if not isinstance(name, str) or name not in known:
        hint = nearest(name, known) if isinstance(name, str) else ""
        problem = "needs the key 'rule'" if name is None else f"rule {shown(name)} is not known{hint}"
        raise InputError(
            f"{kind} {problem}; known are {', '.join(known)}, and your own as 'my_module:MyRule'"
        )
    names = [field.name for field in fields(known[name])]
    for key in table:
        if key not in names:
            key = str(key)
            has = f"it has {', '.join(names)}" if names else "it has none"
            raise InputError(f"{kind} rule {name} has no setting {shown(key)}{nearest(key, names)}; {has}")
    return known[name](**table)


def rule_table(kind: str, rule: Any) -> dict[str, Any]:
    """Return a factor as a table with its name as ``rule`` and its fields."""
    default = REFERENCES.get(type(rule), type(rule).__name__)
    name = next((name for name, cls in NAMES[kind].items() if type(rule) is cls), default)
    return {"rule": name} | {field.name: plain_value(getattr(rule, field.name)) for field in fields(rule)}


def _check_moments(local: LocalRule) -> None:
    """Refuse a local rule that does not say where its moments live between rounds."""
    moments = local.start(torch.zeros(1))
    rule = type(local).__name__
    if not hasattr(moments, "_fields"):
        raise InputError(f"{rule}.start() returns {shown(moments)}; it must be a NamedTuple of moments")
    for name in moments._fields:
        home = getattr(local, name, None)
        if home not in HOMES:
            raise InputError(
                f"{rule}.{name}={shown(home)} is not accepted; the moment {name!r} needs a field that "
                "says where it lives between rounds: 'reset', 'keep' or 'share'"
            )


def _check_parts(parts: Parts) -> None:
    """Refuse a product that makes no sense."""
    local, correction, server = parts
    homes = {name: getattr(local, name) for name in local.start(torch.zeros(1))._fields}
    shared = [name for name, home in homes.items() if home == "share"]
    if shared and not correction.shares_moments:
        raise InputError(
            f"correction={correction.title!r} with {shared[0]}='share' is not accepted: it tracks the "
            "directions of each client, which the mean of all clients' moments changes; "
            f"use {shared[0]}='keep', or correction='pre'"
        )
    if correction.needs_average and not isinstance(server, Average):
        raise InputError(
            f"correction={correction.title!r} with server={server.title} is not accepted: G is the mean "
            "direction along which the server has moved; use server=fadamgc.server.Average()"
        )


def _check_methods(parts: Parts) -> None:
    """Refuse rules that do not return what the others need, by one trial step of each."""
    x, g = torch.full((3,), 0.5), torch.ones(3)
    local, correction, server = parts
    local, server = with_schedules(local, first_number), with_schedules(server, first_number)
    correction = with_schedules(correction, first_number)
    moments, state = local.start(x), server.start(x)
    _try(local.direction, (moments, x, g), (x, moments), "the direction, a vector like x, and new moments")
    _try(server.step, (state, x, g), (x, state), "the new x and the new state")

    start = g if correction.init_gradient else None
    client, mine = correction.init_client(x, start), correction.init_server(x, start)
    down = Down(x, Empty(), mine)
    steps = correction.begin(down, client)
    before = (down, client, steps, x, 2 * g)
    wanted = "the corrected gradient, a vector like x, and the new state"
    _, steps = _try(correction.before, before, (x, steps), wanted)
    _try(correction.after, (down, client, steps, g), x, "the corrected direction, a vector like x")
    finish, wanted = (down, client, steps, x - g, 1, local.eta_l), "the client's new state and its message"
    _, up = _try(correction.finish, (*finish, True), (client, None), wanted)
    _, untracked = _try(correction.finish, (*finish, False), (client, up), wanted)
    if correction.tracks and any(leaf.any() for leaf in leaves(untracked)):
        raise InputError(
            f"{type(correction).__name__}.finish returns a message that is not zero with tracked=False; only "
            "tracked clients send the message of a correction that tracks: keep the client's state with "
            "fadamgc.rules.select(tracked, new, old)"
        )
    cohort = Cohort(n=1, S=1, K=1, t=1)
    _try(correction.aggregate, (mine, up, g, cohort, local.eta_l), mine, "the server's new state")


def _try(method: Any, arguments: tuple[Any, ...], like: Any, wanted: str) -> Any:
    """Call a method of a rule and check its result; a part that is like None may be anything."""
    name = f"{type(method.__self__).__name__}.{method.__name__} must return {wanted}"
    try:
        result = method(*arguments)
        pairs = zip(result, like, strict=True) if type(like) is tuple else [(result, like)]
        alike = all(other is None or _kind(part) == _kind(other) for part, other in pairs)
    except Exception as error:
        raise InputError(f"{name}; it failed: {first_line(error)}") from error
    if not alike:
        raise InputError(f"{name}, of the same types and shapes as before")
    return result


def _kind(state: Any) -> tuple[type[Any], list[torch.Size]]:
    return type(state), [tensor.shape for tensor in leaves(state)]


def _title(parts: Parts) -> str:
    local, correction, server = parts
    homes = [f"{name} {getattr(local, name)}" for name in local.start(torch.zeros(1))._fields]
    moments = f" ({', '.join(homes)})" if homes else ""
    return f"{local.title}{moments} x {correction.title or type(correction).__name__} x {server.title}"
