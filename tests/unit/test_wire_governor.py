"""The governor's plan: whatever a thread does, what probes cost it stays within the budget."""

from __future__ import annotations

import pytest

from ncclwatch.probes.sites import CostClass
from ncclwatch.wire.governor import MAX_BURST_S, MIN_BURST_S, Governor, HitCost, mean_hit_ns
from ncclwatch.wire.sites import Site, cheapest_entry

COSTS = {CostClass.EMULATED: HitCost(500.0, 800.0), CostClass.SINGLE_STEPPED: HitCost(10_000.0, 10_500.0)}
THREAD = (7, 8)


def drive(
    governor: Governor, seconds: float, hits_per_second: float, completions_per_second: float, hit_ns: float = 400.0
) -> float:
    """Run the plan against a thread of steady habits; returns the share of its time that it paid."""
    now, end, total = 0, int(seconds * 1e9), 0
    while now < end:
        if governor.due(now):
            if governor.attached:
                began = now - int(governor.length_s * 1e9)
                # A thread cannot spend more time in traps than passes.
                total += int(min(hits_per_second * (now - began) / 1e9, (now - began) / hit_ns))
                governor.end(now, {THREAD: total}, hit_ns, int(completions_per_second * (now - began) / 1e9))
            else:
                governor.begin(now, {THREAD: total})
                now += int(governor.length_s * 1e9)
                continue
        now += 5_000_000
    return total * hit_ns / (end - 0)


@pytest.mark.parametrize("budget", [0.0005, 0.001, 0.01])
@pytest.mark.parametrize("hits_per_second", [1_000, 100_000, 20_000_000])
@pytest.mark.parametrize("completions_per_second", [10, 50_000])
def test_no_thread_pays_more_than_the_budget(budget: float, hits_per_second: int, completions_per_second: int) -> None:
    governor = Governor(COSTS, budget)
    paid = drive(governor, 3000, hits_per_second, completions_per_second)
    assert 0 < paid <= budget * 1.02
    worst = governor.worst(int(3000e9))
    assert worst is not None
    assert worst.share(int(3000e9)) == pytest.approx(paid, rel=0.05)


def test_bursts_grow_until_they_hold_a_window() -> None:
    slow, fast = Governor(COSTS, 0.01, window=64), Governor(COSTS, 0.01, window=64)
    drive(slow, 300, 1_000, 20)
    drive(fast, 300, 1_000, 1_000_000)
    assert slow.length_s == MAX_BURST_S
    assert fast.length_s == MIN_BURST_S


def test_hits_of_before_a_burst_are_not_billed() -> None:
    governor = Governor(COSTS, 0.001)
    governor.begin(0, {THREAD: 1_000_000})
    governor.end(10_000_000, {THREAD: 1_000_100, (9, 9): 5}, 400.0, 64)
    assert governor.threads[THREAD].hits == 100
    assert governor.threads[9, 9].hits == 5
    assert "40.0" not in governor.report(10_000_000)


def test_the_price_of_exact_counting_is_told_beforehand() -> None:
    governor = Governor(COSTS)
    assert governor.forecast(100_000) == pytest.approx(0.08)
    assert governor.forecast(100_000, CostClass.SINGLE_STEPPED) == pytest.approx(1.05)
    site = Site(1, 2, 3, "on_poll", False, "poll_cq", "", "", CostClass.SINGLE_STEPPED)
    assert mean_hit_ns(COSTS, [site]) == 5250.0
    assert mean_hit_ns(COSTS, []) == 0.0


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
