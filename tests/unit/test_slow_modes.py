"""CCL-D's equations as a mode: on times of GPUs, as the shim tells them, and on the hosts' calls where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.cli import main, options
from ncclwatch.cli.recorded import write_series
from ncclwatch.collect.cadence import Cadence, Iteration
from ncclwatch.model.job import assemble
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.slow_modes import HOST, LEARNED_ROUNDS, Ccld, CcldResult, CcldRule, ModeWatch, Round, SlowMode, SlowRule
from unit.engine.slow.gpu_samples import WORLD_SIZE, at, operation
from unit.synthetic import SECOND, Rank, communicator, looks

RUNNING = Verdict(VerdictClass.RUNNING, "")


def run(lasted: dict[int, list[float]], mode: Ccld, rates: list[float] | None = None) -> list[Verdict]:
    """One round a second; from round k on it lasts on each rank as ``lasted[k]`` says."""
    said, watch = [], ModeWatch(lambda: mode)
    for second in range(1, 150):
        times = lasted[max(k for k in lasted if k <= second)]
        ended = [[operation(second, second - 0.9, t)] for t in times]
        (job,) = assemble([[sample] for sample in at(second, ended, rates)])
        said.append(watch.judge(job, RUNNING))
    return said


def test_the_equations() -> None:
    rule = CcldRule(initial=2.0)

    def window(*rounds: tuple[float, list[float]]) -> CcldResult:
        rule.window.extend(Round(1, "AllReduce", time, dict(enumerate(lasted))) for time, lasted in rounds)
        result = rule.close()
        assert result is not None
        return result

    assert rule.close() is None, "nothing was seen"
    first = window((0.0, [1.0, 0.9]))
    assert (first.t_base, first.static) == (2.0, True)
    for second in range(1, LEARNED_ROUNDS + 2):
        window((float(second), [1.0, 0.9]))
    result = window((109.0, [1.0, 1.0]), (110.0, [5.0, 1.1]))
    assert not result.static and result.t_base == pytest.approx(1.0), "the mean of the first hundred rounds"
    assert result.ratio == pytest.approx(4.0) and result.share == pytest.approx(3.9 / 4.0) and result.kind == "S1"
    assert rule.found is None and rule.since == 109.0, "not repeated"
    repeated = window((111.0, [5.0, 4.9]))
    assert rule.found == repeated and repeated.kind == "S2"
    assert window((112.0, [5.0, 3.0])).kind == "S3"
    window((113.0, [1.0, 0.9]))
    assert rule.found is None and rule.since is None
    window((114.0, [5.0, 3.0]))
    assert rule.found is None, "that one was slow before it was healthy again is no repetition"


def test_a_rank_that_comes_late_is_named_by_its_short_time_in_the_operation() -> None:
    said = run({0: [0.1] * 4, 120: [0.8, 0.8, 0.1, 0.8]}, Ccld(window_s=5.0, theta=3.0))
    assert all(verdict is RUNNING for verdict in said[:118])
    last = said[-1]
    assert last.verdict_class is VerdictClass.SLOW_COMPUTATION and [c.rank for c in last.culprits] == [2]
    assert "R = " in last.summary and any("learned" in line for line in last.evidence) and last.planes == ("device",)


def test_an_operation_that_is_slow_for_everybody_is_communication_and_the_lowest_rate_is_named() -> None:
    slow = {0: [0.1] * 4, 120: [0.8, 0.8, 0.79, 0.8]}
    last = run(slow, Ccld(window_s=5.0), rates=[90.0, 20.0, 90.0, 90.0])[-1]
    assert last.verdict_class is VerdictClass.SLOW_COMMUNICATION and [c.rank for c in last.culprits] == [1]
    unknown = run(slow, Ccld(window_s=5.0))[-1]
    assert unknown.verdict_class is VerdictClass.SLOW_COMMUNICATION and not unknown.culprits and unknown.unobserved


def test_the_administrators_base_finds_a_job_that_is_slow_from_the_start() -> None:
    late = {0: [0.8, 0.1, 0.8, 0.8]}
    assert all(verdict is RUNNING for verdict in run(late, Ccld(window_s=5.0)))
    said = run(late, Ccld(window_s=5.0, t_base_s=0.1))
    slow = [verdict for verdict in said if verdict is not RUNNING]
    assert slow and [c.rank for c in slow[0].culprits] == [1] and any("administrator" in line for line in slow[0].evidence)


def test_one_slow_window_and_barriers_say_nothing() -> None:
    once = run({0: [0.1] * 4, 120: [0.8, 0.8, 0.1, 0.8], 121: [0.1] * 4}, Ccld(window_s=5.0))
    assert all(verdict is RUNNING for verdict in once)
    barrier = [[replace(operation(1, 0.1, 0.5), count=1)] for _ in range(4)]
    (job,) = assemble([[sample] for sample in at(1.0, barrier)])
    assert Ccld().rounds(job, [None] * 4) == []


def test_a_round_is_complete_when_every_rank_has_told_and_told_once() -> None:
    rule, nobody = Ccld(), [None] * WORLD_SIZE
    early = [[operation(1, 0.1, 0.2)] for _ in range(3)] + [[]]
    (job,) = assemble([[sample] for sample in at(1.0, early)])
    assert rule.rounds(job, nobody) == []
    everybody = [[operation(1, 0.1, 0.2, duration_ns=SECOND // 4)] for _ in range(4)]
    (job,) = assemble([[sample] for sample in at(2.0, everybody)])
    (done,) = rule.rounds(job, nobody)
    assert done.durations[3] == pytest.approx(0.25), "by the GPU's own clock where it tells"
    assert rule.rounds(job, nobody) == []


def test_without_the_shim_the_wait_at_the_end_of_an_iteration_stands_for_it() -> None:
    cadences = []
    for rank in range(WORLD_SIZE):
        waits = 0.1 if rank == 2 else 0.6
        cadence = Cadence()
        for number in range(4):
            cadence.iterations.append(Iteration(float(number), number + 1.0, number))
            cadence.profiles.append(np.array([0.0, 1.0 - waits, 1.0]))
        cadences.append(cadence)
    ranks = [Rank(r, WORLD_SIZE, (communicator(r, WORLD_SIZE),), host=f"node{r}") for r in range(WORLD_SIZE)]
    (job,) = assemble([[replace(series[-1], time_ns=5 * SECOND, wall_ns=5 * SECOND)] for series in looks(ranks)])
    rule = Ccld()
    found = rule.rounds(job, cadences)
    assert len(found) == 4 and {done.group for done in found} == {HOST} and not rule.by_gpus
    by_rank = {member.rank: found[0].durations[at] for at, member in enumerate(job.members)}
    assert by_rank[2] == pytest.approx(0.1) and by_rank[0] == pytest.approx(0.6)
    assert rule.rounds(job, cadences) == []


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
    assert SlowRule().theta == CcldRule(1.0).theta
    for wrong in (["--slow-mode", "other"], ["--t-base", "1.0"]):
        assert main.run(["attach", "--pid", "1", *wrong]) == 2
        assert "--slow-mode" in capsys.readouterr().err
