"""Windows of work beside the samples of a node: who is counted, whose a queue pair is, sockets, totals of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ncclwatch.collect import work as module
from ncclwatch.collect.flows import FlowCollector, connection_key
from ncclwatch.collect.step_rates import StepRates
from ncclwatch.collect.work import WorkWatch
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, SocketFacts, StepRate
from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.wire.contexts import QueuePair, VerbsFile
from ncclwatch.wire.nccl_connections import NetConnection
from ncclwatch.wire.orders import Owner, Report, User
from ncclwatch.wire.socket_flows import SocketJudgement
from unit.synthetic import SECOND, Rank, communicator

IB = NetConnection(0xABC, 2, 0, 3, Direction.SEND, 0, 0x10, "IB", 0x20, 0, "mlx5_0", 5)
SOCKET = replace(IB, network="Socket", device="eth0")


@dataclass
class Info:
    rank: int | None = 2


@dataclass
class Target:
    pid: int
    info: Info = field(default_factory=Info)
    decoder: object = None


@dataclass
class Flows:
    """What a collector of flows has looked at."""

    targets: list[tuple[Target, list[NetConnection]]]
    judged: dict[Any, SocketJudgement] = field(default_factory=dict)
    rates: Any = field(default_factory=StepRates)

    def networks(self) -> dict[int, tuple[str, ...]]:
        return {target.pid: ("IB",) for target, _ in self.targets}

    def connections(self) -> Iterator[tuple[Target, Sequence[NetConnection]]]:
        return iter(self.targets)

    def socket_of(self, pid: int, one: NetConnection) -> SocketJudgement | None:
        return self.judged.get(connection_key(pid, one))


class Wire:
    """The process of the plane, as far as it is told and heard."""

    def __init__(self, *_: object) -> None:
        self.users: list[User] = []
        self.owners: list[Owner] = []
        self.said: list[Report] = []
        self.running, self.reason, self.bill = False, "nobody", None
        self.reasons: dict[int, str] = {}

    def follow(self, users: list[User]) -> None:
        self.users = list(users)

    def own(self, owners: list[Owner]) -> None:
        self.owners = list(owners)

    def close(self) -> None:
        self.users = []

    def reports(self) -> list[Report]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> WorkWatch:
    monkeypatch.setattr(module, "WireProcess", Wire)
    monkeypatch.setattr(module, "verbs_files", lambda pid: [VerbsFile(3, "uverbs0", "mlx5_0")] if pid == 7 else [])
    return WorkWatch()


def follow(watch: WorkWatch, flows: Flows) -> Any:
    watch.follow(flows, [target for target, _ in flows.targets])  # type: ignore[arg-type,misc]
    return watch._wire


def window(scope: Scope = Scope.FLOW, *, end: int = 10, **fields: Any) -> FlowWindow:
    work = WorkWindow(Counting.BURSTS, 0, end * SECOND, 0.01, posted=5, posted_bytes=50, in_flight=1, latency_p50_ns=9e3)
    place: dict[str, Any] = {
        "comm_hash": 0xABC,
        "rank": 2,
        "channel": 0,
        "peer": 3,
        "direction": Direction.SEND,
        "connection_index": 0,
    }
    return FlowWindow(7, scope, work, global_rank=2, **(place if scope is Scope.FLOW else {}), **fields)


def test_only_who_has_a_device_open_is_counted_and_its_queue_pairs_are_looked_up_once(
    watch: WorkWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def pairs_of(_: object, one: NetConnection) -> list[QueuePair]:
        looked.append(one.communicator)
        pair = QueuePair.__new__(QueuePair)
        object.__setattr__(pair, "context", 0xC0)
        object.__setattr__(pair, "number", 17)
        return [pair]

    monkeypatch.setattr(module, "pairs_of", pairs_of)
    flows = Flows([(Target(7), [IB]), (Target(8), [SOCKET])])
    wire = follow(watch, flows)
    assert wire.users == [User(7, ("IB",))]
    assert wire.owners == [Owner(7, 0xC0, 17, 0xABC, 2, 0, 3, Direction.SEND, 2, 0)]
    wire.owners = []
    follow(watch, flows)
    assert looked == [IB.communicator] and wire.owners == [], "the same list of connections is not walked again"
    follow(watch, Flows([(Target(7), [replace(IB, step=99)])]))
    assert looked == [IB.communicator] and wire.owners == [], "nor are they told anew where they are the same"
    # A connection that was made anew has other queue pairs.
    follow(watch, Flows([(Target(7), [replace(IB, communicator=0x99)])]))
    assert looked == [IB.communicator, 0x99]
    follow(watch, Flows([]))
    assert wire.users == [] and not watch._owners


def test_the_plane_says_why_it_does_not_run(watch: WorkWatch) -> None:
    wire: Any = watch._wire
    assert (watch.plane.running, watch.plane.reason) == (False, "nobody")
    wire.running, wire.reason, wire.reasons = True, "", {7: "no ibv_context found", 8: "it has ended"}
    assert (watch.plane.running, watch.plane.reason) == (False, "it has ended; no ibv_context found")
    wire.reasons[9] = ""
    assert (watch.plane.running, watch.plane.reason) == (True, "")


def test_windows_come_with_their_host_and_ccl_ds_rates_and_make_the_rank_s_own(watch: WorkWatch) -> None:
    class Rates:
        def rate(self, key: object) -> StepRate | None:
            return StepRate(9, 2.0, 4, 10, 10.0) if key == (7, 0xABC, 2, 0, 3, Direction.SEND, 0) else None

    wire: Any = watch._wire
    peer = replace(window(Scope.PEER), comm_hash=0xABC, rank=2, peer=3)
    wire.said = [Report((window(Scope.PORT, end=5), window(Scope.PORT), peer, window(queue_pair=17)))]
    found = watch.take(Flows([], rates=Rates()), "node7", looked=False)  # type: ignore[arg-type]
    assert {w.host for w in found} == {"node7"}
    assert {w.scope: w.work.send_rate for w in found} == {Scope.FLOW: 0.25, Scope.PORT: 0.25, Scope.PEER: 0.25}
    key = ProcessKey("boot", 7, 1, "build")
    alone = watch.of_rank(key, None, alone=True)
    # Of two windows of a port that came together the newest.
    assert alone is not None and (alone.end_ns, alone.posted) == (10 * SECOND, 5)
    own = replace(communicator(2, 4, comm_hash=0xABC))
    [sample] = Rank(2, 4, (own,)).looks(1)
    both = watch.of_rank(key, sample, alone=False)
    assert both is not None and both.posted == 5
    assert watch.of_rank(replace(key, pid=99), sample, alone=False) is None
    assert watch.take(Flows([]), "node7", looked=False) == ()  # type: ignore[arg-type]
    assert watch.of_rank(key, None, alone=True) == alone


def test_connections_are_joined_with_what_was_counted_while_that_is_fresh(watch: WorkWatch) -> None:
    wire: Any = watch._wire
    wire.said = [Report((window(queue_pair=17, role="data"), window(queue_pair=18)))]
    watch.take(Flows([]), "node7", looked=False)  # type: ignore[arg-type]
    record = FlowRecord(
        7, FlowKind.RDMA, "IB", "mlx5_0", 1, FlowState.ACTIVE, comm_hash=0xABC, rank=2, channel=0, peer=3,
        direction=Direction.SEND, connection_index=0,
    )  # fmt: skip
    other = replace(record, peer=1)
    first, second = watch.joined([record, other], 20 * SECOND)
    # Of several queue pairs the busiest, which comes first.
    assert first.rdma is not None and (first.rdma.queue_pair, first.rdma.posted, first.delay_us) == (17, 5, 9.0)
    assert second == other
    assert watch.joined([record], 100 * SECOND) == (record,)


def judgement(moved: int, at_s: float) -> SocketJudgement:
    facts = SocketFacts(1, "10.0.0.1:5", "10.0.0.2:7", rtt_us=80)
    return SocketJudgement(FlowState.ACTIVE, "", facts, 5e8, None, 0, moved, round(at_s * SECOND))


def test_sockets_have_windows_of_all_the_time(watch: WorkWatch) -> None:
    taking = replace(SOCKET, direction=Direction.RECV, peer=1)
    flows: Any = Flows([(Target(8), [SOCKET, taking])])
    keys = [connection_key(8, one) for one in (SOCKET, taking)]

    def look(sent: int, received: int, at_s: float) -> dict[tuple[Scope, Direction | None], FlowWindow]:
        flows.judged = {keys[0]: judgement(sent, at_s), keys[1]: judgement(received, at_s)}
        return {(w.scope, w.direction): w for w in watch.take(flows, "h", looked=True)}

    assert look(1000, 500, 10.0) == {}
    assert look(1500, 600, 11.0) == {}
    assert watch.take(flows, "h", looked=False) == ()
    found = look(3000, 900, 12.5)
    send, take = found[Scope.FLOW, Direction.SEND].work, found[Scope.FLOW, Direction.RECV].work
    assert (send.begin_ns, send.end_ns, send.coverage, send.uncertainty) == (10 * SECOND, round(12.5 * SECOND), 1.0, 0.0)
    assert (send.posted_bytes, send.bytes_per_s, send.latency_p50_ns, send.throughput) == (2000, 800.0, 80e3, 5e8)
    assert (take.posted_bytes, take.received_bytes, take.latency_p50_ns, take.posted) == (0, 400, None, None)
    port = found[Scope.PORT, None]
    assert (port.device, port.work.posted_bytes, port.work.received_bytes, port.work.throughput) == ("eth0", 2000, 400, 5e8)
    assert found[Scope.FLOW, Direction.SEND].remote == "10.0.0.2:7"
    # Connections that were made anew count from nothing: no window spans the change.
    assert look(10, 1000, 15.0).keys() == {(Scope.FLOW, Direction.RECV), (Scope.PORT, None), (Scope.PEER, None)}
    assert look(30, 1100, 18.0)[Scope.FLOW, Direction.SEND].work.posted_bytes == 20


def test_once_given_up_nothing_is_counted_and_the_plane_says_why(watch: WorkWatch) -> None:
    flows: Any = Flows([(Target(7), []), (Target(8), [SOCKET])])
    follow(watch, flows)
    watch.give_up("ValueError: \x1b[2Jnonsense")
    assert not watch.plane.running and "nonsense" in watch.plane.reason and "\x1b" not in watch.plane.reason
    follow(watch, flows)
    assert watch.take(flows, "h", looked=True) == ()
    assert watch._wire.users == []  # type: ignore[attr-defined]


def test_processes_without_an_rdma_device_are_asked_ever_more_rarely_until_another_comes(
    watch: WorkWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    ones = [SimpleNamespace(pid=pid) for pid in (11, 12)]
    for second in range(200):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda now=1000.0 + second: now))
        monkeypatch.setattr(module, "verbs_files", lambda pid, second=second: asked.append((second, pid)))
        watch.follow(FlowCollector(()), ones[: 2 if second >= 150 else 1])  # type: ignore[arg-type]
    assert [second for second, pid in asked if pid == 11] == [0, 10, 30, 70, 130, 160, 170, 190]
    assert [second for second, pid in asked if pid == 12] == [150, 160, 170, 190]
