"""Samples taken one after the other: which waits they prove, and how near in time is near."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from ncclwatch.engine.case import Case
from ncclwatch.engine.edges import ConnectionKey, Wait, Why
from ncclwatch.engine.evidence.base import LinkNode, RankNode
from ncclwatch.engine.slow.snapshot import is_proven, near
from ncclwatch.model.job import Job, assemble
from unit.synthetic import SECOND, Rank, communicator, recv, send


def job_read_at(*begun_ms: float, took_ms: float = 10.0) -> Job:
    samples = [SimpleNamespace(wall_ns=int(ms * 1e6), duration_ns=int(took_ms * 1e6)) for ms in begun_ms]
    members = [SimpleNamespace(index=index, last=sample) for index, sample in enumerate(samples)]
    group = SimpleNamespace(holder=dict(enumerate(members)).get)
    return cast(Job, SimpleNamespace(member=members.__getitem__, groups={7: group}))


def wait(waiter: int, target: int | LinkNode) -> Wait:
    key = ConnectionKey(7, 0, 0, 1, False)
    node = target if isinstance(target, LinkNode) else RankNode(target)
    return Wait(subject=RankNode(waiter), object=node, why=Why.EMPTY, key=key)


@pytest.mark.parametrize(("first", "second", "proven"), [(0.0, 200.0, True), (200.0, 0.0, False), (12.0, 0.0, True)])
def test_a_wait_is_proven_by_reading_who_is_waited_for_later(first: float, second: float, proven: bool) -> None:
    job = job_read_at(first, second)
    assert is_proven(job, wait(0, 1), near_s=0.03) is proven
    assert is_proven(job, wait(1, 1), near_s=0.03), "what one sample says of itself needs no second"


def test_data_is_under_way_if_the_receiver_was_read_later() -> None:
    link = LinkNode(7, 0, 1)
    assert is_proven(job_read_at(0.0, 200.0), wait(1, link), 0.03)
    assert not is_proven(job_read_at(200.0, 0.0), wait(1, link), 0.03)


def test_who_already_waited_at_the_look_before_waits_though_read_later() -> None:
    """Rank 1 starves and was read after rank 0, which it waits for; it had starved before rank 0 was read."""
    idle = {"received": 4, "delivered": 4, "consumed": 4}
    target = Rank(0, 2, (communicator(0, 2),), (send(1, sent=4, done=4, produced=4),))
    waiter = Rank(1, 2, (communicator(1, 2),), (recv(0, posted=12, **idle),))
    later = [replace(one, wall_ns=one.wall_ns + SECOND // 2) for one in waiter.looks()]
    (job,) = assemble([target.looks(), later])
    (starves,) = [one for one in Case(job).waits.waits if one.subject == RankNode(job.members[1].index)]
    assert is_proven(job, starves, near_s=0.02)
    came = [replace(later[0], operations=()), later[1]]
    (job,) = assemble([target.looks(), came])
    (starves,) = [one for one in Case(job).waits.waits if one.subject == RankNode(job.members[1].index)]
    assert not is_proven(job, starves, near_s=0.02), "it may have come since"


def test_how_near_is_near_goes_by_the_iteration() -> None:
    assert near(10.0) > 0.1 > near(None) > near(0.1)
