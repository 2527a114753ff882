"""A federation without a network, for tests that kill, lose and delay."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import torch

import fadamgc
from fadamgc.federation.settings import Settings
from fadamgc.flower.client_round import LocalClient, handle_request
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.config import ServerConfig, ServerOptions
from fadamgc.flower.coordinator import Coordinator
from fadamgc.flower.protocol import NEVER
from problems import class_task

SIZES = (6, 20, 11)
OPTIONS = {field.name for field in fields(ServerOptions)}
SETTINGS = {"sampled": 2, "tracked": 1, "local_steps": 3, "batch_size": 4, "seed": 5}


class Killed(Exception):  # noqa: N818
    """The process is gone."""


class World:
    """A server and clients that can be killed, joined by wires that lose, repeat and delay."""

    def __init__(self, folder, algo=None, dtype=torch.float64, model=None, **options):
        self.folder = folder
        self.algo = algo or fadamgc.FAdamGC(eta_l=0.05)
        self.task = class_task(sizes=options.pop("sizes", SIZES), model=model)
        self.options = {key: options.pop(key) for key in OPTIONS & options.keys()}
        self.settings = Settings(rounds=options.pop("rounds", 4), dtype=dtype, **SETTINGS | options)
        model = self.task.model.to(dtype)
        self.parties = [
            LocalClient(fadamgc.Task(model, self.task.loss, [(x.to(dtype), y)]), i)
            for i, (x, y) in enumerate(self.task.pairs)
        ]
        self.keepers = [ClientStore(folder / "node", "test", i) for i in range(self.n)]
        self.start()

    @property
    def n(self):
        return self.task.n

    def start(self, facts=None, **more):
        """The server, for the first time or again."""
        options = ServerOptions(**{"clients": self.n, "experiment": "test"} | self.options | more)
        config = ServerConfig(self.algo, self.settings, options, facts or {})
        self.server = Coordinator(self.task, config, self.folder / "server")

    def messages(self, available=None):
        """What the server sends, with the wire's copy of it."""
        asked = self.server.ask(range(self.n) if available is None else available)
        return [(a, {k: v.clone() for k, v in a.down.items()}, dict(a.buffers)) for a in asked]

    def deliver(self, message, killed=None):
        """A client's answer; it may be killed before its state is saved, or right after."""
        asked, down, buffers = message
        i = asked.request.client
        keeper = self.keepers[i]
        if killed == "before":
            keeper = SimpleNamespace(
                load=keeper.load, locked=keeper.locked, save=lambda _: (_ for _ in ()).throw(Killed())
            )
        reply = handle_request(self.parties[i], keeper, asked._replace(down=down, buffers=buffers))
        if killed == "after":
            raise Killed
        return reply

    def setup(self):
        while self.server.needs_setup:
            for message in self.messages():
                reply = self.deliver(message)
                self.server.consider(reply.client, reply)
            self.server.close()

    def round(self):
        """A round without faults."""
        for message in self.messages():
            reply = self.deliver(message)
            self.server.consider(reply.client, reply)
        return self.server.close()

    def states(self):
        """The clients' states that belong to the server's: the pending one if it was counted."""
        algo = self.server.algorithm  # with the rest that codecs leave, if there is one
        kinds = fadamgc.algorithm.example(algo, torch.zeros(1))
        found = []
        for i, keeper in enumerate(self.keepers):
            kept = keeper.load(kinds.client)
            counted = self.server.counted.get(i, NEVER)
            state = kept.pending_state if kept.pending == counted else kept.committed_state
            assert (kept.pending if kept.pending == counted else kept.committed) == counted
            found.append(algo.init_client(self.server.functions.x0) if state is None else state)
        return found

    def check(self):
        """y is the mean of the y_i, and all is as in a simulation of those who were counted."""
        states = self.states()
        if hasattr(self.server.server, "y"):
            mean = torch.stack([state.y for state in states]).mean(0)
            torch.testing.assert_close(self.server.server.y, mean, rtol=1e-10, atol=1e-12)
        took = [
            ([i for i in r.sampled if i not in r.dropped], [i for i in r.tracked if i not in r.dropped])
            for r in self.server.history
        ]
        if not took or not all(sampled for sampled, _ in took):
            return
        named = {key: getattr(self.settings, key) for key in ("local_steps", "batch_size", "seed", "dtype")}
        run = fadamgc.simulate(
            self.algo, self.task, schedule=took, executor="loop", progress=False, eval_every=100, **named
        )
        assert torch.equal(self.server.server.x, run.x)
        for state, other in zip(states, run.clients, strict=True):
            assert all(map(torch.equal, state, other))
