"""Read and write TOML; the standard library can only read it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from fadamgc.errors import InputError, cut, shown

DEEPEST = 20  # levels of tables and lists; a spec has three
INTEGERS = range(-(2**63), 2**63)  # all integers of TOML


def parse_toml(text: str) -> dict[str, Any]:
    """Read the tables of a TOML file."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not TOML: {cut(str(error))}") from None
    except ValueError as error:  # from Python: an integer of thousands of digits, a day that does not exist
        raise InputError(f"not TOML: a number or a date is not valid: {cut(str(error))}") from None
    except RecursionError:
        raise InputError("lists or tables are nested too deeply") from None


def frozen(value: Any, place: str = "", depth: int = 0) -> Any:
    """Turn lists into tuples on all levels; refuse integers that TOML does not have, and too many levels."""
    if depth > DEEPEST:
        raise InputError(f"{cut(place, 100)}: lists or tables are nested too deeply")
    if isinstance(value, dict):
        start = f"{place}." if place else ""
        return {key: frozen(item, start + key, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(frozen(item, place, depth + 1) for item in value)
    if isinstance(value, int) and value not in INTEGERS:
        number = f"{cut(place, 100)}={shown(value)}"
        raise InputError(f"{number} is not accepted; integers go from -2^63 to 2^63 - 1")
    return value


def flat(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of nested tables; dots join the keys.

    >>> dict(flat({"seed": 0, "data": {"alpha": 0.1}}))
    {'seed': 0, 'data.alpha': 0.1}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def toml_table(header: str, values: Mapping[str, Any]) -> str:
    """Return a table as TOML, with its header and without the keys that are None."""
    lines = [header] if header else []
    lines += [f"{_key(key)} = {toml_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """Return one value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {toml_value(v)}" for key, v in value.items() if v is not None)
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
