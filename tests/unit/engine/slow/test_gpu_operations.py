"""Collectives as GPUs timed them: which all ranks have told, and whose GPU comes late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.slow.gpu_operations import GpuOperations
from ncclwatch.model.job import assemble
from unit.engine.slow.gpu_samples import WORLD_SIZE, at, operation
from unit.synthetic import SECOND


def test_barriers_complete_nothing() -> None:
    barrier = [[replace(operation(1, 0.1, 0.5), count=1)] for _ in range(4)]
    (job,) = assemble([[sample] for sample in at(1.0, barrier)])
    times = GpuOperations()
    times.take(job)
    assert not len(times.complete(job)[0]) and len(times.rows) == 4


def test_whose_gpu_comes_late_is_told_across_clocks_that_are_wrong() -> None:
    wrong_s = (0.0, 0.03, -0.05, 0.04)
    times = GpuOperations()
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
    starts = times.starts(job, 0.0)
    assert [job.members[at].rank for at in starts] == [2]
    assert starts.popitem()[1].late_s == pytest.approx(0.2, abs=0.005), "durations need no clock"
    assert times.starts(job, since=1e9) == {}


def test_gpus_that_come_together_are_not_told() -> None:
    times = GpuOperations()
    for second in range(1, 10):
        (job,) = assemble([[s] for s in at(second + 0.5, [[operation(second, second + 0.0002 * r, 0.1)] for r in range(4)])])
        times.take(job)
    assert times.starts(job, 0.0) == {} and len(times.complete(job)[2]) == 9
