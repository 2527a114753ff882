"""One file per algorithm, and the registry through which the rest of the package finds them.

To add an algorithm, write its file and import its class below, in one line. It is then known by the name of
its file to ``make_algorithm``, specs, Flower and the command line, and its class is exported by ``fadamgc``.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from fadamgc.algebra.compose import KINDS, NAMES
from fadamgc.algorithm import Algorithm, AnyAlgorithm
from fadamgc.errors import InputError, nearest, shown
from fadamgc.loading import load_object

# The order of these lines is the order of the algorithms in tables.
# isort: off
from fadamgc.methods.fadamgc import FAdamGC as FAdamGC
from fadamgc.methods.fa_nt import FANT as FANT
from fadamgc.methods.fa_nt_local import FANTLocal as FANTLocal
from fadamgc.methods.local_adam import LocalAdam as LocalAdam
from fadamgc.methods.fedavg import FedAvg as FedAvg
from fadamgc.methods.fedavg_m import FedAvgM as FedAvgM
from fadamgc.methods.scaffold import Scaffold as Scaffold
from fadamgc.methods.scaffold_m import ScaffoldM as ScaffoldM
from fadamgc.methods.fedadam import FedAdam as FedAdam
from fadamgc.methods.fedams import FedAMS as FedAMS
from fadamgc.methods.fedprox import FedProx as FedProx
from fadamgc.methods.fednova import FedNova as FedNova
from fadamgc.methods.server_momentum import ServerMomentum as ServerMomentum
from fadamgc.methods.fedadagrad import FedAdagrad as FedAdagrad
from fadamgc.methods.fedyogi import FedYogi as FedYogi
from fadamgc.methods.fedexp import FedExP as FedExP
from fadamgc.methods.fedacg import FedACG as FedACG
from fadamgc.methods.feddyn import FedDyn as FedDyn
from fadamgc.methods.feddc import FedDC as FedDC
from fadamgc.methods.scaffnew import Scaffnew as Scaffnew
from fadamgc.methods.scaffold_local import ScaffoldLocal as ScaffoldLocal
from fadamgc.methods.mimelite import MimeLite as MimeLite
from fadamgc.methods.fedlada import FedLADA as FedLADA
from fadamgc.methods.fedlalr import FedLALR as FedLALR
from fadamgc.methods.fedadamw import FedAdamW as FedAdamW
from fadamgc.methods.diloco import DiLoCo as DiLoCo
from fadamgc.methods.fedlion import FedLion as FedLion
from fadamgc.methods.fedmuon_sign import FedMuonSign as FedMuonSign
from fadamgc.methods.mtgc import MTGC as MTGC
from fadamgc.methods.mtgc_adam import MTGCAdam as MTGCAdam
from fadamgc.methods.fedkeel import FedKeel as FedKeel
from fadamgc.algebra.compose import Composed as Composed
# isort: on

log = logging.getLogger("fadamgc")

_REGISTRY: dict[str, type[AnyAlgorithm]] = {
    value.__module__.rpartition(".")[2]: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm
}

if not TYPE_CHECKING:  # type checkers see the imports above, and cannot follow a list that is computed
    __all__ = [*(cls.__name__ for cls in _REGISTRY.values()), "algorithms", "make_algorithm", "register"]


_REFERENCES: dict[type[Any], str] = {}  # classes that were loaded as "module:Class"
ENTRY_POINTS = "fadamgc.algorithms"  # the group in which a package can name its algorithms


def algorithms() -> tuple[str, ...]:
    """Return the names of all registered algorithms, and of those in the entry points of other packages.

    >>> algorithms()[:3]
    ('fadamgc', 'fa_nt', 'fa_nt_local')
    """
    _register_entry_points()
    return tuple(_REGISTRY)


@cache
def _register_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            register(entry.name, entry.load())
        except Exception as error:  # another package must not stop this one
            log.warning("the entry point %s = %s of %s is skipped: %s", *_described(entry), error)


def _described(entry: EntryPoint) -> tuple[str, str, str]:
    return entry.name, entry.value, "a package" if entry.dist is None else entry.dist.name


def register(name: str, cls: type[Any]) -> None:
    """Make a custom algorithm known by name in this process: to ``make_algorithm``, ``load_run`` and specs.

    Likewise a custom rule of a composition: a class of ``LocalRule``, ``Correction`` or ``ServerRule``. To
    make it known to the command ``fadamgc`` as well, call this function in a module and give that with
    ``--import my_module``, or name the class in an entry point of the group ``fadamgc.algorithms``. Without
    any registration, specs and the command know a class as ``"my_module:MyMethod"``.

    >>> import fadamgc
    >>> class MyAverage(fadamgc.FedAvg):
    ...     title = "My average"
    >>> register("my_average", MyAverage)
    >>> make_algorithm("my_average", eta_l=0.5)
    MyAverage(eta_l=0.5, eta_g=1.0)
    """
    if not name.isidentifier():
        raise InputError(f"name={name!r} is not accepted; it must be an identifier such as 'my_method'")
    kinds: dict[type[Any], dict[str, type[Any]]] = {Algorithm: _REGISTRY}
    kinds |= {base: NAMES[kind] for kind, base in KINDS.items()}
    registry = next((kinds[b] for b in kinds if isinstance(cls, type) and issubclass(cls, b)), None)
    if registry is None:
        bases = ", ".join(f"fadamgc.{kind}.{base.__name__}" for kind, base in KINDS.items())
        raise InputError(
            f"cls={shown(cls)} is not a class of algorithms; derive it from fadamgc.Algorithm, or a rule "
            f"of a composition from {bases}"
        )
    if registry.get(name, cls) is not cls:
        raise InputError(f"name={name!r} is taken by {registry[name].__name__}; choose another")
    registry[name] = cls


def algorithm_class(name: str) -> type[AnyAlgorithm]:
    """Return the class that is registered under a name, or the class "module:Class" or "file.py:Class"."""
    if isinstance(name, str) and ":" in name:
        cls = load_object(name)
        if not isinstance(cls, type) or not issubclass(cls, Algorithm):
            raise InputError(f"{name} is not a class of algorithms; derive it from fadamgc.Algorithm")
        if cls not in _REGISTRY.values():
            _REFERENCES[cls] = name
        return cls
    known = algorithms()
    if not isinstance(name, str) or name not in known:
        hint = nearest(name, known) if isinstance(name, str) else ""
        raise InputError(
            f"algorithm {shown(name)} is not known{hint}; known are {', '.join(known)}, and your own as "
            "'my_module:MyMethod' or 'my_file.py:MyMethod'"
        )
    return _REGISTRY[name]


def algorithm_name(algorithm: AnyAlgorithm) -> str:
    """Return the name that an algorithm is registered under or was loaded by, else that of its class."""
    for name, cls in _REGISTRY.items():
        if type(algorithm) is cls:
            return name
    return _REFERENCES.get(type(algorithm), type(algorithm).__name__)


def make_algorithm(name: str, **settings: Any) -> AnyAlgorithm:
    """Make an algorithm from its name (see ``algorithm_class``) and its hyperparameters.

    >>> make_algorithm("fedavg", eta_l=0.5)
    FedAvg(eta_l=0.5, eta_g=1.0)
    """
    cls = algorithm_class(name)
    known = cls.setting_names()
    for key in settings:
        if key not in known:
            hint = nearest(key, known)
            raise InputError(f"{name} has no setting {shown(key)}{hint}; it has {', '.join(known)}")
    return cls.make(**settings)
