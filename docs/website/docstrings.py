"""An extension of griffe, which reads docstrings for the site: examples become blocks of code."""

from __future__ import annotations

from typing import Any

import griffe

from website.reference import fenced


class Examples(griffe.Extension):
    """Marks the examples of every docstring as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Change the docstring of an object when it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
