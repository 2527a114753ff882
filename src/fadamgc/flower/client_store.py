"""A client's state in a file of its node: replaced in one step, with a digest, for one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fadamgc.bundle import has_bundle, read_bundle, write_bundle
from fadamgc.errors import CheckpointError, CheckpointInUseError
from fadamgc.files import lock, private_folder
from fadamgc.flower.protocol import Kept, RefusedError, Stamp, check_name

NAME = "state"
StateT = TypeVar("StateT", bound=tuple[Tensor, ...])


class Keeper:
    """Where one client of one experiment keeps its state.

    Args:
        root: the node's folder for states; experiments and clients have folders in it.
        experiment: name of the experiment. Not the number of a run: a run that is submitted again goes on.
        client: number of the client.
    """

    def __init__(self, root: str | Path, experiment: str, client: int) -> None:
        check_name(experiment)
        self.experiment, self.client = experiment, client
        self.folder = Path(root).expanduser() / experiment / f"client-{client}"

    def load(self, kind: type[StateT]) -> Kept:
        """What is kept; nothing before the first round."""
        if not has_bundle(self.folder, NAME):
            return Kept()
        content, tensors = read_bundle(self.folder, NAME)
        there = content.get("experiment"), content.get("client")
        if there != (self.experiment, self.client):
            raise CheckpointError(
                f"{self.folder} holds the state of client {there[1]} of experiment {there[0]!r}, not of "
                f"client {self.client} of {self.experiment!r}"
            )

        fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]

        def state(prefix: str, has: bool) -> Any:
            if not has:
                return None
            try:
                return kind(*(tensors[f"{prefix}.{field}"] for field in fields))
            except KeyError as error:
                raise CheckpointError(
                    f"{self.folder} holds the state of another algorithm: it has no {error}"
                ) from None

        pending = content["pending"]
        return Kept(
            generation=content["generation"],
            seen=Stamp(*content["seen"]),
            committed=Stamp(*content["committed"]),
            state=state("state", content["has_state"]),
            pending=None if pending is None else Stamp(*pending),
            next=state("next", pending is not None),
        )

    def save(self, kept: Kept) -> None:
        """Replace what is kept."""
        tensors: dict[str, Tensor] = {}
        for prefix, state in (("state", kept.state), ("next", kept.next)):
            if state is not None:
                tensors |= {f"{prefix}.{field}": getattr(state, field) for field in state._fields}
        content = {
            "experiment": self.experiment,
            "client": self.client,
            "generation": kept.generation,
            "seen": list(kept.seen),
            "committed": list(kept.committed),
            "has_state": kept.state is not None,
            "pending": None if kept.pending is None else list(kept.pending),
        }
        self._tighten()
        write_bundle(self.folder, NAME, content, tensors, private=True)

    @contextmanager
    def only_one(self, seconds: float = 60.0) -> Iterator[None]:
        """Hold the state: of two processes that work for the same client, the second waits."""
        self._tighten()
        try:
            state_lock = lock(self.folder, seconds)
        except CheckpointInUseError:
            raise RefusedError(
                "busy", f"client {self.client} is still at work on another request after {seconds:g} s"
            ) from None
        with state_lock:
            yield

    def _tighten(self) -> None:
        """Keep others out, also of a folder that an earlier version has made: y_i is a mean of gradients."""
        private_folder(self.folder.parent)
        private_folder(self.folder)
