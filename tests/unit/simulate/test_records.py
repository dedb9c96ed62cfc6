"""What the simulated collectors hand over: consistent counters, version flavours, imperfections, and nothing of the scenario."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ncclwatch.model.events import Function, Kind
from ncclwatch.model.state import Communicator, Direction, OpPhase, ProcessSample
from ncclwatch.simulate.observe import HOST_PREFIX, SIMULATED_LIBRARY, Cast
from ncclwatch.simulate.records import Observer, call_events
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, parse
from ncclwatch.simulate.state_plane import StateReader
from ncclwatch.simulate.wire import RecordSet, decode, encode


def make(faults: list[dict[str, Any]] | None = None, **tables: Any) -> Scenario:
    data: dict[str, Any] = {"name": "t", "title": "t", "seed": 3, "layout": {"tp": 2, "pp": 2, "dp": 2, "ranks_per_node": 4}}
    data["workload"] = {"iterations": 4, "dp_bytes": 64 << 20}
    data["network"] = {"intra_node": "net", **tables.pop("network", {})}
    data |= tables
    data["faults"] = faults or []
    data["expect"] = {"score_class": "H1", "verdicts": ["stopped"], "ranks": [3]} if faults else {"score_class": "clean"}
    return parse(data)


STOP = {"kind": "stop", "rank": 3, "iteration": 2, "role": "dp", "offset_ms": 1.0}


def hung_samples(scenario: Scenario) -> list[ProcessSample]:
    timeline = simulate(scenario)
    return StateReader(timeline).sample(timeline.end + 2.0)


def sides(samples: list[ProcessSample], direction: Direction) -> dict[tuple[Any, ...], Any]:
    found = {}
    for sample in samples:
        for operation in sample.operations:
            if operation.direction is direction and operation.phase is OpPhase.PROGRESS:
                for sub in operation.subs:
                    ends = (sub.rank, sub.peer) if direction is Direction.SEND else (sub.peer, sub.rank)
                    found[operation.comm_hash, sub.channel, *ends, operation.is_point_to_point] = (operation, sub)
    return found


def test_everything_says_that_it_is_simulated() -> None:
    for sample in hung_samples(make([STOP])):
        assert sample.process.host.startswith(HOST_PREFIX)
        assert sample.process.library == SIMULATED_LIBRARY


@pytest.mark.parametrize("kind", ["stop", "gpu-stall", "proxy-stall", "never-enters"])
def test_both_ends_of_a_connection_agree(kind: str) -> None:
    samples = hung_samples(make([STOP | {"kind": kind}]))
    senders, receivers = sides(samples, Direction.SEND), sides(samples, Direction.RECV)
    both = set(senders) & set(receivers)
    assert len(both) >= 4
    compared = 0
    for key in both:
        (_, send), (_, receive) = senders[key], receivers[key]
        if send.base != receive.base:
            continue
        compared += 1
        assert send.nsteps == receive.nsteps
        assert receive.done <= receive.transmitted <= receive.received <= send.transmitted
        assert send.transmitted <= (send.gpu_ready or 0)
        assert send.done <= send.transmitted <= receive.posted
        assert send.posted <= send.done + 8
    assert compared >= 4


def test_a_stopped_rank_is_seen_stopped_and_a_killed_one_gone() -> None:
    stopped = hung_samples(make([STOP]))
    assert [s.process.rank for s in stopped if s.run_state == "T"] == [3]
    killed = hung_samples(make([STOP | {"kind": "kill"}]))
    assert [(s.process.rank, len(s.communicators)) for s in killed if s.run_state == "X"] == [(3, 0)]
    errors = {s.process.rank for s in killed for c in s.communicators if c.async_result == "ncclRemoteError"}
    assert errors == {1, 2, 7}, "its neighbours in data, tensor and pipeline groups lost their sockets"


def test_nothing_moves_once_the_job_stands() -> None:
    timeline = simulate(make([STOP]))
    reader = StateReader(timeline)
    first, second = reader.sample(timeline.end + 1), reader.sample(timeline.end + 2)
    assert [(s.operations, s.communicators) for s in first] == [(s.operations, s.communicators) for s in second]


def test_a_running_job_moves() -> None:
    reader = StateReader(simulate(make()))
    first, second = reader.sample(1.5), reader.sample(2.0)
    assert all(a.communicators != b.communicators for a, b in zip(first, second, strict=True))
    with pytest.raises(ValueError, match="in order of time"):
        reader.sample(1.0)


def by_size(samples: list[ProcessSample], nranks: int) -> list[Communicator]:
    return [c for s in samples for c in s.communicators if c.nranks == nranks]


@pytest.mark.parametrize(("version", "everywhere"), [("2.21.5", True), ("2.27.5", False), ("2.30.7", False), ("2.32.3", True)])
def test_what_op_count_counts_depends_on_the_version(version: str, everywhere: bool) -> None:
    """Hosts of 3 and 1 ranks: of the four, the two at the border and the one alone have proxy work, the one in the middle has
    none.
    """
    scenario = make(network={"nccl": version, "intra_node": "shm"}, layout={"tp": 4, "ranks_per_node": 3})
    samples = StateReader(simulate(scenario)).sample(2.0)
    counts = [next(c.op_count for c in s.communicators if c.collective_count) for s in samples]
    assert counts[0] == counts[2] == counts[3] != 0
    assert counts[1] == (counts[0] if everywhere else 0)
    has_numbers = any(c.sequence_numbers for s in samples for c in s.communicators)
    assert has_numbers == (version != "2.21.5")


def test_transports_show_what_they_show() -> None:
    one = {"tp": 2, "dp": 2, "ranks_per_node": 8}
    shared = StateReader(simulate(make(network={"intra_node": "shm"}, layout=one))).sample(2.0)
    assert not any(s.operations for s in shared)
    heads = [h for s in shared for c in s.communicators for h in c.host_connections]
    assert heads
    assert all((h.head or 0) <= (h.tail or 0) for h in heads)
    assert any(h.tail for h in heads)
    nvlink = StateReader(simulate(make(network={"intra_node": "p2p"}, layout=one))).sample(2.0)
    assert not any(s.operations or c.host_connections for s in nvlink for c in s.communicators)


def test_a_rank_that_never_initialises_has_no_communicator() -> None:
    samples = hung_samples(make([{"kind": "init-missing", "rank": 5}]))
    for sample in samples:
        states = [c.init_state for c in sample.communicators]
        assert states == ([] if sample.process.rank == 5 else ["ncclInProgress"])


def test_calls_are_those_of_the_program() -> None:
    timeline = simulate(make())
    rows = np.concatenate([events for _, events in call_events(timeline, Cast(timeline.scenario))])
    own = rows[rows["pid"] == 10_000]
    assert np.count_nonzero(own["function"] == Function.ALL_REDUCE) == 4 * 4 * 2 * 2 * 2
    assert np.count_nonzero(own["function"] == Function.REDUCE_SCATTER) == 4
    assert np.count_nonzero(own["function"] == Function.SEND) == np.count_nonzero(own["function"] == Function.RECV) == 16
    assert np.count_nonzero(own["function"] == Function.GROUP_START) == np.count_nonzero(own["function"] == Function.GROUP_END)
    gradients = own[own["function"] == Function.REDUCE_SCATTER]
    assert set(gradients["count"].tolist()) == {(64 << 20) // 4 // 2}
    times = own["time_ns"].astype(np.int64)
    assert (np.diff(times) >= 0).all()


def test_losses_are_counted_and_late_records_come_late() -> None:
    observe = {"planes": ["calls"], "loss": 0.1, "late_fraction": 0.5, "late_ms": 400.0}
    timeline = simulate(make(observe=observe))
    whole = sum(len(e) for _, e in call_events(timeline, Cast(timeline.scenario)))
    observer = Observer(timeline, [])
    late = observer.until(timeline.end + 10)
    kept = sum(len(e) for e in late.calls.values())
    creation = 8 * 2 * 4
    assert kept + sum(late.lost.values()) == whole + creation
    assert 0.05 < sum(late.lost.values()) / whole < 0.15
    early = observer.until(2.0)
    called = sum(int((e["kind"] == Kind.ENTER).sum()) for e in early.calls.values())
    prompt = Observer(simulate(make(observe=observe | {"late_fraction": 0.0})), []).until(2.0)
    assert called < sum(int((e["kind"] == Kind.ENTER).sum()) for e in prompt.calls.values())


def test_missing_planes_and_nodes_are_missing() -> None:
    timeline = simulate(make(observe={"planes": ["state"], "missing_nodes": [1]}))
    records = Observer(timeline, [1.5, 2.0]).until(2.5)
    assert len(Observer(timeline, [1.5, 2.0]).until(math.inf).samples) == len(records.samples) > 0
    assert not records.calls
    assert {s.process.host for series in records.samples for s in series} == {f"{HOST_PREFIX}0"}


def test_clocks_of_nodes_differ_as_told() -> None:
    scenario = make(observe={"clock_offset_ms": 50.0, "clock_drift_ppm": 100.0})
    a, b = Cast(scenario).clocks
    assert a.offset_s != b.offset_s
    assert max(abs(a.offset_s), abs(b.offset_s)) <= 0.05
    assert a.wall_ns(100.0) - a.wall_ns(0.0) != b.wall_ns(100.0) - b.wall_ns(0.0)


def test_records_pass_through_bytes_unchanged_and_carry_nothing_else() -> None:
    scenario = make([STOP], observe={"planes": ["calls", "state", "timing"]}, title="secret-title")
    timeline = simulate(scenario)
    records = Observer(timeline, [2.0, 3.0]).until(4.0)
    data = encode(records)
    back = decode(data)
    assert back.samples == records.samples
    assert back.planes == records.planes
    for host, events in records.calls.items():
        assert (back.calls[host] == events).all()
    for word in (b"secret-title", b"fault", b"expect", b"stop"):
        assert word not in data
    assert decode(encode(RecordSet())).samples == []


def test_hosts_list_the_round_trips_of_their_sockets() -> None:
    late = {"kind": "slow-link", "rank": 0, "peer": 2, "start_s": 0.5, "delay_ms": 20.0}
    observe, workload = {"planes": ["wire"], "missing_nodes": [1]}, {"iterations": 12, "dp_bytes": 64 << 20}
    timeline = simulate(make([late], network={"net": "socket"}, observe=observe, workload=workload))
    observer = Observer(timeline, [])
    assert observer.until(0.5).network == [], "before the job is made"
    listed = observer.until(timeline.end).network
    assert {host for host, _, _, _ in listed} == {f"{HOST_PREFIX}0"}
    slow = {
        (flow.global_rank, flow.comm_hash)
        for _, _, _, look in listed for flow in look.flows if flow.sends_data and (flow.delay_us or 0) > 10_000
    }  # fmt: skip
    assert {rank for rank, _ in slow} == {0, 2} and len({group for _, group in slow}) == 1, "there and back: both ends measure it"
    assert Observer(simulate(make(observe={"planes": ["wire"]})), []).until(9.0).network == [], "InfiniBand has none"


def test_timings_show_only_what_has_happened() -> None:
    timeline = simulate(make([STOP], observe={"planes": ["timing"]}))
    rows = np.concatenate(list(Observer(timeline, []).until(timeline.end + 5).timings.values()))
    unfinished = rows[rows["finished_ns"] == 0]
    assert len(unfinished)
    finished = rows[rows["finished_ns"] > 0]
    assert (finished["called_ns"] <= finished["started_ns"]).all()
    assert (finished["started_ns"] <= finished["finished_ns"]).all()
