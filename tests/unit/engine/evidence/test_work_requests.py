"""What work requests show: of a job that stands, and of flows that have become slow; each with a near miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ncclwatch.collect.network_memory import KEPT_WINDOWS, MAX_FLOWS, MEMORY_NS, NetworkMemory
from ncclwatch.engine.case import Case, Known
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.evidence.base import FactKind, LinkNode, Strength
from ncclwatch.engine.evidence.nics import DeadPath
from ncclwatch.engine.evidence.work_requests import Shows, WorkFact, WorkRequests
from ncclwatch.model.job import Job
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, PathAnswer, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Verdict
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from unit.engine.evidence.said import case_of
from unit.synthetic import SECOND, WORLD, Rank, looks, silent_link

END_NS = 3 * SECOND
"""When the jobs below were looked at last; they stand since the first look, a second after 0."""
SEND, RECV = Direction.SEND, Direction.RECV


def window(rank: int, peer: int, direction: Direction = SEND, **work: Any) -> FlowWindow:
    """A tenth of a second of a queue pair of a rank, seen in a burst that was ordered; nothing moved, and the proxy polled."""
    counts: dict[str, Any] = {"posted": 0, "completed": 0, "received": 0, "receives_posted": 0, "in_flight": 0, "polls": 5000}
    counts |= {"counting": Counting.ORDER, "begin_ns": 0, "end_ns": END_NS, "seen_s": 0.1} | work
    work_window, flow = WorkWindow(**counts), (WORLD, rank, 0, peer, direction, 0, 17 + rank)
    return FlowWindow(1000 + rank, Scope.FLOW, work_window, rank, "mlx5_0", 1, *flow, role="data")


def memory_of(*windows: FlowWindow) -> NetworkMemory:
    memory = NetworkMemory()
    for one in windows:
        memory.feed_work(f"node{one.rank}", [one], 7 * SECOND)
    return memory


def standing(ranks: Sequence[Rank], *windows: FlowWindow) -> Case:
    """A job that has not moved for two seconds."""
    samples = looks(ranks, 3)
    samples = [[replace(one, time_ns=(number + 1) * SECOND) for number, one in enumerate(series)] for series in samples]
    case = case_of(samples, network=memory_of(*windows))
    case.still = 2.0
    return case


def shown(ranks: Sequence[Rank], *windows: FlowWindow) -> list[tuple[Shows, object]]:
    return [(fact.shows, fact.subject) for fact in standing(ranks, *windows).facts.of(FactKind.WORK, WorkFact)]


def judged(ranks: Sequence[Rank], *windows: FlowWindow) -> Verdict:
    case = standing(ranks, *windows)
    return diagnose([member.samples for member in case.job.members], Known(network=case.known.network))


LINK = LinkNode(WORLD, 1, 2)


def test_what_was_posted_and_does_not_complete_is_the_network() -> None:
    """Rank 1 has handed eight steps to the network and got none back."""
    (fact,) = standing(silent_link(), window(1, 2)).facts.of(FactKind.WORK, WorkFact)
    assert (fact.shows, fact.subject, fact.strength, fact.owner, fact.peer) == (Shows.NOT_COMPLETED, LINK, Strength.LIKELY, 1, 2)
    assert fact.text == (
        "rank 1 (node1, pid 1001) to rank 2 (mlx5_0 queue pair 18): 0 posted, 0 completed, asked 5,000 times in 0.1 s "
        f"(ordered, while the job stands): {Shows.NOT_COMPLETED}"
    )
    exact = window(1, 2, counting=Counting.EXACT, seen_s=1.0, in_flight=4, oldest_s=1.9)
    (fact,) = standing(silent_link(), exact).facts.of(FactKind.WORK, WorkFact)
    assert fact.strength is Strength.PROVEN and "4 in flight for 1.9 s" in fact.text and "in 1 s (while" in fact.text
    assert shown(silent_link(), window(1, 2, completed=1)) == [], "something completes"


def test_what_nobody_asks_for_is_the_proxy() -> None:
    (fact,) = standing(silent_link(), window(1, 2, polls=0)).facts.of(FactKind.WORK, WorkFact)
    assert (fact.shows, fact.strength) == (Shows.NOT_TAKEN, Strength.PROVEN)
    assert shown(silent_link(), window(1, 2, polls=1)) == [(Shows.NOT_COMPLETED, LINK)]
    assert shown(silent_link(), window(1, 2, polls=None)) == [], "nobody counted who asks"
    assert shown(silent_link(), window(2, 1, RECV, polls=0)) == [(Shows.NOT_RECEIVED, LINK)]
    assert shown(silent_link(), window(2, 1, RECV)) == [(Shows.NOTHING_RECEIVED, LINK)]
    assert shown(silent_link(), window(2, 1, RECV, received=1)) == [], "something arrives"


def test_what_an_order_showed_stays_known_while_counting_goes_on() -> None:
    asked = window(1, 2)
    later = replace(asked, work=replace(asked.work, begin_ns=asked.work.end_ns, end_ns=asked.work.end_ns + 10**9, polls=None))
    assert shown(silent_link(), asked, later) == [(Shows.NOT_COMPLETED, LINK)]
    failed = replace(later, work=replace(later.work, errors=1))
    assert shown(silent_link(), asked, failed) == [(Shows.FAILED, LINK)]


def with_steps(rank: int, direction: Direction, **steps: int | None) -> list[Rank]:
    """The silent link, with other steps at one end of one connection."""
    ranks = silent_link()
    operations = [
        replace(one, subs=tuple(replace(sub, **steps) for sub in one.subs)) if one.direction is direction else one  # type: ignore[arg-type]
        for one in ranks[rank].operations
    ]
    ranks[rank] = replace(ranks[rank], operations=tuple(operations))
    return ranks


def test_a_proxy_that_sleeps_before_it_flushes_what_arrived_asks_for_nothing() -> None:
    """All receives are filled, and the flush to GPU memory is never begun, or never taken."""
    filled = with_steps(2, RECV, posted=8, received=8, transmitted=4)
    assert shown(filled, window(2, 1, RECV, polls=0)) == [(Shows.NOT_RECEIVED, LINK)]
    assert shown(filled, window(2, 1, RECV)) == [], "it asks: nothing more is to arrive"
    flushed = with_steps(2, RECV, posted=8, received=8, transmitted=8)
    assert shown(flushed, window(2, 1, RECV, polls=0)) == [], "nothing is left to be asked for"


def test_where_nothing_is_posted_it_is_told_whether_data_or_receives_are_missing() -> None:
    assert shown(silent_link(), window(0, 1)) == [(Shows.NOTHING_POSTED, LinkNode(WORLD, 0, 1))]
    ready = with_steps(0, SEND, gpu_ready=8)
    assert shown(ready, window(0, 1)) == [(Shows.NOT_POSTED, LinkNode(WORLD, 0, 1))], "receives of rank 1 are open"
    closed = with_steps(1, RECV, posted=4)
    closed[0] = ready[0]
    assert shown(closed, window(0, 1)) == [(Shows.NO_RECEIVES, LinkNode(WORLD, 0, 1))]
    assert shown(with_steps(0, SEND, gpu_ready=None), window(0, 1)) == [(Shows.NOTHING_POSTED, LinkNode(WORLD, 0, 1))]
    assert shown(closed, window(1, 0, RECV)) == [], "nothing is to be received"


def test_errors_are_told_whatever_moves() -> None:
    assert shown(silent_link(), window(1, 2, errors=1, completed=3)) == [(Shows.FAILED, LINK)]
    assert shown(silent_link(), window(2, 1, RECV, errors=1)) == [(Shows.FAILED, LINK)]


def test_what_was_not_seen_since_the_job_stands_proves_nothing() -> None:
    early = window(1, 2, end_ns=END_NS, seen_s=2.1)
    assert shown(silent_link(), early) == [], "part of it was seen before the job came to stand"
    assert shown(silent_link(), replace(early, work=replace(early.work, seen_s=1.9))) == [(Shows.NOT_COMPLETED, LINK)]
    assert shown(silent_link(), window(1, 2, end_ns=SECOND // 2)) == []
    assert shown(silent_link(), window(1, 2, seen_s=0.0)) == [], "nothing was seen"
    assert shown(silent_link(), window(1, 2, seen_s=0.005)) == [], "too little"
    running = standing(silent_link(), window(1, 2))
    running.still = 0.0
    assert running.facts.of(FactKind.WORK) == ()


def test_flows_of_which_it_is_not_known_whose_they_are_say_nothing() -> None:
    found = window(1, 2)
    others: Iterable[FlowWindow] = (
        replace(found, pid=4711), replace(found, comm_hash=None), replace(found, comm_hash=0xBEEF), replace(found, peer=None),
        replace(found, direction=None), replace(found, rank=77), replace(found, scope=Scope.PEER),
        window(1, 2, counting=Counting.TCP),
    )  # fmt: skip
    for other in others:
        assert shown(silent_link(), other) == [], other
    assert shown(silent_link(), window(1, 77)) == [(Shows.NOTHING_POSTED, LinkNode(WORLD, 1, 77))]


def test_where_some_were_counted_it_is_told_of_how_many_others_were_not() -> None:
    def blind(*windows: FlowWindow) -> list[str]:
        return list(WorkRequests().coverage(standing(silent_link(), *windows)))

    assert blind(window(1, 2), window(3, 0, end_ns=0)) == [
        "work requests of 3 processes since the job stands: they were not counted"
    ]
    assert blind(*(window(rank, (rank + 1) % 4) for rank in range(4))) == []
    assert blind() == blind(window(3, 0, end_ns=0)) == [], "nobody counts here"


# --- in a verdict ------------------------------------------------------------------------------------------------------


def test_a_verdict_says_what_the_flows_of_those_named_show() -> None:
    plain, told = judged(silent_link()), judged(silent_link(), window(2, 1, RECV), window(1, 2))
    assert told.culprits == plain.culprits and told.summary == plain.summary
    lines = told.evidence[len(plain.evidence) :]
    assert [str(Shows.NOT_COMPLETED) in line for line in lines] == [True, False] and str(Shows.NOTHING_RECEIVED) in lines[1]
    assert "wire" in told.planes and "wire" not in plain.planes
    assert "planes-beside" in told.rules


def test_flows_of_others_are_not_told() -> None:
    assert judged(silent_link(), window(3, 0)).evidence == judged(silent_link()).evidence
    assert any(str(Shows.NOTHING_POSTED) in line for line in judged(silent_link(), window(0, 1)).evidence), "a peer of rank 1"


# --- flows that have become slow ---------------------------------------------------------------------------------------


def slow_flows(rates: Sequence[float], latencies: Sequence[float] = (), **work: Any) -> list[Shows]:
    """What is said of a flow that carried so many bytes a second, with so many µs from post to completion, window by window."""
    latencies = latencies or [20.0] * len(rates)
    memory = NetworkMemory()
    for number, (rate, latency) in enumerate(zip(rates, latencies, strict=True)):
        loaded: dict[str, Any] = {"posted_bytes": 1 << 20, "in_flight": 3, "uncertainty": 0.02} | work
        loaded |= {"throughput": rate, "latency_p50_ns": latency * 1e3, "end_ns": number * SECOND}
        one = window(1, 2, counting=Counting.BURSTS, **loaded)
        memory.feed_work("node1", [replace(one, scope=Scope.PEER, channel=None, direction=None)], number)
    facts = Case(Job([]), Known(network=memory)).facts.of(FactKind.WORK, WorkFact)
    assert all(fact.global_rank == 1 and fact.text for fact in facts)
    return [fact.shows for fact in facts]


def test_a_flow_that_carries_a_fifth_less_than_it_did_under_load_is_slow() -> None:
    assert slow_flows([1e9] * 8 + [0.7e9] * 4) == [Shows.SLOWED]
    assert slow_flows([1e9] * 8 + [0.85e9] * 4) == []
    assert slow_flows([1e9] * 8 + [0.7e9] * 4, uncertainty=0.1) == [], "it is not known that well"
    assert slow_flows([1e9] * 7 + [0.7e9] * 4) == [], "too little is known of what it did"
    assert slow_flows([1e9] * 9 + [0.7e9] * 2 + [1e9]) == [], "for a moment"
    assert slow_flows([1e9] * 8 + [0.7e9] * 4, in_flight=0) == [], "there was nothing to carry"
    assert slow_flows([1e9] * 8 + [0.7e9] * 4, posted_bytes=0) == []


def test_a_flow_whose_requests_take_twice_as_long_is_slow() -> None:
    assert slow_flows([1e9] * 12, [20.0] * 8 + [45.0] * 4) == [Shows.LATER]
    assert slow_flows([1e9] * 12, [20.0] * 8 + [35.0] * 4) == []


# --- what is kept ------------------------------------------------------------------------------------------------------


def test_windows_that_are_kept_are_bounded() -> None:
    memory = NetworkMemory()
    memory.feed_work("node1", [window(1, peer) for peer in range(MAX_FLOWS + 5)], 1)
    for _ in range(KEPT_WINDOWS + 5):
        memory.feed_work("node1", [window(1, 2)], 1)
    known = memory.hosts["node1"]
    assert len(known.work) == MAX_FLOWS and max(map(len, known.work.values())) == KEPT_WINDOWS
    memory.feed_work("node1", [window(1, 9999, end_ns=END_NS + 2 * MEMORY_NS)], 1)
    assert len(known.work) == 1, "the others are long gone"


def test_completion_times_stand_in_for_round_trips_where_there_are_none() -> None:
    """In the form in which the slowness estimate takes round trips: the longest of the queue pairs of a connection, µs."""
    memory = NetworkMemory()
    pair = window(1, 2, latency_p50_ns=40_000.0)
    other = replace(pair, queue_pair=99, work=replace(pair.work, latency_p50_ns=70_000.0))
    memory.feed_work("node1", [pair, other, window(1, 0, RECV, latency_p50_ns=9e9), window(1, 3)], 5)
    assert memory.delays() == {"node1": (5, {(1001, WORLD, 1, 2): 70.0})}
    memory.feed_work("node1", [window(1, 3)], 6)
    assert memory.delays()["node1"][0] == 5, "nothing new was measured"
    memory.feed_work("node2", [replace(pair, work=replace(pair.work, counting=Counting.TCP))], 5)
    memory.feed("node3", NetworkLook(), 5)
    assert memory.delays().keys() == {"node1"}


def probed(
    alive: bool, *, unacknowledged: int | None, kind: str = "tcp", time_ns: int = END_NS, state: FlowState = FlowState.BLOCKED
) -> Case:
    """The same job; a probe was answered on the path of rank 1 to rank 2, over a socket or (``None``) a queue pair."""
    answer = PathAnswer(time_ns, "10.0.0.2", alive, kind, "refused" if alive else "timeout", "as it says", 90.0)
    sock = None if unacknowledged is None else SocketFacts(1, "10.0.0.1:5", "10.0.0.2:7", unacknowledged=unacknowledged)
    flow = FlowRecord(
        1001, FlowKind.SOCKET if sock else FlowKind.RDMA, "Socket", "mlx5_0", 1, state, comm_hash=WORLD, rank=1,
        channel=0, peer=2, direction=SEND, global_rank=1, socket=sock, path=answer,
    )  # fmt: skip
    case = standing(silent_link())
    case.known.network.feed("node1", NetworkLook(flows=(flow, replace(flow, channel=1))), 7 * SECOND)
    return case


def test_an_answer_on_a_path_that_stands_still_is_a_fact_once() -> None:
    (fact,) = probed(True, unacknowledged=0).facts.of(FactKind.WORK, WorkFact)
    assert (fact.shows, fact.subject, fact.owner, fact.peer, fact.strength) == (Shows.PEER, LINK, 1, 2, Strength.PROVEN)
    assert fact.text == (
        f"rank 1 (node1, pid 1001) to rank 2: a probe of ours (TCP, 90 µs) says refused: as it says: {Shows.PEER}"
    )
    for state in (FlowState.ACTIVE, FlowState.STALLED, FlowState.UNKNOWN):
        (fact,) = probed(True, unacknowledged=3, state=state).facts.of(FactKind.WORK, WorkFact)
        assert fact.shows is Shows.ALIVE, "its own proxy may not take what is done: that nobody receives is not known"
    assert not probed(True, unacknowledged=0, time_ns=SECOND - 1).facts.of(FactKind.WORK, WorkFact), "from before the standstill"


def test_that_nobody_answers_is_the_path_s_doing_where_the_connection_gets_no_answer_either() -> None:
    for case in (probed(False, unacknowledged=3), probed(False, unacknowledged=None, kind="rdma")):
        (fact,) = case.facts.of(FactKind.WORK, WorkFact)
        assert (fact.shows, fact.strength) == (Shows.NO_PATH, Strength.LIKELY)
        dead, _ = case.facts.of(FactKind.PATH_DEAD, DeadPath)
        assert (dead.subject, dead.remote, dead.global_rank) == ((WORLD, 1, 2), "10.0.0.2", 1)
        assert dead.local == ("10.0.0.1" if case.known.network.hosts["node1"].flows[0].socket else "mlx5_0 of node1")
    kept_out = probed(False, unacknowledged=0)
    assert not [*kept_out.facts.of(FactKind.WORK, WorkFact), *kept_out.facts.of(FactKind.PATH_DEAD, DeadPath)], "a firewall"
