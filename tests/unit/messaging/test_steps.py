"""Steps in columns: what a batch brings is what would be made of the operations one by one."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from ncclwatch.messaging import steps
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import Direction, OpPhase, ProcessSample, ProxyOperation, Transport
from ncclwatch.model.steps import COLUMNS, Operations
from unit.fake_node import FakeNode
from unit.synthetic import Rank, communicator, operation


def _operation(chance: random.Random, huge: bool) -> ProxyOperation:
    counters = chance.randrange(100), chance.randrange(100), chance.randrange(100), chance.randrange(100)
    one = operation(
        chance.choice([*Direction]), chance.randrange(8), counters, gpu_ready=chance.choice([None, 7]),
        op_count=chance.randrange(99), phase=chance.choice([*OpPhase]), collective=chance.choice(["AllReduce", "", "Broadcast"]),
        channel=chance.randrange(4), comm_hash=chance.choice([7, (1 << 64) - 5]),
    )  # fmt: skip
    big = {"done": (1 << 63) - 9} if huge else {}
    subs = tuple(replace(one.subs[0], rank=chance.choice([None, 3]), **big) for _ in range(chance.randrange(4)))  # type: ignore[arg-type]
    return replace(one, subs=subs, transport=chance.choice([Transport.NET, Transport.COLLNET]), comm_address=0x7F00_0000_1000)


def _through_a_batch(ranks: list[Rank]) -> list[ProcessSample]:
    node = FakeNode(ranks)
    return list(BatchReader().decode(BatchWriter().encode(node.batch())).batch.samples)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("few", [0, 1000])
def test_a_batch_brings_the_columns_that_operations_alone_would_make(
    seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "FEW", few)
    chance = random.Random(seed)
    ranks = [
        Rank(rank, 4, (communicator(rank, 4),), tuple(_operation(chance, seed == 7) for _ in range(chance.randrange(5))))
        for rank in range(4)
    ]
    came = _through_a_batch(ranks)
    assert len(came) == 4
    for sample, rank in zip(came, ranks, strict=True):
        assert sample.operations == rank.operations
        known: Any = sample.operations
        assert "steps" in known.__dict__, "made as the batch is decoded"
        assert known.steps == Operations(rank.operations).steps
        assert len(known.steps.rows) == 8 * len(COLUMNS) * sum(len(one.subs) for one in rank.operations)
        assert not progressed(sample, replace(rank.looks(1)[0], process=sample.process))
        assert pickle.loads(pickle.dumps(sample)) == sample  # noqa: S301 - our own


def test_a_number_that_had_to_be_cut_off_is_still_compared() -> None:
    one = operation(Direction.SEND, 1, (0, 0, 0, 0))
    before, after = (
        Rank(0, 2, (communicator(0, 2),), (replace(one, subs=(replace(one.subs[0], done=done),)),)).looks(1)[0]
        for done in ((1 << 64) + 1, (1 << 64) + 2)
    )
    assert progressed(before, after)
    assert not progressed(before, replace(before, time_ns=after.time_ns + 1))
