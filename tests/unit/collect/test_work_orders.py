"""Whose work requests are to be counted now, and when; and that an answer waits for them, not for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.collect.work_orders import AGAIN_NS, MOST_PIDS, SAME_NS, Ordering
from ncclwatch.engine.session import ANSWER_NS, DiagnosisSession, Update
from ncclwatch.model.job import Job, assemble
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.model.work import WorkOrder
from unit.engine.evidence.test_work_requests import window
from unit.fake_node import FakeNode
from unit.synthetic import SECOND, Rank, communicator, looks, moved, silent_link

PAUSE, HANG = Verdict(VerdictClass.UNKNOWN, "a pause"), Verdict(VerdictClass.HARDWARE, "a link")
HOSTS = frozenset({"node0", "node1", "node2", "node3"})


def job_of(ranks: list[Rank], count: int, *, moves: bool = False) -> Job:
    samples = looks(ranks, count)
    if moves:
        samples[0][-1] = moved(samples[0][-1])
    (job,) = assemble(samples)
    return job


def ordered(job: Job, verdict: Verdict, hosts: frozenset[str] = HOSTS, *, asked: bool = False) -> list[WorkOrder]:
    return Ordering().orders([(job, verdict)], hosts, 0, asked=asked)


def test_a_job_that_has_stood_for_a_while_is_counted_before_anybody_is_named() -> None:
    found = ordered(job_of(silent_link(), 4), PAUSE)
    assert [(one.host, one.pids, one.standing) for one in found] == [(f"node{r}", (1000 + r,), True) for r in range(4)]
    assert [one.number for one in found] == [1, 2, 3, 4]
    assert ordered(job_of(silent_link(), 3), PAUSE) == [], "for two seconds: any iteration may"
    assert ordered(job_of(silent_link(), 4, moves=True), PAUSE) == []
    assert ordered(job_of(silent_link(), 4), PAUSE, frozenset()) == [], "nobody can count"
    assert [one.host for one in ordered(job_of(silent_link(), 4), PAUSE, frozenset({"node2"}))] == ["node2"]


def test_whoever_is_named_or_asked_about_is_counted_at_once() -> None:
    slow = Verdict(VerdictClass.SLOW_COMMUNICATION, "slow")
    running = job_of(silent_link(), 2, moves=True)
    assert all(one.standing for one in ordered(job_of(silent_link(), 2), HANG)) and ordered(job_of(silent_link(), 2), HANG)
    assert ordered(running, slow) and not any(one.standing for one in ordered(running, slow)), "it moves"
    assert ordered(running, Verdict(VerdictClass.RUNNING, "it runs")) == []
    assert ordered(running, Verdict(VerdictClass.RUNNING, "it runs"), asked=True)


def test_of_a_large_job_those_that_are_named_are_counted() -> None:
    many = [Rank(rank, MOST_PIDS + 1, (communicator(rank, MOST_PIDS + 1),)) for rank in range(MOST_PIDS + 1)]
    hosts = frozenset(f"node{rank}" for rank in range(MOST_PIDS + 1))
    job = job_of(many, 4)
    assert ordered(job, PAUSE, hosts) == []
    named = replace(HANG, culprits=(Culprit(7, None, "node7", 1007, None),))
    assert [(one.host, one.pids) for one in ordered(job, named, hosts)] == [("node7", (1007,))]


def test_nobody_is_counted_again_and_again() -> None:
    job, ordering = job_of(silent_link(), 4), Ordering()
    assert len(ordering.orders([(job, HANG)], HOSTS, 0)) == 4
    assert ordering.orders([(job, HANG)], HOSTS, AGAIN_NS - 1) == []
    assert len(ordering.orders([(job, HANG)], HOSTS, AGAIN_NS - 1, asked=True)) == 4, "somebody asks"
    assert len(ordering.orders([(job, HANG)], HOSTS, 2 * AGAIN_NS)) == 4 and ordering.newest == 12
    long = job_of(silent_link(), 100)
    assert ordering.orders([(long, HANG)], HOSTS, 3 * AGAIN_NS) == [], "the standstill is the same"
    assert len(ordering.orders([(long, HANG)], HOSTS, 2 * AGAIN_NS + SAME_NS)) == 4


# --- answers -----------------------------------------------------------------------------------------------------------


class Asked:
    """A session of one node that can count, or cannot, of a job with a silent link."""

    def __init__(self, *, wire: bool) -> None:
        self.node = FakeNode(silent_link(), looks=60, host="node1")
        self.session = DiagnosisSession()
        self.planes = (PlaneState("wire", wire, "" if wire else "no process uses RDMA"),)
        self.now_ns = 0
        self.look()
        self.look()

    def counted(self, orders: Sequence[int] = ()) -> NodeBatch:
        """What it says next, with the counts of these orders."""
        batch = self.node.batch()
        batch.planes, batch.work = self.planes, [replace(window(1, 2), order=number) for number in orders]
        return batch

    def look(self) -> Update:
        batch = self.counted()
        self.now_ns = max(self.now_ns, batch.time_ns)
        self.session.feed(batch)
        return self.session.judge(self.now_ns)


def test_an_answer_waits_for_the_counts_that_it_wants() -> None:
    one = Asked(wire=True)
    one.session.ask()
    assert one.session.answer_due(one.now_ns), "a judgement orders them"
    update = one.look()
    assert update.orders and not update.answers and not one.session.answer_due(one.now_ns)
    numbers = [order.number for order in update.orders]
    one.session.feed(one.counted(numbers))
    assert one.session.answer_due(one.now_ns), "they have come"
    assert one.look().answers and not one.session.answer_due(one.now_ns)


def test_an_answer_does_not_wait_for_long_or_in_vain() -> None:
    one = Asked(wire=True)
    one.session.ask()
    assert one.look().orders
    assert not one.session.answer_due(one.now_ns) and one.session.answer_due(one.now_ns + ANSWER_NS)
    one.now_ns += ANSWER_NS + SECOND
    assert one.look().answers
    blind = Asked(wire=False)
    blind.session.ask()
    assert blind.look().answers, "nobody can count"
