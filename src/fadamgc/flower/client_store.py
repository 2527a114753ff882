"""A client's state in files of its node: replaced atomically, with a digest, by one process at a time."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fadamgc.bundle import has_bundle, read_bundle, write_bundle
from fadamgc.errors import CheckpointError, CheckpointInUseError, InputError
from fadamgc.files import lock, private_folder
from fadamgc.flower.protocol import RefusedError, Stamp, StoredState
from fadamgc.tree import from_names, named_leaves

BUNDLE = "state"


def check_experiment_name(experiment: str) -> None:
    """Refuse a name of an experiment that cannot be the name of a folder."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", experiment):
        raise InputError(
            f"experiment={experiment[:120]!r} is not accepted; it names a folder: at most 100 letters, "
            "digits, dots and dashes, a letter or digit first"
        )


class ClientStore:
    """The stored state of one client in one experiment, in the folder ``root/experiment/client-0``.

    The folder has the name of the experiment, not the number of Flower's run, so that a run that is submitted
    again resumes. The folder is private, because y_i is a mean of gradients.
    """

    def __init__(self, root: str | Path, experiment: str, client: int) -> None:
        check_experiment_name(experiment)
        self.experiment, self.client = experiment, client
        self.folder = Path(root).expanduser() / experiment / f"client-{client}"

    def load(self, like: tuple[Any, ...]) -> StoredState:
        """Return the stored state, which is empty before the first round; ``like`` is any client state."""
        if not has_bundle(self.folder, BUNDLE):
            return StoredState()
        content, tensors = read_bundle(self.folder, BUNDLE)
        experiment, client = content.get("experiment"), content.get("client")
        if (experiment, client) != (self.experiment, self.client):
            raise CheckpointError(
                f"{self.folder} has the state of client {client} of experiment {experiment!r}, not of "
                f"client {self.client} of {self.experiment!r}"
            )

        def state(prefix: str) -> Any:
            try:
                return from_names(like, tensors, prefix)
            except KeyError as error:
                raise CheckpointError(
                    f"{self.folder} has the state of another algorithm or of other codecs: it has no "
                    f"{error}; use another experiment, or remove this folder to restart this client"
                ) from None

        pending = content["pending"]
        return StoredState(
            generation=content["generation"],
            seen=Stamp(*content["seen"]),
            committed=Stamp(*content["committed"]),
            committed_state=state("state") if content["has_state"] else None,
            pending=None if pending is None else Stamp(*pending),
            pending_state=None if pending is None else state("next"),
        )

    def save(self, stored: StoredState) -> None:
        """Replace the stored state."""
        tensors: dict[str, Tensor] = {}
        for prefix, state in (("state", stored.committed_state), ("next", stored.pending_state)):
            if state is not None:
                tensors |= named_leaves(state, prefix)
        content = {
            "experiment": self.experiment,
            "client": self.client,
            "generation": stored.generation,
            "seen": list(stored.seen),
            "committed": list(stored.committed),
            "has_state": stored.committed_state is not None,
            "pending": None if stored.pending is None else list(stored.pending),
        }
        write_bundle(self.folder, BUNDLE, content, tensors, private=True)

    def locked(self, seconds: float = 60.0) -> ExitStack:
        """Lock the state in a ``with`` block; a second process that works for the same client waits.

        Raises:
            RefusedError: "busy", the first process still has the lock after ``seconds``.
        """
        private_folder(self.folder.parent)  # folders of earlier versions get these permissions, too
        private_folder(self.folder)
        try:
            return lock(self.folder, seconds)
        except CheckpointInUseError:
            raise RefusedError(
                "busy", f"client {self.client} is still at work on another request after {seconds:g} s"
            ) from None
