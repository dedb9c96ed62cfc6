"""The governor's plan: whatever a thread does, what probes cost it stays within the budget, from the first moment on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire.governor import (
    FIRST_OVERSHOOT_S,
    MAX_BURST_S,
    MIN_BURST_S,
    PATIENCE_S,
    Governor,
)
from ncclwatch.wire.prices import HitCost, Price, Tally, price_of
from ncclwatch.wire.sites import Site, cheapest_entry

COSTS = {CostClass.EMULATED: HitCost(500.0, 800.0), CostClass.SINGLE_STEPPED: HitCost(10_000.0, 10_500.0)}
THREAD = (7, 8)
TICK_NS = 5_000_000
SLICE_NS = 1_000_000


class Target:
    """A thread of given habits under a fake clock: ``rate`` is the hits a second that it would make at a moment if they cost
    nothing."""

    def __init__(self, rate: Callable[[int], float], hit_ns: float = 400.0, detach_ns: int = 500_000) -> None:
        self.rate = rate
        self.hit_ns = hit_ns
        self.detach_ns = detach_ns
        self.hits = 0

    def run(self, begin_ns: int, length_ns: int) -> None:
        """Let it run under probes; a thread cannot spend more time in traps than passes."""
        self.hits += int(min(self.rate(begin_ns) * length_ns / 1e9, length_ns / self.hit_ns))

    @property
    def tallies(self) -> dict[tuple[int, int], Tally]:
        return {THREAD: Tally(self.hits, self.paid_ns)}

    @property
    def paid_ns(self) -> float:
        return self.hits * self.hit_ns


def drive(governor: Governor, target: Target, seconds: float, completions_per_second: float) -> float:
    """Run the plan; returns the largest share of its time that the thread had paid at any moment after a burst."""
    now, end, worst = 0, int(seconds * 1e9), 0.0
    governor.enrol(THREAD[0], 0)
    while now < end:
        if not governor.due(now):
            now += TICK_NS
            continue
        governor.begin(now, target.tallies)
        began = now
        cut = False
        while not governor.due(now) and not cut:
            target.run(now, SLICE_NS)
            now += SLICE_NS
            cut = governor.exhausted(now, target.tallies)
        ended = now
        target.run(now, target.detach_ns)
        now += target.detach_ns
        completions = int(completions_per_second * (now - began) / 1e9)
        governor.end(ended, target.tallies, completions, cut_short=cut)
        worst = max(worst, target.paid_ns / now)
    return worst


@pytest.mark.parametrize("budget", [0.0005, 0.001, 0.01])
@pytest.mark.parametrize("hits_per_second", [1_000, 100_000, 20_000_000])
@pytest.mark.parametrize("completions_per_second", [10, 50_000])
def test_no_thread_has_ever_paid_more_than_the_budget(budget: float, hits_per_second: int, completions_per_second: int) -> None:
    governor, target = Governor(COSTS, budget), Target(lambda _: hits_per_second)
    worst = drive(governor, target, 300, completions_per_second)
    assert 0 < worst <= budget
    assert governor.bursts > 3
    billed = governor.worst(int(300e9))
    assert billed is not None
    assert billed.cost_ns == pytest.approx(target.paid_ns)
    assert billed.share(int(300e9)) <= budget


@pytest.mark.parametrize("changes_at_s", [3, 60, 150])
def test_a_thread_that_takes_to_polling_is_not_overcharged(changes_at_s: int) -> None:
    """Bursts had grown long while it was hardly hit: they are cut short when its habits change."""
    governor = Governor(COSTS, 0.001)
    target = Target(lambda now: 20_000_000 if now > changes_at_s * 1e9 else 500)
    worst = drive(governor, target, 300, 10)
    assert worst <= 0.001
    # What one burst was cut short by is little beside what all of them cost.
    assert target.paid_ns <= 0.001 * 300e9


def test_the_first_burst_is_paid_for_beforehand() -> None:
    governor = Governor(COSTS, 0.001)
    assert not governor.due(10**12)  # nobody is watched
    governor.enrol(7, 0)
    needed = (MIN_BURST_S + FIRST_OVERSHOOT_S) / 0.001
    assert not governor.due(int((needed - 0.1) * 1e9))
    assert governor.due(int((needed + 0.1) * 1e9))
    assert governor.next_burst_s(0) == pytest.approx(needed)
    assert "no burst yet" in governor.report(0)


@pytest.mark.parametrize(("hits_per_second", "shortest_s", "longest_s"), [(2_000, MAX_BURST_S, 0.3), (20_000_000, 0.001, 0.01)])
def test_the_first_burst_lasts_as_long_as_the_account_allows(hits_per_second: int, shortest_s: float, longest_s: float) -> None:
    """Completions before a fault are known only of bursts before it: they need not grow first where a thread is seldom hit."""
    governor = Governor(COSTS, 0.001)
    drive(governor, Target(lambda _: hits_per_second), 7.3, 10)
    assert governor.bursts == 1
    assert shortest_s <= governor.burst_ns / 1e9 <= longest_s


def test_a_process_that_comes_later_starts_with_nothing() -> None:
    governor = Governor(COSTS, 0.01)
    governor.enrol(7, 0)
    assert governor.due(int(10e9))
    governor.enrol(9, int(10e9))
    assert not governor.due(int(10e9))
    governor.release(9)
    assert governor.due(int(10e9))
    governor.enrol(7, int(10e9))  # known: its account stays
    assert governor.due(int(10e9))


def test_bursts_grow_until_they_hold_a_window_or_would_take_too_long_to_save_for() -> None:
    slow, fast, polling = (Governor(COSTS, 0.01, window=64) for _ in range(3))
    drive(slow, Target(lambda _: 1_000), 300, 20)
    drive(fast, Target(lambda _: 1_000), 300, 1_000_000)
    drive(polling, Target(lambda _: 20_000_000), 300, 20)
    assert slow.length_s == MAX_BURST_S
    assert fast.length_s == MIN_BURST_S
    assert MIN_BURST_S < polling.length_s <= 0.01 * PATIENCE_S


def test_hits_of_before_a_burst_are_not_billed() -> None:
    governor = Governor(COSTS, 0.001)
    governor.begin(0, {THREAD: Tally(1_000_000, 4e8)})
    governor.end(10_000_000, {THREAD: Tally(1_000_100, 4e8 + 4e4), (9, 9): Tally(5, 2e3)}, 64)
    assert governor.threads[THREAD].hits == 100
    assert (governor.threads[9, 9].hits, governor.threads[9, 9].cost_ns) == (5, 2e3)
    assert "40.0" not in governor.report(10_000_000)


def test_a_budget_is_a_share() -> None:
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError):
            Governor(COSTS, wrong)


def test_the_price_of_exact_counting_is_told_beforehand() -> None:
    governor = Governor(COSTS)
    assert governor.forecast(100_000) == pytest.approx(0.08)
    assert governor.forecast(100_000, CostClass.SINGLE_STEPPED) == 1.0  # more than all there is


def test_posts_and_polls_have_prices_of_their_own() -> None:
    """A dear posting function must not make millions of cheap polls look dear."""

    def site(role: str, offset: int, cost: CostClass, *, on_return: bool = False) -> Site:
        return Site(1, 2, offset, "program", on_return, role, "", "", cost)

    posts = site("post_send", 3, CostClass.SINGLE_STEPPED)
    polls = [site("poll_cq", 9, CostClass.EMULATED, on_return=way) for way in (False, True)]
    assert price_of(COSTS, [posts, *polls]) == Price(10_000.0, 400.0)
    assert price_of(COSTS, [posts, site("post_send", 3, CostClass.SINGLE_STEPPED, on_return=True)]) == Price(5_250.0, 0.0)
    assert price_of(COSTS, []) == Price()
    # An extended queue's functions are billed to who uses them; a return alone is two traps and one hit.
    extended = [site("wr_start", 12, CostClass.EMULATED), site("read_qp_num", 15, CostClass.SINGLE_STEPPED, on_return=True)]
    assert price_of(COSTS, [*polls, *extended]) == Price(0.0, 400.0, 500.0, 10_500.0)


@pytest.mark.parametrize(
    ("code", "keep_stack", "expected"),
    [
        ("41554989fd4154", True, (0, CostClass.EMULATED)),  # push r13
        ("f30f1efa4154", True, (4, CostClass.EMULATED)),  # endbr64; push r12
        ("488b8728010200483987200102000f84dc000000", True, (14, CostClass.EMULATED)),  # mov rax, …; cmp; je
        ("4889f74154", True, (0, CostClass.SINGLE_STEPPED)),  # mov rdi, rsi: the first argument is lost
        ("4883ec0854", True, (0, CostClass.SINGLE_STEPPED)),  # sub rsp, 8: the return address is elsewhere
        ("4883ec0854", False, (4, CostClass.EMULATED)),  # … which matters for a return only
        ("4889c24154", True, (0, CostClass.SINGLE_STEPPED)),  # mov rdx, rax
        ("89ca4154", True, (0, CostClass.SINGLE_STEPPED)),  # mov edx, ecx writes rdx too
        ("4889f84154ebfc", True, (0, CostClass.SINGLE_STEPPED)),  # … jmp back to the push: a call would count twice
        ("", True, (0, CostClass.SINGLE_STEPPED)),
    ],
)
def test_the_cheapest_instruction_is_probed(code: str, keep_stack: bool, expected: tuple[int, CostClass]) -> None:
    assert cheapest_entry(bytes.fromhex(code), keep_stack=keep_stack) == expected


def test_an_order_has_a_length_and_a_share_of_its_own_and_is_billed_apart() -> None:
    governor = Governor(COSTS, 0.001)
    governor.enrol(THREAD[0], 0)
    now, second = 10_000_000_000, 1_000_000_000
    governor.begin(now, {THREAD: Tally(0, 0.0)}, ordered=(0.5, 0.02))
    assert not governor.due(now + second // 4) and governor.due(now + second // 2)
    # 2 % of the ten seconds since it was enrolled, less what taking the probes away may cost.
    assert not governor.exhausted(now, {THREAD: Tally(1000, 150e6)})
    assert governor.exhausted(now, {THREAD: Tally(1000, 201e6)})
    governor.end(now + second // 2, {THREAD: Tally(1000, 180e6)}, 64)
    assert (governor.bursts, governor.ordered, governor.attached) == (0, 1, False)
    thread = governor.threads[THREAD]
    assert (thread.ordered_ns, thread.cost_ns, thread.share(now)) == (180e6, 0.0, 0.0)
    # The next one within the budget is due as if nothing had been ordered.
    assert governor.due(now + second // 2)
    governor.begin(now + second, {THREAD: Tally(1000, 180e6)}, ordered=(0.5, 0.02))
    assert governor.exhausted(now + second, {THREAD: Tally(1200, 230e6)}), "orders add up"
