"""The memory of what nodes say of their network: who uses a NIC, how long things are kept, and that a session tells of them."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.beside import NETWORK_CLASSES
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.network import (
    FlowKind,
    FlowRecord,
    FlowState,
    KernelLogLine,
    NetworkLook,
    RdmaCounts,
    SocketFacts,
    StepRate,
)
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import VerdictClass
from unit.batches import node_batches
from unit.engine.network_looks import CHANGE, DOWN, HUNG, NIC, SECOND, explained, remembering
from unit.synthetic import frozen_ring


def test_users_are_remembered_from_before_the_link_went_down() -> None:
    memory = remembering(NetworkLook((NIC,)), NetworkLook((replace(DOWN, used_by=()),)))
    assert "ranks 0, 1 use it" in explained(memory, HUNG).evidence[-1]


def test_what_lies_long_back_is_forgotten() -> None:
    memory = remembering(NetworkLook(kernel=(KernelLogLine("node1", "nic", "", "mlx5_core: error", 0, 3),)))
    memory.feed("node1", NetworkLook((NIC,)), 10_000 * SECOND)
    assert explained(memory, HUNG) is HUNG


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
