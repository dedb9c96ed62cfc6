"""Whom a verdict has looked at, and what it says of them once they were: made-up looks of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ncclwatch.collect.batch import PlaneState
from ncclwatch.knowledge.looks import MEANWHILE
from ncclwatch.knowledge.session import InformedSession
from ncclwatch.knowledge.suspects import AGAIN_NS, FIRST_NUMBER, LOOKS
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.gpu import GpuHealth, GpuLook
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.verdict import Verdict
from ncclwatch.model.work import WorkOrder
from unit.knowledge.test_failures import SECOND, WALL, batch, look
from unit.synthetic import frozen_ring

FRAMES = (("_next_data", "/x/torch/utils/data/dataloader.py", "_next_data (torch/utils/data/dataloader.py:628)"),)


class Nodes:
    """Four ranks on a node each, one of which is stopped, a second a round."""

    def __init__(self) -> None:
        self.session, self.ranks, self.round = InformedSession(), frozen_ring(2, 4), 0
        for rank in self.ranks:
            rank.communicators = tuple(replace(own, bus_id=0x7000) for own in rank.communicators)
        self.looking = True
        self.told: list[Verdict] = []
        self.orders: list[WorkOrder] = []

    def go(self, rounds: int = 1, looks: Sequence[ProcessLook] = (), gpus: GpuLook | None = None, offset_s: float = 0.0) -> None:
        for _ in range(rounds):
            for rank in self.ranks:
                samples = [look(rank, self.round, rank.run_state)]
                said = batch(f"node{rank.rank}", self.round, samples, offset_s=offset_s, number=self.round)
                said.looks = tuple(one for one in looks if one.host == f"node{rank.rank}")
                said.planes = (*said.planes, PlaneState(LOOKS, self.looking))
                said.gpus = gpus if rank.rank == 2 else None
                self.session.feed(BatchReader().decode(BatchWriter(calls="none").encode(said)).batch, self.round * SECOND)
            update = self.session.judge(self.round * SECOND)
            self.told += update.told
            self.orders += [order for order in update.orders if order.look]
            self.round += 1

    @property
    def verdict(self) -> Verdict:
        assert self.session.verdict is not None
        return self.session.verdict


def seen(rank: int, at_s: float = 3.0, problem: str = "", frames: Sequence[tuple[str, str, str]] = FRAMES) -> ProcessLook:
    place, time = (f"node{rank}", 1000 + rank), WALL / SECOND + at_s
    return ProcessLook(*place, time, "S", ("sleeping",), tuple(frames), kernel="main thread sleeping", problem=problem)


def test_culprits_and_a_few_that_wait_are_looked_at_once_each_on_its_own_node() -> None:
    nodes = Nodes()
    nodes.go(6)
    by_host = {order.host: order for order in nodes.orders}
    assert {host: order.pids for host, order in by_host.items()} == {f"node{rank}": (1000 + rank,) for rank in range(4)}
    assert len(nodes.orders) == 4 == len({order.number for order in nodes.orders})
    assert all(order.number >= FIRST_NUMBER for order in nodes.orders)
    nodes.round += AGAIN_NS // SECOND
    nodes.go(2)
    assert len(nodes.orders) == 8, "a verdict that stands for long has them looked at again"


def test_what_was_seen_is_told_with_its_age_and_the_rows_that_speak_of_it() -> None:
    nodes = Nodes()
    nodes.go(4)
    assert len(nodes.told) == 1 and not nodes.told[0].culprits[0].doing
    nodes.go(1, [seen(2), seen(0)])
    verdict = nodes.verdict
    assert verdict.culprits[0].doing == ("data-loader",) and verdict.knowledge[0].row == "data-loader"
    [line] = [one for one in verdict.evidence if one.startswith("rank 2 waits for its data loader")]
    assert "_next_data" in line and "(1.0s before the last sample)" in line
    assert any(one.startswith("meanwhile rank 0 ") for one in verdict.evidence)
    assert [one.id for one in nodes.told] == [verdict.id] * 2, "it is told again, now with what was seen"
    nodes.go(3)
    assert len(nodes.told) == 2
    assert sum(one.startswith("rank 2 ") and "data loader" in one for one in nodes.verdict.evidence) == 1


def test_one_that_waits_on_a_node_that_answers_later_is_told_too() -> None:
    nodes = Nodes()
    nodes.go(4)
    for number, looks in enumerate(([seen(2)], [seen(0)], [seen(1), seen(2)])):
        nodes.go(2, looks)
        assert len(nodes.told) == 1 + min(number + 1, 2), "once with the culprit, once with one that waits, and no more"
    assert [sum(one.startswith(MEANWHILE) for one in verdict.evidence) for verdict in nodes.told] == [0, 0, 1]


def test_nobody_is_asked_who_does_not_look() -> None:
    nodes = Nodes()
    nodes.looking = False
    nodes.go(6)
    assert nodes.verdict.culprits and not nodes.orders


@pytest.mark.parametrize("looks", [(), (seen(0),), (replace(seen(2), pid=7),), (seen(2, -3.0),)])
def test_a_node_that_sees_nothing_or_something_else_leaves_the_verdict_as_it_is(looks: Sequence[ProcessLook]) -> None:
    nodes = Nodes()
    nodes.go(4)
    before = nodes.verdict
    nodes.go(1, looks)
    assert (nodes.verdict.culprits, nodes.verdict.knowledge) == (before.culprits, before.knowledge)
    assert not any("waits for its data loader" in line for line in nodes.verdict.evidence)


def test_why_nothing_could_be_read_is_said() -> None:
    nodes = Nodes()
    nodes.go(4)
    nodes.go(1, [seen(2, problem="py-spy is not installed", frames=())])
    assert any("py-spy is not installed" in line for line in nodes.verdict.evidence)


def test_the_state_of_a_culprits_gpu_is_told_unless_somebody_has_stopped_the_process() -> None:
    sick = GpuHealth(index=0, bus_id="0000:07:00.0", lost="GPU is lost")
    for stopped in (True, False):
        nodes = Nodes()
        if not stopped:
            for rank in nodes.ranks:
                rank.run_state = "S"
        nodes.go(40)
        assert nodes.verdict.culprits, nodes.verdict
        nodes.go(1, gpus=GpuLook(wall_ns=1, gpus=(sick,)))
        [culprit] = [one for one in nodes.verdict.culprits if one.rank == 2][:1]
        assert culprit.gpu_trouble == (() if stopped else ("lost",)), nodes.verdict


def test_times_are_of_the_engines_clock() -> None:
    nodes = Nodes()
    nodes.go(4, offset_s=3600.0)
    nodes.go(1, [seen(2)], offset_s=3600.0)
    assert any("(1.0s before the last sample)" in line for line in nodes.verdict.evidence)
