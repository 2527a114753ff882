"""Ready-made tasks."""

from __future__ import annotations

from typing import Any

__all__ = ["text"]


def __getattr__(name: str) -> Any:
    if name == "text":  # importing the text models takes time
        from fadamgc.tasks.text_classification import text

        return text
    raise AttributeError(f"module 'fadamgc.tasks' has no attribute {name!r}")
