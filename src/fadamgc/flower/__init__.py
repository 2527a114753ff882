"""The same algorithms in a real federation, on Flower (``pip install 'fadamgc[flower]'``)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fadamgc.flower.clientapp import client_app
    from fadamgc.flower.serverapp import server_app
    from fadamgc.flower.strategy import Strategy

__all__ = ["Strategy", "client_app", "server_app"]

_MODULES = {"Strategy": "strategy", "client_app": "clientapp", "server_app": "serverapp"}


def __getattr__(name: str) -> Any:
    """Import names that need Flower on first use, because the protocol works without Flower."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"fadamgc.flower.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("flwr"):
            raise
        raise ModuleNotFoundError(
            "Flower is not installed; install it with: pip install 'fadamgc[flower]'", name=error.name
        ) from None
