"""Flower's grid in this process: no network, no other process, every message as Flower carries it."""

from __future__ import annotations

import itertools

import pytest

import fadamgc

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fadamgc.federation.settings import Settings
from fadamgc.flower import client_app
from fadamgc.flower.clientapp import client_number
from fadamgc.flower.config import ServerConfig, ServerOptions
from fadamgc.flower.coordinator import Coordinator
from fadamgc.flower.strategy import Strategy
from problems import class_task

# Messages say which task of Flower's makes them; here it is none.
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

SIZES = (6, 20, 11)
LOCAL = {"local_steps": 3, "batch_size": 4, "seed": 5}


class Here(Grid):
    """A grid whose nodes are in this process. Nodes can be gone, deaf (no answer), or failing."""

    def __init__(self, app, folder, clients, first=100):
        self.app, self.folder = app, folder
        self.nodes = {first + i: i for i in range(clients)}
        self.deaf, self.failing, self.sent = set(), set(), []
        self.replies = {}
        self._ids = itertools.count()

    def context(self, client):
        config = {"partition-id": client, "state-folder": str(self.folder / f"node-{client}")}
        return Context(1, 1, config, RecordDict(), {})

    def set_run(self, run):
        raise NotImplementedError

    run = create_message = property(lambda self: None)
    send_and_receive = None

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        assert isinstance(messages, list)  # Flower's own needs one
        identities = []
        for message in messages:
            identity = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = identity
            identities.append(identity)
            client = self.nodes.get(message.metadata.dst_node_id)
            self.sent.append((message.metadata.message_type, client))
            if client is None or client in self.deaf:
                continue
            if client in self.failing and message.metadata.message_type == "train":
                reply = Message(Error(1, "the app crashed"), reply_to=message)
                reply.metadata.__dict__["_src_node_id"] = 1  # as Flower does
            else:
                reply = self.app(message, self.context(client))
            self.replies[identity] = reply
        return identities

    def pull_messages(self, message_ids):
        return [self.replies.pop(i) for i in list(message_ids) if i in self.replies]


def app_of(task):
    return client_app(lambda context: (task.model, task.loss, task.pairs[client_number(context)]))


def make(tmp_path, algo=None, clients=3, rounds=3, sizes=SIZES, app=app_of, **options):
    task = class_task(sizes=sizes)
    server = ServerOptions(clients=clients, experiment="test", min_clients=options.pop("min_clients", 1))
    timing = {"round_timeout": 0.3, "wait_timeout": 0.3, "poll": 0.01}
    timing |= {k: options.pop(k) for k in (*timing, "below_minimum") if k in options}
    settings = Settings(rounds=rounds, **LOCAL | options)
    config = ServerConfig(algo or fadamgc.FAdamGC(), settings, server, {})
    coordinator = Coordinator(task, config, tmp_path / "server")
    return task, Here(app(task), tmp_path, clients), Strategy(coordinator, **timing)


def held(content):
    """Count the bytes of all arrays in a message."""
    return sum(len(a.data) for record in content.array_records.values() for a in record.values())
