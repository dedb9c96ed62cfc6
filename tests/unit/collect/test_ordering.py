"""Orders to count work requests: what a node's own options allow, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from ncclwatch.collect.node import NodeCollector
from ncclwatch.collect.ordering import SECONDS, OrderDesk
from ncclwatch.collect.watched import Readable, Watched
from ncclwatch.model.work import WorkOrder
from ncclwatch.wire.orders import Order
from unit.synthetic import looks, moved, silent_link


class Collector:
    """Two processes that stand, and what is ordered of them."""

    def __init__(self, *, counts: bool = True) -> None:
        self.counts = counts
        self.stuck = 0
        self.looks = True
        self.looked: list[tuple[int, ...]] = []
        self.probed: list[tuple[int, ...]] = []
        self.ordered: list[Order] = []
        self.watched: dict[int, Watched] = {}
        for series in looks(silent_link()[:2]):
            target = SimpleNamespace(info=series[-1].process)
            one = self.watched[series[-1].process.pid] = Watched(cast(Readable, target))
            one.history = series

    def order(self, order: Order) -> bool:
        self.ordered.append(order)
        return self.counts

    def probe_paths(self, pids: tuple[int, ...]) -> int:
        self.probed.append(pids)
        return self.stuck

    def look_at(self, pids: tuple[int, ...]) -> bool:
        self.looked.append(pids)
        return self.looks

    def move(self, pid: int) -> None:
        history = self.watched[pid].history
        history.append(moved(history[-1]))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def desk_of(collector: Collector, *, budget: float = 0.001, standing_budget: float = 0.05) -> OrderDesk:
    return OrderDesk(cast("NodeCollector", collector), budget, standing_budget, Clock())


def test_of_processes_that_stand_more_may_be_paid_and_that_is_said() -> None:
    collector = Collector()
    desk = desk_of(collector)
    line = desk.take(WorkOrder(7, "node0", (1000, 1001, 4711), standing=True))
    assert collector.ordered == [Order(7, (1000, 1001), SECONDS, 0.05)]
    assert "2 processes are counted for 0.25 s" in line and "they stand" in line and "0.05 of a thread's time" in line
    collector.move(1000)
    assert "they move" in desk.take(WorkOrder(8, "node0", (1000, 1001)))
    assert collector.ordered[-1].share == 0.001


def test_what_goes_beyond_the_budget_is_refused() -> None:
    collector = Collector()
    collector.move(1000)
    desk = desk_of(collector)
    assert "refused: it is for a job that stands, and the job moves" in desk.take(WorkOrder(1, "node0", (1000,), standing=True))
    assert "options allow none" in desk_of(collector, budget=0.0).take(WorkOrder(1, "node0", (1000,)))
    still = desk_of(Collector(), budget=0.0, standing_budget=0.0)
    assert "options allow none" in still.take(WorkOrder(1, "node0", (1000,), standing=True))
    assert "none of its processes is watched" in desk.take(WorkOrder(1, "node0", (1, 2)))
    assert collector.ordered == [] and (desk.taken, desk.refused) == (0, 2)
    without = desk_of(Collector(counts=False))
    assert without.take(WorkOrder(1, "node0", (1001,))) == "" and without.refused == 1, "the plane itself has said why"


def test_orders_that_come_too_fast_are_refused() -> None:
    collector = Collector()
    desk = OrderDesk(cast("NodeCollector", collector), 0.001, 0.05, clock=lambda: 5.0)
    desk.take(WorkOrder(1, "node0", (1000,)))
    assert "less than 2 s ago" in desk.take(WorkOrder(2, "node0", (1000,))) and len(collector.ordered) == 1


def test_a_process_that_was_looked_at_once_is_not_taken_to_stand() -> None:
    collector = Collector()
    del collector.watched[1000].history[0]
    assert "refused" in desk_of(collector).take(WorkOrder(1, "node0", (1000,), standing=True))


def test_a_job_that_moved_once_and_stands_now_stands() -> None:
    """A collector keeps the first sample and the newest: the last two looks are what tells standing from moving."""
    collector = Collector()
    first = collector.watched[1000].history[0]
    collector.watched[1000].history = [first, moved(first), moved(first)]
    assert "they stand" in desk_of(collector).take(WorkOrder(1, "node0", (1000,), standing=True))


def test_paths_are_probed_of_processes_that_stand_also_where_nothing_can_be_counted() -> None:
    collector = Collector(counts=False)
    desk = desk_of(collector, standing_budget=0.0, budget=0.0)
    order = WorkOrder(7, "node0", (1000, 1001), standing=True)
    assert "refused: this agent's options allow none" in desk.take(order) and desk.refused == 1
    collector.stuck = 2
    line = desk.take(order)
    assert line == (
        "2 paths on which they stand still are probed, as ordered; work requests are not counted: this agent's options allow none"
    )
    assert (desk.taken, collector.ordered) == (1, [])
    collector.counts = True
    counting = desk_of(collector)
    assert counting.take(order).endswith("; 2 paths on which they stand still are probed")
    probed = len(collector.probed)
    collector.move(1000)
    counting.take(WorkOrder(8, "node0", (1000, 1001)))
    assert len(collector.probed) == probed, "a job that moves is not probed"


def test_looks_are_taken_of_watched_processes_one_at_a_time_and_not_counted() -> None:
    collector = Collector()
    desk = desk_of(collector)
    assert desk.take(WorkOrder(7, "node0", (1000, 1001, 4711), look=True)) == ""
    assert collector.looked == [(1000, 1001)] and not collector.ordered and not collector.probed
    assert "none of them is watched" in desk.take(WorkOrder(8, "node0", (4711,), look=True))
    collector.looks = False
    assert "refused" in desk.take(WorkOrder(9, "node0", (1000,), look=True))
    collector.looks = True
    desk.take(WorkOrder(10, "node0", (1000,), look=True))
    desk.clock = lambda: desk._last_look + 1.0
    assert "less than 5 s ago" in desk.take(WorkOrder(11, "node0", (1000,), look=True))
    assert (desk.taken, desk.refused) == (2, 3)
