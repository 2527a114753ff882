"""The same algorithms in a real federation, on Flower (``pip install 'fadamgc[flower]'``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fadamgc.flower.clientapp import client_app
    from fadamgc.flower.serverapp import server_app
    from fadamgc.flower.strategy import Strategy

__all__ = ["Strategy", "client_app", "server_app"]

_WHERE = {"Strategy": "strategy", "client_app": "clientapp", "server_app": "serverapp"}


def __getattr__(name: str) -> Any:
    """Names that need Flower are imported when they are asked for: the protocol itself does without."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"fadamgc.flower.{_WHERE[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("flwr"):
            raise
        raise ModuleNotFoundError(
            "Flower is not installed; install it with: pip install 'fadamgc[flower]'", name=error.name
        ) from None
