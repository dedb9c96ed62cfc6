"""CCL-D's equations as a mode: on times of GPUs, as the shim tells them, and on the hosts' calls where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.cli import main, options
from ncclwatch.cli.recorded import write_series
from ncclwatch.engine.job import assemble
from ncclwatch.engine.slow.baselines import Ccld
from ncclwatch.engine.slow.cadence import Cadence, Iteration
from ncclwatch.engine.slow.ccld import CcldWatch
from ncclwatch.engine.slow.gpu_times import GpuTimes
from ncclwatch.engine.slow.modes import SlowMode, SlowRule
from ncclwatch.engine.slow.rounds import HOST, Rounds
from ncclwatch.model.device import ConnectionCounter, DeviceCommunicator, DeviceOperation, DeviceSample
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import SECOND, WORLD, Rank, address_of, communicator, looks

WORLD_SIZE = 4
RUNNING = Verdict(VerdictClass.RUNNING, "")


def operation(ordinal: int, began_s: float, lasted_s: float, duration_ns: int | None = None) -> DeviceOperation:
    began = int(began_s * SECOND)
    return DeviceOperation(
        ordinal, "AllReduce", False, ordinal - 1, 1024, None, 2, 2, 2, True, began, started_ns=began,
        finished_ns=began + int(lasted_s * SECOND), duration_ns=duration_ns,
    )  # fmt: skip


def at(second: float, operations: list[list[DeviceOperation]], rates: list[float] | None = None) -> list[ProcessSample]:
    """A look at all ranks; ``operations`` are those that each rank's GPU has ended lately."""
    samples = []
    for rank in range(WORLD_SIZE):
        own = communicator(rank, WORLD_SIZE)
        ended = tuple(operations[rank])
        device = DeviceSample(
            "plugin", 6, "running", 0,
            (DeviceCommunicator(WORLD, address_of(WORLD) + 64, rank, WORLD_SIZE, False, 1, 1, 0, recent=ended),),
            counters=() if rates is None else (
                ConnectionCounter(address_of(WORLD), 0, (rank + 1) % WORLD_SIZE, True, 0, "head", 40, steps_per_s=rates[rank]),
            ),
        )  # fmt: skip
        made = looks([Rank(rank, WORLD_SIZE, (own,), host=f"node{rank}", extra={"device": device})])[0][-1]
        samples.append(replace(made, time_ns=int(second * SECOND), wall_ns=int(second * SECOND)))
    return samples


def run(lasted: dict[int, list[float]], watch: CcldWatch, rates: list[float] | None = None) -> list[Verdict]:
    """One round a second; from round k on it lasts on each rank as ``lasted[k]`` says."""
    said = []
    for second in range(1, 150):
        times = lasted[max(k for k in lasted if k <= second)]
        ended = [[operation(second, second - 0.9, t)] for t in times]
        (job,) = assemble([[sample] for sample in at(second, ended, rates)])
        said.append(watch.judge(job, RUNNING))
    return said


def test_a_rank_that_comes_late_is_named_by_its_short_time_in_the_operation() -> None:
    said = run({0: [0.1] * 4, 120: [0.8, 0.8, 0.1, 0.8]}, CcldWatch(window_s=5.0, theta=3.0))
    assert all(verdict is RUNNING for verdict in said[:118])
    last = said[-1]
    assert last.verdict_class is VerdictClass.SLOW_COMPUTATION and [c.rank for c in last.culprits] == [2]
    assert "R = " in last.summary and any("learned" in line for line in last.evidence) and last.planes == ("device",)


def test_an_operation_that_is_slow_for_everybody_is_communication_and_the_lowest_rate_is_named() -> None:
    slow = {0: [0.1] * 4, 120: [0.8, 0.8, 0.79, 0.8]}
    last = run(slow, CcldWatch(window_s=5.0), rates=[90.0, 20.0, 90.0, 90.0])[-1]
    assert last.verdict_class is VerdictClass.SLOW_COMMUNICATION and [c.rank for c in last.culprits] == [1]
    unknown = run(slow, CcldWatch(window_s=5.0))[-1]
    assert unknown.verdict_class is VerdictClass.SLOW_COMMUNICATION and not unknown.culprits and unknown.unobserved


def test_the_administrators_base_finds_a_job_that_is_slow_from_the_start() -> None:
    late = {0: [0.8, 0.1, 0.8, 0.8]}
    assert all(verdict is RUNNING for verdict in run(late, CcldWatch(window_s=5.0)))
    said = run(late, CcldWatch(window_s=5.0, t_base_s=0.1))
    slow = [verdict for verdict in said if verdict is not RUNNING]
    assert slow and [c.rank for c in slow[0].culprits] == [1] and any("administrator" in line for line in slow[0].evidence)


def test_one_slow_window_and_barriers_say_nothing() -> None:
    once = run({0: [0.1] * 4, 120: [0.8, 0.8, 0.1, 0.8], 121: [0.1] * 4}, CcldWatch(window_s=5.0))
    assert all(verdict is RUNNING for verdict in once)
    barrier = [[replace(operation(1, 0.1, 0.5), count=1)] for _ in range(4)]
    (job,) = assemble([[sample] for sample in at(1.0, barrier)])
    assert Rounds().take(job, [None] * 4) == []


def test_a_round_is_complete_when_every_rank_has_told_and_told_once() -> None:
    rounds = Rounds()
    early = [[operation(1, 0.1, 0.2)] for _ in range(3)] + [[]]
    (job,) = assemble([[sample] for sample in at(1.0, early)])
    assert rounds.take(job, [None] * 4) == []
    everybody = [[operation(1, 0.1, 0.2, duration_ns=SECOND // 4)] for _ in range(4)]
    (job,) = assemble([[sample] for sample in at(2.0, everybody)])
    (done,) = rounds.take(job, [None] * 4)
    assert done.durations[3] == pytest.approx(0.25), "by the GPU's own clock where it tells"
    assert rounds.take(job, [None] * 4) == []


def test_without_the_shim_the_wait_at_the_end_of_an_iteration_stands_for_it() -> None:
    cadences = []
    for rank in range(WORLD_SIZE):
        waits = 0.1 if rank == 2 else 0.6
        cadence = Cadence(marker=1)
        for number in range(4):
            cadence.iterations.append(Iteration(float(number), number + 1.0, number))
            cadence.profiles.append(np.array([0.0, 1.0 - waits, 1.0]))
        cadences.append(cadence)
    ranks = [Rank(r, WORLD_SIZE, (communicator(r, WORLD_SIZE),), host=f"node{r}") for r in range(WORLD_SIZE)]
    (job,) = assemble([[replace(series[-1], time_ns=5 * SECOND, wall_ns=5 * SECOND)] for series in looks(ranks)])
    rounds = Rounds()
    found = rounds.take(job, cadences)
    assert len(found) == 4 and {done.group for done in found} == {HOST} and rounds.plane == "calls"
    by_rank = {member.rank: found[0].durations[member.index] for member in job.members}
    assert by_rank[2] == pytest.approx(0.1) and by_rank[0] == pytest.approx(0.6)
    assert rounds.take(job, cadences) == []


# --- beside our own rule ----------------------------------------------------------------------------------------------------


def test_whose_gpu_comes_late_is_told_across_clocks_that_are_wrong() -> None:
    wrong_s = (0.0, 0.03, -0.05, 0.04)
    times = GpuTimes()
    job = None
    for second in range(1, 20):
        # Everybody ends when the last has come; rank 2 comes 200 ms after the others.
        begins = [second + (0.2 if rank == 2 else 0.0002 * rank) for rank in range(WORLD_SIZE)]
        ended = [[operation(second, begins[r], second + 0.21 - begins[r])] for r in range(WORLD_SIZE)]
        samples = at(second + 0.5, ended)
        shifted = [replace(s, wall_ns=s.wall_ns + int(wrong_s[rank] * SECOND)) for rank, s in enumerate(samples)]
        (job,) = assemble([[sample] for sample in shifted])
        times.take(job)
    assert job is not None
    starts = times.starts(0.0)
    rank_of = {member.index: member.rank for member in job.members}
    assert [rank_of[index] for index in starts] == [2]
    assert starts.popitem()[1].late_s == pytest.approx(0.2, abs=0.005), "durations need no clock"
    assert times.starts(since=1e9) == {}
    model = times.clocks(job)
    for rank, clock in model.clocks.items():
        assert abs(clock.offset_s - (wrong_s[rank] - wrong_s[0])) <= clock.error_s
    assert "clocks of 4 hosts differ by up to" in times.clocks_text(job)


def test_gpus_that_come_together_are_not_told() -> None:
    times = GpuTimes()
    for second in range(1, 10):
        (job,) = assemble([[s] for s in at(second + 0.5, [[operation(second, second + 0.0002 * r, 0.1)] for r in range(4)])])
        times.take(job)
    assert times.starts(0.0) == {} and len(times.kept) == 9


# --- the command line -----------------------------------------------------------------------------------------------------


def test_a_recording_is_judged_by_the_rule_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moments = [at(float(s), [[operation(s, s - 0.9, t)] for t in (0.8, 0.1, 0.8, 0.8)]) for s in range(1, 140, 2)]
    series = [
        [
            replace(moment[rank], communicators=tuple(replace(c, op_count=number) for c in moment[rank].communicators))
            for number, moment in enumerate(moments)
        ]
        for rank in range(WORLD_SIZE)
    ]
    paths = [str(path) for path in write_series(series, tmp_path)]
    assert main.run(["diagnose", *paths, "--exit-code"]) == 0, (
        "by our own rule there is neither a past nor a look that shows a wait"
    )
    capsys.readouterr()
    assert main.run(["diagnose", *paths, "--exit-code", "--slow-mode", "ccl-d", "--t-base", "0.1"]) == 10
    said = capsys.readouterr().out
    assert "CCL-D: S1" in said and "rank 1" in said and "T_base 0.1000 s (the administrator's)" in said


def test_what_the_command_line_says_of_the_modes_is_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(SlowMode) == options.SLOW_MODES
    assert SlowRule().theta == Ccld(1.0).theta
    for wrong in (["--slow-mode", "other"], ["--t-base", "1.0"]):
        assert main.run(["attach", "--pid", "1", *wrong]) == 2
        assert "--slow-mode" in capsys.readouterr().err
