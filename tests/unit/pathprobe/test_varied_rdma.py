"""Round trips by source port, with a real listener and stand-ins for queue pairs (real ones: ``vm/test_vm_probe.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.paths import Load, Protocol
from ncclwatch.nic.rdma import Gid, RdmaPort
from ncclwatch.pathprobe import hops, look, rdma, varied_rdma
from ncclwatch.pathprobe.listener import Listener
from ncclwatch.pathprobe.verbs import Address
from ncclwatch.wire import abi

HERE = "127.0.0.1"
SLOW_BACK, DEAD = 55555, 50009
GID = "0000:0000:0000:0000:0000:ffff:7f00:0001"


class StandIn:
    """A queue pair whose other end is only known by number: the source port of its answers is the listener's queue pair's."""

    made: ClassVar[list[StandIn]] = []
    slow: ClassVar[set[int]] = set()
    """Source ports that wait on the way there."""

    def __init__(self, device: str, _port: int, _gid: int | None = None) -> None:
        self.device, self.source_port, self.other = device, 0, 0
        self.made.append(self)
        self.address = Address(len(self.made), 7, GID, 0)
        self.open = False

    def __enter__(self) -> StandIn:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def connect(self, other: Address, source_port: int = 0) -> None:
        self.other, self.source_port = other.qp, source_port

    def write(self, _timeout_s: float) -> tuple[abi.Status | None, float]:
        if self.source_port == DEAD:
            return None, 5.0
        waits = self.source_port in self.slow or self.made[self.other - 1].source_port == SLOW_BACK
        return abi.Status.SUCCESS, 0.2 if waits else 0.001


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn.made = []
    for module in (rdma, varied_rdma):
        monkeypatch.setattr(module, "QueuePairProbe", StandIn)


def test_the_quickest_way_back_counts_and_a_dead_port_has_no_round_trips() -> None:
    with Listener(HERE, 0, device="far") as listener:
        trips = varied_rdma.probe(("near", 1), (HERE, listener.port), [50001, 50002, DEAD], 4)
    assert trips == {50001: [1_000_000] * 4, 50002: [1_000_000] * 4, DEAD: []}
    near, far = ([one for one in StandIn.made if one.device == side] for side in ("near", "far"))
    assert [one.source_port for one in near] == [port for port in (50001, 50002, DEAD) for _ in varied_rdma.BACK]
    assert [one.source_port for one in far] == [*varied_rdma.BACK] * 3
    assert not any(one.open for one in near)


def test_a_caller_gets_no_more_queue_pairs_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "MOST_PAIRS", 4)
    with Listener(HERE, 0, device="far") as listener, pytest.raises(NcclwatchError, match="more than 4 queue pairs"):
        varied_rdma.probe(("near", 1), (HERE, listener.port), [50001, 50002], 1)
    assert sum(one.device == "far" for one in StandIn.made) == 4


def test_nobody_listens() -> None:
    with Listener(HERE, 0) as listener:
        port = listener.port
    with pytest.raises(NcclwatchError, match=r"queue pairs could not be agreed on with 127\.0\.0\.1") as told:
        varied_rdma.probe(("near", 1), (HERE, port), [50001], 1)
    assert "probe --listen" in told.value.hint


def test_a_look_has_queues_under_the_ports_of_running_flows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "slow", {50001, 50011})
    port = RdmaPort("near", 1, "Ethernet", "active", "link-up", 100.0, "", None, (Gid(0, GID, "RoCE v2", ""),), {}, {})
    monkeypatch.setattr(look, "read_ports", lambda: [port])
    monkeypatch.setattr(hops, "traces", lambda _, paths, *__: [hops.Trace(path, (), arrived=True) for path in paths])
    with Listener(HERE, 0, device="far") as listener:
        asked = look.Asked(HERE, look.roce((50001, 50002)), look.roce((50011, 50012)), Protocol.UDP, looks=1, rounds=20)
        made = look.look(replace(asked, listener=(listener.port, b"")), "me")
    told = {seen.source_port: (seen.load, seen.live) for seen in made.paths}
    assert told == {
        50001: (Load.QUEUED, False), 50002: (Load.EMPTY, False), 50011: (Load.QUEUED, True), 50012: (Load.EMPTY, True),
    }  # fmt: skip


def test_queues_of_roce_need_an_rdma_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "read_ports", list)
    monkeypatch.setattr(hops, "traces", lambda _, paths, *__: [hops.Trace(path, (), arrived=True) for path in paths])
    with pytest.raises(NcclwatchError, match=r"no RDMA port here has the address 127\.0\.0\.1"):
        look.look(look.Asked(HERE, look.roce((50001,)), protocol=Protocol.UDP, looks=1, rounds=1), "me")


@pytest.mark.parametrize("asked", ["x", -1, 4791, 1 << 40, None, True])
def test_a_port_that_is_none_of_roces_is_not_taken(asked: object) -> None:
    assert rdma._port_in({"source_port": asked}) == 0
