"""The clients of a federation as the server knows them: sizes of their data, and keys of their nodes."""

from __future__ import annotations

from statistics import median_low

import numpy as np

from fadamgc.errors import InputError, not_accepted
from fadamgc.federation.settings import Settings
from fadamgc.flower.protocol import RefusedError


def check_above(name: str, limit: float, least: float) -> None:
    """Check that a limit is a number > ``least``."""
    if not limit > least:
        raise not_accepted(name, limit, f"a number > {least:g}")


class Members:
    """The n clients of a federation. If clients are weighted by size, a size must not change.

    ``max_samples`` and ``max_size_ratio`` are those of ``ServerOptions``, but infinite for no limit.

    Attributes:
        samples: number of samples of each client that has connected.
        keys: digest of the key of the node that each client is bound to.
    """

    def __init__(self, n: int, settings: Settings, max_samples: float, max_size_ratio: float) -> None:
        check_above("max_size_ratio", max_size_ratio, 1)
        self.n, self.settings, self.weighted = n, settings, settings.weights == "size"
        self.max_samples, self.max_size_ratio = max_samples, max_size_ratio
        self.samples: dict[int, int] = {}
        self.keys: dict[int, str] = {}

    def admit(self, client: int, samples: int, started: bool) -> None:
        """Accept the number of samples that a client reports, before or after a run has ``started``.

        Raises:
            RefusedError: there are too many samples, or another number than the weight was computed from.
        """

        def refusal(why: str) -> RefusedError:
            return RefusedError("samples", f"client {client} has {samples} samples, {why}")

        if samples > self.max_samples:
            raise refusal(f"more than max_samples={self.max_samples}")
        before = self.samples.get(client)
        if self.weighted and before not in (None, samples):
            raise refusal(
                f"and had {before}: with weights = 'size' the number must not change, or y would no longer "
                "be the mean. Reset all states (reset-states = true)"
            )
        self.samples[client] = samples
        if self.weighted and len(self.samples) == self.n and not started:
            largest = self.max_size_ratio * median_low(self.samples.values())
            for other in [i for i, size in self.samples.items() if size > largest]:
                del self.samples[other]
            if client not in self.samples:
                raise refusal(
                    f"more than {self.max_size_ratio:g} times the median; with weights = 'size' this client "
                    "would decide alone. Set max-size-ratio higher if the number is right"
                )

    def weights(self) -> list[float] | None:
        """Return the clients' weights; None if all are equal."""
        if self.weighted and len(self.samples) < self.n:
            raise InputError("weights='size' needs the sizes of all clients; wait until all have connected")
        return self.settings.weight_of(np.array([self.samples.get(i, 1) for i in range(self.n)]))

    def check_key(self, client: int, key: str) -> None:
        """Refuse a node without a key (""), or whose client or key is already bound to another one."""
        bound_key = self.keys.get(client)
        other = next((i for i, other_key in self.keys.items() if other_key == key and i != client), None)
        if not key:
            why = "clients are bound to the keys of their nodes (bind-clients = 'on'), and it shows no key"
        elif bound_key not in (None, key):
            why = f"that client is bound to key {bound_key[:16]}, not {key[:16]}"
        elif other is not None:
            why = f"its key {key[:16]} is bound to client {other}"
        else:
            return
        to_unbind = ", ".join(str(i) for i in (client, other) if i in self.keys)
        remedy = f"; if that is right, run once with unbind-clients = '{to_unbind}'" if to_unbind else ""
        raise RefusedError("key", f"it says that it is client {client}, but {why}{remedy}")

    def bind(self, client: int, key: str) -> None:
        """Accept a client only from this key from now on."""
        self.keys[client] = key
