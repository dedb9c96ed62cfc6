"""What is told beside an explanation: NICs, connections and kernel logs where they concern its ranks, and CPU limits."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import jsonschema

from ncclwatch.engine.case import Known
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.patience import Patience
from ncclwatch.model.network import (
    FlowKind,
    FlowRecord,
    FlowState,
    KernelLogLine,
    NetworkLook,
)
from ncclwatch.model.state import CpuLimit, Direction
from ncclwatch.model.verdict import LinkRef, Verdict, VerdictClass, schema
from unit.engine.evidence.test_cpu_limits import limited
from unit.engine.network_looks import CHANGE, DOWN, HUNG, NIC, SECOND, explained, remembering
from unit.synthetic import absent_from_ring, frozen_ring, looks, silent_link


def test_a_link_that_is_down_is_named_with_its_host_time_and_ranks() -> None:
    verdict = explained(remembering(NetworkLook((NIC,)), NetworkLook((DOWN,), (CHANGE,))), HUNG)
    line = verdict.evidence[-1]
    assert line.startswith("eth0 on node1 is down (no carrier, since ")
    assert line.endswith("; ranks 0, 1 use it")
    assert "eth0 on node1" in verdict.next_steps[0]
    assert verdict.next_steps[1:] == HUNG.next_steps
    assert verdict.planes == ("state", "nic")
    assert (verdict.id, verdict.culprits, verdict.confidence) == (HUNG.id, HUNG.culprits, HUNG.confidence)


def test_a_nic_that_nobody_of_the_verdict_uses_is_not_mentioned() -> None:
    for nic in (replace(DOWN, used_by=()), replace(DOWN, used_by=(7,)), NIC):
        assert explained(remembering(NetworkLook((nic,), (CHANGE,))), HUNG) is HUNG


def test_a_nic_that_the_verdicts_link_names_is_told_although_nobody_was_seen_to_use_it() -> None:
    named = replace(HUNG, link=LinkRef(0, 1, "net", (0,), "eth0"))
    assert "eth0 on node1 is down" in explained(remembering(NetworkLook((replace(DOWN, used_by=()),))), named).evidence[-1]


def test_of_two_containers_on_a_host_the_one_whose_nic_is_down_is_named() -> None:
    pods = [replace(NIC, namespace=namespace, used_by=(rank,)) for rank, namespace in enumerate((71, 72))]
    down = replace(pods[1], up=False, state="down")
    change = replace(CHANGE, namespace=72)
    said = explained(remembering(NetworkLook((pods[0], down), (change,))), HUNG).evidence
    assert [line for line in said if "is down" in line] == [said[-1]]
    assert said[-1].startswith("eth0 (netns 72) on node1 is down (no carrier, since ") and said[-1].endswith("; rank 1 uses it")


def test_a_nic_of_the_same_name_that_others_use_or_on_another_host_is_not_the_one_of_the_link() -> None:
    named = replace(HUNG, link=LinkRef(0, 1, "net", (0,), "eth0"))
    other = replace(DOWN, namespace=73, used_by=())
    assert explained(remembering(NetworkLook((NIC, other))), named) is named
    elsewhere = replace(DOWN, host="node9", used_by=())
    assert explained(remembering(NetworkLook((elsewhere,)), host="node9"), named) is named


def test_counted_errors_are_evidence_and_a_few_are_not() -> None:
    many = replace(NIC, name="mlx5_0:1", kind="rdma", errors={"packet_seq_err": 40, "symbol_error": 2})
    verdict = explained(remembering(NetworkLook((many,))), HUNG)
    assert "mlx5_0:1 on node1 counted errors since watching began: packet_seq_err 40, symbol_error 2" in verdict.evidence[-1]
    assert explained(remembering(NetworkLook((replace(many, errors={"packet_seq_err": 3}),))), HUNG) is HUNG


def test_a_stopped_process_is_not_excused_by_a_nic() -> None:
    stopped = replace(HUNG, verdict_class=VerdictClass.STOPPED)
    assert explained(remembering(NetworkLook((DOWN,), (CHANGE,))), stopped) is stopped


def test_of_a_rank_that_is_missing_a_port_that_is_down_is_told_and_errors_are_not() -> None:
    missing = replace(HUNG, verdict_class=VerdictClass.NOT_ENTERED)
    assert "eth0 on node1 is down" in explained(remembering(NetworkLook((DOWN,), (CHANGE,))), missing).evidence[-1]
    many = replace(NIC, errors={"packet_seq_err": 40})
    assert explained(remembering(NetworkLook((many,))), missing) is missing


def test_a_running_job_gets_no_evidence() -> None:
    running = Verdict(VerdictClass.RUNNING, "running")
    xid = KernelLogLine("node1", "xid", "0000:3b:00", "NVRM: Xid (PCI:0000:3b:00): 79", 0, 3, 79)
    assert explained(remembering(NetworkLook((DOWN,), (CHANGE,), (xid,))), running) is running


def test_an_xid_on_the_culprits_host_is_evidence() -> None:
    xid = KernelLogLine("node1", "xid", "0000:3b:00", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", 0, 3, 79)
    assert explained(remembering(NetworkLook(kernel=(xid,))), HUNG).evidence[-1] == f"kernel log of node1: {xid.text}"
    # Of another process, or of another host, it is none.
    assert explained(remembering(NetworkLook(kernel=(replace(xid, pid=99),))), HUNG) is HUNG
    assert explained(remembering(NetworkLook(kernel=(xid,)), host="node2"), HUNG) is HUNG
    assert explained(remembering(NetworkLook(kernel=(replace(xid, pid=4711),))), HUNG) is not HUNG


def test_whoever_was_killed_for_want_of_memory_on_the_culprits_host_is_told() -> None:
    text, wall_ns = "Out of memory: Killed process 4711 (python)", 1_800_000_000 * SECOND
    killed = KernelLogLine("node1", "memory", "", text, 0, 3, None, 4711, wall_ns)
    said = explained(remembering(NetworkLook(kernel=(killed,))), HUNG)
    assert said.evidence[-1] == f"kernel log of node1, {datetime.fromtimestamp(1_800_000_000):%Y-%m-%d %H:%M:%S}: {killed.text}"
    assert said.next_steps[0].startswith("it was killed for want of memory")
    jsonschema.validate(said.to_json(), schema())
    # One of its helpers, perhaps: evidence where that can be why, and no reason to say what became of the culprit.
    other = remembering(NetworkLook(kernel=(replace(killed, pid=99),)))
    assert explained(other, HUNG) is HUNG
    missing = replace(HUNG, verdict_class=VerdictClass.NOT_ENTERED, since=1_800_000_060.0)
    helped = explained(other, missing)
    assert helped.evidence[-1].endswith(text) and helped.next_steps == missing.next_steps
    assert explained(other, replace(missing, since=1_800_000_600.0)).evidence == missing.evidence, "ten minutes before"
    strange = explained(remembering(NetworkLook(kernel=(replace(killed, wall_ns=1 << 63),))), HUNG)
    assert strange.evidence[-1] == f"kernel log of node1: {text}"


def test_connections_in_trouble_are_evidence_and_data_nobody_reads_only_at_the_culprit() -> None:
    def flow(rank: int, state: FlowState, channel: int = 0) -> FlowRecord:
        return FlowRecord(
            1, FlowKind.SOCKET, "Socket", "eth0", 0, state, f"because {state}", rank, 0xA, rank, channel, 2, Direction.SEND
        )

    dead = NetworkLook(flows=(flow(0, FlowState.STALLED), flow(0, FlowState.STALLED, 1), flow(7, FlowState.STALLED)))
    (line,) = explained(remembering(dead), HUNG).evidence[1:]
    assert line == "rank 0 to rank 2 of its communicator over eth0, channels 0, 1: because stalled"
    unread = NetworkLook(flows=(flow(1, FlowState.BLOCKED), flow(0, FlowState.BLOCKED)))
    (line,) = explained(remembering(unread), HUNG).evidence[1:]
    assert line.startswith("rank 1 to rank 2")
    moving = NetworkLook(flows=(flow(0, FlowState.ACTIVE), flow(1, FlowState.IDLE)))
    assert explained(remembering(moving), HUNG) is HUNG
    # Flows come now and then; what was said long ago is not repeated.
    assert explained(remembering(dead, *[NetworkLook((NIC,))] * 5), HUNG) is not HUNG
    assert explained(remembering(dead, *[NetworkLook((NIC,))] * 12), HUNG) is HUNG


def test_who_is_named_for_standing_still_and_is_held_back_is_shown_so() -> None:
    samples = limited(looks(frozen_ring(2)), {2: (50, 49)})
    verdict = diagnose(samples)
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert "a CPU limit holds it back in 98% of the limit's periods" in verdict.evidence[0]
    assert verdict.summary.endswith("a CPU limit holds it back in 98% of its periods")
    assert verdict.next_steps[0].startswith("on node2: raise the CPU limit of process 1002")


def test_limits_of_others_or_that_hold_nobody_back_are_not_told() -> None:
    for ranks in ({1: (50, 50)}, {2: (50, 2)}, {}):
        verdict = diagnose(limited(looks(frozen_ring(2)), ranks))
        assert not any("CPU limit" in line for line in (*verdict.evidence, *verdict.next_steps))


def test_who_is_held_back_alone_is_given_longer_before_that_is_a_hang() -> None:
    """A rank with a fiftieth of a CPU needs ten seconds for what takes others a fifth of one; for good it is not excused."""

    def said(limits: dict[int, tuple[int, int]], seconds: int) -> Verdict:
        return diagnose(limited(looks(absent_from_ring(), count=seconds), limits), Known(patience=Patience(5)))

    throttled = {2: (50, 49)}
    early = said(throttled, 7)
    assert early.verdict_class is VerdictClass.UNKNOWN and early.culprits == ()
    assert early.summary.endswith("a CPU limit holds rank 2 back in 98% of its periods")
    assert early.next_steps[0].startswith("on node2: raise the CPU limit")
    for limits, seconds in ((throttled, 33), ({}, 7), ({1: (50, 49)}, 7), ({2: (50, 5)}, 7)):
        assert [culprit.rank for culprit in said(limits, seconds).culprits] == [2], (limits, seconds)
    # Where a limit holds everybody back it tells nothing of one of them.
    assert [culprit.rank for culprit in said(dict.fromkeys(range(4), (50, 49)), 7).culprits] == [2]


def test_a_link_with_an_end_that_is_held_back_is_given_longer_too() -> None:
    def said(limits: dict[int, tuple[int, int]], seconds: int, before: CpuLimit | None = None) -> Verdict:
        samples = limited(looks(silent_link(), count=seconds), limits)
        if before is not None:
            samples[2] = [replace(one, cpu_limit=before) for one in samples[2]]
        return diagnose(samples, Known(patience=Patience(5)))

    assert [culprit.rank for culprit in said({}, 7).culprits] == [1, 2]
    for limits, before in (({1: (50, 49)}, None), ({2: (50, 49)}, None), ({}, CpuLimit(139, 125, 7))):
        verdict = said(limits, 7, before)
        assert verdict.verdict_class is VerdictClass.UNKNOWN, (limits, before)
        assert f"a CPU limit holds rank {next(iter(limits), 2)} back in 9" in verdict.summary
    assert [culprit.rank for culprit in said({2: (50, 49)}, 33).culprits] == [1, 2], "for good it is not excused"
    assert said({0: (50, 49)}, 7).culprits and said({}, 7, CpuLimit(139, 12, 7)).culprits, "of others, or hardly at all"
