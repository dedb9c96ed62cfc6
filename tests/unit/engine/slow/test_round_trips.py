"""What the wire says of connections: what is measured, when it counts, and who is named for it."""

from __future__ import annotations

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.slow.findings import RoundTrips
from ncclwatch.model.job import Job, assemble
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import SlowKind as Kind
from unit.engine.slow.cases import KEYS, Case, Named, cases, context, link, sample
from unit.synthetic import WORLD, Rank, communicator, looks

RANKS = 4
BEGAN_S, SLOW_SINCE_S, NOW_S = 1_000.0, 1_010.0, 1_020.0


def four() -> Job:
    (job,) = assemble(looks([Rank(rank, RANKS, (communicator(rank, RANKS),)) for rank in range(RANKS)]))
    return job


def listed(job: Job, delays_ms: dict[tuple[int, int], float], *, usual_ms: float = 2.0) -> dict[str, NetworkLook]:
    """What every host says of its connections to the next in the ring and back; round trips in milliseconds."""
    found = {}
    for rank, member in enumerate(job.members):
        flows = []
        for peer in ((rank + 1) % RANKS, (rank - 1) % RANKS):
            facts = SocketFacts(1, "a", "b", rtt_us=int(1000 * delays_ms.get((rank, peer), usual_ms)))
            flows.append(
                FlowRecord(
                    member.info.pid, FlowKind.SOCKET, "Socket", "eth0", 0, FlowState.ACTIVE, "", rank, WORLD, rank, 0, peer,
                    Direction.SEND, role="data", socket=facts,
                )
            )  # fmt: skip
        found[member.info.host] = NetworkLook(flows=tuple(flows))
    return found


def delayed(delays_ms: dict[tuple[int, int], float], *, before_ms: float = 2.0) -> dict[tuple[int, int], float]:
    job, memory, trips = four(), NetworkMemory(), RoundTrips()
    for second in range(20):
        at = BEGAN_S + second
        for host, look in listed(job, delays_ms if at >= SLOW_SINCE_S else {}, usual_ms=before_ms).items():
            memory.feed(host, look, int(at * 1e9))
        trips.take(job, memory.delays())
    index = {member.info.key: number for number, member in enumerate(job.members)}
    return {(index[one], index[other]): round(1000 * longer) for (one, other), longer in trips.delayed(SLOW_SINCE_S).items()}


def test_links_that_have_become_slow_are_told_by_how_much() -> None:
    assert delayed({(1, 2): 60.0}) == {(1, 2): 58}
    assert delayed({(1, 2): 60.0, (2, 1): 60.0, (2, 3): 61.0, (3, 2): 59.0}) == {(1, 2): 58, (2, 1): 58, (2, 3): 59, (3, 2): 57}
    assert delayed({(1, 2): 60.0}, before_ms=50.0) == {(1, 2): 10}
    assert delayed({}) == {} == delayed({(1, 2): 1.0}), "nothing is longer"


def test_a_listing_counts_once_and_unknown_connections_are_left_out() -> None:
    job, memory, trips = four(), NetworkMemory(), RoundTrips()
    for host, look in listed(job, {}).items():
        memory.feed(host, look, 1)
    for _ in range(5):
        trips.take(job, memory.delays())
    assert trips.delayed(0.0) == {}
    trips.take(job, {"elsewhere": (2, {(1, WORLD, 0, 1): 5.0, (1, 0xDEAD, 0, 1): 5.0})})
    assert trips.delayed(0.0) == {}


def test_what_a_link_took_before_is_known_however_long_the_job_has_been_slow() -> None:
    job, trips = four(), RoundTrips()
    place = job.members[0].info.host, job.members[0].info.pid

    def measured(second: int, delay_ms: float) -> None:
        trips.take(job, {place[0]: (second * 1_000_000_000, {(place[1], WORLD, 0, 1): 1000 * delay_ms})})

    for second in range(5):
        measured(second, 2.0)
    for second in range(5, 500):
        measured(second, 60.0)
        assert len(trips.delayed(5.0)) == (second >= 6), second
    for second in range(500, 600):
        measured(second, 50.0)
    assert trips.delayed(590.0) == {}, "it was so before it slowed down once more"


# --- who is named for it -------------------------------------------------------------------------------------------------

RARELY = {(1, 2): 2, (2, 3): 2, (0, 1): 1, (3, 0): 1}


def case(
    name: str, pairs: set[tuple[int, int]], holds: dict[tuple[int, int], int], *named: Named, disagrees: str = ""
) -> Case:  # fmt: skip
    """24 samples, in so many of which each link holds somebody up, where the wire says that ``pairs`` are slow."""
    seen = [sample([link(*ends, 0.25, RANKS)], (), range(RANKS), RANKS) for ends, times in holds.items() for _ in range(times)]
    seen += [sample([], (), (), RANKS)] * (24 - len(seen))
    slow = {(KEYS[source], KEYS[destination]): 0.058 for source, destination in pairs}
    return Case(name, seen, context(0.3, hosts=RANKS, ranks=RANKS, delayed=slow), named, disagrees=disagrees)


@cases(
    case("the wire says nothing", set(), RARELY),
    case("an adapter that is hardly waited for", {(1, 2), (2, 3)}, RARELY, (Kind.NIC, (2,))),
    case("an adapter of whose links one is waited for", {(1, 2), (2, 3)}, {(1, 2): 4, (3, 0): 1}, (Kind.NIC, (2,))),
    case("a link that is waited for a little more", {(1, 2)}, RARELY | {(1, 2): 4}, (Kind.LINK, (1, 2))),
    case("an adapter that is waited for now and then", {(1, 2), (2, 3)}, RARELY | {(1, 2): 6, (2, 3): 6}, (Kind.NIC, (2,))),
    case("links that have nothing in common", {(1, 2), (3, 0)}, RARELY | {(1, 2): 4}),
    case("nobody waits for them", {(1, 2), (2, 3)}, {}, disagrees="names 2 (network interface)"),
)
def test_what_the_wire_says_is_slow_need_hardly_be_waited_for(case: Case) -> None:
    case.check()
