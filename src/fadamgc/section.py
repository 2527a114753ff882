"""Tables of a TOML file as checked, immutable objects; error messages name the table, key and value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fadamgc.errors import InputError, cut, nearest, shown
from fadamgc.escape import UNPRINTABLE
from fadamgc.toml import toml_value


class Section(BaseModel):
    """A table: immutable, without unknown keys, without silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], place: str) -> Self:
        """Check a table whose lists are tuples; ``place`` is the table's name in error messages."""
        for key in table:
            if key not in cls.model_fields:
                hint = nearest(key, cls.model_fields) or f"; it has {', '.join(cls.model_fields)}"
                raise InputError(f"{place} has no key {shown(key)}{hint}")
        try:
            return cls(**table)
        except ValidationError as error:
            problems: dict[str, Any] = {}  # the most specific error of each key
            for problem in error.errors():
                key = str(problem["loc"][0]) if problem["loc"] else ""
                if key not in problems or len(problem["loc"]) > len(problems[key]["loc"]):
                    problems[key] = problem
            lines = [f"{place} {_sentence(problem)}".strip() for problem in problems.values()]
            raise InputError("\n".join(lines)) from None


# What is accepted, by pydantic's type of error. The names in braces come from the error's context.
ACCEPTED = {
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "string_type": "it must be a string",
    "tuple_type": "it must be a list",
    "literal_error": "it must be {expected}",
    "greater_than": "it must be > {gt}",
    "greater_than_equal": "it must be >= {ge}",
    "less_than": "it must be < {lt}",
    "less_than_equal": "it must be <= {le}",
    "too_short": "it must not be empty",
    "string_too_short": "it must not be empty",
    "too_long": "it must have at most {max_length} entries",
    "missing": "it has too few entries",
    "value_error": "{error}",
}


def _sentence(problem: Mapping[str, Any]) -> str:
    """Return a message for one error of pydantic."""
    kind, location, value = problem["type"], problem["loc"], problem["input"]
    accepted = ACCEPTED[kind].format_map(problem.get("ctx", {})) if kind in ACCEPTED else problem["msg"]
    if not location:  # the error is about the whole table
        return str(accepted)
    if kind == "missing" and len(location) == 1:
        return f"needs the key '{location[0]}'"
    if kind == "literal_error" and isinstance(value, str):
        accepted += nearest(value, re.findall(r"'(.*?)'", problem["ctx"]["expected"]))
    entries = [f"[{part}]" for part in location[1:] if isinstance(part, int)]  # strings name types of a union
    name = f"{location[0]}{''.join(entries)}"
    return f"{cut(name, 100)}={cut(toml_value(value), 120)} is not accepted; {accepted}"


def _distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(values)) != len(values):
        raise ValueError("each may be given once")
    return values


def _one_line(text: str) -> str:
    if UNPRINTABLE.search(text):
        raise ValueError("it must have no control characters, such as line breaks")
    return text


Count: TypeAlias = Annotated[int, Field(ge=1, le=2**53)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Line: TypeAlias = Annotated[str, AfterValidator(_one_line)]
Reference: TypeAlias = Annotated[str, Field(pattern=r"^.+:\w+$")]  # of a function, see loading.load_object
Seeds: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1), AfterValidator(_distinct)
]
StepSizes: TypeAlias = Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_distinct)]
