"""The verdict on a method, for people and for programs."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fadamgc.algorithm import Algorithm, AnyAlgorithm
from fadamgc.errors import InputError, first_line, nearest
from fadamgc.judge.checks import Check, run_checks
from fadamgc.judge.digits import DigitsRow, compare_on_digits
from fadamgc.judge.invariants import Invariant, invariants
from fadamgc.judge.quadratics import CLIENTS, SAMPLED, Exactness, exactness
from fadamgc.loading import load_object
from fadamgc.methods import algorithms, make_algorithm

Say = Callable[[str], object]


@dataclass(frozen=True)
class Verdict:
    """The results of all checks and comparisons of a method."""

    method: str
    settings: dict[str, Any]
    checks: list[Check]
    invariants: list[Invariant]  # for information: a sound method need not have all
    quadratics: list[Exactness]
    digits: list[DigitsRow]

    @property
    def sound(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        if not self.sound:
            failed = [check.name for check in self.checks if not check.passed]
            return f"{self.method} is not sound: {len(failed)} checks failed ({', '.join(failed)})"
        parts = [f"{self.method} passed all {len(self.checks)} checks"]
        if self.quadratics:
            parts += [
                f"{result.verdict} with {result.sampled} of {CLIENTS} clients" for result in self.quadratics
            ]
        if self.digits:
            mine, *others = self.digits
            rank = 1 + sum(_order(other) < _order(mine) for other in others)
            parts.append(f"place {rank} of {len(self.digits)} on digits")
        return "; ".join(parts)

    def to_json(self) -> str:
        """Return the verdict as JSON."""
        return json.dumps(
            _without_nonfinite(
                {
                    "method": self.method,
                    "settings": self.settings,
                    "sound": self.sound,
                    "summary": self.summary,
                    "checks": [check._asdict() for check in self.checks],
                    "invariants": [invariant._asdict() for invariant in self.invariants],
                    "quadratics": [
                        result._asdict() | {"verdict": result.verdict} for result in self.quadratics
                    ],
                    "digits": [row._asdict() for row in self.digits],
                }
            ),
            indent=1,
            allow_nan=False,
        )

    def show(self, console: Console) -> None:
        """Print the verdict as tables."""
        checks = Table("check", "result", "detail", title=escape(self.method), title_justify="left")
        for check in self.checks:
            answer = "[green]yes[/]" if check.passed else "[red]NO[/]"
            checks.add_row(check.name, answer, escape(check.detail))
        console.print(checks)
        if self.invariants:
            table = Table("invariant", "holds", "detail", title="Invariants", title_justify="left")
            for invariant in self.invariants:
                holds = "-" if invariant.holds is None else "yes" if invariant.holds else "no"
                table.add_row(escape(invariant.name), holds, escape(invariant.detail))
            console.print(table)
        if self.quadratics:
            title = "Quadratics: squared gradient norm of the mean at the end"
            table = Table(
                "clients per round", "norm", "best eta_l", "verdict", title=title, title_justify="left"
            )
            for result in self.quadratics:
                clients = f"{result.sampled} of {CLIENTS}"
                table.add_row(clients, f"{result.norm:.1e}", f"{result.eta_l:g}", result.verdict)
            console.print(table)
        if self.digits:
            title = "Digits: tuned on held-out data, next to the preset's methods"
            table = Table(title=title, title_justify="left")
            for name in ("method", "rounds to 90 %", "final accuracy", "MB per round", "step sizes"):
                table.add_column(name, justify="left" if name in ("method", "step sizes") else "right")
            for row in sorted(self.digits, key=_order):
                rounds = "never" if row.rounds is None else f"{row.rounds:.1f}"
                note = "" if row.reached in (0, row.seeds) else f" ({row.reached}/{row.seeds})"
                steps = ", ".join(f"{key}={value:g}" for key, value in row.step_sizes.items())
                style = "bold" if row is self.digits[0] else ""
                table.add_row(
                    escape(row.method), rounds + note, f"{row.final:.1%}", f"{row.mb:.3f}", steps, style=style
                )
            console.print(table)
            for note in sorted({row.note for row in self.digits if row.note}):
                console.print(note, markup=False, highlight=False, soft_wrap=True)
        console.print(self.summary, markup=False, highlight=False, soft_wrap=True)


def _without_nonfinite(value: Any) -> Any:
    """Return plain data with null in the place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _order(row: DigitsRow) -> tuple[float, float, float]:
    rounds = float("inf") if row.rounds is None else row.rounds
    return -row.reached, rounds, -row.final


def find_method(reference: str) -> AnyAlgorithm:
    """Return a method by its registered name, or from ``my_file.py:MyMethod`` or ``my_module:MyMethod``."""
    if ":" not in reference:
        if reference not in algorithms():
            raise InputError(
                f"{reference!r} is not a registered method{nearest(reference, algorithms())}; for one of "
                "your own write my_file.py:MyMethod"
            )
        return make_algorithm(reference)
    found = load_object(reference)
    if inspect.isfunction(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{reference} is a function and failed: {type(error).__name__}: {first_line(error)}; it is "
                "called without arguments and must return a method"
            ) from error
    if isinstance(found, type) and issubclass(found, Algorithm):
        missing = inspect.isabstract(found) and sorted(found.__abstractmethods__)
        if missing:
            raise InputError(f"{reference} does not define {', '.join(missing)}")
        try:
            return found()
        except TypeError as error:
            raise InputError(
                f"{reference} cannot be made without arguments ({first_line(error)}); give every "
                "hyperparameter a default, or name a function that returns the method"
            ) from None
    if isinstance(found, Algorithm):
        return found
    raise InputError(
        f"{reference} is {type(found).__name__}; it must be a class derived from fadamgc.Algorithm"
    )


def judge(algorithm: AnyAlgorithm, quick: bool = False, say: Say = lambda _: None) -> Verdict:
    """Judge a method: checks, invariants, exactness on quadratics, and a tuned comparison on digits.

    A method that fails a check is not run any further; ``quick`` ends after the invariants.
    """
    say("checking the contract, executors, resume, bytes ...")
    checks = list(run_checks(algorithm))
    sound = all(check.passed for check in checks)
    holding = list(invariants(algorithm)) if sound else []
    results: list[Exactness] = []
    digits: list[DigitsRow] = []
    if sound and not quick:
        stage = "runs on quadratics"
        try:
            for sampled in (CLIENTS,) if algorithm.full_participation else (CLIENTS, SAMPLED):
                say(f"quadratics with {sampled} of {CLIENTS} clients ...")
                results.append(exactness(algorithm, sampled))
            stage = "runs on digits"
            say("digits: tuning, then the comparison ...")
            digits = compare_on_digits(algorithm)
        except (Exception, SystemExit) as error:
            checks.append(Check(stage, False, f"{type(error).__name__}: {first_line(error)}"))
    return Verdict(algorithm.title, algorithm.plain(), checks, holding, results, digits)
