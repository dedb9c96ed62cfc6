"""What a hit of a probe on the data path costs here and now, and what threads owe for theirs.

A hit is not always the same work: a poll that finds nothing only traps, one that finds completions books each of them, and a post
follows its chain. So a hit, a request and a completion have prices of their own, all measured on functions of our own process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire.calibration import Calibrator
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.own_functions import Program
from ncclwatch.wire.sites import DATA_PATH, POLLING, TAKEN, Site

CALIBRATION_CALLS = 400
TRIES = 4
"""A return that seems to cost nothing was measured while the machine did something else: it is a trap of its own. Measured again,
so often at the most.
"""


@dataclass(frozen=True, slots=True)
class HitCost:
    """Measured cost in ns of one hit: of an entry alone, and of an entry and the return of the same call together.

    These are of a poll that finds nothing. ``request_ns`` is what a posting call of one request costs beyond such an entry (the
    further ones of a chain add less), ``completion_ns`` what a completion adds to a poll's return.
    """

    entry_ns: float
    entry_and_return_ns: float
    request_ns: float = 0.0
    completion_ns: float = 0.0

    @property
    def return_ns(self) -> float:
        """What the return adds."""
        return max(self.entry_and_return_ns - self.entry_ns, 0.0)


@dataclass(frozen=True, slots=True)
class Tally:
    """Hits of one thread, and what they cost it in ns."""

    hits: int
    cost_ns: float


Tallies = Mapping[tuple[int, int], Tally]
"""Running totals by (pid, tid)."""

NOTHING = Tally(0, 0.0)


@dataclass(frozen=True, slots=True)
class Price:
    """What one hit costs in a process, in ns: on its posting functions and on its polling functions, plain and extended ones;
    what each request and each completion adds to plain ones; and a hit where NCCL takes completions.
    """

    post_ns: float = 0.0
    poll_ns: float = 0.0
    extended_post_ns: float = 0.0
    extended_poll_ns: float = 0.0
    request_ns: float = 0.0
    completion_ns: float = 0.0
    take_ns: float = 0.0


def price_of(costs: Mapping[CostClass, HitCost], sites: Iterable[Site]) -> Price:
    """The price of a hit by the dearest function of each kind.

    Of a call that is probed at entry and return each of the two hits is half; one that is probed at its return alone is trapped
    twice and counts once.
    """
    every = list(sites)
    found = [site for site in every if site.role != TAKEN]
    entries = {(site.inode, site.offset) for site in found if not site.on_return}
    returns = {(site.inode, site.offset) for site in found if site.on_return}
    dearest: dict[tuple[bool, bool], float] = {}
    for site in found:
        place, cost = (site.inode, site.offset), costs[site.cost]
        if place in entries and place in returns:
            price = cost.entry_and_return_ns / 2
        else:
            price = cost.entry_and_return_ns if site.on_return else cost.entry_ns
        kind = (site.role in POLLING, site.role not in DATA_PATH)
        dearest[kind] = max(dearest.get(kind, 0.0), price)
    kinds = ((False, False), (True, False), (False, True), (True, True))
    paid = [costs[site.cost] for site in every]
    post, poll, extended_post, extended_poll = (dearest.get(kind, 0.0) for kind in kinds)
    return Price(
        post,
        poll,
        extended_post,
        extended_poll,
        request_ns=max((cost.request_ns for cost in paid), default=0.0),
        completion_ns=max((cost.completion_ns for cost in paid), default=0.0),
        take_ns=max((costs[site.cost].entry_ns for site in every if site.role == TAKEN), default=0.0),
    )


def hits_by_thread(kernel: WireKernel, pids: Container[int]) -> dict[tuple[int, int], int]:
    """(pid, tid) → hits of data path probes so far, of the threads of these processes."""
    threads = kernel.threads().items()
    return {key: int(record["posts"]) + int(record["polls"]) + int(record["takes"]) for key, record in threads if key[0] in pids}


def tallies(kernel: WireKernel, prices: Mapping[int, Price]) -> dict[tuple[int, int], Tally]:
    """Hits and cost so far of the threads of the processes that have a price."""
    found = {}
    for key, record in kernel.threads().items():
        price = prices.get(key[0])
        if price is not None:
            extended_posts, extended_polls = int(record["extended_posts"]), int(record["extended_polls"])
            posts, polls = int(record["posts"]) - extended_posts, int(record["polls"]) - extended_polls
            plain = posts * price.post_ns + polls * price.poll_ns
            extended = extended_posts * price.extended_post_ns + extended_polls * price.extended_poll_ns
            work = int(record["requests_seen"]) * price.request_ns + int(record["completions_seen"]) * price.completion_ns
            takes = int(record["takes"])
            hits = posts + polls + extended_posts + extended_polls + takes
            found[key] = Tally(hits, plain + extended + work + takes * price.take_ns)
    return found


def measure_costs(kernel: WireKernel, calls: int = CALIBRATION_CALLS) -> dict[CostClass, HitCost]:
    """What a hit costs here and now, by class of instruction: a few hundred calls with probes less as many without.

    Measured on functions of our own that are called like a provider's, with requests and completions like real ones: one that
    begins with an instruction the kernel emulates, and one that does not. Takes some 20 ms. Raises what attaching raises.
    """
    with Calibrator(kernel) as own:
        emulated, stepped = (_hit(kernel, own, which, calls) for which in (0, 1))
        request_ns, completion_ns = _work(kernel, own, emulated, calls)
    first, second = (replace(hit, request_ns=request_ns, completion_ns=completion_ns) for hit in (emulated, stepped))
    return {CostClass.EMULATED: first, CostClass.OPTIMISED: first, CostClass.SINGLE_STEPPED: second}


def _hit(kernel: WireKernel, own: Calibrator, which: int, calls: int) -> HitCost:
    entry, leave = own.sites(which, Program.POLL)

    def poll() -> None:
        own.poll(which, 0)

    alone = both = 0.0
    for _ in range(TRIES):
        bare = _call_ns(poll, calls)
        alone = _probed_ns(kernel, [entry], poll, calls) - bare
        both = _probed_ns(kernel, [entry, leave], poll, calls) - bare
        if both > alone > 0:
            break
    return HitCost(max(alone, 0.0), max(alone, both, 0.0))


def _work(kernel: WireKernel, own: Calibrator, hit: HitCost, calls: int) -> tuple[float, float]:
    """What a request and a completion add, in ns. A completion is booked in full only when its request was posted: a post and a
    poll in turn, less what the two cost alone.
    """
    posting, _ = own.sites(2, Program.POST)
    polling = own.sites(0, Program.POLL)

    def post() -> None:
        own.post(2)

    def both() -> None:
        own.post(2)
        own.poll(0, 1)

    one = _probed_ns(kernel, [posting], post, calls) - _call_ns(post, calls)
    bare = _call_ns(both, calls)
    together = _probed_ns(kernel, [posting, *polling], both, calls) - bare
    return max(one - hit.entry_ns, 0.0), max(together - one - hit.entry_and_return_ns, 0.0)


def _probed_ns(kernel: WireKernel, sites: Sequence[Site], call: Callable[[], None], calls: int) -> float:
    attached = kernel.attach(sites)
    try:
        return _call_ns(call, calls)
    finally:
        kernel.detach(attached)


def _call_ns(call: Callable[[], None], calls: int) -> float:
    """The lower quartile of batches: a neighbour on the CPU only ever adds."""
    batches = []
    for _ in range(max(calls // 20, 5)):
        begin = time.perf_counter_ns()
        for _ in range(20):
            call()
        batches.append((time.perf_counter_ns() - begin) / 20)
    return sorted(batches)[len(batches) // 4]
