"""A SuperLink in this process, behind Flower's own grid: every object as Flower carries it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Context, Error, Message, RecordDict  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.proto.message_pb2 import (  # noqa: E402
    ConfirmMessageReceivedResponse,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo  # noqa: E402
from flwr.proto.runtime_pb2 import (  # noqa: E402
    GetNodesResponse,
    PullAppMessagesResponse,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents  # noqa: E402
from flwr.supercore.run import Run  # noqa: E402
from flwr.superlink.grid.http_grid import HttpGrid  # noqa: E402

from in_process_grid import app_of, make  # noqa: E402


class Link:
    """What Flower's grid asks over the network. Some replies never arrive in full."""

    def __init__(self, app, folder, clients):
        self.app, self.folder = app, folder
        self.nodes = {100 + i: i for i in range(clients)}
        self.keys = {node: f"key {node}".encode() for node in self.nodes}
        self.objects, self.sent, self.trees, self.confirmed = {}, {}, {}, []
        self.stalled = set()  # (type of message, client)
        self.pulled = self.answered = 0
        self._client = SimpleNamespace(event_hooks={"request": [], "response": []})

    def GetNodes(self, request):
        nodes = [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.nodes]
        return GetNodesResponse(nodes=nodes)

    def PushMessages(self, request):
        ids = []
        for message, tree in zip(request.messages_list, request.message_object_trees, strict=True):
            self.sent[message.metadata.message_id] = message.metadata.dst_node_id, tree
            ids.append(message.metadata.message_id)
        return PushAppMessagesResponse(message_ids=ids, objects_to_push=self._named(request), session_id="s")

    def _named(self, request):
        def names(tree):
            return [tree.object_id, *(name for child in tree.children for name in names(child))]

        return [name for tree in request.message_object_trees for name in names(tree)]

    def PushObject(self, request):
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullMessages(self, request):
        (identity,) = request.message_ids
        node, _ = self.sent.pop(identity, (None, None))
        if node not in self.nodes:
            return PullAppMessagesResponse()
        message = inflate_object_from_contents(identity, dict(self.objects))
        message.metadata.__dict__["_message_id"] = identity
        client = self.nodes[node]
        config = {"partition-id": client, "state-folder": str(self.folder / f"node-{client}")}
        reply = self.app(message, Context(1, 1, config, RecordDict(), {}))
        reply.metadata.__dict__["_message_id"] = reply.object_id
        tree = get_object_tree(reply)
        contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        if (message.metadata.message_type, client) in self.stalled:
            self.late = dict(contents)
            contents |= dict.fromkeys([min(contents)], None)  # this part is still on its way
        self.objects |= contents
        self.answered += 1
        plain = message_to_proto(Message(Error(0), reply_to=message))
        plain.metadata.message_id = reply.object_id
        return PullAppMessagesResponse(messages_list=[plain], message_object_trees=[tree])

    def PullObject(self, request):
        content = self.objects[request.object_id]
        if content is None:
            return PullObjectResponse(object_found=True, object_available=False)
        for hook in self._client.event_hooks["response"]:
            hook(SimpleNamespace(headers={"content-length": str(len(content))}))
        self.pulled += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


def linked(tmp_path, clients=3, **options):
    sizes = (6, 20, 11, 8, 9, 10, 12, 7, 14, 16)[:clients]
    task, _, strategy = make(tmp_path, clients=clients, sizes=sizes, **options)
    grid = HttpGrid(token="token")
    grid._client = Link(app_of(task), tmp_path, clients)
    grid.set_run(Run.create_empty(1))
    return task, grid, strategy
