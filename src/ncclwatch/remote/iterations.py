"""How long the newest iterations of a judged job took, by the wall clock: what a person wants to see of a job that is slow."""

from __future__ import annotations

from ncclwatch.collect.cadence import Cadence
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.model.job import Job

MAX_ITERATIONS = 64
"""Newest iterations that are told at a time: whoever watches keeps those before."""

Timed = tuple[float, float]
"""(end in seconds since the epoch, duration in seconds)"""


def recent_iterations(diagnosis: LiveDiagnosis) -> list[Timed]:
    """The newest iterations of the largest job, oldest first, by the host call times of one process (an iteration takes as
    long on every rank); empty where no calls are seen, or no period was found in them.
    """
    job = max((job for job, _ in diagnosis.judged), key=lambda job: len(job.members), default=None)
    found = None if job is None else _reference(diagnosis, job)
    if found is None:
        return []
    cadence, offset_s = found
    return [(one.end + offset_s, one.duration) for one in list(cadence.iterations)[-MAX_ITERATIONS:]]


def _reference(diagnosis: LiveDiagnosis, job: Job) -> tuple[Cadence, float] | None:
    """The first process with iterations, and what to add to its node's CLOCK_MONOTONIC for seconds since the epoch."""
    for member in job.members:
        cadence = diagnosis.slow.cadences.of.find(member.info.host, member.info.pid)
        if cadence is not None and len(cadence.iterations) >= 2 and not cadence.is_inner(member.last.time_ns / 1e9):
            return cadence, (member.last.wall_ns - member.last.time_ns) / 1e9
    return None
