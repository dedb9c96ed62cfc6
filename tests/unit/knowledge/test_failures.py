"""The order of a job's failures: made-up batches of several nodes, whose clocks are off as far as they say."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.knowledge.failures import UNSEEN, FailureLog, Incident
from ncclwatch.knowledge.session import InformedSession
from ncclwatch.model.failure import FailureKind, Place, ProcessEnd
from ncclwatch.model.network import KernelLogLine, NetworkLook
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import VerdictClass
from unit.synthetic import Rank, frozen_ring

SECOND = 10**9
WALL = 1_700_000_000 * SECOND
MS = 1_000_000


def look(rank: Rank, at_s: float, run_state: str = "S", **own: object) -> ProcessSample:
    """One look at a rank, so many seconds after the beginning."""
    [sample] = rank.looks(1)
    communicators = tuple(replace(one, **own) for one in sample.communicators) if own else sample.communicators  # type: ignore[arg-type]
    time_ns = int(at_s * SECOND)
    return replace(sample, time_ns=time_ns, wall_ns=WALL + time_ns, run_state=run_state, communicators=communicators)


def end(rank: Rank, at_s: float, wait_status: int | None, order: int = 0, late_ms: float = 0) -> ProcessEnd:
    [sample] = rank.looks(1)
    times = int(at_s * SECOND), WALL + int(at_s * SECOND)
    return ProcessEnd(sample.process.key, sample.process.host, rank.rank, *times, int(late_ms * MS), order, wait_status)


def batch(
    host: str, at_s: float, samples: Sequence[ProcessSample] = (), ends: Sequence[ProcessEnd] = (), *, error_ms: float | None = 1,
    offset_s: float = 0.0, lines: Sequence[KernelLogLine] = (), number: int = 0,
) -> NodeBatch:  # fmt: skip
    error = None if error_ms is None else int(error_ms * MS)
    return NodeBatch(
        host=host, boot_id="boot-" + host, sequence=number, time_ns=int(at_s * SECOND), wall_ns=WALL + int(at_s * SECOND),
        looked=bool(samples), samples=tuple(samples), ends=tuple(ends),
        network=NetworkLook(kernel=tuple(lines)) if lines else None,
        clock_offset_ns=int(offset_s * SECOND), clock_error_ns=error,
    )  # fmt: skip


def exited(status: int) -> int:
    return status << 8


def ring(world: int = 4) -> list[Rank]:
    return frozen_ring(2, world)


def incident_of(log: FailureLog) -> Incident:
    [incident] = log.incidents()
    return incident


def fed(ends: Sequence[tuple[int, float, int | None]], **clocks: float | None) -> Incident:
    """Four ranks on a host each; (rank, when, how) of those that end."""
    log, ranks = FailureLog(), ring()
    for rank in ranks:
        log.feed(batch(f"node{rank.rank}", 0, [look(rank, 0)]))
    for number, at_s, how in ends:
        error = clocks.get(f"node{number}", 1)
        log.feed(batch(f"node{number}", at_s, ends=[end(ranks[number], at_s, how)], error_ms=error))
    return incident_of(log)


def test_who_was_first_who_followed_and_after_how_long() -> None:
    incident = fed([(0, 10.5, exited(1)), (2, 10.0, signal.SIGKILL), (1, 10.7, signal.SIGABRT), (3, 11.0, exited(1))])
    assert [event.rank for event in incident.first] == [2]
    assert incident.over and not incident.outside
    told = [(one.rank, one.place, one.kind, one.code, round(one.after_s, 3), one.error_s) for one in incident.failures()]
    assert told == [
        (2, Place.FIRST, FailureKind.SIGNAL, signal.SIGKILL, 0.0, 0.0),
        (0, Place.FOLLOWED, FailureKind.EXIT, 1, 0.5, 0.002),
        (1, Place.FOLLOWED, FailureKind.SIGNAL, signal.SIGABRT, 0.7, 0.002),
        (3, Place.FOLLOWED, FailureKind.EXIT, 1, 1.0, 0.002),
    ]


def test_two_hosts_whose_clocks_are_no_nearer_than_their_failures_are_not_ordered() -> None:
    incident = fed([(0, 10.0, exited(1)), (2, 10.1, signal.SIGSEGV), (1, 12.0, exited(1))], node0=80, node2=80)
    assert {event.rank for event in incident.first} == {0, 2}
    assert [one.place for one in incident.failures()] == [Place.PERHAPS, Place.PERHAPS, Place.FOLLOWED]
    sure = fed([(0, 10.0, exited(1)), (2, 10.1, signal.SIGSEGV), (1, 12.0, exited(1))], node0=20, node2=20)
    assert {event.rank for event in sure.first} == {0}


def test_clocks_that_nobody_compared_order_nothing_between_hosts() -> None:
    incident = fed([(0, 10.0, exited(1)), (2, 20.0, signal.SIGSEGV)], node0=None, node2=None)
    assert {event.rank for event in incident.first} == {0, 2}
    assert [one.error_s for one in incident.failures()] == [0.0, None]


def test_a_node_whose_clock_is_behind_is_set_right() -> None:
    """Its failure was the later one, though its own clock says otherwise."""
    log, ranks = FailureLog(), ring()
    for rank in ranks:
        log.feed(batch(f"node{rank.rank}", 0, [look(rank, 0)]))
    log.feed(batch("node0", 10, ends=[end(ranks[0], 10, exited(1))], offset_s=3.0))
    log.feed(batch("node1", 12, ends=[end(ranks[1], 12, exited(1))]))
    assert [event.rank for event in incident_of(log).first] == [1]


def test_on_one_host_the_kernels_order_counts() -> None:
    """Both were heard of at once, by a thread that had waited for a CPU."""
    log, ranks = FailureLog(), ring()
    for one in ranks:
        one.host = "node0"
    log.feed(batch("node0", 0, [look(one, 0) for one in ranks]))
    ends = [end(ranks[3], 10, exited(1), order=1, late_ms=500), end(ranks[1], 10, signal.SIGKILL, order=0, late_ms=500)]
    log.feed(batch("node0", 10, ends=ends))
    assert [event.rank for event in incident_of(log).first] == [1]


@pytest.mark.parametrize("end_after_s", [0.3, 3.0])
def test_what_nccl_reports_of_a_peer_comes_behind_that_peers_end(end_after_s: float) -> None:
    """The error was seen at a look a second after the one before; the peer ended in between, or surely later."""
    log, ranks = FailureLog(), ring(2)
    for rank in ranks:
        log.feed(batch(f"node{rank.rank}", 9, [look(rank, 9)]))
    log.feed(batch("node0", 10, [look(ranks[0], 10, async_result="ncclRemoteError")]))
    log.feed(batch("node1", 9 + end_after_s, ends=[end(ranks[1], 9 + end_after_s, signal.SIGKILL)]))
    first = incident_of(log).first
    assert [event.rank for event in first] == ([1] if end_after_s < 1 else [0])


def test_a_job_that_ends_well_is_no_incident_and_a_rank_that_leaves_early_is_told() -> None:
    log, ranks = FailureLog(), ring()
    for rank in ranks:
        log.feed(batch(f"node{rank.rank}", 0, [look(rank, 0)]))
        log.feed(batch(f"node{rank.rank}", 5, ends=[end(rank, 5, 0)]))
    assert log.incidents() == ()
    incident = fed([(2, 3.0, 0), (0, 600.0, exited(1)), (1, 601.0, exited(1)), (3, 602.0, exited(1))])
    assert [event.rank for event in incident.first] == [0]
    assert next((one.rank, one.place) for one in incident.failures()) == (2, Place.BEFORE)


def line(
    kind: str, host: str, at_s: float, *, pid: int | None = None, code: int | None = None, device: str = ""
) -> KernelLogLine:
    return KernelLogLine(host, kind, device, f"{kind} line", int(at_s * SECOND), 4, code, pid, WALL + int(at_s * SECOND))


def test_the_kernels_log_says_why_a_process_was_killed() -> None:
    log, ranks = FailureLog(), ring()
    for rank in ranks:
        log.feed(batch(f"node{rank.rank}", 0, [look(rank, 0)]))
    log.feed(batch("node2", 10, ends=[end(ranks[2], 10, signal.SIGKILL)], lines=[line("memory", "node2", 10.0, pid=1002)]))
    log.feed(batch("node1", 10, lines=[line("memory", "node1", 9.9, pid=77)]))
    incident = incident_of(log)
    assert [(event.rank, event.kind) for event in incident.first] == [(2, FailureKind.MEMORY)]
    others = [event for event in incident.events if event.rank is None]
    assert [(event.host, event.pid) for event in others] == [("node1", 77)], "a helper's process is told, and not named first"


@pytest.mark.parametrize(("code", "first"), [(79, 1), (45, 2)])
def test_an_xid_of_a_ranks_gpu_may_be_first_unless_it_only_follows(code: int, first: int) -> None:
    log, ranks = FailureLog(), ring()
    for rank in ranks:
        rank.communicators = tuple(replace(own, bus_id=0x07000 + (rank.rank << 12)) for own in rank.communicators)
        log.feed(batch(f"node{rank.rank}", 0, [look(rank, 0)]))
    log.feed(batch("node1", 9, lines=[line("xid", "node1", 9.0, code=code, device="0000:08:00")]))
    log.feed(batch("node2", 10, ends=[end(ranks[2], 10, exited(1))]))
    assert [event.rank for event in incident_of(log).first] == [first]


@pytest.mark.parametrize(
    ("how", "outside"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGKILL, "all of it at once by SIGKILL"), (exited(1), ""), (signal.SIGSEGV, "SIGSEGV")],
)
def test_who_is_ended_from_outside_is_not_blamed(how: int, outside: str) -> None:
    incident = fed([(rank, 10 + rank / 100, how) for rank in range(4)])
    assert incident.over
    assert outside in incident.outside and bool(outside) == bool(incident.outside)


def test_an_end_that_nobody_saw_is_no_failure_and_a_status_that_comes_later_is() -> None:
    log, ranks = FailureLog(), ring(2)
    log.feed(batch("node0", 1, [look(ranks[0], 1)]))
    log.feed(batch("node1", 1, [look(ranks[1], 1)]))
    log.feed(batch("node1", 2, [look(ranks[1], 2, run_state="X")]))
    assert log.incidents() == ()
    log.feed(batch("node1", 2, ends=[end(ranks[1], 1.5, exited(7))]))
    [one] = [event for event in incident_of(log).events if event.rank == 1]
    assert (one.code, one.words) == (7, "exit status 7")
    assert one.words != UNSEEN


def test_a_rank_that_tears_down_is_still_of_its_job() -> None:
    """Its newest look shows no communicator any more."""
    log, ranks = FailureLog(), ring(2)
    for rank in ranks:
        log.feed(batch(f"node{rank.rank}", 1, [look(rank, 1)]))
    log.feed(batch("node1", 2, [replace(look(ranks[1], 2), communicators=())]))
    log.feed(batch("node1", 3, ends=[end(ranks[1], 3, exited(3))]))
    log.feed(batch("node0", 2, ends=[end(ranks[0], 2, signal.SIGKILL)]))
    assert [event.rank for event in incident_of(log).first] == [0]


@pytest.mark.parametrize("observed", [True, False])
def test_what_nccl_reports_blames_nobody_while_a_peer_is_not_observed(observed: bool) -> None:
    log, ranks = FailureLog(), ring(2)
    for rank in ranks if observed else ranks[:1]:
        log.feed(batch(f"node{rank.rank}", 1, [look(rank, 1)]))
    log.feed(batch("node0", 2, [look(ranks[0], 2, async_result="ncclRemoteError")]))
    for rank in ranks if observed else ranks[:1]:
        log.feed(batch(f"node{rank.rank}", 9, ends=[end(rank, 9, exited(1))]))
    incident = incident_of(log)
    assert incident.over and bool(incident.outside) is not observed


def test_nonsense_from_a_socket_is_taken_for_what_it_may_be() -> None:
    log, ranks = FailureLog(), ring(2)
    log.feed(batch("node0", 1, [look(ranks[0], 1)]))
    strange = replace(end(ranks[0], 1, 1 << 40), late_ns=-5, wall_ns=1 << 62, rank=-7)
    log.feed(batch("node0", 2, ends=[strange, replace(strange, host="elsewhere")], error_ms=-4))
    assert log.incidents() == ()
    log.feed(batch("node1", 1, [look(ranks[1], 1)]))
    log.feed(batch("node1", 2, ends=[replace(end(ranks[1], 1, 0x7F05), wall_ns=-(1 << 62))]))
    assert len(incident_of(log).failures()) == 2


# --- in a session ----------------------------------------------------------------------------------------------------------


class Nodes:
    """A node a rank, a second a round, judged as an engine does."""

    def __init__(self, world: int = 4, run_state: str = "S") -> None:
        self.session, self.ranks, self.round, self.told = InformedSession(), frozen_ring(2, world, run_state=run_state), 0, []  # type: ignore[var-annotated]

    def go(self, rounds: int = 1, ends: Sequence[ProcessEnd] = (), gone: Sequence[int] = (), **own: object) -> None:
        for _ in range(rounds):
            for rank in self.ranks:
                state = "X" if rank.rank in gone else rank.run_state
                mine = [one for one in ends if one.rank == rank.rank]
                sample = look(rank, self.round, state, **own)
                self.session.feed(batch(f"node{rank.rank}", self.round, [sample], mine, number=self.round), self.round * SECOND)
            self.told += self.session.judge(self.round * SECOND).told
            self.round += 1


def test_the_first_is_named_once_all_are_gone_and_stays_named() -> None:
    nodes = Nodes()
    nodes.go(2)
    ends = [end(nodes.ranks[number], 2 + number / 10, exited(1) if number else signal.SIGSEGV) for number in range(4)]
    nodes.go(1, ends, gone=range(4))
    nodes.go(3, gone=range(4))
    verdict = nodes.session.verdict
    assert verdict is not None and verdict.verdict_class is VerdictClass.DEAD
    assert [one.rank for one in verdict.culprits] == [0] and verdict.victims == (1, 2, 3)
    assert "SIGSEGV" in verdict.summary and next(one.place for one in verdict.failures) is Place.FIRST
    assert verdict.knowledge and verdict.culprits[0].ticket is not None
    assert len(nodes.told) == 1
    nodes.session.ask()
    assert nodes.session.is_due(nodes.round * SECOND)
    assert [one.id for one in nodes.session.judge(nodes.round * SECOND).answers] == [verdict.id]


def test_a_hang_that_stood_explains_the_abort_that_follows() -> None:
    nodes = Nodes(run_state="S")
    nodes.ranks[2].run_state = "T"
    nodes.go(4)
    hang = nodes.session.verdict
    assert hang is not None and hang.verdict_class is VerdictClass.STOPPED
    ends = [end(nodes.ranks[number], 4 + number / 10, signal.SIGABRT) for number in (0, 1, 3)]
    nodes.go(1, ends, gone=(0, 1, 3))
    nodes.go(1, [end(nodes.ranks[2], 5, signal.SIGKILL)], gone=range(4))
    after = nodes.session.verdict
    assert after is not None and (after.id, [one.rank for one in after.culprits]) == (hang.id, [2])
    assert [one.rank for one in after.failures] == [0, 1, 3, 2]


def test_a_job_that_was_ended_from_outside_accuses_nobody() -> None:
    nodes = Nodes()
    nodes.go(2)
    nodes.go(2, [end(rank, 2, signal.SIGTERM) for rank in nodes.ranks], gone=range(4))
    verdict = nodes.session.verdict
    assert verdict is not None and verdict.verdict_class is VerdictClass.UNKNOWN
    assert not verdict.culprits and "SIGTERM" in verdict.summary and not nodes.told


def test_another_job_on_the_hosts_ends_the_memory_of_the_first() -> None:
    nodes = Nodes()
    nodes.go(2)
    nodes.go(2, [end(rank, 2 + rank.rank, exited(1)) for rank in nodes.ranks], gone=range(4))
    assert nodes.session.failures.incidents()
    log = nodes.session.failures
    [sample] = nodes.ranks[0].looks(1)
    other = replace(sample, process=replace(sample.process, key=replace(sample.process.key, pid=9)), wall_ns=WALL + 100 * SECOND)
    log.feed(batch("node0", 100, [replace(other, communicators=())]))
    assert log.incidents() == ()
