"""Flows of a real job over sockets: each connection with its channel, peer, sockets and rates."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState
from ncclwatch.nic.sockets import tcp_sockets_by_descriptor
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.nccl_connections import net_connections
from ncclwatch.wire.nccl_sockets import connection_sockets
from testbed.job import VERSIONS, Job, available

pytestmark = pytest.mark.attach


def command(*words: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "ncclwatch", "flows", "--json", *words], capture_output=True, text=True, timeout=60, check=True
    )
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


@pytest.mark.parametrize("nccl", ["2.19.3", *VERSIONS])
def test_both_ends_of_a_connection_are_the_two_ends_of_one_socket(nccl: str) -> None:
    """The join is proved by the network itself: what one rank sends on a channel arrives by the same TCP connection."""
    if not available(nccl):
        pytest.skip(f"NCCL {nccl} is not in the cache")
    extra = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"} if nccl == VERSIONS[1] else {}
    with Job(nccl=nccl, ranks=2, transport="socket", env=extra) as job:
        ends: dict[tuple[int, int, str], set[frozenset[tuple[str, int]]]] = {}
        for rank in range(2):
            with TargetProcess.open(job.pid(rank)) as target:
                target.sample()
                sockets = tcp_sockets_by_descriptor([target.pid])[target.pid]
                connections = net_connections(target.decoder, target.load_bias, target.communicator_states)
                assert connections
                for one in connections:
                    assert (one.network, one.device) == ("Socket", "lo")
                    found = connection_sockets(target.decoder, one.communicator, sockets)
                    assert len(found) == (5 if extra else 1 + len(found[1:]))
                    places = {
                        frozenset([(sockets[fd].local, sockets[fd].local_port), (sockets[fd].remote, sockets[fd].remote_port)])
                        for fd in found
                    }
                    sender, receiver = (one.rank, one.peer) if one.direction == "send" else (one.peer, one.rank)
                    ends.setdefault((one.channel, sender, f"to {receiver}"), set())
                    known = ends[one.channel, sender, f"to {receiver}"]
                    assert not known or known == places
                    known |= places
        assert len({place for places in ends.values() for place in places}) == sum(len(places) for places in ends.values())


def test_flows_of_a_running_job() -> None:
    with Job(ranks=2, transport="socket") as job:
        answer = command("--pid", f"{job.pid(0)},{job.pid(1)}", "--duration", "1")
    assert answer["schema"] == "ncclwatch.flows/1"
    assert answer["planes"]["wire"]["running"] is False
    assert all("TCP sockets" in process["wire_unavailable"] for process in answer["processes"])
    flows = answer["flows"]
    assert {(flow["global_rank"], flow["peer"], flow["direction"]) for flow in flows} == {
        (rank, 1 - rank, way) for rank in (0, 1) for way in ("send", "recv")
    }
    for flow in flows:
        assert (flow["kind"], flow["network"], flow["device"], flow["state"]) == ("socket", "Socket", "lo", "active")
        assert flow["bandwidth"] > 0
        assert flow["steps"]["per_second"] > 0
        assert flow["steps"]["rate"] == pytest.approx(1 / flow["steps"]["changes"])
        assert flow["socket"]["rtt_us"] is not None
    # A ring of two: what one sends the other receives.
    rates = {(flow["global_rank"], flow["channel"], flow["direction"]): flow["steps"]["per_second"] for flow in flows}
    for (rank, channel, direction), value in rates.items():
        other = rates[1 - rank, channel, "recv" if direction == "send" else "send"]
        assert value == pytest.approx(other, rel=0.2)


def test_data_that_a_stopped_process_does_not_read_is_not_blamed_on_the_path() -> None:
    with Job(ranks=2, transport="socket", count=1 << 22) as job:
        pids = list(job.pids)
        targets = [TargetProcess.open(pid) for pid in job.pids]
        try:
            collector = FlowCollector(targets)
            collector.step()
            job.freeze(1)
            blocked: list[FlowRecord] = []
            deadline = time.monotonic() + 60
            while not blocked and time.monotonic() < deadline:
                time.sleep(0.1)
                collector.step()
                found = collector.flows()
                blocked = [flow for flow in found if flow.state is FlowState.BLOCKED]
            job.thaw(1)
        finally:
            for target in targets:
                target.close()
    assert {flow.kind for flow in found} == {FlowKind.SOCKET}
    assert not [flow for flow in found if flow.state.is_trouble]
    # Its own end has what it does not read, or the other end what it cannot get rid of; and that one does not read what came
    # before, when its own buffers are full because its GPU waits.
    assert {(flow.pid, flow.direction) for flow in blocked} <= {(pids[1], "recv"), (pids[0], "send"), (pids[0], "recv")}
    assert all("read" in flow.reason for flow in blocked)


def test_a_process_that_ends_is_let_go() -> None:
    with Job(ranks=2, transport="socket") as job:
        targets = [TargetProcess.open(pid) for pid in job.pids]
        try:
            collector = FlowCollector(targets)
            collector.step()
            job.kill(1)
            collector.step()
            assert {flow.pid for flow in collector.flows()} == {job.pid(0)}
            assert any("has ended" in text for text in collector.notes)
        finally:
            for target in targets:
                target.close()
