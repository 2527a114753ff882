"""Exceptions for mistakes that a user can correct, and checks of values that raise them.

A message names the field, the value received and what is accepted. The command line prints only the
message; a traceback there is a defect of this package.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

LONGEST_NAME = 100  # characters that are compared with known names
INT64_MAX = 2**63 - 1


class FadamgcError(Exception):
    """Base class of all errors that this package raises on purpose.

    >>> import fadamgc
    >>> try:
    ...     fadamgc.FAdamGC(beta1=2)
    ... except fadamgc.FadamgcError as error:
    ...     print(error)
    FAdamGC.beta1=2 is not accepted; it must be a number with 0 <= value < 1
    """


class InputError(FadamgcError, ValueError):
    """A setting, a data set or a model that cannot be used.

    >>> import fadamgc
    >>> fadamgc.make_algorithm("fedavg", eta=0.1)
    Traceback (most recent call last):
    fadamgc.errors.InputError: fedavg has no setting 'eta'; did you mean 'eta_l'?; it has eta_l, eta_g
    """


class CheckpointError(FadamgcError):
    """A checkpoint or a saved run that is damaged, incomplete or from another experiment.

    >>> import fadamgc
    >>> fadamgc.load_run("a/folder/without/a/run")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fadamgc.errors.CheckpointError: ...
    """


class OtherRunError(CheckpointError):
    """A checkpoint from a run with another algorithm, other settings or another task.

    >>> import fadamgc, tempfile, torch
    >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
    >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fadamgc.simulate(fadamgc.FedAvg(), task, rounds=1, checkpoint=folder)
    ...     try:
    ...         fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=2, checkpoint=folder, resume=True)
    ...     except fadamgc.OtherRunError as error:
    ...         print("not resumed")
    not resumed
    """


class CheckpointInUseError(CheckpointError):
    """A checkpoint folder that another run is using.

    >>> import fadamgc, tempfile, torch
    >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
    >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
    >>> def again(end):  # a second run, while the first one is writing its checkpoint
    ...     fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, checkpoint=folder, resume=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, checkpoint=folder, callbacks=[again])
    ...     except fadamgc.CheckpointInUseError as error:
    ...         print("another run is writing there")
    another run is writing there
    """


class UnwritableError(CheckpointError):
    """A folder or a file that cannot be written: the disk is full, or a permission is missing."""


class ClientError(FadamgcError):
    """The model or the loss failed on one client's data; the message names client, round and step."""


class NonFiniteError(FadamgcError):
    """A client's update, or the server's state after a round, was not finite.

    Attributes:
        client: number of the client; None if the server's state was not finite although all updates were,
            or if no client was left.
        round: number of the round, from 1.
        step: number of the local step, from 1; None if repeating the round did not reproduce the error.
        what: name of the value that was not finite, or the whole message if ``client`` is None.

    Example:
        >>> import fadamgc, torch
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
        >>> try:
        ...     fadamgc.simulate(fadamgc.FedAvg(eta_l=1e30), task, rounds=5, local_steps=5, seed=0)
        ... except fadamgc.NonFiniteError as error:
        ...     print("round", error.round)
        round 1
    """

    def __init__(self, client: int | None, round: int, step: int | None, what: str) -> None:
        self.client, self.round, self.step, self.what = client, round, step, what
        message = what
        if client is not None:
            where = "at an unknown local step" if step is None else f"at local step {step}"
            message = (
                f"client {client} produced a non-finite {what} in round {round}, {where}; lower eta_l, "
                'look at that client\'s data, or continue without it: on_nonfinite="drop" (for methods that '
                "do not need all clients)"
            )
        super().__init__(message)

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int | None, int, int | None, str]]:
        return type(self), (self.client, self.round, self.step, self.what)


def not_accepted(name: str, value: object, accepted: str) -> InputError:
    """Return the error for a field whose value is not accepted.

    >>> not_accepted("rounds", 0, "a whole number >= 1")
    InputError('rounds=0 is not accepted; it must be a whole number >= 1')
    """
    return InputError(f"{name}={shown(value)} is not accepted; it must be {accepted}")


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most``; raise InputError for anything else.

    >>> whole("rounds", 3, 1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise not_accepted(name, value, f"a whole number >= {least}")
    if most is not None and int(value) > most:
        raise not_accepted(name, value, f"a whole number <= {most}")
    return int(value)


def counts(**values: object) -> None:
    """Check that every value is a whole number >= 1 that fits into 64 bits."""
    for name, value in values.items():
        whole(name, value, 1, INT64_MAX)


def finite(name: str, value: object, least: float, *, exclusive: bool = False) -> float:
    """Return a finite number >= ``least`` (> ``least`` if exclusive); raise InputError for anything else.

    >>> finite("noise", 0, 0)
    0.0
    """
    number = real(value)
    if number is None or not math.isfinite(number) or number < least or (exclusive and number == least):
        raise not_accepted(name, value, f"a finite number {'>' if exclusive else '>='} {least:g}")
    return number


def real(value: object) -> float | None:
    """Return a number as a float; None if the value is not a number or is too large for a float.

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
    """Return values as a list; None if they are not iterable."""
    try:
        return list(values)
    except TypeError:
        return None


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxlong, self.maxother = 120, 60, 200

    def repr_int(self, x: int, level: int) -> str:
        """Show an integer; Python refuses to print integers of several thousand digits."""
        if x.bit_length() > 10_000:
            return f"<an integer of {x.bit_length()} bits>"
        return super().repr_int(x, level)


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened if it is long.

    >>> len(shown("x" * 10**6))
    120
    """
    return _Shown().repr(value)


def cut(text: str, most: int = 300) -> str:
    """Return a text; if it is longer than ``most`` characters, "..." replaces its middle.

    >>> cut("0123456789", most=7)
    '01...89'
    """
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'eta_l'?`` for an unknown name; "" if no known name is similar.

    >>> nearest("eta_1", ["eta_l", "beta1"])
    "; did you mean 'eta_l'?"
    """
    close = difflib.get_close_matches(name[:LONGEST_NAME], list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def reason(error: Exception) -> str:
    """Return the message of an error of a model, a loss or torch: shortened, and with a remedy if known."""
    message = cut(str(error), 600)
    if "Expected more than 1 value per channel" in message:
        message += (
            "; BatchNorm needs at least 2 samples in a batch: give every client at least 2 samples "
            "(min_size=2 of a partition), choose local_steps or a batch_size that leaves no last batch of 1, "
            "or use GroupNorm or LayerNorm"
        )
    return message


def full_name(function: Any) -> str:
    """Return the module and the name of a function, as ``loading.load_object`` reads them."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
