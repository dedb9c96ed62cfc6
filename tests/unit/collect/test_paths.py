"""Probes of paths by a node itself: started, heard, bounded, and joined with the connections they are of."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.collect import paths as module
from ncclwatch.collect.flows import FlowCollector, connection_key
from ncclwatch.collect.paths import MOST_PATHS, PathProbes, StuckPath
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.wire.nccl_connections import NetConnection
from ncclwatch.wire.socket_flows import SocketJudgement

HERE = "127.0.0.1"
SECOND = 1_000_000_000
ONE = NetConnection(0xABC, 2, 0, 3, Direction.SEND, 0, 0x10, "Socket", 0x20, 0, "eth0", 5)
RECORD = FlowRecord(
    os.getpid(), FlowKind.SOCKET, "Socket", "eth0", 1, FlowState.STALLED, comm_hash=0xABC, rank=2, channel=0, peer=3,
    direction=Direction.SEND, connection_index=0,
)  # fmt: skip
KEY = connection_key(os.getpid(), ONE)


def free_port() -> int:
    with socket.create_server((HERE, 0)) as listener:
        return int(listener.getsockname()[1])


def answered(probes: PathProbes, seconds: float = 120) -> FlowRecord:
    deadline = time.monotonic() + seconds
    while probes._running and time.monotonic() < deadline:
        probes.take()
        time.sleep(0.02)
    (record,) = probes.joined([RECORD], time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    return record


def test_a_host_that_answers_without_a_listener_is_alive() -> None:
    probes = PathProbes(port=free_port())
    assert probes.order([StuckPath(KEY, HERE), StuckPath((*KEY[:3], 1, *KEY[4:]), HERE)]) == 1, "one way, one probe"
    path = answered(probes).path
    assert path is not None and (path.alive, path.kind, path.answer, path.address) == (True, "tcp", "refused", HERE)
    later = path.time_ns + module.KEPT_NS
    assert probes.joined([RECORD], later) == (RECORD,), "an old answer is told no more"


def test_nodes_that_share_a_token_answer_one_another() -> None:
    probes = PathProbes(b"sixteen bytes it is", free_port())
    probes.listen()
    try:
        assert probes.plane.running and probes.plane.reason == ""
        assert probes.order([StuckPath(KEY, HERE)]) == 1
        path = answered(probes).path
        assert path is not None and (path.answer, path.alive) == ("ok", True) and path.round_trip_us
    finally:
        probes.close()
    again = PathProbes(b"sixteen bytes it is", probes.port)
    assert again.order([StuckPath(KEY, HERE)]) == 1
    ended = answered(again).path
    assert ended is not None and ended.answer == "refused", "nobody listens any more"


def test_a_port_that_is_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    with socket.create_server(("", 0)) as other:
        probes = PathProbes(b"sixteen bytes it is", int(other.getsockname()[1]))
        probes.listen()
        assert "cannot listen" in probes.plane.reason
        probes.close()


def test_no_more_probes_than_allowed_and_none_that_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(200)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setattr(module, "ENDS_S", 0.2)
    probes = PathProbes()
    assert probes.order([StuckPath(KEY, f"127.0.0.{number}") for number in range(1, 9)]) == MOST_PATHS
    assert probes.order([StuckPath(KEY, HERE)]) == 0, "one order at a time"
    began = time.monotonic()
    assert answered(probes).path is None and time.monotonic() - began < 100
    assert probes._running == []


def test_what_cannot_be_probed_says_nothing() -> None:
    probes = PathProbes()
    gone = (2**22 - 1, *KEY[1:])
    assert probes.order([StuckPath(gone, HERE)]) == 1
    assert answered(probes).path is None


def test_connections_that_wait_for_the_network_are_stuck() -> None:
    class Target:
        pid = os.getpid()
        decoder = None

    flows = FlowCollector([Target()])  # type: ignore[list-item]
    process = flows._processes[os.getpid()]
    taking = replace(ONE, direction=Direction.RECV)
    process.connections = [ONE, taking]
    facts = SocketFacts(1, "10.0.0.1:5", "10.0.0.2:7", unacknowledged=0)
    judged = SocketJudgement(FlowState.BLOCKED, "", facts, None, None, None)
    flows._judged = {connection_key(os.getpid(), one): judged for one in (ONE, taking)}
    assert flows.stuck([os.getpid()]) == [], "nothing is under way"
    process.in_network = {KEY: 3}
    assert flows.stuck([os.getpid(), 4711]) == [StuckPath(KEY, "10.0.0.2")]
    process.in_network = {}
    flows._judged[KEY] = replace(judged, facts=replace(facts, remote="[fe80::2]:7", unacknowledged=4))
    assert flows.stuck([os.getpid()]) == [StuckPath(KEY, "fe80::2")]
