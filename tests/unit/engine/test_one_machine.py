"""One machine whose ranks NVLink joins: nothing that is open can be looked at, counts and calls are all there is (SIMULATED)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.model.failure import ProcessEnd
from ncclwatch.model.state import Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.scenario import (
    Expectation,
    Fault,
    FaultKind,
    Layout,
    Network,
    Observation,
    Scenario,
    ScoreClass,
    Workload,
)
from ncclwatch.simulate.wire import RecordSet
from score.cases import Case
from score.diagnosers import Ncclwatch
from unit.synthetic import Rank, communicator

FIRST_PID = 10_000


def machine(layout: Layout, fault: Fault, *planes: str, nccl: str = "2.27.5") -> Scenario:
    """A job of eight ranks at most, all on one host."""
    work = Workload(micro_batches=3, layers=1, iterations=60, dp_bytes=32 << 20)
    expect = Expectation(ScoreClass.H1, (VerdictClass.NOT_ENTERED,), (fault.rank,))
    network = Network(nccl=nccl, intra_node="p2p")
    observe = Observation(planes=planes or ("calls", "state"))
    return Scenario("one machine", "one machine", 7, expect, replace(layout, ranks_per_node=8), work, network, observe, (fault,))


def said(scenario: Scenario, *, without: int | None = None) -> Verdict:
    """The last word on it; ``without`` the process of a rank, as if nobody had ever looked at it."""
    moment = [*Case(scenario).moments()][-1]
    records = moment.records
    if without is not None:
        records = forget(records, without)
    return Ncclwatch().diagnose(records, moment.clock_s)[-1]


def forget(records: RecordSet, rank: int) -> RecordSet:
    pid = FIRST_PID + rank
    samples = [series for series in records.samples if series[-1].process.pid != pid]
    return replace(records, samples=samples, calls={host: e[e["pid"] != pid] for host, e in records.calls.items()})


def ranks(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


KILL = Fault(FaultKind.KILL, 0, start_s=5.0)
PLANES = (("calls", "state"), ("state",))


@pytest.mark.parametrize("planes", PLANES, ids=" and ".join)
@pytest.mark.parametrize("seen", [True, False], ids=["seen to end", "gone before anybody looked"])
def test_a_rank_that_was_killed_is_named_and_nobody_beside_it(planes: tuple[str, ...], seen: bool) -> None:
    verdict = said(machine(Layout(tp=2, dp=2), KILL, *planes), without=None if seen else 0)
    assert (verdict.verdict_class, ranks(verdict)) == (VerdictClass.DEAD, [0])


@pytest.mark.parametrize("planes", PLANES, ids=" and ".join)
def test_who_has_not_called_is_named_by_calls_or_by_counts(planes: tuple[str, ...]) -> None:
    never = Fault(FaultKind.NEVER_ENTERS, 3, iteration=12, role="dp")
    verdict = said(machine(Layout(tp=2, dp=2), never, *planes))
    assert (verdict.verdict_class, ranks(verdict)) == (VerdictClass.NOT_ENTERED, [3])


def test_a_pipelines_messages_are_followed() -> None:
    """Stage 1 waits for a message of stage 0, in which rank 0 alone has not called: by then stage 1 is behind as well."""
    never = Fault(FaultKind.NEVER_ENTERS, 0, iteration=12, role="tp")
    verdict = said(machine(Layout(tp=2, pp=2), never))
    assert (verdict.verdict_class, ranks(verdict)) == (VerdictClass.NOT_ENTERED, [0])


def test_where_messages_cannot_be_counted_nobody_is_named() -> None:
    """A message that was never sent: who should have, and who waits for it, have both called less than their fellows."""
    never = Fault(FaultKind.NEVER_ENTERS, 1, iteration=13, role="pp")
    verdict = said(machine(Layout(tp=2, pp=2), never, nccl="2.21.5"))
    assert not verdict.verdict_class.accuses or ranks(verdict) == [1]


def test_a_stalled_gpu_is_no_rest() -> None:
    """All have called all they can: which GPU does not go on lies in its memory, but that the job stands is said."""
    stall = Fault(FaultKind.GPU_STALL, 1, iteration=12, role="tp", offset_ms=1.0)
    verdict = said(machine(Layout(tp=4), stall, nccl="2.32.3"))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert "hides whether an operation is open" in verdict.summary and any("shim" in step for step in verdict.next_steps)


def test_who_left_a_call_out_is_named_by_its_habit() -> None:
    skip = Fault(FaultKind.SKIP, 5, iteration=12, role="tp")
    verdict = said(machine(Layout(tp=4, pp=2), skip, nccl="2.21.5"))
    assert (verdict.verdict_class, ranks(verdict)) == (VerdictClass.NOT_ENTERED, [5])


@pytest.mark.parametrize(("wait_status", "verdict_class"), [(11, VerdictClass.DEAD), (0, VerdictClass.UNKNOWN)])
def test_who_was_killed_amid_what_all_had_called_is_named(wait_status: int, verdict_class: VerdictClass) -> None:
    """Neither calls nor counts tell, and memory shows nothing: that a signal ended it does. Who ended by itself may be done."""
    pair = [Rank(rank, 2, (communicator(rank, 2, transport=Transport.P2P),), host="node0").looks()[0] for rank in (0, 1)]
    session, verdicts = DiagnosisSession(), list[Verdict]()
    for second in range(12):
        at_ns = second * 10**9
        alive, other = (replace(sample, time_ns=at_ns, wall_ns=at_ns) for sample in pair)
        end = ProcessEnd(other.process.key, "node0", 1, at_ns, at_ns, 0, 1, wait_status)
        batch = NodeBatch(host="node0", boot_id="boot", sequence=second, time_ns=at_ns, wall_ns=at_ns, looked=True)
        batch.samples = (alive, other if second < 2 else other.ended(at_ns, at_ns))
        batch.ends = (end,) if second == 2 else ()
        session.feed(batch)
        verdicts = list(session.judge(at_ns).verdicts)
    assert verdicts[0].verdict_class is verdict_class, verdicts[0].summary
    assert ranks(verdicts[0]) == ([1] if verdict_class.accuses else [])
