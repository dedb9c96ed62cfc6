"""Whole iterations of a running job as its shims timed them, put together from look to look, and their critical paths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from ncclwatch.collect.cadence import Cadence, Iteration
from ncclwatch.engine.slow.critical_path import IterationAnalysis, Paths
from ncclwatch.engine.slow.gpu_operations import GpuOperations, Operations
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, DeviceSample
from ncclwatch.model.job import Job, assemble
from ncclwatch.model.state import ProcessSample
from unit.synthetic import Rank, address_of, communicator

FIRST, SECOND, PIPES, WORLD = 0xA1, 0xA2, (0xB0, 0xB1), 0xC1
BEGIN = 1000.0
FRAME = 32
TRANSFER = 0.002
WRONG_CLOCK_S = 0.03
"""Of the second host."""


@dataclass
class Op:
    """An operation of one rank; ``work`` is done before it. Messages have a peer (rank in the communicator)."""

    comm: int
    function: str
    work: float
    peer: int = -1


def program(rank: int) -> list[Op]:
    """Two stages of two ranks: the first sends to the second and has a short operation left, then all reduce gradients."""
    if rank < 2:
        return [
            Op(FIRST, "AllReduce", 0.02),
            Op(FIRST, "AllReduce", 0.02),
            Op(PIPES[rank], "Send", 0.0, 1),
            Op(FIRST, "AllReduce", 0.01),
            Op(WORLD, "AllReduce", 0.0),
        ]
    return [
        Op(PIPES[rank - 2], "Recv", 0.0, 0),
        Op(SECOND, "AllReduce", 0.05),
        Op(SECOND, "AllReduce", 0.05),
        Op(WORLD, "AllReduce", 0.0),
    ]


MEMBERS = {FIRST: (0, 1), SECOND: (2, 3), PIPES[0]: (0, 2), PIPES[1]: (1, 3), WORLD: (0, 1, 2, 3)}


@dataclass
class Play:
    """A job played by hand: ``slow(iteration, rank, number of the operation)`` is work added, seconds."""

    slow: Callable[[int, int, int], float] = lambda iteration, rank, number: 0.0
    host_late: Callable[[int, int], float] = lambda iteration, rank: 0.0
    done: dict[tuple[int, int], list[DeviceOperation]] = field(default_factory=lambda: defaultdict(list))
    cadences: list[Cadence] = field(default_factory=lambda: [Cadence() for _ in range(4)])
    ends: list[float] = field(default_factory=lambda: [BEGIN] * 4)

    def run(self, iterations: int) -> None:
        called = [BEGIN] * 4
        for iteration in range(iterations):
            programs = [program(rank) for rank in range(4)]
            at = [0] * 4
            launched = [max(self.ends) + 0.001 + self.host_late(iteration, rank) for rank in range(4)]
            if iteration:
                for rank in range(4):
                    self.cadences[rank].iterations.append(Iteration(called[rank], launched[rank], iteration))
            called = list(launched)
            begins: list[float | None] = [None] * 4
            while any(at[rank] < len(programs[rank]) for rank in range(4)):
                for rank in range(4):
                    if begins[rank] is None and at[rank] < len(programs[rank]):
                        work = programs[rank][at[rank]].work + self.slow(iteration, rank, at[rank])
                        begins[rank] = max(self.ends[rank] + work, launched[rank] + 1e-5 * at[rank] + work)
                for comm, members in MEMBERS.items():
                    ready = [r for r in members if begins[r] is not None and programs[r][at[r]].comm == comm]
                    if len(ready) == len(members):
                        end = max(b for r in members if (b := begins[r]) is not None) + TRANSFER
                        for r in members:
                            self._end(comm, r, programs[r][at[r]], (launched[r] + 1e-5 * at[r], begins[r] or 0.0, end))
                            at[r], begins[r], self.ends[r] = at[r] + 1, None, end

    def _end(self, comm: int, rank: int, op: Op, times: tuple[float, float, float]) -> None:
        made = self.done[comm, rank]
        launched, began, ended = (round(t * 1e9) for t in times)
        message = op.peer >= 0
        made.append(
            DeviceOperation(
                len(made) + 1,
                op.function,
                message,
                None if message else len(made),
                64,
                op.peer if message else None,
                1,
                1,
                1,
                True,
                launched,
                began,
                ended,
                ended - began,
            )
        )

    def look(self, time: float, kept: int = FRAME, without_shim: int = -1) -> Job:
        samples = []
        for rank in range(4):
            held = [comm for comm, members in MEMBERS.items() if rank in members]
            told = []
            for comm in held:
                launched = [o for o in self.done[comm, rank] if o.launched_ns <= time * 1e9]
                recent = tuple(
                    o
                    if (o.finished_ns or 0) <= time * 1e9
                    else replace(o, started=0, finished=0, started_ns=None, finished_ns=None)
                    for o in launched[-kept:]
                )
                own, size = MEMBERS[comm].index(rank), len(MEMBERS[comm])
                told.append(DeviceCommunicator(comm, address_of(comm), own, size, False, len(launched), 0, 0, recent=recent))
            device = DeviceSample("plugin", 4, "on", round(time * 1e9), tuple(told)) if rank != without_shim else None
            comms = tuple(communicator(MEMBERS[c].index(rank), len(MEMBERS[c]), comm_hash=c) for c in held)
            (sample,) = Rank(rank, 4, comms, host=f"host{rank // 2}", extra={"device": device}).looks(1)
            samples.append([self._at(sample, time, rank)])
        (job,) = assemble(samples)
        return job

    @staticmethod
    def _at(sample: ProcessSample, time: float, rank: int) -> ProcessSample:
        wall = time + 1_700_000_000 + (WRONG_CLOCK_S if rank >= 2 else 0.0)
        return replace(sample, time_ns=round(time * 1e9), wall_ns=round(wall * 1e9))


def watched(play: Play, iterations: int = 40, period: float = 0.5, **more: int) -> tuple[Paths, Job]:
    play.run(iterations)
    paths, time = Paths(), BEGIN + period
    everything = [cadence.iterations for cadence in play.cadences]
    while time < max(play.ends):
        known = [Cadence() for _ in everything]
        for cadence, found in zip(known, everything, strict=True):
            cadence.iterations.extend(i for i in found if i.end <= time)
        job = play.look(time, **more)
        paths.take(job, known, 0.2)
        time += period
    return paths, job


def test_a_slow_rank_is_found_with_what_it_costs_and_what_a_bubble_absorbs_costs_nothing() -> None:
    def slow(iteration: int, rank: int, number: int) -> float:
        if iteration < 20:
            return 0.0
        return {(3, 1): 0.3, (0, 3): 0.03}.get((rank, number), 0.0)

    paths, job = watched(Play(slow))
    assert len(paths.kept) >= 10 and paths.problem == ""
    _, _, lines, costs, unobserved = paths.told(job, 0.0)
    assert len(lines) == 2, lines
    assert len(unobserved) == 1 and "clocks of 2 hosts differ by up to" in unobserved[0]
    assert (
        "rank 3" in lines[0]
        and "takes 0.30 s longer than usual before AllReduce 1 of the iteration on the communicator" in lines[0]
    )
    assert "18 operations on 4 GPUs" in lines[0] and "host had not called" not in lines[0]
    assert lines[1].startswith("off the critical path: rank 0") and "took 0.03 s longer and cost nothing" in lines[1]
    assert costs == {3: pytest.approx(0.3, abs=0.005)}


def test_a_host_that_calls_late_is_told_from_a_slow_gpu() -> None:
    paths, job = watched(Play(host_late=lambda iteration, rank: 0.25 if iteration >= 20 and rank == 1 else 0.0))
    (line,) = paths.told(job, 0.0).paths
    assert "rank 1" in line and "0.25 s of it because its host had not called" in line


def test_a_healthy_job_has_no_slow_iterations() -> None:
    paths, job = watched(Play())
    assert paths.analysis.learned and not paths.kept and paths.problem == ""
    assert paths.told(job, 0.0).told and not paths.told(job, 0.0).paths and not paths.told(job, 0.0).costs


def test_what_was_not_seen_whole_is_not_judged_and_why_is_said() -> None:
    paths, _ = watched(Play(), kept=6)
    assert not paths.analysis.learned and "than its frame keeps" in paths.problem
    paths, _ = watched(Play(), without_shim=2)
    assert not paths.analysis.learned and "rank 2" in paths.problem and paths.problem.endswith("has no shim")


def test_ranks_that_did_not_do_the_same_are_not_put_together() -> None:
    play = Play()
    play.run(30)
    play.done[WORLD, 2] = [replace(o, sequence=(o.sequence or 0) + 5) for o in play.done[WORLD, 2]]
    paths = Paths()
    paths.take(play.look(max(play.ends)), play.cadences, 1.0)
    assert paths.problem == "operations of the ranks do not match each other" and not paths.analysis.learned


def test_messages_of_one_group_call_are_one_operation_that_needs_both_its_peers() -> None:
    play = Play()
    play.run(10)
    for comm in PIPES:
        for rank in MEMBERS[comm]:
            both = [[o, replace(o, function={"Send": "Recv", "Recv": "Send"}[o.function])] for o in play.done[comm, rank]]
            play.done[comm, rank] = [replace(o, ordinal=n + 1) for n, o in enumerate(o for pair in both for o in pair)]
    gpus, job = GpuOperations(), play.look(max(play.ends), kept=64)
    gpus.take(job)
    found = gpus.iterations(job, play.cadences)
    assert len(found) >= 5 and {len(one.rank) for one in found} == {18}
    sends = [tuple(sorted(one.rank[row] for row in pair)) for one in found[:1] for pair in one.needs]
    assert sends == [(0, 2), (0, 2), (1, 3), (1, 3)]


def test_an_iteration_with_an_operation_that_is_not_reported_is_left_out_and_the_next_is_not() -> None:
    play = Play()
    play.run(10)
    play.done[WORLD, 2][4] = replace(play.done[WORLD, 2][4], observed=False)
    gpus, job = GpuOperations(), play.look(max(play.ends))
    gpus.take(job)
    begins = [one.before.max() for one in gpus.iterations(job, play.cadences) if one.before is not None]
    usual = float(np.median(np.diff(begins)))
    assert len(begins) >= 5 and np.diff(begins).max() == pytest.approx(2 * usual, rel=0.2), "one is left out"


def pipeline(begin: float, work: float) -> Operations:
    """Two ranks on two nodes, whose clocks differ by 5 s: the first sends to the second, which works and answers."""
    sent, answered = begin + 0.1, begin + 0.1 + 0.001 + work
    begins = np.array([sent, sent + 0.001, begin + 5.0, answered + 5.0])
    ends = np.array([sent + 0.001, answered + 0.001, sent + 5.001, answered + 5.001])
    node = np.array([0, 0, 1, 1])
    return Operations(node, node, np.full(4, -1), np.array([[2, 0], [1, 3]]), begins, ends)


def test_clocks_of_hosts_that_only_messages_join_are_known() -> None:
    analysis = IterationAnalysis()
    for number in range(5):
        assert analysis.look(pipeline(0.202 * number, 0.1)) is None
    assert analysis.learned and analysis.clocks.error < 0.002
    result = analysis.look(pipeline(1.01, 0.9))
    assert result is not None and [(a.operation, a.work) for a in result.culprits] == [(3, True)]
    assert analysis.last is not None
    assert analysis.last.duration - analysis.last.without(result.culprits) == pytest.approx(0.8, abs=0.01)
