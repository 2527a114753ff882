"""Plain values as TOML; the standard library reads it but does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_table(header: str, values: Mapping[str, Any]) -> str:
    """A table with its header, without the keys that have no value."""
    lines = [header] if header else []
    lines += [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
