"""States as trees: leaves, names and rebuilding, also of nested states."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from fadamgc.algorithm import Empty, add
from fadamgc.tree import from_names, leaves, map_leaves, named_leaves, names, rebuild


class Moments(NamedTuple):
    m: Any
    v: Any


class Client(NamedTuple):
    y: Any
    moments: Moments
    count: Any


STATE = Client(torch.tensor([1.0]), Moments(torch.tensor([2.0]), torch.tensor([3.0])), torch.tensor([4.0]))


def test_leaves_and_names_are_in_the_order_of_the_fields():
    assert [leaf.item() for leaf in leaves(STATE)] == [1, 2, 3, 4]
    assert names(STATE) == ["y", "moments.m", "moments.v", "count"]
    assert list(named_leaves(STATE)) == names(STATE)
    assert list(named_leaves(STATE, "client")) == [f"client.{name}" for name in names(STATE)]


def test_rebuild_keeps_the_types():
    state = rebuild(STATE, "abcd")
    assert state == Client("a", Moments("b", "c"), "d")
    assert type(state.moments) is Moments
    assert rebuild(STATE, leaves(STATE)) == STATE


@pytest.mark.parametrize(("count", "message"), [(3, "fewer tensors than leaves"), (5, "more tensors than")])
def test_rebuild_refuses_another_number_of_tensors(count, message):
    with pytest.raises(ValueError, match=message):
        rebuild(STATE, range(count))


def test_map_leaves_pairs_the_leaves_of_several_states():
    doubled = map_leaves(lambda leaf: 2 * leaf, STATE)
    assert [leaf.item() for leaf in leaves(doubled)] == [2, 4, 6, 8]
    total = add(STATE, doubled)
    assert isinstance(total, Client)
    assert [leaf.item() for leaf in leaves(total)] == [3, 6, 9, 12]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        map_leaves(torch.add, STATE, STATE.moments)


def test_names_lead_back_to_the_state():
    stored = {**named_leaves(STATE, "client"), "client.other": torch.zeros(1)}
    assert from_names(STATE, stored, "client") == STATE
    del stored["client.moments.v"]
    with pytest.raises(KeyError, match="client.moments.v"):
        from_names(STATE, stored, "client")


def test_a_state_without_fields():
    assert leaves(Empty()) == []
    assert names(Empty()) == []
    assert rebuild(Empty(), []) == Empty()
    assert from_names(Client(Empty(), Empty(), 0), {"count": 1}) == Client(Empty(), Empty(), 1)
