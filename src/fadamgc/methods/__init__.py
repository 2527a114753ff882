"""One file a method, and the registry that makes the rest of the package know it."""

from __future__ import annotations

import dataclasses
from typing import Any

from fadamgc.algorithm import Algorithm, AnyAlgorithm
from fadamgc.errors import InputError, nearest, shown
from fadamgc.methods.fa_nt import FANT, FANTLocal
from fadamgc.methods.fadamgc import FAdamGC
from fadamgc.methods.fedadam import FedAdam
from fadamgc.methods.fedams import FedAMS
from fadamgc.methods.fedavg import FedAvg
from fadamgc.methods.fedavg_m import FedAvgM
from fadamgc.methods.local_adam import LocalAdam
from fadamgc.methods.scaffold import Scaffold
from fadamgc.methods.scaffold_m import ScaffoldM

__all__ = [
    "FANT",
    "FANTLocal",
    "FAdamGC",
    "FedAMS",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "LocalAdam",
    "Scaffold",
    "ScaffoldM",
    "algorithm_class",
    "algorithm_name",
    "algorithms",
    "make_algorithm",
    "register",
]

_REGISTRY: dict[str, type[AnyAlgorithm]] = {
    "fadamgc": FAdamGC,
    "fa_nt": FANT,
    "fa_nt_local": FANTLocal,
    "local_adam": LocalAdam,
    "fedavg": FedAvg,
    "fedavg_m": FedAvgM,
    "scaffold": Scaffold,
    "scaffold_m": ScaffoldM,
    "fedadam": FedAdam,
    "fedams": FedAMS,
}


def algorithms() -> tuple[str, ...]:
    """Names of all registered algorithms."""
    return tuple(_REGISTRY)


def register(name: str, cls: type[AnyAlgorithm]) -> None:
    """Make a custom algorithm known by name in this process: to ``make_algorithm``, ``load_run`` and specs.

    The command line starts another process, which knows only the algorithms of this package.
    """
    if not name.isidentifier():
        raise InputError(f"name={name!r} is not accepted; it must be an identifier such as 'my_method'")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise InputError(f"cls={cls!r} is not a class of algorithms; derive it from fadamgc.Algorithm")
    if _REGISTRY.get(name, cls) is not cls:
        raise InputError(f"name={name!r} is taken by {_REGISTRY[name].__name__}; choose another")
    _REGISTRY[name] = cls


def algorithm_class(name: str) -> type[AnyAlgorithm]:
    """The class registered under a name."""
    if not isinstance(name, str) or name not in _REGISTRY:
        hint = nearest(name, _REGISTRY) if isinstance(name, str) else ""
        raise InputError(f"algorithm {shown(name)} is not known{hint}; known are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def algorithm_name(algorithm: AnyAlgorithm) -> str:
    """The name an algorithm is registered under, or its class name if it is not."""
    for name, cls in _REGISTRY.items():
        if type(algorithm) is cls:
            return name
    return type(algorithm).__name__


def make_algorithm(name: str, **settings: Any) -> AnyAlgorithm:
    """An algorithm by its registered name.

    >>> make_algorithm("fedavg", eta_l=0.5)
    FedAvg(eta_l=0.5, eta_g=1.0)
    """
    cls = algorithm_class(name)
    known = [field.name for field in dataclasses.fields(cls)]
    for key in settings:
        if key not in known:
            hint = nearest(key, known)
            raise InputError(f"{name} has no setting {shown(key)}{hint}; it has {', '.join(known)}")
    return cls(**settings)
