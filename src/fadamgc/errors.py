"""Everything that can go wrong by a user's hand, as exceptions that say what to do.

A message names the field, the value received and what is accepted. The command line prints the
message alone; a traceback there is a defect of this package.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

LONGEST_NAME = 100  # characters that are compared with known names


class FadamgcError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(FadamgcError, ValueError):
    """A setting, a data set or a model that cannot be used as given."""


class CheckpointError(FadamgcError):
    """A checkpoint or a saved run that is damaged, incomplete or of another experiment."""


class OtherRunError(CheckpointError):
    """A checkpoint of another run: its algorithm, its settings or its task differ."""


class CheckpointInUseError(CheckpointError):
    """A checkpoint folder that another run is using at this moment."""


class UnwritableError(CheckpointError):
    """A folder or a file that cannot be written, for want of room or of permission."""


class ClientError(FadamgcError):
    """The model or the loss failed on one client's data; the message names client, round and step."""


class NonFiniteError(FadamgcError):
    """A client's update was not finite, or the server's state after a round.

    Attributes:
        client: number of the client; None where all updates were finite and the server's state was not, or
            where no client was left.
        round: round in which it happened, counted from 1.
        step: local step in which it happened, counted from 1; None where a replay did not show it.
        what: what was not finite, or the whole message if ``client`` is None.
    """

    def __init__(self, client: int | None, round: int, step: int | None, what: str) -> None:
        self.client, self.round, self.step, self.what = client, round, step, what
        where = "at an unknown local step" if step is None else f"at local step {step}"
        super().__init__(
            what
            if client is None
            else f"client {client} produced a non-finite {what} in round {round}, {where}; "
            'lower eta_l, look at that client\'s data, or pass on_nonfinite="drop" to go on without it'
        )

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int | None, int, int | None, str]]:
        return type(self), (self.client, self.round, self.step, self.what)


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number that is neither too small nor too large, or an error that says so.

    >>> whole("rounds", 3, 1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name}={shown(value)} is not accepted; it must be a whole number >= {least}")
    if most is not None and int(value) > most:
        raise InputError(f"{name}={shown(value)} is not accepted; it must be a whole number <= {most}")
    return int(value)


def real(value: object) -> float | None:
    """A number as a float; None if the value is not a number, or too large for a float.

    >>> real(3), real("3"), real(10**400)
    (3.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def listed(values: Any) -> list[Any] | None:
    """Values as a list; None if they cannot be listed."""
    try:
        return list(values)
    except TypeError:
        return None


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxlong, self.maxother = 120, 60, 200

    def repr_int(self, x: int, level: int) -> str:
        """An integer; Python refuses to write out those of more than some thousand digits."""
        if x.bit_length() > 10_000:
            return f"<an integer of {x.bit_length()} bits>"
        return super().repr_int(x, level)


def shown(value: object) -> str:
    """A value as messages show it: its repr, cut where it is long.

    >>> len(shown("x" * 10**6))
    120
    """
    return _Shown().repr(value)


def cut(text: str, most: int = 300) -> str:
    """A text with its middle removed if it is longer than ``most`` characters.

    >>> cut("0123456789", most=7)
    '01...89'
    """
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'eta_l'?`` for an unknown name, empty if nothing is near.

    >>> nearest("eta_1", ["eta_l", "beta1"])
    "; did you mean 'eta_l'?"
    """
    close = difflib.get_close_matches(name[:LONGEST_NAME], list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def reason(error: Exception) -> str:
    """What an error of a model, a loss or torch says, cut where it is long, and what to do about some."""
    message = cut(str(error), 600)
    if "Expected more than 1 value per channel" in message:
        message += (
            "; BatchNorm needs at least 2 samples in a batch: give every client at least 2 samples "
            "(min_size=2 of a partition), choose local_steps or a batch_size that leaves no last batch of 1, "
            "or use GroupNorm or LayerNorm"
        )
    return message
