"""Everything that can go wrong by a user's hand, as exceptions that say what to do.

A message names the field, the value received and what is accepted. The command line prints the
message alone; a traceback there is a defect of this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral


class FadamgcError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(FadamgcError, ValueError):
    """A setting, a data set or a model that cannot be used as given."""


class CheckpointError(FadamgcError):
    """A checkpoint or a saved run that is damaged, incomplete or of another experiment."""


class ClientError(FadamgcError):
    """The model or the loss failed on one client's data; the message names client, round and step."""


class NonFiniteError(FadamgcError):
    """A client's update was not finite.

    Attributes:
        client: number of the client.
        round: round in which it happened, counted from 1.
        step: local step in which it happened, counted from 1; None where a replay did not show it.
    """

    def __init__(self, client: int, round: int, step: int | None, what: str) -> None:
        self.client, self.round, self.step, self.what = client, round, step, what
        where = "at an unknown local step" if step is None else f"at local step {step}"
        super().__init__(
            f"client {client} produced a non-finite {what} in round {round}, {where}; "
            'lower eta_l, look at that client\'s data, or pass on_nonfinite="drop" to go on without it'
        )

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int, int, int | None, str]]:
        return type(self), (self.client, self.round, self.step, self.what)


def printable(text: object, limit: int = 200) -> str:
    """A text from elsewhere on one line: without control characters, and not longer than people read.

    >>> printable("no\\x1b[2J data\\n" + 10 * "!", limit=16)
    'no [2J data !!!!...'
    """
    start = str(text)[: limit + 1]
    clean = "".join(letter if letter.isprintable() else " " for letter in start)
    return clean if len(start) <= limit else f"{clean[:limit]}..."


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number that is neither too small nor too large, or an error that says so.

    >>> whole("rounds", 3, 1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name}={value!r} is not accepted; it must be a whole number >= {least}")
    if most is not None and int(value) > most:
        raise InputError(f"{name}={value!r} is not accepted; it must be a whole number <= {most}")
    return int(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'eta_l'?`` for an unknown name, empty if nothing is near.

    >>> nearest("eta_1", ["eta_l", "beta1"])
    "; did you mean 'eta_l'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
