"""NICs beside a verdict: named when they are in trouble and concern its ranks, silent otherwise."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import jsonschema

from ncclwatch.engine.beside import NETWORK_CLASSES, add_network
from ncclwatch.engine.evidence.base import FactKind, Way
from ncclwatch.engine.evidence.ports import PortDown
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.network import (
    FlowKind,
    FlowRecord,
    FlowState,
    KernelLogLine,
    LinkChange,
    NetworkLook,
    NicRecord,
    RdmaCounts,
    SocketFacts,
    StepRate,
)
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Culprit, LinkRef, Verdict, VerdictClass, schema
from unit.batches import node_batches
from unit.engine.evidence.said import of_network
from unit.synthetic import frozen_ring

SECOND = 1_000_000_000
NIC = NicRecord("node1", "eth0", "netdev", up=True, state="up", used_by=(0, 1))
DOWN = replace(NIC, up=False, state="down")
CHANGE = LinkChange("node1", "eth0", False, "no carrier", 5 * SECOND, 1_700_000_000 * SECOND)
CULPRIT = Culprit(1, 1, "node1", 4711, 0)
HUNG = Verdict(VerdictClass.HARDWARE, "the link stands still", (CULPRIT,), (0,), evidence=("steps",), next_steps=("look",))


def remembering(*looks: NetworkLook, host: str = "node1") -> NetworkMemory:
    memory = NetworkMemory()
    for number, look in enumerate(looks):
        memory.feed(host, look, number * SECOND)
    return memory


def explained(memory: NetworkMemory, verdict: Verdict) -> Verdict:
    return add_network(of_network(memory), verdict)


def ports(*looks: NetworkLook) -> list[PortDown]:
    return [port for port in of_network(remembering(*looks)).facts.of(FactKind.PORT_DOWN, PortDown) if port.nic.used_by]


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


def test_users_are_remembered_from_before_the_link_went_down() -> None:
    memory = remembering(NetworkLook((NIC,)), NetworkLook((replace(DOWN, used_by=()),)))
    assert "ranks 0, 1 use it" in explained(memory, HUNG).evidence[-1]


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


def test_what_lies_long_back_is_forgotten() -> None:
    memory = remembering(NetworkLook(kernel=(KernelLogLine("node1", "nic", "", "mlx5_core: error", 0, 3),)))
    memory.feed("node1", NetworkLook((NIC,)), 10_000 * SECOND)
    assert explained(memory, HUNG) is HUNG


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


def test_a_session_attaches_what_its_nodes_say() -> None:
    """A link down and back up is gone from the verdict too."""
    series = [rank.looks(12) for rank in frozen_ring(2, run_state="S")]
    session = DiagnosisSession()
    for step, batch in enumerate(node_batches([list(looks) for looks in zip(*series, strict=True)])):
        nic = replace(NIC, host="node0", up=step < 3 or step > 9, used_by=tuple(range(4)))
        batch.network = NetworkLook((nic,))
        session.feed(batch)
        update = session.judge(batch.time_ns)
        assert update.verdict is not None and update.nics == [nic]
        named = any("eth0 on node0 is down" in line for line in update.verdict.evidence)
        accuses = update.verdict.verdict_class in NETWORK_CLASSES
        assert named == (accuses and not nic.up)
        if step == 8:
            assert accuses


def test_a_session_blames_the_port_that_went_down_with_the_job() -> None:
    """Nothing of the cut link is left in memory: the waits end at rank 2, the host says that rank 3's port is down."""
    ranks = frozen_ring(2, run_state="S")
    ranks[2].operations = ()
    for rank in ranks:
        rank.host = "node0"
    series = [rank.looks(10) for rank in ranks]
    session = DiagnosisSession()
    for batch in node_batches([list(looks) for looks in zip(*series, strict=True)]):
        batch.network = NetworkLook((replace(NIC, host="node0", up=False, state="no carrier", used_by=(3,)),))
        session.feed(batch)
        told = session.judge(batch.time_ns).told
    assert session.verdict is not None and session.verdict.verdict_class is VerdictClass.HARDWARE
    assert [culprit.rank for culprit in session.verdict.culprits] == [3]
    assert sum("eth0 on node0 is down" in line for line in session.verdict.evidence) == 1
    assert not told, "it was told when it began to stand"


def test_when_a_port_was_down_is_remembered() -> None:
    def change(second: int, *, up: bool) -> LinkChange:
        return replace(CHANGE, up=up, wall_ns=CHANGE.wall_ns + second * SECOND)

    wall = CHANGE.wall_ns / 1e9
    # Up for a moment while the carrier is found; a minute of work before.
    seen = (change(-90, up=False), change(-60, up=True), change(0, up=False), change(20, up=True), change(21, up=False))
    [port] = ports(NetworkLook((DOWN,), seen))
    assert (port.since, port.until) == (wall, None)
    [port] = ports(NetworkLook((NIC,), (*seen, change(22, up=True), change(23, up=True))))
    assert (port.since, port.until) == (wall, wall + 22)
    assert ports(NetworkLook((replace(NIC, used_by=()),), seen)) == []
    assert ports(NetworkLook((NIC,))) == []


def test_what_is_seen_of_the_network_travels_with_a_batch() -> None:
    nic = replace(NIC, kind="rdma", errors={"packet_seq_err": 3}, rate_gbps=200.0, send_rate=1.5, receive_rate=2.5)
    flow = FlowRecord(
        1, FlowKind.RDMA, "IB", "mlx5_0", 1, FlowState.SLOW, "why", direction=Direction.SEND, steps=StepRate(1, 2.0, 3, 4, 5.0),
        rdma=RdmaCounts(1, 2, 3, 4, True, 1.0, 2.0, {"retry-exc-err": 1}), socket=SocketFacts(1, "a", "b"),
    )  # fmt: skip
    line = KernelLogLine("node1", "xid", "0000:3b:00", "text", 5, 3, 79, 7)
    batch = next(node_batches([[rank.looks(1)[0] for rank in frozen_ring(2)]]))
    batch.network = NetworkLook((nic,), (CHANGE,), (line,), (flow,), ("note",))
    assert BatchReader().decode(BatchWriter().encode(batch)).batch.network == batch.network


def trying(timeouts: int | None, unacknowledged: int = 3, peer: int = 2, retries: int = 0) -> FlowRecord:
    """A connection whose sockets have not been answered ``timeouts`` times in a row."""
    return FlowRecord(
        1, FlowKind.SOCKET, "Socket", "eth0", 0, FlowState.ACTIVE, "", 0, 0xA, 1, 0, peer, Direction.SEND, retries=retries,
        socket=SocketFacts(1, "a", "b", timeouts=timeouts, unacknowledged=unacknowledged),
    )  # fmt: skip


def retrying(memory: NetworkMemory) -> dict[Way, float | None]:
    facts = of_network(memory).facts.of(FactKind.RETRYING)
    return {fact.subject: fact.value for fact in facts if isinstance(fact.subject, Way)}


def test_sockets_that_try_again_are_told_until_they_have_tried_often() -> None:
    def told(*flows: FlowRecord) -> dict[int, float | None]:
        return {way.peer: worth for way, worth in retrying(remembering(NetworkLook(flows=flows))).items()}

    assert told(trying(1), trying(4, peer=3), trying(None, peer=4)) == {2: 7, 3: 7}
    assert told(trying(5), trying(2, peer=3, unacknowledged=0), trying(0, peer=4, unacknowledged=0)) == {}
    assert told(trying(0)) == {2: 30}, "something has come through since it was lost"
    assert told(trying(4, retries=14), trying(6, peer=3, retries=16), trying(7, peer=4, retries=90)) == {2: 60, 3: 60}
    assert told(trying(4, retries=13)) == {2: 7}, "of these it waits for four now"
    assert told(trying(1), trying(0), trying(5)) == {2: 30}, "two connections on one way"


def test_a_connection_that_lost_much_is_known_for_it_while_it_stands_still() -> None:
    """What its sockets sent again is counted over 30 s: of a standstill's second half no loss before it can be seen."""

    def told(seconds: int, timeouts: int, retries: int) -> list[float | None]:
        memory.feed("node1", NetworkLook(flows=(trying(timeouts, retries=retries),)), seconds * 1_000_000_000)
        return list(retrying(memory).values())

    memory = NetworkMemory()
    assert told(1000, 0, 12) == [60]
    assert told(1035, 2, 2) == [60]
    assert told(1119, 3, 3) == [60]
    assert told(1121, 3, 3) == [7], "long ago"
