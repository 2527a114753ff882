"""Records of rounds in memory."""

from __future__ import annotations

import dataclasses
import pickle
import tracemalloc

import pytest

from fadamgc.federation.cost import CostModel, Work
from fadamgc.federation.record import Record
from fadamgc.federation.sampling import draw

HUGE = 10**30


def record(sampled, tracked=(), work=()):
    return Record(1, 0.5, None, None, None, 10, 20, 1.5, 0.1, sampled, tracked, work=work)


@pytest.mark.parametrize(
    "numbers", [(), (3,), (HUGE,), (4, 4, 4), (1, 5, 7), (1, 2**33), (0, 1, HUGE), tuple(range(1000))]
)
def test_a_record_gives_the_numbers_that_it_got(numbers):
    work = Work(tuple(range(len(numbers))), numbers, (5,) * len(numbers), numbers, deadline=2.0)
    made = record(numbers, list(numbers), (work, work._replace(link="group")))
    assert (made.sampled, made.tracked, made.dropped) == (numbers, numbers, ())
    assert made.work == (work, work._replace(link="group"))
    assert Record.from_json(made.to_json()) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, sampled=(8, 9)).sampled == (8, 9)
    assert made != dataclasses.replace(made, sampled=(8, 9))
    assert made.priced(CostModel()).work == made.work


def test_the_defaults_of_a_record_are_empty():
    made = Record(1, None, None, None, None, 0, 0, 0.0, 0.0)
    assert (made.sampled, made.tracked, made.dropped, made.absent, made.work) == ((), (), (), (), ())


def test_a_record_needs_one_number_per_client():
    sampled, tracked = draw(0, 1, 10**6, 1000, 1000)
    work = Work(sampled, (5,) * 1000, (100,) * 1000, (200,) * 1000)
    tracemalloc.start()
    kept = [record(sampled, tracked, (work,)) for _ in range(10)]
    size = tracemalloc.get_traced_memory()[0] / len(kept)
    tracemalloc.stop()
    assert size < 4 * 1000 + 2000
